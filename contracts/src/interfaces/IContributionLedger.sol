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
    /// @notice Thrown when a batch has no outcomes.
    error LedgerNotJudged(uint64 batchId);
    /// @notice Thrown when a call comes before a time or from it on: outcomes from when they are due, judges of the network
    ///         before that, and a batch is void only when those had their time.
    error LedgerWrongTime(uint64 batchId, uint256 from, uint256 until);
    /// @notice Thrown when a batch that judges of the network look at is to be void or split.
    error LedgerInCourt(uint64 batchId);
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
    /// @notice Thrown when a submission is not signed by a node that its worker answers for, the worker may not submit, the
    ///         submission is not the one that is meant, or it claims nothing or more than a record holds.
    error LedgerInvalidSubmission(address worker, address signer);
    /// @notice Thrown when a ticket is not of the submission, not signed by the run's orchestrator, or too old.
    error LedgerInvalidTicket(address signer, uint256 deadline);
    /// @notice Thrown when a slot was submitted directly before.
    error LedgerSlotUsed(uint64 runId, address worker, uint32 step, uint32 index);
    /// @notice Thrown when a worker's units in flight would exceed what its stake covers.
    error LedgerUnitCap(address worker, uint256 unitsInFlight, uint256 cap);
}

/// @title Events of the contribution ledger
interface IContributionLedgerEvents {
    /// @notice Emitted when submissions are committed; with the events below all that a batch's header is made of.
    event BatchCommitted(
        uint64 indexed batchId,
        uint64 indexed runId,
        bytes32 root,
        uint32 count,
        uint64 units,
        uint88 pricePerUnit,
        uint32 terms,
        uint40 committedAt
    );
    /// @notice Emitted when a worker commits one submission itself. `sources` are URLs that show its file.
    event DirectlySubmitted(
        uint64 indexed batchId, address indexed worker, IContributionLedger.LeasedWork work, string[] sources
    );
    /// @notice Emitted when a worker takes its submission out of a batch that nobody judged; `batchId` is the new one, with
    ///         its own event of commitment, `fromBatchId` claims so much less.
    event BatchSplit(
        uint64 indexed batchId,
        uint64 indexed fromBatchId,
        address indexed worker,
        IContributionLedger.LeasedWork work,
        string[] sources
    );
    /// @notice Emitted when a validator says on chain what it signed, as when the orchestrator does not pass it on.
    /// @dev `records` are empty when somebody else showed those of that hash.
    event OutcomesShown(
        uint64 indexed batchId,
        address indexed validator,
        bytes32 batchRoot,
        bytes32 recordsHash,
        bytes records,
        bytes signature
    );
    /// @notice Emitted when a quorum says that nothing of a batch can be had.
    event BatchWithheld(uint64 indexed batchId, uint40 postedAt, uint88 signers, bytes signatures);
    /// @notice Emitted when a batch that nobody judged is void; what was set aside for it is the run's again.
    event BatchVoided(uint64 indexed batchId, uint64 indexed runId);
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
        bytes32 indexed escrowId,
        bytes32 leaf,
        uint32 position,
        uint256 amount
    );
    /// @notice Emitted when an outcome's fraud verdict is final and its slash released.
    event FraudFinalised(uint64 indexed batchId, bytes32 indexed escrowId, bytes32 leaf);
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

    /// @notice A right to work that the run's orchestrator gave.
    struct Ticket {
        uint64 runId;
        address worker;
        uint32 step;
        uint32 index;
        uint32 policyVersion;
        bytes32 policyRoot;
        bytes32 beacon;
        /// @dev Unix seconds.
        uint64 deadline;
    }

    /// @notice A submission with all that proves it: its node's signature, its ticket and the orchestrator's signature.
    struct LeasedWork {
        Submission submission;
        bytes nodeSignature;
        Ticket ticket;
        bytes ticketSignature;
    }

    /// @notice A submission, and the proof that a batch holds it.
    struct CommittedWork {
        Submission submission;
        /// @dev EIP-712 `Submission` by the worker's node at the commitment.
        bytes nodeSignature;
        /// @dev Leads from the submission's leaf, at its position, to the batch's root.
        bytes32[] proof;
    }

    /// @notice Life of a batch.
    enum BatchStatus {
        /// @dev Waits for its outcomes until they are due, and then for judges of the network or to be void.
        Committed,
        /// @dev A quorum of the run, or judges of the network, decided.
        Judged,
        /// @dev A quorum said that nothing of it can be had; as when outcomes are due.
        Withheld
    }

    /// @notice The header of a batch.
    struct Batch {
        /// @dev Number from 1.
        uint64 batchId;
        /// @dev The run.
        uint64 runId;
        /// @dev Merkle root over submission leaves, whose order counts.
        bytes32 root;
        /// @dev Merkle root over outcome leaves; zero until outcomes are posted.
        bytes32 outcomesRoot;
        /// @dev Submissions in the batch.
        uint32 count;
        /// @dev Sum of the units they claim; no more are ever paid.
        uint64 units;
        /// @dev Token wei per unit, as it was at the commitment.
        uint88 pricePerUnit;
        /// @dev Number of the run's terms at the commitment.
        uint32 terms;
        /// @dev Unix seconds of the commitment.
        uint40 committedAt;
        /// @dev Unix seconds of the outcomes or of the word that it is withheld; zero until then.
        uint40 postedAt;
        /// @dev Seats of the validators that signed, see `IRunRegistry.seatBitOf`; zero when the network's judges decided.
        uint88 signers;
        /// @dev Where it stands.
        BatchStatus status;
    }

    /// @notice One outcome with its batch, its place there, and the proof that it is in it.
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
        /// @dev The verdict and reason that stand: the recorded ones, or what a jury put in their place.
        uint8 verdict;
        uint8 reason;
        /// @dev Unix seconds at which its challenge window closes; for frauds, as a pause of slashing prolongs it.
        uint256 closesAt;
        /// @dev Whether the window is closed and no case is open.
        bool isFinal;
    }

    /// @notice What validators sign: the outcomes of a batch, or that it is withheld, which is no records at all.
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

    /// @notice Commits one submission without the orchestrator's help. Only the worker or its node, at most `TICKET_GRACE`
    ///         after the ticket's deadline.
    /// @dev Takes a bond for DisputeCourt, which comes back when it is judged. The worker's stake in the run covers all units so
    ///      submitted within one judgement time.
    /// @param sources URLs that show the file: at most 16 of at most 128 bytes.
    function submitDirect(LeasedWork calldata work, string[] calldata sources) external returns (uint64 batchId);

    /// @notice Takes a worker's submission out of a batch that nobody judged, into one of its own, which judges of the network
    ///         can be called for at once (`IDisputeCourt.summon`). Only the worker or its node, with a bond as above,
    ///         within `appealTime` from when outcomes were due or the batch was called withheld.
    /// @dev The batch was committed by an orchestrator, so that no ticket is asked for: jurors see to it.
    /// @param position The submission's place in the batch.
    /// @param proof Leads from its leaf there to the batch's root.
    function splitOff(
        Batch calldata batch,
        LeasedWork calldata work,
        uint32 position,
        bytes32[] calldata proof,
        string[] calldata sources
    ) external returns (uint64 batchId);

    /// @notice Records the outcome of every submission of a batch, accepts and rejects alike. Signatures are joined, and
    ///         ascend by signer. The run gets back at once what was set aside for units that the records do not hold.
    /// @dev Anyone may post before outcomes are due; only the validators' signatures count. The outcomes root is computed
    ///      here. Empty records say that nothing of the batch can be had: it is withheld.
    /// @param records `count` records of 56 bytes, in batch order, or none.
    /// @param signatures EIP-712 `Outcomes` by at least a quorum of validators, 65 bytes each, ascending by signer.
    function postOutcomes(Batch calldata batch, bytes calldata records, bytes calldata signatures) external;

    /// @notice Shows on chain what a validator of the run signed about a batch, for anybody to post a quorum's.
    /// @param records The records, or none when somebody showed those of `recordsHash` before.
    function showOutcomes(Batch calldata batch, bytes32 recordsHash, bytes calldata records, bytes calldata signature)
        external;

    /// @notice Gives back to the run what was set aside for a batch that nobody judged, once its workers had `appealTime`
    ///         to call judges of the network. Anyone.
    function voidBatch(Batch calldata batch) external;

    /// @notice Records what judges of the network decided about a batch of one submission. The run gets back what was set
    ///         aside for more units than the submission claims. Only DisputeCourt may call.
    function judge(Batch calldata batch, Submission calldata submission, uint8 verdict, uint8 reason) external;

    /// @notice Slashes the worker of a fraud outcome at once, and jails or bans it; the stake waits in escrow.
    /// @dev Anyone may call. The worker's own signature on the submission is required: validators whom a run's
    ///      owner picked can punish only workers that took part in that run, by their stake in that run.
    ///      Exact faults (reasons 30 to 59) ban and cost the `exactFraudPpm` of the batch's terms. Statistical ones jail and
    ///      cost `fraudPpm`, doubled for each earlier conviction; the second one bans.
    ///      Reverts while the run's slashing is paused (`IRunRegistry.pauseSlashing`), and can be done after that.
    /// @param outcome The outcome and its proof; the verdict that stands must be fraud. A record of the run's validators
    ///        must name this work; a jury was shown the work itself.
    /// @param work What the batch holds at the outcome's position.
    /// @return amount Token wei moved into escrow.
    function executeFraud(OutcomeProof calldata outcome, CommittedWork calldata work) external returns (uint256 amount);

    /// @notice Releases the escrow of an executed fraud whose challenge window is over: the one that a pause of slashing
    ///         prolongs, if it met one. A claimant whom a jury confirmed is the reporter.
    function finaliseFraud(OutcomeProof calldata outcome) external;

    /// @notice Remembers that an outcome of this batch was challenged. Only DisputeCourt may call.
    /// @dev Batches that nobody challenged never ask the court, which keeps claims cheap.
    function markDisputed(uint64 batchId) external;

    /// @notice Returns an outcome as it stands now.
    /// @dev Reverts with LedgerBatchMismatch, LedgerNotJudged or LedgerInvalidProof when it does not stand.
    function standingOf(OutcomeProof calldata outcome) external view returns (Standing memory);

    /// @notice Returns whether a batch is proven to hold exactly this submission at an outcome's position, and a key signed it
    ///         that was ever its worker's. Otherwise reverts unless the worker's node at the commitment signed it, and it has the
    ///         worker, slot, policy and file of the record: a worker from which the batch is hidden can contest what is said of
    ///         its work.
    /// @dev Warning: takes the outcome as it is given; `standingOf` checks one.
    function requireEvidence(OutcomeProof calldata outcome, CommittedWork calldata work)
        external
        view
        returns (bool isHeld);

    /// @notice Reverts unless a batch is of one submission, this one, and waits for judges of the network.
    function requireUnjudged(Batch calldata batch, Submission calldata submission) external view;

    /// @notice Returns whether an outcome of a batch was ever challenged.
    /// @dev Reverts with LedgerBatchMismatch unless the header is the present one of its batch.
    function isDisputed(Batch calldata batch) external view returns (bool);

    /// @notice Returns the units that a worker's active stake in a run covers in flight.
    function unitCapOf(uint64 runId, address worker) external view returns (uint256);

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

    /// @notice Returns the seconds from when outcomes are due, or a batch is called withheld, in which its workers can call
    ///         judges of the network; then it can be void.
    function appealTime() external view returns (uint256);

    /// @notice Returns the seconds from a commitment to the last moment at which its fraud can be left unexecuted by anything
    ///         but idleness: outcome deadline + appeal + jury + challenge window + jury + pause of slashing. Stake must stay
    ///         for longer.
    function judgementTime() external view returns (uint256);

    /// @notice Returns the token wei of stake that must stand behind one unit in flight.
    function stakePerUnit() external view returns (uint256);

    /// @notice Returns the EIP-712 domain separator.
    function DOMAIN_SEPARATOR() external view returns (bytes32);
}
