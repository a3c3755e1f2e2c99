// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {Vm} from "forge-std/Vm.sol";

import {IContributionLedger, IContributionLedgerEvents} from "../../src/interfaces/IContributionLedger.sol";
import {IDisputeCourt, IDisputeCourtEvents} from "../../src/interfaces/IDisputeCourt.sol";
import {IFaultCourtEvents} from "../../src/interfaces/IFaultCourt.sol";
import {IJuryPoolEvents} from "../../src/interfaces/IJuryPool.sol";
import {IRewardEscrow, IRewardEscrowEvents} from "../../src/interfaces/IRewardEscrow.sol";
import {IRunRegistryEvents} from "../../src/interfaces/IRunRegistry.sol";
import {IStakeVault, IStakeVaultEvents} from "../../src/interfaces/IStakeVault.sol";
import {IWorkerRegistry, IWorkerRegistryEvents} from "../../src/interfaces/IWorkerRegistry.sol";

/// @title The network's state, rebuilt from its events and nothing else
/// @dev Knows no contract. Logs must be replayed in the block that emitted them: a case's opening time is its
///      block's.
contract Replica {
    /// @dev What changed the stake of an account in a run: coming (positive), going (negative), or an offence.
    struct Change {
        int256 amount;
        bytes32 offence;
    }

    /// @dev What became of an escrow's amount.
    struct Seized {
        uint64 runId;
        address owner;
        uint256 amount;
        IStakeVault.EscrowStatus status;
        bool exact;
    }

    uint256 private immutable _bond;
    uint256 private immutable _unbondingPeriod;

    mapping(uint64 run => mapping(address owner => IStakeVault.Account)) private _accounts;
    mapping(uint64 run => mapping(address owner => Change[])) private _changes;
    mapping(uint64 run => mapping(address worker => IWorkerRegistry.Member)) private _members;
    mapping(uint64 run => mapping(address validator => bool)) public isSeated;
    mapping(address juror => bool) public isOnBench;
    mapping(address juror => uint256) public leftBenchAt;
    mapping(uint64 run => IRewardEscrow.Funds) private _funds;
    mapping(uint64 run => uint256) public slashPausedUntil;
    mapping(bytes32 offence => Seized) private _seized;
    mapping(bytes32 caseId => IDisputeCourt.Case) private _cases;
    mapping(bytes32 caseId => mapping(uint16 kind => uint8)) private _tally;
    mapping(bytes32 caseId => uint64) private _batchOfCase;
    mapping(uint64 batchId => IContributionLedger.Batch) private _batches;
    mapping(uint64 batchId => bool) private _isDisputed;
    mapping(uint64 batchId => bool) private _isVoid;

    bytes32[] private _offences;
    bytes32[] public cases;

    /// @notice Sum of all active and unbonding stake.
    uint256 public staked;

    /// @notice Bonds that the court holds, and fees that jurors have not yet collected.
    uint256 public owedByCourt;

    mapping(uint64 run => uint256) public paid;
    mapping(uint64 run => uint256) public everReserved;

    /// @notice Times that an event said something that those before it contradict; see `contradiction`.
    uint256 public contradictions;
    string public contradiction;

    constructor(uint256 bond, uint256 unbondingPeriod) {
        _bond = bond;
        _unbondingPeriod = unbondingPeriod;
    }

    function replay(Vm.Log[] calldata logs) external {
        for (uint256 i = 0; i < logs.length; ++i) {
            Vm.Log calldata log = logs[i];
            if (log.topics.length < 2) continue;
            if (_replayVault(log) || _replayMember(log) || _replaySeat(log) || _replayEscrow(log)) continue;
            if (!_replayCase(log)) _replayLedger(log);
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

    function _number(bytes32 topic) private pure returns (uint64) {
        return uint64(uint256(topic));
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
        else if (name == IStakeVaultEvents.SlashFollowed.selector) _followed(log);
        else return false;
        return true;
    }

    function _account(Vm.Log calldata log) private view returns (IStakeVault.Account storage) {
        return _accounts[_number(log.topics[1])][_address(log.topics[2])];
    }

    function _change(Vm.Log calldata log, int256 amount, bytes32 offence) private {
        _changes[_number(log.topics[1])][_address(log.topics[2])].push(Change(amount, offence));
    }

    function _deposited(Vm.Log calldata log) private {
        (uint256 amount, uint256 active) = abi.decode(log.data, (uint256, uint256));
        IStakeVault.Account storage account = _account(log);
        account.active += amount;
        staked += amount;
        _change(log, int256(amount), 0);
        _require(account.active == active, "Deposited: active");
    }

    function _unbondRequested(Vm.Log calldata log) private {
        (uint256 amount, uint256 unbonding, uint256 at) = abi.decode(log.data, (uint256, uint256, uint256));
        IStakeVault.Account storage account = _account(log);
        account.active -= amount;
        account.unbonding += amount;
        account.withdrawableAt = at;
        _require(account.unbonding == unbonding, "UnbondRequested: unbonding");
        _require(at == block.timestamp + _unbondingPeriod, "UnbondRequested: takes another time");
    }

    function _withdrawn(Vm.Log calldata log) private {
        IStakeVault.Account storage account = _account(log);
        uint256 amount = abi.decode(log.data, (uint256));
        _require(account.unbonding == amount, "Withdrawn: amount");
        staked -= amount;
        _change(log, -int256(amount), 0);
        (account.unbonding, account.withdrawableAt) = (0, 0);
    }

    function _slashed(Vm.Log calldata log) private {
        (IStakeVault.Verdict memory verdict, uint256 fromActive, uint256 fromUnbonding) =
            abi.decode(log.data, (IStakeVault.Verdict, uint256, uint256));
        IStakeVault.Account storage account = _account(log);
        uint64 run = _number(log.topics[1]);
        account.active -= fromActive;
        account.unbonding -= fromUnbonding;
        staked -= fromActive + fromUnbonding;
        bytes32 id = log.topics[3];
        _require(_seized[id].status == IStakeVault.EscrowStatus.None, "Slashed: twice");
        _require(_isOfRun(verdict, run), "Slashed: in a run that it is not about");
        _change(log, 0, id);
        _offences.push(id);
        Seized storage seized = _seized[id];
        (seized.runId, seized.owner) = (run, _address(log.topics[2]));
        seized.amount = fromActive + fromUnbonding;
        bool held = verdict.batchId != 0;
        if (held) ++account.held;
        seized.status = held ? IStakeVault.EscrowStatus.Held : IStakeVault.EscrowStatus.Released;
        seized.exact = verdict.offence == IStakeVault.Offence.ExactFraud
            || verdict.offence == IStakeVault.Offence.DoubleSubmission;
        if (seized.exact) ++_members[run][seized.owner].exactConvictions;
    }

    /// @dev Whether what stake is taken for happened in the run that the stake is for.
    function _isOfRun(IStakeVault.Verdict memory verdict, uint64 run) private view returns (bool) {
        IStakeVault.Offence offence = verdict.offence;
        if (offence == IStakeVault.Offence.AbsentJuror) return run == 0;
        bool tagged = offence == IStakeVault.Offence.WrongVerdict || offence == IStakeVault.Offence.DoubleOutcome;
        if (tagged) return _batches[verdict.tag].runId == run;
        return run != 0 && (verdict.batchId == 0 || _batches[verdict.batchId].runId == run);
    }

    function _released(Vm.Log calldata log) private {
        Seized storage seized = _seized[log.topics[1]];
        (, uint256 burned, uint256 insured, uint256 rewarded) =
            abi.decode(log.data, (address, uint256, uint256, uint256));
        if (seized.status != IStakeVault.EscrowStatus.Held) return;
        _require(burned + insured + rewarded == seized.amount, "SlashReleased: the split is not the amount");
        seized.status = IStakeVault.EscrowStatus.Released;
        --_accounts[seized.runId][seized.owner].held;
    }

    function _restored(Vm.Log calldata log) private {
        Seized storage seized = _seized[log.topics[3]];
        (uint256 returned, uint256 followed) = abi.decode(log.data, (uint256, uint256));
        IStakeVault.Account storage account = _account(log);
        _require(seized.status == IStakeVault.EscrowStatus.Held, "SlashRestored: not held");
        _require(returned + followed == seized.amount, "SlashRestored: amount");
        seized.status = IStakeVault.EscrowStatus.Restored;
        account.active += returned;
        staked += returned;
        --account.held;
        if (seized.exact) --_members[seized.runId][seized.owner].exactConvictions;
    }

    function _followed(Vm.Log calldata log) private {
        Seized storage later = _seized[log.topics[1]];
        _require(later.status != IStakeVault.EscrowStatus.Restored, "SlashFollowed: restored");
        later.amount += abi.decode(log.data, (uint256));
    }

    // ------------------------------------------------------- workers, seats, bench

    function _replayMember(Vm.Log calldata log) private returns (bool) {
        bytes32 name = log.topics[0];
        if (log.topics.length < 3) return false;
        IWorkerRegistry.Member storage member = _members[_number(log.topics[1])][_address(log.topics[2])];
        if (
            name == IWorkerRegistryEvents.WorkerJoined.selector || name == IWorkerRegistryEvents.WorkerReturned.selector
        ) {
            member.status = IWorkerRegistry.Status.Active;
            (, uint256 activeFrom) = abi.decode(log.data, (uint32, uint256));
            (member.activeFrom, member.leftAt) = (uint40(activeFrom), 0);
        } else if (name == IWorkerRegistryEvents.WorkerJailed.selector) {
            if (log.topics[3] != 0) _convicted(member);
            // Who is leaving goes on leaving.
            if (member.status == IWorkerRegistry.Status.Active) member.status = IWorkerRegistry.Status.Jailed;
            member.jailedUntil = uint40(abi.decode(log.data, (uint256)));
        } else if (name == IWorkerRegistryEvents.WorkerBanned.selector) {
            _convicted(member);
            member.status = IWorkerRegistry.Status.Banned;
        } else if (name == IWorkerRegistryEvents.WorkerExiting.selector) {
            (member.status, member.leftAt) = (IWorkerRegistry.Status.Exiting, uint40(block.timestamp));
        } else if (name == IWorkerRegistryEvents.WorkerAcquitted.selector) {
            member.status = abi.decode(log.data, (IWorkerRegistry.Status));
            --member.convictions;
        } else {
            return false;
        }
        return true;
    }

    function _convicted(IWorkerRegistry.Member storage member) private {
        if (member.convictions++ == 0) member.statusBefore = member.status;
    }

    function _replaySeat(Vm.Log calldata log) private returns (bool) {
        bytes32 name = log.topics[0];
        if (name == IRunRegistryEvents.ValidatorSeated.selector) {
            isSeated[_number(log.topics[1])][_address(log.topics[2])] = true;
        } else if (name == IRunRegistryEvents.ValidatorUnseated.selector) {
            isSeated[_number(log.topics[1])][_address(log.topics[2])] = false;
        } else if (name == IJuryPoolEvents.JurorJoined.selector) {
            isOnBench[_address(log.topics[1])] = true;
        } else if (name == IJuryPoolEvents.JurorLeft.selector) {
            isOnBench[_address(log.topics[1])] = false;
            leftBenchAt[_address(log.topics[1])] = block.timestamp;
        } else if (name == IRunRegistryEvents.SlashingPaused.selector) {
            (,,, uint256 until) = abi.decode(log.data, (uint8, uint8, bytes32, uint256));
            slashPausedUntil[_number(log.topics[1])] = until;
        } else {
            return false;
        }
        return true;
    }

    // -------------------------------------------------------------------- escrow

    function _replayEscrow(Vm.Log calldata log) private returns (bool) {
        bytes32 name = log.topics[0];
        uint64 run = _number(log.topics[1]);
        IRewardEscrow.Funds storage funds = _funds[run];
        if (name == IRewardEscrowEvents.RunFunded.selector) {
            funds.available += abi.decode(log.data, (uint128));
        } else if (name == IRewardEscrowEvents.RewardReserved.selector) {
            uint128 amount = abi.decode(log.data, (uint128));
            everReserved[run] += amount;
            funds.available -= amount;
            funds.reserved += amount;
        } else if (name == IRewardEscrowEvents.RewardFreed.selector) {
            _free(funds, abi.decode(log.data, (uint128)));
        } else if (name == IRewardEscrowEvents.RewardRecovered.selector) {
            (, uint128 amount) = abi.decode(log.data, (uint256, uint128));
            _free(funds, amount);
        } else if (name == IRewardEscrowEvents.RewardClaimed.selector) {
            (,, uint128 amount) = abi.decode(log.data, (uint256, uint256, uint128));
            paid[run] += amount;
            funds.reserved -= amount;
        } else if (name == IRewardEscrowEvents.CourtPaid.selector) {
            funds.available -= abi.decode(log.data, (uint128));
        } else if (name == IRewardEscrowEvents.RunReclaimed.selector) {
            uint128 amount = abi.decode(log.data, (uint128));
            uint128 reserved = amount - funds.available;
            (funds.available, funds.reserved) = (0, funds.reserved - reserved);
        } else {
            return false;
        }
        return true;
    }

    function _free(IRewardEscrow.Funds storage funds, uint128 amount) private {
        funds.reserved -= amount;
        funds.available += amount;
    }

    // --------------------------------------------------------------------- court

    function _replayCase(Vm.Log calldata log) private returns (bool) {
        bytes32 name = log.topics[0];
        IDisputeCourt.Case storage judged = _cases[log.topics[1]];
        if (name == IDisputeCourtEvents.CaseOpened.selector) {
            _caseOpened(log, judged);
        } else if (name == IDisputeCourtEvents.Claimed.selector) {
            _claimed(log, judged);
        } else if (name == IDisputeCourtEvents.BondTaken.selector) {
            owedByCourt += _bond;
        } else if (name == IDisputeCourtEvents.BondReturned.selector) {
            owedByCourt -= _bond;
        } else if (name == IDisputeCourtEvents.ClaimSettled.selector) {
            owedByCourt -= _bond;
        } else if (name == IDisputeCourtEvents.FeeCollected.selector) {
            owedByCourt -= abi.decode(log.data, (uint256));
        } else if (name == IDisputeCourtEvents.VoteCommitted.selector) {
            ++judged.committed;
        } else if (name == IDisputeCourtEvents.VoteRevealed.selector) {
            _voteRevealed(log, judged);
        } else if (name == IDisputeCourtEvents.CaseClosed.selector) {
            _caseClosed(log, judged);
        } else if (name == IDisputeCourtEvents.DrawPostponed.selector) {
            judged.drawBlock = abi.decode(log.data, (uint40));
        } else if (name == IDisputeCourtEvents.JuryDrawn.selector) {
            judged.jurors = uint8(abi.decode(log.data, (address[])).length);
        } else {
            return false;
        }
        return true;
    }

    function _caseOpened(Vm.Log calldata log, IDisputeCourt.Case storage judged) private {
        uint256 drawBlock;
        uint256 places;
        (judged.number,, judged.worker, judged.recorded, drawBlock, places) =
            abi.decode(log.data, (uint32, uint32, address, uint16, uint256, uint256));
        judged.drawBlock = uint40(drawBlock);
        judged.places = uint32(places);
        judged.runId = _number(log.topics[3]);
        judged.status = IDisputeCourt.CaseStatus.Open;
        judged.openedAt = uint40(block.timestamp);
        cases.push(log.topics[1]);
        _batchOfCase[log.topics[1]] = _number(log.topics[2]);
        if (judged.recorded != 0) _isDisputed[_number(log.topics[2])] = true;
    }

    /// @dev Who calls judges puts up no claim; its bond has events of its own.
    function _claimed(Vm.Log calldata log, IDisputeCourt.Case storage judged) private {
        (uint16 ruling, IContributionLedger.CommittedWork memory work,) =
            abi.decode(log.data, (uint16, IContributionLedger.CommittedWork, string[]));
        _require(judged.worker == work.submission.worker, "Claimed: another worker");
        judged.tag = uint64(work.submission.step) << 32 | work.submission.index;
        // Every claim of the suite proves its work; whoever calls judges is heard about what it committed alone.
        judged.isProven = ruling != 0;
        if (ruling != 0) owedByCourt += _bond;
    }

    function _voteRevealed(Vm.Log calldata log, IDisputeCourt.Case storage judged) private {
        (uint16 ruling,) = abi.decode(log.data, (uint16, bytes32));
        ++judged.revealed;
        uint8 votes = ++_tally[log.topics[1]][_kindOf(ruling)];
        judged.tied = votes == judged.leadingVotes;
        if (votes <= judged.leadingVotes) return;
        if (votes == 1 || _kindOf(judged.leading) != _kindOf(ruling)) judged.leading = ruling;
        judged.leadingVotes = votes;
    }

    /// @dev Verdict and whether it is an exact fraud; zero for what says that nothing was seen.
    function _kindOf(uint16 ruling) private pure returns (uint16) {
        (uint16 verdict, uint16 reason) = (ruling >> 8, ruling & 0xff);
        if (ruling == 0 || (reason == 15 && verdict != 1 && verdict != 4)) return 0;
        return verdict << 1 | (verdict == 4 && reason >= 30 && reason < 60 ? 1 : 0);
    }

    /// @dev The bond of who called judges is lost unless they accept the work, or are of no one mind.
    function _caseClosed(Vm.Log calldata log, IDisputeCourt.Case storage judged) private {
        uint16 ruling;
        uint256 fee;
        (judged.status, ruling, judged.reporter, fee) =
            abi.decode(log.data, (IDisputeCourt.CaseStatus, uint16, address, uint256));
        judged.fee = uint88(fee);
        bool decided = judged.leadingVotes != 0 && !judged.tied;
        if (decided) owedByCourt += fee * judged.leadingVotes;
        if (judged.recorded == 0 && decided && judged.leading >> 8 != 1) owedByCourt -= _bond;
    }

    // -------------------------------------------------------------------- ledger

    function _replayLedger(Vm.Log calldata log) private {
        bytes32 name = log.topics[0];
        IContributionLedger.Batch storage batch = _batches[_number(log.topics[1])];
        if (name == IContributionLedgerEvents.BatchCommitted.selector) {
            _committed(log, batch);
        } else if (name == IContributionLedgerEvents.BatchSplit.selector) {
            _split(log, batch);
        } else if (name == IContributionLedgerEvents.OutcomesPosted.selector) {
            _require(batch.batchId != 0 && batch.outcomesRoot == 0, "OutcomesPosted: unknown");
            (batch.outcomesRoot, batch.postedAt, batch.signers,,) =
                abi.decode(log.data, (bytes32, uint40, uint88, bytes, bytes));
            batch.status = IContributionLedger.BatchStatus.Judged;
        } else if (name == IContributionLedgerEvents.BatchWithheld.selector) {
            (batch.postedAt, batch.signers,) = abi.decode(log.data, (uint40, uint88, bytes));
            batch.status = IContributionLedger.BatchStatus.Withheld;
        } else if (name == IContributionLedgerEvents.BatchVoided.selector) {
            _require(batch.status != IContributionLedger.BatchStatus.Judged, "BatchVoided: judged");
            _isVoid[batch.batchId] = true;
        }
    }

    function _committed(Vm.Log calldata log, IContributionLedger.Batch storage batch) private {
        _require(batch.batchId == 0, "BatchCommitted: twice");
        // The event has the fields of a header in their order, but for those that come with the outcomes.
        bytes memory header = bytes.concat(
            log.topics[1], log.topics[2], bytes32(log.data[:32]), bytes32(0), log.data[32:], abi.encode(0, 0, 0)
        );
        _batches[_number(log.topics[1])] = abi.decode(header, (IContributionLedger.Batch));
    }

    function _split(Vm.Log calldata log, IContributionLedger.Batch storage own) private {
        IContributionLedger.Batch storage from = _batches[_number(log.topics[2])];
        (IContributionLedger.LeasedWork memory work,) = abi.decode(log.data, (IContributionLedger.LeasedWork, string[]));
        from.units -= work.submission.units;
        _require(own.units == work.submission.units, "BatchSplit: units");
        (own.postedAt, own.signers, own.status) = (from.postedAt, from.signers, from.status);
    }

    // --------------------------------------------------------------------- views

    function accountOf(uint64 run, address owner) external view returns (IStakeVault.Account memory) {
        return _accounts[run][owner];
    }

    function memberOf(uint64 run, address worker) external view returns (IWorkerRegistry.Member memory) {
        return _members[run][worker];
    }

    function fundsOf(uint64 run) external view returns (IRewardEscrow.Funds memory) {
        return _funds[run];
    }

    function caseOf(bytes32 caseId) external view returns (IDisputeCourt.Case memory) {
        return _cases[caseId];
    }

    function caseCount() external view returns (uint256) {
        return cases.length;
    }

    /// @notice Returns what the ledger must store for a batch.
    function commitmentOf(uint64 batchId) external view returns (bytes32) {
        if (_isVoid[batchId]) return 0;
        bytes32 hash = keccak256(abi.encode(_batches[batchId])) & ~bytes32(uint256(1));
        return _isDisputed[batchId] ? hash | bytes32(uint256(1)) : hash;
    }

    /// @notice Returns all stake that waits in escrow.
    function heldInEscrow() external view returns (uint256 sum) {
        for (uint256 i = 0; i < _offences.length; ++i) {
            Seized storage seized = _seized[_offences[i]];
            if (seized.status == IStakeVault.EscrowStatus.Held) sum += seized.amount;
        }
    }

    /// @notice Returns what an account lost in a run: its stake that came, less what went, is there or waits in
    ///         escrow.
    function lostBy(uint64 run, address owner) external view returns (int256 lost) {
        Change[] storage changes = _changes[run][owner];
        for (uint256 i = 0; i < changes.length; ++i) {
            lost += changes[i].amount;
            Seized storage seized = _seized[changes[i].offence];
            if (seized.status == IStakeVault.EscrowStatus.Held) lost -= int256(seized.amount);
        }
        lost -= int256(_accounts[run][owner].active + _accounts[run][owner].unbonding);
    }

    /// @notice Returns the stake that an account would have in a run if offences that were overturned had never been
    ///         punished, and how many offences there are.
    /// @param vault Tells what share each offence costs.
    function stakeWithoutAcquitted(uint64 run, address owner, IStakeVault vault)
        external
        view
        returns (uint256 stake, uint256 offences)
    {
        Change[] storage changes = _changes[run][owner];
        for (uint256 i = 0; i < changes.length; ++i) {
            bytes32 id = changes[i].offence;
            if (id == 0) {
                stake = uint256(int256(stake) + changes[i].amount);
                continue;
            }
            ++offences;
            if (_seized[id].status == IStakeVault.EscrowStatus.Restored) continue;
            stake -= (stake * vault.escrowOf(id).ppm + 999_999) / 1_000_000;
        }
    }
}
