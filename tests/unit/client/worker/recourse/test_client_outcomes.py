"""What a worker takes for the outcome of its work, and how long it keeps accepted files."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from worlds.client_chain import WORKER_ID
from worlds.client_silence import (
    DATA,
    DUE_AT,
    FOREIGN,
    LATE,
    MISDECLARED,
    SIGNED,
    TICKET,
    TIMES,
    VOID_AT,
    Silenced,
    accept,
    committed,
    make_record,
    own,
    summons,
)
from worlds.client_world import NOW, OTHER_KEY, RUN, WORKER, as_claimed, make_entry

from muster.chain import ZERO_ADDRESS, WorkerStatus
from muster.client.worker.journal import SubmissionJournal
from muster.client.worker.outcomes import recall_accusations
from muster.client.worker.silence import KEEP_S
from muster.protocol.eip712 import address_of
from muster.protocol.errors import StorageError
from muster.protocol.messages import COMMIT_GRACE_S, Reason, Verdict

FINAL_AT = NOW + 60 + TIMES.challenge_window_s + KEEP_S
"""Time from which the outcome of a batch of `make_batch` is final for certain."""


async def test_file_of_accepted_work_is_kept_until_nothing_can_challenge_it(desk: Silenced) -> None:
    signed = await accept(desk)
    await desk.at(FINAL_AT - 1)
    assert desk.journal.data(signed) == DATA
    assert desk.duty.is_done()
    await desk.at(FINAL_AT)
    assert desk.journal.data(signed) is None
    assert not desk.duty.accepted


async def test_file_of_accepted_work_is_kept_while_a_case_about_it_is_open(desk: Silenced) -> None:
    signed = await accept(desk)
    name = as_claimed(SIGNED.submission, WORKER_ID).leaf(3, 0)
    desk.view.cases[name] = summons(case_id=name, is_summons=False, claims=[])
    await desk.at(FINAL_AT)
    assert desk.journal.data(signed) == DATA
    desk.view.cases[name].closed = True
    await desk.at(FINAL_AT)
    assert desk.journal.data(signed) is None


async def test_file_of_accepted_work_is_kept_after_a_reorganisation_took_the_outcome_back(
    desk: Silenced,
) -> None:
    signed = await accept(desk)
    desk.view.batches[3] = committed()
    await desk.at(FINAL_AT)
    del desk.view.batches[3]
    await desk.at(FINAL_AT)
    assert desk.journal.data(signed) == DATA


async def test_files_of_accepted_work_are_deleted_by_a_restarted_worker(tmp_path: Path) -> None:
    first = Silenced(tmp_path)
    signed = await accept(first)
    first.close()
    second = Silenced(tmp_path)
    second.view.batches[3] = first.view.batches[3]
    second.loop.outcomes.read([3])
    await second.loop.settle()
    assert second.journal.data(signed) == DATA
    await second.at(FINAL_AT)
    assert second.journal.data(signed) is None
    second.close()


async def test_outcomes_that_are_noted_by_two_tasks_at_once_count_once(desk: Silenced) -> None:
    desk.sign()
    await desk.loop.on_change([desk.post(5, make_record())])
    await asyncio.gather(desk.loop.settle(), desk.loop.settle())
    assert desk.loop.outcomes.earned == [(NOW + 60, 200)]


async def test_outcome_that_the_disk_refuses_at_first_is_noted_once(
    desk: Silenced, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signed = desk.sign()
    await desk.loop.on_change([desk.post(5, make_record(Verdict.REJECTED), make_record())])
    append, failures = desk.journal.append, [StorageError("the disk is full")]

    def refuse_once(entry: dict[str, Any]) -> None:
        if failures and entry.get("outcome") == "REJECTED":
            raise failures.pop()
        append(entry)

    monkeypatch.setattr(desk.journal, "append", refuse_once)
    with pytest.raises(StorageError):
        await desk.loop.settle()
    await desk.loop.settle()
    assert (len(desk.loop.outcomes.earned), desk.loop.outcomes.refused) == (1, 1)
    assert [path.name for path in desk.journal._refused.iterdir()]
    desk.journal.close()
    with SubmissionJournal(tmp_path) as journal:
        assert signed.slot not in journal.unfinished()


async def test_slot_reused_in_the_orchestrators_batch_is_not_the_outcome_of_own_work(
    desk: Silenced,
) -> None:
    desk.sign()
    desk.view.batches[4] = own()
    reused = make_record(Verdict.REJECTED, Reason.SLOT_REUSED)
    await desk.loop.on_change([desk.post(5, reused)])
    await desk.loop.settle()
    assert len(desk.journal.unfinished()) == 1
    desk.view.batches.pop(4)
    await desk.loop.on_change([desk.post(6, reused)])
    await desk.loop.settle()
    assert not desk.journal.unfinished()


@pytest.mark.parametrize("reason", [Reason.LATE, Reason.SLOT_REUSED])
async def test_later_copy_that_is_not_accepted_leaves_the_batch_that_holds_the_work_to_judges(
    desk: Silenced, reason: Reason
) -> None:
    desk.sign()
    desk.commit()
    assert await desk.at(NOW) == []
    await desk.loop.on_change([desk.post(4, make_record(Verdict.REJECTED, reason))])
    await desk.loop.settle()
    assert await desk.at(DUE_AT) == ["split"]


async def test_work_whose_batch_is_void_ends_with_the_outcome_of_a_copy(desk: Silenced) -> None:
    desk.sign()
    batch = desk.commit()
    assert await desk.at(NOW) == []
    desk.view.batches[3] = replace(batch, voided_tx="0x")
    await desk.loop.on_change([desk.post(4, make_record(Verdict.REJECTED, Reason.LATE))])
    await desk.loop.settle()
    assert not desk.journal.unfinished()


FREE = pytest.mark.parametrize("reason", [MISDECLARED, Reason.BAD_SIGNATURE])
"""Reasons of records that leave the slot to the worker."""


@FREE
async def test_work_whose_slot_is_left_free_ends_with_the_outcome_of_a_copy(
    desk: Silenced, reason: Reason
) -> None:
    desk.sign()
    desk.commit()
    assert await desk.at(NOW) == []
    await desk.loop.on_change([desk.post(3, make_record(Verdict.REJECTED, reason))])
    await desk.loop.settle()
    assert len(desk.journal.unfinished()) == 1
    await desk.loop.on_change([desk.post(4, make_record(Verdict.REJECTED, Reason.LATE))])
    await desk.loop.settle()
    assert not desk.journal.unfinished()


@FREE
@pytest.mark.parametrize("is_shown", [True, False])
async def test_work_whose_slot_is_left_free_is_submitted_directly_and_its_own_outcome_counts(
    desk: Silenced, reason: Reason, is_shown: bool
) -> None:
    desk.sign()
    if is_shown:
        desk.commit()
    assert await desk.at(NOW) == []
    posted = desk.post(3, make_record(Verdict.REJECTED, reason), make_record(index=7))
    if is_shown:
        # The proven batch holds the work itself, which validators saw with another signature.
        desk.view.batches[3] = committed(records=desk.view.batches[3].records)
    await desk.loop.on_change([posted])
    await desk.loop.settle()
    assert len(desk.journal.unfinished()) == 1
    assert await desk.at(NOW) == ["submit"]
    desk.view.batches[4] = own()
    await desk.loop.on_change([desk.post(4, make_record(Verdict.ACCEPTED, Reason.NONE))])
    await desk.loop.settle()
    assert not desk.journal.unfinished()


@FREE
async def test_work_whose_slot_is_left_free_is_given_up_when_it_is_too_late(
    desk: Silenced, reason: Reason, caplog: pytest.LogCaptureFixture
) -> None:
    desk.sign()
    await desk.loop.on_change([desk.post(3, make_record(Verdict.REJECTED, reason))])
    await desk.loop.settle()
    assert await desk.at(TICKET.deadline + COMMIT_GRACE_S) == []
    assert not desk.journal.unfinished()
    assert "too late to submit it again" in caplog.text


@pytest.mark.parametrize(
    "changes",
    [
        {"node_at": lambda _block: ZERO_ADDRESS},
        {"status_at": lambda _block: WorkerStatus.JAILED},
    ],
)
async def test_bad_signature_of_who_was_not_active_or_has_another_node_is_final(
    desk: Silenced, changes: dict[str, Any]
) -> None:
    desk.sign()
    desk.view.workers[WORKER].__dict__.update(changes)
    await desk.loop.on_change([desk.post(3, make_record(Verdict.REJECTED, Reason.BAD_SIGNATURE))])
    await desk.loop.settle()
    assert not desk.journal.unfinished()
    assert await desk.at(NOW) == []


async def test_work_that_is_shown_without_its_signature_is_submitted_directly(
    desk: Silenced,
) -> None:
    desk.sign()
    desk.commit()
    desk.asked.batches[3][0] = make_entry(TICKET, SIGNED.submission, OTHER_KEY)
    assert await desk.at(NOW) == ["submit"]


async def test_work_that_was_committed_before_a_rotation_is_not_submitted_again(
    desk: Silenced,
) -> None:
    signed = desk.sign()
    desk.commit()
    desk.asked.batches[3][0] = make_entry(TICKET, SIGNED.submission, OTHER_KEY)
    desk.view.workers[WORKER].node_at = lambda _block: address_of(OTHER_KEY)
    assert await desk.at(NOW) == []
    assert desk.journal.proven(signed)


async def test_batch_without_the_signature_is_proven_when_it_is_too_late_to_submit(
    desk: Silenced,
) -> None:
    desk.sign()
    desk.commit()
    desk.asked.batches[3][0] = make_entry(TICKET, SIGNED.submission, OTHER_KEY)
    desk.view.runs[RUN].paused = True
    for time_s in (NOW, *[TICKET.deadline + COMMIT_GRACE_S] * 8):
        assert await desk.at(time_s) == []
    assert await desk.at(DUE_AT) == ["split"]


@pytest.mark.parametrize(("copy", "steps"), [(3, []), (5, ["summon"])])
async def test_judges_are_not_called_for_work_that_an_earlier_batch_has_decided_about(
    desk: Silenced, copy: int, steps: list[str]
) -> None:
    desk.sign()
    desk.view.batches[4] = own()
    await desk.loop.on_change([desk.post(copy, make_record(Verdict.REJECTED, Reason.LATE))])
    await desk.loop.settle()
    assert await desk.at(DUE_AT) == steps
    assert await desk.at(VOID_AT) == ["void"]


async def test_outcomes_of_other_runs_are_not_read_for_accusations(desk: Silenced) -> None:
    class Unread(list[Any]):
        def __iter__(self) -> Any:
            raise AssertionError("they are of another run")

    desk.view.batches[3] = committed(run_id=RUN + 1, records=Unread([make_record()]))
    recall_accusations(desk.journal, desk.view, RUN, WORKER)


@pytest.mark.parametrize(("changes", "steps"), [({"file_hash": FOREIGN}, ["submit"]), ({}, [])])
async def test_record_of_another_file_is_no_outcome_of_the_work(
    desk: Silenced, changes: dict[str, Any], steps: list[str]
) -> None:
    desk.sign()
    await desk.loop.on_change([desk.post(5, make_record(Verdict.REJECTED, **changes))])
    await desk.loop.settle()
    assert await desk.at(LATE) == steps
