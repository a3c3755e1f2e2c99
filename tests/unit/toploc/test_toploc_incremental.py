"""Proofs that grow while decoding goes on."""

import threading

import numpy as np
import pytest
from hypothesis import given, strategies as st

from muster.protocol.errors import ProofError
from muster.toploc import IncrementalBuilder, build_proofs, incremental
from muster.toploc.chunks import Patterns

lengths_of_samples = st.lists(st.integers(1, 12), min_size=1, max_size=5)


def hidden_states(lengths: list[int]) -> list[Patterns]:
    random = np.random.default_rng(0)
    return [random.integers(0, 0x7F00, (length, 6)).astype(np.uint16) for length in lengths]


def stream(samples: list[Patterns], chunk_tokens: int) -> list[list[bytes]]:
    """The samples' proofs, their rows taken in lockstep."""
    lengths = np.array([len(sample) for sample in samples])
    with IncrementalBuilder(chunk_tokens=chunk_tokens, topk=8) as builder:
        for position in range(int(lengths.max())):
            live = np.flatnonzero(lengths > position)
            builder.add(live, np.stack([samples[i][position] for i in live]))
            builder.end(live[lengths[live] == position + 1])
        return [builder.take(request) for request in range(len(samples))]


@given(lengths_of_samples, st.integers(1, 6))
def test_streamed_proofs_equal_proofs_of_the_whole(lengths: list[int], chunk_tokens: int) -> None:
    samples = hidden_states(lengths)
    expected = [build_proofs(s, chunk_tokens=chunk_tokens, topk=8) for s in samples]
    assert stream(samples, chunk_tokens) == expected


@given(lengths_of_samples, st.integers(1, 6), st.integers(1, 9))
def test_rows_of_several_steps_are_taken_as_those_of_each(
    lengths: list[int], chunk_tokens: int, steps: int
) -> None:
    samples = hidden_states(lengths)
    expected = [build_proofs(s, chunk_tokens=chunk_tokens, topk=8) for s in samples]
    with IncrementalBuilder(chunk_tokens=chunk_tokens, topk=8) as builder:
        # Requests with different numbers of rows advance together as long as all have rows.
        heads = [min(len(sample), 1 + i) for i, sample in enumerate(samples)]
        for i, (sample, head) in enumerate(zip(samples, heads, strict=True)):
            builder.extend(np.array([i]), sample[None, :head])
        rests = [sample[head:] for sample, head in zip(samples, heads, strict=True)]
        common = min(map(len, rests))
        for start in range(0, common, steps):
            part = slice(start, min(start + steps, common))
            builder.extend(np.arange(len(samples)), np.stack([rest[part] for rest in rests]))
        for i, rest in enumerate(rests):
            builder.extend(np.array([i]), rest[None, common:])
        builder.end(np.arange(len(samples)))
        assert [builder.take(i) for i in range(len(samples))] == expected


@given(lengths_of_samples)
def test_numbers_of_requests_may_be_used_again(lengths: list[int]) -> None:
    samples = hidden_states(lengths)
    with IncrementalBuilder(chunk_tokens=4, topk=8) as builder:
        for i, sample in enumerate(samples):
            number = np.array([i % 2 * 3])
            for row in sample:
                builder.add(number, row[None])
            builder.end(number)
            assert builder.take(int(number[0])) == build_proofs(sample, chunk_tokens=4, topk=8)


def test_streamed_proofs_do_not_depend_on_how_many_may_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    samples = hidden_states([9, 4, 12])
    together = stream(samples, chunk_tokens=4)
    monkeypatch.setattr(incremental, "_WAITING_ELEMENTS", 0)
    assert stream(samples, chunk_tokens=4) == together


def test_sample_that_never_got_a_row_has_no_proofs() -> None:
    with IncrementalBuilder() as builder:
        builder.add(np.array([0, 1]), np.ones((2, 6), np.uint16))
        builder.end(np.array([1]))
        assert builder.take(3) == []


def test_chunks_that_cannot_be_proven_fail_the_caller() -> None:
    with IncrementalBuilder(chunk_tokens=1) as builder:
        builder.add(np.array([0]), np.array([[0x7F80, 0]], np.uint16))
        with pytest.raises(ProofError, match="NaN or infinity"):
            builder.take(0)
        with pytest.raises(ProofError, match="NaN or infinity"):
            builder.add(np.array([1]), np.ones((1, 2), np.uint16))


def test_thread_ends_with_the_builder() -> None:
    before = threading.active_count()
    with IncrementalBuilder() as builder:
        builder.add(np.array([0]), np.ones((1, 6), np.uint16))
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
    builder.close()


def fail_while_decoding() -> None:
    with IncrementalBuilder(chunk_tokens=1) as builder:
        builder.add(np.array([0]), np.ones((1, 6), np.uint16))
        raise ZeroDivisionError


def test_thread_ends_when_decoding_fails() -> None:
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        fail_while_decoding()
    assert threading.active_count() == before


def test_closed_builder_takes_nothing_more() -> None:
    with IncrementalBuilder(chunk_tokens=1) as builder:
        pass
    with pytest.raises(ProofError, match="closed"):
        builder.add(np.array([0]), np.ones((1, 6), np.uint16))
