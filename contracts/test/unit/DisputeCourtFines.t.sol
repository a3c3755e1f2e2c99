// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {Math} from "@openzeppelin/contracts/utils/math/Math.sol";

import {IContributionLedger, IContributionLedgerErrors} from "../../src/interfaces/IContributionLedger.sol";
import {IDisputeCourt, IDisputeCourtErrors, IDisputeCourtEvents} from "../../src/interfaces/IDisputeCourt.sol";
import {IStakeVault, IStakeVaultErrors, IStakeVaultEvents} from "../../src/interfaces/IStakeVault.sol";
import {VerdictTest} from "../VerdictTest.sol";

/// @dev What a closed case costs signers and absent jurors, and the fees of the jurors that were right.
contract DisputeCourtFinesTest is VerdictTest {
    /// @dev The run whose stake is the jurors'.
    uint64 private constant BENCH = 0;

    function _expectNothingDue(bytes32 caseId, address account) private {
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtNothingDue.selector, caseId, account));
    }

    function _expectSettled(bytes32 offence) private {
        vm.expectRevert(abi.encodeWithSelector(IStakeVaultErrors.VaultOffenceSettled.selector, offence));
    }

    function _wrongVerdict(uint64 batchId, address validator) private view returns (bytes32) {
        return vault.escrowIdOf(runId, validator, IStakeVault.Offence.WrongVerdict, batchId);
    }

    function _absence(address juror, uint64 number) private view returns (bytes32) {
        return vault.escrowIdOf(BENCH, juror, IStakeVault.Offence.AbsentJuror, number);
    }

    /// @dev Expects how what an account loses is split, and that the court says so. Returns the reporter's share.
    function _expectFined(bytes32 caseId, bytes32 offence, address account, uint256 amount, address reporter)
        private
        returns (uint256 reward)
    {
        uint256 insured = amount * INSURANCE_PPM / PPM;
        reward = reporter == address(0) ? 0 : Math.min(amount * REPORTER_PPM / PPM, REPORTER_CAP);
        vm.expectEmit(address(vault));
        emit IStakeVaultEvents.SlashReleased(offence, reporter, amount - insured - reward, insured, reward);
        vm.expectEmit(address(court));
        emit IDisputeCourtEvents.Fined(caseId, account, amount);
    }

    function _stakeOf(address validator) private view returns (uint256) {
        return vault.activeStake(runId, validator);
    }

    /// @dev The batch's only record is Alice's with this ruling; the jury finds another.
    function _overturn(uint16 recorded, uint16 ruling) private {
        IContributionLedger.Outcome memory outcome = _outcome(alice, 1, 0, uint8(recorded >> 8));
        outcome.reason = uint8(recorded);
        _judge(_one(_pack(outcome)), QUORUM);
        _decide(0, ruling, ruling);
    }

    // -------------------------------------------------------------- fine signer

    function test_fineSigner_reverts_untilTheVerdictIsOverturned() public {
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        _expectNothingDue(_fraudLeaf, validators[0]);
        court.fineSigner(outcome, validators[0]);
        _challengeAndDraw(ALICE_FRAUD, ACCEPT);
        _expectNothingDue(_fraudLeaf, validators[0]);
        court.fineSigner(outcome, validators[0]);
    }

    function testFuzz_fineSigner_reverts_whenTheVerdictIsUpheld(uint256 which) public {
        uint16[3] memory rulings = [UNSEEN, STATISTICAL, NOT_SHOWN];
        _decide(ALICE_FRAUD, ACCEPT, rulings[which % 3]);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        _expectNothingDue(_fraudLeaf, validators[0]);
        court.fineSigner(outcome, validators[0]);
    }

    function testFuzz_fineSigner_reverts_forWhoDidNotSign(address account, uint256 which) public {
        if (which % 2 == 0) account = validators[bound(which, QUORUM, 4)];
        vm.assume(account != validators[0] && account != validators[1]);
        _decide(ALICE_FRAUD, ACCEPT, ACCEPT);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        _expectNothingDue(_fraudLeaf, account);
        court.fineSigner(outcome, account);
    }

    /// @dev Of one batch, an outcome that nobody disputed.
    function test_fineSigner_reverts_forAnotherOutcome() public {
        _decide(ALICE_FRAUD, ACCEPT, ACCEPT);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(BOB_ACCEPTED);
        _expectNothingDue(_acceptedLeaf, validators[0]);
        court.fineSigner(outcome, validators[0]);
    }

    function testFuzz_fineSigner_reverts_whenTheHeaderIsAnother(uint88 signers) public {
        _decide(ALICE_FRAUD, ACCEPT, ACCEPT);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        vm.assume(signers != outcome.batch.signers);
        outcome.batch.signers = signers;
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerBatchMismatch.selector, _batchId));
        court.fineSigner(outcome, validators[2]);
    }

    function testFuzz_fineSigner_takesAShare(address caller, uint256 which, uint256 extra) public {
        address signer = validators[which % QUORUM];
        extra = bound(extra, 0, WALLET - REQUIRED_VALIDATOR_STAKE);
        if (extra != 0) _deposit(runId, signer, extra);
        _decide(ALICE_FRAUD, ACCEPT, ACCEPT);
        uint256 stake = REQUIRED_VALIDATOR_STAKE + extra;
        uint256 amount = Math.ceilDiv(stake * WRONG_VERDICT_PPM, PPM);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        uint256 reward = _expectFined(_fraudLeaf, _wrongVerdict(_batchId, signer), signer, amount, challenger);
        vm.prank(caller);
        court.fineSigner(outcome, signer);
        assertEq(_stakeOf(signer), stake - amount, "slashed");
        assertEq(token.balanceOf(challenger), WALLET + reward, "the reporter is rewarded");
    }

    function test_fineSigner_rewardsNobody_whenNoClaimWasRight() public {
        _decide(ALICE_FRAUD, ACCEPT, REJECT);
        uint256 amount = REQUIRED_VALIDATOR_STAKE * WRONG_VERDICT_PPM / PPM;
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        _expectFined(_fraudLeaf, _wrongVerdict(_batchId, validators[0]), validators[0], amount, address(0));
        court.fineSigner(outcome, validators[0]);
        assertEq(token.balanceOf(challenger), WALLET - BOND, "the bond is lost");
    }

    function test_fineSigner_reverts_twice() public {
        _decide(ALICE_FRAUD, ACCEPT, ACCEPT);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        court.fineSigner(outcome, validators[0]);
        _expectSettled(_wrongVerdict(_batchId, validators[0]));
        court.fineSigner(outcome, validators[0]);
    }

    /// @dev One signature is over all outcomes of a batch; it costs once, however many were wrong.
    function test_fineSigner_reverts_forASecondOutcomeOfTheBatch() public {
        _decide(ALICE_FRAUD, ACCEPT, ACCEPT);
        _decide(BOB_ACCEPTED, REJECT, REJECT);
        court.fineSigner(_outcomeAt(ALICE_FRAUD), validators[0]);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(BOB_ACCEPTED);
        _expectSettled(_wrongVerdict(_batchId, validators[0]));
        court.fineSigner(outcome, validators[0]);
    }

    function test_fineSigner_works_forEveryBatch() public {
        _deposit(runId, validators[0], REQUIRED_VALIDATOR_STAKE);
        _decide(ALICE_FRAUD, ACCEPT, ACCEPT);
        court.fineSigner(_outcomeAt(ALICE_FRAUD), validators[0]);
        uint256 left = _stakeOf(validators[0]);
        _overturn(STATISTICAL, ACCEPT);
        court.fineSigner(_outcomeAt(0), validators[0]);
        assertEq(_stakeOf(validators[0]), left - left * WRONG_VERDICT_PPM / PPM, "and again");
    }

    /// @dev The file, its ticket and its signature, and earlier batches: jurors may have been shown others.
    function testFuzz_fineSigner_reverts_forWhatValidatorsWereShown(uint8 reason, bool incomplete, bool fraud) public {
        reason = uint8(bound(reason, FIRST_AS_SHOWN, LAST_AS_SHOWN));
        _overturn(uint16(incomplete ? INCOMPLETE : REJECTED) << 8 | reason, fraud ? EXACT : ACCEPT);
        _expectNoFine();
    }

    function testFuzz_fineSigner_reverts_forWhatJurorsWereShown(uint8 reason, bool fraud) public {
        reason = uint8(bound(reason, FIRST_AS_SHOWN, LAST_AS_SHOWN));
        vm.assume(reason != UNAVAILABLE);
        _overturn(fraud ? EXACT : ACCEPT, uint16(REJECTED) << 8 | reason);
        _expectNoFine();
    }

    /// @dev One juror that was shown something else excuses nobody, in whatever order the votes are revealed.
    function testFuzz_fineSigner_works_whenMostJurorsGaveAnotherReason(bool first) public {
        uint16 late = uint16(REJECTED) << 8 | 13;
        _judge(_one(_pack(_outcome(alice, 1, 0, ACCEPTED))), QUORUM);
        _challengeAndDraw(0, REJECT);
        _voteAll(_leaf(_batchId, 0, _records[0]), first ? late : REJECT, REJECT, first ? REJECT : late);
        court.settle(_outcomeAt(0));
        court.fineSigner(_outcomeAt(0), validators[0]);
        assertLt(_stakeOf(validators[0]), REQUIRED_VALIDATOR_STAKE, "fined");
    }

    function testFuzz_fineSigner_works_forOtherReasons(uint8 reason, bool recorded) public {
        vm.assume((reason < FIRST_AS_SHOWN || reason > LAST_AS_SHOWN) && reason != DRIFT);
        vm.assume(reason != WRONG_REPLY && reason != WRONG_REWARD);
        uint16 rejected = uint16(REJECTED) << 8 | reason;
        recorded ? _overturn(rejected, ACCEPT) : _overturn(ACCEPT, rejected);
        court.fineSigner(_outcomeAt(0), validators[0]);
        assertLt(_stakeOf(validators[0]), REQUIRED_VALIDATOR_STAKE, "fined");
    }

    /// @dev Validators and jurors may have been shown other earlier work of the worker.
    function testFuzz_fineSigner_reverts_forADriftOfEarlierWork(bool fraud, bool recorded) public {
        uint16 drift = uint16(fraud ? FRAUD : REJECTED) << 8 | DRIFT;
        recorded ? _overturn(drift, ACCEPT) : _overturn(ACCEPT, drift);
        _expectNoFine();
    }

    /// @dev A program may ask for the time, so that validators and jurors of one mind grade it otherwise.
    function testFuzz_fineSigner_reverts_forAProgramsAnswer(bool reply, bool recorded, bool fraud) public {
        uint16 rejected = uint16(REJECTED) << 8 | (reply ? WRONG_REPLY : WRONG_REWARD);
        uint16 other = fraud ? EXACT : ACCEPT;
        recorded ? _overturn(rejected, other) : _overturn(other, rejected);
        _expectNoFine();
    }

    /// @dev A fraud says that the answer is the same everywhere.
    function testFuzz_fineSigner_works_forARepeatableAnswer(bool reply, bool recorded) public {
        uint16 fraud = uint16(FRAUD) << 8 | (reply ? WRONG_REPLY : WRONG_REWARD);
        recorded ? _overturn(fraud, ACCEPT) : _overturn(ACCEPT, fraud);
        court.fineSigner(_outcomeAt(0), validators[0]);
        assertLt(_stakeOf(validators[0]), REQUIRED_VALIDATOR_STAKE, "fined");
    }

    function _expectNoFine() private {
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(0);
        _expectNothingDue(_fraudLeaf, validators[0]);
        court.fineSigner(outcome, validators[0]);
    }

    /// @dev Validators that accept or convict saw everything; with such a verdict that reason excuses nobody.
    function testFuzz_fineSigner_works_whenTheReasonDoesNotBelongToTheVerdict(uint8 reason, bool accepted) public {
        reason = uint8(bound(reason, FIRST_AS_SHOWN, LAST_AS_SHOWN));
        _overturn(uint16(accepted ? ACCEPTED : FRAUD) << 8 | reason, REJECT);
        court.fineSigner(_outcomeAt(0), validators[0]);
        assertLt(_stakeOf(validators[0]), REQUIRED_VALIDATOR_STAKE, "fined");
    }

    /// @dev To leave is no way out: also stake that is leaving is slashed.
    function test_fineSigner_reachesWhoLeftItsSeat() public {
        vm.prank(validators[0]);
        runs.leaveSeat(runId);
        _decide(ALICE_FRAUD, ACCEPT, ACCEPT);
        court.fineSigner(_outcomeAt(ALICE_FRAUD), validators[0]);
        uint256 amount = REQUIRED_VALIDATOR_STAKE * WRONG_VERDICT_PPM / PPM;
        (, uint256 unbonding) = _stake(validators[0]);
        assertEq(unbonding, REQUIRED_VALIDATOR_STAKE - amount, "slashed");
    }

    function testFuzz_fineSigner_unseats_whenTooLittleIsLeft(bool enough) public {
        if (enough) _deposit(runId, validators[0], REQUIRED_VALIDATOR_STAKE);
        _decide(ALICE_FRAUD, ACCEPT, ACCEPT);
        court.fineSigner(_outcomeAt(ALICE_FRAUD), validators[0]);
        assertEq(runs.isValidator(runId, validators[0]), enough, "seated");
    }

    /// @dev Neither what it staked for another run, nor for the bench.
    function test_fineSigner_touchesNoOtherStake() public {
        uint64 other = _createRun();
        _deposit(BENCH, validators[0], 1 ether);
        _decide(ALICE_FRAUD, ACCEPT, ACCEPT);
        court.fineSigner(_outcomeAt(ALICE_FRAUD), validators[0]);
        assertEq(vault.activeStake(other, validators[0]), REQUIRED_VALIDATOR_STAKE, "another run's");
        assertEq(vault.activeStake(BENCH, validators[0]), 1 ether, "the bench's");
    }

    // -------------------------------------------------------- fine absent jurors

    /// @dev A case that nobody voted in, but who is told to; returns its panel.
    function _closeUnvoted(uint256 committed) private returns (address[] memory panel) {
        _challengeAndDraw(ALICE_FRAUD, ACCEPT);
        panel = _panel(_fraudLeaf);
        for (uint256 i = 0; i < committed; ++i) {
            _commitVote(_fraudLeaf, panel[i], ACCEPT);
        }
        vm.warp(block.timestamp + JURY_TIME);
        court.settle(_outcomeAt(ALICE_FRAUD));
    }

    /// @dev A juror of the bench that was not drawn.
    function _undrawn(bytes32 caseId) private view returns (address juror) {
        for (uint256 i = 0; i < 5; ++i) {
            if (court.voteOf(caseId, jurors[i]) == 0) juror = jurors[i];
        }
    }

    function test_fineAbsentJuror_reverts_untilTheCaseIsClosed() public {
        _challengeAndDraw(ALICE_FRAUD, ACCEPT);
        address juror = _panel(_fraudLeaf)[0];
        uint256 until = block.timestamp + JURY_TIME;
        vm.warp(until);
        _expectPhaseOpen(_fraudLeaf, until);
        court.fineAbsentJuror(_fraudLeaf, juror);
    }

    function testFuzz_fineAbsentJuror_reverts_withoutACase(bytes32 caseId, address juror) public {
        _expectPhaseOpen(caseId, JURY_TIME);
        court.fineAbsentJuror(caseId, juror);
    }

    /// @dev Whatever it voted, and also when it was paid.
    function testFuzz_fineAbsentJuror_reverts_whenItRevealed(uint256 which, bool paid) public {
        uint16[4] memory votes = [UNSEEN, ACCEPT, REJECT, EXACT];
        uint16 vote = votes[which % 4];
        _challenge(ALICE_FRAUD, ACCEPT);
        _drawAndVote(_fraudLeaf, vote, ACCEPT, ACCEPT);
        court.settle(_outcomeAt(ALICE_FRAUD));
        address juror = _panel(_fraudLeaf)[0];
        if (paid && vote == ACCEPT) court.collectFee(_fraudLeaf, juror);
        _expectNothingDue(_fraudLeaf, juror);
        court.fineAbsentJuror(_fraudLeaf, juror);
    }

    function testFuzz_fineAbsentJuror_reverts_forWhoWasNotDrawn(address account, bool fromTheBench) public {
        _closeUnvoted(0);
        if (fromTheBench) account = _undrawn(_fraudLeaf);
        vm.assume(court.voteOf(_fraudLeaf, account) == 0);
        _expectNothingDue(_fraudLeaf, account);
        court.fineAbsentJuror(_fraudLeaf, account);
    }

    function testFuzz_fineAbsentJuror_reverts_whenNobodyWasDrawn(uint256 which) public {
        _challenge(ALICE_FRAUD, ACCEPT);
        vm.warp(block.timestamp + JURY_TIME);
        court.settle(_outcomeAt(ALICE_FRAUD));
        _expectNothingDue(_fraudLeaf, jurors[which % 5]);
        court.fineAbsentJuror(_fraudLeaf, jurors[which % 5]);
    }

    /// @dev Who commits and does not reveal is as absent as who does neither.
    function testFuzz_fineAbsentJuror_takesAShare(bool committed, uint256 which, uint256 extra, address caller) public {
        address juror = _closeUnvoted(committed ? JURY_SIZE : 0)[which % JURY_SIZE];
        extra = bound(extra, 0, WALLET - REQUIRED_JUROR_STAKE);
        if (extra != 0) _deposit(BENCH, juror, extra);
        uint256 stake = REQUIRED_JUROR_STAKE + extra;
        uint256 amount = Math.ceilDiv(stake * ABSENCE_PPM, PPM);
        uint256 before = token.balanceOf(caller);
        // No reporter: to report an absence takes no judgement.
        _expectFined(_fraudLeaf, _absence(juror, 1), juror, amount, address(0));
        vm.prank(caller);
        court.fineAbsentJuror(_fraudLeaf, juror);
        assertEq(vault.activeStake(BENCH, juror), stake - amount, "slashed");
        if (caller != insurance) assertLe(token.balanceOf(caller), before, "nobody earns");
    }

    function test_fineAbsentJuror_reverts_twice() public {
        address juror = _closeUnvoted(0)[0];
        court.fineAbsentJuror(_fraudLeaf, juror);
        _expectSettled(_absence(juror, 1));
        court.fineAbsentJuror(_fraudLeaf, juror);
    }

    /// @dev Each case is a duty of its own.
    function test_fineAbsentJuror_works_forEveryCase() public {
        _challenge(BOB_ACCEPTED, REJECT);
        _draw(_acceptedLeaf);
        address[] memory panel = _closeUnvoted(0);
        court.settle(_outcomeAt(BOB_ACCEPTED));
        // Of five jurors, two juries of three share one at least.
        for (uint256 i = 0; i < JURY_SIZE; ++i) {
            if (court.voteOf(_acceptedLeaf, panel[i]) == 0) continue;
            court.fineAbsentJuror(_fraudLeaf, panel[i]);
            uint256 left = vault.activeStake(BENCH, panel[i]);
            court.fineAbsentJuror(_acceptedLeaf, panel[i]);
            assertLt(vault.activeStake(BENCH, panel[i]), left, "and again");
            return;
        }
        fail();
    }

    function test_fineAbsentJuror_reachesWhoLeftTheBench() public {
        _challengeAndDraw(ALICE_FRAUD, ACCEPT);
        address juror = _panel(_fraudLeaf)[0];
        vm.prank(juror);
        jury.leave();
        vm.warp(block.timestamp + JURY_TIME);
        court.settle(_outcomeAt(ALICE_FRAUD));
        court.fineAbsentJuror(_fraudLeaf, juror);
        uint256 amount = REQUIRED_JUROR_STAKE * ABSENCE_PPM / PPM;
        assertEq(vault.accountOf(BENCH, juror).unbonding, REQUIRED_JUROR_STAKE - amount, "slashed");
    }

    function testFuzz_fineAbsentJuror_retires_whenTooLittleIsLeft(bool enough) public {
        address juror = _closeUnvoted(0)[0];
        if (enough) _deposit(BENCH, juror, REQUIRED_JUROR_STAKE);
        court.fineAbsentJuror(_fraudLeaf, juror);
        assertEq(jury.isJuror(juror), enough, "on the bench");
    }

    function test_fineAbsentJuror_touchesNoStakeInRuns() public {
        address juror = _closeUnvoted(0)[0];
        _deposit(runId, juror, 1 ether);
        court.fineAbsentJuror(_fraudLeaf, juror);
        assertEq(vault.activeStake(runId, juror), 1 ether, "the run's");
    }

    // --------------------------------------------------------------- collect fee

    function test_collectFee_reverts_untilTheCaseIsClosed() public {
        _challengeAndDraw(ALICE_FRAUD, ACCEPT);
        uint256 until = block.timestamp + JURY_TIME;
        _voteAll(_fraudLeaf, ACCEPT, ACCEPT, ACCEPT);
        address juror = _panel(_fraudLeaf)[0];
        _expectPhaseOpen(_fraudLeaf, until);
        court.collectFee(_fraudLeaf, juror);
    }

    /// @dev Of every ruling that can stand, also that nothing could be seen.
    function testFuzz_collectFee_paysWhoWasRight(address caller, uint256 which) public {
        uint16[5] memory rulings = [UNSEEN, ACCEPT, REJECT, STATISTICAL, NOT_SHOWN];
        uint16 ruling = rulings[which % 5];
        _decide(ALICE_FRAUD, ACCEPT, ruling);
        address juror = _panel(_fraudLeaf)[which % JURY_SIZE];
        uint256 before = token.balanceOf(juror);
        vm.expectEmit(address(court));
        emit IDisputeCourtEvents.FeeCollected(_fraudLeaf, juror, JUROR_FEE);
        vm.prank(caller);
        court.collectFee(_fraudLeaf, juror);
        assertEq(token.balanceOf(juror), before + JUROR_FEE, "paid");
        assertEq(court.voteOf(_fraudLeaf, juror), bytes32(uint256(3)), "kept");
    }

    function test_collectFee_reverts_twice() public {
        _decide(ALICE_FRAUD, ACCEPT, ACCEPT);
        address juror = _panel(_fraudLeaf)[0];
        court.collectFee(_fraudLeaf, juror);
        _expectNothingDue(_fraudLeaf, juror);
        court.collectFee(_fraudLeaf, juror);
    }

    function testFuzz_collectFee_reverts_forWhoWasWrong(uint256 which) public {
        uint16[4] memory wrong = [UNSEEN, ACCEPT, STATISTICAL, EXACT];
        _challenge(ALICE_FRAUD, ACCEPT);
        _drawAndVote(_fraudLeaf, wrong[which % 4], REJECT, REJECT);
        court.settle(_outcomeAt(ALICE_FRAUD));
        address juror = _panel(_fraudLeaf)[0];
        _expectNothingDue(_fraudLeaf, juror);
        court.collectFee(_fraudLeaf, juror);
    }

    function test_collectFee_pays_forTheRightVerdictWithAnotherReason() public {
        _challenge(ALICE_FRAUD, ACCEPT);
        _drawAndVote(_fraudLeaf, REJECT + 1, REJECT, STATISTICAL);
        court.settle(_outcomeAt(ALICE_FRAUD));
        address[] memory panel = _panel(_fraudLeaf);
        for (uint256 i = 0; i < 2; ++i) {
            court.collectFee(_fraudLeaf, panel[i]);
        }
        assertEq(token.balanceOf(panel[1]), WALLET - REQUIRED_JUROR_STAKE + JUROR_FEE, "paid");
        _expectNothingDue(_fraudLeaf, panel[2]);
        court.collectFee(_fraudLeaf, panel[2]);
    }

    function testFuzz_collectFee_reverts_forWhoWasAbsent(bool committed) public {
        _challengeAndDraw(ALICE_FRAUD, ACCEPT);
        address[] memory panel = _panel(_fraudLeaf);
        _commitVote(_fraudLeaf, panel[1], ACCEPT);
        if (committed) _commitVote(_fraudLeaf, panel[0], ACCEPT);
        vm.warp(block.timestamp + COMMIT_TIME);
        _revealVote(_fraudLeaf, panel[1], ACCEPT);
        vm.warp(block.timestamp + REVEAL_TIME);
        court.settle(_outcomeAt(ALICE_FRAUD));
        _expectNothingDue(_fraudLeaf, panel[0]);
        court.collectFee(_fraudLeaf, panel[0]);
    }

    function testFuzz_collectFee_reverts_forWhoWasNotDrawn(address account, bool fromTheBench) public {
        _decide(ALICE_FRAUD, ACCEPT, ACCEPT);
        if (fromTheBench) account = _undrawn(_fraudLeaf);
        vm.assume(court.voteOf(_fraudLeaf, account) == 0);
        _expectNothingDue(_fraudLeaf, account);
        court.collectFee(_fraudLeaf, account);
    }

    function test_collectFee_reverts_whenTheJuryWasOfNoOneMind() public {
        _challenge(ALICE_FRAUD, ACCEPT);
        _drawAndVote(_fraudLeaf, ACCEPT, REJECT, STATISTICAL);
        court.settle(_outcomeAt(ALICE_FRAUD));
        for (uint256 i = 0; i < JURY_SIZE; ++i) {
            address juror = _panel(_fraudLeaf)[i];
            _expectNothingDue(_fraudLeaf, juror);
            court.collectFee(_fraudLeaf, juror);
        }
    }

    function test_collectFee_paysInFull_whenTheRunHadNoMoney() public {
        _challenge(ALICE_FRAUD, ACCEPT);
        _leaveFree(0);
        _drawAndVote(_fraudLeaf, ACCEPT, ACCEPT, ACCEPT);
        court.settle(_outcomeAt(ALICE_FRAUD));
        address juror = _panel(_fraudLeaf)[0];
        court.collectFee(_fraudLeaf, juror);
        assertEq(token.balanceOf(juror), WALLET - REQUIRED_JUROR_STAKE + JUROR_FEE, "paid");
    }

    /// @dev Whatever was voted: when all who were right are paid, the court holds nothing of the case.
    function testFuzz_collectFee_leavesNothing(uint256 seed) public {
        _challenge(ALICE_FRAUD, ACCEPT);
        uint256 openedAt = block.timestamp;
        _draw(_fraudLeaf);
        Tally memory tally = _voteBySeed(_fraudLeaf, seed, openedAt);
        vm.warp(openedAt + JURY_TIME);
        court.settle(_outcomeAt(ALICE_FRAUD));
        address[] memory panel = _panel(_fraudLeaf);
        for (uint256 i = 0; i < JURY_SIZE; ++i) {
            uint256 vote = uint256(court.voteOf(_fraudLeaf, panel[i]));
            bool revealed = vote <= type(uint32).max && vote & 0xff == 2;
            if (_isDecided(tally) && revealed && _isSameKind(uint16(vote >> 8), tally.leading)) {
                court.collectFee(_fraudLeaf, panel[i]);
            }
        }
        assertEq(token.balanceOf(address(court)), 0, "nothing stays");
    }
}

/// @dev All five jurors of the bench sit.
contract DisputeCourtFinesOfFiveTest is VerdictTest {
    function _courtTerms() internal pure override returns (IDisputeCourt.Terms memory terms) {
        terms = super._courtTerms();
        (terms.jurySize, terms.jurorFee) = (5, BOND / 5);
    }

    /// @dev A minority that votes for another ruling has no say in what most votes for the one that stands depend on.
    function testFuzz_fineSigner_asksOnlyTheVotesForWhatStands(uint8 reason, bool within) public {
        uint16 shown = uint16(REJECTED) << 8 | uint8(bound(reason, FIRST_AS_SHOWN, LAST_AS_SHOWN));
        vm.assume(shown != NOT_SHOWN);
        _challengeAndDraw(ALICE_FRAUD, ACCEPT);
        _decideWith(within ? [REJECT, shown, shown, ACCEPT, REJECT] : [ACCEPT, ACCEPT, ACCEPT, shown, shown]);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        court.fineSigner(outcome, validators[0]);
        assertLt(vault.activeStake(runId, validators[0]), REQUIRED_VALIDATOR_STAKE, "fined");
    }

    function testFuzz_fineSigner_reverts_whenMostVotesForWhatStandsMayDiffer(uint8 reason) public {
        uint16 shown = uint16(REJECTED) << 8 | uint8(bound(reason, FIRST_AS_SHOWN, LAST_AS_SHOWN));
        vm.assume(shown != NOT_SHOWN);
        _challengeAndDraw(ALICE_FRAUD, ACCEPT);
        _decideWith([ACCEPT, ACCEPT, shown, REJECT, shown]);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtNothingDue.selector, _fraudLeaf, validators[0]));
        court.fineSigner(outcome, validators[0]);
    }

    function _decideWith(uint16[5] memory votes) private {
        for (uint256 i = 0; i < 5; ++i) {
            _commitVote(_fraudLeaf, jurors[i], votes[i]);
        }
        for (uint256 i = 0; i < 5; ++i) {
            _revealVote(_fraudLeaf, jurors[i], votes[i]);
        }
        court.settle(_outcomeAt(ALICE_FRAUD));
    }
}
