// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

import {IContributionLedger} from "./IContributionLedger.sol";

/// @title Errors of the fault court
interface IFaultCourtErrors {
    /// @notice Thrown when an account did not commit the fault it is accused of.
    error FaultNotCommitted(address account);
    /// @notice Thrown when a case has not the outcome that the fault needs.
    error FaultCaseUndecided(bytes32 leaf, uint8 status);
    /// @notice Thrown when two statements do not contradict each other, or have different signers.
    error FaultNoEquivocation(address firstSigner, address secondSigner);
    /// @notice Thrown when submissions are not of one worker, or their slots not in strictly ascending order.
    error FaultOutOfOrder(address worker, uint64 runId, uint32 step, uint32 index);
    /// @notice Thrown when a worker's units in flight do not exceed what its stake covers.
    error FaultWithinCap(address worker, uint256 unitsInFlight, uint256 cap);
    /// @notice Thrown at construction when a share exceeds one million.
    error FaultInvalidShare(uint256 ppm);
}

/// @title Events of the fault court
interface IFaultCourtEvents {
    /// @notice Emitted when a validator is punished.
    event ValidatorPunished(
        address indexed validator, bytes32 indexed offence, IFaultCourt.Fault fault, bytes32 subject, uint256 amount
    );
    /// @notice Emitted when a worker is punished for signing two submissions for one slot.
    event DoubleSubmissionProven(
        address indexed worker, bytes32 indexed offence, uint64 runId, uint32 step, uint32 index, uint256 amount
    );
    /// @notice Emitted when a worker is proven to have more units in flight than its stake covers.
    event OvercommitProven(address indexed worker, uint256 unitsInFlight, uint256 cap);
}

/// @title Punishes faults that prove themselves
/// @notice No jury: what is proven here is a signature, a silence or a sum. Every slash is final at once, each fault
///         is punished once, and the caller gets the capped reporter's share unless it is a validator of the run.
interface IFaultCourt is IFaultCourtErrors, IFaultCourtEvents {
    /// @notice What a validator can be punished for.
    enum Fault {
        WrongVerdict,
        AbsentJuror,
        MissedDeadline,
        DoubleOutcome
    }

    /// @notice A worker's work, with the proof that it is in flight.
    struct Work {
        /// @dev As for `IContributionLedger.inFlightUntil`.
        IContributionLedger.OutcomeProof outcome;
        IContributionLedger.Submission submission;
        /// @dev EIP-712 `Submission` by a current or former node of the worker.
        bytes nodeSignature;
    }

    /// @notice Slashes a validator that signed an outcome which a jury overturned; the challenger is the reporter.
    function slashSigner(IContributionLedger.OutcomeProof calldata outcome, address validator) external;

    /// @notice Slashes a juror that did not reveal a vote before its case closed.
    function slashAbsentJuror(bytes32 leaf, address juror) external;

    /// @notice Slashes a validator that held a seat all the time a batch waited in vain for its outcomes.
    function slashOverdue(IContributionLedger.Batch calldata batch, address validator) external;

    /// @notice Slashes all stake of a validator that signed two different outcomes of one batch, and unseats it.
    /// @param batch The batch as it stands now; it tells the run.
    function proveDoubleOutcome(
        IContributionLedger.Batch calldata batch,
        IContributionLedger.Outcomes calldata first,
        bytes calldata firstSignature,
        IContributionLedger.Outcomes calldata second,
        bytes calldata secondSignature
    ) external;

    /// @notice Slashes and bans a worker whose nodes signed two different submissions for one slot.
    function proveDoubleSubmission(
        IContributionLedger.Submission calldata first,
        bytes calldata firstSignature,
        IContributionLedger.Submission calldata second,
        bytes calldata secondSignature
    ) external;

    /// @notice Jails a worker by proof that its units in flight exceed what its stake covers.
    /// @dev The orchestrator must not lease that much, and the worker must not sign it.
    /// @param works Work of one worker that is not final, ascending by run, step and index.
    function proveOvercommit(Work[] calldata works) external;

    /// @notice Holds a worker's stake back until work of it that is not final yet is.
    /// @dev The unbonding period alone outlasts judgement; this is for work that was committed after its worker asked
    ///      for its stake.
    function holdStake(Work calldata work) external;

    /// @notice Returns the millionths of a signer's stake that an overturned verdict costs.
    function wrongVerdictPpm() external view returns (uint256);

    /// @notice Returns the millionths of a validator's stake that missing a jury or an outcome deadline costs.
    function absencePpm() external view returns (uint256);
}
