// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IContributionLedger} from "../src/interfaces/IContributionLedger.sol";
import {IRewardEscrow} from "../src/interfaces/IRewardEscrow.sol";
import {BaseTest} from "./BaseTest.sol";

/// @title Submissions whose outcomes are overdue, and cases that overturn outcomes
abstract contract LedgerTest is BaseTest {
    // ------------------------------------------------------------------ headers

    /// @dev Changes one of the nine fields of a header.
    function _mutateHeader(IContributionLedger.Batch memory batch, uint256 field) internal pure {
        field = bound(field, 0, 8);
        if (field == 0) batch.batchId ^= 1;
        if (field == 1) batch.runId ^= 1;
        if (field == 2) batch.root ^= bytes32(uint256(1));
        if (field == 3) batch.count ^= 1;
        if (field == 4) batch.units ^= 1;
        if (field == 5) batch.pricePerUnit ^= 1;
        if (field == 6) batch.committedAt ^= 1;
        if (field == 7) batch.postedAt ^= 1;
        if (field == 8) batch.signers ^= 1;
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

    function _submissionLeaf(IContributionLedger.Submission memory submission) internal pure returns (bytes32) {
        return keccak256(abi.encode(_submissionHash(submission)));
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

    function _commitSubmissions(IContributionLedger.Submission[] memory submissions) internal returns (uint64) {
        uint256 units;
        for (uint256 i = 0; i < submissions.length; ++i) {
            units += submissions[i].units;
        }
        return _commitRoot(_root(_submissionLeaves(submissions)), submissions.length, units);
    }

    /// @dev The record of an accept as claimed.
    function _claimedRecord(IContributionLedger.Submission memory s) internal view returns (bytes memory) {
        return _pack(
            IContributionLedger.Outcome({
                workerId: workers.workerOf(s.worker).workerId,
                step: s.step,
                index: s.index,
                policyVersion: s.policyVersion,
                fileHash: s.fileHash,
                rollouts: uint16(s.rollouts),
                units: uint32(s.units),
                verdict: ACCEPTED,
                reason: 0
            })
        );
    }

    /// @dev The name, in cases, of a submission that stands as claimed.
    function _overdueLeaf(uint64 batchId, IContributionLedger.Submission memory submission)
        internal
        pure
        returns (bytes32)
    {
        return keccak256(bytes.concat(bytes8(batchId), _submissionLeaf(submission)));
    }

    function _proveClaimed(uint64 batchId, IContributionLedger.Submission[] memory submissions, uint256 position)
        internal
        view
        returns (IContributionLedger.OutcomeProof memory)
    {
        return IContributionLedger.OutcomeProof({
            batch: batches[batchId],
            position: uint32(position),
            record: _claimedRecord(submissions[position]),
            proof: _siblings(_submissionLeaves(submissions), position)
        });
    }

    /// @dev The claim over some positions of a batch whose outcomes are overdue.
    function _overdueClaimOf(
        uint64 batchId,
        IContributionLedger.Submission[] memory submissions,
        uint32[] memory positions
    ) internal view returns (IRewardEscrow.Claim memory claimed) {
        bytes[] memory chosen = new bytes[](positions.length);
        for (uint256 i = 0; i < positions.length; ++i) {
            chosen[i] = _claimedRecord(submissions[positions[i]]);
        }
        claimed.batch = batches[batchId];
        claimed.positions = positions;
        claimed.records = _join(chosen);
        claimed.siblings = _multiSiblings(_submissionLeaves(submissions), positions);
    }

    function _justOne(IRewardEscrow.Claim memory claimed) internal pure returns (IRewardEscrow.Claim[] memory claims) {
        claims = new IRewardEscrow.Claim[](1);
        claims[0] = claimed;
    }

    function _passDeadline() internal {
        vm.warp(block.timestamp + OUTCOME_DEADLINE);
    }

    // -------------------------------------------------------------------- cases

    function _challenge(IContributionLedger.OutcomeProof memory outcome, uint8 verdict) internal {
        vm.prank(challenger);
        court.challenge(outcome, verdict);
    }

    /// @dev Challenges an outcome and lets the whole jury decide. Ends within the challenge window.
    function _decide(IContributionLedger.OutcomeProof memory outcome, uint8 verdict, bool overturn) internal {
        _challenge(outcome, verdict);
        bytes32 leaf = ledger.standingOf(outcome).leaf;
        vm.roll(block.number + DRAW_DELAY + 1);
        court.drawJury(outcome);
        uint88 jury = court.caseOf(leaf).jury;
        for (uint256 i = 0; i < 5; ++i) {
            if (!_sits(validators[i], jury)) continue;
            vm.prank(validators[i]);
            court.commitVote(leaf, keccak256(abi.encode(leaf, validators[i], overturn, bytes32("result"), bytes32(0))));
        }
        for (uint256 i = 0; i < 5; ++i) {
            if (!_sits(validators[i], jury)) continue;
            vm.prank(validators[i]);
            court.revealVote(leaf, overturn, "result", 0);
        }
        court.close(outcome);
    }

    function _sits(address validator, uint88 jury) private view returns (bool) {
        return runs.seatBitOf(runId, validator) & jury != 0;
    }

    function _overturn(IContributionLedger.OutcomeProof memory outcome, uint8 verdict) internal {
        _decide(outcome, verdict, true);
    }
}
