"""HTTP requests to one relay, each ending in verified bytes or in what was wrong with the relay."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from enum import Enum
from typing import TypeVar

import aiohttp

from muster.protocol.encoding import keccak
from muster.protocol.errors import EncodingError
from muster.protocol.ids import Hash32, PolicyVersion, RunId
from muster.shardcast.chunks import VerifyingSink
from muster.shardcast.manifest import MAX_MANIFEST_BYTES
from muster.shardcast.store import SIGNATURE_BYTES

CONNECT_S = 3.0
"""Longest wait for a connection."""
SILENCE_S = 20.0
"""Longest silence within an answer; above the longest wait a relay grants."""
MIN_BYTES_PER_S = 64 << 10
"""A relay that stays below this for a whole chunk has failed."""
BATCH_BYTES = 1 << 20
"""Received bytes that are hashed and written together, in a thread."""
INLINE_BYTES = 256 << 10
"""Chunks up to this size are hashed and written without one."""
MAX_VERSIONS = 64
"""Versions read from one listing."""
_MAX_LISTING_BYTES = 64 << 10

R = TypeVar("R")


class Fault(Enum):
    """What was wrong with a relay's answer."""

    ABSENT = "absent"
    """It does not have it, or not yet."""
    FAILED = "failed"
    """It refused, broke off, or was too slow."""
    LIED = "lied"
    """It sent other bytes than were asked for."""


class ShardClient:
    """One HTTP session for all relays: connections are kept and reused."""

    def __init__(self, *, token: str | None = None) -> None:
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def versions(
        self, url: str, run_id: RunId, *, after: int = -1, wait_s: int = 0
    ) -> list[PolicyVersion] | Fault:
        """Return what a relay offers, newest first; waits for something newer than `after`."""
        query = f"?after={after}&wait={wait_s}" if after >= 0 else f"?wait={wait_s}"
        data = await self._read(f"{url}/v1/{run_id}/versions{query}", _MAX_LISTING_BYTES)
        return data if isinstance(data, Fault) else _parse_versions(data)

    async def manifest(
        self, url: str, run_id: RunId, version: PolicyVersion, *, root: Hash32, wait_s: int = 0
    ) -> bytes | Fault:
        """Return the manifest with that root; LIED when the relay has another one."""
        path = f"/v1/{run_id}/{version}/manifest?wait={wait_s}"
        data = await self._read(url + path, MAX_MANIFEST_BYTES)
        if not isinstance(data, Fault) and keccak(data) != root:
            return Fault.LIED
        return data

    async def signature(self, url: str, run_id: RunId, version: PolicyVersion) -> bytes | Fault:
        """Return what a relay gives as the trainer's signature."""
        return await self._read(f"{url}/v1/{run_id}/{version}/signature", SIGNATURE_BYTES)

    async def chunk(self, url: str, sink: VerifyingSink) -> Fault | None:
        """Stream a chunk into its sink and commit it; None when it is verified and kept.

        Raises StorageError when the disk refuses. The caller closes the sink.
        """
        limit_s = SILENCE_S + sink.size / MIN_BYTES_PER_S
        try:
            async with (
                asyncio.timeout(limit_s),
                self._get(f"{url}/v1/chunks/{sink.digest.hex()}") as response,
            ):
                if response.status != 200:
                    return _fault_of(response.status)
                if response.content_length not in (None, sink.size):
                    return Fault.LIED
                await _receive(response.content, sink)
            sink.commit()
        except EncodingError:
            return Fault.LIED
        except (aiohttp.ClientError, TimeoutError, ConnectionError):
            return Fault.FAILED
        return None

    async def _read(self, url: str, max_bytes: int) -> bytes | Fault:
        try:
            async with asyncio.timeout(2 * SILENCE_S), self._get(url) as response:
                if response.status != 200:
                    return _fault_of(response.status)
                data = bytearray()
                async for piece in response.content.iter_any():
                    data += piece
                    if len(data) > max_bytes:
                        response.close()
                        return Fault.LIED
                return bytes(data)
        except (aiohttp.ClientError, TimeoutError, ConnectionError, ValueError):
            return Fault.FAILED

    def _get(self, url: str) -> aiohttp.client._RequestContextManager:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                auto_decompress=False,
                connector=aiohttp.TCPConnector(limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={**self._headers, "Accept-Encoding": "identity"},
                read_bufsize=256 << 10,
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S
                ),
            )
        return self._session.get(url, allow_redirects=False)


async def in_thread(function: Callable[..., R], *args: object) -> R:
    """Run in a thread; when cancelled, wait for it first, as it uses what we would close."""
    running = asyncio.ensure_future(asyncio.to_thread(function, *args))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


async def _receive(stream: aiohttp.StreamReader, sink: VerifyingSink) -> None:
    pieces: list[bytes] = []
    held = 0
    async for piece in stream.iter_any():
        pieces.append(piece)
        held += len(piece)
        if held >= BATCH_BYTES:
            await in_thread(sink.write, pieces)
            pieces, held = [], 0
    if sink.size <= INLINE_BYTES:
        sink.write(pieces)
    elif pieces:
        await in_thread(sink.write, pieces)


def _fault_of(status: int) -> Fault:
    return Fault.ABSENT if status == 404 else Fault.FAILED


def _parse_versions(data: bytes) -> list[PolicyVersion] | Fault:
    try:
        listed = json.loads(data)["versions"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return Fault.LIED
    if not isinstance(listed, list):
        return Fault.LIED
    numbers = [n for n in listed[:MAX_VERSIONS] if type(n) is int and 0 <= n < 1 << 32]
    return sorted((PolicyVersion(n) for n in set(numbers)), reverse=True)
