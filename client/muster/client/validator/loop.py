"""The validator, from a committed batch to signed outcomes. Its part of a rollout's way:

 6. submit     workers upload, the orchestrator commits the root of a batch on chain
 7. validate   HERE  fetch the batch and its files, run the checks in order, sign the outcomes
 8. record     HERE  hand the signature over; the orchestrator posts it with the others' on chain,
                     or else muster.client.validator.calls does
11. dispute    jurors of the network judge again, see muster.client.juror

Batches come from the chain, in order; the orchestrator only delivers the content of their roots.
The batches that this validator must judge are drawn, see muster.client.validator.calls. A batch is
judged as a whole and signed once: the outcomes are durable before the signature exists. The loop
waits for an unavailable file, policy or orchestrator, without harm to any worker; only a file that
the orchestrator does not have for long counts as missing.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import replace

from muster.chain import BatchView, Event, RunView
from muster.client.chain_facts import OutcomePlace, is_over, settled_at
from muster.client.outage import SURVIVED, Outages
from muster.client.quantities import format_time
from muster.client.validator.batches import (
    BATCH_PATIENCE_S,
    BatchReader,
    is_misdeclared,
    slots_of_records,
)
from muster.client.validator.calls import ASK_S, CallDuty
from muster.client.validator.checking_proofs import Checked, CheckingDuty, Fingerprints
from muster.client.validator.checks import ClaimedWork, FailedCheck
from muster.client.validator.context import ValidatorContext
from muster.client.validator.examiner import Examiner
from muster.client.validator.judging import MISDECLARED, Judgement, outcome_record
from muster.client.validator.records import JudgedBatch
from muster.client.validator.soundness import (
    BEFORE_ACCUSING_S,
    CHECK_EVERY_S,
    Flaw,
    Soundness,
    fault_of_machine,
    fictitious_ticket,
)
from muster.protocol.eip712 import address_of
from muster.protocol.errors import (
    ApiError,
    ChainError,
    ConfigError,
    PolicyBroken,
    PolicyUnavailable,
    ValidatorDisturbed,
)
from muster.protocol.ids import Address, BatchName, Hash32, PolicyVersion
from muster.protocol.messages import OutcomeRecord, Reason, Verdict

logger = logging.getLogger(__name__)

REPOST_S = 10.0
"""Seconds after which signed outcomes that are not on chain are handed over again."""
_REFUSALS = frozenset({404, 409, 422})
"""HTTP statuses that mean outcomes are not accepted."""
_NOT_READ_YET = "batch_unknown"
"""Error code of an orchestrator that has read less of the chain than this validator."""


def require_seat(run: RunView, validator: Address) -> None:
    """Raise ConfigError when a run does not list a validator."""
    if validator not in run.validators:
        raise ConfigError(
            f"{validator} is not a validator of run {run.run_id}",
            hint="the run's owner must invite the account; then run muster validator join "
            f"--run {run.run_id}",
        )


class ValidatorLoop:
    """One validator of one run."""

    def __init__(self, context: ValidatorContext) -> None:
        self.context = context
        self._address = address_of(context.key)
        self._failing_since: dict[object, float] = {}
        self.reader = BatchReader(context, self._failing_since)
        self.duty = CallDuty(context)
        self._woken = asyncio.Event()
        self.examiner = Examiner(context, self._failing_since, self._woken.set)
        self.checking = None if context.checked is None else CheckingDuty(context, context.checked)
        """Proves that this validator recomputes what it judges."""
        self.outages = Outages()
        self.soundness: Soundness | None = None
        """Decides whether it may sign; None skips this check."""
        self._passed_over: set[int] = set()
        self._handed_over: dict[BatchName, float] = {}
        self._compared: set[tuple[BatchName, Hash32 | None]] = set()
        self._unfinished: dict[BatchName, list[OutcomeRecord]] = {}
        self.fingerprints: dict[BatchName, list[Fingerprints]] = {}
        """Recomputations of batches in progress, by id and root."""
        self._has_said_over = False

    async def run(self) -> None:
        """Judge batches until the run is over and nothing can be disputed any more, or until
        cancelled; raises ConfigError when it has no seat in the run.
        """
        try:
            while not await self.has_ended():
                self._woken.clear()
                require_seat(self.context.run, self._address)
                pause = await self._round()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._woken.wait()
            logger.info("run complete", extra={"run_id": self.context.run_id})
        finally:
            self.examiner.close()
            if self.context.other_sources is not None:
                self.context.other_sources.close()

    async def has_ended(self) -> bool:
        """Return whether this run can need no validator any more; logs how long it still may."""
        context = self.context
        run, steps = context.run, context.rules.recipe.training.steps
        if context.keep_going or not is_over(run, steps):
            return False
        windows = context.windows
        ends_at = settled_at(
            context.view,
            context.run_id,
            outcome_deadline_s=windows.outcome_deadline_s,
            challenge_window_s=windows.challenge_window_s,
        )
        if not self._has_said_over:
            self._has_said_over = True
            until = "disputes are decided" if ends_at is None else format_time(ends_at)
            logger.info("run over, staying for challenges", extra={"at_least_until": until})
        try:
            return ends_at is not None and await context.now() >= ends_at
        except ChainError:
            return False

    async def on_change(self, _events: list[Event]) -> None:
        """Note new events of the chain."""
        self._woken.set()

    async def _round(self) -> float:
        """Judge every due batch; return the seconds to wait before the next round."""
        self._compare_posted()
        try:
            due, may_come = await self.duty.due()
            for batch in due:
                await self._judge_or_pass_over(batch)
            for batch in await self.duty.reaudits():
                await self._judge_or_pass_over(batch)
        except SURVIVED as error:
            if isinstance(error, ApiError) and error.code == _NOT_READ_YET:
                logger.debug("the orchestrator is behind", extra={"error": str(error)})
                return self.context.poll_s
            await asyncio.sleep(self.outages.failed(error))
            return 0.0
        self.outages.recovered()
        return max(self.context.poll_s, ASK_S if may_come else REPOST_S / 2)

    async def _judge_or_pass_over(self, batch: BatchView) -> None:
        """Judge and hand over a batch. A batch that has failed for long no longer blocks the
        others. A directly committed one never does, because its worker may have made it fail, nor
        one whose policy is not at hand, because that of another may be.
        """
        try:
            await self.validate(batch)
        except SURVIVED as error:
            since = self._failing_since.setdefault(batch.batch_id, self.context.clock())
            has_policy = not isinstance(error, PolicyUnavailable)
            is_new = self.context.clock() - since < BATCH_PATIENCE_S
            if has_policy and batch.work is None and is_new:
                raise
            level = logging.DEBUG if batch.batch_id in self._passed_over else logging.WARNING
            self._passed_over.add(batch.batch_id)
            extra = {"batch_id": batch.batch_id, "error": str(error)}
            extra |= {"hint": hint} if (hint := getattr(error, "hint", None)) else {}
            logger.log(level, "batch passed over, trying again later", extra=extra)
        else:
            self._failing_since.pop(batch.batch_id, None)

    # 7. validate

    async def validate(self, batch: BatchView) -> None:
        """Judge a batch unless it was judged before, and hand its outcomes over.

        Raises ValidatorDisturbed, and signs nothing, while the validator fails its own items.
        """
        await self._require_sound(CHECK_EVERY_S, batch)
        judged = self.context.journal.judged(batch.name)
        if judged is None:
            records = await self.judge(batch)
            if any(map(_accuses, records)):
                await self._require_sound(BEFORE_ACCUSING_S, batch)
            await self._remember(batch)
            mine = JudgedBatch(batch.name, tuple(records))
            judged = await asyncio.to_thread(self.context.journal.record, mine)
        await self.hand_over(judged)

    async def judge(self, batch: BatchView) -> list[OutcomeRecord]:
        """Return the outcome of every submission of a batch, in batch order."""
        entries = await self.reader.contents(batch)
        await self.reader.refresh(before=batch.batch_id)
        refused = is_misdeclared(batch, [entry.submission for entry in entries])
        # These records are kept while a file or policy is awaited in the middle of a batch.
        records = self._unfinished.setdefault(batch.name, [])
        if not records:
            # Those of a complete judgement may be left that was not signed.
            self.fingerprints[batch.name] = []
        for position, entry in enumerate(entries[len(records) :], len(records)):
            claim = self.reader.claim(batch, entry, slots_of_records(records))
            judgement, data = (MISDECLARED, None) if refused else await self.judge_claim(claim)
            place, conducts = OutcomePlace(batch.batch_id, position), self.context.conducts
            if conducts is not None and not refused:
                # A copy, because it changes while a thread reads it; a reorganisation of the chain
                # may have taken this batch back, or given its id to another.
                known = {**self.context.view.batches, batch.batch_id: batch}
                judgement = await asyncio.to_thread(
                    conducts.judge, place, claim.worker_id, judgement, known
                )
            record = outcome_record(claim, judgement)
            await asyncio.to_thread(self.context.evidence.write, place, claim, data, judgement)
            records.append(record)
            self.fingerprints[batch.name].append(judgement.fingerprints)
            _log(place, record, judgement)
        return self._unfinished.pop(batch.name)

    async def _require_sound(self, within_s: float, batch: BatchView) -> None:
        """Raise ValidatorDisturbed unless the validator passes its own items."""
        if self.soundness is None:
            return
        try:
            await self.soundness.require(within_s, batch)
        except ValidatorDisturbed:
            # Findings from the time of the disturbance are discarded.
            self._unfinished.clear()
            self.fingerprints.clear()
            raise

    async def find_flaw(self, batch: BatchView) -> Flaw | None:
        """Return the first known-good item that this validator would not accept, or None; `batch`
        is the one that it is about to judge.
        """
        while (version := await self._version_to_test(batch)) is not None:
            ticket = fictitious_ticket(self.context.run, self._address, version)
            try:
                finding = await self.examiner.judge_own(ticket)
            except PolicyBroken:
                continue  # it says nothing about this machine: another version is tested
            if finding is not None:
                return Flaw("generated", version, finding)
            return await self._flaw_of_accepted(version)
        return None

    async def _version_to_test(self, batch: BatchView) -> PolicyVersion | None:
        """Return the loaded policy version, or else one that the batch needs, or else the newest;
        None when all are broken.

        A newer version may be unavailable or unusable, which must not delay the batch, and a
        reorganisation of the chain may have taken the loaded one back.
        """
        known, broken = self.context.run.checkpoints, self.examiner.broken
        usable = {v for v, each in known.items() if each.manifest_root not in broken}
        loaded = self.examiner.version
        if loaded in usable:
            return loaded
        entries = await self.reader.contents(batch)
        named = (entry.submission.policy_version for entry in entries)
        return next((version for version in named if version in usable), max(usable, default=None))

    async def _flaw_of_accepted(self, version: PolicyVersion) -> Flaw | None:
        """Judge again the newest submission that this validator accepted under a policy version."""
        for judged in reversed(self.context.journal.all()):
            batch = self.context.view.batches.get(judged.name.batch_id)
            if batch is None or batch.name != judged.name:
                continue
            for position, record in enumerate(judged.records):
                if record.verdict is Verdict.ACCEPTED and record.policy_version == version:
                    finding = await self._judge_accepted(batch, position)
                    what = f"accepted: batch {batch.batch_id}, position {position}"
                    return None if finding is None else Flaw(what, version, finding)
        return None

    async def _judge_accepted(self, batch: BatchView, position: int) -> FailedCheck | None:
        try:
            entries = await self.reader.contents(batch)
            claim = self.reader.claim(batch, entries[position], ())
            free = replace(claim, is_slot_used=False)
            judgement, data = await self.examiner.judge(free, proofs_first=True)
        except ApiError:
            return None  # not available (now): rely on the other item, which has passed
        return None if data is None else fault_of_machine(judgement.finding)

    async def _remember(self, batch: BatchView) -> None:
        """Store the recomputation of a batch, before its outcomes are signed."""
        found = self.fingerprints.pop(batch.name, [])
        if self.checking is not None:
            await self.checking.record(Checked(batch.name, tuple(found)))

    async def judge_claim(self, claim: ClaimedWork) -> tuple[Judgement, bytes | None]:
        """Return the judgement on a claim, and its file if it was read."""
        return await self.examiner.judge(claim)

    # 8. record

    async def hand_over(self, judged: JudgedBatch) -> None:
        """Sign a batch's outcomes and hand them to the orchestrator, repeatedly if they get
        lost."""
        now, name = self.context.clock(), judged.name
        if now - self._handed_over.get(name, -REPOST_S) < REPOST_S:
            return
        message = judged.message()
        signature = self.context.sign(message)
        if self.checking is not None:
            await self.checking.commit(judged.name, judged.packed())
        try:
            await self.context.api.post_outcomes(name.batch_id, judged.packed(), signature)
        except ApiError as error:
            if error.status not in _REFUSALS:
                raise
            # Repeating it at once is pointless, and must not delay other batches.
            fields = {"batch_id": name.batch_id, "code": error.code, "error": str(error)}
            logger.warning("outcomes refused", extra=fields)
        self._handed_over[name] = now

    def _compare_posted(self) -> None:
        """Log an error, once, for each posted outcome that differs from this validator's."""
        posted = {(batch.name, batch.records_hash): batch for batch in self.duty.recent()}
        self._compared &= posted.keys()
        for named, batch in posted.items():
            judged = self.context.journal.judged(batch.name)
            if judged is not None and batch.records and named not in self._compared:
                self._compared.add(named)
                _compare(batch.batch_id, batch.records, judged.records)


def _accuses(record: OutcomeRecord) -> bool:
    return record.verdict is Verdict.FRAUD or record.reason is Reason.SAMPLER_DRIFT


def _compare(
    batch_id: int, posted: Sequence[OutcomeRecord], judged: Sequence[OutcomeRecord]
) -> None:
    for position, (theirs, ours) in enumerate(zip(posted, judged, strict=False)):
        # Validators may have measured different parts of a worker's history.
        is_about_history = Reason.SAMPLER_DRIFT in (theirs.reason, ours.reason)
        if theirs != ours and not is_about_history:
            logger.error(
                "posted outcome differs from this validator's; a verdict that is wrong can be "
                "challenged: muster dispute open BATCH:POSITION",
                extra={
                    "batch_id": batch_id,
                    "position": position,
                    "posted": theirs.verdict.name,
                    "found": ours.verdict.name,
                    "reason": ours.reason.name,
                },
            )


def _log(place: tuple[int, int], record: OutcomeRecord, judgement: Judgement) -> None:
    fields = {"batch_id": place[0], "position": place[1], "worker_id": record.worker_id}
    fields |= {"step": record.step, "index": record.index}
    if record.verdict is Verdict.ACCEPTED:
        logger.info("submission accepted", extra=fields)
        return
    detail = judgement.finding.detail if judgement.finding else ""
    logger.warning(
        "submission not accepted",
        extra={
            **fields,
            "verdict": record.verdict.name,
            "reason": record.reason.name,
            "detail": detail,
        },
    )
