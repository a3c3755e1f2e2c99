// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IERC20Errors} from "@openzeppelin/contracts/interfaces/draft-IERC6093.sol";
import {SafeCast} from "@openzeppelin/contracts/utils/math/SafeCast.sol";

import {StakeVault} from "../../src/StakeVault.sol";
import {IStakeVaultErrors, IStakeVaultEvents} from "../../src/interfaces/IStakeVault.sol";
import {BaseTest} from "../BaseTest.sol";

contract StakeVaultDepositTest is BaseTest {
    // -------------------------------------------------------------- construction

    function _newVault(address insurance_, uint256 unbonding, uint256 insuredPpm, uint256 rewardedPpm) private {
        new StakeVault(
            token, workers, ledger, court, address(faults), insurance_, unbonding, insuredPpm, rewardedPpm, REPORTER_CAP
        );
    }

    function testFuzz_constructor_reverts_whenStakeCouldLeaveUnjudged(uint256 unbonding) public {
        // Often the longest period that is too short.
        unbonding = unbonding % 2 == 0 ? JUDGED : bound(unbonding, 0, JUDGED);
        vm.expectRevert(abi.encodeWithSelector(IStakeVaultErrors.VaultUnbondingTooShort.selector, unbonding, JUDGED));
        _newVault(insurance, unbonding, INSURANCE_PPM, REPORTER_PPM);
    }

    function testFuzz_constructor_reverts_whenSharesExceedTheWhole(uint256 insuredPpm, uint256 rewardedPpm) public {
        insuredPpm = bound(insuredPpm, 0, 10 * PPM);
        rewardedPpm = bound(rewardedPpm, insuredPpm > PPM ? 0 : PPM - insuredPpm + 1, 20 * PPM);
        vm.expectRevert(abi.encodeWithSelector(IStakeVaultErrors.VaultInvalidShares.selector, insuredPpm + rewardedPpm));
        _newVault(insurance, UNBONDING_PERIOD, insuredPpm, rewardedPpm);
    }

    function testFuzz_constructor_reverts_whenInsuranceHasNoReceiver(uint256 insuredPpm) public {
        insuredPpm = bound(insuredPpm, 1, PPM);
        vm.expectRevert(abi.encodeWithSelector(IStakeVaultErrors.VaultInvalidShares.selector, insuredPpm));
        _newVault(address(0), UNBONDING_PERIOD, insuredPpm, 0);
    }

    function test_constructor_allowsNoInsurance_andTheShortestPeriod() public {
        _newVault(address(0), JUDGED + 1, 0, PPM);
    }

    function test_constructor_keepsItsParameters() public view {
        assertEq(address(vault.token()), address(token), "token");
        assertEq(address(vault.workers()), address(workers), "workers");
        assertEq(address(vault.ledger()), address(ledger), "ledger");
        assertEq(address(vault.court()), address(court), "court");
        assertEq(vault.faults(), address(faults), "fault court");
        assertEq(vault.insurance(), insurance, "insurance");
        assertEq(vault.unbondingPeriod(), UNBONDING_PERIOD, "unbonding period");
        assertEq(vault.insurancePpm(), INSURANCE_PPM, "insured share");
        assertEq(vault.reporterPpm(), REPORTER_PPM, "reporter's share");
        assertEq(vault.reporterCap(), REPORTER_CAP, "reporter's cap");
    }

    // ------------------------------------------------------------------- deposit

    function test_deposit_reverts_whenZero() public {
        vm.expectRevert(IStakeVaultErrors.VaultZeroAmount.selector);
        vm.prank(alice);
        vault.deposit(alice, 0);
    }

    function testFuzz_deposit_reverts_whenCallerHasTooLittle(uint256 amount) public {
        amount = bound(amount, WALLET + 1, type(uint88).max);
        vm.expectRevert(abi.encodeWithSelector(IERC20Errors.ERC20InsufficientBalance.selector, alice, WALLET, amount));
        vm.prank(alice);
        vault.deposit(alice, amount);
    }

    function testFuzz_deposit_reverts_whenAnAccountWouldOutgrowItsEscrow(uint256 amount) public {
        amount = bound(amount, uint256(type(uint88).max) + 1, type(uint128).max);
        vm.expectRevert(abi.encodeWithSelector(SafeCast.SafeCastOverflowedUintDowncast.selector, 88, amount));
        vm.prank(alice);
        vault.deposit(alice, amount);
    }

    /// @dev What is leaving counts, too: all of an account may be slashed into one escrow.
    function testFuzz_deposit_reverts_whenUnbondingStakeFillsTheEscrow(uint256 leaving, uint256 amount) public {
        leaving = bound(leaving, 1, WALLET);
        amount = bound(amount, uint256(type(uint88).max) - leaving + 1, type(uint88).max);
        _deposit(alice, leaving);
        vm.prank(alice);
        vault.requestUnbond(leaving);
        vm.expectRevert(abi.encodeWithSelector(SafeCast.SafeCastOverflowedUintDowncast.selector, 88, leaving + amount));
        vm.prank(alice);
        vault.deposit(alice, amount);
    }

    function test_deposit_takesAsMuchAsAnEscrowHolds() public {
        vm.prank(deployer);
        token.approve(address(vault), type(uint256).max);
        vm.prank(deployer);
        vault.deposit(alice, type(uint88).max);
        assertEq(vault.activeStake(alice), type(uint88).max, "to the last wei");
    }

    function testFuzz_deposit_addsToTheOwner(address owner_, uint256 first, uint256 second) public {
        first = bound(first, 1, WALLET - 1);
        second = bound(second, 1, WALLET - first);
        vm.startPrank(alice);
        vault.deposit(owner_, first);
        vm.expectEmit(address(vault));
        emit IStakeVaultEvents.Deposited(owner_, second, first + second);
        vault.deposit(owner_, second);
        vm.stopPrank();

        assertEq(vault.activeStake(owner_), first + second, "owner's stake");
        assertEq(token.balanceOf(alice), WALLET - first - second, "caller paid");
        assertEq(token.balanceOf(address(vault)), first + second, "vault holds it");
        assertEq(vault.accountOf(owner_).unbonding, 0, "nothing leaves");
    }

    // ------------------------------------------------------- deposit with permit

    function testFuzz_depositWithPermit_reverts_whenPermitIsForged(uint256 amount) public {
        amount = bound(amount, 1, WALLET);
        vm.prank(alice);
        token.approve(address(vault), 0);
        (uint8 v, bytes32 r, bytes32 s) = _signPermit(alice, bobKey, address(vault), amount, block.timestamp);
        vm.expectRevert(
            abi.encodeWithSelector(IERC20Errors.ERC20InsufficientAllowance.selector, address(vault), 0, amount)
        );
        vm.prank(alice);
        vault.depositWithPermit(amount, block.timestamp, v, r, s);
    }

    function testFuzz_depositWithPermit_deposits(uint256 amount) public {
        amount = bound(amount, 1, WALLET);
        vm.prank(alice);
        token.approve(address(vault), 0);
        (uint8 v, bytes32 r, bytes32 s) = _signPermit(alice, aliceKey, address(vault), amount, block.timestamp);
        vm.prank(alice);
        vault.depositWithPermit(amount, block.timestamp, v, r, s);
        assertEq(vault.activeStake(alice), amount, "stake");
    }

    function testFuzz_depositWithPermit_deposits_whenPermitWasFrontRun(uint256 amount) public {
        amount = bound(amount, 1, WALLET);
        vm.prank(alice);
        token.approve(address(vault), 0);
        (uint8 v, bytes32 r, bytes32 s) = _signPermit(alice, aliceKey, address(vault), amount, block.timestamp);
        vm.prank(stranger);
        token.permit(alice, address(vault), amount, block.timestamp, v, r, s);
        vm.prank(alice);
        vault.depositWithPermit(amount, block.timestamp, v, r, s);
        assertEq(vault.activeStake(alice), amount, "stake");
    }

    // -------------------------------------------------------------- deposit from

    function testFuzz_depositFrom_reverts_whenNotTheRegistry(address caller) public {
        vm.assume(caller != address(workers));
        vm.expectRevert(abi.encodeWithSelector(IStakeVaultErrors.VaultUnauthorized.selector, caller));
        vm.prank(caller);
        vault.depositFrom(alice, 1);
    }

    function testFuzz_depositFrom_takesTheWorkersTokens(uint256 amount) public {
        amount = bound(amount, 1, WALLET);
        vm.prank(address(workers));
        vault.depositFrom(alice, amount);
        assertEq(vault.activeStake(alice), amount, "stake");
        assertEq(token.balanceOf(alice), WALLET - amount, "paid by the worker");
    }
}
