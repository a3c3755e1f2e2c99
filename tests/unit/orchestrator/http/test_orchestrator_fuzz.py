"""Requests that fit the OpenAPI document, or break it, to a real server: it never fails.

Half of them are signed by an account with the route's role, so that they pass the signature check.
Every answer must be as the document says, and every error must have the one form of errors.
"""

import asyncio
import warnings
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from orchestrator_bench import UNLIMITED, Bench, served
from schemathesis.generation import GenerationMode

from muster.api.answers import ErrorAnswer
from muster.api.routes import PARQUET, ROUTES, Signer
from muster.protocol.encoding import hex0x

ENDLESS = {"/v1/events"}
"""Answers that do not end are tested in test_orchestrator_server.py."""
SIGNERS: dict[tuple[str, str], Signer] = {(r.method, r.path): r.signer for r in ROUTES}


@schemathesis.serializer(PARQUET)
def parquet_as_it_is(_context: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


class Signed(requests.auth.AuthBase):
    """Signs a request as it is sent."""

    def __init__(self, bench: Bench, key: bytes) -> None:
        self._bench, self._key = bench, key

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        body = request.body or b""
        request.headers.update(
            self._bench.signed(
                self._key,
                str(request.method),
                request.path_url,
                body.encode() if isinstance(body, str) else body,
            )
        )
        return request


def aim(case: Any, known: dict[str, Any]) -> None:
    """Let a request name existing things, so that its look-ups succeed."""
    for part in (case.path_parameters or {}), (case.body if isinstance(case.body, dict) else {}):
        part.update({name: value for name, value in known.items() if name in part})


def fuzz(bench: Bench, url: str, examples: int, known: dict[str, Any]) -> int:
    """Send `examples` requests to every route; return the number of successful answers."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    accepted = 0
    with requests.Session() as session:
        for found in schema.get_all_operations():
            operation = found.ok()
            if operation.path not in ENDLESS:
                accepted += fuzz_operation(bench, operation, session, examples, known)
    return accepted


def fuzz_operation(
    bench: Bench, operation: Any, session: requests.Session, examples: int, known: dict[str, Any]
) -> int:
    key = bench.key_of(SIGNERS[operation.method.upper(), operation.path])
    accepted = 0

    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        case=operation.as_strategy(GenerationMode.POSITIVE)
        | operation.as_strategy(GenerationMode.NEGATIVE),
        is_signed=st.booleans(),
        is_aimed=st.booleans(),
    )
    def send(case: Any, is_signed: bool, is_aimed: bool) -> None:
        nonlocal accepted
        if is_aimed:
            aim(case, known)
        auth = Signed(bench, key) if key is not None and is_signed else None
        response = case.call(session=session, auth=auth, timeout=10, allow_redirects=False)
        case.validate_response(
            response,
            checks=[
                schemathesis.checks.not_a_server_error,
                schemathesis.checks.CHECKS.get_one("status_code_conformance"),
                schemathesis.checks.CHECKS.get_one("content_type_conformance"),
                schemathesis.checks.CHECKS.get_one("response_headers_conformance"),
                schemathesis.checks.CHECKS.get_one("response_schema_conformance"),
            ],
        )
        # The answer to a HEAD request has no body, so it cannot give a reason.
        if response.status_code >= 400 and response.request.method != "HEAD":
            ErrorAnswer.model_validate_json(response.content)
        accepted += response.status_code < 300

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        send()
    return accepted


@pytest.mark.sqlite_only
@pytest.mark.parametrize("examples", [15, pytest.param(1000, marks=pytest.mark.slow)])
async def test_no_request_makes_the_server_fail(tmp_path: Path, examples: int) -> None:
    async with served(tmp_path, patience_s=3600, **UNLIMITED) as (bench, url):
        submission = await bench.upload(0)
        known = {
            "run_id": 1,
            "batch_id": 1,
            "file_hash": hex0x(submission.file_hash),
            "document_hash": hex0x(bench.network.recipe.hash()),
        }
        accepted = await asyncio.to_thread(fuzz, bench, url, examples, known)
    # Many requests succeed, so no check stops all of them.
    assert accepted > examples
