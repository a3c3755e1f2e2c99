"""The breaker: watches whether many independent workers fail one check, and pauses slashing then.

Outcomes count from when validators hand them in, before they are posted, so that a pause can come
before the first stake is taken. The pause itself is on chain, bounded, with the evidence's hash.
This module decides when to call it, and keeps the evidence for anybody. When the failures end,
slashing goes on by itself.
"""

from __future__ import annotations

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
from muster.orchestrator.ports import Constants
from muster.orchestrator.projection import Judged, Projection
from muster.protocol.encoding import canonical_json, hex0x, keccak
from muster.protocol.errors import EncodingError
from muster.protocol.ids import Hash32
from muster.protocol.messages import OutcomeRecord, Reason, Verdict, unpack_records
from muster.protocol.recipe import BreakerRecipe

# Correlated failures: so many independent workers fail one check that the check, not they, is the
# likelier cause.
#
# Pure: outcomes in, a finding or None out. Attackers come alone or as a crowd of one owner's
# wallets; a wrong calibration, a broken verifier or a disturbed validator hits everybody. So
# wallets are counted, not submissions: each counts once, by the share of its outcomes that failed,
# and one that has proven little counts for a fraction. Only frauds count as failures: they alone
# cost stake, so an attacker who trips the breaker by failing pays a slash for every wallet.

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


logger = logging.getLogger(__name__)

StandingOutcome = tuple[OutcomeRecord, Verdict]
"""An outcome and the verdict that stands for it."""
EVIDENCE = "evidence"
"""The folder, in the files folder."""
MAX_FRAUDS = 10_000
"""Frauds that the evidence of a pause lists."""
MAX_LOOKED = 20_000
"""Most outcomes of the window that one look reads, the newest: a look must stay cheap."""
MAX_WAITING = 500
"""Batches without outcomes that one look takes in, the newest."""
LOOK_INTERVAL_S = 2.0
"""Least time between two looks."""


@dataclass(frozen=True, slots=True)
class PauseEvidence:
    """Why slashing is to be paused."""

    failure: CorrelatedFailure
    """What was found."""
    document: bytes
    """Canonical JSON that says so, with every fraud that it rests on."""

    @property
    def hash(self) -> Hash32:
        """Keccak-256 of the document, which goes on chain."""
        return keccak(self.document)


@dataclass(eq=False, repr=False, kw_only=True)
class Breaker:
    """Says when slashing must pause."""

    database: Database
    projection: Projection
    limits: BreakerRecipe
    folder: Path
    constants: Constants
    now: Callable[[], int]

    def __post_init__(self) -> None:
        self._folder = self.folder / EVIDENCE
        self.failure: CorrelatedFailure | None = None
        """What the last look found."""

    async def look(self) -> CorrelatedFailure | None:
        """Look at the window's outcomes, posted and handed in; return what trips the breaker."""
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
        """Return whether the chain would take a pause now."""
        last = self.projection.run.slashing_paused_until
        return last == 0 or self.now() >= last + self.constants.slash_cooldown_s

    async def evidence(self) -> PauseEvidence | None:
        """Return what a pause now would rest on, kept on disk; None when nothing calls for one."""
        failure = self.failure
        if failure is None:
            return None
        found = PauseEvidence(failure, self._document(failure, await self._waiting()))
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
        """Return whether a batch was committed since the last pause began: what led to that pause,
        or was on its way then, is not counted again.
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
        """Return what seated validators handed in about batches that have no outcomes yet."""
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
            # Not which: validators that have yet to judge them would know what the others found.
            "frauds_handed_in": unposted,
        }
        return canonical_json(said)

    def _say(self, before: CorrelatedFailure | None) -> None:
        failure = self.failure
        if failure is not None and (before is None or before.check != failure.check):
            logger.error(
                "many workers fail one check, their slashes wait",
                extra={
                    "check": failure.check,
                    "reason": failure.reason.name,
                    "workers": len(failure.failing),
                    "share": round(failure.share, 3),
                    "hint": "look at validators, verifiers, calibration before it ends",
                },
            )
        elif failure is None and before is not None:
            logger.warning("no check is failed by many workers any more")


def suspects(run: RunView, judged: Judged, posted_at: int, window_s: int) -> bool:
    """Return whether a pause is about a fraud verdict: it met its challenge window, and names its
    check or none.
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
    except EncodingError:  # what is kept was checked; a damaged row must not stop the breaker
        return []
