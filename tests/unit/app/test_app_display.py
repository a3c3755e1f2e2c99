"""The demo's display: one line per change in a log, a table on a terminal."""

import io
from typing import Any

from rich.console import Console

from muster.app.demo.display import LEGEND, UNITS, DemoDisplay
from muster.protocol.ids import Address

WORKER = Address("0x" + "11" * 20)


def status(version: int, *, slashes: int = 0) -> dict[str, Any]:
    return {
        "step": version + 1,
        "steps": 4,
        "policy_version": version,
        "reward": [[i + 1, 0.25 * i] for i in range(version)],
        "slashes": [{"worker": WORKER}] * slashes,
        "workers": [
            {
                "worker": WORKER,
                "status": "active",
                "accepted": 3,
                "rejected": 1,
                "incomplete": 1,
                "fraud": 0,
                "units": 40,
                "policy_version": None,
            }
        ],
    }


def shown(*statuses: dict[str, Any], terminal: bool) -> str:
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=100, color_system=None)
    with DemoDisplay(console, {WORKER: "honest-1"}) as progress:
        for each in statuses:
            progress.show(each)
    return output.getvalue()


def test_a_log_gets_a_line_per_policy_and_per_slash() -> None:
    log = shown(status(1), status(1), status(2), status(2, slashes=1), terminal=False)
    lines = log.strip().split("\n")
    assert len(lines) == 4
    assert LEGEND in lines[0]
    assert "policy 1  reward 0.00  honest-1 3+2-  slashed: nobody" in lines[1]
    assert "policy 2  reward 0.25  honest-1 3+2-  slashed: honest-1" in lines[-1]


def test_a_log_line_is_not_wrapped() -> None:
    many = status(1) | {"workers": status(1)["workers"] * 12}
    assert len(shown(many, terminal=False).strip().split("\n")) == 2  # the line and the legend


def test_a_terminal_shows_table_bar_and_curve_on_lines_of_their_own() -> None:
    frame = shown(status(2), terminal=True)
    bar = next(line for line in frame.split("\n") if "━" in line)
    assert set(bar.strip()) == {"━"}
    assert "honest-1" in frame
    assert "step 3 of 4" in frame
    assert "1.0 │" in frame
    assert UNITS in frame


def test_workers_stay_in_the_order_of_the_cast() -> None:
    """The orchestrator lists workers with the most units first; the display does not."""
    other = Address("0x" + "22" * 20)
    mine, stranger = status(1)["workers"][0], "0x" + "33" * 20
    leading = [mine | {"worker": stranger}, mine | {"worker": other}, mine]
    console = Console(file=io.StringIO(), width=100, color_system=None)
    with DemoDisplay(console, {WORKER: "honest-1", other: "honest-2"}) as progress:
        progress.show(status(1) | {"workers": leading})
    shown_line = console.file.getvalue()  # type: ignore[attr-defined]
    assert "honest-1 3+2-  honest-2 3+2-  0x33333333 3+2-" in shown_line
