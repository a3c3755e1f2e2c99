"""A validator's process that is really short of memory never gives a verdict."""

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("memory_limits.py")
ROOMS_KB = [0, 256, 1024, 4096, *range(8 << 10, 60 << 10, 8 << 10), 256 << 10]
"""From nothing to plenty, close together where judging ends somewhere between."""


def test_honest_work_is_accepted_or_not_judged_however_little_memory_there_is(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path), *map(str, ROOMS_KB)],
        env=os.environ | {"PYTHONPATH": str(PROGRAM.parents[1]), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    said = {line["room_kb"]: line["said"] for line in lines}
    # A process that died gave no verdict either.
    assert said.keys() <= set(ROOMS_KB)
    assert set(said.values()) == {"disturbed", "accepted"}
    assert said[ROOMS_KB[-1]] == "accepted"
