"""The calibration document and the limits it applies."""

from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError

from muster.protocol.encoding import canonical_json, keccak, parse_canonical_json
from muster.protocol.errors import EncodingError
from muster.protocol.recipe import Recipe, SamplingRecipe, TrainingRecipe
from muster.toploc import Calibration, ChunkResult
from muster.toploc.calibration import (
    CalibratedModel,
    ChunkLimits,
    Measurement,
    SamplerLimits,
    WideLimits,
)

INSIDE = ChunkResult(8, 0.25, 0.5, 4, 128, 16)


def calibration(outside: int = 1) -> Calibration:
    return Calibration(
        model=CalibratedModel(
            name="tiny", architecture="Qwen3", hidden_size=64, vocab_size=19, engine="test"
        ),
        chunk=ChunkLimits(
            max_exponent_mismatches=8,
            max_mantissa_error_mean=0.25,
            max_mantissa_error_median=0.5,
            max_sign_mismatches=4,
        ),
        sampler=SamplerLimits(margin=0.5, max_outside_per_sample=outside),
        fraud_strikes=3,
        measured=(Measurement(name="honest", kind="honest", judged="chunk", trials=9, accepted=9),),
    )


def test_chunk_passes_at_the_limits() -> None:
    assert calibration().chunk_passes(INSIDE)


@pytest.mark.parametrize(
    "change",
    [
        {"exponent_mismatches": 9},
        {"mantissa_error_mean": 0.26},
        {"mantissa_error_median": 1.0},
        {"sign_mismatches": 5},
        {"decoy_matches": 17},
        {"mantissa_error_mean": float("nan")},
    ],
)
def test_chunk_fails_when_one_figure_exceeds_its_limit(change: dict[str, float]) -> None:
    assert not calibration().chunk_passes(replace(INSIDE, **change))


def test_count_limits_shrink_with_the_proof() -> None:
    assert calibration().chunk_passes(ChunkResult(4, 0, 0, 2, 64))
    assert not calibration().chunk_passes(ChunkResult(5, 0, 0, 2, 64))
    assert not calibration().chunk_passes(ChunkResult(4, 0, 0, 3, 64))
    assert not calibration().chunk_passes(ChunkResult(1, 0, 0, 0, 4))


@pytest.mark.parametrize(
    ("margins", "passes"),
    [
        ([0.0, 0.5], True),
        ([0.0, 0.6], True),
        ([0.6, 0.6], False),
        ([np.nan, 0.6], False),
        ([np.inf, np.inf, 0.0], False),
    ],
)
def test_sampler_counts_tokens_outside_the_margin(margins: list[float], passes: bool) -> None:
    assert calibration(outside=1).sampler_passes(margins) is passes
    assert calibration(outside=1).sampler_passes(np.array(margins, np.float32)) is passes


def test_wide_tokens_are_counted_where_the_calibration_limits_them() -> None:
    wide = WideLimits(margin=0.1, most=2, most_ends=1)
    limits = calibration().model_copy(
        update={"sampler": SamplerLimits(margin=0.5, max_outside_per_sample=0, wide=wide)}
    )
    margins, ends = [0.1, 0.11, np.nan, 0.2], np.array([True, True, True, False])
    assert limits.wide_tokens(margins, ends) == (3, 2)
    assert calibration().wide_tokens(margins, ends) == (0, 0)


NONE = ChunkResult(0, 0.0, 0.0, 0, 128)


@pytest.mark.parametrize(
    ("change", "margins", "expected"),
    [
        ({}, [0.0], 0.0),
        ({"exponent_mismatches": 2}, [0.0], 0.25),
        ({"sign_mismatches": 1}, [0.0], 0.25),
        ({"mantissa_error_mean": 0.125}, [0.0], 0.5),
        ({"mantissa_error_median": 0.5}, [0.0], 1.0),
        ({"decoy_matches": 16}, [0.0], 0.0),
        ({"exponent_mismatches": 900}, [0.0], 1.0),
        ({"mantissa_error_mean": float("nan")}, [0.0], 1.0),
        ({}, [0.1, 0.3], 0.6),
        ({}, [np.inf], 1.0),
        ({}, [np.nan], 1.0),
        ({"exponent_mismatches": 2}, [0.05], 0.25),
    ],
)
def test_strain_is_the_largest_share_of_a_limit(
    change: dict[str, float], margins: list[float], expected: float
) -> None:
    chunks = [NONE, replace(NONE, **change)]
    assert calibration().sample_strain(chunks, margins) == pytest.approx(expected)


def test_limit_of_zero_is_strained_by_any_error() -> None:
    small = replace(NONE, points=1, sign_mismatches=1)
    assert calibration().sample_strain([small], [0.0]) == 1.0


def test_strain_of_a_submission_is_the_mean_of_its_samples() -> None:
    half = replace(NONE, exponent_mismatches=4)
    samples = [([NONE], [0.0]), ([half], [0.0])]
    assert calibration().submission_strain(samples) == pytest.approx(0.25)


@pytest.mark.parametrize("outside", [0, 1])
def test_what_fails_is_fully_strained(outside: int) -> None:
    strained = calibration(outside).sample_strain([], [0.6])
    assert strained == 1.0


def test_document_round_trips() -> None:
    document = calibration()
    assert Calibration.from_bytes(document.to_bytes()) == document
    assert document.hash() == keccak(document.to_bytes())


def test_document_with_large_figures_round_trips() -> None:
    row = calibration().measured[0].model_copy(update={"margin": 2.0**64})
    document = calibration().model_copy(update={"measured": (row,)})
    assert Calibration.from_bytes(document.to_bytes()) == document


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fraud_strikes", 0),
        ("fraud_strikes", "3"),
        ("schema_version", 1),
        ("temperature", 0),
        ("surprise", 1),
        ("sampler", {"margin": -1, "max_outside_per_sample": 0}),
    ],
)
def test_document_is_refused_when_a_field_is_wrong(field: str, value: object) -> None:
    content = parse_canonical_json(calibration().to_bytes(), max_bytes=1 << 20)
    content[field] = value
    with pytest.raises(EncodingError, match="malformed calibration"):
        Calibration.from_bytes(canonical_json(content))


def test_document_is_refused_when_a_default_is_left_out() -> None:
    content = parse_canonical_json(calibration().to_bytes(), max_bytes=1 << 20)
    del content["temperature"]
    with pytest.raises(EncodingError, match="does not re-encode"):
        Calibration.from_bytes(canonical_json(content))


def test_document_is_refused_when_not_canonical() -> None:
    with pytest.raises(EncodingError, match="canonical"):
        Calibration.from_bytes(calibration().to_bytes() + b"\n")


def test_measurement_cannot_accept_more_than_it_tried() -> None:
    with pytest.raises(ValidationError, match="3 accepted of 2"):
        Measurement(name="x", kind="other", judged="chunk", trials=2, accepted=3)


def recipe(problems: int = 8, tokens: int = 64) -> Recipe:
    sampling = SamplingRecipe(
        problems_per_submission=problems,
        samples_per_problem=16,
        temperature=1.0,
        max_new_tokens=tokens,
    )
    return Recipe(name="x", sampling=sampling, training=TrainingRecipe(submissions_per_step=1))


SIZED = calibration().model_copy(update={"submission_samples": 128, "max_new_tokens": 64})


@pytest.mark.parametrize("asked", [recipe(), recipe(problems=1), recipe(tokens=1)])
def test_limits_hold_for_submissions_up_to_their_size(asked: Recipe) -> None:
    assert SIZED.misfit(asked) == ""


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (recipe(tokens=65), "up to 64 tokens a completion, the recipe has 65"),
        (recipe(problems=9), "up to 128 samples a submission, the recipe has 144"),
    ],
)
def test_limits_do_not_hold_for_larger_submissions(asked: Recipe, said: str) -> None:
    assert said in SIZED.misfit(asked)
    assert calibration().misfit(asked) == "", "a size that is not known is not compared"
