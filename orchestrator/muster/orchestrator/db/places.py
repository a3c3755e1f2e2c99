"""Where a database is: a SQLite file or a PostgreSQL URL; and what to say when it fails."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import make_url
from sqlalchemy.exc import DBAPIError

from muster.protocol.errors import StorageError

SQLITE_CACHE = "cache_size=-512"
"""KiB of the file that each of some ten connections keeps in memory; SQLite's own choice is 2 MB.

The operating system keeps the file, too: pages over 1,000,000 submissions take as long with either.
"""


def is_url(place: Path | str) -> bool:
    """Return whether a database's place is a server's URL rather than a file's path."""
    return str(place).startswith(("postgresql:", "postgres:"))


def unusable(place: Path | str, error: Exception) -> StorageError:
    """Return the error for a database that failed, saying what to do about it."""
    reason = str(error.orig) if isinstance(error, DBAPIError) else str(error)
    if is_url(place):
        shown = make_url(str(place)).render_as_string(hide_password=True)
        hint = "is the server up, and may this user create tables there?"
    else:
        shown = str(place)
        hint = f"delete {place}* and start again: it is rebuilt from the chain and the files folder"
        if "locked" in reason:
            hint = "another process uses it: stop that one, or choose another with --database"
    line = reason.strip().splitlines()[0] if reason.strip() else type(error).__name__
    return StorageError(f"the database {shown} is unusable: {line}", hint=hint)
