"""How long the chain's events take to become records.

    make bench-index

 1. A real Anvil gets the contracts, and 100,000 deposits into the stake vault, made by 1,000 owners
    through a contract that repeats a call: so every event is one that the real vault emitted.
 2. `EventReader` reads them all by `eth_getLogs` in ranges, verifies that the head still stands,
    decodes them and `ChainView` takes them in, from nothing, three times. Wall time counts: it
    includes what Anvil takes to answer. CPU time is that of this process alone.
 3. The reference is web3.py, its documented way: `contract.events.Deposited.get_logs` in ranges of
    the same length, without making anything of the events. It reads a share of the blocks, once.

Writes results/index.json.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import machine, print_table, write

from muster.chain import (
    Anvil,
    Chain,
    ChainView,
    DeployParameters,
    EventReader,
    apply_poll,
    deploy_contracts,
)
from muster.chain.abi import contract_abi
from muster.chain.rpc import Rpc, from_hex
from muster.protocol.eip712 import address_of
from muster.protocol.encoding import hex0x
from muster.protocol.ids import Address, to_address

HERE = Path(__file__).parent
REFERENCE = [str(HERE / ".envs/web3/bin/python"), "-P", str(HERE / "index_reference.py")]
EVENTS = 100_000
OWNERS = 1_000
PER_OWNER = EVENTS // OWNERS
REFERENCE_SHARE = 10
"""The reference reads one of so many owners' deposits: all of them would take minutes."""
ROUNDS = 3
KEY = Anvil.key(0)

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
    """One reading of all events."""

    wall_s: float
    cpu_s: float


async def main() -> None:
    """Measure, print and write."""
    async with Anvil(block_time_s=1000) as anvil:
        deployment = await deploy_contracts(anvil.rpc_url, KEY, DeployParameters())
        async with await Chain.connect(anvil.rpc_url, deployment, key=KEY) as chain:
            began = time.perf_counter()
            blocks = await deposit_all(chain)
            print(f"{EVENTS} deposits made in {time.perf_counter() - began:.0f} s")
            readings = [await read_all(chain) for _ in range(ROUNDS)]
        vault = deployment.contracts["StakeVault"]
        reference = await read_with_web3(anvil.rpc_url, vault, *blocks)
    report(readings, reference)


async def deposit_all(chain: Chain) -> tuple[int, int]:
    """Have every owner's deposits made; return the blocks of the first and last transaction."""
    repeater = await deploy_repeater(chain)
    vault = chain.deployment.contracts["StakeVault"]
    await chain.token.faucet(repeater, EVENTS)
    approve = contract_abi("MusterToken").functions["approve"].encode([vault, EVENTS])
    token = chain.deployment.contracts["MusterToken"]
    await send(chain.rpc, [transaction(repeater, repeated(token, approve, 1))])
    deposit = contract_abi("StakeVault").functions["deposit"]
    transactions = [
        repeated(vault, deposit.encode([owner(number), 1]), PER_OWNER) for number in range(OWNERS)
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
    async with asyncio.timeout(60):
        while None in (
            receipts := await rpc.batch([("eth_getTransactionReceipt", [tx]) for tx in hashes])
        ):
            # What does not fit into one block waits for the next.
            await rpc.call("evm_mine")
    assert {receipt["status"] for receipt in receipts} == {"0x1"}


async def deploy_repeater(chain: Chain) -> Address:
    """Put the repeater's code on the chain."""
    size = len(REPEATER)
    creation = bytes([0x60, size, 0x80, 0x60, 0x09, 0x5F, 0x39, 0x5F, 0xF3]) + REPEATER
    assert chain.sender is not None
    receipt = await chain.sender.send(None, creation)
    return to_address(receipt["contractAddress"])


async def read_all(chain: Chain) -> Reading:
    """Read every event of the chain into a fresh view."""
    wall, cpu = time.perf_counter(), time.process_time()
    view = ChainView()
    apply_poll(view, await EventReader(chain).poll())
    reading = Reading(time.perf_counter() - wall, time.process_time() - cpu)
    assert len(view.stakes) == OWNERS
    assert {stake.active_wei for stake in view.stakes.values()} == {PER_OWNER}
    assert view.contradictions == []
    return reading


async def read_with_web3(rpc_url: str, vault: Address, first: int, last: int) -> dict[str, float]:
    """Return how many events web3.py read in the first share of the blocks, and what it took."""
    last = first + (last - first + 1) // REFERENCE_SHARE - 1
    abi = HERE.parent / "protocol/muster/chain/artifacts/StakeVault.json"
    command = [*REFERENCE, rpc_url, vault, str(abi), str(first), str(last)]
    done = await asyncio.to_thread(
        subprocess.run, command, check=True, capture_output=True, text=True, timeout=600
    )
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def report(readings: list[Reading], reference: dict[str, float]) -> None:
    """Print the table and write the figures."""
    wall_s = statistics.median(r.wall_s for r in readings)
    cpu_s = statistics.median(r.cpu_s for r in readings)
    factor = EVENTS / reference["events"]
    rows = [
        ("Muster: read, decoded, in the view", f"{EVENTS}", f"{wall_s:.2f}", f"{cpu_s:.2f}"),
        (
            "web3.py: read and decoded",
            f"{reference['events']:.0f}",
            f"{reference['wall_s']:.2f}",
            f"{reference['cpu_s']:.2f}",
        ),
    ]
    print_table("Events into records", ("", "events", "wall s", "CPU s"), rows)
    ratio = reference["cpu_s"] * factor / cpu_s
    print(f"web3.py takes {ratio:.1f} times the CPU per event")
    metrics = {"index_100k_s": wall_s, "index_web3_cpu_ratio": ratio}
    detail = {"readings": [vars(r) for r in readings], "web3": reference}
    write("index", metrics, detail, measured_on=machine())


if __name__ == "__main__":
    asyncio.run(main())
