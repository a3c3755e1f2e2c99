"""The engine on vLLM, or on transformers, that computes in another process.

Owns the loaded policy and the recovery from failures: a failed process is started again, loads the
policy again, and gets the unanswered questions again. Callers notice only the delay.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

from muster.inference.engine import (
    ROOM,
    Completion,
    Examined,
    Progress,
    Request,
    Room,
    Sample,
    Watch,
    require_fits,
    require_samplable,
    set_aside_in,
)
from muster.inference.turns import Weights
from muster.inference.vllm import frames
from muster.inference.vllm.frames import ChannelBroken, Frame, PolicyShape, Tokens
from muster.inference.vllm.launcher import (
    CHILD,
    END_S,
    EngineProcess,
    ProcessLost,
    ProcessSilent,
    find_python,
    process_environment,
    require_usable,
)
from muster.protocol.errors import EngineError, EngineSilent
from muster.protocol.ids import PolicyVersion
from muster.protocol.prompts import Prompt
from muster.protocol.recipe import ProofRecipe
from muster.protocol.set_aside import SetAside

logger = logging.getLogger(__name__)

S = TypeVar("S")
T = TypeVar("T")
Dtype = Literal["float32", "bfloat16"]
"""Number format of a model's arithmetic."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Deadlines of the process, and how often it may fail."""

    open_s: float = 1800.0
    """Seconds to import vLLM and open a policy: on a GPU it reads tens of gigabytes and
    compiles."""
    silence_s: float = 300.0
    """Seconds between two signs of life in an answer: one step, or one forward pass, of the largest
    batch."""
    restarts: int = 3
    """Failures in a row after which a question is given up."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    """The policy that the process has loaded, or will load when it runs again."""

    version: PolicyVersion
    folder: Path
    shape: PolicyShape
    set_aside: SetAside
    """The folder's list of problems set aside."""
    files: list[tuple[str, int, int]]
    """Name, size and modification time of every file: a restart must find the same ones."""


class ProcessEngine:
    """InferenceEngine in a process of its own; see `muster.inference.engine` for the contract.

    Starts its process with the first policy. `threads` is the process's thread count; `room` and
    `cache_bytes` bound its resources. `python` runs `child`, which hosts transformers or vLLM.
    """

    HOSTS: ClassVar[Literal["transformers", "vllm"]] = "transformers"
    BATCH_TOKENS: ClassVar[int | None] = None
    """Default of `Room.batch_tokens`; None for the engine to choose."""

    def __init__(
        self,
        dtype: Dtype = "float32",
        *,
        threads: int = 1,
        device: str = "cpu",
        room: Room = ROOM,
        cache_bytes: int | None = None,
        tensor_parallel: int = 1,
        python: Path | None = None,
        child: Path = CHILD,
        patience: Patience = Patience(),
    ) -> None:
        self.dtype = dtype
        self._options = {
            "hosts": self.HOSTS,
            "dtype": dtype,
            "threads": threads,
            "device": device,
            "context": room.context,
            "memory_share": room.memory_share,
            "max_rows": room.max_rows,
            "batch_tokens": room.batch_tokens or self.BATCH_TOKENS,
            "cache_bytes": cache_bytes,
            "tensor_parallel": tensor_parallel,
        }
        self._context = room.context
        self._patience = patience
        environ = process_environment(threads=threads, device=device)
        self._current = _CurrentProcess(python or self._find_python(), environ, child)
        # No process outlives the engine, whether it is collected, closed or left until the end.
        self._finalizer = weakref.finalize(self, self._current.drop)
        self._loaded: _Loaded | None = None
        self._weights = Weights()
        self._opening = threading.Lock()

    @property
    def policy_version(self) -> PolicyVersion | None:
        """The loaded policy; None before the first and after a failed load."""
        loaded = self._loaded
        return loaded.version if loaded else None

    @property
    def hidden_size(self) -> int:
        """Width of a hidden state."""
        return self._shape().hidden_size

    @property
    def vocab_size(self) -> int:
        """Logits per position; token ids are below it."""
        return self._shape().vocab_size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a completion."""
        return self._shape().eos_token_ids

    @property
    def set_aside(self) -> SetAside:
        """The problems that the loaded policy sets aside."""
        if self._loaded is None:
            raise EngineError("no policy is loaded", hint="call load_policy first")
        return self._loaded.set_aside

    @property
    def pid(self) -> int | None:
        """The id of vLLM's process, if one runs."""
        return self._current.process.pid if self._current.process else None

    def start(self) -> None:
        """Start the process, so that the first policy need not wait for it."""
        question = Frame({"kind": "start", "options": self._options})
        self._retrying(lambda: self._last(question, self._patience.open_s))

    def stop(self) -> None:
        """Kill the process at once, whatever it does: calls that wait for it raise EngineError. The
        engine has no policy until the next one is loaded.
        """
        self._loaded = None
        self._current.stop()

    def close(self) -> None:
        """End the process; the engine starts another when it is used again."""
        with self._weights.replaced():
            self._current.drop()

    def load_policy(self, folder: Path, version: PolicyVersion) -> None:
        """Load a policy folder, in place when only weights differ from the loaded policy's."""
        if not folder.is_dir():
            raise EngineError(f"no policy folder at {folder}")
        with self._weights.replaced():
            # No policy until the new one is complete: a mixture must never generate.
            self._loaded = None
            self._current.is_stopped = False
            folder = folder.resolve()
            files, listed = _files(folder), set_aside_in(folder)
            done = self._retrying(lambda: self._open(folder))
            shape = frames.shape_of(done)
            self._loaded = _Loaded(version, folder, shape, listed, files)
        in_place = bool(done.header.get("in_place"))
        logger.info("policy loaded", extra={"policy_version": version, "in_place": in_place})

    def generate(
        self,
        requests: Sequence[Request],
        *,
        proof: ProofRecipe,
        watch: Watch | None = None,
        due: int = 0,
    ) -> list[Completion]:
        """Return the completions in the order asked."""

        def over(made: Progress, before: Collection[Completion]) -> None:
            if watch is not None:
                tokens = sum(len(each.tokens) for each in before)
                ended, ended_tokens = len(before) + made.ended, tokens + made.ended_tokens
                watch(Progress(tokens + made.tokens, ended, ended_tokens))

        with self._weights.used():
            self._shape()
            for request in requests:
                require_samplable(request)
                self._require_fits(request.prompt_tokens, request.max_new_tokens)
            return self._answers(
                requests,
                lambda asked: frames.generate_frame(asked, proof, due),
                lambda frame, asked: frames.completion_of(
                    frame, [request.max_new_tokens for request in asked]
                ),
                over,
            )

    def examine(
        self, samples: Sequence[Sample], *, proof: ProofRecipe, temperature: float
    ) -> list[Examined]:
        """Return what the policy shows of every sample."""
        with self._weights.used():
            made: list[Examined] = []
            for part in self._parts([(s.prompt_tokens, s.completion_tokens) for s in samples]):
                made += self._answers(
                    samples[part],
                    lambda asked: frames.examine_frame(asked, proof, temperature),
                    frames.examined_of,
                )
        return made

    def prove(
        self, samples: Sequence[tuple[Tokens, Tokens]], *, proof: ProofRecipe
    ) -> list[list[bytes]]:
        """Return the TOPLOC proofs of every (prompt, completion)."""
        with self._weights.used():
            made: list[Completion] = []
            for part in self._parts(samples):
                made += self._answers(
                    samples[part],
                    lambda asked: frames.prove_frame(asked, proof),
                    lambda frame, asked: frames.completion_of(frame, [len(c) for _, c in asked]),
                )
        return [each.proofs for each in made]

    def encode(self, text: Prompt, *, is_start: bool = True) -> tuple[int, ...]:
        """Return the token ids of a prompt, which may stand within a sequence."""
        question = frames.prompt_frame(text, is_start)
        with self._weights.used():
            self._shape()
            done = self._retrying(lambda: self._ask(question))
        return tuple(map(int, done.header["tokens"]))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of a completion without EOS and special tokens."""
        question = Frame({"kind": "decode", "tokens": list(map(int, tokens))})
        with self._weights.used():
            self._shape()
            done = self._retrying(lambda: self._ask(question))
        return str(done.header["text"])

    # Questions to one process; these raise ProcessLost.

    def _open(self, folder: Path) -> Frame:
        question = Frame({"kind": "open", "folder": str(folder), "options": self._options})
        try:
            done = self._last(question, self._patience.open_s)
            if done.header.get("other"):
                self._current.drop()
                done = self._last(question, self._patience.open_s)
        except EngineError:
            if not self._current.has_policy:
                # The process may hold half a model. If its weights were not touched, it can go on.
                self._current.drop()
            raise
        except BaseException:
            # An interrupt, perhaps while weights were being changed.
            self._current.drop(within_s=0)
            raise
        self._current.has_policy = True
        return done

    def _ask(self, question: Frame) -> Frame:
        self._hold()
        return self._last(question, self._patience.silence_s)

    def _answers(
        self,
        samples: Sequence[S],
        ask: Callable[[Sequence[S]], Frame],
        read: Callable[[Frame, Sequence[S]], tuple[int, T]],
        over: Callable[[Progress, Collection[T]], None] = lambda _made, _before: None,
    ) -> list[T]:
        """Return the answer about every sample; answers of a lost process are kept.

        `over` is called with the process's progress and the answers that were there before.
        """
        made: dict[int, T] = {}

        def work() -> None:
            self._hold()
            before = list(made.values())
            places = [place for place in range(len(samples)) if place not in made]
            asked = [samples[place] for place in places]
            for frame in self._current.ask(ask(asked), self._patience.silence_s):
                if frame.kind in ("completion", "examined"):
                    place, found = read(frame, asked)
                    made[places[place]] = found
                elif progress := frames.progress_of(frame):
                    over(progress, before)
            if len(made) != len(samples):
                raise ProcessLost(f"{len(made)} of {len(samples)} samples were answered")

        if samples:
            self._retrying(work)
        return [made[place] for place in range(len(samples))]

    def _last(self, question: Frame, silence_s: float) -> Frame:
        *_, done = self._current.ask(question, silence_s)
        return done

    # What happens when it fails.

    def _retrying(self, work: Callable[[], T]) -> T:
        """Return the result of work; when its process is lost, try again in a new one."""
        for failures in range(1, self._patience.restarts + 2):
            process = self._current.running()
            try:
                return work()
            except (ProcessLost, ChannelBroken) as error:
                last = error
                self._current.drop(process, within_s=0)
                logger.warning(
                    "the engine's process failed", extra={"error": str(error), "failures": failures}
                )
        kind = EngineSilent if isinstance(last, ProcessSilent) else EngineError
        raise kind(
            f"the engine's process failed {failures} times in a row, last: {last}",
            hint="use less memory (fewer --max-rows, --dtype bfloat16), or --engine transformers",
        )

    def _hold(self) -> None:
        """Load the policy again if the process was started after it had been loaded."""
        with self._opening:
            if self._current.has_policy:
                return
            loaded = self._loaded
            if loaded is None:
                raise EngineError("the policy could not be opened again")
            try:
                if _files(loaded.folder) != loaded.files:
                    raise EngineError(f"policy folder {loaded.folder} changed while it was loaded")
                if frames.shape_of(self._open(loaded.folder)) != loaded.shape:
                    raise EngineError(f"policy folder {loaded.folder} is another policy now")
            except EngineError:
                self._loaded = None
                raise

    def _parts(self, samples: Sequence[tuple[Tokens, Tokens]]) -> Iterator[slice]:
        """Yield slices that fit into one question; raises SampleUnfit before anything is asked."""
        for prompt, completion in samples:
            self._require_fits(prompt, len(completion), completion)
        return frames.parts([len(prompt) + len(completion) for prompt, completion in samples])

    def _require_fits(self, prompt: Tokens, new_tokens: int, completion: Tokens = ()) -> None:
        shape = self._shape()
        require_fits(
            prompt,
            new_tokens,
            completion,
            vocab_size=shape.vocab_size,
            context=shape.context,
            room=self._context,
        )

    def _find_python(self) -> Path:
        return Path(sys.executable)

    def _shape(self) -> PolicyShape:
        if self._loaded is None:
            raise EngineError("no policy is loaded", hint="call load_policy first")
        return self._loaded.shape


class VllmEngine(ProcessEngine):
    """InferenceEngine on vLLM, in an environment of its own.

    Raises EngineError at once when that environment is missing or unfit. A policy is spread over
    `tensor_parallel` devices, which `device` names: "cuda" for the first ones visible, or for
    example "cuda:2+3".
    """

    HOSTS = "vllm"
    BATCH_TOKENS = 2048

    def _find_python(self) -> Path:
        python = find_python()
        require_usable(python)
        return python


class _CurrentProcess:
    """The running process, if any; the first question starts it."""

    def __init__(self, python: Path, environ: Mapping[str, str], child: Path) -> None:
        self._python = python
        self._environ = environ
        self._child = child
        self.process: EngineProcess | None = None
        self.has_policy = False
        self.is_stopped = False
        """Whether no process may be started."""
        self._changing = threading.Lock()

    def running(self) -> EngineProcess:
        """Return the process, after starting it if none runs; raises EngineError when stopped."""
        with self._changing:
            if self.is_stopped:
                raise EngineError("the engine was stopped", hint="load a policy to go on")
            if self.process is None:
                self.process = EngineProcess(self._python, self._environ, child=self._child)
            return self.process

    def ask(self, question: Frame, silence_s: float) -> Iterator[Frame]:
        """Yield the answer's frames; starts a process when none runs."""
        return self.running().ask(question, silence_s=silence_s)

    def stop(self) -> None:
        """End the running process at once, and start no other."""
        with self._changing:
            self.is_stopped = True
        self.drop(within_s=0)

    def drop(self, lost: EngineProcess | None = None, *, within_s: float = END_S) -> None:
        """End the running process, if any; with `lost`, only if it is that one. It has `within_s`
        seconds to end by itself.
        """
        with self._changing:
            process = self.process
            if process is None or lost not in (None, process):
                return
            self.process, self.has_policy = None, False
        process.close(within_s=within_s)


def _files(folder: Path) -> list[tuple[str, int, int]]:
    """Return name, size and modification time of a folder's files; raises EngineError."""
    try:
        found = [(path.name, path.stat()) for path in sorted(folder.iterdir())]
    except OSError as error:
        raise EngineError(f"policy folder {folder} cannot be read: {error}") from error
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in found]
