// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {Test} from "forge-std/Test.sol";

import {ContributionLedger} from "../src/ContributionLedger.sol";
import {DisputeCourt} from "../src/DisputeCourt.sol";
import {FaultCourt} from "../src/FaultCourt.sol";
import {JuryPool} from "../src/JuryPool.sol";
import {MusterToken} from "../src/MusterToken.sol";
import {RewardEscrow} from "../src/RewardEscrow.sol";
import {RunRegistry} from "../src/RunRegistry.sol";
import {StakeVault} from "../src/StakeVault.sol";
import {WorkerRegistry} from "../src/WorkerRegistry.sol";
import {IContributionLedger} from "../src/interfaces/IContributionLedger.sol";
import {IDisputeCourt} from "../src/interfaces/IDisputeCourt.sol";
import {IRewardEscrow} from "../src/interfaces/IRewardEscrow.sol";
import {IRunRegistry} from "../src/interfaces/IRunRegistry.sol";
import {IStakeVault} from "../src/interfaces/IStakeVault.sol";
import {IWorkerRegistry} from "../src/interfaces/IWorkerRegistry.sol";
import {SourcesLib} from "../src/libraries/SourcesLib.sol";

/// @title A deployed network with named actors, and the few steps that every test starts from
abstract contract BaseTest is Test {
    uint256 internal constant PPM = 1_000_000;
    uint256 internal constant SUPPLY = 300_000_000 ether;
    uint256 internal constant WALLET = 100_000 ether;

    uint256 internal constant REQUIRED_STAKE = 1000 ether;
    uint256 internal constant REQUIRED_VALIDATOR_STAKE = 2000 ether;
    uint256 internal constant ACTIVATION_DELAY = 5;
    uint256 internal constant JAIL_TIME = 1 hours;
    uint256 internal constant CHALLENGE_WINDOW = 1 days;
    uint256 internal constant OUTCOME_DEADLINE = 6 hours;
    uint256 internal constant COMMIT_TIME = 8 hours;
    uint256 internal constant REVEAL_TIME = 4 hours;
    uint256 internal constant JURY_TIME = COMMIT_TIME + REVEAL_TIME;
    uint256 internal constant DRAW_DELAY = 2;
    uint256 internal constant JURY_SIZE = 3;
    uint256 internal constant REQUIRED_JUROR_STAKE = 2000 ether;
    uint256 internal constant JUROR_FEE = 5 ether;
    uint256 internal constant WRONG_VERDICT_PPM = 50_000;
    uint256 internal constant ABSENCE_PPM = 5000;
    uint256 internal constant CHANGE_DELAY = 5 days;
    uint256 internal constant SLASH_PAUSE = 12 hours;
    uint256 internal constant SLASH_COOLDOWN = CHALLENGE_WINDOW;
    uint256 internal constant APPEAL_TIME = CHALLENGE_WINDOW;
    uint256 internal constant JUDGED = OUTCOME_DEADLINE + APPEAL_TIME + CHALLENGE_WINDOW + 2 * JURY_TIME + SLASH_PAUSE;
    uint256 internal constant CLAIM_PERIOD = 90 days;
    uint256 internal constant STAKE_PER_UNIT = 0.01 ether;
    uint256 internal constant BOND = 50 ether;
    uint256 internal constant UNBONDING_PERIOD = 7 days;
    uint256 internal constant INSURANCE_PPM = 300_000;
    uint256 internal constant REPORTER_PPM = 200_000;
    uint256 internal constant REPORTER_CAP = 100 ether;

    uint88 internal constant PRICE = 0.01 ether;
    uint32 internal constant FRAUD_PPM = 100_000;
    uint32 internal constant EXACT_FRAUD_PPM = 500_000;
    uint8 internal constant QUORUM = 2;

    uint8 internal constant ACCEPTED = 1;
    uint8 internal constant INCOMPLETE = 2;
    uint8 internal constant REJECTED = 3;
    uint8 internal constant FRAUD = 4;

    /// @dev Rulings: verdict and reason.
    uint16 internal constant ACCEPT = 0x0100;
    uint16 internal constant REJECT = 0x0315;
    uint16 internal constant STATISTICAL = 0x043c;
    uint16 internal constant EXACT = 0x041e;
    uint16 internal constant UNSEEN = 0;
    uint8 internal constant UNAVAILABLE = 15;
    uint8 internal constant FIRST_AS_SHOWN = 10;
    uint8 internal constant LAST_AS_SHOWN = 19;
    uint8 internal constant WRONG_REPLY = 33;
    uint8 internal constant WRONG_REWARD = 40;
    uint8 internal constant DRIFT = 71;

    MusterToken internal token;
    WorkerRegistry internal workers;
    RunRegistry internal runs;
    ContributionLedger internal ledger;
    DisputeCourt internal court;
    FaultCourt internal faults;
    JuryPool internal jury;
    RewardEscrow internal escrow;
    StakeVault internal vault;

    address internal deployer = makeAddr("deployer");
    address internal insurance = makeAddr("insurance");
    address internal owner = makeAddr("owner");
    address internal trainer = makeAddr("trainer");
    address internal orchestrator;
    address internal challenger = makeAddr("challenger");
    address internal stranger = makeAddr("stranger");

    address internal alice;
    address internal bob;
    uint256 internal aliceKey;
    uint256 internal bobKey;
    address internal aliceNode;
    address internal bobNode;
    uint256 internal aliceNodeKey;
    uint256 internal bobNodeKey;

    /// @dev Ascending by address, as signatures must be.
    address[5] internal validators;
    uint256[5] internal validatorKeys;

    /// @dev The network's bench.
    address[5] internal jurors;

    uint256 internal orchestratorKey;

    uint64 internal runId;

    /// @dev The headers of batches as they stand now, as anybody would keep them from events.
    mapping(uint64 batchId => IContributionLedger.Batch) internal batches;
    /// @dev Leaves of the submissions that a batch holds, where a test tells.
    mapping(uint64 batchId => bytes32[]) internal _leavesIn;

    function setUp() public virtual {
        _makeActors();
        _deploy();
        _handOutTokens();
    }

    // ----------------------------------------------------------------- the stage

    function _makeActors() private {
        (alice, aliceKey) = makeAddrAndKey("alice");
        (bob, bobKey) = makeAddrAndKey("bob");
        (aliceNode, aliceNodeKey) = makeAddrAndKey("alice's node");
        (bobNode, bobNodeKey) = makeAddrAndKey("bob's node");
        (orchestrator, orchestratorKey) = makeAddrAndKey("orchestrator");
        for (uint256 i = 0; i < 5; ++i) {
            (validators[i], validatorKeys[i]) = makeAddrAndKey(string.concat("validator ", vm.toString(i)));
            jurors[i] = makeAddr(string.concat("juror ", vm.toString(i)));
        }
        for (uint256 i = 1; i < 5; ++i) {
            for (uint256 j = i; j > 0 && validators[j] < validators[j - 1]; --j) {
                (validators[j], validators[j - 1]) = (validators[j - 1], validators[j]);
                (validatorKeys[j], validatorKeys[j - 1]) = (validatorKeys[j - 1], validatorKeys[j]);
            }
        }
    }

    /// @dev The order in which anybody deploys; contracts hold the addresses of later ones by their nonce.
    function _deploy() private {
        uint256 nonce = vm.getNonce(deployer);
        StakeVault vault_ = StakeVault(vm.computeCreateAddress(deployer, nonce + 8));
        RewardEscrow escrow_ = RewardEscrow(vm.computeCreateAddress(deployer, nonce + 7));
        address faults_ = vm.computeCreateAddress(deployer, nonce + 6);
        DisputeCourt court_ = DisputeCourt(vm.computeCreateAddress(deployer, nonce + 5));
        ContributionLedger ledger_ = ContributionLedger(vm.computeCreateAddress(deployer, nonce + 4));
        RunRegistry runs_ = RunRegistry(vm.computeCreateAddress(deployer, nonce + 3));
        vm.startPrank(deployer);
        token = new MusterToken(SUPPLY, deployer);
        jury = new JuryPool(vault_, REQUIRED_JUROR_STAKE, COMMIT_TIME);
        workers = new WorkerRegistry(
            token,
            vault_,
            runs_,
            address(ledger_),
            address(court_),
            faults_,
            REQUIRED_STAKE,
            ACTIVATION_DELAY,
            JAIL_TIME
        );
        runs = new RunRegistry(
            vault_, workers, faults_, REQUIRED_VALIDATOR_STAKE, CHANGE_DELAY, SLASH_PAUSE, SLASH_COOLDOWN
        );
        ledger = new ContributionLedger(
            ContributionLedger.Network(runs, workers, vault_, court_, escrow_),
            CHALLENGE_WINDOW,
            OUTCOME_DEADLINE,
            STAKE_PER_UNIT
        );
        court =
            new DisputeCourt(DisputeCourt.Network(token, runs, workers, jury, vault_, ledger, escrow_), _courtTerms());
        faults = new FaultCourt(runs, workers, vault_, ledger);
        escrow = new RewardEscrow(token, runs, workers, ledger, court, CLAIM_PERIOD);
        vault = new StakeVault(
            token,
            StakeVault.Network(runs, workers, jury, ledger, address(court), faults_),
            insurance,
            UNBONDING_PERIOD,
            INSURANCE_PPM,
            REPORTER_PPM,
            REPORTER_CAP
        );
        vm.stopPrank();
        assertEq(address(vault), address(vault_), "vault is where it was predicted");
        assertEq(address(court), address(court_), "court is where it was predicted");
        assertEq(address(ledger), address(ledger_), "ledger is where it was predicted");
        assertEq(address(runs), address(runs_), "run registry is where it was predicted");
        assertEq(address(faults), faults_, "fault court is where it was predicted");
        assertEq(address(escrow), address(escrow_), "escrow is where it was predicted");
    }

    function _courtTerms() internal pure virtual returns (IDisputeCourt.Terms memory) {
        return IDisputeCourt.Terms({
            bond: BOND,
            jurorFee: JUROR_FEE,
            drawDelay: DRAW_DELAY,
            jurySize: JURY_SIZE,
            commitTime: COMMIT_TIME,
            revealTime: REVEAL_TIME,
            wrongVerdictPpm: WRONG_VERDICT_PPM,
            absencePpm: ABSENCE_PPM
        });
    }

    function _handOutTokens() private {
        address[5] memory rich = [owner, alice, bob, challenger, stranger];
        for (uint256 i = 0; i < 5; ++i) {
            _enrich(rich[i]);
            _enrich(validators[i]);
            _enrich(jurors[i]);
        }
    }

    /// @dev Gives an account tokens, and the contracts an allowance of them.
    function _enrich(address account) internal {
        vm.prank(deployer);
        token.transfer(account, WALLET);
        vm.startPrank(account);
        token.approve(address(vault), type(uint256).max);
        token.approve(address(court), type(uint256).max);
        token.approve(address(escrow), type(uint256).max);
        vm.stopPrank();
    }

    /// @dev Whether votes for two rulings are counted together.
    function _isSameKind(uint16 a, uint16 b) internal pure returns (bool) {
        if (_isUnseen(a) || _isUnseen(b)) return _isUnseen(a) && _isUnseen(b);
        return a >> 8 == b >> 8 && _isExact(a) == _isExact(b);
    }

    function _isUnseen(uint16 ruling) internal pure returns (bool) {
        uint16 verdict = ruling >> 8;
        return ruling == UNSEEN || (ruling & 0xff == UNAVAILABLE && verdict != ACCEPTED && verdict != FRAUD);
    }

    function _isExact(uint16 ruling) internal pure returns (bool) {
        return ruling >> 8 == FRAUD && ruling & 0xff >= 30 && ruling & 0xff < 60;
    }

    // -------------------------------------------------------------------- steps

    function _deposit(uint64 run, address account, uint256 amount) internal {
        vm.prank(account);
        vault.deposit(run, account, amount);
    }

    /// @dev Joins a run with a node key, or with the one that the worker has when `node` is zero.
    function _join(uint64 run, address worker, address node, uint256 nodeKey, uint256 stake) internal {
        IWorkerRegistry.NodeConsent memory consent;
        if (node != address(0)) consent = _nodeConsent(worker, node, nodeKey, block.timestamp);
        (, uint32 terms) = runs.termsOf(run);
        vm.prank(worker);
        workers.join(run, terms, stake, consent, _noPermit());
        vm.roll(block.number + ACTIVATION_DELAY);
    }

    function _noPermit() internal pure returns (IWorkerRegistry.Permit memory) {}

    function _nodeConsent(address worker, address node, uint256 nodeKey, uint256 deadline)
        internal
        view
        returns (IWorkerRegistry.NodeConsent memory)
    {
        return IWorkerRegistry.NodeConsent(node, deadline, _consent(worker, node, nodeKey, deadline));
    }

    function _joinAliceAndBob() internal {
        _join(runId, alice, aliceNode, aliceNodeKey, REQUIRED_STAKE);
        _join(runId, bob, bobNode, bobNodeKey, REQUIRED_STAKE);
    }

    function _takeSeats(uint64 run) internal {
        (, uint32 terms) = runs.termsOf(run);
        for (uint256 i = 0; i < 5; ++i) {
            vm.prank(validators[i]);
            runs.takeSeat(run, terms, REQUIRED_VALIDATOR_STAKE);
        }
    }

    /// @dev The five jurors offer themselves; a second passes, so that a case that opens now may draw them.
    function _fillBench() internal {
        for (uint256 i = 0; i < 5; ++i) {
            vm.prank(jurors[i]);
            jury.join(REQUIRED_JUROR_STAKE);
        }
        vm.warp(block.timestamp + 1);
    }

    /// @dev A run of the five validators, two of which must sign.
    function _config() internal view returns (IRunRegistry.RunConfig memory config) {
        config.trainer = trainer;
        config.orchestrator = orchestrator;
        config.baseModelHash = keccak256("base model");
        config.taskSetHash = keccak256("task set");
        config.recipeHash = keccak256("recipe");
        config.calibrationHash = keccak256("calibration");
        config.terms = IRunRegistry.Terms(PRICE, FRAUD_PPM, EXACT_FRAUD_PPM, QUORUM);
        config.validators = new address[](5);
        for (uint256 i = 0; i < 5; ++i) {
            config.validators[i] = validators[i];
        }
    }

    /// @dev A run whose five validators sit.
    function _createRun() internal returns (uint64 run) {
        IRunRegistry.RunConfig memory config = _config();
        vm.prank(owner);
        run = runs.createRun(config);
        _takeSeats(run);
    }

    /// @dev A run with `funds`, two active workers and a bench of five jurors.
    function _startRun(uint256 funds) internal {
        runId = _createRun();
        _joinAliceAndBob();
        _fillBench();
        if (funds == 0) return;
        vm.prank(owner);
        escrow.fund(runId, funds);
    }

    /// @dev A batch of `count` submissions of 1000 units each, whose root leads to nothing.
    function _commit(uint256 count) internal returns (uint64) {
        return _commitRoot(keccak256("submissions"), count, 1000 * count);
    }

    function _commitRoot(bytes32 root, uint256 count, uint256 units) internal returns (uint64 batchId) {
        vm.prank(orchestrator);
        batchId = ledger.commitBatch(runId, root, uint32(count), uint64(units));
        _remember(batchId, root, count, units);
    }

    /// @dev Keeps the header of a batch committed in this block.
    function _remember(uint64 batchId, bytes32 root, uint256 count, uint256 units) internal {
        (IRunRegistry.Terms memory terms, uint32 number) = runs.termsOf(runId);
        batches[batchId] = IContributionLedger.Batch({
            batchId: batchId,
            runId: runId,
            root: root,
            outcomesRoot: 0,
            count: uint32(count),
            units: uint64(units),
            pricePerUnit: terms.pricePerUnit,
            terms: number,
            committedAt: uint40(block.timestamp),
            postedAt: 0,
            signers: 0,
            status: IContributionLedger.BatchStatus.Committed
        });
    }

    /// @dev A batch of the submissions that records judge.
    function _commitRecords(bytes[] memory records) internal returns (uint64 batchId) {
        bytes32[] memory leaves = new bytes32[](records.length);
        for (uint256 i = 0; i < leaves.length; ++i) {
            leaves[i] = _submissionLeaf(_submissionIn(records[i]));
        }
        batchId = _commitRoot(_batchRoot(leaves), leaves.length, 1000 * leaves.length);
        _leavesIn[batchId] = leaves;
    }

    function _commitAndPost(bytes[] memory records) internal returns (uint64 batchId) {
        batchId = _commitRecords(records);
        _post(batchId, records, QUORUM);
    }

    function _post(uint64 batchId, bytes[] memory records, uint256 signers) internal {
        bytes memory joined = _join(records);
        ledger.postOutcomes(batches[batchId], joined, _signOutcomes(batchId, joined, signers));
        _rememberPosted(batchId, records, signers);
    }

    /// @dev Keeps the header of a batch whose outcomes the first `signers` validators signed, posted in this block.
    function _rememberPosted(uint64 batchId, bytes[] memory records, uint256 signers) internal {
        IContributionLedger.Batch storage batch = batches[batchId];
        batch.outcomesRoot = _root(_leaves(batchId, records));
        batch.postedAt = uint40(block.timestamp);
        batch.status = IContributionLedger.BatchStatus.Judged;
        for (uint256 i = 0; i < signers; ++i) {
            batch.signers |= runs.seatBitOf(batch.runId, validators[i]);
        }
    }

    /// @dev The orchestrator pauses slashing; returns when that ends.
    function _pauseSlashing() internal returns (uint256) {
        vm.prank(orchestrator);
        runs.pauseSlashing(runId, IRunRegistry.PauseCause.CorrelatedFailures, 60, "evidence");
        return block.timestamp + SLASH_PAUSE;
    }

    function _passChallengeWindow() internal {
        vm.warp(block.timestamp + CHALLENGE_WINDOW);
    }

    // ------------------------------------------------------------------ records

    function _outcome(address worker, uint32 step, uint32 index, uint8 verdict)
        internal
        view
        returns (IContributionLedger.Outcome memory)
    {
        return IContributionLedger.Outcome({
            workerId: _workerId(worker),
            step: step,
            index: index,
            policyVersion: step - 1,
            fileHash: keccak256(abi.encode("file", worker, step, index)),
            rollouts: 16,
            units: 1000,
            verdict: verdict,
            reason: verdict == ACCEPTED ? 0 : 60
        });
    }

    function _workerId(address worker) internal view returns (uint32 workerId) {
        (workerId,) = workers.workerOf(worker);
    }

    function _record(address worker, uint32 step, uint32 index, uint8 verdict) internal view returns (bytes memory) {
        return _pack(_outcome(worker, step, index, verdict));
    }

    function _pack(IContributionLedger.Outcome memory o) internal pure returns (bytes memory) {
        return abi.encodePacked(
            o.workerId, o.step, o.index, o.policyVersion, o.fileHash, o.rollouts, o.units, o.verdict, o.reason
        );
    }

    function _one(bytes memory record) internal pure returns (bytes[] memory records) {
        records = new bytes[](1);
        records[0] = record;
    }

    function _two(bytes memory first, bytes memory second) internal pure returns (bytes[] memory records) {
        records = new bytes[](2);
        (records[0], records[1]) = (first, second);
    }

    /// @dev `count` accepted records of Alice in step 1.
    function _accepted(uint256 count) internal view returns (bytes[] memory records) {
        records = new bytes[](count);
        for (uint256 i = 0; i < count; ++i) {
            records[i] = _record(alice, 1, uint32(i), ACCEPTED);
        }
    }

    function _join(bytes[] memory records) internal pure returns (bytes memory joined) {
        for (uint256 i = 0; i < records.length; ++i) {
            joined = bytes.concat(joined, records[i]);
        }
    }

    /// @dev The submission that a record judges.
    function _submission(address worker, uint32 step, uint32 index)
        internal
        view
        returns (IContributionLedger.Submission memory)
    {
        return IContributionLedger.Submission({
            runId: runId,
            worker: worker,
            step: step,
            index: index,
            policyVersion: step - 1,
            fileHash: keccak256(abi.encode("file", worker, step, index)),
            rollouts: 16,
            units: 1000
        });
    }

    /// @dev The submission that a record is about, as far as the record tells.
    function _submissionIn(bytes memory record) internal view returns (IContributionLedger.Submission memory s) {
        // Each shift drops the bytes before a field, each cast those after it.
        (bytes32 head, bytes32 hash, bytes32 tail) = (_wordAt(record, 0), _wordAt(record, 16), _wordAt(record, 24));
        s.runId = runId;
        s.worker = workers.workerById(uint32(bytes4(head)));
        (s.step, s.index) = (uint32(bytes4(head << 32)), uint32(bytes4(head << 64)));
        (s.policyVersion, s.fileHash) = (uint32(bytes4(head << 96)), hash);
        (s.rollouts, s.units) = (uint16(bytes2(tail << 192)), uint32(bytes4(tail << 208)));
    }

    function _wordAt(bytes memory data, uint256 at) private pure returns (bytes32 word) {
        assembly ("memory-safe") {
            word := mload(add(add(data, 32), at))
        }
    }

    /// @dev A submission as what a batch holds at a position, if it does.
    function _held(
        IContributionLedger.OutcomeProof memory outcome,
        IContributionLedger.Submission memory submission,
        bytes memory signature
    ) internal view returns (IContributionLedger.CommittedWork memory) {
        bytes32[] memory leaves = _leavesIn[outcome.batch.batchId];
        return IContributionLedger.CommittedWork({
            submission: submission,
            nodeSignature: signature,
            proof: leaves.length == 0 ? leaves : _batchSiblings(leaves, outcome.position)
        });
    }

    // -------------------------------------------------------------- Merkle trees

    function _leaf(uint64 batchId, uint256 position, bytes memory record) internal pure returns (bytes32) {
        return keccak256(bytes.concat(bytes8(batchId), bytes4(uint32(position)), record));
    }

    function _leaves(uint64 batchId, bytes[] memory records) internal pure returns (bytes32[] memory leaves) {
        leaves = new bytes32[](records.length);
        for (uint256 i = 0; i < records.length; ++i) {
            leaves[i] = _leaf(batchId, i, records[i]);
        }
    }

    /// @dev Siblings are hashed as they stand where their order counts, else sorted.
    function _parents(bytes32[] memory level, bool ordered) private pure returns (bytes32[] memory parents) {
        parents = new bytes32[]((level.length + 1) / 2);
        for (uint256 i = 0; i < parents.length; ++i) {
            if (2 * i + 1 == level.length) parents[i] = level[2 * i];
            else parents[i] = _hashPair(level[2 * i], level[2 * i + 1], ordered);
        }
    }

    function _hashPair(bytes32 a, bytes32 b, bool ordered) private pure returns (bytes32) {
        return ordered || a < b ? keccak256(bytes.concat(a, b)) : keccak256(bytes.concat(b, a));
    }

    function _root(bytes32[] memory level) internal pure returns (bytes32) {
        while (level.length > 1) level = _parents(level, false);
        return level[0];
    }

    /// @dev The root over a batch's submissions, whose order counts.
    function _batchRoot(bytes32[] memory level) internal pure returns (bytes32) {
        while (level.length > 1) level = _parents(level, true);
        return level[0];
    }

    function _siblings(bytes32[] memory level, uint256 position) internal pure returns (bytes32[] memory) {
        return _siblingsIn(level, position, false);
    }

    function _batchSiblings(bytes32[] memory level, uint256 position) internal pure returns (bytes32[] memory) {
        return _siblingsIn(level, position, true);
    }

    function _siblingsIn(bytes32[] memory level, uint256 position, bool ordered)
        private
        pure
        returns (bytes32[] memory siblings)
    {
        bytes32[] memory found = new bytes32[](32);
        uint256 depth;
        while (level.length > 1) {
            uint256 sibling = position ^ 1;
            if (sibling < level.length) found[depth++] = level[sibling];
            level = _parents(level, ordered);
            position /= 2;
        }
        siblings = new bytes32[](depth);
        for (uint256 i = 0; i < depth; ++i) {
            siblings[i] = found[i];
        }
    }

    function _prove(uint64 batchId, bytes[] memory records, uint256 position)
        internal
        view
        returns (IContributionLedger.OutcomeProof memory)
    {
        return IContributionLedger.OutcomeProof({
            batch: batches[batchId],
            position: uint32(position),
            record: records[position],
            proof: _siblings(_leaves(batchId, records), position)
        });
    }

    /// @dev The claim over some positions of a posted batch, which must ascend.
    function _claimOf(uint64 batchId, bytes[] memory records, uint32[] memory positions)
        internal
        view
        returns (IRewardEscrow.Claim memory claimed)
    {
        bytes[] memory chosen = new bytes[](positions.length);
        for (uint256 i = 0; i < positions.length; ++i) {
            chosen[i] = records[positions[i]];
        }
        claimed.batch = batches[batchId];
        claimed.positions = positions;
        claimed.records = _join(chosen);
        claimed.siblings = _multiSiblings(_leaves(batchId, records), positions);
    }

    /// @dev What a proof of many leaves needs besides them: marks known nodes and climbs, the slow way.
    function _multiSiblings(bytes32[] memory level, uint32[] memory positions)
        internal
        pure
        returns (bytes32[] memory siblings)
    {
        bool[] memory known = new bool[](level.length);
        for (uint256 i = 0; i < positions.length; ++i) {
            known[positions[i]] = true;
        }
        bytes32[] memory found = new bytes32[](32 * positions.length);
        uint256 count;
        while (level.length > 1) {
            bool[] memory above = new bool[]((level.length + 1) / 2);
            for (uint256 i = 0; i < level.length; ++i) {
                uint256 sibling = i ^ 1;
                if (known[i] && sibling < level.length && !known[sibling]) found[count++] = level[sibling];
                if (known[i]) above[i / 2] = true;
            }
            (level, known) = (_parents(level, false), above);
        }
        siblings = new bytes32[](count);
        for (uint256 i = 0; i < count; ++i) {
            siblings[i] = found[i];
        }
    }

    function _range(uint256 from, uint256 to) internal pure returns (uint32[] memory positions) {
        positions = new uint32[](to - from);
        for (uint256 i = from; i < to; ++i) {
            positions[i - from] = uint32(i);
        }
    }

    function _claim(uint64 batchId, bytes[] memory records, uint256 from, uint256 to) internal returns (uint256) {
        IRewardEscrow.Claim[] memory claims = new IRewardEscrow.Claim[](1);
        claims[0] = _claimOf(batchId, records, _range(from, to));
        return escrow.claim(claims);
    }

    // --------------------------------------------------------------- signatures

    function _sign(uint256 key, bytes32 separator, bytes32 structHash) internal pure returns (bytes memory) {
        (uint8 v, bytes32 r, bytes32 s) = vm.sign(key, keccak256(bytes.concat(hex"1901", separator, structHash)));
        return bytes.concat(r, s, bytes1(v));
    }

    /// @dev A node's consent to serve `worker`, for the worker's next nonce.
    function _consent(address worker, address node, uint256 nodeKey, uint256 deadline)
        internal
        view
        returns (bytes memory)
    {
        bytes32 typeHash = keccak256("NodeRegistration(address worker,address node,uint256 nonce,uint256 deadline)");
        bytes32 structHash = keccak256(abi.encode(typeHash, worker, node, workers.nonces(worker), deadline));
        return _sign(nodeKey, workers.DOMAIN_SEPARATOR(), structHash);
    }

    function _submissionHash(IContributionLedger.Submission memory s) internal pure returns (bytes32) {
        bytes32 typeHash = keccak256(
            "Submission(uint64 runId,address worker,uint32 step,uint32 index,uint32 policyVersion,bytes32 fileHash,uint32 rollouts,uint64 units)"
        );
        return keccak256(
            abi.encode(typeHash, s.runId, s.worker, s.step, s.index, s.policyVersion, s.fileHash, s.rollouts, s.units)
        );
    }

    function _signSubmission(IContributionLedger.Submission memory submission, uint256 key)
        internal
        view
        returns (bytes memory)
    {
        return _sign(key, ledger.DOMAIN_SEPARATOR(), _submissionHash(submission));
    }

    function _outcomesHash(uint64 batchId, bytes memory records) internal view returns (bytes32) {
        bytes32 typeHash = keccak256("Outcomes(uint64 batchId,bytes32 batchRoot,bytes32 recordsHash)");
        return keccak256(abi.encode(typeHash, batchId, batches[batchId].root, keccak256(records)));
    }

    /// @dev Joined signatures of the first `count` validators.
    function _signOutcomes(uint64 batchId, bytes memory records, uint256 count)
        internal
        view
        returns (bytes memory signatures)
    {
        for (uint256 i = 0; i < count; ++i) {
            bytes memory signature = _sign(validatorKeys[i], ledger.DOMAIN_SEPARATOR(), _outcomesHash(batchId, records));
            signatures = bytes.concat(signatures, signature);
        }
    }

    function _signPermit(address from, uint256 key, address spender, uint256 value, uint256 deadline)
        internal
        view
        returns (uint8 v, bytes32 r, bytes32 s)
    {
        bytes32 typeHash =
            keccak256("Permit(address owner,address spender,uint256 value,uint256 nonce,uint256 deadline)");
        bytes32 structHash = keccak256(abi.encode(typeHash, from, spender, value, token.nonces(from), deadline));
        return vm.sign(key, keccak256(bytes.concat(hex"1901", token.DOMAIN_SEPARATOR(), structHash)));
    }

    // ------------------------------------------------------------------- shorthand

    function _stake(address account) internal view returns (uint256 active, uint256 unbonding) {
        IStakeVault.Account memory held = vault.accountOf(runId, account);
        return (held.active, held.unbonding);
    }

    function _status(address worker) internal view returns (IWorkerRegistry.Status) {
        return workers.statusOf(runId, worker);
    }

    function _assertStatus(address worker, IWorkerRegistry.Status status, string memory why) internal view {
        assertEq(uint8(_status(worker)), uint8(status), why);
    }

    function _escrowId(address worker, IStakeVault.Offence offence, uint32 step, uint32 index)
        internal
        view
        returns (bytes32)
    {
        return vault.escrowIdOf(runId, worker, offence, uint64(step) << 32 | index);
    }

    function _expectSourcesTooLarge(uint256 count, uint256 size) internal {
        vm.expectRevert(abi.encodeWithSelector(SourcesLib.SourcesTooLarge.selector, count, size));
    }

    function _noSources() internal pure returns (string[] memory) {}

    /// @dev A signed submission with the ticket that allowed it until `deadline`.
    function _work(IContributionLedger.Submission memory submission, uint256 nodeKey, uint256 deadline)
        internal
        view
        returns (IContributionLedger.LeasedWork memory work)
    {
        work.submission = submission;
        work.nodeSignature = _signSubmission(submission, nodeKey);
        work.ticket = IContributionLedger.Ticket({
            runId: submission.runId,
            worker: submission.worker,
            step: submission.step,
            index: submission.index,
            policyVersion: submission.policyVersion,
            policyRoot: keccak256("policy"),
            beacon: keccak256("beacon"),
            deadline: uint64(deadline)
        });
        work.ticketSignature = _signTicket(work.ticket, orchestratorKey);
    }

    function _signTicket(IContributionLedger.Ticket memory ticket, uint256 key) internal view returns (bytes memory) {
        bytes32 typeHash = keccak256(
            "Ticket(uint64 runId,address worker,uint32 step,uint32 index,uint32 policyVersion,bytes32 policyRoot,bytes32 beacon,uint64 deadline)"
        );
        return _sign(key, ledger.DOMAIN_SEPARATOR(), keccak256(abi.encode(typeHash, ticket)));
    }

    /// @dev Leaf of a submission in its batch.
    function _submissionLeaf(IContributionLedger.Submission memory submission) internal pure returns (bytes32) {
        return keccak256(abi.encode(_submissionHash(submission)));
    }
}
