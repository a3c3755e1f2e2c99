"""Examination block by block finds the same as all at once, on both paths."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, strategies as st
from worlds.replays import replay_sample

from muster.inference import blocks, examining, sampler
from muster.inference.blocks import DeviceBlock, DeviceChoices, examine_rows
from muster.inference.engine import Examined, Redraw, Sample, Share
from muster.inference.examining import ClaimedTokens, HostBlock
from muster.inference.sampling import gumbel_noise
from muster.protocol.errors import ProofError
from muster.protocol.ids import Hash32
from muster.protocol.recipe import ProofRecipe
from muster.toploc import build_proofs, verify_proofs
from muster.toploc.chunks import to_patterns
from muster.toploc.projections import fingerprint, project

PROOF = ProofRecipe(chunk_tokens=4, topk=8)
WIDTH, VOCAB, T, EOS = 16, 23, 0.7, 5
SEED = Hash32(bytes(range(32)))
LENGTHS = (3, 1, 6)
HEAD = torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(1))


def hidden_of(length: int) -> torch.Tensor:
    return torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(length))


def sample(length: int, first: int) -> Sample:
    tokens = tuple(7 * i % VOCAB for i in range(length))
    return Sample(
        (1, 2),
        tokens,
        (1 << 63) + length,
        build_proofs(hidden_of(length), chunk_tokens=4, topk=8),
        (Share(SEED, first, sum(LENGTHS)),),
        (Redraw(9, tokens[::-1]), Redraw(1 << 40, tokens)),
    )


SAMPLES = [sample(n, sum(LENGTHS[:i])) for i, n in enumerate(LENGTHS)]


def logits_of(hidden_BH: torch.Tensor) -> torch.Tensor:
    return hidden_BH @ HEAD.T


def examined() -> list[Examined]:
    return examine_rows(
        SAMPLES,
        [hidden_of(n) for n in LENGTHS],
        logits_of,
        vocab_size=VOCAB,
        eos={EOS},
        proof=PROOF,
        temperature=T,
    )


def assert_right(found: list[Examined]) -> None:
    for each, asked in zip(found, SAMPLES, strict=True):
        hidden = hidden_of(len(asked.completion_tokens))
        logits = logits_of(hidden).numpy()
        choices = [
            (asked.seed, asked.completion_tokens),
            *((r.seed, r.tokens) for r in asked.redraws),
        ]
        for got, (seed, tokens) in zip((each.replayed, *each.redrawn), choices, strict=True):
            margins, expected = replay_sample(logits, tokens, seed, T)
            assert got.margins_T == pytest.approx(margins, abs=1e-5)
            assert got.expected_T.tolist() == expected.tolist()
            rows = np.arange(len(tokens))
            is_likelier = logits[rows, list(tokens)] > logits[rows, expected]
            assert got.is_likelier_T.tolist() == is_likelier.tolist()
        odds = torch.tensor(logits / T).softmax(dim=1)[:, EOS].numpy()
        assert each.ends_T == pytest.approx(odds, rel=1e-4)
        assert list(each.chunks) == verify_proofs(hidden, asked.proofs, chunk_tokens=4, topk=8)
    whole = torch.cat([hidden_of(n) for n in LENGTHS])
    sums = np.sum([each.projections[0] for each in found], axis=0)
    assert fingerprint(sums, len(whole), WIDTH) == project(to_patterns(whole), SEED)


@pytest.mark.parametrize("rows", [1, 2, 4, 99])
def test_findings_do_not_depend_on_the_blocks(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(examining, "BLOCK_BYTES", 4 * VOCAB * rows)
    assert_right(examined())


def test_no_more_logits_than_a_block_s_are_there_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def counted(hidden_BH: torch.Tensor) -> torch.Tensor:
        made.append(len(hidden_BH))
        return logits_of(hidden_BH)

    monkeypatch.setattr(examining, "BLOCK_BYTES", 4 * VOCAB * 4)
    hidden, facts = [hidden_of(n) for n in LENGTHS], {"vocab_size": VOCAB, "eos": {EOS}}
    examine_rows(SAMPLES, hidden, counted, proof=PROOF, temperature=T, **facts)  # type: ignore[arg-type]
    assert made == [4, 4, 2]


def test_a_device_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_is_host", lambda _: False)
    monkeypatch.setattr(sampler, "DEVICE_ELEMENTS", 2 * VOCAB)
    assert_right(examined())


@given(st.integers(0, 2**64 - 1), st.integers(0, VOCAB - 1), st.sampled_from([np.nan, np.inf]))
def test_scores_that_are_no_numbers_have_no_margin(seed: int, place: int, value: float) -> None:
    logits: npt.NDArray[np.float32] = np.zeros((1, VOCAB), np.float32)
    logits[0, place] = value
    for token in range(VOCAB):
        choices = ClaimedTokens(
            np.array([token]), np.array([seed], np.uint64), np.zeros(1, np.uint64)
        )
        asked = DeviceChoices.of(choices, torch.device("cpu"))
        device = DeviceBlock(torch.from_numpy(logits))
        for found in (HostBlock(logits).replay(choices, T), device.replay(asked, T)):
            assert found.margins_T.tolist() == [np.inf]


@pytest.mark.parametrize("proofs", [0, 1, 3])
def test_another_number_of_proofs_is_refused(proofs: int) -> None:
    asked = SAMPLES[2]
    forged = Sample((1,), asked.completion_tokens, 1, (list(asked.proofs) * 2)[:proofs])
    with pytest.raises(ProofError, match="proofs for 2 chunks"):
        examine_rows(
            [forged],
            [hidden_of(6)],
            logits_of,
            vocab_size=VOCAB,
            eos={EOS},
            proof=PROOF,
            temperature=T,
        )


def test_the_right_choices_have_no_margin() -> None:
    hidden = hidden_of(6)
    logits = logits_of(hidden).numpy()
    scores = logits / np.float32(T) + gumbel_noise([3] * 6, range(6), VOCAB)
    tokens = tuple(scores.argmax(axis=1).tolist())
    asked = Sample((1,), tokens, 3, build_proofs(hidden, chunk_tokens=4, topk=8))
    (found,) = examine_rows(
        [asked], [hidden], logits_of, vocab_size=VOCAB, eos={EOS}, proof=PROOF, temperature=T
    )
    assert found.replayed.margins_T.tolist() == [0.0] * 6
    assert found.replayed.expected_T.tolist() == list(tokens)
    assert (found.redrawn, found.ends_T, found.projections.shape) == ((), None, (0, 8))
