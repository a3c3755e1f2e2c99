"""What an orchestrator needs as workers grow, from what its bench measured.

    .venv/bin/python benchmarks/orchestrator_growth.py

Prints the table of docs/scale-orchestrator.md and draws docs/images/scale-orchestrator.svg from
results/orchestrator.json. On paper: requests per worker times what each was measured to cost.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from report import RESULTS, print_table

PLOT = Path(__file__).parents[1] / "docs" / "images" / "scale-orchestrator.svg"
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
        """Return the cores that so many workers keep busy, by what they do."""
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
        """Return the share of the time in which some replica holds the lock of leases."""
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
    "lock of leases",
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
        linestyle="--", color="black", label="lock of leases (1: no more)",
    )  # fmt: skip
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set(
        xscale="log", yscale="log", xlabel="workers", ylabel="cores busy",
        title=f"a heartbeat per {HEARTBEAT_S} s, a submission per {SUBMISSION_S} s and worker",
    )  # fmt: skip
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Print and draw."""
    costs = Costs.read("PostgreSQL")
    print_table("On PostgreSQL", HEADER, table(costs))
    draw(costs, PLOT)


if __name__ == "__main__":
    main()
