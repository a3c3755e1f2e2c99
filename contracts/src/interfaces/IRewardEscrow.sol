// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

import {IContributionLedger} from "./IContributionLedger.sol";

/// @title Errors of the reward escrow
interface IRewardEscrowErrors {
    /// @notice Thrown when an outcome is not accepted.
    error EscrowNotAccepted(uint64 batchId, uint32 position, uint8 verdict);
    /// @notice Thrown when an outcome is not final yet, or is under dispute.
    error EscrowNotFinal(uint64 batchId, uint32 position);
    /// @notice Thrown when a slot was paid before, in this batch or another.
    error EscrowSlotPaid(uint64 runId, address worker, uint32 step, uint32 index);
    /// @notice Thrown when outcomes in one claim belong to different workers or runs.
    error EscrowMixedClaim(uint64 batchId, uint32 position);
    /// @notice Thrown when a run's funds do not cover a claim.
    error EscrowUnderfunded(uint64 runId, uint256 due, uint256 available);
    /// @notice Thrown when an amount or a list is empty.
    error EscrowEmpty();
}

/// @title Events of the reward escrow
interface IRewardEscrowEvents {
    /// @notice Emitted when a run receives funds.
    event RunFunded(uint64 indexed runId, address indexed from, uint256 amount);
    /// @notice Emitted when a worker is paid for `slots` accepted submissions.
    event RewardClaimed(uint64 indexed runId, address indexed worker, uint256 slots, uint256 units, uint256 amount);
}

/// @title Pays final accepted units, and nothing else
interface IRewardEscrow is IRewardEscrowErrors, IRewardEscrowEvents {
    /// @notice Adds funds to a run. Anyone.
    function fund(uint64 runId, uint256 amount) external;

    /// @notice Pays one worker for many final accepted outcomes of one run. Anyone; the worker is paid.
    /// @dev Each slot (run, worker, step, index) is paid at most once, whatever batches it is in.
    function claim(IContributionLedger.OutcomeProof[] calldata outcomes) external returns (uint256 amount);

    /// @notice Returns whether a slot was paid.
    function isPaid(uint64 runId, address worker, uint32 step, uint32 index) external view returns (bool);

    /// @notice Returns what a run received and paid, in token wei.
    function fundsOf(uint64 runId) external view returns (uint256 funded, uint256 paid);
}
