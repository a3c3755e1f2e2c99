"""Time to index the chain's events.

    make bench-index

 1. A real Anvil gets the contracts, and 100,000 deposits into the stake vault, made by 1,000 owners
    through a contract that repeats a call, so that the real vault emits every event.
 2. `EventReader` reads them all by `eth_getLogs` in ranges, verifies that the head still stands,
    decodes them and `ChainView` takes them in, from nothing, three times. `index_100k_s` is the
    median CPU time of this process and of Anvil together: they take turns, so this is the wall time
    on an idle machine, and does not depend on other load. Wall time is also reported.
 3. The reference is web3.py, its documented way: `contract.events.Deposited.get_logs` in ranges of
    the same length, without processing the events. It reads a share of the blocks, once.

Writes results/index.json.
"""

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import psutil
from benchmarks.report import HERE, machine, print_table, write

from muster.app.anvil import Anvil
from muster.chain import Chain, ChainView, EventReader, apply_poll
from muster.chain.abi import contract_abi
from muster.chain.rpc import Rpc, from_hex
from muster.deploy import DeployParameters, deploy_contracts
from muster.protocol.eip712 import address_of
from muster.protocol.encoding import hex0x
from muster.protocol.ids import Address, RunId, to_address

REFERENCE = [sys.executable, "-m", "benchmarks.chain.index_reference"]
EVENTS = 100_000
OWNERS = 1_000
PER_OWNER = EVENTS // OWNERS
REFERENCE_SHARE = 10
"""The reference reads the deposits of one owner in this many: all would take minutes."""
ROUNDS = 3
KEY = Anvil.key(0)
RUN = RunId(1)
"""Run of the deposits; it need not exist."""

# calldata: how often, whom, then what to call it with; a call that fails fails all of them.
REPEATER = bytes.fromhex(
    "60403603"  # the payload's length
    "8060405f37"  # to memory
    "5f35"  # the count
    "5b8015602657"  # loop: leave at 0
    "5f5f835f5f6020355af1"  # call
    "15602857"  # stop when it fails
    "60019003"  # one less
    "600b56"  # again
    "5b00"  # end
    "5b5f5ffd"  # fail
)


@dataclass
class Reading:
    """What it took to read events, in seconds."""

    events: int
    wall_s: float
    cpu_s: float
    """Of the process that reads."""
    anvil_cpu_s: float
    """Of the chain that answers it."""

    @property
    def total_cpu_s(self) -> float:
        """Of both."""
        return self.cpu_s + self.anvil_cpu_s


class Clock:
    """Wall and CPU time since it was made, of this process and of Anvil."""

    def __init__(self, anvil: Anvil) -> None:
        self._anvil = psutil.Process(anvil.pid)
        self._began = self._now()

    def reading(self, events: int) -> Reading:
        """Return what has passed."""
        passed = (now - began for now, began in zip(self._now(), self._began, strict=True))
        return Reading(events, *passed)

    def _now(self) -> tuple[float, float, float]:
        of_anvil = self._anvil.cpu_times()
        return time.perf_counter(), time.process_time(), of_anvil.user + of_anvil.system


async def main() -> None:
    """Measure, print and write."""
    async with Anvil(block_time_s=Anvil.STILL_S) as anvil:
        deployment = await deploy_contracts(anvil.rpc_url, KEY, DeployParameters())
        async with await Chain.connect(anvil.rpc_url, deployment, key=KEY) as chain:
            began = time.perf_counter()
            blocks = await deposit_all(chain)
            print(f"{EVENTS} deposits made in {time.perf_counter() - began:.0f} s")
            readings = [await read_all(chain, anvil) for _ in range(ROUNDS)]
        vault = deployment.contracts["StakeVault"]
        reference = await read_with_web3(anvil, vault, *blocks)
    report(readings, reference)


async def deposit_all(chain: Chain) -> tuple[int, int]:
    """Make every owner's deposits; return the blocks of the first and last transaction."""
    repeater = await deploy_repeater(chain)
    vault = chain.deployment.contracts["StakeVault"]
    await chain.token.faucet(repeater, EVENTS)
    approve = contract_abi("MusterToken").functions["approve"].encode([vault, EVENTS])
    token = chain.deployment.contracts["MusterToken"]
    await send(chain.rpc, [transaction(repeater, repeated(token, approve, 1))])
    deposit = contract_abi("StakeVault").functions["deposit"]
    transactions = [
        repeated(vault, deposit.encode([RUN, owner(number), 1]), PER_OWNER)
        for number in range(OWNERS)
    ]
    first = from_hex(await chain.rpc.call("eth_blockNumber")) + 1
    for start in range(0, OWNERS, 20):
        batch = [transaction(repeater, data) for data in transactions[start : start + 20]]
        await send(chain.rpc, batch)
    return first, from_hex(await chain.rpc.call("eth_blockNumber"))


def owner(number: int) -> Address:
    """Return the address of an owner."""
    return to_address((1 + number).to_bytes(20, "big"))


def repeated(target: Address, payload: bytes, times: int) -> bytes:
    """Return the call data that makes the repeater repeat a call."""
    return times.to_bytes(32, "big") + bytes.fromhex(target[2:]).rjust(32, b"\0") + payload


def transaction(to: Address, data: bytes) -> tuple[str, list[Any]]:
    """Return the request that has Anvil sign and send a transaction."""
    fields = {"from": address_of(KEY), "to": to, "data": hex0x(data), "gas": hex(15_000_000)}
    return "eth_sendTransaction", [fields]


async def send(rpc: Rpc, requests: list[tuple[str, list[Any]]]) -> None:
    """Send transactions and check that all succeeded."""
    count = from_hex(await rpc.call("eth_getTransactionCount", address_of(KEY), "latest"))
    for nonce, (_, (fields,)) in enumerate(requests, count):
        fields["nonce"] = hex(nonce)
    hashes = await rpc.batch(requests)
    async with asyncio.timeout(300):
        while None in (
            receipts := await rpc.batch([("eth_getTransactionReceipt", [tx]) for tx in hashes])
        ):
            # Transactions that do not fit into one block wait for the next.
            await rpc.call("evm_mine")
    assert {receipt["status"] for receipt in receipts} == {"0x1"}


async def deploy_repeater(chain: Chain) -> Address:
    """Put the repeater's code on the chain."""
    size = len(REPEATER)
    creation = bytes([0x60, size, 0x80, 0x60, 0x09, 0x5F, 0x39, 0x5F, 0xF3]) + REPEATER
    assert chain.sender is not None
    receipt = await chain.sender.send(None, creation)
    return to_address(receipt["contractAddress"])


async def read_all(chain: Chain, anvil: Anvil) -> Reading:
    """Read every event of the chain into a fresh view."""
    clock, view = Clock(anvil), ChainView()
    apply_poll(view, await EventReader(chain).poll())
    reading = clock.reading(EVENTS)
    assert len(view.stakes) == OWNERS
    assert {stake.active_wei for stake in view.stakes.values()} == {PER_OWNER}
    assert view.contradictions == []
    return reading


async def read_with_web3(anvil: Anvil, vault: Address, first: int, last: int) -> Reading:
    """Have web3.py read the first share of the blocks."""
    last = first + (last - first + 1) // REFERENCE_SHARE - 1
    abi = HERE.parent / "core/muster/chain/artifacts/StakeVault.json"
    command = [*REFERENCE, anvil.rpc_url, vault, str(abi), str(first), str(last)]
    clock = Clock(anvil)
    done = await asyncio.to_thread(
        subprocess.run, command, check=True, capture_output=True, text=True, timeout=600
    )
    measured = json.loads(done.stdout)
    anvil_cpu_s = clock.reading(0).anvil_cpu_s
    return Reading(measured["events"], measured["wall_s"], measured["cpu_s"], anvil_cpu_s)


def report(readings: list[Reading], reference: Reading) -> None:
    """Print the table and write the figures."""
    ours = sorted(readings, key=lambda reading: reading.total_cpu_s)[len(readings) // 2]
    ratio = reference.total_cpu_s / reference.events / (ours.total_cpu_s / ours.events)
    names = ("Muster: read, decoded, in a view", "web3.py: read and decoded")
    rows = [
        (name, str(r.events), *(f"{s:.2f}" for s in (r.cpu_s, r.anvil_cpu_s, r.wall_s)))
        for name, r in zip(names, (ours, reference), strict=True)
    ]
    header = ("", "events", "CPU s", "Anvil CPU s", "wall s")
    print_table("Events of a real chain into records", header, rows)
    print(f"per event, web3.py takes {ratio:.1f} times the CPU, Anvil's included")
    metrics = {"index_100k_s": ours.total_cpu_s, "index_web3_ratio": ratio}
    detail = {"readings": [vars(r) for r in readings], "web3": vars(reference)}
    write("index", metrics, detail, measured_on=machine())


if __name__ == "__main__":
    asyncio.run(main())
