// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {Vm} from "forge-std/Vm.sol";

import {
    IContributionLedger,
    IContributionLedgerErrors,
    IContributionLedgerEvents
} from "../../src/interfaces/IContributionLedger.sol";
import {LedgerTest} from "../LedgerTest.sol";

/// @title showOutcomes: validators say on chain what they signed, so that nobody can keep it back
contract LedgerShowTest is LedgerTest {
    uint256 private constant COUNT = 3;

    uint64 private _id;
    bytes private _joined;

    function setUp() public override {
        super.setUp();
        _id = _commit(COUNT);
        _joined = _join(_accepted(COUNT));
    }

    function _signedBy(uint256 key, bytes memory joined) private view returns (bytes memory) {
        return _sign(key, ledger.DOMAIN_SEPARATOR(), _outcomesHash(_id, joined));
    }

    function _show(bytes memory joined, bytes memory records, bytes memory signature) private {
        ledger.showOutcomes(batches[_id], keccak256(joined), records, signature);
    }

    // ------------------------------------------------------------------- success

    function testFuzz_showOutcomes_tellsWhoSignedWhat(address caller, uint256 place, bool withRecords) public {
        place = bound(place, 0, 4);
        bytes memory signature = _signedBy(validatorKeys[place], _joined);
        bytes memory records = withRecords ? _joined : bytes("");
        bytes32 root = batches[_id].root;
        vm.expectEmit(address(ledger));
        emit IContributionLedgerEvents.OutcomesShown(
            _id, validators[place], root, keccak256(_joined), records, signature
        );
        vm.prank(caller);
        _show(_joined, records, signature);
    }

    function test_showOutcomes_tellsThatABatchIsWithheld() public {
        bytes memory signature = _signedBy(validatorKeys[0], "");
        bytes32 root = batches[_id].root;
        vm.expectEmit(address(ledger));
        emit IContributionLedgerEvents.OutcomesShown(_id, validators[0], root, keccak256(""), "", signature);
        _show("", "", signature);
    }

    function test_showOutcomes_changesNothing() public {
        bytes32 before = ledger.commitmentOf(_id);
        _show(_joined, _joined, _signedBy(validatorKeys[0], _joined));
        assertEq(ledger.commitmentOf(_id), before, "shown is not posted");
    }

    function testFuzz_showOutcomes_letsAnybodyPost(uint256 first, uint256 second) public {
        first = bound(first, 0, 3);
        second = bound(second, first + 1, 4);
        vm.recordLogs();
        _show(_joined, _joined, _signedBy(validatorKeys[first], _joined));
        _show(_joined, "", _signedBy(validatorKeys[second], _joined));
        Vm.Log[] memory logs = vm.getRecordedLogs();
        (,, bytes memory records, bytes memory one) = abi.decode(logs[0].data, (bytes32, bytes32, bytes, bytes));
        (,,, bytes memory other) = abi.decode(logs[1].data, (bytes32, bytes32, bytes, bytes));

        vm.prank(stranger);
        ledger.postOutcomes(batches[_id], records, bytes.concat(one, other));
        IContributionLedger.Batch storage posted = batches[_id];
        posted.outcomesRoot = _root(_leaves(_id, _accepted(COUNT)));
        posted.postedAt = uint40(block.timestamp);
        posted.status = IContributionLedger.BatchStatus.Judged;
        posted.signers = runs.seatBitOf(runId, validators[first]) | runs.seatBitOf(runId, validators[second]);
        _assertHeader(_id, "the events are all that a post takes");
    }

    function testFuzz_showOutcomes_worksAfterTheDeadline(uint256 late) public {
        vm.warp(block.timestamp + OUTCOME_DEADLINE + bound(late, 0, 365 days));
        bytes memory signature = _signedBy(validatorKeys[0], _joined);
        bytes32 root = batches[_id].root;
        vm.expectEmit(address(ledger));
        emit IContributionLedgerEvents.OutcomesShown(_id, validators[0], root, keccak256(_joined), _joined, signature);
        _show(_joined, _joined, signature);
    }

    // -------------------------------------------------------------------- header

    function testFuzz_showOutcomes_reverts_whenTheHeaderIsNot(uint256 field) public {
        bytes memory signature = _signedBy(validatorKeys[0], _joined);
        IContributionLedger.Batch memory header = _mutatedHeader(_id, field);
        _expectBatchMismatch(header.batchId);
        ledger.showOutcomes(header, keccak256(_joined), _joined, signature);
    }

    // -------------------------------------------------------------------- signer

    function testFuzz_showOutcomes_reverts_whenTheSignerIsNoValidator(uint256 key) public {
        key = bound(key, 1, 1 << 200);
        vm.assume(!runs.isValidator(runId, vm.addr(key)));
        bytes memory signature = _signedBy(key, _joined);
        _expectInvalidSigner(vm.addr(key));
        _show(_joined, _joined, signature);
    }

    function test_showOutcomes_reverts_whenTheSignerValidatesForAnotherRunOnly() public {
        runId = runs.createRun(_config());
        vm.prank(owner);
        escrow.fund(runId, 1000 ether);
        _id = _commit(COUNT);
        bytes memory signature = _signedBy(validatorKeys[0], _joined);
        _expectInvalidSigner(validators[0]);
        _show(_joined, _joined, signature);
    }

    function testFuzz_showOutcomes_reverts_whenTheSignerLeftItsSeat(uint256 place) public {
        place = bound(place, 0, 4);
        bytes memory signature = _signedBy(validatorKeys[place], _joined);
        vm.prank(validators[place]);
        runs.leaveSeat(runId);
        _expectInvalidSigner(validators[place]);
        _show(_joined, _joined, signature);
    }

    function testFuzz_showOutcomes_reverts_whenTheSignatureIsMalformed(bytes memory signature) public {
        vm.assume(signature.length != 65);
        _expectInvalidSigner(address(0));
        _show(_joined, _joined, signature);
    }

    function testFuzz_showOutcomes_reverts_whenSomethingElseWasSigned(bytes memory other) public {
        vm.assume(keccak256(other) != keccak256(_joined));
        bytes memory signature = _signedBy(validatorKeys[0], other);
        vm.expectPartialRevert(IContributionLedgerErrors.LedgerInvalidSigner.selector);
        _show(_joined, _joined, signature);
    }

    function test_showOutcomes_reverts_whenSignedForAnotherBatch() public {
        bytes memory signature = _signedBy(validatorKeys[0], _joined);
        _id = _commit(COUNT);
        vm.expectPartialRevert(IContributionLedgerErrors.LedgerInvalidSigner.selector);
        _show(_joined, _joined, signature);
    }

    /// @dev Also what contradicts the posted outcomes: whoever signed both can be shown to have.
    function testFuzz_showOutcomes_worksOncePosted(bytes32 recordsHash) public {
        _post(_id, _accepted(COUNT), QUORUM);
        bytes32 root = batches[_id].root;
        bytes32 typeHash = keccak256("Outcomes(uint64 batchId,bytes32 batchRoot,bytes32 recordsHash)");
        bytes32 hash = keccak256(abi.encode(typeHash, _id, root, recordsHash));
        bytes memory signature = _sign(validatorKeys[0], ledger.DOMAIN_SEPARATOR(), hash);
        vm.expectEmit(address(ledger));
        emit IContributionLedgerEvents.OutcomesShown(_id, validators[0], root, recordsHash, "", signature);
        ledger.showOutcomes(batches[_id], recordsHash, "", signature);
    }

    // ------------------------------------------------------------------- records

    function testFuzz_showOutcomes_reverts_whenRecordsAreNotThoseOfTheHash(bytes memory records) public {
        vm.assume(records.length != 0 && keccak256(records) != keccak256(_joined));
        bytes memory signature = _signedBy(validatorKeys[0], _joined);
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerRecordCount.selector, records.length, COUNT * 56)
        );
        _show(_joined, records, signature);
    }
}
