"""The reward curve as coordinates of a small SVG. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 720, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 12, 12, 28

Series = Sequence[tuple[int, float]]
"""Step and value, ascending."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark on an axis."""

    at: float
    """Coordinate."""
    label: str
    """Its text."""


@dataclass(frozen=True, slots=True)
class Chart:
    """Everything the template draws."""

    line: str
    """Points of the training reward's polyline."""
    dots: list[tuple[float, float, str]]
    """Evaluations: x, y and what to say about them."""
    x_ticks: list[Tick]
    """Steps."""
    y_ticks: list[Tick]
    """Rewards."""
    latest: tuple[int, float] | None
    """The newest point."""


def draw(reward: Series, evaluations: Series) -> Chart:
    """Return the chart of a training reward and, as dots, of evaluations."""
    points = [*reward, *evaluations]
    last = max((step for step, _ in points), default=1) or 1
    low = min([0.0, *(value for _, value in points)])
    high = max([1.0, *(value for _, value in points)])

    def x(step: int) -> float:
        return round(_LEFT + step / last * (WIDTH - _LEFT - _RIGHT), 1)

    def y(value: float) -> float:
        return round(_TOP + (high - value) / (high - low) * (HEIGHT - _TOP - _BOTTOM), 1)

    levels = [low + (high - low) * part / 4 for part in range(5)]
    return Chart(
        line=" ".join(f"{x(step)},{y(value)}" for step, value in reward),
        dots=[(x(s), y(v), f"version {s}: {v:.3f}") for s, v in evaluations],
        x_ticks=[Tick(x(step), str(step)) for step in _round_steps(last)],
        y_ticks=[Tick(y(level), f"{level:g}") for level in levels],
        latest=reward[-1] if reward else None,
    )


def _round_steps(last: int) -> list[int]:
    # The smallest of 1, 2, 5, 10, 20, … that gives at most ten marks.
    stride = 1
    while last / stride > 10:
        stride = stride * 5 // 2 if str(stride)[0] == "2" else stride * 2
    return list(range(0, last + 1, stride))
