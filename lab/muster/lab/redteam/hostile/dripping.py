"""Relays that deliver almost nothing, each in a different manner, to make clients wait.

Their bytes are right, so they cannot be caught lying. They serve the store of an honest origin.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from enum import Enum

from muster.protocol.ids import Hash32, PolicyVersion, RunId
from muster.shardcast import ChunkStore

DRIP_S = 0.25
"""Pause between two drops."""
DROP_BYTES = 64
"""Bytes of a drop."""
RIDE_BYTES = 24 << 10
"""Bytes of a drop for a relay that is just quick enough: about 100 kB/s."""
TAIL_BYTES = 64 << 10
"""Bytes at the end of a chunk that are dripped, after a quick start."""


class Manner(Enum):
    """How a relay is slow."""

    HONEST = "honest"
    """The honest twin: everything is served normally."""
    DRIP = "drip"
    """Chunks come drop by drop."""
    TAIL = "tail"
    """Chunks come quickly, except their ends."""
    RIDE = "ride"
    """Chunks come at a hundredth of a usual rate, all of them equally."""
    HEAD = "head"
    """The heads of all answers come drop by drop."""
    EMPTY = "empty"
    """Chunks are answered with 200 and no body."""
    SILENT = "silent"
    """Connections are accepted and never answered."""
    BUSY = "busy"
    """Chunks are answered with 503 and a long Retry-After."""
    ALTERNATE = "alternate"
    """Every second chunk is served normally, the others come drop by drop."""


Pause = Callable[[float], Awaitable[None]]


class DrippingRelay:
    """Serves an honest store in a hostile manner."""

    def __init__(
        self,
        store: ChunkStore,
        manner: Manner,
        *,
        pause: Pause = asyncio.sleep,
        tail_bytes: int = TAIL_BYTES,
    ) -> None:
        self._tail_bytes = tail_bytes
        self._store = store
        self._manner = manner
        self._pause = pause
        self._turn = itertools.count()
        self._serving: set[asyncio.Task[None]] = set()
        self.chunks_asked = 0
        self.sent_bytes = 0

    @asynccontextmanager
    async def listening(self, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
        """Run the relay until the context ends; yields its URL."""
        server = await asyncio.start_server(self._serve, host, port)
        address = server.sockets[0].getsockname()
        try:
            yield f"http://{address[0]}:{address[1]}"
        finally:
            server.close()
            for task in self._serving:
                task.cancel()
            await asyncio.gather(*self._serving)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # start_server makes a task for each connection
        self._serving.add(task)
        try:
            while request := await reader.readuntil(b"\r\n\r\n"):
                path = request.split(b" ")[1].decode("latin-1").split("?")[0]
                await self._answer(path, _start_of(request), writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            self._serving.discard(task)

    async def _answer(self, path: str, start: int, writer: asyncio.StreamWriter) -> None:
        is_chunk = path.startswith("/v1/chunks/")
        self.chunks_asked += is_chunk
        body = await asyncio.to_thread(self._find, path)
        status = b"404 Not Found" if body is None else b"206 Part" if start else b"200 OK"
        body = (body or b"")[start:]
        if self._manner is Manner.SILENT:
            await self._drip(writer, b"", 1)
        if is_chunk and self._manner is Manner.BUSY:
            status, body = b"503 Busy\r\nRetry-After: 86400", b""
        if is_chunk and self._manner is Manner.EMPTY:
            body = b""
        head = b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n" % (status, len(body))
        if self._manner is Manner.HEAD:
            await self._drip(writer, head, 1)
        await self._send(writer, head)
        if not is_chunk:
            await self._send(writer, body)
            return
        quick = self._quick_bytes(len(body))
        await self._send(writer, body[:quick])
        drop = RIDE_BYTES if self._manner is Manner.RIDE else DROP_BYTES
        await self._drip(writer, body[quick:], drop)

    def _quick_bytes(self, size: int) -> int:
        if self._manner is Manner.TAIL:
            return max(0, size - self._tail_bytes)
        if self._manner is Manner.ALTERNATE:
            return 0 if next(self._turn) % 2 else size
        return size if self._manner is Manner.HONEST else 0

    async def _drip(self, writer: asyncio.StreamWriter, data: bytes, drop: int) -> None:
        if self._manner is Manner.SILENT:
            while not writer.is_closing():
                await self._pause(DRIP_S)
            raise ConnectionAbortedError
        for start in range(0, len(data), drop):
            await self._send(writer, data[start : start + drop])
            await self._pause(DRIP_S)

    async def _send(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(data)
        await writer.drain()
        self.sent_bytes += len(data)

    def _find(self, path: str) -> bytes | None:
        parts = path.strip("/").split("/")
        if parts[1] == "chunks":
            found = self._store.find(Hash32(bytes.fromhex(parts[2])))
            return found.read() if found else None
        run_id = RunId(int(parts[1]))
        if parts[2] == "versions":
            return (
                b'{"versions": %s}' % str([int(v) for v in self._store.versions(run_id)]).encode()
            )
        read = self._store.signature if parts[3] == "signature" else self._store.manifest_bytes
        return read(run_id, PolicyVersion(int(parts[2])))


def _start_of(request: bytes) -> int:
    """Return the start of the range that a request asks for; 0 without a range."""
    _, found, rest = request.partition(b"Range: bytes=")
    return int(rest.partition(b"-")[0]) if found else 0
