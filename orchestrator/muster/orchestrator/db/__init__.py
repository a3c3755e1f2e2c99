"""The orchestrator's database: a SQLite file by default, PostgreSQL where replicas share one.

It is an index over the chain and the files folder and holds nothing that cannot be rebuilt or done
without; see `muster.orchestrator.intake.rebuild`. It is asked in statements that both understand
(`query.py`), about what is committed; changes are transactions:

    ask          a few rows, by an index
    search       what may be many rows: it makes nobody wait
    transaction  statements that are committed together on exit. Exclusive ones take turns, in all
                 replicas; others rely on the tables' constraints. Quick ones, in which nobody waits
                 for a file, do not wait for others to end. `lock_ms` says how long one waits for a
                 row that another replica holds.

A database that fails is a StorageError, a row that it does not take a RowError.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from muster.orchestrator.db.postgres import PostgresDatabase
from muster.orchestrator.db.query import is_url, unusable
from muster.orchestrator.db.sqlite import SqliteDatabase
from muster.orchestrator.db.tables import SCHEMA_VERSION, VERSION, creation
from muster.protocol.errors import StorageError

Database: TypeAlias = SqliteDatabase | PostgresDatabase


async def open_database(place: Path | str) -> Database:
    """Open or create a SQLite file, or connect to a `postgresql://` URL; create the tables.

    Raises StorageError when it is corrupt, from another release, or cannot be written; ConfigError
    when the URL is none.
    """
    database: Database
    database = PostgresDatabase(str(place)) if is_url(place) else SqliteDatabase(Path(place))
    try:
        await database.check()
        await _create_tables(database)
    except BaseException:
        await database.close()
        raise
    return database


async def _create_tables(database: Database) -> None:
    async with database.transaction() as asked:
        _, versions = await asked.ask(*SCHEMA_VERSION)
        if not versions:
            await asked.ask(*creation(database.dialect))
        elif versions[0] != (VERSION,):
            raise unusable(database.place, StorageError("another release made its tables"))
