// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IContributionLedger} from "./interfaces/IContributionLedger.sol";
import {IDisputeCourt} from "./interfaces/IDisputeCourt.sol";
import {IFaultCourt} from "./interfaces/IFaultCourt.sol";
import {IRunRegistry} from "./interfaces/IRunRegistry.sol";
import {IStakeVault} from "./interfaces/IStakeVault.sol";
import {IWorkerRegistry} from "./interfaces/IWorkerRegistry.sol";

/// @title Punishes faults that prove themselves
contract FaultCourt is IFaultCourt {
    /// @dev One million: the whole, in parts per million.
    uint256 private constant PPM = 1_000_000;

    /// @dev What DisputeCourt keeps of a juror's commitment once the vote is revealed.
    bytes32 private constant REVEALED = bytes32(uint256(1));

    /// @notice The runs, with their validators.
    IRunRegistry public immutable runs;

    /// @notice The registry that is told to convict and to jail.
    IWorkerRegistry public immutable workers;

    /// @notice The vault that is told to slash and to hold.
    IStakeVault public immutable vault;

    /// @notice The ledger, which knows batches and signers.
    IContributionLedger public immutable ledger;

    /// @notice The court, which knows cases and jurors.
    IDisputeCourt public immutable court;

    /// @inheritdoc IFaultCourt
    uint256 public immutable wrongVerdictPpm;

    /// @inheritdoc IFaultCourt
    uint256 public immutable absencePpm;

    /// @param vault_ StakeVault, by its predicted address.
    /// @param wrongVerdictPpm_ Millionths of a signer's stake when its verdict is overturned.
    /// @param absencePpm_ Millionths of a validator's stake when it misses a jury or an outcome deadline.
    constructor(
        IRunRegistry runs_,
        IWorkerRegistry workers_,
        IStakeVault vault_,
        IContributionLedger ledger_,
        IDisputeCourt court_,
        uint256 wrongVerdictPpm_,
        uint256 absencePpm_
    ) {
        require(wrongVerdictPpm_ <= PPM, FaultInvalidShare(wrongVerdictPpm_));
        require(absencePpm_ <= PPM, FaultInvalidShare(absencePpm_));
        runs = runs_;
        workers = workers_;
        vault = vault_;
        ledger = ledger_;
        court = court_;
        wrongVerdictPpm = wrongVerdictPpm_;
        absencePpm = absencePpm_;
    }

    // -------------------------------------------------------------- validators

    /// @inheritdoc IFaultCourt
    function slashSigner(IContributionLedger.OutcomeProof calldata outcome, address validator) external {
        bytes32 leaf = ledger.standingOf(outcome).leaf;
        IDisputeCourt.Case memory lost = court.caseOf(leaf);
        require(lost.status == IDisputeCourt.CaseStatus.Overturned, FaultCaseUndecided(leaf, uint8(lost.status)));
        _requireFault(validator, runs.seatBitOf(lost.runId, validator) & outcome.batch.signers != 0);
        _punish(validator, Fault.WrongVerdict, leaf, wrongVerdictPpm, lost.challenger);
    }

    /// @inheritdoc IFaultCourt
    function slashAbsentJuror(bytes32 leaf, address juror) external {
        IDisputeCourt.Case memory closed = court.caseOf(leaf);
        require(closed.status > IDisputeCourt.CaseStatus.Open, FaultCaseUndecided(leaf, uint8(closed.status)));
        bool drawn = runs.seatBitOf(closed.runId, juror) & closed.jury != 0;
        _requireFault(juror, drawn && court.commitmentOf(leaf, juror) != REVEALED);
        _punish(juror, Fault.AbsentJuror, leaf, absencePpm, _reporter(closed.runId));
    }

    /// @inheritdoc IFaultCourt
    function slashOverdue(IContributionLedger.Batch calldata batch, address validator) external {
        uint256 dueAt = ledger.overdueSince(batch);
        _requireFault(validator, runs.wasSeatedThroughout(batch.runId, validator, batch.committedAt, dueAt));
        _punish(validator, Fault.MissedDeadline, _subjectOf(batch), absencePpm, _reporter(batch.runId));
    }

    /// @inheritdoc IFaultCourt
    function proveDoubleOutcome(
        IContributionLedger.Batch calldata batch,
        IContributionLedger.Outcomes calldata first,
        bytes calldata firstSignature,
        IContributionLedger.Outcomes calldata second,
        bytes calldata secondSignature
    ) external {
        ledger.isDisputed(batch); // reverts unless the header is the batch's
        address validator = ledger.outcomesSigner(first, firstSignature);
        address other = ledger.outcomesSigner(second, secondSignature);
        // After a reorg another batch can have the same number; its root tells them apart.
        require(
            validator != address(0) && validator == other && first.batchId == batch.batchId
                && second.batchId == batch.batchId && first.batchRoot == second.batchRoot
                && first.recordsHash != second.recordsHash,
            FaultNoEquivocation(validator, other)
        );
        _requireFault(validator, runs.seatBitOf(batch.runId, validator) != 0);
        _punish(validator, Fault.DoubleOutcome, _subjectOf(batch), PPM, _reporter(batch.runId));
        if (runs.isValidator(batch.runId, validator)) runs.unseatValidator(batch.runId, validator);
    }

    /// @dev Slashes a validator, once for one fault about one subject.
    function _punish(address validator, Fault fault, bytes32 subject, uint256 ppm, address reporter) private {
        bytes32 offence = keccak256(abi.encode(fault, subject, validator));
        uint256 amount = vault.slash(validator, ppm, offence, reporter);
        emit ValidatorPunished(validator, offence, fault, subject, amount);
        vault.release(offence);
    }

    function _requireFault(address account, bool committed) private pure {
        require(committed, FaultNotCommitted(account));
    }

    function _subjectOf(IContributionLedger.Batch calldata batch) private pure returns (bytes32) {
        return bytes32(uint256(batch.batchId));
    }

    // ----------------------------------------------------------------- workers

    /// @inheritdoc IFaultCourt
    function proveDoubleSubmission(
        IContributionLedger.Submission calldata first,
        bytes calldata firstSignature,
        IContributionLedger.Submission calldata second,
        bytes calldata secondSignature
    ) external {
        _requireDoubleSubmission(first, firstSignature, second, secondSignature);
        (uint64 runId, address worker) = (first.runId, first.worker);
        bytes32 offence = keccak256(abi.encode("double submission", runId, worker, first.step, first.index));
        (, uint256 ppm,) = runs.slashesOf(runId);
        uint256 amount = vault.slash(worker, ppm, offence, _reporter(runId));
        workers.convict(worker, offence, true);
        emit DoubleSubmissionProven(worker, offence, runId, first.step, first.index, amount);
        vault.release(offence);
    }

    /// @dev Reverts unless nodes of one worker signed two different submissions for one slot. They may be two nodes:
    ///      the worker may have rotated its key in between.
    function _requireDoubleSubmission(
        IContributionLedger.Submission calldata first,
        bytes calldata firstSignature,
        IContributionLedger.Submission calldata second,
        bytes calldata secondSignature
    ) private view {
        address signer = ledger.submissionSigner(first, firstSignature);
        address other = ledger.submissionSigner(second, secondSignature);
        uint32 workerId = workers.workerOf(first.worker).workerId;
        require(
            workers.wasNodeOf(signer, first.worker, workerId) && workers.wasNodeOf(other, first.worker, workerId)
                && _isSameSlot(first, second) && keccak256(abi.encode(first)) != keccak256(abi.encode(second)),
            FaultNoEquivocation(signer, other)
        );
    }

    function _isSameSlot(IContributionLedger.Submission calldata first, IContributionLedger.Submission calldata second)
        private
        pure
        returns (bool)
    {
        return first.runId == second.runId && first.worker == second.worker && first.step == second.step
            && first.index == second.index;
    }

    /// @inheritdoc IFaultCourt
    function proveOvercommit(Work[] calldata works) external {
        require(works.length != 0, FaultWithinCap(address(0), 0, 0));
        address worker = works[0].submission.worker;
        uint256 units;
        uint256 next;
        for (uint256 i = 0; i < works.length; ++i) {
            IContributionLedger.Submission calldata claimed = works[i].submission;
            uint256 slot = uint256(claimed.runId) << 64 | uint256(claimed.step) << 32 | claimed.index;
            // Ascending slots: one submission counts once, however many batches somebody put it in.
            require(
                claimed.worker == worker && slot >= next,
                FaultOutOfOrder(claimed.worker, claimed.runId, claimed.step, claimed.index)
            );
            next = slot + 1;
            _inFlightUntil(works[i]);
            units += claimed.units;
        }
        uint256 cap = ledger.unitCapOf(worker);
        require(units > cap, FaultWithinCap(worker, units, cap));
        emit OvercommitProven(worker, units, cap);
        workers.jail(worker, bytes32(0));
    }

    /// @inheritdoc IFaultCourt
    function holdStake(Work calldata work) external {
        vault.hold(work.submission.worker, _inFlightUntil(work) + court.juryTime() + runs.slashPause());
    }

    function _inFlightUntil(Work calldata work) private view returns (uint256) {
        return ledger.inFlightUntil(work.outcome, work.submission, work.nodeSignature);
    }

    /// @dev Returns who gets the reporter's share: the caller, unless it is one of the run's judges.
    function _reporter(uint64 runId) private view returns (address) {
        return runs.isValidator(runId, msg.sender) ? address(0) : msg.sender;
    }
}
