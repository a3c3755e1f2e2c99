"""What is on disk: policies and metrics. Complete or absent, and the right one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from muster.protocol.errors import StorageError
from muster.protocol.ids import PolicyVersion
from muster.trainer.learn.persistence import named_weights
from muster.trainer.measure.figures import flat
from muster.trainer.measure.metrics import MetricsLog
from muster.trainer.publish.policies import BASE, PolicyShelf, policy_files, vocab_size

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


def test_remembered_weights_do_not_follow_the_learner(shelf: PolicyShelf) -> None:
    live = {name: weight.clone() for name, weight in shelf.weights(BASE).items()}
    shelf.write(V1, live)
    before = {name: weight.clone() for name, weight in live.items()}
    for weight in live.values():
        weight += 1
    for name, weight in shelf.weights(V1).items():
        assert torch.equal(weight, before[name])


def test_published_type_is_what_is_remembered(model_folder: Path, tmp_path: Path) -> None:
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


def test_weights_are_mapped_and_stay_when_the_version_is_dropped(shelf: PolicyShelf) -> None:
    shelf.write(V1, {n: w + 1 for n, w in shelf.weights(BASE).items()})
    mapped = shelf.weights(V1)
    assert shelf.weights(V1) is not mapped
    shelf.drop_before(V2)
    for name, weight in shelf.weights(BASE).items():
        assert torch.equal(mapped[name], weight + 1)


def test_interrupted_write_leaves_no_version(
    shelf: PolicyShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("muster.trainer.publish.policies.save_file", fail)
    with pytest.raises(OSError, match="No space"):
        shelf.write(V1, shelf.weights(BASE))
    assert not shelf.has(V1)


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
