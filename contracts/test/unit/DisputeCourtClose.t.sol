// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IContributionLedger, IContributionLedgerErrors} from "../../src/interfaces/IContributionLedger.sol";
import {IDisputeCourt, IDisputeCourtEvents} from "../../src/interfaces/IDisputeCourt.sol";
import {IRewardEscrow, IRewardEscrowErrors} from "../../src/interfaces/IRewardEscrow.sol";
import {IStakeVault, IStakeVaultEvents} from "../../src/interfaces/IStakeVault.sol";
import {IWorkerRegistry} from "../../src/interfaces/IWorkerRegistry.sol";
import {CourtTest} from "../CourtTest.sol";

contract DisputeCourtCloseTest is CourtTest {
    function _close(uint256 position) private {
        court.close(_outcomeAt(position));
    }

    function _claimsOf(uint256 position) private view returns (IRewardEscrow.Claim[] memory claims) {
        claims = new IRewardEscrow.Claim[](1);
        claims[0] = _claimOf(_batchId, _records, _range(position, position + 1));
    }

    // ---------------------------------------------------------------------- when

    function testFuzz_close_reverts_withoutACase(uint256 position) public {
        position = bound(position, 0, 1);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(position);
        _expectNoOpenCase(position == 0 ? _fraudLeaf : _acceptedLeaf, uint8(IDisputeCourt.CaseStatus.None));
        court.close(outcome);
    }

    function testFuzz_close_reverts_twice(bool overturned) public {
        _decide(ALICE_FRAUD, ACCEPTED, overturned);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        IDisputeCourt.CaseStatus status =
            overturned ? IDisputeCourt.CaseStatus.Overturned : IDisputeCourt.CaseStatus.Upheld;
        _expectNoOpenCase(_fraudLeaf, uint8(status));
        court.close(outcome);
    }

    /// @dev Until all jurors revealed or their time is over; nobody drawn is nobody that revealed.
    function testFuzz_close_reverts_whileJurorsMayVote(uint256 waited, bool drawn, uint256 revealed) public {
        _challenge(ALICE_FRAUD, ACCEPTED);
        uint256 until = block.timestamp + JURY_TIME;
        if (drawn) {
            _drawJury(ALICE_FRAUD);
            for (uint256 i = 2; i < 5; ++i) {
                _commitVote(_fraudLeaf, validators[i], true);
            }
            revealed = bound(revealed, 0, 2);
            for (uint256 i = 0; i < revealed; ++i) {
                _revealVote(_fraudLeaf, validators[2 + i], true);
            }
        }
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        waited = waited % 2 == 0 ? JURY_TIME - 1 : bound(waited, 0, JURY_TIME - 1);
        vm.warp(block.timestamp + waited);
        _expectPhaseOpen(_fraudLeaf, until);
        court.close(outcome);
    }

    function testFuzz_close_works_asSoonAsAllRevealed(address caller, bool overturn) public {
        _challengeAndDraw(ALICE_FRAUD, ACCEPTED);
        _voteAll(_fraudLeaf, overturn, overturn, overturn);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        vm.prank(caller);
        court.close(outcome);
        assertFalse(court.isOpen(_fraudLeaf), "closed");
    }

    function test_close_doesNotWaitForAJurorThatChallenged() public {
        _challengeBy(validators[2], ALICE_FRAUD, ACCEPTED);
        _drawJury(ALICE_FRAUD);
        for (uint256 i = 3; i < 5; ++i) {
            _commitVote(_fraudLeaf, validators[i], true);
        }
        for (uint256 i = 3; i < 5; ++i) {
            _revealVote(_fraudLeaf, validators[i], true);
        }
        _close(ALICE_FRAUD);
        assertEq(court.effectiveVerdict(_fraudLeaf, FRAUD), ACCEPTED, "decided by the other two");
    }

    // ----------------------------------------------------------------------- how

    /// @dev Every constellation: each juror stays away, commits only, upholds or overturns.
    function testFuzz_close_decidesByMajority(uint256 seed, uint256 waited) public {
        _challengeAndDraw(ALICE_FRAUD, ACCEPTED);
        uint256 openedAt = block.timestamp;
        for (uint256 i = 0; i < 3; ++i) {
            uint256 vote = (seed >> (2 * i)) & 3;
            if (vote != 0) _commitVote(_fraudLeaf, validators[2 + i], vote == 3);
        }
        vm.warp(openedAt + COMMIT_TIME);
        (uint256 forIt, uint256 against) = (0, 0);
        for (uint256 i = 0; i < 3; ++i) {
            uint256 vote = (seed >> (2 * i)) & 3;
            if (vote < 2) continue;
            _revealVote(_fraudLeaf, validators[2 + i], vote == 3);
            if (vote == 3) ++forIt;
            else ++against;
        }
        vm.warp(openedAt + bound(waited, JURY_TIME, 100 days));
        _closeAndCheck(forIt, against);
    }

    function _closeAndCheck(uint256 forIt, uint256 against) private {
        bool overturned = forIt > against;
        uint256 returned = forIt < against ? 0 : CHALLENGE_BOND;
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        vm.expectEmit(address(court));
        emit IDisputeCourtEvents.CaseClosed(_fraudLeaf, overturned, overturned ? ACCEPTED : FRAUD, returned);
        court.close(outcome);

        assertEq(token.balanceOf(challenger), WALLET - CHALLENGE_BOND + returned, "bond");
        assertEq(token.totalSupply(), SUPPLY - CHALLENGE_BOND + returned, "a lost bond is burned: no juror gains");
        assertEq(token.balanceOf(address(court)), 0, "nothing stays");
        assertEq(court.effectiveVerdict(_fraudLeaf, FRAUD), overturned ? ACCEPTED : FRAUD, "verdict");
        assertEq(ledger.standingOf(outcome).verdict, overturned ? ACCEPTED : FRAUD, "and the ledger knows");
        assertEq(vault.accountOf(alice).openCases, 0, "no case holds the worker's stake");
    }

    function testFuzz_close_upholdsAndReturnsTheBond_whenNobodyWasDrawn(address caller, uint256 waited) public {
        _challenge(ALICE_FRAUD, ACCEPTED);
        waited = waited % 2 == 0 ? JURY_TIME : bound(waited, JURY_TIME, 100 days);
        vm.warp(block.timestamp + waited);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        vm.expectEmit(address(court));
        emit IDisputeCourtEvents.CaseClosed(_fraudLeaf, false, FRAUD, CHALLENGE_BOND);
        vm.prank(caller);
        court.close(outcome);
        assertEq(token.balanceOf(challenger), WALLET, "bond is back");
    }

    function test_close_endsACase_thatNobodyMaySitOn() public {
        _judge(_one(_record(bob, 2, 0, ACCEPTED)), 5);
        _challenge(0, REJECTED);
        vm.warp(block.timestamp + JURY_TIME);
        _close(0);
        _passChallengeWindow();
        assertTrue(ledger.standingOf(_outcomeAt(0)).isFinal, "nothing is held up");
    }

    // ------------------------------------------------- what an overturn gives back

    function testFuzz_overturnedFraud_isUndone(bool executedFirst, bool exact) public {
        IContributionLedger.Outcome memory outcome = _outcome(alice, 1, 0, FRAUD);
        if (exact) outcome.reason = 30;
        _judge(_one(_pack(outcome)), QUORUM);
        if (executedFirst) _execute(alice, 0, aliceNodeKey);
        _challengeAndDraw(0, ACCEPTED);
        if (!executedFirst) _execute(alice, 0, aliceNodeKey);
        _voteAll(_fraudLeaf, true, true, false);
        _close(0);
        assertEq(vault.activeStake(alice), REQUIRED_STAKE, "stake is back");
        assertTrue(workers.isActive(alice), "acquitted");
        assertEq(workers.workerOf(alice).convictions, 0, "nothing stands");
        _passChallengeWindow();
        assertEq(escrow.claim(_claimsOf(0)), 1000 * uint256(PRICE), "and paid");
    }

    function test_overturnedFraud_cannotBeExecuted() public {
        _decide(ALICE_FRAUD, REJECTED, true);
        IContributionLedger.Submission memory submission = _submission(alice, 1, 0);
        bytes memory signature = _signSubmission(submission, aliceNodeKey);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerNotFraud.selector, _batchId, 0, REJECTED)
        );
        ledger.executeFraud(outcome, submission, signature);
    }

    function test_overturnedFraud_isUndone_whenThereWasNothingToSlash() public {
        vm.prank(alice);
        vault.requestUnbond(REQUIRED_STAKE);
        vm.warp(block.timestamp + UNBONDING_PERIOD);
        vm.prank(alice);
        vault.withdraw();
        _judge(_one(_record(alice, 1, 0, FRAUD)), QUORUM);
        _execute(alice, 0, aliceNodeKey);
        _decide(0, REJECTED, true);
        _assertStatus(alice, IWorkerRegistry.Status.Jailed, "what she was before");
        assertEq(workers.workerOf(alice).convictions, 0, "acquitted");
    }

    /// @dev One file, an exact fraud in one batch and a statistical one in another: the second is overturned.
    ///      The case must close whichever of the two was executed.
    function testFuzz_overturnedFraud_isUndone_whicheverBatchWasExecuted(bool exactFirst) public {
        IContributionLedger.Outcome memory outcome = _outcome(alice, 1, 0, FRAUD);
        outcome.reason = exactFirst ? 30 : 60;
        _judge(_one(_pack(outcome)), QUORUM);
        _execute(alice, 0, aliceNodeKey);
        outcome.reason = exactFirst ? 60 : 30;
        _judge(_one(_pack(outcome)), QUORUM);
        _decide(0, ACCEPTED, true);
        assertEq(vault.activeStake(alice), REQUIRED_STAKE, "the file is no fraud");
        _assertStatus(alice, IWorkerRegistry.Status.Active, "acquitted");
    }

    function testFuzz_close_leavesAReleasedEscrow(bool twice) public {
        _execute(alice, ALICE_FRAUD, aliceNodeKey);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        _passChallengeWindow();
        ledger.finaliseFraud(outcome);
        uint256 left = vault.activeStake(alice);
        _judge(_one(_record(alice, 1, 0, FRAUD)), QUORUM);
        _decide(0, twice ? REJECTED : ACCEPTED, true);
        assertEq(vault.activeStake(alice), left, "what was final stays");
        assertEq(workers.workerOf(alice).convictions, 1, "convicted");
    }

    function testFuzz_upheldFraud_staysSlashed(bool tie) public {
        uint256 amount = _execute(alice, ALICE_FRAUD, aliceNodeKey);
        _challengeAndDraw(ALICE_FRAUD, ACCEPTED);
        _commitVote(_fraudLeaf, validators[2], tie);
        _commitVote(_fraudLeaf, validators[3], false);
        vm.warp(block.timestamp + COMMIT_TIME);
        _revealVote(_fraudLeaf, validators[2], tie);
        _revealVote(_fraudLeaf, validators[3], false);
        vm.warp(block.timestamp + REVEAL_TIME);
        _close(ALICE_FRAUD);
        _passChallengeWindow();
        ledger.finaliseFraud(_outcomeAt(ALICE_FRAUD));
        assertEq(vault.activeStake(alice), REQUIRED_STAKE - amount, "slashed");
        _assertStatus(alice, IWorkerRegistry.Status.Jailed, "jailed");
    }

    function test_challengedFraud_doesNotRewardItsChallenger() public {
        _challenge(ALICE_FRAUD, ACCEPTED);
        _execute(alice, ALICE_FRAUD, aliceNodeKey);
        assertEq(vault.escrowOf(_offence(ALICE_FRAUD)).reporter, address(0), "it contests the fraud");
    }

    function test_openCase_holdsTheEscrow() public {
        _execute(alice, ALICE_FRAUD, aliceNodeKey);
        vm.warp(block.timestamp + CHALLENGE_WINDOW - 1);
        _challenge(ALICE_FRAUD, ACCEPTED);
        vm.warp(block.timestamp + 1);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerNotFinal.selector, _batchId, 0));
        ledger.finaliseFraud(outcome);
    }

    // ------------------------------------------------------ what an overturn takes

    function test_overturnedAcceptance_holdsTheWorkersStake_andIsSlashed() public {
        _challengeAndDraw(BOB_ACCEPTED, FRAUD);
        IContributionLedger.Submission memory submission = _submission(bob, 1, 0);
        bytes memory signature = _signSubmission(submission, bobNodeKey);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(BOB_ACCEPTED);
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerNotFraud.selector, _batchId, 1, ACCEPTED)
        );
        ledger.executeFraud(outcome, submission, signature);

        _voteAll(_acceptedLeaf, true, true, true);
        vm.expectEmit(address(vault));
        emit IStakeVaultEvents.StakeHeld(bob, block.timestamp + CHALLENGE_WINDOW + SLASH_PAUSE, 0);
        court.close(outcome);
        uint256 amount = ledger.executeFraud(outcome, submission, signature);
        assertEq(vault.escrowOf(_offence(BOB_ACCEPTED)).reporter, challenger, "the challenger reported it");
        _passChallengeWindow();
        ledger.finaliseFraud(outcome);
        assertEq(token.balanceOf(challenger), WALLET + amount * REPORTER_PPM / PPM, "rewarded");
    }

    function testFuzz_overturnedAcceptance_isNotPaid(uint8 claimed) public {
        claimed = uint8(bound(claimed, INCOMPLETE, FRAUD));
        _decide(BOB_ACCEPTED, claimed, true);
        _passChallengeWindow();
        IRewardEscrow.Claim[] memory claims = _claimsOf(BOB_ACCEPTED);
        vm.expectRevert(abi.encodeWithSelector(IRewardEscrowErrors.EscrowNotAccepted.selector, _batchId, 1, claimed));
        escrow.claim(claims);
    }

    function testFuzz_overturnedRejection_isPaid(uint8 recorded) public {
        recorded = uint8(bound(recorded, INCOMPLETE, FRAUD));
        _judge(_one(_record(bob, 1, 0, recorded)), QUORUM);
        _decide(0, ACCEPTED, true);
        _passChallengeWindow();
        assertEq(escrow.claim(_claimsOf(0)), 1000 * uint256(PRICE), "paid");
        assertEq(uint8(vault.escrowOf(_offence(0)).status), uint8(IStakeVault.EscrowStatus.None), "nothing slashed");
    }
}
