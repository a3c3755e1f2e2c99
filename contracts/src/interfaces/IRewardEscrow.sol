// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

import {IContributionLedger} from "./IContributionLedger.sol";

/// @title Errors of the reward escrow
interface IRewardEscrowErrors {
    /// @notice Thrown when a caller is not the contract or account that may make this call.
    error EscrowUnauthorized(address caller);
    /// @notice Thrown when an outcome is not accepted.
    error EscrowNotAccepted(uint64 batchId, uint32 position, uint8 verdict);
    /// @notice Thrown when an accepted outcome is treated as one that is not.
    error EscrowAccepted(uint64 batchId, uint32 position);
    /// @notice Thrown when a batch's challenge window is open.
    error EscrowNotFinal(uint64 batchId, uint256 finalAt);
    /// @notice Thrown when an outcome is under dispute.
    error EscrowDisputed(uint64 batchId, uint32 position);
    /// @notice Thrown when records and siblings do not lead to the batch's root, or positions do not ascend.
    error EscrowInvalidProof(uint64 batchId);
    /// @notice Thrown when every slot of a claim was paid before, in these batches or others.
    error EscrowAllPaid(uint64 runId, address worker);
    /// @notice Thrown when the money set aside for an outcome was recovered before.
    error EscrowRecovered(uint64 batchId, uint32 position);
    /// @notice Thrown when outcomes in one call belong to different workers or runs.
    error EscrowMixedClaim(uint64 batchId, uint32 position);
    /// @notice Thrown when a batch has no outcomes.
    error EscrowNotJudged(uint64 batchId);
    /// @notice Thrown when a run's funds do not cover what is to be set aside.
    error EscrowUnderfunded(uint64 runId, uint256 due, uint256 available);
    /// @notice Thrown when a run is still open, or nothing of its funds may be taken back yet.
    error EscrowNotReclaimable(uint64 runId, uint256 from);
    /// @notice Thrown when a closed run is to receive funds.
    error EscrowRunClosed(uint64 runId);
    /// @notice Thrown when an amount or a list is empty.
    error EscrowEmpty();
    /// @notice Thrown at construction when workers would have less time to claim than judgement takes.
    error EscrowPeriodTooShort(uint256 period, uint256 required);
}

/// @title Events of the reward escrow
interface IRewardEscrowEvents {
    /// @notice Emitted when a run receives funds.
    event RunFunded(uint64 indexed runId, address indexed from, uint256 amount);
    /// @notice Emitted when money is set aside for a batch.
    event RewardReserved(uint64 indexed runId, uint256 amount);
    /// @notice Emitted when money is free again that was set aside for a void batch, or for units that are in no record of a
    ///         judged one. It follows the ledger's `BatchVoided` or `OutcomesPosted` of that batch.
    event RewardFreed(uint64 indexed runId, uint256 amount);
    /// @notice Emitted when a run pays jurors of the network for what its own validators got wrong or left undone.
    event CourtPaid(uint64 indexed runId, uint256 amount);
    /// @notice Emitted when a worker is paid for `slots` accepted submissions.
    event RewardClaimed(uint64 indexed runId, address indexed worker, uint256 slots, uint256 units, uint256 amount);
    /// @notice Emitted when money set aside for outcomes that were not accepted is free again.
    event RewardRecovered(uint64 indexed runId, uint256 slots, uint256 amount);
    /// @notice Emitted when the owner of a closed run takes back what is left.
    event RunReclaimed(uint64 indexed runId, address indexed owner, uint256 amount);
}

/// @title Pays final accepted units, and nothing else
/// @notice A batch can be committed only when the run's funds cover all it claims, and that much is set aside then:
///         whoever works knows that the money is there. paid ≤ reserved ≤ funded, always.
interface IRewardEscrow is IRewardEscrowErrors, IRewardEscrowEvents {
    /// @notice A run's money, in token wei.
    struct Funds {
        /// @dev Free for batches to come.
        uint128 available;
        /// @dev Set aside for batches committed and not yet paid.
        uint128 reserved;
    }

    /// @notice Outcomes of one batch, and the proof that they stand.
    struct Claim {
        IContributionLedger.Batch batch;
        /// @dev Places in the batch, strictly ascending.
        uint32[] positions;
        /// @dev The 56-byte records at these places, joined.
        bytes records;
        /// @dev Nodes that the records do not give, level by level, left to right.
        bytes32[] siblings;
    }

    /// @notice Adds the caller's tokens, which must be approved, to a run's funds. Anyone.
    function fund(uint64 runId, uint256 amount) external;

    /// @notice Sets money aside for a batch. Only ContributionLedger may call.
    function reserve(uint64 runId, uint256 amount) external;

    /// @notice Frees money that was set aside for units that nobody will ever be paid. Only ContributionLedger may call.
    function free(uint64 runId, uint256 amount) external;

    /// @notice Pays up to `amount` of a run's free money to DisputeCourt, for jurors. Only DisputeCourt may call.
    function payCourt(uint64 runId, uint256 amount) external returns (uint256 paid);

    /// @notice Pays one worker for many final accepted outcomes of one run. Anyone; the worker is paid.
    /// @dev Each slot (run, worker, step, index) is paid at most once, whatever batches it is in. Paid ones are passed over.
    function claim(Claim[] calldata claims) external returns (uint256 amount);

    /// @notice Frees the money set aside for final outcomes of one run that were not accepted. Anyone.
    function recover(Claim[] calldata claims) external returns (uint256 amount);

    /// @notice Returns a closed run's money to its owner: what is free at once, all of it `claimPeriod` later.
    function reclaim(uint64 runId) external returns (uint256 amount);

    /// @notice Returns whether a slot was paid.
    function isPaid(uint64 runId, address worker, uint32 step, uint32 index) external view returns (bool);

    /// @notice Returns a run's money.
    function fundsOf(uint64 runId) external view returns (Funds memory);

    /// @notice Returns the seconds that workers of a closed run have to claim.
    function claimPeriod() external view returns (uint256);
}
