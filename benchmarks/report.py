"""What every benchmark ends with: a table for people, and a JSON file with the figures by id."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"


def machine() -> str:
    """Return what the figures were measured on."""
    cores = len(os.sched_getaffinity(0))
    model = platform.processor() or platform.machine()
    with open("/proc/cpuinfo", encoding="utf-8") as described:
        names = [line.split(":", 1)[1].strip() for line in described if "model name" in line]
    return f"{cores} cores of {names[0] if names else model}, {platform.machine()}"


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under a header, columns aligned."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    print(f"\n{title}")
    for row in [header, *rows]:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )


def write(
    name: str,
    metrics: Mapping[str, float],
    detail: Any,
    *,
    measured_on: str,
    commit: str | None = None,
) -> Path:
    """Write results/NAME.json and print its metrics; `metrics` have the ids of the design."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    document = {"machine": measured_on, "date": today, "metrics": dict(metrics), "detail": detail}
    if commit is not None:
        document["commit"] = commit
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"\n{measured_on}, {today}")
    for key, value in metrics.items():
        print(f"{key} {value:.4g}")
    return path
