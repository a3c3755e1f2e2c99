"""A cache of logs on disk, so that an endpoint is not asked for them again.

A file holds one deployment's logs up to some block. Several processes may share it: one of them
writes, and the others stop writing when they notice that it is ahead of them. A damaged file is
replaced by an empty one, and without a writable file nothing is cached.
"""

import json
import logging
import os
import sqlite3
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from muster.chain.deployment import Deployment
from muster.chain.structs import BlockId
from muster.protocol.ids import Hash32
from muster.settings import CACHE

logger = logging.getLogger(__name__)

DEVELOPMENT_CHAIN = 31337
"""Anvil's chain id: such chains are small and often restarted."""
_KEPT = (
    *("address", "topics", "data", "transactionHash"),
    *("blockNumber", "blockHash", "blockTimestamp", "logIndex"),
)
_FORM = 2
"""Number in the file's name: files with a lower one may hold blocks that were taken back."""
_WORTH_NOTING = 1_000
"""After so many blocks without logs the newest block that was read is stored."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS blocks (number INTEGER PRIMARY KEY, hash BLOB NOT NULL, logs BLOB);
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
"""

Log = Mapping[str, Any]
"""A log as JSON-RPC answers it."""


def log_file(deployment: Deployment) -> Path | None:
    """Return where a deployment's logs are kept; None on a development chain."""
    if deployment.chain_id == DEVELOPMENT_CHAIN:
        return None
    ledger = deployment.contracts["ContributionLedger"].lower()
    # Path.expanduser would raise for an account without a home.
    return Path(
        os.path.expanduser(CACHE), "chains", f"{deployment.chain_id}-{ledger}-{_FORM}.sqlite"
    )


class LogStore:
    """The logs of a deployment, block by block, up to the newest block that was read."""

    def __init__(self, path: Path) -> None:
        """The file and its folder are made when the first logs are written."""
        self.path = path
        self._db: sqlite3.Connection | None = None
        self._cursor: int | None = None

    def blocks(self, newest: int) -> Iterator[tuple[BlockId, list[dict[str, Any]]]]:
        """Yield every stored block up to `newest`, ascending, with its logs.

        This store writes nothing as long as the file has blocks that were not taken: only who
        knows all of them can notice that one was taken back.
        """
        self._cursor = None
        try:
            if self._db is None:
                self._db = self._open()
            rows = self._db.execute(
                "SELECT number, hash, logs FROM blocks WHERE number <= ? ORDER BY number", (newest,)
            )
            for number, digest, logs in rows:
                self._cursor = number
                yield BlockId(number, Hash32(digest)), _unpacked(logs)
        except (OSError, sqlite3.Error, ValueError, zlib.error) as error:
            self._give_up(error)

    def append(self, logs: Sequence[Log], end: BlockId) -> None:
        """Keep the logs of the blocks after the newest that was read, up to `end`."""
        if not logs and end.number - (self._cursor or 0) < _WORTH_NOTING:
            return
        by_block: dict[int, list[Log]] = defaultdict(list)
        for log in logs:
            by_block[int(log["blockNumber"], 16)].append(log)
        rows: list[tuple[int, bytes, bytes | None]] = [
            (number, bytes.fromhex(of_block[0]["blockHash"][2:]), _packed(of_block))
            for number, of_block in by_block.items()
        ]
        if end.number not in by_block:
            rows.append((end.number, end.hash, None))
        self._write(rows, end.number)

    def rewind(self, number: int) -> None:
        """Forget the blocks after this one."""
        if self._cursor is not None and self._cursor > number:
            self._write([], number)

    def close(self) -> None:
        """Close the file."""
        if self._db is not None:
            self._db.close()
            self._db = None

    def _write(self, rows: Sequence[tuple[int, bytes, bytes | None]], newest: int) -> None:
        if self._db is None:
            return
        try:
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                (stored,) = self._db.execute("SELECT max(number) FROM blocks").fetchone()
                # If they differ, another process writes, or there are blocks above this head.
                is_ours = stored == self._cursor
                if is_ours:
                    self._replace(rows, newest)
            if not is_ours:
                self.close()
        except (OSError, sqlite3.Error) as error:
            self._give_up(error)

    def _replace(self, rows: Sequence[tuple[int, bytes, bytes | None]], newest: int) -> None:
        assert self._db is not None
        # Only the newest block is stored even without logs.
        self._db.execute("DELETE FROM blocks WHERE number > ? OR logs IS NULL", (newest,))
        self._db.executemany("INSERT OR REPLACE INTO blocks VALUES (?, ?, ?)", rows)
        (self._cursor,) = self._db.execute("SELECT max(number) FROM blocks").fetchone()

    def _open(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        db = sqlite3.connect(self.path, timeout=5.0, isolation_level=None)
        db.executescript(_SCHEMA)
        return db

    def _give_up(self, error: Exception) -> None:
        logger.warning(
            "no logs are kept on disk", extra={"file": str(self.path), "error": str(error)}
        )
        self.close()
        if not isinstance(error, OSError | sqlite3.OperationalError):
            self.path.unlink(missing_ok=True)


def _packed(logs: Sequence[Log]) -> bytes:
    text = json.dumps([{name: log[name] for name in _KEPT} for log in logs])
    return zlib.compress(text.encode(), 1)


def _unpacked(packed: bytes | None) -> list[dict[str, Any]]:
    logs: list[dict[str, Any]] = [] if packed is None else json.loads(zlib.decompress(packed))
    return logs
