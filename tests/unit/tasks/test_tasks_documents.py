"""Problems and task sets: round trips, and a refused mutation of every accepted form."""

import json

import pytest
from hypothesis import given, strategies as st
from pydantic import ValidationError
from task_packages import PROBLEMS, TASK_SETS

from muster.protocol.encoding import keccak
from muster.protocol.errors import EncodingError, TaskError
from muster.protocol.merkle import merkle_root
from muster.tasks import Problem, TaskSet

PROBLEM = Problem(
    problem_id="a", task_type="exact_match", prompt="1+1=", gold_standard_solution="2"
)
TWO = TaskSet.of("sums", "1", [PROBLEM, PROBLEM.model_copy(update={"problem_id": "b"})])


@given(PROBLEMS)
def test_problem_survives_encoding(problem: Problem) -> None:
    assert Problem.from_bytes(problem.to_bytes()) == problem


@given(TASK_SETS)
def test_task_set_survives_encoding(task_set: TaskSet) -> None:
    assert TaskSet.from_bytes(task_set.to_bytes()) == task_set


@given(TASK_SETS, TASK_SETS)
def test_task_sets_have_one_hash_each(one: TaskSet, other: TaskSet) -> None:
    assert (one.to_bytes() == other.to_bytes()) == (one.hash() == other.hash())


@given(st.binary(max_size=200))
def test_parsing_is_total(data: bytes) -> None:
    with pytest.raises((EncodingError, TaskError)):
        TaskSet.from_bytes(data)


@given(st.data())
def test_changed_byte_changes_the_hash_or_is_refused(data: st.DataObject) -> None:
    document = bytearray(TWO.to_bytes())
    position = data.draw(st.integers(0, len(document) - 1))
    document[position] ^= data.draw(st.integers(1, 255))
    try:
        parsed = TaskSet.from_bytes(bytes(document))
    except (EncodingError, TaskError):
        return
    assert parsed != TWO
    assert parsed.to_bytes() == bytes(document)


def test_task_set_is_the_documented_lines() -> None:
    header, first, second, rest = TWO.to_bytes().split(b"\n")
    assert header == b'{"count":2,"name":"sums","schema_version":1,"version":"1"}'
    assert json.loads(first) == {
        "problem_id": "a",
        "source": "",
        "task_type": "exact_match",
        "in_source_id": None,
        "prompt": "1+1=",
        "gold_standard_solution": "2",
        "verification_info": {},
        "metadata": {},
    }
    assert json.loads(second)["problem_id"] == "b"
    assert rest == b""
    leaves = [
        keccak(keccak(x) + bytes([0] * 7 + [i])) for i, x in enumerate((header, first, second))
    ]
    assert TWO.hash() == merkle_root(leaves)


def test_task_set_is_a_sequence() -> None:
    assert (len(TWO), TWO[1].problem_id, [p.problem_id for p in TWO]) == (2, "b", ["a", "b"])


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b'"count":2', b'"count":3', "announces 3"),
        (b'"count":2', b'"count":"2"', "count an integer"),
        (b'"count":2', b'"count":true', "count an integer"),
        (b'"schema_version":1', b'"schema_version":3', "unknown schema version"),
        (b'"version":"1"}', b'"version":"1","x":1}', "header has"),
        (b'"name":"sums"', b'"name":7', "are text"),
        (b'"count":2', b'"count": 2', "canonical"),
        (b'"prompt":"1+1="', b'"prompt":1', "prompt"),
        (b'"prompt":"1+1="', b'"prompt":""', "prompt"),
        (b'"metadata":{},', b"", "lacks a field"),
        (b'"metadata":{}', b'"metadata":{},"more":1', "more"),
    ],
)
def test_mutated_document_is_refused(old: bytes, new: bytes, reason: str) -> None:
    with pytest.raises(EncodingError, match=reason):
        TaskSet.from_bytes(TWO.to_bytes().replace(old, new, 1))


def test_document_without_final_line_break_is_refused() -> None:
    with pytest.raises(EncodingError, match="line break"):
        TaskSet.from_bytes(TWO.to_bytes()[:-1])


def test_oversized_document_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.tasks.task_set.MAX_TASK_SET_BYTES", 10)
    with pytest.raises(EncodingError, match="exceeds 10"):
        TaskSet.from_bytes(TWO.to_bytes())


def test_repeated_problem_id_is_refused() -> None:
    with pytest.raises(TaskError, match="'a' comes 2 times"):
        TaskSet.of("sums", "1", [PROBLEM, PROBLEM])


def test_empty_task_set_is_refused() -> None:
    with pytest.raises(TaskError, match="no problems"):
        TaskSet.of("sums", "1", [])


@pytest.mark.parametrize(("name", "version"), [("", "1"), ("x" * 129, "1"), ("x", "")])
def test_unnamed_task_set_is_refused(name: str, version: str) -> None:
    with pytest.raises(TaskError, match="1 to 128 characters"):
        TaskSet.of(name, version, [PROBLEM])


def test_oversized_problem_is_refused() -> None:
    with pytest.raises(ValidationError, match="exceeds"):
        Problem(problem_id="a", task_type="t", prompt="x" * (1 << 20))


def test_problem_that_json_cannot_hold_is_refused() -> None:
    with pytest.raises(ValidationError):
        Problem(problem_id="a", task_type="t", prompt="p", metadata={"x": float("nan")})
