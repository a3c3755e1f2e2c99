"""A worker process: connects, loads the run's documents and the engine, and runs the loop and,
beside it, the duty for silence of the run.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from muster.chain import Chain
from muster.client.chain_facts import read_times
from muster.client.connections import EngineFactory, connect, load_engine, make_engine, with_context
from muster.client.preflight import node_money, require_fit
from muster.client.run_documents import TASK_SETS, fetch_rules, require_calibrated
from muster.client.settings import WorkerSettings
from muster.client.worker.context import Station, WorkerContext
from muster.client.worker.journal import SubmissionJournal
from muster.client.worker.loop import WorkerLoop
from muster.client.worker.outcomes import recall_accusations
from muster.client.worker.silence import SilenceDuty
from muster.client.worker.standing import require_needed
from muster.lifecycle import run_beside
from muster.tasks import require_pinned
from muster.wallet import Wallet

logger = logging.getLogger(__name__)

LoopClass = Callable[[WorkerContext], WorkerLoop]
"""Makes the loops of a node."""
Watch = Callable[[WorkerLoop, Chain], Coroutine[Any, Any, None]]
"""Shows a worker's state until cancelled."""


async def run_worker(
    settings: WorkerSettings,
    node: Wallet,
    *,
    engine_factory: EngineFactory = make_engine,
    loop_class: LoopClass = WorkerLoop,
    watch: Watch | None = None,
) -> None:
    """Work until cancelled; raises MusterError when the worker cannot or may not work.

    `watch` runs beside the loop and displays it.
    """
    with SubmissionJournal(settings.state_dir) as journal:
        async with connect(settings, node, named=journal.open_versions) as connected:
            # Checked before the model is loaded, which may take minutes.
            view, run = connected.view, settings.run
            await connected.read_until(
                settings, lambda: view.member(run, settings.worker) is not None
            )
            recall_accusations(journal, view, run, settings.worker)
            require_needed(journal, view, run, settings.worker, node.address)
            folder = settings.state_dir / TASK_SETS
            rules = await fetch_rules(connected.api, connected.run.config, folder)
            require_fit(rules.recipe, rules.calibration, settings)
            require_calibrated(rules)
            # Grading with another verifier could count as fraud.
            await asyncio.to_thread(require_pinned, rules.recipe.verifiers)
            fitted = with_context(settings, rules)
            first, *others = (fitted.model_copy(update={"device": d}) for d in settings.places)
            context = WorkerContext(
                run_id=settings.run,
                worker=settings.worker,
                key=node.key,
                domain=connected.domain,
                view=connected.view,
                now=connected.chain.now,
                api=connected.api,
                fetcher=connected.fetcher,
                engine=await load_engine(engine_factory, first),
                rules=rules,
                journal=journal,
                poll_s=settings.poll_s,
                heartbeat_s=settings.heartbeat_s,
                keep_going=settings.keep_going,
                tickets_per_engine=settings.tickets_per_engine,
            )
            times = await read_times(connected.chain)
            await warn_of_no_bond(connected.chain, node)
            loop = await make_loops(loop_class, context, others, engine_factory)
            silence = SilenceDuty(
                context,
                connected.chain,
                connected.open_rooms,
                times,
                named=lambda: [*connected.relays.urls, settings.orchestrator],
            )
            context.held.silence = silence
            watching = [watch(loop, connected.chain)] if watch else []
            await run_beside(
                loop.run(), silence.run(), connected.follow(settings, loop.on_change), *watching
            )


async def make_loops(
    loop_class: LoopClass,
    context: WorkerContext,
    others: Sequence[WorkerSettings],
    engine_factory: EngineFactory,
) -> WorkerLoop:
    """Return the node's first loop with its helpers: `tickets_per_engine` loops for each engine.
    The engines of `others` are created here.
    """
    contexts = [context]
    for settings in others:
        engine = await load_engine(engine_factory, settings)
        contexts.append(replace(context, engine=engine, station=Station()))
    # The first loops of all engines come first, so that each engine has a ticket before any has
    # two.
    loops = [loop_class(each) for _ in range(context.tickets_per_engine) for each in contexts]
    loops[0].take_helpers(loops[1:])
    return loops[0]


async def warn_of_no_bond(chain: Chain, node: Wallet) -> None:
    """Warn if a node lacks tokens or gas to submit its own work when the orchestrator withholds
    it."""
    money = await node_money(chain, node.address)
    if not money.is_enough:
        logger.warning(
            "the node has no money to submit by itself if the orchestrator ignores its work",
            extra={
                "holds": money.held,
                "needs": money.needed,
                "hint": f"send them to {node.address}; the bond comes back",
            },
        )
