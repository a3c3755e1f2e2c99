"""The process in which answers are compared; started by `engine.py`, never imported by it.

A module defines its work: `warm_up()` loads, `answer(request)` returns a JSON object.

It loads everything once, reads one request per line and answers with one line. A child, forked from
the loaded state, does the work, and is killed when it reaches a limit: forking the next one takes a
millisecond. The parent never parses an answer itself, so no answer can block it.
"""

import errno
import gc
import importlib
import json
import mmap
import os
import re
import resource
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from muster.tasks.children import own_stdout, say

MEMORY_BYTES = 2 << 30
"""Address space that a child may add to what it was forked with, which differs between builds."""
MAX_SERVED = 500
"""Requests after which a child is replaced, so that caches stay bounded."""

_MACHINE, _MEMORY, _CRASH = 3, 4, 5
"""Exit statuses of a child that ended itself."""
_CAUSES = {
    -signal.SIGPROF: "cpu",
    _MEMORY: "memory",
    _CRASH: "memory",
    # The stack is too deep, or a library does not check its allocations.
    -signal.SIGSEGV: "memory",
    -signal.SIGABRT: "memory",
}
"""Causes by a child's exit status; any other status, such as SIGKILL, is the machine's fault."""


def main(work: str) -> None:
    """Serve until standard input ends; `work` is the module that answers."""
    answers = own_stdout()
    try:
        module = importlib.import_module(work)
        module.warm_up()
    except ImportError as error:
        say(answers, {"ready": False, "reason": str(error)})
        return
    gc.collect()
    gc.freeze()
    say(answers, {"ready": True})
    child = _Child(module)
    for line in sys.stdin:
        say(answers, child.ask(line, json.loads(line)["deadline"]))
        if not child.is_usable:
            child.end()
            child = _Child(module)
    child.end()


class _Child:
    """A forked child that serves requests until it reaches a limit."""

    def __init__(self, work: Any) -> None:
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        self._served = 0
        self.is_usable = True
        is_granted = _is_budget_granted()
        self._pid = os.fork()
        if not self._pid:
            os.close(self._requests)
            os.close(self._answers)
            if not is_granted:
                os._exit(_MACHINE)
            _serve(work, requests, answers)
        os.close(requests)
        os.close(answers)

    def ask(self, line: str, deadline: float) -> dict[str, Any]:
        """Return the child's answer; `ended` is "answer", "cpu", "memory", "wall" if it was late,
        or "machine" if anything else ended it.
        """
        with suppress(BrokenPipeError):
            os.write(self._requests, line.encode())
        data = b""
        while not data.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                self.is_usable = False
                return {"ended": "wall", "cpu_s": 0.0}
            piece = os.read(self._answers, 65536)
            if not piece:
                self.is_usable = False
                return {"ended": self._cause(), "cpu_s": 0.0}
            data += piece
        self._served += 1
        answer: dict[str, Any] = json.loads(data)
        self.is_usable = self._served < MAX_SERVED and not answer["is_large"]
        return {"ended": "answer", **answer}

    def _cause(self) -> str:
        _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        return _CAUSES.get(os.waitstatus_to_exitcode(status), "machine")

    def end(self) -> None:
        """Kill the child."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        os.close(self._requests)
        os.close(self._answers)


def _is_budget_granted() -> bool:
    """Return whether this machine would give a child its memory: libraries take a want of it for a
    wrong answer.
    """
    try:
        mmap.mmap(-1, MEMORY_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError:
        return False
    return True


def _most_bytes(status: Path = Path("/proc/self/status")) -> int:
    """Return the most that this process's address space has had since it was forked, or what it has
    now where the system keeps no peak (gVisor); 0 where it says neither.
    """
    try:
        found = dict(re.findall(r"^(VmPeak|VmSize):\s*(\d+) kB$", status.read_text(), re.MULTILINE))
    except OSError:
        return 0
    return int(found.get("VmPeak") or found.get("VmSize", 0)) << 10


def _serve(work: Any, requests: int, answers: int) -> NoReturn:
    """Answer requests until the pipe or a limit ends it; runs in the child."""
    status = _MACHINE
    short_of_memory = _MACHINE
    try:
        # If memory runs out below the budget, the machine is at fault, not the answer.
        forked = _most_bytes()
        most = MEMORY_BYTES + forked
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        short_of_memory = _MEMORY
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with open(requests) as lines:
            for line in lines:
                request = json.loads(line)
                # The signal ends the process; no Python code can delay it.
                signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
                started = time.process_time()
                found = {**work.answer(request), "cpu_s": time.process_time() - started}
                found["is_large"] = _most_bytes() - forked > MEMORY_BYTES // 2
                signal.setitimer(signal.ITIMER_PROF, 0)
                os.write(answers, json.dumps(found).encode() + b"\n")
        status = 0
    except MemoryError:
        status = short_of_memory
    except OSError as error:
        status = _MACHINE if error.errno != errno.ENOMEM else short_of_memory
    except Exception:  # a library may raise anything for an answer; only this child ends
        status = _CRASH if short_of_memory == _MEMORY else _MACHINE
    finally:
        os._exit(status)
