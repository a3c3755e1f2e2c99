"""Typed client of the orchestrator's HTTP API. Every method is safe to repeat.

Transport errors and the answers 429, 502, 503 and 504 are retried here with backoff, each time
under a fresh nonce; callers need no retries. All answers are checked against their documented form,
files and documents against their hashes.
"""

import asyncio
import json
import logging
import random
import re
import secrets
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from muster.api.answers import (
    BatchChecking,
    BatchContents,
    CommittedBatches,
    HeartbeatAnswer,
    Lease,
    NoWork,
    RunInfo,
    RunStatus,
    SignedClaim,
    SignedNetwork,
    SlotTaken,
    SubmissionState,
    WatchedValidators,
)
from muster.api.public_hosts import (
    PublicHosts,
    PublicTransport,
    Resolve,
    resolve_for_orchestrator,
)
from muster.api.routes import (
    Body,
    CheckingBody,
    EvaluationBody,
    FingerprintsBody,
    HardwareBody,
    HeartbeatBody,
    HeldTicket,
    LeaseBody,
    MetricsBody,
    OutcomesBody,
    ReportBody,
)
from muster.api.signing import (
    SUBMISSION_HEADER,
    SUBMISSION_SIGNATURE_HEADER,
    sign_request,
)
from muster.protocol.bounds import MAX_FILE_BYTES
from muster.protocol.checking import Checking, CheckReport
from muster.protocol.documents import first_fault
from muster.protocol.eip712 import Domain
from muster.protocol.encoding import canonical_json, file_hash, hex0x, keccak
from muster.protocol.errors import ApiError, ConfigError
from muster.protocol.ids import Address, Hash32, PolicyVersion, RunId, Step
from muster.protocol.messages import HardwareReport, Submission, Ticket

logger = logging.getLogger(__name__)

A = TypeVar("A", bound=BaseModel)

DOWNLOAD_BYTES = 4 * 1024 * 1024
"""Bytes of a large document per request."""
MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""Largest answer that is read."""
MAX_SMALL_ANSWER_BYTES = 64 * 1024
"""Largest answer with one ticket, one state or one word."""
ELSEWHERE = 307
"""Status of an orchestrator's answer that refers to separate storage."""
MAX_URL_CHARS = 4096
"""Longest URL of such storage."""
ATTEMPTS = 4
"""Tries per request before it fails."""
MAX_PAUSE_S = 5.0
"""Longest pause between two tries in seconds, unless the orchestrator requests a longer one."""
MAX_RETRY_AFTER_S = 60.0
"""Longest pause in seconds that the orchestrator may request."""
REASON_HEADER = "x-muster-reason"
"""Header of an answer without a ticket: one word for the reason, if there is work."""
MAX_MESSAGE_CHARS = 500
"""Most characters of a refusal's message."""
_REASON = re.compile(r"[a-z_]{1,32}")
_CODE = re.compile(r"[a-z0-9_]{1,64}")
_RANGE = re.compile(r"bytes (\d{1,15})-\d{1,15}/(\d{1,15})")
_RETRIED = frozenset({429, 502, 503, 504})
_UNREACHABLE = (httpx.TransportError, TimeoutError)


@dataclass(frozen=True, slots=True)
class _Answered:
    status: int
    headers: httpx.Headers
    body: bytes


@dataclass(frozen=True, slots=True)
class _Call:
    http: httpx.AsyncClient
    method: str
    path: str
    body: bytes | None
    headers: Mapping[str, str]
    signed: bool
    body_hash: Hash32
    max_bytes: int


class OrchestratorApi:
    """One orchestrator, as one signer (or, without a key, as an anonymous reader)."""

    def __init__(
        self,
        base_url: str,
        *,
        key: bytes | None = None,
        domain: Domain | None = None,
        audience: Address | Callable[[], Address] | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        timeout_s: float = 10.0,
        clock: Callable[[], float] = time.time,
        backoff_s: float = 0.2,
        resolver: Resolve = resolve_for_orchestrator,
    ) -> None:
        """`audience` is the orchestrator's account, or returns the one that the chain names now."""
        self._key = key
        self._domain = domain
        self._audience = audience
        self._clock = clock
        self._timeout_s = timeout_s
        self._backoff_s = backoff_s
        network = transport or httpx.AsyncHTTPTransport(verify=tls_context(), trust_env=False)
        self._hosts = PublicHosts(resolver, timeout_s)
        self._http, self._public = (
            httpx.AsyncClient(
                base_url=base_url,
                transport=each,
                timeout=timeout_s,
                trust_env=False,
                follow_redirects=False,
                # A small compressed answer could decompress to any size.
                headers={"accept-encoding": "identity"},
            )
            for each in (network, PublicTransport(self._hosts, network))
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()
        await self._public.aclose()

    # Anyone

    async def run_info(self, run_id: RunId) -> RunInfo:
        """Return the information that a newcomer needs to take part in the run."""
        return await self._get(RunInfo, f"/v1/runs/{run_id}", MAX_SMALL_ANSWER_BYTES)

    async def network(self) -> SignedNetwork:
        """Return the signed description of the run's network, which the caller has to check."""
        return await self._get(SignedNetwork, "/v1/network", MAX_SMALL_ANSWER_BYTES)

    async def document(self, document_hash: Hash32) -> bytes:
        """Return a pinned document, checked against its Keccak-256."""
        answer = await self._send("GET", f"/v1/documents/{hex0x(document_hash)}")
        if keccak(answer.body) != document_hash:
            raise _lied(f"document {hex0x(document_hash)} hashes to something else")
        return answer.body

    async def download(
        self,
        document_hash: Hash32,
        path: Path,
        *,
        max_bytes: int,
        admit: Callable[[int], object] | None = None,
    ) -> None:
        """Write a pinned document to a file part by part; continue after the bytes that the file
        has.

        `admit` is called with the size of each part, and may refuse it by raising an error. Only
        the size is checked: the reader compares the hash. Raises ApiError, also for a document
        above `max_bytes`.
        """
        size, total = path.stat().st_size if path.exists() else 0, None
        while total is None or size < total:
            headers = {"range": f"bytes={size}-{size + DOWNLOAD_BYTES - 1}"}
            where = f"/v1/documents/{hex0x(document_hash)}"
            try:
                answer = await self._send("GET", where, headers=headers)
            except ApiError as error:
                if error.status != 416 or not size:
                    raise
                size = 0  # the file was longer than the document
                continue
            start, total = _range_of(answer)
            if total > max_bytes or not answer.body or (answer.status == 206 and start != size):
                raise _lied(f"document {hex0x(document_hash)}: bytes {start} of {total} for {size}")
            if admit is not None:
                admit(len(answer.body))
            size = start + len(answer.body)
            await asyncio.to_thread(_write_at, path, start, answer.body)

    async def submission_state(self, submission_id: Hash32) -> SubmissionState:
        """Return the state of a submission, which is named by its file hash."""
        path = f"/v1/submissions/{hex0x(submission_id)}"
        return await self._get(SubmissionState, path, MAX_SMALL_ANSWER_BYTES)

    async def batch(self, batch_id: int) -> BatchContents:
        """Return a batch's submissions; the caller checks the root against the chain."""
        return await self._get(BatchContents, f"/v1/batches/{batch_id}")

    async def status(self) -> RunStatus:
        """Return the run's status, as the dashboard shows it."""
        return await self._get(RunStatus, "/v1/status")

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the status whenever it changes, until the orchestrator closes the stream."""
        timeout = httpx.Timeout(self._timeout_s, read=60.0)
        async with self._http.stream("GET", "/v1/events", timeout=timeout) as response:
            if response.status_code != 200:
                raise _refusal(response.status_code, await read_body(response, MAX_ANSWER_BYTES))
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    yield json.loads(line.removeprefix("data:"))

    # Nodes

    async def heartbeat(
        self,
        run_id: RunId,
        *,
        policy_version: PolicyVersion | None,
        state: str,
        software: str,
        hardware: tuple[HardwareReport, bytes] | None = None,
    ) -> HeartbeatAnswer:
        """Report that the node is alive; return its worker's status and the newest policy version.

        `hardware` describes its machine, with the node's signature.
        """
        machine = None
        if hardware is not None:
            report, signature = hardware
            machine = HardwareBody(report=report.to_json(), signature=signature)
        body = HeartbeatBody(
            run_id=run_id,
            policy_version=policy_version,
            state=state,
            software=software,
            hardware=machine,
        )
        return _parse(HeartbeatAnswer, await self._post("/v1/heartbeat", body))

    async def lease(
        self,
        run_id: RunId,
        holding: Sequence[Ticket] = (),
        *,
        version: PolicyVersion | None = None,
    ) -> Lease | NoWork:
        """Return a ticket, or when to ask again. The ticket is an open one of the worker that is
        not in `holding`, or else a new one. A new ticket names `version`, if a step may still train
        on it, and by default the newest version.
        """
        # An orchestrator of an earlier release knows neither field, so they are sent only if
        # needed.
        named: dict[str, Any] = {} if version is None else {"policy_version": version}
        if holding:
            named["holding"] = tuple(HeldTicket(step=t.step, index=t.index) for t in holding)
        body = LeaseBody(run_id=run_id, **named)
        answer = await self._post("/v1/leases", body)
        if answer.status == 204:
            reason = _REASON.fullmatch(answer.headers.get(REASON_HEADER, ""))
            return NoWork(
                retry_after_s=_retry_after(answer.headers) or 1.0,
                reason=reason[0] if reason else None,
            )
        return _parse(Lease, answer)

    async def submit(self, submission: Submission, signature: bytes, body: bytes) -> Hash32:
        """Upload a submission's file; return its id, the file hash. Repeating it is harmless."""
        path = f"/v1/submissions/{submission.run_id}/{submission.step}/{submission.index}"
        headers = {
            SUBMISSION_HEADER: canonical_json(submission.to_json()).decode(),
            SUBMISSION_SIGNATURE_HEADER: hex0x(signature),
            "content-type": "application/vnd.apache.parquet",
        }
        await self._send(
            "PUT", path, body, headers=headers, signed=True, max_bytes=MAX_SMALL_ANSWER_BYTES
        )
        return submission.file_hash

    # Validators and the trainer

    async def called(self, *, after: int = 0) -> dict[int, int]:
        """Return the number of called validators per batch, for batches above `after` without
        outcomes.
        """
        path = f"/v1/batches?state=committed&after={after}"
        answer = await self._send("GET", path, signed=True, max_bytes=MAX_SMALL_ANSWER_BYTES)
        due = _parse(CommittedBatches, answer)
        if len(due.batches) != len(due.called):
            raise _lied("the list of batches does not say how many are called for each")
        return dict(zip(due.batches, due.called, strict=True))

    async def file(self, submission_file_hash: Hash32) -> bytes:
        """Return a submission's file, checked against its SHA-256.

        It may come from storage that the orchestrator names; that request is not signed. Relays
        have the same path, and show it to anonymous readers.
        """
        path, signed = f"/v1/files/{hex0x(submission_file_hash)}", self._key is not None
        answer = await self._send(
            "GET", path, signed=signed, max_bytes=MAX_FILE_BYTES, accepted=(200, ELSEWHERE)
        )
        if answer.status == ELSEWHERE:
            answer = await self._stored(self._storage(answer))
        # In a thread, because hashing a large file would block the event loop for too long.
        if await asyncio.to_thread(file_hash, answer.body) != submission_file_hash:
            raise _lied(f"file {hex0x(submission_file_hash)} hashes to something else")
        return answer.body

    async def post_outcomes(self, batch_id: int, records: bytes, signature: bytes) -> None:
        """Send a batch's packed records with the validator's `Outcomes` signature."""
        body = OutcomesBody(records=records, signature=signature)
        await self._post(f"/v1/batches/{batch_id}/outcomes", body)

    async def post_checking(self, message: Checking, signature: bytes) -> None:
        """Commit to the fingerprints of a batch, with the validator's `Checking` signature."""
        body = CheckingBody(
            records_hash=message.records_hash,
            fingerprints_hash=message.fingerprints_hash,
            signature=signature,
        )
        await self._post(f"/v1/batches/{message.batch_id}/checking", body)

    async def post_fingerprints(self, batch_id: int, packed: bytes) -> None:
        """Send the fingerprints that the validator committed to."""
        body = FingerprintsBody(fingerprints=packed)
        await self._post(f"/v1/batches/{batch_id}/fingerprints", body)

    async def post_check_report(self, report: CheckReport, signature: bytes) -> None:
        """Send a report on another validator's fingerprints."""
        body = ReportBody(
            batch_root=report.batch_root,
            validator=report.validator,
            fingerprints_hash=report.fingerprints_hash,
            compared=report.compared,
            failed=report.failed,
            signature=signature,
        )
        await self._post(f"/v1/batches/{report.batch_id}/reports", body)

    async def checking(self, batch_id: int) -> BatchChecking:
        """Return a batch's commitments, fingerprints and reports; signatures are unchecked."""
        return await self._get(BatchChecking, f"/v1/batches/{batch_id}/checking")

    async def watched(self) -> WatchedValidators:
        """Return the recent results of every validator's proofs of checking."""
        return await self._get(WatchedValidators, "/v1/checking")

    async def post_metrics(self, step: Step | int, metrics: Mapping[str, float]) -> None:
        """Report the figures of a training step or evaluation; the same step's are merged."""
        await self._post("/v1/metrics", MetricsBody(step=step, metrics=dict(metrics)))

    async def post_evaluation(
        self,
        run_id: RunId,
        version: PolicyVersion,
        manifest_root: Hash32,
        metrics: Mapping[str, float],
    ) -> None:
        """Report the figures of a version on held-out problems, by their names `eval_…`."""
        body = EvaluationBody(
            run_id=run_id,
            policy_version=version,
            manifest_root=manifest_root,
            metrics=dict(metrics),
        )
        await self._post("/v1/evaluations", body)

    def _storage(self, answer: _Answered) -> str:
        """Return the URL that an answer redirects to, which must be at least as secure as its
        origin.
        """
        place: str = answer.headers.get("location", "")
        try:
            url = httpx.URL(place)
        except httpx.InvalidURL as error:
            raise _lied(f"the storage is no URL: {error}") from error
        schemes = {"https", self._http.base_url.scheme}
        if url.scheme not in schemes or not url.host or url.userinfo or len(place) > MAX_URL_CHARS:
            raise _lied(f"the storage is not a place to fetch from: {place[:80]!r}")
        return place

    async def is_inside(self) -> bool:
        """Return whether the orchestrator is in a private network, as what it names then may be."""
        return await self._hosts.is_inside(self._http.base_url)

    async def connects_to(self, host: str, port: int) -> Sequence[str]:
        """Return the name or the addresses to connect to for a host that the orchestrator names;
        raises ConnectionError when it is in a private network and the orchestrator is not.
        """
        return [host] if await self.is_inside() else await self._hosts.require_public(host, port)

    async def _stored(self, place: str) -> _Answered:
        http = self._http if await self.is_inside() else self._public
        try:
            return await self._send("GET", place, max_bytes=MAX_FILE_BYTES, http=http)
        except ConnectionError as error:
            raise _lied(f"the storage cannot be asked: {error}") from error

    # One request

    async def _get(self, kind: type[A], path: str, max_bytes: int = MAX_ANSWER_BYTES) -> A:
        return _parse(kind, await self._send("GET", path, max_bytes=max_bytes))

    async def _post(self, path: str, body: Body) -> _Answered:
        return await self._send(
            "POST",
            path,
            body.model_dump_json(exclude_unset=True).encode(),
            headers={"content-type": "application/json"},
            signed=True,
            max_bytes=MAX_SMALL_ANSWER_BYTES,
        )

    async def _send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        signed: bool = False,
        max_bytes: int = MAX_ANSWER_BYTES,
        accepted: Sequence[int] = range(300),
        http: httpx.AsyncClient | None = None,
    ) -> _Answered:
        body_hash, http = file_hash(body or b""), http or self._http
        call = _Call(http, method, path, body, headers or {}, signed, body_hash, max_bytes)
        for attempt in range(1, ATTEMPTS):
            try:
                answer = await self._once(call)
            except _UNREACHABLE as error:
                logger.debug("request failed", extra={"path": path, "error": type(error).__name__})
                await asyncio.sleep(self._pause_s(attempt))
                continue
            if answer.status not in _RETRIED:
                return _accept(answer, accepted)
            await asyncio.sleep(max(_retry_after(answer.headers) or 0.0, self._pause_s(attempt)))
        try:
            return _accept(await self._once(call), accepted)
        except _UNREACHABLE as error:
            raise _unreachable(self._http.base_url, error) from error

    async def _once(self, call: _Call) -> _Answered:
        request = call.http.build_request(
            call.method, call.path, content=call.body, headers=dict(call.headers)
        )
        if call.signed:
            request.headers.update(self._sign(request, call.body_hash))
        # httpx limits each single read and write; this limits a whole slow answer.
        async with asyncio.timeout(self._timeout_s * 6):
            response = await call.http.send(request, stream=True)
            if request.url.netloc == self._http.base_url.netloc:
                self._hosts.note_peer(request.url, response)
            try:
                content = await read_body(response, call.max_bytes)
            finally:
                await response.aclose()
        return _Answered(response.status_code, response.headers, content)

    def _pause_s(self, attempt: int) -> float:
        # Jitter, so that a fleet that lost its orchestrator does not return all at once.
        pause_s = min(self._backoff_s * 2.0 ** (attempt - 1), MAX_PAUSE_S)
        return pause_s * random.uniform(0.5, 1.5)

    def _sign(self, request: httpx.Request, body_hash: Hash32) -> dict[str, str]:
        if self._key is None or self._domain is None or self._audience is None:
            raise ConfigError("this request must be signed: give key, domain and audience")
        return sign_request(
            self._key,
            self._domain,
            self._audience() if callable(self._audience) else self._audience,
            request.method,
            request.url.raw_path.decode("ascii"),
            body_hash=body_hash,
            nonce=Hash32(secrets.token_bytes(32)),
            issued_at=int(self._clock()),
        )


@cache
def tls_context() -> ssl.SSLContext:
    """Return the TLS context of all connections of this process: making one loads the authorities'
    certificates, 20 ms of CPU.
    """
    return httpx.create_ssl_context(trust_env=False)


def _accept(answer: _Answered, accepted: Sequence[int]) -> _Answered:
    if answer.status not in accepted:
        raise _refusal(answer.status, answer.body)
    return answer


def _range_of(answer: _Answered) -> tuple[int, int]:
    """Return where a part of a document starts, and how long the document is."""
    if answer.status != 206:
        return 0, len(answer.body)
    stated = _RANGE.fullmatch(answer.headers.get("content-range", ""))
    if stated is None:
        raise _lied("an answer does not say which part of the document it is")
    return int(stated[1]), int(stated[2])


def _write_at(path: Path, start: int, data: bytes) -> None:
    with path.open("r+b" if start else "wb") as file:
        file.seek(start)
        file.write(data)


async def read_body(response: httpx.Response, max_bytes: int) -> bytes:
    """Return an answer's body; raises ApiError when it is longer, or compressed and no error."""
    parts: list[bytes] = []
    size = 0
    if response.headers.get("content-encoding", "identity") != "identity":
        if response.is_error:
            return b""  # a proxy's page: the status says enough
        raise _lied("the answer is compressed, which was not requested")
    async for part in response.aiter_bytes():
        size += len(part)
        if size > max_bytes:
            raise _lied(f"the answer exceeds {max_bytes} bytes")
        parts.append(part)
    return b"".join(parts)


def _parse(kind: type[A], answer: _Answered) -> A:
    try:
        return kind.model_validate_json(answer.body)
    except ValidationError as error:
        raise _lied(f"{kind.__name__}.{first_fault(error)}") from error


def _refusal(status: int, body: bytes) -> ApiError:
    try:
        error = json.loads(body)["error"]
        code = _CODE.fullmatch(str(error["code"]))
        message, hint = str(error["message"])[:MAX_MESSAGE_CHARS], error.get("hint")
        hint = None if hint is None else str(hint)[:MAX_MESSAGE_CHARS]
        if (status, error["code"]) == (409, "slot_taken") and error.get("held") is not None:
            return SlotTaken(message, SignedClaim.model_validate(error["held"]), hint=hint)
        return ApiError(
            message, status=status, code=code[0] if code else f"http_{status}", hint=hint
        )
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return ApiError(
            f"the orchestrator answered {status}",
            status=status,
            code=f"http_{status}",
            hint="check that this is the URL of a run's orchestrator",
        )


def _unreachable(base_url: httpx.URL, error: Exception) -> ApiError:
    return ApiError(
        f"no answer from the orchestrator at {base_url.host}: {type(error).__name__}",
        status=503,
        code="unreachable",
        hint="check that `muster orchestrator run` is up and that the URL is right",
    )


def _lied(message: str) -> ApiError:
    return ApiError(
        message, status=502, code="bad_answer", hint="the orchestrator is faulty or dishonest"
    )


def _retry_after(headers: httpx.Headers) -> float | None:
    try:
        pause_s = float(headers["retry-after"])
    except (KeyError, ValueError):
        return None
    return min(pause_s, MAX_RETRY_AFTER_S) if pause_s > 0 else None
