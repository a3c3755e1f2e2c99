// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {Hashes} from "@openzeppelin/contracts/utils/cryptography/Hashes.sol";
import {Test} from "forge-std/Test.sol";

import {IContributionLedger} from "../../src/interfaces/IContributionLedger.sol";
import {OutcomeRecordLib} from "../../src/libraries/OutcomeRecordLib.sol";

/// @dev Proven by halmos for every record, see `make audit`: what a batch is judged by and paid for is what its records
///      say, however the assembly reads them. Hashes are uninterpreted functions.
contract RecordsSymbolic is Test {
    /// @dev A record in three parts, so that halmos sees whole words.
    struct Parts {
        uint128 slot;
        bytes32 fileHash;
        uint64 tail;
    }

    function digest(uint64 batchId, bytes calldata records) external pure returns (bytes32 root, uint256 units) {
        return OutcomeRecordLib.digest(batchId, records);
    }

    function decode(bytes calldata record) external pure returns (IContributionLedger.Outcome memory) {
        return OutcomeRecordLib.decode(record);
    }

    function paymentOf(bytes calldata record)
        external
        pure
        returns (uint32 workerId, uint32 step, uint32 index, uint32 units, uint8 verdict)
    {
        return OutcomeRecordLib.paymentOf(record);
    }

    function _pack(Parts memory parts) private pure returns (bytes memory) {
        return abi.encodePacked(parts.slot, parts.fileHash, parts.tail);
    }

    function _units(Parts memory parts) private pure returns (uint32) {
        return uint32(parts.tail >> 16);
    }

    function _verdict(Parts memory parts) private pure returns (uint8) {
        return uint8(parts.tail >> 8);
    }

    function _isVerdict(Parts memory parts) private pure returns (bool) {
        return _verdict(parts) >= 1 && _verdict(parts) <= 4;
    }

    function _leaf(uint64 batchId, uint32 position, Parts memory parts) private pure returns (bytes32) {
        return keccak256(abi.encodePacked(batchId, position, _pack(parts)));
    }

    /// @dev Three leaves: the third has no sibling and moves up unchanged.
    function check_digest_ofThree(uint64 batchId, Parts memory a, Parts memory b, Parts memory c) public view {
        vm.assume(_isVerdict(a) && _isVerdict(b) && _isVerdict(c));
        (bytes32 root, uint256 units) = this.digest(batchId, abi.encodePacked(_pack(a), _pack(b), _pack(c)));
        bytes32 pair = Hashes.commutativeKeccak256(_leaf(batchId, 0, a), _leaf(batchId, 1, b));
        assert(root == Hashes.commutativeKeccak256(pair, _leaf(batchId, 2, c)));
        assert(units == uint256(_units(a)) + _units(b) + _units(c));
    }

    function check_digest_refusesOtherVerdicts(uint64 batchId, Parts memory a, Parts memory b) public view {
        vm.assume(!_isVerdict(a) || !_isVerdict(b));
        try this.digest(batchId, abi.encodePacked(_pack(a), _pack(b))) {
            assert(false);
        } catch {}
    }

    /// @dev What a payment reads is what everybody else reads.
    function check_paymentOf_agreesWithDecode(Parts memory parts) public view {
        bytes memory record = _pack(parts);
        IContributionLedger.Outcome memory o = this.decode(record);
        (uint32 workerId, uint32 step, uint32 index, uint32 units, uint8 verdict) = this.paymentOf(record);
        assert(workerId == o.workerId && step == o.step && index == o.index);
        assert(units == o.units && verdict == o.verdict);
    }

    /// @dev No two slots of a worker's run share a tag.
    function check_tagOf_isOfOneSlot(uint32 step, uint32 index, uint32 otherStep, uint32 otherIndex) public pure {
        IContributionLedger.Outcome memory o;
        (o.step, o.index) = (step, index);
        uint64 tag = OutcomeRecordLib.tagOf(o);
        (o.step, o.index) = (otherStep, otherIndex);
        assert((OutcomeRecordLib.tagOf(o) == tag) == (step == otherStep && index == otherIndex));
    }
}
