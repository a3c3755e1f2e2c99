"""Quality of an orchestrator's service to honest clients: probes that send requests like nodes and
validators.

Requests are due at a fixed rate, whether or not earlier ones are answered, and the time of each
counts from when it was due. Every prober has its own address and connection.
"""

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum

import aiohttp

from muster.api.signing import sign_request
from muster.protocol.eip712 import Domain
from muster.protocol.ids import Address, Hash32, RunId

ANSWER_S = 5.0
"""Seconds after which a request without an answer counts as not served."""
BUSY = (429, 503)
"""Statuses of a busy server: the request was not served."""
BROKEN = 0
"""Used as the status of a request whose connection broke off or stayed silent."""


class Kind(StrEnum):
    """Kind of request."""

    HEARTBEAT = "heartbeat"
    """A node sends a heartbeat."""
    LEASE = "lease"
    """A node asks for work."""
    CALLED = "called"
    """A validator asks which batches it must judge."""


@dataclass(slots=True)
class Service:
    """Results of the requests of one kind."""

    seconds: list[float] = field(default_factory=list)
    """Time of each answer since its request was due."""
    statuses: Counter[int] = field(default_factory=Counter)
    """Number of requests by the status of their answer."""

    @property
    def asked(self) -> int:
        """Requests made."""
        return self.statuses.total()

    @property
    def served(self) -> float:
        """The share that was answered, in [0, 1]."""
        missed = self.statuses[BROKEN] + sum(self.statuses[status] for status in BUSY)
        return 1 - missed / max(1, self.asked)

    def percentile_ms(self, share: float) -> float:
        """Return the time within which this share of the answers came, in milliseconds."""
        ordered = sorted(self.seconds) or [0.0]
        return 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass(frozen=True, slots=True)
class Door:
    """An orchestrator, with what its clients need to sign requests."""

    url: str
    """Its URL."""
    domain: Domain
    """EIP-712 domain of the ContributionLedger."""
    audience: Address
    """Its account, to which requests are signed."""
    run_id: RunId
    """Its run."""

    def signed(
        self, key: bytes, method: str, path: str, body: bytes, *, now: Callable[[], float]
    ) -> dict[str, str]:
        """Return the headers of a request that a key signs now."""
        return sign_request(
            key, self.domain, self.audience, method, path, body,
            nonce=Hash32(os.urandom(32)), issued_at=int(now()),
        )  # fmt: skip


class Prober:
    """One honest node or validator."""

    def __init__(
        self,
        door: Door,
        key: bytes,
        kinds: Sequence[Kind],
        address: str,
        found: dict[Kind, Service],
    ) -> None:
        self._door = door
        self._key = key
        self._kinds = kinds
        self._address = address
        self._found = found

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[aiohttp.ClientSession]:
        """Open the prober's connections, from its own address."""
        connector = aiohttp.TCPConnector(local_addr=(self._address, 0), limit=4)
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            yield session

    async def ask(self, session: aiohttp.ClientSession, number: int, due: float) -> None:
        """Make one request, and note its result."""
        kind = self._kinds[number % len(self._kinds)]
        method, path, body = self._request(kind)
        headers = self._door.signed(self._key, method, path, body, now=time.time)
        headers["content-type"] = "application/json"
        service = self._found[kind]
        try:
            async with session.request(
                method, self._door.url + path, data=body or None, headers=headers
            ) as answer:
                await answer.read()
                status = answer.status
        except (aiohttp.ClientError, OSError, TimeoutError):
            status = BROKEN
        service.statuses[status] += 1
        service.seconds.append(time.perf_counter() - due)

    def _request(self, kind: Kind) -> tuple[str, str, bytes]:
        if kind is Kind.CALLED:
            return "GET", "/v1/batches?state=committed&after=0", b""
        said: dict[str, object] = {"run_id": self._door.run_id}
        if kind is Kind.LEASE:
            return "POST", "/v1/leases", json.dumps(said).encode()
        said |= {"policy_version": 0, "state": "generating", "software": "muster 0.1.0"}
        return "POST", "/v1/heartbeat", json.dumps(said).encode()


async def probe(
    door: Door,
    nodes: Sequence[bytes],
    validators: Sequence[bytes],
    *,
    seconds: float,
    per_s: float = 2.0,
) -> dict[Kind, Service]:
    """Return the service to the honest; every prober makes `per_s` requests a second."""
    found = {kind: Service() for kind in Kind}
    probers = [
        *(Prober(door, key, (Kind.HEARTBEAT, Kind.LEASE), f"127.0.1.{i}", found)
          for i, key in enumerate(nodes, 1)),
        *(Prober(door, key, (Kind.CALLED,), f"127.0.1.{100 + i}", found)
          for i, key in enumerate(validators, 1)),
    ]  # fmt: skip
    began, rounds = time.perf_counter(), max(1, int(seconds * per_s))
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        sessions = [await stack.enter_async_context(each.connected()) for each in probers]
        for number in range(rounds):
            due = began + number / per_s
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            for prober, session in zip(probers, sessions, strict=True):
                group.create_task(prober.ask(session, number, due))
    return found
