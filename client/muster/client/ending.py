"""When a run is over, and when nothing of it can ask for its workers and validators any more.

Told by the chain and the run's recipe alone: an orchestrator that is gone changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from muster.protocol.ids import RunId

if TYPE_CHECKING:
    from muster.chain import ChainView, RunView


def is_over(run: RunView, steps: int) -> bool:
    """Return whether nothing more is generated for a run: its owner closed it, or it has the
    version of its last training step. `steps` is how many its recipe says; 0 for no end.
    """
    is_trained = bool(steps) and run.latest_version is not None and run.latest_version >= steps
    return is_trained or bool(run.closed_at)


def settled_at(
    view: ChainView, run_id: RunId, *, outcome_deadline_s: int, challenge_window_s: int
) -> int | None:
    """Return the chain's time from which no outcome of a run can be given or challenged any more,
    as things stand; None while a case about one is open. Seconds; 0 for a run without batches.
    """
    run, ends = view.runs[run_id], [0]
    for batch in view.batches.values():
        if batch.run_id != run_id:
            continue
        if batch.records is None:
            # Its workers may bring it before judges of the network for as long again.
            ends.append(batch.committed_at + outcome_deadline_s + challenge_window_s)
        else:
            ends.append(run.fraud_closes_at(batch.posted_at or 0, challenge_window_s))
    is_disputed = any(not c.closed and c.run_id == run_id for c in view.cases.values())
    return None if is_disputed else max(ends)
