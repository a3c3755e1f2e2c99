"""Child processes of a devnet: each has a log and a deadline to get ready; none outlives us."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from muster.app.demo.warm import WarmProcess, die_with_parent
from muster.protocol.errors import ConfigError

READY_TIMEOUT_S = 60.0
"""A process that does not write its ready file within this time has failed."""
STOP_TIMEOUT_S = 5.0
"""After SIGTERM a process may take this long before it is killed."""
_POLL_S = 0.05


class Child:
    """One running process."""

    def __init__(
        self, name: str, process: asyncio.subprocess.Process | WarmProcess, log: Path
    ) -> None:
        self.name = name
        self.log = log
        self._process = process

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code, or None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Return the exit code once it has ended."""
        return await self._process.wait()

    def kill(self) -> None:
        """Send SIGKILL, as a power cut would."""
        if self.exit_code is None:
            self._process.kill()

    async def stop(self) -> None:
        """Send SIGTERM, and SIGKILL when that does not help in time."""
        if self.exit_code is not None:
            return
        self._process.terminate()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def log_tail(self, lines: int = 12) -> str:
        """Return the end of its log, for error messages."""
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except OSError:
            return ""


class Processes:
    """Starts children and ends them all on exit; use as an async context manager."""

    def __init__(self, log_folder: Path, environment: Mapping[str, str]) -> None:
        self._log_folder = log_folder
        self._environment = {**os.environ, **environment}
        self.children: dict[str, Child] = {}

    async def __aenter__(self) -> Self:
        self._log_folder.mkdir(parents=True, exist_ok=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(child.stop() for child in self.children.values()))

    async def start(self, name: str, command: Sequence[str]) -> Child:
        """Start `python -m <command>` under a name; a second start of a name appends to its log."""
        log = self._log_folder / f"{name}.log"
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._environment,
                start_new_session=True,
                # Runs between fork and exec: if the parent is killed outright, nothing stays.
                preexec_fn=die_with_parent,
            )
        child = self.children[name] = Child(name, process, log)
        return child

    async def start_warm(self, name: str, command: Sequence[str]) -> Child:
        """Start what `start` starts, forked from a process that has imported what models need."""
        log = self._log_folder / f"{name}.log"
        process = await WarmProcess.start(command, log, self._environment)
        child = self.children[name] = Child(name, process, log)
        return child

    async def start_server(self, name: str, command: Sequence[str], ready: Path) -> str:
        """Start a server and return the URL it writes to its ready file.

        Raises ConfigError with the end of its log when it exits or is not ready in time.
        """
        ready.unlink(missing_ok=True)
        child = await self.start(name, [*command, "--ready-file", str(ready)])
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                while not ready.exists():
                    self.require_running(child)
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as error:
            raise ConfigError(f"{name} was not ready within {READY_TIMEOUT_S:.0f} s") from error
        return ready.read_text().strip()

    def require_running(self, *children: Child) -> None:
        """Raise ConfigError, with the end of the log, if one of these has ended."""
        for child in children:
            if child.exit_code is not None:
                raise ConfigError(
                    f"{child.name} ended with exit code {child.exit_code}:\n{child.log_tail()}",
                    hint=f"its whole log is {child.log}",
                )
