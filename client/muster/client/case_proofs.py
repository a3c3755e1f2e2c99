"""The proof of an outcome that a case is about, as contracts take it.

Once outcomes are posted the chain alone yields it. An overdue submission stands as claimed and is
proven by its own leaf; who did not submit it directly must show the submissions of its batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from muster.chain import BatchView, ChainView, OutcomeProof
from muster.protocol.errors import ChainError
from muster.protocol.ids import Hash32
from muster.protocol.merkle import merkle_proof
from muster.protocol.messages import OutcomeRecord, Reason, Submission, Verdict, overdue_leaf

MAX_UINT16 = (1 << 16) - 1
MAX_UINT32 = (1 << 32) - 1


def leaf_of(batch: BatchView, position: int, submissions: Sequence[Submission] = ()) -> Hash32:
    """Return the name that an outcome has in cases."""
    if batch.records is not None:
        return batch.records[position].leaf(batch.batch_id, position)
    return overdue_leaf(batch.batch_id, submissions[position].leaf())


def prove_outcome(
    view: ChainView, batch: BatchView, position: int, submissions: Sequence[Submission] = ()
) -> OutcomeProof:
    """Return an outcome with its proof; `submissions` are all of the batch, if it is overdue."""
    if batch.records is not None:
        return batch.prove(position)
    submission = submissions[position]
    worker = view.workers.get(submission.worker)
    record = as_claimed(submission, worker.worker_id if worker else 0)
    proof = merkle_proof([each.leaf() for each in submissions], position)
    return OutcomeProof(batch.header(), position, record.to_bytes(), proof)


def position_in_batch(
    batch: BatchView, leaf: Hash32, submissions: Sequence[Submission] = ()
) -> int:
    """Return where the outcome that a case is about is; raises ChainError when it is not there."""
    for position in range(len(submissions) if batch.records is None else len(batch.records)):
        if leaf_of(batch, position, submissions) == leaf:
            return position
    raise ChainError(
        f"batch {batch.batch_id} has no outcome 0x{leaf.hex()}",
        hint="was the chain reorganised? look again",
    )


def as_claimed(submission: Submission, worker_id: int) -> OutcomeRecord:
    """Return the record of a submission that nobody judged in time: accepted, for what it claims.

    The ledger knows no such record of a submission whose rollouts or units exceed their fields;
    they are capped here, and its proof is refused there.
    """
    return OutcomeRecord(
        worker_id=worker_id,
        step=submission.step,
        index=submission.index,
        policy_version=submission.policy_version,
        file_hash=submission.file_hash,
        rollouts=min(submission.rollouts, MAX_UINT16),
        units=min(submission.units, MAX_UINT32),
        verdict=Verdict.ACCEPTED,
        reason=Reason.NONE,
    )
