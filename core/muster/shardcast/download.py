"""Requests to one relay: each ends in verified bytes or in the relay's fault."""

import asyncio
import re
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import TypeVar

from muster.protocol.encoding import keccak
from muster.protocol.errors import EncodingError, SignatureError, StorageError
from muster.protocol.ids import Hash32, PolicyVersion, RunId
from muster.shardcast.chunks import VerifyingSink
from muster.shardcast.http_client import SILENCE_S, Connection, ConnectsTo, HttpClient
from muster.shardcast.manifest import MAX_MANIFEST_BYTES
from muster.shardcast.store import SIGNATURE_BYTES
from muster.shardcast.trust import TrustedRoot, check_signature

INLINE_BYTES = 256 << 10
"""Chunks up to this size are received without a thread."""
BLOCK_BYTES = 64 << 10
"""Bytes received at a time without a thread; each block has the deadline of a silence."""
BUFFER_BYTES = 256 << 10
"""Bytes that a thread receives, hashes and writes at a time."""
LOOK_S = 0.1
"""Seconds after which arrived bytes are counted, even if the buffer is not full."""
LEAST_BYTES = 64 << 10
"""A peer that sends fewer bytes than this in SILENCE_S seconds is given up."""
_local = threading.local()
EXTRA = 8
"""Attempts beyond `parallel`, for relays that send nothing yet, or almost nothing."""
MAX_VERSIONS = 64
"""Most versions read from one listing."""
_MAX_LISTING_BYTES = 64 << 10
# A pattern rather than a JSON parser: deep nesting cannot exhaust the stack. Possessive quantifiers
# keep it linear.
_LISTING = re.compile(
    rb'\s*+\{\s*+"versions"\s*+:\s*+\[\s*+((?:[0-9]++(?:\s*+,\s*+[0-9]++)*+)?+)\s*+\]\s*+\}\s*+'
)
MAX_REFUSAL_BYTES = 4 << 10
"""Most bytes read of a refusal's body, so that the connection stays usable."""

R = TypeVar("R")


class RelayFault(Enum):
    """What was wrong with a relay's answer."""

    ABSENT = "absent"
    """The relay does not have the item, or not yet."""
    FAILED = "failed"
    """The relay refused, broke off, or was too slow."""
    LIED = "lied"
    """The relay sent wrong bytes."""
    SLOW = "slow"
    """The relay was far slower than others at the same time, and was abandoned."""


class ShardClient:
    """Asks relays; connections are reused between requests."""

    def __init__(
        self,
        *,
        token: str | None = None,
        parallel: int = 4,
        connects_to: ConnectsTo | None = None,
    ) -> None:
        """`parallel` is the number of chunks to receive at the same time. `connects_to` decides
        which address a host has, and whether it is asked at all.
        """
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = HttpClient(headers, connects_to)
        # A relay that sends almost nothing occupies a thread too, until it is abandoned.
        self._threads = ThreadPoolExecutor(parallel + EXTRA, thread_name_prefix="chunk")

    def close(self) -> None:
        """Close every connection."""
        self._http.close()
        self._threads.shutdown(wait=False)

    async def versions(
        self,
        url: str,
        run_id: RunId,
        *,
        after: int = -1,
        wait_s: int = 0,
        whole_only: bool = False,
    ) -> list[PolicyVersion] | RelayFault:
        """Return the versions that a relay offers, newest first; wait for one newer than `after`.

        With `whole_only`, versions that the relay holds only in part are left out.
        """
        query = f"?after={after}&wait={wait_s}" if after >= 0 else f"?wait={wait_s}"
        query += "&whole=1" * whole_only
        data = await self._read(f"{url}/v1/{run_id}/versions{query}", _MAX_LISTING_BYTES)
        return data if isinstance(data, RelayFault) else parse_versions(data)

    async def manifest(
        self, url: str, run_id: RunId, version: PolicyVersion, *, root: Hash32, wait_s: int = 0
    ) -> bytes | RelayFault:
        """Return the manifest with that root; LIED when the relay has another one."""
        path = f"/v1/{run_id}/{version}/manifest?wait={wait_s}"
        data = await self._read(url + path, MAX_MANIFEST_BYTES)
        if not isinstance(data, RelayFault) and keccak(data) != root:
            return RelayFault.LIED
        return data

    async def any_manifest(
        self, url: str, run_id: RunId, version: PolicyVersion
    ) -> bytes | RelayFault:
        """Return the bytes that a relay sends as the manifest, unverified."""
        return await self._read(f"{url}/v1/{run_id}/{version}/manifest", MAX_MANIFEST_BYTES)

    async def signature(
        self, url: str, run_id: RunId, version: PolicyVersion
    ) -> bytes | RelayFault:
        """Return the bytes that a relay sends as the trainer's signature, unverified."""
        return await self._read(f"{url}/v1/{run_id}/{version}/signature", SIGNATURE_BYTES)

    async def signed_manifest(
        self, url: str, run_id: RunId, version: PolicyVersion, trusted: TrustedRoot
    ) -> tuple[bytes, bytes] | RelayFault:
        """Return manifest and signature; LIED unless both satisfy `trusted`."""
        data = await self.any_manifest(url, run_id, version)
        if isinstance(data, RelayFault):
            return data
        if trusted.manifest_root not in (None, keccak(data)):
            return RelayFault.LIED
        signature = await self.signature(url, run_id, version)
        if isinstance(signature, RelayFault):
            return signature
        try:
            check_signature(run_id, version, keccak(data), signature, trusted)
        except SignatureError:
            return RelayFault.LIED
        return data, signature

    async def chunk(self, url: str, sink: VerifyingSink) -> RelayFault | None:
        """Stream a chunk into its sink and commit it; None when it is verified and kept.

        Continues after the bytes that the sink has. Raises StorageError when the disk refuses. The
        caller closes the sink.
        """
        at = sink.received
        wanted = {"Range": f"bytes={at}-"} if at else {}
        try:
            async with self._http.get(f"{url}/v1/chunks/{sink.digest.hex()}", wanted) as (
                head,
                connection,
            ):
                if head.status not in (200, 206):
                    return await _refused(head.status, head.length, connection)
                if head.status == 200 and at:
                    sink.restart()  # the relay does not support ranges
                sink.seen = sink.received
                if head.length != sink.size - sink.received:
                    connection.close()
                    return RelayFault.LIED
                await self._receive(connection, sink)
        except StorageError:
            raise
        except (OSError, UnicodeError):  # any network failure, or an invalid host name
            return RelayFault.FAILED
        try:
            sink.commit()
        except EncodingError:
            return RelayFault.LIED
        return None

    async def _receive(self, connection: Connection, sink: VerifyingSink) -> None:
        """Receive the body in a thread, which also hashes and writes it."""
        taken = connection.take_over() if sink.size > INLINE_BYTES else None
        if taken is None:
            await self._receive_here(connection, sink)
            return
        receiving = asyncio.get_running_loop().run_in_executor(
            self._threads, partial(_receive_body, *taken, sink)
        )
        try:
            await asyncio.shield(receiving)
        except asyncio.CancelledError:
            connection.interrupt()
            await finished(receiving)
            receiving.exception()  # retrieved, so that asyncio does not log it
            raise

    async def _receive_here(self, connection: Connection, sink: VerifyingSink) -> None:
        """Receive a small or encrypted body in the event loop."""
        block = memoryview(bytearray(min(BLOCK_BYTES, sink.size)))
        while left := sink.size - sink.received:
            part = block[:left]
            try:
                await connection.read_into(part, saw=sink.saw)
            finally:
                sink.write([part[: sink.seen - sink.received]])

    async def _read(self, url: str, max_bytes: int) -> bytes | RelayFault:
        try:
            async with self._http.get(url) as (head, connection):
                if head.status != 200:
                    return await _refused(head.status, head.length, connection)
                if head.length > max_bytes:
                    connection.close()
                    return RelayFault.LIED
                data = bytearray(head.length)
                for start in range(0, head.length, BLOCK_BYTES):
                    await connection.read_into(memoryview(data)[start : start + BLOCK_BYTES])
                return bytes(data)
        except (OSError, UnicodeError):
            return RelayFault.FAILED


async def in_thread(function: Callable[..., R], *args: object) -> R:
    """Run in a thread; if cancelled, wait for the thread first, because the caller closes its
    resources.
    """
    running = asyncio.ensure_future(asyncio.to_thread(function, *args))
    await finished(running)
    return running.result()


async def finished(future: asyncio.Future[R]) -> None:
    """Wait until the future is done, even if cancelled in between."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


async def _refused(status: int, length: int, connection: Connection) -> RelayFault:
    if length <= MAX_REFUSAL_BYTES:
        await connection.read_into(memoryview(bytearray(length)))
    else:
        connection.close()
    return RelayFault.ABSENT if status == 404 else RelayFault.FAILED


def parse_versions(data: bytes) -> list[PolicyVersion] | RelayFault:
    """Return the versions of a listing, newest first; LIED for anything but a listing."""
    match = _LISTING.fullmatch(data)
    if match is None:
        return RelayFault.LIED
    texts = re.findall(rb"[0-9]+", match[1])[:MAX_VERSIONS]
    numbers = [int(text) for text in texts if len(text) <= 10]
    return sorted((PolicyVersion(n) for n in set(numbers) if n < 1 << 32), reverse=True)


# Receiving in a thread: socket, hash and disk use one small buffer in turn. The buffer fits a
# core's own cache, so hashing and writing read from there; the thread holds the GIL only in
# between.


def _receive_body(early: bytes, sock: socket.socket, sink: VerifyingSink) -> None:
    """Fill the sink from `early` and the socket, and close this duplicate of the socket.

    Raises EncodingError or StorageError as the sink does, ConnectionError when the peer breaks off,
    TimeoutError when fewer than LEAST_BYTES come in SILENCE_S.
    """
    with sock, _batched(sock) as poller:
        if early:
            sink.saw(len(early))
            sink.write([early])
        while left := sink.size - sink.received:
            block = _buffer()[:left]
            try:
                _fill(sock, poller, block, sink)
            finally:  # an attempt that ends early leaves what came to the next one
                sink.write([block[: sink.seen - sink.received]])


def _fill(sock: socket.socket, poller: select.poll, block: memoryview, sink: VerifyingSink) -> None:
    deadline_s, enough = time.monotonic() + SILENCE_S, sink.seen + LEAST_BYTES
    while block:
        try:
            count = sock.recv_into(block)
        except BlockingIOError:
            _wake_at(sock, len(block))
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("the peer stopped sending") from None
            poller.poll(min(left_s, LOOK_S) * 1000)
            continue
        if not count:
            raise ConnectionResetError("the peer closed the connection")
        sink.saw(count)
        block = block[count:]
        if sink.seen >= enough:
            deadline_s, enough = time.monotonic() + SILENCE_S, sink.seen + LEAST_BYTES


def _wake_at(sock: socket.socket, count: int) -> None:
    """Make the socket readable only when that many bytes are there, not at each segment."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)


@contextmanager
def _batched(sock: socket.socket) -> Iterator[select.poll]:
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    try:
        yield poller
    finally:
        _wake_at(sock, 1)


def _buffer() -> memoryview:
    """Return this thread's buffer."""
    if not hasattr(_local, "buffer"):
        _local.buffer = memoryview(bytearray(BUFFER_BYTES))
    view: memoryview = _local.buffer
    return view
