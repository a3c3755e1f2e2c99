// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

/// @title Errors of the stake vault
interface IStakeVaultErrors {
    /// @notice Thrown when a caller is not the contract that may make this call.
    error VaultUnauthorized(address caller);
    /// @notice Thrown when an amount is zero.
    error VaultZeroAmount();
    /// @notice Thrown when more stake is asked for than is active.
    error VaultInsufficientStake(uint64 runId, address owner, uint256 asked, uint256 active);
    /// @notice Thrown when nothing is unbonding, or it is not yet withdrawable.
    error VaultNotWithdrawable(uint64 runId, address owner, uint256 unbonding, uint256 withdrawableAt);
    /// @notice Thrown when an offence was punished before, or its escrow is not held.
    error VaultOffenceSettled(bytes32 escrowId);
    /// @notice Thrown when an escrow belongs to another outcome than the one that asks for it.
    error VaultWrongLeaf(bytes32 escrowId, uint64 batchId, uint32 position);
    /// @notice Thrown when 255 escrows of an account are held: a further offence waits until one is settled.
    error VaultTooManyEscrows(uint64 runId, address owner);
    /// @notice Thrown at construction when stake could leave before its work is judged.
    error VaultUnbondingTooShort(uint256 unbondingPeriod, uint256 required);
    /// @notice Thrown when shares or parts per million do not add up.
    error VaultInvalidShares(uint256 ppm);
}

/// @title Events of the stake vault
interface IStakeVaultEvents {
    /// @notice Emitted when stake is added. `active` is the owner's active stake in the run afterwards.
    event Deposited(uint64 indexed runId, address indexed owner, uint256 amount, uint256 active);
    /// @notice Emitted when stake starts to leave. `unbonding` is all that is leaving.
    event UnbondRequested(
        uint64 indexed runId, address indexed owner, uint256 amount, uint256 unbonding, uint256 withdrawableAt
    );
    /// @notice Emitted when unbonded stake is paid out.
    event Withdrawn(uint64 indexed runId, address indexed owner, uint256 amount);
    /// @notice Emitted when stake is taken. An offence that proves itself belongs to no outcome: batch 0.
    event Slashed(
        uint64 indexed runId,
        address indexed owner,
        bytes32 indexed escrowId,
        IStakeVault.Verdict verdict,
        uint256 fromActive,
        uint256 fromUnbonding
    );
    /// @notice Emitted when slashed stake is split for good.
    event SlashReleased(bytes32 indexed escrowId, address reporter, uint256 burned, uint256 insured, uint256 rewarded);
    /// @notice Emitted when an outcome was overturned: `returned` is active again, and `followed` went to later slashes.
    event SlashRestored(
        uint64 indexed runId, address indexed owner, bytes32 indexed escrowId, uint256 returned, uint256 followed
    );
    /// @notice Emitted when a later slash takes its share of stake that an earlier escrow gave back.
    event SlashFollowed(bytes32 indexed escrowId, bytes32 indexed fromEscrowId, uint256 amount);
}

/// @title Holds all stake, and is the only contract that does
/// @notice Stake belongs to one owner and one run: its owner deposits it for that run, and nothing but that run can cost
///         it. Jurors stake for run 0, the network's bench. Stake stays slashable until it is withdrawn.
interface IStakeVault is IStakeVaultErrors, IStakeVaultEvents {
    /// @notice What one account has staked for one run, in token wei.
    struct Account {
        /// @dev Counts towards requirements.
        uint256 active;
        /// @dev Leaving, still slashable.
        uint256 unbonding;
        /// @dev Unix seconds from which `unbonding` may be withdrawn.
        uint256 withdrawableAt;
        /// @dev Escrows of the account that are held.
        uint256 held;
    }

    /// @notice What stake can be taken for. An account is punished once for an offence and a tag.
    enum Offence {
        None,
        /// @dev A statistical fraud verdict, or an exact one; tag is `step << 32 | index`.
        Fraud,
        ExactFraud,
        /// @dev Two submissions for one slot; tag as for fraud.
        DoubleSubmission,
        /// @dev A signature on outcomes that a jury overturned; tag is the batch.
        WrongVerdict,
        /// @dev Two outcomes of one batch; tag is the batch.
        DoubleOutcome,
        /// @dev A juror that did not vote; tag is the case.
        AbsentJuror,
        /// @dev A signature on a record that contradicts what its batch holds; tag is the batch.
        Misrecord
    }

    /// @notice Life of an escrow.
    enum EscrowStatus {
        None,
        Held,
        Released,
        Restored
    }

    /// @notice Stake taken for one offence.
    struct Escrow {
        /// @dev Token wei taken; zero when there was nothing.
        uint88 amount;
        /// @dev Millionths that the offence costs.
        uint24 ppm;
        /// @dev The outcome that it belongs to; zero for offences that prove themselves.
        uint64 batchId;
        uint32 position;
        /// @dev What became of it.
        EscrowStatus status;
    }

    /// @notice What stake is taken for: whose, which offence, and of frauds the one outcome that the escrow belongs to.
    struct Verdict {
        uint64 runId;
        address owner;
        Offence offence;
        /// @dev See `Offence`.
        uint64 tag;
        uint64 batchId;
        uint32 position;
    }

    /// @notice Adds `amount` of the caller's tokens to the active stake of `owner` in a run.
    function deposit(uint64 runId, address owner, uint256 amount) external;

    /// @notice Adds `amount` of an owner's own tokens to its stake in a run. Only the registries may call.
    function depositFrom(uint64 runId, address owner, uint256 amount) external;

    /// @notice Starts to unbond `amount` of the caller's active stake in a run.
    /// @dev There is one pending unbond per account: a later request adds to it and restarts its clock.
    function requestUnbond(uint64 runId, uint256 amount) external;

    /// @notice Starts to unbond all active stake of an owner in a run. Only the registries may call.
    function requestUnbondFor(uint64 runId, address owner) external;

    /// @notice Pays out the caller's unbonded stake in a run once the unbonding period is over. Nothing can hold it longer.
    function withdraw(uint64 runId) external returns (uint256 amount);

    /// @notice Takes `ppm` millionths of an owner's active and unbonding stake in a run for an outcome's fraud, and holds
    ///         them. Rounds up. Only ContributionLedger may call.
    function hold(Verdict calldata verdict, uint256 ppm) external returns (uint256 amount);

    /// @notice Takes stake for an offence that is proven, and splits it at once. Rounds up. Only the courts may call.
    /// @param reporter Gets the capped reporter's share; zero for none.
    function slash(uint64 runId, address owner, Offence offence, uint64 tag, uint256 ppm, address reporter)
        external
        returns (uint256 amount);

    /// @notice Splits a final fraud's escrow into burn, insurance and reporter's share. Only ContributionLedger may call.
    function release(Verdict calldata verdict, address reporter) external;

    /// @notice Gives an overturned fraud's escrow back, less what later offences cost of it. Only DisputeCourt may call.
    /// @return restored Whether the outcome had an escrow.
    function restore(Verdict calldata verdict) external returns (bool restored);

    /// @notice Returns the stake of `owner` in a run.
    function accountOf(uint64 runId, address owner) external view returns (Account memory);

    /// @notice Returns the active stake of `owner` in a run, in token wei.
    function activeStake(uint64 runId, address owner) external view returns (uint256);

    /// @notice Returns the name of an escrow: `keccak256(abi.encode(runId, owner, offence, tag))`.
    function escrowIdOf(uint64 runId, address owner, Offence offence, uint64 tag) external pure returns (bytes32);

    /// @notice Returns an escrow.
    function escrowOf(bytes32 escrowId) external view returns (Escrow memory);

    /// @notice Returns the seconds between an unbond request and its withdrawal.
    function unbondingPeriod() external view returns (uint256);
}
