// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

import {IContributionLedger} from "./IContributionLedger.sol";

/// @title Errors of the dispute court
interface IDisputeCourtErrors {
    /// @notice Thrown when the caller is not the contract or the worker that may make this call.
    error CourtUnauthorized(address caller);
    /// @notice Thrown when there is no open case, or it is closed.
    error CourtNoOpenCase(bytes32 caseId, uint8 status);
    /// @notice Thrown when an outcome had its case, or a batch is before judges already.
    error CourtCaseExists(bytes32 caseId);
    /// @notice Thrown when an outcome's challenge window is over.
    error CourtWindowClosed(bytes32 leaf, uint256 closedAt);
    /// @notice Thrown when a ruling is none, or a claim is for the verdict that is recorded.
    error CourtInvalidRuling(uint16 recorded, uint16 ruling);
    /// @notice Thrown when a claim was not announced in an earlier block, or more than `ANNOUNCEMENT_BLOCKS` ago.
    error CourtNotAnnounced(bytes32 announcement);
    /// @notice Thrown when an account claims that the case may draw as a juror, or one more than `MAX_CLAIMS`; the
    ///         worker and its node may make that one.
    error CourtMayNotClaim(bytes32 caseId, address claimant);
    /// @notice Thrown when a claim does not prove that the batch holds its work, and another did; when signers are to be
    ///         fined over work of which nobody proved it; or when a late proof is not of the submission that opened the case.
    error CourtUnproven(bytes32 caseId);
    /// @notice Thrown when a jury was drawn already.
    error CourtJuryDrawn(bytes32 caseId);
    /// @notice Thrown when the block that decides the draw is not mined yet.
    error CourtTooEarlyToDraw(bytes32 caseId, uint256 drawBlock);
    /// @notice Thrown when nobody is there who may sit on the jury.
    error CourtNoJurors(bytes32 caseId);
    /// @notice Thrown when the caller was not drawn for the case, or committed to a vote already.
    error CourtNotJuror(bytes32 caseId, address caller);
    /// @notice Thrown when a commitment is no hash, or what is revealed is not what was committed.
    error CourtVoteMismatch(bytes32 caseId, address juror);
    /// @notice Thrown when a phase is over.
    error CourtPhaseOver(bytes32 caseId, uint256 endedAt);
    /// @notice Thrown when a phase has not begun, or is not over.
    error CourtPhaseOpen(bytes32 caseId, uint256 until);
    /// @notice Thrown when an account did not do what it is to be fined for, or has no fee to collect.
    error CourtNothingDue(bytes32 caseId, address account);
    /// @notice Thrown when a bond is not there, or its batch is neither judged nor void.
    error CourtBondHeld(uint64 batchId);
    /// @notice Thrown at construction when a phase or the jury is empty, or jurors' fees exceed a bond.
    error CourtInvalidParameter(bytes32 name);
}

/// @title Events of the dispute court
interface IDisputeCourtEvents {
    /// @notice Emitted when somebody announces a claim without saying which.
    event ClaimAnnounced(bytes32 indexed announcement, address indexed claimant);
    /// @notice Emitted when the first claim about an outcome opens its case, or judges are called for a batch nobody judged
    ///         (`recorded` is zero then).
    event CaseOpened(
        bytes32 indexed caseId,
        uint64 indexed batchId,
        uint64 indexed runId,
        uint32 number,
        uint32 position,
        address worker,
        uint16 recorded,
        uint256 drawBlock,
        uint256 places
    );
    /// @notice Emitted when an account puts its bond on a ruling. `sources` are URLs that show what the jury needs; judges that
    ///         are called for unjudged work are shown its submission without signature and proof.
    event Claimed(
        bytes32 indexed caseId,
        address indexed claimant,
        uint16 ruling,
        IContributionLedger.CommittedWork work,
        string[] sources
    );
    /// @notice Emitted when a draw came too late to read its block; a later one decides.
    event DrawPostponed(bytes32 indexed caseId, uint256 drawBlock);
    /// @notice Emitted when the jury is drawn.
    event JuryDrawn(bytes32 indexed caseId, address[] jurors);
    /// @notice Emitted when a juror commits to a vote.
    event VoteCommitted(bytes32 indexed caseId, address indexed juror, bytes32 commitment);
    /// @notice Emitted when a juror reveals its vote; `resultHash` is of what it recomputed.
    event VoteRevealed(bytes32 indexed caseId, address indexed juror, uint16 ruling, bytes32 resultHash);
    /// @notice Emitted when a case closes. `ruling` is what stands; each right juror can collect `fee`.
    event CaseClosed(
        bytes32 indexed caseId, IDisputeCourt.CaseStatus status, uint16 ruling, address reporter, uint256 fee
    );
    /// @notice Emitted when somebody proves that the batch holds the submission that opened a closed case.
    event CaseProven(bytes32 indexed caseId);
    /// @notice Emitted when a claim ends: its bond returns, less what jurors got of it, or is lost.
    event ClaimSettled(bytes32 indexed caseId, address indexed claimant, bool right, uint256 returned);
    /// @notice Emitted when a juror collects its fee.
    event FeeCollected(bytes32 indexed caseId, address indexed juror, uint256 amount);
    /// @notice Emitted when a signer or a juror is fined.
    event Fined(bytes32 indexed caseId, address indexed account, uint256 amount);
    /// @notice Emitted when a bond for a worker's own submission is put up, and when it comes back, less what jurors got of it.
    event BondTaken(uint64 indexed batchId, address indexed payer, uint256 amount);
    event BondReturned(uint64 indexed batchId, address indexed payer, uint256 amount);
}

/// @title The court of the network: jurors of no run vote a verdict
/// @notice A case about an outcome goes through: announce → claim → draw → commitVote → revealVote → settle. A batch that its
///         run left unjudged comes before judges by summon, and then the same. Every phase ends at a time that is fixed
///         when the case opens, so that a case ends whoever does nothing.
///         A *ruling* is `verdict << 8 | reason`; zero says that nothing could be seen. Rulings of one verdict that are both
///         exact or both statistical frauds, or no frauds, count as the same when a case is compared with what is recorded.
interface IDisputeCourt is IDisputeCourtErrors, IDisputeCourtEvents {
    /// @notice Life of a case.
    enum CaseStatus {
        None,
        Open,
        /// @dev What is recorded stands: the jury said so, saw nothing, or was of no one mind.
        Upheld,
        /// @dev The jury's ruling stands in its place.
        Overturned
    }

    /// @notice What a deployment fixes for ever.
    struct Terms {
        /// @dev Token wei that a claimant, or a worker that submits by itself, puts up.
        uint256 bond;
        /// @dev Token wei that a juror of the prevailing ruling earns at most.
        uint256 jurorFee;
        /// @dev Blocks after the opening whose hash decides the jury.
        uint256 drawDelay;
        /// @dev Jurors of a case, fewer when fewer may sit.
        uint256 jurySize;
        /// @dev Seconds after the opening until which jurors may commit.
        uint256 commitTime;
        /// @dev Seconds after that until which they may reveal.
        uint256 revealTime;
        /// @dev Millionths of a signer's stake in the run that outcomes cost which a jury overturned, once a batch.
        uint256 wrongVerdictPpm;
        /// @dev Millionths of a juror's stake that a vote costs which it did not cast.
        uint256 absencePpm;
    }

    /// @notice One dispute. Slot 0 is all that a juror's calls read and write.
    struct Case {
        CaseStatus status;
        /// @dev The recorded ruling; zero when nothing was.
        uint16 recorded;
        /// @dev The ruling with most votes so far, with the reason of the vote by which it took the lead; the votes for it,
        ///      whatever their reasons; and whether another ruling has as many.
        uint16 leading;
        uint8 leadingVotes;
        bool tied;
        /// @dev Jurors drawn, that committed, and that revealed.
        uint8 jurors;
        uint8 committed;
        uint8 revealed;
        /// @dev Unix seconds.
        uint40 openedAt;
        /// @dev Number from 1.
        uint32 number;
        uint64 runId;
        /// @dev The block whose hash decides the jury.
        uint40 drawBlock;
        /// @dev Whose work it is about, and its slot as `step << 32 | index`. Slot 1.
        address worker;
        uint64 tag;
        /// @dev Places of the bench at the opening.
        uint32 places;
        /// @dev Who reported what the jury confirmed; zero for nobody. Slot 2.
        address reporter;
        /// @dev What each juror of the prevailing ruling can collect.
        uint88 fee;
        /// @dev Whether it is proven that the batch holds the work.
        bool isProven;
    }

    /// @notice One claim of a case.
    struct Claim {
        address claimant;
        uint16 ruling;
        /// @dev The block in which it was announced.
        uint40 announcedIn;
    }

    /// @notice Announces a claim, so that nobody who reads it later can be first:
    ///         `keccak256(abi.encode(claimant, leaf, ruling, salt))`. Holds for `ANNOUNCEMENT_BLOCKS`, so that nobody
    ///         announces everything in advance.
    function announce(bytes32 announcement) external;

    /// @notice Puts a bond, which must be approved, on a ruling about an outcome; the first claim opens its case. Within the
    ///         challenge window, or until the jury's time to commit is over.
    /// @dev Once a claim proved what the batch holds, the case is about that, whatever the record says of it, and claims about
    ///      another submission are refused. Until then a claim shows what the record names.
    /// @param work The work that the outcome is about; its proof may be missing where the record names it.
    /// @param sources URLs that show its file, ticket and signatures: at most 16 of at most 128 bytes.
    function claim(
        IContributionLedger.OutcomeProof calldata outcome,
        IContributionLedger.CommittedWork calldata work,
        uint16 ruling,
        bytes32 salt,
        string[] calldata sources
    ) external;

    /// @notice Calls judges of the network for a batch of one submission that its run left unjudged. Only its worker or the
    ///         worker's node; takes a bond from the caller unless one was put up.
    function summon(
        IContributionLedger.Batch calldata batch,
        IContributionLedger.Submission calldata submission,
        string[] calldata sources
    ) external;

    /// @notice Draws the jury from the hash of the case's draw block. Anyone, in the first half of the time to commit.
    /// @dev Of those who were on the bench when the case opened, without accounts that ever validated for the run, its owner
    ///      and the worker. When the block is too old to be read, a later one takes its place.
    function draw(bytes32 caseId) external;

    /// @notice Commits to a vote: `keccak256(abi.encode(caseId, juror, ruling, resultHash, salt))`. Jurors, once.
    function commitVote(bytes32 caseId, bytes32 commitment) external;

    /// @notice Reveals a vote once all jurors committed or the time to commit is over.
    /// @param ruling What the juror found; zero when nobody showed it the work.
    /// @param resultHash Hash of what it recomputed; the document is for whoever audits the case.
    function revealVote(bytes32 caseId, uint16 ruling, bytes32 resultHash, bytes32 salt) external;

    /// @notice Closes a case about an outcome once all jurors revealed or the jury's time is over. Anyone.
    /// @dev Votes are counted by what follows from them, and all that say that nothing was seen together; the ruling with most
    ///      stands. A tie, or no vote: what is recorded stands and bonds return. Nothing seen: the same, and bonds are lost.
    ///      Lost bonds pay the jurors of the ruling. Without any the run pays, and the first to claim the ruling what the run
    ///      does not have, or everything where the run's validators could not see the work. What is left of lost bonds is
    ///      burned.
    function settle(IContributionLedger.OutcomeProof calldata outcome) external;

    /// @notice Proves that the batch holds the submission that opened a closed case without a proof, so that its signers can be
    ///         fined and a fraud can be executed. Anyone, at any time: what the jury was shown first is what the batch holds.
    function prove(IContributionLedger.OutcomeProof calldata outcome, IContributionLedger.CommittedWork calldata work)
        external;

    /// @notice As `settle`, for a batch that its run left unjudged. Its worker's bond pays the jurors unless they accept the
    ///         work; then the run does, and the bond what the run does not have.
    function settleSummoned(
        IContributionLedger.Batch calldata batch,
        IContributionLedger.Submission calldata submission
    ) external;

    /// @notice Pays a juror of the prevailing ruling its fee, once. Anyone.
    function collectFee(bytes32 caseId, address juror) external;

    /// @notice Fines a validator that signed an outcome which a jury overturned, once a batch. Anyone; a claimant whom the jury
    ///         confirmed is the reporter.
    /// @dev Never where the record, or most of the votes for what replaced it, have a reason over which honest judges may differ:
    ///      one of check 1, which depends on what the committer of the batch showed, or that of a program whose answer is not the same
    ///      everywhere; nor over work that nobody proved to be the batch's.
    function fineSigner(IContributionLedger.OutcomeProof calldata outcome, address validator) external;

    /// @notice Fines a juror that did not reveal a vote before its case closed. Anyone.
    function fineAbsentJuror(bytes32 caseId, address juror) external;

    /// @notice Takes a bond for a submission that a worker commits itself. Only ContributionLedger may call.
    function takeBond(uint64 batchId, address payer) external;

    /// @notice Returns such a bond once its batch is judged or void. Anyone.
    function returnBond(IContributionLedger.Batch calldata batch) external;

    /// @notice Returns the name of the case about a batch that its run left unjudged.
    function summonsOf(uint64 batchId) external pure returns (bytes32 caseId);

    /// @notice Returns whether judges of the network look at a batch now.
    function isSummoned(uint64 batchId) external view returns (bool);

    /// @notice Returns a case, by its outcome's leaf or by `summonsOf`.
    function caseOf(bytes32 caseId) external view returns (Case memory);

    /// @notice Returns the claims of a case.
    function claimsOf(bytes32 caseId) external view returns (Claim[] memory);

    /// @notice Returns who put up a batch's bond, or zero.
    function bondOf(uint64 batchId) external view returns (address payer);

    /// @notice Returns what a juror did: zero when it was not drawn, 1 when drawn, its commitment, `ruling << 8 | 2` once it
    ///         revealed, and 3 when it collected its fee.
    function voteOf(bytes32 caseId, address juror) external view returns (bytes32);

    /// @notice Returns whose work, of which slot (`step << 32 | index`), an outcome's case is about, and who reported what a
    ///         jury confirmed, or zero.
    function subjectOf(bytes32 leaf) external view returns (address worker, uint64 tag, address reporter);

    /// @notice Whether a claim proved in time what the batch holds at a case's position, or somebody proved after its end that
    ///         it is what opened the case.
    function isProven(bytes32 leaf) external view returns (bool);

    /// @notice Returns whether an outcome has an open case.
    function isOpen(bytes32 leaf) external view returns (bool);

    /// @notice Returns the verdict and reason that stand for an outcome, given the recorded ones.
    function rulingOf(bytes32 leaf, uint8 verdict, uint8 reason) external view returns (uint8, uint8);

    /// @notice Returns what the deployment fixed.
    function terms() external view returns (Terms memory);

    /// @notice Returns the seconds after which a case can be closed, whoever did nothing.
    function juryTime() external view returns (uint256);
}
