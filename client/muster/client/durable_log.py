"""A durable append-only log of JSON objects: the memory of a process that signs.

An entry is on disk (written and fsynced) when `append` returns. An incomplete last line, which a
crash can leave, is ignored; any other damage is an error, because forgetting a signature costs
stake.
"""

import fcntl
import json
import os
import threading
from abc import ABC, abstractmethod
from io import FileIO
from pathlib import Path
from typing import Any, Self

from muster.lifecycle import sync_path
from muster.lifecycle.files import cannot_write
from muster.protocol.errors import ConfigError, EncodingError, StorageError


class Journal(ABC):
    """One log file, held by one process at a time; a context manager.

    The subclass holds the entries: state that `take_in` needs must exist before this `__init__`.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._lock = threading.Lock()
        self._file = self._open()
        try:
            for number, line in enumerate(self._whole_lines(), 1):
                self._replay(number, line)
        except StorageError:
            self._file.close()
            raise

    @abstractmethod
    def take_in(self, entry: dict[str, Any]) -> None:
        """Remember an entry that was on disk when the file was opened.

        Raises EncodingError, LookupError, TypeError or ValueError for a malformed entry.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def append(self, entry: dict[str, Any]) -> None:
        """Add an entry, from any thread; once this returns, it survives a power failure."""
        line = json.dumps(entry, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        with self._lock:
            end = self._file.seek(0, os.SEEK_END)
            try:
                self._write(line)
            except OSError as error:
                # A partial line would damage the next entry too.
                os.ftruncate(self._file.fileno(), end)
                raise cannot_write(self._path, error) from error

    def close(self) -> None:
        """Close the file and release its lock."""
        self._file.close()

    def _write(self, line: bytes) -> None:
        rest = memoryview(line)
        while rest:
            rest = rest[self._file.write(rest) :]
        os.fsync(self._file.fileno())

    def _open(self) -> FileIO:
        # Unbuffered: bytes that a full disk refused must not be written with the next entry.
        file = self._path.open("a+b", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise ConfigError(
                f"another process uses {self._path}",
                hint="give every process a --state-dir of its own",
            ) from None
        os.chmod(self._path, 0o600)
        sync_path(self._path.parent)
        return file

    def _whole_lines(self) -> list[bytes]:
        self._file.seek(0)
        data = self._file.read()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.ftruncate(self._file.fileno(), whole)
        return data[:whole].splitlines()

    def _replay(self, number: int, line: bytes) -> None:
        try:
            entry = json.loads(line)
            if not isinstance(entry, dict):
                raise TypeError("not an object")
            self.take_in(entry)
        except (EncodingError, LookupError, TypeError, ValueError) as error:
            raise StorageError(
                f"line {number} of the journal {self._path} is damaged: {error}",
                hint="put no old copy in its place, with which this key might sign twice and be "
                "slashed; docs/guides/services.md says how to go on without the state folder",
            ) from error
