"""Publishing: puts a version's files into a folder of the store and hashes them chunk by chunk."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from muster.protocol.ids import Hash32, PolicyVersion, RunId
from muster.shardcast.digests import joined_digest
from muster.shardcast.manifest import Manifest, ManifestFile, require_file_name
from muster.shardcast.originals import HASHERS, Stamp, hash_file, place_file


@dataclass(frozen=True, slots=True)
class Edition:
    """What the trainer says of a version beside its files."""

    run_id: RunId
    """The run."""
    version: PolicyVersion
    """The policy version."""
    stream_from: int
    """First position in the training stream that its step consumed."""
    stream_to: int
    """Position after the last one."""
    chunk_bytes: int
    """Bytes of every chunk but a file's last."""


def split_files(
    files: Mapping[str, Path], folder: Path, edition: Edition, *, link: bool
) -> tuple[Manifest, dict[Hash32, Stamp]]:
    """Return the manifest of the files as they now lie in `folder`, and each chunk's file stamp.

    Raises EncodingError for names or sizes the format refuses, StorageError when reading or
    writing fails.
    """
    entries: list[ManifestFile] = []
    digests: dict[str, Hash32] = {}
    stamps: dict[Hash32, Stamp] = {}
    with ThreadPoolExecutor(HASHERS, thread_name_prefix="publish") as hashers:
        for name in sorted(require_file_name(name) for name in files):
            place_file(name, files[name], folder / name, link=link)
            entry, digests[name], stamp = hash_file(folder / name, edition.chunk_bytes, hashers)
            entries.append(entry)
            stamps.update(dict.fromkeys(entry.chunks, stamp))
    manifest = Manifest(
        run_id=edition.run_id,
        version=edition.version,
        files=tuple(entries),
        state_hash=joined_digest(digests),
        stream_from=edition.stream_from,
        stream_to=edition.stream_to,
        chunk_bytes=edition.chunk_bytes,
    )
    return manifest, stamps
