// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {ContributionLedger} from "../../src/ContributionLedger.sol";
import {WorkerRegistry} from "../../src/WorkerRegistry.sol";
import {IContributionLedger, IContributionLedgerErrors} from "../../src/interfaces/IContributionLedger.sol";
import {IDisputeCourtErrors} from "../../src/interfaces/IDisputeCourt.sol";
import {IFaultCourt} from "../../src/interfaces/IFaultCourt.sol";
import {IRunRegistryErrors} from "../../src/interfaces/IRunRegistry.sol";
import {IStakeVault, IStakeVaultErrors} from "../../src/interfaces/IStakeVault.sol";
import {IWorkerRegistry, IWorkerRegistryErrors} from "../../src/interfaces/IWorkerRegistry.sol";
import {CourtTest} from "../CourtTest.sol";

/// @dev A worker that is a contract, so that it can do several things in one transaction.
contract ScriptedWorker {
    function run(address[] calldata targets, bytes[] calldata calls) external {
        for (uint256 i = 0; i < targets.length; ++i) {
            (bool success, bytes memory returned) = targets[i].call(calls[i]);
            if (success) continue;
            // Passes the reason of the failed call on.
            assembly ("memory-safe") {
                revert(add(returned, 32), mload(returned))
            }
        }
    }
}

/// @title Attacks on stake and signatures that must fail
/// @notice D: defects reproduced in the reference protocol; A: attacks on decentralised training. docs/security.md
///         lists them with these names.
contract AttacksOnStakeTest is CourtTest {
    // ------------------------------------------------ D1: slashed, yet still working

    /// @dev A slash never takes more than there is, and who has too little left cannot submit.
    function testFuzz_attack_D1_overslashedWorkerKeepsWorking(uint256 ppm) public {
        ppm = bound(ppm, 1, PPM);
        vm.prank(address(ledger));
        uint256 amount = vault.slash(alice, ppm, "offence", address(0));
        assertLe(amount, REQUIRED_STAKE, "never more than there is");
        IContributionLedger.Submission memory submission = _submission(alice, 2, 0);
        bytes memory signature = _signSubmission(submission, aliceNodeKey);
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidSubmission.selector, alice, aliceNode)
        );
        vm.prank(alice);
        ledger.submitDirect(submission, signature);
    }

    /// @dev However much stake, a worker cannot have more in flight than it covers.
    function testFuzz_attack_D1_unitsWithoutStakeBehindThem(uint256 units) public {
        uint256 cap = REQUIRED_STAKE / STAKE_PER_UNIT;
        units = bound(units, cap + 1, type(uint32).max);
        IContributionLedger.Submission memory submission = _submission(alice, 2, 0);
        submission.units = uint64(units);
        bytes memory signature = _signSubmission(submission, aliceNodeKey);
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerUnitCap.selector, alice, units, cap));
        vm.prank(alice);
        ledger.submitDirect(submission, signature);
    }

    // -------------------------------------------- D4: a replaced key keeps its power

    function testFuzz_attack_D4_replacedValidatorStillSigns(uint256 which) public {
        which = bound(which, 0, 1);
        _deposit(stranger, REQUIRED_VALIDATOR_STAKE);
        vm.prank(owner);
        runs.rotateValidator(runId, validators[which], stranger);
        uint64 batchId = _commit(1);
        bytes memory joined = _record(bob, 2, 0, ACCEPTED);
        bytes memory signatures = _signOutcomes(batchId, joined, 2);
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidSigner.selector, validators[which])
        );
        ledger.postOutcomes(batches[batchId], joined, signatures);
    }

    function test_attack_D4_replacedTrainerAndOrchestratorStillAct() public {
        vm.startPrank(owner);
        runs.rotateTrainer(runId, trainer, stranger);
        runs.rotateOrchestrator(runId, orchestrator, stranger);
        vm.stopPrank();
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunUnauthorized.selector, runId, trainer));
        vm.prank(trainer);
        runs.publishCheckpoint(runId, 1, "root");
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerUnauthorized.selector, orchestrator));
        vm.prank(orchestrator);
        ledger.commitBatch(runId, "root", 1, 1);
    }

    // --------------------------------------------- D5: leaving makes punishment fail

    /// @dev Neither a new node nor leaving protects from what the old node signed.
    function testFuzz_attack_D5_leavingBlocksPunishment(bool rotates, bool exits) public {
        if (rotates) {
            (address node, uint256 nodeKey) = makeAddrAndKey("another node");
            bytes memory consent = _consent(alice, node, nodeKey, block.timestamp);
            vm.prank(alice);
            workers.rotateNode(node, block.timestamp, consent);
        }
        if (exits) {
            vm.prank(alice);
            workers.exit();
        }
        assertEq(_execute(alice, ALICE_FRAUD, aliceNodeKey), REQUIRED_STAKE * FRAUD_PPM / PPM, "slashed all the same");
        assertEq(workers.workerOf(alice).convictions, 1, "convicted");
    }

    // ---------------------------------------- D6: a slash locks what it did not take

    function testFuzz_attack_D6_slashLocksMaturedStake(uint256 first, uint256 second, uint256 ppm) public {
        first = bound(first, 1 ether, 100 ether);
        second = bound(second, 1 ether, 100 ether);
        ppm = bound(ppm, 0, PPM - 1);
        _deposit(stranger, first + second);
        vm.startPrank(stranger);
        vault.requestUnbond(first);
        vm.warp(block.timestamp + UNBONDING_PERIOD);
        vm.stopPrank();
        vm.prank(address(ledger));
        vault.slash(stranger, ppm, "offence", address(0));
        uint256 left = vault.accountOf(stranger).unbonding;
        uint256 before = token.balanceOf(stranger);
        vm.prank(stranger);
        assertEq(vault.withdraw(), left, "the rest is withdrawable");
        assertEq(token.balanceOf(stranger), before + left, "paid");
    }

    // ------------------------------------------------- D7: slashes that pay the judge

    /// @dev A final fraud pays nobody who found it: not the validators, not the caller.
    function testFuzz_attack_D7_judgeIsPaidForSlashing(uint256 who) public {
        address judge = validators[who % 5];
        uint256 before = token.balanceOf(judge);
        IContributionLedger.Submission memory submission = _submission(alice, 1, 0);
        bytes memory signature = _signSubmission(submission, aliceNodeKey);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        vm.startPrank(judge);
        ledger.executeFraud(outcome, submission, signature);
        vm.warp(block.timestamp + CHALLENGE_WINDOW);
        ledger.finaliseFraud(outcome);
        vm.stopPrank();
        assertEq(token.balanceOf(judge), before, "gains nothing");
        assertEq(token.balanceOf(address(ledger)), 0, "nor does the ledger");
    }

    // --------------------------------------------------- D9: signatures given blindly

    /// @dev A key that signs any text a peer sends signs nothing that the contracts take.
    function testFuzz_attack_D9_signedTextPassesForASubmission(uint256 which) public view {
        IContributionLedger.Submission memory submission = _submission(alice, 2, 0);
        bytes32 structHash = _submissionHash(submission);
        bytes32 digest = keccak256(bytes.concat(hex"1901", ledger.DOMAIN_SEPARATOR(), structHash));
        bytes32[3] memory texts = [structHash, digest, keccak256(abi.encode(submission))];
        bytes32 text = texts[which % 3];
        bytes32 prefixed = keccak256(abi.encodePacked("\x19Ethereum Signed Message:\n32", text));
        (uint8 v, bytes32 r, bytes32 s) = vm.sign(aliceNodeKey, prefixed);
        address signer = ledger.submissionSigner(submission, bytes.concat(r, s, bytes1(v)));
        assertTrue(signer != aliceNode, "a text is no submission");
    }

    /// @dev A consent is no submission, a submission no consent, and outcomes are neither.
    function test_attack_D9_oneTypePassesForAnother() public {
        IContributionLedger.Submission memory submission = _submission(alice, 2, 0);
        bytes memory consent = _consent(bob, aliceNode, aliceNodeKey, block.timestamp);
        assertTrue(ledger.submissionSigner(submission, consent) != aliceNode, "a consent is no submission");
        bytes memory signed = _signSubmission(submission, validatorKeys[0]);
        IContributionLedger.Outcomes memory outcomes = IContributionLedger.Outcomes(_batchId, "root", "records");
        assertTrue(ledger.outcomesSigner(outcomes, signed) != validators[0], "a submission is no outcome");
        vm.expectPartialRevert(IWorkerRegistryErrors.RegistryInvalidNodeSignature.selector);
        vm.prank(bob);
        workers.rotateNode(validators[0], block.timestamp, signed);
    }

    // ----------------------------------------------------------------- A11: front-run

    /// @dev Who sees a worker's submission in the pool cannot send it first, for itself or for the worker.
    function testFuzz_attack_A11_submissionIsFrontRun(address thief) public {
        vm.assume(thief != alice && thief != aliceNode);
        IContributionLedger.Submission memory submission = _submission(alice, 2, 0);
        bytes memory signature = _signSubmission(submission, aliceNodeKey);
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerUnauthorized.selector, thief));
        vm.prank(thief);
        ledger.submitDirect(submission, signature);
        submission.worker = bob;
        vm.expectPartialRevert(IContributionLedgerErrors.LedgerInvalidSubmission.selector);
        vm.prank(bob);
        ledger.submitDirect(submission, signature);
    }

    function testFuzz_attack_A11_consentIsFrontRun(address thief) public {
        (address node, uint256 nodeKey) = makeAddrAndKey("carol's node");
        address carol = makeAddr("carol");
        vm.assume(thief != carol && workers.workerOf(thief).status == IWorkerRegistry.Status.None);
        bytes memory consent = _consent(carol, node, nodeKey, block.timestamp);
        vm.expectPartialRevert(IWorkerRegistryErrors.RegistryInvalidNodeSignature.selector);
        vm.prank(thief);
        workers.register(0, node, block.timestamp, consent);
    }

    /// @dev Who copies a challenge puts up the bond itself; the first challenger keeps its own.
    function test_attack_A11_challengeIsFrontRun() public {
        _challengeBy(stranger, ALICE_FRAUD, ACCEPTED);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtCaseExists.selector, _fraudLeaf));
        vm.prank(challenger);
        court.challenge(outcome, ACCEPTED);
        assertEq(token.balanceOf(challenger), WALLET, "nothing lost");
        assertEq(token.balanceOf(stranger), WALLET - CHALLENGE_BOND, "the copy pays");
    }

    // -------------------------------------------------- A26: extortion by accusation

    /// @dev What the accusers own: in their wallets and in the vault.
    function _wealth(address[] memory accounts) private view returns (uint256 sum) {
        for (uint256 i = 0; i < accounts.length; ++i) {
            IStakeVault.Account memory held = vault.accountOf(accounts[i]);
            sum += token.balanceOf(accounts[i]) + held.active + held.unbonding;
        }
    }

    /// @dev The signers of the false verdict, and an accomplice that executes, challenges and reports.
    function _gang() private view returns (address[] memory accounts) {
        accounts = new address[](3);
        (accounts[0], accounts[1], accounts[2]) = (validators[0], validators[1], challenger);
    }

    /// @dev Nobody resists: the accused loses, and the accusers gain nothing by it.
    function testFuzz_attack_A26_accusersProfit_whenNobodyResists(uint256 who) public {
        uint256 before = _wealth(_gang());
        IContributionLedger.Submission memory submission = _submission(alice, 1, 0);
        bytes memory signature = _signSubmission(submission, aliceNodeKey);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        vm.startPrank(_gang()[who % 3]);
        ledger.executeFraud(outcome, submission, signature);
        vm.warp(block.timestamp + CHALLENGE_WINDOW);
        ledger.finaliseFraud(outcome);
        vm.stopPrank();
        assertLe(_wealth(_gang()), before, "profit is at most zero");
    }

    /// @dev The accused challenges: it is made whole, and the accusers pay.
    function test_attack_A26_accusersProfit_whenTheAccusedChallenges() public {
        uint256 before = _wealth(_gang());
        vm.prank(alice);
        token.approve(address(court), type(uint256).max);
        _execute(alice, ALICE_FRAUD, aliceNodeKey);
        _challengeBy(alice, ALICE_FRAUD, ACCEPTED);
        _drawJury(ALICE_FRAUD);
        _voteAll(_fraudLeaf, true, true, true);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        court.close(outcome);
        faults.slashSigner(outcome, validators[0]);
        faults.slashSigner(outcome, validators[1]);
        assertEq(vault.activeStake(alice), REQUIRED_STAKE, "made whole");
        assertGe(token.balanceOf(alice), WALLET - REQUIRED_STAKE, "and the bond is back, with a reward");
        assertLt(_wealth(_gang()), before, "the accusers pay");
    }

    /// @dev The gang challenges its own false verdict to be rewarded for its own fall.
    function test_attack_A26_accusersProfit_whenTheyChallengeThemselves() public {
        uint256 before = _wealth(_gang());
        _decide(ALICE_FRAUD, ACCEPTED, true);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        faults.slashSigner(outcome, validators[0]);
        faults.slashSigner(outcome, validators[1]);
        assertLt(_wealth(_gang()), before, "a reward is a part of the slash");
    }

    /// @dev A false challenge of honest work costs its bond.
    function test_attack_A26_challengerProfits_byAccusingHonestWork() public {
        uint256 before = _wealth(_gang());
        _decide(BOB_ACCEPTED, FRAUD, false);
        assertEq(_wealth(_gang()), before - CHALLENGE_BOND, "the bond is burned");
        _passChallengeWindow();
        assertEq(_claim(_batchId, _records, 1, 2), 1000 * uint256(PRICE), "and the work is paid");
    }

    // ---------------------------------------------------- A27: unstake before a slash

    /// @dev Work committed at any second before its worker asks for its stake is judged, disputed and slashed at the
    ///      latest possible times, and the stake is still there.
    function testFuzz_attack_A27_stakeLeavesBeforeTheLatestVerdict(uint256 early) public {
        uint64 batchId = _commit(1);
        uint256 committedAt = block.timestamp;
        // Often in the second of the commitment, which is the worst.
        vm.warp(committedAt + (early % 2 == 0 ? 0 : bound(early, 0, OUTCOME_DEADLINE - 1)));
        vm.prank(alice);
        workers.exit();
        vm.warp(committedAt + OUTCOME_DEADLINE - 1);
        _records = _one(_record(alice, 1, 0, ACCEPTED));
        _batchId = batchId;
        _post(batchId, _records, QUORUM);
        bytes32 leaf = _leaf(batchId, 0, _records[0]);
        vm.warp(committedAt + OUTCOME_DEADLINE - 1 + CHALLENGE_WINDOW - 1);
        _challengeAndDraw(0, FRAUD);
        for (uint256 i = 2; i < 5; ++i) {
            _commitVote(leaf, validators[i], true);
        }
        vm.warp(block.timestamp + JURY_TIME - 1);
        for (uint256 i = 2; i < 5; ++i) {
            _revealVote(leaf, validators[i], true);
        }
        vm.expectPartialRevert(IStakeVaultErrors.VaultNotWithdrawable.selector);
        vm.prank(alice);
        vault.withdraw();
        court.close(_outcomeAt(0));
        assertEq(_execute(alice, 0, aliceNodeKey), REQUIRED_STAKE * FRAUD_PPM / PPM, "slashed from what is leaving");
    }

    /// @dev Closes the case against itself and withdraws in one transaction, before anybody can execute the fraud.
    function test_attack_A27_closeAndWithdrawInOneTransaction() public {
        ScriptedWorker worker = _leavingWorkerInCourt();
        address[] memory targets = new address[](2);
        bytes[] memory calls = new bytes[](2);
        (targets[0], calls[0]) = (address(court), abi.encodeCall(court.close, (_outcomeAt(0))));
        (targets[1], calls[1]) = (address(vault), abi.encodeCall(vault.withdraw, ()));
        uint256 heldUntil = block.timestamp + CHALLENGE_WINDOW + SLASH_PAUSE;
        vm.expectRevert(
            abi.encodeWithSelector(IStakeVaultErrors.VaultStakeHeld.selector, address(worker), 0, heldUntil)
        );
        worker.run(targets, calls);

        court.close(_outcomeAt(0));
        uint256 amount = _execute(address(worker), 0, bobNodeKey + 1);
        assertEq(amount, REQUIRED_STAKE * FRAUD_PPM / PPM, "slashed");
    }

    /// @dev A worker whose stake is due, with a decided but open case that makes it a fraud.
    function _leavingWorkerInCourt() private returns (ScriptedWorker worker) {
        worker = new ScriptedWorker();
        address node = vm.addr(bobNodeKey + 1);
        vm.prank(stranger);
        vault.deposit(address(worker), REQUIRED_STAKE);
        _register(address(worker), node, bobNodeKey + 1, 0);
        vm.prank(address(worker));
        workers.exit();
        vm.warp(block.timestamp + UNBONDING_PERIOD - 1 hours);
        _judge(_one(_record(address(worker), 1, 0, ACCEPTED)), QUORUM);
        _challengeAndDraw(0, FRAUD);
        _voteAll(_fraudLeaf, true, true, true);
        vm.warp(block.timestamp + 1 hours);
    }

    /// @dev Stake held by one case after the other is free after one more unbonding period: no hostage for ever.
    function testFuzz_attack_A27_stakeIsHeldHostage(uint256 cases) public {
        cases = bound(cases, 1, 10);
        vm.prank(bob);
        workers.exit();
        uint256 due = block.timestamp + UNBONDING_PERIOD;
        for (uint256 i = 0; i < cases; ++i) {
            vm.prank(address(court));
            vault.openCase(bob);
        }
        vm.warp(due + UNBONDING_PERIOD);
        vm.prank(bob);
        assertEq(vault.withdraw(), REQUIRED_STAKE, "all of it");
    }

    // --------------------------------------------------------------- A29: replays

    function testFuzz_attack_A29_signatureOfAnotherChain(uint64 chainId) public {
        vm.assume(chainId != block.chainid && chainId != 0);
        IContributionLedger.Submission memory submission = _submission(alice, 2, 0);
        bytes memory signature = _signSubmission(submission, aliceNodeKey);
        bytes memory consent = _consent(alice, stranger, aliceNodeKey, block.timestamp);
        bytes memory outcomes = _signOutcomes(_batchId, "records", 1);
        vm.chainId(chainId);
        assertTrue(ledger.submissionSigner(submission, signature) != aliceNode, "submission");
        IContributionLedger.Outcomes memory signed =
            IContributionLedger.Outcomes(_batchId, batches[_batchId].root, keccak256("records"));
        assertTrue(ledger.outcomesSigner(signed, outcomes) != validators[0], "outcomes");
        vm.expectPartialRevert(IWorkerRegistryErrors.RegistryInvalidNodeSignature.selector);
        vm.prank(alice);
        workers.rotateNode(stranger, block.timestamp, consent);
    }

    function test_attack_A29_signatureForAnotherContract() public {
        ContributionLedger other = new ContributionLedger(
            ContributionLedger.Network(runs, workers, vault, court, escrow),
            CHALLENGE_WINDOW,
            OUTCOME_DEADLINE,
            STAKE_PER_UNIT
        );
        IContributionLedger.Submission memory submission = _submission(alice, 2, 0);
        bytes memory signature = _signSubmission(submission, aliceNodeKey);
        assertEq(ledger.submissionSigner(submission, signature), aliceNode, "here");
        assertTrue(other.submissionSigner(submission, signature) != aliceNode, "not there");
        WorkerRegistry otherWorkers = new WorkerRegistry(
            token, vault, address(ledger), address(court), address(faults), 0, ACTIVATION_DELAY, JAIL_TIME
        );
        (address node, uint256 nodeKey) = makeAddrAndKey("carol's node");
        bytes memory consent = _consent(stranger, node, nodeKey, block.timestamp);
        vm.expectPartialRevert(IWorkerRegistryErrors.RegistryInvalidNodeSignature.selector);
        vm.prank(stranger);
        otherWorkers.register(0, node, block.timestamp, consent);
    }

    function testFuzz_attack_A29_outcomesOfAnotherBatch(uint256 count) public {
        count = bound(count, 1, 3);
        bytes memory joined = _join(_accepted(count));
        uint64 first = _commit(count);
        bytes memory signatures = _signOutcomes(first, joined, QUORUM);
        uint64 second = _commit(count);
        vm.expectPartialRevert(IContributionLedgerErrors.LedgerInvalidSigner.selector);
        ledger.postOutcomes(batches[second], joined, signatures);
        ledger.postOutcomes(batches[first], joined, signatures);
        IContributionLedger.Batch memory stale = batches[first];
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerBatchMismatch.selector, first));
        ledger.postOutcomes(stale, joined, signatures);
    }

    function test_attack_A29_consentIsUsedTwice() public {
        (address node, uint256 nodeKey) = makeAddrAndKey("second node");
        bytes memory consent = _consent(alice, node, nodeKey, type(uint256).max);
        vm.startPrank(alice);
        workers.rotateNode(node, type(uint256).max, consent);
        vm.expectRevert(abi.encodeWithSelector(IWorkerRegistryErrors.RegistryNodeTaken.selector, node, alice));
        workers.rotateNode(node, type(uint256).max, consent);
        vm.stopPrank();
    }

    function test_attack_A29_submissionIsUsedTwice() public {
        IContributionLedger.Submission memory submission = _submission(alice, 2, 0);
        bytes memory signature = _signSubmission(submission, aliceNodeKey);
        vm.startPrank(alice);
        ledger.submitDirect(submission, signature);
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerSlotUsed.selector, runId, alice, 2, 0));
        ledger.submitDirect(submission, signature);
    }

    // ------------------------------------------------------- a jury that is picked

    /// @dev Whoever draws first deposits a little to somebody's stake to get the jury it wants. Twelve may sit.
    function testFuzz_attack_juryIsGroundByDeposits(uint256 hash_, uint256 who, uint256 wei_) public {
        vm.assume(hash_ != 0);
        _crowd();
        _challenge(ALICE_FRAUD, ACCEPTED);
        uint256 drawBlock = block.number + DRAW_DELAY;
        vm.roll(drawBlock + 1);
        vm.setBlockhash(drawBlock, bytes32(hash_));
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        uint256 snapshot = vm.snapshotState();
        court.drawJury(outcome);
        uint256 honest = court.caseOf(_fraudLeaf).jury;
        vm.revertToState(snapshot);

        (address[] memory accounts,) = runs.validatorsOf(runId);
        vm.prank(stranger);
        vault.deposit(accounts[who % accounts.length], bound(wei_, 1, 1_000_000));
        court.drawJury(outcome);
        assertEq(court.caseOf(_fraudLeaf).jury, honest, "the same jury");
    }

    function _crowd() private {
        for (uint256 i = 0; i < 9; ++i) {
            address account = makeAddr(string.concat("crowd ", vm.toString(i)));
            vm.prank(stranger);
            vault.deposit(account, REQUIRED_VALIDATOR_STAKE);
            vm.prank(owner);
            runs.seatValidator(runId, account);
        }
    }

    /// @dev A jury drawn when it is too late to vote would be slashed for its absence, to the profit of who drew it.
    function testFuzz_attack_juryIsDrawnTooLateToVote(uint256 waited) public {
        _challenge(ALICE_FRAUD, ACCEPTED);
        _passDraw();
        uint256 endsAt = block.timestamp + COMMIT_TIME / 2;
        vm.warp(block.timestamp + bound(waited, COMMIT_TIME / 2, COMMIT_TIME - 1));
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        _expectPhaseOver(_fraudLeaf, endsAt);
        court.drawJury(outcome);
    }

    /// @dev A juror that waits to see another's vote sees only a hash.
    function test_attack_jurorCopiesAnothersVote() public {
        _challengeAndDraw(ALICE_FRAUD, ACCEPTED);
        bytes32 seen = _commitment(_fraudLeaf, validators[2], true);
        vm.prank(validators[2]);
        court.commitVote(_fraudLeaf, seen);
        vm.prank(validators[3]);
        court.commitVote(_fraudLeaf, seen);
        vm.warp(block.timestamp + COMMIT_TIME);
        _revealVote(_fraudLeaf, validators[2], true);
        _expectVoteMismatch(_fraudLeaf, validators[3]);
        _revealVote(_fraudLeaf, validators[3], true);
        vm.warp(block.timestamp + REVEAL_TIME);
        court.close(_outcomeAt(ALICE_FRAUD));
        bytes32 offence = keccak256(abi.encode(IFaultCourt.Fault.AbsentJuror, _fraudLeaf, validators[3]));
        faults.slashAbsentJuror(_fraudLeaf, validators[3]);
        assertGt(vault.escrowOf(offence).amount, 0, "and pays for its absence");
    }
}
