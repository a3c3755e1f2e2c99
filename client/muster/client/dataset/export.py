"""Export: from the run's training stream to rows, one submission after the other.

Starts where the folder ends, so that an export that was stopped goes on, and one that is run again
later holds what was accepted since. Submissions whose acceptance a jury has overturned are left
out, also those that an earlier export had taken.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pyarrow as pa

from muster.client.audit.history import ChainHistory
from muster.client.audit.lineage import stream_rows
from muster.client.audit.table import OutcomeTable, tabulate
from muster.client.dataset.folder import DataFolder, DataOrigin, DataPart, PartWriter
from muster.client.dataset.rows import Accepted, RowMaker, policy_roots
from muster.client.dataset.selection import Selection
from muster.protocol.encoding import hex0x
from muster.protocol.errors import ApiError, EncodingError, NotYet, StorageError
from muster.protocol.ids import Address, Hash32, RunId
from muster.protocol.messages import Verdict
from muster.telemetry import Progress

DOWNLOADS = 8
"""Files that are fetched at the same time."""

FindFile = Callable[[Hash32], Awaitable[bytes]]
"""Returns a submission's file by its hash; raises a MusterError when nobody has it."""


@dataclass(frozen=True, slots=True)
class Stream:
    """A run's accepted submissions in the order in which they were posted."""

    run_id: RunId
    table: OutcomeTable
    """Every outcome of the chain."""
    rows: Sequence[int]
    """The rows of the table that are the stream."""
    workers: dict[int, Address]
    """Wallets by number."""
    roots: dict[int, Hash32]
    """Roots of the published policies."""

    @classmethod
    def of(cls, history: ChainHistory, run_id: RunId) -> Stream:
        """Return a run's."""
        table = tabulate(history.ledger)
        return cls(
            run_id,
            table,
            stream_rows(history.ledger, table, run_id),
            {number: worker.address for number, worker in history.ledger.worker_by_id.items()},
            policy_roots(history.ledger.runs[run_id]),
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> Accepted:
        row = self.rows[place]
        batch, position = self.table.place(row)
        record = self.table.record(row)
        return Accepted(
            stream_position=place,
            batch_id=batch.batch_id,
            position=position,
            worker=self.workers[record.worker_id],
            record=record,
            policy_root=self.roots[int(record.policy_version)],
        )

    def overturned(self) -> set[int]:
        """Return the places of submissions that a jury says should not have been accepted."""
        verdicts = self.table.verdict_N[np.asarray(self.rows, np.int64)]
        return {int(place) for place in np.flatnonzero(verdicts != Verdict.ACCEPTED)}


def origin_of(history: ChainHistory, run_id: RunId, tokenizer: Hash32) -> DataOrigin:
    """Return where a run's rows come from; `tokenizer` is the root of the policy that has it."""
    config = history.ledger.runs[run_id].config
    return DataOrigin(
        chain_id=history.deployment.chain_id,
        ledger=history.deployment.contracts["ContributionLedger"],
        run_id=run_id,
        recipe=hex0x(config.recipe_hash),
        task_set=hex0x(config.task_set_hash),
        tokenizer=hex0x(tokenizer),
    )


async def export_rows(
    folder: DataFolder,
    stream: Stream,
    maker: RowMaker,
    selection: Selection,
    find_file: FindFile,
    on_progress: Progress = lambda _done, _of: None,
) -> None:
    """Bring a folder up to the end of a stream.

    Raises NotYet when nothing is accepted, and when a file cannot be had; what comes before it is
    exported then.
    """
    if not len(stream):
        raise NotYet("the run has no accepted submission yet")
    overturned = stream.overturned()
    part = _recall(folder, selection, overturned)
    places = range(part.end, len(stream))
    async with aclosing(_files(stream, places, overturned, find_file)) as files:
        while part.end < len(stream):
            part = await _grow(folder, part, files, (maker, selection))
            folder.put(part)
            on_progress(part.end, len(stream))
            if part.is_whole:
                part = DataPart(part.end, part.end, is_whole=False)


def _recall(folder: DataFolder, selection: Selection, overturned: set[int]) -> DataPart:
    """Tell the selection what earlier exports have kept, and return the part that may still grow.

    Rows that were overturned since are taken out. Raises StorageError for a damaged part.
    """
    for part in folder.export.parts:
        if not folder.is_intact(part):
            raise StorageError(
                f"{', '.join(each.name for each in part.files)} of {folder.path} is damaged",
                hint="remove the folder and export again",
            )
        tables = folder.tables(part, ["stream_position"])
        if any(not overturned.isdisjoint(t["stream_position"].to_pylist()) for _, t in tables):
            folder.leave_out(part, overturned)
    for part in folder.export.parts:
        for _, rows in folder.tables(part, ["problem_id", "completion_tokens"]):
            selection.remember(rows)
    end = folder.export.end
    last = folder.export.parts[-1] if folder.export.parts else None
    return last if last and not last.is_whole else DataPart(end, end, is_whole=False)


async def _grow(
    folder: DataFolder,
    part: DataPart,
    files: AsyncIterator[tuple[Accepted, bytes | None]],
    choose: tuple[RowMaker, Selection],
) -> DataPart:
    """Write a part with what it has and what follows, until it is full or there is no more."""
    maker, selection = choose
    end = part.end
    with PartWriter(folder, part) as writer:
        for _, rows in folder.submissions(part):
            writer.add(rows)
        try:
            while not writer.is_full:
                accepted, data = await anext(files)
                if data is None:
                    writer.left_out["overturned"] += accepted.record.rollouts
                else:
                    kept, left_out = selection.choose(_rows(maker, data, accepted))
                    writer.left_out += left_out
                    writer.add(kept)
                end = accepted.stream_position + 1
        except StopAsyncIteration:
            pass
        except (NotYet, asyncio.CancelledError):
            folder.put(writer.finish(end))
            raise
        return writer.finish(end)


def _rows(maker: RowMaker, data: bytes, accepted: Accepted) -> pa.Table:
    try:
        return maker.rows(data, accepted)
    except EncodingError as error:
        error.add_note(f"submission {accepted.batch_id}:{accepted.position}")
        raise


async def _files(
    stream: Stream, places: range, overturned: set[int], find_file: FindFile
) -> AsyncGenerator[tuple[Accepted, bytes | None]]:
    """Yield the submissions with their files, None for those that were overturned; fetches some
    files ahead.
    """
    ahead: deque[tuple[Accepted, asyncio.Task[bytes] | None]] = deque()
    waiting = iter(places)
    try:
        while True:
            for place in islice(waiting, DOWNLOADS - len(ahead)):
                accepted = stream[place]
                is_wanted = place not in overturned
                task = find_file(accepted.record.file_hash) if is_wanted else None
                ahead.append((accepted, asyncio.ensure_future(task) if task else None))
            if not ahead:
                return
            accepted, fetched = ahead.popleft()
            yield accepted, await _one(accepted, fetched) if fetched else None
    finally:
        for _, left in ahead:
            if left:
                left.cancel()


async def _one(accepted: Accepted, fetched: asyncio.Task[bytes]) -> bytes:
    try:
        return await fetched
    except ApiError as error:
        raise NotYet(
            f"the file of submission {accepted.batch_id}:{accepted.position} is not at hand: "
            f"{error}",
            hint="what comes before it is exported; name a source that has it and run again",
        ) from error
