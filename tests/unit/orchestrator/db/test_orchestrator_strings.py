"""Values that a database cannot hold: refused in requests, else only their row fails."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from orchestrator_bench import PLACES, UNLIMITED, Bench, open_bench
from orchestrator_fakes import RUN
from postgres_server import PostgresServer
from pydantic import ValidationError

from muster.api.routes import PARAMETERS, ROUTES, HeartbeatBody, Route
from muster.api.signing import EMPTY_BODY_HASH, SignedHeaders
from muster.lab.redteam.hostile.strings import SPOILED, send_spoiled, spoil
from muster.orchestrator.db import group as group_commit
from muster.orchestrator.db.group import REST_S, GroupCommit
from muster.orchestrator.db.query import RowError, Statement, plain
from muster.orchestrator.http.signers import NonceStore
from muster.protocol.eip712 import address_of
from muster.protocol.errors import ApiError, StorageError
from muster.protocol.ids import Hash32

HEARTBEAT = {"run_id": 1, "policy_version": 0, "state": "idle", "software": "muster 0.1"}
BAD_VALUES = [1 << 63, "\ud800", "taken"]


@pytest.fixture(autouse=True)
def nobody_waits_for_a_database_that_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_commit, "RETRY_S", 3600.0)


def keys_of(bench: Bench) -> dict[str, bytes]:
    keys = bench.network.keys
    return {
        "node": keys.nodes[0],
        "validator": keys.validators[0],
        "trainer": keys.trainer,
        "evaluator": keys.trainer,
    }


async def post(
    bench: Bench, http: httpx.AsyncClient, route: Route, body: bytes, key: bytes
) -> httpx.Response:
    path = route.path.format_map(PARAMETERS)
    signed = bench.signed(key, route.method, path, body)
    return await http.request(route.method, path, content=body, headers=signed)


[BEAT] = [route for route in ROUTES if route.path == "/v1/heartbeat"]


async def beat(bench: Bench, http: httpx.AsyncClient, node: int, **changes: Any) -> int:
    body = json.dumps(HEARTBEAT | changes).encode()
    return (await post(bench, http, BEAT, body, bench.network.keys.nodes[node])).status_code


# In requests


async def test_every_spoiled_message_is_refused(tmp_path: Path) -> None:
    async with open_bench(tmp_path, **UNLIMITED) as bench, bench.http() as http:
        counts = await send_spoiled(
            http, keys_of(bench), bench.network.domain, bench.services.audience, bench.wall
        )
        # A figure is a float, so an integer beyond 64 bits is an ordinary number there.
        answers = {code.split()[0] for path, code in counts if path != "/v1/metrics"}
        assert answers <= {"400", "401", "403", "404", "422"}
        assert not [code for _, code in counts if "not_storable" in code]
        assert sum(counts.values()) > 500
        assert await beat(bench, http, 0) == 200


@pytest.mark.parametrize("text", ["a b", "é", "漢字", "\U0001f600", "\N{NO-BREAK SPACE}"])
async def test_what_people_write_is_kept(bench: Bench, text: str) -> None:
    async with bench.http() as http:
        assert await beat(bench, http, 0, software=text) == 200
    await bench.services.heartbeats.load()
    [heard] = bench.services.heartbeats.latest.values()
    assert heard.software == text


@pytest.mark.sqlite_only
@pytest.mark.parametrize("bad", [bad for bad in SPOILED if isinstance(bad, str)])
def test_client_does_not_write_what_is_refused(bad: str) -> None:
    with pytest.raises(ValidationError, match=r"control character|unicode string"):
        HeartbeatBody(run_id=RUN, policy_version=0, state="idle", software=bad)


anything: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats()
    | st.text(st.characters(exclude_categories=()))
    | st.sampled_from(SPOILED),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[Route, Any]:
    """A message in which some parts are replaced by anything."""
    route = draw(st.sampled_from([route for route in ROUTES if route.body is not None]))
    body = dict(route.body_example)
    for name in draw(st.sets(st.sampled_from(sorted(body)))):
        kind = type(body[name])
        body[name] = draw(anything | st.from_type(kind))
    return route, body


async def test_no_message_makes_a_data_error(tmp_path: Path) -> None:
    async with open_bench(tmp_path, **UNLIMITED) as bench, bench.http() as http:
        keys, loop, codes = keys_of(bench), asyncio.get_running_loop(), set()
        await bench.upload(0)
        await bench.commit()

        @settings(
            max_examples=150,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(bodies())
        def send(message: tuple[Route, Any]) -> None:
            route, body = message
            sent = post(bench, http, route, json.dumps(body).encode(), keys[route.signer])
            answer = asyncio.run_coroutine_threadsafe(sent, loop).result(10)
            assert answer.status_code < 500, (body, answer.text)
            assert "not_storable" not in answer.text, (body, answer.text)
            codes.add(answer.status_code)

        await asyncio.to_thread(send)
        # Some messages succeed, so no check stops all of them.
        assert {200, 400} <= codes


# Past these checks: the database itself refuses a row


def heartbeat(name: str, value: object = 1) -> tuple[Statement, Statement]:
    """The statements of a heartbeat's request, for its nonce and its row; `value` may be bad."""
    first = plain(
        "INSERT INTO nonces (signer, nonce, seen_at) VALUES (:signer, :nonce, 1)"
        " ON CONFLICT DO NOTHING RETURNING 1",
        signer=name,
        nonce=os.urandom(32),
    )
    second = plain(
        "INSERT INTO heartbeats (node, state, software, seen_at, count)"
        " VALUES (:node, :state, 'muster', :seen_at, 1)",
        node="taken" if value == "taken" else name,
        state="taken" if value == "taken" else str(value),
        seen_at=value if isinstance(value, int) else 1,
    )
    return first, second


@asynccontextmanager
async def committing(
    bench: Bench, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[GroupCommit]:
    group = GroupCommit(bench.services.database, clock=clock)
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(group.run())
        yield group
        running.cancel()


async def nodes(bench: Bench) -> set[str]:
    rows = await bench.services.database.ask(plain("SELECT node FROM heartbeats"))
    return {node for (node,) in rows[0]}


@pytest.mark.parametrize("culprits", [1, 3, 40])
@pytest.mark.parametrize("bad", BAD_VALUES)
async def test_row_that_the_database_refuses_is_refused_alone(
    bench: Bench, bad: object, culprits: int
) -> None:
    async with committing(bench) as group:
        await group.add(*heartbeat("taken"), caller="taken")
        honest = [f"honest {number}" for number in range(60)]
        hostile = [f"hostile {number}" for number in range(culprits)]
        answers = await asyncio.gather(
            *(group.add(*heartbeat(name), caller=name) for name in honest),
            *(group.add(*heartbeat(name, bad), caller=name) for name in hostile),
            return_exceptions=True,
        )
    assert answers[:60] == [True] * 60
    for error in answers[60:]:
        assert isinstance(error, RowError)
        assert not error.is_busy
    assert await nodes(bench) == {"taken", *honest}


async def test_caller_whose_row_was_refused_costs_the_others_no_more_for_a_while(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, transactions = 0.0, 0
    database = bench.services.database
    begin = database.transaction

    def transaction(**options: Any) -> Any:
        nonlocal transactions
        transactions += 1
        return begin(**options)

    monkeypatch.setattr(database, "transaction", transaction)
    async with committing(bench, lambda: now) as group:
        rows = [heartbeat(f"n{number}", 1 << 63) for number in range(64)]
        await asyncio.gather(
            *(group.add(*each, caller="hostile") for each in rows), return_exceptions=True
        )
        # One of 64 is found in 6 halvings; the other 63 need no search.
        assert transactions <= 2 * 7
        assert group.rest_s("hostile") == REST_S
        assert group.rest_s("honest") == 0
        now += REST_S
        assert await group.add(*heartbeat("reformed"), caller="hostile")


async def test_signer_whose_row_was_refused_is_told_when_to_come_again(bench: Bench) -> None:
    services, signer = bench.services, address_of(b"\x01" * 32)
    store = NonceStore(services.database, services.group, clock=bench.wall)

    def headers(nonce: int) -> SignedHeaders:
        now, named = int(bench.wall()), Hash32(bytes([nonce]) * 32)
        return SignedHeaders(signer, named, now, EMPTY_BODY_HASH, b"")

    store.take(headers(1))
    with pytest.raises(RowError):
        await store.keep(headers(1), heartbeat("x", 1 << 63)[1])
    with pytest.raises(ApiError) as caught:
        store.take(headers(2))
    assert caught.value.status == 429
    store.take(replace(headers(1), address=address_of(b"\x02" * 32)))


async def test_transaction_tells_a_row_from_an_outage(bench: Bench) -> None:
    database = bench.services.database

    async def write(signer: str, seen_at: int) -> None:
        sql = "INSERT INTO nonces (signer, nonce, seen_at) VALUES (:signer, :nonce, :seen_at)"
        async with database.transaction() as asked:
            await asked.ask(plain(sql, signer=signer, nonce=b"", seen_at=seen_at))

    await write("x", 1)
    for signer, seen_at in (("\ud800", 1), ("y", 1 << 63), ("x", 1)):
        with pytest.raises(RowError):
            await write(signer, seen_at)


# PostgreSQL alone: NUL, locks, outages


@pytest.fixture
def postgres_place(tmp_path: Path, postgres: PostgresServer) -> str:
    PLACES[tmp_path] = postgres.create("empty")
    return PLACES[tmp_path]


@pytest.mark.sqlite_only
@pytest.mark.usefixtures("postgres_place")
async def test_honest_are_all_served_while_rows_are_refused(tmp_path: Path) -> None:
    async with open_bench(tmp_path, **UNLIMITED) as bench, bench.http() as http:
        served, refused, is_over, hostile = [], [], False, 0

        async def honest(node: int) -> None:
            while not is_over:
                before = hostile
                status = await beat(bench, http, node)
                served.append((status, hostile - before))

        async def at_the_door() -> None:
            while not is_over:
                refused.append(await beat(bench, http, 2, software="muster\0"))
                await asyncio.sleep(0)  # nothing above yields to other tasks

        async def past_the_door() -> None:
            nonlocal hostile
            while hostile < 20:
                name = f"hostile {hostile}"
                with pytest.raises(RowError):
                    await bench.services.group.add(*heartbeat(name, "a\0b"), caller=name)
                hostile += 1

        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            for node in (0, 1):
                tasks.create_task(honest(node))
            tasks.create_task(at_the_door())
            await past_the_door()
            is_over = True
    assert {status for status, _ in served} == {200}
    assert set(refused) == {400}
    assert len(served) > 20
    # Nobody waits during the search for many rows, however slow the machine is.
    assert max(rows for _, rows in served) <= 3


@pytest.mark.sqlite_only
async def test_row_that_somebody_holds_makes_only_its_own_node_wait(
    tmp_path: Path, postgres_place: str
) -> None:
    async with (
        open_bench(tmp_path) as bench,
        bench.http() as http,
        await psycopg.AsyncConnection.connect(postgres_place) as hung,
    ):
        assert await asyncio.gather(*(beat(bench, http, node) for node in range(3))) == [200] * 3
        held = bench.network.worker(1).node
        await hung.execute("SELECT 1 FROM heartbeats WHERE node = %s FOR UPDATE", (held,))
        answers = await asyncio.gather(*(beat(bench, http, node) for node in range(3)))
        assert answers == [200, 503, 200]
        await hung.rollback()
        bench.services.group._rests_until.clear()
        assert await beat(bench, http, 1) == 200


@pytest.mark.sqlite_only
async def test_database_that_is_away_is_no_fault_of_a_row(
    tmp_path: Path, postgres_place: str
) -> None:
    async with open_bench(tmp_path) as bench, committing(bench) as group:
        await group.add(*heartbeat("before"), caller="before")
        with psycopg.connect(postgres_place, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid != pg_backend_pid()"
            )
        with pytest.raises(StorageError) as caught:
            await group.add(*heartbeat("meanwhile"), caller="meanwhile")
        assert not isinstance(caught.value, RowError)
        assert group.rest_s("meanwhile") == 0
        # The connections are gone, but the server is up, so no request waits.
        assert await group.add(*heartbeat("after"), caller="after")


@pytest.mark.sqlite_only
def test_spoiled_values_reach_every_part_of_a_message() -> None:
    spoiled = list(spoil({"a": {"b": "c"}, "d": 1}))
    assert {"a": {"b": "\0"}, "d": 1} in spoiled
    assert {"a": {"b": "c\0"}, "d": 1} in spoiled
    assert {"a": {"b": "c"}, "d": 1 << 63} in spoiled
    assert {"a": {"b": "c"}, "d": 1, "\0": 1} in spoiled
