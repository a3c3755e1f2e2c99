"""Small policies for the tests of shardcast."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from muster.protocol.ids import Hash32, PolicyVersion, RunId
from muster.shardcast import ChunkStore, Manifest, ShardServer
from muster.shardcast.chunks import VerifyingSink

RUN = RunId(7)
SIGNATURE = bytes(65)
CHUNK_BYTES = 1024


def fake_signature(root: Hash32) -> bytes:
    """65 bytes that no store checks."""
    return root + root + b"\x1b"


def write_files(folder: Path, files: Mapping[str, bytes]) -> dict[str, Path]:
    """Write {name: bytes} into a folder; returns the paths by name."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return {name: folder / name for name in files}


def publish(
    store: ChunkStore, files: Mapping[str, bytes], version: int = 1, *, anchor_every: int = 0
) -> Manifest:
    """Publish {name: bytes} in 1 KiB chunks."""
    paths = write_files(store.folder.parent / f"source-{version}", files)
    return publish_paths(store, paths, version, anchor_every=anchor_every)


def publish_paths(
    store: ChunkStore, paths: Mapping[str, Path], version: int = 1, **options: Any
) -> Manifest:
    """Publish files; `options` are those of `ChunkStore.publish`."""
    usual: dict[str, Any] = {
        "run_id": RUN,
        "version": PolicyVersion(version),
        "stream_from": 0,
        "stream_to": 0,
        "sign": fake_signature,
        "chunk_bytes": CHUNK_BYTES,
    }
    return store.publish(paths, **(usual | options))


def read_back(store: ChunkStore, manifest: Manifest) -> dict[str, bytes]:
    """Return the version's files, put together from the store's chunks."""
    files = {file.name: b"" for file in manifest.files}
    for span in manifest.spans():
        files[span.name] += chunk(store, span.digest)
    return files


def chunk(store: ChunkStore, digest: Hash32) -> bytes:
    """Return a chunk's bytes as the store holds them."""
    region = store.find(digest)
    assert region is not None
    return region.read()


def delta_of(store: ChunkStore, manifest: Manifest) -> bytes:
    """Return a version's delta as the store holds it."""
    return b"".join(chunk(store, span.digest) for span in manifest.delta_spans())


def fill(store: ChunkStore, source: ChunkStore, manifest: Manifest) -> None:
    """Copy the chunks that an incomplete version lacks from another store."""
    for span in store.missing(manifest):
        sink = store.sink(span)
        sink.write([chunk(source, span.digest)])
        sink.commit()
        sink.close()


@asynccontextmanager
async def serving(store: ChunkStore, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Serve a store; yields a client of it. `options` are those of `ShardServer`."""
    async with (
        ShardServer(store, **options) as server,
        httpx.AsyncClient(base_url=server.url, timeout=5) as client,
    ):
        yield client


class MemorySink(VerifyingSink):
    """A sink that keeps nothing."""

    def close(self) -> None: ...

    def _store(self, pieces: Sequence[bytes | memoryview]) -> None: ...

    def _keep(self) -> None: ...
