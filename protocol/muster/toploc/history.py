"""The sequential test over a worker's history: against cheats that stay just inside every limit.

One submission's errors prove little below the limits; a hundred submissions that are all close to
them do. Each submission has a *strain* between 0 and 1 (`Calibration.submission_strain`), and the
calibration bounds its mean over honest work. The test is an e-process: with X the strain, m the
bound and a bet b in (0, 1), the factor `1 + b (X / m - 1)` has expectation at most 1 while the
worker is honest, however the samples of a submission depend on each other. Products of such factors
that start at submission k, weighted by 1 / (k (k + 1)), and averaged over some bets, exceed 1 / a
with probability at most a over the whole life of an honest worker (Ville's inequality); the weights
make a late start of cheating as visible as an early one. Waudby-Smith and Ramdas, "Estimating means
of bounded random variables by betting" (2024); Shin, Ramdas and Rinaldo, "E-detectors" (2024).

Pure: nothing here decides what an alarm leads to.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from muster.protocol.documents import DocumentPart

BETS = (0.05, 0.2, 0.5, 0.9)
"""Shares of the wealth that are staked: small ones find weak and slow cheats, large ones strong."""

_NO_WEALTH = float("-inf")


class HistoryLimits(DocumentPart):
    """When a worker's history alarms."""

    honest_strain: Annotated[float, Field(gt=0, lt=1)]
    """Bound on the mean strain of honest submissions."""
    false_alarm: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    """Bound on the probability that an honest worker ever alarms."""


@dataclass(frozen=True, slots=True)
class History:
    """What the test remembers of one worker; start with `History()`."""

    submissions: int = 0
    """Submissions seen."""
    log_wealth: tuple[float, ...] = (_NO_WEALTH,) * len(BETS)
    """Per bet, the logarithm of the weighted sum over all starting points."""

    def after(self, strain: float, limits: HistoryLimits) -> History:
        """Return the history with one more submission; NaN counts as the largest strain."""
        bounded = min(1.0, max(0.0, strain)) if strain == strain else 1.0
        excess = bounded / limits.honest_strain - 1
        number = self.submissions + 1
        start = -math.log(number * (number + 1))
        wealth = (
            _log_sum(held, start) + math.log1p(bet * excess)
            for held, bet in zip(self.log_wealth, BETS, strict=True)
        )
        return History(number, tuple(wealth))

    @property
    def log_evidence(self) -> float:
        """Natural logarithm of the evidence against honesty: 0 without any, at least -ln(n + 1)."""
        mean = -math.log(len(BETS))
        wealth = _NO_WEALTH
        for held in self.log_wealth:
            wealth = _log_sum(wealth, held + mean)
        # What the starting points still to come weigh.
        return _log_sum(wealth, -math.log(self.submissions + 1))

    def alarms(self, limits: HistoryLimits) -> bool:
        """Return whether the evidence exceeds what honest workers ever reach."""
        return self.log_evidence >= -math.log(limits.false_alarm)


def first_alarm(strains: Iterable[float], limits: HistoryLimits) -> int | None:
    """Return the number of submissions after which a worker alarms; None if it does not."""
    history = History()
    for strain in strains:
        history = history.after(strain, limits)
        if history.alarms(limits):
            return history.submissions
    return None


def _log_sum(a: float, b: float) -> float:
    """Return ln(e^a + e^b)."""
    low, high = min(a, b), max(a, b)
    return high if low == _NO_WEALTH else high + math.log1p(math.exp(low - high))
