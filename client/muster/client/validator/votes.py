"""What a juror has decided: one vote per case, on disk before its commitment leaves.

A vote is drawn up once and never changed: another decision on the same case would leave a
commitment that nobody can reveal, which costs stake. How far a vote has come is on chain.
"""

from __future__ import annotations

import os
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from muster.protocol.errors import StorageError
from muster.protocol.ids import Address, Hash32
from muster.protocol.jury import vote_commitment

_SCHEMA = """
CREATE TABLE IF NOT EXISTS votes (
    leaf BLOB NOT NULL,
    juror TEXT NOT NULL,
    claimed INTEGER NOT NULL,
    overturn INTEGER NOT NULL,
    result_hash BLOB NOT NULL,
    salt BLOB NOT NULL,
    PRIMARY KEY (leaf, juror, claimed)
) STRICT;
"""
_COLUMNS = "leaf, juror, claimed, overturn, result_hash, salt"


@dataclass(frozen=True, slots=True)
class Vote:
    """A juror's decision on a case, with what hides it until it is revealed."""

    leaf: Hash32
    """The case."""
    juror: Address
    """Who votes."""
    claimed: int
    """The verdict that the challenger claims: a reorganised chain may have another challenge."""
    overturn: bool
    """Whether the challenger is right."""
    result_hash: Hash32
    """Keccak-256 of the document about what was recomputed."""
    salt: Hash32
    """Keeps others from finding the vote by trying."""

    def __repr__(self) -> str:
        return f"Vote(0x{self.leaf.hex()}, juror={self.juror})"

    def commitment(self) -> Hash32:
        """Return what goes on chain before the vote does."""
        return vote_commitment(self.leaf, self.juror, self.overturn, self.result_hash, self.salt)


class VoteJournal:
    """Remembers votes; a context manager."""

    def __init__(self, folder: Path) -> None:
        """Open or create the file; raises StorageError when it cannot be used."""
        self._path = folder / "votes.sqlite3"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Created by us, since SQLite would let everybody read the salts.
            os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))
            self._connection = sqlite3.connect(
                self._path, isolation_level=None, check_same_thread=False
            )
            self._connection.execute("PRAGMA journal_mode = WAL")
            # On disk before what it is about leaves.
            self._connection.execute("PRAGMA synchronous = FULL")
            self._connection.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise self._unusable(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def record(self, vote: Vote) -> Vote:
        """Return what may be voted: this, now durable, or what was recorded before."""
        values = (vote.leaf, vote.juror, vote.claimed, vote.overturn, vote.result_hash, vote.salt)
        try:
            self._connection.execute(
                f"INSERT OR IGNORE INTO votes ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)", values
            )
        except sqlite3.Error as error:
            raise self._unusable(error) from error
        recorded = self.find(vote.leaf, vote.juror, vote.claimed)
        assert recorded is not None  # it was just written, or was there before
        return recorded

    def find(self, leaf: Hash32, juror: Address, claimed: int) -> Vote | None:
        """Return the vote that was recorded for a case."""
        try:
            row = self._connection.execute(
                f"SELECT {_COLUMNS} FROM votes WHERE leaf = ? AND juror = ? AND claimed = ?",
                (leaf, juror, claimed),
            ).fetchone()
        except sqlite3.Error as error:
            raise self._unusable(error) from error
        if row is None:
            return None
        return Vote(
            Hash32(row[0]), Address(row[1]), row[2], bool(row[3]), Hash32(row[4]), Hash32(row[5])
        )

    def _unusable(self, error: Exception) -> StorageError:
        return StorageError(
            f"the journal of votes {self._path} cannot be used: {error}",
            hint="is the disk full? no vote is cast that could not be revealed later",
        )
