// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {
    IContributionLedger,
    IContributionLedgerErrors,
    IContributionLedgerEvents
} from "../../src/interfaces/IContributionLedger.sol";
import {IRunRegistry} from "../../src/interfaces/IRunRegistry.sol";
import {IStakeVault, IStakeVaultErrors} from "../../src/interfaces/IStakeVault.sol";
import {IWorkerRegistry} from "../../src/interfaces/IWorkerRegistry.sol";
import {LedgerTest} from "../LedgerTest.sol";

/// @title A batch with a statistical fraud of Alice and an acceptance of Bob
abstract contract FraudTest is LedgerTest {
    function setUp() public virtual override {
        super.setUp();
        _judge(_two(_record(alice, 1, 0, FRAUD), _record(bob, 1, 0, ACCEPTED)), QUORUM);
    }

    function _executeFirst() internal returns (uint256) {
        return _execute(alice, ALICE_FRAUD, aliceNodeKey);
    }

    function _executeAt(IContributionLedger.OutcomeProof memory outcome, uint32 step, uint32 index)
        internal
        returns (uint256)
    {
        IContributionLedger.Submission memory submission = _submission(alice, step, index);
        return ledger.executeFraud(outcome, _held(outcome, submission, _signSubmission(submission, aliceNodeKey)));
    }

    /// @dev A batch with one fraud of Alice for a reason.
    function _fraudFor(uint32 step, uint8 reason) internal returns (IContributionLedger.OutcomeProof memory) {
        bytes[] memory records = _one(_recordOf(_submission(alice, step, 0), uint16(FRAUD) << 8 | reason));
        return _prove(_commitAndPost(records), records, 0);
    }

    function _escrow(IStakeVault.Offence offence) internal view returns (IStakeVault.Escrow memory) {
        return vault.escrowOf(_escrowId(alice, offence, 1, 0));
    }

    function _expectNotFraud(uint64 batchId, uint32 position, uint8 verdict) internal {
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerNotFraud.selector, batchId, position, verdict)
        );
    }

    function _expectSettled(bytes32 escrowId) internal {
        vm.expectRevert(abi.encodeWithSelector(IStakeVaultErrors.VaultOffenceSettled.selector, escrowId));
    }

    /// @dev A ruling of another kind than a statistical fraud.
    function _otherRuling(uint8 verdict) internal pure returns (uint16) {
        return uint16(bound(verdict, ACCEPTED, REJECTED)) << 8 | 21;
    }

    /// @dev Rounds up.
    function _share(uint256 amount, uint256 ppm) internal pure returns (uint256) {
        return (amount * ppm + PPM - 1) / PPM;
    }
}

/// @title executeFraud: a fraud verdict that stands costs its worker stake at once
contract LedgerFraudTest is FraudTest {
    /// @dev Executes a fraud of Alice's in a step, which is refused with `why`.
    function _try(IContributionLedger.OutcomeProof memory outcome, uint32 step, bytes memory why) private {
        IContributionLedger.Submission memory submission = _submission(alice, step, 0);
        bytes memory signature = _signSubmission(submission, aliceNodeKey);
        vm.expectRevert(why);
        ledger.executeFraud(outcome, _held(outcome, submission, signature));
    }

    // ------------------------------------------------------------------- verdict

    function testFuzz_executeFraud_reverts_whenTheVerdictIsNotFraud(uint8 verdict) public {
        verdict = uint8(bound(verdict, ACCEPTED, REJECTED));
        bytes[] memory records = _one(_record(alice, 2, 0, verdict));
        uint64 batchId = _commitAndPost(records);
        bytes memory why =
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerNotFraud.selector, batchId, 0, verdict);
        _try(_prove(batchId, records, 0), 2, why);
    }

    function testFuzz_executeFraud_reverts_whenAJuryOverturnedIt(uint8 verdict) public {
        uint16 ruling = _otherRuling(verdict);
        _decide(ALICE_FRAUD, ruling, ruling);
        bytes memory why =
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerNotFraud.selector, _batchId, 0, ruling >> 8);
        _try(_outcomeAt(ALICE_FRAUD), 1, why);
    }

    function test_executeFraud_works_whenAJuryUpheldIt() public {
        _decide(ALICE_FRAUD, ACCEPT, STATISTICAL);
        assertEq(_executeFirst(), REQUIRED_STAKE * FRAUD_PPM / PPM, "as recorded");
    }

    function test_executeFraud_works_whileACaseIsOpen() public {
        _challenge(ALICE_FRAUD, ACCEPT);
        assertEq(_executeFirst(), REQUIRED_STAKE * FRAUD_PPM / PPM, "a claim alone stops nothing");
    }

    function test_executeFraud_works_onceFinal() public {
        vm.warp(block.timestamp + 30 days);
        assertEq(_executeFirst(), REQUIRED_STAKE * FRAUD_PPM / PPM, "however late");
    }

    function test_executeFraud_reverts_whileTheBatchIsNotJudged() public {
        uint64 batchId = _commit(1);
        bytes memory why = abi.encodeWithSelector(IContributionLedgerErrors.LedgerNotJudged.selector, batchId);
        _try(_prove(batchId, _one(_record(alice, 2, 0, FRAUD)), 0), 2, why);
    }

    function testFuzz_executeFraud_reverts_whenTheProofIsBroken(bytes32 sibling) public {
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        vm.assume(sibling != outcome.proof[0]);
        outcome.proof[0] = sibling;
        _try(outcome, 1, abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidProof.selector, _batchId, 0));
    }

    function testFuzz_executeFraud_reverts_whenTheHeaderIsNot(uint256 field) public {
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        _mutateHeader(outcome.batch, field);
        uint64 batchId = outcome.batch.batchId;
        _try(outcome, 1, abi.encodeWithSelector(IContributionLedgerErrors.LedgerBatchMismatch.selector, batchId));
    }

    // ------------------------------------------------------------------ evidence

    function testFuzz_executeFraud_reverts_whenTheWorkerNeverSigned(uint256 key) public {
        key = bound(key, 1, 1 << 200);
        vm.assume(key != aliceNodeKey);
        IContributionLedger.Submission memory submission = _submission(alice, 1, 0);
        _expectInvalidEvidence(submission, _signSubmission(submission, key), vm.addr(key));
    }

    function testFuzz_executeFraud_reverts_whenAnotherSubmissionWasSigned(uint256 field, uint32 change) public {
        vm.assume(change != 0);
        field = bound(field, 0, 4);
        IContributionLedger.Submission memory submission = _submission(alice, 1, 0);
        if (field == 0) submission.runId ^= change;
        if (field == 1) submission.step ^= change;
        if (field == 2) submission.index ^= change;
        if (field == 3) submission.policyVersion ^= change;
        if (field == 4) submission.fileHash ^= bytes32(uint256(change));
        _expectInvalidEvidence(submission, _signSubmission(submission, aliceNodeKey), aliceNode);
    }

    function test_executeFraud_reverts_whenAnotherWorkerSigned() public {
        IContributionLedger.Submission memory submission = _submission(alice, 1, 0);
        submission.worker = bob;
        _expectInvalidEvidence(submission, _signSubmission(submission, bobNodeKey), bobNode);
    }

    function testFuzz_executeFraud_reverts_whenTheSignatureIsMalformed(bytes memory signature) public {
        vm.assume(signature.length != 65);
        _expectInvalidEvidence(_submission(alice, 1, 0), signature, address(0));
    }

    function _expectInvalidEvidence(
        IContributionLedger.Submission memory submission,
        bytes memory signature,
        address signer
    ) private {
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        _expectInvalidSubmission(submission.worker, signer);
        ledger.executeFraud(outcome, _held(outcome, submission, signature));
    }

    // --------------------------------------------------- keys and workers that left

    function testFuzz_executeFraud_reaches_whoReplacedItsNodeLater(uint256 nodeKey, uint256 waited) public {
        vm.warp(block.timestamp + bound(waited, 0, 30 days));
        _rotateNode(alice, bound(nodeKey, 1, 1 << 200));
        assertEq(_executeFirst(), REQUIRED_STAKE * FRAUD_PPM / PPM, "a new key is no escape");
    }

    function testFuzz_executeFraud_reverts_whenTheNodeWasReplacedBeforeTheCommitment(uint256 nodeKey, uint256 gap)
        public
    {
        _rotateNode(alice, bound(nodeKey, 1, 1 << 200));
        vm.warp(block.timestamp + bound(gap, 1, 30 days));
        IContributionLedger.OutcomeProof memory outcome = _fraudFor(2, 60);
        _try(outcome, 2, _whyNotHers());
    }

    function testFuzz_executeFraud_takesTheKeyOfTheCommitment(uint256 nodeKey, uint256 gap) public {
        nodeKey = bound(nodeKey, 1, 1 << 200);
        _rotateNode(alice, nodeKey);
        vm.warp(block.timestamp + bound(gap, 1, 30 days));
        IContributionLedger.OutcomeProof memory outcome = _fraudFor(2, 60);
        IContributionLedger.Submission memory submission = _submission(alice, 2, 0);
        uint256 amount = ledger.executeFraud(outcome, _held(outcome, submission, _signSubmission(submission, nodeKey)));
        assertEq(amount, REQUIRED_STAKE * FRAUD_PPM / PPM, "the new key answers for it");
    }

    function test_executeFraud_reaches_whoReplacedItsNodeInTheSameSecond() public {
        _rotateNode(alice, uint256(keccak256("new node")));
        assertEq(
            _executeAt(_fraudFor(2, 60), 2, 0), REQUIRED_STAKE * FRAUD_PPM / PPM, "a key answers to its last second"
        );
    }

    function testFuzz_executeFraud_reaches_whoLeftLater(uint256 waited) public {
        vm.warp(block.timestamp + bound(waited, 0, 30 days));
        vm.prank(alice);
        workers.exit(runId);
        assertEq(_executeFirst(), REQUIRED_STAKE * FRAUD_PPM / PPM, "stake on its way out");
        _assertStatus(alice, IWorkerRegistry.Status.Exiting, "goes on leaving");
    }

    function testFuzz_executeFraud_reverts_whenTheWorkerLeftBeforeTheCommitment(uint256 gap) public {
        vm.prank(alice);
        workers.exit(runId);
        vm.warp(block.timestamp + bound(gap, 1, 30 days));
        IContributionLedger.OutcomeProof memory outcome = _fraudFor(2, 60);
        _try(outcome, 2, _whyNotHers());
    }

    function test_executeFraud_reaches_whoLeftInTheSameSecond() public {
        vm.prank(alice);
        workers.exit(runId);
        assertEq(_executeAt(_fraudFor(2, 60), 2, 0), REQUIRED_STAKE * FRAUD_PPM / PPM, "it answers to its last second");
    }

    function test_executeFraud_reaches_whoCameBack() public {
        vm.prank(alice);
        workers.exit(runId);
        vm.warp(block.timestamp + 1);
        _deposit(runId, alice, REQUIRED_STAKE);
        vm.prank(alice);
        workers.comeBack(runId, 1);
        uint256 amount = _executeAt(_fraudFor(2, 60), 2, 0);
        assertEq(amount, 2 * REQUIRED_STAKE * FRAUD_PPM / PPM, "with its new stake, and what it is taking out");
    }

    function _whyNotHers() private view returns (bytes memory) {
        return abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidSubmission.selector, alice, aliceNode);
    }

    // ----------------------------------------------------------------------- run

    function test_executeFraud_reverts_whenTheWorkerNeverJoinedTheRun() public {
        runId = _createRun();
        vm.prank(owner);
        escrow.fund(runId, 1000 ether);
        IContributionLedger.OutcomeProof memory outcome = _fraudFor(2, 60);
        _try(outcome, 2, _whyNotHers());
    }

    function testFuzz_executeFraud_touchesNoOtherRun(uint256 stake, bool exact) public {
        stake = bound(stake, REQUIRED_STAKE, WALLET / 2);
        uint64 first = runId;
        uint64 other = _createRun();
        _join(other, alice, address(0), 0, stake);
        runId = first;
        _executeAt(_fraudFor(2, exact ? 30 : 60), 2, 0);
        assertEq(vault.activeStake(other, alice), stake, "its stake there");
        assertTrue(workers.isActive(other, alice), "its work there");
    }

    function test_executeFraud_countsNoConvictionsOfOtherRuns() public {
        _executeFirst();
        runId = _createRun();
        _join(runId, alice, address(0), 0, REQUIRED_STAKE);
        vm.prank(owner);
        escrow.fund(runId, 1000 ether);
        assertEq(_executeAt(_fraudFor(1, 60), 1, 0), REQUIRED_STAKE * FRAUD_PPM / PPM, "a first one here");
        _assertStatus(alice, IWorkerRegistry.Status.Jailed, "not banned");
    }

    // ------------------------------------------------------------------- a pause

    function testFuzz_executeFraud_reverts_whileSlashingIsPaused(uint256 waited) public {
        uint256 until = _pauseSlashing();
        vm.warp(block.timestamp + bound(waited, 0, SLASH_PAUSE - 1));
        bytes4 why = IContributionLedgerErrors.LedgerSlashingPaused.selector;
        _try(_outcomeAt(ALICE_FRAUD), 1, abi.encodeWithSelector(why, runId, until));
    }

    function testFuzz_executeFraud_works_afterThePause(uint256 late) public {
        vm.warp(_pauseSlashing() + bound(late, 0, 30 days));
        assertEq(_executeFirst(), REQUIRED_STAKE * FRAUD_PPM / PPM, "put off, not off");
    }

    // ---------------------------------------------------------------------- once

    function test_executeFraud_reverts_twice() public {
        _executeFirst();
        bytes32 escrowId = _escrowId(alice, IStakeVault.Offence.Fraud, 1, 0);
        bytes memory why = abi.encodeWithSelector(IStakeVaultErrors.VaultOffenceSettled.selector, escrowId);
        _try(_outcomeAt(ALICE_FRAUD), 1, why);
    }

    function testFuzz_executeFraud_reverts_forTheSameSlotInAnotherBatch(uint8 reason) public {
        vm.assume(reason < 30 || reason > 59);
        _executeFirst();
        IContributionLedger.OutcomeProof memory again = _fraudFor(1, reason);
        bytes32 escrowId = _escrowId(alice, IStakeVault.Offence.Fraud, 1, 0);
        _try(again, 1, abi.encodeWithSelector(IStakeVaultErrors.VaultOffenceSettled.selector, escrowId));
        assertEq(workers.memberOf(runId, alice).convictions, 1, "convicted once");
    }

    function testFuzz_executeFraud_reverts_forTheSameSlotInAnotherBatch_exact(uint8 first, uint8 second) public {
        _executeAt(_fraudFor(2, uint8(bound(first, 30, 59))), 2, 0);
        IContributionLedger.OutcomeProof memory again = _fraudFor(2, uint8(bound(second, 30, 59)));
        bytes32 escrowId = _escrowId(alice, IStakeVault.Offence.ExactFraud, 2, 0);
        _try(again, 2, abi.encodeWithSelector(IStakeVaultErrors.VaultOffenceSettled.selector, escrowId));
    }

    function test_executeFraud_punishesAnExactFraud_afterAStatisticalOneOfTheSlot() public {
        _executeFirst();
        uint256 left = vault.activeStake(runId, alice);
        assertEq(_executeAt(_fraudFor(1, 30), 1, 0), left * EXACT_FRAUD_PPM / PPM, "another offence");
        _assertStatus(alice, IWorkerRegistry.Status.Banned, "banned");
    }

    function test_executeFraud_reverts_forASlotThatAJuryCleared() public {
        _executeFirst();
        _decide(ALICE_FRAUD, ACCEPT, ACCEPT);
        IContributionLedger.OutcomeProof memory again = _fraudFor(1, 60);
        bytes32 escrowId = _escrowId(alice, IStakeVault.Offence.Fraud, 1, 0);
        _try(again, 1, abi.encodeWithSelector(IStakeVaultErrors.VaultOffenceSettled.selector, escrowId));
    }

    // ------------------------------------------------------------------- effects

    function testFuzz_executeFraud_slashesAndJailsAtOnce(address caller, uint256 extra, uint256 unbonding) public {
        extra = bound(extra, 1, WALLET - REQUIRED_STAKE);
        unbonding = bound(unbonding, 1, extra);
        _deposit(runId, alice, extra);
        vm.prank(alice);
        vault.requestUnbond(runId, unbonding);
        uint256 active = REQUIRED_STAKE + extra - unbonding;
        uint256 expected = _share(active, FRAUD_PPM) + _share(unbonding, FRAUD_PPM);
        IContributionLedger.Submission memory submission = _submission(alice, 1, 0);
        bytes memory signature = _signSubmission(submission, aliceNodeKey);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);

        vm.expectEmit(address(ledger));
        emit IContributionLedgerEvents.FraudExecuted(
            _batchId, alice, _escrowId(alice, IStakeVault.Offence.Fraud, 1, 0), _fraudLeaf, 0, expected
        );
        vm.prank(caller);
        assertEq(ledger.executeFraud(outcome, _held(outcome, submission, signature)), expected, "amount");

        _assertStatus(alice, IWorkerRegistry.Status.Jailed, "jailed");
        _assertHeld(_escrow(IStakeVault.Offence.Fraud), expected);
        assertEq(vault.activeStake(runId, bob), REQUIRED_STAKE, "nobody else is touched");
    }

    function _assertHeld(IStakeVault.Escrow memory held, uint256 amount) private view {
        assertEq(held.amount, amount, "in escrow");
        assertEq(held.ppm, FRAUD_PPM, "at this share");
        assertEq(held.batchId, _batchId, "for this batch");
        assertEq(held.position, 0, "and this outcome");
        assertEq(uint8(held.status), uint8(IStakeVault.EscrowStatus.Held), "held");
    }

    function testFuzz_executeFraud_bansForExactFaults(uint8 reason) public {
        reason = uint8(bound(reason, 30, 59));
        uint256 amount = _executeAt(_fraudFor(2, reason), 2, 0);
        assertEq(amount, REQUIRED_STAKE * EXACT_FRAUD_PPM / PPM, "the larger share");
        _assertStatus(alice, IWorkerRegistry.Status.Banned, "banned at once");
    }

    function testFuzz_executeFraud_jailsForStatisticalFaults(uint8 reason) public {
        vm.assume(reason < 30 || reason > 59);
        uint256 amount = _executeAt(_fraudFor(2, reason), 2, 0);
        assertEq(amount, REQUIRED_STAKE * FRAUD_PPM / PPM, "the smaller share");
        _assertStatus(alice, IWorkerRegistry.Status.Jailed, "may come back");
    }

    function testFuzz_executeFraud_doublesForEachConviction(uint256 offences) public {
        offences = bound(offences, 1, 8);
        bytes[] memory records = new bytes[](offences);
        for (uint256 i = 0; i < offences; ++i) {
            records[i] = _record(alice, 3, uint32(i), FRAUD);
        }
        uint64 batchId = _commitAndPost(records);
        uint256 left = REQUIRED_STAKE;
        for (uint256 i = 0; i < offences; ++i) {
            uint256 doubled = uint256(FRAUD_PPM) << i;
            uint256 taken = _executeAt(_prove(batchId, records, i), 3, uint32(i));
            assertEq(taken, _share(left, doubled < PPM ? doubled : PPM), "doubled each time, and never more than all");
            left -= taken;
            assertEq(vault.activeStake(runId, alice), left, "what is left");
        }
    }

    function test_executeFraud_bansForTheSecond() public {
        _executeFirst();
        _executeAt(_fraudFor(2, 60), 2, 0);
        _assertStatus(alice, IWorkerRegistry.Status.Banned, "a second statistical one");
    }

    function test_executeFraud_countsTheExactOnesAsConvictions() public {
        _executeAt(_fraudFor(2, 30), 2, 0);
        uint256 left = vault.activeStake(runId, alice);
        assertEq(_executeFirst(), left * 2 * FRAUD_PPM / PPM, "doubled after an exact fraud");
    }

    function test_executeFraud_doublesNoExactOne() public {
        _executeFirst();
        uint256 left = vault.activeStake(runId, alice);
        assertEq(_executeAt(_fraudFor(2, 30), 2, 0), left * EXACT_FRAUD_PPM / PPM, "the same for each");
    }

    // --------------------------------------------------------------------- terms

    function testFuzz_executeFraud_costsWhatTheTermsOfTheBatchSay(uint32 fraudPpm, uint32 exactPpm, bool exact) public {
        uint8 reason = exact ? 30 : 60;
        (fraudPpm, exactPpm) = _changeShares(fraudPpm, exactPpm);
        uint256 amount = _executeAt(_fraudFor(2, reason), 2, 0);
        assertEq(amount, _share(REQUIRED_STAKE, exact ? exactPpm : fraudPpm), "the new terms for a new batch");
    }

    function testFuzz_executeFraud_costsWhatTheTermsOfTheBatchSaid(uint32 fraudPpm, uint32 exactPpm, bool exact)
        public
    {
        uint8 reason = exact ? 30 : 60;
        IContributionLedger.OutcomeProof memory outcome = _fraudFor(2, reason);
        _changeShares(fraudPpm, exactPpm);
        uint256 amount = _executeAt(outcome, 2, 0);
        assertEq(amount, _share(REQUIRED_STAKE, exact ? EXACT_FRAUD_PPM : FRAUD_PPM), "the old terms for an old batch");
    }

    function _changeShares(uint32 fraudPpm, uint32 exactPpm) private returns (uint32, uint32) {
        (IRunRegistry.Terms memory terms,) = runs.termsOf(runId);
        terms.exactFraudPpm = uint32(bound(exactPpm, 0, PPM));
        terms.fraudPpm = uint32(bound(fraudPpm, 0, terms.exactFraudPpm));
        _changeTerms(terms);
        return (terms.fraudPpm, terms.exactFraudPpm);
    }

    // ------------------------------------------------------------- what a jury found

    function testFuzz_executeFraud_costsWhatTheJuryFound(bool exact) public {
        uint16 ruling = exact ? EXACT : STATISTICAL;
        _decide(BOB_ACCEPTED, ruling, ruling);
        uint256 amount = _execute(bob, BOB_ACCEPTED, bobNodeKey);
        assertEq(amount, REQUIRED_STAKE * (exact ? EXACT_FRAUD_PPM : FRAUD_PPM) / PPM, "the share of its kind");
        _assertStatus(bob, exact ? IWorkerRegistry.Status.Banned : IWorkerRegistry.Status.Jailed, "of its kind");
    }

    function test_executeFraud_takesMore_onceAJuryFoundAnExactOneInstead() public {
        _executeFirst();
        _decide(ALICE_FRAUD, EXACT, EXACT);
        assertEq(vault.activeStake(runId, alice), REQUIRED_STAKE, "the statistical one is undone");
        assertEq(_executeFirst(), REQUIRED_STAKE * EXACT_FRAUD_PPM / PPM, "the exact one is executed");
        _assertStatus(alice, IWorkerRegistry.Status.Banned, "banned");
    }

    function test_executeFraud_takesLess_onceAJuryFoundAStatisticalOneInstead() public {
        _judge(_one(_recordOf(_submission(alice, 1, 0), EXACT)), QUORUM);
        _executeFirst();
        _decide(ALICE_FRAUD, STATISTICAL, STATISTICAL);
        assertEq(_executeFirst(), REQUIRED_STAKE * FRAUD_PPM / PPM, "the statistical one is executed");
        _assertStatus(alice, IWorkerRegistry.Status.Jailed, "may come back");
    }
}

/// @title finaliseFraud: what a fraud cost is split for good once nobody can overturn it
contract LedgerFinaliseTest is FraudTest {
    function _expectNotFinal() private {
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerNotFinal.selector, _batchId, 0));
    }

    function _assertReleased() private view {
        uint8 status = uint8(_escrow(IStakeVault.Offence.Fraud).status);
        assertEq(status, uint8(IStakeVault.EscrowStatus.Released), "released");
    }

    // ---------------------------------------------------------------------- time

    function testFuzz_finaliseFraud_reverts_withinTheWindow(uint256 waited) public {
        _executeFirst();
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        vm.warp(block.timestamp + bound(waited, 0, CHALLENGE_WINDOW - 1));
        _expectNotFinal();
        ledger.finaliseFraud(outcome);
    }

    function test_finaliseFraud_reverts_whileACaseIsOpen() public {
        _executeFirst();
        _challenge(ALICE_FRAUD, ACCEPT);
        _passChallengeWindow();
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        _expectNotFinal();
        ledger.finaliseFraud(outcome);
    }

    function test_finaliseFraud_works_onceTheCaseIsClosed() public {
        _executeFirst();
        _challenge(ALICE_FRAUD, ACCEPT);
        _passChallengeWindow();
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        court.settle(outcome);
        ledger.finaliseFraud(outcome);
        _assertReleased();
    }

    function testFuzz_finaliseFraud_reverts_beforeTheWindowThatAPauseProlonged(uint256 started, uint256 waited) public {
        _executeFirst();
        vm.warp(block.timestamp + bound(started, 0, CHALLENGE_WINDOW - 1));
        uint256 closesAt = _pauseSlashing() + CHALLENGE_WINDOW;
        vm.warp(bound(waited, block.timestamp, closesAt - 1));
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        _expectNotFinal();
        ledger.finaliseFraud(outcome);
    }

    function testFuzz_finaliseFraud_works_afterTheWindowThatAPauseProlonged(uint256 started) public {
        _executeFirst();
        vm.warp(block.timestamp + bound(started, 0, CHALLENGE_WINDOW - 1));
        vm.warp(_pauseSlashing() + CHALLENGE_WINDOW);
        ledger.finaliseFraud(_outcomeAt(ALICE_FRAUD));
        _assertReleased();
    }

    function test_finaliseFraud_works_duringAPauseThatMetNoWindow() public {
        _executeFirst();
        _passChallengeWindow();
        _pauseSlashing();
        ledger.finaliseFraud(_outcomeAt(ALICE_FRAUD));
        _assertReleased();
    }

    // ------------------------------------------------------------------- outcome

    function testFuzz_finaliseFraud_reverts_whenTheVerdictIsNotFraud(uint8 verdict) public {
        verdict = uint8(bound(verdict, ACCEPTED, REJECTED));
        bytes[] memory records = _one(_record(alice, 2, 0, verdict));
        uint64 batchId = _commitAndPost(records);
        _passChallengeWindow();
        IContributionLedger.OutcomeProof memory outcome = _prove(batchId, records, 0);
        _expectNotFraud(batchId, 0, verdict);
        ledger.finaliseFraud(outcome);
    }

    function testFuzz_finaliseFraud_reverts_whenAJuryOverturnedIt(uint8 verdict) public {
        uint16 ruling = _otherRuling(verdict);
        _executeFirst();
        _decide(ALICE_FRAUD, ruling, ruling);
        _passChallengeWindow();
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        _expectNotFraud(_batchId, 0, uint8(ruling >> 8));
        ledger.finaliseFraud(outcome);
    }

    function test_finaliseFraud_reverts_whenNotExecuted() public {
        _passChallengeWindow();
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        _expectSettled(_escrowId(alice, IStakeVault.Offence.Fraud, 1, 0));
        ledger.finaliseFraud(outcome);
    }

    function test_finaliseFraud_reverts_twice() public {
        _executeFirst();
        _passChallengeWindow();
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        ledger.finaliseFraud(outcome);
        _expectSettled(_escrowId(alice, IStakeVault.Offence.Fraud, 1, 0));
        ledger.finaliseFraud(outcome);
    }

    function test_finaliseFraud_reverts_forTheSameSlotInAnotherBatch() public {
        _executeFirst();
        IContributionLedger.OutcomeProof memory again = _fraudFor(1, 60);
        _passChallengeWindow();
        vm.expectRevert(
            abi.encodeWithSelector(
                IStakeVaultErrors.VaultWrongLeaf.selector,
                _escrowId(alice, IStakeVault.Offence.Fraud, 1, 0),
                again.batch.batchId,
                0
            )
        );
        ledger.finaliseFraud(again);
    }

    function testFuzz_finaliseFraud_reverts_whenTheProofIsBroken(bytes32 sibling) public {
        _executeFirst();
        _passChallengeWindow();
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        vm.assume(sibling != outcome.proof[0]);
        outcome.proof[0] = sibling;
        _expectInvalidProof(_batchId, 0);
        ledger.finaliseFraud(outcome);
    }

    function testFuzz_finaliseFraud_reverts_whenTheHeaderIsNot(uint256 field) public {
        _executeFirst();
        _passChallengeWindow();
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        _mutateHeader(outcome.batch, field);
        _expectBatchMismatch(outcome.batch.batchId);
        ledger.finaliseFraud(outcome);
    }

    // ------------------------------------------------------------------- release

    function testFuzz_finaliseFraud_releasesTheEscrow(address caller, uint256 waited) public {
        waited = bound(waited, CHALLENGE_WINDOW, 100 days);
        uint256 amount = _executeFirst();
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        vm.warp(block.timestamp + waited);
        vm.expectEmit(address(ledger));
        emit IContributionLedgerEvents.FraudFinalised(
            _batchId, _escrowId(alice, IStakeVault.Offence.Fraud, 1, 0), _fraudLeaf
        );
        vm.prank(caller);
        ledger.finaliseFraud(outcome);
        uint256 insured = amount * INSURANCE_PPM / PPM;
        assertEq(token.balanceOf(insurance), insured, "insured");
        assertEq(token.totalSupply(), SUPPLY - (amount - insured), "burned");
    }

    function test_finaliseFraud_releasesTheEscrowOfItsKind() public {
        _judge(_one(_recordOf(_submission(alice, 1, 0), EXACT)), QUORUM);
        _executeFirst();
        _passChallengeWindow();
        ledger.finaliseFraud(_outcomeAt(ALICE_FRAUD));
        uint8 status = uint8(_escrow(IStakeVault.Offence.ExactFraud).status);
        assertEq(status, uint8(IStakeVault.EscrowStatus.Released), "released");
    }

    // ------------------------------------------------------------------ reporter

    function testFuzz_finaliseFraud_rewards_whoClaimedItBeforeAJury(bool exact, uint256 extra) public {
        _deposit(runId, bob, bound(extra, 1, WALLET - REQUIRED_STAKE));
        uint16 ruling = exact ? EXACT : STATISTICAL;
        _decide(BOB_ACCEPTED, ruling, ruling);
        uint256 amount = _execute(bob, BOB_ACCEPTED, bobNodeKey);
        _passChallengeWindow();
        uint256 before = token.balanceOf(challenger);
        ledger.finaliseFraud(_outcomeAt(BOB_ACCEPTED));
        uint256 share = amount * REPORTER_PPM / PPM;
        assertEq(token.balanceOf(challenger) - before, share < REPORTER_CAP ? share : REPORTER_CAP, "share, capped");
    }

    function test_finaliseFraud_rewardsNobody_forWhatTheRunFoundItself() public {
        _executeFirst();
        _decide(ALICE_FRAUD, ACCEPT, STATISTICAL);
        _passChallengeWindow();
        uint256 before = token.balanceOf(challenger);
        ledger.finaliseFraud(_outcomeAt(ALICE_FRAUD));
        assertEq(token.balanceOf(challenger), before, "who denied a fraud did not report it");
    }

    function test_finaliseFraud_rewardsNobody_forAnotherKindThanTheRunFound() public {
        _decide(ALICE_FRAUD, EXACT, EXACT);
        _executeFirst();
        _passChallengeWindow();
        uint256 before = token.balanceOf(challenger);
        ledger.finaliseFraud(_outcomeAt(ALICE_FRAUD));
        assertEq(token.balanceOf(challenger), before, "the run had found the fraud");
    }
}
