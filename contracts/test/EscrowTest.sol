// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IContributionLedger} from "../src/interfaces/IContributionLedger.sol";
import {IRewardEscrow} from "../src/interfaces/IRewardEscrow.sol";
import {BaseTest} from "./BaseTest.sol";
import {CourtTest} from "./CourtTest.sol";

/// @title A funded run, claims over parts of its batches, and what becomes of batches that nobody judged
/// @dev In all records here a slot's index is its position in the batch.
abstract contract EscrowTest is CourtTest {
    uint256 internal constant FUNDS = 50_000 ether;
    uint256 internal constant PER_RECORD = 1000 * uint256(PRICE);

    function setUp() public virtual override {
        BaseTest.setUp();
        _startRun(FUNDS);
    }

    // ------------------------------------------------------------------- claims

    function _justOne(IRewardEscrow.Claim memory claimed) internal pure returns (IRewardEscrow.Claim[] memory claims) {
        claims = new IRewardEscrow.Claim[](1);
        claims[0] = claimed;
    }

    function _both(IRewardEscrow.Claim memory first, IRewardEscrow.Claim memory second)
        internal
        pure
        returns (IRewardEscrow.Claim[] memory claims)
    {
        claims = new IRewardEscrow.Claim[](2);
        (claims[0], claims[1]) = (first, second);
    }

    function _claimsOf(uint64 batchId, bytes[] memory records, uint256 from, uint256 to)
        internal
        view
        returns (IRewardEscrow.Claim[] memory)
    {
        return _justOne(_claimOf(batchId, records, _range(from, to)));
    }

    /// @dev A batch whose challenge window is over.
    function _finalBatch(bytes[] memory records) internal returns (uint64 batchId) {
        batchId = _commitAndPost(records);
        _passChallengeWindow();
    }

    /// @dev Changes one of the twelve fields of a header.
    function _mutateHeader(IContributionLedger.Batch memory batch, uint256 field) internal pure {
        field = bound(field, 0, 11);
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

    function _assertFunds(uint256 available, uint256 reserved) internal view {
        IRewardEscrow.Funds memory funds = escrow.fundsOf(runId);
        assertEq(funds.available, available, "available");
        assertEq(funds.reserved, reserved, "reserved");
    }

    function _closeRun() internal {
        vm.prank(owner);
        runs.closeRun(runId);
    }

    // -------------------------------------------------------------------- cases

    function _rulingOf(uint8 verdict) internal pure returns (uint16) {
        return uint16(verdict) << 8 | (verdict == ACCEPTED ? 0 : 60);
    }

    /// @dev Opens a case about a record of a worker in step 1; its jury can be drawn next.
    function _dispute(uint64 batchId, bytes[] memory records, uint256 position, uint16 ruling) internal {
        IContributionLedger.OutcomeProof memory outcome = _prove(batchId, records, position);
        address worker = uint32(bytes4(bytes32(outcome.record))) == _workerId(alice) ? alice : bob;
        _announce(challenger, _leaf(batchId, position, records[position]), ruling);
        IContributionLedger.Submission memory submission = _submission(worker, 1, uint32(position));
        bytes memory signature = _signSubmission(submission, worker == alice ? aliceNodeKey : bobNodeKey);
        vm.prank(challenger);
        court.claim(outcome, _held(outcome, submission, signature), ruling, SALT, _noSources());
    }

    /// @dev A case from its opening to its end in which all jurors vote for one ruling. No time passes.
    function _decideAt(uint64 batchId, bytes[] memory records, uint256 position, uint16 claimed, uint16 ruling)
        internal
    {
        bytes32 leaf = _leaf(batchId, position, records[position]);
        _dispute(batchId, records, position, claimed);
        _draw(leaf);
        _voteAll(leaf, ruling, ruling, ruling);
        court.settle(_prove(batchId, records, position));
    }

    function _overturn(uint64 batchId, bytes[] memory records, uint256 position, uint8 verdict) internal {
        _decideAt(batchId, records, position, _rulingOf(verdict), _rulingOf(verdict));
    }

    // --------------------------------------------------------- nobody's judgement

    /// @dev A batch of submissions of Alice in step 1, which a root over their leaves commits.
    function _commitWork(uint256 count) internal returns (uint64) {
        return _commitRoot(_batchRoot(_workLeaves(count)), count, 1000 * count);
    }

    function _workLeaves(uint256 count) internal view returns (bytes32[] memory leaves) {
        leaves = new bytes32[](count);
        for (uint256 i = 0; i < count; ++i) {
            leaves[i] = _submissionLeaf(_submission(alice, 1, uint32(i)));
        }
    }

    /// @dev Two validators say that nothing of a batch can be had.
    function _withhold(uint64 batchId) internal {
        ledger.postOutcomes(batches[batchId], "", _signOutcomes(batchId, "", QUORUM));
        IContributionLedger.Batch storage batch = batches[batchId];
        batch.postedAt = uint40(block.timestamp);
        batch.status = IContributionLedger.BatchStatus.Withheld;
        for (uint256 i = 0; i < QUORUM; ++i) {
            batch.signers |= runs.seatBitOf(batch.runId, validators[i]);
        }
    }

    function _passDeadline() internal {
        vm.warp(block.timestamp + OUTCOME_DEADLINE);
    }

    /// @dev Passes all the time in which workers of a batch committed now can call judges of the network.
    function _passAppeal() internal {
        vm.warp(block.timestamp + OUTCOME_DEADLINE + APPEAL_TIME);
    }

    /// @dev Alice takes her submission at a position out of a batch of `count` of hers that nobody judged in time.
    function _splitOff(uint64 batchId, uint256 count, uint256 position) internal returns (uint64 ownId) {
        IContributionLedger.LeasedWork memory work =
            _work(_submission(alice, 1, uint32(position)), aliceNodeKey, block.timestamp);
        bytes32[] memory proof = _batchSiblings(_workLeaves(count), position);
        vm.prank(alice);
        ownId = ledger.splitOff(batches[batchId], work, uint32(position), proof, _noSources());
        IContributionLedger.Batch memory own = batches[batchId];
        (own.batchId, own.root, own.count, own.units) = (ownId, _submissionLeaf(work.submission), 1, 1000);
        batches[ownId] = own;
        batches[batchId].units -= 1000;
    }

    /// @dev Judges of the network give a ruling about a batch that Alice split off; returns the records of it.
    function _judgeByNetwork(uint64 ownId, uint256 position, uint16 ruling) internal returns (bytes[] memory records) {
        IContributionLedger.Submission memory submission = _submission(alice, 1, uint32(position));
        bytes32 caseId = court.summonsOf(ownId);
        vm.prank(alice);
        court.summon(batches[ownId], submission, _noSources());
        _draw(caseId);
        _voteAll(caseId, ruling, ruling, ruling);
        court.settleSummoned(batches[ownId], submission);
        IContributionLedger.Outcome memory outcome = _outcome(alice, 1, uint32(position), uint8(ruling >> 8));
        outcome.reason = uint8(ruling);
        records = _one(_pack(outcome));
        IContributionLedger.Batch storage batch = batches[ownId];
        (batch.outcomesRoot, batch.postedAt, batch.signers) = (_leaf(ownId, 0, records[0]), uint40(block.timestamp), 0);
        batch.status = IContributionLedger.BatchStatus.Judged;
    }
}
