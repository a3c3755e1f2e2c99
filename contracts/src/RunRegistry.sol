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
        // slot 0: what commitBatch reads
        address orchestrator;
        uint88 pricePerUnit;
        bool open;
        // slot 1: what postOutcomes and executeFraud read
        uint32 fraudPpm;
        uint32 exactFraudPpm;
        uint8 quorum;
        uint8 seatCount;
        uint32 latestVersion;
        bool published;
        bool paused;
        uint40 closedAt;
        uint40 slashPausedUntil;
        // slot 2
        address owner;
        // slot 3
        address trainer;
        bytes32 baseModelHash;
        bytes32 taskSetHash;
        bytes32 recipeHash;
        bytes32 calibrationHash;
        address[] validators;
        // two slots: the announced change
        Terms proposed;
        uint64 effectiveAt;
    }

    /// @dev An account's place among a run's validators; kept when it is replaced.
    struct Seat {
        uint88 bit;
        bool seated;
        // Unix seconds of the last change either way.
        uint40 seatedAt;
        uint40 unseatedAt;
    }

    /// @notice Different validators that a run can have in its life: the bits of a set of signers.
    uint256 public constant MAX_SEATS = 88;

    /// @dev One million: the whole, in parts per million.
    uint256 private constant PPM = 1_000_000;

    /// @notice The vault that holds the validators' stake.
    IStakeVault public immutable vault;

    /// @notice The fault court, which unseats validators that contradict themselves.
    address public immutable faults;

    /// @inheritdoc IRunRegistry
    uint256 public immutable requiredValidatorStake;

    /// @inheritdoc IRunRegistry
    uint256 public immutable changeDelay;

    /// @inheritdoc IRunRegistry
    uint256 public immutable slashPause;

    /// @inheritdoc IRunRegistry
    uint256 public immutable slashCooldown;

    /// @inheritdoc IRunRegistry
    uint64 public runCount;

    mapping(uint64 runId => Run) private _runs;
    mapping(uint64 runId => mapping(address validator => Seat)) private _seats;
    mapping(uint64 runId => mapping(uint32 version => PolicyCheckpoint)) private _checkpoints;

    /// @param vault_ StakeVault, by its predicted address.
    /// @param faults_ FaultCourt, by its predicted address.
    /// @param requiredValidatorStake_ Active stake a validator must hold, in token wei.
    /// @param changeDelay_ Seconds between announcing terms and their effect.
    /// @param slashPause_ Seconds that a pause of slashing lasts.
    /// @param slashCooldown_ Seconds after a pause before which there is no other; at least the challenge window, which
    ///        ContributionLedger checks.
    constructor(
        IStakeVault vault_,
        address faults_,
        uint256 requiredValidatorStake_,
        uint256 changeDelay_,
        uint256 slashPause_,
        uint256 slashCooldown_
    ) {
        vault = vault_;
        faults = faults_;
        requiredValidatorStake = requiredValidatorStake_;
        changeDelay = changeDelay_;
        slashPause = slashPause_;
        slashCooldown = slashCooldown_;
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
        run.open = true;
        _setTerms(run, config.terms);
        emit RunCreated(runId, msg.sender, config);
        for (uint256 i = 0; i < config.validators.length; ++i) {
            _seat(runId, run, config.validators[i]);
        }
    }

    function _checkConfig(RunConfig calldata config) private pure {
        require(config.trainer != address(0), RunInvalidParameter("trainer"));
        require(config.orchestrator != address(0), RunInvalidParameter("orchestrator"));
        require(config.baseModelHash != 0, RunInvalidParameter("baseModelHash"));
        require(config.taskSetHash != 0, RunInvalidParameter("taskSetHash"));
        require(config.recipeHash != 0, RunInvalidParameter("recipeHash"));
        require(config.calibrationHash != 0, RunInvalidParameter("calibrationHash"));
        _checkTerms(config.terms, config.validators.length);
    }

    function _checkTerms(Terms memory terms, uint256 validators) private pure {
        require(terms.pricePerUnit != 0, RunInvalidParameter("pricePerUnit"));
        require(terms.fraudPpm <= terms.exactFraudPpm, RunInvalidParameter("fraudPpm"));
        require(terms.exactFraudPpm <= PPM, RunInvalidParameter("exactFraudPpm"));
        require(terms.quorum != 0 && terms.quorum <= validators, RunInvalidQuorum(terms.quorum, validators));
    }

    function _setTerms(Run storage run, Terms memory terms) private {
        run.pricePerUnit = terms.pricePerUnit;
        run.fraudPpm = terms.fraudPpm;
        run.exactFraudPpm = terms.exactFraudPpm;
        run.quorum = terms.quorum;
    }

    // --------------------------------------------------------------- validators

    /// @inheritdoc IRunRegistry
    function seatValidator(uint64 runId, address validator) external {
        _seat(runId, _ownedRun(runId), validator);
    }

    /// @inheritdoc IRunRegistry
    function rotateValidator(uint64 runId, address oldValidator, address newValidator) external {
        Run storage run = _ownedRun(runId);
        _unseat(runId, run, oldValidator);
        _seat(runId, run, newValidator);
    }

    /// @inheritdoc IRunRegistry
    function unseatValidator(uint64 runId, address validator) external {
        require(
            msg.sender == faults || vault.activeStake(validator) < requiredValidatorStake,
            RunInvalidValidator(validator)
        );
        _unseat(runId, _run(runId), validator);
    }

    /// @dev Seats a staked account: on its former seat if it had one, else on the next free one.
    function _seat(uint64 runId, Run storage run, address validator) private {
        Seat storage seat = _seats[runId][validator];
        require(
            validator != address(0) && !seat.seated && vault.activeStake(validator) >= requiredValidatorStake,
            RunInvalidValidator(validator)
        );
        if (seat.bit == 0) {
            require(run.seatCount < MAX_SEATS, RunInvalidValidator(validator));
            seat.bit = uint88(1) << run.seatCount++;
        }
        seat.seated = true;
        seat.seatedAt = block.timestamp.toUint40();
        run.validators.push(validator);
        emit ValidatorSeated(runId, validator, seat.bit);
    }

    function _unseat(uint64 runId, Run storage run, address validator) private {
        Seat storage seat = _seats[runId][validator];
        require(seat.seated, RunInvalidValidator(validator));
        seat.seated = false;
        seat.unseatedAt = block.timestamp.toUint40();
        address[] storage validators = run.validators;
        uint256 last = validators.length - 1;
        for (uint256 i = 0; i < last; ++i) {
            if (validators[i] == validator) validators[i] = validators[last];
        }
        validators.pop();
        emit ValidatorUnseated(runId, validator);
    }

    // --------------------------------------------------------------------- keys

    /// @inheritdoc IRunRegistry
    function rotateTrainer(uint64 runId, address oldTrainer, address newTrainer) external {
        Run storage run = _ownedRun(runId);
        require(oldTrainer == run.trainer, RunWrongKey(runId, oldTrainer, run.trainer));
        require(newTrainer != address(0), RunInvalidParameter("trainer"));
        run.trainer = newTrainer;
        emit TrainerRotated(runId, oldTrainer, newTrainer);
    }

    /// @inheritdoc IRunRegistry
    function rotateOrchestrator(uint64 runId, address oldOrchestrator, address newOrchestrator) external {
        Run storage run = _ownedRun(runId);
        require(oldOrchestrator == run.orchestrator, RunWrongKey(runId, oldOrchestrator, run.orchestrator));
        require(newOrchestrator != address(0), RunInvalidParameter("orchestrator"));
        run.orchestrator = newOrchestrator;
        emit OrchestratorRotated(runId, oldOrchestrator, newOrchestrator);
    }

    // ------------------------------------------------------------------- change

    /// @inheritdoc IRunRegistry
    function proposeChange(uint64 runId, Terms calldata terms) external {
        Run storage run = _ownedRun(runId);
        _checkTerms(terms, run.validators.length);
        uint256 price = run.pricePerUnit;
        require(terms.pricePerUnit >= price / 2 && terms.pricePerUnit <= price * 2, RunInvalidParameter("pricePerUnit"));
        uint256 effectiveAt = block.timestamp + changeDelay;
        run.proposed = terms;
        run.effectiveAt = effectiveAt.toUint64();
        emit ChangeProposed(runId, terms, effectiveAt);
    }

    /// @inheritdoc IRunRegistry
    function cancelChange(uint64 runId) external {
        Run storage run = _ownedRun(runId);
        require(run.effectiveAt != 0, RunChangeNotDue(runId, 0));
        _forgetChange(run);
        emit ChangeCancelled(runId);
    }

    /// @inheritdoc IRunRegistry
    function applyChange(uint64 runId) external {
        Run storage run = _run(runId);
        uint256 effectiveAt = run.effectiveAt;
        require(effectiveAt != 0 && block.timestamp >= effectiveAt, RunChangeNotDue(runId, effectiveAt));
        Terms memory terms = run.proposed;
        // Validators may have gone since the announcement.
        require(terms.quorum <= run.validators.length, RunInvalidQuorum(terms.quorum, run.validators.length));
        _setTerms(run, terms);
        _forgetChange(run);
        emit ChangeApplied(runId, terms);
    }

    function _forgetChange(Run storage run) private {
        delete run.proposed;
        run.effectiveAt = 0;
    }

    // -------------------------------------------------------------- checkpoints

    /// @inheritdoc IRunRegistry
    function publishCheckpoint(uint64 runId, uint32 version, bytes32 manifestRoot) external {
        Run storage run = _run(runId);
        require(msg.sender == run.trainer, RunUnauthorized(runId, msg.sender));
        require(run.closedAt == 0, RunEnded(runId));
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

    // ------------------------------------------------------------- pause, close

    /// @inheritdoc IRunRegistry
    function setSubmissionsPaused(uint64 runId, bool paused) external {
        Run storage run = _ownedRun(runId);
        run.paused = paused;
        run.open = !paused;
        emit SubmissionsPaused(runId, paused);
    }

    /// @inheritdoc IRunRegistry
    function pauseSlashing(uint64 runId, PauseCause cause, uint8 reason, bytes32 evidenceHash) external {
        Run storage run = _run(runId);
        require(
            msg.sender == run.owner || msg.sender == run.orchestrator || _seats[runId][msg.sender].seated,
            RunUnauthorized(runId, msg.sender)
        );
        require(evidenceHash != 0, RunInvalidParameter("evidenceHash"));
        uint256 last = run.slashPausedUntil;
        require(last == 0 || block.timestamp >= last + slashCooldown, RunPauseTooSoon(runId, last + slashCooldown));
        uint256 until = block.timestamp + slashPause;
        run.slashPausedUntil = until.toUint40();
        emit SlashingPaused(runId, msg.sender, cause, reason, evidenceHash, until);
    }

    /// @inheritdoc IRunRegistry
    function closeRun(uint64 runId) external {
        Run storage run = _ownedRun(runId);
        run.closedAt = block.timestamp.toUint40();
        run.open = false;
        emit RunClosed(runId);
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
            terms: _termsOf(run),
            validators: run.validators
        });
    }

    /// @inheritdoc IRunRegistry
    function termsOf(uint64 runId) external view returns (Terms memory) {
        return _termsOf(_run(runId));
    }

    /// @inheritdoc IRunRegistry
    function slashesOf(uint64 runId)
        external
        view
        returns (uint256 fraudPpm, uint256 exactFraudPpm, uint256 pausedUntil)
    {
        Run storage run = _runs[runId];
        require(run.quorum != 0, RunUnknown(runId));
        return (run.fraudPpm, run.exactFraudPpm, run.slashPausedUntil);
    }

    /// @inheritdoc IRunRegistry
    function fraudClosesAt(uint64 runId, uint256 closesAt, uint256 window) external view returns (uint256) {
        uint256 until = _runs[runId].slashPausedUntil;
        // The pause met the window: it ended after the window opened, and began before the window closed.
        bool met = until + window > closesAt && closesAt + slashPause > until;
        return met ? until + window : closesAt;
    }

    function _termsOf(Run storage run) private view returns (Terms memory) {
        return Terms({
            pricePerUnit: run.pricePerUnit, fraudPpm: run.fraudPpm, exactFraudPpm: run.exactFraudPpm, quorum: run.quorum
        });
    }

    /// @inheritdoc IRunRegistry
    function proposedChange(uint64 runId) external view returns (Terms memory terms, uint256 effectiveAt) {
        Run storage run = _run(runId);
        return (run.proposed, run.effectiveAt);
    }

    /// @inheritdoc IRunRegistry
    function admissionOf(uint64 runId) external view returns (address orchestrator, uint88 pricePerUnit, bool open) {
        Run storage run = _run(runId);
        return (run.orchestrator, run.pricePerUnit, run.open);
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
    function closedAt(uint64 runId) external view returns (uint256) {
        return _run(runId).closedAt;
    }

    /// @inheritdoc IRunRegistry
    function isValidator(uint64 runId, address account) external view returns (bool) {
        return _seats[runId][account].seated;
    }

    /// @inheritdoc IRunRegistry
    function seatBitOf(uint64 runId, address account) external view returns (uint88) {
        return _seats[runId][account].bit;
    }

    /// @inheritdoc IRunRegistry
    function wasSeatedThroughout(uint64 runId, address account, uint256 from, uint256 to) external view returns (bool) {
        Seat storage seat = _seats[runId][account];
        return seat.bit != 0 && seat.seatedAt <= from && (seat.seated || seat.unseatedAt >= to);
    }

    /// @inheritdoc IRunRegistry
    function validatorsOf(uint64 runId) external view returns (address[] memory accounts, uint88[] memory bits) {
        accounts = _run(runId).validators;
        bits = new uint88[](accounts.length);
        for (uint256 i = 0; i < accounts.length; ++i) {
            bits[i] = _seats[runId][accounts[i]].bit;
        }
    }

    /// @inheritdoc IRunRegistry
    function quorumAmong(uint64 runId, address[] calldata accounts)
        external
        view
        returns (uint8 quorum, uint88 seats, address stranger)
    {
        quorum = _runs[runId].quorum;
        require(quorum != 0, RunUnknown(runId));
        mapping(address validator => Seat) storage runSeats = _seats[runId];
        for (uint256 i = 0; i < accounts.length; ++i) {
            Seat memory seat = runSeats[accounts[i]];
            if (!seat.seated) return (quorum, seats, accounts[i]);
            seats |= seat.bit;
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

    /// @dev Returns an open run of the caller's.
    function _ownedRun(uint64 runId) private view returns (Run storage run) {
        run = _run(runId);
        require(msg.sender == run.owner, RunUnauthorized(runId, msg.sender));
        require(run.closedAt == 0, RunEnded(runId));
    }
}
