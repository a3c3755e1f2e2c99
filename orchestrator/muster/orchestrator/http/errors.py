"""All error codes of refused requests, and the documented form of errors.

The 401 codes of signed requests are in `muster.api.signing`.
"""

import json
import logging
from collections.abc import Callable
from math import ceil

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from muster.api.answers import SignedClaim, SlotTaken
from muster.orchestrator.db.query import RowError
from muster.protocol.errors import ApiError, EncodingError, StorageError, StorageFailed

logger = logging.getLogger(__name__)

CANNOT_WRITE = "the orchestrator cannot write to its disk"
"""Message of `storage_failed`."""


def add_error_handlers(app: FastAPI) -> None:
    """Register the handlers."""
    for kind, handler in _HANDLERS.items():
        app.add_exception_handler(kind, handler)
    app.add_exception_handler(Exception, _on_failure)


def failure_response(request: Request, error: Exception) -> Response:
    """Return the response to an error."""
    for kind, handler in _HANDLERS.items():
        if isinstance(error, kind):
            return handler(request, error)
    return _on_failure(request, error)


def refusal_response(error: ApiError) -> Response:
    """Return a refusal in the documented form."""
    held = error.held if isinstance(error, SlotTaken) else None
    response = error_response(error.status, error.code, str(error), error.hint, held)
    if isinstance(error, TooMany):
        response.headers["retry-after"] = str(ceil(error.retry_after_s))
    return response


def error_response(
    status: int, code: str, message: str, hint: str | None = None, held: SignedClaim | None = None
) -> Response:
    """Return an error in the documented form."""
    headers = {"retry-after": "1"} if status in (429, 503) else None
    return Response(
        error_body(code, message, hint, held), status, headers, media_type="application/json"
    )


def error_body(
    code: str, message: str, hint: str | None = None, held: SignedClaim | None = None
) -> bytes:
    """Return the documented form of an error, as JSON."""
    error: dict[str, object] = {"code": code, "message": message, "hint": hint}
    if held is not None:
        error["held"] = held.model_dump(mode="json")
    return json.dumps({"error": error}, ensure_ascii=False, separators=(",", ":")).encode(
        errors="replace"
    )


def _on_refusal(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return refusal_response(error)


def _on_encoding_error(_request: Request, error: Exception) -> Response:
    return error_response(400, "malformed_request", str(error))


def _on_storage_error(request: Request, error: Exception) -> Response:
    # The answer does not name the database; the log does.
    logger.error(
        "the database did not store a request",
        extra={"path": request.url.path, "error": str(error)},
    )
    if isinstance(error, RowError) and not error.is_busy:
        return error_response(
            422, "not_storable", "the database cannot store a value of the request"
        )
    if isinstance(error, StorageFailed):
        return error_response(507, "storage_failed", CANNOT_WRITE)
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


CODES = {
    "malformed_body": 400,
    "nonce_reused": 401,
    "body_hash_mismatch": 401,
    "worker_not_active": 403,
    "not_a_validator": 403,
    "not_the_trainer": 403,
    "not_a_reader": 403,
    "not_an_evaluator": 403,
    "run_unknown": 404,
    "document_unknown": 404,
    "submission_unknown": 404,
    "batch_unknown": 404,
    "version_unknown": 404,
    "file_unknown": 404,
    "body_timeout": 408,
    "not_configured": 409,
    "slot_taken": 409,
    "file_taken": 409,
    "ticket_unknown": 409,
    "lease_expired": 409,
    "outcomes_conflict": 409,
    "checking_conflict": 409,
    "checking_early": 409,
    "checking_late": 409,
    "body_too_large": 413,
    "bad_hardware_report": 422,
    "bad_submission": 422,
    "bad_submission_signature": 422,
    "file_hash_mismatch": 422,
    "bad_records": 422,
    "bad_outcomes_signature": 422,
    "bad_checking_signature": 422,
    "bad_fingerprints": 422,
    "bad_report": 422,
    "not_storable": 422,
    "too_many_requests": 429,
    "too_many_streams": 429,
    "overloaded": 503,
    "database_away": 503,
    "too_many_listeners": 503,
    "storage_failed": 507,
}
"""Code to status."""


class TooMany(ApiError):
    """A caller over its rate limit; `retry_after_s` is the pause before its next request."""

    def __init__(self, wait_s: float) -> None:
        super().__init__(
            f"too many requests; the next may come in {wait_s:.2f} s",
            status=CODES["too_many_requests"],
            code="too_many_requests",
        )
        self.retry_after_s = wait_s


def refuse(code: str, message: str, hint: str | None = None) -> ApiError:
    """Return the error to raise for one of CODES."""
    return ApiError(message, status=CODES[code], code=code, hint=hint)


def unknown_batch(batch_id: int, *, read_to: int | None) -> ApiError:
    """Return the error for a batch that is unknown in the chain as far as it was read."""
    return refuse(
        "batch_unknown",
        f"batch {batch_id} is not one of this orchestrator's",
        hint=f"it has read the chain to block {read_to or 0}: try again if the batch is newer",
    )
