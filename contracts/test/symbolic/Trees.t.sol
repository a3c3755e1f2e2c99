// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {Hashes} from "@openzeppelin/contracts/utils/cryptography/Hashes.sol";
import {Test} from "forge-std/Test.sol";

import {MultiProofLib} from "../../src/libraries/MultiProofLib.sol";

/// @dev Proven by halmos for every leaf and sibling, see `make audit`. Hashes are uninterpreted functions.
contract TreesSymbolic is Test {
    function rootOf(bytes32[] memory leaves, uint32[] calldata positions, uint256 width, bytes32[] calldata siblings)
        external
        pure
        returns (bytes32 root, bool valid)
    {
        return MultiProofLib.rootOf(leaves, positions, width, siblings);
    }

    function _hash(bytes32 a, bytes32 b) private pure returns (bytes32) {
        return Hashes.commutativeKeccak256(a, b);
    }

    function _one(bytes32 leaf) private pure returns (bytes32[] memory leaves) {
        leaves = new bytes32[](1);
        leaves[0] = leaf;
    }

    function _two(bytes32 a, bytes32 b) private pure returns (bytes32[] memory nodes) {
        nodes = new bytes32[](2);
        (nodes[0], nodes[1]) = (a, b);
    }

    function _at(uint32 a) private pure returns (uint32[] memory positions) {
        positions = new uint32[](1);
        positions[0] = a;
    }

    function _at(uint32 a, uint32 b) private pure returns (uint32[] memory positions) {
        positions = new uint32[](2);
        (positions[0], positions[1]) = (a, b);
    }

    // ------------------------------------------------------------------- proofs

    /// @dev A tree of three: the third leaf has no sibling on the first level and moves up unchanged.
    function check_rootOf_eachLeafOfThree(bytes32 a, bytes32 b, bytes32 c) public view {
        bytes32 root = _hash(_hash(a, b), c);
        (bytes32 found, bool valid) = this.rootOf(_one(a), _at(0), 3, _two(b, c));
        assert(valid && found == root);
        (found, valid) = this.rootOf(_one(b), _at(1), 3, _two(a, c));
        assert(valid && found == root);
        (found, valid) = this.rootOf(_one(c), _at(2), 3, _one(_hash(a, b)));
        assert(valid && found == root);
    }

    function check_rootOf_pairsOfThree(bytes32 a, bytes32 b, bytes32 c) public view {
        bytes32 root = _hash(_hash(a, b), c);
        (bytes32 found, bool valid) = this.rootOf(_two(a, b), _at(0, 1), 3, _one(c));
        assert(valid && found == root);
        (found, valid) = this.rootOf(_two(a, c), _at(0, 2), 3, _one(b));
        assert(valid && found == root);
        (found, valid) = this.rootOf(_two(b, c), _at(1, 2), 3, _one(a));
        assert(valid && found == root);
    }

    function check_rootOf_pairsOfFour(bytes32 a, bytes32 b, bytes32 c, bytes32 d) public view {
        bytes32 root = _hash(_hash(a, b), _hash(c, d));
        (bytes32 found, bool valid) = this.rootOf(_two(a, c), _at(0, 2), 4, _two(b, d));
        assert(valid && found == root);
        (found, valid) = this.rootOf(_two(c, d), _at(2, 3), 4, _one(_hash(a, b)));
        assert(valid && found == root);
    }

    /// @dev Positions that are not strictly ascending, or not in the tree, are never valid.
    function check_rootOf_refusesDisorder(bytes32 a, bytes32 b, uint32 i, uint32 j, bytes32 sibling) public view {
        vm.assume(i >= j || j >= 3);
        (, bool valid) = this.rootOf(_two(a, b), _at(i, j), 3, _one(sibling));
        assert(!valid);
    }

    /// @dev One sibling too few or too many is never valid, wherever the leaf is.
    function check_rootOf_refusesOtherLengths(bytes32 a, uint32 i, bytes32 first, bytes32 second) public view {
        vm.assume(i < 4);
        (, bool valid) = this.rootOf(_one(a), _at(i), 4, _one(first));
        assert(!valid);
        bytes32[] memory three = new bytes32[](3);
        (three[0], three[1], three[2]) = (first, second, first);
        (, valid) = this.rootOf(_one(a), _at(i), 4, three);
        assert(!valid);
    }
}
