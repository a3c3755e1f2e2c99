// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IERC20Errors} from "@openzeppelin/contracts/interfaces/draft-IERC6093.sol";

import {DisputeCourt} from "../../src/DisputeCourt.sol";
import {IContributionLedger, IContributionLedgerErrors} from "../../src/interfaces/IContributionLedger.sol";
import {IDisputeCourt, IDisputeCourtErrors, IDisputeCourtEvents} from "../../src/interfaces/IDisputeCourt.sol";
import {IStakeVaultEvents} from "../../src/interfaces/IStakeVault.sol";
import {CourtTest} from "../CourtTest.sol";

contract DisputeCourtChallengeTest is CourtTest {
    // -------------------------------------------------------------- construction

    function testFuzz_constructor_reverts_whenAPhaseOrTheJuryIsEmpty(uint256 which) public {
        IDisputeCourt.Terms memory terms = _courtTerms();
        bytes32[4] memory names = [bytes32("drawDelay"), "jurySize", "commitTime", "revealTime"];
        which = bound(which, 0, 3);
        if (which == 0) terms.drawDelay = 0;
        if (which == 1) terms.jurySize = 0;
        if (which == 2) terms.commitTime = 0;
        if (which == 3) terms.revealTime = 0;
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtInvalidParameter.selector, names[which]));
        new DisputeCourt(token, runs, workers, vault, ledger, terms);
    }

    function test_constructor_keepsItsParameters() public view {
        assertEq(address(court.token()), address(token), "token");
        assertEq(address(court.runs()), address(runs), "runs");
        assertEq(address(court.workers()), address(workers), "workers");
        assertEq(address(court.vault()), address(vault), "vault");
        assertEq(address(court.ledger()), address(ledger), "ledger");
        assertEq(keccak256(abi.encode(court.terms())), keccak256(abi.encode(_courtTerms())), "terms");
        assertEq(court.juryTime(), JURY_TIME, "jury time");
    }

    // ----------------------------------------------------------------- challenge

    function testFuzz_challenge_reverts_afterTheWindow(uint256 waited) public {
        // Often the first second in which the outcome is final.
        waited = waited % 2 == 0 ? CHALLENGE_WINDOW : bound(waited, CHALLENGE_WINDOW, 100 days);
        uint256 closedAt = block.timestamp + CHALLENGE_WINDOW;
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        vm.warp(block.timestamp + waited);
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtWindowClosed.selector, _fraudLeaf, closedAt));
        vm.prank(challenger);
        court.challenge(outcome, ACCEPTED);
    }

    function testFuzz_challenge_reverts_whenClaimIsInvalid(uint8 claimed) public {
        claimed = claimed == 0 ? 0 : uint8(bound(claimed, FRAUD, 255));
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtInvalidClaim.selector, FRAUD, claimed));
        vm.prank(challenger);
        court.challenge(outcome, claimed);
    }

    function testFuzz_challenge_reverts_whenProofIsBroken(bytes32 sibling) public {
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        vm.assume(sibling != outcome.proof[0]);
        outcome.proof[0] = sibling;
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidProof.selector, _batchId, 0));
        vm.prank(challenger);
        court.challenge(outcome, ACCEPTED);
    }

    function testFuzz_challenge_reverts_whenTheHeaderIsAnother(uint88 signers) public {
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        vm.assume(signers != outcome.batch.signers);
        outcome.batch.signers = signers;
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerBatchMismatch.selector, _batchId));
        vm.prank(challenger);
        court.challenge(outcome, ACCEPTED);
    }

    function testFuzz_challenge_reverts_twice(bool closed, address second) public {
        _challenge(ALICE_FRAUD, ACCEPTED);
        if (closed) {
            vm.warp(block.timestamp + JURY_TIME);
            court.close(_outcomeAt(ALICE_FRAUD));
        }
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtCaseExists.selector, _fraudLeaf));
        vm.prank(second);
        court.challenge(outcome, REJECTED);
    }

    function test_challenge_reverts_withoutTheBond() public {
        address poor = makeAddr("poor");
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        vm.expectRevert(
            abi.encodeWithSelector(IERC20Errors.ERC20InsufficientAllowance.selector, address(court), 0, CHALLENGE_BOND)
        );
        vm.prank(poor);
        court.challenge(outcome, ACCEPTED);
    }

    function testFuzz_challenge_opensACase(uint8 claimed, uint256 waited) public {
        claimed = uint8(bound(claimed, ACCEPTED, REJECTED));
        vm.warp(block.timestamp + bound(waited, 0, CHALLENGE_WINDOW - 1));
        uint256 drawBlock = block.number + DRAW_DELAY;
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        vm.expectEmit(address(court));
        emit IDisputeCourtEvents.CaseOpened(_fraudLeaf, _batchId, challenger, 0, FRAUD, claimed, drawBlock);
        vm.expectEmit(address(vault));
        emit IStakeVaultEvents.StakeHeld(alice, 0, 1);
        vm.prank(challenger);
        court.challenge(outcome, claimed);
        _assertOpened(court.caseOf(_fraudLeaf), claimed, drawBlock);
    }

    function _assertOpened(IDisputeCourt.Case memory opened, uint8 claimed, uint256 drawBlock) private view {
        assertEq(opened.challenger, challenger, "challenger");
        assertEq(opened.batchId, _batchId, "batch");
        assertEq(opened.recordedVerdict, FRAUD, "recorded");
        assertEq(opened.claimedVerdict, claimed, "claimed");
        assertEq(opened.runId, runId, "run");
        assertEq(uint8(opened.status), uint8(IDisputeCourt.CaseStatus.Open), "open");
        assertEq(opened.openedAt, block.timestamp, "opened at");
        assertEq(opened.drawBlock, drawBlock, "draw block");
        assertEq(opened.jury, 0, "no jury yet");
        assertTrue(court.isOpen(_fraudLeaf), "is open");
        assertEq(court.challengerOf(_fraudLeaf), challenger, "challenger of");
        assertEq(token.balanceOf(challenger), WALLET - CHALLENGE_BOND, "paid");
        assertEq(court.effectiveVerdict(_fraudLeaf, FRAUD), FRAUD, "the recorded verdict stands meanwhile");
        assertTrue(ledger.isDisputed(batches[_batchId]), "the batch knows");
    }

    function test_challenge_holdsUpSettlement_ofThisOutcomeOnly() public {
        vm.warp(block.timestamp + CHALLENGE_WINDOW - 1);
        _challenge(BOB_ACCEPTED, REJECTED);
        vm.warp(block.timestamp + 1);
        assertFalse(ledger.standingOf(_outcomeAt(BOB_ACCEPTED)).isFinal, "under dispute");
        assertTrue(ledger.standingOf(_outcomeAt(ALICE_FRAUD)).isFinal, "its neighbour is not");
    }

    /// @dev What is overdue stands as claimed, and can be challenged as such.
    function testFuzz_challenge_reachesWhatIsOverdue(uint256 waited) public {
        IContributionLedger.Submission memory submission = _submission(alice, 3, 0);
        bytes32 submissionLeaf = keccak256(abi.encode(_submissionHash(submission)));
        uint64 batchId = _commitRoot(submissionLeaf, 1, 1000);
        IContributionLedger.OutcomeProof memory outcome;
        outcome.batch = batches[batchId];
        outcome.record = _record(alice, 3, 0, ACCEPTED);
        bytes32 leaf = keccak256(abi.encodePacked(batchId, submissionLeaf));

        uint256 dueAt = block.timestamp + OUTCOME_DEADLINE;
        vm.warp(dueAt - 1);
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerOutcomesPending.selector, batchId, dueAt)
        );
        vm.prank(challenger);
        court.challenge(outcome, FRAUD);

        vm.warp(dueAt + bound(waited, 0, CHALLENGE_WINDOW - 1));
        vm.prank(challenger);
        court.challenge(outcome, FRAUD);
        assertTrue(court.isOpen(leaf), "under the name of an overdue submission");
    }
}
