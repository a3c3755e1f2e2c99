"""Compares logs with the headers of their blocks: the answers of an endpoint must fit together.

An endpoint can be wrong without malice: several nodes answer behind one address, and a lagging node
has no logs yet of a block that another node has just announced. Headers show three things:

    a log's block has the hash and the time that its header says        else the beacon is wrong
    a header follows its parent, where both are asked
    a block whose filter names a contract and one of its events has a log of it, or its receipts
    say that it is a coincidence                                        else logs are missing

Receipts show a fourth: they have the logs that the endpoint gave of their block, and no other.

Headers of a short history are all checked. Of a long one, they are checked at the newest blocks and
at random ones, with and without logs. Receipts of a block with logs are read for one in eight.
Receipts and headers are trusted: a user who trusts no endpoint should run a node.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from random import SystemRandom
from typing import Any

from muster.chain.abi import Event, EventTable
from muster.chain.rpc import Rpc, from_hex, garbled, hash_from_hex, member
from muster.protocol.encoding import keccak
from muster.protocol.errors import EncodingError, RpcError
from muster.protocol.ids import Hash32

MOST_HEADERS = 96
"""Blocks of the longest range whose headers are all read; a sample of a longer one is no larger: it
fits into one batch of requests."""
_WITH_LOGS = 48
"""Most headers per range of blocks that have logs."""
_WITHOUT_LOGS = 40
"""Headers per poll of blocks without logs, at random."""
_NEWEST = 8
"""Newest blocks of a poll, always checked: a lagging node has no logs of them."""
_FULL = 8.0
"""Receipts per poll of blocks that have logs, at most."""
_FULL_SHARE = 1 / 8
"""Share of the headers of blocks with logs whose receipts are read."""
_SUSPECTS = 64
_BEACONS = "CheckpointPublished"
_FILTER_BYTES = 256


class LogsDisagree(Exception):
    """Logs and headers do not belong to one chain; reading again may help."""

    def __init__(self, message: str, block: int | None = None) -> None:
        """`block` is the block that the next check must not leave out, if one is known."""
        super().__init__(message)
        self.block = block


class LogChecks:
    """Checks events against headers and receipts."""

    def __init__(self, rpc: Rpc, table: EventTable, *, samples: bool = True) -> None:
        """Without samples, only checks that chance does not decide are made."""
        self._rpc = rpc
        self._table = table
        # The endpoint must not foresee the sample.
        self._chance = SystemRandom() if samples else None
        # Otherwise a second try would draw other blocks, and take what the first one refused.
        self._suspects: deque[int] = deque(maxlen=_SUSPECTS)
        topics = table.topics()
        self._addresses = {address.lower() for address in topics}
        self._bits = [
            (_bits(_bytes(address)), [_bits(_bytes(topic)) for topic in of_contract])
            for address, of_contract in topics.items()
        ]

    async def check(self, blocks: range, poll: range, events: Sequence[Event]) -> None:
        """Raise LogsDisagree unless the events of these blocks fit the blocks' headers.

        `poll` has all blocks of the poll: a sample is divided among its ranges.
        """
        try:
            await self._check(blocks, len(blocks) / len(poll), poll[-_NEWEST:], events)
        except LogsDisagree as error:
            if error.block is not None and error.block not in self._suspects:
                self._suspects.append(error.block)
            raise
        for block in self._suspected(blocks):
            self._suspects.remove(block)

    async def _check(
        self, blocks: range, share: float, newest: range, events: Sequence[Event]
    ) -> None:
        hashes = _block_hashes(events, blocks)
        numbers = self._chosen(blocks, share, newest, events)
        asked = [("eth_getBlockByNumber", [hex(number), False]) for number in numbers]
        headers = dict(zip(numbers, await self._rpc.batch(asked), strict=True))
        parents: dict[int, Hash32] = {}
        for number, header in headers.items():
            _check_header(header, number, hashes.get(number), parents.get(number - 1))
            parents[number] = hash_from_hex(member(header, "hash"))
        _check_times(events, headers)
        with_logs = [number for number in numbers if number in hashes]
        without = [
            number
            for number, header in headers.items()
            if number not in hashes and self._names_us(header.get("logsBloom"))
        ]
        some = self._sample(with_logs, min(_FULL_SHARE * len(with_logs), _FULL * share))
        for number in {*without, *some, *self._suspected(blocks)}:
            await self._check_receipts(number, [e for e in events if e.block_number == number])

    def _chosen(
        self, blocks: range, share: float, newest: range, events: Sequence[Event]
    ) -> list[int]:
        """Return the blocks to check, ascending; blocks whose hashes are beacons are preferred."""
        if len(blocks) <= MOST_HEADERS:
            return list(blocks)
        with_logs = {event.block_number for event in events}
        beacons = [e.block_number for e in events if e.name == _BEACONS][-_WITH_LOGS // 2 :]
        others = list(with_logs - set(beacons))
        without = [number for number in blocks if number not in with_logs]
        chosen = {*beacons, *self._sample(others, _WITH_LOGS - len(beacons))}
        chosen |= {*self._sample(without, _WITHOUT_LOGS * share), *self._suspected(blocks)}
        return sorted(chosen | {number for number in newest if number in blocks})

    def _sample(self, numbers: Sequence[int], count: float) -> list[int]:
        """Return `count` of the numbers; a fraction is the chance of one more."""
        if self._chance is None:
            return []
        whole = int(count + self._chance.random())
        return self._chance.sample(numbers, min(whole, len(numbers)))

    def _suspected(self, blocks: range) -> list[int]:
        return [number for number in self._suspects if number in blocks]

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

    async def _check_receipts(self, number: int, given: Sequence[Event]) -> None:
        """Raise LogsDisagree unless these are the events in a block's receipts."""
        try:
            receipts = await self._rpc.call("eth_getBlockReceipts", hex(number))
        except RpcError:
            # Not every endpoint has the method; then the filter cannot be verified.
            return
        if receipts is None and given:
            # A lagging node; nothing says that logs are missing.
            return
        if [_content(event) for event in given] != [*map(_content, self._events(receipts, number))]:
            raise LogsDisagree(f"logs of block {number} were left out or changed", number)

    def _events(self, receipts: Any, number: int) -> list[Event]:
        if not isinstance(receipts, list):
            raise garbled(f"no list of receipts of block {number}")
        of_each = [member(receipt, "logs") for receipt in receipts]
        if not all(isinstance(logs, list) for logs in of_each):
            raise garbled(f"a receipt of block {number} has no list of logs")
        logs = [log for logs in of_each for log in logs]
        ours = [log for log in logs if str(member(log, "address")).lower() in self._addresses]
        try:
            events = [self._table.decode(log, timestamp=0) for log in ours]
        except EncodingError as error:
            raise garbled(f"receipts of block {number}: {error}") from error
        return [event for event in events if event is not None]


def _content(event: Event) -> tuple[str, str, dict[str, Any]]:
    return event.contract, event.name, event.args


def _block_hashes(events: Sequence[Event], blocks: range) -> dict[int, Hash32]:
    hashes: dict[int, Hash32] = {}
    for event in events:
        number = event.block_number
        if number not in blocks:
            asked = f"asked for blocks {blocks[0]} to {blocks[-1]}"
            raise LogsDisagree(f"{asked}, got a log of block {number}")
        if hashes.setdefault(number, event.block_hash) != event.block_hash:
            raise LogsDisagree(f"block {number} has two hashes")
    return hashes


def _check_header(header: Any, number: int, of_logs: Hash32 | None, parent: Hash32 | None) -> None:
    if header is None:
        raise LogsDisagree(f"block {number} is not there any more", number)
    if from_hex(member(header, "number")) != number:
        raise LogsDisagree(f"asked for block {number}, got another", number)
    if of_logs is not None and hash_from_hex(member(header, "hash")) != of_logs:
        raise LogsDisagree(f"logs of block {number} are of another block of that number", number)
    if parent is not None and header.get("parentHash") not in (None, "0x" + parent.hex()):
        raise LogsDisagree(f"block {number} does not follow block {number - 1}", number)


def _check_times(events: Sequence[Event], headers: Mapping[int, Any]) -> None:
    for event in events:
        number = event.block_number
        header = headers.get(number)
        if header and from_hex(member(header, "timestamp")) != event.block_timestamp:
            raise LogsDisagree(f"logs of block {number} have another time than it", number)


def _bits(entry: bytes) -> int:
    """Return the three bits of an entry in a header's filter (yellow paper, equation 30)."""
    digest = keccak(entry)
    return sum(
        1 << bit for bit in {int.from_bytes(digest[i : i + 2], "big") & 0x7FF for i in (0, 2, 4)}
    )


def _bytes(text: str) -> bytes:
    return bytes.fromhex(text[2:])
