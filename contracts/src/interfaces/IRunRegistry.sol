// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

/// @title Errors of the run registry
interface IRunRegistryErrors {
    /// @notice Thrown when a run does not exist.
    error RunUnknown(uint64 runId);
    /// @notice Thrown when a run is closed.
    error RunEnded(uint64 runId);
    /// @notice Thrown when the caller does not hold the role the call needs.
    error RunUnauthorized(uint64 runId, address caller);
    /// @notice Thrown when the quorum is zero or exceeds the number of validators.
    error RunInvalidQuorum(uint256 quorum, uint256 validators);
    /// @notice Thrown when a validator is zero, seated twice or not at all, staked below the requirement (or not
    ///         below it, when it is to be unseated for that), or finds no free seat (a run seats at most 88 different
    ///         validators in its life).
    error RunInvalidValidator(address validator);
    /// @notice Thrown when a hash, key, price or share is zero or out of its bounds.
    error RunInvalidParameter(bytes32 name);
    /// @notice Thrown when a key to be replaced is not the one named.
    error RunWrongKey(uint64 runId, address named, address held);
    /// @notice Thrown when there is no change to apply, or it is not due yet.
    error RunChangeNotDue(uint64 runId, uint256 effectiveAt);
    /// @notice Thrown when a version does not increase strictly.
    error RunVersionNotIncreasing(uint64 runId, uint32 version, uint32 latest);
    /// @notice Thrown when a version was never published.
    error RunVersionUnknown(uint64 runId, uint32 version);
    /// @notice Thrown when a beacon's block is the current one, or too old to be read.
    error RunBeaconUnavailable(uint64 runId, uint32 version, uint256 blockNumber);
    /// @notice Thrown when slashing is to be paused while it is, or before it has run for `slashCooldown` since.
    error RunPauseTooSoon(uint64 runId, uint256 notBefore);
}

/// @title Events of the run registry
interface IRunRegistryEvents {
    /// @notice Emitted when a run is created; carries everything in `RunConfig`.
    event RunCreated(uint64 indexed runId, address indexed owner, IRunRegistry.RunConfig config);
    /// @notice Emitted when a policy version is published. The beacon is this block's hash.
    event CheckpointPublished(uint64 indexed runId, uint32 indexed version, bytes32 manifestRoot);
    /// @notice Emitted when a version's beacon is stored for later use on chain.
    event BeaconRecorded(uint64 indexed runId, uint32 indexed version, bytes32 beacon);
    /// @notice Emitted when submissions are paused or resumed. Withdrawals and claims never are.
    event SubmissionsPaused(uint64 indexed runId, bool paused);
    /// @notice Emitted when somebody stops the fraud executions of a run for a while. `reason` is the check that failed,
    ///         as in outcomes; `evidenceHash` is of the document that says why.
    event SlashingPaused(
        uint64 indexed runId,
        address indexed by,
        IRunRegistry.PauseCause cause,
        uint8 reason,
        bytes32 evidenceHash,
        uint256 until
    );
    /// @notice Emitted when the owner ends a run.
    event RunClosed(uint64 indexed runId);
    /// @notice Emitted when a validator takes a seat, of which one bit stands for it in sets of signers.
    event ValidatorSeated(uint64 indexed runId, address indexed validator, uint88 seatBit);
    /// @notice Emitted when a validator loses its seat.
    event ValidatorUnseated(uint64 indexed runId, address indexed validator);
    /// @notice Emitted when the trainer's key is replaced.
    event TrainerRotated(uint64 indexed runId, address indexed oldTrainer, address indexed newTrainer);
    /// @notice Emitted when the orchestrator's key is replaced.
    event OrchestratorRotated(uint64 indexed runId, address indexed oldOrchestrator, address indexed newOrchestrator);
    /// @notice Emitted when the owner announces other terms.
    event ChangeProposed(uint64 indexed runId, IRunRegistry.Terms terms, uint256 effectiveAt);
    /// @notice Emitted when the owner withdraws its announcement.
    event ChangeCancelled(uint64 indexed runId);
    /// @notice Emitted when announced terms take effect.
    event ChangeApplied(uint64 indexed runId, IRunRegistry.Terms terms);
}

/// @title Runs: who trains what, with which rules, and every published policy
interface IRunRegistry is IRunRegistryErrors, IRunRegistryEvents {
    /// @notice What a run pays and punishes, and how many must agree. Changes only after a delay.
    struct Terms {
        /// @dev Token wei paid per unit. A change at most halves or doubles it.
        uint88 pricePerUnit;
        /// @dev Millionths of the stake slashed for a first statistical fraud; doubled for each one before.
        uint32 fraudPpm;
        /// @dev Millionths of the stake slashed for an exact fraud; at least `fraudPpm`.
        uint32 exactFraudPpm;
        /// @dev Validators that must sign an outcome (k of n).
        uint8 quorum;
    }

    /// @notice What a run is made of. Hashes pin documents that anybody may hand over.
    struct RunConfig {
        /// @dev Publishes checkpoints.
        address trainer;
        /// @dev Commits batches, signs tickets.
        address orchestrator;
        /// @dev BLAKE3 state hash of the base model's files (`state_hash` of version 0's manifest).
        bytes32 baseModelHash;
        /// @dev Content hash of the task set.
        bytes32 taskSetHash;
        /// @dev Keccak-256 of the canonical recipe.
        bytes32 recipeHash;
        /// @dev Keccak-256 of the canonical calibration.
        bytes32 calibrationHash;
        /// @dev Price, slashes, quorum.
        Terms terms;
        /// @dev The n validators.
        address[] validators;
    }

    /// @notice Why slashing pauses.
    enum PauseCause {
        /// @dev Too many independent workers failed one check.
        CorrelatedFailures,
        /// @dev A validator failed an item that it knows to be good.
        KnownGoodItem,
        /// @dev Anything else, which the evidence says.
        Other
    }

    /// @notice A published policy version.
    struct PolicyCheckpoint {
        /// @dev Keccak-256 of the canonical manifest; zero when never published.
        bytes32 manifestRoot;
        /// @dev Hash of the publishing block, once recorded.
        bytes32 beacon;
        /// @dev The publishing block.
        uint64 blockNumber;
    }

    /// @notice Creates a run owned by the caller. Run ids count from 1.
    function createRun(RunConfig calldata config) external returns (uint64 runId);

    /// @notice Publishes a policy version. Only the run's trainer; versions increase by at least one.
    function publishCheckpoint(uint64 runId, uint32 version, bytes32 manifestRoot) external;

    /// @notice Stores the hash of the block that published a version. Anyone, within 256 blocks.
    function recordBeacon(uint64 runId, uint32 version) external;

    /// @notice Pauses or resumes submissions. Only the owner.
    function setSubmissionsPaused(uint64 runId, bool paused) external;

    /// @notice Stops the fraud executions of a run for `slashPause` seconds. A seated validator, the run's orchestrator or
    ///         its owner; not while a pause lasts, nor for `slashCooldown` after it.
    /// @dev Ends by itself and cannot be renewed until `slashCooldown` after that, so that slashing is never stopped for
    ///      good; all that waits for judgement outlasts a pause. Nothing else stops: not submissions, outcomes, cases,
    ///      claims or withdrawals, nor what two signatures prove (FaultCourt). Fraud verdicts whose challenge window a
    ///      pause meets can be challenged for one window after it. A closed run's slashing can be paused, too.
    /// @param cause Why.
    /// @param reason The reason code of the check that failed, as in outcomes; zero when there is none.
    /// @param evidenceHash Keccak-256 of the document that says why; not zero.
    function pauseSlashing(uint64 runId, PauseCause cause, uint8 reason, bytes32 evidenceHash) external;

    /// @notice Ends a run for good: nothing more is committed or published. Only the owner.
    function closeRun(uint64 runId) external;

    /// @notice Seats another validator. Only the owner.
    function seatValidator(uint64 runId, address validator) external;

    /// @notice Replaces a validator, naming the old one. Only the owner.
    function rotateValidator(uint64 runId, address oldValidator, address newValidator) external;

    /// @notice Takes the seat of a validator: FaultCourt always may, anyone once its active stake is below the
    ///         requirement.
    function unseatValidator(uint64 runId, address validator) external;

    /// @notice Replaces the trainer's key, naming the old one. Only the owner.
    function rotateTrainer(uint64 runId, address oldTrainer, address newTrainer) external;

    /// @notice Replaces the orchestrator's key, naming the old one. Only the owner.
    function rotateOrchestrator(uint64 runId, address oldOrchestrator, address newOrchestrator) external;

    /// @notice Announces other terms, which anyone can apply `changeDelay` later. Only the owner.
    /// @dev A second announcement replaces the first and restarts the delay.
    function proposeChange(uint64 runId, Terms calldata terms) external;

    /// @notice Withdraws an announcement. Only the owner.
    function cancelChange(uint64 runId) external;

    /// @notice Puts announced terms into effect once they are due. Anyone.
    function applyChange(uint64 runId) external;

    /// @notice Returns a run's configuration; its validators are those seated now.
    function configOf(uint64 runId) external view returns (RunConfig memory);

    /// @notice Returns what a run pays and punishes. Reverts with RunUnknown.
    function termsOf(uint64 runId) external view returns (Terms memory);

    /// @notice Returns the millionths of stake that frauds cost: a first statistical one, and an exact one; and Unix
    ///         seconds of the end of the last pause of slashing, zero when there was none. Reverts with RunUnknown.
    function slashesOf(uint64 runId)
        external
        view
        returns (uint256 fraudPpm, uint256 exactFraudPpm, uint256 pausedUntil);

    /// @notice Returns when the challenge window of a fraud verdict closes: as without pauses, or one window after the
    ///         pause that met it.
    /// @dev What is final stays final: pauses are further apart than a window.
    /// @param closesAt Unix seconds at which it closes without pauses.
    /// @param window Seconds that it is open.
    function fraudClosesAt(uint64 runId, uint256 closesAt, uint256 window) external view returns (uint256);

    /// @notice Returns the announced terms and when they take effect; zero when none are.
    function proposedChange(uint64 runId) external view returns (Terms memory terms, uint256 effectiveAt);

    /// @notice Returns what a commitment depends on. Reverts with RunUnknown.
    /// @return orchestrator Who may commit.
    /// @return pricePerUnit Token wei per unit.
    /// @return open Whether the run takes submissions.
    function admissionOf(uint64 runId) external view returns (address orchestrator, uint88 pricePerUnit, bool open);

    /// @notice Returns a run's owner.
    function ownerOf(uint64 runId) external view returns (address);

    /// @notice Returns whether submissions are paused.
    function isPaused(uint64 runId) external view returns (bool);

    /// @notice Returns Unix seconds of the end of a run; zero while it is open.
    function closedAt(uint64 runId) external view returns (uint256);

    /// @notice Returns whether `account` validates for the run.
    function isValidator(uint64 runId, address account) external view returns (bool);

    /// @notice Returns the bit that stands for an account among the run's validators; zero when it never was one.
    /// @dev A seat stays its holder's for ever, so that a set of signers fits one bitmap and survives rotations.
    function seatBitOf(uint64 runId, address account) external view returns (uint88);

    /// @notice Returns whether an account held its seat from one time to another without a break.
    function wasSeatedThroughout(uint64 runId, address account, uint256 from, uint256 to) external view returns (bool);

    /// @notice Returns the run's validators and the bits of their seats.
    function validatorsOf(uint64 runId) external view returns (address[] memory accounts, uint88[] memory bits);

    /// @notice Returns the run's quorum and the seats of `accounts`. Reverts with RunUnknown.
    /// @return quorum Validators that must sign an outcome.
    /// @return seats The seats of those accounts that validate now.
    /// @return stranger The first account that does not, or zero.
    function quorumAmong(uint64 runId, address[] calldata accounts)
        external
        view
        returns (uint8 quorum, uint88 seats, address stranger);

    /// @notice Returns the newest published version's number, if there is one.
    function latestVersion(uint64 runId) external view returns (uint32 version, bool exists);

    /// @notice Returns a version; its root is zero when it was never published.
    function checkpointOf(uint64 runId, uint32 version) external view returns (PolicyCheckpoint memory);

    /// @notice Returns the number of runs.
    function runCount() external view returns (uint64);

    /// @notice Returns the seconds between announcing terms and their effect.
    function changeDelay() external view returns (uint256);

    /// @notice Returns the seconds that a pause of slashing lasts.
    function slashPause() external view returns (uint256);

    /// @notice Returns the seconds after a pause of slashing before which there is no other.
    function slashCooldown() external view returns (uint256);

    /// @notice Returns the active stake a validator must hold, in token wei.
    function requiredValidatorStake() external view returns (uint256);
}
