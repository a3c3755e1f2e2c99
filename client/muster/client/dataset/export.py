"""Export: writes the run's training stream as rows, submission by submission, and a data card.

Continues at the end of the folder: an interrupted export resumes, and a later one adds newly
accepted submissions. Submissions whose acceptance a jury has overturned are left out, and removed
if an earlier export included them.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from muster.client.audit.history import ChainHistory
from muster.client.audit.lineage import stream_rows
from muster.client.audit.outcome_table import OutcomeTable, tabulate
from muster.client.dataset.folder import CARD, SPLITS, DataFolder, DataOrigin, DataPart, PartWriter
from muster.client.dataset.rows import Accepted, RowMaker, policy_roots
from muster.client.dataset.selection import Selection
from muster.lifecycle.files import whole_file
from muster.protocol.encoding import hex0x
from muster.protocol.errors import ApiError, EncodingError, NotYet, StorageError
from muster.protocol.ids import Address, Hash32, RunId
from muster.protocol.messages import Verdict
from muster.telemetry import Progress

DOWNLOADS = 8
"""Files that are fetched at the same time."""

FindFile = Callable[[Hash32], Awaitable[bytes]]
"""Returns a submission's file by its hash; raises a MusterError when no source has it."""


@dataclass(frozen=True, slots=True)
class Stream:
    """A run's accepted submissions in the order in which they were posted."""

    run_id: RunId
    table: OutcomeTable
    """Every outcome of the chain."""
    rows: Sequence[int]
    """The rows of the table that form the stream."""
    workers: dict[int, Address]
    """Wallets by worker id."""
    roots: dict[int, Hash32]
    """Roots of the published policies."""

    @classmethod
    def of(cls, history: ChainHistory, run_id: RunId) -> Stream:
        """Return a run's stream."""
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
        """Return the places of submissions whose acceptance a jury overturned."""
        verdicts = self.table.verdict_N[np.asarray(self.rows, np.int64)]
        return {int(place) for place in np.flatnonzero(verdicts != Verdict.ACCEPTED)}


def origin_of(history: ChainHistory, run_id: RunId, tokenizer: Hash32) -> DataOrigin:
    """Return the origin of a run's rows; `tokenizer` is the root of the policy that has it."""
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
    """Extend a folder to the end of a stream.

    Raises NotYet when nothing is accepted, or when a file is not available; the submissions before
    it are exported first.
    """
    if not len(stream):
        raise NotYet("the run has no accepted submission yet")
    overturned = stream.overturned()
    part = _recall(folder, selection, overturned)
    places = range(part.end, len(stream))
    async with aclosing(_files(stream, places, overturned, find_file)) as files:
        while part.end < len(stream):
            part = await _grow(folder, part, files, (maker, selection))
            on_progress(part.end, len(stream))
            if part.is_whole:
                part = DataPart(part.end, part.end, is_whole=False)


def _recall(folder: DataFolder, selection: Selection, overturned: set[int]) -> DataPart:
    """Load into the selection what earlier exports kept, and return the part that may still grow.

    Rows that were overturned meanwhile are removed. Raises StorageError for a damaged part.
    """
    for part in folder.export.parts:
        folder.settle(part)
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
    """Write a part with its own rows and further ones, until it is full or the stream ends."""
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
            writer.finish(end, is_whole=writer.is_full)
            raise
        return writer.finish(end, is_whole=writer.is_full)


def _rows(maker: RowMaker, data: bytes, accepted: Accepted) -> pa.Table:
    try:
        return maker.rows(data, accepted)
    except EncodingError as error:
        error.add_note(f"submission {accepted.batch_id}:{accepted.position}")
        raise


async def _files(
    stream: Stream, places: range, overturned: set[int], find_file: FindFile
) -> AsyncGenerator[tuple[Accepted, bytes | None]]:
    """Yield the submissions with their files, None for overturned ones; prefetches some files."""
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
            hint="all rows before it are exported; give a source that has the file and run "
            "the command again",
        ) from error


# The data card: what is in a data set and where it comes from, in figures.
#
# Every figure is computed from the rows, from `export.json` or from the ledger, so anyone can write
# the same card, byte for byte, as `muster data verify` does.

MOST_LISTED = 50
"""Most rows of a table in the card."""
_WHY = {
    "part": "of a part that was not asked for",
    "reward": "reward below the least",
    "length": "completion shorter or longer than asked for",
    "unfinished": "cut off at the token limit",
    "disagrees": "another answer than most of its group, or a group that does not agree",
    "worse": "another of its group has a higher reward, or the same and comes first",
    "contaminated": "repeats a held-out text",
    "duplicate": "the same problem and completion as an earlier row",
    "enough": "the problem has its rows",
    "overturned": "a jury overturned the acceptance",
}


@dataclass(slots=True)
class _Sums:
    """Sums over some rows."""

    rows: int = 0
    reward: float = 0.0
    tokens: int = 0
    finished: int = 0
    problems: set[str] = field(default_factory=set)

    def line(self, name: str) -> str:
        """Return a line of a table."""
        share = self.rows or 1
        return (
            f"| {name} | {self.rows:,} | {len(self.problems):,} | {self.reward / share:.4f} "
            f"| {self.tokens / share:.1f} | {self.finished / share:.2%} |"
        )


class CardFigures:
    """Figures over all rows of a data set, computed from its files."""

    COLUMNS = (
        *("problem_id", "part", "task_type", "verifier", "reward", "is_finished"),
        "completion_tokens",
        *("worker", "policy_version", "stream_position"),
    )
    """Columns that are read."""

    def __init__(self, folder: DataFolder) -> None:
        self.splits = {split: _Sums() for split in SPLITS}
        self.tasks: dict[tuple[str, str, str], _Sums] = {}
        """By part, task type and verifier."""
        self.workers: Counter[str] = Counter()
        """Rows by worker."""
        self.versions: Counter[int] = Counter()
        """Rows by policy version."""
        self.submissions = 0
        """Submissions that have a row."""
        for part in folder.export.parts:
            self._take(folder, part)

    def _take(self, folder: DataFolder, part: DataPart) -> None:
        places: set[int] = set()
        for name, rows in folder.tables(part, self.COLUMNS):
            values = {column: rows[column].to_pylist() for column in self.COLUMNS[:6]}
            lengths = pc.list_value_length(rows["completion_tokens"]).to_pylist()
            keys = zip(values["part"], values["task_type"], values["verifier"], strict=True)
            split = self.splits[name.removeprefix("data/").partition("-")[0]]
            for problem, key, reward, finished, length in zip(
                values["problem_id"],
                keys,
                values["reward"],
                values["is_finished"],
                lengths,
                strict=True,
            ):
                for sums in (split, self.tasks.setdefault(key, _Sums())):
                    sums.rows += 1
                    sums.reward += reward
                    sums.tokens += length
                    sums.finished += finished
                    sums.problems.add(problem)
            self.workers.update(rows["worker"].to_pylist())
            self.versions.update(rows["policy_version"].to_pylist())
            places.update(rows["stream_position"].to_pylist())
        self.submissions += len(places)

    @property
    def rows(self) -> int:
        """All rows."""
        return sum(sums.rows for sums in self.splits.values())


def write_card(folder: DataFolder, stream: Stream, figures: CardFigures) -> str:
    """Return the data card of a folder that was exported from a stream."""
    export = folder.export
    origin, end = export.origin, export.end
    rollouts = sum(stream[place].record.rollouts for place in range(end))
    left_out = sum((Counter(part.left_out) for part in export.parts), Counter[str]())
    lines = [
        *_front_matter(figures),
        f"# Verified rollouts of run {origin.run_id} on chain {origin.chain_id}",
        "",
        f"{figures.rows:,} samples of {figures.submissions:,} submissions by "
        f"{len(figures.workers):,} workers. Strangers generated them; each submission was checked "
        "and accepted by the run's validators, who signed that on chain.",
        "",
        "| origin | |",
        "|---|---|",
        f"| ContributionLedger | `{origin.ledger}` |",
        f"| recipe | `{origin.recipe}` |",
        f"| task set | `{origin.task_set}` |",
        f"| tokenizer, of the policy | `{origin.tokenizer}` |",
        f"| accepted submissions looked at | {end:,} |",
        f"| samples in them | {rollouts:,} |",
        f"| data set | `{hex0x(export.root())}` |",
        "",
        "## Rows",
        "",
        "| split | rows | problems | mean reward | mean tokens | finished |",
        "|---|---|---|---|---|---|",
        *(sums.line(split) for split, sums in figures.splits.items() if sums.rows),
        "",
        "| part, task type, verifier | rows | problems | mean reward | mean tokens | finished |",
        "|---|---|---|---|---|---|",
        *(sums.line(", ".join(filter(None, key))) for key, sums in sorted(figures.tasks.items())),
        "",
        "## Left out",
        "",
        "| why | samples |",
        "|---|---|",
        *(f"| {_WHY[why]} | {left_out[why]:,} |" for why in _WHY if left_out[why]),
        "",
        "| setting | |",
        "|---|---|",
        *(f"| {name} | {value or 'none'} |" for name, value in export.settings.to_json().items()),
        "",
        "## Who and what made them",
        "",
        *_counts("worker", [(f"`{who}`", count) for who, count in figures.workers.most_common()]),
        "",
        *_counts("policy version", [(str(v), n) for v, n in sorted(figures.versions.items())]),
        "",
        "## Check it",
        "",
        "`muster data verify DIR` holds every row against the ledger, and with the submissions' "
        "files at hand makes every row again.",
        "",
    ]
    return "\n".join(lines)


def _front_matter(figures: CardFigures) -> list[str]:
    """Return the metadata that Hugging Face's libraries read from a card."""
    lines = ["---", "configs:", "- config_name: default", "  data_files:"]
    for split, sums in figures.splits.items():
        if sums.rows:
            lines += [f"  - split: {split}", f"    path: data/{split}-*.parquet"]
    return [*lines, "---", ""]


def _counts(what: str, rows: Sequence[tuple[str, int]]) -> list[str]:
    more = len(rows) - MOST_LISTED
    return [
        f"| {what} | rows |",
        "|---|---|",
        *(f"| {name} | {count:,} |" for name, count in rows[:MOST_LISTED]),
        *([f"| {more:,} more | |"] if more > 0 else []),
    ]


def put_card(folder: DataFolder, stream: Stream) -> None:
    """Write the data card into its folder, if it has parts."""
    if folder.export.parts:
        text = write_card(folder, stream, CardFigures(folder))
        with whole_file(folder.path / CARD) as partial:
            partial.write_text(text, encoding="utf-8")
