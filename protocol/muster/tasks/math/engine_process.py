"""The process in which answers are compared; started by `engine.py`, never imported by it.

What it does is a module's: `warm_up()` loads, `answer(request)` returns a JSON object.

It loads everything once, reads a request per line and answers a line. A child, forked from the
loaded state, does the work, and is killed when it meets a limit: the next one is there in a
millisecond. The parent of the children never parses an answer itself, so it cannot be held up.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import resource
import select
import signal
import sys
import time
from typing import Any, NoReturn

MEMORY_BYTES = 2 << 30
"""Address space of a child."""
MAX_SERVED = 500
"""Requests after which a child is replaced, so that caches stay bounded."""

_protocol = sys.stdout
"""Where answers go; what a library prints does not."""


def main(work: str) -> None:
    """Serve until the standard input ends; `work` is the module that answers."""
    global _protocol
    logging.disable(logging.CRITICAL)
    _protocol = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        module = importlib.import_module(work)
    except ImportError as error:
        _say({"ready": False, "reason": str(error)})
        return
    module.warm_up()
    gc.collect()
    gc.freeze()
    _say({"ready": True})
    child = _Child(module)
    for line in sys.stdin:
        _say(child.ask(line, json.loads(line)["deadline"]))
        if not child.is_usable:
            child.end()
            child = _Child(module)
    child.end()


class _Child:
    """A forked child that serves requests until it meets a limit."""

    def __init__(self, work: Any) -> None:
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        self._served = 0
        self.is_usable = True
        self._pid = os.fork()
        if not self._pid:
            os.close(self._requests)
            os.close(self._answers)
            _serve(work, requests, answers)
        os.close(requests)
        os.close(answers)

    def ask(self, line: str, deadline: float) -> dict[str, Any]:
        """Return the child's answer; `ended` is "answer", "cpu", "memory", or "wall" when late."""
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
        self.is_usable = self._served < MAX_SERVED
        answer: dict[str, Any] = json.loads(data)
        return {"ended": "answer", **answer}

    def _cause(self) -> str:
        _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        return (
            "cpu" if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF else "memory"
        )

    def end(self) -> None:
        """Kill the child."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        os.close(self._requests)
        os.close(self._answers)


def _serve(work: Any, requests: int, answers: int) -> NoReturn:
    """Answer requests until the pipe or a limit ends it; runs in the child."""
    status = 1
    try:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with open(requests) as lines:
            for line in lines:
                request = json.loads(line)
                # The signal ends the process; no Python code can hold it up.
                signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
                started = time.process_time()
                found = {**work.answer(request), "cpu_s": time.process_time() - started}
                signal.setitimer(signal.ITIMER_PROF, 0)
                os.write(answers, json.dumps(found).encode() + b"\n")
        status = 0
    finally:
        os._exit(status)


def _say(message: dict[str, Any]) -> None:
    _protocol.write(json.dumps(message) + "\n")
    _protocol.flush()
