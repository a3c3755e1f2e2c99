"""A double signer is reported to the court once, and nobody else is."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from orchestrator_bench import (
    Bench,
    committed,
    delete_database,
    hand_in,
    open_bench,
    refusal,
)
from orchestrator_fakes import RUN, Network, slot_tag

from muster.api import SlotTaken
from muster.chain import Offence
from muster.chain.view_parts import unpack_leniently
from muster.protocol.eip712 import address_of
from muster.protocol.encoding import file_hash, keccak
from muster.protocol.errors import ApiError, ChainUnreachable
from muster.protocol.ids import Address, Hash32
from muster.protocol.messages import Reason, Submission, Verdict, pack_records

WITHHELD = b""


def validator(bench: Bench, number: int) -> Address:
    return address_of(bench.network.keys.validators[number])


def proven(bench: Bench) -> list[tuple[Any, ...]]:
    return bench.network.chain.faults.proven


def signed(bench: Bench, number: int, records: bytes) -> bytes:
    return bench.network.sign_outcomes(number, 1, bench.network.view.batches[1].root, records)


def show(bench: Bench, number: int, records: bytes) -> None:
    bench.network.apply(
        "ContributionLedger", "OutcomesShown",
        batch_id=1, validator=validator(bench, number), records_hash=keccak(records),
        batch_root=bench.network.view.batches[1].root, records=records,
        signature=signed(bench, number, records),
    )  # fmt: skip


async def second_opinion(bench: Bench) -> tuple[Submission, int, bytes]:
    """One validator hands in acceptance, then a rejection, which is refused."""
    submission, _, records = await committed(bench)
    number = bench.order(1)[0]
    await hand_in(bench, records, signed(bench, number, records), validator=number)
    other = bench.network.judge([submission], Verdict.REJECTED, Reason.SCHEMA)
    refused = await refusal(bench, other, signed(bench, number, other), validator=number)
    assert refused == (409, "outcomes_conflict")
    return submission, number, other


async def test_second_outcomes_of_a_validator_are_shown_to_the_court_once(bench: Bench) -> None:
    _, number, _ = await second_opinion(bench)
    await bench.report()
    await bench.report()
    assert proven(bench) == [(Offence.DOUBLE_OUTCOME, validator(bench, number), 1)]
    assert bench.network.view.contradictions == []


async def test_the_same_outcomes_of_two_validators_are_no_double(bench: Bench) -> None:
    submission, _, _ = await committed(bench)
    await bench.judge(1, [submission], validators=(0, 0, 1))
    await bench.report()
    assert proven(bench) == []


async def test_different_outcomes_of_two_validators_are_no_double(bench: Bench) -> None:
    submission, _, _ = await committed(bench)
    await bench.judge(1, [submission], validators=(0,))
    await bench.judge(1, [submission], Verdict.REJECTED, Reason.SCHEMA, (1,))
    await bench.report()
    assert proven(bench) == []


async def test_second_outcomes_are_shown_by_the_process_that_comes_after(tmp_path: Path) -> None:
    network = Network()
    async with open_bench(tmp_path, network) as bench:
        await second_opinion(bench)
    async with open_bench(tmp_path, network) as bench:
        await bench.report()
        assert len(proven(bench)) == 1


async def test_second_outcomes_are_shown_when_the_database_was_lost(tmp_path: Path) -> None:
    network = Network()
    async with open_bench(tmp_path, network) as bench:
        await second_opinion(bench)
    delete_database(tmp_path)
    async with open_bench(tmp_path, network) as bench:
        await bench.report()
        await bench.report()
        assert len(proven(bench)) == 1
    # A process that starts with an empty database does not report it again.
    delete_database(tmp_path)
    async with open_bench(tmp_path, network) as bench:
        await bench.report()
        assert len(proven(bench)) == 1


async def test_second_outcomes_are_shown_again_when_the_chain_does_not_answer(bench: Bench) -> None:
    await second_opinion(bench)
    bench.network.chain.ledger.fail_next = ChainUnreachable("no answer")
    await bench.report()
    assert proven(bench) == []
    await bench.report()
    assert len(proven(bench)) == 1


async def test_nothing_is_shown_when_nothing_is_at_stake_any_more(bench: Bench) -> None:
    _, number, _ = await second_opinion(bench)
    stake = bench.network.view.stake(RUN, validator(bench, number))
    stake.active_wei = 0
    await bench.report()
    assert proven(bench) == []
    stake.unbonding_wei = 1
    await bench.report()
    assert len(proven(bench)) == 1


async def test_what_was_signed_about_a_batch_that_is_gone_is_not_shown(bench: Bench) -> None:
    await second_opinion(bench)
    batch = bench.network.view.batches[1]
    root, batch.root = batch.root, Hash32(keccak(b"another"))
    await bench.report()
    assert proven(bench) == []
    batch.root = root
    await bench.report()
    assert len(proven(bench)) == 1


async def test_outcomes_that_contradict_posted_ones_are_shown(bench: Bench) -> None:
    submission, _, _ = await committed(bench)
    await bench.judge(1, [submission])
    await bench.record()
    other = bench.network.judge([submission], Verdict.REJECTED, Reason.SCHEMA)
    signer, stranger = bench.order(1)[0], bench.order(1)[2]
    # A validator that signed nothing before may look again and find something else.
    await hand_in(bench, other, signed(bench, stranger, other), validator=stranger)
    assert (await refusal(bench, other, signed(bench, signer, other), validator=signer))[0] == 409
    await bench.report()
    assert proven(bench) == [(Offence.DOUBLE_OUTCOME, validator(bench, signer), 1)]


async def test_outcomes_that_contradict_those_shown_on_chain_are_shown(bench: Bench) -> None:
    submission, _, records = await committed(bench)
    first, second = bench.order(1)[:2]
    show(bench, first, records)
    other = bench.network.judge([submission], Verdict.REJECTED, Reason.SCHEMA)
    await hand_in(bench, other, signed(bench, second, other), validator=second)
    assert (await refusal(bench, other, signed(bench, first, other), validator=first))[0] == 409
    await bench.report()
    assert proven(bench) == [(Offence.DOUBLE_OUTCOME, validator(bench, first), 1)]


async def test_who_contradicts_itself_on_chain_alone_is_shown(bench: Bench) -> None:
    submission, _, records = await committed(bench)
    other = bench.network.judge([submission], Verdict.REJECTED, Reason.SCHEMA)
    show(bench, 0, records)
    show(bench, 1, other)
    await bench.report()
    assert proven(bench) == []
    show(bench, 1, records)
    await bench.report()
    assert proven(bench) == [(Offence.DOUBLE_OUTCOME, validator(bench, 1), 1)]


@pytest.mark.parametrize("withheld_first", [True, False])
async def test_to_have_called_a_batch_withheld_contradicts_nothing(
    bench: Bench, withheld_first: bool
) -> None:
    submission, _, records = await committed(bench)
    number = bench.order(1)[0]
    show(bench, number, WITHHELD)
    for said in (WITHHELD, records) if withheld_first else (records, WITHHELD):
        await hand_in(bench, said, signed(bench, number, said), validator=number)
    await bench.report()
    assert proven(bench) == []
    # Its verdict counts, whichever came first.
    await bench.judge(1, [submission], validators=(1,))
    bench.set_chain_time(bench.network.chain.time + 900)
    await bench.record()
    assert bench.network.chain.ledger.posted[0][1] == records


async def double_upload(
    bench: Bench, body: bytes = b"a file", **changes: Any
) -> tuple[Submission, Submission]:
    """A node uploads a file, then signs something else for the slot, which is refused."""
    submission = await bench.upload(body=body)
    other = replace(submission, **changes)
    async with bench.node() as api:
        with pytest.raises(SlotTaken) as caught:
            await api.submit(other, bench.network.sign_submission(other), b"another file")
    # The node is shown what it signed before.
    assert caught.value.held.submission == submission
    assert caught.value.held.signature == bench.network.sign_submission(submission)
    return submission, other


async def judge(bench: Bench, submission: Submission) -> None:
    await bench.judge(1, [submission])
    await bench.record()


async def test_second_submission_for_a_slot_is_shown_once_the_first_is_judged(bench: Bench) -> None:
    submission, _ = await double_upload(bench, file_hash=file_hash(b"another file"))
    await bench.report()
    assert proven(bench) == []
    await bench.commit()
    await judge(bench, submission)
    await bench.report()
    await bench.report()
    worker = bench.network.worker(0).address
    assert proven(bench) == [(Offence.DOUBLE_SUBMISSION, worker, slot_tag(submission))]
    assert bench.network.view.contradictions == []


async def test_a_worker_is_punished_for_one_double_submission(bench: Bench) -> None:
    other = file_hash(b"another file")
    bodies = (b"a file", b"a second file")
    firsts = [(await double_upload(bench, body, file_hash=other))[0] for body in bodies]
    await bench.commit()
    await bench.judge(1, firsts)
    await bench.record()
    await bench.report()
    await bench.report()
    assert [offence for offence, *_ in proven(bench)] == [Offence.DOUBLE_SUBMISSION]


async def test_second_submission_is_shown_when_the_database_was_lost(tmp_path: Path) -> None:
    network = Network()
    async with open_bench(tmp_path, network) as bench:
        submission, _ = await double_upload(bench, file_hash=file_hash(b"another file"))
    delete_database(tmp_path)
    async with open_bench(tmp_path, network) as bench:
        await bench.commit()
        await judge(bench, submission)
        await bench.report()
        worker = network.worker(0).address
        assert proven(bench) == [(Offence.DOUBLE_SUBMISSION, worker, slot_tag(submission))]


async def test_second_claim_about_the_same_file_is_a_second_submission(bench: Bench) -> None:
    submission = await bench.upload()
    richer = replace(submission, units=submission.units + 1)
    async with bench.node() as api:
        await api.submit(submission, bench.network.sign_submission(submission), b"a file")
        with pytest.raises(ApiError, match="already has another submission"):
            await api.submit(richer, bench.network.sign_submission(richer), b"a file")
    await bench.commit()
    await judge(bench, submission)
    await bench.report()
    assert [offence for offence, *_ in proven(bench)] == [Offence.DOUBLE_SUBMISSION]


async def test_the_same_submission_again_is_no_double(bench: Bench) -> None:
    submission = await bench.upload()
    async with bench.node() as api:
        await api.submit(submission, bench.network.sign_submission(submission), b"a file")
    await bench.commit()
    await judge(bench, submission)
    await bench.report()
    assert proven(bench) == []


@pytest.mark.parametrize("is_other", [True, False])
async def test_own_commitment_of_another_submission_is_shown(bench: Bench, is_other: bool) -> None:
    submission = await bench.upload()
    direct = replace(submission, file_hash=Hash32(keccak(b"other"))) if is_other else submission
    bench.network.chain.ledger.submit_direct(bench.network.work(direct))
    await bench.follow()
    await judge(bench, direct)
    await bench.report()
    worker = bench.network.worker(0).address
    double = (Offence.DOUBLE_SUBMISSION, worker, slot_tag(submission))
    assert proven(bench) == ([double] if is_other else [])


# Records that contradict what their batch holds


def post(bench: Bench, submission: Submission, **wrong: Any) -> None:
    """Post what a quorum signed about the first batch, with some fields of other values."""
    network = bench.network
    (record,) = unpack_leniently(network.judge([submission], Verdict.ACCEPTED, Reason.NONE))
    packed = pack_records([replace(record, **wrong)])
    network.apply(
        "ContributionLedger", "OutcomesPosted",
        batch_id=1, run_id=RUN, outcomes_root=keccak(packed), signers=3, records=packed,
        posted_at=network.chain.ledger.emit.now(), signatures=bytes(130),
    )  # fmt: skip


async def test_a_record_of_other_work_is_shown_to_the_court_once_for_each_signer(
    bench: Bench,
) -> None:
    submission, _, _ = await committed(bench)
    post(bench, submission, file_hash=keccak(b"invented"))
    await bench.report()
    await bench.report()
    seats = bench.network.view.runs[RUN].seats
    signers = bench.network.view.batches[1].signed_by(seats)
    assert len(signers) == 2
    assert proven(bench) == [(Offence.MISRECORD, who, 1) for who in signers]


@pytest.mark.parametrize("same", [{}, {"units": 1}, {"worker_id": 0}])
async def test_records_of_the_work_that_a_batch_holds_are_no_fault(
    bench: Bench, same: dict[str, int]
) -> None:
    submission, _, _ = await committed(bench)
    post(bench, submission, **same)
    await bench.report()
    assert proven(bench) == []
