"""Connections of many machines share a server, and fast readers get threads."""

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from muster.shardcast.connections import (
    FREE_CONNECTIONS,
    ConnectionTable,
    LimitedServer,
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
