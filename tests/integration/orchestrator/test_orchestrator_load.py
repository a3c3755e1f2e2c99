"""The load bench takes and finds everything; memory stays flat while it does."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SMALL = (
    *("--workers", "60", "--submissions", "120", "--rates", "40", "--rounds", "1"),
    *("--seconds", "0.5", "--no-index", "--no-write"),
)
SOAK_S = float(os.environ.get("MUSTER_SOAK_S", "1800"))
"""Seconds for which memory is watched; 60 is enough to try the test itself."""


def run(program: str, *words: str, timeout_s: float) -> str:
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.orchestrator.{program}", *words],
        cwd=ROOT, capture_output=True, text=True, timeout=timeout_s,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_bench_finds_every_request_in_both_databases() -> None:
    shown = run("orchestrator", *SMALL, timeout_s=240)
    for kind in ("SQLite", "PostgreSQL"):
        for phase in ("heartbeats", "leases", "uploads"):
            assert re.search(rf"^{kind}: requests\n(.+\n)*{phase} ", shown, re.MULTILINE), shown


@pytest.mark.slow
def test_memory_is_flat_under_steady_load() -> None:
    words = ("--seconds", str(SOAK_S), "--rate", "100")
    shown = run("orchestrator_soak", *words, timeout_s=4 * SOAK_S + 600)
    uploads = re.search(r"requests, ([\d,]+) uploads", shown)
    assert uploads is not None, shown
    assert int(uploads[1].replace(",", "")) > 5 * SOAK_S / 10, shown
    settled = re.search(r"settled: ([+-][\d.]+) MB of ([\d.]+) allowed", shown)
    assert settled is not None, shown
    assert float(settled[1]) < float(settled[2]), shown
