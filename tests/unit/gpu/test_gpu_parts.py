"""The parts of `make test-gpu`: tiny shapes on a CPU, users' shapes on the meta device."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.gpu import choices, engines, run, training
from benchmarks.gpu.setup import Missing, Setup
from benchmarks.inference.size import VOCAB
from transformers import AutoConfig, Qwen3ForCausalLM

from muster.inference import device_proofs
from muster.inference.lean_model import LeanModel
from muster.inference.lean_prefill import predicting_rows
from muster.inference.sampler import device_winners, keyed_noise, keys_on
from muster.trainer.learn import recompute


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return Setup("cpu", is_tiny=True, models=tmp_path_factory.mktemp("models"))


IN_PROCESS = (
    *("noise", "toploc", "replay", "margins", "generation", "examination"),
    *("trainer", "host", "nccl", "resume", "sites"),
)


@pytest.mark.parametrize("part", IN_PROCESS)
def test_each_part_finds_a_cpu_equal_to_itself(part: str, setup: Setup) -> None:
    metrics, detail = run.measure(part, setup)
    assert run.PARTS[part].missed(metrics, setup) == []
    assert all(map(math.isfinite, metrics.values()))
    assert json.loads(json.dumps(detail)) == detail


@pytest.mark.slow
def test_the_suite_is_run_with_the_device(setup: Setup) -> None:
    metrics, _ = run.measure("conformance", setup)
    assert metrics["gpu_conformance_failed"] == 0
    assert metrics["gpu_conformance_passed"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("part", ["doctor", "network"])
def test_a_network_computes_where_it_is_told(part: str, setup: Setup) -> None:
    metrics, _ = run.measure(part, setup)
    assert run.PARTS[part].missed(metrics, setup) == []


# ------------------------------------------------------- a device that computes otherwise is found


def test_another_choice_is_counted(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*asked: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ids, scores = device_winners(*asked)
        ids[-1] += 1
        return ids, scores

    monkeypatch.setattr(choices, "device_winners", other)
    metrics, _ = run.measure("noise", setup)
    assert metrics["gpu_noise_wrong_ids"] > 0
    assert run.PARTS["noise"].missed(metrics, setup)


def test_another_replay_is_counted(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    replay = choices.DeviceBlock.replay

    def other(block: Any, *asked: Any) -> Any:
        found = replay(block, *asked)
        return replace(found, margins_T=found.margins_T + np.float32(0.01))

    monkeypatch.setattr(choices.DeviceBlock, "replay", other)
    metrics, _ = run.measure("replay", setup)
    assert run.PARTS["replay"].missed(metrics, setup) == ["gpu_replay_margin_error 0.01 > 0.0001"]


def test_another_proof_is_counted(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = device_proofs._packed

    def other(chunks: torch.Tensor, points: int) -> torch.Tensor:
        return packed(chunks.flip(1), points)

    monkeypatch.setattr(device_proofs, "_packed", other)
    metrics, _ = run.measure("toploc", setup)
    assert metrics["gpu_toploc_differing"] == 3


def test_another_arithmetic_is_rejected(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    made = engines._engine

    def other(model: Path, device: str, *how: Any) -> Any:
        engine = made(model, device, *how)
        made_here.append(engine)
        if len(made_here) % 2:
            with torch.no_grad():
                engine.model.model.norm.weight.mul_(1.1)
        return engine

    made_here: list[Any] = []
    monkeypatch.setattr(engines, "_engine", other)
    metrics, _ = run.measure("margins", setup)
    assert metrics["gpu_margins_rejected_float32"] == 8


def test_another_step_of_a_rank_is_seen(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    step = training.Learner.step

    def other(learner: Any, *asked: Any) -> Any:
        if isinstance(learner._ranks, training.Team):
            learner.learning_rate_scale = 0.5
        return step(learner, *asked)

    monkeypatch.setattr(training.Learner, "step", other)
    metrics, _ = run.measure("nccl", setup)
    assert metrics["gpu_one_rank_difference"] == pytest.approx(0.5, abs=0.1)


def test_another_input_of_a_block_is_seen(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(_lane: Any, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source.roll(1, 1))

    monkeypatch.setattr(recompute.Lane, "copy", other)
    metrics, _ = run.measure("host", setup)
    assert metrics["gpu_host_difference"] > 0.01
    assert run.PARTS["host"].missed(metrics, setup)


# ------------------------------------------------------------------------------ running all parts


def test_a_part_that_fails_stops_no_other(
    setup: Setup,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MUSTER_VLLM_PYTHON", str(tmp_path / "none"))
    monkeypatch.setattr(run, "RUNS", tmp_path / "logs")
    monkeypatch.setitem(run.PARTS, "noise", replace(run.PARTS["noise"], limit_s=0.01))
    strict = replace(run.PARTS["toploc"], most={"gpu_proof_us": 0})
    monkeypatch.setitem(run.PARTS, "toploc", strict)
    code = run.main(["noise", "vllm", "toploc", "--device", "cpu", "--results", str(tmp_path)])
    assert code == 1
    table = capsys.readouterr().out.split("One GPU")[1].splitlines()
    states = {row.split()[0]: row for row in table if row}
    assert "failed" in states["noise"]
    assert "took longer than 0.01 s" in states["noise"]
    assert "not run" in states["vllm"]
    assert "MUSTER_VLLM_PYTHON names" in states["vllm"]
    assert "missed" in states["toploc"]
    found = json.loads((tmp_path / "gpu-toploc.json").read_text())
    assert found["metrics"]["gpu_toploc_differing"] == 0
    assert found["detail"]["missed"][0].startswith("gpu_proof_us")
    assert not (tmp_path / "gpu-noise.json").exists()


def test_what_a_part_raises_is_its_answer(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_: Setup) -> None:
        raise ValueError("the device is on fire")

    def lacks(_: Setup) -> None:
        raise Missing("there is no fire")

    for measured, code, said in (
        (fails, 1, {"failure": "ValueError: the device is on fire"}),
        (lacks, 0, {"missing": "there is no fire"}),
    ):
        monkeypatch.setattr(choices, "measure_toploc", measured)
        assert run.measure_alone("toploc", setup) == code
        assert json.loads(capsys.readouterr().out.splitlines()[-1]) == said


def test_without_the_device_one_sentence_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--device", "cuda:99"]) == run.NO_GPU
    said = capsys.readouterr().err
    assert said.startswith("No GPU: ")
    assert "DEVICE=cpu" in said
    assert len(said.splitlines()) == 1


def test_bounds_of_speed_are_those_of_a_gpu(setup: Setup) -> None:
    part = run.PARTS["examination"]
    slow = {"gpu_examine_over_generate": 0.5, "gpu_examine_wrong_share": 0.0}
    assert part.missed(slow, setup) == []
    assert part.missed(slow, replace(setup, is_tiny=False)) == [
        "gpu_examine_over_generate 0.5 > 0.02"
    ]
    unknown = slow | {"gpu_examine_wrong_share": math.nan}
    assert part.missed(unknown, setup) == ["gpu_examine_wrong_share nan > 0.02"]


def test_all_parts_take_less_than_forty_minutes() -> None:
    assert sum(part.limit_s for part in run.PARTS.values()) <= 40 * 60


# ---------------------------------------------------------------------- users' shapes, on no device


def test_choices_of_a_whole_batch_have_users_shapes() -> None:
    logits = torch.empty(256, VOCAB, dtype=torch.bfloat16, device="meta")
    ids, scores = device_winners(logits, range(256), range(256), np.ones(256, np.float32))
    assert (ids.shape, ids.dtype) == ((256,), torch.int64)
    assert (scores.shape, scores.dtype) == ((256,), torch.float32)
    assert keyed_noise(keys_on(range(256), range(256), ids.device), ids).shape == (256,)


def test_long_samples_of_users_model_have_their_rows(setup: Setup) -> None:
    config = AutoConfig.from_pretrained(setup.model("q06"))
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    config.update({"vocab_size": VOCAB, "hidden_size": 1024, "intermediate_size": 3072, **heads})
    with torch.device("meta"):
        lean = LeanModel(Qwen3ForCausalLM(config).to(torch.bfloat16))
    samples = [(tuple(range(16)), tuple(range(1000 + count))) for count in range(3)]
    with torch.inference_mode():
        rows = predicting_rows(lean, samples)
        assert [each.shape for each in rows] == [(1000 + count, 1024) for count in range(3)]
        assert lean.logits(rows[0][:256]).shape == (256, VOCAB)
    packed = device_proofs._packed(rows[0][:992].reshape(31, -1), 128)
    assert packed.shape == (31, 2 * 128 + 128 + 1)
