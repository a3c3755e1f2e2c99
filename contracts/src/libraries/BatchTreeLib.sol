// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

/// @title The tree over a batch's submissions
/// @notice A parent is `keccak256(left ‖ right)`, unsorted, and a node without a sibling moves up unchanged: a root and a
///         count fix what is at each position. A leaf's preimage is never 64 bytes, so no node passes for a leaf.
library BatchTreeLib {
    /// @dev Returns whether the tree of `count` leaves with this root has `leaf` at a position. `proof` holds the siblings
    ///      that there are, from the leaf up.
    function holds(bytes32 root, uint256 count, uint256 position, bytes32 leaf, bytes32[] calldata proof)
        internal
        pure
        returns (bool)
    {
        if (position >= count) return false;
        uint256 used;
        bytes32 node = leaf;
        for (uint256 width = count; width > 1; width = (width + 1) / 2) {
            if (position ^ 1 < width) {
                if (used == proof.length) return false;
                bytes32 sibling = proof[used++];
                node = position & 1 == 0
                    ? keccak256(abi.encodePacked(node, sibling))
                    : keccak256(abi.encodePacked(sibling, node));
            }
            position /= 2;
        }
        return used == proof.length && node == root;
    }
}
