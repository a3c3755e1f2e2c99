// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {SafeERC20} from "@openzeppelin/contracts/token/ERC20/utils/SafeERC20.sol";
import {SafeCast} from "@openzeppelin/contracts/utils/math/SafeCast.sol";

import {IContributionLedger} from "./interfaces/IContributionLedger.sol";
import {IDisputeCourt} from "./interfaces/IDisputeCourt.sol";
import {IMusterToken} from "./interfaces/IMusterToken.sol";
import {IRunRegistry} from "./interfaces/IRunRegistry.sol";
import {IStakeVault} from "./interfaces/IStakeVault.sol";
import {IWorkerRegistry} from "./interfaces/IWorkerRegistry.sol";
import {OutcomeRecordLib} from "./libraries/OutcomeRecordLib.sol";

/// @title Bonded challenges to outcomes, decided by the run's other validators
contract DisputeCourt is IDisputeCourt {
    using SafeERC20 for IMusterToken;
    using SafeCast for uint256;

    /// @dev A case in storage.
    struct StoredCase {
        Case public_;
        // Seats that signed the outcome, and seats that voted.
        uint88 signers;
        uint88 voted;
    }

    /// @notice The token that bonds are in.
    IMusterToken public immutable token;

    /// @notice The runs, whose validators are the jurors.
    IRunRegistry public immutable runs;

    /// @notice The registry that reinstates workers.
    IWorkerRegistry public immutable workers;

    /// @notice The vault that restores stake.
    IStakeVault public immutable vault;

    /// @notice The ledger whose outcomes are challenged.
    IContributionLedger public immutable ledger;

    /// @inheritdoc IDisputeCourt
    uint256 public immutable challengeBond;

    /// @inheritdoc IDisputeCourt
    uint256 public immutable juryTime;

    mapping(bytes32 leaf => StoredCase) private _cases;

    /// @param vault_ StakeVault, by its predicted address.
    /// @param challengeBond_ Token wei that a challenger puts up.
    /// @param juryTime_ Seconds a jury has.
    constructor(
        IMusterToken token_,
        IRunRegistry runs_,
        IWorkerRegistry workers_,
        IStakeVault vault_,
        IContributionLedger ledger_,
        uint256 challengeBond_,
        uint256 juryTime_
    ) {
        token = token_;
        runs = runs_;
        workers = workers_;
        vault = vault_;
        ledger = ledger_;
        challengeBond = challengeBond_;
        juryTime = juryTime_;
    }

    // ---------------------------------------------------------------- challenge

    /// @inheritdoc IDisputeCourt
    function challenge(IContributionLedger.OutcomeProof calldata outcome, uint8 claimedVerdict) external {
        (IContributionLedger.Outcome memory judged, bytes32 leaf) = ledger.outcomeOf(outcome);
        IContributionLedger.Batch memory batch = ledger.batchOf(outcome.batchId);
        uint256 closesAt = batch.postedAt + ledger.challengeWindow();
        require(block.timestamp < closesAt, CourtWindowClosed(outcome.batchId, closesAt));
        require(
            claimedVerdict != judged.verdict && claimedVerdict >= OutcomeRecordLib.ACCEPTED
                && claimedVerdict <= OutcomeRecordLib.FRAUD,
            CourtInvalidClaim(judged.verdict, claimedVerdict)
        );
        StoredCase storage stored = _cases[leaf];
        require(stored.public_.challenger == address(0), CourtCaseExists(leaf));

        stored.signers = ledger.signersOf(outcome.batchId);
        Case storage opened = stored.public_;
        opened.challenger = msg.sender;
        opened.runId = batch.runId;
        opened.votingEndsAt = (block.timestamp + juryTime).toUint64();
        opened.recordedVerdict = judged.verdict;
        opened.claimedVerdict = claimedVerdict;
        opened.bond = challengeBond.toUint128();
        emit CaseOpened(leaf, outcome.batchId, msg.sender, outcome.position, claimedVerdict, challengeBond);
        ledger.markDisputed(outcome.batchId);
        token.safeTransferFrom(msg.sender, address(this), challengeBond);
    }

    // --------------------------------------------------------------------- vote

    /// @inheritdoc IDisputeCourt
    function vote(bytes32 leaf, bool overturn) external {
        StoredCase storage stored = _cases[leaf];
        Case storage open = stored.public_;
        _requireOpen(leaf);
        require(block.timestamp < open.votingEndsAt, CourtVotingOver(leaf, open.votingEndsAt));
        (uint8 seat, bool seated) = runs.seatOf(open.runId, msg.sender);
        uint88 bit = uint88(1) << seat;
        require(
            seated && msg.sender != open.challenger && (stored.signers | stored.voted) & bit == 0,
            CourtNotJuror(leaf, msg.sender)
        );
        stored.voted |= bit;
        if (overturn) ++open.votesToOverturn;
        else ++open.votesToUphold;
        emit CaseVoted(leaf, msg.sender, overturn);
    }

    // -------------------------------------------------------------------- close

    /// @inheritdoc IDisputeCourt
    function close(IContributionLedger.OutcomeProof calldata outcome) external {
        (, bytes32 leaf) = ledger.outcomeOf(outcome);
        _requireOpen(leaf);
        Case storage closing = _cases[leaf].public_;
        require(
            block.timestamp >= closing.votingEndsAt || _missingJurors(leaf) == 0,
            CourtVotingOpen(leaf, closing.votingEndsAt)
        );
        (uint8 forIt, uint8 against) = (closing.votesToOverturn, closing.votesToUphold);
        bool overturned = forIt > against;
        bool returned = overturned || forIt + against == 0;
        uint256 bond = closing.bond;
        uint8 verdict = overturned ? closing.claimedVerdict : closing.recordedVerdict;

        closing.closed = true;
        closing.overturned = overturned;
        emit CaseClosed(leaf, overturned, verdict, returned ? bond : 0);
        if (overturned) _undoFraud(leaf);
        if (returned) token.safeTransfer(closing.challenger, bond);
        else token.burn(bond);
    }

    /// @dev Gives back stake and status if this outcome was executed as fraud.
    function _undoFraud(bytes32 leaf) private {
        IStakeVault.Escrow memory escrow = vault.escrowOf(leaf);
        if (escrow.owner == address(0)) return;
        // Nothing is held when the worker had nothing left to slash.
        if (escrow.amount != 0) vault.restore(leaf);
        workers.reinstate(escrow.owner, leaf);
    }

    /// @dev Returns the seats that may vote and have not.
    function _missingJurors(bytes32 leaf) private view returns (uint88 missing) {
        StoredCase storage stored = _cases[leaf];
        uint64 runId = stored.public_.runId;
        missing = runs.seatsOf(runId) & ~(stored.signers | stored.voted);
        (uint8 seat, bool seated) = runs.seatOf(runId, stored.public_.challenger);
        if (seated) missing &= ~(uint88(1) << seat);
    }

    // -------------------------------------------------------------------- views

    /// @inheritdoc IDisputeCourt
    function caseOf(bytes32 leaf) external view returns (Case memory) {
        return _cases[leaf].public_;
    }

    /// @inheritdoc IDisputeCourt
    function isOpen(bytes32 leaf) external view returns (bool) {
        return _isOpen(leaf);
    }

    /// @inheritdoc IDisputeCourt
    function effectiveVerdict(bytes32 leaf, uint8 recorded) external view returns (uint8) {
        Case storage judged = _cases[leaf].public_;
        return judged.overturned ? judged.claimedVerdict : recorded;
    }

    function _isOpen(bytes32 leaf) private view returns (bool) {
        Case storage existing = _cases[leaf].public_;
        return existing.challenger != address(0) && !existing.closed;
    }

    function _requireOpen(bytes32 leaf) private view {
        require(_isOpen(leaf), CourtNoOpenCase(leaf));
    }
}
