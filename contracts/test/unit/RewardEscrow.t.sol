// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IERC20Errors} from "@openzeppelin/contracts/interfaces/draft-IERC6093.sol";

import {RewardEscrow} from "../../src/RewardEscrow.sol";
import {IContributionLedger, IContributionLedgerErrors} from "../../src/interfaces/IContributionLedger.sol";
import {IRewardEscrow, IRewardEscrowErrors, IRewardEscrowEvents} from "../../src/interfaces/IRewardEscrow.sol";
import {IRunRegistry, IRunRegistryErrors} from "../../src/interfaces/IRunRegistry.sol";
import {EscrowTest} from "../EscrowTest.sol";

/// @title Money that a run sets aside for work, and whom it pays
contract RewardEscrowTest is EscrowTest {
    /// @dev A fraud verdict that a pause met can be overturned a challenge window later.
    uint256 private constant SETTLED = JUDGED + CHALLENGE_WINDOW;

    /// @dev Claims over all outcomes of a batch whose challenge window is over.
    function _finalClaims(bytes[] memory records) private returns (IRewardEscrow.Claim[] memory) {
        return _claimsOf(_finalBatch(records), records, 0, records.length);
    }

    function _expect(bytes memory why, IRewardEscrow.Claim[] memory claims) private {
        vm.expectRevert(why);
        escrow.claim(claims);
    }

    // ---------------------------------------------------------------- construct

    function testFuzz_constructor_reverts_whenClaimsAreTooShort(uint256 period) public {
        period = bound(period, 0, SETTLED);
        vm.expectRevert(abi.encodeWithSelector(IRewardEscrowErrors.EscrowPeriodTooShort.selector, period, SETTLED));
        new RewardEscrow(token, runs, workers, ledger, court, period);
    }

    function testFuzz_constructor_reverts_whenTermsChangeTooFast(uint256 delay) public {
        delay = bound(delay, 0, JUDGED - 1);
        vm.mockCall(address(runs), abi.encodeCall(runs.changeDelay, ()), abi.encode(delay));
        vm.expectRevert(abi.encodeWithSelector(IRewardEscrowErrors.EscrowPeriodTooShort.selector, delay, JUDGED));
        new RewardEscrow(token, runs, workers, ledger, court, CLAIM_PERIOD);
    }

    function test_constructor_takesTheShortestPeriods() public {
        vm.mockCall(address(runs), abi.encodeCall(runs.changeDelay, ()), abi.encode(JUDGED));
        RewardEscrow shortest = new RewardEscrow(token, runs, workers, ledger, court, SETTLED + 1);
        assertEq(shortest.claimPeriod(), SETTLED + 1, "claim period");
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

    function testFuzz_fund_reverts_whenTheRunIsClosed(uint256 amount) public {
        amount = bound(amount, 1, WALLET);
        vm.prank(owner);
        runs.closeRun(runId);
        vm.expectRevert(abi.encodeWithSelector(IRewardEscrowErrors.EscrowRunClosed.selector, runId));
        vm.prank(stranger);
        escrow.fund(runId, amount);
    }

    function testFuzz_fund_reverts_withoutTheMoney(uint256 amount) public {
        amount = bound(amount, WALLET + 1, type(uint128).max - FUNDS);
        vm.expectRevert(
            abi.encodeWithSelector(IERC20Errors.ERC20InsufficientBalance.selector, stranger, WALLET, amount)
        );
        vm.prank(stranger);
        escrow.fund(runId, amount);
    }

    function testFuzz_fund_addsUp(uint256 first, uint256 second) public {
        first = bound(first, 1, WALLET - 1);
        second = bound(second, 1, WALLET - first);
        vm.startPrank(stranger);
        escrow.fund(runId, first);
        vm.expectEmit(address(escrow));
        emit IRewardEscrowEvents.RunFunded(runId, stranger, second);
        escrow.fund(runId, second);
        IRewardEscrow.Funds memory funds = escrow.fundsOf(runId);
        assertEq(funds.available, FUNDS + first + second, "free for batches");
        assertEq(funds.reserved, 0, "nothing set aside");
        assertEq(token.balanceOf(address(escrow)), funds.available, "held");
    }

    // ------------------------------------------------------------------ reserve

    function testFuzz_reserve_reverts_whenNotTheLedger(address caller, uint256 amount) public {
        vm.assume(caller != address(ledger));
        vm.expectRevert(abi.encodeWithSelector(IRewardEscrowErrors.EscrowUnauthorized.selector, caller));
        vm.prank(caller);
        escrow.reserve(runId, amount);
    }

    function testFuzz_reserve_reverts_whenUnderfunded(uint256 amount) public {
        amount = bound(amount, FUNDS + 1, type(uint256).max);
        vm.expectRevert(abi.encodeWithSelector(IRewardEscrowErrors.EscrowUnderfunded.selector, runId, amount, FUNDS));
        vm.prank(address(ledger));
        escrow.reserve(runId, amount);
    }

    function testFuzz_reserve_setsAside(uint256 amount) public {
        amount = bound(amount, 0, FUNDS);
        vm.expectEmit(address(escrow));
        emit IRewardEscrowEvents.RewardReserved(runId, amount);
        vm.prank(address(ledger));
        escrow.reserve(runId, amount);
        _assertFunds(FUNDS - amount, amount);
    }

    function testFuzz_reserve_neverTouchesAnotherRunsFunds(uint256 amount) public {
        uint64 other = _createRun();
        amount = bound(amount, 1, FUNDS);
        vm.expectRevert(abi.encodeWithSelector(IRewardEscrowErrors.EscrowUnderfunded.selector, other, amount, 0));
        vm.prank(address(ledger));
        escrow.reserve(other, amount);
        _assertFunds(FUNDS, 0);
    }

    function test_reserve_isOnlyTheLedgers() public {
        _assertRefusedToOthers(address(ledger), abi.encodeCall(escrow.reserve, (runId, 1)));
    }

    /// @dev Neither another contract of the network nor who runs the run makes this call.
    function _assertRefusedToOthers(address allowed, bytes memory call_) private {
        address[9] memory callers = [
            address(ledger),
            address(court),
            address(faults),
            address(vault),
            address(runs),
            address(workers),
            address(jury),
            owner,
            orchestrator
        ];
        for (uint256 i = 0; i < callers.length; ++i) {
            if (callers[i] == allowed) continue;
            vm.prank(callers[i]);
            (bool success, bytes memory answer) = address(escrow).call(call_);
            assertFalse(success, "refused");
            assertEq(answer, abi.encodeWithSelector(IRewardEscrowErrors.EscrowUnauthorized.selector, callers[i]), "why");
        }
    }

    // --------------------------------------------------------------------- free

    function testFuzz_free_reverts_whenNotTheLedger(address caller, uint256 amount) public {
        vm.assume(caller != address(ledger));
        vm.expectRevert(abi.encodeWithSelector(IRewardEscrowErrors.EscrowUnauthorized.selector, caller));
        vm.prank(caller);
        escrow.free(runId, amount);
    }

    function test_free_isOnlyTheLedgers() public {
        _commit(1);
        _assertRefusedToOthers(address(ledger), abi.encodeCall(escrow.free, (runId, 1)));
    }

    /// @dev Nothing is set aside any more when the owner of a run closed long ago took all.
    function testFuzz_free_takesNoMoreThanIsSetAside(uint256 reserved, uint256 amount) public {
        reserved = bound(reserved, 0, FUNDS);
        amount = bound(amount, reserved + 1, type(uint256).max);
        vm.startPrank(address(ledger));
        escrow.reserve(runId, reserved);
        vm.expectEmit(address(escrow));
        emit IRewardEscrowEvents.RewardFreed(runId, reserved);
        escrow.free(runId, amount);
        _assertFunds(FUNDS, 0);
    }

    function testFuzz_free_undoesReserve(uint256 reserved, uint256 amount) public {
        reserved = bound(reserved, 0, FUNDS);
        amount = bound(amount, 0, reserved);
        vm.startPrank(address(ledger));
        escrow.reserve(runId, reserved);
        vm.expectEmit(address(escrow));
        emit IRewardEscrowEvents.RewardFreed(runId, amount);
        escrow.free(runId, amount);
        _assertFunds(FUNDS - reserved + amount, reserved - amount);
        assertEq(token.balanceOf(address(escrow)), FUNDS, "no token moves");
    }

    // ---------------------------------------------------------------- pay court

    function testFuzz_payCourt_reverts_whenNotTheCourt(address caller, uint256 amount) public {
        vm.assume(caller != address(court));
        vm.expectRevert(abi.encodeWithSelector(IRewardEscrowErrors.EscrowUnauthorized.selector, caller));
        vm.prank(caller);
        escrow.payCourt(runId, amount);
    }

    function test_payCourt_isOnlyTheCourts() public {
        _assertRefusedToOthers(address(court), abi.encodeCall(escrow.payCourt, (runId, 1)));
    }

    function testFuzz_payCourt_paysNoMoreThanIsFree(uint256 reserved, uint256 amount) public {
        reserved = bound(reserved, 0, FUNDS);
        vm.prank(address(ledger));
        escrow.reserve(runId, reserved);
        uint256 due = amount < FUNDS - reserved ? amount : FUNDS - reserved;
        uint256 before = token.balanceOf(address(court));
        vm.expectEmit(address(escrow));
        emit IRewardEscrowEvents.CourtPaid(runId, due);
        vm.prank(address(court));
        assertEq(escrow.payCourt(runId, amount), due, "paid");
        assertEq(token.balanceOf(address(court)) - before, due, "to the court");
        _assertFunds(FUNDS - reserved - due, reserved);
    }

    function testFuzz_payCourt_takesNothingOfAnotherRun(uint256 amount) public {
        uint64 other = _createRun();
        vm.prank(address(court));
        assertEq(escrow.payCourt(other, amount), 0, "a run without money pays nothing");
        _assertFunds(FUNDS, 0);
    }

    function test_payCourt_paysJurors_whenTheValidatorsWereWrong() public {
        bytes[] memory records = _accepted(1);
        uint64 batchId = _commitAndPost(records);
        bytes32 leaf = _leaf(batchId, 0, records[0]);
        _dispute(batchId, records, 0, REJECT);
        _draw(leaf);
        _voteAll(leaf, REJECT, REJECT, REJECT);
        vm.expectEmit(address(escrow));
        emit IRewardEscrowEvents.CourtPaid(runId, JURY_SIZE * JUROR_FEE);
        court.settle(_prove(batchId, records, 0));
        _assertFunds(FUNDS - PER_RECORD - JURY_SIZE * JUROR_FEE, PER_RECORD);
        assertEq(court.caseOf(leaf).fee, JUROR_FEE, "fee of each juror");
    }

    function test_payCourt_isNotCalled_whenTheValidatorsWereRight() public {
        bytes[] memory records = _accepted(1);
        uint64 batchId = _commitAndPost(records);
        _decideAt(batchId, records, 0, REJECT, ACCEPT);
        _assertFunds(FUNDS - PER_RECORD, PER_RECORD);
    }

    function testFuzz_payCourt_leavesWhatIsSetAside_whenTheRunIsShort(uint256 left) public {
        left = bound(left, 0, JURY_SIZE * JUROR_FEE - 1);
        bytes[] memory records = _accepted(1);
        uint64 batchId = _commitAndPost(records);
        vm.prank(address(ledger));
        escrow.reserve(runId, FUNDS - PER_RECORD - left);
        _overturn(batchId, records, 0, REJECTED);
        _assertFunds(0, FUNDS - left);
        assertEq(court.caseOf(_leaf(batchId, 0, records[0])).fee, JUROR_FEE, "the claim pays the rest");
    }

    // -------------------------------------------------------------------- claim

    function test_claim_reverts_whenEmpty() public {
        _expect(abi.encodeWithSelector(IRewardEscrowErrors.EscrowEmpty.selector), new IRewardEscrow.Claim[](0));
    }

    function testFuzz_claim_reverts_withoutARecord(uint256 length) public {
        IRewardEscrow.Claim[] memory claims = _finalClaims(_accepted(2));
        claims[0].records = new bytes(bound(length, 0, 55));
        _expect(abi.encodeWithSelector(IRewardEscrowErrors.EscrowEmpty.selector), claims);
    }

    function testFuzz_claim_reverts_whenTheHeaderIsNot(uint256 field) public {
        IRewardEscrow.Claim[] memory claims = _finalClaims(_accepted(2));
        _mutateHeader(claims[0].batch, field);
        uint64 batchId = claims[0].batch.batchId;
        _expect(abi.encodeWithSelector(IContributionLedgerErrors.LedgerBatchMismatch.selector, batchId), claims);
    }

    function testFuzz_claim_reverts_beforeFinality(uint256 waited) public {
        bytes[] memory records = _accepted(2);
        uint64 batchId = _commitAndPost(records);
        uint256 finalAt = block.timestamp + CHALLENGE_WINDOW;
        vm.warp(block.timestamp + bound(waited, 0, CHALLENGE_WINDOW - 1));
        bytes memory why = abi.encodeWithSelector(IRewardEscrowErrors.EscrowNotFinal.selector, batchId, finalAt);
        _expect(why, _claimsOf(batchId, records, 0, 2));
    }

    function testFuzz_claim_reverts_whenNotAccepted(uint256 at, uint8 verdict) public {
        at = bound(at, 0, 4);
        verdict = uint8(bound(verdict, INCOMPLETE, FRAUD));
        bytes[] memory records = _accepted(5);
        records[at] = _record(alice, 1, uint32(at), verdict);
        IRewardEscrow.Claim[] memory claims = _finalClaims(records);
        uint64 batchId = claims[0].batch.batchId;
        _expect(abi.encodeWithSelector(IRewardEscrowErrors.EscrowNotAccepted.selector, batchId, at, verdict), claims);
    }

    function testFuzz_claim_reverts_whileACaseIsOpen(uint256 at, uint256 late) public {
        at = bound(at, 0, 4);
        bytes[] memory records = _accepted(5);
        uint64 batchId = _commitAndPost(records);
        _dispute(batchId, records, at, REJECT);
        vm.warp(block.timestamp + CHALLENGE_WINDOW + bound(late, 0, 30 days));
        bytes memory why = abi.encodeWithSelector(IRewardEscrowErrors.EscrowDisputed.selector, batchId, at);
        _expect(why, _claimsOf(batchId, records, 0, 5));
        if (at != 0) escrow.claim(_claimsOf(batchId, records, 0, at));
    }

    function testFuzz_claim_followsTheJury(uint8 recorded, uint8 claimed, bool overturn) public {
        recorded = uint8(bound(recorded, ACCEPTED, FRAUD));
        claimed = uint8(bound(claimed, ACCEPTED, FRAUD));
        vm.assume(claimed != recorded);
        bytes[] memory records = _one(_record(alice, 1, 0, recorded));
        uint64 batchId = _commitAndPost(records);
        uint8 stands = overturn ? claimed : recorded;
        _decideAt(batchId, records, 0, _rulingOf(claimed), _rulingOf(stands));
        _passChallengeWindow();
        IRewardEscrow.Claim[] memory claims = _claimsOf(batchId, records, 0, 1);
        if (stands == ACCEPTED) {
            assertEq(escrow.claim(claims), PER_RECORD, "a jury's accept pays");
        } else {
            _expect(abi.encodeWithSelector(IRewardEscrowErrors.EscrowNotAccepted.selector, batchId, 0, stands), claims);
        }
    }

    function test_claim_paysTheOthers_whenAJuryRejectedOne() public {
        bytes[] memory records = _accepted(3);
        uint64 batchId = _commitAndPost(records);
        _overturn(batchId, records, 1, REJECTED);
        _passChallengeWindow();
        uint32[] memory positions = new uint32[](2);
        positions[1] = 2;
        assertEq(escrow.claim(_justOne(_claimOf(batchId, records, positions))), 2 * PER_RECORD, "the other two");
    }

    function test_claim_reverts_whenNobodyJudged() public {
        bytes[] memory records = _accepted(2);
        uint64 batchId = _commit(2);
        _passAppeal();
        bytes memory why = abi.encodeWithSelector(IRewardEscrowErrors.EscrowNotJudged.selector, batchId);
        _expect(why, _claimsOf(batchId, records, 0, 2));
    }

    function test_claim_reverts_whenTheBatchIsWithheld() public {
        bytes[] memory records = _accepted(2);
        uint64 batchId = _commit(2);
        _withhold(batchId);
        _passChallengeWindow();
        bytes memory why = abi.encodeWithSelector(IRewardEscrowErrors.EscrowNotJudged.selector, batchId);
        _expect(why, _claimsOf(batchId, records, 0, 2));
    }

    function test_claim_reverts_whenTheBatchIsVoid() public {
        bytes[] memory records = _accepted(2);
        uint64 batchId = _commit(2);
        _passAppeal();
        ledger.voidBatch(batches[batchId]);
        bytes memory why = abi.encodeWithSelector(IContributionLedgerErrors.LedgerBatchMismatch.selector, batchId);
        _expect(why, _claimsOf(batchId, records, 0, 2));
    }

    function test_claim_paysWhatJudgesOfTheNetworkAccepted() public {
        uint64 batchId = _commitWork(3);
        _passDeadline();
        uint64 ownId = _splitOff(batchId, 3, 1);
        bytes[] memory records = _judgeByNetwork(ownId, 1, ACCEPT);
        _passChallengeWindow();
        assertEq(escrow.claim(_claimsOf(ownId, records, 0, 1)), PER_RECORD, "its worker is paid");
        assertEq(escrow.fundsOf(runId).reserved, 2 * PER_RECORD, "the others' money stays set aside");
    }

    function test_claim_reverts_whenJudgesOfTheNetworkRejected() public {
        uint64 batchId = _commitWork(3);
        _passDeadline();
        uint64 ownId = _splitOff(batchId, 3, 1);
        bytes[] memory records = _judgeByNetwork(ownId, 1, REJECT);
        _passChallengeWindow();
        bytes memory why = abi.encodeWithSelector(IRewardEscrowErrors.EscrowNotAccepted.selector, ownId, 0, REJECTED);
        _expect(why, _claimsOf(ownId, records, 0, 1));
    }

    function test_claim_reverts_beforeTheNetworksVerdictIsFinal() public {
        uint64 batchId = _commitWork(3);
        _passDeadline();
        uint64 ownId = _splitOff(batchId, 3, 1);
        bytes[] memory records = _judgeByNetwork(ownId, 1, ACCEPT);
        uint256 finalAt = block.timestamp + CHALLENGE_WINDOW;
        vm.warp(finalAt - 1);
        bytes memory why = abi.encodeWithSelector(IRewardEscrowErrors.EscrowNotFinal.selector, ownId, finalAt);
        _expect(why, _claimsOf(ownId, records, 0, 1));
    }

    function testFuzz_claim_reverts_whenTheProofIsChanged(uint256 what, uint256 at) public {
        bytes[] memory records = _accepted(20);
        uint64 batchId = _commitAndPost(records);
        _passChallengeWindow();
        IRewardEscrow.Claim memory claimed = _claimOf(batchId, records, _range(3, 7));
        what = bound(what, 0, 6);
        if (what == 0) claimed.siblings[at % claimed.siblings.length] = keccak256("other sibling");
        if (what == 1) claimed.positions[at % 4] = 9;
        if (what == 2) (claimed.positions[0], claimed.positions[1]) = (4, 3);
        if (what == 3) claimed.records[(at % 4) * 56 + 52] ^= 0x01;
        if (what == 4) claimed.records = bytes.concat(claimed.records, records[7]);
        if (what == 5) claimed.positions = _range(3, 8);
        if (what == 6) claimed.siblings = new bytes32[](0);
        bytes memory why = abi.encodeWithSelector(IRewardEscrowErrors.EscrowInvalidProof.selector, batchId);
        _expect(why, _justOne(claimed));
    }

    function testFuzz_claim_reverts_whenAllWasPaidBefore(uint256 count, uint256 from, uint256 to) public {
        count = bound(count, 1, 20);
        from = bound(from, 0, count - 1);
        to = bound(to, from + 1, count);
        bytes[] memory records = _accepted(count);
        IRewardEscrow.Claim[] memory claims = _finalClaims(records);
        uint64 batchId = claims[0].batch.batchId;
        escrow.claim(claims);
        _expect(_allPaid(), _claimsOf(batchId, records, from, to));
    }

    /// @dev Anyone can claim a part first; the rest of the worker's own claim is paid all the same.
    function testFuzz_claim_passesOverWhatSomebodyClaimedFirst(uint256 count, uint256 from, uint256 to) public {
        count = bound(count, 2, 20);
        from = bound(from, 0, count - 1);
        to = bound(to, from + 1, from == 0 ? count - 1 : count);
        bytes[] memory records = _accepted(count);
        IRewardEscrow.Claim[] memory claims = _finalClaims(records);
        uint256 before = token.balanceOf(alice);
        vm.prank(stranger);
        uint256 first = escrow.claim(_claimsOf(claims[0].batch.batchId, records, from, to));
        uint256 slots = count - (to - from);
        uint256 units = 1000 * slots;
        vm.expectEmit(address(escrow));
        emit IRewardEscrowEvents.RewardClaimed(runId, alice, slots, units, units * PRICE);
        uint256 second = escrow.claim(claims);
        assertEq(first + second, count * PER_RECORD, "each slot once");
        assertEq(token.balanceOf(alice) - before, count * PER_RECORD, "all to the worker");
    }

    function testFuzz_claim_paysASlotOnce_whenListedTwice(uint32 index) public {
        IRewardEscrow.Claim[] memory one = _finalClaims(_one(_record(alice, 1, index, ACCEPTED)));
        assertEq(escrow.claim(_both(one[0], one[0])), PER_RECORD);
    }

    function testFuzz_claim_reverts_whenTheSlotWasPaidThroughAnotherBatch(uint32 step, uint32 index) public {
        vm.assume(step != 0);
        bytes[] memory records = _one(_record(alice, step, index, ACCEPTED));
        escrow.claim(_finalClaims(records));
        _expect(_allPaid(), _finalClaims(records));
    }

    function _allPaid() private view returns (bytes memory) {
        return abi.encodeWithSelector(IRewardEscrowErrors.EscrowAllPaid.selector, runId, alice);
    }

    function test_claim_reverts_whenWorkersAreMixed() public {
        IRewardEscrow.Claim[] memory claims =
            _finalClaims(_two(_record(alice, 1, 0, ACCEPTED), _record(bob, 1, 0, ACCEPTED)));
        uint64 batchId = claims[0].batch.batchId;
        _expect(abi.encodeWithSelector(IRewardEscrowErrors.EscrowMixedClaim.selector, batchId, 1), claims);
    }

    function test_claim_reverts_whenRunsAreMixed() public {
        IRewardEscrow.Claim[] memory first = _finalClaims(_one(_record(alice, 1, 0, ACCEPTED)));
        runId = _createRun();
        vm.prank(owner);
        escrow.fund(runId, FUNDS);
        IRewardEscrow.Claim[] memory second = _finalClaims(_one(_record(alice, 1, 0, ACCEPTED)));
        bytes memory why =
            abi.encodeWithSelector(IRewardEscrowErrors.EscrowMixedClaim.selector, second[0].batch.batchId, 0);
        _expect(why, _both(first[0], second[0]));
    }

    function testFuzz_claim_reverts_whenNobodyHasTheNumber(uint32 workerId) public {
        workerId = uint32(bound(workerId, 3, type(uint32).max));
        IContributionLedger.Outcome memory outcome = _outcome(alice, 1, 0, ACCEPTED);
        outcome.workerId = workerId;
        IRewardEscrow.Claim[] memory claims = _finalClaims(_one(_pack(outcome)));
        _expect(abi.encodeWithSelector(IERC20Errors.ERC20InvalidReceiver.selector, address(0)), claims);
    }

    function testFuzz_claim_paysUnits(address caller, uint32[5] memory units) public {
        bytes[] memory records = new bytes[](5);
        uint256 sum;
        for (uint256 i = 0; i < 5; ++i) {
            IContributionLedger.Outcome memory outcome = _outcome(alice, 1, uint32(i), ACCEPTED);
            outcome.units = uint32(bound(units[i], 0, 1000));
            sum += outcome.units;
            records[i] = _pack(outcome);
        }
        IRewardEscrow.Claim[] memory claims = _finalClaims(records);
        uint256 before = token.balanceOf(alice);
        vm.expectEmit(address(escrow));
        emit IRewardEscrowEvents.RewardClaimed(runId, alice, 5, sum, sum * PRICE);
        vm.prank(caller);
        assertEq(escrow.claim(claims), sum * PRICE, "amount");
        assertEq(token.balanceOf(alice), before + sum * PRICE, "the worker is paid, whoever calls");
        assertEq(escrow.fundsOf(runId).reserved, 0, "nothing of the batch stays set aside");
    }

    function testFuzz_claim_takesAnySubset(uint256 chosen) public {
        chosen = bound(chosen, 1, (1 << 20) - 1);
        bytes[] memory records = _accepted(20);
        uint64 batchId = _commitAndPost(records);
        _passChallengeWindow();
        uint32[] memory positions = _subset(chosen);
        uint256 amount = escrow.claim(_justOne(_claimOf(batchId, records, positions)));
        assertEq(amount, positions.length * PER_RECORD, "those chosen");
        for (uint32 i = 0; i < 20; ++i) {
            assertEq(escrow.isPaid(runId, alice, 1, i), chosen >> i & 1 == 1, "and no others");
        }
    }

    function _subset(uint256 chosen) private pure returns (uint32[] memory positions) {
        positions = new uint32[](20);
        uint256 count;
        for (uint32 i = 0; i < 20; ++i) {
            if (chosen >> i & 1 == 1) positions[count++] = i;
        }
        assembly ("memory-safe") {
            mstore(positions, count)
        }
    }

    function testFuzz_claim_paysBatchesOfDifferentPricesAtOnce(uint88 price) public {
        price = uint88(bound(price, PRICE / 2, 2 * PRICE));
        bytes[] memory first = _one(_record(alice, 1, 0, ACCEPTED));
        uint64 old = _commitAndPost(first);
        (IRunRegistry.Terms memory terms,) = runs.termsOf(runId);
        terms.pricePerUnit = price;
        vm.prank(owner);
        runs.proposeChange(runId, terms);
        vm.warp(block.timestamp + CHANGE_DELAY);
        runs.applyChange(runId);
        bytes[] memory second = _one(_record(alice, 2, 0, ACCEPTED));
        uint64 young = _commitAndPost(second);
        _passChallengeWindow();
        IRewardEscrow.Claim[] memory claims =
            _both(_claimOf(old, first, _range(0, 1)), _claimOf(young, second, _range(0, 1)));
        assertEq(escrow.claim(claims), 1000 * (uint256(PRICE) + price), "each at the price of its commitment");
        assertEq(escrow.fundsOf(runId).reserved, 0, "what was set aside is paid");
    }

    function testFuzz_claim_paysABannedWorkersFinalWork(bytes32 offence) public {
        IRewardEscrow.Claim[] memory claims = _finalClaims(_accepted(1));
        vm.prank(address(ledger));
        workers.convict(runId, alice, offence, true);
        assertEq(escrow.claim(claims), PER_RECORD, "earned before");
    }

    function testFuzz_claim_worksWhilePausedOrClosed(bool closed) public {
        IRewardEscrow.Claim[] memory claims = _finalClaims(_accepted(1));
        vm.prank(owner);
        if (closed) runs.closeRun(runId);
        else runs.setSubmissionsPaused(runId, true);
        assertEq(escrow.claim(claims), PER_RECORD, "nothing holds earned money back");
    }

    // ------------------------------------------------------------------ is paid

    function testFuzz_isPaid_tellsSlotsApart(uint32 step, uint32 index, uint32 otherStep, uint32 otherIndex) public {
        vm.assume(step != 0);
        escrow.claim(_finalClaims(_one(_record(alice, step, index, ACCEPTED))));
        assertTrue(escrow.isPaid(runId, alice, step, index), "this slot");
        assertFalse(escrow.isPaid(runId, bob, step, index), "another worker's");
        assertFalse(escrow.isPaid(runId + 1, alice, step, index), "another run's");
        bool same = step == otherStep && index == otherIndex;
        assertEq(escrow.isPaid(runId, alice, otherStep, otherIndex), same, "another slot");
    }

    function testFuzz_isPaid_tellsNeighboursApart(uint32 step, uint32 index) public {
        vm.assume(step != 0);
        escrow.claim(_finalClaims(_one(_record(alice, step, index, ACCEPTED))));
        for (uint32 bit = 0; bit < 32; ++bit) {
            uint32 flipped = uint32(1) << bit;
            assertFalse(escrow.isPaid(runId, alice, step ^ flipped, index), "another step");
            assertFalse(escrow.isPaid(runId, alice, step, index ^ flipped), "another index");
        }
    }
}
