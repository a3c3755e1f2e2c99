"""Reader of the training stream: the ledger is the dataset, the cursor is the data loader.

Training step s consumes the next records of the run's training stream (docs/protocol.md section
9.8) in order, each exactly once: `submissions_per_step` usable ones, and as many more as it needs
to replace groups that the filters left out, up to the recipe's `refill_submissions`. The cursor is
saved with the weights, so a trainer that dies at any moment resumes exactly there.

Submission files stay on the trainer's own disk until the step after the one that trained on them is
saved. A step that is repeated after a crash reads them from there, since the orchestrator may be
unreachable or have deleted them. A file's name is its hash, so a file with other content is not
used: whoever has a file may put it there. A file that the orchestrator and its relays lack for
`patience_s` is given up: its record is consumed, and trained on in no step. That is on disk before
the step is taken, so a repeated step leaves out the same files. A worker that commits directly what
nobody can have delays a step so long once; its next such files are given up after `REPEATED_S`. A
relay that does not answer may have the file: it is awaited for longer, and nobody is blamed.

Owns the order of records and decides which are usable. Knows no tensors.
"""

import asyncio
import logging
import math
import random
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from muster.chain import StreamItem
from muster.lifecycle.files import write_durably
from muster.protocol.encoding import file_hash, hex0x
from muster.protocol.errors import ApiError, ChainError, EncodingError
from muster.protocol.ids import Hash32, PolicyVersion, Step
from muster.protocol.messages import OutcomeRecord
from muster.protocol.recipe import PartRules, Recipe
from muster.protocol.rollouts import Bounds, Rollout, decode_rollouts
from muster.protocol.seeds import target_length
from muster.trainer.ports import DAMAGED, GONE, ChainLedger, FileSource, RelaysSilent
from muster.trainer.stream.filters import DifficultyPools, Drop, Group, PartTally, Sieve, named

logger = logging.getLogger(__name__)

DOWNLOADS = 8
"""Files fetched at the same time."""
LONGEST_PAUSE_S = 10.0
"""Longest pause in seconds between two attempts to get a file."""
REPEAT_S = 5.0
"""Seconds after which a step that waits for records reports this again."""
REPEATED_S = 30.0
"""Seconds for which a file is asked for that a worker committed directly, when another one that it
committed directly was given up before."""
SILENT_PATIENCES = 10
"""Patiences for which a file is asked for while a relay is silent about it."""
LOST_HINT = (
    "find out why nobody has the file, before more is lost (docs/training.md, files that nobody "
    "has); its worker is paid as usual"
)
"""What to do about a file that was given up."""
LEAST_KEPT = 0.25
"""Lowest share of kept groups assumed when more records are requested."""

Sleep = Callable[[float], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Cursor:
    """Place in the training stream up to which records have been consumed."""

    position: int = 0
    """Records consumed, dropped ones included."""
    last: Hash32 | None = None
    """File hash of the record before `position`, which reveals a rewritten stream. None when
    unknown."""


@dataclass(frozen=True, slots=True)
class KeptSamples:
    """How many samples of a consumed record the filters kept."""

    position: int
    """Place of the record in the training stream."""
    kept: int
    """Samples to train on."""
    dropped: Counter[Drop]
    """Samples left out, by reason."""

    def to_json(self) -> dict[str, Any]:
        """Return the counts as JSON values."""
        return {"position": self.position, "kept": self.kept, "dropped": named(self.dropped)}


@dataclass(frozen=True, slots=True)
class StepInput:
    """Input of one training step."""

    groups: list[Group]
    """Rollouts to train on, group by group, in stream order."""
    dropped: Counter[Drop]
    """Consumed samples that were left out, by reason."""
    start: Cursor
    """Cursor before the step."""
    end: Cursor
    """Cursor after the step; becomes the next step's start once the step's weights are safe."""
    reward: float = 0.0
    """Mean task reward of all samples that could be read."""
    refill: int = 0
    """Records consumed beyond the step's share, without stale ones."""
    pools: DifficultyPools = field(default_factory=DifficultyPools)
    """The difficulty pools after the step."""
    uses: Sequence[KeptSamples] = ()
    """Kept samples of each record, in stream order."""
    parts: Mapping[str, PartTally] = field(default_factory=dict)
    """Tally of each part of a mixture, by name."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """A report that a training step waits for more records than its share."""

    step: Step
    stream_from: int
    """Place in the training stream where the step began."""
    refill: int
    """Estimate of the records that the step will consume beyond its share."""


class _Collection:
    """Records that one step has consumed so far; knows how many more it wants."""

    def __init__(self, recipe: Recipe, sieve: Sieve) -> None:
        self.sieve = sieve
        self.consumed: list[Hash32] = []
        self.uses: list[KeptSamples] = []
        self._stale = 0
        self._usable = 0
        self._share = recipe.training.submissions_per_step
        self._most = self._share + recipe.filters.refill_submissions
        self._groups_each = recipe.sampling.problems_per_submission

    def take(self, item: StreamItem, groups: list[Group], parts: Sequence[PartRules]) -> None:
        """Pass a submission's groups through the sieve; `parts` are the groups' parts."""
        self._usable += 1
        dropped = Counter(self.sieve.dropped)
        for group, part in zip(groups, parts, strict=True):
            self.sieve.take(group, part)
        dropped = self.sieve.dropped - dropped
        kept = item.record.rollouts - dropped.total()
        self.uses.append(KeptSamples(item.position_in_stream, kept, dropped))

    def leave(self, item: StreamItem, reason: Drop) -> None:
        """Leave out a whole record."""
        self._stale += reason is Drop.STALE
        dropped = Counter({reason: item.record.rollouts})
        self.sieve.dropped += dropped
        self.uses.append(KeptSamples(item.position_in_stream, 0, dropped))
        logger.info("record dropped", extra={**_fields(item), "reason": str(reason)})

    @property
    def wanted(self) -> int:
        """Submissions that the step still needs for certain; 0 when it is full."""
        return self._wanted(kept_share=1.0)

    @property
    def refill(self) -> int:
        """Records consumed beyond the step's share, without stale ones."""
        return max(0, len(self.consumed) - self._stale - self._share)

    def expected_refill(self) -> int:
        """Return the estimate of `refill`, if groups are kept at the same rate as so far."""
        judged = max(1, self._usable * self._groups_each)
        wanted = self._wanted(kept_share=max(LEAST_KEPT, len(self.sieve.kept) / judged))
        return max(0, len(self.consumed) - self._stale + wanted - self._share)

    def _wanted(self, kept_share: float) -> int:
        if self._usable < self._share:
            return self._share - self._usable
        missing = self._share * self._groups_each - len(self.sieve.kept)
        submissions = math.ceil(max(0, missing) / (self._groups_each * kept_share))
        return min(submissions, self._most - self._usable)


class StreamReader:
    """Reads the training stream from a cursor on; keeps no position of its own."""

    def __init__(
        self,
        ledger: ChainLedger,
        files: FileSource,
        recipe: Recipe,
        *,
        vocab_size: int,
        eos: frozenset[int] = frozenset(),
        seed_of: Callable[[OutcomeRecord], Hash32 | None] = lambda _: None,
        on_short: Callable[[Shortage], None] = lambda _: None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        """`seed_of` returns the seed of a record's ticket, if it is known. `on_short` is called
        repeatedly while a step waits for more than its share.
        """
        self._ledger = ledger
        self._files = files
        self._recipe = recipe
        self._vocab_size = vocab_size
        self._eos = eos
        self._seed_of = seed_of
        self._on_short = on_short
        self._sleep = sleep
        self._downloads = asyncio.Semaphore(DOWNLOADS)
        self._before: tuple[Cursor, set[Hash32]] | None = None

    async def next_step(
        self, cursor: Cursor, newest: PolicyVersion, pools: DifficultyPools | None = None
    ) -> StepInput:
        """Wait for the input of the step that starts from version `newest`, and return it.

        `pools` are those after the step before. Raises ChainError when the chain no longer has the
        records consumed before the cursor.
        """
        while True:
            await self._reach(cursor)
            seen = self._files_before(cursor)
            found = await self._collect(cursor, newest, pools or DifficultyPools(), seen)
            if self._holds(cursor.position, found.consumed):
                step = _step_input(cursor, found)
                self._before = step.end, seen
                return step
            logger.warning("training stream changed while it was read: reading it again")

    async def _reach(self, cursor: Cursor) -> None:
        """Wait until the chain's stream includes the cursor, and check that it is the same one."""
        if len(self._ledger.stream()) < cursor.position:
            logger.warning(
                "waiting until the chain has again what was trained on",
                extra={"records": len(self._ledger.stream()), "trained_on": cursor.position},
            )
        while len(self._ledger.stream()) < cursor.position:
            await self._ledger.changed()
        stream = self._ledger.stream()
        if cursor.last is not None and stream[cursor.position - 1].record.file_hash != cursor.last:
            raise ChainError(
                f"the training stream before position {cursor.position} is not what was trained on",
                hint="the chain was reorganised or replaced: start a new run from the last policy, "
                "with --confirmations at least as large as the deepest reorganisation",
            )

    def _files_before(self, cursor: Cursor) -> set[Hash32]:
        """Return the files before the cursor: kept from the step before, since a long stream takes
        a second a million records.
        """
        kept, self._before = self._before, None
        if kept is not None and kept[0] == cursor:
            return kept[1]
        return {item.record.file_hash for item in self._ledger.stream()[: cursor.position]}

    def _holds(self, position: int, consumed: list[Hash32]) -> bool:
        """Tell whether the stream still has these files from a position on."""
        stream = self._ledger.stream()[position : position + len(consumed)]
        return [item.record.file_hash for item in stream] == consumed

    async def _collect(
        self, cursor: Cursor, newest: PolicyVersion, pools: DifficultyPools, seen: set[Hash32]
    ) -> _Collection:
        """Consume records in order until the step is full, and add them to the files `seen`;
        fetches no more files than it needs.
        """
        found = _Collection(self._recipe, Sieve(self._recipe, pools, self._eos))
        ahead: deque[tuple[StreamItem, asyncio.Task[list[Group] | Drop]]] = deque()
        async with asyncio.TaskGroup() as downloads:
            while found.wanted:
                item = self._item_at(cursor.position + len(found.consumed))
                if item is not None and len(ahead) < found.wanted:
                    reason = self._reason_against(item.record, newest, seen)
                    found.consumed.append(item.record.file_hash)
                    seen.add(item.record.file_hash)
                    if reason:
                        found.leave(item, reason)
                    else:
                        ahead.append((item, downloads.create_task(self._load(item))))
                elif ahead:
                    item, download = ahead.popleft()
                    groups = await download
                    if isinstance(groups, Drop):
                        found.leave(item, groups)
                    else:
                        seed = self._seed_of(item.record)
                        found.take(item, groups, parts_of(item.record, self._recipe, seed))
                else:
                    await self._wait_for_records(cursor, newest, found)
        return found

    def _reason_against(
        self, record: OutcomeRecord, newest: PolicyVersion, seen: set[Hash32]
    ) -> Drop | None:
        if record.file_hash in seen:
            return Drop.DUPLICATE
        training, step = self._recipe.training, Step(newest + 1)
        return None if training.may_train_on(record.policy_version, step) else Drop.STALE

    async def _wait_for_records(
        self, cursor: Cursor, newest: PolicyVersion, found: _Collection
    ) -> None:
        refill = found.expected_refill()
        if refill:
            self._on_short(Shortage(Step(newest + 1), cursor.position, refill))
        # The report may be lost, so it is repeated.
        with suppress(TimeoutError):
            # Not `wait_for`: its task begins to listen later, and may miss the change.
            async with asyncio.timeout(REPEAT_S if refill else None):
                await self._ledger.changed()

    def _item_at(self, position: int) -> StreamItem | None:
        stream = self._ledger.stream()
        return stream[position] if position < len(stream) else None

    async def _load(self, item: StreamItem) -> list[Group] | Drop:
        """Return a record's groups, or why there are none: its file is not what the record says, or
        was given up. Until it is given up, a file that cannot be downloaded is asked for again.
        """
        pause_s, is_said = 0.25, False
        while True:
            try:
                async with self._downloads:
                    data = await self._files.file(item.record.file_hash)
                    if data is None:
                        extra = {**_fields(item), "hint": LOST_HINT}
                        logger.error("training goes on without an accepted file", extra=extra)
                        return Drop.MISSING
                    if file_hash(data) == item.record.file_hash:
                        return await asyncio.to_thread(
                            read_submission,
                            data,
                            item.record,
                            self._recipe,
                            self._vocab_size,
                            seed=self._seed_of(item.record),
                        )
                logger.warning("received a file with the wrong hash", extra=_fields(item))
            except ApiError as error:
                extra = {**_fields(item), "error": str(error), "hint": error.hint}
                if error.status not in GONE:
                    logger.warning("cannot get a file", extra=extra)
                elif not is_said:
                    is_said = True
                    logger.error("nobody has an accepted file", extra=extra)
            except EncodingError as error:
                logger.error("accepted file dropped", extra={**_fields(item), "error": str(error)})
                return Drop.UNREADABLE
            except MemoryError:
                logger.warning("no memory to read a file", extra=_fields(item))
            await self._sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _step_input(start: Cursor, found: _Collection) -> StepInput:
    sieve = found.sieve
    if not sieve.kept:
        logger.warning("nothing to train on", extra={"dropped": named(sieve.dropped)})
    return StepInput(
        groups=sieve.kept,
        dropped=sieve.dropped,
        start=start,
        end=Cursor(start.position + len(found.consumed), found.consumed[-1]),
        reward=sieve.reward,
        refill=found.refill,
        pools=sieve.pools,
        uses=sorted(found.uses, key=lambda use: use.position),
        parts=sieve.parts,
    )


def _fields(item: StreamItem) -> dict[str, object]:
    record = item.record
    return {
        "position": item.position_in_stream,
        "worker_id": record.worker_id,
        "policy_version": record.policy_version,
        "file_hash": hex0x(record.file_hash),
    }


# ---------------------------------------------------------------- submission files


_GIVEN_UP = ".missing"
"""Suffix of the empty file that stands for one that was given up."""
_HIDER = "worker-"
"""Prefix of the empty file that stands for a worker with a direct file that nobody had."""


@dataclass(frozen=True, slots=True)
class _Lack:
    """A file that nobody has."""

    since_s: float
    """When it was first asked for in vain, on the buffer's clock."""
    mark: Path | None
    """The mark of the worker that committed it directly; None when nobody did."""


class FileBuffer:
    """A file source with a cache on disk, which gives up files that nobody has."""

    def __init__(
        self,
        folder: Path,
        source: FileSource,
        ledger: ChainLedger,
        *,
        patience_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A file is given up when the source has said for `patience_s` that nobody has it: at most
        for REPEATED_S where its worker did this before, SILENT_PATIENCES times as long while a
        relay is silent. With infinity no file is given up.
        """
        self._folder = folder
        self._source = source
        self._ledger = ledger
        self._patience_s = patience_s
        self._clock = clock
        self._lacking: dict[Hash32, _Lack] = {}
        folder.mkdir(parents=True, exist_ok=True)

    async def file(self, submission_file_hash: Hash32) -> bytes | None:
        """Return a submission's file, from the disk if it is there; None once it is given up.
        Raises ApiError, and StorageError when that cannot be written down.
        """
        path = self._folder / submission_file_hash.hex()
        given_up = path.with_suffix(_GIVEN_UP)
        if await asyncio.to_thread(given_up.exists):
            return None
        kept = await asyncio.to_thread(_read, path, submission_file_hash)
        if kept is not None:
            return kept
        try:
            data = await self._source.file(submission_file_hash)
        except ApiError as error:
            if error.code == DAMAGED:
                error.hint = _where_to_put(path, math.inf)
            if error.status not in GONE:
                raise
            silent_s = error.silent_s if isinstance(error, RelaysSilent) else None
            lack = self._lacking.get(submission_file_hash)
            if lack is None:
                lack = await asyncio.to_thread(self._lack_of, submission_file_hash)
                self._lacking[submission_file_hash] = lack
            left_s = await asyncio.to_thread(self._left_s, lack, silent_s)
            if left_s > 0:
                error.hint = _where_to_put(path, left_s)
                raise
            await asyncio.to_thread(write_durably, given_up, b"")
            if silent_s is None and lack.mark is not None:
                await asyncio.to_thread(write_durably, lack.mark, b"")
            del self._lacking[submission_file_hash]
            return None
        if data is not None and file_hash(data) == submission_file_hash:
            self._lacking.pop(submission_file_hash, None)
            await asyncio.to_thread(_write, path, data)
        return data

    def forget_before(self, position: int) -> None:
        """Delete the files of records before a place in the training stream, but not the marks of
        workers. Blocking.
        """
        names = {item.record.file_hash.hex() for item in self._ledger.stream()[position:]}
        for path in self._folder.iterdir():
            if path.name.removesuffix(_GIVEN_UP) not in names and not path.name.startswith(_HIDER):
                path.unlink(missing_ok=True)

    def _lack_of(self, submission_file_hash: Hash32) -> _Lack:
        """Return the lack of a file that nobody has, which begins now. Blocking."""
        # A file is trained on for its first record.
        for item in self._ledger.stream():
            if item.record.file_hash == submission_file_hash:
                mark = self._folder / f"{_HIDER}{item.record.worker_id}{_GIVEN_UP}"
                return _Lack(self._clock(), mark if self._ledger.is_direct(item) else None)
        return _Lack(self._clock(), None)

    def _left_s(self, lack: _Lack, silent_s: float | None) -> float:
        """Return the seconds for which a file that nobody has is still asked for, when a relay has
        been silent for `silent_s`. Blocking.
        """
        waited_s, patience_s = self._clock() - lack.since_s, self._patience_s
        if lack.mark is not None and not math.isinf(patience_s) and lack.mark.exists():
            patience_s = min(patience_s, REPEATED_S)
        if silent_s is None:
            return patience_s - waited_s
        most_s = SILENT_PATIENCES * patience_s - max(silent_s, waited_s)
        return max(patience_s - waited_s, most_s)


def _where_to_put(path: Path, left_s: float) -> str:
    until = (
        f"in {left_s:,.0f} s training goes on without it"
        if left_s < math.inf
        else ("training waits for it")
    )
    return (
        f"{until}: bring the orchestrator's files and its relays back, or have the file from its "
        f"worker or a validator and put it at {path}"
    )


def _read(path: Path, digest: Hash32) -> bytes | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    return data if file_hash(data) == digest else None


def _write(path: Path, data: bytes) -> None:
    """Write atomically; a failed write only costs a second download."""
    fresh = path.with_name(f".{path.name}.part")
    try:
        fresh.write_bytes(data)
        fresh.replace(path)
    except OSError as error:
        logger.warning("cannot buffer a file", extra={"error": str(error)})


def read_submission(
    data: bytes,
    record: OutcomeRecord,
    recipe: Recipe,
    vocab_size: int,
    *,
    seed: Hash32 | None = None,
) -> list[Group]:
    """Return the groups of an accepted file.

    Raises EncodingError when it is not Parquet of the schema, or contradicts record or recipe:
    policy and number of rows, whole groups in order, token ids below `vocab_size`, completions
    within the limit, and the length budgets. `seed`, the ticket's, determines the budgets; without
    it, any budget of the recipe is accepted.
    """
    sampling, parts = recipe.sampling, parts_of(record, recipe, seed)
    size, groups = sampling.samples_per_problem, sampling.problems_per_submission
    rollouts = decode_rollouts(data, Bounds.of(recipe))
    if len(rollouts) != size * groups or len(rollouts) != record.rollouts:
        raise EncodingError(
            f"file has {len(rollouts)} rows, its record says {record.rollouts}, "
            f"the recipe says {size * groups}"
        )
    for row, rollout in enumerate(rollouts):
        _check_row(rollout, row, record, sampling.max_new_tokens, size)
        if max(*rollout.prompt_tokens, *rollout.completion_tokens) >= vocab_size:
            raise EncodingError(f"row {row} has a token id outside the vocabulary of {vocab_size}")
        _check_target(rollout, row, parts[rollout.group].target_lengths, seed)
    return [rollouts[i : i + size] for i in range(0, len(rollouts), size)]


def parts_of(record: OutcomeRecord, recipe: Recipe, seed: Hash32 | None) -> list[PartRules]:
    """Return the part of each group of a record; it follows from the seed of the ticket, not from
    the file. Raises EncodingError in a mixture when the seed is unknown.
    """
    if seed is not None:
        return recipe.parts_of(seed, record.step)
    if recipe.tasks.parts:
        raise EncodingError(
            "the ticket is not known, so the parts of the file's groups are not known"
        )
    return [recipe.rules_of()] * recipe.sampling.problems_per_submission


def _check_row(
    rollout: Rollout, row: int, record: OutcomeRecord, max_new_tokens: int, group_size: int
) -> None:
    if rollout.policy_version != record.policy_version:
        raise EncodingError(
            f"row {row} claims policy {rollout.policy_version}, its record {record.policy_version}"
        )
    if (rollout.group, rollout.sample) != divmod(row, group_size):
        raise EncodingError(
            f"row {row} is out of order: it claims sample {rollout.sample} of group {rollout.group}"
        )
    if len(rollout.completion_tokens) > max_new_tokens:
        raise EncodingError(
            f"row {row} has {len(rollout.completion_tokens)} completion tokens, the limit is "
            f"{max_new_tokens}"
        )


def _check_target(
    rollout: Rollout, row: int, lengths: tuple[int, ...], seed: Hash32 | None
) -> None:
    """Require the budget that the ticket derives: budgets decide the reward, so nobody may choose
    them."""
    if seed is None and rollout.target_length in (lengths or (-1,)):
        return
    derived = None if seed is None else target_length(seed, rollout.group, lengths)
    if rollout.target_length != derived:
        of = "the recipe has" if derived is None else "its ticket derives"
        wanted = list(lengths) if derived is None else derived
        raise EncodingError(
            f"row {row} has a target length of {rollout.target_length}, {of} {wanted}"
        )
