"""A run in one process: sampling, training and evaluation in turn, with a network's code.

It has the workers' engine, the trainer's learner and its evaluator, but no chain, files or
validators. So a study can choose the policy and the problems of a training step's rollouts.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.report import ROOT
from torch import Tensor

from muster.inference import Request
from muster.inference.transformers_engine import TransformersEngine
from muster.protocol.encoding import keccak
from muster.protocol.ids import PolicyVersion, Step
from muster.protocol.prompts import render_prompt
from muster.protocol.recipe import Recipe
from muster.protocol.rollouts import Rollout
from muster.tasks import Graded, Problem, TaskSet, verify
from muster.trainer.config import load_recipe
from muster.trainer.learn.learner import Learner
from muster.trainer.measure.evaluate import Evaluation, Evaluator
from muster.trainer.measure.figures import StepFigures
from muster.trainer.publish.policies import BASE, PolicyShelf


@dataclass(frozen=True, slots=True)
class Point:
    """Held-out reward of a version."""

    version: int
    reward: float
    low: float
    high: float


class OneProcess:
    """A policy in training, with sampler, learner and evaluator."""

    def __init__(self, folder: Path, base: Path, recipe: Recipe, held_out: TaskSet) -> None:
        self.recipe = recipe
        self.shelf = PolicyShelf(folder)
        self.shelf.adopt(base)
        self._learner = Learner(self.shelf.path(BASE), recipe, published=self.shelf.weights)
        self._engine = TransformersEngine()
        self._evaluator = Evaluator(held_out, TransformersEngine(), recipe)

    def sample(self, problems: Sequence[Problem], version: int, name: str) -> list[list[Rollout]]:
        """Return a group per problem, sampled by a version and graded; `name` names the noise."""
        sampling = PolicyVersion(version)
        self._engine.load_policy(self.shelf.path(sampling), sampling)
        return rollouts(self._engine, self.recipe, problems, version, name)

    def learn(self, number: int, groups: Sequence[Sequence[Rollout]]) -> StepFigures:
        """Take a training step and write the version that it makes."""
        figures = self._learner.step(Step(number), groups)
        self.shelf.write(PolicyVersion(number), self.weights())
        return figures

    def weights(self) -> dict[str, Tensor]:
        """Return the weights in training, live."""
        return self._learner.weights()

    def evaluate(self, version: int) -> Evaluation:
        """Return how a version does on the held-out problems."""
        number = PolicyVersion(version)
        return self._evaluator.evaluate(self.shelf.path(number), number)

    def point(self, version: int) -> Point:
        """Return a version's held-out reward."""
        reward = self.evaluate(version).reward
        assert reward is not None
        return Point(version, reward.value, reward.low, reward.high)


def rollouts(
    engine: TransformersEngine,
    recipe: Recipe,
    problems: Sequence[Problem],
    version: int,
    name: str,
) -> list[list[Rollout]]:
    """Return a group per problem, sampled and graded as a worker does."""
    each = recipe.sampling.samples_per_problem
    asked = [(g, i, problem) for g, problem in enumerate(problems) for i in range(each)]
    requests = [
        Request(
            engine.encode(render_prompt(problem.prompt, budget_of(recipe, g), recipe.prompt)),
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
                target_length=budget_of(recipe, g), policy_version=version,
                prompt_tokens=request.prompt_tokens, completion_tokens=completion.tokens,
                proofs=b"", task_reward=grade.score,
            )
        )  # fmt: skip
    return [rows[n : n + each] for n in range(0, len(rows), each)]


def budget_of(recipe: Recipe, place: int) -> int:
    """Return the length budget of a group: budgets are taken in turn; -1 for none."""
    lengths = recipe.sampling.target_lengths
    return lengths[place % len(lengths)] if lengths else -1


def demo_recipe(**training: Any) -> Recipe:
    """Return the demo's recipe with other fields of its training section."""
    return changed(load_recipe(ROOT / "configs" / "demo.toml"), training=training)


def changed(recipe: Recipe, **sections: dict[str, Any]) -> Recipe:
    """Return a recipe with other fields of some sections; unset fields follow the loss."""
    value = recipe.model_dump(mode="json")
    for name, fields in sections.items():
        given = {field: value[name][field] for field in getattr(recipe, name).model_fields_set}
        value[name] = given | fields
    return Recipe.model_validate_json(json.dumps(value))


def draw_curves(axes: Any, curves: list[list[Point]], label: str) -> None:
    """Draw the mean of curves, and their range."""
    versions = [point.version for point in curves[0]]
    by_version = list(zip(*[[p.reward for p in curve] for curve in curves], strict=True))
    (line,) = axes.plot(versions, [fmean(r) for r in by_version], label=label)
    axes.fill_between(
        versions, [min(r) for r in by_version], [max(r) for r in by_version],
        color=line.get_color(), alpha=0.12, linewidth=0,
    )  # fmt: skip
    axes.set(xlabel="policy version", ylabel="held-out reward, temperature 1", ylim=(0, 1))
