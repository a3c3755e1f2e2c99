"""Nonces outlive restarts and databases. Edges of signed requests have a table of their own."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from orchestrator_bench import Bench, delete_database, open_bench
from orchestrator_fakes import NOW, Network

from muster.api.signing import EMPTY_BODY_HASH, NONCE_LIFE_S, SignedHeaders
from muster.orchestrator.db.query import plain
from muster.orchestrator.db.sqlite import SqliteDatabase
from muster.orchestrator.http.signers import NonceStore
from muster.protocol.eip712 import address_of
from muster.protocol.errors import ApiError
from muster.protocol.ids import Hash32

BODY = b'{"run_id":1,"policy_version":0,"state":"idle","software":"muster 0.1"}'
NONCES = plain("SELECT count(*) FROM nonces")


def beat(bench: Bench, *, nonce: bytes = b"\x01" * 32, **changes: Any) -> dict[str, str]:
    values = {"body": BODY, "nonce": Hash32(nonce), "issued_at": NOW} | changes
    return bench.signed(bench.network.keys.nodes[0], "POST", "/v1/heartbeat", **values)


async def send(bench: Bench, headers: dict[str, str], body: bytes = BODY) -> str:
    """The code of the refusal, or `ok`."""
    async with bench.http() as http:
        response = await http.post("/v1/heartbeat", content=body, headers=headers)
    return "ok" if response.status_code == 200 else str(response.json()["error"]["code"])


async def test_replay_is_refused_when_the_process_was_restarted(tmp_path: Path) -> None:
    network = Network()
    async with open_bench(tmp_path, network) as bench:
        headers = beat(bench)
        assert await send(bench, headers) == "ok"
    async with open_bench(tmp_path, network) as bench:
        assert await send(bench, headers) == "nonce_reused"


async def test_replay_is_refused_when_the_database_was_deleted(tmp_path: Path) -> None:
    network = Network()
    async with open_bench(tmp_path, network) as bench:
        headers = beat(bench)
        assert await send(bench, headers) == "ok"
    delete_database(tmp_path)
    async with open_bench(tmp_path, network, start_s=5) as bench:
        assert await send(bench, headers) == "nonce_reused"
        assert await send(bench, beat(bench, issued_at=NOW + 5)) == "ok"


async def test_heartbeat_counts_for_the_signer_whatever_the_body_says(bench: Bench) -> None:
    other = bench.network.worker(1).node.encode()
    body = BODY.replace(b'"idle"', b'"idle","node":"%s"' % other)
    assert await send(bench, beat(bench, body=body), body) == "malformed_body"
    assert await send(bench, beat(bench, nonce=b"\x02" * 32)) == "ok"
    assert set(bench.services.heartbeats.latest) == {bench.network.worker(0).node}


async def test_heartbeats_are_stored_with_their_count(bench: Bench) -> None:
    for number in range(3):
        assert await send(bench, beat(bench, nonce=bytes([number]) * 32)) == "ok"
    stored = plain("SELECT count, state, software, seen_at FROM heartbeats")
    assert await bench.services.database.ask(stored) == [[(3, "idle", "muster 0.1", NOW)]]


async def test_nonces_are_forgotten_when_their_life_is_over(bench: Bench) -> None:
    now = float(NOW)
    services = bench.services
    store = NonceStore(services.database, services.group, clock=lambda: now)
    headers = SignedHeaders(
        address_of(b"\x01" * 32), Hash32(b"\x02" * 32), NOW, EMPTY_BODY_HASH, b""
    )
    store.take(headers)
    await store.keep(headers)
    now += NONCE_LIFE_S
    with pytest.raises(ApiError, match="received before"):
        store.take(headers)
    now += 1
    await store.purge()
    store.take(headers)
    await store.keep(headers)
    assert await services.database.ask(NONCES) == [[(1,)]]


async def test_requests_are_refused_when_too_many_wait_for_the_disk(bench: Bench) -> None:
    group = bench.services.group
    object.__setattr__(group, "_max_waiting", 0)
    assert await send(bench, beat(bench)) == "overloaded"


@pytest.mark.sqlite_only
async def test_request_is_refused_while_the_disk_of_the_database_is_full(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muster.orchestrator.db.group.RETRY_S", 0.001)
    database = bench.services.database
    assert isinstance(database, SqliteDatabase)
    database._writer.run("PRAGMA max_page_count = 1")  # the present size at least

    async def answers() -> list[str]:
        async with asyncio.timeout(20):
            return [await send(bench, beat(bench, nonce=os.urandom(32))) for _ in range(100)]

    assert "storage_failed" in await answers()
    database._writer.run("PRAGMA max_page_count = 1000000")
    assert set(await answers()) == {"ok"}
