"""From measured errors to validation limits: the safety margins, and why. Pure.

Honest errors of one machine underestimate those of a thousand, so every limit is a multiple of the
worst error seen and at least a floor. Forgers are then judged under these limits, which shows
whether they leave room for fraud.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from muster.protocol.errors import EngineError
from muster.protocol.intervals import at_least, rate_bound, wilson
from muster.protocol.recipe import ProofRecipe, Recipe
from muster.toploc.calibration import ChunkLimits, Measurement, SamplerLimits, WideLimits
from muster.toploc.chunks import DECOYS, ChunkResult
from muster.toploc.sequential_test import HistoryLimits

Margins = npt.NDArray[np.float32]


class Drawn(NamedTuple):
    """Choices of one honest way, replayed in another: N tokens."""

    margins_N: Margins
    """How far each is from the maximum."""
    is_end_N: npt.NDArray[np.bool_]
    """Whether an EOS was chosen or expected."""


_MANTISSA_MAX = 127.0
_FALSE_FRAUD = 1e-6
"""Bound on the probability that an honest submission collects enough strikes to be Fraud."""

DETECTED = 0.95
"""A cheat that saves most of the work must have at least this share of its submissions refused."""

_FALSE_STRIKE = 1e-7
"""Bound on the probability that an honest sample has too many tokens outside the margin."""

_RATE_HEADROOM = 4
"""Other machines may change close choices at this multiple of the measured rate."""

_ENOUGH = 10_000
"""From so many tokens on, a pair of ways has a rate of its own, beside the rate of all pairs."""

_MOST_HALVINGS = 8
_LEAST_STRAIN, _LEAST_LOSS, _LEAST_LEAN = 0.02, 1e-4, 0.25
_MOST_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Floors:
    """Least limits, whatever was measured: other machines round differently from this one."""

    exponent_share: float
    """Share of the points. A value that rounds across the cut or a power of two changes a point."""
    sign_share: float
    """Share of the points."""
    mantissa_mean: float
    """In units of the last mantissa bit."""
    mantissa_median: float
    """In units of the last mantissa bit."""
    margin: float
    """In units of `logit / T`."""


FLOORS = {
    # Results agree to about 1e-5: few bfloat16 roundings differ, and most values are equal. An
    # entry that crosses the cut may still match an exponent by chance and be far off in mantissa:
    # this adds up to 1 to the mean of 128 points, once in 10,000 chunks.
    "float32": Floors(1 / 16, 1 / 32, 0.25, 0.0, 0.001),
    # Two engines in bfloat16 differ in the last bit of most values; margins up to 0.063 were seen
    # between vLLM and transformers.
    "bfloat16": Floors(1 / 8, 1 / 16, 2.0, 1.0, 0.25),
}
"""Floors by number format, the coarser formats later."""


def chunk_limits(results: Iterable[ChunkResult], proof: ProofRecipe, floors: Floors) -> ChunkLimits:
    """Return the limits of check 6 from honest chunks: twice the worst errors, and at least the
    floors.
    """
    results = list(results)
    exponents = max(r.exponent_mismatches / r.points for r in results)
    signs = max(r.sign_mismatches / r.points for r in results)
    mean = max(floors.mantissa_mean, 2 * max(r.mantissa_error_mean for r in results))
    median = max(floors.mantissa_median, 2 * max(r.mantissa_error_median for r in results))
    decoys = max(r.decoy_matches for r in results)
    return ChunkLimits(
        max_exponent_mismatches=_count(max(floors.exponent_share, 2 * exponents), proof.topk),
        max_sign_mismatches=_count(max(floors.sign_share, 2 * signs), proof.topk),
        max_mantissa_error_mean=min(_MANTISSA_MAX, mean),
        max_mantissa_error_median=min(_MANTISSA_MAX, median),
        # Decoys match honest chunks by chance; half of them do so in less than one of 10^12 chunks.
        max_decoy_matches=min(DECOYS, max(DECOYS // 2, decoys + DECOYS // 4)),
    )


def _count(share: float, topk: int) -> int:
    return min(topk, math.ceil(share * topk))


def sampler_limits(
    honest: Margins,
    longest: int,
    floors: Floors,
    cheats: Sequence[Margins] = (),
) -> SamplerLimits:
    """Return the limits of check 7 from honest margins of single tokens.

    Either twice the worst margin with no token beyond it, or a smaller margin with a number of
    tokens beyond it that honest samples of `longest` tokens practically never exceed. The choice is
    the one that detects more samples of the cheats, whose margins are given.
    """
    worst = float(honest.max(initial=0))
    best = SamplerLimits(margin=max(floors.margin, 2 * worst), max_outside_per_sample=0)
    noticed = _noticed(best, cheats)
    for halvings in range(1, _MOST_HALVINGS):
        margin = worst / 2**halvings
        outside = _outside(honest, margin, longest)
        limits = SamplerLimits(margin=margin, max_outside_per_sample=outside)
        if (found := _noticed(limits, cheats)) > noticed:
            best, noticed = limits, found
    return best


def _outside(honest: Margins, margin: float, longest: int) -> int:
    """Return the count of tokens beyond a margin that is exceeded with probability < 1e-7."""
    _, rate = wilson(int((honest > margin).sum()), len(honest))
    rate = min(1.0, _RATE_HEADROOM * rate)
    return next(
        (n for n in range(longest) if at_least(longest, rate, n + 1) < _FALSE_STRIKE), longest
    )


def choice_limits(
    honest: Margins,
    apart: tuple[Sequence[Drawn], Sequence[Drawn]],
    recipe: Recipe,
    floors: Floors,
    cheats: Sequence[Margins],
) -> SamplerLimits:
    """Return the limits of check 7 from honest margins, and from the choices of the pairs of ways
    measured here and of those claimed.

    Tokens may exceed the margin only where wide tokens are counted: else a worker could choose
    these tokens freely, such as one that ends each sample.
    """
    longest = recipe.sampling.max_new_tokens
    sampler = with_room(sampler_limits(honest, longest, floors, cheats))
    pairs, claimed = apart
    wide = wide_limits(pairs, sampler, floors, recipe, claimed=claimed)
    if wide is None:
        return sampler_limits(honest, longest, floors)
    return sampler.model_copy(update={"wide": wide})


def with_room(sampler: SamplerLimits) -> SamplerLimits:
    """Return limits whose margin for any single token is four times the worst honest one, for
    calibrations that count wide tokens: in bfloat16 one honest token of 150,000 exceeded twice.
    """
    if sampler.max_outside_per_sample:
        return sampler
    return sampler.model_copy(update={"margin": 2 * sampler.margin})


def wide_limits(
    pairs: Sequence[Drawn],
    sampler: SamplerLimits,
    floors: Floors,
    recipe: Recipe,
    *,
    claimed: Sequence[Drawn] = (),
) -> WideLimits | None:
    """Return how many tokens of a submission may have a margin that few honest ones have, given the
    choices of every pair of honest ways; None if the margin is not above its floor.

    `sampler` has the margin that no token may exceed, see `with_room`. `claimed` are pairs that
    other machines report: they can raise the counts, but not lower them.

    A worker that favours some token can add `WideLimits.margin` to its score everywhere, and more
    at the few tokens that may be wide. The margin chosen is the one that leaves such a worker the
    least gain per completion that it ends. An honest submission exceeds the counts with probability
    below 1e-7, even if its machine changes four times as many choices as the worst pair does.
    """
    samples = submission_size(recipe)
    tokens = samples * recipe.sampling.max_new_tokens
    worst = 2 * max(float(pair.margins_N.max(initial=0.0)) for pair in [*pairs, *claimed])
    left, best = worst, None
    for halvings in range(1, _MOST_HALVINGS):
        margin = worst / 2**halvings
        if worst <= floors.margin or margin < floors.margin / _RATE_HEADROOM:
            break
        limits = _wide_limits(pairs, claimed, margin, tokens)
        share = min(1.0, max(limits.most_ends / samples, limits.most / tokens))
        # Tokens that may exceed the margin may do so by any amount.
        found = margin + (max(worst, sampler.margin) - margin) * share
        if found < left:
            left, best = found, limits
    return best


def _wide_limits(
    pairs: Sequence[Drawn], claimed: Sequence[Drawn], margin: float, tokens: int
) -> WideLimits:
    def counts(of: Sequence[Drawn], *, only_ends: bool) -> list[tuple[int, int]]:
        return [
            (int(((m > margin) & (is_end | (not only_ends))).sum()), len(m)) for m, is_end in of
        ]

    def most(*, only_ends: bool) -> int:
        own, said = (counts(of, only_ends=only_ends) for of in (pairs, claimed))
        return _seldom_more(tokens, _rate(own, said))

    return WideLimits(margin=margin, most=most(only_ends=False), most_ends=most(only_ends=True))


def _rate(own: Sequence[tuple[int, int]], claimed: Sequence[tuple[int, int]]) -> float:
    """Return the rate to allow other machines, given (hits, trials) of every pair of ways."""
    hits, trials = (sum(column) for column in zip(*own, strict=True))
    rates = [hit / total for hit, total in [*own, *claimed] if total >= _ENOUGH]
    return min(1.0, _RATE_HEADROOM * max([wilson(hits, trials)[1], *rates]))


def _seldom_more(trials: int, rate: float) -> int:
    """Return the count that is exceeded with probability below 1e-7."""
    low, high = int(trials * rate), trials
    while low < high:
        middle = (low + high) // 2
        if at_least(trials, rate, middle + 1) < _FALSE_STRIKE:
            high = middle
        else:
            low = middle + 1
    return low


def _noticed(limits: SamplerLimits, cheats: Sequence[Margins]) -> int:
    outside = [int((margins > limits.margin).sum()) for margins in cheats]
    return sum(count > limits.max_outside_per_sample for count in outside)


def history_limits(
    strains: Iterable[float], losses: Iterable[float], leans: Iterable[float]
) -> HistoryLimits:
    """Return the limits of the sequential test from the mean strains, losses and leans of honest
    ways: twice the worst, and at least a floor for the differences between machines.
    """

    def limit(least: float, seen: Iterable[float]) -> float:
        return min(_MOST_SHARE, max(least, 2 * max(seen, default=0.0)))

    return HistoryLimits(
        honest_strain=limit(_LEAST_STRAIN, strains),
        honest_loss=limit(_LEAST_LOSS, losses),
        honest_lean=limit(_LEAST_LEAN, leans),
    )


def fraud_strikes(honest_samples: int, recipe: Recipe) -> int:
    """Return the strikes that an honest submission collects with probability below 1e-6.

    No honest sample failed (`require_honest`), which bounds the true failure rate with 95 %
    confidence. The result is at least 2: no single sample makes Fraud.
    """
    size = submission_size(recipe)
    rate = rate_bound(honest_samples)
    for strikes in range(2, size + 1):
        if at_least(size, rate, strikes) < _FALSE_FRAUD:
            return strikes
    raise EngineError(
        f"{honest_samples} honest samples cannot bound the errors of a submission of {size}",
        hint="measure more samples",
    )


def submission_size(recipe: Recipe) -> int:
    """Return the samples of a whole submission."""
    return recipe.sampling.submission_samples


def detection(row: Measurement, size: int, strikes: int = 1) -> tuple[float, float]:
    """Return the 95 % interval of the probability that a submission of `size` such samples collects
    `strikes`: 1 for Rejected, more for Fraud.
    """
    low, high = wilson(row.trials - row.accepted, row.trials)
    return at_least(size, low, strikes), at_least(size, high, strikes)


def require_honest(measured: Iterable[Measurement]) -> None:
    """Raise EngineError when the limits refuse honest work that they were chosen from: strikes
    rest on no such failure.
    """
    for row in measured:
        if row.kind == "honest" and row.accepted < row.trials:
            raise EngineError(
                f"the limits refuse {row.trials - row.accepted} of {row.trials} honest "
                f"{row.judged}s of {row.name!r}, so honest workers would lose stake",
                hint="leave the engine or machine that differs most out of the calibration, or "
                "measure more samples",
            )


def require_no_forger(measured: Iterable[Measurement]) -> None:
    """Raise EngineError when a forger that computed nothing was accepted."""
    for row in measured:
        if row.kind == "nothing" and row.accepted:
            raise EngineError(
                f"the forger {row.name!r} passes {row.accepted} of {row.trials} {row.judged}s, so "
                "proofs of this model prove nothing",
                hint="use a number format or engine with smaller errors, more tokens per chunk, "
                "or more values per proof",
            )


def require_separated(measured: Iterable[Measurement], recipe: Recipe) -> None:
    """Raise EngineError when a cheat that saves most of the work passes as honest."""
    size = submission_size(recipe)
    for row in measured:
        low, _ = detection(row, size)
        if row.kind == "cheap" and low < DETECTED:
            raise EngineError(
                f"the cheat {row.name!r} passes as honest: {row.accepted} of {row.trials} samples, "
                f"so only {low:.0%} or more of its submissions of {size} are sure to be noticed",
                hint="use a number format or engine with smaller errors, or larger submissions",
            )


class Figures(TypedDict, total=False):
    """A table row's errors, as `Measurement` names them."""

    exponent_mismatches: float
    sign_mismatches: float
    mantissa_error_mean: float
    mantissa_error_median: float
    decoy_matches: float


def worst_of(results: Sequence[ChunkResult], *, honest: bool) -> Figures:
    """Return the worst errors of honest chunks, or the best of forged ones."""
    if not results:
        return {}
    pick = max if honest else min
    return {
        "exponent_mismatches": pick(r.exponent_mismatches / r.points for r in results),
        "sign_mismatches": pick(r.sign_mismatches / r.points for r in results),
        "mantissa_error_mean": min(_MANTISSA_MAX, pick(r.mantissa_error_mean for r in results)),
        "mantissa_error_median": min(_MANTISSA_MAX, pick(r.mantissa_error_median for r in results)),
        "decoy_matches": pick(r.decoy_matches / DECOYS for r in results),
    }
