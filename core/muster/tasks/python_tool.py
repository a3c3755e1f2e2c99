"""The Python tool: a turn's last program is run, and its output is the reply.

A program is a fenced block, or the argument of a call in the form that chat templates teach
(`[prompt] tools`). A turn without a program is the last. Each program runs alone in its own
sandbox, without input. docs/tasks.md lists what makes honest machines agree on an output; none of
it is a proof, so no reply with an output is repeatable.
"""

import re
from dataclasses import replace
from functools import lru_cache
from typing import Any
from unicodedata import normalize

from muster.protocol.errors import TaskError
from muster.tasks.code import LANGUAGES, python_of_sandbox, require_sandbox
from muster.tasks.completions import last_block, last_call
from muster.tasks.problem import Problem
from muster.tasks.sandbox import Limits, SandboxJob, SandboxUnavailable, TestRun, shared_sandbox
from muster.tasks.verifier import Done, Environment, Reply, Turn, Undecided, Verifier

NAME, ARGUMENT = "python", "code"
"""Names of the tool and of its argument in a call."""
FUNCTION: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Runs a Python program and returns what it prints.",
        "parameters": {
            "type": "object",
            "properties": {ARGUMENT: {"type": "string", "description": "The program."}},
            "required": [ARGUMENT],
        },
    },
}
"""The tool's description for chat templates, as JSON Schema."""

MAX_STEPS = 1_000_000
"""Most bytecode instructions that a program may execute: some tenths of a second. It is stopped at
the same instruction on every machine."""
MAX_OUTPUT_CHARS = 1_000
"""Most characters of an output that are shown."""
REMEMBERED_CHARS = 4096
"""Most characters of a program whose output is cached: hostile programs must not fill the
memory."""
MAX_REPLIES = 4
"""Most programs in one completion."""
BEFORE, AFTER = "\n```output\n", "\n```\n"
"""Marks around an output, unless the problem's `verification_info.reply` has `before` and
`after`."""
MAX_MARK_CHARS = 1_000
"""Most characters of a mark."""

LIMITS = Limits(cpu_s=2, wall_s=10.0, total_s=15.0)
"""Limits in addition to the steps, which do not count code that runs in C."""

# Clocks, randomness, addresses, the machine: these would differ between two honest runs. ASCII,
# because Pythons know different letters; atomic, so that a line with many imports is read once.
_DIFFERS = re.compile(
    r"^(?>.*?\b(?:import|from)\b).*\b(?:time|datetime|timeit|calendar|secrets|uuid|tempfile|threading|"
    r"_thread|multiprocessing|subprocess|asyncio|concurrent|signal|select|os|posix|sys|sysconfig|"
    r"platform|socket|pathlib|shutil|glob|resource|psutil|ctypes|tracemalloc|gc|inspect|importlib|"
    r"builtins|traceback|weakref|io|locale|getpass|pwd|logging|warnings|faulthandler|SystemRandom)"
    r"\b|\b(?:open|id|exec|eval|compile|getattr|vars|globals|locals|dir|breakpoint|SystemRandom)"
    r"\s*\(|__(?!name__|main__|init__|str__|repr__)",
    re.ASCII | re.MULTILINE,
)
_CONTINUED = re.compile(r"\\(?:\r\n?|\n)")
"""The end of a line that Python joins with the next."""

_HARNESS = """
import os, sys
def _run(source, left):
    def trace(frame, event, argument):
        nonlocal left
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        left -= 1
        if left < 0:
            print("stopped: too many steps", flush=True)
            os._exit(0)
        return trace
    try:
        program = compile(source, "program.py", "exec")
        sys.settrace(trace)
        exec(program, {{"__name__": "__main__"}})
    except SystemExit:
        pass
    except BaseException as error:
        sys.settrace(None)
        print(f"{{type(error).__name__}}: {{error}}")
    finally:
        sys.settrace(None)
_run({source!r}, {steps})
"""


def reply_with_output(problem: Problem, said: tuple[str, ...]) -> Turn:
    """Return the output of the last turn's program between the problem's marks; Done without one.

    Deterministic as far as the sandbox is; never raises for any text.
    """
    program = last_block(said[-1], LANGUAGES)
    if program is None:
        program = last_call(said[-1], NAME, ARGUMENT)
    if program is None:
        return Done(said[-1])
    before, after = _marks(problem)
    if may_differ(program):
        shown = "not run: its output could differ from machine to machine"
        return Reply(f"{before}{shown}{after}")
    try:
        return Reply(f"{before}{output_of(program)}{after}", is_repeatable=False)
    except SandboxUnavailable as error:
        return Undecided(f"programs are not run here: {error}", is_disturbance=True)


def may_differ(program: str) -> bool:
    """Return whether a program's text names, as Python reads it, what differs between machines."""
    # Python takes a wide "o" for an "o". Each letter by itself: to normalise a text takes time that
    # grows with the square of its length, and together no letters become ASCII.
    letters = {letter: normalize("NFKC", letter) for letter in set(program) if letter > "\x7f"}
    plain = {ord(a): b for a, b in letters.items() if b.isascii() and b.isidentifier()}
    return _DIFFERS.search(_CONTINUED.sub(" ", program.translate(plain))) is not None


def output_of(program: str) -> str:
    """Return a program's shown output, cut at MAX_OUTPUT_CHARS; raises SandboxUnavailable.

    Samples of one problem often have the same program, so the output of a short one is cached.
    """
    return _remembered(program) if len(program) <= REMEMBERED_CHARS else run_program(program)


@lru_cache(maxsize=4096)
def _remembered(program: str) -> str:
    return run_program(program)


def run_program(program: str) -> str:
    """Return what `output_of` does, but always run the program."""
    level = shared_sandbox()
    if level.sandbox is None:
        raise SandboxUnavailable(level.reason)
    try:
        program.encode()
    except UnicodeEncodeError:
        return "not run: the program is no text"
    source = _HARNESS.format(source=program, steps=MAX_STEPS)
    outcome = level.sandbox.run(SandboxJob(source, ("",)), LIMITS)
    return _shown(outcome.tests[0])


def _shown(run: TestRun | None) -> str:
    if run is None or run.ended in ("signal", "deadline"):
        return "stopped: it took too long"
    text = run.out.decode(errors="replace").rstrip()
    return text[:MAX_OUTPUT_CHARS] or "no output"


def _marks(problem: Problem) -> tuple[str, str]:
    marks = problem.verification_info.get("reply")
    given = marks if isinstance(marks, dict) else {}
    before, after = given.get("before", BEFORE), given.get("after", AFTER)
    return (before, after) if _are_marks(before, after) else (BEFORE, AFTER)


def _are_marks(*marks: Any) -> bool:
    return all(isinstance(mark, str) and len(mark) <= MAX_MARK_CHARS for mark in marks)


def check_tool(problem: Problem) -> None:
    """Raise TaskError unless the marks are texts, and programs can be run here."""
    marks = problem.verification_info.get("reply", {})
    if not isinstance(marks, dict) or not _are_marks(*marks.values()):
        raise TaskError(
            f"problem {problem.problem_id!r}: verification_info.reply has the texts before and "
            f"after, of at most {MAX_MARK_CHARS} characters"
        )
    require_sandbox()


PYTHON_TOOL = Environment(
    turn=reply_with_output,
    sources=(
        __name__,
        "muster.tasks.code",
        "muster.tasks.verifier",
        "muster.tasks.completions",
        "muster.tasks.sandbox",
    ),
    machine=python_of_sandbox,
    max_replies=MAX_REPLIES,
    parallel=2,
)
"""The environment that runs programs."""


def with_python(verifier: Verifier) -> Verifier:
    """Return the verifier with the Python tool: it grades the last turn in the same way."""

    def check(problem: Problem) -> None:
        verifier.check(problem)
        check_tool(problem)

    return replace(verifier, name=f"{verifier.name}_with_python", check=check, dialogue=PYTHON_TOOL)
