"""Publishing a policy version: chunks in the store first, then the manifest's root on chain.

So whoever reads the root finds the chunks. Publishing again is harmless, so an interrupted
publication is simply repeated: the same folder gives the same manifest and root, and a pending
transaction is awaited instead of sent twice.

At the end of a run its last version must reach relays before the origin stops (`hand_over`). Relays
need not be trusted: a worker that fetches the version checks every byte.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

from muster.api import OrchestratorApi
from muster.protocol.eip712 import Domain
from muster.protocol.encoding import hex0x
from muster.protocol.errors import (
    ApiError,
    ChainError,
    ChainUnreachable,
    ContractRevert,
    RpcError,
    StorageError,
    TransactionLost,
)
from muster.protocol.ids import Hash32, PolicyVersion, RunId
from muster.shardcast import ChunkStore, Manifest, PublishedOtherwise, state_hash
from muster.shardcast.delta import WORTH_CARRYING, Parent, parent_to_publish
from muster.shardcast.download import RelayFault, ShardClient
from muster.shardcast.manifest import chunk_bytes_for
from muster.shardcast.trust import sign_root
from muster.trainer.ports import PolicyRoots
from muster.trainer.publish.policies import BASE, published_files

logger = logging.getLogger(__name__)

LONGEST_PAUSE_S = 10.0
"""Longest pause in seconds between two attempts to reach the chain."""
LOOK_S = 10.0
"""Seconds between two checks that the newest version is still on chain."""
ANCHORED_AGAIN = 16
"""How many of the newest versions are anchored again where a reorganisation removed them."""
RELAY_WAIT_S = 10
"""Seconds that a relay may hold its answer until it has the version (long polling)."""
RELAY_PAUSE_S = 0.5
"""Seconds between two requests to one relay."""

T = TypeVar("T")


class Publisher:
    """Publishes one run's versions with the trainer's key."""

    def __init__(
        self,
        store: ChunkStore,
        roots: PolicyRoots,
        *,
        run_id: RunId,
        domain: Domain,
        key: bytes,
        anchor_every: int = 0,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`domain` is that of RunRegistry. One of `anchor_every` versions is broadcast whole, the
        others as deltas where that is smaller; 0 for all of them whole.
        """
        self._store = store
        self._roots = roots
        self._run_id = run_id
        self._domain = domain
        self._key = key
        self._anchor_every = anchor_every
        self._sleep = sleep
        self._published: dict[PolicyVersion, Hash32] = {}
        """The newest versions that this process published, in order, and their roots."""

    @property
    def newest(self) -> PolicyVersion | None:
        """The newest version that this process published."""
        return next(reversed(self._published), None)

    async def publish(
        self, version: PolicyVersion, folder: Path, stream_from: int, stream_to: int
    ) -> Hash32:
        """Publish a folder as a version and return its root; retries while the chain's endpoint
        does not answer, refuses, or does not know the run yet. The folder lies beside those of
        earlier versions. What the store lost is made again from them, if the chain has it.

        A stored version with other content gives way to this one, as after a step that was taken
        again, unless the chain has it. Raises StorageError when the chain already has the version
        with other content.
        """
        held = self._store.manifest(self._run_id, version)
        parent = await self._insist(version, partial(self._lost_parent, version, folder))
        if parent is not None and parent.version == BASE:
            # Every adapter's delta starts from it, and whoever comes late asks for it.
            await self.publish(BASE, folder.with_name(str(BASE)), 0, 0)
        store = partial(self._store_chunks, version, folder, stream_from, stream_to, parent)
        try:
            manifest = await self._replacing(version, held, store)
            root = manifest.root()
            await self._insist(version, self._anchor_again)
            await self._insist(version, partial(self._anchor, version, root))
        except StorageError:
            await self._give_way(version, held)
            raise
        await asyncio.to_thread(self._store.drop_aside, self._run_id, version)
        self._published.pop(version, None)
        self._published[version] = root
        for old in list(self._published)[:-ANCHORED_AGAIN]:
            del self._published[old]
        logger.info(
            "policy published",
            extra={
                "policy_version": version,
                "kind": manifest.kind,
                "bytes": manifest.broadcast_bytes,
            },
        )
        return root

    async def _replacing(
        self, version: PolicyVersion, held: Manifest | None, store: Callable[[], Manifest]
    ) -> Manifest:
        """Store a version; one with other content, `held`, is set aside if the chain is free."""
        try:
            return await asyncio.to_thread(store)
        except PublishedOtherwise:
            if held is None or not await self._insist(version, partial(self._is_free, version)):
                raise
        await asyncio.to_thread(self._store.set_aside, held)
        return await asyncio.to_thread(store)

    async def _give_way(self, version: PolicyVersion, held: Manifest | None) -> None:
        """Have the store hold the version that is on chain, if it was set aside; else none that it
        did not hold before: it would be in the way of the one that is on chain.
        """
        anchored = await self._insist(version, partial(self._roots.root_of, version))
        if anchored is not None and await asyncio.to_thread(
            self._store.put_back, self._run_id, version, anchored
        ):
            return
        if self._store.manifest(self._run_id, version) != held:
            await asyncio.to_thread(self._store.remove, self._run_id, version)

    async def _insist(self, version: PolicyVersion, ask: Callable[[], Awaitable[T]]) -> T:
        """Return the chain's answer about a version once it comes."""
        pause_s = 0.25
        while True:
            try:
                return await ask()
            except (ChainUnreachable, ContractRevert, RpcError, TransactionLost) as error:
                # Nobody answers, the endpoint has trouble of its own, or nobody mined it in time.
                # A node behind it may not know a run that was created a moment ago.
                if isinstance(error, ContractRevert) and error.name != "RunUnknown":
                    raise
                extra = {"policy_version": version, "error": str(error)}
                logger.warning("version is not on chain yet, trying again", extra=extra)
            await self._sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def stand_by(self, every_s: float = LOOK_S) -> NoReturn:
        """Anchor the newest versions again whenever a reorganisation has removed them.

        Raises StorageError when the chain then has one with other content.
        """
        while True:
            await asyncio.sleep(every_s)
            try:
                await self._anchor_again()
            except ChainError as error:
                # The chain is unreachable or refuses. A lasting refusal ends the trainer at the
                # next version.
                extra = {"policy_version": self.newest, "error": str(error)}
                logger.warning("cannot check the newest version on chain", extra=extra)

    async def _anchor_again(self) -> None:
        """Anchor what a reorganisation removed, the oldest first: after a later version the chain
        takes none, and a delta starts from the version before.
        """
        removed: list[tuple[PolicyVersion, Hash32]] = []
        for version, root in reversed(list(self._published.items())):
            if not await self._is_missing(version, root):
                break
            removed.append((version, root))
        for version, root in reversed(removed):
            logger.warning("version removed by a reorganisation", extra={"policy_version": version})
            await self._roots.publish(version, root)

    async def _lost_parent(self, version: PolicyVersion, folder: Path) -> Parent | None:
        """Return the version that this one's delta starts from, if the chain has it and the store
        lost it: without it the manifest would have another root than on chain.
        """
        before = parent_to_publish(version, published_files(folder))
        if not self._anchor_every or before is None:
            return None
        beside = folder.with_name(str(before))
        if not beside.is_dir() or self._store.manifest(self._run_id, before) is not None:
            return None
        root = await self._roots.root_of(before)
        if root is None:
            return None
        files = published_files(beside)
        return Parent(before, root, await asyncio.to_thread(state_hash, files), files)

    def _store_chunks(
        self,
        version: PolicyVersion,
        folder: Path,
        stream_from: int,
        stream_to: int,
        parent: Parent | None,
    ) -> Manifest:
        files = published_files(folder)
        total_bytes = sum(path.stat().st_size for path in files.values())
        return self._store.publish(
            files,
            run_id=self._run_id,
            version=version,
            stream_from=stream_from,
            stream_to=stream_to,
            anchor_every=self._anchor_every,
            parent=parent,
            chunk_bytes=chunk_bytes_for(total_bytes + total_bytes // WORTH_CARRYING),
            # A version's folder is replaced, never rewritten.
            link=True,
            sign=lambda root: sign_root(
                self._key, self._run_id, version, root, domain=self._domain
            ),
        )

    async def _is_free(self, version: PolicyVersion) -> bool:
        """Return whether the chain takes the version, whatever an earlier process has sent."""
        await self._roots.settle()
        newest = await self._roots.newest()
        return newest is None or newest < version

    async def _anchor(self, version: PolicyVersion, root: Hash32) -> None:
        """Anchor a version unless the chain has it; raises StorageError as `_is_missing` does."""
        if not await self._is_missing(version, root):
            return
        try:
            await self._roots.publish(version, root)
        except ContractRevert:
            # A transaction that the journal does not remember may have been mined meanwhile.
            if await self._is_missing(version, root):
                raise

    async def _is_missing(self, version: PolicyVersion, root: Hash32) -> bool:
        """Return whether the chain has neither the version nor a later one, after which it takes
        no earlier ones. Raises StorageError when it has the version with another root.
        """
        anchored = await self._roots.root_of(version)
        if anchored is not None and anchored != root:
            raise StorageError(
                f"version {version} is on chain as {hex0x(anchored)}, but here it is {hex0x(root)}",
                hint="if --state-dir is out of date, restore its newest backup; if --store was "
                "lost and begun anew, empty it",
            )
        if anchored is not None:
            return False
        newest = await self._roots.newest()
        if newest is None or newest < version:
            return True
        logger.warning(
            "the chain has later versions but not this one", extra={"policy_version": version}
        )
        return False


class Unpublished:
    """Publisher of a site other than site 0, which publishes the same versions."""

    async def publish(
        self, version: PolicyVersion, folder: Path, stream_from: int, stream_to: int
    ) -> None:
        """Do nothing."""
        del version, folder, stream_from, stream_to

    async def stand_by(self) -> NoReturn:
        """Do nothing."""
        await asyncio.Event().wait()
        raise AssertionError


# The end of a run


async def hand_over(
    api: OrchestratorApi, run_id: RunId, version: PolicyVersion, *, within_s: float
) -> None:
    """Return once every relay that the orchestrator names holds the whole version, or time is up;
    then the log names the relays without it.
    """
    try:
        relays = (await api.run_info(run_id)).relays
    except ApiError as error:
        logger.warning(
            "cannot ask the orchestrator for relays: perhaps only this host has the last version",
            extra={"policy_version": version, "error": str(error)},
        )
        return
    if not relays:
        logger.warning(
            "no relay mirrors the run: only this machine has the last version",
            extra={"policy_version": version},
        )
        return
    logger.info("waiting for relays", extra={"policy_version": version, "relays": len(relays)})
    lacking = await without(relays, run_id, version, within_s=within_s)
    if lacking:
        logger.warning(
            "relays lack the last version; start the trainer again to serve it",
            extra={"policy_version": version, "relays": " ".join(lacking)},
        )


async def without(
    relays: Sequence[str], run_id: RunId, version: PolicyVersion, *, within_s: float
) -> list[str]:
    """Return the relays that do not hold the whole version after at most `within_s` seconds."""
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
