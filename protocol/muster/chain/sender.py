"""Sends transactions for one key: the only writer of its nonces.

One transaction goes: estimate (which decodes a revert before anything is paid) → sign with the next
nonce → send → poll for the receipt, with higher fees when it takes long → check the status.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from eth_account import Account

from muster.chain.reverts import decode_revert
from muster.chain.rpc import Rpc, from_hex, is_revert
from muster.protocol.eip712 import address_of
from muster.protocol.encoding import hex0x
from muster.protocol.errors import ChainError, ChainUnreachable, RpcError, TransactionLost
from muster.protocol.ids import Address

logger = logging.getLogger(__name__)

_STALE_NONCE = ("nonce too low", "invalid nonce", "nonce is too low", "old nonce")
_ALREADY_SENT = ("already known", "already imported", "already in mempool")
_UNDERPRICED = ("underpriced", "max fee per gas less than block base fee", "fee too low")


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
    """By how much; nodes demand at least 1.1."""
    give_up_after_s: float = 120.0
    """A transaction not mined after this time is lost."""
    send_attempts: int = 5
    """Tries to find the right nonce."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A transaction without its signature."""

    fields: dict[str, Any]
    """What is signed."""

    def with_fees(self, factor: float) -> _Prepared:
        """Return the same transaction with higher fees, rounded up."""
        fees = ("maxFeePerGas", "maxPriorityFeePerGas")
        raised = {name: int(self.fields[name] * factor) + 1 for name in fees}
        return _Prepared({**self.fields, **raised})


class TransactionSender:
    """Sends the transactions of one key, in order, from any number of tasks."""

    def __init__(
        self,
        rpc: Rpc,
        key: bytes,
        chain_id: int,
        *,
        policy: SendPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.address: Address = address_of(key)
        self._rpc = rpc
        self._key = key
        self._chain_id = chain_id
        self._policy = policy or SendPolicy()
        self._clock = clock
        self._sleep = sleep
        self._lock = asyncio.Lock()
        self._next_nonce: int | None = None
        self._in_flight = 0

    async def send(self, to: Address | None, data: bytes) -> Mapping[str, Any]:
        """Return the receipt of a call (or a deployment without `to`) that succeeded.

        Raises ContractRevert when it reverts, TransactionLost when it is not mined in time, and
        ChainUnreachable or RpcError when it could not be sent.
        """
        call = {"from": self.address, "data": hex0x(data), **({"to": to} if to else {})}
        # One at a time: nonces must be used in order, and each estimate sees what was sent before.
        async with self._lock:
            prepared, tx_hash = await self._submit(call)
            self._in_flight += 1
        try:
            receipt = await self._mined(prepared, tx_hash)
        except BaseException:
            # Whether it will be mined is unknown, so is the next nonce.
            self._next_nonce = None
            raise
        finally:
            self._in_flight -= 1
        if from_hex(receipt["status"]) != 1:
            raise await self._why_reverted(call, receipt)
        return receipt

    # ------------------------------------------------------------------ submit

    async def _submit(self, call: dict[str, Any]) -> tuple[_Prepared, str]:
        fee_factor = 1.0
        for attempt in range(1, self._policy.send_attempts + 1):
            prepared = (await self._prepare(call)).with_fees(fee_factor)
            tx_hash, problem = await self._send_raw(prepared)
            if problem is None:
                self._next_nonce = prepared.fields["nonce"] + 1
                return prepared, tx_hash
            self._next_nonce = None
            if not _matches(problem, _STALE_NONCE + _UNDERPRICED):
                raise _explained(problem)
            # Another writer used the nonce, or the endpoint lags behind what was mined.
            logger.info("sending again", extra={"attempt": attempt, "cause": str(problem)})
            fee_factor *= self._policy.bump_factor
            await self._sleep(self._policy.first_poll_s * 2**attempt)
        raise ChainError(
            f"no transaction of {self.address} was taken in {self._policy.send_attempts} tries",
            hint="does another program send with the same key?",
        )

    async def _prepare(self, call: dict[str, Any]) -> _Prepared:
        gas, nonce, block, tip = await self._rpc.try_batch(
            [
                ("eth_estimateGas", [call, "pending"]),
                ("eth_getTransactionCount", [self.address, "pending"]),
                ("eth_getBlockByNumber", ["latest", False]),
                ("eth_maxPriorityFeePerGas", []),
            ]
        )
        if isinstance(gas, RpcError):
            raise _explained(gas)
        for answer in (nonce, block):
            if isinstance(answer, RpcError):
                raise answer
        # Endpoints without the method take any tip.
        tip_wei = 10**9 if isinstance(tip, RpcError) else from_hex(tip)
        base_fee = from_hex(block.get("baseFeePerGas", "0x0"))
        to = {"to": call["to"]} if "to" in call else {}
        return _Prepared(
            {
                "type": 2,
                "chainId": self._chain_id,
                "nonce": self._nonce(from_hex(nonce)),
                "gas": int(from_hex(gas) * self._policy.gas_margin),
                # Twice the base fee outlasts six full blocks in a row.
                "maxFeePerGas": 2 * base_fee + tip_wei,
                "maxPriorityFeePerGas": tip_wei,
                "value": 0,
                "data": call["data"],
                **to,
            }
        )

    def _nonce(self, on_chain: int) -> int:
        """Return the next nonce: ours while transactions are in flight, else the chain's."""
        if self._next_nonce is None or self._in_flight == 0:
            return on_chain
        return max(self._next_nonce, on_chain)

    async def _send_raw(self, prepared: _Prepared) -> tuple[str, RpcError | None]:
        """Return the hash and why the endpoint refused it, if it did."""
        signed = Account.sign_transaction(prepared.fields, self._key)
        tx_hash = hex0x(signed.hash)
        try:
            await self._rpc.call("eth_sendRawTransaction", hex0x(signed.raw_transaction))
        except ChainUnreachable:
            # It may have arrived: the receipt will tell, and a bump sends it again.
            logger.warning("sent without an answer", extra={"tx": tx_hash})
        except RpcError as error:
            if _matches(error, _ALREADY_SENT):
                return tx_hash, None
            if _matches(error, _STALE_NONCE) and await self._receipt(tx_hash):
                return tx_hash, None
            return tx_hash, error
        return tx_hash, None

    # -------------------------------------------------------------------- wait

    async def _mined(self, prepared: _Prepared, tx_hash: str) -> Mapping[str, Any]:
        """Return the receipt of the transaction or of a dearer version of it."""
        policy, started = self._policy, self._clock()
        bumped_at, pause, hashes = started, policy.first_poll_s, [tx_hash]
        while True:
            for candidate in hashes:
                if receipt := await self._receipt(candidate):
                    return receipt
            now = self._clock()
            if now - started >= policy.give_up_after_s:
                raise TransactionLost(
                    f"transaction {hashes[-1]} was not mined within {policy.give_up_after_s:g} s",
                    tx=hashes[-1],
                    hint="it may still be: look it up before doing the same again",
                )
            if now - bumped_at >= policy.bump_after_s:
                bumped_at, prepared = now, prepared.with_fees(policy.bump_factor)
                hashes.append(await self._bump(prepared))
            await self._sleep(pause)
            pause = min(pause * 1.5, policy.longest_poll_s)

    async def _bump(self, prepared: _Prepared) -> str:
        tx_hash, problem = await self._send_raw(prepared)
        extra = {"tx": tx_hash, "cause": str(problem) if problem else "slow"}
        logger.info("transaction sent again with higher fees", extra=extra)
        return tx_hash

    async def _receipt(self, tx_hash: str) -> Mapping[str, Any] | None:
        try:
            receipt: Mapping[str, Any] | None = await self._rpc.call(
                "eth_getTransactionReceipt", tx_hash
            )
        except (ChainUnreachable, RpcError) as error:
            # The transaction is out; only the deadline ends the wait.
            logger.debug("no receipt", extra={"tx": tx_hash, "cause": str(error)})
            return None
        return receipt

    async def _why_reverted(self, call: dict[str, Any], receipt: Mapping[str, Any]) -> ChainError:
        """Return why a mined transaction failed, by calling it again on the state after it."""
        tx_hash = receipt["transactionHash"]
        try:
            await self._rpc.call("eth_call", call, hex(from_hex(receipt["blockNumber"])))
        except RpcError as error:
            return decode_revert(error.data, tx=tx_hash)
        except ChainUnreachable:
            pass
        return decode_revert(b"", tx=tx_hash)


def _matches(error: RpcError, phrases: tuple[str, ...]) -> bool:
    text = str(error).lower()
    return any(phrase in text for phrase in phrases)


def _explained(error: RpcError) -> ChainError:
    """Return the error that says what happened: a decoded revert, or missing gas money."""
    if is_revert(error):
        return decode_revert(error.data)
    if "insufficient funds" in str(error).lower():
        error.hint = "the account cannot pay for gas: send it some of the chain's coin"
    return error
