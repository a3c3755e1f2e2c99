// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {Vm} from "forge-std/Vm.sol";

import {IERC20Errors} from "@openzeppelin/contracts/interfaces/draft-IERC6093.sol";

import {IRunRegistry, IRunRegistryErrors} from "../../src/interfaces/IRunRegistry.sol";
import {IWorkerRegistry, IWorkerRegistryErrors, IWorkerRegistryEvents} from "../../src/interfaces/IWorkerRegistry.sol";
import {BaseTest} from "../BaseTest.sol";

/// @title Joining a run: node, stake, terms and permit in one transaction
contract WorkerRegistryJoinTest is BaseTest {
    uint32 private constant FIRST_TERMS = 1;

    function setUp() public override {
        super.setUp();
        runId = _createRun();
    }

    function _consentNow(address worker, address node, uint256 nodeKey)
        private
        view
        returns (IWorkerRegistry.NodeConsent memory)
    {
        return _nodeConsent(worker, node, nodeKey, block.timestamp);
    }

    function _keepNode() private pure returns (IWorkerRegistry.NodeConsent memory) {}

    function _tryJoin(uint256 stake, IWorkerRegistry.NodeConsent memory consent) private {
        _tryJoin(runId, alice, stake, consent);
    }

    function _tryJoin(uint64 run, address worker, uint256 stake, IWorkerRegistry.NodeConsent memory consent) private {
        vm.prank(worker);
        workers.join(run, FIRST_TERMS, stake, consent, _noPermit());
    }

    function _joinAlice() private {
        _join(runId, alice, aliceNode, aliceNodeKey, REQUIRED_STAKE);
    }

    function _expectInvalidSignature(address node, address recovered) private {
        vm.expectRevert(
            abi.encodeWithSelector(IWorkerRegistryErrors.RegistryInvalidNodeSignature.selector, node, recovered)
        );
    }

    function _expectNodeTaken(address node, address worker) private {
        vm.expectRevert(abi.encodeWithSelector(IWorkerRegistryErrors.RegistryNodeTaken.selector, node, worker));
    }

    function _expectWrongStatus(address worker, IWorkerRegistry.Status status) private {
        vm.expectRevert(
            abi.encodeWithSelector(IWorkerRegistryErrors.RegistryWrongStatus.selector, runId, worker, uint8(status))
        );
    }

    function _expectStakeTooLow(uint64 run, uint256 active) private {
        vm.expectRevert(
            abi.encodeWithSelector(
                IWorkerRegistryErrors.RegistryStakeTooLow.selector, run, alice, active, REQUIRED_STAKE
            )
        );
    }

    // --------------------------------------------------------------------- node

    function testFuzz_join_reverts_whenConsentExpired(uint256 deadline) public {
        vm.warp(1 days);
        deadline = bound(deadline, 0, block.timestamp - 1);
        IWorkerRegistry.NodeConsent memory consent = _nodeConsent(alice, aliceNode, aliceNodeKey, deadline);
        vm.expectRevert(
            abi.encodeWithSelector(IWorkerRegistryErrors.RegistryExpired.selector, deadline, block.timestamp)
        );
        _tryJoin(REQUIRED_STAKE, consent);
    }

    function testFuzz_join_reverts_whenAnotherKeyConsents(uint256 key) public {
        key = bound(key, 1, 1 << 200);
        vm.assume(key != aliceNodeKey);
        IWorkerRegistry.NodeConsent memory consent = _consentNow(alice, aliceNode, key);
        _expectInvalidSignature(aliceNode, vm.addr(key));
        _tryJoin(REQUIRED_STAKE, consent);
    }

    function testFuzz_join_reverts_whenConsentIsForAnotherWorker(address other) public {
        vm.assume(other != alice);
        IWorkerRegistry.NodeConsent memory consent = _consentNow(other, aliceNode, aliceNodeKey);
        vm.expectPartialRevert(IWorkerRegistryErrors.RegistryInvalidNodeSignature.selector);
        _tryJoin(REQUIRED_STAKE, consent);
    }

    function testFuzz_join_reverts_whenSignatureIsMalformed(bytes memory signature) public {
        vm.assume(signature.length != 65);
        _expectInvalidSignature(aliceNode, address(0));
        _tryJoin(REQUIRED_STAKE, IWorkerRegistry.NodeConsent(aliceNode, block.timestamp, signature));
    }

    function test_join_reverts_whenThereIsNoNode() public {
        _expectInvalidSignature(address(0), address(0));
        _tryJoin(REQUIRED_STAKE, _keepNode());
    }

    function test_join_reverts_whenNodeServesAnother() public {
        _join(runId, bob, aliceNode, aliceNodeKey, REQUIRED_STAKE);
        IWorkerRegistry.NodeConsent memory consent = _consentNow(alice, aliceNode, aliceNodeKey);
        _expectNodeTaken(aliceNode, bob);
        _tryJoin(REQUIRED_STAKE, consent);
    }

    /// @dev Keys are never bound twice, not even by whom they serve: who keeps its key names none.
    function test_join_reverts_whenItNamesTheKeyThatItHas() public {
        _joinAlice();
        uint64 other = _createRun();
        IWorkerRegistry.NodeConsent memory consent = _consentNow(alice, aliceNode, aliceNodeKey);
        _expectNodeTaken(aliceNode, alice);
        _tryJoin(other, alice, REQUIRED_STAKE, consent);
    }

    function test_join_keepsTheNode_whenNoneIsNamed() public {
        _joinAlice();
        uint64 other = _createRun();
        _tryJoin(other, alice, REQUIRED_STAKE, _keepNode());
        (, address node) = workers.workerOf(alice);
        assertEq(node, aliceNode, "node");
        assertEq(workers.nonces(alice), 1, "no other consent was used");
        assertTrue(workers.answersFor(other, alice, aliceNode, block.timestamp), "it answers in the other run, too");
    }

    function test_join_replacesTheNode_whenAnotherIsNamed() public {
        _joinAlice();
        uint64 other = _createRun();
        _tryJoin(other, alice, REQUIRED_STAKE, _consentNow(alice, bobNode, bobNodeKey));
        assertEq(workers.workerOfNode(aliceNode), address(0), "the old key serves nobody");
        assertEq(workers.workerOfNode(bobNode), alice, "the new key serves her");
        assertTrue(workers.answersFor(runId, alice, bobNode, block.timestamp), "in the first run, too");
    }

    // -------------------------------------------------------------------- stake

    function testFuzz_join_reverts_belowRequirement(uint256 stake) public {
        stake = stake % 2 == 0 ? REQUIRED_STAKE - 1 : bound(stake, 0, REQUIRED_STAKE - 1);
        IWorkerRegistry.NodeConsent memory consent = _consentNow(alice, aliceNode, aliceNodeKey);
        _expectStakeTooLow(runId, stake);
        _tryJoin(stake, consent);
    }

    /// @dev Stake belongs to a run: what lies in another one, or on the jurors' bench, does not count.
    function testFuzz_join_reverts_whenStakeLiesElsewhere(uint256 stake, bool onTheBench) public {
        stake = bound(stake, REQUIRED_STAKE, WALLET);
        _deposit(onTheBench ? 0 : _createRun(), alice, stake);
        IWorkerRegistry.NodeConsent memory consent = _consentNow(alice, aliceNode, aliceNodeKey);
        _expectStakeTooLow(runId, 0);
        _tryJoin(0, consent);
    }

    /// @dev Stake that is leaving the run does not count.
    function testFuzz_join_reverts_whenStakeUnbonds(uint256 leaving) public {
        leaving = bound(leaving, 1, REQUIRED_STAKE);
        _deposit(runId, alice, REQUIRED_STAKE);
        vm.prank(alice);
        vault.requestUnbond(runId, leaving);
        IWorkerRegistry.NodeConsent memory consent = _consentNow(alice, aliceNode, aliceNodeKey);
        _expectStakeTooLow(runId, REQUIRED_STAKE - leaving);
        _tryJoin(0, consent);
    }

    function testFuzz_join_countsEarlierStake(uint256 earlier) public {
        earlier = bound(earlier, 1, REQUIRED_STAKE);
        _deposit(runId, alice, earlier);
        _tryJoin(REQUIRED_STAKE - earlier, _consentNow(alice, aliceNode, aliceNodeKey));
        assertEq(vault.activeStake(runId, alice), REQUIRED_STAKE, "both count");
    }

    function testFuzz_join_countsStakeThatAnotherPaid(uint256 stake) public {
        stake = bound(stake, REQUIRED_STAKE, WALLET);
        vm.prank(stranger);
        vault.deposit(runId, alice, stake);
        _tryJoin(0, _consentNow(alice, aliceNode, aliceNodeKey));
        _assertStatus(alice, IWorkerRegistry.Status.Active, "a worker");
        assertEq(token.balanceOf(alice), WALLET, "she paid nothing");
    }

    function testFuzz_join_takesTheStakeForThisRunOnly(uint256 first, uint256 second) public {
        first = bound(first, REQUIRED_STAKE, WALLET - REQUIRED_STAKE);
        second = bound(second, REQUIRED_STAKE, WALLET - first);
        uint64 other = _createRun();
        _join(runId, alice, aliceNode, aliceNodeKey, first);
        _join(other, alice, address(0), 0, second);
        assertEq(vault.activeStake(runId, alice), first, "first run");
        assertEq(vault.activeStake(other, alice), second, "second run");
        assertEq(vault.activeStake(0, alice), 0, "the bench");
        assertEq(token.balanceOf(alice), WALLET - first - second, "what she keeps");
    }

    function testFuzz_join_reverts_whenTheWalletHoldsLess(uint256 stake) public {
        stake = bound(stake, WALLET + 1, type(uint88).max);
        IWorkerRegistry.NodeConsent memory consent = _consentNow(alice, aliceNode, aliceNodeKey);
        vm.expectRevert(abi.encodeWithSelector(IERC20Errors.ERC20InsufficientBalance.selector, alice, WALLET, stake));
        _tryJoin(stake, consent);
    }

    // ---------------------------------------------------------------------- run

    /// @dev Nor is the bench, run 0, a run that one can work for.
    function testFuzz_join_reverts_whenRunIsUnknown(uint64 unknown) public {
        if (unknown % 2 == 0) unknown = 0;
        vm.assume(unknown != runId);
        IWorkerRegistry.NodeConsent memory consent = _consentNow(alice, aliceNode, aliceNodeKey);
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunUnknown.selector, unknown));
        _tryJoin(unknown, alice, REQUIRED_STAKE, consent);
    }

    function test_join_reverts_whenRunIsClosed() public {
        vm.prank(owner);
        runs.closeRun(runId);
        IWorkerRegistry.NodeConsent memory consent = _consentNow(alice, aliceNode, aliceNodeKey);
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunEnded.selector, runId));
        _tryJoin(REQUIRED_STAKE, consent);
    }

    function test_join_works_whileSubmissionsArePaused() public {
        vm.prank(owner);
        runs.setSubmissionsPaused(runId, true);
        _tryJoin(REQUIRED_STAKE, _consentNow(alice, aliceNode, aliceNodeKey));
        _assertStatus(alice, IWorkerRegistry.Status.Active, "a worker");
    }

    function testFuzz_join_reverts_whenItAcceptsOtherTerms(uint32 terms) public {
        vm.assume(terms != FIRST_TERMS);
        IWorkerRegistry.NodeConsent memory consent = _consentNow(alice, aliceNode, aliceNodeKey);
        vm.expectRevert(
            abi.encodeWithSelector(IRunRegistryErrors.RunTermsChanged.selector, runId, terms, FIRST_TERMS, 0)
        );
        vm.prank(alice);
        workers.join(runId, terms, REQUIRED_STAKE, consent, _noPermit());
    }

    function test_join_reverts_whenActive() public {
        _joinAlice();
        IWorkerRegistry.NodeConsent memory consent = _consentNow(alice, bobNode, bobNodeKey);
        _expectWrongStatus(alice, IWorkerRegistry.Status.Active);
        _tryJoin(REQUIRED_STAKE, consent);
    }

    function test_join_reverts_whenExiting() public {
        _joinAlice();
        vm.prank(alice);
        workers.exit(runId);
        _expectWrongStatus(alice, IWorkerRegistry.Status.Exiting);
        _tryJoin(REQUIRED_STAKE, _keepNode());
    }

    /// @dev Joining again is no way out of jail or out of a ban.
    function testFuzz_join_reverts_whenJailedOrBanned(bool exact) public {
        _joinAlice();
        vm.prank(address(ledger));
        workers.convict(runId, alice, "offence", exact);
        _expectWrongStatus(alice, exact ? IWorkerRegistry.Status.Banned : IWorkerRegistry.Status.Jailed);
        _tryJoin(REQUIRED_STAKE, _keepNode());
    }

    // --------------------------------------------------------------- validators

    function testFuzz_join_reverts_whenItValidatesForTheRun(uint256 i) public {
        address validator = validators[i % 5];
        IWorkerRegistry.NodeConsent memory consent = _consentNow(validator, aliceNode, aliceNodeKey);
        _expectWrongStatus(validator, IWorkerRegistry.Status.None);
        _tryJoin(runId, validator, REQUIRED_STAKE, consent);
    }

    function test_join_works_whenItValidatesForAnotherRun() public {
        IRunRegistry.RunConfig memory config = _config();
        vm.prank(owner);
        uint64 other = runs.createRun(config);
        _join(other, validators[0], aliceNode, aliceNodeKey, REQUIRED_STAKE);
        assertTrue(runs.isValidator(runId, validators[0]), "a validator of one run");
        assertTrue(workers.isActive(other, validators[0]), "a worker of the other");
    }

    function test_join_works_onceItLeftItsSeat() public {
        vm.prank(validators[0]);
        runs.leaveSeat(runId);
        _join(runId, validators[0], aliceNode, aliceNodeKey, REQUIRED_STAKE);
        assertTrue(workers.isActive(runId, validators[0]), "a worker");
    }

    // ----------------------------------------------------------------- a worker

    function testFuzz_join_makesAWorker(uint256 stake, uint256 nodeKey) public {
        stake = bound(stake, REQUIRED_STAKE, WALLET);
        nodeKey = bound(nodeKey, 1, 1 << 200);
        address node = vm.addr(nodeKey);
        IWorkerRegistry.NodeConsent memory consent = _consentNow(alice, node, nodeKey);
        vm.expectEmit(address(workers));
        emit IWorkerRegistryEvents.WorkerRegistered(alice, 1);
        vm.expectEmit(address(workers));
        emit IWorkerRegistryEvents.NodeBound(alice, node);
        vm.expectEmit(address(workers));
        emit IWorkerRegistryEvents.WorkerJoined(runId, alice, FIRST_TERMS, block.number + ACTIVATION_DELAY);
        _tryJoin(stake, consent);

        (uint32 workerId, address bound_) = workers.workerOf(alice);
        assertEq(bound_, node, "node");
        assertEq(workerId, 1, "number");
        assertEq(workers.workerOfNode(node), alice, "by node");
        assertEq(workers.workerById(1), alice, "by number");
        assertEq(workers.nonces(alice), 1, "nonce");
        assertEq(vault.activeStake(runId, alice), stake, "stake");
    }

    function test_join_makesAMemberWithoutAPast() public {
        _tryJoin(REQUIRED_STAKE, _consentNow(alice, aliceNode, aliceNodeKey));
        IWorkerRegistry.Member memory expected;
        expected.status = IWorkerRegistry.Status.Active;
        expected.activeFrom = uint40(block.number + ACTIVATION_DELAY);
        assertEq(keccak256(abi.encode(workers.memberOf(runId, alice))), keccak256(abi.encode(expected)), "member");
    }

    function testFuzz_join_activatesAfterTheDelay(uint256 blocks) public {
        blocks = bound(blocks, 0, 10 * ACTIVATION_DELAY);
        _tryJoin(REQUIRED_STAKE, _consentNow(alice, aliceNode, aliceNodeKey));
        vm.roll(block.number + blocks);
        assertEq(workers.isActive(runId, alice), blocks >= ACTIVATION_DELAY, "active");
    }

    /// @dev Each run has its own delay, however long the worker has worked for another one.
    function testFuzz_join_activatesInEachRunByItself(uint256 blocks) public {
        blocks = bound(blocks, 0, ACTIVATION_DELAY - 1);
        uint64 other = _createRun();
        _joinAlice();
        _tryJoin(other, alice, REQUIRED_STAKE, _keepNode());
        vm.roll(block.number + blocks);
        assertTrue(workers.isActive(runId, alice), "active in the first run");
        assertFalse(workers.isActive(other, alice), "not yet in the second");
    }

    function test_join_concernsOneRun() public {
        uint64 other = _createRun();
        _joinAlice();
        assertEq(uint8(workers.statusOf(other, alice)), uint8(IWorkerRegistry.Status.None), "status");
        assertFalse(workers.isActive(other, alice), "not active");
        assertFalse(workers.answersFor(other, alice, aliceNode, block.timestamp), "answers for nothing");
    }

    function test_join_numbersWorkersFromOne() public {
        _joinAliceAndBob();
        assertEq(_workerId(alice), 1, "first");
        assertEq(_workerId(bob), 2, "second");
        assertEq(workers.workerById(3), address(0), "no third");
    }

    function test_join_keepsTheNumber_inASecondRun() public {
        _joinAliceAndBob();
        uint64 other = _createRun();
        vm.recordLogs();
        _join(other, alice, address(0), 0, REQUIRED_STAKE);
        Vm.Log[] memory logs = vm.getRecordedLogs();
        for (uint256 i = 0; i < logs.length; ++i) {
            assertNotEq(logs[i].topics[0], IWorkerRegistryEvents.WorkerRegistered.selector, "not registered again");
        }
        assertEq(_workerId(alice), 1, "her number");
        assertEq(workers.workerById(3), address(0), "no other number is used");
    }

    /// @dev What reverts leaves nothing behind: neither number nor node.
    function test_join_leavesNothing_whenItReverts() public {
        IWorkerRegistry.NodeConsent memory consent = _consentNow(alice, aliceNode, aliceNodeKey);
        _expectStakeTooLow(runId, REQUIRED_STAKE - 1);
        _tryJoin(REQUIRED_STAKE - 1, consent);
        assertEq(_workerId(alice), 0, "no number");
        assertEq(workers.workerOfNode(aliceNode), address(0), "no node");
        assertEq(token.balanceOf(alice), WALLET, "no stake");
    }

    // ------------------------------------------------------------------- permit

    function _permitOf(uint256 key, uint256 stake, uint256 deadline)
        private
        view
        returns (IWorkerRegistry.Permit memory permit)
    {
        permit.deadline = deadline;
        (permit.v, permit.r, permit.s) = _signPermit(alice, key, address(vault), stake, deadline);
    }

    function _joinWithPermit(uint256 stake, IWorkerRegistry.Permit memory permit, bool allowed) private {
        vm.prank(alice);
        token.approve(address(vault), 0);
        IWorkerRegistry.NodeConsent memory consent = _consentNow(alice, aliceNode, aliceNodeKey);
        if (!allowed) {
            vm.expectRevert(
                abi.encodeWithSelector(IERC20Errors.ERC20InsufficientAllowance.selector, address(vault), 0, stake)
            );
        }
        vm.prank(alice);
        workers.join(runId, FIRST_TERMS, stake, consent, permit);
    }

    function testFuzz_join_withPermit_reverts_whenItIsForged(uint256 stake, uint256 key) public {
        stake = bound(stake, REQUIRED_STAKE, WALLET);
        key = bound(key, 1, 1 << 200);
        vm.assume(key != aliceKey);
        _joinWithPermit(stake, _permitOf(key, stake, block.timestamp), false);
    }

    function testFuzz_join_withPermit_reverts_whenItExpired(uint256 stake, uint256 late) public {
        stake = bound(stake, REQUIRED_STAKE, WALLET);
        IWorkerRegistry.Permit memory permit = _permitOf(aliceKey, stake, block.timestamp);
        vm.warp(block.timestamp + bound(late, 1, 1000 days));
        _joinWithPermit(stake, permit, false);
    }

    function testFuzz_join_withPermit_reverts_whenItIsOverAnotherStake(uint256 stake, uint256 signed) public {
        stake = bound(stake, REQUIRED_STAKE, WALLET);
        signed = bound(signed, 0, WALLET);
        vm.assume(signed != stake);
        _joinWithPermit(stake, _permitOf(aliceKey, signed, block.timestamp), false);
    }

    function testFuzz_join_withPermit_onboardsInOneTransaction(uint256 stake) public {
        stake = bound(stake, REQUIRED_STAKE, WALLET);
        _joinWithPermit(stake, _permitOf(aliceKey, stake, block.timestamp), true);
        _assertStatus(alice, IWorkerRegistry.Status.Active, "a worker");
        assertEq(vault.activeStake(runId, alice), stake, "stake");
        assertEq(token.allowance(alice, address(vault)), 0, "no allowance left");
    }

    /// @dev Whoever uses the permit before her only does her work.
    function testFuzz_join_withPermit_works_whenItWasUsedBefore(uint256 stake) public {
        stake = bound(stake, REQUIRED_STAKE, WALLET);
        IWorkerRegistry.Permit memory permit = _permitOf(aliceKey, stake, block.timestamp);
        vm.prank(stranger);
        token.permit(alice, address(vault), stake, permit.deadline, permit.v, permit.r, permit.s);
        IWorkerRegistry.NodeConsent memory consent = _consentNow(alice, aliceNode, aliceNodeKey);
        vm.prank(alice);
        workers.join(runId, FIRST_TERMS, stake, consent, permit);
        assertEq(vault.activeStake(runId, alice), stake, "stake");
    }
}
