from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from orchestrator_bench import Bench, committed, hand_in, open_bench, refusal
from orchestrator_fakes import RUN, Network

from muster.chain.structs import BatchStatus
from muster.orchestrator.outcomes.outcomes import mismatch
from muster.protocol.eip712 import address_of
from muster.protocol.encoding import keccak
from muster.protocol.errors import ContractRevert
from muster.protocol.ids import Hash32, PolicyVersion, Step
from muster.protocol.messages import OutcomeRecord, Reason, Verdict, unpack_records


async def test_outcomes_are_posted_when_those_called_agree(bench: Bench) -> None:
    submission, _, records = await committed(bench)
    await bench.judge(1, [submission], validators=(0,))
    await bench.record()
    assert bench.network.chain.ledger.posted == []
    await bench.judge(1, [submission], validators=(1,))
    await bench.record()
    await bench.record()
    ((batch_id, posted, signatures),) = bench.network.chain.ledger.posted
    assert (batch_id, posted, len(signatures)) == (1, records, 2)


async def test_who_was_not_called_does_not_make_a_quorum(bench: Bench) -> None:
    submission, _, _ = await committed(bench)
    await bench.judge(1, [submission], validators=(0, 2))
    await bench.record()
    assert bench.network.chain.ledger.posted == []


async def test_signatures_are_of_those_called_and_ascend_by_signer(bench: Bench) -> None:
    submission, root, records = await committed(bench)
    await bench.judge(1, [submission], validators=(2, 0, 1))
    await bench.record()
    keys = bench.network.keys.validators
    called = sorted(bench.order(1)[:2], key=lambda n: int(address_of(keys[n]), 16))
    expected = [bench.network.sign_outcomes(n, 1, root, records) for n in called]
    assert bench.network.chain.ledger.posted[0][2] == expected


async def test_nothing_is_posted_until_most_agree_when_validators_disagree(bench: Bench) -> None:
    submission, _, _ = await committed(bench)
    await bench.judge(1, [submission], Verdict.ACCEPTED, Reason.NONE, (0,))
    await bench.judge(1, [submission], Verdict.REJECTED, Reason.SCHEMA, (1,))
    await bench.record()
    assert bench.network.chain.ledger.posted == []
    await bench.judge(1, [submission], Verdict.REJECTED, Reason.SCHEMA, (2,))
    await bench.record()
    ((_, posted, _),) = bench.network.chain.ledger.posted
    assert unpack_records(posted)[0].verdict is Verdict.REJECTED


async def test_signature_counts_no_more_when_its_validator_was_replaced(bench: Bench) -> None:
    submission, _, _ = await committed(bench)
    await bench.judge(1, [submission], validators=(0, 1))
    gone = bench.network.keys.validators[bench.order(1)[0]]
    bench.network.run.validators.remove(address_of(gone))
    await bench.record()
    assert bench.network.chain.ledger.posted == []


async def test_posting_is_tried_again_when_the_contract_refuses(bench: Bench) -> None:
    submission, _, _ = await committed(bench)
    await bench.judge(1, [submission])
    bench.network.chain.ledger.fail_next = ContractRevert("LedgerQuorumNotMet", (1, 2))
    await bench.record()
    assert bench.network.chain.ledger.posted == []
    await bench.record()
    assert len(bench.network.chain.ledger.posted) == 1


def renumber(bench: Bench) -> None:
    """The workers' registrations came back in another order, batches with numbers and roots."""
    view = bench.network.view
    one, two = view.worker_by_id[1], view.worker_by_id[2]
    one.worker_id, two.worker_id = 2, 1
    view.worker_by_id |= {1: two, 2: one}


@pytest.mark.parametrize("is_renumbered", [False, True])
async def test_records_are_posted_unless_a_reorganisation_gave_their_workers_other_numbers(
    bench: Bench, caplog: pytest.LogCaptureFixture, is_renumbered: bool
) -> None:
    submission, _, _ = await committed(bench)
    await bench.judge(1, [submission])
    if is_renumbered:
        renumber(bench)
    await bench.record()
    await bench.record()
    assert len(bench.network.chain.ledger.posted) == (not is_renumbered)
    said = [each for each in caplog.records if "outcomes are not posted" in each.getMessage()]
    assert len(said) == is_renumbered


@pytest.mark.parametrize("is_renumbered", [False, True])
async def test_records_are_looked_at_again_after_the_posts_before_theirs(
    bench: Bench, is_renumbered: bool
) -> None:
    for batch_id in (1, 2):
        submission = await bench.upload(body=b"file %d" % batch_id)
        await bench.commit()
        await bench.judge(batch_id, [submission])
    ledger = bench.network.chain.ledger
    if is_renumbered:
        ledger.once_posted = lambda: renumber(bench)
    await bench.record()
    assert [batch_id for batch_id, _, _ in ledger.posted] == ([1] if is_renumbered else [1, 2])


async def test_same_outcomes_are_harmless_when_handed_in_again(bench: Bench) -> None:
    submission, _, _ = await committed(bench)
    await bench.judge(1, [submission], validators=(0, 0))
    await bench.record()
    assert bench.network.chain.ledger.posted == []
    await bench.judge(1, [submission], validators=(1,))
    await bench.record()
    await bench.judge(1, [submission], validators=(2,))


@pytest.mark.parametrize("wrong", ["validator", "batch", "root", "records", "garbage"])
async def test_outcomes_are_refused_when_the_signature_is_another(bench: Bench, wrong: str) -> None:
    _, root, records = await committed(bench)
    signature = {
        "validator": bench.network.sign_outcomes(1, 1, root, records),
        "batch": bench.network.sign_outcomes(0, 2, root, records),
        "root": bench.network.sign_outcomes(0, 1, keccak(b"other"), records),
        "records": bench.network.sign_outcomes(0, 1, root, records * 2),
        "garbage": b"\x00" * 65,
    }[wrong]
    assert await refusal(bench, records, signature) == (422, "bad_outcomes_signature")


@pytest.mark.parametrize("bad", [b"\x00" * 55, b"\x00" * 56, b"\xff" * 112, None])
async def test_outcomes_are_refused_when_they_do_not_parse_or_are_two(
    bench: Bench, bad: bytes | None
) -> None:
    _, root, records = await committed(bench)
    bad = records * 2 if bad is None else bad
    signature = bench.network.sign_outcomes(0, 1, root, bad)
    assert await refusal(bench, bad, signature) == (422, "bad_records")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"worker_id": 2}, "worker id"),
        ({"step": Step(9)}, "step"),
        ({"index": 99}, "index"),
        ({"policy_version": PolicyVersion(9)}, "policy version"),
        ({"file_hash": keccak(b"other")}, "file hash"),
        ({"rollouts": 9}, "rollouts"),
    ],
)
async def test_outcomes_are_refused_when_a_record_describes_another_submission(
    bench: Bench, change: dict[str, Any], named: str
) -> None:
    submission, root, records = await committed(bench)
    record = replace(OutcomeRecord.from_bytes(records), **change)
    assert str(mismatch(record, submission, bench.network.view)).startswith(named)
    signature = bench.network.sign_outcomes(0, 1, root, record.to_bytes())
    assert await refusal(bench, record.to_bytes(), signature) == (422, "bad_records")


async def test_units_are_the_validators_to_decide(bench: Bench) -> None:
    submission, _, records = await committed(bench)
    record = replace(OutcomeRecord.from_bytes(records), units=1, verdict=Verdict.REJECTED)
    assert mismatch(record, submission, bench.network.view) is None


async def test_outcomes_are_refused_when_the_batch_is_unknown(bench: Bench) -> None:
    _, root, records = await committed(bench)
    signature = bench.network.sign_outcomes(0, 7, root, records)
    assert await refusal(bench, records, signature, batch_id=7) == (404, "batch_unknown")


async def test_outcomes_count_after_a_restart(tmp_path: Path) -> None:
    network = Network()
    async with open_bench(tmp_path, network) as bench:
        submission, _, _ = await committed(bench)
        await bench.judge(1, [submission], validators=(0,))
    async with open_bench(tmp_path, network) as bench:
        await bench.judge(1, [submission], validators=(1,))
        await bench.record()
        assert len(network.chain.ledger.posted) == 1


async def test_batch_is_called_withheld_when_those_called_say_so(bench: Bench) -> None:
    _, root, _ = await committed(bench)
    for number in bench.order(1)[:2]:
        assert bench.network.chain.ledger.posted == []
        signature = bench.network.sign_outcomes(number, 1, root, b"")
        await hand_in(bench, b"", signature, validator=number)
        await bench.record()
    ((batch_id, records, signatures),) = bench.network.chain.ledger.posted
    assert (batch_id, records, len(signatures)) == (1, b"", 2)
    assert bench.network.view.batches[1].status is BatchStatus.WITHHELD
    async with bench.validator() as api:
        assert await api.called() == {}


async def test_withheld_vote_counts_for_a_batch_that_is_not_held_here(bench: Bench) -> None:
    ledger, root = bench.network.chain.ledger, Hash32(keccak(b"not ours"))
    ledger.commit(RUN, root, 1, 20)
    await bench.follow()
    await hand_in(bench, b"", bench.network.sign_outcomes(0, 1, root, b""))
    some = bytes(OutcomeRecord.SIZE)
    refused = await refusal(bench, some, bench.network.sign_outcomes(0, 1, root, some))
    assert refused == (404, "batch_unknown")


async def test_withheld_vote_is_refused_when_another_validator_signed_it(bench: Bench) -> None:
    _, root, _ = await committed(bench)
    signature = bench.network.sign_outcomes(1, 1, root, b"")
    assert await refusal(bench, b"", signature) == (422, "bad_outcomes_signature")


async def test_outcomes_are_refused_when_they_hold_more_than_the_batch(bench: Bench) -> None:
    submission, root, records = await committed(bench)
    more = bench.network.judge([replace(submission, units=submission.units + 1)])
    refused = await refusal(bench, more, bench.network.sign_outcomes(0, 1, root, more))
    assert refused == (422, "bad_records")
    await hand_in(bench, records, bench.network.sign_outcomes(0, 1, root, records))


async def test_quorum_is_that_of_the_terms_of_the_commitment(bench: Bench) -> None:
    submission, _, _ = await committed(bench)
    run = bench.network.run
    terms = replace(run.config.terms, quorum=1)
    run.terms.append(terms)
    run.config = replace(run.config, terms=terms)
    await bench.judge(1, [submission], validators=(0,))
    await bench.record()
    assert bench.network.chain.ledger.posted == []
    await bench.judge(1, [submission], validators=(1,))
    await bench.record()
    assert len(bench.network.chain.ledger.posted) == 1


async def let_pass(bench: Bench, batch_id: int) -> tuple[int, Callable[[], bool]]:
    """Let the first validator called for a batch be silent for too long; returns its number, and
    whether it is absent."""
    bench.set_chain_time(bench.network.view.batches[batch_id].committed_at + 125)
    await bench.record()
    number = bench.order(batch_id)[0]
    validator = address_of(bench.network.keys.validators[number])
    return number, lambda: validator in bench.services.outcomes.caller.absent


async def say_withheld(bench: Bench, batch_id: int, number: int) -> None:
    """Hand in that a batch's data is withheld, and let the orchestrator look at it."""
    root = bench.network.view.batches[batch_id].root
    signature = bench.network.sign_outcomes(number, batch_id, root, b"")
    await hand_in(bench, b"", signature, validator=number, batch_id=batch_id)
    await bench.record()


@pytest.mark.parametrize("is_judged", [True, False])
async def test_statement_about_a_closed_batch_leaves_a_validator_absent(
    bench: Bench, *, is_judged: bool
) -> None:
    first = await bench.upload(0)
    await bench.commit()
    if is_judged:
        await bench.judge(1, [first])
        await bench.record()
    bench.set_chain_time(bench.network.view.batches[1].committed_at + 1000)
    bench.network.chain.ledger.commit(RUN, keccak(b"next"), 1, 20)
    await bench.follow()
    number, is_absent = await let_pass(bench, 2)
    await say_withheld(bench, 1, number)
    assert is_absent()
    await say_withheld(bench, 2, number)
    assert not is_absent()


async def test_repeated_statement_leaves_a_validator_absent(bench: Bench) -> None:
    await committed(bench)
    bench.network.chain.ledger.commit(RUN, keccak(b"next"), 1, 20)
    await bench.follow()
    await say_withheld(bench, 1, bench.order(2)[0])
    number, is_absent = await let_pass(bench, 2)
    await say_withheld(bench, 1, number)
    assert is_absent()
