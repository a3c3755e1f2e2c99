"""Estimates of what a policy solves: pass@k without bias, and intervals over problems. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance

_Z = 1.959964
"""Normal quantile of a two-sided 95 % interval."""


@dataclass(frozen=True, slots=True)
class Share:
    """An estimate in [0, 1] with its two-sided 95 % interval."""

    value: float
    """The estimate."""
    low: float
    """Lower end."""
    high: float
    """Upper end."""


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Return the chance that of k samples one passes, 1 - C(n - c, k) / C(n, k), 1 <= k <= n.

    Unbiased for every k (Chen et al. 2021, arXiv 2107.03374, equation 1).
    """
    if not 1 <= k <= samples or not 0 <= passed <= samples:
        raise ValueError(f"pass@{k} of {passed} in {samples} samples is not defined")
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def share_over_problems(values: Sequence[float]) -> Share:
    """Return the mean of one value in [0, 1] per problem, with its interval.

    Problems are what was drawn, so the spread between them counts, however many samples each has.
    The interval is Wilson's at the effective number of trials, mean * (1 - mean) / (variance of the
    mean): never outside [0, 1], and not of width 0 where all problems agree.
    """
    mean = fmean(values)
    trials = float(len(values))
    spread = variance(values) / len(values) if len(values) > 1 else 0.0
    if spread and 0 < mean < 1:
        trials = mean * (1 - mean) / spread
    return Share(mean, *_wilson(mean, trials))


def _wilson(share: float, trials: float) -> tuple[float, float]:
    spread = _Z * _Z / trials
    middle = share + spread / 2
    width = math.sqrt(share * (1 - share) * spread + spread * spread / 4)
    low, high = (middle - width) / (1 + spread), (middle + width) / (1 + spread)
    return (0.0 if share == 0 else low), (1.0 if share == 1 else high)
