// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IContributionLedgerErrors, IContributionLedgerEvents} from "../../src/interfaces/IContributionLedger.sol";
import {IRewardEscrowErrors, IRewardEscrowEvents} from "../../src/interfaces/IRewardEscrow.sol";
import {IRunRegistry, IRunRegistryErrors} from "../../src/interfaces/IRunRegistry.sol";
import {LedgerTest} from "../LedgerTest.sol";

/// @title commitBatch: who may, for which runs, and what is set aside
contract LedgerCommitTest is LedgerTest {
    uint256 private constant FUNDS = WALLET / 2;
    bytes32 private constant ROOT = keccak256("root");

    // ---------------------------------------------------------------- admission

    function testFuzz_commitBatch_reverts_whenNotTheOrchestrator(address caller) public {
        vm.assume(caller != orchestrator);
        _expectUnauthorized(caller);
        vm.prank(caller);
        ledger.commitBatch(runId, ROOT, 1, 1);
    }

    function testFuzz_commitBatch_reverts_whenTheOrchestratorWasReplaced(address successor) public {
        vm.assume(successor != address(0) && successor != orchestrator);
        vm.prank(owner);
        runs.rotateOrchestrator(runId, orchestrator, successor);
        _expectUnauthorized(orchestrator);
        vm.prank(orchestrator);
        ledger.commitBatch(runId, ROOT, 1, 1);
        vm.prank(successor);
        assertEq(ledger.commitBatch(runId, ROOT, 1, 1), 1, "the new key commits");
    }

    function test_commitBatch_reverts_whenTheOrchestratorIsOfAnotherRun() public {
        IRunRegistry.RunConfig memory config = _config();
        config.orchestrator = stranger;
        uint64 other = runs.createRun(config);
        _expectUnauthorized(orchestrator);
        vm.prank(orchestrator);
        ledger.commitBatch(other, ROOT, 1, 1);
    }

    function testFuzz_commitBatch_reverts_whenRunIsUnknown(uint64 unknown) public {
        vm.assume(unknown != runId);
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunUnknown.selector, unknown));
        vm.prank(orchestrator);
        ledger.commitBatch(unknown, ROOT, 1, 1);
    }

    function test_commitBatch_reverts_whenPaused_andWorksAgainAfterwards() public {
        vm.prank(owner);
        runs.setSubmissionsPaused(runId, true);
        _expectPaused();
        vm.prank(owner);
        runs.setSubmissionsPaused(runId, false);
        assertEq(_commit(1), 1, "resumed");
    }

    function test_commitBatch_reverts_whenClosed() public {
        vm.prank(owner);
        runs.closeRun(runId);
        _expectPaused();
    }

    function _expectPaused() private {
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerPaused.selector, runId));
        vm.prank(orchestrator);
        ledger.commitBatch(runId, ROOT, 1, 1);
    }

    // -------------------------------------------------------------------- bounds

    function testFuzz_commitBatch_reverts_whenCountIsTooLarge(uint32 count) public {
        _expectInvalidBatch(ROOT, uint32(bound(count, 4097, type(uint32).max)), 1);
    }

    function test_commitBatch_takesTheLargestCount() public {
        assertEq(_commitRoot(ROOT, 4096, 1), 1, "4096 submissions");
    }

    function test_commitBatch_reverts_whenEmpty() public {
        _expectInvalidBatch(ROOT, 0, 1);
    }

    function testFuzz_commitBatch_reverts_whenRootIsZero(uint32 count) public {
        _expectInvalidBatch(0, uint32(bound(count, 1, 4096)), 1);
    }

    function testFuzz_commitBatch_reverts_whenItClaimsNothing(uint32 count) public {
        _expectInvalidBatch(ROOT, uint32(bound(count, 1, 4096)), 0);
    }

    function _expectInvalidBatch(bytes32 root, uint32 count, uint64 units) private {
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidBatch.selector, root, count));
        vm.prank(orchestrator);
        ledger.commitBatch(runId, root, count, units);
    }

    // --------------------------------------------------------------------- money

    function testFuzz_commitBatch_reverts_whenTheRunCannotPay(uint64 units) public {
        units = uint64(bound(units, FUNDS / PRICE + 1, type(uint64).max));
        _expectUnderfunded(uint256(units) * PRICE, FUNDS);
        vm.prank(orchestrator);
        ledger.commitBatch(runId, ROOT, 1, units);
    }

    function testFuzz_commitBatch_reverts_whenEarlierBatchesTookTheMoney(uint64 first) public {
        first = uint64(bound(first, 1, FUNDS / PRICE - 1));
        uint256 left = FUNDS / PRICE - first;
        _commitRoot(ROOT, 1, first);
        _expectUnderfunded((left + 1) * PRICE, left * PRICE);
        vm.prank(orchestrator);
        ledger.commitBatch(runId, ROOT, 1, uint64(left + 1));
        assertEq(_commitRoot(ROOT, 1, left), 2, "what is left can be used to the last wei");
    }

    function test_commitBatch_reverts_whenOnlyAnotherRunCouldPay() public {
        uint64 rich = runId;
        runId = _createRun();
        _expectUnderfunded(PRICE, 0);
        vm.prank(orchestrator);
        ledger.commitBatch(runId, ROOT, 1, 1);
        assertEq(escrow.fundsOf(rich).available, FUNDS, "runs do not pay for one another");
    }

    function _expectUnderfunded(uint256 due, uint256 available) private {
        vm.expectRevert(abi.encodeWithSelector(IRewardEscrowErrors.EscrowUnderfunded.selector, runId, due, available));
    }

    // ------------------------------------------------------------------- success

    function testFuzz_commitBatch_records(bytes32 root, uint32 count, uint64 units, uint40 time) public {
        vm.assume(root != 0);
        count = uint32(bound(count, 1, 4096));
        units = uint64(bound(units, 1, FUNDS / PRICE));
        vm.warp(time);
        vm.expectEmit(address(ledger));
        emit IContributionLedgerEvents.BatchCommitted(1, runId, root, count, units, PRICE, 1, time);
        vm.expectEmit(address(escrow));
        emit IRewardEscrowEvents.RewardReserved(runId, uint256(units) * PRICE);
        uint64 batchId = _commitRoot(root, count, units);

        assertEq(batchId, 1, "ids count from 1");
        assertEq(ledger.batchCount(), 1, "count");
        bytes32 hash = keccak256(abi.encode(batches[1]));
        assertEq(ledger.commitmentOf(1), hash & ~bytes32(uint256(1)), "one slot: the header's hash, nobody challenged");
        assertFalse(ledger.isDisputed(batches[1]), "the header is the batch's");
        assertEq(escrow.fundsOf(runId).available, FUNDS - uint256(units) * PRICE, "available");
        assertEq(escrow.fundsOf(runId).reserved, uint256(units) * PRICE, "set aside");
    }

    function testFuzz_commitBatch_keepsTheTermsOfTheCommitment(uint88 price) public {
        price = uint88(bound(price, PRICE / 2, 2 * PRICE));
        uint64 before = _commit(1);
        (IRunRegistry.Terms memory terms,) = runs.termsOf(runId);
        terms.pricePerUnit = price;
        _changeTerms(terms);
        uint64 later = _commit(1);
        assertEq(batches[before].pricePerUnit, PRICE, "the price as committed");
        assertEq(batches[before].terms, 1, "the terms as committed");
        _assertHeader(before, "the old header still stands");
        assertEq(batches[later].pricePerUnit, price, "the new price");
        assertEq(batches[later].terms, 2, "the new terms");
        _assertHeader(later, "for new batches");
        assertEq(escrow.fundsOf(runId).reserved, 1000 * (uint256(PRICE) + price), "set aside at either price");
    }
}
