"""Heartbeats of nodes."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request, Response
from pydantic import Field

from muster.api.answers import HeartbeatAnswer
from muster.orchestrator.api.deps import Body, ServicesDep, require_run, signed_json
from muster.orchestrator.metrics import HEARTBEATS
from muster.protocol.ids import PolicyVersion

router = APIRouter(prefix="/v1")


class HeartbeatBody(Body):
    """What a node says of itself."""

    run_id: int
    """The run."""
    policy_version: Annotated[int, Field(ge=0, lt=1 << 32)] | None
    """The policy it has loaded."""
    state: Annotated[str, Field(max_length=32)]
    """What it does."""
    software: Annotated[str, Field(max_length=64)]
    """Its software and version."""


@router.post("/heartbeat", response_model=HeartbeatAnswer)
async def heartbeat(request: Request, services: ServicesDep) -> Response:
    """Note a sign of life."""
    headers, body = await signed_json(request, services, HeartbeatBody)
    require_run(services, body.run_id)
    worker = services.identities.active_worker(headers.address)
    version = None if body.policy_version is None else PolicyVersion(body.policy_version)
    write = services.heartbeats.beat(headers.address, version, body.state, body.software)
    await services.nonces.use(headers, write)
    HEARTBEATS.inc()
    answer = HeartbeatAnswer(
        status=worker.status.lower(), policy_version=services.projection.run.latest_version
    )
    return Response(answer.model_dump_json(), media_type="application/json")
