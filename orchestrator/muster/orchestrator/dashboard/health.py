"""The network's health on the dashboard: chain, queues, validators, broadcast."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from muster.api.answers import Watched
from muster.api.client import tls_context
from muster.orchestrator.metrics import ALIVE_S, count_pending, count_queues
from muster.orchestrator.services import Services
from muster.protocol.errors import EncodingError
from muster.protocol.ids import Address, RunId


@dataclass(frozen=True, slots=True)
class ValidatorLine:
    """One validator seat."""

    address: Address
    is_seated: bool
    """Whether it holds the seat now."""
    is_absent: bool
    """Whether it missed the deadline of a call and has been silent since."""
    batches: int
    """Posted outcomes that carry its signature."""
    latest_at: int | None
    """Chain time of the latest of them."""
    heard_at: float | None
    """Wall clock of the latest outcomes it handed in here, since the process started."""
    stake_wei: int
    """Its active stake."""
    watched: Watched | None
    """Recent results of its proofs of checking; None when it has no seat."""


@dataclass(frozen=True, slots=True)
class VersionLine:
    """How many nodes report that they have loaded a policy version."""

    version: int | None
    """The version; None for nodes that have loaded none."""
    nodes: int
    """Number of live nodes."""


@dataclass(frozen=True, slots=True)
class NetworkHealth:
    """The network at a glance."""

    head: int | None
    """Block up to which the chain is read."""
    chain_time: int
    read_ago_s: float | None
    """Seconds since the chain's endpoint answered."""
    chain_error: str | None
    """Error of the chain's endpoint since then; None if it answered."""
    events_block: int | None
    """Block of the newest event."""
    contradictions: int
    """Number of events that contradict earlier events."""
    pending_transactions: int | None
    """Transactions that were sent and not mined; None when unknown."""
    open_leases: int
    """Tickets that wait for their submission."""
    waiting: int
    """Received submissions that are in no batch."""
    uncommitted: int
    """Composed batches that are not on chain."""
    unjudged: int
    """Batches on chain without outcomes."""
    oldest_unjudged_at: int | None
    """Time at which the oldest such batch was committed."""
    alive: int
    """Nodes with a recent heartbeat."""
    nodes: int
    """Nodes that ever sent a heartbeat."""
    listeners: int
    """Open event streams."""
    validators: list[ValidatorLine]
    """By seat."""
    versions: list[VersionLine]
    """Newest first."""
    relays: list[RelayStatus]
    """The origin and the relays."""
    latest_version: int | None
    """Newest policy version on chain."""


async def read_health(services: Services, relays: list[RelayStatus]) -> NetworkHealth:
    """Return the network's health."""
    projection, health = services.projection, services.chain_health
    open_leases, waiting = await count_queues(services.database, services.chain_clock.now())
    unjudged = projection.unjudged
    now = services.clock()
    beats = services.heartbeats.latest
    alive = [beat for beat in beats.values() if now - beat.seen_at <= ALIVE_S]
    return NetworkHealth(
        head=health.head,
        chain_time=services.chain_clock.now(),
        read_ago_s=None if health.read_at is None else now - health.read_at,
        chain_error=health.error,
        events_block=projection.view.block_number,
        contradictions=len(projection.view.contradictions),
        pending_transactions=await count_pending(services.chain),
        open_leases=open_leases,
        waiting=waiting,
        uncommitted=len(services.batching.uncommitted_roots),
        unjudged=len(unjudged),
        oldest_unjudged_at=min((b.committed_at for b in unjudged), default=None),
        alive=len(alive),
        nodes=len(beats),
        listeners=services.feed.listeners,
        validators=_validators(services, await services.checking.summary()),
        versions=_versions(Counter(beat.policy_version for beat in alive)),
        relays=relays,
        latest_version=projection.run.latest_version,
    )


def _validators(services: Services, watched: Sequence[Watched]) -> list[ValidatorLine]:
    proofs = {each.validator: each for each in watched}
    run, signed = services.projection.run, services.projection.signed
    view, run_id = services.projection.view, services.run_id
    return [
        ValidatorLine(
            address=validator,
            is_seated=validator in run.validators,
            is_absent=validator in services.outcomes.caller.absent,
            batches=signed[validator].batches if validator in signed else 0,
            latest_at=signed[validator].latest_at if validator in signed else None,
            heard_at=services.outcomes.heard_at.get(validator),
            stake_wei=view.stake(run_id, validator).active_wei,
            watched=proofs.get(validator),
        )
        for validator in run.seats
    ]


def _versions(counts: Counter[int | None]) -> list[VersionLine]:
    ordered = sorted(counts, key=lambda v: -1 if v is None else v, reverse=True)
    return [VersionLine(version, counts[version]) for version in ordered]


FRESH_S = 5.0
"""Seconds for which an answer is cached."""
TIMEOUT_S = 1.0
"""Deadline in seconds for a relay's answer."""
MAX_ANSWER_BYTES = 64 * 1024
"""Most bytes that are read of an answer."""


@dataclass(frozen=True, slots=True)
class RelayStatus:
    """One server of policy weights."""

    url: str
    """URL of the server."""
    role: str
    """Origin or relay."""
    newest: int | None
    """Newest policy version it offers; None when it has none or does not answer."""
    held: int
    """Versions it offers."""
    problem: str | None
    """Why its versions are unknown; None if they are known."""


class RelayWatch:
    """Asks the origin and the relays of the settings which versions they hold.

    It asks at most every few seconds, and only while somebody views the page.
    """

    def __init__(
        self,
        run_id: RunId,
        *,
        origin: str,
        relays: Sequence[str],
        transport: httpx.AsyncBaseTransport | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_id = run_id
        self._servers = [("origin", origin)] * bool(origin) + [("relay", url) for url in relays]
        self._transport = transport
        self._monotonic = monotonic
        self._asking = asyncio.Lock()
        self._asked_at = float("-inf")
        self._latest: list[RelayStatus] = []

    async def latest(self) -> list[RelayStatus]:
        """Return every server's answer, at most a few seconds old."""
        async with self._asking:
            if self._monotonic() - self._asked_at > FRESH_S:
                self._latest = await self._ask_all()
                self._asked_at = self._monotonic()
            return self._latest

    async def _ask_all(self) -> list[RelayStatus]:
        if not self._servers:
            return []
        async with httpx.AsyncClient(
            transport=self._transport, verify=tls_context(), timeout=TIMEOUT_S, trust_env=False
        ) as http:
            return list(
                await asyncio.gather(*(self._ask(http, role, url) for role, url in self._servers))
            )

    async def _ask(self, http: httpx.AsyncClient, role: str, url: str) -> RelayStatus:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                versions = await self._versions(http, url)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, ValueError, TypeError, KeyError):
            return RelayStatus(url, role, None, 0, "does not answer")
        return RelayStatus(url, role, max(versions, default=None), len(versions), None)

    async def _versions(self, http: httpx.AsyncClient, url: str) -> list[int]:
        """Return the versions that a server lists; raises ValueError when the answer is
        malformed."""
        path = f"{url.rstrip('/')}/v1/{self._run_id}/versions"
        versions = json.loads(await get_bytes(http, path, MAX_ANSWER_BYTES))["versions"]
        if not all(type(v) is int and 0 <= v < 1 << 32 for v in versions):
            raise ValueError("not versions")
        return list(versions)


async def get_bytes(http: httpx.AsyncClient, url: str, max_bytes: int) -> bytes:
    """Return a server's answer; raises EncodingError when it is longer, or an error of httpx."""
    async with http.stream("GET", url) as response:
        response.raise_for_status()
        body = bytearray()
        async for part in response.aiter_bytes():
            body += part
            if len(body) > max_bytes:
                raise EncodingError(f"an answer is longer than {max_bytes} bytes")
    return bytes(body)
