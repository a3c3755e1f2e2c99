"""A worker against silence: its steps and their times, its bonds, and what it never does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from worlds.client_chain import UNREACHABLE, WORKER_ID, make_batch
from worlds.client_desk import run_until
from worlds.client_silence import (
    BOND,
    DATA,
    DUE_AT,
    JUROR,
    LATE,
    NODE,
    OTHER,
    SETTLED_S,
    SIGNED,
    TICKET,
    TIMES,
    VOID_AT,
    Silenced,
    committed,
    own,
    summons,
)
from worlds.client_world import NOW, RUN, WORKER, as_claimed, make_ticket, sign_submission

from muster.api import SubmissionState
from muster.chain import BatchStatus
from muster.client.sources import named_sources
from muster.client.worker.journal import BatchPlace
from muster.client.worker.silence import PATIENCE_S, SilenceStep, next_step
from muster.protocol.encoding import keccak
from muster.protocol.errors import ApiError, ContractRevert
from muster.protocol.jury import summons_of
from muster.protocol.messages import COMMIT_GRACE_S


@pytest.mark.parametrize(
    ("batch", "case", "at", "is_refused", "expected"),
    [
        (None, None, TICKET.deadline + PATIENCE_S - 1, False, None),
        (None, None, TICKET.deadline + PATIENCE_S, False, SilenceStep.SUBMIT),
        (None, None, TICKET.deadline + COMMIT_GRACE_S - 1, False, SilenceStep.SUBMIT),
        (None, None, TICKET.deadline + COMMIT_GRACE_S, False, None),
        (None, None, NOW, True, SilenceStep.SUBMIT),
        (None, None, TICKET.deadline + COMMIT_GRACE_S, True, None),
        (committed(), None, DUE_AT - 1, True, None),
        (committed(), None, DUE_AT, False, SilenceStep.SPLIT),
        (committed(status=BatchStatus.JUDGED), None, DUE_AT, False, None),
        (
            committed(status=BatchStatus.WITHHELD, posted_at=NOW),
            None,
            NOW,
            False,
            SilenceStep.SPLIT,
        ),
        (committed(), None, VOID_AT - 1, False, SilenceStep.SPLIT),
        (committed(), None, VOID_AT, False, None),
        (committed(voided_tx="0x"), None, DUE_AT, False, None),
        (own(), None, DUE_AT - 1, False, None),
        (own(), None, DUE_AT, False, SilenceStep.SUMMON),
        (own(), summons(), DUE_AT + 6, False, None),
        (own(), summons(closed=True), VOID_AT - 1, False, None),
        (own(), summons(closed=True), VOID_AT, False, SilenceStep.VOID),
        (own(), None, VOID_AT, False, SilenceStep.VOID),
        (own(status=BatchStatus.JUDGED), None, VOID_AT, False, None),
    ],
)
def test_next_step_follows_from_the_chain_and_its_clock(
    batch: Any, case: Any, at: int, is_refused: bool, expected: SilenceStep | None
) -> None:
    assert next_step(SIGNED, batch, case, at, TIMES, is_refused=is_refused) is expected


def test_batch_of_another_root_does_not_hold_the_work(desk: Silenced) -> None:
    signed, batch = desk.sign(), desk.commit()
    desk.journal.prove(signed, BatchPlace(batch.name, 0, ()))
    assert desk.duty.batch_of(signed) is batch
    desk.view.batches[4] = own()
    assert desk.duty.batch_of(signed) is desk.view.batches[4]
    desk.view.batches = {3: replace(batch, root=keccak(b"after a reorganisation"))}
    assert desk.duty.batch_of(signed) is None


def test_chain_is_told_of_as_many_sources_as_it_takes_and_of_none_that_nobody_asks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    urls = [f"http://relay{i}.example" for i in range(20)]
    unasked = ["http://long.example" + "a" * 120, "http://room.example/path"]
    assert named_sources([*unasked, *urls, *urls]) == urls[:16]
    assert [record.__dict__["url"] for record in caplog.records] == [u[:128] for u in unasked]


async def test_swallowed_work_is_submitted_with_ticket_signatures_bond_and_sources(
    desk: Silenced,
) -> None:
    desk.sign()
    assert await desk.at(LATE - 1) == []
    assert await desk.at(LATE) == ["submit"]
    [(_, (work, sources))] = desk.chain.sent
    assert (work.submission, work.ticket) == (SIGNED.submission, TICKET)
    assert work.node_signature == sign_submission(SIGNED.submission)
    assert work.ticket_signature == SIGNED.ticket_signature
    assert sources == ["http://relay.example"]
    assert desk.chain.allowed == BOND


async def test_work_that_is_committed_is_not_submitted_again_and_its_proof_is_kept(
    desk: Silenced, caplog: pytest.LogCaptureFixture
) -> None:
    signed = desk.sign()
    batch = desk.commit()
    assert await desk.at(NOW) == []
    assert not caplog.records
    proven = desk.journal.proven(signed)
    assert proven is not None
    assert (proven.name, proven.proof) == (batch.name, (OTHER.leaf(),))
    desk.asked.batches.clear()
    assert await desk.at(LATE) == []


@pytest.mark.parametrize(
    "shown",
    [(OTHER, OTHER), (SIGNED.submission, OTHER, OTHER), (OTHER, SIGNED.submission)],
    ids=["without it", "longer", "in another order"],
)
async def test_batch_that_is_not_the_one_on_chain_proves_nothing(
    desk: Silenced, shown: Any, caplog: pytest.LogCaptureFixture
) -> None:
    signed = desk.sign()
    desk.commit(*shown)
    await desk.at(NOW)
    assert desk.journal.proven(signed) is None
    assert [r for r in caplog.records if "not on chain" in r.getMessage()]
    assert await desk.at(LATE) == ["submit"]


async def test_work_in_a_batch_of_fewer_units_than_it_holds_is_submitted_at_once(
    desk: Silenced, caplog: pytest.LogCaptureFixture
) -> None:
    desk.sign()
    desk.commit(units=49)
    assert await desk.at(NOW) == ["submit"]
    [said] = [r for r in caplog.records if "fewer units" in r.getMessage()]
    assert (vars(said)["declared"], vars(said)["holds"]) == (49, 50)


async def test_orchestrator_is_asked_after_each_batch_and_ever_less_often(desk: Silenced) -> None:
    desk.sign()
    desk.asked.fail("state", UNREACHABLE)
    asked = []
    for second in range(120):
        desk.chain.time_s, desk.seconds = NOW, float(second)
        if second == 100:
            desk.view.batches[2] = make_batch(2, [OTHER])
        before = desk.asked.calls["state"]
        await desk.duty.serve()
        if desk.asked.calls["state"] > before:
            asked.append(second)
    assert asked == [0, 2, 6, 14, 30, 62, 100, 102, 106, 114]


async def test_orchestrator_that_hangs_does_not_make_own_work_late(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(_name: Any) -> SubmissionState:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr("muster.client.worker.silence.LOOK_UP_S", 0.01)
    desk.asked.submission_state = hang  # type: ignore[method-assign]
    desk.sign()
    assert await desk.at(LATE) == ["submit"]


async def test_work_of_another_run_in_the_same_folder_is_left_alone(desk: Silenced) -> None:
    ticket, submission = (replace(each, run_id=RUN + 1) for each in (TICKET, SIGNED.submission))
    desk.journal.record(ticket, SIGNED.ticket_signature, submission, DATA)
    refusal = ApiError("no such run", status=404, code="run_unknown")
    desk.orchestrator.fail("submit", refusal)
    await desk.loop._round()
    for time_s in (LATE, TICKET.deadline + COMMIT_GRACE_S):
        assert await desk.at(time_s) == []
    assert not await desk.duty.is_needed()
    assert not desk.orchestrator.calls["submit"]
    assert len(desk.journal.unfinished()) == 1


async def test_batches_of_other_runs_are_no_cause_to_ask(desk: Silenced) -> None:
    desk.sign()
    await desk.duty.serve()
    desk.view.batches[2] = replace(make_batch(2, [OTHER]), run_id=RUN + 1)
    await desk.duty.serve()
    assert desk.asked.calls["state"] == 1


class Unsearched(dict[int, Any]):
    """The many batches of a busy chain: iterating over all of them fails."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("all batches were looked at")

    values = items = keys = __reversed__ = __iter__  # type: ignore[assignment]


async def test_a_look_does_not_search_all_batches_of_the_chain(desk: Silenced) -> None:
    batch = own()
    desk.sign()
    indexed: Any = SimpleNamespace(**vars(desk.view))
    indexed.batches = Unsearched({4: batch})
    indexed.own_work = {(RUN, WORKER): {batch.root: batch}}
    indexed.newest_batch = {RUN: 4}
    desk.duty.context = replace(desk.duty.context, view=indexed)
    assert await desk.at(DUE_AT) == ["summon"]
    await desk.duty.fill_rooms()
    assert not desk.duty.is_done()
    assert desk.duty.bonds() == []
    with pytest.raises(AssertionError, match="all batches"):
        list(indexed.batches.values())


async def test_without_a_bond_nothing_is_sent_and_it_is_said_once(
    desk: Silenced, caplog: pytest.LogCaptureFixture
) -> None:
    desk.sign()
    desk.chain.tokens = BOND - 1
    for second in range(3):
        assert await desk.at(LATE + second) == []
    [said] = [r for r in caplog.records if r.levelname == "WARNING"]
    assert "the bond is 10 tokens" in vars(said)["error"]
    assert "muster worker submit-direct" in vars(said)["hint"]
    assert desk.chain.allowed == 0


@pytest.mark.parametrize("change", [{"paused": True}, {"closed_at": NOW}])
async def test_run_that_takes_nothing_is_not_asked(desk: Silenced, change: Any) -> None:
    desk.sign()
    vars(desk.view.runs[RUN]).update(change)
    assert await desk.at(LATE) == []


@pytest.mark.parametrize("taken", [0, 3])
async def test_unjudged_work_is_taken_out_and_judges_are_called(desk: Silenced, taken: int) -> None:
    desk.sign()
    batch, desk.chain.splits = desk.commit(), {50: 7, 51: taken}
    assert await desk.at(DUE_AT - 1) == []
    assert await desk.at(DUE_AT) == ["split"]
    header, work, position, proof, _ = desk.chain.sent[-1][1]
    assert (position, list(proof)) == (0, [OTHER.leaf()])
    assert header == replace(batch.header(), units=batch.units - taken)
    assert work.submission == SIGNED.submission
    desk.view.batches[4] = own(split_from=3)
    assert await desk.at(DUE_AT + 1) == ["summon"]
    desk.view.cases[summons_of(4)] = summons()
    assert await desk.at(DUE_AT + 10) == []


@pytest.mark.parametrize("is_read", [False, True])
async def test_split_while_the_bond_is_approved_counts_once_whoever_reads_it(
    desk: Silenced, is_read: bool
) -> None:
    desk.sign()
    batch = desk.commit()
    before = batch.header()

    def split() -> None:
        desk.chain.splits[51] = OTHER.units
        if is_read:
            batch.units -= OTHER.units
            desk.view.block_number = 51

    desk.chain.once_approved = split
    assert await desk.at(DUE_AT) == ["split"]
    assert desk.chain.sent[-1][1][0] == replace(before, units=before.units - OTHER.units)


async def test_bond_is_not_put_up_where_nobody_could_judge(desk: Silenced) -> None:
    desk.sign()
    desk.commit()
    await desk.at(NOW)
    desk.view.jurors = lambda: []
    assert await desk.at(DUE_AT) == []
    assert desk.chain.allowed == 0
    desk.view.jurors = lambda: [JUROR]
    assert await desk.at(DUE_AT + 6) == ["split"]


async def test_case_that_nobody_closes_is_settled_and_the_bond_comes_back_once(
    desk: Silenced,
) -> None:
    desk.sign()
    desk.view.batches[4] = own()
    desk.view.cases[summons_of(4)] = summons()
    assert await desk.at(DUE_AT + 5 + SETTLED_S - 1) == []
    assert await desk.at(DUE_AT + 5 + SETTLED_S) == ["settle"]
    desk.view.cases[summons_of(4)] = summons(closed=True)
    assert not desk.duty.is_done()
    assert await desk.at(VOID_AT) == ["void"]
    desk.view.batches[4] = own(voided_tx="0x")
    desk.chain.bonds[4] = NODE
    assert await desk.at(VOID_AT + 1) == ["return"]
    assert await desk.at(VOID_AT + 20) == []
    assert desk.duty.is_done()
    assert not desk.journal.unfinished()


async def test_bond_of_judged_work_comes_back(desk: Silenced) -> None:
    record = as_claimed(SIGNED.submission, WORKER_ID)
    desk.view.batches[4] = own(status=BatchStatus.JUDGED, records=[record])
    desk.chain.bonds[4] = NODE
    assert not desk.duty.is_done()
    assert await desk.at(NOW) == ["return"]
    assert desk.duty.is_done()


async def test_refusal_that_says_it_is_done_is_no_warning(
    desk: Silenced, caplog: pytest.LogCaptureFixture
) -> None:
    desk.sign()
    desk.chain.refusal = ContractRevert("LedgerSlotUsed", ())
    await desk.at(LATE)
    assert not caplog.records
    desk.chain.refusal = ContractRevert("LedgerInvalidTicket", ())
    await desk.at(LATE + 6)
    assert [r.getMessage() for r in caplog.records] == ["submit directly was refused"]


async def test_refused_upload_is_submitted_at_once_or_given_up_when_it_is_too_late(
    desk: Silenced,
) -> None:
    desk.orchestrator.tickets.extend([TICKET, make_ticket(index=1)])
    refusal = ApiError("we do not like you", status=403, code="go_away")
    desk.orchestrator.fail("submit", refusal, refusal)
    await desk.loop.work_once()
    assert await desk.at(NOW) == ["submit"]
    assert len(desk.journal.unfinished()) == 1
    await desk.at(TICKET.deadline + COMMIT_GRACE_S)
    assert not desk.journal.unfinished()


@pytest.mark.parametrize(
    ("place", "tries"),
    [("nowhere", 3), ("committed directly", 1), ("proven", 1), ("finished", 1), ("reorganised", 3)],
)
async def test_upload_that_nobody_answers_ends_once_the_work_is_on_chain(
    desk: Silenced, place: str, tries: int
) -> None:
    signed = desk.sign()
    desk.orchestrator.fail("submit", *[UNREACHABLE] * 2)
    match place:
        case "committed directly":
            desk.view.batches[4] = own()
        case "proven" | "reorganised":
            desk.commit()
            await desk.duty.look_up(signed)
            if place == "reorganised":
                desk.view.batches[3] = committed(root=keccak(b"another"))
        case "finished":
            desk.journal.finish(signed, "VOID")
    await desk.loop.uploads.send(signed, DATA)
    assert desk.orchestrator.calls["submit"] == tries


async def test_upload_that_is_refused_for_ever_ends_once_the_orchestrators_batch_holds_the_work(
    desk: Silenced,
) -> None:
    signed = desk.sign()

    async def refuse(*_: Any) -> Any:
        # The orchestrator shows state and batch truthfully.
        desk.commit()
        await desk.duty.look_up(signed)
        raise UNREACHABLE

    desk.orchestrator.submit = refuse  # type: ignore[method-assign]
    await run_until(desk.loop, lambda: desk.orchestrator.calls["lease"] > 0)
    assert desk.journal.unfinished()
