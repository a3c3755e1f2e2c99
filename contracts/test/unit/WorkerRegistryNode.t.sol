// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IWorkerRegistry, IWorkerRegistryErrors, IWorkerRegistryEvents} from "../../src/interfaces/IWorkerRegistry.sol";
import {BaseTest} from "../BaseTest.sol";

/// @title A worker's node key, which is the same in all its runs, and what it answers for
contract WorkerRegistryNodeTest is BaseTest {
    uint64 private _otherRun;

    function setUp() public override {
        super.setUp();
        runId = _createRun();
        _otherRun = _createRun();
        vm.warp(30 days);
        _join(runId, alice, aliceNode, aliceNodeKey, REQUIRED_STAKE);
    }

    function _consentNow(address node, uint256 nodeKey) private view returns (IWorkerRegistry.NodeConsent memory) {
        return _nodeConsent(alice, node, nodeKey, block.timestamp);
    }

    function _tryRotate(IWorkerRegistry.NodeConsent memory consent) private {
        vm.prank(alice);
        workers.rotateNode(consent);
    }

    function _rotate(address node, uint256 nodeKey) private {
        _tryRotate(_consentNow(node, nodeKey));
    }

    function _exit(uint64 run) private {
        vm.prank(alice);
        workers.exit(run);
    }

    function _convict(bool exact) private {
        vm.prank(address(ledger));
        workers.convict(runId, alice, "offence", exact);
    }

    function _expectInvalidSignature(address node, address recovered) private {
        vm.expectRevert(
            abi.encodeWithSelector(IWorkerRegistryErrors.RegistryInvalidNodeSignature.selector, node, recovered)
        );
    }

    function _expectNodeTaken(address node, address worker) private {
        vm.expectRevert(abi.encodeWithSelector(IWorkerRegistryErrors.RegistryNodeTaken.selector, node, worker));
    }

    function _answers(address node, uint256 time) private view returns (bool) {
        return workers.answersFor(runId, alice, node, time);
    }

    // ------------------------------------------------------------------- rotate

    function testFuzz_rotateNode_reverts_whenNotAWorker(address caller) public {
        vm.assume(caller != alice);
        IWorkerRegistry.NodeConsent memory consent = _nodeConsent(caller, bobNode, bobNodeKey, block.timestamp);
        vm.expectRevert(abi.encodeWithSelector(IWorkerRegistryErrors.RegistryUnauthorized.selector, caller));
        vm.prank(caller);
        workers.rotateNode(consent);
    }

    function testFuzz_rotateNode_reverts_whenConsentExpired(uint256 late) public {
        uint256 deadline = block.timestamp;
        IWorkerRegistry.NodeConsent memory consent = _consentNow(bobNode, bobNodeKey);
        vm.warp(deadline + bound(late, 1, 1000 days));
        vm.expectRevert(
            abi.encodeWithSelector(IWorkerRegistryErrors.RegistryExpired.selector, deadline, block.timestamp)
        );
        _tryRotate(consent);
    }

    function testFuzz_rotateNode_reverts_whenAnotherKeyConsents(uint256 key) public {
        key = bound(key, 1, 1 << 200);
        vm.assume(key != bobNodeKey);
        IWorkerRegistry.NodeConsent memory consent = _consentNow(bobNode, key);
        _expectInvalidSignature(bobNode, vm.addr(key));
        _tryRotate(consent);
    }

    function testFuzz_rotateNode_reverts_whenConsentIsForAnotherDeadline(uint256 signed, uint256 given) public {
        signed = bound(signed, 0, type(uint256).max);
        given = bound(given, block.timestamp, type(uint256).max);
        vm.assume(signed != given);
        IWorkerRegistry.NodeConsent memory consent = _nodeConsent(alice, bobNode, bobNodeKey, signed);
        consent.deadline = given;
        vm.expectPartialRevert(IWorkerRegistryErrors.RegistryInvalidNodeSignature.selector);
        _tryRotate(consent);
    }

    function testFuzz_rotateNode_reverts_whenSignatureIsMalformed(bytes memory signature) public {
        vm.assume(signature.length != 65);
        _expectInvalidSignature(bobNode, address(0));
        _tryRotate(IWorkerRegistry.NodeConsent(bobNode, block.timestamp, signature));
    }

    /// @dev What no key signed recovers to zero, which is no node.
    function test_rotateNode_reverts_whenNodeIsZero() public {
        _expectInvalidSignature(address(0), address(0));
        _tryRotate(IWorkerRegistry.NodeConsent(address(0), block.timestamp, new bytes(65)));
    }

    function testFuzz_rotateNode_reverts_whenConsentIsReplayed(uint256 deadline) public {
        deadline = bound(deadline, block.timestamp, type(uint256).max);
        IWorkerRegistry.NodeConsent memory consent = _nodeConsent(alice, bobNode, bobNodeKey, deadline);
        _tryRotate(consent);
        _expectNodeTaken(bobNode, alice);
        _tryRotate(consent);
    }

    function test_rotateNode_reverts_whenConsentIsForAnEarlierNonce() public {
        (address thirdNode, uint256 thirdKey) = makeAddrAndKey("third node");
        IWorkerRegistry.NodeConsent memory early = _consentNow(thirdNode, thirdKey);
        _rotate(bobNode, bobNodeKey);
        vm.expectPartialRevert(IWorkerRegistryErrors.RegistryInvalidNodeSignature.selector);
        _tryRotate(early);
    }

    function test_rotateNode_reverts_whenKeyServedBefore() public {
        _rotate(bobNode, bobNodeKey);
        IWorkerRegistry.NodeConsent memory consent = _consentNow(aliceNode, aliceNodeKey);
        _expectNodeTaken(aliceNode, alice);
        _tryRotate(consent);
    }

    /// @dev A key that served a worker is never another one's either.
    function test_rotateNode_reverts_whenKeyServedAnother() public {
        _join(runId, bob, bobNode, bobNodeKey, REQUIRED_STAKE);
        (address thirdNode, uint256 thirdKey) = makeAddrAndKey("third node");
        _rotate(thirdNode, thirdKey);
        IWorkerRegistry.NodeConsent memory consent = _nodeConsent(bob, aliceNode, aliceNodeKey, block.timestamp);
        _expectNodeTaken(aliceNode, alice);
        vm.prank(bob);
        workers.rotateNode(consent);
    }

    function testFuzz_rotateNode_failsTheOldKeyAtOnce(uint256 nodeKey) public {
        nodeKey = bound(nodeKey, 1, 1 << 200);
        address node = vm.addr(nodeKey);
        IWorkerRegistry.NodeConsent memory consent = _consentNow(node, nodeKey);
        vm.expectEmit(address(workers));
        emit IWorkerRegistryEvents.NodeUnbound(alice, aliceNode);
        vm.expectEmit(address(workers));
        emit IWorkerRegistryEvents.NodeBound(alice, node);
        _tryRotate(consent);
        assertEq(workers.workerOfNode(aliceNode), address(0), "old key");
        assertEq(workers.workerOfNode(node), alice, "new key");
        (, address held) = workers.workerOf(alice);
        assertEq(held, node, "record");
        assertEq(workers.nonces(alice), 2, "nonce");
    }

    function testFuzz_rotateNode_leavesMembershipAlone(uint256 nodeKey) public {
        nodeKey = bound(nodeKey, 1, 1 << 200);
        bytes32 before = keccak256(abi.encode(workers.memberOf(runId, alice)));
        _rotate(vm.addr(nodeKey), nodeKey);
        assertEq(keccak256(abi.encode(workers.memberOf(runId, alice))), before, "member");
        assertTrue(workers.isActive(runId, alice), "no new delay");
        assertEq(vault.activeStake(runId, alice), REQUIRED_STAKE, "stake");
    }

    /// @dev A key is the worker's own, whatever a run thinks of the worker: a stolen one can always be replaced.
    function testFuzz_rotateNode_works_whateverTheStatus(uint256 which) public {
        if (which % 3 == 0) _exit(runId);
        else _convict(which % 3 == 1);
        _rotate(bobNode, bobNodeKey);
        assertEq(workers.workerOfNode(bobNode), alice, "new key");
        assertEq(workers.workerOfNode(aliceNode), address(0), "old key");
    }

    function testFuzz_rotateNode_replacesTheKeyInAllRuns(uint256 later) public {
        _join(_otherRun, alice, address(0), 0, REQUIRED_STAKE);
        _rotate(bobNode, bobNodeKey);
        later = block.timestamp + bound(later, 1, 1000 days);
        for (uint64 run = runId; run <= _otherRun; ++run) {
            assertFalse(workers.answersFor(run, alice, aliceNode, later), "old key");
            assertTrue(workers.answersFor(run, alice, bobNode, later), "new key");
        }
    }

    // -------------------------------------------------------------- answers for

    /// @dev What is committed by the second of its rotation counts, and nothing that is committed later.
    function testFuzz_answersFor_theOldKey_untilItsRotation(uint256 rotated, uint256 time) public {
        uint256 joined = block.timestamp;
        rotated = joined + bound(rotated, 0, 1000 days);
        time = time % 2 == 0 ? rotated + time / 2 % 2 : bound(time, joined, rotated + 1000 days);
        assertTrue(_answers(aliceNode, time), "while it serves");
        vm.warp(rotated);
        _rotate(bobNode, bobNodeKey);
        assertEq(_answers(aliceNode, time), time <= rotated, "once it is replaced");
    }

    function testFuzz_answersFor_theNewKey_fromItsRotation(uint256 time) public {
        _rotate(bobNode, bobNodeKey);
        assertTrue(_answers(bobNode, bound(time, block.timestamp, type(uint40).max)), "new key");
    }

    /// @dev What is committed by the second in which a worker leaves counts, and nothing that is committed later.
    function testFuzz_answersFor_untilItLeaves(uint256 left, uint256 time) public {
        uint256 joined = block.timestamp;
        left = joined + bound(left, 0, 1000 days);
        time = time % 2 == 0 ? left + time / 2 % 2 : bound(time, joined, left + 1000 days);
        vm.warp(left);
        _exit(runId);
        assertEq(_answers(aliceNode, time), time <= left, "once it left");
    }

    /// @dev Stake that is gone frees nobody of what was committed before.
    function testFuzz_answersFor_whatWasCommitted_whenItHasWithdrawn(uint256 waited) public {
        uint256 committedAt = block.timestamp;
        _exit(runId);
        vm.warp(block.timestamp + bound(waited, UNBONDING_PERIOD, 1000 days));
        vm.prank(alice);
        vault.withdraw(runId);
        assertTrue(_answers(aliceNode, committedAt), "still");
    }

    function test_answersFor_oneRun_whenItLeftAnother() public {
        _join(_otherRun, alice, address(0), 0, REQUIRED_STAKE);
        _exit(runId);
        assertFalse(workers.answersFor(runId, alice, aliceNode, block.timestamp + 1), "the run that it left");
        assertTrue(workers.answersFor(_otherRun, alice, aliceNode, block.timestamp + 1), "the other run");
    }

    function testFuzz_answersFor_isTrueAgain_onceItCameBack(uint256 away, uint256 time) public {
        _exit(runId);
        vm.warp(block.timestamp + bound(away, 0, 1000 days));
        _deposit(runId, alice, REQUIRED_STAKE);
        vm.prank(alice);
        workers.comeBack(runId, 1);
        assertTrue(_answers(aliceNode, bound(time, block.timestamp, type(uint40).max)), "back");
    }

    /// @dev Who comes back answers for what was committed while it was away, too: no fraud is shaken off by leaving.
    function testFuzz_answersFor_isTrue_ofTheTimeAway_onceItCameBack(uint256 away, uint256 time) public {
        uint256 left = block.timestamp;
        away = bound(away, 1, 1000 days);
        time = left + bound(time, 1, away);
        _exit(runId);
        assertFalse(_answers(aliceNode, time), "while it is away");
        vm.warp(left + away);
        _deposit(runId, alice, REQUIRED_STAKE);
        vm.prank(alice);
        workers.comeBack(runId, 1);
        assertTrue(_answers(aliceNode, time), "once it is back");
    }

    /// @dev A new key answers for what was committed before it was bound: a rotation is no way to sign twice.
    function testFuzz_answersFor_theNewKey_ofTheTimeBefore(uint256 waited, uint256 time) public {
        uint256 joined = block.timestamp;
        assertFalse(_answers(bobNode, joined), "nobody's key");
        vm.warp(joined + bound(waited, 1, 1000 days));
        _rotate(bobNode, bobNodeKey);
        assertTrue(_answers(bobNode, bound(time, joined, block.timestamp)), "her key");
    }

    /// @dev Jail and ban stop work, they do not undo it.
    function testFuzz_answersFor_isTrue_inJailAndUnderABan(bool exact, uint256 time) public {
        _convict(exact);
        assertTrue(_answers(aliceNode, bound(time, block.timestamp, type(uint40).max)), "convicted");
    }

    function testFuzz_answersFor_isFalse_inRunsThatItNeverJoined(uint64 run, uint256 time) public view {
        vm.assume(run != runId);
        assertFalse(workers.answersFor(run, alice, aliceNode, time), "no member");
    }

    function testFuzz_answersFor_isFalse_forAnotherWorker(address other, uint256 time) public {
        vm.assume(other != alice);
        _join(runId, bob, bobNode, bobNodeKey, REQUIRED_STAKE);
        assertFalse(workers.answersFor(runId, time % 2 == 0 ? bob : other, aliceNode, time), "another worker");
    }

    function testFuzz_answersFor_isFalse_forUnknownKeys(address node, uint256 time) public view {
        vm.assume(node != aliceNode);
        assertFalse(_answers(node, time), "not bound");
        assertFalse(workers.answersFor(runId, address(0), node, time), "zero is nobody");
        assertEq(workers.workerOfNode(node), address(0), "serves nobody");
    }
}
