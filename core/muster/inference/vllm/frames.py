"""The protocol between the engine and its process: frames over a stream socket.

    engine -> process           process -> engine, per question
    open, encode, decode        done, or refused, or broken
    generate                    completion per sample, alive now and then, done
    prove                       completion per sample, alive now and then, done
    examine                     examined per sample, alive now and then, done, or nonsense
    cancel                      no answer: the answer to another question stops

Questions are answered side by side; the frames of an answer carry its question's number under "id".
A frame is a JSON header and a body: samples and completions as JSON, findings as raw bytes,
little-endian, some tens of bytes a token. Hidden states and logits do not leave the process. Both
ends run this code. Neither trusts the other's lengths: a frame that is too long is refused before
anything is allocated, and every wait has a deadline. Nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import numpy as np
from pydantic import ConfigDict, PositiveInt, TypeAdapter, ValidationError

from muster.inference.engine import Completion, Examined, Progress, Replayed, Request, Sample
from muster.protocol.prompts import Part, Prompt
from muster.protocol.recipe import ProofRecipe
from muster.toploc import ChunkResult
from muster.toploc.projections import VALUES

BATCH_TOKENS = 1 << 20
"""Most tokens of the samples in one question, unless it is a single sample."""
MAX_HEADER_BYTES = 16 << 20
"""Most bytes of a header."""
MAX_BODY_BYTES = 256 << 20
"""Most bytes of a body; senders split larger ones."""

Tokens = Sequence[int]
Ids = tuple[int, ...]
T = TypeVar("T")


class ChannelBroken(Exception):
    """The other end does not follow the format, or is gone."""


class ChannelClosed(ChannelBroken):
    """The other end is gone."""


class ChannelSilent(Exception):
    """The other end did not take or say anything in time."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message."""

    header: dict[str, Any]
    """Its kind, under "kind", and its small values."""
    body: bytes = b""
    """Its arrays."""

    @property
    def kind(self) -> str:
        """The kind of message."""
        return str(self.header.get("kind"))


class Channel:
    """One end of a socket pair. One thread may send while another receives."""

    def __init__(self, sock: socket.socket, *, send_s: float | None = None) -> None:
        """`send_s` bounds the seconds for which the other end may take nothing."""
        whole, part = divmod(send_s or 0.0, 1)
        # Not settimeout, which would apply to both directions.
        limit = struct.pack("@ll", int(whole), int(part * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._socket = sock
        self._messages = Connection(os.dup(sock.fileno()))

    def send(self, frame: Frame) -> None:
        """Send a frame; raises ChannelBroken, and ChannelSilent when nobody takes it in time."""
        header = json.dumps(frame.header, separators=(",", ":")).encode()
        if len(header) > MAX_HEADER_BYTES or len(frame.body) > MAX_BODY_BYTES:
            raise ValueError(f"a frame of {len(header)} + {len(frame.body)} bytes is too long")
        try:
            self._messages.send_bytes(header)
            self._messages.send_bytes(frame.body)
        except BlockingIOError:
            raise ChannelSilent("nothing was taken in time") from None
        except OSError as error:
            raise ChannelClosed(f"the other end is gone: {error}") from error

    def receive(self) -> Frame:
        """Return the next frame; raises ChannelBroken."""
        try:
            raw = self._messages.recv_bytes(MAX_HEADER_BYTES)
            body = self._messages.recv_bytes(MAX_BODY_BYTES)
        except (EOFError, OSError) as error:
            # A connection is not read further after a message that is too long.
            if not self._messages.readable:
                raise ChannelBroken("a frame is too long") from None
            raise ChannelClosed(f"the other end is gone: {error}") from error
        try:
            header = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise ChannelBroken(f"a header does not parse: {error}") from None
        if not isinstance(header, dict):
            raise ChannelBroken("a header is not an object")
        return Frame(header, body)

    def close(self) -> None:
        """Close this end, which ends the waits at both ends."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


# ------------------------------------------------------------------------------------- the policy


@dataclass(frozen=True, slots=True)
class PolicyShape:
    """Sizes of the policy that a process has loaded, and the tokens that end its completions."""

    hidden_size: PositiveInt
    """Width of a hidden state."""
    vocab_size: PositiveInt
    """Logits per position."""
    eos_token_ids: frozenset[int]
    """Ids that end a completion."""
    context: PositiveInt
    """The most positions of a sample."""


_SHAPE = TypeAdapter(PolicyShape)


def shape_of(opened: Frame) -> PolicyShape:
    """Return the shape of the policy that was opened; raises ChannelBroken."""
    return _parsed(_SHAPE, opened.body)


def opened_frame(shape: PolicyShape, *, in_place: bool) -> Frame:
    """Return the answer that a policy was opened, perhaps without a new model."""
    return Frame({"kind": "done", "in_place": in_place}, _SHAPE.dump_json(shape))


# -------------------------------------------------------------------------------------- questions


_BYTES = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")
_REQUESTS = TypeAdapter(tuple[list[Ids], list[tuple[int, int, float, int, int]]])
_PAIRS = TypeAdapter(list[tuple[Ids, Ids]])
_SAMPLES = TypeAdapter(list[Sample], config=_BYTES)
_COMPLETION = TypeAdapter(tuple[int, Completion], config=_BYTES)


def prompt_frame(prompt: Prompt, is_start: bool) -> Frame:
    """Return the question for a prompt's token ids."""
    parts = prompt if isinstance(prompt, str) else [(p.text, p.is_markup) for p in prompt]
    return Frame({"kind": "encode", "is_start": is_start, "prompt": parts})


def prompt_of(frame: Frame) -> Prompt:
    """Return the prompt of a `prompt_frame`."""
    parts: str | list[tuple[str, bool]] = frame.header["prompt"]
    return parts if isinstance(parts, str) else tuple(Part(*part) for part in parts)


def generate_frame(requests: Sequence[Request], proof: ProofRecipe, due: int = 0) -> Frame:
    """Return the question for completions; samples of one prompt share its tokens."""
    places: dict[Ids, int] = {}
    prompt_of = [places.setdefault(request.prompt_tokens, len(places)) for request in requests]
    rows = [
        (place, request.seed, request.temperature, request.max_new_tokens, request.position)
        for place, request in zip(prompt_of, requests, strict=True)
    ]
    header = {"kind": "generate", "proof": proof.model_dump(), "due": due}
    return Frame(header, _REQUESTS.dump_json((list(places), rows)))


def requests_of(frame: Frame) -> list[Request]:
    """Return the requests of a `generate_frame`."""
    prompts, rows = _REQUESTS.validate_json(frame.body)
    return [
        Request(prompts[place], seed, temperature, limit, position)
        for place, seed, temperature, limit, position in rows
    ]


def prove_frame(samples: Sequence[tuple[Tokens, Tokens]], proof: ProofRecipe) -> Frame:
    """Return the question for proofs of completions; each is answered by a completion frame."""
    return Frame(
        {"kind": "prove", "proof": proof.model_dump()},
        _PAIRS.dump_json([(tuple(prompt), tuple(made)) for prompt, made in samples]),
    )


def pairs_of(frame: Frame) -> list[tuple[Ids, Ids]]:
    """Return the samples of a `prove_frame`."""
    return _PAIRS.validate_json(frame.body)


def examine_frame(samples: Sequence[Sample], proof: ProofRecipe, temperature: float) -> Frame:
    """Return the question for the findings about samples."""
    header = {"kind": "examine", "proof": proof.model_dump(), "temperature": temperature}
    return Frame(header, _SAMPLES.dump_json(list(samples)))


def samples_of(frame: Frame) -> list[Sample]:
    """Return the samples of an `examine_frame`."""
    return _SAMPLES.validate_json(frame.body)


def parts(samples: Sequence[int]) -> Iterator[slice]:
    """Yield slices of samples that fit into one question, given their token counts."""
    start = tokens = 0
    for place, count in enumerate(samples):
        if place > start and tokens + count > BATCH_TOKENS:
            yield slice(start, place)
            start, tokens = place, 0
        tokens += count
    if samples:
        yield slice(start, len(samples))


# ---------------------------------------------------------------------------------------- answers


def progress_of(frame: Frame) -> Progress | None:
    """Return the progress of a generation, if a sign of life reports it."""
    said = frame.header.get("made")
    if frame.kind != "alive" or not isinstance(said, list):
        return None
    if len(said) != 3 or not all(isinstance(number, int) for number in said):
        raise ChannelBroken("a sign of life that says nonsense")
    return Progress(*said)


def completion_frame(place: int, completion: Completion) -> Frame:
    """Return the answer about one sample."""
    return Frame({"kind": "completion"}, _COMPLETION.dump_json((place, completion)))


def completion_of(frame: Frame, limits: Sequence[int]) -> tuple[int, Completion]:
    """Return the place and completion of a frame; raises ChannelBroken unless it answers one of
    the samples asked for within its limit.
    """
    place, made = _parsed(_COMPLETION, frame.body)
    if not 0 <= place < len(limits) or not 1 <= len(made.tokens) <= limits[place]:
        raise ChannelBroken(f"sample {place} of {len(limits)} has {len(made.tokens)} tokens")
    return place, made


def examined_frame(place: int, found: Examined) -> Frame:
    """Return the answer about one sample."""
    draws = [
        np.rec.fromarrays([each.margins_T, each.expected_T, each.is_likelier_T], _CHOICE)
        for each in (found.replayed, *found.redrawn)
    ]
    chunks = np.array([astuple(chunk) for chunk in found.chunks], "<f8")
    ends = np.empty(0) if found.ends_T is None else found.ends_T
    numbers = [each.astype("<f8").ravel() for each in (chunks, found.projections, ends)]
    body = b"".join(each.tobytes() for each in (*draws, *numbers))
    return Frame({"kind": "examined", "place": place}, body)


def examined_of(frame: Frame, samples: Sequence[Sample]) -> tuple[int, Examined]:
    """Return the place and findings of a frame; raises ChannelBroken unless it answers one of the
    samples asked about, in full.
    """
    place = frame.header.get("place")
    if not isinstance(place, int) or not 0 <= place < len(samples):
        raise ChannelBroken(f"findings are of sample {place} of {len(samples)}")
    sample = samples[place]
    tokens, draws = len(sample.completion_tokens), 1 + len(sample.redraws)
    chunks_end = _CHUNK_FIELDS * len(sample.proofs)
    ends_start = chunks_end + VALUES * len(sample.shares)
    split = draws * tokens * _CHOICE.itemsize
    if len(frame.body) != split + 8 * (ends_start + (tokens if sample.redraws else 0)):
        raise ChannelBroken(f"{len(frame.body)} bytes are not the findings of {tokens} tokens")
    numbers = np.frombuffer(frame.body[split:], "<f8").astype(np.float64)
    own, *redrawn = (
        Replayed(
            row["margin"].astype(np.float32),
            row["expected"].astype(np.int64),
            row["is_likelier"] != 0,
        )
        for row in np.frombuffer(frame.body[:split], _CHOICE).reshape(draws, tokens)
    )
    return place, Examined(
        replayed=own,
        chunks=tuple(
            _chunk(row) for row in numbers[:chunks_end].reshape(-1, _CHUNK_FIELDS).tolist()
        ),
        projections=numbers[chunks_end:ends_start].reshape(-1, VALUES),
        redrawn=tuple(redrawn),
        ends_T=numbers[ends_start:] if sample.redraws else None,
    )


_CHOICE = np.dtype([("margin", "<f4"), ("expected", "<i4"), ("is_likelier", "u1")])
_CHUNK_FIELDS = len(fields(ChunkResult))


def _chunk(row: list[float]) -> ChunkResult:
    exponents, mean, median, signs, points, decoys = row
    try:
        return ChunkResult(int(exponents), mean, median, int(signs), int(points), int(decoys))
    except (ValueError, OverflowError) as error:
        raise ChannelBroken(f"a chunk's findings are no numbers: {error}") from None


def _parsed(kind: TypeAdapter[T], body: bytes) -> T:
    try:
        return kind.validate_json(body)
    except ValidationError as error:
        raise ChannelBroken(f"an answer does not parse: {error}") from None
