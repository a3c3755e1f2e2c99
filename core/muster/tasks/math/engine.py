"""The engine: runs grading libraries in processes that may be killed, with hard deadlines.

A limit of CPU time decides what is too hard, because it hardly depends on a machine's load. The
wall-clock deadline protects the caller: a comparison that it cuts off is undecided.
"""

import atexit
import queue
import threading
import time
from dataclasses import dataclass
from functools import cache
from typing import Any

from muster.lifecycle import usable_cores
from muster.protocol.errors import install_hint
from muster.tasks.children import Child, ChildSilent

CPU_S = 1.0
"""CPU time of one comparison; beyond it, the answer is wrong."""
DEADLINE_S = 4.0
"""Wall-clock time of one comparison in a loaded process; beyond it, the answer is undecided."""
START_S = 60.0
"""Wall-clock time for a process to load math-verify."""
GRACE_S = 0.4
"""Seconds after a deadline at which a process is killed."""
NEAR = 0.1
"""Share of CPU_S above which the result may differ on another machine."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The result of a request."""

    answer: dict[str, Any]
    """The answer; empty when a limit ended the work."""
    limit: str = ""
    """The limit that ended it: "CPU time" or "memory"."""
    is_near_limit: bool = False
    """Whether a slower machine, or one with less memory, might have reached the limit."""


@dataclass(frozen=True, slots=True)
class EngineTask:
    """The work of an engine's processes."""

    module: str
    """The module that does it, see `engine_process`."""
    library: str
    """The library that it needs."""
    extra: str
    """Muster's extra that installs the library."""


MATH = EngineTask("muster.tasks.math.expressions", "math-verify", "math")
"""Comparison of expressions."""


class EngineUnavailable(Exception):
    """The comparison did not take place: the machine is at fault, not the answer."""


def _start(work: EngineTask) -> Child:
    """Return a process that is ready to work."""
    statement = f"from muster.tasks.math.engine_process import main; main({work.module!r})"
    try:
        child = Child(statement)
    except OSError as error:
        raise EngineUnavailable(f"the engine's process does not start: {error}") from error
    try:
        said = _receive(child, time.monotonic() + START_S)
        if not said["ready"]:
            raise EngineUnavailable(
                f"{work.library} cannot be loaded ({said['reason']}): {install_hint(work.extra)}"
            )
    except EngineUnavailable:
        child.close()
        raise
    return child


def _ask(child: Child, request: dict[str, Any]) -> dict[str, Any]:
    deadline = time.monotonic() + DEADLINE_S + GRACE_S
    try:
        child.send({**request, "cpu_s": CPU_S, "deadline": deadline - GRACE_S})
    except OSError as error:
        raise EngineUnavailable(f"the engine's process ended: {error}") from error
    return _receive(child, deadline)


def _receive(child: Child, until: float) -> dict[str, Any]:
    try:
        return child.receive(until)
    except ChildSilent as error:
        raise EngineUnavailable(f"the engine's process {error}") from None


class Engine:
    """Up to `slots` processes, started when they are needed; any thread may ask."""

    def __init__(self, slots: int, work: EngineTask = MATH) -> None:
        self.slots, self._work = slots, work
        self._free: queue.LifoQueue[Child | None] = queue.LifoQueue()
        for _ in range(slots):
            self._free.put(None)
        self._lock = threading.Lock()

    def ask(self, request: dict[str, Any]) -> Answered:
        """Return the answer to a request; waits for a free process.

        Raises EngineUnavailable when this machine fails to give one in time.
        """
        child = self._free.get()
        try:
            child = child or _start(self._work)
            answer = _ask(child, request)
        except EngineUnavailable:
            if child is not None:
                child.close()
                child = None
            raise
        finally:
            self._free.put(child)
        return _understood(answer)

    def close(self) -> None:
        """Kill the processes, each when it is free."""
        for child in [self._free.get() for _ in range(self.slots)]:
            if child is not None:
                child.close()
            self._free.put(None)


def _understood(answer: dict[str, Any]) -> Answered:
    is_near = answer["cpu_s"] >= NEAR * CPU_S or answer.get("is_large", False)
    if answer["ended"] == "answer":
        return Answered(answer, is_near_limit=is_near)
    if answer["ended"] == "wall":
        raise EngineUnavailable(f"no result within {DEADLINE_S} s on a machine this busy")
    if answer["ended"] == "machine":
        raise EngineUnavailable("the machine ended a comparison: it may be short of memory")
    limit = {"cpu": "CPU time", "memory": "memory"}[answer["ended"]]
    return Answered({}, limit, is_near_limit=True)


@cache
def shared_engine(work: EngineTask = MATH) -> Engine:
    """Return this Python process's engine for some work: a process per usable core, up to four."""
    engine = Engine(min(4, usable_cores()), work)
    atexit.register(engine.close)
    return engine
