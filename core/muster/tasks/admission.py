"""Admission: whether a run may rely on a task set and its verifiers.

 1. every row is read: well formed, ids different, a verifier installed
 2. a sample, from end to end, is tried in two processes: the verifier finds the problem well
    formed, the gold answer scores 1, junk scores 0
 3. known hacks are tried on some problems of each task type: none may score on two different gold
    answers
 4. the two processes and a second grading must agree, and time and memory must stay in bounds

Errors of a task set or a verifier are never raised here: they become reasons to refuse.

The two processes have different hash seeds and a deadline for each answer: verifiers are
third-party code, which may hang, die or print there without harm. A process reads one JSON request
per line, `{"problem"}` or `{"problem", "completion"}`, and answers one line: the verifier's check
of the problem, or its grade, with the CPU time and the growth of memory.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from muster.lifecycle import limit_memory
from muster.protocol.errors import EncodingError, TaskError
from muster.tasks.children import Child, ChildEnded, ChildSilent, own_stdout, say
from muster.tasks.hacks import hacks_for
from muster.tasks.problem import Problem
from muster.tasks.registry import JUNK_ANSWER, installed_verifiers, verifier_of, verify
from muster.tasks.task_set import TaskSet
from muster.tasks.verifier import Undecided

MAX_CPU_S = 10.0
"""CPU time of one grading in seconds, including the start of a sandbox or an engine."""
MAX_GROWTH_BYTES = 1 << 30
"""Most bytes that one grading may add to a process's peak memory."""
JUNK = (JUNK_ANSWER, "", " \n\t", "\u202e\u0000\ufeff", "?" * 50_000)
"""Answers that every verifier must score 0."""
MOST_NAMED = 5
"""Most problems that are listed per reason."""
HANGS_BORNE = 3
"""Hangs after which the trial ends, because each takes a whole deadline."""
DEADLINE_S = 60.0
"""Wall-clock time of one answer, including the start of engines and sandbox; beyond it, it counts
as a hang."""
HASH_SEEDS = ("0", "1")
"""PYTHONHASHSEED of the two processes, so that the order of sets of text differs."""

Progress = Callable[[int, int], None]
"""Called with the number of rows read or problems tried, and the total."""


@dataclass(slots=True)
class Objection:
    """One reason to refuse."""

    count: int = 0
    """Number of occurrences."""
    problem_ids: list[str] = field(default_factory=list)
    """The first problems with it."""
    detail: str = ""
    """The finding at the first of them."""


@dataclass(slots=True)
class Admission:
    """The findings about a task set."""

    problems: int
    """Problems in the set."""
    tried: int = 0
    """Problems that were graded."""
    gradings: int = 0
    """Gradings in both processes."""
    hacks: int = 0
    """Gradings of known hacks."""
    without_gold: int = 0
    """Tried problems without a known right answer; only junk answers could be tried on them."""
    task_types: Counter[str] = field(default_factory=Counter)
    """Problems by task type."""
    offences: dict[str, Objection] = field(default_factory=dict)
    """Reasons to refuse; empty when the set is admitted."""

    @property
    def is_admitted(self) -> bool:
        """Whether there is no reason to refuse."""
        return not self.offences

    def refuse(self, reason: str, problem_id: str, detail: str) -> None:
        """Record a reason to refuse."""
        offence = self.offences.setdefault(reason, Objection(detail=detail[:300]))
        offence.count += 1
        if len(offence.problem_ids) < MOST_NAMED:
            offence.problem_ids.append(problem_id)

    def summary(self) -> str:
        """Return the reasons in one sentence."""
        return "; ".join(
            f"{reason} ({o.count}x, first {o.problem_ids[0]!r}: {o.detail})"
            for reason, o in self.offences.items()
        )


@dataclass(frozen=True, slots=True)
class Trial:
    """Extent of a trial."""

    sample: int = 256
    """Problems that are graded, spread over the set."""
    hacked: int = 4
    """Problems of each task type that hacks are tried on."""
    allows_judge: bool = False
    """Whether grades that cannot be replayed are accepted."""
    deadline_s: float = DEADLINE_S
    """Wall-clock time of one grading."""


def admit(
    task_set: TaskSet,
    trial: Trial | None = None,
    on_progress: Progress = lambda _done, _of: None,
) -> Admission:
    """Read a whole task set and try its problems; return the findings."""
    trial = trial or Trial()
    found = Admission(len(task_set))
    chosen = set(task_set.spread(trial.sample))
    work = len(task_set) + len(chosen)
    problems = list(_read_rows(task_set, chosen, found, lambda done: on_progress(done, work)))
    with trial_processes(trial.deadline_s) as processes:
        examiner = _Examiner(processes, trial, found)
        for number, problem in enumerate(problems):
            examiner.try_problem(problem)
            on_progress(len(task_set) + number + 1, work)
            if examiner.hangs >= HANGS_BORNE:
                break
        examiner.judge_hacks()
    return found


def _read_rows(
    task_set: TaskSet, chosen: set[int], found: Admission, on_progress: Callable[[int], None]
) -> Iterator[Problem]:
    """Read every row; yield the chosen ones that can be tried."""
    seen: set[str] = set()
    known = installed_verifiers()
    for index in range(len(task_set)):
        if index % 1000 == 0:
            on_progress(index)
        try:
            problem = task_set[index]
        except (EncodingError, TaskError) as error:
            found.refuse("malformed row", f"row {index + 1}", str(error))
            continue
        found.task_types[problem.task_type] += 1
        if problem.problem_id in seen:
            found.refuse("duplicate id", problem.problem_id, "another problem has this id")
        seen.add(problem.problem_id)
        if problem.task_type not in known:
            part = task_set.part_at(index)
            detail = f"no verifier for task type {problem.task_type!r} is installed"
            detail += f", of part {part!r}" if part else ""
            found.refuse("no verifier", problem.problem_id, detail)
        elif index in chosen:
            yield problem


class _Examiner:
    """Tries problems, and records the findings."""

    def __init__(self, processes: list[TrialProcess], trial: Trial, found: Admission) -> None:
        self._processes, self._trial, self._found = processes, trial, found
        self._hacked: Counter[str] = Counter()
        self._fooled: dict[tuple[str, str], dict[str, str]] = {}
        self.hangs = 0
        """How often a verifier hung."""

    def try_problem(self, problem: Problem) -> None:
        """Grade a problem's gold answer, junk, and the hacks if it is among the first."""
        self._found.tried += 1
        said = self._ask(problem, None)
        if said is None:
            return
        if "fault" in said:
            self._found.refuse("malformed problem", problem.problem_id, said["fault"])
            return
        if not (said["is_replayable"] or self._trial.allows_judge):
            detail = "validators cannot replay its grades; `allows_judge = true` takes it"
            self._found.refuse("not replayable", problem.problem_id, detail)
            return
        right = said["right"]
        self._found.without_gold += right is None
        # Twice: some verifiers give another grade the second time.
        expected = [] if right is None else [(right, 1.0, "gold does not score 1")] * 2
        expected += [(junk, 0.0, "junk scores") for junk in JUNK if junk != right]
        before = self.hangs
        for completion, score, reason in expected:
            self._expect(problem, completion, score, reason)
            if self.hangs > before:
                return
        self._try_hacks(problem, right)

    def _expect(self, problem: Problem, completion: str, score: float, reason: str) -> None:
        said = self._grade(problem, completion)
        if said is not None and said.get("score") != score:
            shown = said.get("score", f"undecided: {said.get('undecided')}")
            self._found.refuse(reason, problem.problem_id, f"{completion[:40]!r}: {shown}")

    def _try_hacks(self, problem: Problem, right: str | None) -> None:
        self._hacked[problem.task_type] += 1
        if self._hacked[problem.task_type] > self._trial.hacked:
            return
        for hack in hacks_for(problem.task_type):
            completion = hack.against(problem)
            if completion == right or self.hangs >= HANGS_BORNE:
                continue
            self._found.hacks += 1
            said = self._grade(problem, completion)
            if said is not None and said.get("score"):
                fooled = self._fooled.setdefault((problem.task_type, hack.name), {})
                fooled.setdefault(right or problem.problem_id, problem.problem_id)

    def judge_hacks(self) -> None:
        """Refuse verifiers on which a hack scored; an answer that happens to be right once is no
        hack.

        A set whose tried problems all have the same answer cannot show the difference, and is
        refused.
        """
        for (task_type, name), fooled in self._fooled.items():
            tried = min(self._hacked[task_type], self._trial.hacked)
            if len(fooled) > 1 or tried == 1:
                for problem_id in fooled.values():
                    self._found.refuse("a known hack scores", problem_id, name)

    def _grade(self, problem: Problem, completion: str) -> dict[str, Any] | None:
        """Return the grade, or None without a valid one; record costs and disagreement."""
        self._found.gradings += len(self._processes)
        said = self._ask(problem, completion)
        if said is None:
            return None
        if said["cpu_s"] > MAX_CPU_S:
            detail = f"{said['cpu_s']:.1f} s of CPU time, {MAX_CPU_S:g} are allowed"
            self._found.refuse("too slow", problem.problem_id, detail)
        if said["grown_bytes"] > MAX_GROWTH_BYTES:
            detail = f"{said['grown_bytes'] >> 20} MiB, {MAX_GROWTH_BYTES >> 20} are allowed"
            self._found.refuse("too much memory", problem.problem_id, detail)
        return said

    def _ask(self, problem: Problem, completion: str | None) -> dict[str, Any] | None:
        """Return the answer of both processes; None if they disagree or one hangs."""
        try:
            for process in self._processes:
                process.send(problem, completion)
            one, other = (process.receive() for process in self._processes)
        except Hangs as error:
            for process in self._processes:
                process.close()
            self.hangs += 1
            self._found.refuse("hangs", problem.problem_id, str(error))
            return None
        # A limit that only one of them met says something of this machine, not of the problem.
        if len({_decided(one), _decided(other)} - {"limit"}) > 1:
            detail = f"{(completion or '')[:40]!r}: {_decided(one)} and {_decided(other)}"
            self._found.refuse("two processes disagree", problem.problem_id, detail)
            return None
        for measure in ("cpu_s", "grown_bytes"):
            if measure in one:
                one[measure] = max(one[measure], other[measure])
        return one


def _decided(said: dict[str, Any]) -> Any:
    """Return what must be equal on every machine; nothing if a limit decided."""
    if "cpu_s" not in said:
        return said.get("right"), said.get("fault")
    return said.get("score", "undecided") if said.get("is_repeatable", True) else "limit"


# -------------------------------------------------------------- the two processes

_STATEMENT = "from muster.tasks.admission import main; main()"


def _passed() -> list[str]:
    """Return the variables that verifiers of packages may need, none of Muster's secrets."""
    return [name for name in os.environ if not name.startswith("MUSTER_")] + ["MUSTER_JUDGE_MODEL"]


class Hangs(Exception):
    """A verifier gave no answer in time, or its process died."""


class TrialProcess:
    """One process, started again after it hung."""

    def __init__(self, hash_seed: str, deadline_s: float) -> None:
        self._hash_seed, self._deadline_s = hash_seed, deadline_s
        self._child: Child | None = None

    def send(self, problem: Problem, completion: str | None = None) -> None:
        """Request a grade, or without a completion the verifier's check of the problem."""
        request: dict[str, Any] = {"problem": problem.model_dump()}
        if completion is not None:
            request["completion"] = completion
        if self._child is None:
            self._child = Child(
                _STATEMENT, hash_seed=self._hash_seed, has_group=True, also_passed=_passed()
            )
        with suppress(OSError):
            self._child.send(request)

    def receive(self) -> dict[str, Any]:
        """Return the answer; raises Hangs, after which the next request starts a new process."""
        assert self._child is not None
        try:
            return self._child.receive(time.monotonic() + self._deadline_s)
        except ChildSilent as error:
            self.close()
            has_died = isinstance(error, ChildEnded)
            late = f"no answer within {self._deadline_s:g} s"
            raise Hangs("the process of the verifier died" if has_died else late) from None

    def close(self) -> None:
        """Kill the process and its children."""
        child, self._child = self._child, None
        if child is not None:
            child.close()


@contextmanager
def trial_processes(deadline_s: float = DEADLINE_S) -> Iterator[list[TrialProcess]]:
    """Yield the two processes, and end them afterwards."""
    processes = [TrialProcess(seed, deadline_s) for seed in HASH_SEEDS]
    try:
        yield processes
    finally:
        for process in processes:
            process.close()


# Code that runs in the process


MEMORY_BYTES = 6 << 30
"""Address space of the process, far above the admitted growth, so that growth can be measured."""


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
    """Return a problem's fault, or its right completion."""
    try:
        verifier = verifier_of(problem.task_type)
        verifier.check(problem)
        right = verifier.right_completion(problem)
    except Exception as error:  # third-party code: its exception is its answer
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
    """Return the peak of resident memory; getrusage would include the parent's before the start."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    (peak,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(peak.split()[1]) * 1024
