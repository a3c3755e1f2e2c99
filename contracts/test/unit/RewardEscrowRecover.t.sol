// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IContributionLedger, IContributionLedgerErrors} from "../../src/interfaces/IContributionLedger.sol";
import {IRewardEscrow, IRewardEscrowErrors, IRewardEscrowEvents} from "../../src/interfaces/IRewardEscrow.sol";
import {IRunRegistryErrors} from "../../src/interfaces/IRunRegistry.sol";
import {EscrowTest} from "../EscrowTest.sol";

/// @title Money that nobody earned finds its way back
contract RewardEscrowRecoverTest is EscrowTest {
    /// @dev `count` rejected records of Alice and Bob in turn.
    function _rejected(uint256 count) private view returns (bytes[] memory records) {
        records = new bytes[](count);
        for (uint256 i = 0; i < count; ++i) {
            records[i] = _record(i % 2 == 0 ? alice : bob, 1, uint32(i), uint8(INCOMPLETE + i % 3));
        }
    }

    function _expect(bytes memory why, IRewardEscrow.Claim[] memory claims) private {
        vm.expectRevert(why);
        escrow.recover(claims);
    }

    // ------------------------------------------------------------------ recover

    function test_recover_reverts_whenEmpty() public {
        _expect(abi.encodeWithSelector(IRewardEscrowErrors.EscrowEmpty.selector), new IRewardEscrow.Claim[](0));
    }

    function testFuzz_recover_reverts_whenTheHeaderIsNot(uint256 field) public {
        vm.warp(1 days);
        bytes[] memory records = _rejected(2);
        IRewardEscrow.Claim[] memory claims = _claimsOf(_finalBatch(records), records, 0, 2);
        _mutateHeader(claims[0].batch, field);
        bytes memory why =
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerBatchMismatch.selector, claims[0].batch.batchId);
        _expect(why, claims);
    }

    function testFuzz_recover_reverts_beforeFinality(uint256 waited) public {
        bytes[] memory records = _rejected(2);
        uint64 batchId = _commitAndPost(records);
        uint256 finalAt = block.timestamp + CHALLENGE_WINDOW;
        vm.warp(block.timestamp + bound(waited, 0, CHALLENGE_WINDOW - 1));
        bytes memory why = abi.encodeWithSelector(IRewardEscrowErrors.EscrowNotFinal.selector, batchId, finalAt);
        _expect(why, _claimsOf(batchId, records, 0, 2));
    }

    function testFuzz_recover_reverts_whenAccepted(uint256 at) public {
        at = bound(at, 0, 5);
        bytes[] memory records = _rejected(6);
        records[at] = _record(alice, 1, uint32(at), ACCEPTED);
        uint64 batchId = _finalBatch(records);
        bytes memory why = abi.encodeWithSelector(IRewardEscrowErrors.EscrowAccepted.selector, batchId, at);
        _expect(why, _claimsOf(batchId, records, 0, 6));
    }

    function testFuzz_recover_reverts_whenRecoveredBefore(uint256 count, uint256 again) public {
        count = bound(count, 1, 20);
        again = bound(again, 0, count - 1);
        bytes[] memory records = _rejected(count);
        uint64 batchId = _finalBatch(records);
        escrow.recover(_claimsOf(batchId, records, 0, count));
        bytes memory why = abi.encodeWithSelector(IRewardEscrowErrors.EscrowRecovered.selector, batchId, again);
        _expect(why, _claimsOf(batchId, records, again, again + 1));
    }

    function testFuzz_recover_reverts_whenTheProofIsChanged(uint256 what) public {
        bytes[] memory records = _rejected(9);
        uint64 batchId = _finalBatch(records);
        IRewardEscrow.Claim memory claimed = _claimOf(batchId, records, _range(2, 5));
        what = bound(what, 0, 3);
        if (what == 0) claimed.records[56 + 54] = bytes1(FRAUD + 1);
        if (what == 1) claimed.siblings[0] = keccak256("other sibling");
        if (what == 2) claimed.positions = _range(3, 6);
        if (what == 3) claimed.records[52] ^= 0x01;
        bytes memory why = abi.encodeWithSelector(IRewardEscrowErrors.EscrowInvalidProof.selector, batchId);
        _expect(why, _justOne(claimed));
    }

    function testFuzz_recover_reverts_whileACaseIsOpen(uint256 late) public {
        bytes[] memory records = _rejected(3);
        uint64 batchId = _commitAndPost(records);
        _dispute(batchId, records, 1, ACCEPT);
        vm.warp(block.timestamp + CHALLENGE_WINDOW + bound(late, 0, 30 days));
        bytes memory why = abi.encodeWithSelector(IRewardEscrowErrors.EscrowDisputed.selector, batchId, 1);
        _expect(why, _claimsOf(batchId, records, 0, 3));
    }

    function test_recover_reverts_whenAJuryAccepted() public {
        bytes[] memory records = _rejected(3);
        uint64 batchId = _commitAndPost(records);
        _overturn(batchId, records, 1, ACCEPTED);
        _passChallengeWindow();
        bytes memory why = abi.encodeWithSelector(IRewardEscrowErrors.EscrowAccepted.selector, batchId, 1);
        _expect(why, _claimsOf(batchId, records, 0, 3));
        assertEq(escrow.claim(_claimsOf(batchId, records, 1, 2)), PER_RECORD, "its worker is paid");
    }

    function testFuzz_recover_freesWhatAJuryRejected(uint8 verdict) public {
        verdict = uint8(bound(verdict, INCOMPLETE, FRAUD));
        bytes[] memory records = _accepted(3);
        uint64 batchId = _commitAndPost(records);
        _overturn(batchId, records, 1, verdict);
        _passChallengeWindow();
        assertEq(escrow.recover(_claimsOf(batchId, records, 1, 2)), PER_RECORD, "free again");
    }

    function test_recover_reverts_whenRunsAreMixed() public {
        bytes[] memory records = _rejected(1);
        uint64 first = _finalBatch(records);
        runId = _createRun();
        vm.prank(owner);
        escrow.fund(runId, FUNDS);
        uint64 second = _finalBatch(records);
        IRewardEscrow.Claim[] memory claims = new IRewardEscrow.Claim[](2);
        claims[0] = _claimOf(first, records, _range(0, 1));
        claims[1] = _claimOf(second, records, _range(0, 1));
        _expect(abi.encodeWithSelector(IRewardEscrowErrors.EscrowMixedClaim.selector, second, 0), claims);
    }

    function testFuzz_recover_freesWhatWasSetAside(address caller, uint256 count) public {
        count = bound(count, 1, 40);
        bytes[] memory records = _rejected(count);
        uint64 batchId = _finalBatch(records);
        uint256 amount = count * PER_RECORD;
        IRewardEscrow.Claim[] memory claims = _claimsOf(batchId, records, 0, count);
        vm.expectEmit(address(escrow));
        emit IRewardEscrowEvents.RewardRecovered(runId, count, amount);
        vm.prank(caller);
        assertEq(escrow.recover(claims), amount, "of any workers at once");
        _assertFunds(FUNDS, 0);
    }

    /// @dev Of 300 positions; 256 share a word.
    function test_recover_tellsPositionsApart() public {
        bytes[] memory records = _rejected(300);
        uint64 batchId = _finalBatch(records);
        uint256 position = 17;
        escrow.recover(_claimsOf(batchId, records, position, position + 1));
        for (uint256 bit = 0; bit < 9; ++bit) {
            uint256 other = position ^ 1 << bit;
            uint256 amount = escrow.recover(_claimsOf(batchId, records, other, other + 1));
            assertEq(amount, PER_RECORD, "another position");
        }
    }

    function test_recover_tellsBatchesApart() public {
        bytes[] memory records = _rejected(3);
        uint64 first = _finalBatch(records);
        escrow.recover(_claimsOf(first, records, 0, 3));
        uint64 second = _finalBatch(records);
        assertEq(escrow.recover(_claimsOf(second, records, 0, 3)), 3 * PER_RECORD, "set aside for each batch");
        _assertFunds(FUNDS, 0);
    }

    function test_recover_reverts_whenTheBatchIsWithheld() public {
        bytes[] memory records = _rejected(2);
        uint64 batchId = _commit(2);
        _withhold(batchId);
        _passChallengeWindow();
        bytes memory why = abi.encodeWithSelector(IRewardEscrowErrors.EscrowNotJudged.selector, batchId);
        _expect(why, _claimsOf(batchId, records, 0, 2));
    }

    function test_recover_reverts_whenTheBatchIsVoid() public {
        bytes[] memory records = _rejected(2);
        uint64 batchId = _commit(2);
        _passAppeal();
        ledger.voidBatch(batches[batchId]);
        bytes memory why = abi.encodeWithSelector(IContributionLedgerErrors.LedgerBatchMismatch.selector, batchId);
        _expect(why, _claimsOf(batchId, records, 0, 2));
    }

    /// @dev A jury may accept the work until then.
    function testFuzz_recover_reverts_whileAPauseProlongsAFraudsWindow(uint256 waited) public {
        bytes[] memory records = _one(_record(alice, 1, 0, FRAUD));
        uint64 batchId = _commitAndPost(records);
        uint256 finalAt = _pauseSlashing() + CHALLENGE_WINDOW;
        vm.warp(finalAt - bound(waited, 1, SLASH_PAUSE));
        bytes memory why = abi.encodeWithSelector(IRewardEscrowErrors.EscrowNotFinal.selector, batchId, finalAt);
        _expect(why, _claimsOf(batchId, records, 0, 1));
        vm.warp(finalAt);
        assertEq(escrow.recover(_claimsOf(batchId, records, 0, 1)), PER_RECORD, "free once nobody can overturn it");
    }

    function test_recover_ofWhatIsNoFraud_waitsForNoPause() public {
        bytes[] memory records = _one(_record(alice, 1, 0, REJECTED));
        uint64 batchId = _commitAndPost(records);
        _pauseSlashing();
        _passChallengeWindow();
        assertEq(escrow.recover(_claimsOf(batchId, records, 0, 1)), PER_RECORD, "its window is as long as ever");
    }

    function testFuzz_recover_freesWhatJudgesOfTheNetworkRejected(uint8 verdict) public {
        verdict = uint8(bound(verdict, INCOMPLETE, FRAUD));
        uint64 batchId = _commitWork(3);
        _passDeadline();
        uint64 ownId = _splitOff(batchId, 3, 2);
        bytes[] memory records = _judgeByNetwork(ownId, 2, _rulingOf(verdict));
        _passChallengeWindow();
        uint256 available = escrow.fundsOf(runId).available;
        assertEq(escrow.recover(_claimsOf(ownId, records, 0, 1)), PER_RECORD, "free again");
        _assertFunds(available + PER_RECORD, 2 * PER_RECORD);
    }

    // -------------------------------------------------------------- void batches

    function testFuzz_voidBatch_freesAllThatWasSetAside(address caller, uint256 units) public {
        units = bound(units, 1, FUNDS / PRICE);
        uint64 batchId = _commitRoot(keccak256("submissions"), 1, units);
        _assertFunds(FUNDS - units * PRICE, units * PRICE);
        _passAppeal();
        vm.expectEmit(address(escrow));
        emit IRewardEscrowEvents.RewardFreed(runId, units * PRICE);
        vm.prank(caller);
        ledger.voidBatch(batches[batchId]);
        _assertFunds(FUNDS, 0);
    }

    function test_voidBatch_keepsWhatWasSplitOff() public {
        uint64 batchId = _commitWork(3);
        _passDeadline();
        uint64 ownId = _splitOff(batchId, 3, 0);
        _assertFunds(FUNDS - 3 * PER_RECORD, 3 * PER_RECORD);
        vm.warp(block.timestamp + APPEAL_TIME - 1);
        IContributionLedger.Submission memory submission = _submission(alice, 1, 0);
        vm.prank(alice);
        court.summon(batches[ownId], submission, _noSources());
        vm.warp(block.timestamp + 1);
        ledger.voidBatch(batches[batchId]);
        _assertFunds(FUNDS - PER_RECORD, PER_RECORD);
    }

    function test_voidBatch_freesWhatWasSplitOff_whenNobodyCalledJudges() public {
        uint64 batchId = _commitWork(3);
        _passDeadline();
        uint64 ownId = _splitOff(batchId, 3, 0);
        vm.warp(block.timestamp + APPEAL_TIME);
        ledger.voidBatch(batches[ownId]);
        _assertFunds(FUNDS - 2 * PER_RECORD, 2 * PER_RECORD);
        ledger.voidBatch(batches[batchId]);
        _assertFunds(FUNDS, 0);
    }

    function test_voidBatch_freesNothing_afterTheOwnerTookAll() public {
        uint64 batchId = _commit(3);
        _closeRun();
        vm.warp(block.timestamp + CLAIM_PERIOD);
        assertEq(escrow.reclaim(runId), FUNDS, "all of it");
        ledger.voidBatch(batches[batchId]);
        _assertFunds(0, 0);
        vm.expectRevert(
            abi.encodeWithSelector(IRewardEscrowErrors.EscrowNotReclaimable.selector, runId, block.timestamp)
        );
        escrow.reclaim(runId);
    }

    function test_voidBatch_givesNothingToAnotherRun() public {
        uint64 batchId = _commit(3);
        uint64 second = _createRun();
        vm.prank(owner);
        escrow.fund(second, FUNDS / 2);
        _passAppeal();
        ledger.voidBatch(batches[batchId]);
        _assertFunds(FUNDS, 0);
        runId = second;
        _assertFunds(FUNDS / 2, 0);
    }

    // ------------------------------------------------------------------ reclaim

    function testFuzz_reclaim_reverts_whileOpen(uint256 waited) public {
        vm.warp(block.timestamp + bound(waited, 0, 10 * CLAIM_PERIOD));
        vm.expectRevert(
            abi.encodeWithSelector(IRewardEscrowErrors.EscrowNotReclaimable.selector, runId, type(uint256).max)
        );
        escrow.reclaim(runId);
    }

    function testFuzz_reclaim_reverts_whenRunIsUnknown(uint64 unknown) public {
        vm.assume(unknown != runId);
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunUnknown.selector, unknown));
        escrow.reclaim(unknown);
    }

    function testFuzz_reclaim_returnsWhatIsFreeAtOnce_andTheRestLater(address caller, uint256 units, uint256 waited)
        public
    {
        units = bound(units, 1, FUNDS / PRICE - 1);
        _commitRoot(keccak256("submissions"), 1, units);
        _closeRun();
        uint256 free = FUNDS - units * PRICE;
        uint256 before = token.balanceOf(owner);
        vm.expectEmit(address(escrow));
        emit IRewardEscrowEvents.RunReclaimed(runId, owner, free);
        vm.prank(caller);
        assertEq(escrow.reclaim(runId), free, "what no batch was committed for");

        uint256 from = block.timestamp + CLAIM_PERIOD;
        vm.warp(block.timestamp + bound(waited, 0, CLAIM_PERIOD - 1));
        vm.expectRevert(abi.encodeWithSelector(IRewardEscrowErrors.EscrowNotReclaimable.selector, runId, from));
        escrow.reclaim(runId);

        vm.warp(from);
        assertEq(escrow.reclaim(runId), units * PRICE, "all the rest");
        assertEq(token.balanceOf(owner), before + FUNDS, "to the owner, whoever calls");
        vm.expectRevert(abi.encodeWithSelector(IRewardEscrowErrors.EscrowNotReclaimable.selector, runId, from));
        escrow.reclaim(runId);
    }

    function testFuzz_reclaim_leavesWorkersTheirTime(uint256 waited) public {
        bytes[] memory records = _accepted(3);
        uint64 batchId = _finalBatch(records);
        _closeRun();
        escrow.reclaim(runId);
        vm.warp(block.timestamp + bound(waited, 0, CLAIM_PERIOD - 1));
        assertEq(escrow.claim(_claimsOf(batchId, records, 0, 3)), 3 * PER_RECORD, "still theirs");
    }

    function test_claim_reverts_afterTheOwnerTookAll() public {
        bytes[] memory records = _accepted(3);
        uint64 batchId = _finalBatch(records);
        _closeRun();
        vm.warp(block.timestamp + CLAIM_PERIOD);
        escrow.reclaim(runId);
        IRewardEscrow.Claim[] memory claims = _claimsOf(batchId, records, 0, 3);
        vm.expectRevert(
            abi.encodeWithSelector(IRewardEscrowErrors.EscrowUnderfunded.selector, runId, 3 * PER_RECORD, 0)
        );
        escrow.claim(claims);
    }

    function test_recover_reverts_afterTheOwnerTookAll() public {
        bytes[] memory records = _rejected(3);
        uint64 batchId = _finalBatch(records);
        _closeRun();
        vm.warp(block.timestamp + CLAIM_PERIOD);
        escrow.reclaim(runId);
        bytes memory why =
            abi.encodeWithSelector(IRewardEscrowErrors.EscrowUnderfunded.selector, runId, 3 * PER_RECORD, 0);
        _expect(why, _claimsOf(batchId, records, 0, 3));
    }

    function test_reclaim_returnsAtOnce_whatVoidBatchesFreed() public {
        uint64 batchId = _commit(3);
        _closeRun();
        assertEq(escrow.reclaim(runId), FUNDS - 3 * PER_RECORD, "what no batch was committed for");
        _passAppeal();
        ledger.voidBatch(batches[batchId]);
        assertEq(escrow.reclaim(runId), 3 * PER_RECORD, "what nobody judged");
    }

    function testFuzz_reclaim_returnsWhatJurorsLeft(uint256 paid) public {
        paid = bound(paid, 1, FUNDS - 1);
        vm.prank(address(court));
        escrow.payCourt(runId, paid);
        _closeRun();
        assertEq(escrow.reclaim(runId), FUNDS - paid, "the rest");
    }

    // ----------------------------------------------------------------- solvency

    /// @dev Whatever the verdicts: what was funded is paid, recovered or still there, to the wei.
    function testFuzz_money_isConserved(uint8[16] memory verdicts, uint32[16] memory units) public {
        bytes[] memory records = new bytes[](16);
        uint256 committed;
        uint256 due;
        for (uint256 i = 0; i < 16; ++i) {
            IContributionLedger.Outcome memory outcome = _outcome(alice, 1, uint32(i), ACCEPTED);
            outcome.verdict = uint8(bound(verdicts[i], ACCEPTED, FRAUD));
            outcome.units = uint32(bound(units[i], 0, 100_000));
            committed += outcome.units;
            if (outcome.verdict == ACCEPTED) due += outcome.units;
            records[i] = _pack(outcome);
        }
        uint64 batchId = _commitRoot(keccak256("submissions"), 16, committed);
        _post(batchId, records, QUORUM);
        _passChallengeWindow();
        uint256 before = token.balanceOf(alice);
        for (uint256 i = 0; i < 16; ++i) {
            IRewardEscrow.Claim[] memory claims = _claimsOf(batchId, records, i, i + 1);
            if (uint8(records[i][54]) == ACCEPTED) escrow.claim(claims);
            else escrow.recover(claims);
            IRewardEscrow.Funds memory funds = escrow.fundsOf(runId);
            uint256 held = token.balanceOf(address(escrow));
            assertEq(held, uint256(funds.available) + funds.reserved, "held is available and reserved");
        }
        assertEq(token.balanceOf(alice) - before, due * PRICE, "paid");
        assertEq(escrow.fundsOf(runId).reserved, 0, "nothing left set aside");
        _closeRun();
        assertEq(due * PRICE + (due * PRICE == FUNDS ? 0 : escrow.reclaim(runId)), FUNDS, "all is accounted for");
    }

    /// @dev The same with batches that nobody judged, some work of which judges of the network saw.
    function testFuzz_money_isConserved_whenValidatorsAreSilent(uint256 count, uint8 verdict, uint256 position) public {
        count = bound(count, 2, 8);
        position = bound(position, 0, count - 1);
        verdict = uint8(bound(verdict, ACCEPTED, FRAUD));
        uint64 batchId = _commitWork(count);
        _passDeadline();
        uint64 ownId = _splitOff(batchId, count, position);
        bytes[] memory records = _judgeByNetwork(ownId, position, _rulingOf(verdict));
        vm.warp(block.timestamp + APPEAL_TIME + CHALLENGE_WINDOW);
        ledger.voidBatch(batches[batchId]);
        uint256 before = token.balanceOf(alice);
        if (verdict == ACCEPTED) escrow.claim(_claimsOf(ownId, records, 0, 1));
        else escrow.recover(_claimsOf(ownId, records, 0, 1));

        uint256 paid = token.balanceOf(alice) - before;
        uint256 fees = verdict == ACCEPTED ? JURY_SIZE * JUROR_FEE : 0;
        assertEq(paid, verdict == ACCEPTED ? PER_RECORD : 0, "the worker");
        _assertFunds(FUNDS - paid - fees, 0);
        assertEq(token.balanceOf(address(escrow)), FUNDS - paid - fees, "held");
    }
}
