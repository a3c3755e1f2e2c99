// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

/// @title Errors of the worker registry
interface IWorkerRegistryErrors {
    /// @notice Thrown when a caller is not the contract that may make this call.
    error RegistryUnauthorized(address caller);
    /// @notice Thrown when an account's status in a run forbids the call; also when one that validates for it would work.
    error RegistryWrongStatus(uint64 runId, address worker, uint8 status);
    /// @notice Thrown when a node key serves or served a worker: keys are never bound twice.
    error RegistryNodeTaken(address node, address worker);
    /// @notice Thrown when a node's consent is not signed by the node, or a worker has no node yet.
    error RegistryInvalidNodeSignature(address node, address recovered);
    /// @notice Thrown when the node's consent is past its deadline.
    error RegistryExpired(uint256 deadline, uint256 timestamp);
    /// @notice Thrown when active stake in the run is below the requirement.
    error RegistryStakeTooLow(uint64 runId, address worker, uint256 active, uint256 required);
    /// @notice Thrown when a jailed worker asks to come back too early.
    error RegistryStillJailed(uint64 runId, address worker, uint256 until);
}

/// @title Events of the worker registry
interface IWorkerRegistryEvents {
    /// @notice Emitted once per worker, when it joins its first run.
    event WorkerRegistered(address indexed worker, uint32 indexed workerId);
    /// @notice Emitted when a node key begins to serve a worker.
    event NodeBound(address indexed worker, address indexed node);
    /// @notice Emitted when a node key ceases to serve a worker; it signed nothing that is committed later.
    event NodeUnbound(address indexed worker, address indexed node);
    /// @notice Emitted when a worker joins a run under terms that it names. It may submit from block `activeFrom` on.
    event WorkerJoined(uint64 indexed runId, address indexed worker, uint32 terms, uint256 activeFrom);
    /// @notice Emitted when a worker is jailed in a run: until a time (Unix seconds), and until its stake suffices.
    event WorkerJailed(uint64 indexed runId, address indexed worker, bytes32 indexed escrowId, uint256 until);
    /// @notice Emitted when a worker comes back, from jail or from leaving; active from block `activeFrom` on.
    event WorkerReturned(uint64 indexed runId, address indexed worker, uint32 terms, uint256 activeFrom);
    /// @notice Emitted when a worker is excluded from a run for good.
    event WorkerBanned(uint64 indexed runId, address indexed worker, bytes32 indexed escrowId);
    /// @notice Emitted when a conviction is overturned. `status` is the worker's from now on.
    event WorkerAcquitted(
        uint64 indexed runId, address indexed worker, bytes32 indexed escrowId, IWorkerRegistry.Status status
    );
    /// @notice Emitted when a worker starts to leave a run.
    event WorkerExiting(uint64 indexed runId, address indexed worker);
}

/// @title Who works for which run, and with which key
/// @notice A worker has one number and one node key for the whole network; stake, status and convictions belong to a run.
interface IWorkerRegistry is IWorkerRegistryErrors, IWorkerRegistryEvents {
    /// @notice Life of a worker in one run.
    enum Status {
        None,
        Active,
        Jailed,
        Exiting,
        Banned
    }

    /// @notice A worker in one run.
    struct Member {
        /// @dev Life cycle.
        Status status;
        /// @dev First block in which it counts as active.
        uint40 activeFrom;
        /// @dev Unix seconds before which a jailed worker stays jailed.
        uint40 jailedUntil;
        /// @dev Unix seconds at which it began to leave; while it is away it answers for nothing that is committed later. Zero
        ///      once it is back: then it answers for what was committed meanwhile, too.
        uint40 leftAt;
        /// @dev Fraud verdicts against it that stand, and how many of them are exact.
        uint16 convictions;
        uint16 exactConvictions;
        /// @dev The status at the first of the convictions that stand.
        Status statusBefore;
    }

    /// @notice A node key with its worker's consent to be served by it.
    struct NodeConsent {
        address node;
        /// @dev Unix seconds.
        uint256 deadline;
        /// @dev EIP-712 `NodeRegistration` made by the node key (proof of possession).
        bytes signature;
    }

    /// @notice An ERC-2612 permit for StakeVault over the stake; `v` zero for none.
    struct Permit {
        uint256 deadline;
        uint8 v;
        bytes32 r;
        bytes32 s;
    }

    /// @notice Makes the caller a worker of a run in one transaction: takes `stake` from it, and binds its node key if it
    ///         has none or names another one.
    /// @param terms Number of the run's terms, to which the caller agrees. Terms that are about to change are refused.
    /// @param stake Token wei; needs an allowance for StakeVault or a permit.
    /// @param consent The node key; a zero node keeps the one that the worker has.
    function join(uint64 runId, uint32 terms, uint256 stake, NodeConsent calldata consent, Permit calldata permit)
        external;

    /// @notice Replaces the caller's node key in all runs: the old key fails for all that is committed later, and answers
    ///         for what was committed before. Earned reward stays.
    function rotateNode(NodeConsent calldata consent) external;

    /// @notice Starts to leave a run: no more work, all stake in it unbonds.
    function exit(uint64 runId) external;

    /// @notice Makes the caller active in a run again, from jail or from leaving, if its stake suffices.
    /// @param terms As for `join`.
    function comeBack(uint64 runId, uint32 terms) external;

    /// @notice Convicts a worker of fraud in a run. Only ContributionLedger and FaultCourt may call.
    /// @dev An exact fraud or a second conviction bans, a first statistical one jails.
    /// @return priors Convictions that stood before.
    function convict(uint64 runId, address worker, bytes32 escrowId, bool exact) external returns (uint256 priors);

    /// @notice Undoes a conviction that was overturned. Only DisputeCourt may call.
    function acquit(uint64 runId, address worker, bytes32 escrowId, bool exact) external;

    /// @notice Jails a worker whose active stake in a run is below the requirement; does nothing for anybody else.
    /// @dev Anyone may call. StakeVault calls it whenever active stake falls, so nobody needs to.
    function jailForLowStake(uint64 runId, address worker) external;

    /// @notice Returns a worker's number and node key; zero for nobody.
    function workerOf(address worker) external view returns (uint32 workerId, address node);

    /// @notice Returns a worker as it stands in a run.
    function memberOf(uint64 runId, address worker) external view returns (Member memory);

    /// @notice Returns a worker's status in a run.
    function statusOf(uint64 runId, address worker) external view returns (Status);

    /// @notice Returns whether `worker` may submit to a run in the current block.
    function isActive(uint64 runId, address worker) external view returns (bool);

    /// @notice Returns whether what `node` signed, and was committed at `time`, counts against a worker in a run: it joined the
    ///         run, had not begun to leave by then, and the key is or was its own and had not been rotated away by then. With time
    ///         zero: whether it joined the run, and the key is or was its own.
    function answersFor(uint64 runId, address worker, address node, uint256 time) external view returns (bool);

    /// @notice Returns the worker that a node key serves now, or the zero address.
    function workerOfNode(address node) external view returns (address);

    /// @notice Returns the worker with a number, or the zero address.
    function workerById(uint32 workerId) external view returns (address);

    /// @notice Returns the next nonce a node must consent to for `worker`.
    function nonces(address worker) external view returns (uint256);

    /// @notice Returns the active stake a worker must hold in each of its runs, in token wei.
    function requiredStake() external view returns (uint256);

    /// @notice Returns the EIP-712 domain separator.
    function DOMAIN_SEPARATOR() external view returns (bytes32);
}
