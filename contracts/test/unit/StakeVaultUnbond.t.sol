// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IJuryPoolEvents} from "../../src/interfaces/IJuryPool.sol";
import {IRunRegistryEvents} from "../../src/interfaces/IRunRegistry.sol";
import {IStakeVaultErrors, IStakeVaultEvents} from "../../src/interfaces/IStakeVault.sol";
import {IWorkerRegistry, IWorkerRegistryEvents} from "../../src/interfaces/IWorkerRegistry.sol";
import {VaultTest} from "../VaultTest.sol";

/// @title How stake leaves a run
contract StakeVaultUnbondTest is VaultTest {
    uint64 private constant BENCH = 0;
    uint256 private constant STAKE = 10_000 ether;

    function setUp() public override {
        super.setUp();
        _deposit(runId, stranger, STAKE);
    }

    function _unbond(uint256 amount) private {
        _unbondOf(stranger, amount);
    }

    function _unbondOf(address account, uint256 amount) private {
        vm.prank(account);
        vault.requestUnbond(runId, amount);
    }

    function _withdraw(address account) private returns (uint256) {
        vm.prank(account);
        return vault.withdraw(runId);
    }

    function _withdrawableAt(address account) private view returns (uint256) {
        return vault.accountOf(runId, account).withdrawableAt;
    }

    // ------------------------------------------------------------------- request

    function test_requestUnbond_reverts_whenZero() public {
        vm.expectRevert(IStakeVaultErrors.VaultZeroAmount.selector);
        _unbond(0);
    }

    function testFuzz_requestUnbond_reverts_aboveActiveStake(uint256 amount) public {
        amount = bound(amount, STAKE + 1, type(uint256).max);
        vm.expectRevert(
            abi.encodeWithSelector(IStakeVaultErrors.VaultInsufficientStake.selector, runId, stranger, amount, STAKE)
        );
        _unbond(amount);
    }

    function testFuzz_requestUnbond_reverts_whenTheStakeIsForAnotherRun(uint64 other, uint256 amount) public {
        vm.assume(other != runId);
        amount = bound(amount, 1, STAKE);
        vm.expectRevert(
            abi.encodeWithSelector(IStakeVaultErrors.VaultInsufficientStake.selector, other, stranger, amount, 0)
        );
        vm.prank(stranger);
        vault.requestUnbond(other, amount);
    }

    function testFuzz_requestUnbond_movesStake(uint256 amount) public {
        amount = bound(amount, 1, STAKE);
        vm.expectEmit(address(vault));
        emit IStakeVaultEvents.UnbondRequested(runId, stranger, amount, amount, block.timestamp + UNBONDING_PERIOD);
        _unbond(amount);
        (uint256 active, uint256 unbonding) = _stake(stranger);
        assertEq(active, STAKE - amount, "active");
        assertEq(unbonding, amount, "unbonding");
        assertEq(_withdrawableAt(stranger), block.timestamp + UNBONDING_PERIOD, "from");
    }

    function testFuzz_requestUnbond_restartsTheClock(uint256 first, uint256 second, uint256 later) public {
        first = bound(first, 1, STAKE - 1);
        second = bound(second, 1, STAKE - first);
        later = bound(later, 0, 2 * UNBONDING_PERIOD);
        _unbond(first);
        vm.warp(block.timestamp + later);
        _unbond(second);
        assertEq(vault.accountOf(runId, stranger).unbonding, first + second, "one pending unbond");
        assertEq(_withdrawableAt(stranger), block.timestamp + UNBONDING_PERIOD, "from the last request");
    }

    function testFuzz_requestUnbond_keepsTheClockOfOtherRuns(uint256 later) public {
        later = bound(later, 1, UNBONDING_PERIOD);
        _deposit(runId + 1, stranger, 1 ether);
        _unbond(STAKE);
        uint256 withdrawableAt = _withdrawableAt(stranger);
        vm.warp(block.timestamp + later);
        vm.prank(stranger);
        vault.requestUnbond(runId + 1, 1 ether);
        assertEq(_withdrawableAt(stranger), withdrawableAt, "as it was");
    }

    // ----------------------------------------------------- requests end a role

    function testFuzz_requestUnbond_jailsAWorker_whenTooLittleStays(uint256 amount) public {
        _join(runId, alice, aliceNode, aliceNodeKey, 2 * REQUIRED_STAKE);
        amount = bound(amount, REQUIRED_STAKE + 1, 2 * REQUIRED_STAKE);
        vm.expectEmit(address(workers));
        emit IWorkerRegistryEvents.WorkerJailed(runId, alice, bytes32(0), block.timestamp + JAIL_TIME);
        _unbondOf(alice, amount);
        assertFalse(workers.isActive(runId, alice), "jailed at once");
    }

    function testFuzz_requestUnbond_keepsAWorkerActive_whenEnoughStays(uint256 amount) public {
        _join(runId, alice, aliceNode, aliceNodeKey, 2 * REQUIRED_STAKE);
        amount = bound(amount, 1, REQUIRED_STAKE);
        _unbondOf(alice, amount);
        assertTrue(workers.isActive(runId, alice), "still active");
    }

    function test_requestUnbond_keepsAWorkerActive_inItsOtherRuns() public {
        uint64 other = _createRun();
        _join(runId, alice, aliceNode, aliceNodeKey, REQUIRED_STAKE);
        _join(other, alice, address(0), 0, REQUIRED_STAKE);
        _unbondOf(alice, REQUIRED_STAKE);
        assertFalse(workers.isActive(runId, alice), "jailed where its stake leaves");
        assertTrue(workers.isActive(other, alice), "and only there");
    }

    function testFuzz_requestUnbond_unseatsAValidator_whenTooLittleStays(uint256 amount) public {
        _deposit(runId, validators[0], REQUIRED_VALIDATOR_STAKE);
        amount = bound(amount, REQUIRED_VALIDATOR_STAKE + 1, 2 * REQUIRED_VALIDATOR_STAKE);
        vm.expectEmit(address(runs));
        emit IRunRegistryEvents.ValidatorUnseated(runId, validators[0]);
        _unbondOf(validators[0], amount);
        assertFalse(runs.isValidator(runId, validators[0]), "unseated at once");
    }

    function testFuzz_requestUnbond_keepsAValidator_whenEnoughStays(uint256 amount) public {
        _deposit(runId, validators[0], REQUIRED_VALIDATOR_STAKE);
        amount = bound(amount, 1, REQUIRED_VALIDATOR_STAKE);
        _unbondOf(validators[0], amount);
        assertTrue(runs.isValidator(runId, validators[0]), "still seated");
    }

    function testFuzz_requestUnbond_retiresAJuror_whenTooLittleStays(uint256 amount) public {
        _fillBench();
        amount = bound(amount, 1, REQUIRED_JUROR_STAKE);
        vm.expectEmit(address(jury));
        emit IJuryPoolEvents.JurorLeft(jurors[2], 2);
        vm.prank(jurors[2]);
        vault.requestUnbond(BENCH, amount);
        assertFalse(jury.isJuror(jurors[2]), "retired at once");
    }

    function testFuzz_requestUnbond_keepsAJuror_whenEnoughStays(uint256 amount) public {
        _fillBench();
        amount = bound(amount, 1, WALLET - REQUIRED_JUROR_STAKE);
        _deposit(BENCH, jurors[2], amount);
        vm.prank(jurors[2]);
        vault.requestUnbond(BENCH, amount);
        assertTrue(jury.isJuror(jurors[2]), "still on the bench");
    }

    function test_requestUnbond_keepsAJuror_whenStakeForARunLeaves() public {
        _fillBench();
        _deposit(runId, jurors[2], STAKE);
        _unbondOf(jurors[2], STAKE);
        assertTrue(jury.isJuror(jurors[2]), "the bench is another run");
    }

    // --------------------------------------------------------------- request for

    function testFuzz_requestUnbondFor_reverts_whenNotARegistry(address caller) public {
        vm.assume(caller != address(workers) && caller != address(runs) && caller != address(jury));
        vm.expectRevert(abi.encodeWithSelector(IStakeVaultErrors.VaultUnauthorized.selector, caller));
        vm.prank(caller);
        vault.requestUnbondFor(runId, stranger);
    }

    function testFuzz_requestUnbondFor_takesAll(uint256 registry, uint256 leaving) public {
        leaving = bound(leaving, 1, STAKE - 1);
        _unbond(leaving);
        vm.expectEmit(address(vault));
        emit IStakeVaultEvents.UnbondRequested(
            runId, stranger, STAKE - leaving, STAKE, block.timestamp + UNBONDING_PERIOD
        );
        vm.prank([address(workers), address(runs), address(jury)][registry % 3]);
        vault.requestUnbondFor(runId, stranger);
        (uint256 active, uint256 unbonding) = _stake(stranger);
        assertEq(active, 0, "active");
        assertEq(unbonding, STAKE, "unbonding");
    }

    function test_requestUnbondFor_doesNothing_whenThereIsNoStake() public {
        vm.prank(address(workers));
        vault.requestUnbondFor(runId, alice);
        assertEq(_withdrawableAt(alice), 0, "no clock");
    }

    function test_requestUnbondFor_keepsTheClock_whenAllIsLeaving() public {
        _unbond(STAKE);
        uint256 withdrawableAt = _withdrawableAt(stranger);
        vm.warp(block.timestamp + 1);
        vm.prank(address(workers));
        vault.requestUnbondFor(runId, stranger);
        assertEq(_withdrawableAt(stranger), withdrawableAt, "as it was");
    }

    // ------------------------------------------------------------------ withdraw

    function _expectNotWithdrawable(uint256 unbonding, uint256 withdrawableAt) private {
        vm.expectRevert(
            abi.encodeWithSelector(
                IStakeVaultErrors.VaultNotWithdrawable.selector, runId, stranger, unbonding, withdrawableAt
            )
        );
    }

    function test_withdraw_reverts_whenNothingIsUnbonding() public {
        _expectNotWithdrawable(0, 0);
        _withdraw(stranger);
    }

    function testFuzz_withdraw_reverts_tooEarly(uint256 amount, uint256 waited) public {
        amount = bound(amount, 1, STAKE);
        waited = bound(waited, 0, UNBONDING_PERIOD - 1);
        _unbond(amount);
        uint256 withdrawableAt = block.timestamp + UNBONDING_PERIOD;
        vm.warp(block.timestamp + waited);
        _expectNotWithdrawable(amount, withdrawableAt);
        _withdraw(stranger);
    }

    function testFuzz_withdraw_reverts_twice(uint256 amount) public {
        amount = bound(amount, 1, STAKE);
        _unbond(amount);
        vm.warp(block.timestamp + UNBONDING_PERIOD);
        _withdraw(stranger);
        _expectNotWithdrawable(0, 0);
        _withdraw(stranger);
    }

    function testFuzz_withdraw_paysOut(uint256 amount, uint256 waited) public {
        amount = bound(amount, 1, STAKE);
        waited = bound(waited, UNBONDING_PERIOD, 100 * UNBONDING_PERIOD);
        _unbond(amount);
        vm.warp(block.timestamp + waited);
        vm.expectEmit(address(vault));
        emit IStakeVaultEvents.Withdrawn(runId, stranger, amount);
        assertEq(_withdraw(stranger), amount, "amount");
        assertEq(token.balanceOf(stranger), WALLET - STAKE + amount, "paid");
        (uint256 active, uint256 unbonding) = _stake(stranger);
        assertEq(active, STAKE - amount, "the rest stays");
        assertEq(unbonding, 0, "nothing pending");
    }

    function testFuzz_withdraw_paysOutOfOneRunOnly(uint256 amount) public {
        amount = bound(amount, 1, WALLET - STAKE);
        _deposit(runId + 1, stranger, amount);
        _unbond(STAKE);
        vm.prank(stranger);
        vault.requestUnbond(runId + 1, amount);
        vm.warp(block.timestamp + UNBONDING_PERIOD);
        assertEq(_withdraw(stranger), STAKE, "of this run");
        assertEq(vault.accountOf(runId + 1, stranger).unbonding, amount, "the other's stays");
    }

    function test_withdraw_works_forABannedWorker() public {
        _join(runId, alice, aliceNode, aliceNodeKey, REQUIRED_STAKE);
        vm.prank(address(ledger));
        workers.convict(runId, alice, "offence", true);
        _unbondOf(alice, REQUIRED_STAKE);
        vm.warp(block.timestamp + UNBONDING_PERIOD);
        _withdraw(alice);
        assertEq(token.balanceOf(alice), WALLET, "all back");
        _assertStatus(alice, IWorkerRegistry.Status.Banned, "still banned");
    }

    /// @dev No undecided conviction keeps what it did not take.
    function testFuzz_withdraw_works_whileAnEscrowIsHeld(uint256 ppm) public {
        ppm = bound(ppm, 0, PPM - 1);
        _unbond(STAKE);
        uint256 taken = _hold(stranger, 1, ppm);
        vm.warp(block.timestamp + UNBONDING_PERIOD);
        assertEq(_withdraw(stranger), STAKE - taken, "the rest, on time");
        assertEq(_heldOf(stranger), 1, "while the escrow is held");
    }

    /// @dev What comes back after a withdrawal is active, and must be unbonded like any other stake.
    function testFuzz_withdraw_reverts_whenOnlyRestoredStakeIsThere(uint256 ppm) public {
        ppm = bound(ppm, 1, PPM - 1);
        _unbond(STAKE);
        uint256 taken = _hold(stranger, 1, ppm);
        vm.warp(block.timestamp + UNBONDING_PERIOD);
        _withdraw(stranger);
        _restore(stranger, 1);
        assertEq(vault.activeStake(runId, stranger), taken, "active");
        _expectNotWithdrawable(0, 0);
        _withdraw(stranger);
    }
}
