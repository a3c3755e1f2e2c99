"""vLLM in the calibration: its results are within the limits of honest transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from conformance_policy import VOCABULARY
from conformance_validator import PROOF, least_limits

from muster.inference.calibrate import calibrate_model
from muster.inference.calibrated_limits import FLOORS, chunk_limits, sampler_limits
from muster.inference.calibration_plan import MeasuringPlan, NumberFormat
from muster.inference.engine import Request
from muster.inference.honest import measure_honest
from muster.inference.measuring import Errors, OwnParty, Party, one_token
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


def asked(seed: int) -> list[Request]:
    return [Request((2 + i % (VOCABULARY - 2), 7, 9), seed + i, 1.0, 40) for i in range(24)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_further_work_of_either_engine_is_inside_the_limits_of_a_calibration_with_both(
    policies: list[Path], dtype: NumberFormat
) -> None:
    transformers, vllm = TransformersEngine(dtype), VllmEngine(dtype)
    for engine in (transformers, vllm):
        engine.load_policy(policies[0], PolicyVersion(0))
    bench, other = OwnParty(transformers, RECIPE), Party(f"vLLM {dtype}", vllm, RECIPE)
    honest = measure_honest(bench, [other], asked(0), MeasuringPlan(RECIPE, profile="quick"))
    assert f"vLLM {dtype} batched, validated {dtype} batched" in honest.errors
    assert f"{dtype} batched, validated vLLM {dtype} batched" in honest.errors
    found = {
        "chunk": chunk_limits(honest.chunks(), PROOF, FLOORS[dtype]),
        "sampler": sampler_limits(honest.token_margins(), 40, FLOORS[dtype]),
    }
    limits = least_limits(dtype).model_copy(update=found)
    for worker, validator in ((other, bench), (bench, other)):
        for requests in (asked(1000), one_token(asked(2000))):
            work = worker.generate(requests)
            errors = Errors.of(validator.examine(work))
            assert all(limits.chunk_passes(result) for result in errors.all_chunks())
            assert all(limits.sampler_passes(margins_T) for margins_T in errors.margins)
    vllm.close()


def test_cheats_are_run_on_transformers(policies: list[Path]) -> None:
    with pytest.raises(EngineError, match="cheats are run on transformers") as refusal:
        calibrate_model(policies[0], MeasuringPlan(RECIPE, engines=("vllm:float32",)))
    assert refusal.value.hint == "--engines transformers:float32,vllm:float32"
