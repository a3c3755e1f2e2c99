"""Length budgets, short and long, by INTELLECT-2's reward and normalised apart.

INTELLECT-2 adds -alpha |budget - length| to the task reward, and reports that the length penalty
falls much more slowly than in small studies: its model does not keep the budgets in the end. Here
the example of docs/tasks.md is trained with short and with long budgets, once with that reward
(`joint`), once with the length part normalised apart (`apart`).
"""

import random
import tempfile
from pathlib import Path
from statistics import fmean

from benchmarks.claims.study import Study
from benchmarks.report import ROOT, drawing, print_table
from benchmarks.training.one_process import OneProcess, changed

from muster.trainer.base_model import LESSONS, build_base_model
from muster.trainer.config import load_recipe
from muster.trainer.measure.evaluate import Evaluation

SEEDS = (0,)
STEPS, AGE, PROBLEMS, EVERY = 32, 2, 32, 8
BUDGETS = {"short": (8, 10, 12, 14), "long": (12, 14, 16, 18, 20)}
"""Budgets in tokens, as many as in TARGET-SHORT and TARGET-LONG."""
REWARDS = {"joint": "joint", "apart": "std"}
"""Values of `length_advantage`."""


def train(run: OneProcess, seed: int) -> list[Evaluation]:
    """Train and return evaluations every few versions."""
    training_set, _ = LESSONS["length"].split(2048, 256, seed)
    draw, found = random.Random(0), [run.evaluate(0)]
    for step in range(1, STEPS + 1):
        problems = draw.sample(training_set.problems, PROBLEMS)
        run.learn(step, run.sample(problems, max(0, step - 1 - AGE), f"step {step}"))
        if step % EVERY == 0:
            found.append(run.evaluate(step))
    return found


def course_of(size: str, reward: str, seed: int) -> list[Evaluation]:
    """Return the evaluations of a run with these budgets and this reward."""
    recipe = changed(
        load_recipe(ROOT / "configs" / "example-length.toml"),
        sampling={"target_lengths": BUDGETS[size]},
        training={"steps": STEPS, "length_advantage": REWARDS[reward]},
    )
    with tempfile.TemporaryDirectory() as name:
        base = Path(name) / "base"
        build_base_model(base, seed=seed, lesson=LESSONS["length"])
        _, held_out = LESSONS["length"].split(2048, 256, seed)
        return train(OneProcess(Path(name) / "run", base, recipe, held_out), seed)


def measure() -> Study:
    """Train with both sets of budgets and both rewards, print and draw."""
    return study_of(
        {
            f"{size}_{reward}": [course_of(size, reward, seed) for seed in SEEDS]
            for size in BUDGETS
            for reward in REWARDS
        }
    )


def study_of(courses: dict[str, list[list[Evaluation]]]) -> Study:
    """Print and draw the runs, and return their figures."""
    _draw(courses)
    metrics = {}
    for name, each in courses.items():
        metrics[f"length_reward_{name}"] = fmean(_reward(course[-1]) for course in each)
        for end, place in (("start", 0), ("end", -1)):
            metrics[f"length_error_{end}_{name}"] = fmean(errors(each, place))
    rows = [
        [name, *(f"{metrics[f'{figure}_{name}']:.2f}" for figure in
                 ("length_error_start", "length_error_end", "length_reward"))]
        for name in courses
    ]  # fmt: skip
    print_table(
        f"Length budgets, {STEPS} steps, {len(SEEDS)} seeds",
        ["budgets, reward", "tokens off before", "after", "task reward"],
        rows,
    )
    detail = {
        name: [
            [[e.policy_version, round(_reward(e), 4), round(_error(e), 3)] for e in course]
            for course in each
        ]
        for name, each in courses.items()
    }
    return Study(metrics, {"seeds": list(SEEDS), "courses": detail})


def errors(courses: list[list[Evaluation]], place: int) -> list[float]:
    """Return the mean distance from the budget at one evaluation of each training."""
    return [_error(course[place]) for course in courses]


def _reward(evaluation: Evaluation) -> float:
    assert evaluation.reward is not None
    return evaluation.reward.value


def _error(evaluation: Evaluation) -> float:
    assert evaluation.adherence is not None
    return evaluation.adherence.error_tokens


def _draw(courses: dict[str, list[list[Evaluation]]]) -> None:
    with drawing("claims-lengths") as axes:
        for name, each in courses.items():
            versions = [evaluation.policy_version for evaluation in each[0]]
            means = [fmean(errors(each, place)) for place in range(len(versions))]
            axes.plot(versions, means, "o-", label=name.replace("_", " budgets, "))
        axes.set(xlabel="policy version", ylabel="mean |length - budget|, tokens", ylim=(0, None))
        axes.legend()
