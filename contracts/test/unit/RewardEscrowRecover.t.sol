// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IContributionLedger, IContributionLedgerErrors} from "../../src/interfaces/IContributionLedger.sol";
import {IRewardEscrow, IRewardEscrowErrors, IRewardEscrowEvents} from "../../src/interfaces/IRewardEscrow.sol";
import {IRunRegistry, IRunRegistryErrors} from "../../src/interfaces/IRunRegistry.sol";
import {LedgerTest} from "../LedgerTest.sol";

/// @title Money that nobody earned finds its way back
/// forge-config: default.fuzz.runs = 128
contract RewardEscrowRecoverTest is LedgerTest {
    uint256 private constant FUNDS = 50_000 ether;

    function setUp() public override {
        super.setUp();
        _startRun(FUNDS);
    }

    /// @dev `count` rejected records of Alice and Bob in turn.
    function _rejected(uint256 count) private view returns (bytes[] memory records) {
        records = new bytes[](count);
        for (uint256 i = 0; i < count; ++i) {
            records[i] = _record(i % 2 == 0 ? alice : bob, 1, uint32(i), uint8(INCOMPLETE + i % 3));
        }
    }

    function _claimsOf(uint64 batchId, bytes[] memory records, uint256 from, uint256 to)
        private
        view
        returns (IRewardEscrow.Claim[] memory)
    {
        return _justOne(_claimOf(batchId, records, _range(from, to)));
    }

    function _finalBatch(bytes[] memory records) private returns (uint64 batchId) {
        batchId = _commitAndPost(records);
        _passChallengeWindow();
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
        _challenge(_prove(batchId, records, 1), ACCEPTED);
        vm.warp(block.timestamp + CHALLENGE_WINDOW + bound(late, 0, 30 days));
        bytes memory why = abi.encodeWithSelector(IRewardEscrowErrors.EscrowDisputed.selector, batchId, 1);
        _expect(why, _claimsOf(batchId, records, 0, 3));
    }

    function test_recover_reverts_whenAJuryAccepted() public {
        bytes[] memory records = _rejected(3);
        uint64 batchId = _commitAndPost(records);
        _overturn(_prove(batchId, records, 1), ACCEPTED);
        _passChallengeWindow();
        bytes memory why = abi.encodeWithSelector(IRewardEscrowErrors.EscrowAccepted.selector, batchId, 1);
        _expect(why, _claimsOf(batchId, records, 0, 3));
        assertEq(escrow.claim(_claimsOf(batchId, records, 1, 2)), 1000 * uint256(PRICE), "its worker is paid");
    }

    function testFuzz_recover_freesWhatAJuryRejected(uint8 verdict) public {
        verdict = uint8(bound(verdict, INCOMPLETE, FRAUD));
        bytes[] memory records = _accepted(3);
        uint64 batchId = _commitAndPost(records);
        _overturn(_prove(batchId, records, 1), verdict);
        _passChallengeWindow();
        assertEq(escrow.recover(_claimsOf(batchId, records, 1, 2)), 1000 * uint256(PRICE), "free again");
    }

    function test_recover_reverts_whenRunsAreMixed() public {
        bytes[] memory records = _rejected(1);
        uint64 first = _finalBatch(records);
        IRunRegistry.RunConfig memory config = _config();
        vm.startPrank(owner);
        runId = runs.createRun(config);
        escrow.fund(runId, FUNDS);
        vm.stopPrank();
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
        uint256 amount = count * 1000 * uint256(PRICE);
        IRewardEscrow.Claim[] memory claims = _claimsOf(batchId, records, 0, count);
        vm.expectEmit(address(escrow));
        emit IRewardEscrowEvents.RewardRecovered(runId, count, amount);
        vm.prank(caller);
        assertEq(escrow.recover(claims), amount, "of any workers at once");
        assertEq(escrow.fundsOf(runId).available, FUNDS, "available");
        assertEq(escrow.fundsOf(runId).reserved, 0, "reserved");
    }

    // ------------------------------------------------------------------ reclaim

    function _close() private {
        vm.prank(owner);
        runs.closeRun(runId);
    }

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
        _close();
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
        _close();
        escrow.reclaim(runId);
        vm.warp(block.timestamp + bound(waited, 0, CLAIM_PERIOD - 1));
        assertEq(escrow.claim(_claimsOf(batchId, records, 0, 3)), 3000 * uint256(PRICE), "still theirs");
    }

    function test_claim_reverts_afterTheOwnerTookAll() public {
        bytes[] memory records = _accepted(3);
        uint64 batchId = _finalBatch(records);
        _close();
        vm.warp(block.timestamp + CLAIM_PERIOD);
        escrow.reclaim(runId);
        IRewardEscrow.Claim[] memory claims = _claimsOf(batchId, records, 0, 3);
        vm.expectRevert(
            abi.encodeWithSelector(IRewardEscrowErrors.EscrowUnderfunded.selector, runId, 3000 * uint256(PRICE), 0)
        );
        escrow.claim(claims);
    }

    function test_recover_reverts_afterTheOwnerTookAll() public {
        bytes[] memory records = _rejected(3);
        uint64 batchId = _finalBatch(records);
        _close();
        vm.warp(block.timestamp + CLAIM_PERIOD);
        escrow.reclaim(runId);
        bytes memory why =
            abi.encodeWithSelector(IRewardEscrowErrors.EscrowUnderfunded.selector, runId, 3000 * uint256(PRICE), 0);
        _expect(why, _claimsOf(batchId, records, 0, 3));
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
        _close();
        assertEq(due * PRICE + (due * PRICE == FUNDS ? 0 : escrow.reclaim(runId)), FUNDS, "all is accounted for");
    }
}
