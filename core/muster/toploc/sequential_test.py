"""The sequential test over a worker's submissions: it finds cheats that stay just inside limits.

A margin of d lets a worker move every close choice by d. One submission hardly shows that; many
submissions show in which direction choices move. The *conduct* of a submission is measured by one
replay of it:

* its *strain*, the mean over samples of the largest share of a limit that an error uses up;
* its *loss*, the share of the margin that its tokens gave away, a mean over tokens;
* its *flips*, the tokens that the replay would not have chosen, each with the token that it would
  have chosen. Honest rounding prefers no token: which of two nearly equal tokens wins is a coin
  toss. So a group's flips lean neither to EOS nor from it, neither to the likelier token nor from
  it, and not to tokens that won before.

The calibration bounds the means of all three over honest work. For a measure X of mean at most m
and a bet b in (0, 1), the factor `1 + b (X / m - 1)` has expectation at most 1, however the samples
of a submission (for flips: of a group, which share a prompt) depend on each other. Let R be the
sum, over all submissions that a product may begin with, of the products of these factors, averaged
over measures and bets. R has expectation at most n after n submissions. Within a year of N
submissions it reaches A with probability at most N / A (Doob). Shiryaev (1963), Roberts (1966);
Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting" (2024).

Pure. Evidence is a function of an ordered list of conducts, so anybody can compute it again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from muster.protocol.documents import DocumentPart

BETS = (0.05, 0.2, 0.5, 0.9)
"""Bets, as shares of the wealth: small bets find weak and slow cheats, large bets strong ones."""
SUBMISSIONS_A_YEAR = 1 << 17
"""N, the submissions of a year at one every four minutes: the horizon of `false_alarm`."""
WINDOW = 64
"""Most submissions of a worker that a validator considers, including the one that it judges."""
MOST_FLIPS = 256
"""Most flips of a group that count. The batch's seed chooses them, after the commitment."""

_NO_WEALTH = float("-inf")
_LEANS = 5
_COLUMNS = (2 + _LEANS) * len(BETS)


class HistoryLimits(DocumentPart):
    """Bounds on the means of honest workers' submissions, and on false alarms."""

    honest_strain: Annotated[float, Field(gt=0, lt=1)]
    """Bound on the mean strain."""
    honest_loss: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Bound on the mean loss, as a share of the margin."""
    honest_lean: Annotated[float, Field(ge=0, lt=1)] = 0.25
    """Bound on the mean lean of a group's flips: 0 is a fair coin, 1 always the same side."""
    false_alarm: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    """Bound on the probability that an honest worker causes an alarm within a year."""


class Flip(NamedTuple):
    """A token that the replay would not have chosen."""

    chosen: int
    """The token that the worker delivered."""
    expected: int
    """The token that the replay chooses."""
    to_end: int
    """1 when an EOS was chosen instead of another token, -1 the other way round, else 0."""
    to_likelier: int
    """1 when the policy finds the chosen token likelier than the expected one, else -1."""


@dataclass(frozen=True, slots=True)
class Conduct:
    """The measurements of one replay of a submission."""

    strain: float
    """0 without any error, 1 at a limit."""
    loss: float
    """0 if every token is the replay's choice, 1 if every token is a whole margin below it."""
    groups: tuple[tuple[Flip, ...], ...] = ()
    """The flips that count of every group, groups in the order of the file; at most `MOST_FLIPS` of
    each."""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        groups = [[list(flip) for flip in flips] for flips in self.groups]
        return {"strain": self.strain, "loss": self.loss, "groups": groups}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Conduct:
        """Return what `to_json` gave; raises ValueError, KeyError or TypeError for other values."""
        groups = tuple(tuple(Flip(*map(int, f)) for f in flips) for flips in value["groups"])
        return cls(float(value["strain"]), float(value["loss"]), groups)


@dataclass(frozen=True, slots=True)
class WorkerHistory:
    """The state of the test for one worker; start with `WorkerHistory()`."""

    submissions: int = 0
    """Submissions seen."""
    log_sums: tuple[float, ...] = (_NO_WEALTH,) * _COLUMNS
    """Per measure and bet, the logarithm of its sum in R."""
    wins: Mapping[int, int] = field(default_factory=dict)
    """Per token, the number of flips that chose it minus the number that expected it."""

    def after(self, conduct: Conduct, limits: HistoryLimits) -> WorkerHistory:
        """Return the history with one more submission; NaN counts as the largest value."""
        wins = dict(self.wins)
        leans = [_leans(flips, wins, limits.honest_lean) for flips in conduct.groups]
        excesses = [
            (_share(conduct.strain) / limits.honest_strain - 1,),
            (_share(conduct.loss) / limits.honest_loss - 1,),
            *(zip(*leans, strict=True) if leans else [()] * _LEANS),
        ]
        grown = [
            sum(math.log1p(bet * excess) for excess in measured)
            for measured in excesses
            for bet in BETS
        ]
        sums = (_log_sum(held, 0.0) + more for held, more in zip(self.log_sums, grown, strict=True))
        return WorkerHistory(self.submissions + 1, tuple(sums), wins)

    @property
    def log_evidence(self) -> float:
        """Natural logarithm of the evidence; -inf before the first submission. An honest worker's
        exceeds -ln(p) within a year with probability at most p.
        """
        total = _NO_WEALTH
        for held in self.log_sums:
            total = _log_sum(total, held)
        return total - math.log(_COLUMNS) - math.log(SUBMISSIONS_A_YEAR)

    def alarms(self, limits: HistoryLimits) -> bool:
        """Return whether the evidence exceeds what honest workers reach."""
        return self.log_evidence >= -math.log(limits.false_alarm)


def history_of(conducts: Iterable[Conduct], limits: HistoryLimits) -> WorkerHistory:
    """Return the history of a worker's submissions, oldest first."""
    history = WorkerHistory()
    for conduct in conducts:
        history = history.after(conduct, limits)
    return history


def _leans(flips: Sequence[Flip], wins: dict[int, int], limit: float) -> tuple[float, ...]:
    """Return how far a group's flips lean beyond the limit, each at least -1: to EOS, from it, to
    likelier tokens, from them, to tokens that won before. Adds the group's wins to `wins`.
    """
    # The favoured tokens are computed before this group's wins are added: a bet must come first.
    favoured = [wins.get(f.chosen, 0) - wins.get(f.expected, 0) for f in flips]
    for flip in flips:
        wins[flip.chosen] = wins.get(flip.chosen, 0) + 1
        wins[flip.expected] = wins.get(flip.expected, 0) - 1
    ends, likelier = [f.to_end for f in flips], [f.to_likelier for f in flips]
    sides = (ends, [-sign for sign in ends], likelier, [-sign for sign in likelier], favoured)
    return tuple(_beyond(signed, limit) for signed in sides)


def _beyond(signed: Sequence[int], limit: float) -> float:
    """Return by how much the mean sign exceeds a limit, divided by the limit's distance from -1.

    0 without signs to bet on: their presence is independent of their values.
    """
    total = sum(map(abs, signed))
    return (sum(signed) / total - limit) / (1 + limit) if total else 0.0


def _share(value: float) -> float:
    return min(1.0, max(0.0, value)) if value == value else 1.0


def _log_sum(a: float, b: float) -> float:
    """Return ln(e^a + e^b)."""
    low, high = min(a, b), max(a, b)
    return high if low == _NO_WEALTH else high + math.log1p(math.exp(low - high))
