"""The parts of a ChainView: workers, members, stakes, runs, batches, slashes, payments, cases.

These objects change while events are applied; only the view may change them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import overload

from muster.chain.conversion import lenient_reason
from muster.chain.structs import (
    NO_HASH,
    ZERO_ADDRESS,
    Batch,
    BatchStatus,
    CaseStatus,
    LeasedWork,
    Offence,
    OutcomeProof,
    PauseCause,
    RewardClaim,
    RunConfig,
    RunTerms,
    WorkerStatus,
)
from muster.protocol.errors import EncodingError
from muster.protocol.ids import Address, BatchName, Hash32, PolicyVersion, RunId
from muster.protocol.jury import is_same, is_unavailable, kind_of, prevailing
from muster.protocol.merkle import merkle_multi_proof, merkle_proof, verify_batch_proof
from muster.protocol.messages import (
    OutcomeRecord,
    Reason,
    Submission,
    Verdict,
    unpack_records,
    verdicts_in,
)
from muster.protocol.schedule import batch_seed


class SlashState(StrEnum):
    """State of slashed stake."""

    ESCROWED = "escrowed"
    """Held until the verdict is final."""
    RELEASED = "released"
    """Burned, insured, rewarded."""
    RESTORED = "restored"
    """Given back: the verdict was overturned."""


@dataclass(slots=True)
class StakeView:
    """The stake of one account in one run, as a worker or validator; in run 0 as a juror."""

    run_id: RunId
    """The run in which it can be slashed."""
    owner: Address
    """The account."""
    active_wei: int = 0
    """Counts towards requirements."""
    unbonding_wei: int = 0
    """Leaving, still slashable."""
    withdrawable_at: int = 0
    """Time from which it may be withdrawn."""
    slashed_wei: int = 0
    """Slashed for offences and not given back."""


@dataclass(slots=True)
class WorkerView:
    """A worker in the whole network: a number and a node key."""

    address: Address
    """The staking wallet."""
    worker_id: int
    """Number in outcome records."""
    registered_tx: str = ""
    """The transaction with which it joined its first run."""
    node: Address = ZERO_ADDRESS
    """The hot key that signs for it now."""
    nodes: list[tuple[int, Address]] = field(default_factory=list)
    """Every node with the block from which it served, oldest first."""
    rotated_at: dict[Address, int] = field(default_factory=dict)
    """Time at which each former node stopped serving."""
    memberships: dict[RunId, MemberView] = field(default_factory=dict)
    """Its membership in each run, in the order in which it joined."""

    def node_at(self, block_number: int) -> Address | None:
        """Return the node that served it at the end of a block."""
        serving = [node for since, node in self.nodes if since <= block_number]
        return serving[-1] if serving else None


@dataclass(slots=True)
class MemberView:
    """A worker in one run: its stake there, its status and its convictions."""

    run_id: RunId
    worker: WorkerView = field(compare=False)
    """The worker; not compared, because it has this member among its memberships."""
    stake: StakeView
    """Its stake in the run."""
    terms: int
    """Number of the terms that it last agreed to."""
    status: WorkerStatus
    """Active, Jailed, Exiting or Banned."""
    active_from: int
    """First block in which it counts as active."""
    status_since: int = 0
    """Time at which its status began."""
    jailed_until: int = 0
    """Before this time it stays jailed."""
    left_at: int = 0
    """Time at which it began to leave; 0 while it stays."""
    convictions: int = 0
    """Fraud verdicts against it that stand."""
    joined_block: int = 0
    """Block in which it joined."""
    joined_tx: str = ""
    """Transaction with which it joined."""
    joined_beacon: Hash32 = NO_HASH
    """Hash of that block."""
    standings: list[tuple[int, WorkerStatus]] = field(default_factory=list)
    """Every status with the block in which it began, oldest first."""

    @property
    def address(self) -> Address:
        """The staking wallet."""
        return self.worker.address

    @property
    def worker_id(self) -> int:
        """Number in outcome records."""
        return self.worker.worker_id

    @property
    def node(self) -> Address:
        """The hot key that signs for it now."""
        return self.worker.node

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
        """Return whether it may submit in a block, by its present status."""
        return self.status == WorkerStatus.ACTIVE and block_number >= self.active_from

    def node_at(self, block_number: int) -> Address | None:
        """Return the node that served it at the end of a block."""
        return self.worker.node_at(block_number)

    def beacon_under(self, checkpoint: CheckpointView) -> Hash32:
        """Return the beacon of its seeds under a policy version: the hash of the block that
        published the version, or of the block in which the worker joined, whichever is later.
        Neither was known when the worker chose its address.
        """
        is_later = self.joined_block > checkpoint.block_number
        return self.joined_beacon if is_later else checkpoint.beacon

    def status_at(self, block_number: int) -> WorkerStatus:
        """Return its status at the end of a block."""
        past = [status for since, status in self.standings if since <= block_number]
        return past[-1] if past else WorkerStatus.NONE

    def answers_for(self, node: Address, committed_at: int) -> bool:
        """Return whether it is responsible for work signed by a key and committed at a time; at 0,
        whether the key was ever its node's.
        """
        served = any(key == node for _, key in self.worker.nodes)
        rotated_at = self.worker.rotated_at.get(node)
        in_time = rotated_at is None or rotated_at >= committed_at
        return served and in_time and not 0 < self.left_at < committed_at


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
    """The account that called it: a validator, the orchestrator or the owner."""
    cause: PauseCause
    """Why."""
    reason: int
    """Reason code of the check that failed; 0 when there is none."""
    evidence_hash: Hash32
    """Keccak-256 of the document with the reasons."""
    began_at: int
    """First second of the pause."""
    until: int
    """First second after it."""
    tx_hash: str

    def meets(self, opens_at: int, closes_at: int) -> bool:
        """Return whether the pause shares a second with [opens_at, closes_at)."""
        return opens_at < self.until and self.began_at < closes_at


@dataclass(frozen=True, slots=True)
class StreamItem:
    """An accepted record's place in a run's training stream."""

    position_in_stream: int
    """From 0, without gaps."""
    batch_id: int
    position: int
    """Its place there."""
    record: OutcomeRecord


@dataclass(slots=True)
class RunView:
    """A run."""

    run_id: RunId
    """Its number."""
    owner: Address
    """The account that created it."""
    config: RunConfig
    """Its present configuration; `validators` in it are those it was created with."""
    terms: list[RunTerms]
    """All its terms, the present ones last; number 1 is the first."""
    invited: set[Address]
    """Accounts that may take a seat."""
    seats: dict[Address, int]
    """All present and former validators, with the bit of each seat."""
    validators: list[Address]
    """The current validators."""
    created_tx: str
    """The creating transaction."""
    paused: bool = False
    """Whether submissions are paused."""
    closed_at: int = 0
    """Time at which its owner closed it; 0 while it is open."""
    members: dict[Address, MemberView] = field(default_factory=dict)
    """Its workers by staking wallet, in the order in which they joined."""
    proposed: tuple[RunTerms, int] | None = None
    """Announced terms and the time at which they take effect."""
    funded_wei: int = 0
    """Reward received."""
    reserved_wei: int = 0
    """Reserved for batches and not paid yet."""
    paid_wei: int = 0
    """Reward paid out."""
    court_wei: int = 0
    """Paid to jurors because its validators judged wrongly or not at all."""
    reclaimed_wei: int = 0
    """Reclaimed by the owner after it was closed."""
    checkpoints: dict[PolicyVersion, CheckpointView] = field(default_factory=dict)
    """Published policy versions, in order."""
    latest_version: PolicyVersion | None = None
    """The newest of them."""
    judged: list[BatchView] = field(default_factory=list)
    """Its batches with outcomes, in the order of these."""
    pauses: list[PauseView] = field(default_factory=list)
    """Every pause of slashing, oldest first."""
    # The training stream as far as somebody asked for it, and the number of batches in it.
    _stream: list[StreamItem] = field(default_factory=list, compare=False, repr=False)
    _streamed: int = field(default=0, compare=False, repr=False)

    @property
    def stream(self) -> list[StreamItem]:
        """The training stream: its records posted as Accepted, in chain order."""
        # Here and not with the event: most runs are of others, and nobody asks for their streams.
        for batch in self.judged[self._streamed :]:
            for position, record in enumerate(batch.records or ()):
                if record.verdict is Verdict.ACCEPTED:
                    item = StreamItem(len(self._stream), batch.batch_id, position, record)
                    self._stream.append(item)
        self._streamed = len(self.judged)
        return self._stream

    @property
    def slashing_paused_until(self) -> int:
        """First second after the last pause of slashing; 0 when there was none."""
        return self.pauses[-1].until if self.pauses else 0

    def quorum_of(self, batch: BatchView) -> int:
        """Return how many signatures a batch needs, by the terms of its commitment."""
        return self.terms[batch.terms - 1].quorum

    def is_slashing_paused(self, now: int) -> bool:
        """Return whether fraud verdicts of the run cannot be executed at present."""
        return now < self.slashing_paused_until

    def fraud_closes_at(self, posted_at: int, window_s: int) -> int:
        """Return when the challenge window of a fraud verdict closes, as RunRegistry computes it.

        If a pause overlaps the window, the window starts at the pause's end; at most one pause
        does.
        """
        closes_at = posted_at + window_s
        met = [pause for pause in self.pauses if pause.meets(posted_at, closes_at)]
        return met[-1].until + window_s if met else closes_at

    @property
    def available_wei(self) -> int:
        """Reward that is free for future batches."""
        spent = self.paid_wei + self.court_wei + self.reclaimed_wei
        return self.funded_wei - self.reserved_wei - spent

    @property
    def terms_number(self) -> int:
        """Number of its present terms, which an account that joins agrees to."""
        return len(self.terms)


@dataclass(slots=True)
class BatchView:
    """A committed batch and, once posted, its outcomes."""

    batch_id: int
    """Its number."""
    run_id: RunId
    root: Hash32
    """Root over its submissions."""
    count: int
    """Submissions."""
    units: int
    """Units that its submissions claim together."""
    price_per_unit: int
    """Token wei per unit, as it was at the commitment."""
    terms: int
    """Number of the run's terms at the commitment."""
    committed_at: int
    """Time of the commitment."""
    block_number: int
    """Block of the commitment, or in which it was taken out of another batch."""
    tx_hash: str
    """Transaction of that."""
    beacon: Hash32 = NO_HASH
    """Hash of that block: the order of its validators is drawn from it."""
    seated: tuple[Address, ...] = ()
    """The run's validators at the commitment."""
    orchestrator: Address = ZERO_ADDRESS
    """The run's orchestrator at the commitment, whose tickets count."""
    work: LeasedWork | None = None
    """The submission with its proofs, when its worker committed it or took it out of a batch."""
    sources: tuple[str, ...] = ()
    """URLs of its file, given by the worker."""
    split_from: int | None = None
    """The batch that it was taken out of."""
    left_block: int | None = None
    """Block in which that batch was committed."""
    split_off: dict[int, Submission] = field(default_factory=dict)
    """Submissions that their workers took out of it, by their new batch."""
    status: BatchStatus = BatchStatus.COMMITTED
    """Its status."""
    voided_tx: str | None = None
    """The transaction that made it void: nobody judged it."""
    shown: dict[Hash32, dict[Address, bytes]] = field(default_factory=dict)
    """Signatures that were shown on chain, by records hash and validator."""
    shown_records: dict[Hash32, bytes] = field(default_factory=dict)
    """The records that were shown with them."""
    records: PostedRecords | None = None
    """Outcomes in batch order, once posted."""
    records_hash: Hash32 | None = None
    """Keccak-256 of the posted records, which validators signed."""
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
    """Hash of the block of the outcomes. It decides whether the batch is checked once more, and by
    whom."""
    posted_tx: str | None = None
    """Transaction of the outcomes."""
    validators: tuple[Address, ...] = ()
    """The run's validators when the outcomes were posted."""

    @property
    def direct(self) -> Submission | None:
        """The submission, when its worker committed it or took it out of a batch."""
        return None if self.work is None else self.work.submission

    @property
    def seed(self) -> Hash32:
        """Its seed, which nobody knows before its block (docs/protocol.md section 9.5)."""
        return batch_seed(self.beacon, self.run_id, self.batch_id, self.root)

    @property
    def first_id(self) -> int:
        """Id of the batch in which its work was first committed: there its slots count."""
        return self.batch_id if self.split_from is None else self.split_from

    @property
    def work_block(self) -> int:
        """The block that committed its work, by whose state the work is judged."""
        return self.block_number if self.left_block is None else self.left_block

    @property
    def is_void(self) -> bool:
        """Whether it is void: nobody judged it."""
        return self.voided_tx is not None

    def due_at(self, deadline_s: int) -> int:
        """Return the time from which its workers can call judges of the network."""
        if self.status is BatchStatus.WITHHELD:
            return self.posted_at or 0
        return self.committed_at + deadline_s

    @property
    def name(self) -> BatchName:
        """Its unique name among all batches."""
        return BatchName(self.batch_id, self.root)

    def header(self) -> Batch:
        """Return its present header, which contracts require in calls."""
        return Batch(
            batch_id=self.batch_id,
            run_id=self.run_id,
            root=self.root,
            outcomes_root=self.outcomes_root or NO_HASH,
            count=self.count,
            units=self.units,
            price_per_unit=self.price_per_unit,
            terms=self.terms,
            committed_at=self.committed_at,
            posted_at=self.posted_at or 0,
            signers=self.signers,
            status=self.status,
        )

    def signed_by(self, seats: Mapping[Address, int]) -> list[Address]:
        """Return the accounts of the run's seats that signed its outcomes."""
        return [who for who, bit in seats.items() if bit & self.signers]

    def leaves(self) -> list[Hash32]:
        """Return the leaves of the outcomes tree; empty until outcomes are posted."""
        return [record.leaf(self.batch_id, i) for i, record in enumerate(self.records or ())]

    def prove(self, position: int) -> OutcomeProof:
        """Return a posted outcome with its proof."""
        record = (self.records or ())[position]
        proof = merkle_proof(self.leaves(), position)
        return OutcomeProof(self.header(), position, record.to_bytes(), proof)

    def is_proven(self, claim: ClaimView, position: int) -> bool:
        """Return whether a claim proves that the batch holds its work at a position."""
        leaf = claim.submission.leaf()
        return verify_batch_proof(self.root, self.count, position, leaf, claim.proof)

    def is_proven_in(self, case: CaseView, *, before: float = math.inf) -> bool:
        """Return whether a claim of a case about this batch proves what the batch holds, and was
        made `before` a time, or somebody proved it after the case's end.
        """
        return case.is_proven or any(
            claim.claimed_at < before and self.is_proven(claim, case.position)
            for claim in case.claims
        )

    def claim_about(self, case: CaseView) -> ClaimView:
        """Return the claim that shows what a case about this batch is about: the first that proves
        that the batch holds its work, else the first.
        """
        made = case.claims
        return next((each for each in made if self.is_proven(each, case.position)), made[0])

    def claim(self, positions: Sequence[int]) -> RewardClaim:
        """Return posted outcomes at ascending positions with the proof of all of them."""
        records = self.records or ()
        return RewardClaim(
            batch=self.header(),
            positions=list(positions),
            records=b"".join(records[position].to_bytes() for position in positions),
            siblings=merkle_multi_proof(self.leaves(), positions),
        )


@dataclass(slots=True)
class SlashView:
    """A slash."""

    run_id: RunId
    """The run of the stake; 0 for the jurors' bench."""
    owner: Address
    """Owner of the stake: a worker, a validator or a juror."""
    escrow_id: Hash32
    """Id of its escrow."""
    offence: Offence
    """The offence."""
    tag: int
    """Number of the offence: `step << 32 | index` for frauds and double submissions, else the batch
    or case."""
    amount_wei: int
    """Slashed amount, including later additions."""
    tx_hash: str
    block_number: int
    stake_before: tuple[int, int]
    """Active and unbonding stake just before, in wei."""
    taken: tuple[int, int]
    """Amounts taken of each, in wei."""
    batch_id: int | None = None
    """The batch of the outcome, when a fraud verdict was executed."""
    position: int | None = None
    """Its place there."""
    leaf: Hash32 | None = None
    """Its name in cases."""
    priors: int = 0
    """Earlier fraud verdicts against the worker that stood at that time."""
    state: SlashState = SlashState.ESCROWED
    """Its state."""
    split: tuple[int, int, int] | None = None
    """Wei burned, insured and rewarded, once released."""
    reporter: Address = ZERO_ADDRESS
    """The rewarded account; the zero address for none."""
    settled_tx: str | None = None
    """The transaction that released or restored it."""


@dataclass(frozen=True, slots=True)
class PaymentView:
    """A claim that was paid."""

    run_id: RunId
    """The run that paid."""
    worker: Address
    """The paid worker."""
    slots: int
    """Number of paid slots."""
    units: int
    """Number of paid units."""
    amount_wei: int
    """Amount paid."""
    tx_hash: str
    block_number: int
    timestamp: int
    """Its time."""


@dataclass(frozen=True, slots=True)
class ClaimView:
    """A claim in a case: an account's bond on a ruling."""

    claimant: Address
    """The account."""
    ruling: int
    """The claimed ruling, as a number; 0 in a summons, which claims none."""
    submission: Submission
    """The submission in question."""
    node_signature: bytes
    """Signature of the worker's node; empty in a summons."""
    sources: tuple[str, ...]
    """URLs of the data that the jury needs."""
    tx_hash: str
    proof: tuple[Hash32, ...] = ()
    """Siblings of its leaf up to the batch's root, as the claim gave them."""
    claimed_at: int = 0
    """The block's time, Unix seconds."""


@dataclass(slots=True)
class CaseView:
    """A dispute about one outcome, or about work that its run left unjudged."""

    case_id: Hash32
    """Its name: the outcome's leaf, or `summons_of(batch_id)`."""
    number: int
    """From 1."""
    run_id: RunId
    batch_id: int
    position: int
    """Its place in the batch."""
    worker: Address
    """The worker of the submission."""
    recorded: int
    """The recorded ruling, as a number; 0 without one."""
    draw_block: int
    """The block whose hash decides the jury."""
    places: int
    """Number of places of the bench when the case was opened."""
    opened_at: int
    """Time of its opening."""
    opened_tx: str
    """Transaction of the first claim, or of the summons."""
    claims: list[ClaimView] = field(default_factory=list)
    """In chain order."""
    jurors: tuple[Address, ...] = ()
    """The drawn jurors."""
    commitments: dict[Address, Hash32] = field(default_factory=dict)
    """Each juror's commitment."""
    votes: dict[Address, int] = field(default_factory=dict)
    """Revealed rulings by juror, as numbers."""
    results: dict[Address, Hash32] = field(default_factory=dict)
    """Revealed result hashes by juror: of the work that it recomputed."""
    status: CaseStatus = CaseStatus.OPEN
    """Open, Upheld or Overturned."""
    ruling: int = 0
    """The ruling that stands once closed, as a number; 0 when none does."""
    reporter: Address = ZERO_ADDRESS
    """The first account that claimed what the jury confirmed."""
    fee_wei: int = 0
    """Fee that each juror of the prevailing ruling can collect."""
    collected: set[Address] = field(default_factory=set)
    """Jurors that collected it."""
    returned_wei: dict[int, int] = field(default_factory=dict)
    """Returned part of each bond, by its claim's place in `claims`."""
    fined: set[Address] = field(default_factory=set)
    """Signers and jurors that were fined in this case."""
    is_proven: bool = False
    """Whether somebody proved after its end that the batch holds what its first claim showed."""
    closed_tx: str | None = None
    """The closing transaction."""
    closed_at: int = 0
    """Time of its closing; 0 while it is open."""

    @property
    def is_summons(self) -> bool:
        """Whether it is a summons: nothing was recorded, because the run left the work unjudged."""
        return self.recorded == 0

    @property
    def closed(self) -> bool:
        """Whether it is closed."""
        return self.status is not CaseStatus.OPEN

    @property
    def overturned(self) -> bool:
        """Whether the jury's ruling stands in place of what was recorded."""
        return self.status is CaseStatus.OVERTURNED

    # What follows from the votes alone, whatever the court says that it is.

    @property
    def leading(self) -> int | None:
        """The ruling that prevails by votes; None while there is none, or several."""
        return prevailing(self.votes.values())

    @property
    def right(self) -> list[Address]:
        """The jurors that voted for the leading ruling, whatever their reasons."""
        if (leading := self.leading) is None:
            return []
        return [who for who, vote in self.votes.items() if kind_of(vote) == kind_of(leading)]

    @property
    def is_decided(self) -> bool:
        """Whether the leading ruling replaces the recorded one; a summons has none to replace."""
        leading = self.leading
        if not leading or is_unavailable(leading):
            return False
        return self.is_summons or not is_same(leading, self.recorded)


def split_signatures(joined: bytes) -> list[bytes]:
    """Return the 65-byte signatures of joined ones that the ledger accepted."""
    return [joined[i : i + 65] for i in range(0, len(joined), 65)]


class PostedRecords(Sequence[OutcomeRecord]):
    """A batch's outcome records as they were posted: bytes until somebody looks at all of them.

    Anybody can own a run and post its outcomes; a process looks at those of its own run.
    """

    __slots__ = ("_parsed", "data")

    def __init__(self, data: bytes) -> None:
        """Raises EncodingError when the ledger cannot have accepted the bytes."""
        if not data or len(data) % OutcomeRecord.SIZE:
            raise EncodingError(f"{len(data)} bytes are no outcome records")
        if not set(Verdict).issuperset(verdicts_in(data)):
            raise EncodingError("a record has no known verdict")
        self.data = data
        self._parsed: list[OutcomeRecord] | None = None

    def __len__(self) -> int:
        return len(self.data) // OutcomeRecord.SIZE

    @overload
    def __getitem__(self, place: int) -> OutcomeRecord: ...

    @overload
    def __getitem__(self, place: slice) -> list[OutcomeRecord]: ...

    def __getitem__(self, place: int | slice) -> OutcomeRecord | list[OutcomeRecord]:
        if self._parsed is not None or isinstance(place, slice):
            return self.parsed()[place]
        at = range(len(self))[place] * OutcomeRecord.SIZE
        return unpack_leniently(self.data[at : at + OutcomeRecord.SIZE])[0]

    def __iter__(self) -> Iterator[OutcomeRecord]:
        return iter(self.parsed())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PostedRecords) and self.data == other.data

    def __hash__(self) -> int:
        return hash(self.data)

    def parsed(self) -> list[OutcomeRecord]:
        """Return all records; they are kept."""
        if self._parsed is None:
            self._parsed = unpack_leniently(self.data)
        return self._parsed


def unpack_leniently(data: bytes) -> list[OutcomeRecord]:
    """Return the records that the ledger accepted; raises EncodingError for bytes it cannot accept.

    The ledger does not check reasons. An unknown reason is kept, by number and the name UNKNOWN_n,
    so that the record's bytes and leaf do not change.
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
    return replace(known, reason=lenient_reason(data[-1]))
