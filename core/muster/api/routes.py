"""Every route of the orchestrator for programs: its signer, its body, its answers, its caller.

First come the bodies of requests: their size limits (docs/protocol.md section 11) and their JSON.
The client writes them, the orchestrator parses them.

The table has three uses: it completes the orchestrator's OpenAPI document, tests check the client
against it, and newcomers copy its examples, which are made from the typed bodies. A test fails when
the application has a route that is not here.
"""

from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from muster.api.answers import (
    EXAMPLE_HASH,
    AccountAddress,
    BatchChecking,
    BatchContents,
    BatchEntry,
    CommittedBatches,
    HeartbeatAnswer,
    HexBytes,
    HexHash,
    HexSignature,
    Lease,
    OutcomesTaken,
    Received,
    RunInfo,
    RunStatus,
    SignedNetwork,
    SubmissionState,
    WatchedValidators,
)
from muster.protocol.encoding import message_fault

MAX_FIGURES = 192
"""Most figures of a training step or evaluation: a mixture has several for each part."""
MAX_JSON_BYTES = 256 * 1024
"""Largest JSON body of a request."""
MAX_RECORDS_BYTES = 2 * 1024 * 1024
"""Largest body of an outcomes post: four times 4096 records of 56 bytes in hexadecimal."""
MAX_FINGERPRINTS_BODY_BYTES = 8 * 1024 * 1024
"""Largest body with fingerprints: those of 8 million completion tokens, in hexadecimal."""
MAX_HEADER_JSON_BYTES = 2 * 1024
"""Largest `x-muster-submission` header."""

Count = Annotated[int, Field(ge=0, lt=1 << 32)]
"""A uint32."""


class Body(BaseModel):
    """Base of JSON bodies. Values that a database, a terminal or JSON cannot hold are refused.

    An orchestrator of an earlier version refuses unknown fields: give a new field a default, and
    send it only where it is set (the client leaves out fields that were not).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="after")
    def _refuse_faults(self) -> Self:
        for name, value in self.__dict__.items():
            if fault := message_fault(value):
                raise ValueError(f"{name} {fault}")
        return self


class HardwareBody(Body):
    """A node's description of its machine."""

    report: dict[str, Any]
    """The report in its JSON form."""
    signature: HexSignature
    """EIP-712 `HardwareReport` by the node."""


class HeartbeatBody(Body):
    """A node's report about itself."""

    run_id: int
    policy_version: Count | None
    """The policy it has loaded."""
    state: Annotated[str, Field(max_length=32, examples=["generating"])]
    """Its present activity."""
    software: Annotated[str, Field(max_length=64, examples=["muster 0.1.0"])]
    """Its software and version."""
    hardware: HardwareBody | None = None
    """Its machine; sent once, and when the orchestrator wants it."""


class HeldTicket(Body):
    """A ticket that a node is working on."""

    step: Count
    """Rollout step of its slot."""
    index: Count
    """Number of its slot."""


class LeaseBody(Body):
    """A request for work of a run."""

    run_id: int
    holding: Annotated[tuple[HeldTicket, ...], Field(max_length=64)] = ()
    """Open tickets that the node is working on: it wants another one."""
    policy_version: Count | None = None
    """The version that the node has loaded while it fetches a newer one: the ticket names it, if a
    step may still train on it."""


class OutcomesBody(Body):
    """A validator's outcomes of one batch."""

    records: HexBytes
    """The packed records; empty when the batch's data cannot be obtained."""
    signature: HexSignature
    """EIP-712 `Outcomes`."""


class MetricsBody(Body):
    """Figures of one training step or evaluation."""

    step: Count
    """Training step, or policy version evaluated."""
    metrics: Annotated[
        dict[
            Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")],
            Annotated[float, Field(allow_inf_nan=False)],
        ],
        Field(max_length=MAX_FIGURES, examples=[{"reward": 0.62, "grad_norm": 0.08}]),
    ]
    """Figures by name."""


class EvaluationBody(Body):
    """Figures of one policy version on held-out problems."""

    run_id: Count
    """Run of the policy, so that the signature is valid for this run only."""
    policy_version: Count
    """Version that was evaluated."""
    manifest_root: HexHash
    """The version's root on chain, which identifies the evaluated weights."""
    metrics: Annotated[
        dict[
            Annotated[str, Field(pattern=r"^eval_[a-z0-9_]{1,59}$")],
            Annotated[float, Field(allow_inf_nan=False)],
        ],
        Field(max_length=MAX_FIGURES, examples=[{"eval_reward": 0.62, "eval_problems": 256}]),
    ]
    """Figures by name."""


class CheckingBody(Body):
    """A validator's commitment to its fingerprints of one batch."""

    records_hash: HexHash
    """Keccak-256 of the outcome records that it signed."""
    fingerprints_hash: HexHash
    """Hash of the fingerprints."""
    signature: HexSignature
    """EIP-712 `Checking`."""


class FingerprintsBody(Body):
    """The fingerprints that a validator committed to."""

    fingerprints: HexBytes
    """Packed, in batch order."""


class ReportBody(Body):
    """A validator's report on another's fingerprints."""

    batch_root: HexHash
    """The batch's root."""
    validator: AccountAddress
    """The validator whose fingerprints were compared."""
    fingerprints_hash: HexHash
    """Hash of the fingerprints."""
    compared: Count
    """Submissions compared."""
    failed: Count
    """Compared submissions whose fingerprints are wrong."""
    signature: HexSignature
    """EIP-712 `CheckReport`."""


# ---------------------------------------------------------------------- the table

Signer = Literal[
    "nobody", "node", "validator", "trainer", "evaluator", "validator, trainer or juror"
]

PARQUET = "application/vnd.apache.parquet"
BYTES = "application/octet-stream"
JSON = "application/json"

PARAMETERS = {
    "run_id": 1,
    "step": 4,
    "index": 0,
    "batch_id": 17,
    "file_hash": EXAMPLE_HASH,
    "document_hash": EXAMPLE_HASH,
    "leaf": EXAMPLE_HASH,
    "state": "committed",
    "after": 16,
}
"""An example of each parameter of a path or query."""
_NUMBERS = {
    **PARAMETERS,
    "policy_version": 3,
    "rollouts": 64,
    "units": 2048,
    "chain_id": 84532,
    "received_at": 1_763_800_412,
    "committed_at": 1_763_800_520,
    "deadline": 1_763_800_600,
    "steps": 20,
    "failed": 0,
}
"""Examples of integers, by the name of their field."""
_OTHERS = {"integer": 1, "number": 0.5, "string": "text", "boolean": False, "null": None}
"""Examples by JSON type."""


@dataclass(frozen=True, slots=True)
class RouteAnswer:
    """A route's answer with one status."""

    status: int
    """HTTP status."""
    kind: type[BaseModel] | None = None
    """Type of a JSON answer."""
    media: str | None = None
    """Media type; None without content."""
    text: str | None = None
    """An example of content that is not JSON."""

    @property
    def example(self) -> Any:
        """An example of the answer."""
        return self.text if self.kind is None else example_of(self.kind)


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path."""

    method: str
    """HTTP method."""
    path: str
    """Path, parameters in braces."""
    client: str | None
    """The method of `OrchestratorApi` that calls it."""
    answers: tuple[RouteAnswer, ...]
    """All answers except errors."""
    signer: Signer = "nobody"
    """Required signer."""
    body: type[Body] | None = None
    """The type of its JSON body."""
    body_media: str | None = None
    """The media type of a body that is not JSON."""
    without_client: str = ""
    """Why the client has no method for it."""

    @property
    def body_example(self) -> Any:
        """An example of its body."""
        return "PAR1…" if self.body is None else example_of(self.body)


@cache
def example_of(kind: type[BaseModel]) -> Any:
    """Return an example of a body as JSON values; for a request without its optional fields."""
    schema = kind.model_json_schema()
    value = kind.model_validate(_example(schema, schema.get("$defs", {}), ""))
    return value.model_dump(mode="json", exclude_unset=issubclass(kind, Body))


def _example(schema: dict[str, Any], definitions: dict[str, Any], name: str) -> Any:
    """Return an example of a JSON schema for a named field, with required parts only."""
    if "$ref" in schema:
        return _example(definitions[schema["$ref"].rpartition("/")[2]], definitions, name)
    for member in ("examples", "enum"):
        if member in schema:
            return schema[member][0]
    if "anyOf" in schema:
        return _example(schema["anyOf"][0], definitions, name)
    if schema["type"] == "object":
        fields = schema["properties"]
        return {each: _example(fields[each], definitions, each) for each in schema["required"]}
    if schema["type"] == "array":
        parts = schema.get("prefixItems") or [schema["items"]]
        return [_example(part, definitions, "") for part in parts]
    if schema["type"] == "integer" and name in _NUMBERS:
        return _NUMBERS[name]
    return _OTHERS[schema["type"]]


def _json(kind: type[BaseModel], status: int = 200) -> RouteAnswer:
    return RouteAnswer(status, kind, JSON)


def _text(text: str, kind: str = "plain") -> RouteAnswer:
    return RouteAnswer(200, None, f"text/{kind}", text)


def _word_on_a_batch(what: str, client: str, body: type[Body]) -> Route:
    """Return the route for a validator's message about a batch."""
    path = f"/v1/batches/{{batch_id}}/{what}"
    taken = _json(OutcomesTaken, 202)
    return Route("POST", path, client, (taken,), signer="validator", body=body)


ROUTES = (
    Route("GET", "/v1/runs/{run_id}", "run_info", (_json(RunInfo),)),
    Route(
        "GET",
        "/v1/runs/{run_id}/step",
        None,
        (_text("4"),),
        without_client="for programs that ask a step counter; run_info has it with the rest",
    ),
    Route("GET", "/v1/network", "network", (_json(SignedNetwork),)),
    Route(
        "GET",
        "/v1/documents/{document_hash}",
        "document",
        (RouteAnswer(200, None, BYTES, "{}"), RouteAnswer(206, None, BYTES, "{}")),
    ),
    Route(
        "POST",
        "/v1/heartbeat",
        "heartbeat",
        (_json(HeartbeatAnswer),),
        signer="node",
        body=HeartbeatBody,
    ),
    Route(
        "POST",
        "/v1/leases",
        "lease",
        (_json(Lease), RouteAnswer(204)),
        signer="node",
        body=LeaseBody,
    ),
    Route(
        "PUT",
        "/v1/submissions/{run_id}/{step}/{index}",
        "submit",
        (_json(Received, 202),),
        signer="node",
        body_media=PARQUET,
    ),
    Route("GET", "/v1/submissions/{file_hash}", "submission_state", (_json(SubmissionState),)),
    Route("GET", "/v1/batches", "called", (_json(CommittedBatches),), signer="validator"),
    Route("GET", "/v1/batches/{batch_id}", "batch", (_json(BatchContents),)),
    _word_on_a_batch("outcomes", "post_outcomes", OutcomesBody),
    Route("GET", "/v1/checking", "watched", (_json(WatchedValidators),)),
    Route("GET", "/v1/batches/{batch_id}/checking", "checking", (_json(BatchChecking),)),
    _word_on_a_batch("checking", "post_checking", CheckingBody),
    _word_on_a_batch("fingerprints", "post_fingerprints", FingerprintsBody),
    _word_on_a_batch("reports", "post_check_report", ReportBody),
    Route(
        "GET",
        "/v1/files/{file_hash}",
        "file",
        (
            RouteAnswer(200, None, PARQUET, "PAR1…"),
            RouteAnswer(206, None, PARQUET, "…"),
            RouteAnswer(307),
        ),
        signer="validator, trainer or juror",
    ),
    Route(
        "GET",
        "/v1/work/{leaf}",
        None,
        (_json(BatchEntry),),
        without_client="asked of sources, of which an orchestrator is one: muster.client.sources",
    ),
    Route(
        "POST",
        "/v1/metrics",
        "post_metrics",
        (RouteAnswer(204),),
        signer="trainer",
        body=MetricsBody,
    ),
    Route(
        "POST",
        "/v1/evaluations",
        "post_evaluation",
        (RouteAnswer(204),),
        signer="evaluator",
        body=EvaluationBody,
    ),
    Route("GET", "/v1/status", "status", (_json(RunStatus),)),
    Route(
        "GET",
        "/v1/events",
        "events",
        (_text('id: 7\nevent: status\ndata: {"run_id":1}\n\n', "event-stream"),),
    ),
    Route(
        "GET",
        "/healthz",
        None,
        (_text("ok"),),
        without_client="asked by process supervisors and reverse proxies, which speak plain HTTP",
    ),
)
