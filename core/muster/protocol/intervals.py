"""Confidence intervals of shares, and binomial probabilities. Pure."""

import math
from collections.abc import Iterator

_Z = 1.959964
"""Normal quantile of a two-sided 95 % interval."""


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Return the two-sided 95 % interval of a share (Wilson's score interval)."""
    return score_interval(successes / trials, trials) if trials else (0.0, 1.0)


def score_interval(share: float, trials: float) -> tuple[float, float]:
    """Return the same interval for a given share; the number of trials may be fractional."""
    spread = _Z * _Z / trials
    middle = share + spread / 2
    width = math.sqrt(share * (1 - share) * spread + spread * spread / 4)
    low, high = (middle - width) / (1 + spread), (middle + width) / (1 + spread)
    # Exact at 0 and 1, and within them, without rounding errors.
    return (max(0.0, low) if share else 0.0), (min(1.0, high) if share != 1 else 1.0)


def rate_bound(trials: int) -> float:
    """Return the one-sided 95 % upper bound of a rate after no success: about 3 / trials."""
    return 1.0 if not trials else -math.expm1(math.log(0.05) / trials)


def at_least(trials: int, rate: float, count: int) -> float:
    """Return the probability of `count` or more successes."""
    if count <= 0 or count > trials or rate >= 1:
        return float(count <= trials)
    if rate <= 0:
        return 0.0
    odds = math.log(rate), math.log1p(-rate)
    if count <= trials * rate:
        return max(0.0, 1 - math.fsum(_term(trials, k, *odds) for k in range(count)))
    # The upper tail is summed directly: one minus the lower tail would lose small probabilities.
    return min(1.0, math.fsum(_upper_terms(trials, count, odds)))


def exactly(trials: int, rate: float, count: int) -> float:
    """Return the probability of exactly `count` successes."""
    if not 0 <= count <= trials:
        return 0.0
    if rate <= 0 or rate >= 1:
        return float(count == (trials if rate >= 1 else 0))
    return _term(trials, count, math.log(rate), math.log1p(-rate))


def _upper_terms(trials: int, count: int, odds: tuple[float, float]) -> Iterator[float]:
    """Yield the terms from `count`, which is above the mean, until they no longer matter."""
    first = _term(trials, count, *odds)
    for k in range(count, trials + 1):
        term = _term(trials, k, *odds)
        yield term
        if term <= first * 1e-18:
            return


def _term(trials: int, k: int, log_rate: float, log_rest: float) -> float:
    return math.exp(_log_ways(trials, k) + k * log_rate + (trials - k) * log_rest)


def _log_ways(trials: int, k: int) -> float:
    """Return the logarithm of the binomial coefficient."""
    few = min(k, trials - k)
    rest = trials - few
    if few <= 32:
        return math.fsum(math.log((trials - i) / (i + 1)) for i in range(few))
    if trials < 10**6:
        return math.lgamma(trials + 1) - math.lgamma(few + 1) - math.lgamma(rest + 1)
    # For large numbers the difference of log-gamma values loses all digits. This is the difference
    # of Stirling's series of two of them.
    falling = few * math.log(trials) - few - (rest + 0.5) * math.log1p(-few / trials)
    return falling + (1 / trials - 1 / rest) / 12 - math.lgamma(few + 1)
