"""The HTTP client against peers that answer byte by byte, wrongly, or not at all."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, strategies as st

from muster.shardcast.http_client import (
    MAX_HEAD_BYTES,
    AnswerHead,
    BadAnswer,
    ConnectsTo,
    HttpClient,
    parse_head,
)

Answers = list[list[bytes]]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


class Peer:
    """Answers each request on each connection with the next list of writes."""

    def __init__(self, answers: Answers, *, closes: bool = False) -> None:
        self._answers = answers
        self._closes = closes
        self.requests: list[bytes] = []
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while self._answers:
                self.requests.append(await reader.readuntil(b"\r\n\r\n"))
                for piece in self._answers.pop(0):
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                if self._closes:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def peer(*answers: list[bytes], closes: bool = False) -> AsyncIterator[tuple[str, Peer]]:
    served = Peer(list(answers), closes=closes)
    server = await asyncio.start_server(served.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        yield f"http://{host}:{port}", served
    finally:
        server.close()


@asynccontextmanager
async def client(
    headers: dict[str, str] | None = None, connects_to: ConnectsTo | None = None
) -> AsyncIterator[HttpClient]:
    http = HttpClient(headers or {}, connects_to)
    try:
        yield http
    finally:
        http.close()


async def read(http: HttpClient, url: str) -> tuple[int, bytes]:
    async with asyncio.timeout(5), http.get(url) as (head, connection):
        body = bytearray(head.length)
        await connection.read_into(memoryview(body))
        return head.status, bytes(body)


async def test_get_returns_status_and_body() -> None:
    async with peer([OK]) as (url, served), client({"X-A": "b"}) as http:
        assert await read(http, f"{url}/path?wait=1") == (200, b"hello")
    assert served.requests[0].startswith(b"GET /path?wait=1 HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"X-A: b\r\n" in served.requests[0]


async def test_client_connects_to_the_address_that_it_is_given_or_not_at_all() -> None:
    async def connects_to(host: str, _port: int) -> list[str]:
        if host != "relay.example":
            raise ConnectionRefusedError("it leads into a private network")
        return ["127.0.0.1"]

    async with peer([OK]) as (url, served), client(connects_to=connects_to) as http:
        port = url.rpartition(":")[2]
        assert await read(http, f"http://relay.example:{port}/") == (200, b"hello")
        with pytest.raises(ConnectionRefusedError, match="private network"):
            await read(http, f"http://localtest.me:{port}/")
    assert served.connections == 1
    assert f"Host: relay.example:{port}\r\n".encode() in served.requests[0]


async def test_client_tries_every_address_of_a_host_and_first_the_one_that_it_reached() -> None:
    async def connects_to(_host: str, _port: int) -> list[str]:
        return ["127.0.0.2", "127.0.0.1"]

    async with (
        peer([OK], [OK], closes=True) as (url, served),
        client(connects_to=connects_to) as http,
    ):
        port = int(url.rpartition(":")[2])
        assert await read(http, f"http://relay.example:{port}/") == (200, b"hello")
        other = Peer([[OK]])
        async with await asyncio.start_server(other.serve, "127.0.0.2", port):
            assert await read(http, f"http://relay.example:{port}/") == (200, b"hello")
    assert (served.connections, other.connections) == (2, 0)


async def test_client_says_why_the_last_address_was_not_reached() -> None:
    async def connects_to(_host: str, _port: int) -> list[str]:
        return ["127.0.0.2", "127.0.0.3"]

    async with client(connects_to=connects_to) as http:
        with pytest.raises(ConnectionRefusedError, match=r"127\.0\.0\.3"):
            await read(http, "http://relay.example:9/")


async def test_an_address_that_hangs_leaves_time_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("muster.shardcast.http_client.CONNECT_S", 0.4)
    # A listener whose queue is full answers no further handshake.
    with socket.socket() as silent, socket.socket() as queued, socket.socket() as dropped:
        silent.bind(("127.0.0.2", 0))
        silent.listen(0)
        place = silent.getsockname()
        for filler in (queued, dropped):
            filler.setblocking(False)
            filler.connect_ex(place)

        async def connects_to(_host: str, _port: int) -> list[str]:
            return ["127.0.0.2", "127.0.0.1"]

        served = Peer([[OK]])
        server = await asyncio.start_server(served.serve, "127.0.0.1", place[1])
        async with server, client(connects_to=connects_to) as http:
            assert await read(http, f"http://relay.example:{place[1]}/") == (200, b"hello")


async def test_get_understands_an_answer_in_single_bytes() -> None:
    async with peer([bytes([byte]) for byte in OK]) as (url, _), client() as http:
        assert await read(http, url) == (200, b"hello")


async def test_body_larger_than_every_buffer_arrives_whole() -> None:
    body = bytes(range(256)) * 20_000
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with peer([head + body]) as (url, _), client() as http:
        assert await read(http, url) == (200, body)


async def test_body_can_be_read_in_blocks() -> None:
    async with peer([OK]) as (url, _), client() as http, http.get(url) as (_, connection):
        blocks = [bytearray(2), bytearray(2), bytearray(1)]
        for block in blocks:
            await connection.read_into(memoryview(block))
        assert b"".join(blocks) == b"hello"


async def test_connection_is_used_again() -> None:
    async with peer([OK], [OK], [OK]) as (url, served), client() as http:
        for _ in range(3):
            await read(http, url)
        assert served.connections == 1


async def test_stale_connection_is_replaced() -> None:
    async with peer([OK], [OK], closes=True) as (url, served), client() as http:
        assert await read(http, url) == (200, b"hello")
        assert await read(http, url) == (200, b"hello")
        assert served.connections == 2


async def test_connection_is_not_kept_when_the_peer_says_close() -> None:
    closing = OK.replace(b"\r\n\r\n", b"\r\nConnection: Close\r\n\r\n")
    async with peer([closing], [OK]) as (url, served), client() as http:
        await read(http, url)
        await read(http, url)
        assert served.connections == 2


@pytest.mark.parametrize(
    "answer",
    [
        b"garbage\r\n\r\n",
        b"HTTP/2 200\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9999999999999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\ntoo many",
        b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * MAX_HEAD_BYTES,
    ],
)
async def test_answer_is_refused_when_its_framing_is_not_plain(answer: bytes) -> None:
    async with peer([answer]) as (url, _), client() as http:
        with pytest.raises(BadAnswer):
            await read(http, url)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Le", OK[:-1]])
async def test_get_fails_when_the_peer_breaks_off(answer: bytes) -> None:
    async with peer([answer], closes=True) as (url, _), client() as http:
        with pytest.raises(ConnectionError):
            await read(http, url)


async def test_get_fails_when_nobody_listens() -> None:
    async with peer([OK]) as (url, _):
        pass
    async with client() as http:
        with pytest.raises(OSError, match="Connect call failed"):
            await read(http, url)


async def test_abandoned_body_closes_the_connection() -> None:
    async with peer([OK], [OK]) as (url, served), client() as http:
        with pytest.raises(KeyError):
            async with http.get(url):
                raise KeyError
        assert await read(http, url) == (200, b"hello")
        assert served.connections == 2


async def test_waiting_request_can_be_cancelled() -> None:
    async with peer([], [OK]) as (url, _), client() as http:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await read(http, url)


heads: Callable[..., st.SearchStrategy[bytes]] = st.binary


@given(heads(max_size=200))
def test_head_parser_is_total(data: bytes) -> None:
    try:
        head = parse_head(data)
    except BadAnswer:
        return
    assert head.length >= 0


@given(st.integers(100, 599), st.integers(0, 1 << 40), st.booleans())
def test_head_parser_reads_what_servers_write(status: int, length: int, keeps: bool) -> None:
    connection = b"keep-alive" if keeps else b"close"
    data = b"HTTP/1.1 %d Any Reason\r\ncontent-LENGTH:%d\r\nConnection: %s" % (
        status,
        length,
        connection,
    )
    assert parse_head(data) == AnswerHead(status, length, keeps)


async def test_connection_whose_client_was_closed_meanwhile_is_not_kept() -> None:
    async with peer([OK], [OK]) as (url, _served), client() as http:
        async with http.get(url) as (head, connection):
            http.close()
            await connection.read_into(memoryview(bytearray(head.length)))
        assert not connection.is_open
