"""What a ChainView is made of: workers, stakes, runs, batches, slashes, payments, cases.

These objects change while events are applied; nobody but the view may change them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from muster.chain.conversion import lenient_reason
from muster.chain.structs import (
    ZERO_ADDRESS,
    Batch,
    Claim,
    Fault,
    OutcomeProof,
    PauseCause,
    RunConfig,
    RunTerms,
    WorkerStatus,
)
from muster.protocol.errors import EncodingError
from muster.protocol.ids import Address, BatchName, Hash32, PolicyVersion, RunId, Step
from muster.protocol.merkle import merkle_multi_proof, merkle_proof
from muster.protocol.messages import OutcomeRecord, Reason, Submission, Verdict, unpack_records

NO_HASH = Hash32(bytes(32))


class SlashState(StrEnum):
    """What became of slashed stake."""

    ESCROWED = "escrowed"
    """Held until the verdict is final."""
    RELEASED = "released"
    """Burned, insured, rewarded."""
    RESTORED = "restored"
    """Given back: the verdict was overturned."""


@dataclass(slots=True)
class StakeView:
    """One account's stake, whether it is a worker, a validator or neither."""

    owner: Address
    """The account."""
    active_wei: int = 0
    """Counts towards requirements."""
    unbonding_wei: int = 0
    """Leaving, still slashable."""
    withdrawable_at: int = 0
    """From when it may be withdrawn."""
    slashed_wei: int = 0
    """Taken for offences and not given back."""
    held_until: int = 0
    """Before this time it is held back, for one more unbonding period at most."""
    open_cases: int = 0
    """Cases that hold it back in the same way."""


@dataclass(slots=True)
class WorkerView:
    """A worker."""

    address: Address
    """The staking wallet."""
    worker_id: int
    """Number in outcome records."""
    node: Address
    """The hot key that signs for it now."""
    status: WorkerStatus
    """Active, Jailed, Exiting or Banned."""
    active_from: int
    """First block in which it counts as active."""
    first_active_from: int
    """The same when it registered: unjailing changes the other."""
    stake: StakeView
    """Its stake."""
    status_since: int = 0
    """Time at which its status began."""
    jailed_until: int = 0
    """Before this time it stays jailed."""
    convictions: int = 0
    """Fraud verdicts against it that stand."""
    registered_block: int = 0
    """Where it was registered."""
    registered_tx: str = ""
    """The registering transaction."""
    nodes: list[tuple[int, Address]] = field(default_factory=list)
    """Every node with the block from which it served, oldest first."""
    standings: list[tuple[int, WorkerStatus]] = field(default_factory=list)
    """Every status with the block in which it began, oldest first."""

    @property
    def active_wei(self) -> int:
        """Stake that counts towards the requirement."""
        return self.stake.active_wei

    @property
    def unbonding_wei(self) -> int:
        """Stake that is leaving."""
        return self.stake.unbonding_wei

    @property
    def slashed_wei(self) -> int:
        """Stake taken and not given back."""
        return self.stake.slashed_wei

    def is_active(self, block_number: int) -> bool:
        """Return whether it may submit in a block, given what is known of its status now."""
        return self.status == WorkerStatus.ACTIVE and block_number >= self.active_from

    def node_at(self, block_number: int) -> Address | None:
        """Return the node that served it at the end of a block."""
        serving = [node for since, node in self.nodes if since <= block_number]
        return serving[-1] if serving else None

    def status_at(self, block_number: int) -> WorkerStatus:
        """Return its status at the end of a block."""
        past = [status for since, status in self.standings if since <= block_number]
        return past[-1] if past else WorkerStatus.NONE


@dataclass(frozen=True, slots=True)
class CheckpointView:
    """A published policy version."""

    version: PolicyVersion
    """Its number."""
    manifest_root: Hash32
    """Keccak-256 of its manifest."""
    beacon: Hash32
    """Hash of the publishing block."""
    block_number: int
    """The publishing block."""
    timestamp: int
    """Its time."""
    tx_hash: str
    """The publishing transaction."""


@dataclass(frozen=True, slots=True)
class PauseView:
    """A pause of a run's slashing."""

    by: Address
    """Who called it: a validator, the orchestrator or the owner."""
    cause: PauseCause
    """Why."""
    reason: int
    """Reason code of the check that failed; 0 when there is none."""
    evidence_hash: Hash32
    """Keccak-256 of the document that says why."""
    began_at: int
    """First second of the pause."""
    until: int
    """First second after it."""
    tx_hash: str
    """The transaction."""

    def meets(self, opens_at: int, closes_at: int) -> bool:
        """Return whether the pause shares a second with [opens_at, closes_at)."""
        return opens_at < self.until and self.began_at < closes_at


@dataclass(frozen=True, slots=True)
class StreamItem:
    """An accepted record's place in a run's training stream."""

    position_in_stream: int
    """From 0, without gaps."""
    batch_id: int
    """The batch."""
    position: int
    """Its place there."""
    record: OutcomeRecord
    """The record."""


@dataclass(slots=True)
class RunView:
    """A run."""

    run_id: RunId
    """Its number."""
    owner: Address
    """Who created it."""
    config: RunConfig
    """What it is made of now; its validators are those it was created with."""
    seats: dict[Address, int]
    """Everybody who ever validated, with the bit of its seat."""
    validators: list[Address]
    """The current validators."""
    created_block: int
    """Where it was created."""
    created_tx: str
    """The creating transaction."""
    paused: bool = False
    """Whether submissions are paused."""
    closed_at: int = 0
    """When its owner ended it; 0 while it is open."""
    proposed: tuple[RunTerms, int] | None = None
    """Announced terms and when they take effect."""
    funded_wei: int = 0
    """Reward received."""
    reserved_wei: int = 0
    """Set aside for batches and not paid yet."""
    paid_wei: int = 0
    """Reward paid out."""
    reclaimed_wei: int = 0
    """Taken back by the owner after the end."""
    checkpoints: dict[PolicyVersion, CheckpointView] = field(default_factory=dict)
    """Published policy versions, in order."""
    latest_version: PolicyVersion | None = None
    """The newest of them."""
    stream: list[StreamItem] = field(default_factory=list)
    """The training stream."""
    pauses: list[PauseView] = field(default_factory=list)
    """Every pause of slashing, oldest first."""

    @property
    def slashing_paused_until(self) -> int:
        """First second after the last pause of slashing; 0 when there was none."""
        return self.pauses[-1].until if self.pauses else 0

    def is_slashing_paused(self, now: int) -> bool:
        """Return whether no fraud of the run can be executed."""
        return now < self.slashing_paused_until

    def fraud_closes_at(self, posted_at: int, window_s: int) -> int:
        """Return when the challenge window of a fraud verdict closes, as RunRegistry has it.

        A window that a pause met is counted from the pause's end; one pause at most meets it.
        """
        closes_at = posted_at + window_s
        met = [pause for pause in self.pauses if pause.meets(posted_at, closes_at)]
        return met[-1].until + window_s if met else closes_at

    @property
    def available_wei(self) -> int:
        """Reward that is free for batches to come."""
        return self.funded_wei - self.reserved_wei - self.paid_wei - self.reclaimed_wei


@dataclass(slots=True)
class BatchView:
    """A committed batch and, once posted, its outcomes."""

    batch_id: int
    """Its number."""
    run_id: RunId
    """Its run."""
    root: Hash32
    """Root over its submissions."""
    count: int
    """Submissions."""
    units: int
    """Units they claim together."""
    price_per_unit: int
    """Token wei per unit, as it was at the commitment."""
    committed_at: int
    """Time of the commitment."""
    block_number: int
    """Block of the commitment."""
    tx_hash: str
    """Transaction of the commitment."""
    beacon: Hash32 = NO_HASH
    """Hash of the block of the commitment: of it the order of those who check is drawn."""
    seated: tuple[Address, ...] = ()
    """The run's validators at the commitment."""
    orchestrator: Address = ZERO_ADDRESS
    """The run's orchestrator at the commitment, whose tickets count."""
    direct: Submission | None = None
    """The submission, when its worker committed it without the orchestrator."""
    direct_signature: bytes = b""
    """The node's signature on it."""
    records: list[OutcomeRecord] | None = None
    """Outcomes in batch order, once posted."""
    records_hash: Hash32 | None = None
    """Keccak-256 of the records as posted: what validators signed."""
    signatures: list[bytes] = field(default_factory=list)
    """The validators' signatures."""
    outcomes_root: Hash32 | None = None
    """Root over the outcomes, as the ledger computed it."""
    signers: int = 0
    """Seats of the validators that signed, as a bitmap."""
    posted_at: int | None = None
    """Time of the outcomes."""
    posted_block: int | None = None
    """Block of the outcomes."""
    posted_beacon: Hash32 | None = None
    """Hash of that block: of it is drawn whether somebody checks once more, and who."""
    posted_tx: str | None = None
    """Transaction of the outcomes."""
    validators: tuple[Address, ...] = ()
    """The run's validators when the outcomes were posted."""

    @property
    def name(self) -> BatchName:
        """What tells it from every other batch."""
        return BatchName(self.batch_id, self.root)

    def header(self) -> Batch:
        """Return the header that contracts want to see, as it is now."""
        return Batch(
            batch_id=self.batch_id,
            run_id=self.run_id,
            root=self.root if self.outcomes_root is None else self.outcomes_root,
            count=self.count,
            units=self.units,
            price_per_unit=self.price_per_unit,
            committed_at=self.committed_at,
            posted_at=self.posted_at or 0,
            signers=self.signers,
        )

    def leaves(self) -> list[Hash32]:
        """Return the leaves of the outcomes tree; empty until outcomes are posted."""
        return [record.leaf(self.batch_id, i) for i, record in enumerate(self.records or ())]

    def prove(self, position: int) -> OutcomeProof:
        """Return a posted outcome with its proof."""
        record = (self.records or ())[position]
        proof = merkle_proof(self.leaves(), position)
        return OutcomeProof(self.header(), position, record.to_bytes(), proof)

    def claim(self, positions: Sequence[int]) -> Claim:
        """Return posted outcomes at ascending positions with the proof of all of them."""
        records = self.records or ()
        return Claim(
            batch=self.header(),
            positions=list(positions),
            records=b"".join(records[position].to_bytes() for position in positions),
            siblings=merkle_multi_proof(self.leaves(), positions),
        )


@dataclass(slots=True)
class SlashView:
    """A slash."""

    owner: Address
    """Whose stake it was: a worker's or a validator's."""
    offence: Hash32
    """What it is filed under."""
    amount_wei: int
    """What was taken."""
    tx_hash: str
    """The transaction."""
    block_number: int
    """The block."""
    stake_before: tuple[int, int]
    """Active and unbonding stake just before, in wei."""
    taken: tuple[int, int]
    """What was taken of each, in wei."""
    reporter: Address
    """Who reported it; the zero address for nobody."""
    batch_id: int | None = None
    """The batch of the outcome, when a fraud verdict was executed."""
    position: int | None = None
    """Its place there."""
    leaf: Hash32 | None = None
    """Its name in cases."""
    priors: int = 0
    """Fraud verdicts that stood against the worker before this one."""
    fault: Fault | None = None
    """What a validator was punished for."""
    is_double_submission: bool = False
    """Whether a worker was punished for signing two submissions for one slot."""
    state: SlashState = SlashState.ESCROWED
    """What became of it."""
    split: tuple[int, int, int] | None = None
    """Wei burned, insured and rewarded, once released."""
    settled_tx: str | None = None
    """The transaction that released or restored it."""


@dataclass(frozen=True, slots=True)
class PaymentView:
    """A claim that was paid."""

    run_id: RunId
    """The run that paid."""
    worker: Address
    """Who was paid."""
    slots: int
    """For how many slots."""
    units: int
    """For how many units."""
    amount_wei: int
    """How much."""
    tx_hash: str
    """The transaction."""
    block_number: int
    """The block."""
    timestamp: int
    """Its time."""


@dataclass(slots=True)
class CaseView:
    """A dispute about one outcome."""

    leaf: Hash32
    """The outcome's leaf."""
    batch_id: int
    """Its batch."""
    position: int
    """Its place there."""
    challenger: Address
    """Who challenged."""
    recorded_verdict: int
    """As recorded."""
    claimed_verdict: int
    """What the challenger claims."""
    draw_block: int
    """The block whose hash decides the jury."""
    opened_at: int
    """When it was opened."""
    opened_tx: str
    """The challenge."""
    jurors: tuple[Address, ...] = ()
    """Who was drawn."""
    commitments: dict[Address, Hash32] = field(default_factory=dict)
    """What each juror committed to."""
    votes: dict[Address, bool] = field(default_factory=dict)
    """By juror: whether to overturn, once revealed."""
    results: dict[Address, Hash32] = field(default_factory=dict)
    """By juror: the hash of what it recomputed, once revealed."""
    closed: bool = False
    """Whether it is over."""
    overturned: bool = False
    """Whether the challenger won."""
    verdict: int | None = None
    """What stands, once closed."""
    bond_returned_wei: int | None = None
    """How much of the bond went back, once closed."""
    closed_tx: str | None = None
    """The closing transaction."""


def split_signatures(joined: bytes) -> list[bytes]:
    """Return the 65-byte signatures that the ledger accepted joined."""
    return [joined[i : i + 65] for i in range(0, len(joined), 65)]


def parse_records(data: bytes) -> list[OutcomeRecord]:
    """Return the records that the ledger accepted; raises EncodingError when it cannot have.

    The ledger does not look at reasons. An unknown one is kept, by number and the name UNKNOWN_n,
    so that the record's bytes and leaf stay what they are.
    """
    try:
        return unpack_records(data)
    except EncodingError:
        size = OutcomeRecord.SIZE
        if not data or len(data) % size:
            raise
        return [_lenient_record(data[i : i + size]) for i in range(0, len(data), size)]


def _lenient_record(data: bytes) -> OutcomeRecord:
    known = OutcomeRecord.from_bytes(data[:-1] + bytes([Reason.NONE]))
    return OutcomeRecord(
        worker_id=known.worker_id,
        step=Step(known.step),
        index=known.index,
        policy_version=known.policy_version,
        file_hash=known.file_hash,
        rollouts=known.rollouts,
        units=known.units,
        verdict=Verdict(known.verdict),
        reason=lenient_reason(data[-1]),
    )
