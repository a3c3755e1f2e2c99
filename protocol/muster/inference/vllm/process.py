"""vLLM's process, seen from outside: starts it, asks it, notices when it fails, ends it.

Knows no policy and no retries; `muster.inference.vllm.engine` has those.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from muster.inference.vllm.channel import (
    Channel,
    ChannelBroken,
    ChannelClosed,
    ChannelSilent,
    Frame,
)
from muster.protocol.errors import EngineError

logger = logging.getLogger(__name__)

CHILD = Path(__file__).parent / "child.py"
"""What the process runs."""
SEND_S = 60.0
"""Seconds a question may take to leave."""
END_S = 5.0
"""Seconds a process has to end by itself once nobody listens."""
_KEPT_LINES = 40


class ProcessLost(Exception):
    """The process died, hung or spoke nonsense; another one may do better."""


class EngineProcess:
    """A process that runs; close it."""

    def __init__(self, python: Path, environ: Mapping[str, str], *, child: Path = CHILD) -> None:
        """Start it; raises EngineError when the interpreter does not start."""
        ours, theirs = socket.socketpair()
        command = [str(python), "-P", str(child), str(theirs.fileno()), *package_folders()]
        try:
            self._process = subprocess.Popen(
                command,
                env=dict(environ),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                # A Ctrl-C at a terminal is for the engine's process, which then closes this one.
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise EngineError(f"{python} does not start: {error}") from error
        finally:
            theirs.close()
        self._channel = Channel(ours)
        self._said: deque[str] = deque(maxlen=_KEPT_LINES)
        assert self._process.stdout is not None  # it is a pipe
        self._reader = threading.Thread(
            target=_keep, args=(self._process.stdout, self._said), name="vllm output", daemon=True
        )
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def ask(self, question: Frame, *, silence_s: float) -> Iterator[Frame]:
        """Yield the answer's frames, "done" last; between two at most `silence_s` pass.

        Raises EngineError when the question is refused, and ProcessLost, after which the process is
        of no more use. To leave the answer unread makes it so too.
        """
        try:
            self._channel.send(question, within_s=SEND_S)
            while True:
                frame = self._channel.receive(within_s=silence_s)
                if frame.kind == "refused":
                    raise EngineError(
                        str(frame.header.get("message")), hint=frame.header.get("hint")
                    )
                if frame.kind == "broken":
                    raise ProcessLost(str(frame.header.get("message")))
                if frame.kind != "alive":
                    yield frame
                if frame.kind == "done":
                    return
        except ChannelSilent:
            raise ProcessLost(f"it said nothing for {silence_s:g} s") from None
        except ChannelClosed as error:
            raise ProcessLost(self._last_words() or str(error)) from None
        except ChannelBroken as error:
            raise ProcessLost(str(error)) from None

    def close(self, *, within_s: float = END_S) -> None:
        """End the process, whatever it is doing; may be called again."""
        self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            # It ends by itself when the channel is closed, unless it hangs.
            self._process.wait(within_s)
        self._process.kill()
        self._process.wait()
        self._reader.join(END_S)

    def _last_words(self) -> str:
        """Return how the process ended and the last line it wrote, or "" while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(END_S)
            self._reader.join(END_S)
            how = f"it was killed by signal {-code}" if code < 0 else f"it ended with code {code}"
            return f"{how}: {self._said[-1]}" if self._said else how
        return ""


def _keep(output: IO[bytes], said: deque[str]) -> None:
    """Keep the last lines of what a process writes; an endless one is cut."""
    with output:
        while line := output.readline(4096):
            text = line.decode(errors="replace").strip()
            if text:
                said.append(text)
                logger.debug("vLLM: %s", text)


def package_folders() -> list[str]:
    """Return the folders that hold the parts of `muster`."""
    spec = importlib.util.find_spec("muster")
    assert spec is not None  # it is what runs
    assert spec.submodule_search_locations is not None  # a namespace package
    return list(spec.submodule_search_locations)
