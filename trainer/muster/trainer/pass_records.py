"""How often a model solves each problem of a task set, on disk: one JSON line per problem.

The first line says what was measured; a file that says something else is refused. Problems follow
in the order of the task set, a whole batch at a time, so that a measurement that was killed goes on
where it was and ends with the same bytes as one that was not.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from io import BufferedRandom
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from muster.protocol.errors import ConfigError, StorageError

SCHEMA_VERSION = 1
"""Version of the file's form."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What decides a record besides the problem."""

    task_set_hash: str
    """Keccak-256 of the task set."""
    model_hash: str
    """State hash of the model's files, as a run pins it."""
    passes: int
    """Samples per problem (k)."""
    temperature: float
    """Softmax temperature."""
    max_new_tokens: int
    """Limit of a completion."""
    target_lengths: tuple[int, ...]
    """Length budgets that problems get in turn."""
    seed: int
    """Of all sampling seeds."""
    batch: int
    """Problems that are sampled together."""
    dtype: str
    """Number format of the model."""
    verifiers: tuple[dict[str, str], ...]
    """Who graded, by task type: name, version and code hash."""


@dataclass(frozen=True, slots=True)
class PassRecord:
    """How one problem went."""

    problem_id: str
    """The problem."""
    k: int
    """Samples that were graded."""
    successes: int
    """Those of them that were right."""
    undecided: int
    """Samples that could not be graded; with any, the problem has no pass rate."""
    model_hash: str
    """The model."""
    verifier_version: str
    """The verifier's name and version."""

    @property
    def rate(self) -> float | None:
        """Share of right samples; none when one could not be graded."""
        return None if self.undecided else self.successes / self.k


class RecordFile:
    """A measurement's records; locked while it is open. Use as a context manager."""

    def __init__(self, path: Path, measurement: Measurement, problems: int) -> None:
        """`problems` is the size of the task set."""
        self._path = path
        self._problems = problems
        self._header = _line({"schema_version": SCHEMA_VERSION, **asdict(measurement)})
        self._batch = measurement.batch
        self._file: BufferedRandom | None = None
        self.records: list[PassRecord] = []
        """Of whole batches, in the order of the task set."""

    def __enter__(self) -> Self:
        """Open; raises ConfigError when it is in use or of another measurement."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.touch()
        file = self._path.open("r+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise ConfigError(f"{self._path} is in use by another process") from error
        self._file = file
        try:
            self._read(file)
        except BaseException:
            file.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()

    def append(self, records: Sequence[PassRecord]) -> None:
        """Add a batch; on disk when this returns. Raises StorageError when that cannot be."""
        assert self._file is not None
        try:
            self._write(b"".join(_line(asdict(record)) for record in records))
        except OSError as error:
            raise StorageError(
                f"cannot write {self._path}: {error.strerror}",
                hint="free some space, then run the same command again: it goes on",
            ) from error
        self.records += records

    def _read(self, file: BufferedRandom) -> None:
        lines = file.read().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]
        if whole and whole[0] != self._header:
            raise ConfigError(
                f"{self._path} holds another measurement: {_difference(whole[0], self._header)}",
                hint="give another --records, or remove the file",
            )
        # A batch that was cut off is measured again, whole; the last one may be short.
        count = min(len(whole) - 1, self._problems)
        if count < self._problems:
            count -= count % self._batch
        kept = whole[1 : 1 + max(0, count)]
        self.records = [self._record(line) for line in kept]
        # Only the end is touched: what was measured must survive a kill at this very moment.
        end = sum(map(len, [self._header, *kept])) if whole else 0
        file.truncate(end)
        file.seek(end)
        if not whole:
            self._write(self._header)

    def _record(self, line: bytes) -> PassRecord:
        try:
            return PassRecord(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise StorageError(
                f"{self._path} is damaged: {line[:80]!r}", hint="remove the file and measure again"
            ) from error

    def _write(self, data: bytes) -> None:
        assert self._file is not None
        self._file.write(data)
        self._file.flush()
        os.fsync(self._file.fileno())


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True).encode() + b"\n"


def _difference(found: bytes, wanted: bytes) -> str:
    try:
        old, new = json.loads(found), json.loads(wanted)
        name = next(name for name in new if old.get(name) != new[name])
        return f"{name} is {str(old.get(name))[:80]}, not {str(new[name])[:80]}"
    except (ValueError, AttributeError, StopIteration):
        return "its first line is no measurement"
