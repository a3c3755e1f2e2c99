"""Sockets that take an orchestrator's places: unfinished bodies, silent connections, event streams.

Each attack runs until it is cancelled, replaces what the server closes, and counts what it did.
Where a source is given, connections come from addresses of 127.0.0.0/8.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import urlsplit

LARGEST = 8 << 20
"""Bytes of the largest body of a message."""
AGAIN_S = 3.0
"""Mean pause before a place is taken again that was lost."""

Attack = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def hold(url: str, attack: Attack, *, sources: list[str], each: int) -> Counter[str]:
    """Hold so many connections from each source until cancelled; return what became of them."""
    place, counts = urlsplit(url), Counter[str]()

    async def one(source: str) -> None:
        while True:
            writer = None
            try:
                reader, writer = await asyncio.open_connection(
                    place.hostname, place.port, local_addr=(source, 0)
                )
                counts["opened"] += 1
                await attack(reader, writer)
                while await reader.read(1 << 16):
                    pass
                counts["closed"] += 1
            except OSError:
                counts["broken"] += 1
            finally:
                if writer is not None:
                    writer.close()
            await asyncio.sleep(AGAIN_S * random.uniform(0.5, 1.5))

    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*(one(source) for source in sources for _ in range(each)))
    return counts


def body(headers: Callable[[], Mapping[str, str]] = dict, size: int = LARGEST) -> Attack:
    """Send a body less its last byte, under the headers of whoever signs it, if anybody."""

    async def attack(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = [f"{name}: {value}" for name, value in headers().items()]
        path = "/v1/batches/1/fingerprints"
        lines = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {size}", *lines, "", ""]
        writer.write("\r\n".join(lines).encode() + bytes(size - 1))
        await writer.drain()

    return attack


async def silence(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    """Say nothing."""


async def ask_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Ask for what costs nothing, then say nothing."""
    writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
    await reader.read(1 << 16)


async def stream(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Listen to events."""
    writer.write(b"GET /v1/events HTTP/1.1\r\nhost: x\r\n\r\n")
