"""Programs and predicted outputs: right, malformed, and undecided answers."""

import json
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from muster.protocol.errors import TaskError
from muster.tasks import Grade, Graded, Problem, Undecided, check_task_set, code, verify
from muster.tasks.code import python_of_sandbox, read_tests
from muster.tasks.completions import MAX_PROGRAM_CHARS, are_equal, last_block
from muster.tasks.output_prediction import MAX_LITERAL_CHARS, parse_literal
from muster.tasks.sandbox import (
    Level,
    Limits,
    Sandbox,
    SandboxJob,
    SandboxUnavailable,
    shared_sandbox,
)

SUMS = [
    {"type": "stdin_stdout", "input": "1 2\n", "output": "3\n"},
    {"type": "stdin_stdout", "input": "5 5\n", "output": "10\n"},
]
CALLS = [
    {"type": "function_call", "fn_name": "add", "input": [1, 2], "output": 3},
    {"type": "function_call", "fn_name": "add", "input": [[1], [2]], "output": [1, 2]},
]
ADD = "a, b = map(int, input().split())\nprint(a + b)"


@pytest.fixture(scope="module")
def level() -> Level:
    found = shared_sandbox()
    if found.sandbox is None:
        pytest.skip(found.description)
    return found


def problem(cases: Any = SUMS, gold: str | None = ADD, **info: Any) -> Problem:
    return Problem(
        problem_id="a",
        task_type="verifiable_code",
        prompt="Add two numbers.",
        gold_standard_solution=gold,
        verification_info={"language": "python", "test_cases": cases, **info},
    )


def fenced(program: str) -> str:
    return f"Here:\n```python\n{program}\n```\nThat is it."


def grade(program: str, cases: Any = SUMS, **info: Any) -> Grade:
    return verify(problem(cases, **info), fenced(program))


@pytest.mark.parametrize(
    ("program", "score"),
    [
        (ADD, 1.0),
        (f"{ADD}\nprint()\nprint()", 1.0),
        (ADD.replace("print(a + b)", "print(a + b, end='  ')"), 1.0),
        (ADD.replace("a + b", "a - b"), 0.0),
        (ADD.replace("a + b", "' ', a + b"), 0.0),
        ("print(3)", 0.0),
        (f"{ADD}\nraise ValueError", 0.0),
        (f"{ADD}\nimport sys\nsys.exit(1)", 0.0),
        ("import sys\nsys.stdout.buffer.write(b'\\xff')", 0.0),
        ("this is no Python", 0.0),
        ("", 0.0),
    ],
)
def test_program_is_graded_by_its_output(level: Level, program: str, score: float) -> None:
    assert grade(program) == Graded(score)


@pytest.mark.parametrize(
    ("program", "score"),
    [
        ("def add(a, b): return a + b", 1.0),
        ("class Solution:\n def add(self, a, b): return a + b", 1.0),
        ("def add(a, b): return tuple(a + b) if isinstance(a, list) else a + b", 1.0),
        ("def add(a, b): return 3", 0.0),
        ("def add(a, b): return str(a + b)", 0.0),
        ("def add(a, b): return {a + b}", 0.0),
        ("def plus(a, b): return a + b", 0.0),
        ("def add(a, b): exit(0)", 0.0),
        ("def add(a, b): print(a + b)", 0.0),
    ],
)
def test_function_is_graded_by_its_value(level: Level, program: str, score: float) -> None:
    assert grade(program, CALLS) == Graded(score)


def test_fraction_of_tests_is_given_where_the_problem_says_so(level: Level) -> None:
    assert grade("print(3)", score="fraction") == Graded(0.5)
    assert grade("print(3)") == Graded(0.0)
    assert grade(ADD, score="fraction") == Graded(1.0)


@pytest.mark.parametrize(
    "program",
    [
        ADD,
        "print(3)",
        "print(",
        "import sys\nprint(3 if sys.version_info[2] % 2 else 4)",
        "try:\n    bytearray(500 << 20)\nexcept MemoryError:\n    print(3)",
        "while True: print('1' * 1000)",
        "import os\nos.kill(os.getppid(), 9)",
        "while True: pass",
    ],
)
def test_grade_of_a_program_proves_nothing_about_other_machines(level: Level, program: str) -> None:
    found = grade(program, time_limit_s=1)
    assert isinstance(found, Graded)
    assert not found.is_repeatable


@pytest.mark.parametrize("answer", ["print(3)", "```rust\nfn main() {}\n```", "```python\n3\n"])
def test_answer_without_a_program_is_wrong_on_every_machine(level: Level, answer: str) -> None:
    found = verify(problem(), answer)
    assert found == Graded(0.0)
    assert isinstance(found, Graded)
    assert found.is_repeatable


def test_detail_says_what_failed(level: Level) -> None:
    found = grade("print(3)")
    assert isinstance(found, Graded)
    assert found.detail == "test 1 failed: wrong output"


@pytest.mark.parametrize("gold", [ADD, fenced(ADD), None])
def test_well_formed_problem_is_admitted(level: Level, gold: str | None) -> None:
    check_task_set([problem(gold=gold)])
    check_task_set([problem(CALLS, gold=None)])


@pytest.mark.parametrize(
    ("info", "reason"),
    [
        ({"test_cases": []}, "1 to 256 test_cases"),
        ({"test_cases": SUMS * 200}, "1 to 256 test_cases"),
        ({"test_cases": None}, "1 to 256 test_cases"),
        ({"test_cases": [1]}, "object with input and output"),
        ({"test_cases": [{"input": ""}]}, "object with input and output"),
        ({"test_cases": [*SUMS, *CALLS]}, "call one function"),
        ({"test_cases": [{"input": 1, "output": "1"}]}, "inputs are text"),
        ({"test_cases": [{"fn_name": "f", "input": 1, "output": 1}]}, "argument lists"),
        ({"test_cases": [{"fn_name": 1, "input": [], "output": 1}]}, "call one function"),
        ({"test_cases": [{"input": "", "output": 1}]}, "are text"),
        ({"test_cases": [{"input": "1", "output": " "}]}, "any program passes"),
        ({"language": "rust"}, "only Python"),
        ({"time_limit_s": 0}, "from 1 to 30"),
        ({"time_limit_s": 1.5}, "from 1 to 30"),
        ({"time_limit_s": 31}, "from 1 to 30"),
        ({"score": "generous"}, "'binary' or 'fraction'"),
    ],
)
def test_malformed_problem_is_not_admitted(info: dict[str, Any], reason: str) -> None:
    malformed = problem(**{"cases": info.pop("test_cases", SUMS), **info})
    with pytest.raises(TaskError, match=reason):
        check_task_set([malformed])


def test_problem_whose_gold_program_fails_is_not_admitted(level: Level) -> None:
    with pytest.raises(TaskError, match="its gold standard must be"):
        check_task_set([problem(gold="print(3)")])


def test_programs_are_refused_without_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "shared_sandbox", lambda: Level(None, "no namespaces"))
    found = grade(ADD)
    assert found == Undecided("programs are not run here: no namespaces")
    assert isinstance(found, Undecided)
    assert found.is_disturbance
    with pytest.raises(TaskError, match="not run here"):
        check_task_set([problem()])
    assert verify(problem(), "no program") == Graded(0.0)


def test_sandbox_that_fails_is_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def run(self, *_: Any) -> Any:
            raise SandboxUnavailable("no more processes")

    monkeypatch.setattr(code, "shared_sandbox", lambda: Level(Broken()))  # type: ignore[arg-type]
    assert grade(ADD) == Undecided("no more processes")


@pytest.mark.parametrize("refused", ["bubblewrap", "unshare", "mount"])
def test_machine_that_refuses_namespaces_or_mounts_is_disturbed(
    level: Level, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """The probe found both allowed, so a refusal now says nothing about answers."""
    assert level.sandbox is not None
    tools = level.sandbox.tools
    unshare, mount, place = tools.mounting or ("", "", "")
    if refused != "bubblewrap" and not place:
        pytest.skip("nothing is mounted here")
    if refused == "bubblewrap":
        tools = replace(tools, bubblewrap="/bin/false")
    elif refused == "unshare":
        tools = replace(tools, mounting=("/bin/false", mount, place))
    else:
        tools = replace(tools, mounting=(unshare, "/bin/false", place))
    monkeypatch.setattr(code, "shared_sandbox", lambda: Level(Sandbox(tools)))
    for program in (ADD, "print(3)"):
        found = grade(program)
        assert isinstance(found, Undecided)
        assert found.is_disturbance


def test_expected_outputs_never_enter_the_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Spy:
        def run(self, job: Any, *_: Any) -> Any:
            seen.append(job)
            raise SandboxUnavailable("spied")

    monkeypatch.setattr(code, "shared_sandbox", lambda: Level(Spy()))  # type: ignore[arg-type]
    grade("print()", [{"input": "given", "output": "expected"}])
    assert "given" in repr(seen)
    assert "expected" not in repr(seen)


def test_verifier_is_of_the_python_that_runs_programs() -> None:
    assert python_of_sandbox().startswith(("programs: python 3.", "no sandbox"))
    assert read_tests(problem(CALLS)).function == "add"


# Fences


@pytest.mark.parametrize(
    ("completion", "block"),
    [
        ("```python\nx\n```", "x\n"),
        ("```\nx\n```", "x\n"),
        ("``` py \nx\n```  ", "x\n"),
        ("```python\nx\n```\n```python\ny\n```", "y\n"),
        ("```python\nx\n```\n```text\ny\n```", None),
        ("```python\nx\n```\n```python\ny", None),
        ("<think>\n```python\nx\n```\n</think>", None),
        ("```python\n```", ""),
        ("x ```python x```", None),
        ("```python\n" + "x" * (MAX_PROGRAM_CHARS + 1) + "\n```", None),
        ("", None),
    ],
)
def test_program_is_the_last_closed_block(completion: str, block: str | None) -> None:
    assert last_block(completion, code.LANGUAGES) == block


BLANKS = " " * 500_000


@pytest.mark.parametrize("long", [f"{BLANKS}!", f"```{BLANKS}!", f"{BLANKS}```py{BLANKS}!"])
def test_blanks_around_a_fence_take_no_time(long: str) -> None:
    begun_s = time.process_time()
    assert last_block(f"```\nx\n```\n{long}", code.LANGUAGES) == "x\n"
    assert code.right_completion(problem(gold=long)) == f"```python\n{long}\n```"
    assert time.process_time() - begun_s < 0.2


@given(st.text(alphabet="`\npython x", max_size=40))
def test_reading_fences_is_total(text: str) -> None:
    assert isinstance(last_block(text, code.LANGUAGES), str | None)


# Literals

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@given(VALUES)
def test_values_are_read_from_json_and_python(value: Any) -> None:
    assert are_equal(parse_literal(json.dumps(value)), value)
    assert are_equal(parse_literal(repr(value)), value)


@given(VALUES, VALUES)
def test_equality_of_values_is_that_of_their_json(one: Any, other: Any) -> None:
    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert are_equal(one, other) is same is are_equal(other, one)


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (1, 1.0, True),
        (True, 1, False),
        (0, False, False),
        (0.1 + 0.2, 0.3, True),
        (0.3, 0.31, False),
        (10**400, 1e308, False),
        (10**400, 10**400, True),
        (float("nan"), float("nan"), False),
        ("1", 1, False),
        ([1, 2], [2, 1], False),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        (None, False, False),
    ],
)
def test_values_are_compared_strictly(one: Any, other: Any, equal: bool) -> None:
    assert are_equal(one, other) is are_equal(other, one) is equal


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "f()",
        "[" * 51 + "]" * 51,
        "--" * 60 + "1",
        "~" * 60 + "1",
        "1" * (MAX_LITERAL_CHARS + 1),
        "1" * 5000,
        "{1, 2}",
        "b'x'",
        "{1: 2}",
        "1 + 1j",
        "__import__('os')",
        "[1,",
    ],
)
def test_what_is_no_literal_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_literal(text)


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ('```json\n{"output": [1, "a"]}\n```', 1.0),
        ("I think that\n[1, 'a']", 1.0),
        ("{'output': (1, 'a')}", 1.0),
        ('[1, "b"]', 0.0),
        ('{"result": [1, "a"]}', 0.0),
        ('```json\n[1, "a"]', 0.0),
    ],
)
@pytest.mark.parametrize("gold", ['[1, "a"]', '{"output": [1, "a"]}'])
def test_predicted_output_is_compared(completion: str, score: float, gold: str) -> None:
    row = prediction(gold)
    check_task_set([row])
    assert verify(row, completion) == Graded(score)


HIDDEN = '["' + "]" * 4000 + '", ' + "[" * 4000 + "]" * 4001
"""Deep brackets behind a text that seems to close them."""


@pytest.mark.parametrize(
    ("literal", "is_repeatable"),
    [("1", True), ("[" * 51, True), ("-+" * 8000 + "1", False), (HIDDEN, False)],
)
def test_wrong_literal_is_no_proof_where_a_parsers_limit_decided(
    literal: str, is_repeatable: bool
) -> None:
    found = verify(prediction("2"), literal)
    assert found == Graded(0.0)
    assert isinstance(found, Graded)
    assert found.is_repeatable is is_repeatable


def prediction(gold: str | None) -> Problem:
    return Problem(
        problem_id="a",
        task_type="code_output_prediction",
        prompt="What does it print?",
        gold_standard_solution=gold,
    )


@pytest.mark.parametrize("gold", [None, "x = 1"])
def test_prediction_without_expected_value_is_not_admitted(gold: str | None) -> None:
    with pytest.raises(TaskError):
        check_task_set([prediction(gold)])
    assert isinstance(verify(prediction(gold), "1"), Undecided)


@pytest.mark.parametrize(("failures", "expected"), [(1, 1.0), (2, None)])
def test_machine_that_ends_a_program_tries_once_more_and_judges_nobody(
    monkeypatch: pytest.MonkeyPatch, failures: int, expected: float | None
) -> None:
    run, walls = Sandbox.run, []

    def fail(self: Sandbox, job: SandboxJob, limits: Limits, judge: Any = None) -> Any:
        outcome = run(self, job, limits, judge)  # the judge has seen it
        walls.append(limits.wall_s)
        if len(walls) <= failures:
            raise SandboxUnavailable("this machine was too busy")
        return outcome

    if shared_sandbox().sandbox is None:
        pytest.skip(shared_sandbox().description)
    monkeypatch.setattr(Sandbox, "run", fail)
    cases = [{"type": "stdin_stdout", "input": str(n), "output": str(n)} for n in (1, 2)]
    row = Problem(
        problem_id="a",
        task_type="verifiable_code",
        prompt="?",
        verification_info={"test_cases": cases},
    )
    found = verify(row, "```python\nprint(input())\n```")
    assert walls == [10.0, 40.0]
    if expected is None:
        assert isinstance(found, Undecided)
        assert found.is_disturbance
    else:
        assert found == Graded(expected)
