"""Every test that opens an orchestrator's database runs twice: SQLite and PostgreSQL."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import orchestrator_bench
import psycopg
import pytest
from orchestrator_bench import PLACES, Bench, open_bench
from postgres_server import PostgresServer

from muster.orchestrator.db import open_database
from muster.orchestrator.db.tables import metadata

TEMPLATE = "empty"
_EMPTIED: list[str] = []
"""Databases of earlier tests, emptied for the next one: making another takes 40 ms of a core."""


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        server.execute(f"CREATE DATABASE {TEMPLATE}")

        async def create_tables() -> None:
            await (await open_database(server.url(TEMPLATE))).close()

        asyncio.run(create_tables())
        yield server


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    opens = getattr(metafunc.module, "open_bench", None) is orchestrator_bench.open_bench
    is_exempt = metafunc.definition.get_closest_marker("sqlite_only") is not None
    if (opens or "bench" in metafunc.fixturenames) and not is_exempt:
        metafunc.parametrize("kind_of_database", ["sqlite", "postgresql"], indirect=True)


@pytest.fixture(autouse=True)
def kind_of_database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    """Autouse: a fixture that `pytest_generate_tests` adds to a test is not set up."""
    if getattr(request, "param", None) == "postgresql":
        server: PostgresServer = request.getfixturevalue("postgres")
        PLACES[tmp_path] = _EMPTIED.pop() if _EMPTIED else server.create(TEMPLATE)
    yield
    place = PLACES.pop(tmp_path, None)
    if place is not None and _empty(place):
        _EMPTIED.append(place)


def _empty(place: str) -> bool:
    """Empty all tables of a database; return whether it is unused and has its first schema."""
    with psycopg.connect(place, autocommit=True) as connection:
        tables = {row[0] for row in connection.execute(_TABLES).fetchall()}
        if connection.execute(_OTHERS).fetchone() != (0,) or tables != set(metadata.tables):
            return False
        connection.execute(_EMPTY)
    return True


_TABLES = (
    "SELECT tablename FROM pg_tables WHERE schemaname = 'public' AND tablename != 'schema_version'"
)
_OTHERS = (
    "SELECT count(*) FROM pg_stat_activity"
    " WHERE datname = current_database() AND pid != pg_backend_pid()"
)
# Not TRUNCATE, which makes new files for every table and index.
_EMPTY = "; ".join(
    # Tables that others refer to come last.
    [f"DELETE FROM {table.name}" for table in reversed(metadata.sorted_tables)]
    + ["SELECT setval(oid, 1, false) FROM pg_class WHERE relkind = 'S'"]
)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with open_bench(tmp_path) as opened:
        yield opened
