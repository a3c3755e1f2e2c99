"""Bytes that hostile workers might send as proofs, and their right outcomes.

corpus.json keeps inputs that crash or fool the `toploc` library, some for each reason of refusal,
and whatever fuzzing finds: add the input it prints, with the outcome that is right.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from muster.protocol.errors import ProofError
from muster.toploc import build_proofs, split_proofs
from muster.toploc.chunks import Patterns

CORPUS = Path(__file__).with_name("corpus.json")
REASONS = {"count", "length", "modulus", "coefficient"}


@dataclass(frozen=True, slots=True)
class Sample:
    """Shape of a sample and of its proofs."""

    tokens: int
    hidden_size: int
    chunk_tokens: int
    topk: int

    def split(self, joined: bytes) -> list[bytes] | str:
        """Return the proofs, or the reason of refusal."""
        try:
            return split_proofs(joined, **asdict(self))
        except ProofError as error:
            return error.reason

    def hidden(self, seed: int = 0) -> Patterns:
        """Finite hidden states of the shape."""
        shape = (self.tokens, self.hidden_size)
        return np.random.default_rng(seed).integers(0, 0x7F80, shape).astype(np.uint16)

    def honest(self) -> list[bytes]:
        """The honest proofs of the hidden states."""
        return build_proofs(self.hidden(), chunk_tokens=self.chunk_tokens, topk=self.topk)


def read_corpus() -> list[tuple[str, Sample, bytes, str]]:
    """Return (reason to keep it, sample, bytes, outcome); the outcome is a reason or "proofs"."""
    return [
        (entry["why"], Sample(**entry["sample"]), bytes.fromhex(entry["bytes"]), entry["outcome"])
        for entry in json.loads(CORPUS.read_text())
    ]


samples = st.builds(
    Sample,
    tokens=st.integers(1, 9),
    hidden_size=st.sampled_from([1, 2, 5, 32, 257]),
    chunk_tokens=st.integers(1, 4),
    topk=st.sampled_from([1, 3, 16, 17, 128]),
)
words = st.sampled_from([0, 1, 2, 127, 128, 65496, 65497, 65498, 65535]) | st.integers(0, 0xFFFF)


@st.composite
def hostile_bytes(draw: st.DrawFn, sample: Sample) -> bytes:
    """Random bytes, or honest proofs with words changed, pieces cut, repeated, moved or added."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=600))
    joined = b"".join(sample.honest())
    for _ in range(draw(st.integers(0, 4))):
        joined = draw(_mutations(joined))
    return joined


@st.composite
def _mutations(draw: st.DrawFn, joined: bytes) -> bytes:
    start = draw(st.integers(0, len(joined)))
    end = draw(st.integers(start, len(joined)))
    piece = joined[start:end]
    kind = draw(st.sampled_from(["word", "cut", "repeat", "keep", "swap", "add"]))
    if kind == "word":
        place = start // 2 * 2
        return joined[:place] + draw(words).to_bytes(2, "big") + joined[place + 2 :]
    if kind == "cut":
        return joined[:start] + joined[end:]
    if kind == "repeat":
        return joined[:end] + piece + joined[end:]
    if kind == "keep":
        return piece
    if kind == "swap":
        return piece + joined[:start] + joined[end:]
    return joined + draw(st.binary(max_size=260))
