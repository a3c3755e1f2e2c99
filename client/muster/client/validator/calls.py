"""What a validator owes each batch: to judge it when called, and to speak up when it is kept back.

`CallDuty` says which batches it must judge now, and which again. The order of validators and the
age of a batch follow from the chain. Silence and disagreement happen off chain: the orchestrator
reports them by the number of validators that it calls. It can call more, never fewer: a validator
that is called by the batch's age judges, whatever the orchestrator says, and stays called.

`ShowingDuty` acts on chain when the orchestrator withholds outcomes. `muster validator run` does
both; there is no command for either.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING

from muster.chain.doubles import (
    WITHHELD,
    DoubleOutcome,
    Misrecord,
    SignedRecords,
    SignedWork,
    find_misrecords,
    is_record_of,
)
from muster.chain.structs import BatchStatus
from muster.client.chain_facts import ChainClock
from muster.client.outage import Steps, serve_forever
from muster.client.preflight import coins_of
from muster.client.quantities import format_coins
from muster.protocol.eip712 import Domain, address_of, signer_of
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.errors import ApiError, ContractRevert, EncodingError
from muster.protocol.ids import Address, BatchName, Hash32, RunId
from muster.protocol.messages import OutcomeRecord, Outcomes, Verdict, unpack_records
from muster.protocol.schedule import (
    Timing,
    batch_seed,
    called_by_age,
    draw_order,
    is_reaudited,
    order_of_batch,
    timeout_of,
)

if TYPE_CHECKING:
    from muster.api import BatchEntry
    from muster.chain import BatchView, Chain, ChainView, RunView, StreamItem
    from muster.client.validator.context import ValidatorContext

logger = logging.getLogger(__name__)

ASK_S = 1.0
"""Minimum seconds between two requests to the orchestrator about calls."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Time windows on chain."""

    outcome_deadline_s: int
    """Seconds after a commitment by which outcomes are due."""
    challenge_window_s: int
    """Seconds after outcomes during which they may be challenged."""

    @property
    def whole_s(self) -> int:
        """Sum of both."""
        return self.outcome_deadline_s + self.challenge_window_s


def recent_batches(view: ChainView, run_id: RunId, whole_s: int) -> list[BatchView]:
    """Return a run's batches that may need work, oldest first.

    The search stops at batches that were over when the newest one was committed, since a run has
    many. A batch split off an older one has a late id and an early time, so it does not stop the
    search.
    """
    batches = view.batches
    if not batches:
        return []
    over_at = next(reversed(batches.values())).committed_at - whole_s
    newest_first = takewhile(
        lambda b: b.committed_at > over_at or b.split_from is not None, reversed(batches.values())
    )
    mine = (b for b in newest_first if b.run_id == run_id)
    return sorted(mine, key=lambda batch: batch.batch_id)


def order_of(batch: BatchView, run: RunView) -> tuple[Address, ...]:
    """Return the order in which a run's validators are called for a batch."""
    return order_of_batch(batch.seed, batch.seated, run.validators)


class CallDuty:
    """One validator's calls in one run."""

    def __init__(self, context: ValidatorContext) -> None:
        self.context = context
        self.me = address_of(context.key)
        self._called = set[BatchName]()
        self._asked_at = float("-inf")
        self._forgot_until: int | None = None
        """Time on chain until which it may have signed outcomes that its journal lacks."""
        self._stream: Sequence[StreamItem] = ()
        self._read = 0
        """Items of the run's stream that were looked at."""
        self._drawn: list[tuple[BatchView, Hash32]] = []
        """Accepted batches among these that are checked once more, with their seeds."""

    async def due(self) -> tuple[list[BatchView], bool]:
        """Return the batches to judge or hand over now, oldest first, and whether this validator
        may be called for more later.
        """
        await self._look_back()
        waiting = self._waiting()
        if not waiting:
            self._called.clear()
            return [], False
        now = await self.context.now()
        open_batches = [b for b in waiting if now < self._timing(b).due_at]
        self._called |= {b.name for b in open_batches if self._is_called(b, now)}
        uncalled = [b for b in open_batches if b.name not in self._called]
        if self.context.checks_everything:
            mine = [b for b in open_batches if b.name in self._called]
            return mine + uncalled, False
        if uncalled and self.context.clock() >= self._asked_at + ASK_S:
            self._called |= await self._ask(uncalled)
        mine = [b for b in open_batches if b.name in self._called]
        return mine, len(mine) < len(open_batches)

    def _waiting(self) -> list[BatchView]:
        """Return the run's batches whose outcomes may be due, oldest first."""
        return [
            b for b in self.recent() if b.status is BatchStatus.COMMITTED and self._may_judge(b)
        ]

    def recent(self) -> list[BatchView]:
        """Return the run's batches that are judged now or may be challenged, oldest first."""
        return recent_batches(self.context.view, self.context.run_id, self.context.windows.whole_s)

    async def _look_back(self) -> None:
        """Compare the chain with the journal, which may be lost, or from an old backup."""
        if self._forgot_until is not None:
            return
        lacking = next((b for b in self.recent() if self._has_forgotten(b)), None)
        if lacking is None:
            return
        self._forgot_until = await self.context.now()
        logger.error(
            "the journal lacks outcomes that this validator signed: what was committed until now "
            "is left to others",
            extra={
                "batch_id": lacking.batch_id,
                "hint": "put the newest --state-dir back and stop any other process with this key; "
                "two different outcomes of a batch cost all stake (docs/guides/services.md)",
            },
        )

    def _has_forgotten(self, batch: BatchView) -> bool:
        """Return whether its outcomes of a batch are on chain and not in its journal."""
        is_posted = batch.records and self.me in batch.signed_by(self.context.run.seats)
        is_shown = any(self.me in who for hashed, who in batch.shown.items() if hashed != WITHHELD)
        is_mine = is_shown or (is_posted and self.me in batch.seated)
        return bool(is_mine) and self.context.journal.judged(batch.name) is None

    def _may_judge(self, batch: BatchView) -> bool:
        """Return whether no outcome can have been signed that the journal lacks."""
        return (
            self._forgot_until is None
            or batch.committed_at > self._forgot_until
            or self.context.journal.judged(batch.name) is not None
        )

    def _timing(self, batch: BatchView) -> Timing:
        deadline_s = self.context.windows.outcome_deadline_s
        return Timing(batch.committed_at, deadline_s, timeout_of(deadline_s))

    def _is_called(self, batch: BatchView, now: int) -> bool:
        # A judged batch is handed over repeatedly until its outcomes are posted.
        if self.context.journal.judged(batch.name) is not None or batch.name in self._called:
            return True
        order, quorum = order_of(batch, self.context.run), self.context.run.quorum_of(batch)
        return self.me in called_by_age(order, quorum, self._timing(batch), now)

    async def _ask(self, uncalled: list[BatchView]) -> set[BatchName]:
        """Return those batches for which the orchestrator calls this validator."""
        self._asked_at = self.context.clock()
        try:
            called = await self.context.api.called(after=uncalled[0].batch_id - 1)
        except ApiError as error:
            # Without an answer, the batch's age calls this validator in the end.
            logger.debug("no answer about who is called", extra={"error": str(error)})
            return set()
        return {
            batch.name
            for batch in uncalled
            if self.me in order_of(batch, self.context.run)[: called.get(batch.batch_id, 0)]
        }

    async def reaudits(self) -> list[BatchView]:
        """Return the accepted batches that this validator checks again, oldest first."""
        self._draw()
        found = [b for b, seed in self._drawn if self._is_mine_to_reaudit(b, seed)]
        if not found:
            return []
        now = await self.context.now()
        open_now = (b for b in found if now < self._challenged_until(b) and self._may_judge(b))
        return sorted(open_now, key=lambda batch: batch.batch_id)

    def _draw(self) -> None:
        """Draw among the outcomes that were posted since the last call, and forget batches that
        nobody can challenge any more.
        """
        stream, batches = self.context.run.stream, self.context.view.batches
        if stream is not self._stream:
            # A view that is rewound has another stream.
            self._stream, self._read, self._drawn = stream, 0, []
        if self._read == len(stream):
            return
        now = batches[stream[-1].batch_id].posted_at or 0
        new = {item.batch_id: batches[item.batch_id] for item in stream[self._read :]}
        self._read = len(stream)
        recent = (batch for batch in new.values() if now < self._challenged_until(batch))
        still = [each for each in self._drawn if now < self._challenged_until(each[0])]
        self._drawn = [*still, *drawn_to_reaudit(recent)]

    def _is_mine_to_reaudit(self, batch: BatchView, seed: Hash32) -> bool:
        if self.context.journal.judged(batch.name) is not None:
            return False
        signers = batch.signed_by(self.context.run.seats)
        fresh = [v for v in self.context.run.validators if v not in signers]
        return draw_order(seed, fresh)[:1] == (self.me,)

    def _challenged_until(self, batch: BatchView) -> int:
        return (batch.posted_at or 0) + self.context.windows.challenge_window_s


def drawn_to_reaudit(batches: Iterable[BatchView]) -> Iterator[tuple[BatchView, Hash32]]:
    """Yield the accepted batches that are checked once more, each with its seed."""
    for batch in batches:
        is_accepted = all(r.verdict is Verdict.ACCEPTED for r in batch.records or ())
        if is_accepted and batch.posted_beacon is not None:
            seed = batch_seed(batch.posted_beacon, batch.run_id, batch.batch_id, batch.root)
            if is_reaudited(seed):
                yield batch, seed


# Steps of a validator on chain when the orchestrator withholds its outcomes.
#
#   show       publish its own outcomes, so that others see them
#   withheld   declare a batch's data unavailable: its workers need not wait for the deadline
#   post       post a quorum's outcomes that were shown but not posted
#   report     prove that a validator signed two different outcomes of one batch
#
# Each step begins at a share of the outcome deadline; an honest orchestrator has posted long
# before. Validators post one after the other in drawn order, so that only one pays the gas.

SHOW_AT = 0.60
"""Share of the deadline from which a validator shows its own outcomes on chain."""
WITHHELD_AT = 0.75
"""Share from which a batch with unavailable data is declared withheld."""
POST_AT = 0.80
"""Share from which the first validator in order posts a quorum's shown outcomes."""
NEXT_POSTS = 0.02
"""Share that each validator waits longer than the one before it in order."""
LAST_POST_AT = 0.94
"""Share from which every validator posts."""
GAS_SHARE = 0.1
"""Share of its coin that a validator spends at most on these steps in one outcome deadline: junk
that an orchestrator commits and never posts must not empty its account. The post of a batch that it
has shown is always made."""
COMMITTED_SHARE, JUNK_SHARE = 0.5, 0.25
"""Parts of this share for what the orchestrator commits, which costs it nothing until outcomes are
posted, and for batches of which no outcome pays or slashes anybody. The rest is for direct batches,
each of which has a bond.
"""
RETRY_S = 5.0
"""Minimum seconds between two tries of one step."""
COMPARE_S = 5.0
"""Most seconds to wait for a batch's content before its records are shown or posted."""
UNCOMPARED_S = 60.0
"""Seconds after such a wait in vain for which nothing is waited for: others must be shown, too."""
_OVERTAKEN = frozenset(
    {
        "LedgerOutcomesPosted",
        "LedgerWrongTime",
        "LedgerBatchMismatch",
        "VaultOffenceSettled",
        "FaultNoEquivocation",
        "FaultNoMisrecord",
    }
)
"""Contract errors that mean somebody else was first, or it is too late."""

Contents = Callable[["BatchView"], Awaitable[list["BatchEntry"]]]
"""Returns the content of a batch; raises ApiError when no source has it."""


# Pure functions on chain data


def shown_by(batch: BatchView, domain: Domain) -> dict[Hash32, dict[Address, bytes]]:
    """Return the valid signatures on chain for a batch and its root, by hash of the records: shown
    ones, and those of the posted outcomes.
    """
    found = {hashed: dict(signed) for hashed, signed in batch.shown.items()}
    if batch.records_hash is not None:
        message = Outcomes(batch.batch_id, batch.root, batch.records_hash)
        posted = found.setdefault(batch.records_hash, {})
        for signature in batch.signatures:
            if (signer := signer_of(domain, message, signature)) is not None:
                posted[signer] = signature
    held = {}
    for hashed, signed in found.items():
        message = Outcomes(batch.batch_id, batch.root, hashed)
        # A signature shown after the outcomes were posted is for another root.
        held[hashed] = {
            who: each for who, each in signed.items() if signer_of(domain, message, each) == who
        }
    return held


def doubles_of(batch: BatchView, domain: Domain) -> Iterator[DoubleOutcome]:
    """Yield proofs that a validator signed two different outcomes; a withheld statement does not
    count."""
    by_validator: dict[Address, list[SignedRecords]] = {}
    for hashed, signed in sorted(shown_by(batch, domain).items()):
        for who, signature in signed.items():
            if hashed != WITHHELD:
                by_validator.setdefault(who, []).append(SignedRecords(hashed, signature))
    for who, statements in by_validator.items():
        for first, second in list(pairwise(statements))[:1]:
            yield DoubleOutcome(who, batch, first, second)


def postable(batch: BatchView, run: RunView, domain: Domain) -> tuple[bytes, bytes] | None:
    """Return the records and joined signatures of the largest quorum that showed the same outcomes;
    None if there is no quorum.
    """
    quorum = run.quorum_of(batch)
    best: tuple[int, bytes, bytes] | None = None
    for hashed, signed in sorted(shown_by(batch, domain).items()):
        records = b"" if hashed == WITHHELD else batch.shown_records.get(hashed)
        seated = {who: each for who, each in signed.items() if who in run.validators}
        if records is None or len(seated) < quorum or (best and best[0] >= len(seated)):
            continue
        # The ledger requires signers in ascending order.
        joined = b"".join(seated[who] for who in sorted(seated, key=lambda who: int(who, 16)))
        best = (len(seated), records, joined)
    return None if best is None else best[1:]


def posts_at(batch: BatchView, run: RunView, validator: Address) -> float:
    """Return the share of the deadline from which a validator posts a quorum's shown outcomes."""
    order = order_of(batch, run)
    place = order.index(validator) if validator in order else len(order)
    return min(POST_AT + place * NEXT_POSTS, LAST_POST_AT)


def worth_of(records: Iterable[OutcomeRecord]) -> int:
    """Return the units that records pay, and 1 for each fraud; 0 for junk."""
    return sum(
        record.units if record.verdict is Verdict.ACCEPTED else record.verdict is Verdict.FRAUD
        for record in records
    )


def _worth_of_packed(packed: bytes) -> int:
    try:
        return worth_of(unpack_records(packed))
    except EncodingError:
        return 0  # withheld, or another validator showed what is no records


# The duty


class ShowingDuty:
    """One validator's steps in one run against an orchestrator that withholds outcomes."""

    def __init__(self, context: ValidatorContext, chain: Chain, contents: Contents) -> None:
        """`chain` signs with the validator's key."""
        self.context = context
        self.chain = chain
        self.me = address_of(context.key)
        self._contents = contents
        self._compared: set[BatchName] = set()
        """Batches whose posted records were compared with what they hold."""
        self._budget_began = float("-inf")
        """Clock time at which the present budget began."""
        self._spent = 0
        """Coin that transactions have cost since then."""
        self._failed_posts: set[BatchName] = set()
        """Batches whose post was reverted on the chain, which costs gas."""
        self._uncompared_until = float("-inf")
        """Before this clock time nothing is compared."""
        self._time = ChainClock(chain, context.clock)
        self._steps = Steps(context.clock, retry_s=RETRY_S, overtaken=_OVERTAKEN)

    async def run(self) -> None:
        """Serve until cancelled."""
        await serve_forever(self.serve, max(self.context.poll_s, 0.2))

    async def serve(self) -> None:
        """Take all steps that are possible now."""
        context, windows = self.context, self.context.windows
        run = context.run
        batches = recent_batches(context.view, context.run_id, windows.whole_s)
        for batch in batches:
            if len(batch.shown) > 1 or (batch.shown and batch.records_hash is not None):
                await self._report_doubles(batch)
            if self._is_contested(batch):
                await self._try(
                    batch,
                    "comparing records with what was committed",
                    partial(self._compare, batch),
                )
        waiting = [b for b in batches if b.status is BatchStatus.COMMITTED and not b.is_void]
        if not waiting or self.me not in run.validators:
            return
        at = await self._time.now()
        # What pays most comes first, in case that the gas budget does not suffice for all.
        for batch in sorted(waiting, key=self._worth, reverse=True):
            share = (at - batch.committed_at) / windows.outcome_deadline_s
            if share < 1:
                await self._serve_batch(batch, run, share)

    def _worth(self, batch: BatchView) -> int:
        judged = self.context.journal.judged(batch.name)
        return 0 if judged is None else worth_of(judged.records)

    async def _affords(self, batch: BatchView, records: bytes) -> bool:
        """Return whether the gas budget allows another transaction about these records."""
        now, held = self.context.clock(), await coins_of(self.chain, self.me)
        window_s = self.context.windows.outcome_deadline_s
        if now - self._budget_began >= window_s:
            self._budget_began, self._spent = now, 0
        part, what = 1.0, "no outcomes are shown"
        if not _worth_of_packed(records):
            part, what = JUNK_SHARE, "junk is not shown"
        elif batch.work is None:
            part, what = COMMITTED_SHARE, "only direct batches are shown"
        budget = GAS_SHARE * part * (held + self._spent)
        if self._spent < budget:
            return True
        self._steps.report(
            ("gas budget", self._budget_began, part),
            f"gas budget is spent: {what} for now",
            batch_id=batch.batch_id,
            spent=format_coins(self._spent),
            budget=format_coins(int(budget)),
            holds=format_coins(held),
            renewed_in_s=int(self._budget_began + window_s - now),
            hint=f"send {self.me} more of the chain's coin, which raises the budget; if the run's "
            f"orchestrator posts nothing, leave the seat: muster validator leave --run "
            f"{batch.run_id}",
        )
        return False

    async def _serve_batch(self, batch: BatchView, run: RunView, share: float) -> None:
        judged = self.context.journal.judged(batch.name)
        if judged is not None and share >= SHOW_AT:
            records = judged.packed()
            await self._try(
                batch, "showing own outcomes", partial(self._show, batch, keccak(records), records)
            )
        elif judged is None and share >= WITHHELD_AT and batch.work is None:
            await self._try(
                batch, "calling the batch withheld", partial(self._call_withheld, batch)
            )
        if share >= posts_at(batch, run, self.me):
            found = postable(batch, run, self.context.domain)
            if found is not None:
                await self._try(
                    batch, "posting a quorum's outcomes", partial(self._post, batch, *found)
                )

    async def _show(self, batch: BatchView, records_hash: Hash32, records: bytes) -> None:
        """Show its own outcomes; include the records unless somebody has shown them."""
        if self.me in batch.shown.get(records_hash, {}):
            return
        message = Outcomes(batch.batch_id, batch.root, records_hash)
        signature = self.context.sign(message)
        named = (
            f"show outcomes {hex0x(records_hash)} of batch {batch.batch_id}, {hex0x(batch.root)}"
        )
        told = b"" if records_hash in batch.shown_records else records
        if not await self._affords(batch, records) or not await self._still_fits(batch, records):
            return
        ledger = self.chain.once(named).ledger
        receipt = await ledger.show_outcomes(batch.header(), records_hash, told, signature)
        self._spent += receipt.cost_wei
        what = "withheld" if records_hash == WITHHELD else "outcomes"
        logger.warning("shown on chain", extra={"batch_id": batch.batch_id, "what": what})

    async def _call_withheld(self, batch: BatchView) -> None:
        """Declare a batch withheld, unless its content is available now or was before."""
        if self.me in batch.shown.get(WITHHELD, {}) or any(h != WITHHELD for h in batch.shown):
            return
        try:
            await self._contents(batch)
        except ApiError as error:
            fields = {"batch_id": batch.batch_id, "error": str(error)}
            logger.warning("nothing of a batch can be had", extra=fields)
            await self._show(batch, WITHHELD, b"")

    async def _post(self, batch: BatchView, records: bytes, signatures: bytes) -> None:
        # Showing a batch is in vain unless somebody posts it, so its post needs no budget.
        is_shown = any(self.me in signed for signed in batch.shown.values())
        is_free = is_shown and batch.name not in self._failed_posts
        if not is_free and not await self._affords(batch, records):
            return
        if not await self._still_fits(batch, records):
            return
        named = f"post outcomes of batch {batch.batch_id}, {hex0x(batch.root)}"
        ledger = self.chain.once(named).ledger
        try:
            receipt = await ledger.post_outcomes(batch.header(), records, signatures)
        except ContractRevert as error:
            if error.tx is not None:
                self._failed_posts.add(batch.name)
            raise
        self._spent += receipt.cost_wei
        logger.warning("posted what a quorum showed", extra={"batch_id": batch.batch_id})

    async def _still_fits(self, batch: BatchView, packed: bytes) -> bool:
        """Return whether records fit their batch as the chain is now; warns, once, if not.

        A reorganisation that takes registrations back can give a worker's number to another, and
        everyone who signed would pay for a misrecord
        (docs/decisions/0087-records-answer-to-the-batch.md). Where nobody shows the batch soon,
        nothing is compared: to hide it must not silence those who judged it.
        """
        clock = self.context.clock
        if not packed or clock() < self._uncompared_until:
            return True
        try:
            async with asyncio.timeout(COMPARE_S):
                entries = await self._contents(batch)
        except ApiError:
            return True
        except TimeoutError:
            self._uncompared_until = clock() + UNCOMPARED_S
            return True
        records, workers = unpack_records(packed), self.context.view.worker_by_id
        fits = len(records) == len(entries) and all(
            is_record_of(record, entry.submission, workers)
            for record, entry in zip(records, entries, strict=True)
        )
        if not fits:
            what = "records that contradict their batch are neither shown nor posted"
            hint = "if they were right, a reorganisation gave a worker's number to another"
            self._steps.report(batch.name, what, batch_id=batch.batch_id, hint=hint)
        return fits

    async def _report_doubles(self, batch: BatchView) -> None:
        for double in doubles_of(batch, self.context.domain):
            await self._report(batch, double)

    def _is_contested(self, batch: BatchView) -> bool:
        """Return whether others' posted records differ from those that this validator found, and
        were not compared yet with what the batch holds."""
        judged = self.context.journal.judged(batch.name)
        if judged is None or not batch.signers or batch.name in self._compared:
            return False
        return batch.records_hash not in (None, WITHHELD, keccak(judged.packed()))

    async def _compare(self, batch: BatchView) -> None:
        """Prove the records that contradict what the batch holds."""
        entries, context = await self._contents(batch), self.context
        works = [SignedWork(entry.submission, entry.signature) for entry in entries]
        workers = context.view.worker_by_id
        faults = find_misrecords(batch, works, context.run, workers, context.domain)
        waiting = [fault for fault in faults if not self._is_proven(fault)]
        if not waiting:
            self._compared.add(batch.name)
        for fault in waiting:
            await self._report(batch, fault)

    def _is_proven(self, fault: DoubleOutcome | Misrecord) -> bool:
        filed = (fault.batch.run_id, *fault.filed)
        slashes = self.context.view.slashes
        return any((s.run_id, s.owner, s.offence, s.tag) == filed for s in slashes)

    async def _report(self, batch: BatchView, fault: DoubleOutcome | Misrecord) -> None:
        if not self._is_proven(fault):
            await self._try(batch, f"proving that {fault.words}", partial(self._prove, fault))

    async def _prove(self, fault: DoubleOutcome | Misrecord) -> None:
        await fault.prove(self.chain.once(f"prove that {fault.words}").faults)
        fields = {"batch_id": fault.batch.batch_id, "validator": fault.owner}
        logger.error("a validator's fault was proven on chain", extra=fields)

    async def _try(self, batch: BatchView, what: str, act: Callable[[], Awaitable[None]]) -> None:
        await self._steps.take(batch.name, what, act, batch_id=batch.batch_id)
