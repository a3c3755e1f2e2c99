"""Other people's rows: read if they have one meaning, otherwise refused with a reason."""

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings, strategies as st
from task_packages import PROBLEMS, TASK_SETS

from muster.protocol.errors import ConfigError, EncodingError, StorageError, TaskError
from muster.tasks import Problem, TaskSet, importing, parquet_rows, row_files
from muster.tasks.document import Added, DocumentWriter
from muster.tasks.row_files import Unreadable, read_rows, write_parquet
from muster.tasks.toys import make_sort

ROW = {
    "problem_id": "vm_1",
    "source": "numina",
    "task_type": "verifiable_math",
    "in_source_id": None,
    "prompt": "1+1?",
    "gold_standard_solution": "2",
    "verification_info": {"ground_truth": "2"},
    "metadata": {"level": 3},
}


def encoded(row: Any, columns: importing.Columns | None = None) -> dict[str, Any]:
    _, line = importing.encode_row(row, columns or importing.Columns(), number=7)
    problem: dict[str, Any] = json.loads(line)
    return problem


# ------------------------------------------------------------------------------------- one row


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"verification_info": "{'ground_truth': '2'}", "metadata": '{"level": 3}'},
        {"verification_info": ' {"ground_truth": "2"}', "metadata": "{'level': 3,}"},
        {"llm_response": "I think 2", "response_id": "vm_1_x", "model_name": "r1"},
    ],
    ids=["as in genesys", "python text", "json text", "a response's columns"],
)
def test_published_forms_of_a_row_are_one_problem(changed: dict[str, Any]) -> None:
    assert encoded(ROW | changed) == ROW


def test_published_code_row_keeps_its_cases() -> None:
    cases = [{"type": "stdin_stdout", "input": "(((\n", "output": "'-- \"x\" --'\n"}] * 40
    info = {"language": "python", "test_cases": cases, "limits": (1, None, True, 2.5)}
    found = encoded(ROW | {"verification_info": repr(info)})["verification_info"]
    assert found == info | {"limits": [1, None, True, 2.5]}


def test_numbers_as_ids_and_absent_fields_are_filled() -> None:
    found = encoded({"task_type": "t", "prompt": "p", "in_source_id": 12, "metadata": None})
    assert (found["problem_id"], found["in_source_id"], found["metadata"]) == ("row-7", "12", {})


def test_columns_of_other_names_are_mapped() -> None:
    columns = importing.Columns(
        {"prompt": "question", "gold_standard_solution": "answer"}, {"task_type": "t"}
    )
    row = {"question": "1+1?", "answer": 2, "id": "x"}
    found = encoded(row, columns)
    assert (found["prompt"], found["gold_standard_solution"], found["task_type"]) == (
        "1+1?",
        "2",
        "t",
    )
    assert columns.unused(row) == {"id"}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"prompt": None}, "prompt: Field required"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"task_type": "x" * 65}, "task_type"),
        ({"problem_id": True}, "problem_id"),
        ({"gold_standard_solution": 2.5}, "gold_standard_solution"),
        ({"verification_info": "[1]"}, "verification_info: the text holds a list"),
        ({"verification_info": "{'a': open('x')}"}, "neither JSON nor a Python literal"),
        ({"verification_info": "{'a': {1, 2}}"}, "cannot be canonical JSON"),
        ({"verification_info": "{1: 2}"}, "should be a valid string"),
        ({"verification_info": "{'a': b'x'}"}, "cannot be canonical JSON"),
        ({"verification_info": "{'a': array([1])}"}, "neither JSON nor"),
        ({"verification_info": "{'a': " + "[" * 60 + "]" * 60 + "}"}, "nested deeper"),
        ({"verification_info": "{'a': " + "-" * 200 + "1}"}, "nested deeper"),
        (
            {"verification_info": "{'a': [" + "1," * importing.MAX_LITERAL_PARTS + "]}"},
            "more than 50000",
        ),
        ({"verification_info": '{"a": ' + "[" * 100_000}, "nested deeper|neither"),
        ({"verification_info": " " * (1 << 20) + "{'a':1}"}, "more than 1048576"),
        ({"verification_info": {"a": 2**53}}, "cannot be canonical JSON"),
        ({"metadata": {"a": float("nan")}}, "cannot be canonical JSON"),
        ({"metadata": {"a": "\ud800"}}, "cannot be canonical JSON"),
        ({"prompt": "x" * (1 << 20)}, "exceeds 1048576"),
    ],
)
def test_row_without_one_meaning_is_refused(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(EncodingError, match=reason):
        importing.encode_row(ROW | changed, importing.Columns(), number=1)


@pytest.mark.parametrize("row", [None, [], "text", 5])
def test_what_is_no_row_is_refused(row: Any) -> None:
    with pytest.raises(EncodingError, match="not an object"):
        importing.encode_row(row, importing.Columns(), number=1)


@given(st.text(max_size=60) | st.text("{}[]()'\",:-~ 1a\\", max_size=60))
def test_reading_a_text_is_total(text: str) -> None:
    with suppress(EncodingError):
        assert isinstance(importing.parse_object("metadata", text), dict)


@given(PROBLEMS)
def test_problem_survives_as_a_row_of_text(problem: Problem) -> None:
    row = problem.model_dump()
    for name in ("verification_info", "metadata"):
        assert encoded(row | {name: json.dumps(row[name])}) == row
        assert encoded(row | {name: repr(row[name])}) == row


# -------------------------------------------------------------------------------------- writer


@given(tasks=TASK_SETS)
def test_writer_writes_the_document_and_its_root(
    tmp_path_factory: pytest.TempPathFactory, tasks: TaskSet
) -> None:
    path = tmp_path_factory.mktemp("w") / "t"
    with DocumentWriter(path, tasks.name, tasks.version) as writer:
        for problem in tasks:
            assert writer.add(problem.problem_id, problem.to_bytes()) is Added.NEW
        assert writer.finish() == tasks.hash()
    assert path.read_bytes() == tasks.to_bytes()
    assert [p.name for p in path.parent.iterdir()] == ["t"]


def test_writer_in_many_pieces_has_the_root_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muster.tasks.document._BUFFER_BYTES", 500)
    tasks = make_sort(40, seed=0)
    with DocumentWriter(tmp_path / "t", tasks.name, tasks.version) as writer:
        for problem in tasks:
            writer.add(problem.problem_id, problem.to_bytes())
        assert writer.finish() == tasks.hash()


def test_writer_knows_repetitions_from_clashes(tmp_path: Path) -> None:
    with DocumentWriter(tmp_path / "t", "n", "1") as writer:
        found = [writer.add("a", b"1"), writer.add("a", b"1"), writer.add("a", b"2")]
    assert found == [Added.NEW, Added.REPEATED, Added.CLASH]
    assert list(tmp_path.iterdir()) == []


def test_writer_names_a_disk_that_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with (
        pytest.raises(StorageError, match="cannot write"),
        DocumentWriter(tmp_path / "file" / "t", "n", "1"),
    ):
        pass


# --------------------------------------------------------------------------------------- files


def imported(folder: Path, source: Path, **changes: Any) -> importing.Imported:
    plan = importing.Import(folder / "out.jsonl", "n", "1", **changes)
    return importing.import_rows(read_rows(source), plan)


def lines(*rows: Any) -> bytes:
    return b"".join(r if isinstance(r, bytes) else json.dumps(r).encode() + b"\n" for r in rows)


def test_bad_rows_are_named_and_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(
        lines(
            ROW, b"{broken\n", ROW | {"problem_id": "2", "prompt": ""}, b"\n", ROW | {"prompt": "?"}
        )
    )
    found = imported(tmp_path, tmp_path / "in")
    assert (found.rows, found.bad, found.root) == (4, 3, None)
    assert [number for number, _ in found.named] == [2, 3, 4]
    assert [reason.partition(":")[0] for _, reason in found.named] == [
        "not JSON",
        "prompt",
        "problem_id",
    ]
    assert not (tmp_path / "out.jsonl").exists()


def test_bad_rows_are_left_out_when_asked(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(lines(b"nonsense\n", ROW, ROW, ROW | {"problem_id": "2"}))
    found = imported(tmp_path, tmp_path / "in", skip_bad=True)
    assert (found.rows, found.problems, found.repeated, found.bad) == (4, 2, 1, 1)
    assert found.root == TaskSet.open(tmp_path / "out.jsonl").hash()


def test_nothing_but_bad_rows_is_no_set(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"junk\n")
    with pytest.raises(TaskError, match="no row of 1"):
        imported(tmp_path, tmp_path / "in", skip_bad=True)
    with pytest.raises(ConfigError, match="cannot read"):
        imported(tmp_path, tmp_path / "none")


def test_giant_line_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "MAX_LINE_BYTES", 1000)
    (tmp_path / "in").write_bytes(lines(b"x" * 12_345 + b"\n", ROW))
    assert list(read_rows(tmp_path / "in")) == [Unreadable("the row exceeds 1000 bytes"), ROW]


def test_count_stops_the_import(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(lines(*({**ROW, "problem_id": str(i)} for i in range(9))))
    assert imported(tmp_path, tmp_path / "in", limit=4).problems == 4


@settings(max_examples=25)
@given(tasks=TASK_SETS)
def test_document_imports_as_itself(
    tmp_path_factory: pytest.TempPathFactory, tasks: TaskSet
) -> None:
    folder = tmp_path_factory.mktemp("i")
    tasks.write(folder / "in")
    plan = importing.Import(folder / "out", tasks.name, tasks.version)
    assert importing.import_rows(read_rows(folder / "in"), plan).root == tasks.hash()


def test_data_sets_of_hugging_face_are_read_from_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from datasets import Dataset, DatasetDict

    rows = [{"question": "1+1?", "answer": "2"}, {"question": "2+2?", "answer": "4"}]
    saved = Dataset.from_list(rows)
    saved.save_to_disk(str(tmp_path / "saved"))
    assert list(read_rows(tmp_path / "saved")) == rows
    DatasetDict({"train": saved}).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(ConfigError, match="has the splits train"):
        list(read_rows(tmp_path / "splits"))
    with pytest.raises(ConfigError, match="no data set that `datasets` saved"):
        list(read_rows(tmp_path))


def test_data_set_that_cannot_be_loaded_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "train.jsonl").write_bytes(lines(ROW | {"in_source_id": "x"}))
    (row,) = row_files.hub_rows(str(tmp_path / "local"), "train")
    assert row["prompt"] == ROW["prompt"]
    with pytest.raises(ConfigError, match="cannot load"):
        list(row_files.hub_rows(str(tmp_path / "none"), "train"))


def test_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    for rows in (read_rows(tmp_path), row_files.hub_rows("x", "train")):
        with pytest.raises(ConfigError, match="not installed") as caught:
            list(rows)
        assert "extra `datasets`" in (caught.value.hint or "")


# ------------------------------------------------------------------------------------- parquet


def test_parquet_and_back_keeps_the_root(tmp_path: Path) -> None:
    problems = [
        Problem.model_validate(ROW | {"problem_id": f"{i}", "metadata": {"n": None, "i": [i, {}]}})
        for i in range(5000)
    ]
    tasks = TaskSet.of("n", "1", problems)
    write_parquet(tasks, tmp_path / "in.parquet")
    assert imported(tmp_path, tmp_path / "in.parquet").root == tasks.hash()


def test_structs_of_parquet_lose_the_nulls_that_arrow_adds(tmp_path: Path) -> None:
    rows = [ROW, ROW | {"problem_id": "2", "verification_info": {"tolerance": "0.1"}}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "in")
    found = list(read_rows(tmp_path / "in"))
    assert [row["verification_info"] for row in found] == [
        {"ground_truth": "2"},
        {"tolerance": "0.1"},
    ]


def test_column_that_json_cannot_hold_is_a_bad_row(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"prompt": [b"raw"]}), tmp_path / "in")
    (row,) = read_rows(tmp_path / "in")
    assert isinstance(row, Unreadable)
    assert "what JSON cannot" in row.reason


@pytest.mark.parametrize("cut", [6, 40, 400])
def test_damaged_parquet_is_refused(tmp_path: Path, cut: int) -> None:
    write_parquet(make_sort(300, seed=0), tmp_path / "whole")
    data = (tmp_path / "whole").read_bytes()
    (tmp_path / "in").write_bytes(data[:-cut])
    with pytest.raises(ConfigError, match="in"):
        list(read_rows(tmp_path / "in"))


def bomb(path: Path, *, rows: int, cell: int) -> None:
    """Write a dictionary of one long text that every row repeats: 20 kB that unpack to any size."""
    text = pyarrow.array(["x" * cell])
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * rows, pyarrow.int32()), text)
    table = pyarrow.table({"prompt": column})
    pyarrow.parquet.write_table(table, path, compression="zstd", row_group_size=rows)


LIMITED = """
import sys
from muster.tasks import parquet_rows
parquet_rows.MEMORY_BYTES = 1 << 30
sys.exit(parquet_rows.main(sys.argv[1]))
"""


def test_bomb_of_repetitions_ends_within_its_memory(tmp_path: Path) -> None:
    bomb(tmp_path / "in", rows=100_000, cell=4_000_000)
    assert (tmp_path / "in").stat().st_size < 100_000
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "in")],
        stdout=subprocess.DEVNULL,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0


@pytest.mark.slow
def test_bomb_is_an_error_and_no_crash_of_ours(tmp_path: Path) -> None:
    bomb(tmp_path / "in", rows=2000, cell=4_000_000)
    with pytest.raises(ConfigError, match=r"in.*(broke the reader|memory|Error|alloc)"):
        list(read_rows(tmp_path / "in"))


def test_row_group_that_says_it_is_huge_is_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parquet_rows, "MAX_GROUP_BYTES", 1000)
    monkeypatch.setattr("resource.setrlimit", lambda *_: None)
    write_parquet(make_sort(300, seed=0), tmp_path / "in")
    assert parquet_rows.main(str(tmp_path / "in")) == 1
    assert "row group 0 has" in capsys.readouterr().out
