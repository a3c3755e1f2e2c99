"""Bad input through the whole flow: a named error or a counted drop, and nothing lost.

What is trained on afterwards is compared with a trainer that never saw the bad input.
"""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from trainer_fakes import Feed, make_recipe, make_rollouts, with_filters, with_reward
from trainer_world import World, die, dying, without_time

from muster.inference.policy_files import declared_ends, read_config, read_tokenizer
from muster.protocol.errors import ConfigError, EncodingError, MusterError, StorageError
from muster.protocol.recipe import Recipe
from muster.protocol.rollouts import SCHEMA, Rollout, encode_rollouts
from muster.protocol.sft import SftRecipe
from muster.trainer.create import model_files
from muster.trainer.publish.policies import eos_token_ids
from muster.trainer.sft.encoding import RowEncoder
from muster.trainer.stream.filters import Drop
from muster.trainer.stream.reader import read_submission


def _file(rows: list[Rollout], **changes: Any) -> bytes:
    """Return the file of these rows with a column's values replaced by any others."""
    table = pq.read_table(pa.BufferReader(encode_rollouts(rows)))
    for name, values in changes.items():
        field = SCHEMA.field(name)
        table = table.set_column(
            table.schema.get_field_index(name), field, pa.array(values, field.type)
        )
    sink = pa.BufferOutputStream()
    pq.write_table(table.cast(SCHEMA), sink)
    return bytes(sink.getvalue())


def _rewards(value: float) -> list[float]:
    return [0.0, value, *[1.0] * 6]


GOOD = make_rollouts(90)

POISON: dict[str, tuple[Callable[[], bytes], str]] = {
    "nan reward": (lambda: _file(GOOD, task_reward=_rewards(math.nan)), "reward outside"),
    "infinite reward": (
        lambda: _file(GOOD, task_reward=_rewards(math.inf)), "reward outside",
    ),
    "reward above one": (
        lambda: _file(GOOD, task_reward=_rewards(2.0)), "reward outside",
    ),
    "empty completion": (
        lambda: _file(GOOD, completion_tokens=[[], *[[3, 1]] * 7]), "empty prompt or",
    ),
    "negative token": (
        lambda: _file(GOOD, completion_tokens=[[-3, 1], *[[3, 1]] * 7]), "negative or",
    ),
    "one older row": (
        lambda: encode_rollouts([replace(GOOD[0], policy_version=1),
                                 *GOOD[1:]]), "row 0 claims policy 1",
    ),
    "truncated file": (lambda: encode_rollouts(GOOD)[:-40], "not a readable"),
    "flipped footer": (lambda: encode_rollouts(GOOD)[:-8] + b"\xff" * 8, "not a readable"),
    "nothing": (lambda: b"", "not a readable"),
}  # fmt: skip


@pytest.mark.parametrize("kind", POISON)
def test_poisoned_file_is_refused_for_the_named_reason(kind: str) -> None:
    make, reason = POISON[kind]
    data = make()
    record = Feed().ledger.accept(Feed().files.put(data))
    with pytest.raises(EncodingError, match=reason):
        read_submission(data, record, make_recipe(), 16)


@pytest.fixture
def clean(tmp_path: Path, model_folder: Path) -> World:
    """A run with two steps' records."""
    made = World(tmp_path / "clean", model_folder)
    made.feed.submit_many(range(4))
    return made


@pytest.mark.parametrize("kind", ["nan reward", "one older row", "truncated file"])
async def test_poisoned_file_changes_nothing_but_the_count(
    tmp_path: Path, model_folder: Path, clean: World, kind: str
) -> None:
    world = World(tmp_path / "poisoned", model_folder)
    world.feed.submit_many(range(3))
    world.feed.ledger.accept(world.feed.files.put(POISON[kind][0]()))
    world.feed.submit_many([3])
    await clean.train(2)
    await world.train(2)
    assert torch.equal(world.weights(2), clean.weights(2))
    assert [line["dropped"] for line in world.lines()] == [{}, {Drop.UNREADABLE: 8}]
    assert world.lines()[1]["stream_to"] == 5


def _root_error(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


async def _fails(world: World, steps: int, **changes: Any) -> MusterError:
    with pytest.raises((MusterError, ExceptionGroup)) as caught:
        await world.train(steps, **changes)
    error = _root_error(caught.value)
    assert isinstance(error, MusterError)
    return error


async def test_missing_policy_is_named_and_nothing_is_trained(
    tmp_path: Path, model_folder: Path
) -> None:
    world = World(tmp_path / "world", model_folder)
    world.feed.submit_many(range(2))
    world.feed.submit_many(range(2, 4), version=1)
    await world.train(1)
    published = world.folder / "policies" / "1"
    away = published.rename(tmp_path / "away")
    # At its start the trainer writes its newest version again; the records are of an older one.
    world.feed.submit_many(range(4, 6), version=1)
    await world.train(2)
    shutil.rmtree(published)
    error = await _fails(world, 3)
    assert isinstance(error, StorageError)
    assert "there is no policy in" in str(error)
    assert str(published) in str(error)
    assert [line["step"] for line in world.lines()] == [1, 2]
    away.rename(published)
    await world.train(3)
    assert world.lines()[-1]["stream_to"] == 6


async def test_full_disk_of_the_metrics_is_named_and_the_step_taken_again(
    tmp_path: Path, model_folder: Path, clean: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path / "world", model_folder)
    world.feed.submit_many(range(4))
    await clean.train(2)
    await world.train(1)
    opened = Path.open

    def full(path: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        if path.name == "metrics.jsonl" and mode == "a":
            raise OSError(28, "No space left on device")
        return opened(path, mode, *args, **options)

    monkeypatch.setattr(Path, "open", full)
    error = await _fails(world, 2)
    assert isinstance(error, StorageError)
    assert "No space left" in str(error)
    assert error.hint
    monkeypatch.undo()
    await world.train(2)
    assert torch.equal(world.weights(2), clean.weights(2))
    assert without_time(world) == without_time(clean)


async def test_empty_step_makes_a_version_with_the_weights_it_had(
    tmp_path: Path, model_folder: Path
) -> None:
    world = World(tmp_path / "world", model_folder)
    for seed in range(2):
        world.feed.submit(with_reward(make_rollouts(seed), 1.0))
    world.feed.submit_many([2, 3])
    await world.train(2)
    assert torch.equal(world.weights(1), world.weights(0))
    assert not torch.equal(world.weights(2), world.weights(1))
    empty = world.lines()[0]
    assert (empty["samples"], empty["tokens"], empty["reward"]) == (0, 0, 1.0)
    assert empty["dropped"] == {Drop.ZERO_ADVANTAGE: 16}


# ------------------------------------------------------------------ models without their tokens


@pytest.fixture
def model(tmp_path: Path, model_folder: Path) -> Path:
    """A model folder that tests may damage."""
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


def _set(folder: Path, **values: Any) -> None:
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        if path.exists():
            config = {**json.loads(path.read_text()), **values}
            path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def test_end_of_a_completion_is_read_from_the_model(model: Path) -> None:
    assert eos_token_ids(model) == {1}
    _set(model, eos_token_id=[1, 2])
    assert eos_token_ids(model) == {1, 2}


@pytest.mark.parametrize("where", ["tokenizer", "configuration's class"])
def test_ends_are_those_of_the_engines(model: Path, where: str) -> None:
    if where == "tokenizer":
        _set(model, eos_token_id=2)
    else:
        _set(model, eos_token_id=None, model_type="llama", architectures=["LlamaForCausalLM"])
    found = eos_token_ids(model)
    assert found == {1, 2}
    tokenizer = read_tokenizer(model)
    assert found == declared_ends(model, read_config(model), tokenizer)
    assert RowEncoder(SftRecipe.model_validate(SFT), model)._end == tokenizer.eos_token_id == 1


SFT = {"name": "x", "rows": {"max_tokens": 12}, "training": {"batch_tokens": 12, "epochs": 1}}


@pytest.mark.parametrize(("ids", "shown"), [(None, r"\[\]"), (16, "16"), ([1, 99], r"\[1, 99\]")])
def test_model_without_its_end_token_is_refused(model: Path, ids: Any, shown: str) -> None:
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    _set(model, eos_token_id=size if ids == 16 else ids)
    if ids is None:
        settings = json.loads((model / "tokenizer_config.json").read_text())
        (model / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": None}))
    with pytest.raises(ConfigError, match=shown):
        model_files(model)
    with pytest.raises(ConfigError, match="has EOS tokens") as caught:
        eos_token_ids(model)
    assert caught.value.hint


# ------------------------------------------------------------------ killed with pools and refill


def _pooled() -> Recipe:
    return with_filters(
        make_recipe(max_async_level=8),
        refill_submissions=2, pool_window=3, pool_hard=0.3, pool_easy=0.7, pool_min_groups=1,
    )  # fmt: skip


def _feed(world: World) -> None:
    for seed in range(16):
        rows = make_rollouts(seed)
        world.feed.submit(rows[:4] + with_reward(rows[4:], float(seed % 3 == 0)))


@pytest.mark.parametrize("moment", ["learn after", "complete after"])
async def test_killed_trainer_decides_the_same_with_pools_and_refill(
    tmp_path: Path, model_folder: Path, moment: str
) -> None:
    undisturbed = World(tmp_path / "undisturbed", model_folder, _pooled())
    killed = World(tmp_path / "killed", model_folder, _pooled())
    for world in (undisturbed, killed):
        _feed(world)
    await undisturbed.train(4)
    await die(dying(killed.parts(), moment, 2), steps=4)
    await killed.train(4)
    assert torch.equal(killed.weights(4), undisturbed.weights(4))
    assert without_time(killed) == without_time(undisturbed)
    assert sum(killed.lines()[-1]["pools"].values()) == 2
    assert all(line["refill"] == 2 for line in killed.lines())
