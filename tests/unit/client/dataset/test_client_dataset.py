"""Data sets: which rows they hold, how they grow, and what a check finds."""

import asyncio
import errno
import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from worlds import traces as traces_module
from worlds.traces import ALL, EOS, ORIGIN, RECIPE, Traces, rollout, tokens

from muster.client.audit.contradictions import Check
from muster.client.dataset import folder as folder_module, verify
from muster.client.dataset.export import export_rows, put_card
from muster.client.dataset.folder import CARD, EXPORT, DataFolder
from muster.client.dataset.selection import GRAM, HeldOut, Selection, SelectionSettings, is_test
from muster.protocol.errors import ConfigError, NotYet, StorageError, TaskError
from muster.protocol.recipe import PromptRecipe

pytestmark = pytest.mark.asyncio


@pytest.fixture
def traces(tmp_path: Path) -> Traces:
    return Traces(tmp_path)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 18 rows, which are three submissions."""
    monkeypatch.setattr(folder_module, "PART_ROWS", 18)
    monkeypatch.setattr(folder_module, "GROUP_ROWS", 6)


async def export(
    traces: Traces, settings: SelectionSettings = ALL, held_out: HeldOut | None = None
) -> DataFolder:
    folder = traces.data_folder(settings)
    selection = Selection(settings, held_out or HeldOut())
    await export_rows(folder, traces.stream, traces.maker, selection, traces.find_file)
    put_card(folder, traces.stream)
    return folder


async def rows_check(folder: DataFolder, traces: Traces, held_out: HeldOut | None = None) -> Check:
    return await verify.check_rows(
        folder, traces.stream, traces.maker, traces.find_file, held_out or HeldOut()
    )


def rows_of(folder: DataFolder) -> list[dict[str, Any]]:
    found = [
        row
        for part in folder.export.parts
        for _, table in folder.tables(part)
        for row in table.to_pylist()
    ]
    return sorted(found, key=lambda row: (row["stream_position"], row["row"]))


def names(folder: DataFolder) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder.path)): path.read_bytes()
        for path in sorted(folder.path.rglob("*"))
        if path.is_file()
    }


# Rows


async def test_a_row_says_what_was_asked_answered_and_by_whom(traces: Traces) -> None:
    made = traces.add(rollout(3, tokens("33"), 1.0, 0))
    [row] = rows_of(await export(traces))
    assert row == {
        "problem_id": "p3",
        "source": "",
        "part": "low",
        "task_type": "exact_match",
        "problem": "3=",
        "prompt": "3=",
        "completion": "33",
        "answer": "33",
        "reward": 1.0,
        "target_length": -1,
        "is_finished": True,
        "prompt_tokens": [3, 10],
        "completion_tokens": [3, 3, EOS],
        "replies": [],
        "verifier": "exact_match 2",
        "worker": made.worker,
        "batch_id": 10,
        "position": 0,
        "row": 0,
        "stream_position": 0,
        "policy_version": 0,
        "policy_root": ORIGIN.tokenizer,
        "file_sha256": "0x" + made.record.file_hash.hex(),
    }


async def test_the_answer_is_what_follows_the_last_reply(traces: Traces) -> None:
    said = replace(rollout(3, tokens("12ab34"), 1.0, 0), replies=((2, 4),))
    traces.add(said)
    [row] = rows_of(await export(traces))
    assert (row["completion"], row["answer"], row["replies"]) == ("12ab34", "34", [2, 4])


@pytest.mark.parametrize(
    ("completion", "replies", "answer"),
    [("12f34", (), "34"), ("12f3f4", (), "4"), ("1234", (), ""), ("1f2ab3f4", ((3, 5),), "4")],
)
async def test_the_answer_is_what_follows_the_thought(
    traces: Traces, completion: str, replies: tuple[tuple[int, int], ...], answer: str
) -> None:
    traces.maker = traces.maker_of(
        RECIPE.model_copy(update={"prompt": PromptRecipe(answer_after="f")})
    )
    traces.add(replace(rollout(3, tokens(completion), 1.0, 0), replies=replies))
    [row] = rows_of(await export(traces))
    assert (row["completion"], row["answer"]) == (completion, answer)


@pytest.mark.parametrize(
    ("settings", "kept", "why"),
    [
        (SelectionSettings(reward_at_least=0.5), ["1", "123"], {"reward": 1}),
        (SelectionSettings(tokens_at_least=3), ["12", "123"], {"length": 1}),
        (SelectionSettings(tokens_at_most=2), ["1"], {"length": 2}),
        (SelectionSettings(only_finished=True), ["1", "12"], {"unfinished": 1}),
        (SelectionSettings(per_problem=1), ["1"], {"enough": 2}),
    ],
)
async def test_settings_leave_rows_out(
    traces: Traces, settings: SelectionSettings, kept: list[str], why: dict[str, int]
) -> None:
    traces.add(
        rollout(0, tokens("1"), 1.0, 0),
        rollout(0, tokens("12"), 0.0, 1),
        rollout(0, tokens("123", ends=False), 0.5, 2),
    )
    folder = await export(traces, settings)
    assert [row["completion"] for row in rows_of(folder)] == kept
    assert folder.export.parts[0].left_out == why


async def test_rows_of_a_part_are_chosen_and_counted_by_part(traces: Traces) -> None:
    traces.add(rollout(1, tokens("1"), 1.0, 0), rollout(6, tokens("6"), 0.0, 3))
    traces.add(rollout(2, tokens("2"), 1.0, 0))
    folder = await export(traces, SelectionSettings(parts=("high",)))
    assert [(row["part"], row["completion"]) for row in rows_of(folder)] == [("high", "6")]
    assert folder.export.parts[0].left_out == {"part": 2}
    assert "| high, exact_match, exact_match 2 | 1 |" in (folder.path / CARD).read_text()
    assert verify.check_rules(folder, HeldOut()).passed
    with pytest.raises(TaskError, match="has no part 'middle'"):
        traces.maker.require_parts(["middle"])


async def agreed(traces: Traces, *answers: str, share: float = 0.5) -> list[str]:
    """Return the answers to one problem that the rule of agreement keeps."""
    traces.add(*(rollout(0, tokens(text), 1.0, row) for row, text in enumerate(answers)))
    return [
        row["answer"] for row in rows_of(await export(traces, SelectionSettings(agreement=share)))
    ]


@pytest.mark.parametrize(
    ("answers", "share", "kept"),
    [
        (("12", "12", "3"), 0.5, ["12"]),
        (("12", "12", "3"), 0.7, []),
        (("12", "3", "4"), 0.5, []),
        (("1", "1", "2", "2"), 0.5, []),
        (("1", "2", "2", "1", "2"), 0.5, ["2"]),
        (("12", "12"), 0.5, []),
        (("", "", "", "7"), 0.1, ["7"]),
        (("", "", "", "7"), 0.5, []),
    ],
    ids=["most", "too few agree", "no two", "tie", "late", "small group", "empty", "empty counts"],
)
async def test_rows_that_most_of_a_group_agree_with_are_kept(
    traces: Traces, answers: tuple[str, ...], share: float, kept: list[str]
) -> None:
    found = await agreed(traces, *answers, share=share)
    # Equal completions are kept once.
    assert found == kept


async def test_only_samples_of_the_same_problem_agree(traces: Traces) -> None:
    traces.add(*(rollout(row // 3, tokens("5"), 1.0, row) for row in range(5)))
    folder = await export(traces, SelectionSettings(agreement=1.0))
    assert [row["problem_id"] for row in rows_of(folder)] == ["p0"]
    assert folder.export.parts[0].left_out == {"disagrees": 2, "duplicate": 2}


async def test_the_best_of_a_group_is_kept_and_of_equals_the_first(traces: Traces) -> None:
    rewards = (0.2, 0.9, 0.9, 0.0, 0.0, 0.0)
    traces.add(*(rollout(r // 3, tokens(str(r)), w, r) for r, w in enumerate(rewards)))
    folder = await export(traces, SelectionSettings(only_best=True))
    assert [(row["problem_id"], row["completion"]) for row in rows_of(folder)] == [
        ("p0", "1"),
        ("p1", "3"),
    ]
    assert folder.export.parts[0].left_out == {"worse": 4}


@pytest.mark.parametrize(
    ("asked", "said", "why"),
    [
        (SelectionSettings(agreement=0.5), SelectionSettings(agreement=0.9), "disagrees"),
        (ALL, SelectionSettings(only_best=True), "worse"),
    ],
)
async def test_a_row_that_its_group_leaves_out_is_found(
    traces: Traces, asked: SelectionSettings, said: SelectionSettings, why: str
) -> None:
    traces.add(*(rollout(0, tokens(text), 0.5, row) for row, text in enumerate(("1", "1", "2"))))
    honest = await export(traces, asked)
    assert verify.check_rules(honest, HeldOut()).passed
    assert (await rows_check(honest, traces)).passed
    claimed = DataFolder(honest.path, replace(honest.export, settings=said))
    check = await rows_check(claimed, traces)
    assert not check.passed
    assert f"left out by their group: {why}" in check.detail


async def test_the_same_completion_of_a_problem_comes_once(traces: Traces) -> None:
    traces.add(rollout(0, tokens("1"), 1.0, 0), rollout(0, tokens("1"), 1.0, 1))
    traces.add(rollout(1, tokens("1"), 1.0, 0), rollout(0, tokens("1"), 1.0, 1))
    folder = await export(traces)
    found = [(row["problem_id"], row["completion"]) for row in rows_of(folder)]
    assert found == [("p0", "1"), ("p1", "1")]
    assert folder.export.parts[0].left_out == {"duplicate": 2}


async def test_problems_are_split_by_their_name_alone(traces: Traces) -> None:
    traces.add_counting(4)
    folder = await export(traces, SelectionSettings(test_share=0.5))
    of_split = {split: set[str]() for split in ("train", "test")}
    for part in folder.export.parts:
        for name, rows in folder.tables(part):
            of_split[name[5:].split("-")[0]].update(rows["problem_id"].to_pylist())
    assert not of_split["train"] & of_split["test"]
    assert all(is_test(each, 0.5) for each in of_split["test"])
    assert 0.4 < sum(is_test(f"p{n}", 0.5) for n in range(1000)) / 1000 < 0.6


@pytest.mark.parametrize("form", ["jsonl", "txt", "parquet"])
async def test_rows_that_repeat_a_held_out_text_are_left_out(tmp_path: Path, form: str) -> None:
    words = [f"w{n}" for n in range(GRAM + 3)]
    path = tmp_path / f"held-out.{form}"
    if form == "jsonl":
        path.write_text(json.dumps({"deep": [{"text": " ".join(words)}]}) + "\n")
    elif form == "txt":
        path.write_text(" ".join(words) + "\n")
    else:
        pq.write_table(pa.table({"text": [" ".join(words)]}), path)
    held_out = HeldOut([path])
    assert held_out.has("before " + ", ".join(words[1 : GRAM + 1]).upper() + " after")
    assert not held_out.has(" ".join(words[1:GRAM]) + " another")


@pytest.mark.parametrize(
    ("text", "another"),
    [
        ("求所有满足条件的正整数的和除以一千所得的余数", "求所有满足条件的正整数的积除以七"),
        ("正の整数のうち、コンピュータで和を千で割った余り", "正の整数のうち、和を七で割る"),
        (
            "จงหาผลรวมของจำนวนเต็มบวกทั้งหมดที่น้อยกว่าหนึ่งพันและผลบวกของเลขโดดเท่ากับเจ็ด"
            "แล้วหารด้วยหนึ่งพันเหลือเศษเท่าใด",
            "จงหาผลรวมของจำนวนเต็มบวกที่น้อยกว่าเจ็ด",
        ),
    ],
    ids=["Chinese", "Japanese", "Thai"],
)
async def test_texts_without_spaces_are_found_in_longer_ones(
    tmp_path: Path, text: str, another: str
) -> None:
    path = tmp_path / "held-out.txt"
    path.write_text(text, encoding="utf-8")
    held_out = HeldOut([path])
    assert held_out.has(f"先{text}後")
    assert not held_out.has(f"先{another}後")


async def test_a_blank_line_is_no_held_out_text(tmp_path: Path) -> None:
    path = tmp_path / "held-out.txt"
    path.write_text("a text\n\n", encoding="utf-8")
    held_out = HeldOut([path])
    assert held_out.has("A text!")
    assert not any(held_out.has(text) for text in ("", "+", r"\[ \]", "text"))


@pytest.mark.parametrize("text", ["", "\n\n"])
async def test_held_out_files_without_a_text_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "empty.txt"
    path.write_text(text)
    with pytest.raises(ConfigError, match="holds no text"):
        HeldOut([path])


# Growing


@pytest.mark.usefixtures("small_parts")
async def test_bytes_do_not_depend_on_how_often_an_export_was_stopped(tmp_path: Path) -> None:
    at_once, in_parts = Traces(tmp_path / "a"), Traces(tmp_path / "b")
    at_once.add_counting(8)
    whole = await export(at_once, SelectionSettings(test_share=0.5))
    for n in range(8):
        in_parts.add_counting(1, first=n)
        folder = await export(in_parts, SelectionSettings(test_share=0.5))
    assert len(whole.export.parts) == 3
    assert names(folder) == names(whole)


@pytest.mark.usefixtures("small_parts")
async def test_what_was_exported_is_not_fetched_again(traces: Traces) -> None:
    traces.add_counting(4)
    await export(traces)
    traces.add_counting(1, first=4)
    traces.asked.clear()
    folder = await export(traces)
    assert traces.asked == [traces[4].record.file_hash]
    assert len(rows_of(folder)) == 30


async def test_an_export_stops_at_a_file_that_nobody_has_and_goes_on_later(traces: Traces) -> None:
    traces.add_counting(3)
    absent = traces[1].record.file_hash
    data = traces.files.pop(absent)
    with pytest.raises(NotYet, match="submission 11:0 is not at hand"):
        await export(traces)
    assert traces.data_folder().export.end == 1
    traces.files[absent] = data
    assert len(rows_of(await export(traces))) == 18


async def test_a_duplicate_of_an_earlier_export_is_known(traces: Traces) -> None:
    traces.add(rollout(0, tokens("1"), 1.0, 0))
    await export(traces)
    traces.add(rollout(0, tokens("1"), 1.0, 0), rollout(0, tokens("2"), 1.0, 1))
    assert [row["completion"] for row in rows_of(await export(traces))] == ["1", "2"]


@pytest.mark.usefixtures("small_parts")
async def test_rows_of_overturned_submissions_leave_the_data_set(traces: Traces) -> None:
    traces.add_counting(5)
    await export(traces)
    traces.disputed |= {1, 4}
    folder = await export(traces)
    assert {row["stream_position"] for row in rows_of(folder)} == {0, 2, 3}
    assert [part.left_out for part in folder.export.parts] == [{"overturned": 6}] * 2
    assert verify.check_outcomes(folder, traces.stream).passed


async def test_a_run_without_accepted_work_has_no_data_set_yet(traces: Traces) -> None:
    with pytest.raises(NotYet, match="no accepted submission"):
        await export(traces)


async def test_a_folder_of_another_data_set_is_refused(traces: Traces) -> None:
    traces.add_counting(1)
    await export(traces)
    with pytest.raises(ConfigError, match=r"another settings: reward_at_least 0.0, not 1"):
        traces.data_folder(SelectionSettings(reward_at_least=1.0))
    (traces.folder / "traces" / EXPORT).unlink()
    with pytest.raises(ConfigError, match="is not empty"):
        traces.data_folder()


async def test_a_damaged_part_is_not_built_upon(traces: Traces) -> None:
    traces.add_counting(1)
    folder = await export(traces)
    path = next((folder.path / "data").iterdir())
    path.write_bytes(path.read_bytes()[:-1] + b"X")
    traces.add_counting(1, first=1)
    with pytest.raises(StorageError, match="is damaged"):
        await export(traces)


KILLED = """
import asyncio, json, os, sys
from pathlib import Path
from worlds.traces import Traces
from muster.client.dataset.export import export_rows
from muster.client.dataset.selection import HeldOut, Selection, SelectionSettings

renames = int(sys.argv[2])
rename = Path.replace

def die_at_last(self, path):
    global renames
    renames -= 1
    if not renames:
        os._exit(9)
    return rename(self, path)

traces, settings = Traces(Path(sys.argv[1])), SelectionSettings(test_share=0.5)
traces.add_counting(4)
traces.disputed |= set(json.loads(sys.argv[3]))
folder, selection = traces.data_folder(settings), Selection(settings, HeldOut())
Path.replace = die_at_last
asyncio.run(export_rows(folder, traces, traces.maker, selection, traces.find_file))
"""
"""An export of four submissions that ends before one of its renames."""


@pytest.mark.parametrize(
    ("renames", "disputed"),
    [(1, []), (2, []), (3, []), (2, [1])],
    ids=["before the index", "after it", "between two files", "after one with fewer files"],
)
async def test_an_export_goes_on_after_a_kill(
    tmp_path: Path, renames: int, disputed: list[int]
) -> None:
    settings = SelectionSettings(test_share=0.5)
    whole, killed = Traces(tmp_path / "a"), Traces(tmp_path / "b")
    for each in (whole, killed):
        each.add_counting(2)
        await export(each, settings)
        each.add_counting(2, first=2)
        each.disputed |= set(disputed)
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", KILLED, str(killed.folder), str(renames), json.dumps(disputed)),
        env={**os.environ, "PYTHONPATH": str(Path(traces_module.__file__).parents[1])},
    )
    assert await child.wait() == 9
    assert names(await export(killed, settings)) == names(await export(whole, settings))


async def test_an_export_goes_on_after_a_full_disk(
    traces: Traces, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SelectionSettings(test_share=0.5)
    traces.add_counting(2)
    await export(traces, settings)
    traces.add_counting(2, first=2)
    write = pq.ParquetWriter.write_table

    def full(writer: Any, table: pa.Table, **options: Any) -> None:
        if "/.test-" in str(writer.where):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(writer, table, **options)

    with monkeypatch.context() as patch:
        patch.setattr(pq.ParquetWriter, "write_table", full)
        with pytest.raises(StorageError, match="No space left"):
            await export(traces, settings)
    assert len(rows_of(await export(traces, settings))) == 24


async def test_libraries_load_the_folder(traces: Traces, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    traces.add_counting(3)
    folder = await export(traces, SelectionSettings(test_share=0.5))
    loaded = datasets.load_dataset(str(folder.path), cache_dir=str(traces.folder / "cache"))
    assert sum(len(rows) for rows in loaded.values()) == 18
    assert loaded["train"].column_names == folder_module.SCHEMA.names


# Checking


@pytest.fixture
async def exported(traces: Traces, tmp_path: Path) -> DataFolder:
    traces.add_counting(3)
    made = await export(traces, SelectionSettings(test_share=0.5, reward_at_least=0.0))
    return DataFolder.open(made.path)


async def test_an_honest_data_set_passes_every_check(traces: Traces, exported: DataFolder) -> None:
    stream = traces.stream
    checks = [
        verify.check_bytes(exported),
        verify.check_outcomes(exported, stream),
        verify.check_rules(exported, HeldOut()),
        verify.check_card(exported, stream),
        await rows_check(exported, traces),
    ]
    assert [check.word for check in checks] == ["ok"] * 5, checks
    assert "18 samples made again" in checks[-1].detail


@pytest.mark.parametrize(
    "settings", [SelectionSettings(reward_at_least=1.0), SelectionSettings(per_problem=1)]
)
async def test_a_selection_passes_every_check_when_it_is_read_again(
    traces: Traces, settings: SelectionSettings
) -> None:
    traces.add_counting(3)
    folder = DataFolder.open((await export(traces, settings)).path)
    assert verify.check_outcomes(folder, traces.stream).passed
    assert verify.check_rules(folder, HeldOut()).passed
    assert verify.check_card(folder, traces.stream).passed, verify.check_card(folder, traces.stream)


async def test_rows_whose_file_is_not_at_hand_stay_open(
    traces: Traces, exported: DataFolder
) -> None:
    del traces.files[traces[2].record.file_hash]
    check = await rows_check(exported, traces)
    assert (check.word, check.passed) == ("open", True)
    assert "12 samples made again from their files, 6 not" in check.detail


def rewritten(folder: DataFolder, change: Callable[[pa.Table], pa.Table]) -> DataFolder:
    """Write every file of a data set again after a change, with matching hashes."""
    parts = []
    for part in folder.export.parts:
        files = []
        for each in part.files:
            path = folder.path / each.name
            pq.write_table(change(pq.ParquetFile(path).read()), path)
            files.append(replace(each, sha256=hashlib.sha256(path.read_bytes()).hexdigest()))
        parts.append(replace(part, files=tuple(files)))
    return DataFolder(folder.path, replace(folder.export, parts=tuple(parts)))


def altered(folder: DataFolder, change: Callable[[dict[str, Any]], None]) -> DataFolder:
    """Write every row of a data set again after a change, with matching hashes."""

    def alter(table: pa.Table) -> pa.Table:
        rows = table.to_pylist()
        for row in rows:
            change(row)
        return pa.Table.from_pylist(rows, schema=table.schema)

    return rewritten(folder, alter)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.append_column("messages", t["replies"]), "columns differ .*: messages$"),
        (lambda t: t.append_column("reward", t["reward"]), "columns differ .*: order$"),
        (lambda t: t.drop_columns("answer"), "columns differ .*: answer$"),
        (lambda t: t.set_column(14, "verifier", t["row"]), "columns differ .*: verifier$"),
        (lambda t: pa.concat_tables([t, t]), "rows, export.json says"),
    ],
    ids=["more", "twice", "fewer", "other type", "more rows"],
)
async def test_files_of_another_form_are_damaged(
    traces: Traces, exported: DataFolder, change: Callable[[pa.Table], pa.Table], says: str
) -> None:
    folder = rewritten(exported, change)
    with pytest.raises(StorageError, match=f"is damaged: .*{says}"):
        verify.check_outcomes(folder, traces.stream)
    with pytest.raises(StorageError, match=says):
        put_card(folder, traces.stream)


@pytest.mark.parametrize(
    ("column", "value"), [("problem_id", None), ("completion_tokens", [1, None])]
)
async def test_nulls_are_damage(exported: DataFolder, column: str, value: Any) -> None:
    folder = altered(exported, lambda row: row.update({column: value}))
    with pytest.raises(StorageError, match=f"the column {column} has nulls"):
        verify.check_rules(folder, HeldOut())


async def test_text_that_is_not_utf8_is_damage(exported: DataFolder) -> None:
    def change(rows: pa.Table) -> pa.Table:
        bad = pa.array([b"\xff"] * len(rows)).view(pa.string())
        return rows.set_column(rows.column_names.index("problem"), "problem", bad)

    with pytest.raises(StorageError, match="UTF8"):
        verify.check_rules(rewritten(exported, change), HeldOut())


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("worker", "0x" + "33" * 20, "worker 0x3333"),
        ("batch_id", 99, "batch_id 99"),
        ("file_sha256", "0x" + "00" * 32, "file_sha256 0x0000"),
        ("policy_root", "0x" + "00" * 32, "policy_root 0x0000"),
        ("stream_position", 7, "a row of place 7"),
    ],
)
async def test_rows_that_the_ledger_does_not_bear_out_are_named(
    traces: Traces, exported: DataFolder, column: str, value: Any, says: str
) -> None:
    def change(row: dict[str, Any]) -> None:
        if row["stream_position"] == 1:
            row[column] = value

    check = verify.check_outcomes(altered(exported, change), traces.stream)
    assert not check.passed
    assert says in check.detail


async def test_a_row_that_is_hidden_is_missed(traces: Traces, exported: DataFolder) -> None:
    [part] = exported.export.parts
    fewer = replace(exported.export, parts=(replace(part, files=part.files[:1]),))
    check = verify.check_outcomes(DataFolder(exported.path, fewer), traces.stream)
    assert not check.passed
    assert "samples, its submissions have 18" in check.detail


def without(folder: DataFolder, place: int, row: int, why: str) -> DataFolder:
    """Return a data set that counts one of its rows as left out by a rule, and hides it."""
    parts = []
    for part in folder.export.parts:
        files, hidden = [], 0
        for each in part.files:
            path = folder.path / each.name
            rows = pq.read_table(path).to_pylist()
            kept = [r for r in rows if (r["stream_position"], r["row"]) != (place, row)]
            hidden += len(rows) - len(kept)
            pq.write_table(pa.Table.from_pylist(kept, schema=folder_module.SCHEMA), path)
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            files.append(replace(each, rows=len(kept), sha256=digest))
        counts = Counter(part.left_out) + Counter({why: hidden})
        parts.append(replace(part, files=tuple(files), left_out=dict(counts)))
    return DataFolder(folder.path, replace(folder.export, parts=tuple(parts)))


@pytest.mark.parametrize("why", ["duplicate", "reward", "enough"])
async def test_a_row_that_no_rule_leaves_out_is_missed(
    traces: Traces, exported: DataFolder, why: str
) -> None:
    folder = without(exported, 1, 4, why)
    assert verify.check_outcomes(folder, traces.stream).passed
    assert verify.check_rules(folder, HeldOut()).passed
    check = await rows_check(folder, traces)
    assert not check.passed
    assert "place 1 of the stream: rows [4] are missing: no rule leaves them out" in check.detail


async def test_the_first_row_of_a_problem_is_not_replaced_by_a_later_one(traces: Traces) -> None:
    traces.add(rollout(0, tokens("1"), 1.0, 0), rollout(0, tokens("2"), 1.0, 1))
    whole = without(await export(traces), 0, 0, "enough")
    folder = DataFolder(
        whole.path, replace(whole.export, settings=SelectionSettings(per_problem=1))
    )
    assert verify.check_rules(folder, HeldOut()).passed
    assert "rows [0] are missing" in (await rows_check(folder, traces)).detail


async def test_counts_of_other_rules_than_those_that_leave_rows_out_are_found(
    traces: Traces,
) -> None:
    traces.add(rollout(0, tokens("1"), 0.0, 0), rollout(0, tokens("2"), 1.0, 1))
    made = await export(traces, SelectionSettings(reward_at_least=1.0))
    assert (await rows_check(made, traces)).passed
    [part] = made.export.parts
    other = replace(made.export, parts=(replace(part, left_out={"length": 1}),))
    check = await rows_check(DataFolder(made.path, other), traces)
    assert "from 0: {'length': 1}, the rules say {'reward': 1}" in check.detail


@pytest.mark.usefixtures("small_parts")
async def test_counts_of_another_part_are_found(traces: Traces) -> None:
    for n in range(4):
        rewards = [float(n > 0 or row > 0) for row in range(6)]
        traces.add(*(rollout(0, tokens(f"{n}{row}"), w, row) for row, w in enumerate(rewards)))
    traces.add(rollout(0, tokens("11"), 1.0, 0), rollout(0, tokens("77"), 1.0, 1))
    made = await export(traces, SelectionSettings(reward_at_least=1.0))
    first, second = made.export.parts
    assert (first.left_out, second.left_out) == ({"reward": 1}, {"duplicate": 1})
    assert (await rows_check(made, traces)).passed
    parts = (replace(first, left_out=second.left_out), replace(second, left_out=first.left_out))
    check = await rows_check(DataFolder(made.path, replace(made.export, parts=parts)), traces)
    assert "part from 4: {'reward': 1}, the rules say {'duplicate': 1}" in check.detail


@pytest.mark.parametrize(("per_problem", "is_excused"), [(0, False), (9, True)])
async def test_an_overturned_row_displaces_only_what_the_rules_say(
    traces: Traces, per_problem: int, is_excused: bool
) -> None:
    traces.add(rollout(0, tokens("1"), 1.0, 0))
    traces.add(rollout(0, tokens("2"), 1.0, 0))
    traces.disputed |= {0}
    folder = await export(traces, SelectionSettings(per_problem=per_problem))
    assert (await rows_check(folder, traces)).word == "ok"
    assert (await rows_check(without(folder, 1, 0, "duplicate"), traces)).passed is is_excused


async def test_a_row_may_be_left_out_for_one_that_was_overturned_later(traces: Traces) -> None:
    traces.add(rollout(0, tokens("1"), 1.0, 0))
    first = traces[0].record.file_hash
    traces.add(rollout(0, tokens("1"), 1.0, 0), rollout(1, tokens("2"), 1.0, 3))
    await export(traces)
    traces.disputed |= {0}
    folder = await export(traces)
    assert [row["problem_id"] for row in rows_of(folder)] == ["p1"]
    assert (await rows_check(folder, traces)).word == "ok"
    hiding = without(folder, 1, 1, "duplicate")
    assert "rows [1] are missing" in (await rows_check(hiding, traces)).detail
    del traces.files[first]
    check = await rows_check(hiding, traces)
    assert (check.word, "2 may be left out wrongly" in check.detail) == ("open", True)


async def test_short_held_out_texts_are_compared_whole_and_stay_open_without_the_texts(
    traces: Traces, tmp_path: Path
) -> None:
    path = tmp_path / "held-out.txt"
    path.write_text("3=\n")
    held_out = HeldOut([path])
    traces.add(rollout(3, tokens("1"), 1.0, 0), rollout(4, tokens("1"), 1.0, 1))
    folder = await export(traces, SelectionSettings(held_out=tuple(held_out.hashes)), held_out)
    assert [row["problem_id"] for row in rows_of(folder)] == ["p4"]
    assert folder.export.parts[0].left_out == {"contaminated": 1}
    assert (await rows_check(folder, traces, held_out)).word == "ok"
    check = await rows_check(folder, traces)
    assert (check.word, "1 may be left out wrongly" in check.detail) == ("open", True)


async def test_a_part_without_a_row_is_checked_too(traces: Traces) -> None:
    traces.add_counting(3)
    folder = await export(traces, SelectionSettings(tokens_at_least=8))
    assert rows_of(folder) == []
    assert (await rows_check(folder, traces)).word == "ok"
    keeping = DataFolder(folder.path, replace(folder.export, settings=ALL))
    assert "rows [0, 1, 2, 3, 4, 5] are missing" in (await rows_check(keeping, traces)).detail


@pytest.mark.parametrize(
    ("column", "value"), [("completion", "00009"), ("reward", 0.75), ("prompt_tokens", [1, 10])]
)
async def test_rows_that_are_not_their_files_are_named(
    traces: Traces, exported: DataFolder, column: str, value: Any
) -> None:
    folder = altered(exported, lambda row: row.update({column: value}))
    stream = traces.stream
    assert verify.check_outcomes(folder, stream).passed
    check = await rows_check(folder, traces)
    assert not check.passed
    assert f"other {column}" in check.detail


async def test_a_file_with_other_bytes_is_named(exported: DataFolder) -> None:
    path = exported.path / "data" / "train-00000.parquet"
    path.write_bytes(path.read_bytes() + b"more")
    assert "train-00000.parquet" in verify.check_bytes(exported).detail
    assert not verify.check_bytes(exported).passed


async def test_a_file_that_nobody_names_is_named(exported: DataFolder) -> None:
    (exported.path / "data" / "train-00099.parquet").write_bytes(b"")
    check = verify.check_bytes(exported)
    assert (check.passed, "train-00099" in check.detail) == (False, True)


async def test_a_card_with_another_figure_is_found(traces: Traces, exported: DataFolder) -> None:
    card = exported.path / CARD
    card.write_text(card.read_text().replace("18 samples", "19 samples"))
    check = verify.check_card(exported, traces.stream)
    assert not check.passed
    assert "19 samples" in check.detail


async def test_rows_that_a_rule_leaves_out_are_found(exported: DataFolder) -> None:
    strict = replace(
        exported.export, settings=SelectionSettings(reward_at_least=0.5, test_share=0.5)
    )
    check = verify.check_rules(DataFolder(exported.path, strict), HeldOut())
    assert not check.passed
    assert "a rule leaves out: reward" in check.detail


async def test_a_problem_in_the_wrong_split_is_found(exported: DataFolder) -> None:
    moved = replace(exported.export, settings=SelectionSettings(test_share=0.0))
    check = verify.check_rules(DataFolder(exported.path, moved), HeldOut())
    [wrong] = [part for part in check.detail.split("; ") if "other split" in part][:1]
    assert wrong.startswith("data/test-00000.parquet has problem")


async def test_other_held_out_texts_than_the_exports_are_refused(
    exported: DataFolder, tmp_path: Path
) -> None:
    path = tmp_path / "held-out.txt"
    path.write_text("a text\n")
    with pytest.raises(ConfigError, match="not those of the export"):
        verify.check_rules(exported, HeldOut([path]))


@pytest.fixture
def damaged(exported: DataFolder) -> Path:
    return exported.path / EXPORT


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"format":"muster-data"}'])
async def test_a_damaged_list_of_parts_is_refused(damaged: Path, data: bytes) -> None:
    damaged.write_bytes(data)
    with pytest.raises(ConfigError, match="is damaged"):
        DataFolder.open(damaged.parent)


@pytest.mark.parametrize(
    ("honest", "hostile"),
    [
        (b"data/train-00000", b"data/extra-00000"),
        (b"data/train-00000", b"data/train-00001"),
        (b"data/train-00000", b"../train-00000"),
        (b"data/train-00000", b"data/test-00000"),
        (b'"left_out":{}', b'"left_out":{"duplicate":-1}'),
        (b'"left_out":{}', b'"left_out":["duplicate"]'),
        (b'"rows":', b'"rows":-'),
        (b'"is_whole":false', b'"is_whole":0'),
    ],
)
async def test_a_list_of_what_no_export_writes_is_refused(
    damaged: Path, honest: bytes, hostile: bytes
) -> None:
    data = damaged.read_bytes()
    assert honest in data
    damaged.write_bytes(data.replace(honest, hostile))
    with pytest.raises(ConfigError, match="is damaged"):
        DataFolder.open(damaged.parent)
