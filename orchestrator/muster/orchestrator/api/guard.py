"""The outermost layer: rate limit per network address, request figures, safe headers."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from muster.orchestrator.api.deps import too_many
from muster.orchestrator.api.errors import error_response
from muster.orchestrator.metrics import REQUEST_SECONDS, REQUESTS
from muster.orchestrator.services.ratelimit import RateLimit

MAX_HEADER_BYTES = 16 * 1024
"""Largest sum of a request's header names and values."""

_SAFE_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
)


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, *, host_limit: RateLimit) -> None:
        self._app = app
        self._host_limit = host_limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, unless its sender is too fast."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status = 500

        async def send_safely(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *_SAFE_HEADERS]
            await send(message)

        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
            response = error_response(
                431, "headers_too_large", "the request's headers are too large"
            )
            await response(scope, receive, send_safely)
            return
        host = (scope.get("client") or ("local", 0))[0]
        wait_s = self._host_limit.wait_s(host)
        if wait_s:
            refusal = too_many(wait_s)
            response = error_response(refusal.status, refusal.code, str(refusal))
            await response(scope, receive, send_safely)
        else:
            await self._app(scope, receive, send_safely)
        # The route's template, never the path: a path would let peers invent label values.
        route = getattr(scope.get("route"), "path", "none")
        REQUESTS.labels(route=route, status=str(status)).inc()
        REQUEST_SECONDS.labels(route=route).observe(time.perf_counter() - started)
