"""A chain in memory for the orchestrator's tests: same seams as muster.chain, no node."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from muster.protocol.eip712 import Domain, address_of, digest, sign
from muster.protocol.encoding import file_hash, keccak
from muster.protocol.errors import ContractRevert
from muster.protocol.ids import Address, Hash32, PolicyVersion, RunId, Step
from muster.protocol.messages import (
    OutcomeRecord,
    Outcomes,
    Reason,
    Submission,
    Ticket,
    Verdict,
    unpack_records,
)
from muster.protocol.recipe import Recipe, SamplingRecipe, TrainingRecipe

RUN = RunId(1)
NOW = 1_700_000_000


@dataclass
class FakeEvent:
    name: str
    args: dict[str, Any]


@dataclass
class FakeWorker:
    address: Address
    worker_id: int
    node: Address
    status: str = "Active"
    active_from: int = 1
    active_wei: int = 10**18


@dataclass
class FakeConfig:
    trainer: Address
    orchestrator: Address
    task_set_hash: Hash32
    recipe_hash: Hash32
    calibration_hash: Hash32
    price_per_unit: int = 10**12
    quorum: int = 2


@dataclass
class FakeCheckpoint:
    version: PolicyVersion
    manifest_root: Hash32
    beacon: Hash32
    block_number: int


@dataclass
class FakeRun:
    config: FakeConfig
    validators: list[Address]
    paused: bool = False
    funded_wei: int = 10**20
    paid_wei: int = 0
    checkpoints: dict[PolicyVersion, FakeCheckpoint] = field(default_factory=dict)

    @property
    def latest_version(self) -> PolicyVersion | None:
        return max(self.checkpoints, default=None)


@dataclass
class FakeBatch:
    batch_id: int
    run_id: RunId
    root: Hash32
    count: int
    committed_at: int
    tx_hash: str = "0x01"
    records: list[OutcomeRecord] | None = None
    posted_at: int | None = None
    posted_tx: str | None = None


@dataclass
class FakeSlash:
    worker: Address
    amount_wei: int
    tx_hash: str
    batch_id: int | None
    position: int | None
    state: str = "escrowed"


@dataclass
class FakePayment:
    run_id: RunId
    worker: Address
    units: int
    amount_wei: int


@dataclass
class FakeView:
    workers: dict[Address, FakeWorker] = field(default_factory=dict)
    runs: dict[RunId, FakeRun] = field(default_factory=dict)
    batches: dict[int, FakeBatch] = field(default_factory=dict)
    slashes: list[FakeSlash] = field(default_factory=list)
    payments: list[FakePayment] = field(default_factory=list)

    @property
    def worker_by_node(self) -> dict[Address, FakeWorker]:
        return {w.node: w for w in self.workers.values()}

    def slot_used(self, run_id: RunId, worker_id: int, step: int, index: int) -> bool:
        return any(
            (r.worker_id, r.step, r.index) == (worker_id, step, index)
            for b in self.batches.values()
            if b.run_id == run_id
            for r in b.records or ()
        )

    def rewind(self, block_number: int) -> None:
        self.batches = {i: b for i, b in self.batches.items() if i <= block_number}

    def apply(self, event: FakeEvent) -> None:
        a = event.args
        if event.name == "BatchCommitted":
            self.batches[a["batch_id"]] = FakeBatch(
                a["batch_id"], a["run_id"], a["root"], a["count"], a["at"]
            )
        elif event.name == "OutcomesPosted":
            batch = self.batches[a["batch_id"]]
            batch.records, batch.posted_at = unpack_records(a["records"]), a["at"]
        elif event.name == "FraudExecuted":
            self.slashes.append(FakeSlash(a["worker"], 5, "0xfa", a["batch_id"], a["position"]))
            self.workers[a["worker"]].status = "Banned"
        elif event.name == "FraudFinalised":
            self.slashes[a["number"]].state = "released"


@dataclass
class FakePoll:
    events: list[FakeEvent]
    rewound_to: int | None = None


@dataclass
class FakeLedger:
    """The contribution ledger; `fail_next` makes the next write revert."""

    now: Any
    events: list[FakeEvent] = field(default_factory=list)
    committed: list[tuple[Hash32, int, int]] = field(default_factory=list)
    posted: list[tuple[int, bytes, list[bytes]]] = field(default_factory=list)
    executed: list[Any] = field(default_factory=list)
    finalised: list[Any] = field(default_factory=list)
    fail_next: Exception | None = None
    workers_by_id: dict[int, Address] = field(default_factory=dict)

    def _maybe_fail(self) -> None:
        error, self.fail_next = self.fail_next, None
        if error is not None:
            raise error

    async def commit_batch(
        self, run_id: RunId, root: Hash32, count: int, units: int
    ) -> tuple[int, object]:
        self._maybe_fail()
        self.committed.append((root, count, units))
        batch_id = len(self.committed)
        self.events.append(
            FakeEvent(
                "BatchCommitted",
                {
                    "batch_id": batch_id,
                    "run_id": run_id,
                    "root": root,
                    "count": count,
                    "units": units,
                    "at": self.now(),
                },
            )
        )
        return batch_id, object()

    async def post_outcomes(
        self, batch_id: int, records: bytes, signatures: Sequence[bytes]
    ) -> object:
        self._maybe_fail()
        if any(p[0] == batch_id for p in self.posted):
            raise ContractRevert("LedgerOutcomesPosted", (batch_id,))
        self.posted.append((batch_id, records, list(signatures)))
        self.events.append(
            FakeEvent(
                "OutcomesPosted", {"batch_id": batch_id, "records": records, "at": self.now()}
            )
        )
        return object()

    async def execute_fraud(
        self, outcome: Any, submission: Submission, node_signature: bytes
    ) -> object:
        self._maybe_fail()
        assert OutcomeRecord.from_bytes(outcome.record).file_hash == submission.file_hash
        assert len(node_signature) == 65
        self.executed.append(outcome)
        worker = self.workers_by_id[OutcomeRecord.from_bytes(outcome.record).worker_id]
        self.events.append(
            FakeEvent(
                "FraudExecuted",
                {"worker": worker, "batch_id": outcome.batch_id, "position": outcome.position},
            )
        )
        return object()

    async def finalise_fraud(self, outcome: Any) -> object:
        self._maybe_fail()
        self.finalised.append(outcome)
        self.events.append(FakeEvent("FraudFinalised", {"number": len(self.finalised) - 1}))
        return object()

    async def challenge_window(self) -> int:
        return 100

    async def outcome_deadline(self) -> int:
        return 1000


@dataclass
class FakeChain:
    account: Address | None
    ledger: FakeLedger
    time: int = NOW
    chain_id: int = 31337
    rewind_next: int | None = None

    def domain(self, contract: str) -> Domain:
        return Domain(self.chain_id, address_of(contract.encode().rjust(32, b"\1")))

    async def now(self) -> int:
        return self.time

    async def poll(self) -> FakePoll:
        events, self.ledger.events = self.ledger.events, []
        rewound, self.rewind_next = self.rewind_next, None
        return FakePoll(events, rewound)


@dataclass
class Keys:
    """The accounts of one small network."""

    orchestrator: bytes = field(default_factory=lambda: os.urandom(32))
    trainer: bytes = field(default_factory=lambda: os.urandom(32))
    validators: list[bytes] = field(default_factory=lambda: [os.urandom(32) for _ in range(3)])
    nodes: list[bytes] = field(default_factory=lambda: [os.urandom(32) for _ in range(3)])


class Network:
    """One run on the fake chain: three workers, three validators, quorum two, base model out."""

    def __init__(self, *, training: TrainingRecipe | None = None) -> None:
        self.keys = Keys()
        self.recipe = Recipe(
            name="a run",
            sampling=SamplingRecipe(
                problems_per_submission=2, samples_per_problem=2, temperature=1.0, max_new_tokens=8
            ),
            training=training or TrainingRecipe(steps=3, submissions_per_step=2, max_async_level=1),
        )
        calibration, task_set = b"calibration", b"task set"
        self.documents = {keccak(d): d for d in (self.recipe.to_bytes(), calibration, task_set)}
        self.chain = FakeChain(
            address_of(self.keys.orchestrator), FakeLedger(lambda: self.chain.time)
        )
        self.run = FakeRun(
            FakeConfig(
                address_of(self.keys.trainer),
                address_of(self.keys.orchestrator),
                keccak(task_set),
                self.recipe.hash(),
                keccak(calibration),
            ),
            [address_of(key) for key in self.keys.validators],
        )
        self.view = FakeView(runs={RUN: self.run})
        for number, key in enumerate(self.keys.nodes, start=1):
            worker = FakeWorker(address_of(os.urandom(32)), number, address_of(key))
            self.view.workers[worker.address] = worker
            self.chain.ledger.workers_by_id[number] = worker.address
        self.publish(0)

    @property
    def domain(self) -> Domain:
        return self.chain.domain("ContributionLedger")

    def worker(self, number: int) -> FakeWorker:
        return list(self.view.workers.values())[number]

    def publish(self, version: int) -> None:
        v = PolicyVersion(version)
        self.run.checkpoints[v] = FakeCheckpoint(
            v, keccak(b"root %d" % version), keccak(b"beacon %d" % version), 10 + version
        )

    def sign_submission(self, submission: Submission, node: int = 0) -> bytes:
        return sign(digest(self.domain, submission.struct_hash()), self.keys.nodes[node])

    def judge(
        self,
        submissions: Sequence[Submission],
        verdict: Verdict = Verdict.ACCEPTED,
        reason: Reason = Reason.NONE,
    ) -> bytes:
        """The packed records a validator would hand in."""
        return b"".join(
            OutcomeRecord(
                self.view.workers[s.worker].worker_id,
                s.step,
                s.index,
                s.policy_version,
                s.file_hash,
                s.rollouts,
                s.units,
                verdict,
                reason,
            ).to_bytes()
            for s in submissions
        )

    def sign_outcomes(self, validator: int, batch_id: int, root: Hash32, records: bytes) -> bytes:
        outcomes = Outcomes(batch_id, root, keccak(records))
        return sign(digest(self.domain, outcomes.struct_hash()), self.keys.validators[validator])


def submission_for(
    ticket: Ticket, body: bytes, *, rollouts: int = 4, units: int = 20
) -> Submission:
    return Submission(
        run_id=ticket.run_id,
        worker=ticket.worker,
        step=Step(ticket.step),
        index=ticket.index,
        policy_version=ticket.policy_version,
        file_hash=file_hash(body),
        rollouts=rollouts,
        units=units,
    )
