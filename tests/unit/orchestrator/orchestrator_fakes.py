"""A chain in memory for the orchestrator's tests: real events and view, no node."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from muster.chain import (
    ZERO_ADDRESS,
    Batch,
    BatchView,
    BlockId,
    CaseStatus,
    ChainView,
    CourtTerms,
    Event,
    LeasedWork,
    MemberView,
    Offence,
    OutcomeProof,
    PauseCause,
    Poll,
    RunConfig,
    RunTerms,
    RunView,
)
from muster.chain.abi import CONTRACTS
from muster.chain.deployment import Deployment
from muster.chain.structs import CommittedWork, SlashSubject
from muster.chain.view_parts import split_signatures
from muster.protocol import recipe
from muster.protocol.eip712 import Domain, address_of, digest, recover, sign
from muster.protocol.encoding import file_hash, keccak
from muster.protocol.errors import ContractRevert
from muster.protocol.ids import Address, Hash32, RunId, Step
from muster.protocol.jury import Ruling, is_exact, summons_of
from muster.protocol.merkle import verify_batch_proof
from muster.protocol.messages import OutcomeRecord, Outcomes, Reason, Submission, Ticket, Verdict
from muster.tasks.toys import make_sort

RUN = RunId(1)
NOW = 1_700_000_000
STAKE_PER_UNIT = 10**14
"""A worker's stake of one token covers 10,000 units, a submission is worth 32 at most."""


ACCEPTED = Ruling(Verdict.ACCEPTED, Reason.NONE)
FRAUD = Ruling(Verdict.FRAUD, Reason.WRONG_SEED)


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


def slot_tag(submission: Submission) -> int:
    return submission.step << 32 | submission.index


def escrow_of(subject: SlashSubject) -> Hash32:
    named = (subject.run_id, subject.owner, subject.offence, subject.tag)
    return keccak(repr(named).encode())


def slash_of(subject: SlashSubject, amount: int) -> dict[str, Any]:
    """The verdict in a slash's event."""
    return {
        "run_id": subject.run_id,
        "owner": subject.owner,
        "escrow_id": escrow_of(subject),
        "verdict": subject,
        "from_active": amount,
        "from_unbonding": 0,
    }


@dataclass
class FakeLedger:
    """The contribution ledger; `fail_next` makes the next write fail, `lose_next` its answer."""

    emit: Emitter
    domain: Domain
    events: list[Event] = field(default_factory=list)
    batches: int = 0
    committed: list[tuple[Hash32, int, int]] = field(default_factory=list)
    posted: list[tuple[int, bytes, list[bytes]]] = field(default_factory=list)
    executed: list[OutcomeProof] = field(default_factory=list)
    escrows: dict[tuple[int, int], Hash32] = field(default_factory=dict)
    """Escrows of executed frauds by batch and position."""
    rulings: dict[tuple[int, int], int] = field(default_factory=dict)
    """What juries ruled, by batch and position."""
    finalised: list[OutcomeProof] = field(default_factory=list)
    voided: list[int] = field(default_factory=list)
    fail_next: Exception | None = None
    lose_next: Exception | None = None
    funded_units: int = 10**6
    """Units of one batch that the run can pay for."""
    once_posted: Callable[[], None] = lambda: None
    """What happens after each post of outcomes."""

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
        if not units:
            raise ContractRevert("LedgerInvalidBatch", (root, count))
        if units > self.funded_units:
            raise ContractRevert("EscrowUnderfunded", (run_id, units, self.funded_units))
        self.committed.append((root, count, units))
        return self.commit(run_id, root, count, units), Mined(self.emit.block)

    def commit(self, run_id: RunId, root: Hash32, count: int, units: int) -> int:
        self.batches += 1
        self._emit(
            "ContributionLedger", "BatchCommitted",
            batch_id=self.batches, run_id=run_id, root=root, count=count, units=units,
            price_per_unit=10**12, terms=1, committed_at=self.emit.now(),
        )  # fmt: skip
        return self.batches

    def submit_direct(self, work: LeasedWork) -> int:
        submission = work.submission
        batch_id = self.commit(submission.run_id, submission.leaf(), 1, submission.units)
        self._emit(
            "ContributionLedger", "DirectlySubmitted",
            batch_id=batch_id, worker=submission.worker, work=work, sources=(),
        )  # fmt: skip
        return batch_id

    def split_off(self, batch: BatchView, work: LeasedWork) -> int:
        self.batches += 1
        submission = work.submission
        self._emit(
            "ContributionLedger", "BatchCommitted",
            batch_id=self.batches, run_id=RUN, root=submission.leaf(), count=1,
            units=submission.units, price_per_unit=batch.price_per_unit, terms=batch.terms,
            committed_at=batch.committed_at,
        )  # fmt: skip
        self._emit(
            "ContributionLedger", "BatchSplit",
            batch_id=self.batches, from_batch_id=batch.batch_id, worker=submission.worker,
            work=work, sources=(),
        )  # fmt: skip
        return self.batches

    async def post_outcomes(self, batch: Batch, records: bytes, signatures: bytes) -> object:
        self.maybe_fail()
        batch_id = batch.batch_id
        if any(p[0] == batch_id for p in self.posted):
            raise ContractRevert("LedgerOutcomesPosted", (batch_id,))
        self.posted.append((batch_id, records, split_signatures(signatures)))
        about = {"batch_id": batch_id, "posted_at": self.emit.now(), "signers": 3}
        if records:
            self._emit(
                "ContributionLedger", "OutcomesPosted",
                run_id=RUN, outcomes_root=keccak(records), records=records, signatures=signatures,
                **about,
            )  # fmt: skip
        else:
            self._emit("ContributionLedger", "BatchWithheld", signatures=signatures, **about)
        self.once_posted()
        return object()

    async def execute_fraud(self, outcome: OutcomeProof, work: CommittedWork) -> object:
        self.maybe_fail()
        submission, batch = work.submission, outcome.batch
        place, leaf = outcome.position, submission.leaf()
        assert verify_batch_proof(batch.root, batch.count, place, leaf, work.proof)
        record, batch_id = OutcomeRecord.from_bytes(outcome.record), outcome.batch.batch_id
        assert record.file_hash == submission.file_hash
        assert len(work.node_signature) == 65
        self.executed.append(outcome)
        recorded = Ruling(record.verdict, record.reason).number
        is_sure = is_exact(self.rulings.get((batch_id, place), recorded))
        offence = Offence.EXACT_FRAUD if is_sure else Offence.FRAUD
        subject = SlashSubject(
            RUN, submission.worker, offence, slot_tag(submission), batch_id, place
        )
        self._emit(
            "WorkerRegistry", "WorkerBanned",
            run_id=RUN, worker=submission.worker, escrow_id=escrow_of(subject),
        )  # fmt: skip
        self._emit("StakeVault", "Slashed", **slash_of(subject, 5))
        self._emit(
            "ContributionLedger", "FraudExecuted",
            batch_id=batch_id, worker=submission.worker, escrow_id=escrow_of(subject),
            leaf=record.leaf(batch_id, outcome.position), position=outcome.position, amount=5,
        )  # fmt: skip
        self.escrows[batch_id, outcome.position] = escrow_of(subject)
        return object()

    async def finalise_fraud(self, outcome: OutcomeProof) -> object:
        self.maybe_fail()
        self.finalised.append(outcome)
        self._emit(
            "StakeVault", "SlashReleased",
            escrow_id=self.escrows[outcome.batch.batch_id, outcome.position], reporter=ZERO_ADDRESS,
            burned=5, insured=0, rewarded=0,
        )  # fmt: skip
        return object()

    async def void_batch(self, batch: Batch) -> object:
        self.maybe_fail()
        self.voided.append(batch.batch_id)
        self._emit(
            "ContributionLedger", "BatchVoided", batch_id=batch.batch_id, run_id=batch.run_id
        )
        return object()

    async def appeal_time(self) -> int:
        return 100

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
    """The court of faults; `proven` are the faults that it was shown, in order."""

    def __init__(self, ledger: FakeLedger) -> None:
        self._ledger = ledger
        self.proven: list[tuple[Any, ...]] = []

    async def prove_double_outcome(
        self,
        batch: Batch,
        first: Outcomes,
        first_signature: bytes,
        second: Outcomes,
        second_signature: bytes,
    ) -> object:
        validator = self._signer(first, first_signature)
        assert validator == self._signer(second, second_signature)
        assert first.batch_id == second.batch_id == batch.batch_id
        assert first.batch_root == second.batch_root
        assert first.records_hash != second.records_hash
        assert keccak(b"") not in (first.records_hash, second.records_hash)
        return self._slash(validator, Offence.DOUBLE_OUTCOME, batch.batch_id)

    async def prove_double_submission(
        self,
        outcome: OutcomeProof,
        work: CommittedWork,
        second: Submission,
        second_signature: bytes,
    ) -> object:
        domain, first = self._ledger.domain, work.submission
        assert OutcomeRecord.from_bytes(outcome.record).file_hash == first.file_hash
        assert first != second
        assert (first.worker, slot_tag(first)) == (second.worker, slot_tag(second))
        node = recover(digest(domain, first.struct_hash()), work.node_signature)
        assert node == recover(digest(domain, second.struct_hash()), second_signature)
        return self._slash(first.worker, Offence.DOUBLE_SUBMISSION, slot_tag(first))

    async def prove_misrecord(
        self, outcome: OutcomeProof, work: CommittedWork, validator: Address
    ) -> object:
        batch, leaf = outcome.batch, work.submission.leaf()
        assert verify_batch_proof(batch.root, batch.count, outcome.position, leaf, work.proof)
        return self._slash(validator, Offence.MISRECORD, batch.batch_id)

    def _signer(self, shown: Outcomes, signature: bytes) -> Address:
        return recover(digest(self._ledger.domain, shown.struct_hash()), signature)

    def _slash(self, owner: Address, offence: Offence, tag: int) -> object:
        self._ledger.maybe_fail()
        self.proven.append((offence, owner, tag))
        subject = SlashSubject(RUN, owner, offence, tag, 0, 0)
        if offence is Offence.DOUBLE_SUBMISSION:
            banned = {"run_id": RUN, "worker": owner, "escrow_id": escrow_of(subject)}
            self._ledger._emit("WorkerRegistry", "WorkerBanned", **banned)
        self._ledger._emit("StakeVault", "Slashed", **slash_of(subject, 5))
        return object()


class Named:
    """The chain for labelled writes: an action under a label happens once."""

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


class FakeCourt:
    """The court of the network; jurors commit within 100 s."""

    async def terms(self) -> CourtTerms:
        return CourtTerms(
            bond=1,
            juror_fee=1,
            draw_delay=2,
            jury_size=3,
            commit_time=100,
            reveal_time=100,
            wrong_verdict_ppm=1,
            absence_ppm=1,
        )


class FakeEscrow:
    """The reward escrow; `paid` are its paid slots."""

    def __init__(self) -> None:
        self.paid: set[tuple[Address, int, int]] = set()

    async def is_paid(self, _run_id: RunId, worker: Address, step: Step, index: int) -> bool:
        return (worker, step, index) in self.paid


class FakeChain:
    """The connection, and the reader of the ledger's events."""

    def __init__(self, account: Address) -> None:
        self.account: Address | None = account
        self.chain_id = 31337
        contracts = {name: self.domain(name).verifying_contract for name in CONTRACTS}
        self.deployment = Deployment(self.chain_id, 0, contracts)
        self.time = NOW
        self.first_block = keccak(b"block 0")
        self.emit = Emitter(lambda: self.time)
        self.ledger = FakeLedger(self.emit, self.domain("ContributionLedger"))
        self.faults = FakeFaults(self.ledger)
        self.runs = FakeRuns(self.ledger, account)
        self.court = FakeCourt()
        self.escrow = FakeEscrow()
        self.rewind_next: int | None = None
        self.done: dict[str, tuple[int, Any]] = {}

    def once(self, label: str) -> Any:
        return Named(self, label)

    def domain(self, contract: str) -> Domain:
        return Domain(self.chain_id, address_of(contract.encode().rjust(32, b"\1")))

    async def now(self) -> int:
        return self.time

    async def deploy_hash(self) -> Hash32:
        return self.first_block

    async def pending_transactions(self) -> int:
        return 0

    async def journal_in(self, store: object) -> None:
        """Transactions are mined at once here, so there is nothing to remember."""

    async def poll(self) -> Poll:
        events, self.ledger.events = self.ledger.events, []
        rewound, self.rewind_next = self.rewind_next, None
        if rewound is not None:
            self.done = {k: v for k, v in self.done.items() if v[0] <= rewound}
        head = self.emit.block
        return Poll(events, rewound, BlockId(head, keccak(b"block %d" % head)))

    def take_back_unread(self) -> None:
        """Act as if a reorganisation had replaced the unread blocks."""
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
        training: recipe.TrainingRecipe | None = None,
        hardware: recipe.HardwareRecipe | None = None,
        breaker: recipe.BreakerRecipe | None = None,
        keys: Keys | None = None,
    ) -> None:
        self.keys = keys or Keys()
        self.recipe = recipe.Recipe(
            name="a run",
            sampling=recipe.SamplingRecipe(
                problems_per_submission=2, samples_per_problem=2, temperature=1.0, max_new_tokens=8
            ),
            training=training
            or recipe.TrainingRecipe(steps=3, submissions_per_step=2, max_async_level=1),
            hardware=hardware or recipe.HardwareRecipe(),
            # There are three workers: only tests of the breaker trip it.
            breaker=breaker or recipe.BreakerRecipe(min_workers=4),
        )
        calibration, tasks = b"calibration", make_sort(4, seed=0)
        self.documents = {keccak(d): d for d in (self.recipe.to_bytes(), calibration)}
        self.documents[tasks.hash()] = tasks.to_bytes()
        self.chain = FakeChain(address_of(self.keys.orchestrator))
        self.view = ChainView()
        self.events: list[Event] = []
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
                "RunRegistry", "ValidatorInvited", run_id=RUN, validator=validator, invited=True
            )
            self.apply(
                "RunRegistry", "ValidatorSeated",
                run_id=RUN, validator=validator, seat_bit=1 << seat, terms=1,
            )  # fmt: skip
        for key in self.keys.validators:
            self.deposit(address_of(key), 10**20)
        for number, key in enumerate(self.keys.nodes, start=1):
            self.join(address_of(os.urandom(32)), address_of(key), number)
        self.publish(0)

    def deposit(self, owner: Address, amount: int) -> None:
        """Let an account stake for the run, once."""
        self.apply("StakeVault", "Deposited", run_id=RUN, owner=owner, amount=amount, active=amount)

    def join(self, worker: Address, node: Address, number: int, stake: int = 10**18) -> None:
        """Let a worker join the network and the run."""
        self.apply("WorkerRegistry", "WorkerRegistered", worker=worker, worker_id=number)
        self.apply("WorkerRegistry", "NodeBound", worker=worker, node=node)
        self.deposit(worker, stake)
        self.apply(
            "WorkerRegistry", "WorkerJoined", run_id=RUN, worker=worker, terms=1, active_from=1
        )

    def open_case(self, batch_id: int, position: int, claimed: Ruling) -> Hash32:
        """Let somebody claim another ruling; returns the case's name."""
        batch = self.view.batches[batch_id]
        assert batch.records is not None
        record = batch.records[position]
        leaf, claimant = record.leaf(batch_id, position), address_of(b"\x07" * 32)
        worker = self.view.worker_by_id[record.worker_id].address
        self.apply(
            "DisputeCourt", "CaseOpened",
            case_id=leaf, batch_id=batch_id, run_id=RUN, number=len(self.view.cases) + 1,
            position=position, worker=worker, draw_block=9, places=len(self.view.bench),
            recorded=Ruling(record.verdict, record.reason).number,
        )  # fmt: skip
        submission = Submission(
            RUN, worker, record.step, record.index, record.policy_version, record.file_hash,
            record.rollouts, record.units,
        )  # fmt: skip
        self.apply(
            "DisputeCourt", "Claimed",
            case_id=leaf, claimant=claimant, ruling=claimed.number,
            work=CommittedWork(submission, bytes(65), ()), sources=(),
        )  # fmt: skip
        return leaf

    def summon(self, batch_id: int) -> Hash32:
        """Let judges of the network be called for a batch of one; returns the case's name."""
        case_id, worker = summons_of(batch_id), self.worker(0).address
        self.apply(
            "DisputeCourt", "CaseOpened",
            case_id=case_id, batch_id=batch_id, run_id=RUN, number=len(self.view.cases) + 1,
            position=0, worker=worker, draw_block=9, places=len(self.view.bench), recorded=0,
        )  # fmt: skip
        return case_id

    def draw(self, case_id: Hash32, *jurors: Address) -> None:
        """Draw the jury of a case."""
        self.apply("DisputeCourt", "JuryDrawn", case_id=case_id, jurors=jurors)

    def close_case(self, case_id: Hash32, ruling: Ruling | None = None) -> Event:
        """Let a jury of one vote for a ruling, or nobody vote, and the case be closed."""
        case = self.view.cases[case_id]
        if ruling is not None:
            juror = address_of(b"\x08" * 32)
            self.draw(case_id, juror)
            vote = {"case_id": case_id, "juror": juror}
            self.apply("DisputeCourt", "VoteCommitted", commitment=case_id, **vote)
            self.apply(
                "DisputeCourt", "VoteRevealed", ruling=ruling.number, result_hash=case_id, **vote
            )
        recorded = Ruling.of(case.recorded)
        is_other = ruling is not None and (recorded is None or not ruling.is_same(recorded))
        status = CaseStatus.OVERTURNED if is_other else CaseStatus.UPHELD
        stands = ruling.number if ruling is not None and is_other else case.recorded
        self.chain.ledger.rulings[case.batch_id, case.position] = stands
        return self.apply(
            "DisputeCourt", "CaseClosed",
            case_id=case_id, status=list(CaseStatus).index(status), ruling=stands,
            reporter=ZERO_ADDRESS if case.is_summons or not is_other else case.claims[0].claimant,
            fee=0,
        )  # fmt: skip

    def apply(self, contract: str, name: str, **args: Any) -> Event:
        """Emit an event that the orchestrator reads at once."""
        event = self.chain.emit(contract, name, **args)
        self.events.append(event)
        self.view.apply(event)
        return event

    @property
    def run(self) -> RunView:
        return self.view.runs[RUN]

    @property
    def domain(self) -> Domain:
        return self.chain.domain("ContributionLedger")

    def worker(self, number: int) -> MemberView:
        return self.run.members[self.view.worker_by_id[number + 1].address]

    def publish(self, version: int) -> None:
        self.apply(
            "RunRegistry", "CheckpointPublished",
            run_id=RUN, version=version, manifest_root=keccak(b"root %d" % version),
        )  # fmt: skip

    def unpublish(self) -> None:
        """Act as if no policy had ever been published."""
        self.run.checkpoints.clear()
        self.run.latest_version = None

    def sign_submission(self, submission: Submission, node: int = 0) -> bytes:
        return sign(digest(self.domain, submission.struct_hash()), self.keys.nodes[node])

    def work(self, submission: Submission, node: int = 0) -> LeasedWork:
        """A submission as its worker commits it itself, on a ticket of the orchestrator."""
        checkpoint = self.run.checkpoints[submission.policy_version]
        ticket = Ticket(
            submission.run_id, submission.worker, submission.step, submission.index,
            submission.policy_version, checkpoint.manifest_root, checkpoint.beacon, NOW + 60,
        )  # fmt: skip
        signature = sign(digest(self.domain, ticket.struct_hash()), self.keys.orchestrator)
        return LeasedWork(submission, self.sign_submission(submission, node), ticket, signature)

    def judge(
        self,
        submissions: Sequence[Submission],
        verdict: Verdict = Verdict.ACCEPTED,
        reason: Reason = Reason.NONE,
    ) -> bytes:
        """The packed records that a validator would hand in."""
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
