"""A worker process: takes its seat, loads the run's documents and the engine, runs the loop, and
beside it what helps when the run is silent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from muster.chain import Chain, follow
from muster.client.documents import (
    TASK_SETS,
    fetch_calibration,
    fetch_recipe,
    fetch_task_set,
)
from muster.client.preflight import coins_of, gas_money
from muster.client.quantities import format_coins, format_tokens
from muster.client.requirements import require_fit
from muster.client.seat import EngineFactory, Seat, load_engine, make_engine, take_seat
from muster.client.settings import WorkerSettings
from muster.client.sources import Sources
from muster.client.worker.journal import SubmissionJournal
from muster.client.worker.loop import WorkerLoop
from muster.client.worker.place import WorkerPlace
from muster.client.worker.silence import SilenceDuty, SilencePlace, Times, read_times
from muster.client.worker.standing import require_good_standing
from muster.lifecycle import run_beside
from muster.tasks import require_pinned
from muster.wallet import Wallet

logger = logging.getLogger(__name__)

Watch = Callable[[WorkerLoop, Chain], Coroutine[Any, Any, None]]
"""Shows what a worker does, until cancelled."""


async def run_worker(
    settings: WorkerSettings,
    node: Wallet,
    *,
    engine_factory: EngineFactory = make_engine,
    loop_class: type[WorkerLoop] = WorkerLoop,
    watch: Watch | None = None,
) -> None:
    """Work until cancelled; raises MusterError when the worker cannot or may not work.

    `watch` runs beside the loop and looks at it.
    """
    with SubmissionJournal(settings.state_dir) as journal:
        async with (
            take_seat(settings, node, sends=True) as seat,
            Sources(seat.relays) as rooms,
        ):
            # Before the model, which may take minutes to load.
            require_good_standing(seat.view, settings.run, settings.worker, node.address)
            config = seat.run.config
            recipe = await fetch_recipe(seat.api, config.recipe_hash)
            calibration = await fetch_calibration(seat.api, config.calibration_hash)
            require_fit(recipe, calibration, settings)
            # A grade by another verifier may be a fraud.
            await asyncio.to_thread(require_pinned, recipe.verifiers)
            place = WorkerPlace(
                run_id=settings.run,
                worker=settings.worker,
                key=node.key,
                domain=seat.domain,
                view=seat.view,
                now=seat.chain.now,
                api=seat.api,
                fetcher=seat.fetcher,
                engine=await load_engine(engine_factory, settings),
                recipe=recipe,
                calibration=calibration,
                task_set=await fetch_task_set(
                    seat.api, config.task_set_hash, settings.state_dir / TASK_SETS
                ),
                journal=journal,
                poll_s=settings.poll_s,
                heartbeat_s=settings.heartbeat_s,
                keep_going=settings.keep_going,
            )
            times = await read_times(seat.chain)
            await warn_of_little(seat.chain, node, times)
            loop = loop_class(place)
            silence = loop.silence = SilenceDuty(
                _silence_place(settings, node, seat, rooms, journal, times)
            )
            following = follow(
                seat.chain,
                seat.view,
                poll_s=settings.poll_s,
                confirmations=settings.confirmations,
                on_change=loop.on_change,
            )
            watching = [watch(loop, seat.chain)] if watch else []
            await run_beside(loop.run(), silence.run(), following, *watching)


def _silence_place(
    settings: WorkerSettings,
    node: Wallet,
    seat: Seat,
    rooms: Sources,
    journal: SubmissionJournal,
    times: Times,
) -> SilencePlace:
    return SilencePlace(
        run_id=settings.run,
        worker=settings.worker,
        key=node.key,
        domain=seat.domain,
        view=seat.view,
        chain=seat.chain,
        api=seat.api,
        rooms=rooms,
        journal=journal,
        times=times,
        named=[*seat.relays, settings.orchestrator],
        poll_s=settings.poll_s,
    )


async def warn_of_little(chain: Chain, node: Wallet, times: Times) -> None:
    """Say what a node lacks to submit its own work, should the orchestrator keep it."""
    coins, needed = await coins_of(chain, node.address), await gas_money(chain, "dispute")
    tokens, bond = await chain.token.balance_of(node.address), times.court.bond
    if coins < needed.wei or tokens < bond:
        logger.warning(
            "the node could not submit by itself, should the orchestrator keep its work",
            extra={
                "holds": f"{format_tokens(tokens)} tokens, {format_coins(coins)} for gas",
                "needs": f"a bond of {format_tokens(bond)} tokens, {needed} for gas",
                "hint": f"send them to {node.address}; the bond comes back",
            },
        )
