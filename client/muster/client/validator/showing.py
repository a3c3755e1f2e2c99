"""What a validator does on chain when the orchestrator keeps back what it signed.

  show       its own outcomes, so that others see them
  withhold   say that nothing of a batch can be had: its workers need not wait for the deadline
  post       a quorum's outcomes that were shown, and nobody posted
  report     a validator that signed two different outcomes of one batch

Shares of the outcome deadline say when: an honest orchestrator has posted long before. Validators
post one after the other in the order in which they are drawn, so that one pays the gas.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from muster.chain.doubles import WITHHELD
from muster.chain.structs import BatchStatus, Offence
from muster.client.chain_facts import ChainClock
from muster.client.outage import Steps, serve_forever
from muster.client.validator.calls import order_of, recent_batches
from muster.protocol.eip712 import Domain, address_of, digest, recover
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.errors import ApiError, SignatureError
from muster.protocol.ids import Address, Hash32
from muster.protocol.messages import Outcomes

if TYPE_CHECKING:
    from muster.api import BatchEntry
    from muster.chain import BatchView, Chain, RunView
    from muster.client.validator.place import ValidatorPlace

logger = logging.getLogger(__name__)

SHOW_AT = 0.60
"""Share of the deadline from which own outcomes are shown on chain."""
WITHHOLD_AT = 0.75
"""Share from which a batch of which nothing can be had is called withheld."""
POST_AT = 0.80
"""Share from which the first of the order posts what a quorum showed."""
NEXT_POSTS = 0.02
"""Share that each validator leaves to the one before it in the order."""
LAST_POST_AT = 0.94
"""Share from which every validator posts."""
RETRY_S = 5.0
"""Shortest time between two tries of one step."""
_OVERTAKEN = frozenset(
    {
        "LedgerOutcomesPosted",
        "LedgerWrongTime",
        "LedgerBatchMismatch",
        "VaultOffenceSettled",
        "FaultNoEquivocation",
    }
)
"""Refusals that say that somebody else was first, or that it is too late."""

Contents = Callable[["BatchView"], Awaitable[list["BatchEntry"]]]
"""Shows what a batch is made of; raises ApiError when nobody does."""


@dataclass(frozen=True, slots=True)
class Double:
    """Two different outcomes of one batch that one validator signed."""

    validator: Address
    """Who."""
    first: tuple[Hash32, bytes]
    """Hash of the records, and the signature."""
    second: tuple[Hash32, bytes]
    """The same of others."""


# What is on chain: pure


def shown_by(batch: BatchView, domain: Domain) -> dict[Hash32, dict[Address, bytes]]:
    """Return the signatures about a batch that are on chain and hold under its root, by the hash of
    the records: shown ones, and those that the outcomes were posted with.
    """
    found = {hashed: dict(signed) for hashed, signed in batch.shown.items()}
    if batch.records_hash is not None:
        message = Outcomes(batch.batch_id, batch.root, batch.records_hash)
        posted = found.setdefault(batch.records_hash, {})
        for signature in batch.signatures:
            if (signer := _signer(message, signature, domain)) is not None:
                posted[signer] = signature
    held = {}
    for hashed, signed in found.items():
        message = Outcomes(batch.batch_id, batch.root, hashed)
        # A signature that was shown once the outcomes were there is about another root.
        held[hashed] = {
            who: each for who, each in signed.items() if _signer(message, each, domain) == who
        }
    return held


def _signer(message: Outcomes, signature: bytes, domain: Domain) -> Address | None:
    try:
        return recover(digest(domain, message.struct_hash()), signature)
    except SignatureError:
        return None


def doubles_of(batch: BatchView, domain: Domain) -> Iterator[Double]:
    """Yield who signed two different outcomes of a batch; calling it withheld is none."""
    by_validator: dict[Address, list[tuple[Hash32, bytes]]] = {}
    for hashed, signed in sorted(shown_by(batch, domain).items()):
        for who, signature in signed.items():
            if hashed != WITHHELD:
                by_validator.setdefault(who, []).append((hashed, signature))
    for who, statements in by_validator.items():
        for first, second in list(pairwise(statements))[:1]:
            yield Double(who, first, second)


def postable(batch: BatchView, run: RunView, domain: Domain) -> tuple[bytes, bytes] | None:
    """Return the records and the joined signatures that a quorum showed, the largest one's; None
    when there is none.
    """
    quorum = run.terms[batch.terms - 1].quorum
    best: tuple[int, bytes, bytes] | None = None
    for hashed, signed in sorted(shown_by(batch, domain).items()):
        records = b"" if hashed == WITHHELD else batch.shown_records.get(hashed)
        seated = {who: each for who, each in signed.items() if who in run.validators}
        if records is None or len(seated) < quorum or (best and best[0] >= len(seated)):
            continue
        # The ledger wants signers ascending as numbers.
        joined = b"".join(seated[who] for who in sorted(seated, key=lambda who: int(who, 16)))
        best = (len(seated), records, joined)
    return None if best is None else best[1:]


def posts_at(batch: BatchView, run: RunView, validator: Address) -> float:
    """Return the share of the deadline from which a validator posts what a quorum showed."""
    order = order_of(batch, run)
    place = order.index(validator) if validator in order else len(order)
    return min(POST_AT + place * NEXT_POSTS, LAST_POST_AT)


# The duty


class ShowingDuty:
    """One validator of one run."""

    def __init__(self, place: ValidatorPlace, chain: Chain, contents: Contents) -> None:
        """`chain` signs with the validator's key."""
        self.place = place
        self.chain = chain
        self.me = address_of(place.key)
        self._contents = contents
        self._time = ChainClock(chain, place.clock)
        self._steps = Steps(place.clock, retry_s=RETRY_S, overtaken=_OVERTAKEN)

    async def run(self) -> None:
        """Serve until cancelled."""
        await serve_forever(self.serve, max(self.place.poll_s, 0.2))

    async def serve(self) -> None:
        """Do what can be done about every batch now."""
        place, windows = self.place, self.place.windows
        run = place.run
        batches = recent_batches(place.view, place.run_id, windows.whole_s)
        for batch in batches:
            if len(batch.shown) > 1 or (batch.shown and batch.records_hash is not None):
                await self._report_doubles(batch)
        waiting = [b for b in batches if b.status is BatchStatus.COMMITTED and not b.is_void]
        if not waiting or self.me not in run.validators:
            return
        at = await self._time.now()
        for batch in waiting:
            share = (at - batch.committed_at) / windows.outcome_deadline_s
            if share < 1:
                await self._serve_batch(batch, run, share)

    async def _serve_batch(self, batch: BatchView, run: RunView, share: float) -> None:
        judged = self.place.journal.judged(batch.name)
        if judged is not None and share >= SHOW_AT:
            records = judged.packed()
            await self._try(
                batch, "showing own outcomes", partial(self._show, batch, keccak(records), records)
            )
        elif judged is None and share >= WITHHOLD_AT and batch.work is None:
            await self._try(batch, "calling the batch withheld", partial(self._withhold, batch))
        if share >= posts_at(batch, run, self.me):
            found = postable(batch, run, self.place.domain)
            if found is not None:
                await self._try(
                    batch, "posting a quorum's outcomes", partial(self._post, batch, *found)
                )

    async def _show(self, batch: BatchView, records_hash: Hash32, records: bytes) -> None:
        """Show own outcomes, the records with them unless somebody showed those."""
        if self.me in batch.shown.get(records_hash, {}):
            return
        message = Outcomes(batch.batch_id, batch.root, records_hash)
        signature = self.place.sign(message)
        named = (
            f"show outcomes {hex0x(records_hash)} of batch {batch.batch_id}, {hex0x(batch.root)}"
        )
        told = b"" if records_hash in batch.shown_records else records
        ledger = self.chain.once(named).ledger
        await ledger.show_outcomes(batch.header(), records_hash, told, signature)
        what = "withheld" if records_hash == WITHHELD else "outcomes"
        logger.warning("shown on chain", extra={"batch_id": batch.batch_id, "what": what})

    async def _withhold(self, batch: BatchView) -> None:
        """Call a batch withheld, unless somebody shows what it is made of now, or had it."""
        if self.me in batch.shown.get(WITHHELD, {}) or any(h != WITHHELD for h in batch.shown):
            return
        try:
            await self._contents(batch)
        except ApiError as error:
            fields = {"batch_id": batch.batch_id, "error": str(error)}
            logger.warning("nothing of a batch can be had", extra=fields)
            await self._show(batch, WITHHELD, b"")

    async def _post(self, batch: BatchView, records: bytes, signatures: bytes) -> None:
        named = f"post outcomes of batch {batch.batch_id}, {hex0x(batch.root)}"
        ledger = self.chain.once(named).ledger
        await ledger.post_outcomes(batch.header(), records, signatures)
        logger.warning("posted what a quorum showed", extra={"batch_id": batch.batch_id})

    async def _report_doubles(self, batch: BatchView) -> None:
        slashed = {
            slash.owner
            for slash in self.place.view.slashes
            if slash.offence is Offence.DOUBLE_OUTCOME
            and (slash.run_id, slash.tag) == (batch.run_id, batch.batch_id)
        }
        for double in doubles_of(batch, self.place.domain):
            if double.validator not in slashed:
                act = partial(self._prove, batch, double)
                await self._try(batch, f"proving two outcomes of {double.validator}", act)

    async def _prove(self, batch: BatchView, double: Double) -> None:
        """Prove that a validator signed two different outcomes."""
        (first, first_signature), (second, second_signature) = double.first, double.second
        named = f"prove two outcomes of {double.validator}, batch {batch.batch_id}"
        await self.chain.once(named).faults.prove_double_outcome(
            batch.header(),
            Outcomes(batch.batch_id, batch.root, first),
            first_signature,
            Outcomes(batch.batch_id, batch.root, second),
            second_signature,
        )
        fields = {"batch_id": batch.batch_id, "validator": double.validator}
        logger.error("a validator signed two different outcomes: proven on chain", extra=fields)

    async def _try(self, batch: BatchView, what: str, act: Callable[[], Awaitable[None]]) -> None:
        await self._steps.take(batch.name, what, act, batch_id=batch.batch_id)
