"""Child processes with requests and answers as JSON lines, for libraries that may hang or die."""

import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, TextIO

from muster.lifecycle import environment_without_secrets

SAME = {
    "TZ": "UTC",
    "LC_ALL": "C.UTF-8",
    "PYTHONINTMAXSTRDIGITS": "4300",
    "PYTHONOPTIMIZE": "",
    "PYTHONWARNINGS": "",
    "MPMATH_NOGMPY": "1",
    "SYMPY_GROUND_TYPES": "python",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
"""Variables that every child gets, so that two machines grade alike: time zone, locale, Python's
own switches, and sympy's arithmetic, which otherwise depends on what else is installed."""


class ChildSilent(Exception):
    """The process does not answer in time."""


class ChildEnded(ChildSilent):
    """The process has ended."""


class Child:
    """One process, seen from its parent; used by one thread at a time."""

    def __init__(
        self,
        statement: str,
        *,
        hash_seed: str = "0",
        has_group: bool = False,
        also_passed: Iterable[str] = (),
    ) -> None:
        """Start a Python that executes a statement; raises OSError when it does not start.

        With `has_group`, the process has its own group, and its children are killed with it. It
        gets the variables of `also_passed` and no secrets.
        """
        self._rest, self._has_group = b"", has_group
        self._process = subprocess.Popen(
            [sys.executable, "-c", statement],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment_without_secrets(also_passed) | SAME | {"PYTHONHASHSEED": hash_seed},
            bufsize=0,
            start_new_session=has_group,
        )

    def send(self, request: dict[str, Any]) -> None:
        """Write a request; raises OSError when the process has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")

    def receive(self, until: float) -> dict[str, Any]:
        """Return the next answer; raises ChildSilent when there is none by `until`."""
        assert self._process.stdout is not None
        while b"\n" not in self._rest:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                raise ChildSilent("does not answer")
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                raise ChildEnded("ended")
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Kill the process, and its group if it has its own."""
        if self._has_group:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def own_stdout() -> TextIO:
    """Return the stream of this child's answers; what libraries print later goes elsewhere."""
    logging.disable(logging.CRITICAL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return answers


def say(answers: TextIO, message: dict[str, Any]) -> None:
    """Write an answer."""
    answers.write(json.dumps(message) + "\n")
    answers.flush()
