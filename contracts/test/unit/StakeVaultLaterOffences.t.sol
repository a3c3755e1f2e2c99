// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IStakeVault} from "../../src/interfaces/IStakeVault.sol";
import {VaultTest} from "../VaultTest.sol";

/// @title An overturned conviction leaves no trace: what it took, later offences take their shares of
/// @dev Alice is punished for everything. Bob is her twin, who did the same but for what is overturned. In whatever
///      order their escrows are settled, both end up with the same stake, and the same was taken for each offence that
///      stands.
contract StakeVaultLaterOffencesTest is VaultTest {
    uint256 private constant OFFENCES = 6;

    /// @dev Each offence rounds up twice, and once more for each overturned escrow that it takes a share of.
    uint256 private constant ROUNDING = OFFENCES * (OFFENCES + 2);

    struct Story {
        uint256 seed;
        uint256 draws;
        uint256 deposited;
        /// @dev What the next offence is: the number of those before.
        uint64 offences;
        /// @dev A bit for each offence.
        uint256 held;
        uint256 wrong;
        uint256 standing;
    }

    /// @dev A number below `limit` that follows from the story's seed.
    function _pick(Story memory story, uint256 limit) private pure returns (uint256) {
        return uint256(keccak256(abi.encode(story.seed, story.draws++))) % limit;
    }

    function _pickStake(Story memory story) private pure returns (uint256) {
        return 1 + _pick(story, WALLET / 32);
    }

    function _pickPpm(Story memory story) private pure returns (uint256) {
        uint256 kind = _pick(story, 8);
        if (kind == 0) return 0;
        if (kind == 1) return _pick(story, PPM + 1);
        return kind == 2 ? PPM : _pick(story, PPM / 2);
    }

    // -------------------------------------------------------------------- events

    function _depositBoth(Story memory story) private {
        uint256 amount = _pickStake(story);
        _deposit(runId, alice, amount);
        _deposit(runId, bob, amount);
        story.deposited += amount;
    }

    /// @dev A part of the active stake leaves; it stays slashable, so this must not matter.
    function _unbondBoth(Story memory story) private {
        uint256 percent = 1 + _pick(story, 100);
        _unbondPart(alice, percent);
        _unbondPart(bob, percent);
    }

    function _unbondPart(address account, uint256 percent) private {
        uint256 amount = vault.activeStake(runId, account) * percent / 100;
        if (amount == 0) return;
        vm.prank(account);
        vault.requestUnbond(runId, amount);
    }

    /// @dev Three of four are frauds, of which a half will be overturned; the others are proven faults.
    function _offend(Story memory story) private {
        uint64 tag = story.offences++;
        uint256 ppm = _pickPpm(story);
        if (_pick(story, 4) == 0) {
            _slash(alice, tag, ppm, address(0));
            _slash(bob, tag, ppm, address(0));
            return;
        }
        story.held |= 1 << tag;
        _hold(alice, tag, ppm);
        if (_pick(story, 2) == 0) {
            story.wrong |= 1 << tag;
        } else {
            story.standing |= 1 << tag;
            _hold(bob, tag, ppm);
        }
    }

    /// @dev Settles one of the escrows that are held, any of them.
    function _settleOne(Story memory story) private {
        uint64 tag = uint64(_pick(story, OFFENCES));
        while (story.held >> tag & 1 == 0) tag = uint64((tag + 1) % OFFENCES);
        story.held &= ~(uint256(1) << tag);
        if (story.wrong >> tag & 1 != 0) {
            assertTrue(_restore(alice, tag), "restored");
        } else {
            _release(alice, tag, address(0));
            _release(bob, tag, address(0));
        }
    }

    function _tell(Story memory story) private {
        _depositBoth(story);
        while (story.offences < OFFENCES) {
            uint256 what = _pick(story, 8);
            if (what == 0) _depositBoth(story);
            else if (what == 1) _unbondBoth(story);
            else if (what < 4 && story.held != 0) _settleOne(story);
            else _offend(story);
            // A deposit takes two draws: no more than 32 fit a wallet.
            if (story.draws > 60) break;
        }
        while (story.held != 0) _settleOne(story);
    }

    // ------------------------------------------------------------------ the end

    function testFuzz_restore_isAsIfTheConvictionHadNeverBeen(uint256 seed) public {
        Story memory story;
        story.seed = seed;
        _tell(story);
        assertApproxEqAbs(_total(alice), _total(bob), ROUNDING, "stake");
        for (uint64 tag = 0; tag < story.offences; ++tag) {
            bool isFault = (story.wrong | story.standing) >> tag & 1 == 0;
            if (isFault) _assertSame(_faultId(alice, tag), _faultId(bob, tag));
            else if (story.wrong >> tag & 1 == 0) _assertSame(_fraudId(alice, tag), _fraudId(bob, tag));
        }
        assertEq(_heldOf(alice) + _heldOf(bob), 0, "nothing is held");
    }

    function _assertSame(bytes32 hers, bytes32 his) private view {
        IStakeVault.Escrow memory escrow = vault.escrowOf(hers);
        IStakeVault.Escrow memory twin = vault.escrowOf(his);
        assertApproxEqAbs(escrow.amount, twin.amount, ROUNDING, "taken for one offence");
        assertEq(uint8(escrow.status), uint8(twin.status), "status");
    }

    /// @dev What nobody has as stake any more was burned or insured.
    function testFuzz_restore_losesAndMakesNothing(uint256 seed) public {
        uint256 others = token.balanceOf(address(vault));
        uint256 supply = token.totalSupply();
        Story memory story;
        story.seed = seed;
        _tell(story);
        uint256 stake = _total(alice) + _total(bob);
        assertEq(token.balanceOf(address(vault)), others + stake, "the vault holds what is staked");
        uint256 split = token.balanceOf(insurance) + supply - token.totalSupply();
        assertEq(stake + split, 2 * story.deposited, "stake, insurance and burns are all that was deposited");
    }

    /// @dev Three frauds, each overturned or not, settled in each of the six orders.
    function test_restore_isAsIfTheConvictionHadNeverBeen_inEveryOrder() public {
        uint64[3][6] memory orders = [
            [uint64(0), 1, 2],
            [uint64(0), 2, 1],
            [uint64(1), 0, 2],
            [uint64(1), 2, 0],
            [uint64(2), 0, 1],
            [uint64(2), 1, 0]
        ];
        uint256 start = vm.snapshotState();
        for (uint256 wrong = 0; wrong < 8; ++wrong) {
            for (uint256 i = 0; i < 6; ++i) {
                _settleInOrder(wrong, orders[i]);
                vm.revertToState(start);
            }
        }
    }

    function _settleInOrder(uint256 wrong, uint64[3] memory order) private {
        uint32[3] memory shares = [uint32(500_000), 200_000, 750_000];
        uint256 expected = 1000 ether;
        _give(alice, 600 ether, 400 ether);
        for (uint64 tag = 0; tag < 3; ++tag) {
            _hold(alice, tag, shares[tag]);
            if (wrong >> tag & 1 == 0) expected -= expected * shares[tag] / PPM;
        }
        for (uint256 i = 0; i < 3; ++i) {
            if (wrong >> order[i] & 1 == 0) _release(alice, order[i], address(0));
            else _restore(alice, order[i]);
        }
        assertEq(_total(alice), expected, "what the frauds that stand left");
    }
}
