"""Compares logs with the headers of their blocks: the answers of an endpoint must fit together.

An endpoint can be wrong without malice: several nodes answer behind one address, and a lagging node
has no logs yet of a block that another node has just announced. Headers show three things:

    a log's block has the hash and the time that its header says        else the beacon is wrong
    a header follows its parent, where both are asked
    a block whose filter names a contract and one of its events has a log of it, or its receipts
    say that it is a coincidence                                        else logs are missing

All blocks of a short history are checked, and some of a long one. Receipts are trusted: a user who
trusts no endpoint should run a node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Any

from muster.chain.abi import Event
from muster.chain.rpc import Rpc, from_hex, garbled, hash_from_hex, member
from muster.protocol.encoding import keccak
from muster.protocol.errors import RpcError
from muster.protocol.ids import Address, Hash32

MOST_HEADERS = 64
"""Most headers that are read per poll."""
_BEACONS = "CheckpointPublished"
_FILTER_BYTES = 256


class LogsDisagree(Exception):
    """Logs and headers do not belong to one chain; reading again may help."""


class LogChecks:
    """Checks events against headers."""

    def __init__(
        self, rpc: Rpc, topics: Mapping[Address, Iterable[str]], chance: Random | None = None
    ) -> None:
        """`topics` are the first topics of each contract's events, `0x` and hexadecimal."""
        self._rpc = rpc
        self._chance = chance or Random()
        self._addresses = {address.lower() for address in topics}
        self._bits = [
            (_bits(_bytes(address)), [_bits(_bytes(topic)) for topic in of_contract])
            for address, of_contract in topics.items()
        ]

    async def check(self, first: int, last: int, events: Sequence[Event]) -> None:
        """Raise LogsDisagree unless events of these blocks fit the blocks' headers."""
        hashes = _block_hashes(events, first, last)
        numbers = self._chosen(first, last, events)
        asked = [("eth_getBlockByNumber", [hex(number), False]) for number in numbers]
        headers = await self._rpc.batch(asked)
        parents: dict[int, Hash32] = {}
        for number, header in zip(numbers, headers, strict=True):
            _check_header(header, number, hashes.get(number), parents.get(number - 1))
            parents[number] = hash_from_hex(member(header, "hash"))
        _check_times(events, dict(zip(numbers, headers, strict=True)))
        silent = [
            number
            for number, header in zip(numbers, headers, strict=True)
            if number not in hashes and self._names_us(header.get("logsBloom"))
        ]
        for number in silent:
            await self._check_receipts(number)

    def _chosen(self, first: int, last: int, events: Sequence[Event]) -> list[int]:
        """Return the blocks to check, ascending; blocks whose hashes are beacons are preferred."""
        if last - first < MOST_HEADERS:
            return list(range(first, last + 1))
        beacons = [e.block_number for e in events if e.name == _BEACONS][-MOST_HEADERS // 2 :]
        others = list({e.block_number for e in events} - set(beacons))
        room = MOST_HEADERS - len(beacons)
        return sorted({*beacons, *self._chance.sample(others, min(room, len(others)))})

    def _names_us(self, bloom: Any) -> bool:
        if not isinstance(bloom, str) or len(bloom) != 2 + 2 * _FILTER_BYTES:
            return False
        try:
            filled = int(bloom, 16)
        except ValueError:
            return False
        return any(
            filled & address == address and any(filled & topic == topic for topic in topics)
            for address, topics in self._bits
        )

    async def _check_receipts(self, number: int) -> None:
        try:
            receipts = await self._rpc.call("eth_getBlockReceipts", hex(number))
        except RpcError:
            # Not every endpoint has the method; then the filter cannot be verified.
            return
        if not isinstance(receipts, list):
            raise garbled(f"no list of receipts of block {number}")
        logs = [log for receipt in receipts for log in member(receipt, "logs")]
        if any(str(member(log, "address")).lower() in self._addresses for log in logs):
            raise LogsDisagree(f"logs of block {number} were left out")


def _block_hashes(events: Sequence[Event], first: int, last: int) -> dict[int, Hash32]:
    hashes: dict[int, Hash32] = {}
    for event in events:
        number = event.block_number
        if not first <= number <= last:
            raise LogsDisagree(f"asked for blocks {first} to {last}, got a log of block {number}")
        if hashes.setdefault(number, event.block_hash) != event.block_hash:
            raise LogsDisagree(f"block {number} has two hashes")
    return hashes


def _check_header(header: Any, number: int, of_logs: Hash32 | None, parent: Hash32 | None) -> None:
    if header is None:
        raise LogsDisagree(f"block {number} is not there any more")
    if from_hex(member(header, "number")) != number:
        raise LogsDisagree(f"asked for block {number}, got another")
    if of_logs is not None and hash_from_hex(member(header, "hash")) != of_logs:
        raise LogsDisagree(f"logs of block {number} are of another block of that number")
    if parent is not None and header.get("parentHash") not in (None, "0x" + parent.hex()):
        raise LogsDisagree(f"block {number} does not follow block {number - 1}")


def _check_times(events: Sequence[Event], headers: Mapping[int, Any]) -> None:
    for event in events:
        header = headers.get(event.block_number)
        if header and from_hex(member(header, "timestamp")) != event.block_timestamp:
            raise LogsDisagree(f"logs of block {event.block_number} have another time than it")


def _bits(entry: bytes) -> int:
    """Return the three bits of an entry in a header's filter (yellow paper, equation 30)."""
    digest = keccak(entry)
    return sum(
        1 << bit for bit in {int.from_bytes(digest[i : i + 2], "big") & 0x7FF for i in (0, 2, 4)}
    )


def _bytes(text: str) -> bytes:
    return bytes.fromhex(text[2:])
