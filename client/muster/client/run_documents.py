"""The documents that a run pins on chain, fetched from any source and checked against their
hashes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from muster.client.validator.judging import Rules
from muster.lifecycle.files import write_durably
from muster.lifecycle.outage import await_orchestrator
from muster.protocol.documents import Document
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.errors import ConfigError
from muster.protocol.ids import Hash32
from muster.protocol.recipe import Recipe
from muster.tasks import TaskSet, check_task_set, has_root, require_pinned
from muster.tasks.document import MAX_TASK_SET_BYTES
from muster.toploc import Calibration

if TYPE_CHECKING:
    from muster.chain import RunConfig

DocumentT = TypeVar("DocumentT", bound=Document)

TASK_SETS = "task-sets"
"""Folder of downloaded task sets, recipes and calibrations, in the state folder."""
MOST_TRIED = 1024
"""Number of problems among which one of each task type is graded at the start."""


class DocumentSource(Protocol):
    """A source of documents; it need not be trusted."""

    async def document(self, document_hash: Hash32) -> bytes:
        """Return the bytes of a document."""
        ...

    async def download(self, document_hash: Hash32, path: Path, *, max_bytes: int) -> None:
        """Download a document to a file; an existing file holds its beginning and is continued."""
        ...


async def fetch_rules(source: DocumentSource, config: RunConfig, folder: Path) -> Rules:
    """Return a run's documents as `read_rules` does; retries while the orchestrator is unreachable.

    Raises ApiError for a refusal.
    """
    return await await_orchestrator(lambda: read_rules(source, config, folder))


async def read_rules(source: DocumentSource, config: RunConfig, folder: Path) -> Rules:
    """Return a run's documents, each checked against its hash; does not retry.

    They are kept in `folder`, and the source is asked only for those that are not there: a worker
    that starts again can defend its work whatever the orchestrator does.

    Raises ApiError when the source does not answer, EncodingError for a malformed document,
    StorageError when the disk refuses one.
    """
    return Rules(
        recipe=await _document(source, config.recipe_hash, folder, Recipe),
        task_set=await _task_set(source, config.task_set_hash, folder),
        calibration=await _document(source, config.calibration_hash, folder, Calibration),
    )


def require_consistent(rules: Rules) -> None:
    """Raise ConfigError or TaskError when the documents contradict each other, or a required
    verifier is missing or not the pinned one: honest workers would be rejected.
    """
    require_calibrated(rules)
    require_verifiers(rules)


def require_calibrated(rules: Rules) -> None:
    """Raise ConfigError when the limits do not hold for work under the recipe."""
    if misfit := rules.calibration.misfit(rules.recipe):
        raise ConfigError(
            f"the run's calibration {misfit}",
            hint="the run's owner must calibrate again: muster calibrate",
        )


def require_verifiers(rules: Rules) -> None:
    """Raise TaskError when a required verifier is missing, not the pinned one, or grades wrongly
    here.
    """
    require_pinned(rules.recipe.verifiers)
    one_of_each = {problem.task_type: problem for problem in rules.task_set.some(MOST_TRIED)}
    check_task_set(one_of_each.values(), allows_judge=rules.recipe.allows_judge)


async def _document(
    source: DocumentSource, pinned: Hash32, folder: Path, kind: type[DocumentT]
) -> DocumentT:
    """Return the document in `folder`, fetched if it is not there; a malformed one is not kept."""
    path = folder / f"{pinned.hex()}.json"
    if path.is_file() and keccak(kept := path.read_bytes()) == pinned:
        return kind.from_bytes(kept)
    data = await source.document(pinned)
    if keccak(data) != pinned:
        raise _other(kind.NAME, pinned)
    document = kind.from_bytes(data)
    await asyncio.to_thread(write_durably, path, data)
    return document


async def _task_set(source: DocumentSource, pinned: Hash32, folder: Path) -> TaskSet:
    """Return the task set in `folder`, downloaded if it is not there."""
    path = folder / f"{pinned.hex()}.jsonl"
    if not await asyncio.to_thread(has_root, path, pinned):
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        await source.download(pinned, part, max_bytes=MAX_TASK_SET_BYTES)
        if not await asyncio.to_thread(has_root, part, pinned):
            part.unlink(missing_ok=True)
            raise _other("task set", pinned)
        part.replace(path)
    return await asyncio.to_thread(TaskSet.open, path)


def _other(what: str, pinned: Hash32) -> ConfigError:
    return ConfigError(
        f"the {what} that was received is not the one on chain ({hex0x(pinned)})",
        hint="the orchestrator is faulty or dishonest: get the document from another source",
    )
