"""From measured errors to limits."""

from __future__ import annotations

import math

import pytest

from muster.inference.limits import (
    FLOORS,
    Floors,
    chunk_limits,
    fraud_strikes,
    require_no_forger,
    sampler_limits,
)
from muster.protocol.errors import EngineError
from muster.protocol.recipe import ProofRecipe, Recipe, SamplingRecipe, TrainingRecipe
from muster.toploc import ChunkResult
from muster.toploc.calibration import ChunkLimits, Measurement

NO_FLOORS = Floors(0, 0, 0, 0, 0)


def recipe(problems: int, samples: int) -> Recipe:
    return Recipe(
        name="test",
        sampling=SamplingRecipe(
            problems_per_submission=problems,
            samples_per_problem=samples,
            temperature=1.0,
            max_new_tokens=5,
        ),
        training=TrainingRecipe(submissions_per_step=1),
    )


def test_chunk_limits_are_multiples_of_the_worst_errors() -> None:
    results = [ChunkResult(3, 0.5, 1.0, 2, 128), ChunkResult(1, 1.5, 0.0, 0, 64)]
    assert chunk_limits(results, ProofRecipe(), NO_FLOORS) == ChunkLimits(
        max_exponent_mismatches=6,
        max_mantissa_error_mean=6.0,
        max_mantissa_error_median=2.0,
        max_sign_mismatches=4,
    )


def test_chunk_limits_have_floors_when_errors_are_zero() -> None:
    perfect = [ChunkResult(0, 0, 0, 0, 128)]
    assert chunk_limits(perfect, ProofRecipe(), FLOORS["float32"]) == ChunkLimits(
        max_exponent_mismatches=8,
        max_mantissa_error_mean=0.25,
        max_mantissa_error_median=0.0,
        max_sign_mismatches=4,
    )


def test_chunk_limits_stay_in_range_when_nothing_matches() -> None:
    hopeless = [ChunkResult(128, 2.0**64, 2.0**64, 0, 128)]
    limits = chunk_limits(hopeless, ProofRecipe(), NO_FLOORS)
    assert limits.max_exponent_mismatches == 128
    assert limits.max_mantissa_error_mean == limits.max_mantissa_error_median == 127


@pytest.mark.parametrize(
    ("margins", "logit_error", "temperature", "expected"),
    [([0.0], 0.0, 1.0, 0.0), ([0.1, 0.2], 0.0, 1.0, 0.8), ([0.0], 0.1, 0.5, 1.6)],
)
def test_sampler_margin_covers_margins_and_logit_differences(
    margins: list[float], logit_error: float, temperature: float, expected: float
) -> None:
    limits = sampler_limits(margins, logit_error, temperature, NO_FLOORS)
    assert limits.margin == pytest.approx(expected)
    assert limits.max_outside_per_sample == 0


def exact_tail(trials: int, rate: float, at_least: int) -> float:
    return sum(
        math.comb(trials, k) * rate**k * (1 - rate) ** (trials - k)
        for k in range(at_least, trials + 1)
    )


@pytest.mark.parametrize(("problems", "samples"), [(8, 16), (2, 8), (1, 64)])
@pytest.mark.parametrize("honest", [300, 3000])
def test_strikes_are_the_fewest_that_spare_the_honest(
    problems: int, samples: int, honest: int
) -> None:
    strikes = fraud_strikes(honest, recipe(problems, samples))
    assert exact_tail(problems * samples, 3 / honest, strikes) < 1e-6
    assert strikes == 2 or exact_tail(problems * samples, 3 / honest, strikes - 1) >= 1e-6


def test_one_sample_is_never_fraud() -> None:
    assert fraud_strikes(10**9, recipe(1, 2)) == 2


@pytest.mark.parametrize("honest", [1, 3, 10])
def test_strikes_are_refused_when_too_little_was_measured(honest: int) -> None:
    with pytest.raises(EngineError, match="cannot bound"):
        fraud_strikes(honest, recipe(1, 4))


def row(kind: str, accepted: int) -> Measurement:
    return Measurement.model_validate(
        {"name": "x", "kind": kind, "judged": "chunk", "trials": 300, "accepted": accepted}
    )


def test_model_is_refused_when_a_forger_that_computed_nothing_passes() -> None:
    with pytest.raises(EngineError, match="'x' passes 1 of 300 chunks"):
        require_no_forger([row("honest", 300), row("nothing", 1)])


def test_model_is_kept_when_only_others_pass() -> None:
    require_no_forger([row("honest", 300), row("other", 5), row("nothing", 0)])
