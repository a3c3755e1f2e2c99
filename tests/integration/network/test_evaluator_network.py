"""`muster evaluate --follow` beside a run: real chain, orchestrator, origin, relay and engine."""

import json
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from client_network import (
    ORCHESTRATOR,
    OWNER,
    THIRD,
    WORKERS,
    Network,
    Run,
    eventually,
    open_network,
    recipe_of,
    relay_of,
    running,
)

from muster.api import OrchestratorApi
from muster.api.signing import sign_request
from muster.inference.transformers_engine import TransformersEngine
from muster.lifecycle import first_error, free_port
from muster.protocol.encoding import hex0x
from muster.protocol.errors import ApiError, NotYet
from muster.protocol.ids import Hash32, PolicyVersion, RunId
from muster.tasks.toys import split_sort
from muster.trainer.base_model import WarmStart, build_base_model
from muster.trainer.measure.beside import KEPT, Wish, evaluate_run
from muster.trainer.publish.policies import policy_files


def _policy(folder: Path, version: PolicyVersion) -> dict[str, Path]:
    """Return the files of a model of its own for every version."""
    model = folder / f"model-{version}"
    build_base_model(model, seed=version, warm_start=WarmStart(steps=1, batch=8))
    return policy_files(model)


@pytest.fixture
async def network(tmp_path: Path) -> AsyncIterator[Network]:
    """A run with real models, whose owner names another evaluator."""
    run = Run(recipe=recipe_of(8), policy=_policy)
    async with open_network(tmp_path, run=run, evaluators=(THIRD.address,)) as opened:
        split_sort(4, 8, 0)[1].write(tmp_path / "held-out.jsonl")
        yield opened


def _wish(network: Network, relay: str, **changes: Any) -> Wish:
    given: dict[str, Any] = {
        "run": network.run_id,
        "rpc": network.anvil.rpc_url,
        "deployments": network.folder / "deployments",
        "orchestrator": network.orchestrator,
        "eval_set": network.folder / "held-out.jsonl",
        "state_dir": network.folder / "evaluator",
        "is_following": True,
        "relays": (relay,),
        "poll_s": 0.05,
    }
    return Wish(**given | changes)


async def _evaluated(network: Network) -> list[int]:
    async with OrchestratorApi(network.orchestrator) as api:
        return [version for version, _ in (await api.status()).eval_reward]


def _noted(network: Network) -> list[int]:
    [path] = (network.folder / "evaluator").glob("evaluations-*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line["eval"]["policy_version"] for line in lines]


async def test_versions_are_evaluated_as_they_appear_and_signed(network: Network) -> None:
    async with relay_of(network) as relay:
        async with running(evaluate_run(_wish(network, relay), TransformersEngine(), OWNER.key)):
            for version in (1, 2):
                await network.publish(PolicyVersion(version))
            await eventually(lambda: _is_evaluated(network, 2))
        await network.publish(PolicyVersion(3))
        # Another key with the same folder resumes where the first was stopped.
        async with running(evaluate_run(_wish(network, relay), TransformersEngine(), THIRD.key)):
            await eventually(lambda: _is_evaluated(network, 3))
    assert await _evaluated(network) == [0, 1, 2, 3] == _noted(network)
    policies = network.folder / "evaluator" / "policies"
    assert len(list(policies.rglob("model.safetensors"))) <= KEPT
    async with httpx.AsyncClient(base_url=network.orchestrator) as http:
        page = (await http.get("/")).text
    assert f"{OWNER.address} (3)" in page
    assert f"{THIRD.address} (1)" in page


async def test_only_what_relays_have_dropped_is_skipped(network: Network) -> None:
    for version in (1, 2):
        await network.publish(PolicyVersion(version))
    network.store.remove(network.run_id, PolicyVersion(0))
    silent = _wish(network, f"http://127.0.0.1:{free_port()}", is_following=False)
    with pytest.raises(NotYet, match="version 0 of run 1 could not be evaluated yet"):
        await evaluate_run(silent, TransformersEngine(), None)
    answering = _wish(network, network.origin, is_following=False)
    await evaluate_run(answering, TransformersEngine(), None)
    assert _noted(network) == [1, 2]


async def _is_evaluated(network: Network, version: int) -> bool:
    return version in await _evaluated(network)


async def test_figures_that_nobody_trusted_signed_are_refused(network: Network) -> None:
    view = await network.view()
    root = view.runs[network.run_id].checkpoints[PolicyVersion(0)].manifest_root
    stranger = evaluate_run(_wish(network, network.origin), TransformersEngine(), WORKERS[0].key)
    with pytest.raises(ExceptionGroup) as group:
        await stranger
    cause = first_error(group.value)
    assert isinstance(cause, ApiError)
    assert cause.code == "not_an_evaluator"
    figures = {"eval_reward": 1.0}
    with pytest.raises(ApiError) as caught:
        await _post(network, RunId(network.run_id + 1), root, figures)
    assert caught.value.code == "run_unknown"
    with pytest.raises(ApiError) as caught:
        await _post(network, network.run_id, Hash32(b"\x01" * 32), figures)
    assert caught.value.code == "version_unknown"
    assert await _evaluated(network) == []
    await _post(network, network.run_id, root, figures)
    await eventually(lambda: _is_evaluated(network, 0))


async def _post(network: Network, run: RunId, root: Hash32, figures: dict[str, float]) -> None:
    async with OrchestratorApi(
        network.orchestrator,
        key=OWNER.key,
        domain=network.owner.domain("ContributionLedger"),
        audience=ORCHESTRATOR.address,
    ) as api:
        await api.post_evaluation(run, PolicyVersion(0), root, figures)


async def test_figures_are_refused_unsigned_and_a_second_time(network: Network) -> None:
    view = await network.view()
    root = view.runs[network.run_id].checkpoints[PolicyVersion(0)].manifest_root
    body = json.dumps(
        {
            "run_id": network.run_id,
            "policy_version": 0,
            "manifest_root": hex0x(root),
            "metrics": {"eval_reward": 0.25},
        }
    ).encode()
    signed = sign_request(
        OWNER.key,
        network.owner.domain("ContributionLedger"),
        ORCHESTRATOR.address,
        "POST",
        "/v1/evaluations",
        body,
        nonce=Hash32(os.urandom(32)),
        issued_at=int(time.time()),
    )
    async with httpx.AsyncClient(base_url=network.orchestrator) as http:
        answers = [
            await http.post("/v1/evaluations", content=body, headers=headers)
            for headers in ({}, signed, signed)
        ]
        page = (await http.get("/v1/status")).json()
    assert [answer.status_code for answer in answers] == [401, 204, 401]
    assert [answers[i].json()["error"]["code"] for i in (0, 2)] == [
        "unsigned_request",
        "nonce_reused",
    ]
    assert page["eval_reward"] == [[0, 0.25]]
