"""The JSON answers of the orchestrator, typed: it writes them with these, clients parse with them.

Parsing is total: anything else than the documented form is a pydantic ValidationError, which the
client turns into an ApiError.
"""

from __future__ import annotations

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
)

from muster.api.limits import MAX_NETWORK_CHARS, MAX_RELAYS
from muster.api.signing import signature_bytes
from muster.protocol.encoding import hex0x
from muster.protocol.ids import Address, Hash32, PolicyVersion, RunId, Step, to_address, to_hash32
from muster.protocol.messages import Reason, Submission, Ticket, Verdict


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


def _hex_schema(bytes_: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "pattern": f"^0x([0-9a-fA-F]{{2}}){bytes_}$"})


def _object_schema(**properties: object) -> WithJsonSchema:
    return WithJsonSchema(
        {"type": "object", "properties": properties, "required": list(properties)}
    )


_UINT32 = {"type": "integer", "minimum": 0, "maximum": (1 << 32) - 1}
_UINT64 = {"type": "integer", "minimum": 0, "maximum": (1 << 64) - 1}
_ADDRESS = {"type": "string", "pattern": "^0x[0-9a-fA-F]{40}$"}
_HASH = {"type": "string", "pattern": "^0x[0-9a-fA-F]{64}$"}

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
    _hex_schema("*"),
]
"""Bytes, `0x` hexadecimal in JSON."""
HexSignature = Annotated[
    bytes,
    PlainValidator(_signature),
    PlainSerializer(hex0x, return_type=str),
    _hex_schema("{65}"),
]
"""65 bytes, `0x` hexadecimal in JSON."""
AccountAddress = Annotated[Address, BeforeValidator(to_address), WithJsonSchema(_ADDRESS)]
"""A checksummed account address."""
SubmissionJson = Annotated[
    Submission,
    PlainValidator(_submission),
    PlainSerializer(Submission.to_json),
    _object_schema(
        run_id=_UINT64,
        worker=_ADDRESS,
        step=_UINT32,
        index=_UINT32,
        policy_version=_UINT32,
        file_hash=_HASH,
        rollouts=_UINT32,
        units=_UINT64,
    ),
]
"""A submission in its JSON form."""
TicketJson = Annotated[
    Ticket,
    PlainValidator(_ticket),
    PlainSerializer(Ticket.to_json),
    _object_schema(
        run_id=_UINT64,
        worker=_ADDRESS,
        step=_UINT32,
        index=_UINT32,
        policy_version=_UINT32,
        policy_root=_HASH,
        beacon=_HASH,
        deadline=_UINT64,
    ),
]
"""A ticket in its JSON form."""


class AnswerBody(BaseModel):
    """Base of JSON answers."""

    model_config = ConfigDict(frozen=True, extra="ignore", arbitrary_types_allowed=True)


class RunDocuments(AnswerBody):
    """Hashes of the documents a run pins on chain; each is served by `/v1/documents/{hash}`."""

    recipe: HexHash
    """Keccak-256 of the canonical recipe."""
    calibration: HexHash
    """Keccak-256 of the canonical calibration."""
    task_set: HexHash
    """Keccak-256 of the task set."""


class RunInfo(AnswerBody):
    """What a newcomer needs to take part in a run."""

    run_id: RunId
    """The run."""
    chain_id: int
    """EIP-155 chain id."""
    ledger: AccountAddress
    """The ContributionLedger: verifying contract of tickets, submissions and requests."""
    orchestrator: AccountAddress
    """The account that signs tickets: the audience of signed requests."""
    documents: RunDocuments
    """What the chain pins."""
    relays: list[Annotated[str, Field(max_length=2048)]] = Field(max_length=MAX_RELAYS)
    """Where policy weights are mirrored."""
    origin: str
    """Where the trainer serves them."""
    step: Step
    """The training step whose rollouts are being collected."""
    policy_version: PolicyVersion | None
    """The newest policy version on chain, if there is one."""


class SignedNetwork(AnswerBody):
    """Where a run's network is, with the word of the run's orchestrator for it."""

    document: Annotated[str, Field(max_length=MAX_NETWORK_CHARS)]
    """JSON text of a `muster.api.network.NetworkPage`; these very bytes are signed."""
    signature: HexSignature
    """EIP-712 `NetworkDocument` by the orchestrator."""


class HeartbeatAnswer(AnswerBody):
    """What the orchestrator knows about the node."""

    status: str
    """Status of its worker on chain, lower case."""
    policy_version: PolicyVersion | None
    """The newest policy version on chain."""
    wants_hardware: bool = False
    """Whether the run asks something of machines, and this one has not said what it is."""


class Lease(AnswerBody):
    """A signed ticket."""

    ticket: TicketJson
    """What to do, and by when."""
    signature: HexSignature
    """EIP-712 `Ticket` by the orchestrator."""


@dataclass(frozen=True, slots=True)
class NoWork:
    """There is nothing to lease now."""

    retry_after_s: float
    """When to ask again."""
    reason: str | None = None
    """One word of the orchestrator's, when there is work but not for this worker."""


class SubmissionState(AnswerBody):
    """How far a submission has come."""

    state: Literal["received", "committed", "judged"]
    """Held by the orchestrator; in a batch on chain; with an outcome on chain."""
    batch_id: int | None = None
    """The batch, once committed."""
    position: int | None = None
    """Its place in the batch, once committed."""
    verdict: Verdict | None = None
    """The decision, once judged."""
    reason: Reason | None = None
    """Why, when it is not Accepted."""


class BatchEntry(AnswerBody):
    """One submission of a batch, with what proves that it was allowed."""

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
    """The batch."""
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
    """Keccak-256 of the outcomes it goes with."""
    fingerprints_hash: HexHash
    """What it committed to."""
    signature: HexSignature
    """EIP-712 `Checking`."""
    committed_at: int
    """Unix seconds at which it arrived."""
    fingerprints: HexBytes | None
    """Packed, once shown."""


class CheckReportAnswer(AnswerBody):
    """What a validator found about another's fingerprints."""

    validator: AccountAddress
    """Whose fingerprints."""
    reporter: AccountAddress
    """Who compared them."""
    compared: int
    """Submissions compared."""
    failed: int
    """Those whose fingerprints come from no recomputation."""
    signature: HexSignature
    """EIP-712 `CheckReport` by the reporter."""


class BatchChecking(AnswerBody):
    """Everything the orchestrator has about how a batch was checked."""

    batch_id: int
    """The batch."""
    batch_root: HexHash
    """The root it was committed with."""
    commitments: list[CheckingAnswer] = Field(max_length=1000)
    """By validator."""
    reports: list[CheckReportAnswer] = Field(max_length=1000)
    """By validator and reporter."""


class CommittedBatches(AnswerBody):
    """Batches that wait for outcomes."""

    batches: list[Annotated[int, Field(strict=True)]] = Field(max_length=1000)
    """Their ids, ascending."""
    called: list[Annotated[int, Field(strict=True)]] = Field(max_length=1000)
    """How many validators are called, for each."""


class Received(AnswerBody):
    """An upload that was taken in."""

    submission_id: HexHash
    """Its id: the hash of its file."""


class OutcomesTaken(AnswerBody):
    """What a validator says of a batch was taken in."""

    batch_id: int
    """The batch."""


class Refusal(AnswerBody):
    """Why a request was not answered."""

    code: str = Field(pattern="^[a-z0-9_]{1,64}$")
    """One word for programs; docs/protocol.md section 11."""
    message: str
    """What was wrong, with which value."""
    hint: str | None
    """What to do next, when there is something."""


class ErrorAnswer(AnswerBody):
    """The form of every error."""

    error: Refusal
    """Why."""
