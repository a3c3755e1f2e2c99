// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {Math} from "@openzeppelin/contracts/utils/math/Math.sol";

import {IContributionLedger} from "./interfaces/IContributionLedger.sol";
import {IFaultCourt} from "./interfaces/IFaultCourt.sol";
import {IRunRegistry} from "./interfaces/IRunRegistry.sol";
import {IStakeVault} from "./interfaces/IStakeVault.sol";
import {IWorkerRegistry} from "./interfaces/IWorkerRegistry.sol";
import {EscrowLib} from "./libraries/EscrowLib.sol";

/// @title Punishes faults that prove themselves
contract FaultCourt is IFaultCourt {
    /// @dev One million: the whole, in parts per million.
    uint256 private constant PPM = 1_000_000;

    /// @dev What a validator signs when nothing of a batch can be had: the hash of no records.
    bytes32 private constant WITHHELD = keccak256("");

    /// @notice The runs, with their validators.
    IRunRegistry public immutable runs;

    /// @notice The registry that is told to convict.
    IWorkerRegistry public immutable workers;

    /// @notice The vault that is told to slash.
    IStakeVault public immutable vault;

    /// @notice The ledger, which knows batches and signers.
    IContributionLedger public immutable ledger;

    /// @param vault_ StakeVault, by its predicted address.
    constructor(IRunRegistry runs_, IWorkerRegistry workers_, IStakeVault vault_, IContributionLedger ledger_) {
        runs = runs_;
        workers = workers_;
        vault = vault_;
        ledger = ledger_;
    }

    // -------------------------------------------------------------- validators

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
        (uint64 runId, uint64 batchId) = (batch.runId, batch.batchId);
        // After a reorg another batch can have the same number; its root tells them apart.
        require(
            validator != address(0) && validator == other && first.batchId == batchId && second.batchId == batchId
                && first.batchRoot == second.batchRoot && first.recordsHash != second.recordsHash
                && first.recordsHash != WITHHELD && second.recordsHash != WITHHELD
                && runs.seatBitOf(runId, validator) != 0,
            FaultNoEquivocation(validator, other)
        );
        (bytes32 escrowId, uint256 amount) = _takeAll(runId, validator, IStakeVault.Offence.DoubleOutcome, batchId);
        emit DoubleOutcomeProven(runId, validator, escrowId, batchId, amount);
        runs.unseatForFault(runId, validator);
    }

    /// @inheritdoc IFaultCourt
    function proveMisrecord(
        IContributionLedger.OutcomeProof calldata outcome,
        IContributionLedger.CommittedWork calldata work,
        address validator
    ) external {
        IContributionLedger.Batch calldata batch = outcome.batch;
        (uint64 runId, uint64 batchId) = (batch.runId, batch.batchId);
        IContributionLedger.Outcome memory recorded = ledger.standingOf(outcome).outcome;
        require(
            ledger.requireEvidence(outcome, work) && runs.seatBitOf(runId, validator) & batch.signers != 0
                && !_isRecordOf(recorded, work.submission),
            FaultNoMisrecord(batchId, outcome.position, validator)
        );
        (bytes32 escrowId, uint256 amount) = _takeAll(runId, validator, IStakeVault.Offence.Misrecord, batchId);
        emit MisrecordProven(runId, validator, escrowId, batchId, outcome.position, amount);
        runs.unseatForFault(runId, validator);
    }

    /// @dev Returns whether a record says of a submission what the submission says of itself: no more units, and its count of
    ///      rollouts as far as a record has room for it. A record of worker 0 names nobody: who judged it may not have known
    ///      the worker, which can register later.
    function _isRecordOf(
        IContributionLedger.Outcome memory recorded,
        IContributionLedger.Submission calldata submission
    ) private view returns (bool) {
        return recorded.step == submission.step && recorded.index == submission.index
            && recorded.policyVersion == submission.policyVersion && recorded.fileHash == submission.fileHash
            && recorded.rollouts == Math.min(submission.rollouts, type(uint16).max)
            && recorded.units <= submission.units
            && (recorded.workerId == 0 || workers.workerById(recorded.workerId) == submission.worker);
    }

    /// @dev Takes all that a validator has staked in a run, for good.
    function _takeAll(uint64 runId, address validator, IStakeVault.Offence offence, uint64 batchId)
        private
        returns (bytes32 escrowId, uint256 amount)
    {
        amount = vault.slash(runId, validator, offence, batchId, PPM, address(0));
        escrowId = EscrowLib.idOf(runId, validator, offence, batchId);
    }

    // ----------------------------------------------------------------- workers

    /// @inheritdoc IFaultCourt
    function proveDoubleSubmission(
        IContributionLedger.OutcomeProof calldata outcome,
        IContributionLedger.CommittedWork calldata work,
        IContributionLedger.Submission calldata second,
        bytes calldata secondSignature
    ) external {
        IContributionLedger.Batch calldata batch = outcome.batch;
        IContributionLedger.Submission calldata first = work.submission;
        ledger.standingOf(outcome); // reverts unless it was judged
        ledger.requireEvidence(outcome, work);
        address other = ledger.submissionSigner(second, secondSignature);
        require(
            _isSameSlot(first, second) && keccak256(abi.encode(first)) != keccak256(abi.encode(second))
                && _answers(batch, first.worker, ledger.submissionSigner(first, work.nodeSignature))
                && _answers(batch, second.worker, other),
            FaultNoEquivocation(first.worker, other)
        );
        // Whoever stole an old node key can sign again for every slot that it filled: this costs its worker one slash.
        require(
            workers.statusOf(batch.runId, first.worker) != IWorkerRegistry.Status.Banned,
            FaultAlreadyBanned(batch.runId, first.worker)
        );
        _punish(
            batch.runId, first.worker, first.step, first.index, runs.termsAt(batch.runId, batch.terms).exactFraudPpm
        );
    }

    function _answers(IContributionLedger.Batch calldata batch, address worker, address signer)
        private
        view
        returns (bool)
    {
        return workers.answersFor(batch.runId, worker, signer, batch.committedAt);
    }

    function _punish(uint64 runId, address worker, uint32 step, uint32 index, uint256 ppm) private {
        IStakeVault.Offence offence = IStakeVault.Offence.DoubleSubmission;
        uint64 tag = uint64(step) << 32 | index;
        bytes32 escrowId = EscrowLib.idOf(runId, worker, offence, tag);
        workers.convict(runId, worker, escrowId, true);
        uint256 amount = vault.slash(runId, worker, offence, tag, ppm, address(0));
        emit DoubleSubmissionProven(runId, worker, escrowId, step, index, amount);
    }

    function _isSameSlot(IContributionLedger.Submission calldata first, IContributionLedger.Submission calldata second)
        private
        pure
        returns (bool)
    {
        return first.runId == second.runId && first.worker == second.worker && first.step == second.step
            && first.index == second.index;
    }
}
