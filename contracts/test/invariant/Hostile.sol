// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IContributionLedger} from "../../src/interfaces/IContributionLedger.sol";
import {IRewardEscrow} from "../../src/interfaces/IRewardEscrow.sol";
import {IRunRegistry} from "../../src/interfaces/IRunRegistry.sol";
import {IWorkerRegistry} from "../../src/interfaces/IWorkerRegistry.sol";
import {Handler} from "./Handler.sol";

/// @title An attacker beside the random life: everything it tries must fail
contract Hostile is Handler {
    uint256 private constant MOVES = 27;

    /// @notice Tries one of the moves as a stranger, a worker or a validator that lacks the power for it.
    function attack(uint256 move, uint256 who, uint256 which) external recorded {
        address attacker = who % 2 == 0 ? stranger : person(who >> 1);
        (address target, bytes memory data) = _move(move % MOVES, attacker, which);
        if (target == address(0)) return;
        vm.prank(attacker);
        (bool success,) = target.call(data);
        if (!success) _forgetLogs();
        _sin("a hostile move succeeded", success);
        ++reached["attack"];
    }

    function _move(uint256 move, address attacker, uint256 which) private view returns (address, bytes memory) {
        if (move < 7) return (address(vault), _vaultMove(move, attacker));
        if (move < 13) return _registryMove(move, attacker);
        if (move < 20 || move == 26) return (address(runs), _ownerMove(move, attacker));
        if (_pieces.length == 0) return (address(0), "");
        return _workMove(move, attacker, _pick(which));
    }

    /// @dev Powers of the ledger, the courts and the registry.
    function _vaultMove(uint256 move, address attacker) private view returns (bytes memory) {
        bytes32 offence = replica.offenceCount() == 0 ? bytes32(0) : replica.offences(replica.offenceCount() - 1);
        if (move == 0) return abi.encodeCall(vault.slash, (team[0], PPM, "offence", attacker));
        if (move == 1) return abi.encodeCall(vault.release, (offence));
        if (move == 2) return abi.encodeCall(vault.restore, (offence));
        if (move == 3) return abi.encodeCall(vault.hold, (team[0], type(uint64).max));
        if (move == 4) return abi.encodeCall(vault.openCase, (team[0]));
        if (move == 5) return abi.encodeCall(vault.depositFrom, (team[1], 1));
        return abi.encodeCall(vault.requestUnbondFor, (team[2]));
    }

    function _registryMove(uint256 move, address attacker) private view returns (address, bytes memory) {
        if (move == 7) return (address(workers), abi.encodeCall(workers.convict, (team[0], "offence", true)));
        if (move == 8) return (address(workers), abi.encodeCall(workers.acquit, (attacker, "offence", true)));
        if (move == 9) return (address(workers), abi.encodeCall(workers.jail, (team[0], "offence")));
        if (move == 10) return (address(ledger), abi.encodeCall(ledger.markDisputed, (1)));
        if (move == 11) return (address(escrow), abi.encodeCall(escrow.reserve, (runId, 1)));
        return (address(ledger), abi.encodeCall(ledger.commitBatch, (runId, "root", 1, 1)));
    }

    /// @dev Powers of the run's owner and trainer.
    function _ownerMove(uint256 move, address attacker) private view returns (bytes memory) {
        IRunRegistry.Terms memory terms = runs.termsOf(runId);
        if (move == 13) return abi.encodeCall(runs.closeRun, (runId));
        if (move == 14) return abi.encodeCall(runs.setSubmissionsPaused, (runId, true));
        if (move == 15) return abi.encodeCall(runs.proposeChange, (runId, terms));
        if (move == 16) return abi.encodeCall(runs.seatValidator, (runId, attacker));
        if (move == 17) return abi.encodeCall(runs.rotateTrainer, (runId, trainer, attacker));
        if (move == 18) return abi.encodeCall(runs.publishCheckpoint, (runId, type(uint32).max, "root"));
        if (move == 26) {
            // Validators may pause, but not a run that is not theirs.
            uint64 paused = runs.isValidator(runId, attacker) ? runId + 1 : runId;
            return abi.encodeCall(runs.pauseSlashing, (paused, IRunRegistry.PauseCause.Other, 0, "evidence"));
        }
        return abi.encodeCall(runs.rotateOrchestrator, (runId, orchestrator, attacker));
    }

    /// @dev Moves about a piece of work: paid twice, for another, posted again, moved by a forged header.
    function _workMove(uint256 move, address attacker, Piece storage piece)
        private
        view
        returns (address, bytes memory)
    {
        IContributionLedger.OutcomeProof memory proof = _proofOf(piece);
        IRewardEscrow.Claim[] memory claims = _claimsOf(piece);
        bytes32 slot = keccak256(abi.encode(piece.worker, piece.step, piece.index));
        if (move == 20 && _timesPaid[slot] != 0) return (address(escrow), abi.encodeCall(escrow.claim, (claims)));
        if (move == 21) {
            claims[0].batch.pricePerUnit += 1;
            return (address(escrow), abi.encodeCall(escrow.claim, (claims)));
        }
        if (move == 22 && (_isPosted(piece.batchId) || _isOverdue(piece.batchId))) {
            return (address(ledger), _postAgain(piece.batchId));
        }
        if (move == 23) {
            proof.batch.postedAt = 1;
            return (address(ledger), abi.encodeCall(ledger.finaliseFraud, (proof)));
        }
        if (move == 24) return (address(court), abi.encodeCall(court.commitVote, (_fabricatedLeaf(), "vote")));
        if (move == 25 && workers.workerOf(attacker).status == IWorkerRegistry.Status.Banned) {
            return (address(workers), abi.encodeCall(workers.rejoin, ()));
        }
        return (address(0), "");
    }

    function _postAgain(uint64 batchId) private view returns (bytes memory) {
        bytes memory joined = _join(_records[batchId]);
        bytes memory signatures = _signOutcomes(batchId, joined, QUORUM);
        return abi.encodeCall(ledger.postOutcomes, (batches[batchId], joined, signatures));
    }

    /// @dev Signers, and whoever was not drawn, may not vote; nor may anybody vote on what is no case.
    function _fabricatedLeaf() private pure returns (bytes32) {
        return keccak256("no case");
    }

    // --------------------------------------------------------------------- views

    /// @notice Returns how many accounts, escrows, workers, cases, batches and funds differ from what events say.
    function differences() external view returns (uint256 count) {
        for (uint256 i = 0; i < replica.ownerCount(); ++i) {
            address account = replica.owners(i);
            if (_differ(abi.encode(vault.accountOf(account)), abi.encode(replica.accountOf(account)))) ++count;
        }
        for (uint256 i = 0; i < replica.offenceCount(); ++i) {
            bytes32 offence = replica.offences(i);
            if (_differ(abi.encode(vault.escrowOf(offence)), abi.encode(replica.escrowOf(offence)))) ++count;
        }
        for (uint256 i = 0; i < WORKERS; ++i) {
            if (_differ(abi.encode(workers.workerOf(team[i])), abi.encode(replica.workerOf(team[i])))) ++count;
        }
        for (uint256 i = 0; i < replica.caseCount(); ++i) {
            bytes32 leaf = replica.leaves(i);
            if (_differ(abi.encode(court.caseOf(leaf)), abi.encode(replica.caseOf(leaf)))) ++count;
        }
        for (uint64 batchId = 1; batchId <= ledger.batchCount(); ++batchId) {
            if (ledger.commitmentOf(batchId) != replica.commitmentOf(batchId)) ++count;
        }
        if (_differ(abi.encode(escrow.fundsOf(runId)), abi.encode(replica.fundsOf(runId)))) ++count;
        (,, uint256 pausedUntil) = runs.slashesOf(runId);
        if (pausedUntil != replica.slashPausedUntil(runId)) ++count;
    }

    function _differ(bytes memory a, bytes memory b) private pure returns (bool) {
        return keccak256(a) != keccak256(b);
    }

    /// @notice Returns how many active workers hold less than the requirement.
    function activeBelowRequirement() external view returns (uint256 wrong) {
        for (uint256 i = 0; i < WORKERS; ++i) {
            if (_status(team[i]) != IWorkerRegistry.Status.Active) continue;
            if (vault.activeStake(team[i]) < REQUIRED_STAKE) ++wrong;
        }
    }

    /// @notice Returns how many workers are banned with fewer than one conviction, or not banned with more than one.
    function wrongBans() external view returns (uint256 wrong) {
        for (uint256 i = 0; i < WORKERS; ++i) {
            IWorkerRegistry.Worker memory worker = workers.workerOf(team[i]);
            bool banned = worker.status == IWorkerRegistry.Status.Banned;
            if (banned ? worker.convictions == 0 : worker.convictions > 1) ++wrong;
        }
    }

    /// @notice Returns the sum of convictions over all workers.
    function convictions() external view returns (uint256 sum) {
        for (uint256 i = 0; i < WORKERS; ++i) {
            sum += workers.workerOf(team[i]).convictions;
        }
    }

    /// @notice Returns how many cases are open though another hearing could not even begin: none may be stuck.
    function openCasesHeld() external view returns (uint256 count) {
        for (uint256 i = 0; i < replica.ownerCount(); ++i) {
            count += vault.accountOf(replica.owners(i)).openCases;
        }
    }

    /// @notice Returns the balances and sums that solvency is about.
    function balances()
        external
        view
        returns (uint256 vaultHolds, uint256 escrowHolds, uint256 courtHolds, uint256 supply)
    {
        vaultHolds = token.balanceOf(address(vault));
        escrowHolds = token.balanceOf(address(escrow));
        courtHolds = token.balanceOf(address(court));
        supply = token.totalSupply();
    }

    /// @notice Returns the money of the run.
    function funds() external view returns (IRewardEscrow.Funds memory) {
        return escrow.fundsOf(runId);
    }
}
