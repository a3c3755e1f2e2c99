"""vLLM in the calibration: what it computes is within the limits that honest transformers set."""

from __future__ import annotations

from pathlib import Path

import pytest
from conformance_policy import VOCABULARY
from conformance_validator import PROOF, least_limits

from muster.inference.calibrate import calibrate_model
from muster.inference.engine import Request
from muster.inference.honest import measure_honest
from muster.inference.measuring import Bench, VllmBench
from muster.inference.plan import NumberFormat, Plan
from muster.inference.transformers_engine import TransformersEngine
from muster.inference.vllm.engine import VllmEngine
from muster.protocol.errors import EngineError
from muster.protocol.ids import PolicyVersion
from muster.protocol.recipe import Recipe, SamplingRecipe, TrainingRecipe

RECIPE = Recipe(
    name="calibration",
    sampling=SamplingRecipe(
        problems_per_submission=2, samples_per_problem=2, temperature=1.0, max_new_tokens=40
    ),
    proof=PROOF,
    training=TrainingRecipe(submissions_per_step=1),
)
ASKED = [Request((2 + i % (VOCABULARY - 2), 7, 9), i, 1.0, 40) for i in range(24)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_pair_of_engines_and_ways_is_inside_the_least_limits(
    policies: list[Path], dtype: NumberFormat
) -> None:
    transformers, vllm = TransformersEngine(dtype), VllmEngine(dtype)
    for engine in (transformers, vllm):
        engine.load_policy(policies[0], PolicyVersion(0))
    parties = Bench(transformers, RECIPE), [VllmBench(vllm, RECIPE)]
    honest = measure_honest(*parties, ASKED, Plan(RECIPE, profile="quick"))
    vllm.close()
    limits = least_limits(dtype)
    pairs = [pair for pair in honest.errors if "vLLM" in pair]
    assert f"vLLM {dtype} batched, validated {dtype} batched" in pairs
    assert f"{dtype} batched, validated vLLM {dtype} batched" in pairs
    for pair in pairs:
        errors = honest.errors[pair]
        assert all(limits.chunk_passes(result) for result in errors.all_chunks()), pair
        assert all(limits.sampler_passes(margins) for margins in errors.margins), pair


def test_cheats_are_run_on_transformers(policies: list[Path]) -> None:
    with pytest.raises(EngineError, match="cheats are run on transformers") as refusal:
        calibrate_model(policies[0], Plan(RECIPE, engines=("vllm:float32",)))
    assert refusal.value.hint == "--engines transformers:float32,vllm:float32"
