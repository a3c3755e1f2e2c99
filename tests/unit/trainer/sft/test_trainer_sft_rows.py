"""Rows of a data set as tokens: rendering, rows that are left out, and the order."""

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, strategies as st
from worlds.chat_world import build_chat_model, make_chat_tokenizer

from muster.client.dataset.rows import SCHEMA
from muster.inference.framing import pin_prompt
from muster.inference.transformers_engine import TransformersEngine
from muster.protocol.encoding import canonical_json, hex0x, keccak
from muster.protocol.errors import ConfigError
from muster.protocol.ids import PolicyVersion, Step
from muster.protocol.prompts import render_prompt
from muster.protocol.recipe import PromptRecipe, Recipe, SamplingRecipe, TrainingRecipe
from muster.protocol.sft import SftRecipe
from muster.tasks.row_files import Unreadable
from muster.trainer.learn.packing import TrainingSample
from muster.trainer.sft.encoding import LeftOut, RowEncoder
from muster.trainer.sft.rows import Order, TokenRows, is_drawn, problem_of, sample_of, write_rows
from muster.trainer.sft.source import COLUMNS as EXPORTED, open_source

EOS, ONE, TWO, EQUALS = 1, 4, 5, 13
"""Token ids of the demo's tokenizer, whose digits begin at 3."""
ASKED = {"prompt": "12=", "completion": "21"}


def make_recipe(prompt: PromptRecipe | None = None, **rows: Any) -> SftRecipe:
    return SftRecipe.model_validate(
        {
            "name": "test",
            "rows": {"max_tokens": 12, **rows},
            "prompt": (prompt or PromptRecipe()).model_dump(),
            "training": {"batch_tokens": 12, "epochs": 2},
        }
    )


@pytest.fixture
def encoder(model_folder: Path) -> RowEncoder:
    return RowEncoder(make_recipe(), model_folder)


def not_trained(*tokens: int) -> list[int]:
    return [~token for token in tokens]


# One row


def test_a_prompt_is_not_trained_on_and_a_completion_ends(encoder: RowEncoder) -> None:
    prompt = not_trained(ONE, TWO, EQUALS)
    assert encoder.encode(ASKED) == [*prompt, TWO, ONE, EOS]
    assert encoder.encode({**ASKED, "is_finished": False}) == [*prompt, TWO, ONE]


def test_a_problem_comes_before_the_prompt_that_another_model_read(encoder: RowEncoder) -> None:
    row = {**ASKED, "problem": "2=", "prompt": "<template>2="}
    assert encoder.encode(row) == [*not_trained(TWO, EQUALS), TWO, ONE, EOS]


def test_all_of_a_row_is_trained_on_but_its_first_token(model_folder: Path) -> None:
    found = RowEncoder(make_recipe(trained="all"), model_folder).encode(ASKED)
    assert found == [~ONE, TWO, EQUALS, TWO, ONE, EOS]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (Unreadable("not JSON"), LeftOut.UNREADABLE),
        ([1, 2], LeftOut.UNREADABLE),
        ({"completion": "21"}, LeftOut.UNREADABLE),
        ({**ASKED, "completion": None}, LeftOut.UNREADABLE),
        ({**ASKED, "prompt": 12}, LeftOut.UNREADABLE),
        ({**ASKED, "completion": "\ud800"}, LeftOut.UNREADABLE),
        ({**ASKED, "target_length": "8"}, LeftOut.UNREADABLE),
        ({**ASKED, "completion": ""}, LeftOut.EMPTY),
        ({**ASKED, "prompt": ""}, LeftOut.EMPTY),
        ({**ASKED, "completion": "123456789"}, LeftOut.LONG),
        ({**ASKED, "completion": "1" * 1000}, LeftOut.LONG),
        ({"messages": [{"role": "user", "content": "1" * 1000}]}, LeftOut.LONG),
        ({**ASKED, "replies": [1, 2]}, LeftOut.REPLIES),
        ({"messages": "12="}, LeftOut.UNREADABLE),
        ({"messages": [{"role": "user", "content": 3}]}, LeftOut.UNREADABLE),
        ({"messages": []}, LeftOut.ROLES),
    ],
)
def test_what_cannot_be_trained_on_is_left_out_with_its_reason(
    encoder: RowEncoder, row: Any, why: LeftOut
) -> None:
    assert encoder.encode(row) is why


TEXTS = st.one_of(st.text(alphabet="12=\ud800\U0001f600", max_size=4), st.text(max_size=3))
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXTS)
SAID = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "assistant", "system"]), "content": TEXTS}
        ),
        SCALARS,
    ),
    max_size=4,
)
TOKENS = st.lists(st.one_of(st.integers(0, 15), st.integers()), max_size=4)
VALUES = st.one_of(TEXTS, SCALARS, SAID, TOKENS, st.dictionaries(TEXTS, SCALARS, max_size=2))
COLUMNS = (
    *("problem_id", "problem", "prompt", "completion", "messages", "target_length", "is_finished"),
    *("prompt_tokens", "completion_tokens", "replies"),
)
CHANGES = st.dictionaries(st.sampled_from(COLUMNS), VALUES, max_size=3)


@pytest.mark.parametrize("form", ["text", "tokens"])
def test_no_row_breaks_the_reader(model_folder: Path, form: str) -> None:
    encoder = RowEncoder(make_recipe(form=form), model_folder)

    @given(st.sampled_from([ASKED, SAMPLED, {}]), CHANGES)
    def encodes(given: dict[str, Any], changes: dict[str, Any]) -> None:
        row = {**given, **changes}
        found = encoder.encode(row)
        if not isinstance(found, LeftOut):
            assert isinstance(problem_of(row), bytes)
            sample = sample_of(found)
            assert sample.sampled
            assert all(0 <= t < 16 for t in (*sample.prompt_tokens, *sample.completion_tokens))

    encodes()


SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "12="}
ASSISTANT = {"role": "assistant", "content": "21"}
SAMPLED = {
    "prompt": "12=",
    "completion": "21",
    "prompt_tokens": [ONE, TWO, EQUALS],
    "completion_tokens": [TWO, ONE, EOS],
}


def test_sampled_tokens_are_taken_as_they_are(model_folder: Path) -> None:
    encoder = RowEncoder(make_recipe(form="tokens"), model_folder)
    assert encoder.encode(SAMPLED) == [*not_trained(ONE, TWO, EQUALS), TWO, ONE, EOS]
    replied = encoder.encode({**SAMPLED, "replies": [1, 2]})
    assert replied == [*not_trained(ONE, TWO, EQUALS), TWO, ~ONE, EOS]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"completion": "22"}, LeftOut.TOKENIZER),
        ({"prompt": "12"}, LeftOut.TOKENIZER),
        ({"prompt_tokens": [ONE, TWO, 16]}, LeftOut.UNREADABLE),
        ({"prompt_tokens": [ONE, TWO, -1]}, LeftOut.UNREADABLE),
        ({"completion_tokens": [EOS]}, LeftOut.EMPTY),
        ({"replies": [0, 3]}, LeftOut.EMPTY),
        ({"completion_tokens": [ONE] * 10}, LeftOut.LONG),
        ({"replies": [2, 1]}, LeftOut.UNREADABLE),
        ({"replies": [1, 4]}, LeftOut.UNREADABLE),
        ({"replies": [1]}, LeftOut.UNREADABLE),
    ],
)
def test_tokens_that_are_not_the_texts_are_left_out(
    model_folder: Path, changes: dict[str, Any], why: LeftOut
) -> None:
    encoder = RowEncoder(make_recipe(form="tokens"), model_folder)
    assert encoder.encode({**SAMPLED, **changes}) is why


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"problem": "2=", "prompt": "<template>2="}, b"2="),
        ({"messages": [SYSTEM, USER, USER]}, b"12="),
        ({"prompt": [USER], "completion": [ASSISTANT]}, b"12="),
        ({"problem": [USER], "completion": [ASSISTANT]}, b"12="),
        ({"problem": [USER], "prompt": "<template>2=", "completion": [ASSISTANT]}, b"<template>2="),
        ({**SAMPLED, "prompt": ""}, b""),
        ({"prompt": "", "messages": "12="}, b""),
    ],
)
def test_a_problem_is_named_by_its_text_or_the_first_question(row: Any, problem: bytes) -> None:
    assert problem_of(row) == problem


# Conversations, in a run's frame


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PromptRecipe]:
    """A chat model, and the prompt that a run pins for it."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    build_chat_model(folder, make_chat_tokenizer("qwen"))
    prompt = PromptRecipe(form="chat", system="Be brief.", reply_role="user")
    run = Recipe(
        name="chat",
        sampling=SamplingRecipe(
            problems_per_submission=1, samples_per_problem=2, temperature=1.0, max_new_tokens=8
        ),
        prompt=prompt,
        training=TrainingRecipe(submissions_per_step=1),
    )
    return folder, pin_prompt(run, folder).prompt


def test_a_prompt_is_the_one_that_workers_sample_from(chat: tuple[Path, PromptRecipe]) -> None:
    folder, prompt = chat
    engine = TransformersEngine("float32")
    engine.load_policy(folder, PolicyVersion(0))
    sampled_from = engine.encode(render_prompt("sort 3 1 2", -1, prompt))
    encoder = RowEncoder(make_recipe(prompt, max_tokens=999), folder)
    found = encoder.encode({"prompt": "sort 3 1 2", "completion": "1 2 3"})
    assert isinstance(found, list)
    assert tuple(~token for token in found if token < 0) == sampled_from
    said = engine.encode("1 2 3")
    assert [token for token in found if token >= 0][: len(said)] == list(said)
    assert found[-1] in engine.eos_token_ids


def test_later_turns_of_a_conversation_are_trained_on_and_questions_are_not(
    chat: tuple[Path, PromptRecipe],
) -> None:
    folder, prompt = chat
    encoder = RowEncoder(make_recipe(prompt, max_tokens=999), folder)
    talk = [
        {"role": "user", "content": "sort 3 1"},
        {"role": "assistant", "content": "1 3"},
        {"role": "user", "content": "sort 2 1"},
        {"role": "assistant", "content": "1 2"},
    ]
    whole, first = encoder.encode({"messages": talk}), encoder.encode({"messages": talk[:2]})
    assert isinstance(whole, list)
    assert isinstance(first, list)
    assert whole[: len(first)] == first
    rest = sample_of(whole)
    (reply,) = rest.replies
    assert reply[0] == len(first) - len(rest.prompt_tokens)
    for wrong in (
        talk[:3],
        talk[1:],
        [talk[0], talk[0]],
        [*talk[:1], {"role": "tool", "content": "x"}],
    ):
        assert encoder.encode({"messages": wrong}) is LeftOut.ROLES


def test_a_strangers_text_makes_no_control_token(chat: tuple[Path, PromptRecipe]) -> None:
    folder, prompt = chat
    encoder = RowEncoder(make_recipe(prompt, max_tokens=999), folder)
    engine = TransformersEngine("float32")
    engine.load_policy(folder, PolicyVersion(0))
    found = encoder.encode({"prompt": "sort 1", "completion": "1<|im_end|>2"})
    assert isinstance(found, list)
    ends = [token for token in found if token in engine.eos_token_ids]
    assert len(ends) == 1
    assert found[-1] == ends[0]


# A data set


def write_jsonl(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        b"".join(r if isinstance(r, bytes) else json.dumps(r).encode() + b"\n" for r in rows)
    )
    return path


def test_rows_are_written_once_and_counted(encoder: RowEncoder, tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_jsonl(
        data / "train.jsonl",
        ASKED,
        {"prompt": "3=", "completion": "3"},
        {"prompt": "3=", "completion": ""},
        {"problem": [USER], "completion": [ASSISTANT]},
        b"{torn\n",
        b'{"prompt": "1\xff", "completion": "2"}\n',
        b'{"prompt": "' + b"1" * (5 << 20) + b'", "completion": "2"}\n',
    )
    pq.write_table(
        pa.Table.from_pylist([{"prompt": "4=", "completion": "4"}]), data / "test-0.parquet"
    )
    counts = write_rows(tmp_path / "rows", open_source(data), encoder, 0.0)
    assert (counts.trained, counts.held_out, counts.tokens) == (3, 1, 20)
    assert counts.left_out == {"unreadable": 3, "empty": 1}
    rows = TokenRows(tmp_path / "rows")
    assert rows.counts == counts
    assert [rows.sample(row) for row in rows.held_out.tolist()] == [
        TrainingSample((7, EQUALS), (7, EOS))
    ]
    assert rows.sample(int(rows.trained[0])) == TrainingSample((ONE, TWO, EQUALS), (TWO, ONE, EOS))


def test_a_problem_is_held_out_with_all_its_rows(encoder: RowEncoder, tmp_path: Path) -> None:
    rows = [
        {"problem_id": f"p{n % 10}", "prompt": f"{n % 10}=", "completion": str(n // 10)}
        for n in range(40)
    ]
    path = write_jsonl(tmp_path / "all.jsonl", *rows)
    write_rows(tmp_path / "rows", open_source(path), encoder, 0.3)
    found = TokenRows(tmp_path / "rows")
    out, trained = (
        {found.sample(row).prompt_tokens for row in part.tolist()}
        for part in (found.held_out, found.trained)
    )
    assert len(out) + len(trained) == 10
    assert len(out) == sum(is_drawn(b"p%d" % n, 0.3) for n in range(10)) > 0


@pytest.mark.parametrize(
    ("row", "hint"),
    [
        ({"prompt": "1=", "completion": ""}, "name the columns"),
        ({"prompt": "1=", "completion": "1" * 20}, "rows.max_tokens"),
    ],
)
def test_a_data_set_without_a_row_to_train_on_is_refused(
    encoder: RowEncoder, tmp_path: Path, row: Any, hint: str
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", row)
    with pytest.raises(ConfigError, match="nothing to train on: 0 rows") as refused:
        write_rows(tmp_path / "rows", open_source(path), encoder, 0.0)
    assert hint in str(refused.value.hint)
    assert not (tmp_path / "rows").exists()


def test_steps_take_every_row_once_an_epoch_in_the_seeds_order(
    encoder: RowEncoder, tmp_path: Path
) -> None:
    path = write_jsonl(
        tmp_path / "all.jsonl",
        *({"prompt": f"{n}=", "completion": "1" * (1 + n % 4)} for n in range(30)),
    )
    write_rows(tmp_path / "rows", open_source(path), encoder, 0.0)
    rows = TokenRows(tmp_path / "rows")
    order = Order(rows, make_recipe().training)
    taken = [order.samples(Step(step)) for step in range(1, order.last + 1)]
    half = [step for step in range(1, order.last + 1) if order.epoch_of(Step(step)) == 0][-1]
    everything = sorted(rows.sample(n).prompt_tokens for n in range(30))
    epochs = [[s.prompt_tokens for part in p for s in part] for p in (taken[:half], taken[half:])]
    assert [sorted(epoch) for epoch in epochs] == [everything, everything]
    assert epochs[0] != epochs[1]
    assert max(sum(s.length for s in step[:-1]) for step in taken) <= 12
    again = Order(rows, make_recipe().training)
    assert again.samples(order.last) == taken[-1]
    other = make_recipe().training.model_copy(update={"seed": 1})
    assert Order(rows, other).samples(Step(1)) != taken[0]


def test_rows_of_a_problem_come_together_when_problems_are_shuffled(
    encoder: RowEncoder, tmp_path: Path
) -> None:
    rows = [{"prompt": f"{n % 9}=", "completion": str(n)} for n in range(27)]
    path = write_jsonl(tmp_path / "all.jsonl", *rows)
    write_rows(tmp_path / "rows", open_source(path), encoder, 0.0)
    training = make_recipe().training.model_copy(update={"order": "problems"})
    order = Order(TokenRows(tmp_path / "rows"), training)
    steps = [
        order.samples(Step(n)) for n in range(1, order.last + 1) if order.epoch_of(Step(n)) == 0
    ]
    prompts = [sample.prompt_tokens for step in steps for sample in step]
    assert all(prompts[n] == prompts[n + 1] == prompts[n + 2] for n in range(0, 27, 3))
    assert prompts[::3] != sorted(prompts[::3])
    assert len(set(prompts)) == 9


# Files


ROW = {name: ASKED.get(name) for name in EXPORTED}
"""A row of an exported data set."""


def exported(folder: Path, rows: bytes | None = None, **changes: Any) -> Path:
    """Write a data set in the form of `muster data export`; `rows` is the content of its file."""
    (folder / "data").mkdir(parents=True)
    path = folder / "data" / "train-00000.parquet"
    path.write_bytes(parquet(ROW) if rows is None else rows)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    file = {"name": "data/train-00000.parquet", "rows": 1, "sha256": digest}
    export = {
        "format": "muster-data",
        "version": 1,
        "origin": {"run_id": 7, "chain_id": 31337},
        "parts": [{"files": [{**file, **changes}]}],
    }
    (folder / "export.json").write_bytes(canonical_json(export))
    return folder


def test_an_exported_data_set_is_named_by_its_root(tmp_path: Path) -> None:
    folder = exported(tmp_path / "traces")
    found = open_source(folder)
    assert found.root == hex0x(keccak((folder / "export.json").read_bytes()))
    assert found.origin == {"run_id": 7, "chain_id": 31337}
    assert [each.name for each in found.files] == ["data/train-00000.parquet"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"sha256": "00" * 32}, "not the file that was exported"),
        ({"name": "data/train-00001.parquet"}, "not the file that was exported"),
        ({"name": "../secrets.parquet"}, "outside the folder"),
        ({"name": "/etc/passwd"}, "outside the folder"),
        ({"name": 7}, "outside the folder"),
    ],
)
def test_an_exported_data_set_that_was_changed_is_refused(
    tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        open_source(exported(tmp_path / "traces", **changes))


def parquet(row: dict[str, Any]) -> bytes:
    """Return a Parquet file of one row."""
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([row]), file)
    return file.getvalue()


def test_the_columns_are_those_that_verification_compares() -> None:
    assert list(EXPORTED) == SCHEMA.names


@pytest.mark.parametrize(
    "rows",
    [
        parquet({**ROW, "messages": [{"role": "user", "content": "1"}]}),
        parquet(ASKED),
        json.dumps(ROW).encode() + b"\n" + parquet(ROW),
    ],
    ids=["more", "fewer", "JSON lines before the Parquet"],
)
def test_an_exported_data_set_with_other_columns_is_refused(tmp_path: Path, rows: bytes) -> None:
    with pytest.raises(ConfigError, match="other columns than `muster data export` writes"):
        open_source(exported(tmp_path / "traces", rows))


@pytest.mark.parametrize("data", [b"{}", b"[]", b'{"format": "muster-data"}', b"{"])
def test_an_export_that_is_none_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "export.json").write_bytes(data)
    with pytest.raises(ConfigError, match=r"export\.json is damaged"):
        open_source(tmp_path)


def test_a_folder_without_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".hidden.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match="there is no data set"):
        open_source(tmp_path)
