"""From measured errors to limits."""

import math

import numpy as np
import pytest

from muster.inference.calibrated_limits import (
    FLOORS,
    Drawn,
    Floors,
    choice_limits,
    chunk_limits,
    detection,
    fraud_strikes,
    history_limits,
    require_honest,
    require_no_forger,
    require_separated,
    sampler_limits,
    wide_limits,
    with_room,
)
from muster.protocol.errors import EngineError
from muster.protocol.recipe import ProofRecipe, Recipe, SamplingRecipe, TrainingRecipe
from muster.toploc import ChunkResult
from muster.toploc.calibration import ChunkLimits, Measurement, SamplerLimits

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
    results = [ChunkResult(3, 0.5, 1.0, 2, 128, 3), ChunkResult(1, 3.0, 0.0, 0, 64)]
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


@pytest.mark.parametrize(("worst", "expected"), [(0, 16), (5, 16), (9, 17), (30, 32)])
def test_decoys_may_match_by_chance(worst: int, expected: int) -> None:
    results = [ChunkResult(0, 0, 0, 0, 128, worst)]
    assert chunk_limits(results, ProofRecipe(), NO_FLOORS).max_decoy_matches == expected


def margins(*values: float, zeros: int = 0) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.array([*values, *[0.0] * zeros], np.float32)


@pytest.mark.parametrize(("floor", "expected"), [(0.0, 0.5), (0.7, 0.7)])
def test_margin_is_twice_the_worst_and_at_least_the_floor(floor: float, expected: float) -> None:
    limits = sampler_limits(margins(0.125, 0.25), 64, Floors(0, 0, 0, 0, floor))
    assert (limits.margin, limits.max_outside_per_sample) == (expected, 0)


def test_smaller_margin_and_a_count_are_chosen_where_they_notice_more() -> None:
    honest = margins(0.4, *[0.01] * 50, zeros=100_000)
    cheats = [margins(*[0.3] * 20, zeros=44)] * 10
    limits = sampler_limits(honest, 64, NO_FLOORS, cheats)
    assert limits.margin < 0.3
    assert limits.max_outside_per_sample < 20


def test_margin_alone_is_kept_where_a_count_notices_no_more() -> None:
    honest = margins(0.4, *[0.01] * 50, zeros=100_000)
    limits = sampler_limits(honest, 64, NO_FLOORS, [margins(5.0, zeros=63)] * 10)
    assert limits.max_outside_per_sample == 0


@pytest.mark.parametrize("seed", range(3))
def test_count_spares_honest_samples_of_machines_that_turn_twice_as_many(seed: int) -> None:
    random = np.random.default_rng(seed)
    honest = (random.random(200_000) < 0.02) * random.exponential(0.1, 200_000)
    cheats = [margins(*random.exponential(0.1, 30), zeros=34) for _ in range(50)]
    limits = sampler_limits(honest.astype(np.float32), 64, NO_FLOORS, cheats)
    assert limits.max_outside_per_sample > 0
    samples = (random.random((20_000, 64)) < 0.04) * random.exponential(0.1, (20_000, 64))
    outside = (samples > limits.margin).sum(axis=1)
    assert outside.max() <= limits.max_outside_per_sample


COARSE = FLOORS["bfloat16"]
LARGE = recipe(8, 16)
MARGIN = SamplerLimits(margin=1.6, max_outside_per_sample=0)


def drawn(rate: float, *, ends: float, seed: int = 0) -> Drawn:
    """Return choices of which a share `rate` flips, by 0.8 at most, and a share `ends` are ends."""
    random = np.random.default_rng(seed)
    flips = (random.random(200_000) < rate) * random.exponential(0.1, 200_000)
    flips[0] = 0.8
    return Drawn(np.minimum(flips, 0.8).astype(np.float32), random.random(200_000) < ends)


def test_wide_tokens_are_few_and_fewer_at_ends() -> None:
    limits = wide_limits([drawn(0.002, ends=0.01)], MARGIN, COARSE, LARGE)
    assert limits is not None
    assert COARSE.margin / 4 <= limits.margin <= 0.8
    assert 0 < limits.most_ends < limits.most < 40


FLIPS = margins(*[0.1] * 4, *[0.01] * 400, zeros=200_000)
CHEATS = [margins(*[0.05] * 5)] * 10


@pytest.mark.parametrize(("floor", "is_counted"), [(0.25, False), (0.05, True)])
def test_no_token_may_exceed_the_margin_where_wide_tokens_are_not_counted(
    floor: float, is_counted: bool
) -> None:
    floors = Floors(0, 0, 0, 0, floor)
    pair = Drawn(FLIPS, np.zeros(len(FLIPS), np.bool_))
    assert sampler_limits(FLIPS, 5, floors, CHEATS).max_outside_per_sample > 0
    limits = choice_limits(FLIPS, ([pair], []), LARGE, floors, CHEATS)
    assert (limits.wide is not None, limits.max_outside_per_sample > 0) == (is_counted,) * 2
    assert is_counted or limits.margin == floor


def test_a_margin_that_no_token_may_exceed_gets_room_and_no_other() -> None:
    outright = SamplerLimits(margin=0.3, max_outside_per_sample=0)
    assert with_room(outright) == SamplerLimits(margin=0.6, max_outside_per_sample=0)
    some = SamplerLimits(margin=0.3, max_outside_per_sample=1)
    assert with_room(some) == some


def test_margin_at_its_floor_leaves_nothing_to_narrow() -> None:
    close = Drawn(np.full(1000, 0.1, np.float32), np.zeros(1000, bool))
    assert wide_limits([close], MARGIN, COARSE, LARGE) is None


@pytest.mark.parametrize("seed", range(3))
def test_wide_limits_spare_machines_that_turn_twice_as_many_as_the_worst(seed: int) -> None:
    pairs = [drawn(0.0005, ends=0.02), drawn(0.003, ends=0.02, seed=1)]
    limits = wide_limits(pairs, MARGIN, COARSE, LARGE)
    assert limits is not None
    random, tokens = np.random.default_rng(seed), 8 * 16 * 5
    margins = (random.random((5000, tokens)) < 0.006) * random.exponential(0.1, (5000, tokens))
    is_wide = margins > limits.margin
    assert is_wide.sum(axis=1).max() <= limits.most
    assert (is_wide & (random.random(is_wide.shape) < 0.02)).sum(axis=1).max() <= limits.most_ends


def test_claimed_choices_raise_wide_limits_and_never_lower_them() -> None:
    own = [drawn(0.002, ends=0.01)]
    silent = Drawn(np.zeros(200_000, np.float32), np.zeros(200_000, bool))
    alone = wide_limits(own, MARGIN, COARSE, LARGE)
    assert wide_limits(own, MARGIN, COARSE, LARGE, claimed=[silent] * 64) == alone
    more = wide_limits(own, MARGIN, COARSE, LARGE, claimed=[drawn(0.008, ends=0.01)])
    assert alone is not None
    assert more is not None
    assert (more.margin, more.most) > (alone.margin, alone.most)


@pytest.mark.parametrize(("strain", "expected"), [(0.0, 0.02), (0.1, 0.2), (0.8, 0.9)])
def test_history_allows_twice_the_worst_mean_strain(strain: float, expected: float) -> None:
    assert history_limits([0.0, strain], [], []).honest_strain == pytest.approx(expected)


@pytest.mark.parametrize(("seen", "expected"), [(0.0, 1e-4), (0.003, 0.006), (0.8, 0.9)])
def test_history_allows_twice_the_worst_mean_loss(seen: float, expected: float) -> None:
    assert history_limits([0.0], [seen, 0.0], []).honest_loss == pytest.approx(expected)


@pytest.mark.parametrize(("seen", "expected"), [(0.0, 0.25), (0.2, 0.4), (0.8, 0.9)])
def test_history_allows_twice_the_worst_lean(seen: float, expected: float) -> None:
    assert history_limits([0.0], [], [seen]).honest_lean == pytest.approx(expected)


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
    rate = 1 - 0.05 ** (1 / honest)
    assert exact_tail(problems * samples, rate, strikes) < 1e-6
    assert strikes == 2 or exact_tail(problems * samples, rate, strikes - 1) >= 1e-6


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


def test_limits_that_refuse_honest_work_are_refused() -> None:
    require_honest([row("honest", 300), row("other", 5)])
    with pytest.raises(EngineError, match="refuse 1 of 300 honest chunks of 'x'"):
        require_honest([row("honest", 300), row("honest", 299)])


def cheat(kind: str, accepted: int) -> Measurement:
    return row(kind, accepted).model_copy(update={"judged": "sample"})


def test_model_is_refused_when_a_cheat_that_saves_most_of_the_work_passes() -> None:
    with pytest.raises(EngineError, match="'x' passes as honest: 298 of 300 samples"):
        require_separated([cheat("other", 300), cheat("cheap", 298)], recipe(8, 16))


@pytest.mark.parametrize("measured", [cheat("cheap", 250), cheat("other", 300), row("honest", 300)])
def test_model_is_kept_when_submissions_of_cheap_cheats_are_noticed(measured: Measurement) -> None:
    require_separated([measured], recipe(8, 16))


def test_detection_of_a_submission_grows_with_its_samples_and_falls_with_the_strikes() -> None:
    measured = cheat("cheap", 270)
    low, high = detection(measured, 16)
    assert 1 - 0.93**16 < low < 1 - 0.9**16 < high < 1
    assert detection(measured, 128)[0] > low
    assert detection(measured, 16, strikes=4)[1] < high
