// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IStakeVaultErrors, IStakeVaultEvents} from "../../src/interfaces/IStakeVault.sol";
import {IWorkerRegistry, IWorkerRegistryEvents} from "../../src/interfaces/IWorkerRegistry.sol";
import {BaseTest} from "../BaseTest.sol";

contract StakeVaultUnbondTest is BaseTest {
    uint256 private constant STAKE = 10_000 ether;

    function setUp() public override {
        super.setUp();
        _deposit(stranger, STAKE);
    }

    function _unbond(uint256 amount) private {
        vm.prank(stranger);
        vault.requestUnbond(amount);
    }

    // ------------------------------------------------------------------- request

    function test_requestUnbond_reverts_whenZero() public {
        vm.expectRevert(IStakeVaultErrors.VaultZeroAmount.selector);
        _unbond(0);
    }

    function testFuzz_requestUnbond_reverts_aboveActiveStake(uint256 amount) public {
        amount = bound(amount, STAKE + 1, type(uint256).max);
        vm.expectRevert(
            abi.encodeWithSelector(IStakeVaultErrors.VaultInsufficientStake.selector, stranger, amount, STAKE)
        );
        _unbond(amount);
    }

    function testFuzz_requestUnbond_movesStake(uint256 amount) public {
        amount = bound(amount, 1, STAKE);
        vm.expectEmit(address(vault));
        emit IStakeVaultEvents.UnbondRequested(stranger, amount, amount, block.timestamp + UNBONDING_PERIOD);
        _unbond(amount);
        (uint256 active, uint256 unbonding) = _stake(stranger);
        assertEq(active, STAKE - amount, "active");
        assertEq(unbonding, amount, "unbonding");
        assertEq(vault.accountOf(stranger).withdrawableAt, block.timestamp + UNBONDING_PERIOD, "from");
    }

    function testFuzz_requestUnbond_restartsTheClock(uint256 first, uint256 second, uint256 later) public {
        first = bound(first, 1, STAKE - 1);
        second = bound(second, 1, STAKE - first);
        later = bound(later, 0, 2 * UNBONDING_PERIOD);
        _unbond(first);
        vm.warp(block.timestamp + later);
        _unbond(second);
        assertEq(vault.accountOf(stranger).unbonding, first + second, "one pending unbond");
        assertEq(vault.accountOf(stranger).withdrawableAt, block.timestamp + UNBONDING_PERIOD, "from the last request");
    }

    function testFuzz_requestUnbond_jailsAWorker_whenTooLittleStays(uint256 amount) public {
        _register(alice, aliceNode, aliceNodeKey, 2 * REQUIRED_STAKE);
        amount = bound(amount, REQUIRED_STAKE + 1, 2 * REQUIRED_STAKE);
        vm.expectEmit(address(workers));
        emit IWorkerRegistryEvents.WorkerJailed(alice, bytes32(0), block.timestamp + JAIL_TIME);
        vm.prank(alice);
        vault.requestUnbond(amount);
        assertFalse(workers.isActive(alice), "jailed at once");
    }

    function testFuzz_requestUnbond_keepsAWorkerActive_whenEnoughStays(uint256 amount) public {
        _register(alice, aliceNode, aliceNodeKey, 2 * REQUIRED_STAKE);
        amount = bound(amount, 1, REQUIRED_STAKE);
        vm.prank(alice);
        vault.requestUnbond(amount);
        assertTrue(workers.isActive(alice), "still active");
    }

    // --------------------------------------------------------------- request for

    function testFuzz_requestUnbondFor_reverts_whenNotTheRegistry(address caller) public {
        vm.assume(caller != address(workers));
        vm.expectRevert(abi.encodeWithSelector(IStakeVaultErrors.VaultUnauthorized.selector, caller));
        vm.prank(caller);
        vault.requestUnbondFor(stranger);
    }

    function test_requestUnbondFor_takesAll() public {
        vm.prank(address(workers));
        vault.requestUnbondFor(stranger);
        (uint256 active, uint256 unbonding) = _stake(stranger);
        assertEq(active, 0, "active");
        assertEq(unbonding, STAKE, "unbonding");
    }

    function test_requestUnbondFor_doesNothing_whenThereIsNoStake() public {
        vm.prank(address(workers));
        vault.requestUnbondFor(alice);
        assertEq(vault.accountOf(alice).withdrawableAt, 0, "no clock");
    }

    // ------------------------------------------------------------------ withdraw

    function test_withdraw_reverts_whenNothingIsUnbonding() public {
        vm.expectRevert(abi.encodeWithSelector(IStakeVaultErrors.VaultNotWithdrawable.selector, stranger, 0, 0));
        vm.prank(stranger);
        vault.withdraw();
    }

    function testFuzz_withdraw_reverts_tooEarly(uint256 amount, uint256 waited) public {
        amount = bound(amount, 1, STAKE);
        waited = bound(waited, 0, UNBONDING_PERIOD - 1);
        _unbond(amount);
        uint256 withdrawableAt = block.timestamp + UNBONDING_PERIOD;
        vm.warp(block.timestamp + waited);
        vm.expectRevert(
            abi.encodeWithSelector(IStakeVaultErrors.VaultNotWithdrawable.selector, stranger, amount, withdrawableAt)
        );
        vm.prank(stranger);
        vault.withdraw();
    }

    function testFuzz_withdraw_paysOut(uint256 amount, uint256 waited) public {
        amount = bound(amount, 1, STAKE);
        waited = bound(waited, UNBONDING_PERIOD, 100 * UNBONDING_PERIOD);
        _unbond(amount);
        vm.warp(block.timestamp + waited);
        vm.expectEmit(address(vault));
        emit IStakeVaultEvents.Withdrawn(stranger, amount);
        vm.prank(stranger);
        assertEq(vault.withdraw(), amount, "amount");
        assertEq(token.balanceOf(stranger), WALLET - STAKE + amount, "paid");
        (uint256 active, uint256 unbonding) = _stake(stranger);
        assertEq(active, STAKE - amount, "the rest stays");
        assertEq(unbonding, 0, "nothing pending");
    }

    function test_withdraw_works_forABannedWorker() public {
        _register(alice, aliceNode, aliceNodeKey, REQUIRED_STAKE);
        vm.prank(address(ledger));
        workers.convict(alice, "offence", true);
        vm.prank(alice);
        vault.requestUnbond(REQUIRED_STAKE);
        vm.warp(block.timestamp + UNBONDING_PERIOD);
        vm.prank(alice);
        vault.withdraw();
        assertEq(token.balanceOf(alice), WALLET, "all back");
        _assertStatus(alice, IWorkerRegistry.Status.Banned, "still banned");
    }
}
