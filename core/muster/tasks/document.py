"""A task set as a file: canonical JSON lines, read and written without holding the problems.

Line 0 is a header with name, version and count, the problems follow in the order in which tickets
index them. Opening hashes the file once, in bounded memory; every line that is read later is
compared with its leaf, so that a change of the file is noticed. Writing takes rows one by one, and
keeps them in a temporary file until their number is known; memory grows only with their ids. Does
not parse problems.
"""

import os
import re
import shutil
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from muster.lifecycle.files import cannot_write, whole_file
from muster.protocol.encoding import canonical_json, parse_canonical_json
from muster.protocol.errors import ConfigError, EncodingError, ProtocolError, TaskError
from muster.protocol.ids import Hash32
from muster.protocol.merkle import verify_merkle_proof
from muster.protocol.mixture import MOST_PARTS, PART_NAME
from muster.tasks.line_tree import (
    Ends,
    Leaves,
    as_leaves,
    hash_lines,
    leaf_of,
    path_of,
    root_of,
)
from muster.tasks.problem import MAX_PROBLEM_BYTES, MIN_PROBLEM_BYTES

MAX_TASK_SET_BYTES = 8 * 1024 * 1024 * 1024
"""Most bytes of a document; a larger one is not read."""
MAX_HEADER_BYTES = 16 * 1024
SCHEMA_VERSION = 1
PARTS_SCHEMA_VERSION = 2
"""Schema version of a document with parts."""
_CHUNK_BYTES = 4 * 1024 * 1024
_BUFFER_BYTES = 1024 * 1024
HEADER_FIELDS = {"count", "name", "schema_version", "version"}


@dataclass(frozen=True, slots=True)
class SetPart:
    """A named range of a document's problems; parts follow one another and cover all problems."""

    name: str
    """Its name in recipes: small letters, digits and _, at most 32."""
    version: str
    """Name and version of its original task set, 1 to 128 characters."""
    count: int
    """Number of its problems."""

    def __post_init__(self) -> None:
        if not re.fullmatch(PART_NAME, self.name):
            raise TaskError(
                f"{self.name!r} cannot be a part's name",
                hint="a small letter, then small letters, digits and _, at most 32",
            )
        if self.count < 1:
            raise TaskError(f"part {self.name!r} has no problems")
        if not 1 <= len(self.version) <= 128:
            raise TaskError(f"a part's version has 1 to 128 characters, got {len(self.version)}")

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Parse a header's entry; raises EncodingError, or TaskError for an invalid part."""
        if not isinstance(value, dict) or value.keys() != {"count", "name", "version"}:
            raise EncodingError("a part of a task set has count, name and version")
        name, version, count = value["name"], value["version"], value["count"]
        if not isinstance(name, str) or not isinstance(version, str) or type(count) is not int:
            raise EncodingError("a part's name and version are text, its count an integer")
        return cls(name, version, count)


@dataclass(frozen=True, slots=True)
class Header:
    """The first line of a document."""

    name: str
    """Name of the set, 1 to 128 characters."""
    version: str
    """Version of the set, 1 to 128 characters."""
    count: int
    """Number of problems that follow."""
    parts: tuple[SetPart, ...] = ()
    """The parts of the set; empty for a set without parts."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise TaskError(f"task set {self.name!r} has no problems")
        for what, text in (("name", self.name), ("version", self.version)):
            if not 1 <= len(text) <= 128:
                raise TaskError(f"a task set's {what} has 1 to 128 characters, got {len(text)}")
        if not self.parts:
            return
        twice, count = Counter(part.name for part in self.parts).most_common(1)[0]
        if count > 1:
            raise TaskError(
                f"part {twice!r} comes {count} times", hint="give every part its own name"
            )
        if len(self.parts) > MOST_PARTS:
            raise TaskError(f"{len(self.parts)} parts are too many: at most {MOST_PARTS}")
        if sum(part.count for part in self.parts) != self.count:
            raise TaskError(f"the parts of {self.name!r} do not add up to {self.count} problems")

    def to_bytes(self) -> bytes:
        """Return the canonical JSON, without a line break."""
        value: dict[str, Any] = {
            "count": self.count,
            "name": self.name,
            "schema_version": PARTS_SCHEMA_VERSION if self.parts else SCHEMA_VERSION,
            "version": self.version,
        }
        if self.parts:
            value["parts"] = [asdict(part) for part in self.parts]
        return canonical_json(value)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Parse a first line; raises EncodingError, or TaskError for an invalid header."""
        value = parse_canonical_json(data, max_bytes=MAX_HEADER_BYTES)
        if not isinstance(value, dict) or not value.keys() >= HEADER_FIELDS:
            raise EncodingError("a task set's header has count, name, schema_version and version")
        found = value["schema_version"]
        if type(found) is not int or found not in (SCHEMA_VERSION, PARTS_SCHEMA_VERSION):
            raise EncodingError(f"unknown schema version of a task set: {found!r}")
        fields = HEADER_FIELDS | ({"parts"} if found == PARTS_SCHEMA_VERSION else set())
        if value.keys() != fields:
            raise EncodingError(f"a task set's header has the fields {', '.join(sorted(fields))}")
        name, version, count = value["name"], value["version"], value["count"]
        if not isinstance(name, str) or not isinstance(version, str) or type(count) is not int:
            raise EncodingError("a task set's name and version are text, its count an integer")
        parts = value.get("parts", [])
        if not isinstance(parts, list) or (not parts and "parts" in fields):
            raise EncodingError("a task set's parts are a list that is not empty")
        return cls(name, version, count, tuple(map(SetPart.from_json, parts)))


@dataclass(frozen=True, slots=True)
class LineProof:
    """A proof that a line is in a document at this position."""

    position: int
    """The line's number; 0 is the header."""
    path: tuple[Hash32, ...]
    """Siblings from its leaf up to the root."""

    def proves(self, line: bytes, root: Hash32) -> bool:
        """Return whether `line`, without its line break, is at this position in the document of
        `root`.
        """
        return verify_merkle_proof(leaf_of(line, self.position), self.path, root)


class TaskSetFile:
    """An opened file; safe to read from several threads."""

    def __init__(self, path: Path, descriptor: int, scanned: tuple[Header, Leaves, Ends]) -> None:
        """Called by `open`."""
        self.path = path
        """The file."""
        self.header, self._leaves, self._ends = scanned
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Return the document in a file, hashed from end to end.

        Raises ConfigError when it cannot be read, EncodingError or TaskError when its lines do not
        match the header. Needs 40 bytes of memory per line.
        """
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        try:
            return cls(path, descriptor, _scan(descriptor))
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, OSError):
                raise ConfigError(f"cannot read {path}: {error.strerror}") from error
            raise

    @cached_property
    def root(self) -> Hash32:
        """The Merkle root over all lines, which a run pins."""
        return root_of(self._leaves)

    @property
    def size_bytes(self) -> int:
        """Length of the file."""
        return int(self._ends[-1]) + 1

    def line(self, position: int) -> bytes:
        """Return a line; raises TaskError when the file has changed since it was opened."""
        start = int(self._ends[position - 1]) + 1 if position else 0
        line = os.pread(self._descriptor, int(self._ends[position]) - start, start)
        if leaf_of(line, position) != self._leaves[position].tobytes():
            raise TaskError(
                f"{self.path} has changed since it was opened: line {position} differs",
                hint="restore the file, and start again",
            )
        return line

    def prove(self, position: int) -> LineProof:
        """Return the proof of a line."""
        return LineProof(position, tuple(path_of(self._leaves, position)))

    def chunks(self) -> Iterator[bytes]:
        """Yield the file's bytes, unverified."""
        offset = 0
        while data := os.pread(
            self._descriptor, min(_CHUNK_BYTES, self.size_bytes - offset), offset
        ):
            yield data
            offset += len(data)


def document_root(path: Path) -> Hash32:
    """Return the root of the document in a file; raises as `TaskSetFile.open` does."""
    return TaskSetFile.open(path).root


def has_root(path: Path, root: Hash32) -> bool:
    """Return whether a file exists and is the document with this root."""
    try:
        return path.is_file() and document_root(path) == root
    except (ProtocolError, TaskError):
        return False


def root_of_bytes(data: bytes) -> Hash32:
    """Return the root of a document in memory, whose problems are not parsed.

    Raises EncodingError or TaskError when its lines do not match the header.
    """
    header = _read_header(data, len(data))
    if data.count(b"\n") != header.count + 1 or not data.endswith(b"\n"):
        raise EncodingError(f"the header announces {header.count} problems, there are others")
    return root_of(hash_lines(data, 0, max_line_bytes=MAX_PROBLEM_BYTES)[0])


def _read_header(start: bytes, size: int) -> Header:
    """Return the header of a document of `size` bytes."""
    first, ended, _ = start[: MAX_HEADER_BYTES + 1].partition(b"\n")
    if not ended:
        raise EncodingError("a task set begins with a header and ends with a line break")
    header = Header.from_bytes(first)
    # Checked before memory for lines is allocated: a header may announce any number.
    if size < len(first) + 1 + header.count * (MIN_PROBLEM_BYTES + 1):
        raise EncodingError(
            f"the header announces {header.count} problems, {size} bytes cannot hold them"
        )
    return header


def _scan(descriptor: int) -> tuple[Header, Leaves, Ends]:
    size = os.fstat(descriptor).st_size
    if size > MAX_TASK_SET_BYTES:
        raise EncodingError(f"task set of {size} bytes exceeds {MAX_TASK_SET_BYTES}")
    header = _read_header(os.pread(descriptor, MAX_HEADER_BYTES + 1, 0), size)
    return header, *_hash_rows(descriptor, header)


def _hash_rows(descriptor: int, header: Header) -> tuple[Leaves, Ends]:
    """Return leaves and ends of all lines, whose number must match the header."""
    import numpy as np

    leaves = np.empty((header.count + 1, 32), np.uint8)
    ends = np.empty(header.count + 1, np.uint64)
    first = header.to_bytes()
    leaves[0], ends[0] = as_leaves([leaf_of(first, 0)])[0], len(first)
    done, offset = 1, len(first) + 1
    while data := os.pread(descriptor, _CHUNK_BYTES, offset):
        found = data.count(b"\n")
        if found > len(leaves) - done:
            raise EncodingError(f"the header announces {header.count} problems, there are more")
        some, their_ends = hash_lines(data, done, max_line_bytes=MAX_PROBLEM_BYTES)
        if not found:
            raise EncodingError("a task set ends with a line break")
        leaves[done : done + found], ends[done : done + found] = (
            some,
            their_ends + np.uint64(offset),
        )
        done, offset = done + found, offset + int(their_ends[-1]) + 1
    if done != len(leaves):
        raise EncodingError(f"the header announces {header.count} problems, there are {done - 1}")
    return leaves, ends


# ------------------------------------------------------------------------------------- writing


class Added(Enum):
    """Result of adding a row."""

    NEW = "added"
    REPEATED = "the same row came before"
    CLASH = "another row with this id came before"


class DocumentWriter:
    """A document that is being written, as a context manager. After an error no file is left."""

    def __init__(self, path: Path, name: str, version: str) -> None:
        """`path` receives the document when `finish` is called."""
        Header(name, version, 1)
        self._path, self._name, self._version = path, name, version
        self._rows = path.with_name(f".{path.name}.rows")
        self._buffer: list[bytes] = []
        self._buffered = 0
        self._leaves: list[Leaves] = []
        self._contents: dict[str, int] = {}
        self._parts: list[SetPart] = []

    def __enter__(self) -> Self:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._rows.open("wb")
        except OSError as error:
            raise cannot_write(self._path, error) from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()
        self._rows.unlink(missing_ok=True)

    def __len__(self) -> int:
        return len(self._contents)

    def add(self, problem_id: str, line: bytes) -> Added:
        """Add a problem in canonical JSON, unless a row with its id came before."""
        # Salted per process, so nobody can construct rows that collide.
        content = hash(line)
        before = self._contents.get(problem_id)
        if before is not None:
            return Added.REPEATED if before == content else Added.CLASH
        self._contents[problem_id] = content
        self._buffer.append(line)
        self._buffered += len(line)
        if self._buffered >= _BUFFER_BYTES:
            self._flush()
        return Added.NEW

    def end_part(self, name: str, version: str) -> None:
        """End a part: the problems added since the last one; raises TaskError without problems."""
        before = sum(part.count for part in self._parts)
        self._parts.append(SetPart(name, version, len(self) - before))

    def finish(self) -> Hash32:
        """Write the document atomically; return its root.

        Raises TaskError when it has no problems, StorageError when the disk fails.
        """
        import numpy as np

        self._flush()
        header = Header(self._name, self._version, len(self), tuple(self._parts)).to_bytes()
        with (
            whole_file(self._path) as part,
            part.open("wb") as file,
            self._rows.open("rb") as rows,
        ):
            file.write(header + b"\n")
            shutil.copyfileobj(rows, file, _BUFFER_BYTES)
        return root_of(np.concatenate([as_leaves([leaf_of(header, 0)]), *self._leaves]))

    def _flush(self) -> None:
        if not self._buffer:
            return
        data = b"\n".join(self._buffer) + b"\n"
        first = len(self) - len(self._buffer) + 1
        leaves, _ = hash_lines(data, first, max_line_bytes=MAX_PROBLEM_BYTES)
        self._leaves.append(leaves)
        self._buffer, self._buffered = [], 0
        try:
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            raise cannot_write(self._path, error) from error
