"""Held-out reward when rollouts are exactly k policy versions old, k = 0, 1, 2, 4.

    make bench-asynchrony

The demo's model, task and recipe; the trainer's own learner and the workers' own engine, in one
process, so that every training step gets rollouts of exactly version step - 1 - k (the base model
until there is one). Behaviour log-probabilities are recomputed at that version. Writes
results/asynchrony.json and docs/images/asynchrony.svg, unless seeds, levels, steps or anything of
the recipe's training section are others: those are printed only. What mends a level is found with

    python -m benchmarks.training.asynchrony --seeds 0 1 2 --levels 0 4 --training loss=cispo
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev

import torch
from benchmarks.report import machine, print_table, write

from muster.inference import Request
from muster.inference.transformers_engine import TransformersEngine
from muster.protocol.encoding import keccak
from muster.protocol.ids import PolicyVersion, Step
from muster.protocol.recipe import Recipe
from muster.protocol.rollouts import Rollout
from muster.tasks import Graded, Problem, TaskSet, verify
from muster.tasks.toys import split_sort
from muster.trainer.base_model import build_base_model
from muster.trainer.config import load_recipe
from muster.trainer.learn.learner import Learner
from muster.trainer.measure.evaluate import Evaluator
from muster.trainer.publish.policies import BASE, PolicyShelf

ROOT = Path(__file__).parents[2]
LEVELS = (0, 1, 2, 4)
STEPS = 32
EVERY = 4
SEEDS = (0, 1, 2, 3, 4)
PROBLEMS = 32


@dataclass(frozen=True, slots=True)
class Point:
    """Held-out reward of a version."""

    version: int
    reward: float
    low: float
    high: float


def rollouts(
    engine: TransformersEngine, recipe: Recipe, problems: list[Problem], version: int, name: str
) -> list[list[Rollout]]:
    """Return a group per problem, sampled and graded as a worker does."""
    each = recipe.sampling.samples_per_problem
    asked = [(g, i, problem) for g, problem in enumerate(problems) for i in range(each)]
    requests = [
        Request(
            engine.encode(problem.prompt),
            int.from_bytes(keccak(f"{name} {g} {i}".encode())[:8], "big"),
            recipe.sampling.temperature,
            recipe.sampling.max_new_tokens,
        )
        for g, i, problem in asked
    ]
    made = engine.generate(requests, proof=recipe.proof)
    rows = []
    for (g, i, problem), request, completion in zip(asked, requests, made, strict=True):
        grade = verify(problem, engine.decode(completion.tokens))
        assert isinstance(grade, Graded)
        rows.append(
            Rollout(
                problem_id=problem.problem_id, group=g, sample=i, sampling_seed=request.seed,
                target_length=-1, policy_version=version, prompt_tokens=request.prompt_tokens,
                completion_tokens=completion.tokens, proofs=b"", task_reward=grade.score,
            )
        )  # fmt: skip
    return [rows[n : n + each] for n in range(0, len(rows), each)]


def train(folder: Path, recipe: Recipe, sets: tuple[TaskSet, TaskSet], age: int) -> Iterator[Point]:
    """Train with rollouts `age` versions old; yields the held-out reward every few versions."""
    training_set, held_out = sets
    shelf = PolicyShelf(folder / f"level-{age}")
    shelf.adopt(folder / "base")
    learner = Learner(shelf.path(BASE), recipe, published=shelf.weights)
    engine = TransformersEngine()
    evaluator = Evaluator(held_out, TransformersEngine(), recipe)
    draw = random.Random(0)
    for step in range(1, recipe.training.steps + 1):
        sampling = PolicyVersion(max(0, step - 1 - age))
        engine.load_policy(shelf.path(sampling), sampling)
        problems = draw.sample(training_set.problems, PROBLEMS)
        learner.step(Step(step), rollouts(engine, recipe, problems, sampling, f"step {step}"))
        shelf.write(PolicyVersion(step), learner.weights())
        if step % EVERY == 0:
            reward = evaluator.evaluate(shelf.path(PolicyVersion(step)), PolicyVersion(step)).reward
            yield Point(step, reward.value, reward.low, reward.high)


def measure(seed: int, recipe: Recipe, levels: tuple[int, ...]) -> dict[int, list[Point]]:
    """Return the curve of every level for one base model and task split."""
    sets = split_sort(2048, 256, seed)
    curves = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_base_model(folder / "base", seed=seed)
        base = Evaluator(sets[1], TransformersEngine(), recipe).evaluate(folder / "base", BASE)
        start = Point(0, base.reward.value, base.reward.low, base.reward.high)
        for level in levels:
            began = time.process_time()
            curves[level] = [start, *train(folder, recipe, sets, level)]
            print(
                f"seed {seed}, {level} versions old: {start.reward:.3f} to "
                f"{curves[level][-1].reward:.3f}, {time.process_time() - began:.0f} CPU s",
                flush=True,
            )
    return curves


def draw_plot(path: Path, found: dict[int, dict[int, list[Point]]]) -> None:
    """Draw the mean over seeds of every level, with all seeds between their extremes."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "muster"
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for level in LEVELS:
        curves = [found[seed][level] for seed in found]
        versions = [point.version for point in curves[0]]
        by_version = list(zip(*[[p.reward for p in curve] for curve in curves], strict=True))
        (line,) = axes.plot(versions, [fmean(r) for r in by_version], label=f"{level} versions old")
        axes.fill_between(
            versions, [min(r) for r in by_version], [max(r) for r in by_version],
            color=line.get_color(), alpha=0.12, linewidth=0,
        )  # fmt: skip
    axes.set(xlabel="policy version", ylabel="held-out reward, temperature 1", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def _changed(recipe: Recipe, steps: int, levels: tuple[int, ...], changes: list[str]) -> Recipe:
    """Return the recipe with other fields of its training section, written as TOML values."""
    value = recipe.model_dump(mode="json")
    # What is not set follows the loss.
    training = {name: value["training"][name] for name in recipe.training.model_fields_set} | {
        "max_async_level": max(levels),
        "steps": steps,
    }
    for change in changes:
        name, _, text = change.partition("=")
        try:
            training[name] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            training[name] = text
    return Recipe.model_validate_json(json.dumps(value | {"training": training}))


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
    recipe = load_recipe(ROOT / "configs" / "demo.toml")
    recipe = _changed(recipe, asked.steps, levels, asked.training)
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
    draw_plot(ROOT / "docs" / "images" / "asynchrony.svg", found)
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
