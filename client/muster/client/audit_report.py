"""What an audit finds: figures per run and worker, slashes, payments, checks. Pure.

The same figures for everybody who reads the same events; nothing but the chain is consulted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from muster.chain import ChainView, Deployment, RunView, SlashView, WorkerView
from muster.client import audit_money, audit_work
from muster.client.audit_checks import Check, Judged, Observed, judged_outcomes, parameter
from muster.protocol.eip712 import Domain
from muster.protocol.encoding import hex0x
from muster.protocol.ids import Address, PolicyVersion, RunId
from muster.protocol.messages import Verdict


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """A published policy version."""

    version: PolicyVersion
    """Its number."""
    manifest_root: str
    """Keccak-256 of its manifest."""
    beacon: str
    """Hash of the publishing block."""
    block: int
    """The publishing block."""
    tx: str
    """The publishing transaction."""


@dataclass(frozen=True, slots=True)
class RunReport:
    """A run."""

    run_id: RunId
    """Its number."""
    owner: Address
    """Who created it."""
    paused: bool
    """Whether submissions are paused."""
    quorum: int
    """Validators that must sign."""
    validators: tuple[Address, ...]
    """The current validators."""
    price_wei: str
    """Wei per unit."""
    funded_wei: str
    """Received."""
    paid_wei: str
    """Paid out."""
    batches: int
    """Batches committed."""
    judged: int
    """Batches with outcomes."""
    submitted: int
    """Submissions committed."""
    accepted: int
    """Submissions accepted."""
    rejected: int
    """Submissions rejected or incomplete."""
    fraud: int
    """Submissions judged fraud."""
    units: int
    """Units accepted."""
    checkpoints: tuple[CheckpointReport, ...]
    """Published policy versions."""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """A worker. Its outcomes are those of the audited runs, by the verdicts that stand."""

    address: Address
    """The staking wallet."""
    worker_id: int
    """Number in outcome records."""
    node: Address
    """The hot key that signs for it."""
    status: str
    """active, jailed, exiting or banned."""
    stake_wei: str
    """Active stake."""
    unbonding_wei: str
    """Stake that is leaving."""
    slashed_wei: str
    """Stake taken and not given back."""
    submitted: int
    """Submissions that were judged."""
    accepted: int
    """Accepted ones."""
    rejected: int
    """Rejected or incomplete ones."""
    fraud: int
    """Fraudulent ones."""
    units: int
    """Units of the accepted ones."""
    paid_wei: str
    """What it was paid."""


@dataclass(frozen=True, slots=True)
class SlashReport:
    """A slash."""

    worker: Address
    """Whose stake it was."""
    amount_wei: str
    """What was taken."""
    reason: str
    """Why, as validators recorded it."""
    state: str
    """escrowed, released or restored."""
    run_id: RunId | None
    """The run of the outcome."""
    batch_id: int | None
    """Its batch."""
    position: int | None
    """Its place there."""
    offence: str
    """The leaf of the outcome."""
    tx: str
    """The transaction that slashed."""
    outcome_tx: str | None
    """The transaction that posted the verdict."""


@dataclass(frozen=True, slots=True)
class PaymentReport:
    """A payment."""

    run_id: RunId
    """The run that paid."""
    worker: Address
    """Who was paid."""
    slots: int
    """For how many slots."""
    units: int
    """For how many units."""
    amount_wei: str
    """How much."""
    tx: str
    """The transaction."""


@dataclass(frozen=True, slots=True)
class AuditReport:
    """Everything an audit finds."""

    chain_id: int
    """The chain."""
    block: int
    """The block up to which it was read."""
    runs: tuple[RunReport, ...]
    """The audited runs."""
    workers: tuple[WorkerReport, ...]
    """Every worker."""
    batches: int
    """Batches of the audited runs."""
    slashes: tuple[SlashReport, ...]
    """Slashes of the audited runs, in chain order."""
    payments: tuple[PaymentReport, ...]
    """Payments of the audited runs, in chain order."""
    checks: tuple[Check, ...]
    """What was recomputed: always over the whole chain."""

    @property
    def passed(self) -> bool:
        """Whether nothing contradicts."""
        return all(check.passed for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Return the stable JSON form."""
        return asdict(self)


def build_report(
    view: ChainView,
    deployment: Deployment,
    *,
    block: int | None = None,
    run_id: RunId | None = None,
    observed: Observed | None = None,
) -> AuditReport:
    """Return what the events add up to, for one run or all, with every check."""
    outcomes = list(judged_outcomes(view, run_id))
    runs = [run for run in view.runs.values() if run_id in (None, run.run_id)]
    return AuditReport(
        chain_id=deployment.chain_id,
        block=block if block is not None else view.block_number or 0,
        runs=tuple(_run_report(view, run, outcomes) for run in runs),
        workers=tuple(
            _worker_report(view, worker, outcomes, run_id) for worker in view.workers.values()
        ),
        batches=sum(run_id in (None, batch.run_id) for batch in view.batches.values()),
        slashes=tuple(
            report
            for slash in view.slashes
            if run_id in (None, (report := _slash_report(view, slash)).run_id)
        ),
        payments=tuple(
            PaymentReport(p.run_id, p.worker, p.slots, p.units, str(p.amount_wei), p.tx_hash)
            for p in view.payments
            if run_id in (None, p.run_id)
        ),
        checks=tuple(run_checks(view, deployment, observed)),
    )


def run_checks(
    view: ChainView, deployment: Deployment, observed: Observed | None = None
) -> list[Check]:
    """Return every check; the contracts' own sums are compared only when they were observed."""
    domain = Domain(deployment.chain_id, deployment.contracts["ContributionLedger"])
    window_s = parameter(deployment, "challenge_window_s")
    checks = [
        audit_work.events_follow(view),
        audit_work.batch_roots(view),
        audit_work.direct_submissions(view, domain),
        audit_work.outcomes_roots(view),
        audit_work.signatures(view, domain),
        audit_work.accepted_records(view),
        audit_money.slots(view),
        audit_money.payments(view, window_s),
        audit_money.slashes(view, window_s),
        audit_money.slash_splits(view, deployment),
        audit_work.cases(view, domain),
    ]
    return checks if observed is None else [*checks, audit_money.sums(view, observed)]


def _counts(outcomes: Sequence[Judged]) -> dict[str, int]:
    verdicts = Counter(outcome.verdict for outcome in outcomes)
    return {
        "accepted": verdicts[Verdict.ACCEPTED],
        "rejected": verdicts[Verdict.REJECTED] + verdicts[Verdict.INCOMPLETE],
        "fraud": verdicts[Verdict.FRAUD],
        "units": sum(o.record.units for o in outcomes if o.verdict is Verdict.ACCEPTED),
    }


def _run_report(view: ChainView, run: RunView, outcomes: Sequence[Judged]) -> RunReport:
    batches = [batch for batch in view.batches.values() if batch.run_id == run.run_id]
    return RunReport(
        run_id=run.run_id,
        owner=run.owner,
        paused=run.paused,
        quorum=run.config.terms.quorum,
        validators=tuple(run.validators),
        price_wei=str(run.config.terms.price_per_unit),
        funded_wei=str(run.funded_wei),
        paid_wei=str(run.paid_wei),
        batches=len(batches),
        judged=sum(batch.records is not None for batch in batches),
        submitted=sum(batch.count for batch in batches),
        **_counts([o for o in outcomes if o.batch.run_id == run.run_id]),
        checkpoints=tuple(
            CheckpointReport(
                version=checkpoint.version,
                manifest_root=hex0x(checkpoint.manifest_root),
                beacon=hex0x(checkpoint.beacon),
                block=checkpoint.block_number,
                tx=checkpoint.tx_hash,
            )
            for checkpoint in run.checkpoints.values()
        ),
    )


def _worker_report(
    view: ChainView, worker: WorkerView, outcomes: Sequence[Judged], run_id: RunId | None
) -> WorkerReport:
    own = [outcome for outcome in outcomes if outcome.record.worker_id == worker.worker_id]
    paid = sum(
        payment.amount_wei
        for payment in view.payments
        if payment.worker == worker.address and run_id in (None, payment.run_id)
    )
    return WorkerReport(
        address=worker.address,
        worker_id=worker.worker_id,
        node=worker.node,
        status=worker.status.lower(),
        stake_wei=str(worker.active_wei),
        unbonding_wei=str(worker.unbonding_wei),
        slashed_wei=str(worker.slashed_wei),
        submitted=len(own),
        **_counts(own),
        paid_wei=str(paid),
    )


def _slash_report(view: ChainView, slash: SlashView) -> SlashReport:
    batch = view.batches.get(slash.batch_id) if slash.batch_id is not None else None
    reason = slash.fault or ("double submission" if slash.is_double_submission else "")
    if batch and slash.position is not None:
        # A tampered chain may point anywhere.
        of_position = (batch.records or [])[slash.position : slash.position + 1]
        reason = "".join(record.reason.name.lower() for record in of_position)
    return SlashReport(
        worker=slash.owner,
        amount_wei=str(slash.amount_wei),
        reason=reason,
        state=slash.state,
        run_id=batch.run_id if batch else None,
        batch_id=slash.batch_id,
        position=slash.position,
        offence=hex0x(slash.offence),
        tx=slash.tx_hash,
        outcome_tx=batch.posted_tx if batch else None,
    )
