// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {Test} from "forge-std/Test.sol";

/// @title The noise of verifiable sampling, recomputed from docs/protocol.md section 5
/// @dev No contract computes it; the vectors show that one could, in a few hundred gas per token.
contract SamplingTest is Test {
    function _mix(uint32 x) private pure returns (uint32) {
        unchecked {
            x ^= x >> 16;
            x *= 0x7feb352d;
            x ^= x >> 15;
            x *= 0x846ca68b;
            return x ^ (x >> 16);
        }
    }

    function _hash(uint64 seed, uint32 position, uint32 token) private pure returns (uint32) {
        uint32 hi = uint32(seed >> 32);
        uint32 lo = uint32(seed);
        uint32 a = _mix(_mix(lo) ^ hi);
        uint32 b = _mix(_mix(hi ^ 0x9e3779b9) ^ lo);
        unchecked {
            return _mix(_mix(token ^ _mix(a ^ position)) + _mix(b + position * 0x85ebca6b));
        }
    }

    function test_samplingHashes() public view {
        string memory vectors = vm.readFile("tests/conformance/vectors/sampling.json");
        uint256 i = 0;
        for (; vm.keyExistsJson(vectors, _at(i, "")); ++i) {
            uint32 hash = _hash(
                uint64(vm.parseJsonUint(vectors, _at(i, ".seed"))),
                uint32(vm.parseJsonUint(vectors, _at(i, ".position"))),
                uint32(vm.parseJsonUint(vectors, _at(i, ".token")))
            );
            assertEq(hash, vm.parseJsonUint(vectors, _at(i, ".hash")), "hash");
        }
        assertGt(i, 0, "cases");
    }

    function _at(uint256 i, string memory field) private pure returns (string memory) {
        return string.concat(".cases[", vm.toString(i), "]", field);
    }
}
