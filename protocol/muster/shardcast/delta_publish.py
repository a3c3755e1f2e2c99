"""What the publisher does about deltas: makes one, and decides what of a version is broadcast.

An adapter's delta starts from the base model, which therefore stays; its merged files are never
carried. Every other version whose parent the store still holds whole gets a delta, if that is worth
carrying. Every `anchor_every`-th of those, and every one without a delta, is an anchor: relays
carry its files too, so that a client that has none of the versions before it can start there. The
decision follows from version number and content alone, so publishing again gives the same manifest.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from muster.protocol.errors import StorageError
from muster.protocol.ids import Hash32, PolicyVersion
from muster.shardcast.adapter import is_adapter
from muster.shardcast.chunks import storage_error
from muster.shardcast.delta import States, write_delta
from muster.shardcast.digests import state_hash
from muster.shardcast.manifest import DELTA, DELTA_NAME, FULL, Manifest, ManifestDelta
from muster.shardcast.originals import Stamp, hash_file

DEFAULT_ANCHOR_EVERY = 8
"""Versions from one anchor to the next: a late joiner applies at most seven deltas."""
BASE = PolicyVersion(0)
"""What adapters are over."""
WORTH_CARRYING = 2
"""A delta is made only if it is at most the files' size divided by this."""


def parent_of(version: PolicyVersion, files: Mapping[str, Path]) -> PolicyVersion | None:
    """Return the version that a delta starts from, None for the base model.

    An adapter is over the base; other versions differ least from the one before.
    """
    if not version:
        return None
    return BASE if is_adapter(files) else PolicyVersion(version - 1)


def add_delta(
    manifest: Manifest, folder: Path, parent: Manifest, parent_folder: Path, *, anchor_every: int
) -> tuple[Manifest, dict[Hash32, Stamp]]:
    """Return the manifest with a delta, now in `folder`, and the stamps of the delta's chunks.

    Unchanged and without stamps when a delta is not worth it or the parent's files are not what its
    manifest says. The folders hold the two versions' files. Raises StorageError when the disk
    refuses.
    """
    target = folder / DELTA_NAME
    try:
        files, old = _files(manifest, folder), _files(parent, parent_folder)
        if not all(path.is_file() for path in old.values()) or state_hash(old) != parent.state_hash:
            return manifest, {}
        with target.open("wb") as out:
            is_worth_it = write_delta(
                out,
                files,
                old,
                states=States(parent.state_hash, manifest.state_hash),
                max_bytes=manifest.total_bytes // WORTH_CARRYING,
            )
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise storage_error(error, f"write the delta of version {manifest.version}") from error
    if not is_worth_it:
        target.unlink()
        return manifest, {}
    with ThreadPoolExecutor(1, thread_name_prefix="publish") as hashers:
        entry, _, stamp = hash_file(target, manifest.chunk_bytes, hashers)
    # From the base there are no chains of deltas that would have to be cut.
    is_anchor = manifest.version % anchor_every == 0 and not is_adapter(files)
    carried = replace(
        manifest,
        kind=FULL if is_anchor else DELTA,
        parent=parent.version,
        delta=ManifestDelta(parent.root(), entry.size, entry.chunks),
    )
    return carried, dict.fromkeys(entry.chunks, stamp)


def _files(manifest: Manifest, folder: Path) -> Mapping[str, Path]:
    return {file.name: folder / file.name for file in manifest.files}
