// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {Math} from "@openzeppelin/contracts/utils/math/Math.sol";

import {IJuryPoolEvents} from "../../src/interfaces/IJuryPool.sol";
import {IRunRegistryEvents} from "../../src/interfaces/IRunRegistry.sol";
import {IStakeVault, IStakeVaultErrors, IStakeVaultEvents} from "../../src/interfaces/IStakeVault.sol";
import {IWorkerRegistry} from "../../src/interfaces/IWorkerRegistry.sol";
import {VaultTest} from "../VaultTest.sol";

/// @title How stake is taken: of frauds it is held, of proven faults it is split at once
contract StakeVaultSlashTest is VaultTest {
    uint64 private constant BENCH = 0;
    uint64 private constant TAG = 1;

    function _expectSettled(bytes32 escrowId) private {
        vm.expectRevert(abi.encodeWithSelector(IStakeVaultErrors.VaultOffenceSettled.selector, escrowId));
    }

    function _expectUnauthorized(address caller) private {
        vm.expectRevert(abi.encodeWithSelector(IStakeVaultErrors.VaultUnauthorized.selector, caller));
        vm.prank(caller);
    }

    // --------------------------------------------------------------------- hold

    function testFuzz_hold_reverts_whenNotTheLedger(address caller) public {
        vm.assume(caller != address(ledger));
        IStakeVault.Verdict memory fraud = _fraudOf(alice, TAG);
        _expectUnauthorized(caller);
        vault.hold(fraud, PPM);
    }

    function test_hold_reverts_forTheCourts() public {
        IStakeVault.Verdict memory fraud = _fraudOf(alice, TAG);
        _expectUnauthorized(address(court));
        vault.hold(fraud, PPM);
        _expectUnauthorized(address(faults));
        vault.hold(fraud, PPM);
    }

    function testFuzz_hold_reverts_aboveTheWhole(uint256 ppm) public {
        ppm = bound(ppm, PPM + 1, type(uint256).max);
        vm.expectRevert(abi.encodeWithSelector(IStakeVaultErrors.VaultInvalidShares.selector, ppm));
        _hold(alice, TAG, ppm);
    }

    /// @dev Whatever became of its escrow: an account is punished once for an offence and a tag.
    function testFuzz_hold_reverts_whenTheOffenceWasPunished(uint256 ppm, uint256 fate) public {
        _deposit(runId, alice, 1 ether);
        _hold(alice, TAG, bound(ppm, 0, PPM));
        if (fate % 3 == 1) _release(alice, TAG, address(0));
        if (fate % 3 == 2) _restore(alice, TAG);
        _expectSettled(_fraudId(alice, TAG));
        _hold(alice, TAG, 0);
    }

    function test_hold_reverts_whenAnotherBatchPunishedTheSlot() public {
        _deposit(runId, alice, 1 ether);
        _hold(alice, TAG, PPM);
        IStakeVault.Verdict memory fraud = _fraudOf(alice, TAG);
        (fraud.batchId, fraud.position) = (BATCH + 1, POSITION + 1);
        _expectSettled(_fraudId(alice, TAG));
        vm.prank(address(ledger));
        vault.hold(fraud, PPM);
    }

    /// @dev One byte counts them. Whoever reports the next offence is told what to wait for, and then succeeds.
    function test_hold_reverts_when255EscrowsAreHeld_untilOneIsSettled() public {
        _deposit(runId, alice, 1 ether);
        for (uint64 tag = 0; tag < 255; ++tag) {
            _hold(alice, tag, 0);
        }
        vm.expectRevert(abi.encodeWithSelector(IStakeVaultErrors.VaultTooManyEscrows.selector, runId, alice));
        _hold(alice, 255, PPM);
        _hold(bob, 255, PPM);
        _release(alice, 0, address(0));
        assertEq(_hold(alice, 255, PPM), 1 ether, "the offence was not lost");
        assertEq(_heldOf(alice), 255, "held");
    }

    function testFuzz_hold_takesTheSameShareOfBoth_roundedUp(uint256 active, uint256 unbonding, uint256 ppm) public {
        (active, unbonding) = _boundStake(active, unbonding);
        ppm = bound(ppm, 0, PPM);
        _give(alice, active, unbonding);
        uint256 fromActive = _share(active, ppm);
        uint256 fromUnbonding = _share(unbonding, ppm);

        vm.expectEmit(address(vault));
        emit IStakeVaultEvents.Slashed(
            runId, alice, _fraudId(alice, TAG), _fraudOf(alice, TAG), fromActive, fromUnbonding
        );
        assertEq(_hold(alice, TAG, ppm), fromActive + fromUnbonding, "amount");

        (uint256 activeLeft, uint256 unbondingLeft) = _stake(alice);
        assertEq(activeLeft, active - fromActive, "active left");
        assertEq(unbondingLeft, unbonding - fromUnbonding, "unbonding left");
    }

    function testFuzz_hold_filesTheEscrow(uint256 stake, uint256 ppm, uint64 batchId, uint32 position) public {
        stake = bound(stake, 1, WALLET);
        ppm = bound(ppm, 0, PPM);
        _deposit(runId, alice, stake);
        IStakeVault.Verdict memory fraud = _fraudOf(alice, TAG);
        (fraud.batchId, fraud.position) = (batchId, position);
        vm.prank(address(ledger));
        vault.hold(fraud, ppm);
        IStakeVault.Escrow memory escrow = vault.escrowOf(_fraudId(alice, TAG));
        assertEq(escrow.amount, _share(stake, ppm), "amount");
        assertEq(escrow.ppm, ppm, "share");
        assertEq(escrow.batchId, batchId, "batch");
        assertEq(escrow.position, position, "position");
        assertEq(uint8(escrow.status), uint8(IStakeVault.EscrowStatus.Held), "held");
        assertEq(_heldOf(alice), 1, "one escrow of the account");
    }

    function testFuzz_hold_movesNoTokens_andKeepsTheTotal(uint256 active, uint256 unbonding, uint256 ppm) public {
        (active, unbonding) = _boundStake(active, unbonding);
        _give(alice, active, unbonding);
        uint256 balance = token.balanceOf(address(vault));
        uint256 amount = _hold(alice, TAG, bound(ppm, 0, PPM));
        assertEq(_total(alice) + amount, active + unbonding, "sum");
        assertEq(token.balanceOf(address(vault)), balance, "balance");
    }

    function testFuzz_hold_reachesMaturedUnbonding(uint256 unbonding, uint256 waited) public {
        unbonding = bound(unbonding, 1, WALLET - 1);
        waited = bound(waited, UNBONDING_PERIOD, 100 * UNBONDING_PERIOD);
        _give(alice, 1, unbonding);
        uint256 withdrawableAt = block.timestamp + UNBONDING_PERIOD;
        vm.warp(block.timestamp + waited);
        _hold(alice, TAG, PPM);
        vm.expectRevert(
            abi.encodeWithSelector(IStakeVaultErrors.VaultNotWithdrawable.selector, runId, alice, 0, withdrawableAt)
        );
        vm.prank(alice);
        vault.withdraw(runId);
    }

    function testFuzz_hold_ofMaturedUnbonding_leavesTheRestWithdrawable(uint256 unbonding, uint256 ppm) public {
        unbonding = bound(unbonding, 1 ether, WALLET - 1);
        ppm = bound(ppm, 0, PPM - 1);
        _give(alice, 1, unbonding);
        vm.warp(block.timestamp + UNBONDING_PERIOD);
        _hold(alice, TAG, ppm);
        vm.prank(alice);
        assertEq(vault.withdraw(runId), unbonding - _share(unbonding, ppm), "what was left");
    }

    function testFuzz_hold_sparesOthers(uint256 ppm) public {
        _give(alice, 5 ether, 5 ether);
        _give(bob, 7 ether, 3 ether);
        _hold(alice, TAG, bound(ppm, 0, PPM));
        (uint256 active, uint256 unbonding) = _stake(bob);
        assertEq(active, 7 ether, "bob's active stake");
        assertEq(unbonding, 3 ether, "bob's unbonding stake");
    }

    /// @dev The first law: a run touches only stake whose owner gave it to that run.
    function testFuzz_hold_sparesTheOwnersStakeInOtherRuns(uint64 other, uint256 ppm) public {
        vm.assume(other != runId);
        _deposit(runId, alice, 5 ether);
        _deposit(other, alice, 7 ether);
        _hold(alice, TAG, bound(ppm, 0, PPM));
        assertEq(vault.activeStake(other, alice), 7 ether, "all of it");
        assertEq(vault.accountOf(other, alice).held, 0, "no escrow");
    }

    function testFuzz_hold_jailsAWorker_whenTooLittleStays(uint256 ppm) public {
        _join(runId, alice, aliceNode, aliceNodeKey, 2 * REQUIRED_STAKE);
        ppm = bound(ppm, 0, PPM);
        _hold(alice, TAG, ppm);
        assertEq(workers.isActive(runId, alice), ppm <= PPM / 2, "active exactly while half or more is left");
    }

    function testFuzz_hold_filesTheOffence_whenThereIsNoStake(uint256 ppm) public {
        assertEq(_hold(alice, TAG, bound(ppm, 0, PPM)), 0, "nothing to take");
        _assertEscrow(_fraudId(alice, TAG), 0, IStakeVault.EscrowStatus.Held);
        assertEq(_heldOf(alice), 1, "held");
    }

    function testFuzz_hold_twice_takesItsShareOfWhatTheFirstLeft(uint256 stake, uint256 first, uint256 second) public {
        stake = bound(stake, 1, WALLET);
        (first, second) = (bound(first, 0, PPM), bound(second, 0, PPM));
        _deposit(runId, alice, stake);
        uint256 left = stake - _share(stake, first);
        assertEq(_hold(alice, TAG, first), stake - left, "the first");
        assertEq(_hold(alice, TAG + 1, second), _share(left, second), "the second");
        assertEq(_heldOf(alice), 2, "both are held");
    }

    /// @dev Offence, account and run are parts of an escrow's name, as the tag is.
    function test_hold_tellsOffencesApart() public {
        IStakeVault.Verdict[4] memory frauds =
            [_fraudOf(alice, TAG), _fraudOf(alice, TAG), _fraudOf(bob, TAG), _fraudOf(alice, TAG)];
        frauds[1].offence = IStakeVault.Offence.ExactFraud;
        frauds[3].runId = runId + 1;
        _deposit(runId, alice, 8 ether);
        _deposit(runId, bob, 6 ether);
        _deposit(runId + 1, alice, 4 ether);
        uint256[4] memory expected = [uint256(4 ether), 2 ether, 3 ether, 2 ether];
        for (uint256 i = 0; i < 4; ++i) {
            vm.prank(address(ledger));
            assertEq(vault.hold(frauds[i], PPM / 2), expected[i], "half of what is there");
        }
    }

    // -------------------------------------------------------------------- slash

    function testFuzz_slash_reverts_whenNotACourt(address caller) public {
        vm.assume(caller != address(court) && caller != address(faults));
        _expectUnauthorized(caller);
        vault.slash(runId, alice, IStakeVault.Offence.WrongVerdict, TAG, PPM, caller);
    }

    function test_slash_reverts_forTheLedger() public {
        _expectUnauthorized(address(ledger));
        vault.slash(runId, alice, IStakeVault.Offence.WrongVerdict, TAG, PPM, address(0));
    }

    function testFuzz_slash_letsBothCourts(bool either) public {
        _deposit(runId, alice, 1 ether);
        vm.prank(either ? address(court) : address(faults));
        assertEq(
            vault.slash(runId, alice, IStakeVault.Offence.WrongVerdict, TAG, PPM / 2, address(0)), 0.5 ether, "half"
        );
    }

    function testFuzz_slash_reverts_aboveTheWhole(uint256 ppm) public {
        ppm = bound(ppm, PPM + 1, type(uint256).max);
        vm.expectRevert(abi.encodeWithSelector(IStakeVaultErrors.VaultInvalidShares.selector, ppm));
        _slash(alice, TAG, ppm, address(0));
    }

    function testFuzz_slash_reverts_whenTheOffenceWasPunished(uint256 ppm) public {
        _deposit(runId, alice, 1 ether);
        _slash(alice, TAG, bound(ppm, 0, PPM), address(0));
        _expectSettled(_faultId(alice, TAG));
        _slash(alice, TAG, 0, address(0));
    }

    function testFuzz_slash_takesTheSameShareOfBoth_roundedUp(uint256 active, uint256 unbonding, uint256 ppm) public {
        (active, unbonding) = _boundStake(active, unbonding);
        ppm = bound(ppm, 0, PPM);
        _give(alice, active, unbonding);
        uint256 fromActive = _share(active, ppm);
        uint256 fromUnbonding = _share(unbonding, ppm);

        // It belongs to no outcome.
        IStakeVault.Verdict memory fault =
            IStakeVault.Verdict(runId, alice, IStakeVault.Offence.DoubleSubmission, TAG, 0, 0);
        vm.expectEmit(address(vault));
        emit IStakeVaultEvents.Slashed(runId, alice, _faultId(alice, TAG), fault, fromActive, fromUnbonding);
        assertEq(_slash(alice, TAG, ppm, address(0)), fromActive + fromUnbonding, "amount");

        (uint256 activeLeft, uint256 unbondingLeft) = _stake(alice);
        assertEq(activeLeft, active - fromActive, "active left");
        assertEq(unbondingLeft, unbonding - fromUnbonding, "unbonding left");
    }

    function testFuzz_slash_splitsAtOnce(uint256 amount, bool reported) public {
        amount = bound(amount, 1, WALLET);
        _deposit(runId, alice, amount);
        address reporter = reported ? challenger : address(0);
        uint256 insured = amount * INSURANCE_PPM / PPM;
        uint256 rewarded = reported ? Math.min(amount * REPORTER_PPM / PPM, REPORTER_CAP) : 0;
        uint256 burned = amount - insured - rewarded;
        uint256 supply = token.totalSupply();
        uint256 balance = token.balanceOf(address(vault));

        vm.expectEmit(address(vault));
        emit IStakeVaultEvents.SlashReleased(_faultId(alice, TAG), reporter, burned, insured, rewarded);
        _slash(alice, TAG, PPM, reporter);

        assertEq(token.balanceOf(insurance), insured, "insured");
        assertEq(token.balanceOf(challenger), WALLET + rewarded, "rewarded");
        assertEq(token.totalSupply(), supply - burned, "burned");
        assertEq(token.balanceOf(address(vault)), balance - amount, "nothing stays");
    }

    function testFuzz_slash_filesAReleasedEscrow(uint256 amount, uint256 ppm) public {
        amount = bound(amount, 1, WALLET);
        ppm = bound(ppm, 0, PPM);
        _deposit(runId, alice, amount);
        _slash(alice, TAG, ppm, address(0));
        _assertEscrow(_faultId(alice, TAG), _share(amount, ppm), IStakeVault.EscrowStatus.Released);
        IStakeVault.Escrow memory escrow = vault.escrowOf(_faultId(alice, TAG));
        assertEq(escrow.ppm, ppm, "share");
        assertEq(escrow.batchId, 0, "no batch");
        assertEq(_heldOf(alice), 0, "nothing is held");
    }

    function testFuzz_slash_sparesTheOwnersStakeInOtherRuns(uint64 other, uint256 ppm) public {
        vm.assume(other != runId);
        _deposit(runId, alice, 5 ether);
        _deposit(other, alice, 7 ether);
        _slash(alice, TAG, bound(ppm, 0, PPM), address(0));
        assertEq(vault.activeStake(other, alice), 7 ether, "all of it");
    }

    // -------------------------------------------------------- slashes end a role

    function testFuzz_slash_jailsAWorker_whenTooLittleStays(uint256 ppm) public {
        _join(runId, alice, aliceNode, aliceNodeKey, 2 * REQUIRED_STAKE);
        ppm = bound(ppm, 0, PPM);
        _slash(alice, TAG, ppm, address(0));
        assertEq(workers.isActive(runId, alice), ppm <= PPM / 2, "active exactly while half or more is left");
    }

    function testFuzz_slash_unseatsAValidator_whenTooLittleStays(uint256 ppm) public {
        _deposit(runId, validators[0], REQUIRED_VALIDATOR_STAKE);
        ppm = bound(ppm, 0, PPM);
        _slash(validators[0], TAG, ppm, address(0));
        assertEq(runs.isValidator(runId, validators[0]), ppm <= PPM / 2, "seated exactly while half or more is left");
    }

    function test_slash_tellsOfTheSeat() public {
        vm.expectEmit(address(runs));
        emit IRunRegistryEvents.ValidatorUnseated(runId, validators[0]);
        _slash(validators[0], TAG, 1, address(0));
    }

    function testFuzz_slash_onTheBench_retiresAJuror_whenTooLittleStays(uint256 ppm) public {
        _fillBench();
        _deposit(BENCH, jurors[1], REQUIRED_JUROR_STAKE);
        ppm = bound(ppm, 0, PPM);
        vm.prank(address(court));
        vault.slash(BENCH, jurors[1], IStakeVault.Offence.AbsentJuror, TAG, ppm, address(0));
        assertEq(jury.isJuror(jurors[1]), ppm <= PPM / 2, "a juror exactly while half or more is left");
    }

    function test_slash_onTheBench_tellsOfThePlace() public {
        _fillBench();
        vm.expectEmit(address(jury));
        emit IJuryPoolEvents.JurorLeft(jurors[1], 1);
        vm.prank(address(court));
        vault.slash(BENCH, jurors[1], IStakeVault.Offence.AbsentJuror, TAG, 1, address(0));
    }

    function test_slash_onTheBench_sparesTheWorker() public {
        _join(runId, alice, aliceNode, aliceNodeKey, REQUIRED_STAKE);
        _deposit(BENCH, alice, REQUIRED_JUROR_STAKE);
        vm.prank(alice);
        jury.join(0);
        vm.prank(address(court));
        vault.slash(BENCH, alice, IStakeVault.Offence.AbsentJuror, TAG, PPM, address(0));
        assertFalse(jury.isJuror(alice), "no juror any more");
        assertEq(vault.activeStake(runId, alice), REQUIRED_STAKE, "stake in the run");
        _assertStatus(alice, IWorkerRegistry.Status.Active, "still works");
    }

    function test_slash_inARun_sparesTheJuror() public {
        _fillBench();
        _deposit(runId, jurors[1], REQUIRED_STAKE);
        _slash(jurors[1], TAG, PPM, address(0));
        assertTrue(jury.isJuror(jurors[1]), "still a juror");
        assertEq(vault.activeStake(BENCH, jurors[1]), REQUIRED_JUROR_STAKE, "stake on the bench");
    }
}
