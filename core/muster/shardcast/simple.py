"""Broadcast of any large files by signature alone, without a chain: publish here, fetch there.

manifest = publish([Path("model.safetensors")], Path("store"), key=key)
folder = asyncio.run(fetch(["http://relay:8700"], Path("cache"), signer=address))

It also checks a fetched folder or a whole store on a disk.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from muster.protocol.errors import ConfigError, EncodingError, PolicyUnavailable
from muster.protocol.ids import Address, Hash32, PolicyVersion, RunId
from muster.shardcast.cache import manifest_path
from muster.shardcast.digests import region_digest
from muster.shardcast.fetcher import Fetcher, Progress
from muster.shardcast.manifest import Manifest, chunk_bytes_for, require_file_name
from muster.shardcast.store import ChunkStore
from muster.shardcast.trust import Trust, sign_root, trust_signer

FIRST_RUN = RunId(1)
"""Default run: its number when there is only one."""
INDEX_SUFFIX = ".safetensors.index.json"
"""Suffix of the index of a model in many files."""
MAX_INDEX_BYTES = 64 << 20
"""Most bytes of an index; a larger one is not read."""


def publish(
    paths: Sequence[Path],
    store: ChunkStore | Path,
    *,
    key: bytes,
    run_id: RunId = FIRST_RUN,
    version: PolicyVersion | None = None,
    link: bool = False,
) -> Manifest:
    """Publish files as the next version of a run, signed with a key; returns the manifest.

    `paths` are files, folders of files, or safetensors indexes; see `ChunkStore.publish` for `link`
    and for its errors; unfit paths raise ConfigError. Servers of the store, in this process or
    another, offer the version at once. Blocks until it is on the disk.
    """
    store = store if isinstance(store, ChunkStore) else ChunkStore(store)
    files = files_of(paths)
    if version is None:
        version = PolicyVersion(max(store.stored_versions(run_id), default=-1) + 1)
    number = version
    return store.publish(
        files,
        run_id=run_id,
        version=number,
        stream_from=0,
        stream_to=0,
        sign=lambda root: sign_root(key, run_id, number, root),
        chunk_bytes=chunk_bytes_for(sum(path.stat().st_size for path in files.values())),
        link=link,
    )


async def fetch(
    relays: Sequence[str],
    cache: Path,
    *,
    signer: Address | None = None,
    root: Hash32 | None = None,
    run_id: RunId = FIRST_RUN,
    version: PolicyVersion | None = None,
    reserve: Sequence[str] = (),
    token: str | None = None,
    wait_s: int = 10,
    progress: Progress | None = None,
) -> Path:
    """Return a folder with a version's verified files; without `version`, of the newest offered.

    A version is believed when `signer` signed it, or when its manifest has the given `root`. A
    relay can hide the newest version, but not invent one. Raises ConfigError without a signer or
    root, PolicyUnavailable when no relay has the version, StorageError when the disk refuses.
    """
    if (signer is None) == (root is None) or (root is not None and version is None):
        raise ConfigError("a signer is missing, or a version and its root")
    async with Fetcher(relays, cache, reserve=reserve, token=token, wait_s=wait_s) as fetcher:
        if root is None:
            assert signer is not None
            trust = trust_signer(signer)
            if version is None:
                version, root = await _newest(fetcher, run_id, trust, wait_s)
            else:
                root = await fetcher.root_of(run_id, version, trust)
        assert version is not None  # it comes with a root
        return await fetcher.fetch(run_id, version, root, progress=progress)


async def _newest(
    fetcher: Fetcher, run_id: RunId, trust: Trust, wait_s: int
) -> tuple[PolicyVersion, Hash32]:
    found = await fetcher.newest(run_id, trust, wait_s=wait_s)
    if found is None:
        raise PolicyUnavailable(
            f"no relay offers a version of run {run_id} that the signer signed",
            hint="check that the relays are running and reach the origin",
        )
    return found


# From paths to files


def files_of(paths: Sequence[Path]) -> dict[str, Path]:
    """Return the files to publish by name.

    An index stands for itself and the files beside it that it names; a folder for the files in it.
    Raises ConfigError when there is no file, a name occurs twice, or a folder holds folders.
    """
    found: dict[str, Path] = {}
    for path in (file for given in paths for file in _expand(given)):
        try:
            name = require_file_name(path.name)
        except EncodingError as error:
            raise ConfigError(f"cannot publish {path}: {error}") from error
        if name in found and not found[name].samefile(path):
            raise ConfigError(f"two files have the name {name}", hint="publish them as two runs")
        found[name] = path
    if not found:
        raise ConfigError("there is nothing to publish", hint="give files, or a folder with files")
    return found


def _expand(path: Path) -> list[Path]:
    if path.is_dir():
        entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
        folders = [entry.name for entry in entries if not entry.is_file()]
        if folders:
            raise ConfigError(f"{path} holds {folders[0]}, which is not a file")
        return entries
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    return [path, *_indexed(path)] if path.name.endswith(INDEX_SUFFIX) else [path]


def _indexed(index: Path) -> list[Path]:
    """Return the files that an index names; all of them must lie beside it."""
    try:
        if index.stat().st_size > MAX_INDEX_BYTES:
            raise ConfigError(f"the index {index} is larger than {MAX_INDEX_BYTES} bytes")
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        files = [index.with_name(require_file_name(name)) for name in names]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{index} is not an index of safetensors files: {error}") from error
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ConfigError(f"{index.name} names {missing[0]}, which is not beside it")
    return files


# Checking files on a disk


class FileCheck(NamedTuple):
    """The result of checking one file."""

    run_id: RunId
    version: PolicyVersion
    name: str
    chunks: int
    damaged: int
    """Chunks that are missing or have other bytes."""


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


def check_store(store: ChunkStore, root: Hash32 | None = None) -> Iterator[FileCheck]:
    """Yield the checks of all files that a store broadcasts, or of those of the versions whose
    manifest has a root; hashes them all.

    A mirrored chunk that is damaged is deleted, so that the relay fetches it again.
    """
    for run_id, version in store.stored():
        manifest = store.manifest(run_id, version)
        if root is not None and (manifest is None or manifest.root() != root):
            continue
        if manifest is None:
            yield FileCheck(run_id, version, "manifest.json", 1, 1)
            continue
        digests: dict[str, list[Hash32]] = {}
        for span in manifest.broadcast_spans():
            digests.setdefault(span.name, []).append(span.digest)
        for name, chunks in digests.items():
            damaged = sum(store.find(digest) is None for digest in chunks)
            yield FileCheck(run_id, version, name, len(chunks), damaged)
