// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

/// @title Errors of the contribution ledger
interface IContributionLedgerErrors {
    /// @notice Thrown when the caller does not hold the role the call needs.
    error LedgerUnauthorized(address caller);
    /// @notice Thrown when a fraud is to be executed while slashing is paused.
    error LedgerSlashingPaused(uint64 runId, uint256 until);
    /// @notice Thrown at construction when pauses of slashing could follow one another faster than a challenge window.
    error LedgerCooldownTooShort(uint256 given, uint256 required);
    /// @notice Thrown when a run does not take submissions: its owner paused or closed it.
    error LedgerPaused(uint64 runId);
    /// @notice Thrown when a batch is empty, its root is zero, or it is too large.
    error LedgerInvalidBatch(bytes32 root, uint256 count);
    /// @notice Thrown when a batch does not exist, or the header given is not its present one.
    error LedgerBatchMismatch(uint64 batchId);
    /// @notice Thrown when a batch already has outcomes.
    error LedgerOutcomesPosted(uint64 batchId);
    /// @notice Thrown when outcomes come at or after the time they were due; the batch stands as claimed.
    error LedgerOutcomesOverdue(uint64 batchId, uint256 dueAt);
    /// @notice Thrown when a batch has no outcomes yet and they are not overdue.
    error LedgerOutcomesPending(uint64 batchId, uint256 dueAt);
    /// @notice Thrown when records are not one per submission.
    error LedgerRecordCount(uint256 bytesGiven, uint256 bytesExpected);
    /// @notice Thrown when a record's verdict is none of the four.
    error LedgerInvalidVerdict(uint256 position, uint8 verdict);
    /// @notice Thrown when the records hold more units than the batch was committed, and paid in advance, for.
    error LedgerUnitsExceeded(uint64 batchId, uint256 units, uint256 committed);
    /// @notice Thrown when fewer valid signatures than the quorum are given.
    error LedgerQuorumNotMet(uint256 signatures, uint256 quorum);
    /// @notice Thrown when signatures are not 65 bytes each.
    error LedgerSignatureLength(uint256 bytesGiven);
    /// @notice Thrown when signers are not validators of the run, or not in strictly ascending order.
    error LedgerInvalidSigner(address signer);
    /// @notice Thrown when a proof does not lead to the batch's root.
    error LedgerInvalidProof(uint64 batchId, uint32 position);
    /// @notice Thrown when an outcome is not a fraud verdict.
    error LedgerNotFraud(uint64 batchId, uint32 position, uint8 verdict);
    /// @notice Thrown when an outcome is not final yet, or is under dispute.
    error LedgerNotFinal(uint64 batchId, uint32 position);
    /// @notice Thrown when an outcome is final already.
    error LedgerFinal(uint64 batchId, uint32 position);
    /// @notice Thrown when a submission is not signed by a node of the worker, the worker may not submit, or the
    ///         submission is not the one that the outcome judges.
    error LedgerInvalidSubmission(address worker, address signer);
    /// @notice Thrown when a slot was submitted directly before.
    error LedgerSlotUsed(uint64 runId, address worker, uint32 step, uint32 index);
    /// @notice Thrown when a worker's units in flight would exceed what its stake covers.
    error LedgerUnitCap(address worker, uint256 unitsInFlight, uint256 cap);
}

/// @title Events of the contribution ledger
interface IContributionLedgerEvents {
    /// @notice Emitted when submissions are committed; with `OutcomesPosted` all that a batch's header is made of.
    event BatchCommitted(
        uint64 indexed batchId,
        uint64 indexed runId,
        bytes32 root,
        uint32 count,
        uint64 units,
        uint88 pricePerUnit,
        uint40 committedAt
    );
    /// @notice Emitted when a censored worker commits one submission itself.
    event DirectlySubmitted(
        uint64 indexed batchId, address indexed worker, IContributionLedger.Submission submission, bytes nodeSignature
    );
    /// @notice Emitted when a batch has outcomes. Everything a claim or an audit needs is in it.
    event OutcomesPosted(
        uint64 indexed batchId,
        uint64 indexed runId,
        bytes32 outcomesRoot,
        uint40 postedAt,
        uint88 signers,
        bytes records,
        bytes signatures
    );
    /// @notice Emitted when a fraud verdict is executed.
    event FraudExecuted(
        uint64 indexed batchId,
        address indexed worker,
        bytes32 indexed offence,
        bytes32 leaf,
        uint32 position,
        uint256 amount
    );
    /// @notice Emitted when an outcome's fraud verdict is final and its slash released.
    event FraudFinalised(uint64 indexed batchId, bytes32 indexed offence, bytes32 leaf);
}

/// @title The ledger of contributions: what was submitted, and what validators decided
/// @notice Byte layouts of leaves and records are in docs/protocol.md. A batch is stored as the hash of its header;
///         whoever speaks of a batch hands the header in, put together from the batch's events.
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

    /// @notice The header of a batch.
    struct Batch {
        /// @dev Number from 1.
        uint64 batchId;
        /// @dev The run.
        uint64 runId;
        /// @dev Merkle root over submission leaves until outcomes are posted, over outcome leaves from then on.
        bytes32 root;
        /// @dev Submissions in the batch.
        uint32 count;
        /// @dev Sum of the units they claim; no more are ever paid.
        uint64 units;
        /// @dev Token wei per unit, as it was at the commitment.
        uint88 pricePerUnit;
        /// @dev Unix seconds of the commitment.
        uint40 committedAt;
        /// @dev Unix seconds of the outcomes; zero until posted.
        uint40 postedAt;
        /// @dev Seats of the validators that signed the outcomes, see `IRunRegistry.seatBitOf`.
        uint88 signers;
    }

    /// @notice One outcome with its batch, its place there, and the proof that it stands.
    /// @dev When outcomes are overdue, a submission stands as claimed. `record` then is the record of an accept with
    ///      reason 0 and the claimed units, `proof` leads from the submission's leaf to `batch.root`.
    struct OutcomeProof {
        Batch batch;
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

    /// @notice An outcome as it stands now.
    struct Standing {
        /// @dev As recorded.
        Outcome outcome;
        /// @dev Names the outcome in cases.
        bytes32 leaf;
        /// @dev Names the file in slashes, whatever batch it is in.
        bytes32 offence;
        /// @dev The verdict that stands: the recorded one, or what a jury put in its place.
        uint8 verdict;
        /// @dev Unix seconds at which its challenge window closes; for frauds, as a pause of slashing prolongs it.
        uint256 closesAt;
        /// @dev Whether the window is closed and no case is open.
        bool isFinal;
    }

    /// @notice What validators sign: the outcomes of a batch.
    struct Outcomes {
        uint64 batchId;
        /// @dev Root over the submissions.
        bytes32 batchRoot;
        /// @dev Keccak-256 of the joined records.
        bytes32 recordsHash;
    }

    /// @notice Commits a batch of submissions by root, and sets aside what it can cost. Only the run's orchestrator.
    /// @param count Submissions in the batch, 1 to 4096.
    /// @param units Sum of the units they claim. Reverts with EscrowUnderfunded when the run cannot pay them.
    function commitBatch(uint64 runId, bytes32 root, uint32 count, uint64 units) external returns (uint64 batchId);

    /// @notice Commits one submission without the orchestrator. Only the worker or its node.
    /// @dev The stake is held until the outcome is final, and covers all units so submitted meanwhile.
    function submitDirect(Submission calldata submission, bytes calldata nodeSignature)
        external
        returns (uint64 batchId);

    /// @notice Records the outcome of every submission of a batch, accepts and rejects alike. Signatures are joined, and
    ///         ascend by signer.
    /// @dev Anyone may post; only the validators' signatures count. The outcomes root is computed here.
    ///      From `outcomeDeadline` on nothing can be posted: the batch stands as claimed, and DisputeCourt punishes
    ///      the validators.
    /// @param records `count` records of 56 bytes, in batch order.
    /// @param signatures EIP-712 `Outcomes` by at least `quorum` validators, 65 bytes each, ascending by signer.
    function postOutcomes(Batch calldata batch, bytes calldata records, bytes calldata signatures) external;

    /// @notice Slashes the worker of a fraud outcome at once, and jails or bans it; the stake waits in escrow.
    /// @dev Anyone may call. The worker's own signature on the submission is required: validators whom a run's
    ///      owner picked can punish only workers that took part in that run. A challenger whose case turned the
    ///      outcome into fraud is the reporter of the slash; otherwise there is none.
    ///      Exact faults (reasons 30 to 59) ban and cost the run's `exactFraudPpm`. Statistical ones jail and cost
    ///      `fraudPpm`, doubled for each earlier conviction; the second one bans.
    ///      Reverts while the run's slashing is paused (`IRunRegistry.pauseSlashing`), and can be done after that.
    /// @param outcome The outcome and its proof; the verdict that stands must be fraud.
    /// @param submission The submission that the outcome judges.
    /// @param nodeSignature EIP-712 `Submission` by a current or former node of the worker.
    /// @return amount Token wei moved into escrow.
    function executeFraud(OutcomeProof calldata outcome, Submission calldata submission, bytes calldata nodeSignature)
        external
        returns (uint256 amount);

    /// @notice Releases the escrow of an executed fraud whose challenge window is over: the one that a pause of slashing
    ///         prolongs, if it met one.
    function finaliseFraud(OutcomeProof calldata outcome) external;

    /// @notice Remembers that an outcome of this batch was challenged. Only DisputeCourt may call.
    /// @dev Batches that nobody challenged never ask the court, which keeps claims cheap.
    function markDisputed(uint64 batchId) external;

    /// @notice Returns an outcome as it stands now.
    /// @dev Reverts with LedgerBatchMismatch, LedgerOutcomesPending or LedgerInvalidProof when it does not stand.
    function standingOf(OutcomeProof calldata outcome) external view returns (Standing memory);

    /// @notice Returns when the challenge window of work in flight closes at the latest.
    /// @dev Reverts when the work is final, is not in its batch, or was not signed by its worker. Pauses of slashing
    ///      prolong nothing here: they must not make honest work count as in flight for longer.
    /// @param outcome As for `standingOf`; while outcomes are pending, as when they are overdue.
    /// @param nodeSignature EIP-712 `Submission` by a current or former node of the worker.
    function inFlightUntil(OutcomeProof calldata outcome, Submission calldata submission, bytes calldata nodeSignature)
        external
        view
        returns (uint256 closesAt);

    /// @notice Returns whether an outcome of a batch was ever challenged.
    /// @dev Reverts with LedgerBatchMismatch unless the header is the present one of its batch.
    function isDisputed(Batch calldata batch) external view returns (bool);

    /// @notice Returns the time outcomes of a batch were due, if that is past and there are none; else reverts.
    function overdueSince(Batch calldata batch) external view returns (uint256 dueAt);

    /// @notice Returns the units that a worker's active stake covers in flight.
    function unitCapOf(address worker) external view returns (uint256);

    /// @notice Returns the hash stored for a batch: of its header, with the lowest bit telling whether an outcome
    ///         was ever challenged. Zero for a batch that does not exist.
    function commitmentOf(uint64 batchId) external view returns (bytes32);

    /// @notice Returns who signed a submission; zero when the signature is malformed.
    function submissionSigner(Submission calldata submission, bytes calldata signature) external view returns (address);

    /// @notice Returns who signed outcomes; zero when the signature is malformed.
    function outcomesSigner(Outcomes calldata outcomes, bytes calldata signature) external view returns (address);

    /// @notice Returns the number of batches.
    function batchCount() external view returns (uint64);

    /// @notice Returns the seconds after posting during which an outcome may be challenged.
    function challengeWindow() external view returns (uint256);

    /// @notice Returns the seconds after the commitment by which outcomes are due.
    function outcomeDeadline() external view returns (uint256);

    /// @notice Returns the seconds from a commitment to the last moment at which nothing but a pause could have kept its
    ///         fraud from being executed: outcome deadline + challenge window + jury time + pause of slashing. Stake must
    ///         stay for longer.
    function judgementTime() external view returns (uint256);

    /// @notice Returns the token wei of stake that must stand behind one unit in flight.
    function stakePerUnit() external view returns (uint256);

    /// @notice Returns the EIP-712 domain separator.
    function DOMAIN_SEPARATOR() external view returns (bytes32);
}
