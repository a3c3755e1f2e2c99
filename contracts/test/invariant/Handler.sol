// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IContributionLedger} from "../../src/interfaces/IContributionLedger.sol";
import {IDisputeCourt} from "../../src/interfaces/IDisputeCourt.sol";
import {IRewardEscrow} from "../../src/interfaces/IRewardEscrow.sol";
import {IRunRegistry} from "../../src/interfaces/IRunRegistry.sol";
import {IStakeVault} from "../../src/interfaces/IStakeVault.sol";
import {IWorkerRegistry} from "../../src/interfaces/IWorkerRegistry.sol";
import {Trials} from "./Trials.sol";

/// @title Random life of two runs: everything that honest and hostile parties may do
/// @dev Each action picks valid arguments, or returns when there are none. Where the rules say whether a call
///      succeeds, the action tries it either way and notes a sin when they disagree.
abstract contract Handler is Trials {
    /// @dev Outcomes whose units were paid or recovered.
    mapping(bytes32 leaf => bool) private _isSpent;

    // -------------------------------------------------------------------- stake

    /// @notice Somebody stakes for somebody: the attacker has capital, too.
    function deposit(uint256 who, uint256 whose, uint256 amount) external recorded {
        address payer = person(who);
        uint64 run = uint64(amount % (hostileRun + 1));
        amount = bound(amount, 1, REQUIRED_STAKE);
        bytes memory data = abi.encodeCall(vault.deposit, (run, person(whose), amount));
        _attempt(payer, address(vault), data, run, person(whose), _balance(payer) >= amount, "deposit");
    }

    /// @notice Validators mostly keep their stake, so that there are outcomes; so do honest jurors.
    function requestUnbond(uint256 who, uint256 amount) external recorded {
        uint256 i = who % 4 == 0 ? (who >> 2) % PEOPLE : (who >> 2) % WORKERS;
        uint64 run = uint64((who >> 16) % (hostileRun + 1));
        uint256 active = vault.activeStake(run, person(i));
        if (active == 0 || (run == 0 && !_isSpared(i))) return;
        amount = amount % 2 == 0 ? active : bound(amount, 1, active);
        bytes memory data = abi.encodeCall(vault.requestUnbond, (run, amount));
        _attempt(person(i), address(vault), data, run, person(i), true, "unbond");
    }

    /// @dev Whether the bench keeps three honest jurors when this person leaves it.
    function _isSpared(uint256 i) private view returns (bool) {
        uint256 honest;
        for (uint256 j = 0; j < LIAR; ++j) {
            if (jury.isJuror(jurors[j])) ++honest;
        }
        return honest > 3 || !isHonest(i);
    }

    /// @notice Succeeds exactly when the clock is over: nothing holds stake for longer.
    function withdraw(uint256 who) external recorded {
        uint64 run = uint64((who >> 16) % (hostileRun + 1));
        _withdraw(person(who), run);
    }

    function _withdraw(address account, uint64 run) internal {
        IStakeVault.Account memory held = vault.accountOf(run, account);
        bool due = held.unbonding != 0 && block.timestamp >= held.withdrawableAt;
        bool guilty = due && _hasUnexecuted(run, account, held.withdrawableAt - UNBONDING_PERIOD);
        bytes memory data = abi.encodeCall(vault.withdraw, (run));
        bool success = _attempt(account, address(vault), data, run, account, due, "withdraw");
        _sin("withdrew what a known fraud costs", success && guilty);
    }

    // ------------------------------------------------------------- leave, come back

    function leave(uint256 who) external recorded {
        uint256 i = who % PEOPLE;
        uint64 run = _choose(who >> 8);
        if (i < WORKERS) _leaveWork(run, _team[i]);
        else if (i < WORKERS + 5) _leaveSeat(run, validators[_firstValidator(run) + (who >> 16) % 3]);
        else if (i >= WORKERS + 5 && i < WORKERS + 10 && _isSpared(i)) _leaveBench(jurors[i - WORKERS - 5]);
    }

    function _leaveWork(uint64 run, address worker) internal {
        IWorkerRegistry.Status status = workers.statusOf(run, worker);
        bool possible = status == IWorkerRegistry.Status.Active || status == IWorkerRegistry.Status.Jailed;
        bytes memory data = abi.encodeCall(workers.exit, (run));
        _attempt(worker, address(workers), data, run, worker, possible, "exit");
    }

    function _leaveSeat(uint64 run, address validator) private {
        bytes memory data = abi.encodeCall(runs.leaveSeat, (run));
        _attempt(validator, address(runs), data, run, validator, runs.isValidator(run, validator), "leaveSeat");
    }

    function _leaveBench(address juror) private {
        bytes memory data = abi.encodeCall(jury.leave, ());
        _attempt(juror, address(jury), data, 0, juror, jury.isJuror(juror), "leaveBench");
    }

    function dismiss(uint256 who) external recorded {
        uint64 run = _choose(who >> 8);
        address validator = validators[_firstValidator(run) + who % 3];
        if ((who >> 16) % 2 == 0) return;
        bool present = runs.isValidator(run, validator) || runs.isInvited(run, validator);
        bool possible = present && runs.closedAt(run) == 0;
        bytes memory data = abi.encodeCall(runs.dismiss, (run, validator));
        _attempt(_ownerOf(run), address(runs), data, run, validator, possible, "dismiss");
    }

    /// @notice Whoever left, or lost its role, comes back with as much stake as that takes.
    function comeBack(uint256 who) external recorded {
        uint64 run = _choose(who);
        uint256 i = who >> 16;
        uint256 first = _firstValidator(run);
        if ((who >> 8) % 3 == 0) {
            for (uint256 j = 0; j < WORKERS && workers.isActive(run, _team[i % WORKERS]); ++j) {
                ++i;
            }
            _comeBackToWork(run, _team[i % WORKERS]);
        } else if ((who >> 8) % 3 == 1) {
            for (uint256 j = 0; j < 3 && runs.isValidator(run, validators[first + i % 3]); ++j) {
                ++i;
            }
            _comeBackToSeat(run, validators[first + i % 3]);
        } else {
            for (uint256 j = 0; j < 5 && jury.isJuror(jurors[i % 5]); ++j) {
                ++i;
            }
            _comeBackToBench(jurors[i % 5]);
        }
    }

    function _missing(uint64 run, address account, uint256 required) private view returns (uint256) {
        uint256 active = vault.activeStake(run, account);
        return active < required ? required - active : 0;
    }

    function _comeBackToWork(uint64 run, address worker) private {
        IWorkerRegistry.Member memory member = workers.memberOf(run, worker);
        bool away = member.status == IWorkerRegistry.Status.Jailed || member.status == IWorkerRegistry.Status.Exiting;
        uint256 missing = _missing(run, worker, REQUIRED_STAKE);
        if (away && missing != 0 && _balance(worker) >= missing) _deposit(run, worker, missing);
        (, uint32 terms) = runs.termsOf(run);
        bool possible = away && block.timestamp >= member.jailedUntil && _takesNewcomers(run)
            && _missing(run, worker, REQUIRED_STAKE) == 0;
        bytes memory data = abi.encodeCall(workers.comeBack, (run, terms));
        if (_attempt(worker, address(workers), data, possible, "comeBack")) {
            vm.roll(block.number + ACTIVATION_DELAY);
        }
    }

    function _takesNewcomers(uint64 run) private view returns (bool) {
        (, uint256 effectiveAt) = runs.proposedChange(run);
        return effectiveAt == 0 && runs.closedAt(run) == 0;
    }

    function _comeBackToSeat(uint64 run, address validator) private {
        if (runs.closedAt(run) != 0) return;
        vm.prank(_ownerOf(run));
        runs.invite(run, validator, true);
        uint256 missing = _missing(run, validator, REQUIRED_VALIDATOR_STAKE);
        (, uint32 terms) = runs.termsOf(run);
        bool possible = !runs.isValidator(run, validator) && _takesNewcomers(run) && _balance(validator) >= missing;
        bytes memory data = abi.encodeCall(runs.takeSeat, (run, terms, missing));
        _attempt(validator, address(runs), data, run, validator, possible, "takeSeat");
    }

    /// @dev A second passes, so that a case that opens now may draw it.
    function _comeBackToBench(address juror) private {
        uint256 missing = _missing(0, juror, REQUIRED_JUROR_STAKE);
        bytes memory data = abi.encodeCall(jury.join, (missing));
        uint256 leftAt = replica.leftBenchAt(juror);
        bool possible = !jury.isJuror(juror) && _balance(juror) >= missing
            && (leftAt == 0 || block.timestamp > leftAt + COMMIT_TIME);
        if (_attempt(juror, address(jury), data, 0, juror, possible, "joinBench")) _warp(block.timestamp + 1);
    }

    // --------------------------------------------------------------------- batches

    /// @notice Commits a batch of three, at times for more units than its submissions claim; some are answered at once, some
    ///         later, some never.
    function commit(uint256 seed) external recorded {
        uint64 run = _choose(seed);
        (address by, bool open,, uint88 price) = runs.admissionOf(run);
        uint256 units = BATCH * UNITS + (seed >> 12) % 4 * UNITS / 8;
        if (_someActive(run, 0) == address(0) || !open || !_isFunded(run, units * price)) return;
        uint64 batchId = ledger.batchCount() + 1;
        for (uint256 i = 0; i < BATCH; ++i) {
            uint256 word = uint256(keccak256(abi.encode(seed, i)));
            uint32 step = uint32(1 + ledger.batchCount() / 8 + (word >> 8) % 2);
            _watch(_addPiece(batchId, _someActive(run, word), step, uint32((word >> 16) % 4)));
        }
        bytes32 root = _batchRoot(_leavesIn[batchId]);
        vm.prank(by);
        ledger.commitBatch(run, root, uint32(BATCH), uint64(units));
        _remember(batchId, root, BATCH, units);
        ++reached["commit"];
        if ((seed >> 8) % 8 != 0) _answer(batchId, seed >> 16);
    }

    /// @dev Funds a run that cannot pay for more; returns whether it can now.
    function _isFunded(uint64 run, uint256 due) private returns (bool) {
        if (escrow.fundsOf(run).available >= due) return true;
        if (_balance(_ownerOf(run)) < due) return false;
        vm.prank(_ownerOf(run));
        escrow.fund(run, due);
        return true;
    }

    function _someActive(uint64 run, uint256 word) private view returns (address) {
        for (uint256 i = 0; i < WORKERS; ++i) {
            address worker = _team[(word + i) % WORKERS];
            if (workers.isActive(run, worker)) return worker;
        }
        return address(0);
    }

    function answer(uint256 which, uint256 seed) external recorded {
        if (_pieces.length == 0) return;
        uint64 batchId = _pieces[_pick(which)].batchId;
        bool waits = batches[batchId].status == IContributionLedger.BatchStatus.Committed;
        if (waits && block.timestamp < _dueAt(batchId)) _answer(batchId, seed);
    }

    /// @dev Honest validators record what they see, or are down. The attacker's accept all of its own workers and say
    ///      anything of others, that nothing can be had, or nothing at all; at times they tell the truth.
    function _answer(uint64 batchId, uint256 seed) private {
        uint64 run = _use(batches[batchId].runId);
        bool honest = run == honestRun || seed % 4 == 0;
        if (honest && (seed >> 8) % 8 == 0) return;
        bool withheld = !honest && (seed >> 8) % 4 == 0;
        uint16[] memory rulings = new uint16[](withheld ? 0 : batches[batchId].count);
        for (uint256 i = 0; i < rulings.length; ++i) {
            Piece storage piece = _pieces[_pieceAt(batchId, i)];
            rulings[i] = honest ? _seenByValidators(piece) : _lieAbout(piece, uint256(keccak256(abi.encode(seed, i))));
        }
        _sign(batchId, honest ? _firstValidator(run) : 3, rulings);
    }

    function _lieAbout(Piece storage piece, uint256 word) private view returns (uint16) {
        if (!_isHonestWorker(piece.worker)) return ACCEPT;
        return [ACCEPT, REJECT, STATISTICAL, EXACT, NO_FILE, FRAUD_WITHOUT_FILE][word % 6];
    }

    /// @notice A worker submits by itself, with a ticket that it was given; nobody who is not active can.
    function submitDirect(uint256 who) external recorded {
        uint64 run = _choose(who >> 8);
        address worker = _team[who % WORKERS];
        (, bool open,, uint88 price) = runs.admissionOf(run);
        if (!open || !_isFunded(run, UNITS * price) || _balance(worker) < BOND) return;
        uint64 batchId = ledger.batchCount() + 1;
        uint256 i = _addPiece(batchId, worker, uint32(1000 + batchId), 0);
        bytes memory data = abi.encodeCall(ledger.submitDirect, (_leasedWork(_pieces[i]), _noSources()));
        bool possible = workers.isActive(run, worker);
        if (!_attempt(worker, address(ledger), data, possible, "submitDirect")) {
            _pieces.pop();
            _leavesIn[batchId].pop();
            return;
        }
        _submittedAlone[_slotOf(_pieces[i])] = true;
        _remember(batchId, _leavesIn[batchId][0], 1, UNITS);
        _watch(i);
        if ((who >> 16) % 2 == 0) _answer(batchId, who >> 24);
    }

    /// @notice One of the attacker's workers calls judges of the network for what nobody judged.
    function appeal(uint256 which) external recorded {
        if (_pieces.length == 0) return;
        uint256 i = _pick(which);
        if (_isHonestWorker(_pieces[i].worker)) return;
        i = _splitOff(i);
        if (_isAlone(_pieces[i])) _summon(_pieces[i].worker, i);
    }

    function voidBatch(uint256 which) external recorded {
        if (_pieces.length == 0) return;
        _voidBatch(_pickAny(which).batchId);
    }

    function _voidBatch(uint64 batchId) internal {
        bool possible = batches[batchId].status != IContributionLedger.BatchStatus.Judged
            && ledger.commitmentOf(batchId) != 0 && !court.isSummoned(batchId)
            && block.timestamp >= _dueAt(batchId) + CHALLENGE_WINDOW;
        bytes memory data = abi.encodeCall(ledger.voidBatch, (batches[batchId]));
        _attempt(stranger, address(ledger), data, possible, "voidBatch");
    }

    /// @notice Mostly of batches whose bond is still there.
    function returnBond(uint256 which) external recorded {
        if (_pieces.length == 0) return;
        uint256 i = which % _pieces.length;
        for (uint256 j = 0; j < _pieces.length && !_isReturnable(_pieces[i].batchId); ++j) {
            i = (i + 1) % _pieces.length;
        }
        _returnBond(_pieces[i].batchId);
    }

    function _isReturnable(uint64 batchId) private view returns (bool) {
        bool isOver =
            batches[batchId].status == IContributionLedger.BatchStatus.Judged || ledger.commitmentOf(batchId) == 0;
        return isOver && court.bondOf(batchId) != address(0);
    }

    function _returnBond(uint64 batchId) internal {
        bool possible = _isReturnable(batchId);
        bytes memory data = abi.encodeCall(court.returnBond, (batches[batchId]));
        _attempt(stranger, address(court), data, possible, "returnBond");
    }

    // ----------------------------------------------------------------- fraud, cases

    function executeFraud(uint256 which) external recorded {
        if (_pieces.length != 0) _executeFraud(_pieces[_pick(which)]);
    }

    function finaliseFraud(uint256 which) external recorded {
        if (_pieces.length != 0) _finaliseFraud(_pickHeld(which));
    }

    /// @dev A piece with an escrow that waits; any piece when there is none.
    function _pickHeld(uint256 which) private view returns (Piece storage piece) {
        for (uint256 i = 0; i < _pieces.length; ++i) {
            piece = _pickAny(which % _pieces.length + i);
            bool fraud = _verdictOf(_rulingOf(piece)) == FRAUD;
            if (fraud && vault.escrowOf(_fraudId(piece)).status == IStakeVault.EscrowStatus.Held) return piece;
        }
        return _pickAny(which);
    }

    function _finaliseFraud(Piece storage piece) internal {
        if (piece.recorded == 0) return;
        bytes32 id = _fraudId(piece);
        IStakeVault.Escrow memory held = vault.escrowOf(id);
        bool isOf = held.batchId == piece.batchId && held.position == piece.position;
        bool possible = _verdictOf(_rulingOf(piece)) == FRAUD && held.status == IStakeVault.EscrowStatus.Held && isOf
            && ledger.standingOf(_proofOf(piece)).isFinal;
        bytes memory data = abi.encodeCall(ledger.finaliseFraud, (_proofOf(piece)));
        bool success = _attempt(stranger, address(ledger), data, possible, "finaliseFraud");
        _sin("an honest worker's slash is final", success && _isHonestWorker(piece.worker));
    }

    /// @notice The attacker claims anything; the honest challenger what is true and not recorded.
    function challenge(uint256 which, uint256 seed) external recorded {
        if (_pieces.length == 0) return;
        uint256 i = _pick(which);
        if (_pieces[i].recorded == 0) return;
        uint16 ruling = _seenByJurors(_pieces[i]);
        bool hostile = seed % 2 == 0;
        if (hostile) ruling = [ACCEPT, REJECT, STATISTICAL, EXACT][(seed >> 1) % 4];
        bool useless = ruling == UNSEEN || _isSame(ruling, _pieces[i].recorded);
        if (hostile || !useless) _claimRuling(hostile ? _attacker : challenger, i, ruling);
    }

    function hear(uint256 which) external recorded {
        if (_trials.length != 0) _hear(which % _trials.length);
    }

    /// @notice Pays the jurors of a closed case and fines those that did not vote and those that signed what it
    ///         overturned.
    function punish(uint256 which) external recorded {
        uint256 count = _closedTrials.length;
        if (count == 0) return;
        // Most cases are about what a run left unjudged, where nobody signed.
        uint256 i = (which >> 1) % count;
        for (uint256 j = 0; j < count && which % 2 == 0 && _closedTrials[i].isSummons; ++j) {
            i = (i + 1) % count;
        }
        _punish(_closedTrials[i]);
    }

    function _punish(Trial memory trial) internal {
        for (uint256 i = 0; i < 5; ++i) {
            _collectFee(trial.caseId, jurors[i]);
            _fineJuror(trial.caseId, jurors[i]);
            if (!trial.isSummons) _fineSigner(_pieces[trial.piece], trial.caseId, validators[i]);
        }
    }

    function _collectFee(bytes32 caseId, address juror) private {
        IDisputeCourt.Case memory closed = court.caseOf(caseId);
        uint256 vote = uint256(court.voteOf(caseId, juror));
        bool revealed = vote <= type(uint32).max && vote & 0xff == 2;
        bool possible = closed.fee != 0 && revealed && _isSameKind(uint16(vote >> 8), closed.leading);
        bytes memory data = abi.encodeCall(court.collectFee, (caseId, juror));
        _attempt(stranger, address(court), data, possible, "collectFee");
    }

    function _fineJuror(bytes32 caseId, address juror) private {
        uint256 vote = uint256(court.voteOf(caseId, juror));
        bool absent = vote == 1 || vote > type(uint32).max;
        uint64 number = court.caseOf(caseId).number;
        bool possible = absent && !_isSettled(0, juror, IStakeVault.Offence.AbsentJuror, number);
        bytes memory data = abi.encodeCall(court.fineAbsentJuror, (caseId, juror));
        _attempt(stranger, address(court), data, 0, juror, possible, "fineAbsentJuror");
    }

    function _fineSigner(Piece storage piece, bytes32 caseId, address validator) private {
        uint64 run = piece.runId;
        bool signed = batches[piece.batchId].signers & runs.seatBitOf(run, validator) != 0;
        bool overturned = court.caseOf(caseId).status == IDisputeCourt.CaseStatus.Overturned;
        bool possible = overturned && signed && piece.recorded != NO_FILE
            && !_isSettled(run, validator, IStakeVault.Offence.WrongVerdict, piece.batchId);
        bytes memory data = abi.encodeCall(court.fineSigner, (_proofOf(piece), validator));
        _attempt(stranger, address(court), data, run, validator, possible, "fineSigner");
    }

    /// @notice The attacker's validator signs two outcomes of one batch, or its worker two submissions for one slot.
    function equivocate(uint256 which, uint256 seed) external recorded {
        if (_pieces.length == 0 || seed % 2 != 0) return;
        Piece storage piece = _pickAny(which);
        if ((seed >> 8) % 3 == 0) _proveDoubleOutcome(piece);
        else if ((seed >> 8) % 3 == 1) _proveMisrecord(piece, seed >> 16);
        else if (piece.recorded != 0) _proveDoubleSubmission(piece);
    }

    function _proveDoubleOutcome(Piece storage piece) private {
        uint64 run = piece.runId;
        IContributionLedger.Outcomes[2] memory said;
        bytes[2] memory signatures;
        for (uint256 i = 0; i < 2; ++i) {
            bytes memory records = abi.encode(i);
            said[i] = IContributionLedger.Outcomes(piece.batchId, batches[piece.batchId].root, keccak256(records));
            signatures[i] = _sign(validatorKeys[3], ledger.DOMAIN_SEPARATOR(), _outcomesHash(piece.batchId, records));
        }
        bytes memory data = abi.encodeCall(
            faults.proveDoubleOutcome, (batches[piece.batchId], said[0], signatures[0], said[1], signatures[1])
        );
        bool known = ledger.commitmentOf(piece.batchId) != 0;
        bool possible = known && run == hostileRun
            && !_isSettled(run, validators[3], IStakeVault.Offence.DoubleOutcome, piece.batchId);
        _attempt(stranger, address(faults), data, run, validators[3], possible, "doubleOutcome");
    }

    /// @dev Every record is of what its batch holds: no submission, held or invented by its worker, convicts who signed it.
    function _proveMisrecord(Piece storage piece, uint256 seed) private {
        if (piece.recorded == 0) return;
        IContributionLedger.Submission memory submission = _submissionOf(piece);
        if (seed % 2 == 1) submission.units -= 1;
        bytes memory signature = _signSubmission(submission, _nodeKeyOf(piece.worker));
        IContributionLedger.OutcomeProof memory outcome = _proofOf(piece);
        IContributionLedger.CommittedWork memory work = _held(outcome, submission, signature);
        address validator = validators[(seed >> 1) % validators.length];
        bytes memory data = abi.encodeCall(faults.proveMisrecord, (outcome, work, validator));
        _attempt(stranger, address(faults), data, piece.runId, validator, false, "misrecord");
    }

    /// @dev Nobody holds a second signature of an honest worker: what somebody else signed for it proves nothing.
    function _proveDoubleSubmission(Piece storage piece) private {
        bool honest = _isHonestWorker(piece.worker);
        uint256 key = _nodeKeyOf(piece.worker);
        IContributionLedger.Submission memory first = _submissionOf(piece);
        IContributionLedger.Submission memory second = _submissionOf(piece);
        second.fileHash = keccak256("another file");
        bytes memory signature = _signSubmission(second, honest ? _nodeKeyOf(_team[2]) : key);
        bytes memory data = abi.encodeCall(
            faults.proveDoubleSubmission,
            (_proofOf(piece), _held(_proofOf(piece), first, _signSubmission(first, key)), second, signature)
        );
        IStakeVault.Offence offence = IStakeVault.Offence.DoubleSubmission;
        bool banned = workers.statusOf(piece.runId, piece.worker) == IWorkerRegistry.Status.Banned;
        bool possible = !honest && !banned && !_isSettled(piece.runId, piece.worker, offence, _tagOf(piece));
        _attempt(stranger, address(faults), data, piece.runId, piece.worker, possible, "doubleSubmission");
    }

    // ----------------------------------------------------------------------- money

    /// @notice Claims what may not be paid, too: it must fail then, and only then.
    function claim(uint256 which) external recorded {
        if (_pieces.length != 0) _claim(_pickAny(which));
    }

    function _claim(Piece storage piece) internal {
        if (piece.recorded == 0) return;
        bytes32 slot = _slotOf(piece);
        uint256 before = _balance(piece.worker);
        bool possible = _verdictOf(_rulingOf(piece)) == ACCEPTED && _isFinal(piece) && _timesPaid[slot] == 0
            && escrow.fundsOf(piece.runId).reserved >= _value(piece);
        bytes memory data = abi.encodeCall(escrow.claim, (_claimsOf(piece)));
        if (!_attempt(stranger, address(escrow), data, possible, "claim")) return;
        _isSpent[_leafOf(piece)] = true;
        _sin("paid a slot twice", ++_timesPaid[slot] > 1);
        _sin("paid something else than the price", _balance(piece.worker) - before != _value(piece));
    }

    /// @dev Whether an outcome that is no fraud is final.
    function _isFinal(Piece storage piece) private view returns (bool) {
        return block.timestamp >= batches[piece.batchId].postedAt + CHALLENGE_WINDOW && !court.isOpen(_leafOf(piece));
    }

    function recover(uint256 which) external recorded {
        if (_pieces.length != 0) _recover(_pickRefused(which));
    }

    /// @dev A piece that was not accepted, if there is one.
    function _pickRefused(uint256 which) private view returns (Piece storage piece) {
        for (uint256 i = 0; i < _pieces.length; ++i) {
            piece = _pickAny(which % _pieces.length + i);
            bool refused = piece.recorded != 0 && _verdictOf(_rulingOf(piece)) != ACCEPTED;
            if (refused && !_isSpent[_leafOf(piece)]) return piece;
        }
        return _pickAny(which);
    }

    function _recover(Piece storage piece) internal {
        if (piece.recorded == 0) return;
        bytes32 leaf = _leafOf(piece);
        bool possible = _verdictOf(_rulingOf(piece)) != ACCEPTED && ledger.standingOf(_proofOf(piece)).isFinal
            && !_isSpent[leaf] && escrow.fundsOf(piece.runId).reserved >= _value(piece);
        bytes memory data = abi.encodeCall(escrow.recover, (_claimsOf(piece)));
        if (_attempt(stranger, address(escrow), data, possible, "recover")) _isSpent[leaf] = true;
    }

    /// @notice Returns what a run must have set aside: for batches that are neither judged nor void what they were committed
    ///         for, for judged ones what their records hold and is neither paid nor recovered.
    function dueReserve(uint64 run) external view returns (uint256 sum) {
        for (uint64 batchId = 1; batchId <= ledger.batchCount(); ++batchId) {
            IContributionLedger.Batch storage batch = batches[batchId];
            bool waits = batch.status != IContributionLedger.BatchStatus.Judged && ledger.commitmentOf(batchId) != 0;
            if (batch.runId == run && waits) sum += uint256(batch.units) * batch.pricePerUnit;
        }
        for (uint256 i = 0; i < _pieces.length; ++i) {
            Piece storage piece = _pieces[i];
            if (piece.runId == run && piece.recorded != 0 && !_isSpent[_leafOf(piece)]) sum += _value(piece);
        }
    }

    /// @notice Returns whether the owner of a closed run may take all that is set aside.
    function isReclaimable(uint64 run) external view returns (bool) {
        uint256 closedAt = runs.closedAt(run);
        return closedAt != 0 && block.timestamp >= closedAt + CLAIM_PERIOD;
    }

    function fund(uint256 who, uint256 amount) external recorded {
        uint64 run = _choose(who >> 8);
        address payer = person(who);
        amount = bound(amount, 1, 1000 ether);
        bool possible = _balance(payer) >= amount && runs.closedAt(run) == 0;
        bytes memory data = abi.encodeCall(escrow.fund, (run, amount));
        _attempt(payer, address(escrow), data, possible, "fund");
    }

    /// @notice The attacker ends its run, seldom.
    function closeRun(uint256 seed) external recorded {
        if (seed % 16 == 0) _closeRun(hostileRun);
    }

    function _closeRun(uint64 run) internal {
        bytes memory data = abi.encodeCall(runs.closeRun, (run));
        _attempt(_ownerOf(run), address(runs), data, runs.closedAt(run) == 0, "closeRun");
    }

    function reclaim(uint256 seed) external recorded {
        _reclaim(_choose(seed));
    }

    function _reclaim(uint64 run) internal {
        uint256 closedAt = runs.closedAt(run);
        IRewardEscrow.Funds memory funds = escrow.fundsOf(run);
        uint256 due = funds.available;
        if (block.timestamp >= closedAt + CLAIM_PERIOD) due += funds.reserved;
        bytes memory data = abi.encodeCall(escrow.reclaim, (run));
        _attempt(stranger, address(escrow), data, closedAt != 0 && due != 0, "reclaim");
    }

    // ------------------------------------------------------------------------ runs

    /// @notice Seldom proposes other terms: while they are announced nobody joins or comes back.
    function changeTerms(uint256 seed) external recorded {
        uint64 run = _choose(seed);
        (, uint256 effectiveAt) = runs.proposedChange(run);
        if (effectiveAt != 0 && block.timestamp >= effectiveAt) {
            runs.applyChange(run);
            ++reached["applyChange"];
        } else if (effectiveAt == 0 && runs.closedAt(run) == 0 && (seed >> 1) % 16 == 0) {
            (IRunRegistry.Terms memory terms,) = runs.termsOf(run);
            uint256 price = terms.pricePerUnit;
            terms.pricePerUnit = uint88(bound(seed, price / 2 + 1, 2 * price < PRICE ? 2 * price : PRICE));
            terms.fraudPpm = uint32(bound(seed >> 8, 0, EXACT_FRAUD_PPM));
            vm.prank(_ownerOf(run));
            runs.proposeChange(run, terms);
        }
    }

    /// @notice Whoever may pause slashing does; succeeds exactly when no pause lasts, nor ended a short time ago.
    function pauseSlashing(uint256 seed) external recorded {
        uint64 run = _choose(seed);
        uint256 until = runs.slashPausedUntil(run);
        _sin("slashing paused for too long", until > block.timestamp + SLASH_PAUSE);
        bytes memory data =
            abi.encodeCall(runs.pauseSlashing, (run, IRunRegistry.PauseCause.Other, uint8(seed >> 8), "evidence"));
        address by = (seed >> 16) % 2 == 0 ? _ownerOf(run) : _orchestratorOf(run);
        bool possible = until == 0 || block.timestamp >= until + SLASH_COOLDOWN;
        _attempt(by, address(runs), data, possible, "pauseSlashing");
    }

    /// @notice Mostly hours, so that cases can be heard; at times days, so that windows close and stake matures.
    function pass(uint256 time) external recorded {
        _pass(block.timestamp + bound(time >> 3, 1, time % 8 == 0 ? 8 days : 6 hours));
    }
}
