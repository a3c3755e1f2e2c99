// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {ECDSA} from "@openzeppelin/contracts/utils/cryptography/ECDSA.sol";
import {EIP712} from "@openzeppelin/contracts/utils/cryptography/EIP712.sol";
import {SafeCast} from "@openzeppelin/contracts/utils/math/SafeCast.sol";

import {IMusterToken} from "./interfaces/IMusterToken.sol";
import {IStakeVault} from "./interfaces/IStakeVault.sol";
import {IWorkerRegistry} from "./interfaces/IWorkerRegistry.sol";

/// @title Who may work, and with which key
contract WorkerRegistry is IWorkerRegistry, EIP712 {
    using SafeCast for uint256;

    /// @dev A worker in storage. Everything that decides whether it may submit is in slot 0.
    struct StoredWorker {
        // slot 0
        address node;
        uint32 workerId;
        Status status;
        uint40 activeFrom;
        // slot 1: never zero after registration, so that a conviction does not pay for a new slot
        uint32 nonce;
        // Fraud verdicts that stand, and how many of them are exact.
        uint32 convictions;
        uint32 exactConvictions;
        uint64 jailedUntil;
        // The status at the first of the convictions that stand.
        Status statusBefore;
    }

    bytes32 private constant NODE_REGISTRATION_TYPEHASH =
        keccak256("NodeRegistration(address worker,address node,uint256 nonce,uint256 deadline)");

    /// @notice The token staked.
    IMusterToken public immutable token;

    /// @notice The vault that holds the stake.
    IStakeVault public immutable vault;

    /// @notice The ledger, which may convict.
    address public immutable ledger;

    /// @notice The court, which may acquit.
    address public immutable court;

    /// @notice The court of faults that prove themselves, which may jail and convict.
    address public immutable faults;

    /// @inheritdoc IWorkerRegistry
    uint256 public immutable requiredStake;

    /// @notice Blocks from registration or unjailing until a worker counts as active.
    uint256 public immutable activationDelay;

    /// @notice Seconds a jailed worker must wait.
    uint256 public immutable jailTime;

    mapping(address worker => StoredWorker) private _workers;
    mapping(address node => address worker) private _boundTo;
    mapping(uint32 workerId => address worker) private _byId;
    uint32 private _count;

    /// @param vault_ StakeVault, by its predicted address.
    /// @param ledger_ ContributionLedger, by its predicted address.
    /// @param court_ DisputeCourt, by its predicted address.
    /// @param faults_ FaultCourt, by its predicted address.
    /// @param requiredStake_ Active stake a worker must hold, in token wei.
    /// @param activationDelay_ Blocks until a new worker counts as active.
    /// @param jailTime_ Seconds a jailed worker must wait.
    constructor(
        IMusterToken token_,
        IStakeVault vault_,
        address ledger_,
        address court_,
        address faults_,
        uint256 requiredStake_,
        uint256 activationDelay_,
        uint256 jailTime_
    ) EIP712("Muster", "1") {
        token = token_;
        vault = vault_;
        ledger = ledger_;
        court = court_;
        faults = faults_;
        requiredStake = requiredStake_;
        activationDelay = activationDelay_;
        jailTime = jailTime_;
    }

    // ----------------------------------------------------------------- register

    /// @inheritdoc IWorkerRegistry
    function register(uint256 stake, address node, uint256 nodeDeadline, bytes calldata nodeSignature) external {
        _register(stake, node, nodeDeadline, nodeSignature);
    }

    /// @inheritdoc IWorkerRegistry
    function registerWithPermit(
        uint256 stake,
        address node,
        uint256 nodeDeadline,
        bytes calldata nodeSignature,
        uint256 permitDeadline,
        uint8 v,
        bytes32 r,
        bytes32 s
    ) external {
        // A permit that somebody else already used has done its work: the deposit decides.
        try token.permit(msg.sender, address(vault), stake, permitDeadline, v, r, s) {} catch {}
        _register(stake, node, nodeDeadline, nodeSignature);
    }

    function _register(uint256 stake, address node, uint256 nodeDeadline, bytes calldata nodeSignature) private {
        StoredWorker storage worker = _workers[msg.sender];
        require(worker.status == Status.None, RegistryWorkerExists(msg.sender));
        _bindNode(worker, node, nodeDeadline, nodeSignature);
        uint32 workerId = ++_count;
        uint256 activeFrom = block.number + activationDelay;
        worker.workerId = workerId;
        worker.status = Status.Active;
        worker.activeFrom = activeFrom.toUint40();
        _byId[workerId] = msg.sender;
        emit WorkerRegistered(msg.sender, node, workerId, activeFrom);
        if (stake != 0) vault.depositFrom(msg.sender, stake);
        _requireStake(msg.sender);
    }

    // --------------------------------------------------------------------- node

    /// @inheritdoc IWorkerRegistry
    function rotateNode(address node, uint256 nodeDeadline, bytes calldata nodeSignature) external {
        StoredWorker storage worker = _workers[msg.sender];
        Status status = worker.status;
        require(status == Status.Active || status == Status.Jailed, RegistryWrongStatus(msg.sender, uint8(status)));
        address oldNode = worker.node;
        _bindNode(worker, node, nodeDeadline, nodeSignature);
        emit NodeRotated(msg.sender, oldNode, node);
    }

    /// @dev Binds `node` to the caller once it proved that it holds the key and consents.
    function _bindNode(StoredWorker storage worker, address node, uint256 deadline, bytes calldata signature) private {
        require(block.timestamp <= deadline, RegistryExpired(deadline, block.timestamp));
        address bound = _boundTo[node];
        require(bound == address(0), RegistryNodeTaken(node, bound));
        uint32 nonce = worker.nonce;
        bytes32 structHash = keccak256(abi.encode(NODE_REGISTRATION_TYPEHASH, msg.sender, node, nonce, deadline));
        (address recovered,,) = ECDSA.tryRecover(_hashTypedDataV4(structHash), signature);
        require(recovered == node && node != address(0), RegistryInvalidNodeSignature(node, recovered));
        worker.nonce = nonce + 1;
        worker.node = node;
        _boundTo[node] = msg.sender;
    }

    // ----------------------------------------------------------- exit and unjail

    /// @inheritdoc IWorkerRegistry
    function exit() external {
        StoredWorker storage worker = _workers[msg.sender];
        Status status = worker.status;
        require(status == Status.Active || status == Status.Jailed, RegistryWrongStatus(msg.sender, uint8(status)));
        worker.status = Status.Exiting;
        emit WorkerExiting(msg.sender);
        vault.requestUnbondFor(msg.sender);
    }

    /// @inheritdoc IWorkerRegistry
    function unjail() external {
        emit WorkerUnjailed(msg.sender, _comeBack(Status.Jailed));
    }

    /// @inheritdoc IWorkerRegistry
    function rejoin() external {
        emit WorkerRejoined(msg.sender, _comeBack(Status.Exiting));
    }

    /// @dev Makes the caller active again if it has the status, its jail time is over and its stake suffices.
    function _comeBack(Status from) private returns (uint256 activeFrom) {
        StoredWorker storage worker = _workers[msg.sender];
        Status status = worker.status;
        require(status == from, RegistryWrongStatus(msg.sender, uint8(status)));
        uint256 jailedUntil = worker.jailedUntil;
        require(block.timestamp >= jailedUntil, RegistryStillJailed(msg.sender, jailedUntil));
        _requireStake(msg.sender);
        activeFrom = block.number + activationDelay;
        worker.status = Status.Active;
        worker.activeFrom = activeFrom.toUint40();
    }

    // --------------------------------------------------------------------- jail

    /// @inheritdoc IWorkerRegistry
    function jail(address worker, bytes32 offence) external {
        require(msg.sender == faults, RegistryUnauthorized(msg.sender));
        Status status = _workers[worker].status;
        require(status == Status.Active, RegistryWrongStatus(worker, uint8(status)));
        _jail(worker, offence);
    }

    /// @inheritdoc IWorkerRegistry
    function jailForLowStake(address worker) external {
        if (_workers[worker].status != Status.Active) return;
        if (vault.activeStake(worker) < requiredStake) _jail(worker, bytes32(0));
    }

    function _jail(address account, bytes32 offence) private {
        StoredWorker storage worker = _workers[account];
        uint256 until = block.timestamp + jailTime;
        // Who is leaving goes on leaving, but cannot come back earlier than from jail.
        if (worker.status == Status.Active) worker.status = Status.Jailed;
        worker.jailedUntil = until.toUint64();
        emit WorkerJailed(account, offence, until);
    }

    // ------------------------------------------------------------------ convict

    /// @inheritdoc IWorkerRegistry
    function convict(address account, bytes32 offence, bool exact) external returns (uint256 priors) {
        require(msg.sender == ledger || msg.sender == faults, RegistryUnauthorized(msg.sender));
        StoredWorker storage worker = _workers[account];
        Status status = worker.status;
        require(status != Status.None, RegistryWrongStatus(account, uint8(status)));
        priors = worker.convictions;
        if (priors == 0) worker.statusBefore = status;
        worker.convictions = (priors + 1).toUint32();
        if (exact) worker.exactConvictions += 1;
        if (exact || priors != 0) {
            worker.status = Status.Banned;
            emit WorkerBanned(account, offence);
        } else {
            _jail(account, offence);
        }
    }

    /// @inheritdoc IWorkerRegistry
    function acquit(address account, bytes32 offence, bool exact) external {
        require(msg.sender == court, RegistryUnauthorized(msg.sender));
        StoredWorker storage worker = _workers[account];
        (uint32 convictions, uint32 exacts) = (worker.convictions - 1, worker.exactConvictions);
        // One file may be an exact fraud in one batch and a statistical one in another: what is undone need not be
        // what was done.
        if (exact && exacts != 0) --exacts;
        worker.convictions = convictions;
        worker.exactConvictions = exacts < convictions ? exacts : convictions;
        Status status = _statusAfterAcquittal(worker);
        if (status == Status.Active && vault.activeStake(account) < requiredStake) status = Status.Jailed;
        worker.status = status;
        emit WorkerAcquitted(account, offence, status);
    }

    /// @dev A ban lasts while an exact or two statistical convictions stand. One statistical conviction leaves its
    ///      worker in jail, and none leaves it where it was before the first.
    function _statusAfterAcquittal(StoredWorker storage worker) private view returns (Status) {
        Status status = worker.status;
        if (status != Status.Banned && status != Status.Jailed) return status;
        if (worker.convictions == 0) return worker.statusBefore;
        if (worker.exactConvictions != 0 || worker.convictions > 1) return status;
        return worker.statusBefore == Status.Exiting ? Status.Exiting : Status.Jailed;
    }

    function _requireStake(address worker) private view {
        uint256 active = vault.activeStake(worker);
        require(active >= requiredStake, RegistryStakeTooLow(worker, active, requiredStake));
    }

    // -------------------------------------------------------------------- views

    /// @inheritdoc IWorkerRegistry
    function workerOf(address account) external view returns (Worker memory) {
        StoredWorker storage worker = _workers[account];
        return Worker({
            node: worker.node,
            workerId: worker.workerId,
            status: worker.status,
            activeFrom: worker.activeFrom,
            jailedUntil: worker.jailedUntil,
            convictions: worker.convictions
        });
    }

    /// @inheritdoc IWorkerRegistry
    function workerOfNode(address node) external view returns (address) {
        address worker = _boundTo[node];
        return _workers[worker].node == node ? worker : address(0);
    }

    /// @inheritdoc IWorkerRegistry
    function wasNodeOf(address node, address worker, uint32 workerId) external view returns (bool) {
        return worker != address(0) && _boundTo[node] == worker && _workers[worker].workerId == workerId;
    }

    /// @inheritdoc IWorkerRegistry
    function workerById(uint32 workerId) external view returns (address) {
        return _byId[workerId];
    }

    /// @inheritdoc IWorkerRegistry
    function isActive(address account) external view returns (bool) {
        StoredWorker storage worker = _workers[account];
        return worker.status == Status.Active && block.number >= worker.activeFrom;
    }

    /// @inheritdoc IWorkerRegistry
    function nonces(address worker) external view returns (uint256) {
        return _workers[worker].nonce;
    }

    /// @inheritdoc IWorkerRegistry
    function DOMAIN_SEPARATOR() external view returns (bytes32) {
        return _domainSeparatorV4();
    }
}
