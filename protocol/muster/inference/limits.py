"""From measured errors to validation limits: the margins, and why. Pure.

Honest errors of one machine underestimate those of a thousand, so every limit is a multiple of the
worst error seen and at least a floor. The forgers, judged under these limits afterwards, tell
whether that left room for fraud.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from muster.protocol.errors import EngineError
from muster.protocol.recipe import ProofRecipe, Recipe
from muster.toploc.calibration import ChunkLimits, Measurement, SamplerLimits
from muster.toploc.proofs import ChunkResult

_MANTISSA_MAX = 127.0
_FALSE_FRAUD = 1e-6
"""Bound on the probability that an honest submission collects enough strikes to be Fraud."""


@dataclass(frozen=True, slots=True)
class Floors:
    """Limits below which no measurement leads: other machines round elsewhere than this one."""

    exponent_share: float
    """Of the points. One value that rounds across the cut, or a power of two, changes a point."""
    sign_share: float
    """Of the points."""
    mantissa_mean: float
    """In units of the last mantissa bit."""
    mantissa_median: float
    """In units of the last mantissa bit."""
    margin: float
    """In units of `logit / T`."""


FLOORS = {
    # Arithmetic agrees to 1e-5 or so: few bfloat16 roundings turn, and most values are equal.
    "float32": Floors(1 / 16, 1 / 32, 0.25, 0.0, 0.001),
    # Two engines in bfloat16 differ in the last bit of most values; margins up to 0.063 were seen
    # between vLLM and transformers.
    "bfloat16": Floors(1 / 8, 1 / 16, 2.0, 1.0, 0.25),
}
"""By number format."""


def chunk_limits(results: Iterable[ChunkResult], proof: ProofRecipe, floors: Floors) -> ChunkLimits:
    """Return the limits of check 6 from honest chunks: twice the worst counts and median, four
    times the worst mean, and at least the floors.
    """
    results = list(results)
    exponents = max(r.exponent_mismatches / r.points for r in results)
    signs = max(r.sign_mismatches / r.points for r in results)
    mean = max(floors.mantissa_mean, 4 * max(r.mantissa_error_mean for r in results))
    median = max(floors.mantissa_median, 2 * max(r.mantissa_error_median for r in results))
    return ChunkLimits(
        max_exponent_mismatches=_count(max(floors.exponent_share, 2 * exponents), proof.topk),
        max_sign_mismatches=_count(max(floors.sign_share, 2 * signs), proof.topk),
        max_mantissa_error_mean=min(_MANTISSA_MAX, mean),
        max_mantissa_error_median=min(_MANTISSA_MAX, median),
    )


def _count(share: float, topk: int) -> int:
    return min(topk, math.ceil(share * topk))


def sampler_limits(
    margins: Iterable[float], logit_error: float, temperature: float, floors: Floors
) -> SamplerLimits:
    """Return the limits of check 7 from honest margins and the largest logit difference.

    Four times the worst margin, and four times what turns a choice at worst: two logits that move
    towards each other by that difference.
    """
    worst = max(*margins, 2 * logit_error / temperature)
    return SamplerLimits(margin=max(floors.margin, 4 * worst), max_outside_per_sample=0)


def fraud_strikes(honest_samples: int, recipe: Recipe) -> int:
    """Return the strikes that an honest submission collects with probability below 1e-6.

    None of the honest samples failed, so the true rate is below 3 / n with 95 % confidence (rule of
    three). At least 2: no single sample makes Fraud.
    """
    size = recipe.sampling.problems_per_submission * recipe.sampling.samples_per_problem
    rate = min(1.0, 3 / honest_samples)
    for strikes in range(2, size + 1):
        if _binomial_tail(size, rate, strikes) < _FALSE_FRAUD:
            return strikes
    raise EngineError(
        f"{honest_samples} honest samples cannot bound the errors of a submission of {size}",
        hint="measure more samples",
    )


def _binomial_tail(trials: int, rate: float, at_least: int) -> float:
    term = (1 - rate) ** trials
    below = 0.0
    for k in range(at_least):
        below += term
        term *= (trials - k) / (k + 1) * rate / (1 - rate) if rate < 1 else 0
    return max(0.0, 1 - below)


def require_no_forger(measured: Iterable[Measurement]) -> None:
    """Raise EngineError, with the reason, when a forger that computed nothing was accepted."""
    for row in measured:
        if row.kind == "nothing" and row.accepted:
            raise EngineError(
                f"the forger {row.name!r} passes {row.accepted} of {row.trials} {row.judged}s, so "
                "proofs of this model prove nothing",
                hint="use a number format or engine with smaller errors, more tokens per chunk, "
                "or more values per proof",
            )


def chunk_measurement(
    name: str,
    kind: Literal["honest", "nothing", "other"],
    results: list[ChunkResult],
    accepted: int,
) -> Measurement:
    """Return the table's row for chunks: the worst figures of honest ones, the best of forged."""
    pick = max if kind == "honest" else min
    return Measurement(
        name=name,
        kind=kind,
        judged="chunk",
        trials=len(results),
        accepted=accepted,
        exponent_mismatches=pick(r.exponent_mismatches / r.points for r in results),
        sign_mismatches=pick(r.sign_mismatches / r.points for r in results),
        mantissa_error_mean=min(_MANTISSA_MAX, pick(r.mantissa_error_mean for r in results)),
        mantissa_error_median=min(_MANTISSA_MAX, pick(r.mantissa_error_median for r in results)),
    )
