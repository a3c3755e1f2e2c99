"""Heartbeats of nodes."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from muster.api.answers import HeartbeatAnswer, HexSignature
from muster.orchestrator.api.deps import Body, ServicesDep, require_run, signed_json
from muster.orchestrator.metrics import HEARTBEATS
from muster.protocol.ids import PolicyVersion

router = APIRouter(prefix="/v1")


class HardwareBody(Body):
    """What a node says its machine has."""

    report: dict[str, Any]
    """The report in its JSON form."""
    signature: HexSignature
    """EIP-712 `HardwareReport` by the node."""


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
    hardware: HardwareBody | None = None
    """What its machine has, once and when it is asked for."""


@router.post("/heartbeat", response_model=HeartbeatAnswer)
async def heartbeat(request: Request, services: ServicesDep) -> Response:
    """Note a sign of life."""
    headers, body = await signed_json(request, services, HeartbeatBody)
    require_run(services, body.run_id)
    worker = services.identities.active_worker(headers.address)
    version = None if body.policy_version is None else PolicyVersion(body.policy_version)
    writes = [services.heartbeats.beat(headers.address, version, body.state, body.software)]
    if body.hardware is not None:
        said = (body.hardware.report, body.hardware.signature)
        writes.append(services.hardware.note(headers.address, *said))
    await services.nonces.use(headers, *writes)
    HEARTBEATS.inc()
    answer = HeartbeatAnswer(
        status=worker.status.lower(),
        policy_version=services.projection.run.latest_version,
        wants_hardware=services.hardware.wants(headers.address),
    )
    return Response(answer.model_dump_json(), media_type="application/json")
