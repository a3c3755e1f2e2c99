"""The end of a run: the last step, or its owner closes it; and what is left to do then.

Its last version must reach relays before the origin goes away. Relays are trusted no further than
that: whoever fetches the version checks every byte.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from muster.api import OrchestratorApi
from muster.lifecycle import first_error
from muster.protocol.errors import ApiError, ContractRevert
from muster.protocol.ids import PolicyVersion, RunId
from muster.shardcast.download import Fault, ShardClient
from muster.trainer.loop import Trainer

logger = logging.getLogger(__name__)

WAIT_S = 10
"""How long a relay is asked to hold its answer back until it has the version."""
PAUSE_S = 0.5
"""Pause between two questions to one relay."""
LOOK_S = 5.0
"""Longest pause between two looks whether the run was closed."""
_CLOSED = "RunEnded"


class Ledger(Protocol):
    """What the chain says of the run."""

    @property
    def is_closed(self) -> bool:
        """Whether its owner closed it."""

    async def changed(self) -> None:
        """Return after the next change."""


async def train(trainer: Trainer, ledger: Ledger) -> None:
    """Train to the last step, or until the run's owner closes the run."""
    training = asyncio.ensure_future(trainer.run())
    try:
        while not training.done() and not ledger.is_closed:
            changing = asyncio.ensure_future(ledger.changed())
            either = asyncio.FIRST_COMPLETED
            await asyncio.wait([training, changing], timeout=LOOK_S, return_when=either)
            changing.cancel()
        if training.done():
            training.result()
        else:
            _say_closed(trainer)
    except (ContractRevert, BaseExceptionGroup) as error:
        cause = first_error(error) if isinstance(error, BaseExceptionGroup) else error
        if not isinstance(cause, ContractRevert) or cause.name != _CLOSED:
            raise
        _say_closed(trainer)
    finally:
        training.cancel()
        await asyncio.wait([training])


def _say_closed(trainer: Trainer) -> None:
    logger.warning("the run was closed by its owner", extra={"made": trainer.version})


async def hand_over(
    api: OrchestratorApi, run_id: RunId, version: PolicyVersion, *, within_s: float
) -> None:
    """Return once every relay that the orchestrator names holds a version whole, or time is up;
    the log says which do not.
    """
    try:
        relays = (await api.run_info(run_id)).relays
    except ApiError as error:
        logger.warning(
            "nobody says which relays there are: the last version may be here alone",
            extra={"policy_version": version, "error": str(error)},
        )
        return
    if not relays:
        logger.warning(
            "no relay mirrors the run: the last version is here alone",
            extra={"policy_version": version},
        )
        return
    logger.info("waiting for relays", extra={"policy_version": version, "relays": len(relays)})
    lacking = await without(relays, run_id, version, within_s=within_s)
    if lacking:
        logger.warning(
            "relays lack the last version; started again, the trainer serves it again",
            extra={"policy_version": version, "relays": " ".join(lacking)},
        )


async def without(
    relays: Sequence[str], run_id: RunId, version: PolicyVersion, *, within_s: float
) -> list[str]:
    """Return the relays that still do not hold a version whole after so many seconds at most."""
    client = ShardClient()
    try:
        asked = [asyncio.create_task(_holds(client, url, run_id, version)) for url in relays]
        await asyncio.wait(asked, timeout=within_s)
        lacking = [url for url, task in zip(relays, asked, strict=True) if not task.done()]
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        return lacking
    finally:
        client.close()


async def _holds(client: ShardClient, url: str, run_id: RunId, version: PolicyVersion) -> None:
    while True:
        listed = await client.versions(
            url, run_id, after=version - 1, wait_s=WAIT_S, whole_only=True
        )
        if not isinstance(listed, Fault) and version in listed:
            return
        await asyncio.sleep(PAUSE_S)
