// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IERC20Errors} from "@openzeppelin/contracts/interfaces/draft-IERC6093.sol";

import {
    IContributionLedger,
    IContributionLedgerErrors,
    IContributionLedgerEvents
} from "../../src/interfaces/IContributionLedger.sol";
import {IDisputeCourtErrors, IDisputeCourtEvents} from "../../src/interfaces/IDisputeCourt.sol";
import {IRewardEscrow, IRewardEscrowErrors} from "../../src/interfaces/IRewardEscrow.sol";
import {IRunRegistryErrors} from "../../src/interfaces/IRunRegistry.sol";
import {LedgerTest} from "../LedgerTest.sol";

/// @title submitDirect: a worker commits its own work, with a ticket, a bond and stake behind it
contract LedgerDirectTest is LedgerTest {
    uint256 private constant CAP = REQUIRED_STAKE / STAKE_PER_UNIT;
    uint256 private constant GRACE = 60;

    function setUp() public override {
        super.setUp();
        _enrich(aliceNode);
    }

    /// @dev Work of Alice with a ticket that ends now.
    function _workOf(uint32 index, uint256 units) private view returns (IContributionLedger.LeasedWork memory) {
        IContributionLedger.Submission memory submission = _submission(alice, 1, index);
        submission.units = uint64(units);
        return _work(submission, aliceNodeKey, block.timestamp);
    }

    function _submitAs(address caller, IContributionLedger.LeasedWork memory work) private returns (uint64) {
        vm.prank(caller);
        return ledger.submitDirect(work, _noSources());
    }

    function _submit(uint32 index, uint256 units) private returns (uint64) {
        return _submitAs(alice, _workOf(index, units));
    }

    /// @dev Signs changed work again, with Alice's node and the orchestrator.
    function _signAgain(IContributionLedger.LeasedWork memory work) private view {
        work.nodeSignature = _signSubmission(work.submission, aliceNodeKey);
        work.ticketSignature = _signTicket(work.ticket, orchestratorKey);
    }

    // ---------------------------------------------------------------- admission

    function test_submitDirect_reverts_whenPaused() public {
        vm.prank(owner);
        runs.setSubmissionsPaused(runId, true);
        _expectPaused();
    }

    function test_submitDirect_reverts_whenClosed() public {
        vm.prank(owner);
        runs.closeRun(runId);
        _expectPaused();
    }

    function _expectPaused() private {
        IContributionLedger.LeasedWork memory work = _workOf(0, 1000);
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerPaused.selector, runId));
        _submitAs(alice, work);
    }

    function testFuzz_submitDirect_reverts_whenRunIsUnknown(uint64 unknown) public {
        vm.assume(unknown != runId);
        IContributionLedger.LeasedWork memory work = _workOf(0, 1000);
        work.submission.runId = work.ticket.runId = unknown;
        _signAgain(work);
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunUnknown.selector, unknown));
        _submitAs(alice, work);
    }

    function testFuzz_submitDirect_reverts_whenTheRunCannotPay(uint256 units) public {
        units = bound(units, 1, CAP);
        _commitRoot(keccak256("all"), 1, WALLET / 2 / PRICE);
        IContributionLedger.LeasedWork memory work = _workOf(0, units);
        uint256 due = units * PRICE;
        vm.expectRevert(abi.encodeWithSelector(IRewardEscrowErrors.EscrowUnderfunded.selector, runId, due, 0));
        _submitAs(alice, work);
    }

    // ---------------------------------------------------------------- submission

    function testFuzz_submitDirect_reverts_whenNotSignedByTheNode(uint256 key) public {
        key = bound(key, 1, 1 << 200);
        vm.assume(key != aliceNodeKey);
        _expectInvalid(_submission(alice, 1, 0), key);
    }

    function test_submitDirect_reverts_whenAnotherWorkersNodeSigned() public {
        _expectInvalid(_submission(alice, 1, 0), bobNodeKey);
    }

    function test_submitDirect_reverts_whenTheWalletSigned() public {
        _expectInvalid(_submission(alice, 1, 0), aliceKey);
    }

    function testFuzz_submitDirect_reverts_whenTheNodeWasReplaced(uint256 key) public {
        _rotateNode(alice, bound(key, 1, 1 << 200));
        _expectInvalid(_submission(alice, 1, 0), aliceNodeKey);
    }

    function testFuzz_submitDirect_takesTheNewNode(uint256 key) public {
        key = bound(key, 1, 1 << 200);
        _rotateNode(alice, key);
        assertEq(_submitAs(alice, _work(_submission(alice, 1, 0), key, block.timestamp)), 1, "committed");
    }

    function test_submitDirect_reverts_whenTheWorkerIsJailed() public {
        vm.prank(alice);
        vault.requestUnbond(runId, 1);
        _expectInvalid(_submission(alice, 1, 0), aliceNodeKey);
    }

    function test_submitDirect_reverts_whenTheWorkerLeft() public {
        vm.prank(alice);
        workers.exit(runId);
        _expectInvalid(_submission(alice, 1, 0), aliceNodeKey);
    }

    function test_submitDirect_reverts_whenTheWorkerWorksForAnotherRunOnly() public {
        runId = _createRun();
        _expectInvalid(_submission(alice, 1, 0), aliceNodeKey);
    }

    function test_submitDirect_reverts_whenTheWorkerIsNotActiveYet() public {
        runId = _createRun();
        _join(runId, alice, address(0), 0, REQUIRED_STAKE);
        vm.roll(block.number - 1);
        _expectInvalid(_submission(alice, 1, 0), aliceNodeKey);
    }

    function testFuzz_submitDirect_reverts_whenUnitsExceedARecord(uint64 units) public {
        IContributionLedger.Submission memory submission = _submission(alice, 1, 0);
        submission.units = uint64(bound(units, uint256(type(uint32).max) + 1, type(uint64).max));
        _expectInvalid(submission, aliceNodeKey);
    }

    function testFuzz_submitDirect_reverts_whenRolloutsExceedARecord(uint32 rollouts) public {
        IContributionLedger.Submission memory submission = _submission(alice, 1, 0);
        submission.rollouts = uint32(bound(rollouts, uint256(type(uint16).max) + 1, type(uint32).max));
        _expectInvalid(submission, aliceNodeKey);
    }

    function testFuzz_submitDirect_takesWhatARecordHolds(uint16 rollouts) public {
        IContributionLedger.Submission memory submission = _submission(alice, 1, 0);
        submission.rollouts = rollouts;
        assertEq(_submitAs(alice, _work(submission, aliceNodeKey, block.timestamp)), 1, "committed");
    }

    function test_submitDirect_reverts_whenItClaimsNothing() public {
        IContributionLedger.Submission memory submission = _submission(alice, 1, 0);
        submission.units = 0;
        _expectInvalid(submission, aliceNodeKey);
    }

    function _expectInvalid(IContributionLedger.Submission memory submission, uint256 key) private {
        IContributionLedger.LeasedWork memory work = _work(submission, key, block.timestamp);
        _expectInvalidSubmission(submission.worker, vm.addr(key));
        _submitAs(submission.worker, work);
    }

    function testFuzz_submitDirect_reverts_whenTheSignatureIsMalformed(bytes memory signature) public {
        vm.assume(signature.length != 65);
        IContributionLedger.LeasedWork memory work = _workOf(0, 1000);
        work.nodeSignature = signature;
        _expectInvalidSubmission(alice, address(0));
        _submitAs(alice, work);
    }

    function testFuzz_submitDirect_reverts_whenTheSubmissionWasChanged(uint256 field, uint32 change) public {
        vm.assume(change != 0);
        IContributionLedger.LeasedWork memory work = _workOf(0, 1000);
        IContributionLedger.Submission memory submission = work.submission;
        field = bound(field, 0, 6);
        if (field == 0) submission.worker = bob;
        if (field == 1) submission.step ^= change;
        if (field == 2) submission.index ^= change;
        if (field == 3) submission.policyVersion ^= change;
        if (field == 4) submission.fileHash ^= bytes32(uint256(change));
        if (field == 5) submission.rollouts ^= change;
        if (field == 6) submission.units ^= change;
        // A ticket for what was changed, but not the node's signature.
        bytes memory signature = work.nodeSignature;
        work = _work(submission, aliceNodeKey, block.timestamp);
        work.nodeSignature = signature;
        vm.expectPartialRevert(IContributionLedgerErrors.LedgerInvalidSubmission.selector);
        _submitAs(submission.worker, work);
    }

    // -------------------------------------------------------------------- ticket

    function testFuzz_submitDirect_reverts_whenTheTicketIsForOtherWork(uint256 field, uint32 change) public {
        vm.assume(change != 0);
        IContributionLedger.LeasedWork memory work = _workOf(0, 1000);
        field = bound(field, 0, 4);
        if (field == 0) work.ticket.runId ^= change;
        if (field == 1) work.ticket.worker = bob;
        if (field == 2) work.ticket.step ^= change;
        if (field == 3) work.ticket.index ^= change;
        if (field == 4) work.ticket.policyVersion ^= change;
        _signAgain(work);
        _expectInvalidTicket(orchestrator, work.ticket.deadline);
        _submitAs(alice, work);
    }

    function testFuzz_submitDirect_takesAnyPolicyAndBeacon(bytes32 policyRoot, bytes32 beacon) public {
        IContributionLedger.LeasedWork memory work = _workOf(0, 1000);
        (work.ticket.policyRoot, work.ticket.beacon) = (policyRoot, beacon);
        _signAgain(work);
        assertEq(_submitAs(alice, work), 1, "jurors look at them, not the ledger");
    }

    function testFuzz_submitDirect_reverts_whenTheTicketWasChanged(uint256 field, uint32 change) public {
        vm.assume(change != 0);
        IContributionLedger.LeasedWork memory work = _workOf(0, 1000);
        field = bound(field, 0, 2);
        if (field == 0) work.ticket.policyRoot ^= bytes32(uint256(change));
        if (field == 1) work.ticket.beacon ^= bytes32(uint256(change));
        if (field == 2) work.ticket.deadline ^= change;
        vm.expectPartialRevert(IContributionLedgerErrors.LedgerInvalidTicket.selector);
        _submitAs(alice, work);
    }

    function testFuzz_submitDirect_reverts_whenAnotherKeySignedTheTicket(uint256 key) public {
        key = bound(key, 1, 1 << 200);
        vm.assume(key != orchestratorKey);
        IContributionLedger.LeasedWork memory work = _workOf(0, 1000);
        work.ticketSignature = _signTicket(work.ticket, key);
        _expectInvalidTicket(vm.addr(key), block.timestamp);
        _submitAs(alice, work);
    }

    function testFuzz_submitDirect_reverts_whenTheTicketsSignatureIsMalformed(bytes memory signature) public {
        vm.assume(signature.length != 65);
        IContributionLedger.LeasedWork memory work = _workOf(0, 1000);
        work.ticketSignature = signature;
        _expectInvalidTicket(address(0), block.timestamp);
        _submitAs(alice, work);
    }

    function test_submitDirect_reverts_whenTheOrchestratorWasReplaced() public {
        vm.prank(owner);
        runs.rotateOrchestrator(runId, orchestrator, stranger);
        IContributionLedger.LeasedWork memory work = _workOf(0, 1000);
        _expectInvalidTicket(orchestrator, block.timestamp);
        _submitAs(alice, work);
    }

    function testFuzz_submitDirect_reverts_whenTheTicketIsTooOld(uint256 late) public {
        IContributionLedger.LeasedWork memory work = _workOf(0, 1000);
        vm.warp(block.timestamp + bound(late, GRACE + 1, 365 days));
        _expectInvalidTicket(orchestrator, work.ticket.deadline);
        _submitAs(alice, work);
    }

    function test_submitDirect_reverts_oneSecondAfterTheGrace() public {
        IContributionLedger.LeasedWork memory work = _workOf(0, 1000);
        vm.warp(block.timestamp + GRACE + 1);
        _expectInvalidTicket(orchestrator, work.ticket.deadline);
        _submitAs(alice, work);
    }

    function test_submitDirect_takesATicketInTheLastSecondOfItsGrace() public {
        IContributionLedger.LeasedWork memory work = _workOf(0, 1000);
        vm.warp(block.timestamp + GRACE);
        assertEq(_submitAs(alice, work), 1, "committed");
    }

    function testFuzz_submitDirect_takesATicketWithinItsGrace(uint256 late) public {
        IContributionLedger.LeasedWork memory work = _workOf(0, 1000);
        vm.warp(block.timestamp + bound(late, 0, GRACE));
        assertEq(_submitAs(alice, work), 1, "committed");
    }

    function testFuzz_submitDirect_takesATicketOfAnyDeadlineAhead(uint64 deadline) public {
        deadline = uint64(bound(deadline, block.timestamp, type(uint64).max));
        assertEq(_submitAs(alice, _work(_submission(alice, 1, 0), aliceNodeKey, deadline)), 1, "committed");
    }

    // -------------------------------------------------------------------- caller

    function testFuzz_submitDirect_reverts_whenSomebodyElseCalls(address caller) public {
        vm.assume(caller != alice && caller != aliceNode);
        IContributionLedger.LeasedWork memory work = _workOf(0, 1000);
        _expectUnauthorized(caller);
        _submitAs(caller, work);
    }

    // ---------------------------------------------------------------------- bond

    function testFuzz_submitDirect_takesTheBondOfWhoCalls(bool byNode) public {
        address payer = byNode ? aliceNode : alice;
        uint256 before = token.balanceOf(payer);
        IContributionLedger.LeasedWork memory work = _workOf(0, 1000);
        vm.expectEmit(address(court));
        emit IDisputeCourtEvents.BondTaken(1, payer, BOND);
        uint64 batchId = _submitAs(payer, work);
        assertEq(court.bondOf(batchId), payer, "remembered");
        assertEq(token.balanceOf(payer), before - BOND, "paid");
        assertEq(token.balanceOf(address(court)), BOND, "held by the court");
    }

    function testFuzz_submitDirect_reverts_whenTheBondIsNotApproved(uint256 allowance) public {
        allowance = bound(allowance, 0, BOND - 1);
        vm.prank(alice);
        token.approve(address(court), allowance);
        IContributionLedger.LeasedWork memory work = _workOf(0, 1000);
        vm.expectRevert(
            abi.encodeWithSelector(IERC20Errors.ERC20InsufficientAllowance.selector, address(court), allowance, BOND)
        );
        _submitAs(alice, work);
    }

    function test_submitDirect_bondReturns_onceTheRunJudges() public {
        IContributionLedger.LeasedWork memory work = _workOf(0, 1000);
        uint256 before = token.balanceOf(alice);
        uint64 batchId = _submitAs(alice, work);
        _remember(batchId, _submissionLeaf(work.submission), 1, 1000);
        _post(batchId, _one(_recordOf(work.submission, REJECT)), QUORUM);
        court.returnBond(batches[batchId]);
        assertEq(token.balanceOf(alice), before, "whatever the verdict");
    }

    function test_submitDirect_bondStays_whileTheRunIsSilent() public {
        IContributionLedger.LeasedWork memory work = _workOf(0, 1000);
        uint64 batchId = _submitAs(alice, work);
        _remember(batchId, _submissionLeaf(work.submission), 1, 1000);
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtBondHeld.selector, batchId));
        court.returnBond(batches[batchId]);
    }

    // ---------------------------------------------------------------------- slot

    function testFuzz_submitDirect_reverts_whenTheSlotWasUsed(uint32 index, bytes32 otherFile, uint256 waited) public {
        _submit(index, 1000);
        vm.warp(block.timestamp + bound(waited, 0, 2 * JUDGED));
        IContributionLedger.LeasedWork memory work = _workOf(index, 1000);
        work.submission.fileHash = otherFile;
        _signAgain(work);
        _expectSlotUsed(alice, 1, index);
        _submitAs(alice, work);
    }

    function testFuzz_submitDirect_tellsSlotsApart(uint32 step, uint32 index) public {
        vm.assume(step != 1 || index != 0);
        _submit(0, 1000);
        IContributionLedger.Submission memory submission = _submission(alice, 1, 0);
        (submission.step, submission.index) = (step, index);
        assertEq(_submitAs(alice, _work(submission, aliceNodeKey, block.timestamp)), 2, "another slot");
    }

    function test_submitDirect_tellsSlotsOfWorkersApart() public {
        _submit(0, 1000);
        assertEq(_submitAs(bob, _work(_submission(bob, 1, 0), bobNodeKey, block.timestamp)), 2, "another worker's");
    }

    function test_submitDirect_tellsSlotsOfRunsApart() public {
        _submit(0, 1000);
        _joinAnotherRun(REQUIRED_STAKE);
        assertEq(_submit(0, 1000), 2, "another run's");
    }

    /// @dev Alice works for one more run, with stake of its own there; steps from now on are about that run.
    function _joinAnotherRun(uint256 stake) private {
        runId = _createRun();
        _join(runId, alice, address(0), 0, stake);
        vm.prank(owner);
        escrow.fund(runId, WALLET / 4);
    }

    // ----------------------------------------------------------------------- cap

    function testFuzz_submitDirect_reverts_aboveTheCap(uint256 units) public {
        _expectUnitCap(1, bound(units, CAP + 1, type(uint32).max), 0, CAP);
    }

    function testFuzz_submitDirect_reverts_whenWorkInFlightFillsTheCap(uint256 first) public {
        first = bound(first, 1, CAP - 1);
        _submit(0, first);
        _expectUnitCap(1, CAP - first + 1, first, CAP);
        assertEq(_submit(1, CAP - first), 2, "up to the cap");
    }

    function testFuzz_submitDirect_coversWithWhatIsStaked(uint256 extra) public {
        extra = bound(extra, STAKE_PER_UNIT, WALLET / 2);
        _deposit(runId, alice, extra);
        uint256 cap = (REQUIRED_STAKE + extra) / STAKE_PER_UNIT;
        vm.prank(owner);
        escrow.fund(runId, WALLET / 2);
        assertEq(ledger.unitCapOf(runId, alice), cap, "cap");
        _expectUnitCap(0, cap + 1, 0, cap);
        assertEq(_submit(0, cap), 1, "up to the cap");
    }

    function testFuzz_submitDirect_coversWithStakeOfTheRunAlone(uint256 extra) public {
        uint64 first = runId;
        extra = bound(extra, 1, WALLET / 2);
        _joinAnotherRun(REQUIRED_STAKE + extra);
        runId = first;
        assertEq(ledger.unitCapOf(runId, alice), CAP, "stake in another run covers nothing here");
        _expectUnitCap(0, CAP + 1, 0, CAP);
    }

    function testFuzz_submitDirect_countsWorkOfTheRunAlone(uint256 units) public {
        units = bound(units, 1, CAP);
        _submit(0, CAP);
        _joinAnotherRun(REQUIRED_STAKE);
        assertEq(_submit(0, units), 2, "work in another run does not count here");
        _expectUnitCap(1, CAP - units + 1, units, CAP);
    }

    function testFuzz_submitDirect_countsUntilFinal(uint256 units, uint256 waited) public {
        units = bound(units, 1, CAP);
        waited = bound(waited, 0, JUDGED - 1);
        _submit(0, CAP);
        uint256 start = block.timestamp;
        vm.warp(start + waited);
        _expectUnitCap(1, units, CAP, CAP);
        vm.warp(start + JUDGED);
        assertEq(_submit(1, units), 2, "all before is final");
        _expectUnitCap(2, CAP - units + 1, units, CAP);
    }

    function testFuzz_submitDirect_countsAllWork_untilTheLastIsFinal(uint256 first, uint256 gap) public {
        first = bound(first, 1, CAP - 1);
        gap = bound(gap, 1, JUDGED - 1);
        _submit(0, first);
        uint256 start = block.timestamp;
        vm.warp(start + gap);
        _submit(1, CAP - first);
        vm.warp(start + gap + JUDGED - 1);
        _expectUnitCap(2, 1, CAP, CAP);
        vm.warp(start + gap + JUDGED);
        assertEq(_submit(2, CAP), 3, "one clock for all of it: it errs on the side of stake");
    }

    /// @dev A worker claims all units that its stake covers for a file of one row. Once validators recorded the one unit, no
    ///      other unit's money waits for the end of the run; and stake covers what was claimed, not what was recorded, until
    ///      all of it would be final. So junk ties up no more than stake covers at any time, and that until it is judged.
    function testFuzz_submitDirect_junkTiesUpNothing_onceItIsJudged(uint256 claimed, uint256 waited) public {
        claimed = bound(claimed, 2, CAP);
        uint256 start = block.timestamp;
        uint256 all = escrow.fundsOf(runId).available;
        bytes[] memory records = _one("");
        uint64 batchId = _submitJunk(claimed, records);
        assertEq(escrow.fundsOf(runId).reserved, PRICE, "one unit is recorded");
        court.returnBond(batches[batchId]);

        vm.warp(start + bound(waited, 0, JUDGED - 1));
        _expectUnitCap(1, CAP - claimed + 1, claimed, CAP);

        vm.warp(start + JUDGED);
        escrow.recover(_one(_claimOf(batchId, records, _range(0, 1))));
        assertEq(escrow.fundsOf(runId).reserved, 0, "nothing of it stays set aside");
        assertEq(escrow.fundsOf(runId).available, all, "all is the run's again");
    }

    /// @dev Alice's claim of one row for many units, judged by validators who read the file.
    function _submitJunk(uint256 claimed, bytes[] memory records) private returns (uint64 batchId) {
        IContributionLedger.LeasedWork memory work = _workOf(0, claimed);
        batchId = _submitAs(alice, work);
        _remember(batchId, _submissionLeaf(work.submission), 1, claimed);
        assertEq(escrow.fundsOf(runId).reserved, claimed * PRICE, "all that it claims, until it is judged");
        work.submission.units = 1;
        records[0] = _recordOf(work.submission, REJECT);
        _post(batchId, records, QUORUM);
    }

    function _one(IRewardEscrow.Claim memory claimed) private pure returns (IRewardEscrow.Claim[] memory claims) {
        claims = new IRewardEscrow.Claim[](1);
        claims[0] = claimed;
    }

    function _expectUnitCap(uint32 index, uint256 units, uint256 before, uint256 cap) private {
        IContributionLedger.LeasedWork memory work = _workOf(index, units);
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerUnitCap.selector, alice, before + units, cap)
        );
        _submitAs(alice, work);
    }

    // ------------------------------------------------------------------- sources

    function testFuzz_submitDirect_reverts_whenThereAreTooManySources(uint256 count) public {
        count = bound(count, 17, 40);
        IContributionLedger.LeasedWork memory work = _workOf(0, 1000);
        _expectSourcesTooLarge(count, 0);
        vm.prank(alice);
        ledger.submitDirect(work, _sources(count, 0));
    }

    function test_submitDirect_reverts_whenThereIsOneSourceTooMany() public {
        IContributionLedger.LeasedWork memory work = _workOf(0, 1000);
        _expectSourcesTooLarge(17, 0);
        vm.prank(alice);
        ledger.submitDirect(work, _sources(17, 128));
    }

    function test_submitDirect_takesAsManySourcesAsItMay() public {
        IContributionLedger.LeasedWork memory work = _workOf(0, 1000);
        vm.prank(alice);
        assertEq(ledger.submitDirect(work, _sources(16, 128)), 1, "sixteen of 128 bytes");
    }

    function testFuzz_submitDirect_reverts_whenASourceIsTooLong(uint256 size, uint256 at) public {
        size = bound(size, 129, 400);
        IContributionLedger.LeasedWork memory work = _workOf(0, 1000);
        string[] memory sources = _sources(16, 128);
        sources[bound(at, 0, 15)] = string(new bytes(size));
        _expectSourcesTooLarge(16, size);
        vm.prank(alice);
        ledger.submitDirect(work, sources);
    }

    function testFuzz_submitDirect_takesSourcesWithinTheirBounds(uint256 count, uint256 size) public {
        IContributionLedger.LeasedWork memory work = _workOf(0, 1000);
        string[] memory sources = _sources(bound(count, 0, 16), bound(size, 0, 128));
        vm.expectEmit(address(ledger));
        emit IContributionLedgerEvents.DirectlySubmitted(1, alice, work, sources);
        vm.prank(alice);
        ledger.submitDirect(work, sources);
    }

    // -------------------------------------------------------------------- records

    function testFuzz_submitDirect_commitsABatchOfOne(bool byNode, uint32 step, uint32 index, uint64 units) public {
        IContributionLedger.Submission memory submission = _submission(alice, 1, index);
        submission.step = step;
        submission.units = uint64(bound(units, 1, CAP));
        IContributionLedger.LeasedWork memory work = _work(submission, aliceNodeKey, block.timestamp);
        bytes32 leaf = _submissionLeaf(submission);

        vm.expectEmit(address(ledger));
        emit IContributionLedgerEvents.BatchCommitted(
            1, runId, leaf, 1, submission.units, PRICE, 1, uint40(block.timestamp)
        );
        vm.expectEmit(address(ledger));
        emit IContributionLedgerEvents.DirectlySubmitted(1, alice, work, _noSources());
        uint64 batchId = _submitAs(byNode ? aliceNode : alice, work);

        _remember(batchId, leaf, 1, submission.units);
        assertFalse(ledger.isDisputed(batches[batchId]), "the leaf is the root of a batch of one");
        assertEq(escrow.fundsOf(runId).reserved, uint256(submission.units) * PRICE, "set aside");
    }
}
