// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IContributionLedger, IContributionLedgerErrors} from "../../src/interfaces/IContributionLedger.sol";
import {IRewardEscrowErrors, IRewardEscrowEvents} from "../../src/interfaces/IRewardEscrow.sol";
import {IRunRegistry, IRunRegistryErrors} from "../../src/interfaces/IRunRegistry.sol";
import {BaseTest} from "../BaseTest.sol";

contract RewardEscrowTest is BaseTest {
    uint256 private constant FUNDS = 50_000 ether;

    function setUp() public override {
        super.setUp();
        _startRun(FUNDS);
    }

    function _proofs(uint64 batchId, bytes[] memory records)
        private
        pure
        returns (IContributionLedger.OutcomeProof[] memory proofs)
    {
        proofs = new IContributionLedger.OutcomeProof[](records.length);
        for (uint256 i = 0; i < records.length; ++i) {
            proofs[i] = _prove(batchId, records, i);
        }
    }

    /// @dev Proofs of outcomes whose challenge window is over.
    function _finalProofs(bytes[] memory records) private returns (IContributionLedger.OutcomeProof[] memory) {
        uint64 batchId = _commitAndPost(records);
        _passChallengeWindow();
        return _proofs(batchId, records);
    }

    // --------------------------------------------------------------------- fund

    function test_fund_reverts_whenZero() public {
        vm.expectRevert(IRewardEscrowErrors.EscrowEmpty.selector);
        escrow.fund(runId, 0);
    }

    function testFuzz_fund_reverts_whenRunIsUnknown(uint64 unknown, uint256 amount) public {
        vm.assume(unknown != runId);
        amount = bound(amount, 1, WALLET);
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunUnknown.selector, unknown));
        vm.prank(stranger);
        escrow.fund(unknown, amount);
    }

    function testFuzz_fund_addsUp(uint256 first, uint256 second) public {
        first = bound(first, 1, WALLET - 1);
        second = bound(second, 1, WALLET - first);
        vm.startPrank(stranger);
        escrow.fund(runId, first);
        vm.expectEmit(address(escrow));
        emit IRewardEscrowEvents.RunFunded(runId, stranger, second);
        escrow.fund(runId, second);
        (uint256 funded, uint256 paid) = escrow.fundsOf(runId);
        assertEq(funded, FUNDS + first + second, "funded");
        assertEq(paid, 0, "paid");
        assertEq(token.balanceOf(address(escrow)), funded, "held");
    }

    // -------------------------------------------------------------------- claim

    function test_claim_reverts_whenEmpty() public {
        vm.expectRevert(IRewardEscrowErrors.EscrowEmpty.selector);
        escrow.claim(new IContributionLedger.OutcomeProof[](0));
    }

    function testFuzz_claim_reverts_beforeFinality(uint256 waited) public {
        bytes[] memory records = _accepted(2);
        uint64 batchId = _commitAndPost(records);
        vm.warp(block.timestamp + bound(waited, 0, CHALLENGE_WINDOW - 1));
        IContributionLedger.OutcomeProof[] memory proofs = _proofs(batchId, records);
        vm.expectRevert(abi.encodeWithSelector(IRewardEscrowErrors.EscrowNotFinal.selector, batchId, 0));
        escrow.claim(proofs);
    }

    function testFuzz_claim_reverts_whenNotAccepted(uint8 verdict) public {
        verdict = uint8(bound(verdict, INCOMPLETE, FRAUD));
        IContributionLedger.OutcomeProof[] memory proofs = _finalProofs(_one(_record(alice, 1, 0, verdict)));
        vm.expectRevert(
            abi.encodeWithSelector(IRewardEscrowErrors.EscrowNotAccepted.selector, proofs[0].batchId, 0, verdict)
        );
        escrow.claim(proofs);
    }

    function testFuzz_claim_reverts_whenProofIsBroken(bytes32 sibling) public {
        IContributionLedger.OutcomeProof[] memory proofs = _finalProofs(_accepted(2));
        vm.assume(sibling != proofs[0].proof[0]);
        proofs[0].proof[0] = sibling;
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidProof.selector, proofs[0].batchId, 0)
        );
        escrow.claim(proofs);
    }

    function testFuzz_claim_reverts_whenPaidBefore(uint256 count, uint256 again) public {
        count = bound(count, 1, 20);
        again = bound(again, 0, count - 1);
        IContributionLedger.OutcomeProof[] memory proofs = _finalProofs(_accepted(count));
        escrow.claim(proofs);
        IContributionLedger.OutcomeProof[] memory second = new IContributionLedger.OutcomeProof[](1);
        second[0] = proofs[again];
        vm.expectRevert(abi.encodeWithSelector(IRewardEscrowErrors.EscrowSlotPaid.selector, runId, alice, 1, again));
        escrow.claim(second);
    }

    function testFuzz_claim_reverts_whenListedTwice(uint32 index) public {
        IContributionLedger.OutcomeProof[] memory one = _finalProofs(_one(_record(alice, 1, index, ACCEPTED)));
        IContributionLedger.OutcomeProof[] memory proofs = new IContributionLedger.OutcomeProof[](2);
        (proofs[0], proofs[1]) = (one[0], one[0]);
        vm.expectRevert(abi.encodeWithSelector(IRewardEscrowErrors.EscrowSlotPaid.selector, runId, alice, 1, index));
        escrow.claim(proofs);
    }

    function testFuzz_claim_reverts_whenTheSlotWasPaidThroughAnotherBatch(uint32 step, uint32 index) public {
        vm.assume(step != 0);
        bytes[] memory records = _one(_record(alice, step, index, ACCEPTED));
        escrow.claim(_finalProofs(records));
        IContributionLedger.OutcomeProof[] memory proofs = _finalProofs(records);
        vm.expectRevert(abi.encodeWithSelector(IRewardEscrowErrors.EscrowSlotPaid.selector, runId, alice, step, index));
        escrow.claim(proofs);
    }

    function test_claim_reverts_whenWorkersAreMixed() public {
        IContributionLedger.OutcomeProof[] memory proofs =
            _finalProofs(_two(_record(alice, 1, 0, ACCEPTED), _record(bob, 1, 0, ACCEPTED)));
        vm.expectRevert(abi.encodeWithSelector(IRewardEscrowErrors.EscrowMixedClaim.selector, proofs[1].batchId, 1));
        escrow.claim(proofs);
    }

    function test_claim_reverts_whenRunsAreMixed() public {
        IContributionLedger.OutcomeProof[] memory first = _finalProofs(_one(_record(alice, 1, 0, ACCEPTED)));
        IRunRegistry.RunConfig memory config = _config();
        vm.prank(owner);
        runId = runs.createRun(config);
        IContributionLedger.OutcomeProof[] memory second = _finalProofs(_one(_record(alice, 1, 0, ACCEPTED)));
        IContributionLedger.OutcomeProof[] memory proofs = new IContributionLedger.OutcomeProof[](2);
        (proofs[0], proofs[1]) = (first[0], second[0]);
        vm.expectRevert(abi.encodeWithSelector(IRewardEscrowErrors.EscrowMixedClaim.selector, second[0].batchId, 0));
        escrow.claim(proofs);
    }

    function testFuzz_claim_reverts_whenUnderfunded(uint32 units) public {
        units = uint32(bound(units, FUNDS / PRICE + 1, type(uint32).max));
        IContributionLedger.Outcome memory outcome = _outcome(alice, 1, 0, ACCEPTED);
        outcome.units = units;
        IContributionLedger.OutcomeProof[] memory proofs = _finalProofs(_one(_pack(outcome)));
        vm.expectRevert(
            abi.encodeWithSelector(IRewardEscrowErrors.EscrowUnderfunded.selector, runId, uint256(units) * PRICE, FUNDS)
        );
        escrow.claim(proofs);
    }

    function testFuzz_claim_reverts_whenNeverFunded(uint32 units) public {
        units = uint32(bound(units, 1, type(uint32).max));
        IRunRegistry.RunConfig memory config = _config();
        vm.prank(owner);
        runId = runs.createRun(config);
        IContributionLedger.Outcome memory outcome = _outcome(alice, 1, 0, ACCEPTED);
        outcome.units = units;
        IContributionLedger.OutcomeProof[] memory proofs = _finalProofs(_one(_pack(outcome)));
        vm.expectRevert(
            abi.encodeWithSelector(IRewardEscrowErrors.EscrowUnderfunded.selector, runId, uint256(units) * PRICE, 0)
        );
        escrow.claim(proofs);
        assertFalse(escrow.isPaid(runId, alice, 1, 0), "the slot can be paid later");
    }

    function testFuzz_claim_paysUnits(address caller, uint32[5] memory units) public {
        bytes[] memory records = new bytes[](5);
        uint256 sum;
        for (uint256 i = 0; i < 5; ++i) {
            IContributionLedger.Outcome memory outcome = _outcome(alice, 1, uint32(i), ACCEPTED);
            outcome.units = uint32(bound(units[i], 0, FUNDS / PRICE / 5));
            sum += outcome.units;
            records[i] = _pack(outcome);
        }
        IContributionLedger.OutcomeProof[] memory proofs = _finalProofs(records);
        uint256 before = token.balanceOf(alice);
        vm.expectEmit(address(escrow));
        emit IRewardEscrowEvents.RewardClaimed(runId, alice, 5, sum, sum * PRICE);
        vm.prank(caller);
        assertEq(escrow.claim(proofs), sum * PRICE, "amount");
        assertEq(token.balanceOf(alice), before + sum * PRICE, "the worker is paid, whoever calls");
        (, uint256 paid) = escrow.fundsOf(runId);
        assertEq(paid, sum * PRICE, "paid");
    }

    function testFuzz_claim_paysABannedWorkersFinalWork(bytes32 offence) public {
        IContributionLedger.OutcomeProof[] memory proofs = _finalProofs(_accepted(1));
        vm.prank(address(ledger));
        workers.ban(alice, offence);
        assertEq(escrow.claim(proofs), 1000 * uint256(PRICE), "earned before");
    }

    function test_claim_worksWhileSubmissionsArePaused() public {
        IContributionLedger.OutcomeProof[] memory proofs = _finalProofs(_accepted(1));
        vm.prank(owner);
        runs.setSubmissionsPaused(runId, true);
        assertEq(escrow.claim(proofs), 1000 * uint256(PRICE), "pausing never holds money back");
    }

    function testFuzz_isPaid_tellsSlotsApart(uint32 step, uint32 index, uint32 otherStep, uint32 otherIndex) public {
        vm.assume(step != 0);
        escrow.claim(_finalProofs(_one(_record(alice, step, index, ACCEPTED))));
        assertTrue(escrow.isPaid(runId, alice, step, index), "this slot");
        assertFalse(escrow.isPaid(runId, bob, step, index), "another worker's");
        assertFalse(escrow.isPaid(runId + 1, alice, step, index), "another run's");
        bool same = step == otherStep && index == otherIndex;
        assertEq(escrow.isPaid(runId, alice, otherStep, otherIndex), same, "another slot");
    }

    function testFuzz_isPaid_tellsNeighboursApart(uint32 step, uint32 index) public {
        vm.assume(step != 0);
        escrow.claim(_finalProofs(_one(_record(alice, step, index, ACCEPTED))));
        for (uint32 bit = 0; bit < 32; ++bit) {
            uint32 flipped = uint32(1) << bit;
            assertFalse(escrow.isPaid(runId, alice, step ^ flipped, index), "another step");
            assertFalse(escrow.isPaid(runId, alice, step, index ^ flipped), "another index");
        }
    }
}
