// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {Math} from "@openzeppelin/contracts/utils/math/Math.sol";
import {Vm} from "forge-std/Vm.sol";

import {IStakeVault, IStakeVaultErrors, IStakeVaultEvents} from "../../src/interfaces/IStakeVault.sol";
import {IWorkerRegistry} from "../../src/interfaces/IWorkerRegistry.sol";
import {VaultTest} from "../VaultTest.sol";

/// @title What becomes of a fraud's escrow when it is final, and when it is overturned
contract StakeVaultRestoreTest is VaultTest {
    uint64 private constant TAG = 1;

    /// @dev Escrows of one outcome that a verdict of another must not touch.
    function _otherOutcomes() private view returns (IStakeVault.Verdict[3] memory others) {
        others = [_fraudOf(alice, TAG), _fraudOf(alice, TAG), _fraudOf(alice, TAG)];
        others[0].batchId = BATCH + 1;
        others[1].position = POSITION + 1;
        (others[2].batchId, others[2].position) = (0, 0);
    }

    function _expectSettled(bytes32 escrowId) private {
        vm.expectRevert(abi.encodeWithSelector(IStakeVaultErrors.VaultOffenceSettled.selector, escrowId));
    }

    // ------------------------------------------------------------------- release

    function testFuzz_release_reverts_whenNotTheLedger(address caller) public {
        vm.assume(caller != address(ledger));
        _deposit(runId, alice, 1 ether);
        _hold(alice, TAG, PPM);
        IStakeVault.Verdict memory fraud = _fraudOf(alice, TAG);
        vm.expectRevert(abi.encodeWithSelector(IStakeVaultErrors.VaultUnauthorized.selector, caller));
        vm.prank(caller);
        vault.release(fraud, caller);
    }

    function test_release_reverts_forTheCourts() public {
        _hold(alice, TAG, PPM);
        IStakeVault.Verdict memory fraud = _fraudOf(alice, TAG);
        address[2] memory courts = [address(court), address(faults)];
        for (uint256 i = 0; i < 2; ++i) {
            vm.expectRevert(abi.encodeWithSelector(IStakeVaultErrors.VaultUnauthorized.selector, courts[i]));
            vm.prank(courts[i]);
            vault.release(fraud, address(0));
        }
    }

    function testFuzz_release_reverts_whenUnknown(uint64 tag) public {
        _expectSettled(_fraudId(alice, tag));
        _release(alice, tag, address(0));
    }

    function testFuzz_release_reverts_whenReleasedOrRestored(uint256 ppm, bool released) public {
        _deposit(runId, alice, 1 ether);
        _hold(alice, TAG, bound(ppm, 0, PPM));
        if (released) _release(alice, TAG, address(0));
        else _restore(alice, TAG);
        _expectSettled(_fraudId(alice, TAG));
        _release(alice, TAG, address(0));
    }

    function test_release_reverts_forAnotherOutcome() public {
        _deposit(runId, alice, 1 ether);
        _hold(alice, TAG, PPM);
        IStakeVault.Verdict[3] memory others = _otherOutcomes();
        for (uint256 i = 0; i < 3; ++i) {
            vm.expectRevert(
                abi.encodeWithSelector(
                    IStakeVaultErrors.VaultWrongLeaf.selector,
                    _fraudId(alice, TAG),
                    others[i].batchId,
                    others[i].position
                )
            );
            vm.prank(address(ledger));
            vault.release(others[i], address(0));
        }
    }

    /// @dev What a court split is no escrow, although its name is known.
    function test_release_reverts_forAFault() public {
        _deposit(runId, alice, 1 ether);
        _slash(alice, TAG, PPM / 2, address(0));
        IStakeVault.Verdict memory fault =
            IStakeVault.Verdict(runId, alice, IStakeVault.Offence.DoubleSubmission, TAG, 0, 0);
        _expectSettled(_faultId(alice, TAG));
        vm.prank(address(ledger));
        vault.release(fault, address(0));
    }

    function testFuzz_release_splitsEverything(uint256 amount, bool reported) public {
        amount = bound(amount, 1, WALLET);
        _deposit(runId, alice, amount);
        _hold(alice, TAG, PPM);
        address reporter = reported ? challenger : address(0);
        uint256 insured = amount * INSURANCE_PPM / PPM;
        uint256 rewarded = reported ? Math.min(amount * REPORTER_PPM / PPM, REPORTER_CAP) : 0;
        uint256 burned = amount - insured - rewarded;
        uint256 supply = token.totalSupply();
        uint256 balance = token.balanceOf(address(vault));

        vm.expectEmit(address(vault));
        emit IStakeVaultEvents.SlashReleased(_fraudId(alice, TAG), reporter, burned, insured, rewarded);
        _release(alice, TAG, reporter);

        assertEq(token.balanceOf(insurance), insured, "insured");
        assertEq(token.balanceOf(challenger), WALLET + rewarded, "rewarded");
        assertEq(token.totalSupply(), supply - burned, "burned");
        assertEq(token.balanceOf(address(vault)), balance - amount, "nothing stays");
    }

    function testFuzz_release_settlesTheEscrow(uint256 amount) public {
        amount = bound(amount, 1, WALLET);
        _deposit(runId, alice, amount);
        _hold(alice, TAG, PPM);
        _release(alice, TAG, address(0));
        _assertEscrow(_fraudId(alice, TAG), amount, IStakeVault.EscrowStatus.Released);
        assertEq(_heldOf(alice), 0, "nothing is held");
    }

    function testFuzz_release_capsTheReporter(uint256 amount) public {
        amount = bound(amount, REPORTER_CAP * PPM / REPORTER_PPM, WALLET);
        _deposit(runId, alice, amount);
        _hold(alice, TAG, PPM);
        _release(alice, TAG, challenger);
        assertEq(token.balanceOf(challenger), WALLET + REPORTER_CAP, "the cap, however much was taken");
    }

    function test_release_paysTheReporterLess_belowTheCap() public {
        uint256 amount = REPORTER_CAP * PPM / REPORTER_PPM - 1 ether;
        _deposit(runId, alice, amount);
        _hold(alice, TAG, PPM);
        _release(alice, TAG, challenger);
        assertEq(token.balanceOf(challenger), WALLET + REPORTER_CAP - 0.2 ether, "a fifth of it");
    }

    function test_release_neverPaysTheJudge() public {
        _deposit(runId, alice, 100 ether);
        _hold(alice, TAG, PPM);
        _release(alice, TAG, challenger);
        assertEq(token.balanceOf(address(ledger)), 0, "ledger");
        assertEq(token.balanceOf(address(court)), 0, "court");
        assertEq(token.balanceOf(owner), WALLET, "the run's owner");
    }

    function test_release_leavesOtherEscrows() public {
        _deposit(runId, alice, 8 ether);
        _hold(alice, TAG, PPM / 2);
        _hold(alice, TAG + 1, PPM / 2);
        _release(alice, TAG, address(0));
        _assertEscrow(_fraudId(alice, TAG + 1), 2 ether, IStakeVault.EscrowStatus.Held);
        assertEq(_heldOf(alice), 1, "one is left");
    }

    // ------------------------------------------------------------------- restore

    function testFuzz_restore_reverts_whenNotTheCourt(address caller) public {
        vm.assume(caller != address(court));
        _deposit(runId, alice, 1 ether);
        _hold(alice, TAG, PPM);
        IStakeVault.Verdict memory fraud = _fraudOf(alice, TAG);
        vm.expectRevert(abi.encodeWithSelector(IStakeVaultErrors.VaultUnauthorized.selector, caller));
        vm.prank(caller);
        vault.restore(fraud);
    }

    function test_restore_reverts_forLedgerAndFaultCourt() public {
        _hold(alice, TAG, PPM);
        IStakeVault.Verdict memory fraud = _fraudOf(alice, TAG);
        address[2] memory others = [address(ledger), address(faults)];
        for (uint256 i = 0; i < 2; ++i) {
            vm.expectRevert(abi.encodeWithSelector(IStakeVaultErrors.VaultUnauthorized.selector, others[i]));
            vm.prank(others[i]);
            vault.restore(fraud);
        }
    }

    function testFuzz_restore_doesNothing_whenUnknown(uint64 tag) public {
        _deposit(runId, alice, 1 ether);
        assertFalse(_restore(alice, tag), "no escrow");
        assertEq(vault.activeStake(runId, alice), 1 ether, "stake");
        _assertEscrow(_fraudId(alice, tag), 0, IStakeVault.EscrowStatus.None);
    }

    function testFuzz_restore_doesNothing_whenReleased(uint256 ppm) public {
        _deposit(runId, alice, 1 ether);
        uint256 amount = _hold(alice, TAG, bound(ppm, 0, PPM));
        _release(alice, TAG, address(0));
        assertFalse(_restore(alice, TAG), "what is final stays final");
        assertEq(vault.activeStake(runId, alice), 1 ether - amount, "stake");
        _assertEscrow(_fraudId(alice, TAG), amount, IStakeVault.EscrowStatus.Released);
    }

    function testFuzz_restore_doesNothing_twice(uint256 ppm) public {
        _deposit(runId, alice, 1 ether);
        // Whose stake it would be.
        _deposit(runId, bob, 1 ether);
        _hold(alice, TAG, bound(ppm, 0, PPM));
        assertTrue(_restore(alice, TAG), "once");
        assertFalse(_restore(alice, TAG), "and no more");
        assertEq(vault.activeStake(runId, alice), 1 ether, "stake");
        assertEq(_heldOf(alice), 0, "held");
    }

    function test_restore_doesNothing_forAnotherOutcome() public {
        _deposit(runId, alice, 1 ether);
        _hold(alice, TAG, PPM);
        IStakeVault.Verdict[3] memory others = _otherOutcomes();
        for (uint256 i = 0; i < 3; ++i) {
            vm.prank(address(court));
            assertFalse(vault.restore(others[i]), "not its escrow");
        }
        _assertEscrow(_fraudId(alice, TAG), 1 ether, IStakeVault.EscrowStatus.Held);
        assertEq(_total(alice), 0, "nothing comes back");
    }

    function testFuzz_restore_givesAllBackAsActive(uint256 active, uint256 unbonding, uint256 ppm) public {
        (active, unbonding) = _boundStake(active, unbonding);
        _give(alice, active, unbonding);
        uint256 amount = _hold(alice, TAG, bound(ppm, 1, PPM));
        (uint256 activeLeft, uint256 unbondingLeft) = _stake(alice);
        uint256 balance = token.balanceOf(address(vault));

        vm.expectEmit(address(vault));
        emit IStakeVaultEvents.SlashRestored(runId, alice, _fraudId(alice, TAG), amount, 0);
        assertTrue(_restore(alice, TAG), "restored");

        (uint256 activeAfter, uint256 unbondingAfter) = _stake(alice);
        assertEq(activeAfter, activeLeft + amount, "active");
        assertEq(unbondingAfter, unbondingLeft, "unbonding");
        assertEq(activeAfter + unbondingAfter, active + unbonding, "nothing is lost");
        assertEq(token.balanceOf(address(vault)), balance, "nothing moves");
    }

    function testFuzz_restore_settlesTheEscrow(uint256 ppm) public {
        _deposit(runId, alice, 1 ether);
        uint256 amount = _hold(alice, TAG, bound(ppm, 0, PPM));
        _restore(alice, TAG);
        _assertEscrow(_fraudId(alice, TAG), amount, IStakeVault.EscrowStatus.Restored);
        assertEq(_heldOf(alice), 0, "nothing is held");
    }

    function testFuzz_restore_keepsWhatWasDepositedSince(uint256 deposited) public {
        deposited = bound(deposited, 1, WALLET - 1 ether);
        _deposit(runId, alice, 1 ether);
        _hold(alice, TAG, PPM / 2);
        _deposit(runId, alice, deposited);
        _restore(alice, TAG);
        assertEq(vault.activeStake(runId, alice), 1 ether + deposited, "both");
    }

    /// @dev The court acquits; the vault gives stake and nothing else.
    function test_restore_leavesAWorkerInJail() public {
        _join(runId, alice, aliceNode, aliceNodeKey, REQUIRED_STAKE);
        _hold(alice, TAG, PPM);
        _restore(alice, TAG);
        _assertStatus(alice, IWorkerRegistry.Status.Jailed, "jailed by the slash");
    }

    // ------------------------------------------------- later offences: examples

    function test_restore_paysALaterFault() public {
        _deposit(runId, alice, 1000 ether);
        _hold(alice, 1, 100_000);
        _slash(alice, 2, 200_000, address(0));
        assertEq(_total(alice), 720 ether, "a tenth, and a fifth of the rest");
        vm.expectEmit(address(vault));
        emit IStakeVaultEvents.SlashFollowed(_faultId(alice, 2), _fraudId(alice, 1), 20 ether);
        vm.expectEmit(address(vault));
        emit IStakeVaultEvents.SlashRestored(runId, alice, _fraudId(alice, 1), 80 ether, 20 ether);
        _restore(alice, 1);
        assertEq(_total(alice), 800 ether, "a fifth of all");
    }

    function test_restore_addsToALaterEscrowThatIsHeld() public {
        _deposit(runId, alice, 1000 ether);
        _hold(alice, 1, 100_000);
        _hold(alice, 2, 200_000);
        _restore(alice, 1);
        _assertEscrow(_fraudId(alice, 2), 200 ether, IStakeVault.EscrowStatus.Held);
        assertEq(_total(alice), 800 ether, "a fifth is held");
    }

    function test_release_splitsWhatFollowed() public {
        _deposit(runId, alice, 1000 ether);
        _hold(alice, 1, 100_000);
        _hold(alice, 2, 200_000);
        _restore(alice, 1);
        _release(alice, 2, challenger);
        assertEq(token.balanceOf(insurance), 60 ether, "three tenths of it all");
        assertEq(token.balanceOf(challenger), WALLET + 40 ether, "a fifth of it all");
    }

    /// @dev The reporter of a later offence was paid when that was final, and is paid once.
    function test_restore_splitsTheShareOfALaterEscrowThatIsReleased() public {
        _deposit(runId, alice, 1000 ether);
        _hold(alice, 1, 100_000);
        _hold(alice, 2, 200_000);
        _release(alice, 2, challenger);
        uint256 supply = token.totalSupply();
        uint256 rewarded = token.balanceOf(challenger);
        vm.expectEmit(address(vault));
        emit IStakeVaultEvents.SlashReleased(_fraudId(alice, 2), address(0), 14 ether, 6 ether, 0);
        _restore(alice, 1);
        _assertEscrow(_fraudId(alice, 2), 200 ether, IStakeVault.EscrowStatus.Released);
        assertEq(token.balanceOf(insurance), 60 ether, "three tenths of it all");
        assertEq(token.totalSupply(), supply - 14 ether, "the rest burns");
        assertEq(token.balanceOf(challenger), rewarded, "the reporter was paid");
    }

    function test_restore_givesNothingToALaterOffenceThatWasOverturned() public {
        _deposit(runId, alice, 1000 ether);
        _hold(alice, 1, 100_000);
        _hold(alice, 2, 200_000);
        _restore(alice, 2);
        _restore(alice, 1);
        _assertEscrow(_fraudId(alice, 2), 180 ether, IStakeVault.EscrowStatus.Restored);
        assertEq(_total(alice), 1000 ether, "all is back");
    }

    function test_restore_givesNothingToAnEarlierOffence() public {
        _deposit(runId, alice, 1000 ether);
        _hold(alice, 1, 100_000);
        _hold(alice, 2, 200_000);
        vm.expectEmit(address(vault));
        emit IStakeVaultEvents.SlashRestored(runId, alice, _fraudId(alice, 2), 180 ether, 0);
        _restore(alice, 2);
        _assertEscrow(_fraudId(alice, 1), 100 ether, IStakeVault.EscrowStatus.Held);
    }

    function test_restore_paysEachLaterOffenceOfWhatTheOneBeforeLeft() public {
        _deposit(runId, alice, 1000 ether);
        _hold(alice, 1, 500_000);
        _hold(alice, 2, 200_000);
        _slash(alice, 3, 500_000, address(0));
        _hold(alice, 4, 250_000);
        vm.expectEmit(address(vault));
        emit IStakeVaultEvents.SlashRestored(runId, alice, _fraudId(alice, 1), 150 ether, 350 ether);
        _restore(alice, 1);
        _assertEscrow(_fraudId(alice, 2), 200 ether, IStakeVault.EscrowStatus.Held);
        _assertEscrow(_faultId(alice, 3), 400 ether, IStakeVault.EscrowStatus.Released);
        _assertEscrow(_fraudId(alice, 4), 100 ether, IStakeVault.EscrowStatus.Held);
        assertEq(_total(alice), 300 ether, "four fifths, a half and three quarters of all");
    }

    /// @dev What an overturned escrow took of an earlier one passes on to those after it.
    function test_restore_passesOnWhatFollowed() public {
        _deposit(runId, alice, 1000 ether);
        _hold(alice, 1, 500_000);
        _hold(alice, 2, 200_000);
        _hold(alice, 3, 500_000);
        _restore(alice, 1);
        _restore(alice, 2);
        _assertEscrow(_fraudId(alice, 3), 500 ether, IStakeVault.EscrowStatus.Held);
        assertEq(_total(alice), 500 ether, "half of all");
    }

    function test_restore_reachesOffencesBehindOneThatIsSettled() public {
        _deposit(runId, alice, 1000 ether);
        _hold(alice, 1, 500_000);
        _hold(alice, 2, 200_000);
        _release(alice, 2, address(0));
        _hold(alice, 3, 500_000);
        _restore(alice, 1);
        _assertEscrow(_fraudId(alice, 2), 200 ether, IStakeVault.EscrowStatus.Released);
        _assertEscrow(_fraudId(alice, 3), 400 ether, IStakeVault.EscrowStatus.Held);
        assertEq(_total(alice), 400 ether, "four fifths and a half of all");
    }

    function test_restore_leavesAnEscrowThatCameWhenNothingWasHeld() public {
        _deposit(runId, alice, 1000 ether);
        _hold(alice, 1, 100_000);
        _restore(alice, 1);
        _hold(alice, 2, 200_000);
        _assertEscrow(_fraudId(alice, 2), 200 ether, IStakeVault.EscrowStatus.Held);
        assertFalse(_restore(alice, 1), "the first is settled");
        assertEq(_total(alice), 800 ether, "a fifth of all");
    }

    function test_restore_startsAnew_whenAllThatCameBeforeIsSettled() public {
        _deposit(runId, alice, 1000 ether);
        _hold(alice, 1, 100_000);
        _slash(alice, 2, 100_000, address(0));
        _release(alice, 1, address(0));
        uint256 left = _total(alice);
        _hold(alice, 3, 500_000);
        _slash(alice, 4, 500_000, address(0));
        _restore(alice, 3);
        _assertEscrow(_faultId(alice, 2), 90 ether, IStakeVault.EscrowStatus.Released);
        _assertEscrow(_faultId(alice, 4), left / 2, IStakeVault.EscrowStatus.Released);
        assertEq(_total(alice), left / 2, "half of what the first two left");
    }

    function test_restore_givesNothingToOffencesInAnotherRun() public {
        _deposit(runId, alice, 1000 ether);
        _deposit(runId + 1, alice, 1000 ether);
        _hold(alice, 1, 100_000);
        vm.prank(address(faults));
        vault.slash(runId + 1, alice, IStakeVault.Offence.DoubleSubmission, 2, PPM, address(0));
        _restore(alice, 1);
        assertEq(_total(alice), 1000 ether, "all is back");
    }

    function test_restore_givesNothingToOffencesOfAnotherAccount() public {
        _deposit(runId, alice, 1000 ether);
        _deposit(runId, bob, 1000 ether);
        _hold(alice, 1, 100_000);
        _slash(bob, 2, PPM, address(0));
        _restore(alice, 1);
        assertEq(_total(alice), 1000 ether, "all is back");
    }

    function test_restore_givesAllToALaterOffenceThatCostsAll() public {
        _deposit(runId, alice, 1000 ether);
        _hold(alice, 1, 100_000);
        _slash(alice, 2, PPM, address(0));
        _restore(alice, 1);
        _assertEscrow(_faultId(alice, 2), 1000 ether, IStakeVault.EscrowStatus.Released);
        assertEq(_total(alice), 0, "nothing is left");
    }

    /// @dev Stake that came between the two offences is not taken twice.
    function testFuzz_restore_countsADepositBetweenOnce(uint256 deposited) public {
        deposited = bound(deposited, 1, WALLET - 1000 ether);
        _deposit(runId, alice, 1000 ether);
        _hold(alice, 1, 100_000);
        _deposit(runId, alice, deposited);
        _slash(alice, 2, 200_000, address(0));
        _restore(alice, 1);
        assertApproxEqAbs(_total(alice), (1000 ether + deposited) * 4 / 5, 2, "a fifth of all was taken");
    }

    function testFuzz_restore_reachesOffencesThatTookOfUnbondingStake(
        uint256 active,
        uint256 unbonding,
        uint256 first,
        uint256 second
    ) public {
        (active, unbonding) = _boundStake(active, unbonding);
        _give(alice, active, unbonding);
        uint256 amount = _hold(alice, 1, bound(first, 0, PPM));
        uint256 taken = _slash(alice, 2, bound(second, 0, PPM), address(0));
        _restore(alice, 1);
        uint256 followed = _share(amount, vault.escrowOf(_faultId(alice, 2)).ppm);
        assertEq(_total(alice), active + unbonding - taken - followed, "its share of both, and of what came back");
    }

    // --------------------------------------------------- later offences: how many

    /// @dev Half of the stake is held; then come `count` offences that cost nothing, and one that costs all.
    function _offendOften(uint64 count) private {
        _deposit(runId, alice, 2 ether);
        _hold(alice, 0, PPM / 2);
        for (uint64 tag = 0; tag < count; ++tag) {
            _slash(alice, tag, 0, address(0));
        }
        _slash(alice, count, PPM, address(0));
    }

    function test_restore_paysThe256thLaterOffence() public {
        _offendOften(255);
        _restore(alice, 0);
        _assertEscrow(_faultId(alice, 255), 2 ether, IStakeVault.EscrowStatus.Released);
        assertEq(_total(alice), 0, "all of it");
    }

    function test_restore_sparesThe257thLaterOffence() public {
        _offendOften(256);
        _restore(alice, 0);
        _assertEscrow(_faultId(alice, 256), 1 ether, IStakeVault.EscrowStatus.Released);
        assertEq(_total(alice), 1 ether, "what came back stays");
    }

    /// @dev A transaction of Osaka holds 2^24 gas (EIP-7825). Else who offends often could keep its case open for ever.
    function test_restore_fitsATransaction_whateverCameSince() public {
        _deposit(runId, alice, 1000 ether);
        _hold(alice, 0, PPM / 2);
        for (uint64 tag = 0; tag < 300; ++tag) {
            _slash(alice, tag, 1000, address(0));
        }
        vm.cool(address(vault));
        vm.cool(address(token));
        uint256 gas = gasleft();
        _restore(alice, 0);
        assertLt(gas - gasleft(), uint256(1 << 24) / 2, "at most a half of it");
    }

    function test_restore_stops_whenNothingIsLeftToTake() public {
        _deposit(runId, alice, 2 ether);
        _hold(alice, 0, PPM / 2);
        _slash(alice, 1, PPM, address(0));
        _slash(alice, 2, PPM, address(0));
        vm.recordLogs();
        _restore(alice, 0);
        Vm.Log[] memory logs = vm.getRecordedLogs();
        uint256 followed;
        for (uint256 i = 0; i < logs.length; ++i) {
            if (logs[i].topics[0] == IStakeVaultEvents.SlashFollowed.selector) ++followed;
        }
        assertEq(followed, 1, "the first takes all");
    }
}
