"""A task set: the problems of a run, as bytes that hash to what the chain pins.

One canonical JSON document per line: a header with name, version and count, then the problems in
the order in which tickets index them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

from muster.protocol.encoding import canonical_json, keccak, parse_canonical_json
from muster.protocol.errors import EncodingError, TaskError
from muster.protocol.ids import Hash32
from muster.tasks.problem import Problem

MAX_TASK_SET_BYTES = 1024 * 1024 * 1024
"""A larger document is refused unread."""
_MAX_HEADER_BYTES = 4096
_SCHEMA_VERSION = 1


@dataclass(frozen=True)
class TaskSet:
    """Problems in a fixed order; raises TaskError when it is empty or an id comes twice."""

    name: str
    """What people call it, at most 128 characters."""
    version: str
    """Which edition of it, at most 128 characters."""
    problems: tuple[Problem, ...] = field(repr=False)
    """In the order in which tickets index them."""

    def __post_init__(self) -> None:
        if not self.problems:
            raise TaskError(f"task set {self.name!r} has no problems")
        for what, text in (("name", self.name), ("version", self.version)):
            if not 1 <= len(text) <= 128:
                raise TaskError(f"a task set's {what} has 1 to 128 characters, got {len(text)}")
        counts = Counter(problem.problem_id for problem in self.problems)
        twice, count = counts.most_common(1)[0]
        if count > 1:
            raise TaskError(f"problem id {twice!r} comes {count} times in {self.name!r}")

    def __len__(self) -> int:
        return len(self.problems)

    def __getitem__(self, index: int) -> Problem:
        return self.problems[index]

    def __iter__(self) -> Iterator[Problem]:
        return iter(self.problems)

    def to_bytes(self) -> bytes:
        """Return the document: header and problems, each a line."""
        return self._document

    def hash(self) -> Hash32:
        """Return the Keccak-256 that is pinned on chain."""
        return keccak(self._document)

    @cached_property
    def _document(self) -> bytes:
        lines = [_header(self), *(problem.to_bytes() for problem in self.problems)]
        return b"\n".join(lines) + b"\n"

    @classmethod
    def of(cls, name: str, version: str, problems: Iterable[Problem]) -> Self:
        """Return the task set of these problems."""
        return cls(name, version, tuple(problems))

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Parse a document.

        Raises EncodingError on anything that `to_bytes` does not write, and TaskError when the
        problems do not make a task set.
        """
        if len(data) > MAX_TASK_SET_BYTES:
            raise EncodingError(f"task set of {len(data)} bytes exceeds {MAX_TASK_SET_BYTES}")
        if not data.endswith(b"\n"):
            raise EncodingError("a task set ends with a line break")
        header, *rows = data[:-1].split(b"\n")
        name, version, count = _parse_header(header)
        if count != len(rows):
            raise EncodingError(f"the header announces {count} problems, there are {len(rows)}")
        return cls(name, version, tuple(Problem.from_bytes(row) for row in rows))


def _header(task_set: TaskSet) -> bytes:
    return canonical_json(
        {
            "count": len(task_set.problems),
            "name": task_set.name,
            "schema_version": _SCHEMA_VERSION,
            "version": task_set.version,
        }
    )


def _parse_header(data: bytes) -> tuple[str, str, int]:
    value = parse_canonical_json(data, max_bytes=_MAX_HEADER_BYTES)
    if not isinstance(value, dict) or value.keys() != {
        "count",
        "name",
        "schema_version",
        "version",
    }:
        raise EncodingError("a task set's header has count, name, schema_version and version")
    if value["schema_version"] != _SCHEMA_VERSION or type(value["schema_version"]) is not int:
        raise EncodingError(f"unknown schema version of a task set: {value['schema_version']!r}")
    name, version, count = value["name"], value["version"], value["count"]
    if not isinstance(name, str) or not isinstance(version, str) or type(count) is not int:
        raise EncodingError("a task set's name and version are text, its count an integer")
    return name, version, count
