"""Processes that fork from one in which the model libraries are imported already.

Importing torch and transformers takes some seconds of a core. A network starts a dozen processes
that need them on a machine of two, so one process imports them and the others begin as its copies.
Nothing but imports is shared: each has its own command line, environment and log, and dies alone.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
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

PRELOADED = (
    "muster.client.validator.process",
    "muster.client.worker.process",
    "muster.inference.transformers_engine",
    "muster.orchestrator.process",
    "muster.trainer.process",
    "transformers.models.qwen3.modeling_qwen3",
)
"""What is imported once."""
_PR_SET_PDEATHSIG = 1


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
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        process = context.Process(target=_become, args=(list(command), log, dict(environment)))
        await asyncio.to_thread(process.start)
        return cls(process)

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process.pid is not None  # it was started
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


# multiprocessing.util would wait for children that wait for this process. What is registered later
# runs first.
@atexit.register
def _kill_warm_children() -> None:
    for child in multiprocessing.active_children():
        if isinstance(child, ForkServerProcess):
            child.kill()


def die_with_parent() -> None:
    """Have this process ended when its parent ends, even by SIGKILL."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _become(command: list[str], log: Path, environment: dict[str, str]) -> None:
    """Be `python -m <command>` from here on."""
    os.setsid()
    threading.Thread(target=_end_with_starter, name="end-with-starter", daemon=True).start()
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    os.environ.update(environment)
    sys.argv = command
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)


def _end_with_starter() -> None:
    # The kernel could tell only of the process this was forked from, which outlives the starter.
    starter = multiprocessing.parent_process()
    assert starter is not None  # WarmProcess.start
    starter.join()
    os.kill(os.getpid(), signal.SIGTERM)
