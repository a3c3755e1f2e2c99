"""A run's batches for a validator: their submissions, as claims, and the slots that they fill.

A slot is settled once, in the first batch with a submission for it that its worker's node signed:
else an orchestrator could fill the slots of others with forged ones. All validators must agree at
any time, so only batches before the judged one count, whether or not their outcomes are on chain
yet. The orchestrator shows the content of such a batch. The batch is left out if it is not shown
for long, or if nobody can judge it any more. A batch that declares fewer units than its submissions
claim is refused as a whole and fills no slots: its workers submit the same work again.

Content that the orchestrator does not show comes from relays, and from sources that workers name.
No source is trusted. Most are named by strangers, who may want to delay validators: sources are
asked in the background, about a few things at a time, and missing content is not requested again
for a while. Searches that hang make way: those of the worker that has most, then the longest.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

import httpx

from muster.api import BatchEntry
from muster.api.public_hosts import Resolve, resolve
from muster.chain import BatchStatus, BatchView, ChainView
from muster.client.chain_facts import HistoryView, entry_of, ticket_terms
from muster.client.sources import SourcePatience, Sources
from muster.client.validator.checks import ClaimedWork, is_signed_by_node
from muster.protocol.eip712 import Domain
from muster.protocol.errors import ApiError
from muster.protocol.ids import Address, BatchName, Hash32, RunId
from muster.protocol.merkle import batch_root
from muster.protocol.messages import OutcomeRecord, Reason, Submission

if TYPE_CHECKING:
    from muster.client.validator.context import ValidatorContext
    from muster.client.validator.records import JudgedBatch


BATCH_PATIENCE_S = 60.0
"""Seconds for which an unavailable batch delays those after it."""

SlotOfWorker = tuple[int, int, int]
"""Worker id, step, index, within one run."""
Slots = tuple[SlotOfWorker, ...]
"""Slots of a batch, in its order."""
FILLS_NO_SLOT = frozenset({Reason.BAD_SIGNATURE, Reason.BATCH_MISDECLARED})
"""Reasons of records that fill no slot: the work is not the worker's, or its batch is refused."""


class SlotIndex:
    """The batches that fill each slot of a run: the first of those with outcomes, and all of which
    outcomes are expected.
    """

    def __init__(self) -> None:
        self._first: dict[SlotOfWorker, int] = {}
        self._expected: dict[SlotOfWorker, list[int]] = {}

    def add(self, batch_id: int, slots: Slots) -> None:
        """Add the slots that a batch with outcomes fills."""
        for slot in slots:
            self._first[slot] = min(self._first.get(slot, batch_id), batch_id)

    def expect(self, batch_id: int, slots: Slots) -> None:
        """Add the slots of a batch without outcomes, until `withdraw`."""
        for slot in slots:
            self._expected.setdefault(slot, []).append(batch_id)

    def withdraw(self, batch_id: int, slots: Slots) -> None:
        """Take back what was expected of a batch."""
        for slot in slots:
            self._expected[slot].remove(batch_id)
            if not self._expected[slot]:
                del self._expected[slot]

    def is_used(self, slot: SlotOfWorker, *, before: int) -> bool:
        """Return whether a batch with a lower id than `before` fills the slot."""
        is_expected = any(n < before for n in self._expected.get(slot, ()))
        return is_expected or self._first.get(slot, before) < before


def slots_of_records(records: Iterable[OutcomeRecord]) -> Slots:
    """Return the slots that outcome records fill, in their order."""
    return tuple((r.worker_id, r.step, r.index) for r in records if r.reason not in FILLS_NO_SLOT)


def slots_of_entries(
    view: HistoryView, batch: BatchView, entries: Iterable[BatchEntry], domain: Domain
) -> Slots:
    """Return the slots that submissions of a batch fill, in their order: those that their workers'
    nodes signed."""
    claims = (claim_in(view, batch, entry, domain, SlotIndex(), ()) for entry in entries)
    return tuple(
        (claim.worker_id, claim.submission.step, claim.submission.index)
        for claim in claims
        if is_signed_by_node(claim)
    )


def is_misdeclared(batch: BatchView, submissions: Iterable[Submission]) -> bool:
    """Return whether a batch was committed to with fewer units than its submissions claim."""
    # Submissions that were split off later were declared with it.
    declared = batch.units + sum(taken.units for taken in batch.split_off.values())
    return sum(submission.units for submission in submissions) > declared


def claim_in(
    view: HistoryView,
    batch: BatchView,
    entry: BatchEntry,
    domain: Domain,
    slots: SlotIndex,
    earlier: Container[SlotOfWorker],
) -> ClaimedWork:
    """Return a submission as a claim, with the facts on chain when the block of its commitment
    began. `slots` are those of the run's batches, `earlier` those before it in its own batch.
    Worker id 0 means no worker of the run.
    """
    submission = entry.submission
    standing = view.standing(batch.run_id, submission.worker, before=batch.work_block)
    slot = (standing.worker_id if standing else 0, submission.step, submission.index)
    is_active = standing is not None and standing.is_active(batch.work_block)
    return ClaimedWork(
        submission=submission,
        signature=entry.signature,
        ticket=entry.ticket,
        ticket_signature=entry.ticket_signature,
        committed_at=batch.committed_at,
        terms=ticket_terms(
            view,
            batch.run_id,
            domain,
            submission.policy_version,
            submission.worker,
            batch.orchestrator,
        ),
        worker_id=slot[0],
        node=standing.node if standing and is_active else None,
        is_slot_used=slots.is_used(slot, before=batch.first_id) or slot in earlier,
        batch_seed=batch.seed,
    )


class BatchReader:
    """Reads a run's batches for one validator."""

    def __init__(self, context: ValidatorContext, failing_since: dict[object, float]) -> None:
        """`failing_since` maps each unavailable thing to the clock time of its first failure."""
        self.context = context
        self._failing_since = failing_since
        self._batches: Mapping[int, BatchView] | None = None
        self._read = 0
        """Batches of the view that were looked at, in the order of their ids."""
        self._open: dict[int, BatchView] = {}
        """Those of the run without outcomes on chain, by id."""
        self._slots = SlotIndex()
        self._expected: dict[int, tuple[object, Slots]] = {}
        """What open batches will fill, by id, and the judgement or content that says so."""
        self._shown: dict[BatchName, Slots] = {}
        """Slots of batches whose content was shown."""
        self._left_out: set[BatchName] = set()
        """Batches that nobody showed for long."""

    async def contents(self, batch: BatchView) -> list[BatchEntry]:
        """Return the batch's submissions, which reproduce the root on chain.

        A batch that its worker committed directly, or split off another, is on chain with all
        proofs.
        """
        if batch.work is not None:
            return [entry_of(batch.work, batch.committed_at)]
        return await self.context.from_any_source(
            self._contents_at_orchestrator(batch), lambda other: other.contents(batch)
        )

    async def _contents_at_orchestrator(self, batch: BatchView) -> list[BatchEntry]:
        entries = (await self.context.api.batch(batch.batch_id)).submissions
        leaves = [entry.submission.leaf() for entry in entries]
        if len(leaves) != batch.count or batch_root(leaves) != batch.root:
            raise ApiError(
                f"the submissions of batch {batch.batch_id} do not make up its root",
                status=502,
                code="bad_answer",
                hint="the orchestrator is faulty or dishonest",
            )
        return entries

    async def refresh(self, *, before: int) -> None:
        """Add the slots of the batches before this one: from the chain, from the journal and, if
        others may still judge them, from their content. Raises ApiError while a batch is not
        available.
        """
        batches = self.context.view.batches
        if batches is not self._batches:
            # A view that is rewound after a reorganisation has other batches.
            self._batches, self._read = batches, 0
            # Workers may have other numbers in it.
            self._slots, self._open, self._expected = SlotIndex(), {}, {}
            self._shown.clear()
        new = list(islice(batches.values(), self._read, None))
        self._read += len(new)
        self._open |= {b.batch_id: b for b in new if b.run_id == self.context.run_id}
        for batch in list(self._open.values()):
            self._update(batch)
        await self._read_shown([b for b in self._unknown() if b.batch_id < before])
        for batch in self._unknown():
            self._update(batch)

    def _unknown(self) -> list[BatchView]:
        """Return the open batches whose slots are not known, unless they are called withheld: those
        count once a jury has judged them.
        """
        return [
            batch
            for batch in self._open.values()
            if batch.batch_id not in self._expected and batch.status is not BatchStatus.WITHHELD
        ]

    def _update(self, batch: BatchView) -> None:
        """Take in what the chain says of an open batch: that counts, whatever this validator found
        or saw of it. Else take in the judgement of the journal, or the content.
        """
        source: JudgedBatch | Slots | None = None
        if batch.records is not None:
            self._slots.add(batch.first_id, slots_of_records(batch.records))
        if batch.records is not None or batch.is_void:
            del self._open[batch.batch_id]
        elif batch.status is not BatchStatus.WITHHELD:
            source = self.context.journal.judged(batch.name) or self._slots_seen(batch)
        known, slots = self._expected.get(batch.batch_id, (None, ()))
        if source is known:
            return
        self._slots.withdraw(batch.first_id, slots)
        self._expected.pop(batch.batch_id, None)
        if source is not None:
            slots = source if isinstance(source, tuple) else slots_of_records(source.records)
            self._expected[batch.batch_id] = (source, slots)
            self._slots.expect(batch.first_id, slots)

    def claim(
        self, batch: BatchView, entry: BatchEntry, earlier: Container[SlotOfWorker]
    ) -> ClaimedWork:
        """Return a submission as a claim; `earlier` are the slots before it in its own batch."""
        return claim_in(self.context.view, batch, entry, self.context.domain, self._slots, earlier)

    def _slots_seen(self, batch: BatchView) -> Slots | None:
        """Return the slots that a batch fills by its content, None if that was not seen."""
        if batch.work is not None and batch.name not in self._shown:
            shown = entry_of(batch.work, batch.committed_at)
            self._shown[batch.name] = self._slots_in(batch, [shown])
        return self._shown.get(batch.name)

    async def _read_shown(self, batches: Sequence[BatchView]) -> None:
        """Read the slots of those batches that can still be judged, from their content. All are
        asked for before the first failure is raised, so that the patience with all begins now.
        """
        wanted = [batch for batch in batches if batch.name not in self._left_out]
        if not wanted:
            return
        now, deadline_s = await self.context.now(), self.context.windows.outcome_deadline_s
        asking = asyncio.Semaphore(MOST_ASKED)

        async def read(batch: BatchView) -> None:
            async with asking:
                await self._read_slots(batch)

        judgeable = (batch for batch in wanted if now < batch.due_at(deadline_s))
        failures = await asyncio.gather(*map(read, judgeable), return_exceptions=True)
        for failure in filter(None, failures):
            raise failure

    async def _read_slots(self, batch: BatchView) -> None:
        """Note the slots of a batch that nobody judged yet, unless the orchestrator has not shown
        it for long: then it is left out until its outcomes are on chain.
        """
        name = batch.name
        try:
            entries = await self.contents(batch)
        except ApiError:
            now = self.context.clock()
            begun = self._failing_since.get(batch.batch_id, now)
            if now - self._failing_since.setdefault(name, begun) < BATCH_PATIENCE_S:
                raise
            self._left_out.add(name)
            return
        self._failing_since.pop(name, None)
        slots: Slots = ()
        if not is_misdeclared(batch, [entry.submission for entry in entries]):
            slots = self._slots_in(batch, entries)
        self._shown[name] = slots

    def _slots_in(self, batch: BatchView, entries: Iterable[BatchEntry]) -> Slots:
        return slots_of_entries(self.context.view, batch, entries, self.context.domain)


# Content that the orchestrator does not show

LONGEST_S = 45.0
"""Deadline in seconds for asking all sources about one thing."""
WAIT_S = 3.0
"""Seconds that a validator waits for a new search; an answer that arrives later is kept for its
next request."""
SHORT_WAIT_S = 0.5
"""The same while another search hangs: strangers may name any number of sources that do."""
TURN_S = 10.0
"""Seconds after which a search makes way for any other, when there are too many."""
REST, LEAST_REST_S, MOST_REST_S = 10, 1.0, 60.0
"""After a failed search, the pause before the next is REST times its duration, within these bounds
in seconds: a source that answers quickly may have the content soon, one that hangs will hang
again."""
MOST_ASKED = 8
"""Most parallel searches; as many files may be in memory."""
PATIENCE = SourcePatience(source_s=20.0)
"""Timeouts of each source: 64 MiB at 3.3 MB/s."""
SLOWEST = 16
"""Both deadlines double, up to so many times, with each search in which a relay was silent."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Silence:
    """The last search for a file that no source showed."""

    relays: frozenset[str]
    """URLs of relays that did not say that they lack it."""
    slower: int
    """Factor of the next search's deadlines."""


Party = frozenset[Address]
"""The accounts behind a search: the workers that committed the work, or the orchestrator."""


@dataclass(frozen=True, slots=True)
class _Search:
    """A search that runs, or whose answer waits for its next request."""

    party: Party
    began_at: float
    """Clock time."""
    task: asyncio.Task[Any]

    @property
    def turn_s(self) -> float:
        """Seconds for which it keeps its place; an answer waits for its next request."""
        return MOST_REST_S if self.task.done() else TURN_S

    @property
    def has_failed(self) -> bool:
        task = self.task
        return task.done() and (task.cancelled() or task.exception() is not None)


@dataclass(slots=True)
class OtherSources:
    """The sources of one run, except its orchestrator."""

    run_id: RunId
    view: ChainView
    """View of the chain, kept up to date by another task."""
    relays: Callable[[], Sequence[str]]
    """Returns the URLs of the run's relays."""
    own_relays: Callable[[], Awaitable[Sequence[str]]] | None = None
    """Returns those of the relays that may be in a private network and are asked first; None: all
    are.
    """
    allows_private: bool = False
    """Whether strangers' sources may resolve to private addresses; for a devnet."""
    transport: httpx.AsyncBaseTransport | None = None
    """HTTP transport; None for the network."""
    resolver: Resolve = resolve
    """Finds the addresses of strangers' hosts."""
    clock: Callable[[], float] = time.monotonic
    """Clock in seconds, for pauses."""
    _asking: dict[object, _Search] = field(default_factory=dict)
    _rests_until: dict[object, float] = field(default_factory=dict)
    _silence: dict[Hash32, _Silence] = field(default_factory=dict)
    _silent_since: dict[str, tuple[float, float]] = field(default_factory=dict)

    def close(self) -> None:
        """Stop asking."""
        for search in self._asking.values():
            search.task.cancel()

    async def file(self, name: Hash32) -> bytes:
        """Return a submission's file; raises ApiError when no source has it."""
        named: dict[Address, list[str]] = {}
        for batch in self.view.batches.values():
            if batch.run_id == self.run_id and batch.direct and batch.direct.file_hash == name:
                named.setdefault(batch.direct.worker, []).extend(batch.sources)
        return await self._answer(name, Party(named), lambda: self._file(name, named.values()))

    def silent_s(self, name: Hash32) -> float | None:
        """Return the shortest time in seconds for which a relay has been silent about a file; None
        when all relays said that they lack it.
        """
        if name not in self._silence:
            return 0.0  # no search has ended yet
        now = self.clock()
        return min(
            (now - self._silence_began(url, now) for url in self._silence[name].relays),
            default=None,
        )

    def _silence_began(self, url: str, now: float) -> float:
        """Return since when a relay is silent; one that was not found silent for a while has not
        been silent all the time.
        """
        began, last = self._silent_since.get(url, (now, now))
        return now if now - last > MOST_REST_S + SLOWEST * LONGEST_S else began

    async def contents(self, batch: BatchView) -> list[BatchEntry]:
        """Return the submissions of a batch; raises ApiError when no source shows them."""
        party = Party({batch.orchestrator})
        return await self._answer(batch.name, party, lambda: self._contents(batch))

    async def _file(self, name: Hash32, named: Iterable[Sequence[str]]) -> bytes:
        slower = self._silence[name].slower if name in self._silence else 1
        patience = replace(PATIENCE, source_s=slower * PATIENCE.source_s)
        async with (
            asyncio.timeout(slower * LONGEST_S),
            await self._sources(*named, patience=patience) as sources,
        ):
            try:
                data = await sources.file(name)
            except (ApiError, asyncio.CancelledError):
                self._note_silence(name, sources, slower)
                raise
        self._silence.pop(name, None)
        return data

    def _note_silence(self, name: Hash32, sources: Sources, slower: int) -> None:
        """Remember which relays did not say whether they have a file."""
        asked = {url.rstrip("/") for url in self.relays()}.intersection(sources.urls)
        silent, now = frozenset(asked - sources.lacking), self.clock()
        for url in sources.lacking:
            self._silent_since.pop(url, None)
        for url in silent:
            self._silent_since[url] = (self._silence_began(url, now), now)
        self._silence[name] = _Silence(silent, min(2 * slower, SLOWEST) if silent else 1)

    async def _contents(self, batch: BatchView) -> list[BatchEntry]:
        async with asyncio.timeout(LONGEST_S), await self._sources(batch.sources) as sources:
            return await sources.batch(batch.batch_id, batch.root, batch.count)

    async def _answer(
        self, about: object, party: Party, ask: Callable[[], Coroutine[Any, Any, T]]
    ) -> T:
        """Return the answer if it arrives soon; raises ApiError otherwise."""
        search = self._asking.get(about)
        if search is None:
            hangs = any(self._hangs(each) for each in self._asking.values())
            search = self._begin(about, party, ask)
            await asyncio.wait([search.task], timeout=SHORT_WAIT_S if hangs else WAIT_S)
        task = search.task
        if not task.done() or task.cancelled():
            raise _not_yet()
        self._asking.pop(about, None)
        try:
            answer: T = task.result()
        except TimeoutError as error:
            raise _not_yet() from error
        return answer

    async def _noting_failure(self, about: object, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        began = self.clock()
        try:
            return await ask()
        except (ApiError, TimeoutError):
            self._rest(about, began)
            raise

    def _rest(self, about: object, began_at: float) -> None:
        now = self.clock()
        rest_s = min(max(REST * (now - began_at), LEAST_REST_S), MOST_REST_S)
        self._rests_until[about] = now + rest_s

    def _hangs(self, search: _Search) -> bool:
        return not search.task.done() and self.clock() - search.began_at >= WAIT_S

    def _begin(
        self, about: object, party: Party, ask: Callable[[], Coroutine[Any, Any, T]]
    ) -> _Search:
        now = self.clock()
        self._rests_until = {what: at for what, at in self._rests_until.items() if at > now}
        if about in self._rests_until:
            raise _not_yet()
        if len(self._asking) >= MOST_ASKED:
            self._make_place(party)
        task = asyncio.create_task(self._noting_failure(about, ask))
        # The result must be retrieved even when nobody asks again.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        search = self._asking[about] = _Search(party, now, task)
        return search

    def _make_place(self, party: Party) -> None:
        """Drop failures; else end a search of the party that has most, the newcomer counted, or
        one that had its turn; raises ApiError when there is none.
        """
        for what in [what for what, search in self._asking.items() if search.has_failed]:
            del self._asking[what]
        if len(self._asking) < MOST_ASKED:
            return
        now = self.clock()
        count = Counter([party, *(search.party for search in self._asking.values())])
        found = [
            (count[search.party], not search.task.done(), now - search.began_at, what)
            for what, search in self._asking.items()
            if count[search.party] > count[party] or now - search.began_at >= search.turn_s
        ]
        if not found:
            raise _not_yet()
        what = max(found, key=lambda each: each[:3])[3]
        search = self._asking.pop(what)
        if not search.task.done():
            search.task.cancel()
            self._rest(what, search.began_at)

    async def _sources(self, *named: Sequence[str], patience: SourcePatience = PATIENCE) -> Sources:
        relays = self.relays()
        own = relays if self.own_relays is None else await self.own_relays()
        # The first source of each party, then the second: nobody's are crowded out.
        in_turn = zip_longest(*named, relays)
        return Sources(
            own,
            named=[url for urls in in_turn for url in urls if url is not None],
            allows_private=self.allows_private,
            patience=patience,
            transport=self.transport,
            resolver=self.resolver,
        )


def _not_yet() -> ApiError:
    return ApiError(
        "no source has shown the batch yet",
        status=503,
        code="no_source",
        hint="it asks again later at the --relay URLs and the sources that the chain names; "
        "validators do not ask each other",
    )
