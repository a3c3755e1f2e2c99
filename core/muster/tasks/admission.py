"""Admission: whether a run may rely on a task set and its verifiers.

 1. every row is read: well formed, ids different, a verifier installed
 2. a sample, from end to end, is tried in two processes: the verifier finds the problem well
    formed, the gold answer scores 1, junk scores 0
 3. some of each task type meet the known hacks: none scores on two different gold answers
 4. the two processes, and a second grading, agree; time and memory stay in bounds

Nothing that a task set or a verifier does raises out of here: it becomes a reason to refuse.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from muster.protocol.errors import EncodingError, TaskError
from muster.tasks.hacks import hacks_for
from muster.tasks.problem import Problem
from muster.tasks.registry import JUNK_ANSWER, installed_verifiers
from muster.tasks.task_set import TaskSet
from muster.tasks.trials import DEADLINE_S, Hangs, TrialProcess, trial_processes

MAX_CPU_S = 10.0
"""CPU time of one grading; a sandbox or an engine that is started with it included."""
MAX_GROWTH_BYTES = 1 << 30
"""Memory that one grading may add to a process's peak."""
JUNK = (JUNK_ANSWER, "", " \n\t", "\u202e\u0000\ufeff", "?" * 50_000)
"""What no verifier may score above 0."""
MOST_NAMED = 5
"""Problems that are named per reason."""
HANGS_BORNE = 3
"""After so many hangs the trial ends: every one costs its deadline."""

Progress = Callable[[int, int], None]
"""Told how many rows are read or problems tried, of how many."""


@dataclass(slots=True)
class Objection:
    """One reason to refuse."""

    count: int = 0
    """How often it was met."""
    problem_ids: list[str] = field(default_factory=list)
    """The first problems of it."""
    detail: str = ""
    """What was found at the first."""


@dataclass(slots=True)
class Admission:
    """What was found."""

    problems: int
    """Problems in the set."""
    tried: int = 0
    """Of them, how many were graded."""
    gradings: int = 0
    """Gradings, both processes counted."""
    hacks: int = 0
    """Of them, known hacks."""
    without_gold: int = 0
    """Problems tried of which no right answer is known; only junk tells about them."""
    task_types: Counter[str] = field(default_factory=Counter)
    """Problems by task type."""
    offences: dict[str, Objection] = field(default_factory=dict)
    """Reasons to refuse; none when the set is admitted."""

    @property
    def is_admitted(self) -> bool:
        """Whether there is no reason to refuse."""
        return not self.offences

    def refuse(self, reason: str, problem_id: str, detail: str) -> None:
        """Note a reason to refuse."""
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
    """How much is tried."""

    sample: int = 256
    """Problems that are graded, spread over the set."""
    hacked: int = 4
    """Problems of each task type that meet the hacks."""
    allows_judge: bool = False
    """Whether grades that cannot be replayed are accepted."""
    deadline_s: float = DEADLINE_S
    """Clock time of one grading."""


def admit(
    task_set: TaskSet,
    trial: Trial | None = None,
    on_progress: Progress = lambda _done, _of: None,
) -> Admission:
    """Return what is found when a task set is read whole and tried."""
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
    """Read every row; yield those that are chosen and can be tried."""
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
    """Tries problems, and notes what is found."""

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
        # Twice: some verifiers answer another way when they are asked again.
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
        """Refuse what a hack scored on; one that happens to be right once is no hack.

        A set of which all tried problems have one answer cannot tell, and is refused.
        """
        for (task_type, name), fooled in self._fooled.items():
            tried = min(self._hacked[task_type], self._trial.hacked)
            if len(fooled) > 1 or tried == 1:
                for problem_id in fooled.values():
                    self._found.refuse("a known hack scores", problem_id, name)

    def _grade(self, problem: Problem, completion: str) -> dict[str, Any] | None:
        """Return the grade, None when there is none that counts; notes costs and disagreement."""
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
        """Return what both processes say, None when they do not agree or one hangs."""
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
        if _decided(one) != _decided(other):
            detail = f"{(completion or '')[:40]!r}: {_decided(one)} and {_decided(other)}"
            self._found.refuse("two processes disagree", problem.problem_id, detail)
            return None
        for measure in ("cpu_s", "grown_bytes"):
            if measure in one:
                one[measure] = max(one[measure], other[measure])
        return one


def _decided(said: dict[str, Any]) -> Any:
    """Return what must be the same on every machine; where a limit decided, nothing is."""
    if "cpu_s" not in said:
        return said.get("right"), said.get("fault")
    return said.get("score", "undecided") if said.get("is_repeatable", True) else "limit"
