// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IJuryPool} from "../../src/interfaces/IJuryPool.sol";
import {IStakeVault} from "../../src/interfaces/IStakeVault.sol";
import {BaseTest} from "../BaseTest.sol";

/// @title Who is drawn out of the bench
contract JuryDrawTest is BaseTest {
    uint64 private constant BENCH = 0;
    uint256 private constant TRIES = 512;
    uint256 private constant DRAWS = 400;

    /// @dev When the case opens, and how many places the bench has then.
    uint256 private _openedAt;
    uint256 private _places;

    /// @dev Five jurors, who joined a second ago.
    function setUp() public override {
        super.setUp();
        _fillBench();
        (_openedAt, _places) = (block.timestamp, 5);
    }

    function _nobody() private pure returns (address[] memory) {}

    function _only(address account) private pure returns (address[] memory accounts) {
        accounts = new address[](1);
        accounts[0] = account;
    }

    function _drawOf(bytes32 seed, uint256 size, address[] memory excluded) private view returns (address[] memory) {
        return jury.draw(seed, _places, _openedAt, size, excluded);
    }

    function _contains(address[] memory accounts, address account) private pure returns (bool) {
        for (uint256 i = 0; i < accounts.length; ++i) {
            if (accounts[i] == account) return true;
        }
        return false;
    }

    function _joinAs(address account) private {
        vm.prank(account);
        jury.join(REQUIRED_JUROR_STAKE);
    }

    function _leave(address account) private {
        vm.prank(account);
        jury.leave();
    }

    // -------------------------------------------------------------- a definition

    /// @dev The interface's words, the slow way: tries, of which those count that name somebody new who may judge.
    function _expected(bytes32 seed, uint256 places, uint256 openedAt, uint256 size, address[] memory excluded)
        private
        view
        returns (address[] memory drawn)
    {
        for (uint256 i = 0; i < TRIES && drawn.length < size; ++i) {
            IJuryPool.Place memory place = jury.placeAt(uint256(keccak256(abi.encode(seed, i))) % places);
            bool wasThere = place.joinedAt < openedAt && (place.leftAt == 0 || place.leftAt >= openedAt);
            if (!wasThere || _contains(drawn, place.juror) || _contains(excluded, place.juror)) continue;
            drawn = _append(drawn, place.juror);
        }
    }

    function _append(address[] memory accounts, address account) private pure returns (address[] memory longer) {
        longer = new address[](accounts.length + 1);
        for (uint256 i = 0; i < accounts.length; ++i) {
            longer[i] = accounts[i];
        }
        longer[accounts.length] = account;
    }

    function testFuzz_draw_followsItsDefinition(bytes32 seed, uint256 size, uint256 gone, uint256 excluded) public {
        size = bound(size, 0, 8);
        _leave(jurors[gone % 5]);
        vm.warp(block.timestamp + 1);
        _joinAs(alice);
        vm.warp(block.timestamp + 1);
        address[] memory out = _only(jurors[excluded % 5]);
        assertEq(
            jury.draw(seed, 6, block.timestamp, size, out),
            _expected(seed, 6, block.timestamp, size, out),
            "as the interface says"
        );
    }

    function testFuzz_draw_isTheSameForTheSameSeed(bytes32 seed, address caller, uint256 later) public {
        address[] memory drawn = _drawOf(seed, 3, _nobody());
        vm.warp(block.timestamp + bound(later, 0, 365 days));
        vm.roll(block.number + bound(later, 0, 1_000_000));
        vm.prank(caller);
        assertEq(_drawOf(seed, 3, _nobody()), drawn, "whoever asks, and whenever");
    }

    function test_draw_differsWithTheSeed() public view {
        uint256 changed;
        address[] memory first = _drawOf("seed", 3, _nobody());
        for (uint256 i = 0; i < 20; ++i) {
            address[] memory other = _drawOf(keccak256(abi.encode(i)), 3, _nobody());
            if (keccak256(abi.encode(first)) != keccak256(abi.encode(other))) ++changed;
        }
        assertGt(changed, 10, "sixty ordered juries");
    }

    /// @dev A smaller jury is the beginning of a larger one.
    function testFuzz_draw_extends(bytes32 seed, uint256 size) public view {
        size = bound(size, 0, 4);
        address[] memory few = _drawOf(seed, size, _nobody());
        address[] memory more = _drawOf(seed, size + 1, _nobody());
        assertEq(more.length, size + 1, "one more");
        for (uint256 i = 0; i < size; ++i) {
            assertEq(more[i], few[i], "the same");
        }
    }

    // --------------------------------------------------------------------- bounds

    function testFuzz_draw_returnsDifferentJurors(bytes32 seed, uint256 size) public view {
        size = bound(size, 0, 5);
        address[] memory drawn = _drawOf(seed, size, _nobody());
        assertEq(drawn.length, size, "as many as asked for");
        for (uint256 i = 0; i < drawn.length; ++i) {
            assertTrue(jury.isJuror(drawn[i]), "a juror");
            for (uint256 j = 0; j < i; ++j) {
                assertTrue(drawn[i] != drawn[j], "different");
            }
        }
    }

    function testFuzz_draw_returnsAll_whenMoreAreAskedFor(bytes32 seed, uint256 size) public view {
        size = bound(size, 5, 64);
        address[] memory drawn = _drawOf(seed, size, _nobody());
        assertEq(drawn.length, 5, "as many as there are");
        for (uint256 i = 0; i < 5; ++i) {
            assertTrue(_contains(drawn, jurors[i]), "each of them");
        }
    }

    function testFuzz_draw_findsTheLast_whenAQuarterIsThere(bytes32 seed) public {
        for (uint256 i = 0; i < 15; ++i) {
            address passing = makeAddr(string.concat("passing ", vm.toString(i)));
            _enrich(passing);
            _joinAs(passing);
            _leave(passing);
        }
        vm.warp(block.timestamp + 1);
        assertEq(jury.placeCount(), 20, "places");
        assertEq(jury.draw(seed, 20, block.timestamp, 5, _nobody()).length, 5, "all five");
    }

    function testFuzz_draw_isEmpty_withoutPlaces(bytes32 seed, uint256 size) public view {
        assertEq(jury.draw(seed, 0, _openedAt, bound(size, 0, 64), _nobody()).length, 0, "nobody");
    }

    function testFuzz_draw_looksAtTheFirstPlacesOnly(bytes32 seed, uint256 places) public view {
        places = bound(places, 1, 5);
        address[] memory drawn = jury.draw(seed, places, _openedAt, 5, _nobody());
        assertEq(drawn.length, places, "as many as there are");
        for (uint256 i = 0; i < places; ++i) {
            assertTrue(_contains(drawn, jurors[i]), "the first ones");
        }
    }

    function testFuzz_draw_passesPlacesThatWereGivenUp(bytes32 seed) public view {
        // The first try of this seed names the sixth place of six.
        while (uint256(keccak256(abi.encode(seed, uint256(0)))) % 6 != 5) seed = keccak256(abi.encode(seed));
        assertEq(jury.draw(seed, 6, _openedAt, 1, _nobody()).length, 1, "the next try counts");
    }

    // ------------------------------------------------------------------- excluded

    function testFuzz_draw_leavesOutTheExcluded(bytes32 seed, uint256 mask) public view {
        address[] memory excluded;
        for (uint256 i = 0; i < 5; ++i) {
            if (mask >> i & 1 == 1) excluded = _append(excluded, jurors[i]);
        }
        address[] memory drawn = _drawOf(seed, 5, excluded);
        assertEq(drawn.length, 5 - excluded.length, "all others");
        for (uint256 i = 0; i < drawn.length; ++i) {
            assertFalse(_contains(excluded, drawn[i]), "none of them");
        }
    }

    /// @dev Whoever is excluded only leaves; the others come in the order they had.
    function testFuzz_draw_keepsTheOrderOfOthers(bytes32 seed, uint256 who) public view {
        address excluded = jurors[who % 5];
        address[] memory all = _drawOf(seed, 5, _nobody());
        address[] memory others = _drawOf(seed, 5, _only(excluded));
        uint256 found;
        for (uint256 i = 0; i < 5; ++i) {
            if (all[i] != excluded) assertEq(others[found++], all[i], "in the same order");
        }
    }

    function testFuzz_draw_ignoresExcludedStrangers(bytes32 seed, address account) public view {
        vm.assume(!jury.isJuror(account));
        assertEq(_drawOf(seed, 3, _only(account)), _drawOf(seed, 3, _nobody()), "the same");
    }

    // -------------------------------------------------------------------- when

    /// @dev A case draws who was there before its second began.
    function testFuzz_draw_leavesOutWhoJoinedInItsSecondOrLater(bytes32 seed, uint256 later) public {
        // Often in the same second.
        later = later % 2 == 0 ? 0 : bound(later, 0, 30 days);
        vm.warp(_openedAt + later);
        _joinAs(alice);
        assertFalse(_contains(jury.draw(seed, 6, _openedAt, 6, _nobody()), alice), "too late");
    }

    function testFuzz_draw_takesWhoJoinedASecondBefore(bytes32 seed, uint256 waited) public {
        // Often one second.
        waited = waited % 2 == 0 ? 1 : bound(waited, 1, 30 days);
        _joinAs(alice);
        assertTrue(_contains(jury.draw(seed, 6, block.timestamp + waited, 6, _nobody()), alice), "in time");
    }

    /// @dev Who leaves when a case has opened, if only in the same block, must still judge it.
    function testFuzz_draw_takesWhoLeavesInItsSecondOrLater(bytes32 seed, uint256 later) public {
        // Often in the same second.
        later = later % 2 == 0 ? 0 : bound(later, 0, 30 days);
        vm.warp(_openedAt + later);
        _leave(jurors[0]);
        assertTrue(_contains(_drawOf(seed, 5, _nobody()), jurors[0]), "still drawn");
    }

    function testFuzz_draw_leavesOutWhoLeftASecondBefore(bytes32 seed, uint256 waited) public {
        // Often one second.
        waited = waited % 2 == 0 ? 1 : bound(waited, 1, 30 days);
        _leave(jurors[0]);
        address[] memory drawn = jury.draw(seed, 5, block.timestamp + waited, 5, _nobody());
        assertEq(drawn.length, 4, "the others");
        assertFalse(_contains(drawn, jurors[0]), "gone");
    }

    /// @dev Whoever left and came back to another place is one account nevertheless.
    function testFuzz_draw_takesWhoComesBack_once(bytes32 seed, uint256 waited) public {
        _leave(jurors[0]);
        vm.warp(_openedAt + COMMIT_TIME + 1);
        _joinAs(alice);
        _joinAs(jurors[0]);
        address[] memory drawn = jury.draw(seed, 6, block.timestamp + bound(waited, 1, 30 days), 6, _nobody());
        assertEq(drawn.length, 6, "six accounts");
        assertTrue(_contains(drawn, jurors[0]), "this one among them");
    }

    // ------------------------------------------------------------------ the freeze

    /// @dev Whatever happens on the bench while a jury may be drawn, the draw is what it was when the case opened.
    function testFuzz_draw_isFrozenWhenItsCaseOpens(bytes32 seed, uint256 life, uint256 excluded) public {
        address[] memory out = _only(jurors[excluded % 5]);
        // Some places were left long before, so that they are given away again while the case is open.
        _leave(jurors[life % 5]);
        vm.warp(block.timestamp + COMMIT_TIME / 2);
        _leave(jurors[(life % 5 + 1) % 5]);
        vm.warp(block.timestamp + COMMIT_TIME / 2 + 2);
        (_openedAt, _places) = (block.timestamp, jury.placeCount());
        address[] memory drawn = _drawOf(seed, 3, out);
        for (uint256 i = 0; i < 16; ++i) {
            life = uint256(keccak256(abi.encode(life)));
            vm.warp(_between(block.timestamp, _openedAt + COMMIT_TIME, life >> 128));
            _live(life);
            assertEq(_drawOf(seed, 3, out), drawn, "the same jury");
        }
        for (uint256 i = 0; i < drawn.length; ++i) {
            assertTrue(jury.mayBeDrawn(drawn[i], _openedAt), "whoever is drawn may be");
        }
    }

    /// @dev A time between two, which is often the earlier one and seldom near the later.
    function _between(uint256 earliest, uint256 latest, uint256 random) private pure returns (uint256) {
        return random % 3 == 0 ? earliest : earliest + random % ((latest - earliest) / 4 + 1);
    }

    /// @dev Somebody joins, leaves, has its stake slashed, or adds to it.
    function _live(uint256 random) private {
        address[8] memory accounts = [jurors[0], jurors[1], jurors[2], jurors[3], jurors[4], alice, bob, stranger];
        address account = accounts[random % 8];
        uint256 what = (random >> 8) % 4;
        if (what == 0) {
            _deposit(BENCH, account, 1 ether);
        } else if (!jury.isJuror(account)) {
            // Unless it left a moment ago.
            if (!jury.mayBeDrawn(account, block.timestamp - COMMIT_TIME)) _joinAs(account);
        } else if (what == 1) {
            vm.prank(address(court));
            vault.slash(BENCH, account, IStakeVault.Offence.AbsentJuror, uint64(random), PPM / 2, address(0));
        } else {
            _leave(account);
        }
    }

    /// @dev Later a place is another's; no case that is so old draws any more.
    function test_draw_forgetsWhoLeft_whenItsPlaceIsGivenAway() public {
        _leave(jurors[0]);
        vm.warp(_openedAt + COMMIT_TIME + 1);
        assertEq(_drawOf("seed", 5, _nobody()).length, 5, "still known");
        _joinAs(alice);
        assertEq(_drawOf("seed", 5, _nobody()).length, 4, "forgotten, and not replaced");
    }

    // --------------------------------------------------------------- distribution

    /// @dev Each of five is drawn first as often. 400 draws have a standard deviation of 8; six of them happen by
    ///      chance once in 500 million.
    /// forge-config: default.fuzz.runs = 8
    function testFuzz_draw_isFair(uint256 seed) public view {
        uint256[5] memory first = _firstOf(seed);
        for (uint256 i = 0; i < 5; ++i) {
            assertApproxEqAbs(first[i], DRAWS / 5, 48, "drawn first");
        }
    }

    /// @dev Stake above the requirement buys nothing.
    /// forge-config: default.fuzz.runs = 8
    function testFuzz_draw_ignoresStakeAboveTheRequirement(uint256 seed, uint256 amount) public {
        uint256[5] memory before = _firstOf(seed);
        _deposit(BENCH, jurors[0], bound(amount, 1, WALLET - REQUIRED_JUROR_STAKE));
        assertEq(abi.encode(_firstOf(seed)), abi.encode(before), "the same draws");
    }

    /// @dev How often each juror is drawn alone.
    function _firstOf(uint256 seed) private view returns (uint256[5] memory first) {
        for (uint256 i = 0; i < DRAWS; ++i) {
            address drawn = _drawOf(keccak256(abi.encode(seed, i)), 1, _nobody())[0];
            for (uint256 j = 0; j < 5; ++j) {
                if (jurors[j] == drawn) ++first[j];
            }
        }
    }
}
