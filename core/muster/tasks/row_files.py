"""Files of rows: JSON lines, Parquet, data sets saved by `datasets`; and a task set as Parquet.

Nothing in the files is trusted: lines are bounded, and Parquet is read by a child process with
bounded memory, because a few kilobytes of it can unpack to terabytes, and some damage aborts its
library.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Any

from muster.lifecycle import environment_without_secrets
from muster.lifecycle.files import whole_file
from muster.protocol.encoding import canonical_json
from muster.protocol.errors import ConfigError, install_hint
from muster.tasks.problem import Problem
from muster.tasks.task_set import TaskSet

MAX_LINE_BYTES = 4 * 1024 * 1024
"""Most bytes of a row; a longer one is bad without being read. A canonical problem has at most a
quarter of it."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A row that could not be read."""

    reason: str
    """Why."""


def read_rows(path: Path) -> Iterator[Any]:
    """Yield the rows of a file or a saved data set, with `Unreadable` in place of unreadable rows.

    Raises ConfigError when it cannot be read at all.
    """
    if path.is_dir():
        yield from _saved_rows(path)
    elif is_parquet(path):
        yield from _parquet_rows(path)
    else:
        yield from _json_rows(path)


def is_parquet(path: Path) -> bool:
    """Tell whether `read_rows` reads a file as Parquet: it begins like one."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"PAR1"
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def _json_rows(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        for line in bounded_lines(file):
            if not isinstance(line, bytes):
                yield line
            elif not line.isspace():
                yield _parsed(line)


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        return Unreadable(f"not JSON: {error}")


def bounded_lines(file: BufferedReader) -> Iterator[bytes | Unreadable]:
    """Yield lines; a line above `MAX_LINE_BYTES` is skipped in pieces."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        if len(line) <= MAX_LINE_BYTES:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(MAX_LINE_BYTES)
        yield Unreadable(f"the row exceeds {MAX_LINE_BYTES} bytes")


def _parquet_rows(path: Path) -> Iterator[Any]:
    command = [sys.executable, "-m", "muster.tasks.parquet_rows", str(path)]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment_without_secrets(),
    ) as child:
        assert isinstance(child.stdout, BufferedReader)
        fault = f"{path} broke the reader: it is damaged, or needs more memory than is allowed"
        try:
            for line in bounded_lines(child.stdout):
                row = _parsed(line) if isinstance(line, bytes) else line
                if isinstance(row, dict):
                    yield row
                elif isinstance(row, list):
                    yield Unreadable(str(row[0]))
                elif isinstance(row, str):
                    fault = f"{path}: {row}"
                else:
                    yield row
        finally:
            child.kill()
            status = child.wait()
        if status:
            raise ConfigError(
                fault, hint="write it again with smaller row groups, or as JSON lines"
            )


def _saved_rows(folder: Path) -> Iterator[Any]:
    """Yield the rows of a data set that `datasets` saved to disk."""
    try:
        from datasets import Dataset, load_from_disk
    except ModuleNotFoundError as error:
        raise _no_datasets() from error
    try:
        found = load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} is no data set that `datasets` saved: {error}") from error
    if not isinstance(found, Dataset):
        raise ConfigError(
            f"{folder} has the splits {', '.join(found)}", hint="give the folder of one split"
        )
    yield from found


def hub_rows(name: str, split: str) -> Iterator[Any]:
    """Yield the rows of a data set of the Hugging Face hub, or of any path that `datasets` loads.

    Raises ConfigError when it cannot be loaded.
    """
    try:
        from datasets import load_dataset
    except ModuleNotFoundError as error:
        raise _no_datasets() from error
    path, _, config = name.partition(":")
    try:
        yield from load_dataset(path, config or None, split=split, streaming=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"`datasets` cannot load {name!r}: {error}") from error


def _no_datasets() -> ConfigError:
    return ConfigError("`datasets` is not installed", hint=install_hint("datasets"))


GROUP_ROWS = 4096
"""Rows of a row group: a reader must hold a whole one."""
OBJECTS = ("verification_info", "metadata")
"""Fields of a problem that hold dictionaries."""


def write_parquet(task_set: TaskSet, path: Path) -> None:
    """Write the problems of a set for other tools, atomically.

    A row holds a problem, with its dictionaries as JSON text. If the file is imported again, the
    set has the same problems, and with the same name and version the same root.
    """
    import pyarrow
    import pyarrow.parquet

    schema = pyarrow.schema(
        [(name, pyarrow.string()) for name in Problem.model_fields],
        {"muster": json.dumps({"name": task_set.name, "version": task_set.version})},
    )
    problems = iter(task_set)
    with (
        whole_file(path) as part,
        pyarrow.parquet.ParquetWriter(part, schema, compression="zstd") as writer,
    ):
        while rows := [_row(problem) for problem in islice(problems, GROUP_ROWS)]:
            writer.write_table(pyarrow.Table.from_pylist(rows, schema))


def _row(problem: Problem) -> dict[str, str | None]:
    fields = problem.model_dump()
    return fields | {name: canonical_json(fields[name]).decode() for name in OBJECTS}
