"""Sending numbered transactions to a real Anvil: by hand, and from a process that can be killed.

An action is a transaction to an account without code whose data is its number: what happened, how
often and in which order can be read off the blocks, and depends on no contract.

Run as a program, this file is the process: each line on its standard input makes it fork a child
that sends a series, so that a kill costs a fork and not the start of an interpreter.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import traceback
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from muster.app.anvil import Anvil
from muster.chain import SendJournal, SendPolicy, TransactionSender
from muster.chain.rpc import Rpc, from_hex
from muster.protocol.eip712 import address_of
from muster.protocol.ids import to_address

KEY = Anvil.key(1)
ACCOUNT = address_of(KEY)
TARGET = to_address(b"\x77" * 20)
CHAIN_ID = 31337
POLICY = SendPolicy(
    first_poll_s=0.002,
    longest_poll_s=0.02,
    bump_after_s=0.15,
    give_up_after_s=20,
    send_attempts=8,
    replaced_after_s=0.05,
)


@contextlib.asynccontextmanager
async def manual_anvil() -> AsyncIterator[tuple[Anvil, Rpc]]:
    """A chain that mines when it is told to."""
    async with Anvil(block_time_s=Anvil.STILL_S) as anvil, Rpc(anvil.rpc_url) as rpc:
        # Automine can be switched off only from on, not from mixed mining.
        await rpc.call("evm_setAutomine", True)
        await rpc.call("evm_setAutomine", False)
        yield anvil, rpc


async def open_sender(
    rpc: Rpc, path: Path | None = None, policy: SendPolicy = POLICY
) -> TransactionSender:
    """Return the account's sender over a journal."""
    genesis = (await rpc.call("eth_getBlockByNumber", "0x0", False))["hash"]
    journal = SendJournal.of(path, chain_id=CHAIN_ID, genesis=genesis, account=ACCOUNT)
    return TransactionSender(rpc, KEY, CHAIN_ID, journal=journal, policy=policy)


def data_of(number: int) -> bytes:
    """Return the data of an action."""
    return b"act:" + number.to_bytes(4, "big")


async def act(sender: TransactionSender, number: int) -> str:
    """Do an action, once; return its transaction."""
    receipt = await sender.send(TARGET, data_of(number), label=f"action {number}")
    return str(receipt["transactionHash"])


async def actions(rpc: Rpc) -> list[int]:
    """Return the numbers of all actions on the chain, in the order in which they were mined."""
    head = from_hex(await rpc.call("eth_blockNumber"))
    blocks = await rpc.batch(
        [("eth_getBlockByNumber", [hex(number), True]) for number in range(head + 1)]
    )
    mined = [tx for block in blocks for tx in block["transactions"]]
    ours = [tx for tx in mined if to_address(tx["from"]) == ACCOUNT]
    assert [from_hex(tx["nonce"]) for tx in ours] == list(range(len(ours)))
    return [from_hex(tx["input"]) & 0xFFFFFFFF for tx in ours]


async def pooled(rpc: Rpc) -> dict[int, str]:
    """Return the account's transactions in the node's pool, by nonce."""
    content = await rpc.call("txpool_content")
    found: dict[int, str] = {}
    for part in ("pending", "queued"):
        for account, transactions in content[part].items():
            if to_address(account) == ACCOUNT:
                found |= {int(nonce): tx["hash"] for nonce, tx in transactions.items()}
    return found


async def until(condition: Callable[[], Any]) -> None:
    """Wait until an awaited condition holds, three minutes at most."""
    async with asyncio.timeout(180):
        while not await condition():
            await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def mining(rpc: Rpc, *, pause_s: float = 0.005) -> AsyncIterator[None]:
    """Mine blocks all the time."""

    async def mine() -> None:
        while True:
            await rpc.call("evm_mine")
            await asyncio.sleep(pause_s)

    task = asyncio.create_task(mine())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


# ------------------------------------------------------------------------ victim


@dataclass(frozen=True)
class Order:
    """The work of a child."""

    first: int
    """The first action; it may have happened before."""
    last: int
    """The action after the last."""
    dies_at: int = 0
    """The request at which it kills itself; 0 for never."""
    dies_after: bool = False
    """Whether it dies after the answer rather than before the request."""


class Victims:
    """The process that forks children; use as an async context manager."""

    def __init__(self, rpc_url: str, journal: Path) -> None:
        self._arguments = (rpc_url, str(journal))
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Victims:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, __file__, *self._arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()
        await self._process.communicate()  # until its pipe is closed, too

    async def start(self, order: Order) -> int:
        """Fork a child; return its process id."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(vars(order)).encode() + b"\n")
        return await self._answer()

    async def ended(self) -> int:
        """Return how the child ended: 0, or less the signal that killed it."""
        return await self._answer()

    async def kill(self, pid: int) -> int:
        """Kill the child, if it lives still, and return how it ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return await self.ended()

    async def _answer(self) -> int:
        assert self._process is not None
        assert self._process.stdout is not None
        async with asyncio.timeout(180):
            return int(await self._process.stdout.readline())


class _Mortal:
    """A transport that kills its process at one request."""

    def __init__(self, url: str, order: Order) -> None:
        self._url = url
        self._order = order
        self._requests = 0
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, body: bytes) -> bytes:
        self._session = self._session or aiohttp.ClientSession()
        self._requests += 1
        is_last = self._requests == self._order.dies_at
        if is_last and not self._order.dies_after:
            os.kill(os.getpid(), signal.SIGKILL)
        headers = {"content-type": "application/json"}
        async with self._session.post(self._url, data=body, headers=headers) as response:
            answer = await response.read()
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


async def _send_series(url: str, journal: Path, order: Order) -> None:
    """Do the actions in order, several at a time."""
    transport = _Mortal(url, order)
    sender = await open_sender(Rpc(url, post=transport), journal)
    width = asyncio.Semaphore(random.Random(order.first).randint(1, 4))

    async def one(number: int) -> None:
        try:
            await act(sender, number)
        finally:
            width.release()

    async with asyncio.TaskGroup() as tasks:
        for number in range(order.first, order.last):
            await width.acquire()
            tasks.create_task(one(number))
    sender.close()
    await transport.close()


def _run_child(url: str, journal: Path, order: Order) -> None:
    try:
        asyncio.run(_send_series(url, journal, order))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _main(url: str, journal: str) -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _run_child(url, Path(journal), Order(**json.loads(line)))
        print(child, flush=True)  # noqa: T201
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)  # noqa: T201


if __name__ == "__main__":
    _main(*sys.argv[1:])
