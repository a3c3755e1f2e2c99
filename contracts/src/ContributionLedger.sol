// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {ECDSA} from "@openzeppelin/contracts/utils/cryptography/ECDSA.sol";
import {EIP712} from "@openzeppelin/contracts/utils/cryptography/EIP712.sol";
import {MerkleProof} from "@openzeppelin/contracts/utils/cryptography/MerkleProof.sol";
import {Math} from "@openzeppelin/contracts/utils/math/Math.sol";
import {SafeCast} from "@openzeppelin/contracts/utils/math/SafeCast.sol";

import {IContributionLedger} from "./interfaces/IContributionLedger.sol";
import {IDisputeCourt} from "./interfaces/IDisputeCourt.sol";
import {IRewardEscrow} from "./interfaces/IRewardEscrow.sol";
import {IRunRegistry} from "./interfaces/IRunRegistry.sol";
import {IStakeVault} from "./interfaces/IStakeVault.sol";
import {IWorkerRegistry} from "./interfaces/IWorkerRegistry.sol";
import {BatchLib} from "./libraries/BatchLib.sol";
import {OutcomeRecordLib} from "./libraries/OutcomeRecordLib.sol";

/// @title The ledger of contributions: what was submitted, and what validators decided
/// @dev One batch goes through: commitBatch (or submitDirect) → postOutcomes → for fraud executeFraud at once and
///      finaliseFraud after the challenge window → RewardEscrow.claim for what was accepted. Without outcomes in
///      time it stands as claimed.
contract ContributionLedger is IContributionLedger, EIP712 {
    using SafeCast for uint256;
    using BatchLib for Batch;
    using OutcomeRecordLib for Outcome;

    /// @dev What a worker has in flight by its own submissions. One slot.
    struct DirectWork {
        uint64 units;
        // Unix seconds at which all of it is final.
        uint64 until;
    }

    /// @dev Where the other contracts are.
    struct Network {
        IRunRegistry runs;
        IWorkerRegistry workers;
        IStakeVault vault;
        IDisputeCourt court;
        IRewardEscrow escrow;
    }

    bytes32 private constant OUTCOMES_TYPEHASH =
        keccak256("Outcomes(uint64 batchId,bytes32 batchRoot,bytes32 recordsHash)");

    /// @dev Bytes of a signature: r, s, v.
    uint256 private constant SIGNATURE_SIZE = 65;

    /// @dev One million: the whole, in parts per million.
    uint256 private constant PPM = 1_000_000;

    /// @notice Submissions in the largest batch.
    uint256 public constant MAX_COUNT = 4096;

    /// @notice The runs, with their orchestrators and validators.
    IRunRegistry public immutable runs;

    /// @notice The workers, and the nodes that sign for them.
    IWorkerRegistry public immutable workers;

    /// @notice The vault that is told to slash and to hold.
    IStakeVault public immutable vault;

    /// @notice The court that may overturn outcomes.
    IDisputeCourt public immutable court;

    /// @notice The escrow that sets rewards aside.
    IRewardEscrow public immutable escrow;

    /// @inheritdoc IContributionLedger
    uint256 public immutable challengeWindow;

    /// @inheritdoc IContributionLedger
    uint256 public immutable outcomeDeadline;

    /// @inheritdoc IContributionLedger
    uint256 public immutable stakePerUnit;

    /// @dev Seconds that a pause of slashing lasts.
    uint256 private immutable _slashPause;

    /// @inheritdoc IContributionLedger
    uint64 public batchCount;

    mapping(uint64 batchId => bytes32 headerHash) private _commitments;
    mapping(address worker => DirectWork) private _directWork;
    mapping(bytes32 slot => bool) private _submittedDirectly;

    /// @param network Where the other contracts are; those deployed later by their predicted addresses.
    /// @param challengeWindow_ Seconds after posting during which an outcome may be challenged.
    /// @param outcomeDeadline_ Seconds after the commitment by which outcomes are due.
    /// @param stakePerUnit_ Token wei of stake behind one unit in flight.
    constructor(Network memory network, uint256 challengeWindow_, uint256 outcomeDeadline_, uint256 stakePerUnit_)
        EIP712("Muster", "1")
    {
        uint256 cooldown = network.runs.slashCooldown();
        // A window that one pause prolonged is over when the next one begins: what is final stays final.
        require(cooldown >= challengeWindow_, LedgerCooldownTooShort(cooldown, challengeWindow_));
        runs = network.runs;
        workers = network.workers;
        vault = network.vault;
        court = network.court;
        escrow = network.escrow;
        challengeWindow = challengeWindow_;
        outcomeDeadline = outcomeDeadline_;
        stakePerUnit = stakePerUnit_;
        _slashPause = network.runs.slashPause();
    }

    // ------------------------------------------------------------------- commit

    /// @inheritdoc IContributionLedger
    function commitBatch(uint64 runId, bytes32 root, uint32 count, uint64 units) external returns (uint64 batchId) {
        (address orchestrator, uint88 pricePerUnit, bool open) = runs.admissionOf(runId);
        require(msg.sender == orchestrator, LedgerUnauthorized(msg.sender));
        require(open, LedgerPaused(runId));
        require(root != 0 && count != 0 && count <= MAX_COUNT, LedgerInvalidBatch(root, count));
        return _commit(runId, root, count, units, pricePerUnit);
    }

    function _commit(uint64 runId, bytes32 root, uint32 count, uint64 units, uint88 pricePerUnit)
        private
        returns (uint64 batchId)
    {
        batchId = ++batchCount;
        uint40 committedAt = block.timestamp.toUint40();
        _commitments[batchId] = BatchLib.hashOf(
            Batch({
                batchId: batchId,
                runId: runId,
                root: root,
                count: count,
                units: units,
                pricePerUnit: pricePerUnit,
                committedAt: committedAt,
                postedAt: 0,
                signers: 0
            })
        );
        emit BatchCommitted(batchId, runId, root, count, units, pricePerUnit, committedAt);
        escrow.reserve(runId, uint256(units) * pricePerUnit);
    }

    // ------------------------------------------------------------ submit direct

    /// @inheritdoc IContributionLedger
    function submitDirect(Submission calldata submission, bytes calldata nodeSignature)
        external
        returns (uint64 batchId)
    {
        address worker = submission.worker;
        (, uint88 pricePerUnit, bool open) = runs.admissionOf(submission.runId);
        require(open, LedgerPaused(submission.runId));
        (bytes32 structHash, address signer) = _signerOf(submission, nodeSignature);
        // A record holds no more units and rollouts than these.
        require(
            signer != address(0) && workers.workerOfNode(signer) == worker && workers.isActive(worker)
                && submission.units <= type(uint32).max && submission.rollouts <= type(uint16).max,
            LedgerInvalidSubmission(worker, signer)
        );
        require(msg.sender == worker || msg.sender == signer, LedgerUnauthorized(msg.sender));
        _useSlot(submission);
        _coverDirectWork(worker, submission.units);
        // The root of a batch of one is its leaf.
        batchId = _commit(submission.runId, _leafOf(structHash), 1, submission.units, pricePerUnit);
        emit DirectlySubmitted(batchId, worker, submission, nodeSignature);
    }

    function _useSlot(Submission calldata s) private {
        bytes32 slot = keccak256(abi.encode(s.runId, s.worker, s.step, s.index));
        require(!_submittedDirectly[slot], LedgerSlotUsed(s.runId, s.worker, s.step, s.index));
        _submittedDirectly[slot] = true;
    }

    /// @dev Adds units to a worker's direct work, all of which its stake must cover and stay for.
    function _coverDirectWork(address worker, uint64 units) private {
        DirectWork storage work = _directWork[worker];
        uint256 inFlight = (block.timestamp < work.until ? work.units : 0) + uint256(units);
        uint256 cap = unitCapOf(worker);
        require(inFlight <= cap, LedgerUnitCap(worker, inFlight, cap));
        uint256 until = block.timestamp + judgementTime();
        work.units = inFlight.toUint64();
        work.until = until.toUint64();
        vault.hold(worker, until);
    }

    // ------------------------------------------------------------ post outcomes

    /// @inheritdoc IContributionLedger
    function postOutcomes(Batch calldata batch, bytes calldata records, bytes calldata signatures) external {
        _check(batch);
        uint64 batchId = batch.batchId;
        require(batch.postedAt == 0, LedgerOutcomesPosted(batchId));
        uint256 dueAt = batch.committedAt + outcomeDeadline;
        require(block.timestamp < dueAt, LedgerOutcomesOverdue(batchId, dueAt));
        uint256 expected = batch.count * OutcomeRecordLib.SIZE;
        require(records.length == expected, LedgerRecordCount(records.length, expected));
        bytes32 structHash = _outcomesHash(Outcomes(batchId, batch.root, keccak256(records)));

        Batch memory posted = batch;
        posted.signers = _checkQuorum(batch.runId, _hashTypedDataV4(structHash), signatures);
        posted.root = _checkRecords(batch, records);
        posted.postedAt = block.timestamp.toUint40();
        _commitments[batchId] = posted.hashOf();
        emit OutcomesPosted(batchId, posted.runId, posted.root, posted.postedAt, posted.signers, records, signatures);
    }

    /// @dev Returns the root over the outcomes, which hold no more units than the batch was committed for.
    function _checkRecords(Batch calldata batch, bytes calldata records) private pure returns (bytes32 root) {
        uint256 units;
        (root, units) = OutcomeRecordLib.digest(batch.batchId, records);
        require(units <= batch.units, LedgerUnitsExceeded(batch.batchId, units, batch.units));
    }

    /// @dev Returns the seats of the signers, which are validators of the run, each once, at least a quorum.
    function _checkQuorum(uint64 runId, bytes32 digest, bytes calldata signatures)
        private
        view
        returns (uint88 signers)
    {
        require(signatures.length % SIGNATURE_SIZE == 0, LedgerSignatureLength(signatures.length));
        address[] memory accounts = new address[](signatures.length / SIGNATURE_SIZE);
        address last;
        for (uint256 i = 0; i < accounts.length; ++i) {
            address signer = _recover(digest, signatures[i * SIGNATURE_SIZE:(i + 1) * SIGNATURE_SIZE]);
            require(signer > last, LedgerInvalidSigner(signer));
            accounts[i] = last = signer;
        }
        uint8 quorum;
        address stranger;
        (quorum, signers, stranger) = runs.quorumAmong(runId, accounts);
        require(stranger == address(0), LedgerInvalidSigner(stranger));
        require(accounts.length >= quorum, LedgerQuorumNotMet(accounts.length, quorum));
    }

    // -------------------------------------------------------------------- fraud

    /// @inheritdoc IContributionLedger
    function executeFraud(OutcomeProof calldata outcome, Submission calldata submission, bytes calldata nodeSignature)
        external
        returns (uint256 amount)
    {
        Standing memory standing = _standing(outcome);
        _requireFraud(outcome, standing.verdict);
        _checkEvidence(outcome.batch.runId, standing.outcome, submission, nodeSignature);
        bytes32 offence = standing.offence;
        uint256 ppm = _convict(outcome.batch.runId, submission.worker, offence, standing.outcome.isExactFraud());
        amount = vault.slash(submission.worker, ppm, offence, _reporterOf(standing));
        emit FraudExecuted(outcome.batch.batchId, submission.worker, offence, standing.leaf, outcome.position, amount);
    }

    function _requireFraud(OutcomeProof calldata outcome, uint8 verdict) private pure {
        require(verdict == OutcomeRecordLib.FRAUD, LedgerNotFraud(outcome.batch.batchId, outcome.position, verdict));
    }

    /// @dev Returns who reported a fraud that validators had not found, or zero.
    function _reporterOf(Standing memory standing) private view returns (address) {
        if (standing.outcome.verdict == OutcomeRecordLib.FRAUD) return address(0);
        return court.challengerOf(standing.leaf);
    }

    /// @dev Convicts a worker unless slashing is paused. Returns the share of stake that its fraud costs: doubled for
    ///      each prior conviction, never more than all.
    function _convict(uint64 runId, address worker, bytes32 offence, bool exact) private returns (uint256) {
        (uint256 fraudPpm, uint256 exactFraudPpm, uint256 pausedUntil) = runs.slashesOf(runId);
        require(block.timestamp >= pausedUntil, LedgerSlashingPaused(runId, pausedUntil));
        uint256 priors = workers.convict(worker, offence, exact);
        // Twenty doublings make a million of one.
        return exact ? exactFraudPpm : Math.min(fraudPpm << Math.min(priors, 20), PPM);
    }

    /// @dev Reverts unless a node of the judged worker signed exactly the judged submission.
    function _checkEvidence(
        uint64 runId,
        Outcome memory judged,
        Submission calldata submission,
        bytes calldata nodeSignature
    ) private view {
        (, address signer) = _signerOf(submission, nodeSignature);
        require(
            submission.runId == runId && submission.step == judged.step && submission.index == judged.index
                && submission.policyVersion == judged.policyVersion && submission.fileHash == judged.fileHash
                && workers.wasNodeOf(signer, submission.worker, judged.workerId),
            LedgerInvalidSubmission(submission.worker, signer)
        );
    }

    /// @inheritdoc IContributionLedger
    function finaliseFraud(OutcomeProof calldata outcome) external {
        Standing memory standing = _standing(outcome);
        _requireFraud(outcome, standing.verdict);
        require(standing.isFinal, LedgerNotFinal(outcome.batch.batchId, outcome.position));
        vault.release(standing.offence);
        emit FraudFinalised(outcome.batch.batchId, standing.offence, standing.leaf);
    }

    // ----------------------------------------------------------------- disputes

    /// @inheritdoc IContributionLedger
    function markDisputed(uint64 batchId) external {
        require(msg.sender == address(court), LedgerUnauthorized(msg.sender));
        _commitments[batchId] |= BatchLib.DISPUTED;
    }

    // -------------------------------------------------------------------- views

    /// @inheritdoc IContributionLedger
    function standingOf(OutcomeProof calldata outcome) external view returns (Standing memory) {
        return _standing(outcome);
    }

    /// @inheritdoc IContributionLedger
    function inFlightUntil(OutcomeProof calldata outcome, Submission calldata submission, bytes calldata nodeSignature)
        external
        view
        returns (uint256 closesAt)
    {
        bool disputed = _check(outcome.batch);
        Outcome memory judged = _decode(outcome);
        bytes32 leaf;
        (leaf, closesAt) = _prove(outcome, judged);
        require(!_isFinal(leaf, closesAt, disputed), LedgerFinal(outcome.batch.batchId, outcome.position));
        _checkEvidence(outcome.batch.runId, judged, submission, nodeSignature);
    }

    /// @inheritdoc IContributionLedger
    function isDisputed(Batch calldata batch) external view returns (bool) {
        return _check(batch);
    }

    /// @inheritdoc IContributionLedger
    function overdueSince(Batch calldata batch) external view returns (uint256 dueAt) {
        _check(batch);
        require(batch.postedAt == 0, LedgerOutcomesPosted(batch.batchId));
        dueAt = _requireOverdue(batch);
    }

    /// @inheritdoc IContributionLedger
    function judgementTime() public view returns (uint256) {
        return outcomeDeadline + challengeWindow + court.juryTime() + _slashPause;
    }

    /// @inheritdoc IContributionLedger
    function unitCapOf(address worker) public view returns (uint256) {
        return vault.activeStake(worker) / stakePerUnit;
    }

    /// @inheritdoc IContributionLedger
    function commitmentOf(uint64 batchId) external view returns (bytes32) {
        return _commitments[batchId];
    }

    /// @inheritdoc IContributionLedger
    function submissionSigner(Submission calldata submission, bytes calldata signature)
        external
        view
        returns (address signer)
    {
        (, signer) = _signerOf(submission, signature);
    }

    /// @inheritdoc IContributionLedger
    function outcomesSigner(Outcomes calldata outcomes, bytes calldata signature) external view returns (address) {
        return _recover(_hashTypedDataV4(_outcomesHash(outcomes)), signature);
    }

    /// @inheritdoc IContributionLedger
    function DOMAIN_SEPARATOR() external view returns (bytes32) {
        return _domainSeparatorV4();
    }

    // ------------------------------------------------------------------- batches

    /// @dev Returns whether an outcome of the batch was challenged; reverts when the header is not the stored one.
    function _check(Batch calldata batch) private view returns (bool disputed) {
        return batch.check(_commitments[batch.batchId]);
    }

    function _requireOverdue(Batch calldata batch) private view returns (uint256 dueAt) {
        dueAt = batch.committedAt + outcomeDeadline;
        require(block.timestamp >= dueAt, LedgerOutcomesPending(batch.batchId, dueAt));
    }

    /// @dev Returns an outcome as it stands; reverts when it does not.
    function _standing(OutcomeProof calldata outcome) private view returns (Standing memory standing) {
        bool disputed = _check(outcome.batch);
        if (outcome.batch.postedAt == 0) _requireOverdue(outcome.batch);
        Outcome memory judged = _decode(outcome);
        (bytes32 leaf, uint256 closesAt) = _prove(outcome, judged);
        standing.outcome = judged;
        standing.leaf = leaf;
        standing.offence = judged.offenceOf(outcome.batch.runId);
        standing.verdict = disputed ? court.effectiveVerdict(leaf, judged.verdict) : judged.verdict;
        if (standing.verdict == OutcomeRecordLib.FRAUD) {
            closesAt = runs.fraudClosesAt(outcome.batch.runId, closesAt, challengeWindow);
        }
        standing.closesAt = closesAt;
        standing.isFinal = _isFinal(leaf, closesAt, disputed);
    }

    function _isFinal(bytes32 leaf, uint256 closesAt, bool disputed) private view returns (bool) {
        return block.timestamp >= closesAt && !(disputed && court.isOpen(leaf));
    }

    /// @dev Returns an outcome's leaf and when its challenge window closes; reverts unless it is in the batch.
    function _prove(OutcomeProof calldata outcome, Outcome memory judged)
        private
        view
        returns (bytes32 leaf, uint256 closesAt)
    {
        Batch calldata batch = outcome.batch;
        bool proven;
        if (batch.postedAt != 0) {
            leaf = OutcomeRecordLib.leafOf(batch.batchId, outcome.position, outcome.record);
            closesAt = batch.postedAt + challengeWindow;
            proven = MerkleProof.verifyCalldata(outcome.proof, batch.root, leaf);
        } else {
            bytes32 submissionLeaf = judged.submissionLeafOf(batch.runId, workers.workerById(judged.workerId));
            leaf = OutcomeRecordLib.overdueLeafOf(batch.batchId, submissionLeaf);
            closesAt = batch.committedAt + outcomeDeadline + challengeWindow;
            proven = judged.isAsClaimed() && MerkleProof.verifyCalldata(outcome.proof, batch.root, submissionLeaf);
        }
        require(proven, LedgerInvalidProof(batch.batchId, outcome.position));
    }

    function _decode(OutcomeProof calldata outcome) private pure returns (Outcome memory) {
        require(
            outcome.record.length == OutcomeRecordLib.SIZE, LedgerInvalidProof(outcome.batch.batchId, outcome.position)
        );
        return OutcomeRecordLib.decode(outcome.record);
    }

    // --------------------------------------------------------------- submissions

    function _leafOf(bytes32 structHash) private pure returns (bytes32) {
        return keccak256(abi.encode(structHash));
    }

    /// @dev Returns the struct hash of a submission and who signed it; zero when the signature is malformed.
    function _signerOf(Submission calldata submission, bytes calldata signature)
        private
        view
        returns (bytes32 structHash, address signer)
    {
        structHash = keccak256(abi.encode(OutcomeRecordLib.SUBMISSION_TYPEHASH, submission));
        signer = _recover(_hashTypedDataV4(structHash), signature);
    }

    function _outcomesHash(Outcomes memory outcomes) private pure returns (bytes32) {
        return keccak256(abi.encode(OUTCOMES_TYPEHASH, outcomes));
    }

    /// @dev Returns who signed a digest; zero when the signature is malformed.
    function _recover(bytes32 digest, bytes calldata signature) private pure returns (address signer) {
        if (signature.length != SIGNATURE_SIZE) return address(0);
        (signer,,) = ECDSA.tryRecover(digest, uint8(signature[64]), bytes32(signature[0:32]), bytes32(signature[32:64]));
    }
}
