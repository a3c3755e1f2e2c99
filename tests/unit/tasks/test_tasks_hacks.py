"""Known hacks earn nothing: every one, against every verifier that it applies to."""

import pytest

from muster.tasks import Graded, Problem, registry, verify
from muster.tasks.hacks import Hack, all_hacks, hacks_for
from muster.tasks.sandbox import shared_sandbox

MATH = [("12", {}), ("\\frac{3}{4}", {}), ("2\\sqrt{2}", {}), ("B", {})]
CASES = [{"input": "1 2", "output": "123"}, {"input": "3 4", "output": "7 \u00bd"}]
CALLS = [
    {"fn_name": "solve", "input": [1, 2], "output": 123},
    {"fn_name": "solve", "input": [3, 4], "output": [7, "x"]},
]
PROBLEMS = {
    "verifiable_math": [(gold, info) for gold, info in MATH],
    "verifiable_code": [(None, {"test_cases": CASES}), (None, {"test_cases": CALLS})],
    "exact_match": [("1237", {})],
    "code_output_prediction": [("[1, 2]", {}), ('{"output": "abc"}', {})],
}
APPLICABLE = [(kind, hack) for kind in PROBLEMS for hack in hacks_for(kind)]


def problems(task_type: str) -> list[Problem]:
    return [
        Problem(
            problem_id="a",
            task_type=task_type,
            prompt="?",
            gold_standard_solution=gold,
            verification_info={**info, "time_limit_s": 1} if "test_cases" in info else info,
        )
        for gold, info in PROBLEMS[task_type]
    ]


def test_corpus_covers_what_is_known() -> None:
    assert len(all_hacks()) >= 70
    assert len({(hack.name, hack.task_types) for hack in all_hacks()}) == len(all_hacks())
    assert {hack.kind for hack in all_hacks()} == {
        "extractor",
        "candidates",
        "runner",
        "early exit",
        "printing",
        "hard-coded",
        "look-alike",
        "injection",
        "resources",
    }
    named = {task_type for hack in all_hacks() for task_type in hack.task_types}
    assert named <= registry.installed_verifiers().keys()


def test_other_task_types_are_met_with_hacks_of_any_kind_of_answer() -> None:
    assert {hack.kind for hack in hacks_for("somebody's")} == {"injection", "look-alike"}


def test_gold_is_shown_in_the_hack() -> None:
    hack = Hack("n", (), "extractor", "it is {gold}")
    math, code = problems("verifiable_math")[0], problems("verifiable_code")[0]
    assert (hack.against(math), hack.against(code)) == ("it is 12", "it is 123")


@pytest.mark.parametrize(
    ("task_type", "hack"), APPLICABLE, ids=lambda v: v.name if isinstance(v, Hack) else v
)
def test_hack_earns_nothing(task_type: str, hack: Hack) -> None:
    if task_type == "verifiable_code" and shared_sandbox().sandbox is None:
        pytest.skip(shared_sandbox().description)
    for problem in problems(task_type):
        assert verify(problem, hack.against(problem)) == Graded(0.0)
