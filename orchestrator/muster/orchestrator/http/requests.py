"""Shared by all routes: the services, the verified signer, and bounded bodies.

A signer without a role in the run is refused before a byte of its body is read. A body is then read
in chunks, within its size limit, its deadline and its signer's space, and must have the signed
hash. The identity of a caller is the address recovered from the signature, never a field of a body.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Annotated, TypeVar

from fastapi import Depends, Request
from pydantic import ValidationError
from starlette.types import Message

from muster.api.routes import MAX_JSON_BYTES, Body
from muster.api.signing import EMPTY_BODY_HASH, SignedHeaders, verify_request
from muster.chain import MemberView
from muster.lifecycle import machine_of
from muster.orchestrator.http.errors import TooMany, refuse
from muster.orchestrator.http.quotas import BodyRoom
from muster.orchestrator.services import Services
from muster.protocol.documents import first_fault
from muster.protocol.encoding import file_hash
from muster.protocol.errors import ApiError
from muster.protocol.ids import Address, Hash32, RunId

SIGNER_KEY = "muster.signer"
"""Key of the verified signer in the ASGI scope of a request."""

NOTE_SIGNER_KEY = "muster.note_signer"
"""Key of a callback in the ASGI scope, by which the connection learns the signer."""

B = TypeVar("B", bound=Body)
R = TypeVar("R")


async def services_of(request: Request) -> Services:
    """Return the services of the application. Async, because FastAPI runs plain functions in
    threads."""
    services: Services = request.app.state.services
    return services


ServicesDep = Annotated[Services, Depends(services_of)]


def verify(
    request: Request,
    services: Services,
    role: Callable[[Address], R],
    *,
    body_hash: Hash32 | None = EMPTY_BODY_HASH,
) -> tuple[SignedHeaders, R]:
    """Verify a signed request and use its nonce; return its headers and the result of `role`, which
    refuses signers without the role.

    The headers must contain `body_hash`; if it is None, the caller compares the hash with the body.
    """
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
        now=services.clock(),
    )
    standing, signer = role(headers.address), headers.address
    if body_hash not in (None, headers.body_hash):
        raise _other_body()
    quotas = services.quotas
    wait_s = quotas.signer_requests.wait_s(signer) or quotas.signer_bytes.debt_s(signer)
    if wait_s:
        raise TooMany(wait_s)
    services.nonces.take(headers)
    scope[SIGNER_KEY] = signer
    if NOTE_SIGNER_KEY in scope:
        scope[NOTE_SIGNER_KEY](signer)
    return headers, standing


def host_of(request: Request) -> str:
    """Return the key of a caller's machine for quotas."""
    return machine_of(request.client.host if request.client else "local")


def require_run(services: Services, run_id: int) -> RunId:
    """Return the run id; refuses any run but the one served."""
    if run_id != services.run_id:
        raise refuse("run_unknown", f"this orchestrator serves run {services.run_id}, not {run_id}")
    return services.run_id


async def body_chunks(
    request: Request, services: Services, room: BodyRoom, signer: Address
) -> AsyncGenerator[bytes, None]:
    """Yield the body as it arrives; refuses one that is too slow, incomplete, or lost its space.

    Close the generator if it is not read to its end, to free its space.
    """
    until = asyncio.get_running_loop().time() + services.settings.body_timeout_s
    is_whole = False
    with room.arrival(signer) as arrival:
        while not is_whole:
            message: Message = {"type": "http.request"}
            try:
                async with asyncio.timeout_at(until) as arrival.waiting:
                    message = await request.receive()
            except TimeoutError:
                if not arrival.is_dropped:
                    raise refuse("body_timeout", "the body took too long to arrive") from None
            arrival.waiting = None
            if message["type"] == "http.disconnect":
                raise refuse("malformed_body", "the connection closed before the body was complete")
            chunk, is_whole = message.get("body", b""), not message.get("more_body", False)
            room.take(arrival, len(chunk))
            if arrival.is_dropped:
                raise refuse("overloaded", "this signer has too many uploads at once")
            yield chunk


async def read_body(
    request: Request, services: Services, headers: SignedHeaders, *, room: BodyRoom, max_bytes: int
) -> bytes:
    """Return the body; refuses one above the limit as soon as that is known."""
    require_size(request, max_bytes)
    parts, size = [], 0
    async with aclosing(body_chunks(request, services, room, headers.address)) as chunks:
        async for chunk in chunks:
            size += len(chunk)
            if size > max_bytes:
                raise refuse("body_too_large", f"the body exceeds {max_bytes} bytes")
            parts.append(chunk)
    body = b"".join(parts)
    if file_hash(body) != headers.body_hash:
        raise _other_body()
    return body


def require_size(request: Request, max_bytes: int) -> None:
    """Refuse a body whose stated length is above the limit, unread."""
    stated = request.headers.get("content-length", "0")
    if not stated.isdigit() or int(stated) > max_bytes:
        raise refuse("body_too_large", f"the body exceeds {max_bytes} bytes")


async def node_json(
    request: Request, services: Services, kind: type[B]
) -> tuple[SignedHeaders, MemberView, B]:
    """Return the verified headers of a node's request, its active worker, and its body."""
    headers, worker = verify(request, services, services.identities.active_worker, body_hash=None)
    room = services.quotas.node_bodies
    body = await read_body(request, services, headers, room=room, max_bytes=MAX_JSON_BYTES)
    return headers, worker, _parse(kind, body)


async def seat_json(
    request: Request,
    services: Services,
    role: Callable[[Address], None],
    kind: type[B],
    *,
    max_bytes: int = MAX_JSON_BYTES,
) -> tuple[SignedHeaders, B]:
    """Return the verified headers of a validator's or the trainer's request, and its body."""
    headers, _ = verify(request, services, role, body_hash=None)
    room = services.quotas.seat_bodies
    body = await read_body(request, services, headers, room=room, max_bytes=max_bytes)
    return headers, _parse(kind, body)


def _parse(kind: type[B], body: bytes) -> B:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise refuse("malformed_body", first_fault(error, "body")) from error


def _other_body() -> ApiError:
    return refuse("body_hash_mismatch", "the body does not match the signed hash")
