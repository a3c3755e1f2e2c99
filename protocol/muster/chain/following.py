"""Keeps a view up to date with the chain, and lives through outages of the RPC endpoint."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from muster.chain.events import Event
from muster.chain.reader import EventReader, Poll, Source
from muster.chain.view import ChainView
from muster.protocol.errors import ChainError
from muster.protocol.ids import RunId
from muster.settings import Confirmations

if TYPE_CHECKING:
    from muster.chain.connection import Chain
    from muster.chain.view_parts import RunView

logger = logging.getLogger(__name__)

_TRIES = 3
LONGEST_PAUSE_S = 15.0
"""Pause between tries once an outage lasts."""

V = TypeVar("V", bound=ChainView)
OnChange = Callable[[list[Event]], Awaitable[None]]
"""Called after the view took in new events, or lost some: then perhaps with none."""


async def follow(
    chain: Source,
    view: ChainView,
    *,
    poll_s: float,
    confirmations: Confirmations = 0,
    on_change: OnChange | None = None,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Keep the view current until cancelled; an empty view is filled first.

    A view that was read before is continued where it ends. It stays as many blocks behind the chain
    as are to confirm what it has taken in, or at its finalized block. Looks every `poll_s` seconds,
    and only once there is another block where the endpoint tells of them. What `on_change` raises
    ends it.
    """
    reader = EventReader(chain, known=view.recent_blocks(), confirmations=confirmations)
    failures = 0
    while True:
        try:
            poll = await reader.poll()
        except ChainError as error:
            failures += 1
            if failures == 1:
                logger.warning("the chain is not available", extra={"error": str(error)})
            pause = min(poll_s * 2 ** min(failures, 16), LONGEST_PAUSE_S)
            await sleep(pause * random.uniform(0.5, 1.0))
            continue
        if failures:
            logger.info("the chain is available again", extra={"failures": failures})
            failures = 0
        if apply_poll(view, poll) and on_change is not None:
            await on_change(poll.events)
        await sleep(poll_s)
        await chain.rpc.next_block()


async def read_view(chain: Source, view: V) -> V:
    """Return a view after it took in everything that happened on chain so far."""
    apply_poll(view, await EventReader(chain).poll())
    return view


async def find_run(
    chain: Chain, reader: EventReader, view: ChainView, run_id: RunId, *, pause_s: float
) -> RunView | None:
    """Read a view until it has a run, whose creation may not be confirmed yet; None without one."""
    tries = 0
    while True:
        apply_poll(view, await reader.poll())
        run = view.runs.get(run_id)
        # A node that lags behind may not know it either.
        tries += await chain.runs.run_count() < run_id if run is None else 0
        if run is not None or tries == _TRIES:
            return run
        logger.info("the run is not confirmed yet", extra={"run": run_id})
        await asyncio.sleep(pause_s)


def apply_poll(view: ChainView, poll: Poll) -> bool:
    """Bring a view up to date with a poll; return whether anything changed."""
    if poll.rewound_to is not None:
        view.rewind(poll.rewound_to)
    for event in poll.events:
        view.apply(event)
    return bool(poll.events) or poll.rewound_to is not None
