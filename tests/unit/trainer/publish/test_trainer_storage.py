"""Policies and metrics on disk: complete or absent, and the right ones."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from muster.protocol.errors import StorageError
from muster.protocol.ids import PolicyVersion
from muster.trainer.learn.persistence import named_weights
from muster.trainer.measure.figures import flat
from muster.trainer.measure.metrics import MetricsLog
from muster.trainer.publish.policies import (
    _CODES,
    BASE,
    Formats,
    MappedWeights,
    PolicyShelf,
    _in_order,
    policy_files,
    vocab_size,
    write_tensors,
)

V1, V2, V3 = PolicyVersion(1), PolicyVersion(2), PolicyVersion(3)


@pytest.fixture
def shelf(model_folder: Path, tmp_path: Path) -> PolicyShelf:
    """A shelf with the base model."""
    made = PolicyShelf(tmp_path / "policies")
    made.adopt(model_folder)
    return made


def test_adopted_model_is_the_same_files(model_folder: Path, shelf: PolicyShelf) -> None:
    copied = policy_files(shelf.path(BASE))
    original = policy_files(model_folder)
    assert {n: p.read_bytes() for n, p in copied.items()} == {
        n: p.read_bytes() for n, p in original.items()
    }
    assert "tokenizer.json" in copied


def test_written_policy_loads_as_a_model_with_its_tokenizer(shelf: PolicyShelf) -> None:
    weights = {name: weight + 1 for name, weight in shelf.weights(BASE).items()}
    folder = shelf.write(V1, weights)
    model = AutoModelForCausalLM.from_pretrained(folder)
    for name, weight in named_weights(model).items():
        assert torch.equal(weight, weights[name])
    assert AutoTokenizer.from_pretrained(folder).eos_token == "<eos>"
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_written_policy_is_the_same_bytes_every_time(shelf: PolicyShelf) -> None:
    weights = dict(shelf.weights(BASE))
    one = {n: p.read_bytes() for n, p in policy_files(shelf.write(V1, weights)).items()}
    backwards = dict(reversed(weights.items()))
    two = {n: p.read_bytes() for n, p in policy_files(shelf.write(V1, backwards)).items()}
    assert one == two


def test_written_weights_do_not_follow_the_learner(shelf: PolicyShelf) -> None:
    live = {name: weight.clone() for name, weight in shelf.weights(BASE).items()}
    shelf.write(V1, live)
    before = {name: weight.clone() for name, weight in live.items()}
    for weight in live.values():
        weight += 1
    for name, weight in shelf.weights(V1).items():
        assert torch.equal(weight, before[name])


def test_published_type_is_what_is_read(model_folder: Path, tmp_path: Path) -> None:
    shelf = PolicyShelf(tmp_path, dtype="bfloat16")
    shelf.adopt(model_folder)
    weights = {name: torch.full_like(w, 1.001) for name, w in shelf.weights(BASE).items()}
    shelf.write(V1, weights)
    again = PolicyShelf(tmp_path, dtype="bfloat16")
    for name, weight in shelf.weights(V1).items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, again.weights(V1)[name])


def test_old_policies_are_dropped_but_never_the_base(shelf: PolicyShelf) -> None:
    for version in (V1, V2, V3):
        shelf.write(version, shelf.weights(BASE))
    shelf.drop_before(V3)
    assert [shelf.has(v) for v in (BASE, V1, V2, V3)] == [True, False, False, True]
    with pytest.raises(StorageError, match="no policy"):
        shelf.weights(V1)


def test_full_disk_leaves_no_version(shelf: PolicyShelf, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("muster.trainer.publish.policies.write_all", fail)
    with pytest.raises(StorageError, match=r"cannot write model.safetensors: No space"):
        shelf.write(V1, shelf.weights(BASE))
    assert not shelf.has(V1)


# ---------------------------------------------------------------- weights that come in pieces

Pieces = Iterator[tuple[str, Tensor]]


def _cut(weights: Mapping[str, Tensor], formats: Formats) -> Pieces:
    """Yield every tensor in three pieces."""
    for name, dtype in formats.items():
        for piece in weights[name].flatten().to(dtype).tensor_split(3):
            yield name, piece


def test_file_has_the_very_bytes_of_safetensors_own_writer(
    shelf: PolicyShelf, tmp_path: Path
) -> None:
    kinds = [*_CODES, torch.float32, torch.bfloat16]
    tensors = {
        f'{"zyx"[i % 3]}.\u00e9"{i}': torch.arange(7 + i).remainder(2).to(kind).view(1, 7 + i)
        for i, kind in enumerate(kinds)
    } | {"scalar": torch.tensor(2.5), "none": torch.zeros(0, 4), "odd": torch.ones(5).bool()}
    formats = _in_order({name: tensor.dtype for name, tensor in tensors.items()})
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    write_tensors(tmp_path / "ours", formats, shapes, _cut(tensors, formats))
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def _swapped(pieces: Pieces) -> Pieces:
    first, second = next(pieces), next(pieces)
    yield from (second, first, *pieces)


BREAKS: dict[str, tuple[Callable[[Pieces], Pieces], str]] = {
    "in another order": (lambda pieces: iter(list(pieces)[::-1]), "in another order, at "),
    "one twice": (lambda pieces: iter([next(pieces)] * 2 + [*pieces]), "in another order, at "),
    "one left out": (lambda pieces: iter([*pieces][:-1]), "ended in "),
    "one left out inside": (lambda pieces: iter([*pieces][:4] + [*pieces][5:]), "ended in "),
    "longer": (lambda pieces: iter([(n, p.repeat(2)) for n, p in pieces]), "in another order, at "),
    "of another tensor": (
        lambda pieces: iter([("other", p) for _, p in pieces]),
        "in another order, at other",
    ),
}


@pytest.mark.parametrize("broken", BREAKS)
def test_weights_that_come_otherwise_make_no_version(shelf: PolicyShelf, broken: str) -> None:
    weights = shelf.weights(BASE)
    break_it, why = BREAKS[broken]
    assert shelf.writing(V2, weights, partial(_cut, weights))() == shelf.path(V2)
    with pytest.raises(StorageError, match=why):
        shelf.writing(V1, weights, lambda formats: break_it(_cut(weights, formats)))()
    assert not shelf.has(V1)
    assert not list(shelf.path(V1).parent.glob(".*.part"))


def test_crash_between_tensors_leaves_the_versions_before(shelf: PolicyShelf) -> None:
    weights = shelf.weights(BASE)
    shelf.write(V1, weights)
    before = {n: p.read_bytes() for n, p in policy_files(shelf.path(V1)).items()}
    leftover = shelf.path(V1).with_name(".1.part")
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    assert {n: p.read_bytes() for n, p in policy_files(shelf.path(V1)).items()} == before
    shelf.write(V1, weights)
    assert not leftover.exists()
    assert {n: p.read_bytes() for n, p in policy_files(shelf.path(V1)).items()} == before


def _short_model(model_folder: Path, folder: Path) -> Path:
    """A copy of a model in bfloat16, except its norms."""
    shutil.copytree(model_folder, folder)
    weights = load_file(model_folder / "model.safetensors")
    short = {n: w if "norm" in n else w.bfloat16() for n, w in weights.items()}
    save_file(short, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_every_weight_is_published_in_the_base_s_own_format(
    model_folder: Path, tmp_path: Path
) -> None:
    shelf = PolicyShelf(tmp_path / "policies")
    shelf.adopt(_short_model(model_folder, tmp_path / "model"))
    learned = {name: weight.float() + 0.125 for name, weight in shelf.weights(BASE).items()}
    learned["extra.weight"] = torch.ones(3)
    shelf.write(V1, learned)
    for name, weight in shelf.weights(V1).items():
        assert weight.dtype == (torch.float32 if "norm" in name else torch.bfloat16), name
        assert torch.equal(weight, learned[name].to(weight.dtype))


def test_mapped_weights_are_those_of_the_file_and_stay_without_it(shelf: PolicyShelf) -> None:
    shelf.write(V1, {n: w + 1 for n, w in shelf.weights(BASE).items()})
    mapped = shelf.weights(V1)
    stored = load_file(shelf.path(V1) / "model.safetensors")
    assert mapped.keys() == stored.keys()
    assert len(mapped) == len(stored)
    assert all(torch.equal(mapped[name], weight) for name, weight in stored.items())
    shelf.drop_before(V2)
    assert not shelf.has(V1)
    assert all(torch.equal(mapped[name], weight) for name, weight in stored.items())


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ('{"w":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}', 8),
        ('{"w":{"dtype":"Q4","shape":[2],"data_offsets":[0,8]}}', 8),
        ('{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', 7),
        ("{}", 0),
    ],
)
def test_weights_that_are_none_are_refused(tmp_path: Path, header: str, data: int) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(data))
    with pytest.raises(StorageError, match=r"w\.safetensors is none"):
        MappedWeights([path])


@pytest.mark.parametrize(
    "files", [[], ["config.json"], ["model.safetensors"], ["config.json", "x.bin"]]
)
def test_folder_that_is_no_model_is_refused(tmp_path: Path, files: list[str]) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises(StorageError, match="is not a model folder"):
        policy_files(tmp_path)


def test_only_what_workers_need_is_published(model_folder: Path, tmp_path: Path) -> None:
    shelf = PolicyShelf(tmp_path)
    shelf.adopt(model_folder)
    folder = shelf.path(BASE)
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / ".hidden.json").write_text("{}")
    (folder / "sub").mkdir()
    assert set(policy_files(folder)) == set(policy_files(model_folder))


def test_damaged_weights_are_named(shelf: PolicyShelf, tmp_path: Path) -> None:
    (shelf.write(V1, shelf.weights(BASE)) / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(StorageError, match="cannot read the policy"):
        PolicyShelf(tmp_path / "policies").weights(V1)


def test_vocabulary_is_the_configuration_s(model_folder: Path) -> None:
    assert vocab_size(model_folder) == 16


def _lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_metrics_of_steps_that_are_taken_again_are_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "state" / "metrics.jsonl"
    log = MetricsLog(path)
    evaluation = {"eval": {"policy_version": 0, "reward": 0.3, "problems": 5}}
    log.append(evaluation)
    for step in (1, 2, 3):
        log.append({"step": step, "policy_version": step})
    with path.open("a") as file:
        file.write('{"step": 4, "policy_ver')
    log.forget_after(V2)
    assert _lines(path) == [
        evaluation,
        {"step": 1, "policy_version": 1},
        {"step": 2, "policy_version": 2},
    ]
    assert log.evaluated() == {0}


def test_metrics_of_nothing_are_nothing(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.forget_after(V1)
    assert log.evaluated() == set()


def test_flat_are_flat_numbers() -> None:
    entry = {"step": 3, "loss": None, "dropped": {"stale": 2}, "reward": 0.5}
    assert flat(entry) == {"step": 3.0, "dropped_stale": 2.0, "reward": 0.5}
    assert flat({"eval": {"policy_version": 1, "reward": 0.5}}) == {
        "eval_policy_version": 1.0,
        "eval_reward": 0.5,
    }
