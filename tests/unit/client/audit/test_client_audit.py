"""The audit's pure parts: columns, leaves, tries, dumps; each against a slower second way."""

import gzip
import json
import os
import re
from collections import Counter
from dataclasses import fields
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import rlp
from hypothesis import given, settings, strategies as st
from trie import HexaryTrie

from muster import chain
from muster.client.audit import money, work
from muster.client.audit.command import _show
from muster.client.audit.contradictions import MAX_LISTED, Contradiction, Kind, summarise
from muster.client.audit.dump import DumpedBlock, DumpEnd, DumpReader, writing_dump
from muster.client.audit.evidence import MAX_SMALL_BYTES, EvidenceFolders
from muster.client.audit.ledger import RECORD, Ledger, PackedRecords
from muster.client.audit.lineage import stream_rows, trace
from muster.client.audit.observed import Observed, Parameters
from muster.client.audit.outcome_table import (
    OutcomeTable,
    outcome_leaves,
    submission_leaves,
    tabulate,
)
from muster.client.audit.proving import (
    check_logs,
    header_hash,
    may_hold_logs_of,
    receipts_root,
    trie_root,
)
from muster.client.audit.reexecution import draw
from muster.protocol.encoding import keccak
from muster.protocol.errors import ConfigError, EncodingError, MusterError
from muster.protocol.ids import Address, Hash32, PolicyVersion, RunId, Step, to_address
from muster.protocol.jury import Ruling
from muster.protocol.messages import OutcomeRecord, Reason, Submission, Verdict, pack_records
from muster.shardcast import Manifest, ManifestFile

RUN = RunId(1)
WORKER = to_address(b"\x11" * 20)
uint = {bits: st.integers(0, (1 << bits) - 1) for bits in (16, 32)}
verdicts, hashes = st.sampled_from(Verdict), st.binary(min_size=32, max_size=32)
records = st.builds(
    OutcomeRecord,
    worker_id=uint[32],
    step=uint[32],
    index=uint[32],
    policy_version=uint[32],
    file_hash=hashes,
    rollouts=uint[16],
    units=uint[32],
    verdict=verdicts,
    reason=st.sampled_from(Reason),
)


# Records and their leaves


@given(st.lists(records, min_size=1, max_size=20))
def test_packed_records_are_the_records(found: list[OutcomeRecord]) -> None:
    packed = PackedRecords(pack_records(found))
    assert list(packed) == found
    assert [packed[i] for i in range(len(packed))] == found
    assert packed[1:3] == found[1:3]
    assert packed[-1] == found[-1]
    assert packed.columns()["units"].tolist() == [record.units for record in found]


@pytest.mark.parametrize("data", [b"", bytes(55), bytes(56), b"\xff" * 56])
def test_what_the_ledger_cannot_have_accepted_is_no_records(data: bytes) -> None:
    with pytest.raises(EncodingError):
        PackedRecords(data)


@given(st.lists(records, min_size=1, max_size=9), st.integers(0, 2**64 - 1))
def test_leaves_are_those_of_the_messages(found: list[OutcomeRecord], batch_id: int) -> None:
    columns = PackedRecords(pack_records(found)).columns()
    assert outcome_leaves(batch_id, columns) == [
        record.leaf(batch_id, i) for i, record in enumerate(found)
    ]
    addresses = {r.worker_id: to_address(keccak(r.worker_id.to_bytes(4))[:20]) for r in found}
    assert submission_leaves(RUN, columns, addresses) == [
        claim(record, addresses[record.worker_id]).leaf() for record in found
    ]
    assert submission_leaves(RUN, columns, {}) is None


def claim(record: OutcomeRecord, worker: Address) -> Submission:
    return Submission(
        RUN,
        worker,
        record.step,
        record.index,
        record.policy_version,
        record.file_hash,
        record.rollouts,
        record.units,
    )


# Tables


def a_record(number: int = 0, **changes: Any) -> OutcomeRecord:
    values: dict[str, Any] = {
        **{"worker_id": 1, "step": Step(1), "index": number, "policy_version": PolicyVersion(0)},
        **{"file_hash": keccak(b"%d" % number), "rollouts": 8, "units": 100},
        **{"verdict": Verdict.ACCEPTED, "reason": Reason.NONE},
    }
    return OutcomeRecord(**{**values, **changes})


def a_batch(batch_id: int, found: list[OutcomeRecord], **changes: Any) -> chain.BatchView:
    values: dict[str, Any] = {
        **{"batch_id": batch_id, "run_id": RUN, "root": keccak(b"root"), "count": len(found)},
        **{"units": sum(r.units for r in found), "price_per_unit": 10**15, "committed_at": 100},
        **{"terms": 1, "signers": 1},
        **{"block_number": 10 * batch_id, "tx_hash": "0xc", "posted_at": 120 + batch_id},
        **{"posted_block": 10 * batch_id + 1, "posted_tx": "0xp"},
        "records": PackedRecords(pack_records(found)) if found else None,
    }
    return chain.BatchView(**{**values, **changes})


def table_of(*batches: chain.BatchView) -> OutcomeTable:
    view = Ledger()
    view.batches = {batch.batch_id: batch for batch in batches}
    return tabulate(view)


def kinds(check: Any) -> list[Kind]:
    return [found.kind for found in check.contradictions]


def test_a_table_knows_every_rows_batch_and_position() -> None:
    table = table_of(a_batch(1, [a_record(0)]), a_batch(2, [a_record(1), a_record(2)]))
    assert [(table.place(i)[0].batch_id, table.place(i)[1]) for i in range(3)] == [
        (1, 0),
        (2, 0),
        (2, 1),
    ]
    assert [table.record(i) for i in range(3)] == [a_record(0), a_record(1), a_record(2)]
    assert table.records_N.dtype == RECORD


def test_a_table_of_nothing_is_empty() -> None:
    table = table_of()
    assert len(table) == 0
    assert work.deadlines(table, 60).passed
    assert work.reasons(table).passed
    assert money.slots(table).passed


@pytest.mark.parametrize(
    ("posted_at", "expected"), [(159, []), (160, [Kind.OUTCOME_DEADLINE]), (None, [])]
)
def test_outcomes_after_the_deadline_contradict(
    posted_at: int | None, expected: list[Kind]
) -> None:
    table = table_of(a_batch(1, [a_record()], posted_at=posted_at))
    assert kinds(work.deadlines(table, 60)) == expected


def test_more_units_than_declared_contradict() -> None:
    table = table_of(a_batch(1, [a_record(units=7)], units=6))
    assert kinds(work.deadlines(table, 60)) == [Kind.OUTCOME_UNITS]
    assert kinds(work.deadlines(table_of(a_batch(1, [a_record(units=6)], units=6)), 60)) == []


@pytest.mark.parametrize(
    ("verdict", "reason", "expected"),
    [
        (Verdict.ACCEPTED, Reason.NONE, []),
        (Verdict.ACCEPTED, Reason.LATE, [Kind.OUTCOME_REASON]),
        (Verdict.FRAUD, Reason.NONE, [Kind.OUTCOME_REASON]),
        (Verdict.FRAUD, Reason.LATE, [Kind.OUTCOME_REASON]),
        (Verdict.REJECTED, Reason.WRONG_SEED, [Kind.OUTCOME_REASON]),
        (Verdict.REJECTED, Reason.WRONG_REWARD, []),
        (Verdict.FRAUD, Reason.WRONG_REWARD, []),
        (Verdict.REJECTED, Reason.TOPLOC_MISMATCH, []),
        (Verdict.INCOMPLETE, Reason.FILE_INCOMPLETE, []),
        (Verdict.REJECTED, Reason.FILE_INCOMPLETE, [Kind.OUTCOME_REASON]),
    ],
)
def test_a_verdict_is_one_that_its_reasons_check_gives(
    verdict: Verdict, reason: Reason, expected: list[Kind]
) -> None:
    table = table_of(a_batch(1, [a_record(verdict=verdict, reason=reason)]))
    assert kinds(work.reasons(table)) == expected


def test_reasons_have_the_verdicts_of_the_protocols_table() -> None:
    by_verdicts = {
        (Verdict.ACCEPTED,): {0},
        (Verdict.INCOMPLETE,): {23},
        (Verdict.REJECTED,): {*range(10, 17), 20, 21, 22},
        (Verdict.FRAUD,): {30, 31, 32, 41, 50},
        (Verdict.REJECTED, Verdict.FRAUD): {33, 40, 60, 70, 71},
    }
    assert {reason: work.verdicts_of(reason) for reason in Reason} == {
        Reason(code): set(verdicts) for verdicts, codes in by_verdicts.items() for code in codes
    }


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3), verdicts), max_size=30))
def test_slots_that_settle_twice_are_those_a_dictionary_finds(
    found: list[tuple[int, int, Verdict]],
) -> None:
    batches = [
        a_batch(i, [a_record(index, worker_id=who, verdict=verdict)])
        for i, (who, index, verdict) in enumerate(found, 1)
    ]
    seen: set[tuple[int, int]] = set()
    again = []
    for i, (who, index, verdict) in enumerate(found, 1):
        if verdict is Verdict.ACCEPTED:
            again += [i] if (who, index) in seen else []
            seen.add((who, index))
    check = money.slots(table_of(*batches))
    assert sorted(found.batch_id or 0 for found in check.contradictions) == again


# Payments


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9), st.sampled_from([3, 10**20]))),
    st.integers(0, 100),
)
def test_what_is_due_is_what_adding_up_gives(
    found: list[tuple[int, int, int]], paid_at: int
) -> None:
    view = Ledger()
    view.workers[WORKER] = SimpleNamespace(worker_id=1)  # type: ignore[assignment]
    view.batches = {
        i: a_batch(i, [a_record(i, units=units)], posted_at=at, price_per_unit=price)
        for i, (at, units, price) in enumerate(found, 1)
    }
    payment: Any = SimpleNamespace(run_id=RUN, worker=WORKER, timestamp=paid_at)
    due = money.FinalSlots(view, tabulate(view)).due(payment, 20)
    final = [(units, units * price) for at, units, price in found if at + 20 <= paid_at]
    assert (due.slots, due.units, due.wei) == (
        len(final),
        sum(units for units, _ in final),
        sum(wei for _, wei in final),
    )


# Cases

RULINGS = [
    0,
    *(Ruling(verdict, Reason(reason)).number for verdict in Verdict for reason in (0, 15, 30, 60)),
]
UNSEEN = (0, 0x020F, 0x030F)
"""Rulings that say that the work was not seen."""
JURORS = [to_address(bytes([i]) * 20) for i in range(1, 8)]


def tallied(votes: list[int]) -> int | None:
    """Return the ruling that prevails, each verdict's votes counted in full after each vote."""
    kinds = [0 if vote in UNSEEN else (vote >> 8, vote == 0x041E) for vote in votes]
    leader, led = 0, 0
    for i, vote in enumerate(votes):
        counts = Counter(kinds[: i + 1])
        if counts[kinds[i]] == max(counts.values()) > led:
            is_longer = led > 0 and kinds[votes.index(leader)] == kinds[i]
            leader, led = leader if is_longer else vote, counts[kinds[i]]
    holders = [kind for kind, count in Counter(kinds).items() if count == led]
    return leader if len(holders) == 1 else None


@given(st.lists(st.sampled_from(RULINGS), max_size=7), st.sampled_from(RULINGS))
def test_what_votes_decide_is_what_the_court_counts(votes: list[int], recorded: int) -> None:
    case = chain.CaseView(keccak(b"case"), 1, RUN, 1, 0, WORKER, recorded, 9, 7, 100, "0xo")
    case.votes = dict(zip(JURORS, votes, strict=False))
    assert case.leading == tallied(votes)
    if case.leading is None:
        assert not case.is_decided
        assert not case.right
        return
    agreeing = [vote for vote in RULINGS if tallied([vote, case.leading]) is not None]
    assert case.right == [who for who, vote in case.votes.items() if vote in agreeing]
    verdict, reason = divmod(case.leading, 256)
    was, why = divmod(recorded, 256)
    is_seen = case.leading != 0 and (reason != 15 or verdict in (1, 4))
    is_same = verdict == was and (verdict == 4 and reason == 30) == (was == 4 and why == 30)
    assert case.is_decided == (is_seen and not is_same)


# Samples


def test_a_sample_is_drawn_by_the_seed_alone() -> None:
    table = table_of(a_batch(1, [a_record(i) for i in range(200)]))
    assert draw(table, RUN, 10, 1) == draw(table, RUN, 10, 1)
    assert draw(table, RUN, 10, 1) != draw(table, RUN, 10, 2)
    assert len(set(draw(table, RUN, 10, 3))) == 10
    assert draw(table, RUN, None, 3) == draw(table, RUN, 999, 4) == list(range(200))
    assert draw(table, RunId(2), 5, 0) == []


def test_outcomes_are_run_again_policy_by_policy() -> None:
    table = table_of(a_batch(1, [a_record(i, policy_version=i % 3) for i in range(30)]))
    versions = [table.record(row).policy_version for row in draw(table, RUN, None, 0)]
    assert versions == sorted(versions)


# Tries and headers


@settings(max_examples=50)
@given(st.dictionaries(st.binary(min_size=1, max_size=4), st.binary(min_size=1, max_size=70)))
def test_a_trie_has_the_root_that_another_library_computes(entries: dict[bytes, bytes]) -> None:
    reference = HexaryTrie({})
    for key, value in entries.items():
        reference[key] = value
    assert trie_root(entries) == reference.root_hash


def test_a_trie_of_many_receipts_has_the_root_that_another_library_computes() -> None:
    random = Random(0)
    entries = {rlp.encode(place): random.randbytes(200) for place in range(300)}
    reference = HexaryTrie({})
    for key, value in entries.items():
        reference[key] = value
    assert trie_root(entries) == reference.root_hash


GENESIS = {
    "hash": "0xd4e56740f876aef8c010b86a40d5f56745a118d0906a34e69aec8c0db1cb8fa3",
    "parentHash": "0x" + "00" * 32,
    "sha3Uncles": "0x1dcc4de8dec75d7aab85b567b6ccd41ad312451b948a7413f0a142fd40d49347",
    "miner": "0x" + "00" * 20,
    "stateRoot": "0xd7f8974fb5ac78d9ac099b9ad5018bedc2ce0a72dad1827a1709da30580f0544",
    "transactionsRoot": "0x56e81f171bcc55a6ff8345e692c0f86e5b48e01b996cadc001622fb5e363b421",
    "receiptsRoot": "0x56e81f171bcc55a6ff8345e692c0f86e5b48e01b996cadc001622fb5e363b421",
    "logsBloom": "0x" + "00" * 256,
    "difficulty": "0x400000000",
    "number": "0x0",
    "gasLimit": "0x1388",
    "gasUsed": "0x0",
    "timestamp": "0x0",
    "extraData": "0x11bbe8db4e347b4e8c937c1c8370e4b5ed33adb3db69cbdb7a38e1e50b1b82fa",
    "mixHash": "0x" + "00" * 32,
    "nonce": "0x0000000000000042",
}
"""Block 0 of Ethereum's main chain."""


def test_the_hash_of_ethereums_first_block() -> None:
    assert "0x" + header_hash(GENESIS).hex() == GENESIS["hash"]
    assert "0x" + receipts_root([]).hex() == GENESIS["receiptsRoot"]
    assert header_hash({**GENESIS, "gasUsed": "0x1"}) != header_hash(GENESIS)


@pytest.mark.parametrize("wrong", [{}, {"parentHash": 3}, {"difficulty": "x"}])
def test_what_is_no_header_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(EncodingError, match="malformed block header"):
        header_hash({**GENESIS, **wrong} if wrong else {})


def test_receipts_of_unknown_types_are_refused() -> None:
    for wrong in ({"type": "0x7e"}, {"type": "0x2"}, {"type": 2}):
        with pytest.raises(EncodingError):
            receipts_root([wrong])


LOG = {
    "address": "0x" + "ab" * 20,
    "topics": ["0x" + "cd" * 32],
    "data": "0x",
    "logIndex": "0x0",
    "transactionHash": "0x" + "ee" * 32,
}


def receipt_of(log: dict[str, Any], **changes: str) -> dict[str, Any]:
    return {
        "status": "0x1",
        "cumulativeGasUsed": "0x5208",
        "logsBloom": "0x" + "00" * 256,
        "transactionHash": LOG["transactionHash"],
        "logs": [log],
        **changes,
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("address", " x" + "ab" * 20),
        ("address", "0x" + "ab " * 20),
        ("address", "ab" * 21),
        ("topics", ["0x" + "cd " * 32]),
        ("data", "  "),
        ("status", " 0x1"),
        ("status", "0x0_1"),
        ("cumulativeGasUsed", "-0x5208"),
    ],
)
def test_no_spelling_of_a_log_hides_it(name: str, value: Any) -> None:
    """Bytes and root are the same in another spelling, but logs are compared by their text."""
    root = "0x" + receipts_root([receipt_of(LOG)]).hex()
    header = GENESIS | {"receiptsRoot": root}
    addresses = {"0x" + "ab" * 20}
    assert check_logs(header, [receipt_of(LOG)], [LOG], addresses) == []
    (left_out,) = check_logs(header, [receipt_of(LOG)], [], addresses)
    assert "leaves out" in left_out.detail
    odd = receipt_of(LOG | {name: value}) if name in LOG else receipt_of(LOG, **{name: value})
    with pytest.raises(EncodingError, match="malformed receipt"):
        check_logs(header, [odd], [], addresses)


def test_a_filter_never_misses_and_mostly_tells() -> None:
    """The bits of 0x00…01 are computed from keccak(address) by hand."""
    address = "0x" + "00" * 19 + "01"
    hashed = keccak(bytes(19) + b"\x01")
    bits = sum(
        {1 << (int.from_bytes(hashed[i : i + 2], "big") % 2048) for i in (0, 2, 4)}
    ).to_bytes(256, "big")
    assert may_hold_logs_of(bits, [address])
    assert not may_hold_logs_of(bytes(256), [address])
    assert not may_hold_logs_of(bits, ["0x" + "77" * 20])


# Dumps

DEPLOYMENT = chain.Deployment(31337, 1, {"ContributionLedger": WORKER}, {"challenge_window_s": 30})
OBSERVED = Observed(
    vault_wei=10**30,
    escrow_wei=0,
    court_wei=0,
    stakes={(RUN, WORKER): chain.StakeAccount(1, 2, 3, 4)},
    runs=1,
    batches=2,
    funds={RUN: chain.Funds(5, 6)},
    versions={RUN: None},
    strange=frozenset({2}),
    parameters=Parameters(*range(14)),
    jurors=frozenset({WORKER}),
    draw_hashes={7: Hash32(keccak(b"draw"))},
    announced={Hash32(keccak(b"case")): (8, 9)},
    timestamp=1_700_000_000,
)
HEAD = chain.BlockId(9, keccak(b"head"))


def test_a_dump_gives_back_what_was_put_in(tmp_path: Path) -> None:
    block = DumpedBlock(chain.BlockId(3, keccak(b"3")), 7, [], {"hash": "0x"}, [])
    path = tmp_path / "dump.gz"
    with writing_dump(path, DEPLOYMENT) as dump:
        dump.add(block)
        dump.end(DumpEnd(HEAD, OBSERVED))
    assert dump.blocks == 1
    reader = DumpReader(path)
    assert reader.deployment == DEPLOYMENT
    assert list(reader.blocks()) == [block]
    assert reader.end == DumpEnd(HEAD, OBSERVED)


@pytest.mark.parametrize(
    "missing", [field.name for part in (Observed, Parameters) for field in fields(part)]
)
def test_an_answer_that_a_dump_lacks_is_not_taken_as_known(missing: str) -> None:
    answers = OBSERVED.to_json()
    (answers if missing in answers else answers["parameters"]).pop(missing)
    with pytest.raises(EncodingError, match=f"malformed answers of contracts[^$]*{missing}"):
        Observed.from_json(answers)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=8,
)


@settings(max_examples=40)
@given(st.lists(json_values | st.just({"format": "muster-chain-dump", "version": 2}), max_size=4))
def test_no_dump_crashes_who_reads_it(lines: list[Any]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "dump.gz"
        path.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
        with pytest.raises(MusterError):
            list(DumpReader(path).blocks())


# Evidence


def test_evidence_that_somebody_removes_meanwhile_is_not_at_hand(tmp_path: Path) -> None:
    for name in ("stays", "goes"):
        (tmp_path / name).write_bytes(name.encode())
    store = EvidenceFolders([tmp_path])
    (tmp_path / "goes").unlink()
    assert store.document(Hash32(keccak(b"goes"))) is None
    assert store.document(Hash32(keccak(b"stays"))) == b"stays"


def test_only_regular_files_are_evidence(tmp_path: Path) -> None:
    """A copy is a stranger's: a pipe would hold the auditor, a link could lead to a device."""
    (tmp_path / "regular").write_bytes(b"content")
    (tmp_path / "outside").write_bytes(b"not of the copy")
    copy = tmp_path / "copy"
    copy.mkdir()
    (tmp_path / "regular").rename(copy / "regular")
    name = Hash32(keccak(b"no file"))
    for suffix in ("", ".json", ".parquet"):
        os.mkfifo(copy / f"{name.hex()}{suffix}")
    os.mkfifo(copy / "bundle.zip")
    (copy / "link").symlink_to(tmp_path / "outside")
    (copy / f"{'11' * 32}.json").symlink_to("/dev/zero")
    store = EvidenceFolders([copy])
    assert store.broken == []
    assert store.submission_file(name) is None
    assert list(store.all_entries()) == []
    assert store.task_set(name, tmp_path) is None
    assert store.document(Hash32(keccak(b"not of the copy"))) is None
    assert store.document(Hash32(keccak(b"content"))) == b"content"


def test_a_document_is_no_larger_than_any_can_be(tmp_path: Path) -> None:
    contents = [bytes(MAX_SMALL_BYTES), bytes(MAX_SMALL_BYTES + 1)]
    for number, content in enumerate(contents):
        (tmp_path / str(number)).write_bytes(content)
    store = EvidenceFolders([tmp_path])
    assert store.document(Hash32(keccak(contents[0]))) == contents[0]
    assert store.document(Hash32(keccak(contents[1]))) is None
    assert store.document(Hash32(keccak(contents[1][:-1]))) == contents[0]


# Contradictions


def test_a_check_lists_some_and_counts_all() -> None:
    many = (Contradiction(Kind.SLOT_TWICE, f"slot {i}") for i in range(MAX_LISTED + 7))
    check = summarise("slots", many, "none")
    assert (check.passed, len(check.contradictions), check.count) == (
        False,
        MAX_LISTED,
        MAX_LISTED + 7,
    )
    assert check.detail.endswith(f"slot 4; and {MAX_LISTED + 2} more")


def test_every_kind_of_contradiction_is_found_in_a_test() -> None:
    tests = Path(__file__).parents[3]
    named = {
        name
        for path in tests.rglob("test_*.py")
        for name in re.findall(r"Kind\.[A-Z_]+|\"[a-z-]+\"", path.read_text())
    }
    assert [kind for kind in Kind if not {f"Kind.{kind.name}", f'"{kind}"'} & named] == []


def test_a_contradiction_says_where_it_is() -> None:
    found = Contradiction(Kind.SLOT_TWICE, "twice", "0xt", 5, 3, 1)
    assert str(found) == "twice (batch 3, position 1, block 5, 0xt)"
    assert str(Contradiction(Kind.LINEAGE, "no place")) == "no place"


def test_a_contradiction_does_not_drive_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    said = {"kind": "slot-twice", "detail": "of \x1b[2J", "rule": "one"}
    with pytest.raises(SystemExit):
        _show({"contradictions": [said]}, lambda _: None, as_json=False)
    assert "FAIL slot-twice: of \ufffd[2J (the rule: one)" in capsys.readouterr().out


# The ledger


def event(number: int, name: str, **args: Any) -> chain.Event:
    block = keccak(b"%d" % number)
    return chain.Event("RunRegistry", name, args, number, block, number, 0, f"0x{number:064x}")


CONFIG = chain.RunConfig(
    WORKER, WORKER, *(keccak(b"x"),) * 4, terms=chain.RunTerms(1, 1, 1, 1), validators=(WORKER,)
)


def test_an_event_that_was_applied_changes_nothing_again() -> None:
    created = event(1, "RunCreated", run_id=1, owner=WORKER, config=CONFIG)
    published = event(2, "CheckpointPublished", run_id=1, version=0, manifest_root=keccak(b"0"))
    ledger, twin = Ledger(), Ledger()
    for each in (created, published):
        ledger.apply(each)
    for each in (created, published, published, created):
        twin.apply(each)
    assert ledger.runs == twin.runs
    assert (twin.block_number, twin.disorder) == (2, [])


def test_an_event_about_something_unknown_is_placed() -> None:
    ledger = Ledger()
    ledger.apply(event(4, "CheckpointPublished", run_id=7, version=0, manifest_root=keccak(b"0")))
    (found,) = ledger.disorder
    assert (found.kind, found.block, found.tx) == (Kind.EVENT_ORDER, 4, f"0x{4:064x}")


# Lineage


def manifest(version: int, start: int, end: int, run_id: RunId = RUN) -> Manifest:
    files = (ManifestFile("model", 1, (keccak(b"chunk"),)),)
    return Manifest(run_id, PolicyVersion(version), files, keccak(b"state"), start, end)


def traced(*published: Manifest, shown: set[int] | None = None, level: int | None = None) -> Any:
    """Return the lineage of the last of some versions, over eight accepted records."""
    ledger = Ledger()
    ledger.apply(event(1, "RunCreated", run_id=1, owner=WORKER, config=CONFIG))
    found = [a_record(i, file_hash=keccak(b"%d" % (i % 7))) for i in range(8)]
    batch = a_batch(1, found, block_number=2, posted_block=3)
    ledger.batches[1] = batch
    ledger.runs[RUN].judged.append(batch)
    by_root: dict[Hash32, bytes] = {}
    for place, each in enumerate(published):
        root = keccak(each.to_bytes())
        number = PolicyVersion(place)
        ledger.apply(
            event(5 + place, "CheckpointPublished", run_id=1, version=number, manifest_root=root)
        )
        if shown is None or place in shown:
            by_root[root] = each.to_bytes()
    version = PolicyVersion(len(published) - 1)
    return trace(ledger, RUN, version, by_root.get, max_async_level=level)


def test_a_lineage_follows_the_stream() -> None:
    found = traced(manifest(0, 0, 0), manifest(1, 0, 4), manifest(2, 4, 8))
    assert [each.version for each in found.ingredients] == [1] * 4 + [2] * 4
    # The eighth record is the first's file again.
    assert [each.use for each in found.ingredients] == ["offered"] * 7 + ["repeated"]
    assert found.contradictions == ()


def test_one_manifest_fixes_the_whole_ancestry() -> None:
    found = traced(manifest(0, 0, 0), manifest(1, 0, 4), manifest(2, 4, 8), shown={2})
    assert [each.version for each in found.ingredients] == [None] * 4 + [2] * 4
    assert found.contradictions == ()


def test_policies_that_became_too_old_are_stale_where_the_recipe_is_known() -> None:
    versions = [manifest(i, 0, 0) for i in range(4)]
    found = traced(*versions, manifest(4, 0, 2), level=2)
    assert [each.use for each in found.ingredients] == ["stale", "stale"]
    assert [each.use for each in traced(*versions, manifest(4, 0, 2)).ingredients] == [
        "offered",
        "offered",
    ]


@pytest.mark.parametrize(
    ("published", "words"),
    [
        ((manifest(0, 0, 0), manifest(1, 0, 4), manifest(2, 3, 8)), "goes on at 3, its parent"),
        ((manifest(0, 0, 0), manifest(1, 0, 9)), "consumed 9 records, 8 were posted"),
        ((manifest(0, 0, 0), manifest(3, 0, 4)), "run 1 version 3 was published as 1"),
        ((manifest(0, 0, 0), manifest(1, 0, 4, RunId(2))), "run 2 version 1 was published as 1"),
    ],
)
def test_a_lineage_that_does_not_follow_is_contradicted(
    published: tuple[Manifest, ...], words: str
) -> None:
    found = traced(*published).contradictions
    assert {each.kind for each in found} == {Kind.LINEAGE}
    assert any(words in each.detail for each in found)


def test_a_version_without_its_manifest_has_no_lineage() -> None:
    with pytest.raises(ConfigError, match="nobody shows the manifest of version 1"):
        traced(manifest(0, 0, 0), manifest(1, 0, 4), shown={0})


def test_the_stream_is_in_the_order_of_posting() -> None:
    ledger = Ledger()
    ledger.batches = {1: a_batch(1, [a_record(1)]), 2: a_batch(2, [a_record(2), a_record(3)])}
    ledger.runs[RUN] = SimpleNamespace(judged=[ledger.batches[2], ledger.batches[1]])  # type: ignore[assignment]
    assert stream_rows(ledger, tabulate(ledger), RUN) == [1, 2, 0]
