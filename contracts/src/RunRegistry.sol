// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {SafeCast} from "@openzeppelin/contracts/utils/math/SafeCast.sol";

import {IRunRegistry} from "./interfaces/IRunRegistry.sol";
import {IStakeVault} from "./interfaces/IStakeVault.sol";

/// @title Runs: who trains what, with which rules, and every published policy
contract RunRegistry is IRunRegistry {
    using SafeCast for uint256;

    /// @dev A run in storage, ordered by how often it is read.
    struct Run {
        // slot 0: what commitBatch, postOutcomes and executeFraud read
        address orchestrator;
        uint32 fraudPpm;
        uint8 quorum;
        bool paused;
        // slot 1
        uint128 pricePerUnit;
        uint32 latestVersion;
        bool published;
        // slot 2
        address owner;
        uint8 seatCount;
        uint88 seats;
        // slot 3
        address trainer;
        bytes32 baseModelHash;
        bytes32 taskSetHash;
        bytes32 recipeHash;
        bytes32 calibrationHash;
        address[] validators;
    }

    /// @dev An account's place among a run's validators; kept when it is replaced.
    struct Seat {
        uint8 number;
        bool assigned;
        bool seated;
    }

    /// @notice Different validators that a run can have in its life: the bits of a set of signers.
    uint256 public constant MAX_SEATS = 88;

    /// @dev One million: the whole, in parts per million.
    uint256 private constant PPM = 1_000_000;

    /// @notice The vault that holds the validators' stake.
    IStakeVault public immutable vault;

    /// @inheritdoc IRunRegistry
    uint256 public immutable requiredValidatorStake;

    /// @inheritdoc IRunRegistry
    uint64 public runCount;

    mapping(uint64 runId => Run) private _runs;
    mapping(uint64 runId => mapping(address validator => Seat)) private _seats;
    mapping(uint64 runId => mapping(uint32 version => PolicyCheckpoint)) private _checkpoints;

    /// @param vault_ StakeVault, by its predicted address.
    /// @param requiredValidatorStake_ Active stake a validator must hold when it is seated, in token wei.
    constructor(IStakeVault vault_, uint256 requiredValidatorStake_) {
        vault = vault_;
        requiredValidatorStake = requiredValidatorStake_;
    }

    // --------------------------------------------------------------- create run

    /// @inheritdoc IRunRegistry
    function createRun(RunConfig calldata config) external returns (uint64 runId) {
        _checkConfig(config);
        runId = ++runCount;
        Run storage run = _runs[runId];
        run.owner = msg.sender;
        run.trainer = config.trainer;
        run.orchestrator = config.orchestrator;
        run.baseModelHash = config.baseModelHash;
        run.taskSetHash = config.taskSetHash;
        run.recipeHash = config.recipeHash;
        run.calibrationHash = config.calibrationHash;
        run.pricePerUnit = config.pricePerUnit;
        run.fraudPpm = config.fraudPpm;
        run.quorum = config.quorum;
        run.validators = config.validators;
        for (uint256 i = 0; i < config.validators.length; ++i) {
            _seat(runId, run, config.validators[i]);
        }
        emit RunCreated(runId, msg.sender, config);
    }

    function _checkConfig(RunConfig calldata config) private pure {
        require(config.trainer != address(0), RunInvalidParameter("trainer"));
        require(config.orchestrator != address(0), RunInvalidParameter("orchestrator"));
        require(config.baseModelHash != 0, RunInvalidParameter("baseModelHash"));
        require(config.taskSetHash != 0, RunInvalidParameter("taskSetHash"));
        require(config.recipeHash != 0, RunInvalidParameter("recipeHash"));
        require(config.calibrationHash != 0, RunInvalidParameter("calibrationHash"));
        require(config.pricePerUnit != 0, RunInvalidParameter("pricePerUnit"));
        require(config.fraudPpm <= PPM, RunInvalidParameter("fraudPpm"));
        require(
            config.quorum != 0 && config.quorum <= config.validators.length,
            RunInvalidQuorum(config.quorum, config.validators.length)
        );
    }

    // --------------------------------------------------------------- validators

    /// @inheritdoc IRunRegistry
    function rotateValidator(uint64 runId, address oldValidator, address newValidator) external {
        Run storage run = _ownedRun(runId);
        Seat storage old = _seats[runId][oldValidator];
        require(old.seated, RunInvalidValidator(oldValidator));
        old.seated = false;
        run.seats &= ~_bit(old.number);
        _seat(runId, run, newValidator);
        for (uint256 i = 0; i < run.validators.length; ++i) {
            if (run.validators[i] == oldValidator) run.validators[i] = newValidator;
        }
        emit ValidatorRotated(runId, oldValidator, newValidator);
    }

    /// @dev Seats a staked account: on its former seat if it had one, else on the next free one.
    function _seat(uint64 runId, Run storage run, address validator) private {
        Seat storage seat = _seats[runId][validator];
        require(validator != address(0) && !seat.seated, RunInvalidValidator(validator));
        require(vault.activeStake(validator) >= requiredValidatorStake, RunInvalidValidator(validator));
        if (!seat.assigned) {
            require(run.seatCount < MAX_SEATS, RunInvalidValidator(validator));
            seat.assigned = true;
            seat.number = run.seatCount++;
        }
        seat.seated = true;
        run.seats |= _bit(seat.number);
    }

    function _bit(uint8 number) private pure returns (uint88) {
        return uint88(1) << number;
    }

    // -------------------------------------------------------------- checkpoints

    /// @inheritdoc IRunRegistry
    function publishCheckpoint(uint64 runId, uint32 version, bytes32 manifestRoot) external {
        Run storage run = _run(runId);
        require(msg.sender == run.trainer, RunUnauthorized(runId, msg.sender));
        require(manifestRoot != 0, RunInvalidParameter("manifestRoot"));
        require(
            !run.published || version > run.latestVersion, RunVersionNotIncreasing(runId, version, run.latestVersion)
        );
        run.published = true;
        run.latestVersion = version;
        PolicyCheckpoint storage checkpoint = _checkpoints[runId][version];
        checkpoint.manifestRoot = manifestRoot;
        checkpoint.blockNumber = block.number.toUint64();
        emit CheckpointPublished(runId, version, manifestRoot);
    }

    /// @inheritdoc IRunRegistry
    function recordBeacon(uint64 runId, uint32 version) external {
        PolicyCheckpoint storage checkpoint = _checkpoints[runId][version];
        require(checkpoint.manifestRoot != 0, RunVersionUnknown(runId, version));
        if (checkpoint.beacon != 0) return;
        bytes32 beacon = blockhash(checkpoint.blockNumber);
        require(beacon != 0, RunBeaconUnavailable(runId, version, checkpoint.blockNumber));
        checkpoint.beacon = beacon;
        emit BeaconRecorded(runId, version, beacon);
    }

    // -------------------------------------------------------------------- pause

    /// @inheritdoc IRunRegistry
    function setSubmissionsPaused(uint64 runId, bool paused) external {
        _ownedRun(runId).paused = paused;
        emit SubmissionsPaused(runId, paused);
    }

    // -------------------------------------------------------------------- views

    /// @inheritdoc IRunRegistry
    function configOf(uint64 runId) external view returns (RunConfig memory) {
        Run storage run = _run(runId);
        return RunConfig({
            trainer: run.trainer,
            orchestrator: run.orchestrator,
            baseModelHash: run.baseModelHash,
            taskSetHash: run.taskSetHash,
            recipeHash: run.recipeHash,
            calibrationHash: run.calibrationHash,
            pricePerUnit: run.pricePerUnit,
            fraudPpm: run.fraudPpm,
            quorum: run.quorum,
            validators: run.validators
        });
    }

    /// @inheritdoc IRunRegistry
    function termsOf(uint64 runId)
        external
        view
        returns (address orchestrator, uint32 fraudPpm, uint8 quorum, bool paused)
    {
        Run storage run = _run(runId);
        return (run.orchestrator, run.fraudPpm, run.quorum, run.paused);
    }

    /// @inheritdoc IRunRegistry
    function priceOf(uint64 runId) external view returns (uint128 price) {
        price = _runs[runId].pricePerUnit;
        require(price != 0, RunUnknown(runId));
    }

    /// @inheritdoc IRunRegistry
    function ownerOf(uint64 runId) external view returns (address) {
        return _run(runId).owner;
    }

    /// @inheritdoc IRunRegistry
    function isPaused(uint64 runId) external view returns (bool) {
        return _run(runId).paused;
    }

    /// @inheritdoc IRunRegistry
    function isValidator(uint64 runId, address account) external view returns (bool) {
        return _seats[runId][account].seated;
    }

    /// @inheritdoc IRunRegistry
    function seatOf(uint64 runId, address account) external view returns (uint8 seat, bool seated) {
        Seat storage held = _seats[runId][account];
        return (held.number, held.seated);
    }

    /// @inheritdoc IRunRegistry
    function seatsOf(uint64 runId) external view returns (uint88) {
        return _run(runId).seats;
    }

    /// @inheritdoc IRunRegistry
    function quorumAmong(uint64 runId, address[] calldata accounts)
        external
        view
        returns (uint8 quorum, uint88 seats, address stranger)
    {
        quorum = _run(runId).quorum;
        mapping(address validator => Seat) storage runSeats = _seats[runId];
        for (uint256 i = 0; i < accounts.length; ++i) {
            Seat memory seat = runSeats[accounts[i]];
            if (!seat.seated) return (quorum, seats, accounts[i]);
            seats |= _bit(seat.number);
        }
    }

    /// @inheritdoc IRunRegistry
    function latestVersion(uint64 runId) external view returns (uint32 version, bool exists) {
        Run storage run = _run(runId);
        return (run.latestVersion, run.published);
    }

    /// @inheritdoc IRunRegistry
    function checkpointOf(uint64 runId, uint32 version) external view returns (PolicyCheckpoint memory) {
        return _checkpoints[runId][version];
    }

    function _run(uint64 runId) private view returns (Run storage run) {
        run = _runs[runId];
        require(run.orchestrator != address(0), RunUnknown(runId));
    }

    function _ownedRun(uint64 runId) private view returns (Run storage run) {
        run = _run(runId);
        require(msg.sender == run.owner, RunUnauthorized(runId, msg.sender));
    }
}
