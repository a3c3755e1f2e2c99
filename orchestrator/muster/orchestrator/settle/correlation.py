"""Correlated failures: so many independent workers fail one check that the check, not they, is the
likelier cause.

Pure: outcomes in, a finding or None out. Attackers come alone or as a crowd of one owner's wallets;
a wrong calibration, a broken verifier or a disturbed validator hits everybody. So wallets are
counted, not submissions: each counts once, by the share of its outcomes that failed, and one that
has proven little counts for a fraction. Only frauds count as failures: they alone cost stake, so
an attacker who trips the breaker by failing pays a slash for every wallet.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from muster.protocol.messages import OutcomeRecord, Reason, Verdict
from muster.protocol.recipe import BreakerRecipe

FIRST_CHECK, LAST_CHECK = 3, 7
"""The checks whose failure can be fraud (docs/protocol.md section 8)."""
MOSTLY = 0.5
"""A worker fails a check when at least this share of its outcomes there are frauds."""
DECIMALS = 12
"""Decimals to which shares are compared: sums of many fractions must not decide."""


@dataclass(frozen=True, slots=True)
class CorrelatedFailure:
    """Too many independent workers fail one check."""

    check: int
    """Which, 3 to 7."""
    reason: Reason
    """The reason that most of their frauds have."""
    share: float
    """Weighed share of the workers seen at the check that fail it, 0 to 1."""
    failing: tuple[int, ...]
    """Numbers of the workers that fail it, ascending."""
    seen: int
    """Workers whose outcomes reached the check."""


@dataclass(slots=True)
class _AtCheck:
    """What one worker's outcomes say about one check."""

    reached: int = 0
    failed: int = 0
    reasons: Counter[Reason] = field(default_factory=Counter)

    @property
    def share(self) -> float:
        return self.failed / self.reached


def correlated_failure(
    outcomes: Iterable[tuple[OutcomeRecord, Verdict]],
    limits: BreakerRecipe,
    accepted_before: Callable[[int], int],
) -> CorrelatedFailure | None:
    """Return the check that trips the breaker, the one with the largest share, or None.

    `outcomes` are those of the window with the verdict that stands for each; `accepted_before`
    tells how many accepted submissions a worker had before the window. An outcome that failed an
    earlier check says nothing about a later one.
    """
    outcomes = list(outcomes)
    accused = {record.worker_id for record, verdict in outcomes if verdict is Verdict.FRAUD}
    # Nobody fails a check without a fraud: in a sound network there is nothing to count.
    if len(accused) < limits.min_workers:
        return None
    checks = _by_check(outcomes)
    found = [_judge(check, workers, limits, accepted_before) for check, workers in checks.items()]
    tripped = [failure for failure in found if failure is not None]
    return max(tripped, key=lambda failure: (failure.share, -failure.check), default=None)


def _by_check(
    outcomes: Iterable[tuple[OutcomeRecord, Verdict]],
) -> dict[int, dict[int, _AtCheck]]:
    checks: dict[int, dict[int, _AtCheck]] = {
        check: defaultdict(_AtCheck) for check in range(FIRST_CHECK, LAST_CHECK + 1)
    }
    for record, verdict in outcomes:
        stopped = LAST_CHECK + 1 if verdict is Verdict.ACCEPTED else record.reason.check
        for check in range(FIRST_CHECK, min(stopped, LAST_CHECK) + 1):
            at = checks[check][record.worker_id]
            at.reached += 1
            if check == stopped and verdict is Verdict.FRAUD:
                at.failed += 1
                at.reasons[record.reason] += 1
    return checks


def _judge(
    check: int,
    workers: dict[int, _AtCheck],
    limits: BreakerRecipe,
    accepted_before: Callable[[int], int],
) -> CorrelatedFailure | None:
    failing = sorted(number for number, at in workers.items() if at.share >= MOSTLY)
    if len(failing) < limits.min_workers:
        return None
    weights = {
        number: 1.0 if accepted_before(number) >= limits.proven_after else limits.newcomer_weight
        for number in workers
    }
    weighed = sum(weights[number] * at.share for number, at in workers.items())
    share = round(weighed / sum(weights.values()), DECIMALS)
    if share <= limits.max_share:
        return None
    reasons: Counter[Reason] = Counter()
    for at in workers.values():
        reasons.update(at.reasons)
    reason = min(reasons, key=lambda each: (-reasons[each], each))
    return CorrelatedFailure(check, reason, share, tuple(failing), len(workers))
