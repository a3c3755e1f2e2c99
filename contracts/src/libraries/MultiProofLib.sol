// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

import {Hashes} from "@openzeppelin/contracts/utils/cryptography/Hashes.sol";

/// @title Proofs of many leaves of one tree at once
/// @notice Trees are those of docs/protocol.md section 9: siblings hashed in sorted order, a node without one moves up
///         unchanged. `muster.protocol.merkle` is the Python twin.
library MultiProofLib {
    /// @dev Returns the root that `leaves` at strictly ascending `positions` of a tree of `width` leaves have with
    ///      their `siblings`, and whether the positions are in order and in the tree and every sibling is used.
    ///      Siblings are those nodes on the way that cannot be computed, level by level, left to right.
    ///      The root of what is not valid means nothing. Assumes one position for each leaf.
    function rootOf(bytes32[] memory leaves, uint32[] calldata positions, uint256 width, bytes32[] calldata siblings)
        internal
        pure
        returns (bytes32 root, bool valid)
    {
        uint256 count = leaves.length;
        if (count == 1) return _rootOfOne(leaves[0], positions[0], width, siblings);
        if (count == 0 || !_areInOrder(positions, width)) return (0, false);
        bytes32[] memory nodes = new bytes32[](count);
        uint256[] memory places = new uint256[](count);
        for (uint256 i = 0; i < count; ++i) {
            (nodes[i], places[i]) = (leaves[i], positions[i]);
        }
        uint256 used;
        for (; width > 1; width = (width + 1) / 2) {
            (count, used) = _climb(nodes, places, count, width, siblings, used);
        }
        return (nodes[0], used == siblings.length);
    }

    /// @dev One leaf needs no bookkeeping, which halves what it costs.
    function _rootOfOne(bytes32 node, uint256 place, uint256 width, bytes32[] calldata siblings)
        private
        pure
        returns (bytes32, bool)
    {
        if (place >= width) return (0, false);
        uint256 used;
        // Cannot overflow: width and place have 32 bits.
        unchecked {
            for (; width > 1; width = (width + 1) >> 1) {
                if (place ^ 1 < width) {
                    if (used == siblings.length) return (0, false);
                    node = Hashes.commutativeKeccak256(node, siblings[used++]);
                }
                place >>= 1;
            }
        }
        return (node, used == siblings.length);
    }

    /// @dev Replaces nodes of one level by their parents; returns how many there are and the siblings used so far.
    ///      A sibling that is missing counts as used, which makes the proof invalid.
    function _climb(
        bytes32[] memory nodes,
        uint256[] memory places,
        uint256 count,
        uint256 width,
        bytes32[] calldata siblings,
        uint256 used
    ) private pure returns (uint256 parents, uint256) {
        for (uint256 i = 0; i < count; ++i) {
            (bytes32 node, uint256 place) = (nodes[i], places[i]);
            uint256 sibling = place ^ 1;
            if (i + 1 < count && places[i + 1] == sibling) {
                node = Hashes.commutativeKeccak256(node, nodes[++i]);
            } else if (sibling < width) {
                if (used < siblings.length) node = Hashes.commutativeKeccak256(node, siblings[used]);
                ++used;
            }
            (nodes[parents], places[parents]) = (node, place / 2);
            ++parents;
        }
        return (parents, used);
    }

    function _areInOrder(uint32[] calldata positions, uint256 width) private pure returns (bool) {
        uint256 next;
        for (uint256 i = 0; i < positions.length; ++i) {
            uint256 position = positions[i];
            if (position < next || position >= width) return false;
            next = position + 1;
        }
        return true;
    }
}
