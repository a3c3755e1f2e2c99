"""From texts to a model that reasons, on a network: pretraining, a data run, fine-tuning, RL.

make example-reasoning                  the whole lesson, and docs/runs/reasoning.md
make example-reasoning ARGS=--small     the same story with a toy model, in a minute; no page
make example-reasoning ARGS=--page      the page alone, of the last whole lesson
"""

import argparse
import asyncio
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.reasoning.model import Shape
from benchmarks.reasoning.page import LEARNER, NAME, write_page
from benchmarks.reasoning.recipes import Sampling
from benchmarks.reasoning.story import Lesson, Plan, Story
from benchmarks.report import machine, write

SMALL = Plan(
    shape=Shape(layers=1, hidden=64, heads=2, vocabulary=400),
    exercises=32,
    practised=12,
    held_out=4,
    texts=400,
    data=Sampling(2, 2),
    data_submissions=3,
    least_reward=0.0,
    epochs=1,
    practice=Sampling(2, 2),
    submissions=2,
    steps=2,
    eval_every=2,
    samples=1,
)
"""Everything, of a size at which nothing is learned."""


def main() -> None:
    """Play, write, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--small", action="store_true", help="a toy model, and no page")
    parser.add_argument("--page", action="store_true", help="the page of the last lesson")
    parser.add_argument(
        "--out",
        type=Path,
        help="folder to keep; the same command resumes in it [a temporary one]",
    )
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    if not asked.page:
        measured_on = machine()
        lesson = _play(asked.out, SMALL if asked.small else Plan(), asked.seed)
        if asked.small:
            return
        detail = lesson.to_json() | {"seed": asked.seed}
        write(NAME, metrics_of(detail), detail, measured_on=measured_on)
    write_page()


def _play(out: Path | None, plan: Plan, seed: int) -> Lesson:
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        return asyncio.run(Story(plan, out, seed).play())
    with tempfile.TemporaryDirectory() as name:
        return asyncio.run(Story(plan, Path(name), seed).play())


def metrics_of(detail: dict[str, Any]) -> dict[str, float]:
    """Return the figures that a lesson is judged by."""
    stages, costs = detail["stages"], detail["costs"].values()
    found = {
        f"reward_{stage.replace('-', '_')}": stages[stage]["sampled"]["reward"]["value"]
        for stage in ("teacher", *LEARNER)
    }
    curve = detail["curve"]
    return found | {
        "length_error_start": curve[0]["length_error"],
        "length_error_end": curve[-1]["length_error"],
        "wall_s": sum(cost["wall_s"] for cost in costs),
        "cpu_s": sum(cost["cpu_s"] for cost in costs),
    }


if __name__ == "__main__":
    main()
