import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from orchestrator_bench import Bench, delete_database, open_bench, refused
from orchestrator_fakes import FRAUD, RUN

from muster.api import RunInfo
from muster.api.answers import BatchEntry
from muster.api.routes import MAX_FIGURES, MAX_JSON_BYTES
from muster.orchestrator.dashboard.figures import panels
from muster.orchestrator.http.errors import CODES
from muster.protocol.eip712 import address_of, digest, sign
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.errors import ApiError
from muster.protocol.ids import PolicyVersion, RunId
from muster.tasks import document_root


async def request(
    bench: Bench,
    method: str,
    path: str,
    *,
    key: bytes | None = None,
    content: Any = b"",
    headers: dict[str, str] | None = None,
) -> httpx.Response:
    headers = dict(headers or {})
    if key is not None:
        # A body in parts never has the hash that is stated here.
        body = content if isinstance(content, bytes) else b""
        headers |= bench.signed(key, method, path, body)
    async with bench.http() as http:
        return await http.request(method, path, content=content, headers=headers)


def code(response: httpx.Response) -> tuple[int, str]:
    error = response.json()["error"]
    assert set(error) == {"code", "message", "hint"}
    return response.status_code, error["code"]


async def test_run_info_is_the_documented_form(bench: Bench) -> None:
    response = await request(bench, "GET", "/v1/runs/1")
    assert set(response.json()) == {
        "run_id", "chain_id", "ledger", "orchestrator", "documents",
        "relays", "origin", "step", "policy_version",
    }  # fmt: skip
    async with bench.api() as api:
        info = await api.run_info(RUN)
    assert isinstance(info, RunInfo)
    assert (info.step, info.policy_version, info.chain_id) == (1, 0, 31337)
    assert info.documents.recipe == bench.network.recipe.hash()


async def test_documents_are_served_by_hash(bench: Bench) -> None:
    async with bench.api() as api:
        assert await api.document(bench.network.recipe.hash()) == bench.network.recipe.to_bytes()
        assert await refused(api.document(keccak(b"unknown"))) == (404, "document_unknown")


async def test_document_of_another_run_is_refused_with_the_run_that_is_served(bench: Bench) -> None:
    async with bench.api() as api:
        with pytest.raises(ApiError, match="this orchestrator serves run 1, which pins no") as said:
            await api.document(keccak(b"another run's recipe"))
    assert said.value.hint == "check that this is the URL of your run's orchestrator"


async def test_document_on_disk_is_served_in_parts(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muster.api.client.DOWNLOAD_BYTES", 100)
    pinned = bench.network.run.config.task_set_hash
    held = tmp_path / "held"
    held.write_bytes(bytes(bench.network.documents[pinned]))
    monkeypatch.setitem(bench.network.documents, pinned, held)
    async with bench.api() as api:
        await api.download(pinned, tmp_path / "d", max_bytes=10_000)
    assert document_root(tmp_path / "d") == pinned
    assert held.stat().st_size > 300


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/v1/runs/2", (404, "run_unknown")),
        ("GET", "/v1/runs/one", (422, "malformed_request")),
        ("GET", "/v1/documents/zz", (400, "malformed_request")),
        ("GET", "/v1/submissions/0x12", (400, "malformed_request")),
        ("GET", "/v1/submissions/" + "0x" + "00" * 32, (404, "submission_unknown")),
        ("GET", "/v1/batches/1", (404, "batch_unknown")),
        ("GET", "/v1/batches", (422, "malformed_request")),
        ("GET", "/v1/batches?state=judged", (422, "malformed_request")),
        ("GET", "/v1/batches?state=committed", (401, "unsigned_request")),
        ("GET", "/v1/files/0x" + "00" * 32, (401, "unsigned_request")),
        ("POST", "/v1/batches/1/outcomes", (401, "unsigned_request")),
        ("POST", "/v1/leases", (401, "unsigned_request")),
        ("POST", "/v1/heartbeat", (401, "unsigned_request")),
        ("POST", "/v1/metrics", (401, "unsigned_request")),
        ("GET", "/v1/nothing", (404, "route_unknown")),
        ("DELETE", "/v1/leases", (405, "method_not_allowed")),
    ],
)
async def test_errors_have_the_documented_form(
    bench: Bench, method: str, path: str, expected: tuple[int, str]
) -> None:
    assert code(await request(bench, method, path)) == expected


async def test_files_are_for_jurors_of_the_runs_open_cases(bench: Bench) -> None:
    submission = await bench.run_through()
    juror, other = os.urandom(32), os.urandom(32)
    case = bench.network.open_case(1, 0, FRAUD)

    async def code_for(key: bytes) -> str | None:
        async with bench.api(key) as api:
            try:
                await api.file(submission.file_hash)
            except ApiError as refusal:
                return refusal.code
        return None

    assert await code_for(juror) == "not_a_reader"
    bench.network.draw(case, address_of(juror))
    assert (await code_for(juror), await code_for(other)) == (None, "not_a_reader")
    bench.network.close_case(case)
    assert await code_for(juror) == "not_a_reader"


async def test_work_is_shown_by_its_leaf_to_anybody(bench: Bench) -> None:
    submission = await bench.upload()
    answer = await request(bench, "GET", f"/v1/work/{hex0x(submission.leaf())}")
    entry = BatchEntry.model_validate_json(answer.content)
    assert (entry.submission, entry.signature) == (
        submission,
        bench.network.sign_submission(submission),
    )
    assert entry.ticket is not None
    assert entry.ticket_signature == sign(
        digest(bench.network.domain, entry.ticket.struct_hash()), bench.network.keys.orchestrator
    )
    other = replace(submission, units=submission.units + 1).leaf()
    unknown = await request(bench, "GET", f"/v1/work/{hex0x(other)}")
    assert code(unknown) == (404, "submission_unknown")


async def test_work_that_its_worker_committed_is_shown_as_the_chain_has_it(bench: Bench) -> None:
    uploaded = await bench.upload()
    submission = replace(uploaded, index=uploaded.index + 1)
    work = bench.network.work(submission)
    path = f"/v1/work/{hex0x(submission.leaf())}"
    assert code(await request(bench, "GET", path)) == (404, "submission_unknown")
    bench.network.chain.ledger.submit_direct(work)
    await bench.follow()
    entry = BatchEntry.model_validate_json((await request(bench, "GET", path)).content)
    assert (entry.submission, entry.ticket) == (submission, work.ticket)
    assert (entry.signature, entry.ticket_signature) == (work.node_signature, work.ticket_signature)


async def test_files_are_for_validators_and_the_trainer_only(bench: Bench) -> None:
    submission = await bench.upload(0)
    for key in (bench.network.keys.validators[0], bench.network.keys.trainer):
        async with bench.api(key) as api:
            assert await api.file(submission.file_hash) == b"a file"
    for key in (bench.network.keys.nodes[0], bench.network.keys.nodes[1], os.urandom(32)):
        async with bench.api(key) as api:
            assert await refused(api.file(submission.file_hash)) == (403, "not_a_reader")


async def test_file_is_unknown_when_nobody_submitted_it(bench: Bench) -> None:
    async with bench.validator() as api:
        assert await refused(api.file(keccak(b"unknown"))) == (404, "file_unknown")


async def test_batch_list_is_for_validators_only(bench: Bench) -> None:
    async with bench.node() as api:
        assert await refused(api.called()) == (403, "not_a_validator")


async def test_metrics_come_from_the_trainer_only(bench: Bench) -> None:
    async with bench.api(bench.network.keys.trainer) as api:
        await api.post_metrics(1, {"reward": 0.25, "loss": -0.1})
        await api.post_metrics(1, {"eval_reward": 0.5})
    assert bench.services.training.series("reward") == [(1, 0.25)]
    assert bench.services.training.series("eval_reward") == [(1, 0.5)]
    for key in (bench.network.keys.nodes[0], bench.network.keys.validators[0]):
        async with bench.api(key) as api:
            refusal = await refused(api.post_metrics(1, {"reward": 1.0}))
        assert refusal == (403, "not_the_trainer")


EVALUATOR = keccak(b"a named evaluator")


async def _evaluation_refused(bench: Bench, key: bytes, **changes: Any) -> tuple[int, str]:
    """Return the reason why a version's figures are refused."""
    root = bench.network.run.checkpoints[PolicyVersion(0)].manifest_root
    body = {"run_id": RUN, "policy_version": 0, "manifest_root": hex0x(root)}
    content = json.dumps(body | {"metrics": {"eval_reward": 1.0}} | changes).encode()
    return code(await request(bench, "POST", "/v1/evaluations", key=key, content=content))


async def test_evaluations_come_from_whom_the_owner_trusts(tmp_path: Path) -> None:
    version = PolicyVersion(0)
    async with open_bench(tmp_path, evaluators=(address_of(EVALUATOR),)) as bench:
        root = bench.network.run.checkpoints[version].manifest_root
        # The trainer owns this run.
        for value, key in enumerate((bench.network.keys.trainer, EVALUATOR)):
            async with bench.api(key) as api:
                await api.post_evaluation(RUN, version, root, {"eval_reward": value / 2})
        training = bench.services.training
        assert training.series("eval_reward") == [(0, 0.5)]
        assert training.evaluators == {0: address_of(EVALUATOR)}
        assert (
            f"signed by {address_of(EVALUATOR)} (1)"
            in panels(training, bench.network.recipe)[0].meaning
        )
        stranger = bench.network.keys.validators[0]
        assert await _evaluation_refused(bench, stranger) == (403, "not_an_evaluator")
        assert training.series("eval_reward") == [(0, 0.5)]
    # The signer is known even after a restart and a lost database.
    delete_database(tmp_path)
    async with open_bench(tmp_path, bench.network, start_s=1) as bench:
        await bench.services.training.load()
        assert bench.services.training.evaluators == {0: address_of(EVALUATOR)}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"run_id": RUN + 1}, (404, "run_unknown")),
        ({"policy_version": 7}, (404, "version_unknown")),
        ({"manifest_root": "0x" + "22" * 32}, (404, "version_unknown")),
        # This would lease workers more work.
        ({"metrics": {"eval_reward": 1.0, "refill": 60.0}}, (400, "malformed_body")),
        ({"metrics": {"reward": 1.0}}, (400, "malformed_body")),
    ],
)
async def test_evaluation_of_something_else_is_refused(
    bench: Bench, changes: dict[str, Any], expected: tuple[int, str]
) -> None:
    assert await _evaluation_refused(bench, bench.network.keys.trainer, **changes) == expected
    assert bench.services.training.series("eval_reward") == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"step": 1}',
        b'{"step": -1, "metrics": {}}',
        b'{"step": 1, "metrics": {"Reward": 1}}',
        b'{"step": 1, "metrics": {"reward": NaN}}',
        b'{"step": 1, "metrics": {"reward": "much"}}',
        b'{"step": 1, "metrics": {}, "more": 1}',
        json.dumps({"step": 1, "metrics": {f"m{i}": 1 for i in range(MAX_FIGURES + 1)}}).encode(),
        b'{"a":' * 50_000,
    ],
)
async def test_body_is_refused_when_malformed(bench: Bench, body: bytes) -> None:
    key = bench.network.keys.trainer
    response = await request(bench, "POST", "/v1/metrics", key=key, content=body)
    assert code(response) == (400, "malformed_body")


@pytest.mark.parametrize("stated", [True, False])
async def test_body_is_refused_when_too_large(bench: Bench, stated: bool) -> None:
    sent = 0

    async def endless() -> Any:
        nonlocal sent
        while True:
            sent += 1 << 16
            yield bytes(1 << 16)

    headers = {"content-length": str(MAX_JSON_BYTES + 1)} if stated else {}
    content, key = b"" if stated else endless(), bench.network.keys.nodes[0]
    response = await request(bench, "POST", "/v1/leases", key=key, content=content, headers=headers)
    assert code(response) == (413, "body_too_large")
    assert sent <= MAX_JSON_BYTES + (2 << 16)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/heartbeat", (403, "worker_not_active")),
        ("/v1/leases", (403, "worker_not_active")),
        ("/v1/batches/1/outcomes", (403, "not_a_validator")),
        ("/v1/batches/1/checking", (403, "not_a_validator")),
        ("/v1/batches/1/fingerprints", (403, "not_a_validator")),
        ("/v1/batches/1/reports", (403, "not_a_validator")),
        ("/v1/metrics", (403, "not_the_trainer")),
        ("/v1/evaluations", (403, "not_an_evaluator")),
    ],
)
@pytest.mark.parametrize("is_signed", [True, False])
async def test_body_of_a_stranger_is_not_read(
    bench: Bench, path: str, expected: tuple[int, str], is_signed: bool
) -> None:
    read = 0

    async def body() -> Any:
        nonlocal read
        read += 1
        yield b"{}"

    key = os.urandom(32) if is_signed else None
    response = await request(bench, "POST", path, key=key, content=body())
    assert code(response) == (expected if is_signed else (401, "unsigned_request"))
    assert not read


async def test_signer_is_slowed_down_when_it_asks_too_often(tmp_path: Path) -> None:
    async with open_bench(tmp_path, rate_per_signer=1.0) as bench:
        body = b'{"run_id":1}'
        keys = bench.network.keys.nodes
        answers = [
            await request(bench, "POST", "/v1/leases", key=keys[0], content=body) for _ in range(3)
        ]
        other = await request(bench, "POST", "/v1/leases", key=keys[1], content=body)
    assert [a.status_code for a in answers] == [200, 200, 429]
    assert other.status_code == 200


async def test_answers_carry_safe_headers(bench: Bench) -> None:
    response = await request(bench, "GET", "/")
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["x-frame-options"] == "DENY"
    assert "default-src 'none'" in response.headers["content-security-policy"]


async def test_prometheus_counts_requests_by_route_not_by_path(bench: Bench) -> None:
    await request(bench, "GET", "/v1/runs/1")
    await request(bench, "GET", "/v1/made/up/by/a/peer")
    text = (await request(bench, "GET", "/metrics")).text
    assert 'muster_orchestrator_requests_total{route="/v1/runs/{run_id}",status="200"}' in text
    assert "peer" not in text


async def test_other_runs_are_refused_in_bodies(bench: Bench) -> None:
    async with bench.node() as api:
        assert await refused(api.lease(RunId(2))) == (404, "run_unknown")


async def test_internal_failure_is_reported_without_its_cause(bench: Bench) -> None:
    object.__setattr__(bench.services, "documents", None)
    transport = httpx.ASGITransport(bench.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(base_url="http://test", transport=transport) as http:
        response = await http.get("/v1/documents/" + hex0x(keccak(b"")))
    assert code(response) == (500, "internal")
    assert "NoneType" not in response.text


def test_every_code_maps_to_a_client_or_server_error() -> None:
    assert all(400 <= status < 600 for status in CODES.values())
