"""Connections of many machines share a server, and fast readers get threads."""

import asyncio
import errno
import os
import socket
from asyncio import create_task
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from muster.shardcast.connections import (
    FREE_CONNECTIONS,
    SENDERS,
    ConnectionTable,
    LimitedServer,
    Sender,
    ServerLimits,
    prefer_congestion_control,
)
from muster.shardcast.metrics import ShardMetrics


def full(*addresses: str, limit: int) -> ConnectionTable[str]:
    """A full ConnectionTable: connections `address-number`, which came one a second."""
    table = ConnectionTable[str](ServerLimits(connections=limit, connections_per_address=100))
    for number, address in enumerate(addresses):
        assert table.take(f"{address}-{number}", address, float(number)) is None
    return table


def test_newcomer_replaces_the_longest_idle_connection_of_who_has_most() -> None:
    table = full("few", "many", "many", "many", limit=4)
    table.touch("many-1", 9.0)
    assert table.take("new", "new", 10.0) == "many-2"


def test_newcomer_gives_way_itself_when_its_address_has_all_connections() -> None:
    table = full("many", "many", limit=2)
    table.touch("many-0", 9.0)
    assert table.take("many-2", "many", 10.0) == "many-1"


def test_address_that_took_a_chunk_keeps_its_connections() -> None:
    table = full(*["known"] * FREE_CONNECTIONS, "bot", "bot", limit=FREE_CONNECTIONS + 2)
    table.know("known")
    assert table.take("new", "new", 99.0) == f"bot-{FREE_CONNECTIONS}"


def test_address_gets_no_more_connections_than_it_may() -> None:
    table = ConnectionTable[str](ServerLimits(connections=9, connections_per_address=1))
    assert table.take("a", "x", 0.0) is None
    assert table.take("b", "x", 1.0) == "b"
    table.leave("b")
    table.leave("b")
    assert len(table) == 1


# Which congestion control senders use


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


class Line(asyncio.Transport):
    """A connection from an address."""

    def __init__(self, address: str, sock: socket.socket) -> None:
        super().__init__({"peername": (address, 1), "socket": sock})
        self.is_cut = False

    def abort(self) -> None:
        """Remember it."""
        self.is_cut = True


@pytest.mark.parametrize(
    ("addresses", "cut"),
    [
        (("2001:db8:0:1::1", "2001:db8:0:1::2", "2001:db8:0:1:ffff::3"), [False, False, True]),
        (("2001:db8:0:1::1", "2001:db8:0:1::2", "2001:db8:0:2::3"), [False, False, False]),
        (("10.0.0.1", "10.0.0.1", "::ffff:10.0.0.1"), [False, False, True]),
        (("10.0.0.1", "10.0.0.2", "10.0.0.3"), [False, False, False]),
    ],
)
async def test_connections_count_by_machine(addresses: tuple[str, ...], cut: list[bool]) -> None:
    async def never(_request: Any) -> web.Response:
        raise AssertionError

    limits = ServerLimits(connections_per_address=2)
    server = LimitedServer(never, limits, ConnectionTable(limits), ShardMetrics())
    with socket.socket() as sock:
        lines = [Line(address, sock) for address in addresses]
        for line in lines:
            server().connection_made(line)
    assert [line.is_cut for line in lines] == cut


# Threads for fast readers


OPEN_FILES = Path("/proc/self/fd")
STALLS_BYTES = 8 << 20
"""More bytes than a connection takes whose other end does not read."""


@asynccontextmanager
async def unread_connections(count: int) -> AsyncIterator[list[asyncio.Transport]]:
    """Connections whose other ends do not read."""
    loop, ends = asyncio.get_running_loop(), [socket.socketpair() for _ in range(count)]
    made = [await loop.create_connection(asyncio.Protocol, sock=ours) for ours, _ in ends]
    try:
        yield [transport for transport, _ in made]
    finally:
        for (transport, _), (_, theirs) in zip(made, ends, strict=True):
            transport.abort()
            theirs.close()
        await asyncio.sleep(0)  # they close in the event loop's next round


@pytest.mark.skipif(not OPEN_FILES.exists(), reason="no Linux")
async def test_sends_that_are_cancelled_keep_no_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "chunk"
    path.write_bytes(bytes(STALLS_BYTES))
    sender = Sender()
    async with unread_connections(2 * SENDERS) as lines:
        before = len(os.listdir(OPEN_FILES))
        for some in (lines[:SENDERS], lines[SENDERS:]):  # the first ones occupy all threads
            with path.open("rb", buffering=0) as file:
                sends = [create_task(sender.send(t, file, range(STALLS_BYTES))) for t in some]
                await asyncio.sleep(0)
                assert [send.cancel() for send in sends] == [True] * SENDERS
                await asyncio.gather(*sends, return_exceptions=True)
        await sender.close()
        assert len(os.listdir(OPEN_FILES)) == before


@pytest.mark.skipif(not OPEN_FILES.exists(), reason="no Linux")
async def test_send_that_is_refused_a_descriptor_keeps_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_files(descriptor: int) -> int:
        if descriptor == file.fileno():
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return duplicate(descriptor)

    duplicate = os.dup
    (tmp_path / "chunk").write_bytes(b"data")
    with (tmp_path / "chunk").open("rb", buffering=0) as file:
        async with unread_connections(1) as lines:
            before = len(os.listdir(OPEN_FILES))
            monkeypatch.setattr(os, "dup", refuse_files)
            with pytest.raises(OSError, match="Too many open files"):
                await Sender().send(lines[0], file, range(4))
            assert len(os.listdir(OPEN_FILES)) == before
