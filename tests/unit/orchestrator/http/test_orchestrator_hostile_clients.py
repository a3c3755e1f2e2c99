"""Raw sockets against a server process: slow, greedy, silent and malformed clients.

The server is one process with tight limits for all tests; attackers come from other loopback
addresses than the honest client, so that both limits, of all and of one address, are met.
"""

import asyncio
import contextlib
import itertools
import json
import os
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
from orchestrator_fakes import NOW, Network
from served_process import KEYS, serving

from muster.api.answers import ErrorAnswer
from muster.api.routes import MAX_FINGERPRINTS_BODY_BYTES, MAX_JSON_BYTES
from muster.api.signing import sign_request
from muster.orchestrator.http import connections
from muster.orchestrator.settings import OrchestratorSettings
from muster.protocol.eip712 import address_of
from muster.protocol.ids import Hash32

PER_HOST, MOST = 30, 70
HEADER_S, BODY_S = 0.5, 4.0
MOST_STREAMS = 12
REQUESTS_PER_S = 40.0
BYTES_PER_S = 1 << 17
NETWORK = Network(keys=KEYS)

addresses = map("127.0.{0[0]}.{0[1]}".format, itertools.product(range(1, 99), range(1, 99)))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[psutil.Process, int]]:
    with serving(
        tmp_path_factory.mktemp("server"),
        max_connections=MOST,
        max_connections_per_host=PER_HOST,
        max_listeners=MOST_STREAMS,
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
    # After any attack it serves, and clients that left are no longer counted.
    with ExitStack() as stack:
        while Clients(server[1], stack).ask(get("/healthz"))[2] != b"ok":
            assert time.monotonic() < deadline
            time.sleep(0.05)


def get(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "host: x", *headers, "", ""]).encode()


def post(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "host: x", *headers, "", ""]).encode()


def signed(path: str, *headers: str, key: bytes = KEYS.nodes[0], method: str = "POST") -> bytes:
    """Return the head of a request signed by an account with a role, for a body of any hash."""
    names = sign_request(
        key, NETWORK.domain, address_of(KEYS.orchestrator), method, path,
        nonce=Hash32(os.urandom(32)), issued_at=NOW, body_hash=Hash32(bytes(32)),
    )  # fmt: skip
    lines = [f"{method} {path} HTTP/1.1", "host: x", *map(": ".join, names.items()), *headers]
    return "\r\n".join([*lines, "", ""]).encode()


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
    client.sendall(signed("/v1/leases", "content-length: 1000"))
    started = time.monotonic()
    while not select.select([client], [], [], 0.05)[0]:
        client.sendall(b"x")
        assert time.monotonic() - started < 20 * BODY_S
    assert refused(answer_on(client)) == (408, "body_timeout")


def is_open(client: socket.socket) -> bool:
    """Return whether the server still answers on a connection."""
    try:
        client.sendall(get("/healthz"))
        return answer_on(client)[2] == b"ok"
    except ConnectionError:
        return False


def test_address_with_too_many_connections_loses_its_oldest(clients: Callable[[], Clients]) -> None:
    greedy, honest = clients(), clients()
    held = [greedy.connect() for _ in range(PER_HOST)]
    # The server has accepted the clients that it answered, in this order.
    assert all(map(is_open, held))
    assert is_open(held[0])
    assert greedy.ask(get("/healthz"))[2] == b"ok"
    assert honest.ask(get("/healthz"))[2] == b"ok"
    # Of the other clients, the one that had been silent for longest had to leave.
    assert [is_open(client) for client in held[:3]] == [True, False, True]


def test_full_house_asks_those_to_leave_who_have_most(clients: Callable[[], Clients]) -> None:
    guest = clients().connect()
    crowd = [clients() for _ in range(1 + MOST // PER_HOST)]
    held = [crowd[i // PER_HOST].connect() for i in range(MOST - 1)]
    for _ in range(10):
        assert clients().ask(get("/healthz"))[2] == b"ok"
    assert is_open(guest)
    assert not is_open(held[0])


def test_connection_of_a_signer_stays_when_strangers_fill_the_house(
    clients: Callable[[], Clients],
) -> None:
    node, crowd = clients().connect(), [clients() for _ in range(1 + 2 * MOST // PER_HOST)]
    node.sendall(signed("/v1/leases", "content-length: 2") + b"{}")
    assert refused(answer_on(node)) == (401, "body_hash_mismatch")
    for i in range(2 * MOST):
        crowd[i // PER_HOST].connect()
    assert is_open(node)


def test_signer_keeps_only_so_many_connections_from_strangers(
    clients: Callable[[], Clients],
) -> None:
    crowd, held = [clients(), clients()], []
    for i in range(connections.MOST_PER_SIGNER + 1):
        held.append(crowd[i % 2].connect())
        held[-1].sendall(signed("/v1/leases", "content-length: 2") + b"{}")
        assert answer_on(held[-1])[0] == 401
    assert [is_open(client) for client in held[:2]] == [False, True]


def test_rest_of_a_refused_body_is_not_waited_for(clients: Callable[[], Clients]) -> None:
    client = clients().connect()
    client.sendall(post("/v1/leases", "content-length: 100000"))
    assert refused(answer_on(client)) == (401, "unsigned_request")
    started = time.monotonic()
    while is_taken(client, b"x"):
        assert time.monotonic() - started < 10 * connections.LINGER_S
        time.sleep(0.02)


def test_body_that_was_refused_early_may_still_come(clients: Callable[[], Clients]) -> None:
    client = clients().connect()
    client.sendall(post("/v1/leases", "content-length: 5"))
    assert refused(answer_on(client)) == (401, "unsigned_request")
    client.sendall(b"hello")
    assert is_open(client)


def test_pipelined_requests_beyond_a_few_end_the_connection(clients: Callable[[], Clients]) -> None:
    client = clients().connect()
    client.sendall(get("/v1/events") + 100 * get("/healthz"))
    client.settimeout(5)
    with contextlib.suppress(ConnectionError):
        while client.recv(1 << 16):
            pass


def test_body_of_a_stranger_is_not_asked_for(clients: Callable[[], Clients]) -> None:
    client = clients().connect()
    client.sendall(post("/v1/leases", "content-length: 5", "expect: 100-continue"))
    assert refused(answer_on(client)) == (401, "unsigned_request")


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (get("/healthz", "x-long: " + "a" * 20_000), (431, "headers_too_large")),
        (get("/healthz", *(f"x-{i}: y" for i in range(4000))), (431, "headers_too_large")),
        (get("/" + "a" * 20_000), (431, "headers_too_large")),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\r\n\r\n", (400, "malformed_request")),
        (b"GET / SPDY/9\r\n\r\n", (400, "malformed_request")),
        (post("/v1/leases", "content-length: -1"), (400, "malformed_request")),
        (signed("/v1/leases", f"content-length: {MAX_JSON_BYTES + 1}"), (413, "body_too_large")),
        (post("/v1/leases", f"content-length: {MAX_JSON_BYTES + 1}"), (401, "unsigned_request")),
        (post("/v1/leases", "content-length: " + "9" * 30), (400, "malformed_request")),
        (
            signed("/v1/leases", "transfer-encoding: chunked") + b"40001\r\n" + bytes(0x40001),
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


@pytest.mark.parametrize(
    ("path", "most"),
    [("/healthz", int(REQUESTS_PER_S * 10)), ("/openapi.json", int(REQUESTS_PER_S))],
    ids=["asks too often", "was sent too much"],
)
def test_address_beyond_its_share_is_told_when_to_come_back(
    clients: Callable[[], Clients], path: str, most: int
) -> None:
    greedy, honest = clients(), clients()
    client = greedy.connect()
    answer = 200, dict[str, str](), b""
    for _ in range(most):
        client.sendall(get(path))
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


def test_streams_of_many_addresses_keep_nobody_out(clients: Callable[[], Clients]) -> None:
    first = clients().connect()
    first.sendall(get("/v1/events"))
    assert answer_on(first)[0] == 200
    crowd = [clients() for _ in range(6)]
    for number in range(2 * MOST_STREAMS):
        crowd[number % 6].ask(get("/live"))
    assert clients().ask(get("/v1/events"))[0] == 200


async def test_peer_that_never_reads_its_answer_is_dropped(tmp_path: Path) -> None:
    settings = OrchestratorSettings(run=1, keystore=tmp_path, read_timeout_s=0.05)
    application = uvicorn.Config(FastAPI(), http=connections.protocol_of(settings), lifespan="off")
    state = uvicorn.server.ServerState()
    loop = asyncio.get_running_loop()
    made: list[connections.GuardedProtocol] = []

    def make() -> connections.GuardedProtocol:
        made.append(connections.protocol_of(settings)(application, state, {}))
        return made[-1]

    async with await loop.create_server(make, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as deaf:
            while not made or made[0].transport is None:
                await asyncio.sleep(0)
            # More than any kernel buffers for a connection.
            made[0].transport.write(bytes(64 << 20))
            async with asyncio.timeout(5):
                while made[0].counts:
                    await asyncio.sleep(0.01)
            assert made[0].transport.is_closing()
            assert deaf.fileno() > 0


FINGERPRINTS = "/v1/batches/1/fingerprints"


def unfinished(client: socket.socket, head: bytes) -> None:
    """Send a body of the largest size without its last byte."""
    client.settimeout(30)
    with contextlib.suppress(ConnectionError):
        client.sendall(head + bytes(MAX_FINGERPRINTS_BODY_BYTES - 1))


def test_bodies_of_strangers_take_no_room_from_anybody(clients: Callable[[], Clients]) -> None:
    crowd, length = [clients(), clients()], f"content-length: {MAX_FINGERPRINTS_BODY_BYTES}"
    heads = [post(FINGERPRINTS, length), signed(FINGERPRINTS, length, key=os.urandom(32))]
    for number in range(20):
        unfinished(crowd[number % 2].connect(), heads[number % 2])
    assert is_served(clients().connect())


def is_served(client: socket.socket) -> bool:
    """Return whether a node's and a validator's bodies are read."""
    for key, path in ((KEYS.nodes[0], "/v1/leases"), (KEYS.validators[1], FINGERPRINTS)):
        client.sendall(signed(path, "content-length: 2", key=key) + b"{}")
        assert refused(answer_on(client)) == (401, "body_hash_mismatch")
    return True


def test_validator_whose_bodies_never_end_gives_way_itself(
    server: tuple[psutil.Process, int], clients: Callable[[], Clients]
) -> None:
    before, crowd = server[0].memory_info().rss, [clients() for _ in range(12)]
    sockets = [client.connect() for client in crowd]
    for client in sockets:
        length = f"content-length: {MAX_FINGERPRINTS_BODY_BYTES}"
        unfinished(client, signed(FINGERPRINTS, length, key=KEYS.validators[0]))
    assert is_served(clients().connect())
    # 12 bodies of 8 MiB are 96 MiB; 48 may be held.
    assert server[0].memory_info().rss - before < 90 << 20
    # The body times out if its memory was needed only late.
    assert refused(answer_on(sockets[0])) in {(503, "overloaded"), (408, "body_timeout")}
