"""The same seed trains the same policy, today and after every change: figures pinned."""

import json
from pathlib import Path
from typing import Any

import pytest
from training import FIGURES, PINNED, STEPS, train

RELATIVE = 2e-4
"""Tolerance of losses, norms, entropies: ten times the effect of other processors or packing."""
PROJECTED = 2e-3
"""Tolerance of a random projection of all weights, whose size is about the weights' norm."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The figures as computed now."""
    return train(tmp_path_factory.mktemp("trajectory"))


def _pinned() -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = json.loads(PINNED.read_text())["steps"]
    return steps


@pytest.mark.parametrize("figure", [*FIGURES, "tokens"])
def test_figures_are_the_pinned_ones(rows: list[dict[str, Any]], figure: str) -> None:
    expected = [row[figure] for row in _pinned()]
    assert len(expected) == STEPS
    assert [row[figure] for row in rows] == pytest.approx(expected, rel=RELATIVE, abs=1e-6)


def test_weights_are_the_pinned_ones(rows: list[dict[str, Any]]) -> None:
    for now, pinned in zip(rows, _pinned(), strict=True):
        assert now["weights"] == pytest.approx(pinned["weights"], rel=1e-5, abs=PROJECTED)


def test_pinned_run_has_everything_in_it() -> None:
    steps = _pinned()
    assert all(row["kl"] > 0 for row in steps[1:])
    assert any(row["clip_fraction"] > 0 for row in steps)
    assert len({row["weights"][0] for row in steps}) == STEPS


def test_trajectory_is_the_same_bit_by_bit_on_one_machine(
    rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    assert train(tmp_path) == rows
