// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {stdError} from "forge-std/StdError.sol";

import {IContributionLedger} from "../../src/interfaces/IContributionLedger.sol";
import {IWorkerRegistry, IWorkerRegistryErrors, IWorkerRegistryEvents} from "../../src/interfaces/IWorkerRegistry.sol";
import {BaseTest} from "../BaseTest.sol";

/// @title Convictions of a worker in a run, and their acquittals; each run by itself
contract WorkerRegistryConvictTest is BaseTest {
    bytes32 private constant OFFENCE = keccak256("offence");

    uint64 private _otherRun;

    /// @dev Alice works for both runs.
    function setUp() public override {
        super.setUp();
        runId = _createRun();
        _otherRun = _createRun();
        _join(runId, alice, aliceNode, aliceNodeKey, REQUIRED_STAKE);
        _join(_otherRun, alice, address(0), 0, REQUIRED_STAKE);
    }

    function _convict(bool exact) private returns (uint256) {
        return _convictIn(runId, exact);
    }

    function _convictIn(uint64 run, bool exact) private returns (uint256) {
        vm.prank(address(ledger));
        return workers.convict(run, alice, OFFENCE, exact);
    }

    function _acquit(bool exact) private {
        _acquitIn(runId, exact);
    }

    function _acquitIn(uint64 run, bool exact) private {
        vm.prank(address(court));
        workers.acquit(run, alice, OFFENCE, exact);
    }

    function _exit() private {
        vm.prank(alice);
        workers.exit(runId);
    }

    function _comeBack() private {
        vm.prank(alice);
        workers.comeBack(runId, 1);
    }

    function _serve() private {
        vm.warp(block.timestamp + JAIL_TIME);
        _comeBack();
        vm.roll(block.number + ACTIVATION_DELAY);
    }

    function _expectUnauthorized(address caller) private {
        vm.expectRevert(abi.encodeWithSelector(IWorkerRegistryErrors.RegistryUnauthorized.selector, caller));
    }

    function _assertConvictions(uint256 all, uint256 exact) private view {
        IWorkerRegistry.Member memory member = workers.memberOf(runId, alice);
        assertEq(member.convictions, all, "convictions");
        assertEq(member.exactConvictions, exact, "exact ones");
    }

    function _memberHash(uint64 run) private view returns (bytes32) {
        return keccak256(abi.encode(workers.memberOf(run, alice)));
    }

    // ------------------------------------------------------------------- convict

    function testFuzz_convict_reverts_whenNotAJudge(address caller, bool exact) public {
        vm.assume(caller != address(ledger) && caller != address(faults));
        _expectUnauthorized(caller);
        vm.prank(caller);
        workers.convict(runId, alice, OFFENCE, exact);
    }

    /// @dev The court undoes convictions and makes none.
    function test_convict_reverts_whenTheCourtCalls() public {
        _expectUnauthorized(address(court));
        vm.prank(address(court));
        workers.convict(runId, alice, OFFENCE, true);
    }

    function testFuzz_convict_reverts_whenNotAWorker(address account, bool exact) public {
        vm.assume(account != alice);
        vm.expectRevert(
            abi.encodeWithSelector(
                IWorkerRegistryErrors.RegistryWrongStatus.selector, runId, account, uint8(IWorkerRegistry.Status.None)
            )
        );
        vm.prank(address(ledger));
        workers.convict(runId, account, OFFENCE, exact);
    }

    function testFuzz_convict_reverts_inARunThatItNeverJoined(uint64 run, bool exact) public {
        vm.assume(run != runId && run != _otherRun);
        vm.expectRevert(
            abi.encodeWithSelector(
                IWorkerRegistryErrors.RegistryWrongStatus.selector, run, alice, uint8(IWorkerRegistry.Status.None)
            )
        );
        _convictIn(run, exact);
    }

    function testFuzz_convict_bans_whenExact(bool byFaultCourt) public {
        vm.expectEmit(address(workers));
        emit IWorkerRegistryEvents.WorkerBanned(runId, alice, OFFENCE);
        vm.prank(byFaultCourt ? address(faults) : address(ledger));
        assertEq(workers.convict(runId, alice, OFFENCE, true), 0, "priors");
        _assertStatus(alice, IWorkerRegistry.Status.Banned, "banned");
        assertFalse(workers.isActive(runId, alice), "may not submit");
        _assertConvictions(1, 1);
    }

    function testFuzz_convict_jails_whenStatisticalAndFirst(bool byFaultCourt) public {
        vm.expectEmit(address(workers));
        emit IWorkerRegistryEvents.WorkerJailed(runId, alice, OFFENCE, block.timestamp + JAIL_TIME);
        vm.prank(byFaultCourt ? address(faults) : address(ledger));
        assertEq(workers.convict(runId, alice, OFFENCE, false), 0, "priors");
        _assertStatus(alice, IWorkerRegistry.Status.Jailed, "jailed");
        assertFalse(workers.isActive(runId, alice), "may not submit");
        assertEq(workers.memberOf(runId, alice).jailedUntil, block.timestamp + JAIL_TIME, "until");
        _assertConvictions(1, 0);
    }

    function testFuzz_convict_bans_theSecondTime(bool served, bool exact) public {
        _convict(false);
        if (served) _serve();
        vm.expectEmit(address(workers));
        emit IWorkerRegistryEvents.WorkerBanned(runId, alice, OFFENCE);
        assertEq(_convict(exact), 1, "priors");
        _assertStatus(alice, IWorkerRegistry.Status.Banned, "banned");
        _assertConvictions(2, exact ? 1 : 0);
    }

    function testFuzz_convict_countsPriors(uint256 times) public {
        times = bound(times, 1, 30);
        for (uint256 i = 0; i < times; ++i) {
            assertEq(_convict(i % 2 == 0), i, "priors");
        }
        _assertConvictions(times, (times + 1) / 2);
    }

    /// @dev Who is leaving goes on leaving, but cannot come back earlier than from jail.
    function test_convict_letsAnExitingWorkerLeave_butNotComeBackAtOnce() public {
        _exit();
        _convict(false);
        _assertStatus(alice, IWorkerRegistry.Status.Exiting, "exiting");
        _deposit(runId, alice, REQUIRED_STAKE);
        uint256 until = block.timestamp + JAIL_TIME;
        bytes4 selector = IWorkerRegistryErrors.RegistryStillJailed.selector;
        vm.expectRevert(abi.encodeWithSelector(selector, runId, alice, until));
        _comeBack();
        vm.warp(until);
        _comeBack();
        _assertStatus(alice, IWorkerRegistry.Status.Active, "back");
    }

    function test_convict_bansAnExitingWorker_theSecondTime() public {
        _exit();
        _convict(false);
        _convict(false);
        _assertStatus(alice, IWorkerRegistry.Status.Banned, "banned");
    }

    function testFuzz_convict_keepsWhenAWorkerLeft(uint256 waited, bool exact) public {
        uint256 left = block.timestamp;
        _exit();
        vm.warp(block.timestamp + bound(waited, 1, UNBONDING_PERIOD));
        _convict(exact);
        assertEq(workers.memberOf(runId, alice).leftAt, left, "left at");
    }

    function testFuzz_convict_touchesNoStake(uint256 times, bool exact) public {
        for (uint256 i = 0; i <= times % 3; ++i) {
            _convict(exact);
        }
        assertEq(vault.activeStake(runId, alice), REQUIRED_STAKE, "the vault is told by whoever judges");
    }

    // ------------------------------------------------------------------ each run

    function testFuzz_convict_concernsOneRun(uint256 times, bool exact) public {
        bytes32 before = _memberHash(_otherRun);
        for (uint256 i = 0; i <= times % 3; ++i) {
            _convict(exact);
        }
        assertEq(_memberHash(_otherRun), before, "the other run");
        assertTrue(workers.isActive(_otherRun, alice), "she works there");
    }

    /// @dev Convictions in other runs are no priors.
    function testFuzz_convict_countsPriorsOfItsRunOnly(uint256 times, bool exact) public {
        for (uint256 i = 0; i <= times % 30; ++i) {
            _convictIn(_otherRun, i % 2 == 0);
        }
        assertEq(_convict(exact), 0, "priors");
        _assertStatus(alice, exact ? IWorkerRegistry.Status.Banned : IWorkerRegistry.Status.Jailed, "a first one");
    }

    /// @dev Who is banned from one run may join a third one.
    function test_convict_closesNoOtherRun() public {
        _convict(true);
        uint64 third = _createRun();
        _join(third, alice, address(0), 0, REQUIRED_STAKE);
        assertTrue(workers.isActive(third, alice), "she works there");
    }

    function testFuzz_acquit_concernsOneRun(bool exact) public {
        _convict(exact);
        _convictIn(_otherRun, exact);
        bytes32 before = _memberHash(_otherRun);
        _acquit(exact);
        _assertStatus(alice, IWorkerRegistry.Status.Active, "acquitted");
        assertEq(_memberHash(_otherRun), before, "convicted in the other run");
    }

    function testFuzz_acquit_reverts_whenConvictedInAnotherRun(bool exact) public {
        _convict(exact);
        vm.expectRevert(stdError.arithmeticError);
        _acquitIn(_otherRun, exact);
    }

    // -------------------------------------------------------------------- acquit

    function testFuzz_acquit_reverts_whenNotTheCourt(address caller, bool exact) public {
        vm.assume(caller != address(court));
        _convict(exact);
        _expectUnauthorized(caller);
        vm.prank(caller);
        workers.acquit(runId, alice, OFFENCE, exact);
    }

    /// @dev Those who convict do not acquit.
    function testFuzz_acquit_reverts_whenAJudgeCalls(bool byFaultCourt, bool exact) public {
        address judge = byFaultCourt ? address(faults) : address(ledger);
        _convict(exact);
        _expectUnauthorized(judge);
        vm.prank(judge);
        workers.acquit(runId, alice, OFFENCE, exact);
    }

    function testFuzz_acquit_reverts_withoutAConviction(bool exact) public {
        vm.expectRevert(stdError.arithmeticError);
        _acquit(exact);
    }

    /// @dev A statistical conviction is no exact one; the court names the one whose stake the vault gave back.
    function test_acquit_reverts_asExact_whenStatisticallyConvicted() public {
        _convict(false);
        vm.expectRevert(stdError.arithmeticError);
        _acquit(true);
    }

    function testFuzz_acquit_givesTheFormerStatusBack(bool exact) public {
        _convict(exact);
        vm.expectEmit(address(workers));
        emit IWorkerRegistryEvents.WorkerAcquitted(runId, alice, OFFENCE, IWorkerRegistry.Status.Active);
        _acquit(exact);
        assertTrue(workers.isActive(runId, alice), "active, without a new delay");
        _assertConvictions(0, 0);
    }

    function testFuzz_acquit_keepsAJailedWorkerInJail(bool exact) public {
        vm.prank(alice);
        vault.requestUnbond(runId, 1);
        _deposit(runId, alice, 1);
        _convict(exact);
        _acquit(exact);
        _assertStatus(alice, IWorkerRegistry.Status.Jailed, "jailed because its stake fell");
    }

    function testFuzz_acquit_keepsAnExitingWorkerExiting(bool exact) public {
        uint256 left = block.timestamp;
        _exit();
        vm.warp(block.timestamp + 1);
        _convict(exact);
        _acquit(exact);
        _assertStatus(alice, IWorkerRegistry.Status.Exiting, "exiting");
        assertEq(workers.memberOf(runId, alice).leftAt, left, "left at");
    }

    function test_acquit_keepsExiting_whoLeftAfterTheConviction() public {
        _convict(false);
        _exit();
        _acquit(false);
        _assertStatus(alice, IWorkerRegistry.Status.Exiting, "exiting");
    }

    function testFuzz_acquit_jails_whenStakeNoLongerSuffices(bool exact, uint256 amount) public {
        amount = amount % 2 == 0 ? 1 : bound(amount, 1, REQUIRED_STAKE);
        _convict(exact);
        vm.prank(alice);
        vault.requestUnbond(runId, amount);
        vm.expectEmit(address(workers));
        emit IWorkerRegistryEvents.WorkerAcquitted(runId, alice, OFFENCE, IWorkerRegistry.Status.Jailed);
        _acquit(exact);
        _assertStatus(alice, IWorkerRegistry.Status.Jailed, "jailed");
    }

    /// @dev Stake in another run does not keep a worker out of jail in this one.
    function testFuzz_acquit_jails_whenStakeLiesElsewhere(bool exact, uint256 elsewhere) public {
        _deposit(_otherRun, alice, bound(elsewhere, 1, WALLET - 2 * REQUIRED_STAKE));
        _convict(exact);
        vm.prank(alice);
        vault.requestUnbond(runId, REQUIRED_STAKE);
        _acquit(exact);
        _assertStatus(alice, IWorkerRegistry.Status.Jailed, "jailed");
    }

    function test_acquit_jailsInPlaceOfABan_whileOneStatisticalConvictionStands() public {
        _convict(false);
        _convict(false);
        _acquit(false);
        _assertStatus(alice, IWorkerRegistry.Status.Jailed, "one stands");
        _serve();
        assertTrue(workers.isActive(runId, alice), "and can be served");
    }

    function test_acquit_letsAnExitingWorkerLeave_whileOneStatisticalConvictionStands() public {
        _exit();
        _convict(false);
        _convict(false);
        _acquit(false);
        _assertStatus(alice, IWorkerRegistry.Status.Exiting, "as before the first");
    }

    /// @dev Who left between two convictions goes on leaving once one or both are overturned: it is active only
    ///      after it came back.
    function testFuzz_acquit_keepsExiting_whoLeftBetweenConvictions(bool exact, bool both, uint256 stake) public {
        _convict(false);
        _exit();
        _convict(exact);
        _deposit(runId, alice, bound(stake, 1, WALLET - 2 * REQUIRED_STAKE));
        _acquit(exact);
        if (both) _acquit(false);
        _assertStatus(alice, IWorkerRegistry.Status.Exiting, "exiting");
        assertFalse(workers.isActive(runId, alice), "may not submit");
    }

    function test_acquit_keepsTheBan_whenAnExactConvictionStands_ofWhoLeft() public {
        _exit();
        _convict(true);
        _convict(false);
        _acquit(false);
        _assertStatus(alice, IWorkerRegistry.Status.Banned, "the exact one stands");
    }

    /// @dev Whatever happens in whatever order: who may submit answers for what it submits.
    function testFuzz_convictions_leaveNobodyActiveWhoAnswersForNothing(uint256 seed) public {
        _deposit(runId, alice, WALLET / 2);
        uint256[2] memory standing;
        for (uint256 i = 0; i < 40; ++i) {
            uint256 random = uint256(keccak256(abi.encode(seed, i)));
            vm.warp(block.timestamp + random % (2 * JAIL_TIME));
            _doSomething(random >> 128, standing);
            if (_status(alice) == IWorkerRegistry.Status.Active) {
                assertTrue(workers.answersFor(runId, alice, aliceNode, block.timestamp + 1), "answers");
            }
        }
    }

    /// @dev One of: a conviction, an acquittal if there is one to overturn, leaving, coming back.
    function _doSomething(uint256 random, uint256[2] memory standing) private {
        uint256 what = random % 4;
        if (what < 2) return _step(runId, standing, (random >> 8) % 2, what == 1);
        vm.prank(alice);
        if (what == 2) {
            try workers.exit(runId) {
                _deposit(runId, alice, REQUIRED_STAKE);
            } catch {}
        } else {
            try workers.comeBack(runId, 1) {} catch {}
        }
    }

    function test_acquit_keepsTheBan_whileAnExactConvictionStands() public {
        _convict(true);
        _convict(false);
        _acquit(false);
        _assertStatus(alice, IWorkerRegistry.Status.Banned, "the exact one stands");
    }

    function test_acquit_keepsTheBan_whileTwoStatisticalConvictionsStand() public {
        _convict(false);
        _convict(false);
        _convict(true);
        _acquit(true);
        _assertStatus(alice, IWorkerRegistry.Status.Banned, "two statistical ones stand");
    }

    function test_acquit_ofTheExactOne_leavesTheStatisticalOneInJail() public {
        _convict(true);
        _convict(false);
        _acquit(true);
        _assertStatus(alice, IWorkerRegistry.Status.Jailed, "the statistical one stands");
    }

    function test_acquit_leavesAWorkerActive_whoServedItsTime() public {
        _convict(false);
        _serve();
        _acquit(false);
        assertTrue(workers.isActive(runId, alice), "active");
    }

    /// @dev After an acquittal a conviction is a first one again.
    function testFuzz_acquit_leavesNoPriors(bool first, bool second) public {
        _convict(first);
        _acquit(first);
        assertEq(_convict(second), 0, "priors");
        _assertStatus(alice, second ? IWorkerRegistry.Status.Banned : IWorkerRegistry.Status.Jailed, "a first one");
    }

    /// @dev All orders of convictions and acquittals of both kinds, in two runs, against a model that remembers every
    ///      conviction. Index 0 counts the statistical ones of a run, index 1 the exact ones.
    function testFuzz_convictions_followTheModel(uint256 seed, uint256 steps) public {
        uint256[2][2] memory standing;
        steps = bound(steps, 1, 60);
        for (uint256 i = 0; i < steps; ++i) {
            uint256 bits = seed >> (3 * i);
            uint256 at = bits & 1;
            uint256 kind = (bits >> 1) & 1;
            _step(at == 0 ? runId : _otherRun, standing[at], kind, (bits >> 2) & 1 == 1);
            _assertFollows(runId, standing[0]);
            _assertFollows(_otherRun, standing[1]);
        }
    }

    function _step(uint64 run, uint256[2] memory standing, uint256 kind, bool undo) private {
        if (undo && standing[kind] != 0) {
            _acquitIn(run, kind == 1);
            --standing[kind];
        } else {
            assertEq(_convictIn(run, kind == 1), standing[0] + standing[1], "priors");
            ++standing[kind];
        }
    }

    function _assertFollows(uint64 run, uint256[2] memory standing) private view {
        IWorkerRegistry.Member memory member = workers.memberOf(run, alice);
        assertEq(member.convictions, standing[0] + standing[1], "those executed minus those overturned");
        assertEq(member.exactConvictions, standing[1], "exact ones");
        IWorkerRegistry.Status expected = IWorkerRegistry.Status.Active;
        if (standing[1] != 0 || standing[0] > 1) expected = IWorkerRegistry.Status.Banned;
        else if (standing[0] == 1) expected = IWorkerRegistry.Status.Jailed;
        assertEq(uint8(member.status), uint8(expected), "status");
    }

    // ------------------------------------------------------------------ the ledger

    /// @dev A fraud that is executed convicts in the batch's run, and costs stake there alone.
    function testFuzz_executeFraud_convictsInItsRun(bool exact) public {
        IWorkerRegistry.Member memory before = workers.memberOf(_otherRun, alice);
        vm.prank(owner);
        escrow.fund(runId, WALLET / 2);
        bytes[] memory records = _one(_fraud(exact));
        uint64 batchId = _commitAndPost(records);
        IContributionLedger.OutcomeProof memory outcome = _prove(batchId, records, 0);
        bytes memory signature = _signSubmission(_submission(alice, 1, 0), aliceNodeKey);
        ledger.executeFraud(outcome, _held(outcome, _submission(alice, 1, 0), signature));
        _assertConvictions(1, exact ? 1 : 0);
        (uint256 left,) = _stake(alice);
        assertEq(left, REQUIRED_STAKE - REQUIRED_STAKE * (exact ? EXACT_FRAUD_PPM : FRAUD_PPM) / PPM, "stake here");
        assertEq(_memberHash(_otherRun), keccak256(abi.encode(before)), "the other run");
        assertEq(vault.activeStake(_otherRun, alice), REQUIRED_STAKE, "stake there");
    }

    function _fraud(bool exact) private view returns (bytes memory) {
        IContributionLedger.Outcome memory outcome = _outcome(alice, 1, 0, FRAUD);
        if (exact) outcome.reason = uint8(EXACT);
        return _pack(outcome);
    }
}
