"""Sending a chunk: from the page cache to the socket within the kernel.

A fast reader is served by a thread, which wakes up cheaply; one that has not read everything after
a moment goes on in the event loop, so that slow readers occupy no thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO, Protocol

SENDERS = 4
"""Fast readers served at the same time; others are served by the event loop alone."""
THREAD_S = 0.25
"""Longest time a thread spends on one reader."""
CONGESTION_CONTROL = b"bbr"
"""What senders use where the kernel lets them: it does not take random loss for a full queue."""


class SocketOptions(Protocol):
    """The part of a socket that asyncio hands out."""

    def setsockopt(self, level: int, option: int, value: bytes, /) -> None:
        """Set an option."""


def prefer_congestion_control(sock: SocketOptions, name: bytes = CONGESTION_CONTROL) -> None:
    """Use this congestion control for what the socket sends; the machine's own where it cannot."""
    option = getattr(socket, "TCP_CONGESTION", None)  # Linux and FreeBSD
    if option is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, option, name)


class Sender:
    """Sends parts of files over an event loop's transports."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(SENDERS, thread_name_prefix="send")
        self._busy = 0

    def close(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=False)

    async def send(self, transport: asyncio.Transport, file: BinaryIO, window: range) -> None:
        """Send those bytes of the file; raises ConnectionError when the reader has gone.

        The caller has written the head and writes nothing meanwhile.
        """
        loop = asyncio.get_running_loop()
        start = window.start
        if self._busy < SENDERS and _is_plain_and_idle(transport):
            sock = os.dup(transport.get_extra_info("socket").fileno())
            copy = os.dup(file.fileno())
            self._busy += 1
            try:
                start = await loop.run_in_executor(self._threads, _send, sock, copy, window)
            finally:
                self._busy -= 1
        if start < window.stop:
            await loop.sendfile(transport, file, start, window.stop - start)


def _is_plain_and_idle(transport: asyncio.Transport) -> bool:
    encrypted = transport.get_extra_info("sslcontext") is not None
    return not encrypted and not transport.is_closing() and not transport.get_write_buffer_size()


def _send(sock: int, file: int, window: range) -> int:
    """Send for a while; returns the first byte that was not sent. Closes both descriptors."""
    deadline_s = time.monotonic() + THREAD_S
    at = window.start
    try:
        poller = select.poll()
        poller.register(sock, select.POLLOUT)
        while at < window.stop:
            try:
                count = os.sendfile(sock, file, at, window.stop - at)
            except BlockingIOError:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not poller.poll(left_s * 1000):
                    break
                continue
            if not count:
                raise ConnectionAbortedError("the file became shorter")
            at += count
        return at
    finally:
        os.close(sock)
        os.close(file)
