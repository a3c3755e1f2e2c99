// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IERC20Errors} from "@openzeppelin/contracts/interfaces/draft-IERC6093.sol";
import {SafeCast} from "@openzeppelin/contracts/utils/math/SafeCast.sol";

import {StakeVault} from "../../src/StakeVault.sol";
import {IStakeVault, IStakeVaultErrors, IStakeVaultEvents} from "../../src/interfaces/IStakeVault.sol";
import {BaseTest} from "../BaseTest.sol";

/// @title The vault's construction, and deposits of an account for a run
contract StakeVaultDepositTest is BaseTest {
    /// @dev The vault asks nobody whether a run exists.
    uint64 private constant RUN = 3;

    // -------------------------------------------------------------- construction

    function _newVault(address insurance_, uint256 unbonding, uint256 insuredPpm, uint256 rewardedPpm)
        private
        returns (StakeVault)
    {
        StakeVault.Network memory network =
            StakeVault.Network(runs, workers, jury, ledger, address(court), address(faults));
        return new StakeVault(token, network, insurance_, unbonding, insuredPpm, rewardedPpm, REPORTER_CAP);
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
        uint256 sum = insuredPpm + rewardedPpm;
        vm.expectRevert(abi.encodeWithSelector(IStakeVaultErrors.VaultInvalidShares.selector, sum));
        _newVault(insurance, UNBONDING_PERIOD, insuredPpm, rewardedPpm);
    }

    function testFuzz_constructor_reverts_whenInsuranceHasNoReceiver(uint256 insuredPpm) public {
        insuredPpm = bound(insuredPpm, 1, PPM);
        vm.expectRevert(abi.encodeWithSelector(IStakeVaultErrors.VaultInvalidShares.selector, insuredPpm));
        _newVault(address(0), UNBONDING_PERIOD, insuredPpm, 0);
    }

    function test_constructor_allowsNoInsurance_andTheShortestPeriod() public {
        StakeVault other = _newVault(address(0), JUDGED + 1, 0, PPM);
        assertEq(other.unbondingPeriod(), JUDGED + 1, "the shortest period");
        assertEq(other.insurance(), address(0), "no insurance");
    }

    function test_constructor_keepsItsParameters() public view {
        assertEq(address(vault.token()), address(token), "token");
        assertEq(vault.insurance(), insurance, "insurance");
        assertEq(vault.unbondingPeriod(), UNBONDING_PERIOD, "unbonding period");
        assertEq(vault.insurancePpm(), INSURANCE_PPM, "insured share");
        assertEq(vault.reporterPpm(), REPORTER_PPM, "reporter's share");
        assertEq(vault.reporterCap(), REPORTER_CAP, "reporter's cap");
    }

    function test_constructor_keepsItsNetwork() public view {
        assertEq(address(vault.runs()), address(runs), "run registry");
        assertEq(address(vault.workers()), address(workers), "worker registry");
        assertEq(address(vault.jurors()), address(jury), "jury pool");
        assertEq(vault.ledger(), address(ledger), "ledger");
        assertEq(vault.court(), address(court), "court");
        assertEq(vault.faults(), address(faults), "fault court");
    }

    // ------------------------------------------------------------------- deposit

    function testFuzz_deposit_reverts_whenZero(uint64 run) public {
        vm.expectRevert(IStakeVaultErrors.VaultZeroAmount.selector);
        _deposit(run, alice, 0);
    }

    function testFuzz_deposit_reverts_whenCallerHasTooLittle(uint256 amount) public {
        amount = bound(amount, WALLET + 1, type(uint88).max);
        vm.expectRevert(abi.encodeWithSelector(IERC20Errors.ERC20InsufficientBalance.selector, alice, WALLET, amount));
        _deposit(RUN, alice, amount);
    }

    function testFuzz_deposit_reverts_whenCallerAllowedTooLittle(uint256 allowed, uint256 amount) public {
        amount = bound(amount, 1, WALLET);
        allowed = bound(allowed, 0, amount - 1);
        vm.prank(alice);
        token.approve(address(vault), allowed);
        vm.expectRevert(
            abi.encodeWithSelector(IERC20Errors.ERC20InsufficientAllowance.selector, address(vault), allowed, amount)
        );
        _deposit(RUN, alice, amount);
    }

    function testFuzz_deposit_reverts_whenAnAccountWouldOutgrowItsSlot(uint256 first, uint256 amount) public {
        first = bound(first, 1, WALLET);
        amount = bound(amount, uint256(type(uint88).max) - first + 1, type(uint128).max);
        _deposit(RUN, alice, first);
        vm.expectRevert(abi.encodeWithSelector(SafeCast.SafeCastOverflowedUintDowncast.selector, 88, first + amount));
        _deposit(RUN, alice, amount);
    }

    /// @dev What is leaving counts, too: all of an account may be slashed into one escrow.
    function testFuzz_deposit_reverts_whenUnbondingStakeFillsTheEscrow(uint256 leaving, uint256 amount) public {
        leaving = bound(leaving, 1, WALLET);
        amount = bound(amount, uint256(type(uint88).max) - leaving + 1, type(uint88).max);
        _deposit(RUN, alice, leaving);
        vm.prank(alice);
        vault.requestUnbond(RUN, leaving);
        vm.expectRevert(abi.encodeWithSelector(SafeCast.SafeCastOverflowedUintDowncast.selector, 88, leaving + amount));
        _deposit(RUN, alice, amount);
    }

    function testFuzz_deposit_takesAsMuchAsAnAccountHolds(uint256 leaving) public {
        leaving = bound(leaving, 1, type(uint88).max - 1);
        deal(address(token), alice, type(uint88).max);
        _deposit(RUN, alice, leaving);
        vm.prank(alice);
        vault.requestUnbond(RUN, leaving);
        _deposit(RUN, alice, type(uint88).max - leaving);
        assertEq(vault.activeStake(RUN, alice), type(uint88).max - leaving, "to the last wei");
    }

    function testFuzz_deposit_addsToTheOwner(uint64 run, address owner_, uint256 first, uint256 second) public {
        first = bound(first, 1, WALLET - 1);
        second = bound(second, 1, WALLET - first);
        vm.startPrank(alice);
        vault.deposit(run, owner_, first);
        vm.expectEmit(address(vault));
        emit IStakeVaultEvents.Deposited(run, owner_, second, first + second);
        vault.deposit(run, owner_, second);
        vm.stopPrank();

        assertEq(vault.activeStake(run, owner_), first + second, "owner's stake");
        assertEq(token.balanceOf(alice), WALLET - first - second, "caller paid");
        assertEq(token.balanceOf(address(vault)), first + second, "vault holds it");
        assertEq(vault.accountOf(run, owner_).unbonding, 0, "nothing leaves");
    }

    function testFuzz_deposit_staysInItsRun(uint64 run, uint64 other, uint256 amount) public {
        vm.assume(run != other);
        amount = bound(amount, 1, WALLET);
        _deposit(run, alice, amount);
        assertEq(vault.activeStake(run, alice), amount, "where its owner put it");
        assertEq(vault.activeStake(other, alice), 0, "and nowhere else");
    }

    function testFuzz_deposit_forAnother_staysOutOfTheCallersReach(uint256 amount) public {
        amount = bound(amount, 1, WALLET);
        vm.startPrank(stranger);
        vault.deposit(RUN, alice, amount);
        vm.expectRevert(
            abi.encodeWithSelector(IStakeVaultErrors.VaultInsufficientStake.selector, RUN, stranger, amount, 0)
        );
        vault.requestUnbond(RUN, amount);
    }

    // -------------------------------------------------------------- deposit from

    function _registries() private view returns (address[3] memory) {
        return [address(workers), address(runs), address(jury)];
    }

    function testFuzz_depositFrom_reverts_whenNotARegistry(address caller) public {
        vm.assume(caller != address(workers) && caller != address(runs) && caller != address(jury));
        vm.expectRevert(abi.encodeWithSelector(IStakeVaultErrors.VaultUnauthorized.selector, caller));
        vm.prank(caller);
        vault.depositFrom(RUN, alice, 1);
    }

    function test_depositFrom_reverts_forTheOtherContracts() public {
        address[3] memory others = [address(ledger), address(court), address(faults)];
        for (uint256 i = 0; i < 3; ++i) {
            vm.expectRevert(abi.encodeWithSelector(IStakeVaultErrors.VaultUnauthorized.selector, others[i]));
            vm.prank(others[i]);
            vault.depositFrom(RUN, alice, 1);
        }
    }

    function test_depositFrom_reverts_whenZero() public {
        vm.expectRevert(IStakeVaultErrors.VaultZeroAmount.selector);
        vm.prank(address(workers));
        vault.depositFrom(RUN, alice, 0);
    }

    function testFuzz_depositFrom_takesTheOwnersTokens(uint256 registry, uint256 amount) public {
        amount = bound(amount, 1, WALLET);
        vm.expectEmit(address(vault));
        emit IStakeVaultEvents.Deposited(RUN, alice, amount, amount);
        vm.prank(_registries()[registry % 3]);
        vault.depositFrom(RUN, alice, amount);
        assertEq(vault.activeStake(RUN, alice), amount, "stake");
        assertEq(token.balanceOf(alice), WALLET - amount, "paid by the owner");
    }

    // -------------------------------------------------------------------- names

    function testFuzz_escrowIdOf_isTheHashOfWhatIsPunished(uint64 run, address account, uint8 kind, uint64 tag)
        public
        view
    {
        IStakeVault.Offence offence = IStakeVault.Offence(bound(kind, 0, uint256(type(IStakeVault.Offence).max)));
        bytes32 name = keccak256(abi.encode(run, account, uint256(offence), tag));
        assertEq(vault.escrowIdOf(run, account, offence, tag), name, "name");
    }
}
