"""Every route of the orchestrator for programs: who signs, what goes in and out, who calls it.

One table for three readers: the orchestrator's OpenAPI document is completed from it, the tests
hold the client to it, and the examples are what a newcomer copies. A route that is in the
application and not here fails a test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel

from muster.api.answers import (
    BatchChecking,
    BatchContents,
    BatchEntry,
    CommittedBatches,
    HeartbeatAnswer,
    Lease,
    OutcomesTaken,
    Received,
    RunInfo,
    SignedNetwork,
    SubmissionState,
)
from muster.api.requests import (
    CheckingBody,
    FingerprintsBody,
    HeartbeatBody,
    LeaseBody,
    MetricsBody,
    OutcomesBody,
    ReportBody,
)
from muster.api.status import RunStatus, WatchedValidators

Signer = Literal["nobody", "node", "validator", "trainer", "validator, trainer or juror"]

PARQUET = "application/vnd.apache.parquet"
BYTES = "application/octet-stream"
JSON = "application/json"

WORKER = "0x90F79bf6EB2c4f870365E785982E1f101E93b906"
VALIDATOR = "0x70997970C51812dc3A010C7d01b50e0d17dc79C8"
HASH = "0x" + "5c" * 32
SIGNATURE = "0x" + "7f" * 64 + "1b"
SUBMISSION = {
    "run_id": 1,
    "worker": WORKER,
    "step": 4,
    "index": 0,
    "policy_version": 3,
    "file_hash": HASH,
    "rollouts": 64,
    "units": 2048,
}
TICKET = {
    "run_id": 1,
    "worker": WORKER,
    "step": 4,
    "index": 0,
    "policy_version": 3,
    "policy_root": "0x" + "2b" * 32,
    "beacon": "0x" + "9e" * 32,
    "deadline": 1_763_800_600,
}

ENTRY = {
    "submission": SUBMISSION,
    "signature": SIGNATURE,
    "ticket": TICKET,
    "ticket_signature": SIGNATURE,
    "received_at": 1_763_800_412,
}

STATUS = {
    "run_id": 1,
    "name": "sort digits",
    "phase": "collecting",
    "step": 4,
    "steps": 20,
    "policy_version": 3,
    "filled": 5,
    "submissions_per_step": 8,
    "dropped": 0,
    "leasing_step": 4,
    "received": 30,
    "batches_committed": 18,
    "batches_judged": 17,
    "validators": [VALIDATOR],
    "quorum": 1,
    "absent_validators": [],
    "funded_wei": "1000000000000000000",
    "paid_wei": "48000000000000000",
    "workers_total": 1,
    "workers": [
        {
            "worker": WORKER,
            "worker_id": 1,
            "node": "0x9965507D1a55bcC2695C58ba16FB37d819B0A4dc",
            "status": "active",
            "stake_wei": "20000000000000000000",
            "accepted": 29,
            "incomplete": 0,
            "rejected": 0,
            "fraud": 1,
            "units": 59392,
            "earned_wei": "59392000000000000",
            "paid_wei": "48000000000000000",
            "policy_version": 3,
            "state": "generating",
            "seen_at": 1_763_800_405,
            "life": "active",
        }
    ],
    "reward": [[1, 0.21], [2, 0.34], [3, 0.62]],
    "eval_reward": [[0, 0.2], [3, 0.6]],
    "slashes": [
        {
            "worker": WORKER,
            "amount_wei": "1000000000000000000",
            "reason": "TOPLOC_MISMATCH",
            "state": "escrowed",
            "tx_hash": "0x" + "ee" * 32,
            "settled_tx": None,
            "submission_id": HASH,
        }
    ],
    "submissions": [
        {
            "submission_id": HASH,
            "worker": WORKER,
            "step": 4,
            "index": 0,
            "state": "judged",
            "batch_id": 17,
            "verdict": "FRAUD",
            "reason": "TOPLOC_MISMATCH",
        }
    ],
    "slashing_paused_until": None,
    "slashing_paused_for": None,
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a route answers under one status."""

    status: int
    """HTTP status."""
    kind: type[BaseModel] | None = None
    """Its type, of a JSON answer that has one."""
    media: str | None = None
    """Its media type, None without content."""
    example: Any = None
    """What it may look like."""


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path."""

    method: str
    """HTTP method."""
    path: str
    """Path, parameters in braces."""
    client: str | None
    """The method of `OrchestratorApi` that calls it."""
    answers: tuple[Answer, ...]
    """Everything but errors."""
    signer: Signer = "nobody"
    """Whose signature it needs."""
    body: type[BaseModel] | None = None
    """The type of its JSON body."""
    body_media: str | None = None
    """The media type of a body that is no JSON."""
    body_example: Any = None
    """A body."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """An example of each parameter of path and query."""
    without_client: str = ""
    """Why the client has no method for it."""


def _json(status: int, kind: type[BaseModel] | None, example: Any) -> Answer:
    return Answer(status, kind, JSON, example)


ROUTES = (
    Route(
        "GET",
        "/v1/runs/{run_id}",
        "run_info",
        (
            _json(
                200,
                RunInfo,
                {
                    "run_id": 1,
                    "chain_id": 84532,
                    "ledger": "0x5FbDB2315678afecb367f032d93F642f64180aa3",
                    "orchestrator": "0x70997970C51812dc3A010C7d01b50e0d17dc79C8",
                    "documents": {
                        "recipe": HASH,
                        "calibration": "0x" + "1d" * 32,
                        "task_set": "0x" + "8a" * 32,
                    },
                    "relays": ["https://relay.example.org"],
                    "origin": "https://origin.example.org",
                    "step": 4,
                    "policy_version": 3,
                },
            ),
        ),
        parameters={"run_id": 1},
    ),
    Route(
        "GET",
        "/v1/runs/{run_id}/step",
        None,
        (Answer(200, None, "text/plain", "4"),),
        parameters={"run_id": 1},
        without_client="for programs that ask a step counter; run_info has it with the rest",
    ),
    Route(
        "GET",
        "/v1/network",
        "network",
        (
            _json(
                200,
                SignedNetwork,
                {
                    "document": '{"chain_id":84532,"contracts":{"ContributionLedger":"0x5FbD…"},'
                    '"deploy_block":1,"orchestrator":"","relays":["https://relay.example.org"],'
                    '"rpc":["https://rpc.example.org"],"run_id":1}',
                    "signature": SIGNATURE,
                },
            ),
        ),
    ),
    Route(
        "GET",
        "/v1/documents/{document_hash}",
        "document",
        (Answer(200, None, BYTES, "{}"), Answer(206, None, BYTES, "{}")),
        parameters={"document_hash": HASH},
    ),
    Route(
        "POST",
        "/v1/heartbeat",
        "heartbeat",
        (
            _json(
                200,
                HeartbeatAnswer,
                {"status": "active", "policy_version": 3, "wants_hardware": False},
            ),
        ),
        signer="node",
        body=HeartbeatBody,
        body_example={
            "run_id": 1,
            "policy_version": 3,
            "state": "generating",
            "software": "muster 0.1.0",
        },
    ),
    Route(
        "POST",
        "/v1/leases",
        "lease",
        (_json(200, Lease, {"ticket": TICKET, "signature": SIGNATURE}), Answer(204)),
        signer="node",
        body=LeaseBody,
        body_example={"run_id": 1},
    ),
    Route(
        "PUT",
        "/v1/submissions/{run_id}/{step}/{index}",
        "submit",
        (_json(202, Received, {"submission_id": HASH}),),
        signer="node",
        body_media=PARQUET,
        body_example="PAR1…",
        parameters={"run_id": 1, "step": 4, "index": 0},
    ),
    Route(
        "GET",
        "/v1/submissions/{file_hash}",
        "submission_state",
        (
            _json(
                200,
                SubmissionState,
                {
                    "state": "judged",
                    "batch_id": 17,
                    "position": 2,
                    "verdict": 1,
                    "reason": 0,
                },
            ),
        ),
        parameters={"file_hash": HASH},
    ),
    Route(
        "GET",
        "/v1/batches",
        "called",
        (_json(200, CommittedBatches, {"batches": [17, 18], "called": [3, 5]}),),
        signer="validator",
        parameters={"state": "committed", "after": 16},
    ),
    Route(
        "GET",
        "/v1/batches/{batch_id}",
        "batch",
        (
            _json(
                200,
                BatchContents,
                {
                    "batch_id": 17,
                    "root": HASH,
                    "count": 1,
                    "submissions": [ENTRY],
                },
            ),
        ),
        parameters={"batch_id": 17},
    ),
    Route(
        "POST",
        "/v1/batches/{batch_id}/outcomes",
        "post_outcomes",
        (_json(202, OutcomesTaken, {"batch_id": 17}),),
        signer="validator",
        body=OutcomesBody,
        body_example={"records": "0x" + "00" * 56, "signature": SIGNATURE},
        parameters={"batch_id": 17},
    ),
    Route(
        "GET",
        "/v1/checking",
        "watched",
        (
            _json(
                200,
                WatchedValidators,
                {
                    "validators": [
                        {
                            "validator": VALIDATOR,
                            "signed": 12,
                            "proven": 12,
                            "compared": 3,
                            "failed": 0,
                            "is_suspect": False,
                        }
                    ]
                },
            ),
        ),
    ),
    Route(
        "GET",
        "/v1/batches/{batch_id}/checking",
        "checking",
        (
            _json(
                200,
                BatchChecking,
                {
                    "batch_id": 17,
                    "batch_root": HASH,
                    "commitments": [
                        {
                            "validator": VALIDATOR,
                            "records_hash": "0x" + "4e" * 32,
                            "fingerprints_hash": "0x" + "c3" * 32,
                            "signature": SIGNATURE,
                            "committed_at": 1_763_800_520,
                            "fingerprints": None,
                        }
                    ],
                    "reports": [
                        {
                            "validator": VALIDATOR,
                            "reporter": "0x15d34AAf54267DB7D7c367839AAf71A00a2C6A65",
                            "compared": 3,
                            "failed": 0,
                            "signature": SIGNATURE,
                        }
                    ],
                },
            ),
        ),
        parameters={"batch_id": 17},
    ),
    Route(
        "POST",
        "/v1/batches/{batch_id}/checking",
        "post_checking",
        (_json(202, OutcomesTaken, {"batch_id": 17}),),
        signer="validator",
        body=CheckingBody,
        body_example={
            "records_hash": HASH,
            "fingerprints_hash": "0x" + "c3" * 32,
            "signature": SIGNATURE,
        },
        parameters={"batch_id": 17},
    ),
    Route(
        "POST",
        "/v1/batches/{batch_id}/fingerprints",
        "post_fingerprints",
        (_json(202, OutcomesTaken, {"batch_id": 17}),),
        signer="validator",
        body=FingerprintsBody,
        body_example={"fingerprints": "0x00"},
        parameters={"batch_id": 17},
    ),
    Route(
        "POST",
        "/v1/batches/{batch_id}/reports",
        "post_check_report",
        (_json(202, OutcomesTaken, {"batch_id": 17}),),
        signer="validator",
        body=ReportBody,
        body_example={
            "batch_root": HASH,
            "validator": VALIDATOR,
            "fingerprints_hash": "0x" + "c3" * 32,
            "compared": 3,
            "failed": 0,
            "signature": SIGNATURE,
        },
        parameters={"batch_id": 17},
    ),
    Route(
        "GET",
        "/v1/files/{file_hash}",
        "file",
        (Answer(200, None, PARQUET, "PAR1…"), Answer(206, None, PARQUET, "…"), Answer(307)),
        signer="validator, trainer or juror",
        parameters={"file_hash": HASH},
    ),
    Route(
        "GET",
        "/v1/work/{leaf}",
        None,
        (_json(200, BatchEntry, ENTRY),),
        without_client="asked of sources, of which an orchestrator is one: muster.client.sources",
        parameters={"leaf": HASH},
    ),
    Route(
        "POST",
        "/v1/metrics",
        "post_metrics",
        (Answer(204),),
        signer="trainer",
        body=MetricsBody,
        body_example={"step": 4, "metrics": {"reward": 0.62, "grad_norm": 0.08}},
    ),
    Route(
        "GET",
        "/v1/status",
        "status",
        (_json(200, RunStatus, STATUS),),
    ),
    Route(
        "GET",
        "/v1/events",
        "events",
        (Answer(200, None, "text/event-stream", 'id: 7\nevent: status\ndata: {"run_id":1}\n\n'),),
    ),
    Route(
        "GET",
        "/healthz",
        None,
        (Answer(200, None, "text/plain", "ok"),),
        without_client="asked by process supervisors and reverse proxies, which speak plain HTTP",
    ),
)
