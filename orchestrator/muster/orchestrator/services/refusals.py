"""Every reason for which the orchestrator refuses a request, with the HTTP status it maps to.

The 401 codes of signed requests are in `muster.api.signing`.
"""

from __future__ import annotations

from muster.protocol.errors import ApiError

CODES = {
    "malformed_body": 400,
    "nonce_reused": 401,
    "worker_not_active": 403,
    "not_a_validator": 403,
    "not_the_trainer": 403,
    "not_a_reader": 403,
    "run_unknown": 404,
    "document_unknown": 404,
    "submission_unknown": 404,
    "batch_unknown": 404,
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
    "too_many_requests": 429,
    "too_many_streams": 429,
    "overloaded": 503,
    "database_away": 503,
    "too_many_listeners": 503,
    "storage_failed": 507,
}
"""Code to status."""


class TooMany(ApiError):
    """A caller that is too fast; `retry_after_s` says when the next request may come."""

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
    """Return the error for a batch that no run of this orchestrator has, as far as it has read."""
    return refuse(
        "batch_unknown",
        f"batch {batch_id} is not one of this orchestrator's",
        hint=f"it has read the chain to block {read_to or 0}: try again if the batch is newer",
    )
