"""A worker against verdicts of fraud: what it claims, when it tries again, when it concedes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from worlds.client_chain import WORKER_ID, make_batch
from worlds.client_desk import run_until
from worlds.client_silence import (
    BOND,
    FOREIGN,
    LATE,
    OTHER,
    SIGNED,
    TICKET,
    Silenced,
    accept,
    banned,
    break_reads,
    fill,
    judge,
    note_claims,
)
from worlds.client_world import ROOT, RUN, as_claimed, make_ticket

from muster.api import BatchEntry
from muster.client.worker import defence
from muster.client.worker.loop import WorkerLoop
from muster.client.worker.silence import SilenceDuty
from muster.lifecycle.outage import Outage
from muster.protocol.encoding import keccak
from muster.protocol.errors import (
    ChainUnreachable,
    ContractRevert,
    EngineError,
    MusterError,
    PolicyUnavailable,
)
from muster.protocol.ids import Hash32, PolicyVersion, RunId
from muster.protocol.messages import COMMIT_GRACE_S, Reason, Ticket, Verdict
from muster.protocol.rollouts import Rollout


@pytest.mark.parametrize(("is_own_file", "accused"), [(True, 1), (False, 0)])
async def test_accepted_work_that_is_called_fraud_after_a_reorganisation_is_disputed(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch, is_own_file: bool, accused: int
) -> None:
    contested: list[Any] = []

    async def contest(_silence: SilenceDuty, judged: Any) -> None:
        contested.append(judged.signed.submission)

    monkeypatch.setattr(desk.loop.defence, "_contest", contest)
    await accept(desk)
    record = replace(as_claimed(SIGNED.submission, WORKER_ID), verdict=Verdict.FRAUD)
    if not is_own_file:
        record = replace(record, file_hash=keccak(b"another"))
    await desk.loop.on_change([desk.post(5, record)])
    await desk.loop.settle()
    assert contested == [SIGNED.submission] * accused
    assert len(desk.journal.accepted()) == 1 - accused


@pytest.mark.parametrize("stuck", ["the upload", "the fetch"])
async def test_fraud_is_disputed_while_the_work_is_stuck(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch, stuck: str
) -> None:
    made = note_claims(monkeypatch)
    submission, fetch = await fill(desk, TICKET), desk.fetcher.fetch

    async def hang(*_: Any) -> Any:
        await desk.accuse(submission)
        await asyncio.Event().wait()

    async def deliver(run_id: RunId, version: PolicyVersion, root: Hash32) -> Path:
        return await (hang() if version == newer.policy_version else fetch(run_id, version, root))

    if stuck == "the upload":
        desk.orchestrator.tickets.append(make_ticket(index=1))
        desk.orchestrator.submit = hang  # type: ignore[method-assign]
    else:
        newer = newer_policy(desk, index=1)
        desk.orchestrator.tickets.append(newer)
        desk.fetcher.fetch = deliver  # type: ignore[method-assign]
    await run_until(desk.loop, lambda: not desk.duty.accused and bool(made))
    assert [each.position for each in made] == [0]
    assert desk.loop.outcomes.refused == 1


class Forger(WorkerLoop):
    """Claims rewards that it did not earn."""

    async def generate(self, ticket: Any) -> list[Rollout]:
        return [replace(row, task_reward=1.0) for row in await super().generate(ticket)]


@pytest.mark.parametrize(("loop_class", "claims"), [(WorkerLoop, 1), (Forger, 0)])
async def test_honest_work_that_is_called_fraud_is_claimed_and_fraud_is_not(
    tmp_path: Path, loop_class: type[WorkerLoop], claims: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    async def claim(_chain: Any, proof: Any, entry: BatchEntry, ruling: Any, *rest: Any, **_: Any):  # type: ignore[no-untyped-def]
        made.append((proof, entry, ruling, rest))

    monkeypatch.setattr("muster.client.worker.defence.claim", claim)
    desk = Silenced(tmp_path, loop_class)
    submission, data = await desk.call_fraud(Reason.WRONG_REWARD)
    await desk.loop.settle()
    await desk.duty.fill_rooms()
    assert len(made) == len(desk.rooms.given) == claims
    for proof, entry, ruling, _ in made:
        assert (proof.position, entry.submission) == (0, submission)
        assert str(ruling) == "accepted"
        assert desk.rooms.given[0][0] == data
        assert desk.chain.allowed == BOND
    assert not desk.journal.unfinished()
    desk.close()


def retry_at_once(desk: Silenced) -> None:
    desk.loop.defence.outage = Outage("a claim", first_s=0.0, longest_s=0.0)


@pytest.mark.parametrize(
    ("junk", "claimed"),
    [
        ({"verdict": Verdict.REJECTED, "file_hash": FOREIGN}, [1]),
        ({"verdict": Verdict.REJECTED}, [1]),
        ({"verdict": Verdict.ACCEPTED}, [1]),
        ({"verdict": Verdict.FRAUD, "file_hash": FOREIGN}, [1]),
        ({"verdict": Verdict.FRAUD}, [0, 1]),
    ],
    ids=["another file", "rejected", "accepted", "fraud of another file", "fraud twice"],
)
async def test_fraud_is_disputed_whatever_else_is_recorded_for_its_slot(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch, junk: dict[str, Any], claimed: list[int]
) -> None:
    made = note_claims(monkeypatch)
    submission = await fill(desk, TICKET)
    honest = as_claimed(submission, WORKER_ID)
    fraud = replace(honest, verdict=Verdict.FRAUD, reason=Reason.WRONG_REWARD)
    await judge(desk, (OTHER, replace(honest, **junk)), (submission, fraud))
    assert [proof.position for proof in made] == claimed
    assert desk.journal.open_versions(RUN) == {TICKET.policy_version}
    await desk.duty.fill_rooms()
    assert desk.rooms.given
    assert not desk.journal.unfinished()
    assert not desk.journal.open_versions(RUN)


@pytest.mark.parametrize("is_answered", [True, False])
async def test_restarted_worker_disputes_what_it_has_not_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_answered: bool
) -> None:
    made = note_claims(monkeypatch, *[] if is_answered else [ChainUnreachable("no answer")])
    first = Silenced(tmp_path)
    submission = await fill(first, TICKET)
    honest = as_claimed(submission, WORKER_ID)
    rejected = replace(honest, verdict=Verdict.REJECTED)
    await judge(first, (OTHER, rejected), (submission, replace(honest, verdict=Verdict.FRAUD)))
    await first.duty.fill_rooms()
    first.close()
    second = Silenced(tmp_path)
    second.view.batches = first.view.batches
    second.loop.outcomes.read([3])
    await second.loop.settle()
    assert [proof.position for proof in made] == [1]
    assert not second.duty.accused
    second.close()


@pytest.mark.parametrize("fault", ["committed late", "slot used before"])
async def test_fault_of_the_committer_is_claimed_in_the_place_of_fraud(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    demanded: list[str] = []

    async def claim(_chain: Any, _proof: Any, _work: Any, ruling: Any, *_: Any, **__: Any) -> None:
        demanded.append(str(ruling))

    monkeypatch.setattr("muster.client.worker.defence.claim", claim)
    submission = await fill(desk, TICKET)
    await desk.accuse(submission, reason=Reason.WRONG_REWARD)
    if fault == "committed late":
        late = TICKET.deadline + COMMIT_GRACE_S + 1
        desk.view.batches[3] = replace(desk.view.batches[3], committed_at=late)
    else:
        junk = replace(as_claimed(submission, WORKER_ID), file_hash=FOREIGN)
        desk.view.batches[2] = make_batch(2, [OTHER], [replace(junk, verdict=Verdict.REJECTED)])
    await desk.loop.settle()
    reason = "late" if fault == "committed late" else "slot_reused"
    assert demanded == [f"rejected for {reason}"]


async def test_honest_work_that_cannot_be_claimed_says_how_to_do_it_by_hand(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = note_claims(monkeypatch)
    retry_at_once(desk)
    desk.chain.tokens = BOND - 1
    await desk.call_fraud()
    for _ in range(2):
        await desk.loop.settle()
    [said] = [r for r in caplog.records if "could not be claimed" in r.getMessage()]
    assert "the bond is 10 tokens" in vars(said)["error"]
    assert "muster dispute open 3:0" in vars(said)["hint"]
    assert not desk.rooms.given
    assert not desk.duty.is_done()
    desk.chain.tokens = BOND
    monkeypatch.setattr(desk.loop, "_recheck", None)  # what was found once is not computed again
    for _ in range(2):
        await desk.loop.settle()
    assert len(made) == 1


async def test_refused_claim_is_tried_again_until_the_window_closes(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = note_claims(monkeypatch, ContractRevert("CourtMayNotClaim", ()))
    retry_at_once(desk)
    await desk.call_fraud()
    await desk.loop.settle()
    assert desk.duty.accused
    [judged] = desk.duty.accused.values()
    desk.now_s = desk.duty.closes_at(judged.batch)
    await desk.loop.settle()
    assert not made
    assert not desk.duty.accused
    assert "a verdict of fraud can be disputed no more" in caplog.messages


async def test_claim_joins_an_open_case_after_the_window_and_no_closed_one(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = note_claims(monkeypatch)
    first, second = await fill(desk, TICKET), await fill(desk, make_ticket(index=1))
    await desk.accuse(first, second)
    batch = desk.view.batches[3]
    for position, record in enumerate(batch.records):
        case = SimpleNamespace(closed=bool(position), claims=[])
        desk.view.cases[record.leaf(3, position)] = case
    desk.now_s = desk.duty.closes_at(batch)
    await desk.loop.settle()
    assert [proof.position for proof in made] == [0]


async def test_disk_that_cannot_read_only_delays_the_claim_for_honest_work(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = note_claims(monkeypatch)
    retry_at_once(desk)
    await desk.call_fraud()
    break_reads(monkeypatch, 1)
    await desk.loop.settle()
    assert not made
    assert desk.duty.accused
    await desk.loop.settle()
    assert len(made) == 1


async def test_accused_work_without_a_file_is_not_claimed_and_said_to_be_lost(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = note_claims(monkeypatch)
    await desk.call_fraud()
    for path in desk.journal._files.iterdir():
        path.unlink()
    await desk.loop.settle()
    assert not made
    assert not desk.duty.accused
    assert "the file of work that was called fraud is lost" in caplog.messages


def newer_policy(desk: Silenced, **changes: Any) -> Ticket:
    """Publish another policy; return a ticket for it."""
    version, beacon = PolicyVersion(4), keccak(b"block 50")
    desk.view.runs[RUN].checkpoints[version] = SimpleNamespace(
        manifest_root=ROOT, beacon=beacon, block_number=50
    )
    return make_ticket(policy_version=version, beacon=beacon, **changes)


@pytest.mark.parametrize("failure", [ChainUnreachable("no answer"), EngineError("no memory")])
async def test_an_outage_only_delays_the_claim_for_honest_work(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    made = note_claims(monkeypatch, failure, failure)
    retry_at_once(desk)
    await desk.call_fraud()
    await desk.loop.settle()
    assert not made
    assert desk.journal.unfinished()
    assert not desk.duty.is_done()
    # Work that was judged is never submitted again.
    assert await desk.at(LATE) == []
    # The verdict may also have banned the worker: it stays until the claim is made.
    monkeypatch.setattr(desk.loop, "require_good_standing", banned)
    leaving = asyncio.ensure_future(desk.loop._round())
    for _ in range(2):
        await desk.loop.settle()
    assert len(made) == 1
    # Nor does it end before the rooms have the file, whether or not it sees its case.
    await asyncio.sleep(3 * desk.loop.context.poll_s)
    assert not leaving.done()
    await desk.duty.fill_rooms()
    with pytest.raises(MusterError, match="banned"):
        await leaving
    assert not desk.journal.unfinished()
    assert desk.duty.is_done()
    assert desk.loop.outcomes.refused == 1


@pytest.mark.parametrize("others", ["show no policy", "are silent"])
async def test_accusation_that_cannot_be_checked_does_not_delay_the_claim_about_another(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch, others: str
) -> None:
    made = note_claims(monkeypatch)
    first = await fill(desk, TICKET)
    second = await fill(desk, newer_policy(desk, index=1))
    monkeypatch.setattr(defence, "CONTEST_S", 0.0)

    async def fetch(*_: Any) -> Any:
        monkeypatch.setattr(defence, "CONTEST_S", 300.0)
        if others == "are silent":
            await asyncio.Event().wait()
        raise PolicyUnavailable("no relay shows it")

    desk.fetcher.fetch = fetch  # type: ignore[method-assign]
    await desk.accuse(first, second)
    async with asyncio.timeout(60):
        await desk.loop.settle()
    assert [each.position for each in made] == [1]
    [(case_id, judged)] = desk.duty.accused.items()
    assert desk.journal.unfinished()[judged.signed.slot].submission == first
    assert set(desk.loop.defence.waits_until) == {case_id}
    desk.duty.accused.clear()
    await desk.loop.settle()
    assert not desk.loop.defence.waits_until


class Slow:
    """Fetches policies, in longer than one try of a dispute waits for them."""

    def __init__(self) -> None:
        self.begun = self.ended = 0
        self.arrives = asyncio.Event()
        self.failure: Exception | None = None

    async def fetch(self, _run_id: RunId, version: PolicyVersion, _root: Hash32) -> Path:
        self.begun += 1
        try:
            await self.arrives.wait()
        finally:
            self.ended += 1
        if self.failure:
            raise self.failure
        return Path(f"v{version}")


async def wait_for_a_slow_policy(desk: Silenced, monkeypatch: pytest.MonkeyPatch) -> Slow:
    """Have work called fraud whose policy has to be fetched again, and disputed three times."""
    retry_at_once(desk)
    monkeypatch.setattr(defence, "CONTEST_S", 0.0)
    await desk.call_fraud()
    desk.loop.station.loaded = None
    slow = Slow()
    desk.fetcher.fetch = slow.fetch  # type: ignore[method-assign]
    for _ in range(3):
        await desk.loop.settle()
    assert (slow.begun, slow.ended) == (1, 0)
    monkeypatch.setattr(defence, "CONTEST_S", 300.0)
    return slow


@pytest.mark.parametrize("failure", [None, PolicyUnavailable("no relay shows it")])
async def test_fetch_for_a_dispute_goes_on_between_its_tries(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch, failure: Exception | None
) -> None:
    made = note_claims(monkeypatch)
    slow = await wait_for_a_slow_policy(desk, monkeypatch)
    slow.failure = failure
    slow.arrives.set()
    await desk.loop.settle()
    assert len(made) == (0 if failure else 1)
    slow.failure = None
    await desk.loop.settle()
    assert len(made) == 1


async def test_fetch_for_a_dispute_ends_with_it(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = await wait_for_a_slow_policy(desk, monkeypatch)
    [judged] = desk.duty.accused.values()
    desk.now_s = desk.duty.closes_at(judged.batch)
    for _ in range(2):
        await desk.loop.settle()
    assert not desk.duty.accused
    assert slow.ended == 1


async def test_fetch_for_a_dispute_ends_with_the_worker(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = await wait_for_a_slow_policy(desk, monkeypatch)
    await run_until(desk.loop, lambda: desk.orchestrator.calls["lease"] > 1)
    assert slow.ended == slow.begun
