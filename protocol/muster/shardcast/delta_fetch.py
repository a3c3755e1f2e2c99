"""The way to a version that costs least: its files, or deltas from a version that is at hand.

Decides and rebuilds; asks the network only through the functions it is given. A manifest names the
root of its delta's parent, so every manifest on the way is as trustworthy as the first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from muster.protocol.errors import DeltaError, PolicyUnavailable
from muster.protocol.ids import Hash32, PolicyVersion
from muster.shardcast.chunks import storage_error
from muster.shardcast.digests import state_hash
from muster.shardcast.manifest import FULL, Manifest, ManifestFile

MAX_CHAIN = 64
"""Deltas in a row that are looked at; beyond, the files are fetched."""
DELTA_FILE = "delta"
"""What a delta is called while it is being fetched."""

ParentManifest = Callable[[Manifest], Awaitable[Manifest]]
"""Returns the manifest of what a manifest's delta starts from; raises PolicyUnavailable."""


async def is_shorter_by_delta(
    manifest: Manifest, parent_manifest: ParentManifest, is_held: Callable[[Manifest], bool]
) -> bool:
    """Tell whether the deltas since a held version, or since an anchor, take fewer bytes.

    `is_held` tells whether the files of the version a delta starts from are at hand.
    """
    full_bytes = manifest.total_bytes if manifest.kind == FULL else None
    spent_bytes = 0
    for _ in range(MAX_CHAIN):
        if manifest.delta is None:
            return False
        spent_bytes += manifest.delta.size
        if full_bytes is not None and spent_bytes >= full_bytes:
            return False
        if is_held(manifest):
            return True
        try:
            manifest = await parent_manifest(manifest)
        except PolicyUnavailable:
            return False
        if manifest.kind == FULL and full_bytes is None:
            return True
    return False


def parent_of(manifest: Manifest) -> tuple[PolicyVersion, Hash32]:
    """Return version and root of what a delta starts from; raises PolicyUnavailable without one."""
    if manifest.parent is None or manifest.delta is None:
        raise PolicyUnavailable(f"version {manifest.version} has no delta")
    return manifest.parent, manifest.delta.parent_root


def delta_as_file(manifest: Manifest) -> Manifest:
    """Return a manifest of which the delta is the only file, to fetch it like any other version."""
    if manifest.delta is None:
        raise PolicyUnavailable(f"version {manifest.version} has no delta")
    entry = ManifestFile(DELTA_FILE, manifest.delta.size, manifest.delta.chunks)
    return Manifest(
        run_id=manifest.run_id,
        version=manifest.version,
        files=(entry,),
        state_hash=manifest.state_hash,
        stream_from=manifest.stream_from,
        stream_to=manifest.stream_to,
        chunk_bytes=manifest.chunk_bytes,
    )


def rebuild(
    manifest: Manifest, folder: Path, delta_folder: Path, parent: Manifest, parent_folder: Path
) -> None:
    """Write a version's files to `folder`, from its delta and the parent's; blocking.

    Raises DeltaError when the delta does not make the files the manifest promises, StorageError
    when the disk refuses.
    """
    # Only here: who applies no delta needs no numpy, which is a fifth of a client's memory.
    from muster.shardcast.delta import States, apply_delta

    files = {file.name: file.size for file in manifest.files}
    try:
        with (delta_folder / DELTA_FILE).open("rb") as source:
            apply_delta(
                source,
                {file.name: parent_folder / file.name for file in parent.files},
                folder,
                files,
                states=States(parent.state_hash, manifest.state_hash),
            )
        made = state_hash({name: folder / name for name in files})
    except OSError as error:
        raise storage_error(error, f"rebuild version {manifest.version}") from error
    if made != manifest.state_hash:
        raise DeltaError(
            f"the delta of version {manifest.version} makes other files than promised",
            reason="target",
            hint="the base on disk was damaged, or the trainer published a wrong delta",
        )
