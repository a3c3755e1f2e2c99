// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

/// @title URLs that show a file
library SourcesLib {
    /// @notice Thrown when there are more than 16 URLs, or one has more than 128 bytes. `size` is zero when they are too many.
    error SourcesTooLarge(uint256 count, uint256 size);

    uint256 private constant MAX_COUNT = 16;
    uint256 private constant MAX_SIZE = 128;

    /// @dev Reverts unless the URLs are few and short: whoever judges fetches each, and events keep them.
    function check(string[] calldata sources) internal pure {
        require(sources.length <= MAX_COUNT, SourcesTooLarge(sources.length, 0));
        for (uint256 i = 0; i < sources.length; ++i) {
            uint256 size = bytes(sources[i]).length;
            require(size <= MAX_SIZE, SourcesTooLarge(sources.length, size));
        }
    }
}
