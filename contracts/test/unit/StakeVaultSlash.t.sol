// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {Math} from "@openzeppelin/contracts/utils/math/Math.sol";

import {IStakeVault, IStakeVaultErrors, IStakeVaultEvents} from "../../src/interfaces/IStakeVault.sol";
import {IWorkerRegistry} from "../../src/interfaces/IWorkerRegistry.sol";
import {BaseTest} from "../BaseTest.sol";

contract StakeVaultSlashTest is BaseTest {
    bytes32 private constant OFFENCE = keccak256("offence");

    /// @dev Gives Alice `active` and `unbonding` stake. Both at least 1.
    function _give(uint256 active, uint256 unbonding) private {
        _deposit(alice, active + unbonding);
        vm.prank(alice);
        vault.requestUnbond(unbonding);
    }

    function _boundStake(uint256 active, uint256 unbonding) private pure returns (uint256, uint256) {
        active = bound(active, 1, WALLET - 1);
        return (active, bound(unbonding, 1, WALLET - active));
    }

    function _slash(uint256 ppm, bytes32 offence, address reporter) private returns (uint256) {
        vm.prank(address(ledger));
        return vault.slash(alice, ppm, offence, reporter);
    }

    // -------------------------------------------------------------------- slash

    function testFuzz_slash_reverts_whenNotASlasher(address caller) public {
        vm.assume(caller != address(ledger) && caller != address(court) && caller != address(faults));
        vm.expectRevert(abi.encodeWithSelector(IStakeVaultErrors.VaultUnauthorized.selector, caller));
        vm.prank(caller);
        vault.slash(alice, PPM, OFFENCE, caller);
    }

    function testFuzz_slash_reverts_aboveTheWhole(uint256 ppm) public {
        ppm = bound(ppm, PPM + 1, type(uint256).max);
        vm.expectRevert(abi.encodeWithSelector(IStakeVaultErrors.VaultInvalidShares.selector, ppm));
        _slash(ppm, OFFENCE, address(0));
    }

    function testFuzz_slash_reverts_whenOffenceWasSlashed(uint256 ppm) public {
        ppm = bound(ppm, 0, PPM);
        _deposit(alice, 1 ether);
        _slash(ppm, OFFENCE, address(0));
        vm.expectRevert(abi.encodeWithSelector(IStakeVaultErrors.VaultOffenceSettled.selector, OFFENCE));
        _slash(ppm, OFFENCE, address(0));
    }

    function testFuzz_slash_takesTheSameShareOfBoth_roundedUp(uint256 active, uint256 unbonding, uint256 ppm) public {
        (active, unbonding) = _boundStake(active, unbonding);
        ppm = bound(ppm, 0, PPM);
        _give(active, unbonding);
        uint256 fromActive = (active * ppm + PPM - 1) / PPM;
        uint256 fromUnbonding = (unbonding * ppm + PPM - 1) / PPM;

        vm.expectEmit(address(vault));
        emit IStakeVaultEvents.Slashed(alice, OFFENCE, fromActive, fromUnbonding, challenger);
        assertEq(_slash(ppm, OFFENCE, challenger), fromActive + fromUnbonding, "amount");

        (uint256 activeLeft, uint256 unbondingLeft) = _stake(alice);
        assertEq(activeLeft, active - fromActive, "active left");
        assertEq(unbondingLeft, unbonding - fromUnbonding, "unbonding left");
        IStakeVault.Escrow memory escrow = vault.escrowOf(OFFENCE);
        assertEq(escrow.owner, alice, "escrow's owner");
        assertEq(escrow.reporter, challenger, "escrow's reporter");
        assertEq(escrow.amount, fromActive + fromUnbonding, "escrow's amount");
        assertEq(uint8(escrow.status), uint8(IStakeVault.EscrowStatus.Held), "held");
    }

    function testFuzz_slash_movesNoTokens_andKeepsTheTotal(uint256 active, uint256 unbonding, uint256 ppm) public {
        (active, unbonding) = _boundStake(active, unbonding);
        ppm = bound(ppm, 0, PPM);
        _give(active, unbonding);
        uint256 amount = _slash(ppm, OFFENCE, address(0));
        (uint256 activeLeft, uint256 unbondingLeft) = _stake(alice);
        assertLe(amount, active + unbonding, "never more than there is");
        assertEq(activeLeft + unbondingLeft + vault.escrowOf(OFFENCE).amount, active + unbonding, "sum");
        assertEq(token.balanceOf(address(vault)), active + unbonding, "balance");
    }

    function testFuzz_slash_reachesMaturedUnbonding(uint256 unbonding, uint256 waited) public {
        unbonding = bound(unbonding, 1, WALLET - 1);
        waited = bound(waited, UNBONDING_PERIOD, 100 * UNBONDING_PERIOD);
        _give(1, unbonding);
        vm.warp(block.timestamp + waited);
        _slash(PPM, OFFENCE, address(0));
        vm.expectPartialRevert(IStakeVaultErrors.VaultNotWithdrawable.selector);
        vm.prank(alice);
        vault.withdraw();
    }

    function testFuzz_slash_sparesOthers(uint256 ppm) public {
        ppm = bound(ppm, 0, PPM);
        _give(5 ether, 5 ether);
        _deposit(bob, 7 ether);
        _slash(ppm, OFFENCE, address(0));
        assertEq(vault.activeStake(bob), 7 ether, "bob");
    }

    function testFuzz_slash_jailsAWorker_whenTooLittleStays(uint256 ppm) public {
        _register(alice, aliceNode, aliceNodeKey, 2 * REQUIRED_STAKE);
        ppm = bound(ppm, 0, PPM);
        _slash(ppm, OFFENCE, address(0));
        assertEq(workers.isActive(alice), ppm <= PPM / 2, "active exactly while half or more is left");
    }

    function test_slash_filesTheOffence_whenThereIsNoStake() public {
        assertEq(_slash(PPM, OFFENCE, address(0)), 0, "nothing to take");
        assertEq(vault.escrowOf(OFFENCE).owner, alice, "filed");
        assertEq(uint8(vault.escrowOf(OFFENCE).status), uint8(IStakeVault.EscrowStatus.Held), "held");
    }

    function testFuzz_slash_letsEverySlasher(uint256 who) public {
        address[3] memory slashers = [address(ledger), address(court), address(faults)];
        _deposit(alice, 1 ether);
        vm.prank(slashers[who % 3]);
        assertEq(vault.slash(alice, PPM / 2, OFFENCE, address(0)), 0.5 ether, "half");
    }

    /// @dev A second offence takes its share of what the first one left.
    function testFuzz_slash_twice_neverTakesMoreThanThereIs(uint256 stake, uint256 first, uint256 second) public {
        stake = bound(stake, 1, WALLET);
        _deposit(alice, stake);
        uint256 taken = _slash(bound(first, 0, PPM), OFFENCE, address(0));
        taken += _slash(bound(second, 0, PPM), "second offence", address(0));
        assertLe(taken, stake, "taken");
        assertEq(vault.activeStake(alice), stake - taken, "left");
    }

    function testFuzz_slash_ofMaturedUnbonding_leavesTheRestWithdrawable(uint256 unbonding, uint256 ppm) public {
        unbonding = bound(unbonding, 1 ether, WALLET - 1);
        ppm = bound(ppm, 0, PPM - 1);
        _give(1, unbonding);
        vm.warp(block.timestamp + UNBONDING_PERIOD);
        _slash(ppm, OFFENCE, address(0));
        vm.prank(alice);
        assertEq(vault.withdraw(), unbonding - (unbonding * ppm + PPM - 1) / PPM, "what the slash left");
    }

    // ------------------------------------------------------------------- release

    function testFuzz_release_reverts_whenNotASlasher(address caller) public {
        vm.assume(caller != address(ledger) && caller != address(court) && caller != address(faults));
        vm.expectRevert(abi.encodeWithSelector(IStakeVaultErrors.VaultUnauthorized.selector, caller));
        vm.prank(caller);
        vault.release(OFFENCE);
    }

    function testFuzz_release_reverts_whenUnknownOrSettled(bytes32 offence, bool released) public {
        if (released) {
            _deposit(alice, 1 ether);
            _slash(PPM, offence, address(0));
            vm.prank(address(court));
            vault.release(offence);
        }
        vm.expectRevert(abi.encodeWithSelector(IStakeVaultErrors.VaultOffenceSettled.selector, offence));
        vm.prank(address(ledger));
        vault.release(offence);
    }

    function testFuzz_release_splitsEverything(uint256 amount, bool reported) public {
        amount = bound(amount, 1, WALLET);
        _deposit(alice, amount);
        _slash(PPM, OFFENCE, reported ? challenger : address(0));
        uint256 insured = amount * INSURANCE_PPM / PPM;
        uint256 rewarded = reported ? Math.min(amount * REPORTER_PPM / PPM, REPORTER_CAP) : 0;
        uint256 burned = amount - insured - rewarded;

        vm.expectEmit(address(vault));
        emit IStakeVaultEvents.SlashReleased(OFFENCE, burned, insured, rewarded);
        vm.prank(address(ledger));
        vault.release(OFFENCE);

        assertEq(token.balanceOf(insurance), insured, "insured");
        assertEq(token.balanceOf(challenger), WALLET + rewarded, "rewarded");
        assertEq(token.totalSupply(), SUPPLY - burned, "burned");
        assertEq(token.balanceOf(address(vault)), 0, "nothing stays");
        assertEq(insured + rewarded + burned, amount, "split");
        assertEq(uint8(vault.escrowOf(OFFENCE).status), uint8(IStakeVault.EscrowStatus.Released), "released");
    }

    function testFuzz_release_capsTheReporter(uint256 amount) public {
        amount = bound(amount, REPORTER_CAP * PPM / REPORTER_PPM, WALLET);
        _deposit(alice, amount);
        _slash(PPM, OFFENCE, challenger);
        vm.prank(address(ledger));
        vault.release(OFFENCE);
        assertEq(token.balanceOf(challenger), WALLET + REPORTER_CAP, "the cap, however much was slashed");
    }

    function test_release_neverPaysTheJudge() public {
        _deposit(alice, 100 ether);
        _slash(PPM, OFFENCE, challenger);
        vm.prank(address(ledger));
        vault.release(OFFENCE);
        assertEq(token.balanceOf(address(ledger)), 0, "ledger");
        assertEq(token.balanceOf(address(court)), 0, "court");
    }

    // ------------------------------------------------------------------- restore

    function testFuzz_restore_reverts_whenNotASlasher(address caller) public {
        vm.assume(caller != address(ledger) && caller != address(court) && caller != address(faults));
        vm.expectRevert(abi.encodeWithSelector(IStakeVaultErrors.VaultUnauthorized.selector, caller));
        vm.prank(caller);
        vault.restore(OFFENCE);
    }

    function testFuzz_release_reverts_whenRestored(uint256 ppm) public {
        _deposit(alice, 1 ether);
        _slash(bound(ppm, 0, PPM), OFFENCE, challenger);
        vm.startPrank(address(court));
        vault.restore(OFFENCE);
        vm.expectRevert(abi.encodeWithSelector(IStakeVaultErrors.VaultOffenceSettled.selector, OFFENCE));
        vault.release(OFFENCE);
    }

    function testFuzz_restore_reverts_whenUnknownOrRestored(bytes32 offence, bool restored) public {
        if (restored) {
            _deposit(alice, 1 ether);
            _slash(PPM, offence, address(0));
            vm.prank(address(court));
            vault.restore(offence);
        }
        vm.expectRevert(abi.encodeWithSelector(IStakeVaultErrors.VaultOffenceSettled.selector, offence));
        vm.prank(address(court));
        vault.restore(offence);
    }

    function test_restore_reverts_whenReleased() public {
        _deposit(alice, 1 ether);
        _slash(PPM, OFFENCE, address(0));
        vm.startPrank(address(court));
        vault.release(OFFENCE);
        vm.expectRevert(abi.encodeWithSelector(IStakeVaultErrors.VaultOffenceSettled.selector, OFFENCE));
        vault.restore(OFFENCE);
    }

    function testFuzz_restore_givesAllBackAsActive(uint256 active, uint256 unbonding, uint256 ppm) public {
        (active, unbonding) = _boundStake(active, unbonding);
        ppm = bound(ppm, 1, PPM);
        _give(active, unbonding);
        uint256 amount = _slash(ppm, OFFENCE, address(0));
        (uint256 activeLeft, uint256 unbondingLeft) = _stake(alice);

        vm.expectEmit(address(vault));
        emit IStakeVaultEvents.SlashRestored(alice, OFFENCE, amount);
        vm.prank(address(court));
        vault.restore(OFFENCE);

        (uint256 activeAfter, uint256 unbondingAfter) = _stake(alice);
        assertEq(activeAfter, activeLeft + amount, "active");
        assertEq(unbondingAfter, unbondingLeft, "unbonding");
        assertEq(activeAfter + unbondingAfter, active + unbonding, "nothing is lost");
        assertEq(uint8(vault.escrowOf(OFFENCE).status), uint8(IStakeVault.EscrowStatus.Restored), "restored");
        assertEq(token.balanceOf(address(vault)), active + unbonding, "nothing moves");
    }

    function test_restore_leavesTheOffenceFiled() public {
        _register(alice, aliceNode, aliceNodeKey, REQUIRED_STAKE);
        _slash(PPM, OFFENCE, address(0));
        vm.prank(address(court));
        vault.restore(OFFENCE);
        _assertStatus(alice, IWorkerRegistry.Status.Jailed, "jailed by the slash");
        vm.expectRevert(abi.encodeWithSelector(IStakeVaultErrors.VaultOffenceSettled.selector, OFFENCE));
        _slash(PPM, OFFENCE, address(0));
    }
}
