"""Histories of a chain, event by event: a run with two workers, one of them a cheater."""

import copy
from typing import Any

from chain_fakes import History, address

from muster.chain import ChainView, Offence, RunConfig, RunTerms
from muster.chain.structs import ZERO_ADDRESS, CommittedWork, SlashSubject
from muster.protocol.encoding import keccak
from muster.protocol.ids import Address, Hash32, PolicyVersion, RunId, Step
from muster.protocol.jury import Ruling
from muster.protocol.messages import OutcomeRecord, Reason, Submission, Verdict, pack_records

OWNER, TRAINER, ORCHESTRATOR = address(1), address(2), address(3)
WORKER, CHEATER, NODE, OTHER_NODE = address(10), address(11), address(20), address(21)
CLAIMANT = address(50)
UPHELD, OVERTURNED = 2, 3
"""The last two statuses of a case, by their numbers in the contract."""
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
    "terms": 1,
    "committed_at": 1,
}
"""The fields of a commitment other than batch and run."""


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


BATCH_ROOT = keccak(b"batch")
RECORDS = [outcome(1, 0), outcome(2, 0, Verdict.FRAUD), outcome(1, 1, Verdict.REJECTED)]
LEAF, ESCROW = RECORDS[1].leaf(1, 1), keccak(b"escrow of the fraud")
FRAUD = SlashSubject(RUN, CHEATER, Offence.EXACT_FRAUD, 1 << 32, 1, 1)
FINALISED = {"batch_id": 1, "escrow_id": ESCROW, "leaf": LEAF}


SLASHED = {
    "run_id": RUN,
    "owner": CHEATER,
    "escrow_id": ESCROW,
    "verdict": FRAUD,
    "from_active": 401,
    "from_unbonding": 0,
}
RELEASED = {
    "escrow_id": ESCROW,
    "reporter": ZERO_ADDRESS,
    "burned": 301,
    "insured": 100,
    "rewarded": 0,
}


def join(history: History, worker: Address, worker_id: int, node: Address, stake: int) -> None:
    history.add("WorkerRegistered", worker=worker, worker_id=worker_id)
    history.add("NodeBound", same_block=True, worker=worker, node=node)
    joined = {"run_id": RUN, "worker": worker, "terms": 1, "active_from": history.block + 2}
    history.add("WorkerJoined", same_block=True, **joined)
    deposited = {"run_id": RUN, "owner": worker, "amount": stake, "active": stake}
    history.add("Deposited", same_block=True, **deposited)


def create_run(history: History) -> None:
    """A run whose validators were invited and took their seats."""
    history.add("RunCreated", run_id=RUN, owner=OWNER, config=CONFIG)
    for seat, validator in enumerate(VALIDATORS):
        invited = {"run_id": RUN, "validator": validator, "invited": True}
        history.add("ValidatorInvited", same_block=True, **invited)
        seated = {"run_id": RUN, "validator": validator, "seat_bit": 1 << seat, "terms": 1}
        history.add("ValidatorSeated", same_block=True, **seated)


def post(history: History, batch_id: int, records: list[OutcomeRecord]) -> None:
    history.add(
        "OutcomesPosted",
        batch_id=batch_id,
        run_id=RUN,
        outcomes_root=keccak(b"outcomes"),
        posted_at=history.block + 1,
        signers=0b11,
        records=pack_records(records),
        signatures=b"a" * 65 + b"b" * 65,
    )


def commit(history: History, batch_id: int, count: int, *, root: Hash32 = BATCH_ROOT) -> None:
    history.add(
        "BatchCommitted",
        batch_id=batch_id,
        run_id=RUN,
        root=root,
        count=count,
        units=300,
        price_per_unit=10,
        terms=1,
        committed_at=history.block + 1,
    )
    history.add("RewardReserved", same_block=True, run_id=RUN, amount=3000)


def begun() -> History:
    """A run with two workers and version 0, one committed batch."""
    history = History()
    create_run(history)
    join(history, WORKER, 1, NODE, 1000)
    join(history, CHEATER, 2, OTHER_NODE, 801)
    history.add("RunFunded", run_id=RUN, **{"from": OWNER}, amount=5000)
    publish(history, 0)
    commit(history, 1, 3)
    return history


def publish(history: History, version: int) -> None:
    history.add(
        "CheckpointPublished",
        run_id=RUN,
        version=version,
        manifest_root=keccak(b"root%d" % version),
    )


def slash(history: History) -> None:
    convicted = {"run_id": RUN, "worker": CHEATER, "escrow_id": ESCROW}
    history.add("WorkerBanned", **convicted)
    history.add("Slashed", same_block=True, **SLASHED)
    executed = {"worker": CHEATER, "position": 1, "amount": 401}
    history.add("FraudExecuted", same_block=True, **FINALISED, **executed)


def full() -> History:
    """The whole life of a batch: judged, slashed, final, paid."""
    history = begun()
    post(history, 1, RECORDS)
    slash(history)
    history.add("SlashReleased", **RELEASED)
    history.add("FraudFinalised", same_block=True, **FINALISED)
    history.add("RewardClaimed", run_id=RUN, worker=WORKER, slots=1, units=100, amount=1000)
    return history


def viewed(history: History) -> ChainView:
    view = ChainView()
    for event in history.events:
        view.apply(event)
    return view


def state(view: ChainView) -> dict[str, Any]:
    return copy.deepcopy(vars(view))


FRAUD_FOUND = Ruling(RECORDS[1].verdict, RECORDS[1].reason).number
ACCEPTED = Ruling(Verdict.ACCEPTED, Reason.NONE).number
SUBMISSION = Submission(RUN, CHEATER, Step(1), 0, PolicyVersion(0), RECORDS[1].file_hash, 8, 100)


def revealed(juror: str, ruling: int, case_id: bytes = LEAF) -> dict[str, Any]:
    result_hash = keccak(b"recomputed")
    return {"case_id": case_id, "juror": juror, "ruling": ruling, "result_hash": result_hash}


def seat_jurors(history: History, count: int) -> list[Address]:
    """A number of jurors join the network's bench."""
    jurors = [address(60 + i) for i in range(count)]
    for place, juror in enumerate(jurors):
        history.add("JurorJoined", juror=juror, place=place)
    return jurors


def open_case(history: History, case_id: bytes, recorded: int, places: int) -> None:
    history.add(
        "CaseOpened",
        case_id=case_id,
        batch_id=1,
        run_id=RUN,
        number=1,
        position=1,
        worker=CHEATER,
        recorded=recorded,
        draw_block=history.block + 3,
        places=places,
    )


def claim(history: History, claimant: Address, ruling: int, case_id: bytes = LEAF) -> None:
    history.add(
        "Claimed",
        same_block=True,
        case_id=case_id,
        claimant=claimant,
        ruling=ruling,
        work=CommittedWork(SUBMISSION, b"n", ()),
        sources=("http://file",),
    )


def dispute(
    history: History, votes: list[int], *, status: int, ruling: int, recorded: int = FRAUD_FOUND
) -> None:
    """A case from its claim to its end; `votes` are the jurors' rulings."""
    jurors = seat_jurors(history, len(votes))
    open_case(history, LEAF, recorded, len(votes))
    claim(history, CLAIMANT, ACCEPTED)
    history.add("JuryDrawn", case_id=LEAF, jurors=tuple(jurors))
    for juror in jurors:
        secret = {"juror": juror, "commitment": keccak(juror.encode())}
        history.add("VoteCommitted", case_id=LEAF, **secret)
    for juror, vote in zip(jurors, votes, strict=True):
        history.add("VoteRevealed", **revealed(juror, vote))
    settled = {"claimant": CLAIMANT, "right": status == OVERTURNED, "returned": 10}
    history.add("ClaimSettled", case_id=LEAF, **settled)
    closed = {"status": status, "ruling": ruling, "reporter": CLAIMANT, "fee": 3}
    history.add("CaseClosed", same_block=True, case_id=LEAF, **closed)
