"""A loopback network of origin, relays and clients, and relays that misbehave on purpose."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

from muster.protocol.eip712 import Domain, digest, sign
from muster.protocol.ids import Address, Hash32, PolicyVersion, RunId, to_address
from muster.protocol.messages import Checkpoint
from muster.shardcast import ChunkStore, Fetcher, Manifest, Relay, ShardServer, TrustedRoot
from muster.shardcast.fetcher import NamedVersions

RUN = RunId(1)
KEY = bytes(31) + b"\x01"
OTHER_KEY = bytes(31) + b"\x02"
DOMAIN = Domain(31337, to_address(b"\x11" * 20))
CHUNK_BYTES = 64 << 10
PATIENCE_S = 180.0
"""Deadline of every condition a test waits for."""

Twist = Callable[[str, bytes | None], Awaitable[bytes | None]]
"""Gets a path and the honest answer (None for 404); returns what to send instead."""


def policy(seed: int, *, chunks: int = 8) -> dict[str, bytes]:
    """Files of one version: weights that differ from version to version, and a config."""
    weights = Random(seed).randbytes(chunks * CHUNK_BYTES + 17)
    return {"config.json": b'{"a": 1}', "model.safetensors": weights}


class Network:
    """A chain that only knows roots, one origin, and whatever else a test starts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.roots: dict[int, Hash32] = {}
        self.trainer: Address | None = None
        """The account that must sign; without one the root decides, as on a real chain."""
        self.origin = ChunkStore(folder / "origin")

    def publish(
        self,
        version: int,
        files: Mapping[str, bytes],
        *,
        key: bytes = KEY,
        anchor: bool = True,
        anchor_every: int = 0,
        store: ChunkStore | None = None,
    ) -> Manifest:
        """Publish a version, and put its root on chain; with deltas if `anchor_every` says so."""
        source = self.folder / f"source-{os.urandom(4).hex()}"
        source.mkdir()
        for name, data in files.items():
            (source / name).write_bytes(data)

        def sign_root(root: Hash32) -> bytes:
            checkpoint = Checkpoint(RUN, PolicyVersion(version), root)
            return sign(digest(DOMAIN, checkpoint.struct_hash()), key)

        manifest = (store or self.origin).publish(
            {name: source / name for name in files},
            run_id=RUN,
            version=PolicyVersion(version),
            stream_from=0,
            stream_to=0,
            sign=sign_root,
            chunk_bytes=CHUNK_BYTES,
            anchor_every=anchor_every,
        )
        if anchor:
            self.roots[version] = manifest.root()
        return manifest

    async def trust(self, run_id: RunId, version: PolicyVersion) -> TrustedRoot | None:
        """The roots that the chain knows."""
        if run_id != RUN or version not in self.roots:
            return None
        return TrustedRoot(self.roots[version], self.trainer, DOMAIN)

    @asynccontextmanager
    async def relay(
        self, *upstreams: str, name: str = "relay", max_bytes: int | None = None, port: int = 0
    ) -> AsyncIterator[tuple[str, ChunkStore]]:
        """Run a relay; yields its URL and store."""
        store = ChunkStore(self.folder / name, max_bytes=max_bytes)
        mirror = Relay(upstreams, store, run_id=RUN, trust=self.trust, poll_s=0.05, rng=Random(1))
        async with ShardServer(store, port=port, wanted=mirror.wanted) as server:
            task = asyncio.create_task(mirror.run())
            try:
                yield server.url, store
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    @asynccontextmanager
    async def fetcher(
        self,
        *relays: str,
        name: str = "client",
        attempts: int = 6,
        wait_s: int = 10,
        parallel: int = 4,
        token: str | None = None,
        named: NamedVersions = lambda _: (),
    ) -> AsyncIterator[Fetcher]:
        """A client with its own cache."""
        async with Fetcher(
            relays,
            self.folder / name,
            attempts=attempts,
            wait_s=wait_s,
            parallel=parallel,
            token=token,
            named=named,
            rng=Random(2),
        ) as fetcher:
            yield fetcher

    async def fetch(self, fetcher: Fetcher, version: int) -> dict[str, bytes]:
        """Fetch a version; returns its files."""
        async with asyncio.timeout(PATIENCE_S):
            folder = await fetcher.fetch(RUN, PolicyVersion(version), self.roots[version])
        return {path.name: path.read_bytes() for path in folder.iterdir()}


class TwistedRelay:
    """Serves a store like a relay, but lets a test change, delay or cut any answer."""

    def __init__(self, store: ChunkStore, twist: Twist) -> None:
        self._store = store
        self.twist = twist
        self.asked: list[str] = []
        self.cut_after: int | None = None
        """Bytes of a chunk's body after which the connection is cut."""

    @property
    def chunks_asked(self) -> int:
        """Chunk requests so far."""
        return sum(path.startswith("/v1/chunks/") for path in self.asked)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """Run it; yields its URL."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        try:
            yield f"http://{host}:{port}"
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                request = await reader.readuntil(b"\r\n\r\n")
                path = request.split(b" ")[1].decode()
                self.asked.append(path)
                await self._answer(path, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, writer: asyncio.StreamWriter) -> None:
        body = await self.twist(path, self.honest_answer(path))
        status, data = (b"404 Not Found", b"") if body is None else (b"200 OK", body)
        writer.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n" % (status, len(data)))
        if self.cut_after is not None and path.startswith("/v1/chunks/"):
            writer.write(data[: self.cut_after])
            await writer.drain()
            raise ConnectionAbortedError
        writer.write(data)
        await writer.drain()

    def honest_answer(self, path: str) -> bytes | None:
        """Return the answer of a relay with this store; None for 404."""
        parts = path.split("?")[0].strip("/").split("/")
        if parts[1] == "chunks":
            found = self._store.find(Hash32(bytes.fromhex(parts[2])))
            return found.read() if found else None
        if parts[2] == "versions":
            return b'{"versions": %s}' % str(self._store.versions(RUN)).encode()
        version = PolicyVersion(int(parts[2]))
        if parts[3] == "signature":
            return self._store.signature(RUN, version)
        return self._store.manifest_bytes(RUN, version)


async def honest(_path: str, answer: bytes | None) -> bytes | None:
    """Answer honestly."""
    return answer


def answers(part: str, data: bytes | None) -> Twist:
    """Send these bytes, or 404, for every path that holds `part`."""

    async def twist(path: str, answer: bytes | None) -> bytes | None:
        return data if part in path else answer

    return twist


async def until(condition: Callable[[], bool]) -> None:
    """Return when the condition holds; TimeoutError when it does not in time."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


def is_whole(store: ChunkStore, version: int) -> Callable[[], bool]:
    """A condition: the store holds all of a version."""
    return lambda: store.is_complete(RUN, PolicyVersion(version))
