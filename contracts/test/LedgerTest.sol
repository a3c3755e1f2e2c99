// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IContributionLedger, IContributionLedgerErrors} from "../src/interfaces/IContributionLedger.sol";
import {IRunRegistry} from "../src/interfaces/IRunRegistry.sol";
import {BaseTest} from "./BaseTest.sol";
import {CourtTest} from "./CourtTest.sol";

/// @title A funded run without batches, and the steps from a submission to its judgement by the network
abstract contract LedgerTest is CourtTest {
    /// @dev Fields of a header.
    uint256 internal constant HEADER_FIELDS = 12;

    function setUp() public virtual override {
        BaseTest.setUp();
        _startRun(WALLET / 2);
    }

    // ------------------------------------------------------------------ headers

    /// @dev Changes one field of a header.
    function _mutateHeader(IContributionLedger.Batch memory batch, uint256 field) internal pure {
        field = bound(field, 0, HEADER_FIELDS - 1);
        if (field == 0) batch.batchId ^= 1;
        if (field == 1) batch.runId ^= 1;
        if (field == 2) batch.root ^= bytes32(uint256(1));
        if (field == 3) batch.count ^= 1;
        if (field == 4) batch.units ^= 1;
        if (field == 5) batch.pricePerUnit ^= 1;
        if (field == 6) batch.terms ^= 1;
        if (field == 7) batch.committedAt ^= 1;
        if (field == 8) batch.postedAt ^= 1;
        if (field == 9) batch.signers ^= 1;
        if (field == 10) batch.status = IContributionLedger.BatchStatus((uint8(batch.status) + 1) % 3);
        if (field == 11) batch.outcomesRoot ^= bytes32(uint256(1));
    }

    function _mutatedHeader(uint64 batchId, uint256 field)
        internal
        view
        returns (IContributionLedger.Batch memory header)
    {
        header = batches[batchId];
        _mutateHeader(header, field);
    }

    /// @dev Passes when the header that a test keeps is the one that the ledger stores.
    function _assertHeader(uint64 batchId, string memory why) internal view {
        bytes32 hash = keccak256(abi.encode(batches[batchId]));
        bytes32 lowestBit = bytes32(uint256(1));
        assertEq(ledger.commitmentOf(batchId) | lowestBit, hash | lowestBit, why);
    }

    // -------------------------------------------------------------- submissions

    /// @dev `count` submissions of a worker in step 1.
    function _submissions(address worker, uint256 count)
        internal
        view
        returns (IContributionLedger.Submission[] memory submissions)
    {
        submissions = new IContributionLedger.Submission[](count);
        for (uint256 i = 0; i < count; ++i) {
            submissions[i] = _submission(worker, 1, uint32(i));
        }
    }

    function _submissionLeaves(IContributionLedger.Submission[] memory submissions)
        internal
        pure
        returns (bytes32[] memory leaves)
    {
        leaves = new bytes32[](submissions.length);
        for (uint256 i = 0; i < submissions.length; ++i) {
            leaves[i] = _submissionLeaf(submissions[i]);
        }
    }

    function _commitSubmissions(IContributionLedger.Submission[] memory submissions) internal returns (uint64 batchId) {
        uint256 units;
        for (uint256 i = 0; i < submissions.length; ++i) {
            units += submissions[i].units;
        }
        bytes32[] memory leaves = _submissionLeaves(submissions);
        batchId = _commitRoot(_batchRoot(leaves), leaves.length, units);
        _leavesIn[batchId] = leaves;
    }

    /// @dev The record of a submission as claimed, with the verdict and reason of a ruling.
    function _recordOf(IContributionLedger.Submission memory s, uint16 ruling) internal view returns (bytes memory) {
        return _pack(
            IContributionLedger.Outcome({
                workerId: _workerId(s.worker),
                step: s.step,
                index: s.index,
                policyVersion: s.policyVersion,
                fileHash: s.fileHash,
                rollouts: uint16(s.rollouts),
                units: uint32(s.units),
                verdict: uint8(ruling >> 8),
                reason: uint8(ruling)
            })
        );
    }

    // --------------------------------------------------------------------- time

    function _passDeadline() internal {
        vm.warp(block.timestamp + OUTCOME_DEADLINE);
    }

    /// @dev Returns from when on, and until when, judges of the network can be called for a batch.
    function _appealOf(uint64 batchId) internal view returns (uint256 from, uint256 until) {
        IContributionLedger.Batch storage batch = batches[batchId];
        bool withheld = batch.status == IContributionLedger.BatchStatus.Withheld;
        from = withheld ? batch.postedAt : batch.committedAt + OUTCOME_DEADLINE;
        return (from, from + APPEAL_TIME);
    }

    // ----------------------------------------------------- withhold, split, judge

    /// @dev The first `QUORUM` validators say that nothing of a batch can be had.
    function _withhold(uint64 batchId) internal {
        ledger.postOutcomes(batches[batchId], "", _signOutcomes(batchId, "", QUORUM));
        _rememberWithheld(batchId, QUORUM);
    }

    /// @dev Keeps the header of a batch that the first `signers` validators called withheld in this block.
    function _rememberWithheld(uint64 batchId, uint256 signers) internal {
        IContributionLedger.Batch storage batch = batches[batchId];
        batch.postedAt = uint40(block.timestamp);
        batch.status = IContributionLedger.BatchStatus.Withheld;
        for (uint256 i = 0; i < signers; ++i) {
            batch.signers |= runs.seatBitOf(batch.runId, validators[i]);
        }
    }

    /// @dev Keeps the headers of a batch and of the one that a submission got out of it.
    function _rememberSplit(uint64 batchId, uint64 ownId, IContributionLedger.Submission memory submission) internal {
        batches[batchId].units -= submission.units;
        batches[ownId] = batches[batchId];
        IContributionLedger.Batch storage own = batches[ownId];
        own.batchId = ownId;
        own.root = _submissionLeaf(submission);
        own.count = 1;
        own.units = submission.units;
    }

    /// @dev A worker calls judges of the network.
    function _summon(uint64 batchId, IContributionLedger.Submission memory submission) internal {
        IContributionLedger.Batch memory batch = batches[batchId];
        vm.prank(submission.worker);
        court.summon(batch, submission, _noSources());
    }

    /// @dev A worker calls judges of the network, who all vote for a ruling; the case stays open.
    function _voteSummoned(uint64 batchId, IContributionLedger.Submission memory submission, uint16 ruling) internal {
        _summon(batchId, submission);
        bytes32 caseId = court.summonsOf(batchId);
        _draw(caseId);
        _voteAll(caseId, ruling, ruling, ruling);
    }

    /// @dev Judges of the network find a ruling, which the batch's header then tells of.
    function _settleSummoned(uint64 batchId, IContributionLedger.Submission memory submission, uint16 ruling) internal {
        _voteSummoned(batchId, submission, ruling);
        court.settleSummoned(batches[batchId], submission);
        _rememberPosted(batchId, _one(_recordOf(submission, ruling)), 0);
        batches[batchId].signers = 0;
    }

    // -------------------------------------------------------------------- terms

    /// @dev The owner announces other terms; they take effect once work in flight is judged.
    function _changeTerms(IRunRegistry.Terms memory terms) internal {
        vm.prank(owner);
        runs.proposeChange(runId, terms);
        vm.warp(block.timestamp + CHANGE_DELAY);
        runs.applyChange(runId);
    }

    /// @dev A new key for a worker's node.
    function _rotateNode(address worker, uint256 nodeKey) internal {
        address node = vm.addr(nodeKey);
        vm.startPrank(worker);
        workers.rotateNode(_nodeConsent(worker, node, nodeKey, block.timestamp));
        vm.stopPrank();
    }

    // -------------------------------------------------------------- expectations

    function _expectBatchMismatch(uint64 batchId) internal {
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerBatchMismatch.selector, batchId));
    }

    function _expectOutcomesPosted(uint64 batchId) internal {
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerOutcomesPosted.selector, batchId));
    }

    function _expectWrongTime(uint64 batchId, uint256 from, uint256 until) internal {
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerWrongTime.selector, batchId, from, until)
        );
    }

    function _expectUnauthorized(address caller) internal {
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerUnauthorized.selector, caller));
    }

    function _expectInvalidSubmission(address worker, address signer) internal {
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidSubmission.selector, worker, signer)
        );
    }

    function _expectInvalidTicket(address signer, uint256 deadline) internal {
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidTicket.selector, signer, deadline)
        );
    }

    function _expectInvalidSigner(address signer) internal {
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidSigner.selector, signer));
    }

    function _expectSlotUsed(address worker, uint32 step, uint32 index) internal {
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerSlotUsed.selector, runId, worker, step, index)
        );
    }

    function _expectInvalidProof(uint64 batchId, uint32 position) internal {
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidProof.selector, batchId, position)
        );
    }

    function _expectNotJudged(uint64 batchId) internal {
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerNotJudged.selector, batchId));
    }

    /// @dev `count` URLs of `size` bytes each.
    function _sources(uint256 count, uint256 size) internal pure returns (string[] memory sources) {
        sources = new string[](count);
        for (uint256 i = 0; i < count; ++i) {
            sources[i] = string(new bytes(size));
        }
    }
}
