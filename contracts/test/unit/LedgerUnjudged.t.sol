// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IERC20Errors} from "@openzeppelin/contracts/interfaces/draft-IERC6093.sol";

import {
    IContributionLedger,
    IContributionLedgerErrors,
    IContributionLedgerEvents
} from "../../src/interfaces/IContributionLedger.sol";
import {IDisputeCourtErrors, IDisputeCourtEvents} from "../../src/interfaces/IDisputeCourt.sol";
import {IRewardEscrow, IRewardEscrowErrors, IRewardEscrowEvents} from "../../src/interfaces/IRewardEscrow.sol";
import {IWorkerRegistry} from "../../src/interfaces/IWorkerRegistry.sol";
import {LedgerTest} from "../LedgerTest.sol";

/// @title A batch of Alice's that its run left unjudged, and her steps to judges of the network
abstract contract UnjudgedTest is LedgerTest {
    uint256 internal constant COUNT = 5;

    /// @dev More units than a record holds.
    uint256 internal constant MANY = uint256(type(uint32).max) + 1_000_000;

    IContributionLedger.Submission[] internal _claimed;
    uint64 internal _id;
    uint256 internal _dueAt;

    function setUp() public virtual override {
        super.setUp();
        IContributionLedger.Submission[] memory submissions = _submissions(alice, COUNT);
        for (uint256 i = 0; i < COUNT; ++i) {
            _claimed.push(submissions[i]);
        }
        _id = _commitSubmissions(submissions);
        _dueAt = block.timestamp + OUTCOME_DEADLINE;
    }

    /// @dev The submission at a position, with Alice's signature and a ticket that ended with the commitment.
    function _workAt(uint256 position) internal view returns (IContributionLedger.LeasedWork memory) {
        return _work(_claimed[position], aliceNodeKey, batches[_id].committedAt);
    }

    function _proofAt(uint256 position) internal view returns (bytes32[] memory) {
        return _batchSiblings(_submissionLeaves(_claimed), position);
    }

    function _splitAs(address caller, IContributionLedger.LeasedWork memory work, bytes32[] memory proof)
        internal
        returns (uint64)
    {
        IContributionLedger.Batch memory batch = batches[_id];
        vm.prank(caller);
        uint32 position = batch.count == 1 ? 0 : work.submission.index % uint32(COUNT);
        return ledger.splitOff(batch, work, position, proof, _noSources());
    }

    /// @dev Alice takes a submission out of the batch.
    function _split(uint256 position) internal returns (uint64 ownId) {
        ownId = _splitAs(alice, _workAt(position), _proofAt(position));
        _rememberSplit(_id, ownId, _claimed[position]);
    }

    /// @dev Work of Alice outside the batch that she submits herself, and its batch.
    function _submitDirectly() internal returns (uint64 batchId, IContributionLedger.Submission memory submission) {
        submission = _submission(alice, 2, 0);
        IContributionLedger.LeasedWork memory work = _work(submission, aliceNodeKey, block.timestamp);
        vm.prank(alice);
        batchId = ledger.submitDirect(work, _noSources());
        _remember(batchId, _submissionLeaf(submission), 1, submission.units);
    }

    /// @dev Funds the run for `MANY` units.
    function _fundMany() internal {
        vm.prank(deployer);
        token.transfer(owner, MANY * PRICE);
        vm.prank(owner);
        escrow.fund(runId, MANY * PRICE);
    }

    function _reserved() internal view returns (uint256) {
        return escrow.fundsOf(runId).reserved;
    }
}

/// @title splitOff: a worker takes its submission out of a batch that nobody judged
contract LedgerSplitOffTest is UnjudgedTest {
    // ---------------------------------------------------------------------- time

    function testFuzz_splitOff_reverts_beforeOutcomesAreDue(uint256 time) public {
        vm.warp(bound(time, batches[_id].committedAt, _dueAt - 1));
        _expectOutsideAppeal();
    }

    function testFuzz_splitOff_reverts_onceTheTimeToAppealIsOver(uint256 time) public {
        vm.warp(bound(time, _dueAt + APPEAL_TIME, _dueAt + 365 days));
        _expectOutsideAppeal();
    }

    function testFuzz_splitOff_reverts_onceTheTimeToAppealAWithheldBatchIsOver(uint256 waited, uint256 late) public {
        vm.warp(bound(waited, block.timestamp, _dueAt - 1));
        _withhold(_id);
        vm.warp(block.timestamp + APPEAL_TIME + bound(late, 0, 365 days));
        _expectOutsideAppeal();
    }

    function test_splitOff_reverts_oneSecondBeforeOutcomesAreDue() public {
        vm.warp(_dueAt - 1);
        _expectOutsideAppeal();
    }

    function test_splitOff_reverts_inTheSecondInWhichTheTimeToAppealEnds() public {
        vm.warp(_dueAt + APPEAL_TIME);
        _expectOutsideAppeal();
    }

    function test_splitOff_works_inTheSecondInWhichOutcomesAreDue() public {
        vm.warp(_dueAt);
        assertEq(_split(2), 2, "a batch of its own");
    }

    function test_splitOff_works_inTheLastSecondOfTheTimeToAppeal() public {
        vm.warp(_dueAt + APPEAL_TIME - 1);
        assertEq(_split(2), 2, "a batch of its own");
    }

    function _expectOutsideAppeal() private {
        IContributionLedger.LeasedWork memory work = _workAt(2);
        bytes32[] memory proof = _proofAt(2);
        (uint256 from, uint256 until) = _appealOf(_id);
        _expectWrongTime(_id, from, until);
        _splitAs(alice, work, proof);
    }

    function testFuzz_splitOff_works_onceOutcomesAreDue(uint256 time) public {
        vm.warp(bound(time, _dueAt, _dueAt + APPEAL_TIME - 1));
        assertEq(_split(2), 2, "a batch of its own");
    }

    function testFuzz_splitOff_works_onceTheBatchIsCalledWithheld(uint256 waited, uint256 late) public {
        vm.warp(bound(waited, block.timestamp, _dueAt - 1));
        _withhold(_id);
        vm.warp(block.timestamp + bound(late, 0, APPEAL_TIME - 1));
        assertEq(_split(2), 2, "a batch of its own");
    }

    function testFuzz_splitOff_reverts_onceJudged(uint256 late) public {
        _post(_id, _accepted(COUNT), QUORUM);
        vm.warp(_dueAt + bound(late, 0, APPEAL_TIME - 1));
        IContributionLedger.LeasedWork memory work = _workAt(2);
        bytes32[] memory proof = _proofAt(2);
        _expectOutcomesPosted(_id);
        _splitAs(alice, work, proof);
    }

    // ---------------------------------------------------------------- in court

    /// @dev Makes the third submission a batch of one of the orchestrator's, which she brings before judges.
    function _summonBatchOfOne() private {
        _id = _commitRoot(_submissionLeaf(_claimed[2]), 1, 1000);
        _passDeadline();
        _summon(_id, _claimed[2]);
    }

    function test_splitOff_reverts_whileJudgesLookAtTheBatch() public {
        IContributionLedger.LeasedWork memory work = _workAt(2);
        _summonBatchOfOne();
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerInCourt.selector, _id));
        _splitAs(alice, work, new bytes32[](0));
    }

    function test_splitOff_reverts_onceJudgesVotedAndNobodySettled() public {
        IContributionLedger.LeasedWork memory work = _workAt(2);
        _summonBatchOfOne();
        bytes32 caseId = court.summonsOf(_id);
        _draw(caseId);
        _voteAll(caseId, REJECT, REJECT, REJECT);
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerInCourt.selector, _id));
        _splitAs(alice, work, new bytes32[](0));
    }

    function test_splitOff_works_onceJudgesWereOfNoOneMind() public {
        IContributionLedger.LeasedWork memory work = _workAt(2);
        _summonBatchOfOne();
        vm.warp(block.timestamp + JURY_TIME);
        court.settleSummoned(batches[_id], _claimed[2]);
        assertEq(_splitAs(alice, work, new bytes32[](0)), _id + 1, "nobody judged it");
    }

    // -------------------------------------------------------------------- header

    function testFuzz_splitOff_reverts_whenTheHeaderIsNot(uint256 field) public {
        _passDeadline();
        IContributionLedger.LeasedWork memory work = _workAt(2);
        bytes32[] memory proof = _proofAt(2);
        IContributionLedger.Batch memory header = _mutatedHeader(_id, field);
        _expectBatchMismatch(header.batchId);
        vm.prank(alice);
        ledger.splitOff(header, work, 2, proof, _noSources());
    }

    // -------------------------------------------------------------------- caller

    function testFuzz_splitOff_reverts_whenSomebodyElseCalls(address caller) public {
        vm.assume(caller != alice && caller != aliceNode);
        _passDeadline();
        IContributionLedger.LeasedWork memory work = _workAt(2);
        bytes32[] memory proof = _proofAt(2);
        _expectUnauthorized(caller);
        _splitAs(caller, work, proof);
    }

    function test_splitOff_works_forTheNode() public {
        _enrich(aliceNode);
        _passDeadline();
        uint64 ownId = _splitAs(aliceNode, _workAt(2), _proofAt(2));
        assertEq(court.bondOf(ownId), aliceNode, "with its own bond");
    }

    // ---------------------------------------------------------------- submission

    function testFuzz_splitOff_reverts_whenTheSubmissionIsNotOfTheBatch(uint32 index) public {
        vm.assume(index >= COUNT);
        _expectInvalid(_work(_submission(alice, 1, index), aliceNodeKey, block.timestamp), aliceNode);
    }

    function testFuzz_splitOff_reverts_whenTheProofIsBroken(bytes32 sibling, uint256 at) public {
        IContributionLedger.LeasedWork memory work = _workAt(2);
        bytes32[] memory proof = _proofAt(2);
        at = bound(at, 0, proof.length - 1);
        vm.assume(sibling != proof[at]);
        proof[at] = sibling;
        _passDeadline();
        _expectInvalidSubmission(alice, aliceNode);
        _splitAs(alice, work, proof);
    }

    function test_splitOff_reverts_whenTheSubmissionIsOfAnotherRun() public {
        IContributionLedger.Submission memory submission = _submission(alice, 1, 2);
        submission.runId = _createRun();
        IContributionLedger.Batch memory batch = _commitSubmission(submission);
        _passDeadline();
        IContributionLedger.LeasedWork memory work = _work(submission, aliceNodeKey, block.timestamp);
        _expectInvalidSubmission(alice, aliceNode);
        vm.prank(alice);
        ledger.splitOff(batch, work, 0, new bytes32[](0), _noSources());
    }

    function _commitSubmission(IContributionLedger.Submission memory submission)
        private
        returns (IContributionLedger.Batch memory)
    {
        return batches[_commitRoot(_submissionLeaf(submission), 1, submission.units)];
    }

    function testFuzz_splitOff_reverts_whenTheBatchWasCommittedForLess(uint256 committed) public {
        committed = bound(committed, 1, 999);
        IContributionLedger.LeasedWork memory work = _workAt(2);
        _id = _commitRoot(_batchRoot(_submissionLeaves(_claimed)), COUNT, committed);
        _passDeadline();
        bytes32[] memory proof = _proofAt(2);
        _expectInvalidSubmission(alice, aliceNode);
        _splitAs(alice, work, proof);
    }

    function test_splitOff_reverts_whenOthersTookAllUnitsOfTheBatch() public {
        _id = _commitRoot(_batchRoot(_submissionLeaves(_claimed)), COUNT, 2000);
        _passDeadline();
        _split(0);
        _split(1);
        IContributionLedger.LeasedWork memory work = _workAt(2);
        bytes32[] memory proof = _proofAt(2);
        _expectInvalidSubmission(alice, aliceNode);
        _splitAs(alice, work, proof);
    }

    function testFuzz_splitOff_reverts_whenAnotherKeySigned(uint256 key) public {
        key = bound(key, 1, 1 << 200);
        vm.assume(key != aliceNodeKey);
        _expectInvalid(_work(_claimed[2], key, block.timestamp), vm.addr(key));
    }

    function testFuzz_splitOff_reverts_whenTheSignatureIsMalformed(bytes memory signature) public {
        vm.assume(signature.length != 65);
        IContributionLedger.LeasedWork memory work = _workAt(2);
        work.nodeSignature = signature;
        _expectInvalid(work, address(0));
    }

    function test_splitOff_reverts_whenItClaimsNothing() public {
        _claimed[2].units = 0;
        _id = _commitSubmissions(_claimed);
        _expectInvalid(_workAt(2), aliceNode);
    }

    function testFuzz_splitOff_reverts_whenRolloutsExceedARecord(uint32 rollouts) public {
        _claimed[2].rollouts = uint32(bound(rollouts, uint256(type(uint16).max) + 1, type(uint32).max));
        _id = _commitSubmissions(_claimed);
        _expectInvalid(_workAt(2), aliceNode);
    }

    function testFuzz_splitOff_reverts_whenUnitsExceedARecord(uint64 units) public {
        // The run can pay them, so that the record is what does not hold them.
        _fundMany();
        units = uint64(bound(units, uint256(type(uint32).max) + 1, MANY));
        IContributionLedger.Submission memory submission = _claimed[2];
        submission.units = units;
        IContributionLedger.Batch memory batch = _commitSubmission(submission);
        IContributionLedger.LeasedWork memory work = _work(submission, aliceNodeKey, block.timestamp);
        _passDeadline();
        _expectInvalidSubmission(alice, aliceNode);
        vm.prank(alice);
        ledger.splitOff(batch, work, 0, new bytes32[](0), _noSources());
    }

    function _expectInvalid(IContributionLedger.LeasedWork memory work, address signer) private {
        _passDeadline();
        bytes32[] memory proof = _proofAt(2);
        _expectInvalidSubmission(alice, signer);
        _splitAs(alice, work, proof);
    }

    // ---------------------------------------------------------------- the worker

    function testFuzz_splitOff_reverts_whenTheNodeWasReplacedBeforeTheCommitment(uint256 key) public {
        _rotateNode(alice, bound(key, 1, 1 << 200));
        vm.warp(block.timestamp + 1);
        _id = _commitSubmissions(_claimed);
        _expectInvalid(_workAt(2), aliceNode);
    }

    function testFuzz_splitOff_works_whenTheNodeWasReplacedLater(uint256 key, uint256 waited) public {
        vm.warp(block.timestamp + bound(waited, 0, OUTCOME_DEADLINE));
        _rotateNode(alice, bound(key, 1, 1 << 200));
        vm.warp(_dueAt);
        assertEq(_split(2), 2, "the key was hers when the batch was committed");
    }

    function test_splitOff_reverts_whenTheWorkerLeftBeforeTheCommitment() public {
        vm.prank(alice);
        workers.exit(runId);
        vm.warp(block.timestamp + 1);
        _id = _commitSubmissions(_claimed);
        _expectInvalid(_workAt(2), aliceNode);
    }

    function testFuzz_splitOff_works_whenTheWorkerLeftLater(uint256 waited) public {
        vm.warp(block.timestamp + bound(waited, 0, OUTCOME_DEADLINE));
        vm.prank(alice);
        workers.exit(runId);
        vm.warp(_dueAt);
        assertEq(_split(2), 2, "it worked for the run when the batch was committed");
    }

    function test_splitOff_works_whenTheWorkerIsJailed() public {
        vm.prank(alice);
        vault.requestUnbond(runId, 1);
        _passDeadline();
        assertEq(_split(2), 2, "work is not lost with the right to work");
    }

    function test_splitOff_works_whenTheRunIsPaused() public {
        vm.prank(owner);
        runs.setSubmissionsPaused(runId, true);
        _passDeadline();
        assertEq(_split(2), 2, "no owner keeps a worker from the judges");
    }

    function test_splitOff_works_whenTheRunIsClosed() public {
        vm.prank(owner);
        runs.closeRun(runId);
        _passDeadline();
        assertEq(_split(2), 2, "no owner keeps a worker from the judges");
    }

    // -------------------------------------------------------------------- ticket

    function testFuzz_splitOff_asksForNoTicket(uint256 key, uint64 deadline) public {
        IContributionLedger.LeasedWork memory work = _work(_claimed[2], aliceNodeKey, deadline);
        work.ticketSignature = _signTicket(work.ticket, bound(key, 1, 1 << 200));
        _passDeadline();
        assertEq(_splitAs(alice, work, _proofAt(2)), 2, "an orchestrator committed it: jurors look at the ticket");
    }

    function test_splitOff_works_whenTheOrchestratorWasReplaced() public {
        _passDeadline();
        vm.prank(owner);
        runs.rotateOrchestrator(runId, orchestrator, stranger);
        assertEq(_split(2), 2, "no owner keeps a worker from the judges");
    }

    // ---------------------------------------------------------------------- slot

    function testFuzz_splitOff_reverts_twice(uint256 at) public {
        at = bound(at, 0, COUNT - 1);
        _passDeadline();
        _split(at);
        IContributionLedger.LeasedWork memory work = _workAt(at);
        bytes32[] memory proof = _proofAt(at);
        _expectSlotUsed(alice, 1, uint32(at));
        _splitAs(alice, work, proof);
    }

    function test_splitOff_reverts_outOfItsOwnBatch() public {
        _passDeadline();
        uint64 ownId = _split(2);
        IContributionLedger.Batch memory own = batches[ownId];
        IContributionLedger.LeasedWork memory work = _workAt(2);
        _expectSlotUsed(alice, 1, 2);
        vm.prank(alice);
        ledger.splitOff(own, work, 0, new bytes32[](0), _noSources());
    }

    function test_splitOff_reverts_whenTheSlotWasSubmittedDirectly() public {
        IContributionLedger.LeasedWork memory work = _workAt(2);
        vm.prank(alice);
        ledger.submitDirect(work, _noSources());
        _passDeadline();
        bytes32[] memory proof = _proofAt(2);
        _expectSlotUsed(alice, 1, 2);
        _splitAs(alice, work, proof);
    }

    function test_splitOff_takesOneAfterTheOther() public {
        _passDeadline();
        for (uint256 i = 0; i < COUNT; ++i) {
            assertEq(_split(i), i + 2, "each in a batch of its own");
        }
        assertEq(batches[_id].units, 0, "nothing is left");
        _assertHeader(_id, "the batch that is left");
    }

    // ---------------------------------------------------------------------- bond

    function test_splitOff_takesABond() public {
        _passDeadline();
        uint256 before = token.balanceOf(alice);
        IContributionLedger.LeasedWork memory work = _workAt(2);
        bytes32[] memory proof = _proofAt(2);
        vm.expectEmit(address(court));
        emit IDisputeCourtEvents.BondTaken(2, alice, BOND);
        _splitAs(alice, work, proof);
        assertEq(token.balanceOf(alice), before - BOND, "paid");
        assertEq(court.bondOf(2), alice, "for the new batch");
        assertEq(court.bondOf(_id), address(0), "not for the old one");
    }

    function testFuzz_splitOff_reverts_whenTheBondIsNotApproved(uint256 allowance) public {
        allowance = bound(allowance, 0, BOND - 1);
        vm.prank(alice);
        token.approve(address(court), allowance);
        _passDeadline();
        IContributionLedger.LeasedWork memory work = _workAt(2);
        bytes32[] memory proof = _proofAt(2);
        vm.expectRevert(
            abi.encodeWithSelector(IERC20Errors.ERC20InsufficientAllowance.selector, address(court), allowance, BOND)
        );
        _splitAs(alice, work, proof);
    }

    // ------------------------------------------------------------------- sources

    function testFuzz_splitOff_reverts_whenThereAreTooManySources(uint256 count) public {
        count = bound(count, 17, 40);
        _expectRefusedSources(_sources(count, 0), 0);
    }

    function testFuzz_splitOff_reverts_whenASourceIsTooLong(uint256 size) public {
        size = bound(size, 129, 400);
        _expectRefusedSources(_sources(1, size), size);
    }

    function _expectRefusedSources(string[] memory sources, uint256 size) private {
        _passDeadline();
        IContributionLedger.LeasedWork memory work = _workAt(2);
        bytes32[] memory proof = _proofAt(2);
        _expectSourcesTooLarge(sources.length, size);
        vm.prank(alice);
        ledger.splitOff(batches[_id], work, 2, proof, sources);
    }

    function testFuzz_splitOff_showsItsSources(uint256 count, uint256 size) public {
        string[] memory sources = _sources(bound(count, 0, 16), bound(size, 0, 128));
        _passDeadline();
        IContributionLedger.LeasedWork memory work = _workAt(2);
        bytes32[] memory proof = _proofAt(2);
        vm.expectEmit(address(ledger));
        emit IContributionLedgerEvents.BatchSplit(2, _id, alice, work, sources);
        vm.prank(alice);
        ledger.splitOff(batches[_id], work, 2, proof, sources);
    }

    // ------------------------------------------------------------------- records

    function testFuzz_splitOff_makesABatchOfOne(uint256 at, bool withheld) public {
        at = bound(at, 0, COUNT - 1);
        if (withheld) _withhold(_id);
        else _passDeadline();
        uint256 reserved = _reserved();
        IContributionLedger.LeasedWork memory work = _workAt(at);
        bytes32[] memory proof = _proofAt(at);
        vm.expectEmit(address(ledger));
        emit IContributionLedgerEvents.BatchCommitted(
            2, runId, _submissionLeaf(work.submission), 1, 1000, PRICE, 1, batches[_id].committedAt
        );
        vm.expectEmit(address(ledger));
        emit IContributionLedgerEvents.BatchSplit(2, _id, alice, work, _noSources());
        uint64 ownId = _splitAs(alice, work, proof);

        _rememberSplit(_id, ownId, _claimed[at]);
        _assertHeader(ownId, "its own batch has the time, terms and signers of the old one");
        _assertHeader(_id, "the old batch claims so much less");
        assertEq(_reserved(), reserved, "what was set aside moves along");
    }
}

/// @title voidBatch: what nobody judged pays nobody
contract LedgerVoidTest is UnjudgedTest {
    function testFuzz_voidBatch_reverts_whileItsWorkersHaveTime(uint256 time) public {
        vm.warp(bound(time, block.timestamp, _dueAt + APPEAL_TIME - 1));
        _expectWrongTime(_id, _dueAt + APPEAL_TIME, type(uint256).max);
        ledger.voidBatch(batches[_id]);
    }

    function testFuzz_voidBatch_reverts_whileWorkersOfAWithheldBatchHaveTime(uint256 waited, uint256 late) public {
        vm.warp(bound(waited, block.timestamp, _dueAt - 1));
        _withhold(_id);
        uint256 from = block.timestamp + APPEAL_TIME;
        vm.warp(block.timestamp + bound(late, 0, APPEAL_TIME - 1));
        _expectWrongTime(_id, from, type(uint256).max);
        ledger.voidBatch(batches[_id]);
    }

    function testFuzz_voidBatch_reverts_onceJudged(uint256 late) public {
        _post(_id, _accepted(COUNT), QUORUM);
        vm.warp(_dueAt + bound(late, 0, 365 days));
        _expectOutcomesPosted(_id);
        ledger.voidBatch(batches[_id]);
    }

    function testFuzz_voidBatch_reverts_whenTheHeaderIsNot(uint256 field) public {
        vm.warp(_dueAt + APPEAL_TIME);
        IContributionLedger.Batch memory header = _mutatedHeader(_id, field);
        _expectBatchMismatch(header.batchId);
        ledger.voidBatch(header);
    }

    function test_voidBatch_reverts_twice() public {
        vm.warp(_dueAt + APPEAL_TIME);
        ledger.voidBatch(batches[_id]);
        _expectBatchMismatch(_id);
        ledger.voidBatch(batches[_id]);
    }

    function testFuzz_voidBatch_freesTheMoney(address caller, uint256 late) public {
        vm.warp(_dueAt + APPEAL_TIME + bound(late, 0, 365 days));
        IContributionLedger.Batch memory batch = batches[_id];
        vm.expectEmit(address(ledger));
        emit IContributionLedgerEvents.BatchVoided(_id, runId);
        vm.expectEmit(address(escrow));
        emit IRewardEscrowEvents.RewardFreed(runId, 1000 * COUNT * uint256(PRICE));
        vm.prank(caller);
        ledger.voidBatch(batch);
        assertEq(ledger.commitmentOf(_id), 0, "as if it had never been");
        assertEq(_reserved(), 0, "nothing is set aside");
        assertEq(escrow.fundsOf(runId).available, WALLET / 2, "all is the run's again");
    }

    function testFuzz_voidBatch_freesAWithheldBatchsMoney(uint256 waited) public {
        vm.warp(bound(waited, block.timestamp, _dueAt - 1));
        _withhold(_id);
        vm.warp(block.timestamp + APPEAL_TIME);
        ledger.voidBatch(batches[_id]);
        assertEq(_reserved(), 0, "nothing is set aside");
    }

    function testFuzz_voidBatch_freesWhatWasNotSplitOff(uint256 at) public {
        at = bound(at, 0, COUNT - 1);
        _passDeadline();
        _split(at);
        vm.warp(_dueAt + APPEAL_TIME);
        ledger.voidBatch(batches[_id]);
        assertEq(_reserved(), 1000 * uint256(PRICE), "what was split off stays set aside");
    }

    function test_voidBatch_freesWhatWasSplitOffAndNotBroughtBeforeJudges() public {
        _passDeadline();
        uint64 ownId = _split(2);
        vm.warp(_dueAt + APPEAL_TIME);
        ledger.voidBatch(batches[ownId]);
        assertEq(_reserved(), 1000 * (COUNT - 1) * uint256(PRICE), "its own units and no others");
    }

    function test_voidBatch_letsTheBondReturn() public {
        _passDeadline();
        uint256 before = token.balanceOf(alice);
        uint64 ownId = _split(2);
        vm.warp(_dueAt + APPEAL_TIME);
        ledger.voidBatch(batches[ownId]);
        court.returnBond(batches[ownId]);
        assertEq(token.balanceOf(alice), before, "nobody judged it");
    }

    function testFuzz_voidBatch_reverts_whileJudgesLookAtIt(uint256 opened, uint256 late) public {
        _passDeadline();
        uint64 ownId = _split(2);
        vm.warp(bound(opened, _dueAt, _dueAt + APPEAL_TIME - 1));
        _summon(ownId, _claimed[2]);
        vm.warp(_dueAt + APPEAL_TIME + bound(late, 0, 365 days));
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerInCourt.selector, ownId));
        ledger.voidBatch(batches[ownId]);
    }

    function test_voidBatch_works_onceJudgesWereOfNoOneMind() public {
        _passDeadline();
        uint64 ownId = _split(2);
        _summon(ownId, _claimed[2]);
        vm.warp(_dueAt + APPEAL_TIME);
        court.settleSummoned(batches[ownId], _claimed[2]);
        ledger.voidBatch(batches[ownId]);
        assertEq(ledger.commitmentOf(ownId), 0, "void");
    }

    function test_voidBatch_reverts_onceJudgesOfTheNetworkDecided() public {
        _passDeadline();
        uint64 ownId = _split(2);
        _settleSummoned(ownId, _claimed[2], REJECT);
        vm.warp(_dueAt + APPEAL_TIME);
        _expectOutcomesPosted(ownId);
        ledger.voidBatch(batches[ownId]);
    }

    function test_voidBatch_endsAllThatABatchCanDo() public {
        vm.warp(_dueAt + APPEAL_TIME);
        ledger.voidBatch(batches[_id]);
        IContributionLedger.OutcomeProof memory outcome = _prove(_id, _accepted(COUNT), 2);
        _expectBatchMismatch(_id);
        ledger.standingOf(outcome);
    }
}

/// @title requireUnjudged and judge: one submission before judges of the network
contract LedgerUnjudgedTest is UnjudgedTest {
    // ---------------------------------------------------------- require unjudged

    function testFuzz_requireUnjudged_reverts_outsideTheTimeToAppeal(uint256 late, bool before) public {
        _passDeadline();
        uint64 ownId = _split(2);
        if (before) vm.warp(bound(late, batches[ownId].committedAt, _dueAt - 1));
        else vm.warp(_dueAt + APPEAL_TIME + bound(late, 0, 365 days));
        _expectWrongTime(ownId, _dueAt, _dueAt + APPEAL_TIME);
        ledger.requireUnjudged(batches[ownId], _claimed[2]);
    }

    function testFuzz_requireUnjudged_passes_withinTheTimeToAppeal(uint256 time) public {
        _passDeadline();
        uint64 ownId = _split(2);
        vm.warp(bound(time, _dueAt, _dueAt + APPEAL_TIME - 1));
        _summon(ownId, _claimed[2]);
        assertTrue(court.isSummoned(ownId), "before judges");
    }

    function testFuzz_requireUnjudged_passes_forDirectWork(uint256 time) public {
        (uint64 batchId, IContributionLedger.Submission memory submission) = _submitDirectly();
        vm.warp(bound(time, _dueAt, _dueAt + APPEAL_TIME - 1));
        _summon(batchId, submission);
        assertTrue(court.isSummoned(batchId), "before judges");
    }

    function test_requireUnjudged_passes_forWithheldDirectWork() public {
        (uint64 batchId, IContributionLedger.Submission memory submission) = _submitDirectly();
        _withhold(batchId);
        _summon(batchId, submission);
        assertTrue(court.isSummoned(batchId), "at once");
    }

    function test_requireUnjudged_reverts_beforeDirectWorkIsDue() public {
        (uint64 batchId, IContributionLedger.Submission memory submission) = _submitDirectly();
        vm.warp(_dueAt - 1);
        _expectWrongTime(batchId, _dueAt, _dueAt + APPEAL_TIME);
        ledger.requireUnjudged(batches[batchId], submission);
    }

    function test_requireUnjudged_reverts_forABatchOfMany() public {
        _passDeadline();
        _expectInvalidSubmission(alice, address(0));
        ledger.requireUnjudged(batches[_id], _claimed[2]);
    }

    function testFuzz_requireUnjudged_reverts_whenTheBatchSaysThatThereAreMore(uint256 count) public {
        _id = _commitRoot(_submissionLeaf(_claimed[2]), bound(count, 2, 4096), 1000);
        _expectNotTheOnly();
    }

    function testFuzz_requireUnjudged_reverts_forAnotherSubmission(uint256 field, uint32 change) public {
        vm.assume(change != 0);
        _passDeadline();
        uint64 ownId = _split(2);
        IContributionLedger.Submission memory submission = _changed(_claimed[2], field, change);
        _expectInvalidSubmission(submission.worker, address(0));
        ledger.requireUnjudged(batches[ownId], submission);
    }

    function testFuzz_requireUnjudged_reverts_whenTheBatchWasCommittedForLess(uint256 committed) public {
        committed = bound(committed, 1, 999);
        _id = _commitRoot(_submissionLeaf(_claimed[2]), 1, committed);
        _expectNotTheOnly();
    }

    function test_requireUnjudged_reverts_whenUnitsExceedARecord() public {
        _fundMany();
        _claimed[2].units = uint64(type(uint32).max) + 1;
        _id = _commitRoot(_submissionLeaf(_claimed[2]), 1, _claimed[2].units);
        _expectNotTheOnly();
    }

    function test_requireUnjudged_reverts_whenRolloutsExceedARecord() public {
        _claimed[2].rollouts = uint32(type(uint16).max) + 1;
        _id = _commitRoot(_submissionLeaf(_claimed[2]), 1, 1000);
        _expectNotTheOnly();
    }

    function test_requireUnjudged_reverts_whenItClaimsNothing() public {
        _claimed[2].units = 0;
        _id = _commitRoot(_submissionLeaf(_claimed[2]), 1, 1000);
        _expectNotTheOnly();
    }

    function _expectNotTheOnly() private {
        _passDeadline();
        _expectInvalidSubmission(alice, address(0));
        ledger.requireUnjudged(batches[_id], _claimed[2]);
    }

    function testFuzz_requireUnjudged_passes_forABatchOfOneOfTheOrchestrator(uint256 committed) public {
        committed = bound(committed, 1000, 1_000_000);
        _id = _commitRoot(_submissionLeaf(_claimed[2]), 1, committed);
        _passDeadline();
        _summon(_id, _claimed[2]);
        assertTrue(court.isSummoned(_id), "before judges");
    }

    function test_requireUnjudged_reverts_forWhatASplitLeftOfABatchOfOne() public {
        _id = _commitRoot(_submissionLeaf(_claimed[2]), 1, 1000);
        IContributionLedger.LeasedWork memory work = _workAt(2);
        _passDeadline();
        uint64 ownId = _splitAs(alice, work, new bytes32[](0));
        _rememberSplit(_id, ownId, _claimed[2]);
        _expectInvalidSubmission(alice, address(0));
        ledger.requireUnjudged(batches[_id], _claimed[2]);
    }

    function test_requireUnjudged_reverts_onceJudged() public {
        (uint64 batchId, IContributionLedger.Submission memory submission) = _submitDirectly();
        _post(batchId, _one(_recordOf(submission, ACCEPT)), QUORUM);
        vm.warp(_dueAt);
        _expectOutcomesPosted(batchId);
        ledger.requireUnjudged(batches[batchId], submission);
    }

    function testFuzz_requireUnjudged_reverts_whenTheHeaderIsNot(uint256 field) public {
        _passDeadline();
        uint64 ownId = _split(2);
        IContributionLedger.Batch memory header = _mutatedHeader(ownId, field);
        _expectBatchMismatch(header.batchId);
        ledger.requireUnjudged(header, _claimed[2]);
    }

    function test_requireUnjudged_reverts_forTheHeaderFromBeforeTheSplit() public {
        IContributionLedger.Batch memory before = batches[_id];
        _passDeadline();
        _split(2);
        _expectBatchMismatch(_id);
        ledger.requireUnjudged(before, _claimed[2]);
    }

    // --------------------------------------------------------------------- judge

    function testFuzz_judge_reverts_whenNotTheCourt(address caller) public {
        vm.assume(caller != address(court));
        _passDeadline();
        uint64 ownId = _split(2);
        IContributionLedger.Batch memory batch = batches[ownId];
        _expectUnauthorized(caller);
        vm.prank(caller);
        ledger.judge(batch, _claimed[2], ACCEPTED, 0);
    }

    function testFuzz_judge_reverts_whenTheHeaderIsNot(uint256 field) public {
        _passDeadline();
        IContributionLedger.Batch memory header = _mutatedHeader(_split(2), field);
        _expectBatchMismatch(header.batchId);
        vm.prank(address(court));
        ledger.judge(header, _claimed[2], ACCEPTED, 0);
    }

    function testFuzz_judge_reverts_forAnotherSubmission(uint256 field, uint32 change) public {
        vm.assume(change != 0);
        _passDeadline();
        uint64 ownId = _split(2);
        IContributionLedger.Submission memory submission = _changed(_claimed[2], field, change);
        IContributionLedger.Batch memory batch = batches[ownId];
        _expectInvalidSubmission(submission.worker, address(0));
        vm.prank(address(court));
        ledger.judge(batch, submission, ACCEPTED, 0);
    }

    function testFuzz_judge_reverts_whenTheCaseIsSettledWithAnotherSubmission(uint256 field, uint32 change) public {
        vm.assume(change != 0);
        _passDeadline();
        uint64 ownId = _split(2);
        _voteSummoned(ownId, _claimed[2], ACCEPT);
        IContributionLedger.Submission memory submission = _changed(_claimed[2], field, change);
        _expectInvalidSubmission(submission.worker, address(0));
        court.settleSummoned(batches[ownId], submission);
    }

    /// @dev A submission with one field changed.
    function _changed(IContributionLedger.Submission memory submission, uint256 field, uint32 change)
        private
        view
        returns (IContributionLedger.Submission memory)
    {
        field = bound(field, 0, 7);
        if (field == 0) submission.runId ^= change;
        if (field == 1) submission.worker = bob;
        if (field == 2) submission.step ^= change;
        if (field == 3) submission.index ^= change;
        if (field == 4) submission.policyVersion ^= change;
        if (field == 5) submission.fileHash ^= bytes32(uint256(change));
        if (field == 6) submission.rollouts ^= change;
        if (field == 7) submission.units ^= change;
        return submission;
    }

    function testFuzz_judge_recordsWhatJudgesFound(uint256 at, uint16 ruling, uint256 waited) public {
        at = bound(at, 0, COUNT - 1);
        ruling = _seenRuling(ruling);
        _passDeadline();
        uint64 ownId = _split(at);
        vm.warp(_dueAt + bound(waited, 0, APPEAL_TIME - 1));
        _voteSummoned(ownId, _claimed[at], ruling);
        bytes memory record = _recordOf(_claimed[at], ruling);
        vm.expectEmit(address(ledger));
        emit IContributionLedgerEvents.OutcomesPosted(
            ownId, runId, _leaf(ownId, 0, record), uint40(block.timestamp), 0, record, ""
        );
        court.settleSummoned(batches[ownId], _claimed[at]);

        _rememberPosted(ownId, _one(record), 0);
        batches[ownId].signers = 0;
        _assertHeader(ownId, "judged now, and nobody of the run signed");
        IContributionLedger.Standing memory standing = ledger.standingOf(_prove(ownId, _one(record), 0));
        assertEq(standing.verdict, uint8(ruling >> 8), "verdict");
        assertEq(standing.reason, uint8(ruling), "reason");
        assertEq(standing.closesAt, block.timestamp + CHALLENGE_WINDOW, "it can be challenged like any other");
    }

    /// @dev The orchestrator committed the submission for more units than it claims.
    function testFuzz_judge_freesWhatTheRecordDoesNotHold(uint16 ruling, uint256 more) public {
        ruling = _seenRuling(ruling);
        more = bound(more, 0, 1_000_000);
        vm.warp(_dueAt + APPEAL_TIME);
        ledger.voidBatch(batches[_id]);
        _id = _commitRoot(_submissionLeaf(_claimed[2]), 1, 1000 + more);
        _passDeadline();
        assertEq(_reserved(), (1000 + more) * PRICE, "all of it, until judges decide");
        _settleSummoned(_id, _claimed[2], ruling);
        assertEq(_reserved(), 1000 * uint256(PRICE), "what the record holds");
        _assertHeader(_id, "judged");
    }

    /// @dev A ruling of jurors that saw the work.
    function _seenRuling(uint16 ruling) private pure returns (uint16) {
        uint16 verdict = uint16(bound(ruling >> 8, ACCEPTED, FRAUD));
        uint16 reason = ruling & 0xff;
        bool seen = reason != UNAVAILABLE || verdict == ACCEPTED || verdict == FRAUD;
        return verdict << 8 | (seen ? reason : 21);
    }

    function test_judge_namesNoSigners_whenAQuorumWithheldTheBatch() public {
        _withhold(_id);
        uint64 ownId = _split(2);
        assertTrue(batches[ownId].signers != 0, "who called it withheld");
        _settleSummoned(ownId, _claimed[2], ACCEPT);
        _assertHeader(ownId, "nobody of the run answers for what the network decided");
    }

    function testFuzz_judge_leavesTheOldBatchAlone(uint16 ruling) public {
        _passDeadline();
        uint64 ownId = _split(2);
        _settleSummoned(ownId, _claimed[2], _seenRuling(ruling));
        _assertHeader(_id, "still unjudged");
    }

    function testFuzz_judge_isNotReached_whenJudgesSawNothing(uint8 verdict, bool nothing) public {
        uint16 ruling = nothing ? UNSEEN : uint16(bound(verdict, INCOMPLETE, REJECTED)) << 8 | UNAVAILABLE;
        _passDeadline();
        uint64 ownId = _split(2);
        _voteSummoned(ownId, _claimed[2], ruling);
        court.settleSummoned(batches[ownId], _claimed[2]);
        _assertHeader(ownId, "unjudged as before");
        IContributionLedger.OutcomeProof memory outcome = _prove(ownId, _one(_recordOf(_claimed[2], ruling)), 0);
        _expectNotJudged(ownId);
        ledger.standingOf(outcome);
    }

    function test_judge_isNotReached_whenJudgesAreOfNoOneMind() public {
        _passDeadline();
        uint64 ownId = _split(2);
        _summon(ownId, _claimed[2]);
        bytes32 caseId = court.summonsOf(ownId);
        _draw(caseId);
        _voteAll(caseId, ACCEPT, REJECT, EXACT);
        court.settleSummoned(batches[ownId], _claimed[2]);
        _assertHeader(ownId, "unjudged as before");
    }

    function testFuzz_judge_comesAfterTheTimeToAppeal_whenTheCaseBeganInIt(uint256 late) public {
        (uint64 batchId, IContributionLedger.Submission memory submission) = _submitDirectly();
        vm.warp(_dueAt + APPEAL_TIME - 1);
        _voteSummoned(batchId, submission, ACCEPT);
        vm.warp(block.timestamp + bound(late, 0, 30 days));
        court.settleSummoned(batches[batchId], submission);
        _rememberPosted(batchId, _one(_recordOf(submission, ACCEPT)), 0);
        _assertHeader(batchId, "judged");
    }

    // ------------------------------------------------------------ what follows it

    function test_judge_acceptedWorkIsPaid() public {
        _passDeadline();
        uint64 ownId = _split(2);
        _settleSummoned(ownId, _claimed[2], ACCEPT);
        _passChallengeWindow();
        uint256 paid = _claim(ownId, _one(_recordOf(_claimed[2], ACCEPT)), 0, 1);
        assertEq(paid, 1000 * uint256(PRICE), "out of what was set aside for the old batch");
    }

    function test_judge_acceptedWork_isNotPaidBeforeItsWindowCloses() public {
        _passDeadline();
        uint64 ownId = _split(2);
        _settleSummoned(ownId, _claimed[2], ACCEPT);
        uint256 finalAt = block.timestamp + CHALLENGE_WINDOW;
        vm.warp(finalAt - 1);
        IRewardEscrow.Claim[] memory claims = _claimsOf(ownId, ACCEPT);
        vm.expectRevert(abi.encodeWithSelector(IRewardEscrowErrors.EscrowNotFinal.selector, ownId, finalAt));
        escrow.claim(claims);
    }

    function testFuzz_judge_refusedWorkIsNotPaid(uint8 verdict) public {
        verdict = uint8(bound(verdict, INCOMPLETE, FRAUD));
        uint16 ruling = uint16(verdict) << 8 | 21;
        _passDeadline();
        uint64 ownId = _split(2);
        _settleSummoned(ownId, _claimed[2], ruling);
        _passChallengeWindow();
        IRewardEscrow.Claim[] memory claims = _claimsOf(ownId, ruling);
        vm.expectRevert(abi.encodeWithSelector(IRewardEscrowErrors.EscrowNotAccepted.selector, ownId, 0, verdict));
        escrow.claim(claims);
    }

    function testFuzz_judge_refusedWorksMoneyIsFreed(uint8 verdict) public {
        uint16 ruling = uint16(bound(verdict, INCOMPLETE, FRAUD)) << 8 | 21;
        _passDeadline();
        uint64 ownId = _split(2);
        _settleSummoned(ownId, _claimed[2], ruling);
        _passChallengeWindow();
        assertEq(escrow.recover(_claimsOf(ownId, ruling)), 1000 * uint256(PRICE), "its own units");
        assertEq(_reserved(), 1000 * (COUNT - 1) * uint256(PRICE), "and no others");
    }

    function _claimsOf(uint64 batchId, uint16 ruling) private view returns (IRewardEscrow.Claim[] memory claims) {
        claims = new IRewardEscrow.Claim[](1);
        claims[0] = _claimOf(batchId, _one(_recordOf(_claimed[2], ruling)), _range(0, 1));
    }

    function testFuzz_judge_fraudIsExecuted(bool exact) public {
        uint16 ruling = exact ? EXACT : STATISTICAL;
        _passDeadline();
        uint64 ownId = _split(2);
        _settleSummoned(ownId, _claimed[2], ruling);
        IContributionLedger.OutcomeProof memory outcome = _prove(ownId, _one(_recordOf(_claimed[2], ruling)), 0);
        uint256 amount =
            ledger.executeFraud(outcome, _held(outcome, _claimed[2], _signSubmission(_claimed[2], aliceNodeKey)));
        assertEq(amount, REQUIRED_STAKE * (exact ? EXACT_FRAUD_PPM : FRAUD_PPM) / PPM, "like any other");
        _assertStatus(alice, exact ? IWorkerRegistry.Status.Banned : IWorkerRegistry.Status.Jailed, "jailed or banned");
    }

    function test_judge_fraudHasNoReporter() public {
        _passDeadline();
        uint64 ownId = _split(2);
        _settleSummoned(ownId, _claimed[2], EXACT);
        IContributionLedger.OutcomeProof memory outcome = _prove(ownId, _one(_recordOf(_claimed[2], EXACT)), 0);
        uint256 amount =
            ledger.executeFraud(outcome, _held(outcome, _claimed[2], _signSubmission(_claimed[2], aliceNodeKey)));
        _passChallengeWindow();
        uint256 supply = token.totalSupply();
        ledger.finaliseFraud(outcome);
        uint256 insured = amount * INSURANCE_PPM / PPM;
        assertEq(token.balanceOf(insurance), insured, "insured");
        assertEq(supply - token.totalSupply(), amount - insured, "nobody is rewarded: the rest is burned");
    }

    function test_judge_itsVerdictCanBeChallenged() public {
        _passDeadline();
        uint64 ownId = _split(2);
        _settleSummoned(ownId, _claimed[2], REJECT);
        bytes[] memory records = _one(_recordOf(_claimed[2], REJECT));
        bytes32 leaf = _leaf(ownId, 0, records[0]);
        _announce(alice, leaf, ACCEPT);
        IContributionLedger.OutcomeProof memory outcome = _prove(ownId, records, 0);
        bytes memory signature = _signSubmission(_claimed[2], aliceNodeKey);
        vm.prank(alice);
        court.claim(outcome, _held(outcome, _claimed[2], signature), ACCEPT, SALT, _noSources());
        _draw(leaf);
        _voteAll(leaf, ACCEPT, ACCEPT, ACCEPT);
        court.settle(outcome);
        assertEq(ledger.standingOf(outcome).verdict, ACCEPTED, "another jury may see it otherwise");
    }

    // ---------------------------------------------------------------------- bond

    function test_judge_bondReturns_whenAccepted() public {
        _passDeadline();
        uint256 before = token.balanceOf(alice);
        uint64 ownId = _split(2);
        _settleSummoned(ownId, _claimed[2], ACCEPT);
        assertEq(token.balanceOf(alice), before, "the run pays the judges");
    }

    function test_judge_bondIsLost_whenRefused() public {
        _passDeadline();
        uint256 before = token.balanceOf(alice);
        uint64 ownId = _split(2);
        _settleSummoned(ownId, _claimed[2], REJECT);
        assertEq(token.balanceOf(alice), before - BOND, "it pays the judges");
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtBondHeld.selector, ownId));
        court.returnBond(batches[ownId]);
    }
}
