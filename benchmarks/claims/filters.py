"""Offline and online filters against none, where most problems teach nothing.

INTELLECT-2 keeps problems of which a model solves 12.5 % to 50 % (offline), and goes on sampling
until a batch consists of samples with an advantage (online). Here a quarter of the problems are
always solved, half of them never, because their answers exceed the token limit, and a quarter
sometimes. Every training step takes 32 groups; with the online filter, 32 groups with an advantage.
Tokens and CPU time of sampling and training are also counted.
"""

import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.claims.study import Study
from benchmarks.report import drawing, print_table
from benchmarks.training.one_process import OneProcess, Point, demo_recipe, draw_curves

from muster.protocol.rollouts import Rollout
from muster.tasks import Problem, TaskSet
from muster.tasks.toys import make_sort, split_sort
from muster.trainer.base_model import build_base_model
from muster.trainer.stream.filters import has_preference

SEEDS = (0, 1, 2)
STEPS, GROUPS, AGE, EVERY = 12, 32, 2, 4
KEPT = (0.125, 0.5)
"""Pass rates that the offline filter keeps."""
PASSES = 8
"""Samples of each problem for the offline filter."""
WAYS = {"none": (False, False), "offline": (True, False), "online": (False, True),
        "both": (True, True)}  # fmt: skip
"""Whether problems are filtered before the run, and groups during it."""


@dataclass(slots=True)
class Course:
    """Course and cost of one training."""

    points: list[Point] = field(default_factory=list)
    """Held-out reward every few versions."""
    sampled: int = 0
    """Groups generated."""
    sampling_s: float = 0.0
    """CPU seconds of sampling and grading."""
    training_s: float = 0.0
    """CPU seconds of the learner."""
    sampled_tokens: int = 0
    """Tokens generated."""
    trained_tokens: int = 0
    """Tokens trained on."""


def mixed_set(training_set: TaskSet, seed: int) -> list[Problem]:
    """Return problems that are sometimes solved, and three times as many that teach nothing."""
    learnable = list(training_set.problems)
    always = [
        Problem(
            problem_id=f"same-{number}",
            task_type="exact_match",
            prompt=f"{4 * digit}=",
            gold_standard_solution=4 * digit,
        )
        for number, digit in enumerate(islice(cycle("0123456789"), len(learnable)))
    ]
    # An answer of six digits and EOS is a token longer than the demo's limit.
    never = list(make_sort(2 * len(learnable), seed, digits=6).problems)
    return [*learnable, *always, *never]


def offline(run: OneProcess, problems: list[Problem]) -> list[Problem]:
    """Return the problems whose pass rate under the base model is in the band."""
    low, high = KEPT
    kept = []
    for group in run.sample(problems, 0, "offline filter"):
        rate = fmean(rollout.task_reward for rollout in group[:PASSES])
        kept += [group[0].problem_id] if low <= rate <= high else []
    wanted = set(kept)
    return [problem for problem in problems if problem.problem_id in wanted]


def train(run: OneProcess, problems: list[Problem], *, is_online: bool) -> Course:
    """Train and return the course."""
    draw, course = random.Random(0), Course(points=[run.point(0)])
    for step in range(1, STEPS + 1):
        groups: list[list[Rollout]] = []
        while len(groups) < GROUPS:
            drawn = draw.sample(problems, GROUPS)
            began = time.process_time()
            made = run.sample(drawn, max(0, step - 1 - AGE), f"step {step} {course.sampled}")
            course.sampling_s += time.process_time() - began
            course.sampled += len(made)
            course.sampled_tokens += sum(rollout.sampled for group in made for rollout in group)
            groups += [group for group in made if not is_online or has_preference(group)]
        began = time.process_time()
        figures = run.learn(step, groups[:GROUPS])
        course.training_s += time.process_time() - began
        course.trained_tokens += figures.tokens
        if step % EVERY == 0:
            course.points.append(run.point(step))
    return course


def train_all(seeds: Sequence[int]) -> dict[str, list[Course]]:
    """Return the courses of every way, one per seed."""
    courses: dict[str, list[Course]] = {name: [] for name in WAYS}
    for seed in seeds:
        with tempfile.TemporaryDirectory() as name:
            base = Path(name) / "base"
            build_base_model(base, seed=seed)
            training_set, held_out = split_sort(128, 256, seed)
            problems = mixed_set(training_set, seed)
            for way, (is_offline, is_online) in WAYS.items():
                run = OneProcess(Path(name) / way, base, demo_recipe(steps=STEPS), held_out)
                given = offline(run, problems) if is_offline else problems
                courses[way].append(train(run, given, is_online=is_online))
    return courses


def measure() -> Study:
    """Train with all seeds, print and draw."""
    return study_of(train_all(SEEDS))


def study_of(courses: dict[str, list[Course]]) -> Study:
    """Print and draw the courses of all seeds, and return their figures."""
    _print(courses)
    with drawing("claims-filters") as axes:
        for way, each in courses.items():
            draw_curves(axes, [course.points for course in each], way)
        axes.legend(loc="lower right")
    return Study(_metrics(courses), {"seeds": list(SEEDS), "courses": _detail(courses)})


def _metrics(courses: dict[str, list[Course]]) -> dict[str, float]:
    found = {}
    for way, each in courses.items():
        found[f"filters_reward_{way}"] = fmean(course.points[-1].reward for course in each)
        found[f"filters_groups_{way}"] = fmean(course.sampled for course in each)
        found[f"compute_ratio_{way}"] = fmean(c.sampling_s / c.training_s for c in each)
        # A token costs 2 operations a weight to sample; 2 and 4 to train, 2 in the behaviour pass.
        found[f"flop_ratio_{way}"] = fmean(
            2 * c.sampled_tokens / (8 * c.trained_tokens) for c in each
        )
    return found


def _detail(courses: dict[str, list[Course]]) -> dict[str, Any]:
    return {
        way: [
            {
                "rewards": [point.reward for point in course.points],
                "groups": course.sampled,
                "sampling_s": round(course.sampling_s, 2),
                "training_s": round(course.training_s, 2),
                "sampled_tokens": course.sampled_tokens,
                "trained_tokens": course.trained_tokens,
            }
            for course in each
        ]
        for way, each in courses.items()
    }


def _print(courses: dict[str, list[Course]]) -> None:
    metrics = _metrics(courses)
    rows = [
        [way, *(f"{metrics[f'{figure}_{way}']:.3g}" for figure in
                ("filters_reward", "filters_groups", "compute_ratio", "flop_ratio"))]
        for way in courses
    ]  # fmt: skip
    print_table(
        f"Filters: {STEPS} steps of {GROUPS} groups, {len(SEEDS)} seeds",
        ["filter", "reward", "groups", "CPU s of sampling / training", "operations"],
        rows,
    )
