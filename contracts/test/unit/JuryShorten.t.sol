// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IJuryPool, IJuryPoolEvents} from "../../src/interfaces/IJuryPool.sol";
import {BaseTest} from "../BaseTest.sol";

/// @title A bench that becomes shorter again
contract JuryShortenTest is BaseTest {
    uint256 private constant CROWD = 40;

    function _joinAs(address account) private {
        vm.prank(account);
        jury.join(REQUIRED_JUROR_STAKE);
    }

    function _leave(address account) private {
        vm.prank(account);
        jury.leave();
    }

    function _ofCrowd(uint256 i) private pure returns (address) {
        return address(uint160(0xC0FFEE00 + i));
    }

    /// @dev A rich account sits down under many names.
    function _crowdIn(uint256 count) private {
        for (uint256 i = 0; i < count; ++i) {
            address account = _ofCrowd(i);
            vm.prank(owner);
            token.transfer(account, REQUIRED_JUROR_STAKE);
            vm.prank(account);
            token.approve(address(vault), REQUIRED_JUROR_STAKE);
            _joinAs(account);
        }
    }

    function _crowdOut(uint256 count) private {
        for (uint256 i = 0; i < count; ++i) {
            _leave(_ofCrowd(i));
        }
    }

    function _waitForDraws() private {
        vm.warp(block.timestamp + COMMIT_TIME + 1);
    }

    function _drawnOf(uint256 openedAt, uint256 places, uint256 salt) private view returns (address[] memory) {
        return jury.draw(keccak256(abi.encode(salt)), places, openedAt, 3, new address[](0));
    }

    /// @dev Every juror holds one place, and no place is held by anybody else.
    function _assertHeldOnce() private view {
        uint256 held;
        for (uint256 i = 0; i < jury.placeCount(); ++i) {
            IJuryPool.Place memory place = jury.placeAt(i);
            if (place.leftAt != 0) continue;
            assertTrue(jury.isJuror(place.juror), "who holds a place is a juror");
            ++held;
        }
        assertEq(held, 5, "the five jurors");
        for (uint256 i = 0; i < 5; ++i) {
            assertTrue(jury.isJuror(jurors[i]), "still there");
        }
    }

    function test_shorten_undoesACrowdThatCameFirst() public {
        _crowdIn(CROWD);
        _fillBench();
        _crowdOut(CROWD);
        _waitForDraws();
        jury.shorten(CROWD);
        assertEq(jury.placeCount(), CROWD + 5, "jurors have left the end a moment ago");
        _waitForDraws();
        vm.expectEmit(address(jury));
        emit IJuryPoolEvents.BenchShortened(5);
        jury.shorten(CROWD);
        assertEq(jury.placeCount(), 5, "a place for each juror");
        _assertHeldOnce();
        for (uint256 salt = 0; salt < 20; ++salt) {
            assertEq(_drawnOf(block.timestamp, 5, salt).length, 3, "a whole jury");
        }
    }

    function test_shorten_undoesACrowdThatCameLater() public {
        _fillBench();
        _crowdIn(CROWD);
        _crowdOut(CROWD);
        _waitForDraws();
        jury.shorten(CROWD);
        assertEq(jury.placeCount(), 5, "at once");
        _assertHeldOnce();
    }

    /// @dev `muster juror shorten` looks at fifty places.
    function test_shorten_costsLittleForEachPlace() public {
        _crowdIn(CROWD);
        _crowdOut(CROWD / 2);
        _waitForDraws();
        uint256 before = gasleft();
        jury.shorten(CROWD / 2);
        assertLt((before - gasleft()) / (CROWD / 2), 60_000, "gas for one that moves");
        assertEq(jury.placeAt(0).juror, _ofCrowd(CROWD - 1), "the last took the first");
    }

    function test_shorten_saysWhoMoves() public {
        _fillBench();
        _leave(jurors[1]);
        _waitForDraws();
        vm.expectEmit(address(jury));
        emit IJuryPoolEvents.JurorLeft(jurors[4], 4);
        vm.expectEmit(address(jury));
        emit IJuryPoolEvents.JurorJoined(jurors[4], 1);
        jury.shorten(1);
        assertTrue(jury.isJuror(jurors[4]), "it is a juror all the time");
        vm.prank(jurors[4]);
        jury.leave();
        assertEq(jury.placeAt(1).leftAt, block.timestamp, "it leaves its new place");
    }

    function testFuzz_shorten_keepsPlaces_whileTheyMayBeDrawn(uint256 waited) public {
        waited = waited % 2 == 0 ? COMMIT_TIME : bound(waited, 0, COMMIT_TIME);
        _fillBench();
        _leave(jurors[4]);
        vm.warp(block.timestamp + waited);
        vm.recordLogs();
        jury.shorten(5);
        assertEq(vm.getRecordedLogs().length, 0, "nothing happens");
        assertEq(jury.placeCount(), 5, "places");
    }

    function testFuzz_shorten_looksAtAFew(uint256 most) public {
        most = bound(most, 0, CROWD);
        _fillBench();
        _crowdIn(CROWD);
        _crowdOut(CROWD);
        _waitForDraws();
        jury.shorten(most);
        assertEq(jury.placeCount(), 5 + CROWD - most, "as many as asked for");
    }

    /// @dev Whenever a case opened, its jury is the same before and after, as long as it may be drawn.
    function testFuzz_shorten_changesNoDraw(uint256 salt, uint256 opened, uint256 gone, uint256 most) public {
        _crowdIn(5);
        _fillBench();
        for (uint256 i = 0; i < 5; ++i) {
            if (gone >> i & 1 == 1) _leave(_ofCrowd(i));
        }
        _waitForDraws();
        _leave(jurors[gone % 5]);
        uint256 openedAt = block.timestamp - bound(opened, 0, COMMIT_TIME);
        uint256 places = jury.placeCount();
        address[] memory drawn = _drawnOf(openedAt, places, salt);
        jury.shorten(bound(most, 0, 12));
        assertEq(_drawnOf(openedAt, places, salt), drawn, "as before");
        vm.warp(openedAt + COMMIT_TIME);
        jury.shorten(bound(most, 0, 12));
        _joinAs(alice);
        assertEq(_drawnOf(openedAt, places, salt), drawn, "until the last second of the draw");
    }

    /// @dev Places that were given up are given away by nobody, also when the bench has grown over them again.
    function test_join_passesPlacesThatWereGivenUp() public {
        _fillBench();
        _crowdIn(CROWD);
        _crowdOut(CROWD);
        _waitForDraws();
        jury.shorten(CROWD);
        vm.expectEmit(address(jury));
        emit IJuryPoolEvents.JurorJoined(alice, 5);
        _joinAs(alice);
        vm.expectEmit(address(jury));
        emit IJuryPoolEvents.JurorJoined(bob, 6);
        _joinAs(bob);
        _leave(alice);
        _waitForDraws();
        _joinAs(alice);
        assertEq(jury.placeAt(5).juror, alice, "the free place again");
        assertEq(jury.placeAt(6).juror, bob, "nobody sits on another");
        assertEq(jury.placeCount(), 7, "places");
    }
}
