"""The breaker: pauses slashing when many independent workers fail the same check.

Outcomes count as soon as validators hand them in, before they are posted, so that a pause can
precede the first slash. The pause itself is on chain, limited in time, with the evidence's hash.
This module decides when to pause, and publishes the evidence. When the failures end, slashing
resumes by itself.
"""

import json
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from muster.chain import BatchView, PauseCause, RunView
from muster.orchestrator.db import Database
from muster.orchestrator.db.statements import outcomes_of
from muster.orchestrator.intake.files import reporting_disk
from muster.orchestrator.ports import Constants
from muster.orchestrator.projection import Judged, Projection
from muster.protocol.encoding import canonical_json, hex0x, keccak
from muster.protocol.errors import EncodingError
from muster.protocol.ids import Hash32
from muster.protocol.messages import OutcomeRecord, Reason, Verdict, unpack_records
from muster.protocol.recipe import BreakerRecipe

# Correlated failures: so many independent workers fail one check that a fault of the check is more
# likely than fraud.
#
# Pure function from outcomes to a finding or None. Attackers are single wallets or many wallets of
# one owner; a wrong calibration, a broken verifier or a faulty validator affects everybody. So
# wallets are counted, not submissions: each counts once, by the share of its outcomes that failed,
# and a wallet with few accepted submissions counts for a fraction. Only frauds count as failures:
# only they cost stake, so an attacker who trips the breaker pays a slash for every wallet.

FIRST_CHECK, LAST_CHECK = 3, 7
"""The checks whose failure can be fraud (docs/protocol.md section 8)."""
MOSTLY = 0.5
"""A worker fails a check when at least this share of its outcomes at the check are frauds."""
DECIMALS = 12
"""Decimals to which shares are rounded before comparison, against errors of long sums."""


@dataclass(frozen=True, slots=True)
class CorrelatedFailure:
    """Too many independent workers fail one check."""

    check: int
    """Number of the check, 3 to 7."""
    reason: Reason
    """The most frequent reason of their frauds."""
    share: float
    """Weighted share, 0 to 1, of failing workers among those whose outcomes reached the check."""
    failing: tuple[int, ...]
    """Ids of the workers that fail it, ascending."""
    seen: int
    """Workers whose outcomes reached the check."""


@dataclass(slots=True)
class _AtCheck:
    """One worker's outcomes at one check."""

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
    """Return the check that trips the breaker, or None; of several, the one with the largest share.

    `outcomes` are those of the window, each with its standing verdict; `accepted_before` returns
    how many accepted submissions a worker had before the window. An outcome that failed an earlier
    check is not counted at later ones.
    """
    outcomes = list(outcomes)
    accused = {record.worker_id for record, verdict in outcomes if verdict is Verdict.FRAUD}
    # Without frauds no worker fails, so in a sound network nothing is counted.
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


logger = logging.getLogger(__name__)

StandingOutcome = tuple[OutcomeRecord, Verdict]
"""An outcome and its standing verdict."""
EVIDENCE = "evidence"
"""Subfolder of the files folder."""
MAX_FRAUDS = 10_000
"""Most frauds listed in the evidence of a pause."""
MAX_LOOKED = 20_000
"""Most outcomes of the window that are read at a time, the newest first, to limit the cost."""
MAX_WAITING = 500
"""Most batches without outcomes that are read at a time, the newest first."""
LOOK_INTERVAL_S = 2.0
"""Minimum time in seconds between two evaluations."""


@dataclass(frozen=True, slots=True)
class PauseEvidence:
    """The reason for a pause of slashing."""

    failure: CorrelatedFailure
    """The failing check."""
    document: bytes
    """Canonical JSON of the finding, with the frauds behind it."""

    @property
    def hash(self) -> Hash32:
        """Keccak-256 of the document, which goes on chain."""
        return keccak(self.document)


@dataclass(eq=False, repr=False, kw_only=True)
class Breaker:
    """Decides when slashing must pause."""

    database: Database
    projection: Projection
    limits: BreakerRecipe
    folder: Path
    constants: Constants
    now: Callable[[], int]

    def __post_init__(self) -> None:
        self._folder = self.folder / EVIDENCE
        self.failure: CorrelatedFailure | None = None
        """Result of the last evaluation."""

    async def look(self) -> CorrelatedFailure | None:
        """Evaluate the window's outcomes, posted and handed in; return the failure that trips the
        breaker."""
        posted = list(self._posted())
        standing = [(each.record, self._stands(each)) for each in posted]
        fresh = Counter(r.worker_id for r, verdict in standing if verdict is Verdict.ACCEPTED)

        def accepted_before(worker_id: int) -> int:
            return self.projection.tally(worker_id).accepted - fresh[worker_id]

        outcomes = [*standing, *await self._waiting()]
        before = self.failure
        self.failure = correlated_failure(outcomes, self.limits, accepted_before)
        self._say(before)
        return self.failure

    def may_pause(self) -> bool:
        """Return whether the chain would accept a pause now."""
        last = self.projection.run.slashing_paused_until
        return last == 0 or self.now() >= last + self.constants.slash_cooldown_s

    async def evidence(self) -> PauseEvidence | None:
        """Return the evidence for a pause now, written to disk; None when no pause is necessary."""
        failure = self.failure
        if failure is None:
            return None
        found = PauseEvidence(failure, self._document(failure, await self._waiting()))
        with reporting_disk():
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / f"{hex0x(found.hash)}.json").write_bytes(found.document)
        return found

    def document(self, name: Hash32) -> bytes | None:
        """Return the evidence with a hash, if it is kept here."""
        path = self._folder / f"{hex0x(name)}.json"
        return path.read_bytes() if path.is_file() else None

    def _since(self) -> int:
        """Return the first second of the window."""
        return self.now() - self.limits.window_s

    def _is_new(self, batch: BatchView) -> bool:
        """Return whether a batch was committed after the last pause began, so that outcomes behind
        that pause are not counted again.
        """
        pauses = self.projection.run.pauses
        return not pauses or batch.committed_at > pauses[-1].began_at

    def _posted(self) -> Iterator[Judged]:
        return islice(self._all_posted(), MAX_LOOKED)

    def _all_posted(self) -> Iterator[Judged]:
        since, view = self._since(), self.projection.view
        committed_from = since - self.constants.outcome_deadline_s
        for batch in reversed(view.batches.values()):
            if batch.committed_at < committed_from or not self._is_new(batch):
                return
            if batch.run_id != self.projection.run_id or (batch.posted_at or 0) < since:
                continue
            for position, record in enumerate(batch.records or ()):
                yield Judged(batch.batch_id, position, record)

    def _stands(self, judged: Judged) -> Verdict:
        return self.projection.standing_verdict(judged)

    async def _waiting(self) -> list[StandingOutcome]:
        """Return what seated validators handed in for batches without posted outcomes."""
        since = self._since()
        waiting = [
            batch
            for batch in self.projection.unjudged
            if batch.committed_at >= since and self._is_new(batch)
        ]
        if not waiting:
            return []
        seated = set(self.projection.run.validators)
        rows = await outcomes_of(self.database, waiting[-MAX_WAITING:])
        packed = [row.records for row in rows if row.validator in seated]
        return [(record, record.verdict) for data in packed for record in _unpacked(data)]

    def _document(self, failure: CorrelatedFailure, waiting: list[StandingOutcome]) -> bytes:
        frauds = [
            [each.batch_id, each.position, each.record.worker_id, hex0x(each.record.file_hash)]
            for each in self._posted()
            if self._stands(each) is Verdict.FRAUD and each.record.worker_id in failure.failing
        ]
        unposted = sum(
            verdict is Verdict.FRAUD and record.worker_id in failure.failing
            for record, verdict in waiting
        )
        said = {
            "cause": PauseCause.CORRELATED_FAILURES.value,
            "run": self.projection.run_id,
            "check": failure.check,
            "reason": failure.reason.name,
            "share_ppm": round(failure.share * 1_000_000),
            "workers_failing": list(failure.failing),
            "workers_seen": failure.seen,
            "window": [self._since(), self.now()],
            "limits": json.loads(self.limits.model_dump_json()),
            "frauds_posted": frauds[:MAX_FRAUDS],
            # The log must not name the batches: validators that still judge them would learn
            # others' results.
            "frauds_handed_in": unposted,
        }
        return canonical_json(said)

    def _say(self, before: CorrelatedFailure | None) -> None:
        failure = self.failure
        if failure is not None and (before is None or before.check != failure.check):
            logger.error(
                "many workers fail the same check, so their slashes wait",
                extra={
                    "check": failure.check,
                    "reason": failure.reason.name,
                    "workers": len(failure.failing),
                    "share": round(failure.share, 3),
                    "hint": "check validators, verifiers and calibration before the pause ends",
                },
            )
        elif failure is None and before is not None:
            logger.warning("many workers no longer fail the same check")


def suspects(run: RunView, judged: Judged, posted_at: int, window_s: int) -> bool:
    """Return whether a pause concerns a fraud verdict: it overlapped the verdict's challenge
    window, and names the same check or none.
    """
    reason = int(judged.reason)
    return any(
        pause.meets(posted_at, posted_at + window_s)
        and (pause.reason == 0 or pause.reason // 10 == reason // 10)
        for pause in run.pauses
    )


def _unpacked(data: bytes) -> list[OutcomeRecord]:
    try:
        return unpack_records(data)
    except EncodingError:  # rows were checked on arrival; a damaged one must not stop the breaker
        return []
