"""A task set as Parquet, for other tools: one row per problem, dictionaries as JSON text.

Imported again it has the same problems, and under the same name and version the same root.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

from muster.protocol.encoding import canonical_json
from muster.tasks.problem import Problem
from muster.tasks.task_set import TaskSet

GROUP_ROWS = 4096
"""Rows of a row group, which is what a reader must hold."""
_OBJECTS = ("verification_info", "metadata")


def write_parquet(task_set: TaskSet, path: Path) -> None:
    """Write the problems of a set, whole or not at all."""
    import pyarrow
    import pyarrow.parquet

    schema = pyarrow.schema(
        [(name, pyarrow.string()) for name in Problem.model_fields],
        {"muster": json.dumps({"name": task_set.name, "version": task_set.version})},
    )
    part = path.with_name(f".{path.name}.part")
    problems = iter(task_set)
    with pyarrow.parquet.ParquetWriter(part, schema, compression="zstd") as writer:
        while rows := [_row(problem) for problem in islice(problems, GROUP_ROWS)]:
            writer.write_table(pyarrow.Table.from_pylist(rows, schema))
    part.replace(path)


def _row(problem: Problem) -> dict[str, str | None]:
    fields = problem.model_dump()
    return fields | {name: canonical_json(fields[name]).decode() for name in _OBJECTS}
