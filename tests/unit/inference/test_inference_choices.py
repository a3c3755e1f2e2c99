"""The compiled choice against the plain form: the same ids and the same bytes of scores."""

import logging
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, strategies as st

from muster.inference import sampling
from muster.inference.sampling import gumbel_noise, load_kernel, winners

Rows = npt.NDArray[np.float32]

VOCABS = [1, 2, 31, 33, 700, 1023, 1024, 1025, 2100, 5000]
"""Sizes around the kernel's block sizes."""

LOGITS = {
    "flat": lambda rng, shape: rng.standard_normal(shape) * 0,
    "ordinary": lambda rng, shape: rng.standard_normal(shape),
    "wide": lambda rng, shape: rng.standard_normal(shape) * 5,
    "peaked": lambda rng, shape: np.where(rng.random(shape) < 0.002, 25, rng.random(shape)),
    "few values": lambda rng, shape: rng.integers(-2, 3, shape),
    "large": lambda rng, shape: rng.standard_normal(shape) * 1e5,
    "all but infinite": lambda rng, shape: rng.choice([-3.4e38, 3.4e38, 0], shape),
    "tiny": lambda rng, shape: rng.standard_normal(shape) * 1e-40,
    "some masked": lambda rng, shape: np.where(rng.random(shape) < 0.5, -np.inf, 1),
    "most masked": lambda rng, shape: np.where(rng.random(shape) < 0.999, -np.inf, 1),
    "infinite": lambda rng, shape: np.where(rng.random(shape) < 0.002, np.inf, 0),
    "not numbers": lambda rng, shape: np.where(
        rng.random(shape) < 0.002, rng.choice([np.nan, -np.nan], shape), rng.standard_normal(shape)
    ),
}

TEMPERATURES = np.array([1e-38, 1e-3, 0.3, 0.7, 1, 1, 1.3, 40, 1e38], np.float32)

needs_kernel = pytest.mark.skipif(load_kernel() is None, reason="no compiled kernel")


def plain(logits: Rows, seeds: range, positions: range, temperatures: Rows) -> list[bytes]:
    with np.errstate(all="ignore"):
        scores = gumbel_noise(seeds, positions, logits.shape[1])
        scores = logits / temperatures[:, None] + scores
    ids = scores.argmax(axis=1)
    return [ids.tobytes(), scores[np.arange(len(ids)), ids].tobytes()]


def compiled(logits: Rows, seeds: range, positions: range, temperatures: Rows) -> list[bytes]:
    with np.errstate(all="ignore"):
        return [part.tobytes() for part in winners(logits, seeds, positions, temperatures)]


@needs_kernel
@pytest.mark.parametrize("kind", LOGITS)
def test_choices_and_scores_are_those_of_the_plain_form(kind: str) -> None:
    rng = np.random.default_rng(len(kind))
    for vocab in VOCABS:
        for first in range(0, 60, 20):
            rows = LOGITS[kind](rng, (20, vocab)).astype(np.float32)
            asked = (
                range(2**63 + first, 2**63 + first + 20),
                range(20),
                rng.choice(TEMPERATURES, 20),
            )
            assert compiled(rows, *asked) == plain(rows, *asked), (vocab, first)


@needs_kernel
@pytest.mark.parametrize("temperature", [0.0, -1.0, np.inf, np.nan])
def test_temperatures_that_are_none_give_what_the_plain_form_gives(temperature: float) -> None:
    rows = np.random.default_rng(0).standard_normal((6, 1100)).astype(np.float32)
    asked = range(6), range(6), np.full(6, temperature, np.float32)
    assert compiled(rows, *asked) == plain(rows, *asked)


@needs_kernel
@given(
    seed=st.integers(0, 2**32),
    rivals=st.integers(2, 14),
    level=st.sampled_from([-300.0, -5.0, 0.0, 5.0, 40.0, 3000.0]),
    apart=st.sampled_from([0.0, 1e-7, 1e-6, 1e-5, 1e-3]),
)
def test_the_last_bit_decides_between_tokens_whose_scores_meet(
    seed: int, rivals: int, level: float, apart: float
) -> None:
    rng = np.random.default_rng(seed)
    noise = gumbel_noise(range(8), range(8), 3000)
    rows = np.full_like(noise, level - 60)
    for row, noise_V in zip(rows, noise, strict=True):
        ids = rng.choice(3000, rivals, replace=False)
        row[ids] = level - noise_V[ids] + rng.random(rivals) * apart
    asked = range(8), range(8), np.ones(8, np.float32)
    assert compiled(rows, *asked) == plain(rows, *asked)


@needs_kernel
@pytest.mark.parametrize("change", [-1e-3, 1e-3])
def test_a_logit_beyond_its_margin_turns_the_choice(change: float) -> None:
    """The second best token is chosen once its logit grows by more than the gap of the scores."""
    rows = np.random.default_rng(3).standard_normal((1, 2500)).astype(np.float32)
    one = np.ones(1, np.float32)
    scores = rows[0] + gumbel_noise([7], [2], 2500)[0]
    second, first = np.argsort(scores)[-2:]
    rows[0, second] += scores[first] - scores[second] + np.float32(change)
    assert winners(rows, [7], [2], one)[0].tolist() == [second if change > 0 else first]


@needs_kernel
def test_rows_of_a_large_vocabulary_are_told_by_few_candidates() -> None:
    rng = np.random.default_rng(1)
    rows = np.concatenate([rng.standard_normal((4, 151_936)) * spread for spread in (0, 1, 3, 8)])
    rows = rows.astype(np.float32)
    asked = range(16), range(16), np.ones(16, np.float32)
    kernel = load_kernel()
    assert kernel is not None
    found = sampling._find(
        kernel, rows, np.arange(16, dtype=np.uint64), np.arange(16, dtype=np.uint64), asked[2]
    )
    assert set(found["found"].tolist()) <= {1, 2}
    assert compiled(rows, *asked) == plain(rows, *asked)


@needs_kernel
def test_rows_of_a_wider_matrix_are_taken_as_they_are() -> None:
    wide = np.random.default_rng(2).standard_normal((5, 90)).astype(np.float32)
    asked = range(5), range(5), np.ones(5, np.float32)
    assert compiled(wide[:, :70], *asked) == plain(wide[:, :70].copy(), *asked)
    assert compiled(wide[:0], range(0), range(0), np.ones(0, np.float32)) == [b"", b""]


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_rows_without_their_own_seed_are_refused(broken: int) -> None:
    asked = [range(4), range(4), np.ones(4, np.float32)]
    asked[broken] = asked[broken][:3]
    with pytest.raises(ValueError, match="4 rows of logits"):
        winners(np.zeros((4, 9), np.float32), *asked)


def test_numpy_chooses_the_same_where_nothing_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows = np.random.default_rng(4).standard_normal((20, 1500)).astype(np.float32)
    asked = range(20), range(20), np.linspace(0.2, 2, 20, dtype=np.float32)
    with caplog.at_level(logging.WARNING):
        assert load_kernel(tmp_path) is None
    assert "choices of tokens are computed in Python" in caplog.text
    monkeypatch.setattr(sampling, "load_kernel", lambda: None)
    monkeypatch.setattr(sampling, "BLOCK_ELEMENTS", 4000)
    assert compiled(rows, *asked) == plain(rows, *asked)
