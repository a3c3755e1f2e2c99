"""The orchestrator's state derived from chain events: training progress, tallies, due work.

Pure and in memory. It is updated after every change of the chain view, and rebuilt from the view
after a reorg.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from muster.chain import BatchView, CaseView, ChainView, CheckpointView, Event, RunView, SlashView
from muster.chain.conversion import lenient_reason
from muster.chain.structs import BatchStatus
from muster.protocol.ids import Address, Hash32, PolicyVersion, RunId, Step
from muster.protocol.messages import OutcomeRecord, Reason, Submission, Ticket, Verdict
from muster.protocol.recipe import TrainingRecipe

NEWEST_BATCHES = 32
"""Number of newest judged batches that measure the speed of checking."""
Slot = tuple[Address, int, int]
"""Worker, rollout step and index: what one ticket is for."""


def slot_of(work: Submission) -> Slot:
    """Return the slot that a submission fills."""
    return work.worker, work.step, work.index


@dataclass(slots=True)
class VerdictTally:
    """Counts of one worker's submissions by verdict."""

    accepted: int = 0
    """Accepted submissions."""
    incomplete: int = 0
    """Incomplete submissions."""
    rejected: int = 0
    """Rejected submissions."""
    fraud: int = 0
    """Fraudulent submissions."""
    units: int = 0
    """Units of the accepted submissions."""
    reasons: Counter[Reason] = field(default_factory=Counter)
    """Reasons of the others, with counts."""

    def add(self, record: OutcomeRecord, verdict: Verdict, reason: Reason, count: int) -> None:
        """Count one outcome by its standing verdict and reason; a count of -1 removes it."""
        name = verdict.name.lower()
        setattr(self, name, getattr(self, name) + count)
        if verdict is Verdict.ACCEPTED:
            self.units += count * record.units
        else:
            self.reasons[reason] += count


@dataclass(frozen=True, slots=True)
class Judged:
    """A submission's outcome and its place on chain."""

    batch_id: int
    position: int
    """Its place in the batch."""
    record: OutcomeRecord

    @property
    def verdict(self) -> Verdict:
        """The recorded verdict, before any dispute."""
        return self.record.verdict

    @property
    def reason(self) -> Reason:
        """Why, when it is not Accepted."""
        return self.record.reason


@dataclass(slots=True)
class PostedSignatures:
    """One validator's signatures on chain, where each batch has those of a quorum only."""

    batches: int = 0
    """Batches whose posted outcomes carry its signature."""
    latest_at: int = 0
    """Chain time of the latest of them."""


@dataclass(slots=True)
class StreamProgress:
    """Progress of the training stream (docs/protocol.md section 9.8)."""

    step: Step = field(default=Step(1))
    """Training step whose submissions are being collected."""
    filled: int = 0
    """Accepted submissions of that step so far."""
    dropped: int = 0
    """Accepted records that are too old for their training step."""

    def add(self, version: PolicyVersion, training: TrainingRecipe, refill: int = 0) -> None:
        """Append one accepted record to the stream; `refill` is that of the step, see
        `note_figures`."""
        if not training.may_train_on(version, self.step):
            self.dropped += 1
            return
        self.filled += 1
        if self.filled >= training.submissions_per_step + refill:
            self.step, self.filled = Step(self.step + 1), 0


class Projection:
    """State of one run, derived from the chain view."""

    def __init__(self, view: ChainView, run_id: RunId, training: TrainingRecipe) -> None:
        self.view = view
        self.run_id = run_id
        self._training = training
        self.head = view.block_number or 0
        """The latest block that was read."""
        # The trainer's reports about its steps, which a reorg does not change.
        self._step_at: dict[int, Step] = {}
        self._refills: dict[Step, int] = {}
        self.rebuild()

    @property
    def run(self) -> RunView:
        """The run as the chain has it."""
        return self.view.runs[self.run_id]

    @property
    def checkpoint(self) -> CheckpointView | None:
        """The newest policy version."""
        version = self.run.latest_version
        return None if version is None else self.run.checkpoints[version]

    def is_anchored(self, ticket: Ticket) -> bool:
        """Return whether the chain has the block from which a ticket's seeds follow. It has not if
        a reorganisation removed that block, or if the ticket is of another chain.
        """
        checkpoint = self.run.checkpoints.get(ticket.policy_version)
        member = self.run.members.get(ticket.worker)
        if checkpoint is None or member is None:
            return False
        return member.beacon_under(checkpoint) == ticket.beacon

    @property
    def trained_submissions(self) -> int:
        """Accepted submissions that training steps use or will use, without refills."""
        progress = self.progress
        used = max(0, progress.filled - self._refills.get(progress.step, 0))
        return (progress.step - 1) * self._training.submissions_per_step + used

    @property
    def unjudged(self) -> list[BatchView]:
        """Committed batches that wait for their outcomes, ascending."""
        return [b for b in self.unsettled if b.status is BatchStatus.COMMITTED]

    def judged_units_per_s(self) -> float | None:
        """Return the highest speed of judging among the run's newest judged batches, in accepted
        units per second from commitment to outcomes; None when none was judged.
        """
        speeds = []
        for each in self._newest_judged:
            accepted = (r.units for r in each.records or () if r.verdict is Verdict.ACCEPTED)
            speeds.append(sum(accepted) / max(1, (each.posted_at or 0) - each.committed_at))
        return max(speeds, default=None)

    @property
    def unsettled(self) -> list[BatchView]:
        """Batches that are neither judged nor void, ascending; among them batches whose data a
        quorum declared withheld.
        """
        return [self.view.batches[i] for i in sorted(self._unsettled)]

    @property
    def slashes(self) -> list[SlashView]:
        """The slashes of stake for this run, in chain order."""
        return [slash for slash in self.view.slashes if slash.run_id == self.run_id]

    @property
    def batch_counts(self) -> tuple[int, int]:
        """Number of committed batches, and of those with outcomes."""
        judged = self._judged_batches
        return judged + len(self._unsettled), judged

    @property
    def verdict_counts(self) -> Mapping[Verdict, int]:
        """Number of submissions with an outcome, by standing verdict."""
        return {verdict: getattr(self.total, verdict.name.lower()) for verdict in Verdict}

    def paid_wei(self, worker: Address) -> int:
        """Return what a worker was paid by this run."""
        return self._paid[worker]

    def judged_with(self, verdict: Verdict) -> Sequence[Judged]:
        """Return the outcomes with this standing verdict, in the order in which it was reached."""
        return self._by_verdict.get(verdict, ())

    def refused_after(self, posted_after: int, *, besides: Container[Reason]) -> Counter[Address]:
        """Return the number of refused submissions by worker since a time, except for the reasons
        in `besides`."""
        found: Counter[Address] = Counter()
        for verdict in (Verdict.INCOMPLETE, Verdict.REJECTED):
            for judged in reversed(self.judged_with(verdict)):
                if (self.view.batches[judged.batch_id].posted_at or 0) <= posted_after:
                    break
                worker = self.view.worker_by_id.get(judged.record.worker_id)
                if worker is not None and judged.reason not in besides:
                    found[worker.address] += 1
        return found

    def judged_of(self, worker_id: int) -> Sequence[Judged]:
        """Return a worker's outcomes, in chain order."""
        return self._by_worker.get(worker_id, ())

    def standing_verdict(self, judged: Judged) -> Verdict:
        """Return the verdict that stands for an outcome, after disputes."""
        return self.standing(judged)[0]

    def standing(self, judged: Judged) -> tuple[Verdict, Reason]:
        """Return the verdict that stands for an outcome, after disputes, and its reason."""
        cases, place = self.view.cases, (judged.batch_id, judged.position)
        # Most networks have no case, and hashing a record takes time.
        case = cases.get(judged.record.leaf(*place)) if cases else None
        if case is None or not case.overturned:
            return judged.verdict, judged.reason
        # Jurors may vote for a reason that this version does not know.
        return Verdict(case.ruling >> 8), lenient_reason(case.ruling & 0xFF)

    def final_at(
        self, batch: BatchView | None, verdict: Verdict | None, challenge_s: int
    ) -> int | None:
        """Return the time when the challenge window ends; None before outcomes are posted."""
        if batch is None or batch.posted_at is None:
            return None
        if verdict is Verdict.FRAUD:
            return self.run.fraud_closes_at(batch.posted_at, challenge_s)
        return batch.posted_at + challenge_s

    @property
    def disputed(self) -> set[tuple[int, int]]:
        """Batch and position of every outcome with an open case."""
        cases = self.view.cases.values()
        return {(case.batch_id, case.position) for case in cases if not case.closed}

    def posted_units(self, worker_id: int, *, posted_after: int) -> int:
        """Return a worker's units with outcomes that can still be challenged, or are in a case.

        `posted_after` is the current time minus the challenge window; it must never decrease
        between calls.
        """
        while self._posted and (self._posted[0].posted_at or 0) <= posted_after:
            for record in self._posted.popleft().records or ():
                self._posted_units[record.worker_id] -= record.units
        return self._posted_units[worker_id] + sum(
            record.units for record in self._disputed(posted_after) if record.worker_id == worker_id
        )

    def _disputed(self, posted_after: int) -> Iterator[OutcomeRecord]:
        """Yield the outcomes with an open case whose challenge window is over."""
        for case in self.view.cases.values():
            batch = None if case.closed else self.batch(case.batch_id)
            if batch is None or batch.records is None or (batch.posted_at or 0) > posted_after:
                continue
            yield batch.records[case.position]

    def tally(self, worker_id: int) -> VerdictTally:
        """Return the tally of a worker's submissions."""
        found = self._tallies.get(worker_id)
        # Not `get` with a default: rankings call this for every worker, and most have a tally.
        return VerdictTally() if found is None else found

    def judged(self, slot: Slot, file_hash: Hash32) -> Judged | None:
        """Return a submission's outcome, if it has one.

        The file alone does not name the submission: any worker can sign another's file hash. The
        first outcome counts, unless it is about a misdeclared batch: that one used no slots, and
        its work is judged again.
        """
        member = self.run.members.get(slot[0])
        if member is None:
            return None
        own = (member.worker_id, *slot[1:])
        found = [
            each
            for each in self.naming(file_hash)
            if (each.record.worker_id, each.record.step, each.record.index) == own
        ]
        counted = (each for each in found if each.reason is not Reason.BATCH_MISDECLARED)
        return next(counted, found[-1] if found else None)

    def naming(self, file_hash: Hash32) -> tuple[Judged, ...]:
        """Return the outcomes that name a file, of any worker, in chain order."""
        return self._judged.get(file_hash, ())

    def slot_used(self, worker_id: int, step: int, index: int) -> bool:
        """Return whether a worker's slot has an outcome."""
        return (worker_id, step, index) in self._slots

    def batch_with_root(self, root: Hash32) -> BatchView | None:
        """Return the first batch of the run that was committed with this root."""
        batch_id = self._batch_of_root.get(root)
        return None if batch_id is None else self.view.batches[batch_id]

    def first_of_newest(self, count: int) -> int:
        """Return the smallest id of the run's `count` newest batches and of its unsettled ones; 0
        while it has none. Ids are of all runs: they do not tell how many batches lie between."""
        newest = islice(reversed(self._batch_of_root.values()), count)
        return min(chain(newest, self._unsettled), default=0)

    def batch(self, batch_id: int) -> BatchView | None:
        """Return a batch of this run."""
        batch = self.view.batches.get(batch_id)
        return batch if batch is not None and batch.run_id == self.run_id else None

    def apply(self, events: Iterable[Event]) -> None:
        """Apply events that the view has applied."""
        for event in events:
            if event.name in ("BatchCommitted", "DirectlySubmitted"):
                self._add_batch(self.batch(event.args["batch_id"]))
            elif event.name == "OutcomesPosted":
                self._add_outcomes(self.batch(event.args["batch_id"]))
            elif event.name == "RewardClaimed" and event.args["run_id"] == self.run_id:
                self._paid[event.args["worker"]] += event.args["amount"]
            elif event.name == "CaseClosed":
                self._close_case(self.view.cases.get(event.args["case_id"]))
            elif event.name == "BatchVoided":
                self._unsettled.discard(event.args["batch_id"])
        self._follow_stream()

    def note_figures(self, step: int, figures: Mapping[str, float]) -> None:
        """Read from the trainer's figures of a step where in the stream it began, how many records
        beyond its share it consumes (`refill`), and, once it ended, where the next step begins.
        """
        before = dict(self._step_at), dict(self._refills)
        if "stream_from" in figures:
            self._step_at[int(figures["stream_from"])] = Step(step)
        if "stream_to" in figures:
            self._step_at[int(figures["stream_to"])] = Step(step + 1)
        if "refill" in figures:
            self._refills[Step(step)] = int(figures["refill"])
        if before != (self._step_at, self._refills):
            self.progress, self._streamed = StreamProgress(), 0
            self._follow_stream()

    def _follow_stream(self) -> None:
        stream, progress = self.run.stream, self.progress
        for position in range(self._streamed, len(stream)):
            version = stream[position].record.policy_version
            progress.add(version, self._training, self._refills.get(progress.step, 0))
            begun = self._step_at.get(position + 1)
            if begun is not None:
                progress.step, progress.filled = begun, 0
        self._streamed = len(stream)

    def rebuild(self) -> None:
        """Derive everything again from the view: at the start, and after a reorg."""
        self.progress = StreamProgress()
        """Progress of the training stream."""
        self.total = VerdictTally()
        """Counts of all workers' submissions by verdict."""
        self.frauds = list[tuple[int, int]]()
        """Batch id and position of every fraud outcome, in chain order."""
        self.signed = dict[Address, PostedSignatures]()
        """The validators' signatures of posted outcomes."""
        self._tallies = dict[int, VerdictTally]()
        self._judged = dict[Hash32, tuple[Judged, ...]]()
        self._slots = set[tuple[int, int, int]]()
        self._unsettled = set[int]()
        self._batch_of_root = dict[Hash32, int]()
        self._judged_batches = self._streamed = 0
        self._by_verdict = defaultdict[Verdict, list[Judged]](list)
        self._by_worker = defaultdict[int, list[Judged]](list)
        self._paid = Counter[Address]()
        self._posted = deque[BatchView]()
        self._newest_judged = deque[BatchView](maxlen=NEWEST_BATCHES)
        self._posted_units = Counter[int]()
        batches = [b for b in self.view.batches.values() if b.run_id == self.run_id]
        for batch in batches:
            self._add_batch(batch)
            if batch.records is not None:
                self._add_outcomes(batch)
        for case in self.view.cases.values():
            self._close_case(case)
        for payment in self.view.payments:
            if payment.run_id == self.run_id:
                self._paid[payment.worker] += payment.amount_wei
        self._follow_stream()

    def _add_batch(self, batch: BatchView | None) -> None:
        if batch is None or batch.batch_id in self._unsettled:
            return
        # Void batches too: their submissions are not committed again.
        self._batch_of_root.setdefault(batch.root, batch.batch_id)
        if not batch.is_void:
            self._unsettled.add(batch.batch_id)

    def _add_outcomes(self, batch: BatchView | None) -> None:
        if batch is None or batch.batch_id not in self._unsettled:
            return
        self._unsettled.discard(batch.batch_id)
        self._judged_batches += 1
        self._posted.append(batch)
        self._newest_judged.append(batch)
        self._note_signers(batch)
        for position, record in enumerate(batch.records or ()):
            self._add_outcome(batch.batch_id, position, record)

    def _note_signers(self, batch: BatchView) -> None:
        for validator in batch.signed_by(self.run.seats):
            signed = self.signed.setdefault(validator, PostedSignatures())
            signed.batches += 1
            signed.latest_at = max(signed.latest_at, batch.posted_at or 0)

    def _add_outcome(self, batch_id: int, position: int, record: OutcomeRecord) -> None:
        judged = Judged(batch_id, position, record)
        self._judged[record.file_hash] = (*self._judged.get(record.file_hash, ()), judged)
        self._slots.add((record.worker_id, record.step, record.index))
        self._posted_units[record.worker_id] += record.units
        self._by_worker[record.worker_id].append(judged)
        self._count(judged, record.verdict, record.reason)
        if record.verdict is Verdict.FRAUD:
            self.frauds.append((batch_id, position))

    def _count(self, judged: Judged, verdict: Verdict, reason: Reason, count: int = 1) -> None:
        record = judged.record
        tally = self._tallies.setdefault(record.worker_id, VerdictTally())
        for each in (self.total, tally):
            each.add(record, verdict, reason, count)
        listed = self._by_verdict[verdict]
        if count > 0:
            listed.append(judged)
        else:
            listed.remove(judged)

    def _close_case(self, case: CaseView | None) -> None:
        """Move an outcome that a jury overturned to its new standing verdict.

        The ruling of a summons replaces no outcome: it is the batch's first.
        """
        if case is None or case.is_summons or not case.overturned:
            return
        batch = self.batch(case.batch_id)
        if batch is None or batch.records is None:
            return
        record = batch.records[case.position]
        judged = Judged(case.batch_id, case.position, record)
        self._count(judged, record.verdict, record.reason, -1)
        self._count(judged, *self.standing(judged))
