"""Sends transactions for one key: the only writer of its nonces, and no labelled action twice.

Steps of a transaction: settle what an earlier process left → estimate (which decodes a revert
before anything is paid) → sign with the next nonce → journal → send → watch until it is mined.

    killed before the journal has it     nothing was sent: the action did not happen
    killed after                         the next `send` or `recover` watches it first: mined, it is
                                         resolved; forgotten by the node, it is sent again as it is
    its block is taken back              the same: the account's count is below what was settled
    blocks are made without it           it is sent again with higher fees, up to a cap
    its caller asks for it again         under the label of `Chain.once` nothing is sent, and the
                                         caller gets the receipt; without a label it is a new action

The transaction that uses an action's nonce decides: if it is one of the attempts, the action
happened; if not, it never will.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from muster.chain.abi import decode_revert
from muster.chain.outgoing import (
    MARKET,
    MIN_BUMP,
    TELL_SENT,
    Fees,
    SendRefusal,
    SignedTransaction,
    UnsignedTransaction,
    highest_fee,
    market_fees,
    purpose_of,
    refusal_of,
)
from muster.chain.rpc import (
    Rpc,
    from_hex,
    garbled,
    hash_from_hex,
    is_revert,
    member,
    nonce_from_hex,
)
from muster.chain.send_journal import Action, ActionState, Inclusion, SendJournal
from muster.protocol.eip712 import address_of
from muster.protocol.encoding import hex0x
from muster.protocol.errors import (
    ChainError,
    ChainUnreachable,
    ContractRevert,
    RpcError,
    TransactionLost,
)
from muster.protocol.ids import Address

logger = logging.getLogger(__name__)

RawReceipt = Mapping[str, Any]
"""A receipt, as JSON-RPC answers it."""


@dataclass(frozen=True, slots=True)
class SendPolicy:
    """Deadlines, retries and fees of a sender."""

    gas_margin: float = 1.25
    """The gas limit, as a multiple of the estimate: state may change until it is mined."""
    first_poll_s: float = 0.05
    """Pause before the second look for a receipt."""
    longest_poll_s: float = 1.0
    """Longest pause between looks."""
    bump_after_s: float = 20.0
    """A transaction that is not in a block after this time is sent again with higher fees."""
    bump_factor: float = 1.25
    """Least factor on the fees then; nodes require 1.1."""
    most_of_market: float = 4.0
    """Highest fees then, as a multiple of the market's: above that, the price is not the reason. A
    transaction that pays less than the market still gets what a replacement needs."""
    highest_fee_wei: int = field(default_factory=lambda: highest_fee())
    """The highest price per gas that is ever paid."""
    give_up_after_s: float = 120.0
    """A transaction that is not mined after this time is reported lost; it stays in the journal."""
    send_attempts: int = 5
    """Tries to find the right nonce and fees."""
    replaced_after_s: float = 15.0
    """Time in which an endpoint must know no attempt of a used nonce before it counts as another's:
    it may learn of a block late."""


@dataclass(slots=True)
class _Watch:
    """An action that one or several tasks wait for."""

    action: Action
    """The action as in the journal."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the task that looks."""
    waiting: int = 0
    """Number of waiting tasks."""
    priced_at: int | None = None
    """The chain's height when the newest attempt was priced; None if an earlier process did."""


@dataclass(frozen=True, slots=True)
class _Look:
    """The chain's state of an action at one moment."""

    receipt: RawReceipt | None
    """Receipt of the mined attempt, if any."""
    standing: int
    """The account's number of mined transactions minus the action's nonce: 0 if the action is next,
    above 0 if its nonce is used."""
    known: str | None
    """Hash of the newest attempt that the node knows, if any."""

    @property
    def is_forgotten(self) -> bool:
        """Whether it is not mined but still can be, and the node does not know it."""
        return self.receipt is None and self.standing <= 0 and self.known is None


class TransactionSender:
    """Sends the transactions of one key, in order, from any number of tasks."""

    def __init__(
        self,
        rpc: Rpc,
        key: bytes,
        chain_id: int,
        *,
        journal: SendJournal | None = None,
        policy: SendPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Without a journal, transactions are remembered only in this object."""
        self.address: Address = address_of(key)
        self._rpc = rpc
        self._key = key
        self._chain_id = chain_id
        self._journal = journal or SendJournal(None, self.address)
        self._policy = policy or SendPolicy()
        self._most = Fees(self._policy.highest_fee_wei, self._policy.highest_fee_wei)
        self._clock = clock
        self._sleep = sleep
        self._submitting = asyncio.Lock()
        self._mined_in = 0
        self._priced_at: int | None = None
        self._sent_at = float("-inf")
        self._watches: dict[int, _Watch] = {}

    def with_journal(self, journal: SendJournal) -> TransactionSender:
        """Return a sender of the same key that journals elsewhere; this one is closed."""
        self.close()
        return TransactionSender(
            self._rpc, self._key, self._chain_id, journal=journal, policy=self._policy
        )

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()

    async def send(
        self, to: Address | None, data: bytes, *, label: str | None = None
    ) -> RawReceipt:
        """Send a call (or without `to` a deployment), and return its receipt when it has succeeded.

        A label names the action: if an action with that label is pending or has succeeded, nothing
        is sent and its receipt is returned, whatever the arguments are. After a revert the label is
        free again.

        Raises ContractRevert when it reverts, TransactionLost when it is not mined in time,
        ChainUnreachable or RpcError when it could not be sent, StorageError when it could not be
        journaled and therefore was not sent.
        """
        for _ in range(self._policy.send_attempts):
            receipt = await self._settle(await self._begin(to, data, label))
            if receipt is not None:
                return await self._succeeded(receipt, to, data)
        raise self._no_nonce()

    async def receipt_of(self, label: str) -> RawReceipt | None:
        """Return the receipt of the action with this label; None while it has not happened."""
        action = await self._journal.find(label)
        if action is None:
            return None
        look = await self._look(action)
        if look.receipt is None or not _has_succeeded(look.receipt):
            return None
        return look.receipt

    async def pending_count(self) -> int:
        """Return how many sent actions are not settled."""
        return len(await self._journal.pending())

    async def recover(self) -> None:
        """Settle the actions of earlier processes, in the order of nonces; `send` does so too.

        Raises TransactionLost when one of them is not mined in time.
        """
        asked_at = self._clock()
        async with self._submitting:
            await self._reconcile(asked_at)

    # ----------------------------------------------------------------- reconcile

    async def _reconcile(self, asked_at: float) -> None:
        """Settle every action that no task waits for: left by a process, or undone by a reorg."""
        undone, state = await self._taken_back(), ActionState.PENDING
        if any(not action.attempts for action in undone):
            # The reorganisation is deeper than the journal: the transaction is gone, and later ones
            # cannot be mined without it. Their callers have to repeat them all.
            undone, state = undone + await self._journal.pending(), ActionState.REPLACED
        await self._reopen(undone, state)
        # What was sent after the caller asked has the same time to be mined as everything.
        await self._settle_orphans(max(asked_at, self._sent_at))

    # -------------------------------------------------------------------- submit

    async def _begin(self, to: Address | None, data: bytes, label: str | None) -> _Watch:
        """Return the watched action of a label, or a new one that has been submitted."""
        asked_at = self._clock()
        # One at a time: nonces must be used in order, and each estimate must see earlier
        # transactions.
        async with self._submitting:
            await self._reconcile(asked_at)
            action = await self._journal.find(label) if label is not None else None
            if action is None:
                action = await self._submit(to, data, label)
                return self._watched(action, priced_at=self._priced_at)
            if action.purpose != (purpose := purpose_of(to, data)):
                raise ChainError(
                    f"the label {label!r} names a call of {action.purpose}, not of {purpose}",
                    hint="give every action a label of its own",
                )
            return self._watched(action)

    async def _submit(self, to: Address | None, data: bytes, label: str | None) -> Action:
        fee_factor = 1.0
        for attempt in range(1, self._policy.send_attempts + 1):
            unsigned = await self._prepare(to, data, fee_factor)
            signed = unsigned.signed(self._key)
            action = await self._journal.begin(label, purpose_of(to, data), unsigned.nonce, signed)
            self._sent_at = self._clock()
            problem = await self._send_raw(signed)
            if problem is None or await self._may_be_taken(action, problem):
                self._tell_sent(signed)
                return action
            await self._journal.resolve(action, ActionState.REFUSED)
            refusal = refusal_of(problem)
            if refusal is SendRefusal.OTHER:
                raise _explained(problem)
            logger.info("sending again", extra={"attempt": attempt, "cause": str(problem)})
            if refusal is SendRefusal.FEE_TOO_LOW:
                fee_factor *= self._policy.bump_factor
            await self._sleep(self._policy.first_poll_s * 2**attempt)
        raise self._no_nonce()

    async def _prepare(
        self, to: Address | None, data: bytes, fee_factor: float
    ) -> UnsignedTransaction:
        call = self._call(to, data)
        for attempt in range(1, self._policy.send_attempts + 1):
            gas, nonce, block, tip = await self._rpc.try_batch(
                [
                    ("eth_estimateGas", [call, "pending"]),
                    ("eth_getTransactionCount", [self.address, "pending"]),
                    *MARKET,
                ]
            )
            # A lagging node may lack the state that the call depends on.
            if not isinstance(gas, RpcError) or not self._is_behind(block):
                break
            await self._sleep(self._policy.first_poll_s * 2**attempt)
        if isinstance(gas, RpcError):
            raise _explained(gas)
        if isinstance(nonce, RpcError):
            raise nonce
        fees = market_fees(block, tip).times(fee_factor).at_most(self._most)
        self._priced_at = from_hex(member(block, "number"))
        return UnsignedTransaction(
            chain_id=self._chain_id,
            nonce=await self._next_nonce(nonce_from_hex(nonce)),
            to=to,
            data=data,
            gas=int(from_hex(gas) * self._policy.gas_margin),
            fees=fees,
        )

    def _is_behind(self, block: Any) -> bool:
        """Return whether a newest block is older than a block with one of our transactions."""
        is_block = isinstance(block, dict) and "number" in block
        return is_block and from_hex(block["number"]) < self._mined_in

    async def _next_nonce(self, on_chain: int) -> int:
        """Return the nonce after all sent transactions; `on_chain` includes the node's pending
        ones.
        """
        settled = await self._journal.settled_from(on_chain)
        used = [action.nonce for action in await self._journal.pending() + settled]
        return max([on_chain, *(nonce + 1 for nonce in used)])

    # ------------------------------------------------------------------- outcome

    async def _succeeded(self, receipt: RawReceipt, to: Address | None, data: bytes) -> RawReceipt:
        """Return the receipt of a success; else run the call again and raise how it reverts."""
        if _has_succeeded(receipt):
            self._mined_in = from_hex(receipt["blockNumber"])
            return receipt
        tx_hash, block = receipt["transactionHash"], receipt["blockNumber"]
        for attempt in range(1, self._policy.send_attempts + 1):
            try:
                await self._rpc.call("eth_call", self._call(to, data), block)
            except RpcError as error:
                raise decode_revert(error.data, tx=tx_hash) from error
            except ChainUnreachable as error:
                logger.debug("no reason", extra={"tx": tx_hash, "cause": str(error)})
                await self._sleep(self._policy.first_poll_s * 2**attempt)
            else:
                raise decode_revert(b"", tx=tx_hash)
        raise ContractRevert(
            ContractRevert.NO_REASON,
            tx=tx_hash,
            hint=f"the RPC endpoint could not be asked why: replay the transaction at block "
            f"{from_hex(block)}",
        )

    def _call(self, to: Address | None, data: bytes) -> dict[str, Any]:
        return {"from": self.address, "data": hex0x(data), **({"to": to} if to else {})}

    def _no_nonce(self) -> ChainError:
        return ChainError(
            f"no transaction of {self.address} was taken in {self._policy.send_attempts} tries",
            hint="stop any other process that sends with the same key",
        )

    # --------------------------------------------------------------------- watch

    def _watched(self, action: Action, *, priced_at: int | None = None) -> _Watch:
        """Return the watch of an action, and count one more waiting task."""
        watch = self._watches.setdefault(action.number, _Watch(action, priced_at=priced_at))
        watch.waiting += 1
        return watch

    async def _settle_orphans(self, asked_at: float, *, before_nonce: int | None = None) -> None:
        """Settle the actions that no task waits for, in the order of their nonces.

        Raises TransactionLost when one of them is not mined in time, which counts from when the
        caller asked: callers that wait for one another hear of it together.
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
            receipt = await self._settle(self._watched(action), asked_at)
            logger.info("transaction settled", extra=_about(action, receipt))

    async def _settle(self, watch: _Watch, asked_at: float | None = None) -> RawReceipt | None:
        """Return the receipt of an action; None when its nonce was used by something else.

        Raises TransactionLost when it is not mined in time; then it is still pending.
        """
        try:
            return await self._decided(watch, self._clock() if asked_at is None else asked_at)
        finally:
            watch.waiting -= 1
            if not watch.waiting:
                # If it is unsettled, it is now an orphan that `_settle_orphans` settles.
                self._watches.pop(watch.action.number, None)

    async def _decided(self, watch: _Watch, started: float) -> RawReceipt | None:
        async with watch.lock:
            policy = self._policy
            bumped_at, pause = self._clock(), policy.first_poll_s
            unknown_since: float | None = None
            problem: RpcError | None = None
            while True:
                look = await self._try_look(watch.action)
                if look is not None and look.receipt is not None:
                    return await self._note_mined(watch, look.receipt)
                now = self._clock()
                is_open = look is None or look.standing <= 0
                if look is None or is_open or (look.known and watch.action.inclusion is None):
                    unknown_since = None
                elif unknown_since is None:
                    unknown_since = now
                elif now - unknown_since >= policy.replaced_after_s and await self._is_replaced(
                    watch, look
                ):
                    return None
                if now - started >= policy.give_up_after_s:
                    is_refused = look is not None and look.is_forgotten
                    raise self._lost(watch.action, problem if is_refused else None)
                if look is not None and look.standing < 0:
                    # Not its turn: earlier transactions get higher fees or are sent again, not this
                    # one.
                    bumped_at = now
                    await self._reopen_before()
                    await self._settle_orphans(started, before_nonce=watch.action.nonce)
                is_slow = now - bumped_at >= policy.bump_after_s and is_open
                is_cheap = False
                if not is_slow and look is not None and look.is_forgotten:
                    problem = await self._send_again(watch.action)
                    is_cheap = problem is not None and (
                        refusal_of(problem) is SendRefusal.FEE_TOO_LOW
                    )
                if is_slow or is_cheap:
                    bumped_at = now
                    await self._bump(watch, look, is_cheap=is_cheap)
                await self._sleep(pause)
                pause = min(pause * 1.5, policy.longest_poll_s)

    # ---------------------------------------------------------------------- look

    async def _look(self, action: Action) -> _Look:
        """Query an action in one request, so that the answers belong together."""
        hashes = _hashes_of(action)
        count, *answers = await self._rpc.batch(
            [
                ("eth_getTransactionCount", [self.address, "latest"]),
                *(("eth_getTransactionReceipt", [tx]) for tx in hashes),
                *(("eth_getTransactionByHash", [tx]) for tx in hashes),
            ]
        )
        receipts = [_checked(receipt, tx) for receipt, tx in zip(answers, hashes, strict=False)]
        mined = [receipt for receipt in receipts if receipt is not None]
        known = [tx for tx, found in zip(hashes, answers[len(hashes) :], strict=True) if found]
        return _Look(
            receipt=mined[0] if mined else None,
            standing=nonce_from_hex(count) - action.nonce,
            known=known[-1] if known else None,
        )

    async def _taken_back(self) -> list[Action]:
        """Return the actions that were settled in blocks no longer on the chain, by nonce."""
        count = nonce_from_hex(
            await self._rpc.call("eth_getTransactionCount", self.address, "latest")
        )
        settled = await self._journal.settled_from(count)
        return [action for action in settled if await self._is_undone(action)]

    async def _reopen(self, undone: Sequence[Action], state: ActionState) -> None:
        """Record that actions did not happen after all: they are pending, or must be repeated."""
        for action in undone:
            logger.warning("transaction taken back by a reorg", extra=_about(action))
            await self._journal.resolve(action, state)

    async def _reopen_before(self) -> None:
        """Make actions pending that a reorg undid and whose nonces come before the awaited one."""
        try:
            undone = await self._taken_back()
        except (ChainUnreachable, RpcError) as error:
            logger.debug("no count", extra={"cause": str(error)})
            return
        await self._reopen([action for action in undone if action.attempts], ActionState.PENDING)

    async def _is_undone(self, action: Action) -> bool:
        # An endpoint that only lags behind still has the receipt, although its count is too low.
        look = await self._look(action)
        return look.receipt is None and look.standing <= 0

    def _lost(self, action: Action, problem: RpcError | None) -> TransactionLost:
        tx = _hashes_of(action)[-1]
        what = f" ({action.label})" if action.label else ""
        return TransactionLost(
            f"transaction {tx}{what} was not mined within {self._policy.give_up_after_s:g} s"
            + (f": {problem}" if problem else ""),
            tx=tx,
            is_remembered=self._journal.is_kept and action.label is not None,
        )

    async def _try_look(self, action: Action) -> _Look | None:
        try:
            return await self._look(action)
        except (ChainUnreachable, RpcError) as error:
            # The transaction was sent, so only the deadline ends the wait.
            logger.debug("no look", extra={"tx": _hashes_of(action)[-1], "cause": str(error)})
            return None

    async def _may_be_taken(self, action: Action, problem: RpcError) -> bool:
        """Return whether a node may have an action that was refused; then watching will show.

        A used nonce may be the action's own, if an answer was lost. A service that asks several
        nodes may tell the refusal of one, although another took it.
        """
        if refusal_of(problem) in (SendRefusal.KNOWN, SendRefusal.NONCE_USED):
            return True
        look = await self._try_look(action)
        return look is None or look.receipt is not None or look.known is not None

    # ---------------------------------------------------------------- send again

    async def _revive(self, action: Action) -> None:
        """Send an action again unchanged if the node has forgotten it."""
        look = await self._try_look(action)
        if look is not None and look.is_forgotten:
            await self._send_again(action)

    async def _send_again(self, action: Action) -> RpcError | None:
        """Send the newest attempt once more; return why it was refused, if it was."""
        problem = await self._send_raw(action.attempts[-1])
        if problem is None:
            logger.info("transaction sent again", extra=_about(action))
        else:
            logger.debug("not taken again", extra=_about(action) | {"cause": str(problem)})
        return problem

    async def _bump(self, watch: _Watch, look: _Look | None, *, is_cheap: bool) -> None:
        """Replace the newest attempt by one with higher fees, unless they exceed a limit, or no
        block was made since it was priced: then only a node that refuses it as too cheap counts.
        """
        try:
            block, tip = await self._rpc.try_batch(MARKET)
            market, height = market_fees(block, tip), from_hex(member(block, "number"))
        except (ChainUnreachable, RpcError) as error:
            logger.debug("no fees", extra={"cause": str(error)})
            return
        has_waited = watch.priced_at is not None and height > watch.priced_at
        watch.priced_at = height if watch.priced_at is None else max(height, watch.priced_at)
        if not has_waited and not is_cheap:
            return
        attempts = {attempt.tx_hash: attempt for attempt in watch.action.attempts}
        # What the node refused does not count: it has the attempt before.
        base = attempts.get(look.known if look and look.known else "", watch.action.attempts[-1])
        replaced = UnsignedTransaction.from_raw(base.raw)
        limit = market.times(self._policy.most_of_market)
        if replaced.fees.max_wei < market.max_wei:
            # It may never be mined, and nodes demand a higher tip, too, although the market's fell.
            limit = limit.at_least(replaced.fees.times(MIN_BUMP))
        limit = limit.at_most(self._most)
        fees = replaced.fees.times(self._policy.bump_factor).at_least(market).at_most(limit)
        if not fees.can_replace(replaced.fees):
            extra = _about(watch.action) | {"most": f"{limit.max_wei} wei per gas"}
            logger.warning("a transaction pays the most it may", extra=extra)
            await self._send_again(watch.action)
            return
        dearer = replace(replaced, fees=fees).signed(self._key)
        if dearer.tx_hash not in attempts:
            watch.action = await self._journal.add_attempt(watch.action, dearer)
        problem = await self._send_raw(dearer)
        if problem is None:
            self._tell_sent(dearer)
        extra = _about(watch.action) | {"cause": str(problem) if problem else "slow"}
        logger.info("transaction sent again with higher fees", extra=extra)

    async def _send_raw(self, signed: SignedTransaction) -> RpcError | None:
        """Send a journaled transaction; return why it was refused, if it was."""
        try:
            await self._rpc.call("eth_sendRawTransaction", hex0x(signed.raw))
        except ChainUnreachable:
            # It may have arrived: watching will show, and send it again if not.
            logger.warning("sent without an answer", extra={"tx": signed.tx_hash})
        except RpcError as error:
            return error
        except asyncio.CancelledError:
            self._tell_sent(signed)
            raise
        return None

    def _tell_sent(self, signed: SignedTransaction) -> None:
        tell = TELL_SENT.get()
        if tell is not None and not self._journal.is_kept:
            tell(signed.tx_hash)

    # ---------------------------------------------------------------------- note

    async def _note_mined(self, watch: _Watch, receipt: RawReceipt) -> RawReceipt:
        inclusion = Inclusion(
            receipt["transactionHash"], from_hex(receipt["blockNumber"]), receipt["blockHash"]
        )
        state = ActionState.MINED if _has_succeeded(receipt) else ActionState.REVERTED
        if (watch.action.state, watch.action.inclusion) != (state, inclusion):
            watch.action = await self._journal.resolve(watch.action, state, inclusion)
        return receipt

    async def _is_replaced(self, watch: _Watch, look: _Look) -> bool:
        """Give up an action whose nonce another transaction used, and return whether it did; raises
        if the action was mined before.
        """
        inclusion = watch.action.inclusion
        if inclusion is not None:
            block = await self._rpc.call("eth_getBlockByNumber", hex(inclusion.block_number), False)
            if block is not None and member(block, "hash") == inclusion.block_hash:
                raise ChainError(
                    f"transaction {inclusion.tx_hash} was mined in block {inclusion.block_number}, "
                    "but the RPC endpoint does not serve its receipt",
                    hint="use an endpoint that keeps older receipts",
                )
        if look.known:
            return False
        logger.warning("another transaction used the nonce", extra=_about(watch.action))
        watch.action = await self._journal.resolve(watch.action, ActionState.REPLACED)
        return True


def _explained(error: RpcError) -> ChainError:
    """Return the explained error: a decoded revert, or not enough money for gas."""
    if is_revert(error):
        return decode_revert(error.data)
    if "insufficient funds" in str(error).lower():
        error.hint = "the account cannot pay for gas: send it some of the chain's coin"
    return error


def _hashes_of(action: Action) -> list[str]:
    """Return the hashes of the action's attempts, newest last."""
    attempts = [attempt.tx_hash for attempt in action.attempts]
    return attempts or ([action.inclusion.tx_hash] if action.inclusion else [])


def _checked(receipt: Any, tx: str) -> RawReceipt | None:
    """Return a receipt after checking its members; raises ChainUnreachable."""
    if receipt is None:
        return None
    for name in ("status", "blockNumber"):
        from_hex(member(receipt, name))
    hash_from_hex(member(receipt, "blockHash"))
    if member(receipt, "transactionHash") != tx or not isinstance(member(receipt, "logs"), list):
        raise garbled(f"the receipt of {tx} is another's")
    checked: RawReceipt = receipt
    return checked


def _has_succeeded(receipt: RawReceipt) -> bool:
    """Return whether a mined transaction succeeded."""
    return from_hex(receipt["status"]) == 1


def _about(action: Action, receipt: RawReceipt | None = None) -> dict[str, Any]:
    """Return the log fields of an action, without the raw transaction."""
    fields = {"label": action.label, "nonce": action.nonce, "tx": _hashes_of(action)[-1]}
    return fields if receipt is None else fields | {"has_succeeded": _has_succeeded(receipt)}
