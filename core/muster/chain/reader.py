"""Reads the contracts' events in order, and notices reorganisations of the chain.

The reader remembers the hashes of recent blocks. When the hash of a block has changed, the chain
was reorganised: all events from that block on are void, and are read again. When an endpoint fails,
the reader keeps the events that it has checked, in memory and in a `LogStore`: the next poll
continues after them. `follow` keeps a view up to date, and survives outages of the endpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from muster.chain.abi import Event, EventTable
from muster.chain.deployment import Deployment
from muster.chain.log_checks import LogChecks, LogsDisagree
from muster.chain.log_store import LogStore
from muster.chain.rpc import LatestBlock, Portion, Rpc, from_hex, hash_from_hex, member
from muster.chain.structs import BlockId
from muster.chain.view import REMEMBERED_BLOCKS, ChainView
from muster.protocol.errors import (
    ChainError,
    ChainInconsistent,
    ChainUnreachable,
    ConfigError,
    EncodingError,
    RpcError,
    WrongChain,
)
from muster.protocol.ids import Hash32, RunId
from muster.settings import Confirmations

if TYPE_CHECKING:
    from muster.chain.connection import Chain
    from muster.chain.view_parts import RunView

logger = logging.getLogger(__name__)

FIRST_SPAN = 2_000
"""Blocks per request, at first."""
LONGEST_SPAN = 100_000
"""Most blocks per request."""
FULL_ANSWER = 10_000
"""After an answer with so many logs the next request has fewer blocks: this bounds memory."""
LAG_POLLS = 10
"""Polls in which an endpoint may lag behind the reader before the missing blocks count as void."""
_POLL_ATTEMPTS = 5
_DECODED_AT_ONCE = 2_000
_SAID_EVERY_S = 5.0
LONGEST_PAUSE_S = 15.0
"""Longest pause between tries in an outage, in seconds."""
_TRIES = 3
CONFIRMED_S = 1200.0
"""Longest time in seconds until a block counts as confirmed or finalized."""

V = TypeVar("V", bound=ChainView)
OnChange = Callable[[list[Event]], Awaitable[None]]
"""Called with the new events after the view applied them; with none after a mere rewind."""


@dataclass(frozen=True, slots=True)
class Poll:
    """Changes since the last poll."""

    events: list[Event]
    """New events, in chain order."""
    rewound_to: int | None
    """Told events after this block are void, one at least; None if all are still valid."""
    head: BlockId
    """The block up to which everything has been read."""


class LogSource(Protocol):
    """The reader's requirements on the connection; `Chain` satisfies them."""

    @property
    def rpc(self) -> Rpc:
        """The endpoint."""

    @property
    def deployment(self) -> Deployment:
        """The contracts' deployment."""

    @property
    def log_file(self) -> Path | None:
        """The file that keeps the logs, if there is one."""


class EventReader:
    """A cursor over the events of all contracts except the token: transfers are not needed."""

    def __init__(
        self,
        chain: LogSource,
        *,
        from_block: int | None = None,
        known: Sequence[BlockId] = (),
        confirmations: Confirmations = 0,
        on_logs: Callable[[list[dict[str, Any]]], None] | None = None,
    ) -> None:
        """Start at a block (default: the deployment's), or after blocks that were read before.

        A block is read once `confirmations` blocks are on top of it, or once it is finalized: the
        reader does not see changes above it. `on_logs` is called with the checked logs of each
        range of blocks. With it, all logs are read from the endpoint, and none from a file; its
        caller proves them, so no sample is compared with receipts.
        """
        contracts = {n: a for n, a in chain.deployment.contracts.items() if n != "MusterToken"}
        self._rpc = chain.rpc
        self._chain_id = chain.deployment.chain_id
        self._table = EventTable(contracts)
        self._checks = LogChecks(chain.rpc, self._table, samples=on_logs is None)
        self._lagging = 0
        self._addresses = list(contracts.values())
        self._start = chain.deployment.deploy_block if from_block is None else from_block
        self._known: dict[int, Hash32] = {block.number: block.hash for block in known}
        self._next = max(self._known) + 1 if self._known else self._start
        self._range = Portion(FIRST_SPAN, LONGEST_SPAN)
        self._confirmations = confirmations
        self._on_logs = on_logs
        self._store: LogStore | None = None
        if on_logs is None and chain.log_file is not None and not known and from_block is None:
            self._store = LogStore(chain.log_file)
        self._is_loaded = self._store is None
        self._told = self._next - 1
        """The newest block whose events were told; what is void above it was told to nobody."""
        self._unread: list[Event] = []
        self._void: int | None = None

    async def poll(self) -> Poll:
        """Return everything new; after a ChainError the next poll continues where this one ended.

        ChainInconsistent: the endpoint repeatedly contradicts itself, or lags behind its earlier
        answers. WrongChain: it serves another chain.
        """
        for attempt in range(1, _POLL_ATTEMPTS + 1):
            try:
                head = await self._read_on()
            except LogsDisagree as error:
                # Usually the chain was reorganised while it was read.
                logger.debug("reading again", extra={"attempt": attempt, "cause": str(error)})
                cause = error
            else:
                self._lagging = 0
                return self._tell(head)
        raise ChainInconsistent(
            f"the chain keeps changing, or the endpoint contradicts itself: {cause}",
            hint="use another RPC endpoint",
        )

    def _tell(self, head: BlockId) -> Poll:
        poll = Poll(self._unread, self._void, head)
        if self._unread:
            self._told = self._unread[-1].block_number
        self._unread, self._void = [], None
        return poll

    async def _read_on(self) -> BlockId:
        """Read up to the head and return it; if this raises, the events read so far are kept."""
        head, stands = await self._look()
        if not self._is_loaded:
            await self._load(head.number)
            head, stands = await self._look()
        if not stands:
            self._rewind(await self._newest_standing(head))
        poll, said = range(self._next, head.number + 1), time.monotonic()
        while self._next <= head.number:
            await self._read_range(head, poll)
            if time.monotonic() - said >= _SAID_EVERY_S:
                said = time.monotonic()
                logger.info("reading the chain", extra={"block": self._next, "of": head.number})
        if head.number == self._next - 1:
            self._known[head.number] = head.hash
        return BlockId(head.number, head.hash)

    async def _load(self, newest: int) -> None:
        """Load the store's events up to a block."""
        assert self._store is not None
        self._is_loaded = True
        for block, logs in self._store.blocks(newest):
            self._unread += await self._decode(logs)
            self._known[block.number] = block.hash
            self._next = block.number + 1
        self._forget()

    # --------------------------------------------------------------------- reorg

    async def _look(self) -> tuple[LatestBlock, bool]:
        """Return the head, and whether the newest block that was read is still on the chain."""
        calls: list[tuple[str, list[Any]]] = [("eth_getBlockByNumber", [await self._head(), False])]
        newest = max(self._known, default=None)
        if newest is not None:
            calls.append(("eth_getBlockByNumber", [hex(newest), False]))
        head, *known = await self._rpc.batch(calls)
        if head is None:
            raise ChainUnreachable(
                "the RPC endpoint has no latest block", hint="wait a minute and try again"
            )
        stands = newest is None or _hash_of(known[0]) == self._known[newest]
        return LatestBlock.from_rpc(head), stands

    async def _head(self) -> str:
        """Return the block to read up to: the newest, or one with enough confirmations."""
        if isinstance(self._confirmations, str):
            return self._confirmations
        if not self._confirmations:
            return "latest"
        newest = from_hex(await self._rpc.call("eth_blockNumber"))
        return hex(max(0, newest - self._confirmations))

    async def _newest_standing(self, head: LatestBlock) -> int:
        """Return the newest known block that is still on the chain; raises if the endpoint is
        wrong.
        """
        chain_id = from_hex(await self._rpc.call("eth_chainId"))
        if chain_id != self._chain_id:
            raise WrongChain(
                f"the RPC endpoint answers for chain {chain_id}, before it was chain "
                f"{self._chain_id}",
                hint="check --rpc",
            )
        common = await self._common_block()
        known = max((n for n in self._known if n <= head.number), default=self._start - 1)
        if head.number < max(self._known) and common >= known and self._lagging < LAG_POLLS:
            self._lagging += 1
            raise ChainInconsistent(
                f"the RPC endpoint is at block {head.number}, it was at {max(self._known)} before",
                hint="wait a minute and try again: the endpoint lags behind, or nodes behind it do",
            )
        return common

    async def _common_block(self) -> int:
        """Return the newest remembered block that is still on the chain, or start - 1."""
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
        """Raise unless the head is unchanged: only then everything read belongs to one chain."""
        block = await self._rpc.call("eth_getBlockByNumber", hex(head.number), False)
        if _hash_of(block) != head.hash:
            raise LogsDisagree(f"block {head.number} is another now")

    def _rewind(self, number: int) -> None:
        """Forget the events after a block."""
        logger.warning("chain reorganised", extra={"rewound_to": number})
        self._known = {n: digest for n, digest in self._known.items() if n <= number}
        self._unread = [event for event in self._unread if event.block_number <= number]
        self._next = number + 1
        if number < self._told:
            self._void = self._told = number
        if self._store is not None:
            self._store.rewind(number)

    def _forget(self) -> None:
        for number in sorted(self._known)[:-REMEMBERED_BLOCKS]:
            del self._known[number]

    # ---------------------------------------------------------------------- logs

    async def _read_range(self, head: LatestBlock, poll: range) -> None:
        """Read the next blocks of a poll, as many as the endpoint allows, and check them."""
        first = self._next
        logs, last = await self._granted(first, head.number)
        end = head if last == head.number else await self._block(last)
        events = await self._decode(logs)
        await self._checks.check(range(first, last + 1), poll, events)
        await self._verify(end)
        if self._on_logs is not None:
            self._on_logs(logs)
        self._unread += events
        for event in events:
            self._known[event.block_number] = event.block_hash
        self._known[last] = end.hash
        self._next = last + 1
        self._forget()
        if self._store is not None:
            self._store.append(logs, BlockId(last, end.hash))

    async def _granted(self, first: int, newest: int) -> tuple[list[dict[str, Any]], int]:
        """Return the logs from a block on that fit into one answer, and their last block."""
        query = {"address": self._addresses}
        try:
            logs, last = await _granted(self._rpc, query, self._range, first, newest)
        except RpcError:
            # One block cannot be too many: the range was not the problem.
            self._range = Portion(FIRST_SPAN, LONGEST_SPAN)
            raise
        return await self._timed(logs), last

    async def _block(self, number: int) -> LatestBlock:
        block = await self._rpc.call("eth_getBlockByNumber", hex(number), False)
        if block is None:
            raise LogsDisagree(f"block {number} is not there any more")
        return LatestBlock.from_rpc(block)

    async def _decode(self, logs: list[dict[str, Any]]) -> list[Event]:
        events: list[Event] = []
        for start in range(0, len(logs), _DECODED_AT_ONCE):
            try:
                part = logs[start : start + _DECODED_AT_ONCE]
                events += filter(None, map(self._table.decode, part))
            except EncodingError as error:
                raise ChainUnreachable(
                    f"the RPC endpoint answered a malformed log: {error}", hint="is --rpc right?"
                ) from error
            # Let other tasks run: a long catch-up must not stop heartbeats.
            await asyncio.sleep(0)
        events.sort(key=lambda event: (event.block_number, event.log_index))
        return events

    async def _timed(self, logs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the logs with the times of their blocks, which not every endpoint adds."""
        untimed = (log for log in logs if "blockTimestamp" not in log)
        hashes = list({str(log.get("blockHash")): None for log in untimed})
        if not hashes:
            return logs
        blocks = await self._rpc.batch([("eth_getBlockByHash", [h, False]) for h in hashes])
        if any(block is None for block in blocks):
            raise LogsDisagree("the block of a log is not there")
        times = {h: member(block, "timestamp") for h, block in zip(hashes, blocks, strict=True)}
        return [{"blockTimestamp": times.get(str(log.get("blockHash"))), **log} for log in logs]


async def logs_between(
    rpc: Rpc, query: Mapping[str, Any], first: int, last: int
) -> AsyncIterator[dict[str, Any]]:
    """Yield the logs of a range of blocks, in as many requests as the endpoint allows.

    `query` has the address and the topics of `eth_getLogs`.
    """
    span = Portion(FIRST_SPAN, LONGEST_SPAN)
    while first <= last:
        logs, read = await _granted(rpc, query, span, first, last)
        for log in logs:
            yield log
        first = read + 1


async def _granted(
    rpc: Rpc, query: Mapping[str, Any], span: Portion, first: int, newest: int
) -> tuple[list[dict[str, Any]], int]:
    """Return the logs from a block on that fit into one answer, and their last block.

    Raises RpcError when a single block is refused.
    """
    last = min(first + span.size - 1, newest)
    while True:
        try:
            logs = await _logs(rpc, query, first, last)
        except ChainUnreachable:
            span.unanswered()
            raise
        except RpcError as error:
            if last == first:
                raise
            logger.debug("asking for fewer blocks", extra={"cause": str(error)})
            span.refused(last - first + 1)
            last = first + span.size - 1
        else:
            count = len(logs)
            span.answered(is_much=count >= FULL_ANSWER, is_little=count < FULL_ANSWER // 4)
            return logs, last


async def _logs(rpc: Rpc, query: Mapping[str, Any], first: int, last: int) -> list[dict[str, Any]]:
    logs = await rpc.call("eth_getLogs", {**query, "fromBlock": hex(first), "toBlock": hex(last)})
    if not isinstance(logs, list) or not all(isinstance(log, dict) for log in logs):
        raise ChainUnreachable("eth_getLogs answered no list of logs", hint="is --rpc right?")
    return logs


def _hash_of(block: Any) -> Hash32 | None:
    return None if block is None else hash_from_hex(member(block, "hash"))


# ------------------------------------------------------------------ reading a view


async def follow(
    chain: LogSource,
    view: ChainView,
    *,
    poll_s: float,
    confirmations: Confirmations = 0,
    on_change: OnChange | None = None,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Keep the view current until cancelled; an empty view is filled first.

    A view that was read before is continued from its end. It stays `confirmations` blocks behind
    the chain's head. It polls every `poll_s` seconds, or waits for the next block if the endpoint
    announces blocks. An error in `on_change` ends it.
    """
    reader = EventReader(chain, known=view.recent_blocks(), confirmations=confirmations)
    failures = 0
    while True:
        try:
            poll = await reader.poll()
        except ChainError as error:
            failures += 1
            if failures == 1:
                logger.warning("the chain is not available", extra={"error": str(error)})
            pause = min(poll_s * 2 ** min(failures, 16), LONGEST_PAUSE_S)
            await sleep(pause * random.uniform(0.5, 1.0))
            continue
        if failures:
            logger.info("the chain is available again", extra={"failures": failures})
            failures = 0
        if apply_poll(view, poll) and on_change is not None:
            await on_change(poll.events)
        await sleep(poll_s)
        await chain.rpc.next_block()


async def read_until(
    chain: LogSource,
    view: ChainView,
    is_there: Callable[[], bool],
    *,
    poll_s: float,
    confirmations: Confirmations = 0,
    within_s: float = CONFIRMED_S,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Read a view on while it lacks something that may be on chain already, in a block that is not
    confirmed or that the endpoint's node does not know yet.

    Ends when it is there, when the block that is the newest now is read, or after `within_s`.
    """
    if is_there():
        return
    newest, read_to = from_hex(await chain.rpc.call("eth_blockNumber")), -1
    reader = EventReader(chain, known=view.recent_blocks(), confirmations=confirmations)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while not is_there() and read_to < newest:
                await sleep(poll_s)
                try:
                    poll = await reader.poll()
                except ChainError as error:
                    logger.warning("the chain is not available", extra={"error": str(error)})
                    continue
                apply_poll(view, poll)
                if read_to < 0 and poll.head.number < newest:
                    logger.info("waiting for a block to be confirmed", extra={"block": newest})
                read_to = poll.head.number


async def read_view(chain: LogSource, view: V) -> V:
    """Return a view after applying all events on chain so far."""
    apply_poll(view, await EventReader(chain).poll())
    return view


async def find_run(
    chain: Chain, reader: EventReader, view: ChainView, run_id: RunId, *, pause_s: float
) -> RunView:
    """Read a view until it has a run, whose creation may be unconfirmed; return the run.

    Raises ConfigError when the chain has no such run.
    """
    tries = 0
    while True:
        apply_poll(view, await reader.poll())
        run = view.runs.get(run_id)
        # A lagging node may not know the run either.
        tries += await chain.runs.run_count() < run_id if run is None else 0
        if run is not None:
            return run
        if tries == _TRIES:
            raise ConfigError(
                f"there is no run {run_id} on chain {chain.chain_id}",
                hint="check --run, --rpc and --deployments; `muster run create` makes one",
            )
        logger.info("the run is not confirmed yet", extra={"run": run_id})
        await asyncio.sleep(pause_s)


def apply_poll(view: ChainView, poll: Poll) -> bool:
    """Apply a poll to a view; return whether anything changed."""
    if poll.rewound_to is not None:
        view.rewind(poll.rewound_to)
    for event in poll.events:
        view.apply(event)
    return bool(poll.events) or poll.rewound_to is not None
