// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

/// @title What a worker must do, derived from its ticket
/// @notice The rules of docs/protocol.md section 4; `muster.protocol.seeds` is the Python twin.
library SeedLib {
    /// @notice Thrown when more problems are asked for than the task set holds.
    error SeedTooFewProblems(uint256 count, uint256 taskSetSize);

    /// @dev Streams drawn from one seed.
    uint256 internal constant PROBLEM = 0;
    uint256 internal constant TARGET_LENGTH = 1;
    uint256 internal constant SAMPLE = 2;
    uint256 internal constant PART = 3;
    uint256 internal constant REVISIT = 4;

    /// @dev Returns the seed of a ticket.
    function ticketSeed(uint64 runId, bytes32 beacon, address worker, uint32 step, uint32 index)
        internal
        pure
        returns (bytes32)
    {
        return keccak256(abi.encode(runId, beacon, worker, step, index));
    }

    /// @dev Returns the `counter`-th integer of one stream.
    function draw(bytes32 seed, uint256 purpose, uint256 counter) internal pure returns (uint64) {
        return uint64(bytes8(keccak256(abi.encode(seed, purpose, counter))));
    }

    /// @dev Returns `count` distinct indices below `taskSetSize`, in the order drawn; repeats are skipped.
    function problemIndices(bytes32 seed, uint256 count, uint256 taskSetSize)
        internal
        pure
        returns (uint256[] memory indices)
    {
        require(count <= taskSetSize, SeedTooFewProblems(count, taskSetSize));
        indices = new uint256[](count);
        uint256 found;
        for (uint256 counter = 0; found < count; ++counter) {
            uint256 index = draw(seed, PROBLEM, counter) % taskSetSize;
            if (!_contains(indices, found, index)) indices[found++] = index;
        }
    }

    /// @dev Returns which part of a mixture the `problem`-th problem is of. Assumes weights that are not all 0.
    function partOf(bytes32 seed, uint256 problem, uint256[] memory weights) internal pure returns (uint256 part) {
        uint256 sum;
        for (uint256 i = 0; i < weights.length; ++i) {
            sum += weights[i];
        }
        uint256 place = draw(seed, PART, problem) % sum;
        while (place >= weights[part]) {
            place -= weights[part++];
        }
    }

    /// @dev Returns a distinct index for each problem, from `start` of its part on. Assumes that two parts are the
    /// same or have nothing in common, and that each holds as many problems as are drawn from it.
    function mixedIndices(bytes32 seed, uint256[] memory starts, uint256[] memory sizes)
        internal
        pure
        returns (uint256[] memory indices)
    {
        indices = new uint256[](starts.length);
        uint256 found;
        for (uint256 counter = 0; found < starts.length; ++counter) {
            uint256 index = starts[found] + draw(seed, PROBLEM, counter) % sizes[found];
            if (!_contains(indices, found, index)) indices[found++] = index;
        }
    }

    /// @dev Returns a distinct index for each problem as `mixedIndices` does, past those that are set aside. Bit
    /// `i % 8`, from the lowest, of `setAside[i / 8]` is problem i's; problem j is not drawn past the list where it
    /// `revisits` with `every[j]`. Assumes a list that leaves as many problems of each part as are drawn from it.
    function indicesPast(
        bytes32 seed,
        uint256[] memory starts,
        uint256[] memory sizes,
        bytes memory setAside,
        uint256[] memory every
    ) internal pure returns (uint256[] memory indices) {
        indices = new uint256[](starts.length);
        uint256 found;
        for (uint256 counter = 0; found < starts.length; ++counter) {
            uint256 index = starts[found] + draw(seed, PROBLEM, counter) % sizes[found];
            if (_isSet(setAside, index) && !revisits(seed, found, every[found])) continue;
            if (!_contains(indices, found, index)) indices[found++] = index;
        }
    }

    /// @dev Returns whether the `problem`-th problem may be one that is set aside: one in `every`, all where that is 0.
    function revisits(bytes32 seed, uint256 problem, uint256 every) internal pure returns (bool) {
        return every == 0 || draw(seed, REVISIT, problem) % every == 0;
    }

    /// @dev Returns the budget of the `problem`-th problem in tokens, -1 without budgets.
    function targetLength(bytes32 seed, uint256 problem, uint256[] memory lengths) internal pure returns (int256) {
        if (lengths.length == 0) return -1;
        return int256(lengths[draw(seed, TARGET_LENGTH, problem) % lengths.length]);
    }

    /// @dev Returns the sampling seed of one sample of the `problem`-th problem.
    function sampleSeed(bytes32 seed, uint256 problem, uint256 sample, uint256 samplesPerProblem)
        internal
        pure
        returns (uint64)
    {
        return draw(seed, SAMPLE, problem * samplesPerProblem + sample);
    }

    function _isSet(bytes memory bits, uint256 index) private pure returns (bool) {
        return index / 8 < bits.length && (uint8(bits[index / 8]) >> (index % 8)) & 1 == 1;
    }

    function _contains(uint256[] memory values, uint256 length, uint256 value) private pure returns (bool) {
        for (uint256 i = 0; i < length; ++i) {
            if (values[i] == value) return true;
        }
        return false;
    }
}
