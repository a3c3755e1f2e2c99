"""The orchestrator's HTTP API as its callers see it: signed requests, typed answers, the client.

The orchestrator verifies with `muster.api.signing` and answers with `muster.api.answers`, so both
sides of every request live here. Nothing here knows how the orchestrator stores or decides.
"""

from muster.api.answers import (
    BatchChecking,
    BatchContents,
    BatchEntry,
    HeartbeatAnswer,
    Lease,
    NoWork,
    RunDocuments,
    RunInfo,
    SubmissionState,
)
from muster.api.client import OrchestratorApi

__all__ = [
    "BatchChecking",
    "BatchContents",
    "BatchEntry",
    "HeartbeatAnswer",
    "Lease",
    "NoWork",
    "OrchestratorApi",
    "RunDocuments",
    "RunInfo",
    "SubmissionState",
]
