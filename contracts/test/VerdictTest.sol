// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IDisputeCourt, IDisputeCourtEvents} from "../src/interfaces/IDisputeCourt.sol";
import {CourtTest} from "./CourtTest.sol";

/// @title How cases end: votes of every kind, what stands, and the money of the run that may pay for it
abstract contract VerdictTest is CourtTest {
    uint16 internal constant CUT_SHORT = 0x0217;

    /// @dev The votes of a jury, counted the slow way.
    struct Tally {
        uint16 leading;
        uint256 votes;
        /// @dev Rulings that have as many.
        uint256 holders;
    }

    function _drawAndVote(bytes32 caseId, uint16 first, uint16 second, uint16 third) internal {
        _draw(caseId);
        _voteAll(caseId, first, second, third);
    }

    /// @dev Each juror stays away, commits only, or votes one of seven rulings. All can reveal when this returns.
    function _voteBySeed(bytes32 caseId, uint256 seed, uint256 openedAt) internal returns (Tally memory tally) {
        address[] memory panel = _panel(caseId);
        uint16[7] memory choices = [UNSEEN, ACCEPT, REJECT, STATISTICAL, EXACT, NOT_SHOWN, CUT_SHORT];
        for (uint256 i = 0; i < JURY_SIZE; ++i) {
            uint256 kind = _kindOf(seed, i);
            if (kind > 0) _commitVote(caseId, panel[i], choices[kind == 1 ? 0 : kind - 2]);
        }
        vm.warp(openedAt + COMMIT_TIME);
        uint256[7] memory counts;
        for (uint256 i = 0; i < JURY_SIZE; ++i) {
            uint256 kind = _kindOf(seed, i);
            if (kind < 2) continue;
            _revealVote(caseId, panel[i], choices[kind - 2]);
            // Who was shown nothing says so in two ways.
            ++counts[choices[kind - 2] == NOT_SHOWN ? 0 : kind - 2];
        }
        for (uint256 i = 0; i < 7; ++i) {
            if (counts[i] > tally.votes) (tally.leading, tally.votes, tally.holders) = (choices[i], counts[i], 0);
            if (counts[i] == tally.votes) ++tally.holders;
        }
    }

    /// @dev What the `i`-th juror does; every second jury is of fewer minds, so that there are majorities.
    function _kindOf(uint256 seed, uint256 i) private pure returns (uint256) {
        uint256 kind = (seed >> (8 * i)) & 0xff;
        return seed >> 255 == 0 ? kind % 9 : 2 + kind % 2 * ((seed >> 128) % 7);
    }

    function _isDecided(Tally memory tally) internal pure returns (bool) {
        return tally.votes != 0 && tally.holders == 1;
    }

    function _isSeen(Tally memory tally) internal pure returns (bool) {
        return _isDecided(tally) && tally.leading != UNSEEN && tally.leading != NOT_SHOWN;
    }

    /// @dev The run's money that no batch claims.
    function _free() internal view returns (uint256) {
        return escrow.fundsOf(runId).available;
    }

    /// @dev Leaves this much of the run's money free.
    function _leaveFree(uint256 amount) internal {
        _commitRoot("all the money", 1, _free() / PRICE);
        if (amount == 0) return;
        vm.prank(stranger);
        escrow.fund(runId, amount);
    }

    function _statusOf(bool overturned) internal pure returns (IDisputeCourt.CaseStatus) {
        return overturned ? IDisputeCourt.CaseStatus.Overturned : IDisputeCourt.CaseStatus.Upheld;
    }

    function _expectClosed(bytes32 caseId, bool overturned, uint16 ruling, address reporter, uint256 fee) internal {
        vm.expectEmit(address(court));
        emit IDisputeCourtEvents.CaseClosed(caseId, _statusOf(overturned), ruling, reporter, fee);
    }
}
