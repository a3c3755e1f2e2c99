"""Output of every benchmark: a table for people, and a JSON file with the figures by id."""

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
IMAGES = ROOT / "docs" / "images"
RESULTS = HERE / "results"


def machine() -> str:
    """Return a description of this machine."""
    cores = len(os.sched_getaffinity(0))
    model = platform.processor() or platform.machine()
    with open("/proc/cpuinfo", encoding="utf-8") as described:
        names = [line.split(":", 1)[1].strip() for line in described if "model name" in line]
    return f"{cores} cores of {names[0] if names else model}, {platform.machine()}"


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under a header, columns aligned."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    print(f"\n{title}")
    for row in [header, *rows]:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )


@contextmanager
def drawing(name: str, panels: int = 1) -> Iterator[Any]:
    """Yield the axes of a plot, or a list of them side by side; saves docs/images/NAME.svg."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    # Makes the file reproducible.
    matplotlib.rcParams["svg.hashsalt"] = "muster"
    figure, axes = pyplot.subplots(1, panels, figsize=(8 if panels == 1 else 5 * panels, 4.5))
    for each in [axes] if panels == 1 else axes:
        each.grid(alpha=0.3)
    yield axes
    figure.tight_layout()
    IMAGES.mkdir(exist_ok=True)
    figure.savefig(IMAGES / f"{name}.svg", metadata={"Date": None})
    pyplot.close(figure)


def write(
    name: str,
    metrics: Mapping[str, float],
    detail: Any,
    *,
    measured_on: str,
    commit: str | None = None,
    folder: Path = RESULTS,
) -> Path:
    """Write results/NAME.json, or a file of another folder, and print its metrics, which have the
    ids of the design.
    """
    today = _today()
    document = {"machine": measured_on, "date": today, "metrics": dict(metrics), "detail": detail}
    if commit is not None:
        document["commit"] = commit
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"\n{measured_on}, {today}")
    for key, value in metrics.items():
        print(f"{key} {value:.4g}")
    return path


def add_part(name: str, part: str, metrics: Mapping[str, float], detail: Any) -> Path:
    """Put one part's figures into results/NAME.json, which keeps those of other parts, and print
    its metrics. The part's detail says what it was measured on, when, and of which commit.
    """
    held = _read(name)
    kept = {"machine": machine(), "date": _today(), "commit": present_commit(), **detail}
    return write(
        name,
        {**held.get("metrics", {}), **metrics},
        {**held.get("detail", {}), part: kept},
        measured_on=machine(),
    )


def has_part(name: str, part: str) -> bool:
    """Return whether a part was measured of this commit."""
    found = _read(name).get("detail", {}).get(part, {})
    return bool(found) and found.get("commit") == present_commit()


def present_commit() -> str:
    """Return the checkout's commit, with a plus after it when files were changed."""
    ran = [
        subprocess.run(["git", *asked], cwd=HERE, capture_output=True, text=True, check=True).stdout
        for asked in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "../core"])
    ]
    return ran[0].strip() + ("+" if ran[1].strip() else "")


def _read(name: str) -> dict[str, Any]:
    path = RESULTS / f"{name}.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()
