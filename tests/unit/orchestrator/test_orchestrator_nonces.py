from __future__ import annotations

import os
from pathlib import Path

import httpx
import pytest
from orchestrator_bench import Bench, delete_database, open_bench
from orchestrator_fakes import NOW, Network
from sqlalchemy import func, select

from muster.api.limits import NONCE_LIFE_S, REQUEST_VALIDITY_S
from muster.api.signing import SignedHeaders, sign_request
from muster.orchestrator.db.models import HeartbeatRow, NonceRow
from muster.orchestrator.services.nonces import NonceStore
from muster.protocol.eip712 import Domain, address_of
from muster.protocol.errors import ApiError
from muster.protocol.ids import Hash32

BODY = b'{"run_id":1,"policy_version":0,"state":"idle","software":"muster 0.1"}'


def beat(bench: Bench, *, nonce: bytes = b"\x01" * 32, **changes: object) -> dict[str, str]:
    arguments: dict[str, object] = {
        "key": bench.network.keys.nodes[0],
        "domain": bench.network.domain,
        "audience": bench.services.audience,
        "method": "POST",
        "path": "/v1/heartbeat",
        "body": BODY,
        "nonce": Hash32(nonce),
        "issued_at": NOW,
    }
    return sign_request(**(arguments | changes))  # type: ignore[arg-type]


async def send(bench: Bench, headers: dict[str, str], body: bytes = BODY) -> str:
    """The code of the refusal, or `ok`."""
    transport = httpx.ASGITransport(bench.app)
    async with httpx.AsyncClient(base_url="http://test", transport=transport) as http:
        response = await http.post("/v1/heartbeat", content=body, headers=headers)
    return "ok" if response.status_code == 200 else str(response.json()["error"]["code"])


@pytest.mark.parametrize(
    ("age_s", "code"),
    [
        (0, "nonce_reused"),
        (REQUEST_VALIDITY_S - 1, "nonce_reused"),
        (REQUEST_VALIDITY_S, "nonce_reused"),
        (REQUEST_VALIDITY_S + 1, "request_expired"),
        (NONCE_LIFE_S + 1, "request_expired"),
    ],
)
async def test_replay_is_refused_at_any_age(bench: Bench, age_s: int, code: str) -> None:
    headers = beat(bench)
    assert await send(bench, headers) == "ok"
    bench.wall.time = NOW + age_s
    assert await send(bench, headers) == code


async def test_replay_of_a_request_from_the_future_is_refused_until_it_expires(
    bench: Bench,
) -> None:
    headers = beat(bench, issued_at=NOW + 30)
    assert await send(bench, headers) == "ok"
    bench.wall.time = NOW + 30 + REQUEST_VALIDITY_S
    assert await send(bench, headers) == "nonce_reused"
    bench.wall.time += 1
    assert await send(bench, headers) == "request_expired"


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


async def test_same_nonce_is_fine_when_another_signer_uses_it(bench: Bench) -> None:
    assert await send(bench, beat(bench)) == "ok"
    assert await send(bench, beat(bench, key=bench.network.keys.nodes[1])) == "ok"


async def test_nonces_of_strangers_are_not_remembered(bench: Bench) -> None:
    assert await send(bench, beat(bench, key=os.urandom(32))) == "worker_not_active"
    async with bench.services.database.read() as session:
        assert await session.scalar(select(func.count()).select_from(NonceRow)) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"audience": address_of(b"\x01" * 32)},
        {"domain": Domain(1, address_of(b"\x01" * 32))},
        {"path": "/v1/leases"},
        {"method": "PUT"},
        {"body": BODY.replace(b"idle", b"busy")},
    ],
)
async def test_request_is_refused_when_it_was_signed_for_something_else(
    bench: Bench, change: dict[str, object]
) -> None:
    assert await send(bench, beat(bench, **change)) == "bad_signature"


async def test_request_is_refused_when_it_is_from_the_future(bench: Bench) -> None:
    assert await send(bench, beat(bench, issued_at=NOW + 31)) == "request_from_future"


async def test_request_is_refused_when_it_is_not_signed(bench: Bench) -> None:
    assert await send(bench, {}) == "unsigned_request"


async def test_heartbeat_counts_for_the_signer_whatever_the_body_says(bench: Bench) -> None:
    other = bench.network.worker(1).node.encode()
    body = BODY.replace(b'"idle"', b'"idle","node":"%s"' % other)
    assert await send(bench, beat(bench, body=body), body) == "malformed_body"
    assert await send(bench, beat(bench)) == "ok"
    assert set(bench.services.heartbeats.latest) == {bench.network.worker(0).node}


async def test_heartbeats_are_stored_with_their_count(bench: Bench) -> None:
    for number in range(3):
        assert await send(bench, beat(bench, nonce=bytes([number]) * 32)) == "ok"
    async with bench.services.database.read() as session:
        row = await session.get(HeartbeatRow, bench.network.worker(0).node)
    assert row is not None
    assert (row.count, row.state, row.software, row.seen_at) == (3, "idle", "muster 0.1", NOW)


async def test_nonces_are_forgotten_when_their_life_is_over(bench: Bench) -> None:
    now = float(NOW)
    services = bench.services
    store = NonceStore(services.database, services.group, clock=lambda: now)
    headers = SignedHeaders(address_of(b"\x01" * 32), Hash32(b"\x02" * 32), NOW, b"")
    await store.use(headers)
    now += NONCE_LIFE_S
    with pytest.raises(ApiError, match="received before"):
        await store.use(headers)
    now += 1
    await store.purge()
    await store.use(headers)
    async with services.database.read() as session:
        assert await session.scalar(select(func.count()).select_from(NonceRow)) == 1


async def test_requests_are_refused_when_too_many_wait_for_the_disk(bench: Bench) -> None:
    group = bench.services.group
    object.__setattr__(group, "_max_waiting", 0)
    assert await send(bench, beat(bench)) == "overloaded"
