// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {Math} from "@openzeppelin/contracts/utils/math/Math.sol";

import {IContributionLedger, IContributionLedgerErrors} from "../../src/interfaces/IContributionLedger.sol";
import {IDisputeCourt, IDisputeCourtEvents} from "../../src/interfaces/IDisputeCourt.sol";
import {IRewardEscrow, IRewardEscrowErrors, IRewardEscrowEvents} from "../../src/interfaces/IRewardEscrow.sol";
import {IStakeVault} from "../../src/interfaces/IStakeVault.sol";
import {IWorkerRegistry} from "../../src/interfaces/IWorkerRegistry.sol";
import {VerdictTest} from "../VerdictTest.sol";

/// @dev What a settled case does: which ruling stands, who gets which bond, who pays the jurors, and what is undone.
contract DisputeCourtSettleTest is VerdictTest {
    function _settle(uint256 position) private {
        court.settle(_outcomeAt(position));
    }

    /// @dev The one record of the batch is Alice's, with this ruling.
    function _judgeAlice(uint16 ruling) private {
        IContributionLedger.Outcome memory outcome = _outcome(alice, 1, 0, uint8(ruling >> 8));
        outcome.reason = uint8(ruling);
        _judge(_one(_pack(outcome)), QUORUM);
    }

    function _claimsOf(uint256 position) private view returns (IRewardEscrow.Claim[] memory claims) {
        claims = new IRewardEscrow.Claim[](1);
        claims[0] = _claimOf(_batchId, _records, _range(position, position + 1));
    }

    function _escrowOf(address worker, IStakeVault.Offence offence) private view returns (IStakeVault.Escrow memory) {
        return vault.escrowOf(_escrowId(worker, offence, 1, 0));
    }

    function _stakeOfAlice() private view returns (uint256) {
        return vault.activeStake(runId, alice);
    }

    function _expectClaimSettled(bytes32 leaf, address claimant, bool right, uint256 returned) private {
        vm.expectEmit(address(court));
        emit IDisputeCourtEvents.ClaimSettled(leaf, claimant, right, returned);
    }

    // ---------------------------------------------------------------------- when

    function testFuzz_settle_reverts_withoutACase(uint256 position) public {
        position = bound(position, 0, 1);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(position);
        _expectNoOpenCase(position == 0 ? _fraudLeaf : _acceptedLeaf, uint8(IDisputeCourt.CaseStatus.None));
        court.settle(outcome);
    }

    function testFuzz_settle_reverts_twice(bool overturned) public {
        _decide(ALICE_FRAUD, ACCEPT, overturned ? ACCEPT : STATISTICAL);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        _expectNoOpenCase(_fraudLeaf, uint8(_statusOf(overturned)));
        court.settle(outcome);
    }

    /// @dev Until all jurors revealed or their time is over; nobody drawn is nobody that revealed.
    function testFuzz_settle_reverts_whileJurorsMayVote(uint256 waited, bool drawn, uint256 revealed) public {
        _challenge(ALICE_FRAUD, ACCEPT);
        uint256 until = block.timestamp + JURY_TIME;
        if (drawn) {
            _draw(_fraudLeaf);
            address[] memory panel = _panel(_fraudLeaf);
            for (uint256 i = 0; i < JURY_SIZE; ++i) {
                _commitVote(_fraudLeaf, panel[i], ACCEPT);
            }
            revealed = bound(revealed, 0, JURY_SIZE - 1);
            for (uint256 i = 0; i < revealed; ++i) {
                _revealVote(_fraudLeaf, panel[i], ACCEPT);
            }
        }
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        waited = waited % 2 == 0 ? JURY_TIME - 1 : bound(waited, 0, JURY_TIME - 1);
        vm.warp(block.timestamp + waited);
        _expectPhaseOpen(_fraudLeaf, until);
        court.settle(outcome);
    }

    function testFuzz_settle_works_asSoonAsAllRevealed(address caller, uint256 which) public {
        uint16[4] memory rulings = [UNSEEN, ACCEPT, REJECT, STATISTICAL];
        uint16 ruling = rulings[which % 4];
        _challengeAndDraw(ALICE_FRAUD, ACCEPT);
        _voteAll(_fraudLeaf, ruling, ruling, ruling);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        vm.prank(caller);
        court.settle(outcome);
        assertFalse(court.isOpen(_fraudLeaf), "closed");
    }

    function test_settle_works_asSoonAsFewerJurorsRevealed_whenNoMoreMaySit() public {
        vm.prank(jurors[0]);
        jury.leave();
        vm.prank(jurors[1]);
        jury.leave();
        vm.prank(jurors[2]);
        jury.leave();
        vm.warp(block.timestamp + 1);
        _challengeAndDraw(ALICE_FRAUD, ACCEPT);
        for (uint256 i = 3; i < 5; ++i) {
            _commitVote(_fraudLeaf, jurors[i], ACCEPT);
        }
        for (uint256 i = 3; i < 5; ++i) {
            _revealVote(_fraudLeaf, jurors[i], ACCEPT);
        }
        _settle(ALICE_FRAUD);
        assertEq(ledger.standingOf(_outcomeAt(ALICE_FRAUD)).verdict, ACCEPTED, "decided by two");
    }

    function testFuzz_settle_works_whenTheTimeIsOver(address caller, uint256 waited) public {
        _challenge(ALICE_FRAUD, ACCEPT);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        vm.warp(block.timestamp + (waited % 2 == 0 ? JURY_TIME : bound(waited, JURY_TIME, 100 days)));
        vm.prank(caller);
        court.settle(outcome);
        assertFalse(court.isOpen(_fraudLeaf), "closed");
    }

    function test_settle_endsACase_thatNobodyMaySitOn() public {
        for (uint256 i = 0; i < 5; ++i) {
            vm.prank(jurors[i]);
            jury.leave();
        }
        vm.warp(block.timestamp + 1);
        _challenge(BOB_ACCEPTED, REJECT);
        vm.warp(block.timestamp + JURY_TIME);
        _settle(BOB_ACCEPTED);
        _passChallengeWindow();
        assertTrue(ledger.standingOf(_outcomeAt(BOB_ACCEPTED)).isFinal, "nothing is held up");
    }

    // ------------------------------------------------------------- which ruling

    /// @dev Every constellation: each juror stays away, commits only, or votes one of seven rulings.
    function testFuzz_settle_followsThePlurality(uint256 seed, uint256 waited) public {
        _claimBy(challenger, ALICE_FRAUD, ACCEPT);
        _claimBy(stranger, ALICE_FRAUD, REJECT);
        uint256 openedAt = block.timestamp;
        _draw(_fraudLeaf);
        Tally memory tally = _voteBySeed(_fraudLeaf, seed, openedAt);
        vm.warp(openedAt + bound(waited, JURY_TIME, 100 days));
        _settleAndCheck(tally);
    }

    function _settleAndCheck(Tally memory tally) private {
        bool decided = _isDecided(tally);
        bool overturned = _isSeen(tally) && tally.leading != STATISTICAL;
        bool first = overturned && tally.leading == ACCEPT;
        bool second = overturned && tally.leading == REJECT;
        uint256 pot = (first || !decided ? 0 : BOND) + (second || !decided ? 0 : BOND);
        uint256 fees = decided ? JUROR_FEE * tally.votes : 0;
        address reporter = first ? challenger : second ? stranger : address(0);
        uint256 free = _free();
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);

        _expectClaimSettled(_fraudLeaf, challenger, first, first || !decided ? BOND : 0);
        _expectClaimSettled(_fraudLeaf, stranger, second, second || !decided ? BOND : 0);
        _expectClosed(
            _fraudLeaf, overturned, overturned ? tally.leading : STATISTICAL, reporter, decided ? JUROR_FEE : 0
        );
        court.settle(outcome);

        assertEq(token.balanceOf(challenger), WALLET - (first || !decided ? 0 : BOND), "first bond");
        assertEq(token.balanceOf(stranger), WALLET - (second || !decided ? 0 : BOND), "second bond");
        assertEq(token.balanceOf(address(court)), fees, "the jurors' fees wait");
        assertEq(token.totalSupply(), SUPPLY - (pot - fees), "the rest is burned");
        assertEq(_free(), free, "lost bonds pay, not the run");
        _assertStands(outcome, overturned ? tally.leading : STATISTICAL, overturned, reporter);
    }

    function _assertStands(
        IContributionLedger.OutcomeProof memory outcome,
        uint16 ruling,
        bool overturned,
        address reporter
    ) private view {
        IContributionLedger.Standing memory standing = ledger.standingOf(outcome);
        assertEq(uint16(standing.verdict) << 8 | standing.reason, ruling, "what stands");
        assertEq(uint8(court.caseOf(_fraudLeaf).status), uint8(_statusOf(overturned)), "status");
        assertEq(_reporterOf(_fraudLeaf), reporter, "reporter");
    }

    /// @dev Two of three say that nothing could be seen; the third's word does not stand.
    function test_settle_upholds_whenMostJurorsSawNothing() public {
        _challenge(ALICE_FRAUD, ACCEPT);
        _drawAndVote(_fraudLeaf, UNSEEN, ACCEPT, UNSEEN);
        _settle(ALICE_FRAUD);
        assertEq(ledger.standingOf(_outcomeAt(ALICE_FRAUD)).verdict, FRAUD, "what is recorded stands");
    }

    /// @dev What cannot be had proves nothing.
    function testFuzz_settle_upholds_whenTheJurySaysThatTheFileCannotBeHad(bool incomplete) public {
        uint16 ruling = uint16(incomplete ? INCOMPLETE : REJECTED) << 8 | UNAVAILABLE;
        _challenge(BOB_ACCEPTED, REJECT);
        _drawAndVote(_acceptedLeaf, ruling, ruling, ruling);
        _expectClosed(_acceptedLeaf, false, ACCEPT, address(0), JUROR_FEE);
        _settle(BOB_ACCEPTED);
        assertEq(token.balanceOf(challenger), WALLET - BOND, "and the bond is lost");
    }

    /// @dev A jury that convicts or accepts saw the work, whatever reason it gives.
    function testFuzz_settle_overturns_whenTheReasonDoesNotBelongToTheVerdict(bool accepted) public {
        uint16 ruling = uint16(accepted ? ACCEPTED : FRAUD) << 8 | UNAVAILABLE;
        _judgeAlice(REJECT);
        _challenge(0, accepted ? ACCEPT : STATISTICAL);
        _drawAndVote(_fraudLeaf, ruling, ruling, ruling);
        _expectClosed(_fraudLeaf, true, ruling, challenger, JUROR_FEE);
        _settle(0);
    }

    /// @dev Frauds that are both exact, or both not, cost the same.
    function testFuzz_settle_upholds_whenTheJuryFindsAnotherReasonOfTheSameCost(uint256 seed, bool exact) public {
        uint256 reason = exact ? bound(seed, 30, 59) : bound(seed, 60, 255);
        _judgeAlice(exact ? EXACT : STATISTICAL);
        uint16 ruling = uint16(FRAUD) << 8 | uint16(reason);
        _challenge(0, ACCEPT);
        _drawAndVote(_fraudLeaf, ruling, ruling, ruling);
        _expectClosed(_fraudLeaf, false, exact ? EXACT : STATISTICAL, address(0), JUROR_FEE);
        _settle(0);
    }

    function testFuzz_settle_overturns_whenOneFraudIsExactAndTheOtherIsNot(uint256 seed, bool exact) public {
        uint256 reason = exact ? bound(seed, 60, 255) : bound(seed, 30, 59);
        _judgeAlice(exact ? EXACT : STATISTICAL);
        uint16 ruling = uint16(FRAUD) << 8 | uint16(reason);
        _challenge(0, exact ? STATISTICAL : EXACT);
        _drawAndVote(_fraudLeaf, ruling, ruling, ruling);
        _expectClosed(_fraudLeaf, true, ruling, challenger, JUROR_FEE);
        _settle(0);
    }

    function testFuzz_rulingOf_isTheRecordedOne_withoutAnOverturn(uint8 verdict, uint8 reason, bool closed) public {
        if (closed) _decide(ALICE_FRAUD, ACCEPT, STATISTICAL);
        (uint8 standing, uint8 why) = court.rulingOf(_fraudLeaf, verdict, reason);
        assertEq(standing, verdict, "verdict");
        assertEq(why, reason, "reason");
    }

    function testFuzz_rulingOf_isTheJurys_afterAnOverturn(uint8 verdict, uint8 reason) public {
        _decide(ALICE_FRAUD, ACCEPT, REJECT);
        (uint8 standing, uint8 why) = court.rulingOf(_fraudLeaf, verdict, reason);
        assertEq(uint16(standing) << 8 | why, REJECT, "the jury's");
    }

    // --------------------------------------------------------------------- bonds

    function test_settle_returnsBonds_whenNobodyWasDrawn() public {
        _challenge(ALICE_FRAUD, ACCEPT);
        vm.warp(block.timestamp + JURY_TIME);
        _expectClosed(_fraudLeaf, false, STATISTICAL, address(0), 0);
        _settle(ALICE_FRAUD);
        assertEq(token.balanceOf(challenger), WALLET, "the bond is back");
    }

    function test_settle_returnsBonds_whenTheJuryIsOfNoOneMind() public {
        _challenge(ALICE_FRAUD, ACCEPT);
        _drawAndVote(_fraudLeaf, ACCEPT, REJECT, STATISTICAL);
        _expectClosed(_fraudLeaf, false, STATISTICAL, address(0), 0);
        _settle(ALICE_FRAUD);
        assertEq(token.balanceOf(challenger), WALLET, "the bond is back");
        assertEq(token.totalSupply(), SUPPLY, "nobody is paid, and nothing is burned");
    }

    function testFuzz_settle_takesBonds_whenTheJuryUpholds(uint256 claims) public {
        claims = bound(claims, 1, 16);
        for (uint256 i = 0; i < claims; ++i) {
            _challenge(ALICE_FRAUD, ACCEPT);
        }
        _drawAndVote(_fraudLeaf, STATISTICAL, STATISTICAL, STATISTICAL);
        _settle(ALICE_FRAUD);
        assertEq(token.balanceOf(challenger), WALLET - claims * BOND, "all are lost");
        assertEq(token.balanceOf(address(court)), 3 * JUROR_FEE, "the jurors' fees");
        assertEq(token.totalSupply(), SUPPLY - claims * BOND + 3 * JUROR_FEE, "the rest is burned");
    }

    function test_settle_takesBonds_whenNothingWasSeen() public {
        _challenge(ALICE_FRAUD, ACCEPT);
        _drawAndVote(_fraudLeaf, UNSEEN, UNSEEN, UNSEEN);
        _expectClaimSettled(_fraudLeaf, challenger, false, 0);
        _expectClosed(_fraudLeaf, false, STATISTICAL, address(0), JUROR_FEE);
        _settle(ALICE_FRAUD);
    }

    /// @dev A third ruling stands: nobody who claimed was right.
    function test_settle_takesBonds_whenTheJuryFindsWhatNobodyClaimed() public {
        _claimBy(challenger, ALICE_FRAUD, ACCEPT);
        _claimBy(stranger, ALICE_FRAUD, EXACT);
        _drawAndVote(_fraudLeaf, REJECT, REJECT, REJECT);
        _expectClaimSettled(_fraudLeaf, challenger, false, 0);
        _expectClaimSettled(_fraudLeaf, stranger, false, 0);
        _expectClosed(_fraudLeaf, true, REJECT, address(0), JUROR_FEE);
        _settle(ALICE_FRAUD);
    }

    /// @dev A claim is right by what it costs, whatever its reason.
    function testFuzz_settle_returnsTheBond_whateverTheReasonOfTheClaim(uint8 reason) public {
        _challenge(ALICE_FRAUD, uint16(REJECTED) << 8 | reason);
        _drawAndVote(_fraudLeaf, REJECT, REJECT, REJECT);
        _expectClaimSettled(_fraudLeaf, challenger, true, BOND);
        _settle(ALICE_FRAUD);
    }

    // ---------------------------------------------------------------- jurors' fees

    function testFuzz_settle_paysJurorsFromTheRun_whenAllClaimsAreRight(uint256 claims) public {
        claims = bound(claims, 1, 16);
        for (uint256 i = 0; i < claims; ++i) {
            _challenge(ALICE_FRAUD, ACCEPT);
        }
        uint256 free = _free();
        _drawAndVote(_fraudLeaf, ACCEPT, REJECT, ACCEPT);
        vm.expectEmit(address(escrow));
        emit IRewardEscrowEvents.CourtPaid(runId, 2 * JUROR_FEE);
        _settle(ALICE_FRAUD);
        assertEq(_free(), free - 2 * JUROR_FEE, "two jurors were right");
        assertEq(token.balanceOf(challenger), WALLET, "all bonds are back");
        assertEq(token.totalSupply(), SUPPLY, "nothing is burned");
    }

    /// @dev Shares that cannot be divided are burned.
    /// @dev What the run does not have, the first right claim pays: no jury works for nothing.
    function testFuzz_settle_paysJurorsFromTheRun_andTheRestFromTheClaim(uint256 free) public {
        free = bound(free, 0, 4 * JUROR_FEE);
        _challenge(ALICE_FRAUD, ACCEPT);
        _claimBy(stranger, ALICE_FRAUD, ACCEPT);
        _leaveFree(free);
        _drawAndVote(_fraudLeaf, ACCEPT, ACCEPT, ACCEPT);
        uint256 paid = Math.min(free, 3 * JUROR_FEE);
        _expectClaimSettled(_fraudLeaf, challenger, true, BOND - (3 * JUROR_FEE - paid));
        _expectClaimSettled(_fraudLeaf, stranger, true, BOND);
        _expectClosed(_fraudLeaf, true, ACCEPT, challenger, JUROR_FEE);
        _settle(ALICE_FRAUD);
        assertEq(_free(), free - paid, "the run paid");
        assertEq(token.balanceOf(address(court)), 3 * JUROR_FEE, "the jurors' fees wait");
        assertEq(token.totalSupply(), SUPPLY, "nothing is burned");
    }

    /// @dev What was set aside for workers stays theirs.
    function test_settle_leavesWhatIsSetAside_whenTheRunPays() public {
        _challenge(ALICE_FRAUD, ACCEPT);
        _leaveFree(0);
        uint256 reserved = escrow.fundsOf(runId).reserved;
        _drawAndVote(_fraudLeaf, ACCEPT, ACCEPT, ACCEPT);
        _settle(ALICE_FRAUD);
        assertEq(escrow.fundsOf(runId).reserved, reserved, "reserved");
    }

    function test_settle_takesNothingFromTheRun_whenABondIsLost() public {
        _claimBy(challenger, ALICE_FRAUD, ACCEPT);
        _claimBy(stranger, ALICE_FRAUD, REJECT);
        uint256 free = _free();
        _drawAndVote(_fraudLeaf, ACCEPT, ACCEPT, ACCEPT);
        _settle(ALICE_FRAUD);
        assertEq(_free(), free, "the lost bond pays");
    }

    function test_settle_takesNothingFromTheRun_whenItUpholds() public {
        uint256 free = _free();
        _decide(ALICE_FRAUD, ACCEPT, STATISTICAL);
        assertEq(_free(), free, "the lost bond pays");
    }

    /// @dev The run's validators could not see the work either: the first right claimant pays for having it judged.
    function testFuzz_settle_paysJurorsFromTheFirstRightClaim_whenTheFileCouldNotBeHad(bool accepted) public {
        uint16 ruling = accepted ? ACCEPT : STATISTICAL;
        _judgeAlice(NOT_SHOWN);
        _claimBy(challenger, 0, ruling);
        _claimBy(stranger, 0, ruling);
        uint256 free = _free();
        _drawAndVote(_fraudLeaf, ruling, UNSEEN, ruling);
        _expectClaimSettled(_fraudLeaf, challenger, true, BOND - 2 * JUROR_FEE);
        _expectClaimSettled(_fraudLeaf, stranger, true, BOND);
        _expectClosed(_fraudLeaf, true, ruling, challenger, JUROR_FEE);
        _settle(0);
        assertEq(_free(), free, "the run pays nothing");
        assertEq(token.balanceOf(address(court)), 2 * JUROR_FEE, "two jurors were right");
        assertEq(token.totalSupply(), SUPPLY, "nothing is burned");
    }

    function testFuzz_settle_paysJurorsFromLostBonds_whenTheFileCouldNotBeHad(bool lostFirst) public {
        _judgeAlice(NOT_SHOWN);
        if (lostFirst) _claimBy(stranger, 0, EXACT);
        _claimBy(challenger, 0, ACCEPT);
        if (!lostFirst) _claimBy(stranger, 0, EXACT);
        _drawAndVote(_fraudLeaf, ACCEPT, ACCEPT, ACCEPT);
        _settle(0);
        assertEq(token.balanceOf(challenger), WALLET, "whoever was right pays nothing");
        assertEq(token.totalSupply(), SUPPLY - BOND + 3 * JUROR_FEE, "the rest of the lost bond is burned");
    }

    /// @dev Validators that accept or convict saw the work, whatever reason they give: their run pays.
    function testFuzz_settle_paysJurorsFromTheRun_whenTheReasonDoesNotBelongToTheVerdict(bool accepted) public {
        _judgeAlice(uint16(accepted ? ACCEPTED : FRAUD) << 8 | UNAVAILABLE);
        uint256 free = _free();
        _decide(0, REJECT, REJECT);
        assertEq(_free(), free - 3 * JUROR_FEE, "paid");
        assertEq(token.balanceOf(challenger), WALLET, "the bond is back");
    }

    // ------------------------------------------------------------------ reporter

    /// @dev Claims come in the other order than they were announced in.
    function test_settle_makesTheFirstToAnnounceTheReporter() public {
        _announce(stranger, _fraudLeaf, ACCEPT);
        _announce(challenger, _fraudLeaf, ACCEPT);
        _claimAnnounced(challenger, ALICE_FRAUD, ACCEPT);
        _claimAnnounced(stranger, ALICE_FRAUD, ACCEPT);
        _drawAndVote(_fraudLeaf, ACCEPT, ACCEPT, ACCEPT);
        _expectClosed(_fraudLeaf, true, ACCEPT, stranger, JUROR_FEE);
        _settle(ALICE_FRAUD);
    }

    function test_settle_makesTheFirstToClaimTheReporter_whenAnnouncedInOneBlock() public {
        vm.prank(stranger);
        court.announce(keccak256(abi.encode(stranger, _fraudLeaf, ACCEPT, SALT)));
        _announce(challenger, _fraudLeaf, ACCEPT);
        _claimAnnounced(challenger, ALICE_FRAUD, ACCEPT);
        _claimAnnounced(stranger, ALICE_FRAUD, ACCEPT);
        _drawAndVote(_fraudLeaf, ACCEPT, ACCEPT, ACCEPT);
        _settle(ALICE_FRAUD);
        assertEq(_reporterOf(_fraudLeaf), challenger, "reporter");
    }

    function test_settle_makesNobodyTheReporter_whoWasWrong() public {
        _announce(stranger, _fraudLeaf, REJECT);
        _announce(challenger, _fraudLeaf, ACCEPT);
        _claimAnnounced(stranger, ALICE_FRAUD, REJECT);
        _claimAnnounced(challenger, ALICE_FRAUD, ACCEPT);
        _drawAndVote(_fraudLeaf, ACCEPT, ACCEPT, ACCEPT);
        _settle(ALICE_FRAUD);
        assertEq(_reporterOf(_fraudLeaf), challenger, "the first that was right");
    }

    // ------------------------------------------------- what an overturn gives back

    function testFuzz_overturnedFraud_isUndone(bool executedFirst, bool exact) public {
        _judgeAlice(exact ? EXACT : STATISTICAL);
        if (executedFirst) _execute(alice, 0, aliceNodeKey);
        _challenge(0, ACCEPT);
        if (!executedFirst) _execute(alice, 0, aliceNodeKey);
        _drawAndVote(_fraudLeaf, ACCEPT, ACCEPT, STATISTICAL);
        _settle(0);
        assertEq(_stakeOfAlice(), REQUIRED_STAKE, "stake is back");
        assertTrue(workers.isActive(runId, alice), "acquitted");
        assertEq(workers.memberOf(runId, alice).convictions, 0, "nothing stands");
        IStakeVault.Offence offence = exact ? IStakeVault.Offence.ExactFraud : IStakeVault.Offence.Fraud;
        assertEq(uint8(_escrowOf(alice, offence).status), uint8(IStakeVault.EscrowStatus.Restored), "restored");
    }

    function test_overturnedFraud_isPaid() public {
        _execute(alice, ALICE_FRAUD, aliceNodeKey);
        _decide(ALICE_FRAUD, ACCEPT, ACCEPT);
        _passChallengeWindow();
        assertEq(escrow.claim(_claimsOf(ALICE_FRAUD)), 1000 * uint256(PRICE), "paid");
    }

    function test_overturnedFraud_cannotBeExecuted() public {
        _decide(ALICE_FRAUD, REJECT, REJECT);
        (IContributionLedger.Submission memory submission, bytes memory signature) = _evidence(ALICE_FRAUD);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerNotFraud.selector, _batchId, 0, REJECTED)
        );
        ledger.executeFraud(outcome, _held(outcome, submission, signature));
    }

    function test_overturnedFraud_isUndone_whenThereWasNothingToSlash() public {
        vm.prank(alice);
        vault.requestUnbond(runId, REQUIRED_STAKE);
        vm.warp(block.timestamp + UNBONDING_PERIOD);
        vm.prank(alice);
        vault.withdraw(runId);
        _judgeAlice(STATISTICAL);
        _execute(alice, 0, aliceNodeKey);
        _decide(0, REJECT, REJECT);
        _assertStatus(alice, IWorkerRegistry.Status.Jailed, "what she was before");
        assertEq(workers.memberOf(runId, alice).convictions, 0, "acquitted");
    }

    /// @dev The jury finds a fraud of the other kind: what was taken returns, and anybody executes what stands.
    function testFuzz_overturnedFraud_isExecutedAsTheJuryFoundIt(bool exact) public {
        _judgeAlice(exact ? EXACT : STATISTICAL);
        _execute(alice, 0, aliceNodeKey);
        uint16 ruling = exact ? STATISTICAL : EXACT;
        _decide(0, ruling, ruling);
        assertEq(_stakeOfAlice(), REQUIRED_STAKE, "stake is back");
        _assertStatus(alice, IWorkerRegistry.Status.Active, "acquitted");

        uint256 amount = _execute(alice, 0, aliceNodeKey);
        assertEq(amount, REQUIRED_STAKE * (exact ? FRAUD_PPM : EXACT_FRAUD_PPM) / PPM, "what the other kind costs");
        _assertStatus(
            alice,
            exact ? IWorkerRegistry.Status.Jailed : IWorkerRegistry.Status.Banned,
            "as the other kind is punished"
        );
    }

    /// @dev Who corrects the kind of a fraud that the run's own validators found did not find it.
    function test_overturnedFraud_ofTheOtherKind_rewardsNobody() public {
        _decide(ALICE_FRAUD, EXACT, EXACT);
        _execute(alice, ALICE_FRAUD, aliceNodeKey);
        _passChallengeWindow();
        ledger.finaliseFraud(_outcomeAt(ALICE_FRAUD));
        assertEq(token.balanceOf(challenger), WALLET, "the bond alone");
    }

    /// @dev One slot, judged in two batches: the case about the second does not touch what the first took.
    function testFuzz_overturnedFraud_leavesTheEscrowOfAnotherBatch(bool final_) public {
        uint256 amount = _execute(alice, ALICE_FRAUD, aliceNodeKey);
        if (final_) {
            _passChallengeWindow();
            ledger.finaliseFraud(_outcomeAt(ALICE_FRAUD));
        }
        _judgeAlice(STATISTICAL);
        _decide(0, ACCEPT, ACCEPT);
        assertEq(_stakeOfAlice(), REQUIRED_STAKE - amount, "what the other batch took stays taken");
        assertEq(workers.memberOf(runId, alice).convictions, 1, "convicted");
    }

    function testFuzz_upheldFraud_staysSlashed(uint256 which) public {
        uint16[3] memory rulings = [UNSEEN, STATISTICAL, NOT_SHOWN];
        uint16 ruling = rulings[which % 3];
        uint256 amount = _execute(alice, ALICE_FRAUD, aliceNodeKey);
        _decide(ALICE_FRAUD, ACCEPT, ruling);
        _passChallengeWindow();
        ledger.finaliseFraud(_outcomeAt(ALICE_FRAUD));
        assertEq(_stakeOfAlice(), REQUIRED_STAKE - amount, "slashed");
        _assertStatus(alice, IWorkerRegistry.Status.Jailed, "jailed");
        assertEq(
            uint8(_escrowOf(alice, IStakeVault.Offence.Fraud).status),
            uint8(IStakeVault.EscrowStatus.Released),
            "released"
        );
    }

    function test_openCase_holdsTheEscrow() public {
        _execute(alice, ALICE_FRAUD, aliceNodeKey);
        vm.warp(block.timestamp + CHALLENGE_WINDOW - 1);
        _challenge(ALICE_FRAUD, ACCEPT);
        vm.warp(block.timestamp + 1);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerNotFinal.selector, _batchId, 0));
        ledger.finaliseFraud(outcome);
    }

    // ------------------------------------------------------ what an overturn takes

    function testFuzz_overturnedAcceptance_isExecutedAsTheJuryFoundIt(bool exact) public {
        uint16 ruling = exact ? EXACT : STATISTICAL;
        _decide(BOB_ACCEPTED, ruling, ruling);
        uint256 amount = _execute(bob, BOB_ACCEPTED, bobNodeKey);
        assertEq(amount, REQUIRED_STAKE * (exact ? EXACT_FRAUD_PPM : FRAUD_PPM) / PPM, "what the kind costs");
    }

    function test_overturnedAcceptance_cannotBeExecutedBefore() public {
        _challenge(BOB_ACCEPTED, EXACT);
        (IContributionLedger.Submission memory submission, bytes memory signature) = _evidence(BOB_ACCEPTED);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(BOB_ACCEPTED);
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerNotFraud.selector, _batchId, 1, ACCEPTED)
        );
        ledger.executeFraud(outcome, _held(outcome, submission, signature));
    }

    function test_overturnedAcceptance_rewardsTheReporter() public {
        _decide(BOB_ACCEPTED, EXACT, EXACT);
        uint256 amount = _execute(bob, BOB_ACCEPTED, bobNodeKey);
        _passChallengeWindow();
        ledger.finaliseFraud(_outcomeAt(BOB_ACCEPTED));
        uint256 reward = Math.min(amount * REPORTER_PPM / PPM, REPORTER_CAP);
        assertEq(token.balanceOf(challenger), WALLET + reward, "rewarded");
    }

    function testFuzz_overturnedAcceptance_isNotPaid(uint16 verdict) public {
        verdict = uint16(bound(verdict, INCOMPLETE, FRAUD));
        _decide(BOB_ACCEPTED, verdict << 8, verdict << 8);
        _passChallengeWindow();
        IRewardEscrow.Claim[] memory claims = _claimsOf(BOB_ACCEPTED);
        vm.expectRevert(abi.encodeWithSelector(IRewardEscrowErrors.EscrowNotAccepted.selector, _batchId, 1, verdict));
        escrow.claim(claims);
    }

    function testFuzz_overturnedRejection_isPaid(uint16 recorded, uint8 reason) public {
        recorded = uint16(bound(recorded, INCOMPLETE, FRAUD)) << 8 | reason;
        _judgeAlice(recorded);
        _decide(0, ACCEPT, ACCEPT);
        _passChallengeWindow();
        assertEq(escrow.claim(_claimsOf(0)), 1000 * uint256(PRICE), "paid");
    }

    function test_openCase_isNotPaid() public {
        _challenge(BOB_ACCEPTED, REJECT);
        _passChallengeWindow();
        IRewardEscrow.Claim[] memory claims = _claimsOf(BOB_ACCEPTED);
        vm.expectRevert(abi.encodeWithSelector(IRewardEscrowErrors.EscrowDisputed.selector, _batchId, 1));
        escrow.claim(claims);
    }

    function test_upheldAcceptance_isPaid() public {
        _decide(BOB_ACCEPTED, REJECT, ACCEPT);
        _passChallengeWindow();
        assertEq(escrow.claim(_claimsOf(BOB_ACCEPTED)), 1000 * uint256(PRICE), "paid");
    }
}
