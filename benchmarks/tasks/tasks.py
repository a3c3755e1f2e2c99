"""The cost of grading: exact math, math-verify under hostile answers, sandboxed programs; and the
cost of sets of a million problems (`task_sets.py`).

`make bench-tasks`. Exact math is counted per second of CPU time of one core. math-verify runs in
two processes under a flood in which every third answer is hostile; sandboxed programs run two at a
time. Both are counted per second of CPU time of two cores, all processes included, because other
work on the machine does not change that much; by the clock they are in the detail.
"""

import ctypes
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from unittest import mock

import psutil
from benchmarks.report import machine, print_table, write
from benchmarks.tasks import task_sets

from muster.tasks import Graded, Problem, verify, verify_all
from muster.tasks.math import engine, verifier
from muster.tasks.sandbox import shared_sandbox

EXACT = [
    ("42", "so we get \\boxed{42}", 1.0),
    ("\\frac{3}{4}", "The answer is $\\boxed{0.75}$.", 1.0),
    ("1000000", "Therefore the answer is \\boxed{1,000,000}.", 1.0),
    ("-17", "x = -18, that is \\boxed{-18}", 0.0),
    ("\\frac{1}{3}", "hence \\boxed{\\frac{2}{6}}", 1.0),
    ("0.125", "\\boxed{\\frac{1}{8}}", 1.0),
]
HONEST = [
    ("2\\sqrt{2}", "\\sqrt{8}", 1.0),
    ("x+1", "1+x", 1.0),
    ("\\frac{\\sqrt{3}}{2}", "\\sqrt{3}/2", 1.0),
    ("6\\pi", "3\\pi\\cdot 2", 1.0),
    ("3\\sqrt{2}", "2\\sqrt{3}", 0.0),
    ("\\frac{a+b}{2}", "\\frac{a}{2}+\\frac{b}{2}", 1.0),
    ("y=2x+1", "2x+1=y", 1.0),
    ("1+\\sqrt{5}", "1-\\sqrt{5}", 0.0),
    ("\\pi", "3.14159265", 0.0),
    ("(1,\\sqrt{2})", "(1,2^{1/2})", 1.0),
]
HOSTILE = [
    "9^9^9^9",
    "9^{9^{9^{9}}}",
    "10^{10^{10}}",
    "(10^9)!",
    "99999999!",
    "9" * 500,
    "(" * 200 + "1" + ")" * 200,
    "\\frac{1}{" * 50 + "2" + "}" * 50,
    "(x+1)^{100000}",
    "\\sum_{n=1}^{1000000000} n",
    "\\int_0^1 \\sin(x^x) dx",
    "e^{e^{e^{e^{e}}}}",
    "(x+y+z+w)^{30}",
    "1+" + "\\sqrt{x}+" * 55 + "1",
    "\\tan(\\tan(\\tan(10^{50})))",
    "200!^{30}",
    "9999999^{5000}",
    "\\sqrt[5000]{3}",
]
REPEATS = 3
CPU, CLOCK = 0, 1
CORES = 2
PR_SET_CHILD_SUBREAPER = 36


SUMS = [{"input": f"{n} {n}\n", "output": f"{2 * n}\n"} for n in range(5)]
ADD = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"


def main() -> None:
    """Measure, print a table and write `results/tasks.json`."""
    # Orphans of bubblewrap are then reaped, and counted, by this process.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    level = shared_sandbox()
    math_rates = [_math_verify() for _ in range(REPEATS)]
    program_rates = [_sandbox() if level.sandbox else (0.0, 0.0) for _ in range(REPEATS)]
    found = {
        "exact_math_per_s": _median(_exact_math),
        "math_verify_per_s": _median_of(math_rates, CPU),
        "sandbox_execs_per_s": _median_of(program_rates, CPU),
        "math_latest_s": _latest(),
    }
    sets = task_sets.measure()
    found |= {
        "import_1m_s": sets["import"]["cpu_s"],
        "import_1m_rss_mb": sets["import"]["rss_mb"],
        "open_1m_s": sets["open"]["cpu_s"],
        "sample_ticket_ms": sets["sample"]["median_ms"],
    }
    must = {"exact_math_per_s": ">= 50,000", "math_verify_per_s": ">= 200"}
    must |= {"sandbox_execs_per_s": ">= 20", "math_latest_s": "<= 0.5"}
    must |= {"import_1m_s": "<= 60", "import_1m_rss_mb": "<= 1,000", "open_1m_s": "-"}
    must |= {"sample_ticket_ms": "<= 5"}
    rows = [[key, f"{value:,.3g}", must[key]] for key, value in found.items()]
    print_table("Grading, and sets of 1,000,000 problems", ["figure", "measured", "to reach"], rows)
    load = os.getloadavg()[0]
    detail = {
        "sandbox": level.description,
        "repeats": REPEATS,
        "load_average": load,
        "task_sets": sets,
        "math_verify_per_s_by_the_clock": _median_of(math_rates, CLOCK),
        "sandbox_execs_per_s_by_the_clock": _median_of(program_rates, CLOCK),
    }
    write("tasks", found, detail, measured_on=machine())


def _median(measure: Callable[[], float]) -> float:
    return statistics.median(measure() for _ in range(REPEATS))


def _median_of(rates: Sequence[tuple[float, float]], which: int) -> float:
    return statistics.median(rate[which] for rate in rates)


def _cpu_s() -> float:
    """Return the CPU time of this process and all that it started, ended or not."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return math.fsum(t.user + t.system + t.children_user + t.children_system for t in times)


def _problem(gold: str) -> Problem:
    return Problem(
        problem_id="a", task_type="verifiable_math", prompt="?", gold_standard_solution=gold
    )


def _exact_math() -> float:
    """Return verdicts per second of CPU time on numerals."""
    cases = [(_problem(gold), completion) for gold, completion, _ in EXACT]
    for (problem, completion), (_, _, score) in zip(cases, EXACT, strict=True):
        assert verify(problem, completion) == Graded(score)
    count, started = 0, time.process_time()
    while (spent := time.process_time() - started) < 0.5:
        for problem, completion in cases:
            verify(problem, completion)
        count += len(cases)
    return count / spent


def _flood(count: int) -> list[tuple[Problem, str, float]]:
    """Return answers of which each is another text, every third a hostile one."""
    found = []
    for i in range(count):
        gold, answer, score = HONEST[i % len(HONEST)]
        if i % 3 == 2:
            answer, score = HOSTILE[i // 3 % len(HOSTILE)], 0.0
        found.append((_problem(gold), f"\\boxed{{{answer}}}", score))
    return found


def _math_verify(count: int = 900) -> tuple[float, float]:
    """Return verdicts of two processes under the flood, as `_sandbox` returns them."""
    two = engine.Engine(2)
    shared = mock.patch.object(verifier, "shared_engine", return_value=two)
    with shared, ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda _: two.ask({"pairs": [("x", "x")]}), range(2)))
        flood = _flood(count)
        started, spent_before = time.monotonic(), _cpu_s()
        grades = list(threads.map(lambda case: verify(case[0], case[1]), flood))
        spent, cpu_s = time.monotonic() - started, _cpu_s() - spent_before
    two.close()
    wrong = [c for c, g in zip(flood, grades, strict=True) if g != Graded(c[2])]
    assert not wrong, wrong[:3]
    return CORES * count / cpu_s, count / spent


def _sandbox(count: int = 60) -> tuple[float, float]:
    """Return graded answers, two at a time, per second of two cores and by the clock.

    Each runs a program on five inputs.
    """
    problem = Problem(
        problem_id="a",
        task_type="verifiable_code",
        prompt="?",
        verification_info={"test_cases": SUMS},
    )
    started, spent_before = time.monotonic(), _cpu_s()
    grades = verify_all([(problem, ADD)] * count)
    spent, cpu_s = time.monotonic() - started, _cpu_s() - spent_before
    assert all(grade == Graded(1.0) for grade in grades), grades[:2]
    return CORES * count / cpu_s, count / spent


def _latest(count: int = 24) -> float:
    """Return by how much the latest verdict exceeds its deadline when every answer meets it."""
    hard = [("1", "e^{e^{e^{e^{e^{e}}}}}")]
    engine.DEADLINE_S, before = 0.5, engine.DEADLINE_S
    engine.CPU_S, cpu_before = 60.0, engine.CPU_S
    two = engine.Engine(2)

    def late_by(pairs: Sequence[tuple[str, str]]) -> float:
        started = time.monotonic()
        with suppress(engine.EngineUnavailable):
            two.ask({"pairs": list(pairs)})
        return time.monotonic() - started - engine.DEADLINE_S

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda _: two.ask({"pairs": [("x", "x")]}), range(2)))
        found = list(threads.map(late_by, [hard] * count))
    two.close()
    engine.DEADLINE_S, engine.CPU_S = before, cpu_before
    return max(0.0, *found)


if __name__ == "__main__":
    main()
