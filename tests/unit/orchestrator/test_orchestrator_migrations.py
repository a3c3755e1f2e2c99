"""Migrations keep the rows: forward and back, one revision at a time, in both databases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.operations import Operations
from alembic.script import ScriptDirectory
from migration_data import FAR, VALUES
from postgres_server import PostgresServer
from sqlalchemy import Connection, Engine, MetaData, Table, create_engine, inspect, select
from sqlalchemy.exc import DataError

from muster.orchestrator.db import engine as engine_module

MIGRATIONS = Path(engine_module.__file__).parent / "migrations"
ROWS = 3
"""Rows per table and revision."""

Dump = dict[str, list[dict[str, Any]]]
"""Every table's rows, by name."""


def config_for(connection: Connection | None = None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    return config


def revisions() -> list[str]:
    """Every revision, first to last; fails when they fork."""
    # Some call operations' names when they are imported, which needs a context.
    with Operations.context(MigrationContext.configure(dialect_name="sqlite")):
        script = ScriptDirectory.from_config(config_for())
        assert len(script.get_heads()) == 1
        return [each.revision for each in reversed(list(script.walk_revisions()))]


@pytest.fixture(params=["sqlite", "postgresql"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/database"
    else:
        server: PostgresServer = request.getfixturevalue("postgres")
        url = server.create("template1").replace("postgresql:", "postgresql+psycopg:")
    made = create_engine(url)
    yield made
    made.dispose()


def tables(connection: Connection) -> list[Table]:
    """The tables as they are in the database, those others refer to first."""
    metadata = MetaData()
    metadata.reflect(connection)
    return [table for table in metadata.sorted_tables if table.name != "alembic_version"]


def dump(connection: Connection) -> Dump:
    return {
        table.name: sorted(
            (dict(row._mapping) for row in connection.execute(select(table))), key=repr
        )
        for table in tables(connection)
    }


def row(table: Table, number: int) -> dict[str, Any]:
    """Values for a row; fails for a column that nobody gave values for."""
    values = VALUES.get(table.name, {})
    missing = [column.name for column in table.columns if column.name not in values]
    assert not missing, f"migration_data.py has no values for {missing} of {table.name}"
    return {column.name: values[column.name](number) for column in table.columns}


def fill(connection: Connection, start: int) -> None:
    for table in tables(connection):
        rows = [row(table, number) for number in range(start, start + ROWS)]
        connection.execute(table.insert(), rows)


def common(older: Dump, newer: Dump) -> tuple[Dump, Dump]:
    """Both dumps, reduced to the columns that the older one has."""

    def reduced(rows: list[dict[str, Any]], names: set[str]) -> list[dict[str, Any]]:
        return sorted(({n: v for n, v in row.items() if n in names} for row in rows), key=repr)

    columns = {name: set(rows[0]) for name, rows in older.items()}
    return (
        {name: reduced(rows, columns[name]) for name, rows in older.items()},
        {name: reduced(newer[name], columns[name]) for name in older},
    )


def test_rows_of_every_revision_reach_the_newest_and_come_back(engine: Engine) -> None:
    passed: list[tuple[str, Dump]] = []
    for number, revision in enumerate(revisions()):
        with engine.begin() as connection:
            command.upgrade(config_for(connection), revision)
            if passed:
                older, newer = common(passed[-1][1], dump(connection))
                assert older == newer, f"{revision} changes rows"
            fill(connection, ROWS * number)
            passed.append((revision, dump(connection)))
    newest = passed[-1][1]
    for revision, before in reversed(passed[:-1]):
        with engine.begin() as connection:
            command.downgrade(config_for(connection), revision)
            # As it was at this revision: the same tables and columns, and all rows since.
            now = dump(connection)
            assert {n: set(r[0]) for n, r in now.items()} == {
                n: set(r[0]) for n, r in before.items()
            }
            kept, of_newest = common(now, newest)
            assert kept == of_newest, f"going down to {revision} changes rows"
    with engine.begin() as connection:
        command.downgrade(config_for(connection), "base")
        assert inspect(connection).get_table_names() == ["alembic_version"]


def test_rows_written_after_going_back_go_forward_again(engine: Engine) -> None:
    first, last = revisions()[0], revisions()[-1]
    with engine.begin() as connection:
        command.upgrade(config_for(connection), last)
        command.downgrade(config_for(connection), first)
        fill(connection, 0)
        before = dump(connection)
        command.upgrade(config_for(connection), last)
        after = dump(connection)
        older, newer = common(before, after)
        assert older == newer
        # What 0007 takes out of the ticket, and 0010 out of the claim.
        versions = [row["policy_version"] for row in after["leases"]]
        assert versions == [row["ticket"]["policy_version"] for row in before["leases"]]
        units = [row["units"] for row in after["submissions"]]
        assert units == [row["submission"]["units"] for row in before["submissions"]]


def test_numbers_too_large_for_the_older_schema_stop_the_way_back(
    engine: Engine,
) -> None:
    last = revisions()[-1]
    with engine.begin() as connection:
        command.upgrade(config_for(connection), last)
        fill(connection, 0)
        batches = next(table for table in tables(connection) if table.name == "batches")
        connection.execute(batches.update().values(units=2 * FAR))
        before = dump(connection)
    if engine.dialect.name == "sqlite":
        with engine.begin() as connection:
            command.downgrade(config_for(connection), "0002")
            assert {r["units"] for r in dump(connection)["batches"]} == {2 * FAR}
        return
    with pytest.raises(DataError, match="out of range"), engine.begin() as connection:
        command.downgrade(config_for(connection), "0002")
    with engine.begin() as connection:
        assert dump(connection) == before


def test_column_without_values_is_refused(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/database")
    with engine.begin() as connection:
        command.upgrade(config_for(connection), "head")
        connection.exec_driver_sql("ALTER TABLE nonces ADD COLUMN colour VARCHAR")
        with pytest.raises(AssertionError, match=r"no values for \['colour'\] of nonces"):
            fill(connection, 0)
    engine.dispose()


def test_values_are_those_of_columns_that_exist(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/database")
    with engine.begin() as connection:
        command.upgrade(config_for(connection), "head")
        found = {
            table.name: {column.name for column in table.columns} for table in tables(connection)
        }
    engine.dispose()
    assert {name: set(values) for name, values in VALUES.items()} == found
