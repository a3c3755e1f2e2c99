// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IERC20Errors} from "@openzeppelin/contracts/interfaces/draft-IERC6093.sol";

import {DisputeCourt} from "../../src/DisputeCourt.sol";
import {IContributionLedger, IContributionLedgerErrors} from "../../src/interfaces/IContributionLedger.sol";
import {IDisputeCourt, IDisputeCourtErrors, IDisputeCourtEvents} from "../../src/interfaces/IDisputeCourt.sol";
import {BaseTest} from "../BaseTest.sol";
import {CourtTest} from "../CourtTest.sol";

/// @dev Announcing a claim and making it: who may, when, about what, and what it opens.
contract DisputeCourtClaimTest is CourtTest {
    /// @dev The arguments of one claim, ready before a revert is expected.
    struct Claimed {
        IContributionLedger.OutcomeProof outcome;
        IContributionLedger.Submission submission;
        bytes signature;
        uint16 ruling;
        bytes32 salt;
        string[] sources;
    }

    function _prepare(uint256 position, uint16 ruling) private view returns (Claimed memory c) {
        c.outcome = _outcomeAt(position);
        (c.submission, c.signature) = _evidence(position);
        (c.ruling, c.salt) = (ruling, SALT);
    }

    function _send(address who, Claimed memory c) private {
        vm.prank(who);
        court.claim(c.outcome, _held(c.outcome, c.submission, c.signature), c.ruling, c.salt, c.sources);
    }

    function _announcement(address who, bytes32 leaf, uint16 ruling, bytes32 salt) private pure returns (bytes32) {
        return keccak256(abi.encode(who, leaf, ruling, salt));
    }

    /// @dev The one record of the batch is Alice's, with this verdict and reason.
    function _judgeAlice(uint8 verdict, uint8 reason) private {
        IContributionLedger.Outcome memory outcome = _outcome(alice, 1, 0, verdict);
        outcome.reason = reason;
        _judge(_one(_pack(outcome)), QUORUM);
    }

    function _ruling(uint256 verdict, uint256 reason) private pure returns (uint16) {
        return uint16(verdict << 8 | reason);
    }

    /// @dev A reason that makes a fraud exact, or one that does not.
    function _reason(uint256 seed, bool exact) private pure returns (uint8) {
        if (exact) return uint8(bound(seed, 30, 59));
        return seed % 2 == 0 ? uint8(bound(seed, 0, 29)) : uint8(bound(seed, 60, 255));
    }

    function _expectInvalidRuling(uint16 recorded, uint16 ruling) private {
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtInvalidRuling.selector, recorded, ruling));
    }

    function _expectNotAnnounced(bytes32 announcement) private {
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtNotAnnounced.selector, announcement));
    }

    function _expectMayNotClaim(address claimant) private {
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtMayNotClaim.selector, _fraudLeaf, claimant));
    }

    function _expectWindowClosed(bytes32 leaf, uint256 closedAt) private {
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtWindowClosed.selector, leaf, closedAt));
    }

    // -------------------------------------------------------------- construction

    function _deployWith(IDisputeCourt.Terms memory terms) private returns (DisputeCourt) {
        return new DisputeCourt(DisputeCourt.Network(token, runs, workers, jury, vault, ledger, escrow), terms);
    }

    function testFuzz_constructor_reverts_whenAParameterIsInvalid(uint256 which, uint256 excess) public {
        IDisputeCourt.Terms memory terms = _courtTerms();
        bytes32[9] memory names = [
            bytes32("drawDelay"),
            "jurySize",
            "jurySize",
            "commitTime",
            "commitTime",
            "revealTime",
            "jurorFee",
            "wrongVerdictPpm",
            "absencePpm"
        ];
        which = bound(which, 0, 8);
        excess = bound(excess, 1, 1e30);
        if (which == 0) terms.drawDelay = 0;
        if (which == 1) terms.jurySize = 0;
        if (which == 2) (terms.jurySize, terms.jurorFee) = (64 + excess, 0);
        if (which == 3) terms.commitTime = 0;
        if (which == 4) terms.commitTime = 1;
        if (which == 5) terms.revealTime = 0;
        if (which == 6) terms.jurorFee = BOND / JURY_SIZE + excess;
        if (which == 7) terms.wrongVerdictPpm = PPM + excess;
        if (which == 8) terms.absencePpm = PPM + excess;
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtInvalidParameter.selector, names[which]));
        _deployWith(terms);
    }

    function test_constructor_takesTheLimits() public {
        IDisputeCourt.Terms memory terms = IDisputeCourt.Terms({
            bond: 64,
            jurorFee: 1,
            drawDelay: 1,
            jurySize: 64,
            commitTime: 2,
            revealTime: 1,
            wrongVerdictPpm: PPM,
            absencePpm: PPM
        });
        assertEq(keccak256(abi.encode(_deployWith(terms).terms())), keccak256(abi.encode(terms)), "terms");
    }

    function test_constructor_keepsItsParameters() public view {
        assertEq(address(court.token()), address(token), "token");
        assertEq(address(court.runs()), address(runs), "runs");
        assertEq(address(court.workers()), address(workers), "workers");
        assertEq(address(court.jurors()), address(jury), "jurors");
        assertEq(address(court.vault()), address(vault), "vault");
        assertEq(address(court.ledger()), address(ledger), "ledger");
        assertEq(address(court.escrow()), address(escrow), "escrow");
        assertEq(keccak256(abi.encode(court.terms())), keccak256(abi.encode(_courtTerms())), "terms");
        assertEq(court.juryTime(), JURY_TIME, "jury time");
    }

    // ------------------------------------------------------------------ announce

    function testFuzz_announce_saysWhoAndNothingElse(address who, bytes32 announcement) public {
        vm.expectEmit(address(court));
        emit IDisputeCourtEvents.ClaimAnnounced(announcement, who);
        vm.prank(who);
        court.announce(announcement);
    }

    /// @dev Whoever repeats an announcement, its author or another, does not move it.
    function testFuzz_announce_keepsTheFirstBlock(address other, uint256 blocks) public {
        uint256 first = block.number;
        _announce(challenger, _fraudLeaf, ACCEPT);
        vm.roll(block.number + bound(blocks, 0, 250));
        vm.prank(other);
        court.announce(_announcement(challenger, _fraudLeaf, ACCEPT, SALT));
        vm.roll(block.number + 1);
        _claimAnnounced(challenger, ALICE_FRAUD, ACCEPT);
        assertEq(court.claimsOf(_fraudLeaf)[0].announcedIn, first, "the first time counts");
    }

    function test_claim_reverts_whenNotAnnounced() public {
        Claimed memory c = _prepare(ALICE_FRAUD, ACCEPT);
        _expectNotAnnounced(_announcement(challenger, _fraudLeaf, ACCEPT, SALT));
        _send(challenger, c);
    }

    function test_claim_reverts_whenAnnouncedInTheSameBlock() public {
        Claimed memory c = _prepare(ALICE_FRAUD, ACCEPT);
        bytes32 announcement = _announcement(challenger, _fraudLeaf, ACCEPT, SALT);
        vm.prank(challenger);
        court.announce(announcement);
        _expectNotAnnounced(announcement);
        _send(challenger, c);
    }

    /// @dev What was announced is a claim of one account, about one outcome, with one ruling and salt.
    function testFuzz_claim_reverts_whenAnythingAnnouncedDiffers(uint256 which, bytes32 salt) public {
        vm.assume(salt != SALT);
        which = bound(which, 0, 3);
        address who = which == 0 ? stranger : challenger;
        uint256 position = which == 1 ? BOB_ACCEPTED : ALICE_FRAUD;
        uint16 ruling = which == 2 ? _ruling(INCOMPLETE, 23) : REJECT;
        _announce(challenger, _fraudLeaf, REJECT);
        Claimed memory c = _prepare(position, ruling);
        if (which == 3) c.salt = salt;
        _expectNotAnnounced(_announcement(who, position == 0 ? _fraudLeaf : _acceptedLeaf, ruling, c.salt));
        _send(who, c);
    }

    function testFuzz_claim_works_whileItsAnnouncementHolds(uint256 blocks) public {
        uint256 last = block.number + court.ANNOUNCEMENT_BLOCKS();
        _announce(challenger, _fraudLeaf, ACCEPT);
        vm.roll(blocks % 2 == 0 ? last : bound(blocks, block.number, last));
        _claimAnnounced(challenger, ALICE_FRAUD, ACCEPT);
        assertTrue(court.isOpen(_fraudLeaf), "open");
    }

    /// @dev Nobody announces everything in advance, to be the first whatever comes.
    function testFuzz_claim_reverts_whenItsAnnouncementIsOld(uint256 blocks) public {
        uint256 tooLate = block.number + court.ANNOUNCEMENT_BLOCKS() + 1;
        Claimed memory c = _prepare(ALICE_FRAUD, ACCEPT);
        _announce(challenger, _fraudLeaf, ACCEPT);
        vm.roll(blocks % 2 == 0 ? tooLate : bound(blocks, tooLate, tooLate + 1_000_000));
        _expectNotAnnounced(_announcement(challenger, _fraudLeaf, ACCEPT, SALT));
        _send(challenger, c);
    }

    function test_announce_countsAnew_whenTheFirstIsOld() public {
        _announce(challenger, _fraudLeaf, ACCEPT);
        vm.roll(block.number + court.ANNOUNCEMENT_BLOCKS());
        uint256 again = block.number;
        _announce(challenger, _fraudLeaf, ACCEPT);
        _claimAnnounced(challenger, ALICE_FRAUD, ACCEPT);
        assertEq(court.claimsOf(_fraudLeaf)[0].announcedIn, again, "the second time");
    }

    // ---------------------------------------------------------------------- when

    function testFuzz_claim_reverts_afterTheWindow(uint256 waited) public {
        // Often the first second in which the outcome is final.
        waited = waited % 2 == 0 ? CHALLENGE_WINDOW : bound(waited, CHALLENGE_WINDOW, 100 days);
        uint256 closedAt = block.timestamp + CHALLENGE_WINDOW;
        Claimed memory c = _prepare(ALICE_FRAUD, ACCEPT);
        _announce(challenger, _fraudLeaf, ACCEPT);
        vm.warp(block.timestamp + waited);
        _expectWindowClosed(_fraudLeaf, closedAt);
        _send(challenger, c);
    }

    /// @dev A pause of slashing prolongs the window of frauds, by a window after the pause.
    function testFuzz_claim_works_afterAPauseThatMetTheWindow(uint256 waited) public {
        uint256 closesAt = _pauseSlashing() + CHALLENGE_WINDOW;
        Claimed memory c = _prepare(ALICE_FRAUD, ACCEPT);
        _announce(challenger, _fraudLeaf, ACCEPT);
        vm.warp(bound(waited, block.timestamp + CHALLENGE_WINDOW, closesAt - 1));
        _send(challenger, c);
        assertTrue(court.isOpen(_fraudLeaf), "open");
    }

    function test_claim_reverts_afterAPauseAndAWindow() public {
        uint256 closesAt = _pauseSlashing() + CHALLENGE_WINDOW;
        Claimed memory c = _prepare(ALICE_FRAUD, ACCEPT);
        _announce(challenger, _fraudLeaf, ACCEPT);
        vm.warp(closesAt);
        _expectWindowClosed(_fraudLeaf, closesAt);
        _send(challenger, c);
    }

    function test_claim_reverts_afterTheWindow_ofAnAcceptanceThatAPauseMet() public {
        uint256 closedAt = block.timestamp + CHALLENGE_WINDOW;
        _pauseSlashing();
        Claimed memory c = _prepare(BOB_ACCEPTED, REJECT);
        _announce(challenger, _acceptedLeaf, REJECT);
        vm.warp(closedAt);
        _expectWindowClosed(_acceptedLeaf, closedAt);
        _send(challenger, c);
    }

    // ---------------------------------------------------------------- what ruling

    function testFuzz_claim_reverts_whenTheRulingIsNoVerdict(uint8 verdict, uint8 reason) public {
        verdict = verdict <= FRAUD ? 0 : verdict;
        uint16 ruling = _ruling(verdict, reason);
        Claimed memory c = _prepare(ALICE_FRAUD, ruling);
        _announce(challenger, _fraudLeaf, ruling);
        _expectInvalidRuling(STATISTICAL, ruling);
        _send(challenger, c);
    }

    /// @dev Whatever the two reasons, as long as they cost the same.
    function testFuzz_claim_reverts_whenTheRulingIsRecorded(uint8 verdict, uint256 was, uint256 claimed, bool exact)
        public
    {
        verdict = uint8(bound(verdict, ACCEPTED, FRAUD));
        uint8 recordedReason = verdict == FRAUD ? _reason(was, exact) : uint8(was);
        uint16 ruling = _ruling(verdict, verdict == FRAUD ? _reason(claimed, exact) : uint8(claimed));
        _judgeAlice(verdict, recordedReason);
        Claimed memory c = _prepare(0, ruling);
        _announce(challenger, _fraudLeaf, ruling);
        _expectInvalidRuling(_ruling(verdict, recordedReason), ruling);
        _send(challenger, c);
    }

    function testFuzz_claim_works_whenOneFraudIsExactAndTheOtherIsNot(uint256 was, uint256 claimed, bool exact) public {
        _judgeAlice(FRAUD, _reason(was, exact));
        _challenge(0, _ruling(FRAUD, _reason(claimed, !exact)));
        assertTrue(court.isOpen(_fraudLeaf), "they cost differently");
    }

    // ---------------------------------------------------------------- what outcome

    function testFuzz_claim_reverts_whenTheProofIsBroken(bytes32 sibling) public {
        Claimed memory c = _prepare(ALICE_FRAUD, ACCEPT);
        vm.assume(sibling != c.outcome.proof[0]);
        c.outcome.proof[0] = sibling;
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidProof.selector, _batchId, 0));
        _send(challenger, c);
    }

    function testFuzz_claim_reverts_whenTheHeaderIsAnother(uint88 signers) public {
        Claimed memory c = _prepare(ALICE_FRAUD, ACCEPT);
        vm.assume(signers != c.outcome.batch.signers);
        c.outcome.batch.signers = signers;
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerBatchMismatch.selector, _batchId));
        _send(challenger, c);
    }

    function test_claim_reverts_whenNothingIsJudged() public {
        Claimed memory c = _prepare(ALICE_FRAUD, ACCEPT);
        uint64 batchId = _commit(2);
        c.outcome.batch = batches[batchId];
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerNotJudged.selector, batchId));
        _send(challenger, c);
    }

    function testFuzz_claim_reverts_whenTheSubmissionIsAnother(uint256 which) public {
        Claimed memory c = _prepare(ALICE_FRAUD, ACCEPT);
        which = bound(which, 0, 4);
        if (which == 0) c.submission.runId += 1;
        if (which == 1) c.submission.step += 1;
        if (which == 2) c.submission.index += 1;
        if (which == 3) c.submission.policyVersion += 1;
        if (which == 4) c.submission.fileHash = keccak256("another file");
        c.signature = _signSubmission(c.submission, aliceNodeKey);
        _announce(challenger, _fraudLeaf, ACCEPT);
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidSubmission.selector, alice, aliceNode)
        );
        _send(challenger, c);
    }

    function testFuzz_claim_reverts_whenAnotherKeySigned(uint256 key) public {
        key = bound(key, 1, 1 << 200);
        vm.assume(key != aliceNodeKey);
        Claimed memory c = _prepare(ALICE_FRAUD, ACCEPT);
        c.signature = _signSubmission(c.submission, key);
        _announce(challenger, _fraudLeaf, ACCEPT);
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidSubmission.selector, alice, vm.addr(key))
        );
        _send(challenger, c);
    }

    // ----------------------------------------------------------------------- who

    function testFuzz_claim_reverts_forJurors(uint256 which) public {
        address juror = jurors[which % 5];
        Claimed memory c = _prepare(ALICE_FRAUD, ACCEPT);
        _announce(juror, _fraudLeaf, ACCEPT);
        _expectMayNotClaim(juror);
        _send(juror, c);
    }

    function test_claim_works_forWhoLeftTheBench() public {
        vm.prank(jurors[0]);
        jury.leave();
        vm.warp(block.timestamp + 1);
        _claimBy(jurors[0], ALICE_FRAUD, ACCEPT);
        assertEq(court.claimsOf(_fraudLeaf)[0].claimant, jurors[0], "claimant");
    }

    /// @dev Who left after the opening may still be drawn: nobody votes for its own claim.
    function testFuzz_claim_reverts_forAJurorThatLeftAfterTheOpening(uint256 which, uint256 waited) public {
        address juror = jurors[which % 5];
        _challenge(ALICE_FRAUD, REJECT);
        Claimed memory c = _prepare(ALICE_FRAUD, ACCEPT);
        vm.warp(block.timestamp + bound(waited, 0, COMMIT_TIME - 1));
        vm.prank(juror);
        jury.leave();
        _announce(juror, _fraudLeaf, ACCEPT);
        _expectMayNotClaim(juror);
        _send(juror, c);
    }

    function test_claim_reverts_forAJurorThatLeavesInTheSecondOfTheOpening() public {
        Claimed memory c = _prepare(ALICE_FRAUD, ACCEPT);
        vm.prank(jurors[0]);
        jury.leave();
        _announce(jurors[0], _fraudLeaf, ACCEPT);
        _expectMayNotClaim(jurors[0]);
        _send(jurors[0], c);
    }

    function test_claim_reverts_withoutTheBond() public {
        address poor = makeAddr("poor");
        Claimed memory c = _prepare(ALICE_FRAUD, ACCEPT);
        _announce(poor, _fraudLeaf, ACCEPT);
        vm.expectRevert(
            abi.encodeWithSelector(IERC20Errors.ERC20InsufficientAllowance.selector, address(court), 0, BOND)
        );
        _send(poor, c);
    }

    // ------------------------------------------------------------------- opening

    function testFuzz_claim_opensACase(uint256 verdict, uint8 reason, uint256 waited) public {
        uint16 ruling = _ruling(bound(verdict, ACCEPTED, REJECTED), reason);
        Claimed memory c = _prepare(ALICE_FRAUD, ruling);
        uint256 announcedIn = block.number;
        _announce(challenger, _fraudLeaf, ruling);
        vm.warp(block.timestamp + bound(waited, 0, CHALLENGE_WINDOW - 1));
        vm.roll(block.number + bound(waited, 0, 250));
        uint256 drawBlock = block.number + DRAW_DELAY;
        vm.expectEmit(address(court));
        emit IDisputeCourtEvents.CaseOpened(_fraudLeaf, _batchId, runId, 1, 0, alice, STATISTICAL, drawBlock, 5);
        vm.expectEmit(address(court));
        emit IDisputeCourtEvents.Claimed(
            _fraudLeaf, challenger, ruling, _held(c.outcome, c.submission, c.signature), c.sources
        );
        _send(challenger, c);

        _assertOpened(drawBlock);
        IDisputeCourt.Claim memory made = court.claimsOf(_fraudLeaf)[0];
        assertEq(made.claimant, challenger, "claimant");
        assertEq(made.ruling, ruling, "ruling");
        assertEq(made.announcedIn, announcedIn, "announced in");
    }

    function _assertOpened(uint256 drawBlock) private view {
        IDisputeCourt.Case memory opened = court.caseOf(_fraudLeaf);
        assertEq(uint8(opened.status), uint8(IDisputeCourt.CaseStatus.Open), "open");
        assertEq(opened.recorded, STATISTICAL, "recorded");
        assertEq(opened.openedAt, block.timestamp, "opened at");
        assertEq(opened.number, 1, "number");
        assertEq(opened.runId, runId, "run");
        assertEq(opened.worker, alice, "worker");
        assertEq(opened.drawBlock, drawBlock, "draw block");
        assertEq(opened.places, 5, "places");
        assertEq(opened.jurors, 0, "no jury yet");
        assertEq(court.caseCount(), 1, "cases");
        assertTrue(court.isOpen(_fraudLeaf), "is open");
        assertEq(token.balanceOf(challenger), WALLET - BOND, "paid");
        assertEq(token.balanceOf(address(court)), BOND, "held");
        assertEq(ledger.standingOf(_outcomeAt(ALICE_FRAUD)).verdict, FRAUD, "the recorded verdict stands meanwhile");
        assertTrue(ledger.isDisputed(batches[_batchId]), "the batch knows");
    }

    function test_claim_numbersCases() public {
        _challenge(ALICE_FRAUD, ACCEPT);
        _challenge(BOB_ACCEPTED, REJECT);
        assertEq(court.caseOf(_acceptedLeaf).number, 2, "the second");
        assertEq(court.caseCount(), 2, "two");
    }

    function test_claim_holdsUpSettlement_ofThisOutcomeOnly() public {
        vm.warp(block.timestamp + CHALLENGE_WINDOW - 1);
        _challenge(BOB_ACCEPTED, REJECT);
        vm.warp(block.timestamp + 1);
        assertFalse(ledger.standingOf(_outcomeAt(BOB_ACCEPTED)).isFinal, "under dispute");
        assertTrue(ledger.standingOf(_outcomeAt(ALICE_FRAUD)).isFinal, "its neighbour is not");
    }

    // ------------------------------------------------------------------- joining

    /// @dev Also when the challenge window is over, which it is for whoever comes first.
    function testFuzz_claim_joinsACase(uint256 waited) public {
        vm.warp(block.timestamp + CHALLENGE_WINDOW - 1);
        _challenge(ALICE_FRAUD, ACCEPT);
        IDisputeCourt.Case memory before = court.caseOf(_fraudLeaf);
        vm.warp(block.timestamp + bound(waited, 0, COMMIT_TIME - 1));
        _claimBy(stranger, ALICE_FRAUD, REJECT);
        assertEq(
            keccak256(abi.encode(court.caseOf(_fraudLeaf))), keccak256(abi.encode(before)), "the case is as it was"
        );
        IDisputeCourt.Claim[] memory claims = court.claimsOf(_fraudLeaf);
        assertEq(claims.length, 2, "claims");
        assertEq(claims[1].claimant, stranger, "claimant");
        assertEq(claims[1].ruling, REJECT, "ruling");
        assertEq(token.balanceOf(address(court)), 2 * BOND, "both put up a bond");
    }

    function test_claim_joinsACase_whoseJuryIsDrawn() public {
        _challengeAndDraw(ALICE_FRAUD, ACCEPT);
        _claimBy(stranger, ALICE_FRAUD, REJECT);
        assertEq(court.claimsOf(_fraudLeaf).length, 2, "claims");
    }

    /// @dev What a claim says about the work is true, also of a claim that joins.
    function test_claim_reverts_whenItJoinsWithAnotherSubmission() public {
        _challenge(ALICE_FRAUD, ACCEPT);
        Claimed memory c = _prepare(ALICE_FRAUD, REJECT);
        c.submission.fileHash = keccak256("another file");
        c.signature = _signSubmission(c.submission, aliceNodeKey);
        _announce(stranger, _fraudLeaf, REJECT);
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidSubmission.selector, alice, aliceNode)
        );
        _send(stranger, c);
    }

    function testFuzz_claim_reverts_whenTheTimeToCommitIsOver(uint256 waited) public {
        _challenge(ALICE_FRAUD, ACCEPT);
        uint256 endsAt = block.timestamp + COMMIT_TIME;
        Claimed memory c = _prepare(ALICE_FRAUD, REJECT);
        _announce(stranger, _fraudLeaf, REJECT);
        waited = waited % 2 == 0 ? COMMIT_TIME : bound(waited, COMMIT_TIME, 100 days);
        vm.warp(block.timestamp + waited);
        _expectPhaseOver(_fraudLeaf, endsAt);
        _send(stranger, c);
    }

    /// @dev An outcome has one case, whatever came of it and whatever is claimed then.
    function testFuzz_claim_reverts_whenTheCaseIsClosed(bool overturned) public {
        _decide(ALICE_FRAUD, ACCEPT, overturned ? ACCEPT : STATISTICAL);
        Claimed memory c = _prepare(ALICE_FRAUD, REJECT);
        _announce(stranger, _fraudLeaf, REJECT);
        IDisputeCourt.CaseStatus status =
            overturned ? IDisputeCourt.CaseStatus.Overturned : IDisputeCourt.CaseStatus.Upheld;
        _expectNoOpenCase(_fraudLeaf, uint8(status));
        _send(stranger, c);
    }

    function test_claim_reverts_beyondTheMaximum() public {
        Claimed memory c = _prepare(ALICE_FRAUD, ACCEPT);
        _announce(challenger, _fraudLeaf, ACCEPT);
        _announce(stranger, _fraudLeaf, ACCEPT);
        for (uint256 i = 0; i < 16; ++i) {
            _send(challenger, c);
        }
        assertEq(court.claimsOf(_fraudLeaf).length, court.MAX_CLAIMS(), "as many as there may be");
        _expectMayNotClaim(stranger);
        _send(stranger, c);
    }

    /// @dev Whoever fills a case with claims does not keep its worker out.
    function testFuzz_claim_keepsAPlaceForTheWorker(bool byNode) public {
        (address party, address other) = byNode ? (aliceNode, alice) : (alice, aliceNode);
        _enrich(aliceNode);
        Claimed memory c = _prepare(ALICE_FRAUD, ACCEPT);
        _announce(challenger, _fraudLeaf, ACCEPT);
        _announce(alice, _fraudLeaf, ACCEPT);
        _announce(aliceNode, _fraudLeaf, ACCEPT);
        _announce(bob, _fraudLeaf, ACCEPT);
        for (uint256 i = 0; i < court.MAX_CLAIMS(); ++i) {
            _send(challenger, c);
        }
        _expectMayNotClaim(bob);
        _send(bob, c);
        _send(party, c);
        assertEq(court.claimsOf(_fraudLeaf)[court.MAX_CLAIMS()].claimant, party, "the worker's claim");
        _expectMayNotClaim(other);
        _send(other, c);
    }

    // ------------------------------------------------------------------- sources

    function _sources(uint256 count, uint256 size) private pure returns (string[] memory sources) {
        sources = new string[](count);
        for (uint256 i = 0; i < count; ++i) {
            sources[i] = string(new bytes(size));
        }
    }

    function testFuzz_claim_reverts_whenSourcesAreTooMany(uint256 count) public {
        count = bound(count, 17, 40);
        Claimed memory c = _prepare(ALICE_FRAUD, ACCEPT);
        c.sources = _sources(count, 10);
        _announce(challenger, _fraudLeaf, ACCEPT);
        _expectSourcesTooLarge(count, 0);
        _send(challenger, c);
    }

    function testFuzz_claim_reverts_whenASourceIsTooLong(uint256 count, uint256 which, uint256 size) public {
        count = bound(count, 1, 16);
        size = bound(size, 129, 500);
        Claimed memory c = _prepare(ALICE_FRAUD, ACCEPT);
        c.sources = _sources(count, 128);
        c.sources[which % count] = string(new bytes(size));
        _announce(challenger, _fraudLeaf, ACCEPT);
        _expectSourcesTooLarge(count, size);
        _send(challenger, c);
    }

    function testFuzz_claim_saysItsSources(uint256 count, uint256 size) public {
        Claimed memory c = _prepare(ALICE_FRAUD, ACCEPT);
        c.sources = _sources(count % 2 == 0 ? 16 : bound(count, 0, 16), size % 2 == 0 ? 128 : bound(size, 0, 128));
        _announce(challenger, _fraudLeaf, ACCEPT);
        vm.expectEmit(address(court));
        emit IDisputeCourtEvents.Claimed(
            _fraudLeaf, challenger, ACCEPT, _held(c.outcome, c.submission, c.signature), c.sources
        );
        _send(challenger, c);
    }
}

/// @dev A network that nobody judges for: its bench was never filled.
contract DisputeCourtClaimWithoutBenchTest is CourtTest {
    function setUp() public override {
        BaseTest.setUp();
        runId = _createRun();
        _joinAliceAndBob();
        vm.prank(owner);
        escrow.fund(runId, WALLET / 2);
        _judge(_one(_record(alice, 1, 0, FRAUD)), QUORUM);
    }

    function test_claim_reverts_whenThereAreNoJurors() public {
        (IContributionLedger.Submission memory submission, bytes memory signature) = _evidence(ALICE_FRAUD);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        _announce(challenger, _fraudLeaf, ACCEPT);
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtNoJurors.selector, _fraudLeaf));
        vm.prank(challenger);
        court.claim(outcome, _held(outcome, submission, signature), ACCEPT, SALT, _noSources());
    }
}
