"""The process of vLLM, of a juror's transformers engine, or of one of several: answers an engine's
questions side by side, until the engine is gone.

A thread reads. It ends the process the moment the other end is closed, also in the middle of a
batch, so that no process outlives its worker. A thread answers each question, and threads that
compute share the model's steps. Failures are reported as `refused` (the question cannot be
answered, the process can go on), `nonsense` (examined hidden states have NaN or infinity) or
`broken` (the process must not go on).
"""

from __future__ import annotations

import logging
import os
import queue
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.inference.engine import Completion, Examined, Progress, Request, Room, Sample
from muster.inference.vllm.frames import (
    Channel,
    ChannelBroken,
    Frame,
    PolicyShape,
    Tokens,
    completion_frame,
    examined_frame,
    opened_frame,
    pairs_of,
    prompt_of,
    requests_of,
    samples_of,
)
from muster.inference.vllm.launcher import installed_version, require_version
from muster.protocol.errors import DeviceLost, EngineError, ProofError
from muster.protocol.ids import PolicyVersion
from muster.protocol.recipe import ProofRecipe

if TYPE_CHECKING:
    from muster.inference.vllm.model import HostedPolicy

logger = logging.getLogger(__name__)

ALIVE_S = 1.0
"""Seconds between signs of life in a long answer; more if a step takes longer."""

_ANY = PolicyVersion(0)
"""Placeholder: the process does not know the version of its policy."""

Tick = Callable[[Progress | None], None]
"""Sends a sign of life, and the progress of a generation."""


def serve(number: int) -> None:
    """Answer questions from a socket until its other end is closed; does not return."""
    channel = Channel(socket.socket(fileno=number))
    Host(channel).serve()


class _Cancelled(Exception):
    """Nobody waits for the answer any more."""


class _Answer:
    """The answer to one question."""

    def __init__(self, say: Callable[[Frame], None], number: int) -> None:
        self._say, self._number = say, number
        self._told = time.monotonic()
        self.is_cancelled = False

    def say(self, frame: Frame) -> None:
        """Send a part of it."""
        self._say(Frame({**frame.header, "id": self._number}, frame.body))

    def fail(self, kind: str, message: str, hint: str | None = None) -> None:
        """Report a failure."""
        self.say(Frame({"kind": kind, "message": message[:4000], "hint": hint}))

    def tick(self, made: Progress | None = None) -> None:
        """Send a sign of life, and the progress of a generation; raises _Cancelled."""
        if self.is_cancelled:
            raise _Cancelled
        now = time.monotonic()
        if now - self._told >= ALIVE_S:
            self._told = now
            said = {} if made is None else {"made": [made.tokens, made.ended, made.ended_tokens]}
            self.say(Frame({"kind": "alive", **said}))


class Host:
    """The policy, and the questions about it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._questions: queue.Queue[Frame] = queue.Queue(1)
        self._answers: dict[int, _Answer] = {}
        self._saying = threading.Lock()
        self._policy: HostedPolicy | HostedTransformers | None = None

    def serve(self) -> None:
        """Answer questions until the process ends."""
        threading.Thread(target=self._read, name="questions", daemon=True).start()
        while True:
            question = self._questions.get()
            if question.kind in ("open", "start"):
                # vLLM has to start in the main thread.
                self._answer(question)
            else:
                threading.Thread(target=self._answer, args=(question,), daemon=True).start()

    def _read(self) -> None:
        try:
            while True:
                frame = self._channel.receive()
                number = frame.header["id"]
                if frame.kind != "cancel":
                    self._answers[number] = _Answer(self._say, number)
                    self._questions.put(frame)
                elif answer := self._answers.get(number):
                    answer.is_cancelled = True
        except ChannelBroken:
            # Not sys.exit: other threads may be in the middle of a step that takes minutes.
            os._exit(0)

    def _say(self, frame: Frame) -> None:
        with self._saying:
            self._channel.send(frame)

    def _answer(self, question: Frame) -> None:
        ways: dict[str, Callable[[Frame, _Answer], Iterator[Frame]]] = {
            "start": self._start,
            "open": self._open,
            "generate": self._generate,
            "prove": self._prove,
            "examine": self._examine,
            "encode": self._encode,
            "decode": self._decode,
        }
        answer = self._answers[question.header["id"]]
        try:
            for frame in ways[question.kind](question, answer):
                answer.say(frame)
        except _Cancelled:
            pass
        except ProofError as error:
            if question.kind == "examine":
                # The samples or the policy are at fault, not the engine.
                answer.fail("nonsense", str(error))
            else:
                answer.fail("refused", f"the policy computes nonsense: {error}")
        except DeviceLost as error:
            answer.fail("broken", str(error))
        except EngineError as error:
            answer.fail("refused", str(error), error.hint)
        except Exception as error:  # vLLM may raise anything: the engine starts another process
            logger.exception("vLLM failed")
            answer.fail("broken", f"{type(error).__name__}: {error}")
        finally:
            del self._answers[question.header["id"]]

    def _start(self, question: Frame, _answer: _Answer) -> Iterator[Frame]:
        if question.header["options"]["hosts"] == "transformers":
            import muster.inference.transformers_engine  # noqa: F401  # takes seconds
        yield Frame({"kind": "done"})

    def _open(self, question: Frame, _answer: _Answer) -> Iterator[Frame]:
        folder, options = Path(question.header["folder"]), dict(question.header["options"])
        in_place = False
        if self._policy is None:
            self._policy = _open(options.pop("hosts"), folder, options)
        elif not (in_place := self._policy.swap(folder)):
            # Another model: vLLM frees its memory only when its process ends.
            yield Frame({"kind": "done", "other": True})
            return
        yield opened_frame(self._policy.shape, in_place=in_place)

    def _generate(self, question: Frame, answer: _Answer) -> Iterator[Frame]:
        requests, proof = requests_of(question), _proof_of(question)
        due = int(question.header["due"])
        for place, made in self._held().generate(requests, proof, due=due, tick=answer.tick):
            yield completion_frame(place, made)
        yield Frame({"kind": "done"})

    def _prove(self, question: Frame, answer: _Answer) -> Iterator[Frame]:
        pairs, proof = pairs_of(question), _proof_of(question)
        for place, made in self._held().prove(pairs, proof, tick=answer.tick):
            yield completion_frame(place, made)
        yield Frame({"kind": "done"})

    def _examine(self, question: Frame, answer: _Answer) -> Iterator[Frame]:
        samples, proof = samples_of(question), _proof_of(question)
        temperature = float(question.header["temperature"])
        for found in self._held().examine(samples, proof, temperature, tick=answer.tick):
            yield examined_frame(*found)
        yield Frame({"kind": "done"})

    def _encode(self, question: Frame, _answer: _Answer) -> Iterator[Frame]:
        prompt = prompt_of(question)
        tokens = self._held().encode(prompt, is_start=question.header["is_start"])
        yield Frame({"kind": "done", "tokens": tokens})

    def _decode(self, question: Frame, _answer: _Answer) -> Iterator[Frame]:
        text = self._held().decode(question.header["tokens"])
        yield Frame({"kind": "done", "text": text})

    def _held(self) -> Any:
        if self._policy is None:
            raise EngineError("no policy is open")
        return self._policy


def _open(hosts: str, folder: Path, options: dict[str, Any]) -> HostedPolicy | HostedTransformers:
    if hosts == "transformers":
        return HostedTransformers(folder, options)
    require_version(installed_version())
    from muster.inference.vllm.model import HostedPolicy, Options

    options.pop("threads")  # set by the environment
    return HostedPolicy(folder, Options(**options))


def _proof_of(question: Frame) -> ProofRecipe:
    return ProofRecipe.model_validate(question.header["proof"])


class HostedTransformers:
    """A policy in transformers, as `HostedPolicy` is one in vLLM.

    Completions are sent when all of them are done.
    """

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        """Open a folder; raises EngineError when it is unusable."""
        from muster.inference.transformers_engine import TransformersEngine

        # The process sees one GPU, if it may use any.
        device = "cuda" if options["device"].startswith("cuda") else options["device"]
        room = ("context", "memory_share", "max_rows", "batch_tokens")
        self._is_on_cpu = device == "cpu"
        self._engine = TransformersEngine(
            options["dtype"],
            threads=options["threads"],
            device=device,
            room=Room(**{name: options[name] for name in room}),
        )
        self.swap(folder)

    def swap(self, folder: Path) -> bool:
        """Load another folder, which is always possible; raises EngineError."""
        engine = self._engine
        if self._is_on_cpu:
            _bound_memory(folder)
        engine.load_policy(folder, _ANY)
        config = engine.model.config.get_text_config()
        self.shape = PolicyShape(
            hidden_size=engine.hidden_size,
            vocab_size=engine.vocab_size,
            eos_token_ids=engine.eos_token_ids,
            context=getattr(config, "max_position_embeddings", None) or 1 << 31,
        )
        return True

    def encode(self, text: str, *, is_start: bool) -> list[int]:
        """Return the token ids of a prompt, or of text within a sequence."""
        return list(self._engine.encode(text, is_start=is_start))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of a completion without EOS and special tokens."""
        return self._engine.decode(tokens)

    def generate(
        self, requests: Sequence[Request], proof: ProofRecipe, *, due: int, tick: Tick
    ) -> Iterator[tuple[int, Completion]]:
        """Yield every request's place and completion."""
        yield from enumerate(self._engine.generate(requests, proof=proof, watch=tick, due=due))

    def prove(
        self, samples: Sequence[tuple[Tokens, Tokens]], proof: ProofRecipe, *, tick: Tick
    ) -> Iterator[tuple[int, Completion]]:
        """Yield every sample's place and its completion with proofs."""
        # A sign of life after every pass: many long samples take a slow GPU minutes.
        for batch in self._engine.plan(samples):
            part = [samples[place] for place in batch]
            made = self._engine.prove(part, proof=proof)
            for place, (_, tokens), proofs in zip(batch, part, made, strict=True):
                yield place, Completion(tuple(tokens), proofs)
            tick(None)

    def examine(
        self, samples: Sequence[Sample], proof: ProofRecipe, temperature: float, *, tick: Tick
    ) -> Iterator[tuple[int, Examined]]:
        """Yield every sample's place and findings."""
        pairs = [(each.prompt_tokens, each.completion_tokens) for each in samples]
        for batch in self._engine.plan(pairs):
            part = [samples[place] for place in batch]
            found = self._engine.examine(part, proof=proof, temperature=temperature)
            yield from zip(batch, found, strict=True)
            tick(None)


def _bound_memory(folder: Path) -> None:
    """Let this process take no more memory than is free now, or half of all, beside the mapped
    weights of a folder: a stranger's policy must not cost other processes theirs.
    """
    if sys.platform != "linux":
        return
    from muster.lifecycle import available_memory_bytes, total_memory_bytes

    pages = int(Path("/proc/self/statm").read_text().split()[5])
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    # In a container, files that were just fetched count as used memory.
    free = max(available_memory_bytes(), total_memory_bytes() // 2)
    most = pages * resource.getpagesize() + free + weights
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (bound, hard))
