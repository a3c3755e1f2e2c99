"""Routes for nodes: heartbeats, leases, uploads, and the state of submissions."""

import json
from contextlib import aclosing

from fastapi import APIRouter, Request, Response

from muster.api.answers import HeartbeatAnswer, Lease, Received, SubmissionState
from muster.api.client import REASON_HEADER
from muster.api.routes import MAX_HEADER_JSON_BYTES, HeartbeatBody, LeaseBody
from muster.api.signing import SUBMISSION_HEADER, SUBMISSION_SIGNATURE_HEADER, signature_bytes
from muster.orchestrator.db import Database
from muster.orchestrator.db.statements import SubmissionRow, by_file
from muster.orchestrator.http.errors import refuse
from muster.orchestrator.http.requests import (
    ServicesDep,
    body_chunks,
    node_json,
    require_run,
    require_size,
    verify,
)
from muster.orchestrator.intake.intake import AlreadyHeld
from muster.orchestrator.leases.leases import SignedTicket
from muster.orchestrator.metrics import HEARTBEATS, LEASES, SUBMISSIONS, UPLOAD_BYTES
from muster.orchestrator.projection import Projection, slot_of
from muster.protocol.errors import ProtocolError
from muster.protocol.ids import Hash32, PolicyVersion, to_hash32
from muster.protocol.messages import Submission

router = APIRouter(prefix="/v1")


@router.post("/heartbeat", response_model=HeartbeatAnswer)
async def heartbeat(request: Request, services: ServicesDep) -> Response:
    """Store a heartbeat."""
    headers, worker, body = await node_json(request, services, HeartbeatBody)
    require_run(services, body.run_id)
    version = None if body.policy_version is None else PolicyVersion(body.policy_version)
    writes = [services.heartbeats.beat(headers.address, version, body.state, body.software)]
    if body.hardware is not None:
        said = (body.hardware.report, body.hardware.signature)
        writes.append(services.hardware.note(headers.address, *said))
    await services.nonces.keep(headers, *writes)
    HEARTBEATS.inc()
    answer = HeartbeatAnswer(
        status=worker.status.lower(),
        policy_version=services.projection.run.latest_version,
        wants_hardware=services.hardware.wants(headers.address),
    )
    return Response(answer.model_dump_json(), media_type="application/json")


@router.post("/leases", response_model=Lease, responses={204: {"description": "No work now."}})
async def lease(request: Request, services: ServicesDep) -> Response:
    """Return an open ticket that the node does not hold, or the next one. If there is work but none
    for this node, return the reason.
    """
    headers, worker, body = await node_json(request, services, LeaseBody)
    require_run(services, body.run_id)
    await services.nonces.keep(headers)
    holding = frozenset((each.step, each.index) for each in body.holding)
    version = None if body.policy_version is None else PolicyVersion(body.policy_version)
    signed = await services.leases.lease(worker, holding, version)
    if not isinstance(signed, SignedTicket):
        LEASES.labels(answer="none" if signed is None else str(signed)).inc()
        headers_out = {"retry-after": f"{services.settings.retry_after_s:g}"}
        if signed is not None:
            headers_out[REASON_HEADER] = str(signed)
        return Response(status_code=204, headers=headers_out)
    LEASES.labels(answer="ticket").inc()
    services.wakes.status.set()
    answer = Lease(ticket=signed.ticket, signature=signed.signature)
    return Response(answer.model_dump_json(), media_type="application/json")


@router.put("/submissions/{run_id}/{step}/{index}", status_code=202, response_model=Received)
async def upload(
    run_id: int, step: int, index: int, request: Request, services: ServicesDep
) -> Response:
    """Receive a submission's file; repeating the upload is harmless."""
    require_run(services, run_id)
    require_size(request, services.intake.max_file_bytes)
    submission, signature = _claim(request)
    headers, worker = verify(
        request, services, services.identities.active_worker, body_hash=submission.file_hash
    )
    await services.nonces.keep(headers)
    if (submission.run_id, submission.step, submission.index) != (run_id, step, index):
        raise refuse("bad_submission", "the path's run, step and index are not the submission's")
    admitted = await services.intake.admit(worker, submission, signature)
    if not isinstance(admitted, AlreadyHeld):
        room = services.quotas.uploads
        async with aclosing(body_chunks(request, services, room, headers.address)) as chunks:
            await services.intake.store(admitted, chunks)
        SUBMISSIONS.inc()
        UPLOAD_BYTES.inc(int(request.headers.get("content-length", "0")))
    answer = Received(submission_id=submission.file_hash)
    return Response(answer.model_dump_json(), 202, media_type="application/json")


@router.get("/submissions/{file_hash}", response_model_exclude_none=False)
async def submission_state(file_hash: str, services: ServicesDep) -> SubmissionState:
    """Return the state of a submission."""
    return await state_of(to_hash32(file_hash), services.database, services.projection)


def _claim(request: Request) -> tuple[Submission, bytes]:
    text = request.headers.get(SUBMISSION_HEADER, "")
    if len(text) > MAX_HEADER_JSON_BYTES:
        raise refuse(
            "bad_submission",
            f"the {SUBMISSION_HEADER} header is above {MAX_HEADER_JSON_BYTES} bytes",
        )
    try:
        submission = Submission.from_json(json.loads(text))
        return submission, signature_bytes(request.headers.get(SUBMISSION_SIGNATURE_HEADER, ""))
    except (ProtocolError, ValueError, RecursionError) as error:
        raise refuse("bad_submission", f"the submission's headers are invalid: {error}") from error


async def state_of(
    file_hash: Hash32, database: Database, projection: Projection
) -> SubmissionState:
    """Return a submission's state; its outcome is known even if the file was never uploaded
    here."""
    [rows] = await database.ask(by_file(file_hash=file_hash))
    row = SubmissionRow(*rows[0]) if rows else None
    if row is not None:
        judged = projection.judged(slot_of(row.claim), file_hash)
    else:
        judged = next(iter(projection.naming(file_hash)), None)
    if judged is not None:
        return SubmissionState(
            state="judged",
            batch_id=judged.batch_id,
            position=judged.position,
            verdict=judged.verdict,
            reason=judged.reason,
        )
    if row is None:
        raise refuse("submission_unknown", "no submission with this file hash was received")
    batch = row.batch_root and projection.batch_with_root(row.batch_root)
    if not batch:
        return SubmissionState(state="received")
    return SubmissionState(state="committed", batch_id=batch.batch_id, position=row.position)
