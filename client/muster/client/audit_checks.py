"""What an auditor recomputes from a chain's events. Pure: a view in, checks out.

Nothing here trusts what the ledger computed: roots, signatures, amounts and sums are derived again
and compared. A check fails with what disagrees and in which transaction.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from muster.chain import (
    BatchView,
    CaseView,
    ChainView,
    Deployment,
    Funds,
    PaymentView,
    SlashState,
    SlashView,
    StakeTotals,
)
from muster.protocol.eip712 import Domain, digest, recover
from muster.protocol.errors import SignatureError
from muster.protocol.ids import Address, Hash32, PolicyVersion, RunId
from muster.protocol.merkle import merkle_root
from muster.protocol.messages import OutcomeRecord, Outcomes, Submission, Verdict

PPM = 1_000_000
"""The whole, in millionths."""
SHOWN_PROBLEMS = 5
"""Problems that a check's detail spells out."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was recomputed."""

    name: str
    """What must hold."""
    passed: bool
    """Whether it does."""
    detail: str
    """What was compared, or what disagrees."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What the contracts themselves say at the audited block, to compare sums with."""

    totals: StakeTotals
    """Sums of StakeVault."""
    runs: int
    """Runs of RunRegistry."""
    batches: int
    """Batches of ContributionLedger."""
    funds: Mapping[RunId, Funds] = field(default_factory=dict)
    """Money of each run the events tell of."""
    versions: Mapping[RunId, PolicyVersion | None] = field(default_factory=dict)
    """Newest policy version of each."""
    judged: frozenset[int] = frozenset()
    """Batches with outcomes, of those that have none by the events."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A posted outcome."""

    batch: BatchView
    """Its batch."""
    position: int
    """Its place there."""
    record: OutcomeRecord
    """The record."""
    verdict: Verdict
    """The verdict that stands after disputes."""


def judged_outcomes(view: ChainView, run_id: RunId | None = None) -> Iterator[Judged]:
    """Yield every posted outcome, of one run or of all, in the order of commitment."""
    for batch in view.batches.values():
        if run_id in (None, batch.run_id):
            for position, record in enumerate(batch.records or ()):
                verdict = view.standing_verdict(batch.batch_id, position) or record.verdict
                yield Judged(batch, position, record, verdict)


def run_checks(
    view: ChainView, deployment: Deployment, observed: Observed | None = None
) -> list[Check]:
    """Return every check; those that need the contracts' own sums only when they were observed."""
    domain = Domain(deployment.chain_id, deployment.contracts["ContributionLedger"])
    window_s = _number(deployment, "challenge_window_s")
    checks = [
        _events_follow(view),
        _batch_roots(view),
        _direct_submissions(view, domain),
        _outcomes_roots(view),
        _signatures(view, domain),
        _records(view),
        _slots(view),
        _payments(view, window_s),
        _slashes(view, window_s),
        _slash_splits(view, deployment),
        _cases(view, domain),
    ]
    if observed is not None:
        checks.append(_sums(view, observed))
    return checks


def _check(name: str, problems: Iterable[str], summary: str) -> Check:
    found = list(problems)
    if not found:
        return Check(name, True, summary)
    more = len(found) - SHOWN_PROBLEMS
    detail = "; ".join(found[:SHOWN_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")
    return Check(name, False, detail)


def _number(deployment: Deployment, name: str) -> int | None:
    value = deployment.parameters.get(name)
    return int(value) if value is not None else None


def _events_follow(view: ChainView) -> Check:
    return _check(
        "events follow from one another",
        view.contradictions,
        f"up to block {view.block_number or 0}",
    )


# ----------------------------------------------------------------------- batches


def _batch_roots(view: ChainView) -> Check:
    problems, proven, unproven = [], 0, 0
    for batch in view.batches.values():
        leaves = submission_leaves(view, batch)
        if leaves is not None and merkle_root(leaves) == batch.root:
            proven += 1
            if _must_be_proven(batch) and batch.units != _claimed_units(batch):
                problems.append(
                    f"batch {batch.batch_id} claims {batch.units} units, its submissions "
                    f"{_claimed_units(batch)} ({batch.tx_hash})"
                )
        elif leaves is not None and _must_be_proven(batch):
            problems.append(
                f"batch {batch.batch_id} does not commit to what was accepted ({batch.tx_hash})"
            )
        else:
            unproven += 1
    return _check(
        "batch roots commit to the submissions that were judged",
        problems,
        f"{proven} proven, {unproven} cannot be: claims that were not accepted, or not judged yet, "
        "are not on chain",
    )


def submission_leaves(view: ChainView, batch: BatchView) -> list[Hash32] | None:
    """Return the leaves that a batch must have if its records repeat the claims, or None.

    An accepted record does: rollouts and units that differ from the claim are not accepted.
    """
    if batch.direct is not None:
        return [batch.direct.leaf()]
    leaves = []
    for record in batch.records or ():
        worker = view.worker_by_id.get(record.worker_id)
        if worker is None:
            return None
        leaves.append(_claimed(batch, worker.address, record).leaf())
    return leaves or None


def _claimed(batch: BatchView, worker: Address, record: OutcomeRecord) -> Submission:
    return Submission(
        run_id=batch.run_id,
        worker=worker,
        step=record.step,
        index=record.index,
        policy_version=record.policy_version,
        file_hash=record.file_hash,
        rollouts=record.rollouts,
        units=record.units,
    )


def _must_be_proven(batch: BatchView) -> bool:
    records = batch.records or ()
    return batch.direct is not None or all(r.verdict is Verdict.ACCEPTED for r in records)


def _claimed_units(batch: BatchView) -> int:
    if batch.direct is not None:
        return batch.direct.units
    return sum(record.units for record in batch.records or ())


def _direct_submissions(view: ChainView, domain: Domain) -> Check:
    problems, count = [], 0
    for batch in view.batches.values():
        if batch.direct is None:
            continue
        count += 1
        signer = _recovered(digest(domain, batch.direct.struct_hash()), batch.direct_signature)
        worker = view.workers.get(batch.direct.worker)
        if worker is None or signer not in {node for _, node in worker.nodes}:
            problems.append(f"batch {batch.batch_id} is not signed by a node of its worker")
    return _check(
        "direct submissions are signed by their worker's node", problems, f"{count} submissions"
    )


def _outcomes_roots(view: ChainView) -> Check:
    problems, count = [], 0
    for batch in view.batches.values():
        if not batch.records:
            continue
        count += 1
        leaves = [record.leaf(batch.batch_id, i) for i, record in enumerate(batch.records)]
        if merkle_root(leaves) != batch.outcomes_root:
            problems.append(
                f"the records of batch {batch.batch_id} do not make up its outcomes root "
                f"({batch.posted_tx})"
            )
    return _check("outcomes roots follow from the records", problems, f"{count} roots recomputed")


def _signatures(view: ChainView, domain: Domain) -> Check:
    problems, count = [], 0
    for batch in view.batches.values():
        if batch.records is None:
            continue
        count += len(batch.signatures)
        problems += [
            f"batch {batch.batch_id}: {problem} ({batch.posted_tx})"
            for problem in _signature_problems(view, batch, domain)
        ]
    return _check(
        "a quorum of the validators of that time signed every outcome",
        problems,
        f"{count} signatures recovered",
    )


def _signature_problems(view: ChainView, batch: BatchView, domain: Domain) -> Iterator[str]:
    signers = outcome_signers(batch, domain)
    if None in signers:
        yield "a signature is malformed"
    valid = {signer for signer in signers if signer in batch.validators}
    for stranger in {signer for signer in signers if signer} - valid:
        yield f"{stranger} signed and was no validator"
    run = view.runs.get(batch.run_id)
    quorum = run.config.quorum if run else 1
    if len(valid) < quorum:
        yield f"{len(valid)} validators signed, the quorum is {quorum}"


def outcome_signers(batch: BatchView, domain: Domain) -> list[Address | None]:
    """Return who signed a batch's outcomes, None for each signature that recovers to nobody."""
    if batch.records_hash is None:
        return []
    message = Outcomes(batch.batch_id, batch.root, batch.records_hash)
    hashed = digest(domain, message.struct_hash())
    return [_recovered(hashed, signature) for signature in batch.signatures]


def _recovered(hashed: Hash32, signature: bytes) -> Address | None:
    try:
        return recover(hashed, signature)
    except SignatureError:
        return None


def _records(view: ChainView) -> Check:
    problems, count = [], 0
    for outcome in judged_outcomes(view):
        count += 1
        if outcome.verdict is Verdict.ACCEPTED and (problem := _unfounded(view, outcome)):
            problems.append(
                f"batch {outcome.batch.batch_id} position {outcome.position}: {problem}"
            )
    return _check(
        "accepted work is by registered workers, for policies that were published",
        problems,
        f"{count} outcomes",
    )


def _unfounded(view: ChainView, outcome: Judged) -> str | None:
    """Return why an accepted outcome cannot be, or None."""
    batch, record = outcome.batch, outcome.record
    worker = view.worker_by_id.get(record.worker_id)
    if worker is None:
        return f"worker {record.worker_id} does not exist"
    run = view.runs.get(batch.run_id)
    checkpoint = run.checkpoints.get(record.policy_version) if run else None
    if checkpoint is None or checkpoint.block_number > batch.block_number:
        return f"policy {record.policy_version} was not published when it was committed"
    if worker.first_active_from > checkpoint.block_number:
        return f"worker {record.worker_id} was not active yet for policy {record.policy_version}"
    return None


# ------------------------------------------------------------------------- money


def _slots(view: ChainView) -> Check:
    accepted = Counter(
        (o.batch.run_id, o.record.worker_id, o.record.step, o.record.index)
        for o in judged_outcomes(view)
        if o.verdict is Verdict.ACCEPTED
    )
    problems = [
        f"run {run}, worker {worker}, step {step}, index {index}: accepted {times} times"
        for (run, worker, step, index), times in accepted.items()
        if times > 1
    ]
    return _check("every slot settles once", problems, f"{len(accepted)} slots accepted")


def _payments(view: ChainView, window_s: int | None) -> Check:
    problems: list[str] = []
    paid: dict[tuple[RunId, Address], tuple[int, int]] = defaultdict(lambda: (0, 0))
    earned = _earnings(view)
    for payment in view.payments:
        account = (payment.run_id, payment.worker)
        slots, units = paid[account]
        paid[account] = (slots + payment.slots, units + payment.units)
        due = _due(earned[account], payment, window_s)
        problems += _payment_problems(view, payment, paid[account], due)
    total = sum(payment.amount_wei for payment in view.payments)
    problems += [
        f"run {run.run_id} paid {run.paid_wei} wei of {run.funded_wei}"
        for run in view.runs.values()
        if run.paid_wei > run.funded_wei
    ]
    return _check(
        "payments are units × price, for accepted slots that are final",
        problems,
        f"{len(view.payments)} payments, {total} wei",
    )


_Earned = dict[tuple[int, int], tuple[int, int]]
"""Units and time of posting by (step, index)."""


def _earnings(view: ChainView) -> dict[tuple[RunId, Address], _Earned]:
    earned: dict[tuple[RunId, Address], _Earned] = defaultdict(dict)
    for outcome in judged_outcomes(view):
        worker = view.worker_by_id.get(outcome.record.worker_id)
        if worker is not None and outcome.verdict is Verdict.ACCEPTED:
            slot = (outcome.record.step, outcome.record.index)
            value = (outcome.record.units, outcome.batch.posted_at or 0)
            earned[outcome.batch.run_id, worker.address].setdefault(slot, value)
    return earned


def _due(earned: _Earned, payment: PaymentView, window_s: int | None) -> tuple[int, int]:
    """Return the slots and units that were final when a payment was made."""
    final = [u for u, posted in earned.values() if posted + (window_s or 0) <= payment.timestamp]
    return len(final), sum(final)


def _payment_problems(
    view: ChainView, payment: PaymentView, paid: tuple[int, int], due: tuple[int, int]
) -> Iterator[str]:
    run = view.runs.get(payment.run_id)
    if run is None:
        yield f"a payment for run {payment.run_id}, which does not exist ({payment.tx_hash})"
        return
    price = run.config.price_per_unit
    if payment.amount_wei != payment.units * price:
        yield (f"{payment.amount_wei} wei for {payment.units} units at {price} ({payment.tx_hash})")
    if paid[0] > due[0] or paid[1] > due[1]:
        yield (
            f"{payment.worker} was paid {paid[0]} slots and {paid[1]} units of run "
            f"{payment.run_id}, final were {due[0]} and {due[1]} ({payment.tx_hash})"
        )


def _slashes(view: ChainView, window_s: int | None) -> Check:
    problems = [
        f"{slash.worker}: {problem} ({slash.tx_hash})"
        for slash in view.slashes
        for problem in _slash_problems(view, slash)
    ]
    executed = {slash.offence for slash in view.slashes}
    waiting = sum(
        o.verdict is Verdict.FRAUD and o.record.leaf(o.batch.batch_id, o.position) not in executed
        for o in judged_outcomes(view)
    )
    window = f", challenge window {window_s} s" if window_s is not None else ""
    return _check(
        "slashes are the run's share of the stake, for fraud verdicts",
        problems,
        f"{len(view.slashes)} slashes, {waiting} fraud verdicts not executed{window}",
    )


def _slash_problems(view: ChainView, slash: SlashView) -> Iterator[str]:
    batch = view.batches.get(slash.batch_id) if slash.batch_id is not None else None
    if batch is None or batch.records is None or slash.position is None:
        yield "slashed without a posted outcome"
        return
    if not 0 <= slash.position < len(batch.records):
        yield f"batch {batch.batch_id} has no position {slash.position}"
        return
    record = batch.records[slash.position]
    if record.leaf(batch.batch_id, slash.position) != slash.offence:
        yield "the offence is not the leaf of its outcome"
    worker = view.worker_by_id.get(record.worker_id)
    if worker is None or worker.address != slash.worker:
        yield f"the outcome is about worker {record.worker_id}"
    yield from _verdict_problems(view, slash, batch.batch_id, slash.position)
    run = view.runs.get(batch.run_id)
    shares = tuple(
        -(-stake * (run.config.fraud_ppm if run else 0) // PPM) for stake in slash.stake_before
    )
    if slash.taken != shares:
        yield f"{slash.taken} wei were taken of {slash.stake_before}, due were {shares}"


def _verdict_problems(
    view: ChainView, slash: SlashView, batch_id: int, position: int
) -> Iterator[str]:
    stands = view.standing_verdict(batch_id, position) is Verdict.FRAUD
    is_restored = slash.state is SlashState.RESTORED
    if not stands and not is_restored and slash.amount_wei:
        yield "the verdict that stands is not fraud"
    if stands and is_restored:
        yield "the stake was given back though the verdict stands"
    worker = view.workers.get(slash.worker)
    if stands and worker is not None and worker.status.lower() != "banned":
        yield f"the worker is {worker.status.lower()}, not banned"


def _slash_splits(view: ChainView, deployment: Deployment) -> Check:
    insurance_ppm = _number(deployment, "insurance_ppm")
    released = [slash for slash in view.slashes if slash.split is not None]
    problems = [
        f"{slash.worker}: {problem} ({slash.settled_tx})"
        for slash in released
        for problem in _split_problems(slash, insurance_ppm)
    ]
    return _check(
        "released slashes are split without profit for judges",
        problems,
        f"{len(released)} released",
    )


def _split_problems(slash: SlashView, insurance_ppm: int | None) -> Iterator[str]:
    assert slash.split is not None
    burned, insured, rewarded = slash.split
    if burned + insured + rewarded != slash.amount_wei:
        yield f"{slash.split} wei do not add up to {slash.amount_wei}"
    if insurance_ppm is not None and insured != slash.amount_wei * insurance_ppm // PPM:
        yield f"{insured} wei were insured of {slash.amount_wei}"
    if rewarded and int(slash.reporter, 16) == 0:
        yield f"{rewarded} wei went to a reporter that there is not"


def _cases(view: ChainView, domain: Domain) -> Check:
    problems = [
        f"case about batch {case.batch_id} position {case.position}: {problem} ({case.opened_tx})"
        for case in view.cases.values()
        for problem in _case_problems(view, case, domain)
    ]
    still_open = sum(not case.closed for case in view.cases.values())
    return _check(
        "disputes were decided by validators that had not signed",
        problems,
        f"{len(view.cases)} cases, {still_open} open",
    )


def _case_problems(view: ChainView, case: CaseView, domain: Domain) -> Iterator[str]:
    batch = view.batches.get(case.batch_id)
    if batch is None or not batch.records or case.position >= len(batch.records):
        yield "it is about no outcome"
        return
    record = batch.records[case.position]
    if record.leaf(case.batch_id, case.position) != case.leaf:
        yield "its leaf is not that of the outcome"
    for juror in set(case.votes) & set(outcome_signers(batch, domain)):
        yield f"{juror} voted on an outcome it had signed"
    if case.closed and case.verdict != view.standing_verdict(case.batch_id, case.position):
        yield f"it was closed with verdict {case.verdict}"


def _sums(view: ChainView, observed: Observed) -> Check:
    ours = stake_totals(view)
    return _check(
        "sums equal what the contracts hold",
        _sum_problems(view, ours, observed),
        f"{ours.active_wei} wei active, {ours.unbonding_wei} unbonding, "
        f"{ours.escrowed_wei} escrowed",
    )


def _sum_problems(view: ChainView, ours: StakeTotals, observed: Observed) -> Iterator[str]:
    if observed.totals != ours:
        yield f"stakes add up to {ours}, the vault says {observed.totals}"
    for what, count, theirs in (
        ("runs", len(view.runs), observed.runs),
        ("batches", len(view.batches), observed.batches),
    ):
        if count != theirs:
            yield f"the events tell of {count} {what}, the contracts of {theirs}"
    for run_id, funds in observed.funds.items():
        run = view.runs[run_id]
        if (run.funded_wei, run.paid_wei) != (funds.funded_wei, funds.paid_wei):
            yield f"the escrow of run {run_id} says {funds}"
        if run.latest_version != observed.versions.get(run_id):
            yield f"the newest policy of run {run_id} is {observed.versions.get(run_id)}"
    for batch_id in sorted(observed.judged):
        yield f"batch {batch_id} has outcomes that no event tells of"


def stake_totals(view: ChainView) -> StakeTotals:
    """Return the sums over all accounts, as the events give them."""
    stakes: Sequence[tuple[int, int]] = [
        (stake.active_wei, stake.unbonding_wei) for stake in view.stakes.values()
    ]
    held = (s.amount_wei for s in view.slashes if s.state is SlashState.ESCROWED)
    return StakeTotals(sum(a for a, _ in stakes), sum(u for _, u in stakes), sum(held))
