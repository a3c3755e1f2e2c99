// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

/// @title Errors of the contribution ledger
interface IContributionLedgerErrors {
    /// @notice Thrown when the caller does not hold the role the call needs.
    error LedgerUnauthorized(address caller);
    /// @notice Thrown when a run does not take submissions now.
    error LedgerPaused(uint64 runId);
    /// @notice Thrown when a batch does not exist.
    error LedgerBatchUnknown(uint64 batchId);
    /// @notice Thrown when a batch is empty, its root is zero, or it is too large.
    error LedgerInvalidBatch(bytes32 root, uint256 count);
    /// @notice Thrown when a batch already has outcomes.
    error LedgerOutcomesPosted(uint64 batchId);
    /// @notice Thrown when records are not one per submission.
    error LedgerRecordCount(uint256 bytesGiven, uint256 bytesExpected);
    /// @notice Thrown when a record's verdict is none of the four.
    error LedgerInvalidVerdict(uint256 position, uint8 verdict);
    /// @notice Thrown when fewer valid signatures than the quorum are given.
    error LedgerQuorumNotMet(uint256 signatures, uint256 quorum);
    /// @notice Thrown when signers are not validators of the run, or not in strictly ascending order.
    error LedgerInvalidSigner(address signer);
    /// @notice Thrown when a proof does not lead to the batch's outcomes root.
    error LedgerInvalidProof(uint64 batchId, uint32 position);
    /// @notice Thrown when an outcome is not a fraud verdict.
    error LedgerNotFraud(uint64 batchId, uint32 position, uint8 verdict);
    /// @notice Thrown when an outcome is not final yet, or is under dispute.
    error LedgerNotFinal(uint64 batchId, uint32 position);
    /// @notice Thrown when a submission is not signed by a node of the worker, the worker may not submit, or the
    ///         submission is not the one that the outcome judges.
    error LedgerInvalidSubmission(address worker, address signer);
}

/// @title Events of the contribution ledger
interface IContributionLedgerEvents {
    /// @notice Emitted when submissions are committed.
    event BatchCommitted(uint64 indexed batchId, uint64 indexed runId, bytes32 root, uint32 count, uint64 units);
    /// @notice Emitted when a censored worker commits one submission itself.
    event DirectlySubmitted(
        uint64 indexed batchId, address indexed worker, IContributionLedger.Submission submission, bytes nodeSignature
    );
    /// @notice Emitted when a batch has outcomes. Everything a claim or an audit needs is in it.
    event OutcomesPosted(
        uint64 indexed batchId, uint64 indexed runId, bytes32 outcomesRoot, bytes records, bytes[] signatures
    );
    /// @notice Emitted when a fraud verdict is executed.
    event FraudExecuted(
        uint64 indexed batchId, address indexed worker, bytes32 indexed offence, uint32 position, uint256 amount
    );
    /// @notice Emitted when an outcome's fraud verdict is final and its slash released.
    event FraudFinalised(bytes32 indexed offence);
}

/// @title The ledger of contributions: what was submitted, and what validators decided
/// @notice Byte layouts of leaves and records are in docs/protocol.md.
interface IContributionLedger is IContributionLedgerErrors, IContributionLedgerEvents {
    /// @notice A worker's claim over one file of rollouts.
    struct Submission {
        uint64 runId;
        address worker;
        uint32 step;
        uint32 index;
        uint32 policyVersion;
        bytes32 fileHash;
        uint32 rollouts;
        uint64 units;
    }

    /// @notice One committed batch.
    struct Batch {
        /// @dev Merkle root over submission leaves; zero once outcomes are posted (BatchCommitted keeps it).
        bytes32 root;
        /// @dev Merkle root over outcome leaves; zero until posted.
        bytes32 outcomesRoot;
        /// @dev The run.
        uint64 runId;
        /// @dev Submissions in the batch.
        uint32 count;
        /// @dev Unix seconds of the commitment.
        uint64 committedAt;
        /// @dev Unix seconds of the outcomes; zero until posted.
        uint64 postedAt;
    }

    /// @notice One outcome with its place in the batch and the proof that it was posted.
    struct OutcomeProof {
        uint64 batchId;
        uint32 position;
        /// @dev The 56-byte outcome record.
        bytes record;
        bytes32[] proof;
    }

    /// @notice An outcome record, decoded.
    struct Outcome {
        uint32 workerId;
        uint32 step;
        uint32 index;
        uint32 policyVersion;
        bytes32 fileHash;
        uint16 rollouts;
        uint32 units;
        uint8 verdict;
        uint8 reason;
    }

    /// @notice Commits a batch of submissions by root. Only the run's orchestrator.
    /// @param count Submissions in the batch, 1 to 4096.
    /// @param units Sum of the units they claim.
    function commitBatch(uint64 runId, bytes32 root, uint32 count, uint64 units) external returns (uint64 batchId);

    /// @notice Commits one submission without the orchestrator. Anyone, with the node's signature.
    function submitDirect(Submission calldata submission, bytes calldata nodeSignature)
        external
        returns (uint64 batchId);

    /// @notice Records the outcome of every submission of a batch, accepts and rejects alike.
    /// @dev Anyone may post; only the validators' signatures count. The outcomes root is computed here.
    ///      Later than `outcomeDeadline` still counts, so that nobody goes unpaid for the validators' delay;
    ///      only within it is the worker's stake sure to be there still.
    /// @param records `count` records of 56 bytes, in batch order.
    /// @param signatures EIP-712 `Outcomes` by at least `quorum` validators, ascending by signer.
    function postOutcomes(uint64 batchId, bytes calldata records, bytes[] calldata signatures) external;

    /// @notice Slashes and bans the worker of a fraud outcome at once; the stake waits in escrow.
    /// @dev Anyone may call. The worker's own signature on the submission is required: validators whom a run's
    ///      owner picked can punish only workers that took part in that run. A challenger whose case turned the
    ///      outcome into fraud is the reporter of the slash; otherwise there is none.
    /// @param outcome The outcome and its proof; the verdict that stands must be fraud.
    /// @param submission The submission that the outcome judges.
    /// @param nodeSignature EIP-712 `Submission` by a current or former node of the worker.
    /// @return amount Token wei moved into escrow.
    function executeFraud(OutcomeProof calldata outcome, Submission calldata submission, bytes calldata nodeSignature)
        external
        returns (uint256 amount);

    /// @notice Releases the escrow of an executed fraud whose challenge window is over.
    function finaliseFraud(OutcomeProof calldata outcome) external;

    /// @notice Returns whether an outcome was posted, and its decoded record.
    /// @dev Reverts with LedgerInvalidProof when the proof does not hold.
    function outcomeOf(OutcomeProof calldata outcome) external view returns (Outcome memory, bytes32 leaf);

    /// @notice Remembers that an outcome of this batch was challenged. Only DisputeCourt may call.
    /// @dev Batches that nobody challenged never ask the court, which keeps claims cheap.
    function markDisputed(uint64 batchId) external;

    /// @notice Returns a posted outcome with the verdict that stands, its run, and whether it is final.
    /// @dev Reverts with LedgerInvalidProof when the proof does not hold.
    function settledOutcome(OutcomeProof calldata outcome)
        external
        view
        returns (uint64 runId, Outcome memory settled, bool isFinal_);

    /// @notice Returns the seats (see `IRunRegistry.seatOf`) of the validators that signed a batch's outcomes.
    function signersOf(uint64 batchId) external view returns (uint88);

    /// @notice Returns whether the outcome with this leaf is final: window over, no open case.
    function isFinal(uint64 batchId, bytes32 leaf) external view returns (bool);

    /// @notice Returns a batch.
    function batchOf(uint64 batchId) external view returns (Batch memory);

    /// @notice Returns the number of batches.
    function batchCount() external view returns (uint64);

    /// @notice Returns the seconds after posting during which an outcome may be challenged.
    function challengeWindow() external view returns (uint256);

    /// @notice Returns the seconds after the commitment by which outcomes are due.
    function outcomeDeadline() external view returns (uint256);

    /// @notice Returns the EIP-712 domain separator.
    function DOMAIN_SEPARATOR() external view returns (bytes32);
}
