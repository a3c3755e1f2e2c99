"""Whether an orchestrator's memory stays flat under steady load.

    .venv/bin/python -m benchmarks.orchestrator.orchestrator_soak --seconds 1800

Windows of ten seconds of heartbeats, leases, uploads and pages, on SQLite. Resident memory is read
after each. Only two things may grow: nonces until they expire after five minutes, and the chain's
data about each upload.
"""

import argparse
import asyncio
import itertools
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.orchestrator.orchestrator_node import Stage
from benchmarks.orchestrator.orchestrator_phases import measure, measure_pages, staged

from muster.api.signing import NONCE_LIFE_S

WINDOW_S = 10.0
FILE_BYTES = 20_000
UPLOADS = 10
"""Leases and uploads per window."""
UPLOAD_BYTES = 4_000
"""Bytes that an upload may leave in memory: its outcome, its batch, and its worker."""
NOISE_MB = 5.0
"""Tolerance for the allocator: twice the unexplained change in eleven minutes."""


@dataclass
class Soak:
    """Course of the memory."""

    rate: float
    """Heartbeats per second."""
    memory_mb: list[float] = field(default_factory=list)
    """Resident memory after each window."""
    requests: int = 0
    """Requests answered."""
    uploads: int = 0
    """Files uploaded."""

    @property
    def settled(self) -> list[float]:
        """The windows after nonces expire as fast as they arrive, or the second half."""
        return self.memory_mb[min(int((NONCE_LIFE_S + 60) / WINDOW_S), len(self.memory_mb) // 2) :]

    @property
    def slope_mb_per_h(self) -> float:
        """Growth while settled, by least squares."""
        hours = [i * WINDOW_S / 3600 for i in range(len(self.settled))]
        return statistics.linear_regression(hours, self.settled).slope

    @property
    def growth_mb(self) -> float:
        """Growth from the first to the last third of the settled windows."""
        third = max(1, len(self.settled) // 3)
        return statistics.median(self.settled[-third:]) - statistics.median(self.settled[:third])

    @property
    def allowed_mb(self) -> float:
        """Explained growth."""
        windows = len(self.settled)
        is_settled = len(self.memory_mb) * WINDOW_S > 2 * NONCE_LIFE_S
        nonces = 0.0 if is_settled else windows * WINDOW_S * self.rate * 150
        return NOISE_MB + (windows * UPLOADS * UPLOAD_BYTES + nonces) / 1e6


async def soak(stage: Stage, seconds: float, rate: float) -> Soak:
    """Load a stage for so long."""
    result, keys = Soak(rate), itertools.cycle(stage.keys())
    for window in range(max(3, int(seconds / WINDOW_S))):
        beats = stage.heartbeats(int(WINDOW_S * rate))
        await measure(stage, beats, rate)
        nodes = list(itertools.islice(keys, UPLOADS))
        # Nobody judges the uploads, so in time some workers' stakes cover no more of them.
        _, leased = await measure(stage, stage.leases(nodes), None, taken=(200, 204))
        given = [
            (n, stage.ticket(said)) for n, said in zip(nodes, leased.answers, strict=True) if said
        ]
        if given:
            await measure(stage, stage.uploads(given, FILE_BYTES), None)
        pages = await measure_pages(stage, 1)
        result.uploads += len(given)
        result.requests += len(beats) + UPLOADS + len(given) + len(pages)
        result.memory_mb.append(stage.memory_mb())
        print(f"{(window + 1) * WINDOW_S:.0f} s: {result.memory_mb[-1]:.1f} MB", flush=True)
    return result


def run(options: argparse.Namespace) -> Soak:
    """Start an orchestrator and load it."""
    with tempfile.TemporaryDirectory(prefix="soak") as name:
        databases = {"SQLite": (str(Path(name) / "sqlite"), None)}
        with staged(Path(name), options, databases) as stages:
            _, stage = next(stages)
            return asyncio.run(soak(stage, options.seconds, options.rate))


def main(words: Sequence[str] | None = None) -> None:
    """Print how memory went."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--rate", type=float, default=100)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--submissions", type=int, default=10_000)
    result = run(parser.parse_args(words))
    print(
        f"{result.requests:,} requests, {result.uploads:,} uploads; "
        f"{result.memory_mb[0]:.1f} to {result.memory_mb[-1]:.1f} MB;"
        f" settled: {result.growth_mb:+.1f} MB of {result.allowed_mb:.1f} allowed,"
        f" {result.slope_mb_per_h:+.1f} MB/h"
    )


if __name__ == "__main__":
    main()
