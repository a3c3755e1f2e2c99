"""Merkle trees whose proofs OpenZeppelin's `MerkleProof` verifies.

Siblings are hashed in sorted order, `keccak(min ‖ max)`; a node without a sibling moves up
unchanged. A leaf's preimage is never 64 bytes long, so no node can be passed off as a leaf.

In the tree over a batch's submissions, `batch_root` and `batch_proof`, siblings are hashed as they
stand: its root and count fix what is at each position. The contracts' BatchTreeLib verifies it.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

from muster.protocol.encoding import keccak
from muster.protocol.errors import EncodingError
from muster.protocol.ids import Hash32


def hash_pair(a: bytes, b: bytes) -> Hash32:
    """Return the parent of two nodes, in either order."""
    return keccak(a + b if a < b else b + a)


def hash_in_order(left: bytes, right: bytes) -> Hash32:
    """Return the parent of two nodes where their order counts."""
    return keccak(left + right)


_Join = Callable[[bytes, bytes], Hash32]


def _parents(level: Sequence[Hash32], join: _Join = hash_pair) -> list[Hash32]:
    pairs = [join(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
    return [*pairs, level[-1]] if len(level) % 2 else pairs


def merkle_root(leaves: Sequence[Hash32]) -> Hash32:
    """Return the root over leaf hashes; raises EncodingError when there are none."""
    return _root(leaves, hash_pair)


def batch_root(leaves: Sequence[Hash32]) -> Hash32:
    """Return the root over the leaves of a batch's submissions, whose order counts; raises
    EncodingError when there are none.
    """
    return _root(leaves, hash_in_order)


def _root(leaves: Sequence[Hash32], join: _Join) -> Hash32:
    if not leaves:
        raise EncodingError("a Merkle tree needs at least one leaf")
    level = list(leaves)
    while len(level) > 1:
        level = _parents(level, join)
    return level[0]


def merkle_proof(leaves: Sequence[Hash32], position: int) -> list[Hash32]:
    """Return the siblings from the leaf at `position` up to the root."""
    return _proof(leaves, position, hash_pair)


def batch_proof(leaves: Sequence[Hash32], position: int) -> list[Hash32]:
    """Return the siblings from a submission's leaf at `position` up to its batch's root."""
    return _proof(leaves, position, hash_in_order)


def _proof(leaves: Sequence[Hash32], position: int, join: _Join) -> list[Hash32]:
    if not 0 <= position < len(leaves):
        raise EncodingError(f"no leaf {position} among {len(leaves)}")
    proof: list[Hash32] = []
    level = list(leaves)
    while len(level) > 1:
        sibling = position ^ 1
        if sibling < len(level):
            proof.append(level[sibling])
        level = _parents(level, join)
        position //= 2
    return proof


def merkle_multi_proof(leaves: Sequence[Hash32], positions: Sequence[int]) -> list[Hash32]:
    """Return the siblings that prove the leaves at ascending positions together.

    They are the nodes that cannot be computed from the leaves, level by level from the bottom, left
    to right, as the contracts' MultiProofLib expects them. Raises EncodingError when positions do
    not ascend strictly or are not in the tree.
    """
    ascending = all(a < b for a, b in pairwise(positions))
    if not positions or not ascending or positions[0] < 0 or positions[-1] >= len(leaves):
        raise EncodingError(f"no ascending positions among {len(leaves)} leaves: {positions}")
    siblings: list[Hash32] = []
    level, known = list(leaves), list(positions)
    while len(level) > 1:
        present = set(known)
        siblings += [
            level[place ^ 1]
            for place in known
            if place ^ 1 < len(level) and place ^ 1 not in present
        ]
        level = _parents(level)
        known = sorted({place // 2 for place in known})
    return siblings


def verify_merkle_proof(leaf: Hash32, proof: Sequence[Hash32], root: Hash32) -> bool:
    """Return whether `proof` leads from `leaf` to `root`."""
    node = leaf
    for sibling in proof:
        node = hash_pair(node, sibling)
    return node == root


def verify_batch_proof(
    root: Hash32, count: int, position: int, leaf: Hash32, proof: Sequence[Hash32]
) -> bool:
    """Return whether a batch of `count` submissions with this root holds `leaf` at a position."""
    if not 0 <= position < count:
        return False
    node, siblings = leaf, list(reversed(proof))
    while count > 1:
        if position ^ 1 < count:
            if not siblings:
                return False
            pair = (siblings.pop(), node) if position % 2 else (node, siblings.pop())
            node = hash_in_order(*pair)
        position, count = position // 2, (count + 1) // 2
    return not siblings and node == root
