"""Parquet files from strangers, parsed in a child process that may die.

The Parquet library aborts the process on some damaged files (an uncaught C++ exception), so a
validator must never parse an unjudged file itself. One child serves many files; when a file kills
it, outlasts the deadline or exhausts its memory, the file is malformed and a fresh child follows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
import sys
from typing import BinaryIO

from pydantic import ConfigDict, TypeAdapter, ValidationError

from muster.protocol.errors import EncodingError
from muster.protocol.rollouts import MAX_FILE_BYTES, MAX_ROWS, Rollout, decode_rollouts

logger = logging.getLogger(__name__)

MEMORY_BYTES = 4 << 30
"""Address space of the child; the decoded form of the largest file allowed needs about 2 GiB."""
DEADLINE_S = 30.0
"""A file that takes longer is malformed; honest ones take milliseconds."""
MAX_ANSWER_BYTES = 1 << 30
"""Bound on what is read back from the child."""

_HEADER = struct.Struct(">II")
_ROWS = TypeAdapter(
    list[Rollout], config=ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")
)


class FileDecoder:
    """Decodes submission files in a child process; use as an async context manager."""

    def __init__(self, *, deadline_s: float = DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._child: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> FileDecoder:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end_child()

    async def decode(self, data: bytes, *, max_rows: int = MAX_ROWS) -> list[Rollout]:
        """Return the rows of a file; raises EncodingError for any file that does not yield them."""
        if len(data) > MAX_FILE_BYTES:
            raise EncodingError(f"file of {len(data)} bytes exceeds the limit of {MAX_FILE_BYTES}")
        async with self._turn:
            try:
                async with asyncio.timeout(self._deadline_s):
                    failed, answer = await self._ask(data, max_rows)
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

    async def _ask(self, data: bytes, max_rows: int) -> tuple[bool, bytes]:
        if self._child is None or self._child.returncode is not None:
            self._child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "muster.client.validator.decoding",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )
        stdin, stdout = self._child.stdin, self._child.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(_HEADER.pack(len(data), max_rows) + data)
        await stdin.drain()
        size, failed = _HEADER.unpack(await stdout.readexactly(_HEADER.size))
        if size > MAX_ANSWER_BYTES:
            raise EOFError
        return bool(failed), await stdout.readexactly(size)

    async def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until the parent closes the pipe."""
    while header := requests.read(_HEADER.size):
        size, max_rows = _HEADER.unpack(header)
        try:
            failed, answer = (
                0,
                _ROWS.dump_json(decode_rollouts(requests.read(size), max_rows=max_rows)),
            )
        except EncodingError as error:
            failed, answer = 1, str(error).encode()
        answers.write(_HEADER.pack(len(answer), failed) + answer)
        answers.flush()


def _limit_memory() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    _limit_memory()
    _serve(sys.stdin.buffer, sys.stdout.buffer)
