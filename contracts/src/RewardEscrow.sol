// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {SafeERC20} from "@openzeppelin/contracts/token/ERC20/utils/SafeERC20.sol";
import {SafeCast} from "@openzeppelin/contracts/utils/math/SafeCast.sol";

import {IContributionLedger} from "./interfaces/IContributionLedger.sol";
import {IMusterToken} from "./interfaces/IMusterToken.sol";
import {IRewardEscrow} from "./interfaces/IRewardEscrow.sol";
import {IRunRegistry} from "./interfaces/IRunRegistry.sol";
import {IWorkerRegistry} from "./interfaces/IWorkerRegistry.sol";
import {OutcomeRecordLib} from "./libraries/OutcomeRecordLib.sol";

/// @title Pays final accepted units, and nothing else
contract RewardEscrow is IRewardEscrow {
    using SafeERC20 for IMusterToken;
    using SafeCast for uint256;

    /// @dev A run's money.
    struct Funds {
        // slot 0: all that a claim reads and writes. The price never changes; it is copied here with the first funds.
        uint128 available;
        uint128 pricePerUnit;
        // slot 1
        uint256 funded;
    }

    /// @notice The token paid in.
    IMusterToken public immutable token;

    /// @notice The runs, with their prices.
    IRunRegistry public immutable runs;

    /// @notice The workers, by number.
    IWorkerRegistry public immutable workers;

    /// @notice The ledger of outcomes; it asks the court which verdict stands.
    IContributionLedger public immutable ledger;

    mapping(uint64 runId => Funds) private _funds;

    /// @dev Paid slots: 16 steps × 16 indices of one worker in one run share a word.
    mapping(uint256 word => uint256 bitmap) private _paid;

    constructor(IMusterToken token_, IRunRegistry runs_, IWorkerRegistry workers_, IContributionLedger ledger_) {
        token = token_;
        runs = runs_;
        workers = workers_;
        ledger = ledger_;
    }

    // --------------------------------------------------------------------- fund

    /// @inheritdoc IRewardEscrow
    function fund(uint64 runId, uint256 amount) external {
        require(amount != 0, EscrowEmpty());
        Funds storage funds = _funds[runId];
        funds.pricePerUnit = runs.priceOf(runId);
        funds.available += amount.toUint128();
        funds.funded += amount;
        emit RunFunded(runId, msg.sender, amount);
        token.safeTransferFrom(msg.sender, address(this), amount);
    }

    // -------------------------------------------------------------------- claim

    /// @inheritdoc IRewardEscrow
    function claim(IContributionLedger.OutcomeProof[] calldata outcomes) external returns (uint256 amount) {
        require(outcomes.length != 0, EscrowEmpty());
        (uint64 runId, uint32 workerId, uint256 units) = _settle(outcomes[0]);
        for (uint256 i = 1; i < outcomes.length; ++i) {
            (uint64 otherRun, uint32 otherWorker, uint256 more) = _settle(outcomes[i]);
            require(
                otherRun == runId && otherWorker == workerId,
                EscrowMixedClaim(outcomes[i].batchId, outcomes[i].position)
            );
            units += more;
        }
        Funds storage funds = _funds[runId];
        (uint256 available, uint256 price) = (funds.available, funds.pricePerUnit);
        // Before the first funds the price is not copied yet; the claim must fail rather than pay nothing.
        amount = units * (price == 0 ? runs.priceOf(runId) : price);
        require(amount <= available, EscrowUnderfunded(runId, amount, available));
        funds.available = (available - amount).toUint128();
        address worker = workers.workerById(workerId);
        emit RewardClaimed(runId, worker, outcomes.length, units, amount);
        token.safeTransfer(worker, amount);
    }

    /// @dev Marks the slot of a final accepted outcome as paid; returns what it is worth and to whom.
    function _settle(IContributionLedger.OutcomeProof calldata outcome)
        private
        returns (uint64 runId, uint32 workerId, uint256 units)
    {
        IContributionLedger.Outcome memory settled;
        bool isFinal;
        (runId, settled, isFinal) = ledger.settledOutcome(outcome);
        require(isFinal, EscrowNotFinal(outcome.batchId, outcome.position));
        require(
            settled.verdict == OutcomeRecordLib.ACCEPTED,
            EscrowNotAccepted(outcome.batchId, outcome.position, settled.verdict)
        );
        workerId = settled.workerId;
        (uint256 word, uint256 bit) = _slot(runId, workerId, settled.step, settled.index);
        uint256 bitmap = _paid[word];
        if (bitmap & bit != 0) {
            revert EscrowSlotPaid(runId, workers.workerById(workerId), settled.step, settled.index);
        }
        _paid[word] = bitmap | bit;
        units = settled.units;
    }

    // -------------------------------------------------------------------- views

    /// @inheritdoc IRewardEscrow
    function isPaid(uint64 runId, address worker, uint32 step, uint32 index) external view returns (bool) {
        (uint256 word, uint256 bit) = _slot(runId, workers.workerOf(worker).workerId, step, index);
        return _paid[word] & bit != 0;
    }

    /// @inheritdoc IRewardEscrow
    function fundsOf(uint64 runId) external view returns (uint256 funded, uint256 paid) {
        Funds storage funds = _funds[runId];
        return (funds.funded, funds.funded - funds.available);
    }

    /// @dev Returns the word and the bit that stand for a slot; different slots never share both.
    function _slot(uint64 runId, uint32 workerId, uint32 step, uint32 index)
        private
        pure
        returns (uint256 word, uint256 bit)
    {
        word = uint256(runId) << 96 | uint256(workerId) << 64 | uint256(step >> 4) << 32 | index >> 4;
        bit = uint256(1) << ((step & 15) << 4 | (index & 15));
    }
}
