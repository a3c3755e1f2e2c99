"""The report of a demo: what happened, and whether its promises hold. Pure.

It has the format of `runs/demo/report.json`; amounts in wei are decimal text.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from muster.app.demo.keys import Cast, Role
from muster.chain import ChainView, SlashView, reason_of
from muster.protocol.economics import PPM
from muster.protocol.ids import Address, Hash32, RunId
from muster.protocol.messages import OutcomeRecord, Verdict

END_REWARD, REWARD_GAIN = 0.7, 0.3
"""The policy must reach this held-out reward, and gain this much."""
PUNISHED = ("jailed", "banned")
"""Statuses after a fraud verdict; banned after an exact or repeated fraud."""
TIME_TO_RETURN = 16
"""Training steps within which a killed worker works again; shorter runs do not promise it."""


@dataclass(frozen=True, slots=True)
class RecordedSubmission:
    """A submission in the orchestrator's database."""

    file_hash: Hash32
    """SHA-256 of its file."""
    batch_root: Hash32 | None
    """Root of its batch; None if it is in none."""
    position: int | None
    """Its place in the batch."""


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """Input and reward of one training step."""

    stream_from: int
    """First position of the training stream it consumed."""
    stream_to: int
    """Position after the last one."""
    reward: float
    """Mean task reward of the files it trained on."""


@dataclass(frozen=True, slots=True)
class DemoObservations:
    """Everything that was observed, each item from its own source."""

    cast: Cast
    """Who took part."""
    run_id: RunId
    view: ChainView
    """The chain, rebuilt from its events."""
    steps: int
    """Requested training steps."""
    returned_at: int | None
    """Block in which the killed worker was started again, if it was."""
    wall_s: float
    """Seconds from the first process to the last payment."""
    evaluations: Sequence[tuple[int, float]]
    """Held-out reward by policy version, from the trainer."""
    trained: Sequence[TrainedStep]
    """The trainer's steps; ranges as in the published manifests."""
    stored: Sequence[RecordedSubmission]
    """The orchestrator's database."""
    earned_wei: dict[Address, int]
    """Token balance of each wallet minus its balance after staking."""
    audit: dict[str, Any]
    """`muster audit --json`."""
    staked_wei: dict[tuple[RunId, Address], int]
    """What each account staked for each run; 0 is the jurors' bench."""
    rpc: str
    """The chain's endpoint."""
    chain_id: int
    deployments: str
    """The deployment file."""


@dataclass(frozen=True, slots=True)
class DemoWorkerReport:
    """One worker's part."""

    address: Address
    """Its wallet."""
    role: str
    """Honest, cheater or restarted."""
    status: str
    """Status in the registry."""
    stake_wei: str
    """Active stake at the end."""
    submitted: int
    """Submissions with an outcome."""
    accepted: int
    """Of those, accepted."""
    rejected: int
    """Of those, rejected or incomplete."""
    fraud: int
    """Of those, fraud."""
    units: int
    """Units of the accepted ones."""
    paid_wei: str
    """Its pay."""


@dataclass(frozen=True, slots=True)
class Promise:
    """One promise."""

    name: str
    """The promise in words."""
    passed: bool
    """Whether it held."""


def build_report(observed: DemoObservations) -> dict[str, Any]:
    """Return the report with its checks, in the form of `report.json`."""
    workers = worker_reports(observed)
    evaluations = [reward for _, reward in observed.evaluations]
    return {
        "wall_s": round(observed.wall_s, 1),
        "steps": len(observed.trained),
        "reward": {
            "start": evaluations[0] if evaluations else None,
            "end": evaluations[-1] if evaluations else None,
            "curve": [step.reward for step in observed.trained],
        },
        "workers": [asdict(worker) for worker in workers],
        "slashes": [_slash(observed, slash) for slash in observed.view.slashes],
        "chain": {
            "rpc": observed.rpc,
            "chain_id": observed.chain_id,
            "deployments": observed.deployments,
        },
        "checks": [asdict(check) for check in run_checks(observed, workers)],
    }


def worker_reports(observed: DemoObservations) -> list[DemoWorkerReport]:
    """Return every worker's part, as the chain has it."""
    records = _records(observed)
    return [
        _worker_report(observed, member.wallet.address, member.role, records)
        for member in observed.cast.members
    ]


def _worker_report(
    observed: DemoObservations, address: Address, role: Role, records: Sequence[OutcomeRecord]
) -> DemoWorkerReport:
    worker = observed.view.runs[observed.run_id].members[address]
    own = [record for record in records if record.worker_id == worker.worker_id]
    verdicts = Counter(record.verdict for record in own)
    return DemoWorkerReport(
        address=address,
        role=role.value,
        status=worker.status.lower(),
        stake_wei=str(worker.active_wei),
        submitted=len(own),
        accepted=verdicts[Verdict.ACCEPTED],
        rejected=verdicts[Verdict.REJECTED] + verdicts[Verdict.INCOMPLETE],
        fraud=verdicts[Verdict.FRAUD],
        units=sum(r.units for r in own if r.verdict == Verdict.ACCEPTED),
        paid_wei=str(sum(p.amount_wei for p in observed.view.payments if p.worker == address)),
    )


def _records(observed: DemoObservations) -> list[OutcomeRecord]:
    batches = (b for b in observed.view.batches.values() if b.run_id == observed.run_id)
    return [record for batch in batches for record in batch.records or []]


def _slash(observed: DemoObservations, slash: SlashView) -> dict[str, str]:
    return {
        "worker": slash.owner,
        "amount_wei": str(slash.amount_wei),
        "reason": reason_of(observed.view, slash),
        "tx": slash.tx_hash,
    }


# ---------------------------------------------------------------------- checks


def run_checks(observed: DemoObservations, workers: Sequence[DemoWorkerReport]) -> list[Promise]:
    """Return every promise of the demo with whether it held."""
    checks = [
        Promise("the policy learned", _learned(observed)),
        Promise("every training step was made", len(observed.trained) == observed.steps),
        Promise("every cheater was slashed and shut out", _cheaters_punished(observed, workers)),
        Promise("no honest worker was slashed", _honest_unharmed(observed, workers)),
        Promise("nobody lost what it had not signed for", _signed_for(observed)),
        Promise(
            "every honest worker was paid what the ledger says", _paid_exactly(observed, workers)
        ),
        Promise("no accepted file was trained twice or lost", _trained_once(observed)),
        Promise("chain and database agree", _database_agrees(observed)),
        Promise("the auditor finds no contradiction", _audit_passes(observed)),
        Promise("the auditor's figures equal the report's", _audit_agrees(observed, workers)),
    ]
    if _steps_after_return(observed) >= TIME_TO_RETURN:
        checks.append(Promise("the killed worker came back and worked", _came_back(observed)))
    return checks


def _learned(observed: DemoObservations) -> bool:
    rewards = [reward for _, reward in observed.evaluations]
    if len(rewards) < 2:
        return False
    return rewards[-1] >= END_REWARD and rewards[-1] - rewards[0] >= REWARD_GAIN


def _cheaters_punished(observed: DemoObservations, workers: Sequence[DemoWorkerReport]) -> bool:
    slashed = {slash.owner for slash in observed.view.slashes if slash.amount_wei > 0}
    cheaters = [w for w in workers if w.role == Role.CHEATER]
    return all(w.status in PUNISHED and w.address in slashed and w.accepted == 0 for w in cheaters)


def _honest_unharmed(observed: DemoObservations, workers: Sequence[DemoWorkerReport]) -> bool:
    slashed = {slash.owner for slash in observed.view.slashes}
    honest = [w for w in workers if w.role != Role.CHEATER]
    return all(w.status == "active" and w.address not in slashed for w in honest)


def _signed_for(observed: DemoObservations) -> bool:
    """Tell whether every stake is complete, except for slashes allowed by the terms that its owner
    signed.
    """
    return all(
        stake.active_wei + stake.unbonding_wei + stake.slashed_wei == observed.staked_wei.get(key)
        and stake.slashed_wei <= _most(observed, key)
        for key, stake in observed.view.stakes.items()
    )


def _most(observed: DemoObservations, key: tuple[RunId, Address]) -> int:
    """Return the most that slashes may take of a stake: for a worker, a share per fraud."""
    frauds = [slash for slash in observed.view.slashes if (slash.run_id, slash.owner) == key]
    if not frauds:
        return 0
    left, signed = observed.staked_wei[key], observed.view.runs[observed.run_id].terms
    kept = PPM - max(max(terms.fraud_ppm, terms.exact_fraud_ppm) for terms in signed)
    for slash in frauds:
        # A second statistical fraud costs twice the share.
        left = 0 if slash.priors else left * kept // PPM
    return observed.staked_wei[key] - left


def _steps_after_return(observed: DemoObservations) -> int:
    if observed.returned_at is None:
        return 0
    checkpoints = observed.view.runs[observed.run_id].checkpoints.values()
    return sum(checkpoint.block_number > observed.returned_at for checkpoint in checkpoints)


def _came_back(observed: DemoObservations) -> bool:
    """Tell whether a submission of the restarted worker was accepted in a batch committed after its
    return."""
    members = [m.wallet.address for m in observed.cast.members if m.role is Role.RESTARTED]
    ids = {observed.view.workers[address].worker_id for address in members}
    return any(
        record.worker_id in ids and record.verdict is Verdict.ACCEPTED
        for batch in observed.view.batches.values()
        if observed.returned_at is not None and batch.block_number > observed.returned_at
        for record in batch.records or []
    )


def _paid_exactly(observed: DemoObservations, workers: Sequence[DemoWorkerReport]) -> bool:
    price = observed.view.runs[observed.run_id].config.terms.price_per_unit
    return all(
        w.units > 0 and int(w.paid_wei) == w.units * price == observed.earned_wei[w.address]
        for w in workers
        if w.role != Role.CHEATER
    )


def _trained_once(observed: DemoObservations) -> bool:
    """Tell whether the steps' ranges follow each other from 0 without gap or overlap, and end
    inside the stream."""
    stream = observed.view.training_stream(observed.run_id)
    position = 0
    for step in observed.trained:
        if step.stream_from != position or step.stream_to <= position:
            return False
        position = step.stream_to
    hashes = [item.record.file_hash for item in stream]
    return 0 < position <= len(stream) and len(set(hashes)) == len(hashes)


def _database_agrees(observed: DemoObservations) -> bool:
    """Tell whether judged records and stored submissions are the same, at the same places. The
    database need not hold work that its worker committed directly.
    """
    judged = [batch for batch in observed.view.batches.values() if batch.records]
    on_chain = {
        (batch.root, position): record.file_hash
        for batch in judged
        for position, record in enumerate(batch.records or [])
    }
    roots = {batch.root for batch in judged}
    stored = {
        (row.batch_root, row.position): row.file_hash
        for row in observed.stored
        if row.batch_root in roots
    }
    direct = {(batch.root, 0) for batch in judged if batch.direct}
    absent_direct = direct - stored.keys()
    expected = {place: value for place, value in on_chain.items() if place not in absent_direct}
    return bool(on_chain) and stored == expected


def _audit_passes(observed: DemoObservations) -> bool:
    checks = observed.audit.get("checks", [])
    return bool(checks) and all(check["passed"] for check in checks)


def _audit_agrees(observed: DemoObservations, workers: Sequence[DemoWorkerReport]) -> bool:
    names = ("status", "submitted", "accepted", "fraud", "units", "paid_wei")
    audited = {
        w["address"]: tuple(str(w.get(name)) for name in names)
        for w in observed.audit.get("workers", [])
    }
    ours = {w.address: tuple(str(asdict(w)[name]) for name in names) for w in workers}
    slashes = {(s["worker"], str(s["amount_wei"])) for s in observed.audit.get("slashes", [])}
    return audited == ours and slashes == {
        (s.owner, str(s.amount_wei)) for s in observed.view.slashes
    }
