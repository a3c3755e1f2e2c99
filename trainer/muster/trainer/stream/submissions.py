"""Files of accepted submissions: on the trainer's own disk, and read as the groups in them.

They stay there until a saved step holds what they taught.

A step that is taken again after a crash reads the same files without asking for them again: the
orchestrator may be away, or have dropped them. Files are named by their hash, so whatever else is
found under the name is not used.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from muster.protocol.encoding import file_hash
from muster.protocol.errors import EncodingError
from muster.protocol.ids import Hash32
from muster.protocol.messages import OutcomeRecord
from muster.protocol.recipe import PartRules, Recipe
from muster.protocol.rollouts import Bounds, Rollout, decode_rollouts
from muster.protocol.seeds import target_length
from muster.trainer.ports import ChainLedger, FileSource
from muster.trainer.stream.filters import Group

logger = logging.getLogger(__name__)


class FileBuffer:
    """A file source that remembers what it handed over."""

    def __init__(self, folder: Path, source: FileSource, ledger: ChainLedger) -> None:
        self._folder = folder
        self._source = source
        self._ledger = ledger
        folder.mkdir(parents=True, exist_ok=True)

    async def file(self, submission_file_hash: Hash32) -> bytes:
        """Return a submission's file, from the disk if it is there; raises ApiError."""
        path = self._folder / submission_file_hash.hex()
        kept = await asyncio.to_thread(_read, path, submission_file_hash)
        if kept is not None:
            return kept
        data = await self._source.file(submission_file_hash)
        if file_hash(data) == submission_file_hash:
            await asyncio.to_thread(_write, path, data)
        return data

    def forget_before(self, position: int) -> None:
        """Delete the files of records before a place in the training stream. Blocking."""
        names = {item.record.file_hash.hex() for item in self._ledger.stream()[position:]}
        for path in self._folder.iterdir():
            if path.name not in names:
                path.unlink(missing_ok=True)


def _read(path: Path, digest: Hash32) -> bytes | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    return data if file_hash(data) == digest else None


def _write(path: Path, data: bytes) -> None:
    """Write atomically; a disk that takes nothing costs a second download, no more."""
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

    Raises EncodingError when it is not Parquet of the schema, or not what record and recipe say:
    the rows' policy and number, whole groups in order, token ids below `vocab_size`, completions
    within the limit, and the length budgets that `seed`, the ticket's, derives; without it, any
    of the recipe's.
    """
    sampling, parts = recipe.sampling, parts_of(record, recipe, seed)
    size, groups = sampling.samples_per_problem, sampling.problems_per_submission
    rollouts = decode_rollouts(data, Bounds.of(recipe))
    if len(rollouts) != size * groups or len(rollouts) != record.rollouts:
        raise EncodingError(
            f"file has {len(rollouts)} rows, its record says {record.rollouts}, "
            f"the recipe {size * groups}"
        )
    for row, rollout in enumerate(rollouts):
        _check_row(rollout, row, record, sampling.max_new_tokens, size)
        if max(*rollout.prompt_tokens, *rollout.completion_tokens) >= vocab_size:
            raise EncodingError(f"row {row} has a token id outside the vocabulary of {vocab_size}")
        _check_target(rollout, row, parts[rollout.group].target_lengths, seed)
    return [rollouts[i : i + size] for i in range(0, len(rollouts), size)]


def parts_of(record: OutcomeRecord, recipe: Recipe, seed: Hash32 | None) -> list[PartRules]:
    """Return which part each group of a record is of: the seed of its ticket tells, and not its
    file. Raises EncodingError in a mixture when the seed is not known.
    """
    if seed is not None:
        return recipe.parts_of(seed, record.step)
    if recipe.tasks.parts:
        raise EncodingError("the parts of its groups follow from a ticket that is not known")
    return [recipe.rules_of()] * recipe.sampling.problems_per_submission


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


def _check_target(
    rollout: Rollout, row: int, lengths: tuple[int, ...], seed: Hash32 | None
) -> None:
    """Budgets pay: a row may only have the one that nobody chose."""
    if seed is None and rollout.target_length in (lengths or (-1,)):
        return
    derived = None if seed is None else target_length(seed, rollout.group, lengths)
    if rollout.target_length != derived:
        of = "the recipe has" if derived is None else "its ticket derives"
        wanted = list(lengths) if derived is None else derived
        raise EncodingError(
            f"row {row} has a target length of {rollout.target_length}, {of} {wanted}"
        )
