"""The end of a training step takes no copy of the model, measured in a process of its own."""

import json
import subprocess
import sys
from typing import Any

import pytest
from scripts import ROOT

LIMIT_BYTES = 100_000_000
"""Room above training; a third of what copies of this model and its optimiser would take."""


def _measured(*options: str) -> dict[str, Any]:
    found = subprocess.run(
        (
            *(sys.executable, "-W", "ignore", "-m", "benchmarks.training.export"),
            *("--child", "small", *options),
        ),
        cwd=ROOT,
        capture_output=True,
        check=True,
        timeout=300,
    )
    figures: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return figures


@pytest.fixture(scope="module")
def streamed() -> dict[str, Any]:
    """Figures of a model with a large vocabulary and a base in bfloat16."""
    return _measured()


def test_checkpoint_policy_and_broadcast_stay_within_a_third_of_the_state(
    streamed: dict[str, Any],
) -> None:
    assert streamed["state_bytes"] > 2 * LIMIT_BYTES
    assert streamed["peak_bytes"] < LIMIT_BYTES


@pytest.mark.slow
def test_copies_as_before_a_save_exceed_that_limit() -> None:
    assert _measured("--staged")["peak_bytes"] > 3 * LIMIT_BYTES


def test_version_one_is_a_small_delta_of_a_base_in_bfloat16(streamed: dict[str, Any]) -> None:
    # Half the size of the float32 weights; nearly all of it is unchanged from the base.
    assert streamed["kind"] == "delta"
    assert streamed["version_bytes"] < 2.01 * streamed["parameters"]
    assert streamed["delta_share"] < 0.05
