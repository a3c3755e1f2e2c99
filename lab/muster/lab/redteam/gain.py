"""The gain of cheating over honest work, per unit and in prices of a unit. Pure.

With r = 1 the price, c the honest cost, s the share of it that the cheat saves, q the probability
that a submission is audited and found, L what is lost then (slashed stake and unvested reward of
one submission, per unit): honest work brings r - c, cheating (1 - q) r - q L - (1 - s) c, so the
difference is s c - q (r + L). The competitive market is the worst case: c = r.
"""

from dataclasses import dataclass

PPM = 1_000_000


@dataclass(frozen=True, slots=True)
class Gain:
    """The gain of an undetected attack."""

    saved: float = 1.0
    """Share of the honest cost of a unit that it saves."""
    extra: float = 0.0
    """Extra pay over honest work, in prices of a unit."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of a run that decide whether cheating pays."""

    price_wei: int
    """Price of one unit."""
    stake_wei: int
    """Stake of the worker."""
    fraud_ppm: int
    """Share of the stake that a fraud costs, in millionths."""
    units: int
    """Units of one submission."""
    audit_rate: float = 1.0
    """Share of submissions that are judged before they are paid."""
    cost: float = 1.0
    """Honest cost of a unit, in prices of a unit: 1 where competition leaves nothing."""

    @property
    def slash(self) -> float:
        """Cost of a fraud per unit of the submission, in prices of a unit."""
        return self.stake_wei * self.fraud_ppm / PPM / (self.price_wei * self.units)

    def profit(self, gain: Gain, detection: float, *, is_fraud: bool) -> float:
        """Return the profit of a cheated unit over an honest one, in prices of a unit."""
        found = self.audit_rate * detection
        lost = 1 + gain.extra + (self.slash if is_fraud else 0.0)
        return gain.saved * self.cost + gain.extra - found * lost
