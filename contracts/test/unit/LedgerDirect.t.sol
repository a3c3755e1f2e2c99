// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {
    IContributionLedger,
    IContributionLedgerErrors,
    IContributionLedgerEvents
} from "../../src/interfaces/IContributionLedger.sol";
import {IRewardEscrowErrors} from "../../src/interfaces/IRewardEscrow.sol";
import {IRunRegistryErrors} from "../../src/interfaces/IRunRegistry.sol";
import {IStakeVaultEvents} from "../../src/interfaces/IStakeVault.sol";
import {LedgerTest} from "../LedgerTest.sol";

/// forge-config: default.fuzz.runs = 128
contract LedgerDirectTest is LedgerTest {
    uint256 private constant CAP = REQUIRED_STAKE / STAKE_PER_UNIT;

    function setUp() public override {
        super.setUp();
        _startRun(WALLET / 2);
    }

    /// @dev A submission of Alice that her node signed.
    function _signed(uint32 index, uint256 units)
        private
        view
        returns (IContributionLedger.Submission memory submission, bytes memory signature)
    {
        submission = _submission(alice, 1, index);
        submission.units = uint64(units);
        signature = _signSubmission(submission, aliceNodeKey);
    }

    function _submit(uint32 index, uint256 units) private returns (uint64) {
        (IContributionLedger.Submission memory submission, bytes memory signature) = _signed(index, units);
        vm.prank(alice);
        return ledger.submitDirect(submission, signature);
    }

    // ---------------------------------------------------------------- admission

    function test_submitDirect_reverts_whenPaused() public {
        vm.prank(owner);
        runs.setSubmissionsPaused(runId, true);
        _expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerPaused.selector, runId), alice);
    }

    function test_submitDirect_reverts_whenClosed() public {
        vm.prank(owner);
        runs.closeRun(runId);
        _expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerPaused.selector, runId), aliceNode);
    }

    function _expectRevert(bytes memory why, address caller) private {
        (IContributionLedger.Submission memory submission, bytes memory signature) = _signed(0, 1000);
        vm.expectRevert(why);
        vm.prank(caller);
        ledger.submitDirect(submission, signature);
    }

    function testFuzz_submitDirect_reverts_whenRunIsUnknown(uint64 unknown) public {
        vm.assume(unknown != runId);
        (IContributionLedger.Submission memory submission,) = _signed(0, 1000);
        submission.runId = unknown;
        bytes memory signature = _signSubmission(submission, aliceNodeKey);
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunUnknown.selector, unknown));
        vm.prank(alice);
        ledger.submitDirect(submission, signature);
    }

    function testFuzz_submitDirect_reverts_whenTheRunCannotPay(uint256 units) public {
        units = bound(units, 1, CAP);
        vm.prank(orchestrator);
        ledger.commitBatch(runId, keccak256("all"), 1, uint64(WALLET / 2 / PRICE));
        (IContributionLedger.Submission memory submission, bytes memory signature) = _signed(0, units);
        vm.expectRevert(abi.encodeWithSelector(IRewardEscrowErrors.EscrowUnderfunded.selector, runId, units * PRICE, 0));
        vm.prank(alice);
        ledger.submitDirect(submission, signature);
    }

    // ------------------------------------------------------------------ evidence

    function testFuzz_submitDirect_reverts_whenNotSignedByTheNode(uint256 key) public {
        key = bound(key, 1, 1 << 200);
        vm.assume(key != aliceNodeKey);
        _expectInvalidSubmission(_submission(alice, 1, 0), key);
    }

    function test_submitDirect_reverts_whenSignedByAnotherWorkersNode() public {
        _expectInvalidSubmission(_submission(alice, 1, 0), bobNodeKey);
    }

    function test_submitDirect_reverts_whenTheWalletSigns() public {
        _expectInvalidSubmission(_submission(alice, 1, 0), aliceKey);
    }

    function testFuzz_submitDirect_reverts_whenTheNodeWasReplaced(uint256 key) public {
        key = bound(key, 1, 1 << 200);
        bytes memory consent = _consent(alice, vm.addr(key), key, block.timestamp);
        vm.prank(alice);
        workers.rotateNode(vm.addr(key), block.timestamp, consent);
        _expectInvalidSubmission(_submission(alice, 1, 0), aliceNodeKey);
    }

    function test_submitDirect_reverts_whenWorkerIsJailed() public {
        vm.prank(address(faults));
        workers.jail(alice, "offence");
        _expectInvalidSubmission(_submission(alice, 1, 0), aliceNodeKey);
    }

    function testFuzz_submitDirect_reverts_whenAFieldHoldsMoreThanARecord(uint64 units, uint32 rollouts, bool which)
        public
    {
        IContributionLedger.Submission memory submission = _submission(alice, 1, 0);
        if (which) submission.units = uint64(bound(units, uint256(type(uint32).max) + 1, type(uint64).max));
        else submission.rollouts = uint32(bound(rollouts, uint256(type(uint16).max) + 1, type(uint32).max));
        _expectInvalidSubmission(submission, aliceNodeKey);
    }

    function _expectInvalidSubmission(IContributionLedger.Submission memory submission, uint256 key) private {
        bytes memory signature = _signSubmission(submission, key);
        vm.expectRevert(
            abi.encodeWithSelector(
                IContributionLedgerErrors.LedgerInvalidSubmission.selector, submission.worker, vm.addr(key)
            )
        );
        vm.prank(submission.worker);
        ledger.submitDirect(submission, signature);
    }

    function testFuzz_submitDirect_reverts_whenSignatureIsMalformed(bytes memory signature, address worker) public {
        vm.assume(signature.length != 65);
        IContributionLedger.Submission memory submission = _submission(worker, 1, 0);
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidSubmission.selector, worker, address(0))
        );
        vm.prank(worker);
        ledger.submitDirect(submission, signature);
    }

    function testFuzz_submitDirect_reverts_whenAnythingSignedWasChanged(uint256 field, uint32 change) public {
        vm.assume(change != 0);
        (IContributionLedger.Submission memory submission, bytes memory signature) = _signed(0, 1000);
        field = bound(field, 0, 6);
        if (field == 0) submission.worker = bob;
        if (field == 1) submission.step ^= change;
        if (field == 2) submission.index ^= change;
        if (field == 3) submission.policyVersion ^= change;
        if (field == 4) submission.fileHash ^= bytes32(uint256(change));
        if (field == 5) submission.rollouts ^= change;
        if (field == 6) submission.units ^= change;
        vm.expectPartialRevert(IContributionLedgerErrors.LedgerInvalidSubmission.selector);
        vm.prank(submission.worker);
        ledger.submitDirect(submission, signature);
    }

    // -------------------------------------------------------------------- caller

    function testFuzz_submitDirect_reverts_whenSomebodyElseCalls(address caller) public {
        vm.assume(caller != alice && caller != aliceNode);
        _expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerUnauthorized.selector, caller), caller);
    }

    // ---------------------------------------------------------------------- slot

    function testFuzz_submitDirect_reverts_whenTheSlotWasUsed(uint32 index, bytes32 otherFile, uint256 waited) public {
        (IContributionLedger.Submission memory submission, bytes memory signature) = _signed(index, 1000);
        vm.startPrank(aliceNode);
        ledger.submitDirect(submission, signature);
        vm.warp(block.timestamp + bound(waited, 0, 2 * JUDGED));
        submission.fileHash = otherFile;
        signature = _signSubmission(submission, aliceNodeKey);
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerSlotUsed.selector, runId, alice, 1, index)
        );
        ledger.submitDirect(submission, signature);
    }

    function testFuzz_submitDirect_tellsSlotsApart(uint32 step, uint32 index) public {
        vm.assume(step != 1 || index != 0);
        _submit(0, 1000);
        IContributionLedger.Submission memory submission = _submission(alice, 1, 0);
        (submission.step, submission.index) = (step, index);
        bytes memory signature = _signSubmission(submission, aliceNodeKey);
        vm.prank(alice);
        assertEq(ledger.submitDirect(submission, signature), 2, "another slot");
    }

    // ----------------------------------------------------------------------- cap

    function testFuzz_submitDirect_reverts_aboveTheCap(uint256 units) public {
        _expectUnitCap(1, bound(units, CAP + 1, type(uint32).max), 0);
    }

    function testFuzz_submitDirect_reverts_whenWorkInFlightFillsTheCap(uint256 first) public {
        first = bound(first, 1, CAP);
        _submit(0, first);
        _expectUnitCap(1, CAP - first + 1, first);
        assertEq(_submit(1, CAP - first), 2, "up to the cap");
    }

    function testFuzz_submitDirect_coversWithWhatIsStaked(uint256 extra) public {
        extra = bound(extra, 0, WALLET - REQUIRED_STAKE);
        if (extra != 0) _deposit(alice, extra);
        uint256 cap = (REQUIRED_STAKE + extra) / STAKE_PER_UNIT;
        vm.prank(owner);
        escrow.fund(runId, WALLET / 2);
        assertEq(ledger.unitCapOf(alice), cap, "cap");
        _submit(0, cap > WALLET / PRICE ? WALLET / PRICE : cap);
    }

    function testFuzz_submitDirect_countsUntilFinal(uint256 units, uint256 waited) public {
        units = bound(units, 1, CAP);
        waited = bound(waited, 0, JUDGED - 1);
        _submit(0, CAP);
        uint256 start = block.timestamp;
        vm.warp(start + waited);
        _expectUnitCap(1, units, CAP);
        vm.warp(start + JUDGED);
        assertEq(_submit(1, units), 2, "all before is final");
        _expectUnitCap(2, CAP - units + 1, units);
    }

    function testFuzz_submitDirect_countsAllWork_untilTheLastIsFinal(uint256 first, uint256 gap) public {
        first = bound(first, 1, CAP - 1);
        gap = bound(gap, 1, JUDGED - 1);
        _submit(0, first);
        vm.warp(block.timestamp + gap);
        _submit(1, CAP - first);
        vm.warp(block.timestamp + JUDGED - 1);
        _expectUnitCap(2, 1, CAP);
        vm.warp(block.timestamp + 1);
        assertEq(_submit(2, CAP), 3, "one clock for all of it: it errs on the side of stake");
    }

    function _expectUnitCap(uint32 index, uint256 units, uint256 before) private {
        (IContributionLedger.Submission memory submission, bytes memory signature) = _signed(index, units);
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerUnitCap.selector, alice, before + units, CAP)
        );
        vm.prank(alice);
        ledger.submitDirect(submission, signature);
    }

    // -------------------------------------------------------------------- records

    function testFuzz_submitDirect_commitsABatchOfOne(bool byNode, uint32 step, uint32 index, uint64 units) public {
        (IContributionLedger.Submission memory submission,) = _signed(index, bound(units, 0, CAP));
        submission.step = step;
        bytes memory signature = _signSubmission(submission, aliceNodeKey);
        bytes32 leaf = _submissionLeaf(submission);

        vm.expectEmit(address(vault));
        emit IStakeVaultEvents.StakeHeld(alice, block.timestamp + JUDGED, 0);
        vm.expectEmit(address(ledger));
        emit IContributionLedgerEvents.BatchCommitted(
            1, runId, leaf, 1, submission.units, PRICE, uint40(block.timestamp)
        );
        vm.expectEmit(address(ledger));
        emit IContributionLedgerEvents.DirectlySubmitted(1, alice, submission, signature);
        vm.prank(byNode ? aliceNode : alice);
        uint64 batchId = ledger.submitDirect(submission, signature);

        _remember(batchId, leaf, 1, submission.units);
        assertFalse(ledger.isDisputed(batches[batchId]), "the leaf is the root of a batch of one");
        assertEq(vault.accountOf(alice).heldUntil, block.timestamp + JUDGED, "the stake stays");
        assertEq(escrow.fundsOf(runId).reserved, uint256(submission.units) * PRICE, "set aside");
    }
}
