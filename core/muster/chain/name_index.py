"""The parts of a chain view that a look-up reads: all of them, or the few that an index finds.

The index lets anybody search a long history: its size does not change what one search costs.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from muster.chain.abi import Event
from muster.chain.view import ChainView
from muster.chain.view_parts import (
    BatchView,
    CaseView,
    PaymentView,
    RunView,
    SlashView,
    WorkerView,
)
from muster.protocol.messages import file_hashes_in, slots_in

_DIGITS = 4
"""First digits that a bucket's names share: at most 65,536 buckets, so that a bucket of many
millions of names is still short."""
_SLOT_BUCKETS = 1 << 16
_TABLES = {
    "BatchCommitted": ("batches", "batch_id"),
    "DirectlySubmitted": ("batches", "batch_id"),
    "BatchSplit": ("batches", "batch_id"),
    "OutcomesPosted": ("batches", "batch_id"),
    "SlashReleased": ("slash_by_id", "escrow_id"),
    "SlashRestored": ("slash_by_id", "escrow_id"),
    "CaseOpened": ("cases", "case_id"),
    "CaseClosed": ("cases", "case_id"),
    "WorkerRegistered": ("workers", "worker"),
    "NodeBound": ("workers", "worker"),
    "RunCreated": ("runs", "run_id"),
    "CheckpointPublished": ("runs", "run_id"),
}
"""Events that give a part of the view a name: the part's table, and the argument that is its key.
Slashes and payments are read from their lists."""

_Part: TypeAlias = BatchView | CaseView | WorkerView | SlashView | PaymentView | RunView
_P = TypeVar("_P", bound=_Part)


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of a view; batches in chain order."""

    batches: Iterable[BatchView]
    cases: Iterable[CaseView]
    workers: Iterable[WorkerView]
    slashes: Iterable[SlashView]
    payments: Iterable[PaymentView]
    runs: Iterable[RunView]


def all_parts(view: ChainView) -> Parts:
    """Return every part of a view."""
    return Parts(
        view.batches.values(),
        view.cases.values(),
        view.workers.values(),
        view.slashes,
        view.payments,
        view.runs.values(),
    )


class NameIndex:
    """Finds the parts of a view that may have a name, without reading the others.

    It reads the view's newest events before each answer, and all of them after a rewind.
    """

    def __init__(self, view: ChainView) -> None:
        self._view = view
        self._events: Sequence[Event] | None = None
        self._read_events()

    def parts(self, digits: str) -> Parts:
        """Return all parts with a name that begins with these digits, and few others. At least
        four digits in lower case.
        """
        self._read_events()
        found = list(
            {id(part): part for part in self._by_digits.get(digits[:_DIGITS], ())}.values()
        )
        return Parts(
            sorted(_of(BatchView, found), key=lambda batch: batch.batch_id),
            _of(CaseView, found),
            _of(WorkerView, found),
            _of(SlashView, found),
            _of(PaymentView, found),
            _of(RunView, found),
        )

    def batches(self, worker_id: int, slot: tuple[int, int]) -> list[BatchView]:
        """Return all batches with a submission for a worker's step and index, and few others."""
        self._read_events()
        found = self._by_slot.get(_slot_bucket(worker_id, *slot), ())
        return sorted(
            {batch.batch_id: batch for batch in found}.values(), key=lambda batch: batch.batch_id
        )

    def _read_events(self) -> None:
        view, events = self._view, self._view.events
        if events is not self._events:
            self._events, self._read, self._slashes, self._payments = events, 0, 0, 0
            self._by_digits = defaultdict[str, list[_Part]](list)
            self._by_slot = defaultdict[int, list[BatchView]](list)
        for number in range(self._read, len(events)):
            self._add_event(events[number])
        for number in range(self._slashes, len(view.slashes)):
            self._add(view.slashes[number].tx_hash, view.slashes[number])
        for number in range(self._payments, len(view.payments)):
            self._add(view.payments[number].tx_hash, view.payments[number])
        self._read = len(events)
        self._slashes, self._payments = len(view.slashes), len(view.payments)

    def _add_event(self, event: Event) -> None:
        table, key = _TABLES.get(event.name, ("", ""))
        part = getattr(self._view, table).get(event.args.get(key)) if table else None
        if part is None:
            return
        self._add(event.tx_hash, part)
        for name in _names(event, part):
            self._add(name, part)
        if isinstance(part, BatchView):
            self._add_slots(event, part)

    def _add(self, name: str | bytes, part: _Part) -> None:
        digits = name[2 : 2 + _DIGITS].lower() if isinstance(name, str) else name[:2].hex()
        bucket = self._by_digits[digits]
        if not bucket or bucket[-1] is not part:
            bucket.append(part)

    def _add_slots(self, event: Event, batch: BatchView) -> None:
        if event.name == "OutcomesPosted":
            for slot in slots_in(batch.records.data) if batch.records else ():
                self._by_slot[_slot_bucket(*slot)].append(batch)
        elif batch.direct is not None and (worker := self._view.workers.get(batch.direct.worker)):
            bucket = _slot_bucket(worker.worker_id, batch.direct.step, batch.direct.index)
            self._by_slot[bucket].append(batch)


def _names(event: Event, part: _Part) -> Iterator[str | bytes]:
    """Yield the names that an event gives to a part, besides its transaction."""
    if isinstance(part, BatchView):
        if event.name == "OutcomesPosted":
            yield from file_hashes_in(part.records.data) if part.records else ()
        elif part.direct is not None:
            yield part.direct.file_hash
    elif isinstance(part, CaseView):
        yield part.case_id
    elif isinstance(part, WorkerView):
        yield event.args["node"] if event.name == "NodeBound" else part.address


def _slot_bucket(worker_id: int, step: int, index: int) -> int:
    return hash((worker_id, step, index)) % _SLOT_BUCKETS


def _of(kind: type[_P], parts: Sequence[_Part]) -> list[_P]:
    return [part for part in parts if isinstance(part, kind)]
