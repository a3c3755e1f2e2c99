"""Frames between the engine and its process: a JSON header and raw bytes, over a stream socket.

Both ends run this code. Neither trusts the other's lengths: a frame beyond the bounds is an error
before anything is allocated, and every wait has a deadline. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any

MAX_HEADER_BYTES = 16 << 20
"""A longer header is none."""
MAX_BODY_BYTES = 256 << 20
"""A larger body is none; senders divide what is larger."""

_LENGTHS = struct.Struct("<II")
_RECEIVE_BYTES = 1 << 20


class ChannelBroken(Exception):
    """The other end does not follow the format, or is gone."""


class ChannelClosed(ChannelBroken):
    """The other end is gone."""


class ChannelSilent(Exception):
    """The other end did not take or say anything in time."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message."""

    header: dict[str, Any]
    """What it is, under "kind", and its small parts."""
    body: bytes = b""
    """Its arrays, as `muster.inference.vllm.messages` lays them out."""

    @property
    def kind(self) -> str:
        """What it is."""
        return str(self.header.get("kind"))


class Channel:
    """One end. One thread may send while another receives, if neither sets a deadline: a socket has
    one timeout for both directions.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def send(self, frame: Frame, *, within_s: float | None = None) -> None:
        """Send a frame; raises ChannelBroken, and ChannelSilent when nobody takes it in time."""
        header = json.dumps(frame.header, separators=(",", ":")).encode()
        if len(header) > MAX_HEADER_BYTES or len(frame.body) > MAX_BODY_BYTES:
            raise ValueError(f"a frame of {len(header)} + {len(frame.body)} bytes is too long")
        self._socket.settimeout(within_s)
        try:
            self._socket.sendall(_LENGTHS.pack(len(header), len(frame.body)) + header)
            self._socket.sendall(frame.body)
        except TimeoutError:
            raise ChannelSilent(f"nothing was taken for {within_s} s") from None
        except OSError as error:
            raise ChannelClosed(f"the other end is gone: {error}") from error

    def receive(self, *, within_s: float | None = None) -> Frame:
        """Return the next frame; raises ChannelBroken, and ChannelSilent unless it is whole in
        time.
        """
        deadline = None if within_s is None else time.monotonic() + within_s
        header_bytes, body_bytes = _LENGTHS.unpack(self._read(_LENGTHS.size, deadline))
        if header_bytes > MAX_HEADER_BYTES or body_bytes > MAX_BODY_BYTES:
            raise ChannelBroken(f"a frame of {header_bytes} + {body_bytes} bytes is none")
        raw = self._read(header_bytes, deadline)
        body = self._read(body_bytes, deadline)
        try:
            header = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise ChannelBroken(f"a header does not parse: {error}") from None
        if not isinstance(header, dict):
            raise ChannelBroken("a header is not an object")
        return Frame(header, body)

    def close(self) -> None:
        """Close this end; the other one's waits end."""
        self._socket.close()

    def _read(self, size: int, deadline: float | None) -> bytes:
        parts: list[bytes] = []
        missing = size
        while missing:
            part = self._receive(min(missing, _RECEIVE_BYTES), deadline)
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def _receive(self, most: int, deadline: float | None) -> bytes:
        # Not 0, which would mean without waiting: what has already arrived is still taken.
        wait_s = None if deadline is None else max(deadline - time.monotonic(), 1e-3)
        self._socket.settimeout(wait_s)
        try:
            part = self._socket.recv(most)
        except TimeoutError:
            raise ChannelSilent("nothing was said in time") from None
        except OSError as error:
            raise ChannelClosed(f"the other end is gone: {error}") from error
        if not part:
            raise ChannelClosed("the other end is gone")
        return part
