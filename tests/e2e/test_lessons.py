"""The examples that are trained on a network: shorter runs than the recorded ones."""

from __future__ import annotations

import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest

from muster.tasks.sandbox import shared_sandbox

ROOT = Path(__file__).parents[2]


def run_example(name: str, steps: int) -> str:
    """Run an example for some steps and return what it printed."""
    command = [sys.executable, "-m", "benchmarks.training.lessons", name, "--steps", str(steps)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def column(output: str, name: str) -> list[float]:
    """Return a column of the printed table."""
    lines = output.splitlines()
    top = next(i for i, line in enumerate(lines) if line.startswith("policy_version"))
    place = lines[top].split().index(name)
    rows = takewhile(lambda line: line[:1].isdigit(), lines[top + 1 :])
    return [float(row.split()[place]) for row in rows]


@pytest.mark.slow
def test_a_network_learns_to_keep_length_budgets() -> None:
    output = run_example("length", 16)
    reward, error = column(output, "reward"), column(output, "length_error")
    assert reward[-1] >= reward[0] + 0.25
    assert error[-1] <= 0.8 * error[0]
    assert "fraud" not in output


@pytest.mark.slow
@pytest.mark.skipif(shared_sandbox().sandbox is None, reason=shared_sandbox().description)
def test_a_network_learns_to_call_a_tool() -> None:
    output = run_example("calculator", 8)
    reward = column(output, "reward")
    assert reward[-1] >= reward[0] + 0.2
    assert "fraud" not in output
