// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IContributionLedger, IContributionLedgerErrors} from "../../src/interfaces/IContributionLedger.sol";
import {IDisputeCourtErrors} from "../../src/interfaces/IDisputeCourt.sol";
import {IRewardEscrow, IRewardEscrowErrors} from "../../src/interfaces/IRewardEscrow.sol";
import {IRunRegistry, IRunRegistryErrors} from "../../src/interfaces/IRunRegistry.sol";
import {IStakeVaultErrors} from "../../src/interfaces/IStakeVault.sol";
import {IWorkerRegistry} from "../../src/interfaces/IWorkerRegistry.sol";
import {CourtTest} from "../CourtTest.sol";

/// @title What a pause of slashing stops and what it does not, and attempts to get away by it
/// forge-config: default.fuzz.runs = 96
contract AttacksByPauseTest is CourtTest {
    function _evidence(address worker, uint256 key)
        private
        view
        returns (IContributionLedger.Submission memory submission, bytes memory signature)
    {
        submission = _submission(worker, 1, 0);
        signature = _signSubmission(submission, key);
    }

    function _expectPaused(address worker, uint256 position, uint256 key, uint256 until) private {
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(position);
        (IContributionLedger.Submission memory submission, bytes memory signature) = _evidence(worker, key);
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerSlashingPaused.selector, runId, until));
        ledger.executeFraud(outcome, submission, signature);
    }

    // ------------------------------------------------------------- what it stops

    function testFuzz_executeFraud_reverts_whilePaused(uint256 waited) public {
        uint256 until = _pauseSlashing();
        vm.warp(waited % 2 == 0 ? until - 1 : bound(waited, block.timestamp, until - 1));
        _expectPaused(alice, ALICE_FRAUD, aliceNodeKey, until);
        (uint256 active,) = _stake(alice);
        assertEq(active, REQUIRED_STAKE, "nothing is slashed");
        _assertStatus(alice, IWorkerRegistry.Status.Active, "nobody convicted");
    }

    function testFuzz_executeFraud_takesTheSame_afterThePause(uint256 waited) public {
        uint256 until = _pauseSlashing();
        vm.warp(bound(waited, until, until + 30 days));
        assertEq(_execute(alice, ALICE_FRAUD, aliceNodeKey), REQUIRED_STAKE * FRAUD_PPM / PPM, "slashed");
        _assertStatus(alice, IWorkerRegistry.Status.Jailed, "jailed");
    }

    /// @dev A jury's finding waits, too.
    function test_executeFraud_reverts_whilePaused_forWhatAJuryFound() public {
        _decide(BOB_ACCEPTED, FRAUD, true);
        uint256 until = _pauseSlashing();
        _expectPaused(bob, BOB_ACCEPTED, bobNodeKey, until);
        vm.warp(until);
        assertGt(_execute(bob, BOB_ACCEPTED, bobNodeKey), 0, "slashed afterwards");
    }

    // --------------------------------------------- mistaken verdicts and their escrows

    /// @dev A fraud that was executed before the pause can be challenged until one window after it, and no longer.
    function testFuzz_pause_prolongsTheChallengeOfFrauds(uint256 paused, uint256 asked) public {
        _execute(alice, ALICE_FRAUD, aliceNodeKey);
        vm.warp(block.timestamp + bound(paused, 0, CHALLENGE_WINDOW - 1));
        uint256 closesAt = _pauseSlashing() + CHALLENGE_WINDOW;
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        assertEq(ledger.standingOf(outcome).closesAt, closesAt, "closes at");
        vm.warp(asked % 2 == 0 ? closesAt - 1 : bound(asked, block.timestamp, closesAt - 1));
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerNotFinal.selector, _batchId, ALICE_FRAUD)
        );
        ledger.finaliseFraud(outcome);
        _decide(ALICE_FRAUD, ACCEPTED, true);
        assertEq(vault.activeStake(alice), REQUIRED_STAKE, "restored");
        _assertStatus(alice, IWorkerRegistry.Status.Active, "acquitted");
    }

    function test_pause_prolongsNothing_thatWasFinal() public {
        _execute(alice, ALICE_FRAUD, aliceNodeKey);
        _passChallengeWindow();
        _pauseSlashing();
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        vm.expectPartialRevert(IDisputeCourtErrors.CourtWindowClosed.selector);
        vm.prank(challenger);
        court.challenge(outcome, ACCEPTED);
        ledger.finaliseFraud(outcome);
    }

    /// @dev Accepted work is paid on time, and rejected work has no longer window.
    function test_pause_leavesAcceptedWorkAlone() public {
        _pauseSlashing();
        _passChallengeWindow();
        assertTrue(ledger.standingOf(_outcomeAt(BOB_ACCEPTED)).isFinal, "final");
        assertEq(_claim(_batchId, _records, 1, 2), 1000 * uint256(PRICE), "paid");
    }

    /// @dev What is set aside for work that a jury may still accept is not taken back before.
    function test_pause_keepsTheRewardOfFrauds_asLongAsTheyCanBeOverturned() public {
        uint256 finalAt = _pauseSlashing() + CHALLENGE_WINDOW;
        IRewardEscrow.Claim[] memory claims = new IRewardEscrow.Claim[](1);
        claims[0] = _claimOf(_batchId, _records, _range(0, 1));
        vm.warp(finalAt - 1);
        vm.expectRevert(abi.encodeWithSelector(IRewardEscrowErrors.EscrowNotFinal.selector, _batchId, finalAt));
        escrow.recover(claims);
        _decide(ALICE_FRAUD, ACCEPTED, true);
        assertEq(_claim(_batchId, _records, 0, 1), 1000 * uint256(PRICE), "the worker is paid");
    }

    function test_pause_givesTheRewardOfFraudsBack_afterwards() public {
        vm.warp(_pauseSlashing() + CHALLENGE_WINDOW);
        IRewardEscrow.Claim[] memory claims = new IRewardEscrow.Claim[](1);
        claims[0] = _claimOf(_batchId, _records, _range(0, 1));
        assertEq(escrow.recover(claims), 1000 * uint256(PRICE), "recovered");
    }

    // --------------------------------------------------- A27: leaving during a pause

    /// @dev The worst case there is: the worker asks for its stake in the second of the commitment, every deadline
    ///      is used to its end, and the pause begins in the very second in which the fraud could be executed.
    function testFuzz_attack_A27_stakeLeavesDuringAPause(uint256 last) public {
        uint64 batchId = _commit(1);
        uint256 committedAt = block.timestamp;
        vm.prank(alice);
        workers.exit();
        vm.warp(committedAt + OUTCOME_DEADLINE - 1);
        _records = _one(_record(alice, 1, 0, ACCEPTED));
        _batchId = batchId;
        _post(batchId, _records, QUORUM);
        vm.warp(committedAt + OUTCOME_DEADLINE - 1 + CHALLENGE_WINDOW - 1);
        _challengeAndDraw(0, FRAUD);
        bytes32 leaf = _leaf(batchId, 0, _records[0]);
        for (uint256 i = 2; i < 5; ++i) {
            _commitVote(leaf, validators[i], true);
        }
        vm.warp(block.timestamp + JURY_TIME - 1);
        for (uint256 i = 2; i < 5; ++i) {
            _revealVote(leaf, validators[i], true);
        }
        court.close(_outcomeAt(0));
        uint256 until = _pauseSlashing();
        vm.warp(last % 2 == 0 ? until - 1 : bound(last, block.timestamp, until - 1));
        _expectPaused(alice, 0, aliceNodeKey, until);
        vm.expectPartialRevert(IStakeVaultErrors.VaultNotWithdrawable.selector);
        vm.prank(alice);
        vault.withdraw();
        vm.warp(until);
        assertEq(_execute(alice, 0, aliceNodeKey), REQUIRED_STAKE * FRAUD_PPM / PPM, "slashed from what is leaving");
    }

    /// @dev The same with the shortest unbonding period that a deployment may have: the stake is there for one second
    ///      more, whatever the cheater and one accomplice among the validators do.
    function testFuzz_attack_A27_pausesAreChained(uint256 seed) public {
        uint256 committedAt = block.timestamp;
        uint256 shortest = committedAt + JUDGED + 1;
        uint256 knownAt = committedAt + bound(seed, 0, JUDGED - SLASH_PAUSE);
        uint256 executableAt = knownAt;
        // The accomplice pauses as often as it can, from a time of its choice on.
        vm.warp(committedAt + (seed >> 64) % JUDGED);
        for (uint256 i = 0; i < 4; ++i) {
            uint256 from = block.timestamp;
            vm.prank(validators[0]);
            runs.pauseSlashing(runId, IRunRegistry.PauseCause.Other, 0, "accomplice");
            if (from <= executableAt && executableAt < from + SLASH_PAUSE) executableAt = from + SLASH_PAUSE;
            vm.warp(from + SLASH_PAUSE + SLASH_COOLDOWN);
        }
        assertLt(executableAt, shortest, "executable before anything can be withdrawn");
    }

    /// @dev The hold after a jury's finding outlasts a pause and leaves a challenge window to execute.
    function test_attack_A27_pauseOutlastsTheHold() public {
        vm.prank(bob);
        workers.exit();
        vm.warp(block.timestamp + UNBONDING_PERIOD - JURY_TIME);
        _judge(_one(_record(bob, 1, 0, ACCEPTED)), QUORUM);
        _decide(0, FRAUD, true);
        uint256 until = _pauseSlashing();
        vm.warp(until);
        vm.expectPartialRevert(IStakeVaultErrors.VaultStakeHeld.selector);
        vm.prank(bob);
        vault.withdraw();
        assertGt(_execute(bob, 0, bobNodeKey), 0, "slashed");
    }

    // ------------------------------------------------------ what it does not stop

    /// @dev Two signatures prove themselves: nothing statistical is in them.
    function testFuzz_pause_doesNotStopExactProofs(bytes32 other) public {
        _pauseSlashing();
        IContributionLedger.Submission memory first = _submission(alice, 3, 0);
        IContributionLedger.Submission memory second = _submission(alice, 3, 0);
        vm.assume(other != first.fileHash);
        second.fileHash = other;
        bytes memory signed = _signSubmission(first, aliceNodeKey);
        faults.proveDoubleSubmission(first, signed, second, _signSubmission(second, aliceNodeKey));
        _assertStatus(alice, IWorkerRegistry.Status.Banned, "banned");
        assertEq(vault.activeStake(alice), REQUIRED_STAKE - REQUIRED_STAKE * EXACT_FRAUD_PPM / PPM, "slashed");
    }

    function testFuzz_pause_doesNotStopContradictionsOfValidators(bytes32 other) public {
        _pauseSlashing();
        uint64 batchId = _commit(1);
        bytes32 root = batches[batchId].root;
        vm.assume(other != keccak256("records"));
        IContributionLedger.Outcomes memory first = IContributionLedger.Outcomes(batchId, root, keccak256("records"));
        IContributionLedger.Outcomes memory second = IContributionLedger.Outcomes(batchId, root, other);
        faults.proveDoubleOutcome(batches[batchId], first, _signed(first), second, _signed(second));
        assertFalse(runs.isValidator(runId, validators[0]), "unseated");
    }

    function _signed(IContributionLedger.Outcomes memory outcomes) private view returns (bytes memory) {
        bytes32 typeHash = keccak256("Outcomes(uint64 batchId,bytes32 batchRoot,bytes32 recordsHash)");
        bytes32 structHash = keccak256(abi.encode(typeHash, outcomes.batchId, outcomes.batchRoot, outcomes.recordsHash));
        return _sign(validatorKeys[0], ledger.DOMAIN_SEPARATOR(), structHash);
    }

    /// @dev Nobody's withdrawal waits for a pause.
    function testFuzz_pause_stopsNoWithdrawal(uint256 late) public {
        vm.prank(bob);
        vault.requestUnbond(REQUIRED_STAKE);
        vm.warp(block.timestamp + UNBONDING_PERIOD + late % SLASH_PAUSE);
        _pauseSlashing();
        vm.prank(bob);
        assertEq(vault.withdraw(), REQUIRED_STAKE, "withdrawn");
    }

    /// @dev A cheater with a friend among the validators gains a delay: afterwards it costs what it would have cost.
    function testFuzz_attack_pauseRescuesTheCheater(uint256 pauses) public {
        vm.prank(alice);
        workers.exit();
        for (uint256 i = 0; i < pauses % 3; ++i) {
            vm.prank(validators[i]);
            runs.pauseSlashing(runId, IRunRegistry.PauseCause.Other, 0, "a friend's");
            vm.warp(block.timestamp + SLASH_PAUSE + SLASH_COOLDOWN);
        }
        assertEq(_execute(alice, ALICE_FRAUD, aliceNodeKey), REQUIRED_STAKE * FRAUD_PPM / PPM, "slashed in full");
    }

    /// @dev Terms that are milder cannot come into force while a pause keeps a fraud waiting.
    function test_attack_termsChangeDuringAPause() public {
        uint64 batchId = _commit(1);
        IRunRegistry.Terms memory mild = runs.termsOf(runId);
        mild.fraudPpm = 0;
        vm.prank(owner);
        runs.proposeChange(runId, mild);
        vm.warp(block.timestamp + OUTCOME_DEADLINE - 1);
        _records = _one(_record(alice, 1, 0, FRAUD));
        _batchId = batchId;
        _post(batchId, _records, QUORUM);
        vm.warp(_pauseSlashing());
        vm.expectPartialRevert(IRunRegistryErrors.RunChangeNotDue.selector);
        runs.applyChange(runId);
        assertEq(_execute(alice, 0, aliceNodeKey), REQUIRED_STAKE * FRAUD_PPM / PPM, "by the terms of its time");
    }
}
