"""TOPLOC where rows were computed: the same bytes and figures as on a CPU, and little leaves."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from muster import toploc
from muster.inference import device_proofs
from muster.inference.device_proofs import DeviceBuilder, builder_on, project, start_verifying
from muster.inference.engine import Share
from muster.protocol.errors import ProofError
from muster.protocol.ids import Hash32
from muster.protocol.recipe import ProofRecipe
from muster.toploc.chunks import to_patterns
from muster.toploc.projections import project_rows

WIDTH = 40
PROOF = ProofRecipe(chunk_tokens=4, topk=8)
HOW = {"chunk_tokens": 4, "topk": 8}


def rows_of(tokens: int, *, levels: int | None = None) -> torch.Tensor:
    """Hidden states [tokens, WIDTH]; few levels make equal magnitudes."""
    rows = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(tokens))
    return rows if levels is None else (levels * rows).round() / levels


@pytest.mark.parametrize("levels", [None, 1])
@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 8, 11])
def test_proofs_are_those_of_a_cpu(
    tokens: int, levels: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_proofs, "_PASS_ELEMENTS", 4 * WIDTH)
    rows = rows_of(tokens, levels=levels)
    expected = toploc.build_proofs(rows, **HOW)
    assert device_proofs._built([rows], PROOF) == [expected]
    assert device_proofs.build_proofs([rows, rows], PROOF) == [expected, expected]


def test_samples_of_any_lengths_are_compared_together() -> None:
    samples = [rows_of(tokens) for tokens in (3, 11, 4, 8, 6)]
    proofs = [toploc.build_proofs(rows + 0.01 * rows.flip(0), **HOW) for rows in samples]
    expected = [
        toploc.verify_proofs(rows, own, **HOW) for rows, own in zip(samples, proofs, strict=True)
    ]
    assert device_proofs._built(samples, PROOF) == [
        toploc.build_proofs(rows, **HOW) for rows in samples
    ]
    assert start_verifying(samples, proofs, PROOF)() == expected
    proofs[3], proofs[4] = proofs[4], proofs[3]
    assert start_verifying(samples, proofs, PROOF)() != expected


@pytest.mark.parametrize("given_proofs", [0, 2, 4])
def test_another_number_of_proofs_is_refused(given_proofs: int) -> None:
    proofs = toploc.build_proofs(rows_of(16), **HOW)
    with pytest.raises(ProofError, match="proofs for 3 chunks"):
        start_verifying([rows_of(11)], [proofs[:given_proofs]], PROOF)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_states_that_are_no_numbers_are_refused(value: float) -> None:
    rows = rows_of(5)
    proofs = toploc.build_proofs(rows, **HOW)
    rows[4, 7] = value
    with pytest.raises(ProofError, match="NaN or infinity"):
        device_proofs._built([rows], PROOF)
    with pytest.raises(ProofError, match="NaN or infinity"):
        start_verifying([rows], [proofs], PROOF)()


def test_projections_are_those_of_a_cpu() -> None:
    rows, seed = rows_of(9), Hash32(bytes(range(32)))
    shares = [Share(seed, 3, 20), Share(seed, 0, 9)]
    expected = [project_rows(to_patterns(rows), seed, s.first, s.tokens) for s in shares]
    assert project(rows, shares).numpy() == pytest.approx(np.array(expected))
    assert project(rows, []).shape == (0, 8)


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(1, 5))
def test_proofs_grow_as_on_a_cpu(lengths: list[int], steps: int) -> None:
    samples = [rows_of(length) for length in lengths]
    with DeviceBuilder(**HOW) as builder:
        for i, sample in enumerate(samples):
            for start in range(0, len(sample), steps):
                builder.extend(np.array([i]), sample[None, start : start + steps])
        builder.end(np.arange(len(samples)))
        taken = [builder.take(i) for i in range(len(samples))]
    assert taken == [toploc.build_proofs(sample, **HOW) for sample in samples]


def test_rows_of_many_requests_come_at_once() -> None:
    samples = torch.stack([rows_of(6), rows_of(6).flip(0), -rows_of(6)])
    with DeviceBuilder(**HOW) as builder:
        for position in range(6):
            builder.add(np.array([2, 0, 1]), samples[[2, 0, 1], position])
        builder.end(np.array([0, 1, 2]))
        for i, sample in enumerate(samples):
            assert builder.take(i) == toploc.build_proofs(sample, **HOW)


def test_little_leaves_a_device() -> None:
    chunks = torch.empty(7, 32 * 1024, dtype=torch.bfloat16, device="meta")
    packed = device_proofs._packed(chunks, 128)
    assert packed.shape == (7, 2 * 128 + 128 + 1)
    assert packed.element_size() * packed.shape[1] < chunks.element_size() * chunks.shape[1] / 40


def test_builders_are_where_rows_are() -> None:
    for device, kind in (("cpu", toploc.IncrementalBuilder), ("cuda:1", DeviceBuilder)):
        with builder_on(device, PROOF) as builder:
            assert type(builder) is kind
