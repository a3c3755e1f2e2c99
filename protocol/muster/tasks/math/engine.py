"""The engine: libraries that grade, in processes that may be killed, with hard deadlines.

A limit of CPU time decides what is too hard; it hardly depends on how busy a machine is. The
deadline on the clock guards the caller: what it cuts off is undecided.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from functools import cache
from typing import Any

CPU_S = 1.0
"""CPU time of one comparison; beyond it, the answer is wrong."""
DEADLINE_S = 4.0
"""Clock time of one comparison in a loaded process; beyond it, it is undecided."""
START_S = 60.0
"""Clock time for a process to load math-verify."""
GRACE_S = 0.4
"""A process that is this late is killed."""
NEAR = 0.1
"""Share of CPU_S from which on another machine may come to another end."""

Pairs = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Compared:
    """What the engine found."""

    equal: list[bool | None]
    """For each pair, whether its expressions are equal; None when the gold one is no expression.
    Empty when a limit ended the comparison."""
    limit: str = ""
    """Which limit ended it: "CPU time" or "memory"."""
    is_near_limit: bool = False
    """Whether a slower machine might have met the limit."""


@dataclass(frozen=True, slots=True)
class Answered:
    """What came of a request."""

    answer: dict[str, Any]
    """The answer; empty when a limit ended the work."""
    limit: str = ""
    """Which limit ended it: "CPU time" or "memory"."""
    is_near_limit: bool = False
    """Whether a slower machine might have met the limit."""


@dataclass(frozen=True, slots=True)
class Work:
    """What an engine's processes do."""

    module: str
    """The module that does it, see `engine_process`."""
    library: str
    """What it needs."""
    extra: str
    """Muster's extra that brings it."""


MATH = Work("muster.tasks.math.work", "math-verify", "math")
"""Comparing expressions."""


class EngineUnavailable(Exception):
    """The comparison did not take place: the machine is at fault, not the answer."""


class _Process:
    """One process; used by one thread at a time."""

    def __init__(self, work: Work) -> None:
        environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"from muster.tasks.math.engine_process import main; main({work.module!r})",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            bufsize=0,
        )
        self._rest = b""
        try:
            said = self._read(time.monotonic() + START_S)
        except EngineUnavailable:
            self.close()
            raise
        if not said["ready"]:
            self.close()
            raise EngineUnavailable(
                f"{work.library} cannot be loaded ({said['reason']}): "
                f"pip install 'muster-rl[{work.extra}]'"
            )

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the process's answer; raises EngineUnavailable when it gives none in time."""
        deadline = time.monotonic() + DEADLINE_S + GRACE_S
        request = {**request, "cpu_s": CPU_S, "deadline": deadline - GRACE_S}
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            return self._read(deadline)
        except OSError as error:
            raise EngineUnavailable(f"the engine's process ended: {error}") from error

    def _read(self, deadline: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                raise EngineUnavailable("the engine's process does not answer")
            piece = os.read(self._process.stdout.fileno(), 65536)
            if not piece:
                raise EngineUnavailable("the engine's process ended")
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Kill the process; a child of it ends by its limit of CPU time."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class Engine:
    """Up to `slots` processes, started when they are needed; any thread may ask."""

    def __init__(self, slots: int, work: Work = MATH) -> None:
        self.slots, self._work = slots, work
        self._free: queue.LifoQueue[_Process | None] = queue.LifoQueue()
        for _ in range(slots):
            self._free.put(None)
        self._lock = threading.Lock()

    def compare(self, pairs: Pairs) -> Compared:
        """Return whether the expressions of each pair are equal; waits for a free process.

        Raises EngineUnavailable when this machine fails to compare them in time.
        """
        answered = self.ask({"pairs": pairs})
        equal = [] if answered.limit else answered.answer["equal"]
        return Compared(equal, answered.limit, answered.is_near_limit)

    def ask(self, request: dict[str, Any]) -> Answered:
        """Return the answer to a request; waits for a free process.

        Raises EngineUnavailable when this machine fails to give one in time.
        """
        process = self._free.get()
        try:
            process = process or _Process(self._work)
            answer = process.ask(request)
        except EngineUnavailable:
            if process is not None:
                process.close()
                process = None
            raise
        finally:
            self._free.put(process)
        return _understood(answer)

    def close(self) -> None:
        """Kill the processes, each when it is free."""
        for process in [self._free.get() for _ in range(self.slots)]:
            if process is not None:
                process.close()
            self._free.put(None)


def _understood(answer: dict[str, Any]) -> Answered:
    is_near = answer["cpu_s"] >= NEAR * CPU_S
    if answer["ended"] == "answer":
        return Answered(answer, is_near_limit=is_near)
    if answer["ended"] == "wall":
        raise EngineUnavailable(f"no result within {DEADLINE_S} s on a machine this busy")
    limit = {"cpu": "CPU time", "memory": "memory"}[answer["ended"]]
    return Answered({}, limit, is_near_limit=True)


@cache
def shared_engine() -> Engine:
    """Return the engine of this Python process, with a process for each core up to four."""
    engine = Engine(max(2, min(4, os.cpu_count() or 1)))
    atexit.register(engine.close)
    return engine
