"""The application behind a real socket, and the command line."""

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from orchestrator_bench import client, open_bench, served
from orchestrator_fakes import RUN, submission_for

from muster.api import Lease, OrchestratorApi
from muster.orchestrator.db.query import plain
from muster.orchestrator.http.connections import MOST_PIPELINED
from muster.orchestrator.process import serve_until_stopped
from muster.protocol.bounds import MAX_FILE_BYTES
from muster.protocol.errors import ApiError, StorageError

REQUEST = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    yield reader, writer
    writer.close()


async def test_one_that_was_cancelled_leaves_nothing_behind_for_the_next(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    async with open_bench(tmp_path, port=0, ready_file=ready) as bench, asyncio.timeout(20):
        for _ in range(2):
            process = asyncio.create_task(serve_until_stopped(bench.services, bench.network.chain))
            while not ready.exists():
                await asyncio.sleep(0.01)
            # The second server's socket has the file descriptor number of the first's.
            async with httpx.AsyncClient(base_url=ready.read_text().strip()) as http:
                assert (await http.get("/healthz")).status_code == 200
            ready.unlink()
            process.cancel()
            await asyncio.wait([process])


async def test_upload_is_committed_soon_after_it_arrives(tmp_path: Path) -> None:
    async with (
        served(tmp_path) as (bench, url),
        client(bench, url, bench.network.keys.nodes[0]) as api,
    ):
        lease = await api.lease(RUN)
        assert isinstance(lease, Lease)
        submission = submission_for(lease.ticket, b"rows")
        await api.submit(submission, bench.network.sign_submission(submission), b"rows")
        async with asyncio.timeout(5):
            while (await api.submission_state(submission.file_hash)).state != "committed":
                await asyncio.sleep(0.01)


async def test_events_follow_the_run_and_end_when_it_stops(tmp_path: Path) -> None:
    seen: list[int] = []

    async def listen(api: OrchestratorApi) -> None:
        async for event in api.events():
            seen.append(event["received"])

    async with served(tmp_path) as (bench, url):
        api = client(bench, url, bench.network.keys.nodes[0])
        listening = asyncio.create_task(listen(api))
        while not seen:
            await asyncio.sleep(0.01)
        async with client(bench, url, bench.network.keys.nodes[1]) as node:
            lease = await node.lease(RUN)
            assert isinstance(lease, Lease)
            submission = submission_for(lease.ticket, b"rows")
            await node.submit(submission, bench.network.sign_submission(submission, 1), b"rows")
        while seen[-1] != 1:
            await asyncio.sleep(0.01)
    await listening
    await api.close()


@pytest.mark.parametrize("kind", ["oversized", "unknown ticket"])
async def test_refusal_reaches_a_client_that_is_still_sending(tmp_path: Path, kind: str) -> None:
    async with (
        served(tmp_path) as (bench, url),
        client(bench, url, bench.network.keys.nodes[0]) as api,
    ):
        lease = await api.lease(RUN)
        assert isinstance(lease, Lease)
        body = bytes(MAX_FILE_BYTES + 1 if kind == "oversized" else 8 << 20)
        submission = submission_for(lease.ticket, body)
        if kind != "oversized":
            bench.services.intake.max_file_bytes = MAX_FILE_BYTES
            object.__setattr__(submission, "index", submission.index + 1)
        with pytest.raises(ApiError) as caught:
            await api.submit(submission, bench.network.sign_submission(submission), body)
        expected = "body_too_large" if kind == "oversized" else "ticket_unknown"
        assert caught.value.code == expected


async def test_headers_are_refused_when_they_never_end(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, url), connected(url) as (reader, writer):
        writer.write(b"GET /healthz HTTP/1.1\r\nx-large: ")
        for _ in range(5):
            writer.write(b"x" * 4096)
            await writer.drain()
            await asyncio.sleep(0.01)
        answer = await asyncio.wait_for(reader.read(), 5)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"headers_too_large" in answer


async def test_stop_does_not_wait_for_a_request_that_hangs(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, url):
        host, port = url.removeprefix("http://").split(":")
        hanging = socket.create_connection((host, int(port)))
        hanging.sendall(b"POST /v1/leases HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nx")
        await asyncio.sleep(0.05)
    hanging.close()


@pytest.mark.parametrize(
    ("request_before", "sent"),
    [
        (b"", b""),
        (b"", b"GET /healthz HTTP/1.1\r\nhost: "),
        (REQUEST, REQUEST[:10]),
        (REQUEST, b"\r\n"),
    ],
    ids=["nothing", "half", "half of a second", "only a line break after an answer"],
)
async def test_connection_is_closed_when_headers_do_not_arrive(
    tmp_path: Path, request_before: bytes, sent: bytes
) -> None:
    async with (
        served(tmp_path, header_timeout_s=0.1) as (_, url),
        connected(url) as (reader, writer),
    ):
        if request_before:
            writer.write(request_before)
            await asyncio.wait_for(reader.readuntil(b"ok"), 5)
        writer.write(sent)
        assert await asyncio.wait_for(reader.read(), 5) == b""


async def test_requests_in_one_piece_are_all_answered(tmp_path: Path) -> None:
    async with (
        served(tmp_path, header_timeout_s=0.2) as (_, url),
        connected(url) as (reader, writer),
    ):
        writer.write(REQUEST * (1 + MOST_PIPELINED))
        for _ in range(1 + MOST_PIPELINED):
            await asyncio.wait_for(reader.readuntil(b"\r\n\r\nok"), 5)


async def test_connection_stays_open_between_requests(tmp_path: Path) -> None:
    async with (
        served(tmp_path, header_timeout_s=0.1) as (_, url),
        httpx.AsyncClient(base_url=url) as http,
    ):
        for _ in range(2):
            assert (await http.get("/healthz")).text == "ok"
            # Longer than the deadline for headers: an idle connection is no unfinished request.
            await asyncio.sleep(0.2)


async def test_small_answers_are_not_held_back(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, url), httpx.AsyncClient(base_url=url) as http:
        times = []
        for _ in range(9):
            started = time.perf_counter()
            await http.get("/healthz")
            times.append(time.perf_counter() - started)
    # Nagle's delay would add 40 ms to each; a busy machine delays some.
    assert min(times) < 0.03


async def test_port_in_use_is_reported(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with open_bench(tmp_path, port=port) as bench:
            with pytest.raises(OSError, match="in use"):
                await serve_until_stopped(bench.services, bench.network.chain)


async def test_process_fails_with_one_error_when_its_database_does(tmp_path: Path) -> None:
    async with open_bench(tmp_path, port=0) as bench:
        async with bench.services.database.transaction() as asked:
            await asked.ask(plain("DROP TABLE submissions"))
        with pytest.raises(StorageError, match=r"no such table|does not exist"):
            await serve_until_stopped(bench.services, bench.network.chain)


@pytest.mark.parametrize(
    ("module", "heavy"),
    [("process", {"torch", "transformers", "vllm", "pyarrow"}), ("cli", {"fastapi", "web3"})],
)
def test_module_imports_nothing_heavy(module: str, heavy: set[str]) -> None:
    code = (
        f"import muster.orchestrator.{module}, sys; bad = {heavy} & set(sys.modules);"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
