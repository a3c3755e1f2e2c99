"""What every route needs: the services, bounded bodies, and the verified signer.

A body is read chunk by chunk against its limit and deadline. The identity of a caller is the signer
that the signature recovers to, never a field of a body.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, TypeVar

from fastapi import Depends, Request
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from muster.api.limits import MAX_JSON_BYTES
from muster.api.requests import Body
from muster.api.signing import EMPTY_BODY_HASH, SignedHeaders, verify_request
from muster.orchestrator.services.addresses import subnet_of
from muster.orchestrator.services.context import Services
from muster.orchestrator.services.refusals import TooMany, refuse
from muster.protocol.encoding import file_hash
from muster.protocol.ids import Hash32, RunId

SIGNER_KEY = "muster.signer"
"""Where the scope of a request says who signed it, once that is verified."""

B = TypeVar("B", bound=Body)


async def services_of(request: Request) -> Services:
    """Return the services of the application. Not a plain function: those run in a thread each."""
    services: Services = request.app.state.services
    return services


ServicesDep = Annotated[Services, Depends(services_of)]


def verify(
    request: Request, services: Services, body_hash: Hash32 = EMPTY_BODY_HASH
) -> SignedHeaders:
    """Return the verified headers of a signed request; its nonce is still to be used."""
    scope = request.scope
    path = scope["raw_path"].decode("ascii", "replace")
    if scope["query_string"]:
        path += "?" + scope["query_string"].decode("ascii", "replace")
    headers = verify_request(
        request.headers,
        domain=services.domain,
        audience=services.audience,
        method=request.method,
        path=path,
        body_hash=body_hash,
        now=services.clock(),
    )
    quotas, signer = services.quotas, headers.address
    wait_s = quotas.signer_requests.wait_s(signer) or quotas.signer_bytes.debt_s(signer)
    if wait_s:
        raise TooMany(wait_s)
    scope[SIGNER_KEY] = signer
    return headers


def host_of(request: Request) -> str:
    """Return what quotas know a caller's machine by."""
    return subnet_of(request.client.host if request.client else "local")


def require_run(services: Services, run_id: int) -> RunId:
    """Return the run id; refuses any run but the one served."""
    if run_id != services.run_id:
        raise refuse("run_unknown", f"this orchestrator serves run {services.run_id}, not {run_id}")
    return services.run_id


async def body_chunks(request: Request, services: Services) -> AsyncIterator[bytes]:
    """Yield the body as it arrives; refuses one that takes too long or breaks off."""
    try:
        async with asyncio.timeout(services.settings.body_timeout_s):
            async for chunk in request.stream():
                yield chunk
    except TimeoutError:
        raise refuse("body_timeout", "the body took too long to arrive") from None
    except ClientDisconnect:
        raise refuse(
            "malformed_body", "the connection closed before the body was complete"
        ) from None


async def read_body(request: Request, services: Services, max_bytes: int) -> bytes:
    """Return the body; refuses one above the limit, at the latest when that many bytes came."""
    require_size(request, max_bytes)
    parts, size, room = [], 0, services.quotas.bodies
    try:
        async for chunk in body_chunks(request, services):
            if size + len(chunk) > max_bytes:
                raise refuse("body_too_large", f"the body exceeds {max_bytes} bytes")
            if not room.take(len(chunk)):
                raise refuse("overloaded", "too many bodies are arriving at once")
            size += len(chunk)
            parts.append(chunk)
        return b"".join(parts)
    finally:
        room.give_back(size)


def require_size(request: Request, max_bytes: int) -> None:
    """Refuse a body whose stated length is above the limit, unread."""
    stated = request.headers.get("content-length", "0")
    if not stated.isdigit() or int(stated) > max_bytes:
        raise refuse("body_too_large", f"the body exceeds {max_bytes} bytes")


async def signed_json(
    request: Request, services: Services, kind: type[B], *, max_bytes: int = MAX_JSON_BYTES
) -> tuple[SignedHeaders, B]:
    """Return the verified headers and the parsed body of a signed JSON request."""
    body = await read_body(request, services, max_bytes)
    headers = verify(request, services, file_hash(body))
    try:
        return headers, kind.model_validate_json(body)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise refuse("malformed_body", f"{where or 'body'}: {problem['msg']}") from error
