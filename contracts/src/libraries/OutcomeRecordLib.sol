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
        outcome.workerId = uint32(bytes4(record[0:4]));
        outcome.step = uint32(bytes4(record[4:8]));
        outcome.index = uint32(bytes4(record[8:12]));
        outcome.policyVersion = uint32(bytes4(record[12:16]));
        outcome.fileHash = bytes32(record[16:48]);
        outcome.rollouts = uint16(bytes2(record[48:50]));
        outcome.units = uint32(bytes4(record[50:54]));
        outcome.verdict = uint8(record[54]);
        outcome.reason = uint8(record[55]);
    }

    /// @dev Returns the Merkle root over the outcome leaves of a batch: siblings sorted, a node without one moves up
    ///      unchanged. Reverts when a verdict is none of the four. Assumes a positive whole number of records.
    function rootOf(uint64 batchId, bytes calldata records) internal pure returns (bytes32 root) {
        uint256 broken;
        // Memory-safe: works beyond the free memory pointer, which stays as it is, and in the scratch space.
        assembly ("memory-safe") {
            let buffer := mload(0x40) // the 68-byte preimage of a leaf
            let nodes := add(buffer, 96) // one level of the tree, in place
            let count := div(records.length, SIZE)
            let prefix := shl(192, batchId)
            let source := records.offset
            for { let i := 0 } lt(i, count) { i := add(i, 1) } {
                mstore(buffer, or(prefix, shl(160, i)))
                calldatacopy(add(buffer, 12), source, SIZE)
                mstore(add(nodes, shl(5, i)), keccak256(buffer, 68))
                // The verdict is byte 66 of the buffer, so the last of the word that starts at 35. Below 1 wraps around.
                if gt(sub(and(mload(add(buffer, 35)), 0xff), 1), 3) { broken := add(i, 1) }
                source := add(source, SIZE)
            }
            for {} gt(count, 1) {} {
                let half := shr(1, count)
                for { let i := 0 } lt(i, half) { i := add(i, 1) } {
                    let pair := add(nodes, shl(6, i))
                    let left := mload(pair)
                    let right := mload(add(pair, 32))
                    let swap := gt(left, right)
                    mstore(shl(5, swap), left)
                    mstore(shl(5, iszero(swap)), right)
                    mstore(add(nodes, shl(5, i)), keccak256(0, 64))
                }
                if and(count, 1) { mstore(add(nodes, shl(5, half)), mload(add(nodes, shl(5, sub(count, 1))))) }
                count := add(half, and(count, 1))
            }
            root := mload(nodes)
        }
        if (broken != 0) {
            uint8 verdict = uint8(records[(broken - 1) * SIZE + 54]);
            revert IContributionLedgerErrors.LedgerInvalidVerdict(broken - 1, verdict);
        }
    }
}
