// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IDisputeCourt, IDisputeCourtErrors, IDisputeCourtEvents} from "../../src/interfaces/IDisputeCourt.sol";
import {CourtTest} from "../CourtTest.sol";

/// @dev Drawing a jury from the bench: when, whom not, and how.
contract DisputeCourtDrawTest is CourtTest {
    function _expectNoJurors(bytes32 caseId) private {
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtNoJurors.selector, caseId));
    }

    function _expectTooEarly(bytes32 caseId, uint256 drawBlock) private {
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtTooEarlyToDraw.selector, caseId, drawBlock));
    }

    function _drawn(bytes32 caseId) private view returns (uint256) {
        return court.caseOf(caseId).jurors;
    }

    function _isDrawn(address account) private view returns (bool) {
        return court.voteOf(_fraudLeaf, account) == bytes32(uint256(1));
    }

    /// @dev The first `count` jurors leave, a second before what comes next.
    function _leaveBench(uint256 count) private {
        for (uint256 i = 0; i < count; ++i) {
            vm.prank(jurors[i]);
            jury.leave();
        }
        vm.warp(block.timestamp + 1);
    }

    /// @dev An account with tokens offers itself, a second before what comes next.
    function _joinBench(address account) private {
        vm.prank(account);
        jury.join(REQUIRED_JUROR_STAKE);
        vm.warp(block.timestamp + 1);
    }

    /// @dev Jurors 3 and 4 are all that is left of the bench besides `account`; returns whether it is drawn, too.
    function _isDrawnBesidesTwo(address account) private returns (bool) {
        _leaveBench(3);
        _challengeAndDraw(ALICE_FRAUD, ACCEPT);
        assertTrue(_isDrawn(jurors[3]) && _isDrawn(jurors[4]), "who may sit does");
        assertEq(_drawn(_fraudLeaf), _isDrawn(account) ? 3 : 2, "drawn");
        return _isDrawn(account);
    }

    // ---------------------------------------------------------------------- when

    function testFuzz_draw_reverts_withoutACase(bytes32 caseId) public {
        _expectNoOpenCase(caseId, uint8(IDisputeCourt.CaseStatus.None));
        court.draw(caseId);
    }

    function testFuzz_draw_reverts_whenClosed(bool overturned) public {
        _decide(ALICE_FRAUD, ACCEPT, overturned ? ACCEPT : STATISTICAL);
        IDisputeCourt.CaseStatus status =
            overturned ? IDisputeCourt.CaseStatus.Overturned : IDisputeCourt.CaseStatus.Upheld;
        _expectNoOpenCase(_fraudLeaf, uint8(status));
        court.draw(_fraudLeaf);
    }

    function testFuzz_draw_reverts_untilItsBlockIsMined(uint256 blocks) public {
        _challenge(ALICE_FRAUD, ACCEPT);
        uint256 drawBlock = block.number + DRAW_DELAY;
        vm.roll(block.number + bound(blocks, 0, DRAW_DELAY));
        _expectTooEarly(_fraudLeaf, drawBlock);
        court.draw(_fraudLeaf);
    }

    function testFuzz_draw_works_whileItsBlockCanBeRead(address caller, uint256 blocks) public {
        _challenge(ALICE_FRAUD, ACCEPT);
        blocks = blocks % 3 == 0 ? 256 : blocks % 3 == 1 ? 1 : bound(blocks, 1, 256);
        vm.roll(block.number + DRAW_DELAY + blocks);
        vm.prank(caller);
        court.draw(_fraudLeaf);
        assertEq(_drawn(_fraudLeaf), JURY_SIZE, "drawn");
    }

    function testFuzz_draw_postpones_whenItsBlockIsTooOld(uint256 blocks) public {
        _challenge(ALICE_FRAUD, ACCEPT);
        blocks = blocks % 2 == 0 ? 257 : bound(blocks, 257, 1_000_000);
        vm.roll(block.number + DRAW_DELAY + blocks);
        uint256 next = block.number + DRAW_DELAY;
        vm.expectEmit(address(court));
        emit IDisputeCourtEvents.DrawPostponed(_fraudLeaf, next);
        court.draw(_fraudLeaf);
        assertEq(_drawn(_fraudLeaf), 0, "nobody yet");
        assertEq(court.caseOf(_fraudLeaf).drawBlock, next, "a later block decides");
    }

    function testFuzz_draw_reverts_untilThePostponedBlockIsMined(uint256 blocks) public {
        uint256 next = _postpone();
        vm.roll(block.number + bound(blocks, 0, DRAW_DELAY));
        _expectTooEarly(_fraudLeaf, next);
        court.draw(_fraudLeaf);
    }

    function test_draw_works_whenThePostponedBlockIsMined() public {
        vm.roll(_postpone() + 1);
        court.draw(_fraudLeaf);
        assertEq(_drawn(_fraudLeaf), JURY_SIZE, "drawn");
    }

    function _postpone() private returns (uint256 drawBlock) {
        _challenge(ALICE_FRAUD, ACCEPT);
        vm.roll(block.number + DRAW_DELAY + 257);
        court.draw(_fraudLeaf);
        return court.caseOf(_fraudLeaf).drawBlock;
    }

    /// @dev Jurors keep the other half of the time to commit.
    function testFuzz_draw_reverts_inTheSecondHalfOfTheTimeToCommit(uint256 waited) public {
        _challenge(ALICE_FRAUD, ACCEPT);
        _passDraw();
        uint256 endsAt = block.timestamp + COMMIT_TIME / 2;
        waited = waited % 2 == 0 ? COMMIT_TIME / 2 : bound(waited, COMMIT_TIME / 2, 100 days);
        vm.warp(block.timestamp + waited);
        _expectPhaseOver(_fraudLeaf, endsAt);
        court.draw(_fraudLeaf);
    }

    function testFuzz_draw_works_inTheFirstHalfOfTheTimeToCommit(uint256 waited) public {
        _challenge(ALICE_FRAUD, ACCEPT);
        _passDraw();
        waited = waited % 2 == 0 ? COMMIT_TIME / 2 - 1 : bound(waited, 0, COMMIT_TIME / 2 - 1);
        vm.warp(block.timestamp + waited);
        court.draw(_fraudLeaf);
        assertEq(_drawn(_fraudLeaf), JURY_SIZE, "drawn");
    }

    function testFuzz_draw_reverts_twice(uint256 blocks) public {
        _challengeAndDraw(ALICE_FRAUD, ACCEPT);
        vm.roll(block.number + bound(blocks, 0, 1000));
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtJuryDrawn.selector, _fraudLeaf));
        court.draw(_fraudLeaf);
    }

    // ----------------------------------------------------------------------- who

    /// @dev The twin of every test below: an account of the bench that has nothing to do with the case.
    function test_draw_takesWhoMaySit() public {
        _joinBench(stranger);
        assertTrue(_isDrawnBesidesTwo(stranger), "drawn");
    }

    function testFuzz_draw_excludesValidatorsOfTheRun(uint256 which) public {
        address validator = validators[which % 5];
        _joinBench(validator);
        assertFalse(_isDrawnBesidesTwo(validator), "whether it signed or not");
    }

    /// @dev Who left its seat before the batch was posted, or was dismissed.
    function testFuzz_draw_excludesWhoEverValidatedForTheRun(uint256 which, bool dismissed) public {
        address validator = validators[which % 5];
        vm.prank(dismissed ? owner : validator);
        if (dismissed) runs.dismiss(runId, validator);
        else runs.leaveSeat(runId);
        _joinBench(validator);
        assertFalse(_isDrawnBesidesTwo(validator), "it knows the others");
    }

    function test_draw_excludesTheWorker() public {
        _joinBench(alice);
        assertFalse(_isDrawnBesidesTwo(alice), "nobody judges itself");
    }

    function test_draw_takesAnotherWorkerOfTheRun() public {
        _joinBench(bob);
        assertTrue(_isDrawnBesidesTwo(bob), "it is not about him");
    }

    function test_draw_excludesTheOwnerOfTheRun() public {
        _joinBench(owner);
        assertFalse(_isDrawnBesidesTwo(owner), "nobody judges its own run");
    }

    function test_draw_takesTheValidatorOfAnotherRun() public {
        vm.startPrank(owner);
        uint64 other = runs.createRun(_config());
        runs.invite(other, stranger, true);
        vm.stopPrank();
        vm.prank(stranger);
        runs.takeSeat(other, 1, REQUIRED_VALIDATOR_STAKE);
        _joinBench(stranger);
        assertTrue(_isDrawnBesidesTwo(stranger), "it knows nobody of this run");
    }

    /// @dev Invites a juror and seats it, one second after what came before or at once.
    function _seat(address account, uint256 waited) private {
        vm.prank(owner);
        runs.invite(runId, account, true);
        vm.warp(block.timestamp + waited);
        vm.prank(account);
        runs.takeSeat(runId, 1, REQUIRED_VALIDATOR_STAKE);
    }

    /// @dev No owner picks a jury by seating those that it does not want, once the block of the draw is known.
    function testFuzz_draw_takesWhoTookASeatAfterTheOpening(uint256 waited) public {
        _leaveBench(2);
        _challenge(ALICE_FRAUD, ACCEPT);
        _seat(jurors[2], bound(waited, 1, 1 hours));
        _draw(_fraudLeaf);
        assertTrue(_isDrawn(jurors[2]), "drawn");
    }

    /// @dev Whether the seat or the opening comes first in a second cannot be told: its signature may be what the case is about.
    function testFuzz_draw_excludesWhoTookASeatInTheSecondOfTheOpening(bool before) public {
        _leaveBench(2);
        if (before) _seat(jurors[2], 0);
        _challenge(ALICE_FRAUD, ACCEPT);
        if (!before) _seat(jurors[2], 0);
        _draw(_fraudLeaf);
        assertFalse(_isDrawn(jurors[2]), "it validates for the run");
    }

    function test_draw_excludesWhoTookASeatBeforeTheOpening() public {
        _leaveBench(2);
        _seat(jurors[2], 0);
        vm.warp(block.timestamp + 1);
        _challengeAndDraw(ALICE_FRAUD, ACCEPT);
        assertFalse(_isDrawn(jurors[2]), "it validates for the run");
    }

    /// @dev Nobody who knows of the case joins to judge it.
    function testFuzz_draw_excludesWhoJoinedAfterTheOpening(uint256 waited) public {
        _leaveBench(3);
        _challenge(ALICE_FRAUD, ACCEPT);
        vm.warp(block.timestamp + bound(waited, 0, 1 hours));
        _joinBench(stranger);
        _draw(_fraudLeaf);
        assertFalse(_isDrawn(stranger), "it came later");
    }

    /// @dev In the second of the opening it cannot be told who was first.
    function test_draw_excludesWhoJoinedInTheSecondOfTheOpening() public {
        _leaveBench(3);
        vm.prank(stranger);
        jury.join(REQUIRED_JUROR_STAKE);
        _challengeAndDraw(ALICE_FRAUD, ACCEPT);
        assertFalse(_isDrawn(stranger), "it may have come later");
    }

    /// @dev Nobody takes itself out of a draw that it dislikes.
    function testFuzz_draw_takesWhoLeftAfterTheOpening(uint256 waited) public {
        _leaveBench(2);
        _challenge(ALICE_FRAUD, ACCEPT);
        vm.warp(block.timestamp + bound(waited, 0, 1 hours));
        vm.prank(jurors[2]);
        jury.leave();
        _draw(_fraudLeaf);
        assertTrue(_isDrawn(jurors[2]), "its stake is still there");
    }

    function testFuzz_draw_takesFewer_whenFewerMaySit(uint256 left) public {
        left = bound(left, 1, 4);
        _leaveBench(left);
        _challengeAndDraw(ALICE_FRAUD, ACCEPT);
        assertEq(_drawn(_fraudLeaf), 5 - left < JURY_SIZE ? 5 - left : JURY_SIZE, "drawn");
    }

    function test_draw_reverts_whenNobodyMaySit() public {
        _leaveBench(5);
        _challenge(ALICE_FRAUD, ACCEPT);
        _passDraw();
        _expectNoJurors(_fraudLeaf);
        court.draw(_fraudLeaf);
    }

    // ----------------------------------------------------------------------- how

    /// @dev Eight on the bench, three of which are a party; three of the others are drawn as IJuryPool says.
    function testFuzz_draw_followsTheBlockHash(bytes32 hash_) public {
        vm.assume(hash_ != 0);
        _joinBench(validators[0]);
        _joinBench(alice);
        _joinBench(owner);
        _challenge(ALICE_FRAUD, ACCEPT);
        uint256 drawBlock = block.number + DRAW_DELAY;
        // Who comes later changes nothing.
        _joinBench(stranger);
        vm.roll(drawBlock + 1);
        vm.setBlockhash(drawBlock, hash_);
        address[] memory expected = _expectedPanel(keccak256(abi.encode(hash_, _fraudLeaf)), 8);
        vm.expectEmit(address(court));
        emit IDisputeCourtEvents.JuryDrawn(_fraudLeaf, expected);
        court.draw(_fraudLeaf);
        assertEq(_drawn(_fraudLeaf), JURY_SIZE, "drawn");
        for (uint256 i = 0; i < JURY_SIZE; ++i) {
            assertTrue(_isDrawn(expected[i]), "each of them");
        }
    }

    function testFuzz_draw_differsByCase(bytes32 hash_) public {
        vm.assume(hash_ != 0);
        _challenge(ALICE_FRAUD, ACCEPT);
        _challenge(BOB_ACCEPTED, REJECT);
        uint256 drawBlock = block.number + DRAW_DELAY;
        vm.roll(drawBlock + 1);
        vm.setBlockhash(drawBlock, hash_);
        address[] memory expected = _expectedPanel(keccak256(abi.encode(hash_, _acceptedLeaf)), 5);
        vm.expectEmit(address(court));
        emit IDisputeCourtEvents.JuryDrawn(_acceptedLeaf, expected);
        court.draw(_acceptedLeaf);
    }

    /// @dev The slow way: one try after the other, and only jurors of the original bench may sit.
    function _expectedPanel(bytes32 seed, uint256 places) private view returns (address[] memory panel) {
        panel = new address[](JURY_SIZE);
        uint256 found;
        for (uint256 i = 0; found < JURY_SIZE; ++i) {
            uint256 place = uint256(keccak256(abi.encode(seed, i))) % places;
            if (place >= 5) continue;
            address juror = jury.placeAt(place).juror;
            bool taken;
            for (uint256 j = 0; j < found; ++j) {
                if (panel[j] == juror) taken = true;
            }
            if (!taken) panel[found++] = juror;
        }
    }
}
