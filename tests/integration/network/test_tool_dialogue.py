"""A tiny model that calls the Python tool: the real engine and sandbox, and cheating twins."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from one_submission import CALIBRATION, judge, recipe, ticket

from muster.client.validator.judging import Judgement, Rules
from muster.client.worker.generation import play_ticket
from muster.inference import Request
from muster.inference.transformers_engine import TransformersEngine
from muster.protocol.ids import PolicyVersion
from muster.protocol.messages import Reason, Verdict
from muster.protocol.recipe import ProofRecipe
from muster.protocol.rollouts import Rollout
from muster.tasks import python_tool
from muster.tasks.sandbox import shared_sandbox
from muster.trainer.base_model import LESSONS, WarmStart, build_base_model

pytestmark = pytest.mark.skipif(
    shared_sandbox().sandbox is None, reason=shared_sandbox().description
)
LIMIT = 24
RECIPE = recipe(problems=4, samples=8, limit=LIMIT)


@dataclass(frozen=True)
class Stage:
    """A worker's rows, and a validator's engine."""

    engine: TransformersEngine
    rules: Rules
    rows: list[Rollout]

    def judge(self, rows: list[Rollout]) -> Judgement:
        return judge(rows, ticket(0), self.rules, self.engine)

    def with_tokens(self, number: int, tokens: tuple[int, ...], **changes: object) -> list[Rollout]:
        """Return the rows, one of them with other tokens that are honestly proven."""
        row = self.rows[number]
        (proofs,) = self.engine.prove([(row.prompt_tokens, tokens)], proof=ProofRecipe())
        changed = replace(row, completion_tokens=tokens, proofs=b"".join(proofs), **changes)  # type: ignore[arg-type]
        return [changed if i == number else each for i, each in enumerate(self.rows)]

    @property
    def answered(self) -> int:
        """Number of a row whose tool answered, and that has room for more."""
        return next(
            i
            for i, row in enumerate(self.rows)
            if row.replies and len(row.completion_tokens) < LIMIT - 2
        )


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("model")
    lesson = LESSONS["calculator"]
    warm_start = WarmStart(steps=80, batch=64)
    build_base_model(folder, seed=0, lesson=lesson, warm_start=warm_start)
    tasks, _ = lesson.split(32, 4, 0)
    threads = torch.get_num_threads()
    engine = TransformersEngine()
    engine.load_policy(folder, PolicyVersion(0))
    rows = play_ticket(ticket(0), RECIPE, tasks, engine).graded()
    yield Stage(engine, Rules(RECIPE, tasks, CALIBRATION), rows)
    torch.set_num_threads(threads)


def found(judgement: Judgement) -> tuple[Verdict, Reason]:
    assert judgement.finding is not None
    return judgement.finding.verdict, judgement.finding.reason


def test_calls_of_the_tool_are_accepted(stage: Stage) -> None:
    judgement = stage.judge(stage.rows)
    assert judgement.finding is None
    assert any(row.replies for row in stage.rows)
    assert any(not row.replies for row in stage.rows)
    assert judgement.units == sum(row.sampled for row in stage.rows)
    row = stage.rows[stage.answered]
    start, end = row.replies[0]
    assert stage.engine.decode(row.completion_tokens[start:end]).startswith("\n```output\n")


def test_an_altered_output_is_rejected(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    # The model goes on from the worker's made-up tokens, and is sampled honestly.
    with monkeypatch.context() as lying:
        lying.setattr(python_tool, "output_of", lambda _: "4321")
        rows = play_ticket(ticket(0), RECIPE, stage.rules.task_set, stage.engine).graded()
    assert any(row.replies for row in rows)
    # A program's output is never proof of fraud: docs/decisions/0025-several-turns.md.
    assert found(stage.judge(rows)) == (Verdict.REJECTED, Reason.WRONG_REPLY)


def test_a_call_that_is_not_answered_is_rejected(stage: Stage) -> None:
    number = stage.answered
    row = stage.rows[number]
    silent = stage.with_tokens(number, row.completion_tokens[: row.replies[0][0]], replies=())
    assert found(stage.judge(silent)) == (Verdict.REJECTED, Reason.WRONG_REPLY)


def test_a_turn_too_many_is_fraud(stage: Stage) -> None:
    number = next(i for i, row in enumerate(stage.rows) if len(row.completion_tokens) < 12)
    row = stage.rows[number]
    said = (*row.prompt_tokens, *row.completion_tokens)
    place = len(row.completion_tokens)
    request = Request(said, row.sampling_seed, 1.0, LIMIT - place, place)
    (more,) = stage.engine.generate([request], proof=RECIPE.proof)
    longer = stage.with_tokens(number, (*row.completion_tokens, *more.tokens))
    assert found(stage.judge(longer)) == (Verdict.FRAUD, Reason.WRONG_TERMINATION)


def test_an_output_that_the_model_writes_itself_is_no_reply(stage: Stage) -> None:
    number = next(i for i, row in enumerate(stage.rows) if not row.replies)
    encode = stage.engine.encode
    (eos,) = stage.engine.eos_token_ids
    text = encode("12\n```output\n444\n```\n444")
    pretended = stage.with_tokens(number, (*text, eos), task_reward=0.0)
    claimed = stage.with_tokens(number, (*text, eos), task_reward=0.0, replies=((2, 7),))
    assert found(stage.judge(pretended))[1] == Reason.SAMPLER_MISMATCH
    assert found(stage.judge(claimed)) == (Verdict.FRAUD, Reason.WRONG_REPLY)
