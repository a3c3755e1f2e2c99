"""Parquet files from strangers, parsed in a child process that may die.

The Parquet library aborts the process on some damaged files (an uncaught C++ exception), so a
validator must never parse an unjudged file itself. One child serves many files; when a file kills
it, takes too much of its processor's time or exhausts its memory, the file is malformed and a fresh
child follows. A machine that is busy with other things is no fault of a file's: what is counted is
processor time, and a child that does not start says nothing about any file.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import struct
import sys
from typing import BinaryIO

from pydantic import ConfigDict, TypeAdapter, ValidationError

from muster.protocol.errors import EncodingError, ValidatorDisturbed
from muster.protocol.rollouts import MAX_FILE_BYTES, MAX_ROWS, Rollout, decode_rollouts

logger = logging.getLogger(__name__)

MEMORY_BYTES = 4 << 30
"""Address space of the child; the decoded form of the largest file allowed needs about 2 GiB."""
CPU_S = 30.0
"""Processor time after which a file is malformed; honest ones take milliseconds."""
WALL_S = 600.0
"""Time after which it is in any case: whatever a file waits for, it must not wait for ever."""
MAX_ANSWER_BYTES = 1 << 30
"""Bound on what is read back from the child."""

_HEADER = struct.Struct(">II")
_READY = b"R"
_ROWS = TypeAdapter(
    list[Rollout], config=ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")
)


class FileDecoder:
    """Decodes submission files in a child process; use as an async context manager."""

    def __init__(self, *, cpu_s: float = CPU_S, wall_s: float = WALL_S) -> None:
        self._cpu_s = cpu_s
        self._wall_s = wall_s
        self._child: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> FileDecoder:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end_child()

    async def decode(self, data: bytes, *, max_rows: int = MAX_ROWS) -> list[Rollout]:
        """Return the rows of a file.

        Raises EncodingError for any file that does not yield them, and ValidatorDisturbed when
        there is no child to ask.
        """
        if len(data) > MAX_FILE_BYTES:
            raise EncodingError(f"file of {len(data)} bytes exceeds the limit of {MAX_FILE_BYTES}")
        async with self._turn:
            child = await self._start()
            try:
                async with asyncio.timeout(self._wall_s):
                    failed, answer = await _ask(child, data, max_rows)
            except (TimeoutError, OSError, EOFError) as error:
                logger.warning("file killed its decoder", extra={"error": type(error).__name__})
                await self._end_child()
                raise EncodingError("not a readable Parquet file: it broke the decoder") from error
            except asyncio.CancelledError:
                # The child's answer would be taken for the next file's.
                await self._end_child()
                raise
        if failed:
            raise EncodingError(answer.decode())
        try:
            return _ROWS.validate_json(answer)
        except ValidationError as error:
            raise EncodingError("not a readable Parquet file: the decoder answered junk") from error

    async def start(self) -> None:
        """Have a child ready; raises ValidatorDisturbed when it does not start."""
        async with self._turn:
            await self._start()

    async def _start(self) -> asyncio.subprocess.Process:
        if self._child is not None and self._child.returncode is None:
            return self._child
        try:
            self._child = child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "muster.client.validator.decoding",
                str(self._cpu_s),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )
            assert child.stdout is not None
            await child.stdout.readexactly(len(_READY))
        except (OSError, EOFError) as error:
            await self._end_child()
            raise ValidatorDisturbed(
                f"the process that decodes files does not start: {type(error).__name__}",
                hint="is there memory left, and room for another process?",
            ) from error
        except asyncio.CancelledError:
            await self._end_child()
            raise
        return child

    async def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()


async def _ask(child: asyncio.subprocess.Process, data: bytes, max_rows: int) -> tuple[bool, bytes]:
    """Return whether a file was refused, and its rows as JSON or why."""
    stdin, stdout = child.stdin, child.stdout
    assert stdin is not None
    assert stdout is not None
    stdin.write(_HEADER.pack(len(data), max_rows) + data)
    await stdin.drain()
    size, failed = _HEADER.unpack(await stdout.readexactly(_HEADER.size))
    if size > MAX_ANSWER_BYTES:
        raise EOFError
    return bool(failed), await stdout.readexactly(size)


def _serve(requests: BinaryIO, answers: BinaryIO, cpu_s: float) -> None:
    """Answer requests until the parent closes the pipe."""
    answers.write(_READY)
    answers.flush()
    while header := requests.read(_HEADER.size):
        size, max_rows = _HEADER.unpack(header)
        data = requests.read(size)
        # Nothing handles the signal: it ends the process, also in the middle of native code.
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        try:
            failed, answer = 0, _ROWS.dump_json(decode_rollouts(data, max_rows=max_rows))
        except EncodingError as error:
            failed, answer = 1, str(error).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(_HEADER.pack(len(answer), failed) + answer)
        answers.flush()


def _limit_memory() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    _limit_memory()
    _serve(sys.stdin.buffer, sys.stdout.buffer, float(sys.argv[1]))
