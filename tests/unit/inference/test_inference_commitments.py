"""Proofs that grow with the decode loop."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.inference import commitments
from muster.inference.commitments import Commitments
from muster.protocol.recipe import ProofRecipe
from muster.toploc import build_proofs

Patterns = np.ndarray[tuple[int, ...], np.dtype[np.uint16]]


def hidden_states(lengths: list[int]) -> list[Patterns]:
    random = np.random.default_rng(0)
    return [random.integers(0, 0x7F00, (length, 6)).astype(np.uint16) for length in lengths]


def stream(samples: list[Patterns], proof: ProofRecipe) -> list[list[bytes]]:
    lengths = np.array([len(sample) for sample in samples])
    grown = Commitments(len(samples), 6, int(lengths.max()), proof)
    for position in range(int(lengths.max())):
        live = np.flatnonzero(lengths > position)
        rows = np.stack([samples[i][position] for i in live])
        grown.add(live, rows, position, lengths[live] == position + 1)
    return grown.finish()


@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.integers(1, 6))
def test_streamed_proofs_equal_proofs_of_the_whole(lengths: list[int], chunk_tokens: int) -> None:
    proof = ProofRecipe(chunk_tokens=chunk_tokens, topk=8)
    samples = hidden_states(lengths)
    expected = [build_proofs(s, chunk_tokens=chunk_tokens, topk=8) for s in samples]
    assert stream(samples, proof) == expected


def test_streamed_proofs_do_not_depend_on_how_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    samples, proof = hidden_states([9, 4, 12]), ProofRecipe(chunk_tokens=4, topk=8)
    together = stream(samples, proof)
    monkeypatch.setattr(commitments, "_PENDING_ELEMENTS", 1)
    assert stream(samples, proof) == together
