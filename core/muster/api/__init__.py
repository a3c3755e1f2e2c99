"""The orchestrator's HTTP API for its callers: signed requests, typed answers, the client.

The orchestrator verifies with `muster.api.signing` and answers with `muster.api.answers`, so both
sides of every request are here. Nothing here knows how the orchestrator stores or decides.
"""

from muster.api.answers import (
    BatchChecking as BatchChecking,
    BatchContents as BatchContents,
    BatchEntry as BatchEntry,
    HeartbeatAnswer as HeartbeatAnswer,
    Lease as Lease,
    NoWork as NoWork,
    RunDocuments as RunDocuments,
    RunInfo as RunInfo,
    SignedClaim as SignedClaim,
    SlotTaken as SlotTaken,
    SubmissionState as SubmissionState,
)
from muster.api.client import OrchestratorApi as OrchestratorApi
