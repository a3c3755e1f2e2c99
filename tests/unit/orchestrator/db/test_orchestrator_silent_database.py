"""A PostgreSQL server that says nothing, as after a power failure of its host or on a dead disk."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
from orchestrator_bench import PLACES, Bench, open_bench
from orchestrator_fakes import NOW
from postgres_server import PostgresServer

from muster.orchestrator.db import open_database
from muster.orchestrator.db.postgres import PostgresDatabase
from muster.orchestrator.db.query import plain
from muster.protocol.errors import StorageError
from muster.protocol.ids import Hash32

BODY = b'{"run_id":1,"policy_version":0,"state":"idle","software":"muster 0.1"}'
LIMIT = "muster.orchestrator.db.postgres.SILENCE_S"
pytestmark = pytest.mark.sqlite_only  # its servers are its own


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as started:
        yield started


@pytest.fixture
async def database(server: PostgresServer) -> AsyncIterator[PostgresDatabase]:
    opened = await open_database(server.create())
    assert isinstance(opened, PostgresDatabase)
    yield opened
    await opened.close()


@contextmanager
def silent(server: PostgresServer) -> Iterator[None]:
    """Stop all processes of a server, whose connections stay open, and soon give them up."""
    first = psutil.Process(server.pid)
    processes = [first, *first.children(recursive=True)]
    for process in processes:
        process.suspend()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LIMIT, 0.3)
            yield
    finally:
        for process in processes:
            process.resume()


async def beat(bench: Bench) -> tuple[int, str]:
    """Send a heartbeat; return the answer's status and the code of a refusal."""
    key, nonce = bench.network.keys.nodes[0], Hash32(os.urandom(32))
    headers = bench.signed(key, "POST", "/v1/heartbeat", body=BODY, nonce=nonce, issued_at=NOW)
    async with asyncio.timeout(60), bench.http() as http:
        answer = await http.post("/v1/heartbeat", content=BODY, headers=headers)
    return answer.status_code, "" if answer.is_success else answer.json()["error"]["code"]


async def test_heartbeat_is_refused_while_the_database_is_silent(
    tmp_path: Path, server: PostgresServer
) -> None:
    PLACES[tmp_path] = server.create()
    async with open_bench(tmp_path) as bench:
        assert await beat(bench) == (200, "")
        with silent(server):
            assert await beat(bench) == (503, "database_away")
        assert await beat(bench) == (200, "")
    del PLACES[tmp_path]


async def test_transaction_on_a_silent_connection_fails_and_the_next_goes_on(
    server: PostgresServer, database: PostgresDatabase
) -> None:
    async def change() -> None:
        async with asyncio.timeout(60), database.transaction() as asked:
            await asked.ask(plain("DELETE FROM metrics RETURNING step"))
            with silent(server):
                await asked.ask(plain("SELECT 1"))

    with pytest.raises(StorageError, match="is unusable"):
        await change()
    assert await database.search(plain("SELECT 2")) == [[(2,)]]


async def test_commit_to_a_silent_server_fails(
    server: PostgresServer, database: PostgresDatabase
) -> None:
    async def change() -> None:
        async with asyncio.timeout(60), database.transaction() as asked:
            await asked.ask(plain("SELECT 1"))
            stack.enter_context(silent(server))

    with ExitStack() as stack, pytest.raises(StorageError, match="is unusable"):
        await change()


async def test_server_that_goes_on_answering_is_not_silent(
    database: PostgresDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muster.orchestrator.db.postgres.MOST_AT_ONCE", 1)
    monkeypatch.setattr(LIMIT, 2.0)
    slow = plain("SELECT 1 FROM pg_sleep(0.8)")
    async with database.transaction() as asked:
        assert await asked.ask(slow, slow, slow) == [[(1,)]] * 3


async def test_statement_without_an_answer_is_given_up(
    database: PostgresDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LIMIT, 0.3)
    async with asyncio.timeout(60):
        with pytest.raises(StorageError, match="is unusable"):
            await database.ask(plain("SELECT pg_sleep(600)"))


@pytest.mark.parametrize("name", ["keepalives_idle", "tcp_user_timeout"])
async def test_connection_asks_the_kernel_to_notice_a_lost_host(
    database: PostgresDatabase, name: str
) -> None:
    async with database._quick.borrowed() as asked:
        assert name in asked.connection.info.get_parameters()
