// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {SafeERC20} from "@openzeppelin/contracts/token/ERC20/utils/SafeERC20.sol";
import {Math} from "@openzeppelin/contracts/utils/math/Math.sol";
import {SafeCast} from "@openzeppelin/contracts/utils/math/SafeCast.sol";

import {IContributionLedger} from "./interfaces/IContributionLedger.sol";
import {IDisputeCourt} from "./interfaces/IDisputeCourt.sol";
import {IMusterToken} from "./interfaces/IMusterToken.sol";
import {IRewardEscrow} from "./interfaces/IRewardEscrow.sol";
import {IRunRegistry} from "./interfaces/IRunRegistry.sol";
import {IWorkerRegistry} from "./interfaces/IWorkerRegistry.sol";
import {BatchLib} from "./libraries/BatchLib.sol";
import {MultiProofLib} from "./libraries/MultiProofLib.sol";
import {OutcomeRecordLib} from "./libraries/OutcomeRecordLib.sol";

/// @title Pays final accepted units, and nothing else
/// @dev No reentrancy guard: the token has no hooks, and state is written before every call out.
contract RewardEscrow is IRewardEscrow {
    using SafeERC20 for IMusterToken;
    using SafeCast for uint256;
    using BatchLib for IContributionLedger.Batch;

    /// @dev Whom and what a call is about.
    struct Subject {
        uint64 runId;
        uint32 workerId;
        address worker;
    }

    /// @notice The token paid in.
    IMusterToken public immutable token;

    /// @notice The runs, with their owners.
    IRunRegistry public immutable runs;

    /// @notice The workers, by number.
    IWorkerRegistry public immutable workers;

    /// @notice The ledger of outcomes.
    IContributionLedger public immutable ledger;

    /// @notice The court, which knows what verdict stands.
    IDisputeCourt public immutable court;

    /// @inheritdoc IRewardEscrow
    uint256 public immutable claimPeriod;

    /// @dev The ledger's, which never changes.
    uint256 private immutable _challengeWindow;

    mapping(uint64 runId => Funds) private _funds;

    /// @dev Paid slots: 16 steps × 16 indices of one worker in one run share a word.
    mapping(uint256 word => uint256 bitmap) private _paid;

    /// @dev Recovered outcomes: 256 positions of one batch share a word.
    mapping(uint256 word => uint256 bitmap) private _recovered;

    /// @param court_ DisputeCourt.
    /// @param claimPeriod_ Seconds that workers of a closed run have to claim.
    constructor(
        IMusterToken token_,
        IRunRegistry runs_,
        IWorkerRegistry workers_,
        IContributionLedger ledger_,
        IDisputeCourt court_,
        uint256 claimPeriod_
    ) {
        uint256 window = ledger_.challengeWindow();
        uint256 judged = ledger_.judgementTime();
        // A fraud verdict whose window a pause met can be challenged for a window more, and then be paid.
        require(claimPeriod_ > judged + window, EscrowPeriodTooShort(claimPeriod_, judged + window));
        // Work that is in flight when terms are announced must be judged by those it was done for.
        require(runs_.changeDelay() >= judged, EscrowPeriodTooShort(runs_.changeDelay(), judged));
        token = token_;
        runs = runs_;
        workers = workers_;
        ledger = ledger_;
        court = court_;
        claimPeriod = claimPeriod_;
        _challengeWindow = window;
    }

    // ------------------------------------------------------------ fund, reserve

    /// @inheritdoc IRewardEscrow
    function fund(uint64 runId, uint256 amount) external {
        require(amount != 0, EscrowEmpty());
        require(runs.closedAt(runId) == 0, EscrowRunClosed(runId));
        _funds[runId].available += amount.toUint128();
        emit RunFunded(runId, msg.sender, amount);
        token.safeTransferFrom(msg.sender, address(this), amount);
    }

    /// @inheritdoc IRewardEscrow
    function reserve(uint64 runId, uint256 amount) external {
        require(msg.sender == address(ledger), EscrowUnauthorized(msg.sender));
        Funds storage funds = _funds[runId];
        (uint256 available, uint256 reserved) = (funds.available, funds.reserved);
        require(amount <= available, EscrowUnderfunded(runId, amount, available));
        funds.available = (available - amount).toUint128();
        funds.reserved = (reserved + amount).toUint128();
        emit RewardReserved(runId, amount);
    }

    /// @inheritdoc IRewardEscrow
    function free(uint64 runId, uint256 amount) external {
        require(msg.sender == address(ledger), EscrowUnauthorized(msg.sender));
        // The owner of a run that was closed long ago may have taken it back already.
        uint256 freed = Math.min(amount, _funds[runId].reserved);
        _unreserve(runId, freed);
        _funds[runId].available += freed.toUint128();
        emit RewardFreed(runId, freed);
    }

    /// @inheritdoc IRewardEscrow
    function payCourt(uint64 runId, uint256 amount) external returns (uint256 paid) {
        require(msg.sender == address(court), EscrowUnauthorized(msg.sender));
        Funds storage funds = _funds[runId];
        paid = Math.min(amount, funds.available);
        funds.available -= paid.toUint128();
        emit CourtPaid(runId, paid);
        token.safeTransfer(msg.sender, paid);
    }

    // -------------------------------------------------------------------- claim

    /// @inheritdoc IRewardEscrow
    function claim(Claim[] calldata claims) external returns (uint256 amount) {
        Subject memory subject = _subjectOf(claims);
        uint256 slots;
        uint256 units;
        for (uint256 i = 0; i < claims.length; ++i) {
            (uint256 newSlots, uint256 newUnits) = _settle(claims[i], subject);
            slots += newSlots;
            units += newUnits;
            amount += newUnits * claims[i].batch.pricePerUnit;
        }
        require(slots != 0, EscrowAllPaid(subject.runId, subject.worker));
        _unreserve(subject.runId, amount);
        emit RewardClaimed(subject.runId, subject.worker, slots, units, amount);
        token.safeTransfer(subject.worker, amount);
    }

    /// @dev Marks the slots of final accepted outcomes as paid; returns those that were not, and their units. A slot that
    ///      somebody has claimed before does not hold up the others, as anyone can claim.
    function _settle(Claim calldata claimed, Subject memory subject) private returns (uint256 slots, uint256 units) {
        bytes calldata records = claimed.records;
        (bytes32[] memory leaves, bool disputed) = _finalLeaves(claimed, records, subject);
        for (uint256 i = 0; i < leaves.length; ++i) {
            (uint32 workerId, uint32 step, uint32 index, uint32 more, uint8 verdict) =
                OutcomeRecordLib.paymentOf(OutcomeRecordLib.at(records, i));
            require(workerId == subject.workerId, EscrowMixedClaim(claimed.batch.batchId, claimed.positions[i]));
            if (disputed) verdict = _verdictOf(claimed, i, leaves[i], verdict);
            if (verdict != OutcomeRecordLib.ACCEPTED) {
                revert EscrowNotAccepted(claimed.batch.batchId, claimed.positions[i], verdict);
            }
            if (_markPaid(subject, step, index)) {
                ++slots;
                units += more;
            }
        }
    }

    /// @dev Returns whether the slot was not paid before.
    function _markPaid(Subject memory subject, uint32 step, uint32 index) private returns (bool isNew) {
        (uint256 word, uint256 bit) = _slot(subject.runId, subject.workerId, step, index);
        uint256 bitmap = _paid[word];
        isNew = bitmap & bit == 0;
        if (isNew) _paid[word] = bitmap | bit;
    }

    /// @dev What is due was set aside at the commitment; only the owner of a run closed long ago took it back.
    function _unreserve(uint64 runId, uint256 amount) private {
        Funds storage funds = _funds[runId];
        uint256 reserved = funds.reserved;
        require(amount <= reserved, EscrowUnderfunded(runId, amount, reserved));
        funds.reserved = (reserved - amount).toUint128();
    }

    // ------------------------------------------------------------------- proofs

    /// @dev Returns the run of the first claim and the worker of its first record.
    function _subjectOf(Claim[] calldata claims) private view returns (Subject memory subject) {
        require(claims.length != 0, EscrowEmpty());
        Claim calldata first = claims[0];
        bytes calldata records = first.records;
        require(records.length >= OutcomeRecordLib.SIZE, EscrowEmpty());
        subject.runId = first.batch.runId;
        (subject.workerId,,,,) = OutcomeRecordLib.paymentOf(records);
        subject.worker = workers.workerById(subject.workerId);
    }

    /// @dev Returns the names that outcomes have in cases, and whether there were cases about their batch. Reverts
    ///      unless they are in the batch, it is the run's, and its challenge window is over.
    function _finalLeaves(Claim calldata claimed, bytes calldata records, Subject memory subject)
        private
        view
        returns (bytes32[] memory leaves, bool disputed)
    {
        disputed = _requireFinal(claimed.batch, subject.runId);
        uint32[] calldata positions = claimed.positions;
        uint64 batchId = claimed.batch.batchId;
        require(records.length == positions.length * OutcomeRecordLib.SIZE, EscrowInvalidProof(batchId));
        leaves = _outcomeLeaves(batchId, positions, records);
        (bytes32 root, bool valid) = MultiProofLib.rootOf(leaves, positions, claimed.batch.count, claimed.siblings);
        require(valid && root == claimed.batch.outcomesRoot, EscrowInvalidProof(batchId));
    }

    /// @dev Returns whether there were cases about a batch, which must be the run's and past its challenge window.
    function _requireFinal(IContributionLedger.Batch calldata batch, uint64 runId)
        private
        view
        returns (bool disputed)
    {
        disputed = batch.check(ledger.commitmentOf(batch.batchId));
        require(batch.runId == runId, EscrowMixedClaim(batch.batchId, 0));
        require(batch.status == IContributionLedger.BatchStatus.Judged, EscrowNotJudged(batch.batchId));
        uint256 finalAt = batch.postedAt + _challengeWindow;
        require(block.timestamp >= finalAt, EscrowNotFinal(batch.batchId, finalAt));
    }

    function _outcomeLeaves(uint64 batchId, uint32[] calldata positions, bytes calldata records)
        private
        pure
        returns (bytes32[] memory leaves)
    {
        leaves = new bytes32[](positions.length);
        for (uint256 i = 0; i < leaves.length; ++i) {
            leaves[i] = OutcomeRecordLib.leafOf(batchId, positions[i], OutcomeRecordLib.at(records, i));
        }
    }

    /// @dev Returns the verdict that stands in a batch with cases; reverts while the outcome's own is open.
    function _verdictOf(Claim calldata claimed, uint256 i, bytes32 leaf, uint8 recorded) private view returns (uint8) {
        require(!court.isOpen(leaf), EscrowDisputed(claimed.batch.batchId, claimed.positions[i]));
        (uint8 verdict,) = court.rulingOf(leaf, recorded, 0);
        return verdict;
    }

    // ---------------------------------------------------------- recover, reclaim

    /// @inheritdoc IRewardEscrow
    function recover(Claim[] calldata claims) external returns (uint256 amount) {
        Subject memory subject = _subjectOf(claims);
        uint256 slots;
        for (uint256 i = 0; i < claims.length; ++i) {
            Claim calldata claimed = claims[i];
            amount += _recover(claimed, subject) * claimed.batch.pricePerUnit;
            slots += claimed.positions.length;
        }
        _unreserve(subject.runId, amount);
        _funds[subject.runId].available += amount.toUint128();
        emit RewardRecovered(subject.runId, slots, amount);
    }

    /// @dev Marks final outcomes that were not accepted as recovered; returns their units.
    function _recover(Claim calldata claimed, Subject memory subject) private returns (uint256 units) {
        uint64 batchId = claimed.batch.batchId;
        bytes calldata records = claimed.records;
        (bytes32[] memory leaves, bool disputed) = _finalLeaves(claimed, records, subject);
        for (uint256 i = 0; i < leaves.length; ++i) {
            (,,, uint32 more, uint8 verdict) = OutcomeRecordLib.paymentOf(OutcomeRecordLib.at(records, i));
            if (disputed) verdict = _verdictOf(claimed, i, leaves[i], verdict);
            uint32 position = claimed.positions[i];
            require(verdict != OutcomeRecordLib.ACCEPTED, EscrowAccepted(batchId, position));
            if (verdict == OutcomeRecordLib.FRAUD) _requireFinalFraud(claimed.batch);
            uint256 word = uint256(batchId) << 32 | position >> 8;
            uint256 bit = uint256(1) << (position & 255);
            require(_recovered[word] & bit == 0, EscrowRecovered(batchId, position));
            _recovered[word] |= bit;
            units += more;
        }
    }

    /// @dev A jury may still find that a fraud verdict is wrong while a pause of slashing prolongs its challenge window.
    function _requireFinalFraud(IContributionLedger.Batch calldata batch) private view {
        uint256 finalAt = runs.fraudClosesAt(batch.runId, batch.postedAt + _challengeWindow, _challengeWindow);
        require(block.timestamp >= finalAt, EscrowNotFinal(batch.batchId, finalAt));
    }

    /// @inheritdoc IRewardEscrow
    function reclaim(uint64 runId) external returns (uint256 amount) {
        uint256 closedAt = runs.closedAt(runId);
        require(closedAt != 0, EscrowNotReclaimable(runId, type(uint256).max));
        Funds storage funds = _funds[runId];
        amount = funds.available;
        funds.available = 0;
        if (block.timestamp >= closedAt + claimPeriod) {
            amount += funds.reserved;
            funds.reserved = 0;
        }
        require(amount != 0, EscrowNotReclaimable(runId, closedAt + claimPeriod));
        address owner = runs.ownerOf(runId);
        emit RunReclaimed(runId, owner, amount);
        token.safeTransfer(owner, amount);
    }

    // -------------------------------------------------------------------- views

    /// @inheritdoc IRewardEscrow
    function isPaid(uint64 runId, address worker, uint32 step, uint32 index) external view returns (bool) {
        (uint32 workerId,) = workers.workerOf(worker);
        (uint256 word, uint256 bit) = _slot(runId, workerId, step, index);
        return _paid[word] & bit != 0;
    }

    /// @inheritdoc IRewardEscrow
    function fundsOf(uint64 runId) external view returns (Funds memory) {
        return _funds[runId];
    }

    /// @dev Returns the word and the bit that stand for a slot; different slots never share both.
    function _slot(uint64 runId, uint32 workerId, uint32 step, uint32 index)
        private
        pure
        returns (uint256 word, uint256 bit)
    {
        word = uint256(runId) << 96 | uint256(workerId) << 64 | uint256(step >> 4) << 32 | index >> 4;
        bit = uint256(1) << ((step & 15) << 4 | (index & 15));
    }
}
