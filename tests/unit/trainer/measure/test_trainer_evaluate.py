"""Evaluation: pass@k against counting, intervals against simulation, budgets by hand."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import example, given, strategies as st
from trainer_fakes import make_recipe

from muster.inference import Completion, Request
from muster.protocol.errors import NotYet
from muster.protocol.ids import PolicyVersion
from muster.protocol.mixture import PartRecipe, TasksRecipe
from muster.protocol.prompts import Prompt, text_of
from muster.protocol.recipe import ProofRecipe, Recipe
from muster.tasks import Problem, TaskSet, Undecided
from muster.tasks.document import SetPart
from muster.trainer.measure import evaluate
from muster.trainer.measure.evaluate import (
    Adherence,
    Evaluation,
    Evaluator,
    pass_at_k,
    share_over_problems,
)
from muster.trainer.measure.figures import evaluation_entry, flat

V1 = PolicyVersion(1)
EOS = 9


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(samples: int, data: st.DataObject) -> None:
    passed = data.draw(st.integers(0, samples))
    k = data.draw(st.integers(1, samples))
    outcomes = [i < passed for i in range(samples)]
    subsets = [any(chosen) for chosen in itertools.combinations(outcomes, k)]
    assert pass_at_k(samples, passed, k) == pytest.approx(fmean(subsets))


@pytest.mark.parametrize(("samples", "passed", "k"), [(4, 1, 5), (4, 5, 1), (4, 1, 0), (4, -1, 1)])
def test_pass_at_k_beyond_the_samples_is_refused(samples: int, passed: int, k: int) -> None:
    with pytest.raises(ValueError, match="is not defined"):
        pass_at_k(samples, passed, k)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
@example([1e-12] * 4)
@example([1 - 1e-12] * 4)
def test_interval_holds_its_estimate(values: list[float]) -> None:
    share = share_over_problems(values)
    assert 0 <= share.low <= share.value + 1e-9
    assert share.value - 1e-9 <= share.high <= 1
    assert share.low < share.high


def test_single_samples_have_wilsons_interval() -> None:
    # 16 of 20: Wilson's score interval, from its formula by hand; the effective number of trials
    # differs from 20 only by the variance's divisor.
    share = share_over_problems([1.0] * 16 + [0.0] * 4)
    assert (share.low, share.high) == pytest.approx((0.5840, 0.9193), abs=0.01)


def test_samples_of_one_problem_do_not_count_as_problems() -> None:
    clustered = share_over_problems([1.0, 0.0] * 10)
    independent = share_over_problems([0.5] * 9 + [0.25, 0.75])
    assert clustered.high - clustered.low > 2 * (independent.high - independent.low)


def test_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng, covered = random.Random(7), 0
    for _ in range(400):
        rates = [rng.betavariate(0.8, 1.2) for _ in range(60)]
        values = [fmean(rng.random() < rate for _ in range(4)) for rate in rates]
        share = share_over_problems(values)
        covered += share.low <= 0.4 <= share.high
    # 400 trials at 95 %: 380 expected, standard deviation 4.4.
    assert 365 <= covered <= 396


@dataclass
class ScriptedEngine:
    """Answers with the tokens that a script has for (problem, sample)."""

    script: list[tuple[int, ...]]
    eos_token_ids: frozenset[int] = frozenset({EOS})
    asked: list[Request] = field(default_factory=list)

    def load_policy(self, folder: Path, version: PolicyVersion) -> None:
        pass

    def generate(self, requests: Sequence[Request], **_: ProofRecipe) -> list[Completion]:
        self.asked = list(requests)
        return [Completion(self.script[i % len(self.script)], []) for i in range(len(requests))]

    def encode(self, text: Prompt, *, is_start: bool = True) -> tuple[int, ...]:  # noqa: ARG002
        return tuple(text_of(text).encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(str(token) for token in tokens if token != EOS)


def _evaluate(
    script: list[tuple[int, ...]],
    *,
    answers: Sequence[str | None] = ("12", "34"),
    samples: int = 1,
    recipe: Recipe | None = None,
    parts: Sequence[SetPart] = (),
) -> tuple[Evaluation, ScriptedEngine]:
    problems = [
        Problem(
            problem_id=f"p{i}", task_type="exact_match", prompt="?", gold_standard_solution=answer
        )
        for i, answer in enumerate(answers)
    ]
    engine: Any = ScriptedEngine(script)
    tasks = TaskSet.of("held out", "1", problems, parts)
    evaluator = Evaluator(tasks, engine, recipe or make_recipe(), samples=samples)
    return evaluator.evaluate(Path(), V1), engine


def test_reward_and_pass_at_k_of_several_samples() -> None:
    # Four samples each: the first problem passes once, the second three times.
    right, wrong, second = (1, 2, EOS), (7, EOS), (3, 4, EOS)
    script = [right, wrong, wrong, wrong, second, second, second, wrong]
    evaluation, engine = _evaluate(script, samples=4)
    assert evaluation.reward.value == 0.5
    assert {k: share.value for k, share in evaluation.pass_at.items()} == pytest.approx(
        {1: 0.5, 2: (0.5 + 1.0) / 2, 4: 1.0}
    )
    assert (evaluation.policy_version, evaluation.problems, evaluation.samples) == (1, 2, 4)
    assert len({request.seed for request in engine.asked}) == 8
    assert {request.temperature for request in engine.asked} == {1.0}


def test_problems_without_verdict_do_not_count_as_wrong() -> None:
    found, _ = _evaluate([(1, 2, EOS)], answers=("12", None))
    assert (found.reward.value, found.problems, found.ungraded) == (1.0, 1, 1)


def test_a_policy_of_which_nothing_was_graded_has_no_reward() -> None:
    found, _ = _evaluate([(1, 2, EOS)], answers=(None, None))
    assert (found.reward, found.pass_at, found.problems, found.ungraded) == (None, {}, 0, 2)
    figures = flat(evaluation_entry(found))
    assert not [name for name in figures if "reward" in name or "pass_at" in name]
    assert (figures["eval_problems"], figures["eval_ungraded"]) == (0, 2)


def test_a_machine_that_could_grade_nothing_has_no_results(monkeypatch: pytest.MonkeyPatch) -> None:
    disturbed = Undecided("no memory", is_disturbance=True)
    monkeypatch.setattr(evaluate, "verify_all", lambda answers: [disturbed] * len(answers))
    with pytest.raises(NotYet, match="no problem could be graded: no memory"):
        _evaluate([(1, 2, EOS)])


def test_first_sample_has_the_same_noise_however_many_follow() -> None:
    _, one = _evaluate([(1, EOS)], samples=1)
    _, three = _evaluate([(1, EOS)], samples=3)
    assert [r.seed for r in one.asked] == [r.seed for r in three.asked[::3]]


def test_pass_at_k_is_reported_at_powers_of_two_and_at_the_end() -> None:
    assert list(_evaluate([(1, EOS)], samples=6)[0].pass_at) == [1, 2, 4, 6]


def test_truncation_needs_the_limit_and_a_missing_end() -> None:
    # The limit is 6 tokens.
    evaluation, _ = _evaluate([(1, 1, 1, 1, 1, 1), (1, 1, 1, 1, 1, EOS)])
    assert evaluation.truncated == 0.5
    assert evaluation.length == 6


def test_budget_adherence_by_hand() -> None:
    recipe = make_recipe()
    sampling = recipe.sampling.model_copy(update={"target_lengths": (2, 4)})
    recipe = recipe.model_copy(update={"sampling": sampling})
    evaluation, _ = _evaluate([(1, 2, EOS), (3, 4, EOS)], recipe=recipe)
    # Lengths 3 and 3 against targets 2 and 4: each differs by one, one is within its target.
    assert evaluation.adherence == Adherence(error_tokens=1.0, within=0.5)
    _, engine = _evaluate([(1, EOS)], answers=("1", "1", "1"), recipe=recipe)
    prompts = [bytes(request.prompt_tokens).decode() for request in engine.asked]
    for prompt, target in zip(prompts, (2, 4, 2), strict=True):
        assert prompt.endswith(f"Think for {target} tokens before giving a response.")


def test_without_budgets_there_is_no_adherence() -> None:
    assert _evaluate([(1, EOS)])[0].adherence is None


def test_parts_of_the_held_out_set_have_figures_and_budgets_of_their_own() -> None:
    own = (PartRecipe(name="short", target_lengths=(2,)), PartRecipe(name="free"))
    recipe = make_recipe().model_copy(update={"tasks": TasksRecipe(parts=own)})
    parts = (SetPart("short", "1", 2), SetPart("free", "1", 1), SetPart("unheard", "1", 1))
    script = [(1, 2, EOS), (7, EOS), (5, 6, EOS), (9,)]
    found, engine = _evaluate(script, answers=("12", "34", "56", None), recipe=recipe, parts=parts)
    assert {name: (p.reward.value, p.problems) for name, p in found.parts.items()} == {
        "short": (0.5, 2), "free": (1.0, 1),
    }  # fmt: skip
    assert found.parts["short"].reward == share_over_problems([1.0, 0.0])
    asked = [b"Think for 2" in bytes(request.prompt_tokens) for request in engine.asked]
    assert asked == [True, True, False, False]
    # Only samples with a budget count: lengths 3 and 2 against 2.
    assert found.adherence == Adherence(error_tokens=0.5, within=0.5)
