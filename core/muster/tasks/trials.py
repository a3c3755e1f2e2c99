"""Verifiers tried in two processes whose hashes of text differ, each answer with a deadline.

A process reads a JSON request per line, `{"problem"}` or `{"problem", "completion"}`, and answers
one: what the verifier says of the problem, or its grade, with the CPU time and the growth of memory
that it took. Verifiers are third parties' code: there they may hang, die or print without harm.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from muster.lifecycle import limit_memory
from muster.tasks.children import Child, ChildEnded, ChildSilent, own_stdout, say
from muster.tasks.problem import Problem
from muster.tasks.registry import verifier_of, verify
from muster.tasks.verifier import Undecided

DEADLINE_S = 60.0
"""Clock time of one answer, engines and sandbox started included; beyond it, it hangs."""
HASH_SEEDS = ("0", "1")
"""PYTHONHASHSEED of the two: the order of sets of text differs."""


_STATEMENT = "from muster.tasks.trials import main; main()"


class Hangs(Exception):
    """A verifier gave no answer in time, or its process died."""


class TrialProcess:
    """One process, started again after it hung."""

    def __init__(self, hash_seed: str, deadline_s: float) -> None:
        self._hash_seed, self._deadline_s = hash_seed, deadline_s
        self._child: Child | None = None

    def send(self, problem: Problem, completion: str | None = None) -> None:
        """Ask for a grade, or, without a completion, what the verifier says of the problem."""
        request: dict[str, Any] = {"problem": problem.model_dump()}
        if completion is not None:
            request["completion"] = completion
        if self._child is None:
            self._child = Child(_STATEMENT, hash_seed=self._hash_seed, has_group=True)
        with suppress(OSError):
            self._child.send(request)

    def receive(self) -> dict[str, Any]:
        """Return the answer; raises Hangs, and the next request starts a new process."""
        assert self._child is not None
        try:
            return self._child.receive(time.monotonic() + self._deadline_s)
        except ChildSilent as error:
            self.close()
            has_died = isinstance(error, ChildEnded)
            late = f"no answer within {self._deadline_s:g} s"
            raise Hangs("the process of the verifier died" if has_died else late) from None

    def close(self) -> None:
        """Kill the process and what it started."""
        child, self._child = self._child, None
        if child is not None:
            child.close()


@contextmanager
def trial_processes(deadline_s: float = DEADLINE_S) -> Iterator[list[TrialProcess]]:
    """Yield the two processes; they are gone afterwards."""
    processes = [TrialProcess(seed, deadline_s) for seed in HASH_SEEDS]
    try:
        yield processes
    finally:
        for process in processes:
            process.close()


# What runs in the process


MEMORY_BYTES = 6 << 30
"""Address space of the process; far beyond what is admitted, so that growth is measured."""


def main() -> None:
    """Serve until the standard input ends."""
    answers = own_stdout()
    limit_memory(MEMORY_BYTES)
    for line in sys.stdin:
        say(answers, _answer(json.loads(line)))


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    problem = Problem.model_validate(request["problem"])
    if "completion" not in request:
        return _examined(problem)
    before, cpu_s = _peak_bytes(), _cpu_s()
    found = _graded(problem, request["completion"])
    return {**found, "cpu_s": _cpu_s() - cpu_s, "grown_bytes": _peak_bytes() - before}


def _examined(problem: Problem) -> dict[str, Any]:
    """Return what is wrong with a problem, or which completion is right."""
    try:
        verifier = verifier_of(problem.task_type)
        verifier.check(problem)
        right = verifier.right_completion(problem)
    except Exception as error:  # a third party's code: what it raises is its answer
        return {"fault": f"{type(error).__name__}: {str(error)[:200]}"}
    return {"right": right, "is_replayable": verifier.is_replayable}


def _graded(problem: Problem, completion: str) -> dict[str, Any]:
    grade = verify(problem, completion)
    if isinstance(grade, Undecided):
        return {"undecided": grade.reason[:200]}
    return {"score": grade.score, "is_repeatable": grade.is_repeatable}


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def _peak_bytes() -> int:
    """Return the peak of resident memory; getrusage would count the parent's before the start."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    (peak,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(peak.split()[1]) * 1024
