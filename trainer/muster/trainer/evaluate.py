"""Held-out reward of a policy: one sample per problem, sampled as workers sample."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from muster.inference import InferenceEngine, Request
from muster.protocol.encoding import keccak
from muster.protocol.ids import PolicyVersion
from muster.protocol.recipe import Recipe
from muster.tasks import Graded, Problem, TaskSet, render_prompt, verify

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How a policy did."""

    policy_version: PolicyVersion
    """The policy."""
    reward: float
    """Mean score of the problems that could be graded."""
    problems: int
    """How many those were."""


class Evaluator:
    """Evaluates policies on one task set, every time with the same noise, so that they compare."""

    def __init__(self, task_set: TaskSet, engine: InferenceEngine, recipe: Recipe) -> None:
        self._task_set = task_set
        self._engine = engine
        self._recipe = recipe

    def evaluate(self, folder: Path, version: PolicyVersion) -> Evaluation:
        """Return a policy's mean reward; blocking."""
        self._engine.load_policy(folder, version)
        requests = [self._request(i, problem) for i, problem in enumerate(self._task_set)]
        completions = self._engine.generate(requests, proof=self._recipe.proof)
        texts = [self._engine.decode(completion.tokens) for completion in completions]
        grades = [verify(p, text) for p, text in zip(self._task_set, texts, strict=True)]
        scores = [grade.score for grade in grades if isinstance(grade, Graded)]
        if len(scores) < len(grades):
            logger.warning("problems not graded", extra={"count": len(grades) - len(scores)})
        return Evaluation(version, sum(scores) / max(1, len(scores)), len(scores))

    def _request(self, index: int, problem: Problem) -> Request:
        sampling = self._recipe.sampling
        lengths = sampling.target_lengths
        target = lengths[index % len(lengths)] if lengths else -1
        seed = int.from_bytes(keccak(f"evaluation {index}".encode())[:8], "big")
        prompt = self._engine.encode(render_prompt(problem, target))
        return Request(prompt, seed, sampling.temperature, sampling.max_new_tokens)
