// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {ECDSA} from "@openzeppelin/contracts/utils/cryptography/ECDSA.sol";
import {EIP712} from "@openzeppelin/contracts/utils/cryptography/EIP712.sol";
import {SafeCast} from "@openzeppelin/contracts/utils/math/SafeCast.sol";

import {IMusterToken} from "./interfaces/IMusterToken.sol";
import {IRunRegistry} from "./interfaces/IRunRegistry.sol";
import {IStakeVault} from "./interfaces/IStakeVault.sol";
import {IWorkerRegistry} from "./interfaces/IWorkerRegistry.sol";

/// @title Who works for which run, and with which key
contract WorkerRegistry is IWorkerRegistry, EIP712 {
    using SafeCast for uint256;

    /// @dev What a worker is in the whole network. Two slots; the nonce is never zero after registration.
    struct StoredWorker {
        address node;
        uint32 workerId;
        uint32 nonce;
    }

    /// @dev Whom a node key serves or served. One slot.
    struct Binding {
        address worker;
        // Unix seconds at which it ceased to; zero while it does.
        uint40 until;
    }

    bytes32 private constant NODE_REGISTRATION_TYPEHASH =
        keccak256("NodeRegistration(address worker,address node,uint256 nonce,uint256 deadline)");

    /// @notice The token staked.
    IMusterToken public immutable token;

    /// @notice The vault that holds the stake.
    IStakeVault public immutable vault;

    /// @notice The runs, whose terms workers agree to.
    IRunRegistry public immutable runs;

    /// @notice The ledger, which may convict.
    address public immutable ledger;

    /// @notice The court, which may acquit.
    address public immutable court;

    /// @notice The court of faults that prove themselves, which may convict.
    address public immutable faults;

    /// @inheritdoc IWorkerRegistry
    uint256 public immutable requiredStake;

    /// @notice Blocks from joining or coming back until a worker counts as active.
    uint256 public immutable activationDelay;

    /// @notice Seconds a jailed worker must wait.
    uint256 public immutable jailTime;

    mapping(address worker => StoredWorker) private _workers;
    mapping(uint64 runId => mapping(address worker => Member)) private _members;
    mapping(address node => Binding) private _bindings;
    mapping(uint32 workerId => address worker) private _byId;
    uint32 private _count;

    /// @param vault_ StakeVault, by its predicted address.
    /// @param runs_ RunRegistry, by its predicted address.
    /// @param ledger_ ContributionLedger, by its predicted address.
    /// @param court_ DisputeCourt, by its predicted address.
    /// @param faults_ FaultCourt, by its predicted address.
    /// @param requiredStake_ Active stake a worker must hold in each of its runs, in token wei.
    /// @param activationDelay_ Blocks until a new worker counts as active.
    /// @param jailTime_ Seconds a jailed worker must wait.
    constructor(
        IMusterToken token_,
        IStakeVault vault_,
        IRunRegistry runs_,
        address ledger_,
        address court_,
        address faults_,
        uint256 requiredStake_,
        uint256 activationDelay_,
        uint256 jailTime_
    ) EIP712("Muster", "1") {
        token = token_;
        vault = vault_;
        runs = runs_;
        ledger = ledger_;
        court = court_;
        faults = faults_;
        requiredStake = requiredStake_;
        activationDelay = activationDelay_;
        jailTime = jailTime_;
    }

    // --------------------------------------------------------------------- join

    /// @inheritdoc IWorkerRegistry
    function join(uint64 runId, uint32 terms, uint256 stake, NodeConsent calldata consent, Permit calldata permit)
        external
    {
        runs.requireTerms(runId, terms);
        Member storage member = _members[runId][msg.sender];
        // Nobody judges the run that it works for.
        require(
            member.status == Status.None && !runs.isValidator(runId, msg.sender),
            RegistryWrongStatus(runId, msg.sender, uint8(member.status))
        );
        _register();
        if (consent.node != address(0)) _bind(consent);
        address node = _workers[msg.sender].node;
        require(node != address(0), RegistryInvalidNodeSignature(node, node));
        member.status = Status.Active;
        emit WorkerJoined(runId, msg.sender, terms, _activate(member));
        if (permit.v != 0) _permit(stake, permit);
        if (stake != 0) vault.depositFrom(runId, msg.sender, stake);
        _requireStake(runId);
    }

    /// @dev Gives the caller a number if it has none.
    function _register() private {
        StoredWorker storage worker = _workers[msg.sender];
        if (worker.workerId != 0) return;
        uint32 workerId = ++_count;
        worker.workerId = workerId;
        _byId[workerId] = msg.sender;
        emit WorkerRegistered(msg.sender, workerId);
    }

    /// @dev A permit that somebody else already used has done its work: the deposit decides.
    function _permit(uint256 stake, Permit calldata permit) private {
        try token.permit(msg.sender, address(vault), stake, permit.deadline, permit.v, permit.r, permit.s) {} catch {}
    }

    function _activate(Member storage member) private returns (uint256 activeFrom) {
        activeFrom = block.number + activationDelay;
        member.activeFrom = activeFrom.toUint40();
    }

    // --------------------------------------------------------------------- node

    /// @inheritdoc IWorkerRegistry
    function rotateNode(NodeConsent calldata consent) external {
        require(_workers[msg.sender].workerId != 0, RegistryUnauthorized(msg.sender));
        _bind(consent);
    }

    /// @dev Binds a node key to the caller once it proved that it holds the key and consents.
    function _bind(NodeConsent calldata consent) private {
        (address node, uint256 deadline) = (consent.node, consent.deadline);
        require(block.timestamp <= deadline, RegistryExpired(deadline, block.timestamp));
        address bound = _bindings[node].worker;
        require(bound == address(0), RegistryNodeTaken(node, bound));
        StoredWorker storage worker = _workers[msg.sender];
        uint32 nonce = worker.nonce;
        bytes32 structHash = keccak256(abi.encode(NODE_REGISTRATION_TYPEHASH, msg.sender, node, nonce, deadline));
        (address recovered,,) = ECDSA.tryRecover(_hashTypedDataV4(structHash), consent.signature);
        require(recovered == node && node != address(0), RegistryInvalidNodeSignature(node, recovered));
        address old = worker.node;
        if (old != address(0)) {
            _bindings[old].until = block.timestamp.toUint40();
            emit NodeUnbound(msg.sender, old);
        }
        worker.nonce = nonce + 1;
        worker.node = node;
        _bindings[node].worker = msg.sender;
        emit NodeBound(msg.sender, node);
    }

    // -------------------------------------------------------- exit and come back

    /// @inheritdoc IWorkerRegistry
    function exit(uint64 runId) external {
        Member storage member = _members[runId][msg.sender];
        Status status = member.status;
        require(
            status == Status.Active || status == Status.Jailed, RegistryWrongStatus(runId, msg.sender, uint8(status))
        );
        member.status = Status.Exiting;
        member.leftAt = block.timestamp.toUint40();
        emit WorkerExiting(runId, msg.sender);
        vault.requestUnbondFor(runId, msg.sender);
    }

    /// @inheritdoc IWorkerRegistry
    function comeBack(uint64 runId, uint32 terms) external {
        runs.requireTerms(runId, terms);
        Member storage member = _members[runId][msg.sender];
        Status status = member.status;
        require(
            status == Status.Jailed || status == Status.Exiting, RegistryWrongStatus(runId, msg.sender, uint8(status))
        );
        uint256 jailedUntil = member.jailedUntil;
        require(block.timestamp >= jailedUntil, RegistryStillJailed(runId, msg.sender, jailedUntil));
        _requireStake(runId);
        member.status = Status.Active;
        member.leftAt = 0;
        emit WorkerReturned(runId, msg.sender, terms, _activate(member));
    }

    function _requireStake(uint64 runId) private view {
        uint256 active = vault.activeStake(runId, msg.sender);
        require(active >= requiredStake, RegistryStakeTooLow(runId, msg.sender, active, requiredStake));
    }

    // ------------------------------------------------------------ jail, convict

    /// @inheritdoc IWorkerRegistry
    function jailForLowStake(uint64 runId, address worker) external {
        Member storage member = _members[runId][worker];
        if (member.status != Status.Active) return;
        if (vault.activeStake(runId, worker) < requiredStake) _jail(runId, worker, member, bytes32(0));
    }

    function _jail(uint64 runId, address worker, Member storage member, bytes32 escrowId) private {
        uint256 until = block.timestamp + jailTime;
        // Who is leaving goes on leaving, but cannot come back earlier than from jail.
        if (member.status == Status.Active) member.status = Status.Jailed;
        member.jailedUntil = until.toUint40();
        emit WorkerJailed(runId, worker, escrowId, until);
    }

    /// @inheritdoc IWorkerRegistry
    function convict(uint64 runId, address worker, bytes32 escrowId, bool exact) external returns (uint256 priors) {
        require(msg.sender == ledger || msg.sender == faults, RegistryUnauthorized(msg.sender));
        Member storage member = _members[runId][worker];
        Status status = member.status;
        require(status != Status.None, RegistryWrongStatus(runId, worker, uint8(status)));
        priors = member.convictions;
        if (priors == 0) member.statusBefore = status;
        member.convictions = (priors + 1).toUint16();
        if (exact) member.exactConvictions += 1;
        if (exact || priors != 0) {
            member.status = Status.Banned;
            emit WorkerBanned(runId, worker, escrowId);
        } else {
            _jail(runId, worker, member, escrowId);
        }
    }

    /// @inheritdoc IWorkerRegistry
    function acquit(uint64 runId, address worker, bytes32 escrowId, bool exact) external {
        require(msg.sender == court, RegistryUnauthorized(msg.sender));
        Member storage member = _members[runId][worker];
        member.convictions -= 1;
        if (exact) member.exactConvictions -= 1;
        Status status = _statusAfterAcquittal(member);
        if (status == Status.Active && vault.activeStake(runId, worker) < requiredStake) status = Status.Jailed;
        member.status = status;
        emit WorkerAcquitted(runId, worker, escrowId, status);
    }

    /// @dev A ban lasts while an exact or two statistical convictions stand. One statistical conviction leaves its
    ///      worker in jail, and none leaves it where it was before the first.
    function _statusAfterAcquittal(Member storage member) private view returns (Status) {
        Status status = member.status;
        if (status != Status.Banned && status != Status.Jailed) return status;
        // Who began to leave meanwhile answers for nothing new, and must come back to be active.
        if (member.leftAt != 0 && member.exactConvictions == 0 && member.convictions < 2) return Status.Exiting;
        if (member.convictions == 0) return member.statusBefore;
        if (member.exactConvictions != 0 || member.convictions > 1) return status;
        return member.statusBefore == Status.Exiting ? Status.Exiting : Status.Jailed;
    }

    // -------------------------------------------------------------------- views

    /// @inheritdoc IWorkerRegistry
    function workerOf(address account) external view returns (uint32 workerId, address node) {
        StoredWorker storage worker = _workers[account];
        return (worker.workerId, worker.node);
    }

    /// @inheritdoc IWorkerRegistry
    function memberOf(uint64 runId, address worker) external view returns (Member memory) {
        return _members[runId][worker];
    }

    /// @inheritdoc IWorkerRegistry
    function statusOf(uint64 runId, address worker) external view returns (Status) {
        return _members[runId][worker].status;
    }

    /// @inheritdoc IWorkerRegistry
    function isActive(uint64 runId, address worker) external view returns (bool) {
        Member storage member = _members[runId][worker];
        return member.status == Status.Active && block.number >= member.activeFrom;
    }

    /// @inheritdoc IWorkerRegistry
    function answersFor(uint64 runId, address worker, address node, uint256 time) external view returns (bool) {
        Binding storage binding = _bindings[node];
        Member storage member = _members[runId][worker];
        return worker != address(0) && binding.worker == worker && (binding.until == 0 || binding.until >= time)
            && member.status != Status.None && (member.leftAt == 0 || member.leftAt >= time);
    }

    /// @inheritdoc IWorkerRegistry
    function workerOfNode(address node) external view returns (address) {
        address worker = _bindings[node].worker;
        return _workers[worker].node == node ? worker : address(0);
    }

    /// @inheritdoc IWorkerRegistry
    function workerById(uint32 workerId) external view returns (address) {
        return _byId[workerId];
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
