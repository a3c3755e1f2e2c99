// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {
    IContributionLedger,
    IContributionLedgerErrors,
    IContributionLedgerEvents
} from "../../src/interfaces/IContributionLedger.sol";
import {IRunRegistryErrors} from "../../src/interfaces/IRunRegistry.sol";
import {BaseTest} from "../BaseTest.sol";

contract LedgerCommitTest is BaseTest {
    function setUp() public override {
        super.setUp();
        _startRun(0);
    }

    function _pause() private {
        vm.prank(owner);
        runs.setSubmissionsPaused(runId, true);
    }

    // --------------------------------------------------------------- commit batch

    function testFuzz_commitBatch_reverts_whenNotTheOrchestrator(address caller) public {
        vm.assume(caller != orchestrator);
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerUnauthorized.selector, caller));
        vm.prank(caller);
        ledger.commitBatch(runId, keccak256("root"), 1, 1);
    }

    function testFuzz_commitBatch_reverts_whenRunIsUnknown(uint64 unknown) public {
        vm.assume(unknown != runId);
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunUnknown.selector, unknown));
        vm.prank(orchestrator);
        ledger.commitBatch(unknown, keccak256("root"), 1, 1);
    }

    function test_commitBatch_reverts_whenPaused() public {
        _pause();
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerPaused.selector, runId));
        vm.prank(orchestrator);
        ledger.commitBatch(runId, keccak256("root"), 1, 1);
    }

    function testFuzz_commitBatch_reverts_whenCountIsOutOfRange(uint32 count) public {
        vm.assume(count == 0 || count > 4096);
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidBatch.selector, keccak256("root"), count)
        );
        vm.prank(orchestrator);
        ledger.commitBatch(runId, keccak256("root"), count, 1);
    }

    function testFuzz_commitBatch_reverts_whenRootIsZero(uint32 count) public {
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidBatch.selector, bytes32(0), count)
        );
        vm.prank(orchestrator);
        ledger.commitBatch(runId, 0, count, 1);
    }

    function testFuzz_commitBatch_records(bytes32 root, uint32 count, uint64 units, uint40 time) public {
        vm.assume(root != 0);
        count = uint32(bound(count, 1, 4096));
        vm.warp(time);
        vm.expectEmit(address(ledger));
        emit IContributionLedgerEvents.BatchCommitted(1, runId, root, count, units);
        vm.prank(orchestrator);
        uint64 batchId = ledger.commitBatch(runId, root, count, units);

        assertEq(batchId, 1, "ids count from 1");
        assertEq(ledger.batchCount(), 1, "count");
        IContributionLedger.Batch memory batch = ledger.batchOf(batchId);
        assertEq(batch.root, root, "root");
        assertEq(batch.outcomesRoot, 0, "no outcomes");
        assertEq(batch.runId, runId, "run");
        assertEq(batch.count, count, "submissions");
        assertEq(batch.committedAt, time, "time");
        assertEq(batch.postedAt, 0, "not posted");
    }

    // -------------------------------------------------------------- submit direct

    function test_submitDirect_reverts_whenPaused() public {
        _pause();
        IContributionLedger.Submission memory submission = _submission(alice, 1, 0);
        bytes memory signature = _signSubmission(submission, aliceNodeKey);
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerPaused.selector, runId));
        ledger.submitDirect(submission, signature);
    }

    function testFuzz_submitDirect_reverts_whenRunIsUnknown(uint64 unknown) public {
        vm.assume(unknown != runId);
        IContributionLedger.Submission memory submission = _submission(alice, 1, 0);
        submission.runId = unknown;
        bytes memory signature = _signSubmission(submission, aliceNodeKey);
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunUnknown.selector, unknown));
        ledger.submitDirect(submission, signature);
    }

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

    function test_submitDirect_reverts_whenWorkerIsJailed() public {
        vm.prank(address(court));
        workers.jail(alice, "offence");
        _expectInvalidSubmission(_submission(alice, 1, 0), aliceNodeKey);
    }

    function _expectInvalidSubmission(IContributionLedger.Submission memory submission, uint256 key) private {
        bytes memory signature = _signSubmission(submission, key);
        vm.expectRevert(
            abi.encodeWithSelector(
                IContributionLedgerErrors.LedgerInvalidSubmission.selector, submission.worker, vm.addr(key)
            )
        );
        ledger.submitDirect(submission, signature);
    }

    function testFuzz_submitDirect_reverts_whenSignatureIsMalformed(bytes memory signature, address worker) public {
        vm.assume(signature.length != 65);
        IContributionLedger.Submission memory submission = _submission(worker, 1, 0);
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidSubmission.selector, worker, address(0))
        );
        ledger.submitDirect(submission, signature);
    }

    function testFuzz_submitDirect_reverts_whenAnythingSignedWasChanged(uint256 field) public {
        IContributionLedger.Submission memory submission = _submission(alice, 1, 0);
        bytes memory signature = _signSubmission(submission, aliceNodeKey);
        field = bound(field, 0, 6);
        if (field == 0) submission.worker = bob;
        if (field == 1) submission.step += 1;
        if (field == 2) submission.index += 1;
        if (field == 3) submission.policyVersion += 1;
        if (field == 4) submission.fileHash = keccak256("other file");
        if (field == 5) submission.rollouts += 1;
        if (field == 6) submission.units += 1;
        vm.expectPartialRevert(IContributionLedgerErrors.LedgerInvalidSubmission.selector);
        ledger.submitDirect(submission, signature);
    }

    function testFuzz_submitDirect_commitsABatchOfOne(address caller, uint32 step, uint32 index, uint64 units) public {
        IContributionLedger.Submission memory submission = _submission(alice, 1, index);
        (submission.step, submission.units) = (step, units);
        bytes memory signature = _signSubmission(submission, aliceNodeKey);
        bytes32 leaf = keccak256(abi.encode(_submissionHash(submission)));

        vm.expectEmit(address(ledger));
        emit IContributionLedgerEvents.BatchCommitted(1, runId, leaf, 1, units);
        vm.expectEmit(address(ledger));
        emit IContributionLedgerEvents.DirectlySubmitted(1, alice, submission, signature);
        vm.prank(caller);
        uint64 batchId = ledger.submitDirect(submission, signature);
        assertEq(ledger.batchOf(batchId).root, leaf, "the leaf is the root");
        assertEq(ledger.batchOf(batchId).count, 1, "one submission");
    }
}
