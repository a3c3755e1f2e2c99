"""The resources of an orchestrator by number of workers, computed from its benchmark.

    .venv/bin/python -m benchmarks.orchestrator.orchestrator_growth

Writes the tables of docs/scale-orchestrator.md, between its markers, and draws
docs/images/scale-orchestrator.svg, all from results/orchestrator.json. It multiplies the requests
per worker by the measured cost of each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, print_table

PAGE = Path(__file__).parents[2] / "docs" / "scale-orchestrator.md"
PLOT = Path(__file__).parents[2] / "docs" / "images" / "scale-orchestrator.svg"
HEARTBEAT_S = 10
"""A worker's default."""
SUBMISSION_S = 60
"""Assumed time from one lease of a worker to its next."""
FILE_BYTES = 100_000
NONCE_BYTES = 100
NONCE_KEPT_S = 360
WORKERS = (100, 1_000, 3_000, 10_000, 30_000, 100_000)


@dataclass
class Costs:
    """CPU milliseconds of requests on PostgreSQL, and bytes of a submission."""

    heartbeat: float
    """Of the orchestrator, per heartbeat."""
    lease: float
    """Per lease."""
    upload: float
    """Per upload."""
    heartbeat_database: float
    """Of the database's server, per heartbeat."""
    lease_database: float
    """Per lease."""
    upload_database: float
    """Per upload."""
    row_bytes: float
    """A submission in the database."""
    memory_bytes: float
    """A submission in each process."""

    @classmethod
    def read(cls, kind: str) -> Costs:
        """Return what was measured on one kind of database."""
        detail = json.loads((RESULTS / "orchestrator.json").read_text())["detail"]
        found, phases = detail[kind], detail[kind]["phases"]
        beat, lease, upload = (phases[p][-1] for p in ("heartbeats", "leases", "uploads"))
        return cls(
            heartbeat=beat["cpu_ms"],
            lease=lease["cpu_ms"],
            upload=upload["cpu_ms"],
            heartbeat_database=beat["database_cpu_ms"],
            lease_database=lease["database_cpu_ms"],
            upload_database=upload["database_cpu_ms"],
            row_bytes=1e6 * found["database_mb"] / detail["submissions"],
            memory_bytes=1e6 * found["memory_mb"] / detail["submissions"],
        )

    def cores(self, workers: int) -> dict[str, float]:
        """Return the cores that this many workers keep busy, by kind of request."""
        beats, slots = workers / HEARTBEAT_S, workers / SUBMISSION_S
        return {
            "heartbeats": beats * self.heartbeat / 1000,
            "leases": slots * self.lease / 1000,
            "uploads": slots * self.upload / 1000,
            "database": (
                beats * self.heartbeat_database
                + slots * (self.lease_database + self.upload_database)
            )
            / 1000,
        }

    def lease_lock(self, workers: int) -> float:
        """Return an upper bound of the share of time in which the lock of leases is held, assuming
        that the whole cost of a lease falls under the lock. Waiting for the disk is shared.
        """
        return workers / SUBMISSION_S * (self.lease + self.lease_database) / 1000


def table(costs: Costs) -> list[list[str]]:
    """Return a row per number of workers."""
    rows = []
    for workers in WORKERS:
        cores, per_s = costs.cores(workers), workers / SUBMISSION_S
        own = sum(cores.values()) - cores["database"]
        rows.append(
            [
                f"{workers:,}",
                f"{workers / HEARTBEAT_S:,.0f}",
                f"{per_s:,.0f}",
                f"{own:.2f}",
                f"{cores['database']:.2f}",
                f"{costs.lease_lock(workers):.0%}",
                f"{per_s * FILE_BYTES / 1e6:,.1f}",
                f"{workers / HEARTBEAT_S * NONCE_KEPT_S * NONCE_BYTES / 1e6:,.0f}",
                f"{per_s * 86_400 * costs.row_bytes / 1e9:,.1f}",
            ]
        )
    return rows


HEADER = [
    "workers",
    "heartbeats/s",
    "leases and uploads/s",
    "cores of orchestrators",
    "cores of PostgreSQL",
    "lock of leases, at most",
    "files MB/s",
    "nonces MB",
    "database GB/day",
]


def draw(costs: Costs, path: Path) -> None:
    """Draw the cores over the workers, by what they do."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "muster"
    figure, axes = plt.subplots(figsize=(7, 4))
    for name in costs.cores(1):
        axes.plot(WORKERS, [costs.cores(w)[name] for w in WORKERS], marker="o", label=name)
    axes.plot(
        WORKERS, [costs.lease_lock(w) for w in WORKERS],
        linestyle="--", color="black", label="lock of leases, at most (1: no more)",
    )  # fmt: skip
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set(
        xscale="log", yscale="log", xlabel="workers", ylabel="cores busy",
        title=f"a heartbeat per {HEARTBEAT_S} s, a submission per {SUBMISSION_S} s and worker",
    )  # fmt: skip
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


MEASURED = (
    ("heartbeats/s with a 99th percentile below 100 ms", "1,000", "heartbeats_per_s"),
    ("99th percentile at 1,000 heartbeats/s, ms", "100", "heartbeat_p99_ms"),
    ("heartbeats/s as fast as answered", "", "heartbeats_saturated_per_s"),
    ("heartbeats per CPU second of the process", "", "heartbeats_per_cpu_s"),
    ("leases/s of 200 offered", "200", "leases_per_s"),
    ("leases/s as fast as answered", "", "leases_saturated_per_s"),
    ("leases per CPU second", "", "leases_per_cpu_s"),
    ("uploads/s of 100 kB of 100 offered", "100", "uploads_per_s"),
    ("uploads/s as fast as answered", "", "uploads_saturated_per_s"),
    ("uploads per CPU second", "", "uploads_per_cpu_s"),
    ("slowest page, ms", "200", "page_ms_max"),
)
"""What the page's first table shows: words, what is demanded, and the metric."""


def measured(found: dict[str, Any]) -> list[list[str]]:
    """Return a row per figure of one run, and one that says on what it was measured."""
    metrics, detail = found["metrics"], found["detail"]
    rows = [
        [words, must, *(f"{metrics[name + kind]:,.0f}" for kind in ("", "_postgres"))]
        for words, must, name in MEASURED
    ]
    if "index_100k_s" in metrics:
        seconds = f"{metrics['index_100k_s']:.1f}"
        rows.append(["100,000 contract events indexed, CPU s", "15", seconds, ""])
    loads = [f"{detail[kind]['load_average']:.1f}" for kind in ("SQLite", "PostgreSQL")]
    rows.append([f"load average of {found['machine']}", "", *loads])
    rows.append(["submissions in the database", "", *[f"{detail['submissions']:,}"] * 2])
    return rows


def replace_table(page: str, name: str, header: Sequence[str], rows: list[list[str]]) -> str:
    """Return the page with the table between two markers written anew."""
    lines = [header, ["---"] * len(header), *rows]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    opening, closing = f"<!-- {name}, written by", f"<!-- end of {name} -->"
    pattern = f"({re.escape(opening)}[^\n]*\n).*?({re.escape(closing)})"
    written, count = re.subn(pattern, lambda m: f"{m[1]}{table}\n{m[2]}", page, flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"error: {PAGE} has {count} marks of the table {name!r}, not one")
    return written


def main() -> None:
    """Print, write and draw."""
    found, costs = json.loads((RESULTS / "orchestrator.json").read_text()), Costs.read("PostgreSQL")
    print_table("On PostgreSQL", HEADER, table(costs))
    page = PAGE.read_text()
    page = replace_table(page, "measured", ("", "must", "SQLite", "PostgreSQL"), measured(found))
    PAGE.write_text(replace_table(page, "growth", HEADER, table(costs)))
    draw(costs, PLOT)


if __name__ == "__main__":
    main()
