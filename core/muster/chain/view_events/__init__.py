"""The effects of events on a ChainView, by subject: `on_worker_joined` applies `WorkerJoined`.

This module has the tables that events fill and queries read.
"""

from typing import Any, ClassVar

from muster.chain.abi import Event
from muster.chain.view_parts import (
    BatchView,
    CaseView,
    PaymentView,
    PostedRecords,
    RunView,
    SlashView,
    StakeView,
    WorkerView,
)
from muster.protocol.ids import Address, Hash32, RunId
from muster.protocol.jury import BenchPlace

Arguments = dict[str, Any]
"""An event's arguments by name."""


class ChainTables:
    """The state that events lead to, and the events that contradict earlier ones."""

    RECORDS: ClassVar[type[PostedRecords]] = PostedRecords
    """The class that holds a batch's records."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.workers: dict[Address, WorkerView] = {}
        """By staking wallet, in order of registration; their status per run is in the run's
        `members`."""
        self.worker_by_id: dict[int, WorkerView] = {}
        """By number."""
        self.worker_by_node: dict[Address, WorkerView] = {}
        """By the hot key that serves at present."""
        self.stakes: dict[tuple[RunId, Address], StakeView] = {}
        """By run and owner; run 0 is the jurors' bench."""
        self.runs: dict[RunId, RunView] = {}
        """By run id."""
        self.batches: dict[int, BatchView] = {}
        """By batch id."""
        self.own_work: dict[tuple[RunId, Address], dict[Hash32, BatchView]] = {}
        """By run and worker: the batches that it committed or took out of others, by their leaf."""
        self.newest_batch: dict[RunId, int] = {}
        """By run."""
        self.slashes: list[SlashView] = []
        """In chain order."""
        self.payments: list[PaymentView] = []
        """In chain order."""
        self.cases: dict[Hash32, CaseView] = {}
        """By outcome leaf, or `summons_of` a batch that its run left unjudged."""
        self.bench: list[BenchPlace] = []
        """The places of the network's jurors."""
        self.contradictions: list[str] = []
        """Events that contradict earlier ones."""
        self.slash_by_id: dict[Hash32, SlashView] = {}
        """By escrow id."""

    def contradict(self, event: Event, problem: str) -> None:
        """Record that an event contradicts earlier ones."""
        self.contradictions.append(
            f"{event.contract}.{event.name} in transaction {event.tx_hash}: {problem}"
        )

    def expect(self, event: Event, what: str, ours: object, theirs: object) -> None:
        """Record a contradiction if an event's value differs from that of earlier events."""
        if ours != theirs:
            self.contradict(event, f"{what} should be {ours}, the event says {theirs}")
