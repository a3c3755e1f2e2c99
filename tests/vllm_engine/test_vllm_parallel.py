"""A model that vLLM spreads over two devices, here two processes on the CPU."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file, save_file

from muster.inference.engine import Completion, Request, Sample
from muster.inference.transformers_engine import TransformersEngine
from muster.inference.vllm.engine import VllmEngine
from muster.protocol.errors import ProofError
from muster.protocol.ids import PolicyVersion
from muster.protocol.recipe import ProofRecipe

PROOF = ProofRecipe()
ASKED = [Request((2 + i % 9, 5, 7), i, 1.0, 40) for i in range(12)]


@pytest.fixture(scope="module")
def spread(python: Path) -> Iterator[VllmEngine]:
    engine = VllmEngine(python=python, tensor_parallel=2)
    yield engine
    engine.close()


def samples(made: list[Completion]) -> list[Sample]:
    return [
        Sample(asked.prompt_tokens, each.tokens, asked.seed, each.proofs)
        for asked, each in zip(ASKED, made, strict=True)
    ]


def test_a_spread_model_makes_and_examines_what_a_whole_one_does(
    spread: VllmEngine, policies: list[Path]
) -> None:
    reference = TransformersEngine()
    for version, folder in enumerate(policies):
        spread.load_policy(folder, PolicyVersion(version))
        reference.load_policy(folder, PolicyVersion(version))
        made = spread.generate(ASKED, proof=PROOF)
        expected = reference.generate(ASKED, proof=PROOF)
        assert [each.tokens for each in made] == [each.tokens for each in expected]
        for found in spread.examine(samples(expected), proof=PROOF, temperature=1.0):
            assert found.replayed.margins_T.max() < 1e-4
            assert all(chunk.exponent_mismatches == 0 for chunk in found.chunks)


def test_nonsense_of_a_spread_model_costs_no_process(
    spread: VllmEngine, policies: list[Path], tmp_path: Path
) -> None:
    spread.load_policy(policies[0], PolicyVersion(0))
    made = samples(spread.generate(ASKED, proof=PROOF))
    broken = shutil.copytree(policies[0], tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"].fill_(float("nan"))
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    spread.load_policy(broken, PolicyVersion(1))
    pid = spread.pid
    with pytest.raises(ProofError, match="NaN"):
        spread.examine(made, proof=PROOF, temperature=1.0)
    spread.load_policy(policies[0], PolicyVersion(2))
    assert len(spread.examine(made, proof=PROOF, temperature=1.0)) == len(made)
    assert spread.pid == pid


def test_processes_of_a_spread_model_end_with_it(spread: VllmEngine, policies: list[Path]) -> None:
    spread.load_policy(policies[0], PolicyVersion(0))
    started = psutil.Process(spread.pid).children(recursive=True)
    assert len(started) >= 2
    spread.close()
    _, alive = psutil.wait_procs(started, timeout=30)
    assert not alive
