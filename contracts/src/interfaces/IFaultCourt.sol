// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

import {IContributionLedger} from "./IContributionLedger.sol";

/// @title Errors of the fault court
interface IFaultCourtErrors {
    /// @notice Thrown when two statements do not contradict each other, have different signers, or the one who signed does
    ///         not answer for them.
    error FaultNoEquivocation(address firstSigner, address secondSigner);
}

/// @title Events of the fault court
interface IFaultCourtEvents {
    /// @notice Emitted when a validator is punished for two different outcomes of one batch.
    event DoubleOutcomeProven(
        uint64 indexed runId, address indexed validator, bytes32 indexed escrowId, uint64 batchId, uint256 amount
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
/// @notice No jury: what is proven here is two signatures of one account that contradict each other. Every slash is final at
///         once, reaches stake in the run it is about and no other, and is made once. Nobody earns by it.
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

    /// @notice Slashes and bans from a run a worker whose node signed another submission for a slot that was judged. It costs
    ///         what an exact fraud costs by the terms of the batch.
    /// @param outcome The outcome of the slot.
    /// @param first The submission that it judges.
    /// @param second Another one for the same slot, signed by a key of the worker's that was not rotated
    ///        away when the batch was committed.
    function proveDoubleSubmission(
        IContributionLedger.OutcomeProof calldata outcome,
        IContributionLedger.Submission calldata first,
        bytes calldata firstSignature,
        IContributionLedger.Submission calldata second,
        bytes calldata secondSignature
    ) external;
}
