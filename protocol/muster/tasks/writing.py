"""Writes a task set's document row by row, in memory that grows with its ids alone.

The header comes first in a document and says how many problems follow, so rows go to a file of
their own until their number is known.
"""

from __future__ import annotations

import os
import shutil
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from muster.protocol.errors import StorageError
from muster.protocol.ids import Hash32
from muster.tasks.document import Header
from muster.tasks.line_tree import Leaves, as_leaves, hash_lines, leaf_of, root_of
from muster.tasks.problem import MAX_PROBLEM_BYTES

_BUFFER_BYTES = 1024 * 1024


class Added(Enum):
    """What became of a row."""

    NEW = "added"
    REPEATED = "the same row came before"
    CLASH = "another row with this id came before"


class DocumentWriter:
    """A document in the making; use as a context manager. Left by an error, it leaves nothing."""

    def __init__(self, path: Path, name: str, version: str) -> None:
        """`path` receives the document when `finish` is called."""
        Header(name, version, 1)
        self._path, self._name, self._version = path, name, version
        self._rows = path.with_name(f".{path.name}.rows")
        self._buffer: list[bytes] = []
        self._buffered = 0
        self._leaves: list[Leaves] = []
        self._contents: dict[str, int] = {}

    def __enter__(self) -> Self:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._rows.open("wb")
        except OSError as error:
            raise StorageError(f"cannot write {self._path}: {error.strerror}") from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()
        for leftover in (self._rows, self._part):
            leftover.unlink(missing_ok=True)

    def __len__(self) -> int:
        return len(self._contents)

    def add(self, problem_id: str, line: bytes) -> Added:
        """Add a problem in canonical JSON, unless a row with its id came before."""
        # Salted by the process, so nobody can make rows that collide.
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

    def finish(self) -> Hash32:
        """Write the document, whole or not at all; returns its root.

        Raises TaskError when it has no problems, StorageError when the disk fails.
        """
        self._flush()
        header = Header(self._name, self._version, len(self)).to_bytes()
        try:
            with self._part.open("wb") as file, self._rows.open("rb") as rows:
                file.write(header + b"\n")
                shutil.copyfileobj(rows, file, _BUFFER_BYTES)
                file.flush()
                os.fsync(file.fileno())
            self._part.replace(self._path)
        except OSError as error:
            raise self._failed(error) from error
        return root_of(np.concatenate([as_leaves([leaf_of(header, 0)]), *self._leaves]))

    @property
    def _part(self) -> Path:
        return self._path.with_name(f".{self._path.name}.part")

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
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> StorageError:
        return StorageError(f"cannot write {self._path}: {error.strerror}", hint="free some space")
