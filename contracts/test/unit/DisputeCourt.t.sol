// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IContributionLedger, IContributionLedgerErrors} from "../../src/interfaces/IContributionLedger.sol";
import {IDisputeCourt, IDisputeCourtErrors, IDisputeCourtEvents} from "../../src/interfaces/IDisputeCourt.sol";
import {IRewardEscrowErrors} from "../../src/interfaces/IRewardEscrow.sol";
import {IWorkerRegistry} from "../../src/interfaces/IWorkerRegistry.sol";
import {BaseTest} from "../BaseTest.sol";

/// @dev Validators 0 and 1 sign outcomes, so 2 and 3 are the jurors.
contract DisputeCourtTest is BaseTest {
    bytes[] private _records;
    uint64 private _batchId;
    bytes32 private _fraudLeaf;
    bytes32 private _acceptedLeaf;

    function setUp() public override {
        super.setUp();
        _startRun(WALLET / 2);
        _records = _two(_record(alice, 1, 0, FRAUD), _record(bob, 1, 0, ACCEPTED));
        _batchId = _commitAndPost(_records);
        _fraudLeaf = _leaf(_batchId, 0, _records[0]);
        _acceptedLeaf = _leaf(_batchId, 1, _records[1]);
    }

    function _challenge(uint256 position, uint8 claimed) private {
        IContributionLedger.OutcomeProof memory outcome = _prove(_batchId, _records, position);
        vm.prank(challenger);
        court.challenge(outcome, claimed);
    }

    function _vote(uint256 validator, bytes32 leaf, bool overturn) private {
        vm.prank(validators[validator]);
        court.vote(leaf, overturn);
    }

    function _close(uint256 position) private {
        court.close(_prove(_batchId, _records, position));
    }

    function _execute(address worker, uint256 position, uint256 nodeKey) private returns (uint256) {
        IContributionLedger.Submission memory submission = _submission(worker, 1, 0);
        return
            ledger.executeFraud(_prove(_batchId, _records, position), submission, _signSubmission(submission, nodeKey));
    }

    function _claim(uint256 position) private returns (uint256) {
        IContributionLedger.OutcomeProof[] memory outcomes = new IContributionLedger.OutcomeProof[](1);
        outcomes[0] = _prove(_batchId, _records, position);
        return escrow.claim(outcomes);
    }

    // ---------------------------------------------------------------- challenge

    function testFuzz_challenge_reverts_afterTheWindow(uint256 waited) public {
        // Often the first second in which the outcome is final.
        waited = waited % 2 == 0 ? CHALLENGE_WINDOW : bound(waited, CHALLENGE_WINDOW, 100 days);
        uint256 closedAt = block.timestamp + CHALLENGE_WINDOW;
        IContributionLedger.OutcomeProof memory outcome = _prove(_batchId, _records, 0);
        vm.warp(block.timestamp + waited);
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtWindowClosed.selector, _batchId, closedAt));
        vm.prank(challenger);
        court.challenge(outcome, ACCEPTED);
    }

    function testFuzz_challenge_reverts_whenClaimIsInvalid(uint8 claimed) public {
        vm.assume(claimed == 0 || claimed >= FRAUD);
        IContributionLedger.OutcomeProof memory outcome = _prove(_batchId, _records, 0);
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtInvalidClaim.selector, FRAUD, claimed));
        vm.prank(challenger);
        court.challenge(outcome, claimed);
    }

    function testFuzz_challenge_reverts_whenProofIsBroken(bytes32 sibling) public {
        IContributionLedger.OutcomeProof memory outcome = _prove(_batchId, _records, 0);
        vm.assume(sibling != outcome.proof[0]);
        outcome.proof[0] = sibling;
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidProof.selector, _batchId, 0));
        vm.prank(challenger);
        court.challenge(outcome, ACCEPTED);
    }

    function testFuzz_challenge_reverts_twice(bool closed) public {
        _challenge(0, ACCEPTED);
        if (closed) {
            vm.warp(block.timestamp + JURY_TIME);
            _close(0);
        }
        IContributionLedger.OutcomeProof memory outcome = _prove(_batchId, _records, 0);
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtCaseExists.selector, _fraudLeaf));
        vm.prank(challenger);
        court.challenge(outcome, REJECTED);
    }

    function testFuzz_challenge_opensACase(uint8 claimed, uint256 waited) public {
        claimed = uint8(bound(claimed, ACCEPTED, REJECTED));
        vm.warp(block.timestamp + bound(waited, 0, CHALLENGE_WINDOW - 1));
        IContributionLedger.OutcomeProof memory outcome = _prove(_batchId, _records, 0);
        vm.expectEmit(address(court));
        emit IDisputeCourtEvents.CaseOpened(_fraudLeaf, _batchId, challenger, 0, claimed, CHALLENGE_BOND);
        vm.prank(challenger);
        court.challenge(outcome, claimed);

        IDisputeCourt.Case memory opened = court.caseOf(_fraudLeaf);
        assertEq(opened.challenger, challenger, "challenger");
        assertEq(opened.runId, runId, "run");
        assertEq(opened.votingEndsAt, block.timestamp + JURY_TIME, "votes until");
        assertEq(opened.recordedVerdict, FRAUD, "recorded");
        assertEq(opened.claimedVerdict, claimed, "claimed");
        assertEq(opened.bond, CHALLENGE_BOND, "bond");
        assertTrue(court.isOpen(_fraudLeaf), "open");
        assertEq(token.balanceOf(challenger), WALLET - CHALLENGE_BOND, "paid");
        assertEq(court.effectiveVerdict(_fraudLeaf, FRAUD), FRAUD, "the recorded verdict stands meanwhile");
    }

    function test_challenge_holdsUpSettlement_ofThisOutcomeOnly() public {
        vm.warp(block.timestamp + CHALLENGE_WINDOW - 1);
        _challenge(1, REJECTED);
        vm.warp(block.timestamp + 1);
        assertFalse(ledger.isFinal(_batchId, _acceptedLeaf), "under dispute");
        assertTrue(ledger.isFinal(_batchId, _fraudLeaf), "its neighbour is not");
        vm.expectPartialRevert(IRewardEscrowErrors.EscrowNotFinal.selector);
        this.claimExternally(1);
    }

    /// @dev Lets a revert of a helper be expected.
    function claimExternally(uint256 position) external {
        _claim(position);
    }

    // --------------------------------------------------------------------- vote

    function testFuzz_vote_reverts_withoutACase(bytes32 leaf, bool overturn) public {
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtNoOpenCase.selector, leaf));
        _vote(2, leaf, overturn);
    }

    function testFuzz_vote_reverts_whenNotAJuror(address caller, bool overturn) public {
        vm.assume(caller != validators[2] && caller != validators[3]);
        _challenge(0, ACCEPTED);
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtNotJuror.selector, _fraudLeaf, caller));
        vm.prank(caller);
        court.vote(_fraudLeaf, overturn);
    }

    function testFuzz_vote_reverts_whenTheJurorSigned(uint256 signer, bool overturn) public {
        signer = bound(signer, 0, 1);
        _challenge(0, ACCEPTED);
        vm.expectRevert(
            abi.encodeWithSelector(IDisputeCourtErrors.CourtNotJuror.selector, _fraudLeaf, validators[signer])
        );
        _vote(signer, _fraudLeaf, overturn);
    }

    function test_vote_reverts_whenTheJurorChallenged() public {
        IContributionLedger.OutcomeProof memory outcome = _prove(_batchId, _records, 0);
        vm.prank(validators[2]);
        court.challenge(outcome, ACCEPTED);
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtNotJuror.selector, _fraudLeaf, validators[2]));
        _vote(2, _fraudLeaf, true);
    }

    function test_vote_reverts_whenASignerReturnsAfterRotation() public {
        _challenge(0, ACCEPTED);
        _deposit(stranger, REQUIRED_VALIDATOR_STAKE);
        vm.startPrank(owner);
        runs.rotateValidator(runId, validators[0], stranger);
        runs.rotateValidator(runId, validators[3], validators[0]);
        vm.stopPrank();
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtNotJuror.selector, _fraudLeaf, validators[0]));
        _vote(0, _fraudLeaf, false);
    }

    function testFuzz_vote_reverts_twice(bool first, bool second) public {
        _challenge(0, ACCEPTED);
        _vote(2, _fraudLeaf, first);
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtNotJuror.selector, _fraudLeaf, validators[2]));
        _vote(2, _fraudLeaf, second);
    }

    function testFuzz_vote_reverts_whenTimeIsOver(uint256 waited) public {
        _challenge(0, ACCEPTED);
        uint256 endedAt = block.timestamp + JURY_TIME;
        vm.warp(block.timestamp + bound(waited, JURY_TIME, 100 days));
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtVotingOver.selector, _fraudLeaf, endedAt));
        _vote(2, _fraudLeaf, true);
    }

    function testFuzz_vote_counts(bool first, bool second) public {
        _challenge(0, ACCEPTED);
        vm.expectEmit(address(court));
        emit IDisputeCourtEvents.CaseVoted(_fraudLeaf, validators[2], first);
        _vote(2, _fraudLeaf, first);
        _vote(3, _fraudLeaf, second);
        IDisputeCourt.Case memory voted = court.caseOf(_fraudLeaf);
        assertEq(voted.votesToOverturn, (first ? 1 : 0) + (second ? 1 : 0), "for");
        assertEq(voted.votesToOverturn + voted.votesToUphold, 2, "all");
    }

    // -------------------------------------------------------------------- close

    function testFuzz_close_reverts_withoutACase(uint256 position) public {
        position = bound(position, 0, 1);
        IContributionLedger.OutcomeProof memory outcome = _prove(_batchId, _records, position);
        bytes32 leaf = position == 0 ? _fraudLeaf : _acceptedLeaf;
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtNoOpenCase.selector, leaf));
        court.close(outcome);
    }

    function testFuzz_close_reverts_whileJurorsMayVote(uint256 waited, bool oneVoted) public {
        _challenge(0, ACCEPTED);
        uint256 until = block.timestamp + JURY_TIME;
        if (oneVoted) _vote(2, _fraudLeaf, true);
        IContributionLedger.OutcomeProof memory outcome = _prove(_batchId, _records, 0);
        vm.warp(block.timestamp + bound(waited, 0, JURY_TIME - 1));
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtVotingOpen.selector, _fraudLeaf, until));
        court.close(outcome);
    }

    function test_close_reverts_twice() public {
        _challenge(0, ACCEPTED);
        vm.warp(block.timestamp + JURY_TIME);
        _close(0);
        IContributionLedger.OutcomeProof memory outcome = _prove(_batchId, _records, 0);
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtNoOpenCase.selector, _fraudLeaf));
        court.close(outcome);
    }

    function testFuzz_close_returnsTheBond_whenNobodyVotes(address caller, uint256 waited) public {
        _challenge(0, ACCEPTED);
        vm.warp(block.timestamp + bound(waited, JURY_TIME, 100 days));
        IContributionLedger.OutcomeProof memory outcome = _prove(_batchId, _records, 0);
        vm.expectEmit(address(court));
        emit IDisputeCourtEvents.CaseClosed(_fraudLeaf, false, FRAUD, CHALLENGE_BOND);
        vm.prank(caller);
        court.close(outcome);
        assertEq(token.balanceOf(challenger), WALLET, "bond is back");
        assertEq(court.effectiveVerdict(_fraudLeaf, FRAUD), FRAUD, "the recorded verdict stands");
    }

    function testFuzz_close_burnsTheBond_whenTheVerdictIsUpheld(bool tie) public {
        _challenge(0, ACCEPTED);
        _vote(2, _fraudLeaf, tie);
        _vote(3, _fraudLeaf, false);
        IContributionLedger.OutcomeProof memory outcome = _prove(_batchId, _records, 0);
        vm.expectEmit(address(court));
        emit IDisputeCourtEvents.CaseClosed(_fraudLeaf, false, FRAUD, 0);
        court.close(outcome);
        assertEq(token.balanceOf(challenger), WALLET - CHALLENGE_BOND, "bond is lost");
        assertEq(token.totalSupply(), SUPPLY - CHALLENGE_BOND, "burned: no juror gains");
        assertEq(token.balanceOf(address(court)), 0, "nothing stays");
    }

    function testFuzz_close_overturns_whenMoreVoteForIt(uint8 claimed, bool bothVote) public {
        claimed = uint8(bound(claimed, ACCEPTED, REJECTED));
        _challenge(0, claimed);
        _vote(2, _fraudLeaf, true);
        if (bothVote) _vote(3, _fraudLeaf, true);
        else vm.warp(block.timestamp + JURY_TIME);
        IContributionLedger.OutcomeProof memory outcome = _prove(_batchId, _records, 0);
        vm.expectEmit(address(court));
        emit IDisputeCourtEvents.CaseClosed(_fraudLeaf, true, claimed, CHALLENGE_BOND);
        court.close(outcome);
        assertEq(token.balanceOf(challenger), WALLET, "bond is back");
        assertEq(court.effectiveVerdict(_fraudLeaf, FRAUD), claimed, "the claim stands");
        (, IContributionLedger.Outcome memory settled,) = ledger.settledOutcome(outcome);
        assertEq(settled.verdict, claimed, "and the ledger knows");
    }

    function test_close_isPossibleAtOnce_whenThereIsNoJuror() public {
        bytes[] memory records = _one(_record(bob, 2, 0, ACCEPTED));
        uint64 batchId = _commit(1);
        _post(batchId, records, 4);
        IContributionLedger.OutcomeProof memory outcome = _prove(batchId, records, 0);
        vm.prank(challenger);
        court.challenge(outcome, REJECTED);
        court.close(outcome);
        assertEq(token.balanceOf(challenger), WALLET, "bond is back");
        _passChallengeWindow();
        assertTrue(ledger.isFinal(batchId, _leaf(batchId, 0, records[0])), "nothing is held up");
    }

    function test_close_doesNotWaitForAJurorThatChallenged() public {
        IContributionLedger.OutcomeProof memory outcome = _prove(_batchId, _records, 0);
        vm.prank(validators[2]);
        court.challenge(outcome, ACCEPTED);
        _vote(3, _fraudLeaf, true);
        court.close(outcome);
        assertTrue(court.caseOf(_fraudLeaf).overturned, "decided by the one juror");
    }

    // ------------------------------------------------------- what a verdict moves

    function testFuzz_overturnedFraud_isUndone(bool executedFirst) public {
        if (executedFirst) _execute(alice, 0, aliceNodeKey);
        _challenge(0, ACCEPTED);
        if (!executedFirst) _execute(alice, 0, aliceNodeKey);
        _vote(2, _fraudLeaf, true);
        _vote(3, _fraudLeaf, true);
        _close(0);
        assertEq(vault.activeStake(alice), REQUIRED_STAKE, "stake is back");
        assertTrue(workers.isActive(alice), "reinstated");
        _passChallengeWindow();
        assertEq(_claim(0), 1000 * uint256(PRICE), "and paid");
    }

    function test_overturnedFraud_cannotBeExecuted() public {
        _challenge(0, REJECTED);
        _vote(2, _fraudLeaf, true);
        _vote(3, _fraudLeaf, true);
        _close(0);
        IContributionLedger.Submission memory submission = _submission(alice, 1, 0);
        bytes memory signature = _signSubmission(submission, aliceNodeKey);
        IContributionLedger.OutcomeProof memory outcome = _prove(_batchId, _records, 0);
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
        _records = _one(_record(alice, 2, 0, FRAUD));
        _batchId = _commitAndPost(_records);
        _fraudLeaf = _leaf(_batchId, 0, _records[0]);
        IContributionLedger.Submission memory submission = _submission(alice, 2, 0);
        ledger.executeFraud(_prove(_batchId, _records, 0), submission, _signSubmission(submission, aliceNodeKey));
        _challenge(0, REJECTED);
        _vote(2, _fraudLeaf, true);
        _vote(3, _fraudLeaf, true);
        _close(0);
        _assertStatus(alice, IWorkerRegistry.Status.Jailed, "what she was before");
    }

    function test_upheldFraud_staysSlashed() public {
        uint256 amount = _execute(alice, 0, aliceNodeKey);
        _challenge(0, ACCEPTED);
        _vote(2, _fraudLeaf, false);
        _vote(3, _fraudLeaf, false);
        _close(0);
        _passChallengeWindow();
        ledger.finaliseFraud(_prove(_batchId, _records, 0));
        assertEq(vault.activeStake(alice), REQUIRED_STAKE - amount, "slashed");
        _assertStatus(alice, IWorkerRegistry.Status.Banned, "banned");
    }

    function test_challengedFraud_doesNotRewardItsChallenger() public {
        _challenge(0, ACCEPTED);
        _execute(alice, 0, aliceNodeKey);
        assertEq(vault.escrowOf(_fraudLeaf).reporter, address(0), "it contests the fraud, it did not report it");
    }

    function test_openCase_holdsTheEscrow() public {
        _execute(alice, 0, aliceNodeKey);
        vm.warp(block.timestamp + CHALLENGE_WINDOW - 1);
        _challenge(0, ACCEPTED);
        vm.warp(block.timestamp + 1);
        IContributionLedger.OutcomeProof memory outcome = _prove(_batchId, _records, 0);
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerNotFinal.selector, _batchId, 0));
        ledger.finaliseFraud(outcome);
    }

    function test_overturnedAcceptance_isNotPaid_andFraudIsSlashed() public {
        _challenge(1, FRAUD);
        IContributionLedger.Submission memory submission = _submission(bob, 1, 0);
        bytes memory signature = _signSubmission(submission, bobNodeKey);
        IContributionLedger.OutcomeProof memory outcome = _prove(_batchId, _records, 1);
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerNotFraud.selector, _batchId, 1, ACCEPTED)
        );
        ledger.executeFraud(outcome, submission, signature);

        _vote(2, _acceptedLeaf, true);
        _vote(3, _acceptedLeaf, true);
        _close(1);
        uint256 amount = _execute(bob, 1, bobNodeKey);
        assertEq(vault.escrowOf(_acceptedLeaf).reporter, challenger, "the challenger reported it");
        _passChallengeWindow();
        vm.expectRevert(abi.encodeWithSelector(IRewardEscrowErrors.EscrowNotAccepted.selector, _batchId, 1, FRAUD));
        this.claimExternally(1);
        ledger.finaliseFraud(outcome);
        assertEq(token.balanceOf(challenger), WALLET + amount * REPORTER_PPM / PPM, "rewarded");
    }
}
