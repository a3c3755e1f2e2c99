"""Checking what lies on a disk: a fetched folder, or a whole store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from muster.protocol.errors import ConfigError, EncodingError
from muster.protocol.ids import Hash32, PolicyVersion, RunId
from muster.shardcast.cache import manifest_path
from muster.shardcast.digests import region_digest
from muster.shardcast.manifest import Manifest
from muster.shardcast.store import ChunkStore


class FileCheck(NamedTuple):
    """The result of checking one file."""

    run_id: RunId
    version: PolicyVersion
    name: str
    chunks: int
    damaged: int
    """How many of them are missing or have other bytes."""


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a fetched folder; raises ConfigError."""
    path = manifest_path(folder)
    try:
        return Manifest.from_bytes(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"there is no manifest {path}", hint="give a folder that was fetched, or a store"
        ) from error
    except EncodingError as error:
        raise ConfigError(f"{path} is damaged: {error}", hint="fetch the version again") from error


def check_folder(folder: Path) -> Iterator[FileCheck]:
    """Yield the check of every file of a fetched folder; hashes them all."""
    yield from check_files(folder, read_manifest(folder))


def check_files(folder: Path, manifest: Manifest) -> Iterator[FileCheck]:
    """Yield the check of every file that a manifest names in a folder."""
    for file, spans in manifest.spans_by_file():
        try:
            with (folder / file.name).open("rb", buffering=0) as source:
                fd = source.fileno()
                good = sum(region_digest(fd, s.offset, s.size) == s.digest for s in spans)
                is_long = source.seek(0, 2) != file.size
        except OSError:
            good, is_long = 0, True
        damaged = max(len(spans) - good, int(is_long))
        yield FileCheck(manifest.run_id, manifest.version, file.name, len(spans), damaged)


def is_store(folder: Path) -> bool:
    """Tell whether a folder is a store of an origin or relay."""
    return (folder / "chunks").is_dir() and (folder / "runs").is_dir()


def check_store(store: ChunkStore) -> Iterator[FileCheck]:
    """Yield the checks of all that a store broadcasts; hashes everything.

    A mirrored chunk that is damaged is deleted, so that the relay fetches it again.
    """
    for run_id, version in store.stored():
        manifest = store.manifest(run_id, version)
        if manifest is None:
            yield FileCheck(run_id, version, "manifest.json", 1, 1)
            continue
        digests: dict[str, list[Hash32]] = {}
        for span in manifest.broadcast_spans():
            digests.setdefault(span.name, []).append(span.digest)
        for name, chunks in digests.items():
            damaged = sum(store.find(digest) is None for digest in chunks)
            yield FileCheck(run_id, version, name, len(chunks), damaged)
