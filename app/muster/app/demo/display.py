"""The output of a demo: a live table on a terminal or a log line per change, and the report."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from muster.app.demo.report import DemoObservations
from muster.chain import losses
from muster.client.quantities import format_tokens
from muster.protocol.ids import Address

BAR_WIDTH = 60
LEGEND = "5+1- after a worker: 5 submissions accepted, 1 not; reward: the step's mean, at most 1"
"""Explanation of the log lines."""
UNITS = "units: the paid completion tokens, those of accepted work"
"""Explanation of the tables' column."""


class DemoDisplay:
    """Shows the orchestrator's status; use as a context manager."""

    def __init__(self, console: Console, names: Mapping[Address, str]) -> None:
        self._console = console
        self._names = names
        self._began = time.monotonic()
        # The live table disappears at the end; the report prints it again.
        self._live = (
            Live(console=console, auto_refresh=False, transient=True)
            if console.is_terminal
            else None
        )
        self._shown: tuple[Any, ...] = ()

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def say(self, message: str) -> None:
        """Print one line above the live view."""
        self._console.print(Text(f"{self._elapsed():>5} {message}"), soft_wrap=True)

    def show(self, status: Mapping[str, Any]) -> None:
        """Draw the status, or print a line if it changed."""
        if self._live:
            self._live.update(self._draw(status), refresh=True)
            return
        figures = (status["policy_version"], self._slashed(status))
        if figures != self._shown:
            if not self._shown:
                self.say(LEGEND)
            self._shown = figures
            self.say(self._line(status))

    def _elapsed(self) -> str:
        seconds = int(time.monotonic() - self._began)
        return f"{seconds // 60}:{seconds % 60:02}"

    def _line(self, status: Mapping[str, Any]) -> str:
        workers = "  ".join(
            f"{self._name(w)} {w['accepted']}+{w['rejected'] + w['incomplete'] + w['fraud']}-"
            for w in self._in_order(status)
        )
        return (
            f"step {status['step']}/{status['steps']}  policy {status['policy_version']}  "
            f"reward {_latest(status)}  {workers}  slashed: {self._slashed(status) or 'nobody'}"
        )

    def _in_order(self, status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return the workers in the order of the cast, strangers last, so that columns never
        move."""
        places = {address: place for place, address in enumerate(self._names)}
        return sorted(status["workers"], key=lambda w: places.get(w["worker"], len(places)))

    def _slashed(self, status: Mapping[str, Any]) -> str:
        """Return the accounts that lost stake, each once."""
        return ", ".join(sorted({self._name(slash) for slash in status["slashes"]}))

    def _draw(self, status: Mapping[str, Any]) -> Group:
        done, steps = status["policy_version"] or 0, status["steps"] or 1
        head = Text(
            f"{self._elapsed()}  step {status['step']} of {status['steps']}  "
            f"policy {status['policy_version']}  reward {_latest(status)}"
        )
        filled = BAR_WIDTH * done // steps
        bar = Text("━" * filled, style="green").append("━" * (BAR_WIDTH - filled), style="dim")
        curve = Text(terminal_curve([r for _, r in status["reward"]], width=54, height=6))
        return Group(head, bar, self._table(status), Text(UNITS, style="dim"), curve)

    def _table(self, status: Mapping[str, Any]) -> Table:
        table = Table(
            "worker", "status", "accepted", "rejected", "fraud", "units", "policy", box=None
        )
        for w in self._in_order(status):
            table.add_row(
                self._name(w),
                w["status"],
                str(w["accepted"]),
                str(w["rejected"] + w["incomplete"]),
                str(w["fraud"]),
                str(w["units"]),
                str(w["policy_version"]) if w["policy_version"] is not None else "-",
                style="red" if w["status"] in ("banned", "jailed") else "",
            )
        return table

    def _name(self, worker: Mapping[str, Any]) -> str:
        return self._names.get(worker["worker"], worker["worker"][:10])


def _latest(status: Mapping[str, Any]) -> str:
    return f"{status['reward'][-1][1]:.2f}" if status["reward"] else "-"


def show_report(
    console: Console, folder: Path, observed: DemoObservations, report: dict[str, Any]
) -> None:
    """Print what happened."""
    reward = report["reward"]
    console.print(f"\nreward by step, {report['steps']} steps in {report['wall_s']} s")
    console.print(terminal_curve(reward["curve"]), highlight=False)
    console.print(f"held-out reward {reward['start']:.2f} → {reward['end']:.2f}\n")
    names = {member.wallet.address: member.name for member in observed.cast.members}
    table = Table("worker", "status", "accepted", "rejected", "fraud", "units", "paid", box=None)
    for w in report["workers"]:
        paid = f"{int(w['paid_wei']) / 10**18:g}"
        numbers = (str(w[name]) for name in ("accepted", "rejected", "fraud", "units"))
        table.add_row(names[w["address"]], w["status"], *numbers, paid)
    console.print(table)
    console.print(f"{UNITS}; paid: tokens", style="dim", highlight=False)
    for loss in losses(observed.view):
        words = f"\n{names.get(loss.owner, loss.owner)}: {loss.words(format_tokens)}"
        console.print(words, soft_wrap=True, highlight=False, markup=False)
    console.print()
    for check in report["checks"]:
        console.print(
            ("[green]kept  [/]" if check["passed"] else "[red]BROKEN[/]") + f" {check['name']}"
        )
    console.print(f"\n{folder / 'report.json'}  {folder / 'reward.png'}")


# Curves: braille dots in the terminal, matplotlib in a file

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
        # Connect neighbouring columns, so that steep parts remain one line.
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
