"""The outermost layer: quotas per network address, request figures, safe headers."""

from __future__ import annotations

import time
from functools import lru_cache

from prometheus_client import Counter, Histogram
from starlette.responses import Response
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
        refusal = self._refusal(scope, host)
        try:
            if refusal is None:
                await self._app(scope, receive_counted, send_safely)
            else:
                await refusal(scope, receive, send_safely)
        finally:
            if refusal is None:
                self._charge(scope, host, size)
            # The route's template, never the path: a path would let peers invent label values.
            _count(getattr(scope.get("route"), "path", "none"), status, started)

    def _refusal(self, scope: Scope, host: str) -> Response | None:
        wait_s = self._quotas.host_requests.wait_s(host) or self._quotas.host_bytes.debt_s(host)
        if wait_s:
            return refusal_response(TooMany(wait_s))
        if _head_bytes(scope) > MAX_HEADER_BYTES:
            return error_response(431, "headers_too_large", "the headers are too large")
        return None

    def _charge(self, scope: Scope, host: str, size: int) -> None:
        self._quotas.host_bytes.charge(host, size)
        signer = scope.get(SIGNER_KEY)
        if signer is not None:
            self._quotas.signer_bytes.charge(signer, size)


def _count(route: str, status: int, started: float) -> None:
    requests, seconds = _figures(route, status)
    requests.inc()
    seconds.observe(time.perf_counter() - started)


@lru_cache(maxsize=1024)
def _figures(route: str, status: int) -> tuple[Counter, Histogram]:
    """Return what counts and times requests of one kind: finding them takes a lock each."""
    labels = {"route": route, "status": str(status)}
    return REQUESTS.labels(**labels), REQUEST_SECONDS.labels(route=route)
