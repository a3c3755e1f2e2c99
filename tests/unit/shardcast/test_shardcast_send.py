"""Which congestion control senders use."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.shardcast.send import prefer_congestion_control

ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")


@pytest.fixture
def sock() -> Iterator[socket.socket]:
    with socket.socket() as made:
        yield made


def control_of(sock: socket.socket) -> bytes:
    found = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return found.rstrip(b"\0")


@pytest.mark.skipif(not ALLOWED.exists(), reason="no Linux")
@pytest.mark.parametrize("name", ALLOWED.read_bytes().split() if ALLOWED.exists() else [])
def test_congestion_control_is_the_one_preferred(sock: socket.socket, name: bytes) -> None:
    prefer_congestion_control(sock, name)
    assert control_of(sock) == name


@pytest.mark.skipif(not ALLOWED.exists(), reason="no Linux")
def test_congestion_control_stays_when_the_kernel_lacks_it(sock: socket.socket) -> None:
    before = control_of(sock)
    prefer_congestion_control(sock, b"nosuch")
    assert control_of(sock) == before
