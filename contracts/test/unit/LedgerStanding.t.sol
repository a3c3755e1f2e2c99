// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IContributionLedger, IContributionLedgerErrors} from "../../src/interfaces/IContributionLedger.sol";
import {LedgerTest} from "../LedgerTest.sol";

/// forge-config: default.fuzz.runs = 96
contract LedgerStandingTest is LedgerTest {
    function setUp() public override {
        super.setUp();
        _startRun(WALLET / 2);
    }

    // --------------------------------------------------------------- standing of

    function testFuzz_standingOf_reverts_whilePending(uint256 waited) public {
        IContributionLedger.Submission[] memory submissions = _submissions(alice, 3);
        uint64 batchId = _commitSubmissions(submissions);
        uint256 dueAt = block.timestamp + OUTCOME_DEADLINE;
        vm.warp(block.timestamp + bound(waited, 0, OUTCOME_DEADLINE - 1));
        IContributionLedger.OutcomeProof memory outcome = _proveClaimed(batchId, submissions, 1);
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerOutcomesPending.selector, batchId, dueAt)
        );
        ledger.standingOf(outcome);
    }

    function testFuzz_standingOf_reverts_whenTheHeaderIsNot(uint256 field) public {
        bytes[] memory records = _accepted(3);
        IContributionLedger.OutcomeProof memory outcome = _prove(_commitAndPost(records), records, 1);
        _mutateHeader(outcome.batch, field);
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerBatchMismatch.selector, outcome.batch.batchId)
        );
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
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidProof.selector, batchId, outcome.position)
        );
        ledger.standingOf(outcome);
    }

    function testFuzz_standingOf_reverts_whenTheSubmissionsRootIsProven(bytes32 random) public {
        // Until outcomes are posted the root is over submissions: it must never serve as a root of outcomes.
        bytes memory record = bytes.concat(random, bytes22(random), hex"0100");
        uint64 batchId = _commitRoot(_leaf(1, 0, record), 1, 1);
        IContributionLedger.OutcomeProof memory outcome =
            IContributionLedger.OutcomeProof(batches[batchId], 0, record, new bytes32[](0));
        _passDeadline();
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidProof.selector, batchId, 0));
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
        assertEq(standing.offence, _offence(given), "offence");
        assertEq(standing.verdict, given.verdict, "verdict");
        assertEq(standing.closesAt, closesAt, "end of the window");
        assertEq(standing.isFinal, waited >= CHALLENGE_WINDOW, "final");
    }

    function _offence(IContributionLedger.Outcome memory o) private view returns (bytes32) {
        return keccak256(abi.encode(runId, o.workerId, o.step, o.index, o.fileHash));
    }

    function testFuzz_standingOf_tellsWhatAJuryDecided(uint8 verdict, bool overturn) public {
        verdict = uint8(bound(verdict, INCOMPLETE, FRAUD));
        bytes[] memory records = _accepted(3);
        IContributionLedger.OutcomeProof memory outcome = _prove(_commitAndPost(records), records, 1);
        _decide(outcome, verdict, overturn);
        IContributionLedger.Standing memory standing = ledger.standingOf(outcome);
        assertEq(standing.verdict, overturn ? verdict : ACCEPTED, "what stands");
        assertEq(standing.outcome.verdict, ACCEPTED, "as recorded");
        assertTrue(ledger.isDisputed(outcome.batch), "remembered, under the same header");
        assertEq(ledger.standingOf(_prove(outcome.batch.batchId, records, 2)).verdict, ACCEPTED, "nothing else moves");
    }

    function testFuzz_standingOf_isNotFinal_whileACaseIsOpen(uint256 waited) public {
        bytes[] memory records = _accepted(3);
        uint64 batchId = _commitAndPost(records);
        _challenge(_prove(batchId, records, 1), REJECTED);
        vm.warp(block.timestamp + CHALLENGE_WINDOW + bound(waited, 0, 365 days));
        assertFalse(ledger.standingOf(_prove(batchId, records, 1)).isFinal, "its case is open");
        assertTrue(ledger.standingOf(_prove(batchId, records, 2)).isFinal, "its neighbour's never was");
    }

    // ------------------------------------------------------------- mark disputed

    function testFuzz_markDisputed_reverts_whenNotTheCourt(address caller) public {
        vm.assume(caller != address(court));
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerUnauthorized.selector, caller));
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

    // --------------------------------------------------------------- is disputed

    function testFuzz_isDisputed_reverts_whenTheHeaderIsNot(uint256 field, bool disputed) public {
        bytes[] memory records = _accepted(2);
        uint64 batchId = _commitAndPost(records);
        if (disputed) _challenge(_prove(batchId, records, 0), REJECTED);
        IContributionLedger.Batch memory header = batches[batchId];
        _mutateHeader(header, field);
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerBatchMismatch.selector, header.batchId));
        ledger.isDisputed(header);
    }

    function testFuzz_isDisputed_reverts_whenAFieldHoldsMoreBitsThanItsType(uint256 word, uint256 bit) public {
        uint64 batchId = _commit(1);
        bytes memory call = abi.encodeCall(ledger.isDisputed, (batches[batchId]));
        uint256[9] memory width = [uint256(64), 64, 256, 32, 64, 88, 40, 40, 88];
        word = bound(word, 0, 8);
        vm.assume(word != 2);
        bit = bound(bit, width[word], 255);
        uint256 at = 4 + 32 * word + 31 - bit / 8;
        call[at] = bytes1(uint8(call[at]) ^ uint8(1 << (bit % 8)));
        (bool success,) = address(ledger).staticcall(call);
        assertFalse(success, "dirty bits are refused");
    }

    // ------------------------------------------------------------ in flight until

    function _expectInFlight(bytes memory why, IContributionLedger.OutcomeProof memory outcome, uint32 index) private {
        IContributionLedger.Submission memory submission = _submission(alice, 1, index);
        bytes memory signature = _signSubmission(submission, aliceNodeKey);
        vm.expectRevert(why);
        ledger.inFlightUntil(outcome, submission, signature);
    }

    function _inFlightUntil(IContributionLedger.OutcomeProof memory outcome, uint32 index)
        private
        view
        returns (uint256)
    {
        IContributionLedger.Submission memory submission = _submission(alice, 1, index);
        return ledger.inFlightUntil(outcome, submission, _signSubmission(submission, aliceNodeKey));
    }

    function testFuzz_inFlightUntil_whilePending(uint256 at, uint256 waited) public {
        at = bound(at, 0, 4);
        IContributionLedger.Submission[] memory submissions = _submissions(alice, 5);
        uint64 batchId = _commitSubmissions(submissions);
        uint256 closesAt = block.timestamp + OUTCOME_DEADLINE + CHALLENGE_WINDOW;
        vm.warp(block.timestamp + bound(waited, 0, OUTCOME_DEADLINE + CHALLENGE_WINDOW - 1));
        uint256 until = _inFlightUntil(_proveClaimed(batchId, submissions, at), uint32(at));
        assertEq(until, closesAt, "as if outcomes never came");
    }

    function testFuzz_inFlightUntil_oncePosted(uint8 verdict, uint256 waited) public {
        bytes[] memory records = _one(_record(alice, 1, 0, uint8(bound(verdict, ACCEPTED, FRAUD))));
        uint64 batchId = _commitAndPost(records);
        uint256 closesAt = block.timestamp + CHALLENGE_WINDOW;
        vm.warp(block.timestamp + bound(waited, 0, CHALLENGE_WINDOW - 1));
        assertEq(_inFlightUntil(_prove(batchId, records, 0), 0), closesAt, "whatever the verdict");
    }

    function testFuzz_inFlightUntil_reverts_onceFinal(bool posted, uint256 waited) public {
        IContributionLedger.Submission[] memory submissions = _submissions(alice, 1);
        uint64 batchId = _commitSubmissions(submissions);
        if (posted) _post(batchId, _accepted(1), QUORUM);
        uint256 window = posted ? CHALLENGE_WINDOW : OUTCOME_DEADLINE + CHALLENGE_WINDOW;
        vm.warp(block.timestamp + bound(waited, window, 365 days));
        _expectInFlight(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerFinal.selector, batchId, 0),
            posted ? _prove(batchId, _accepted(1), 0) : _proveClaimed(batchId, submissions, 0),
            0
        );
    }

    function test_inFlightUntil_outlastsTheWindow_whileACaseIsOpen() public {
        bytes[] memory records = _accepted(2);
        IContributionLedger.OutcomeProof memory outcome = _prove(_commitAndPost(records), records, 0);
        _challenge(outcome, REJECTED);
        uint256 closesAt = block.timestamp + CHALLENGE_WINDOW;
        vm.warp(closesAt + 30 days);
        assertEq(_inFlightUntil(outcome, 0), closesAt, "still in flight");
    }

    function testFuzz_inFlightUntil_reverts_whenAnotherSubmissionIsGiven(uint32 index) public {
        vm.assume(index != 0);
        bytes[] memory records = _accepted(2);
        _expectInFlight(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidSubmission.selector, alice, aliceNode),
            _prove(_commitAndPost(records), records, 0),
            index
        );
    }

    function testFuzz_inFlightUntil_reverts_whenNotInTheBatch(bytes32 sibling) public {
        bytes[] memory records = _accepted(2);
        IContributionLedger.OutcomeProof memory outcome = _prove(_commitAndPost(records), records, 0);
        vm.assume(sibling != outcome.proof[0]);
        outcome.proof[0] = sibling;
        _expectInFlight(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidProof.selector, outcome.batch.batchId, 0),
            outcome,
            0
        );
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
}
