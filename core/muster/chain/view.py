"""The chain's state, rebuilt from its events: pure, total, and the same for every reader.

`apply` takes events in chain order and never raises on an event of our contracts; an event that
contradicts earlier ones is recorded in `contradictions`. The function `on_worker_joined` of
`view_events.workers` applies `WorkerJoined`, and so on; an event without a function changes
nothing. `rewind` drops the events that a reorganisation made void, and rebuilds everything from the
others.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache

from muster.chain.abi import Event, snake_case
from muster.chain.structs import BlockId
from muster.chain.view_events import Arguments, ChainTables, batches, runs, workers
from muster.chain.view_parts import BatchView, MemberView, StakeView, StreamItem
from muster.protocol.errors import EncodingError
from muster.protocol.ids import Address, Hash32, RunId
from muster.protocol.messages import Verdict, file_hashes_in

EVENT_MODULES = (workers, runs, batches)
"""Modules whose functions apply events."""
REMEMBERED_BLOCKS = 256
"""Blocks whose hashes are remembered; after a deeper reorganisation everything is read again."""


class ChainView(ChainTables):
    """The state that all events lead to. Objects taken from it are stale after a rewind: look them
    up again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._events: list[Event] = []

    # -------------------------------------------------------------------- events

    @property
    def block_number(self) -> int | None:
        """The block of the newest event."""
        return self._events[-1].block_number if self._events else None

    @property
    def events(self) -> Sequence[Event]:
        """The applied events, oldest first; a new object after a rewind."""
        return self._events

    def apply(self, event: Event) -> None:
        """Apply the next event; an event that was applied before changes nothing."""
        if self._events:
            last = self._events[-1]
            here = (event.block_number, event.log_index)
            if here <= (last.block_number, last.log_index):
                return
        self._events.append(event)
        self._take_in(event)

    def rewind(self, block_number: int) -> None:
        """Forget everything after a block."""
        if self.block_number is None or self.block_number <= block_number:
            return
        self._events = [e for e in self._events if e.block_number <= block_number]
        self.clear()
        for event in self._events:
            self._take_in(event)

    def recent_blocks(self) -> list[BlockId]:
        """Return the newest blocks with events, from which a reader can continue."""
        blocks: dict[int, Hash32] = {}
        for event in reversed(self._events):
            blocks[event.block_number] = event.block_hash
            if len(blocks) == REMEMBERED_BLOCKS:
                break
        return [BlockId(number, blocks[number]) for number in sorted(blocks)]

    def _take_in(self, event: Event) -> None:
        handler = handler_of(event.name)
        if handler is None:
            return
        try:
            handler(self, event, event.args)
        except (KeyError, EncodingError) as error:
            # No earlier event created what it refers to; or it lacks the argument.
            self.contradict(event, f"refers to something unknown: {error}")

    # ------------------------------------------------------------------- queries

    def training_stream(self, run_id: RunId) -> list[StreamItem]:
        """Return a run's records posted as Accepted, in (block, log index, position) order."""
        run = self.runs.get(run_id)
        return list(run.stream) if run else []

    def file_hashes(self, batch: BatchView) -> Iterator[bytes]:
        """Yield the file hashes of a batch that are on chain: of judged or direct submissions."""
        if batch.records is not None:
            yield from file_hashes_in(batch.records.data)
        elif batch.direct is not None:
            yield batch.direct.file_hash

    def standing_verdict(self, batch_id: int, position: int) -> Verdict | None:
        """Return the verdict of an outcome after disputes; None without an outcome."""
        batch = self.batches.get(batch_id)
        if batch is None or batch.records is None or not 0 <= position < len(batch.records):
            return None
        record = batch.records[position]
        case = self.cases.get(record.leaf(batch_id, position)) if self.cases else None
        return Verdict(case.ruling >> 8) if case and case.overturned else record.verdict

    def member(self, run_id: RunId, worker: Address) -> MemberView | None:
        """Return a worker's membership in a run; None when it never joined it."""
        run = self.runs.get(run_id)
        return None if run is None else run.members.get(worker)

    def stake(self, run_id: RunId, owner: Address) -> StakeView:
        """Return the stake of an account in a run, which may be nothing."""
        return self.stakes.get((run_id, owner)) or StakeView(run_id, owner)

    def jurors(self) -> list[Address]:
        """Return the accounts on the network's bench at present."""
        return [place.juror for place in self.bench if not place.left_at]


_Handler = Callable[[ChainTables, Event, Arguments], None]


@cache
def handler_of(event: str) -> _Handler | None:
    """Return the function that applies an event; event names are unique among contracts."""
    name = f"on_{snake_case(event)}"
    handlers = (getattr(module, name, None) for module in EVENT_MODULES)
    return next(filter(None, handlers), None)
