"""Waits for what was sent until the chain has decided about it.

While an action is watched, whatever mines its nonce decides: one of its attempts, then it happened;
none of them, then it never will. Meanwhile a node that has forgotten it gets it again as it is, and
one that is slow gets it with higher fees, up to a cap.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal, InvalidOperation
from typing import Any

from muster.chain.outgoing import MIN_BUMP, Fees, Refusal, Signed, Unsigned, refusal_of
from muster.chain.quantities import from_hex, garbled, hash_from_hex, member
from muster.chain.rpc import Call, Rpc
from muster.chain.send_journal import Action, ActionState, Place, SendJournal
from muster.protocol.encoding import hex0x
from muster.protocol.errors import (
    ChainError,
    ChainUnreachable,
    ConfigError,
    RpcError,
    TransactionLost,
)
from muster.protocol.ids import Address

logger = logging.getLogger(__name__)

Receipt = Mapping[str, Any]
"""A receipt, as JSON-RPC answers it."""

MARKET: list[Call] = [
    ("eth_getBlockByNumber", ["latest", False]),
    ("eth_maxPriorityFeePerGas", []),
]
"""What `market_fees` takes the answers to."""
_DEFAULT_TIP_WEI = 10**9
HIGHEST_FEE = "MUSTER_MAX_FEE_GWEI"


def highest_fee(environ: Mapping[str, str] = os.environ) -> int:
    """Return what a gas unit may cost, wei: MUSTER_MAX_FEE_GWEI, or 1,000 gwei.

    Raises ConfigError for what is no such price.
    """
    text = environ.get(HIGHEST_FEE, "1000")
    try:
        gwei = Decimal(text)
        if 0 < gwei <= 10**6:
            return int(gwei * 10**9)
    except InvalidOperation:
        pass
    raise ConfigError(
        f"{HIGHEST_FEE} is {text!r}", hint="a price per gas in gwei, above 0 and at most 1000000"
    )


@dataclass(frozen=True, slots=True)
class SendPolicy:
    """How patient a sender is, and what it pays."""

    gas_margin: float = 1.25
    """The gas limit, as a multiple of the estimate: state may change until it is mined."""
    first_poll_s: float = 0.05
    """Pause before the second look for a receipt."""
    longest_poll_s: float = 1.0
    """Pause between looks once they have grown."""
    bump_after_s: float = 20.0
    """A transaction not mined after this time is sent again with higher fees."""
    bump_factor: float = 1.25
    """By how much at least; nodes demand 1.1."""
    highest_fee_wei: int = field(default_factory=lambda: highest_fee())
    """What is paid per gas at most, however long it takes."""
    give_up_after_s: float = 120.0
    """A transaction not mined after this time is reported lost; it stays in the journal."""
    send_attempts: int = 5
    """Tries to find the right nonce and fees."""
    replaced_after_s: float = 1.0
    """So long a used nonce without a receipt must be seen: a receipt may be served late."""


@dataclass(slots=True)
class Watch:
    """An action that is being waited for, by one task or several."""

    action: Action
    """As the journal has it."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the one that looks."""
    waiting: int = 0
    """Tasks that want to know."""


@dataclass(frozen=True, slots=True)
class Look:
    """What the chain says about an action, at one moment."""

    receipt: Receipt | None
    """Of the attempt that was mined."""
    standing: int
    """The account's mined transactions less its nonce: 0 when it is next, above when it is used."""
    is_known: bool
    """Whether the node has any attempt."""

    @property
    def is_forgotten(self) -> bool:
        """Whether it is not mined, still can be, and the node does not have it."""
        return self.receipt is None and self.standing <= 0 and not self.is_known


class Watcher:
    """Watches the actions of one key."""

    def __init__(
        self,
        rpc: Rpc,
        key: bytes,
        address: Address,
        journal: SendJournal,
        policy: SendPolicy,
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self._rpc = rpc
        self._key = key
        self._address = address
        self._journal = journal
        self._policy = policy
        self._clock = clock
        self._sleep = sleep
        self._watches: dict[int, Watch] = {}

    def enter(self, action: Action) -> Watch:
        """Wait for an action, beside others that do; `leave` when done."""
        watch = self._watches.setdefault(action.number, Watch(action))
        watch.waiting += 1
        return watch

    def leave(self, watch: Watch) -> None:
        """Wait no longer."""
        watch.waiting -= 1
        if not watch.waiting:
            # What is unsettled then is an orphan, until somebody settles it.
            self._watches.pop(watch.action.number, None)

    # -------------------------------------------------------------------- settle

    async def settle_orphans(self, *, before_nonce: int | None = None) -> None:
        """Settle the actions that nobody waits for, in the order of their nonces.

        Raises TransactionLost when one of them is not mined in time.
        """
        orphans = [
            action
            for action in await self._journal.pending()
            if action.number not in self._watches
            and (before_nonce is None or action.nonce < before_nonce)
        ]
        for action in orphans:
            await self._revive(action)
        for action in orphans:
            watch = self.enter(action)
            try:
                receipt = await self.settle(watch)
            finally:
                self.leave(watch)
            logger.info("transaction settled", extra=about(action, receipt))

    async def settle(self, watch: Watch) -> Receipt | None:
        """Return the receipt of an action; None when its nonce was used by something else.

        Raises TransactionLost when it is not mined in time; then it is pending still.
        """
        async with watch.lock:
            policy, started = self._policy, self._clock()
            bumped_at, pause = started, policy.first_poll_s
            used_since: float | None = None
            while True:
                look = await self._try_look(watch.action)
                if look is not None and look.receipt is not None:
                    return await self._note_mined(watch, look.receipt)
                now = self._clock()
                if look is None or look.standing <= 0:
                    used_since = None
                elif used_since is None:
                    used_since = now
                elif now - used_since >= policy.replaced_after_s:
                    await self._note_replaced(watch)
                    return None
                if now - started >= policy.give_up_after_s:
                    raise _lost(watch.action, policy.give_up_after_s)
                if look is not None and look.standing < 0:
                    # Not its turn: what waits before it is dearer or sent again, not this one.
                    bumped_at = now
                    await self._reopen_reorganised()
                    await self.settle_orphans(before_nonce=watch.action.nonce)
                is_slow = now - bumped_at >= policy.bump_after_s and used_since is None
                if not is_slow and look is not None and look.is_forgotten:
                    is_slow = await self._send_again(watch.action) is Refusal.FEE_TOO_LOW
                if is_slow:
                    bumped_at = now
                    await self._bump(watch)
                await self._sleep(pause)
                pause = min(pause * 1.5, policy.longest_poll_s)

    # ---------------------------------------------------------------------- look

    async def look(self, action: Action) -> Look:
        """Ask about an action in one request, so that the answers belong together."""
        hashes = hashes_of(action)
        count, *answers = await self._rpc.batch(
            [
                ("eth_getTransactionCount", [self._address, "latest"]),
                *(("eth_getTransactionReceipt", [tx]) for tx in hashes),
                *(("eth_getTransactionByHash", [tx]) for tx in hashes),
            ]
        )
        receipts = [_checked(receipt, tx) for receipt, tx in zip(answers, hashes, strict=False)]
        mined = [receipt for receipt in receipts if receipt is not None]
        return Look(
            receipt=mined[0] if mined else None,
            standing=from_hex(count) - action.nonce,
            is_known=any(answers[len(hashes) :]),
        )

    async def taken_back(self) -> list[Action]:
        """Return what was settled in blocks that no longer stand, by nonce."""
        count = from_hex(await self._rpc.call("eth_getTransactionCount", self._address, "latest"))
        settled = await self._journal.settled_from(count)
        return [action for action in settled if await self._is_undone(action)]

    async def reopen(self, undone: Sequence[Action], state: ActionState) -> None:
        """Note that actions did not happen after all: they are pending, or to be done anew."""
        for action in undone:
            logger.warning("transaction taken back by a reorg", extra=about(action))
            await self._journal.resolve(action, state)

    async def _reopen_reorganised(self) -> None:
        """Make pending what a reorg took back before the nonce that is waited for."""
        try:
            undone = await self.taken_back()
        except (ChainUnreachable, RpcError) as error:
            logger.debug("no count", extra={"cause": str(error)})
            return
        await self.reopen([action for action in undone if action.attempts], ActionState.PENDING)

    async def _is_undone(self, action: Action) -> bool:
        # An endpoint that merely lags behind has the receipt of what it does not count yet.
        look = await self.look(action)
        return look.receipt is None and look.standing <= 0

    async def _try_look(self, action: Action) -> Look | None:
        try:
            return await self.look(action)
        except (ChainUnreachable, RpcError) as error:
            # The transaction is out; only the deadline ends the wait.
            logger.debug("no look", extra={"tx": hashes_of(action)[-1], "cause": str(error)})
            return None

    # ---------------------------------------------------------------- send again

    async def _revive(self, action: Action) -> None:
        """Send an action again, as it is, when the node has forgotten it."""
        look = await self._try_look(action)
        if look is not None and look.is_forgotten:
            await self._send_again(action)

    async def _send_again(self, action: Action) -> Refusal | None:
        """Send the newest attempt once more; return why it was refused, if it was."""
        problem = await self.send_raw(action.attempts[-1])
        if problem is None:
            logger.info("transaction sent again", extra=about(action))
            return None
        logger.debug("not taken again", extra=about(action) | {"cause": str(problem)})
        return refusal_of(problem)

    async def _bump(self, watch: Watch) -> None:
        """Replace the newest attempt by a dearer one, unless it would be too dear."""
        policy = self._policy
        try:
            market = market_fees(*await self._rpc.try_batch(MARKET))
        except (ChainUnreachable, RpcError) as error:
            logger.debug("no fees", extra={"cause": str(error)})
            return
        newest = Unsigned.from_raw(watch.action.attempts[-1].raw)
        wanted = newest.fees.times(policy.bump_factor).at_least(market)
        fees = wanted.at_most(policy.highest_fee_wei)
        if fees.max_wei < newest.fees.max_wei * MIN_BUMP:
            extra = about(watch.action) | {"most": f"{policy.highest_fee_wei} wei per gas"}
            logger.warning("a transaction pays the most it may", extra=extra)
            await self._send_again(watch.action)
            return
        dearer = replace(newest, fees=fees).signed(self._key)
        watch.action = await self._journal.add_attempt(watch.action, dearer)
        problem = await self.send_raw(dearer)
        extra = about(watch.action) | {"cause": str(problem) if problem else "slow"}
        logger.info("transaction sent again with higher fees", extra=extra)

    async def send_raw(self, signed: Signed) -> RpcError | None:
        """Hand over a transaction that the journal has; return why it was refused, if it was."""
        try:
            await self._rpc.call("eth_sendRawTransaction", hex0x(signed.raw))
        except ChainUnreachable:
            # It may have arrived: watching tells, and sends it again if not.
            logger.warning("sent without an answer", extra={"tx": signed.tx_hash})
        except RpcError as error:
            return error
        return None

    # ---------------------------------------------------------------------- note

    async def _note_mined(self, watch: Watch, receipt: Receipt) -> Receipt:
        place = Place(
            receipt["transactionHash"], from_hex(receipt["blockNumber"]), receipt["blockHash"]
        )
        state = ActionState.MINED if has_succeeded(receipt) else ActionState.REVERTED
        if (watch.action.state, watch.action.place) != (state, place):
            watch.action = await self._journal.resolve(watch.action, state, place)
        return receipt

    async def _note_replaced(self, watch: Watch) -> None:
        """Give an action up whose nonce something else used; raises if it did happen once."""
        place = watch.action.place
        if place is not None:
            block = await self._rpc.call("eth_getBlockByNumber", hex(place.block_number), False)
            if block is not None and member(block, "hash") == place.block_hash:
                raise ChainError(
                    f"transaction {place.tx_hash} was mined in block {place.block_number}, "
                    "but the RPC endpoint does not serve its receipt",
                    hint="use an endpoint that keeps older receipts",
                )
        logger.warning("another transaction used the nonce", extra=about(watch.action))
        watch.action = await self._journal.resolve(watch.action, ActionState.REPLACED)


def market_fees(block: Any, tip: Any) -> Fees:
    """Return what the market asks, from the answers to `MARKET`."""
    if isinstance(block, RpcError):
        raise block
    # Endpoints without the method take any tip.
    tip_wei = _DEFAULT_TIP_WEI if isinstance(tip, RpcError) else from_hex(tip)
    if not isinstance(block, dict):
        raise garbled("no latest block")
    return Fees.of_market(from_hex(block.get("baseFeePerGas", "0x0")), tip_wei)


def hashes_of(action: Action) -> list[str]:
    """Return the transactions that would be the action, newest last."""
    attempts = [attempt.tx_hash for attempt in action.attempts]
    return attempts or ([action.place.tx_hash] if action.place else [])


def _checked(receipt: Any, tx: str) -> Receipt | None:
    """Return a receipt whose members are what they must be; raises ChainUnreachable."""
    if receipt is None:
        return None
    for name in ("status", "blockNumber"):
        from_hex(member(receipt, name))
    hash_from_hex(member(receipt, "blockHash"))
    if member(receipt, "transactionHash") != tx or not isinstance(member(receipt, "logs"), list):
        raise garbled(f"the receipt of {tx} is another's")
    checked: Receipt = receipt
    return checked


def has_succeeded(receipt: Receipt) -> bool:
    """Return whether a mined transaction did what it should."""
    return from_hex(receipt["status"]) == 1


def about(action: Action, receipt: Receipt | None = None) -> dict[str, Any]:
    """Return what a log line says of an action: never the raw transaction."""
    fields = {"label": action.label, "nonce": action.nonce, "tx": hashes_of(action)[-1]}
    return fields if receipt is None else fields | {"has_succeeded": has_succeeded(receipt)}


def _lost(action: Action, after_s: float) -> TransactionLost:
    what = f" ({action.label})" if action.label else ""
    return TransactionLost(
        f"transaction {hashes_of(action)[-1]}{what} was not mined within {after_s:g} s",
        tx=hashes_of(action)[-1],
        hint="it may still be: the same action under its label goes on waiting for it",
    )
