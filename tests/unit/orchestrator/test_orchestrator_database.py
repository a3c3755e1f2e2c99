from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, Engine, create_engine, event, inspect, text

from muster.chain import BatchView
from muster.orchestrator.db.engine import Database, migrate
from muster.orchestrator.db.models import Base, MetricsRow, OutcomesRow
from muster.orchestrator.db.outcomes import outcomes_of
from muster.protocol.errors import StorageError


def differences(connection: Connection) -> list[object]:
    context = MigrationContext.configure(connection)
    return list(compare_metadata(context, Base.metadata))


def test_migrations_lead_to_exactly_the_models(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/database")
    with engine.begin() as connection:
        migrate(connection)
        assert differences(connection) == []
    engine.dispose()


def test_migrations_go_down_to_nothing_and_up_again(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/database")
    with engine.begin() as connection:
        migrate(connection)
        migrate(connection, "base")
        assert inspect(connection).get_table_names() == ["alembic_version"]
        migrate(connection)
        assert differences(connection) == []
    engine.dispose()


def test_open_leases_keep_their_policy_version_when_migrated(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/database")
    with engine.begin() as connection:
        migrate(connection, "0006")
        connection.execute(
            text(
                'INSERT INTO leases (node, worker, step, "index", deadline, ticket, signature,'
                " is_filled) VALUES ('n', 'w', 1, 0, 9, :ticket, x'00', false)"
            ),
            {"ticket": '{"policy_version": 7}'},
        )
        migrate(connection)
        assert connection.execute(text("SELECT policy_version FROM leases")).scalar_one() == 7
    engine.dispose()


async def test_database_keeps_its_rows_when_reopened(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "database"
    for step in (1, 2):
        database = await Database.open(path)
        async with database.write() as session:
            session.add(MetricsRow(step=step, figures={"reward": 0.5}, revision=step))
        await database.close()
    database = await Database.open(path)
    async with database.read() as session:
        assert (await session.get(MetricsRow, 1)) is not None
        assert (await session.get(MetricsRow, 2)) is not None
    await database.close()


async def test_database_is_in_wal_mode(tmp_path: Path) -> None:
    database = await Database.open(tmp_path / "database")
    async with database.read() as session:
        assert await session.scalar(text("PRAGMA journal_mode")) == "wal"
    await database.close()


async def test_log_does_not_grow_beyond_what_was_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muster.orchestrator.db.engine.LOG_BYTES", 100_000)
    path = tmp_path / "database"
    log, lengths = tmp_path / "database-wal", []
    database = await Database.open(path)
    for step in range(6):
        async with database.write() as session:
            figures = {str(number): 0.5 for number in range(10_000)}
            session.add(MetricsRow(step=step, figures=figures, revision=step))
        await database.checkpoint()
        lengths.append(log.stat().st_size)
    await database.close()
    assert max(lengths[1:]) <= 2 * lengths[0]


async def test_nothing_is_written_when_a_write_fails(tmp_path: Path) -> None:
    database = await Database.open(tmp_path / "database")

    async def write_and_fail() -> None:
        async with database.write() as session:
            session.add(MetricsRow(step=1, figures={}, revision=0))
            await session.flush()
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        await write_and_fail()
    async with database.read() as session:
        assert await session.get(MetricsRow, 1) is None
    await database.close()


@pytest.mark.parametrize("kind", ["text", "truncated", "garbled", "newer"])
async def test_opening_fails_with_a_hint_when_the_file_is_unusable(
    tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "database"
    database = await Database.open(path)
    if kind == "newer":
        async with database.write() as session:
            await session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    await database.close()
    content = path.read_bytes()
    if kind == "text":
        path.write_text("this is not a database, whatever it says " * 50)
    elif kind == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif kind == "garbled":
        path.write_bytes(content[:100] + b"\xff" * 8000 + content[8100:])
    with pytest.raises(StorageError, match="unusable") as caught:
        await Database.open(path)
    assert "\n" not in str(caught.value)
    assert "delete" in str(caught.value.hint)


async def test_opening_fails_when_the_folder_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot create"):
        await Database.open(tmp_path / "file" / "database")


def batch_of(batch_id: int, root: bytes = b"root") -> BatchView:
    return cast("BatchView", SimpleNamespace(batch_id=batch_id, root=root))


async def test_outcomes_are_those_of_the_batch_that_has_the_number_now(tmp_path: Path) -> None:
    database = await Database.open(tmp_path / "database")
    async with database.write() as session:
        for validator, root in (("a", b"root"), ("b", b"another"), ("c", None)):
            row = {"batch_id": 1, "validator": validator, "batch_root": root}
            session.add(OutcomesRow(**row, records=b"", signature=b""))
    for root, expected in ((b"root", ["a", "c"]), (b"another", ["b", "c"])):
        found = await outcomes_of(database, [batch_of(1, root)])
        assert sorted(row.validator for row in found) == expected
    await database.close()


async def test_outcomes_of_however_many_batches_take_few_statements(tmp_path: Path) -> None:
    """Each statement is kept by each connection: one per number of batches filled the memory."""
    database = await Database.open(tmp_path / "database")
    async with database.write() as session:
        for batch_id in range(1, 1301):
            for validator in ("a", "b"):
                row = {"batch_id": batch_id, "validator": validator}
                session.add(OutcomesRow(**row, records=b"", signature=b""))
    statements: set[str] = set()

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        statements.add(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        for count in (0, *range(1, 40), 511, 512, 513, 1300):
            found = await outcomes_of(database, [batch_of(n) for n in range(1, count + 1)])
            expected = [(batch, validator) for batch in range(1, count + 1) for validator in "ab"]
            assert sorted((row.batch_id, row.validator) for row in found) == expected
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    # One per power of two up to the longest.
    assert len(statements) <= 10, sorted(map(len, statements))
    await database.close()
