"""The examples that are trained on a network: shorter runs than the recorded ones."""

import json
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
def test_the_whole_way_of_a_model_is_walked_in_small(tmp_path: Path) -> None:
    """Reading, a data run, fine-tuning and reinforcement, with a cheater and a restart in each run.

    A model of 0.07M parameters learns nothing of it; what the networks do is as in the large one.
    """
    command = [sys.executable, "-m", "benchmarks.reasoning", "--small", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    lesson = json.loads((tmp_path / "lesson.json").read_text())
    assert {*lesson["stages"]} == {"pretrained", "teacher", "fine-tuned", "reinforced"}
    assert all(lesson["data_set"]["checks"].values())
    assert "wrong" not in lesson["lineage"]
    assert lesson["practice_run"]["failed_checks"] == []
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert again.returncode == 0, "a lesson that is over is not played again"


@pytest.mark.slow
@pytest.mark.skipif(shared_sandbox().sandbox is None, reason=shared_sandbox().description)
def test_a_network_learns_to_call_a_tool() -> None:
    output = run_example("calculator", 8)
    reward = column(output, "reward")
    assert reward[-1] >= reward[0] + 0.2
    assert "fraud" not in output
