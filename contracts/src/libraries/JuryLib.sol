// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

/// @title Drawing a jury
/// @notice The rule of docs/protocol.md section 9; `muster.protocol.jury` is the Python twin.
library JuryLib {
    /// @dev Returns up to `size` different places, drawn one after the other with probability proportional to their
    ///      weight among those left. Places of weight zero are never drawn. Draw *i* is
    ///      `keccak256(abi.encode(seed, i)) mod` the weight left: its bias is below 2^-128 for weights below 2^128.
    function draw(uint256[] memory weights, uint256 size, bytes32 seed)
        internal
        pure
        returns (uint256[] memory places)
    {
        (uint256 left, uint256 eligible) = _sum(weights);
        places = new uint256[](size < eligible ? size : eligible);
        for (uint256 i = 0; i < places.length; ++i) {
            uint256 place = _placeAt(weights, uint256(keccak256(abi.encode(seed, i))) % left);
            places[i] = place;
            left -= weights[place];
            weights[place] = 0;
        }
    }

    function _sum(uint256[] memory weights) private pure returns (uint256 sum, uint256 eligible) {
        for (uint256 i = 0; i < weights.length; ++i) {
            sum += weights[i];
            if (weights[i] != 0) ++eligible;
        }
    }

    /// @dev Returns the place whose interval of the laid out weights holds `point`, which is below their sum.
    function _placeAt(uint256[] memory weights, uint256 point) private pure returns (uint256 place) {
        while (point >= weights[place]) {
            point -= weights[place];
            ++place;
        }
    }
}
