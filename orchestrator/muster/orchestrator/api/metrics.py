"""The trainer's figures, and the orchestrator's own for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from muster.api.requests import MetricsBody
from muster.orchestrator.api.deps import ServicesDep, signed_json
from muster.orchestrator.metrics import REGISTRY

router = APIRouter()


@router.post("/v1/metrics", status_code=204)
async def report(request: Request, services: ServicesDep) -> Response:
    """Keep the figures of a step."""
    headers, body = await signed_json(request, services, MetricsBody)
    services.identities.require_trainer(headers.address)
    await services.nonces.use(headers)
    await services.training.report(body.step, body.metrics)
    return Response(status_code=204)


@router.get("/metrics", include_in_schema=False)
async def prometheus(services: ServicesDep) -> Response:
    """Return the process's figures in Prometheus' text form."""
    await services.gauges.refresh(services)
    return Response(generate_latest(REGISTRY), media_type=CONTENT_TYPE_LATEST)
