"""Verifiers tried in two processes whose hashes of text differ, each answer with a deadline."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from muster.tasks.problem import Problem

DEADLINE_S = 60.0
"""Clock time of one answer, engines and sandbox started included; beyond it, it hangs."""
HASH_SEEDS = ("0", "1")
"""PYTHONHASHSEED of the two: the order of sets of text differs."""


class Hangs(Exception):
    """A verifier gave no answer in time, or its process died."""


class TrialProcess:
    """One process, started again after it hung."""

    def __init__(self, hash_seed: str, deadline_s: float) -> None:
        self._hash_seed, self._deadline_s = hash_seed, deadline_s
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""

    def send(self, problem: Problem, completion: str | None = None) -> None:
        """Ask for a grade, or, without a completion, what the verifier says of the problem."""
        request: dict[str, Any] = {"problem": problem.model_dump()}
        if completion is not None:
            request["completion"] = completion
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.write(json.dumps(request).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        """Return the answer; raises Hangs, and the next request starts a new process."""
        assert self._process is not None
        assert self._process.stdout is not None
        until = time.monotonic() + self._deadline_s
        while b"\n" not in self._rest:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                self.close()
                raise Hangs(f"no answer within {self._deadline_s:g} s")
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                self.close()
                raise Hangs("the process of the verifier died")
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-c", "from muster.tasks.trial_process import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONHASHSEED": self._hash_seed, "OMP_NUM_THREADS": "1"},
            bufsize=0,
            start_new_session=True,
        )

    def close(self) -> None:
        """Kill the process and what it started."""
        process, self._process, self._rest = self._process, None, b""
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def trial_processes(deadline_s: float = DEADLINE_S) -> Iterator[list[TrialProcess]]:
    """Yield the two processes; they are gone afterwards."""
    processes = [TrialProcess(seed, deadline_s) for seed in HASH_SEEDS]
    try:
        yield processes
    finally:
        for process in processes:
            process.close()
