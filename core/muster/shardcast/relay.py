"""A relay's mirror: copies a run's versions from upstreams into its own store, trusting none.

 1. learn of versions: long-poll every upstream's listing
 2. read the version's root from the chain, through `trust`
 3. read manifest and signature from an upstream; both must match
 4. register the version, so that the server offers it, and pull its chunks: each is served as soon
    as it is verified, while later ones still arrive

Knows neither the chain's client nor HTTP serving; a ShardServer serves the same store.
"""

import asyncio
import functools
import logging
from collections import Counter
from collections.abc import Collection, Sequence
from random import Random, SystemRandom
from urllib.parse import urlsplit

from muster.protocol.encoding import keccak
from muster.protocol.errors import (
    MusterError,
    SignatureError,
    StorageError,
)
from muster.protocol.ids import PolicyVersion, RunId
from muster.shardcast.chunks import LacksRoom
from muster.shardcast.download import RelayFault, ShardClient, in_thread
from muster.shardcast.metrics import ShardMetrics
from muster.shardcast.pull import Pull
from muster.shardcast.store import ChunkStore
from muster.shardcast.transfer import RelayScores, Transfer
from muster.shardcast.trust import Trust, TrustedRoot, check_signature, parse_published

logger = logging.getLogger(__name__)

LISTING_WAIT_S = 10
"""Seconds of a long poll: an upstream delays its answer until there is a newer version."""
TRUST_TIMEOUT_S = 10.0
"""Deadline of the chain's answer about one version, in seconds."""
RECHECK_S = 15.0
"""Seconds between two comparisons of the held versions' roots with the chain."""
WITHDRAWN_S = 600.0
"""Seconds for which the chain must lack a held version until it is removed. A node behind the
endpoint may lag, and after a reorganisation the trainer anchors the same root again."""
MAX_PAUSE_S = 5.0
"""Longest pause before an upstream or version that failed is tried again."""
MOST_GROWTH = 64
"""Bound of the exponent of a pause: an upstream may be down for days."""
MAX_CANDIDATES = 16
"""Newest versions considered of one upstream's listing; more would let it waste our requests."""
REFUSED_PAUSE_S = 60.0
"""Pause in seconds after a version did not fit on the disk."""


class Relay:
    """Mirrors one run's versions into a store until cancelled."""

    def __init__(
        self,
        upstreams: Sequence[str],
        store: ChunkStore,
        *,
        run_id: RunId,
        trust: Trust,
        poll_s: float = 0.2,
        parallel: int = 4,
        attempts: int = 6,
        token: str | None = None,
        metrics: ShardMetrics | None = None,
        rng: Random | None = None,
    ) -> None:
        """`poll_s` is the shortest pause between two requests to an upstream or the chain. Without
        an upstream the relay mirrors nothing; it only drops versions that are not the chain's.
        """
        self._store = store
        self._run_id = run_id
        self._trust = trust
        self._poll_s = poll_s
        self._parallel = parallel
        self._attempts = attempts
        self._rng = rng or SystemRandom()
        self._client = ShardClient(token=token, parallel=parallel)
        self._scores = RelayScores(upstreams, rng=self._rng)
        self._metrics = metrics or ShardMetrics()
        self._announced: dict[str, list[PolicyVersion]] = {}
        self._unknown: Counter[str] = Counter()
        """How many versions of each upstream the chain did not know, since one was mirrored."""
        self._retry_at: dict[PolicyVersion, float] = {}
        self._failures: dict[PolicyVersion, int] = {}
        self._without_room: set[PolicyVersion | None] = set()
        """Newest versions that were said to have no room; None if others were."""
        self._wanted: dict[PolicyVersion, float] = {}
        self._lacked_since: dict[PolicyVersion, float] = {}
        """Since when the chain has named no root of a held version."""
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Mirror until cancelled; survives failures of upstreams, the chain and the disk."""
        loop = asyncio.get_running_loop()
        unsubscribe = self._store.on_change(lambda: loop.call_soon_threadsafe(self._news.set))
        try:
            async with asyncio.TaskGroup() as group:
                for url in self._scores.urls:
                    group.create_task(self._watch(url))
                if self._scores.urls:
                    group.create_task(self._mirror_all())
                group.create_task(self._recheck_all())
        finally:
            unsubscribe()
            self._client.close()

    def wanted(self, run_id: RunId, version: PolicyVersion) -> None:
        """Look at a version soon: a client that waits for it has probably seen it on chain."""
        if run_id != self._run_id:
            return
        now_s = asyncio.get_running_loop().time()
        self._wanted = {v: until for v, until in self._wanted.items() if until > now_s}
        if len(self._wanted) < MAX_CANDIDATES:
            self._wanted[version] = now_s + LISTING_WAIT_S
        if version in self._retry_at:
            self._retry_at[version] = min(self._retry_at[version], now_s + self._poll_s / 4)
        self._news.set()

    async def recheck(self) -> None:
        """Remove held versions of which the chain has another root, or has had none for
        WITHDRAWN_S; none if it does not answer. Clients check what is held meanwhile.
        """
        held = self._store.stored_versions(self._run_id)
        self._lacked_since = {v: at_s for v, at_s in self._lacked_since.items() if v in held}
        for version in held:
            try:
                trusted = await self._ask_chain(version)
            except (MusterError, TimeoutError) as error:
                logger.warning("chain does not answer", extra={"cause": str(error)})
                return
            if not self._is_still_trusted(version, trusted):
                logger.warning("version is not the chain's", extra={"policy_version": version})
                await in_thread(self._store.remove, self._run_id, version)

    def _is_still_trusted(self, version: PolicyVersion, trusted: TrustedRoot | None) -> bool:
        if trusted is None:
            now_s = asyncio.get_running_loop().time()
            return now_s - self._lacked_since.setdefault(version, now_s) < WITHDRAWN_S
        self._lacked_since.pop(version, None)
        data = self._store.manifest_bytes(self._run_id, version)
        signature = self._store.signature(self._run_id, version)
        if data is None or signature is None:
            return True  # damaged or removed: it is not offered anyway
        if trusted.manifest_root is not None:
            return keccak(data) == trusted.manifest_root
        try:
            check_signature(self._run_id, version, keccak(data), signature, trusted)
        except SignatureError:
            return False
        return True

    async def _watch(self, url: str) -> None:
        """Keep `_announced` equal to one upstream's listing."""
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            asked_s = loop.time()
            known = self._announced.get(url, [])
            after = max(known, default=-1)
            listed = await self._client.versions(
                url, self._run_id, after=after, wait_s=LISTING_WAIT_S
            )
            if isinstance(listed, RelayFault):
                failures += 1
                await asyncio.sleep(self._pause_s(failures))
                continue
            failures = 0
            self._announced[url] = listed[:MAX_CANDIDATES]
            self._news.set()
            # An upstream that ignores the long poll must not be asked without pause.
            is_news = max(listed, default=-1) > after
            pause_s = self._poll_s / 10 if is_news else self._poll_s
            # Nor may one that invents versions make us ask the chain without pause.
            if invented := self._unknown[url]:
                pause_s = max(pause_s, self._pause_s(invented))
            await asyncio.sleep(max(0.0, pause_s - (loop.time() - asked_s)))

    async def _mirror_all(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._news.clear()
            candidates = self._candidates()
            self._forget_all_but(candidates, loop.time())
            due = [v for v in candidates if self._retry_at.get(v, 0.0) <= loop.time()]
            if due:
                await self._mirror_or_postpone(due[0])
                continue
            times = [self._retry_at[v] for v in candidates]
            delay_s = min(times) - loop.time() if times else MAX_PAUSE_S
            try:
                async with asyncio.timeout(max(0.0, delay_s)):
                    await self._news.wait()
            except TimeoutError:
                continue

    def _candidates(self) -> list[PolicyVersion]:
        """Return the versions that are not held and would be kept, newest first; those of
        upstreams that announce what the chain does not know come last.

        A relay keeps the newest announced ones and their deltas' parents, back to the anchor. A
        parent may be far older than what an upstream announces, and signed manifests name it.
        """
        held = [
            version
            for version in self._store.stored_versions(self._run_id)
            if self._store.is_complete(self._run_id, version)
        ]
        oldest_kept = held[self._store.keep - 1] if len(held) >= self._store.keep else -1
        announced = {version for listed in self._announced.values() for version in listed}
        kept = {version for version in announced if version > oldest_kept}
        kept.update(self._store.wanted_parents(self._run_id))
        return sorted(kept.difference(held), key=lambda version: (self._doubt(version), -version))

    def _doubt(self, version: PolicyVersion) -> int:
        return min((self._unknown[url] for url in self._announcers(version)), default=0)

    def _announcers(self, version: PolicyVersion) -> list[str]:
        return [url for url, listed in self._announced.items() if version in listed]

    def _forget_all_but(self, candidates: Collection[PolicyVersion], now_s: float) -> None:
        """Forget the failures of other versions, once their pause is over."""
        over = [version for version, at_s in self._retry_at.items() if at_s <= now_s]
        for version in set(over).difference(candidates):
            del self._retry_at[version]
            self._failures.pop(version, None)

    async def _mirror_or_postpone(self, version: PolicyVersion) -> None:
        loop = asyncio.get_running_loop()
        try:
            if await self._mirror(version):
                self._failures.pop(version, None)
                self._retry_at.pop(version, None)
                for url in self._announcers(version):
                    del self._unknown[url]
                return
            if version not in self._failures:
                self._unknown.update(self._announcers(version))
        except StorageError as error:
            self._say_refused(version, error)
            self._retry_at[version] = loop.time() + REFUSED_PAUSE_S
            return
        except (MusterError, TimeoutError) as error:
            logger.warning(
                "mirroring failed", extra={"policy_version": version, "cause": str(error)}
            )
        self._failures[version] = self._failures.get(version, 0) + 1
        is_wanted = self._wanted.get(version, 0.0) > loop.time()
        doubt = max(self._failures[version], self._doubt(version))
        pause_s = self._poll_s / 4 if is_wanted else self._pause_s(doubt)
        self._retry_at[version] = loop.time() + pause_s

    def _say_refused(self, version: PolicyVersion, error: StorageError) -> None:
        """Log that the disk refuses a version; its limit does so once for each newest version, and
        once for all others.
        """
        said = {"policy_version": version, "cause": str(error), "hint": error.hint}
        if not isinstance(error, LacksRoom):
            logger.error("version cannot be stored", extra=said)
            return
        is_newest = version > max(self._store.versions(self._run_id), default=-1)
        about = version if is_newest else None
        if about not in self._without_room:
            self._without_room.add(about)
            logger.error("version does not fit", extra=said)

    async def _mirror(self, version: PolicyVersion) -> bool:
        """Copy one version; False while the chain does not know it yet."""
        trusted = await self._ask_chain(version)
        if trusted is None:
            return False
        started_s = asyncio.get_running_loop().time()
        transfer = Transfer(
            self._client,
            self._scores,
            self._run_id,
            version,
            attempts=self._attempts,
            noted=self._count,
        )
        data, signature = await transfer.signed_manifest(trusted)
        manifest = parse_published(data, self._run_id, version)
        missing = await in_thread(self._store.begin, manifest, signature)
        try:
            sinks = [functools.partial(self._store.sink, span) for span in missing]
            await Pull(transfer, sinks, parallel=self._parallel).run()
        finally:
            self._store.abandon(self._run_id, version)
        self._metrics.mirrored.inc()
        logger.info(
            "version mirrored",
            extra={
                "run_id": self._run_id,
                "policy_version": version,
                "bytes": manifest.broadcast_bytes,
                "wall_s": round(asyncio.get_running_loop().time() - started_s, 3),
            },
        )
        return True

    def _count(self, url: str, fault: RelayFault | None, size: int) -> None:
        upstream = urlsplit(url).netloc
        if fault is None:
            self._metrics.received_bytes.labels(upstream).inc(size)
        else:
            self._metrics.upstream_faults.labels(upstream, fault.value).inc()

    async def _ask_chain(self, version: PolicyVersion) -> TrustedRoot | None:
        async with asyncio.timeout(TRUST_TIMEOUT_S):
            return await self._trust(self._run_id, version)

    async def _recheck_all(self) -> None:
        while True:
            await asyncio.sleep(RECHECK_S)
            await self.recheck()

    def _pause_s(self, failures: int) -> float:
        longest = min(MAX_PAUSE_S, self._poll_s * 1.5 ** min(failures, MOST_GROWTH))
        return longest * self._rng.uniform(0.5, 1)
