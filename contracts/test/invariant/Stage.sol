// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IContributionLedger} from "../../src/interfaces/IContributionLedger.sol";
import {IRewardEscrow} from "../../src/interfaces/IRewardEscrow.sol";
import {IStakeVault} from "../../src/interfaces/IStakeVault.sol";
import {BaseTest} from "../BaseTest.sol";
import {Replica} from "./Replica.sol";

/// @title The actors of a random life, the work that exists, and the books kept about it
abstract contract Stage is BaseTest {
    /// @dev A submission in a batch.
    struct Piece {
        uint64 batchId;
        uint32 position;
        address worker;
        uint32 step;
        uint32 index;
        bool direct;
    }

    uint256 internal constant WORKERS = 5;
    uint256 internal constant PEOPLE = WORKERS + 5;
    uint256 internal constant BATCH = 3;

    Replica public replica;

    address[WORKERS] public team;
    uint256[WORKERS] private _nodeKeys;

    Piece[] internal _pieces;
    mapping(uint64 batchId => bytes[]) internal _records;
    mapping(uint64 batchId => bytes32[]) internal _submissionLeaves;
    mapping(address worker => uint32) internal _directSteps;
    mapping(bytes32 slot => uint256) internal _timesPaid;

    /// @notice How often each action did something, so that a test can see that all are reached.
    mapping(bytes32 action => uint256) public reached;

    /// @notice What must never happen, and how often it did.
    mapping(string sin => uint256) public sins;

    /// @dev Rebuilds the replica from what an action emitted.
    modifier recorded() {
        vm.recordLogs();
        _;
        replica.replay(vm.getRecordedLogs());
    }

    constructor() {
        replica = new Replica();
        vm.recordLogs();
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
        escrow.fund(runId, WALLET / 10);
        replica.replay(vm.getRecordedLogs());
        // Far from zero, so that no clock starts at its first tick.
        vm.warp(block.timestamp + 30 days);
    }

    /// @dev Forgets what a call that reverted emitted: forge records that, too.
    function _forgetLogs() internal {
        vm.getRecordedLogs();
    }

    // -------------------------------------------------------------------- people

    function person(uint256 i) public view returns (address) {
        i %= PEOPLE;
        return i < WORKERS ? team[i] : validators[i - WORKERS];
    }

    function _nodeKeyOf(address worker) internal view returns (uint256) {
        for (uint256 i = 0; i < WORKERS; ++i) {
            if (team[i] == worker) return _nodeKeys[i];
        }
        revert("not of the team");
    }

    function _sin(string memory sin, bool committed) internal {
        if (committed) ++sins[sin];
    }

    /// @dev Fingerprint of the stakes of everybody but `concerned`.
    function _othersStake(address concerned) internal view returns (uint256 fingerprint) {
        for (uint256 i = 0; i < PEOPLE; ++i) {
            if (person(i) == concerned) continue;
            (uint256 active, uint256 unbonding) = _stake(person(i));
            fingerprint = uint256(keccak256(abi.encode(fingerprint, active, unbonding)));
        }
    }

    // ---------------------------------------------------------------------- work

    /// @dev A piece; three times of four one of the latest six, on which most can still happen.
    function _pick(uint256 which) internal view returns (Piece storage) {
        uint256 count = _pieces.length;
        if (which % 4 == 0 || count < 6) return _pieces[(which >> 2) % count];
        return _pieces[count - 1 - (which >> 2) % 6];
    }

    /// @dev Adds a submission to the batch that is committed next. Slots repeat, with the same file each time.
    function _addPiece(uint64 batchId, address worker, uint32 step, uint32 index, bool direct) internal {
        IContributionLedger.Submission memory s = _submission(worker, step, index);
        uint32 position = uint32(_submissionLeaves[batchId].length);
        _submissionLeaves[batchId].push(keccak256(abi.encode(_submissionHash(s))));
        _records[batchId].push(_record(worker, step, index, ACCEPTED));
        _pieces.push(Piece(batchId, position, worker, step, index, direct));
    }

    function _isPosted(uint64 batchId) internal view returns (bool) {
        return batches[batchId].postedAt != 0;
    }

    function _isOverdue(uint64 batchId) internal view returns (bool) {
        return !_isPosted(batchId) && block.timestamp >= batches[batchId].committedAt + OUTCOME_DEADLINE;
    }

    /// @dev Whether a piece has an outcome, posted or by default.
    function _isJudged(Piece storage piece) internal view returns (bool) {
        return _isPosted(piece.batchId) || _isOverdue(piece.batchId);
    }

    function _treeOf(uint64 batchId) private view returns (bytes32[] memory) {
        return _isPosted(batchId) ? _leaves(batchId, _records[batchId]) : _submissionLeaves[batchId];
    }

    function _proofOf(Piece storage piece) internal view returns (IContributionLedger.OutcomeProof memory) {
        return IContributionLedger.OutcomeProof({
            batch: batches[piece.batchId],
            position: piece.position,
            record: _records[piece.batchId][piece.position],
            proof: _siblings(_treeOf(piece.batchId), piece.position)
        });
    }

    function _claimsOf(Piece storage piece) internal view returns (IRewardEscrow.Claim[] memory claims) {
        claims = new IRewardEscrow.Claim[](1);
        claims[0].batch = batches[piece.batchId];
        claims[0].positions = _range(piece.position, piece.position + 1);
        claims[0].records = _records[piece.batchId][piece.position];
        claims[0].siblings = _siblings(_treeOf(piece.batchId), piece.position);
    }

    function _standingOf(Piece storage piece) internal view returns (IContributionLedger.Standing memory) {
        return ledger.standingOf(_proofOf(piece));
    }

    function _escrowStatus(bytes32 offence) internal view returns (IStakeVault.EscrowStatus) {
        return vault.escrowOf(offence).status;
    }

    function _offenceOf(Piece storage piece) internal view returns (bytes32) {
        IContributionLedger.Submission memory s = _submission(piece.worker, piece.step, piece.index);
        return keccak256(abi.encode(runId, workers.workerOf(piece.worker).workerId, s.step, s.index, s.fileHash));
    }

    function pieceCount() external view returns (uint256) {
        return _pieces.length;
    }
}
