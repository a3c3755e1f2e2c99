"""Publishing a policy version: chunks in the store first, then the manifest's root on chain.

A reader of the root finds the chunks. To publish again is harmless, so a publication that was
interrupted is simply made again: the same folder gives the same manifest and the same root, and a
transaction that is on its way is waited for instead of sent twice.

At the end of a run its last version must reach relays before the origin goes away (`hand_over`).
Relays are trusted no further than that: a worker that fetches the version checks every byte.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NoReturn

from muster.api import OrchestratorApi
from muster.protocol.eip712 import Domain
from muster.protocol.encoding import hex0x
from muster.protocol.errors import (
    ApiError,
    ChainError,
    ChainUnreachable,
    StorageError,
    TransactionLost,
)
from muster.protocol.ids import Hash32, PolicyVersion, RunId
from muster.shardcast import ChunkStore, Manifest
from muster.shardcast.download import RelayFault, ShardClient
from muster.shardcast.trust import sign_root
from muster.trainer.ports import ChainAnchor
from muster.trainer.publish.policies import published_files

logger = logging.getLogger(__name__)

LONGEST_PAUSE_S = 10.0
"""Longest pause between two attempts to reach the chain."""
LOOK_S = 10.0
"""Time between two looks whether the newest version is still on chain."""
RELAY_WAIT_S = 10
"""Seconds that a relay is asked to hold its answer back until it has the version."""
RELAY_PAUSE_S = 0.5
"""Pause between two questions to one relay."""


class Publisher:
    """Publishes one run's versions with the trainer's key."""

    def __init__(
        self,
        store: ChunkStore,
        anchor: ChainAnchor,
        *,
        run_id: RunId,
        domain: Domain,
        key: bytes,
        anchor_every: int = 0,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`domain` is that of RunRegistry. Of so many versions one is broadcast whole, the others
        as deltas where that is worth it; 0 for all of them whole.
        """
        self._store = store
        self._anchor = anchor
        self._run_id = run_id
        self._domain = domain
        self._key = key
        self._anchor_every = anchor_every
        self._sleep = sleep
        self._newest: tuple[PolicyVersion, Hash32] | None = None

    async def publish(
        self, version: PolicyVersion, folder: Path, stream_from: int, stream_to: int
    ) -> Hash32:
        """Publish a folder as a version, however long the chain is away; returns the root.

        Raises StorageError when the version is already on chain with other content.
        """
        manifest = await asyncio.to_thread(
            self._store_chunks, version, folder, stream_from, stream_to
        )
        root = manifest.root()
        pause_s = 0.25
        while True:
            try:
                if not await self._is_anchored(version, root):
                    await self._anchor.publish(version, root)
                break
            except (ChainUnreachable, TransactionLost) as error:
                logger.warning("cannot reach the chain", extra={"error": str(error)})
            await self._sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        self._newest = version, root
        logger.info(
            "policy published",
            extra={
                "policy_version": version,
                "kind": manifest.kind,
                "bytes": manifest.broadcast_bytes,
            },
        )
        return root

    async def stand_by(self, every_s: float = LOOK_S) -> NoReturn:
        """Anchor the newest version again whenever a reorganisation has taken it back.

        Raises StorageError when the chain has it with other content then.
        """
        while True:
            await asyncio.sleep(every_s)
            if self._newest is None:
                continue
            version, root = self._newest
            try:
                if not await self._is_anchored(version, root):
                    logger.warning("version taken back", extra={"policy_version": version})
                    await self._anchor.publish(version, root)
            except ChainError as error:
                # Away, or refusing: a lasting refusal ends the trainer with the next version.
                extra = {"policy_version": version, "error": str(error)}
                logger.warning("cannot see to the newest version", extra=extra)

    def _store_chunks(
        self, version: PolicyVersion, folder: Path, stream_from: int, stream_to: int
    ) -> Manifest:
        return self._store.publish(
            published_files(folder),
            run_id=self._run_id,
            version=version,
            stream_from=stream_from,
            stream_to=stream_to,
            anchor_every=self._anchor_every,
            sign=lambda root: sign_root(
                self._key, self._run_id, version, root, domain=self._domain
            ),
        )

    async def _is_anchored(self, version: PolicyVersion, root: Hash32) -> bool:
        """Tell whether the chain has the version, or can no longer take it."""
        anchored = await self._anchor.root_of(version)
        if anchored is not None and anchored != root:
            raise StorageError(
                f"version {version} is on chain as {hex0x(anchored)}, but here it is {hex0x(root)}",
                hint="the state folder is older than the chain: restore the newer one",
            )
        if anchored is not None:
            return True
        newest = await self._anchor.newest()
        if newest is None or newest < version:
            return False
        logger.warning("version left out on chain", extra={"policy_version": version})
        return True


class Unpublished:
    """Publisher of a site that does not publish: site 0's versions are the same."""

    async def publish(
        self, version: PolicyVersion, folder: Path, stream_from: int, stream_to: int
    ) -> None:
        """Leave it to site 0."""
        del version, folder, stream_from, stream_to

    async def stand_by(self) -> NoReturn:
        """Leave it to site 0."""
        await asyncio.Event().wait()
        raise AssertionError


# The end of a run


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
            url, run_id, after=version - 1, wait_s=RELAY_WAIT_S, whole_only=True
        )
        if not isinstance(listed, RelayFault) and version in listed:
            return
        await asyncio.sleep(RELAY_PAUSE_S)
