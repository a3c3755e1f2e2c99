"""Public routes: the run, its documents and status, and the figures of trainer and process."""

from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse, PlainTextResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST

from muster.api.answers import RunDocuments, RunInfo, RunStatus, SignedNetwork
from muster.api.network_document import NetworkPage, sign_network
from muster.api.routes import EvaluationBody, MetricsBody
from muster.orchestrator.dashboard.status import to_json
from muster.orchestrator.http.errors import refuse
from muster.orchestrator.http.feed import StatusFeed
from muster.orchestrator.http.requests import ServicesDep, host_of, require_run, seat_json
from muster.protocol.ids import PolicyVersion, to_hash32

router = APIRouter()


@router.get("/v1/runs/{run_id}")
async def run_info(run_id: int, services: ServicesDep) -> RunInfo:
    """Return the data that a newcomer needs to take part."""
    require_run(services, run_id)
    run = services.projection.run
    return RunInfo(
        run_id=services.run_id,
        chain_id=services.domain.chain_id,
        ledger=services.domain.verifying_contract,
        orchestrator=services.audience,
        documents=RunDocuments(
            recipe=run.config.recipe_hash,
            calibration=run.config.calibration_hash,
            task_set=run.config.task_set_hash,
        ),
        relays=list(services.settings.relays),
        origin=services.settings.origin,
        step=services.status.step(),
        policy_version=run.latest_version,
    )


@router.get("/v1/network")
async def network(services: ServicesDep) -> SignedNetwork:
    """Return the run's signed network document, which `muster join` reads."""
    settings, deployment = services.settings, services.chain.deployment
    page = NetworkPage(
        run_id=services.run_id,
        chain_id=deployment.chain_id,
        deploy_block=deployment.deploy_block,
        contracts=dict(deployment.contracts),
        rpc=settings.public_rpc,
        orchestrator=settings.public_url,
        relays=settings.relays,
    )
    return sign_network(page, services.domain, services.key)


@router.get("/v1/runs/{run_id}/step", response_class=PlainTextResponse)
async def step(run_id: int, services: ServicesDep) -> PlainTextResponse:
    """Return the training step whose submissions are being collected: one integer, as text."""
    require_run(services, run_id)
    return PlainTextResponse(str(services.status.step()))


@router.get("/v1/documents/{document_hash}")
async def document(document_hash: str, services: ServicesDep) -> Response:
    """Return a pinned document or a pause's evidence, or the requested range of it."""
    name = to_hash32(document_hash)
    data = services.documents.get(name) or services.breaker.document(name)
    if data is None:
        raise refuse(
            "document_unknown",
            f"this orchestrator serves run {services.run_id}, which pins no such document",
            hint="check that this is the URL of your run's orchestrator",
        )
    headers = {"cache-control": "public, max-age=31536000, immutable"}
    if isinstance(data, Path):
        return FileResponse(data, media_type="application/octet-stream", headers=headers)
    return Response(data, media_type="application/octet-stream", headers=headers)


@router.get("/v1/status", response_model=RunStatus)
async def status(services: ServicesDep) -> Response:
    """Return the run, its workers and its latest submissions."""
    return Response(to_json(await services.status.latest()), media_type="application/json")


@router.get("/v1/events")
async def events(request: Request, services: ServicesDep) -> StreamingResponse:
    """Stream the status whenever it changes; resumes after `Last-Event-ID`."""
    host = host_of(request)
    services.feed.require_room(host)
    first = to_json(await services.status.latest())
    return StreamingResponse(
        _stream(services.feed, first, request.headers.get("last-event-id"), host),
        media_type="text/event-stream",
        headers={"cache-control": "no-store"},
    )


async def _stream(
    feed: StatusFeed, first: str, last_seen: str | None, host: str
) -> AsyncIterator[str]:
    async for notice in feed.listen(first, last_seen, host):
        if notice is None:
            yield ": alive\n\n"
        else:
            yield f"id: {notice.event_id}\nevent: status\ndata: {notice.status}\n\n"


@router.post("/v1/metrics", status_code=204)
async def report(request: Request, services: ServicesDep) -> Response:
    """Store the figures of a step."""
    role = services.identities.require_trainer
    headers, body = await seat_json(request, services, role, MetricsBody)
    await services.nonces.keep(headers)
    await services.training.report(body.step, body.metrics, signer=headers.address)
    return Response(status_code=204)


@router.post("/v1/evaluations", status_code=204)
async def report_evaluation(request: Request, services: ServicesDep) -> Response:
    """Store the figures of a version on held-out problems, and their signer."""
    role = services.identities.require_evaluator
    headers, body = await seat_json(request, services, role, EvaluationBody)
    require_run(services, body.run_id)
    version = PolicyVersion(body.policy_version)
    published = services.projection.run.checkpoints.get(version)
    if published is None or published.manifest_root != body.manifest_root:
        raise refuse("version_unknown", f"the chain has no version {version} with this root")
    await services.nonces.keep(headers)
    await services.training.report(version, body.metrics, signer=headers.address)
    return Response(status_code=204)


@router.get("/metrics", include_in_schema=False)
async def prometheus(services: ServicesDep) -> Response:
    """Return the process's metrics in Prometheus' text format."""
    return Response(await services.metrics_text.read(services), media_type=CONTENT_TYPE_LATEST)


@router.get("/healthz", response_class=PlainTextResponse)
async def healthz() -> PlainTextResponse:
    """Return `ok` while the process serves."""
    return PlainTextResponse("ok")
