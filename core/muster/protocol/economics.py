"""Economics of cheating: every adversary's expected profit, and changes that make it a loss.

Pure arithmetic on a run's parameters and the measured power of its checks: `muster run create`
refuses a run in which cheating pays. Amounts are in wei of the Muster token. Profits are relative
to doing the same work honestly, so cheating pays when its profit is above zero. docs/economics.md
derives the formulas; the lab's `muster economics` shows further consequences.

The model is that of audits with a fixed penalty (Becker 1968, "Crime and punishment"), for files of
many units: the first sample that fails costs the file's price, and `fraud_strikes` failing samples
cost the slash.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

from muster.protocol import intervals

PPM = 1_000_000
"""One whole, in millionths."""
MAX_STAKE = 1 << 88
"""More than any account can hold (StakeVault)."""

at_least = lru_cache(maxsize=1 << 16)(intervals.at_least)
exactly = lru_cache(maxsize=1 << 16)(intervals.exactly)
"""Cached probabilities: searches for a stake or a price need the same ones repeatedly."""


@dataclass(frozen=True, slots=True)
class WorkerTerms:
    """The terms of a run and its deployment for workers."""

    price_wei: int
    """r: paid per unit."""
    fraud_ppm: int
    """Millionths of the stake that a first statistical fraud costs; doubled for each before."""
    exact_fraud_ppm: int
    """Millionths that an exact fraud costs."""
    fraud_strikes: int
    """Samples of a submission that must fail a statistical check to make it fraud."""
    samples: int
    """Samples in a submission."""
    units_per_sample: int
    """The most units that a sample can be worth."""
    required_stake: int
    """Active stake that a worker must hold."""
    stake_per_unit: int
    """Stake behind one unit in flight."""
    unvested_wei: int = 0
    """V: reward that a fraud verdict forfeits in addition to its own submission's."""
    audit_rate: float = 1.0
    """p: share of submissions that validators check before the deadline. Unjudged work
    is void: neither paid nor slashed."""
    audited_share: float = 1.0
    """Share of a checked submission's samples that are prefilled (checks 6 and 7)."""
    false_positive: float = 0.0
    """Probability that an honest sample fails when it is checked."""

    @property
    def units(self) -> int:
        """n: the most units in a submission."""
        return self.samples * self.units_per_sample

    @property
    def least_stake(self) -> int:
        """The smallest stake with which a worker gets a lease."""
        return max(self.required_stake, self.units * self.stake_per_unit)


@dataclass(frozen=True, slots=True)
class Cheat:
    """A way to cheat, and the probability that it is noticed."""

    name: str
    """Description of the cheat."""
    power: float
    """d: probability that one cheated sample fails when it is checked."""
    exact: bool = False
    """Whether one failure is fraud; such checks cover every sample of a checked submission."""
    saving: float = 1.0
    """g / r: the saving per unit as a share of its price. 1 is the worst case: work that costs its
    whole price is forged for free."""


@dataclass(frozen=True, slots=True)
class Odds:
    """Odds of a submission in which some samples are cheated."""

    cheated: int
    """Number of cheated samples."""
    lost: float
    """Probability that it is not paid, minus an honest one's."""
    fraud: float
    """Probability that it is fraud, minus an honest one's."""


def odds_of(terms: WorkerTerms, cheat: Cheat, cheated: int) -> Odds:
    """Return the odds of a submission with `cheated` cheated samples.

    Failures are binomial: each cheated sample is checked with probability `audited_share` and then
    fails with the cheat's power, or as an honest one would. The odds are those in excess of a
    submission that is honest throughout.
    """
    unlucky = terms.audited_share * terms.false_positive
    caught = max((1.0 if cheat.exact else terms.audited_share) * cheat.power, unlucky)
    strikes, needed = terms.fraud_strikes, 1 if cheat.exact else terms.fraud_strikes
    rest = terms.samples - cheated
    lost = _either(cheated, caught, 1, rest, unlucky, 1) - at_least(terms.samples, unlucky, 1)
    fraud = _either(cheated, caught, needed, rest, unlucky, strikes)
    fraud -= at_least(terms.samples, unlucky, strikes)
    return Odds(cheated, terms.audit_rate * max(lost, 0.0), terms.audit_rate * max(fraud, 0.0))


def _either(a: int, rate_a: float, needed: int, b: int, rate_b: float, strikes: int) -> float:
    """Return the probability that `needed` of `a` samples fail, or `strikes` of all `a + b`.

    `needed` is at most `strikes`: below it, the others have to make up what is missing.
    """
    below = (exactly(a, rate_a, n) * at_least(b, rate_b, strikes - n) for n in range(needed))
    return at_least(a, rate_a, needed) + math.fsum(below)


def expected_slash(
    terms: WorkerTerms, cheat: Cheat, stake: int, fraud: float, submissions: int = 1
) -> float:
    """Return the expected slash of so many submissions, in wei.

    Each is independently fraud with probability `fraud`. Every fraud takes its share of the stake
    that earlier ones left; a statistical fraud takes twice the share of the previous one.
    """
    rate = min(max(fraud, 0.0), 1.0)
    if cheat.exact:
        return stake * -math.expm1(submissions * _log_rest(rate * terms.exact_fraud_ppm / PPM))
    expected, left, ppm = 0.0, 1.0, terms.fraud_ppm
    for count in range(1, submissions + 1):
        share = min(ppm, PPM) / PPM
        # The count-th fraud, if there are that many, takes `share` of the stake that is left.
        expected += at_least(submissions, rate, count) * left * share
        left *= 1 - share
        ppm *= 2
        if left <= 0 or ppm == 0:
            break
    return stake * expected


def _log_rest(share: float) -> float:
    return math.log1p(-share) if share < 1 else -math.inf


def profit(terms: WorkerTerms, cheat: Cheat, stake: int, odds: Odds, submissions: int = 1) -> float:
    """Return the profit of cheated `submissions` over honest ones, in wei.

    j g u - L n r - E[slash] - F V for each submission, with j of its samples cheated, u units a
    sample, L and F its odds of being lost and of being fraud. With everything cheated, one strike
    and everything at stake this is the classical q (r + S + V) > g, with q = p d.
    """
    saved = odds.cheated * terms.units_per_sample * cheat.saving * terms.price_wei
    lost = odds.lost * terms.units * terms.price_wei + odds.fraud * terms.unvested_wei
    slashed = expected_slash(terms, cheat, stake, odds.fraud, submissions)
    return submissions * (saved - lost) - slashed


# The best strategies of a worker


def every_odds(terms: WorkerTerms, cheat: Cheat) -> list[Odds]:
    """Return the odds for a selection of numbers of cheated samples.

    All numbers up to 32, then about sixteen for every doubling, and the whole submission.
    """
    counts = set(range(1, min(terms.samples, 32) + 1)) | {terms.samples}
    step = 32.0
    while step < terms.samples:
        counts.add(int(step))
        step *= 2 ** (1 / 16)
    return [odds_of(terms, cheat, count) for count in sorted(counts)]


def best_share(
    terms: WorkerTerms, cheat: Cheat, stake: int, table: Sequence[Odds] | None = None
) -> tuple[Odds, float]:
    """Return the odds of the most profitable number of cheated samples, and its profit in wei."""
    table = every_odds(terms, cheat) if table is None else table
    return max(
        ((odds, profit(terms, cheat, stake, odds)) for odds in table), key=lambda pair: pair[1]
    )


def burst(terms: WorkerTerms, cheat: Cheat, stake: int, units: int) -> float:
    """Return the best gain of a worker that fills `units` in flight with cheated submissions.

    All are delivered before the first is judged, so a stake is slashed once for all of them.
    """
    submissions = max(units // terms.units, 1)
    table = every_odds(terms, cheat)
    return max(profit(terms, cheat, stake, odds, submissions) for odds in table)


# Necessary changes


@dataclass(frozen=True, slots=True)
class Remedies:
    """Single changes after which no cheat pays; each None when it alone is not enough."""

    fraud_ppm: int | None
    """The least slash of a first fraud, of either kind."""
    required_stake: int | None
    """The least stake to demand."""
    price_wei: int | None
    """The highest price per unit."""
    audit_rate_ppm: int | None
    """The least share of submissions to check."""


def pays(terms: WorkerTerms, cheats: Iterable[Cheat]) -> bool:
    """Return whether some cheat pays for a worker with the least stake that brings work."""
    stake = terms.least_stake
    return any(
        max(best_share(terms, c, stake)[1], burst(terms, c, stake, stake // terms.stake_per_unit))
        > 0
        for c in cheats
    )


def remedies(terms: WorkerTerms, cheats: Sequence[Cheat]) -> Remedies:
    """Return the single changes that each make every cheat a loss."""

    def safe(changed: WorkerTerms) -> bool:
        return not pays(changed, cheats)

    exact = terms.exact_fraud_ppm
    return Remedies(
        fraud_ppm=least(
            lambda n: safe(replace(terms, fraud_ppm=n, exact_fraud_ppm=max(n, exact))), PPM
        ),
        required_stake=least(lambda n: safe(replace(terms, required_stake=n)), MAX_STAKE),
        price_wei=_greatest(lambda n: safe(replace(terms, price_wei=n)), terms.price_wei),
        audit_rate_ppm=least(lambda n: safe(replace(terms, audit_rate=n / PPM)), PPM),
    )


def least(holds: Callable[[int], bool], most: int) -> int | None:
    """Return the least n from 0 to `most` for which a monotone condition holds; None for none."""
    known = cache(holds)
    if not known(most):
        return None
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if known(middle) else (middle + 1, high)
    return low


def _greatest(holds: Callable[[int], bool], most: int) -> int | None:
    """Return the greatest n from 1 to `most` for which a condition, true for small n, holds."""
    failing = least(lambda n: n > most or not holds(n), most + 1)
    return failing - 1 if failing and failing > 1 else None
