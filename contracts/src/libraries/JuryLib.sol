// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

import {Math} from "@openzeppelin/contracts/utils/math/Math.sol";

/// @title Drawing a jury
/// @notice The rule of docs/protocol.md section 9; `muster.protocol.jury` is the Python twin.
library JuryLib {
    /// @dev Bits after the point of a delay.
    uint256 private constant FRACTION_BITS = 32;

    /// @dev The delay of the least number there is.
    uint256 private constant LONGEST_DELAY = 128 * 2 ** FRACTION_BITS;

    /// @dev Returns up to `size` different places in the order of `delay / weight`, the least first. Places of weight
    ///      zero are never drawn, equal quotients go to the lower place. Assumes weights below 2^128.
    ///      This is drawing one after the other with probability proportional to the weight among those left
    ///      (Efraimidis and Spirakis 2006). No place's quotient depends on another's weight, and the own one hardly
    ///      moves with a little more of it: whoever knows the seed cannot try small deposits until a friend is drawn.
    function draw(uint256[] memory weights, uint256 size, bytes32 seed)
        internal
        pure
        returns (uint256[] memory places)
    {
        uint256 eligible;
        uint256[] memory delays = new uint256[](weights.length);
        for (uint256 i = 0; i < weights.length; ++i) {
            if (weights[i] == 0) continue;
            ++eligible;
            delays[i] = delayOf(seed, i);
        }
        places = new uint256[](size < eligible ? size : eligible);
        for (uint256 i = 0; i < places.length; ++i) {
            places[i] = _takeFirst(weights, delays);
        }
    }

    /// @dev Returns -log2(u / 2^128) with 32 bits after the point, rounded up: at least 1, at most 128 · 2^32. `u` is
    ///      the upper half of `keccak256(abi.encode(seed, place))` with its lowest bit set.
    function delayOf(bytes32 seed, uint256 place) internal pure returns (uint256) {
        uint256 u = (uint256(keccak256(abi.encode(seed, place))) >> 128) | 1;
        uint256 whole = Math.log2(u);
        uint256 log = whole;
        uint256 y = u << (127 - whole);
        for (uint256 i = 0; i < FRACTION_BITS; ++i) {
            // Below 2^128, so that its square fits; the square of a number in [1, 2) tells the next bit.
            y = (y * y) >> 127;
            uint256 bit = y >> 128;
            y >>= bit;
            log = (log << 1) | bit;
        }
        return LONGEST_DELAY - log;
    }

    /// @dev Returns the place with the least delay by weight, and takes its weight away. Assumes that one has weight.
    function _takeFirst(uint256[] memory weights, uint256[] memory delays) private pure returns (uint256 first) {
        for (uint256 i = 1; i < weights.length; ++i) {
            if (weights[i] == 0) continue;
            // A first that has no weight loses to any place that has.
            if (weights[first] == 0 || delays[i] * weights[first] < delays[first] * weights[i]) first = i;
        }
        weights[first] = 0;
    }
}
