"""A worker that may take no more work: why it stays or starts, and when it ends."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from worlds.client_chain import WORKER_ID, make_account, make_batch
from worlds.client_silence import (
    DATA,
    DUE_AT,
    FOREIGN,
    JUROR,
    LATE,
    NODE,
    SIGNED,
    TICKET,
    TIMES,
    Silenced,
    accept,
    make_record,
    own,
)
from worlds.client_world import (
    NOW,
    RUN,
    WORKER,
    as_claimed,
    make_submission,
    make_ticket,
    sign_ticket,
)

from muster.chain import BatchStatus, WorkerStatus
from muster.client.worker.outcomes import Judged, recall_accusations
from muster.client.worker.standing import require_needed
from muster.protocol.encoding import file_hash
from muster.protocol.errors import ConfigError, MusterError
from muster.protocol.ids import Address
from muster.protocol.messages import COMMIT_GRACE_S, OutcomeRecord, Verdict


async def test_banned_worker_stays_until_its_bonds_are_back(desk: Silenced) -> None:
    record = replace(as_claimed(SIGNED.submission, WORKER_ID), verdict=Verdict.FRAUD)
    desk.view.batches[4] = own(status=BatchStatus.JUDGED, records=[record])
    desk.chain.bonds[4] = NODE
    desk.view.workers[WORKER] = make_account(status=WorkerStatus.BANNED)
    leaving = asyncio.ensure_future(desk.loop._round())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not leaving.done()
    await desk.at(NOW)
    with pytest.raises(MusterError, match="banned"):
        await leaving
    assert desk.chain.names == ["return"]


INACTIVE = [WorkerStatus.JAILED, WorkerStatus.EXITING, WorkerStatus.BANNED]


@pytest.mark.parametrize("status", INACTIVE)
async def test_worker_that_may_not_work_stays_until_its_work_is_judged(
    desk: Silenced, status: WorkerStatus
) -> None:
    desk.sign()
    desk.view.workers[WORKER] = make_account(status=status)
    leaving = asyncio.ensure_future(desk.loop._round())
    await asyncio.sleep(5 * desk.loop.context.poll_s)
    assert not leaving.done()
    await desk.loop.on_change([desk.post(5, make_record())])
    await desk.loop.settle()
    with pytest.raises(MusterError, match=str(status.value).lower()):
        await leaving


async def test_worker_that_may_not_work_does_not_wait_for_work_that_nobody_can_judge(
    desk: Silenced,
) -> None:
    desk.sign()
    desk.view.workers[WORKER] = make_account(status=WorkerStatus.EXITING)
    desk.chain.time_s = TICKET.deadline + COMMIT_GRACE_S + TIMES.longest_s
    with pytest.raises(MusterError, match="exiting"):
        await desk.loop._round()


async def test_node_that_signed_twice_stays_until_its_other_work_is_judged(desk: Silenced) -> None:
    desk.sign()
    desk.loop.context.held.fault = ConfigError("it signed two submissions")
    leaving = asyncio.ensure_future(desk.loop._round())
    await asyncio.sleep(5 * desk.loop.context.poll_s)
    assert not leaving.done()
    assert await desk.at(LATE) == []
    await desk.loop.on_change([desk.post(5, make_record())])
    await desk.loop.settle()
    with pytest.raises(ConfigError, match="signed two"):
        await leaving
    assert "submit" not in desk.chain.names


async def test_node_that_signed_twice_still_splits_off_and_summons(desk: Silenced) -> None:
    desk.sign()
    desk.loop.context.held.fault = ConfigError("it signed two submissions")
    desk.commit()
    assert await desk.at(DUE_AT) == ["split"]
    desk.view.batches[4] = own()
    desk.view.own_work[(RUN, WORKER)] = {SIGNED.submission.leaf(): own()}
    assert await desk.at(DUE_AT) == ["summon"]


async def test_work_is_not_submitted_when_another_is_dropped_while_its_bond_is_approved(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.sign()

    async def approve(_spender: Address, _wei: int) -> None:
        desk.loop.context.held.fault = ConfigError("it signed two submissions")

    monkeypatch.setattr(desk.chain, "approve", approve)
    assert await desk.at(LATE) == []
    assert await desk.at(LATE + 10) == []


async def test_worker_that_may_work_again_meanwhile_goes_on(desk: Silenced) -> None:
    desk.sign()
    desk.view.workers[WORKER] = make_account(status=WorkerStatus.BANNED)
    going_on = asyncio.ensure_future(desk.loop._round())
    async with asyncio.timeout(20):
        while desk.loop.state != "idle":
            await asyncio.sleep(0)
        assert not desk.orchestrator.calls["lease"]
        desk.view.workers[WORKER] = make_account()
        await going_on
    assert desk.orchestrator.calls["lease"] == 1
    assert desk.journal.unfinished()


@pytest.mark.parametrize("status", INACTIVE)
def test_inactive_worker_starts_only_for_work_without_an_outcome(
    desk: Silenced, status: WorkerStatus
) -> None:
    desk.view.workers[WORKER] = make_account(status=status)
    starts = partial(require_needed, desk.journal, desk.view, RUN, WORKER, NODE)
    with pytest.raises(MusterError, match="may not work"):
        starts()
    signed = desk.sign()
    starts()
    desk.view.workers[WORKER] = make_account(status=status, node=JUROR)
    desk.view.workers[WORKER].status = WorkerStatus.ACTIVE
    with pytest.raises(ConfigError, match="is served by node"):
        starts()
    desk.view.workers[WORKER] = make_account(status=status)
    desk.journal.finish(signed, "REJECTED")
    with pytest.raises(MusterError, match="may not work"):
        starts()


@pytest.mark.parametrize(
    ("record", "of_batch", "is_answered", "is_accused"),
    [
        (make_record(Verdict.FRAUD), {}, False, True),
        (make_record(Verdict.FRAUD), {}, True, False),
        (make_record(Verdict.REJECTED), {}, False, False),
        (make_record(Verdict.FRAUD, file_hash=FOREIGN), {}, False, False),
        (make_record(Verdict.FRAUD, worker_id=WORKER_ID + 1), {}, False, False),
        (make_record(Verdict.FRAUD), {"run_id": RUN + 1}, False, False),
        (make_record(Verdict.FRAUD), {"records": None}, False, False),
    ],
    ids=[
        "accused", "answered", "rejected", "another file", "another worker", "another run",
        "not judged",
    ],
)  # fmt: skip
async def test_inactive_worker_starts_for_accepted_work_that_was_called_fraud_later(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record: OutcomeRecord,
    of_batch: dict[str, Any],
    is_answered: bool,
    is_accused: bool,
) -> None:
    monkeypatch.setattr("muster.client.worker.journal.KEPT_REFUSED", 0)
    first = Silenced(tmp_path)
    signed = await accept(first)
    batch = replace(make_batch(5, [SIGNED.submission], [record]), **of_batch)
    if is_answered:
        first.journal.answer(signed, Judged(signed, batch, 0).case_id)
    first.close()
    desk = Silenced(tmp_path)
    desk.view.batches |= {5: batch, 3: first.view.batches[3]}
    desk.view.workers[WORKER] = make_account(status=WorkerStatus.EXITING)
    recall_accusations(desk.journal, desk.view, RUN, WORKER)
    refuses = contextlib.nullcontext() if is_accused else pytest.raises(MusterError, match="exit")
    with refuses:
        require_needed(desk.journal, desk.view, RUN, WORKER, NODE)
    # Files and policies that a dispute needs are not deleted before the loop sees the record.
    assert desk.journal.open_versions(RUN) == ({TICKET.policy_version} if is_accused else set())
    if is_accused:
        other = make_ticket(index=1)
        work = make_submission(other, [], file_hash=file_hash(b"b"), rollouts=1, units=20)
        refused = desk.journal.record(other, sign_ticket(other), work, b"b")
        desk.journal.finish(refused, "REJECTED")
        assert desk.journal.data(signed) == DATA
    desk.close()
