"""A child process that prints the rows of a Parquet file as JSON lines, with bounded memory.

    python -m muster.tasks.parquet_rows FILE

Each line is an object for a row, `[reason]` for a row that JSON cannot hold, or a text: the reason
of exit status 1. Null fields of structs are left out: Arrow adds them if other rows have the field.
"""

import json
import sys
from typing import Any

from muster.lifecycle import limit_memory

MEMORY_BYTES = 3 << 30
"""Address space; a quarter of it is for the libraries."""
MAX_GROUP_BYTES = 1 << 30
"""Most bytes that a row group may state; a larger one is not read."""
BATCH_BYTES = 8 << 20
"""Bytes of rows that are decoded at a time, if the sizes stated in the file are true."""
MAX_BATCH_ROWS = 1024


def main(path: str) -> int:
    """Print the rows; returns the exit status."""
    limit_memory(MEMORY_BYTES)
    import pyarrow
    import pyarrow.parquet

    pyarrow.set_cpu_count(1)
    pyarrow.set_io_thread_count(1)
    try:
        with pyarrow.parquet.ParquetFile(path, memory_map=False, pre_buffer=False) as file:
            _print_rows(file)
    except (pyarrow.ArrowException, OSError, MemoryError, ValueError) as error:
        _print(f"{type(error).__name__}: {str(error)[:200]}")
        return 1
    return 0


def _print_rows(file: Any) -> None:
    for number in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(number)
        if group.total_byte_size > MAX_GROUP_BYTES:
            raise ValueError(f"row group {number} has {group.total_byte_size} bytes")
        row_bytes = max(1, group.total_byte_size // max(1, group.num_rows))
        rows = min(MAX_BATCH_ROWS, max(1, BATCH_BYTES // row_bytes))
        batches = file.iter_batches(batch_size=rows, row_groups=[number], use_threads=False)
        for batch in batches:
            for row in batch.to_pylist():
                _print({name: _without_nulls(value) for name, value in row.items()})


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(v) for name, v in value.items() if v is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _print(value: Any) -> None:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError) as error:
        text = json.dumps([f"holds what JSON cannot: {error}"])
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
