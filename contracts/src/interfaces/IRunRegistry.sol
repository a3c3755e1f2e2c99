// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

/// @title Errors of the run registry
interface IRunRegistryErrors {
    /// @notice Thrown when a run does not exist.
    error RunUnknown(uint64 runId);
    /// @notice Thrown when the caller does not hold the role the call needs.
    error RunUnauthorized(uint64 runId, address caller);
    /// @notice Thrown when the quorum is zero or exceeds the number of validators.
    error RunInvalidQuorum(uint256 quorum, uint256 validators);
    /// @notice Thrown when a validator is zero, seated twice or not at all, staked below the requirement, or finds
    ///         no free seat (a run seats at most 88 different validators in its life).
    error RunInvalidValidator(address validator);
    /// @notice Thrown when a hash, key or price that must be set is zero, or ppm exceeds one million.
    error RunInvalidParameter(bytes32 name);
    /// @notice Thrown when a version does not increase strictly.
    error RunVersionNotIncreasing(uint64 runId, uint32 version, uint32 latest);
    /// @notice Thrown when a version was never published.
    error RunVersionUnknown(uint64 runId, uint32 version);
    /// @notice Thrown when a beacon's block is the current one, or too old to be read.
    error RunBeaconUnavailable(uint64 runId, uint32 version, uint256 blockNumber);
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
    /// @notice Emitted when one validator replaces another.
    event ValidatorRotated(uint64 indexed runId, address indexed oldValidator, address indexed newValidator);
}

/// @title Runs: who trains what, with which rules, and every published policy
interface IRunRegistry is IRunRegistryErrors, IRunRegistryEvents {
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
        /// @dev Token wei paid per unit.
        uint128 pricePerUnit;
        /// @dev Millionths of the stake slashed for a fraud verdict.
        uint32 fraudPpm;
        /// @dev Validators that must sign an outcome (k of n).
        uint8 quorum;
        /// @dev The n validators.
        address[] validators;
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

    /// @notice Replaces a validator, naming the old one. Only the owner.
    function rotateValidator(uint64 runId, address oldValidator, address newValidator) external;

    /// @notice Returns a run's configuration.
    function configOf(uint64 runId) external view returns (RunConfig memory);

    /// @notice Returns a run's owner.
    function ownerOf(uint64 runId) external view returns (address);

    /// @notice Returns whether submissions are paused.
    function isPaused(uint64 runId) external view returns (bool);

    /// @notice Returns whether `account` validates for the run.
    function isValidator(uint64 runId, address account) external view returns (bool);

    /// @notice Returns the newest published version's number and whether there is one.
    function latestVersion(uint64 runId) external view returns (uint32 version, bool exists);

    /// @notice Returns a published version.
    function checkpointOf(uint64 runId, uint32 version) external view returns (PolicyCheckpoint memory);

    /// @notice Returns the number of runs.
    function runCount() external view returns (uint64);

    /// @notice Returns what the other contracts ask of a run most often. Reverts with RunUnknown.
    /// @return orchestrator The account that commits batches.
    /// @return fraudPpm Millionths of the stake slashed for a fraud verdict.
    /// @return quorum Validators that must sign an outcome.
    /// @return paused Whether submissions are paused.
    function termsOf(uint64 runId)
        external
        view
        returns (address orchestrator, uint32 fraudPpm, uint8 quorum, bool paused);

    /// @notice Returns the token wei paid per unit. Reverts with RunUnknown.
    function priceOf(uint64 runId) external view returns (uint128);

    /// @notice Returns an account's seat among the run's validators and whether it validates now.
    /// @dev A seat stays its holder's for ever, so that a set of signers fits one bitmap and survives rotations.
    ///      An account that was never a validator has seat 0 and is not seated.
    function seatOf(uint64 runId, address account) external view returns (uint8 seat, bool seated);

    /// @notice Returns the seats of the run's current validators: bit *i* stands for seat *i*.
    function seatsOf(uint64 runId) external view returns (uint88);

    /// @notice Returns the run's quorum and the seats of `accounts`. Reverts with RunUnknown.
    /// @return quorum Validators that must sign an outcome.
    /// @return seats The seats of those accounts that validate now.
    /// @return stranger The first account that does not, or zero.
    function quorumAmong(uint64 runId, address[] calldata accounts)
        external
        view
        returns (uint8 quorum, uint88 seats, address stranger);

    /// @notice Returns the active stake a validator must hold, in token wei.
    function requiredValidatorStake() external view returns (uint256);
}
