"""Steps of a worker against silence: its work gets judged and paid even if others withhold it.

  look up    find its work on chain, and keep the proof: it may not be shown again
  submit     commit directly, with ticket and bond, work that the orchestrator did not commit
  split      split its submission off a batch that nobody judged
  summon     call judges of the network for it
  void       declare void what they did not see either, so that the bond is returned
  settle     close cases that it opened and nobody closed

File and proofs go into the rooms of relays, which are named as sources on chain. The next step
follows from the chain and the journal alone, so a killed worker can resume. At most one bond per
submission, and gas, are at risk; both belong to the node.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

from muster.api import BatchEntry
from muster.chain import BatchView, CaseView, Chain, Receipt, WorkerStatus
from muster.chain.structs import BatchStatus
from muster.client.chain_facts import ChainClock, Times
from muster.client.disputes.cases import eligible_jurors
from muster.client.disputes.claims import OVERTAKEN, close_case
from muster.client.disputes.unsettled import return_bond
from muster.client.outage import Steps, serve_forever
from muster.client.quantities import format_tokens
from muster.client.sources import Sources, named_sources
from muster.client.validator.batches import FILLS_NO_SLOT, is_misdeclared
from muster.client.worker.context import NodeContext
from muster.client.worker.deposits import Deposits
from muster.client.worker.elsewhere import LONGEST_ASK_S, LOOK_UP_S, Elsewhere
from muster.client.worker.journal import BatchPlace, SignedSubmission, Slot, slot_of
from muster.client.worker.outcomes import Judged
from muster.lifecycle import run_beside, uptime_s
from muster.protocol.eip712 import address_of, signer_of
from muster.protocol.encoding import hex0x
from muster.protocol.errors import ApiError, ConfigError
from muster.protocol.ids import Hash32
from muster.protocol.jury import summons_of
from muster.protocol.merkle import batch_proof, batch_root
from muster.protocol.messages import COMMIT_GRACE_S, Reason

logger = logging.getLogger(__name__)

PATIENCE_S = 15
"""Seconds after a ticket's deadline that the orchestrator gets to commit an upload."""
RETRY_S = 5.0
"""Minimum seconds between two tries of one step."""
KEEP_S = 600
"""Seconds after a challenge window during which accepted files are kept: the view of the chain may
be some blocks behind, and not show the last cases."""
ASK_S = 2.0
"""Shortest pause in seconds between two queries for a submission's batch."""
_OVERTAKEN = OVERTAKEN | {
    "CourtBondHeld",
    "CourtCaseExists",
    "CourtPhaseOpen",
    "LedgerBatchMismatch",
    "LedgerOutcomesPosted",
    "LedgerSlotUsed",
    "LedgerWrongTime",
}
"""Contract errors that mean it was done already, or the chain's clock differs from ours."""


class SilenceStep(StrEnum):
    """The next step of a worker for signed work."""

    SUBMIT = "submit directly"
    """Commit it without the orchestrator."""
    SPLIT = "split off"
    """Split it off a batch that nobody judged."""
    SUMMON = "summon judges"
    """Call judges of the network for it."""
    VOID = "void"
    """Declare it void: nobody judged it, and nobody can any more."""
    RETURN = "return the bond"
    """Get the bond back, because the work is judged or void."""
    SETTLE = "settle"
    """Close a case whose jury is out of time."""


def next_step(
    signed: SignedSubmission,
    batch: BatchView | None,
    case: CaseView | None,
    at: float,
    times: Times,
    *,
    is_refused: bool = False,
) -> SilenceStep | None:
    """Return the next step for signed work at chain time `at`, or None.

    `batch` is the one that holds it, `case` its call for judges; `is_refused` tells that the
    orchestrator refused the work.
    """
    deadline = signed.ticket.deadline
    if batch is None:
        wait_until = 0 if is_refused else deadline + PATIENCE_S
        return SilenceStep.SUBMIT if wait_until <= at < deadline + COMMIT_GRACE_S else None
    if batch.status is BatchStatus.JUDGED or batch.is_void or (case and not case.closed):
        return None
    due_at = batch.due_at(times.outcome_deadline_s)
    if at >= due_at + times.appeal_s:
        return SilenceStep.VOID if batch.work is not None else None
    if case or at < due_at:
        return None
    return SilenceStep.SPLIT if batch.work is None else SilenceStep.SUMMON


def prove_among(
    batch: BatchView, entries: Sequence[BatchEntry], signed: SignedSubmission
) -> BatchPlace | None:
    """Return the proof that a batch on chain holds a submission, computed from the content that a
    source shows; None if it does not.
    """
    leaves = [entry.submission.leaf() for entry in entries]
    leaf = signed.submission.leaf()
    if leaf not in leaves or len(leaves) != batch.count or batch_root(leaves) != batch.root:
        return None
    position = leaves.index(leaf)
    return BatchPlace(batch.name, position, tuple(batch_proof(leaves, position)))


# The acts


@dataclass(frozen=True, slots=True)
class _LastQuery:
    """The last query to the orchestrator about a submission."""

    newest: int
    """The run's newest batch at that time."""
    pause_s: float
    """Pause in seconds before the next query."""
    again_at: float
    """Clock time of the next query."""


class SilenceDuty:
    """One worker's recourse in one run."""

    def __init__(
        self,
        context: NodeContext,
        chain: Chain,
        open_rooms: Callable[[], Awaitable[Sources]],
        times: Times,
        named: Callable[[], Sequence[str]],
        *,
        clock: Callable[[], float] = uptime_s,
    ) -> None:
        """`chain` sends transactions and pays bonds, from the node's or the worker's own wallet;
        file and proofs are uploaded to what `open_rooms` returns each time, and the URLs that
        `named` returns are published on chain as sources.
        """
        self.context = context
        self.chain = chain
        self.times = times
        self.refused: dict[Slot, str] = {}
        """Work that the orchestrator refused, with its reason."""
        self.unsigned: set[Slot] = set()
        """Work in batches that are shown without its signature, while it can be submitted."""
        self.decided: dict[Slot, Judged] = {}
        """Outcomes of earlier copies of work that another batch holds."""
        self.accused: dict[Hash32, Judged] = {}
        """Verdicts of fraud until they are claimed or given up, by the name of their case."""
        self.claimed: dict[Hash32, Judged] = {}
        """Claimed work that rooms may not have yet, by the name of its case, which is open."""
        self.accepted: dict[Slot, Judged] = {}
        """Accepted work whose outcome may still change."""
        self._named = named
        self._clock = clock
        self._time = ChainClock(chain, clock)
        self._steps = Steps(clock, retry_s=RETRY_S, overtaken=_OVERTAKEN)
        self._asked: dict[Slot, _LastQuery] = {}
        self._returned = set[int]()
        self.elsewhere = Elsewhere(context, open_rooms, self._steps.report, clock)
        self.deposits = Deposits(context, open_rooms, self._steps.report, clock)

    @property
    def sources(self) -> list[str]:
        """URLs that are published on chain as sources of the work."""
        return named_sources(self._named())

    async def run(self) -> None:
        """Serve until cancelled."""
        pause_s = self.context.poll_s
        await run_beside(
            serve_forever(self.serve, pause_s), serve_forever(self.fill_rooms, pause_s)
        )

    @property
    def own_work(self) -> Mapping[Hash32, BatchView]:
        """The batches that the worker committed directly or split off, by leaf."""
        return self.context.view.own_work.get((self.context.run_id, self.context.worker), {})

    def batch_of(self, signed: SignedSubmission) -> BatchView | None:
        """Return the batch that holds a submission: its own before one that is proven to hold
        it.
        """
        if own := self.own_work.get(signed.submission.leaf()):
            return own
        proven = self.context.journal.proven(signed)
        batch = self.context.view.batches.get(proven.name.batch_id) if proven else None
        if proven is None or batch is None or batch.name != proven.name:
            return None  # after a reorganisation another batch may have the id
        reason = batch.records[proven.position].reason if batch.records else Reason.NONE
        return None if self.is_left_free(batch, reason) else batch

    def is_left_free(self, batch: BatchView, reason: Reason) -> bool:
        """Return whether an outcome in a batch leaves the slot to this worker: the whole batch was
        refused, or its committer showed validators another signature than this node's.
        """
        if reason is not Reason.BAD_SIGNATURE:
            return reason in FILLS_NO_SLOT
        member = self.context.view.member(self.context.run_id, self.context.worker)
        if member is None or batch.work is not None:
            return False  # the chain verified the signature of direct work
        before = batch.work_block - 1
        is_active = member.status_at(before) is WorkerStatus.ACTIVE
        return is_active and member.node_at(before) == address_of(self.context.key)

    def has_another(self, signed: SignedSubmission, batch: BatchView) -> bool:
        """Return whether another batch than this one decides about a submission: it held it before,
        and may still be judged, or is the worker's own.
        """
        held_in = self.batch_of(signed)
        if held_in is None or held_in.name == batch.name or held_in.is_void:
            return False
        return held_in.records is None or held_in.direct is not None

    def note_copy(self, judged: Judged) -> None:
        """Remember the outcome of another copy of work that is not judged yet."""
        held_in = self.batch_of(judged.signed)
        is_before = held_in is not None and judged.batch.first_id < held_in.first_id
        if is_before and judged.record.reason not in FILLS_NO_SLOT:
            self.decided[judged.signed.slot] = judged

    def is_held(self, signed: SignedSubmission) -> bool:
        """Return whether a batch on chain holds a submission, by a proof, its own commitment or a
        verdict.
        """
        return signed.slot in self._contested or self.batch_of(signed) is not None

    @property
    def _contested(self) -> set[Slot]:
        """Slots of work that is called fraud and may be, or is, disputed."""
        return {each.signed.slot for each in (*self.accused.values(), *self.claimed.values())}

    def is_done(self) -> bool:
        """Return whether it has no bonds, no cases and no claims to make left."""
        view, own = self.context.view, self.own_work.values()
        waits = any(not batch.is_void and batch.records is None for batch in own)
        has_cases = any(self._is_mine(case) for case in view.cases.values())
        return not (waits or self.accused or self.claimed or self.bonds() or has_cases)

    async def is_needed(self) -> bool:
        """Return whether it has bonds, cases or claims left, or work that may still be judged."""
        at = await self._time.now()
        judged_in_s = COMMIT_GRACE_S + self.times.longest_s
        return not self.is_done() or any(
            at < signed.ticket.deadline + judged_in_s for signed in self.context.unfinished.values()
        )

    @property
    def longest_s(self) -> int:
        """Seconds from a commitment until the last verdict of fraud about it can be disputed."""
        return self.times.longest_s + self.times.challenge_window_s

    async def until_done(self, may_work: Callable[[], bool]) -> None:
        """Wait until the worker may work again or nobody needs the duty any more, at most for the
        longest possible time.
        """
        ends_at = self._clock() + self.longest_s
        while self._clock() < ends_at and not may_work() and await self.is_needed():
            await asyncio.sleep(self.context.poll_s)

    async def serve(self) -> None:
        """Take all steps that are possible now."""
        context = self.context
        contested = self._contested
        waiting = [each for slot, each in context.unfinished.items() if slot not in contested]
        cases = [case for case in context.view.cases.values() if self._is_mine(case)]
        bonds = self.bonds()
        if not (waiting or cases or bonds or self.accepted):
            return
        if waiting:
            await self.elsewhere.look()
        await self._look_up_all(waiting)
        at = await self._time.now()
        for signed in waiting:
            await self._serve_work(signed, at)
        for case in cases:
            if at >= case.opened_at + self.times.court.jury_time:
                await self._steps.take(
                    case.case_id, SilenceStep.SETTLE, partial(self._settle, case)
                )
        for batch in bonds:
            await self._steps.take(batch.name, SilenceStep.RETURN, partial(self.return_bond, batch))
        for slot, judged in list(self.accepted.items()):
            if slot not in contested and self._is_final(judged, at):
                await asyncio.to_thread(context.journal.discard, judged.signed)
                self.accepted.pop(slot, None)

    async def _serve_work(self, signed: SignedSubmission, at: float) -> None:
        journal, slot = self.context.journal, signed.slot
        if slot not in self.context.unfinished:
            return  # dropped while others were served
        is_refused = slot in self.refused or slot in self.unsigned
        batch, step = self.next_of(signed, at, is_refused=is_refused)
        if batch is not None and batch.is_void:
            logger.warning("work is void, nobody judged it", extra=signed.fields)
            await asyncio.to_thread(journal.finish, signed, "VOID")
        elif step is not None:
            await self._steps.take(slot, step, partial(self.act, step, signed, batch))
        elif batch is None and slot in self.refused and self._is_late(signed, at):
            reason = self.refused.pop(slot)
            said = {**signed.fields, "reason": reason}
            logger.warning("work is given up: it is too late to submit it again", extra=said)
            await asyncio.to_thread(journal.finish, signed, reason)

    def _is_late(self, signed: SignedSubmission, at: float) -> bool:
        return at >= signed.ticket.deadline + COMMIT_GRACE_S

    def next_of(
        self, signed: SignedSubmission, at: float, *, is_refused: bool
    ) -> tuple[BatchView | None, SilenceStep | None]:
        """Return the batch that holds a submission, if known, and the next step."""
        batch = self.batch_of(signed)
        case = self.context.view.cases.get(summons_of(batch.batch_id)) if batch else None
        step = next_step(signed, batch, case, at, self.times, is_refused=is_refused)
        run = self.context.run
        is_held_back = step is SilenceStep.SUBMIT and (
            run.paused or run.closed_at or self._may_have_signed_another(signed)
        )
        is_lost = step in (SilenceStep.SPLIT, SilenceStep.SUMMON) and self._is_decided(signed)
        return batch, None if is_held_back or is_lost else step

    def _is_decided(self, signed: SignedSubmission) -> bool:
        """Return whether an earlier batch has an outcome of this work: judges would find that its
        slot is used, and its bond would be lost.
        """
        judged = self.decided.get(signed.slot)
        batch = self.context.view.batches.get(judged.batch.batch_id) if judged else None
        if judged is None or batch is None or batch.name != judged.batch.name or not batch.records:
            return False
        place = f"{batch.batch_id}:{judged.position}"
        self._steps.report(
            judged.case_id,
            "another batch has decided about this work: no judges are called",
            **signed.fields,
            hint=f"if that is wrong: muster dispute open {place} --keystore FILE",
        )
        return True

    def _may_have_signed_another(self, signed: SignedSubmission) -> bool:
        """Return whether this node may have signed other work for a submission's slot: such work is
        on chain, or the journal is no record of all that the node signed. Both submissions together
        prove a fraud, and a transaction shows this one to everybody.
        """
        lacking = self.elsewhere.lacking
        if lacking is not None:
            self._steps.report(
                self.context.run_id,
                "the journal lacks accepted work of this node: nothing is submitted directly",
                step=lacking.step,
                index=lacking.index,
                hint="put the newest --state-dir back and stop any other process with the node's "
                "key; if the folder is lost, muster node rotate makes another node",
            )
        is_incomplete = lacking is not None or self.context.held.fault is not None
        own = (batch.work.submission for batch in self.own_work.values() if batch.work)
        return is_incomplete or signed.slot in map(slot_of, own)

    async def act(
        self, step: SilenceStep, signed: SignedSubmission, batch: BatchView | None
    ) -> str:
        """Take a step for signed work and return the transaction; raises MusterError."""
        receipt = await self._perform(step, signed, batch)
        fields = {**signed.fields, "taken": step, "tx": receipt.tx_hash}
        logger.warning("the run is silent about work: took a step", extra=fields)
        return str(receipt.tx_hash)

    async def _perform(
        self, step: SilenceStep, signed: SignedSubmission, batch: BatchView | None
    ) -> Receipt:
        leaf = hex0x(signed.submission.leaf())
        if step is SilenceStep.SUBMIT:
            await self.provide_bond()
            self._require_kept(signed)
            chain = self.chain.once(f"submit {leaf} directly")
            return await chain.ledger.submit_direct(self.context.work(signed), self.sources)
        assert batch is not None  # next_step
        chain = self.chain.once(f"{step} {leaf} of batch {batch.batch_id}")
        if step is SilenceStep.VOID:
            return await chain.ledger.void_batch(batch.header())
        self.require_bench()
        if step is SilenceStep.SUMMON:
            return await chain.court.summon(batch.header(), signed.submission, self.sources)
        proven = self.context.journal.proven(signed)
        assert step is SilenceStep.SPLIT  # the only remaining step
        assert proven is not None  # the batch was found by its proof
        await self.provide_bond()
        # Each split changes the header. Those that the view waits to see confirmed count, too: else
        # only one in so many blocks would succeed. Header and height are of one state of the view.
        header, read_to = batch.header(), self.context.view.block_number or 0
        taken = await self.chain.units_split_off(batch.batch_id, after=read_to)
        header = replace(header, units=header.units - taken)
        work = self.context.work(signed)
        return await chain.ledger.split_off(
            header, work, proven.position, proven.proof, self.sources
        )

    def _require_kept(self, signed: SignedSubmission) -> None:
        """Raise ConfigError when a submission was dropped: its slot has another one, and both
        together prove a fraud. The same may be true of any other submission then."""
        if self.context.held.fault is not None:
            raise self.context.held.fault
        if signed.slot not in self.context.unfinished:
            raise ConfigError(f"the work for step {signed.ticket.step} was dropped meanwhile")

    async def provide_bond(self) -> None:
        """Approve the bond for the court; raises ConfigError when the account has too few
        tokens."""
        chain, bond_wei = self.chain, self.times.court.bond
        held = await chain.token.balance_of(chain.me)
        if held < bond_wei:
            raise ConfigError(
                f"the bond is {format_tokens(bond_wei)} tokens, {chain.me} holds "
                f"{format_tokens(held)}",
                hint=f"send tokens to {chain.me}, or use the worker's wallet: muster worker "
                "submit-direct --payer FILE",
            )
        await chain.allow("DisputeCourt", bond_wei)

    def require_bench(self) -> None:
        """Raise ConfigError when no juror could judge, so that the bond would be wasted."""
        context = self.context
        if not eligible_jurors(context.view, context.run, context.worker):
            raise ConfigError(
                "nobody of the network's bench could judge this run's work",
                hint="an account joins the bench with muster juror join; muster run show "
                "counts those that could judge",
            )

    # Finding the work on chain

    async def _look_up_all(self, waiting: Sequence[SignedSubmission]) -> None:
        """Query the batches of work whose place is unknown, for a few seconds only: an orchestrator
        that hangs must not delay the worker's direct submission.
        """
        try:
            async with asyncio.timeout(LOOK_UP_S):
                for signed in waiting:
                    if self.batch_of(signed) is None:
                        await self.look_up(signed)
        except TimeoutError:
            logger.debug("the orchestrator is too slow to say where work is")

    async def look_up(self, signed: SignedSubmission) -> None:
        """Query the batch in which the orchestrator committed a submission, and keep the proof."""
        context = self.context
        if context.api is None or not self._is_time_to_ask(signed):
            return
        try:
            state = await context.api.submission_state(signed.submission.file_hash)
            if state.batch_id is None:
                return
            batch = context.view.batches.get(state.batch_id)
            if batch is None or batch.run_id != context.run_id:
                return  # the orchestrator has read more of the chain than this node
            entries = (await context.api.batch(batch.batch_id)).submissions
        except ApiError as error:
            logger.debug("the orchestrator does not say", extra={"error": str(error)})
            return
        proven = prove_among(batch, entries, signed)
        if proven is None:
            self._steps.report(batch.name, "the orchestrator shows a batch that is not on chain")
            return
        if is_misdeclared(batch, [entry.submission for entry in entries]):
            # Such a batch will be refused as a whole, and fills no slot.
            held = sum(entry.submission.units for entry in entries)
            what = "a batch was committed to with fewer units than it holds: submitting by itself"
            self._steps.report(batch.name, what, declared=batch.units, holds=held)
            self.refused[signed.slot] = Reason.BATCH_MISDECLARED.name
            return
        if self._is_shown_signed(batch, entries[proven.position]):
            self.unsigned.discard(signed.slot)
        elif not self._is_late(signed, await self._time.now()):
            what = "a batch is shown without this node's signature: submitting by itself"
            self._steps.report(batch.name, what, **signed.fields)
            self.unsigned.add(signed.slot)
            return
        await asyncio.to_thread(context.journal.prove, signed, proven)

    def _is_shown_signed(self, batch: BatchView, entry: BatchEntry) -> bool:
        """Return whether work is shown with the signature of the node that served then."""
        context = self.context
        member = context.view.member(context.run_id, context.worker)
        signer = signer_of(context.domain, entry.submission, entry.signature)
        return member is not None and signer == member.node_at(batch.work_block - 1)

    def _is_time_to_ask(self, signed: SignedSubmission) -> bool:
        """Return whether to query a submission's batch now: soon after each new batch, then less
        and less often, since an orchestrator has many workers and may be a block behind.
        """
        now = self._clock()
        newest = self.context.view.newest_batch.get(self.context.run_id, 0)
        asked = self._asked.get(signed.slot)
        if asked is None or asked.newest != newest:
            pause_s = ASK_S
        elif now < asked.again_at:
            return False
        else:
            pause_s = min(2 * asked.pause_s, LONGEST_ASK_S)
        self._asked[signed.slot] = _LastQuery(newest, pause_s, now + pause_s)
        return True

    # Bonds and cases

    def _is_final(self, judged: Judged, at: float) -> bool:
        """Return whether the outcome of accepted work can change no more."""
        context = self.context
        batch = context.view.batches.get(judged.batch.batch_id)
        if batch is None or batch.name != judged.batch.name or batch.records is None:
            return False  # a reorganisation took it back
        if at < self.closes_at(batch) + KEEP_S:
            return False
        case = context.view.cases.get(judged.case_id)
        return case is None or case.closed

    def closes_at(self, batch: BatchView) -> int:
        """Return the chain time, in seconds, from which no case about a judged batch opens."""
        window_s = self.times.challenge_window_s
        return self.context.run.fraud_closes_at(batch.posted_at or 0, window_s)

    def _is_mine(self, case: CaseView) -> bool:
        if case.closed or case.run_id != self.context.run_id:
            return False
        return any(claim.claimant == self.chain.account for claim in case.claims)

    async def _settle(self, case: CaseView) -> None:
        named = f"settle case {case.number}, {hex0x(case.case_id)}"
        await close_case(self.chain.once(named), self.context.view, case)

    def bonds(self) -> list[BatchView]:
        """Return the worker's own batches that are judged or void and may still hold bonds."""
        own = self.own_work.values()
        over = (b for b in own if b.status is BatchStatus.JUDGED or b.is_void)
        return [batch for batch in over if batch.batch_id not in self._returned]

    async def return_bond(self, batch: BatchView) -> Receipt | None:
        """Get the bond of a finished batch back, and return the receipt; None if none is held."""
        receipt = await return_bond(self.chain, batch)
        if receipt is not None:
            logger.info("bond returned", extra={"batch_id": batch.batch_id})
        self._returned.add(batch.batch_id)
        return receipt

    # Rooms

    async def fill_rooms(self) -> None:
        """Offer file and proofs to every room until it has them, and again if it lost them: those
        of directly committed work until it is judged or void, those of claimed work until its case
        is closed.
        """
        context = self.context
        own = self.own_work
        for signed in context.unfinished.values():
            batch = own.get(signed.submission.leaf())
            if batch and not batch.is_void and batch.status is not BatchStatus.JUDGED:
                await self.deposits.offer(signed)
        for case_id, judged in list(self.claimed.items()):
            case = context.view.cases.get(case_id)
            if (case is not None and case.closed) or await self.deposits.offer(judged.signed):
                await asyncio.to_thread(context.journal.answer, judged.signed, case_id)
                del self.claimed[case_id]
        for case in filter(self._is_mine, list(context.view.cases.values())):
            for submission in {claim.submission for claim in case.claims}:
                work = context.journal.signed_in(slot_of(submission))
                if work is not None and work.submission == submission:
                    await self.deposits.offer(work)
