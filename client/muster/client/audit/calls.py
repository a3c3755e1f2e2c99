"""Checks that validators were called before they signed (docs/protocol.md, section 9.5). Pure.

The order of a batch's validators follows from the hash of the block that committed it. Later
validators are called because earlier ones are silent or object. Objections happen off chain, so the
chain alone never rules one out. It gives only *grounds*, with a note where a ground rests on
something that the chain does not show. A copy of the evidence with the signed outcomes of all
signers shows objections too: then a signature that nothing explains is a contradiction.

The check gives signers the benefit of the doubt. It assumes that validators without a signature on
chain were called as early as possible, stayed silent as long as possible, and were absent if that
is possible. `check_statements` reads the outcomes that validators handed in. An orchestrator keeps
them all beside the files, also the outvoted ones. Each is signed, so any copy will do.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING

from muster.chain import BatchView
from muster.client.audit.contradictions import (
    MAX_LISTED,
    Check,
    Contradiction,
    Kind,
    at_outcomes,
    summarise,
)
from muster.client.audit.evidence import EvidenceFolders
from muster.client.audit.ledger import Ledger
from muster.client.audit.outcome_table import OutcomeTable, tabulate
from muster.protocol.encoding import keccak
from muster.protocol.ids import Address, Hash32, RunId
from muster.protocol.messages import Verdict
from muster.protocol.schedule import (
    STAGE_TIMEOUTS,
    SignedOutcomes,
    Stage,
    Timing,
    order_of_batch,
    plan_calls,
    size_of,
    timeout_of,
)

if TYPE_CHECKING:
    from muster.client.audit.history import ChainHistory

LEAST_TIMEOUT_S = 1
"""Shortest wait of an orchestrator: the chain's clock counts whole seconds."""
OBJECTION = Hash32(bytes(32))
"""Stands for any outcomes that differ from those on chain: no records hash to it."""

Statements = Mapping[int, Mapping[Address, Hash32]]
"""Hash of the records that each validator signed, by batch, as far as a copy has them."""


class SigningGround(StrEnum):
    """Possible reason why a batch's outcomes were signed by these validators."""

    FIRST = "signed by those drawn first"
    CALLED = "by others, who may have been called by an alarm on chain or after the longest silence"
    LATE = "by anybody, shortly before they were due"
    IMPATIENT = "by others, if silent ones were replaced before the longest timeout"
    OBJECTED = "by others, if somebody objected off chain"

    @property
    def is_shown(self) -> bool:
        """Whether the chain alone shows that they can have been called."""
        return self not in (SigningGround.IMPATIENT, SigningGround.OBJECTED)


@dataclass(frozen=True, slots=True)
class Posting:
    """Posted outcomes, as the schedule sees them."""

    batch: BatchView
    """The judged batch."""
    order: tuple[Address, ...]
    """The batch's validators, in the order in which they are called."""
    signers: frozenset[Address]
    """The validators that signed."""
    quorum: int
    """Number of required signatures."""
    timing: Timing
    """The batch's times, with the longest timeout."""
    is_alarm: bool
    """Whether an outcome is not Accepted: then more validators than the quorum are called."""

    @property
    def posted_at(self) -> int:
        """Chain time of the outcomes."""
        return self.batch.posted_at or 0

    @property
    def is_late(self) -> bool:
        """Whether the last call had come, from which any quorum's outcomes are posted."""
        return self.posted_at >= self.timing.last_call_at


class RunCalls:
    """The calls of one run, as far as the chain shows them."""

    def __init__(self, view: Ledger, run_id: RunId, deadline_s: int) -> None:
        self._view, self._run, self._deadline_s = view, view.runs[run_id], deadline_s
        self._longest_s = timeout_of(deadline_s)
        self._silences: dict[int, list[tuple[int, int]]] = {}

    def posting(self, batch: BatchView, *, is_alarm: bool) -> Posting:
        """Return a judged batch as the schedule sees it; an alarm is any verdict but Accepted."""
        signers = frozenset(batch.signed_by(self._run.seats))
        terms = self._view.terms_of(batch)
        return Posting(
            batch=batch,
            order=order_of_batch(batch.seed, batch.seated, batch.validators),
            signers=signers & set(batch.validators),
            quorum=max(terms.quorum if terms else 1, len(signers)),
            timing=Timing(batch.committed_at, self._deadline_s, self._longest_s),
            is_alarm=is_alarm,
        )

    def ground(self, posting: Posting) -> SigningGround:
        """Return the strongest ground that the chain alone gives."""
        if posting.signers <= set(posting.order[: posting.quorum]):
            return SigningGround.FIRST
        if posting.is_late:
            return SigningGround.LATE
        if posting.signers <= self.called(posting, self._longest_s, is_alarm=posting.is_alarm):
            return SigningGround.CALLED
        if posting.signers <= self.called(posting, LEAST_TIMEOUT_S, is_alarm=posting.is_alarm):
            return SigningGround.IMPATIENT
        return SigningGround.OBJECTED

    def called(
        self,
        posting: Posting,
        timeout_s: int,
        *,
        is_alarm: bool,
        spoken: Mapping[Address, Hash32] | None = None,
    ) -> set[Address]:
        """Return all validators that can have been called when the outcomes were posted.

        Validators in `spoken` count as having handed in these outcomes at the commitment, which may
        call everybody. Without `spoken`, nobody handed in any.
        """
        at, order = posting.batch.committed_at, posting.order
        timing = replace(posting.timing, timeout_s=min(timeout_s, self._longest_s))
        if spoken is None:
            # The last one in the order objects: its silence would call nobody anyway.
            said = [SignedOutcomes(order[-1], OBJECTION, accepts=False, at=at)] if is_alarm else []
        else:
            said = [SignedOutcomes(who, of, not is_alarm, at) for who, of in sorted(spoken.items())]
        absent = self._absentees(posting, timing.timeout_s)
        now = posting.posted_at
        return set(
            plan_calls(
                order, posting.quorum, timing, now, said, absent=absent, is_hasty=True
            ).called
        )

    # Absence: a validator missed the timeout of an earlier call, and did not sign since

    def _absentees(self, posting: Posting, timeout_s: int) -> set[Address]:
        """Return the validators that can have counted as absent before the outcomes were posted."""
        silences = self._silences_of(timeout_s)
        newest = bisect_right(silences, (posting.posted_at, 1 << 64)) - 1
        if newest >= 0 and silences[newest][1] == posting.batch.batch_id:
            newest -= 1
        if newest < 0:
            return set()
        since, committed_at = silences[newest][0], posting.batch.committed_at
        # The signers are not absent: they had signed before the posting.
        others = (who for who in posting.order if who not in posting.signers)
        return {who for who in others if self._heard.latest(who, committed_at) < since}

    def _silences_of(self, timeout_s: int) -> list[tuple[int, int]]:
        """Return when the first calls of each batch timed out, ascending, with the batch. Batches
        whose outcomes were posted earlier are left out.
        """
        if timeout_s not in self._silences:
            self._silences[timeout_s] = sorted(
                (batch.committed_at + timeout_s, batch.batch_id)
                for batch in self._batches()
                if batch.posted_at is None or batch.posted_at >= batch.committed_at + timeout_s
            )
        return self._silences[timeout_s]

    @cached_property
    def _heard(self) -> _Heard:
        return _Heard(self._run.seats, self._batches())

    def _batches(self) -> Iterator[BatchView]:
        run_id = self._run.run_id
        return (batch for batch in self._view.batches.values() if batch.run_id == run_id)


class _Heard:
    """The latest proven activity of each validator: it signed after a batch's commitment."""

    def __init__(self, seats: Mapping[Address, int], batches: Iterator[BatchView]) -> None:
        self._posted: dict[Address, list[int]] = defaultdict(list)
        self._latest: dict[Address, list[int]] = defaultdict(list)
        for batch in sorted(batches, key=lambda each: each.posted_at or 0):
            for who in batch.signed_by(seats) if batch.posted_at is not None else ():
                before = self._latest[who][-1:] or [0]
                self._posted[who].append(batch.posted_at or 0)
                self._latest[who].append(max(before[0], batch.committed_at))

    def latest(self, who: Address, at: int) -> int:
        """Return the latest time of a validator's activity known at `at`; 0 for none."""
        place = bisect_right(self._posted[who], at) - 1
        return self._latest[who][place] if place >= 0 else 0


# One batch, and all of them


def drawn_first(
    view: Ledger, batch: BatchView, deadline_s: int
) -> tuple[list[Address], SigningGround]:
    """Return the validators drawn first for a judged batch, and the ground of its signers."""
    book = RunCalls(view, batch.run_id, deadline_s)
    is_alarm = any(record.verdict is not Verdict.ACCEPTED for record in batch.records or ())
    posting = book.posting(batch, is_alarm=is_alarm)
    return list(posting.order[: posting.quorum]), book.ground(posting)


def signed_by_the_called(view: Ledger, table: OutcomeTable, deadline_s: int) -> Check:
    """Return the grounds of all signers. The check never contradicts: see the module."""
    name = "outcomes can be those of validators that were called"
    grounds: Counter[SigningGround] = Counter()
    notes: list[str] = []
    for book, posting in _postings(view, table, deadline_s):
        ground = book.ground(posting)
        grounds[ground] += 1
        if not ground.is_shown and len(notes) < MAX_LISTED:
            notes.append(f"batch {posting.batch.batch_id}: {_words(posting)}: {ground}")
    counts = ", ".join(f"{grounds[ground]} {ground}" for ground in SigningGround if grounds[ground])
    return summarise(name, [], counts or "no outcomes", notes=notes)


def check_statements(
    history: ChainHistory, run_id: RunId, store: EvidenceFolders, timeout_s: int | None
) -> Iterator[Check]:
    """Yield the checks that a copy's outcomes are signed, and that signers on chain were called.

    Yields nothing when the copy has no outcomes. `timeout_s` is the orchestrator's stated timeout
    for a validator.
    """
    found: list[Contradiction] = []
    statements: dict[int, dict[Address, Hash32]] = {}
    for batch in history.ledger.batches.values():
        if batch.run_id == run_id and batch.records:
            statements[batch.batch_id] = {}
            for kept in store.outcomes(batch, found):
                if kept.is_signed(history.domain):
                    statements[batch.batch_id][kept.validator] = keccak(kept.records)
                else:
                    what = f"{kept.validator} did not sign the outcomes kept as its own"
                    found.append(at_outcomes(batch, Kind.EVIDENCE_ALTERED, what))
    count = sum(map(len, statements.values()))
    if not count and not found:
        return
    name = "the outcomes that were kept are their validators'"
    yield summarise(name, found, f"{count} signatures recovered")
    yield borne_out_by_statements(
        history.ledger,
        tabulate(history.ledger, only=statements),
        history.observed.parameters.outcome_deadline_s,
        statements,
        timeout_s=timeout_s or LEAST_TIMEOUT_S,
    )


def borne_out_by_statements(
    view: Ledger,
    table: OutcomeTable,
    deadline_s: int,
    statements: Statements,
    *,
    timeout_s: int = LEAST_TIMEOUT_S,
) -> Check:
    """Return whether the outcomes that validators handed in called the signers on chain.

    Only batches with the statements of all their signers are checked. `timeout_s` is the
    orchestrator's stated timeout: the default, the least, lets silence excuse more than it should.
    """
    name = "outcomes have the word of the validators that the schedule called"
    found: list[Contradiction] = []
    count = 0
    for book, posting in _postings(view, table, deadline_s):
        known = {
            who: said
            for who, said in statements.get(posting.batch.batch_id, {}).items()
            if who in posting.order
        }
        if posting.signers <= set(known) and not posting.is_late:
            count += 1
            found += _of_statements(book, posting, known, timeout_s)
    return summarise(name, found, f"{count} of {len(table.batches)} batches have their statements")


def _of_statements(
    book: RunCalls, posting: Posting, known: Mapping[Address, Hash32], timeout_s: int
) -> Iterator[Contradiction]:
    posted = posting.batch.records_hash
    objections = [who for who, said in known.items() if said != posted]
    is_alarm = posting.is_alarm or bool(objections)
    called = book.called(posting, timeout_s, is_alarm=is_alarm)
    called |= book.called(posting, timeout_s, is_alarm=is_alarm, spoken=known)
    if uncalled := sorted(posting.signers - called):
        what = f"signed by {', '.join(uncalled)}, not called in {_waited(posting)}"
        yield at_outcomes(posting.batch, Kind.OUTCOME_UNCALLED, f"{what}; {_objected(objections)}")
    # Only for an alarm on chain: an objection to accepted work may have come after the posting.
    if posting.is_alarm and not _is_settled(posting, known, timeout_s):
        agreeing = len([who for who in called if known.get(who) == posted])
        needed = _majority(posting)
        if agreeing < needed:
            what = f"only {agreeing} called validators signed these outcomes, {needed} are needed"
            yield at_outcomes(posting.batch, Kind.OUTCOME_MINORITY, what)


def _majority(posting: Posting) -> int:
    """Return how many called validators must agree after an alarm."""
    escalated = size_of(Stage.ESCALATED, posting.quorum, len(posting.order))
    return max(posting.quorum, escalated // 2 + 1)


def _is_settled(posting: Posting, known: Collection[Address], timeout_s: int) -> bool:
    """Return whether the largest group may decide: all handed in, or the last stage is over."""
    waited = posting.posted_at - posting.batch.committed_at
    # The last of three stages begins after two.
    return waited >= 2 * STAGE_TIMEOUTS * timeout_s or set(known) >= set(posting.order)


def _postings(
    view: Ledger, table: OutcomeTable, deadline_s: int
) -> Iterator[tuple[RunCalls, Posting]]:
    """Yield the posted outcomes of existing runs that validators with seats signed.

    Outcomes that the network's jurors decided have no signers and are left out.
    """
    books: dict[RunId, RunCalls] = {}
    for batch, records_N in table.slices():
        if batch.run_id in view.runs and batch.validators and batch.signers:
            if batch.run_id not in books:
                books[batch.run_id] = RunCalls(view, batch.run_id, deadline_s)
            book = books[batch.run_id]
            is_alarm = bool((records_N["verdict"] != Verdict.ACCEPTED).any())
            yield book, book.posting(batch, is_alarm=is_alarm)


def _words(posting: Posting) -> str:
    """Return a sentence about the validators that signed out of turn or were passed over."""
    first = posting.order[: posting.quorum]
    others = ", ".join(sorted(posting.signers - set(first)))
    passed = ", ".join(who for who in first if who not in posting.signers)
    return f"signed by {others} {_waited(posting)} after its commitment, drawn was {passed}"


def _waited(posting: Posting) -> str:
    return f"{posting.posted_at - posting.batch.committed_at} s"


def _objected(objections: Sequence[Address]) -> str:
    return f"{', '.join(sorted(objections))} objected" if objections else "nobody objected"
