// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {MerkleProof} from "@openzeppelin/contracts/utils/cryptography/MerkleProof.sol";

import {MultiProofLib} from "../../src/libraries/MultiProofLib.sol";
import {BaseTest} from "../BaseTest.sol";

/// @dev Puts library arguments into calldata.
contract MultiProofs {
    function rootOf(bytes32[] calldata leaves, uint32[] calldata positions, uint256 width, bytes32[] calldata siblings)
        external
        pure
        returns (bytes32 root, bool valid)
    {
        return MultiProofLib.rootOf(leaves, positions, width, siblings);
    }
}

/// @title Proofs of many leaves, and every way to spoil one
contract MultiProofTest is BaseTest {
    uint256 private constant WIDEST = 40;

    MultiProofs private _proofs = new MultiProofs();

    /// @dev A tree and a part of its leaves, with the proof that they are in it.
    struct Part {
        bytes32[] tree;
        bytes32[] leaves;
        uint32[] positions;
        bytes32[] siblings;
    }

    function _tree(bytes32 seed, uint256 width) private pure returns (bytes32[] memory leaves) {
        leaves = new bytes32[](width);
        for (uint256 i = 0; i < width; ++i) {
            leaves[i] = keccak256(abi.encode(seed, i));
        }
    }

    /// @dev The leaves of a tree of some width whose bits are set in `chosen`, and at least one.
    function _part(bytes32 seed, uint256 width, uint256 chosen) private pure returns (Part memory part) {
        width = bound(width, 1, WIDEST);
        chosen |= 1 << (chosen % width);
        part.tree = _tree(seed, width);
        uint256 count;
        for (uint256 i = 0; i < width; ++i) {
            count += chosen >> i & 1;
        }
        (part.positions, part.leaves) = (new uint32[](count), new bytes32[](count));
        count = 0;
        for (uint256 i = 0; i < width; ++i) {
            if (chosen >> i & 1 == 0) continue;
            part.leaves[count] = part.tree[i];
            part.positions[count++] = uint32(i);
        }
        part.siblings = _multiSiblings(part.tree, part.positions);
    }

    function _check(Part memory part) private view returns (bytes32 root, bool valid) {
        return _proofs.rootOf(part.leaves, part.positions, part.tree.length, part.siblings);
    }

    function _assertRefused(Part memory part, string memory why) private view {
        (bytes32 root, bool valid) = _check(part);
        assertFalse(valid && root == _root(part.tree), why);
    }

    function _assertInvalid(Part memory part, string memory why) private view {
        (, bool valid) = _check(part);
        assertFalse(valid, why);
    }

    // -------------------------------------------------------------------- valid

    function testFuzz_rootOf_isTheTreesRoot(bytes32 seed, uint256 width, uint256 chosen) public view {
        Part memory part = _part(seed, width, chosen);
        (bytes32 root, bool valid) = _check(part);
        assertTrue(valid, "valid");
        assertEq(root, _root(part.tree), "computed a second way");
    }

    function testFuzz_rootOf_agreesWithSingleProofs(bytes32 seed, uint256 width, uint256 at) public view {
        Part memory part = _part(seed, width, 0);
        at = bound(at, 0, part.tree.length - 1);
        (part.positions[0], part.leaves[0]) = (uint32(at), part.tree[at]);
        part.siblings = _siblings(part.tree, at);
        (bytes32 root, bool valid) = _check(part);
        assertTrue(valid, "a single proof is a proof of many of one leaf");
        assertTrue(MerkleProof.verify(part.siblings, root, part.tree[at]), "and what OpenZeppelin accepts");
    }

    function testFuzz_rootOf_provesNothingThatSingleProofsDoNot(bytes32 seed, uint256 width, uint256 chosen)
        public
        view
    {
        Part memory part = _part(seed, width, chosen);
        (bytes32 root,) = _check(part);
        for (uint256 i = 0; i < part.leaves.length; ++i) {
            bytes32[] memory proof = _siblings(part.tree, part.positions[i]);
            assertTrue(MerkleProof.verify(proof, root, part.leaves[i]), "each leaf alone");
        }
    }

    function testFuzz_rootOf_ofAllLeavesNeedsNoSiblings(bytes32 seed, uint256 width) public view {
        Part memory part = _part(seed, width, type(uint256).max);
        assertEq(part.siblings.length, 0, "nothing is missing");
        (bytes32 root, bool valid) = _check(part);
        assertTrue(valid, "valid");
        assertEq(root, _root(part.tree), "root");
    }

    // ----------------------------------------------------------------- positions

    function test_rootOf_refusesNothing() public view {
        (, bool valid) = _proofs.rootOf(new bytes32[](0), new uint32[](0), 4, new bytes32[](0));
        assertFalse(valid, "no leaf proves nothing");
    }

    function testFuzz_rootOf_refusesPermutedPositions(bytes32 seed, uint256 width, uint256 chosen, uint256 i, uint256 j)
        public
        view
    {
        Part memory part = _part(seed, bound(width, 2, WIDEST), chosen | 3);
        i = bound(i, 0, part.positions.length - 2);
        j = bound(j, i + 1, part.positions.length - 1);
        (part.positions[i], part.positions[j]) = (part.positions[j], part.positions[i]);
        _assertInvalid(part, "positions alone");
        (part.leaves[i], part.leaves[j]) = (part.leaves[j], part.leaves[i]);
        _assertInvalid(part, "with their leaves");
    }

    function testFuzz_rootOf_refusesDuplicates(bytes32 seed, uint256 width, uint256 chosen, uint256 at) public view {
        Part memory part = _part(seed, bound(width, 2, WIDEST), chosen | 3);
        at = bound(at, 1, part.positions.length - 1);
        part.positions[at] = part.positions[at - 1];
        part.leaves[at] = part.leaves[at - 1];
        _assertInvalid(part, "one leaf twice");
    }

    function testFuzz_rootOf_refusesPositionsBeyondTheTree(bytes32 seed, uint256 width, uint256 chosen, uint32 beyond)
        public
        view
    {
        Part memory part = _part(seed, width, chosen);
        uint32 last = uint32(bound(beyond, part.tree.length, type(uint32).max));
        part.positions[part.positions.length - 1] = last;
        _assertInvalid(part, "beyond");
    }

    /// @dev The first place beyond the tree has the siblings of the last one in it, and would pass for it.
    function testFuzz_rootOf_refusesTheFirstPlaceBeyondTheTree(bytes32 seed, uint256 width) public view {
        width = bound(width, 1, WIDEST);
        Part memory part = _part(seed, width, 1 << (width - 1));
        part.leaves = new bytes32[](1);
        part.leaves[0] = part.tree[width - 1];
        part.positions = _range(width, width + 1);
        part.siblings = new bytes32[](0);
        _assertInvalid(part, "place of the width");
        part.siblings = _multiSiblings(part.tree, _range(width - 1, width));
        _assertInvalid(part, "with the siblings of the last place");
    }

    // ------------------------------------------------------------------ siblings

    function testFuzz_rootOf_refusesMissingSiblings(bytes32 seed, uint256 width, uint256 chosen) public view {
        Part memory part = _part(seed, width, chosen);
        vm.assume(part.siblings.length != 0);
        bytes32[] memory siblings = part.siblings;
        assembly ("memory-safe") {
            mstore(siblings, sub(mload(siblings), 1))
        }
        _assertInvalid(part, "one sibling less");
    }

    function testFuzz_rootOf_refusesSurplusSiblings(bytes32 seed, uint256 width, uint256 chosen, bytes32 surplus)
        public
        view
    {
        Part memory part = _part(seed, width, chosen);
        bytes32[] memory siblings = new bytes32[](part.siblings.length + 1);
        for (uint256 i = 0; i < part.siblings.length; ++i) {
            siblings[i] = part.siblings[i];
        }
        siblings[part.siblings.length] = surplus;
        part.siblings = siblings;
        _assertInvalid(part, "one sibling more");
    }

    function testFuzz_rootOf_dependsOnEverySibling(
        bytes32 seed,
        uint256 width,
        uint256 chosen,
        uint256 at,
        bytes32 other
    ) public view {
        Part memory part = _part(seed, width, chosen);
        vm.assume(part.siblings.length != 0);
        at = bound(at, 0, part.siblings.length - 1);
        vm.assume(other != part.siblings[at]);
        part.siblings[at] = other;
        _assertRefused(part, "another sibling");
    }

    function testFuzz_rootOf_dependsOnEveryLeaf(bytes32 seed, uint256 width, uint256 chosen, uint256 at, bytes32 other)
        public
        view
    {
        Part memory part = _part(seed, width, chosen);
        at = bound(at, 0, part.leaves.length - 1);
        vm.assume(other != part.leaves[at]);
        part.leaves[at] = other;
        _assertRefused(part, "another leaf");
    }

    function testFuzz_rootOf_refusesInnerNodesAsLeaves(bytes32 seed, uint256 width) public view {
        // An inner node in place of its two leaves would make the tree a level lower: its width says otherwise.
        Part memory part = _part(seed, bound(width, 3, WIDEST), 0);
        bytes32 inner = _root(_two32(part.tree[0], part.tree[1]));
        bytes32[] memory proof = _siblings(part.tree, 0);
        bytes32[] memory shorter = new bytes32[](proof.length - 1);
        for (uint256 i = 0; i < shorter.length; ++i) {
            shorter[i] = proof[i + 1];
        }
        (part.positions[0], part.leaves[0], part.siblings) = (0, inner, shorter);
        _assertInvalid(part, "a node is no leaf");
    }

    function _two32(bytes32 first, bytes32 second) private pure returns (bytes32[] memory both) {
        both = new bytes32[](2);
        (both[0], both[1]) = (first, second);
    }
}
