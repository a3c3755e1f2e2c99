"""The profit of one cheat for a worker: once, in a burst, split over identities; and its deterrent.

Pure. It extends `muster.protocol.economics` and uses its units and signs.
"""

import math
from dataclasses import dataclass, replace

from muster.protocol.economics import (
    MAX_STAKE,
    Cheat,
    Odds,
    WorkerTerms,
    best_share,
    burst,
    every_odds,
    least,
    profit,
)

MAX_UNITS = 1 << 64
"""Upper bound of caps: units are uint64."""


@dataclass(frozen=True, slots=True)
class CheatWorth:
    """The profits of one cheat under a run's terms."""

    cheat: Cheat
    best: Odds
    """The most profitable share of a submission to cheat on, and its odds."""
    profit_wei: float
    """Profit of one such submission over an honest one."""
    burst_wei: float
    """Profit of filling the unit cap with them."""
    sybils: int
    """Identities into which the stake can be split."""
    sybils_wei: float
    """Profit of all identities when each fills its cap."""
    minimal_stake: int | None
    """The smallest stake that deters one submission; None if there is none."""
    cap_units: int | None
    """The most units in flight that the stake deters; None for any number."""
    break_even_saving: float
    """Smallest saving, as a share of the price, at which it would pay."""

    @property
    def pays(self) -> bool:
        """Whether a rational worker would do it."""
        return max(self.profit_wei, self.burst_wei, self.sybils_wei) > 0


def assess(terms: WorkerTerms, cheat: Cheat, stake: int) -> CheatWorth:
    """Return the profits of a cheat for a worker with this stake."""
    best, gained = best_share(terms, cheat, stake)
    count, together = sybils(terms, cheat, stake)
    return CheatWorth(
        cheat=cheat,
        best=best,
        profit_wei=gained,
        burst_wei=burst(terms, cheat, stake, stake // terms.stake_per_unit),
        sybils=count,
        sybils_wei=together,
        minimal_stake=minimal_stake(terms, cheat),
        cap_units=in_flight_cap(terms, cheat, stake),
        break_even_saving=break_even_saving(terms, cheat, stake),
    )


def classical_stake(reward: float, audit_rate: float, power: float) -> float:
    """Return the penalty S + V at which forging one unit at no cost stops paying: r (1 - q) / q.

    q = p d. The penalty is infinite when nothing is ever detected.
    """
    q = audit_rate * power
    return math.inf if q <= 0 else reward * (1 - q) / q


def minimal_stake(terms: WorkerTerms, cheat: Cheat) -> int | None:
    """Return the smallest stake in wei at which cheating on any share of a submission does not pay.

    None when no stake is enough: a cheat that is not noticed, or not slashed, is not deterred.
    """
    table = every_odds(terms, cheat)
    return least(lambda stake: best_share(terms, cheat, stake, table)[1] <= 0, MAX_STAKE)


def in_flight_cap(terms: WorkerTerms, cheat: Cheat, stake: int) -> int | None:
    """Return the most units in flight at which a burst of cheated submissions does not pay.

    None when any number is safe, 0 when a single submission pays already. The gain is linear in the
    submissions and what can be slashed is not, so a burst is worst at its largest.
    """
    table = every_odds(terms, cheat)

    def pays(submissions: int) -> bool:
        return any(profit(terms, cheat, stake, odds, submissions) > 0 for odds in table)

    found = least(pays, MAX_UNITS // terms.units)
    return None if found is None else max(found - 1, 0) * terms.units


def sybils(terms: WorkerTerms, cheat: Cheat, stake: int) -> tuple[int, float]:
    """Return into how many identities a stake can be split, and the profit of their bursts in wei.

    Each holds the required minimum and fills its own cap; none has a conviction yet.
    """
    count = max(stake // terms.least_stake, 1)
    each = stake // count
    return count, count * burst(terms, cheat, each, each // terms.stake_per_unit)


def break_even_saving(terms: WorkerTerms, cheat: Cheat, stake: int) -> float:
    """Return the smallest saving, as a share of a unit's price, at which this cheat pays.

    Above 1 for a cheat that never pays. It expresses the tolerance of the checks as a price: what
    goes undetected must not save anything.
    """
    table = every_odds(terms, cheat)
    costs = (
        -profit(terms, replace(cheat, saving=0.0), stake, odds)
        / (odds.cheated * terms.units_per_sample * terms.price_wei)
        for odds in table
    )
    return max(min(costs), 0.0) if terms.price_wei else math.inf
