"""Write a task set: `python -m muster_countdown --count 1000 --seed 0 tasks.jsonl`."""

from __future__ import annotations

import argparse
from pathlib import Path

from muster_countdown.task_set import make_task_set


def main() -> None:
    """Write the file that the command line names."""
    parser = argparse.ArgumentParser(prog="muster_countdown", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    flags.file.write_bytes(make_task_set(flags.count, flags.seed).to_bytes())


if __name__ == "__main__":
    main()
