"""Receiving a chunk's body in a thread: socket, hash and disk in turn, in one small buffer.

The buffer fits a core's own cache, so hashing and writing find the bytes there. The thread holds
the interpreter's lock only in between.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from muster.shardcast.chunks import VerifyingSink

BUFFER_BYTES = 256 << 10
"""Bytes received, hashed and written at a time."""
_local = threading.local()


def receive_body(
    early: bytes, sock: socket.socket, sink: VerifyingSink, *, silence_s: float
) -> None:
    """Fill the sink from `early` and the socket, which it closes; it stays connected elsewhere.

    Raises EncodingError or StorageError as the sink does, ConnectionError when the peer breaks off,
    TimeoutError when a buffer takes longer than `silence_s`.
    """
    with sock, _batched(sock) as poller:
        left = sink.size - len(early)
        if early:
            sink.write([early])
        while left:
            block = _buffer()[:left]
            _fill(sock, poller, block, time.monotonic() + silence_s)
            sink.write([block])
            left -= len(block)


def _fill(sock: socket.socket, poller: select.poll, block: memoryview, deadline_s: float) -> None:
    while block:
        try:
            count = sock.recv_into(block)
        except BlockingIOError:
            _wake_at(sock, len(block))
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not poller.poll(left_s * 1000):
                raise TimeoutError("the peer stopped sending") from None
            continue
        if not count:
            raise ConnectionResetError("the peer closed the connection")
        block = block[count:]


def _wake_at(sock: socket.socket, count: int) -> None:
    """Let the socket count as readable once that many bytes are there, not with each segment."""
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
