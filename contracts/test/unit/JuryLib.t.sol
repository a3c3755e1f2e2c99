// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {Test} from "forge-std/Test.sol";

import {JuryLib} from "../../src/libraries/JuryLib.sol";

contract JuryLibTest is Test {
    uint256 private constant DRAWS = 400;

    function _weights(uint256 seed, uint256 count) private pure returns (uint256[] memory weights) {
        weights = new uint256[](count);
        for (uint256 i = 0; i < count; ++i) {
            uint256 word = uint256(keccak256(abi.encode(seed, i)));
            // One of four has no weight.
            if (word % 4 != 0) weights[i] = bound(word >> 8, 1, type(uint128).max);
        }
    }

    function _eligible(uint256[] memory weights) private pure returns (uint256 count) {
        for (uint256 i = 0; i < weights.length; ++i) {
            if (weights[i] != 0) ++count;
        }
    }

    function _copy(uint256[] memory values) private pure returns (uint256[] memory copy) {
        copy = new uint256[](values.length);
        for (uint256 i = 0; i < values.length; ++i) {
            copy[i] = values[i];
        }
    }

    function _two(uint256 first, uint256 second) private pure returns (uint256[] memory weights) {
        weights = new uint256[](2);
        (weights[0], weights[1]) = (first, second);
    }

    // --------------------------------------------------------------------- bounds

    function testFuzz_draw_returnsDifferentPlacesThatHaveWeight(uint256 seed, uint256 count, uint256 size) public pure {
        uint256[] memory weights = _weights(seed, bound(count, 0, 88));
        uint256[] memory before = _copy(weights);
        size = bound(size, 0, 100);
        uint256 eligible = _eligible(weights);
        uint256[] memory places = JuryLib.draw(weights, size, bytes32(seed));
        assertEq(places.length, size < eligible ? size : eligible, "as many as asked for or possible");
        for (uint256 i = 0; i < places.length; ++i) {
            assertGt(before[places[i]], 0, "has weight");
            for (uint256 j = 0; j < i; ++j) {
                assertTrue(places[i] != places[j], "different");
            }
        }
    }

    function test_draw_ofNobody_isEmpty() public pure {
        assertEq(JuryLib.draw(new uint256[](0), 3, "seed").length, 0, "no places");
        assertEq(JuryLib.draw(new uint256[](7), 3, "seed").length, 0, "no weights");
    }

    function testFuzz_draw_ofOne_isThatOne(uint256 count, uint256 place, uint256 weight, bytes32 seed) public pure {
        count = bound(count, 1, 88);
        place = bound(place, 0, count - 1);
        uint256[] memory weights = new uint256[](count);
        weights[place] = bound(weight, 1, type(uint128).max);
        uint256[] memory places = JuryLib.draw(weights, 3, seed);
        assertEq(places.length, 1, "one");
        assertEq(places[0], place, "the one");
    }

    // ---------------------------------------------------------------------- order

    /// @dev Against the definition: quotients ascend, and no place left out has a lesser one.
    /// forge-config: default.fuzz.runs = 64
    function testFuzz_draw_followsTheQuotients(uint256 seed, uint256 count, uint256 size) public pure {
        uint256[] memory weights = _weights(seed, bound(count, 1, 40));
        uint256[] memory before = _copy(weights);
        uint256[] memory places = JuryLib.draw(weights, bound(size, 1, 40), bytes32(seed));
        for (uint256 i = 1; i < places.length; ++i) {
            assertTrue(_isBefore(bytes32(seed), before, places[i - 1], places[i]), "ascending");
        }
        for (uint256 i = 0; i < before.length && places.length != 0; ++i) {
            // What was drawn has no weight any more.
            if (weights[i] == 0) continue;
            assertTrue(_isBefore(bytes32(seed), before, places[places.length - 1], i), "left out later");
        }
    }

    function _isBefore(bytes32 seed, uint256[] memory weights, uint256 a, uint256 b) private pure returns (bool) {
        uint256 left = JuryLib.delayOf(seed, a) * weights[b];
        uint256 right = JuryLib.delayOf(seed, b) * weights[a];
        return left < right || (left == right && a < b);
    }

    /// @dev A smaller jury is the beginning of a larger one.
    /// forge-config: default.fuzz.runs = 64
    function testFuzz_draw_extends(uint256 seed, uint256 size) public pure {
        size = bound(size, 0, 20);
        uint256[] memory few = JuryLib.draw(_weights(seed, 30), size, bytes32(seed));
        uint256[] memory more = JuryLib.draw(_weights(seed, 30), size + 1, bytes32(seed));
        for (uint256 i = 0; i < few.length; ++i) {
            assertEq(more[i], few[i], "the same");
        }
    }

    /// @dev -log2(u / 2^128): halving u adds one, whatever the seed; and it never leaves its bounds.
    function testFuzz_delayOf_isALogarithm(bytes32 seed, uint256 place) public pure {
        uint256 delay = JuryLib.delayOf(seed, place);
        uint256 u = (uint256(keccak256(abi.encode(seed, place))) >> 128) | 1;
        assertGe(delay, 1, "positive");
        assertLe(delay, 128 << 32, "at most 128");
        // ceil(-log2(u / 2^128)) = k exactly when u lies in [2^(128-k), 2^(129-k)).
        uint256 whole = (delay + (1 << 32) - 1) >> 32;
        assertGe(u, uint256(1) << (128 - whole), "from below");
        assertLe(u, uint256(1) << (129 - whole), "from above");
    }

    // --------------------------------------------------------------- distribution

    /// @dev Of two places the first is drawn first in proportion to its weight. 400 draws have a standard deviation
    ///      of 10 at most; six of them happen by chance once in 500 million.
    /// forge-config: default.fuzz.runs = 8
    function testFuzz_draw_isInProportionToWeight(uint256 seed, uint256 share) public pure {
        share = bound(share, 1, 99);
        uint256 first;
        for (uint256 i = 0; i < DRAWS; ++i) {
            bytes32 drawSeed = keccak256(abi.encode(seed, i));
            if (JuryLib.draw(_two(share * 1 ether, (100 - share) * 1 ether), 1, drawSeed)[0] == 0) ++first;
        }
        assertApproxEqAbs(first, DRAWS * share / 100, 60, "drawn first");
    }

    /// @dev Splitting a stake over several places gains nothing.
    /// forge-config: default.fuzz.runs = 8
    function testFuzz_draw_isIndifferentToSplitting(uint256 seed) public pure {
        uint256 parts;
        for (uint256 i = 0; i < DRAWS; ++i) {
            uint256[] memory weights = new uint256[](4);
            (weights[0], weights[1], weights[2], weights[3]) = (3 ether, 1 ether, 1 ether, 1 ether);
            if (JuryLib.draw(weights, 1, keccak256(abi.encode(seed, i)))[0] != 0) ++parts;
        }
        assertApproxEqAbs(parts, DRAWS / 2, 60, "three parts of one weigh as much as the whole of three");
    }

    // ------------------------------------------------------------------- grinding

    /// @dev Whoever knows the seed can deposit before it draws. A little more stake must not be a new draw.
    function testFuzz_draw_ignoresALittleMoreStake(uint256 seed, uint256 who, uint256 more) public pure {
        uint256[] memory weights = new uint256[](20);
        for (uint256 i = 0; i < 20; ++i) {
            weights[i] = 2000 ether;
        }
        uint256[] memory raised = _copy(weights);
        raised[bound(who, 0, 19)] += bound(more, 1, 1000);
        assertEq(
            keccak256(abi.encode(JuryLib.draw(weights, 3, bytes32(seed)))),
            keccak256(abi.encode(JuryLib.draw(raised, 3, bytes32(seed)))),
            "the same jury"
        );
    }

    /// @dev More stake of one's own only ever moves oneself forward; the order of all others stays.
    function testFuzz_draw_withMoreStake_onlyMovesItsOwner(uint256 seed, uint256 who, uint256 more) public pure {
        uint256[] memory weights = _weights(seed, 20);
        who = bound(who, 0, 19);
        uint256[] memory raised = _copy(weights);
        raised[who] = bound(more, weights[who], type(uint128).max);
        uint256[] memory before = _without(JuryLib.draw(weights, 20, bytes32(seed)), who);
        uint256[] memory afterwards = _without(JuryLib.draw(raised, 20, bytes32(seed)), who);
        assertEq(keccak256(abi.encode(before)), keccak256(abi.encode(afterwards)), "the others, in the same order");
    }

    function _without(uint256[] memory places, uint256 who) private pure returns (uint256[] memory others) {
        others = new uint256[](20);
        uint256 count;
        for (uint256 i = 0; i < places.length; ++i) {
            if (places[i] != who) others[count++] = places[i] + 1;
        }
    }
}
