"""Held-out reward when rollouts are exactly k policy versions old, k = 0, 1, 2, 4.

    make bench-asynchrony

The demo's model, task and recipe; the trainer's own learner and the workers' own engine, in one
process, so that every training step gets rollouts of exactly version step - 1 - k (the base model
until there is one). Behaviour log-probabilities are recomputed at that version. Writes
results/asynchrony.json and docs/images/asynchrony.svg, but only for the default seeds, levels,
steps and training section. To try a change of the recipe:

    python -m benchmarks.training.asynchrony --seeds 0 1 2 --levels 0 4 --training loss=cispo
"""

import argparse
import random
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import torch
from benchmarks.report import drawing, machine, print_table, write
from benchmarks.training.one_process import OneProcess, Point, demo_recipe, draw_curves

from muster.protocol.recipe import Recipe
from muster.tasks import TaskSet
from muster.tasks.toys import split_sort
from muster.trainer.base_model import build_base_model

LEVELS = (0, 1, 2, 4)
STEPS = 32
EVERY = 4
SEEDS = (0, 1, 2, 3, 4)
PROBLEMS = 32


def train(run: OneProcess, training_set: TaskSet, age: int) -> Iterator[Point]:
    """Train with rollouts `age` versions old; yields the held-out reward every few versions."""
    draw = random.Random(0)
    for step in range(1, run.recipe.training.steps + 1):
        problems = draw.sample(training_set.problems, PROBLEMS)
        run.learn(step, run.sample(problems, max(0, step - 1 - age), f"step {step}"))
        if step % EVERY == 0:
            yield run.point(step)


def measure(seed: int, recipe: Recipe, levels: tuple[int, ...]) -> dict[int, list[Point]]:
    """Return the curve of every level for one base model and task split."""
    training_set, held_out = split_sort(2048, 256, seed)
    curves = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_base_model(folder / "base", seed=seed)
        for level in levels:
            began = time.process_time()
            run = OneProcess(folder / f"level-{level}", folder / "base", recipe, held_out)
            curves[level] = [run.point(0), *train(run, training_set, level)]
            print(
                f"seed {seed}, {level} versions old: {curves[level][0].reward:.3f} to "
                f"{curves[level][-1].reward:.3f}, {time.process_time() - began:.0f} CPU s",
                flush=True,
            )
    return curves


def draw_plot(found: dict[int, dict[int, list[Point]]]) -> None:
    """Draw the mean over seeds of every level, with the range of all seeds."""
    with drawing("asynchrony") as axes:
        for level in LEVELS:
            draw_curves(axes, [found[seed][level] for seed in found], f"{level} versions old")
        axes.legend(loc="lower right")


def _values(changes: list[str]) -> dict[str, Any]:
    """Return fields of a recipe's training section from texts of the form FIELD=TOML-VALUE."""
    found: dict[str, Any] = {}
    for change in changes:
        name, _, text = change.partition("=")
        try:
            found[name] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            found[name] = text
    return found


def main() -> None:
    """Measure, print, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--levels", type=int, nargs="+", default=list(LEVELS))
    parser.add_argument("--training", nargs="*", default=[], metavar="FIELD=VALUE")
    asked = parser.parse_args()
    seeds, levels = asked.seeds, tuple(asked.levels)
    torch.set_num_threads(1)
    measured_on = machine()
    changes = {"max_async_level": max(levels), "steps": asked.steps} | _values(asked.training)
    recipe = demo_recipe(**changes)
    found = {seed: measure(seed, recipe, levels) for seed in seeds}
    ends = {level: [found[s][level][-1].reward for s in seeds] for level in levels}
    starts = [found[seed][levels[0]][0].reward for seed in seeds]
    rows = [
        [
            str(level),
            f"{fmean(starts):.3f}",
            f"{fmean(rewards):.3f}",
            f"{stdev(rewards):.3f}" if len(rewards) > 1 else "-",
            f"{fmean(rewards) / fmean(ends[levels[0]]):.3f}",
        ]
        for level, rewards in ends.items()
    ]
    print_table(
        f"Held-out reward (256 problems) after {asked.steps} steps, {len(seeds)} seeds"
        + "".join(f", {change}" for change in asked.training),
        ["versions old", "start", "end", "deviation", f"ratio to {levels[0]}"],
        rows,
    )
    if (seeds, levels, asked.steps, asked.training) != (list(SEEDS), LEVELS, STEPS, []):
        return
    draw_plot(found)
    metrics = {f"reward_level_{level}": median(rewards) for level, rewards in ends.items()}
    detail = {
        str(seed): {
            str(level): [[p.version, p.reward, p.low, p.high] for p in curve]
            for level, curve in curves.items()
        }
        for seed, curves in found.items()
    }
    write("asynchrony", metrics, detail, measured_on=measured_on)


if __name__ == "__main__":
    main()
