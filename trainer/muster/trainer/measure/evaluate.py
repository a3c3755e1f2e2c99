"""Results of a policy on held-out problems: reward, pass@k, and whether it keeps length budgets."""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, variance
from typing import NamedTuple, TypeGuard

from muster.inference import InferenceEngine, Request
from muster.inference.dialogue import Played, play
from muster.protocol.encoding import keccak
from muster.protocol.errors import NotYet
from muster.protocol.ids import PolicyVersion
from muster.protocol.intervals import score_interval
from muster.protocol.prompts import render_prompt
from muster.protocol.recipe import Recipe
from muster.tasks import Grade, Graded, Problem, TaskSet, Undecided, verify_all

logger = logging.getLogger(__name__)

PASSING = 1.0
"""Score from which a sample counts as passed."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """An estimate in [0, 1] with its two-sided 95 % interval."""

    value: float
    """The estimate."""
    low: float
    """Lower end."""
    high: float
    """Upper end."""


@dataclass(frozen=True, slots=True)
class Adherence:
    """Comparison of completions with their length budgets."""

    error_tokens: float
    """Mean |length - target|."""
    within: float
    """Share of completions no longer than their target."""


@dataclass(frozen=True, slots=True)
class PartShare:
    """Result on one part of the held-out problems."""

    reward: Estimate
    """avg@k of its problems."""
    problems: int
    """Problems that could be graded."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Results of a policy on the held-out problems."""

    policy_version: PolicyVersion
    reward: Estimate | None
    """avg@k: mean score over problems, each the mean of its samples; None if none was graded."""
    pass_at: dict[int, Estimate]
    """pass@k by k. k is each power of two up to the samples per problem, and that number itself;
    empty if no problem was graded."""
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
    """None without length budgets."""
    parts: dict[str, PartShare] = field(default_factory=dict)
    """Results by part of the held-out set; parts without a gradable problem are missing."""


class Evaluator:
    """Evaluates policies on one task set, always with the same noise, so that results can be
    compared."""

    def __init__(
        self, task_set: TaskSet, engine: InferenceEngine, recipe: Recipe, *, samples: int = 1
    ) -> None:
        self._task_set = task_set
        self._engine = engine
        self._recipe = recipe
        self._samples = samples

    def evaluate(self, folder: Path, version: PolicyVersion) -> Evaluation:
        """Return the results of a policy, sampled as workers sample; blocking.

        Raises NotYet when no problem could be graded and this machine is at fault, EngineError when
        the engine fails.
        """
        self._engine.load_policy(folder, version)
        asked = asked_of(self._recipe, self._task_set, range(len(self._task_set)))
        rows = play_and_grade(self._engine, self._recipe, asked, self._samples, _seed_name)
        graded = [_scores([grade for _, grade in row]) for row in rows]
        scores = [each for each in graded if each]
        ungraded = len(rows) - len(scores)
        if ungraded:
            logger.warning("problems not graded", extra={"count": ungraded})
        if not scores:
            require_undisturbed(rows, "no problem could be graded")
        ks = sorted(_powers(self._samples)) if scores else []
        made = [played for row in rows for played, _ in row]
        targets = [each.budget for each, row in zip(asked, rows, strict=True) for _ in row]
        return Evaluation(
            policy_version=version,
            reward=share_over_problems([fmean(each) for each in scores]) if scores else None,
            pass_at={k: _pass_at(scores, k) for k in ks},
            problems=len(scores),
            ungraded=ungraded,
            samples=self._samples,
            length=fmean(played.sampled for played in made),
            truncated=fmean(map(self._is_truncated, made)),
            adherence=_adherence([p.sampled for p in made], targets),
            parts=self._by_part(graded),
        )

    def _by_part(self, graded: Sequence[list[float]]) -> dict[str, PartShare]:
        found = {}
        for part in self._task_set.parts:
            scores = [fmean(graded[i]) for i in self._task_set.range_of(part.name) if graded[i]]
            if scores:
                found[part.name] = PartShare(share_over_problems(scores), len(scores))
        return found

    def _is_truncated(self, played: Played) -> bool:
        is_full = len(played.tokens) >= self._recipe.sampling.max_new_tokens
        return is_full and played.tokens[-1] not in self._engine.eos_token_ids


def _seed_name(index: int, sample: int, _problem: Problem) -> str:
    return f"evaluation {index}" + (f" {sample}" if sample else "")


class AskedProblem(NamedTuple):
    """A problem to sample outside a run."""

    place: int
    """Its place in the task set."""
    problem: Problem
    budget: int
    """Its length budget in tokens; -1 for none."""


def asked_of(recipe: Recipe, task_set: TaskSet, places: Iterable[int]) -> list[AskedProblem]:
    """Return some problems of a task set; each part's budgets are assigned in turn."""
    found = []
    for place in places:
        lengths = recipe.rules_of(task_set.part_at(place)).target_lengths
        budget = lengths[place % len(lengths)] if lengths else -1
        found.append(AskedProblem(place, task_set[place], budget))
    return found


def play_and_grade(
    engine: InferenceEngine,
    recipe: Recipe,
    problems: Sequence[AskedProblem],
    samples: int,
    seed_name: Callable[[int, int, Problem], str],
) -> list[list[tuple[Played, Grade]]]:
    """Return `samples` completions of each problem with their grades, sampled as workers sample.

    `seed_name` maps place, sample and problem to the name of the noise. A grade is Undecided when
    the environment could not decide.
    """
    sampling = recipe.sampling
    asked = []
    for index, problem, budget in problems:
        given = render_prompt(problem.prompt, budget, recipe.prompt)
        prompt = engine.encode(given)
        for sample in range(samples):
            seed = keccak(seed_name(index, sample, problem).encode())[:8]
            request = Request(
                prompt, int.from_bytes(seed, "big"), sampling.temperature, sampling.max_new_tokens
            )
            asked.append((problem, request))
    made = play(engine, asked, recipe)
    answers = [(p, one.answer) for (p, _), one in zip(asked, made, strict=True)]
    grades = iter(_graded([(p, answer) for p, answer in answers if isinstance(answer, str)]))
    graded = [
        (played, next(grades) if isinstance(played.answer, str) else played.answer)
        for played in made
    ]
    return [graded[n : n + samples] for n in range(0, len(graded), samples)]


def _scores(grades: Sequence[Grade]) -> list[float]:
    """Return the scores of a problem's samples; none when one of them was not graded."""
    scores = [grade.score for grade in grades if isinstance(grade, Graded)]
    return scores if len(scores) == len(grades) else []


def require_undisturbed(rows: Sequence[Sequence[tuple[Played, Grade]]], lost: str) -> None:
    """Raise NotYet, which says what is lost, when a grade is missing because of this machine."""
    for row in rows:
        for _, grade in row:
            if _is_disturbed(grade):
                raise NotYet(
                    f"{lost}: {grade.reason}",
                    hint="mend this machine; the policy is not at fault",
                )


def _graded(answers: Sequence[tuple[Problem, str]]) -> list[Grade]:
    """Return the grades of answers; one that this machine disturbed is tried a second time."""
    grades = verify_all(answers)
    disturbed = [i for i, grade in enumerate(grades) if _is_disturbed(grade)]
    for i, grade in zip(disturbed, verify_all([answers[i] for i in disturbed]), strict=True):
        grades[i] = grade
    return grades


def _is_disturbed(grade: Grade) -> TypeGuard[Undecided]:
    return isinstance(grade, Undecided) and grade.is_disturbance


def _powers(samples: int) -> set[int]:
    return {1 << i for i in range(samples.bit_length()) if 1 << i <= samples} | {samples}


def _pass_at(scores: list[list[float]], k: int) -> Estimate:
    passed = [sum(score >= PASSING for score in each) for each in scores]
    return share_over_problems(
        [pass_at_k(len(each), n, k) for each, n in zip(scores, passed, strict=True)]
    )


def _adherence(lengths: Sequence[int], targets: Sequence[int]) -> Adherence | None:
    """Return the comparison of the completions that have a budget."""
    pairs = [(a, b) for a, b in zip(lengths, targets, strict=True) if b >= 0]
    if not pairs:
        return None
    return Adherence(
        fmean(abs(length - target) for length, target in pairs),
        fmean(length <= target for length, target in pairs),
    )


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Return the chance that at least one of k samples passes: 1 - C(n - c, k) / C(n, k), 1 <= k <=
    n.

    Unbiased for every k (Chen et al. 2021, arXiv 2107.03374, equation 1).
    """
    if not 1 <= k <= samples or not 0 <= passed <= samples:
        raise ValueError(f"pass@{k} of {passed} in {samples} samples is not defined")
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def share_over_problems(values: Sequence[float]) -> Estimate:
    """Return the mean of one value in [0, 1] per problem, with its interval.

    The problems are the random draw, so the spread between problems counts, not that between
    samples. The interval is Wilson's at the effective number of trials, mean * (1 - mean) /
    (variance of the mean): never outside [0, 1], and not of width 0 where all problems agree.
    """
    mean = fmean(values)
    trials = float(len(values))
    spread = variance(values) / len(values) if len(values) > 1 else 0.0
    if spread and 0 < mean < 1:
        trials = mean * (1 - mean) / spread
    return Estimate(mean, *score_interval(mean, trials))
