// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {SafeERC20} from "@openzeppelin/contracts/token/ERC20/utils/SafeERC20.sol";
import {Math} from "@openzeppelin/contracts/utils/math/Math.sol";
import {SafeCast} from "@openzeppelin/contracts/utils/math/SafeCast.sol";

import {IContributionLedger} from "./interfaces/IContributionLedger.sol";
import {IDisputeCourt} from "./interfaces/IDisputeCourt.sol";
import {IJuryPool} from "./interfaces/IJuryPool.sol";
import {IMusterToken} from "./interfaces/IMusterToken.sol";
import {IRewardEscrow} from "./interfaces/IRewardEscrow.sol";
import {IRunRegistry} from "./interfaces/IRunRegistry.sol";
import {IStakeVault} from "./interfaces/IStakeVault.sol";
import {IWorkerRegistry} from "./interfaces/IWorkerRegistry.sol";
import {EscrowLib} from "./libraries/EscrowLib.sol";
import {OutcomeRecordLib} from "./libraries/OutcomeRecordLib.sol";
import {SourcesLib} from "./libraries/SourcesLib.sol";

/// @title The court of the network: jurors of no run vote a verdict
/// @dev No reentrancy guard: the token has no hooks, and state is written before every call out.
contract DisputeCourt is IDisputeCourt {
    using SafeERC20 for IMusterToken;
    using SafeCast for uint256;

    /// @dev Where the other contracts are.
    struct Network {
        IMusterToken token;
        IRunRegistry runs;
        IWorkerRegistry workers;
        IJuryPool jurors;
        IStakeVault vault;
        IContributionLedger ledger;
        IRewardEscrow escrow;
    }

    /// @dev What is kept of a juror besides its commitment.
    bytes32 private constant DRAWN = bytes32(uint256(1));
    uint256 private constant REVEALED = 2;
    bytes32 private constant PAID = bytes32(uint256(3));

    /// @dev The run whose stake is the jurors'.
    uint64 private constant BENCH = 0;

    /// @dev The reason FILE_UNAVAILABLE.
    uint8 private constant UNAVAILABLE = 15;

    /// @dev The reasons of check 1 of docs/protocol.md section 8. They depend on the file, the ticket, the signature and the
    ///      earlier batches that the committer of a batch shows, and it can show different ones to validators and to jurors.
    uint8 private constant FIRST_AS_SHOWN = 10;
    uint8 private constant LAST_AS_SHOWN = 19;

    /// @dev The reason SAMPLER_DRIFT, which rests on the earlier work of its worker that a validator was shown.
    uint8 private constant DRIFT = 71;

    /// @dev The reasons WRONG_REPLY and WRONG_REWARD. A Rejected with one of them says that a program may answer otherwise on
    ///      another machine or at another time; where it answers the same everywhere, the verdict is Fraud.
    uint8 private constant WRONG_REPLY = 33;
    uint8 private constant WRONG_REWARD = 40;

    /// @dev What marks a kind, where votes of that kind are counted once more for which honest judges may rule otherwise.
    uint16 private constant MAY_DIFFER = 1 << 15;

    uint256 private constant PPM = 1_000_000;
    /// @notice Claims of one case, and one more of the worker. Jurors do not vote for claims, so that nobody keeps a verdict
    ///         out by filling them.
    uint256 public constant MAX_CLAIMS = 16;

    /// @notice Blocks in which an announced claim can be made.
    uint256 public constant ANNOUNCEMENT_BLOCKS = 256;

    /// @notice The token that bonds are in.
    IMusterToken public immutable token;

    /// @notice The runs, whose validators and owners judge none of their own cases.
    IRunRegistry public immutable runs;

    /// @notice The registry that acquits workers.
    IWorkerRegistry public immutable workers;

    /// @notice The network's jurors.
    IJuryPool public immutable jurors;

    /// @notice The vault that restores stake and takes fines.
    IStakeVault public immutable vault;

    /// @notice The ledger whose outcomes are disputed.
    IContributionLedger public immutable ledger;

    /// @notice The escrow out of which runs pay jurors.
    IRewardEscrow public immutable escrow;

    uint256 private immutable _bond;
    uint256 private immutable _jurorFee;
    uint256 private immutable _drawDelay;
    uint256 private immutable _jurySize;
    uint256 private immutable _commitTime;
    uint256 private immutable _revealTime;
    uint256 private immutable _wrongVerdictPpm;
    uint256 private immutable _absencePpm;

    /// @notice The number of cases.
    uint32 public caseCount;

    mapping(bytes32 caseId => Case) private _cases;
    mapping(bytes32 caseId => Claim[]) private _claims;
    mapping(bytes32 caseId => mapping(address juror => bytes32)) private _votes;
    mapping(bytes32 caseId => mapping(uint16 kind => uint8)) private _tally;
    // The hash of the submission that opened a case, where its claim did not prove it.
    mapping(bytes32 caseId => bytes32) private _unproven;
    mapping(bytes32 announcement => uint256 blockNumber) private _announced;
    mapping(uint64 batchId => address payer) private _bonds;

    /// @param network Where the other contracts are; those deployed later by their predicted addresses.
    /// @param terms_ What the deployment fixes for ever.
    constructor(Network memory network, Terms memory terms_) {
        require(terms_.drawDelay != 0, CourtInvalidParameter("drawDelay"));
        require(terms_.jurySize != 0 && terms_.jurySize <= 64, CourtInvalidParameter("jurySize"));
        require(terms_.commitTime > 1, CourtInvalidParameter("commitTime"));
        require(terms_.revealTime != 0, CourtInvalidParameter("revealTime"));
        require(terms_.jurorFee * terms_.jurySize <= terms_.bond, CourtInvalidParameter("jurorFee"));
        require(terms_.wrongVerdictPpm <= PPM, CourtInvalidParameter("wrongVerdictPpm"));
        require(terms_.absencePpm <= PPM, CourtInvalidParameter("absencePpm"));
        token = network.token;
        runs = network.runs;
        workers = network.workers;
        jurors = network.jurors;
        vault = network.vault;
        ledger = network.ledger;
        escrow = network.escrow;
        _bond = terms_.bond;
        _jurorFee = terms_.jurorFee;
        _drawDelay = terms_.drawDelay;
        _jurySize = terms_.jurySize;
        _commitTime = terms_.commitTime;
        _revealTime = terms_.revealTime;
        _wrongVerdictPpm = terms_.wrongVerdictPpm;
        _absencePpm = terms_.absencePpm;
    }

    // ---------------------------------------------------------- announce, claim

    /// @inheritdoc IDisputeCourt
    function announce(bytes32 announcement) external {
        // A second announcement of the same would be a later one: whoever repeats another's changes nothing.
        uint256 announcedIn = _announced[announcement];
        if (announcedIn != 0 && block.number <= announcedIn + ANNOUNCEMENT_BLOCKS) return;
        _announced[announcement] = block.number;
        emit ClaimAnnounced(announcement, msg.sender);
    }

    /// @inheritdoc IDisputeCourt
    function claim(
        IContributionLedger.OutcomeProof calldata outcome,
        IContributionLedger.CommittedWork calldata work,
        uint16 ruling,
        bytes32 salt,
        string[] calldata sources
    ) external {
        IContributionLedger.Standing memory standing = _standingOf(outcome);
        bytes32 leaf = standing.leaf;
        uint16 recorded = _ruling(standing.outcome.verdict, standing.outcome.reason);
        require(_isVerdict(ruling) && !_isSame(ruling, recorded), CourtInvalidRuling(recorded, ruling));
        uint256 announcedIn = _requireAnnounced(leaf, ruling, salt);
        bool isHeld = ledger.requireEvidence(outcome, work);
        bool isFirst = _cases[leaf].status == CaseStatus.None;
        if (isFirst) {
            require(block.timestamp < standing.closesAt, CourtWindowClosed(leaf, standing.closesAt));
            _open(leaf, outcome.batch, outcome.position, work.submission, recorded);
            if (!isHeld) _unproven[leaf] = keccak256(abi.encode(work.submission));
        } else {
            _requireCommitPhase(leaf, _openCase(leaf));
        }
        _noteWork(leaf, work.submission, isHeld);
        if (isFirst) ledger.markDisputed(outcome.batch.batchId);
        // A juror that is a party could take itself out of a draw, or vote for its own claim.
        require(
            !jurors.mayBeDrawn(msg.sender, _cases[leaf].openedAt) && _hasRoom(leaf), CourtMayNotClaim(leaf, msg.sender)
        );
        _claims[leaf].push(Claim({claimant: msg.sender, ruling: ruling, announcedIn: announcedIn.toUint40()}));
        SourcesLib.check(sources);
        emit Claimed(leaf, msg.sender, ruling, work, sources);
        token.safeTransferFrom(msg.sender, address(this), _bond);
    }

    /// @dev A case is about what its batch is proven to hold, from the first proof on. In the second half of the time to
    ///      commit it is too late: jurors vote on what they were shown.
    function _noteWork(bytes32 caseId, IContributionLedger.Submission calldata submission, bool isHeld) private {
        Case storage about = _cases[caseId];
        require(isHeld || !about.isProven, CourtUnproven(caseId));
        if (about.isProven || !isHeld || block.timestamp >= _halfOf(about)) return;
        about.isProven = true;
        about.worker = submission.worker;
        about.tag = OutcomeRecordLib.tagOf(submission.step, submission.index);
    }

    function _halfOf(Case storage open) private view returns (uint256) {
        return open.openedAt + _commitTime / 2;
    }

    /// @dev One place more is the worker's, so that nobody keeps what it has to show from the jury.
    function _hasRoom(bytes32 caseId) private view returns (bool) {
        uint256 made = _claims[caseId].length;
        return made < MAX_CLAIMS || (made == MAX_CLAIMS && _isWorkerOrNode(_cases[caseId].worker));
    }

    function _isWorkerOrNode(address worker) private view returns (bool) {
        return msg.sender == worker || workers.workerOfNode(msg.sender) == worker;
    }

    function _requireAnnounced(bytes32 leaf, uint16 ruling, bytes32 salt) private view returns (uint256 announcedIn) {
        bytes32 announcement = keccak256(abi.encode(msg.sender, leaf, ruling, salt));
        announcedIn = _announced[announcement];
        require(
            announcedIn != 0 && announcedIn < block.number && block.number <= announcedIn + ANNOUNCEMENT_BLOCKS,
            CourtNotAnnounced(announcement)
        );
    }

    function _open(
        bytes32 caseId,
        IContributionLedger.Batch calldata batch,
        uint32 position,
        IContributionLedger.Submission calldata submission,
        uint16 recorded
    ) private {
        uint256 places = jurors.placeCount();
        require(places != 0, CourtNoJurors(caseId));
        uint256 drawBlock = block.number + _drawDelay;
        Case storage opened = _cases[caseId];
        opened.status = CaseStatus.Open;
        opened.recorded = recorded;
        opened.openedAt = block.timestamp.toUint40();
        opened.number = ++caseCount;
        opened.runId = batch.runId;
        opened.worker = submission.worker;
        opened.tag = OutcomeRecordLib.tagOf(submission.step, submission.index);
        opened.drawBlock = drawBlock.toUint40();
        opened.places = places.toUint32();
        emit CaseOpened(
            caseId, batch.batchId, batch.runId, opened.number, position, submission.worker, recorded, drawBlock, places
        );
    }

    // ------------------------------------------------------------------- summon

    /// @inheritdoc IDisputeCourt
    function summon(
        IContributionLedger.Batch calldata batch,
        IContributionLedger.Submission calldata submission,
        string[] calldata sources
    ) external {
        ledger.requireUnjudged(batch, submission);
        // Whoever wants the jury to see nothing must not be the one that calls it.
        require(_isWorkerOrNode(submission.worker), CourtUnauthorized(msg.sender));
        bytes32 caseId = summonsOf(batch.batchId);
        require(_cases[caseId].status == CaseStatus.None, CourtCaseExists(caseId));
        _open(caseId, batch, 0, submission, 0);
        SourcesLib.check(sources);
        emit Claimed(
            caseId,
            msg.sender,
            0,
            IContributionLedger.CommittedWork({submission: submission, nodeSignature: "", proof: new bytes32[](0)}),
            sources
        );
        if (_bonds[batch.batchId] == address(0)) _takeBond(batch.batchId, msg.sender);
    }

    // --------------------------------------------------------------------- draw

    /// @inheritdoc IDisputeCourt
    function draw(bytes32 caseId) external {
        Case storage drawn = _openCase(caseId);
        require(drawn.jurors == 0, CourtJuryDrawn(caseId));
        // Jurors have the other half to commit: nobody can draw them in the last second to see them fined for absence.
        uint256 drawEndsAt = _halfOf(drawn);
        require(block.timestamp < drawEndsAt, CourtPhaseOver(caseId, drawEndsAt));
        require(block.number > drawn.drawBlock, CourtTooEarlyToDraw(caseId, drawn.drawBlock));
        bytes32 beacon = blockhash(drawn.drawBlock);
        if (beacon == 0) return _postponeDraw(caseId, drawn);
        bytes32 seed = keccak256(abi.encode(beacon, caseId));
        address[] memory panel = jurors.draw(seed, drawn.places, drawn.openedAt, _jurySize, _excluded(drawn));
        require(panel.length != 0, CourtNoJurors(caseId));
        drawn.jurors = panel.length.toUint8();
        for (uint256 i = 0; i < panel.length; ++i) {
            _votes[caseId][panel[i]] = DRAWN;
        }
        emit JuryDrawn(caseId, panel);
    }

    function _postponeDraw(bytes32 caseId, Case storage drawn) private {
        uint256 drawBlock = block.number + _drawDelay;
        drawn.drawBlock = drawBlock.toUint40();
        emit DrawPostponed(caseId, drawBlock);
    }

    /// @dev Returns who may not judge: whoever sat in the run by the second in which the case opened, its owner and the
    ///      worker. None of it can be changed in a later second.
    function _excluded(Case storage drawn) private view returns (address[] memory excluded) {
        address[] memory seated = runs.everSeated(drawn.runId, drawn.openedAt);
        excluded = new address[](seated.length + 2);
        for (uint256 i = 0; i < seated.length; ++i) {
            excluded[i] = seated[i];
        }
        excluded[seated.length] = drawn.worker;
        excluded[seated.length + 1] = runs.ownerOf(drawn.runId);
    }

    // --------------------------------------------------------------------- vote

    /// @inheritdoc IDisputeCourt
    function commitVote(bytes32 caseId, bytes32 commitment) external {
        Case storage open = _openCase(caseId);
        _requireCommitPhase(caseId, open);
        // Until then a proof can change what the case is about.
        uint256 half = _halfOf(open);
        require(open.isProven || open.recorded == 0 || block.timestamp >= half, CourtPhaseOpen(caseId, half));
        require(_votes[caseId][msg.sender] == DRAWN, CourtNotJuror(caseId, msg.sender));
        // What is no hash stands for something else.
        require(uint256(commitment) > type(uint32).max, CourtVoteMismatch(caseId, msg.sender));
        _votes[caseId][msg.sender] = commitment;
        ++open.committed;
        emit VoteCommitted(caseId, msg.sender, commitment);
    }

    function _requireCommitPhase(bytes32 caseId, Case storage open) private view {
        uint256 endsAt = open.openedAt + _commitTime;
        require(block.timestamp < endsAt, CourtPhaseOver(caseId, endsAt));
    }

    /// @inheritdoc IDisputeCourt
    function revealVote(bytes32 caseId, uint16 ruling, bytes32 resultHash, bytes32 salt) external {
        Case storage open = _openCase(caseId);
        uint256 commitEndsAt = open.openedAt + _commitTime;
        require(block.timestamp >= commitEndsAt || open.committed == open.jurors, CourtPhaseOpen(caseId, commitEndsAt));
        uint256 endsAt = commitEndsAt + _revealTime;
        require(block.timestamp < endsAt, CourtPhaseOver(caseId, endsAt));
        bytes32 commitment = keccak256(abi.encode(caseId, msg.sender, ruling, resultHash, salt));
        require(_votes[caseId][msg.sender] == commitment, CourtVoteMismatch(caseId, msg.sender));
        require(ruling == 0 || _isVerdict(ruling), CourtInvalidRuling(open.recorded, ruling));
        _votes[caseId][msg.sender] = bytes32(uint256(ruling) << 8 | REVEALED);
        ++open.revealed;
        uint16 kind = _kindOf(ruling);
        uint8 votes = ++_tally[caseId][kind];
        if (votes > open.leadingVotes) {
            // The reason is that of the vote by which its kind took the lead.
            if (_kindOf(open.leading) != kind || votes == 1) open.leading = ruling;
            (open.leadingVotes, open.tied) = (votes, false);
        } else if (votes == open.leadingVotes) {
            open.tied = true;
        }
        if (kind != 0 && _mayDiffer(ruling)) ++_tally[caseId][kind | MAY_DIFFER];
        emit VoteRevealed(caseId, msg.sender, ruling, resultHash);
    }

    // ------------------------------------------------------------------- settle

    /// @inheritdoc IDisputeCourt
    function settle(IContributionLedger.OutcomeProof calldata outcome) external {
        IContributionLedger.Standing memory standing = _standingOf(outcome);
        bytes32 leaf = standing.leaf;
        (Case storage closing, bool decided) = _close(leaf);
        bool seen = decided && _isSeen(closing.leading);
        bool overturned = seen && !_isSame(closing.leading, closing.recorded);
        closing.status = overturned ? CaseStatus.Overturned : CaseStatus.Upheld;
        uint256 pot = _settleClaims(leaf, closing, decided, overturned);
        _payJurors(closing, decided ? closing.leadingVotes : 0, pot);
        if (overturned) _restore(outcome, standing.outcome, closing);
        emit CaseClosed(
            leaf, closing.status, overturned ? closing.leading : closing.recorded, closing.reporter, closing.fee
        );
    }

    /// @dev Returns an open case whose jury is done or out of time, and whether one ruling has most votes.
    function _close(bytes32 caseId) private view returns (Case storage closing, bool decided) {
        closing = _openCase(caseId);
        uint256 endsAt = closing.openedAt + juryTime();
        require(
            block.timestamp >= endsAt || (closing.jurors != 0 && closing.revealed == closing.jurors),
            CourtPhaseOpen(caseId, endsAt)
        );
        decided = closing.leadingVotes != 0 && !closing.tied;
    }

    /// @dev Returns the bonds of right claims, and those of all where the jury was of no one mind; returns what the jurors are
    ///      paid out of. The first to announce what the jury confirmed is the reporter. Where nobody claimed otherwise the run
    ///      pays the jurors of an overturned verdict; the first right claim pays what the run does not have, and everything
    ///      where the run's validators could not see the work: no decided case is free of charge.
    function _settleClaims(bytes32 caseId, Case storage closing, bool decided, bool overturned)
        private
        returns (uint256 pot)
    {
        Claim[] storage claims = _claims[caseId];
        if (decided) pot = _bond * (claims.length - _rightClaims(claims, closing, overturned));
        uint256 owed = 0;
        if (overturned && pot == 0) {
            pot = _jurorFee * closing.leadingVotes;
            owed = _isUnavailable(closing.recorded) ? pot : pot - _paidByRun(closing);
        }
        uint256 first = type(uint256).max;
        for (uint256 i = 0; i < claims.length; ++i) {
            Claim memory made = claims[i];
            bool right = overturned && _isSame(made.ruling, closing.leading);
            uint256 returned = right || !decided ? _bond : 0;
            if (right) (returned, owed) = (_bond - owed, 0);
            if (right && made.announcedIn < first) (first, closing.reporter) = (made.announcedIn, made.claimant);
            emit ClaimSettled(caseId, made.claimant, right, returned);
            if (returned != 0) token.safeTransfer(made.claimant, returned);
        }
    }

    function _rightClaims(Claim[] storage claims, Case storage closing, bool overturned)
        private
        view
        returns (uint256 count)
    {
        for (uint256 i = 0; overturned && i < claims.length; ++i) {
            if (_isSame(claims[i].ruling, closing.leading)) ++count;
        }
    }

    /// @dev Takes the jurors' fees from the run, as far as it has them.
    function _paidByRun(Case storage closing) private returns (uint256) {
        return escrow.payCourt(closing.runId, _jurorFee * closing.leadingVotes);
    }

    /// @dev Sets the jurors' fees aside and burns the rest of a pot.
    function _payJurors(Case storage closing, uint256 right, uint256 pot) private {
        uint256 fee = right == 0 ? 0 : Math.min(_jurorFee, pot / right);
        closing.fee = fee.toUint88();
        uint256 rest = pot - fee * right;
        if (rest != 0) token.burn(rest);
    }

    /// @dev Gives back what a wrong fraud verdict took. Anybody can execute a fraud that the jury found.
    function _restore(
        IContributionLedger.OutcomeProof calldata outcome,
        IContributionLedger.Outcome memory recorded,
        Case storage closing
    ) private {
        if (recorded.verdict != OutcomeRecordLib.FRAUD) return;
        bool exact = OutcomeRecordLib.isExact(recorded.verdict, recorded.reason);
        IStakeVault.Verdict memory verdict = IStakeVault.Verdict({
            runId: outcome.batch.runId,
            owner: closing.worker,
            offence: exact ? IStakeVault.Offence.ExactFraud : IStakeVault.Offence.Fraud,
            tag: closing.tag,
            batchId: outcome.batch.batchId,
            position: outcome.position
        });
        if (!vault.restore(verdict)) return;
        bytes32 escrowId = EscrowLib.idOf(verdict);
        workers.acquit(verdict.runId, verdict.owner, escrowId, exact);
    }

    /// @inheritdoc IDisputeCourt
    function prove(IContributionLedger.OutcomeProof calldata outcome, IContributionLedger.CommittedWork calldata work)
        external
    {
        bytes32 caseId = _standingOf(outcome).leaf;
        Case storage closed = _closedCase(caseId);
        require(
            _unproven[caseId] == keccak256(abi.encode(work.submission)) && ledger.requireEvidence(outcome, work),
            CourtUnproven(caseId)
        );
        closed.isProven = true;
        emit CaseProven(caseId);
    }

    /// @inheritdoc IDisputeCourt
    function settleSummoned(
        IContributionLedger.Batch calldata batch,
        IContributionLedger.Submission calldata submission
    ) external {
        bytes32 caseId = summonsOf(batch.batchId);
        (Case storage closing, bool decided) = _close(caseId);
        require(ledger.commitmentOf(batch.batchId) != 0, CourtBondHeld(batch.batchId));
        bool seen = decided && _isSeen(closing.leading);
        bool accepted = seen && _verdictOf(closing.leading) == OutcomeRecordLib.ACCEPTED;
        closing.status = seen ? CaseStatus.Overturned : CaseStatus.Upheld;
        address payer = _bonds[batch.batchId];
        delete _bonds[batch.batchId];
        bool lost = decided && !accepted;
        uint256 pot = lost ? _bond : accepted ? _jurorFee * closing.leadingVotes : 0;
        uint256 owed = accepted ? pot - _paidByRun(closing) : 0;
        _payJurors(closing, decided ? closing.leadingVotes : 0, pot);
        emit CaseClosed(caseId, closing.status, seen ? closing.leading : 0, address(0), closing.fee);
        if (seen) ledger.judge(batch, submission, _verdictOf(closing.leading), _reasonOf(closing.leading));
        if (!lost) _returnBond(batch.batchId, payer, _bond - owed);
    }

    // -------------------------------------------------------------- fees, fines

    /// @inheritdoc IDisputeCourt
    function collectFee(bytes32 caseId, address juror) external {
        Case storage closed = _closedCase(caseId);
        uint256 fee = closed.fee;
        uint256 vote = uint256(_votes[caseId][juror]);
        bool right = _isRevealed(vote) && _kindOf(_votedIn(vote)) == _kindOf(closed.leading);
        require(fee != 0 && right, CourtNothingDue(caseId, juror));
        _votes[caseId][juror] = PAID;
        emit FeeCollected(caseId, juror, fee);
        token.safeTransfer(juror, fee);
    }

    /// @inheritdoc IDisputeCourt
    function fineSigner(IContributionLedger.OutcomeProof calldata outcome, address validator) external {
        IContributionLedger.Standing memory standing = _standingOf(outcome);
        Case storage lost = _cases[standing.leaf];
        uint64 runId = outcome.batch.runId;
        require(
            lost.status == CaseStatus.Overturned && !_sparesSigners(standing.leaf, lost)
                && runs.seatBitOf(runId, validator) & outcome.batch.signers != 0,
            CourtNothingDue(standing.leaf, validator)
        );
        require(lost.isProven, CourtUnproven(standing.leaf));
        uint256 amount = vault.slash(
            runId, validator, IStakeVault.Offence.WrongVerdict, outcome.batch.batchId, _wrongVerdictPpm, lost.reporter
        );
        emit Fined(standing.leaf, validator, amount);
    }

    /// @dev Returns whether honest judges may rule otherwise than the record, or than most of the votes for what stands now.
    function _sparesSigners(bytes32 caseId, Case storage lost) private view returns (bool) {
        uint256 differing = _tally[caseId][_kindOf(lost.leading) | MAY_DIFFER];
        return _mayDiffer(lost.recorded) || 2 * differing > lost.leadingVotes;
    }

    /// @inheritdoc IDisputeCourt
    function fineAbsentJuror(bytes32 caseId, address juror) external {
        Case storage closed = _closedCase(caseId);
        bytes32 vote = _votes[caseId][juror];
        bool absent = vote != 0 && vote != PAID && !_isRevealed(uint256(vote));
        require(absent, CourtNothingDue(caseId, juror));
        uint256 amount =
            vault.slash(BENCH, juror, IStakeVault.Offence.AbsentJuror, closed.number, _absencePpm, address(0));
        emit Fined(caseId, juror, amount);
    }

    // -------------------------------------------------------------------- bonds

    /// @inheritdoc IDisputeCourt
    function takeBond(uint64 batchId, address payer) external {
        require(msg.sender == address(ledger), CourtUnauthorized(msg.sender));
        _takeBond(batchId, payer);
    }

    function _takeBond(uint64 batchId, address payer) private {
        _bonds[batchId] = payer;
        emit BondTaken(batchId, payer, _bond);
        token.safeTransferFrom(payer, address(this), _bond);
    }

    /// @inheritdoc IDisputeCourt
    function returnBond(IContributionLedger.Batch calldata batch) external {
        uint64 batchId = batch.batchId;
        address payer = _bonds[batchId];
        require(payer != address(0) && _isOver(batch), CourtBondHeld(batchId));
        delete _bonds[batchId];
        _returnBond(batchId, payer, _bond);
    }

    /// @dev Returns whether a batch is judged or void.
    function _isOver(IContributionLedger.Batch calldata batch) private view returns (bool) {
        if (ledger.commitmentOf(batch.batchId) == 0) return true;
        ledger.isDisputed(batch); // reverts unless the header is the batch's
        return batch.status == IContributionLedger.BatchStatus.Judged;
    }

    function _returnBond(uint64 batchId, address payer, uint256 amount) private {
        emit BondReturned(batchId, payer, amount);
        token.safeTransfer(payer, amount);
    }

    // -------------------------------------------------------------------- views

    /// @inheritdoc IDisputeCourt
    function summonsOf(uint64 batchId) public pure returns (bytes32) {
        return keccak256(abi.encode("muster.summons", batchId));
    }

    /// @inheritdoc IDisputeCourt
    function isSummoned(uint64 batchId) external view returns (bool) {
        return _cases[summonsOf(batchId)].status == CaseStatus.Open;
    }

    /// @inheritdoc IDisputeCourt
    function caseOf(bytes32 caseId) external view returns (Case memory) {
        return _cases[caseId];
    }

    /// @inheritdoc IDisputeCourt
    function claimsOf(bytes32 caseId) external view returns (Claim[] memory) {
        return _claims[caseId];
    }

    /// @inheritdoc IDisputeCourt
    function bondOf(uint64 batchId) external view returns (address) {
        return _bonds[batchId];
    }

    /// @inheritdoc IDisputeCourt
    function voteOf(bytes32 caseId, address juror) external view returns (bytes32) {
        return _votes[caseId][juror];
    }

    /// @inheritdoc IDisputeCourt
    function subjectOf(bytes32 leaf) external view returns (address worker, uint64 tag, address reporter) {
        Case storage about = _cases[leaf];
        return (about.worker, about.tag, about.reporter);
    }

    /// @inheritdoc IDisputeCourt
    function isProven(bytes32 leaf) external view returns (bool) {
        return _cases[leaf].isProven;
    }

    /// @inheritdoc IDisputeCourt
    function isOpen(bytes32 leaf) external view returns (bool) {
        return _cases[leaf].status == CaseStatus.Open;
    }

    /// @inheritdoc IDisputeCourt
    function rulingOf(bytes32 leaf, uint8 verdict, uint8 reason) external view returns (uint8, uint8) {
        Case storage judged = _cases[leaf];
        if (judged.status != CaseStatus.Overturned) return (verdict, reason);
        return (_verdictOf(judged.leading), _reasonOf(judged.leading));
    }

    /// @inheritdoc IDisputeCourt
    function terms() external view returns (Terms memory) {
        return Terms({
            bond: _bond,
            jurorFee: _jurorFee,
            drawDelay: _drawDelay,
            jurySize: _jurySize,
            commitTime: _commitTime,
            revealTime: _revealTime,
            wrongVerdictPpm: _wrongVerdictPpm,
            absencePpm: _absencePpm
        });
    }

    /// @inheritdoc IDisputeCourt
    function juryTime() public view returns (uint256) {
        return _commitTime + _revealTime;
    }

    // ------------------------------------------------------------------ rulings

    function _ruling(uint8 verdict, uint8 reason) private pure returns (uint16) {
        return uint16(verdict) << 8 | reason;
    }

    function _isVerdict(uint16 ruling) private pure returns (bool) {
        uint8 verdict = _verdictOf(ruling);
        return verdict >= OutcomeRecordLib.ACCEPTED && verdict <= OutcomeRecordLib.FRAUD;
    }

    /// @dev Returns whether jurors saw what they judged.
    function _isSeen(uint16 ruling) private pure returns (bool) {
        return ruling != 0 && !_isUnavailable(ruling);
    }

    /// @dev Returns whether a ruling says that a file could not be had.
    function _isUnavailable(uint16 ruling) private pure returns (bool) {
        return _reasonOf(ruling) == UNAVAILABLE && _mayDiffer(ruling);
    }

    /// @dev Returns whether honest judges may rule otherwise: the ruling depends on what the committer of the batch showed, or
    ///      on where and when a program ran. Whoever accepts or convicts saw all.
    function _mayDiffer(uint16 ruling) private pure returns (bool) {
        uint8 verdict = _verdictOf(ruling);
        uint8 reason = _reasonOf(ruling);
        if (verdict == OutcomeRecordLib.ACCEPTED) return false;
        if (reason == DRIFT) return true;
        bool isAsShown = reason >= FIRST_AS_SHOWN && reason <= LAST_AS_SHOWN;
        bool isByProgram = reason == WRONG_REPLY || reason == WRONG_REWARD;
        return (isAsShown || isByProgram) && verdict != OutcomeRecordLib.FRAUD;
    }

    /// @dev Returns whether what is kept of a juror is a revealed vote; commitments are larger.
    function _isRevealed(uint256 vote) private pure returns (bool) {
        return vote <= type(uint32).max && vote & 0xff == REVEALED;
    }

    /// @dev Returns a number that rulings share whose votes are counted together: they have the same consequences, or all
    ///      say that the work was not seen.
    function _kindOf(uint16 ruling) private pure returns (uint16) {
        if (!_isSeen(ruling)) return 0;
        return uint16(_verdictOf(ruling)) << 1 | (_isExact(ruling) ? 1 : 0);
    }

    /// @dev Returns whether two rulings have the same consequences.
    function _isSame(uint16 a, uint16 b) private pure returns (bool) {
        return _verdictOf(a) == _verdictOf(b) && _isExact(a) == _isExact(b);
    }

    function _isExact(uint16 ruling) private pure returns (bool) {
        return OutcomeRecordLib.isExact(_verdictOf(ruling), _reasonOf(ruling));
    }

    // Cutting off is the purpose: each cast keeps one half.
    // forge-lint: disable-start(unsafe-typecast)
    function _verdictOf(uint16 ruling) private pure returns (uint8) {
        return uint8(ruling >> 8);
    }

    function _reasonOf(uint16 ruling) private pure returns (uint8) {
        return uint8(ruling);
    }

    function _votedIn(uint256 revealed) private pure returns (uint16) {
        return uint16(revealed >> 8);
    }

    // forge-lint: disable-end(unsafe-typecast)

    /// @dev One place for the call: its encoding is large.
    function _standingOf(IContributionLedger.OutcomeProof calldata outcome)
        private
        view
        returns (IContributionLedger.Standing memory)
    {
        return ledger.standingOf(outcome);
    }

    function _openCase(bytes32 caseId) private view returns (Case storage open) {
        open = _cases[caseId];
        require(open.status == CaseStatus.Open, CourtNoOpenCase(caseId, uint8(open.status)));
    }

    function _closedCase(bytes32 caseId) private view returns (Case storage closed) {
        closed = _cases[caseId];
        require(closed.status > CaseStatus.Open, CourtPhaseOpen(caseId, closed.openedAt + juryTime()));
    }
}
