"""A child process in which verifiers are tried before a run relies on them.

    python -c 'from muster.tasks.trial_process import main; main()'

It reads a JSON request per line, `{"problem"}` or `{"problem", "completion"}`, and answers one:
what the verifier says of the problem, or its grade, with the CPU time and the growth of memory that
it took. Verifiers are third parties' code: here they may hang, die or print without harm.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
from pathlib import Path
from typing import Any

MEMORY_BYTES = 6 << 30
"""Address space of the process; far beyond what is admitted, so that growth is measured."""


def main() -> None:
    """Serve until the standard input ends."""
    logging.disable(logging.CRITICAL)
    protocol = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        request = json.loads(line)
        protocol.write(json.dumps(_answer(request)) + "\n")
        protocol.flush()


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    from muster.tasks.problem import Problem

    problem = Problem.model_validate(request["problem"])
    if "completion" not in request:
        return _examined(problem)
    before, cpu_s = _peak_bytes(), _cpu_s()
    found = _graded(problem, request["completion"])
    return {**found, "cpu_s": _cpu_s() - cpu_s, "grown_bytes": _peak_bytes() - before}


def _examined(problem: Any) -> dict[str, Any]:
    """Return what is wrong with a problem, or which completion is right."""
    from muster.tasks.registry import verifier_of

    try:
        verifier = verifier_of(problem.task_type)
        verifier.check(problem)
        right = verifier.right_completion(problem)
    except Exception as error:  # a third party's code: what it raises is its answer
        return {"fault": f"{type(error).__name__}: {str(error)[:200]}"}
    return {"right": right, "is_replayable": verifier.is_replayable}


def _graded(problem: Any, completion: str) -> dict[str, Any]:
    from muster.tasks.grades import Undecided
    from muster.tasks.verifiers import verify

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
