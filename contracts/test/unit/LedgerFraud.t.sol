// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {
    IContributionLedger,
    IContributionLedgerErrors,
    IContributionLedgerEvents
} from "../../src/interfaces/IContributionLedger.sol";
import {IStakeVault, IStakeVaultErrors} from "../../src/interfaces/IStakeVault.sol";
import {IWorkerRegistry} from "../../src/interfaces/IWorkerRegistry.sol";
import {LedgerTest} from "../LedgerTest.sol";

/// forge-config: default.fuzz.runs = 96
contract LedgerFraudTest is LedgerTest {
    bytes[] private _records;
    uint64 private _batchId;

    function setUp() public override {
        super.setUp();
        _startRun(WALLET / 2);
        _records = _two(_record(alice, 1, 0, FRAUD), _record(bob, 1, 0, ACCEPTED));
        _batchId = _commitAndPost(_records);
    }

    function _execute() private returns (uint256) {
        return _executeAt(_prove(_batchId, _records, 0), 1, 0);
    }

    function _executeAt(IContributionLedger.OutcomeProof memory outcome, uint32 step, uint32 index)
        private
        returns (uint256)
    {
        IContributionLedger.Submission memory submission = _submission(alice, step, index);
        return ledger.executeFraud(outcome, submission, _signSubmission(submission, aliceNodeKey));
    }

    function _expectRevert(bytes memory why, IContributionLedger.OutcomeProof memory outcome, uint32 step) private {
        IContributionLedger.Submission memory submission = _submission(alice, step, 0);
        bytes memory signature = _signSubmission(submission, aliceNodeKey);
        vm.expectRevert(why);
        ledger.executeFraud(outcome, submission, signature);
    }

    function _offence(uint32 step, uint32 index) private view returns (bytes32) {
        IContributionLedger.Outcome memory o = _outcome(alice, step, index, FRAUD);
        return keccak256(abi.encode(runId, o.workerId, o.step, o.index, o.fileHash));
    }

    /// @dev A batch with one fraud of Alice for a reason.
    function _fraudFor(uint32 step, uint8 reason) private returns (IContributionLedger.OutcomeProof memory) {
        IContributionLedger.Outcome memory outcome = _outcome(alice, step, 0, FRAUD);
        outcome.reason = reason;
        bytes[] memory records = _one(_pack(outcome));
        return _prove(_commitAndPost(records), records, 0);
    }

    // ------------------------------------------------------------------ execute

    function testFuzz_executeFraud_reverts_whenVerdictIsNotFraud(uint8 verdict) public {
        verdict = uint8(bound(verdict, ACCEPTED, REJECTED));
        bytes[] memory records = _one(_record(alice, 2, 0, verdict));
        uint64 batchId = _commitAndPost(records);
        bytes memory why =
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerNotFraud.selector, batchId, 0, verdict);
        _expectRevert(why, _prove(batchId, records, 0), 2);
    }

    function testFuzz_executeFraud_reverts_whenAJuryOverturnedIt(uint8 verdict) public {
        verdict = uint8(bound(verdict, ACCEPTED, REJECTED));
        IContributionLedger.OutcomeProof memory outcome = _prove(_batchId, _records, 0);
        _overturn(outcome, verdict);
        bytes memory why =
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerNotFraud.selector, _batchId, 0, verdict);
        _expectRevert(why, outcome, 1);
    }

    function testFuzz_executeFraud_reverts_whenProofIsBroken(bytes32 sibling) public {
        IContributionLedger.OutcomeProof memory outcome = _prove(_batchId, _records, 0);
        vm.assume(sibling != outcome.proof[0]);
        outcome.proof[0] = sibling;
        bytes memory why = abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidProof.selector, _batchId, 0);
        _expectRevert(why, outcome, 1);
    }

    function testFuzz_executeFraud_reverts_whenTheHeaderIsNot(uint256 field) public {
        IContributionLedger.OutcomeProof memory outcome = _prove(_batchId, _records, 0);
        _mutateHeader(outcome.batch, field);
        uint64 batchId = outcome.batch.batchId;
        bytes memory why = abi.encodeWithSelector(IContributionLedgerErrors.LedgerBatchMismatch.selector, batchId);
        _expectRevert(why, outcome, 1);
    }

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

    function testFuzz_executeFraud_reverts_whenSignatureIsMalformed(bytes memory signature) public {
        vm.assume(signature.length != 65);
        _expectInvalidEvidence(_submission(alice, 1, 0), signature, address(0));
    }

    function _expectInvalidEvidence(
        IContributionLedger.Submission memory submission,
        bytes memory signature,
        address signer
    ) private {
        IContributionLedger.OutcomeProof memory outcome = _prove(_batchId, _records, 0);
        vm.expectRevert(
            abi.encodeWithSelector(
                IContributionLedgerErrors.LedgerInvalidSubmission.selector, submission.worker, signer
            )
        );
        ledger.executeFraud(outcome, submission, signature);
    }

    // --------------------------------------------------------------------- once

    function test_executeFraud_reverts_twice() public {
        _execute();
        bytes memory why = abi.encodeWithSelector(IStakeVaultErrors.VaultOffenceSettled.selector, _offence(1, 0));
        _expectRevert(why, _prove(_batchId, _records, 0), 1);
    }

    function testFuzz_executeFraud_reverts_forTheSameFileInAnotherBatch(uint8 reason) public {
        _execute();
        IContributionLedger.OutcomeProof memory again = _fraudFor(1, reason);
        bytes memory why = abi.encodeWithSelector(IStakeVaultErrors.VaultOffenceSettled.selector, _offence(1, 0));
        _expectRevert(why, again, 1);
        assertEq(workers.workerOf(alice).convictions, 1, "convicted once");
    }

    function test_executeFraud_reverts_forAFileThatAJuryCleared() public {
        _execute();
        _overturn(_prove(_batchId, _records, 0), ACCEPTED);
        IContributionLedger.OutcomeProof memory again = _fraudFor(1, 60);
        bytes memory why = abi.encodeWithSelector(IStakeVaultErrors.VaultOffenceSettled.selector, _offence(1, 0));
        _expectRevert(why, again, 1);
    }

    // ------------------------------------------------------------------ effects

    function testFuzz_executeFraud_slashesAndJailsAtOnce(address caller, uint256 extra, uint256 unbonding) public {
        extra = bound(extra, 1, WALLET - REQUIRED_STAKE);
        unbonding = bound(unbonding, 1, extra);
        _deposit(alice, extra);
        vm.prank(alice);
        vault.requestUnbond(unbonding);
        (uint256 active,) = _stake(alice);
        uint256 expected = _ceil(active * FRAUD_PPM) + _ceil(unbonding * FRAUD_PPM);
        IContributionLedger.Submission memory submission = _submission(alice, 1, 0);
        bytes memory signature = _signSubmission(submission, aliceNodeKey);
        IContributionLedger.OutcomeProof memory outcome = _prove(_batchId, _records, 0);

        vm.expectEmit(address(ledger));
        emit IContributionLedgerEvents.FraudExecuted(
            _batchId, alice, _offence(1, 0), _leaf(_batchId, 0, _records[0]), 0, expected
        );
        vm.prank(caller);
        assertEq(ledger.executeFraud(outcome, submission, signature), expected, "amount");

        _assertStatus(alice, IWorkerRegistry.Status.Jailed, "jailed");
        assertEq(vault.escrowOf(_offence(1, 0)).amount, expected, "in escrow");
        assertEq(vault.escrowOf(_offence(1, 0)).reporter, address(0), "a verdict of the judges has no reporter");
        assertEq(vault.activeStake(bob), REQUIRED_STAKE, "nobody else is touched");
    }

    function _ceil(uint256 scaled) private pure returns (uint256) {
        return (scaled + PPM - 1) / PPM;
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
            uint256 ppm = doubled < PPM ? doubled : PPM;
            uint256 taken = _executeAt(_prove(batchId, records, i), 3, uint32(i));
            assertEq(taken, _ceil(left * ppm), "doubled each time, and never more than all");
            left -= taken;
            assertEq(vault.activeStake(alice), left, "what is left");
        }
        bool banned = offences > 1;
        _assertStatus(alice, banned ? IWorkerRegistry.Status.Banned : IWorkerRegistry.Status.Jailed, "second one bans");
    }

    function test_executeFraud_countsTheExactOnesAsConvictions() public {
        IContributionLedger.OutcomeProof memory exact = _fraudFor(2, 30);
        _executeAt(exact, 2, 0);
        uint256 left = vault.activeStake(alice);
        assertEq(_execute(), left * 2 * FRAUD_PPM / PPM, "doubled after an exact fraud");
    }

    function testFuzz_executeFraud_rewardsWhoProvedItToAJury(uint8 claimed) public {
        bytes[] memory records = _one(_record(alice, 2, 0, uint8(bound(claimed, ACCEPTED, REJECTED))));
        IContributionLedger.OutcomeProof memory outcome = _prove(_commitAndPost(records), records, 0);
        _overturn(outcome, FRAUD);
        uint256 amount = _executeAt(outcome, 2, 0);
        assertEq(amount, REQUIRED_STAKE * FRAUD_PPM / PPM, "a jury's fraud is a statistical one");
        assertEq(vault.escrowOf(_offence(2, 0)).reporter, challenger, "the challenger reported it");
    }

    function test_executeFraud_hasNoReporter_whenAChallengeOfItFailed() public {
        IContributionLedger.OutcomeProof memory outcome = _prove(_batchId, _records, 0);
        _decide(outcome, ACCEPTED, false);
        _execute();
        assertEq(vault.escrowOf(_offence(1, 0)).reporter, address(0), "who denied a fraud did not report it");
    }

    function testFuzz_executeFraud_acceptsAFormerNode(uint256 nodeKey) public {
        nodeKey = bound(nodeKey, 1, 1 << 200);
        bytes memory consent = _consent(alice, vm.addr(nodeKey), nodeKey, block.timestamp);
        vm.prank(alice);
        workers.rotateNode(vm.addr(nodeKey), block.timestamp, consent);
        assertGt(_execute(), 0, "rotating the key does not escape");
    }

    function test_executeFraud_reachesAnExitingWorker() public {
        vm.prank(alice);
        workers.exit();
        assertEq(_execute(), REQUIRED_STAKE * FRAUD_PPM / PPM, "stake on its way out");
        _assertStatus(alice, IWorkerRegistry.Status.Exiting, "goes on leaving");
    }

    // ----------------------------------------------------------------- finalise

    function testFuzz_finaliseFraud_reverts_withinTheWindow(uint256 waited) public {
        _execute();
        IContributionLedger.OutcomeProof memory outcome = _prove(_batchId, _records, 0);
        vm.warp(block.timestamp + bound(waited, 0, CHALLENGE_WINDOW - 1));
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerNotFinal.selector, _batchId, 0));
        ledger.finaliseFraud(outcome);
    }

    function test_finaliseFraud_reverts_whileACaseIsOpen() public {
        _execute();
        IContributionLedger.OutcomeProof memory outcome = _prove(_batchId, _records, 0);
        _challenge(outcome, ACCEPTED);
        _passChallengeWindow();
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerNotFinal.selector, _batchId, 0));
        ledger.finaliseFraud(outcome);
        court.close(outcome);
        ledger.finaliseFraud(outcome);
        assertEq(uint8(vault.escrowOf(_offence(1, 0)).status), uint8(IStakeVault.EscrowStatus.Released), "released");
    }

    function testFuzz_finaliseFraud_reverts_whenVerdictIsNotFraud(uint8 verdict) public {
        verdict = uint8(bound(verdict, ACCEPTED, REJECTED));
        bytes[] memory records = _one(_record(alice, 2, 0, verdict));
        uint64 batchId = _commitAndPost(records);
        _passChallengeWindow();
        IContributionLedger.OutcomeProof memory outcome = _prove(batchId, records, 0);
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerNotFraud.selector, batchId, 0, verdict));
        ledger.finaliseFraud(outcome);
    }

    function test_finaliseFraud_reverts_whenNotExecuted() public {
        _passChallengeWindow();
        IContributionLedger.OutcomeProof memory outcome = _prove(_batchId, _records, 0);
        vm.expectRevert(abi.encodeWithSelector(IStakeVaultErrors.VaultOffenceSettled.selector, _offence(1, 0)));
        ledger.finaliseFraud(outcome);
    }

    function test_finaliseFraud_reverts_twice() public {
        _execute();
        _passChallengeWindow();
        IContributionLedger.OutcomeProof memory outcome = _prove(_batchId, _records, 0);
        ledger.finaliseFraud(outcome);
        vm.expectRevert(abi.encodeWithSelector(IStakeVaultErrors.VaultOffenceSettled.selector, _offence(1, 0)));
        ledger.finaliseFraud(outcome);
    }

    function testFuzz_finaliseFraud_reverts_whenProofIsBroken(bytes32 sibling) public {
        _execute();
        _passChallengeWindow();
        IContributionLedger.OutcomeProof memory outcome = _prove(_batchId, _records, 0);
        vm.assume(sibling != outcome.proof[0]);
        outcome.proof[0] = sibling;
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidProof.selector, _batchId, 0));
        ledger.finaliseFraud(outcome);
    }

    function testFuzz_finaliseFraud_releasesTheEscrow(address caller, uint256 waited) public {
        waited = bound(waited, CHALLENGE_WINDOW, 100 days);
        uint256 amount = _execute();
        IContributionLedger.OutcomeProof memory outcome = _prove(_batchId, _records, 0);
        vm.warp(block.timestamp + waited);
        vm.expectEmit(address(ledger));
        emit IContributionLedgerEvents.FraudFinalised(_batchId, _offence(1, 0), _leaf(_batchId, 0, _records[0]));
        vm.prank(caller);
        ledger.finaliseFraud(outcome);
        uint256 insured = amount * INSURANCE_PPM / PPM;
        assertEq(token.balanceOf(insurance), insured, "insured");
        assertEq(token.totalSupply(), SUPPLY - (amount - insured), "burned");
    }
}
