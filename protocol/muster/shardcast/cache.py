"""The folder that fetched versions lie in; several processes may share it.

    <run>/v<version>/            the verified files
    <run>/v<version>.manifest    what they are
    <run>/.v<version>.part/      files that are being fetched
    <run>/.v<version>.delta/     a delta that is being fetched
    <run>/.v<version>.lock       held by the process that fetches

Knows nothing of relays. What lies here is believed only after it has been hashed.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from muster.protocol.encoding import keccak
from muster.protocol.errors import EncodingError, PolicyUnavailable
from muster.protocol.ids import Hash32, PolicyVersion, RunId
from muster.shardcast.chunks import storage_error, temporary_name
from muster.shardcast.delta_fetch import parent_of
from muster.shardcast.digests import file_digest, joined_digest
from muster.shardcast.download import in_thread
from muster.shardcast.manifest import ChunkSpan, Manifest
from muster.shardcast.part import PartFolder, discard

logger = logging.getLogger(__name__)

LOCK_POLL_S = 0.02
"""How often to look whether another process has finished fetching the same version."""

_VERSION_FOLDER = re.compile(r"v(0|[1-9][0-9]{0,9})")


def version_folder(cache: Path, run_id: RunId, version: PolicyVersion) -> Path:
    """Return where a version's files are or would be."""
    return cache / str(int(run_id)) / f"v{int(version)}"


def part_path(folder: Path) -> Path:
    """Return where a version's files are while they are fetched."""
    return folder.with_name(f".{folder.name}.part")


def delta_path(folder: Path) -> Path:
    """Return where a version's delta is while it is fetched."""
    return folder.with_name(f".{folder.name}.delta")


@asynccontextmanager
async def only_process(folder: Path) -> AsyncIterator[None]:
    """Exclude other processes that fetch the same version; ends with the process, however."""
    path = folder.with_name(f".{folder.name}.lock")
    fd = await _locked(path)
    try:
        yield
    finally:
        os.close(fd)


async def _locked(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
            try:
                await _wait_for_lock(fd)
            except BaseException:
                os.close(fd)
                raise
            if os.fstat(fd).st_nlink:
                return fd
            os.close(fd)  # deleted with its version while we waited
    except OSError as error:
        raise storage_error(error, f"lock {path}") from error


async def _wait_for_lock(fd: int) -> None:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            await asyncio.sleep(LOCK_POLL_S)


def _manifest_path(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.manifest")


def holds_parent(folder: Path, manifest: Manifest) -> bool:
    """Tell whether the version that a delta starts from is cached beside `folder`."""
    parent, root = parent_of(manifest)
    neighbour = folder.with_name(f"v{int(parent)}")
    cached = _read_manifest(neighbour) if neighbour.is_dir() else None
    return cached is not None and cached.root() == root


def _read_manifest(folder: Path) -> Manifest | None:
    try:
        return Manifest.from_bytes(_manifest_path(folder).read_bytes())
    except (OSError, EncodingError):
        return None


async def is_intact(folder: Path, root: Hash32) -> bool:
    """Tell whether the folder holds the version whole; if not, keep what is good for resuming."""
    if not folder.is_dir():
        return False
    manifest = _read_manifest(folder)
    if manifest is None or keccak(manifest.to_bytes()) != root:
        await in_thread(discard, folder)
        return False
    names = {path.name for path in folder.iterdir()}
    if names == {file.name for file in manifest.files} and await _has_state(folder, manifest):
        return True
    logger.warning("cached policy was damaged", extra={"folder": folder.name})
    await in_thread(discard, part_path(folder))
    folder.rename(part_path(folder))
    return False


async def _has_state(folder: Path, manifest: Manifest) -> bool:
    """Tell whether the files, read back from the disk, have the manifest's state hash."""
    try:
        digests = {
            file.name: await in_thread(file_digest, folder / file.name) for file in manifest.files
        }
    except OSError:
        return False
    return joined_digest(digests) == manifest.state_hash


async def require_state(part: PartFolder) -> None:
    """Raise PolicyUnavailable unless the files have the published state hash.

    Every chunk has been verified, so this only tells whether the manifest contradicts itself: where
    its chunks are the state hash's own blocks, nothing is read again.
    """
    derived = part.manifest.derived_state_hash()
    if derived == part.manifest.state_hash:
        return
    if derived is not None or not await _has_state(part.path, part.manifest):
        await in_thread(discard, part.path)
        raise PolicyUnavailable(
            f"the files of version {part.manifest.version} do not have the published state hash",
            hint="the trainer published a manifest that contradicts itself, or the disk is failing",
        )


def copy_from_neighbours(
    part: PartFolder, lacking: list[list[ChunkSpan]], folder: Path
) -> list[list[ChunkSpan]]:
    """Fill chunks that another cached version has too; returns those that none has."""
    held: dict[Hash32, tuple[Path, int]] = {}
    for neighbour, _ in _cached_versions(folder.parent):
        manifest = _read_manifest(neighbour)
        for span in manifest.spans() if manifest else ():
            held[span.digest] = (neighbour / span.name, span.offset)
    return [
        places
        for places in lacking
        if places[0].digest not in held or not part.fill_from(places, *held[places[0].digest])
    ]


def install(part: PartFolder, folder: Path) -> None:
    """Give the finished folder its name; its manifest comes first, so none is ever without."""
    try:
        fresh = folder.with_name(temporary_name())
        fresh.write_bytes(part.manifest.to_bytes())
        fresh.rename(_manifest_path(folder))
        part.path.rename(folder)
    except OSError as error:
        raise storage_error(error, f"install {folder}") from error


def drop_old(folder: Path, keep: int) -> None:
    """Delete all but the newest versions; never the one just fetched, nor what it started from."""
    manifest = _read_manifest(folder)
    kept = {folder}
    if manifest is not None and manifest.parent is not None:
        kept.add(folder.with_name(f"v{int(manifest.parent)}"))
    old = [path for path, _ in _cached_versions(folder.parent)[keep:] if path not in kept]
    for path in old:
        trash = path.with_name(temporary_name())
        path.rename(trash)
        lock = path.with_name(f".{path.name}.lock")
        for leftover in (trash, _manifest_path(path), delta_path(path), lock):
            discard(leftover)


def _cached_versions(run_folder: Path) -> list[tuple[Path, int]]:
    """Return the version folders of a run, newest first."""
    found = [(path, _VERSION_FOLDER.fullmatch(path.name)) for path in run_folder.iterdir()]
    versions = [(path, int(match[1])) for path, match in found if match and path.is_dir()]
    return sorted(versions, key=lambda item: item[1], reverse=True)
