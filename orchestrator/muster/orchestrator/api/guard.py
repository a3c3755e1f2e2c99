"""The outermost layer: quotas per network address, request figures, safe headers."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from muster.orchestrator.api.deps import SIGNER_KEY
from muster.orchestrator.api.errors import error_response, refusal_response
from muster.orchestrator.metrics import REQUEST_SECONDS, REQUESTS
from muster.orchestrator.services.addresses import subnet_of
from muster.orchestrator.services.ratelimit import Quotas
from muster.orchestrator.services.refusals import TooMany

MAX_HEADER_BYTES = 16 * 1024
"""Largest sum of a request's path, query, and header names and values."""

_SAFE_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
)


def _head_bytes(scope: Scope) -> int:
    headers = sum(len(name) + len(value) for name, value in scope["headers"])
    return headers + len(scope["raw_path"]) + len(scope["query_string"])


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, *, quotas: Quotas) -> None:
        self._app = app
        self._quotas = quotas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, unless its sender is too fast; charge what it cost."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status, size = 500, 0

        async def send_safely(message: Message) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *_SAFE_HEADERS]
            else:
                size += len(message.get("body", b""))
            await send(message)

        async def receive_counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            return message

        host = subnet_of((scope.get("client") or ("local", 0))[0])
        wait_s = self._quotas.host_requests.wait_s(host) or self._quotas.host_bytes.debt_s(host)
        if wait_s:
            response = refusal_response(TooMany(wait_s))
            await response(scope, receive, send_safely)
        elif _head_bytes(scope) > MAX_HEADER_BYTES:
            response = error_response(431, "headers_too_large", "the headers are too large")
            await response(scope, receive, send_safely)
        else:
            try:
                await self._app(scope, receive_counted, send_safely)
            finally:
                self._quotas.host_bytes.charge(host, size)
                signer = scope.get(SIGNER_KEY)
                if signer is not None:
                    self._quotas.signer_bytes.charge(signer, size)
        # The route's template, never the path: a path would let peers invent label values.
        route = getattr(scope.get("route"), "path", "none")
        REQUESTS.labels(route=route, status=str(status)).inc()
        REQUEST_SECONDS.labels(route=route).observe(time.perf_counter() - started)
