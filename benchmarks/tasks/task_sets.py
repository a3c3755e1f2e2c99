"""What large task sets cost: import, opening, drawing a ticket's problems. Part of `bench-tasks`.

Each measurement is a process of its own, so that its memory is its own. Times are CPU time: other
work on the machine does not change that much; by the clock they are in the detail.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROWS = 1_000_000
DRAWN = 16
"""Problems of a ticket, as in INTELLECT-2's submissions."""
TICKETS = 200


def measure() -> dict[str, dict[str, Any]]:
    """Return what each measurement found, by its name."""
    with tempfile.TemporaryDirectory() as folder:
        _write_rows(Path(folder) / "rows.jsonl")
        return {name: _apart(name, folder) for name in _MEASURES}


def _write_rows(path: Path) -> None:
    """Write rows as SYNTHETIC-1 publishes them: dictionaries as text, about 500 bytes each."""
    with path.open("w") as file:
        for i in range(ROWS):
            row = {
                "problem_id": f"vfm_{i:07d}",
                "source": "numina",
                "task_type": "verifiable_math",
                "in_source_id": f"numina-{i}",
                "prompt": f"How many primes are there below {i}, and what is their sum? " * 4,
                "gold_standard_solution": str(i),
                "verification_info": repr({"ground_truth": str(i)}),
                "metadata": json.dumps({"difficulty": "3"}),
            }
            file.write(json.dumps(row) + "\n")


def _apart(name: str, folder: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.tasks.task_sets", name, folder]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _import(folder: Path) -> dict[str, Any]:
    from muster.tasks.importing import Import, import_rows
    from muster.tasks.row_files import read_rows

    rows = read_rows(folder / "rows.jsonl")
    found = import_rows(rows, Import(folder / "tasks.jsonl", "bench", "1"))
    assert found.problems == ROWS
    return {"bytes": (folder / "tasks.jsonl").stat().st_size}


def _open(folder: Path) -> dict[str, Any]:
    from muster.tasks import TaskSet

    tasks = TaskSet.open(folder / "tasks.jsonl")
    return {"root": tasks.hash().hex()}


def _sample(folder: Path) -> dict[str, Any]:
    from muster.protocol.encoding import keccak
    from muster.protocol.seeds import problem_indices
    from muster.tasks import TaskSet

    tasks = TaskSet.open(folder / "tasks.jsonl")
    times = []
    for ticket in range(TICKETS):
        started = time.perf_counter()
        chosen = problem_indices(keccak(b"%d" % ticket), DRAWN, len(tasks))
        assert len([tasks[index] for index in chosen]) == DRAWN
        times.append((time.perf_counter() - started) * 1e3)
    return {"median_ms": sorted(times)[TICKETS // 2], "worst_ms": max(times)}


_MEASURES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "import": _import,
    "open": _open,
    "sample": _sample,
}


def main(name: str, folder: str) -> None:
    """Print one measurement as JSON, with what the process took."""
    clock, cpu = time.monotonic(), time.process_time()
    found = _MEASURES[name](Path(folder))
    usage = resource.getrusage(resource.RUSAGE_SELF)
    taken = {
        "cpu_s": time.process_time() - cpu,
        "clock_s": time.monotonic() - clock,
        "rss_mb": usage.ru_maxrss / 1000,
    }
    print(json.dumps(found | taken))


if __name__ == "__main__":
    main(*sys.argv[1:])
