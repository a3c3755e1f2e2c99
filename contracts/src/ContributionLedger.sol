// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {ECDSA} from "@openzeppelin/contracts/utils/cryptography/ECDSA.sol";
import {EIP712} from "@openzeppelin/contracts/utils/cryptography/EIP712.sol";
import {MerkleProof} from "@openzeppelin/contracts/utils/cryptography/MerkleProof.sol";
import {SafeCast} from "@openzeppelin/contracts/utils/math/SafeCast.sol";

import {IContributionLedger} from "./interfaces/IContributionLedger.sol";
import {IDisputeCourt} from "./interfaces/IDisputeCourt.sol";
import {IRunRegistry} from "./interfaces/IRunRegistry.sol";
import {IStakeVault} from "./interfaces/IStakeVault.sol";
import {IWorkerRegistry} from "./interfaces/IWorkerRegistry.sol";
import {OutcomeRecordLib} from "./libraries/OutcomeRecordLib.sol";

/// @title The ledger of contributions: what was submitted, and what validators decided
/// @dev One batch goes through: commitBatch (or submitDirect) → postOutcomes → for fraud executeFraud at once and
///      finaliseFraud after the challenge window → RewardEscrow.claim for what was accepted.
contract ContributionLedger is IContributionLedger, EIP712 {
    using SafeCast for uint256;

    /// @dev A batch in storage: two slots.
    struct StoredBatch {
        // slot 0: over submission leaves until outcomes are posted, over outcome leaves from then on. The one is not
        // needed after the other, and overwriting costs a quarter of a new slot.
        bytes32 root;
        // slot 1
        uint64 runId;
        uint16 count;
        uint40 committedAt;
        uint40 postedAt;
        uint88 signers;
        bool disputed;
    }

    bytes32 private constant SUBMISSION_TYPEHASH = keccak256(
        "Submission(uint64 runId,address worker,uint32 step,uint32 index,uint32 policyVersion,bytes32 fileHash,uint32 rollouts,uint64 units)"
    );
    bytes32 private constant OUTCOMES_TYPEHASH =
        keccak256("Outcomes(uint64 batchId,bytes32 batchRoot,bytes32 recordsHash)");

    /// @notice Submissions in the largest batch.
    uint256 public constant MAX_COUNT = 4096;

    /// @notice The runs, with their orchestrators and validators.
    IRunRegistry public immutable runs;

    /// @notice The workers, and the nodes that sign for them.
    IWorkerRegistry public immutable workers;

    /// @notice The vault that is told to slash.
    IStakeVault public immutable vault;

    /// @notice The court that may overturn outcomes.
    IDisputeCourt public immutable court;

    /// @inheritdoc IContributionLedger
    uint256 public immutable challengeWindow;

    /// @inheritdoc IContributionLedger
    uint256 public immutable outcomeDeadline;

    /// @inheritdoc IContributionLedger
    uint64 public batchCount;

    mapping(uint64 batchId => StoredBatch) private _batches;

    /// @param runs_ RunRegistry.
    /// @param workers_ WorkerRegistry.
    /// @param vault_ StakeVault, by its predicted address.
    /// @param court_ DisputeCourt, by its predicted address.
    /// @param challengeWindow_ Seconds after posting during which an outcome may be challenged.
    /// @param outcomeDeadline_ Seconds after the commitment by which outcomes are due.
    constructor(
        IRunRegistry runs_,
        IWorkerRegistry workers_,
        IStakeVault vault_,
        IDisputeCourt court_,
        uint256 challengeWindow_,
        uint256 outcomeDeadline_
    ) EIP712("Muster", "1") {
        runs = runs_;
        workers = workers_;
        vault = vault_;
        court = court_;
        challengeWindow = challengeWindow_;
        outcomeDeadline = outcomeDeadline_;
    }

    // ------------------------------------------------------------------- commit

    /// @inheritdoc IContributionLedger
    function commitBatch(uint64 runId, bytes32 root, uint32 count, uint64 units) external returns (uint64 batchId) {
        (address orchestrator,,, bool paused) = runs.termsOf(runId);
        require(msg.sender == orchestrator, LedgerUnauthorized(msg.sender));
        require(!paused, LedgerPaused(runId));
        require(root != 0 && count != 0 && count <= MAX_COUNT, LedgerInvalidBatch(root, count));
        return _commit(runId, root, count, units);
    }

    /// @inheritdoc IContributionLedger
    function submitDirect(Submission calldata submission, bytes calldata nodeSignature)
        external
        returns (uint64 batchId)
    {
        (,,, bool paused) = runs.termsOf(submission.runId);
        require(!paused, LedgerPaused(submission.runId));
        (bytes32 structHash, address signer) = _signerOf(submission, nodeSignature);
        require(
            signer != address(0) && workers.workerOfNode(signer) == submission.worker
                && workers.isActive(submission.worker),
            LedgerInvalidSubmission(submission.worker, signer)
        );
        // The root of a batch of one is its leaf.
        batchId = _commit(submission.runId, keccak256(abi.encode(structHash)), 1, submission.units);
        emit DirectlySubmitted(batchId, submission.worker, submission, nodeSignature);
    }

    function _commit(uint64 runId, bytes32 root, uint32 count, uint64 units) private returns (uint64 batchId) {
        batchId = ++batchCount;
        _batches[batchId] = StoredBatch({
            root: root,
            runId: runId,
            count: uint256(count).toUint16(),
            committedAt: block.timestamp.toUint40(),
            postedAt: 0,
            signers: 0,
            disputed: false
        });
        emit BatchCommitted(batchId, runId, root, count, units);
    }

    // ------------------------------------------------------------ post outcomes

    /// @inheritdoc IContributionLedger
    function postOutcomes(uint64 batchId, bytes calldata records, bytes[] calldata signatures) external {
        StoredBatch memory batch = _batches[batchId];
        require(batch.runId != 0, LedgerBatchUnknown(batchId));
        require(batch.postedAt == 0, LedgerOutcomesPosted(batchId));
        uint256 expected = batch.count * OutcomeRecordLib.SIZE;
        require(records.length == expected, LedgerRecordCount(records.length, expected));
        bytes32 structHash = keccak256(abi.encode(OUTCOMES_TYPEHASH, batchId, batch.root, keccak256(records)));
        batch.signers = _checkQuorum(batch.runId, _hashTypedDataV4(structHash), signatures);
        batch.root = OutcomeRecordLib.rootOf(batchId, records);
        batch.postedAt = block.timestamp.toUint40();

        _batches[batchId] = batch;
        emit OutcomesPosted(batchId, batch.runId, batch.root, records, signatures);
    }

    /// @dev Returns the seats of the signers, which are validators of the run, each once, at least a quorum.
    function _checkQuorum(uint64 runId, bytes32 digest, bytes[] calldata signatures)
        private
        view
        returns (uint88 signers)
    {
        address[] memory accounts = new address[](signatures.length);
        address last;
        for (uint256 i = 0; i < signatures.length; ++i) {
            address signer = _recover(digest, signatures[i]);
            require(signer > last, LedgerInvalidSigner(signer));
            accounts[i] = last = signer;
        }
        uint8 quorum;
        address stranger;
        (quorum, signers, stranger) = runs.quorumAmong(runId, accounts);
        require(stranger == address(0), LedgerInvalidSigner(stranger));
        require(accounts.length >= quorum, LedgerQuorumNotMet(accounts.length, quorum));
    }

    /// @dev Returns who signed a digest; zero when the signature is malformed.
    function _recover(bytes32 digest, bytes calldata signature) private pure returns (address signer) {
        if (signature.length != 65) return address(0);
        (signer,,) = ECDSA.tryRecover(digest, uint8(signature[64]), bytes32(signature[0:32]), bytes32(signature[32:64]));
    }

    // -------------------------------------------------------------------- fraud

    /// @inheritdoc IContributionLedger
    function executeFraud(OutcomeProof calldata outcome, Submission calldata submission, bytes calldata nodeSignature)
        external
        returns (uint256 amount)
    {
        (StoredBatch memory batch, Outcome memory judged, bytes32 leaf) = _posted(outcome);
        address reporter = _fraudReporter(batch, outcome, judged.verdict, leaf);
        _checkEvidence(batch.runId, judged, submission, nodeSignature);
        (, uint32 fraudPpm,,) = runs.termsOf(batch.runId);
        workers.ban(submission.worker, leaf);
        amount = vault.slash(submission.worker, fraudPpm, leaf, reporter);
        emit FraudExecuted(outcome.batchId, submission.worker, leaf, outcome.position, amount);
    }

    /// @dev Returns who reported a fraud that validators had not found, or zero; reverts when fraud does not stand.
    function _fraudReporter(StoredBatch memory batch, OutcomeProof calldata outcome, uint8 recorded, bytes32 leaf)
        private
        view
        returns (address)
    {
        uint8 verdict = batch.disputed ? court.effectiveVerdict(leaf, recorded) : recorded;
        require(verdict == OutcomeRecordLib.FRAUD, LedgerNotFraud(outcome.batchId, outcome.position, verdict));
        return recorded == OutcomeRecordLib.FRAUD ? address(0) : court.caseOf(leaf).challenger;
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
        (StoredBatch memory batch,, bytes32 leaf) = _posted(outcome);
        require(_isFinal(batch, leaf), LedgerNotFinal(outcome.batchId, outcome.position));
        vault.release(leaf);
        emit FraudFinalised(leaf);
    }

    // ----------------------------------------------------------------- disputes

    /// @inheritdoc IContributionLedger
    function markDisputed(uint64 batchId) external {
        require(msg.sender == address(court), LedgerUnauthorized(msg.sender));
        _batches[batchId].disputed = true;
    }

    // -------------------------------------------------------------------- views

    /// @inheritdoc IContributionLedger
    function outcomeOf(OutcomeProof calldata outcome) external view returns (Outcome memory judged, bytes32 leaf) {
        (, judged, leaf) = _posted(outcome);
    }

    /// @inheritdoc IContributionLedger
    function settledOutcome(OutcomeProof calldata outcome)
        external
        view
        returns (uint64 runId, Outcome memory settled, bool isFinal_)
    {
        StoredBatch memory batch;
        bytes32 leaf;
        (batch, settled, leaf) = _posted(outcome);
        if (batch.disputed) settled.verdict = court.effectiveVerdict(leaf, settled.verdict);
        return (batch.runId, settled, _isFinal(batch, leaf));
    }

    /// @inheritdoc IContributionLedger
    function isFinal(uint64 batchId, bytes32 leaf) external view returns (bool) {
        return _isFinal(_batches[batchId], leaf);
    }

    /// @inheritdoc IContributionLedger
    function signersOf(uint64 batchId) external view returns (uint88) {
        return _batches[batchId].signers;
    }

    /// @inheritdoc IContributionLedger
    function batchOf(uint64 batchId) external view returns (Batch memory) {
        StoredBatch memory batch = _batches[batchId];
        return Batch({
            root: batch.postedAt == 0 ? batch.root : bytes32(0),
            outcomesRoot: batch.postedAt == 0 ? bytes32(0) : batch.root,
            runId: batch.runId,
            count: batch.count,
            committedAt: batch.committedAt,
            postedAt: batch.postedAt
        });
    }

    /// @inheritdoc IContributionLedger
    function DOMAIN_SEPARATOR() external view returns (bytes32) {
        return _domainSeparatorV4();
    }

    function _isFinal(StoredBatch memory batch, bytes32 leaf) private view returns (bool) {
        uint256 postedAt = batch.postedAt;
        if (postedAt == 0 || block.timestamp < postedAt + challengeWindow) return false;
        return !batch.disputed || !court.isOpen(leaf);
    }

    /// @dev Returns a posted outcome; reverts when its batch has no outcomes or the proof does not hold.
    function _posted(OutcomeProof calldata outcome)
        private
        view
        returns (StoredBatch memory batch, Outcome memory judged, bytes32 leaf)
    {
        batch = _batches[outcome.batchId];
        leaf = OutcomeRecordLib.leafOf(outcome.batchId, outcome.position, outcome.record);
        require(
            batch.postedAt != 0 && outcome.record.length == OutcomeRecordLib.SIZE
                && MerkleProof.verifyCalldata(outcome.proof, batch.root, leaf),
            LedgerInvalidProof(outcome.batchId, outcome.position)
        );
        judged = OutcomeRecordLib.decode(outcome.record);
    }

    /// @dev Returns the struct hash of a submission and who signed it; zero when the signature is malformed.
    function _signerOf(Submission calldata submission, bytes calldata signature)
        private
        view
        returns (bytes32 structHash, address signer)
    {
        structHash = keccak256(abi.encode(SUBMISSION_TYPEHASH, submission));
        signer = _recover(_hashTypedDataV4(structHash), signature);
    }
}
