"""Charts as coordinates of a small SVG: what is seen where no script runs. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from muster.orchestrator.dashboard.figures import Panel, Point

_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 10, 24


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark on an axis."""

    at: float
    """Coordinate."""
    label: str
    """Its text."""


@dataclass(frozen=True, slots=True)
class Dot:
    """A measured point with its interval."""

    x: float
    """Coordinate."""
    y: float
    """Coordinate."""
    low: float
    """Coordinate of the interval's lower end."""
    high: float
    """Coordinate of its upper end."""
    label: str
    """What to say about it."""


@dataclass(frozen=True, slots=True)
class Chart:
    """Everything the template draws."""

    width: int
    """Of the box."""
    height: int
    """Of the box."""
    left: float
    """Where the plot begins."""
    right: float
    """Where it ends."""
    bottom: float
    """Its base."""
    lines: list[tuple[int, str]]
    """Polylines: number of the series, and points."""
    dots: list[Dot]
    """Measured points."""
    x_ticks: list[Tick]
    """Steps."""
    y_ticks: list[Tick]
    """Values."""


def draw(panel: Panel, width: int, height: int) -> Chart:
    """Return the chart of a panel with at least one point."""
    points = [point for series in panel.series for point in series.points]
    first, last = min(p.step for p in points), max(p.step for p in points)
    if first == last:
        first, last = first - 1, last + 1
    levels = y_levels(panel, points)
    low, high = levels[0], levels[-1]

    def x(step: float) -> float:
        share = (step - first) / (last - first)
        return round(_LEFT + share * (width - _LEFT - _RIGHT), 1)

    def y(value: float) -> float:
        share = (high - value) / (high - low)
        return round(_TOP + share * (height - _TOP - _BOTTOM), 1)

    lines, dots = [], []
    for number, series in enumerate(panel.series):
        for segment in () if series.is_dots else series.segments:
            lines.append((number, " ".join(f"{x(p.step)},{y(p.value)}" for p in segment)))
        for p in series.points if series.is_dots else ():
            label = f"{series.label} {p.step}: {panel.format(p.value)}"
            dots.append(Dot(x(p.step), y(p.value), y(p.low), y(p.high), label))
    steps = [s for s in round_levels(first, last, 8, whole=True) if first <= s <= last]
    return Chart(
        width=width,
        height=height,
        left=_LEFT,
        right=width - _RIGHT,
        bottom=height - _BOTTOM,
        lines=lines,
        dots=dots,
        x_ticks=[Tick(x(step), f"{step:g}") for step in steps],
        y_ticks=[Tick(y(level), short(level)) for level in levels],
    )


def y_levels(panel: Panel, points: Sequence[Point]) -> list[float]:
    """Return the marks of the vertical axis: they enclose every point and interval."""
    low, high = min(p.low for p in points), max(p.high for p in points)
    if panel.floor is not None:
        low = min(low, panel.floor)
    if panel.ceiling is not None:
        high = max(high, panel.ceiling)
    return round_levels(low, high, 4)


def round_levels(low: float, high: float, count: int, *, whole: bool = False) -> list[float]:
    """Return about `count` round numbers from at or below `low` to at or above `high`."""
    # Nothing finer than this is ever read off an axis.
    span = max(high - low, 1e-9 * max(abs(low), abs(high)), 1e-12)
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    stride = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * 0.999)
    if whole:
        stride = max(1.0, math.ceil(stride))
    start, end = math.floor(low / stride), math.ceil(high / stride)
    end = max(end, start + 1)
    return [float(f"{level * stride:.12g}") for level in range(start, end + 1)]


def short(value: float) -> str:
    """Return a number in few characters: 0.25, 12, 3.4k, 1.2e-06."""
    size = abs(value)
    for limit, divisor, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= limit:
            return f"{value / divisor:.3g}{unit}"
    return f"{value:.3g}" if size < 1000 else f"{value:.0f}"
