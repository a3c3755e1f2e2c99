// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IERC20Errors} from "@openzeppelin/contracts/interfaces/draft-IERC6093.sol";
import {Math} from "@openzeppelin/contracts/utils/math/Math.sol";

import {
    IContributionLedger,
    IContributionLedgerErrors,
    IContributionLedgerEvents
} from "../../src/interfaces/IContributionLedger.sol";
import {IDisputeCourt, IDisputeCourtErrors, IDisputeCourtEvents} from "../../src/interfaces/IDisputeCourt.sol";
import {IRewardEscrow} from "../../src/interfaces/IRewardEscrow.sol";
import {IWorkerRegistry} from "../../src/interfaces/IWorkerRegistry.sol";
import {VerdictTest} from "../VerdictTest.sol";

/// @dev Calling judges of the network for work that its run left unjudged, and the bonds of such work.
contract DisputeCourtSummonTest is VerdictTest {
    /// @dev A batch of one submission of Alice that she committed herself, its summons and how she vouches for it.
    uint64 private _own;
    bytes32 private _caseId;
    IContributionLedger.Submission private _submitted;

    function setUp() public override {
        super.setUp();
        _submitted = _submission(alice, 2, 0);
        IContributionLedger.LeasedWork memory work = _work(_submitted, aliceNodeKey, block.timestamp);
        vm.prank(alice);
        _own = ledger.submitDirect(work, _noSources());
        _remember(_own, _submissionLeaf(_submitted), 1, 1000);
        _caseId = court.summonsOf(_own);
    }

    function _dueAt() private view returns (uint256) {
        return batches[_own].committedAt + OUTCOME_DEADLINE;
    }

    function _passDeadline() private {
        vm.warp(_dueAt());
    }

    function _summon() private {
        _summonBy(alice);
    }

    function _summonBy(address caller) private {
        vm.prank(caller);
        court.summon(batches[_own], _submitted, _noSources());
    }

    function _summonAndVote(uint16 first, uint16 second, uint16 third) private {
        _passDeadline();
        _summon();
        _drawAndVote(_caseId, first, second, third);
    }

    function _settleSummoned() private {
        court.settleSummoned(batches[_own], _submitted);
    }

    /// @dev All jurors vote for one ruling; keeps the header if they saw the work.
    function _decideSummoned(uint16 ruling) private {
        _summonAndVote(ruling, ruling, ruling);
        _settleSummoned();
        if (ruling != UNSEEN && ruling != NOT_SHOWN) _rememberPosted(_own, _recordsOf(ruling), 0);
    }

    /// @dev What judges of the network make of Alice's work.
    function _recordsOf(uint16 ruling) private view returns (bytes[] memory) {
        IContributionLedger.Outcome memory outcome = _outcome(alice, 2, 0, uint8(ruling >> 8));
        outcome.reason = uint8(ruling);
        return _one(_pack(outcome));
    }

    function _judgedOutcome(uint16 ruling) private view returns (IContributionLedger.OutcomeProof memory) {
        return _prove(_own, _recordsOf(ruling), 0);
    }

    function _withhold(uint64 batchId) private {
        ledger.postOutcomes(batches[batchId], "", _signOutcomes(batchId, "", QUORUM));
        IContributionLedger.Batch storage batch = batches[batchId];
        batch.postedAt = uint40(block.timestamp);
        batch.status = IContributionLedger.BatchStatus.Withheld;
        for (uint256 i = 0; i < QUORUM; ++i) {
            batch.signers |= runs.seatBitOf(runId, validators[i]);
        }
    }

    /// @dev The run's validators judge what Alice submitted by herself.
    function _judgeOwn(uint8 verdict) private {
        _post(_own, _one(_record(alice, 2, 0, verdict)), QUORUM);
    }

    /// @dev A batch of one that the orchestrator committed: nobody put up a bond. The run leaves it, too.
    function _commitOfOrchestrator() private {
        _submitted = _submission(alice, 3, 0);
        _own = _commitRoot(_submissionLeaf(_submitted), 1, 1000);
        _caseId = court.summonsOf(_own);
    }

    function _expectWrongTime() private {
        vm.expectRevert(
            abi.encodeWithSelector(
                IContributionLedgerErrors.LedgerWrongTime.selector, _own, _dueAt(), _dueAt() + APPEAL_TIME
            )
        );
    }

    function _expectInvalidSubmission(address worker) private {
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidSubmission.selector, worker, address(0))
        );
    }

    function _expectBatchMismatch() private {
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerBatchMismatch.selector, _own));
    }

    function _expectBondHeld() private {
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtBondHeld.selector, _own));
    }

    function _expectReturned(address payer) private {
        vm.expectEmit(address(court));
        emit IDisputeCourtEvents.BondReturned(_own, payer, BOND);
    }

    // --------------------------------------------------------------- summon, when

    function testFuzz_summon_reverts_untilOutcomesAreDue(uint256 waited) public {
        waited = waited % 2 == 0 ? OUTCOME_DEADLINE - 1 : bound(waited, 0, OUTCOME_DEADLINE - 1);
        vm.warp(block.timestamp + waited);
        _expectWrongTime();
        _summon();
    }

    function testFuzz_summon_reverts_afterTheAppeal(uint256 waited) public {
        waited = waited % 2 == 0 ? APPEAL_TIME : bound(waited, APPEAL_TIME, 100 days);
        vm.warp(_dueAt() + waited);
        _expectWrongTime();
        _summon();
    }

    function testFuzz_summon_works_inTheTimeForAppeals(bool byNode, uint256 waited) public {
        waited = waited % 3 == 0 ? APPEAL_TIME - 1 : waited % 3 == 1 ? 0 : bound(waited, 0, APPEAL_TIME - 1);
        vm.warp(_dueAt() + waited);
        _summonBy(byNode ? aliceNode : alice);
        assertTrue(court.isSummoned(_own), "judges look at it");
    }

    /// @dev Nobody waits for outcomes that will not come.
    function testFuzz_summon_works_onceABatchIsWithheld(uint256 waited) public {
        _withhold(_own);
        vm.warp(block.timestamp + bound(waited, 0, APPEAL_TIME - 1));
        _summon();
        assertTrue(court.isSummoned(_own), "judges look at it");
    }

    function test_summon_reverts_whenTheBatchIsJudged() public {
        _judgeOwn(REJECTED);
        _passDeadline();
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerOutcomesPosted.selector, _own));
        _summon();
    }

    function test_summon_reverts_whenTheBatchIsVoid() public {
        vm.warp(_dueAt() + APPEAL_TIME);
        ledger.voidBatch(batches[_own]);
        _expectBatchMismatch();
        _summon();
    }

    /// @dev A batch is brought before judges once, whatever came of it.
    function testFuzz_summon_reverts_twice(bool closed) public {
        _passDeadline();
        _summon();
        if (closed) {
            vm.warp(block.timestamp + JURY_TIME);
            _settleSummoned();
        }
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtCaseExists.selector, _caseId));
        _summon();
    }

    // --------------------------------------------------------------- summon, what

    function testFuzz_summon_reverts_whenTheHeaderIsAnother(uint40 committedAt) public {
        vm.assume(committedAt != batches[_own].committedAt);
        _passDeadline();
        batches[_own].committedAt = committedAt;
        _expectBatchMismatch();
        _summon();
    }

    function testFuzz_summon_reverts_whenTheSubmissionIsAnother(uint256 which) public {
        which = bound(which, 0, 7);
        if (which == 0) _submitted.runId += 1;
        if (which == 1) _submitted.worker = bob;
        if (which == 2) _submitted.step += 1;
        if (which == 3) _submitted.index += 1;
        if (which == 4) _submitted.policyVersion += 1;
        if (which == 5) _submitted.fileHash = keccak256("another file");
        if (which == 6) _submitted.rollouts += 1;
        if (which == 7) _submitted.units -= 1;
        _passDeadline();
        _expectInvalidSubmission(which == 1 ? bob : alice);
        _summon();
    }

    /// @dev What is in a larger batch must be split off first.
    function testFuzz_summon_reverts_whenTheBatchHoldsMore(uint256 count) public {
        _submitted = _submission(alice, 3, 0);
        _own = _commitRoot(_submissionLeaf(_submitted), bound(count, 2, 4096), 1000);
        _passDeadline();
        _expectInvalidSubmission(alice);
        _summon();
    }

    /// @dev No record holds more units than were set aside.
    function testFuzz_summon_reverts_whenTheBatchClaimsFewerUnits(uint256 units) public {
        _submitted = _submission(alice, 3, 0);
        _own = _commitRoot(_submissionLeaf(_submitted), 1, bound(units, 1, 999));
        _passDeadline();
        _expectInvalidSubmission(alice);
        _summon();
    }

    /// @dev Nor is anything left to judge in a batch of one that was split.
    function test_summon_reverts_whenTheSubmissionWasSplitOff() public {
        _commitOfOrchestrator();
        _passDeadline();
        IContributionLedger.LeasedWork memory work = _work(_submitted, aliceNodeKey, block.timestamp);
        vm.prank(alice);
        ledger.splitOff(batches[_own], work, 0, new bytes32[](0), _noSources());
        batches[_own].units = 0;
        _expectInvalidSubmission(alice);
        _summon();
    }

    function testFuzz_summon_reverts_whenSourcesAreTooManyOrTooLong(uint256 count, uint256 size) public {
        bool many = count % 2 == 0;
        count = many ? bound(count, 17, 40) : bound(count, 1, 16);
        size = bound(size, 129, 500);
        string[] memory sources = new string[](count);
        if (!many) sources[count - 1] = string(new bytes(size));
        _passDeadline();
        _expectSourcesTooLarge(count, many ? 0 : size);
        vm.prank(alice);
        court.summon(batches[_own], _submitted, sources);
    }

    // ------------------------------------------------------------ summon, opening

    function test_summon_opensACase() public {
        _passDeadline();
        string[] memory sources = new string[](1);
        sources[0] = "https://example.org/file";
        uint256 drawBlock = block.number + DRAW_DELAY;
        vm.expectEmit(address(court));
        emit IDisputeCourtEvents.CaseOpened(_caseId, _own, runId, 1, 0, alice, 0, drawBlock, 5);
        vm.expectEmit(address(court));
        emit IDisputeCourtEvents.Claimed(
            _caseId, aliceNode, 0, IContributionLedger.CommittedWork(_submitted, "", new bytes32[](0)), sources
        );
        vm.prank(aliceNode);
        court.summon(batches[_own], _submitted, sources);
        IDisputeCourt.Case memory opened = court.caseOf(_caseId);
        assertEq(uint8(opened.status), uint8(IDisputeCourt.CaseStatus.Open), "open");
        assertEq(opened.worker, alice, "worker");
        assertEq(opened.runId, runId, "run");
        assertEq(opened.openedAt, block.timestamp, "opened at");
        assertEq(court.claimsOf(_caseId).length, 0, "nobody claims anything");
    }

    function test_summon_takesNoSecondBond() public {
        _passDeadline();
        uint256 before = token.balanceOf(alice);
        _summon();
        assertEq(token.balanceOf(alice), before, "she put one up");
        assertEq(court.bondOf(_own), alice, "whose it stays");
    }

    function testFuzz_summon_takesABond_whenTheOrchestratorCommittedTheBatch(bool byNode) public {
        address payer = byNode ? aliceNode : alice;
        _enrich(payer);
        uint256 before = token.balanceOf(payer);
        _commitOfOrchestrator();
        _passDeadline();
        vm.expectEmit(address(court));
        emit IDisputeCourtEvents.BondTaken(_own, payer, BOND);
        _summonBy(payer);
        assertEq(token.balanceOf(payer), before - BOND, "paid");
        assertEq(court.bondOf(_own), payer, "payer");
    }

    function test_summon_reverts_withoutABond() public {
        _commitOfOrchestrator();
        _passDeadline();
        vm.expectRevert(
            abi.encodeWithSelector(IERC20Errors.ERC20InsufficientAllowance.selector, address(court), 0, BOND)
        );
        _summonBy(aliceNode);
    }

    /// @dev Whoever wants a jury to see nothing calls it without saying where the work is.
    function testFuzz_summon_reverts_forAnybodyElse(address caller, uint256 which) public {
        address[4] memory parties = [owner, orchestrator, validators[0], bobNode];
        if (which % 2 == 0) caller = parties[(which >> 1) % 4];
        vm.assume(caller != alice && caller != aliceNode);
        _passDeadline();
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtUnauthorized.selector, caller));
        _summonBy(caller);
    }

    function test_summon_reverts_forAKeyThatWasRotatedAway() public {
        (address node, uint256 nodeKey) = makeAddrAndKey("alice's next node");
        IWorkerRegistry.NodeConsent memory consent = _nodeConsent(alice, node, nodeKey, block.timestamp);
        vm.prank(alice);
        workers.rotateNode(consent);
        _passDeadline();
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtUnauthorized.selector, aliceNode));
        _summonBy(aliceNode);
    }

    function test_summonedBatch_isNotVoid_whileJudgesLookAtIt() public {
        vm.warp(_dueAt() + APPEAL_TIME - 1);
        _summon();
        vm.warp(block.timestamp + 1);
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerInCourt.selector, _own));
        ledger.voidBatch(batches[_own]);
    }

    /// @dev Alice, the run's owner and its validators are on the bench: none of them is drawn.
    function testFuzz_draw_excludesTheParties_ofSummonedWork(bytes32 hash_) public {
        vm.assume(hash_ != 0);
        address[3] memory parties = [alice, owner, validators[2]];
        for (uint256 i = 0; i < 3; ++i) {
            vm.prank(parties[i]);
            jury.join(REQUIRED_JUROR_STAKE);
        }
        _passDeadline();
        _summon();
        _passDraw();
        vm.setBlockhash(court.caseOf(_caseId).drawBlock, hash_);
        court.draw(_caseId);
        // The panel is found among the other five.
        assertEq(_panel(_caseId).length, JURY_SIZE, "nobody judges itself");
    }

    // --------------------------------------------------------------- settle, when

    function test_settleSummoned_reverts_withoutACase() public {
        _passDeadline();
        _expectNoOpenCase(_caseId, uint8(IDisputeCourt.CaseStatus.None));
        _settleSummoned();
    }

    function testFuzz_settleSummoned_reverts_whileJurorsMayVote(uint256 waited, bool drawn) public {
        _passDeadline();
        _summon();
        uint256 until = block.timestamp + JURY_TIME;
        if (drawn) _draw(_caseId);
        vm.warp(block.timestamp + (waited % 2 == 0 ? JURY_TIME - 1 : bound(waited, 0, JURY_TIME - 1)));
        _expectPhaseOpen(_caseId, until);
        _settleSummoned();
    }

    function testFuzz_settleSummoned_reverts_twice(bool seen) public {
        _decideSummoned(seen ? REJECT : UNSEEN);
        _expectNoOpenCase(_caseId, uint8(_statusOf(seen)));
        _settleSummoned();
    }

    /// @dev What judges saw is what is recorded: another's work, or more of it, is not put in its place.
    function testFuzz_settleSummoned_reverts_whenTheSubmissionIsAnother(uint256 which) public {
        _summonAndVote(ACCEPT, ACCEPT, ACCEPT);
        which = bound(which, 0, 6);
        if (which == 0) _submitted.worker = bob;
        if (which == 1) _submitted.step += 1;
        if (which == 2) _submitted.index += 1;
        if (which == 3) _submitted.policyVersion += 1;
        if (which == 4) _submitted.fileHash = keccak256("another file");
        if (which == 5) _submitted.rollouts += 1;
        if (which == 6) _submitted.units += 1;
        _expectInvalidSubmission(which == 0 ? bob : alice);
        _settleSummoned();
    }

    function testFuzz_settleSummoned_reverts_whenTheHeaderIsAnother(uint64 units) public {
        _summonAndVote(ACCEPT, ACCEPT, ACCEPT);
        vm.assume(units != batches[_own].units);
        batches[_own].units = units;
        _expectBatchMismatch();
        _settleSummoned();
    }

    // ---------------------------------------------------------------- settle, how

    /// @dev Every constellation: each juror stays away, commits only, or votes one of seven rulings.
    function testFuzz_settleSummoned_followsThePlurality(uint256 seed, uint256 waited) public {
        _passDeadline();
        _summon();
        uint256 openedAt = block.timestamp;
        _draw(_caseId);
        Tally memory tally = _voteBySeed(_caseId, seed, openedAt);
        vm.warp(openedAt + bound(waited, JURY_TIME, 100 days));
        _settleAndCheck(tally);
    }

    function _settleAndCheck(Tally memory tally) private {
        (bool decided, bool seen) = (_isDecided(tally), _isSeen(tally));
        bool accepted = seen && tally.leading == ACCEPT;
        bool lost = decided && !accepted;
        uint256 fees = decided ? JUROR_FEE * tally.votes : 0;
        uint256 free = _free();
        uint256 held = token.balanceOf(address(court)) - BOND;
        bytes32 before = ledger.commitmentOf(_own);

        _expectClosed(_caseId, seen, seen ? tally.leading : 0, address(0), decided ? JUROR_FEE : 0);
        _settleSummoned();

        assertEq(token.balanceOf(alice), WALLET - REQUIRED_STAKE - (lost ? BOND : 0), "bond");
        assertEq(court.bondOf(_own), address(0), "nothing more to return");
        assertEq(token.balanceOf(address(court)), held + fees, "the jurors' fees wait");
        assertEq(_free(), free - (accepted ? fees : 0), "the run pays for work it should have accepted");
        assertEq(token.totalSupply(), SUPPLY - (lost ? BOND - fees : 0), "the rest of a lost bond is burned");
        assertEq(ledger.commitmentOf(_own) != before, seen, "judged if seen");
        assertFalse(court.isSummoned(_own), "over");
    }

    function testFuzz_settleSummoned_recordsTheRuling(uint256 verdict, uint8 reason, address caller) public {
        verdict = bound(verdict, ACCEPTED, FRAUD);
        vm.assume(reason != UNAVAILABLE || verdict == ACCEPTED || verdict == FRAUD);
        uint16 ruling = uint16(verdict) << 8 | reason;
        _summonAndVote(ruling, ruling, ruling);
        bytes[] memory records = _recordsOf(ruling);
        bytes32 leaf = _leaf(_own, 0, records[0]);
        vm.expectEmit(address(ledger));
        emit IContributionLedgerEvents.OutcomesPosted(_own, runId, leaf, uint40(block.timestamp), 0, records[0], "");
        vm.prank(caller);
        _settleSummoned();
        _rememberPosted(_own, records, 0);
        IContributionLedger.Standing memory standing = ledger.standingOf(_prove(_own, records, 0));
        assertEq(uint16(standing.verdict) << 8 | standing.reason, ruling, "stands");
        assertEq(standing.closesAt, block.timestamp + CHALLENGE_WINDOW, "and can be challenged");
    }

    function test_settleSummoned_returnsTheBond_ofAcceptedWork() public {
        _summonAndVote(ACCEPT, ACCEPT, REJECT);
        _expectReturned(alice);
        _settleSummoned();
    }

    /// @dev Shares that cannot be divided are burned.
    function testFuzz_settleSummoned_paysJurorsFromTheRun_andTheRestFromTheBond(uint256 free) public {
        free = bound(free, 0, 4 * JUROR_FEE);
        _leaveFree(free);
        _summonAndVote(ACCEPT, ACCEPT, ACCEPT);
        uint256 paid = Math.min(free, 3 * JUROR_FEE);
        _expectClosed(_caseId, true, ACCEPT, address(0), JUROR_FEE);
        _settleSummoned();
        assertEq(_free(), free - paid, "the run paid");
        assertEq(token.balanceOf(alice), WALLET - REQUIRED_STAKE - (3 * JUROR_FEE - paid), "and the bond the rest");
        assertEq(token.totalSupply(), SUPPLY, "nothing is burned");
    }

    function test_settleSummoned_returnsTheBond_whenNobodyVoted() public {
        _passDeadline();
        _summon();
        vm.warp(block.timestamp + JURY_TIME);
        _expectReturned(alice);
        _settleSummoned();
    }

    function test_settleSummoned_returnsTheBond_toWhoeverPaidIt() public {
        _enrich(aliceNode);
        _commitOfOrchestrator();
        _passDeadline();
        _summonBy(aliceNode);
        vm.warp(block.timestamp + JURY_TIME);
        _expectReturned(aliceNode);
        _settleSummoned();
    }

    /// @dev A case of another outcome holds its own bonds; what is lost here is not taken of them.
    function test_settleSummoned_leavesTheBondsOfOthers() public {
        _challenge(ALICE_FRAUD, ACCEPT);
        _decideSummoned(REJECT);
        assertEq(token.balanceOf(address(court)), BOND + 3 * JUROR_FEE, "the challenger's bond and the fees");
    }

    // -------------------------------------------------------------- and after that

    function test_acceptedWork_isPaid() public {
        _decideSummoned(ACCEPT);
        _passChallengeWindow();
        IRewardEscrow.Claim[] memory claims = new IRewardEscrow.Claim[](1);
        claims[0] = _claimOf(_own, _recordsOf(ACCEPT), _range(0, 1));
        assertEq(escrow.claim(claims), 1000 * uint256(PRICE), "paid");
    }

    function test_rejectedWork_freesWhatWasSetAside() public {
        _decideSummoned(REJECT);
        _passChallengeWindow();
        IRewardEscrow.Claim[] memory claims = new IRewardEscrow.Claim[](1);
        claims[0] = _claimOf(_own, _recordsOf(REJECT), _range(0, 1));
        assertEq(escrow.recover(claims), 1000 * uint256(PRICE), "the run has it again");
    }

    function testFuzz_fraud_isExecuted(bool exact) public {
        uint16 ruling = exact ? EXACT : STATISTICAL;
        _decideSummoned(ruling);
        IContributionLedger.OutcomeProof memory outcome = _judgedOutcome(ruling);
        uint256 amount =
            ledger.executeFraud(outcome, _held(outcome, _submitted, _signSubmission(_submitted, aliceNodeKey)));
        assertEq(amount, REQUIRED_STAKE * (exact ? EXACT_FRAUD_PPM : FRAUD_PPM) / PPM, "slashed");
        _assertStatus(alice, exact ? IWorkerRegistry.Status.Banned : IWorkerRegistry.Status.Jailed, "convicted");
    }

    function testFuzz_unseenWork_isVoid(bool shown) public {
        _decideSummoned(shown ? NOT_SHOWN : UNSEEN);
        vm.warp(_dueAt() + APPEAL_TIME);
        uint256 free = _free();
        ledger.voidBatch(batches[_own]);
        assertEq(_free(), free + 1000 * uint256(PRICE), "the run has its money again");
    }

    /// @dev What judges of the network decided can be challenged as any outcome; another jury decides.
    function test_judgedWork_canBeChallenged() public {
        _decideSummoned(REJECT);
        _claimOwn(REJECT, ACCEPT);
        bytes32 leaf = _leaf(_own, 0, _recordsOf(REJECT)[0]);
        _drawAndVote(leaf, ACCEPT, ACCEPT, ACCEPT);
        court.settle(_judgedOutcome(REJECT));
        assertEq(ledger.standingOf(_judgedOutcome(REJECT)).verdict, ACCEPTED, "overturned");
    }

    function _claimOwn(uint16 recorded, uint16 ruling) private {
        bytes memory signature = _signSubmission(_submitted, aliceNodeKey);
        IContributionLedger.OutcomeProof memory outcome = _judgedOutcome(recorded);
        _announce(challenger, _leaf(_own, 0, outcome.record), ruling);
        vm.prank(challenger);
        court.claim(outcome, _held(outcome, _submitted, signature), ruling, SALT, _noSources());
    }

    /// @dev No validator signed what judges of the network decided.
    function testFuzz_fineSigner_reverts_forWhatJudgesOfTheNetworkDecided(uint256 which) public {
        _decideSummoned(REJECT);
        _claimOwn(REJECT, ACCEPT);
        bytes32 leaf = _leaf(_own, 0, _recordsOf(REJECT)[0]);
        _drawAndVote(leaf, ACCEPT, ACCEPT, ACCEPT);
        IContributionLedger.OutcomeProof memory outcome = _judgedOutcome(REJECT);
        court.settle(outcome);
        address validator = validators[which % 5];
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtNothingDue.selector, leaf, validator));
        court.fineSigner(outcome, validator);
    }

    // --------------------------------------------------------------------- bonds

    function testFuzz_takeBond_reverts_forAnybodyElse(address caller) public {
        vm.assume(caller != address(ledger));
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtUnauthorized.selector, caller));
        vm.prank(caller);
        court.takeBond(1, alice);
    }

    /// @dev Whoever submits pays: the worker or its node.
    function testFuzz_submitDirect_takesABond(bool byNode) public {
        address payer = byNode ? aliceNode : alice;
        _enrich(payer);
        uint256 before = token.balanceOf(payer);
        IContributionLedger.LeasedWork memory work = _work(_submission(alice, 4, 0), aliceNodeKey, block.timestamp);
        vm.expectEmit(address(court));
        emit IDisputeCourtEvents.BondTaken(_own + 1, payer, BOND);
        vm.prank(payer);
        uint64 batchId = ledger.submitDirect(work, _noSources());
        assertEq(court.bondOf(batchId), payer, "payer");
        assertEq(token.balanceOf(payer), before - BOND, "paid");
    }

    function testFuzz_returnBond_reverts_untilTheBatchIsJudgedOrVoid(uint256 state) public {
        state = bound(state, 0, 2);
        if (state == 1) _withhold(_own);
        _passDeadline();
        if (state == 2) _summon();
        _expectBondHeld();
        court.returnBond(batches[_own]);
    }

    function testFuzz_returnBond_works_onceTheRunJudged(address caller, uint256 verdict) public {
        _judgeOwn(uint8(bound(verdict, ACCEPTED, FRAUD)));
        _expectReturned(alice);
        vm.prank(caller);
        court.returnBond(batches[_own]);
        assertEq(token.balanceOf(alice), WALLET - REQUIRED_STAKE, "all of it");
        assertEq(court.bondOf(_own), address(0), "returned");
    }

    function testFuzz_returnBond_works_onceTheBatchIsVoid(address caller, bool withheld) public {
        if (withheld) _withhold(_own);
        vm.warp(_dueAt() + APPEAL_TIME);
        ledger.voidBatch(batches[_own]);
        _expectReturned(alice);
        vm.prank(caller);
        court.returnBond(batches[_own]);
    }

    function testFuzz_returnBond_reverts_twice(bool isVoid) public {
        if (isVoid) {
            vm.warp(_dueAt() + APPEAL_TIME);
            ledger.voidBatch(batches[_own]);
        } else {
            _judgeOwn(ACCEPTED);
        }
        court.returnBond(batches[_own]);
        _expectBondHeld();
        court.returnBond(batches[_own]);
    }

    function testFuzz_returnBond_reverts_onceACaseDecidedOverIt(bool accepted) public {
        _decideSummoned(accepted ? ACCEPT : REJECT);
        _expectBondHeld();
        court.returnBond(batches[_own]);
    }

    function test_returnBond_reverts_whenNobodyPutOneUp() public {
        IContributionLedger.Batch memory batch = batches[_batchId];
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtBondHeld.selector, _batchId));
        court.returnBond(batch);
    }

    function test_returnBond_reverts_whenTheHeaderIsMadeUp() public {
        batches[_own].status = IContributionLedger.BatchStatus.Judged;
        _expectBatchMismatch();
        court.returnBond(batches[_own]);
    }

    /// @dev Two submissions of one batch: Alice splits hers off, and takes a bond along for it alone.
    function test_returnBond_works_forWorkThatWasSplitOff() public {
        bytes32[] memory leaves = new bytes32[](2);
        (_submitted, leaves[1]) = (_submission(alice, 3, 0), _submissionLeaf(_submission(bob, 3, 0)));
        leaves[0] = _submissionLeaf(_submitted);
        _own = _commitRoot(_batchRoot(leaves), 2, 2000);
        _passDeadline();
        IContributionLedger.LeasedWork memory work = _work(_submitted, aliceNodeKey, block.timestamp);
        IContributionLedger.Batch memory split = batches[_own];
        vm.prank(alice);
        _own = ledger.splitOff(split, work, 0, _batchSiblings(leaves, 0), _noSources());
        (split.batchId, split.root, split.count, split.units) = (_own, leaves[0], 1, 1000);
        batches[_own] = split;
        assertEq(court.bondOf(_own), alice, "payer");
        vm.warp(_dueAt() + APPEAL_TIME);
        ledger.voidBatch(split);
        _expectReturned(alice);
        court.returnBond(split);
    }

    function testFuzz_summonsOf_differsByBatch(uint64 first, uint64 second) public view {
        vm.assume(first != second);
        assertTrue(court.summonsOf(first) != court.summonsOf(second), "one case each");
    }
}
