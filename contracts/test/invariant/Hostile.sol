// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IContributionLedger} from "../../src/interfaces/IContributionLedger.sol";
import {IDisputeCourt} from "../../src/interfaces/IDisputeCourt.sol";
import {IRewardEscrow} from "../../src/interfaces/IRewardEscrow.sol";
import {IRunRegistry} from "../../src/interfaces/IRunRegistry.sol";
import {IStakeVault} from "../../src/interfaces/IStakeVault.sol";
import {IWorkerRegistry} from "../../src/interfaces/IWorkerRegistry.sol";
import {Handler} from "./Handler.sol";

/// @title What nobody may do beside the random life, its end, and what the invariants look at
contract Hostile is Handler {
    uint256 private constant MOVES = 32;

    /// @notice Tries one of the moves as a stranger, the attacker or anybody else that lacks the power for it.
    function attack(uint256 move, uint256 who, uint256 which) external recorded {
        address by = who % 3 == 0 ? stranger : who % 3 == 1 ? _attacker : person(who >> 8);
        (address target, bytes memory data) = _move(move % MOVES, by, which);
        if (target == address(0)) return;
        _sin("a hostile move succeeded", _call(by, target, data, 0, address(0)));
        ++reached["attack"];
    }

    function _move(uint256 move, address by, uint256 which) private returns (address, bytes memory) {
        if (move < 7) return (address(vault), _vaultMove(move, by));
        if (move < 14) return _contractMove(move, by);
        if (move < 21) return (address(runs), _ownerMove(move, by));
        if (_pieces.length == 0) return (address(0), "");
        return _workMove(move, by, _pieces[_pick(which)]);
    }

    /// @dev Powers of the ledger, the courts and the registries.
    function _vaultMove(uint256 move, address by) private view returns (bytes memory) {
        IStakeVault.Verdict memory verdict =
            IStakeVault.Verdict(honestRun, alice, IStakeVault.Offence.Fraud, 1 << 32, 1, 0);
        if (move == 0) return abi.encodeCall(vault.hold, (verdict, PPM));
        if (move == 1) return abi.encodeCall(vault.release, (verdict, by));
        if (move == 2) return abi.encodeCall(vault.restore, (verdict));
        if (move == 3) return abi.encodeCall(vault.depositFrom, (honestRun, alice, 1));
        if (move == 4) return abi.encodeCall(vault.requestUnbondFor, (honestRun, alice));
        if (move == 5) return abi.encodeCall(vault.requestUnbondFor, (0, jurors[0]));
        return abi.encodeCall(vault.slash, (honestRun, alice, IStakeVault.Offence.WrongVerdict, 1, PPM, by));
    }

    function _contractMove(uint256 move, address by) private view returns (address, bytes memory) {
        if (move == 7) return (address(workers), abi.encodeCall(workers.convict, (honestRun, alice, "id", true)));
        if (move == 8) return (address(workers), abi.encodeCall(workers.acquit, (hostileRun, by, "id", true)));
        if (move == 9) return (address(ledger), abi.encodeCall(ledger.markDisputed, (1)));
        if (move == 10) return (address(escrow), abi.encodeCall(escrow.reserve, (honestRun, 1)));
        if (move == 11) return (address(escrow), abi.encodeCall(escrow.free, (honestRun, 1)));
        if (move == 12) return (address(escrow), abi.encodeCall(escrow.payCourt, (honestRun, 1)));
        return (address(court), abi.encodeCall(court.takeBond, (ledger.batchCount() + 1, alice)));
    }

    /// @dev Powers of the honest run's owner, trainer, orchestrator, validators and fault court.
    function _ownerMove(uint256 move, address by) private view returns (bytes memory) {
        (IRunRegistry.Terms memory terms,) = runs.termsOf(honestRun);
        if (move == 14) return abi.encodeCall(runs.closeRun, (honestRun));
        if (move == 15) return abi.encodeCall(runs.setSubmissionsPaused, (honestRun, true));
        if (move == 16) return abi.encodeCall(runs.proposeChange, (honestRun, terms));
        if (move == 17) return abi.encodeCall(runs.invite, (honestRun, by, true));
        if (move == 18) return abi.encodeCall(runs.dismiss, (honestRun, validators[0]));
        if (move == 19) return abi.encodeCall(runs.unseatForFault, (honestRun, validators[0]));
        return abi.encodeCall(runs.rotateOrchestrator, (honestRun, orchestrator, by));
    }

    /// @dev Moves about a piece of work: judged by nobody, paid twice, of a forged header, posted again, voted by
    ///      strangers.
    function _workMove(uint256 move, address by, Piece storage piece) private returns (address, bytes memory) {
        IContributionLedger.Batch memory batch = batches[piece.batchId];
        if (move == 21) {
            IContributionLedger.Submission memory submission = _submissionOf(piece);
            return (address(ledger), abi.encodeCall(ledger.judge, (batch, submission, ACCEPTED, 0)));
        }
        if (move == 22) {
            (batch.units, batch.postedAt) = (0, 1);
            return (address(ledger), abi.encodeCall(ledger.voidBatch, (batch)));
        }
        if (move == 23 && !_isOfOrchestrator(piece.runId, by)) {
            return (address(ledger), abi.encodeCall(ledger.commitBatch, (piece.runId, "root", 1, 1)));
        }
        if (move == 24) return (address(ledger), _postAlone(piece));
        if (move == 31 && by != piece.worker) {
            IContributionLedger.Submission memory submission = _submissionOf(piece);
            return (address(court), abi.encodeCall(court.summon, (batch, submission, _noSources())));
        }
        if (piece.recorded == 0) return (address(0), "");
        return _outcomeMove(move, by, piece);
    }

    function _isOfOrchestrator(uint64 run, address by) private view returns (bool) {
        return by == _orchestratorOf(run);
    }

    /// @dev One of the attacker's validators signs for any run: of the honest one it is none, and of its own one is
    ///      too few.
    function _postAlone(Piece storage piece) private view returns (bytes memory) {
        bytes memory records = _recordOf(piece, ACCEPT);
        bytes memory signature =
            _sign(validatorKeys[4], ledger.DOMAIN_SEPARATOR(), _outcomesHash(piece.batchId, records));
        return abi.encodeCall(ledger.postOutcomes, (batches[piece.batchId], records, signature));
    }

    function _outcomeMove(uint256 move, address by, Piece storage piece) private returns (address, bytes memory) {
        IContributionLedger.OutcomeProof memory proof = _proofOf(piece);
        IRewardEscrow.Claim[] memory claims = _claimsOf(piece);
        if (move == 25) {
            claims[0].batch.pricePerUnit += 1;
            return (address(escrow), abi.encodeCall(escrow.claim, (claims)));
        }
        if (move == 26 && _timesPaid[_slotOf(piece)] != 0) {
            return (address(escrow), abi.encodeCall(escrow.claim, (claims)));
        }
        if (move == 27) {
            proof.batch.postedAt = 1;
            return (address(ledger), abi.encodeCall(ledger.finaliseFraud, (proof)));
        }
        if (move == 28) return (address(court), abi.encodeCall(court.revealVote, (_leafOf(piece), ACCEPT, "", "")));
        if (move == 29) {
            // The worker's key signed something else than what is judged.
            IContributionLedger.Submission memory submission = _submissionOf(piece);
            submission.units += 1;
            bytes memory signature = _signSubmission(submission, _attackerKey);
            return (address(ledger), abi.encodeCall(ledger.executeFraud, (proof, _held(proof, submission, signature))));
        }
        if (move == 30 && workers.statusOf(piece.runId, by) == IWorkerRegistry.Status.Banned) {
            return (address(workers), abi.encodeCall(workers.comeBack, (piece.runId, 1)));
        }
        return (address(0), "");
    }

    // ------------------------------------------------------------------------ end

    /// @notice Everything comes to its end: cases close, what is due is paid, everybody leaves with what is its own.
    function end() external recorded {
        // Without pauses in it, judgement takes no longer; a window that a pause met is open for one window more.
        _pass(block.timestamp + JUDGED + CHALLENGE_WINDOW);
        // Escrows that wait hold up nobody.
        _everybodyLeaves();
        for (uint256 i = 0; i < _pieces.length; ++i) {
            Piece storage piece = _pieces[i];
            if (batches[piece.batchId].status != IContributionLedger.BatchStatus.Judged) _voidBatch(piece.batchId);
            _executeFraud(piece);
            _finaliseFraud(piece);
            _claim(piece);
            _recover(piece);
            _returnBond(piece.batchId);
        }
        for (uint256 i = 0; i < _closedTrials.length; ++i) {
            _punish(_closedTrials[i]);
        }
        for (uint64 run = honestRun; run <= hostileRun; ++run) {
            _closeRun(run);
        }
        _pass(block.timestamp + CLAIM_PERIOD);
        _reclaim(honestRun);
        _reclaim(hostileRun);
    }

    function _everybodyLeaves() private {
        for (uint256 i = 0; i < PEOPLE; ++i) {
            for (uint64 run = 0; run <= hostileRun; ++run) {
                uint256 active = vault.activeStake(run, person(i));
                if (active == 0) continue;
                vm.prank(person(i));
                vault.requestUnbond(run, active);
            }
        }
        _pass(block.timestamp + UNBONDING_PERIOD);
        for (uint256 i = 0; i < PEOPLE; ++i) {
            for (uint64 run = 0; run <= hostileRun; ++run) {
                _withdraw(person(i), run);
            }
        }
    }

    // --------------------------------------------------------------------- views

    /// @notice Returns how much stake honest people lost, in any run and on the bench.
    function lostByHonest() external view returns (int256 lost) {
        for (uint256 i = 0; i < PEOPLE; ++i) {
            if (!isHonest(i)) continue;
            for (uint64 run = 0; run <= hostileRun; ++run) {
                int256 one = replica.lostBy(run, person(i));
                if (one > lost) lost = one;
            }
        }
    }

    /// @notice Returns how many stakes are not what they would be without the offences that were overturned.
    /// @dev Each share is rounded up, for itself and for what it takes of stake that earlier escrows gave back.
    function stakesHurtByAcquitted() external view returns (uint256 wrong) {
        for (uint256 i = 0; i < PEOPLE; ++i) {
            for (uint64 run = 0; run <= hostileRun; ++run) {
                (uint256 expected, uint256 offences) = replica.stakeWithoutAcquitted(run, person(i), vault);
                IStakeVault.Account memory held = vault.accountOf(run, person(i));
                uint256 stake = held.active + held.unbonding;
                uint256 difference = stake > expected ? stake - expected : expected - stake;
                if (difference > 2 * offences * (offences + 1)) ++wrong;
            }
        }
    }

    /// @notice Returns how many accounts, members, seats, cases, batches and funds differ from what events say.
    function differences() external view returns (uint256 count) {
        for (uint64 run = 0; run <= hostileRun; ++run) {
            for (uint256 i = 0; i < PEOPLE; ++i) {
                count += _differencesOf(run, person(i));
            }
            if (run == 0) continue;
            if (_differ(abi.encode(escrow.fundsOf(run)), abi.encode(replica.fundsOf(run)))) ++count;
            if (runs.slashPausedUntil(run) != replica.slashPausedUntil(run)) ++count;
        }
        for (uint256 i = 0; i < replica.caseCount(); ++i) {
            bytes32 caseId = replica.cases(i);
            if (_differ(abi.encode(court.caseOf(caseId)), abi.encode(replica.caseOf(caseId)))) ++count;
        }
        for (uint64 batchId = 1; batchId <= ledger.batchCount(); ++batchId) {
            if (ledger.commitmentOf(batchId) != replica.commitmentOf(batchId)) ++count;
        }
    }

    function _differencesOf(uint64 run, address account) private view returns (uint256 count) {
        if (_differ(abi.encode(vault.accountOf(run, account)), abi.encode(replica.accountOf(run, account)))) ++count;
        if (run == 0) return jury.isJuror(account) == replica.isOnBench(account) ? count : count + 1;
        if (_differ(abi.encode(workers.memberOf(run, account)), abi.encode(replica.memberOf(run, account)))) ++count;
        if (runs.isValidator(run, account) != replica.isSeated(run, account)) ++count;
    }

    function _differ(bytes memory a, bytes memory b) private pure returns (bool) {
        return keccak256(a) != keccak256(b);
    }

    /// @notice Returns how many active workers, seated validators and jurors hold less than their role requires.
    function rolesWithoutStake() external view returns (uint256 wrong) {
        for (uint256 i = 0; i < PEOPLE; ++i) {
            address account = person(i);
            if (jury.isJuror(account) && vault.activeStake(0, account) < REQUIRED_JUROR_STAKE) ++wrong;
            for (uint64 run = honestRun; run <= hostileRun; ++run) {
                uint256 active = vault.activeStake(run, account);
                bool works = workers.statusOf(run, account) == IWorkerRegistry.Status.Active;
                if (works && active < REQUIRED_STAKE) ++wrong;
                if (runs.isValidator(run, account) && active < REQUIRED_VALIDATOR_STAKE) ++wrong;
            }
        }
    }

    /// @notice Returns how many workers are banned without a conviction, or not banned with more than one.
    function wrongBans() external view returns (uint256 wrong) {
        for (uint256 i = 0; i < WORKERS; ++i) {
            for (uint64 run = honestRun; run <= hostileRun; ++run) {
                IWorkerRegistry.Member memory member = workers.memberOf(run, _team[i]);
                bool banned = member.status == IWorkerRegistry.Status.Banned;
                if (banned ? member.convictions == 0 : member.exactConvictions != 0) ++wrong;
            }
        }
    }

    /// @notice Returns the tokens that the vault, the escrow and the court hold.
    function balances() external view returns (uint256 ofVault, uint256 ofEscrow, uint256 ofCourt) {
        return (_balance(address(vault)), _balance(address(escrow)), _balance(address(court)));
    }

    /// @notice Returns what the runs have, free and set aside.
    function owedByEscrow() external view returns (uint256 sum) {
        for (uint64 run = honestRun; run <= hostileRun; ++run) {
            IRewardEscrow.Funds memory funds = escrow.fundsOf(run);
            sum += uint256(funds.available) + funds.reserved;
        }
    }

    /// @notice Returns how many cases are open for longer than a jury has time.
    function overdueCases() external view returns (uint256 count) {
        for (uint256 i = 0; i < replica.caseCount(); ++i) {
            IDisputeCourt.Case memory heard = court.caseOf(replica.cases(i));
            bool open = heard.status == IDisputeCourt.CaseStatus.Open;
            if (open && block.timestamp > heard.openedAt + JURY_TIME + COMMIT_TIME / 2) ++count;
        }
    }
}
