// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

import {IContributionLedger, IContributionLedgerErrors} from "../interfaces/IContributionLedger.sol";

/// @title Packed outcome records: layout, leaves and root
/// @notice A record is `uint32 workerId ‖ uint32 step ‖ uint32 index ‖ uint32 policyVersion ‖ bytes32 fileHash ‖
///         uint16 rollouts ‖ uint32 units ‖ uint8 verdict ‖ uint8 reason`, as in docs/protocol.md section 9.
library OutcomeRecordLib {
    /// @dev Bytes of a record.
    uint256 internal constant SIZE = 56;

    /// @dev The verdicts.
    uint8 internal constant ACCEPTED = 1;
    uint8 internal constant FRAUD = 4;

    /// @dev Returns the leaf of one outcome. Its 68-byte preimage cannot pass for a 64-byte inner node.
    function leafOf(uint64 batchId, uint32 position, bytes calldata record) internal pure returns (bytes32) {
        return keccak256(abi.encodePacked(batchId, position, record));
    }

    /// @dev Returns the fields of a record. Assumes `record` has SIZE bytes.
    function decode(bytes calldata record) internal pure returns (IContributionLedger.Outcome memory outcome) {
        bytes32 head = bytes32(record[0:32]);
        outcome.workerId = uint32(bytes4(head));
        outcome.step = uint32(bytes4(head << 32));
        outcome.index = uint32(bytes4(head << 64));
        outcome.policyVersion = uint32(bytes4(head << 96));
        outcome.fileHash = bytes32(record[16:48]);
        bytes8 tail = bytes8(record[48:56]);
        outcome.rollouts = uint16(bytes2(tail));
        outcome.units = uint32(bytes4(tail << 16));
        outcome.verdict = uint8(bytes1(tail << 48));
        outcome.reason = uint8(bytes1(tail << 56));
    }

    /// @dev Returns the Merkle root over the outcome leaves of a batch: siblings sorted, a node without one moves up
    ///      unchanged. Reverts when a verdict is none of the four. Assumes a positive whole number of records.
    function rootOf(uint64 batchId, bytes calldata records) internal pure returns (bytes32 root) {
        bool valid;
        // Memory-safe: works beyond the free memory pointer, which stays as it is, and in the scratch space.
        assembly ("memory-safe") {
            let buffer := mload(0x40) // the 68-byte preimage of a leaf
            let nodes := add(buffer, 96) // one level of the tree, replaced in place by the next
            let end := nodes
            let header := shl(192, batchId)
            let broken := 0
            for { let source := records.offset } lt(source, add(records.offset, records.length)) {} {
                mstore(buffer, header)
                calldatacopy(add(buffer, 12), source, SIZE)
                mstore(end, keccak256(buffer, 68))
                // The verdict is byte 66 of the buffer, so the last of the word that starts at 35; 0 wraps around.
                broken := or(broken, gt(sub(and(mload(add(buffer, 35)), 0xff), ACCEPTED), sub(FRAUD, ACCEPTED)))
                header := add(header, shl(160, 1)) // the next position
                source := add(source, SIZE)
                end := add(end, 32)
            }
            for {} gt(sub(end, nodes), 32) {} {
                let parent := nodes
                let last := sub(end, 32)
                for { let pair := nodes } lt(pair, last) { pair := add(pair, 64) } {
                    let left := mload(pair)
                    let right := mload(add(pair, 32))
                    let swap := shl(5, gt(left, right))
                    mstore(swap, left)
                    mstore(xor(swap, 32), right)
                    mstore(parent, keccak256(0, 64))
                    parent := add(parent, 32)
                }
                if and(shr(5, sub(end, nodes)), 1) {
                    mstore(parent, mload(last))
                    parent := add(parent, 32)
                }
                end := parent
            }
            root := mload(nodes)
            valid := iszero(broken)
        }
        if (!valid) _revertAtInvalidVerdict(records);
    }

    function _revertAtInvalidVerdict(bytes calldata records) private pure {
        for (uint256 i = 0; i < records.length / SIZE; ++i) {
            uint8 verdict = uint8(records[i * SIZE + 54]);
            require(verdict >= ACCEPTED && verdict <= FRAUD, IContributionLedgerErrors.LedgerInvalidVerdict(i, verdict));
        }
    }
}
