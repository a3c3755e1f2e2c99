"""Attacks of a worker on its own work, A numbers as in docs/security.md: what validators find.

Each cheat has an honest twin that must pass. The policy is a hash, so nothing is near a limit by
chance; rates on real models are `make bench-forgers` and the calibrations.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from worlds.client_world import (
    CALIBRATION,
    RECIPE,
    RULES,
    VERSION,
    HashEngine,
    make_claim,
    make_rollouts,
    make_submission,
    make_ticket,
)

from muster.client.validator.judging import Judgement, examine
from muster.inference import Request, gumbel_noise
from muster.lab.simulator.machines import EOS
from muster.protocol.ids import PolicyVersion
from muster.protocol.messages import Reason, Verdict
from muster.protocol.recipe import ProofRecipe
from muster.protocol.rollouts import Rollout
from muster.tasks import Graded, verify
from muster.tasks.problem import Problem
from muster.toploc import build_proofs

Choose = Callable[[np.ndarray, np.ndarray, int], int]
"""Chooses a token from the policy's perturbed scores, a draft's, and the place."""


class Cheat(HashEngine):
    """Samples by another rule than the seeded maximum, and proves what it sampled truthfully."""

    def __init__(self, choose: Choose) -> None:
        super().__init__(VERSION)
        self._choose = choose
        self._draft = HashEngine(PolicyVersion(VERSION + 100))

    def _generate(self, request: Request, proof: ProofRecipe):  # type: ignore[no-untyped-def]
        from muster.inference import Completion

        tokens: list[int] = []
        hidden = []
        while len(tokens) < request.max_new_tokens and EOS not in tokens:
            sequence = (*request.prompt_tokens, *tokens)
            row, logits = self._step(sequence)
            _, drafted = self._draft._step(sequence)
            noise = gumbel_noise([request.seed], [len(tokens)], self.vocab_size)[0]
            tokens.append(self._choose(logits + noise, drafted + noise, len(tokens)))
            hidden.append(row)
        proofs = build_proofs(np.stack(hidden), chunk_tokens=proof.chunk_tokens, topk=proof.topk)
        return Completion(tuple(tokens), proofs)


def judge(engine: HashEngine) -> Judgement:
    """Return a validator's findings about an engine's work."""
    from muster.client.worker.generation import play_ticket

    ticket = make_ticket()
    return examine_rows(play_ticket(ticket, RECIPE, RULES.task_set, engine).graded())  # type: ignore[arg-type]


def examine_rows(rows: Sequence[Rollout]) -> Judgement:
    ticket = make_ticket()
    submission = make_submission(ticket, list(rows))
    return examine(make_claim(submission, ticket), rows, RULES, HashEngine(VERSION))  # type: ignore[arg-type]


def speculative(slack: float) -> Choose:
    """Take the draft's token if the policy's score of it is within `slack` of the maximum."""

    def choose(scores: np.ndarray, drafted: np.ndarray, _place: int) -> int:
        token = int(drafted.argmax())
        return token if scores.max() - scores[token] <= slack else int(scores.argmax())

    return choose


def test_A5_exact_speculative_decoding_is_honest_and_passes() -> None:
    assert judge(Cheat(speculative(0.0))).finding is None


@pytest.mark.parametrize("slack", [0.5, 2.0, 100.0])
def test_A5_speculative_decoding_with_lax_acceptance_is_found(slack: float) -> None:
    finding = judge(Cheat(speculative(slack))).finding
    assert finding is not None
    assert finding.reason is Reason.SAMPLER_MISMATCH


def runner_up(slack: float) -> Choose:
    """Take the second best token wherever it is within `slack` of the best."""

    def choose(scores: np.ndarray, _drafted: np.ndarray, _place: int) -> int:
        best, second = np.argsort(scores)[::-1][:2]
        return int(second if scores[best] - scores[second] <= slack else best)

    return choose


def test_A15_choices_are_free_within_the_calibrated_margin_only() -> None:
    margin = CALIBRATION.sampler.margin
    assert judge(Cheat(runner_up(margin / 2))).finding is None
    finding = judge(Cheat(runner_up(40 * margin))).finding
    assert finding is not None
    assert finding.reason is Reason.SAMPLER_MISMATCH


@pytest.mark.parametrize("at", [0, 1, 3])
def test_A18_an_end_that_was_not_sampled_is_found(at: int) -> None:
    def choose(scores: np.ndarray, _drafted: np.ndarray, place: int) -> int:
        return EOS if place == at else int(scores.argmax())

    finding = judge(Cheat(choose)).finding
    assert finding is not None
    assert finding.reason is Reason.SAMPLER_MISMATCH


def regraded(problem: Problem, row: Rollout, tokens: tuple[int, ...]) -> Rollout:
    engine = HashEngine(VERSION)
    grade = verify(problem, engine.decode(tokens))
    assert isinstance(grade, Graded)
    proofs = b"".join(
        build_proofs(
            engine._recompute(row.prompt_tokens, tokens).hidden_TH,
            chunk_tokens=RECIPE.proof.chunk_tokens,
            topk=RECIPE.proof.topk,
        )
    )
    return replace(row, completion_tokens=tokens, task_reward=grade.score, proofs=proofs)


def test_A18_a_completion_that_just_stops_is_fraud() -> None:
    problems = {problem.problem_id: problem for problem in RULES.task_set}
    rows = [
        regraded(problems[row.problem_id], row, row.completion_tokens[:1])
        for row in make_rollouts(make_ticket())
    ]
    finding = examine_rows(rows).finding
    assert finding is not None
    assert (finding.verdict, finding.reason) == (Verdict.FRAUD, Reason.WRONG_TERMINATION)


@pytest.mark.parametrize("behind", [1, 2, 8])
def test_A22_rollouts_of_an_older_policy_declared_fresh_are_found(behind: int) -> None:
    stale = make_rollouts(make_ticket(), PolicyVersion(VERSION + behind))
    finding = examine_rows(stale).finding
    assert finding is not None
    assert finding.reason is Reason.TOPLOC_MISMATCH
