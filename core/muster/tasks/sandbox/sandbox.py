"""Runs a job in the sandbox: starts it, feeds it, reads up to the caps, kills all its processes."""

import base64
import binascii
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.tasks.given_up import REASON, is_given_up
from muster.tasks.sandbox.command import Limits, Tools, sandbox_command
from muster.tasks.sandbox.per_run import has_met_limit, memory_group, unused_id
from muster.tasks.sandbox.seccomp import filter_program

ENDED = frozenset({"exit", "signal", "deadline", "output", "machine"})
"""Possible ends of a test."""
_REPORT_BYTES = 256
_STARTED = b'"started"'
"""The runner's first report, before the program runs."""
_SAID_BYTES, _SAID_CHARS = 65536, 300
"""Most bytes read of what a sandbox that does not start writes, and characters of it shown."""
_EXIT_S = 0.5
"""Seconds that bubblewrap has to end by itself."""
LATE_S = 2.0
"""Seconds that a report may come after a test's deadline; then everything is killed."""
LOOK_S = 0.5
"""Seconds between two checks of a running test's CPU use."""


class SandboxUnavailable(Exception):
    """The program did not run: the machine is at fault, not the program."""


@dataclass(frozen=True, slots=True)
class SandboxJob:
    """A program and its inputs, without the expected outputs."""

    program: str
    """Python source."""
    inputs: tuple[Any, ...]
    """Per test, the text on standard input, or the list of a call's arguments."""
    function: str | None = None
    """The function to call, of the module or of its class `Solution`; None for standard input."""


@dataclass(frozen=True, slots=True)
class TestRun:
    """The result of a program on one input, as reported from inside: untrusted."""

    __test__ = False

    out: bytes
    """Its standard output, or the JSON of its function's result."""
    ended: str
    """"exit", "signal", "deadline", "output" (too much of it) or "machine" (it did not run)."""
    status: int
    """Exit status; negative for a signal."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run."""

    tests: tuple[TestRun | None, ...]
    """Per input; None if nothing was reported."""
    ended: str
    """"exit", "deadline" (of the run), "output" (too much of it) or "stopped" by the caller."""


Judge = Callable[[int, TestRun], bool]
"""Called for each test as it is reported; the run is stopped when it returns False."""


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A sandbox whose self-test has passed."""

    tools: Tools
    """Its programs."""

    def run(self, job: SandboxJob, limits: Limits, judge: Judge | None = None) -> Outcome:
        """Run a program until it ends or `judge` stops it, and return the outcome.

        Blocks at most a second longer than `limits.total_s`, and without a report at most for a
        test's `limits.wall_s` plus LATE_S. Raises SandboxUnavailable when the sandbox does not
        start, when this machine ended a test because it ran out of memory or was too busy, or when
        the work was given up, at most LOOK_S ago.
        """
        with ExitStack() as stack:
            try:
                user = stack.enter_context(unused_id())
                groups = stack.enter_context(memory_group(limits.group_bytes, limits.processes + 8))
                process = _start(self.tools, limits, user, groups, stack)
            except OSError as error:
                raise SandboxUnavailable(f"the sandbox does not start: {error}") from error
            return _Run(process, job, limits, judge, groups).finish()


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
        stderr=subprocess.PIPE,
        cwd="/",
        env={},
        bufsize=0,
        pass_fds=() if filter_fd is None else (filter_fd,),
        start_new_session=True,
    )


class _Run:
    """One run, from the job's first byte to the last process's end."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        job: SandboxJob,
        limits: Limits,
        judge: Judge | None,
        groups: Sequence[Path],
    ) -> None:
        self._process = process
        self._judge = judge
        self._limits, self._groups = limits, groups
        self._deadline = self._due = time.monotonic() + limits.total_s
        self._used = TimeUsed()
        self._kills = _kills_for_memory()
        self._trouble = ""
        self._left = len(job.inputs) * (limits.output_bytes * 4 // 3 + _REPORT_BYTES)
        self._tests: list[TestRun | None] = [None] * len(job.inputs)
        self._job = _job_bytes(job, limits)
        self._data = b""
        self._ended = ""
        self._is_started = False
        self._inside: list[int] = []
        self._said = b""

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
            self._trouble = self._trouble or self._trouble_at_end()
        finally:
            self._kill()
        if not self._is_started:
            raise SandboxUnavailable(self._failure())
        if self._trouble:
            raise SandboxUnavailable(self._trouble)
        return Outcome(tuple(self._tests), self._ended)

    def _step(self, selector: selectors.BaseSelector) -> None:
        events = selector.select(max(0.0, min(LOOK_S, self._due - time.monotonic())))
        if time.monotonic() >= self._due:
            self._ended = "deadline"
            return
        if is_given_up():
            self._ended, self._trouble = "stopped", REASON
            return
        if not events and self._is_started:
            self._look()
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
        """Record a report; a malformed or repeated one is ignored."""
        if line == _STARTED:
            self._is_started = True
            self._inside = _children(self._process.pid)
            self._expect()
            return
        number, test = _parse_report(line)
        if test is None or not 0 <= number < len(self._tests) or self._tests[number] is not None:
            return
        self._tests[number] = test
        self._trouble = self._trouble_of(test)
        self._expect()
        is_done = self._judge is not None and not self._trouble and not self._judge(number, test)
        if self._trouble or is_done:
            self._ended = "stopped"

    def _expect(self) -> None:
        """Set the deadline of the next report, whose test has just started."""
        due = time.monotonic() + self._limits.wall_s + LATE_S
        self._due, self._used = min(self._deadline, due), TimeUsed()

    def _look(self) -> None:
        self._used = max(self._used, time_used_by(self._inside), key=lambda used: used.waited_s)

    def _trouble_of(self, test: TestRun) -> str:
        """Return this machine's problem that ended a test; empty if the program ended it."""
        if test.ended == "machine":
            return "this machine has no room for another process"
        if test.ended == "deadline":
            return self._used.trouble(self._limits)
        is_killed = (test.ended, test.status) == ("signal", -signal.SIGKILL)
        if is_killed and _kills_for_memory() > self._kills and not has_met_limit(self._groups):
            return "this machine ran out of memory"
        return ""

    def _trouble_at_end(self) -> str:
        if self._ended == "deadline":
            return self._used.trouble(self._limits)
        is_cut = self._ended == "exit" and None in self._tests
        return "" if not is_cut or has_met_limit(self._groups) else "the runner was killed"

    def _failure(self) -> str:
        """Return how the sandbox failed to start, with the last line of the tool that gave up."""
        lines = self._said.decode(errors="replace").splitlines()
        status = f"the sandbox ended with status {self._process.returncode}"
        return f"{status}: {lines[-1][:_SAID_CHARS]}" if lines else status

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
            # Orphans go to the first process of the system, which in some containers is this one.
            with suppress(ChildProcessError):
                os.waitpid(child, 0)
        assert self._process.stderr is not None
        os.set_blocking(self._process.stderr.fileno(), False)
        with suppress(BlockingIOError):
            self._said = os.read(self._process.stderr.fileno(), _SAID_BYTES)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()


def _kills_for_memory() -> int:
    """Return how many processes of this machine the kernel has killed for lack of memory."""
    with suppress(OSError):
        lines = Path("/proc/vmstat").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    return 0


@dataclass(frozen=True, slots=True)
class TimeUsed:
    """The scheduler's figures of a test's processes so far."""

    ran_s: float = 0.0
    """CPU time."""
    waited_s: float = 0.0
    """Longest time that one of them was ready to run but waited for a CPU."""

    def trouble(self, limits: Limits) -> str:
        """Return that this machine was too busy, if that cost a test its time; else empty."""
        if self.ran_s >= limits.cpu_s or self.waited_s < limits.wall_s / 2:
            return ""
        return f"this machine was too busy: a test ran {self.ran_s:.1f} s of {limits.wall_s:g} s"


def time_used_by(pids: Sequence[int]) -> TimeUsed:
    """Return the scheduler's figures of processes and all their descendants."""
    ran = waited = 0
    left = list(pids)
    for pid in left:
        for thread in Path(f"/proc/{pid}/task").glob("*"):
            with suppress(OSError, ValueError):
                found = (thread / "schedstat").read_text().split()
                ran, waited = ran + int(found[0]), max(waited, int(found[1]))
                left += map(int, (thread / "children").read_text().split())
    return TimeUsed(ran / 1e9, waited / 1e9)


def _children(pid: int) -> list[int]:
    with suppress(OSError):
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    return []


def _job_bytes(job: SandboxJob, limits: Limits) -> bytes:
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
        ended, status, number = value["ended"], value["status"], value["test"]
    except (ValueError, KeyError, TypeError, RecursionError, binascii.Error):
        return -1, None
    if ended not in ENDED or type(status) is not int or type(number) is not int:
        return -1, None
    return number, TestRun(out, ended, status)
