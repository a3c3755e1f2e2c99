// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

import {IContributionLedger} from "./IContributionLedger.sol";

/// @title Errors of the fault court
interface IFaultCourtErrors {
    /// @notice Thrown when two statements do not contradict each other, have different signers, or the one who signed does
    ///         not answer for them.
    error FaultNoEquivocation(address firstSigner, address secondSigner);
    /// @notice Thrown when a record agrees with the submission, the batch is not proven to hold it there, or the validator did
    ///         not sign.
    error FaultNoMisrecord(uint64 batchId, uint32 position, address validator);
    /// @notice Thrown for a second submission of a worker that is banned from the run already.
    error FaultAlreadyBanned(uint64 runId, address worker);
}

/// @title Events of the fault court
interface IFaultCourtEvents {
    /// @notice Emitted when a validator is punished for two different outcomes of one batch.
    event DoubleOutcomeProven(
        uint64 indexed runId, address indexed validator, bytes32 indexed escrowId, uint64 batchId, uint256 amount
    );
    /// @notice Emitted when a validator is punished for a record that contradicts what its batch holds.
    event MisrecordProven(
        uint64 indexed runId,
        address indexed validator,
        bytes32 indexed escrowId,
        uint64 batchId,
        uint32 position,
        uint256 amount
    );
    /// @notice Emitted when a worker is punished for two different submissions for one slot.
    event DoubleSubmissionProven(
        uint64 indexed runId,
        address indexed worker,
        bytes32 indexed escrowId,
        uint32 step,
        uint32 index,
        uint256 amount
    );
}

/// @title Punishes faults that prove themselves
/// @notice No jury: what is proven here is that an account contradicts itself, by two signatures or by one over both a batch
///         and its records. Every slash is final at once, reaches stake in the run it is about and no other, and is made once.
///         Nobody earns by it.
interface IFaultCourt is IFaultCourtErrors, IFaultCourtEvents {
    /// @notice Slashes all stake in a run of a validator that signed two different outcomes of one batch, and takes its seat.
    /// @dev To have called a batch withheld and to have judged it later is no contradiction.
    /// @param batch The batch as it stands now; it tells the run.
    function proveDoubleOutcome(
        IContributionLedger.Batch calldata batch,
        IContributionLedger.Outcomes calldata first,
        bytes calldata firstSignature,
        IContributionLedger.Outcomes calldata second,
        bytes calldata secondSignature
    ) external;

    /// @notice Slashes all stake in a run of a validator that signed a record which names another worker, slot, policy, file or
    ///         count of rollouts than the submission at its position, or more units; and takes its seat. Once a batch.
    /// @dev The validator signed the batch's root together with the records.
    /// @param outcome The record.
    /// @param work What the batch holds at the record's position.
    function proveMisrecord(
        IContributionLedger.OutcomeProof calldata outcome,
        IContributionLedger.CommittedWork calldata work,
        address validator
    ) external;

    /// @notice Slashes and bans from a run a worker whose node signed another submission for a slot that was judged. It costs
    ///         what an exact fraud costs by the terms of the batch, and nothing while the worker is banned from the run already.
    /// @param outcome The outcome of the slot.
    /// @param work The submission that was judged, signed by such a key, too; its proof may be missing where the record names
    ///        it.
    /// @param second Another one for the same slot, signed by a key of the worker's that was not rotated
    ///        away when the batch was committed.
    function proveDoubleSubmission(
        IContributionLedger.OutcomeProof calldata outcome,
        IContributionLedger.CommittedWork calldata work,
        IContributionLedger.Submission calldata second,
        bytes calldata secondSignature
    ) external;
}
