"""Opens the database, brings it to the current schema, and hands out sessions.

A SQLite file is owned by one process, whose writers queue for one lock: SQLite has one writer
anyway, and an asyncio lock waits without blocking a thread. A PostgreSQL database is shared by
replicas, whose exclusive writers queue for one advisory lock instead. Readers see the last
committed state of either.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, Self

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import AsyncAdaptedQueuePool, Connection, event, make_url, text
from sqlalchemy.dialects import registry
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from muster.orchestrator.db.direct import Direct
from muster.orchestrator.db.places import SQLITE_CACHE, is_url, unusable
from muster.orchestrator.db.postgres_direct import PostgresDirect
from muster.orchestrator.db.sqlite_direct import SqliteDirect
from muster.protocol.errors import ConfigError, StorageError

logger = logging.getLogger(__name__)

Connector = Callable[[], Awaitable[Any]]
"""Returns a connection that answers as aiosqlite's do."""
_MIGRATIONS = Path(__file__).parent / "migrations"

MIGRATION_LOCK, WRITER_LOCK, LEADER_LOCK = range(0x6D7573_74_01, 0x6D7573_74_04)
"""Advisory locks in PostgreSQL: held while migrating, per exclusive write, and by the leader."""
POOL_SIZE, QUICK_CONNECTIONS, UPLOAD_CONNECTIONS = 8, 4, 12
"""Connections to PostgreSQL that one process keeps, by purpose: for sessions, for what is asked
directly, and for uploads. More wait for one.
"""
LOG_BYTES = 8 << 20
"""Length from which SQLite's log is moved into the file."""
STATEMENT_TIMEOUT_S = 30
"""How long PostgreSQL may take for a statement, waiting for locks included."""


class Database:
    """The open database. A disk, file or server that fails while it is used is a StorageError."""

    def __init__(
        self, engine: AsyncEngine, place: Path | str, writer: AsyncEngine | None = None
    ) -> None:
        self._engine = engine
        self._writer = writer or engine
        self.place = place
        self.writing = asyncio.Lock()
        self.direct = _direct(place, self.writing, QUICK_CONNECTIONS)
        # Their transactions wait for files: nobody else shall wait for a connection behind them.
        self.uploads = (
            _direct(place, self.writing, UPLOAD_CONNECTIONS) if self.is_shared else self.direct
        )

    @property
    def is_shared(self) -> bool:
        """Whether other replicas may use it too."""
        return isinstance(self.place, str)

    @classmethod
    async def open(cls, place: Path | str, *, connect: Connector | None = None) -> Self:
        """Open or create a SQLite file, or connect to a `postgresql://` URL, and migrate it.

        `connect` makes the connections that read SQLite in another way than aiosqlite's threads.

        Raises StorageError when it is corrupt, from another version, or cannot be written;
        ConfigError when the URL is none.
        """
        if is_url(place):
            place = str(place)
            database = cls(_postgres_engine(place), place)
        else:
            place = Path(place)
            database = cls(_sqlite_engine(place, connect), place, _inline_engine(place))
        try:
            await database._prepare()
        except (DBAPIError, CommandError, StorageError) as error:
            await database.close()
            raise unusable(place, error) from error
        return database

    async def _prepare(self) -> None:
        if not self.is_shared:
            async with self._engine.connect() as connection:
                verdict = (await connection.execute(text("PRAGMA quick_check(1)"))).scalar_one()
            if verdict != "ok":
                raise StorageError(str(verdict))
        async with self._engine.begin() as connection:
            if self.is_shared:
                await connection.execute(_LOCK, {"key": MIGRATION_LOCK})
            await connection.run_sync(migrate)

    async def close(self) -> None:
        """Close all connections."""
        await self.direct.close()
        await self.uploads.close()
        await self._engine.dispose()
        await self._writer.dispose()

    @asynccontextmanager
    async def read(self, *, is_look_up: bool = False) -> AsyncIterator[AsyncSession]:
        """Yield a session on the last committed state.

        For a few rows found by their keys, `is_look_up` spares SQLite a thread.
        """
        engine = self._writer if is_look_up else self._engine
        try:
            async with AsyncSession(engine, expire_on_commit=False) as session:
                yield session
        except DBAPIError as error:
            raise unusable(self.place, error) from error

    async def checkpoint(self) -> None:
        """Move what SQLite's writers logged into the file once the log is long; in a thread."""
        if isinstance(self.place, Path) and _log_bytes(self.place) > LOG_BYTES:
            await self._checkpoint()
            # Writers went on. Without them the little that is left goes too, and the log starts
            # over with the next of them.
            async with self.writing:
                await self._checkpoint()

    async def _checkpoint(self) -> None:
        try:
            async with self._engine.connect() as connection:
                await connection.execute(text("PRAGMA wal_checkpoint(PASSIVE)"))
        except DBAPIError as error:
            raise unusable(self.place, error) from error

    @asynccontextmanager
    async def write(self, *, is_exclusive: bool = True) -> AsyncIterator[AsyncSession]:
        """Yield a session whose changes are committed together on exit; writers take turns.

        In a shared database, one that is not exclusive goes ahead without waiting for the others
        and relies on the tables' constraints: sqlalchemy's IntegrityError means that another
        replica was first.
        """
        turn = nullcontext() if self.is_shared else self.writing
        try:
            async with (
                turn,
                AsyncSession(self._writer, expire_on_commit=False) as session,
                session.begin(),
            ):
                if self.is_shared and is_exclusive:
                    await session.execute(_LOCK, {"key": WRITER_LOCK})
                yield session
        except IntegrityError:
            raise
        except DBAPIError as error:
            raise unusable(self.place, error) from error


_LOCK = text("SELECT pg_advisory_xact_lock(:key)")


def migrate(connection: Connection, revision: str = "head") -> None:
    """Bring the schema to a revision, upwards or, for `base`, down to nothing."""
    config = _configuration()
    config.attributes["connection"] = connection
    if revision == "base":
        command.downgrade(config, revision)
    elif revision != "head" or _found_revision(connection) != _newest_revision():
        command.upgrade(config, revision)


def _configuration() -> Config:
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    return config


@cache
def _newest_revision() -> str | None:
    return ScriptDirectory.from_config(_configuration()).get_current_head()


def _found_revision(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


async def continue_numbers(session: AsyncSession) -> None:
    """Let the next submission be numbered after those that were written with their numbers."""
    # SQLite counts from the highest there is, PostgreSQL from the last that it gave itself.
    if session.get_bind().dialect.name == "postgresql":
        await session.execute(_CONTINUE)


_CONTINUE = text(
    "SELECT setval(pg_get_serial_sequence('submissions', 'sequence'), max(sequence))"
    " FROM submissions"
)


def _direct(place: Path | str, writing: asyncio.Lock, connections: int) -> Direct:
    if isinstance(place, Path):
        return SqliteDirect(place, writing)
    return PostgresDirect(
        place,
        connections=connections,
        writer_lock=WRITER_LOCK,
        statement_timeout_s=STATEMENT_TIMEOUT_S,
    )


def _sqlite_engine(path: Path, connect: Connector | None) -> AsyncEngine:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot create {path.parent}: {error.strerror}") from error
    made: dict[str, Any] = {} if connect is None else {"async_creator": connect}
    engine = create_async_engine(f"sqlite+aiosqlite:///{path}", **made)
    event.listen(engine.sync_engine, "connect", _on_connect)
    return engine


class _Inline(SQLiteDialect_pysqlite):
    """SQLite called from the event loop itself.

    For writers, which are short and take turns: a statement takes less time than waking a thread
    for it, and none of them syncs.
    """

    driver = "inline"
    is_async = True
    supports_statement_cache = True


registry.register("sqlite.inline", __name__, "_Inline")


def _inline_engine(path: Path) -> AsyncEngine:
    engine = create_async_engine(f"sqlite+inline:///{path}", poolclass=AsyncAdaptedQueuePool)
    event.listen(engine.sync_engine, "connect", _on_connect)
    event.listen(engine.sync_engine, "connect", _on_inline_connect)
    return engine


def _postgres_engine(url: str) -> AsyncEngine:
    try:
        address = make_url(url).set(drivername="postgresql+psycopg")
    except ArgumentError as error:
        raise ConfigError(
            f"{url!r} is not a database's URL",
            hint="write postgresql://user@host/database, the password in PGPASSWORD or ~/.pgpass",
        ) from error
    try:
        return create_async_engine(
            address,
            pool_size=POOL_SIZE,
            max_overflow=0,
            pool_pre_ping=True,
            connect_args={
                "connect_timeout": 5,
                "options": f"-c statement_timeout={STATEMENT_TIMEOUT_S}s",
            },
        )
    except ModuleNotFoundError as error:
        raise ConfigError(
            "PostgreSQL needs its driver", hint="pip install 'muster-rl[postgres]'"
        ) from error


def _on_connect(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    for pragma in (
        "journal_mode=WAL",
        # Loses the newest commits when the power fails, never on a crash of the process; the files
        # folder, which is synced, is what those are rebuilt from.
        "synchronous=NORMAL",
        "busy_timeout=5000",
        "foreign_keys=ON",
        SQLITE_CACHE,
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _on_inline_connect(connection: Any, _record: object) -> None:
    # `checkpoint` comes first. This is for who writes much before anything runs in the background.
    connection.execute("PRAGMA wal_autocheckpoint=16384")


def _log_bytes(path: Path) -> int:
    try:
        return path.with_name(path.name + "-wal").stat().st_size
    except OSError:
        return 0
