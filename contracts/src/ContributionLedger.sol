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
import {BatchTreeLib} from "./libraries/BatchTreeLib.sol";
import {EscrowLib} from "./libraries/EscrowLib.sol";
import {OutcomeRecordLib} from "./libraries/OutcomeRecordLib.sol";
import {SourcesLib} from "./libraries/SourcesLib.sol";

/// @title The ledger of contributions: what was submitted, and what validators decided
/// @dev One batch goes through: commitBatch (or submitDirect) → postOutcomes → for fraud executeFraud at once and
///      finaliseFraud after the challenge window → RewardEscrow.claim for what was accepted. Without outcomes in time
///      its workers can call judges of the network (splitOff, DisputeCourt.summon → judge); what they leave is void.
contract ContributionLedger is IContributionLedger, EIP712 {
    using SafeCast for uint256;
    using BatchLib for Batch;
    using OutcomeRecordLib for Outcome;

    /// @dev What a worker has in flight in a run by its own submissions. One slot.
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
    bytes32 private constant TICKET_TYPEHASH = keccak256(
        "Ticket(uint64 runId,address worker,uint32 step,uint32 index,uint32 policyVersion,bytes32 policyRoot,bytes32 beacon,uint64 deadline)"
    );

    /// @dev Bytes of a signature: r, s, v.
    uint256 private constant SIGNATURE_SIZE = 65;

    /// @dev One million: the whole, in parts per million.
    uint256 private constant PPM = 1_000_000;

    /// @notice Submissions in the largest batch.
    uint256 public constant MAX_COUNT = 4096;

    /// @notice Seconds after a ticket's deadline in which its work can be committed.
    uint256 public constant TICKET_GRACE = 60;

    /// @notice The runs, with their orchestrators and validators.
    IRunRegistry public immutable runs;

    /// @notice The workers, and the nodes that sign for them.
    IWorkerRegistry public immutable workers;

    /// @notice The vault that holds what frauds cost.
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
    mapping(uint64 runId => mapping(address worker => DirectWork)) private _directWork;
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
        (address orchestrator, bool open, uint32 terms, uint88 pricePerUnit) = runs.admissionOf(runId);
        require(msg.sender == orchestrator, LedgerUnauthorized(msg.sender));
        require(open, LedgerPaused(runId));
        require(root != 0 && count != 0 && count <= MAX_COUNT && units != 0, LedgerInvalidBatch(root, count));
        return _commit(runId, root, count, units, pricePerUnit, terms);
    }

    function _commit(uint64 runId, bytes32 root, uint32 count, uint64 units, uint88 pricePerUnit, uint32 terms)
        private
        returns (uint64)
    {
        Batch memory batch;
        batch.runId = runId;
        batch.root = root;
        batch.count = count;
        batch.units = units;
        batch.pricePerUnit = pricePerUnit;
        batch.terms = terms;
        batch.committedAt = block.timestamp.toUint40();
        _store(batch);
        escrow.reserve(runId, uint256(units) * pricePerUnit);
        return batch.batchId;
    }

    /// @dev Gives a batch the next number.
    function _store(Batch memory batch) private {
        batch.batchId = ++batchCount;
        _commitments[batch.batchId] = batch.hashOf();
        emit BatchCommitted(
            batch.batchId,
            batch.runId,
            batch.root,
            batch.count,
            batch.units,
            batch.pricePerUnit,
            batch.terms,
            batch.committedAt
        );
    }

    // ------------------------------------------------- submit direct, split off

    /// @inheritdoc IContributionLedger
    function submitDirect(LeasedWork calldata work, string[] calldata sources) external returns (uint64 batchId) {
        batchId = _commitDirect(work);
        SourcesLib.check(sources);
        emit DirectlySubmitted(batchId, work.submission.worker, work, sources);
        court.takeBond(batchId, msg.sender);
    }

    function _commitDirect(LeasedWork calldata work) private returns (uint64) {
        Submission calldata submission = work.submission;
        (address orchestrator, bool open, uint32 terms, uint88 pricePerUnit) = runs.admissionOf(submission.runId);
        require(open, LedgerPaused(submission.runId));
        (bytes32 leaf, address signer) = _checkOwnWork(work);
        _checkTicket(work, orchestrator);
        require(
            workers.workerOfNode(signer) == submission.worker && workers.isActive(submission.runId, submission.worker),
            LedgerInvalidSubmission(submission.worker, signer)
        );
        _useSlot(submission);
        _coverDirectWork(submission.runId, submission.worker, submission.units);
        // The root of a batch of one is its leaf.
        return _commit(submission.runId, leaf, 1, submission.units, pricePerUnit, terms);
    }

    /// @inheritdoc IContributionLedger
    function splitOff(
        Batch calldata batch,
        LeasedWork calldata work,
        uint32 position,
        bytes32[] calldata proof,
        string[] calldata sources
    ) external returns (uint64 batchId) {
        _check(batch);
        _requireAppeal(batch);
        // A worker that reads its judges' votes must not take its work away from them.
        require(!court.isSummoned(batch.batchId), LedgerInCourt(batch.batchId));
        Submission calldata submission = work.submission;
        (bytes32 leaf, address signer) = _checkOwnWork(work);
        require(
            submission.runId == batch.runId && _answers(batch, submission, signer, batch.committedAt)
                && submission.units <= batch.units && _holds(batch, position, leaf, proof),
            LedgerInvalidSubmission(submission.worker, signer)
        );
        _useSlot(submission);

        Batch memory rest = batch;
        rest.units = batch.units - submission.units;
        _commitments[batch.batchId] = rest.hashOf();
        Batch memory own = batch;
        (own.root, own.count, own.units) = (leaf, 1, submission.units);
        _store(own);
        batchId = own.batchId;
        SourcesLib.check(sources);
        emit BatchSplit(batchId, batch.batchId, submission.worker, work, sources);
        court.takeBond(batchId, msg.sender);
    }

    /// @dev Returns a submission's leaf and who signed it. Reverts unless a record can hold it, and the caller is its worker
    ///      or its node.
    function _checkOwnWork(LeasedWork calldata work) private view returns (bytes32 leaf, address signer) {
        Submission calldata submission = work.submission;
        bytes32 structHash;
        (structHash, signer) = _signerOf(submission, work.nodeSignature);
        require(msg.sender == submission.worker || msg.sender == signer, LedgerUnauthorized(msg.sender));
        require(signer != address(0) && _fitsRecord(submission), LedgerInvalidSubmission(submission.worker, signer));
        leaf = _leafOf(structHash);
    }

    /// @dev Reverts unless a ticket is of the submission, of the run's orchestrator, and not too old.
    function _checkTicket(LeasedWork calldata work, address orchestrator) private view {
        Submission calldata s = work.submission;
        Ticket calldata t = work.ticket;
        address issuer = _recover(_hashTypedDataV4(keccak256(abi.encode(TICKET_TYPEHASH, t))), work.ticketSignature);
        require(
            issuer == orchestrator && t.runId == s.runId && t.worker == s.worker && t.step == s.step
                && t.index == s.index && t.policyVersion == s.policyVersion
                && block.timestamp <= t.deadline + TICKET_GRACE,
            LedgerInvalidTicket(issuer, t.deadline)
        );
    }

    function _useSlot(Submission calldata s) private {
        bytes32 slot = keccak256(abi.encode(s.runId, s.worker, s.step, s.index));
        require(!_submittedDirectly[slot], LedgerSlotUsed(s.runId, s.worker, s.step, s.index));
        _submittedDirectly[slot] = true;
    }

    /// @dev Adds units to a worker's direct work in a run, all of which its stake there must cover.
    function _coverDirectWork(uint64 runId, address worker, uint64 units) private {
        DirectWork storage work = _directWork[runId][worker];
        uint256 inFlight = (block.timestamp < work.until ? work.units : 0) + uint256(units);
        uint256 cap = unitCapOf(runId, worker);
        require(inFlight <= cap, LedgerUnitCap(worker, inFlight, cap));
        work.units = inFlight.toUint64();
        work.until = (block.timestamp + judgementTime()).toUint64();
    }

    // ------------------------------------------------------------ post outcomes

    /// @inheritdoc IContributionLedger
    function postOutcomes(Batch calldata batch, bytes calldata records, bytes calldata signatures) external {
        _check(batch);
        uint64 batchId = batch.batchId;
        require(batch.status == BatchStatus.Committed, LedgerOutcomesPosted(batchId));
        uint256 dueAt = _dueAt(batch);
        require(block.timestamp < dueAt, LedgerWrongTime(batchId, batch.committedAt, dueAt));
        bytes32 structHash = _outcomesHash(Outcomes(batchId, batch.root, keccak256(records)));

        Batch memory posted = batch;
        posted.signers = _checkQuorum(batch, _hashTypedDataV4(structHash), signatures);
        posted.postedAt = block.timestamp.toUint40();
        if (records.length == 0) {
            posted.status = BatchStatus.Withheld;
            _commitments[batchId] = posted.hashOf();
            emit BatchWithheld(batchId, posted.postedAt, posted.signers, signatures);
            return;
        }
        uint256 units;
        (posted.outcomesRoot, units) = _checkRecords(batch, records);
        posted.status = BatchStatus.Judged;
        _commitments[batchId] = posted.hashOf();
        emit OutcomesPosted(
            batchId, posted.runId, posted.outcomesRoot, posted.postedAt, posted.signers, records, signatures
        );
        _freeRest(batch, units);
    }

    /// @dev Returns the root over the outcomes, which are one per submission, and the sum of their units, which is no more
    ///      than the batch was committed for.
    function _checkRecords(Batch calldata batch, bytes calldata records)
        private
        pure
        returns (bytes32 root, uint256 units)
    {
        uint256 expected = batch.count * OutcomeRecordLib.SIZE;
        require(records.length == expected, LedgerRecordCount(records.length, expected));
        (root, units) = OutcomeRecordLib.digest(batch.batchId, records);
        require(units <= batch.units, LedgerUnitsExceeded(batch.batchId, units, batch.units));
    }

    /// @dev Frees what was reserved for units that the records of a batch do not hold: nobody can claim them any more.
    function _freeRest(Batch calldata batch, uint256 units) private {
        if (units != batch.units) _free(batch, batch.units - units);
    }

    function _free(Batch calldata batch, uint256 units) private {
        escrow.free(batch.runId, units * batch.pricePerUnit);
    }

    /// @dev Returns the seats of the signers, which are validators of the run, each once, at least a quorum.
    function _checkQuorum(Batch calldata batch, bytes32 digest, bytes calldata signatures)
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
        (quorum, signers, stranger) = runs.quorumAmong(batch.runId, batch.terms, accounts);
        require(stranger == address(0), LedgerInvalidSigner(stranger));
        require(accounts.length >= quorum, LedgerQuorumNotMet(accounts.length, quorum));
    }

    /// @inheritdoc IContributionLedger
    function showOutcomes(Batch calldata batch, bytes32 recordsHash, bytes calldata records, bytes calldata signature)
        external
    {
        _check(batch);
        address signer =
            _recover(_hashTypedDataV4(_outcomesHash(Outcomes(batch.batchId, batch.root, recordsHash))), signature);
        require(runs.isValidator(batch.runId, signer), LedgerInvalidSigner(signer));
        require(
            records.length == 0 || keccak256(records) == recordsHash,
            LedgerRecordCount(records.length, batch.count * OutcomeRecordLib.SIZE)
        );
        emit OutcomesShown(batch.batchId, signer, batch.root, recordsHash, records, signature);
    }

    // ------------------------------------------------------- judges of the network

    /// @inheritdoc IContributionLedger
    function voidBatch(Batch calldata batch) external {
        _check(batch);
        uint64 batchId = batch.batchId;
        require(batch.status != BatchStatus.Judged, LedgerOutcomesPosted(batchId));
        uint256 from = _dueAt(batch) + appealTime();
        require(block.timestamp >= from, LedgerWrongTime(batchId, from, type(uint256).max));
        require(!court.isSummoned(batchId), LedgerInCourt(batchId));
        _commitments[batchId] = 0;
        emit BatchVoided(batchId, batch.runId);
        _free(batch, batch.units);
    }

    /// @inheritdoc IContributionLedger
    function requireUnjudged(Batch calldata batch, Submission calldata submission) external view {
        _check(batch);
        _requireAppeal(batch);
        _requireOnly(batch, submission);
    }

    /// @dev Reverts unless a batch is of this submission alone, and holds what it claims.
    function _requireOnly(Batch calldata batch, Submission calldata submission) private pure {
        require(
            batch.count == 1 && _leafOf(_structHashOf(submission)) == batch.root && submission.units <= batch.units
                && _fitsRecord(submission),
            LedgerInvalidSubmission(submission.worker, address(0))
        );
    }

    function _fitsRecord(Submission calldata submission) private pure returns (bool) {
        return submission.units != 0 && submission.units <= type(uint32).max && submission.rollouts <= type(uint16).max;
    }

    /// @inheritdoc IContributionLedger
    function judge(Batch calldata batch, Submission calldata submission, uint8 verdict, uint8 reason) external {
        require(msg.sender == address(court), LedgerUnauthorized(msg.sender));
        _check(batch);
        _requireOnly(batch, submission);
        (uint32 workerId,) = workers.workerOf(submission.worker);
        bytes memory record = abi.encodePacked(
            workerId,
            submission.step,
            submission.index,
            submission.policyVersion,
            submission.fileHash,
            uint16(submission.rollouts),
            uint32(submission.units),
            verdict,
            reason
        );
        Batch memory posted = batch;
        posted.outcomesRoot = keccak256(abi.encodePacked(batch.batchId, uint32(0), record));
        posted.postedAt = block.timestamp.toUint40();
        posted.signers = 0;
        posted.status = BatchStatus.Judged;
        _commitments[batch.batchId] = posted.hashOf();
        emit OutcomesPosted(batch.batchId, batch.runId, posted.outcomesRoot, posted.postedAt, 0, record, "");
        _freeRest(batch, submission.units);
    }

    function _dueAt(Batch calldata batch) private view returns (uint256) {
        return batch.status == BatchStatus.Withheld ? batch.postedAt : batch.committedAt + outcomeDeadline;
    }

    /// @dev Reverts unless a batch that nobody judged may be brought before judges of the network.
    function _requireAppeal(Batch calldata batch) private view {
        require(batch.status != BatchStatus.Judged, LedgerOutcomesPosted(batch.batchId));
        uint256 dueAt = _dueAt(batch);
        uint256 until = dueAt + appealTime();
        require(block.timestamp >= dueAt && block.timestamp < until, LedgerWrongTime(batch.batchId, dueAt, until));
    }

    // -------------------------------------------------------------------- fraud

    /// @inheritdoc IContributionLedger
    function executeFraud(OutcomeProof calldata outcome, CommittedWork calldata work)
        external
        returns (uint256 amount)
    {
        Standing memory standing = _standing(outcome);
        Batch calldata batch = outcome.batch;
        Submission calldata submission = work.submission;
        _requireFraud(outcome, standing.verdict);
        _requireJudged(outcome, standing, work);
        IStakeVault.Verdict memory verdict =
            _verdictOf(outcome, standing, submission.worker, OutcomeRecordLib.tagOf(submission.step, submission.index));
        bytes32 escrowId = EscrowLib.idOf(verdict);
        amount = vault.hold(verdict, _convict(batch, verdict, escrowId));
        emit FraudExecuted(batch.batchId, submission.worker, escrowId, standing.leaf, outcome.position, amount);
    }

    /// @dev Reverts unless a standing outcome is about work that its batch holds: whoever a record does not name cannot know
    ///      that it has to be contested, and a jury to which nothing was proven may have judged other work.
    function _requireJudged(OutcomeProof calldata outcome, Standing memory standing, CommittedWork calldata work)
        private
        view
    {
        (address signer, bool isHeld, bool isNamed) = _evidence(outcome, standing.outcome, work);
        bool isAbout = _isRuled(standing) ? court.isProven(standing.leaf) : isNamed;
        Batch calldata batch = outcome.batch;
        require(
            isHeld && isAbout && _answers(batch, work.submission, signer, batch.committedAt),
            LedgerInvalidSubmission(work.submission.worker, signer)
        );
    }

    /// @dev Returns whether a jury's ruling stands in place of the recorded one.
    function _isRuled(Standing memory standing) private pure returns (bool) {
        return standing.verdict != standing.outcome.verdict || standing.reason != standing.outcome.reason;
    }

    function _requireFraud(OutcomeProof calldata outcome, uint8 verdict) private pure {
        require(verdict == OutcomeRecordLib.FRAUD, LedgerNotFraud(outcome.batch.batchId, outcome.position, verdict));
    }

    /// @dev Returns what the vault is told of a fraud that stands.
    function _verdictOf(OutcomeProof calldata outcome, Standing memory standing, address worker, uint64 tag)
        private
        pure
        returns (IStakeVault.Verdict memory)
    {
        bool exact = OutcomeRecordLib.isExact(standing.verdict, standing.reason);
        return IStakeVault.Verdict({
            runId: outcome.batch.runId,
            owner: worker,
            offence: exact ? IStakeVault.Offence.ExactFraud : IStakeVault.Offence.Fraud,
            tag: tag,
            batchId: outcome.batch.batchId,
            position: outcome.position
        });
    }

    /// @dev Convicts a worker unless slashing is paused. Returns the share of stake that its fraud costs:
    ///      `exactFraudPpm`, or `fraudPpm` doubled for each prior conviction, never more than all.
    function _convict(Batch calldata batch, IStakeVault.Verdict memory verdict, bytes32 escrowId)
        private
        returns (uint256)
    {
        uint256 pausedUntil = runs.slashPausedUntil(batch.runId);
        require(block.timestamp >= pausedUntil, LedgerSlashingPaused(batch.runId, pausedUntil));
        bool exact = verdict.offence == IStakeVault.Offence.ExactFraud;
        uint256 priors = workers.convict(batch.runId, verdict.owner, escrowId, exact);
        IRunRegistry.Terms memory terms = runs.termsAt(batch.runId, batch.terms);
        // Twenty doublings make a million of one.
        return exact ? terms.exactFraudPpm : Math.min(uint256(terms.fraudPpm) << Math.min(priors, 20), PPM);
    }

    /// @inheritdoc IContributionLedger
    function requireEvidence(OutcomeProof calldata outcome, CommittedWork calldata work)
        external
        view
        returns (bool isHeld)
    {
        address signer;
        bool isNamed;
        (signer, isHeld, isNamed) = _evidence(outcome, OutcomeRecordLib.decode(outcome.record), work);
        // What is proven can be contested whenever the key was the worker's. Else a quorum could accept the work of somebody
        // who took another key, or left, just before the commitment, and nobody could contest it.
        uint256 time = isHeld ? 0 : outcome.batch.committedAt;
        require(
            (isHeld || isNamed) && _answers(outcome.batch, work.submission, signer, time),
            LedgerInvalidSubmission(work.submission.worker, signer)
        );
    }

    /// @dev Returns who signed a submission, whether the batch holds it at an outcome's position, and whether the record names
    ///      it.
    function _evidence(OutcomeProof calldata outcome, Outcome memory judged, CommittedWork calldata work)
        private
        view
        returns (address signer, bool isHeld, bool isNamed)
    {
        Submission calldata submission = work.submission;
        Batch calldata batch = outcome.batch;
        bytes32 structHash;
        (structHash, signer) = _signerOf(submission, work.nodeSignature);
        require(submission.runId == batch.runId, LedgerInvalidSubmission(submission.worker, signer));
        isHeld = _holds(batch, outcome.position, _leafOf(structHash), work.proof);
        isNamed = submission.step == judged.step && submission.index == judged.index
            && submission.policyVersion == judged.policyVersion && submission.fileHash == judged.fileHash
            && workers.workerById(judged.workerId) == submission.worker;
    }

    function _holds(Batch calldata batch, uint32 position, bytes32 leaf, bytes32[] calldata proof)
        private
        pure
        returns (bool)
    {
        return BatchTreeLib.holds(batch.root, batch.count, position, leaf, proof);
    }

    /// @dev Returns whether a submission that `signer` signed, and that was committed at a time, counts against its worker.
    function _answers(Batch calldata batch, Submission calldata submission, address signer, uint256 time)
        private
        view
        returns (bool)
    {
        return workers.answersFor(batch.runId, submission.worker, signer, time);
    }

    /// @inheritdoc IContributionLedger
    function finaliseFraud(OutcomeProof calldata outcome) external {
        Standing memory standing = _standing(outcome);
        Batch calldata batch = outcome.batch;
        _requireFraud(outcome, standing.verdict);
        require(standing.isFinal, LedgerNotFinal(batch.batchId, outcome.position));
        (address worker, uint64 tag, address reporter) = _isRuled(standing)
            ? court.subjectOf(standing.leaf)
            : (workers.workerById(standing.outcome.workerId), standing.outcome.tagOf(), address(0));
        // Whom a jury confirmed against the recorded verdict; nobody earns by what a run's own validators found.
        if (standing.outcome.verdict == OutcomeRecordLib.FRAUD) reporter = address(0);
        IStakeVault.Verdict memory verdict = _verdictOf(outcome, standing, worker, tag);
        vault.release(verdict, reporter);
        emit FraudFinalised(batch.batchId, EscrowLib.idOf(verdict), standing.leaf);
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
    function isDisputed(Batch calldata batch) external view returns (bool) {
        return _check(batch);
    }

    /// @inheritdoc IContributionLedger
    function judgementTime() public view returns (uint256) {
        return outcomeDeadline + appealTime() + challengeWindow + 2 * court.juryTime() + _slashPause;
    }

    /// @inheritdoc IContributionLedger
    function appealTime() public view returns (uint256) {
        return challengeWindow;
    }

    /// @inheritdoc IContributionLedger
    function unitCapOf(uint64 runId, address worker) public view returns (uint256) {
        return vault.activeStake(runId, worker) / stakePerUnit;
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

    // ------------------------------------------------------------------ standing

    /// @dev Returns whether an outcome of the batch was challenged; reverts when the header is not the stored one.
    function _check(Batch calldata batch) private view returns (bool disputed) {
        return batch.check(_commitments[batch.batchId]);
    }

    /// @dev Returns an outcome as it stands; reverts when it does not.
    function _standing(OutcomeProof calldata outcome) private view returns (Standing memory standing) {
        Batch calldata batch = outcome.batch;
        bool disputed = _check(batch);
        require(batch.status == BatchStatus.Judged, LedgerNotJudged(batch.batchId));
        require(outcome.record.length == OutcomeRecordLib.SIZE, LedgerInvalidProof(batch.batchId, outcome.position));
        Outcome memory judged = OutcomeRecordLib.decode(outcome.record);
        bytes32 leaf = OutcomeRecordLib.leafOf(batch.batchId, outcome.position, outcome.record);
        require(
            MerkleProof.verifyCalldata(outcome.proof, batch.outcomesRoot, leaf),
            LedgerInvalidProof(batch.batchId, outcome.position)
        );
        standing.outcome = judged;
        standing.leaf = leaf;
        (standing.verdict, standing.reason) =
            disputed ? court.rulingOf(leaf, judged.verdict, judged.reason) : (judged.verdict, judged.reason);
        uint256 closesAt = batch.postedAt + challengeWindow;
        if (standing.verdict == OutcomeRecordLib.FRAUD) {
            closesAt = runs.fraudClosesAt(batch.runId, closesAt, challengeWindow);
        }
        standing.closesAt = closesAt;
        standing.isFinal = block.timestamp >= closesAt && !(disputed && court.isOpen(leaf));
    }

    // --------------------------------------------------------------- submissions

    function _leafOf(bytes32 structHash) private pure returns (bytes32) {
        return keccak256(abi.encode(structHash));
    }

    function _structHashOf(Submission calldata submission) private pure returns (bytes32) {
        return keccak256(abi.encode(OutcomeRecordLib.SUBMISSION_TYPEHASH, submission));
    }

    /// @dev Returns the struct hash of a submission and who signed it; zero when the signature is malformed.
    function _signerOf(Submission calldata submission, bytes calldata signature)
        private
        view
        returns (bytes32 structHash, address signer)
    {
        structHash = _structHashOf(submission);
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
