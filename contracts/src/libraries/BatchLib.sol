// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

import {IContributionLedger, IContributionLedgerErrors} from "../interfaces/IContributionLedger.sol";

/// @title The one word that stands for a batch
/// @notice The hash of the batch's header, whose lowest bit tells whether an outcome of it was ever challenged.
library BatchLib {
    /// @dev The bit that tells whether an outcome was challenged.
    bytes32 internal constant DISPUTED = bytes32(uint256(1));

    /// @dev Bytes of an encoded header: twelve words.
    uint256 private constant HEADER_SIZE = 384;

    /// @dev Returns the word of a batch nobody challenged.
    function hashOf(IContributionLedger.Batch memory batch) internal pure returns (bytes32) {
        return keccak256(abi.encode(batch)) & ~DISPUTED;
    }

    /// @dev Returns whether an outcome of the batch was challenged; reverts unless `stored` is of this header.
    function check(IContributionLedger.Batch calldata batch, bytes32 stored) internal pure returns (bool disputed) {
        bytes32 hash;
        // Memory-safe: works beyond the free memory pointer. What lies in calldata is the encoding already; a field
        // with more bits than its type has another hash than any header that was stored.
        assembly ("memory-safe") {
            let header := mload(0x40)
            calldatacopy(header, batch, HEADER_SIZE)
            hash := keccak256(header, HEADER_SIZE)
        }
        require(stored | DISPUTED == hash | DISPUTED, IContributionLedgerErrors.LedgerBatchMismatch(batch.batchId));
        return stored & DISPUTED != 0;
    }
}
