"""A validator's records: signed outcomes, used slots, evidence."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st
from worlds.client_chain import (
    WORKER_ID,
    make_batch as batch_of,
    make_context,
    make_view,
)
from worlds.client_world import (
    CALIBRATION,
    DOMAIN,
    RULES,
    RUN,
    VERSION,
    WORKER,
    HashEngine,
    make_claim,
    make_entry,
    make_rollouts,
    make_submission,
    make_ticket,
)

from muster.chain import LeasedWork
from muster.client.validator import batches
from muster.client.validator.batches import (
    BatchReader,
    SlotIndex,
    claim_in,
    is_misdeclared,
    slots_of_records,
)
from muster.client.validator.checks import ClaimedWork, FailedCheck, unreadable
from muster.client.validator.judging import Judgement, examine, outcome_record, unread
from muster.client.validator.records import EvidenceStore, JudgedBatch, OutcomeJournal
from muster.protocol.encoding import file_hash, keccak
from muster.protocol.errors import StorageError
from muster.protocol.ids import BatchName, PolicyVersion, Step
from muster.protocol.messages import OutcomeRecord, Reason, Verdict, unpack_records
from muster.protocol.rollouts import encode_rollouts

NAME = BatchName(4, keccak(b"root"))
TICKET = make_ticket()
ROWS = make_rollouts(TICKET)
CLAIM = make_claim(make_submission(TICKET, ROWS), TICKET)
ACCEPTED = examine(CLAIM, ROWS, RULES, HashEngine(VERSION))
DATA = encode_rollouts(ROWS)


def make_record(worker_id: int = 1, step: int = 1, index: int = 0) -> OutcomeRecord:
    return OutcomeRecord(
        worker_id,
        Step(step),
        index,
        PolicyVersion(0),
        keccak(b"file"),
        4,
        10,
        Verdict.ACCEPTED,
        Reason.NONE,
    )


def filled(*batches: tuple[int, OutcomeRecord]) -> SlotIndex:
    index = SlotIndex()
    for batch_id, record in batches:
        index.add(batch_id, slots_of_records([record]))
    return index


# Outcomes


def test_batch_keeps_its_first_outcomes_across_restarts(tmp_path: Path) -> None:
    first = JudgedBatch(NAME, (make_record(),))
    second = replace(first, records=(replace(make_record(), verdict=Verdict.REJECTED),))
    with OutcomeJournal(tmp_path) as journal:
        assert journal.record(first) == first
        assert journal.record(second) == first
    with OutcomeJournal(tmp_path) as journal:
        assert journal.record(second) == first
        assert journal.judged(first.name) == first
        assert journal.judged(BatchName(4, keccak(b"another"))) is None
        assert journal.judged(BatchName(5, NAME.root)) is None


def test_outcomes_sign_the_records_and_the_root_they_were_committed_with() -> None:
    batch = JudgedBatch(NAME, (make_record(), make_record(2)))
    assert unpack_records(batch.packed()) == list(batch.records)
    message = batch.message()
    assert (message.batch_id, message.batch_root) == (4, keccak(b"root"))
    assert message.records_hash == keccak(batch.packed())


@pytest.mark.parametrize(
    "line", [b'{"batch_id":1}\n', b'{"batch_id":1,"root":"0x","records":"0x"}\n', b'{"a":[]}\n']
)
def test_journal_with_unknown_entries_is_refused(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "outcomes.jsonl").write_bytes(line)
    with pytest.raises(StorageError, match="is damaged"):
        OutcomeJournal(tmp_path)


# Slots


@pytest.mark.parametrize("slot", [(2, 1, 0), (1, 2, 0), (1, 1, 1)])
def test_other_slots_are_free(slot: tuple[int, int, int]) -> None:
    assert not filled((5, make_record())).is_used(slot, before=9)


@given(st.permutations([1, 2, 3, 4]))
def test_first_batch_of_a_slot_counts_in_whatever_order_batches_become_known(
    order: list[int],
) -> None:
    index = filled(*((batch_id, make_record()) for batch_id in order))
    assert [index.is_used((1, 1, 0), before=b) for b in (1, 2, 5)] == [False, True, True]


@pytest.mark.parametrize(("judged_in", "is_used"), [(2, True), (5, False)])
def test_work_that_was_taken_out_of_a_batch_comes_at_the_place_of_that_batch(
    judged_in: int, is_used: bool
) -> None:
    index = filled((judged_in, make_record(WORKER_ID, TICKET.step, TICKET.index)))
    submission = make_submission(TICKET, ROWS)
    taken = replace(batch_of(9, [submission]), split_from=3)
    entry = make_entry(TICKET, submission)
    claim = claim_in(make_view(), taken, entry, DOMAIN, index, [])
    assert claim.is_slot_used is is_used


def judged(batch_id: int, record: OutcomeRecord) -> Any:
    return batch_of(batch_id, [], [record])


async def test_reader_looks_at_new_batches_only_and_at_all_after_a_reorganisation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    view: Any = make_view()
    view.batches = {
        5: judged(5, make_record()),
        6: replace(judged(6, make_record()), run_id=RUN + 1),
    }
    reader = BatchReader(make_context(view=view, journal=NoJournal()), {})
    await reader.refresh(before=7)
    assert reader._slots.is_used((1, 1, 0), before=9)
    view.batches[7] = judged(7, make_record(2))
    looked_at: list[Any] = []

    def noting(records: Any) -> Any:
        looked_at.append(records)
        return slots_of_records(records)

    monkeypatch.setattr(batches, "slots_of_records", noting)
    await reader.refresh(before=8)
    assert looked_at == [view.batches[7].records]
    assert reader._slots.is_used((2, 1, 0), before=9)
    view.batches = {5: replace(judged(5, make_record(3)), root=keccak(b"another"))}
    await reader.refresh(before=8)
    assert not reader._slots.is_used((1, 1, 0), before=9)
    assert reader._slots.is_used((3, 1, 0), before=9)


async def test_judgements_of_open_batches_are_taken_in_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    view: Any = make_view()
    view.batches = {5: batch_of(5, [])}
    own = JudgedBatch(view.batches[5].name, (make_record(),))
    journal = SimpleNamespace(judged=lambda _name: own)
    reader = BatchReader(make_context(view=view, journal=journal), {})
    looked_at: list[Any] = []

    def noting(records: Any) -> Any:
        looked_at.append(records)
        return slots_of_records(records)

    monkeypatch.setattr(batches, "slots_of_records", noting)
    for _ in range(2):
        await reader.refresh(before=7)
        assert reader._slots.is_used((1, 1, 0), before=9)
    assert looked_at == [own.records]
    view.batches[5].voided_tx = "0x"
    await reader.refresh(before=7)
    assert not reader._slots.is_used((1, 1, 0), before=9)


async def test_workers_may_have_other_numbers_after_a_reorganisation() -> None:
    view: Any = make_view()
    submission = make_submission(TICKET, ROWS)
    entry = make_entry(TICKET, submission)
    work = LeasedWork(submission, entry.signature, TICKET, entry.ticket_signature)
    direct = replace(batch_of(5, [submission]), work=work)
    reader = BatchReader(make_context(view=view, journal=NoJournal()), {})
    for worker_id in (WORKER_ID, WORKER_ID + 1):
        view.batches = {5: direct}
        view.workers[WORKER].worker_id = worker_id
        await reader.refresh(before=7)
        used = [
            reader._slots.is_used((number, TICKET.step, TICKET.index), before=9)
            for number in (WORKER_ID, WORKER_ID + 1)
        ]
        assert used == [worker_id == WORKER_ID, worker_id != WORKER_ID]


class NoJournal:
    """Has judged nothing."""

    def judged(self, _name: BatchName) -> None:
        return None


# Evidence


def read(document: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads(document.read_text())
    return content


def test_evidence_holds_all_that_a_third_party_needs(tmp_path: Path) -> None:
    store = EvidenceStore(tmp_path, CALIBRATION)
    document = store.write((9, 2), CLAIM, DATA, ACCEPTED)
    assert document.name == "9-2.json"
    stored = (document.parent / "submission.parquet").read_bytes()
    assert file_hash(stored) == CLAIM.submission.file_hash
    content = read(document)
    assert content["submission"] == CLAIM.submission.to_json()
    assert content["ticket"] == TICKET.to_json()
    assert content["policy_root"] == "0x" + TICKET.policy_root.hex()
    assert content["calibration_hash"] == "0x" + CALIBRATION.hash().hex()


def test_evidence_states_the_outcome_and_every_samples_figures(tmp_path: Path) -> None:
    content = read(EvidenceStore(tmp_path, CALIBRATION).write((9, 2), CLAIM, DATA, ACCEPTED))
    outcome, samples = content["outcome"], content["samples"]
    assert isinstance(outcome, dict)
    assert isinstance(samples, list)
    record = OutcomeRecord.from_bytes(bytes.fromhex(outcome["record"][2:]))
    assert record == outcome_record(CLAIM, ACCEPTED)
    assert len(samples) == len(ROWS)
    assert all(s["proofs_pass"] and s["sampling_passes"] for s in samples)
    assert all(s["largest_margin"] == 0 and s["tokens_below_maximum"] == 0 for s in samples)
    assert samples[0]["chunks"][0]["exponent_mismatches"] == 0


def test_evidence_of_an_unread_file_names_the_reason(tmp_path: Path) -> None:
    judgement = unread(CLAIM, unreadable("not Parquet"))
    document = EvidenceStore(tmp_path, CALIBRATION).write((9, 2), CLAIM, None, judgement)
    assert [p.name for p in document.parent.iterdir()] == ["9-2.json"]
    outcome = read(document)["outcome"]
    assert isinstance(outcome, dict)
    assert (outcome["reason"], outcome["detail"]) == ("SCHEMA", "not Parquet")


def other_claim(n: int) -> ClaimedWork:
    return make_claim(make_submission(TICKET, ROWS, file_hash=keccak(bytes([n]))), TICKET)


def test_old_acceptances_make_room_and_findings_stay(tmp_path: Path) -> None:
    rejected = unread(CLAIM, unreadable("no"))
    store = EvidenceStore(tmp_path, CALIBRATION, kept_accepted=2)
    found = store.write((1, 0), other_claim(0), DATA, rejected)
    accepted = [store.write((n, 0), other_claim(n), DATA, ACCEPTED) for n in (1, 2, 3)]
    assert [p.exists() for p in accepted] == [False, True, True]
    assert found.exists()


@pytest.mark.parametrize("places", [(0, 1), (1, 0)])
def test_finding_about_a_file_stays_that_was_also_accepted(
    tmp_path: Path, places: tuple[int, int]
) -> None:
    judged = [ACCEPTED, unread(CLAIM, unreadable("no"))]
    store = EvidenceStore(tmp_path, CALIBRATION, kept_accepted=2)
    for place in places:
        store.write((1, place), CLAIM, DATA, judged[place])
    for n in (2, 3, 4):
        store.write((n, 0), other_claim(n), DATA, ACCEPTED)
    folder = tmp_path / CLAIM.submission.file_hash.hex()
    kept = {path.name for path in folder.iterdir()}
    assert kept == {"submission.parquet", "1-0.json", "1-1.json"}


def test_restarted_store_still_bounds_what_it_keeps(tmp_path: Path) -> None:
    def write(n: int, judgement: Judgement) -> Path:
        store = EvidenceStore(tmp_path, CALIBRATION, kept_accepted=2)
        return store.write((n, 0), other_claim(n), DATA, judgement)

    found = write(0, unread(CLAIM, unreadable("no")))
    documents = [write(n, ACCEPTED) for n in range(1, 5)]
    assert sum(document.exists() for document in documents) == 2
    assert found.exists()


REJECTED = unread(CLAIM, unreadable("no"))
FRAUD = unread(CLAIM, FailedCheck(Verdict.FRAUD, Reason.WRONG_SEED, "another seed"))


def test_old_refused_files_make_room_and_frauds_stay(tmp_path: Path) -> None:
    store = EvidenceStore(tmp_path, CALIBRATION, refused_bytes=3 << 20)
    fraud = store.write((1, 0), other_claim(0), DATA, FRAUD)
    found = [store.write((n, 0), other_claim(n), DATA, REJECTED) for n in range(1, 5)]
    assert [document.exists() for document in found] == [False, True, True, True]
    # A new store knows what was kept.
    store = EvidenceStore(tmp_path, CALIBRATION, refused_bytes=3 << 20)
    large = store.write((5, 0), other_claim(5), bytes(2 << 20), REJECTED)
    assert [document.exists() for document in found] == [False, False, False, False]
    assert large.exists()
    assert fraud.exists()


def test_a_refused_file_that_is_a_fraud_elsewhere_stays(tmp_path: Path) -> None:
    store = EvidenceStore(tmp_path, CALIBRATION, refused_bytes=1 << 20)
    refused = store.write((1, 0), other_claim(0), DATA, REJECTED)
    store.write((1, 1), other_claim(0), DATA, FRAUD)
    for n in range(1, 4):
        store.write((n, 0), other_claim(n), DATA, REJECTED)
    assert refused.exists()


def test_a_file_that_is_too_large_is_not_kept(tmp_path: Path) -> None:
    judgement = unread(CLAIM, FailedCheck(Verdict.REJECTED, Reason.FILE_TOO_LARGE, "1 byte"))
    document = EvidenceStore(tmp_path, CALIBRATION).write((9, 2), CLAIM, b"!", judgement)
    assert [path.name for path in document.parent.iterdir()] == ["9-2.json"]


def test_a_full_disk_keeps_the_newest_and_all_frauds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def room(folder: Path) -> int:
        return len(DATA) * (4 - len(list(folder.glob("*/submission.parquet"))))

    monkeypatch.setattr("muster.client.validator.records.room_in", room)
    store = EvidenceStore(tmp_path, CALIBRATION)
    judged = [FRAUD, ACCEPTED, REJECTED, REJECTED, REJECTED, REJECTED]
    written = [store.write((n, 0), other_claim(n), DATA, each) for n, each in enumerate(judged)]
    assert [document.exists() for document in written] == [True, True, False, False, True, True]


# Declared units


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=5), st.integers(0, 2**41))
def test_batch_is_misdeclared_when_its_submissions_claim_more(
    units: list[int], declared: int
) -> None:
    submissions = [replace(CLAIM.submission, index=i, units=value) for i, value in enumerate(units)]
    batch = replace(batch_of(1, submissions), units=declared)
    assert is_misdeclared(batch, submissions) is (sum(units) > declared)
    # The split-off submission's units were declared with the batch.
    batch.split_off[2] = submissions[0]
    assert is_misdeclared(batch, submissions) is (sum(units[1:]) > declared)


@given(claimed=st.integers(0, 2**40), found=st.integers(0, 2**40))
def test_record_never_holds_more_units_than_were_claimed(claimed: int, found: int) -> None:
    claim = replace(CLAIM, submission=replace(CLAIM.submission, units=claimed))
    record = outcome_record(claim, Judgement(None, found))
    assert record.units == min(claimed, found, 2**32 - 1)


@pytest.mark.parametrize("reason", [Reason.BAD_SIGNATURE, Reason.BATCH_MISDECLARED])
def test_records_of_forged_work_and_of_misdeclared_batches_fill_no_slots(reason: Reason) -> None:
    record = make_record()
    refused = replace(make_record(index=1), reason=reason)
    assert slots_of_records([record, refused]) == ((1, 1, 0),)
