"""Running a job in the sandbox: started, fed, read up to the caps, killed with all it started."""

from __future__ import annotations

import base64
import binascii
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.tasks.sandbox.command import Tools, sandbox_command
from muster.tasks.sandbox.groups import memory_group
from muster.tasks.sandbox.limits import Limits
from muster.tasks.sandbox.seccomp import filter_program
from muster.tasks.sandbox.slots import unused_id

ENDED = frozenset({"exit", "signal", "deadline", "output"})
"""How a test can have ended."""
_REPORT_BYTES = 256
_STARTED = b'"started"'
"""What the runner reports before the program runs."""
_EXIT_S = 0.5
"""Given to bubblewrap to end by itself."""


class SandboxUnavailable(Exception):
    """The program did not run: the machine is at fault, not the program."""


@dataclass(frozen=True, slots=True)
class Job:
    """A program and its inputs. What it should answer is never part of it."""

    program: str
    """Python source."""
    inputs: tuple[Any, ...]
    """For each test the text on standard input, or the list of a call's arguments."""
    function: str | None = None
    """The function to call, of the module or of its class `Solution`; None for standard input."""


@dataclass(frozen=True, slots=True)
class TestRun:
    """What a program did on one input, as reported from inside: nothing to be trusted."""

    __test__ = False

    out: bytes
    """What it wrote to standard output, or the JSON of what its function returned."""
    ended: str
    """"exit", "signal", "deadline" or "output" (too much of it)."""
    status: int
    """Exit status; negative for a signal."""
    cpu_s: float
    """CPU time."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came out of a run."""

    tests: tuple[TestRun | None, ...]
    """For each input; None when nothing was reported."""
    ended: str
    """"exit", "deadline" (of the run), "output" (too much of it) or "stopped" by the caller."""


Judge = Callable[[int, TestRun], bool]
"""Called for each test as it is reported; the run is stopped when it returns False."""


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A sandbox whose self-test has passed."""

    tools: Tools
    """What it is made of."""

    def run(self, job: Job, limits: Limits, judge: Judge | None = None) -> Outcome:
        """Return what a program did, as far as `judge` let it.

        Blocks, at most a second longer than `limits.total_s`. Raises SandboxUnavailable when the
        sandbox does not start.
        """
        with ExitStack() as stack:
            try:
                user = stack.enter_context(unused_id())
                groups = stack.enter_context(memory_group(limits.group_bytes, limits.processes + 8))
                process = _start(self.tools, limits, user, groups, stack)
            except OSError as error:
                raise SandboxUnavailable(f"the sandbox does not start: {error}") from error
            return _Run(process, job, limits, judge).finish()


def _start(
    tools: Tools, limits: Limits, user: int | None, groups: Any, stack: ExitStack
) -> subprocess.Popen[bytes]:
    program = filter_program()
    filter_fd = None
    if program is not None:
        filter_fd, writing = os.pipe()
        stack.callback(os.close, filter_fd)
        os.write(writing, program)
        os.close(writing)
    command = sandbox_command(tools, limits, user=user, groups=groups, filter_fd=filter_fd)
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env={},
        bufsize=0,
        pass_fds=() if filter_fd is None else (filter_fd,),
        start_new_session=True,
    )


class _Run:
    """One run, from the job's first byte to the last process's end."""

    def __init__(
        self, process: subprocess.Popen[bytes], job: Job, limits: Limits, judge: Judge | None
    ) -> None:
        self._process = process
        self._judge = judge
        self._deadline = time.monotonic() + limits.total_s
        self._left = len(job.inputs) * (limits.output_bytes * 4 // 3 + _REPORT_BYTES)
        self._tests: list[TestRun | None] = [None] * len(job.inputs)
        self._job = _job_bytes(job, limits)
        self._data = b""
        self._ended = ""
        self._is_started = False
        self._inside: list[int] = []

    def finish(self) -> Outcome:
        """Return the outcome; no process of the run is left."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            with selectors.DefaultSelector() as selector:
                os.set_blocking(self._process.stdin.fileno(), False)
                selector.register(self._process.stdin, selectors.EVENT_WRITE)
                selector.register(self._process.stdout, selectors.EVENT_READ)
                while not self._ended:
                    self._step(selector)
        finally:
            self._kill()
        if not self._is_started:
            raise SandboxUnavailable(f"the sandbox ended with status {self._process.returncode}")
        return Outcome(tuple(self._tests), self._ended)

    def _step(self, selector: selectors.BaseSelector) -> None:
        events = selector.select(max(0.0, self._deadline - time.monotonic()))
        if time.monotonic() >= self._deadline:
            self._ended = "deadline"
            return
        for key, _ in events:
            if key.fileobj is self._process.stdin:
                self._feed(selector)
            else:
                self._read()

    def _feed(self, selector: selectors.BaseSelector) -> None:
        assert self._process.stdin is not None
        try:
            self._job = self._job[os.write(self._process.stdin.fileno(), self._job[:65536]) :]
        except BlockingIOError:
            return
        except OSError:
            self._job = b""
        if not self._job:
            selector.unregister(self._process.stdin)
            self._process.stdin.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        piece = os.read(self._process.stdout.fileno(), 1 << 20)
        self._left -= len(piece)
        *lines, self._data = (self._data + piece).split(b"\n")
        for line in lines:
            self._take(line)
        if self._left < 0:
            self._ended = "output"
        elif not piece:
            self._ended = self._ended or "exit"

    def _take(self, line: bytes) -> None:
        """Note a report; one that is malformed or repeated counts for nothing."""
        if line == _STARTED:
            self._is_started = True
            self._inside = _children(self._process.pid)
            return
        number, test = _parse_report(line)
        if test is None or not 0 <= number < len(self._tests) or self._tests[number] is not None:
            return
        self._tests[number] = test
        if self._judge is not None and not self._judge(number, test):
            self._ended = "stopped"

    def _kill(self) -> None:
        """End all processes of the run, first those inside, so that bubblewrap reaps them."""
        if self._ended != "exit":
            for child in self._inside or _children(self._process.pid):
                with suppress(OSError):
                    os.kill(child, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for child in self._inside:
            # bubblewrap leaves them to the first process, which this one is in some containers.
            with suppress(ChildProcessError):
                os.waitpid(child, 0)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def _children(pid: int) -> list[int]:
    with suppress(OSError):
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    return []


def _job_bytes(job: Job, limits: Limits) -> bytes:
    content = {
        "program": job.program,
        "function": job.function,
        "inputs": job.inputs,
        "processes": limits.processes,
        "cpu_s": limits.cpu_s,
        "wall_s": limits.wall_s,
        "output_bytes": limits.output_bytes,
    }
    return json.dumps(content).encode()


def _parse_report(line: bytes) -> tuple[int, TestRun | None]:
    try:
        value = json.loads(line)
        out = base64.b64decode(value["out"], validate=True)
        ended, status, cpu_s = value["ended"], value["status"], value["cpu_s"]
        number = value["test"]
    except (ValueError, KeyError, TypeError, RecursionError, binascii.Error):
        return -1, None
    if ended not in ENDED or type(status) is not int or type(number) is not int:
        return -1, None
    if not isinstance(cpu_s, (int, float)):
        return -1, None
    return number, TestRun(out, ended, status, float(cpu_s))
