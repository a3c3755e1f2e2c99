"""The orchestrator's background flow: reads chain events, sends batches and outcomes.

One rollout, from task to payment (docs/architecture.md):

     1. publish     the trainer cuts the policy into chunks and anchors its root on chain
     2. broadcast   relays mirror the chunks
     3. fetch       a worker pulls and verifies them
  >  4. lease       the worker gets a signed ticket                 leases/leases.py
     5. generate    it samples and commits to its hidden states
  >  6. submit      its file is taken in; a batch's root goes on chain   intake/intake.py, commit
  >  7. validate    validators fetch the batch and sign outcomes    outcomes/outcomes.py
  >  8. record      a quorum's outcomes are posted                  record
     9. train       the trainer consumes what was accepted
  > 10. settle      fraud is executed, and finalised after its window    settle, report
    11. dispute     a jury decides about a challenged verdict
    12. audit       anyone rebuilds all of it from the chain

Each coroutine below is one background task. It owns its state, sleeps until it is woken or its
interval is over, and survives a full disk and a chain that refuses or does not answer. Each can be
killed at any point: its remaining work follows again from the chain and the files folder.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from muster.chain import Batch, PauseCause, apply_poll
from muster.chain.doubles import Fault
from muster.lifecycle import first_error
from muster.orchestrator.clock import Backoff, loop_time, wait_for
from muster.orchestrator.dashboard.status import to_json
from muster.orchestrator.intake.batching import Composition
from muster.orchestrator.intake.retention import Retention
from muster.orchestrator.metrics import TRANSACTIONS
from muster.orchestrator.outcomes.breaker import LOOK_INTERVAL_S
from muster.orchestrator.outcomes.outcomes import Agreed
from muster.orchestrator.outcomes.settlement import OutcomePlace
from muster.orchestrator.ports import ReaderPort
from muster.orchestrator.services import Services
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.errors import (
    ApiError,
    ChainError,
    ContractRevert,
    StorageError,
    StorageFailed,
)

if TYPE_CHECKING:
    from muster.orchestrator.process import Leadership

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""First pause in seconds after the chain refused or did not answer; it doubles each time."""
UNFUNDED = "EscrowUnderfunded"
"""Name of the contract error for a batch that the run cannot pay for."""
UNFUNDED_RETRY_S = 5.0
"""Longest pause in seconds before such a batch is tried again."""
IDLE_S = 1.0
"""A task looks for work at least this often, even if nothing woke it."""
STATUS_INTERVAL_S = 0.25
"""Minimum time in seconds between two statuses sent to listeners."""
REPORT_INTERVAL_S = 5.0
"""Seconds between two searches for second signatures."""
COLLECT_INTERVAL_S = 600.0
"""Seconds between two searches for files to delete."""
CHECKPOINT_INTERVAL_S = 0.5
"""Seconds between two checks of the length of the database's log."""
PURGE_INTERVAL_S = 60.0
"""Seconds between two deletions of expired nonces."""


async def run(services: Services, reader: ReaderPort, leadership: Leadership | None = None) -> None:
    """Run every background task until cancelled; a failing one ends them all.

    Without `leadership`, this process is the only one that writes to the chain.
    """
    # A server may be unreachable for a while. A file that fails is damaged unless its disk is full.
    survived = StorageError if services.database.is_shared else StorageFailed
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(services.group.run())
        tasks.create_task(_lasting(partial(follow, services, reader), survived))
        for task in (announce, purge, checkpoint):
            tasks.create_task(_lasting(partial(task, services), survived))
        if leadership is None:
            tasks.create_task(write(services))
        else:
            tasks.create_task(lead(services, leadership))
            tasks.create_task(_lasting(partial(listen, services), survived))


async def write(services: Services) -> None:
    """Run the tasks that write to the chain."""
    async with asyncio.TaskGroup() as tasks:
        for task in (commit, record, settle, report, guard):
            tasks.create_task(_lasting(partial(task, services)))
        if services.retention is not None:
            tasks.create_task(collect(services.retention))


async def lead(services: Services, leadership: Leadership) -> NoReturn:
    """Write to the chain while this replica is the leader."""
    while True:
        try:
            async with leadership.held():
                await services.batching.load()
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(write(services))
                    tasks.create_task(tell(services))
        except* StorageError as errors:
            logger.warning(
                "this replica no longer writes to the chain",
                extra={"error": str(first_error(errors))},
            )
            await asyncio.sleep(RETRY_S)


async def collect(retention: Retention) -> NoReturn:
    """Delete files that nobody can need any more."""
    while True:
        try:
            await retention.collect()
        except (ApiError, StorageFailed) as error:
            logger.warning("cannot delete old files", extra={"error": str(error)})
        await asyncio.sleep(COLLECT_INTERVAL_S)


async def tell(services: Services) -> NoReturn:
    """Store what the other replicas must know to lease."""
    while True:
        await services.batching.share()
        await asyncio.sleep(IDLE_S)


async def listen(services: Services) -> NoReturn:
    """Load what nodes and the trainer told other replicas."""
    while True:
        await asyncio.sleep(IDLE_S)
        await services.heartbeats.load()
        await services.training.load()


async def _lasting(
    task: Callable[[], Awaitable[NoReturn]], survived: type[StorageError] = StorageFailed
) -> NoReturn:
    """Run a task; start it again after a failed write to a disk or bucket, or an error in
    `survived`.
    """
    while True:
        try:
            await task()
        except (ApiError, survived) as error:
            logger.warning("a task starts again: storage failed", extra={"error": str(error)})
            await asyncio.sleep(RETRY_S)


async def follow(services: Services, reader: ReaderPort) -> NoReturn:
    """Keep view and projection up to date with the chain."""
    backoff = Backoff(first_s=RETRY_S, most_s=30.0)
    while True:
        try:
            await follow_once(services, reader)
            backoff.succeeded("poll")
        except ChainError as error:
            pause_s = backoff.failed("poll")
            services.chain_health.failed(str(error))
            logger.warning("the chain does not answer", extra={"error": str(error)})
            await asyncio.sleep(pause_s)
        await wait_for(services.wakes.poll, services.settings.poll_s)


async def follow_once(services: Services, reader: ReaderPort) -> None:
    """Apply the chain events since the last call."""
    poll = await reader.poll()
    projection, was_named = services.projection, services.leases.is_named
    has_changed = apply_poll(projection.view, poll)
    projection.head = poll.head.number
    if poll.rewound_to is not None:
        projection.rebuild()
        await services.batching.load()
    else:
        projection.apply(poll.events)
    if was_named and not services.leases.is_named:
        logger.warning(
            "the run names another orchestrator: this one gives out no work any more",
            extra={"hint": "start it again with the keystore of that account"},
        )
    services.batching.sync(poll.head.number)
    if has_changed:
        services.wakes.chain_changed()
    if poll.rewound_to is not None:
        await services.leases.close_void()
    # Comes last: the events are applied even if this fails.
    services.chain_clock.update(await services.chain.now())
    services.chain_health.succeeded(poll.head.number, services.clock())


async def commit(services: Services) -> NoReturn:
    """Step 6: commit batches of received submissions, at most one per interval."""
    backoff = Backoff(first_s=RETRY_S)
    while True:
        started = loop_time()
        if await commit_once(services, backoff):
            rest_s = services.settings.commit_interval_s - (loop_time() - started)
            await asyncio.sleep(max(rest_s, 0.0))
        else:
            await wait_for(services.wakes.commit, IDLE_S)


async def commit_once(services: Services, backoff: Backoff) -> bool:
    """Commit the next batch; returns whether one is on chain now."""
    batching = services.batching
    composition = await batching.next()
    if composition is None:
        return False
    try:
        await batching.commit(composition)
    except ChainError as error:
        if isinstance(error, ContractRevert) and await batching.take_apart(composition):
            return False
        pause_s = backoff.failed(composition.root)
        if isinstance(error, ContractRevert) and error.name == UNFUNDED:
            # Only the gas was estimated, nothing was sent, so retrying is free; the run may be
            # funded any time.
            pause_s = min(pause_s, UNFUNDED_RETRY_S)
            _note_unfunded(services, composition, error)
            batching.retry_after(composition, pause_s)
            return False
        batching.retry_after(composition, pause_s)
        _log_failure("commit", composition.root.hex(), error, pause_s)
        return False
    backoff.succeeded(composition.root)
    TRANSACTIONS.labels(kind="commit", result="mined").inc()
    services.wakes.poll.set()
    return True


async def record(services: Services) -> NoReturn:
    """Steps 7 and 8: post the outcomes that a quorum of validators agrees on."""
    backoff = Backoff(first_s=RETRY_S)
    while True:
        await record_once(services, backoff)
        await wait_for(services.wakes.record, IDLE_S)


async def record_once(services: Services, backoff: Backoff) -> None:
    """Post the outcomes of every batch that are agreed and due."""
    for agreed in await services.outcomes.agreed():
        # Each is looked at last: while those before it are mined, the chain may be reorganised.
        if await services.outcomes.still_fits(agreed.batch, agreed.records):
            post = partial(_post, services, agreed)
            await _transact(services, "outcomes", agreed.batch.batch_id, post, backoff)


async def _post(services: Services, agreed: Agreed) -> None:
    header = agreed.batch.header()
    named = f"outcomes of batch {header.batch_id}: {hex0x(keccak(agreed.records))}"
    await services.chain.once(named).ledger.post_outcomes(
        header, agreed.records, b"".join(agreed.signatures)
    )
    logger.info("outcomes posted", extra={"batch": header.batch_id})


async def settle(services: Services) -> NoReturn:
    """Step 10: execute fraud outcomes, finalise them once nobody can challenge any more, and void
    batches that nobody judged.
    """
    backoff = Backoff(first_s=RETRY_S)
    while True:
        await settle_once(services, backoff)
        await wait_for(services.wakes.settle, IDLE_S)


async def settle_once(services: Services, backoff: Backoff) -> None:
    """Execute, finalise and void what is due."""
    places = services.settlement.to_execute()
    if places:
        # Recent outcomes may make frauds doubtful.
        failure = await services.breaker.look()
        places = services.settlement.to_execute(failure.check if failure else None)
    for place in places:
        await _transact(
            services, "execute_fraud", place, partial(_execute_fraud, services, place), backoff
        )
    for place in services.settlement.to_finalise():
        await _transact(
            services, "finalise_fraud", place, partial(_finalise_fraud, services, place), backoff
        )
    for header in services.settlement.to_void():
        await _transact(
            services, "void", header.batch_id, partial(_void, services, header), backoff
        )


async def report(services: Services) -> NoReturn:
    """Step 10: report faults that prove themselves to the court of faults."""
    backoff = Backoff(first_s=REPORT_INTERVAL_S)
    while True:
        await report_once(services, backoff)
        await asyncio.sleep(REPORT_INTERVAL_S)


async def report_once(services: Services, backoff: Backoff) -> None:
    """Report every provable offence that was not reported yet."""
    for double in await services.doubles.to_report():
        await _transact(
            services, "report", double.filed, partial(_prove, services, double), backoff
        )


async def _prove(services: Services, double: Fault) -> None:
    owner, offence, tag = double.filed
    await double.prove(services.chain.once(f"prove {offence} of {owner}: {tag}").faults)
    logger.warning(
        "a fault was reported to the court",
        extra={"owner": owner, "offence": offence, "tag": tag},
    )


async def _void(services: Services, header: Batch) -> None:
    chain = services.chain.once(f"void batch {header.batch_id}")
    await chain.ledger.void_batch(header)
    logger.warning("batch voided: nobody judged it in time", extra={"batch": header.batch_id})


async def guard(services: Services) -> NoReturn:
    """Pause slashing while many independent workers fail the same check."""
    backoff = Backoff(first_s=RETRY_S)
    while True:
        await guard_once(services, backoff)
        await asyncio.sleep(LOOK_INTERVAL_S)


async def guard_once(services: Services, backoff: Backoff) -> None:
    """Pause slashing if that is necessary."""
    breaker, run = services.breaker, services.projection.run
    failure = await breaker.look()
    if failure is None or not breaker.may_pause():
        return

    async def pause() -> None:
        evidence = await breaker.evidence()
        if evidence is None:
            return
        # One pause, even if the evidence grows before it is mined.
        chain = services.chain.once(f"pause slashing after {run.slashing_paused_until}")
        await chain.runs.pause_slashing(
            run.run_id, PauseCause.CORRELATED_FAILURES, int(failure.reason), evidence.hash
        )
        logger.error("slashing paused", extra={"evidence": hex0x(evidence.hash)})

    await _transact(services, "pause_slashing", run.slashing_paused_until, pause, backoff)


async def _execute_fraud(services: Services, place: OutcomePlace) -> None:
    evidence = await services.batching.evidence(*place)
    if evidence is None:
        logger.warning(
            "cannot slash for a fraud: its submission is not on this orchestrator",
            extra={"place": place},
        )
        return
    proof = services.settlement.proof(place)
    chain = services.chain.once(services.settlement.name("execute", place))
    await chain.ledger.execute_fraud(proof, evidence)
    worker = evidence.submission.worker
    logger.info("fraud executed", extra={"worker": worker, "batch": place[0]})


async def _finalise_fraud(services: Services, place: OutcomePlace) -> None:
    proof = services.settlement.proof(place)
    chain = services.chain.once(services.settlement.name("finalise", place))
    await chain.ledger.finalise_fraud(proof)


async def announce(services: Services) -> NoReturn:
    """Send the status to listeners when it has changed, a few times per second at most."""
    while True:
        await wait_for(services.wakes.status, IDLE_S)
        if services.feed.listeners:
            services.feed.publish(to_json(await services.status.build()))
        await asyncio.sleep(STATUS_INTERVAL_S)


async def purge(services: Services) -> NoReturn:
    """Clear expired nonces."""
    while True:
        await asyncio.sleep(PURGE_INTERVAL_S)
        await services.nonces.purge()


async def checkpoint(services: Services) -> NoReturn:
    """Keep the database's log short."""
    while True:
        await asyncio.sleep(CHECKPOINT_INTERVAL_S)
        await services.database.checkpoint()


async def _transact(
    services: Services,
    kind: str,
    key: Hashable,
    send: Callable[[], Awaitable[object]],
    backoff: Backoff,
) -> None:
    """Send one transaction if its backoff is over; after a failure it is retried with a pause."""
    if not backoff.is_due((kind, key)):
        return
    # Back off after success too: until the event is read, the work still looks undone.
    pause_s = backoff.failed((kind, key))
    try:
        await send()
    except ChainError as error:
        _log_failure(kind, str(key), error, pause_s)
        return
    TRANSACTIONS.labels(kind=kind, result="mined").inc()
    services.wakes.poll.set()


def _note_unfunded(services: Services, composition: Composition, error: ContractRevert) -> None:
    """Log once that the run cannot pay; leases pause until it can."""
    if not composition.is_unfunded:
        TRANSACTIONS.labels(kind="commit", result="refused").inc()
        logger.warning(
            "the run has no funds for the uploaded work: leases stop until it is funded",
            extra={"error": str(error), "hint": "fund the run: muster run fund"},
        )
    composition.is_unfunded = True
    services.wakes.status.set()


def _log_failure(kind: str, key: str, error: ChainError, pause_s: float) -> None:
    refused = isinstance(error, ContractRevert)
    TRANSACTIONS.labels(kind=kind, result="refused" if refused else "lost").inc()
    logger.warning(
        "a transaction failed",
        extra={"kind": kind, "about": key, "error": str(error), "retry_s": pause_s},
    )
