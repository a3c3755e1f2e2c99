"""Histories of a chain, event by event: a run with two workers, one of them a cheater."""

from __future__ import annotations

import copy
from typing import Any

from chain_fakes import History, address

from muster.chain import ChainView, RunConfig, RunTerms
from muster.protocol.encoding import keccak
from muster.protocol.ids import PolicyVersion, RunId, Step
from muster.protocol.messages import OutcomeRecord, Reason, Verdict, pack_records

OWNER, TRAINER, ORCHESTRATOR = address(1), address(2), address(3)
WORKER, CHEATER, NODE, OTHER_NODE = address(10), address(11), address(20), address(21)
VALIDATORS = (address(30), address(31), address(32))
RUN = RunId(1)
CONFIG = RunConfig(
    TRAINER,
    ORCHESTRATOR,
    *(keccak(bytes([i])) for i in range(4)),
    terms=RunTerms(price_per_unit=10, fraud_ppm=100_000, exact_fraud_ppm=500_000, quorum=2),
    validators=VALIDATORS,
)


COMMITTED = {
    "root": keccak(b"x"),
    "count": 1,
    "units": 1,
    "price_per_unit": 1,
    "committed_at": 1,
}
"""What a commitment says beside its batch and run."""


def outcome(
    worker_id: int, index: int, verdict: Verdict = Verdict.ACCEPTED, units: int = 100
) -> OutcomeRecord:
    reason = Reason.NONE if verdict is Verdict.ACCEPTED else Reason.WRONG_SEED
    return OutcomeRecord(
        worker_id=worker_id,
        step=Step(1),
        index=index,
        policy_version=PolicyVersion(0),
        file_hash=keccak(bytes([worker_id, index])),
        rollouts=8,
        units=units,
        verdict=verdict,
        reason=reason,
    )


RECORDS = [outcome(1, 0), outcome(2, 0, Verdict.FRAUD), outcome(1, 1, Verdict.REJECTED)]
OFFENCE, LEAF = RECORDS[1].offence(RUN), RECORDS[1].leaf(1, 1)
FINALISED = {"batch_id": 1, "offence": OFFENCE, "leaf": LEAF}


def register(history: History, worker: str, worker_id: int, node: str, stake: int) -> None:
    history.add(
        "WorkerRegistry",
        "WorkerRegistered",
        worker=worker,
        node=node,
        worker_id=worker_id,
        active_from=history.block + 2,
    )
    history.add(
        "StakeVault", "Deposited", same_block=True, owner=worker, amount=stake, active=stake
    )


def post(history: History, batch_id: int, records: list[OutcomeRecord]) -> None:
    history.add(
        "ContributionLedger",
        "OutcomesPosted",
        batch_id=batch_id,
        run_id=RUN,
        outcomes_root=keccak(b"outcomes"),
        posted_at=history.block + 1,
        signers=0b11,
        records=pack_records(records),
        signatures=b"a" * 65 + b"b" * 65,
    )


def commit(history: History, batch_id: int, count: int) -> None:
    history.add(
        "ContributionLedger",
        "BatchCommitted",
        batch_id=batch_id,
        run_id=RUN,
        root=keccak(b"batch"),
        count=count,
        units=300,
        price_per_unit=10,
        committed_at=history.block + 1,
    )
    history.add("RewardEscrow", "RewardReserved", same_block=True, run_id=RUN, amount=3000)


def begun() -> History:
    """Two workers, a run with version 0, one committed batch."""
    history = History()
    register(history, WORKER, 1, NODE, 1000)
    register(history, CHEATER, 2, OTHER_NODE, 801)
    history.add("RunRegistry", "RunCreated", run_id=RUN, owner=OWNER, config=CONFIG)
    for seat, validator in enumerate(VALIDATORS):
        seated = {"run_id": RUN, "validator": validator, "seat_bit": 1 << seat}
        history.add("RunRegistry", "ValidatorSeated", same_block=True, **seated)
    history.add("RewardEscrow", "RunFunded", run_id=RUN, **{"from": OWNER}, amount=5000)
    publish(history, 0)
    commit(history, 1, 3)
    return history


def publish(history: History, version: int) -> None:
    history.add(
        "RunRegistry",
        "CheckpointPublished",
        run_id=RUN,
        version=version,
        manifest_root=keccak(b"root%d" % version),
    )


def slash(history: History) -> None:
    history.add("WorkerRegistry", "WorkerBanned", worker=CHEATER, offence=OFFENCE)
    history.add(
        "StakeVault",
        "Slashed",
        same_block=True,
        owner=CHEATER,
        offence=OFFENCE,
        from_active=401,
        from_unbonding=0,
        reporter=address(0),
    )
    history.add(
        "ContributionLedger",
        "FraudExecuted",
        same_block=True,
        batch_id=1,
        worker=CHEATER,
        offence=OFFENCE,
        leaf=LEAF,
        position=1,
        amount=401,
    )


def full() -> History:
    """The whole life of a batch: judged, slashed, final, paid."""
    history = begun()
    post(history, 1, RECORDS)
    slash(history)
    history.add("StakeVault", "SlashReleased", offence=OFFENCE, burned=301, insured=100, rewarded=0)
    history.add("ContributionLedger", "FraudFinalised", same_block=True, **FINALISED)
    history.add(
        "RewardEscrow",
        "RewardClaimed",
        run_id=RUN,
        worker=WORKER,
        slots=1,
        units=100,
        amount=1000,
    )
    return history


def viewed(history: History) -> ChainView:
    view = ChainView()
    for event in history.events:
        view.apply(event)
    return view


def state(view: ChainView) -> dict[str, Any]:
    return copy.deepcopy(vars(view))


def revealed(juror: str, overturn: bool) -> dict[str, Any]:
    return {
        "leaf": LEAF,
        "juror": juror,
        "overturn": overturn,
        "result_hash": keccak(b"recomputed"),
    }


def dispute(history: History, votes: list[bool], *, overturned: bool, verdict: int) -> None:
    history.add(
        "DisputeCourt",
        "CaseOpened",
        leaf=LEAF,
        batch_id=1,
        challenger=address(50),
        position=1,
        recorded_verdict=4,
        claimed_verdict=1,
        draw_block=history.block + 3,
    )
    jurors = [address(60 + i) for i in range(len(votes))]
    history.add("DisputeCourt", "JuryDrawn", leaf=LEAF, seats=7, jurors=jurors)
    for juror in jurors:
        secret = {"juror": juror, "commitment": keccak(juror.encode())}
        history.add("DisputeCourt", "VoteCommitted", leaf=LEAF, **secret)
    for juror, vote in zip(jurors, votes, strict=True):
        history.add("DisputeCourt", "VoteRevealed", **revealed(juror, vote))
    history.add(
        "DisputeCourt",
        "CaseClosed",
        leaf=LEAF,
        overturned=overturned,
        verdict=verdict,
        bond_returned=10,
    )
