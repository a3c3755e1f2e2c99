"""The worker's loop: honest work, hostile tickets, outages, restarts, exclusion."""

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from worlds.client_chain import UNREACHABLE, WORKER_ID, make_account
from worlds.client_desk import Desk, make_record, run_until
from worlds.client_world import (
    DOMAIN,
    NODE_KEY,
    NOW,
    ROOT,
    RULES,
    RUN,
    VERSION,
    WORKER,
    make_claim,
    make_ticket,
)

from muster.api import NoWork
from muster.chain import WorkerStatus
from muster.client.connections import RunRelays
from muster.client.validator.judging import examine
from muster.protocol.eip712 import address_of, digest, recover
from muster.protocol.encoding import file_hash, keccak
from muster.protocol.errors import ApiError, ConfigError, EngineError, MusterError
from muster.protocol.ids import PolicyVersion, to_address
from muster.protocol.messages import OutcomeRecord, Reason, Verdict
from muster.protocol.rollouts import decode_rollouts
from muster.shardcast import ChunkStore, Fetcher, ShardServer

# Honest work


async def test_ticket_becomes_a_submission_that_validators_accept(desk: Desk) -> None:
    ticket = make_ticket()
    desk.orchestrator.tickets.append(ticket)
    await desk.loop.work_once()
    [(submission, signature, body)] = desk.orchestrator.uploads
    signer = recover(digest(DOMAIN, submission.struct_hash()), signature)
    assert signer == address_of(NODE_KEY)
    assert submission.file_hash == file_hash(body)
    rows = decode_rollouts(body)
    judgement = examine(make_claim(submission, ticket), rows, RULES, desk.engine)  # type: ignore[arg-type]
    assert judgement.finding is None


async def test_policy_is_fetched_with_the_root_on_chain_and_loaded_once(desk: Desk) -> None:
    desk.orchestrator.tickets.extend([make_ticket(), make_ticket(index=1)])
    await run_until(desk.loop, lambda: len(desk.orchestrator.uploads) == 2)
    assert desk.fetcher.fetched == [(VERSION, ROOT)]
    assert desk.engine.loaded == [(Path("v3"), VERSION)]


async def test_idle_worker_prefetches_the_newest_policy(desk: Desk) -> None:
    await run_until(
        desk.loop, lambda: desk.engine.policy_version == VERSION and desk.loop.state == "idle"
    )


async def test_worker_tells_that_it_lives(desk: Desk) -> None:
    await run_until(desk.loop, lambda: desk.orchestrator.calls["heartbeat"] >= 3)


async def test_submission_is_journalled_before_its_signature_leaves(desk: Desk) -> None:
    ticket = make_ticket()
    desk.orchestrator.tickets.append(ticket)
    seen: list[bool] = []
    submit = desk.orchestrator.submit

    async def watching(*args: Any) -> Any:
        seen.append(desk.journal.signed(ticket) is not None)
        return await submit(*args)

    desk.orchestrator.submit = watching  # type: ignore[method-assign]
    await desk.loop.work_once()
    assert seen == [True]


# Hostile and unfit tickets


async def test_ticket_ahead_of_the_chain_view_is_worked_on_once_the_view_follows(
    desk: Desk,
) -> None:
    ahead = make_ticket(policy_version=PolicyVersion(4), policy_root=keccak(b"manifest 4"))
    desk.orchestrator.tickets.append(ahead)
    checkpoints = desk.view.runs[RUN].checkpoints

    def done() -> bool:
        if desk.orchestrator.calls["lease"] >= 3 and 4 not in checkpoints:
            assert not desk.orchestrator.uploads
            checkpoints[4] = SimpleNamespace(
                manifest_root=ahead.policy_root, beacon=ahead.beacon, block_number=41
            )
        return bool(desk.orchestrator.uploads)

    await run_until(desk.loop, done)
    assert desk.orchestrator.uploads[0][0].policy_version == 4


async def test_signed_slot_is_refused_on_other_terms(desk: Desk) -> None:
    desk.orchestrator.tickets.append(make_ticket())
    await desk.loop.work_once()
    desk.view.runs[RUN].checkpoints[4] = SimpleNamespace(
        manifest_root=ROOT, beacon=keccak(b"block 50"), block_number=50
    )
    other = make_ticket(policy_version=PolicyVersion(4), beacon=keccak(b"block 50"))
    desk.orchestrator.tickets.append(other)
    await desk.loop.work_once()
    assert len(desk.orchestrator.uploads) == 1


async def test_signed_slot_is_uploaded_again_when_the_same_ticket_comes_again(desk: Desk) -> None:
    desk.orchestrator.tickets.append(make_ticket())
    await desk.loop.work_once()
    desk.orchestrator.tickets.append(make_ticket(deadline=NOW + 900))
    await desk.loop.work_once()
    first, second = desk.orchestrator.uploads
    assert first == second


# Outages


async def test_outage_of_the_orchestrator_is_survived_and_said_once(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    desk.orchestrator.tickets.append(make_ticket())
    desk.orchestrator.fail("lease", *[UNREACHABLE] * 5)
    with caplog.at_level(logging.INFO):
        await run_until(desk.loop, lambda: bool(desk.orchestrator.uploads))
    messages = [record.getMessage() for record in caplog.records]
    assert messages.count("the orchestrator is not available, trying again until it is") == 1
    assert messages.count("the orchestrator is available again") == 1


@pytest.mark.parametrize("known", [("http://127.0.0.1:1",), ()], ids=["dead", "none"])
async def test_policy_comes_from_relays_that_are_named_while_none_delivers(
    desk: Desk, tmp_path: Path, known: tuple[str, ...]
) -> None:
    store, weights = ChunkStore(tmp_path / "origin"), tmp_path / "weights"
    weights.write_bytes(b"weights")
    manifest = store.publish(
        {"model.safetensors": weights}, run_id=RUN, version=VERSION, stream_from=0, stream_to=0,
        sign=lambda _: bytes(65),
    )  # fmt: skip
    desk.view.runs[RUN].checkpoints[VERSION].manifest_root = manifest.root()
    async with ShardServer(store) as server:

        async def run_info() -> Any:
            return SimpleNamespace(policy_sources=(server.url,))

        relays = RunRelays((), run_info, tmp_path / "relays.txt")
        relays.urls = known
        async with Fetcher(
            relays.urls, tmp_path / "cache", attempts=1, renewed=relays.renew
        ) as fetcher:
            desk.loop.context = replace(desk.loop.context, fetcher=fetcher)
            await run_until(desk.loop, lambda: desk.engine.policy_version == VERSION)
    [(folder, _)] = desk.engine.loaded
    assert (folder / "model.safetensors").read_bytes() == b"weights"


async def test_outage_during_the_upload_is_survived_with_the_same_file(desk: Desk) -> None:
    desk.orchestrator.tickets.append(make_ticket())
    desk.orchestrator.fail("submit", *[UNREACHABLE] * 3)
    await run_until(desk.loop, lambda: bool(desk.orchestrator.uploads))
    assert desk.orchestrator.calls["submit"] == 4
    assert len(desk.journal.unfinished()) == 1


@pytest.mark.parametrize("gone", ["the relays", "the chain", "the weights"])
async def test_outage_of_what_it_needs_is_survived(desk: Desk, gone: str) -> None:
    desk.orchestrator.tickets.append(make_ticket())
    load, broken = desk.engine.load_policy, [EngineError("no weights")] * 3

    def failing(folder: Path, version: PolicyVersion) -> None:
        if broken:
            raise broken.pop()
        load(folder, version)

    match gone:
        case "the relays":
            desk.fetcher.failures = 3
        case "the chain":
            desk.chain_errors = 3
        case _:
            desk.engine.load_policy = failing  # type: ignore[method-assign]
    await run_until(desk.loop, lambda: bool(desk.orchestrator.uploads))


async def test_refused_upload_is_given_up_and_never_signed_again(desk: Desk) -> None:
    ticket = make_ticket()
    desk.orchestrator.tickets.extend([ticket, ticket])
    desk.orchestrator.fail("submit", ApiError("too late", status=409, code="late"))
    await desk.loop.work_once()
    await desk.loop.work_once()
    assert not desk.orchestrator.uploads
    assert not desk.journal.unfinished()
    assert desk.journal.signed(ticket) is not None


@pytest.mark.parametrize(("status", "code"), [(409, "ticket_unknown"), (403, "worker_not_active")])
async def test_work_that_was_refused_for_a_while_is_taken_when_its_slot_comes_again(
    desk: Desk, status: int, code: str
) -> None:
    # The orchestrator lost its database, or the worker's registration in a reorganisation: the slot
    # is given out anew, and only what was signed for it may go in.
    desk.orchestrator.tickets.extend([make_ticket(), make_ticket(deadline=NOW + 900)])
    desk.orchestrator.fail("submit", ApiError("none", status=status, code=code))
    await desk.loop.work_once()
    assert not desk.orchestrator.uploads
    await desk.loop.work_once()
    ((submission, *_),) = desk.orchestrator.uploads
    (kept,) = desk.journal.unfinished().values()
    assert kept.submission == submission


# Restarts


@pytest.mark.parametrize("is_settled", [False, True])
async def test_restarted_worker_uploads_the_stored_file_first_unless_it_is_settled(
    tmp_path: Path, is_settled: bool
) -> None:
    first = Desk(tmp_path)
    first.orchestrator.tickets.append(make_ticket())
    await first.loop.work_once()
    first.close()
    second = Desk(tmp_path)
    if is_settled:
        second.post(1, make_record())
    await run_until(second.loop, lambda: second.orchestrator.calls["lease"] >= 2)
    assert second.orchestrator.uploads == ([] if is_settled else first.orchestrator.uploads)
    assert bool(second.journal.unfinished()) is not is_settled
    second.close()


# Settlement and standing


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (make_record(), "submission accepted"),
        (make_record(Verdict.REJECTED, Reason.LATE), "submission not accepted"),
    ],
)
async def test_outcome_of_a_submission_is_said_and_its_file_dropped(
    desk: Desk, record: OutcomeRecord, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    desk.orchestrator.tickets.append(make_ticket())
    await desk.loop.work_once()
    await desk.loop.on_change([desk.post(1, record)])
    with caplog.at_level(logging.INFO):
        await desk.loop.settle()
    assert said in [r.getMessage() for r in caplog.records]
    assert not desk.journal.unfinished()


async def test_only_own_accepted_outcomes_are_counted(desk: Desk) -> None:
    mine = [make_record(), make_record(Verdict.FRAUD, Reason.WRONG_SEED, index=1)]
    others = replace(make_record(index=2), worker_id=WORKER_ID + 1)
    await desk.loop.on_change([desk.post(1, *mine, others)])
    await desk.loop.settle()
    assert desk.loop.outcomes.earned == [(NOW + 60, 200)]


@pytest.mark.parametrize(
    ("account", "says"),
    [
        (make_account(status=WorkerStatus("Jailed")), "jailed"),
        (make_account(status=WorkerStatus("Banned")), "banned"),
        (make_account(status=WorkerStatus("Exiting")), "exiting"),
        (make_account(node=to_address(bytes(20))), "is served by node"),
        (None, "is not a worker of run"),
    ],
)
async def test_worker_stops_with_the_reason_when_it_may_not_work(
    desk: Desk, account: Any, says: str
) -> None:
    desk.view.workers.clear()
    desk.view.workers |= {WORKER: account} if account else {}
    with pytest.raises(MusterError, match=says) as caught:
        await run_until(desk.loop, lambda: False)
    assert caught.value.hint


async def test_worker_says_its_last_outcome_before_it_stops(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    desk.orchestrator.tickets.append(make_ticket())
    await desk.loop.work_once()
    desk.view.workers[WORKER] = make_account(status=WorkerStatus.BANNED)
    await desk.loop.on_change([desk.post(1, make_record(Verdict.FRAUD, Reason.WRONG_REWARD))])
    with caplog.at_level(logging.INFO), pytest.raises(MusterError, match="banned"):
        await run_until(desk.loop, lambda: False)
    reasons = [vars(r).get("reason") for r in caplog.records]
    assert "WRONG_REWARD" in reasons


async def test_reason_for_no_ticket_is_logged_once(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    reasons = iter(["unit_cap", "unit_cap", None, "unit_cap", "mystery"])

    async def refuse(*_asked: object, **_named: object) -> Any:
        return NoWork(retry_after_s=0.001, reason=next(reasons))

    desk.orchestrator.lease = refuse  # type: ignore[method-assign]
    for _ in range(5):
        await desk.loop.work_once()
    told = [vars(r) for r in caplog.records if r.message == "no ticket for this worker"]
    assert [r["reason"] for r in told] == ["unit_cap", "unit_cap", "mystery"]
    assert "add stake" in told[0]["hint"]


def test_context_never_shows_its_key(desk: Desk) -> None:
    assert repr(NODE_KEY) not in repr(desk.loop.context)
    assert NODE_KEY.hex() not in repr(desk.loop.context)


async def test_news_from_the_chain_end_an_idle_pause(desk: Desk) -> None:
    async def patient(*_asked: object, **_named: object) -> Any:
        desk.orchestrator.calls["lease"] += 1
        return NoWork(retry_after_s=60)

    desk.orchestrator.lease = patient  # type: ignore[method-assign]

    async def news() -> None:
        while desk.orchestrator.calls["lease"] < 1:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        await desk.loop.on_change([])

    task = asyncio.ensure_future(news())
    await run_until(desk.loop, lambda: desk.orchestrator.calls["lease"] >= 2)
    await task


async def test_worker_refuses_to_sign_with_its_own_cold_key(desk: Desk) -> None:
    desk.loop.context = replace(desk.loop.context, worker=address_of(NODE_KEY))
    desk.view.workers[address_of(NODE_KEY)] = make_account()
    with pytest.raises(ConfigError, match=r"own \(cold\) key") as caught:
        desk.loop.require_good_standing()
    assert "node.json" in (caught.value.hint or "")
