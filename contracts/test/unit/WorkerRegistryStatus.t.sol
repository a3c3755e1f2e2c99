// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IWorkerRegistry, IWorkerRegistryErrors, IWorkerRegistryEvents} from "../../src/interfaces/IWorkerRegistry.sol";
import {BaseTest} from "../BaseTest.sol";

contract WorkerRegistryStatusTest is BaseTest {
    bytes32 private constant OFFENCE = keccak256("offence");

    function setUp() public override {
        super.setUp();
        _register(alice, aliceNode, aliceNodeKey, REQUIRED_STAKE);
    }

    function _jail(address worker) private {
        vm.prank(address(faults));
        workers.jail(worker, OFFENCE);
    }

    function _ban() private {
        vm.prank(address(ledger));
        workers.convict(alice, OFFENCE, true);
    }

    function _exit() private {
        vm.prank(alice);
        workers.exit();
    }

    function _expectWrongStatus(address worker, IWorkerRegistry.Status status) private {
        vm.expectRevert(
            abi.encodeWithSelector(IWorkerRegistryErrors.RegistryWrongStatus.selector, worker, uint8(status))
        );
    }

    function _expectStakeTooLow(uint256 active) private {
        vm.expectRevert(
            abi.encodeWithSelector(IWorkerRegistryErrors.RegistryStakeTooLow.selector, alice, active, REQUIRED_STAKE)
        );
    }

    // -------------------------------------------------------------- construction

    function test_constructor_keepsItsParameters() public view {
        assertEq(address(workers.token()), address(token), "token");
        assertEq(address(workers.vault()), address(vault), "vault");
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
        workers.exit();
    }

    function test_exit_reverts_twice() public {
        _exit();
        _expectWrongStatus(alice, IWorkerRegistry.Status.Exiting);
        vm.prank(alice);
        workers.exit();
    }

    function test_exit_reverts_whenBanned() public {
        _ban();
        _expectWrongStatus(alice, IWorkerRegistry.Status.Banned);
        vm.prank(alice);
        workers.exit();
    }

    function testFuzz_exit_unbondsAllStake(uint256 extra, bool jailed) public {
        extra = bound(extra, 1, WALLET - REQUIRED_STAKE);
        _deposit(alice, extra);
        if (jailed) _jail(alice);
        vm.expectEmit(address(workers));
        emit IWorkerRegistryEvents.WorkerExiting(alice);
        _exit();
        (uint256 active, uint256 unbonding) = _stake(alice);
        assertEq(active, 0, "active");
        assertEq(unbonding, REQUIRED_STAKE + extra, "unbonding");
        assertFalse(workers.isActive(alice), "no more work");
        _assertStatus(alice, IWorkerRegistry.Status.Exiting, "exiting");
    }

    function testFuzz_exit_endsInAFullRefund(uint256 extra) public {
        extra = bound(extra, 1, WALLET - REQUIRED_STAKE);
        _deposit(alice, extra);
        _exit();
        vm.warp(block.timestamp + UNBONDING_PERIOD);
        vm.prank(alice);
        vault.withdraw();
        assertEq(token.balanceOf(alice), WALLET, "every wei is back");
    }

    function test_exit_worksWithoutStake() public {
        vm.prank(alice);
        vault.requestUnbond(REQUIRED_STAKE);
        _exit();
        _assertStatus(alice, IWorkerRegistry.Status.Exiting, "exiting");
    }

    // ------------------------------------------------------------------- rejoin

    function testFuzz_rejoin_reverts_whenNotAWorker(address caller) public {
        vm.assume(caller != alice);
        _expectWrongStatus(caller, IWorkerRegistry.Status.None);
        vm.prank(caller);
        workers.rejoin();
    }

    function test_rejoin_reverts_whenActive() public {
        _expectWrongStatus(alice, IWorkerRegistry.Status.Active);
        vm.prank(alice);
        workers.rejoin();
    }

    function test_rejoin_reverts_whenJailed() public {
        _jail(alice);
        vm.warp(block.timestamp + JAIL_TIME);
        _expectWrongStatus(alice, IWorkerRegistry.Status.Jailed);
        vm.prank(alice);
        workers.rejoin();
    }

    function test_rejoin_reverts_whenBanned() public {
        _exit();
        _ban();
        _expectWrongStatus(alice, IWorkerRegistry.Status.Banned);
        vm.prank(alice);
        workers.rejoin();
    }

    function testFuzz_rejoin_reverts_untilStakeSuffices(uint256 stake) public {
        stake = bound(stake, 1, REQUIRED_STAKE - 1);
        _exit();
        _deposit(alice, stake);
        _expectStakeTooLow(stake);
        vm.prank(alice);
        workers.rejoin();
    }

    /// @dev Leaving is no way around jail.
    function testFuzz_rejoin_reverts_beforeTheJailTimeIsOver(uint256 waited) public {
        _jail(alice);
        uint256 until = block.timestamp + JAIL_TIME;
        _exit();
        _deposit(alice, REQUIRED_STAKE);
        vm.warp(block.timestamp + bound(waited, 0, JAIL_TIME - 1));
        vm.expectRevert(abi.encodeWithSelector(IWorkerRegistryErrors.RegistryStillJailed.selector, alice, until));
        vm.prank(alice);
        workers.rejoin();
    }

    function testFuzz_rejoin_activatesAfterTheDelay(uint256 blocks) public {
        blocks = bound(blocks, 0, 10 * ACTIVATION_DELAY);
        _jail(alice);
        _exit();
        _deposit(alice, REQUIRED_STAKE);
        vm.warp(block.timestamp + JAIL_TIME);
        vm.expectEmit(address(workers));
        emit IWorkerRegistryEvents.WorkerRejoined(alice, block.number + ACTIVATION_DELAY);
        vm.prank(alice);
        workers.rejoin();
        _assertStatus(alice, IWorkerRegistry.Status.Active, "back");
        vm.roll(block.number + blocks);
        assertEq(workers.isActive(alice), blocks >= ACTIVATION_DELAY, "active");
    }

    function test_rejoin_leavesTheOldStakeUnbonding() public {
        _exit();
        _deposit(alice, REQUIRED_STAKE);
        vm.prank(alice);
        workers.rejoin();
        vm.warp(block.timestamp + UNBONDING_PERIOD);
        vm.prank(alice);
        assertEq(vault.withdraw(), REQUIRED_STAKE, "what it left with");
        _assertStatus(alice, IWorkerRegistry.Status.Active, "and it stays");
    }

    // --------------------------------------------------------------------- jail

    function testFuzz_jail_reverts_whenNotTheFaultCourt(address caller) public {
        vm.assume(caller != address(faults));
        vm.expectRevert(abi.encodeWithSelector(IWorkerRegistryErrors.RegistryUnauthorized.selector, caller));
        vm.prank(caller);
        workers.jail(alice, OFFENCE);
    }

    function testFuzz_jail_reverts_whenNotAWorker(address worker) public {
        vm.assume(worker != alice);
        _expectWrongStatus(worker, IWorkerRegistry.Status.None);
        _jail(worker);
    }

    function test_jail_reverts_whenJailedExitingOrBanned() public {
        _jail(alice);
        _expectWrongStatus(alice, IWorkerRegistry.Status.Jailed);
        _jail(alice);
        _exit();
        _expectWrongStatus(alice, IWorkerRegistry.Status.Exiting);
        _jail(alice);
        _ban();
        _expectWrongStatus(alice, IWorkerRegistry.Status.Banned);
        _jail(alice);
    }

    function testFuzz_jail_stopsAWorker(uint256 now_) public {
        vm.warp(bound(now_, 1, type(uint40).max));
        vm.expectEmit(address(workers));
        emit IWorkerRegistryEvents.WorkerJailed(alice, OFFENCE, block.timestamp + JAIL_TIME);
        _jail(alice);
        _assertStatus(alice, IWorkerRegistry.Status.Jailed, "jailed");
        assertFalse(workers.isActive(alice), "may not submit");
        assertEq(workers.workerOf(alice).jailedUntil, block.timestamp + JAIL_TIME, "until");
    }

    function testFuzz_jailForLowStake_doesNothing_forAnybodyElse(address account) public {
        workers.jailForLowStake(account);
        assertTrue(workers.isActive(alice), "alice has enough");
        assertFalse(workers.workerOf(account).status == IWorkerRegistry.Status.Jailed, "nobody is jailed");
    }

    function test_jailForLowStake_doesNothing_forWhoIsLeaving() public {
        _exit();
        workers.jailForLowStake(alice);
        _assertStatus(alice, IWorkerRegistry.Status.Exiting, "exiting");
        assertEq(workers.workerOf(alice).jailedUntil, 0, "no time to serve");
    }

    // ------------------------------------------------------------------- unjail

    function test_unjail_reverts_whenNotJailed() public {
        _expectWrongStatus(alice, IWorkerRegistry.Status.Active);
        vm.prank(alice);
        workers.unjail();
        _exit();
        _expectWrongStatus(alice, IWorkerRegistry.Status.Exiting);
        vm.prank(alice);
        workers.unjail();
    }

    function testFuzz_unjail_reverts_tooEarly(uint256 waited) public {
        waited = waited % 2 == 0 ? JAIL_TIME - 1 : bound(waited, 0, JAIL_TIME - 1);
        _jail(alice);
        uint256 until = block.timestamp + JAIL_TIME;
        vm.warp(block.timestamp + waited);
        vm.expectRevert(abi.encodeWithSelector(IWorkerRegistryErrors.RegistryStillJailed.selector, alice, until));
        vm.prank(alice);
        workers.unjail();
    }

    function testFuzz_unjail_reverts_untilStakeSuffices(uint256 missing) public {
        missing = bound(missing, 1, REQUIRED_STAKE);
        vm.prank(alice);
        vault.requestUnbond(missing);
        vm.warp(block.timestamp + JAIL_TIME);
        _expectStakeTooLow(REQUIRED_STAKE - missing);
        vm.prank(alice);
        workers.unjail();
        _deposit(alice, missing);
        vm.prank(alice);
        workers.unjail();
        _assertStatus(alice, IWorkerRegistry.Status.Active, "topped up");
    }

    function testFuzz_unjail_activatesAfterTheDelay(uint256 blocks) public {
        blocks = bound(blocks, 0, 10 * ACTIVATION_DELAY);
        _jail(alice);
        vm.warp(block.timestamp + JAIL_TIME);
        vm.expectEmit(address(workers));
        emit IWorkerRegistryEvents.WorkerUnjailed(alice, block.number + ACTIVATION_DELAY);
        vm.prank(alice);
        workers.unjail();
        vm.roll(block.number + blocks);
        assertEq(workers.isActive(alice), blocks >= ACTIVATION_DELAY, "active");
    }
}
