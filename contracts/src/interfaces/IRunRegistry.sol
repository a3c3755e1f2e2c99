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
    /// @notice Thrown when an account that takes a seat is not invited, is seated, works for the run or finds no free
    ///         seat (a run seats at most 88 different validators in its life); or when who gives one up has none.
    error RunInvalidValidator(uint64 runId, address validator);
    /// @notice Thrown when a validator's active stake in the run is below the requirement.
    error RunStakeTooLow(uint64 runId, address validator, uint256 active, uint256 required);
    /// @notice Thrown when an account accepts terms that are not those of the run, or not for much longer.
    error RunTermsChanged(uint64 runId, uint32 accepted, uint32 current, uint256 changesAt);
    /// @notice Thrown when a hash, key, price or share is zero or out of its bounds.
    error RunInvalidParameter(bytes32 name);
    /// @notice Thrown when a key to be replaced is not the one named.
    error RunWrongKey(uint64 runId, address named, address held);
    /// @notice Thrown when there is no change to apply, or it is not due yet.
    error RunChangeNotDue(uint64 runId, uint256 effectiveAt);
    /// @notice Thrown when a version does not increase strictly.
    error RunVersionNotIncreasing(uint64 runId, uint32 version, uint32 latest);
    /// @notice Thrown when a policy version is too far above the latest one.
    error RunVersionTooFar(uint64 runId, uint32 version, uint32 latestVersion);
    /// @notice Thrown when slashing is to be paused while it is, or before it has run for `slashCooldown` since.
    error RunPauseTooSoon(uint64 runId, uint256 notBefore);
}

/// @title Events of the run registry
interface IRunRegistryEvents {
    /// @notice Emitted when a run is created; carries everything in `RunConfig`.
    event RunCreated(uint64 indexed runId, address indexed owner, IRunRegistry.RunConfig config);
    /// @notice Emitted when a policy version is published. The beacon is this block's hash.
    event CheckpointPublished(uint64 indexed runId, uint32 indexed version, bytes32 manifestRoot);
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
    /// @notice Emitted when the owner invites an account to validate, or takes the invitation back.
    event ValidatorInvited(uint64 indexed runId, address indexed validator, bool invited);
    /// @notice Emitted when an account takes a seat under terms that it names; one bit stands for it in sets of signers.
    event ValidatorSeated(uint64 indexed runId, address indexed validator, uint88 seatBit, uint32 terms);
    /// @notice Emitted when a validator gives up or loses its seat.
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
    event ChangeApplied(uint64 indexed runId, uint32 number, IRunRegistry.Terms terms);
}

/// @title Runs: who trains what, with which rules, and every published policy
interface IRunRegistry is IRunRegistryErrors, IRunRegistryEvents {
    /// @notice What a run pays and punishes, and how many must agree. A run's terms are numbered from 1 and never change;
    ///         new ones follow after a delay. A batch is paid, judged and punished by those of its commitment.
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
        /// @dev The validators that are invited: each takes its seat itself.
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
        /// @dev The publishing block.
        uint64 blockNumber;
    }

    /// @notice Creates a run owned by the caller. Run ids count from 1.
    function createRun(RunConfig calldata config) external returns (uint64 runId);

    /// @notice Publishes a policy version. Only the run's trainer; versions increase by at least one, and at most 1024.
    function publishCheckpoint(uint64 runId, uint32 version, bytes32 manifestRoot) external;

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

    /// @notice Invites an account to validate, or takes an invitation back. Only the owner.
    function invite(uint64 runId, address validator, bool invited) external;

    /// @notice Takes the invitation of an account, and the seat if it has one. Only the owner. Its stake stays its
    ///         own, to unbond when it likes: an owner starts nobody's clock again.
    function dismiss(uint64 runId, address validator) external;

    /// @notice Takes a seat that the caller is invited to, and adds `stake` of its tokens, which StakeVault must be allowed
    ///         to take.
    /// @param terms Number of the run's terms, to which the caller agrees. Terms that are about to change are refused.
    function takeSeat(uint64 runId, uint32 terms, uint256 stake) external;

    /// @notice Gives up the caller's seat and unbonds all its stake in the run.
    function leaveSeat(uint64 runId) external;

    /// @notice Takes the seat of a validator that contradicted itself. Only FaultCourt may call.
    function unseatForFault(uint64 runId, address validator) external;

    /// @notice Takes the seat of a validator whose active stake is below the requirement; does nothing for anybody else.
    function unseatForLowStake(uint64 runId, address validator) external;

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

    /// @notice Returns the run's present terms and their number. Reverts with RunUnknown.
    function termsOf(uint64 runId) external view returns (Terms memory terms, uint32 number);

    /// @notice Returns terms by their number; zero when there are none.
    function termsAt(uint64 runId, uint32 number) external view returns (Terms memory);

    /// @notice Reverts unless the run is open and `number` is of its terms, to which no change is announced.
    function requireTerms(uint64 runId, uint32 number) external view;

    /// @notice Returns Unix seconds of the end of the last pause of slashing, zero when there was none.
    function slashPausedUntil(uint64 runId) external view returns (uint256);

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
    /// @return open Whether the run takes submissions.
    /// @return terms Number of its terms.
    /// @return pricePerUnit Token wei per unit.
    function admissionOf(uint64 runId)
        external
        view
        returns (address orchestrator, bool open, uint32 terms, uint88 pricePerUnit);

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

    /// @notice Returns whether the run's owner invited an account.
    function isInvited(uint64 runId, address account) external view returns (bool);

    /// @notice Returns all accounts that took a seat of the run at or before `time`, also those that left since.
    function everSeated(uint64 runId, uint256 time) external view returns (address[] memory);

    /// @notice Returns the run's validators and the bits of their seats.
    function validatorsOf(uint64 runId) external view returns (address[] memory accounts, uint88[] memory bits);

    /// @notice Returns the quorum of a run's terms and the seats of `accounts`. Reverts with RunUnknown.
    /// @return quorum Validators that must sign an outcome.
    /// @return seats The seats of those accounts that validate now.
    /// @return stranger The first account that does not, or zero.
    function quorumAmong(uint64 runId, uint32 terms, address[] calldata accounts)
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

    /// @notice Returns the active stake a validator must hold in the run, in token wei.
    function requiredValidatorStake() external view returns (uint256);
}
