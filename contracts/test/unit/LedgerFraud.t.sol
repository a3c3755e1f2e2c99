// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {
    IContributionLedger,
    IContributionLedgerErrors,
    IContributionLedgerEvents
} from "../../src/interfaces/IContributionLedger.sol";
import {IStakeVaultErrors} from "../../src/interfaces/IStakeVault.sol";
import {IWorkerRegistry} from "../../src/interfaces/IWorkerRegistry.sol";
import {BaseTest} from "../BaseTest.sol";

contract LedgerFraudTest is BaseTest {
    bytes[] private _records;
    uint64 private _batchId;

    function setUp() public override {
        super.setUp();
        _startRun(0);
        _records = _two(_record(alice, 1, 0, FRAUD), _record(bob, 1, 0, ACCEPTED));
        _batchId = _commitAndPost(_records);
    }

    function _execute() private returns (uint256) {
        IContributionLedger.Submission memory submission = _submission(alice, 1, 0);
        return ledger.executeFraud(_prove(_batchId, _records, 0), submission, _signSubmission(submission, aliceNodeKey));
    }

    // ------------------------------------------------------------------ execute

    function testFuzz_executeFraud_reverts_whenVerdictIsNotFraud(uint8 verdict) public {
        verdict = uint8(bound(verdict, ACCEPTED, REJECTED));
        bytes[] memory records = _one(_record(alice, 2, 0, verdict));
        uint64 batchId = _commitAndPost(records);
        IContributionLedger.Submission memory submission = _submission(alice, 2, 0);
        bytes memory signature = _signSubmission(submission, aliceNodeKey);
        IContributionLedger.OutcomeProof memory outcome = _prove(batchId, records, 0);
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerNotFraud.selector, batchId, 0, verdict));
        ledger.executeFraud(outcome, submission, signature);
    }

    function testFuzz_executeFraud_reverts_whenProofIsBroken(bytes32 sibling) public {
        IContributionLedger.OutcomeProof memory outcome = _prove(_batchId, _records, 0);
        vm.assume(sibling != outcome.proof[0]);
        outcome.proof[0] = sibling;
        IContributionLedger.Submission memory submission = _submission(alice, 1, 0);
        bytes memory signature = _signSubmission(submission, aliceNodeKey);
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidProof.selector, _batchId, 0));
        ledger.executeFraud(outcome, submission, signature);
    }

    function testFuzz_executeFraud_reverts_whenTheWorkerNeverSigned(uint256 key) public {
        key = bound(key, 1, 1 << 200);
        vm.assume(key != aliceNodeKey);
        IContributionLedger.Submission memory submission = _submission(alice, 1, 0);
        bytes memory signature = _signSubmission(submission, key);
        _expectInvalidEvidence(submission, signature, vm.addr(key));
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

    function test_executeFraud_reverts_twice() public {
        _execute();
        IContributionLedger.Submission memory submission = _submission(alice, 1, 0);
        bytes memory signature = _signSubmission(submission, aliceNodeKey);
        IContributionLedger.OutcomeProof memory outcome = _prove(_batchId, _records, 0);
        vm.expectRevert(
            abi.encodeWithSelector(IStakeVaultErrors.VaultOffenceSettled.selector, _leaf(_batchId, 0, _records[0]))
        );
        ledger.executeFraud(outcome, submission, signature);
    }

    function testFuzz_executeFraud_slashesAndBansAtOnce(address caller, uint256 extra, uint256 unbonding) public {
        extra = bound(extra, 1, WALLET - REQUIRED_STAKE);
        unbonding = bound(unbonding, 1, extra);
        _deposit(alice, extra);
        vm.prank(alice);
        vault.requestUnbond(unbonding);
        (uint256 active,) = _stake(alice);
        bytes32 leaf = _leaf(_batchId, 0, _records[0]);
        uint256 expected = _ceil(active * FRAUD_PPM) + _ceil(unbonding * FRAUD_PPM);
        IContributionLedger.Submission memory submission = _submission(alice, 1, 0);
        bytes memory signature = _signSubmission(submission, aliceNodeKey);
        IContributionLedger.OutcomeProof memory outcome = _prove(_batchId, _records, 0);

        vm.expectEmit(address(ledger));
        emit IContributionLedgerEvents.FraudExecuted(_batchId, alice, leaf, 0, expected);
        vm.prank(caller);
        assertEq(ledger.executeFraud(outcome, submission, signature), expected, "amount");

        _assertStatus(alice, IWorkerRegistry.Status.Banned, "ejected");
        assertEq(vault.escrowOf(leaf).amount, expected, "in escrow");
        assertEq(vault.escrowOf(leaf).reporter, address(0), "a verdict of the judges has no reporter");
        assertEq(vault.activeStake(bob), REQUIRED_STAKE, "nobody else is touched");
    }

    function _ceil(uint256 scaled) private pure returns (uint256) {
        return (scaled + PPM - 1) / PPM;
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
        _assertStatus(alice, IWorkerRegistry.Status.Banned, "banned");
    }

    function testFuzz_executeFraud_takesAShareOfWhatIsLeft_eachTime(uint256 offences) public {
        offences = bound(offences, 1, 8);
        bytes[] memory records = new bytes[](offences);
        for (uint256 i = 0; i < offences; ++i) {
            records[i] = _record(alice, 3, uint32(i), FRAUD);
        }
        uint64 batchId = _commitAndPost(records);
        uint256 left = REQUIRED_STAKE;
        for (uint256 i = 0; i < offences; ++i) {
            IContributionLedger.Submission memory submission = _submission(alice, 3, uint32(i));
            bytes memory signature = _signSubmission(submission, aliceNodeKey);
            left -= ledger.executeFraud(_prove(batchId, records, i), submission, signature);
            assertEq(vault.activeStake(alice), left, "what is left");
        }
        assertLe(left, REQUIRED_STAKE * 8 / 10, "at least one share was taken");
    }

    // ----------------------------------------------------------------- finalise

    function testFuzz_finaliseFraud_reverts_withinTheWindow(uint256 waited) public {
        waited = bound(waited, 0, CHALLENGE_WINDOW - 1);
        _execute();
        IContributionLedger.OutcomeProof memory outcome = _prove(_batchId, _records, 0);
        vm.warp(block.timestamp + waited);
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerNotFinal.selector, _batchId, 0));
        ledger.finaliseFraud(outcome);
    }

    function test_finaliseFraud_reverts_whenNotExecuted() public {
        _passChallengeWindow();
        IContributionLedger.OutcomeProof memory outcome = _prove(_batchId, _records, 0);
        vm.expectRevert(
            abi.encodeWithSelector(IStakeVaultErrors.VaultOffenceSettled.selector, _leaf(_batchId, 0, _records[0]))
        );
        ledger.finaliseFraud(outcome);
    }

    function test_finaliseFraud_reverts_twice() public {
        _execute();
        _passChallengeWindow();
        IContributionLedger.OutcomeProof memory outcome = _prove(_batchId, _records, 0);
        ledger.finaliseFraud(outcome);
        vm.expectPartialRevert(IStakeVaultErrors.VaultOffenceSettled.selector);
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
        emit IContributionLedgerEvents.FraudFinalised(_leaf(_batchId, 0, _records[0]));
        vm.prank(caller);
        ledger.finaliseFraud(outcome);
        uint256 insured = amount * INSURANCE_PPM / PPM;
        assertEq(token.balanceOf(insurance), insured, "insured");
        assertEq(token.totalSupply(), SUPPLY - (amount - insured), "burned");
    }
}
