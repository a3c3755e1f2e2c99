"""What the engine and its process say to each other: frames over a stream socket.

    engine -> process           process -> engine, per question
    open, encode, decode        done, or refused, or broken
    generate                    completion per sample, alive now and then, done
    prefill                     rows per part of a sample, alive now and then, done

A frame is a JSON header and raw bytes: token ids as int32, hidden states as bfloat16 patterns,
logits as float32, all little-endian. Both ends run this code. Neither trusts the other's lengths: a
frame beyond the bounds is an error before anything is allocated, and every wait has a deadline.
Nothing is ever unpickled. Axes: R rows, H hidden units, V vocabulary.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from muster.inference.engine import Completion, Request

ROWS_BYTES = 32 << 20
"""Hidden states and logits that one frame holds, or one row of them."""
BATCH_TOKENS = 1 << 20
"""Tokens asked about in one frame, or one sample."""
MAX_HEADER_BYTES = 16 << 20
"""A longer header is none."""
MAX_BODY_BYTES = 256 << 20
"""A larger body is none; senders divide what is larger."""

Tokens = Sequence[int]

_LENGTHS = struct.Struct("<II")
_RECEIVE_BYTES = 1 << 20


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
    """What it is, under "kind", and its small parts."""
    body: bytes = b""
    """Its arrays."""

    @property
    def kind(self) -> str:
        """What it is."""
        return str(self.header.get("kind"))


class Channel:
    """One end. One thread may send while another receives, if neither sets a deadline: a socket has
    one timeout for both directions.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def send(self, frame: Frame, *, within_s: float | None = None) -> None:
        """Send a frame; raises ChannelBroken, and ChannelSilent when nobody takes it in time."""
        header = json.dumps(frame.header, separators=(",", ":")).encode()
        if len(header) > MAX_HEADER_BYTES or len(frame.body) > MAX_BODY_BYTES:
            raise ValueError(f"a frame of {len(header)} + {len(frame.body)} bytes is too long")
        self._socket.settimeout(within_s)
        try:
            self._socket.sendall(_LENGTHS.pack(len(header), len(frame.body)) + header)
            self._socket.sendall(frame.body)
        except TimeoutError:
            raise ChannelSilent(f"nothing was taken for {within_s} s") from None
        except OSError as error:
            raise ChannelClosed(f"the other end is gone: {error}") from error

    def receive(self, *, within_s: float | None = None) -> Frame:
        """Return the next frame; raises ChannelBroken, and ChannelSilent unless it is whole in
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
        """Close this end; the other one's waits end."""
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
        # Not 0, which would mean without waiting: what has already arrived is still taken.
        wait_s = None if deadline is None else max(deadline - time.monotonic(), 1e-3)
        self._socket.settimeout(wait_s)
        try:
            part = self._socket.recv(most)
        except TimeoutError:
            raise ChannelSilent("nothing was said in time") from None
        except OSError as error:
            raise ChannelClosed(f"the other end is gone: {error}") from error
        if not part:
            raise ChannelClosed("the other end is gone")
        return part


# ------------------------------------------------------------------------------- the policy


@dataclass(frozen=True, slots=True)
class Facts:
    """What a process knows of the policy it holds."""

    hidden_size: int
    """Width of a hidden state."""
    vocab_size: int
    """Logits per position."""
    eos_token_ids: frozenset[int]
    """Ids that end a completion."""
    context: int
    """Positions that the model has."""

    def to_header(self) -> dict[str, Any]:
        """Return the facts as a frame's header holds them."""
        return {**asdict(self), "eos_token_ids": sorted(self.eos_token_ids)}

    @staticmethod
    def from_header(header: dict[str, Any]) -> Facts:
        """Return the facts of a header; raises ChannelBroken."""
        try:
            numbers = [int(header[name]) for name in ("hidden_size", "vocab_size", "context")]
            hidden_size, vocab_size, context = numbers
            eos = frozenset(map(int, header["eos_token_ids"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ChannelBroken(f"facts of a policy do not parse: {error}") from None
        if min(numbers) < 1:
            raise ChannelBroken(f"a policy has sizes {numbers}")
        return Facts(hidden_size, vocab_size, eos, context)


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


def generate_frame(requests: Sequence[Request], chunk_tokens: int, topk: int) -> Frame:
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
        "proof": [chunk_tokens, topk],
    }
    return Frame(header, pack(places))


def requests_of(frame: Frame) -> list[Request]:
    """Return what `generate_frame` was made of."""
    header = frame.header
    prompts = unpack(frame.body, header["prompts"])
    names = ("prompt_of", "seeds", "temperatures", "limits", "positions")
    rows = zip(*(header[name] for name in names), strict=True)
    return [Request(prompts[i], seed, float(t), *rest) for i, seed, t, *rest in rows]


def completion_frame(place: int, completion: Completion) -> Frame:
    """Return one sample's answer."""
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


# ---------------------------------------------------------------------------------------- prefill


def prefill_frame(samples: Sequence[tuple[Tokens, Tokens]]) -> Frame:
    """Return the question for prefills."""
    header = {
        "kind": "prefill",
        "prompts": [len(prompt) for prompt, _ in samples],
        "completions": [len(completion) for _, completion in samples],
    }
    return Frame(header, pack(part for sample in samples for part in sample))


def samples_of(frame: Frame) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return what `prefill_frame` was made of."""
    pairs = zip(frame.header["prompts"], frame.header["completions"], strict=True)
    rows = unpack(frame.body, [length for pair in pairs for length in pair])
    return list(zip(rows[::2], rows[1::2], strict=True))


def rows_frame(
    place: int, start: int, hidden_RH: npt.NDArray[np.uint16], logits_RV: npt.NDArray[np.float32]
) -> Frame:
    """Return a part of one sample's prefill, from row `start` on."""
    header = {"kind": "rows", "place": place, "start": start, "rows": len(hidden_RH)}
    body = hidden_RH.astype("<u2").tobytes() + logits_RV.astype("<f4").tobytes()
    return Frame(header, body)


def rows_of(
    frame: Frame, hidden_size: int, vocab_size: int
) -> tuple[int, int, npt.NDArray[np.uint16], npt.NDArray[np.float32]]:
    """Return place, start, hidden states and logits of a frame; raises ChannelBroken."""
    try:
        place, start, rows = (int(frame.header[name]) for name in ("place", "start", "rows"))
    except (KeyError, TypeError, ValueError) as error:
        raise ChannelBroken(f"rows do not parse: {error}") from None
    split = 2 * rows * hidden_size
    if rows < 1 or len(frame.body) != split + 4 * rows * vocab_size:
        raise ChannelBroken(f"{len(frame.body)} bytes are not {rows} rows")
    hidden_RH = np.frombuffer(frame.body, "<u2", rows * hidden_size).reshape(rows, -1)
    logits_RV = np.frombuffer(frame.body, "<f4", offset=split).reshape(rows, -1)
    return place, start, hidden_RH, logits_RV


def rows_per_frame(hidden_size: int, vocab_size: int) -> int:
    """Return how many rows of a prefill one frame takes."""
    return max(1, ROWS_BYTES // (2 * hidden_size + 4 * vocab_size))


def parts(samples: Sequence[int]) -> Iterator[slice]:
    """Yield slices of samples, given their token counts, that one frame may ask about."""
    start = tokens = 0
    for place, count in enumerate(samples):
        if place > start and tokens + count > BATCH_TOKENS:
            yield slice(start, place)
            start, tokens = place, 0
        tokens += count
    if samples:
        yield slice(start, len(samples))
