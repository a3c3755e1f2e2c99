"""Environments answer any input, and the Python tool's replies depend little on the machine."""

import time
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from threading import Event

import pytest
from hypothesis import given, strategies as st

from muster.protocol.errors import TaskError
from muster.tasks import (
    Done,
    Environment,
    Graded,
    Problem,
    Reply,
    Undecided,
    code,
    dialogue_of,
    python_tool,
    registry,
    verify,
)
from muster.tasks.completions import MAX_PROGRAM_CHARS
from muster.tasks.given_up import GIVEN_UP
from muster.tasks.python_tool import (
    MAX_OUTPUT_CHARS,
    PYTHON_TOOL,
    check_tool,
    output_of,
    reply_with_output,
    run_program,
)
from muster.tasks.registry import VERIFIERS_GROUP, load_verifiers, verifier_of
from muster.tasks.sandbox import Level, SandboxUnavailable, shared_sandbox
from muster.tasks.verifier import Question, ask_all

PROBLEM = Problem(problem_id="p", task_type="exact_match_with_python", prompt="37*12=")
needs_sandbox = pytest.mark.skipif(
    shared_sandbox().sandbox is None, reason=shared_sandbox().description
)


def fenced(program: str) -> str:
    return f"Let me see.\n```python\n{program}\n```"


def run(program: str) -> str:
    """Return the output of a program in a fresh run."""
    return run_program(program)


def replied(program: str) -> str:
    """Return the tool's reply to a program."""
    reply = reply_with_output(PROBLEM, (fenced(program),))
    assert isinstance(reply, Reply)
    return reply.text


# The interface


@pytest.mark.parametrize(
    "turn",
    [
        lambda *_: 1 / 0,
        lambda *_: "text",
        lambda *_: None,
        lambda *_: Reply(""),
        lambda: None,
        lambda *_: Reply("x" * 65_537),
    ],
)
def test_an_environment_that_misbehaves_is_undecided(turn: Callable[..., object]) -> None:
    environment = Environment(turn, sources=())  # type: ignore[arg-type]
    assert isinstance(environment.answer(PROBLEM, ["?"]), Undecided)


def test_after_the_last_reply_the_next_turn_is_graded_unasked() -> None:
    environment = Environment(lambda *_: Reply("go on"), sources=(), max_replies=2)
    assert environment.answer(PROBLEM, ["a", "b"]) == Reply("go on")
    assert environment.answer(PROBLEM, ["a", "b", "c"]) == Done("c")


@pytest.mark.parametrize("parallel", [1, 3])
def test_answers_come_in_the_order_asked(parallel: int) -> None:
    echo = Environment(lambda _, said: Reply(said[-1]), sources=(), parallel=parallel)
    texts = [str(number) for number in range(40)]
    turns = ask_all([Question(echo, PROBLEM, (text,)) for text in texts])
    assert turns == [Reply(text) for text in texts]


@pytest.mark.parametrize("parallel", [1, 3])
def test_nothing_is_asked_for_work_that_was_given_up(parallel: int) -> None:
    asked = list[str]()

    def turn(_problem: Problem, said: tuple[str, ...]) -> Reply:
        asked.append(said[-1])
        return Reply("go on")

    environment = Environment(turn, sources=(), parallel=parallel)
    given_up, context = Event(), copy_context()
    given_up.set()
    context.run(GIVEN_UP.set, given_up)
    questions = [Question(environment, PROBLEM, ("?",))] * 4
    found = context.run(ask_all, questions)
    assert (found, asked) == ([Undecided("the work was given up")] * 4, [])
    assert ask_all(questions) == [Reply("go on")] * 4


def test_only_task_types_with_an_environment_have_a_dialogue() -> None:
    assert dialogue_of("exact_match") is None
    assert dialogue_of("nobody's") is None
    assert dialogue_of("verifiable_math_with_python") is PYTHON_TOOL
    plain, tooled = verifier_of("exact_match"), verifier_of("exact_match_with_python")
    assert plain.code_hash != tooled.code_hash
    assert tooled.name == "exact_match_with_python"


# The Python tool


@given(st.text())
def test_a_turn_without_a_program_is_the_answer(text: str) -> None:
    assert reply_with_output(PROBLEM, ("before", text)) == Done(text)


@pytest.mark.parametrize(
    "program",
    [
        "import time",
        "import math, os",
        "from datetime import date",
        "x = 1; import sys",
        "print(open('/etc/passwd'))",
        "print(id(3))",
        "().__class__",
        "__import__('o' + 's')",
        "eval('1')",
        "from random import SystemRandom",
        "exec('import time')",
        "import \uff54\uff49\uff4d\uff45",
        "print(\uff4fpen('/etc/passwd'))",
        "().__\uff43lass__",
        "()._\uff3fclass__",
        "import\\\ntime",
        "import math, \\\r\n os",
        "print(id\\\r(3))",
    ],
)
def test_programs_that_name_what_differs_are_not_run(program: str) -> None:
    reply = reply_with_output(PROBLEM, (fenced(program),))
    assert isinstance(reply, Reply)
    assert reply.is_repeatable
    assert "not run" in reply.text


@needs_sandbox
@pytest.mark.parametrize("letter", ["é", "²", "\U00031350"])
def test_letter_of_some_pythons_decides_nothing(letter: str) -> None:
    # Unicode gives Python 3.12 letters that 3.11 does not know, such as the last one.
    for named in ("id(1)", "import os", "().__class__"):
        assert "not run" in replied(f"# {letter}{named}")
    assert "not run" not in replied(f"# idé(1) {letter}opened(1)")


MARKS, LETTERS = "\u0301\u0316", "".join(map(chr, range(0x10000, 0x10000 + MAX_PROGRAM_CHARS)))


@pytest.mark.parametrize(
    "word",
    ["import ", "from", "import x\n", "id ", "id" + " " * 99, "import\\\n", MARKS, LETTERS],
    ids=range(8),
)
def test_any_program_is_read_in_no_time(word: str) -> None:
    program = word * (MAX_PROGRAM_CHARS // len(word))
    begun_s = time.process_time()
    assert not python_tool.may_differ(program)
    assert python_tool.may_differ(program + "\nimport a, os")
    assert time.process_time() - begun_s < 0.1


CALL = '{"name": "python", "arguments": {"code": "print(6 * 7)"}}'


@needs_sandbox
@pytest.mark.parametrize(
    "said",
    [
        f"Let me see. <tool_call>{CALL}</tool_call>",
        f"<think>{CALL}</think>\n<tool_call>\n{CALL}\n</tool_call>\n",
        f"<tool_call>{CALL.replace('6', '1')}</tool_call> and <tool_call>{CALL}</tool_call>",
        CALL.replace("arguments", "parameters"),
        f"[{CALL.replace('6', '1')}, {CALL}]",
        CALL.replace('{"code"', f'{{"x": {"[" * 90 + "]" * 90}, "code"'),
        CALL.replace("print", "1 # [[" + "[" * 200 + "\\nprint"),
    ],
)
def test_a_call_is_run_as_the_families_write_it(said: str) -> None:
    reply = reply_with_output(PROBLEM, (said,))
    assert isinstance(reply, Reply)
    assert "42" in reply.text
    assert not reply.is_repeatable


@pytest.mark.parametrize(
    "said",
    [
        f"<tool_call>{CALL}</tool_call></think> 42",
        f"<tool_call>{CALL.replace('python', 'shell')}</tool_call>",
        f"<tool_call>{CALL.replace('code', 'text')}</tool_call>",
        f"<tool_call>{CALL[:-1]}</tool_call>",
        f"<tool_call>{CALL}",
        f"It is {CALL}",
        '{"name": "python", "arguments": {"code": ["print(1)"]}}',
        '{"name": "python", "arguments": "print(1)"}',
        "[]",
        "[" * 100_000,
        CALL.replace('{"code"', f'{{"x": {"[" * 200 + "]" * 200}, "code"'),
        CALL.replace('{"code"', f'{{"y": "{"]" * 400}", "x": {"[" * 200 + "]" * 200}, "code"'),
        f'{{"name": "python", "arguments": {{"code": "{"x" * 65_537}"}}}}',
    ],
)
def test_what_is_no_call_of_the_tool_is_an_answer(said: str) -> None:
    assert reply_with_output(PROBLEM, (said,)) == Done(said)


@needs_sandbox
@pytest.mark.parametrize(
    ("program", "shown"),
    [
        ("print(37 * 12)", "444"),
        ("import math\nprint(math.comb(10, 3))", "120"),
        ("if __name__ == '__main__':\n    print('main')", "main"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("print('a')\nraise ValueError('b')", "a\nValueError: b"),
        ("print(input())", "EOFError: EOF when reading a line"),
        ("(", "SyntaxError: '(' was never closed (program.py, line 1)"),
        ("x = 1", "no output"),
        ("raise SystemExit(3)", "no output"),
        ("while True: pass", "stopped: too many steps"),
        ("print(1)\nwhile 1:\n  try:\n    while 1: 1\n  except BaseException: 1", None),
        ("print('x' * 5000)", "x" * MAX_OUTPUT_CHARS),
        ("print('\\ud800')", None),
    ],
)
def test_what_a_program_shows(program: str, shown: str | None) -> None:
    found = run(program)
    assert found == (shown or found)
    assert found == run(program)
    assert len(found) <= MAX_OUTPUT_CHARS


@needs_sandbox
def test_chance_and_hashes_are_seeded() -> None:
    program = "import random\nprint({'a', 'b', 'c', 'd'}, random.random(), hash('x'))"
    assert run(program) == run(program)


@needs_sandbox
def test_an_output_is_no_proof_of_fraud_and_stands_between_the_marks() -> None:
    marked = PROBLEM.model_copy(
        update={"verification_info": {"reply": {"before": "<out>", "after": "</out>"}}}
    )
    reply = reply_with_output(marked, ("first", fenced("print(1)")))
    assert reply == Reply("<out>1</out>", is_repeatable=False)


@needs_sandbox
def test_the_same_program_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    python_tool._remembered.cache_clear()
    first = output_of("print(1)")
    monkeypatch.setattr(python_tool, "shared_sandbox", lambda: Level(None, "gone", ()))
    assert output_of("print(1)") == first
    with pytest.raises(SandboxUnavailable):
        output_of("print(1)" + " " * python_tool.REMEMBERED_CHARS)


def test_without_a_sandbox_there_is_no_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    python_tool._remembered.cache_clear()
    for module in (code, python_tool):
        monkeypatch.setattr(module, "shared_sandbox", lambda: Level(None, "no bubblewrap"))
    with pytest.raises(SandboxUnavailable):
        output_of("print(1)")
    turn = reply_with_output(PROBLEM, (fenced("print(1)"),))
    assert isinstance(turn, Undecided)
    assert "no bubblewrap" in turn.reason
    with pytest.raises(TaskError, match="programs are not run here"):
        check_tool(PROBLEM)


@needs_sandbox
@pytest.mark.parametrize("reply", ["text", {"before": 3}, {"after": "x" * 1001}])
def test_marks_that_are_no_texts_are_refused(reply: object) -> None:
    problem = PROBLEM.model_copy(update={"verification_info": {"reply": reply}})
    with pytest.raises(TaskError, match="before and after"):
        check_tool(problem)
    assert isinstance(reply_with_output(problem, (fenced("import time"),)), Reply)
    check_tool(replace_marks({}))
    check_tool(replace_marks({"before": "a"}))


def replace_marks(reply: dict[str, str]) -> Problem:
    return PROBLEM.model_copy(update={"verification_info": {"reply": reply}})


def test_a_reply_is_a_value() -> None:
    assert replace(Reply("a"), is_repeatable=False) != Reply("a")


# A third party's environment

GUESS = """
from muster.tasks import Done, Environment, Graded, Reply, Verifier

def grade(problem, answer):
    return Graded(float(answer.strip() == problem.gold_standard_solution))

def hint(problem, said):
    guess, wanted = said[-1].strip(), problem.gold_standard_solution
    if not guess.isdecimal() or guess == wanted:
        return Done(guess)
    return Reply("low" if int(guess) < int(wanted) else "high")

HINTS = Environment(hint, sources=("guess_task",), max_replies=6)
VERIFIER = Verifier("guess", "1", grade, sources=("guess_task",), dialogue=HINTS)
"""


def test_a_package_brings_a_task_with_an_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "guess_task.py").write_text(GUESS)
    monkeypatch.syspath_prepend(tmp_path)
    point = EntryPoint("guess", "guess_task:VERIFIER", VERIFIERS_GROUP)
    known = load_verifiers([point])
    monkeypatch.setattr(registry, "installed_verifiers", lambda: known)
    problem = PROBLEM.model_copy(update={"task_type": "guess", "gold_standard_solution": "7"})
    environment = dialogue_of("guess")
    assert environment is not None
    turns = [environment.answer(problem, said) for said in (["3"], ["3", "9"], ["3", "9", "7"])]
    assert turns == [Reply("low"), Reply("high"), Done("7")]
    assert verify(problem, "7") == Graded(1.0)
    before = known["guess"].code_hash
    (tmp_path / "guess_task.py").write_text(GUESS.replace('"low"', '"too low"'))
    assert replace(known["guess"]).code_hash != before
