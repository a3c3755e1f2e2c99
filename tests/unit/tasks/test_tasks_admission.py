"""Admission: honest sets and verifiers pass, and each fault refuses a mutated twin."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from task_packages import forget, install

from muster.tasks import Problem, TaskSet, admission
from muster.tasks.admission import Admission, Trial, admit
from muster.tasks.document import Header, TaskSetFile
from muster.tasks.toys import make_arithmetic, make_reverse, make_sort

TASKS = make_sort(6, seed=0)
QUICK = Trial(sample=3, hacked=1, deadline_s=30.0)
HONEST = """
from muster.tasks import Graded, Undecided, Verifier
CALLS = []

def grade(problem, completion):
    CALLS.append(completion)
    gold = problem.gold_standard_solution
    is_right = completion == gold
    {body}
    return Graded(1.0 if is_right else 0.0)

def check(problem):
    {check}

VERIFIER = Verifier("t", "1", grade, check=check, sources=("third_party",){more})
"""
ENTRY = "[muster.verifiers]\ntheirs = third_party:VERIFIER\n"


@pytest.fixture(autouse=True)
def _packages() -> Iterator[None]:
    yield
    forget()


def theirs(count: int = 3) -> TaskSet:
    problems = [
        Problem(
            problem_id=f"p{i}",
            task_type="theirs",
            prompt="?",
            gold_standard_solution=f"the answer {i}",
        )
        for i in range(count)
    ]
    return TaskSet.of("theirs", "1", problems)


def tried(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    body: str = "pass",
    *,
    check: str = "pass",
    more: str = "",
    trial: Trial = QUICK,
) -> Admission:
    install(folder, monkeypatch, HONEST.format(body=body, check=check, more=more), ENTRY)
    return admit(theirs(), trial)


def test_honest_set_is_admitted_and_counted() -> None:
    told: list[tuple[int, int]] = []
    found = admit(TASKS, QUICK, lambda done, of: told.append((done, of)))
    assert found.is_admitted
    assert (found.problems, found.tried, found.without_gold) == (6, 3, 0)
    assert dict(found.task_types) == {"exact_match": 6}
    assert found.hacks > 5
    assert told[-1] == (9, 9)


@pytest.mark.parametrize("make", [make_reverse, make_arithmetic])
def test_toy_families_are_admitted(make: object) -> None:
    assert callable(make)
    assert admit(make(20, 1), QUICK).is_admitted


def test_third_party_s_honest_verifier_is_admitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tried(tmp_path, monkeypatch)
    assert found.is_admitted, found.summary()


FIRST = "__import__('os').environ['PYTHONHASHSEED'] == '1'"
"""True in one of the two processes."""


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return Graded(0.5 if is_right else 0.0)", "gold does not score 1"),
        ("is_right = is_right and CALLS.count(completion) == 1", "gold does not score 1"),
        ("is_right = is_right or not completion", "junk scores"),
        ("return Graded(1.0 if is_right else 0.01)", "junk scores"),
        ("is_right = is_right or len(completion) > 10_000", "junk scores"),
        ("is_right = gold in completion", "a known hack scores"),
        ("raise ValueError(completion)", "gold does not score 1"),
        ("return Undecided('who knows')", "gold does not score 1"),
        ("return 1.0", "gold does not score 1"),
        ("return Graded(float('nan'))", "gold does not score 1"),
        ("return Graded((hash('some text') % 1000) / 1000)", "two processes disagree"),
        ("import os; return Graded((os.getpid() % 1000) / 1000)", "two processes disagree"),
        (f"return Graded(float(is_right), is_repeatable={FIRST})", None),
        (f"return Graded(float(is_right and {FIRST}))", "two processes disagree"),
        ("import os; os._exit(3)", "hangs"),
        ("print('chatter ' * 9999)", None),
        ("import sys; sys.stdin.read(0); print('{}', flush=True)", None),
    ],
)
def test_verifier_is_refused_for_its_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, reason: str | None
) -> None:
    found = tried(tmp_path, monkeypatch, body)
    assert (reason in found.offences) if reason else found.is_admitted, found.summary()
    assert not reason or found.offences[reason].problem_ids[0] == "p0"


def test_verifier_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(sample=3, hacked=1, deadline_s=3.0)
    found = tried(tmp_path, monkeypatch, "while is_right: __import__('time').sleep(9)", trial=trial)
    assert found.offences["hangs"].count == admission.HANGS_BORNE
    assert "no answer within 3 s" in found.summary()


def test_verifier_that_takes_long_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MAX_CPU_S", 0.2)
    busy = "end = __import__('time').process_time() + 0.3\n    "
    busy += "while 'zzz' in completion and __import__('time').process_time() < end: pass"
    assert set(tried(tmp_path, monkeypatch, busy).offences) == {"too slow"}


def test_verifier_that_takes_much_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MAX_GROWTH_BYTES", 100 << 20)
    large = "x = b'1' * (200 << 20) if is_right else b''"
    assert set(tried(tmp_path, monkeypatch, large).offences) == {"too much memory"}


def test_problem_that_its_verifier_finds_malformed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tried(tmp_path, monkeypatch, check="raise ValueError('no numbers')")
    assert found.offences["malformed problem"].detail == "ValueError: no numbers"


def test_judge_is_admitted_only_when_the_run_allows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ", is_replayable=False"
    assert set(tried(tmp_path, monkeypatch, more=more).offences) == {"not replayable"}
    trial = Trial(sample=3, hacked=1, allows_judge=True, deadline_s=30.0)
    assert tried(tmp_path, monkeypatch, more=more, trial=trial).is_admitted


def test_task_type_without_a_verifier_is_refused() -> None:
    found = admit(theirs(), QUICK)
    assert (found.offences["no verifier"].count, found.tried) == (3, 0)


def test_rows_of_a_file_are_read_whole(tmp_path: Path) -> None:
    rows = [p.to_bytes() for p in TASKS]
    lines = [Header("x", "1", 8).to_bytes(), *rows, rows[0], b"x" * 200]
    (tmp_path / "t").write_bytes(b"".join(line + b"\n" for line in lines))
    found = admit(TaskSet.lazily(TaskSetFile.open(tmp_path / "t")), QUICK)
    assert found.offences["duplicate id"].problem_ids == [TASKS[0].problem_id]
    assert found.offences["malformed row"].problem_ids == ["row 8"]


def test_answers_of_a_verifier_s_process_are_bounded_in_time() -> None:
    with admission.trial_processes(0.001) as (process, _):
        process.send(TASKS[0], "1")
        with pytest.raises(admission.Hangs, match="no answer within"):
            process.receive()
