// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

import {IContributionLedger, IContributionLedgerErrors} from "../interfaces/IContributionLedger.sol";

/// @title Packed outcome records: layout, leaves and root
/// @notice A record is `uint32 workerId ‖ uint32 step ‖ uint32 index ‖ uint32 policyVersion ‖ bytes32 fileHash ‖
///         uint16 rollouts ‖ uint32 units ‖ uint8 verdict ‖ uint8 reason`, as in docs/protocol.md section 9.
library OutcomeRecordLib {
    /// @dev EIP-712 type of a submission, as in docs/protocol.md section 3.
    bytes32 internal constant SUBMISSION_TYPEHASH = keccak256(
        "Submission(uint64 runId,address worker,uint32 step,uint32 index,uint32 policyVersion,bytes32 fileHash,uint32 rollouts,uint64 units)"
    );

    /// @dev Bytes of a record.
    uint256 internal constant SIZE = 56;

    /// @dev The verdicts.
    uint8 internal constant ACCEPTED = 1;
    uint8 internal constant FRAUD = 4;

    /// @dev The reasons of exact faults: checks 3 to 5 of docs/protocol.md section 8.
    uint8 private constant FIRST_EXACT_REASON = 30;
    uint8 private constant LAST_EXACT_REASON = 59;

    /// @dev Returns the leaf of one outcome. Its 68-byte preimage cannot pass for a 64-byte inner node.
    ///      Assumes a record of SIZE bytes.
    function leafOf(uint64 batchId, uint32 position, bytes calldata record) internal pure returns (bytes32 leaf) {
        // Memory-safe: works beyond the free memory pointer, which stays as it is.
        assembly ("memory-safe") {
            let preimage := mload(0x40)
            mstore(preimage, or(shl(192, batchId), shl(160, position)))
            calldatacopy(add(preimage, 12), record.offset, SIZE)
            leaf := keccak256(preimage, add(12, SIZE))
        }
    }

    /// @dev Returns the number of a slot within a worker's run.
    function tagOf(IContributionLedger.Outcome memory outcome) internal pure returns (uint64) {
        return tagOf(outcome.step, outcome.index);
    }

    function tagOf(uint32 step, uint32 index) internal pure returns (uint64) {
        return uint64(step) << 32 | index;
    }

    /// @dev Returns whether a verdict and its reason are an exact fault, which one look proves.
    function isExact(uint8 verdict, uint8 reason) internal pure returns (bool) {
        return verdict == FRAUD && reason >= FIRST_EXACT_REASON && reason <= LAST_EXACT_REASON;
    }

    /// @dev Returns the record at a place of joined ones. Assumes that there is one.
    function at(bytes calldata records, uint256 place) internal pure returns (bytes calldata record) {
        assembly ("memory-safe") {
            record.offset := add(records.offset, mul(place, SIZE))
            record.length := SIZE
        }
    }

    /// @dev Returns the fields that a payment depends on; cheaper than all of them. Assumes a record of SIZE bytes.
    function paymentOf(bytes calldata record)
        internal
        pure
        returns (uint32 workerId, uint32 step, uint32 index, uint32 units, uint8 verdict)
    {
        uint256 head;
        uint256 tail;
        // The first and the last word of the record.
        assembly ("memory-safe") {
            head := calldataload(record.offset)
            tail := calldataload(add(record.offset, sub(SIZE, 32)))
        }
        // Cutting off is the purpose: every cast keeps one field and drops those before it.
        // forge-lint: disable-start(unsafe-typecast)
        workerId = uint32(head >> 224);
        step = uint32(head >> 192);
        index = uint32(head >> 160);
        units = uint32(tail >> 16);
        verdict = uint8(tail >> 8);
        // forge-lint: disable-end(unsafe-typecast)
    }

    /// @dev Returns the fields of a record. Assumes `record` has SIZE bytes.
    function decode(bytes calldata record) internal pure returns (IContributionLedger.Outcome memory outcome) {
        bytes32 head = bytes32(record[0:32]);
        bytes8 tail = bytes8(record[48:56]);
        // Cutting off is the purpose: every cast keeps one field and drops those after it.
        // forge-lint: disable-start(unsafe-typecast)
        outcome.workerId = uint32(bytes4(head));
        outcome.step = uint32(bytes4(head << 32));
        outcome.index = uint32(bytes4(head << 64));
        outcome.policyVersion = uint32(bytes4(head << 96));
        outcome.fileHash = bytes32(record[16:48]);
        outcome.rollouts = uint16(bytes2(tail));
        outcome.units = uint32(bytes4(tail << 16));
        outcome.verdict = uint8(bytes1(tail << 48));
        outcome.reason = uint8(bytes1(tail << 56));
        // forge-lint: disable-end(unsafe-typecast)
    }

    /// @dev Returns the Merkle root over the outcome leaves of a batch, siblings sorted, a node without one moving up
    ///      unchanged; and the sum of the records' units. Reverts when a verdict is none of the four. Assumes a
    ///      positive whole number of records.
    function digest(uint64 batchId, bytes calldata records) internal pure returns (bytes32 root, uint256 units) {
        uint256 verdicts;
        // Memory-safe: works beyond the free memory pointer, which stays as it is.
        assembly ("memory-safe") {
            // A leaf's preimage is 12 bytes of place and then the record. The records are copied once; the word
            // before each one then takes its place, over the end of the record before, which is hashed by then.
            // Leaves go to the front: 32 bytes each, they stay behind the 56-byte records being read.
            let nodes := mload(0x40)
            let word := nodes
            calldatacopy(add(nodes, 32), records.offset, records.length)
            let end := nodes
            let place := shl(32, batchId)
            for { let last := add(nodes, records.length) } lt(word, last) {} {
                mstore(word, place)
                mstore(end, keccak256(add(word, 20), 68))
                // Below 1 wraps around, so valid verdicts alone leave nothing above the two lowest bits.
                let tail := mload(add(word, 56))
                verdicts := or(verdicts, sub(and(shr(8, tail), 0xff), ACCEPTED))
                units := add(units, and(shr(16, tail), 0xffffffff))
                place := add(place, 1)
                word := add(word, SIZE)
                end := add(end, 32)
            }
            // One level of the tree after the other, each in place of the one below.
            for {} gt(sub(end, nodes), 32) {} {
                let parent := nodes
                let last := sub(end, 32)
                for { let pair := nodes } lt(pair, last) { pair := add(pair, 64) } {
                    let left := mload(pair)
                    let right := mload(add(pair, 32))
                    if gt(left, right) {
                        mstore(pair, right)
                        mstore(add(pair, 32), left)
                    }
                    mstore(parent, keccak256(pair, 64))
                    parent := add(parent, 32)
                }
                if and(shr(5, sub(end, nodes)), 1) {
                    mstore(parent, mload(last))
                    parent := add(parent, 32)
                }
                end := parent
            }
            root := mload(nodes)
        }
        if (verdicts > FRAUD - ACCEPTED) _revertAtInvalidVerdict(records);
    }

    function _revertAtInvalidVerdict(bytes calldata records) private pure {
        for (uint256 i = 0; i < records.length / SIZE; ++i) {
            uint8 verdict = uint8(records[i * SIZE + 54]);
            require(verdict >= ACCEPTED && verdict <= FRAUD, IContributionLedgerErrors.LedgerInvalidVerdict(i, verdict));
        }
    }
}
