"""How a policy does on held-out problems: reward, pass@k, and whether it keeps length budgets."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from muster.inference import InferenceEngine, Request
from muster.inference.dialogue import Played, play
from muster.protocol.encoding import keccak
from muster.protocol.ids import PolicyVersion
from muster.protocol.recipe import Recipe
from muster.tasks import Graded, Problem, TaskSet, Undecided, render_prompt, verify_all
from muster.trainer.shares import Share, pass_at_k, share_over_problems

logger = logging.getLogger(__name__)

PASSING = 1.0
"""Score from which a sample counts as passed."""


@dataclass(frozen=True, slots=True)
class Adherence:
    """How completions compare with their length budgets."""

    error_tokens: float
    """Mean |length - target|."""
    within: float
    """Share of completions no longer than their target."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How a policy did."""

    policy_version: PolicyVersion
    """The policy."""
    reward: Share
    """avg@k: mean score over problems, each the mean of its samples."""
    pass_at: dict[int, Share]
    """pass@k by k: the powers of two up to the samples per problem, and that number."""
    problems: int
    """Problems that could be graded."""
    ungraded: int
    """Problems left out because a sample could not be graded."""
    samples: int
    """Samples per problem."""
    length: float
    """Mean tokens of a completion."""
    truncated: float
    """Share of completions that reached the token limit without EOS."""
    adherence: Adherence | None
    """Without length budgets there is none."""


@dataclass(frozen=True, slots=True)
class _Sample:
    """One completion of a held-out problem."""

    length: int
    target_length: int
    is_truncated: bool


class Evaluator:
    """Evaluates policies on one task set, every time with the same noise, so that they compare."""

    def __init__(
        self, task_set: TaskSet, engine: InferenceEngine, recipe: Recipe, *, samples: int = 1
    ) -> None:
        self._task_set = task_set
        self._engine = engine
        self._recipe = recipe
        self._samples = samples

    def evaluate(self, folder: Path, version: PolicyVersion) -> Evaluation:
        """Return how a policy does, sampled as workers sample; blocking."""
        engine, each = self._engine, self._samples
        engine.load_policy(folder, version)
        asked = [(i, problem) for i, problem in enumerate(self._task_set) for _ in range(each)]
        requests = [(p, self._request(i, n % each, p)) for n, (i, p) in enumerate(asked)]
        made = play(engine, requests, proof=self._recipe.proof)
        grades = grade_played([(p, one) for (_, p), one in zip(asked, made, strict=True)])
        samples = [self._sample(i, one) for (i, _), one in zip(asked, made, strict=True)]
        scores = _scores([grades[n : n + each] for n in range(0, len(grades), each)])
        return self._evaluation(version, scores, samples)

    def _evaluation(
        self, version: PolicyVersion, scores: list[list[float]], samples: list[_Sample]
    ) -> Evaluation:
        ungraded = len(self._task_set) - len(scores)
        if ungraded:
            logger.warning("problems not graded", extra={"count": ungraded})
        return Evaluation(
            policy_version=version,
            reward=_share([fmean(each) for each in scores]),
            pass_at={k: _pass_at(scores, k) for k in sorted(_powers(self._samples))},
            problems=len(scores),
            ungraded=ungraded,
            samples=self._samples,
            length=fmean(sample.length for sample in samples),
            truncated=fmean(sample.is_truncated for sample in samples),
            adherence=_adherence([s for s in samples if s.target_length >= 0]),
        )

    def _target(self, index: int) -> int:
        lengths = self._recipe.sampling.target_lengths
        return lengths[index % len(lengths)] if lengths else -1

    def _request(self, index: int, sample: int, problem: Problem) -> Request:
        sampling = self._recipe.sampling
        name = f"evaluation {index}" + (f" {sample}" if sample else "")
        seed = int.from_bytes(keccak(name.encode())[:8], "big")
        prompt = self._engine.encode(render_prompt(problem, self._target(index)))
        return Request(prompt, seed, sampling.temperature, sampling.max_new_tokens)

    def _sample(self, index: int, played: Played) -> _Sample:
        is_full = len(played.tokens) >= self._recipe.sampling.max_new_tokens
        ended = played.tokens[-1] in self._engine.eos_token_ids
        return _Sample(played.sampled, self._target(index), is_full and not ended)


def grade_played(answers: Sequence[tuple[Problem, Played]]) -> list[Graded | Undecided]:
    """Return the grades of completions; undecided where the environment was."""
    decided = [
        (problem, played.answer) for problem, played in answers if isinstance(played.answer, str)
    ]
    grades = iter(verify_all(decided))
    return [
        next(grades) if isinstance(played.answer, str) else played.answer for _, played in answers
    ]


def _scores(grades: Sequence[Sequence[Graded | Undecided]]) -> list[list[float]]:
    """Return the scores of the problems all of whose samples were graded."""
    return [
        [grade.score for grade in each if isinstance(grade, Graded)]
        for each in grades
        if all(isinstance(grade, Graded) for grade in each)
    ]


def _powers(samples: int) -> set[int]:
    return {1 << i for i in range(samples.bit_length()) if 1 << i <= samples} | {samples}


def _pass_at(scores: list[list[float]], k: int) -> Share:
    passed = [sum(score >= PASSING for score in each) for each in scores]
    return _share([pass_at_k(len(each), n, k) for each, n in zip(scores, passed, strict=True)])


def _share(values: list[float]) -> Share:
    return share_over_problems(values) if values else Share(0.0, 0.0, 1.0)


def _adherence(samples: list[_Sample]) -> Adherence | None:
    if not samples:
        return None
    return Adherence(
        fmean(abs(sample.length - sample.target_length) for sample in samples),
        fmean(sample.length <= sample.target_length for sample in samples),
    )
