"""The HTTP server of a ChunkStore, for origins and relays (docs/protocol.md section 10).

Serves the store's versions and waits, within bounds, for those that are arriving. Trusts nobody:
every part of a URL is parsed into a number or a digest before it is used in a path.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import json
import logging
import math
import os
import re
import time
from collections.abc import AsyncIterator, Callable
from typing import BinaryIO, TypeVar

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from muster.lifecycle import machine_of, most_connections
from muster.lifecycle.rates import RateLimit
from muster.protocol.errors import ConfigError, StorageError
from muster.protocol.ids import Hash32, PolicyVersion, RunId
from muster.shardcast.chunks import Region
from muster.shardcast.connections import (
    FILES_EACH,
    MAX_TRACKED_MACHINES,
    ConnectionTable,
    LimitedServer,
    Sender,
    ServerLimits,
)
from muster.shardcast.metrics import ShardMetrics
from muster.shardcast.room import FileRoom, RoomRefusal
from muster.shardcast.store import ChunkStore

logger = logging.getLogger(__name__)

FOREIGN_CHANGE_POLL_S = 0.05
"""Seconds between two looks for versions of another process."""
SHUTDOWN_S = 1.0
"""Seconds that a stop waits for answers that are being sent."""
DRAINED_BYTES = 1 << 20
"""Most bytes read of a refused body, so that its sender gets to read the refusal."""
INLINE_BYTES = 64 << 10
"""Chunks up to this size are sent in one write rather than by sendfile."""

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of Prometheus' text format."""

_NUMBER = "(0|[1-9][0-9]{0,15})"
_DIGEST = "([0-9a-f]{64})"
_PATHS = {
    "chunk": re.compile(f"/v1/chunks/{_DIGEST}"),
    "versions": re.compile(f"/v1/{_NUMBER}/versions"),
    "manifest": re.compile(f"/v1/{_NUMBER}/{_NUMBER}/manifest"),
    "signature": re.compile(f"/v1/{_NUMBER}/{_NUMBER}/signature"),
    "files": re.compile(f"/v1/files/(?:0x)?{_DIGEST}"),
    "work": re.compile(f"/v1/work/(?:0x)?{_DIGEST}"),
    "healthz": re.compile("/healthz"),
    "metrics": re.compile("/metrics"),
}
_ROOM_KINDS = ("files", "work")

T = TypeVar("T")


class ShardServer:
    """Serves a store. `host` and `port` are where it listens; port 0 takes any free one."""

    def __init__(
        self,
        store: ChunkStore,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        limits: ServerLimits | None = None,
        token: str | None = None,
        wanted: Callable[[RunId, PolicyVersion], None] | None = None,
        metrics: ShardMetrics | None = None,
        room: FileRoom | None = None,
    ) -> None:
        """`token` is the bearer token that clients must send; `wanted` is called with versions that
        clients wait for; `room` is served beside the store.
        """
        self.metrics = metrics or ShardMetrics()
        self.chunk_asked_at = time.monotonic()
        """Monotonic time of the last request for a chunk, or of this object's creation."""
        self._store = store
        self._host = host
        self._port = port
        self._limits = limits or ServerLimits()
        self._token = token
        self._wanted = wanted
        self._room = room
        self._rates = RateLimit(
            rate=self._limits.requests_per_s,
            burst=self._limits.burst,
            max_keys=MAX_TRACKED_MACHINES,
        )
        self._listed: dict[tuple[RunId, bool], list[PolicyVersion]] = {}
        self._waiting = 0
        self._stopping = False
        self._runner: web.ServerRunner | None = None

    @property
    def url(self) -> str:
        """Where clients on this machine reach it; raises ConfigError before `start`."""
        if self._runner is None or not self._runner.addresses:
            raise ConfigError("the server has not been started")
        host, port = self._runner.addresses[0][:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def start(self) -> None:
        """Listen; raises ConfigError when the address cannot be bound."""
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._stopping = False
        self._measured_s = -math.inf
        self._sender = Sender()
        self._unsubscribe = self._store.on_change(self._store_changed)
        self._changed_ns: list[int] = []
        self._look_for_foreign_changes()
        connections = most_connections(self._limits.connections, files_each=FILES_EACH)
        limits = dataclasses.replace(self._limits, connections=connections)
        self._table = ConnectionTable[RequestHandler](limits)
        self._runner = web.ServerRunner(
            LimitedServer(self._handle, limits, self._table, self.metrics),
            shutdown_timeout=SHUTDOWN_S,
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port, backlog=512)
        try:
            await site.start()
        except OSError as error:
            await self.stop()
            raise ConfigError(
                f"cannot listen on {self._host}:{self._port}: {error.strerror}",
                hint="choose another --host or --port",
            ) from error

    async def stop(self) -> None:
        """Stop listening and end open requests."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        self._stopping = True
        self._unsubscribe()
        self._next_look.cancel()
        self._wake()
        await runner.cleanup()
        await self._sender.close()

    async def __aenter__(self) -> ShardServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def _store_changed(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed while a publisher finishes
            self._loop.call_soon_threadsafe(self._wake)

    def _look_for_foreign_changes(self) -> None:
        self._next_look = self._loop.call_later(
            FOREIGN_CHANGE_POLL_S, self._look_for_foreign_changes
        )
        with contextlib.suppress(OSError):  # such as too many open files: the next look will tell
            if (changed_ns := self._store.changed_ns()) != self._changed_ns:
                self._changed_ns = changed_ns
                self._wake()

    def _wake(self) -> None:
        self._listed.clear()
        self._changed.set()
        self._changed = asyncio.Event()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self._table.touch(request.protocol, self._loop.time())
        response = self._refusal(request) or await self._answer(request)
        self._table.touch(request.protocol, self._loop.time())
        self.metrics.requests.labels(_asked(request.path)[0], str(response.status)).inc()
        return response

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await self._route(request)
        except (ConnectionError, asyncio.CancelledError):
            raise
        except OSError as error:  # such as too many open files: what is asked for may be here
            logger.error("cannot answer now", extra={"error": str(error)})
            return web.Response(status=503, headers={"Retry-After": "1"})
        except Exception:  # task boundary: one request must not end the connection's handler
            logger.exception("request failed")
            return web.Response(status=500)

    def _refusal(self, request: web.BaseRequest) -> web.Response | None:
        if self._rates.wait_s(machine_of(self._client(request))) > 0:
            return web.Response(status=429, headers={"Retry-After": "1"})
        has_room = self._room is not None and _asked(request.path)[0] in _ROOM_KINDS
        is_put = request.method == "PUT" and has_room
        if request.method not in ("GET", "HEAD") and not is_put:
            return web.Response(status=405, headers={"Allow": "GET, HEAD"})
        if request.can_read_body and not is_put:
            response = web.Response(status=413)
            response.force_close()
            return response
        if request.path != "/healthz" and not self._is_authorised(request):
            return web.Response(status=401, headers={"WWW-Authenticate": "Bearer"})
        return None

    def _is_authorised(self, request: web.BaseRequest) -> bool:
        if self._token is None:
            return True
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        return hmac.compare_digest(given, f"Bearer {self._token}".encode())

    async def _route(self, request: web.BaseRequest) -> web.StreamResponse:
        kind, parts = _asked(request.path)
        if kind == "healthz":
            return web.Response(text="ok")
        if kind == "metrics":
            return await self._metrics()
        if kind == "chunk":
            return await self._chunk(request, Hash32(bytes.fromhex(parts[0])))
        if kind in _ROOM_KINDS and self._room is not None:
            name = Hash32(bytes.fromhex(parts[0]))
            answer = self._put if request.method == "PUT" else self._of_room
            return await answer(request, self._room, kind, name)
        if kind == "versions":
            return await self._versions(request, RunId(int(parts[0])))
        if kind in ("manifest", "signature"):
            key = RunId(int(parts[0])), PolicyVersion(int(parts[1]))
            return await self._version_part(request, *key, part=kind)
        return _not_found()

    async def _metrics(self) -> web.Response:
        if self._loop.time() >= self._measured_s + self._limits.metrics_s:
            self._measured_s = self._loop.time()
            self._measured = self._loop.run_in_executor(None, self._measure)
        await asyncio.shield(self._measured)  # it goes on when one of those who wait has gone
        self.metrics.waiting.set(self._waiting)
        return web.Response(body=self.metrics.text(), headers={"Content-Type": METRICS_TYPE})

    def _measure(self) -> None:
        newest = max((version for _, version in self._store.complete()), default=-1)
        self.metrics.policy_version.set(newest)
        self.metrics.stored_bytes.set(self._store.chunks.used_bytes())

    async def _versions(self, request: web.BaseRequest, run_id: RunId) -> web.Response:
        after = _query_number(request, "after", default=-1)
        whole_only = bool(_query_number(request, "whole", default=0))

        def news() -> list[PolicyVersion] | None:
            versions = self._list(run_id, whole_only=whole_only)
            return versions if any(version > after for version in versions) else None

        found = await self._until(news, self._wait_s(request))
        versions = self._list(run_id, whole_only=whole_only) if found is None else found
        body = json.dumps({"versions": versions}).encode()
        return web.Response(body=body, content_type="application/json")

    def _list(self, run_id: RunId, *, whole_only: bool) -> list[PolicyVersion]:
        """Return a run's versions, newest first; looks at the store once after each change."""
        if (known := self._listed.get((run_id, whole_only))) is not None:
            return known
        versions = self._store.versions(run_id)
        if whole_only:
            versions = [v for v in versions if self._store.is_complete(run_id, v)]
        if versions:  # strangers ask for any number of runs
            self._listed[run_id, whole_only] = versions
        return versions

    async def _version_part(
        self, request: web.BaseRequest, run_id: RunId, version: PolicyVersion, *, part: str
    ) -> web.Response:
        wait_s = self._wait_s(request)
        read = self._store.manifest_bytes if part == "manifest" else self._store.signature

        def offered() -> bytes | None:
            return read(run_id, version) if self._store.is_offered(run_id, version) else None

        if wait_s and self._wanted is not None and offered() is None:
            self._wanted(run_id, version)
        data = await self._until(offered, wait_s)
        if data is None:
            return _not_found()
        kind = "application/json" if part == "manifest" else "application/octet-stream"
        return web.Response(body=data, content_type=kind)

    async def _chunk(self, request: web.BaseRequest, digest: Hash32) -> web.StreamResponse:
        self.chunk_asked_at = time.monotonic()
        region = await self._locate(digest)
        if region is None:
            return _not_found()
        try:
            file = region.path.open("rb", buffering=0)
        except FileNotFoundError:
            return _not_found()  # dropped since it was located
        with file:
            return await self._send_chunk(request, digest, file, region)

    async def _of_room(
        self, request: web.BaseRequest, room: FileRoom, kind: str, name: Hash32
    ) -> web.StreamResponse:
        path = await room.find_whole(kind, name)
        try:
            file = path.open("rb", buffering=0) if path else None
        except FileNotFoundError:
            file = None  # dropped since it was found
        if file is None:
            return _not_found()
        with file:
            size = os.fstat(file.fileno()).st_size
            return await self._send_range(request, file, range(size), {})

    async def _put(
        self, request: web.BaseRequest, room: FileRoom, kind: str, name: Hash32
    ) -> web.Response:
        try:
            async with asyncio.timeout(self._limits.send_s):
                await room.take(kind, name, _parts(request), self._client(request))
        except TimeoutError:
            self.metrics.cut_off.labels("slow").inc()
            return await _refused(request, RoomRefusal(408, "slow", "it was sent too slowly"))
        except RoomRefusal as refusal:
            return await _refused(request, refusal)
        except StorageError as error:
            logger.error("the room cannot keep a file", extra={"error": str(error)})
            return await _refused(request, RoomRefusal(507, "disk", "the relay's disk is full"))
        return web.Response(status=201)

    async def _locate(self, digest: Hash32) -> Region | None:
        if self._store.is_checked(digest):
            region = self._store.find(digest)
        else:
            region = await asyncio.to_thread(self._store.find, digest)
        if region is None and self._store.expects(digest):
            return await self._until(lambda: self._arrived(digest), self._limits.wait_s)
        return region

    def _arrived(self, digest: Hash32) -> Region | None:
        return self._store.find(digest) if self._store.is_checked(digest) else None

    async def _send_chunk(
        self, request: web.BaseRequest, digest: Hash32, file: BinaryIO, region: Region
    ) -> web.StreamResponse:
        size = region.size
        headers = {
            "ETag": f'"{digest.hex()}"',
            "Cache-Control": "public, max-age=31536000, immutable",
            "Accept-Ranges": "bytes",
        }
        if any(tag.value in (digest.hex(), "*") for tag in request.if_none_match or ()):
            return web.Response(status=304, headers=headers)
        window = _requested_range(request, size)
        if window is None:
            return web.Response(status=416, headers={"Content-Range": f"bytes */{size}"})
        if "Range" in request.headers:
            headers["Content-Range"] = f"bytes {window.start}-{window.stop - 1}/{size}"
        shifted = range(region.offset + window.start, region.offset + window.stop)
        return await self._send_range(request, file, shifted, headers)

    async def _send_range(
        self, request: web.BaseRequest, file: BinaryIO, window: range, headers: dict[str, str]
    ) -> web.StreamResponse:
        status = 206 if "Content-Range" in headers else 200
        if len(window) <= INLINE_BYTES and request.method == "GET":
            body = os.pread(file.fileno(), len(window), window.start)
            self.metrics.sent_bytes.inc(len(body))
            self._table.know(machine_of(self._client(request)))
            return web.Response(status=status, body=body, headers=headers)
        response = web.StreamResponse(status=status, headers=headers)
        response.content_type = "application/octet-stream"
        response.content_length = len(window)
        await response.prepare(request)
        try:
            if request.method == "GET":
                await self._sendfile(request, file, window)
                self._table.know(machine_of(self._client(request)))
            await response.write_eof()
        except ConnectionError as error:
            # A reader that disconnects is no error here; raised, it would log a traceback each
            # time.
            logger.debug("a reader has gone", extra={"error": str(error)})
            if request.transport is not None:
                request.transport.abort()
        return response

    async def _sendfile(self, request: web.BaseRequest, file: BinaryIO, window: range) -> None:
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the client has gone")
        try:
            async with asyncio.timeout(self._limits.send_s):
                await self._sender.send(transport, file, window)
        except TimeoutError as error:
            transport.abort()
            self.metrics.cut_off.labels("slow").inc()
            raise ConnectionResetError("the client reads too slowly") from error
        self.metrics.sent_bytes.inc(len(window))

    def _client(self, request: web.BaseRequest) -> str:
        """Return the address of the machine that asks."""
        forwarded = ",".join(request.headers.getall("X-Forwarded-For", []))
        return self._limits.proxies.client_of(request.remote or "", forwarded)

    def _wait_s(self, request: web.BaseRequest) -> float:
        return min(_query_number(request, "wait", default=0), self._limits.wait_s)

    async def _until(self, ready: Callable[[], T | None], wait_s: float) -> T | None:
        """Return the first result of `ready` that is not None, or None after `wait_s` seconds."""
        value = ready()
        if value is not None or wait_s <= 0 or self._waiting >= self._limits.waiting:
            return value
        deadline = self._loop.time() + wait_s
        self._waiting += 1
        try:
            while value is None and not self._stopping and self._loop.time() < deadline:
                changed = self._changed
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), deadline - self._loop.time())
                value = ready()
            return value
        finally:
            self._waiting -= 1


def _asked(path: str) -> tuple[str, tuple[str, ...]]:
    """Return the kind of request of a path, and the path's numbers and digests.

    The kind is one of a few words: the number of metric labels must not grow with requests.
    """
    for kind, pattern in _PATHS.items():
        if match := pattern.fullmatch(path):
            return kind, match.groups()
    return "other", ()


async def _parts(request: web.BaseRequest) -> AsyncIterator[bytes]:
    async for part in request.content.iter_chunked(INLINE_BYTES):
        yield part


async def _refused(request: web.BaseRequest, refusal: RoomRefusal) -> web.Response:
    """Return the answer for a refused upload, with the reason."""
    size = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SHUTDOWN_S):
            async for part in request.content.iter_chunked(INLINE_BYTES):
                size += len(part)
                if size > DRAINED_BYTES:
                    break
    said = {"code": refusal.code, "message": str(refusal), "hint": refusal.hint or ""}
    response = web.json_response({"error": said}, status=refusal.status)
    response.force_close()
    return response


def _not_found() -> web.Response:
    return web.Response(status=404)


def _query_number(request: web.BaseRequest, name: str, *, default: int) -> int:
    text = request.query.get(name, "")
    return int(text) if re.fullmatch(_NUMBER, text) else default


def _requested_range(request: web.BaseRequest, size: int) -> range | None:
    """Return the bytes to send, all of them without a Range header; None when unsatisfiable."""
    try:
        wanted = request.http_range
    except ValueError:
        return None
    window = range(size)[wanted]
    return window if len(window) or not size else None
