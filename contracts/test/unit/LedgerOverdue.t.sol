// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IContributionLedger, IContributionLedgerErrors} from "../../src/interfaces/IContributionLedger.sol";
import {IRewardEscrow, IRewardEscrowErrors, IRewardEscrowEvents} from "../../src/interfaces/IRewardEscrow.sol";
import {IWorkerRegistry} from "../../src/interfaces/IWorkerRegistry.sol";
import {LedgerTest} from "../LedgerTest.sol";

/// @title Batches whose validators let the deadline pass stand as claimed
/// forge-config: default.fuzz.runs = 64
contract LedgerOverdueTest is LedgerTest {
    uint256 private constant COUNT = 5;

    IContributionLedger.Submission[] private _claimed;
    uint64 private _batchId;
    uint256 private _dueAt;

    function setUp() public override {
        super.setUp();
        _startRun(WALLET / 2);
        IContributionLedger.Submission[] memory submissions = _submissions(alice, COUNT);
        for (uint256 i = 0; i < COUNT; ++i) {
            _claimed.push(submissions[i]);
        }
        _batchId = _commitSubmissions(submissions);
        _dueAt = block.timestamp + OUTCOME_DEADLINE;
    }

    function _proof(uint256 at) private view returns (IContributionLedger.OutcomeProof memory) {
        return _proveClaimed(_batchId, _claimed, at);
    }

    function _claimsOf(uint256 from, uint256 to) private view returns (IRewardEscrow.Claim[] memory) {
        return _justOne(_overdueClaimOf(_batchId, _claimed, _range(from, to)));
    }

    // ------------------------------------------------------------- overdue since

    function testFuzz_overdueSince_reverts_beforeTheDeadline(uint256 time) public {
        vm.warp(bound(time, block.timestamp, _dueAt - 1));
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerOutcomesPending.selector, _batchId, _dueAt)
        );
        ledger.overdueSince(batches[_batchId]);
    }

    function testFuzz_overdueSince_reverts_oncePosted(uint256 time) public {
        _post(_batchId, _accepted(COUNT), QUORUM);
        vm.warp(bound(time, block.timestamp, _dueAt + 365 days));
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerOutcomesPosted.selector, _batchId));
        ledger.overdueSince(batches[_batchId]);
    }

    function testFuzz_overdueSince_reverts_whenTheHeaderIsNot(uint256 field) public {
        _passDeadline();
        IContributionLedger.Batch memory header = batches[_batchId];
        _mutateHeader(header, field);
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerBatchMismatch.selector, header.batchId));
        ledger.overdueSince(header);
    }

    function testFuzz_overdueSince_tells(uint256 late) public {
        vm.warp(_dueAt + bound(late, 0, 365 days));
        assertEq(ledger.overdueSince(batches[_batchId]), _dueAt, "when outcomes were due");
    }

    // ------------------------------------------------------------------ standing

    function testFuzz_standing_isAsClaimed(uint256 at, uint256 time) public {
        at = bound(at, 0, COUNT - 1);
        uint256 closesAt = _dueAt + CHALLENGE_WINDOW;
        vm.warp(bound(time, _dueAt, closesAt + 1 days));
        IContributionLedger.Standing memory standing = ledger.standingOf(_proof(at));
        assertEq(standing.verdict, ACCEPTED, "accepted by default");
        assertEq(standing.outcome.units, _claimed[at].units, "for the units claimed");
        assertEq(standing.leaf, _overdueLeaf(_batchId, _claimed[at]), "named by the submission");
        assertEq(standing.closesAt, closesAt, "one window after the deadline");
        assertEq(standing.isFinal, block.timestamp >= closesAt, "final");
    }

    function testFuzz_standing_reverts_unlessExactlyAsClaimed(uint256 at, uint8 change) public {
        vm.assume(change != 0);
        at = bound(at, 0, 55);
        _passDeadline();
        IContributionLedger.OutcomeProof memory outcome = _proof(2);
        outcome.record[at] = bytes1(uint8(outcome.record[at]) ^ change);
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidProof.selector, _batchId, 2));
        ledger.standingOf(outcome);
    }

    function testFuzz_standing_reverts_whenProofIsBroken(bytes32 sibling) public {
        _passDeadline();
        IContributionLedger.OutcomeProof memory outcome = _proof(2);
        vm.assume(sibling != outcome.proof[0]);
        outcome.proof[0] = sibling;
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidProof.selector, _batchId, 2));
        ledger.standingOf(outcome);
    }

    function testFuzz_standing_hasOneNameWhateverThePosition(uint32 position) public {
        _passDeadline();
        IContributionLedger.OutcomeProof memory outcome = _proof(1);
        outcome.position = position;
        assertEq(ledger.standingOf(outcome).leaf, _overdueLeaf(_batchId, _claimed[1]), "no second case for one file");
    }

    // --------------------------------------------------------------------- claim

    function testFuzz_claim_reverts_beforeFinality(uint256 time) public {
        uint256 finalAt = _dueAt + CHALLENGE_WINDOW;
        vm.warp(bound(time, block.timestamp, finalAt - 1));
        IRewardEscrow.Claim[] memory claims = _claimsOf(0, COUNT);
        vm.expectRevert(abi.encodeWithSelector(IRewardEscrowErrors.EscrowNotFinal.selector, _batchId, finalAt));
        escrow.claim(claims);
    }

    function testFuzz_claim_reverts_whenARecordWasChanged(uint256 at, uint8 change) public {
        vm.assume(change != 0);
        // The last two bytes are verdict and reason; the first four name the worker, whose address is in the leaf.
        at = bound(at, 0, 2 * 56 - 1);
        vm.warp(_dueAt + CHALLENGE_WINDOW);
        IRewardEscrow.Claim[] memory claims = _claimsOf(0, 2);
        claims[0].records[at] = bytes1(uint8(claims[0].records[at]) ^ change);
        vm.assume(at < 56 || at >= 60);
        vm.expectRevert(abi.encodeWithSelector(IRewardEscrowErrors.EscrowInvalidProof.selector, _batchId));
        escrow.claim(claims);
    }

    function testFuzz_claim_reverts_forAnotherWorker(uint32 workerId) public {
        vm.assume(workerId != workers.workerOf(alice).workerId);
        vm.warp(_dueAt + CHALLENGE_WINDOW);
        IRewardEscrow.Claim[] memory claims = _claimsOf(0, 2);
        // The second record names somebody else than the first, whose address made both leaves.
        for (uint256 i = 0; i < 4; ++i) {
            claims[0].records[56 + i] = bytes4(workerId)[i];
        }
        vm.expectRevert(abi.encodeWithSelector(IRewardEscrowErrors.EscrowMixedClaim.selector, _batchId, 1));
        escrow.claim(claims);
    }

    function testFuzz_claim_paysAsClaimed(address caller, uint256 from, uint256 to, uint256 late) public {
        from = bound(from, 0, COUNT - 1);
        to = bound(to, from + 1, COUNT);
        vm.warp(_dueAt + CHALLENGE_WINDOW + bound(late, 0, 30 days));
        uint256 units = 1000 * (to - from);
        IRewardEscrow.Claim[] memory claims = _claimsOf(from, to);
        vm.expectEmit(address(escrow));
        emit IRewardEscrowEvents.RewardClaimed(runId, alice, to - from, units, units * PRICE);
        vm.prank(caller);
        assertEq(escrow.claim(claims), units * PRICE, "amount");
        for (uint256 i = 0; i < COUNT; ++i) {
            assertEq(escrow.isPaid(runId, alice, 1, uint32(i)), i >= from && i < to, "those and no others");
        }
    }

    function testFuzz_claim_reverts_whenPaidBefore(uint256 at) public {
        at = bound(at, 0, COUNT - 1);
        vm.warp(_dueAt + CHALLENGE_WINDOW);
        escrow.claim(_claimsOf(0, COUNT));
        IRewardEscrow.Claim[] memory claims = _claimsOf(at, at + 1);
        vm.expectRevert(abi.encodeWithSelector(IRewardEscrowErrors.EscrowSlotPaid.selector, runId, alice, 1, at));
        escrow.claim(claims);
    }

    function testFuzz_claim_reverts_beyondTheUnitsCommitted(uint256 missing, uint256 first) public {
        missing = bound(missing, 1, 1000 * COUNT);
        first = bound(first, 1, COUNT);
        uint256 committed = 1000 * COUNT - missing;
        // Whoever committed declared less than its submissions claim: nobody counted until now.
        uint64 batchId = _commitRoot(_root(_submissionLeaves(_claimed)), COUNT, committed);
        vm.warp(_dueAt + CHALLENGE_WINDOW);
        uint256 paid;
        for (uint256 i = 0; i < COUNT; ++i) {
            IRewardEscrow.Claim[] memory claims = _justOne(_overdueClaimOf(batchId, _claimed, _range(i, i + 1)));
            if (paid + 1000 > committed) {
                vm.expectRevert(
                    abi.encodeWithSelector(
                        IRewardEscrowErrors.EscrowUnitsExceeded.selector, batchId, paid + 1000, committed
                    )
                );
                escrow.claim(claims);
                return;
            }
            escrow.claim(claims);
            paid += 1000;
        }
        fail();
    }

    function test_claim_reverts_beyondTheUnitsCommitted_inOneCall() public {
        uint64 batchId = _commitRoot(_root(_submissionLeaves(_claimed)), COUNT, 1000 * COUNT - 1);
        vm.warp(_dueAt + CHALLENGE_WINDOW);
        IRewardEscrow.Claim[] memory claims = _justOne(_overdueClaimOf(batchId, _claimed, _range(0, COUNT)));
        vm.expectRevert(
            abi.encodeWithSelector(
                IRewardEscrowErrors.EscrowUnitsExceeded.selector, batchId, 1000 * COUNT, 1000 * COUNT - 1
            )
        );
        escrow.claim(claims);
    }

    function test_recover_reverts_forWhatWasAcceptedByDefault() public {
        vm.warp(_dueAt + CHALLENGE_WINDOW);
        IRewardEscrow.Claim[] memory claims = _claimsOf(0, COUNT);
        vm.expectRevert(abi.encodeWithSelector(IRewardEscrowErrors.EscrowAccepted.selector, _batchId, 0));
        escrow.recover(claims);
    }

    // -------------------------------------------------------------------- direct

    function test_direct_isPaidWhenNobodyLooks() public {
        IContributionLedger.Submission[] memory submissions = new IContributionLedger.Submission[](1);
        submissions[0] = _submission(bob, 2, 0);
        bytes memory signature = _signSubmission(submissions[0], bobNodeKey);
        vm.prank(bob);
        uint64 batchId = ledger.submitDirect(submissions[0], signature);
        _remember(batchId, _submissionLeaf(submissions[0]), 1, 1000);
        vm.warp(block.timestamp + OUTCOME_DEADLINE + CHALLENGE_WINDOW);
        uint256 paid = escrow.claim(_justOne(_overdueClaimOf(batchId, submissions, _range(0, 1))));
        assertEq(paid, 1000 * uint256(PRICE), "a censored worker is paid without orchestrator and validators");
    }

    // --------------------------------------------------------------------- cases

    function testFuzz_case_blocksTheClaim_whileOpen(uint256 at, uint256 late) public {
        at = bound(at, 0, COUNT - 1);
        _passDeadline();
        _challenge(_proof(at), REJECTED);
        vm.warp(_dueAt + CHALLENGE_WINDOW + bound(late, 0, 30 days));
        IRewardEscrow.Claim[] memory claims = _claimsOf(0, COUNT);
        vm.expectRevert(abi.encodeWithSelector(IRewardEscrowErrors.EscrowDisputed.selector, _batchId, at));
        escrow.claim(claims);
    }

    function testFuzz_case_thatOverturns_endsTheClaim(uint256 at, uint8 verdict) public {
        at = bound(at, 0, COUNT - 1);
        verdict = uint8(bound(verdict, INCOMPLETE, FRAUD));
        _passDeadline();
        _overturn(_proof(at), verdict);
        vm.warp(_dueAt + CHALLENGE_WINDOW);
        IRewardEscrow.Claim[] memory claims = _claimsOf(0, COUNT);
        vm.expectRevert(abi.encodeWithSelector(IRewardEscrowErrors.EscrowNotAccepted.selector, _batchId, at, verdict));
        escrow.claim(claims);
        assertEq(ledger.standingOf(_proof(at)).verdict, verdict, "the jury's verdict stands");
    }

    function testFuzz_case_thatFails_changesNothing(uint256 at) public {
        at = bound(at, 0, COUNT - 1);
        _passDeadline();
        _decide(_proof(at), FRAUD, false);
        vm.warp(_dueAt + CHALLENGE_WINDOW);
        assertEq(escrow.claim(_claimsOf(0, COUNT)), 1000 * COUNT * uint256(PRICE), "paid as claimed");
    }

    // --------------------------------------------------------------------- fraud

    function testFuzz_executeFraud_reverts_beforeAJuryFoundFraud(uint256 at) public {
        at = bound(at, 0, COUNT - 1);
        _passDeadline();
        IContributionLedger.OutcomeProof memory outcome = _proof(at);
        bytes memory signature = _signSubmission(_claimed[at], aliceNodeKey);
        IContributionLedger.Submission memory submission = _claimed[at];
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerNotFraud.selector, _batchId, at, ACCEPTED)
        );
        ledger.executeFraud(outcome, submission, signature);
    }

    function testFuzz_executeFraud_slashes_afterAJuryFoundFraud(uint256 at) public {
        at = bound(at, 0, COUNT - 1);
        _passDeadline();
        IContributionLedger.OutcomeProof memory outcome = _proof(at);
        _overturn(outcome, FRAUD);
        uint256 amount = ledger.executeFraud(outcome, _claimed[at], _signSubmission(_claimed[at], aliceNodeKey));
        assertEq(amount, REQUIRED_STAKE * FRAUD_PPM / PPM, "slashed");
        _assertStatus(alice, IWorkerRegistry.Status.Jailed, "jailed");
        IContributionLedger.Standing memory standing = ledger.standingOf(outcome);
        assertEq(vault.escrowOf(standing.offence).reporter, challenger, "whoever found it reported it");
        vm.warp(_dueAt + CHALLENGE_WINDOW);
        ledger.finaliseFraud(outcome);
        assertEq(token.balanceOf(insurance), amount * INSURANCE_PPM / PPM, "final");
    }
}
