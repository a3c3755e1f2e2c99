"""Runs and the documents they pin."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Response
from fastapi.responses import FileResponse, PlainTextResponse

from muster.api.answers import RunDocuments, RunInfo, SignedNetwork
from muster.api.network import NetworkPage, sign_network
from muster.orchestrator.api.deps import ServicesDep, require_run
from muster.orchestrator.services.refusals import refuse
from muster.protocol.ids import to_hash32

router = APIRouter(prefix="/v1")


@router.get("/runs/{run_id}")
async def run_info(run_id: int, services: ServicesDep) -> RunInfo:
    """Return what a newcomer needs to take part."""
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


@router.get("/network")
async def network(services: ServicesDep) -> SignedNetwork:
    """Return where the run's network is, signed: what `muster join` reads."""
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


@router.get("/runs/{run_id}/step", response_class=PlainTextResponse)
async def step(run_id: int, services: ServicesDep) -> PlainTextResponse:
    """Return the training step whose submissions are being collected: one integer, as text."""
    require_run(services, run_id)
    return PlainTextResponse(str(services.status.step()))


@router.get("/documents/{document_hash}")
async def document(document_hash: str, services: ServicesDep) -> Response:
    """Return a pinned document or a pause's evidence, or the range of it that is asked for."""
    name = to_hash32(document_hash)
    data = services.documents.get(name) or services.breaker.document(name)
    if data is None:
        raise refuse("document_unknown", "the run pins no document with this hash")
    headers = {"cache-control": "public, max-age=31536000, immutable"}
    if isinstance(data, Path):
        return FileResponse(data, media_type="application/octet-stream", headers=headers)
    return Response(data, media_type="application/octet-stream", headers=headers)
