"""A chain in virtual time: blocks, a transaction pool, reorganisations, and RPC endpoints.

A reorganisation removes blocks and returns their transactions to the pool, to be mined again in
other blocks or refused. The state always equals a replay of the standing blocks, so a refused
transaction leaves no trace.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from muster.chain import BlockId, Event, Poll, RunConfig
from muster.lab.simulator.model.network import Network
from muster.lab.simulator.model.words import Fixed, Refused
from muster.lab.simulator.translation import Ranks, Words, emitter_of
from muster.protocol.encoding import keccak
from muster.protocol.errors import ChainUnreachable, ContractRevert
from muster.protocol.ids import Hash32

EPOCH = 1_800_000_000
"""Chain time at virtual time 0, Unix seconds."""

Call = Callable[[Network], Any]
"""Changes the model and returns a result for the caller; raises Refused."""


@dataclass(eq=False)
class Transaction:
    """A call that waits for a block, or is in one."""

    kind: str
    """Name of its operation, for the counts."""
    call: Call
    """Its change of the contracts."""
    size: int
    """Number of submissions or records that it carries."""
    done: asyncio.Future[Any] | None
    """Its first result, as long as somebody waits for it."""


@dataclass
class Block:
    """One block."""

    number: int
    """Its height."""
    hash: Hash32
    """Its hash."""
    timestamp: int
    """Unix seconds."""
    transactions: list[Transaction] = field(default_factory=list)
    """Transactions that succeeded."""
    events: list[Event] = field(default_factory=list)
    """Events that they emitted."""


class SimulatedChain:
    """The canonical chain."""

    def __init__(self, fixed: Fixed, configs: dict[int, RunConfig], rng: random.Random) -> None:
        self.fixed = fixed
        self.words = Words(configs)
        self.blocks = [Block(0, keccak(b"genesis"), EPOCH)]
        self.pool: list[Transaction] = []
        self.refused: list[tuple[str, str]] = []
        """Kind and error of transactions that no block took."""
        self.mined: dict[str, list[int]] = {}
        """Sizes of transactions by kind, as often as they were mined."""
        self.reorganisations = 0
        self.check: Callable[[Network], None] | None = None
        """Called after every block with its state; raises if it is not sound."""
        self._rng = rng
        self._forks = 0
        self._labels: dict[str, asyncio.Future[Any]] = {}
        self.state = self._genesis()

    def _genesis(self) -> Network:
        return Network(self.fixed, EPOCH, 0, Ranks())

    @property
    def head(self) -> Block:
        """The newest block."""
        return self.blocks[-1]

    # ------------------------------------------------------------- transactions

    async def send(self, kind: str, call: Call, *, size: int = 1, label: str | None = None) -> Any:
        """Return a transaction's result once it is mined; raises ContractRevert when it is refused.

        If a transaction with this label already stands, its first result is returned instead.
        """
        done = self._labels.get(label) if label else None
        if done is None or (done.done() and done.exception() is not None):
            done = asyncio.get_running_loop().create_future()
            # The sender may have been killed meanwhile.
            done.add_done_callback(lambda future: future.exception())
            self.pool.append(Transaction(kind, call, size, done))
            if label:
                self._labels[label] = done
        return await asyncio.shield(done)

    def mine(self, now: float) -> Block:
        """Put the pool into a block at a virtual time, and return it."""
        time = max(EPOCH + int(now), self.head.timestamp + 1)
        name = b"%d %d %d" % (self.head.number + 1, self._forks, self._rng.getrandbits(64))
        block = Block(self.head.number + 1, keccak(self.head.hash + name), time)
        self.blocks.append(block)
        pool, self.pool = self.pool, []
        for transaction in pool:
            self._include(transaction, block)
        self._close(block)
        if self.check is not None:
            self.check(self.state)
        return block

    def _include(self, transaction: Transaction, block: Block) -> None:
        try:
            result = self._happen(transaction, block)
        except Refused as refused:
            self.refused.append((transaction.kind, refused.name))
            self._rebuild()
            if transaction.done and not transaction.done.done():
                values = tuple(self.words.said(value) for value in refused.values)
                transaction.done.set_exception(ContractRevert(refused.name, values))
            return
        block.transactions.append(transaction)
        self.mined.setdefault(transaction.kind, []).append(transaction.size)
        if transaction.done and not transaction.done.done():
            transaction.done.set_result(result)

    def _happen(self, transaction: Transaction, block: Block) -> Any:
        state = self.state
        state.now, state.block, state.events = block.timestamp, block.number, []
        result = transaction.call(state)
        for name, args in state.events:
            block.events.append(self._event(name, args, block))
        return result

    def _event(self, name: str, args: dict[str, Any], block: Block) -> Event:
        index = len(block.events)
        return Event(
            contract=emitter_of().get(name, "MusterToken"),
            name=name,
            args=self.words.args(name, args),
            block_number=block.number,
            block_hash=block.hash,
            block_timestamp=block.timestamp,
            log_index=index,
            tx_hash="0x" + keccak(block.hash + index.to_bytes(4, "big")).hex(),
        )

    def _close(self, block: Block) -> None:
        self.state.now, self.state.block, self.state.events = block.timestamp, block.number, []

    # -------------------------------------------------------------------- history

    def _rebuild(self) -> None:
        """Rebuild the state from the standing blocks."""
        self.state = self.replayed()

    def replayed(self) -> Network:
        """Return the state that replaying every block from genesis gives."""
        state = self._genesis()
        for block in self.blocks:
            for transaction in block.transactions:
                state.now, state.block, state.events = block.timestamp, block.number, []
                transaction.call(state)
            state.now, state.block, state.events = block.timestamp, block.number, []
        return state

    def reorganise(self, depth: int) -> None:
        """Remove the newest blocks; their transactions return to the front of the pool."""
        depth = min(depth, len(self.blocks) - 1)
        gone, self.blocks = self.blocks[-depth:], self.blocks[:-depth]
        self.pool = [t for block in gone for t in block.transactions] + self.pool
        self._forks += 1
        self.reorganisations += 1
        self._rebuild()

    def events(self) -> list[Event]:
        """Return every event of the chain that stands."""
        return [event for block in self.blocks for event in block.events]


class Endpoint:
    """An RPC endpoint: what it has seen of the chain, some seconds late, and sometimes down."""

    def __init__(self, chain: SimulatedChain) -> None:
        self._chain = chain
        self._seen: list[Block] = [chain.blocks[0]]
        self.lag_blocks = 0
        """How many blocks it is behind."""
        self.is_up = True
        """Whether it answers."""

    @property
    def _visible(self) -> list[Block]:
        chain = self._chain.blocks
        return chain[: max(len(chain) - self.lag_blocks, 1)]

    async def poll(self) -> Poll:
        """Return what happened since the last call; raises ChainUnreachable while it is down."""
        self.require_up()
        visible, seen = self._visible, self._seen
        common = min(len(seen), len(visible))
        while seen[common - 1] is not visible[common - 1]:
            common -= 1
        rewound_to = seen[common - 1].number if common < len(seen) else None
        events = [event for block in visible[common:] for event in block.events]
        self._seen = list(visible) if rewound_to is not None else [*seen, *visible[common:]]
        head = visible[-1]
        return Poll(events, rewound_to, BlockId(head.number, head.hash))

    async def latest(self) -> Block:
        """Return the newest block it knows."""
        self.require_up()
        return self._visible[-1]

    async def now(self) -> int:
        """Return the time of the newest block it knows."""
        return (await self.latest()).timestamp

    def require_up(self) -> None:
        """Raise ChainUnreachable while it is down."""
        if not self.is_up:
            raise ChainUnreachable("the simulated endpoint is down")
