"""Opens the database, brings it to the current schema, and hands out sessions.

One process owns the file. Writers queue for one lock, because SQLite has one writer anyway and an
asyncio lock waits without blocking a thread; readers see the last committed state (WAL).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import Connection, event, text
from sqlalchemy.exc import DatabaseError, DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from muster.protocol.errors import StorageError

logger = logging.getLogger(__name__)

_MIGRATIONS = Path(__file__).parent / "migrations"


class Database:
    """The open database. A disk or file that fails while it is used is a StorageError too."""

    def __init__(self, engine: AsyncEngine, path: Path) -> None:
        self._engine = engine
        self.path = path
        self.writing = asyncio.Lock()

    @classmethod
    async def open(cls, path: Path) -> Self:
        """Open or create the file and migrate it.

        Raises StorageError when it is corrupt, from another version, or cannot be written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"cannot create {path.parent}: {error.strerror}") from error
        engine = create_async_engine(f"sqlite+aiosqlite:///{path}")
        event.listen(engine.sync_engine, "connect", _on_connect)
        try:
            async with engine.connect() as connection:
                verdict = (await connection.execute(text("PRAGMA quick_check(1)"))).scalar_one()
            if verdict != "ok":
                raise StorageError(str(verdict))
            async with engine.begin() as connection:
                await connection.run_sync(migrate)
        except (DBAPIError, CommandError, StorageError) as error:
            await engine.dispose()
            raise unusable(path, error) from error
        return cls(engine, path)

    async def close(self) -> None:
        """Close all connections."""
        await self._engine.dispose()

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncSession]:
        """Yield a session on the last committed state."""
        try:
            async with AsyncSession(self._engine, expire_on_commit=False) as session:
                yield session
        except DatabaseError as error:
            raise unusable(self.path, error) from error

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncSession]:
        """Yield a session whose changes are committed together on exit; writers take turns."""
        try:
            async with (
                self.writing,
                AsyncSession(self._engine, expire_on_commit=False) as session,
                session.begin(),
            ):
                yield session
        except DatabaseError as error:
            raise unusable(self.path, error) from error


def migrate(connection: Connection, revision: str = "head") -> None:
    """Bring the schema to a revision, upwards or, for `base`, down to nothing."""
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    config.attributes["connection"] = connection
    if revision == "base":
        command.downgrade(config, revision)
    else:
        command.upgrade(config, revision)


def _on_connect(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    for pragma in (
        "journal_mode=WAL",
        # Loses the newest commits when the power fails, never on a crash of the process; the files
        # folder, which is synced, is what those are rebuilt from.
        "synchronous=NORMAL",
        "busy_timeout=5000",
        "foreign_keys=ON",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def unusable(path: Path, error: Exception) -> StorageError:
    """Return the error for a database that failed, saying what to do about it."""
    reason = str(error.orig) if isinstance(error, DBAPIError) else str(error)
    hint = f"delete {path}* and start again: it is rebuilt from the chain and the files folder"
    if "locked" in reason:
        hint = "another process uses it: stop that one, or choose another with --database"
    return StorageError(f"the database {path} is unusable: {reason.splitlines()[0]}", hint=hint)
