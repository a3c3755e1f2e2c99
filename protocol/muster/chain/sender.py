"""Sends transactions for one key: the only writer of its nonces, and no action twice.

One transaction goes: settle what an earlier process left → estimate (which decodes a revert before
anything is paid) → sign with the next nonce → journal → send → watch until it is mined.

    killed before the journal has it     nothing was sent: the action did not happen
    killed after                         the next `send` or `recover` watches it first: mined, it is
                                         resolved; forgotten by the node, it is sent again as it is
    its block is taken back              the same: the account's count is below what was settled
    nobody mines it                      it is sent again with higher fees, up to a cap

While it is watched, whatever mined its nonce decides: one of its attempts, then it happened; none
of them, then it never will.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from muster.chain.outgoing import Fees, Refusal, Unsigned, refusal_of
from muster.chain.quantities import from_hex
from muster.chain.reverts import decode_revert
from muster.chain.rpc import Rpc, is_revert
from muster.chain.send_journal import Action, ActionState, SendJournal
from muster.chain.watching import (
    MARKET,
    Receipt,
    SendPolicy,
    Watch,
    Watcher,
    has_succeeded,
    market_fees,
)
from muster.protocol.eip712 import address_of
from muster.protocol.encoding import hex0x
from muster.protocol.errors import ChainError, ChainUnreachable, RpcError
from muster.protocol.ids import Address

logger = logging.getLogger(__name__)


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
        """Without a journal, what was sent is known for as long as this object lives."""
        self.address: Address = address_of(key)
        self._rpc = rpc
        self._key = key
        self._chain_id = chain_id
        self._journal = journal or SendJournal(None, self.address)
        self._policy = policy or SendPolicy()
        self._sleep = sleep
        self._submitting = asyncio.Lock()
        self._mined_in = 0
        self._watcher = Watcher(
            rpc, key, self.address, self._journal, self._policy, clock=clock, sleep=sleep
        )

    def with_journal(self, journal: SendJournal) -> TransactionSender:
        """Return a sender of the same key that journals elsewhere; this one is closed."""
        self.close()
        return TransactionSender(
            self._rpc, self._key, self._chain_id, journal=journal, policy=self._policy
        )

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()

    async def send(self, to: Address | None, data: bytes, *, label: str | None = None) -> Receipt:
        """Return the receipt of a call (or a deployment without `to`) that succeeded.

        A label names the action: while one of that name is waiting or has succeeded, nothing else
        is sent, and its receipt is returned, whatever the arguments are now. After a revert the
        label is free again.

        Raises ContractRevert when it reverts, TransactionLost when it is not mined in time,
        ChainUnreachable or RpcError when it could not be sent, StorageError when it could not be
        journaled and therefore was not sent.
        """
        for _ in range(self._policy.send_attempts):
            watch = await self._begin(to, data, label)
            try:
                receipt = await self._watcher.settle(watch)
            finally:
                self._watcher.leave(watch)
            if receipt is not None:
                return await self._succeeded(receipt, to, data)
        raise self._no_nonce()

    async def receipt_of(self, label: str) -> Receipt | None:
        """Return the receipt of the action of this name; None when it has not happened (yet)."""
        action = await self._journal.find(label)
        if action is None:
            return None
        look = await self._watcher.look(action)
        if look.receipt is None or not has_succeeded(look.receipt):
            return None
        return look.receipt

    async def pending_count(self) -> int:
        """Return how many actions were sent and are not settled."""
        return len(await self._journal.pending())

    async def recover(self) -> None:
        """Settle what earlier processes sent, in the order of its nonces; `send` does so too.

        Raises TransactionLost when one of them is not mined in time.
        """
        async with self._submitting:
            await self._reconcile()

    # ----------------------------------------------------------------- reconcile

    async def _reconcile(self) -> None:
        """Settle every action that no task waits for: left behind, or taken back by a reorg."""
        await self._reopen_reorganised()
        await self._watcher.settle_orphans()

    async def _reopen_reorganised(self) -> None:
        """Make pending what was settled in blocks that no longer stand."""
        undone, state = await self._watcher.taken_back(), ActionState.PENDING
        if any(not action.attempts for action in undone):
            # Deeper than what is kept: its nonce cannot be filled as it was, nor can those after it
            # be mined as they were. All of it is left to be done anew.
            undone, state = undone + await self._journal.pending(), ActionState.REPLACED
        await self._watcher.reopen(undone, state)

    # -------------------------------------------------------------------- submit

    async def _begin(self, to: Address | None, data: bytes, label: str | None) -> Watch:
        """Return the watched action of a label, or a new one that is on its way."""
        # One at a time: nonces must be used in order, and each estimate sees what was sent before.
        async with self._submitting:
            await self._reconcile()
            action = await self._journal.find(label) if label is not None else None
            if action is None:
                action = await self._submit(to, data, label)
            elif action.purpose != (purpose := _purpose(to, data)):
                raise ChainError(
                    f"the label {label!r} names a call of {action.purpose}, not of {purpose}",
                    hint="give every action a label of its own",
                )
            return self._watcher.enter(action)

    async def _submit(self, to: Address | None, data: bytes, label: str | None) -> Action:
        fee_factor = 1.0
        for attempt in range(1, self._policy.send_attempts + 1):
            unsigned = await self._prepare(to, data, fee_factor)
            signed = unsigned.signed(self._key)
            action = await self._journal.begin(label, unsigned.purpose, unsigned.nonce, signed)
            problem = await self._watcher.send_raw(signed)
            refusal = refusal_of(problem) if problem else None
            if problem is None or refusal in (Refusal.KNOWN, Refusal.NONCE_USED):
                # A used nonce may be this transaction's own, behind a lost answer: watching tells.
                return action
            await self._journal.resolve(action, ActionState.REFUSED)
            if refusal is Refusal.OTHER:
                raise _explained(problem)
            logger.info("sending again", extra={"attempt": attempt, "cause": str(problem)})
            if refusal is Refusal.FEE_TOO_LOW:
                fee_factor *= self._policy.bump_factor
            await self._sleep(self._policy.first_poll_s * 2**attempt)
        raise self._no_nonce()

    async def _prepare(self, to: Address | None, data: bytes, fee_factor: float) -> Unsigned:
        call = self._call(to, data)
        for attempt in range(1, self._policy.send_attempts + 1):
            gas, nonce, block, tip = await self._rpc.try_batch(
                [
                    ("eth_estimateGas", [call, "pending"]),
                    ("eth_getTransactionCount", [self.address, "pending"]),
                    *MARKET,
                ]
            )
            # A node that lags does not know what the call rests on.
            if not isinstance(gas, RpcError) or not self._is_behind(block):
                break
            await self._sleep(self._policy.first_poll_s * 2**attempt)
        if isinstance(gas, RpcError):
            raise _explained(gas)
        if isinstance(nonce, RpcError):
            raise nonce
        return Unsigned(
            chain_id=self._chain_id,
            nonce=await self._next_nonce(from_hex(nonce)),
            to=to,
            data=data,
            gas=int(from_hex(gas) * self._policy.gas_margin),
            fees=market_fees(block, tip).times(fee_factor).at_most(self._policy.highest_fee_wei),
        )

    def _is_behind(self, block: Any) -> bool:
        """Return whether a newest block is older than one with a transaction of ours."""
        is_block = isinstance(block, dict) and "number" in block
        return is_block and from_hex(block["number"]) < self._mined_in

    async def _next_nonce(self, on_chain: int) -> int:
        """Return the nonce after all that was sent; `on_chain` counts what the node waits with."""
        settled = await self._journal.settled_from(on_chain)
        used = [action.nonce for action in await self._journal.pending() + settled]
        return max([on_chain, *(nonce + 1 for nonce in used)])

    # ------------------------------------------------------------------- outcome

    async def _succeeded(self, receipt: Receipt, to: Address | None, data: bytes) -> Receipt:
        """Return a receipt that says so, else raise why not: the call again, on the state after."""
        if has_succeeded(receipt):
            self._mined_in = from_hex(receipt["blockNumber"])
            return receipt
        tx_hash = receipt["transactionHash"]
        try:
            await self._rpc.call("eth_call", self._call(to, data), receipt["blockNumber"])
        except RpcError as error:
            raise decode_revert(error.data, tx=tx_hash) from error
        except ChainUnreachable:
            pass
        raise decode_revert(b"", tx=tx_hash)

    def _call(self, to: Address | None, data: bytes) -> dict[str, Any]:
        return {"from": self.address, "data": hex0x(data), **({"to": to} if to else {})}

    def _no_nonce(self) -> ChainError:
        return ChainError(
            f"no transaction of {self.address} was taken in {self._policy.send_attempts} tries",
            hint="does another program send with the same key?",
        )


def _purpose(to: Address | None, data: bytes) -> str:
    return Unsigned(0, 0, to, data, 0, Fees(0, 0)).purpose


def _explained(error: RpcError) -> ChainError:
    """Return the error that says what happened: a decoded revert, or missing gas money."""
    if is_revert(error):
        return decode_revert(error.data)
    if "insufficient funds" in str(error).lower():
        error.hint = "the account cannot pay for gas: send it some of the chain's coin"
    return error
