// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IJuryPool, IJuryPoolErrors, IJuryPoolEvents} from "../../src/interfaces/IJuryPool.sol";
import {IStakeVault} from "../../src/interfaces/IStakeVault.sol";
import {BaseTest} from "../BaseTest.sol";

/// @title Who is on the bench, and which place is given to whom
contract JuryPoolTest is BaseTest {
    uint64 private constant BENCH = 0;

    function _joinAs(address account, uint256 stake) private {
        vm.prank(account);
        jury.join(stake);
    }

    function _leave(address account) private {
        vm.prank(account);
        jury.leave();
    }

    function _expectStakeTooLow(address account, uint256 active) private {
        vm.expectRevert(
            abi.encodeWithSelector(IJuryPoolErrors.PoolStakeTooLow.selector, account, active, REQUIRED_JUROR_STAKE)
        );
    }

    function _expectWrongStatus(address account, bool seated) private {
        vm.expectRevert(abi.encodeWithSelector(IJuryPoolErrors.PoolWrongStatus.selector, account, seated));
    }

    function _assertPlace(uint256 place, address juror, uint256 joinedAt, uint256 leftAt) private view {
        IJuryPool.Place memory held = jury.placeAt(place);
        assertEq(held.juror, juror, "who holds the place");
        assertEq(held.joinedAt, joinedAt, "since when");
        assertEq(held.leftAt, leftAt, "until when");
    }

    /// @dev One of two numbers: half of the time that at the edge.
    function _oftenAt(uint256 random, uint256 edge, uint256 other) private pure returns (uint256) {
        return random % 2 == 0 ? edge : other;
    }

    function test_constructor_keepsItsParameters() public view {
        assertEq(address(jury.vault()), address(vault), "vault");
        assertEq(jury.requiredStake(), REQUIRED_JUROR_STAKE, "required stake");
        assertEq(jury.drawTime(), COMMIT_TIME, "time of a draw");
    }

    // --------------------------------------------------------------------- join

    function testFuzz_join_reverts_whenStakeIsTooLow(uint256 stake) public {
        stake = bound(stake, 0, REQUIRED_JUROR_STAKE - 1);
        _expectStakeTooLow(alice, stake);
        _joinAs(alice, stake);
    }

    function test_join_reverts_whenStakeIsForARun() public {
        _deposit(1, alice, REQUIRED_JUROR_STAKE);
        _expectStakeTooLow(alice, 0);
        _joinAs(alice, 0);
    }

    function test_join_reverts_whenStakeIsLeaving() public {
        _deposit(BENCH, alice, REQUIRED_JUROR_STAKE);
        vm.prank(alice);
        vault.requestUnbond(BENCH, 1);
        _expectStakeTooLow(alice, REQUIRED_JUROR_STAKE - 1);
        _joinAs(alice, 0);
    }

    function test_join_reverts_whenTheCallerIsThere() public {
        _joinAs(alice, REQUIRED_JUROR_STAKE);
        _expectWrongStatus(alice, true);
        _joinAs(alice, REQUIRED_JUROR_STAKE);
    }

    function testFuzz_join_stakesForTheBench(uint256 stake) public {
        stake = bound(stake, REQUIRED_JUROR_STAKE, WALLET);
        _joinAs(alice, stake);
        assertTrue(jury.isJuror(alice), "a juror");
        assertEq(vault.activeStake(BENCH, alice), stake, "staked");
        assertEq(token.balanceOf(alice), WALLET - stake, "paid");
    }

    function test_join_countsWhatIsStakedAlready() public {
        vm.prank(stranger);
        vault.deposit(BENCH, alice, REQUIRED_JUROR_STAKE - 1);
        _joinAs(alice, 1);
        assertTrue(jury.isJuror(alice), "a juror");
        assertEq(token.balanceOf(alice), WALLET - 1, "paid the rest only");
    }

    function test_join_takesPlacesInOrder() public {
        for (uint256 i = 0; i < 3; ++i) {
            vm.warp(block.timestamp + 10);
            vm.expectEmit(address(jury));
            emit IJuryPoolEvents.JurorJoined(jurors[i], i);
            _joinAs(jurors[i], REQUIRED_JUROR_STAKE);
            _assertPlace(i, jurors[i], block.timestamp, 0);
        }
        assertEq(jury.placeCount(), 3, "places");
    }

    // -------------------------------------------------------------------- leave

    function test_leave_reverts_whenTheCallerIsNotThere() public {
        _expectWrongStatus(alice, false);
        _leave(alice);
    }

    function test_leave_reverts_twice() public {
        _joinAs(alice, REQUIRED_JUROR_STAKE);
        _leave(alice);
        _expectWrongStatus(alice, false);
        _leave(alice);
    }

    function testFuzz_leave_endsTheOffer(uint256 waited) public {
        waited = bound(waited, 0, 365 days);
        uint256 joinedAt = block.timestamp;
        _joinAs(alice, REQUIRED_JUROR_STAKE);
        vm.warp(joinedAt + waited);
        vm.expectEmit(address(jury));
        emit IJuryPoolEvents.JurorLeft(alice, 0);
        _leave(alice);
        assertFalse(jury.isJuror(alice), "no juror");
        _assertPlace(0, alice, joinedAt, joinedAt + waited);
    }

    function testFuzz_leave_unbondsAll(uint256 stake) public {
        stake = bound(stake, REQUIRED_JUROR_STAKE, WALLET);
        _joinAs(alice, stake);
        _leave(alice);
        IStakeVault.Account memory account = vault.accountOf(BENCH, alice);
        assertEq(account.active, 0, "active");
        assertEq(account.unbonding, stake, "unbonding");
        vm.warp(block.timestamp + UNBONDING_PERIOD);
        vm.prank(alice);
        assertEq(vault.withdraw(BENCH), stake, "all back");
    }

    function test_leave_sparesStakeForRuns() public {
        _deposit(1, alice, 7 ether);
        _joinAs(alice, REQUIRED_JUROR_STAKE);
        _leave(alice);
        assertEq(vault.activeStake(1, alice), 7 ether, "still active");
    }

    function test_leave_sparesOtherPlaces() public {
        _fillBench();
        _leave(jurors[2]);
        for (uint256 i = 0; i < 5; ++i) {
            assertEq(jury.isJuror(jurors[i]), i != 2, "whoever stays");
            assertEq(jury.placeAt(i).juror, jurors[i], "where it was");
        }
    }

    // ------------------------------------------------------------------- retire

    function testFuzz_retireForLowStake_doesNothing_whenStakeSuffices(address caller, uint256 stake) public {
        _joinAs(alice, bound(stake, REQUIRED_JUROR_STAKE, WALLET));
        vm.prank(caller);
        jury.retireForLowStake(alice);
        assertTrue(jury.isJuror(alice), "still a juror");
        _assertPlace(0, alice, block.timestamp, 0);
    }

    function testFuzz_retireForLowStake_doesNothing_forNobody(address account) public {
        _fillBench();
        vm.assume(!jury.isJuror(account));
        vm.recordLogs();
        jury.retireForLowStake(account);
        assertEq(vm.getRecordedLogs().length, 0, "nobody leaves");
    }

    function testFuzz_retireForLowStake_endsTheOffer_whenStakeIsSlashed(uint256 ppm, uint256 stake) public {
        stake = bound(stake, REQUIRED_JUROR_STAKE, WALLET);
        _joinAs(alice, stake);
        vm.prank(address(court));
        uint256 taken = vault.slash(BENCH, alice, IStakeVault.Offence.AbsentJuror, 1, bound(ppm, 0, PPM), address(0));
        bool stays = stake - taken >= REQUIRED_JUROR_STAKE;
        assertEq(jury.isJuror(alice), stays, "a juror exactly while stake suffices");
        _assertPlace(0, alice, block.timestamp, stays ? 0 : block.timestamp);
    }

    /// @dev The rest is its owner's to unbond, or to add to.
    function test_retireForLowStake_leavesTheStakeActive() public {
        _joinAs(alice, REQUIRED_JUROR_STAKE);
        vm.prank(alice);
        vault.requestUnbond(BENCH, 1);
        assertEq(vault.activeStake(BENCH, alice), REQUIRED_JUROR_STAKE - 1, "active");
    }

    function test_join_works_forARetiredJurorThatAddsStake() public {
        _joinAs(alice, REQUIRED_JUROR_STAKE);
        vm.prank(alice);
        vault.requestUnbond(BENCH, 1);
        vm.warp(block.timestamp + COMMIT_TIME + 1);
        _joinAs(alice, 1);
        assertTrue(jury.isJuror(alice), "a juror again");
        _assertPlace(0, alice, block.timestamp, 0);
    }

    function test_deposit_bringsNobodyBack() public {
        _joinAs(alice, REQUIRED_JUROR_STAKE);
        vm.prank(alice);
        vault.requestUnbond(BENCH, 1);
        _deposit(BENCH, alice, REQUIRED_JUROR_STAKE);
        assertFalse(jury.isJuror(alice), "who retired must join");
    }

    // --------------------------------------------------------------- coming back

    function _expectPlaceHeld(address account, uint256 until) private {
        vm.expectRevert(abi.encodeWithSelector(IJuryPoolErrors.PoolPlaceHeld.selector, account, until));
    }

    function testFuzz_join_reverts_whileOpenCasesMayDrawWhoLeft(uint256 waited) public {
        _joinAs(alice, REQUIRED_JUROR_STAKE);
        _leave(alice);
        uint256 leftAt = block.timestamp;
        vm.warp(leftAt + _oftenAt(waited, COMMIT_TIME, bound(waited, 0, COMMIT_TIME)));
        _expectPlaceHeld(alice, leftAt + COMMIT_TIME);
        _joinAs(alice, REQUIRED_JUROR_STAKE);
    }

    function testFuzz_join_works_afterThat(uint256 waited) public {
        _joinAs(alice, REQUIRED_JUROR_STAKE);
        _leave(alice);
        vm.warp(block.timestamp + _oftenAt(waited, COMMIT_TIME + 1, bound(waited, COMMIT_TIME + 1, 365 days)));
        _joinAs(alice, REQUIRED_JUROR_STAKE);
        _assertPlace(0, alice, block.timestamp, 0);
    }

    /// @dev Else one stake could fill the bench with places that nobody holds: a wei leaves and comes again.
    function test_join_reverts_whenARetiredJurorComesBackAtOnce() public {
        _joinAs(alice, REQUIRED_JUROR_STAKE);
        vm.prank(alice);
        vault.requestUnbond(BENCH, 1);
        _expectPlaceHeld(alice, block.timestamp + COMMIT_TIME);
        _joinAs(alice, 1);
        assertEq(jury.placeCount(), 1, "places");
    }

    function test_join_reverts_afterEachTimeThatAJurorLeft() public {
        for (uint256 i = 0; i < 3; ++i) {
            _joinAs(alice, REQUIRED_JUROR_STAKE);
            vm.warp(block.timestamp + 30 days);
            _leave(alice);
            _expectPlaceHeld(alice, block.timestamp + COMMIT_TIME);
            _joinAs(alice, REQUIRED_JUROR_STAKE);
            vm.warp(block.timestamp + COMMIT_TIME + 1);
        }
    }

    /// @dev One account has one place, however often it comes and goes.
    function testFuzz_join_addsNoPlaceForWhoComesAndGoes(uint256 times, uint256 waited) public {
        times = bound(times, 1, 20);
        waited = bound(waited, COMMIT_TIME + 1, 30 days);
        _fillBench();
        for (uint256 i = 0; i < times; ++i) {
            _joinAs(alice, REQUIRED_JUROR_STAKE);
            _leave(alice);
            vm.warp(block.timestamp + waited);
        }
        assertEq(jury.placeCount(), 6, "five jurors and one more");
    }

    // ---------------------------------------------------------- who may be drawn

    function testFuzz_mayBeDrawn_isTrueForAJuror(uint256 openedAt) public {
        _joinAs(alice, REQUIRED_JUROR_STAKE);
        assertTrue(jury.mayBeDrawn(alice, openedAt), "whenever the case opened");
    }

    function testFuzz_mayBeDrawn_isTrueForWhoLeftInTheCasesSecondOrLater(uint256 openedAt, uint256 later) public {
        openedAt = bound(openedAt, 1, 365 days);
        _joinAs(alice, REQUIRED_JUROR_STAKE);
        vm.warp(openedAt + _oftenAt(later, 0, bound(later, 0, 365 days)));
        _leave(alice);
        assertTrue(jury.mayBeDrawn(alice, openedAt), "it was there");
    }

    function testFuzz_mayBeDrawn_isFalseForWhoLeftEarlier(uint256 later) public {
        _joinAs(alice, REQUIRED_JUROR_STAKE);
        _leave(alice);
        assertFalse(
            jury.mayBeDrawn(alice, block.timestamp + _oftenAt(later, 1, bound(later, 1, 365 days))), "it had left"
        );
    }

    function testFuzz_mayBeDrawn_isFalseForStrangers(address account, uint256 openedAt) public {
        _fillBench();
        vm.assume(!jury.isJuror(account));
        assertFalse(jury.mayBeDrawn(account, bound(openedAt, 1, type(uint40).max)), "nobody");
    }

    // -------------------------------------------------------------- places anew

    /// @dev Until then an open case may draw who held it.
    function testFuzz_join_takesANewPlace_whileTheOldOneMayBeDrawn(uint256 waited) public {
        waited = _oftenAt(waited, COMMIT_TIME, bound(waited, 0, COMMIT_TIME));
        _fillBench();
        _leave(jurors[2]);
        uint256 leftAt = block.timestamp;
        vm.warp(leftAt + waited);
        vm.expectEmit(address(jury));
        emit IJuryPoolEvents.JurorJoined(alice, 5);
        _joinAs(alice, REQUIRED_JUROR_STAKE);
        _assertPlace(2, jurors[2], leftAt - 1, leftAt);
        assertEq(jury.placeCount(), 6, "places");
    }

    function testFuzz_join_takesTheOldPlace_afterThat(uint256 waited) public {
        waited = _oftenAt(waited, COMMIT_TIME + 1, bound(waited, COMMIT_TIME + 1, 365 days));
        _fillBench();
        _leave(jurors[2]);
        vm.warp(block.timestamp + waited);
        vm.expectEmit(address(jury));
        emit IJuryPoolEvents.JurorJoined(alice, 2);
        _joinAs(alice, REQUIRED_JUROR_STAKE);
        _assertPlace(2, alice, block.timestamp, 0);
        assertEq(jury.placeCount(), 5, "places");
    }

    function test_join_takesTheOldestPlaceFirst_andEachOnce() public {
        _fillBench();
        _leave(jurors[3]);
        vm.warp(block.timestamp + 1);
        _leave(jurors[1]);
        vm.warp(block.timestamp + COMMIT_TIME + 1);
        uint256[3] memory expected = [uint256(3), 1, 5];
        for (uint256 i = 0; i < 3; ++i) {
            address newcomer = [alice, bob, stranger][i];
            _joinAs(newcomer, REQUIRED_JUROR_STAKE);
            assertEq(jury.placeAt(expected[i]).juror, newcomer, "the place left the longest ago, then a new one");
        }
    }

    function test_join_waitsForTheOldestPlace() public {
        _fillBench();
        _leave(jurors[3]);
        vm.warp(block.timestamp + COMMIT_TIME);
        _leave(jurors[1]);
        vm.warp(block.timestamp + 1);
        _joinAs(alice, REQUIRED_JUROR_STAKE);
        assertEq(jury.placeAt(3).juror, alice, "the one that is free");
        _joinAs(bob, REQUIRED_JUROR_STAKE);
        assertEq(jury.placeAt(5).juror, bob, "the other is not");
    }

    function test_join_reverts_andKeepsTheFreePlace_whenStakeIsTooLow() public {
        _fillBench();
        _leave(jurors[3]);
        vm.warp(block.timestamp + COMMIT_TIME + 1);
        _expectStakeTooLow(alice, 1);
        _joinAs(alice, 1);
        _joinAs(bob, REQUIRED_JUROR_STAKE);
        assertEq(jury.placeAt(3).juror, bob, "for who brings the stake");
    }

    function test_leave_freesAPlaceTwice() public {
        _fillBench();
        for (uint256 i = 0; i < 3; ++i) {
            address holder = jury.placeAt(2).juror;
            _leave(holder);
            vm.warp(block.timestamp + COMMIT_TIME + 1);
            address newcomer = [alice, bob, stranger][i];
            _joinAs(newcomer, REQUIRED_JUROR_STAKE);
            assertEq(jury.placeAt(2).juror, newcomer, "the same place");
        }
        assertEq(jury.placeCount(), 5, "places");
    }

    /// @dev A case that opened a draw's time ago may still draw it.
    function _leftLately(address account) private view returns (bool) {
        return jury.mayBeDrawn(account, block.timestamp - COMMIT_TIME);
    }

    /// @dev Places, their holders and who is free agree whatever happens.
    function testFuzz_bench_agreesWithItself(uint256 seed) public {
        vm.warp(block.timestamp + 2 * COMMIT_TIME);
        address[8] memory accounts = [jurors[0], jurors[1], jurors[2], jurors[3], jurors[4], alice, bob, stranger];
        for (uint256 i = 0; i < 24; ++i) {
            seed = uint256(keccak256(abi.encode(seed)));
            address account = accounts[seed % 8];
            if (jury.isJuror(account)) _leave(account);
            else if (!_leftLately(account)) _joinAs(account, REQUIRED_JUROR_STAKE);
            vm.warp(block.timestamp + (seed >> 8) % COMMIT_TIME);
        }
        for (uint256 i = 0; i < 8; ++i) {
            uint256 held;
            for (uint256 place = 0; place < jury.placeCount(); ++place) {
                IJuryPool.Place memory seat = jury.placeAt(place);
                if (seat.juror == accounts[i] && seat.leftAt == 0) ++held;
            }
            assertEq(held, jury.isJuror(accounts[i]) ? 1 : 0, "one place for each juror, none for others");
        }
    }
}
