"""The protocol between the engine and its process: frames over a stream socket.

    engine -> process           process -> engine, per question
    open, encode, decode        done, or refused, or broken
    generate                    completion per sample, alive now and then, done
    prove                       completion per sample, alive now and then, done
    examine                     examined per sample, alive now and then, done, or nonsense
    cancel                      no answer: the answer to another question stops

Questions are answered side by side; the frames of an answer carry its question's number under "id".
A frame is a JSON header and raw bytes, little-endian: token ids as int32, proofs, and findings,
some tens of bytes a token. Hidden states and logits do not leave the process. Both ends run this
code. Neither trusts the other's lengths: a frame that is too long is refused before anything is
allocated, and every wait has a deadline. Nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from typing import Any

import numpy as np

from muster.inference.engine import (
    Completion,
    Examined,
    Progress,
    Redraw,
    Replayed,
    Request,
    Sample,
    Share,
)
from muster.protocol.ids import Hash32
from muster.protocol.prompts import Part, Prompt
from muster.toploc import ChunkResult
from muster.toploc.projections import VALUES

BATCH_TOKENS = 1 << 20
"""Most tokens of the samples in one question, unless it is a single sample."""
MAX_HEADER_BYTES = 16 << 20
"""Most bytes of a header."""
MAX_BODY_BYTES = 256 << 20
"""Most bytes of a body; senders split larger ones."""

Tokens = Sequence[int]

_LENGTHS = struct.Struct("<II")
_RECEIVE_BYTES = 1 << 20


class ChannelBroken(Exception):
    """The other end does not follow the format, or is gone."""


class ChannelClosed(ChannelBroken):
    """The other end is gone."""


class ChannelSilent(Exception):
    """The other end did not receive or send anything in time."""


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
    """One end of the socket. One thread may send while another receives without a deadline."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def send(self, frame: Frame, *, within_s: float | None = None) -> None:
        """Send a frame; raises ChannelBroken, and ChannelSilent when nobody takes it in time."""
        header = json.dumps(frame.header, separators=(",", ":")).encode()
        if len(header) > MAX_HEADER_BYTES or len(frame.body) > MAX_BODY_BYTES:
            raise ValueError(f"a frame of {len(header)} + {len(frame.body)} bytes is too long")
        # Not settimeout, which would apply to both directions.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(within_s))
        try:
            self._socket.sendall(_LENGTHS.pack(len(header), len(frame.body)) + header)
            self._socket.sendall(frame.body)
        except BlockingIOError:
            raise ChannelSilent(f"nothing was taken for {within_s} s") from None
        except OSError as error:
            raise ChannelClosed(f"the other end is gone: {error}") from error

    def receive(self, *, within_s: float | None = None) -> Frame:
        """Return the next frame; raises ChannelBroken, and ChannelSilent if it is not complete in
        time.
        """
        deadline = None if within_s is None else time.monotonic() + within_s
        header_bytes, body_bytes = _LENGTHS.unpack(self._read(_LENGTHS.size, deadline))
        if header_bytes > MAX_HEADER_BYTES or body_bytes > MAX_BODY_BYTES:
            raise ChannelBroken(f"a frame of {header_bytes} + {body_bytes} bytes is none")
        raw = self._read(header_bytes, deadline)
        body = self._read(body_bytes, deadline)
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

    def _read(self, size: int, deadline: float | None) -> bytes:
        parts: list[bytes] = []
        missing = size
        while missing:
            part = self._receive(min(missing, _RECEIVE_BYTES), deadline)
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def _receive(self, most: int, deadline: float | None) -> bytes:
        # Not 0, which would mean not to wait: bytes that have already arrived are still read.
        wait_s = None if deadline is None else max(deadline - time.monotonic(), 1e-3)
        try:
            self._socket.settimeout(wait_s)
            part = self._socket.recv(most)
        except TimeoutError:
            raise ChannelSilent("nothing was said in time") from None
        except OSError as error:
            raise ChannelClosed(f"the other end is gone: {error}") from error
        if not part:
            raise ChannelClosed("the other end is gone")
        return part


def _timeval(seconds: float | None) -> bytes:
    """Return the kernel's struct of a time limit; None for no limit."""
    whole, part = divmod(seconds or 0.0, 1)
    return struct.pack("@ll", int(whole), int(part * 1e6))


# ------------------------------------------------------------------------------- the policy


@dataclass(frozen=True, slots=True)
class PolicyShape:
    """Sizes of the policy that a process has loaded, and the tokens that end its completions."""

    hidden_size: int
    """Width of a hidden state."""
    vocab_size: int
    """Logits per position."""
    eos_token_ids: frozenset[int]
    """Ids that end a completion."""
    context: int
    """The most positions of a sample."""

    def to_header(self) -> dict[str, Any]:
        """Return the shape as a frame's header holds it."""
        return {**asdict(self), "eos_token_ids": sorted(self.eos_token_ids)}

    @staticmethod
    def from_header(header: dict[str, Any]) -> PolicyShape:
        """Return the shape of a header; raises ChannelBroken."""
        try:
            numbers = [int(header[name]) for name in ("hidden_size", "vocab_size", "context")]
            hidden_size, vocab_size, context = numbers
            eos = frozenset(map(int, header["eos_token_ids"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ChannelBroken(f"facts of a policy do not parse: {error}") from None
        if min(numbers) < 1:
            raise ChannelBroken(f"a policy has sizes {numbers}")
        return PolicyShape(hidden_size, vocab_size, eos, context)


def pack(rows: Iterable[Tokens]) -> bytes:
    """Return rows of token ids, one after the other."""
    return b"".join(np.asarray(row, "<i4").tobytes() for row in rows)


def unpack(body: bytes, lengths: Sequence[int]) -> list[tuple[int, ...]]:
    """Return rows of token ids; raises ChannelBroken when they are not of these lengths."""
    if len(body) != 4 * sum(lengths) or min(lengths, default=0) < 0:
        raise ChannelBroken(f"{len(body)} bytes are not {sum(lengths)} token ids")
    ids = np.frombuffer(body, "<i4").tolist()
    rows, start = [], 0
    for length in lengths:
        rows.append(tuple(ids[start : start + length]))
        start += length
    return rows


# ------------------------------------------------------------------------------------- generation


def prompt_frame(prompt: Prompt, is_start: bool) -> Frame:
    """Return the question for a prompt's token ids."""
    # A problem's text may have surrogates, which UTF-8 cannot encode.
    texts = [prompt] if isinstance(prompt, str) else [part.text for part in prompt]
    pieces = [text.encode(errors="surrogatepass") for text in texts]
    header = {
        "kind": "encode",
        "is_start": is_start,
        "sizes": [len(piece) for piece in pieces],
        "markup": None if isinstance(prompt, str) else [part.is_markup for part in prompt],
    }
    return Frame(header, b"".join(pieces))


def prompt_of(frame: Frame) -> Prompt:
    """Return the prompt of a `prompt_frame`."""
    pieces = _split(frame.body, 0, frame.header["sizes"])
    texts = [piece.decode(errors="surrogatepass") for piece in pieces]
    markup = frame.header["markup"]
    if markup is None:
        return texts[0]
    return tuple(Part(text, is_markup) for text, is_markup in zip(texts, markup, strict=True))


def generate_frame(
    requests: Sequence[Request], chunk_tokens: int, topk: int, due: int = 0
) -> Frame:
    """Return the question for completions; samples of one prompt share its tokens."""
    places: dict[tuple[int, ...], int] = {}
    prompt_of = [places.setdefault(r.prompt_tokens, len(places)) for r in requests]
    header = {
        "kind": "generate",
        "prompts": [len(prompt) for prompt in places],
        "prompt_of": prompt_of,
        "seeds": [r.seed for r in requests],
        "temperatures": [r.temperature for r in requests],
        "limits": [r.max_new_tokens for r in requests],
        "positions": [r.position for r in requests],
        "due": due,
        "proof": [chunk_tokens, topk],
    }
    return Frame(header, pack(places))


def requests_of(frame: Frame) -> list[Request]:
    """Return the requests of a `generate_frame`."""
    header = frame.header
    prompts = unpack(frame.body, header["prompts"])
    names = ("prompt_of", "seeds", "temperatures", "limits", "positions")
    rows = zip(*(header[name] for name in names), strict=True)
    return [Request(prompts[i], seed, float(t), *rest) for i, seed, t, *rest in rows]


def completion_frame(place: int, completion: Completion) -> Frame:
    """Return the answer about one sample."""
    header = {
        "kind": "completion",
        "place": place,
        "tokens": len(completion.tokens),
        "proofs": [len(proof) for proof in completion.proofs],
    }
    return Frame(header, pack([completion.tokens]) + b"".join(completion.proofs))


def completion_of(frame: Frame, limits: Sequence[int]) -> tuple[int, Completion]:
    """Return the place and completion of a frame; raises ChannelBroken unless it answers one of
    the samples asked for within its limit.
    """
    try:
        place, tokens = int(frame.header["place"]), int(frame.header["tokens"])
        sizes = [int(size) for size in frame.header["proofs"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ChannelBroken(f"a completion does not parse: {error}") from None
    if not 0 <= place < len(limits) or not 1 <= tokens <= limits[place]:
        raise ChannelBroken(f"sample {place} of {len(limits)} has {tokens} tokens")
    if min(sizes, default=0) < 0 or 4 * tokens + sum(sizes) != len(frame.body):
        raise ChannelBroken(f"sample {place} has {len(frame.body)} bytes")
    (ids,) = unpack(frame.body[: 4 * tokens], [tokens])
    return place, Completion(ids, list(_split(frame.body, 4 * tokens, sizes)))


def _split(body: bytes, start: int, sizes: Sequence[int]) -> Iterator[bytes]:
    for size in sizes:
        yield body[start : start + size]
        start += size


# -------------------------------------------------------------------------------------- examining


def progress_of(frame: Frame) -> Progress | None:
    """Return the progress of a generation, if a sign of life reports it."""
    said = frame.header.get("made")
    if frame.kind != "alive" or not isinstance(said, list):
        return None
    if len(said) != 3 or not all(isinstance(number, int) for number in said):
        raise ChannelBroken("a sign of life that says nonsense")
    return Progress(*said)


def prove_frame(samples: Sequence[tuple[Tokens, Tokens]], chunk_tokens: int, topk: int) -> Frame:
    """Return the question for proofs of completions; each is answered by a completion frame."""
    header = {
        "kind": "prove",
        "prompts": [len(prompt) for prompt, _ in samples],
        "completions": [len(completion) for _, completion in samples],
        "proof": [chunk_tokens, topk],
    }
    return Frame(header, pack(part for sample in samples for part in sample))


def pairs_of(frame: Frame) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the samples of a `prove_frame`."""
    pairs = zip(frame.header["prompts"], frame.header["completions"], strict=True)
    rows = unpack(frame.body, [length for pair in pairs for length in pair])
    return list(zip(rows[::2], rows[1::2], strict=True))


def examine_frame(
    samples: Sequence[Sample], chunk_tokens: int, topk: int, temperature: float
) -> Frame:
    """Return the question for the findings about samples."""
    header = {
        "kind": "examine",
        "samples": [
            {
                "prompt": len(sample.prompt_tokens),
                "tokens": len(sample.completion_tokens),
                "seed": sample.seed,
                "proofs": [len(proof) for proof in sample.proofs],
                "shares": [(s.seed.hex(), s.first, s.tokens) for s in sample.shares],
                "redraws": [redraw.seed for redraw in sample.redraws],
            }
            for sample in samples
        ],
        "proof": [chunk_tokens, topk],
        "temperature": temperature,
    }
    ids = pack(
        row
        for sample in samples
        for row in (
            sample.prompt_tokens,
            sample.completion_tokens,
            *(redraw.tokens for redraw in sample.redraws),
        )
    )
    return Frame(header, ids + b"".join(proof for sample in samples for proof in sample.proofs))


def samples_of(frame: Frame) -> list[Sample]:
    """Return the samples of an `examine_frame`."""
    asked = frame.header["samples"]
    lengths = [[each["prompt"], *[each["tokens"]] * (1 + len(each["redraws"]))] for each in asked]
    ids = 4 * sum(map(sum, lengths))
    rows = iter(unpack(frame.body[:ids], [length for of_sample in lengths for length in of_sample]))
    proofs = _split(frame.body, ids, [size for each in asked for size in each["proofs"]])
    return [
        Sample(
            prompt_tokens=next(rows),
            completion_tokens=next(rows),
            seed=each["seed"],
            proofs=[next(proofs) for _ in each["proofs"]],
            shares=tuple(
                Share(Hash32(bytes.fromhex(seed)), first, tokens)
                for seed, first, tokens in each["shares"]
            ),
            redraws=tuple(Redraw(seed, next(rows)) for seed in each["redraws"]),
        )
        for each in asked
    ]


def examined_frame(place: int, found: Examined) -> Frame:
    """Return the answer about one sample."""
    parts = [
        column.astype(kind).tobytes()
        for each in (found.replayed, *found.redrawn)
        for column, kind in (
            (each.margins_T, "<f4"),
            (each.expected_T, "<i4"),
            (each.is_likelier_T, "u1"),
        )
    ]
    chunks = np.array([astuple(chunk) for chunk in found.chunks], "<f8")
    parts += [chunks.tobytes(), found.projections.astype("<f8").tobytes()]
    if found.ends_T is not None:
        parts.append(found.ends_T.astype("<f8").tobytes())
    return Frame({"kind": "examined", "place": place}, b"".join(parts))


def examined_of(frame: Frame, samples: Sequence[Sample]) -> tuple[int, Examined]:
    """Return the place and findings of a frame; raises ChannelBroken unless it answers one of the
    samples asked about, in full.
    """
    try:
        place = int(frame.header["place"])
    except (KeyError, TypeError, ValueError) as error:
        raise ChannelBroken(f"findings do not parse: {error}") from None
    if not 0 <= place < len(samples):
        raise ChannelBroken(f"findings are of sample {place} of {len(samples)}")
    sample = samples[place]
    tokens, draws = len(sample.completion_tokens), 1 + len(sample.redraws)
    ends = tokens if sample.redraws else 0
    kinds = ["<f4", "<i4", "u1"] * draws + ["<f8"] * 3
    counts = [tokens] * 3 * draws
    counts += [_CHUNK_FIELDS * len(sample.proofs), VALUES * len(sample.shares), ends]
    sizes = [np.dtype(kind).itemsize * n for kind, n in zip(kinds, counts, strict=True)]
    if sum(sizes) != len(frame.body):
        raise ChannelBroken(f"{len(frame.body)} bytes are not the findings of {tokens} tokens")
    columns = [
        np.frombuffer(part, kind)
        for part, kind in zip(_split(frame.body, 0, sizes), kinds, strict=True)
    ]
    *replays, chunks, projections, odds = columns
    replayed = [
        Replayed(margins.astype(np.float32), expected.astype(np.int64), is_likelier != 0)
        for margins, expected, is_likelier in zip(*(replays[i::3] for i in range(3)), strict=True)
    ]
    return place, Examined(
        replayed=replayed[0],
        chunks=tuple(_chunk(row) for row in chunks.reshape(-1, _CHUNK_FIELDS).tolist()),
        projections=projections.reshape(-1, VALUES).astype(np.float64),
        redrawn=tuple(replayed[1:]),
        ends_T=odds.astype(np.float64) if sample.redraws else None,
    )


_CHUNK_FIELDS = len(fields(ChunkResult))


def _chunk(row: list[float]) -> ChunkResult:
    exponents, mean, median, signs, points, decoys = row
    try:
        return ChunkResult(int(exponents), mean, median, int(signs), int(points), int(decoys))
    except (ValueError, OverflowError) as error:
        raise ChannelBroken(f"a chunk's findings are no numbers: {error}") from None


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
