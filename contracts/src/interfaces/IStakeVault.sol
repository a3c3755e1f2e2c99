// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

/// @title Errors of the stake vault
interface IStakeVaultErrors {
    /// @notice Thrown when a caller is not the contract that may make this call.
    error VaultUnauthorized(address caller);
    /// @notice Thrown when an amount is zero.
    error VaultZeroAmount();
    /// @notice Thrown when more stake is asked for than is active.
    error VaultInsufficientStake(address owner, uint256 asked, uint256 active);
    /// @notice Thrown when nothing is unbonding, or it is not yet withdrawable.
    error VaultNotWithdrawable(address owner, uint256 unbonding, uint256 withdrawableAt);
    /// @notice Thrown when unbonded stake is held back by open cases or work that is not final.
    error VaultStakeHeld(address owner, uint256 openCases, uint256 heldUntil);
    /// @notice Thrown when an offence was slashed before, or its escrow is not held.
    error VaultOffenceSettled(bytes32 offence);
    /// @notice Thrown at construction when stake could leave before its work is judged.
    error VaultUnbondingTooShort(uint256 unbondingPeriod, uint256 required);
    /// @notice Thrown when shares or parts per million do not add up.
    error VaultInvalidShares(uint256 ppm);
}

/// @title Events of the stake vault
interface IStakeVaultEvents {
    /// @notice Emitted when stake is added. `active` is the owner's active stake afterwards.
    event Deposited(address indexed owner, uint256 amount, uint256 active);
    /// @notice Emitted when stake starts to leave. `unbonding` is all that is leaving.
    event UnbondRequested(address indexed owner, uint256 amount, uint256 unbonding, uint256 withdrawableAt);
    /// @notice Emitted when unbonded stake is paid out.
    event Withdrawn(address indexed owner, uint256 amount);
    /// @notice Emitted when stake moves into escrow for an offence.
    event Slashed(
        address indexed owner, bytes32 indexed offence, uint256 fromActive, uint256 fromUnbonding, address reporter
    );
    /// @notice Emitted when an offence is final and its escrow is split.
    event SlashReleased(bytes32 indexed offence, uint256 burned, uint256 insured, uint256 rewarded);
    /// @notice Emitted when an offence is overturned and its escrow goes back to the owner's active stake.
    event SlashRestored(address indexed owner, bytes32 indexed offence, uint256 amount);
    /// @notice Emitted when stake is held back until a time (Unix seconds), or by `openCases` cases.
    event StakeHeld(address indexed owner, uint256 heldUntil, uint256 openCases);
}

/// @title Holds all stake, and is the only contract that does
/// @notice Workers, validators and jurors deposit here. Stake stays slashable until it is withdrawn.
interface IStakeVault is IStakeVaultErrors, IStakeVaultEvents {
    /// @notice What one account has staked, in token wei.
    struct Account {
        /// @dev Counts towards requirements. Slot 0.
        uint128 active;
        /// @dev Leaving, still slashable. Slot 0.
        uint128 unbonding;
        /// @dev Unix seconds from which `unbonding` may be withdrawn. Slot 1.
        uint64 withdrawableAt;
        /// @dev Unix seconds before which it is held back nevertheless.
        uint64 heldUntil;
        /// @dev Open cases that hold it back.
        uint32 openCases;
    }

    /// @notice Life of an escrow.
    enum EscrowStatus {
        None,
        Held,
        Released,
        Restored
    }

    /// @notice Stake taken for one offence, held until its verdict is final.
    struct Escrow {
        /// @dev Whose stake it was.
        address owner;
        /// @dev Who reported the offence; zero for none.
        address reporter;
        /// @dev Token wei taken; zero when there was nothing.
        uint88 amount;
        /// @dev What became of it.
        EscrowStatus status;
    }

    /// @notice Adds `amount` of the caller's tokens to the active stake of `owner`.
    function deposit(address owner, uint256 amount) external;

    /// @notice As `deposit` for the caller, with an ERC-2612 permit for this contract.
    function depositWithPermit(uint256 amount, uint256 deadline, uint8 v, bytes32 r, bytes32 s) external;

    /// @notice Adds `amount` of the worker's own tokens to its stake. Only WorkerRegistry may call.
    function depositFrom(address worker, uint256 amount) external;

    /// @notice Starts to unbond `amount` of the caller's active stake.
    /// @dev There is one pending unbond per account: a later request adds to it and restarts its clock.
    function requestUnbond(uint256 amount) external;

    /// @notice Starts to unbond all active stake of `worker`. Only WorkerRegistry may call.
    function requestUnbondFor(address worker) external;

    /// @notice Pays out the caller's unbonded stake once the unbonding period is over and nothing holds it.
    /// @dev Never pausable. Whatever holds stake back does so for one more unbonding period at most.
    function withdraw() external returns (uint256 amount);

    /// @notice Holds an account's stake until `until`. Only ContributionLedger, DisputeCourt and FaultCourt may call.
    function hold(address owner, uint256 until) external;

    /// @notice Holds an account's stake while a case about its work is open. Only DisputeCourt may call.
    function openCase(address owner) external;

    /// @notice Undoes `openCase`. Only DisputeCourt may call.
    function closeCase(address owner) external;

    /// @notice Moves `ppm` millionths of active and unbonding stake into escrow for an offence.
    /// @dev Rounds up. Only ContributionLedger, DisputeCourt and FaultCourt may call.
    /// @param offence Names what is punished; each is punished once.
    /// @param reporter Gets the capped reporter share when the escrow is released; zero for none.
    function slash(address owner, uint256 ppm, bytes32 offence, address reporter) external returns (uint256 amount);

    /// @notice Splits a final offence's escrow into burn, insurance and reporter share.
    /// @dev Only ContributionLedger, DisputeCourt and FaultCourt may call.
    function release(bytes32 offence) external;

    /// @notice Gives an overturned offence's escrow back to its owner's active stake.
    /// @dev Only ContributionLedger, DisputeCourt and FaultCourt may call.
    function restore(bytes32 offence) external;

    /// @notice Returns the stake of `owner`.
    function accountOf(address owner) external view returns (Account memory);

    /// @notice Returns the active stake of `owner`, in token wei.
    function activeStake(address owner) external view returns (uint256);

    /// @notice Returns the escrow of an offence.
    function escrowOf(bytes32 offence) external view returns (Escrow memory);

    /// @notice Returns the seconds between an unbond request and its withdrawal.
    function unbondingPeriod() external view returns (uint256);
}
