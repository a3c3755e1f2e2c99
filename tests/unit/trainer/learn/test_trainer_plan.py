"""The memory plan: what it chooses, what it refuses, and that it does not lie."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from measured_peak import recipe
from transformers import AutoModelForCausalLM, Qwen3Config

from muster.app.cli import muster
from muster.trainer.learn.plan import Choices, MemoryShort, Planner, plan_memory
from muster.trainer.learn.rehearsal import Rehearsal

PEAK = Path(__file__).with_name("measured_peak.py")
SMALL = {
    "vocab_size": 16_000,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
}
"""A model of 8M parameters."""


@pytest.fixture(autouse=True)
def _process_of_a_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan as in a trainer that has just begun: many tests have grown this process."""
    monkeypatch.setattr("muster.trainer.learn.plan._process_bytes", lambda _: 450e6)


def config(**changes: Any) -> Qwen3Config:
    return Qwen3Config(**{**SMALL, **changes})


def planner(memory_gb: float | None, **choices: Any) -> Planner:
    return Planner(config(), recipe(512, 0), Choices(memory_gb=memory_gb, **choices))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "model"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config(), dtype=torch.float32).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    "wanted",
    [
        pytest.param({"micro_batch_tokens": 2048, "recompute": "none"}, marks=pytest.mark.slow),
        {"micro_batch_tokens": 2048, "recompute": "full"},
        pytest.param(
            {"micro_batch_tokens": 2048, "recompute": "selective", "compute_dtype": "bfloat16"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_peak_is_the_planned_one_within_a_tenth(folder: Path, wanted: dict[str, Any]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, PEAK, folder, json.dumps(wanted)],
        capture_output=True,
        check=True,
        env=environment,
    )
    found = json.loads(done.stdout)
    assert found["planned"] == pytest.approx(found["measured"], rel=0.1)


def test_nothing_is_computed_again_where_there_is_room() -> None:
    plan = planner(100.0).plan()
    assert (plan.recompute, plan.micro_batch_tokens) == ("none", 16_384)


def test_less_memory_means_recomputing_before_tiny_micro_batches() -> None:
    most = planner(100.0).plan().peak / 1e9
    kinds = [planner(most * share).plan().recompute for share in (1.01, 0.85, 0.7)]
    assert kinds[0] == "none"
    assert kinds[1] in ("none", "selective")
    assert kinds[2] in ("selective", "full")


def test_a_plan_fits_its_memory() -> None:
    plan = planner(1.2).plan()
    assert plan.peak <= 1.2e9
    assert plan.available == 1.2e9
    assert plan.table().endswith(f"recompute {plan.recompute}")


def test_what_never_fits_is_refused_with_a_way_out() -> None:
    with pytest.raises(MemoryShort, match=r"there are 0\.50") as caught:
        planner(0.5).plan()
    assert "--memory-gb" in str(caught.value.hint)


def test_settings_that_do_not_fit_are_refused_with_some_that_do() -> None:
    least = planner(100.0, micro_batch_tokens=512, recompute="full").plan().peak / 1e9
    wanted = planner(least * 1.05, micro_batch_tokens=4096, recompute="none")
    with pytest.raises(MemoryShort) as caught:
        wanted.plan()
    hint = str(caught.value.hint)
    assert hint.endswith("fits")
    words = hint.split()
    assert planner(least * 1.05, micro_batch_tokens=int(words[1]), recompute=words[3]).fits()


def test_ranks_share_weights_gradients_and_optimiser() -> None:
    one = {p.name: p.training for p in planner(100.0).plan().parts}
    two = {p.name: p.training for p in planner(100.0, ranks=2).plan().parts}
    for name in ("weights", "gradients", "optimiser"):
        assert two[name] == one[name] / 2
    assert two["weights gathered from ranks"] > 0


def test_an_adapter_takes_no_gradients_of_the_base() -> None:
    made = recipe(512, 8)
    plan = Planner(config(), made, Choices(memory_gb=100.0)).plan()
    parts = {p.name: p for p in plan.parts}
    assert "policy that stands in" not in parts
    size = Rehearsal(config(), made.adapter, "float32").size
    assert parts["optimiser"].training == 8 * size.trained
    assert size.trained < 0.1 * size.parameters


def test_tied_weights_are_counted_once() -> None:
    tied, apart = (
        Rehearsal(config(tie_word_embeddings=tie), recipe(512, 0).adapter, "float32").size
        for tie in (True, False)
    )
    assert apart.parameters - tied.parameters == 16_000 * 256
    model = AutoModelForCausalLM.from_config(config(), dtype=torch.float32)
    assert tied.parameters == sum(p.numel() for p in model.parameters())


def test_memory_that_is_there_is_found() -> None:
    plan = planner(None).plan()
    assert plan.peak <= plan.available < 1e14


def test_command_prints_the_plan_and_loads_no_weights(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    words = ["trainer", "plan", "--model", str(tmp_path), "--recipe", "demo"]
    text = CliRunner().invoke(muster, [*words, "--memory-gb", "50"]).stdout
    assert "optimiser steps" in text
    assert "recompute none" in text
    found = json.loads(CliRunner().invoke(muster, [*words, "--json"]).stdout)
    assert found["peak_gb"] <= found["available_gb"]
    refused = CliRunner().invoke(muster, [*words, "--memory-gb", "0.1"])
    assert refused.exit_code != 0
    assert "training takes" in f"{refused.exception} {refused.output}"


def test_plan_reads_the_architecture_alone(folder: Path) -> None:
    assert plan_memory(folder, recipe(512, 0), Choices(memory_gb=9.0)).peak < 9e9
