"""Two-sided against one-sided clipping, when some rollouts come from another policy than they name.

INTELLECT-2 bounds the ratio of tokens with negative advantage, which plain GRPO leaves free, and
says that this prevents spikes of the gradient. Spikes are injected here: in every fourth step a
quarter of the groups name a policy version with disturbed weights, so that the trainer recomputes
wrong behaviour log-probabilities, as for a faulty engine or file. Demo model, task and recipe;
rollouts two versions old; the losses differ only in `clip_delta`.
"""

import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from benchmarks.claims.study import Study
from benchmarks.report import drawing, print_table
from benchmarks.training.one_process import OneProcess, Point, demo_recipe, draw_curves

from muster.protocol.ids import PolicyVersion
from muster.protocol.recipe import Recipe
from muster.protocol.rollouts import Rollout
from muster.tasks import TaskSet
from muster.tasks.toys import split_sort
from muster.trainer.base_model import build_base_model

SEEDS = (0, 1, 2)
STEPS, AGE, PROBLEMS = 20, 2, 32
FIRST, EVERY = 8, 4
"""The first step with a spike, and the steps from one spike to the next."""
SPIKED = PROBLEMS // 4
"""Groups of such a step that name the disturbed version."""
NOISE = 0.3
"""Standard deviation of the disturbance, relative to each weight."""
DISTURBED = PolicyVersion(1000)
LOSSES: dict[str, dict[str, Any]] = {
    "two-sided": {},
    "one-sided": {"loss": "grpo", "aggregation": "token"},
}


@dataclass(frozen=True, slots=True)
class Course:
    """Course of one training."""

    points: list[Point]
    """Held-out reward every few versions."""
    norms: list[float]
    """Gradient norm of each step, before it is clipped."""
    ratios: list[float]
    """Largest ratio of each step."""


def train(folder: Path, base: Path, recipe: Recipe, sets: tuple[TaskSet, TaskSet]) -> Course:
    """Train and return the course; the name of `folder` tells whether there are spikes."""
    training_set, held_out = sets
    run = OneProcess(folder, base, recipe, held_out)
    _disturb(run)
    draw, course = random.Random(0), Course([run.point(0)], [], [])
    for step in range(1, STEPS + 1):
        problems = draw.sample(training_set.problems, PROBLEMS)
        groups = run.sample(problems, max(0, step - 1 - AGE), f"step {step}")
        if "spiked" in folder.name and step in spiked_steps():
            groups = [*map(_misnamed, groups[:SPIKED]), *groups[SPIKED:]]
        figures = run.learn(step, groups)
        course.norms.append(figures.grad_norm)
        course.ratios.append(figures.max_ratio)
        if step % EVERY == 0:
            course.points.append(run.point(step))
    return course


def spiked_steps() -> range:
    """Return the steps that have a spike."""
    return range(FIRST, STEPS + 1, EVERY)


def _disturb(run: OneProcess) -> None:
    noise = torch.Generator().manual_seed(0)
    weights = {
        name: value * (1 + NOISE * torch.randn(value.shape, generator=noise))
        for name, value in run.weights().items()
    }
    run.shelf.write(DISTURBED, weights)


def _misnamed(group: Sequence[Rollout]) -> list[Rollout]:
    return [replace(rollout, policy_version=DISTURBED) for rollout in group]


def train_all(seeds: Sequence[int]) -> dict[str, list[Course]]:
    """Return the courses of every loss with and without spikes, one per seed."""
    courses: dict[str, list[Course]] = {}
    for seed in seeds:
        with tempfile.TemporaryDirectory() as name:
            base = Path(name) / "base"
            build_base_model(base, seed=seed)
            sets = split_sort(2048, 256, seed)
            for loss, fields in LOSSES.items():
                for air in ("calm", "spiked"):
                    recipe = demo_recipe(steps=STEPS, **fields)
                    found = train(Path(name) / f"{loss} {air}", base, recipe, sets)
                    courses.setdefault(f"{loss}, {air}", []).append(found)
    return courses


def measure() -> Study:
    """Train with all seeds, print and draw."""
    return study_of(train_all(SEEDS))


def study_of(courses: dict[str, list[Course]]) -> Study:
    """Print and draw the courses of all seeds, and return their figures."""
    _print(courses)
    _draw(courses)
    return Study(_metrics(courses), {"seeds": list(SEEDS), "courses": _detail(courses)})


def spike_norms(course: Course) -> list[float]:
    """Return the gradient norms of the steps that may have a spike."""
    return [course.norms[step - 1] for step in spiked_steps()]


def _metrics(courses: dict[str, list[Course]]) -> dict[str, float]:
    found = {}
    for name, each in courses.items():
        key = name.replace("-sided", "").replace(", ", "_")
        found[f"clip_norm_{key}"] = median(n for course in each for n in spike_norms(course))
        found[f"clip_norm_max_{key}"] = max(n for course in each for n in spike_norms(course))
        found[f"clip_reward_{key}"] = fmean(course.points[-1].reward for course in each)
    return found


def _detail(courses: dict[str, list[Course]]) -> dict[str, Any]:
    return {
        name: [
            {
                "rewards": [point.reward for point in course.points],
                "norms": [round(norm, 4) for norm in course.norms],
                "ratios": [round(ratio, 4) for ratio in course.ratios],
            }
            for course in each
        ]
        for name, each in courses.items()
    }


def _print(courses: dict[str, list[Course]]) -> None:
    rows = [
        [
            name,
            f"{median(n for course in each for n in spike_norms(course)):.2f}",
            f"{max(n for course in each for n in spike_norms(course)):.1f}",
            f"{fmean(course.points[-1].reward for course in each):.3f}",
        ]
        for name, each in courses.items()
    ]
    print_table(
        f"Gradient norm before clipping at spikes, reward after {STEPS} steps, {len(SEEDS)} seeds",
        ["loss", "median norm", "largest norm", "held-out reward"],
        rows,
    )


def _draw(courses: dict[str, list[Course]]) -> None:
    with drawing("claims-clip", panels=2) as (norms, rewards):
        for name, each in courses.items():
            steps = range(1, STEPS + 1)
            norms.plot(steps, [max(c.norms[step - 1] for c in each) for step in steps], label=name)
            draw_curves(rewards, [course.points for course in each], name)
        norms.set(xlabel="training step", ylabel="largest gradient norm, before clipping")
        norms.set(yscale="log")
        norms.legend()
