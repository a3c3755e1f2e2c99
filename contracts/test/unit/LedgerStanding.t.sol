// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {ContributionLedger} from "../../src/ContributionLedger.sol";
import {IContributionLedger, IContributionLedgerErrors} from "../../src/interfaces/IContributionLedger.sol";
import {LedgerTest} from "../LedgerTest.sol";

/// @title What stands: outcomes, headers, signers, and the times that the deployment fixed
contract LedgerStandingTest is LedgerTest {
    /// @dev A case about Bob's acceptance or Alice's fraud needs this batch.
    function _judgeTwo() private {
        _judge(_two(_record(alice, 1, 0, FRAUD), _record(bob, 1, 0, ACCEPTED)), QUORUM);
    }

    // --------------------------------------------------------------- standing of

    function testFuzz_standingOf_reverts_withoutOutcomes(uint256 waited) public {
        uint64 batchId = _commitSubmissions(_submissions(alice, 3));
        vm.warp(block.timestamp + bound(waited, 0, 365 days));
        IContributionLedger.OutcomeProof memory outcome = _prove(batchId, _accepted(3), 1);
        _expectNotJudged(batchId);
        ledger.standingOf(outcome);
    }

    function test_standingOf_reverts_whenWithheld() public {
        uint64 batchId = _commitSubmissions(_submissions(alice, 3));
        _withhold(batchId);
        IContributionLedger.OutcomeProof memory outcome = _prove(batchId, _accepted(3), 1);
        _expectNotJudged(batchId);
        ledger.standingOf(outcome);
    }

    function testFuzz_standingOf_reverts_whenTheHeaderIsNot(uint256 field) public {
        bytes[] memory records = _accepted(3);
        IContributionLedger.OutcomeProof memory outcome = _prove(_commitAndPost(records), records, 1);
        _mutateHeader(outcome.batch, field);
        _expectBatchMismatch(outcome.batch.batchId);
        ledger.standingOf(outcome);
    }

    function testFuzz_standingOf_reverts_whenAnythingWasChanged(uint256 count, uint256 at, uint256 what) public {
        count = bound(count, 2, 40);
        at = bound(at, 0, count - 1);
        bytes[] memory records = _accepted(count);
        uint64 batchId = _commitAndPost(records);
        IContributionLedger.OutcomeProof memory outcome = _prove(batchId, records, at);
        what = bound(what, 0, 5);
        if (what == 0) outcome.position += 1;
        if (what == 1) outcome.record[54] = bytes1(FRAUD);
        if (what == 2) outcome.proof[0] = keccak256("other sibling");
        if (what == 3) outcome.record = bytes.concat(outcome.record, hex"00");
        if (what == 4) outcome.proof = new bytes32[](0);
        if (what == 5) outcome.record = "";
        _expectInvalidProof(batchId, outcome.position);
        ledger.standingOf(outcome);
    }

    function testFuzz_standingOf_reverts_whenTheSubmissionsRootIsProven(bytes32 random) public {
        // Until outcomes are posted the root is over submissions: it must never serve as a root of outcomes.
        bytes memory record = bytes.concat(random, bytes22(random), hex"0100");
        uint64 batchId = _commitRoot(_leaf(1, 0, record), 1, 1);
        IContributionLedger.OutcomeProof memory outcome =
            IContributionLedger.OutcomeProof(batches[batchId], 0, record, new bytes32[](0));
        _passDeadline();
        _expectNotJudged(batchId);
        ledger.standingOf(outcome);
    }

    function testFuzz_standingOf_tells(IContributionLedger.Outcome memory given, uint256 at, uint256 waited) public {
        given.verdict = uint8(bound(given.verdict, ACCEPTED, FRAUD));
        given.units = uint32(bound(given.units, 0, 1000));
        at = bound(at, 0, 12);
        bytes[] memory records = _accepted(13);
        records[at] = _pack(given);
        uint64 batchId = _commitAndPost(records);
        waited = bound(waited, 0, 2 * CHALLENGE_WINDOW);
        uint256 closesAt = block.timestamp + CHALLENGE_WINDOW;
        vm.warp(block.timestamp + waited);

        IContributionLedger.Standing memory standing = ledger.standingOf(_prove(batchId, records, at));
        assertEq(keccak256(abi.encode(standing.outcome)), keccak256(abi.encode(given)), "decoded");
        assertEq(standing.leaf, _leaf(batchId, at, records[at]), "leaf");
        assertEq(standing.verdict, given.verdict, "verdict");
        assertEq(standing.reason, given.reason, "reason");
        assertEq(standing.closesAt, closesAt, "end of the window");
        assertEq(standing.isFinal, waited >= CHALLENGE_WINDOW, "final");
    }

    // --------------------------------------------------------------------- juries

    function testFuzz_standingOf_tellsWhatAJuryDecided(uint8 verdict, uint8 reason) public {
        verdict = uint8(bound(verdict, INCOMPLETE, FRAUD));
        vm.assume(reason != UNAVAILABLE || verdict == FRAUD);
        _judgeTwo();
        _decide(BOB_ACCEPTED, REJECT, uint16(verdict) << 8 | reason);
        IContributionLedger.Standing memory standing = ledger.standingOf(_outcomeAt(BOB_ACCEPTED));
        assertEq(standing.verdict, verdict, "the jury's verdict");
        assertEq(standing.reason, reason, "the jury's reason");
        assertEq(standing.outcome.verdict, ACCEPTED, "the outcome is as recorded");
        assertEq(ledger.standingOf(_outcomeAt(ALICE_FRAUD)).verdict, FRAUD, "nothing else moves");
    }

    function testFuzz_standingOf_tellsWhatIsRecorded_whenAJurySawNothing(uint8 verdict, bool nothing) public {
        _judgeTwo();
        uint16 ruling = nothing ? UNSEEN : uint16(bound(verdict, INCOMPLETE, REJECTED)) << 8 | UNAVAILABLE;
        _decide(BOB_ACCEPTED, REJECT, ruling);
        IContributionLedger.Standing memory standing = ledger.standingOf(_outcomeAt(BOB_ACCEPTED));
        assertEq(standing.verdict, ACCEPTED, "as recorded");
        assertEq(standing.reason, 0, "as recorded");
    }

    function test_standingOf_tellsWhatIsRecorded_whenAJuryIsOfNoOneMind() public {
        _judgeTwo();
        _challengeAndDraw(BOB_ACCEPTED, REJECT);
        _voteAll(_acceptedLeaf, REJECT, EXACT, UNSEEN);
        court.settle(_outcomeAt(BOB_ACCEPTED));
        assertEq(ledger.standingOf(_outcomeAt(BOB_ACCEPTED)).verdict, ACCEPTED, "as recorded");
    }

    function testFuzz_standingOf_tellsWhatIsRecorded_whileACaseIsOpen(uint256 waited) public {
        _judgeTwo();
        _challengeAndDraw(BOB_ACCEPTED, REJECT);
        _voteAll(_acceptedLeaf, REJECT, REJECT, REJECT);
        vm.warp(block.timestamp + bound(waited, 0, 365 days));
        assertEq(ledger.standingOf(_outcomeAt(BOB_ACCEPTED)).verdict, ACCEPTED, "until it is settled");
    }

    // ------------------------------------------------------------------- finality

    function testFuzz_standingOf_isNotFinal_whileACaseIsOpen(uint256 waited) public {
        _judgeTwo();
        _challenge(BOB_ACCEPTED, REJECT);
        vm.warp(block.timestamp + CHALLENGE_WINDOW + bound(waited, 0, 365 days));
        assertFalse(ledger.standingOf(_outcomeAt(BOB_ACCEPTED)).isFinal, "its case is open");
        assertTrue(ledger.standingOf(_outcomeAt(ALICE_FRAUD)).isFinal, "its neighbour's never was");
    }

    function testFuzz_standingOf_isNotFinal_beforeTheWindowCloses_whateverAJurySaid(uint256 waited) public {
        _judgeTwo();
        uint256 closesAt = block.timestamp + CHALLENGE_WINDOW;
        _decide(BOB_ACCEPTED, REJECT, REJECT);
        vm.warp(bound(waited, block.timestamp, closesAt + 1 days));
        assertEq(ledger.standingOf(_outcomeAt(BOB_ACCEPTED)).isFinal, block.timestamp >= closesAt, "final");
    }

    function testFuzz_standingOf_ofAFraud_closesOneWindowAfterThePauseThatMetIt(uint256 started, uint256 waited)
        public
    {
        _judgeTwo();
        vm.warp(block.timestamp + bound(started, 0, CHALLENGE_WINDOW - 1));
        uint256 closesAt = _pauseSlashing() + CHALLENGE_WINDOW;
        vm.warp(bound(waited, block.timestamp, closesAt + 1 days));
        IContributionLedger.Standing memory standing = ledger.standingOf(_outcomeAt(ALICE_FRAUD));
        assertEq(standing.closesAt, closesAt, "prolonged");
        assertEq(standing.isFinal, block.timestamp >= closesAt, "final");
    }

    function testFuzz_standingOf_ofAFraud_closesAsEver_whenAPauseMetNoWindow(uint256 gap) public {
        _judgeTwo();
        uint256 closesAt = block.timestamp + CHALLENGE_WINDOW;
        vm.warp(closesAt + bound(gap, 0, 30 days));
        _pauseSlashing();
        assertEq(ledger.standingOf(_outcomeAt(ALICE_FRAUD)).closesAt, closesAt, "what is final stays final");
    }

    function test_standingOf_ofAFraud_closesAsEver_whenThePauseWasOver() public {
        vm.warp(_pauseSlashing());
        _judgeTwo();
        assertEq(
            ledger.standingOf(_outcomeAt(ALICE_FRAUD)).closesAt, block.timestamp + CHALLENGE_WINDOW, "not prolonged"
        );
    }

    function testFuzz_standingOf_ofAnAcceptance_closesAsEver_whateverIsPaused(uint256 started) public {
        _judgeTwo();
        uint256 closesAt = block.timestamp + CHALLENGE_WINDOW;
        vm.warp(block.timestamp + bound(started, 0, CHALLENGE_WINDOW - 1));
        _pauseSlashing();
        assertEq(ledger.standingOf(_outcomeAt(BOB_ACCEPTED)).closesAt, closesAt, "workers wait for no pause");
    }

    function test_standingOf_ofAFraudThatAJuryFound_closesOneWindowAfterAPause() public {
        _judgeTwo();
        uint256 closesAt = _pauseSlashing() + CHALLENGE_WINDOW;
        _decide(BOB_ACCEPTED, EXACT, EXACT);
        assertEq(ledger.standingOf(_outcomeAt(BOB_ACCEPTED)).closesAt, closesAt, "a fraud now");
    }

    // ------------------------------------------------------------- mark disputed

    function testFuzz_markDisputed_reverts_whenNotTheCourt(address caller) public {
        vm.assume(caller != address(court));
        _expectUnauthorized(caller);
        vm.prank(caller);
        ledger.markDisputed(1);
    }

    function testFuzz_markDisputed_setsOneBit(uint256 count) public {
        bytes[] memory records = _accepted(bound(count, 1, 20));
        uint64 batchId = _commitAndPost(records);
        bytes32 before = ledger.commitmentOf(batchId);
        vm.prank(address(court));
        ledger.markDisputed(batchId);
        assertEq(ledger.commitmentOf(batchId), before | bytes32(uint256(1)), "the lowest");
        assertTrue(ledger.isDisputed(batches[batchId]), "disputed");
    }

    function test_markDisputed_followsAClaim() public {
        _judgeTwo();
        assertFalse(ledger.isDisputed(batches[_batchId]), "not before");
        _challenge(BOB_ACCEPTED, REJECT);
        assertTrue(ledger.isDisputed(batches[_batchId]), "remembered, under the same header");
    }

    function test_markDisputed_outlastsItsCase() public {
        _judgeTwo();
        _decide(BOB_ACCEPTED, REJECT, ACCEPT);
        assertTrue(ledger.isDisputed(batches[_batchId]), "for ever");
    }

    // --------------------------------------------------------------- is disputed

    function testFuzz_isDisputed_reverts_whenTheHeaderIsNot(uint256 field, bool disputed) public {
        _judgeTwo();
        if (disputed) _challenge(BOB_ACCEPTED, REJECT);
        IContributionLedger.Batch memory header = _mutatedHeader(_batchId, field);
        _expectBatchMismatch(header.batchId);
        ledger.isDisputed(header);
    }

    function testFuzz_isDisputed_reverts_whenAFieldHoldsMoreBitsThanItsType(uint256 word, uint256 bit) public {
        uint64 batchId = _commit(1);
        bytes memory call = abi.encodeCall(ledger.isDisputed, (batches[batchId]));
        uint256[HEADER_FIELDS] memory width = [uint256(64), 64, 256, 256, 32, 64, 88, 32, 40, 40, 88, 8];
        word = bound(word, 0, HEADER_FIELDS - 1);
        vm.assume(word != 2 && word != 3);
        bit = bound(bit, width[word], 255);
        uint256 at = 4 + 32 * word + 31 - bit / 8;
        call[at] = bytes1(uint8(call[at]) ^ uint8(1 << (bit % 8)));
        (bool success,) = address(ledger).staticcall(call);
        assertFalse(success, "dirty bits are refused");
    }

    // ---------------------------------------------------------- require evidence

    /// @dev What the batch holds at Alice's position, signed with her key.
    function _aliceHeld() private view returns (IContributionLedger.CommittedWork memory) {
        IContributionLedger.Submission memory submission = _submission(alice, 1, 0);
        return _held(_outcomeAt(ALICE_FRAUD), submission, _signSubmission(submission, aliceNodeKey));
    }

    function _expectNoEvidence(IContributionLedger.CommittedWork memory work, address signer) private {
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        _expectInvalidSubmission(work.submission.worker, signer);
        ledger.requireEvidence(outcome, work);
    }

    /// @dev Signed by the worker's node, but neither what the batch holds nor what the record names.
    function testFuzz_requireEvidence_reverts_forAnotherSubmission(uint256 field, uint32 change, bool proves) public {
        vm.assume(change != 0);
        _judgeTwo();
        IContributionLedger.CommittedWork memory work = _aliceHeld();
        IContributionLedger.Submission memory submission = work.submission;
        field = bound(field, 0, 5);
        if (field == 0) submission.runId ^= change;
        if (field == 1) submission.worker = bob;
        if (field == 2) submission.step ^= change;
        if (field == 3) submission.index ^= change;
        if (field == 4) submission.policyVersion ^= change;
        if (field == 5) submission.fileHash ^= bytes32(uint256(change));
        work.nodeSignature = _signSubmission(submission, aliceNodeKey);
        if (!proves) work.proof = new bytes32[](0);
        _expectNoEvidence(work, aliceNode);
    }

    function testFuzz_requireEvidence_reverts_whenAnotherKeySigned(uint256 key) public {
        key = bound(key, 1, 1 << 200);
        vm.assume(key != aliceNodeKey);
        _judgeTwo();
        IContributionLedger.CommittedWork memory work = _aliceHeld();
        work.nodeSignature = _signSubmission(work.submission, key);
        _expectNoEvidence(work, vm.addr(key));
    }

    /// @dev A submission that differs in a count alone has the record's name, and is not what the batch holds.
    function testFuzz_requireEvidence_isNoProof_forAnotherCount(bool units, uint32 change) public {
        vm.assume(change != 0);
        _judgeTwo();
        IContributionLedger.CommittedWork memory work = _aliceHeld();
        if (units) work.submission.units ^= change;
        else work.submission.rollouts ^= change;
        work.nodeSignature = _signSubmission(work.submission, aliceNodeKey);
        assertFalse(ledger.requireEvidence(_outcomeAt(ALICE_FRAUD), work), "named, but not held");
    }

    function testFuzz_requireEvidence_isNoProof_whenTheProofIsBroken(bytes32 sibling, uint256 length) public {
        _judgeTwo();
        IContributionLedger.CommittedWork memory work = _aliceHeld();
        length = bound(length, 0, 3);
        vm.assume(length != 1 || sibling != work.proof[0]);
        bytes32[] memory proof = new bytes32[](length);
        if (length != 0) proof[0] = length == 1 ? sibling : work.proof[0];
        work.proof = proof;
        assertFalse(ledger.requireEvidence(_outcomeAt(ALICE_FRAUD), work), "named, but not held");
    }

    function test_requireEvidence_isProof_forWhatTheBatchHolds() public {
        _judgeTwo();
        assertTrue(ledger.requireEvidence(_outcomeAt(ALICE_FRAUD), _aliceHeld()), "held");
    }

    // ------------------------------------------------------------------- signers

    function testFuzz_signers_areRecovered(uint256 key, uint32 index, bytes32 recordsHash) public view {
        key = bound(key, 1, 1 << 200);
        IContributionLedger.Submission memory submission = _submission(alice, 1, index);
        assertEq(ledger.submissionSigner(submission, _signSubmission(submission, key)), vm.addr(key), "submission");
        IContributionLedger.Outcomes memory outcomes = IContributionLedger.Outcomes(index, recordsHash, recordsHash);
        bytes32 typeHash = keccak256("Outcomes(uint64 batchId,bytes32 batchRoot,bytes32 recordsHash)");
        bytes memory signature = _sign(key, ledger.DOMAIN_SEPARATOR(), keccak256(abi.encode(typeHash, outcomes)));
        assertEq(ledger.outcomesSigner(outcomes, signature), vm.addr(key), "outcomes");
    }

    function testFuzz_signers_areZero_whenMalformed(bytes memory signature) public view {
        vm.assume(signature.length != 65);
        assertEq(ledger.submissionSigner(_submission(alice, 1, 0), signature), address(0), "submission");
        assertEq(ledger.outcomesSigner(IContributionLedger.Outcomes(1, 0, 0), signature), address(0), "outcomes");
    }

    // --------------------------------------------------------------------- times

    function test_times_areThoseOfTheDeployment() public view {
        assertEq(ledger.challengeWindow(), CHALLENGE_WINDOW, "challenge window");
        assertEq(ledger.outcomeDeadline(), OUTCOME_DEADLINE, "outcome deadline");
        assertEq(ledger.appealTime(), APPEAL_TIME, "time to call judges of the network");
        assertEq(ledger.judgementTime(), JUDGED, "judgement time");
    }

    function testFuzz_unitCapOf_countsActiveStakeOfTheRun(uint256 extra, uint256 unbonding) public {
        extra = bound(extra, 1, WALLET - REQUIRED_STAKE);
        unbonding = bound(unbonding, 1, extra);
        _deposit(runId, alice, extra);
        vm.prank(alice);
        vault.requestUnbond(runId, unbonding);
        assertEq(
            ledger.unitCapOf(runId, alice), (REQUIRED_STAKE + extra - unbonding) / STAKE_PER_UNIT, "what is active"
        );
        assertEq(ledger.unitCapOf(runId + 1, alice), 0, "nothing in another run");
    }

    function testFuzz_constructor_reverts_whenPausesFollowTooFast(uint256 window) public {
        window = bound(window, SLASH_COOLDOWN + 1, 365 days);
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerCooldownTooShort.selector, SLASH_COOLDOWN, window)
        );
        new ContributionLedger(
            ContributionLedger.Network(runs, workers, vault, court, escrow), window, OUTCOME_DEADLINE, STAKE_PER_UNIT
        );
    }

    function testFuzz_constructor_takesWindowsThatPausesLeaveOver(uint256 window) public {
        window = bound(window, 0, SLASH_COOLDOWN);
        ContributionLedger other = new ContributionLedger(
            ContributionLedger.Network(runs, workers, vault, court, escrow), window, OUTCOME_DEADLINE, STAKE_PER_UNIT
        );
        assertEq(other.challengeWindow(), window, "deployed");
    }
}
