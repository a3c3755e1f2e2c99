"""Turns every refusal and failure into the documented error form."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from math import ceil

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from muster.orchestrator.services.refusals import TooMany
from muster.protocol.errors import ApiError, EncodingError, StorageError

logger = logging.getLogger(__name__)


def add_error_handlers(app: FastAPI) -> None:
    """Register the handlers."""
    for kind, handler in _HANDLERS.items():
        app.add_exception_handler(kind, handler)
    app.add_exception_handler(Exception, _on_failure)


def failure_response(request: Request, error: Exception) -> Response:
    """Return what the handlers answer to an error."""
    for kind, handler in _HANDLERS.items():
        if isinstance(error, kind):
            return handler(request, error)
    return _on_failure(request, error)


def refusal_response(error: ApiError) -> Response:
    """Return a refusal in the documented form."""
    response = error_response(error.status, error.code, str(error), error.hint)
    if isinstance(error, TooMany):
        response.headers["retry-after"] = str(ceil(error.retry_after_s))
    return response


def error_response(status: int, code: str, message: str, hint: str | None = None) -> Response:
    """Return an error in the documented form."""
    headers = {"retry-after": "1"} if status in (429, 503) else None
    return Response(error_body(code, message, hint), status, headers, media_type="application/json")


def error_body(code: str, message: str, hint: str | None = None) -> bytes:
    """Return the documented form of an error, as JSON."""
    content = {"error": {"code": code, "message": message, "hint": hint}}
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


def _on_refusal(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return refusal_response(error)


def _on_encoding_error(_request: Request, error: Exception) -> Response:
    return error_response(400, "malformed_request", str(error))


def _on_storage_error(request: Request, error: Exception) -> Response:
    # The answer names no place: that is for the log.
    logger.error(
        "a request could not be kept", extra={"path": request.url.path, "error": str(error)}
    )
    return error_response(503, "database_away", "the orchestrator's database does not answer")


def _on_invalid(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"])
    return error_response(422, "malformed_request", f"{where}: {problem['msg']}")


def _on_http_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "route_unknown", 405: "method_not_allowed"}.get(error.status_code, "refused")
    return error_response(error.status_code, code, str(error.detail))


def _on_failure(request: Request, error: Exception) -> Response:
    logger.error("a request failed", extra={"path": request.url.path}, exc_info=error)
    return error_response(500, "internal", "the orchestrator failed; its log says why")


_HANDLERS: dict[type[Exception], Callable[[Request, Exception], Response]] = {
    ApiError: _on_refusal,
    EncodingError: _on_encoding_error,
    StorageError: _on_storage_error,
    RequestValidationError: _on_invalid,
    HTTPException: _on_http_error,
}
