"""A model's folder as a judge: the same reply every time, proven like a rollout."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from inference_policy import EOS
from worlds.judge_world import LIMITS

from muster.inference.engine_judge import (
    MAX_REPLY_TOKENS,
    MODEL_VARIABLE,
    EngineJudge,
    Opinion,
    from_environment,
    seed_of,
)
from muster.inference.transformers_engine import TransformersEngine
from muster.protocol.ids import PolicyVersion

QUESTION = "3172="
Change = Callable[[Opinion], Opinion]


@pytest.fixture
def judge(engine: TransformersEngine) -> EngineJudge:
    return EngineJudge(engine)


def test_a_judge_says_the_same_however_it_is_asked(judge: EngineJudge) -> None:
    alone = judge.opinions([QUESTION])[0]
    among = judge.opinions(["8=", QUESTION, "90="])[1]
    assert alone == among
    assert judge.ask(QUESTION) == alone.text
    assert seed_of(QUESTION) != seed_of("3173=")


def test_who_has_the_model_confirms_an_opinion(judge: EngineJudge, policy_folder: Path) -> None:
    opinion = judge.opinions([QUESTION])[0]
    another = TransformersEngine()
    another.load_policy(policy_folder, PolicyVersion(3))
    assert EngineJudge(another).fault_of(QUESTION, opinion, LIMITS) == ""


def other_token(opinion: Opinion) -> Opinion:
    first = (opinion.tokens[0] + 1) % 10
    return replace(opinion, tokens=(first, *opinion.tokens[1:]), text=f"{first}{opinion.text[1:]}")


def other_text(opinion: Opinion) -> Opinion:
    return replace(opinion, text='{"score": 100}')


def without_its_end(opinion: Opinion) -> Opinion:
    return replace(opinion, tokens=opinion.tokens[:-1])


def with_more(opinion: Opinion) -> Opinion:
    return replace(opinion, tokens=(*opinion.tokens, EOS))


def without_proofs(opinion: Opinion) -> Opinion:
    return replace(opinion, proofs=())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (other_token, "seed|hidden states"),
        (other_text, "the text is not that of the tokens"),
        (without_its_end, "ends elsewhere"),
        (with_more, "ends elsewhere"),
        (without_proofs, "its proofs"),
    ],
)
def test_an_altered_opinion_is_refused(judge: EngineJudge, change: Change, why: str) -> None:
    opinion = judge.opinions([QUESTION])[0]
    assert opinion.tokens[-1] == EOS
    assert len(opinion.tokens) < MAX_REPLY_TOKENS
    assert re.search(why, judge.fault_of(QUESTION, change(opinion), LIMITS))


def test_another_model_s_opinion_is_refused(judge: EngineJudge, sibling_folder: Path) -> None:
    other = TransformersEngine()
    other.load_policy(sibling_folder, PolicyVersion(0))
    opinion = EngineJudge(other).opinions([QUESTION])[0]
    assert "not of this model" in judge.fault_of(QUESTION, opinion, LIMITS)


def test_an_opinion_on_another_question_is_refused(judge: EngineJudge) -> None:
    opinion = judge.opinions([QUESTION])[0]
    assert judge.fault_of("3173=", opinion, LIMITS)


def test_the_environment_names_the_judge(
    monkeypatch: pytest.MonkeyPatch, policy_folder: Path, judge: EngineJudge
) -> None:
    monkeypatch.delenv(MODEL_VARIABLE, raising=False)
    assert from_environment() is None
    monkeypatch.setenv(MODEL_VARIABLE, str(policy_folder))
    named = from_environment()
    assert named is not None
    assert named.ask(QUESTION) == judge.ask(QUESTION)
