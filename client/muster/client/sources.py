"""Sources: servers with a submission's file, its ticket, or a run's pinned documents.

A source is the base URL of an orchestrator, of a relay's file room or of any server with the same
paths. Most are named by strangers, on chain: no answer is trusted, and each source gets a limited
time and number of bytes. A source that hangs delays the next by a few seconds only. A stranger's
source is a scheme, a host and a port, and all addresses of its host must be public. A source may
redirect us for content that has a hash, as orchestrators with a bucket do: a few times, without our
signature, and never into a private network that the source is not in.
"""

import asyncio
import json
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar
from urllib.parse import urlsplit

import httpx
from pydantic import ValidationError

from muster.api import BatchContents, BatchEntry, OrchestratorApi, RunInfo
from muster.api.client import MAX_ANSWER_BYTES, MAX_SMALL_ANSWER_BYTES, read_body, tls_context
from muster.api.network_document import is_private, url_fault
from muster.api.public_hosts import (
    PrivateNetwork,
    PublicHosts,
    PublicTransport,
    Resolve,
    resolve,
)
from muster.api.signing import sign_request
from muster.protocol.bounds import MAX_FILE_BYTES
from muster.protocol.eip712 import Domain
from muster.protocol.encoding import file_hash, hex0x, keccak
from muster.protocol.errors import ApiError, MusterError, ProtocolError, StorageError
from muster.protocol.ids import Address, Hash32, RunId
from muster.protocol.merkle import batch_root
from muster.shardcast.cache import require_room
from muster.shardcast.http_client import DEFAULT_PORTS, ConnectsTo
from muster.tasks.document import document_root

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_NAMED = 16
"""Sources that a claim or a submission may name on chain."""
MAX_URL_CHARS = 128
"""Longest URL of a named source."""
MAX_SOURCES = 64
"""Most sources asked about one thing, ours included."""
LANES = 4
"""Most sources asked at the same time."""
INLINE_BYTES = 1 << 20
"""Answers up to this size are hashed on the event loop, in a millisecond or two."""
MAX_REDIRECTS = 3
"""Most redirects of one request."""
MAX_PLACE_CHARS = 4096
"""Longest URL of a redirect; presigned URLs are long."""
MAX_REFUSAL_BYTES = 4096
"""Most bytes that are read of an error response."""
SOURCES_HINT = "give more sources with --source URL: the run's orchestrator, or its relays"
DOCUMENTS_HINT = (
    "relays have no task set, recipe or calibration: give an orchestrator with --source URL, "
    "or any server that shows a copy of its --documents as /v1/documents/HASH"
)
_SOURCE = re.compile(r"https?://[A-Za-z0-9._:\[\]-]+/?")
_CODE = re.compile(r"[a-z_]{1,40}")
LACKING = (404, 410)
"""HTTP statuses that mean a file does not exist; anything else is silence about it."""
_REFUSED = (401, 403)
_ELSEWHERE = (301, 302, 303, 307, 308)
_FAILURES = (httpx.HTTPError, httpx.InvalidURL, OSError, TimeoutError, MusterError)


@dataclass(frozen=True, slots=True)
class SourcePatience:
    """Timeouts for sources."""

    connect_s: float = 5.0
    """Longest wait for a host's addresses, for a connection, and for each chunk of an answer."""
    source_s: float = 60.0
    """Deadline for one answer of one source: 64 MiB at 1.1 MB/s."""
    hedge_s: float = 3.0
    """Seconds without an answer after which the next source is asked in parallel."""
    document_s: float = 600.0
    """Deadline for one source to deliver a task set."""


@dataclass(frozen=True, slots=True)
class Signer:
    """The account that signs requests to sources that refuse strangers: orchestrators."""

    key: bytes
    """Private key of the account."""
    domain: Domain
    """EIP-712 domain of the ContributionLedger."""
    audience: Address
    """Account of the run's orchestrator."""


class Sources:
    """A list of sources, asked in order until one has the requested content."""

    def __init__(
        self,
        urls: Sequence[str] = (),
        *,
        named: Iterable[str] = (),
        allows_private: bool = False,
        signer: Signer | None = None,
        patience: SourcePatience | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        resolver: Resolve = resolve,
    ) -> None:
        """`urls` are our own; `named` are strangers'. Malformed named URLs are skipped and, unless
        `allows_private`, those that lead to this machine or its network are not asked.
        """
        named = list(named)
        theirs = [url for url in named if _is_askable(url, allows_private=allows_private)]
        self.urls = list(dict.fromkeys(url.rstrip("/") for url in [*urls, *theirs]))[:MAX_SOURCES]
        self.unasked = [url for url in named if url.rstrip("/") not in self.urls]
        """Named URLs that are not asked."""
        self.lacking = set[str]()
        """URLs that answered that they have no such file."""
        self._own = frozenset(url.rstrip("/") for url in urls)
        self._allows_private = allows_private
        self._signer = signer
        self._patience = patience or SourcePatience()
        self._hosts = PublicHosts(resolver, self._patience.connect_s)
        self._transport = transport
        self._http = self._client(transport)
        self._public = self._client(PublicTransport(self._hosts, transport or _network()))

    def _client(self, transport: httpx.AsyncBaseTransport | None) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            transport=transport,
            verify=tls_context(),
            timeout=self._patience.connect_s,
            trust_env=False,
            follow_redirects=False,
            # No compression: a small compressed answer may expand to any size.
            headers={"accept-encoding": "identity"},
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()
        await self._public.aclose()

    # Reading from sources

    async def file(self, submission_file_hash: Hash32) -> bytes:
        """Return a submission's file; raises ApiError when no source has it."""
        path = f"/v1/files/{hex0x(submission_file_hash)}"

        async def ask(url: str) -> bytes:
            try:
                data = await self._get(url, path, MAX_FILE_BYTES, follows=True)
            except ApiError as error:
                if error.status in LACKING:
                    self.lacking.add(url)
                raise
            if await _hashed(file_hash, data) != submission_file_hash:
                raise _lied("its file has another hash")
            return data

        return await self._first(f"the file {hex0x(submission_file_hash)}", ask)

    async def work(
        self, leaf: Hash32, accepts: Callable[[BatchEntry], bool] = lambda _: True
    ) -> BatchEntry:
        """Return a submission with its signatures and ticket, by its leaf.

        The leaf covers only the submission: `accepts` tells whether signatures and ticket are the
        right ones. Raises ApiError when no source has them.
        """

        async def ask(url: str) -> BatchEntry:
            data = await self._get(url, f"/v1/work/{hex0x(leaf)}", MAX_SMALL_ANSWER_BYTES)
            entry = BatchEntry.model_validate_json(data)
            if entry.submission.leaf() != leaf:
                raise _lied("it shows another submission")
            if not accepts(entry):
                raise _lied("its signatures or its ticket are invalid")
            return entry

        return await self._first(f"the work {hex0x(leaf)}", ask)

    async def batch(self, batch_id: int, root: Hash32, count: int) -> list[BatchEntry]:
        """Return all submissions of a batch that has this root; raises ApiError otherwise."""

        async def ask(url: str) -> list[BatchEntry]:
            data = await self._get(url, f"/v1/batches/{batch_id}", MAX_ANSWER_BYTES)
            entries = await asyncio.to_thread(_entries_of, data, root, count)
            if entries is None:
                raise _lied("it shows other submissions than those of the batch")
            return entries

        return await self._first(f"the submissions of batch {batch_id}", ask)

    async def document(self, document_hash: Hash32) -> bytes:
        """Return a document by its Keccak-256; raises ApiError when no source has it."""

        async def ask(url: str) -> bytes:
            path = f"/v1/documents/{hex0x(document_hash)}"
            data = await self._get(url, path, MAX_ANSWER_BYTES, follows=True)
            if await _hashed(keccak, data) != document_hash:
                raise _lied("its document has another hash")
            return data

        return await self._first(f"the document {hex0x(document_hash)}", ask, hint=DOCUMENTS_HINT)

    async def download(self, document_hash: Hash32, path: Path, *, max_bytes: int) -> None:
        """Write a task set to a file; raises ApiError when no source has it, or no room is left."""

        def admit(size: int) -> None:
            require_room(path.parent, size, what="a task set", needed_bytes=size)

        async def ask(url: str) -> None:
            path.unlink(missing_ok=True)
            transport = self._transport
            if not self._may_be_private(url):
                transport = PublicTransport(self._hosts, transport or _network())
            async with OrchestratorApi(url, transport=transport) as api:
                await api.download(document_hash, path, max_bytes=max_bytes, admit=admit)
            if await asyncio.to_thread(document_root, path) != document_hash:
                raise _lied("its task set has another root")

        what = f"the task set {hex0x(document_hash)}"
        patience_s = self._patience.document_s
        await self._first(what, ask, lanes=1, source_s=patience_s, hint=DOCUMENTS_HINT)

    async def run_info(self, run_id: RunId, url: str) -> RunInfo | None:
        """Return a source's information about a run if it is an orchestrator, else None."""
        try:
            async with asyncio.timeout(self._patience.source_s):
                data = await self._get(url, f"/v1/runs/{run_id}", MAX_SMALL_ANSWER_BYTES)
            return RunInfo.model_validate_json(data)
        except (*_FAILURES, ValidationError):
            return None

    async def relays_named_by(self, orchestrator: str, run_id: RunId) -> list[str]:
        """Return the relays that an orchestrator names for a run; empty when it does not answer."""
        info = await self.run_info(run_id, orchestrator.rstrip("/"))
        return list(info.relays) if info else []

    async def relays(self, run_id: RunId, own: Sequence[str]) -> tuple[list[str], ConnectsTo]:
        """Return relays of a run, and what a client connects to for their hosts.

        The relays are `own`, those that orchestrators among the sources name, and the sources,
        which may themselves be relays; strangers' come last. What our own orchestrator names is a
        stranger's, unless the orchestrator is in a private network.
        """
        asked = await asyncio.gather(*(self.run_info(run_id, url) for url in self.urls))
        ours, theirs = list(own), list[str]()
        for source, info in zip(self.urls, asked, strict=True):
            named = [*info.relays, info.origin] if info else []
            if source in self._own:
                is_ours = bool(named) and await self.is_inside(source)
                (ours if is_ours else theirs).extend(url for url in named if not url_fault(url))
                ours.append(source)
            else:
                allows = self._allows_private
                theirs += [url for url in named if _is_askable(url, allows_private=allows)]
        theirs += [url for url in self.urls if url not in self._own]
        known = {_host_of(url) for url in ours}

        async def connects_to(host: str, port: int) -> Sequence[str]:
            if self._allows_private or (host, port) in known:
                return [host]
            return await self._hosts.require_public(host, port)

        relays = [*dict.fromkeys(ours), *list(dict.fromkeys(theirs))[:MAX_SOURCES]]
        return list(dict.fromkeys(relays)), connects_to

    # Writing to sources

    async def deposit(
        self, data: bytes, entry: BatchEntry, *, without: Collection[str] = ()
    ) -> dict[str, str]:
        """Put a file and the proofs of its submission into every source's room but some, unless it
        has them.

        Returns the reason of each refusal by URL. A room accepts only work with a bond on chain, so
        this comes after the transaction.
        """
        file = f"/v1/files/{hex0x(entry.submission.file_hash)}"
        work = f"/v1/work/{hex0x(entry.submission.leaf())}"
        refused: dict[str, str] = {}

        async def give(url: str) -> None:
            try:
                async with asyncio.timeout(self._patience.source_s):
                    if not await self._has(url, work):
                        await self._put(url, work, entry.model_dump_json().encode())
                    if not await self._has(url, file):
                        await self._put(url, file, data)
            except _FAILURES as error:
                refused[url] = _words(error)

        async with asyncio.TaskGroup() as group:
            for url in self.urls:
                if url not in without:
                    group.create_task(give(url))
        return refused

    # One request

    async def _first(
        self,
        what: str,
        ask: Callable[[str], Awaitable[T]],
        *,
        lanes: int = LANES,
        source_s: float | None = None,
        hint: str = SOURCES_HINT,
    ) -> T:
        """Return the first valid answer; each lane continues with the next source not yet asked."""
        if not self.urls:
            raise _nobody(what, {}, hint)
        found: list[T] = []
        refused: dict[str, str] = {}
        waiting = iter(self.urls)
        all_asked = asyncio.Event()

        async def serve(lane: int) -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(lane * self._patience.hedge_s):
                    await all_asked.wait()
            for url in waiting:
                try:
                    async with asyncio.timeout(source_s or self._patience.source_s):
                        found.append(await ask(url))
                except (*_FAILURES, ValidationError) as error:
                    refused[url] = _words(error)
                    logger.debug("not shown", extra={"what": what, "why": refused[url]})
                    continue
                raise _Found
            all_asked.set()

        try:
            async with asyncio.TaskGroup() as group:
                for lane in range(min(lanes, len(self.urls))):
                    group.create_task(serve(lane))
        except* _Found:
            pass
        if not found:
            raise _nobody(what, refused, hint)
        return found[0]

    async def _get(self, source: str, path: str, max_bytes: int, *, follows: bool = False) -> bytes:
        """Return a response body; a source that refuses strangers gets a signed request.

        With `follows`, the source may redirect us, for content that is checked by its hash.
        """
        place, ask = source + path, self._once
        http = self._http if self._may_be_private(source) else self._public
        status, body = await ask(http, place, max_bytes, {})
        if status in _REFUSED and self._signer is not None:
            status, body = await ask(http, place, max_bytes, self._signed(place, self._signer))
        for _ in range(MAX_REDIRECTS if follows else 0):
            if status not in _ELSEWHERE:
                break
            place = _place(place, body)
            http = self._http if await self.is_inside(source) else self._public
            # Without our signature.
            status, body = await ask(http, place, max_bytes, {})
        if status != 200:
            raise _lied(f"answered {status}", status=status)
        return body

    def _may_be_private(self, source: str) -> bool:
        """Return whether a source may be in a private network: our own may."""
        return self._allows_private or source in self._own

    async def is_inside(self, source: str) -> bool:
        """Return whether a source may redirect us into a private network: our own that is in one
        may.
        """
        source = source.rstrip("/")
        if self._allows_private or source not in self._own:
            return self._allows_private
        return await self._hosts.is_inside(httpx.URL(source))

    async def _once(
        self, http: httpx.AsyncClient, url: str, max_bytes: int, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        """Return status and body or, for a redirect, the target instead of the body."""
        async with http.stream("GET", url, headers=dict(headers)) as response:
            self._hosts.note_peer(response.request.url, response)
            if response.status_code in _ELSEWHERE:
                place = response.headers.get("location", "")
                return response.status_code, place.encode("utf-8", "replace")
            if response.status_code != 200:
                return response.status_code, b""
            return 200, await read_body(response, max_bytes)

    async def _has(self, source: str, path: str) -> bool:
        """Return whether a source shows a file or proofs, without reading them."""
        http = self._http if self._may_be_private(source) else self._public
        async with http.stream("GET", source + path) as response:
            return response.status_code == 200

    async def _put(self, source: str, path: str, body: bytes) -> None:
        url = source + path
        http = self._http if self._may_be_private(source) else self._public
        async with http.stream("PUT", url, content=body) as response:
            if not 200 <= response.status_code < 300:
                words = f"answered {response.status_code}{await _code_of(response)}"
                raise _lied(words, status=response.status_code)

    def _signed(self, url: str, signer: Signer) -> dict[str, str]:
        return sign_request(
            signer.key,
            signer.domain,
            signer.audience,
            "GET",
            httpx.URL(url).raw_path.decode("ascii"),
            nonce=Hash32(secrets.token_bytes(32)),
            issued_at=int(time.time()),
        )


class _Found(Exception):
    """Ends the search."""


def source_fault(url: str) -> str | None:
    """Return why nobody asks a source that is named by this URL; None if it is fine.

    A path would let its owner choose what jurors sign when they ask there.
    """
    if len(url.encode()) > MAX_URL_CHARS:
        return f"has more than {MAX_URL_CHARS} characters"
    if fault := url_fault(url):
        return fault
    return None if _SOURCE.fullmatch(url) else "is more than a scheme, a host and a port"


def named_sources(urls: Iterable[str]) -> list[str]:
    """Return the URLs that can be named as sources on chain; logs a warning for every other."""
    named = []
    for url in dict.fromkeys(urls):
        if fault := source_fault(url):
            shown = url[:MAX_URL_CHARS]
            logger.warning("not named as a source", extra={"url": shown, "reason": fault})
        else:
            named.append(url)
    return named[:MAX_NAMED]


def _is_askable(url: str, *, allows_private: bool) -> bool:
    return source_fault(url) is None and (allows_private or not is_private(url))


def _network() -> httpx.AsyncBaseTransport:
    return httpx.AsyncHTTPTransport(verify=tls_context(), trust_env=False)


def _host_of(url: str) -> tuple[str, int]:
    """Return the host and port that a URL leads to."""
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or DEFAULT_PORTS[parts.scheme]


def _place(asked: str, location: bytes) -> str:
    """Return the target of a redirect; refuses a downgrade from https."""
    try:
        place = str(httpx.URL(asked).join(location.decode()))
    except (httpx.InvalidURL, ValueError):
        place = ""
    if len(place) > MAX_PLACE_CHARS or url_fault(place, ("https", httpx.URL(asked).scheme)):
        raise _lied("it redirects to an invalid place")
    return place


def _words(error: Exception) -> str:
    """Return in a few words why a source failed, without quoting it."""
    if isinstance(error, (ApiError, ProtocolError, StorageError, PrivateNetwork)):
        return str(error)[:200]
    if isinstance(error, ValidationError):
        return "answered something else"
    return "timed out" if isinstance(error, TimeoutError) else type(error).__name__


async def _code_of(response: httpx.Response) -> str:
    """Return the error code of a refusal in brackets; empty if the body is not in our format."""
    try:
        code = json.loads(await read_body(response, MAX_REFUSAL_BYTES))["error"]["code"]
    except (ApiError, ValueError, LookupError, TypeError, RecursionError):
        return ""
    return f" ({code})" if isinstance(code, str) and _CODE.fullmatch(code) else ""


async def _hashed(hashing: Callable[[bytes], Hash32], data: bytes) -> Hash32:
    """Return an answer's hash; large answers are hashed in a thread."""
    if len(data) <= INLINE_BYTES:
        return hashing(data)
    return await asyncio.to_thread(hashing, data)


def _entries_of(data: bytes, root: Hash32, count: int) -> list[BatchEntry] | None:
    """Return the submissions in an answer if they form a batch with this root."""
    entries = BatchContents.model_validate_json(data).submissions
    leaves = [entry.submission.leaf() for entry in entries]
    return entries if len(leaves) == count and batch_root(leaves) == root else None


def _lied(message: str, *, status: int = 502) -> ApiError:
    return ApiError(message, status=status, code="bad_source")


def _nobody(what: str, refused: Mapping[str, str], hint: str) -> ApiError:
    said = "; ".join(f"{url}: {why}" for url, why in list(refused.items())[:4])
    return ApiError(
        f"no source shows {what}" + (f" ({said})" if said else ""),
        status=503,
        code="no_source",
        hint=hint,
    )
