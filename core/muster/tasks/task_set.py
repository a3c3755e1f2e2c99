"""A task set: the problems of a run, whose Merkle root the chain pins.

In memory, or lazily from a file (`muster.tasks.document`), for sets of a million problems. The wire
format of both is the document.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Self, overload

from muster.lifecycle.files import whole_file
from muster.protocol.errors import EncodingError, TaskError
from muster.protocol.ids import Hash32
from muster.protocol.recipe import Recipe
from muster.protocol.set_aside import Stretch
from muster.tasks.document import (
    MAX_TASK_SET_BYTES,
    Added,
    DocumentWriter,
    Header,
    LineProof,
    SetPart,
    TaskSetFile,
)
from muster.tasks.line_tree import Leaves, as_leaves, leaf_of, path_of, root_of
from muster.tasks.problem import Problem

MAX_WHOLE_BYTES = 8 * 1024 * 1024
"""Most bytes of a file that is loaded whole; a larger one is opened lazily."""


@dataclass(frozen=True, eq=False)
class TaskSet:
    """Problems in a fixed order; raises TaskError when it is empty or an id occurs twice."""

    name: str
    """Name of the set, at most 128 characters."""
    version: str
    """Version of the set, at most 128 characters."""
    problems: Sequence[Problem] = field(repr=False)
    """Problems in the order in which tickets index them. In a file, each is parsed and compared
    with the root on access, which raises EncodingError or TaskError; duplicate ids are not
    detected."""
    parts: tuple[SetPart, ...] = ()
    """Named ranges of the problems, in order; empty for a set without parts."""

    def __post_init__(self) -> None:
        header = self._header
        if isinstance(self.problems, Rows):
            assert header == self.problems.document.header
            return
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

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TaskSet) and self.hash() == other.hash()

    def __hash__(self) -> int:
        return hash(self.hash())

    def hash(self) -> Hash32:
        """Return the Merkle root over header and problems, which is pinned on chain."""
        document = self._document
        return document.root if document else root_of(self._leaves)

    def lines(self) -> Iterator[bytes]:
        """Yield header and problems in canonical JSON, without line breaks."""
        yield self._header.to_bytes()
        if isinstance(self.problems, Rows):
            yield from map(self.problems.document.line, range(1, len(self) + 1))
        else:
            yield from (problem.to_bytes() for problem in self.problems)

    def prove(self, index: int) -> LineProof:
        """Return the proof that a problem is in the set of this root, at this index."""
        if self._document:
            return self._document.prove(index + 1)
        return LineProof(index + 1, tuple(path_of(self._leaves, index + 1)))

    def range_of(self, part: str) -> range:
        """Return the indices of a part; the empty name stands for the whole set. Raises TaskError
        when there is no such part.
        """
        start = 0
        for each in self.parts:
            if each.name == part:
                return range(start, start + each.count)
            start += each.count
        if part:
            raise TaskError(
                f"the task set {self.name!r} has no part {part!r}", hint=self._parts_hint
            )
        return range(len(self))

    def stretches(self, recipe: Recipe) -> list[Stretch]:
        """Return this set's ranges of a recipe's parts, for checking lists of problems set aside;
        raises TaskError when the set has other parts.
        """
        return [
            Stretch(self.range_of(rules.name), may_skip=rules.filters.pool_revisit > 0)
            for rules in recipe.rules
        ]

    def part_at(self, index: int) -> str:
        """Return the name of a problem's part; empty in a set without parts."""
        ends = accumulate(part.count for part in self.parts)
        return next(
            (part.name for part, end in zip(self.parts, ends, strict=True) if index < end), ""
        )

    def require_parts(self, recipe: Recipe) -> None:
        """Raise TaskError unless tickets of the recipe can be derived over this set for any seed:
        it has the recipe's parts, and each has enough problems for a submission.
        """
        names = [part.name for part in recipe.tasks.parts]
        for name in (part.name for part in self.parts):
            if name not in names:
                raise TaskError(
                    f"the recipe has no weight for part {name!r} of {self.name!r}",
                    hint="name it under [[tasks.parts]], or pack the task set without it",
                )
        wanted = recipe.sampling.problems_per_submission
        for name in names or [""]:
            found = len(self.range_of(name))
            if found < wanted:
                of = f"part {name!r} of the task set" if name else "the task set"
                raise TaskError(
                    f"{of} has {found} problems, a submission needs {wanted} different ones",
                    hint="lower sampling.problems_per_submission, or add problems",
                )

    def spread(self, count: int) -> list[int]:
        """Return up to `count` evenly spaced indices over the whole set; equally many of each part,
        and at least one.
        """
        ranges = [self.range_of(part.name) for part in self.parts] or [self.range_of("")]
        share = max(1, count // len(ranges))
        return [
            each.start + i * len(each) // min(share, len(each))
            for each in ranges
            for i in range(min(share, len(each)))
        ]

    def some(self, count: int) -> Self:
        """Return the set of the problems that `spread` selects."""
        return self.only(self.spread(count), self.version)

    def only(self, indices: Sequence[int], version: str) -> Self:
        """Return the set of some problems, by ascending indices; parts that become empty are
        dropped. Raises TaskError without problems.
        """
        counts = Counter(self.part_at(i) for i in indices)
        parts = [replace(p, count=counts[p.name]) for p in self.parts if counts[p.name]]
        return self.of(self.name, version, (self[i] for i in indices), parts)

    def to_bytes(self) -> bytes:
        """Return the document: header and problems, each a line."""
        return b"".join(line + b"\n" for line in self.lines())

    def write(self, path: Path) -> None:
        """Write the document to a file atomically."""
        with whole_file(path) as part:
            with part.open("wb") as file:
                file.writelines(self._document.chunks() if self._document else [self.to_bytes()])
            if self._document and TaskSetFile.open(part).root != self.hash():
                raise TaskError(f"{self._document.path} has changed since it was opened")

    @property
    def _header(self) -> Header:
        return Header(self.name, self.version, len(self.problems), self.parts)

    @property
    def _parts_hint(self) -> str:
        names = ", ".join(part.name for part in self.parts)
        return f"it has {names}" if names else "`muster tasks pack` makes one of several sets"

    @property
    def _document(self) -> TaskSetFile | None:
        return self.problems.document if isinstance(self.problems, Rows) else None

    @cached_property
    def _leaves(self) -> Leaves:
        return as_leaves(leaf_of(line, i) for i, line in enumerate(self.lines()))

    @classmethod
    def of(
        cls, name: str, version: str, problems: Iterable[Problem], parts: Iterable[SetPart] = ()
    ) -> Self:
        """Return the task set of these problems."""
        return cls(name, version, tuple(problems), tuple(parts))

    @classmethod
    def open(cls, path: Path) -> Self:
        """Return the task set in a file: whole when it is small, else lazily.

        Raises ConfigError when it cannot be read, EncodingError or TaskError when it is malformed.
        """
        document = TaskSetFile.open(path)
        if document.size_bytes <= MAX_WHOLE_BYTES:
            return cls.from_bytes(b"".join(document.chunks()))
        return cls.lazily(document)

    @classmethod
    def lazily(cls, document: TaskSetFile) -> Self:
        """Return the task set of an opened document."""
        header = document.header
        return cls(header.name, header.version, Rows(document), header.parts)

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
        first, *rows = data[:-1].split(b"\n")
        header = Header.from_bytes(first)
        if header.count != len(rows):
            raise EncodingError(
                f"the header announces {header.count} problems, there are {len(rows)}"
            )
        problems = tuple(Problem.from_bytes(row) for row in rows)
        return cls(header.name, header.version, problems, header.parts)


def pack_sets(sets: Sequence[tuple[str, TaskSet]], path: Path, name: str, version: str) -> TaskSet:
    """Write several sets to `path` as one set, each as a part with its name, and return it.

    Raises TaskError for two parts with one name, two problems with one id, or a set that has parts
    itself.
    """
    with DocumentWriter(path, name, version) as writer:
        for part, task_set in sets:
            if task_set.parts:
                raise TaskError(
                    f"the set of part {part!r} has parts itself", hint="pack the sets it is made of"
                )
            for problem in task_set:
                if writer.add(problem.problem_id, problem.to_bytes()) is not Added.NEW:
                    raise TaskError(
                        f"problem {problem.problem_id!r} of part {part!r} is in a part before it",
                        hint="each problem is of one part, under an id of its own",
                    )
            writer.end_part(part, f"{task_set.name} {task_set.version}"[:128])
        writer.finish()
    return TaskSet.open(path)


class Rows(Sequence[Problem]):
    """The problems of a document, each parsed on access."""

    def __init__(self, document: TaskSetFile) -> None:
        self.document = document
        """The document that they are read from."""

    def __len__(self) -> int:
        return self.document.header.count

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> list[Problem]: ...
    def __getitem__(self, index: int | slice) -> Problem | list[Problem]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"no problem {index} among {len(self)}")
        return Problem.from_bytes(self.document.line(index % len(self) + 1))
