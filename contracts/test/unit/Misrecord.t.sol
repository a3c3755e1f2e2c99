// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IContributionLedger, IContributionLedgerErrors} from "../../src/interfaces/IContributionLedger.sol";
import {IDisputeCourtErrors, IDisputeCourtEvents} from "../../src/interfaces/IDisputeCourt.sol";
import {IFaultCourtErrors, IFaultCourtEvents} from "../../src/interfaces/IFaultCourt.sol";
import {IRewardEscrow, IRewardEscrowErrors} from "../../src/interfaces/IRewardEscrow.sol";
import {IStakeVault, IStakeVaultErrors} from "../../src/interfaces/IStakeVault.sol";
import {IWorkerRegistry} from "../../src/interfaces/IWorkerRegistry.sol";
import {CourtTest} from "../CourtTest.sol";

/// @title Records that contradict what their batch holds: they shelter nobody, and cost their signers all
/// @dev The batch holds Alice's work at 0 and Bob's at 1; what validators 0 and 1 sign about it is each test's.
contract MisrecordTest is CourtTest {
    uint256 private constant STAKE = REQUIRED_VALIDATOR_STAKE;

    /// @dev The fields of a record that a batch fixes, and the one that it bounds.
    uint256 private constant FIELDS = 7;
    uint256 private constant WORKER = 0;

    /// @dev Judges the batch with another record of Bob's work.
    function _judgeBob(IContributionLedger.Outcome memory outcome) private {
        bytes[] memory held = _two(_record(alice, 1, 0, ACCEPTED), _record(bob, 1, 0, ACCEPTED));
        _batchId = _commitRecords(held);
        _records = _two(held[0], _pack(outcome));
        _post(_batchId, _records, QUORUM);
        _acceptedLeaf = _leaf(_batchId, 1, _records[1]);
    }

    /// @dev Bob's record with one field of another value.
    function _misrecord(uint256 field, uint32 change, uint8 verdict)
        private
        view
        returns (IContributionLedger.Outcome memory outcome)
    {
        outcome = _outcome(bob, 1, 0, verdict);
        if (field == WORKER) outcome.workerId = _workerId(alice);
        if (field == 1) outcome.step ^= change;
        if (field == 2) outcome.index ^= change;
        if (field == 3) outcome.policyVersion ^= change;
        if (field == 4) outcome.fileHash ^= bytes32(uint256(change));
        if (field == 5) outcome.rollouts ^= uint16(bound(change, 1, type(uint16).max));
        if (field == 6) outcome.units += uint32(bound(change, 1, 1000));
    }

    /// @dev The batch with a wrong record of Bob's; where it holds more units for him, those of Alice's are less.
    function _judgeWrongly(uint256 field, uint32 change, uint8 verdict) private {
        IContributionLedger.Outcome memory outcome = _misrecord(field, change, verdict);
        if (outcome.units > 1000) {
            IContributionLedger.Outcome memory less = _outcome(alice, 1, 0, ACCEPTED);
            less.units = 2000 - outcome.units;
            _batchId = _commitRecords(_two(_record(alice, 1, 0, ACCEPTED), _record(bob, 1, 0, ACCEPTED)));
            _records = _two(_pack(less), _pack(outcome));
            _post(_batchId, _records, QUORUM);
            _acceptedLeaf = _leaf(_batchId, 1, _records[1]);
        } else {
            _judgeBob(outcome);
        }
    }

    function _heldByBatch(uint256 position) private view returns (IContributionLedger.CommittedWork memory) {
        (IContributionLedger.Submission memory submission, bytes memory signature) = _evidence(position);
        return _held(_outcomeAt(position), submission, signature);
    }

    function _prove(uint256 position, address validator) private {
        faults.proveMisrecord(_outcomeAt(position), _heldByBatch(position), validator);
    }

    function _misrecordOf(address validator) private view returns (bytes32) {
        return vault.escrowIdOf(runId, validator, IStakeVault.Offence.Misrecord, _batchId);
    }

    function _expectNoMisrecord(uint32 position, address validator) private {
        vm.expectRevert(
            abi.encodeWithSelector(IFaultCourtErrors.FaultNoMisrecord.selector, _batchId, position, validator)
        );
    }

    function _tryProving(uint256 position, address validator) private {
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(position);
        IContributionLedger.CommittedWork memory work = _heldByBatch(position);
        _expectNoMisrecord(uint32(position), validator);
        faults.proveMisrecord(outcome, work, validator);
    }

    // ------------------------------------------------------------------ the fault

    function testFuzz_proveMisrecord_takesAllAndTheSeat(
        uint256 field,
        uint32 change,
        uint8 verdict,
        uint256 which,
        uint256 extra
    ) public {
        vm.assume(change != 0);
        _judgeWrongly(bound(field, 0, FIELDS - 1), change, uint8(bound(verdict, ACCEPTED, FRAUD)));
        address validator = validators[bound(which, 0, QUORUM - 1)];
        extra = bound(extra, 0, WALLET - STAKE);
        if (extra != 0) _deposit(runId, validator, extra);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(1);
        IContributionLedger.CommittedWork memory work = _heldByBatch(1);
        uint256 before = token.balanceOf(stranger);

        vm.expectEmit(address(faults));
        emit IFaultCourtEvents.MisrecordProven(runId, validator, _misrecordOf(validator), _batchId, 1, STAKE + extra);
        vm.prank(stranger);
        faults.proveMisrecord(outcome, work, validator);
        assertEq(vault.activeStake(runId, validator), 0, "nothing left");
        assertFalse(runs.isValidator(runId, validator), "unseated");
        assertFalse(runs.isInvited(runId, validator), "and not invited any more");
        assertEq(token.balanceOf(stranger), before, "nobody earns");
        IStakeVault.Escrow memory taken = vault.escrowOf(_misrecordOf(validator));
        assertEq(uint8(taken.status), uint8(IStakeVault.EscrowStatus.Released), "final at once");
    }

    /// @dev The mutated twin: the same batch with the record that it deserves, whatever the verdict.
    function testFuzz_proveMisrecord_reverts_whenTheRecordAgrees(uint8 verdict, uint256 position, uint32 units) public {
        IContributionLedger.Outcome memory outcome = _outcome(bob, 1, 0, uint8(bound(verdict, ACCEPTED, FRAUD)));
        outcome.units = uint32(bound(units, 0, 1000));
        _judgeBob(outcome);
        _tryProving(bound(position, 0, 1), validators[0]);
    }

    /// @dev A worker that registered after the judgement cannot have those fined who did not know it.
    function test_proveMisrecord_reverts_whenTheRecordNamesNobody() public {
        IContributionLedger.Outcome memory outcome = _outcome(bob, 1, 0, REJECTED);
        outcome.workerId = 0;
        _judgeBob(outcome);
        _tryProving(1, validators[0]);
    }

    /// @dev A record has room for 65,535 rollouts; who wrote so many of a larger claim wrote what it could.
    function testFuzz_proveMisrecord_reverts_whenARecordHoldsNoMoreRollouts(uint32 rollouts, bool less) public {
        IContributionLedger.Submission memory submission = _submission(alice, 1, 0);
        submission.rollouts = uint32(bound(rollouts, type(uint16).max, type(uint32).max));
        _batchId = _commitRoot(_submissionLeaf(submission), 1, 1000);
        IContributionLedger.Outcome memory outcome = _outcome(alice, 1, 0, REJECTED);
        outcome.rollouts = less ? type(uint16).max - 1 : type(uint16).max;
        _records = _one(_pack(outcome));
        _post(_batchId, _records, QUORUM);
        IContributionLedger.CommittedWork memory work =
            IContributionLedger.CommittedWork(submission, _signSubmission(submission, aliceNodeKey), new bytes32[](0));
        IContributionLedger.OutcomeProof memory proof = _outcomeAt(0);
        if (!less) _expectNoMisrecord(0, validators[0]);
        faults.proveMisrecord(proof, work, validators[0]);
    }

    function testFuzz_proveMisrecord_reverts_forWhoDidNotSign(uint256 which) public {
        _judgeWrongly(WORKER, 0, ACCEPTED);
        _tryProving(1, validators[bound(which, QUORUM, 4)]);
        _tryProving(1, stranger);
    }

    /// @dev Another submission of the slot's own worker, which the batch does not hold, proves nothing.
    function testFuzz_proveMisrecord_reverts_forWhatTheBatchDoesNotHold(uint32 rollouts) public {
        vm.assume(rollouts != 16);
        _judgeBob(_outcome(bob, 1, 0, ACCEPTED));
        IContributionLedger.CommittedWork memory work = _heldByBatch(1);
        work.submission.rollouts = rollouts;
        work.nodeSignature = _signSubmission(work.submission, bobNodeKey);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(1);
        _expectNoMisrecord(1, validators[0]);
        faults.proveMisrecord(outcome, work, validators[0]);
    }

    /// @dev What the batch holds at one position is no measure for another.
    function test_proveMisrecord_reverts_forTheWorkOfAnotherPosition() public {
        _judgeBob(_outcome(bob, 1, 0, ACCEPTED));
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(0);
        IContributionLedger.CommittedWork memory work = _heldByBatch(1);
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidSubmission.selector, bob, bobNode)
        );
        faults.proveMisrecord(outcome, work, validators[0]);
    }

    function testFuzz_proveMisrecord_reverts_whenTheHeaderIsAnother(bytes32 root) public {
        _judgeWrongly(WORKER, 0, ACCEPTED);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(1);
        IContributionLedger.CommittedWork memory work = _heldByBatch(1);
        vm.assume(root != outcome.batch.root);
        outcome.batch.root = root;
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerBatchMismatch.selector, _batchId));
        faults.proveMisrecord(outcome, work, validators[0]);
    }

    function test_proveMisrecord_punishesABatchOnce() public {
        _judgeWrongly(WORKER, 0, ACCEPTED);
        _prove(1, validators[0]);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(1);
        IContributionLedger.CommittedWork memory work = _heldByBatch(1);
        vm.expectRevert(
            abi.encodeWithSelector(IStakeVaultErrors.VaultOffenceSettled.selector, _misrecordOf(validators[0]))
        );
        faults.proveMisrecord(outcome, work, validators[0]);
        _prove(1, validators[1]);
        assertEq(vault.activeStake(runId, validators[1]), 0, "each signer answers");
    }

    function test_proveMisrecord_touchesNoOtherRun() public {
        uint64 other = _createRun();
        uint64 ours = other - 1;
        runId = ours;
        _judgeWrongly(WORKER, 0, ACCEPTED);
        _prove(1, validators[0]);
        assertEq(vault.activeStake(other, validators[0]), STAKE, "stake");
        assertTrue(runs.isValidator(other, validators[0]), "seat");
    }

    // ---------------------------------------------------------- what juries can do

    /// @dev A record that names another worker, slot, policy, file or count keeps no jury from the work, and none from its
    ///      slash, which is of the slot that the batch holds.
    function testFuzz_claim_isAboutWhatTheBatchHolds(uint256 field, uint32 change, bool exact) public {
        vm.assume(change != 0);
        _judgeWrongly(bound(field, 0, FIELDS - 1), change, ACCEPTED);
        uint16 ruling = exact ? EXACT : STATISTICAL;
        _decide(1, ruling, ruling);
        uint256 amount = _execute(bob, 1, bobNodeKey);
        assertEq(amount, REQUIRED_STAKE * (exact ? EXACT_FRAUD_PPM : FRAUD_PPM) / PPM, "Bob's stake");
        assertEq(vault.activeStake(runId, alice), REQUIRED_STAKE, "and nobody else's");
        IStakeVault.Offence offence = exact ? IStakeVault.Offence.ExactFraud : IStakeVault.Offence.Fraud;
        assertEq(vault.escrowOf(_escrowId(bob, offence, 1, 0)).amount, amount, "of the slot that he worked for");
        _passChallengeWindow();
        ledger.finaliseFraud(_outcomeAt(1));
        assertEq(
            uint8(vault.escrowOf(_escrowId(bob, offence, 1, 0)).status),
            uint8(IStakeVault.EscrowStatus.Released),
            "final"
        );
    }

    /// @dev What a jury put aside is not paid to whom the record names.
    function test_claim_takesThePayOfAnInventedRecord() public {
        _judgeWrongly(WORKER, 0, ACCEPTED);
        _decide(1, REJECT, REJECT);
        _passChallengeWindow();
        IRewardEscrow.Claim[] memory claims = new IRewardEscrow.Claim[](1);
        claims[0] = _claimOf(_batchId, _records, _range(1, 2));
        vm.expectRevert(abi.encodeWithSelector(IRewardEscrowErrors.EscrowNotAccepted.selector, _batchId, 1, REJECTED));
        escrow.claim(claims);
    }

    /// @dev A quorum's word alone punishes nobody whom its record does not name.
    function testFuzz_executeFraud_reverts_whenTheRecordNamesOtherWork(uint256 field, uint32 change) public {
        vm.assume(change != 0);
        _judgeWrongly(bound(field, 0, 4), change, FRAUD);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(1);
        IContributionLedger.CommittedWork memory work = _heldByBatch(1);
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidSubmission.selector, bob, bobNode)
        );
        ledger.executeFraud(outcome, work);
    }

    /// @dev A count does not name work: a quorum that counts wrongly loses its stake, but its fraud verdict stands.
    function test_executeFraud_works_whenOnlyACountIsWrong() public {
        _judgeWrongly(5, 1, FRAUD);
        assertEq(_execute(bob, 1, bobNodeKey), REQUIRED_STAKE * FRAUD_PPM / PPM, "slashed");
        _prove(1, validators[0]);
        _assertStatus(bob, IWorkerRegistry.Status.Jailed, "both are punished");
    }

    // ------------------------------------------------- work that nobody answers for

    /// @dev Bob takes another key, or leaves, before his work is committed; a quorum signs this record all the same.
    function _judgeUnanswered(bool leaves, IContributionLedger.Outcome memory outcome) private {
        (address node, uint256 nodeKey) = makeAddrAndKey("bob's next node");
        vm.startPrank(bob);
        leaves ? workers.exit(runId) : workers.rotateNode(_nodeConsent(bob, node, nodeKey, block.timestamp));
        vm.stopPrank();
        vm.warp(block.timestamp + 1);
        _judgeBob(outcome);
    }

    function _expectInvalidSubmission() private {
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidSubmission.selector, bob, bobNode)
        );
    }

    /// @dev What a quorum in league with a worker accepted is not paid. Nobody answers for the work with stake, and the signers
    ///      may have been shown another signature than the jury.
    function testFuzz_claim_works_overHeldWorkThatNobodyAnswersFor(bool leaves, bool exact) public {
        _judgeUnanswered(leaves, _outcome(bob, 1, 0, ACCEPTED));
        uint16 ruling = exact ? EXACT : uint16(REJECTED) << 8 | 11;
        _decide(1, ruling, ruling);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(1);
        assertEq(ledger.standingOf(outcome).verdict, ruling >> 8, "contested");
        IContributionLedger.CommittedWork memory work = _heldByBatch(1);
        if (exact) {
            _expectInvalidSubmission();
            ledger.executeFraud(outcome, work);
            return;
        }
        vm.expectRevert(
            abi.encodeWithSelector(IDisputeCourtErrors.CourtNothingDue.selector, _acceptedLeaf, validators[0])
        );
        court.fineSigner(outcome, validators[0]);
        _passChallengeWindow();
        IRewardEscrow.Claim[] memory claims = new IRewardEscrow.Claim[](1);
        claims[0] = _claimOf(_batchId, _records, _range(1, 2));
        vm.expectRevert(abi.encodeWithSelector(IRewardEscrowErrors.EscrowNotAccepted.selector, _batchId, 1, REJECTED));
        escrow.claim(claims);
    }

    /// @dev Without the proof it could be other work, signed for the case with a key that was given up.
    function testFuzz_claim_reverts_withoutProof_whereNobodyAnswers(bool leaves) public {
        _judgeUnanswered(leaves, _outcome(bob, 1, 0, ACCEPTED));
        _announce(challenger, _acceptedLeaf, REJECT);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(1);
        IContributionLedger.CommittedWork memory work = _unproven(0);
        _expectInvalidSubmission();
        vm.prank(challenger);
        court.claim(outcome, work, REJECT, SALT, _noSources());
    }

    function testFuzz_proveMisrecord_works_overWorkThatNobodyAnswersFor(bool leaves, uint256 field, uint32 change)
        public
    {
        vm.assume(change != 0);
        _judgeUnanswered(leaves, _outcome(bob, 1, 0, ACCEPTED));
        _tryProving(1, validators[0]);
        _judgeBob(_misrecord(bound(field, 0, FIELDS - 2), change, ACCEPTED));
        _prove(1, validators[0]);
        assertEq(vault.activeStake(runId, validators[0]), 0, "nothing left");
    }

    // ------------------------------------------------- claims without the batch

    /// @dev Bob's work without a proof that the batch holds it; `change` makes it another submission of the same file.
    function _unproven(uint32 change) private view returns (IContributionLedger.CommittedWork memory work) {
        work = _heldByBatch(1);
        work.submission.rollouts ^= change;
        work.nodeSignature = _signSubmission(work.submission, bobNodeKey);
        work.proof = new bytes32[](0);
    }

    function _claimWith(address who, IContributionLedger.CommittedWork memory work, uint16 ruling) private {
        _announce(who, _acceptedLeaf, ruling);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(1);
        vm.prank(who);
        court.claim(outcome, work, ruling, SALT, _noSources());
    }

    function _endCase(uint16 ruling) private {
        _draw(_acceptedLeaf);
        // Where nothing is proven, jurors wait until no proof can change what the case is about.
        if (!court.isProven(_acceptedLeaf)) vm.warp(block.timestamp + COMMIT_TIME / 2);
        _voteAll(_acceptedLeaf, ruling, ruling, ruling);
        court.settle(_outcomeAt(1));
    }

    /// @dev A worker from which the batch is hidden gets its jury, and its stake and pay back.
    function test_claim_works_forWhomTheBatchIsHidden() public {
        _judgeBob(_outcome(bob, 1, 0, FRAUD));
        _execute(bob, 1, bobNodeKey);
        _claimWith(challenger, _unproven(0), ACCEPT);
        _endCase(ACCEPT);
        assertEq(vault.activeStake(runId, bob), REQUIRED_STAKE, "restored");
        _passChallengeWindow();
        IRewardEscrow.Claim[] memory claims = new IRewardEscrow.Claim[](1);
        claims[0] = _claimOf(_batchId, _records, _range(1, 2));
        assertEq(escrow.claim(claims), 1000 * uint256(PRICE), "paid");
    }

    /// @dev Nobody is fined over a submission that its worker may have signed for the case.
    function testFuzz_fineSigner_reverts_overWorkThatNobodyProved(uint32 change, bool rejected) public {
        _judgeBob(_outcome(bob, 1, 0, rejected ? REJECTED : ACCEPTED));
        uint16 ruling = rejected ? ACCEPT : REJECT;
        _claimWith(challenger, _unproven(change), ruling);
        _endCase(ruling);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(1);
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtUnproven.selector, _acceptedLeaf));
        court.fineSigner(outcome, validators[0]);
    }

    /// @dev Nor is a worker slashed over it: what a jury found costs stake only with the proof.
    function testFuzz_executeFraud_reverts_overASecondSubmission(uint32 change) public {
        vm.assume(change != 0);
        _judgeBob(_outcome(bob, 1, 0, ACCEPTED));
        _claimWith(challenger, _unproven(change), EXACT);
        _endCase(EXACT);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(1);
        IContributionLedger.CommittedWork memory work = _unproven(change);
        bytes memory reason =
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidSubmission.selector, bob, bobNode);
        vm.expectRevert(reason);
        ledger.executeFraud(outcome, work);
        work = _heldByBatch(1);
        vm.expectRevert(reason);
        ledger.executeFraud(outcome, work);
    }

    /// @dev A proof that comes once jurors may vote changes nothing: neither who is slashed nor who is fined.
    function testFuzz_claim_withALateProof_changesNothing(uint32 change, uint256 late) public {
        vm.assume(change != 0);
        _judgeBob(_outcome(bob, 1, 0, ACCEPTED));
        _claimWith(challenger, _unproven(change), EXACT);
        uint256 openedAt = block.timestamp;
        _draw(_acceptedLeaf);
        address[] memory panel = _panel(_acceptedLeaf);
        vm.expectRevert(
            abi.encodeWithSelector(
                IDisputeCourtErrors.CourtPhaseOpen.selector, _acceptedLeaf, openedAt + COMMIT_TIME / 2
            )
        );
        vm.prank(panel[0]);
        court.commitVote(_acceptedLeaf, keccak256("vote"));
        vm.warp(openedAt + bound(late, COMMIT_TIME / 2, COMMIT_TIME - 1));
        _commitVote(_acceptedLeaf, panel[0], EXACT);
        _announce(stranger, _acceptedLeaf, EXACT);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(1);
        IContributionLedger.CommittedWork memory work = _heldByBatch(1);
        vm.prank(stranger);
        court.claim(outcome, work, EXACT, SALT, _noSources());
        assertFalse(court.isProven(_acceptedLeaf), "too late");
        _commitVote(_acceptedLeaf, panel[1], EXACT);
        _commitVote(_acceptedLeaf, panel[2], EXACT);
        for (uint256 i = 0; i < 3; ++i) {
            _revealVote(_acceptedLeaf, panel[i], EXACT);
        }
        court.settle(outcome);
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidSubmission.selector, bob, bobNode)
        );
        ledger.executeFraud(outcome, work);
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtUnproven.selector, _acceptedLeaf));
        court.fineSigner(outcome, validators[0]);
    }

    /// @dev An accomplice that opens the only case without a proof, with the right ruling, shelters nobody: what the jury was
    ///      shown first can still be proven when its case is over.
    function testFuzz_prove_works_forWhatOpenedTheCase(bool exact, uint256 waited, address caller) public {
        _judgeBob(_outcome(bob, 1, 0, ACCEPTED));
        uint16 ruling = exact ? EXACT : REJECT;
        _claimWith(challenger, _unproven(0), ruling);
        _endCase(ruling);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(1);
        _expectUnproven();
        court.fineSigner(outcome, validators[0]);
        vm.warp(block.timestamp + bound(waited, 0, CHALLENGE_WINDOW));
        IContributionLedger.CommittedWork memory work = _heldByBatch(1);
        vm.expectEmit(address(court));
        emit IDisputeCourtEvents.CaseProven(_acceptedLeaf);
        vm.prank(caller);
        court.prove(outcome, work);
        court.fineSigner(outcome, validators[0]);
        assertLt(vault.activeStake(runId, validators[0]), STAKE, "fined");
        if (!exact) return;
        assertEq(ledger.executeFraud(outcome, work), REQUIRED_STAKE * EXACT_FRAUD_PPM / PPM, "slashed");
        _passChallengeWindow();
        ledger.finaliseFraud(outcome);
        assertEq(
            uint8(vault.escrowOf(_escrowId(bob, IStakeVault.Offence.ExactFraud, 1, 0)).status),
            uint8(IStakeVault.EscrowStatus.Released),
            "final"
        );
    }

    /// @dev The jury may have judged the submission that it was shown first.
    function testFuzz_prove_reverts_forAnotherSubmission(uint32 change, bool ofTheBatch) public {
        vm.assume(change != 0);
        _judgeBob(_outcome(bob, 1, 0, ACCEPTED));
        _claimWith(challenger, _unproven(change), EXACT);
        _endCase(EXACT);
        _tryProvingCase(ofTheBatch ? _heldByBatch(1) : _unproven(change));
        assertFalse(court.isProven(_acceptedLeaf), "nothing is proven");
    }

    function test_prove_reverts_withoutTheProof() public {
        _judgeBob(_outcome(bob, 1, 0, ACCEPTED));
        _claimWith(challenger, _unproven(0), REJECT);
        _endCase(REJECT);
        _tryProvingCase(_unproven(0));
    }

    function _tryProvingCase(IContributionLedger.CommittedWork memory work) private {
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(1);
        _expectUnproven();
        court.prove(outcome, work);
    }

    /// @dev While a case is open a claim proves it, in the first half of the time to commit.
    function testFuzz_prove_reverts_untilTheCaseIsClosed(bool opened) public {
        _judgeBob(_outcome(bob, 1, 0, ACCEPTED));
        if (opened) _claimWith(challenger, _unproven(0), REJECT);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(1);
        IContributionLedger.CommittedWork memory work = _heldByBatch(1);
        vm.expectRevert(
            abi.encodeWithSelector(
                IDisputeCourtErrors.CourtPhaseOpen.selector,
                _acceptedLeaf,
                opened ? block.timestamp + JURY_TIME : JURY_TIME
            )
        );
        court.prove(outcome, work);
    }

    function _expectUnproven() private {
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtUnproven.selector, _acceptedLeaf));
    }

    /// @dev Who opens the case with a second submission does not keep the proof out, which then decides what it is about.
    function testFuzz_claim_withAProof_prevailsOverASecondSubmission(uint32 change) public {
        vm.assume(change != 0);
        _judgeBob(_outcome(bob, 1, 0, ACCEPTED));
        _claimWith(stranger, _unproven(change), REJECT);
        _challenge(1, EXACT);
        _announce(stranger, _acceptedLeaf, STATISTICAL);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(1);
        IContributionLedger.CommittedWork memory work = _unproven(change);
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtUnproven.selector, _acceptedLeaf));
        vm.prank(stranger);
        court.claim(outcome, work, STATISTICAL, SALT, _noSources());
        _endCase(EXACT);
        court.fineSigner(_outcomeAt(1), validators[0]);
        assertLt(vault.activeStake(runId, validators[0]), STAKE, "fined");
    }

    /// @dev A record that names other work opens no case without the proof of what the batch holds.
    function testFuzz_claim_reverts_withoutProof_whereTheRecordNamesOtherWork(uint256 field, uint32 change) public {
        vm.assume(change != 0);
        _judgeWrongly(bound(field, 0, 4), change, ACCEPTED);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(1);
        IContributionLedger.CommittedWork memory work = _unproven(0);
        _announce(challenger, _acceptedLeaf, REJECT);
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidSubmission.selector, bob, bobNode)
        );
        vm.prank(challenger);
        court.claim(outcome, work, REJECT, SALT, _noSources());
    }
}
