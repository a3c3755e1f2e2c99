// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IRunRegistryErrors} from "../../src/interfaces/IRunRegistry.sol";
import {IWorkerRegistry, IWorkerRegistryErrors, IWorkerRegistryEvents} from "../../src/interfaces/IWorkerRegistry.sol";
import {BaseTest} from "../BaseTest.sol";

/// @title Leaving a run, jail for low stake, and coming back from either; each run by itself
contract WorkerRegistryStatusTest is BaseTest {
    bytes32 private constant OFFENCE = keccak256("offence");
    uint32 private constant FIRST_TERMS = 1;

    uint64 private _otherRun;

    /// @dev Alice works for both runs.
    function setUp() public override {
        super.setUp();
        runId = _createRun();
        _otherRun = _createRun();
        vm.warp(30 days);
        _join(runId, alice, aliceNode, aliceNodeKey, REQUIRED_STAKE);
        _join(_otherRun, alice, address(0), 0, REQUIRED_STAKE);
    }

    /// @dev Her first statistical conviction, which costs no stake here.
    function _jail() private {
        vm.prank(address(ledger));
        workers.convict(runId, alice, OFFENCE, false);
    }

    function _ban() private {
        vm.prank(address(ledger));
        workers.convict(runId, alice, OFFENCE, true);
    }

    function _exit() private {
        vm.prank(alice);
        workers.exit(runId);
    }

    function _comeBack() private {
        vm.prank(alice);
        workers.comeBack(runId, FIRST_TERMS);
    }

    function _unbond(uint256 amount) private {
        vm.prank(alice);
        vault.requestUnbond(runId, amount);
    }

    function _expectWrongStatus(address worker, IWorkerRegistry.Status status) private {
        vm.expectRevert(
            abi.encodeWithSelector(IWorkerRegistryErrors.RegistryWrongStatus.selector, runId, worker, uint8(status))
        );
    }

    function _expectStakeTooLow(uint256 active) private {
        vm.expectRevert(
            abi.encodeWithSelector(
                IWorkerRegistryErrors.RegistryStakeTooLow.selector, runId, alice, active, REQUIRED_STAKE
            )
        );
    }

    function _expectStillJailed(uint256 until) private {
        bytes4 selector = IWorkerRegistryErrors.RegistryStillJailed.selector;
        vm.expectRevert(abi.encodeWithSelector(selector, runId, alice, until));
    }

    /// @dev Nothing that happened in the one run is felt in the other.
    function _assertOtherRunUntouched() private view {
        IWorkerRegistry.Member memory expected;
        expected.status = IWorkerRegistry.Status.Active;
        expected.activeFrom = workers.memberOf(_otherRun, alice).activeFrom;
        assertEq(
            keccak256(abi.encode(workers.memberOf(_otherRun, alice))),
            keccak256(abi.encode(expected)),
            "as it joined the other run"
        );
        assertEq(vault.activeStake(_otherRun, alice), REQUIRED_STAKE, "stake in the other run");
        assertTrue(workers.isActive(_otherRun, alice), "active in the other run");
    }

    // -------------------------------------------------------------- construction

    function test_constructor_keepsItsParameters() public view {
        assertEq(address(workers.token()), address(token), "token");
        assertEq(address(workers.vault()), address(vault), "vault");
        assertEq(address(workers.runs()), address(runs), "runs");
        assertEq(workers.ledger(), address(ledger), "ledger");
        assertEq(workers.court(), address(court), "court");
        assertEq(workers.faults(), address(faults), "fault court");
        assertEq(workers.requiredStake(), REQUIRED_STAKE, "required stake");
        assertEq(workers.activationDelay(), ACTIVATION_DELAY, "activation delay");
        assertEq(workers.jailTime(), JAIL_TIME, "jail time");
    }

    // --------------------------------------------------------------------- exit

    function testFuzz_exit_reverts_whenNotAWorker(address caller) public {
        vm.assume(caller != alice);
        _expectWrongStatus(caller, IWorkerRegistry.Status.None);
        vm.prank(caller);
        workers.exit(runId);
    }

    function testFuzz_exit_reverts_fromARunThatItNeverJoined(uint64 run) public {
        vm.assume(run != runId && run != _otherRun);
        vm.expectRevert(
            abi.encodeWithSelector(
                IWorkerRegistryErrors.RegistryWrongStatus.selector, run, alice, uint8(IWorkerRegistry.Status.None)
            )
        );
        vm.prank(alice);
        workers.exit(run);
    }

    function test_exit_reverts_twice() public {
        _exit();
        _expectWrongStatus(alice, IWorkerRegistry.Status.Exiting);
        _exit();
    }

    function test_exit_reverts_whenBanned() public {
        _ban();
        _expectWrongStatus(alice, IWorkerRegistry.Status.Banned);
        _exit();
    }

    function testFuzz_exit_unbondsAllStake(uint256 extra, bool jailed) public {
        extra = bound(extra, 1, WALLET - 2 * REQUIRED_STAKE);
        _deposit(runId, alice, extra);
        if (jailed) _jail();
        vm.expectEmit(address(workers));
        emit IWorkerRegistryEvents.WorkerExiting(runId, alice);
        _exit();
        (uint256 active, uint256 unbonding) = _stake(alice);
        assertEq(active, 0, "active");
        assertEq(unbonding, REQUIRED_STAKE + extra, "unbonding");
        assertFalse(workers.isActive(runId, alice), "no more work");
        _assertStatus(alice, IWorkerRegistry.Status.Exiting, "exiting");
        assertEq(workers.memberOf(runId, alice).leftAt, block.timestamp, "left at");
    }

    function testFuzz_exit_endsInAFullRefund(uint256 extra) public {
        extra = bound(extra, 1, WALLET - 2 * REQUIRED_STAKE);
        _deposit(runId, alice, extra);
        uint256 before = token.balanceOf(alice);
        _exit();
        vm.warp(block.timestamp + UNBONDING_PERIOD);
        vm.prank(alice);
        vault.withdraw(runId);
        assertEq(token.balanceOf(alice), before + REQUIRED_STAKE + extra, "every wei is back");
    }

    function test_exit_worksWithoutStake() public {
        _unbond(REQUIRED_STAKE);
        _exit();
        _assertStatus(alice, IWorkerRegistry.Status.Exiting, "exiting");
    }

    function test_exit_works_whenRunIsClosed() public {
        vm.prank(owner);
        runs.closeRun(runId);
        _exit();
        _assertStatus(alice, IWorkerRegistry.Status.Exiting, "exiting");
    }

    function test_exit_concernsOneRun() public {
        _exit();
        _assertOtherRunUntouched();
    }

    // ---------------------------------------------------------------- come back

    function testFuzz_comeBack_reverts_whenNotAWorker(address caller) public {
        vm.assume(caller != alice);
        _expectWrongStatus(caller, IWorkerRegistry.Status.None);
        vm.prank(caller);
        workers.comeBack(runId, FIRST_TERMS);
    }

    function test_comeBack_reverts_whenActive() public {
        _expectWrongStatus(alice, IWorkerRegistry.Status.Active);
        _comeBack();
    }

    function testFuzz_comeBack_reverts_whenBanned(uint256 waited, bool exited) public {
        if (exited) _exit();
        _ban();
        _deposit(runId, alice, REQUIRED_STAKE);
        vm.warp(block.timestamp + bound(waited, 0, 1000 days));
        _expectWrongStatus(alice, IWorkerRegistry.Status.Banned);
        _comeBack();
    }

    function testFuzz_comeBack_reverts_whenRunIsUnknown(uint64 unknown) public {
        vm.assume(unknown != runId && unknown != _otherRun);
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunUnknown.selector, unknown));
        vm.prank(alice);
        workers.comeBack(unknown, FIRST_TERMS);
    }

    function test_comeBack_reverts_whenRunIsClosed() public {
        _exit();
        _deposit(runId, alice, REQUIRED_STAKE);
        vm.prank(owner);
        runs.closeRun(runId);
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunEnded.selector, runId));
        _comeBack();
    }

    function testFuzz_comeBack_reverts_whenItAcceptsOtherTerms(uint32 terms) public {
        vm.assume(terms != FIRST_TERMS);
        _exit();
        _deposit(runId, alice, REQUIRED_STAKE);
        vm.expectRevert(
            abi.encodeWithSelector(IRunRegistryErrors.RunTermsChanged.selector, runId, terms, FIRST_TERMS, 0)
        );
        vm.prank(alice);
        workers.comeBack(runId, terms);
    }

    /// @dev Jail is a first conviction, or stake that fell and was filled up again; neither ends early.
    function testFuzz_comeBack_reverts_beforeTheJailTimeIsOver(uint256 waited, bool convicted) public {
        uint256 until = block.timestamp + JAIL_TIME;
        if (convicted) _jail();
        else _unbond(1);
        _deposit(runId, alice, 1);
        vm.warp(waited % 2 == 0 ? until - 1 : bound(waited, block.timestamp, until - 1));
        _expectStillJailed(until);
        _comeBack();
    }

    /// @dev Leaving is no way around jail.
    function testFuzz_comeBack_reverts_beforeTheJailTimeIsOver_alsoFromLeaving(uint256 waited) public {
        uint256 until = block.timestamp + JAIL_TIME;
        _jail();
        _exit();
        _deposit(runId, alice, REQUIRED_STAKE);
        vm.warp(waited % 2 == 0 ? until - 1 : bound(waited, block.timestamp, until - 1));
        _expectStillJailed(until);
        _comeBack();
    }

    function testFuzz_comeBack_reverts_untilStakeSuffices_fromLeaving(uint256 stake) public {
        stake = stake % 2 == 0 ? REQUIRED_STAKE - 1 : bound(stake, 1, REQUIRED_STAKE - 1);
        _exit();
        _deposit(runId, alice, stake);
        _expectStakeTooLow(stake);
        _comeBack();
    }

    function testFuzz_comeBack_reverts_untilStakeSuffices_fromJail(uint256 missing) public {
        missing = bound(missing, 1, REQUIRED_STAKE);
        _unbond(missing);
        vm.warp(block.timestamp + JAIL_TIME);
        _expectStakeTooLow(REQUIRED_STAKE - missing);
        _comeBack();
        _deposit(runId, alice, missing);
        _comeBack();
        _assertStatus(alice, IWorkerRegistry.Status.Active, "topped up");
    }

    /// @dev Stake in another run is another run's.
    function testFuzz_comeBack_reverts_whenStakeLiesElsewhere(uint256 stake) public {
        stake = bound(stake, 1, WALLET - 2 * REQUIRED_STAKE);
        _exit();
        _deposit(_otherRun, alice, stake);
        _expectStakeTooLow(0);
        _comeBack();
    }

    function testFuzz_comeBack_fromJail_activatesAfterTheDelay(uint256 blocks) public {
        blocks = bound(blocks, 0, 10 * ACTIVATION_DELAY);
        _jail();
        vm.warp(block.timestamp + JAIL_TIME);
        vm.expectEmit(address(workers));
        emit IWorkerRegistryEvents.WorkerReturned(runId, alice, FIRST_TERMS, block.number + ACTIVATION_DELAY);
        _comeBack();
        _assertStatus(alice, IWorkerRegistry.Status.Active, "back");
        vm.roll(block.number + blocks);
        assertEq(workers.isActive(runId, alice), blocks >= ACTIVATION_DELAY, "active");
    }

    function testFuzz_comeBack_fromLeaving_activatesAfterTheDelay(uint256 blocks) public {
        blocks = bound(blocks, 0, 10 * ACTIVATION_DELAY);
        _exit();
        _deposit(runId, alice, REQUIRED_STAKE);
        vm.expectEmit(address(workers));
        emit IWorkerRegistryEvents.WorkerReturned(runId, alice, FIRST_TERMS, block.number + ACTIVATION_DELAY);
        _comeBack();
        assertEq(workers.memberOf(runId, alice).leftAt, 0, "not leaving");
        vm.roll(block.number + blocks);
        assertEq(workers.isActive(runId, alice), blocks >= ACTIVATION_DELAY, "active");
    }

    function test_comeBack_leavesTheOldStakeUnbonding() public {
        _exit();
        _deposit(runId, alice, REQUIRED_STAKE);
        _comeBack();
        vm.warp(block.timestamp + UNBONDING_PERIOD);
        vm.prank(alice);
        assertEq(vault.withdraw(runId), REQUIRED_STAKE, "what it left with");
        _assertStatus(alice, IWorkerRegistry.Status.Active, "and it stays");
    }

    function test_comeBack_concernsOneRun() public {
        vm.prank(alice);
        workers.exit(_otherRun);
        _exit();
        _deposit(runId, alice, REQUIRED_STAKE);
        _comeBack();
        _assertStatus(alice, IWorkerRegistry.Status.Active, "back");
        assertEq(uint8(workers.statusOf(_otherRun, alice)), uint8(IWorkerRegistry.Status.Exiting), "gone there");
    }

    // ------------------------------------------------------- jail for low stake

    function testFuzz_jailForLowStake_stopsAWorker_whenStakeFalls(uint256 now_, uint256 missing) public {
        missing = missing % 2 == 0 ? 1 : bound(missing, 1, REQUIRED_STAKE);
        vm.warp(bound(now_, block.timestamp, type(uint40).max - JAIL_TIME));
        vm.expectEmit(address(workers));
        emit IWorkerRegistryEvents.WorkerJailed(runId, alice, 0, block.timestamp + JAIL_TIME);
        _unbond(missing);
        _assertStatus(alice, IWorkerRegistry.Status.Jailed, "jailed");
        assertFalse(workers.isActive(runId, alice), "may not submit");
        assertEq(workers.memberOf(runId, alice).jailedUntil, block.timestamp + JAIL_TIME, "until");
        assertEq(workers.memberOf(runId, alice).convictions, 0, "convicted of nothing");
    }

    function testFuzz_jailForLowStake_doesNothing_whileStakeSuffices(address caller, uint256 extra) public {
        extra = bound(extra, 1, WALLET - 2 * REQUIRED_STAKE);
        _deposit(runId, alice, extra);
        _unbond(extra);
        vm.prank(caller);
        workers.jailForLowStake(runId, alice);
        _assertStatus(alice, IWorkerRegistry.Status.Active, "she has just enough");
        assertTrue(workers.isActive(runId, alice), "active");
    }

    /// @dev Low stake in one run jails there and nowhere else.
    function testFuzz_jailForLowStake_concernsOneRun(uint256 missing) public {
        _unbond(bound(missing, 1, REQUIRED_STAKE));
        workers.jailForLowStake(_otherRun, alice);
        _assertStatus(alice, IWorkerRegistry.Status.Jailed, "jailed here");
        _assertOtherRunUntouched();
    }

    function testFuzz_jailForLowStake_doesNothing_forAnybodyElse(uint64 run, address account) public {
        vm.assume(account != alice);
        workers.jailForLowStake(run, account);
        assertEq(uint8(workers.statusOf(run, account)), uint8(IWorkerRegistry.Status.None), "no worker");
        assertEq(workers.memberOf(run, account).jailedUntil, 0, "no time to serve");
    }

    function test_jailForLowStake_doesNothing_forWhoIsLeaving() public {
        _exit();
        workers.jailForLowStake(runId, alice);
        _assertStatus(alice, IWorkerRegistry.Status.Exiting, "exiting");
        assertEq(workers.memberOf(runId, alice).jailedUntil, 0, "no time to serve");
    }

    /// @dev Nobody prolongs the time of a worker in jail by calling again.
    function testFuzz_jailForLowStake_doesNothing_forWhoIsInJail(uint256 waited) public {
        uint256 until = block.timestamp + JAIL_TIME;
        _unbond(REQUIRED_STAKE);
        vm.warp(block.timestamp + bound(waited, 1, 1000 days));
        workers.jailForLowStake(runId, alice);
        assertEq(workers.memberOf(runId, alice).jailedUntil, until, "until");
    }

    function test_jailForLowStake_doesNothing_forWhoIsBanned() public {
        _ban();
        _unbond(REQUIRED_STAKE);
        workers.jailForLowStake(runId, alice);
        _assertStatus(alice, IWorkerRegistry.Status.Banned, "banned");
        assertEq(workers.memberOf(runId, alice).jailedUntil, 0, "no time to serve");
    }
}
