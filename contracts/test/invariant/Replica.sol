// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {Vm} from "forge-std/Vm.sol";

import {IContributionLedger, IContributionLedgerEvents} from "../../src/interfaces/IContributionLedger.sol";
import {IDisputeCourt, IDisputeCourtEvents} from "../../src/interfaces/IDisputeCourt.sol";
import {IFaultCourtEvents} from "../../src/interfaces/IFaultCourt.sol";
import {IRewardEscrow, IRewardEscrowEvents} from "../../src/interfaces/IRewardEscrow.sol";
import {IRunRegistryEvents} from "../../src/interfaces/IRunRegistry.sol";
import {IStakeVault, IStakeVaultEvents} from "../../src/interfaces/IStakeVault.sol";
import {IWorkerRegistry, IWorkerRegistryEvents} from "../../src/interfaces/IWorkerRegistry.sol";

/// @title The network's state, rebuilt from its events and nothing else
/// @dev Knows no contract. Logs must be replayed in the block that emitted them: a case's opening time is its block's.
contract Replica {
    mapping(address owner => IStakeVault.Account) private _accounts;
    mapping(bytes32 offence => IStakeVault.Escrow) private _escrows;
    mapping(address worker => IWorkerRegistry.Worker) private _workers;
    mapping(bytes32 leaf => IDisputeCourt.Case) private _cases;
    mapping(uint64 batchId => IContributionLedger.Batch) private _batches;
    mapping(uint64 batchId => bool) private _disputed;
    mapping(uint64 runId => IRewardEscrow.Funds) private _funds;

    address[] public owners;
    mapping(address owner => bool) private _isOwner;
    bytes32[] public offences;
    bytes32[] public leaves;
    uint64 public batchCount;

    /// @notice When the last pause of a run's slashing ends.
    mapping(uint64 runId => uint256) public slashPausedUntil;

    uint256 public funded;
    uint256 public everReserved;
    uint256 public paid;
    uint256 public burned;

    /// @notice Convictions executed less those acquitted, all workers together.
    uint256 public convictions;

    /// @notice Times that an event said something that those before it contradict; see `contradiction`.
    uint256 public contradictions;
    string public contradiction;

    function replay(Vm.Log[] calldata logs) external {
        for (uint256 i = 0; i < logs.length; ++i) {
            Vm.Log calldata log = logs[i];
            if (log.topics.length == 0) continue;
            bool known = _replayVault(log) || _replayRegistry(log) || _replayEscrow(log) || _replayCourt(log);
            if (!known) known = _replayPause(log);
            if (!known) _replayLedger(log);
        }
    }

    function _require(bool holds, string memory what) private {
        if (holds) return;
        ++contradictions;
        contradiction = what;
    }

    function _address(bytes32 topic) private pure returns (address) {
        return address(uint160(uint256(topic)));
    }

    function _account(bytes32 topic) private returns (IStakeVault.Account storage) {
        address owner = _address(topic);
        if (!_isOwner[owner]) {
            _isOwner[owner] = true;
            owners.push(owner);
        }
        return _accounts[owner];
    }

    // --------------------------------------------------------------------- vault

    function _replayVault(Vm.Log calldata log) private returns (bool) {
        bytes32 name = log.topics[0];
        if (name == IStakeVaultEvents.Deposited.selector) _deposited(log);
        else if (name == IStakeVaultEvents.UnbondRequested.selector) _unbondRequested(log);
        else if (name == IStakeVaultEvents.Withdrawn.selector) _withdrawn(log);
        else if (name == IStakeVaultEvents.Slashed.selector) _slashed(log);
        else if (name == IStakeVaultEvents.SlashReleased.selector) _released(log);
        else if (name == IStakeVaultEvents.SlashRestored.selector) _restored(log);
        else if (name == IStakeVaultEvents.StakeHeld.selector) _held(log);
        else return false;
        return true;
    }

    function _deposited(Vm.Log calldata log) private {
        (uint256 amount, uint256 active) = abi.decode(log.data, (uint256, uint256));
        IStakeVault.Account storage account = _account(log.topics[1]);
        account.active += uint128(amount);
        _require(account.active == active, "Deposited: active");
    }

    function _unbondRequested(Vm.Log calldata log) private {
        (uint256 amount, uint256 unbonding, uint256 at) = abi.decode(log.data, (uint256, uint256, uint256));
        IStakeVault.Account storage account = _account(log.topics[1]);
        account.active -= uint128(amount);
        account.unbonding += uint128(amount);
        account.withdrawableAt = uint64(at);
        _require(account.unbonding == unbonding, "UnbondRequested: unbonding");
    }

    function _withdrawn(Vm.Log calldata log) private {
        IStakeVault.Account storage account = _account(log.topics[1]);
        _require(account.unbonding == abi.decode(log.data, (uint256)), "Withdrawn: amount");
        account.unbonding = 0;
        account.withdrawableAt = 0;
    }

    function _slashed(Vm.Log calldata log) private {
        (uint256 fromActive, uint256 fromUnbonding, address reporter) =
            abi.decode(log.data, (uint256, uint256, address));
        IStakeVault.Account storage account = _account(log.topics[1]);
        _require(fromActive <= account.active && fromUnbonding <= account.unbonding, "Slashed: more than there is");
        account.active -= uint128(fromActive);
        account.unbonding -= uint128(fromUnbonding);
        IStakeVault.Escrow storage escrow = _escrows[log.topics[2]];
        _require(escrow.status == IStakeVault.EscrowStatus.None, "Slashed: twice");
        offences.push(log.topics[2]);
        _escrows[log.topics[2]] = IStakeVault.Escrow(
            _address(log.topics[1]), reporter, uint88(fromActive + fromUnbonding), IStakeVault.EscrowStatus.Held
        );
    }

    function _released(Vm.Log calldata log) private {
        (uint256 burned_, uint256 insured, uint256 rewarded) = abi.decode(log.data, (uint256, uint256, uint256));
        IStakeVault.Escrow storage escrow = _escrows[log.topics[1]];
        _require(escrow.status == IStakeVault.EscrowStatus.Held, "SlashReleased: not held");
        _require(burned_ + insured + rewarded == escrow.amount, "SlashReleased: the split is not the amount");
        escrow.status = IStakeVault.EscrowStatus.Released;
        burned += burned_;
    }

    function _restored(Vm.Log calldata log) private {
        IStakeVault.Escrow storage escrow = _escrows[log.topics[2]];
        _require(escrow.status == IStakeVault.EscrowStatus.Held, "SlashRestored: not held");
        _require(escrow.amount == abi.decode(log.data, (uint256)), "SlashRestored: amount");
        escrow.status = IStakeVault.EscrowStatus.Restored;
        _account(log.topics[1]).active += escrow.amount;
    }

    function _held(Vm.Log calldata log) private {
        (uint256 until, uint256 cases) = abi.decode(log.data, (uint256, uint256));
        IStakeVault.Account storage account = _account(log.topics[1]);
        account.heldUntil = uint64(until);
        account.openCases = uint32(cases);
    }

    // ------------------------------------------------------------------ registry

    function _replayRegistry(Vm.Log calldata log) private returns (bool) {
        bytes32 name = log.topics[0];
        IWorkerRegistry.Worker storage worker = _workers[log.topics.length > 1 ? _address(log.topics[1]) : address(0)];
        if (name == IWorkerRegistryEvents.WorkerRegistered.selector) {
            (worker.workerId, worker.activeFrom) = abi.decode(log.data, (uint32, uint64));
            worker.node = _address(log.topics[2]);
            worker.status = IWorkerRegistry.Status.Active;
        } else if (name == IWorkerRegistryEvents.NodeRotated.selector) {
            _require(worker.node == _address(log.topics[2]), "NodeRotated: old node");
            worker.node = _address(log.topics[3]);
        } else if (name == IWorkerRegistryEvents.WorkerJailed.selector) {
            // Who is leaving goes on leaving.
            if (worker.status == IWorkerRegistry.Status.Active) worker.status = IWorkerRegistry.Status.Jailed;
            worker.jailedUntil = abi.decode(log.data, (uint64));
        } else if (
            name == IWorkerRegistryEvents.WorkerUnjailed.selector
                || name == IWorkerRegistryEvents.WorkerRejoined.selector
        ) {
            worker.status = IWorkerRegistry.Status.Active;
            worker.activeFrom = abi.decode(log.data, (uint64));
        } else if (name == IWorkerRegistryEvents.WorkerExiting.selector) {
            worker.status = IWorkerRegistry.Status.Exiting;
        } else if (name == IWorkerRegistryEvents.WorkerBanned.selector) {
            worker.status = IWorkerRegistry.Status.Banned;
        } else if (name == IWorkerRegistryEvents.WorkerAcquitted.selector) {
            worker.status = abi.decode(log.data, (IWorkerRegistry.Status));
            --worker.convictions;
            --convictions;
        } else {
            return false;
        }
        return true;
    }

    // ---------------------------------------------------------------------- runs

    function _replayPause(Vm.Log calldata log) private returns (bool) {
        if (log.topics[0] != IRunRegistryEvents.SlashingPaused.selector) return false;
        uint64 runId = uint64(uint256(log.topics[1]));
        (,,, uint256 until) = abi.decode(log.data, (uint8, uint8, bytes32, uint256));
        _require(until > block.timestamp, "SlashingPaused: over already");
        _require(block.timestamp > slashPausedUntil[runId], "SlashingPaused: without a break");
        slashPausedUntil[runId] = until;
        return true;
    }

    // -------------------------------------------------------------------- escrow

    function _replayEscrow(Vm.Log calldata log) private returns (bool) {
        bytes32 name = log.topics[0];
        IRewardEscrow.Funds storage funds = _funds[log.topics.length > 1 ? uint64(uint256(log.topics[1])) : 0];
        if (name == IRewardEscrowEvents.RunFunded.selector) {
            uint256 amount = abi.decode(log.data, (uint256));
            funded += amount;
            funds.available += uint128(amount);
        } else if (name == IRewardEscrowEvents.RewardReserved.selector) {
            uint256 amount = abi.decode(log.data, (uint256));
            everReserved += amount;
            funds.available -= uint128(amount);
            funds.reserved += uint128(amount);
        } else if (name == IRewardEscrowEvents.RewardClaimed.selector) {
            (,, uint256 amount) = abi.decode(log.data, (uint256, uint256, uint256));
            paid += amount;
            funds.reserved -= uint128(amount);
        } else if (name == IRewardEscrowEvents.RewardRecovered.selector) {
            (, uint256 amount) = abi.decode(log.data, (uint256, uint256));
            funds.reserved -= uint128(amount);
            funds.available += uint128(amount);
        } else {
            return false;
        }
        return true;
    }

    // --------------------------------------------------------------------- court

    function _replayCourt(Vm.Log calldata log) private returns (bool) {
        bytes32 name = log.topics[0];
        IDisputeCourt.Case storage judged = _cases[log.topics.length > 1 ? log.topics[1] : bytes32(0)];
        if (name == IDisputeCourtEvents.CaseOpened.selector) {
            _opened(log, judged);
        } else if (name == IDisputeCourtEvents.DrawPostponed.selector) {
            judged.drawBlock = abi.decode(log.data, (uint32));
        } else if (name == IDisputeCourtEvents.JuryDrawn.selector) {
            (judged.jury,) = abi.decode(log.data, (uint88, address[]));
        } else if (name == IDisputeCourtEvents.VoteCommitted.selector) {
            ++judged.committed;
        } else if (name == IDisputeCourtEvents.VoteRevealed.selector) {
            (bool overturn,) = abi.decode(log.data, (bool, bytes32));
            if (overturn) ++judged.votesToOverturn;
            else ++judged.votesToUphold;
        } else if (name == IDisputeCourtEvents.CaseClosed.selector) {
            (bool overturned,,) = abi.decode(log.data, (bool, uint8, uint256));
            judged.status = overturned ? IDisputeCourt.CaseStatus.Overturned : IDisputeCourt.CaseStatus.Upheld;
        } else {
            return false;
        }
        return true;
    }

    function _opened(Vm.Log calldata log, IDisputeCourt.Case storage judged) private {
        (, uint8 recorded, uint8 claimed, uint256 drawBlock) = abi.decode(log.data, (uint32, uint8, uint8, uint256));
        uint64 batchId = uint64(uint256(log.topics[2]));
        leaves.push(log.topics[1]);
        judged.challenger = _address(log.topics[3]);
        judged.batchId = batchId;
        judged.recordedVerdict = recorded;
        judged.claimedVerdict = claimed;
        judged.runId = _batches[batchId].runId;
        judged.status = IDisputeCourt.CaseStatus.Open;
        judged.openedAt = uint40(block.timestamp);
        judged.drawBlock = uint32(drawBlock);
        _disputed[batchId] = true;
    }

    // -------------------------------------------------------------------- ledger

    function _replayLedger(Vm.Log calldata log) private {
        bytes32 name = log.topics[0];
        if (name == IContributionLedgerEvents.BatchCommitted.selector) _committed(log);
        if (name == IContributionLedgerEvents.OutcomesPosted.selector) _posted(log);
        bool fraud = name == IContributionLedgerEvents.FraudExecuted.selector;
        if (fraud || name == IFaultCourtEvents.DoubleSubmissionProven.selector) {
            ++_workers[_address(log.topics[fraud ? 2 : 1])].convictions;
            ++convictions;
        }
    }

    function _committed(Vm.Log calldata log) private {
        IContributionLedger.Batch storage batch = _batches[uint64(uint256(log.topics[1]))];
        _require(batch.batchId == 0, "BatchCommitted: twice");
        batch.batchId = uint64(uint256(log.topics[1]));
        batch.runId = uint64(uint256(log.topics[2]));
        (batch.root, batch.count, batch.units, batch.pricePerUnit, batch.committedAt) =
            abi.decode(log.data, (bytes32, uint32, uint64, uint88, uint40));
        batchCount = batch.batchId;
    }

    function _posted(Vm.Log calldata log) private {
        IContributionLedger.Batch storage batch = _batches[uint64(uint256(log.topics[1]))];
        _require(batch.batchId != 0 && batch.postedAt == 0, "OutcomesPosted: unknown or twice");
        (batch.root, batch.postedAt, batch.signers,,) = abi.decode(log.data, (bytes32, uint40, uint88, bytes, bytes));
    }

    // --------------------------------------------------------------------- views

    function accountOf(address owner) external view returns (IStakeVault.Account memory) {
        return _accounts[owner];
    }

    function escrowOf(bytes32 offence) external view returns (IStakeVault.Escrow memory) {
        return _escrows[offence];
    }

    function workerOf(address worker) external view returns (IWorkerRegistry.Worker memory) {
        return _workers[worker];
    }

    function caseOf(bytes32 leaf) external view returns (IDisputeCourt.Case memory) {
        return _cases[leaf];
    }

    function fundsOf(uint64 runId) external view returns (IRewardEscrow.Funds memory) {
        return _funds[runId];
    }

    function batchOf(uint64 batchId) external view returns (IContributionLedger.Batch memory) {
        return _batches[batchId];
    }

    /// @notice Returns what the ledger must store for a batch.
    function commitmentOf(uint64 batchId) external view returns (bytes32) {
        bytes32 hash = keccak256(abi.encode(_batches[batchId])) & ~bytes32(uint256(1));
        return _disputed[batchId] ? hash | bytes32(uint256(1)) : hash;
    }

    /// @notice Returns the stakes and held escrows of everybody, which are what the vault owes.
    function owedByVault() external view returns (uint256 sum) {
        for (uint256 i = 0; i < owners.length; ++i) {
            sum += _accounts[owners[i]].active + _accounts[owners[i]].unbonding;
        }
        for (uint256 i = 0; i < offences.length; ++i) {
            IStakeVault.Escrow storage escrow = _escrows[offences[i]];
            if (escrow.status == IStakeVault.EscrowStatus.Held) sum += escrow.amount;
        }
    }

    /// @notice Returns how many cases are open.
    function openCases() external view returns (uint256 count) {
        for (uint256 i = 0; i < leaves.length; ++i) {
            if (_cases[leaves[i]].status == IDisputeCourt.CaseStatus.Open) ++count;
        }
    }

    function ownerCount() external view returns (uint256) {
        return owners.length;
    }

    function offenceCount() external view returns (uint256) {
        return offences.length;
    }

    function caseCount() external view returns (uint256) {
        return leaves.length;
    }
}
