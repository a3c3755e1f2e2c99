"""Judges: off unless a package and the recipe allow them; never proof of fraud."""

from importlib.metadata import EntryPoint

import pytest
from hypothesis import given, strategies as st

from muster.protocol.errors import TaskError
from muster.tasks import Graded, Problem, Undecided, check_task_set, judge, verify
from muster.tasks.hacks import hacks_for
from muster.tasks.judge import judge_prompt, load_judge, parse_score

PROBLEM = Problem(
    problem_id="a",
    task_type="llm_judgeable_groundtruth_similarity",
    prompt="Why is the sky blue?",
    gold_standard_solution="Rayleigh scattering.",
)


class ScriptedJudge:
    """A judge with a given reply."""

    def __init__(self, reply: str | OSError) -> None:
        self.reply = reply

    def ask(self, prompt: str) -> str:
        assert "Why is the sky blue?" in prompt
        if isinstance(self.reply, OSError):
            raise self.reply
        return self.reply


def install(monkeypatch: pytest.MonkeyPatch, reply: str | OSError) -> None:
    monkeypatch.setattr(judge, "installed_judge", lambda: ScriptedJudge(reply))


def test_judged_problems_are_not_admitted_by_default() -> None:
    with pytest.raises(TaskError, match="cannot be replayed"):
        check_task_set([PROBLEM])


def test_an_answer_is_judged_without_a_gold_one(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, '{"score": 40}')
    problem = PROBLEM.model_copy(
        update={"task_type": "llm_judgeable", "gold_standard_solution": None}
    )
    assert verify(problem, "Scattering.") == Graded(0.4)
    compared = verify(problem.model_copy(update={"task_type": PROBLEM.task_type}), "Scattering.")
    assert compared == Undecided("the problem has no gold standard to compare with")


def test_a_judge_without_gold_is_not_told_a_reference() -> None:
    assert "reference" not in judge_prompt("q", None, "a").lower()
    assert "Reference answer:\ng" in judge_prompt("q", "g", "a")


def test_without_a_judge_nothing_is_decided() -> None:
    assert isinstance(verify(PROBLEM, "Scattering."), Undecided)


def test_judged_score_is_not_repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, '{"score": 85}')
    found = verify(PROBLEM, "Scattering.")
    assert found == Graded(0.85)
    assert isinstance(found, Graded)
    assert not found.is_repeatable


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "85",
        '{"score": 101}',
        '{"score": -1}',
        '{"score": true}',
        '{"score": 1, "x": 2}',
        'Sure! {"score": 100}',
        '{"score": "100"}',
        "[" * 5000,
        '{"score": 1.5}',
    ],
)
def test_malformed_reply_decides_nothing(monkeypatch: pytest.MonkeyPatch, reply: str) -> None:
    install(monkeypatch, reply)
    assert isinstance(verify(PROBLEM, "Scattering."), Undecided)


def test_silent_judge_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, OSError("no route"))
    assert verify(PROBLEM, "Scattering.") == Undecided("the judge does not answer: no route")


def test_endless_answer_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, '{"score": 100}')
    assert verify(PROBLEM, "x" * 40_000) == Graded(0.0)


@given(st.text(max_size=80))
def test_answer_cannot_leave_its_marks(answer: str) -> None:
    prompt = judge_prompt("q", "g", answer)
    mark = prompt.split("lines ")[1][:64]
    assert prompt.count(mark) == 3
    assert mark not in answer


@pytest.mark.parametrize("hack", hacks_for(PROBLEM.task_type), ids=lambda hack: hack.name)
def test_forged_grades_are_no_replies_of_a_judge(hack: object) -> None:
    assert parse_score(getattr(hack, "completion", "")) is None


def test_one_judge_is_loaded_and_several_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("default", "types:SimpleNamespace", "muster.judges")
    assert load_judge([]) is None
    assert load_judge([point]) is not None
    absent = EntryPoint("model", "muster.inference.engine_judge:from_environment", "muster.judges")
    monkeypatch.delenv("MUSTER_JUDGE_MODEL", raising=False)
    assert load_judge([absent]) is None
    assert load_judge([absent, point]) is not None
    with pytest.raises(TaskError, match="several judges"):
        load_judge([point, point])
