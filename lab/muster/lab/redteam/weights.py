"""A34: relays that serve other bytes than those of the policy on chain.

A real fetcher meets a relay that lies, with or without an honest one beside it. A trial is caught
when no wrong bytes are ever loaded: the fetch yields the published bytes, or nothing at all.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

from muster.lab.redteam.gain import Gain
from muster.lab.redteam.stage import DOMAIN, ORCHESTRATOR, RUN, Stage
from muster.lab.redteam.trials import Attack, Outcome, Play, Variant
from muster.protocol.eip712 import digest, sign
from muster.protocol.errors import PolicyUnavailable
from muster.protocol.ids import Hash32, PolicyVersion
from muster.protocol.messages import Checkpoint
from muster.shardcast import ChunkStore, Fetcher, ShardServer

CHUNK_BYTES = 64 << 10
Lie = Callable[[str, bytes, Random], bytes]
"""Returns the bytes to send, given a path, the honest answer and a random generator."""


def _chunks(change: Callable[[bytes, Random], bytes]) -> Lie:
    def lie(path: str, answer: bytes, random: Random) -> bytes:
        return change(answer, random) if path.startswith("/v1/chunks/") else answer

    return lie


def _flipped(data: bytes, random: Random) -> bytes:
    place = random.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << random.randrange(8)]) + data[place + 1 :]


def _cut(data: bytes, random: Random) -> bytes:
    return data[: random.randrange(len(data))]


def _zeroed(data: bytes, _random: Random) -> bytes:
    return bytes(len(data))


def _longer(data: bytes, random: Random) -> bytes:
    return data + random.randbytes(random.randint(1, 64))


def _manifest_of_another(path: str, answer: bytes, random: Random) -> bytes:
    if "/manifest" not in path:
        return answer
    return answer.replace(b'"version":1', b'"version":0') if random.random() < 0.5 else answer[:-1]


def _play(lie: Lie, *, stale: bool = False) -> Play:
    def play(stage: Stage, random: Random) -> Outcome:
        return stage.run(_fetch(stage.folder, lie, random, stale=stale))

    return play


async def _fetch(folder: Path, lie: Lie, random: Random, *, stale: bool) -> Outcome:
    with tempfile.TemporaryDirectory(dir=folder) as place:
        store = ChunkStore(Path(place) / "origin")
        roots, weights = {}, {}
        for version in (0, 1):
            weights[version] = random.randbytes(CHUNK_BYTES + 17)
            roots[version] = _publish(Path(place), store, version, weights[version])
        wanted = PolicyVersion(1)
        with_honest = random.random() < 0.5
        async with _lying(store, lie, random, stale=stale) as liar, ShardServer(store) as server:
            relays = (liar, server.url) if with_honest else (liar,)
            async with Fetcher(relays, Path(place) / "client", attempts=2, wait_s=0,
                               rng=random) as fetcher:  # fmt: skip
                try:
                    found = await asyncio.wait_for(fetcher.fetch(RUN, wanted, roots[1]), 20)
                except PolicyUnavailable:
                    return Outcome(not with_honest, "REFUSED", "no relay delivers")
                data = (found / "model.safetensors").read_bytes()
        return Outcome(data == weights[1], "LOADED", "the published bytes")


def _publish(folder: Path, store: ChunkStore, version: int, weights: bytes) -> Hash32:
    source = folder / f"source-{version}"
    source.write_bytes(weights)

    def sign_root(root: Hash32) -> bytes:
        struct = Checkpoint(RUN, PolicyVersion(version), root).struct_hash()
        return sign(digest(DOMAIN, struct), ORCHESTRATOR)

    manifest = store.publish(
        {"model.safetensors": source}, run_id=RUN, version=PolicyVersion(version), stream_from=0,
        stream_to=0, sign=sign_root, chunk_bytes=CHUNK_BYTES,
    )  # fmt: skip
    return manifest.root()


@asynccontextmanager
async def _lying(store: ChunkStore, lie: Lie, random: Random, *, stale: bool) -> AsyncIterator[str]:
    """Run a relay that answers from a store, changed by a lie; yields its URL."""

    def answer(path: str) -> bytes | None:
        parts = path.partition("?")[0].strip("/").split("/")
        version = PolicyVersion(0 if stale else 1)
        if parts[-1] == "manifest":
            return store.manifest_bytes(RUN, version)
        if parts[-1] == "signature":
            return store.signature(RUN, version)
        if parts[-1] == "versions":
            return b'{"versions": [1, 0]}'
        if parts[:2] == ["v1", "chunks"]:
            found = store.find(Hash32(bytes.fromhex(parts[2])))
            return found.read() if found else None
        return None

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                request = await reader.readuntil(b"\r\n\r\n")
                path = request.split(b" ")[1].decode()
                body = answer(path)
                data = b"" if body is None else lie(path, body, random)
                status = b"404 Not Found" if body is None else b"200 OK"
                writer.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n" % (status, len(data)))
                writer.write(data)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.close()


ATTACKS = (
    Attack(
        "A34",
        "relays that serve damaged, cut, older or other weights",
        "nothing is loaded that does not hash to the root on chain; every chunk is checked",
        "hard",
        (
            Variant("a bit flipped", _play(_chunks(_flipped))),
            Variant("cut short", _play(_chunks(_cut))),
            Variant("zeros", _play(_chunks(_zeroed))),
            Variant("too long", _play(_chunks(_longer))),
            Variant("another manifest", _play(_manifest_of_another)),
            Variant("the version before", _play(lambda _p, a, _r: a, stale=True)),
        ),
        Gain(saved=0.0),
        time_unit="fetch",
    ),
)
