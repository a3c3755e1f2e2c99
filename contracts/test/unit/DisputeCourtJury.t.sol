// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IContributionLedger} from "../../src/interfaces/IContributionLedger.sol";
import {IDisputeCourt, IDisputeCourtErrors, IDisputeCourtEvents} from "../../src/interfaces/IDisputeCourt.sol";
import {JuryLib} from "../../src/libraries/JuryLib.sol";
import {CourtTest} from "../CourtTest.sol";

contract DisputeCourtJuryTest is CourtTest {
    /// @dev The seats of validators 2, 3 and 4.
    uint88 private constant ALL_ELIGIBLE = 4 + 8 + 16;

    function _expectNoJurors(bytes32 leaf) private {
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtNoJurors.selector, leaf));
    }

    function _juryOf(bytes32 leaf) private view returns (uint88) {
        return court.caseOf(leaf).jury;
    }

    // ---------------------------------------------------------------------- when

    function test_drawJury_reverts_withoutACase() public {
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        _expectNoOpenCase(_fraudLeaf, uint8(IDisputeCourt.CaseStatus.None));
        court.drawJury(outcome);
    }

    function test_drawJury_reverts_whenClosed() public {
        _decide(ALICE_FRAUD, ACCEPTED, true);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        _expectNoOpenCase(_fraudLeaf, uint8(IDisputeCourt.CaseStatus.Overturned));
        court.drawJury(outcome);
    }

    function testFuzz_drawJury_reverts_untilItsBlockIsMined(uint256 blocks) public {
        _challenge(ALICE_FRAUD, ACCEPTED);
        uint256 drawBlock = block.number + DRAW_DELAY;
        vm.roll(block.number + bound(blocks, 0, DRAW_DELAY));
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtTooEarlyToDraw.selector, _fraudLeaf, drawBlock));
        court.drawJury(outcome);
        vm.roll(drawBlock + 1);
        court.drawJury(outcome);
        assertEq(_juryOf(_fraudLeaf), ALL_ELIGIBLE, "in the next block it works");
    }

    /// @dev Jurors keep the other half of the time to commit.
    function testFuzz_drawJury_reverts_inTheSecondHalfOfTheTimeToCommit(uint256 waited) public {
        _challenge(ALICE_FRAUD, ACCEPTED);
        _passDraw();
        uint256 endsAt = block.timestamp + COMMIT_TIME / 2;
        waited = waited % 2 == 0 ? COMMIT_TIME / 2 : bound(waited, COMMIT_TIME / 2, 100 days);
        vm.warp(block.timestamp + waited);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        _expectPhaseOver(_fraudLeaf, endsAt);
        court.drawJury(outcome);
    }

    function testFuzz_drawJury_works_inTheFirstHalfOfTheTimeToCommit(uint256 waited) public {
        _challenge(ALICE_FRAUD, ACCEPTED);
        _passDraw();
        waited = waited % 2 == 0 ? COMMIT_TIME / 2 - 1 : bound(waited, 0, COMMIT_TIME / 2 - 1);
        vm.warp(block.timestamp + waited);
        court.drawJury(_outcomeAt(ALICE_FRAUD));
        assertEq(_juryOf(_fraudLeaf), ALL_ELIGIBLE, "drawn");
    }

    function testFuzz_drawJury_reverts_twice(uint256 blocks) public {
        _challengeAndDraw(ALICE_FRAUD, ACCEPTED);
        vm.roll(block.number + bound(blocks, 0, 1000));
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtJuryDrawn.selector, _fraudLeaf));
        court.drawJury(outcome);
    }

    function testFuzz_drawJury_works_whileItsBlockCanBeRead(address caller, uint256 blocks) public {
        _challenge(ALICE_FRAUD, ACCEPTED);
        blocks = blocks % 2 == 0 ? 256 : bound(blocks, 1, 256);
        vm.roll(block.number + DRAW_DELAY + blocks);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        vm.prank(caller);
        court.drawJury(outcome);
        assertEq(_juryOf(_fraudLeaf), ALL_ELIGIBLE, "drawn");
    }

    function testFuzz_drawJury_postpones_whenItsBlockIsTooOld(uint256 blocks) public {
        _challenge(ALICE_FRAUD, ACCEPTED);
        blocks = blocks % 2 == 0 ? 257 : bound(blocks, 257, 1_000_000);
        vm.roll(block.number + DRAW_DELAY + blocks);
        uint256 next = block.number + DRAW_DELAY;
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        vm.expectEmit(address(court));
        emit IDisputeCourtEvents.DrawPostponed(_fraudLeaf, next);
        court.drawJury(outcome);
        assertEq(_juryOf(_fraudLeaf), 0, "nobody yet");
        assertEq(court.caseOf(_fraudLeaf).drawBlock, next, "a later block decides");

        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtTooEarlyToDraw.selector, _fraudLeaf, next));
        court.drawJury(outcome);
        vm.roll(next + 1);
        court.drawJury(outcome);
        assertEq(_juryOf(_fraudLeaf), ALL_ELIGIBLE, "drawn");
    }

    // ----------------------------------------------------------------------- who

    function test_drawJury_excludesSigners() public {
        _judge(_one(_record(bob, 2, 0, ACCEPTED)), 4);
        _challengeAndDraw(0, REJECTED);
        assertEq(_juryOf(_fraudLeaf), 16, "the only one that did not sign");
    }

    function test_drawJury_excludesASigner_thatReturnedToItsSeat() public {
        _deposit(stranger, REQUIRED_VALIDATOR_STAKE);
        vm.startPrank(owner);
        runs.rotateValidator(runId, validators[0], stranger);
        runs.rotateValidator(runId, stranger, validators[0]);
        vm.stopPrank();
        _challengeAndDraw(ALICE_FRAUD, ACCEPTED);
        assertEq(_juryOf(_fraudLeaf), ALL_ELIGIBLE, "its bit is the one it signed with");
    }

    function testFuzz_drawJury_excludesTheChallenger(uint256 which) public {
        which = bound(which, 2, 4);
        _challengeBy(validators[which], ALICE_FRAUD, ACCEPTED);
        _drawJury(ALICE_FRAUD);
        assertEq(_juryOf(_fraudLeaf), ALL_ELIGIBLE ^ (1 << which), "the two others");
    }

    function testFuzz_drawJury_excludesTheWorker(uint256 which) public {
        which = bound(which, 2, 4);
        (address node, uint256 nodeKey) = makeAddrAndKey("validator's node");
        _register(validators[which], node, nodeKey, 0);
        _judge(_one(_record(validators[which], 1, 0, FRAUD)), QUORUM);
        _challengeAndDraw(0, ACCEPTED);
        assertEq(_juryOf(_fraudLeaf), ALL_ELIGIBLE ^ (1 << which), "nobody judges itself");
    }

    function testFuzz_drawJury_excludesWhoHasNoStakeLeft(uint256 which) public {
        which = bound(which, 2, 4);
        vm.prank(validators[which]);
        vault.requestUnbond(REQUIRED_VALIDATOR_STAKE);
        _challengeAndDraw(ALICE_FRAUD, ACCEPTED);
        assertEq(_juryOf(_fraudLeaf), ALL_ELIGIBLE ^ (1 << which), "the two others");
    }

    function testFuzz_drawJury_excludesWhoWasUnseated(uint256 which) public {
        which = bound(which, 2, 4);
        vm.prank(address(faults));
        runs.unseatValidator(runId, validators[which]);
        _challengeAndDraw(ALICE_FRAUD, ACCEPTED);
        assertEq(_juryOf(_fraudLeaf), ALL_ELIGIBLE ^ (1 << which), "the two others");
    }

    function test_drawJury_reverts_whenEverybodySigned() public {
        _judge(_one(_record(bob, 2, 0, ACCEPTED)), 5);
        _challenge(0, REJECTED);
        _passDraw();
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(0);
        _expectNoJurors(_fraudLeaf);
        court.drawJury(outcome);
    }

    function test_drawJury_reverts_whenNobodyIsLeftToSit() public {
        _challengeBy(validators[2], ALICE_FRAUD, ACCEPTED);
        for (uint256 i = 3; i < 5; ++i) {
            vm.prank(validators[i]);
            vault.requestUnbond(REQUIRED_VALIDATOR_STAKE);
        }
        _passDraw();
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        _expectNoJurors(_fraudLeaf);
        court.drawJury(outcome);
    }

    // ----------------------------------------------------------------------- how

    /// @dev Four may sit, three are drawn: those that JuryLib draws by the hash of the draw block.
    function testFuzz_drawJury_followsTheBlockHashAndTheStakes(bytes32 hash_, uint256 extra, uint256 which) public {
        vm.assume(hash_ != 0);
        _deposit(stranger, REQUIRED_VALIDATOR_STAKE);
        vm.prank(owner);
        runs.seatValidator(runId, stranger);
        which = bound(which, 2, 4);
        _deposit(validators[which], bound(extra, 1, WALLET - REQUIRED_VALIDATOR_STAKE));
        _challenge(ALICE_FRAUD, ACCEPTED);
        uint256 drawBlock = block.number + DRAW_DELAY;
        vm.roll(drawBlock + 1);
        vm.setBlockhash(drawBlock, hash_);

        (address[] memory jurors, uint88 seats) = _expectedJury(keccak256(abi.encode(hash_, _fraudLeaf)));
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        vm.expectEmit(address(court));
        emit IDisputeCourtEvents.JuryDrawn(_fraudLeaf, seats, jurors);
        court.drawJury(outcome);
        assertEq(_juryOf(_fraudLeaf), seats, "seats");
    }

    function _expectedJury(bytes32 seed) private view returns (address[] memory jurors, uint88 seats) {
        (address[] memory accounts,) = runs.validatorsOf(runId);
        uint256[] memory weights = new uint256[](accounts.length);
        for (uint256 i = 2; i < accounts.length; ++i) {
            weights[i] = vault.activeStake(accounts[i]);
        }
        uint256[] memory places = JuryLib.draw(weights, JURY_SIZE, seed);
        jurors = new address[](places.length);
        for (uint256 i = 0; i < places.length; ++i) {
            jurors[i] = accounts[places[i]];
            seats |= runs.seatBitOf(runId, jurors[i]);
        }
    }
}
