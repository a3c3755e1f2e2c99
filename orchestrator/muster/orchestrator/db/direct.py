"""Statements on connections of their own, without an ORM: for what every node asks all the time.

Composing a statement, mapping its rows and handing them through a session takes ten times as long
as running it. SQL is written so that both databases take it, with `?` for values.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

Statement = tuple[str, tuple[object, ...]]
"""SQL, and its values."""
Rows = Sequence[tuple[Any, ...]]
"""What a statement answers; nothing for one that answers nothing."""


class Asked(Protocol):
    """Who answers statements. A database that fails is a StorageError."""

    async def ask(self, *statements: Statement) -> list[Rows]:
        """Run statements in order, in one round trip; return the rows of each."""


class Direct(Asked, Protocol):
    """A database, asked directly. What is asked outside of a transaction sees what is committed."""

    def transaction(self, *, is_exclusive: bool = True) -> AbstractAsyncContextManager[Asked]:
        """Yield what statements are asked of that are committed together on exit.

        Exclusive ones take turns with each other and with `Database.write`, in all replicas.
        """

    async def close(self) -> None:
        """Close the connections; whoever asks again opens others."""
