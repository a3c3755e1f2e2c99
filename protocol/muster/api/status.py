"""The answers that say how a run stands: for dashboards, and for people who wonder."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, computed_field

from muster.api.answers import AccountAddress, AnswerBody

Wei = Annotated[str, Field(pattern="^[0-9]+$")]
"""An amount as decimal text: it exceeds what JSON numbers hold."""
HashText = Annotated[str, Field(pattern="^0x[0-9a-f]{64}$")]
"""A file's hash as text, for people."""


class WorkerStatus(AnswerBody):
    """One worker."""

    worker: AccountAddress
    """The staking wallet."""
    worker_id: int
    """Its number."""
    node: AccountAddress
    """Its hot key."""
    status: str
    """Active, jailed, exiting or banned."""
    stake_wei: Wei
    """Active stake (decimal text: it exceeds what JSON numbers hold)."""
    accepted: int
    """Accepted submissions."""
    incomplete: int
    """Incomplete submissions."""
    rejected: int
    """Rejected submissions."""
    fraud: int
    """Fraudulent submissions."""
    units: int
    """Units of the accepted ones."""
    earned_wei: Wei
    """What those are worth."""
    paid_wei: Wei
    """What was claimed."""
    policy_version: int | None
    """The policy it says it has loaded."""
    state: str | None
    """What it says it does."""
    seen_at: int | None
    """Wall clock of its last heartbeat."""
    life: str
    """Where it is in its life: discovered, active, unhealthy, dead, jailed, exiting or banned."""


class SlashStatus(AnswerBody):
    """One executed fraud verdict."""

    worker: AccountAddress
    """Who lost stake."""
    amount_wei: Wei
    """How much."""
    reason: str | None
    """The failed check."""
    state: str
    """Escrowed, released or restored."""
    tx_hash: str
    """The executing transaction."""
    settled_tx: str | None
    """The transaction that released or restored it."""
    submission_id: HashText | None
    """The submission it was for; None for a validator's fault."""


class SubmissionStatus(AnswerBody):
    """One received submission."""

    submission_id: HashText
    """Its file hash."""
    worker: AccountAddress
    """The worker."""
    step: int
    """Rollout step."""
    index: int
    """Slot number."""
    state: str
    """Received, committed or judged."""
    batch_id: int | None
    """Its batch."""
    verdict: str | None
    """The verdict that stands."""
    reason: str | None
    """Why, when it is not Accepted."""


class RunStatus(AnswerBody):
    """Everything the dashboard shows."""

    run_id: int
    """The run."""
    name: str
    """What people call it."""
    phase: str
    """Waiting for the base model or for funds, collecting, paused or finished."""
    step: int
    """Training step whose submissions are being collected."""
    steps: int
    """Training steps of the run; 0 until stopped."""
    policy_version: int | None
    """The newest policy version."""
    filled: int
    """Accepted submissions of the step so far."""
    submissions_per_step: int
    """Accepted submissions a step needs."""
    dropped: int
    """Accepted submissions that were too old when their turn came."""
    leasing_step: int
    """Rollout step of the next ticket."""
    received: int
    """Submissions received."""
    batches_committed: int
    """Batches on chain."""
    batches_judged: int
    """Of those, with outcomes."""
    validators: list[AccountAddress]
    """The current validators."""
    quorum: int
    """How many must agree."""
    absent_validators: list[AccountAddress]
    """Those of them that let the time of a call pass and were not heard of since."""
    funded_wei: Wei
    """Reward deposited."""
    paid_wei: Wei
    """Reward paid."""
    workers_total: int
    """Registered workers."""
    workers: list[WorkerStatus]
    """Those with the most units first."""
    reward: list[tuple[int, float]]
    """Mean task reward by training step."""
    eval_reward: list[tuple[int, float]]
    """Evaluation reward by policy version."""
    slashes: list[SlashStatus]
    """Latest first."""
    submissions: list[SubmissionStatus]
    """Latest first."""
    slashing_paused_until: int | None = None
    """When the pause of slashing ends, by the chain's clock; None while there is none."""
    slashing_paused_for: str | None = None
    """Why: the cause, and the failed check's reason where it has one."""


class Watched(AnswerBody):
    """How one validator's proofs of checking came out, over the newest judged batches."""

    validator: AccountAddress
    """Who."""
    signed: int
    """Outcomes of this validator that are on chain; the newest only once they are proven."""
    proven: int
    """Those with fingerprints that it had committed to before."""
    compared: int
    """Submissions that somebody else compared."""
    failed: int
    """Those whose fingerprints come from no recomputation."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def is_suspect(self) -> bool:
        """Whether a run's owner should look at it: wrong fingerprints, or often none."""
        return self.failed > 0 or 2 * self.proven < self.signed


class WatchedValidators(AnswerBody):
    """How every validator's proofs of checking came out lately."""

    validators: list[Watched] = Field(max_length=1000)
    """Those of the run."""
