// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IContributionLedger} from "../../src/interfaces/IContributionLedger.sol";
import {IDisputeCourt} from "../../src/interfaces/IDisputeCourt.sol";
import {IRunRegistry} from "../../src/interfaces/IRunRegistry.sol";
import {IStakeVault} from "../../src/interfaces/IStakeVault.sol";
import {IWorkerRegistry} from "../../src/interfaces/IWorkerRegistry.sol";
import {Stage} from "./Stage.sol";

/// @title What honest clients do in time, whatever else happens: jurors hear cases, workers defend their work,
///        somebody executes frauds
/// @dev Honest jurors vote the truth; the attacker's juror lies, stays away, or does not reveal.
abstract contract Trials is Stage {
    /// @dev A case about a piece.
    struct Trial {
        bytes32 caseId;
        uint256 piece;
        bool isSummons;
        // What the liar does: lies, stays away, does not reveal.
        uint256 mood;
    }

    bytes32 private constant RESULT = keccak256("what the juror recomputed");
    bytes32 private constant SALT = keccak256("salt");
    bytes32 private constant DRAWN = bytes32(uint256(1));

    Trial[] internal _trials;
    Trial[] internal _closedTrials;

    /// @dev Pieces of honest workers that may need to be defended, and frauds that wait for their execution.
    uint256[] private _undefended;
    uint256[] private _unexecuted;

    // --------------------------------------------------------------------- duties

    /// @dev Passes time in steps that are short enough for every honest client to meet its deadlines.
    function _pass(uint256 until) internal {
        _keepUp();
        while (block.timestamp < until) {
            bool quiet = _trials.length == 0 && _undefended.length == 0 && _unexecuted.length == 0;
            uint256 next = block.timestamp + COMMIT_TIME / 2 - 1 hours;
            _warp(quiet || next > until ? until : next);
            vm.roll(block.number + 10);
            _keepUp();
        }
    }

    function _keepUp() private {
        // From the end, where what is added on the way waits for the next time. Right or wrong, frauds are executed
        // first.
        for (uint256 i = _unexecuted.length; i > 0; --i) {
            Piece storage piece = _pieces[_unexecuted[i - 1]];
            _executeFraud(piece);
            bool waits = _verdictOf(_rulingOf(piece)) == FRAUD
                && vault.escrowOf(_fraudId(piece)).status == IStakeVault.EscrowStatus.None;
            if (!waits) _remove(_unexecuted, i - 1);
        }
        for (uint256 i = _undefended.length; i > 0; --i) {
            if (_defend(_undefended[i - 1])) _remove(_undefended, i - 1);
        }
        for (uint256 i = _trials.length; i > 0; --i) {
            _hear(i - 1);
        }
    }

    function _remove(uint256[] storage list, uint256 place) private {
        list[place] = list[list.length - 1];
        list.pop();
    }

    function _watch(uint256 i) internal {
        if (_isHonestWorker(_pieces[i].worker)) _undefended.push(i);
    }

    /// @dev What a worker's client does about its piece; returns whether nothing is left to do.
    function _defend(uint256 i) private returns (bool) {
        Piece storage piece = _pieces[i];
        if (piece.recorded != 0) {
            bool wrong = _verdictOf(piece.recorded) != ACCEPTED;
            if (wrong && !_isTried(piece)) {
                _sin("an honest worker had no case", !_claimRuling(piece.worker, i, ACCEPT));
            }
            return true;
        }
        if (block.timestamp < _dueAt(piece.batchId)) return false;
        if (_isAppealable(piece.batchId) && !_isAlone(piece) && !_submittedAlone[_slotOf(piece)]) i = _splitOff(i);
        if (_isAlone(_pieces[i])) _summon(_pieces[i].worker, i);
        return true;
    }

    /// @dev Whether there is or was a case about the outcome.
    function _isTried(Piece storage piece) internal view returns (bool) {
        return court.caseOf(_leafOf(piece)).status != IDisputeCourt.CaseStatus.None;
    }

    /// @dev Whether a piece's batch is of this piece alone, committed by its worker.
    function _isAlone(Piece storage piece) internal view returns (bool) {
        return batches[piece.batchId].count == 1;
    }

    // -------------------------------------------------------------------- appeals

    /// @dev A worker takes its piece out of a batch; returns the new piece, or the old one where that is not
    ///      possible.
    function _splitOff(uint256 i) internal returns (uint256) {
        Piece storage piece = _pieces[i];
        bool possible = _isAppealable(piece.batchId) && !_isAlone(piece) && !_submittedAlone[_slotOf(piece)]
            && _balance(piece.worker) >= BOND;
        bytes32[] memory siblings = _batchSiblings(_leavesIn[piece.batchId], piece.position);
        IContributionLedger.LeasedWork memory work = _leasedWork(piece);
        bytes memory data =
            abi.encodeCall(ledger.splitOff, (batches[piece.batchId], work, piece.position, siblings, _noSources()));
        if (_isAlone(piece)) return i;
        if (!_attempt(piece.worker, address(ledger), data, possible, "splitOff")) return i;
        _submittedAlone[_slotOf(piece)] = true;
        return _noteSplit(piece);
    }

    function _noteSplit(Piece storage piece) private returns (uint256) {
        uint64 batchId = ledger.batchCount();
        IContributionLedger.Batch storage from = batches[piece.batchId];
        from.units -= uint64(UNITS);
        IContributionLedger.Batch memory own = from;
        (own.batchId, own.count, own.units) = (batchId, 1, uint64(UNITS));
        own.root = _leavesIn[piece.batchId][piece.position];
        batches[batchId] = own;
        return _addPiece(batchId, piece.worker, piece.step, piece.index);
    }

    function _summon(address who, uint256 i) internal {
        Piece storage piece = _pieces[i];
        bytes32 caseId = court.summonsOf(piece.batchId);
        bool possible = _isAppealable(piece.batchId) && court.caseOf(caseId).status == IDisputeCourt.CaseStatus.None;
        bytes memory data = abi.encodeCall(court.summon, (batches[piece.batchId], _submissionOf(piece), _noSources()));
        if (!_attempt(who, address(court), data, possible, "summon")) return;
        _trials.push(Trial(caseId, i, true, uint256(caseId) % 3));
    }

    // --------------------------------------------------------------------- claims

    function _claimRuling(address who, uint256 i, uint16 ruling) internal returns (bool success) {
        Piece storage piece = _pieces[i];
        bytes32 leaf = _leafOf(piece);
        vm.prank(who);
        court.announce(keccak256(abi.encode(who, leaf, ruling, SALT)));
        vm.roll(block.number + 1);
        bool known = _isTried(piece);
        bool possible = _mayClaim(who, piece, ruling);
        success = _attempt(who, address(court), _claimData(piece, ruling), possible, "claimRuling");
        if (success && !known) _trials.push(Trial(leaf, i, false, uint256(leaf) % 3));
    }

    function _claimData(Piece storage piece, uint16 ruling) private returns (bytes memory) {
        IContributionLedger.Submission memory submission = _submissionOf(piece);
        bytes memory signature = _signSubmission(submission, _nodeKeyOf(piece.worker));
        IContributionLedger.OutcomeProof memory outcome = _proofOf(piece);
        IContributionLedger.CommittedWork memory work = _held(outcome, submission, signature);
        return abi.encodeCall(court.claim, (outcome, work, ruling, SALT, _noSources()));
    }

    function _mayClaim(address who, Piece storage piece, uint16 ruling) private view returns (bool) {
        IContributionLedger.Standing memory standing = ledger.standingOf(_proofOf(piece));
        IDisputeCourt.Case memory known = court.caseOf(standing.leaf);
        bool open = known.status == IDisputeCourt.CaseStatus.Open;
        bool inTime = open
            ? block.timestamp < known.openedAt + COMMIT_TIME
            : known.status == IDisputeCourt.CaseStatus.None && block.timestamp < standing.closesAt;
        return inTime && court.claimsOf(standing.leaf).length < 16 && !jury.isJuror(who) && _balance(who) >= BOND
            && !_isSame(ruling, piece.recorded);
    }

    // --------------------------------------------------------------------- trials

    /// @dev Does all that can be done now in an open case.
    function _hear(uint256 place) internal {
        Trial memory trial = _trials[place];
        _drawJury(trial.caseId);
        _commitVotes(trial);
        _revealVotes(trial);
        if (!_settle(trial)) return;
        _trials[place] = _trials[_trials.length - 1];
        _trials.pop();
        _closedTrials.push(trial);
    }

    function _drawJury(bytes32 caseId) private {
        IDisputeCourt.Case memory heard = court.caseOf(caseId);
        if (block.timestamp >= heard.openedAt + COMMIT_TIME / 2) return;
        // A draw that came too late is postponed.
        for (uint256 i = 0; i < 2 && heard.jurors == 0; ++i) {
            if (block.number <= heard.drawBlock) vm.roll(heard.drawBlock + 1);
            court.draw(caseId);
            heard = court.caseOf(caseId);
        }
        _sin("no jury of three", heard.jurors != JURY_SIZE);
    }

    function _commitVotes(Trial memory trial) private {
        if (block.timestamp >= court.caseOf(trial.caseId).openedAt + COMMIT_TIME) return;
        for (uint256 i = 0; i < 5; ++i) {
            if (court.voteOf(trial.caseId, jurors[i]) != DRAWN || (i == LIAR && trial.mood == 1)) continue;
            bytes32 vote = keccak256(abi.encode(trial.caseId, jurors[i], _voteOf(trial, i), RESULT, SALT));
            vm.prank(jurors[i]);
            court.commitVote(trial.caseId, vote);
        }
    }

    function _voteOf(Trial memory trial, uint256 juror) private view returns (uint16) {
        uint16 seen = _seenByJurors(_pieces[trial.piece]);
        if (juror != LIAR) return seen;
        return seen == ACCEPT ? EXACT : ACCEPT;
    }

    function _revealVotes(Trial memory trial) private {
        IDisputeCourt.Case memory heard = court.caseOf(trial.caseId);
        if (block.timestamp >= heard.openedAt + JURY_TIME) return;
        if (block.timestamp < heard.openedAt + COMMIT_TIME && heard.committed != heard.jurors) return;
        for (uint256 i = 0; i < 5; ++i) {
            bool committed = uint256(court.voteOf(trial.caseId, jurors[i])) > type(uint32).max;
            if (!committed || (i == LIAR && trial.mood == 2)) continue;
            vm.prank(jurors[i]);
            court.revealVote(trial.caseId, _voteOf(trial, i), RESULT, SALT);
        }
    }

    function _settle(Trial memory trial) private returns (bool) {
        IDisputeCourt.Case memory heard = court.caseOf(trial.caseId);
        bool possible = block.timestamp >= heard.openedAt + JURY_TIME || heard.revealed == JURY_SIZE;
        Piece storage piece = _pieces[trial.piece];
        bytes memory data = trial.isSummons
            ? abi.encodeCall(court.settleSummoned, (batches[piece.batchId], _submissionOf(piece)))
            : abi.encodeCall(court.settle, (_proofOf(piece)));
        if (possible && trial.isSummons) _forgeJudgement(piece);
        if (!_attempt(stranger, address(court), data, piece.runId, piece.worker, possible, "settle")) return false;
        bool changed = trial.isSummons ? _noteJudgement(piece) : _noteRuling(piece);
        heard = court.caseOf(trial.caseId);
        _sin("the court was wrong", changed != (heard.status == IDisputeCourt.CaseStatus.Overturned));
        if (changed && _verdictOf(_rulingOf(piece)) == FRAUD) _unexecuted.push(trial.piece);
        return true;
    }

    /// @dev Whoever settles a case cannot say that it was about something else.
    function _forgeJudgement(Piece storage piece) private {
        if (_seenByJurors(piece) == UNSEEN) return;
        IContributionLedger.Submission memory other = _submissionOf(piece);
        (other.worker, other.units) = (_team[2], type(uint32).max);
        bytes memory data = abi.encodeCall(court.settleSummoned, (batches[piece.batchId], other));
        _sin("a judgement was forged", _call(_attacker, address(court), data, 0, address(0)));
    }

    /// @dev What the network's jury says of a piece that its run left unjudged.
    function _noteJudgement(Piece storage piece) private returns (bool) {
        uint16 seen = _seenByJurors(piece);
        if (seen == UNSEEN) return false;
        ++reached["judge"];
        piece.recorded = seen;
        _recordsOf[piece.batchId] = _one(_recordOf(piece, seen));
        // Whoever called the batch withheld did not sign this.
        batches[piece.batchId].signers = 0;
        _rememberPosted(piece.batchId, _recordsOf[piece.batchId], 0);
        if (_verdictOf(seen) == ACCEPTED) acceptedValue[piece.runId] += _value(piece);
        return true;
    }

    /// @dev What a jury says of what is recorded.
    function _noteRuling(Piece storage piece) private returns (bool) {
        uint16 seen = _seenByJurors(piece);
        bool overturned = seen != UNSEEN && !_isSame(seen, piece.recorded);
        ++reached[overturned ? bytes32("overturn") : bytes32("uphold")];
        if (!overturned) return false;
        piece.ruled = seen;
        if (_verdictOf(piece.recorded) == ACCEPTED) acceptedValue[piece.runId] -= _value(piece);
        if (_verdictOf(seen) == ACCEPTED) acceptedValue[piece.runId] += _value(piece);
        return true;
    }

    // -------------------------------------------------------------------- outcomes

    /// @dev Two validators of a run, the first of which is no lower than `from`, sign what `rulings` say; nothing
    ///      happens without them. No rulings call the batch withheld.
    function _sign(uint64 batchId, uint256 from, uint16[] memory rulings) internal {
        IContributionLedger.Batch storage batch = batches[batchId];
        uint256 end = _firstValidator(batch.runId) + 3;
        uint256 first = _nextSeated(batch.runId, from, end);
        uint256 second = _nextSeated(batch.runId, first + 1, end);
        if (second >= end) return;
        bytes[] memory records = _recordsFor(batchId, rulings);
        bool withheld = records.length == 0;
        bytes memory data = _postData(batchId, _join(records), first, second);
        if (!_attempt(stranger, address(ledger), data, true, withheld ? bytes32("withhold") : bytes32("post"))) return;
        batch.postedAt = uint40(block.timestamp);
        batch.signers = runs.seatBitOf(batch.runId, validators[first]) | runs.seatBitOf(batch.runId, validators[second]);
        batch.status = withheld ? IContributionLedger.BatchStatus.Withheld : IContributionLedger.BatchStatus.Judged;
        if (withheld) return;
        batch.outcomesRoot = _root(_leaves(batchId, records));
        _noteOutcomes(batchId, records, rulings);
    }

    function _nextSeated(uint64 run, uint256 from, uint256 end) private view returns (uint256) {
        while (from < end && !runs.isValidator(run, validators[from])) ++from;
        return from;
    }

    function _postData(uint64 batchId, bytes memory joined, uint256 first, uint256 second)
        private
        view
        returns (bytes memory)
    {
        bytes32 hash = _outcomesHash(batchId, joined);
        bytes memory signatures = bytes.concat(
            _sign(validatorKeys[first], ledger.DOMAIN_SEPARATOR(), hash),
            _sign(validatorKeys[second], ledger.DOMAIN_SEPARATOR(), hash)
        );
        return abi.encodeCall(ledger.postOutcomes, (batches[batchId], joined, signatures));
    }

    function _recordsFor(uint64 batchId, uint16[] memory rulings) private view returns (bytes[] memory records) {
        records = new bytes[](rulings.length);
        for (uint256 i = 0; i < rulings.length; ++i) {
            records[i] = _recordOf(_pieces[_pieceAt(batchId, i)], rulings[i]);
        }
    }

    function _noteOutcomes(uint64 batchId, bytes[] memory records, uint16[] memory rulings) private {
        for (uint256 i = 0; i < rulings.length; ++i) {
            uint256 at = _pieceAt(batchId, i);
            _pieces[at].recorded = rulings[i];
            _recordsOf[batchId].push(records[i]);
            if (_verdictOf(rulings[i]) == ACCEPTED) acceptedValue[_pieces[at].runId] += _value(_pieces[at]);
            if (_verdictOf(rulings[i]) == FRAUD) _unexecuted.push(at);
        }
    }

    function _pieceAt(uint64 batchId, uint256 position) internal view returns (uint256) {
        for (uint256 i = _pieces.length; i > 0; --i) {
            if (_pieces[i - 1].batchId == batchId && _pieces[i - 1].position == position) return i - 1;
        }
        revert("no such piece");
    }

    // ---------------------------------------------------------------------- fraud

    /// @dev Succeeds exactly when a fraud stands that was not punished before, and costs what its terms say.
    function _executeFraud(Piece storage piece) internal {
        if (piece.recorded == 0) return;
        bytes32 id = _fraudId(piece);
        bool possible = _verdictOf(_rulingOf(piece)) == FRAUD
            && vault.escrowOf(id).status == IStakeVault.EscrowStatus.None
            && block.timestamp >= runs.slashPausedUntil(piece.runId);
        uint256 cost = _costOf(piece);
        IContributionLedger.Submission memory submission = _submissionOf(piece);
        bytes memory signature = _signSubmission(submission, _nodeKeyOf(piece.worker));
        bytes memory data =
            abi.encodeCall(ledger.executeFraud, (_proofOf(piece), _held(_proofOf(piece), submission, signature)));
        bool success = _attempt(stranger, address(ledger), data, piece.runId, piece.worker, possible, "executeFraud");
        if (!success) return;
        _sin("a fraud cost something else", vault.escrowOf(id).amount != cost);
        if (_isHonestWorker(piece.worker)) ++reached["executeWrongFraud"];
    }

    function _costOf(Piece storage piece) private view returns (uint256) {
        IRunRegistry.Terms memory terms = runs.termsAt(piece.runId, batches[piece.batchId].terms);
        IWorkerRegistry.Member memory member = workers.memberOf(piece.runId, piece.worker);
        uint256 ppm = uint256(terms.fraudPpm) << member.convictions;
        if (_isExact(_rulingOf(piece))) ppm = terms.exactFraudPpm;
        if (ppm > PPM) ppm = PPM;
        IStakeVault.Account memory held = vault.accountOf(piece.runId, piece.worker);
        return (held.active * ppm + PPM - 1) / PPM + (held.unbonding * ppm + PPM - 1) / PPM;
    }

    /// @dev Whether somebody's fraud, in work that its stake in a run stood behind, is known and waits for its
    ///      execution.
    function _hasUnexecuted(uint64 run, address account, uint256 leftAt) internal view returns (bool) {
        for (uint256 i = 0; i < _unexecuted.length; ++i) {
            Piece storage piece = _pieces[_unexecuted[i]];
            if (piece.runId != run || piece.worker != account || _verdictOf(_rulingOf(piece)) != FRAUD) continue;
            bool waits = vault.escrowOf(_fraudId(piece)).status == IStakeVault.EscrowStatus.None;
            if (waits && batches[piece.batchId].committedAt <= leftAt) return true;
        }
        return false;
    }
}
