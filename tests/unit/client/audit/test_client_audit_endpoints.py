"""What an audit keeps in memory of a long history: raw logs are packed, and blocks are proven some
at a time.
"""

from __future__ import annotations

import io
import json
import tracemalloc
import weakref
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from muster.chain import BlockId, Deployment
from muster.client.audit.contradictions import Kind, ProofLevel
from muster.client.audit.dump import DumpedBlock, DumpWriter
from muster.client.audit.endpoints import RECEIPTS_AT_ONCE, PackedLogs, RawHistory, prove
from muster.client.audit.proving import header_hash, log_key, receipts_root
from muster.protocol.encoding import hex0x
from muster.protocol.ids import Hash32, to_address, to_hash32

BLOCKS = 5 * RECEIPTS_AT_ONCE
OURS = to_address(b"\x33" * 20)
RECEIPTS = json.dumps(
    [{"status": "0x1", "cumulativeGasUsed": "0x5208", "logsBloom": "0x" + "00" * 256, "logs": []}]
)
ROOT = hex0x(receipts_root(json.loads(RECEIPTS)))


class Receipts(list[Any]):
    """A block's receipts, whose life can be watched."""

    __hash__ = object.__hash__  # type: ignore[assignment]


class Endpoint:
    """A chain whose blocks have transactions of strangers."""

    masked_url = "http://a"

    def __init__(self, *, bloom: str = "00" * 256) -> None:
        self.bloom = bloom
        self.held = weakref.WeakSet[Receipts]()
        self.most_held = 0
        self.hashes: dict[int, Hash32] = {}
        for number in range(BLOCKS):
            self.hashes[number] = to_hash32(self.header(number)["hash"])

    def header(self, number: int) -> dict[str, Any]:
        before = self.hashes.get(number - 1, bytes(32))
        header: dict[str, Any] = dict.fromkeys(
            ("sha3Uncles", "stateRoot", "transactionsRoot", "mixHash"), "0x" + "11" * 32
        )
        header |= {
            "parentHash": hex0x(before),
            "receiptsRoot": ROOT,
            "logsBloom": "0x" + self.bloom,
        }
        header |= {"miner": OURS, "extraData": "0x", "nonce": "0x" + "00" * 8}
        header |= dict.fromkeys(("difficulty", "gasLimit", "gasUsed", "timestamp"), "0x7")
        header |= {"number": hex(number)}
        return {**header, "hash": hex0x(header_hash(header))}

    def receipts(self) -> Receipts:
        made = Receipts(json.loads(RECEIPTS))
        self.held.add(made)
        self.most_held = max(self.most_held, len(self.held))
        return made

    async def batch(self, calls: list[tuple[str, list[Any]]]) -> list[Any]:
        return [
            self.header(int(params[0], 16)) if method == "eth_getBlockByNumber" else self.receipts()
            for method, params in calls
        ]


def heard_from(endpoint: Endpoint) -> tuple[Any, RawHistory]:
    chain = SimpleNamespace(rpc=endpoint, deployment=Deployment(1, 0, {"StakeVault": OURS}, {}))
    head = BlockId(BLOCKS - 1, endpoint.hashes[BLOCKS - 1])
    shown = {n: DumpedBlock(BlockId(n, hashed), 7, []) for n, hashed in endpoint.hashes.items()}
    return chain, RawHistory(head, shown)


@pytest.mark.asyncio
async def test_receipts_of_few_blocks_are_in_memory_at_once() -> None:
    endpoint = Endpoint()
    chain, heard = heard_from(endpoint)
    check = await prove(chain, heard, ProofLevel.BLOCKS)
    assert check.passed
    assert check.detail == f"{BLOCKS} blocks with events"
    assert 0 < endpoint.most_held <= 2 * RECEIPTS_AT_ONCE
    assert not heard.blocks


@pytest.mark.asyncio
async def test_receipts_of_blocks_without_events_are_in_memory_some_at_once() -> None:
    """Every filter allows logs of the contracts, so that all receipts must be seen."""
    endpoint = Endpoint(bloom="ff" * 256)
    chain, heard = heard_from(endpoint)
    heard.blocks.clear()
    assert (await prove(chain, heard, ProofLevel.CHAIN)).passed
    assert 0 < endpoint.most_held <= 2 * RECEIPTS_AT_ONCE


@pytest.mark.asyncio
async def test_blocks_go_to_a_dump_with_their_proofs_as_they_are_proven() -> None:
    endpoint = Endpoint()
    chain, heard = heard_from(endpoint)
    lines = io.StringIO()
    dump = DumpWriter(lines)
    assert (await prove(chain, heard, ProofLevel.BLOCKS, dump)).passed
    written = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert [block["number"] for block in written] == list(range(BLOCKS)) == list(range(dump.blocks))
    assert all(block["header"]["hash"] == block["hash"] for block in written)
    assert all(block["receipts"] == json.loads(RECEIPTS) for block in written)
    assert endpoint.most_held <= 2 * RECEIPTS_AT_ONCE


@pytest.mark.asyncio
async def test_a_block_of_another_hash_is_named_wherever_it_lies() -> None:
    endpoint = Endpoint()
    chain, heard = heard_from(endpoint)
    number = 3 * RECEIPTS_AT_ONCE + 1
    heard.blocks[number] = DumpedBlock(BlockId(number, Hash32(bytes(32))), 7, [])
    check = await prove(chain, heard, ProofLevel.BLOCKS)
    assert [(found.kind, found.block) for found in check.contradictions] == [
        (Kind.SOURCE_HEADER, number)
    ]


def posted(index: int) -> dict[str, Any]:
    """The log of 64 outcomes, each with the hash of its file, as JSON gives it."""
    rng = Random(index)
    records = "".join(f"{n:032x}{rng.randbytes(32).hex()}{7:016x}" for n in range(64))
    log = {"logIndex": hex(index), "blockNumber": "0x7", "blockHash": "0x" + "22" * 32}
    log |= {"transactionHash": "0x" + rng.randbytes(32).hex(), "address": OURS}
    return json.loads(json.dumps({**log, "topics": ["0x" + "44" * 32] * 3, "data": "0x" + records}))


def test_packed_logs_come_back_whole_in_order_and_once() -> None:
    packed = PackedLogs()
    for index in (2, 0, 1, 0):
        packed.add(posted(index))
    assert list(packed) == [posted(0), posted(1), posted(2)]
    assert len(packed) == 3
    assert posted(1) in packed
    assert posted(3) not in packed


def packed_logs() -> PackedLogs:
    packed = PackedLogs()
    for index in range(50):
        packed.add(posted(index))
    return packed


def bytes_of(make: Callable[[], object]) -> int:
    """The memory of what a function makes."""
    tracemalloc.start()
    made = make()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del made
    return size


def test_packed_logs_and_what_is_compared_of_them_take_less_than_half_of_their_memory() -> None:
    raw = bytes_of(lambda: [posted(index) for index in range(50)])
    assert bytes_of(packed_logs) < raw / 2
    assert bytes_of(lambda: {log_key(posted(index)) for index in range(50)}) < raw / 10


@pytest.mark.parametrize("change", ["topics", "data", "address", "transactionHash", "logIndex"])
def test_another_log_has_another_key(change: str) -> None:
    other = posted(1)
    other[change] = ["0x00"] if change == "topics" else hex(int(other[change], 16) + 1)
    assert log_key(other) != log_key(posted(1))
    assert log_key({**posted(1), "data": posted(1)["data"].upper()}) == log_key(posted(1))
