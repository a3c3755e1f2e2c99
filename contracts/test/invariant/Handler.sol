// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IContributionLedger} from "../../src/interfaces/IContributionLedger.sol";
import {IDisputeCourt} from "../../src/interfaces/IDisputeCourt.sol";
import {IStakeVault} from "../../src/interfaces/IStakeVault.sol";
import {IWorkerRegistry} from "../../src/interfaces/IWorkerRegistry.sol";
import {BaseTest} from "../BaseTest.sol";

/// @title Random life of a network: four workers, one run, every action that moves money
/// @dev Each action picks valid arguments, or returns when there is none, so that nothing may revert. After each one
///      it compares the stakes of everybody it did not concern, and keeps its own books for the invariants.
contract Handler is BaseTest {
    /// @dev A posted outcome, and what happened to it.
    struct Judged {
        uint64 batchId;
        uint32 position;
        address worker;
        uint32 step;
        uint32 index;
        uint8 recorded;
        bytes32 leaf;
        uint256 units;
        bool executed;
        bool settled;
        bool restored;
        bool paid;
    }

    uint256 private constant WORKERS = 4;
    uint256 private constant BATCH = 3;

    address[WORKERS] public team;
    uint256[WORKERS] private _nodeKeys;

    Judged[] private _judged;
    mapping(uint64 batchId => bytes[]) private _records;
    mapping(bytes32 slot => uint256) public timesPaid;

    uint256 public slotsPaidTwice;
    uint256 public otherStakesChanged;
    uint256 public paidByHand;
    uint256 public paidNotAccepted;
    uint256 public paidNotFinal;
    uint256 public burned;

    /// @notice How often each action did something, so that a test can see that all are reached.
    mapping(bytes32 action => uint256) public reached;

    constructor() {
        setUp();
        for (uint256 i = 0; i < WORKERS; ++i) {
            uint256 nodeKey;
            (team[i],) = makeAddrAndKey(string.concat("team ", vm.toString(i)));
            (, nodeKey) = makeAddrAndKey(string.concat("team node ", vm.toString(i)));
            _nodeKeys[i] = nodeKey;
            vm.prank(deployer);
            token.transfer(team[i], WALLET);
            vm.prank(team[i]);
            token.approve(address(vault), type(uint256).max);
            _register(team[i], vm.addr(nodeKey), nodeKey, 2 * REQUIRED_STAKE);
        }
        runId = _createRun();
        vm.prank(owner);
        escrow.fund(runId, WALLET / 2);
    }

    // -------------------------------------------------------------------- actions

    function deposit(uint256 who, uint256 amount) external {
        address worker = team[who % WORKERS];
        uint256 balance = token.balanceOf(worker);
        if (balance == 0) return;
        uint256 before = _othersStake(worker);
        _deposit(worker, bound(amount, 1, balance));
        _checkOthers(worker, before);
    }

    function requestUnbond(uint256 who, uint256 amount) external {
        address worker = team[who % WORKERS];
        uint256 active = vault.activeStake(worker);
        if (active == 0) return;
        uint256 before = _othersStake(worker);
        vm.prank(worker);
        vault.requestUnbond(amount % 2 == 0 ? active : bound(amount, 1, active));
        _checkOthers(worker, before);
    }

    function withdraw(uint256 who) external {
        address worker = team[who % WORKERS];
        IStakeVault.Account memory held = vault.accountOf(worker);
        if (held.unbonding == 0 || block.timestamp < held.withdrawableAt) return;
        uint256 before = _othersStake(worker);
        vm.prank(worker);
        vault.withdraw();
        ++reached["withdraw"];
        _checkOthers(worker, before);
    }

    /// @dev Tops up first where that is needed.
    function unjail(uint256 who) external {
        address worker = team[who % WORKERS];
        IWorkerRegistry.Worker memory record = workers.workerOf(worker);
        if (record.status != IWorkerRegistry.Status.Jailed || block.timestamp < record.jailedUntil) return;
        uint256 active = vault.activeStake(worker);
        if (active < REQUIRED_STAKE) {
            if (token.balanceOf(worker) < REQUIRED_STAKE - active) return;
            _deposit(worker, REQUIRED_STAKE - active);
        }
        vm.prank(worker);
        workers.unjail();
        ++reached["unjail"];
    }

    /// @dev Commits and posts a batch of three: slots may repeat, one verdict of eight is fraud.
    function post(uint256 seed) external {
        uint64 batchId = _commit(BATCH);
        for (uint256 i = 0; i < BATCH; ++i) {
            seed = uint256(keccak256(abi.encode(seed)));
            address worker = team[seed % WORKERS];
            uint32 step = uint32(1 + (seed >> 8) % 3);
            uint32 index = uint32((seed >> 16) % 4);
            uint8 verdict = (seed >> 24) % 8 == 0 ? FRAUD : uint8(ACCEPTED + (seed >> 32) % 3);
            bytes memory record = _record(worker, step, index, verdict);
            _records[batchId].push(record);
            bytes32 leaf = _leaf(batchId, i, record);
            _judged.push(
                Judged(batchId, uint32(i), worker, step, index, verdict, leaf, 1000, false, false, false, false)
            );
        }
        _post(batchId, _records[batchId], QUORUM);
    }

    function executeFraud(uint256 which) external {
        if (_judged.length == 0) return;
        Judged storage judged = _pick(which);
        if (judged.executed || court.effectiveVerdict(judged.leaf, judged.recorded) != FRAUD) return;
        uint256 before = _othersStake(judged.worker);
        IContributionLedger.Submission memory submission = _submission(judged.worker, judged.step, judged.index);
        bytes memory signature = _signSubmission(submission, _nodeKeyOf(judged.worker));
        ledger.executeFraud(_proofOf(judged), submission, signature);
        judged.executed = true;
        ++reached["executeFraud"];
        _checkOthers(judged.worker, before);
    }

    function finaliseFraud(uint256 which) external {
        if (_judged.length == 0) return;
        Judged storage judged = _judged[which % _judged.length];
        if (vault.escrowOf(judged.leaf).amount == 0 || !ledger.isFinal(judged.batchId, judged.leaf)) return;
        uint256 before = _othersStake(address(0));
        burned += _burnOf(vault.escrowOf(judged.leaf));
        ledger.finaliseFraud(_proofOf(judged));
        judged.settled = true;
        ++reached["finaliseFraud"];
        _checkOthers(address(0), before);
    }

    function _burnOf(IStakeVault.Escrow memory held) private pure returns (uint256) {
        uint256 rewarded = held.reporter == address(0) ? 0 : held.amount * REPORTER_PPM / PPM;
        if (rewarded > REPORTER_CAP) rewarded = REPORTER_CAP;
        return held.amount - held.amount * INSURANCE_PPM / PPM - rewarded;
    }

    function challenge(uint256 which, uint8 claimed) external {
        if (_judged.length == 0) return;
        Judged storage judged = _pick(which);
        claimed = uint8(bound(claimed, ACCEPTED, FRAUD));
        uint256 closesAt = ledger.batchOf(judged.batchId).postedAt + CHALLENGE_WINDOW;
        if (claimed == judged.recorded || block.timestamp >= closesAt) return;
        if (court.caseOf(judged.leaf).challenger != address(0)) return;
        if (token.balanceOf(challenger) < CHALLENGE_BOND) return;
        IContributionLedger.OutcomeProof memory outcome = _proofOf(judged);
        vm.prank(challenger);
        court.challenge(outcome, claimed);
    }

    /// @dev `votes` modulo 4: nobody votes, both uphold, they disagree, both overturn.
    function voteAndClose(uint256 which, uint256 votes) external {
        if (_judged.length == 0) return;
        Judged storage judged = _pick(which);
        if (!court.isOpen(judged.leaf)) return;
        bool inTime = block.timestamp < court.caseOf(judged.leaf).votingEndsAt;
        votes %= 4;
        if (!inTime || votes == 0) {
            if (inTime) vm.warp(court.caseOf(judged.leaf).votingEndsAt);
        } else {
            vm.prank(validators[2]);
            court.vote(judged.leaf, votes >= 2);
            vm.prank(validators[3]);
            court.vote(judged.leaf, votes == 3);
        }
        uint256 before = _othersStake(judged.worker);
        court.close(_proofOf(judged));
        _checkOthers(judged.worker, before);
        IDisputeCourt.Case memory closed = court.caseOf(judged.leaf);
        if (closed.overturned && judged.executed && judged.recorded == FRAUD) judged.restored = true;
        ++reached[closed.overturned ? bytes32("overturn") : bytes32("uphold")];
        if (judged.restored) ++reached["restore"];
        if (!closed.overturned && closed.votesToUphold > 0) burned += closed.bond;
    }

    function claim(uint256 which) external {
        if (_judged.length == 0) return;
        Judged storage judged = _judged[which % _judged.length];
        bytes32 slot = keccak256(abi.encode(judged.worker, judged.step, judged.index));
        IContributionLedger.OutcomeProof[] memory outcomes = new IContributionLedger.OutcomeProof[](1);
        outcomes[0] = _proofOf(judged);
        uint8 verdict = court.effectiveVerdict(judged.leaf, judged.recorded);
        bool isFinal = ledger.isFinal(judged.batchId, judged.leaf);
        // Claims what may not be paid, too: it must fail.
        try escrow.claim(outcomes) returns (uint256 amount) {
            paidByHand += amount;
            judged.paid = true;
            ++reached["claim"];
            if (++timesPaid[slot] > 1) ++slotsPaidTwice;
            if (verdict != ACCEPTED) ++paidNotAccepted;
            if (!isFinal) ++paidNotFinal;
        } catch {}
    }

    /// @dev Mostly hours, so that cases can be voted on; at times days, so that windows close and stake matures.
    function pass(uint256 time) external {
        vm.warp(block.timestamp + bound(time >> 3, 1, time % 8 == 0 ? 5 days : 6 hours));
        vm.roll(block.number + 10);
    }

    // --------------------------------------------------------------------- books

    /// @dev Fingerprint of the stakes of everybody but `concerned`.
    function _othersStake(address concerned) private view returns (uint256 fingerprint) {
        for (uint256 i = 0; i < WORKERS + 4; ++i) {
            address account = i < WORKERS ? team[i] : validators[i - WORKERS];
            if (account == concerned) continue;
            (uint256 active, uint256 unbonding) = _stake(account);
            fingerprint = uint256(keccak256(abi.encode(fingerprint, active, unbonding)));
        }
    }

    function _checkOthers(address concerned, uint256 before) private {
        if (_othersStake(concerned) != before) ++otherStakesChanged;
    }

    /// @dev An outcome; three times of four one of the latest three, on which most can still happen.
    function _pick(uint256 which) private view returns (Judged storage) {
        uint256 count = _judged.length;
        if (which % 4 == 0 || count < 3) return _judged[(which >> 2) % count];
        return _judged[count - 1 - (which >> 2) % 3];
    }

    function _nodeKeyOf(address worker) private view returns (uint256) {
        for (uint256 i = 0; i < WORKERS; ++i) {
            if (team[i] == worker) return _nodeKeys[i];
        }
        revert("not of the team");
    }

    function _proofOf(Judged storage judged) private view returns (IContributionLedger.OutcomeProof memory) {
        return _prove(judged.batchId, _records[judged.batchId], judged.position);
    }

    /// @notice Returns the sums over everybody who can hold stake.
    function sumOfStakes() external view returns (uint256 active, uint256 unbonding) {
        for (uint256 i = 0; i < WORKERS + 4; ++i) {
            (uint256 a, uint256 u) = _stake(i < WORKERS ? team[i] : validators[i - WORKERS]);
            active += a;
            unbonding += u;
        }
    }

    /// @notice Returns the sum of escrows of all offences.
    function sumOfEscrows() external view returns (uint256 sum) {
        for (uint256 i = 0; i < _judged.length; ++i) {
            sum += vault.escrowOf(_judged[i].leaf).amount;
        }
    }

    /// @notice Returns the bonds of open cases.
    function sumOfBonds() external view returns (uint256 sum) {
        for (uint256 i = 0; i < _judged.length; ++i) {
            if (court.isOpen(_judged[i].leaf)) sum += CHALLENGE_BOND;
        }
    }

    /// @notice Returns how many fraud verdicts that stand belong to a worker that is not banned, and how many workers
    ///         are banned though none stands.
    function wrongBans() external view returns (uint256 wrong) {
        for (uint256 w = 0; w < WORKERS; ++w) {
            bool standing;
            for (uint256 i = 0; i < _judged.length; ++i) {
                if (_judged[i].worker == team[w] && _judged[i].executed && !_judged[i].restored) standing = true;
            }
            if (standing != (_status(team[w]) == IWorkerRegistry.Status.Banned)) ++wrong;
        }
    }

    /// @notice Returns how many active workers hold less than the requirement.
    function activeBelowRequirement() external view returns (uint256 wrong) {
        for (uint256 i = 0; i < WORKERS; ++i) {
            if (workers.isActive(team[i]) && vault.activeStake(team[i]) < REQUIRED_STAKE) ++wrong;
        }
    }

    /// @notice Returns how many settled offences were also given back.
    function settledAndRestored() external view returns (uint256 wrong) {
        for (uint256 i = 0; i < _judged.length; ++i) {
            if (_judged[i].settled && _judged[i].restored) ++wrong;
        }
    }

    /// @notice Returns the network the handler lives in.
    function network() external view returns (address, address, address, address, uint64) {
        return (address(token), address(vault), address(escrow), address(court), runId);
    }
}
