// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {SafeCast} from "@openzeppelin/contracts/utils/math/SafeCast.sol";

import {IRunRegistry} from "./interfaces/IRunRegistry.sol";
import {IStakeVault} from "./interfaces/IStakeVault.sol";
import {IWorkerRegistry} from "./interfaces/IWorkerRegistry.sol";

/// @title Runs: who trains what, with which rules, and every published policy
contract RunRegistry is IRunRegistry {
    using SafeCast for uint256;

    /// @dev A run in storage, ordered by how often it is read.
    struct Run {
        // slot 0: what commitBatch reads, but for the price
        address orchestrator;
        bool open;
        uint32 termsCount;
        uint40 slashPausedUntil;
        uint8 seatCount;
        // slot 1
        address owner;
        uint40 closedAt;
        bool paused;
        bool published;
        uint32 latestVersion;
        // slot 2
        address trainer;
        bytes32 baseModelHash;
        bytes32 taskSetHash;
        bytes32 recipeHash;
        bytes32 calibrationHash;
        address[] validators;
        address[] everSeated;
        // two slots: the announced change
        Terms proposed;
        uint64 effectiveAt;
    }

    /// @dev An account's place among a run's validators; kept when it goes.
    struct Seat {
        uint88 bit;
        bool seated;
        bool invited;
        // Unix seconds at which it first took its seat.
        uint40 since;
    }

    /// @notice Different validators that a run can have in its life: the bits of a set of signers.
    uint256 public constant MAX_SEATS = 88;

    /// @notice Most that a policy version can be above the latest one, or above 0. So a stolen trainer key needs four
    ///         million publications to use up all numbers, above which nobody could publish any more.
    uint256 public constant MAX_VERSION_STEP = 1024;

    /// @dev One million: the whole, in parts per million.
    uint256 private constant PPM = 1_000_000;

    /// @notice The vault that holds the validators' stake.
    IStakeVault public immutable vault;

    /// @notice The workers, none of whom judges the run that it works for.
    IWorkerRegistry public immutable workers;

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
    mapping(uint64 runId => mapping(uint32 number => Terms)) private _terms;
    mapping(uint64 runId => mapping(address validator => Seat)) private _seats;
    mapping(uint64 runId => mapping(uint32 version => PolicyCheckpoint)) private _checkpoints;

    /// @param vault_ StakeVault, by its predicted address.
    /// @param workers_ WorkerRegistry.
    /// @param faults_ FaultCourt, by its predicted address.
    /// @param requiredValidatorStake_ Active stake a validator must hold in the run, in token wei.
    /// @param changeDelay_ Seconds between announcing terms and their effect.
    /// @param slashPause_ Seconds that a pause of slashing lasts.
    /// @param slashCooldown_ Seconds after a pause before which there is no other; at least the challenge window, which
    ///        ContributionLedger checks.
    constructor(
        IStakeVault vault_,
        IWorkerRegistry workers_,
        address faults_,
        uint256 requiredValidatorStake_,
        uint256 changeDelay_,
        uint256 slashPause_,
        uint256 slashCooldown_
    ) {
        vault = vault_;
        workers = workers_;
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
        run.termsCount = 1;
        _terms[runId][1] = config.terms;
        emit RunCreated(runId, msg.sender, config);
        for (uint256 i = 0; i < config.validators.length; ++i) {
            _invite(runId, config.validators[i], true);
        }
    }

    function _checkConfig(RunConfig calldata config) private pure {
        require(config.trainer != address(0), RunInvalidParameter("trainer"));
        require(config.orchestrator != address(0), RunInvalidParameter("orchestrator"));
        require(config.baseModelHash != 0, RunInvalidParameter("baseModelHash"));
        require(config.taskSetHash != 0, RunInvalidParameter("taskSetHash"));
        require(config.recipeHash != 0, RunInvalidParameter("recipeHash"));
        require(config.calibrationHash != 0, RunInvalidParameter("calibrationHash"));
        _checkTerms(config.terms);
    }

    function _checkTerms(Terms memory terms) private pure {
        require(terms.pricePerUnit != 0, RunInvalidParameter("pricePerUnit"));
        require(terms.fraudPpm <= terms.exactFraudPpm, RunInvalidParameter("fraudPpm"));
        require(terms.exactFraudPpm <= PPM, RunInvalidParameter("exactFraudPpm"));
        require(terms.quorum != 0 && terms.quorum <= MAX_SEATS, RunInvalidQuorum(terms.quorum, MAX_SEATS));
    }

    // --------------------------------------------------------------- validators

    /// @inheritdoc IRunRegistry
    function invite(uint64 runId, address validator, bool invited) external {
        _ownedRun(runId);
        _invite(runId, validator, invited);
    }

    function _invite(uint64 runId, address validator, bool invited) private {
        require(validator != address(0), RunInvalidValidator(runId, validator));
        _seats[runId][validator].invited = invited;
        emit ValidatorInvited(runId, validator, invited);
    }

    /// @inheritdoc IRunRegistry
    function dismiss(uint64 runId, address validator) external {
        Run storage run = _ownedRun(runId);
        Seat storage seat = _seats[runId][validator];
        // Who leaves its seat first does not keep its invitation.
        require(seat.invited || seat.seated, RunInvalidValidator(runId, validator));
        _invite(runId, validator, false);
        if (seat.seated) _unseat(runId, run, validator);
    }

    /// @inheritdoc IRunRegistry
    function takeSeat(uint64 runId, uint32 terms, uint256 stake) external {
        requireTerms(runId, terms);
        Run storage run = _runs[runId];
        Seat storage seat = _seats[runId][msg.sender];
        require(
            seat.invited && !seat.seated && workers.statusOf(runId, msg.sender) == IWorkerRegistry.Status.None,
            RunInvalidValidator(runId, msg.sender)
        );
        if (seat.bit == 0) {
            require(run.seatCount < MAX_SEATS, RunInvalidValidator(runId, msg.sender));
            seat.bit = uint88(1) << run.seatCount++;
            seat.since = block.timestamp.toUint40();
            run.everSeated.push(msg.sender);
        }
        seat.seated = true;
        run.validators.push(msg.sender);
        emit ValidatorSeated(runId, msg.sender, seat.bit, terms);
        if (stake != 0) vault.depositFrom(runId, msg.sender, stake);
        uint256 active = vault.activeStake(runId, msg.sender);
        require(active >= requiredValidatorStake, RunStakeTooLow(runId, msg.sender, active, requiredValidatorStake));
    }

    /// @inheritdoc IRunRegistry
    function leaveSeat(uint64 runId) external {
        _unseat(runId, _run(runId), msg.sender);
        vault.requestUnbondFor(runId, msg.sender);
    }

    /// @inheritdoc IRunRegistry
    function unseatForFault(uint64 runId, address validator) external {
        require(msg.sender == faults, RunUnauthorized(runId, msg.sender));
        _seats[runId][validator].invited = false;
        if (_seats[runId][validator].seated) _unseat(runId, _runs[runId], validator);
    }

    /// @inheritdoc IRunRegistry
    function unseatForLowStake(uint64 runId, address validator) external {
        if (!_seats[runId][validator].seated || vault.activeStake(runId, validator) >= requiredValidatorStake) return;
        _unseat(runId, _runs[runId], validator);
    }

    function _unseat(uint64 runId, Run storage run, address validator) private {
        Seat storage seat = _seats[runId][validator];
        require(seat.seated, RunInvalidValidator(runId, validator));
        seat.seated = false;
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
        _checkTerms(terms);
        uint256 price = _terms[runId][run.termsCount].pricePerUnit;
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
        uint32 number = ++run.termsCount;
        _terms[runId][number] = terms;
        _forgetChange(run);
        emit ChangeApplied(runId, number, terms);
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
        require(
            version <= uint256(run.latestVersion) + MAX_VERSION_STEP,
            RunVersionTooFar(runId, version, run.latestVersion)
        );
        run.published = true;
        run.latestVersion = version;
        PolicyCheckpoint storage checkpoint = _checkpoints[runId][version];
        checkpoint.manifestRoot = manifestRoot;
        checkpoint.blockNumber = block.number.toUint64();
        emit CheckpointPublished(runId, version, manifestRoot);
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
            terms: _terms[runId][run.termsCount],
            validators: run.validators
        });
    }

    /// @inheritdoc IRunRegistry
    function termsOf(uint64 runId) external view returns (Terms memory terms, uint32 number) {
        number = _run(runId).termsCount;
        return (_terms[runId][number], number);
    }

    /// @inheritdoc IRunRegistry
    function termsAt(uint64 runId, uint32 number) external view returns (Terms memory) {
        return _terms[runId][number];
    }

    /// @inheritdoc IRunRegistry
    function requireTerms(uint64 runId, uint32 number) public view {
        Run storage run = _run(runId);
        require(run.closedAt == 0, RunEnded(runId));
        require(
            number == run.termsCount && run.effectiveAt == 0,
            RunTermsChanged(runId, number, run.termsCount, run.effectiveAt)
        );
    }

    /// @inheritdoc IRunRegistry
    function slashPausedUntil(uint64 runId) external view returns (uint256) {
        return _runs[runId].slashPausedUntil;
    }

    /// @inheritdoc IRunRegistry
    function fraudClosesAt(uint64 runId, uint256 closesAt, uint256 window) external view returns (uint256) {
        uint256 until = _runs[runId].slashPausedUntil;
        // The pause met the window: it ended after the window opened, and began before the window closed.
        bool met = until + window > closesAt && closesAt + slashPause > until;
        return met ? until + window : closesAt;
    }

    /// @inheritdoc IRunRegistry
    function proposedChange(uint64 runId) external view returns (Terms memory terms, uint256 effectiveAt) {
        Run storage run = _run(runId);
        return (run.proposed, run.effectiveAt);
    }

    /// @inheritdoc IRunRegistry
    function admissionOf(uint64 runId)
        external
        view
        returns (address orchestrator, bool open, uint32 terms, uint88 pricePerUnit)
    {
        Run storage run = _run(runId);
        terms = run.termsCount;
        return (run.orchestrator, run.open, terms, _terms[runId][terms].pricePerUnit);
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
    function isInvited(uint64 runId, address account) external view returns (bool) {
        return _seats[runId][account].invited;
    }

    /// @inheritdoc IRunRegistry
    function everSeated(uint64 runId, uint256 time) external view returns (address[] memory accounts) {
        address[] storage all = _runs[runId].everSeated;
        uint256 count = all.length;
        // In the order in which they came.
        while (count != 0 && _seats[runId][all[count - 1]].since > time) --count;
        accounts = new address[](count);
        for (uint256 i = 0; i < count; ++i) {
            accounts[i] = all[i];
        }
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
    function quorumAmong(uint64 runId, uint32 terms, address[] calldata accounts)
        external
        view
        returns (uint8 quorum, uint88 seats, address stranger)
    {
        quorum = _terms[runId][terms].quorum;
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
