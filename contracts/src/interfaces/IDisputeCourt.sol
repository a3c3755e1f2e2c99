// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

import {IContributionLedger} from "./IContributionLedger.sol";

/// @title Errors of the dispute court
interface IDisputeCourtErrors {
    /// @notice Thrown when an outcome already has a case.
    error CourtCaseExists(bytes32 leaf);
    /// @notice Thrown when an outcome has no case, or its case is closed.
    error CourtNoOpenCase(bytes32 leaf, uint8 status);
    /// @notice Thrown when an outcome's challenge window is over.
    error CourtWindowClosed(bytes32 leaf, uint256 closedAt);
    /// @notice Thrown when the claimed verdict equals the recorded one, or is not a verdict.
    error CourtInvalidClaim(uint8 recorded, uint8 claimed);
    /// @notice Thrown when a jury was drawn already.
    error CourtJuryDrawn(bytes32 leaf);
    /// @notice Thrown when the block that decides the draw is not mined yet.
    error CourtTooEarlyToDraw(bytes32 leaf, uint256 drawBlock);
    /// @notice Thrown when no validator of the run is left who may sit on the jury.
    error CourtNoJurors(bytes32 leaf);
    /// @notice Thrown when the caller was not drawn for the case.
    error CourtNotJuror(bytes32 leaf, address caller);
    /// @notice Thrown when a juror commits twice, or reveals what it did not commit.
    error CourtVoteMismatch(bytes32 leaf, address juror);
    /// @notice Thrown when a phase is over.
    error CourtPhaseOver(bytes32 leaf, uint256 endedAt);
    /// @notice Thrown when a phase has not begun, or is not over.
    error CourtPhaseOpen(bytes32 leaf, uint256 until);
    /// @notice Thrown at construction when a phase or the jury is empty.
    error CourtInvalidParameter(bytes32 name);
}

/// @title Events of the dispute court
interface IDisputeCourtEvents {
    /// @notice Emitted when a bonded challenge opens a case; the outcome cannot settle meanwhile.
    event CaseOpened(
        bytes32 indexed leaf,
        uint64 indexed batchId,
        address indexed challenger,
        uint32 position,
        uint8 recordedVerdict,
        uint8 claimedVerdict,
        uint256 drawBlock
    );
    /// @notice Emitted when a draw came too late to read its block; a later one decides.
    event DrawPostponed(bytes32 indexed leaf, uint256 drawBlock);
    /// @notice Emitted when the jury is drawn.
    event JuryDrawn(bytes32 indexed leaf, uint88 seats, address[] jurors);
    /// @notice Emitted when a juror commits to a vote.
    event VoteCommitted(bytes32 indexed leaf, address indexed juror, bytes32 commitment);
    /// @notice Emitted when a juror reveals its vote. `overturn` is true for the challenger; `resultHash` is of what
    ///         the juror recomputed.
    event VoteRevealed(bytes32 indexed leaf, address indexed juror, bool overturn, bytes32 resultHash);
    /// @notice Emitted when a case closes. `verdict` is what stands.
    event CaseClosed(bytes32 indexed leaf, bool overturned, uint8 verdict, uint256 bondReturned);
}

/// @title Bonded challenges to outcomes, decided by a jury
/// @notice A case goes through: challenge → drawJury → commitVote → revealVote → close. Every phase ends at a time
///         that is fixed when the case opens, so that a case ends whoever does nothing.
interface IDisputeCourt is IDisputeCourtErrors, IDisputeCourtEvents {
    /// @notice Life of a case. Upheld: the recorded verdict stands.
    enum CaseStatus {
        None,
        Open,
        Upheld,
        Overturned
    }

    /// @notice What a deployment fixes for ever.
    struct Terms {
        /// @dev Token wei that a challenger puts up.
        uint256 challengeBond;
        /// @dev Blocks after the challenge whose hash decides the jury.
        uint256 drawDelay;
        /// @dev Jurors of a case, fewer when the run has fewer that may sit.
        uint256 jurySize;
        /// @dev Seconds after the challenge until which jurors may commit.
        uint256 commitTime;
        /// @dev Seconds after that until which they may reveal.
        uint256 revealTime;
    }

    /// @notice One dispute.
    struct Case {
        /// @dev Who challenged. Slot 0.
        address challenger;
        /// @dev The batch of the outcome.
        uint64 batchId;
        /// @dev The verdict as recorded.
        uint8 recordedVerdict;
        /// @dev The verdict the challenger claims.
        uint8 claimedVerdict;
        /// @dev The run whose validators are the jurors. Slot 1: all that a juror's calls read and write.
        uint64 runId;
        /// @dev Where it stands.
        CaseStatus status;
        /// @dev Unix seconds of the challenge.
        uint40 openedAt;
        /// @dev The block whose hash decides the jury.
        uint32 drawBlock;
        /// @dev Seats of the jurors; zero until drawn.
        uint88 jury;
        /// @dev Jurors that committed to a vote.
        uint8 committed;
        /// @dev Votes revealed for the challenger.
        uint8 votesToOverturn;
        /// @dev Votes revealed for the recorded verdict.
        uint8 votesToUphold;
    }

    /// @notice Challenges an outcome within its window; takes the bond, which must be approved, from the caller.
    function challenge(IContributionLedger.OutcomeProof calldata outcome, uint8 claimedVerdict) external;

    /// @notice Draws the jury from the hash of the case's draw block, by stake, without replacement. Anyone, in the
    ///         first half of the time to commit.
    /// @dev Validators of the run that neither signed the outcome nor are a party. When the block is too old to be
    ///      read, a later one takes its place.
    function drawJury(IContributionLedger.OutcomeProof calldata outcome) external;

    /// @notice Commits to a vote: `keccak256(abi.encode(leaf, juror, overturn, resultHash, salt))`. Jurors, once.
    function commitVote(bytes32 leaf, bytes32 commitment) external;

    /// @notice Reveals a vote once all jurors committed or the time to commit is over.
    /// @param overturn Whether the challenger is right.
    /// @param resultHash Hash of what the juror recomputed; the document is for whoever audits the case.
    function revealVote(bytes32 leaf, bool overturn, bytes32 resultHash, bytes32 salt) external;

    /// @notice Closes a case once all jurors revealed or the jury's time is over. Anyone.
    /// @dev More votes to overturn than to uphold: the bond returns and the claimed verdict stands. A tie, or no vote
    ///      at all: the recorded verdict stands and the bond returns. Otherwise the bond is burned.
    function close(IContributionLedger.OutcomeProof calldata outcome) external;

    /// @notice Returns a case.
    function caseOf(bytes32 leaf) external view returns (Case memory);

    /// @notice Returns who challenged an outcome, or zero.
    function challengerOf(bytes32 leaf) external view returns (address);

    /// @notice Returns what a juror committed: zero for nothing, one once revealed.
    function commitmentOf(bytes32 leaf, address juror) external view returns (bytes32);

    /// @notice Returns whether an outcome has an open case.
    function isOpen(bytes32 leaf) external view returns (bool);

    /// @notice Returns the verdict that stands for an outcome, given the recorded one.
    function effectiveVerdict(bytes32 leaf, uint8 recorded) external view returns (uint8);

    /// @notice Returns what the deployment fixed.
    function terms() external view returns (Terms memory);

    /// @notice Returns the seconds after which a case can be closed, whoever did nothing.
    function juryTime() external view returns (uint256);
}
