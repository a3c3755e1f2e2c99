"""Reads a chain's history from RPC endpoints that may lie, and proves what they show.

1. the first endpoint's events go to the ledger; for a dump or a proof, the raw logs are kept
2. every further endpoint is asked for the same blocks and logs
3. `blocks` proves header and receipts of every block with events; `chain` proves every header since
   the contracts were deployed, each naming the one before, so that no block can be left out; a
   block is forgotten, or written to the dump, once it is proven
"""

import contextlib
import json
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from muster.chain import BlockId, Chain, Deployment, EventReader, apply_poll
from muster.chain.reader import logs_between
from muster.chain.rpc import Call, Rpc, from_hex
from muster.client.audit.contradictions import Check, Contradiction, Kind, ProofLevel, summarise
from muster.client.audit.dump import DumpedBlock, DumpWriter
from muster.client.audit.ledger import Ledger
from muster.client.audit.proving import (
    HEADER_FIELDS,
    LogKey,
    check_header,
    check_logs,
    log_key,
    may_hold_logs_of,
)
from muster.protocol.encoding import hex0x
from muster.protocol.errors import ConfigError, EncodingError, RpcError
from muster.protocol.ids import Hash32, to_hash32

HEADERS_AT_ONCE = 500
"""Number of headers held in memory together."""
RECEIPTS_AT_ONCE = 25
"""Number of blocks whose receipts are held in memory together: those of a full one take a MiB."""
T = TypeVar("T")


@dataclass(slots=True)
class RawHistory:
    """A history from one endpoint, besides its events."""

    head: BlockId
    """The block up to which it was read."""
    blocks: dict[int, DumpedBlock] = field(default_factory=dict)
    """The raw blocks with events; empty unless they are kept."""


class PackedLogs(Collection[Mapping[str, Any]]):
    """A block's raw logs in a third of their memory: each is parsed when it is looked at."""

    def __init__(self) -> None:
        self._packed: dict[int, bytes] = {}

    def add(self, log: Mapping[str, Any]) -> None:
        """Add a log; one of the same index is replaced, as a range may be read again."""
        self._packed[from_hex(log["logIndex"])] = zlib.compress(json.dumps(log).encode(), 1)

    def __len__(self) -> int:
        return len(self._packed)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return (json.loads(zlib.decompress(self._packed[at])) for at in sorted(self._packed))

    def __contains__(self, log: object) -> bool:
        return any(log == each for each in self)


async def read_source(chain: Chain, ledger: Ledger, *, keeps_logs: bool) -> RawHistory:
    """Apply the history that one endpoint shows to an empty ledger; return it with the raw logs if
    they are to be kept. No cached file of logs is used.
    """
    kept = defaultdict[tuple[int, str], PackedLogs](PackedLogs)

    def keep(logs: Iterable[Mapping[str, Any]]) -> None:
        for log in logs if keeps_logs else ():
            # A log without one of our events may have any form: it is not compared either.
            with contextlib.suppress(KeyError, AttributeError):
                if not log.get("removed"):
                    kept[from_hex(log["blockNumber"]), log["blockHash"].lower()].add(log)

    poll = await EventReader(chain, on_logs=keep).poll()
    apply_poll(ledger, poll)
    blocks = {
        event.block_number: DumpedBlock(
            BlockId(event.block_number, event.block_hash),
            event.block_timestamp,
            kept[event.block_number, hex0x(event.block_hash)],
        )
        for event in (poll.events if keeps_logs else ())
    }
    return RawHistory(poll.head, blocks)


def contract_addresses(deployment: Deployment) -> frozenset[str]:
    """Return the contracts whose events are read, in lower case."""
    return frozenset(
        address.lower() for name, address in deployment.contracts.items() if name != "MusterToken"
    )


# One endpoint


async def prove(
    chain: Chain, heard: RawHistory, proof: ProofLevel, dump: DumpWriter | None = None
) -> Check:
    """Return whether an endpoint's answers prove its events; raises ConfigError when it does not
    give the headers or receipts for a proof. Each block goes with these to the `dump`, and `heard`
    loses it: of a long history they do not fit into memory.
    """
    addresses, head = contract_addresses(chain.deployment), heard.head
    found: list[Contradiction] = []
    numbers = list(heard.blocks)
    if proof is ProofLevel.CHAIN:
        found += await _prove_chain(chain, heard, addresses)
    for part in _parts(numbers):
        headers, receipts = await _headers(chain.rpc, part), await _receipts(chain.rpc, part)
        for number, header, of_block in zip(part, headers, receipts, strict=True):
            shown = heard.blocks.pop(number)
            found += check_block(shown, header, of_block, addresses)
            kept = {name: header[name] for name in HEADER_FIELDS if name in header}
            if dump is not None:
                dump.add(replace(shown, header=kept, receipts=of_block))
    what = f"{len(numbers)} blocks with events" + (
        f", every block up to {head.number} ({hex0x(head.hash)})"
        if proof is ProofLevel.CHAIN
        else ""
    )
    return summarise("the source proves its events by block hashes", found, what)


def _parts(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield the items, as many at a time as blocks whose receipts fit into memory."""
    for start in range(0, len(items), RECEIPTS_AT_ONCE):
        yield items[start : start + RECEIPTS_AT_ONCE]


def check_block(
    shown: DumpedBlock,
    header: Mapping[str, Any],
    receipts: Sequence[Mapping[str, Any]],
    addresses: frozenset[str],
) -> list[Contradiction]:
    """Return what is wrong with a block's events; raises ConfigError when they cannot be proven."""
    try:
        wrong = check_header(header, shown.block.number, shown.block.hash)
        if not wrong and from_hex(header["timestamp"]) != shown.timestamp:
            what = f"its events are dated {shown.timestamp}, the header {header['timestamp']}"
            wrong = [Contradiction(Kind.SOURCE_LOGS, what, block=shown.block.number)]
        return wrong or check_logs(header, receipts, shown.logs, addresses)
    except (EncodingError, KeyError, TypeError) as error:
        raise ConfigError(
            f"block {shown.block.number} cannot be proven: {error}",
            hint="give another endpoint with --rpc, or --prove none to trust this one",
        ) from error


async def _prove_chain(
    chain: Chain, heard: RawHistory, addresses: frozenset[str]
) -> list[Contradiction]:
    """Return what is wrong with the headers from the deployment to the head."""
    head = heard.head
    found: list[Contradiction] = []
    before: Hash32 | None = None
    for first in range(chain.deployment.deploy_block, head.number + 1, HEADERS_AT_ONCE):
        numbers = range(first, min(first + HEADERS_AT_ONCE, head.number + 1))
        suspects = []
        for number, header in zip(numbers, await _headers(chain.rpc, numbers), strict=True):
            found += _check_link(header, number, before)
            before = to_hash32(header["hash"])
            bloom = bytes.fromhex(header["logsBloom"][2:])
            if number in heard.blocks:
                found += _check_shown(heard.blocks[number].block, before)
            elif may_hold_logs_of(bloom, addresses):
                suspects.append((number, header))
        for part in _parts(suspects):
            receipts = await _receipts(chain.rpc, [number for number, _ in part])
            for (_, header), of_block in zip(part, receipts, strict=True):
                found += check_logs(header, of_block, (), addresses)
    if before != head.hash:
        what = f"the head was {hex0x(head.hash)}, now it is {hex0x(before or b'')}"
        found.append(Contradiction(Kind.SOURCE_CHAIN, what, block=head.number))
    return found


def _check_link(
    header: Mapping[str, Any], number: int, before: Hash32 | None
) -> list[Contradiction]:
    wrong = check_header(header, number, to_hash32(header["hash"]))
    if before is not None and to_hash32(header["parentHash"]) != before:
        what = f"it follows {header['parentHash']}, block {number - 1} is {hex0x(before)}"
        wrong.append(Contradiction(Kind.SOURCE_CHAIN, what, block=number))
    return wrong


def _check_shown(shown: BlockId, linked: Hash32) -> list[Contradiction]:
    """Return what is wrong when the block whose events are proven is not the one that is linked."""
    if shown.hash == linked:
        return []
    what = f"its events are of {hex0x(shown.hash)}, the chain has {hex0x(linked)} there"
    return [Contradiction(Kind.SOURCE_CHAIN, what, block=shown.number)]


async def _headers(rpc: Rpc, numbers: Sequence[int]) -> list[Mapping[str, Any]]:
    calls: list[Call] = [("eth_getBlockByNumber", [hex(number), False]) for number in numbers]
    return _all_of(rpc, "eth_getBlockByNumber", await rpc.batch(calls), dict)


async def _receipts(rpc: Rpc, numbers: Sequence[int]) -> list[list[Mapping[str, Any]]]:
    calls: list[Call] = [("eth_getBlockReceipts", [hex(number)]) for number in numbers]
    try:
        answers = await rpc.batch(calls)
    except RpcError as error:
        raise ConfigError(
            f"{rpc.masked_url} does not give receipts, without which nothing is proven: {error}",
            hint="give another endpoint with --rpc, or --prove none to trust this one",
        ) from error
    return _all_of(rpc, "eth_getBlockReceipts", answers, list)


def _all_of(rpc: Rpc, method: str, answers: list[Any], kind: type) -> list[Any]:
    if all(isinstance(answer, kind) for answer in answers):
        return answers
    raise ConfigError(
        f"{rpc.masked_url} answers {method} with nothing for a block of its own",
        hint="the chain may have been reorganised: try again, or give another endpoint with --rpc",
    )


# Several endpoints


async def compare(heard: RawHistory, first: Rpc, other: Chain) -> Check:
    """Return whether another endpoint shows the same blocks and logs up to the same head."""
    found = [
        Contradiction(Kind.SOURCE_DISAGREES, what, block=number)
        for number, what in await _differences(heard, first, other)
    ]
    head = heard.head
    return summarise(
        f"{other.rpc.masked_url} shows the same history",
        found,
        f"{len(heard.blocks)} blocks with events, head {head.number}",
    )


async def _differences(heard: RawHistory, first: Rpc, other: Chain) -> list[tuple[int, str]]:
    head = heard.head
    ours = {number: block.block.hash for number, block in heard.blocks.items()}
    ours[head.number] = head.hash
    numbers = sorted(ours)
    answers = await other.rpc.batch(
        [("eth_getBlockByNumber", [hex(number), False]) for number in numbers]
    )
    found = []
    for number, answer in zip(numbers, answers, strict=True):
        theirs = answer["hash"] if isinstance(answer, dict) else None
        if theirs is None or to_hash32(theirs) != ours[number]:
            name, label = other.rpc.masked_url, theirs or "missing"
            what = f"{first.masked_url} says {hex0x(ours[number])}, {name} says {label}"
            found.append((number, what))
    return found or await _differing_logs(heard, first, other, head.number)


async def _differing_logs(
    heard: RawHistory, first: Rpc, other: Chain, last: int
) -> list[tuple[int, str]]:
    ours = {(n, log_key(log)) for n, block in heard.blocks.items() for log in block.logs}
    theirs: set[tuple[int, LogKey]] = set()
    query = {"address": sorted(contract_addresses(other.deployment))}
    async for log in logs_between(other.rpc, query, other.deployment.deploy_block, last):
        theirs.add((from_hex(log["blockNumber"]), log_key(log)))
    return [
        (number, f"only {who.masked_url} shows log {key[0]} of transaction {key[1]}")
        for who, only in ((first, ours - theirs), (other.rpc, theirs - ours))
        for number, key in sorted(only)
    ]


# An earlier look


async def compare_with_past(
    rpc: Rpc, past: Iterator[DumpedBlock], name: str, describe: Callable[[DumpedBlock], str]
) -> Check:
    """Return whether the blocks of an earlier dump are still on the chain.

    `describe` returns the events of a dumped block in words.
    """
    found: list[Contradiction] = []
    count = 0
    for block in past:
        count += 1
        answer = await rpc.call("eth_getBlockByNumber", hex(block.block.number), False)
        now = answer.get("hash") if isinstance(answer, dict) else None
        if now is None or to_hash32(now) != block.block.hash:
            what = (
                f"it was {hex0x(block.block.hash)} when {name} was written, now it is "
                f"{now or 'missing'}; gone with it: {describe(block)}"
            )
            found.append(Contradiction(Kind.HISTORY_REWRITTEN, what, block=block.block.number))
    return summarise(f"history is as {name} has it", found, f"{count} blocks with events")
