// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {stdError} from "forge-std/StdError.sol";

import {IStakeVaultErrors, IStakeVaultEvents} from "../../src/interfaces/IStakeVault.sol";
import {BaseTest} from "../BaseTest.sol";

contract StakeVaultHoldTest is BaseTest {
    uint256 private _withdrawableAt;

    /// @dev Alice's stake is leaving.
    function setUp() public override {
        super.setUp();
        _deposit(alice, 2 ether);
        vm.prank(alice);
        vault.requestUnbond(1 ether);
        _withdrawableAt = block.timestamp + UNBONDING_PERIOD;
    }

    function _hold(uint256 until) private {
        vm.prank(address(ledger));
        vault.hold(alice, until);
    }

    function _openCase() private {
        vm.prank(address(court));
        vault.openCase(alice);
    }

    function _closeCase() private {
        vm.prank(address(court));
        vault.closeCase(alice);
    }

    function _expectHeld(uint256 openCases, uint256 heldUntil) private {
        vm.expectRevert(abi.encodeWithSelector(IStakeVaultErrors.VaultStakeHeld.selector, alice, openCases, heldUntil));
        vm.prank(alice);
        vault.withdraw();
    }

    function _withdraw() private {
        vm.prank(alice);
        assertEq(vault.withdraw(), 1 ether, "all of it");
    }

    // ------------------------------------------------------------------ who may

    function testFuzz_hold_reverts_whenNotASlasher(address caller) public {
        vm.assume(caller != address(ledger) && caller != address(court) && caller != address(faults));
        vm.expectRevert(abi.encodeWithSelector(IStakeVaultErrors.VaultUnauthorized.selector, caller));
        vm.prank(caller);
        vault.hold(alice, type(uint64).max);
    }

    function testFuzz_cases_revert_whenNotTheCourt(address caller) public {
        vm.assume(caller != address(court));
        bytes memory expected = abi.encodeWithSelector(IStakeVaultErrors.VaultUnauthorized.selector, caller);
        vm.startPrank(caller);
        vm.expectRevert(expected);
        vault.openCase(alice);
        vm.expectRevert(expected);
        vault.closeCase(alice);
    }

    function test_closeCase_reverts_whenNoneIsOpen() public {
        vm.expectRevert(stdError.arithmeticError);
        _closeCase();
    }

    // ------------------------------------------------------------------- holding

    function testFuzz_hold_onlyEverExtends(uint256 first, uint256 second) public {
        first = bound(first, 1, type(uint64).max);
        second = bound(second, 0, first);
        vm.expectEmit(address(vault));
        emit IStakeVaultEvents.StakeHeld(alice, first, 0);
        _hold(first);
        vm.recordLogs();
        _hold(second);
        assertEq(vm.getRecordedLogs().length, 0, "nothing new, no event");
        assertEq(vault.accountOf(alice).heldUntil, first, "the later time");
    }

    function testFuzz_hold_letsEverySlasher(uint256 who) public {
        address[3] memory slashers = [address(ledger), address(court), address(faults)];
        vm.prank(slashers[who % 3]);
        vault.hold(alice, 77);
        assertEq(vault.accountOf(alice).heldUntil, 77, "held");
    }

    function testFuzz_withdraw_reverts_whileHeld(uint256 until, uint256 at) public {
        until = bound(until, _withdrawableAt + 1, _withdrawableAt + UNBONDING_PERIOD);
        // Often the last second of the hold.
        at = at % 2 == 0 ? until - 1 : bound(at, _withdrawableAt, until - 1);
        _hold(until);
        vm.warp(at);
        _expectHeld(0, until);
    }

    function testFuzz_withdraw_works_whenTheHoldEnds(uint256 until) public {
        until = bound(until, _withdrawableAt, _withdrawableAt + UNBONDING_PERIOD);
        _hold(until);
        vm.warp(until);
        _withdraw();
    }

    function testFuzz_withdraw_reverts_whileACaseIsOpen(uint256 cases, uint256 at) public {
        cases = bound(cases, 1, 20);
        at = at % 2 == 0
            ? _withdrawableAt + UNBONDING_PERIOD - 1
            : bound(at, _withdrawableAt, _withdrawableAt + UNBONDING_PERIOD - 1);
        for (uint256 i = 0; i < cases; ++i) {
            vm.expectEmit(address(vault));
            emit IStakeVaultEvents.StakeHeld(alice, 0, i + 1);
            _openCase();
        }
        vm.warp(at);
        _expectHeld(cases, 0);
    }

    function testFuzz_withdraw_works_whenTheLastCaseCloses(uint256 cases) public {
        cases = bound(cases, 1, 20);
        for (uint256 i = 0; i < cases; ++i) {
            _openCase();
        }
        vm.warp(_withdrawableAt);
        for (uint256 i = cases; i > 0; --i) {
            _expectHeld(i, 0);
            vm.expectEmit(address(vault));
            emit IStakeVaultEvents.StakeHeld(alice, 0, i - 1);
            _closeCase();
        }
        _withdraw();
    }

    function testFuzz_withdraw_reverts_whenTheCaseClosesButTheHoldLasts(uint256 until) public {
        until = bound(until, _withdrawableAt + 1, type(uint64).max);
        _openCase();
        _hold(until);
        _closeCase();
        vm.warp(_withdrawableAt);
        _expectHeld(0, until);
    }

    /// @dev Whatever holds stake back does so for one more unbonding period at most.
    function testFuzz_withdraw_works_oneUnbondingPeriodLater_whateverHolds(uint256 until, uint256 cases) public {
        until = bound(until, _withdrawableAt + UNBONDING_PERIOD + 1, type(uint64).max);
        cases = bound(cases, 0, 20);
        _hold(until);
        for (uint256 i = 0; i < cases; ++i) {
            _openCase();
        }
        vm.warp(_withdrawableAt + UNBONDING_PERIOD - 1);
        _expectHeld(cases, until);
        vm.warp(_withdrawableAt + UNBONDING_PERIOD);
        _withdraw();
    }

    function testFuzz_withdraw_reverts_tooEarly_whateverHoldEnded(uint256 until) public {
        until = bound(until, 1, _withdrawableAt - 1);
        _hold(until);
        vm.warp(_withdrawableAt - 1);
        vm.expectRevert(
            abi.encodeWithSelector(IStakeVaultErrors.VaultNotWithdrawable.selector, alice, 1 ether, _withdrawableAt)
        );
        vm.prank(alice);
        vault.withdraw();
    }

    /// @dev A later request restarts the clock, and with it the bound.
    function test_requestUnbond_restartsTheBoundOnHolds() public {
        _hold(type(uint64).max);
        vm.warp(_withdrawableAt);
        vm.prank(alice);
        vault.requestUnbond(1 ether);
        vm.warp(block.timestamp + 2 * UNBONDING_PERIOD - 1);
        _expectHeld(0, type(uint64).max);
        vm.warp(block.timestamp + 1);
        vm.prank(alice);
        assertEq(vault.withdraw(), 2 ether, "both");
    }

    function testFuzz_holds_spareOthers(uint256 until) public {
        _deposit(bob, 1 ether);
        vm.prank(bob);
        vault.requestUnbond(1 ether);
        _hold(bound(until, 1, type(uint64).max));
        _openCase();
        vm.warp(_withdrawableAt);
        vm.prank(bob);
        assertEq(vault.withdraw(), 1 ether, "bob");
    }

    /// @dev Held stake is slashable to the end.
    function testFuzz_slash_reachesHeldStake(uint256 at) public {
        _openCase();
        vm.warp(bound(at, _withdrawableAt, _withdrawableAt + UNBONDING_PERIOD - 1));
        vm.prank(address(faults));
        assertEq(vault.slash(alice, PPM, "offence", address(0)), 2 ether, "active and matured");
    }
}
