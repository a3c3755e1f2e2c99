// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

/// @title Errors of the worker registry
interface IWorkerRegistryErrors {
    /// @notice Thrown when a caller is not the contract that may make this call.
    error RegistryUnauthorized(address caller);
    /// @notice Thrown when a worker is already registered.
    error RegistryWorkerExists(address worker);
    /// @notice Thrown when an account is not a worker, or its status forbids the call.
    error RegistryWrongStatus(address worker, uint8 status);
    /// @notice Thrown when a node key serves or served a worker: keys are never bound twice.
    error RegistryNodeTaken(address node, address worker);
    /// @notice Thrown when a node's consent is expired or not signed by the node.
    error RegistryInvalidNodeSignature(address node, address recovered);
    /// @notice Thrown when the node's consent is past its deadline.
    error RegistryExpired(uint256 deadline, uint256 timestamp);
    /// @notice Thrown when active stake is below the requirement.
    error RegistryStakeTooLow(address worker, uint256 active, uint256 required);
    /// @notice Thrown when a jailed worker asks to come back too early.
    error RegistryStillJailed(address worker, uint256 until);
}

/// @title Events of the worker registry
interface IWorkerRegistryEvents {
    /// @notice Emitted once per worker. It may submit from `activeFrom` (block number) on.
    event WorkerRegistered(address indexed worker, address indexed node, uint32 workerId, uint256 activeFrom);
    /// @notice Emitted when a worker replaces its node key; the old key fails at once.
    event NodeRotated(address indexed worker, address indexed oldNode, address indexed newNode);
    /// @notice Emitted when a worker is jailed: until a time (Unix seconds), and until its stake suffices.
    event WorkerJailed(address indexed worker, bytes32 indexed offence, uint256 until);
    /// @notice Emitted when a jailed worker is active again from block `activeFrom` on.
    event WorkerUnjailed(address indexed worker, uint256 activeFrom);
    /// @notice Emitted when a worker is excluded for good.
    event WorkerBanned(address indexed worker, bytes32 indexed offence);
    /// @notice Emitted when a conviction is overturned. `status` is the worker's from now on.
    event WorkerAcquitted(address indexed worker, bytes32 indexed offence, IWorkerRegistry.Status status);
    /// @notice Emitted when a worker starts to leave.
    event WorkerExiting(address indexed worker);
    /// @notice Emitted when a worker that was leaving comes back; active from block `activeFrom` on.
    event WorkerRejoined(address indexed worker, uint256 activeFrom);
}

/// @title Who may work, and with which key
interface IWorkerRegistry is IWorkerRegistryErrors, IWorkerRegistryEvents {
    /// @notice Life of a worker.
    enum Status {
        None,
        Active,
        Jailed,
        Exiting,
        Banned
    }

    /// @notice One worker.
    struct Worker {
        /// @dev The hot key that signs submissions and requests.
        address node;
        /// @dev Number from 1, used in outcome records.
        uint32 workerId;
        /// @dev Life cycle.
        Status status;
        /// @dev First block in which it counts as active.
        uint64 activeFrom;
        /// @dev Unix seconds before which a jailed worker stays jailed.
        uint64 jailedUntil;
        /// @dev Fraud verdicts against it that stand.
        uint32 convictions;
    }

    /// @notice Registers the caller as a worker: takes `stake` from it and binds `node`.
    /// @dev Needs an allowance for StakeVault.
    /// @param nodeSignature EIP-712 `NodeRegistration` made by the node key (proof of possession).
    function register(uint256 stake, address node, uint256 nodeDeadline, bytes calldata nodeSignature) external;

    /// @notice Makes the caller a worker in one transaction: as `register`, with an ERC-2612 permit for StakeVault.
    function registerWithPermit(
        uint256 stake,
        address node,
        uint256 nodeDeadline,
        bytes calldata nodeSignature,
        uint256 permitDeadline,
        uint8 v,
        bytes32 r,
        bytes32 s
    ) external;

    /// @notice Replaces the caller's node key; the old key fails at once, earned reward stays.
    function rotateNode(address node, uint256 nodeDeadline, bytes calldata nodeSignature) external;

    /// @notice Starts to leave: no more work, all stake unbonds.
    function exit() external;

    /// @notice Makes the caller active again after its jail time, if its stake suffices.
    function unjail() external;

    /// @notice Makes the caller, which was leaving, active again, if its stake suffices.
    function rejoin() external;

    /// @notice Jails an active worker. Only FaultCourt may call.
    function jail(address worker, bytes32 offence) external;

    /// @notice Convicts a worker of fraud. Only ContributionLedger and FaultCourt may call.
    /// @dev An exact fraud or a second conviction bans, a first statistical one jails.
    /// @return priors Convictions that stood before.
    function convict(address worker, bytes32 offence, bool exact) external returns (uint256 priors);

    /// @notice Undoes a conviction that was overturned. Only DisputeCourt may call.
    function acquit(address worker, bytes32 offence, bool exact) external;

    /// @notice Jails a worker whose active stake is below the requirement; does nothing for anybody else.
    /// @dev Anyone may call. StakeVault calls it whenever active stake falls, so nobody needs to.
    function jailForLowStake(address worker) external;

    /// @notice Returns a worker's record.
    function workerOf(address worker) external view returns (Worker memory);

    /// @notice Returns the worker that a node key serves now, or the zero address.
    function workerOfNode(address node) external view returns (address);

    /// @notice Returns whether `node` is or was a node of `worker`, and `workerId` is the worker's number.
    /// @dev Signatures of replaced keys stay evidence against their worker.
    function wasNodeOf(address node, address worker, uint32 workerId) external view returns (bool);

    /// @notice Returns the worker with a number, or the zero address.
    function workerById(uint32 workerId) external view returns (address);

    /// @notice Returns whether `worker` may submit in the current block.
    function isActive(address worker) external view returns (bool);

    /// @notice Returns the next nonce a node must consent to for `worker`.
    function nonces(address worker) external view returns (uint256);

    /// @notice Returns the active stake a worker must hold, in token wei.
    function requiredStake() external view returns (uint256);

    /// @notice Returns the EIP-712 domain separator.
    function DOMAIN_SEPARATOR() external view returns (bytes32);
}
