"""The database: its queries in SQLite and PostgreSQL, and bad database files."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from orchestrator_bench import Bench

from muster.chain import BatchView
from muster.orchestrator.dashboard.training import keep_figures
from muster.orchestrator.db import open_database
from muster.orchestrator.db.query import RowError, Rows, Statement, plain
from muster.orchestrator.db.sqlite import SqliteDatabase
from muster.orchestrator.db.statements import OutcomesRow, keep, outcomes_of
from muster.protocol.errors import StorageError
from muster.protocol.ids import Address, Hash32

STEPS = plain("SELECT step FROM metrics ORDER BY step")


def write(step: int) -> Statement:
    return plain("INSERT INTO metrics (step, figures, revision) VALUES (:step, '{}', 0)", step=step)


def write_new(step: int) -> Statement:
    sql = f"{write(step).sql.sqlite} ON CONFLICT DO NOTHING RETURNING step"
    return plain(sql, step=step)


async def steps(bench: Bench) -> list[int]:
    [rows] = await bench.services.database.ask(STEPS)
    return [step for (step,) in rows]


async def test_statements_are_answered_in_order(bench: Bench) -> None:
    async with bench.services.database.transaction() as asked:
        answers: list[Rows] = await asked.ask(write_new(3), write_new(3), write(1), STEPS)
    assert [list(rows) for rows in answers] == [[(3,)], [], [], [(1,), (3,)]]
    assert await steps(bench) == [1, 3]


async def test_nobody_sees_what_is_not_committed(bench: Bench) -> None:
    async with bench.services.database.transaction() as asked:
        await asked.ask(write_new(1))
        assert await steps(bench) == []
        assert await bench.services.database.search(STEPS) == [[]]
    assert await steps(bench) == [1]


@pytest.mark.sqlite_only
async def test_uploads_batches_and_outcomes_outlast_a_power_failure_and_leases_need_not(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = cast(SqliteDatabase, bench.services.database)
    run, synced = database._writer.run, list[str]()

    def noted(sql: str, *rest: Any) -> Rows:
        if sql == "COMMIT":
            [(level,)] = run("PRAGMA synchronous")
            synced.append({1: "NORMAL", 2: "FULL"}[level])
        return run(sql, *rest)

    monkeypatch.setattr(database._writer, "run", noted)
    await bench.lease()
    assert set(synced) == {"NORMAL"}
    synced.clear()
    submission = await bench.upload(1)
    assert "FULL" in synced
    synced.clear()
    await bench.commit()
    assert "FULL" in synced
    synced.clear()
    await bench.judge(1, [submission])
    assert "FULL" in synced


@pytest.mark.parametrize("is_exclusive", [True, False])
async def test_transaction_that_fails_leaves_nothing(bench: Bench, is_exclusive: bool) -> None:
    database = bench.services.database

    async def start() -> None:
        async with database.transaction(is_exclusive=is_exclusive) as asked:
            await asked.ask(write_new(1))
            raise ValueError("changed my mind")

    with pytest.raises(ValueError, match="changed my mind"):
        await start()
    async with database.transaction(is_exclusive=is_exclusive) as asked:
        await asked.ask(write(2))
    assert await steps(bench) == [2]


async def test_statement_that_fails_is_a_storage_error_and_the_next_goes_on(bench: Bench) -> None:
    database = bench.services.database
    with pytest.raises(RowError, match="cannot store a row"):
        async with database.transaction() as asked:
            await asked.ask(write(1), write(1))
    with pytest.raises(StorageError, match="nowhere"):
        await database.ask(plain("SELECT 1 FROM nowhere"))
    async with database.transaction() as asked:
        await asked.ask(write(2))
    assert await steps(bench) == [2]


async def test_exclusive_transactions_take_turns(bench: Bench) -> None:
    database, order = bench.services.database, list[str]()

    async def second() -> None:
        async with database.transaction() as asked:
            await asked.ask(STEPS)
            order.append("second")

    async with database.transaction(is_quick=True) as asked:
        await asked.ask(write_new(1))
        other = asyncio.create_task(second())
        await asyncio.sleep(0.05)
        order.append("first")
    await other
    assert order == ["first", "second"]


# A SQLite file


async def test_database_keeps_its_rows_when_reopened(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "database"
    for step in (1, 2):
        database = await open_database(path)
        async with database.transaction() as asked:
            await asked.ask(write(step))
        await database.close()
    database = await open_database(path)
    assert await database.ask(STEPS) == [[(1,), (2,)]]
    assert await database.ask(plain("PRAGMA journal_mode")) == [[("wal",)]]
    await database.close()


async def test_log_does_not_grow_beyond_what_was_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muster.orchestrator.db.sqlite.LOG_BYTES", 100_000)
    log, lengths = tmp_path / "database-wal", []
    database = await open_database(tmp_path / "database")
    for step in range(6):
        async with database.transaction() as asked:
            figures = {str(number): 0.5 for number in range(10_000)}
            await asked.ask(keep_figures(step, figures, 0))
        await database.checkpoint()
        lengths.append(log.stat().st_size)
    await database.close()
    assert max(lengths[1:]) <= 2 * lengths[0]


@pytest.mark.parametrize("kind", ["text", "truncated", "garbled", "newer", "older"])
async def test_opening_fails_with_a_hint_when_the_file_is_unusable(
    tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "database"
    database = await open_database(path)
    if kind == "newer":
        async with database.transaction() as asked:
            await asked.ask(plain("UPDATE schema_version SET number = 9999"))
    elif kind == "older":
        async with database.transaction() as asked:
            await asked.ask(plain("DROP TABLE schema_version"))
    await database.close()
    content = path.read_bytes()
    if kind == "text":
        path.write_text("this is not a database, whatever it says " * 50)
    elif kind == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif kind == "garbled":
        path.write_bytes(content[:100] + b"\xff" * 8000 + content[8100:])
    with pytest.raises(StorageError, match="unusable") as caught:
        await open_database(path)
    assert "\n" not in str(caught.value)
    assert "delete" in str(caught.value.hint)


async def test_opening_fails_when_the_folder_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot create"):
        await open_database(tmp_path / "file" / "database")


def batch_of(batch_id: int, root: bytes = b"root") -> BatchView:
    return cast("BatchView", SimpleNamespace(batch_id=batch_id, root=root))


def outcomes(validator: str, batch_id: int, root: bytes = b"root") -> OutcomesRow:
    return OutcomesRow(batch_id, Address(validator), b"", b"", 0, Hash32(root))


async def test_outcomes_are_those_of_the_batch_that_has_the_number_now(tmp_path: Path) -> None:
    database = await open_database(tmp_path / "database")
    async with database.transaction() as asked:
        await asked.ask(keep(outcomes("a", 1, b"root")), keep(outcomes("b", 1, b"another")))
    for root, expected in ((b"root", ["a"]), (b"another", ["b"]), (b"none", [])):
        found = await outcomes_of(database, [batch_of(1, root)])
        assert [row.validator for row in found] == expected
    await database.close()


async def test_outcomes_of_however_many_batches_take_few_statements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each connection caches each statement: one per number of batches would fill the memory."""
    database = await open_database(tmp_path / "database")
    async with database.transaction() as asked:
        ids = range(1, 1301)
        await asked.ask(*(keep(outcomes(validator, n)) for n in ids for validator in "ab"))
    search, statements = database.search, set[str]()

    async def noting(statement: Statement) -> list[Rows]:
        statements.add(statement.sql.sqlite)
        return await search(statement)

    monkeypatch.setattr(database, "search", noting)
    for count in (0, *range(1, 40), 511, 512, 513, 1300):
        found = await outcomes_of(database, [batch_of(n) for n in range(1, count + 1)])
        expected = [(batch, validator) for batch in range(1, count + 1) for validator in "ab"]
        assert sorted((row.batch_id, row.validator) for row in found) == expected
    # One statement per power of two, up to the longest.
    assert len(statements) <= 10, sorted(map(len, statements))
    await database.close()
