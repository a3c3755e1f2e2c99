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
        vm.prank(address(court));
        workers.jail(worker, OFFENCE);
    }

    function _ban(bytes32 offence) private {
        vm.prank(address(ledger));
        workers.ban(alice, offence);
    }

    function _reinstate(bytes32 offence) private {
        vm.prank(address(court));
        workers.reinstate(alice, offence);
    }

    function _expectWrongStatus(address worker, IWorkerRegistry.Status status) private {
        vm.expectRevert(
            abi.encodeWithSelector(IWorkerRegistryErrors.RegistryWrongStatus.selector, worker, uint8(status))
        );
    }

    // --------------------------------------------------------------------- exit

    function testFuzz_exit_reverts_whenNotAWorker(address caller) public {
        vm.assume(caller != alice);
        _expectWrongStatus(caller, IWorkerRegistry.Status.None);
        vm.prank(caller);
        workers.exit();
    }

    function test_exit_reverts_twice() public {
        vm.startPrank(alice);
        workers.exit();
        _expectWrongStatus(alice, IWorkerRegistry.Status.Exiting);
        workers.exit();
    }

    function test_exit_reverts_whenBanned() public {
        _ban(OFFENCE);
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
        vm.prank(alice);
        workers.exit();
        (uint256 active, uint256 unbonding) = _stake(alice);
        assertEq(active, 0, "active");
        assertEq(unbonding, REQUIRED_STAKE + extra, "unbonding");
        assertFalse(workers.isActive(alice), "no more work");
    }

    function test_exit_worksWithoutStake() public {
        vm.prank(alice);
        vault.requestUnbond(REQUIRED_STAKE);
        vm.prank(alice);
        workers.exit();
        _assertStatus(alice, IWorkerRegistry.Status.Exiting, "exiting");
    }

    // --------------------------------------------------------------------- jail

    function testFuzz_jail_reverts_whenNotAJudge(address caller) public {
        vm.assume(caller != address(ledger) && caller != address(court));
        vm.expectRevert(abi.encodeWithSelector(IWorkerRegistryErrors.RegistryUnauthorized.selector, caller));
        vm.prank(caller);
        workers.jail(alice, OFFENCE);
    }

    function testFuzz_jail_reverts_whenNotActive(address worker) public {
        vm.assume(worker != alice);
        _expectWrongStatus(worker, IWorkerRegistry.Status.None);
        _jail(worker);
    }

    function test_jail_stopsAWorker() public {
        vm.expectEmit(address(workers));
        emit IWorkerRegistryEvents.WorkerJailed(alice, OFFENCE, block.timestamp + JAIL_TIME);
        _jail(alice);
        _assertStatus(alice, IWorkerRegistry.Status.Jailed, "jailed");
        assertEq(workers.workerOf(alice).jailedUntil, block.timestamp + JAIL_TIME, "until");
    }

    function testFuzz_jailForLowStake_doesNothing_forAnybodyElse(address account) public {
        workers.jailForLowStake(account);
        assertTrue(workers.isActive(alice), "alice has enough");
        assertFalse(workers.workerOf(account).status == IWorkerRegistry.Status.Jailed, "nobody is jailed");
    }

    // ------------------------------------------------------------------- unjail

    function test_unjail_reverts_whenNotJailed() public {
        _expectWrongStatus(alice, IWorkerRegistry.Status.Active);
        vm.prank(alice);
        workers.unjail();
    }

    function testFuzz_unjail_reverts_tooEarly(uint256 waited) public {
        waited = bound(waited, 0, JAIL_TIME - 1);
        _jail(alice);
        uint256 until = block.timestamp + JAIL_TIME;
        vm.warp(block.timestamp + waited);
        vm.expectRevert(abi.encodeWithSelector(IWorkerRegistryErrors.RegistryStillJailed.selector, alice, until));
        vm.prank(alice);
        workers.unjail();
    }

    function testFuzz_unjail_reverts_untilStakeSuffices(uint256 missing) public {
        missing = bound(missing, 1, REQUIRED_STAKE);
        vm.startPrank(alice);
        vault.requestUnbond(missing);
        vm.warp(block.timestamp + JAIL_TIME);
        vm.expectRevert(
            abi.encodeWithSelector(
                IWorkerRegistryErrors.RegistryStakeTooLow.selector, alice, REQUIRED_STAKE - missing, REQUIRED_STAKE
            )
        );
        workers.unjail();
        vault.deposit(alice, missing);
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

    // ---------------------------------------------------------------------- ban

    function testFuzz_ban_reverts_whenNotAJudge(address caller) public {
        vm.assume(caller != address(ledger) && caller != address(court));
        vm.expectRevert(abi.encodeWithSelector(IWorkerRegistryErrors.RegistryUnauthorized.selector, caller));
        vm.prank(caller);
        workers.ban(alice, OFFENCE);
    }

    function testFuzz_ban_reverts_whenNotAWorker(address account) public {
        vm.assume(account != alice);
        _expectWrongStatus(account, IWorkerRegistry.Status.None);
        vm.prank(address(ledger));
        workers.ban(account, OFFENCE);
    }

    function testFuzz_ban_excludesForGood(uint256 waited) public {
        waited = bound(waited, 0, 1000 days);
        vm.expectEmit(address(workers));
        emit IWorkerRegistryEvents.WorkerBanned(alice, OFFENCE);
        _ban(OFFENCE);
        vm.warp(block.timestamp + waited);
        _expectWrongStatus(alice, IWorkerRegistry.Status.Banned);
        vm.prank(alice);
        workers.unjail();
    }

    // ---------------------------------------------------------------- reinstate

    function testFuzz_reinstate_reverts_whenNotTheCourt(address caller) public {
        vm.assume(caller != address(court));
        _ban(OFFENCE);
        vm.expectRevert(abi.encodeWithSelector(IWorkerRegistryErrors.RegistryUnauthorized.selector, caller));
        vm.prank(caller);
        workers.reinstate(alice, OFFENCE);
    }

    function test_reinstate_reverts_whenNotBanned() public {
        _expectWrongStatus(alice, IWorkerRegistry.Status.Active);
        _reinstate(OFFENCE);
    }

    function test_reinstate_givesTheFormerStatusBack() public {
        _ban(OFFENCE);
        vm.expectEmit(address(workers));
        emit IWorkerRegistryEvents.WorkerReinstated(alice, OFFENCE);
        _reinstate(OFFENCE);
        assertTrue(workers.isActive(alice), "active, without a new delay");
    }

    function test_reinstate_keepsAnExitingWorkerExiting() public {
        vm.prank(alice);
        workers.exit();
        _ban(OFFENCE);
        _reinstate(OFFENCE);
        _assertStatus(alice, IWorkerRegistry.Status.Exiting, "exiting");
    }

    function test_reinstate_jails_whenStakeNoLongerSuffices() public {
        _ban(OFFENCE);
        vm.prank(alice);
        vault.requestUnbond(1);
        _reinstate(OFFENCE);
        _assertStatus(alice, IWorkerRegistry.Status.Jailed, "jailed");
    }

    function testFuzz_reinstate_waitsForTheLastOffence(uint256 offences) public {
        offences = bound(offences, 1, 20);
        for (uint256 i = 0; i < offences; ++i) {
            _ban(bytes32(i));
        }
        for (uint256 i = 0; i < offences; ++i) {
            _assertStatus(alice, IWorkerRegistry.Status.Banned, "an offence still stands");
            _reinstate(bytes32(i));
        }
        _assertStatus(alice, IWorkerRegistry.Status.Active, "none stands");
    }
}
