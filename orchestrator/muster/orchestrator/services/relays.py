"""What relays say they hold, asked at most every few seconds and only while somebody looks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from muster.protocol.ids import RunId

FRESH_S = 5.0
"""An answer is used for this long."""
TIMEOUT_S = 1.0
"""A relay that takes longer does not answer."""
MAX_ANSWER_BYTES = 64 * 1024
"""Longest answer that is read."""


@dataclass(frozen=True, slots=True)
class RelayStatus:
    """One server of policy weights."""

    url: str
    """Where it serves."""
    role: str
    """Origin or relay."""
    newest: int | None
    """Newest policy version it offers; None when it has none or does not answer."""
    held: int
    """Versions it offers."""
    problem: str | None
    """Why nothing is known of it."""


class RelayWatch:
    """Asks the origin and the relays that the orchestrator's settings name."""

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
        """Return what every server said a few seconds ago at most."""
        async with self._asking:
            if self._monotonic() - self._asked_at > FRESH_S:
                self._latest = await self._ask_all()
                self._asked_at = self._monotonic()
            return self._latest

    async def _ask_all(self) -> list[RelayStatus]:
        if not self._servers:
            return []
        async with httpx.AsyncClient(
            transport=self._transport, timeout=TIMEOUT_S, trust_env=False
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
        """Return the versions a server lists; raises ValueError when it answers nonsense."""
        path = f"{url.rstrip('/')}/v1/{self._run_id}/versions"
        async with http.stream("GET", path) as response:
            response.raise_for_status()
            body = b""
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > MAX_ANSWER_BYTES:
                    raise ValueError("too long")
        versions = httpx.Response(200, content=body).json()["versions"]
        if not all(type(v) is int and 0 <= v < 1 << 32 for v in versions):
            raise ValueError("not versions")
        return list(versions)
