"""Uploads, and what became of them."""

from __future__ import annotations

import json

from fastapi import APIRouter, Request, Response

from muster.api.answers import Received, SubmissionState
from muster.api.limits import MAX_FILE_BYTES, MAX_HEADER_JSON_BYTES
from muster.api.signing import SUBMISSION_HEADER, SUBMISSION_SIGNATURE_HEADER, signature_bytes
from muster.orchestrator.api.deps import (
    ServicesDep,
    body_chunks,
    require_run,
    require_size,
    verify,
)
from muster.orchestrator.metrics import SUBMISSIONS, UPLOAD_BYTES
from muster.orchestrator.services.intake import AlreadyHeld
from muster.orchestrator.services.refusals import refuse
from muster.orchestrator.services.submissions import state_of
from muster.protocol.errors import ProtocolError
from muster.protocol.ids import to_hash32
from muster.protocol.messages import Submission

router = APIRouter(prefix="/v1/submissions")


@router.put("/{run_id}/{step}/{index}", status_code=202, response_model=Received)
async def upload(
    run_id: int, step: int, index: int, request: Request, services: ServicesDep
) -> Response:
    """Take in a submission's file; the same one again is harmless."""
    require_run(services, run_id)
    require_size(request, MAX_FILE_BYTES)
    submission, signature = _claim(request)
    # The claim names the body's hash, so the request is verified before its body is read.
    headers = verify(request, services, submission.file_hash)
    worker = services.identities.active_worker(headers.address)
    await services.nonces.use(headers)
    if (submission.run_id, submission.step, submission.index) != (run_id, step, index):
        raise refuse("bad_submission", "the path names another slot than the submission")
    admitted = await services.intake.admit(worker, submission, signature)
    if not isinstance(admitted, AlreadyHeld):
        await services.intake.store(admitted, body_chunks(request, services))
        SUBMISSIONS.inc()
        UPLOAD_BYTES.inc(int(request.headers.get("content-length", "0")))
    answer = Received(submission_id=submission.file_hash)
    return Response(answer.model_dump_json(), 202, media_type="application/json")


@router.get("/{file_hash}", response_model_exclude_none=False)
async def submission_state(file_hash: str, services: ServicesDep) -> SubmissionState:
    """Return how far a submission has come."""
    return await state_of(to_hash32(file_hash), services.database, services.projection)


def _claim(request: Request) -> tuple[Submission, bytes]:
    text = request.headers.get(SUBMISSION_HEADER, "")
    if len(text) > MAX_HEADER_JSON_BYTES:
        raise refuse("bad_submission", f"the {SUBMISSION_HEADER} header is too long")
    try:
        submission = Submission.from_json(json.loads(text))
        return submission, signature_bytes(request.headers.get(SUBMISSION_SIGNATURE_HEADER, ""))
    except (ProtocolError, ValueError, RecursionError) as error:
        raise refuse("bad_submission", f"the submission headers do not parse: {error}") from error
