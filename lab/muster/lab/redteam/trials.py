"""Trials of attacks, and the statistics over them. Pure.

An attack has variants (ways, or values of a knob). One trial is one act of cheating from beginning
to verdict; it is *caught* when the named check finds it, with one of the reasons that the attack
expects. A trial whose delivery equals honest work is *harmless*: it is counted, but says nothing
about detection.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from random import Random
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, Literal

from muster.lab.redteam.gain import Gain, Terms
from muster.protocol.intervals import wilson
from muster.protocol.messages import Verdict

if TYPE_CHECKING:
    from muster.lab.redteam.stage import Stage

Kind = Literal["hard", "statistical", "economic"]
LEAST_POWER = 0.95
"""Share of a statistical attack's submissions that must be detected at the profitable end of its
knob."""

MOST_PROFIT = 0.01
"""Upper 95 % bound of an economic attack's mean profit, in prices of a unit."""
LEAST_SAMPLE = 30
"""Fewest measured profits for which the mean gets an interval."""
SHOWS_POWER = 80
"""Trials of each way of a statistical attack: all caught, the share is above `LEAST_POWER` with
95 % confidence (Wilson), which takes 73.
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one trial ended."""

    caught: bool
    """Whether the defence held, for the reason expected of it."""
    verdict: str = ""
    """The decision."""
    reason: str = ""
    """The defence's name for the reason."""
    is_harmless: bool = False
    """Whether the delivery equals honest work."""
    found_after: float = 1.0
    """Time until detection, in the attack's unit of time."""
    profit: float | None = None
    """Measured profit in prices of a unit; None if the attack's gain model gives it."""
    knobs: Mapping[str, float | str] = field(default_factory=dict)
    """The random parameters."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One line of the record."""

    attack: str
    """A1 to A39."""
    variant: str
    """Name of the variant."""
    number: int
    """Number within the variant, from 0."""
    outcome: Outcome
    """How it ended."""
    cpu_s: float
    """Processor time of the whole trial."""

    def line(self) -> dict[str, Any]:
        """Return the line of the record as JSON values."""
        found = {k: v for k, v in asdict(self.outcome).items() if v not in (None, "", {})}
        head = {"attack": self.attack, "variant": self.variant, "number": self.number}
        return head | found | {"cpu_s": round(self.cpu_s, 4)}


Play = Callable[["Stage", Random], Outcome]
"""Plays one trial; all randomness comes from the given generator."""


PlayMany = Callable[["Stage", Random, int], Sequence[Outcome]]
"""Plays at least this many trials at once."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way of an attack, or one value of its knob."""

    name: str
    """In words."""
    play: Play | None = None
    """One trial."""
    level: float | None = None
    """The knob's value, where there is one."""
    must_catch: bool = True
    """Whether the attack fails the suite when this variant does; below the profitable end of a knob
    the rate is only recorded."""
    must_pass: bool = False
    """Whether it is an honest twin, which must never be noticed."""
    many: PlayMany | None = None
    """Replaces `play` if many trials are made at a time."""
    most: int | None = None
    """Most trials of a slow variant, which gets a tenth of the others' number."""


WHOLE = Gain()


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack of the catalogue, as a program."""

    id: str
    """A1 to A39."""
    title: str
    """What the adversary does."""
    defence: str
    """The check that finds it."""
    kind: Kind
    """Hard: always caught. Statistical: at least 95 % of submissions at the profitable end.
    Economic: does not pay."""
    variants: tuple[Variant, ...]
    """Its variants, played in turn."""
    gain: Gain = WHOLE
    """Its gain while undetected."""
    knob: str = ""
    """What `level` measures."""
    time_unit: str = "submission"
    """What `found_after` counts."""
    full: int = 300
    """Trials in the full run: of a hard attack together, of a statistical one per variant."""
    fast: int = 5
    """Trials in the fast slice."""


@dataclass(frozen=True, slots=True)
class VariantResult:
    """Result of one variant's trials."""

    variant: Variant
    """The way."""
    trials: int
    """Number of trials without harmless ones."""
    caught: int
    """Number of these that were caught."""
    harmless: int
    """Trials that delivered honest work after all."""
    found_after: float
    """Mean time until detection of those caught."""
    reasons: tuple[str, ...]
    """Reasons of the caught trials, the most frequent first."""
    escaped: str
    """Outcome of the first undetected trial; empty when all were caught."""
    seconds: float | None = None
    """Mean time from the commitment to the outcome on chain, where there is a chain."""

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the share caught."""
        return wilson(self.caught, self.trials)


@dataclass(frozen=True, slots=True)
class AttackResult:
    """Result of all trials of an attack."""

    attack: Attack
    """The attack."""
    by_variant: tuple[VariantResult, ...]
    """In the attack's order."""
    profit: float
    """Mean profit of a unit in prices of a unit, over honest work: measured, or by the gain model
    with the share that was caught."""
    profit_interval: tuple[float, float]
    """The profit's 95 % interval; twice the profit itself if it comes from the gain model."""
    measured: int = 0
    """Number of measured profits; 0 if the profit comes from the gain model."""
    failure: str = ""
    """Why the attack fails the suite; empty if it does not."""

    @property
    def counted(self) -> list[VariantResult]:
        """The variants that must be caught."""
        return [v for v in self.by_variant if v.variant.must_catch and not v.variant.must_pass]

    @property
    def trials(self) -> int:
        """Trials of the variants that must be caught."""
        return sum(v.trials for v in self.counted)

    @property
    def caught(self) -> int:
        """Caught trials of the variants that must be caught."""
        return sum(v.caught for v in self.counted)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the share caught."""
        return wilson(self.caught, self.trials)

    @property
    def found_after(self) -> float:
        """Mean time until detection over all caught trials."""
        weights = sum(v.caught for v in self.counted)
        return sum(v.found_after * v.caught for v in self.counted) / max(1, weights)


def conclude(attack: Attack, trials: Sequence[Trial], terms: Terms) -> AttackResult:
    """Return the result of an attack's trials."""
    results = tuple(
        _of_variant(v, [t for t in trials if t.variant == v.name]) for v in attack.variants
    )
    measured = [t.outcome.profit for t in trials if t.outcome.profit is not None]
    unmeasured = {t.variant for t in trials if t.outcome.profit is None}
    draft = AttackResult(attack, results, 0.0, (0.0, 0.0), len(measured))
    if measured:
        profit, interval = _mean_and_interval(measured)
    else:
        is_fraud = any(t.outcome.verdict == "FRAUD" and t.outcome.caught for t in trials)
        found = draft.caught / draft.trials if draft.trials else 0.0
        profit = terms.profit(attack.gain, found, is_fraud=is_fraud)
        interval = profit, profit
    result = replace(draft, profit=profit, profit_interval=interval)
    return replace(result, failure=_failure(result, unmeasured))


def _mean_and_interval(values: Sequence[float]) -> tuple[float, tuple[float, float]]:
    mean = fmean(values)
    if len(values) < LEAST_SAMPLE:
        return mean, (mean, mean)  # too few for an interval: use the mean alone
    half = 1.96 * stdev(values) / math.sqrt(len(values))
    return mean, (mean - half, mean + half)


def _of_variant(variant: Variant, trials: Sequence[Trial]) -> VariantResult:
    if variant.must_pass:
        counted = [t.outcome for t in trials]
        caught = [outcome for outcome in counted if outcome.verdict != Verdict.ACCEPTED.name]
    else:
        counted = [t.outcome for t in trials if not t.outcome.is_harmless]
        caught = [outcome for outcome in counted if outcome.caught]
    reasons = [outcome.reason for outcome in caught if outcome.reason]
    missed = (o for o in counted if not o.caught)
    escaped = "" if variant.must_pass else next((f"{o.verdict} {o.reason}" for o in missed), "")
    timed = [float(o.knobs["seconds"]) for o in caught if "seconds" in o.knobs]
    return VariantResult(
        variant,
        len(counted),
        len(caught),
        len(trials) - len(counted),
        sum(outcome.found_after for outcome in caught) / max(1, len(caught)),
        tuple(sorted(set(reasons), key=lambda reason: (-reasons.count(reason), reason))),
        escaped.strip(),
        fmean(timed) if timed else None,
    )


def _failure(result: AttackResult, unmeasured: Collection[str]) -> str:
    """Return why an attack fails the suite; `unmeasured` are variants without measured profits."""
    kind, bound = result.attack.kind, result.profit_interval[1]
    noticed = [v for v in result.by_variant if v.variant.must_pass and v.caught]
    if noticed:
        return f"honest work was taken for {result.attack.id}: {noticed[0].variant.name}"
    if not result.trials:
        return "no trial counted"
    if kind == "economic" and bound > MOST_PROFIT:
        return f"it may pay {bound:+.3f} per unit"
    # Variants without a measured profit must be caught, even if others only must not pay.
    counted = [
        v
        for v in result.counted
        if v.trials and (kind != "economic" or v.variant.name in unmeasured)
    ]
    least = LEAST_POWER if kind == "statistical" else 1.0
    weak = [v for v in counted if v.caught < least * v.trials]
    if not weak:
        return ""
    worst = weak[0]
    ended = f" ({worst.escaped})" if worst.escaped else ""
    return f"{worst.variant.name}: {worst.caught} of {worst.trials} caught{ended}"
