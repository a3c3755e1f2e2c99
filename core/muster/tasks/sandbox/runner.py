"""Runs inside the sandbox: forks a child per test and reports the output of each.

Started as `python -c`, with the standard library alone. The program under test may take over this
process, but gains nothing: the expected outputs are outside, where all reports are compared with
them. Expected outputs must never be part of a job. As the first process of its namespace it
receives no signal from the program.
"""

import base64
import builtins
import json
import os
import resource
import select
import signal
import sys
import time
from contextlib import suppress
from typing import Any, NoReturn

RESULT_FD = 60
"""File descriptor to which the result of a call is written."""
STARTED = "started"
"""First report, before the program runs."""


def main() -> None:
    """Read the job, run its tests in order, report a line for each."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a program can send signals that have a handler
    job = json.loads(_read_all(0))
    with suppress(OSError, ValueError):
        # Inside a user namespace only its own processes are counted.
        resource.setrlimit(resource.RLIMIT_NPROC, (job["processes"], job["processes"]))
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # as `site` does
    sys.setrecursionlimit(10000)
    if "random" in job["program"]:
        import random  # noqa: F401  # once, not in every child
    reports = os.dup(1)
    _write_line(reports, STARTED)
    for number, given in enumerate(job["inputs"]):
        try:
            found = _run_test(job, given, reports)
        except OSError:  # no process or pipe is available, although the program has none left
            found = {"out": "", "ended": "machine", "status": 0}
        _write_line(reports, {"test": number, **found})


def _read_all(descriptor: int) -> bytes:
    pieces = []
    while piece := os.read(descriptor, 1 << 20):
        pieces.append(piece)
    return b"".join(pieces)


def _write_line(descriptor: int, message: object) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]


def _run_test(job: dict[str, Any], given: Any, reports: int) -> dict[str, Any]:
    """Run the program in a child; return its output and how it ended."""
    stdin_read, stdin_write = os.pipe()
    out_read, out_write = os.pipe()
    child = os.fork()
    if not child:
        for descriptor in (stdin_write, out_read, reports):
            os.close(descriptor)
        _run_program(job, given, stdin_read, out_write)
    os.close(stdin_read)
    os.close(out_write)
    data = b"" if job["function"] is not None else given.encode()
    out, ended = _Exchange(child, stdin_write, data, out_read, job).finish()
    with suppress(OSError):
        os.kill(-1, 9)  # the child and everything it left behind: nothing else runs here
    _, status = os.waitpid(child, 0)
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    return {
        "out": base64.b64encode(out).decode(),
        "ended": ended or ("exit" if os.WIFEXITED(status) else "signal"),
        "status": os.waitstatus_to_exitcode(status),
    }


class _Exchange:
    """Feeds a child and reads its output, up to the limits, until it ends."""

    def __init__(self, child: int, stdin: int, data: bytes, out: int, job: dict[str, Any]) -> None:
        self._stdin, self._data, self._out = stdin, data, out
        self._end = os.pidfd_open(child)
        self._deadline = time.monotonic() + job["wall_s"]
        self._output_bytes = job["output_bytes"]
        self._found = b""
        self._is_fed = False

    def finish(self) -> tuple[bytes, str]:
        """Return the output, and the limit that ended it, if any."""
        os.set_blocking(self._stdin, False)
        os.set_blocking(self._out, False)
        ended = ""
        while not ended:
            left = self._deadline - time.monotonic()
            writing = [] if self._is_fed else [self._stdin]
            ready, writable, _ = select.select([self._out, self._end], writing, [], max(0, left))
            if writable:
                self._feed()
            is_open = self._read() if self._out in ready else True
            if len(self._found) > self._output_bytes:
                ended = "output"
            elif self._end in ready or not is_open:
                break
            elif left <= 0:
                ended = "deadline"
        self._close()
        return self._found[: self._output_bytes], ended

    def _feed(self) -> None:
        with suppress(BlockingIOError):
            try:
                self._data = self._data[os.write(self._stdin, self._data[:65536]) :]
            except BrokenPipeError:
                self._data = b""
        if not self._data:
            self._is_fed = True
            os.close(self._stdin)

    def _read(self) -> bool:
        """Read all available output, slightly beyond the limit at most; return whether more may
        come.
        """
        with suppress(BlockingIOError):
            while len(self._found) <= self._output_bytes:
                piece = os.read(self._out, 65536)
                self._found += piece
                if not piece:
                    return False
        return True

    def _close(self) -> None:
        for descriptor in (self._out, self._end, *([] if self._is_fed else [self._stdin])):
            os.close(descriptor)


def _run_program(job: dict[str, Any], given: Any, stdin: int, out: int) -> NoReturn:
    """Run the program on one input and end; runs in the child."""
    status = 1
    try:
        is_call = job["function"] is not None
        null = _open_null()
        os.dup2(stdin, 0)
        os.dup2(null if is_call else out, 1)
        os.dup2(null, 2)
        if is_call:
            os.dup2(out, RESULT_FD)
        os.closerange(3, RESULT_FD)
        resource.setrlimit(resource.RLIMIT_CPU, (job["cpu_s"], job["cpu_s"]))
        status = _execute(job, given)
    finally:
        os._exit(status)


def _open_null() -> int:
    """Return a descriptor that discards writes: /dev/null, or without one /dev/zero."""
    path = os.devnull if os.path.exists(os.devnull) else "/dev/zero"
    return os.open(path, os.O_WRONLY)


def _execute(job: dict[str, Any], given: Any) -> int:
    """Return the exit status of the program; a call must return, ending early is a failure."""
    scope: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
    sys.argv = ["program.py"]
    if "random" in sys.modules:
        sys.modules["random"].seed(0)
    function = job["function"]
    try:
        exec(compile(job["program"], "program.py", "exec"), scope)
        if function is not None:
            call = scope[function] if function in scope else getattr(scope["Solution"](), function)
            _write_line(RESULT_FD, call(*given))
    except SystemExit as end:
        if function is not None or end.code not in (None, 0):
            return 1
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    main()
