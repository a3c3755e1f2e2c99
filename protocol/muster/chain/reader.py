"""Reads the contracts' events in order, and notices when the chain takes them back.

The reader remembers the hashes of recent blocks. A block whose hash has changed means that the
chain was reorganised: everything from there on is void and read again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from muster.chain.deployment import Deployment
from muster.chain.events import Event, EventTable
from muster.chain.log_checks import Contradiction, LogChecks
from muster.chain.quantities import LatestBlock, from_hex, hash_from_hex, member
from muster.chain.rpc import Rpc
from muster.chain.structs import BlockId
from muster.protocol.errors import (
    ChainInconsistent,
    ChainUnreachable,
    EncodingError,
    RpcError,
    WrongChain,
)
from muster.protocol.ids import Hash32

logger = logging.getLogger(__name__)

REMEMBERED_BLOCKS = 256
"""Blocks whose hashes are remembered; a deeper reorganisation is read again from the start."""
FIRST_SPAN = 2_000
"""Blocks asked for in one request, at first."""
LONGEST_SPAN = 100_000
"""Blocks asked for in one request, at most."""
FULL_ANSWER = 10_000
"""An answer of so many logs makes the next request ask for fewer blocks: memory stays bounded."""
LAG_POLLS = 10
"""Polls for which an endpoint may know less than what was read, before the rest counts as void."""
_POLL_ATTEMPTS = 5
_DECODED_AT_ONCE = 2_000


@dataclass(frozen=True, slots=True)
class Poll:
    """What happened since the last poll."""

    events: list[Event]
    """New events, in chain order."""
    rewound_to: int | None
    """Events after this block that were read earlier are void; None when all stand."""
    head: BlockId
    """The block up to which everything is read now."""


class Source(Protocol):
    """What the reader needs of the connection; `Chain` fits."""

    @property
    def rpc(self) -> Rpc:
        """The endpoint."""

    @property
    def deployment(self) -> Deployment:
        """Where the contracts are."""


class EventReader:
    """A cursor over the events of all contracts but the token: nobody here needs transfers."""

    def __init__(
        self,
        chain: Source,
        *,
        from_block: int | None = None,
        known: Sequence[BlockId] = (),
        confirmations: int = 0,
    ) -> None:
        """Start at a block (default: the deployment's), or after blocks that were read before.

        A block is read once so many are on top of it: what changes above is never noticed.
        """
        contracts = {n: a for n, a in chain.deployment.contracts.items() if n != "MusterToken"}
        self._rpc = chain.rpc
        self._chain_id = chain.deployment.chain_id
        self._table = EventTable(contracts)
        self._checks = LogChecks(chain.rpc, self._table.topics())
        self._lagging = 0
        self._addresses = list(contracts.values())
        self._start = chain.deployment.deploy_block if from_block is None else from_block
        self._known: dict[int, Hash32] = {block.number: block.hash for block in known}
        self._next = max(self._known) + 1 if self._known else self._start
        self._span = FIRST_SPAN
        self._longest_span = LONGEST_SPAN
        self._confirmations = confirmations

    async def poll(self) -> Poll:
        """Return everything new; raises ChainError, and then nothing was read.

        ChainInconsistent is an endpoint that contradicts itself, again and again, or lags behind
        what it said before; WrongChain one that answers for another chain.
        """
        for attempt in range(1, _POLL_ATTEMPTS + 1):
            try:
                return await self._poll()
            except Contradiction as error:
                # Most often the chain was reorganised while it was read.
                logger.debug("reading again", extra={"attempt": attempt, "cause": str(error)})
                cause = error
        raise ChainInconsistent(
            f"the chain keeps changing while it is read: {cause}", hint="use another RPC endpoint"
        )

    async def _poll(self) -> Poll:
        head, newest = await self._look()
        rewound_to = None if newest else await self._rewind_to(head)
        first = self._next if rewound_to is None else rewound_to + 1
        if head.number < first:
            events: list[Event] = []
        else:
            events = await self._read(first, head.number)
            await self._checks.check(first, head.number, events)
            await self._verify(head)
        self._lagging = 0
        self._commit(events, head, rewound_to)
        if rewound_to is not None:
            logger.warning("chain reorganised", extra={"rewound_to": rewound_to})
        return Poll(events, rewound_to, BlockId(head.number, head.hash))

    # --------------------------------------------------------------------- reorg

    async def _look(self) -> tuple[LatestBlock, bool]:
        """Return the head, and whether the newest block that was read still stands."""
        calls: list[tuple[str, list[Any]]] = [("eth_getBlockByNumber", [await self._head(), False])]
        newest = max(self._known, default=None)
        if newest is not None:
            calls.append(("eth_getBlockByNumber", [hex(newest), False]))
        head, *known = await self._rpc.batch(calls)
        if head is None:
            raise ChainUnreachable("the RPC endpoint has no latest block", hint="wait a little")
        stands = newest is None or _hash_of(known[0]) == self._known[newest]
        return LatestBlock.from_rpc(head), stands

    async def _head(self) -> str:
        """Return the block up to which is read: the newest, or one that is deep enough."""
        if not self._confirmations:
            return "latest"
        newest = from_hex(await self._rpc.call("eth_blockNumber"))
        return hex(max(0, newest - self._confirmations))

    async def _rewind_to(self, head: LatestBlock) -> int:
        """Return the newest block that stands; raises when it is the endpoint that is wrong."""
        chain_id = from_hex(await self._rpc.call("eth_chainId"))
        if chain_id != self._chain_id:
            raise WrongChain(
                f"the RPC endpoint answers for chain {chain_id}, it was {self._chain_id} before",
                hint="check --rpc",
            )
        common = await self._common_block()
        known = max((n for n in self._known if n <= head.number), default=self._start - 1)
        if head.number < max(self._known) and common >= known and self._lagging < LAG_POLLS:
            self._lagging += 1
            raise ChainInconsistent(
                f"the RPC endpoint is at block {head.number}, it was at {max(self._known)} before",
                hint="wait a little: it lags behind, or nodes behind it do",
            )
        return common

    async def _common_block(self) -> int:
        """Return the newest block up to which all that is remembered stands, or start - 1."""
        numbers = sorted(self._known)
        blocks = await self._rpc.batch(
            [("eth_getBlockByNumber", [hex(number), False]) for number in numbers]
        )
        common = self._start - 1
        for number, block in zip(numbers, blocks, strict=True):
            if _hash_of(block) != self._known[number]:
                break
            common = number
        return common

    async def _verify(self, head: LatestBlock) -> None:
        """Raise unless the head still stands: then all that was read belongs to one chain."""
        block = await self._rpc.call("eth_getBlockByNumber", hex(head.number), False)
        if _hash_of(block) != head.hash:
            raise Contradiction(f"block {head.number} is another now")

    def _commit(self, events: Sequence[Event], head: LatestBlock, rewound_to: int | None) -> None:
        if rewound_to is not None:
            self._known = {n: h for n, h in self._known.items() if n <= rewound_to}
            self._next = rewound_to + 1
        for event in events:
            self._known[event.block_number] = event.block_hash
        if head.number + 1 >= self._next:
            self._known[head.number] = head.hash
            self._next = head.number + 1
        for number in sorted(self._known)[:-REMEMBERED_BLOCKS]:
            del self._known[number]

    # ---------------------------------------------------------------------- logs

    async def _read(self, first: int, last: int) -> list[Event]:
        events: list[Event] = []
        while first <= last:
            to = min(first + self._span - 1, last)
            try:
                logs = await self._logs(first, to)
            except ChainUnreachable:
                # It may have been too much to answer in time: the next poll asks for less.
                self._span = max(1, self._span // 2)
                raise
            except RpcError as error:
                if to == first:
                    raise
                # Endpoints limit the blocks or logs of one request, each in its own words.
                self._longest_span = self._span = max(1, (to - first + 1) // 2)
                logger.debug("asking for fewer blocks", extra={"cause": str(error)})
                continue
            events += await self._decode(logs)
            first = to + 1
            self._adapt(len(logs))
        return events

    def _adapt(self, logs: int) -> None:
        if logs >= FULL_ANSWER:
            self._span = max(1, self._span // 2)
        elif logs < FULL_ANSWER // 4:
            self._span = min(self._span * 2, self._longest_span)

    async def _logs(self, first: int, last: int) -> list[dict[str, Any]]:
        query = {
            "address": self._addresses,
            "fromBlock": hex(first),
            "toBlock": hex(last),
        }
        logs = await self._rpc.call("eth_getLogs", query)
        if not isinstance(logs, list) or not all(isinstance(log, dict) for log in logs):
            raise ChainUnreachable("eth_getLogs answered no list of logs", hint="is --rpc right?")
        return logs

    async def _decode(self, logs: list[dict[str, Any]]) -> list[Event]:
        times = await self._missing_times(logs)
        events: list[Event] = []
        for start in range(0, len(logs), _DECODED_AT_ONCE):
            for log in logs[start : start + _DECODED_AT_ONCE]:
                event = self._decode_log(log, times)
                if event is not None:
                    events.append(event)
            # Let others run: a long catch-up must not stop heartbeats.
            await asyncio.sleep(0)
        events.sort(key=lambda event: (event.block_number, event.log_index))
        return events

    def _decode_log(self, log: dict[str, Any], times: Mapping[str, int]) -> Event | None:
        try:
            return self._table.decode(log, times.get(str(log.get("blockHash"))) if times else None)
        except EncodingError as error:
            raise ChainUnreachable(
                f"the RPC endpoint answered a malformed log: {error}", hint="is --rpc right?"
            ) from error

    async def _missing_times(self, logs: list[dict[str, Any]]) -> dict[str, int]:
        """Return the times of blocks whose logs do not carry them, by block hash."""
        untimed = (log for log in logs if "blockTimestamp" not in log)
        hashes = list({str(log.get("blockHash")): None for log in untimed})
        blocks = await self._rpc.batch([("eth_getBlockByHash", [h, False]) for h in hashes])
        if any(block is None for block in blocks):
            raise Contradiction("the block of a log is not there")
        return {
            h: from_hex(member(block, "timestamp")) for h, block in zip(hashes, blocks, strict=True)
        }


def _hash_of(block: Any) -> Hash32 | None:
    return None if block is None else hash_from_hex(member(block, "hash"))
