"""A chain in memory for the orchestrator's tests: real events and view, no node."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from muster.chain import (
    ZERO_ADDRESS,
    Batch,
    BlockId,
    ChainView,
    Event,
    Fault,
    OutcomeProof,
    PauseCause,
    Poll,
    RunConfig,
    RunTerms,
    RunView,
    WorkerView,
)
from muster.chain.abi import CONTRACTS
from muster.chain.deployment import Deployment
from muster.chain.view_parts import split_signatures
from muster.protocol.eip712 import Domain, address_of, digest, sign
from muster.protocol.encoding import file_hash, keccak
from muster.protocol.errors import ContractRevert
from muster.protocol.ids import Address, Hash32, RunId, Step
from muster.protocol.messages import (
    OutcomeRecord,
    Outcomes,
    Reason,
    Submission,
    Ticket,
    Verdict,
)
from muster.protocol.recipe import (
    BreakerRecipe,
    HardwareRecipe,
    Recipe,
    SamplingRecipe,
    TrainingRecipe,
)
from muster.tasks.sort_digits import make_task_set

RUN = RunId(1)
NOW = 1_700_000_000
STAKE_PER_UNIT = 10**14
"""A worker's stake of one token covers 10,000 units, a submission is worth 32 at most."""


class Emitter:
    """Makes contract events in chain order, one block each."""

    def __init__(self, now: Callable[[], int]) -> None:
        self.now = now
        self.block = 0

    def __call__(self, contract: str, name: str, **args: Any) -> Event:
        self.block += 1
        return Event(
            contract=contract,
            name=name,
            args=args,
            block_number=self.block,
            block_hash=keccak(b"block %d" % self.block),
            block_timestamp=self.now(),
            log_index=0,
            tx_hash=f"0x{keccak(b'tx %d' % self.block).hex()}",
        )


@dataclass(frozen=True)
class Mined:
    """A receipt."""

    block_number: int


@dataclass
class FakeLedger:
    """The contribution ledger; `fail_next` makes the next write fail, `lose_next` its answer."""

    emit: Emitter
    events: list[Event] = field(default_factory=list)
    batches: int = 0
    committed: list[tuple[Hash32, int, int]] = field(default_factory=list)
    posted: list[tuple[int, bytes, list[bytes]]] = field(default_factory=list)
    executed: list[OutcomeProof] = field(default_factory=list)
    finalised: list[OutcomeProof] = field(default_factory=list)
    fail_next: Exception | None = None
    lose_next: Exception | None = None

    def maybe_fail(self) -> None:
        error, self.fail_next = self.fail_next, None
        if error is not None:
            raise error

    def _emit(self, contract: str, name: str, **args: Any) -> None:
        self.events.append(self.emit(contract, name, **args))

    async def commit_batch(
        self, run_id: RunId, root: Hash32, count: int, units: int
    ) -> tuple[int, Mined]:
        self.maybe_fail()
        self.committed.append((root, count, units))
        return self.commit(run_id, root, count, units), Mined(self.emit.block)

    def commit(self, run_id: RunId, root: Hash32, count: int, units: int) -> int:
        self.batches += 1
        self._emit(
            "ContributionLedger", "BatchCommitted",
            batch_id=self.batches, run_id=run_id, root=root, count=count, units=units,
            price_per_unit=10**12, committed_at=self.emit.now(),
        )  # fmt: skip
        return self.batches

    def submit_direct(self, submission: Submission, signature: bytes) -> int:
        batch_id = self.commit(submission.run_id, submission.leaf(), 1, submission.units)
        self._emit(
            "ContributionLedger", "DirectlySubmitted",
            batch_id=batch_id, worker=submission.worker, submission=submission,
            node_signature=signature,
        )  # fmt: skip
        return batch_id

    async def post_outcomes(self, batch: Batch, records: bytes, signatures: bytes) -> object:
        self.maybe_fail()
        batch_id = batch.batch_id
        if any(p[0] == batch_id for p in self.posted):
            raise ContractRevert("LedgerOutcomesPosted", (batch_id,))
        self.posted.append((batch_id, records, split_signatures(signatures)))
        self._emit(
            "ContributionLedger", "OutcomesPosted",
            batch_id=batch_id, run_id=RUN, outcomes_root=keccak(records), records=records,
            posted_at=self.emit.now(), signers=3, signatures=signatures,
        )  # fmt: skip
        return object()

    async def execute_fraud(
        self, outcome: OutcomeProof, submission: Submission, node_signature: bytes
    ) -> object:
        self.maybe_fail()
        record = OutcomeRecord.from_bytes(outcome.record)
        assert record.file_hash == submission.file_hash
        assert len(node_signature) == 65
        self.executed.append(outcome)
        worker, offence = submission.worker, record.offence(RUN)
        self._emit("WorkerRegistry", "WorkerBanned", worker=worker, offence=offence)
        self._emit(
            "StakeVault", "Slashed",
            owner=worker, offence=offence, from_active=5, from_unbonding=0, reporter=ZERO_ADDRESS,
        )  # fmt: skip
        self._emit(
            "ContributionLedger", "FraudExecuted",
            batch_id=outcome.batch.batch_id, worker=worker, offence=offence,
            leaf=record.leaf(outcome.batch.batch_id, outcome.position),
            position=outcome.position, amount=5,
        )  # fmt: skip
        return object()

    async def finalise_fraud(self, outcome: OutcomeProof) -> object:
        self.maybe_fail()
        self.finalised.append(outcome)
        record = OutcomeRecord.from_bytes(outcome.record)
        offence = record.offence(RUN)
        self._emit("StakeVault", "SlashReleased", offence=offence, burned=5, insured=0, rewarded=0)
        return object()

    async def challenge_window(self) -> int:
        return 100

    async def outcome_deadline(self) -> int:
        return 1000

    async def stake_per_unit(self) -> int:
        return STAKE_PER_UNIT


class FakeRuns:
    """The run registry; pauses last 30 s, the next may come 200 s later."""

    def __init__(self, ledger: FakeLedger, account: Address) -> None:
        self._ledger, self._account = ledger, account
        self.pauses: list[tuple[PauseCause, int, Hash32]] = []

    async def slash_cooldown(self) -> int:
        return 200

    async def pause_slashing(
        self, run_id: RunId, cause: PauseCause, reason: int, evidence_hash: Hash32
    ) -> object:
        ledger = self._ledger
        ledger.maybe_fail()
        self.pauses.append((cause, reason, evidence_hash))
        ledger.events.append(
            ledger.emit(
                "RunRegistry",
                "SlashingPaused",
                run_id=run_id,
                by=self._account,
                cause=list(PauseCause).index(cause),
                reason=reason,
                evidence_hash=evidence_hash,
                until=ledger.emit.now() + 30,
            )
        )
        return object()


class FakeFaults:
    """The court of faults; `punished` is what it was told, in order."""

    def __init__(self, ledger: FakeLedger) -> None:
        self._ledger = ledger
        self.punished: list[tuple[Fault, Address]] = []

    async def slash_signer(self, outcome: OutcomeProof, validator: Address) -> object:
        leaf = OutcomeRecord.from_bytes(outcome.record).leaf(
            outcome.batch.batch_id, outcome.position
        )
        return self._punish(Fault.WRONG_VERDICT, leaf, validator)

    async def slash_absent_juror(self, leaf: Hash32, juror: Address) -> object:
        return self._punish(Fault.ABSENT_JUROR, leaf, juror)

    async def slash_overdue(self, batch: Batch, validator: Address) -> object:
        subject = Hash32(batch.batch_id.to_bytes(32, "big"))
        return self._punish(Fault.MISSED_DEADLINE, subject, validator)

    def _punish(self, fault: Fault, subject: Hash32, validator: Address) -> object:
        self._ledger.maybe_fail()
        self.punished.append((fault, validator))
        number = fault.number
        offence = keccak(
            number.to_bytes(32, "big") + subject + bytes(12) + bytes.fromhex(validator[2:])
        )
        self._ledger._emit(
            "StakeVault", "Slashed",
            owner=validator, offence=offence, from_active=5, from_unbonding=0,
            reporter=ZERO_ADDRESS,
        )  # fmt: skip
        self._ledger._emit(
            "FaultCourt", "ValidatorPunished",
            validator=validator, offence=offence, fault=number, subject=subject, amount=5,
        )  # fmt: skip
        return object()


class Named:
    """The chain for one write of a name: what has happened under it does not happen again."""

    def __init__(self, chain: FakeChain, label: str, contract: str = "ledger") -> None:
        self._chain = chain
        self._label = label
        self._contract = contract

    @property
    def ledger(self) -> Named:
        return self

    @property
    def faults(self) -> Named:
        return Named(self._chain, self._label, "faults")

    @property
    def runs(self) -> Named:
        return Named(self._chain, self._label, "runs")

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        async def write(*args: Any) -> Any:
            done, ledger = self._chain.done, self._chain.ledger
            if self._label not in done:
                contract = getattr(self._chain, self._contract)
                result = await getattr(contract, method)(*args)
                done[self._label] = (self._chain.emit.block, result)
            error, ledger.lose_next = ledger.lose_next, None
            if error is not None:
                raise error
            return done[self._label][1]

        return write


class FakeEscrow:
    """The reward escrow; `paid` are its paid slots."""

    def __init__(self) -> None:
        self.paid: set[tuple[Address, int, int]] = set()

    async def is_paid(self, _run_id: RunId, worker: Address, step: Step, index: int) -> bool:
        return (worker, step, index) in self.paid


class FakeChain:
    """The connection, and the reader of what the ledger emits."""

    def __init__(self, account: Address) -> None:
        self.account: Address | None = account
        self.chain_id = 31337
        contracts = {name: self.domain(name).verifying_contract for name in CONTRACTS}
        self.deployment = Deployment(self.chain_id, 0, contracts)
        self.time = NOW
        self.emit = Emitter(lambda: self.time)
        self.ledger = FakeLedger(self.emit)
        self.faults = FakeFaults(self.ledger)
        self.runs = FakeRuns(self.ledger, account)
        self.escrow = FakeEscrow()
        self.rewind_next: int | None = None
        self.done: dict[str, tuple[int, Any]] = {}

    def once(self, label: str) -> Named:
        return Named(self, label)

    def domain(self, contract: str) -> Domain:
        return Domain(self.chain_id, address_of(contract.encode().rjust(32, b"\1")))

    async def now(self) -> int:
        return self.time

    async def pending_transactions(self) -> int:
        return 0

    async def journal_in(self, store: object) -> None:
        """What is written here is mined at once: there is nothing to remember."""

    async def poll(self) -> Poll:
        events, self.ledger.events = self.ledger.events, []
        rewound, self.rewind_next = self.rewind_next, None
        if rewound is not None:
            self.done = {k: v for k, v in self.done.items() if v[0] <= rewound}
        head = self.emit.block
        return Poll(events, rewound, BlockId(head, keccak(b"block %d" % head)))

    def take_back_unread(self) -> None:
        """As if a reorganisation had replaced the blocks that nobody has read yet."""
        first = self.ledger.events[0].block_number
        self.done = {k: v for k, v in self.done.items() if v[0] < first}
        self.ledger.events = []


@dataclass
class Keys:
    """The accounts of one small network."""

    orchestrator: bytes = field(default_factory=lambda: os.urandom(32))
    trainer: bytes = field(default_factory=lambda: os.urandom(32))
    validators: list[bytes] = field(default_factory=lambda: [os.urandom(32) for _ in range(3)])
    nodes: list[bytes] = field(default_factory=lambda: [os.urandom(32) for _ in range(3)])


class Network:
    """One run on the fake chain: three workers, three validators, quorum two, base model out."""

    def __init__(
        self,
        *,
        training: TrainingRecipe | None = None,
        hardware: HardwareRecipe | None = None,
        breaker: BreakerRecipe | None = None,
    ) -> None:
        self.keys = Keys()
        self.recipe = Recipe(
            name="a run",
            sampling=SamplingRecipe(
                problems_per_submission=2, samples_per_problem=2, temperature=1.0, max_new_tokens=8
            ),
            training=training or TrainingRecipe(steps=3, submissions_per_step=2, max_async_level=1),
            hardware=hardware or HardwareRecipe(),
            # There are three workers: only tests of the breaker trip it.
            breaker=breaker or BreakerRecipe(min_workers=4),
        )
        calibration, tasks = b"calibration", make_task_set(4, seed=0)
        self.documents = {keccak(d): d for d in (self.recipe.to_bytes(), calibration)}
        self.documents[tasks.hash()] = tasks.to_bytes()
        self.chain = FakeChain(address_of(self.keys.orchestrator))
        self.view = ChainView()
        for number, key in enumerate(self.keys.nodes, start=1):
            worker = address_of(os.urandom(32))
            self.apply("StakeVault", "Deposited", owner=worker, amount=10**18, active=10**18)
            self.apply(
                "WorkerRegistry", "WorkerRegistered",
                worker=worker, node=address_of(key), worker_id=number, active_from=1,
            )  # fmt: skip
        config = RunConfig(
            trainer=address_of(self.keys.trainer),
            orchestrator=address_of(self.keys.orchestrator),
            base_model_hash=keccak(b"base model"),
            task_set_hash=tasks.hash(),
            recipe_hash=self.recipe.hash(),
            calibration_hash=keccak(calibration),
            terms=RunTerms(10**12, 100_000, 500_000, 2),
            validators=tuple(address_of(key) for key in self.keys.validators),
        )
        self.apply("RunRegistry", "RunCreated", run_id=RUN, owner=config.trainer, config=config)
        for seat, validator in enumerate(config.validators):
            self.apply(
                "RunRegistry", "ValidatorSeated",
                run_id=RUN, validator=validator, seat_bit=1 << seat,
            )  # fmt: skip
        self.publish(0)

    def apply(self, contract: str, name: str, **args: Any) -> None:
        """Let something happen on chain that the orchestrator reads at once."""
        self.view.apply(self.chain.emit(contract, name, **args))

    @property
    def run(self) -> RunView:
        return self.view.runs[RUN]

    @property
    def domain(self) -> Domain:
        return self.chain.domain("ContributionLedger")

    def worker(self, number: int) -> WorkerView:
        return self.view.worker_by_id[number + 1]

    def publish(self, version: int) -> None:
        self.apply(
            "RunRegistry", "CheckpointPublished",
            run_id=RUN, version=version, manifest_root=keccak(b"root %d" % version),
        )  # fmt: skip

    def unpublish(self) -> None:
        """As if no policy had ever been out."""
        self.run.checkpoints.clear()
        self.run.latest_version = None

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
