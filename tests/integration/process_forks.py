"""`muster` processes forked from one that has imported everything: real processes, started at once.

Importing torch and transformers takes longer than most lives of a trainer that is killed thirty
times. Run as a script: reads one JSON command per line, forks, answers with the child's pid.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any


class Forks:
    """Starts `muster` commands, and tells how they ended."""

    def __init__(self, server: asyncio.subprocess.Process) -> None:
        self._server = server

    async def start(self, words: Sequence[str], env: Mapping[str, str], log: Path) -> int:
        """Return the pid of a new process that runs `muster WORDS`."""
        answer: int = await self._ask(words=list(words), env=dict(env), log=str(log))
        return answer

    async def wait(self, pid: int) -> int:
        """Return a process's exit code, minus the signal if one ended it."""
        code: int = await self._ask(wait=pid)
        return code

    async def _ask(self, **command: Any) -> Any:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(command).encode() + b"\n")
        async with asyncio.timeout(120):
            return json.loads(await self._server.stdout.readline())


@asynccontextmanager
async def forks() -> AsyncIterator[Forks]:
    """Yield a fork server that ends with the block."""
    server = await asyncio.create_subprocess_exec(
        sys.executable,
        __file__,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        yield Forks(server)
    finally:
        assert server.stdin is not None
        server.stdin.close()
        await server.wait()


def _serve() -> None:
    import muster.trainer.process  # noqa: F401  # what takes long to import

    for line in sys.stdin:
        command = json.loads(line)
        if "wait" in command:
            _, status = os.waitpid(command["wait"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = _fork(command)
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


def _fork(command: Mapping[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    log = os.open(command["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(command["env"])
    sys.argv = ["muster", *command["words"]]
    from muster.devnet.cli import main

    try:
        main()
        code = 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve()
