"""Parquet files from strangers, parsed in child processes that may die.

The Parquet library aborts the process on some damaged files (an uncaught C++ exception), so a
validator must never parse an unjudged file in its own process. A few children serve many files. A
child first reads a file's headers, and decodes the file only if it is within the recipe's bounds.

One crash of a child proves nothing. A file is malformed when it ended two children that had decoded
a known-good file before: by a crash, by its CPU time, or by needing more memory than its rows do
while there was enough. A child that was killed, does not start, does not answer or gets no memory
is a fault of this machine: it is retried, then ValidatorDisturbed is raised.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import IO, BinaryIO, TypeVar

import pyarrow as pa

from muster.lifecycle import environment_without_secrets, limit_memory
from muster.protocol.errors import EncodingError, ValidatorDisturbed
from muster.protocol.parquet import footer_bytes
from muster.protocol.rollouts import (
    ANY,
    MAX_FILE_BYTES,
    Bounds,
    Rollout,
    encode_rollouts,
    read_table,
    require_bounds,
    to_rollouts,
)

CHILDREN = 2
"""Number of children, and so of files decoded in parallel."""
MEMORY_BYTES = 2 << 30
"""Address space of a child; the largest allowed file needs about half of it."""
CPU_S = 5.0
"""CPU seconds after which a small file is malformed; honest ones take milliseconds."""
CPU_BYTES = 32 << 20
"""The CPU limit grows by CPU_S for each so many decoded bytes."""
WALL_S = 120.0
"""Seconds without an answer after which the machine, not the file, is to blame."""
TRIES = 3
"""How often a file is tried before ValidatorDisturbed is raised."""
MAX_ANSWER_BYTES = 1 << 30
"""Most bytes that are read back from a child."""

_ROOM_BYTES = 32 << 20
"""Memory that decoding needs for any file."""

T = TypeVar("T")

_REQUEST = struct.Struct(">5Qd")
_ANSWER = struct.Struct(">BQ")
_ROWS, _REFUSED, _BROKEN, _SHORT = range(4)
_OWN_DEATHS = frozenset(
    {signal.SIGPROF, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
)
"""Signals by which a process ends itself; SIGKILL, SIGTERM and SIGINT come from others."""


class _Broken(Exception):
    """A file ended its child process, and nothing else is to blame."""


class FileDecoder:
    """Decodes submission files in child processes; use as an async context manager."""

    def __init__(self, *, cpu_s: float = CPU_S, wall_s: float = WALL_S) -> None:
        self._cpu_s = cpu_s
        self._wall_s = wall_s
        self._idle: list[_Child] = []
        self._room = asyncio.Semaphore(CHILDREN)

    async def __aenter__(self) -> FileDecoder:
        return self

    async def __aexit__(self, *_: object) -> None:
        while self._idle:
            await asyncio.to_thread(self._idle.pop().end)

    async def decode(self, data: bytes, bounds: Bounds = ANY) -> list[Rollout]:
        """Return the rows of a file.

        Raises EncodingError for a malformed file, and ValidatorDisturbed when this machine is the
        cause.
        """
        if len(data) > MAX_FILE_BYTES:
            raise EncodingError(f"file of {len(data)} bytes exceeds the limit of {MAX_FILE_BYTES}")
        footer_bytes(data)  # rejects obvious garbage without a child
        async with self._room:
            broken, disturbed = 0, ValidatorDisturbed("no file was tried")
            for _ in range(TRIES):
                try:
                    return await self._in_child(lambda child: child.decode(data, bounds))
                except _Broken as error:
                    broken += 1
                    if broken > 1:
                        # If a child does not start now, the earlier ones may have lacked memory
                        # too.
                        await self._in_child(_Child.start)
                        raise EncodingError(
                            f"not a readable Parquet file: it broke the decoder twice ({error})"
                        ) from error
                except ValidatorDisturbed as error:
                    disturbed = error
            raise disturbed

    async def start(self) -> None:
        """Have a child ready; raises ValidatorDisturbed when it does not start."""
        async with self._room:
            await self._in_child(_Child.start)

    async def _in_child(self, ask: Callable[[_Child], T]) -> T:
        """Return a child's answer; runs in a thread."""
        child = self._idle.pop() if self._idle else _Child(self._cpu_s)
        try:
            async with asyncio.timeout(self._wall_s):
                return await asyncio.to_thread(child.asked, ask)
        except TimeoutError as error:
            raise _disturbed(f"did not answer within {self._wall_s} s") from error
        except (MemoryError, OSError, RuntimeError) as error:
            if isinstance(error, ValidatorDisturbed):
                raise
            raise _disturbed(f"cannot be asked: {type(error).__name__}") from error
        finally:
            if child.is_idle:
                self._idle.append(child)
            else:
                # A late answer would be mistaken for that of the next file.
                child.kill()


def _disturbed(what: str) -> ValidatorDisturbed:
    return ValidatorDisturbed(
        f"the process that decodes files {what}",
        hint="check that this machine has free memory and can start another process",
    )


class _Child:
    """One process; every method blocks except `kill`, which may be called from another thread."""

    def __init__(self, cpu_s: float) -> None:
        self._cpu_s = cpu_s
        self._process: subprocess.Popen[bytes] | None = None
        self._is_killed = False
        self.is_idle = False
        """Whether it has started and has no open request."""

    def asked(self, ask: Callable[[_Child], T]) -> T:
        """Return the child's answer; if it is killed meanwhile, wait for its end."""
        try:
            return ask(self)
        finally:
            if self._is_killed:
                self._wait()

    def start(self) -> None:
        """Return once it has decoded a known-good file; raises ValidatorDisturbed."""
        if self.is_idle:
            return
        try:
            self._process = process = subprocess.Popen(
                [sys.executable, "-m", "muster.client.validator.decoding"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                # The other allocators reserve more memory than requested.
                env=environment_without_secrets() | {"ARROW_DEFAULT_MEMORY_POOL": "system"},
            )
        except OSError as error:
            raise _disturbed(f"does not start: {error.strerror}") from error
        if self._is_killed:
            process.kill()
        try:
            kind, _ = self._ask(_known_good(), ANY, CPU_S)
        except (EOFError, OSError):
            raise _disturbed(f"does not start: it ended with {self._wait()}") from None
        if kind != _ROWS:
            self.end()
            raise _disturbed("does not start: it does not read a file that is good")
        self.is_idle = True

    def decode(self, data: bytes, bounds: Bounds) -> list[Rollout]:
        """Return a file's rows; raises EncodingError, ValidatorDisturbed and _Broken."""
        self.start()
        self.is_idle = False
        try:
            kind, answer = self._ask(data, bounds, self._cpu_s)
        except (EOFError, OSError):
            code = self._wait()
            if -code in _OWN_DEATHS:
                raise _Broken(signal.Signals(-code).name) from None
            raise _disturbed(f"ended with {code}") from None
        self.is_idle = True
        if kind == _SHORT:
            raise _disturbed("finds no memory for a file within bounds")
        if kind == _BROKEN:
            raise _Broken("more memory than its rows need")
        if kind == _REFUSED:
            raise EncodingError(answer.decode())
        return _unpacked(answer)

    def _ask(self, data: bytes, bounds: Bounds, cpu_s: float) -> tuple[int, bytes]:
        assert self._process is not None  # started
        requests, answers = self._process.stdin, _stdout(self._process)
        assert requests is not None
        limits = bounds.rows, bounds.prompt_tokens, bounds.completion_tokens, bounds.proof_bytes
        requests.write(_REQUEST.pack(len(data), *limits, cpu_s))
        requests.write(data)
        requests.flush()
        kind, size = _ANSWER.unpack(_read(answers, _ANSWER.size))
        if size > MAX_ANSWER_BYTES:
            raise EOFError
        return kind, _read(answers, size)

    def kill(self) -> None:
        """End it at once; a waiting caller notices its end."""
        self._is_killed = True
        if self._process is not None:
            self._process.kill()

    def end(self) -> None:
        """End it, and wait until it has."""
        self.kill()
        self._wait()

    def _wait(self) -> int:
        """Return the exit code of a process that ends."""
        self.is_idle = False
        if self._process is None:
            return 0
        code = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # unwritten bytes are dropped
                pipe.close()
        return code


@lru_cache(1)
def _known_good() -> bytes:
    return encode_rollouts([Rollout("known", 0, 0, 0, -1, 0, (1,), (2,), b"good", 1.0)])


def _stdout(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdout is not None
    return process.stdout


def _read(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data


def _unpacked(answer: bytes) -> list[Rollout]:
    try:
        with pa.ipc.open_stream(pa.py_buffer(answer)) as reader:
            table = reader.read_all()
        table.validate(full=True)
        return to_rollouts(table)
    except (pa.ArrowException, LookupError) as error:
        if isinstance(error, MemoryError):
            raise
        raise _Broken(f"the decoder answered junk: {type(error).__name__}") from error


# The child


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until the parent closes the pipe."""
    while header := requests.read(_REQUEST.size):
        size, *limits, cpu_s = _REQUEST.unpack(header)
        data = requests.read(size)
        # The signal has its default action: it ends the process even inside native code.
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        kind, answer = _answer(data, Bounds(*limits), cpu_s)
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(_ANSWER.pack(kind, len(answer)))
        answers.write(answer)
        answers.flush()


def _answer(data: bytes, bounds: Bounds, cpu_s: float) -> tuple[int, bytes | memoryview]:
    needed = len(data)
    try:
        needed += require_bounds(data, bounds)
        signal.setitimer(signal.ITIMER_PROF, cpu_s * (1 + needed / CPU_BYTES))
        if not _has_room(needed):
            return _SHORT, b""
        return _ROWS, memoryview(_packed(read_table(data)))
    except EncodingError as error:
        return _REFUSED, str(error).encode()
    except MemoryError:
        # The machine may lack memory for two files at once: then the file is not to blame.
        return (_BROKEN if _has_room(needed) else _SHORT), b""


def _packed(table: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def _has_room(size: int) -> bool:
    """Return whether there is memory for a file that decodes to `size` bytes."""
    try:
        mmap.mmap(-1, 4 * size + _ROOM_BYTES).close()
    except (OSError, MemoryError, OverflowError):
        return False
    return True


if __name__ == "__main__":
    limit_memory(MEMORY_BYTES)
    _serve(sys.stdin.buffer, sys.stdout.buffer)
