"""Whatever opens an orchestrator's database does so twice: in SQLite and in PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import orchestrator_bench
import pytest
from orchestrator_bench import PLACES, Bench, open_bench
from postgres_server import PostgresServer
from sqlalchemy import create_engine

from muster.orchestrator.db.engine import migrate

TEMPLATE = "migrated"


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        server.execute(f"CREATE DATABASE {TEMPLATE}")
        engine = create_engine(server.url(TEMPLATE).replace("postgresql:", "postgresql+psycopg:"))
        with engine.begin() as connection:
            migrate(connection)
        engine.dispose()
        yield server


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    opens = getattr(metafunc.module, "open_bench", None) is orchestrator_bench.open_bench
    is_exempt = metafunc.definition.get_closest_marker("sqlite_only") is not None
    if (opens or "bench" in metafunc.fixturenames) and not is_exempt:
        metafunc.fixturenames.append("kind_of_database")
        metafunc.parametrize("kind_of_database", ["sqlite", "postgresql"], indirect=True)


@pytest.fixture
def kind_of_database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "postgresql":
        server: PostgresServer = request.getfixturevalue("postgres")
        PLACES[tmp_path] = server.create(TEMPLATE)
    yield request.param
    PLACES.pop(tmp_path, None)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with open_bench(tmp_path) as opened:
        yield opened
