"""Merkle trees: proofs hold for every leaf and for nothing else."""

import pytest
from hypothesis import given, strategies as st

from muster.protocol import merkle
from muster.protocol.encoding import keccak
from muster.protocol.errors import EncodingError
from muster.protocol.ids import Hash32

leaf_lists = st.lists(
    st.binary(min_size=32, max_size=32).map(Hash32), min_size=1, max_size=40, unique=True
)


def test_root_of_one_leaf_is_the_leaf() -> None:
    leaf = keccak(b"a")
    assert merkle.merkle_root([leaf]) == leaf


def test_root_of_three_promotes_the_last() -> None:
    a, b, c = (keccak(x) for x in (b"a", b"b", b"c"))
    assert merkle.merkle_root([a, b, c]) == merkle.hash_pair(merkle.hash_pair(a, b), c)


@given(leaf_lists, st.data())
def test_proof_verifies_for_each_leaf(leaves: list[Hash32], data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(leaves) - 1))
    proof = merkle.merkle_proof(leaves, position)
    assert merkle.verify_merkle_proof(leaves[position], proof, merkle.merkle_root(leaves))


@given(leaf_lists, st.data())
def test_proof_fails_for_a_changed_leaf(leaves: list[Hash32], data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(leaves) - 1))
    proof = merkle.merkle_proof(leaves, position)
    assert not merkle.verify_merkle_proof(
        keccak(leaves[position]), proof, merkle.merkle_root(leaves)
    )


@given(leaf_lists, st.data())
def test_proof_fails_when_a_sibling_changes(leaves: list[Hash32], data: st.DataObject) -> None:
    proof = merkle.merkle_proof(leaves, 0)
    if proof:
        i = data.draw(st.integers(0, len(proof) - 1))
        proof[i] = keccak(proof[i])
        assert not merkle.verify_merkle_proof(leaves[0], proof, merkle.merkle_root(leaves))


def test_root_refuses_no_leaves() -> None:
    with pytest.raises(EncodingError, match="at least one"):
        merkle.merkle_root([])


@pytest.mark.parametrize("position", [-1, 2])
def test_proof_refuses_a_position_outside(position: int) -> None:
    with pytest.raises(EncodingError, match="no leaf"):
        merkle.merkle_proof([keccak(b"a"), keccak(b"b")], position)


# The tree over a batch's submissions


def test_a_batchs_root_of_one_leaf_is_the_leaf_and_of_three_hashes_in_order() -> None:
    a, b, c = (keccak(x) for x in (b"a", b"b", b"c"))
    assert merkle.batch_root([a]) == a
    assert merkle.batch_root([a, b, c]) == keccak(keccak(a + b) + c)
    assert merkle.batch_root([b, a, c]) != merkle.batch_root([a, b, c])


@given(leaf_lists, st.data())
def test_a_batch_proof_verifies_at_its_own_position_only(
    leaves: list[Hash32], data: st.DataObject
) -> None:
    position = data.draw(st.integers(0, len(leaves) - 1))
    root, proof = merkle.batch_root(leaves), merkle.batch_proof(leaves, position)
    held = [
        place
        for place in range(-1, len(leaves) + 1)
        if merkle.verify_batch_proof(root, len(leaves), place, leaves[position], proof)
    ]
    assert held == [position]


@given(leaf_lists, st.data())
def test_a_batch_proof_fails_when_anything_changes(
    leaves: list[Hash32], data: st.DataObject
) -> None:
    position = data.draw(st.integers(0, len(leaves) - 1))
    root, proof = merkle.batch_root(leaves), merkle.batch_proof(leaves, position)
    leaf = leaves[position]
    assert not merkle.verify_batch_proof(root, len(leaves), position, keccak(leaf), proof)
    assert not merkle.verify_batch_proof(root, len(leaves), position, leaf, [*proof, leaf])
    if proof:
        assert not merkle.verify_batch_proof(root, len(leaves), position, leaf, proof[:-1])
        i = data.draw(st.integers(0, len(proof) - 1))
        changed = [*proof[:i], keccak(proof[i]), *proof[i + 1 :]]
        assert not merkle.verify_batch_proof(root, len(leaves), position, leaf, changed)
