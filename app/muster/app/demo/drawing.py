"""Curves for people: in the terminal with braille dots, in a file with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Braille dot bits by row (top to bottom) and column."""


def terminal_curve(values: Sequence[float], *, width: int = 60, height: int = 10) -> str:
    """Return a curve of values in [0, 1] as text, `width` by `height` characters plus the axis."""
    if not values:
        return "(no data)"
    cells = [[0] * width for _ in range(height)]
    columns, rows = width * 2, height * 4
    previous: int | None = None
    for x in range(columns):
        position = x / max(1, columns - 1) * (len(values) - 1)
        y = _row(_interpolate(values, position), rows)
        # Join to the neighbour column, so that steep parts stay one line.
        for dot in range(min(y, y if previous is None else previous), max(y, previous or y) + 1):
            cells[dot // 4][x // 2] |= _DOTS[dot % 4][x % 2]
        previous = y
    labels = {0: "1.0", height // 2: "0.5", height - 1: "0.0"}
    return "\n".join(
        f"{labels.get(i, ''):>4} │{''.join(chr(0x2800 + cell) for cell in row)}"
        for i, row in enumerate(cells)
    )


def _interpolate(values: Sequence[float], position: float) -> float:
    low = int(position)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (position - low)


def _row(value: float, rows: int) -> int:
    return round((1 - min(1.0, max(0.0, value))) * (rows - 1))


def save_reward_curve(
    path: Path, curve: Sequence[float], evaluations: Sequence[tuple[int, float]]
) -> None:
    """Write the reward curve as PNG: training reward per step, held-out reward where measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    axes.plot(range(1, len(curve) + 1), curve, label="training reward", color="#4c72b0")
    versions, rewards = [v for v, _ in evaluations], [r for _, r in evaluations]
    axes.plot(versions, rewards, "o", label="held-out reward, temperature 1", color="#dd8452")
    axes.set(xlabel="step", ylabel="reward", ylim=(0, 1), title="Muster demo: reward")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
