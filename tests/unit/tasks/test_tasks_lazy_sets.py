"""Task sets in files: opened lazily, the same as in memory, and hostile files refused cheaply."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from task_packages import TASK_SETS

from muster.protocol.errors import ConfigError, EncodingError, TaskError
from muster.tasks import Problem, TaskSet, document, root_of_bytes
from muster.tasks.document import Header, TaskSetFile
from muster.tasks.problem import MIN_PROBLEM_BYTES
from muster.tasks.toys import make_sort

TASKS = make_sort(50, seed=3)
HEADER, *ROWS = TASKS.to_bytes().splitlines(keepends=True)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.jsonl"
    TASKS.write(path)
    return path


def lazily(path: Path) -> TaskSet:
    return TaskSet.lazily(TaskSetFile.open(path))


@given(tasks=TASK_SETS)
def test_lazy_set_is_the_set_in_memory(
    tmp_path_factory: pytest.TempPathFactory, tasks: TaskSet
) -> None:
    path = tmp_path_factory.mktemp("sets") / "t"
    tasks.write(path)
    lazy = lazily(path)
    assert (lazy, hash(lazy), lazy.name, lazy.version) == (
        tasks,
        hash(tasks),
        tasks.name,
        tasks.version,
    )
    assert list(lazy) == list(tasks)
    assert lazy.to_bytes() == tasks.to_bytes()
    assert [lazy.prove(i) for i in range(len(lazy))] == [tasks.prove(i) for i in range(len(tasks))]


def test_small_file_is_read_whole_and_a_large_one_lazily(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(TaskSet.open(file).problems, tuple)
    monkeypatch.setattr("muster.tasks.task_set.MAX_WHOLE_BYTES", 100)
    opened = TaskSet.open(file)
    assert not isinstance(opened.problems, tuple)
    assert (opened[-1], opened.problems[3:5]) == (TASKS[-1], list(TASKS.problems[3:5]))
    with pytest.raises(IndexError):
        opened[50]


def test_problem_is_proven_and_another_is_not(file: Path) -> None:
    tasks = lazily(file)
    proof = tasks.prove(7)
    assert proof.proves(TASKS[7].to_bytes(), TASKS.hash())
    assert not proof.proves(TASKS[8].to_bytes(), TASKS.hash())
    assert not proof.proves(TASKS[7].to_bytes(), make_sort(50, seed=4).hash())


def test_file_that_changes_after_it_was_opened_is_noticed(file: Path, tmp_path: Path) -> None:
    tasks = lazily(file)
    data = file.read_bytes()
    file.write_bytes(data.replace(TASKS[9].prompt.encode(), b"0000=", 1))
    assert tasks[8] == TASKS[8]
    with pytest.raises(TaskError, match="changed since it was opened: line 10"):
        _ = tasks[9]
    with pytest.raises(TaskError, match="changed since it was opened"):
        tasks.write(tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    file.write_bytes(data[:1000])
    with pytest.raises(TaskError, match="changed since"):
        _ = tasks[49]


def test_spread_reaches_from_end_to_end() -> None:
    assert TASKS.spread(5) == [0, 10, 20, 30, 40]
    assert TASKS.spread(1000) == list(range(50))


@pytest.mark.parametrize(("name", "value"), [("name", "other"), ("version", "2"), ("count", 49)])
def test_root_binds_the_header(name: str, value: str | int) -> None:
    facts = {"name": TASKS.name, "version": TASKS.version, "count": 50} | {name: value}
    problems = TASKS.problems[: int(facts["count"])]
    other = TaskSet.of(str(facts["name"]), str(facts["version"]), problems)
    assert other.hash() != TASKS.hash()


HOSTILE = {
    "empty": (b"", "begins with a header"),
    "no line break": (HEADER[:-1], "begins with a header"),
    "long header": (b'{"count":' + b"1" * 20_000 + b"}\n", "begins with a header"),
    "fewer rows": (HEADER + b"".join(ROWS[:-1]), "there are 49"),
    "more rows": (HEADER + b"".join(ROWS) + ROWS[0], "there are more"),
    "no rows": (Header("x", "1", 1).to_bytes() + b"\n", "cannot hold"),
    "no last line break": (HEADER + b"".join(ROWS)[:-1], "ends with a line break"),
    "rest": (HEADER + b"".join(ROWS) + b"rest", "ends with a line break"),
    "huge count": (Header("x", "1", 2**50).to_bytes() + b"\n", "cannot hold"),
    "negative count": (
        Header("x", "1", 1).to_bytes().replace(b't":1', b't":-1') + b"\n",
        "no prob",
    ),
    "giant row": (Header("x", "1", 1).to_bytes() + b"\n" + b"x" * 2_000_000 + b"\n", "a line exc"),
    "endless row": (Header("x", "1", 1).to_bytes() + b"\n" + b"x" * 6_000_000, "a line exceeds"),
    "line breaks": (Header("x", "1", 9).to_bytes() + b"\n" * 3_000_000, "there are more"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_file_is_refused_for_its_reason(tmp_path: Path, case: str) -> None:
    data, reason = HOSTILE[case]
    (tmp_path / "t").write_bytes(data)
    with pytest.raises((EncodingError, TaskError), match=reason):
        TaskSetFile.open(tmp_path / "t")
    assert len(os.listdir(f"/proc/{os.getpid()}/fd")) < 500


def test_oversized_file_is_refused_unread(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "MAX_TASK_SET_BYTES", 10)
    with pytest.raises(EncodingError, match="exceeds 10"):
        TaskSetFile.open(file)


def test_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match="cannot read"):
            TaskSetFile.open(path)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (b"x" * 200, "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"metadata":' + b"[" * 300 + b"]" * 300 + b"}", "malformed problem"),
        (ROWS[0][:-1].replace(b'"source"', b'"sauce"'), "malformed problem"),
        (ROWS[0][:-1].replace(b":null", b":null ") + b" " * 9, "canonical"),
    ],
)
def test_malformed_row_is_refused_when_it_is_used(tmp_path: Path, row: bytes, reason: str) -> None:
    lines = [Header("x", "1", 2).to_bytes(), ROWS[0][:-1], row]
    (tmp_path / "t").write_bytes(b"".join(line + b"\n" for line in lines))
    tasks = lazily(tmp_path / "t")
    assert tasks[0] == TASKS[0]
    with pytest.raises(EncodingError, match=reason):
        _ = tasks[1]


def test_no_problem_is_shorter_than_the_least_length() -> None:
    least = Problem(problem_id="a", task_type="b", prompt="c")
    assert len(least.to_bytes()) == MIN_PROBLEM_BYTES


OPEN_AND_MEASURE = """
import resource, sys
from pathlib import Path
from muster.tasks import TaskSet
from muster.tasks.document import TaskSetFile
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tasks = TaskSet.lazily(TaskSetFile.open(Path(sys.argv[1])))
tasks.hash(), [tasks[i] for i in tasks.spread(100)]
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_large_set_needs_little_memory(tmp_path: Path) -> None:
    """60 MB of rows take less than 40 MB of memory, of which 16 MB are buffers."""
    row = b'{"gold_standard_solution":null,"in_source_id":null,"metadata":{},"problem_id":"%06d",'
    row += b'"prompt":"%s","source":"","task_type":"t","verification_info":{}}\n'
    path = tmp_path / "big"
    with path.open("wb") as file:
        file.write(Header("big", "1", 60_000).to_bytes() + b"\n")
        file.writelines(row % (i, b"x" * 870) for i in range(60_000))
    command = [sys.executable, "-c", OPEN_AND_MEASURE, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert path.stat().st_size > 59e6
    assert int(done.stdout) * 1024 < 40e6


def test_root_of_bytes_is_the_root_of_the_set() -> None:
    assert root_of_bytes(TASKS.to_bytes()) == TASKS.hash()


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_bytes_have_no_root(case: str) -> None:
    with pytest.raises((EncodingError, TaskError)):
        root_of_bytes(HOSTILE[case][0])
