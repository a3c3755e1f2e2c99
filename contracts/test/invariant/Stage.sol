// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {Vm} from "forge-std/Vm.sol";

import {IContributionLedger} from "../../src/interfaces/IContributionLedger.sol";
import {IRewardEscrow} from "../../src/interfaces/IRewardEscrow.sol";
import {IRunRegistry} from "../../src/interfaces/IRunRegistry.sol";
import {IStakeVault, IStakeVaultEvents} from "../../src/interfaces/IStakeVault.sol";
import {BaseTest} from "../BaseTest.sol";
import {Replica} from "./Replica.sol";

/// @title Two runs on one network, who lives there, the work that exists, and the books kept about it
/// @dev One run is honest: its owner, its orchestrator and validators 0 to 2. The other one is the attacker's: it
///      owns it, orchestrates it and holds the seats 3 and 4 of it; validator 2 sits there, too, and stays honest.
///      Alice works for the honest run; Bob and the attacker's five workers work for both. Jurors 0 to 3 are honest,
///      juror 4 is the attacker's.
abstract contract Stage is BaseTest {
    /// @dev A submission in a batch.
    struct Piece {
        uint64 runId;
        uint64 batchId;
        uint32 position;
        address worker;
        uint32 step;
        uint32 index;
        // What a quorum, or the network's jury where there was none, recorded; zero until then.
        uint16 recorded;
        // What a jury put in its place; zero for nothing.
        uint16 ruled;
    }

    /// @dev Who can get the file of a submission.
    enum Sight {
        Everybody,
        Jurors,
        Nobody
    }

    uint256 internal constant BATCH = 3;
    uint256 internal constant UNITS = 1000;
    uint256 internal constant WORKERS = 7;
    uint256 internal constant PEOPLE = WORKERS + 11;
    uint256 internal constant LIAR = 4;

    /// @dev What an honest validator says of a file that it cannot get.
    uint16 internal constant NO_FILE = 0x020f;

    /// @dev What makes no sense: whoever convicts had the file.
    uint16 internal constant FRAUD_WITHOUT_FILE = 0x040f;

    Replica public replica;

    uint64 public honestRun;
    uint64 public hostileRun;

    address internal _attacker;
    uint256 internal _attackerKey;

    address[WORKERS] internal _team;
    uint256[WORKERS] private _nodeKeys;

    Piece[] internal _pieces;
    mapping(uint64 batchId => bytes[]) internal _recordsOf;
    mapping(bytes32 slot => bool) internal _submittedAlone;
    mapping(bytes32 slot => uint256) internal _timesPaid;

    /// @notice What the units cost that a quorum of a run, or the network's jury, accepted and that still stand.
    mapping(uint64 run => uint256) public acceptedValue;

    /// @notice How often each action did something, so that a test can see that all are reached.
    mapping(bytes32 action => uint256) public reached;

    /// @notice What must never happen, and how often it did.
    mapping(string sin => uint256) public sins;

    /// @dev Rebuilds the replica from what an action emitted.
    modifier recorded() {
        vm.recordLogs();
        _;
        _replay();
    }

    constructor() {
        replica = new Replica(BOND, UNBONDING_PERIOD);
        vm.recordLogs();
        setUp();
        (_attacker, _attackerKey) = makeAddrAndKey("attacker");
        _enrich(_attacker);
        honestRun = _openRun(owner, orchestrator, 0);
        hostileRun = _openRun(_attacker, _attacker, 2);
        _hireTeam();
        _fillBench();
        _replay();
        // Far from zero, so that no clock starts at its first tick.
        vm.warp(block.timestamp + 30 days);
    }

    /// @dev A run with three validators from `first` on, two of which must sign.
    function _openRun(address owner_, address orchestrator_, uint256 first) private returns (uint64 run) {
        IRunRegistry.RunConfig memory config = _config();
        config.orchestrator = orchestrator_;
        config.validators = new address[](3);
        for (uint256 i = 0; i < 3; ++i) {
            config.validators[i] = validators[first + i];
        }
        vm.prank(owner_);
        run = runs.createRun(config);
        for (uint256 i = 0; i < 3; ++i) {
            vm.prank(validators[first + i]);
            runs.takeSeat(run, 1, REQUIRED_VALIDATOR_STAKE);
        }
        vm.prank(owner_);
        escrow.fund(run, WALLET / 10);
    }

    function _hireTeam() private {
        (_team[0], _team[1]) = (alice, bob);
        (_nodeKeys[0], _nodeKeys[1]) = (aliceNodeKey, bobNodeKey);
        for (uint256 i = 2; i < WORKERS; ++i) {
            _team[i] = makeAddr(string.concat("mallory ", vm.toString(i)));
            (, _nodeKeys[i]) = makeAddrAndKey(string.concat("mallory's node ", vm.toString(i)));
            _enrich(_team[i]);
        }
        for (uint256 i = 0; i < WORKERS; ++i) {
            _join(honestRun, _team[i], vm.addr(_nodeKeys[i]), _nodeKeys[i], 2 * REQUIRED_STAKE);
            if (i != 0) _join(hostileRun, _team[i], address(0), 0, 2 * REQUIRED_STAKE);
        }
    }

    // --------------------------------------------------------------------- books

    function _replay() internal {
        replica.replay(vm.getRecordedLogs());
    }

    /// @dev Events are replayed at the time that they were emitted.
    function _warp(uint256 time) internal {
        _replay();
        vm.warp(time);
    }

    function _sin(string memory sin, bool committed) internal {
        if (committed) ++sins[sin];
    }

    /// @dev Makes a call that may fail. It may move no stake but that of `concerned` in `run`.
    function _call(address caller, address target, bytes memory data, uint64 run, address concerned)
        internal
        returns (bool success)
    {
        _replay();
        vm.prank(caller);
        (success,) = target.call(data);
        Vm.Log[] memory logs = vm.getRecordedLogs();
        // Forge keeps what a call emitted that reverted.
        if (!success) return false;
        for (uint256 i = 0; i < logs.length; ++i) {
            if (logs[i].emitter != address(vault) || !_movesStake(logs[i].topics[0])) continue;
            bool own = uint256(logs[i].topics[1]) == run && address(uint160(uint256(logs[i].topics[2]))) == concerned;
            _sin("touched another's stake", !own);
        }
        replica.replay(logs);
    }

    /// @dev All other events of the vault are about escrows; `Hostile.differences` sees whether events tell all.
    function _movesStake(bytes32 name) private pure returns (bool) {
        return name != IStakeVaultEvents.SlashReleased.selector && name != IStakeVaultEvents.SlashFollowed.selector;
    }

    /// @dev As `_call`, where the rules foretell whether it succeeds.
    function _attempt(
        address caller,
        address target,
        bytes memory data,
        uint64 run,
        address concerned,
        bool possible,
        bytes32 name
    ) internal returns (bool success) {
        success = _call(caller, target, data, run, concerned);
        string memory action = string(abi.encodePacked(name));
        if (success != possible) ++sins[string.concat(success ? "could " : "could not ", _trim(action))];
        if (success) ++reached[name];
    }

    /// @dev As above, of a call that moves nobody's stake.
    function _attempt(address caller, address target, bytes memory data, bool possible, bytes32 name)
        internal
        returns (bool)
    {
        return _attempt(caller, target, data, 0, address(0), possible, name);
    }

    function _trim(string memory padded) private pure returns (string memory) {
        bytes memory text = bytes(padded);
        uint256 length;
        while (length < text.length && text[length] != 0) ++length;
        assembly ("memory-safe") {
            mstore(text, length)
        }
        return string(text);
    }

    // -------------------------------------------------------------------- people

    function person(uint256 i) public view returns (address) {
        i %= PEOPLE;
        if (i < WORKERS) return _team[i];
        if (i < WORKERS + 5) return validators[i - WORKERS];
        return i < WORKERS + 10 ? jurors[i - WORKERS - 5] : _attacker;
    }

    /// @notice Returns whether a person does what its client does, and nothing else.
    function isHonest(uint256 i) public pure returns (bool) {
        i %= PEOPLE;
        if (i < WORKERS) return i < 2;
        return i < WORKERS + 5 ? i < WORKERS + 3 : i < WORKERS + 9;
    }

    function _isHonestWorker(address worker) internal view returns (bool) {
        return worker == alice || worker == bob;
    }

    function _nodeKeyOf(address worker) internal view returns (uint256) {
        for (uint256 i = 0; i < WORKERS; ++i) {
            if (_team[i] == worker) return _nodeKeys[i];
        }
        revert("not of the team");
    }

    /// @dev Makes one of the two runs the one that the steps of BaseTest are about.
    function _choose(uint256 seed) internal returns (uint64) {
        return _use(seed % 2 == 0 ? honestRun : hostileRun);
    }

    function _use(uint64 run) internal returns (uint64) {
        runId = run;
        return run;
    }

    function _ownerOf(uint64 run) internal view returns (address) {
        return run == honestRun ? owner : _attacker;
    }

    function _orchestratorOf(uint64 run) internal view returns (address) {
        return run == honestRun ? orchestrator : _attacker;
    }

    /// @dev The number of the first of a run's three validators.
    function _firstValidator(uint64 run) internal view returns (uint256) {
        return run == honestRun ? 0 : 2;
    }

    function _balance(address account) internal view returns (uint256) {
        return token.balanceOf(account);
    }

    // --------------------------------------------------------------------- truth

    /// @dev What a submission is worth, and who can see that. Honest work is good and open to all.
    function _truthOf(Piece storage piece) internal view returns (uint16 ruling, Sight sight) {
        if (_isHonestWorker(piece.worker)) return (ACCEPT, Sight.Everybody);
        uint256 word = uint256(keccak256(abi.encode(piece.runId, piece.worker, piece.step, piece.index)));
        ruling = [ACCEPT, ACCEPT, ACCEPT, REJECT, REJECT, STATISTICAL, STATISTICAL, EXACT][word % 8];
        sight = Sight((word >> 8) % 6 < 4 ? 0 : (word >> 16) % 3);
    }

    /// @dev What an honest validator records.
    function _seenByValidators(Piece storage piece) internal view returns (uint16) {
        (uint16 ruling, Sight sight) = _truthOf(piece);
        return sight == Sight.Everybody ? ruling : NO_FILE;
    }

    /// @dev What an honest juror votes.
    function _seenByJurors(Piece storage piece) internal view returns (uint16) {
        (uint16 ruling, Sight sight) = _truthOf(piece);
        return sight == Sight.Nobody ? UNSEEN : ruling;
    }

    function _verdictOf(uint16 ruling) internal pure returns (uint8) {
        return uint8(ruling >> 8);
    }

    function _isSame(uint16 a, uint16 b) internal pure returns (bool) {
        return _verdictOf(a) == _verdictOf(b) && _isExact(a) == _isExact(b);
    }

    /// @dev The ruling that stands; zero while there is none.
    function _rulingOf(Piece storage piece) internal view returns (uint16) {
        return piece.ruled != 0 ? piece.ruled : piece.recorded;
    }

    // ---------------------------------------------------------------------- work

    /// @dev A piece; three times of four one of the latest eight, on which most can still happen.
    function _pick(uint256 which) internal view returns (uint256) {
        uint256 count = _pieces.length;
        if (which % 4 == 0 || count < 8) return (which >> 2) % count;
        return count - 1 - (which >> 2) % 8;
    }

    /// @dev Any piece, however old.
    function _pickAny(uint256 which) internal view returns (Piece storage) {
        return _pieces[which % _pieces.length];
    }

    /// @dev Adds a submission to a batch. Slots repeat, with the same file each time.
    function _addPiece(uint64 batchId, address worker, uint32 step, uint32 index) internal returns (uint256) {
        uint32 position = uint32(_leavesIn[batchId].length);
        _leavesIn[batchId].push(_submissionLeaf(_submission(worker, step, index)));
        _pieces.push(Piece(runId, batchId, position, worker, step, index, 0, 0));
        return _pieces.length - 1;
    }

    /// @dev Also makes the piece's run the one that the steps of BaseTest are about.
    function _submissionOf(Piece storage piece) internal returns (IContributionLedger.Submission memory) {
        _use(piece.runId);
        return _submission(piece.worker, piece.step, piece.index);
    }

    function _slotOf(Piece storage piece) internal view returns (bytes32) {
        return keccak256(abi.encode(piece.runId, piece.worker, piece.step, piece.index));
    }

    function _leasedWork(Piece storage piece) internal returns (IContributionLedger.LeasedWork memory work) {
        work = _work(_submissionOf(piece), _nodeKeyOf(piece.worker), block.timestamp);
        uint256 key = piece.runId == honestRun ? orchestratorKey : _attackerKey;
        work.ticketSignature = _signTicket(work.ticket, key);
    }

    function _recordOf(Piece storage piece, uint16 ruling) internal view returns (bytes memory) {
        IContributionLedger.Outcome memory outcome = _outcome(piece.worker, piece.step, piece.index, _verdictOf(ruling));
        outcome.reason = uint8(ruling);
        return _pack(outcome);
    }

    function _proofOf(Piece storage piece) internal view returns (IContributionLedger.OutcomeProof memory) {
        return _prove(piece.batchId, _recordsOf[piece.batchId], piece.position);
    }

    function _leafOf(Piece storage piece) internal view returns (bytes32) {
        return _leaf(piece.batchId, piece.position, _recordsOf[piece.batchId][piece.position]);
    }

    function _claimsOf(Piece storage piece) internal view returns (IRewardEscrow.Claim[] memory claims) {
        claims = new IRewardEscrow.Claim[](1);
        claims[0] = _claimOf(piece.batchId, _recordsOf[piece.batchId], _range(piece.position, piece.position + 1));
    }

    function _value(Piece storage piece) internal view returns (uint256) {
        return UNITS * batches[piece.batchId].pricePerUnit;
    }

    /// @dev Unix seconds from which judges of the network can be called for a batch.
    function _dueAt(uint64 batchId) internal view returns (uint256) {
        IContributionLedger.Batch storage batch = batches[batchId];
        bool withheld = batch.status == IContributionLedger.BatchStatus.Withheld;
        return withheld ? batch.postedAt : batch.committedAt + OUTCOME_DEADLINE;
    }

    function _isAppealable(uint64 batchId) internal view returns (bool) {
        uint256 dueAt = _dueAt(batchId);
        return batches[batchId].status != IContributionLedger.BatchStatus.Judged && ledger.commitmentOf(batchId) != 0
            && block.timestamp >= dueAt && block.timestamp < dueAt + CHALLENGE_WINDOW;
    }

    /// @dev The escrow of the fraud that a piece is now held to be.
    function _fraudId(Piece storage piece) internal view returns (bytes32) {
        bool exact = _isExact(_rulingOf(piece));
        IStakeVault.Offence offence = exact ? IStakeVault.Offence.ExactFraud : IStakeVault.Offence.Fraud;
        return vault.escrowIdOf(piece.runId, piece.worker, offence, _tagOf(piece));
    }

    function _tagOf(Piece storage piece) internal view returns (uint64) {
        return uint64(piece.step) << 32 | piece.index;
    }

    function _isSettled(uint64 run, address account, IStakeVault.Offence offence, uint64 tag)
        internal
        view
        returns (bool)
    {
        bytes32 id = vault.escrowIdOf(run, account, offence, tag);
        return vault.escrowOf(id).status != IStakeVault.EscrowStatus.None;
    }
}
