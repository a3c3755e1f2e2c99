// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IContributionLedger} from "../../src/interfaces/IContributionLedger.sol";
import {IDisputeCourt} from "../../src/interfaces/IDisputeCourt.sol";
import {IFaultCourt} from "../../src/interfaces/IFaultCourt.sol";
import {IRewardEscrow} from "../../src/interfaces/IRewardEscrow.sol";
import {IRunRegistry} from "../../src/interfaces/IRunRegistry.sol";
import {IStakeVault} from "../../src/interfaces/IStakeVault.sol";
import {IWorkerRegistry} from "../../src/interfaces/IWorkerRegistry.sol";
import {Stage} from "./Stage.sol";

/// @title Random life of a network: workers, validators, jurors, a challenger, a trainer and a run's owner
/// @dev Each action picks valid arguments, or returns when there are none, so that nothing may revert. Where the rules
///      say whether a call succeeds, the action tries it either way and notes a sin when they disagree.
abstract contract Handler is Stage {
    bytes32 private constant RESULT = keccak256("what the juror recomputed");
    bytes32 private constant SALT = keccak256("salt");

    /// @dev When a jury found fraud in an outcome.
    mapping(bytes32 leaf => uint256) private _foundAt;

    /// @dev Outcomes that were seen to be final.
    mapping(bytes32 leaf => bool) private _wasFinal;

    // -------------------------------------------------------------------- stake

    function deposit(uint256 who, uint256 amount) external recorded {
        address account = person(who);
        uint256 balance = token.balanceOf(account);
        if (balance == 0) return;
        uint256 before = _othersStake(account);
        _deposit(account, bound(amount, 1, balance > REQUIRED_STAKE ? REQUIRED_STAKE : balance));
        _sin("touched another's stake", _othersStake(account) != before);
    }

    /// @dev Validators mostly keep their stake, so that there are jurors.
    function requestUnbond(uint256 who, uint256 amount) external recorded {
        address account = who % 8 == 0 ? person(who >> 3) : team[(who >> 3) % WORKERS];
        uint256 active = vault.activeStake(account);
        if (active == 0) return;
        uint256 before = _othersStake(account);
        vm.prank(account);
        vault.requestUnbond(amount % 2 == 0 ? active : bound(amount, 1, active));
        _sin("touched another's stake", _othersStake(account) != before);
    }

    /// @dev Succeeds exactly when the clock is over and nothing holds the stake, or has held it long enough.
    function withdraw(uint256 who) external recorded {
        address account = person(who);
        IStakeVault.Account memory held = vault.accountOf(account);
        bool due = held.unbonding != 0 && block.timestamp >= held.withdrawableAt;
        bool free = held.openCases == 0 && block.timestamp >= held.heldUntil;
        bool longAgo = block.timestamp >= held.withdrawableAt + UNBONDING_PERIOD;
        vm.prank(account);
        try vault.withdraw() {
            _sin("withdrew before the time", !due || !(free || longAgo));
            _sin("withdrew stake behind unfinalised work", _isBehindWork(account, held.withdrawableAt));
            _sin("withdrew what a pause alone kept from a slash", _isSavedByPause(account, held.withdrawableAt));
            ++reached["withdraw"];
        } catch {
            _forgetLogs();
            _sin("could not withdraw", due && (free || longAgo));
        }
    }

    /// @dev Whether stake that was active when a worker committed work is asked back before that work is final.
    function _isBehindWork(address account, uint256 withdrawableAt) private view returns (bool) {
        uint256 requestedAt = withdrawableAt - UNBONDING_PERIOD;
        for (uint256 i = 0; i < _pieces.length; ++i) {
            if (_pieces[i].worker != account) continue;
            uint256 committedAt = batches[_pieces[i].batchId].committedAt;
            if (committedAt <= requestedAt && block.timestamp < committedAt + JUDGED) return true;
        }
        return false;
    }

    /// @dev Whether a fraud in work that the stake stood behind became known in the pause that lasts, so that nobody
    ///      could execute it yet.
    function _isSavedByPause(address account, uint256 withdrawableAt) private view returns (bool) {
        (,, uint256 until) = runs.slashesOf(runId);
        if (block.timestamp >= until) return false;
        for (uint256 i = 0; i < _pieces.length; ++i) {
            Piece storage piece = _pieces[i];
            if (piece.worker != account || !_isJudged(piece)) continue;
            if (batches[piece.batchId].committedAt > withdrawableAt - UNBONDING_PERIOD) continue;
            IContributionLedger.Standing memory standing = _standingOf(piece);
            bool found = standing.outcome.verdict == FRAUD;
            uint256 knownAt = found ? batches[piece.batchId].postedAt : _foundAt[standing.leaf];
            bool waits = _escrowStatus(standing.offence) == IStakeVault.EscrowStatus.None;
            if (standing.verdict == FRAUD && waits && knownAt + SLASH_PAUSE >= until) return true;
        }
        return false;
    }

    // ------------------------------------------------------------------- workers

    function exit(uint256 who) external recorded {
        address worker = team[who % WORKERS];
        IWorkerRegistry.Status status = _status(worker);
        if (who % 3 != 0) return;
        if (status != IWorkerRegistry.Status.Active && status != IWorkerRegistry.Status.Jailed) return;
        vm.prank(worker);
        workers.exit();
        ++reached["exit"];
    }

    /// @dev Unjails or rejoins; tops up first where that is needed.
    function comeBack(uint256 who) external recorded {
        address worker = team[who % WORKERS];
        IWorkerRegistry.Worker memory record = workers.workerOf(worker);
        bool jailed = record.status == IWorkerRegistry.Status.Jailed;
        if (!jailed && record.status != IWorkerRegistry.Status.Exiting) return;
        if (block.timestamp < record.jailedUntil) return;
        uint256 active = vault.activeStake(worker);
        if (active < REQUIRED_STAKE) {
            if (token.balanceOf(worker) < REQUIRED_STAKE - active) return;
            _deposit(worker, REQUIRED_STAKE - active);
        }
        vm.prank(worker);
        if (jailed) workers.unjail();
        else workers.rejoin();
        ++reached[jailed ? bytes32("unjail") : bytes32("rejoin")];
    }

    /// @dev A worker submits by itself; nobody who is not active can.
    function submitDirect(uint256 who) external recorded {
        address worker = team[who % WORKERS];
        uint64 batchId = ledger.batchCount() + 1;
        IContributionLedger.Submission memory s = _submission(worker, 1000 + _directSteps[worker], 0);
        bytes memory signature = _signSubmission(s, _nodeKeyOf(worker));
        bool active = workers.isActive(worker);
        vm.prank(worker);
        try ledger.submitDirect(s, signature) {
            _sin("submitted though not active", !active);
            _addPiece(batchId, worker, s.step, 0, true);
            _remember(batchId, _submissionLeaves[batchId][0], 1, s.units);
            ++_directSteps[worker];
            ++reached["submitDirect"];
        } catch {
            _forgetLogs();
        }
    }

    // --------------------------------------------------------------------- batches

    /// @dev Commits a batch of three; some are posted at once, some later, some never.
    function commit(uint256 seed) external recorded {
        uint256 due = BATCH * 1000 * uint256(runs.termsOf(runId).pricePerUnit);
        if (escrow.fundsOf(runId).available < due) {
            if (token.balanceOf(owner) < due) return;
            vm.prank(owner);
            escrow.fund(runId, due);
        }
        uint64 batchId = ledger.batchCount() + 1;
        for (uint256 i = 0; i < BATCH; ++i) {
            uint256 word = uint256(keccak256(abi.encode(seed, i)));
            _addPiece(batchId, team[word % WORKERS], uint32(1 + (word >> 8) % 3), uint32((word >> 16) % 4), false);
        }
        _commitRoot(_root(_submissionLeaves[batchId]), BATCH, BATCH * 1000);
        if (seed % 4 != 0) _postBatch(batchId, seed);
    }

    function post(uint256 which, uint256 seed) external recorded {
        if (_pieces.length == 0) return;
        uint64 batchId = _pick(which).batchId;
        if (!_isPosted(batchId) && !_isOverdue(batchId)) _postBatch(batchId, seed);
    }

    /// @dev One verdict of four is fraud, exact or not.
    function _postBatch(uint64 batchId, uint256 seed) private {
        bytes[] storage records = _records[batchId];
        for (uint256 i = 0; i < records.length; ++i) {
            uint256 word = uint256(keccak256(abi.encode(seed, "verdict", i)));
            records[i] = _judgedAs(batchId, i, word);
        }
        _post(batchId, records, QUORUM);
    }

    function _judgedAs(uint64 batchId, uint256 position, uint256 word) private view returns (bytes memory) {
        Piece storage piece = _pieceAt(batchId, position);
        uint8 verdict = word % 4 == 0 ? FRAUD : uint8(ACCEPTED + (word >> 8) % 3);
        IContributionLedger.Outcome memory outcome = _outcome(piece.worker, piece.step, piece.index, verdict);
        if (verdict == FRAUD && (word >> 16) % 2 == 0) outcome.reason = 30;
        return _pack(outcome);
    }

    function _pieceAt(uint64 batchId, uint256 position) private view returns (Piece storage) {
        for (uint256 i = _pieces.length; i > 0; --i) {
            if (_pieces[i - 1].batchId == batchId && _pieces[i - 1].position == position) return _pieces[i - 1];
        }
        revert("no such piece");
    }

    // ----------------------------------------------------------------------- fraud

    function executeFraud(uint256 which) external recorded {
        if (_pieces.length == 0) return;
        Piece storage piece = _pick(which);
        if (!_isJudged(piece)) return;
        IContributionLedger.Standing memory standing = _standingOf(piece);
        bool possible = standing.verdict == FRAUD && _escrowStatus(standing.offence) == IStakeVault.EscrowStatus.None;
        (,, uint256 pausedUntil) = runs.slashesOf(runId);
        _sin("slashing paused for too long", pausedUntil > block.timestamp + SLASH_PAUSE);
        bool paused = block.timestamp < pausedUntil;
        uint256 before = _othersStake(piece.worker);
        (uint256 active, uint256 unbonding) = _stake(piece.worker);
        IContributionLedger.Submission memory s = _submission(piece.worker, piece.step, piece.index);
        try ledger.executeFraud(_proofOf(piece), s, _signSubmission(s, _nodeKeyOf(piece.worker))) returns (
            uint256 amount
        ) {
            _sin("slashed what is no fraud, or twice", !possible);
            _sin("slashed while slashing was paused", paused);
            _sin("slashed more than there is", amount > active + unbonding);
            ++reached["executeFraud"];
        } catch {
            _forgetLogs();
            _sin("could not execute a fraud", possible && !paused);
            if (possible) ++reached["wait"];
        }
        _sin("touched another's stake", _othersStake(piece.worker) != before);
    }

    /// @dev Whoever may pause slashing does; succeeds exactly when no pause lasts, nor ended a short time ago.
    function pauseSlashing(uint256 who, uint8 cause, uint8 reason) external recorded {
        if (who % 4 != 0) return;
        (,, uint256 until) = runs.slashesOf(runId);
        bool possible = until == 0 || block.timestamp >= until + SLASH_COOLDOWN;
        uint256 place = (who >> 2) % 7;
        vm.prank(place == 5 ? owner : place == 6 ? orchestrator : validators[place]);
        try runs.pauseSlashing(runId, IRunRegistry.PauseCause(cause % 3), reason, "evidence") {
            _sin("paused slashing too soon again", !possible);
            ++reached["pauseSlashing"];
        } catch {
            _forgetLogs();
            _sin("could not pause slashing", possible);
        }
    }

    /// @dev Notes whether an outcome that was final is not any more.
    function _watchFinality(IContributionLedger.Standing memory standing) private {
        _sin("what was final is open again", _wasFinal[standing.leaf] && !standing.isFinal);
        _wasFinal[standing.leaf] = standing.isFinal;
    }

    function finaliseFraud(uint256 which) external recorded {
        if (_pieces.length == 0) return;
        Piece storage piece = _pickHeld(which);
        if (!_isJudged(piece)) return;
        IContributionLedger.Standing memory standing = _standingOf(piece);
        _watchFinality(standing);
        bool possible = standing.verdict == FRAUD && standing.isFinal
            && _escrowStatus(standing.offence) == IStakeVault.EscrowStatus.Held;
        try ledger.finaliseFraud(_proofOf(piece)) {
            _sin("released an escrow before the time", !possible);
            ++reached["finaliseFraud"];
        } catch {
            _forgetLogs();
            _sin("could not finalise a fraud", possible);
        }
    }

    /// @dev A piece with an escrow that waits; any piece when there is none.
    function _pickHeld(uint256 which) private view returns (Piece storage) {
        uint256 count = _pieces.length;
        for (uint256 i = 0; i < count; ++i) {
            Piece storage piece = _pieces[(which % count + i) % count];
            if (_escrowStatus(_offenceOf(piece)) == IStakeVault.EscrowStatus.Held) return piece;
        }
        return _pick(which);
    }

    // ----------------------------------------------------------------------- cases

    function challenge(uint256 which, uint8 claimed) external recorded {
        if (_pieces.length == 0) return;
        Piece storage piece = _pick(which);
        if (!_isJudged(piece) || token.balanceOf(challenger) < CHALLENGE_BOND) return;
        IContributionLedger.Standing memory standing = _standingOf(piece);
        _watchFinality(standing);
        claimed = uint8(bound(claimed, ACCEPTED, FRAUD));
        if (claimed == standing.outcome.verdict || block.timestamp >= standing.closesAt) return;
        if (court.challengerOf(standing.leaf) != address(0)) return;
        IContributionLedger.OutcomeProof memory outcome = _proofOf(piece);
        vm.prank(challenger);
        court.challenge(outcome, claimed);
        ++reached["challenge"];
    }

    /// @dev Draws where that is still possible, lets jurors vote as `votes` says, and closes at the end of their time:
    ///      a case always ends.
    function hear(uint256 which, uint256 votes) external recorded {
        if (replica.openCases() == 0) return;
        bytes32 leaf = _openCase(which);
        IDisputeCourt.Case memory heard = court.caseOf(leaf);
        IContributionLedger.OutcomeProof memory outcome = _proofOf(_pieceOf(leaf, heard.batchId));
        if (block.timestamp < heard.openedAt + COMMIT_TIME) _vote(leaf, outcome, votes);
        if (block.timestamp < heard.openedAt + JURY_TIME) vm.warp(heard.openedAt + JURY_TIME);
        court.close(outcome);
        heard = court.caseOf(leaf);
        if (heard.status == IDisputeCourt.CaseStatus.Overturned) _foundAt[leaf] = block.timestamp;
        ++reached[heard.status == IDisputeCourt.CaseStatus.Overturned ? bytes32("overturn") : bytes32("uphold")];
    }

    function _openCase(uint256 which) private view returns (bytes32 leaf) {
        uint256 count = replica.caseCount();
        for (uint256 i = 0; i < count; ++i) {
            leaf = replica.leaves((which % count + i) % count);
            if (court.isOpen(leaf)) return leaf;
        }
        revert("no case is open");
    }

    function _pieceOf(bytes32 leaf, uint64 batchId) private view returns (Piece storage) {
        for (uint256 i = 0; i < _pieces.length; ++i) {
            if (_pieces[i].batchId == batchId && _standingOf(_pieces[i]).leaf == leaf) return _pieces[i];
        }
        revert("no such case");
    }

    function _vote(bytes32 leaf, IContributionLedger.OutcomeProof memory outcome, uint256 votes) private {
        if (court.caseOf(leaf).jury == 0) {
            if (block.timestamp >= court.caseOf(leaf).openedAt + COMMIT_TIME / 2) return;
            vm.roll(court.caseOf(leaf).drawBlock + 1);
            court.drawJury(outcome);
        }
        uint256 jury = court.caseOf(leaf).jury;
        for (uint256 i = 0; i < 5; ++i) {
            uint256 vote = (votes >> (2 * i)) & 3;
            if (jury & (1 << i) == 0 || vote == 0) continue;
            vm.prank(validators[i]);
            court.commitVote(leaf, keccak256(abi.encode(leaf, validators[i], vote == 3, RESULT, SALT)));
        }
        vm.warp(court.caseOf(leaf).openedAt + COMMIT_TIME);
        for (uint256 i = 0; i < 5; ++i) {
            uint256 vote = (votes >> (2 * i)) & 3;
            if (jury & (1 << i) == 0 || vote < 2) continue;
            vm.prank(validators[i]);
            court.revealVote(leaf, vote == 3, RESULT, SALT);
        }
    }

    /// @dev Punishes the jurors and signers of a closed case whose fault is unpunished.
    function punish(uint256 which) external recorded {
        if (replica.caseCount() == 0) return;
        bytes32 leaf = replica.leaves(which % replica.caseCount());
        IDisputeCourt.Case memory closed = court.caseOf(leaf);
        if (closed.status < IDisputeCourt.CaseStatus.Upheld) return;
        for (uint256 i = 0; i < 5; ++i) {
            uint256 before = _othersStake(validators[i]);
            _punish(leaf, closed, validators[i]);
            _sin("touched another's stake", _othersStake(validators[i]) != before);
        }
    }

    function _punish(bytes32 leaf, IDisputeCourt.Case memory closed, address validator) private {
        uint256 bit = runs.seatBitOf(runId, validator);
        bool absent = closed.jury & bit != 0 && court.commitmentOf(leaf, validator) != bytes32(uint256(1));
        bool signed = closed.status == IDisputeCourt.CaseStatus.Overturned && batches[closed.batchId].signers & bit != 0;
        if (absent && !_isPunished(IFaultCourt.Fault.AbsentJuror, leaf, validator)) {
            faults.slashAbsentJuror(leaf, validator);
            ++reached["slashAbsentJuror"];
        }
        if (signed && !_isPunished(IFaultCourt.Fault.WrongVerdict, leaf, validator)) {
            faults.slashSigner(_proofOf(_pieceOf(leaf, closed.batchId)), validator);
            ++reached["slashSigner"];
        }
    }

    function slashOverdue(uint256 which, uint256 who) external recorded {
        if (_pieces.length == 0) return;
        Piece storage piece = _pick(which);
        address validator = validators[who % 5];
        bytes32 subject = bytes32(uint256(piece.batchId));
        if (!_isOverdue(piece.batchId)) return;
        if (_isPunished(IFaultCourt.Fault.MissedDeadline, subject, validator)) return;
        faults.slashOverdue(batches[piece.batchId], validator);
        ++reached["slashOverdue"];
    }

    function _isPunished(IFaultCourt.Fault fault, bytes32 subject, address validator) private view returns (bool) {
        bytes32 offence = keccak256(abi.encode(fault, subject, validator));
        return _escrowStatus(offence) != IStakeVault.EscrowStatus.None;
    }

    // ----------------------------------------------------------------------- money

    /// @dev Claims what may not be paid, too: it must fail then, and only then.
    function claim(uint256 which) external recorded {
        if (_pieces.length == 0) return;
        Piece storage piece = _pick(which);
        bytes32 slot = keccak256(abi.encode(piece.worker, piece.step, piece.index));
        bool payable_ = false;
        if (_isJudged(piece)) {
            IContributionLedger.Standing memory standing = _standingOf(piece);
            payable_ = standing.isFinal && standing.verdict == ACCEPTED;
        }
        try escrow.claim(_claimsOf(piece)) returns (uint256 amount) {
            _sin("paid what is not final or not accepted", !payable_);
            _sin("paid more than promised", amount != 1000 * uint256(batches[piece.batchId].pricePerUnit));
            _sin("paid a slot twice", ++_timesPaid[slot] > 1);
            ++reached["claim"];
        } catch {
            _forgetLogs();
            _sin("refused what is due", payable_ && _timesPaid[slot] == 0);
        }
    }

    function recover(uint256 which) external recorded {
        if (_pieces.length == 0) return;
        Piece storage piece = _pick(which);
        bool possible = false;
        if (_isPosted(piece.batchId)) {
            IContributionLedger.Standing memory standing = _standingOf(piece);
            _watchFinality(standing);
            possible = standing.isFinal && standing.verdict != ACCEPTED;
        }
        try escrow.recover(_claimsOf(piece)) {
            _sin("recovered what is not final or accepted", !possible);
            ++reached["recover"];
        } catch {
            _forgetLogs();
        }
    }

    function changeTerms(uint256 seed) external recorded {
        (, uint256 effectiveAt) = runs.proposedChange(runId);
        if (effectiveAt != 0 && block.timestamp >= effectiveAt) {
            runs.applyChange(runId);
            ++reached["applyChange"];
        } else if (effectiveAt == 0) {
            IRunRegistry.Terms memory terms = runs.termsOf(runId);
            terms.pricePerUnit = uint88(bound(seed, PRICE / 2, PRICE));
            terms.fraudPpm = uint32(bound(seed >> 8, 0, EXACT_FRAUD_PPM));
            if (terms.pricePerUnit < runs.termsOf(runId).pricePerUnit / 2) return;
            vm.prank(owner);
            runs.proposeChange(runId, terms);
        }
    }

    function publish() external recorded {
        (uint32 version,) = runs.latestVersion(runId);
        vm.prank(trainer);
        runs.publishCheckpoint(runId, version + 1, keccak256("manifest"));
    }

    /// @dev Mostly hours, so that cases can be heard; at times days, so that windows close and stake matures.
    function pass(uint256 time) external {
        vm.warp(block.timestamp + bound(time >> 3, 1, time % 8 == 0 ? 8 days : 6 hours));
        vm.roll(block.number + 10);
    }
}
