"""The orchestrator's database: a SQLite file by default, PostgreSQL where replicas share one.

It is an index over the chain and the files folder. Everything in it can be rebuilt or lost without
harm; see `muster.orchestrator.intake.rebuild`. Statements work on both databases (`query.py`).
Reads see committed data; changes are transactions:

    ask          reads a few rows, by an index
    search       reads possibly many rows, without delaying other requests
    transaction  statements that are committed together on exit. Exclusive ones take turns, in all
                 replicas; others rely on the tables' constraints. Quick ones, which do not wait
                 for files, need not wait for others to end. Durable ones, and all before them,
                 outlast a power failure; PostgreSQL's always do. `lock_ms` is the longest wait for
                 a row that another replica holds.

A failed database raises StorageError, a refused row RowError.
"""

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
    when the URL is malformed.
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
            raise unusable(
                database.place, StorageError("another release of muster made its tables")
            )
