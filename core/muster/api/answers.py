"""The JSON answers of the orchestrator as types: it writes them, and clients parse them.

Parsing is total: anything but the documented form is a pydantic ValidationError, which the client
turns into an ApiError.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    WithJsonSchema,
    computed_field,
)

from muster.api.signing import signature_bytes
from muster.protocol.encoding import hex0x
from muster.protocol.errors import ApiError
from muster.protocol.ids import Address, Hash32, PolicyVersion, RunId, Step, to_address, to_hash32
from muster.protocol.messages import Reason, Submission, Ticket, Verdict

MAX_NETWORK_CHARS = 32 * 1024
"""Most characters of the document that describes a run's network."""
MAX_RELAYS = 64
"""Most relays that an orchestrator may name."""

EXAMPLE_ACCOUNT = "0x90F79bf6EB2c4f870365E785982E1f101E93b906"
EXAMPLE_HASH = "0x" + "5c" * 32
EXAMPLE_SIGNATURE = "0x" + "7f" * 64 + "1b"


def _hash(value: Any) -> Hash32:
    if not isinstance(value, (str, bytes)):
        raise ValueError(f"not a hash: {value!r}")
    return to_hash32(value)


def _bytes(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str) or not value.startswith("0x"):
        raise ValueError("not 0x hexadecimal")
    return bytes.fromhex(value[2:])


def _signature(value: Any) -> bytes:
    return value if isinstance(value, bytes) else signature_bytes(str(value))


def _submission(value: Any) -> Submission:
    return value if isinstance(value, Submission) else Submission.from_json(value)


def _ticket(value: Any) -> Ticket:
    return value if isinstance(value, Ticket) else Ticket.from_json(value)


def _text_schema(pattern: str, example: str) -> dict[str, Any]:
    return {"type": "string", "pattern": pattern, "examples": [example]}


def _object_schema(**properties: object) -> WithJsonSchema:
    return WithJsonSchema(
        {"type": "object", "properties": properties, "required": list(properties)}
    )


_UINT32 = {"type": "integer", "minimum": 0, "maximum": (1 << 32) - 1}
_UINT64 = {"type": "integer", "minimum": 0, "maximum": (1 << 64) - 1}
_ADDRESS = _text_schema("^0x[0-9a-fA-F]{40}$", EXAMPLE_ACCOUNT)
_HASH = _text_schema("^0x[0-9a-fA-F]{64}$", EXAMPLE_HASH)
_SLOT = {
    "run_id": _UINT64,
    "worker": _ADDRESS,
    "step": _UINT32,
    "index": _UINT32,
    "policy_version": _UINT32,
}

HexHash = Annotated[
    Hash32,
    PlainValidator(_hash),
    PlainSerializer(hex0x, return_type=str),
    WithJsonSchema(_HASH),
]
"""32 bytes, `0x` hexadecimal in JSON."""
HexBytes = Annotated[
    bytes,
    PlainValidator(_bytes),
    PlainSerializer(hex0x, return_type=str),
    WithJsonSchema(_text_schema("^0x([0-9a-fA-F]{2})*$", "0x00")),
]
"""Bytes, `0x` hexadecimal in JSON."""
HexSignature = Annotated[
    bytes,
    PlainValidator(_signature),
    PlainSerializer(hex0x, return_type=str),
    WithJsonSchema(_text_schema("^0x([0-9a-fA-F]{2}){65}$", EXAMPLE_SIGNATURE)),
]
"""65 bytes, `0x` hexadecimal in JSON."""
AccountAddress = Annotated[Address, BeforeValidator(to_address), WithJsonSchema(_ADDRESS)]
"""A checksummed account address."""
SubmissionJson = Annotated[
    Submission,
    PlainValidator(_submission),
    PlainSerializer(Submission.to_json),
    _object_schema(**_SLOT, file_hash=_HASH, rollouts=_UINT32, units=_UINT64),
]
"""A submission in its JSON form."""
TicketJson = Annotated[
    Ticket,
    PlainValidator(_ticket),
    PlainSerializer(Ticket.to_json),
    _object_schema(**_SLOT, policy_root=_HASH, beacon=_HASH, deadline=_UINT64),
]
"""A ticket in its JSON form."""
Url = Annotated[str, Field(max_length=2048, examples=["https://relay.example.org"])]
Wei = Annotated[str, Field(pattern="^[0-9]+$", examples=["48000000000000000"])]
"""An amount as decimal text, because it may be too large for JSON numbers."""
HashText = Annotated[str, Field(pattern="^0x[0-9a-f]{64}$", examples=[EXAMPLE_HASH])]
"""A file's hash as text, for people."""


class AnswerBody(BaseModel):
    """Base of JSON answers."""

    model_config = ConfigDict(frozen=True, extra="ignore", arbitrary_types_allowed=True)


class RunDocuments(AnswerBody):
    """Hashes of the documents that a run pins on chain; `/v1/documents/{hash}` serves each."""

    recipe: HexHash
    """Keccak-256 of the canonical recipe."""
    calibration: HexHash
    """Keccak-256 of the canonical calibration."""
    task_set: HexHash
    """Keccak-256 of the task set."""


class RunInfo(AnswerBody):
    """The information that a newcomer needs to take part in a run."""

    run_id: RunId
    chain_id: int
    """EIP-155 chain id."""
    ledger: AccountAddress
    """The ContributionLedger: verifying contract of tickets, submissions and requests."""
    orchestrator: AccountAddress
    """The account that signs tickets: the audience of signed requests."""
    documents: RunDocuments
    """Hashes of the pinned documents."""
    relays: list[Url] = Field(max_length=MAX_RELAYS)
    """URLs of relays that mirror policy weights."""
    origin: Annotated[str, Field(examples=["https://origin.example.org"])]
    """URL at which the trainer serves them."""
    step: Step
    """The training step whose rollouts are being collected."""
    policy_version: PolicyVersion | None
    """The newest policy version on chain, if there is one."""

    @property
    def policy_sources(self) -> tuple[str, ...]:
        """URLs that policies are fetched from: the relays, or the origin when there is none."""
        return tuple(self.relays) or ((self.origin,) if self.origin else ())


class SignedNetwork(AnswerBody):
    """The description of a run's network, signed by the run's orchestrator."""

    document: Annotated[str, Field(max_length=MAX_NETWORK_CHARS, examples=['{"chain_id":84532}'])]
    """JSON text of a `muster.api.network_document.NetworkPage`; exactly these bytes are signed."""
    signature: HexSignature
    """EIP-712 `NetworkDocument` by the orchestrator."""


class HeartbeatAnswer(AnswerBody):
    """The orchestrator's information for a node."""

    status: Annotated[str, Field(examples=["active"])]
    """Status of its worker on chain, lower case."""
    policy_version: PolicyVersion | None
    """The newest policy version on chain."""
    wants_hardware: bool = False
    """Whether the run has hardware requirements and this node has not described its machine."""


class Lease(AnswerBody):
    """A signed ticket."""

    ticket: TicketJson
    """The task and its deadline."""
    signature: HexSignature
    """EIP-712 `Ticket` by the orchestrator."""


@dataclass(frozen=True, slots=True)
class NoWork:
    """There is nothing to lease now."""

    retry_after_s: float
    """Seconds until the next request."""
    reason: str | None = None
    """The orchestrator's reason in one word, if there is work but not for this worker."""


class SubmissionState(AnswerBody):
    """The state of a submission."""

    state: Literal["received", "committed", "judged"]
    """Held by the orchestrator; in a batch on chain; with an outcome on chain."""
    batch_id: int | None = None
    """The batch, once committed."""
    position: int | None = None
    """Its place in the batch, once committed."""
    verdict: Verdict | None = None
    """The recorded decision, before any dispute, once judged."""
    reason: Reason | None = None
    """Why, when it is not Accepted."""


class BatchEntry(AnswerBody):
    """One submission of a batch, with the proof that it was allowed."""

    submission: SubmissionJson
    """The worker's claim."""
    signature: HexSignature
    """EIP-712 `Submission` by the node."""
    ticket: TicketJson | None
    """The ticket it fills; none when the worker committed directly, without the orchestrator."""
    ticket_signature: HexSignature | None
    """EIP-712 `Ticket` by the orchestrator."""
    received_at: int
    """Unix seconds (chain clock) at which the upload was complete."""


class BatchContents(AnswerBody):
    """A batch's submissions, in batch order."""

    batch_id: int
    root: HexHash
    """Merkle root over the submissions' leaves, as committed."""
    count: int
    """Submissions in the batch."""
    submissions: list[BatchEntry] = Field(max_length=4096)
    """In batch order."""


class CheckingAnswer(AnswerBody):
    """A validator's proof that it recomputed a batch."""

    validator: AccountAddress
    """Who."""
    records_hash: HexHash
    """Keccak-256 of the outcome records that it signed."""
    fingerprints_hash: HexHash
    """Committed hash of its fingerprints."""
    signature: HexSignature
    """EIP-712 `Checking`."""
    committed_at: int
    """Unix seconds at which it arrived."""
    fingerprints: HexBytes | None
    """The packed fingerprints, once sent."""


class CheckReportAnswer(AnswerBody):
    """A validator's report on another's fingerprints."""

    validator: AccountAddress
    """The validator whose fingerprints were compared."""
    reporter: AccountAddress
    """The validator that compared them."""
    compared: int
    """Submissions compared."""
    failed: int
    """Compared submissions whose fingerprints are wrong."""
    signature: HexSignature
    """EIP-712 `CheckReport` by the reporter."""


class BatchChecking(AnswerBody):
    """Everything the orchestrator has about how a batch was checked."""

    batch_id: int
    batch_root: HexHash
    """The batch's root at its commitment."""
    commitments: list[CheckingAnswer] = Field(max_length=1000)
    """By validator."""
    reports: list[CheckReportAnswer] = Field(max_length=1000)
    """By validator and reporter."""


class CommittedBatches(AnswerBody):
    """Batches that wait for outcomes."""

    batches: list[Annotated[int, Field(strict=True)]] = Field(max_length=1000)
    """Their ids, ascending."""
    called: list[Annotated[int, Field(strict=True)]] = Field(max_length=1000)
    """Number of called validators for each batch."""


class Received(AnswerBody):
    """An upload that was received."""

    submission_id: HexHash
    """Its id: the hash of its file."""


class OutcomesTaken(AnswerBody):
    """A validator's message about a batch was received."""

    batch_id: int


class SignedClaim(AnswerBody):
    """A submission with its signature."""

    submission: SubmissionJson
    """The worker's claim."""
    signature: HexSignature
    """EIP-712 `Submission` by the node."""


class Refusal(AnswerBody):
    """Why a request was not answered."""

    code: str = Field(pattern="^[a-z0-9_]{1,64}$", examples=["too_many_requests"])
    """One word for programs; docs/protocol.md section 11."""
    message: Annotated[str, Field(examples=["too many requests; the next may come in 0.20 s"])]
    """The fault, with the wrong value."""
    hint: str | None
    """The next step, if there is one."""
    held: SignedClaim | None = None
    """With `slot_taken`: the submission that fills the slot. Both together prove that the node
    signed two.
    """


class SlotTaken(ApiError):
    """The refusal of a submission whose slot `held` fills."""

    def __init__(self, message: str, held: SignedClaim, *, hint: str | None = None) -> None:
        super().__init__(message, status=409, code="slot_taken", hint=hint)
        self.held = held


class ErrorAnswer(AnswerBody):
    """The form of every error."""

    error: Refusal
    """Why."""


# The status of a run, for dashboards and people


class WorkerStatus(AnswerBody):
    """One worker."""

    worker: AccountAddress
    """The staking wallet."""
    worker_id: int
    """Its number."""
    node: AccountAddress
    """Its hot key."""
    status: Annotated[str, Field(examples=["active"])]
    """Active, jailed, exiting or banned."""
    stake_wei: Wei
    """Active stake."""
    accepted: int
    """Accepted submissions."""
    incomplete: int
    """Incomplete submissions."""
    rejected: int
    """Rejected submissions."""
    fraud: int
    """Fraudulent submissions."""
    units: int
    """Units of the accepted ones."""
    earned_wei: Wei
    """Reward for the accepted units."""
    paid_wei: Wei
    """Reward already claimed."""
    policy_version: int | None
    """The policy that it reports as loaded."""
    state: Annotated[str | None, Field(examples=["generating"])]
    """The activity that it reports."""
    seen_at: int | None
    """Wall-clock time of its last heartbeat."""
    life: Annotated[str, Field(examples=["active"])]
    """Its life-cycle state: discovered, active, unhealthy, dead, jailed, exiting or banned."""


class SlashStatus(AnswerBody):
    """One executed fraud verdict."""

    worker: AccountAddress
    """The worker that lost stake."""
    amount_wei: Wei
    """The amount."""
    reason: Annotated[str | None, Field(examples=["TOPLOC_MISMATCH"])]
    """The failed check."""
    state: Annotated[str, Field(examples=["escrowed"])]
    """Escrowed, released or restored."""
    tx_hash: Annotated[str, Field(examples=[EXAMPLE_HASH])]
    """The executing transaction."""
    settled_tx: Annotated[str | None, Field(examples=[None])]
    """The transaction that released or restored it."""
    submission_id: HashText | None
    """The fraudulent submission; None for a validator's fault."""


class SubmissionStatus(AnswerBody):
    """One received submission."""

    submission_id: HashText
    """Its file hash."""
    worker: AccountAddress
    step: int
    """Rollout step."""
    index: int
    """Slot number."""
    state: Annotated[str, Field(examples=["judged"])]
    """Received, committed or judged."""
    batch_id: int | None
    """Its batch."""
    verdict: Annotated[str | None, Field(examples=["FRAUD"])]
    """The verdict that stands."""
    reason: Annotated[str | None, Field(examples=["TOPLOC_MISMATCH"])]
    """Why, when it is not Accepted."""


class PartStatus(AnswerBody):
    """One part of a run's task set."""

    name: Annotated[str, Field(examples=["math"])]
    """Its name."""
    weight: int
    """Its weight at the rollout step of the next ticket."""
    reward: float | None
    """Mean task reward of the newest step that consumed some of it."""
    kept: float | None
    """Share of its groups in that step that was trained on."""
    length: float | None
    """Mean tokens of its completions in that step."""
    eval_reward: float | None
    """Newest evaluation on its held-out problems."""


class RunStatus(AnswerBody):
    """The run's status: what every page of the dashboard begins with."""

    run_id: int
    name: Annotated[str, Field(examples=["sort digits"])]
    """Its name, for people."""
    phase: Annotated[str, Field(examples=["collecting"])]
    """Waiting for the base model or for funds, collecting, paused or finished."""
    step: int
    """Training step whose submissions are being collected."""
    steps: int
    """Training steps of the run; 0 until stopped."""
    policy_version: int | None
    """The newest policy version."""
    filled: int
    """Accepted submissions of the step so far."""
    submissions_per_step: int
    """Accepted submissions a step needs."""
    dropped: int
    """Accepted submissions that were too old when their turn came."""
    leasing_step: int
    """Rollout step of the next ticket."""
    received: int
    """Submissions received."""
    batches_committed: int
    """Batches on chain."""
    batches_judged: int
    """Batches with outcomes."""
    validators: list[AccountAddress]
    """The current validators."""
    quorum: int
    """Number of validators that must agree."""
    absent_validators: Annotated[list[AccountAddress], Field(examples=[[]])]
    """Validators that missed a call's timeout and have been silent since."""
    funded_wei: Wei
    """Reward deposited."""
    paid_wei: Wei
    """Reward paid."""
    workers_total: int
    """Registered workers."""
    workers: list[WorkerStatus]
    """Those with the most units first."""
    reward: list[tuple[int, float]]
    """Mean task reward by training step."""
    eval_reward: list[tuple[int, float]]
    """Evaluation reward by policy version."""
    parts: list[PartStatus] = Field(default=[], max_length=16)
    """Parts of the task set; none in a run without a mixture."""
    slashes: list[SlashStatus]
    """Latest first."""
    submissions: list[SubmissionStatus]
    """Latest first."""
    slashing_paused_until: int | None = None
    """When the pause of slashing ends, by the chain's clock; None while there is none."""
    slashing_paused_for: str | None = None
    """The cause of the pause, and the failed check's reason if there is one."""


class Watched(AnswerBody):
    """Results of one validator's proofs of checking, over the newest judged batches."""

    validator: AccountAddress
    """Who."""
    signed: int
    """Outcomes on chain that it signed; the newest count only once they are proven."""
    proven: int
    """Signed outcomes with fingerprints that it had committed to before."""
    compared: int
    """Submissions that another validator compared."""
    failed: int
    """Compared submissions whose fingerprints are wrong."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def is_suspect(self) -> bool:
        """Whether the run's owner should examine it: fingerprints are wrong or often missing."""
        return self.failed > 0 or 2 * self.proven < self.signed


class WatchedValidators(AnswerBody):
    """Recent results of every validator's proofs of checking."""

    validators: list[Watched] = Field(max_length=1000)
    """The run's validators."""
