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
import {JuryLib} from "./libraries/JuryLib.sol";
import {OutcomeRecordLib} from "./libraries/OutcomeRecordLib.sol";

/// @title Bonded challenges to outcomes, decided by a jury
/// @dev No reentrancy guard: the token has no hooks, and state is written before every call out.
contract DisputeCourt is IDisputeCourt {
    using SafeERC20 for IMusterToken;
    using SafeCast for uint256;
    using OutcomeRecordLib for IContributionLedger.Outcome;

    /// @dev What a commitment becomes once its vote is revealed.
    bytes32 private constant REVEALED = bytes32(uint256(1));

    /// @notice The token that bonds are in.
    IMusterToken public immutable token;

    /// @notice The runs, whose validators are the jurors.
    IRunRegistry public immutable runs;

    /// @notice The registry that acquits workers.
    IWorkerRegistry public immutable workers;

    /// @notice The vault that restores and holds stake.
    IStakeVault public immutable vault;

    /// @notice The ledger whose outcomes are challenged.
    IContributionLedger public immutable ledger;

    uint256 private immutable _challengeBond;
    uint256 private immutable _drawDelay;
    uint256 private immutable _jurySize;
    uint256 private immutable _commitTime;
    uint256 private immutable _revealTime;

    mapping(bytes32 leaf => Case) private _cases;
    mapping(bytes32 leaf => mapping(address juror => bytes32)) private _commitments;

    /// @param vault_ StakeVault, by its predicted address.
    /// @param terms_ What the deployment fixes for ever.
    constructor(
        IMusterToken token_,
        IRunRegistry runs_,
        IWorkerRegistry workers_,
        IStakeVault vault_,
        IContributionLedger ledger_,
        Terms memory terms_
    ) {
        require(terms_.drawDelay != 0, CourtInvalidParameter("drawDelay"));
        require(terms_.jurySize != 0, CourtInvalidParameter("jurySize"));
        require(terms_.commitTime != 0, CourtInvalidParameter("commitTime"));
        require(terms_.revealTime != 0, CourtInvalidParameter("revealTime"));
        token = token_;
        runs = runs_;
        workers = workers_;
        vault = vault_;
        ledger = ledger_;
        _challengeBond = terms_.challengeBond;
        _drawDelay = terms_.drawDelay;
        _jurySize = terms_.jurySize;
        _commitTime = terms_.commitTime;
        _revealTime = terms_.revealTime;
    }

    // ---------------------------------------------------------------- challenge

    /// @inheritdoc IDisputeCourt
    function challenge(IContributionLedger.OutcomeProof calldata outcome, uint8 claimedVerdict) external {
        IContributionLedger.Standing memory standing = _standingOf(outcome);
        bytes32 leaf = standing.leaf;
        uint8 recorded = standing.outcome.verdict;
        require(block.timestamp < standing.closesAt, CourtWindowClosed(leaf, standing.closesAt));
        require(
            claimedVerdict != recorded && claimedVerdict >= OutcomeRecordLib.ACCEPTED
                && claimedVerdict <= OutcomeRecordLib.FRAUD,
            CourtInvalidClaim(recorded, claimedVerdict)
        );
        require(_cases[leaf].status == CaseStatus.None, CourtCaseExists(leaf));
        uint256 drawBlock = block.number + _drawDelay;
        _open(leaf, outcome.batch, recorded, claimedVerdict, drawBlock);
        emit CaseOpened(leaf, outcome.batch.batchId, msg.sender, outcome.position, recorded, claimedVerdict, drawBlock);
        ledger.markDisputed(outcome.batch.batchId);
        vault.openCase(workers.workerById(standing.outcome.workerId));
        token.safeTransferFrom(msg.sender, address(this), _challengeBond);
    }

    function _open(
        bytes32 leaf,
        IContributionLedger.Batch calldata batch,
        uint8 recorded,
        uint8 claimed,
        uint256 drawBlock
    ) private {
        Case storage opened = _cases[leaf];
        opened.challenger = msg.sender;
        opened.batchId = batch.batchId;
        opened.recordedVerdict = recorded;
        opened.claimedVerdict = claimed;
        opened.status = CaseStatus.Open;
        opened.runId = batch.runId;
        opened.openedAt = block.timestamp.toUint40();
        opened.drawBlock = drawBlock.toUint32();
    }

    // --------------------------------------------------------------------- draw

    /// @inheritdoc IDisputeCourt
    function drawJury(IContributionLedger.OutcomeProof calldata outcome) external {
        IContributionLedger.Standing memory standing = _standingOf(outcome);
        bytes32 leaf = standing.leaf;
        Case storage drawn = _openCase(leaf);
        require(drawn.jury == 0, CourtJuryDrawn(leaf));
        // Jurors have the other half to commit: nobody can draw them in the last second to see them slashed for absence.
        uint256 drawEndsAt = drawn.openedAt + _commitTime / 2;
        require(block.timestamp < drawEndsAt, CourtPhaseOver(leaf, drawEndsAt));
        require(block.number > drawn.drawBlock, CourtTooEarlyToDraw(leaf, drawn.drawBlock));
        bytes32 beacon = blockhash(drawn.drawBlock);
        if (beacon == 0) return _postponeDraw(leaf, drawn);
        bytes32 seed = keccak256(abi.encode(beacon, leaf));
        (address[] memory jurors, uint88 seats) = _draw(drawn, outcome.batch.signers, standing.outcome.workerId, seed);
        require(seats != 0, CourtNoJurors(leaf));
        drawn.jury = seats;
        emit JuryDrawn(leaf, seats, jurors);
    }

    function _postponeDraw(bytes32 leaf, Case storage drawn) private {
        uint256 drawBlock = block.number + _drawDelay;
        drawn.drawBlock = drawBlock.toUint32();
        emit DrawPostponed(leaf, drawBlock);
    }

    /// @dev Returns jurors drawn by stake among the validators that are neither signers nor a party.
    function _draw(Case storage drawn, uint88 signers, uint32 workerId, bytes32 seed)
        private
        view
        returns (address[] memory jurors, uint88 seats)
    {
        (address[] memory accounts, uint88[] memory bits) = runs.validatorsOf(drawn.runId);
        (address challenger, address worker) = (drawn.challenger, workers.workerById(workerId));
        uint256[] memory weights = new uint256[](accounts.length);
        for (uint256 i = 0; i < accounts.length; ++i) {
            address account = accounts[i];
            if (bits[i] & signers != 0 || account == challenger || account == worker) continue;
            weights[i] = vault.activeStake(account);
        }
        uint256[] memory places = JuryLib.draw(weights, _jurySize, seed);
        jurors = new address[](places.length);
        for (uint256 i = 0; i < places.length; ++i) {
            jurors[i] = accounts[places[i]];
            seats |= bits[places[i]];
        }
    }

    // --------------------------------------------------------------------- vote

    /// @inheritdoc IDisputeCourt
    function commitVote(bytes32 leaf, bytes32 commitment) external {
        Case storage open = _openCase(leaf);
        uint256 endsAt = open.openedAt + _commitTime;
        require(block.timestamp < endsAt, CourtPhaseOver(leaf, endsAt));
        _requireJuror(leaf, open, msg.sender);
        require(
            _commitments[leaf][msg.sender] == 0 && commitment != 0 && commitment != REVEALED,
            CourtVoteMismatch(leaf, msg.sender)
        );
        _commitments[leaf][msg.sender] = commitment;
        ++open.committed;
        emit VoteCommitted(leaf, msg.sender, commitment);
    }

    /// @inheritdoc IDisputeCourt
    function revealVote(bytes32 leaf, bool overturn, bytes32 resultHash, bytes32 salt) external {
        Case storage open = _openCase(leaf);
        uint256 commitEndsAt = open.openedAt + _commitTime;
        require(
            block.timestamp >= commitEndsAt || open.committed == _sizeOf(open.jury), CourtPhaseOpen(leaf, commitEndsAt)
        );
        uint256 endsAt = commitEndsAt + _revealTime;
        require(block.timestamp < endsAt, CourtPhaseOver(leaf, endsAt));
        bytes32 commitment = keccak256(abi.encode(leaf, msg.sender, overturn, resultHash, salt));
        require(_commitments[leaf][msg.sender] == commitment, CourtVoteMismatch(leaf, msg.sender));
        _commitments[leaf][msg.sender] = REVEALED;
        if (overturn) ++open.votesToOverturn;
        else ++open.votesToUphold;
        emit VoteRevealed(leaf, msg.sender, overturn, resultHash);
    }

    function _requireJuror(bytes32 leaf, Case storage judged, address account) private view {
        require(runs.seatBitOf(judged.runId, account) & judged.jury != 0, CourtNotJuror(leaf, account));
    }

    // -------------------------------------------------------------------- close

    /// @inheritdoc IDisputeCourt
    function close(IContributionLedger.OutcomeProof calldata outcome) external {
        IContributionLedger.Standing memory standing = _standingOf(outcome);
        bytes32 leaf = standing.leaf;
        Case storage closing = _openCase(leaf);
        uint256 endsAt = closing.openedAt + juryTime();
        (uint256 forIt, uint256 against) = (closing.votesToOverturn, closing.votesToUphold);
        require(
            block.timestamp >= endsAt || (closing.jury != 0 && forIt + against == _sizeOf(closing.jury)),
            CourtPhaseOpen(leaf, endsAt)
        );
        bool overturned = forIt > against;
        closing.status = overturned ? CaseStatus.Overturned : CaseStatus.Upheld;
        uint256 returned = forIt >= against ? _challengeBond : 0;
        emit CaseClosed(leaf, overturned, overturned ? closing.claimedVerdict : closing.recordedVerdict, returned);

        address worker = workers.workerById(standing.outcome.workerId);
        vault.closeCase(worker);
        if (overturned) _enforce(standing, worker, closing.claimedVerdict);
        if (returned != 0) token.safeTransfer(closing.challenger, returned);
        else token.burn(_challengeBond);
    }

    /// @dev Makes an overturned verdict felt: gives back what a fraud verdict took, or keeps the stake of a worker
    ///      that turned out to be a fraud until anybody can execute that.
    function _enforce(IContributionLedger.Standing memory standing, address worker, uint8 verdict) private {
        if (verdict == OutcomeRecordLib.FRAUD) {
            vault.hold(worker, block.timestamp + ledger.challengeWindow() + runs.slashPause());
        } else if (vault.escrowOf(standing.offence).status == IStakeVault.EscrowStatus.Held) {
            vault.restore(standing.offence);
            workers.acquit(worker, standing.offence, standing.outcome.isExactFraud());
        }
    }

    // -------------------------------------------------------------------- views

    /// @inheritdoc IDisputeCourt
    function caseOf(bytes32 leaf) external view returns (Case memory) {
        return _cases[leaf];
    }

    /// @inheritdoc IDisputeCourt
    function challengerOf(bytes32 leaf) external view returns (address) {
        return _cases[leaf].challenger;
    }

    /// @inheritdoc IDisputeCourt
    function commitmentOf(bytes32 leaf, address juror) external view returns (bytes32) {
        return _commitments[leaf][juror];
    }

    /// @inheritdoc IDisputeCourt
    function isOpen(bytes32 leaf) external view returns (bool) {
        return _cases[leaf].status == CaseStatus.Open;
    }

    /// @inheritdoc IDisputeCourt
    function effectiveVerdict(bytes32 leaf, uint8 recorded) external view returns (uint8) {
        Case storage judged = _cases[leaf];
        return judged.status == CaseStatus.Overturned ? judged.claimedVerdict : recorded;
    }

    /// @inheritdoc IDisputeCourt
    function terms() external view returns (Terms memory) {
        return Terms({
            challengeBond: _challengeBond,
            drawDelay: _drawDelay,
            jurySize: _jurySize,
            commitTime: _commitTime,
            revealTime: _revealTime
        });
    }

    /// @inheritdoc IDisputeCourt
    function juryTime() public view returns (uint256) {
        return _commitTime + _revealTime;
    }

    /// @dev One place for the call: its encoding is large.
    function _standingOf(IContributionLedger.OutcomeProof calldata outcome)
        private
        view
        returns (IContributionLedger.Standing memory)
    {
        return ledger.standingOf(outcome);
    }

    function _openCase(bytes32 leaf) private view returns (Case storage open) {
        open = _cases[leaf];
        require(open.status == CaseStatus.Open, CourtNoOpenCase(leaf, uint8(open.status)));
    }

    /// @dev Returns how many seats a set has.
    function _sizeOf(uint88 seats) private pure returns (uint256 size) {
        for (uint256 rest = seats; rest != 0; rest &= rest - 1) {
            ++size;
        }
    }
}
