// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IContributionLedger, IContributionLedgerErrors} from "../../src/interfaces/IContributionLedger.sol";
import {IFaultCourt, IFaultCourtErrors, IFaultCourtEvents} from "../../src/interfaces/IFaultCourt.sol";
import {IRunRegistryErrors} from "../../src/interfaces/IRunRegistry.sol";
import {IStakeVault, IStakeVaultErrors, IStakeVaultEvents} from "../../src/interfaces/IStakeVault.sol";
import {IWorkerRegistry, IWorkerRegistryErrors} from "../../src/interfaces/IWorkerRegistry.sol";
import {BaseTest} from "../BaseTest.sol";

/// @dev Faults of workers, and holding their stake while work is in flight.
contract FaultCourtWorkersTest is BaseTest {
    /// @dev Units that a worker with the required stake may have in flight.
    uint256 private constant CAP = REQUIRED_STAKE / STAKE_PER_UNIT;

    function setUp() public override {
        super.setUp();
        _startRun(WALLET / 2);
    }

    // --------------------------------------------------------- double submission

    function _expectNoEquivocation(address first, address second) private {
        vm.expectRevert(abi.encodeWithSelector(IFaultCourtErrors.FaultNoEquivocation.selector, first, second));
    }

    /// @dev A submission of Alice, and another for the same slot.
    function _pair()
        private
        view
        returns (IContributionLedger.Submission memory, IContributionLedger.Submission memory)
    {
        IContributionLedger.Submission memory second = _submission(alice, 1, 0);
        second.fileHash = keccak256("another file");
        return (_submission(alice, 1, 0), second);
    }

    function _doubleOffence() private view returns (bytes32) {
        return keccak256(abi.encode("double submission", runId, alice, uint32(1), uint32(0)));
    }

    function testFuzz_proveDoubleSubmission_reverts_whenTheyAreOne(uint256 step, uint256 index) public {
        IContributionLedger.Submission memory one =
            _submission(alice, uint32(bound(step, 1, 1000)), uint32(bound(index, 0, 1000)));
        bytes memory signature = _signSubmission(one, aliceNodeKey);
        _expectNoEquivocation(aliceNode, aliceNode);
        faults.proveDoubleSubmission(one, signature, one, signature);
    }

    function testFuzz_proveDoubleSubmission_reverts_whenSlotsDiffer(uint256 which, uint32 other) public {
        (IContributionLedger.Submission memory first, IContributionLedger.Submission memory second) = _pair();
        vm.assume(other != 0 && other != 1);
        which = bound(which, 0, 2);
        if (which == 0) second.runId = other;
        if (which == 1) second.step = other;
        if (which == 2) second.index = other;
        (bytes memory a, bytes memory b) = (_signSubmission(first, aliceNodeKey), _signSubmission(second, aliceNodeKey));
        _expectNoEquivocation(aliceNode, aliceNode);
        faults.proveDoubleSubmission(first, a, second, b);
    }

    function test_proveDoubleSubmission_reverts_whenWorkersDiffer() public {
        (IContributionLedger.Submission memory first, IContributionLedger.Submission memory second) = _pair();
        second.worker = bob;
        (bytes memory a, bytes memory b) = (_signSubmission(first, aliceNodeKey), _signSubmission(second, aliceNodeKey));
        _expectNoEquivocation(aliceNode, aliceNode);
        faults.proveDoubleSubmission(first, a, second, b);
    }

    function testFuzz_proveDoubleSubmission_reverts_whenAnotherKeySigned(uint256 key, bool firstToo) public {
        key = bound(key, 1, 1 << 200);
        vm.assume(key != aliceNodeKey);
        (IContributionLedger.Submission memory first, IContributionLedger.Submission memory second) = _pair();
        (bytes memory a, bytes memory b) =
            (_signSubmission(first, firstToo ? key : aliceNodeKey), _signSubmission(second, key));
        _expectNoEquivocation(firstToo ? vm.addr(key) : aliceNode, vm.addr(key));
        faults.proveDoubleSubmission(first, a, second, b);
        _expectNoEquivocation(vm.addr(key), firstToo ? vm.addr(key) : aliceNode);
        faults.proveDoubleSubmission(second, b, first, a);
    }

    function testFuzz_proveDoubleSubmission_reverts_forWhoIsNoWorker(address account) public {
        vm.assume(account != alice);
        (IContributionLedger.Submission memory first, IContributionLedger.Submission memory second) = _pair();
        (first.worker, second.worker) = (account, account);
        (bytes memory a, bytes memory b) = (_signSubmission(first, aliceNodeKey), _signSubmission(second, aliceNodeKey));
        _expectNoEquivocation(aliceNode, aliceNode);
        faults.proveDoubleSubmission(first, a, second, b);
    }

    function testFuzz_proveDoubleSubmission_reverts_whenRunIsUnknown(uint64 unknown) public {
        vm.assume(unknown != runId);
        (IContributionLedger.Submission memory first, IContributionLedger.Submission memory second) = _pair();
        (first.runId, second.runId) = (unknown, unknown);
        (bytes memory a, bytes memory b) = (_signSubmission(first, aliceNodeKey), _signSubmission(second, aliceNodeKey));
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunUnknown.selector, unknown));
        faults.proveDoubleSubmission(first, a, second, b);
    }

    /// @dev Whatever of the content differs.
    function testFuzz_proveDoubleSubmission_bansAndSlashes(uint256 which, bool byValidator) public {
        (, IContributionLedger.Submission memory second) = _pair();
        which = bound(which, 0, 3);
        if (which != 0) second = _submission(alice, 1, 0);
        if (which == 1) second.policyVersion += 1;
        if (which == 2) second.rollouts += 1;
        if (which == 3) second.units += 1;
        address caller = byValidator ? validators[0] : stranger;
        uint256 amount = REQUIRED_STAKE * EXACT_FRAUD_PPM / PPM;
        bytes memory a = _signSubmission(_submission(alice, 1, 0), aliceNodeKey);
        bytes memory b = _signSubmission(second, aliceNodeKey);

        vm.expectEmit(address(faults));
        emit IFaultCourtEvents.DoubleSubmissionProven(alice, _doubleOffence(), runId, 1, 0, amount);
        vm.prank(caller);
        faults.proveDoubleSubmission(_submission(alice, 1, 0), a, second, b);
        assertEq(vault.activeStake(alice), REQUIRED_STAKE - amount, "slashed");
        _assertStatus(alice, IWorkerRegistry.Status.Banned, "banned");
        IStakeVault.Escrow memory taken = vault.escrowOf(_doubleOffence());
        assertEq(uint8(taken.status), uint8(IStakeVault.EscrowStatus.Released), "final at once");
        assertEq(taken.reporter, byValidator ? address(0) : stranger, "reporter");
    }

    function test_proveDoubleSubmission_punishesASlotOnce() public {
        (IContributionLedger.Submission memory first, IContributionLedger.Submission memory second) = _pair();
        bytes memory a = _signSubmission(first, aliceNodeKey);
        faults.proveDoubleSubmission(first, a, second, _signSubmission(second, aliceNodeKey));
        second.fileHash = keccak256("a third file");
        bytes memory b = _signSubmission(second, aliceNodeKey);
        vm.expectRevert(abi.encodeWithSelector(IStakeVaultErrors.VaultOffenceSettled.selector, _doubleOffence()));
        faults.proveDoubleSubmission(first, a, second, b);
    }

    /// @dev A new key is no way to sign again.
    function test_proveDoubleSubmission_reachesAcrossARotation() public {
        (IContributionLedger.Submission memory first, IContributionLedger.Submission memory second) = _pair();
        bytes memory a = _signSubmission(first, aliceNodeKey);
        (address node, uint256 nodeKey) = makeAddrAndKey("alice's next node");
        bytes memory consent = _consent(alice, node, nodeKey, block.timestamp);
        vm.prank(alice);
        workers.rotateNode(node, block.timestamp, consent);
        faults.proveDoubleSubmission(first, a, second, _signSubmission(second, nodeKey));
        _assertStatus(alice, IWorkerRegistry.Status.Banned, "banned");
    }

    // ------------------------------------------------------------ work in flight

    /// @dev The record of a submission that stands as claimed.
    function _asClaimed(IContributionLedger.Submission memory s) private view returns (bytes memory) {
        return _pack(
            IContributionLedger.Outcome({
                workerId: workers.workerOf(s.worker).workerId,
                step: s.step,
                index: s.index,
                policyVersion: s.policyVersion,
                fileHash: s.fileHash,
                rollouts: uint16(s.rollouts),
                units: uint32(s.units),
                verdict: ACCEPTED,
                reason: 0
            })
        );
    }

    /// @dev A batch of `count` submissions of Alice in step 2, `units` each, without outcomes.
    function _inFlight(uint256 count, uint256 units) private returns (IFaultCourt.Work[] memory works) {
        works = new IFaultCourt.Work[](count);
        bytes32[] memory leaves = new bytes32[](count);
        for (uint256 i = 0; i < count; ++i) {
            IContributionLedger.Submission memory s = _submission(alice, 2, uint32(i));
            s.units = uint64(units);
            works[i].submission = s;
            works[i].nodeSignature = _signSubmission(s, aliceNodeKey);
            leaves[i] = keccak256(abi.encode(_submissionHash(s)));
        }
        uint64 batchId = _commitRoot(_root(leaves), count, units * count);
        for (uint256 i = 0; i < count; ++i) {
            bytes memory record = _asClaimed(works[i].submission);
            works[i].outcome =
                IContributionLedger.OutcomeProof(batches[batchId], uint32(i), record, _siblings(leaves, i));
        }
    }

    // ---------------------------------------------------------------- overcommit

    function _expectWithinCap(address worker, uint256 units) private {
        vm.expectRevert(
            abi.encodeWithSelector(
                IFaultCourtErrors.FaultWithinCap.selector, worker, units, worker == address(0) ? 0 : CAP
            )
        );
    }

    function _expectOutOfOrder(address worker, uint32 step, uint32 index) private {
        vm.expectRevert(abi.encodeWithSelector(IFaultCourtErrors.FaultOutOfOrder.selector, worker, runId, step, index));
    }

    function test_proveOvercommit_reverts_withoutWork() public {
        _expectWithinCap(address(0), 0);
        faults.proveOvercommit(new IFaultCourt.Work[](0));
    }

    function testFuzz_proveOvercommit_reverts_withinTheCap(uint256 count, uint256 units) public {
        count = bound(count, 1, 5);
        // Often exactly the cap.
        units = units % 2 == 0 ? CAP / count : bound(units, 1, CAP / count);
        IFaultCourt.Work[] memory works = _inFlight(count, units);
        _expectWithinCap(alice, count * units);
        faults.proveOvercommit(works);
    }

    function testFuzz_proveOvercommit_jails(uint256 count, uint256 over, address caller) public {
        count = bound(count, 1, 5);
        uint256 units = CAP / count + bound(over, 1, 1000);
        IFaultCourt.Work[] memory works = _inFlight(count, units);
        vm.expectEmit(address(faults));
        emit IFaultCourtEvents.OvercommitProven(alice, count * units, CAP);
        vm.prank(caller);
        faults.proveOvercommit(works);
        _assertStatus(alice, IWorkerRegistry.Status.Jailed, "jailed");
        assertEq(vault.activeStake(alice), REQUIRED_STAKE, "nothing is taken");
    }

    function test_proveOvercommit_reverts_whenJailedAlready() public {
        IFaultCourt.Work[] memory works = _inFlight(1, CAP + 1);
        faults.proveOvercommit(works);
        vm.expectRevert(
            abi.encodeWithSelector(
                IWorkerRegistryErrors.RegistryWrongStatus.selector, alice, uint8(IWorkerRegistry.Status.Jailed)
            )
        );
        faults.proveOvercommit(works);
    }

    /// @dev One submission counts once, however often it is listed or committed.
    function testFuzz_proveOvercommit_reverts_whenASlotIsCountedTwice(bool otherBatch) public {
        IFaultCourt.Work[] memory works = _inFlight(1, CAP / 2 + 1);
        IFaultCourt.Work[] memory twice = new IFaultCourt.Work[](2);
        (twice[0], twice[1]) = (works[0], otherBatch ? _inFlight(1, CAP / 2 + 1)[0] : works[0]);
        _expectOutOfOrder(alice, 2, 0);
        faults.proveOvercommit(twice);
    }

    function test_proveOvercommit_reverts_whenSlotsDescend() public {
        IFaultCourt.Work[] memory works = _inFlight(2, CAP);
        (works[0], works[1]) = (works[1], works[0]);
        _expectOutOfOrder(alice, 2, 0);
        faults.proveOvercommit(works);
    }

    function test_proveOvercommit_reverts_whenWorkersAreMixed() public {
        IFaultCourt.Work[] memory works = _inFlight(2, CAP);
        works[1].submission.worker = bob;
        _expectOutOfOrder(bob, 2, 1);
        faults.proveOvercommit(works);
    }

    function testFuzz_proveOvercommit_reverts_whenTheWorkerDidNotSign(uint256 key) public {
        key = bound(key, 1, 1 << 200);
        vm.assume(key != aliceNodeKey);
        IFaultCourt.Work[] memory works = _inFlight(1, CAP + 1);
        works[0].nodeSignature = _signSubmission(works[0].submission, key);
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidSubmission.selector, alice, vm.addr(key))
        );
        faults.proveOvercommit(works);
    }

    function testFuzz_proveOvercommit_reverts_whenWorkIsNotInItsBatch(bytes32 root) public {
        IFaultCourt.Work[] memory works = _inFlight(1, CAP + 1);
        vm.assume(root != works[0].outcome.batch.root);
        uint64 batchId = _commitRoot(root == 0 ? bytes32("root") : root, 1, CAP + 1);
        works[0].outcome.batch = batches[batchId];
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidProof.selector, batchId, 0));
        faults.proveOvercommit(works);
    }

    function testFuzz_proveOvercommit_reverts_onceWorkIsFinal(uint256 waited) public {
        IFaultCourt.Work[] memory works = _inFlight(1, CAP + 1);
        uint256 until = OUTCOME_DEADLINE + CHALLENGE_WINDOW;
        vm.warp(block.timestamp + (waited % 2 == 0 ? until : bound(waited, until, 100 days)));
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerFinal.selector, works[0].outcome.batch.batchId, 0)
        );
        faults.proveOvercommit(works);
    }

    // ---------------------------------------------------------------------- hold

    function testFuzz_holdStake_holdsUntilPendingWorkCanBeFinal(address caller, uint256 waited) public {
        IFaultCourt.Work[] memory works = _inFlight(2, 1000);
        uint256 until = block.timestamp + JUDGED;
        vm.warp(block.timestamp + bound(waited, 0, OUTCOME_DEADLINE + CHALLENGE_WINDOW - 1));
        vm.expectEmit(address(vault));
        emit IStakeVaultEvents.StakeHeld(alice, until, 0);
        vm.prank(caller);
        faults.holdStake(works[1]);
        assertEq(vault.accountOf(alice).heldUntil, until, "until");
    }

    function testFuzz_holdStake_holdsUntilPostedWorkIsFinal(uint256 waited) public {
        bytes[] memory records = _one(_record(alice, 1, 0, REJECTED));
        IFaultCourt.Work memory work;
        work.outcome = _prove(_commitAndPost(records), records, 0);
        work.submission = _submission(alice, 1, 0);
        work.nodeSignature = _signSubmission(work.submission, aliceNodeKey);
        uint256 closesAt = block.timestamp + CHALLENGE_WINDOW;
        vm.warp(block.timestamp + bound(waited, 0, CHALLENGE_WINDOW - 1));
        faults.holdStake(work);
        assertEq(vault.accountOf(alice).heldUntil, closesAt + JURY_TIME + SLASH_PAUSE, "until");
        vm.warp(closesAt);
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerFinal.selector, work.outcome.batch.batchId, 0)
        );
        faults.holdStake(work);
    }

    function testFuzz_holdStake_reverts_withoutTheWorkersSignature(uint256 key) public {
        key = bound(key, 1, 1 << 200);
        vm.assume(key != aliceNodeKey);
        IFaultCourt.Work memory work = _inFlight(1, 1000)[0];
        work.nodeSignature = _signSubmission(work.submission, key);
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidSubmission.selector, alice, vm.addr(key))
        );
        faults.holdStake(work);
    }

    /// @dev Work that was committed after its worker asked for its stake is covered, too.
    function test_holdStake_keepsStakeThatIsLeaving() public {
        vm.prank(alice);
        workers.exit();
        vm.warp(block.timestamp + UNBONDING_PERIOD - 1);
        IFaultCourt.Work memory work = _inFlight(1, 1000)[0];
        faults.holdStake(work);
        vm.warp(block.timestamp + 1);
        uint256 until = vault.accountOf(alice).heldUntil;
        vm.expectRevert(abi.encodeWithSelector(IStakeVaultErrors.VaultStakeHeld.selector, alice, 0, until));
        vm.prank(alice);
        vault.withdraw();
        vm.warp(until);
        vm.prank(alice);
        assertEq(vault.withdraw(), REQUIRED_STAKE, "all of it, then");
    }
}
