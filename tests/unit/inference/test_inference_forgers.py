"""Forgers do what they say, and restore what they borrow."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from muster.inference import forgers
from muster.inference.forgers import Chunks
from muster.inference.transformers_engine import TransformersEngine
from muster.protocol.recipe import ProofRecipe
from muster.toploc import ChunkResult, build_proofs, split_proofs, verify_proofs


def chunks(spread: float = 1.0, count: int = 12) -> Chunks:
    random = np.random.default_rng(0)
    values = (4 + spread * random.standard_normal((count, 3, 16))).astype(np.float32)
    return Chunks(
        (values.view(np.uint32) >> 16).astype(np.uint16),
        random.integers(0, 3, (count, 3)),
        np.arange(count) // 2,
        ProofRecipe(topk=8),
    )


def results(given: Chunks, proofs: list[bytes]) -> list[ChunkResult]:
    return [
        verify_proofs(rows, [proof], topk=8)[0]
        for rows, proof in zip(given.patterns_BRH, proofs, strict=True)
    ]


@pytest.mark.parametrize("name", forgers.NOTHING)
def test_forged_proofs_parse(name: str) -> None:
    given = chunks()
    for proofs in forgers.NOTHING[name](given, np.random.default_rng(0)):
        assert len(proofs) == len(given.patterns_BRH)
        for proof in proofs:
            assert split_proofs(proof, tokens=3, hidden_size=16, topk=8) == [proof]


def test_some_constant_fits_hidden_states_that_hardly_vary() -> None:
    given = chunks(spread=0.001)
    attempts = forgers.constants(given, np.random.default_rng(0))
    assert any(all(r.exponent_mismatches == 0 for r in results(given, a)) for a in attempts)


def test_template_fits_hidden_states_that_hardly_vary() -> None:
    given = chunks(spread=0.001)
    (proofs,) = forgers.position_template(given, np.random.default_rng(0))
    assert all(r.mantissa_error_mean <= 1 for r in results(given, proofs))


def test_template_never_sees_its_own_prompt() -> None:
    given = chunks()
    given.patterns_BRH[given.prompts_B % 2 == 1] = 0x3F80
    (proofs,) = forgers.position_template(given, np.random.default_rng(0))
    ones = build_proofs(np.ones((3, 16), np.float32), topk=8)
    assert [proofs[i] for i in np.flatnonzero(given.prompts_B % 2 == 0)] == ones * 6


def test_transplant_comes_from_another_prompt() -> None:
    given = chunks()
    own = [build_proofs(rows, topk=8)[0] for rows in given.patterns_BRH]
    (proofs,) = forgers.transplants(given, np.random.default_rng(0))
    for i, proof in enumerate(proofs):
        assert given.prompts_B[own.index(proof)] != given.prompts_B[i]


def test_negated_proofs_differ_in_every_sign_only() -> None:
    given = chunks()
    (proofs,) = forgers.negated(given, np.random.default_rng(0))
    assert {(r.exponent_mismatches, r.sign_mismatches) for r in results(given, proofs)} == {(0, 8)}


@pytest.mark.parametrize(
    "change",
    [forgers.one_step(0.1), forgers.noise(0.1), forgers.quantised(4), forgers.shuffled],
)
def test_weights_change_and_come_back(
    engine: TransformersEngine, change: forgers.WeightChange
) -> None:
    before = {name: weight.clone() for name, weight in engine.model.named_parameters()}
    with forgers.running(engine.model, change, seed=0):
        changed = [n for n, w in engine.model.named_parameters() if not torch.equal(w, before[n])]
    assert changed
    assert all(torch.equal(w, before[n]) for n, w in engine.model.named_parameters())


def test_weights_come_back_when_the_body_fails(engine: TransformersEngine) -> None:
    before = engine.model.get_output_embeddings().weight.clone()
    with pytest.raises(KeyError), forgers.running(engine.model, forgers.noise(1.0), seed=0):
        raise KeyError
    assert torch.equal(engine.model.get_output_embeddings().weight, before)


def test_one_step_moves_every_weight_by_the_learning_rate() -> None:
    moved = forgers.one_step(0.25)(torch.zeros(1000), torch.Generator().manual_seed(0))
    assert moved.abs().unique().tolist() == [0.25]
    assert moved.mean().abs() < 0.05


@pytest.mark.parametrize(("bits", "levels"), [(4, 15), (8, 255)])
def test_quantised_weights_take_few_values(bits: int, levels: int) -> None:
    weight = torch.randn(1, 5000, generator=torch.Generator().manual_seed(0))
    rounded = forgers.quantised(bits)(weight, torch.Generator())
    assert 4 < len(rounded.unique()) <= levels
    assert rounded.abs().max() == pytest.approx(weight.abs().max())
