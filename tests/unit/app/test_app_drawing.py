"""Drawn curves: the shape is the data's."""

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from muster.app.demo.display import save_reward_curve, terminal_curve


def test_a_rising_curve_goes_from_bottom_left_to_top_right() -> None:
    lines = terminal_curve([0.0, 1.0], width=10, height=4).split("\n")
    assert lines[0].endswith(chr(0x2800 | 0x08)) or lines[0][-1] != chr(0x2800)
    assert lines[0][6] == chr(0x2800)
    assert lines[-1][6] != chr(0x2800)


def test_a_flat_curve_stays_on_one_line() -> None:
    lines = terminal_curve([0.5] * 5, width=8, height=5).split("\n")
    drawn = [line for line in lines if set(line[6:]) != {chr(0x2800)}]
    assert len(drawn) == 1


@given(st.lists(st.floats(-1, 2), min_size=1, max_size=50), st.integers(1, 40), st.integers(2, 12))
def test_every_curve_fills_its_frame(values: list[float], width: int, height: int) -> None:
    lines = terminal_curve(values, width=width, height=height).split("\n")
    assert len(lines) == height
    assert all(len(line) == width + 6 for line in lines)
    assert all(any(line[6 + x] != chr(0x2800) for line in lines) for x in range(width))


def test_no_values_are_said_to_be_none() -> None:
    assert terminal_curve([]) == "(no data)"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_picture_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "reward.png"
    save_reward_curve(path, [0.2, 0.5, 0.9], [(0, 0.25), (3, 0.9)])
    assert path.read_bytes().startswith(b"\x89PNG")
