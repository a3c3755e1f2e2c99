"""Raw sockets against a server process: slow, greedy, silent and malformed clients.

The server is one process with tight limits for all tests; attackers come from other loopback
addresses than the honest client, so that both limits, of all and of one address, are met.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import uvicorn
from fastapi import FastAPI
from served_process import serving

from muster.api.answers import ErrorAnswer
from muster.api.limits import MAX_JSON_BYTES, MAX_RECORDS_BYTES
from muster.orchestrator.connections import GuardedProtocol, protocol_of
from muster.orchestrator.settings import OrchestratorSettings

PER_HOST, MOST = 30, 70
HEADER_S, BODY_S = 0.5, 4.0
REQUESTS_PER_S = 200.0
BYTES_PER_S = 1 << 17

addresses = map("127.0.{0[0]}.{0[1]}".format, itertools.product(range(1, 99), range(1, 99)))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[psutil.Process, int]]:
    with serving(
        tmp_path_factory.mktemp("server"),
        max_connections=MOST,
        max_connections_per_host=PER_HOST,
        max_listeners_per_host=3,
        header_timeout_s=HEADER_S,
        body_timeout_s=BODY_S,
        rate_per_host=REQUESTS_PER_S,
        bytes_per_host=BYTES_PER_S,
    ) as served:
        yield served


class Clients:
    """Sockets from one address, closed together."""

    def __init__(self, port: int, stack: ExitStack) -> None:
        self.address = next(addresses)
        self._port, self._stack = port, stack

    def connect(self) -> socket.socket:
        client = socket.create_connection(
            ("127.0.0.1", self._port), timeout=30, source_address=(self.address, 0)
        )
        return self._stack.enter_context(client)

    def ask(self, request: bytes) -> tuple[int, dict[str, str], bytes]:
        """Send on a fresh connection; return the answer."""
        client = self.connect()
        client.sendall(request)
        return answer_on(client)


@pytest.fixture
def clients(server: tuple[psutil.Process, int]) -> Iterator[Callable[[], Clients]]:
    with ExitStack() as stack:
        yield lambda: Clients(server[1], stack)
    deadline = time.monotonic() + 10
    # Whatever was done to it, it serves, and those who left are not counted any more.
    with ExitStack() as stack:
        while Clients(server[1], stack).ask(get("/healthz"))[2] != b"ok":
            assert time.monotonic() < deadline
            time.sleep(0.05)


def get(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "host: x", *headers, "", ""]).encode()


def post(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "host: x", *headers, "", ""]).encode()


def answer_on(client: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of the next answer; status 0 when there is none."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = client.recv(1 << 16)
        if not part:
            return 0, {}, b""
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    while len(body) < int(headers.get("content-length", 0)):
        body += client.recv(1 << 16)
    return int(first.split()[1]), headers, body


def refused(answer: tuple[int, dict[str, str], bytes]) -> tuple[int, str]:
    """Return status and code of an error, which must have the one form."""
    status, headers, body = answer
    if status in (429, 503):
        assert int(headers["retry-after"]) >= 1
    assert headers["content-type"] == "application/json"
    assert set(json.loads(body)["error"]) == {"code", "message", "hint"}
    return status, ErrorAnswer.model_validate_json(body).error.code


def test_headers_that_trickle_are_not_waited_for(clients: Callable[[], Clients]) -> None:
    slow, honest = clients(), clients()
    trickling = [slow.connect() for _ in range(PER_HOST)]
    started = time.monotonic()
    for byte in itertools.cycle(b"GET /healthz HTTP/1.1\r\nx: " + b"y" * 1000):
        trickling = [client for client in trickling if is_taken(client, bytes([byte]))]
        assert honest.ask(get("/healthz"))[2] == b"ok"
        if not trickling:
            break
        assert time.monotonic() - started < 20 * HEADER_S
        time.sleep(0.02)
    assert time.monotonic() - started >= HEADER_S - 0.1


def test_header_lines_that_trickle_are_not_waited_for(clients: Callable[[], Clients]) -> None:
    client = clients().connect()
    client.sendall(b"GET /healthz HTTP/1.1\r\n")
    started = time.monotonic()
    while is_taken(client, b"x-a: b\r\n"):
        assert time.monotonic() - started < 20 * HEADER_S
        time.sleep(0.02)
    assert time.monotonic() - started >= HEADER_S - 0.1


def is_taken(client: socket.socket, data: bytes) -> bool:
    """Return whether the server still takes bytes."""
    try:
        client.sendall(data)
    except ConnectionError:
        return False
    return True


def test_body_that_trickles_is_refused(clients: Callable[[], Clients]) -> None:
    client = clients().connect()
    client.sendall(post("/v1/leases", "content-length: 1000"))
    started = time.monotonic()
    while not select.select([client], [], [], 0.05)[0]:
        client.sendall(b"x")
        assert time.monotonic() - started < 20 * BODY_S
    assert refused(answer_on(client)) == (408, "body_timeout")


def test_address_with_too_many_connections_is_told_so(clients: Callable[[], Clients]) -> None:
    greedy, honest = clients(), clients()
    held = [greedy.connect() for _ in range(PER_HOST)]
    assert refused(answer_on(greedy.connect())) == (429, "too_many_connections")
    assert honest.ask(get("/healthz"))[2] == b"ok"
    held[0].sendall(get("/healthz"))
    assert answer_on(held[0])[2] == b"ok"


def test_connection_above_the_limit_of_all_is_told_so(clients: Callable[[], Clients]) -> None:
    crowd = [clients() for _ in range(1 + MOST // PER_HOST)]
    held = [crowd[i // PER_HOST].connect() for i in range(MOST)]
    assert refused(answer_on(clients().connect())) == (503, "too_many_connections")
    held[0].sendall(get("/healthz"))
    assert answer_on(held[0])[2] == b"ok"


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (get("/healthz", "x-long: " + "a" * 20_000), (431, "headers_too_large")),
        (get("/healthz", *(f"x-{i}: y" for i in range(4000))), (431, "headers_too_large")),
        (get("/" + "a" * 20_000), (431, "headers_too_large")),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\r\n\r\n", (400, "malformed_request")),
        (b"GET / SPDY/9\r\n\r\n", (400, "malformed_request")),
        (post("/v1/leases", "content-length: -1"), (400, "malformed_request")),
        (post("/v1/leases", f"content-length: {MAX_JSON_BYTES + 1}"), (413, "body_too_large")),
        (post("/v1/leases", "content-length: " + "9" * 30), (400, "malformed_request")),
        (
            post("/v1/leases", "transfer-encoding: chunked") + b"40001\r\n" + bytes(0x40001),
            (413, "body_too_large"),
        ),
        (
            post("/v1/leases", "transfer-encoding: chunked", "content-length: 5") + b"hello",
            (400, "malformed_request"),
        ),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else value[1],
)  # fmt: skip
def test_request_beyond_a_limit_is_refused_in_the_one_form(
    clients: Callable[[], Clients], request_: bytes, expected: tuple[int, str]
) -> None:
    assert refused(clients().ask(request_)) == expected


def test_address_that_asks_too_often_is_told_when_to_come_back(
    clients: Callable[[], Clients],
) -> None:
    greedy, honest = clients(), clients()
    client = greedy.connect()
    answer = 200, dict[str, str](), b""
    for _ in range(int(REQUESTS_PER_S * 10)):
        client.sendall(get("/healthz"))
        answer = answer_on(client)
        if answer[0] != 200:
            break
    assert refused(answer) == (429, "too_many_requests")
    assert honest.ask(get("/healthz"))[2] == b"ok"


def test_address_that_was_sent_too_much_is_told_when_to_come_back(
    clients: Callable[[], Clients],
) -> None:
    greedy, honest = clients(), clients()
    answer = 200, dict[str, str](), b""
    client = greedy.connect()
    for _ in range(int(REQUESTS_PER_S)):
        client.sendall(get("/openapi.json"))
        answer = answer_on(client)
        if answer[0] != 200:
            break
    assert refused(answer) == (429, "too_many_requests")
    assert honest.ask(get("/healthz"))[2] == b"ok"


def test_address_with_too_many_streams_is_told_so(clients: Callable[[], Clients]) -> None:
    greedy, honest = clients(), clients()
    for _ in range(3):
        assert greedy.ask(get("/v1/events"))[0] == 200
    assert refused(greedy.ask(get("/v1/events"))) == (429, "too_many_streams")
    assert refused(greedy.ask(get("/live"))) == (429, "too_many_streams")
    assert honest.ask(get("/v1/events"))[0] == 200


async def test_peer_that_never_reads_its_answer_is_dropped(tmp_path: Path) -> None:
    settings = OrchestratorSettings(run=1, keystore=tmp_path, read_timeout_s=0.05)
    application = uvicorn.Config(FastAPI(), http=protocol_of(settings), lifespan="off")
    state = uvicorn.server.ServerState()
    loop = asyncio.get_running_loop()
    made: list[GuardedProtocol] = []

    def make() -> GuardedProtocol:
        made.append(protocol_of(settings)(application, state, {}))
        return made[-1]

    async with await loop.create_server(make, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as deaf:
            while not made or made[0].transport is None:
                await asyncio.sleep(0)
            # More than any kernel holds for it.
            made[0].transport.write(bytes(64 << 20))
            async with asyncio.timeout(5):
                while made[0].door.open:
                    await asyncio.sleep(0.01)
            assert made[0].transport.is_closing()
            assert deaf.fileno() > 0


def test_large_bodies_that_never_end_take_bounded_memory(
    server: tuple[psutil.Process, int], clients: Callable[[], Clients]
) -> None:
    before = server[0].memory_info().rss
    crowd = [clients() for _ in range(2)]
    answers = []
    sockets = []
    for client in (crowd[i % 2].connect() for i in range(2 * PER_HOST - 2)):
        client.settimeout(30)
        client.sendall(
            post("/v1/batches/1/outcomes", f"content-length: {MAX_RECORDS_BYTES}")
            + bytes(MAX_RECORDS_BYTES - 1)
        )
        sockets.append(client)
    grown = server[0].memory_info().rss - before
    answers = [refused(answer_on(client)) for client in sockets]
    told = {(503, "overloaded"), (408, "body_timeout"), (429, "too_many_requests")}
    assert set(answers) <= told
    assert (503, "overloaded") in answers
    # 58 bodies of 2 MiB are 116 MiB; 64 may be held.
    assert grown < 110 << 20
