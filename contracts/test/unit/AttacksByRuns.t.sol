// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {
    IContributionLedger,
    IContributionLedgerErrors,
    IContributionLedgerEvents
} from "../../src/interfaces/IContributionLedger.sol";
import {IDisputeCourtErrors} from "../../src/interfaces/IDisputeCourt.sol";
import {IFaultCourtErrors} from "../../src/interfaces/IFaultCourt.sol";
import {IRewardEscrow} from "../../src/interfaces/IRewardEscrow.sol";
import {IRunRegistry, IRunRegistryErrors} from "../../src/interfaces/IRunRegistry.sol";
import {IStakeVault} from "../../src/interfaces/IStakeVault.sol";
import {IWorkerRegistry, IWorkerRegistryErrors} from "../../src/interfaces/IWorkerRegistry.sol";
import {CourtTest} from "../CourtTest.sol";

/// @title Attacks by whoever owns a run, seats, workers and capital on the same contracts
/// @dev R1 to R15 succeeded on the contracts of version 0.1.0. Mallory owns the second run and everything in it.
contract AttacksByRunsTest is CourtTest {
    address internal mallory = makeAddr("mallory");
    address internal gangster;
    uint256 internal gangsterKey;
    uint256 internal malloryKey;
    uint64 internal theirRun;
    /// @dev The run that is honest, which `runId` of the stage means but for the steps within the other one.
    uint64 internal ourRun;

    function setUp() public override {
        super.setUp();
        (mallory, malloryKey) = makeAddrAndKey("mallory");
        (gangster, gangsterKey) = makeAddrAndKey("gangster");
        _enrich(mallory);
        _enrich(gangster);
        ourRun = runId;
        theirRun = _createTheirRun();
    }

    /// @dev A run whose owner, orchestrator, trainer and only validator are one gang.
    function _createTheirRun() private returns (uint64 run) {
        IRunRegistry.RunConfig memory config = _config();
        config.orchestrator = mallory;
        config.trainer = mallory;
        config.validators = new address[](1);
        config.validators[0] = gangster;
        config.terms.quorum = 1;
        vm.startPrank(mallory);
        run = runs.createRun(config);
        escrow.fund(run, WALLET / 4);
        vm.stopPrank();
        vm.prank(gangster);
        runs.takeSeat(run, 1, REQUIRED_VALIDATOR_STAKE);
    }

    /// @dev A batch of one record in the gang's run, judged by the gang.
    function _judgeInTheirRun(bytes memory record) private returns (uint64 batchId) {
        runId = theirRun;
        bytes32 root = _submissionLeaf(_submissionIn(record));
        vm.prank(mallory);
        batchId = ledger.commitBatch(theirRun, root, 1, 1000);
        _remember(batchId, root, 1, 1000);
        bytes[] memory records = _one(record);
        ledger.postOutcomes(
            batches[batchId], record, _sign(gangsterKey, ledger.DOMAIN_SEPARATOR(), _outcomesHash(batchId, record))
        );
        _rememberPosted(batchId, records, 0);
        batches[batchId].signers = runs.seatBitOf(theirRun, gangster);
        runId = ourRun;
    }

    function _joinTheirs(address worker, uint256 stake) private {
        _join(theirRun, worker, address(0), 0, stake);
    }

    /// @dev The gang convicts a worker of its run of an exact fraud, with the worker's own signature.
    function _convictInTheirRun(address worker, uint256 nodeKey) private returns (uint64 batchId, bytes memory record) {
        runId = theirRun;
        record = _pack(_exactFraud(worker));
        batchId = _judgeInTheirRun(record);
        runId = theirRun;
        IContributionLedger.Submission memory submission = _submission(worker, 1, 0);
        IContributionLedger.OutcomeProof memory outcome = _prove(batchId, _one(record), 0);
        ledger.executeFraud(outcome, _held(outcome, submission, _signSubmission(submission, nodeKey)));
        runId = ourRun;
    }

    function _exactFraud(address worker) private view returns (IContributionLedger.Outcome memory outcome) {
        outcome = _outcome(worker, 1, 0, FRAUD);
        outcome.reason = 30;
    }

    function _ours(address account) private view returns (uint256) {
        return vault.activeStake(ourRun, account);
    }

    // ------------------------------------------------- R1: consent, and silence

    function test_R1_nobody_is_seated_who_did_not_take_the_seat() public {
        vm.prank(mallory);
        runs.invite(theirRun, validators[0], true);
        assertFalse(runs.isValidator(theirRun, validators[0]), "an invitation is no seat");
        (address[] memory seated,) = runs.validatorsOf(theirRun);
        assertEq(seated.length, 1, "only the gang sits in its run");
    }

    function test_R1_silence_costs_no_validator_anything() public {
        vm.startPrank(mallory);
        for (uint256 i = 0; i < 20; ++i) {
            ledger.commitBatch(theirRun, keccak256(abi.encode(i)), 1, 1);
        }
        vm.stopPrank();
        vm.warp(block.timestamp + OUTCOME_DEADLINE + APPEAL_TIME);
        for (uint256 i = 0; i < 5; ++i) {
            assertEq(_ours(validators[i]), REQUIRED_VALIDATOR_STAKE, "stake of a validator of the other run");
        }
        assertEq(vault.activeStake(theirRun, gangster), REQUIRED_VALIDATOR_STAKE, "and of the silent one");
    }

    // ------------------------------------------ R2, R12: convictions of one run

    function test_R2_an_accomplice_cannot_shelter_stake_of_another_run() public {
        _joinTheirs(alice, REQUIRED_STAKE);
        _convictInTheirRun(alice, aliceNodeKey);
        assertEq(vault.activeStake(theirRun, alice), REQUIRED_STAKE / 2, "the gang took half of what is its");
        assertEq(_ours(alice), REQUIRED_STAKE, "nothing of ours");
        assertEq(_execute(alice, ALICE_FRAUD, aliceNodeKey), REQUIRED_STAKE * FRAUD_PPM / PPM, "the honest slash");
    }

    function test_R2_within_one_run_later_slashes_follow_the_stake_that_comes_back() public {
        _execute(alice, ALICE_FRAUD, aliceNodeKey);
        bytes memory second = _pack(_exactFraudAt(alice, 2));
        uint64 batchId = _commitAndPost(_one(second));
        IContributionLedger.Submission memory submission = _submission(alice, 2, 0);
        bytes memory signature = _signSubmission(submission, aliceNodeKey);
        IContributionLedger.OutcomeProof memory outcome = _prove(batchId, _one(second), 0);
        ledger.executeFraud(outcome, _held(outcome, submission, signature));
        assertEq(_ours(alice), 450 ether, "a tenth, and half of the rest");
        _decide(ALICE_FRAUD, ACCEPT, ACCEPT);
        assertEq(_ours(alice), 500 ether, "half of all, as if the first slash had never been");
    }

    function _exactFraudAt(address worker, uint32 step)
        private
        view
        returns (IContributionLedger.Outcome memory outcome)
    {
        outcome = _outcome(worker, step, 0, FRAUD);
        outcome.reason = 30;
    }

    function test_R12_a_ban_in_one_run_is_none_in_another() public {
        _joinTheirs(bob, REQUIRED_STAKE);
        _convictInTheirRun(bob, bobNodeKey);
        assertEq(uint8(workers.statusOf(theirRun, bob)), uint8(IWorkerRegistry.Status.Banned), "banned by the gang");
        assertTrue(workers.isActive(ourRun, bob), "active with us");
    }

    function test_R12_who_joined_no_run_cannot_be_convicted_in_it() public {
        bytes memory record = _packFor(theirRun, _exactFraud(bob));
        uint64 batchId = _judgeInTheirRun(record);
        runId = theirRun;
        IContributionLedger.Submission memory submission = _submission(bob, 1, 0);
        bytes memory signature = _signSubmission(submission, bobNodeKey);
        IContributionLedger.OutcomeProof memory outcome = _prove(batchId, _one(record), 0);
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidSubmission.selector, bob, bobNode)
        );
        ledger.executeFraud(outcome, _held(outcome, submission, signature));
    }

    function _packFor(uint64, IContributionLedger.Outcome memory outcome) private pure returns (bytes memory) {
        return _pack(outcome);
    }

    // ------------------------------------------------ R3, R8: silence pays nobody

    function test_R3_direct_work_that_nobody_judged_is_void_and_not_paid() public {
        uint256 funds = escrow.fundsOf(ourRun).available;
        IContributionLedger.LeasedWork memory work =
            _work(_submission(alice, 7, 0), aliceNodeKey, block.timestamp + 1 hours);
        vm.prank(alice);
        uint64 batchId = ledger.submitDirect(work, _noSources());
        _remember(batchId, _submissionLeaf(work.submission), 1, 1000);
        vm.warp(block.timestamp + OUTCOME_DEADLINE + APPEAL_TIME);
        ledger.voidBatch(batches[batchId]);
        assertEq(escrow.fundsOf(ourRun).available, funds, "the run has its money again");
        bytes[] memory records = _one(_record(alice, 7, 0, ACCEPTED));
        IRewardEscrow.Claim[] memory claims = new IRewardEscrow.Claim[](1);
        claims[0] = _claimOf(batchId, records, _range(0, 1));
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerBatchMismatch.selector, batchId));
        escrow.claim(claims);
    }

    function test_R8_a_withheld_batch_of_invented_work_costs_the_run_nothing() public {
        uint256 funds = escrow.fundsOf(ourRun).available;
        uint64 batchId = _commitRoot(keccak256("invented"), 4096, 4_000_000);
        bytes memory signatures = _signOutcomes(batchId, "", QUORUM);
        ledger.postOutcomes(batches[batchId], "", signatures);
        batches[batchId].postedAt = uint40(block.timestamp);
        batches[batchId].status = IContributionLedger.BatchStatus.Withheld;
        batches[batchId].signers = runs.seatBitOf(ourRun, validators[0]) | runs.seatBitOf(ourRun, validators[1]);
        vm.warp(block.timestamp + APPEAL_TIME);
        ledger.voidBatch(batches[batchId]);
        assertEq(escrow.fundsOf(ourRun).available, funds, "the run has its money again");
    }

    // ------------------------------------- R4, R5: jurors vote a verdict, not a claim

    function test_R4_a_wrong_first_claim_does_not_keep_the_right_verdict_out() public {
        _execute(alice, ALICE_FRAUD, aliceNodeKey);
        _claimBy(mallory, ALICE_FRAUD, REJECT);
        _draw(_fraudLeaf);
        _voteAll(_fraudLeaf, ACCEPT, ACCEPT, ACCEPT);
        court.settle(_outcomeAt(ALICE_FRAUD));
        assertEq(_ours(alice), REQUIRED_STAKE, "the honest worker has its stake again");
        assertEq(token.balanceOf(mallory), WALLET - WALLET / 4 - BOND, "whoever claimed otherwise paid");
    }

    function test_R5_a_wrong_claim_about_the_own_fraud_does_not_protect_it() public {
        _claimBy(bob, BOB_ACCEPTED, REJECT);
        _draw(_acceptedLeaf);
        _voteAll(_acceptedLeaf, STATISTICAL, STATISTICAL, STATISTICAL);
        court.settle(_outcomeAt(BOB_ACCEPTED));
        assertEq(
            _execute(bob, BOB_ACCEPTED, bobNodeKey), REQUIRED_STAKE * FRAUD_PPM / PPM, "the fraud costs its worker"
        );
    }

    // ----------------------------------------------- R6: an escrow is of one outcome

    function test_R6_a_case_about_another_batch_of_the_file_restores_nothing() public {
        _execute(alice, ALICE_FRAUD, aliceNodeKey);
        uint256 after_ = _ours(alice);
        _judge(_one(_record(alice, 1, 0, FRAUD)), QUORUM);
        _decide(0, REJECT, REJECT);
        assertEq(_ours(alice), after_, "the first conviction stands");
        assertEq(
            uint8(vault.escrowOf(_escrowId(alice, IStakeVault.Offence.Fraud, 1, 0)).status),
            uint8(IStakeVault.EscrowStatus.Held),
            "its escrow is held"
        );
    }

    // ----------------------------------- R7: nobody pays for what could not be had

    function test_R7_signers_of_unavailable_pay_nothing_when_jurors_are_shown_the_file() public {
        IContributionLedger.Outcome memory hidden = _outcome(alice, 1, 0, REJECTED);
        hidden.reason = UNAVAILABLE;
        _judge(_one(_pack(hidden)), QUORUM);
        _decide(0, ACCEPT, ACCEPT);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(0);
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtNothingDue.selector, _fraudLeaf, validators[0]));
        court.fineSigner(outcome, validators[0]);
    }

    /// @dev Validators were shown no ticket, or an earlier batch with the slot, or not that batch; jurors were.
    function test_R7_signers_pay_nothing_for_what_they_were_shown() public {
        uint16[2][3] memory rulings = [[uint16(0x030c), ACCEPT], [uint16(0x030e), ACCEPT], [ACCEPT, uint16(0x030e)]];
        for (uint256 i = 0; i < rulings.length; ++i) {
            IContributionLedger.Outcome memory shown = _outcome(alice, 1, 0, uint8(rulings[i][0] >> 8));
            shown.reason = uint8(rulings[i][0]);
            _judge(_one(_pack(shown)), QUORUM);
            _decide(0, rulings[i][1], rulings[i][1]);
            IContributionLedger.OutcomeProof memory outcome = _outcomeAt(0);
            vm.expectRevert(
                abi.encodeWithSelector(IDisputeCourtErrors.CourtNothingDue.selector, _fraudLeaf, validators[0])
            );
            court.fineSigner(outcome, validators[0]);
        }
    }

    // ------------------------------------------- R9: keys, and where they signed

    function test_R9_a_key_that_was_rotated_away_before_the_commitment_proves_nothing() public {
        (address fresh, uint256 freshKey) = makeAddrAndKey("fresh node");
        IWorkerRegistry.NodeConsent memory consent = _nodeConsent(alice, fresh, freshKey, block.timestamp);
        vm.prank(alice);
        workers.rotateNode(consent);
        vm.warp(block.timestamp + 1);
        bytes memory record = _record(alice, 2, 0, ACCEPTED);
        uint64 batchId = _commitAndPost(_one(record));
        IContributionLedger.Submission memory first = _submission(alice, 2, 0);
        IContributionLedger.Submission memory second = _submission(alice, 2, 0);
        second.fileHash = keccak256("another file");
        bytes memory firstSignature = _signSubmission(first, freshKey);
        bytes memory stolen = _signSubmission(second, aliceNodeKey);
        IContributionLedger.OutcomeProof memory outcome = _prove(batchId, _one(record), 0);
        vm.expectRevert(abi.encodeWithSelector(IFaultCourtErrors.FaultNoEquivocation.selector, alice, aliceNode));
        faults.proveDoubleSubmission(outcome, _held(outcome, first, firstSignature), second, stolen);
    }

    function test_R9_the_same_with_the_key_of_that_moment_costs_the_worker() public {
        bytes memory record = _record(alice, 2, 0, ACCEPTED);
        uint64 batchId = _commitAndPost(_one(record));
        IContributionLedger.Submission memory first = _submission(alice, 2, 0);
        IContributionLedger.Submission memory second = _submission(alice, 2, 0);
        second.fileHash = keccak256("another file");
        IContributionLedger.OutcomeProof memory outcome = _prove(batchId, _one(record), 0);
        faults.proveDoubleSubmission(
            outcome,
            _held(outcome, first, _signSubmission(first, aliceNodeKey)),
            second,
            _signSubmission(second, aliceNodeKey)
        );
        assertEq(_ours(alice), REQUIRED_STAKE / 2, "an exact fault costs half");
    }

    function test_R9_a_stolen_key_costs_its_worker_one_slash_whatever_it_signs() public {
        IContributionLedger.OutcomeProof[] memory outcomes = new IContributionLedger.OutcomeProof[](3);
        for (uint32 index = 0; index < 3; ++index) {
            bytes memory record = _record(alice, 2, index, ACCEPTED);
            uint64 batchId = _commitAndPost(_one(record));
            outcomes[index] = _prove(batchId, _one(record), 0);
        }
        (address fresh, uint256 freshKey) = makeAddrAndKey("fresh node");
        IWorkerRegistry.NodeConsent memory consent = _nodeConsent(alice, fresh, freshKey, block.timestamp);
        vm.prank(alice);
        workers.rotateNode(consent);
        vm.warp(block.timestamp + 1);
        for (uint32 index = 0; index < 3; ++index) {
            IContributionLedger.Submission memory first = _submission(alice, 2, index);
            IContributionLedger.Submission memory second = _submission(alice, 2, index);
            second.fileHash = keccak256("another file");
            IContributionLedger.OutcomeProof memory outcome = outcomes[index];
            bytes memory honest = _signSubmission(first, aliceNodeKey);
            bytes memory stolen = _signSubmission(second, aliceNodeKey);
            if (index != 0) {
                vm.expectRevert(abi.encodeWithSelector(IFaultCourtErrors.FaultAlreadyBanned.selector, runId, alice));
            }
            faults.proveDoubleSubmission(outcome, _held(outcome, first, honest), second, stolen);
        }
        assertEq(_ours(alice), REQUIRED_STAKE - REQUIRED_STAKE * EXACT_FRAUD_PPM / PPM, "one slash");
    }

    // ------------------------------------- R10, R14: what a worker can commit itself

    function test_R10_direct_work_of_zero_units_is_refused() public {
        IContributionLedger.Submission memory submission = _submission(alice, 7, 0);
        submission.units = 0;
        IContributionLedger.LeasedWork memory work = _work(submission, aliceNodeKey, block.timestamp);
        vm.prank(alice);
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidSubmission.selector, alice, aliceNode)
        );
        ledger.submitDirect(work, _noSources());
    }

    function test_R14_a_worker_without_a_ticket_reserves_nothing() public {
        IContributionLedger.LeasedWork memory work = _work(_submission(alice, 7, 0), aliceNodeKey, block.timestamp);
        work.ticketSignature = _signTicket(work.ticket, aliceNodeKey);
        vm.prank(alice);
        vm.expectRevert(
            abi.encodeWithSelector(
                IContributionLedgerErrors.LedgerInvalidTicket.selector, aliceNode, work.ticket.deadline
            )
        );
        ledger.submitDirect(work, _noSources());
    }

    function test_R14_no_case_opens_about_work_that_its_worker_never_signed() public {
        bytes32 leaf = _fraudLeaf;
        _announce(mallory, leaf, ACCEPT);
        IContributionLedger.Submission memory submission = _submission(alice, 1, 0);
        bytes memory forged = _signSubmission(submission, malloryKey);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        vm.prank(mallory);
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidSubmission.selector, alice, mallory)
        );
        court.claim(outcome, _held(outcome, submission, forged), ACCEPT, SALT, _noSources());
    }

    function test_R14_no_case_delays_a_withdrawal() public {
        vm.prank(bob);
        workers.exit(ourRun);
        vm.warp(block.timestamp + CHALLENGE_WINDOW - 1);
        _challenge(BOB_ACCEPTED, REJECT);
        vm.warp(block.timestamp + UNBONDING_PERIOD);
        vm.prank(bob);
        assertEq(vault.withdraw(ourRun), REQUIRED_STAKE, "withdrawn");
    }

    function test_R14_a_copied_claim_is_not_the_first() public {
        _announce(challenger, _acceptedLeaf, STATISTICAL);
        // Mallory reads the claim before it is mined and copies it: it has to announce first, a block later.
        _announce(mallory, _acceptedLeaf, STATISTICAL);
        _claimAnnounced(mallory, BOB_ACCEPTED, STATISTICAL);
        _claimAnnounced(challenger, BOB_ACCEPTED, STATISTICAL);
        _draw(_acceptedLeaf);
        _voteAll(_acceptedLeaf, STATISTICAL, STATISTICAL, STATISTICAL);
        court.settle(_outcomeAt(BOB_ACCEPTED));
        assertEq(_reporterOf(_acceptedLeaf), challenger, "whoever announced first reported");
    }

    // --------------------------------------------------- R11: nobody picks a jury

    function test_R11_seats_of_the_run_and_late_jurors_change_no_draw() public {
        _challenge(BOB_ACCEPTED, REJECT);
        _passDraw();
        uint256 before = vm.snapshotState();
        court.draw(_acceptedLeaf);
        address[] memory panel = _panel(_acceptedLeaf);
        vm.revertToState(before);
        _stirTheBench();
        court.draw(_acceptedLeaf);
        for (uint256 i = 0; i < panel.length; ++i) {
            assertEq(court.voteOf(_acceptedLeaf, panel[i]), bytes32(uint256(1)), "the same jurors");
        }
    }

    /// @dev What an owner and jurors can do once the block of a draw is known.
    function _stirTheBench() private {
        vm.warp(block.timestamp + 60);
        for (uint256 i = 0; i < 3; ++i) {
            vm.prank(jurors[i]);
            jury.leave();
        }
        vm.prank(mallory);
        jury.join(REQUIRED_JUROR_STAKE);
        vm.startPrank(owner);
        runs.dismiss(ourRun, validators[4]);
        runs.invite(ourRun, jurors[4], true);
        vm.stopPrank();
        vm.prank(jurors[4]);
        runs.takeSeat(ourRun, 1, REQUIRED_VALIDATOR_STAKE);
    }

    function test_R11_no_juror_is_a_party() public {
        _announce(jurors[0], _acceptedLeaf, REJECT);
        (IContributionLedger.Submission memory submission, bytes memory signature) = _evidence(BOB_ACCEPTED);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(BOB_ACCEPTED);
        vm.prank(jurors[0]);
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtMayNotClaim.selector, _acceptedLeaf, jurors[0]));
        court.claim(outcome, _held(outcome, submission, signature), REJECT, SALT, _noSources());
    }

    // -------------------------------------- R13: a gang does not earn by its verdicts

    function test_R13_framing_a_worker_of_the_own_run_pays_the_gang_nothing() public {
        _joinTheirs(bob, REQUIRED_STAKE);
        uint256 before = token.balanceOf(mallory) + token.balanceOf(gangster);
        (uint64 batchId, bytes memory record) = _convictInTheirRun(bob, bobNodeKey);
        vm.warp(block.timestamp + CHALLENGE_WINDOW);
        vm.prank(gangster);
        ledger.finaliseFraud(_prove(batchId, _one(record), 0));
        assertEq(token.balanceOf(mallory) + token.balanceOf(gangster), before, "the gang has no token more");
    }

    function test_R13_the_network_overturns_what_a_gang_decided() public {
        _joinTheirs(bob, REQUIRED_STAKE);
        (uint64 batchId, bytes memory record) = _convictInTheirRun(bob, bobNodeKey);
        runId = theirRun;
        (_batchId, _records) = (batchId, _one(record));
        bytes32 leaf = _leaf(batchId, 0, record);
        _announce(bob, leaf, ACCEPT);
        IContributionLedger.Submission memory submission = _submission(bob, 1, 0);
        bytes memory signature = _signSubmission(submission, bobNodeKey);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(0);
        vm.prank(bob);
        court.claim(outcome, _held(outcome, submission, signature), ACCEPT, SALT, _noSources());
        _draw(leaf);
        _voteAll(leaf, ACCEPT, ACCEPT, ACCEPT);
        court.settle(outcome);
        court.fineSigner(outcome, gangster);
        assertEq(vault.activeStake(theirRun, bob), REQUIRED_STAKE, "Bob has its stake again");
        assertEq(vault.activeStake(theirRun, gangster), REQUIRED_VALIDATOR_STAKE * 95 / 100, "the liar paid");
        assertTrue(workers.isActive(theirRun, bob), "and Bob is no convict");
    }

    // ------------------------------------- R15: no server stands between judges and chain

    function test_R15_validators_say_on_chain_what_they_signed_and_anybody_posts_it() public {
        uint64 batchId = _commit(1);
        bytes memory record = _record(bob, 3, 0, ACCEPTED);
        bytes32 hash = keccak256(record);
        bytes memory first = _sign(validatorKeys[0], ledger.DOMAIN_SEPARATOR(), _outcomesHash(batchId, record));
        bytes memory second = _sign(validatorKeys[1], ledger.DOMAIN_SEPARATOR(), _outcomesHash(batchId, record));
        bytes32 root = batches[batchId].root;
        vm.expectEmit(address(ledger));
        emit IContributionLedgerEvents.OutcomesShown(batchId, validators[0], root, hash, record, first);
        ledger.showOutcomes(batches[batchId], hash, record, first);
        ledger.showOutcomes(batches[batchId], hash, "", second);
        vm.prank(stranger);
        ledger.postOutcomes(batches[batchId], record, bytes.concat(first, second));
    }

    function test_R15_a_silent_quorum_does_not_starve_a_worker() public {
        IContributionLedger.Submission memory submission = _submission(bob, 3, 0);
        bytes32 leaf = _submissionLeaf(submission);
        uint64 batchId = _commitRoot(leaf, 1, 1000);
        vm.warp(block.timestamp + OUTCOME_DEADLINE);
        vm.prank(bob);
        court.summon(batches[batchId], submission, _noSources());
        bytes32 caseId = court.summonsOf(batchId);
        _draw(caseId);
        _voteAll(caseId, ACCEPT, ACCEPT, ACCEPT);
        court.settleSummoned(batches[batchId], submission);
        bytes memory record = _pack(_asClaimed(bob, 3));
        _rememberPosted(batchId, _one(record), 0);
        vm.warp(block.timestamp + CHALLENGE_WINDOW);
        uint256 before = token.balanceOf(bob);
        _claim(batchId, _one(record), 0, 1);
        assertEq(token.balanceOf(bob) - before, 1000 * uint256(PRICE), "paid for what judges of the network accepted");
    }

    function _asClaimed(address worker, uint32 step) private view returns (IContributionLedger.Outcome memory) {
        return _outcome(worker, step, 0, ACCEPTED);
    }

    // --------------------------------------------------- beyond the fifteen

    function test_R16_terms_that_change_after_a_commitment_do_not_reach_it() public {
        IRunRegistry.Terms memory harsh = IRunRegistry.Terms(PRICE, uint32(PPM), uint32(PPM), QUORUM);
        vm.prank(owner);
        runs.proposeChange(ourRun, harsh);
        vm.warp(block.timestamp + CHANGE_DELAY);
        runs.applyChange(ourRun);
        assertEq(_execute(alice, ALICE_FRAUD, aliceNodeKey), REQUIRED_STAKE * FRAUD_PPM / PPM, "by the terms of then");
    }

    function test_R17_nobody_joins_under_terms_that_are_about_to_change() public {
        vm.prank(mallory);
        runs.proposeChange(theirRun, IRunRegistry.Terms(PRICE, uint32(PPM), uint32(PPM), 1));
        uint256 effectiveAt = block.timestamp + CHANGE_DELAY;
        vm.prank(bob);
        vm.expectRevert(
            abi.encodeWithSelector(IRunRegistryErrors.RunTermsChanged.selector, theirRun, 1, 1, effectiveAt)
        );
        IWorkerRegistry.NodeConsent memory none;
        workers.join(theirRun, 1, REQUIRED_STAKE, none, _noPermit());
    }

    function test_R18_work_committed_after_a_worker_left_does_not_count_against_it() public {
        vm.prank(bob);
        workers.exit(ourRun);
        vm.warp(block.timestamp + 1);
        bytes memory record = _record(bob, 5, 0, FRAUD);
        uint64 batchId = _commitAndPost(_one(record));
        IContributionLedger.Submission memory submission = _submission(bob, 5, 0);
        bytes memory signature = _signSubmission(submission, bobNodeKey);
        IContributionLedger.OutcomeProof memory outcome = _prove(batchId, _one(record), 0);
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidSubmission.selector, bob, bobNode)
        );
        ledger.executeFraud(outcome, _held(outcome, submission, signature));
    }

    function test_R19_nobody_judges_the_run_that_it_works_for() public {
        vm.prank(owner);
        runs.invite(ourRun, bob, true);
        vm.prank(bob);
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunInvalidValidator.selector, ourRun, bob));
        runs.takeSeat(ourRun, 1, REQUIRED_VALIDATOR_STAKE);
    }

    function test_R19_nobody_works_for_the_run_that_it_judges() public {
        IWorkerRegistry.NodeConsent memory none;
        vm.prank(validators[0]);
        vm.expectRevert(
            abi.encodeWithSelector(IWorkerRegistryErrors.RegistryWrongStatus.selector, ourRun, validators[0], 0)
        );
        workers.join(ourRun, 1, REQUIRED_STAKE, none, _noPermit());
    }

    function test_R20_to_have_called_a_batch_withheld_contradicts_nothing() public {
        bytes memory record = _records[0];
        bytes32 root = keccak256("submissions");
        IContributionLedger.Outcomes memory withheld = IContributionLedger.Outcomes(_batchId, root, keccak256(""));
        IContributionLedger.Outcomes memory judged = IContributionLedger.Outcomes(_batchId, root, keccak256(record));
        bytes memory first = _signStatement(withheld);
        bytes memory second = _signStatement(judged);
        vm.expectRevert(
            abi.encodeWithSelector(IFaultCourtErrors.FaultNoEquivocation.selector, validators[0], validators[0])
        );
        faults.proveDoubleOutcome(batches[_batchId], withheld, first, judged, second);
    }

    function _signStatement(IContributionLedger.Outcomes memory outcomes) private view returns (bytes memory) {
        bytes32 typeHash = keccak256("Outcomes(uint64 batchId,bytes32 batchRoot,bytes32 recordsHash)");
        return _sign(validatorKeys[0], ledger.DOMAIN_SEPARATOR(), keccak256(abi.encode(typeHash, outcomes)));
    }
}
