"""The code verifier: Python programs against tests, in the sandbox.

`verification_info` of a problem holds `{"language": "python", "test_cases": [...]}`. A test is
`{"type": "stdin_stdout", "input": text, "output": text}` or
`{"type": "function_call", "fn_name": name, "input": [arguments], "output": value}`. All tests of an
answer run in one start of the sandbox; the expected outputs stay outside.

No grade of a program that ran is repeatable: memory, the mathematical library, the Python build, a
limit of time or what the program asks of its machine may decide it, and no list of such programs is
complete.
"""

import json
from dataclasses import dataclass, replace
from typing import Any

from muster.protocol.errors import TaskError
from muster.tasks.completions import are_equal, last_block
from muster.tasks.problem import Problem
from muster.tasks.sandbox import (
    Limits,
    Outcome,
    Sandbox,
    SandboxJob,
    SandboxUnavailable,
    TestRun,
    shared_sandbox,
)
from muster.tasks.sandbox.command import find_tools
from muster.tasks.verifier import Grade, Graded, Undecided, Verifier

MAX_TESTS = 256
"""Most tests of a problem."""
MAX_CPU_S = 30
"""Most CPU seconds that a problem may allow a test; the default is that of Limits."""
PATIENCE = (1, 4)
"""Factor on wall-clock limits in a retry, if this machine ended a program, for example because it
was busy."""
LANGUAGES = frozenset({"", "python", "py", "python3"})
"""Languages that a fence may name."""


@dataclass(frozen=True, slots=True)
class Tests:
    """The tests of a problem."""

    __test__ = False

    function: str | None
    """The function they call; None when they use standard input."""
    inputs: tuple[Any, ...]
    """Texts, or lists of arguments."""
    outputs: tuple[Any, ...]
    """Texts, or values; never given to a sandbox."""
    limits: Limits
    """Limits of a program."""
    is_fraction: bool
    """Whether the score is the share of tests passed instead of all or nothing."""


def grade_code(problem: Problem, completion: str) -> Grade:
    """Return 1 when the last fenced program passes all tests, else 0.

    With `"score": "fraction"` in the problem's `verification_info`, the share that it passes.
    """
    try:
        tests = read_tests(problem)
    except TaskError as error:
        return Undecided(str(error))
    program = last_block(completion, LANGUAGES)
    if program is None:
        return Graded(0.0, "there is no closed fenced block of Python")
    level = shared_sandbox()
    if level.sandbox is None:
        return Undecided(f"programs are not run here: {level.reason}", is_disturbance=True)
    try:
        program.encode()
    except UnicodeEncodeError:
        return Graded(0.0, "the program is no text")
    trouble = ""
    for patience in PATIENCE:
        try:
            return _run(level.sandbox, program, tests, patience)
        except SandboxUnavailable as error:
            trouble = str(error)
    return Undecided(trouble, is_disturbance=True)


def _run(sandbox: Sandbox, program: str, tests: Tests, patience: int) -> Graded:
    given = tests.limits
    limits = replace(given, wall_s=given.wall_s * patience, total_s=given.total_s * patience)
    passed: list[bool] = []

    def judge(number: int, test: TestRun) -> bool:
        """Record whether a test passed; return whether further tests still matter."""
        is_right = test.ended == "exit" and test.status == 0 and _is_right(tests, number, test.out)
        passed.append(is_right)
        return is_right or tests.is_fraction

    outcome = sandbox.run(SandboxJob(program, tests.inputs, tests.function), limits, judge)
    return _grade(tests, sum(passed), outcome)


def _is_right(tests: Tests, number: int, out: bytes) -> bool:
    expected = tests.outputs[number]
    try:
        if tests.function is None:
            return _lines(out.decode()) == _lines(expected)
        return are_equal(json.loads(out), expected)
    except (ValueError, RecursionError):
        return False


def _lines(text: str) -> list[str]:
    """Return the lines without trailing blanks and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _grade(tests: Tests, passed: int, outcome: Outcome) -> Graded:
    count = len(tests.inputs)
    detail = f"{passed} of {count} tests passed" if tests.is_fraction else ""
    if passed < count and not tests.is_fraction:
        failed = next((t for t in reversed(outcome.tests) if t is not None), None)
        detail = f"test {passed} failed: " + (_failure(failed) if failed else outcome.ended)
    score = passed / count if tests.is_fraction else float(passed == count)
    return Graded(score, detail, is_repeatable=False)


def _failure(test: TestRun) -> str:
    if test.ended == "exit":
        return "wrong output" if test.status == 0 else f"exit status {test.status}"
    return f"signal {-test.status}" if test.ended == "signal" else f"too much {test.ended}"


def read_tests(problem: Problem) -> Tests:
    """Return a problem's tests; raises TaskError naming what is malformed."""
    info, where = problem.verification_info, f"problem {problem.problem_id!r}"
    if info.get("language", "python") not in LANGUAGES:
        raise TaskError(f"{where} is in {info['language']!r}; only Python programs are graded")
    cases = info.get("test_cases")
    if not isinstance(cases, list) or not 1 <= len(cases) <= MAX_TESTS:
        raise TaskError(f"{where} needs 1 to {MAX_TESTS} test_cases in its verification_info")
    if any(not isinstance(case, dict) or not {"input", "output"} <= case.keys() for case in cases):
        raise TaskError(f"{where}: each test case is an object with input and output")
    names = {case.get("fn_name") for case in cases}
    function = names.pop()
    if names or not (function is None or isinstance(function, str)):
        raise TaskError(f"{where}: all test cases call one function, or none does")
    kind = str if function is None else list
    if not all(isinstance(case["input"], kind) for case in cases):
        raise TaskError(f"{where}: inputs are {'text' if function is None else 'argument lists'}")
    if function is None and not all(isinstance(case["output"], str) for case in cases):
        raise TaskError(f"{where}: expected outputs on standard output are text")
    return Tests(
        function,
        tuple(case["input"] for case in cases),
        tuple(case["output"] for case in cases),
        _limits(info.get("time_limit_s"), where),
        info.get("score", "binary") == "fraction",
    )


def _limits(cpu_s: object, where: str) -> Limits:
    if cpu_s is None:
        return Limits()
    if type(cpu_s) is not int or not 1 <= cpu_s <= MAX_CPU_S:
        raise TaskError(f"{where}: time_limit_s is a whole number from 1 to {MAX_CPU_S}")
    return replace(Limits(), cpu_s=cpu_s, wall_s=2.5 * cpu_s, total_s=max(60.0, 2.5 * cpu_s))


def check_code(problem: Problem) -> None:
    """Raise TaskError unless the tests are well formed, expect some output, and can run here."""
    tests = read_tests(problem)
    if problem.verification_info.get("score", "binary") not in ("binary", "fraction"):
        raise TaskError(f"problem {problem.problem_id!r}: score is 'binary' or 'fraction'")
    if tests.function is None and not any(output.strip() for output in tests.outputs):
        raise TaskError(f"problem {problem.problem_id!r} expects no output: any program passes")
    require_sandbox()


def require_sandbox() -> None:
    """Raise TaskError unless programs can be run here."""
    level = shared_sandbox()
    if level.sandbox is None:
        raise TaskError(
            f"programs are not run here: {level.reason}",
            hint="docs/tasks.md says what the sandbox needs",
        )


def right_completion(problem: Problem) -> str | None:
    """Return a completion that holds the gold program, fenced unless it is already."""
    gold = problem.gold_standard_solution
    if gold is None or last_block(gold, LANGUAGES) is not None:
        return gold
    return f"```python\n{gold}\n```"


def python_of_sandbox() -> str:
    """Return the version of the Python that runs programs: another version may run them
    differently.
    """
    found = find_tools()
    return "no sandbox" if isinstance(found, str) else f"programs: python {found[0].python_version}"


VERIFIER = Verifier(
    name="code",
    version="3",
    grade=grade_code,
    check=check_code,
    right_completion=right_completion,
    # The whole sandbox: its command line, filter and limits determine what a program can do.
    sources=(__name__, "muster.tasks.completions", "muster.tasks.sandbox"),
    machine=python_of_sandbox,
    parallel=2,
    runs_programs=True,
)
"""The verifier of the task type `verifiable_code`."""
