"""Answers and refusals of origin and relay."""

import asyncio
import errno
import logging
import os
import random
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from shardcast_policies import RUN, SIGNATURE, fake_signature, fill, publish, publish_paths, serving

from muster.lifecycle import Proxies, most_connections
from muster.protocol.errors import ConfigError
from muster.protocol.ids import PolicyVersion, RunId
from muster.shardcast import ChunkStore, Manifest, ServerLimits, ShardServer

BIG = random.Random(0).randbytes(200_000)
"""More bytes than one write sends."""


@pytest.fixture
async def server(store: ChunkStore) -> AsyncIterator[ShardServer]:
    async with ShardServer(store) as running:
        yield running


@pytest.fixture
async def http(server: ShardServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=5) as client:
        yield client


def chunk_path(store: ChunkStore, data: bytes) -> str:
    """Publish `data` as one chunk; returns where it is served."""
    (store.folder / "f").write_bytes(data)
    manifest = publish_paths(store, {"f": store.folder / "f"}, chunk_bytes=8 << 20)
    return f"/v1/chunks/{manifest.files[0].chunks[0].hex()}"


async def test_version_parts_are_served(store: ChunkStore, http: httpx.AsyncClient) -> None:
    manifest = publish(store, {"f": b"1"}, 3)
    publish(store, {"f": b"2"}, 4)
    assert (await http.get(f"/v1/{RUN}/versions")).json() == {"versions": [4, 3]}
    assert (await http.get(f"/v1/{RUN}/3/manifest")).content == manifest.to_bytes()
    assert (await http.get(f"/v1/{RUN}/3/signature")).content == fake_signature(manifest.root())
    assert (await http.get("/healthz")).text == "ok"


@pytest.mark.parametrize("size", [1, 1000, 64 << 10, (64 << 10) + 1, 200_000])
async def test_chunk_is_served_whole_and_immutable(
    store: ChunkStore, http: httpx.AsyncClient, size: int
) -> None:
    path = chunk_path(store, BIG[:size])
    answer = await http.get(path)
    assert answer.content == BIG[:size]
    assert answer.headers["content-length"] == str(size)
    assert answer.headers["etag"] == f'"{path.rsplit("/", 1)[1]}"'
    assert "immutable" in answer.headers["cache-control"]


@pytest.mark.parametrize(
    ("wanted", "expected", "content_range"),
    [
        ("bytes=0-9", BIG[:10], "bytes 0-9/200000"),
        ("bytes=100-", BIG[100:], "bytes 100-199999/200000"),
        ("bytes=-7", BIG[-7:], "bytes 199993-199999/200000"),
        ("bytes=199999-300000", BIG[-1:], "bytes 199999-199999/200000"),
    ],
)
async def test_chunk_range_is_served(
    store: ChunkStore, http: httpx.AsyncClient, wanted: str, expected: bytes, content_range: str
) -> None:
    answer = await http.get(chunk_path(store, BIG), headers={"Range": wanted})
    assert answer.status_code == 206
    assert answer.content == expected
    assert answer.headers["content-range"] == content_range


@pytest.mark.parametrize("wanted", ["bytes=200000-", "bytes=5-2", "lines=1-2", "bytes=-"])
async def test_chunk_range_is_refused_when_it_cannot_be_met(
    store: ChunkStore, http: httpx.AsyncClient, wanted: str
) -> None:
    answer = await http.get(chunk_path(store, BIG), headers={"Range": wanted})
    assert answer.status_code == 416
    assert answer.headers["content-range"] == "bytes */200000"


async def test_known_chunk_is_not_sent_again(store: ChunkStore, http: httpx.AsyncClient) -> None:
    path = chunk_path(store, BIG)
    etag = (await http.get(path)).headers["etag"]
    answer = await http.get(path, headers={"If-None-Match": etag})
    assert (answer.status_code, answer.content) == (304, b"")
    other = await http.get(path, headers={"If-None-Match": '"other"'})
    assert other.status_code == 200


async def test_head_request_gets_the_size_without_the_bytes(
    store: ChunkStore, http: httpx.AsyncClient
) -> None:
    answer = await http.head(chunk_path(store, BIG))
    assert (answer.headers["content-length"], answer.content) == ("200000", b"")


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v1",
        f"/v1/{RUN}/9/manifest",
        f"/v1/{RUN}/9/signature",
        f"/v1/{RUN}/9/other",
        f"/v1/{RUN}/01/manifest",
        f"/v1/{RUN}/-1/manifest",
        "/v1/../../etc/passwd",
        "/v1/chunks/../../runs",
        "/v1/chunks/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
        "/v1/chunks/" + "00" * 32,
        "/v1/chunks/" + "GG" * 32,
        "/v1/chunks/" + "ab" * 31,
        "/v1/99999999999999999999/versions",
    ],
)
async def test_what_does_not_exist_is_not_found(http: httpx.AsyncClient, path: str) -> None:
    assert (await http.get(path)).status_code == 404


async def test_other_methods_are_refused(http: httpx.AsyncClient) -> None:
    assert (await http.delete("/healthz")).status_code == 405
    assert (await http.request("GET", "/healthz", content=b"body")).status_code == 413


async def test_oversized_head_is_refused(http: httpx.AsyncClient) -> None:
    assert (await http.get("/healthz", headers={"X": "y" * 10_000})).status_code == 400
    assert (await http.get("/" + "y" * 10_000)).status_code == 400


async def test_listing_waits_for_a_newer_version(
    store: ChunkStore, http: httpx.AsyncClient
) -> None:
    publish(store, {"f": b"1"}, 1)
    waiting = asyncio.create_task(http.get(f"/v1/{RUN}/versions?after=1&wait=5"))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await asyncio.to_thread(publish, store, {"f": b"2"}, 2)
    assert (await waiting).json() == {"versions": [2, 1]}


async def test_what_is_still_on_its_way_is_left_out_of_the_whole_versions(
    store: ChunkStore, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    publish(store, {"f": b"1"}, 1)
    origin = ChunkStore(tmp_path / "origin")
    manifest = publish(origin, {"f": b"2"}, 2)
    store.begin(manifest, SIGNATURE)
    assert (await http.get(f"/v1/{RUN}/versions")).json() == {"versions": [2, 1]}
    waiting = asyncio.create_task(http.get(f"/v1/{RUN}/versions?whole=1&after=1&wait=5"))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await asyncio.to_thread(fill, store, origin, manifest)
    assert (await waiting).json() == {"versions": [2, 1]}


async def test_manifest_is_waited_for(store: ChunkStore, http: httpx.AsyncClient) -> None:
    waiting = asyncio.create_task(http.get(f"/v1/{RUN}/1/manifest?wait=5"))
    await asyncio.sleep(0.05)
    manifest = await asyncio.to_thread(publish, store, {"f": b"1"}, 1)
    assert (await waiting).content == manifest.to_bytes()


async def test_manifest_published_by_another_process_is_waited_for(
    store: ChunkStore, http: httpx.AsyncClient
) -> None:
    waiting = asyncio.create_task(http.get(f"/v1/{RUN}/1/manifest?wait=5"))
    await asyncio.sleep(0.05)
    manifest = await asyncio.to_thread(publish, ChunkStore(store.folder), {"f": b"1"}, 1)
    assert (await waiting).content == manifest.to_bytes()


class CountingStore(ChunkStore):
    """A store that counts how often it is looked at."""

    parsed = listed = scanned = 0

    def manifest(self, run_id: RunId, version: PolicyVersion) -> Manifest | None:
        """Count one parsed manifest."""
        self.parsed += 1
        return super().manifest(run_id, version)

    def versions(self, run_id: RunId) -> list[PolicyVersion]:
        """Count one listing."""
        self.listed += 1
        return super().versions(run_id)

    def complete(self) -> list[tuple[RunId, PolicyVersion]]:
        """Count one look at everything."""
        self.scanned += 1
        return super().complete()


async def test_requests_that_wait_for_an_incomplete_version_look_at_it_once(
    tmp_path: Path, origin: ChunkStore
) -> None:
    store, manifest = CountingStore(tmp_path / "counting"), publish(origin, {"f": BIG[:5000]})
    store.begin(manifest, SIGNATURE)
    store.abandon(RUN, manifest.version)
    paths = [f"/v1/{RUN}/1/manifest?wait=9", f"/v1/{RUN}/versions?wait=9"] * 5
    async with serving(store, limits=ServerLimits(wait_s=0.3)) as client:
        store.parsed = 0
        answers = await asyncio.gather(*(client.get(path) for path in paths))
        assert [answer.status_code for answer in answers] == [404, 200] * 5
        assert store.parsed == 1
        waiting = [asyncio.create_task(client.get(path)) for path in paths]
        await asyncio.to_thread(fill, store, origin, manifest)
        assert [(await answer).status_code for answer in waiting] == [200, 200] * 5


async def test_requests_that_wait_share_one_look_at_the_versions(tmp_path: Path) -> None:
    store = CountingStore(tmp_path / "counting")
    publish(store, {"f": b"1"}, 1)
    async with serving(store, limits=ServerLimits(wait_s=0.3)) as client:
        path = f"/v1/{RUN}/versions?after=1&wait=9"
        answers = await asyncio.gather(*(client.get(path) for _ in range(9)))
        assert [answer.json() for answer in answers] == [{"versions": [1]}] * 9
        assert store.listed == 1
        await asyncio.to_thread(publish, ChunkStore(store.folder), {"f": b"2"}, 2)
        assert (await client.get(f"/v1/{RUN}/versions?after=1&wait=9")).json()["versions"] == [2, 1]


@pytest.mark.parametrize(("metrics_s", "looks"), [(60.0, 1), (0.0, 3)])
async def test_metrics_look_at_the_disk_once_in_a_while(
    tmp_path: Path, metrics_s: float, looks: int
) -> None:
    store = CountingStore(tmp_path / "counting")
    publish(store, {"f": b"1"}, 4)
    async with serving(store, limits=ServerLimits(metrics_s=metrics_s)) as client:
        found = [await metrics_of(client) for _ in range(3)]
    assert [each["muster_shardcast_policy_version"] for each in found] == [4, 4, 4]
    assert store.scanned == looks


async def test_wait_ends_without_the_version(store: ChunkStore) -> None:
    limits = ServerLimits(wait_s=0.1)
    async with serving(store, limits=limits) as client:
        answer = await client.get(f"/v1/{RUN}/1/manifest?wait=9")
        assert answer.status_code == 404


async def test_waited_for_version_is_reported(store: ChunkStore) -> None:
    asked: list[tuple[RunId, PolicyVersion]] = []
    limits = ServerLimits(wait_s=0.05)
    async with serving(store, limits=limits, wanted=lambda *key: asked.append(key)) as client:
        await client.get(f"/v1/{RUN}/5/manifest")
        assert asked == []
        await client.get(f"/v1/{RUN}/5/manifest?wait=1")
        assert asked == [(RUN, 5)]


async def test_expected_chunk_is_waited_for(
    store: ChunkStore, origin: ChunkStore, http: httpx.AsyncClient
) -> None:
    manifest = publish(origin, {"f": b"soon"})
    digest = store.begin(manifest, SIGNATURE)[0].digest
    waiting = asyncio.create_task(http.get(f"/v1/chunks/{digest.hex()}"))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    fill(store, origin, manifest)
    assert (await waiting).content == b"soon"


@pytest.mark.parametrize(("code", "status"), [(errno.EMFILE, 503), (errno.ENOENT, 404)])
async def test_chunk_that_cannot_be_read_now_is_not_said_to_be_absent(
    store: ChunkStore,
    http: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    status: int,
) -> None:
    path = chunk_path(store, b"here")

    def refuse(*_: object, **_options: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", refuse)
        assert (await http.get(path)).status_code == status
    assert (await http.get(path)).content == b"here"


async def test_expected_chunk_is_given_up_when_its_version_is_abandoned(
    store: ChunkStore, origin: ChunkStore
) -> None:
    manifest = publish(origin, {"f": b"never"})
    limits = ServerLimits(wait_s=0.2)
    async with serving(store, limits=limits) as client:
        digest = store.begin(manifest, SIGNATURE)[0].digest
        answer = await client.get(f"/v1/chunks/{digest.hex()}")
        assert answer.status_code == 404


async def test_no_more_requests_wait_than_allowed(store: ChunkStore) -> None:
    limits = ServerLimits(waiting=1)
    async with serving(store, limits=limits) as client:
        first = asyncio.create_task(client.get(f"/v1/{RUN}/1/manifest?wait=5"))
        await asyncio.sleep(0.05)
        second = await client.get(f"/v1/{RUN}/1/manifest?wait=5")
        assert second.status_code == 404
        publish(store, {"f": b"1"}, 1)
        assert (await first).status_code == 200


async def test_token_is_demanded_of_everything_but_health(store: ChunkStore) -> None:
    publish(store, {"f": b"1"}, 1)
    async with serving(store, token="secret") as client:
        url = f"/v1/{RUN}/versions"
        assert (await client.get(url)).status_code == 401
        wrong = await client.get(url, headers={"Authorization": "Bearer other"})
        assert wrong.status_code == 401
        right = await client.get(url, headers={"Authorization": "Bearer secret"})
        assert right.status_code == 200
        assert (await client.get("/healthz")).status_code == 200


async def test_address_that_asks_too_much_is_told_to_wait(store: ChunkStore) -> None:
    limits = ServerLimits(requests_per_s=0.1, burst=2)
    async with serving(store, limits=limits) as client:
        answers = [await client.get("/healthz") for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert answers[2].headers["retry-after"] == "1"


async def test_connections_of_one_address_are_bounded(store: ChunkStore) -> None:
    limits = ServerLimits(connections_per_address=2)
    async with ShardServer(store, limits=limits) as server:
        host, port = server.url.removeprefix("http://").split(":")
        held = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
        await asyncio.sleep(0.05)
        async with httpx.AsyncClient() as client:
            with pytest.raises(httpx.TransportError):
                await client.get(f"{server.url}/healthz")
            held[0][1].close()
            await asyncio.sleep(0.05)
            assert (await client.get(f"{server.url}/healthz")).status_code == 200
        held[1][1].close()


def behind(*path: str) -> dict[str, str]:
    return {"X-Forwarded-For": ", ".join(path)}


async def test_clients_of_a_proxy_are_limited_by_their_own_address(store: ChunkStore) -> None:
    limits = ServerLimits(
        connections_per_address=2, requests_per_s=0.001, burst=1, proxies=Proxies("127.0.0.1")
    )
    async with ShardServer(store, limits=limits) as server:
        host, port = server.url.removeprefix("http://").split(":")
        held = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
        async with httpx.AsyncClient(base_url=server.url) as proxy:
            # What a client itself claims comes first, and is not believed.
            paths = [("10.0.0.1",), ("10.0.0.9", "10.0.0.1"), ("10.0.0.2",)]
            answers = [await proxy.get("/healthz", headers=behind(*path)) for path in paths]
        assert [answer.status_code for answer in answers] == [200, 429, 200]
        away = httpx.AsyncHTTPTransport(local_address="127.0.0.2")
        async with httpx.AsyncClient(base_url=server.url, transport=away) as stranger:
            claims = [behind(f"10.0.1.{i}") for i in range(2)]
            answers = [await stranger.get("/healthz", headers=each) for each in claims]
        assert [answer.status_code for answer in answers] == [200, 429]
        for _, writer in held:
            writer.close()


async def test_uploads_through_a_proxy_are_those_of_its_clients(store: ChunkStore) -> None:
    room = Addresses()
    limits = ServerLimits(proxies=Proxies("127.0.0.1"))
    async with serving(store, room=room, limits=limits) as client:
        for address in ("10.0.0.1", "10.0.0.2"):
            await client.put(f"/v1/files/{'0' * 64}", content=b"a", headers=behind(address))
    assert room.found == ["10.0.0.1", "10.0.0.2"]


class Addresses:
    """A room that notes from where files come."""

    def __init__(self) -> None:
        self.found: list[str] = []

    async def take(self, _kind: str, _name: object, _parts: object, address: str) -> None:
        self.found.append(address)


async def test_newcomer_is_served_while_ten_addresses_hold_every_connection(
    store: ChunkStore,
) -> None:
    limits = ServerLimits(connections=20, connections_per_address=4)
    async with ShardServer(store, limits=limits) as server:
        host, port = server.url.removeprefix("http://").split(":")
        held = [
            await asyncio.open_connection(host, int(port), local_addr=(f"127.0.0.{2 + i % 10}", 0))
            for i in range(20)
        ]
        async with httpx.AsyncClient(base_url=server.url, timeout=5) as client:
            answers = [await client.get("/healthz") for _ in range(20)]
            assert [answer.status_code for answer in answers] == [200] * 20
            found = await metrics_of(client)
        assert found['muster_shardcast_cut_off_total{reason="displaced"}'] == 1
        for _, writer in held:
            writer.close()


SERVER_WITH_FEW_FILES = """
import asyncio, resource, sys
from pathlib import Path
from muster.shardcast import ChunkStore, ShardServer
files, hard = int(sys.argv[2]), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
async def serve():
    async with ShardServer(ChunkStore(Path(sys.argv[1]))) as server:
        print(server.url, flush=True)
        await asyncio.to_thread(sys.stdin.read)
asyncio.run(serve())
"""


@asynccontextmanager
async def server_with_few_files(store: ChunkStore, files: int) -> AsyncIterator[str]:
    """A server in a process with this soft limit of open files; yields its URL."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SERVER_WITH_FEW_FILES, store.folder, str(files)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield (await process.stdout.readline()).decode().strip()
    finally:
        process.stdin.close()
        await process.communicate()


def unread_connection(address: str, port: int, request: bytes) -> socket.socket:
    """A connection from an address that sends a request and does not read."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.bind((address, 0))
    made.connect(("127.0.0.1", port))
    made.sendall(request)
    return made


@pytest.mark.parametrize(("files", "each", "asks_for_chunk"), [(1024, 120, False), (256, 15, True)])
async def test_newcomer_is_served_while_strangers_hold_all_files_that_a_process_had(
    store: ChunkStore, files: int, each: int, asks_for_chunk: bool
) -> None:
    most_connections(9 * 120)  # this process holds the other ends
    data = BIG * 40  # more than a connection holds that nobody reads
    path = chunk_path(store, data)
    stranger = f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode() if asks_for_chunk else b""
    async with server_with_few_files(store, files) as url:
        port = int(url.rsplit(":", 1)[1])
        with ExitStack() as held:
            for i in range(9 * each):
                held.enter_context(unread_connection(f"127.0.0.{2 + i % 9}", port, stranger))
            async with httpx.AsyncClient(base_url=url, timeout=15) as client:
                assert (await client.get(path)).content == data


async def test_idle_connection_is_closed(store: ChunkStore) -> None:
    async with ShardServer(store, limits=ServerLimits(idle_s=0.1)) as server:
        host, port = server.url.removeprefix("http://").split(":")
        for sent in (b"", b"GET /healthz HTT"):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            async with asyncio.timeout(5):
                assert await reader.read() == b""
            writer.close()


async def test_idle_connections_do_not_block_others(
    server: ShardServer, http: httpx.AsyncClient
) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    held = [await asyncio.open_connection(host, int(port)) for _ in range(20)]
    async with asyncio.timeout(2):
        assert (await http.get("/healthz")).status_code == 200
    for _, writer in held:
        writer.close()


async def test_reader_that_stalls_is_cut_off(store: ChunkStore) -> None:
    path = chunk_path(store, os.urandom(30 << 20))
    async with ShardServer(store, limits=ServerLimits(send_s=0.2)) as server:
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        await asyncio.sleep(0.5)
        received = 0
        async with asyncio.timeout(5):
            try:
                while data := await reader.read(1 << 20):
                    received += len(data)
            except ConnectionResetError:
                pass
        assert received < 30 << 20
        writer.close()


async def test_reader_that_goes_away_leaves_no_trace_in_the_log(
    store: ChunkStore,
    http: httpx.AsyncClient,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def reset(*descriptors_and_window: Any) -> int:
        for descriptor in descriptors_and_window[:2]:
            os.close(descriptor)
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")

    path = chunk_path(store, BIG)
    with monkeypatch.context() as changed:
        changed.setattr("muster.shardcast.connections._send", reset)
        with pytest.raises(httpx.RemoteProtocolError):
            await http.get(path)
    assert (await http.get(path)).content == BIG
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_stop_ends_waiting_requests_at_once(store: ChunkStore) -> None:
    server = ShardServer(store)
    await server.start()
    async with httpx.AsyncClient() as client:
        waiting = asyncio.create_task(client.get(f"{server.url}/v1/{RUN}/1/manifest?wait=10"))
        await asyncio.sleep(0.05)
        async with asyncio.timeout(2):
            await server.stop()
            await asyncio.gather(waiting, return_exceptions=True)


async def test_start_fails_with_config_error_when_the_port_is_taken(
    server: ShardServer, store: ChunkStore
) -> None:
    port = int(server.url.rsplit(":", 1)[1])
    with pytest.raises(ConfigError, match="cannot listen"):
        await ShardServer(store, port=port).start()


async def test_url_is_unknown_before_the_start(store: ChunkStore) -> None:
    with pytest.raises(ConfigError, match="not been started"):
        _ = ShardServer(store).url


async def test_url_of_a_server_on_all_addresses_is_local(store: ChunkStore) -> None:
    async with ShardServer(store, "0.0.0.0") as server:
        assert server.url.startswith("http://127.0.0.1:")


async def metrics_of(http: httpx.AsyncClient) -> dict[str, float]:
    lines = (await http.get("/metrics")).text.splitlines()
    return {line.split()[0]: float(line.split()[1]) for line in lines if line[0] != "#"}


async def test_metrics_count_what_was_asked_and_sent(
    store: ChunkStore, http: httpx.AsyncClient
) -> None:
    path = chunk_path(store, BIG)
    await http.get(path)
    await http.get(path, headers={"Range": "bytes=0-9"})
    await http.get("/nothing/there")
    found = await metrics_of(http)
    assert found['muster_shardcast_requests_total{kind="chunk",status="200"}'] == 1
    assert found['muster_shardcast_requests_total{kind="chunk",status="206"}'] == 1
    assert found['muster_shardcast_requests_total{kind="other",status="404"}'] == 1
    assert found["muster_shardcast_sent_bytes_total"] == len(BIG) + 10
    assert found["muster_shardcast_policy_version"] == 1
    assert found["muster_shardcast_connections"] == 1


async def test_metrics_grow_by_no_label_that_a_stranger_chooses(
    store: ChunkStore, http: httpx.AsyncClient
) -> None:
    before = len(await metrics_of(http))
    for i in range(50):
        await http.get(f"/x{i}")
    assert len(await metrics_of(http)) <= before + 4


async def test_metrics_name_the_reader_that_was_cut_off(store: ChunkStore) -> None:
    (store.folder / "f").write_bytes(os.urandom(30 << 20))
    manifest = store.publish(
        {"f": store.folder / "f"},
        run_id=RUN,
        version=PolicyVersion(1),
        stream_from=0,
        stream_to=0,
        sign=fake_signature,
        chunk_bytes=32 << 20,
    )
    async with ShardServer(store, limits=ServerLimits(send_s=0.05)) as server:
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        digest = manifest.files[0].chunks[0].hex()
        writer.write(f"GET /v1/chunks/{digest} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        async with asyncio.timeout(5), httpx.AsyncClient(base_url=server.url) as http:
            while 'muster_shardcast_cut_off_total{reason="slow"}' not in await metrics_of(http):
                await asyncio.sleep(0.01)
        writer.close()
    del reader
