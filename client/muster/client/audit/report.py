"""The result of an audit: figures per run and worker, slashes, payments, checks. Pure.

The same events give everybody the same figures; nothing but the chain is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from muster.chain import (
    BatchView,
    Deployment,
    Loss,
    MemberView,
    RunView,
    SlashView,
    SubmissionPlace,
    find_outcome,
    find_worker,
    losses,
    reason_of,
)
from muster.client.audit import calls, disputes, money, overdue, stakes, work
from muster.client.audit.contradictions import Check, Contradiction
from muster.client.audit.ledger import Ledger, of_run
from muster.client.audit.observed import Observed
from muster.client.audit.outcome_table import OutcomeTable, tabulate
from muster.protocol.eip712 import Domain
from muster.protocol.encoding import hex0x
from muster.protocol.errors import ConfigError
from muster.protocol.ids import Address, PolicyVersion, RunId
from muster.protocol.jury import summons_of
from muster.protocol.merkle import merkle_proof
from muster.protocol.messages import Verdict

if TYPE_CHECKING:
    from muster.client.audit.history import ChainHistory


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
    """The account that created it."""
    paused: bool
    """Whether submissions are paused."""
    quorum: int
    """Number of validators that must sign."""
    validators: tuple[Address, ...]
    """The current validators."""
    price_wei: str
    """Wei per unit."""
    funded_wei: str
    """Tokens that the run received."""
    paid_wei: str
    """Tokens that the run paid out."""
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
    """A worker, with its outcomes in the audited runs by the verdicts that stand."""

    run_id: RunId
    """The run."""
    worker_id: int
    """Number in outcome records."""
    address: Address
    """The staking wallet."""
    node: Address
    """The hot key that signs for it now."""
    status: str
    """active, jailed, exiting or banned."""
    stake_wei: str
    """Active stake."""
    unbonding_wei: str
    """Stake that is leaving."""
    slashed_wei: str
    """Stake taken and not given back."""
    submitted: int
    """Submissions judged."""
    accepted: int
    """Accepted, by the verdict that stands."""
    rejected: int
    """Rejected or incomplete."""
    fraud: int
    """Fraudulent."""
    units: int
    """Units of the accepted ones."""
    paid_wei: str
    """Reward paid."""


@dataclass(frozen=True, slots=True)
class SlashReport:
    """A slash."""

    worker: Address
    """Whose stake it was: a worker's, a validator's or a juror's."""
    amount_wei: str
    """The amount taken."""
    reason: str
    """The reason, in words."""
    state: str
    """escrowed, released or restored."""
    run_id: RunId
    """The run for which it was staked; 0 for the jurors' bench."""
    batch_id: int | None
    """Its batch."""
    position: int | None
    """Its place there."""
    offence: str
    """fraud, exact_fraud, double_submission, wrong_verdict, double_outcome, absent_juror,
    misrecord."""
    tx: str
    """Transaction that slashed."""
    outcome_tx: str | None
    """Transaction that posted the verdict."""


@dataclass(frozen=True, slots=True)
class PaymentReport:
    """A payment."""

    run_id: RunId
    """The run that paid."""
    worker: Address
    """The paid worker."""
    slots: int
    """Number of paid slots."""
    units: int
    """Number of paid units."""
    amount_wei: str
    """The amount."""
    tx: str
    """The transaction."""


@dataclass(frozen=True, slots=True)
class AuditReport:
    """Everything an audit finds."""

    chain_id: int
    block: int
    """The block up to which it was read."""
    runs: tuple[RunReport, ...]
    workers: tuple[WorkerReport, ...]
    """Every worker."""
    batches: int
    """Batches of the audited runs."""
    slashes: tuple[SlashReport, ...]
    """Slashes of the audited runs, in chain order."""
    payments: tuple[PaymentReport, ...]
    """Payments of the audited runs, in chain order."""
    losses: tuple[Loss, ...]
    """Losses in the audited runs, one for each stake that was slashed."""
    checks: tuple[Check, ...]
    """Checks of the audited runs, and of what all runs share."""
    others: int = 0
    """Number of runs that were not audited."""

    @property
    def passed(self) -> bool:
        """Whether nothing contradicts."""
        return all(check.passed for check in self.checks)

    @property
    def contradictions(self) -> tuple[Contradiction, ...]:
        """All contradictions, in the order of the checks."""
        return tuple(found for check in self.checks for found in check.contradictions)

    def to_json(self) -> dict[str, Any]:
        """Return the stable JSON form."""
        values = asdict(self)
        # These are only for the terminal: losses are sums of the slashes.
        del values["losses"], values["others"]
        values["checks"] = [check.to_json() for check in self.checks]
        values["contradictions"] = [found.to_json() for found in self.contradictions]
        return values


def build_report(
    view: Ledger,
    deployment: Deployment,
    observed: Observed,
    *,
    block: int | None = None,
    run_id: RunId | None = None,
    about_source: Sequence[Check] = (),
) -> AuditReport:
    """Return the report for one run or all, with every check.

    `about_source` are checks of the events' source.
    """
    whole, view = view, view if run_id is None else of_run(view, run_id)
    table = tabulate(view)
    paid: dict[tuple[RunId, Address], int] = defaultdict(int)
    for payment in view.payments:
        paid[payment.run_id, payment.worker] += payment.amount_wei
    runs = list(view.runs.values())
    return AuditReport(
        chain_id=deployment.chain_id,
        block=block if block is not None else view.block_number or 0,
        runs=tuple(_run_report(view, run, table) for run in runs),
        workers=tuple(
            _worker_report(member, counts, paid[run.run_id, member.address])
            for run in runs
            for counts in [VerdictCounts(table, run.run_id)]
            for member in run.members.values()
        ),
        batches=len(view.batches),
        slashes=tuple(
            _slash_report(view, slash) for slash in view.slashes if run_id in (None, slash.run_id)
        ),
        payments=tuple(
            PaymentReport(p.run_id, p.worker, p.slots, p.units, str(p.amount_wei), p.tx_hash)
            for p in view.payments
        ),
        losses=tuple(losses(view, run_id)),
        checks=(
            *about_source,
            *_run_checks((view, whole), table, deployment, observed, money.Doubts.of(about_source)),
        ),
        others=len(whole.runs) - len(runs),
    )


def _run_checks(
    ledgers: tuple[Ledger, Ledger],
    table: OutcomeTable,
    deployment: Deployment,
    observed: Observed,
    doubts: money.Doubts,
) -> list[Check]:
    """Return every check but those of the events' source (`about_source`).

    The first of the ledgers may be a part of the second, made by `of_run`. `doubts` come from
    verdicts that were run again.
    """
    view, whole = ledgers
    domain = Domain(deployment.chain_id, deployment.contracts["ContributionLedger"])
    parameters = observed.parameters
    window_s, deadline_s = parameters.challenge_window_s, parameters.outcome_deadline_s
    return [
        work.events_follow(view),
        work.batch_roots(view, table),
        work.commitments(view),
        work.direct_submissions(view, domain),
        work.outcomes_roots(table),
        work.signatures(view, table, domain),
        calls.signed_by_the_called(view, table, deadline_s),
        work.deadlines(table, deadline_s),
        work.reasons(table),
        work.accepted_records(view, table),
        money.slots(table),
        money.payments(view, table, window_s, doubts),
        money.freed(view, table),
        stakes.roles(view, parameters),
        stakes.slashes(view, table, parameters),
        stakes.slash_splits(view, parameters),
        disputes.cases(view, domain),
        disputes.juries(view, observed),
        disputes.money(view, observed, whole),
        overdue.waiting(view, table, parameters, observed.timestamp),
        money.sums(whole, observed, view.runs),
    ]


class VerdictCounts:
    """Counts of each worker's outcomes by the verdicts that stand, in one pass over the table."""

    def __init__(self, table: OutcomeTable, run_id: RunId | None) -> None:
        rows = np.flatnonzero(table.is_of(run_id))
        numbers, place = np.unique(table.column("worker_id")[rows], return_inverse=True)
        self._place = {number: at for at, number in enumerate(numbers.tolist())}
        verdicts = table.verdict_N[rows]
        # The last row is for workers without outcomes.
        self._counts: NDArray[np.int64] = np.zeros((len(numbers) + 1, 5), np.int64)
        np.add.at(self._counts, (place, verdicts), 1)
        self._units: NDArray[np.int64] = np.zeros(len(numbers) + 1, np.int64)
        accepted = verdicts == Verdict.ACCEPTED
        np.add.at(self._units, place[accepted], table.column("units")[rows][accepted])

    def of(self, worker_id: int) -> dict[str, int]:
        """Return a worker's figures, named as in the reports."""
        at = self._place.get(worker_id, -1)
        return _figures(self._counts[at], int(self._units[at]))

    def of_all(self) -> dict[str, int]:
        """Return the figures of all workers together."""
        return _figures(self._counts.sum(axis=0), int(self._units.sum()))


def _figures(counts: NDArray[np.int64], units: int) -> dict[str, int]:
    return {
        "accepted": int(counts[Verdict.ACCEPTED]),
        "rejected": int(counts[Verdict.REJECTED] + counts[Verdict.INCOMPLETE]),
        "fraud": int(counts[Verdict.FRAUD]),
        "units": units,
    }


def _run_report(view: Ledger, run: RunView, table: OutcomeTable) -> RunReport:
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
        # A batch split from another one holds a submission that is counted in the other one.
        submitted=sum(batch.count for batch in batches if batch.split_from is None),
        **VerdictCounts(table, run.run_id).of_all(),
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


def _worker_report(worker: MemberView, counts: VerdictCounts, paid_wei: int) -> WorkerReport:
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


def _slash_report(view: Ledger, slash: SlashView) -> SlashReport:
    batch = view.batch_of(slash)
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


# One worker, one submission, every slash: the ledger's facts, and their contradictions


def worker_facts(history: ChainHistory, worker: str) -> dict[str, Any]:
    """Return a worker's figures, outcomes, slashes and payments; raises ConfigError for a text that
    names no worker.
    """
    account = find_worker(history.ledger, worker)
    address = account.address
    report, table = history.report(), tabulate(history.ledger)
    rows = np.flatnonzero(table.column("worker_id") == account.worker_id).tolist()
    places = {(batch.batch_id, position) for batch, position in map(table.place, rows)}
    figures = [worker for worker in report.workers if worker.address == address]
    return {
        "worker": {"address": address, "worker_id": account.worker_id, "node": account.node},
        "memberships": [asdict(membership) for membership in figures],
        "outcomes": [_outcome(table, row) for row in rows],
        "slashes": [asdict(slash) for slash in report.slashes if slash.worker == address],
        "payments": [asdict(each) for each in report.payments if each.worker == address],
        "contradictions": [
            found.to_json()
            for found in report.contradictions
            if address in found.detail or (found.batch_id, found.position) in places
        ],
    }


def _outcome(table: OutcomeTable, row: int) -> dict[str, Any]:
    batch, position = table.place(row)
    record = table.record(row)
    return {
        "run_id": batch.run_id,
        "batch_id": batch.batch_id,
        "position": position,
        "step": record.step,
        "index": record.index,
        "policy_version": record.policy_version,
        "file_sha256": hex0x(record.file_hash),
        "units": record.units,
        "verdict": record.verdict.name.lower(),
        "reason": record.reason.name.lower(),
        "standing_verdict": Verdict(int(table.verdict_N[row])).name.lower(),
        "posted_tx": batch.posted_tx,
    }


def row_of(table: OutcomeTable, place: SubmissionPlace) -> int:
    """Return the row of a submission's outcome; raises ConfigError when it is not judged yet."""
    for number, batch in enumerate(table.batches):
        if batch.batch_id == place.batch.batch_id:
            return int(table.starts[number]) + place.position
    raise ConfigError(
        f"submission {place} is not judged yet", hint="muster explain says who must judge it"
    )


def submission_facts(history: ChainHistory, submission: str) -> dict[str, Any]:
    """Return everything that the chain proves about an outcome."""
    table, ledger = tabulate(history.ledger), history.ledger
    row = row_of(table, find_outcome(ledger, submission))
    batch, position = table.place(row)
    record = table.record(row)
    leaves = batch.leaves()
    leaf = leaves[position]
    case = ledger.cases.get(leaf) or ledger.cases.get(summons_of(batch.batch_id))
    worker = ledger.worker_by_id.get(record.worker_id)
    slash = next(
        (s for s in ledger.slashes if (s.batch_id, s.position) == (batch.batch_id, position)), None
    )
    return {
        **_outcome(table, row),
        "worker": worker and worker.address,
        "price_wei_per_unit": str(batch.price_per_unit),
        "committed": _moment(batch.committed_at, batch.block_number, batch.tx_hash),
        "posted": _moment(batch.posted_at, batch.posted_block, batch.posted_tx),
        **_called(history, batch),
        "signed_by": [signer for signer in work.outcome_signers(batch, history.domain) if signer],
        "leaf": hex0x(leaf),
        "outcomes_root": batch.outcomes_root and hex0x(batch.outcomes_root),
        "proof": [hex0x(node) for node in merkle_proof(leaves, position)],
        "case": case
        and {
            "opened_tx": case.opened_tx,
            "closed_tx": case.closed_tx,
            "is_overturned": case.overturned,
        },
        "slash_tx": slash and slash.tx_hash,
        "contradictions": [found.to_json() for found in _about(history, batch, position)],
    }


def _called(history: ChainHistory, batch: BatchView) -> dict[str, Any]:
    """Return the validators drawn to check a batch, and the ground on which others signed."""
    if not batch.signers:
        return {"drawn_first": None, "signed_on_ground": "judged by jurors of the network"}
    deadline_s = history.observed.parameters.outcome_deadline_s
    first, ground = calls.drawn_first(history.ledger, batch, deadline_s)
    return {"drawn_first": first, "signed_on_ground": str(ground)}


def _moment(at_s: int | None, block: int | None, tx: str | None) -> dict[str, Any]:
    return {"at_s": at_s, "block": block, "tx": tx}


def _about(history: ChainHistory, batch: BatchView, position: int) -> Iterator[Contradiction]:
    for found in history.report().contradictions:
        if found.batch_id == batch.batch_id and found.position in (None, position):
            yield found


def slash_facts(history: ChainHistory) -> dict[str, Any]:
    """Return every slash with its contradictions."""
    report = history.report()
    wrong = [found for found in report.contradictions if str(found.kind).startswith("slash-")]
    return {
        "slashes": [
            {**asdict(slash), "is_founded": not any(slash.tx == found.tx for found in wrong)}
            for slash in report.slashes
        ],
        "contradictions": [found.to_json() for found in wrong],
    }
