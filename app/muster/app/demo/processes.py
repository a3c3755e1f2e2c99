"""Child processes of a devnet: each has a log and a deadline to get ready; all end with this
process.

Importing torch and transformers takes some seconds of a core. A network starts a dozen processes
that need them, perhaps on two cores, so one process imports them and the others are forked from it.
They share nothing but imports: each has its own command line, environment and log, and ends
separately.
"""

from __future__ import annotations

import asyncio
import atexit
import multiprocessing
import multiprocessing.util
import os
import runpy
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Self

from muster.lifecycle import die_with_parent
from muster.protocol.errors import ConfigError

PRELOADED = (
    "muster.client.validator.process",
    "muster.client.worker.process",
    "muster.inference.transformers_engine",
    "muster.orchestrator.process",
    "muster.trainer.process",
    "transformers.models.qwen3.modeling_qwen3",
)
"""Modules that are imported once, before the forks."""


class WarmProcess:
    """A forked process, awaited like one of `asyncio.subprocess`."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._loop.add_reader(process.sentinel, self._on_end)

    @classmethod
    async def start(
        cls, command: Sequence[str], log: Path, environment: Mapping[str, str]
    ) -> WarmProcess:
        """Start `python -m <command>`; the first start waits until the imports are done."""
        # A process that has initialised CUDA cannot fork one that uses it.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        process = context.Process(target=_become, args=(list(command), log, dict(environment)))
        await asyncio.to_thread(process.start)
        return cls(process)

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process.pid is not None  # set after start
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._process.exitcode

    async def wait(self) -> int:
        """Return the exit code once it has ended."""
        return await asyncio.shield(self._ended)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()

    def _on_end(self) -> None:
        self._loop.remove_reader(self._process.sentinel)
        self._process.join()
        self._ended.set_result(self._process.exitcode or 0)


# multiprocessing.util would wait for children that wait for this process. Exit handlers registered
# later run first.
@atexit.register
def _kill_warm_children() -> None:
    for child in multiprocessing.active_children():
        if isinstance(child, ForkServerProcess):
            child.kill()


def _become(command: list[str], log: Path, environment: dict[str, str]) -> None:
    """Turn this process into `python -m <command>`."""
    os.setsid()
    threading.Thread(target=_end_with_starter, name="end-with-starter", daemon=True).start()
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    os.environ.update(environment)
    sys.argv = command
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)


def _end_with_starter() -> None:
    # The kernel can signal only the death of the parent, the fork server, which outlives the
    # starter.
    starter = multiprocessing.parent_process()
    assert starter is not None  # WarmProcess.start
    starter.join()
    os.kill(os.getpid(), signal.SIGTERM)


READY_TIMEOUT_S = 60.0
"""A process that does not write its ready file within this time has failed."""
STOP_TIMEOUT_S = 5.0
"""After SIGTERM a process may take this long before it is killed."""
_POLL_S = 0.05


class DemoProcess:
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
        """Send SIGTERM, then SIGKILL after a timeout."""
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
        self.children: dict[str, DemoProcess] = {}

    async def __aenter__(self) -> Self:
        self._log_folder.mkdir(parents=True, exist_ok=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(child.stop() for child in self.children.values()))

    async def start(self, name: str, command: Sequence[str]) -> DemoProcess:
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
                # Runs between fork and exec, so that the child ends even if the parent is killed.
                preexec_fn=die_with_parent,
            )
        child = self.children[name] = DemoProcess(name, process, log)
        return child

    async def start_warm(self, name: str, command: Sequence[str]) -> DemoProcess:
        """Like `start`, but forked from a process that has already imported the model libraries."""
        log = self._log_folder / f"{name}.log"
        process = await WarmProcess.start(command, log, self._environment)
        child = self.children[name] = DemoProcess(name, process, log)
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
            raise ConfigError(
                f"{name} was not ready within {READY_TIMEOUT_S:.0f} s",
                hint=f"read its log: {child.log}",
            ) from error
        return ready.read_text().strip()

    def require_running(self, *children: DemoProcess) -> None:
        """Raise ConfigError, with the end of the log, if one of these has ended."""
        for child in children:
            if child.exit_code is not None:
                raise ConfigError(
                    f"{child.name} ended with exit code {child.exit_code}:\n{child.log_tail()}",
                    hint=f"read the whole log: {child.log}",
                )
