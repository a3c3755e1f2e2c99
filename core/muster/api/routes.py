"""Every route of the orchestrator for programs: who signs, what goes in and out, who calls it.

Bodies of requests stand first: how large they may be (docs/protocol.md section 11), and what their
JSON holds. The client writes them, the orchestrator parses them.

One table for three readers: the orchestrator's OpenAPI document is completed from it, the tests
hold the client to it, and newcomers copy the examples, which are made of the typed bodies. A test
fails when the application has a route that is not here.
"""

from __future__ import annotations

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

MAX_FILE_BYTES = 64 * 1024 * 1024
"""Largest submission file: `muster.protocol.rollouts.MAX_FILE_BYTES`, without its pyarrow."""
MAX_FIGURES = 192
"""Of a training step or evaluation: a mixture has some for each part."""
MAX_JSON_BYTES = 256 * 1024
"""Largest JSON body of a request."""
MAX_RECORDS_BYTES = 2 * 1024 * 1024
"""Largest body of an outcomes post: 4096 records of 56 bytes as hexadecimal fit four times."""
MAX_FINGERPRINTS_BODY_BYTES = 8 * 1024 * 1024
"""Largest body that shows fingerprints: of 8 million completion tokens, as hexadecimal."""
MAX_HEADER_JSON_BYTES = 2 * 1024
"""Largest `x-muster-submission` header."""

Count = Annotated[int, Field(ge=0, lt=1 << 32)]
"""A uint32."""


class Body(BaseModel):
    """Base of JSON bodies. None holds what a database, a terminal or JSON cannot."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="after")
    def _refuse_faults(self) -> Self:
        for name, value in self.__dict__.items():
            if fault := message_fault(value):
                raise ValueError(f"{name} {fault}")
        return self


class HardwareBody(Body):
    """What a node says its machine has."""

    report: dict[str, Any]
    """The report in its JSON form."""
    signature: HexSignature
    """EIP-712 `HardwareReport` by the node."""


class HeartbeatBody(Body):
    """What a node says of itself."""

    run_id: int
    policy_version: Count | None
    """The policy it has loaded."""
    state: Annotated[str, Field(max_length=32, examples=["generating"])]
    """What it does."""
    software: Annotated[str, Field(max_length=64, examples=["muster 0.1.0"])]
    """Its software and version."""
    hardware: HardwareBody | None = None
    """What its machine has, once and when it is asked for."""


class HeldTicket(Body):
    """A ticket that somebody works on."""

    step: Count
    """Rollout step of its slot."""
    index: Count
    """Number of its slot."""


class LeaseBody(Body):
    """Which run's work is asked for."""

    run_id: int
    holding: Annotated[tuple[HeldTicket, ...], Field(max_length=64)] = ()
    """Open tickets that the node works on: it asks for another one."""
    policy_version: Count | None = None
    """The version that it holds while a newer one is on its way to it: the ticket names it, where a
    step may still train on it."""


class OutcomesBody(Body):
    """A validator's outcomes of one batch."""

    records: HexBytes
    """The packed records; none when nothing of the batch can be had."""
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
    """Name to number."""


class EvaluationBody(Body):
    """Figures of one policy version on held-out problems."""

    run_id: Count
    """Run of the policy: a signature for one run is none for another."""
    policy_version: Count
    """Version that was evaluated."""
    manifest_root: HexHash
    """Its root on chain: which weights were evaluated."""
    metrics: Annotated[
        dict[
            Annotated[str, Field(pattern=r"^eval_[a-z0-9_]{1,59}$")],
            Annotated[float, Field(allow_inf_nan=False)],
        ],
        Field(max_length=MAX_FIGURES, examples=[{"eval_reward": 0.62, "eval_problems": 256}]),
    ]
    """Name to number."""


class CheckingBody(Body):
    """A validator's commitment to its fingerprints of one batch."""

    records_hash: HexHash
    """Keccak-256 of the outcomes that go with them."""
    fingerprints_hash: HexHash
    """What they hash to."""
    signature: HexSignature
    """EIP-712 `Checking`."""


class FingerprintsBody(Body):
    """The fingerprints that a validator committed to."""

    fingerprints: HexBytes
    """Packed, in batch order."""


class ReportBody(Body):
    """What one validator says about another's fingerprints."""

    batch_root: HexHash
    """The batch's root."""
    validator: AccountAddress
    """Whose they are."""
    fingerprints_hash: HexHash
    """What they hash to."""
    compared: Count
    """Submissions compared."""
    failed: Count
    """Those whose fingerprints come from no recomputation."""
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
    """What a route answers under one status."""

    status: int
    """HTTP status."""
    kind: type[BaseModel] | None = None
    """Its type, when it is JSON."""
    media: str | None = None
    """Its media type, None without content."""
    text: str | None = None
    """An example of content that is not JSON."""

    @property
    def example(self) -> Any:
        """What it may look like."""
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
    """Everything but errors."""
    signer: Signer = "nobody"
    """Whose signature it needs."""
    body: type[Body] | None = None
    """The type of its JSON body."""
    body_media: str | None = None
    """The media type of a body that is no JSON."""
    without_client: str = ""
    """Why the client has no method for it."""

    @property
    def body_example(self) -> Any:
        """What its body may look like."""
        return "PAR1…" if self.body is None else example_of(self.body)


@cache
def example_of(kind: type[BaseModel]) -> Any:
    """Return what a body may look like, as JSON has it; of a request without what is optional."""
    schema = kind.model_json_schema()
    value = kind.model_validate(_example(schema, schema.get("$defs", {}), ""))
    return value.model_dump(mode="json", exclude_unset=issubclass(kind, Body))


def _example(schema: dict[str, Any], definitions: dict[str, Any], name: str) -> Any:
    """Return an example of a JSON schema, for the field of a name: what is required, once."""
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
    """Return the route that takes in what a validator says of a batch."""
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
