"""The policy manifest: a version's files, and the hash of every chunk of them.

Owns the format of docs/protocol.md section 10 and does no I/O. `Manifest.from_bytes` is total: any
bytes give a valid Manifest or raise EncodingError.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Annotated, ClassVar, NamedTuple, Self

from pydantic import ConfigDict, PlainSerializer, PlainValidator, TypeAdapter, ValidationError

from muster.protocol.documents import first_fault
from muster.protocol.encoding import canonical_json, keccak, parse_canonical_json
from muster.protocol.errors import EncodingError
from muster.protocol.ids import Hash32, PolicyVersion, RunId
from muster.shardcast.digests import STATE_BLOCK_BYTES, digest_of_blocks, joined_digest

MAX_MANIFEST_BYTES = 1 << 20
"""Most bytes of a manifest; a larger one is not read. This also bounds files and chunks."""
MAX_TOTAL_BYTES = 1 << 40
"""Most bytes of all files of a version together."""
MAX_FILES = 4096
"""Most files in one version."""
DEFAULT_CHUNK_BYTES = STATE_BLOCK_BYTES
"""Default chunk size of publishers."""
MIN_CHUNK_BYTES = 1 << 10
"""Least chunk size: each chunk costs a request."""
MAX_CHUNK_BYTES = 64 << 20
"""Largest chunk size: each chunk is verified as a whole before it is served."""
MOST_CHUNKS = 12_000
"""A number of chunks whose digests always fit into a manifest."""
MAX_JSON_INT = (1 << 53) - 1
"""Largest integer that canonical JSON holds."""

FULL, DELTA = "full", "delta"
"""Kinds of manifest: relays carry the files, or the delta alone."""
DELTA_NAME = ".delta"
"""Name of the delta in a ChunkSpan; no file of a version can have this name."""

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_RESERVED = re.compile(r"(?i:con|prn|aux|nul|com[0-9]|lpt[0-9])(?:\..*)?")
"""Names of devices on Windows, with or without an extension."""
_DIGEST = re.compile(r"[0-9a-f]{64}")


def parse_digest(text: str) -> Hash32 | None:
    """Return the digest written as 64 lower-case hexadecimal digits, None for anything else."""
    return Hash32(bytes.fromhex(text)) if _DIGEST.fullmatch(text) else None


def _digest(value: object) -> Hash32:
    digest = parse_digest(value) if isinstance(value, str) else None
    if digest is None:
        raise ValueError(f"not 64 lower-case hexadecimal digits: {_shown(value)}")
    return digest


def _shown(value: object) -> str:
    return repr(value)[:80]


Digest = Annotated[Hash32, PlainValidator(_digest), PlainSerializer(bytes.hex)]
_STRICT = ConfigDict(extra="forbid", strict=True)


class ChunkSpan(NamedTuple):
    """Where one chunk belongs."""

    digest: Hash32
    """BLAKE3 of the chunk's bytes."""
    name: str
    """The file it is part of."""
    offset: int
    """Its first byte in that file."""
    size: int
    """Its length in bytes; only a file's last chunk is shorter than `chunk_bytes`."""


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """One file of a version."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: str
    """A plain file name: letters, digits, dot, underscore, hyphen; no dot at either end."""
    size: int
    """Bytes."""
    chunks: tuple[Digest, ...]
    """BLAKE3 of each chunk, in order; none for an empty file."""


@dataclass(frozen=True, slots=True)
class ManifestDelta:
    """The delta from the parent's files to this version's; see `muster.shardcast.delta`."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    parent_root: Digest
    """Root of the parent's manifest: it is as trustworthy as this manifest."""
    size: int
    """Bytes."""
    chunks: tuple[Digest, ...]
    """BLAKE3 of each chunk, in order."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """A policy version; its constructor raises EncodingError for values that the format refuses."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    run_id: RunId
    version: PolicyVersion
    files: tuple[ManifestFile, ...]
    """Sorted by name, no name twice."""
    state_hash: Digest
    """BLAKE3 of the files' digests joined in order; see `muster.shardcast.digests`."""
    stream_from: int
    """First position in the training stream that this version's step consumed."""
    stream_to: int
    """Position after the last one; equal to `stream_from` for version 0."""
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    """Bytes of every chunk except a file's last."""
    kind: str = FULL
    """What relays carry: FULL for the files, and the delta if there is one; DELTA for the delta
    alone."""
    parent: PolicyVersion | None = None
    """The version that the delta starts from; None without a delta."""
    delta: ManifestDelta | None = None
    """The delta from the parent's files; None without one."""
    schema_version: int = 1
    """Version of this document's form."""

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check_files(self)
        _check_delta(self)

    @property
    def total_bytes(self) -> int:
        """Size of all files together."""
        return sum(file.size for file in self.files)

    @property
    def broadcast_bytes(self) -> int:
        """Bytes that relays carry."""
        carried = self.total_bytes if self.kind == FULL else 0
        return carried + (self.delta.size if self.delta else 0)

    def without_delta(self) -> Self:
        """Return the manifest that the same files would have without a delta."""
        return replace(self, kind=FULL, parent=None, delta=None)

    def derived_state_hash(self) -> Hash32 | None:
        """Return the state hash that the chunk digests imply; None for other chunk sizes."""
        if self.chunk_bytes != STATE_BLOCK_BYTES:
            return None
        return joined_digest({file.name: digest_of_blocks(file.chunks) for file in self.files})

    def spans(self) -> Iterator[ChunkSpan]:
        """Yield every chunk of every file in order; a digest may come more than once."""
        for _, spans in self.spans_by_file():
            yield from spans

    def spans_by_file(self) -> Iterator[tuple[ManifestFile, list[ChunkSpan]]]:
        """Yield every file with its chunks, in order."""
        for file in self.files:
            yield file, _spans(file.name, file.size, file.chunks, self.chunk_bytes)

    def delta_spans(self) -> list[ChunkSpan]:
        """Return the delta's chunks in order; none without a delta."""
        if self.delta is None:
            return []
        return _spans(DELTA_NAME, self.delta.size, self.delta.chunks, self.chunk_bytes)

    def broadcast_spans(self) -> list[ChunkSpan]:
        """Return what relays carry, the delta first: most clients wait for that."""
        return [*self.delta_spans(), *(self.spans() if self.kind == FULL else ())]

    def to_bytes(self) -> bytes:
        """Return the canonical JSON; raises EncodingError when it exceeds the limit."""
        data = self._json()
        if len(data) > MAX_MANIFEST_BYTES:
            raise EncodingError(
                f"manifest of {len(data)} bytes exceeds the limit of {MAX_MANIFEST_BYTES}",
                hint="publish with larger chunks",
            )
        return data

    def fits(self) -> bool:
        """Tell whether the canonical JSON is within the limit."""
        return len(self._json()) <= MAX_MANIFEST_BYTES

    def _json(self) -> bytes:
        return canonical_json(_MANIFEST.dump_python(self, mode="json"))

    def root(self) -> Hash32:
        """Return the Keccak-256 of the canonical JSON: what the chain holds."""
        return keccak(self.to_bytes())

    @staticmethod
    def from_bytes(data: bytes) -> Manifest:
        """Parse canonical JSON; raises EncodingError on anything the format refuses."""
        value = parse_canonical_json(data, max_bytes=MAX_MANIFEST_BYTES)
        try:
            manifest = _MANIFEST.validate_json(data)
        except ValidationError as error:
            raise EncodingError(f"malformed manifest: {first_fault(error, 'it')}") from error
        if len(value) != len(fields(Manifest)):
            raise EncodingError("the manifest lacks a field")
        return manifest


_MANIFEST = TypeAdapter(Manifest)


def chunk_bytes_for(total_bytes: int) -> int:
    """Return the chunk size that keeps a manifest of so many bytes, those of a delta included,
    within its limit: 8 MiB up to 94 GiB.
    """
    size = DEFAULT_CHUNK_BYTES
    while size < MAX_CHUNK_BYTES and total_bytes > size * MOST_CHUNKS:
        size *= 2
    return size


def require_file_name(name: object) -> str:
    """Return `name` if it can stand in a manifest; else raises EncodingError.

    A valid name has no separator and no leading dot, so joined to a folder it stays inside. It is
    ASCII, does not end in a dot and names no device, so it is the same file on every file system.
    """
    is_plain = isinstance(name, str) and _NAME.fullmatch(name) and not _RESERVED.fullmatch(name)
    if not isinstance(name, str) or not is_plain or name.endswith("."):
        raise EncodingError(f"not a plain file name: {_shown(name)}")
    return name


def _check_numbers(manifest: Manifest) -> None:
    _require("schema_version", manifest.schema_version, 1, 1)
    _require("run_id", manifest.run_id, 1, MAX_JSON_INT)
    _require("version", manifest.version, 0, (1 << 32) - 1)
    _require("chunk_bytes", manifest.chunk_bytes, MIN_CHUNK_BYTES, MAX_CHUNK_BYTES)
    _require("stream_to", manifest.stream_to, 0, MAX_JSON_INT)
    _require("stream_from", manifest.stream_from, 0, manifest.stream_to)
    if manifest.version == 0 and manifest.stream_from != manifest.stream_to:
        raise EncodingError("version 0 is the base model and consumes nothing of the stream")
    if manifest.kind not in (FULL, DELTA):
        raise EncodingError(f"unknown kind of manifest: {_shown(manifest.kind)}")


def _check_delta(manifest: Manifest) -> None:
    if (manifest.delta is None) != (manifest.parent is None):
        raise EncodingError("a manifest has a parent exactly when it has a delta")
    if manifest.kind == DELTA and manifest.delta is None:
        raise EncodingError("a manifest of kind delta needs a delta")
    if manifest.delta is None or manifest.parent is None:
        return
    _require("parent", manifest.parent, 0, manifest.version - 1)
    # A larger delta is useless, and the bound limits the cost of applying one.
    _require("size of the delta", manifest.delta.size, 1, manifest.total_bytes)
    expected = -(-manifest.delta.size // manifest.chunk_bytes)
    if len(manifest.delta.chunks) != expected:
        count = len(manifest.delta.chunks)
        raise EncodingError(f"the delta needs {expected} chunks, got {count}")


def _check_files(manifest: Manifest) -> None:
    names = [require_file_name(file.name) for file in manifest.files]
    if not 1 <= len(names) <= MAX_FILES:
        raise EncodingError(f"a manifest has 1 to {MAX_FILES} files, got {len(names)}")
    if any(a >= b for a, b in itertools.pairwise(names)):
        raise EncodingError("files are not sorted by name, or a name comes twice")
    if len({name.lower() for name in names}) < len(names):
        raise EncodingError("two names differ in case alone: one file where case does not count")
    for file in manifest.files:
        _require(f"size of {file.name}", file.size, 0, MAX_TOTAL_BYTES)
        expected = -(-file.size // manifest.chunk_bytes)
        if len(file.chunks) != expected:
            raise EncodingError(f"{file.name} needs {expected} chunks, got {len(file.chunks)}")
    if manifest.total_bytes > MAX_TOTAL_BYTES:
        raise EncodingError(f"files of {manifest.total_bytes} bytes exceed {MAX_TOTAL_BYTES}")


def _require(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise EncodingError(f"{name} must be in [{low}, {high}], got {value}")


def _spans(name: str, size: int, chunks: tuple[Hash32, ...], chunk_bytes: int) -> list[ChunkSpan]:
    offsets = range(0, size, chunk_bytes)
    places = zip(chunks, offsets, strict=True)
    return [ChunkSpan(d, name, at, min(chunk_bytes, size - at)) for d, at in places]
