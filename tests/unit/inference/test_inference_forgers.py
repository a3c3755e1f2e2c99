"""Forgers forge as documented."""

import numpy as np
import pytest

from muster.inference import forgers
from muster.inference.engine import Completion, Request
from muster.inference.forgers import RecomputedChunks
from muster.inference.measuring import Delivery, Errors, Survey
from muster.protocol.errors import ProofError
from muster.protocol.recipe import ProofRecipe
from muster.toploc import ChunkResult, build_proofs, split_proofs, verify_proofs


def chunks(spread: float = 1.0, count: int = 12) -> RecomputedChunks:
    random = np.random.default_rng(0)
    values = (4 + spread * random.standard_normal((count, 3, 16))).astype(np.float32)
    return RecomputedChunks(
        (values.view(np.uint32) >> 16).astype(np.uint16),
        random.integers(0, 3, (count, 3)),
        np.arange(count) // 2,
        ProofRecipe(topk=8),
    )


def results(given: RecomputedChunks, proofs: list[bytes]) -> list[ChunkResult]:
    return [
        verify_proofs(rows, [proof], topk=8)[0]
        for rows, proof in zip(given.patterns_BRH, proofs, strict=True)
    ]


@pytest.mark.parametrize("name", [n for n in forgers.NOTHING if "modulus" not in n])
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


def test_channel_template_folds_positions_and_is_no_canonical_proof() -> None:
    given = chunks(spread=0.001)
    (proofs,) = forgers.channel_template(given, np.random.default_rng(0))
    assert int.from_bytes(proofs[0][:2], "big") == 16
    with pytest.raises(ProofError, match="modulus"):
        split_proofs(proofs[0], tokens=3, hidden_size=16, topk=8)


@pytest.mark.parametrize("longest", [1, 7, 16, 40])
def test_as_many_chunks_are_looked_at_as_there_may_be(longest: int) -> None:
    # Completions of any length: a stride over each would leave up to half of them out.
    proof = ProofRecipe(chunk_tokens=4, topk=2)
    random = np.random.default_rng(longest)
    lengths = [4 * int(n) for n in random.integers(1, longest + 1, 60)]
    asked = [Request((i, 1), i, 1.0, n) for i, n in enumerate(lengths)]
    made = [Completion(tuple(range(n)), []) for n in lengths]
    hidden = [random.integers(0, 99, (n, 3)).astype(np.uint16) for n in lengths]
    survey = Survey(Delivery(asked, made), [], [], Errors([], []), hidden)
    (chunks,) = survey.chunks(proof)
    taken = list(zip(chunks.prompts_B.tolist(), map(tuple, chunks.tokens_BR.tolist()), strict=True))
    assert len(set(taken)) == len(taken)
    assert min(512, sum(lengths) // 4) <= len(taken) < 512 + 60
