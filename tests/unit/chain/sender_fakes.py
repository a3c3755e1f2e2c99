"""A node with a transaction pool, in memory, for the tests of the sender."""

import asyncio
from collections.abc import Callable
from typing import Any

from chain_fakes import FakeNode, address
from eth_abi.abi import encode
from eth_account import Account
from eth_account.typed_transactions.typed_transaction import TypedTransaction
from hexbytes import HexBytes

from muster.chain import SendJournal, SendPolicy, TransactionSender
from muster.chain.rpc import Rpc
from muster.protocol.eip712 import address_of
from muster.protocol.encoding import keccak
from muster.protocol.errors import RpcError

KEY = bytes([1]) * 32
TO = address(5)
POLICY = SendPolicy(bump_after_s=10, give_up_after_s=60)
REVERT = keccak(b"LedgerPaused(uint64)")[:4] + encode(["uint64"], [7])


class Pool(FakeNode):
    """A node with a transaction pool, and a block each time that a sender waits.

    It mines transactions at once, unless `auto` is false, and no block while it `stands_still`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[dict[str, Any]] = []
        self.waiting: dict[str, dict[str, str]] = {}
        self.mined: dict[str, dict[str, Any]] = {}
        self.confirmed = 0
        self.auto = True
        self.stands_still = False
        self.status = 1
        self.refusals: list[RpcError] = []
        self.now = 0.0
        self.methods |= {
            "eth_estimateGas": lambda _call, _block: hex(100_000),
            "eth_getTransactionCount": lambda _account, _block: hex(self.confirmed),
            "eth_maxPriorityFeePerGas": lambda: hex(10**9),
            "eth_sendRawTransaction": self._send,
            "eth_getTransactionReceipt": lambda tx: self.mined.get(tx),
            "eth_getTransactionByHash": lambda tx: self.waiting.get(tx) or self.mined.get(tx),
            "eth_call": self._call,
        }

    def _send(self, raw: str) -> str:
        if self.refusals:
            raise self.refusals.pop(0)
        transaction = decoded(raw)
        if transaction["nonce"] < self.confirmed:
            raise RpcError("nonce too low", code=-32000)
        self.sent.append(transaction)
        self.waiting[str(transaction["hash"])] = {"hash": str(transaction["hash"])}
        if self.auto:
            self.confirm(transaction)
        return str(transaction["hash"])

    def confirm(self, transaction: dict[str, Any]) -> None:
        self.confirmed = transaction["nonce"] + 1
        self.mined[transaction["hash"]] = {
            "status": hex(self.status),
            "transactionHash": transaction["hash"],
            "blockNumber": "0x1",
            "blockHash": "0x" + "1b" * 32,
            "logs": [],
        }

    def _call(self, _call: Any, _block: str) -> str:
        raise RpcError("execution reverted", code=3, data=REVERT)

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        if not self.stands_still:
            self.mine()
        await asyncio.sleep(0)

    def sender(
        self,
        policy: SendPolicy = POLICY,
        journal: SendJournal | None = None,
        rpc: Rpc | None = None,
    ) -> TransactionSender:
        return TransactionSender(
            *(rpc or self.rpc, KEY, 31337),
            journal=journal,
            policy=policy,
            clock=lambda: self.now,
            sleep=self.sleep,
        )


def decoded(raw: str) -> dict[str, Any]:
    """Return the fields of a signed transaction; its signature must be the key's."""
    data = HexBytes(raw)
    assert Account.recover_transaction(data) == address_of(KEY)
    fields = TypedTransaction.from_bytes(data).as_dict()
    return {**fields, "hash": "0x" + keccak(bytes(data)).hex()}


async def until(condition: Callable[[], bool], *tasks: asyncio.Task[Any]) -> None:
    """Let other tasks run until a condition is true; raises the error of a failed task."""
    for _ in range(20_000):
        if condition():
            return
        for task in tasks:
            if task.done():
                task.result()
        await asyncio.sleep(0)
    raise AssertionError("it did not happen")
