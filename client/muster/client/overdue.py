"""Batches that nobody judged in time: their submissions stand as claimed, and are paid.

Posted outcomes are on chain. The submissions of an overdue batch are not, but for a direct one:
the orchestrator shows them, and what it shows is checked against the batch's root.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from muster.protocol.errors import ApiError, ConfigError
from muster.protocol.ids import RunId
from muster.protocol.messages import Submission

if TYPE_CHECKING:
    from muster.chain import BatchView, ChainView

Shown = Mapping[int, Sequence[Submission]]
"""The submissions of overdue batches, by batch."""


def overdue_batches(
    view: ChainView, run_id: RunId, *, now: int, outcome_deadline_s: int
) -> list[BatchView]:
    """Return a run's batches whose outcomes were due and are not there, oldest first."""
    return [
        batch
        for batch in view.batches.values()
        if batch.run_id == run_id
        and batch.records is None
        and now >= batch.committed_at + outcome_deadline_s
    ]


async def submissions_of(batch: BatchView, orchestrator: str | None) -> list[Submission]:
    """Return the submissions of a batch without outcomes, checked against its root.

    Raises ConfigError when nobody shows them, or what is shown is not what was committed.
    """
    from muster.api import OrchestratorApi

    if batch.records is not None:
        return []
    if batch.direct is not None:
        return [batch.direct]
    if orchestrator is None:
        raise ConfigError(
            f"batch {batch.batch_id} has no outcomes; its submissions are not on chain",
            hint="--orchestrator URL: the run's orchestrator shows them",
        )
    async with OrchestratorApi(orchestrator) as api:
        try:
            entries = (await api.batch(batch.batch_id)).submissions
        except ApiError as error:
            error.hint = error.hint or "check --orchestrator"
            raise
    submissions = [entry.submission for entry in entries]
    require_committed(batch, submissions, orchestrator)
    return submissions


def require_committed(
    batch: BatchView, submissions: Sequence[Submission], orchestrator: str
) -> None:
    """Raise ConfigError unless these are the submissions that a batch was committed for."""
    from muster.protocol.merkle import merkle_root

    leaves = [submission.leaf() for submission in submissions]
    if len(leaves) != batch.count or merkle_root(leaves) != batch.root:
        raise ConfigError(
            f"{orchestrator} shows other submissions than those of batch {batch.batch_id}",
            hint="check --orchestrator and --rpc; the orchestrator may be dishonest",
        )


async def read_overdue(batches: Sequence[BatchView], orchestrator: str | None) -> Shown:
    """Return the submissions of overdue batches; without an orchestrator, of direct ones only."""
    shown = {}
    for batch in batches:
        if batch.direct is not None or orchestrator is not None:
            shown[batch.batch_id] = await submissions_of(batch, orchestrator)
    return shown
