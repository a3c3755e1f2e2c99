"""The ledger is the dataset, the cursor is the data loader.

Training step s consumes the next `submissions_per_step` usable records of the run's training stream
(docs/protocol.md section 9), in order, each exactly once. The cursor is saved with the weights, so
a trainer that dies at any moment goes on where its weights stand.

Owns the order and what is usable. Knows neither tensors nor the chain's client.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from muster.protocol.encoding import file_hash, hex0x
from muster.protocol.errors import ApiError, ChainError, EncodingError
from muster.protocol.ids import Hash32, PolicyVersion
from muster.protocol.messages import OutcomeRecord
from muster.protocol.recipe import Recipe
from muster.protocol.rollouts import Rollout, decode_rollouts
from muster.trainer.filters import Drop
from muster.trainer.ports import FileSource, Ledger, StreamItem

logger = logging.getLogger(__name__)

DOWNLOADS = 8
"""Files fetched at the same time."""
LONGEST_PAUSE_S = 10.0
"""Longest pause between two attempts to get a file."""

Group = list[Rollout]
"""The rollouts of one problem."""
Sleep = Callable[[float], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Cursor:
    """How much of the training stream has been consumed."""

    position: int = 0
    """Records consumed, dropped ones included."""
    last: Hash32 | None = None
    """File hash of the record before `position`: tells a rewritten stream from the known one.
    None when it is not known."""


@dataclass(frozen=True, slots=True)
class StepInput:
    """What one training step consumes."""

    groups: list[Group]
    """Rollouts, group by group, in stream order."""
    dropped: Counter[Drop]
    """Samples of records passed over, by reason."""
    start: Cursor
    """Before."""
    end: Cursor
    """After; becomes the next step's start once the step's weights are safe."""


class StreamReader:
    """Reads the training stream from a cursor on; keeps no position of its own."""

    def __init__(
        self,
        ledger: Ledger,
        files: FileSource,
        recipe: Recipe,
        *,
        vocab_size: int,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._ledger = ledger
        self._files = files
        self._recipe = recipe
        self._vocab_size = vocab_size
        self._sleep = sleep
        self._downloads = asyncio.Semaphore(DOWNLOADS)

    async def next_step(self, cursor: Cursor, newest: PolicyVersion) -> StepInput:
        """Return the input of the step that starts from version `newest`; waits until it is there.

        Raises ChainError when the chain no longer has what was consumed before the cursor.
        """
        while True:
            await self._reach(cursor)
            taken, consumed = await self._collect(cursor, newest)
            if self._holds(cursor.position, consumed):
                return taken
            logger.warning("training stream changed while it was read: reading it again")

    async def _reach(self, cursor: Cursor) -> None:
        """Wait until the chain's stream includes the cursor, and check that it is the same one."""
        while len(self._ledger.stream()) < cursor.position:
            await self._ledger.changed()
        if not self._is_at(cursor):
            raise ChainError(
                f"the training stream before position {cursor.position} is not what was trained on",
                hint="the chain was reorganised or replaced: start a new run from the last policy",
            )

    def _is_at(self, cursor: Cursor) -> bool:
        stream = self._ledger.stream()
        if cursor.position > len(stream):
            return False
        if cursor.last is None:
            return True
        return stream[cursor.position - 1].record.file_hash == cursor.last

    def _holds(self, position: int, consumed: list[Hash32]) -> bool:
        """Tell whether the stream still has these files from a position on."""
        stream = self._ledger.stream()[position : position + len(consumed)]
        return [item.record.file_hash for item in stream] == consumed

    async def _collect(
        self, cursor: Cursor, newest: PolicyVersion
    ) -> tuple[StepInput, list[Hash32]]:
        """Take records in order until the step is full, fetching no more files than it needs.

        Also returns the file hashes of all records consumed, dropped ones included.
        """
        training = self._recipe.training
        consumed: list[Hash32] = []
        dropped: Counter[Drop] = Counter()
        submissions: list[list[Group]] = []
        ahead: deque[tuple[StreamItem, asyncio.Task[list[Group] | None]]] = deque()
        async with asyncio.TaskGroup() as downloads:
            while len(submissions) < training.submissions_per_step:
                if len(submissions) + len(ahead) < training.submissions_per_step:
                    item = self._item_at(cursor.position + len(consumed))
                    if item is not None:
                        consumed.append(item.record.file_hash)
                        if is_stale(item.record, newest, training.max_async_level):
                            _note_drop(dropped, item, Drop.STALE)
                        else:
                            ahead.append((item, downloads.create_task(self._load(item))))
                        continue
                if not ahead:
                    await self._ledger.changed()
                    continue
                item, download = ahead.popleft()
                groups = await download
                if groups is None:
                    _note_drop(dropped, item, Drop.UNREADABLE)
                else:
                    submissions.append(groups)
        groups_in_order = [group for submission in submissions for group in submission]
        end = Cursor(cursor.position + len(consumed), consumed[-1])
        return StepInput(groups_in_order, dropped, cursor, end), consumed

    def _item_at(self, position: int) -> StreamItem | None:
        stream = self._ledger.stream()
        return stream[position] if position < len(stream) else None

    async def _load(self, item: StreamItem) -> list[Group] | None:
        """Return a record's groups; None when its file is not what the record says.

        A file that cannot be had is asked for until it can: it was accepted, so it is not skipped.
        """
        pause_s = 0.25
        while True:
            try:
                async with self._downloads:
                    data = await self._files.file(item.record.file_hash)
                    if file_hash(data) == item.record.file_hash:
                        return await asyncio.to_thread(
                            read_submission, data, item.record, self._recipe, self._vocab_size
                        )
                logger.warning("received another file than asked for", extra=_fields(item))
            except ApiError as error:
                logger.warning("cannot get a file", extra={**_fields(item), "error": str(error)})
            except EncodingError as error:
                logger.error("accepted file dropped", extra={**_fields(item), "error": str(error)})
                return None
            await self._sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def is_stale(record: OutcomeRecord, newest: PolicyVersion, max_async_level: int) -> bool:
    """Tell whether a record's policy is more than `max_async_level` versions behind the newest."""
    return newest - record.policy_version > max_async_level


def read_submission(
    data: bytes, record: OutcomeRecord, recipe: Recipe, vocab_size: int
) -> list[Group]:
    """Return the groups of an accepted file.

    Raises EncodingError when it is not Parquet of the schema, or not what record and recipe say:
    the rows' policy and number, whole groups in order, token ids below `vocab_size`, completions
    within the limit.
    """
    sampling = recipe.sampling
    size, groups = sampling.samples_per_problem, sampling.problems_per_submission
    rollouts = decode_rollouts(data, max_rows=size * groups)
    if len(rollouts) != size * groups or len(rollouts) != record.rollouts:
        raise EncodingError(
            f"file has {len(rollouts)} rows, its record says {record.rollouts}, "
            f"the recipe {size * groups}"
        )
    for row, rollout in enumerate(rollouts):
        _check_row(rollout, row, record, sampling.max_new_tokens, size)
        if max(*rollout.prompt_tokens, *rollout.completion_tokens) >= vocab_size:
            raise EncodingError(f"row {row} has a token id outside the vocabulary of {vocab_size}")
    return [rollouts[i : i + size] for i in range(0, len(rollouts), size)]


def _check_row(
    rollout: Rollout, row: int, record: OutcomeRecord, max_new_tokens: int, group_size: int
) -> None:
    if rollout.policy_version != record.policy_version:
        raise EncodingError(
            f"row {row} claims policy {rollout.policy_version}, its record {record.policy_version}"
        )
    if (rollout.group, rollout.sample) != divmod(row, group_size):
        raise EncodingError(f"row {row} is sample {rollout.sample} of group {rollout.group}")
    if len(rollout.completion_tokens) > max_new_tokens:
        raise EncodingError(f"row {row} has {len(rollout.completion_tokens)} completion tokens")


def _note_drop(dropped: Counter[Drop], item: StreamItem, reason: Drop) -> None:
    dropped[reason] += item.record.rollouts
    logger.info("record dropped", extra={**_fields(item), "reason": str(reason)})


def _fields(item: StreamItem) -> dict[str, object]:
    record = item.record
    return {
        "position": item.position_in_stream,
        "worker_id": record.worker_id,
        "policy_version": record.policy_version,
        "file_hash": hex0x(record.file_hash),
    }
