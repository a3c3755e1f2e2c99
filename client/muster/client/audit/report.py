"""What an audit finds: figures per run and worker, slashes, payments, checks. Pure.

The same figures for everybody who reads the same events; nothing but the chain is consulted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from muster.chain import (
    ChainView,
    Deployment,
    Loss,
    MemberView,
    RunView,
    SlashView,
    losses,
    reason_of,
)
from muster.client.audit import calls, disputes, money, stakes, work
from muster.client.audit.contradictions import Check, Contradiction
from muster.client.audit.observed import Observed, fixed
from muster.client.audit.table import OutcomeTable, tabulate
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

    run_id: RunId
    """The run."""
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
    run_id: RunId
    """The run that it was staked for; 0 for the jurors' bench."""
    batch_id: int | None
    """Its batch."""
    position: int | None
    """Its place there."""
    offence: str
    """What for, as the vault files it."""
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
    losses: tuple[Loss, ...]
    """What each stake lost in the audited runs, one for whoever was slashed."""
    checks: tuple[Check, ...]
    """What was recomputed: always over the whole chain."""

    @property
    def passed(self) -> bool:
        """Whether nothing contradicts."""
        return all(check.passed for check in self.checks)

    @property
    def contradictions(self) -> tuple[Contradiction, ...]:
        """What contradicts, in the order of the checks."""
        return tuple(found for check in self.checks for found in check.contradictions)

    def to_json(self) -> dict[str, Any]:
        """Return the stable JSON form."""
        values = asdict(self)
        # Sums of the slashes, for people.
        del values["losses"]
        values["checks"] = [check.to_json() for check in self.checks]
        values["contradictions"] = [found.to_json() for found in self.contradictions]
        return values


def build_report(
    view: ChainView,
    deployment: Deployment,
    *,
    block: int | None = None,
    run_id: RunId | None = None,
    observed: Observed | None = None,
    about_source: Sequence[Check] = (),
) -> AuditReport:
    """Return what the events add up to, for one run or all, with every check.

    `about_source` are checks of where the events came from.
    """
    table = tabulate(view)
    paid: dict[tuple[RunId, Address], int] = defaultdict(int)
    for payment in view.payments:
        paid[payment.run_id, payment.worker] += payment.amount_wei
    runs = [run for run in view.runs.values() if run_id in (None, run.run_id)]
    return AuditReport(
        chain_id=deployment.chain_id,
        block=block if block is not None else view.block_number or 0,
        runs=tuple(_run_report(view, run, table) for run in runs),
        workers=tuple(
            _worker_report(member, counts, paid[run.run_id, member.address])
            for run in runs
            for counts in [Counts(table, run.run_id)]
            for member in run.members.values()
        ),
        batches=sum(run_id in (None, batch.run_id) for batch in view.batches.values()),
        slashes=tuple(
            _slash_report(view, slash) for slash in view.slashes if run_id in (None, slash.run_id)
        ),
        payments=tuple(
            PaymentReport(p.run_id, p.worker, p.slots, p.units, str(p.amount_wei), p.tx_hash)
            for p in view.payments
            if run_id in (None, p.run_id)
        ),
        losses=tuple(losses(view, run_id)),
        checks=(*about_source, *run_checks(view, deployment, observed, table=table)),
    )


def run_checks(
    view: ChainView,
    deployment: Deployment,
    observed: Observed | None = None,
    *,
    table: OutcomeTable | None = None,
    fresh: OutcomeTable | None = None,
) -> list[Check]:
    """Return every check; the contracts' own sums are compared only when they were observed.

    Batches never change once they are posted: roots, signatures and records of those outside
    `fresh` are not looked at again.
    """
    table = tabulate(view) if table is None else table
    fresh = table if fresh is None else fresh
    domain = Domain(deployment.chain_id, deployment.contracts["ContributionLedger"])
    known = fixed(deployment, observed)
    window_s, deadline_s = known.get("challenge_window_s"), known.get("outcome_deadline_s")
    checks = [
        work.events_follow(view),
        work.batch_roots(view, fresh),
        work.commitments(view),
        work.direct_submissions(view, domain),
        work.outcomes_roots(fresh),
        work.signatures(view, fresh, domain),
        calls.signed_by_the_called(view, fresh, deadline_s),
        work.deadlines(fresh, deadline_s),
        work.reasons(fresh),
        work.accepted_records(view, fresh),
        money.slots(table),
        money.payments(view, table, window_s),
        money.voids(view),
        stakes.roles(view, known),
        stakes.slashes(view, table, known),
        stakes.slash_splits(view, known),
        disputes.cases(view, domain),
        disputes.juries(view, observed, known),
        disputes.money(view, observed, known),
    ]
    return checks if observed is None else [*checks, money.sums(view, observed)]


class Counts:
    """Outcomes of each worker, by the verdicts that stand, in one pass over the table."""

    def __init__(self, table: OutcomeTable, run_id: RunId | None) -> None:
        rows = np.flatnonzero(table.is_of(run_id))
        self._numbers, place = np.unique(table.column("worker_id")[rows], return_inverse=True)
        verdicts = table.verdict_N[rows]
        size = (len(self._numbers), 5)
        self._counts: NDArray[np.int64] = np.zeros(size, np.int64)
        np.add.at(self._counts, (place, verdicts), 1)
        self._units: NDArray[np.int64] = np.zeros(len(self._numbers), np.int64)
        accepted = verdicts == Verdict.ACCEPTED
        np.add.at(self._units, place[accepted], table.column("units")[rows][accepted])

    def of(self, worker_id: int) -> dict[str, int]:
        """Return a worker's figures, named as in the reports."""
        at = int(np.searchsorted(self._numbers, worker_id))
        if at == len(self._numbers) or self._numbers[at] != worker_id:
            return _figures(np.zeros(5, np.int64), 0)
        return _figures(self._counts[at], int(self._units[at]))

    def of_all(self) -> dict[str, int]:
        """Return everybody's figures."""
        return _figures(self._counts.sum(axis=0), int(self._units.sum()))


def _figures(counts: NDArray[np.int64], units: int) -> dict[str, int]:
    return {
        "accepted": int(counts[Verdict.ACCEPTED]),
        "rejected": int(counts[Verdict.REJECTED] + counts[Verdict.INCOMPLETE]),
        "fraud": int(counts[Verdict.FRAUD]),
        "units": units,
    }


def _run_report(view: ChainView, run: RunView, table: OutcomeTable) -> RunReport:
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
        # What a worker took out of a batch is counted there.
        submitted=sum(batch.count for batch in batches if batch.split_from is None),
        **Counts(table, run.run_id).of_all(),
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


def _worker_report(worker: MemberView, counts: Counts, paid_wei: int) -> WorkerReport:
    figures = counts.of(worker.worker_id)
    return WorkerReport(
        run_id=worker.run_id,
        address=worker.address,
        worker_id=worker.worker_id,
        node=worker.node,
        status=worker.status.lower(),
        stake_wei=str(worker.active_wei),
        unbonding_wei=str(worker.unbonding_wei),
        slashed_wei=str(worker.slashed_wei),
        submitted=figures["accepted"] + figures["rejected"] + figures["fraud"],
        **figures,
        paid_wei=str(paid_wei),
    )


def _slash_report(view: ChainView, slash: SlashView) -> SlashReport:
    batch = view.batches.get(slash.batch_id) if slash.batch_id is not None else None
    return SlashReport(
        worker=slash.owner,
        amount_wei=str(slash.amount_wei),
        reason=reason_of(view, slash),
        state=slash.state,
        run_id=slash.run_id,
        batch_id=slash.batch_id,
        position=slash.position,
        offence=slash.offence.name.lower(),
        tx=slash.tx_hash,
        outcome_tx=batch.posted_tx if batch else None,
    )
