// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

import {IContributionLedger} from "./IContributionLedger.sol";

/// @title Errors of the dispute court
interface IDisputeCourtErrors {
    /// @notice Thrown when an outcome already has a case.
    error CourtCaseExists(bytes32 leaf);
    /// @notice Thrown when an outcome has no case, or its case is closed.
    error CourtNoOpenCase(bytes32 leaf);
    /// @notice Thrown when an outcome's challenge window is over.
    error CourtWindowClosed(uint64 batchId, uint256 closedAt);
    /// @notice Thrown when the claimed verdict equals the recorded one, or is not a verdict.
    error CourtInvalidClaim(uint8 recorded, uint8 claimed);
    /// @notice Thrown when the caller may not vote: no validator of the run, a signer, the challenger, or voted
    ///         already.
    error CourtNotJuror(bytes32 leaf, address caller);
    /// @notice Thrown when a case is still open for votes.
    error CourtVotingOpen(bytes32 leaf, uint256 until);
    /// @notice Thrown when the time to vote is over.
    error CourtVotingOver(bytes32 leaf, uint256 endedAt);
}

/// @title Events of the dispute court
interface IDisputeCourtEvents {
    /// @notice Emitted when a bonded challenge opens a case; the outcome cannot settle meanwhile.
    event CaseOpened(
        bytes32 indexed leaf,
        uint64 indexed batchId,
        address indexed challenger,
        uint32 position,
        uint8 claimedVerdict,
        uint256 bond
    );
    /// @notice Emitted when a juror votes. `overturn` is true for the challenger.
    event CaseVoted(bytes32 indexed leaf, address indexed juror, bool overturn);
    /// @notice Emitted when a case closes. `verdict` is what stands.
    event CaseClosed(bytes32 indexed leaf, bool overturned, uint8 verdict, uint256 bondReturned);
}

/// @title Bonded challenges to outcomes, decided by the run's other validators
interface IDisputeCourt is IDisputeCourtErrors, IDisputeCourtEvents {
    /// @notice One dispute.
    struct Case {
        /// @dev Who challenged.
        address challenger;
        /// @dev The run whose validators vote.
        uint64 runId;
        /// @dev Unix seconds until which votes count.
        uint64 votingEndsAt;
        /// @dev Votes for the challenger.
        uint8 votesToOverturn;
        /// @dev Votes for the recorded verdict.
        uint8 votesToUphold;
        /// @dev The verdict as recorded.
        uint8 recordedVerdict;
        /// @dev The verdict the challenger claims.
        uint8 claimedVerdict;
        /// @dev Whether the case is closed.
        bool closed;
        /// @dev Whether the challenger won.
        bool overturned;
        /// @dev Token wei put up.
        uint128 bond;
    }

    /// @notice Challenges a posted outcome within its window; takes the bond from the caller.
    function challenge(IContributionLedger.OutcomeProof calldata outcome, uint8 claimedVerdict) external;

    /// @notice Votes on a case. Validators of the run that neither signed the outcome nor challenged it, once each.
    function vote(bytes32 leaf, bool overturn) external;

    /// @notice Closes a case once all jurors voted or voting is over. Anyone.
    /// @dev More votes to overturn than to uphold: the bond returns and the claimed verdict stands.
    ///      No vote at all: the recorded verdict stands and the bond returns. Otherwise the bond is burned.
    function close(IContributionLedger.OutcomeProof calldata outcome) external;

    /// @notice Returns a case.
    function caseOf(bytes32 leaf) external view returns (Case memory);

    /// @notice Returns whether an outcome has an open case.
    function isOpen(bytes32 leaf) external view returns (bool);

    /// @notice Returns the verdict that stands for an outcome, given the recorded one.
    function effectiveVerdict(bytes32 leaf, uint8 recorded) external view returns (uint8);

    /// @notice Returns the bond of a challenge, in token wei.
    function challengeBond() external view returns (uint256);

    /// @notice Returns the seconds a jury has.
    function juryTime() external view returns (uint256);
}
