// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

/// @title Errors of the jury pool
interface IJuryPoolErrors {
    /// @notice Thrown when an account that offers itself has a place already, or leaves without one.
    error PoolWrongStatus(address juror, bool seated);
    /// @notice Thrown when active stake on the bench is below the requirement.
    error PoolStakeTooLow(address juror, uint256 active, uint256 required);
    /// @notice Thrown when a juror comes back while its last place is held for it: open cases may still draw it.
    error PoolPlaceHeld(address juror, uint256 until);
}

/// @title Events of the jury pool
interface IJuryPoolEvents {
    /// @notice Emitted when an account offers itself; cases that open from now on may draw it.
    event JurorJoined(address indexed juror, uint256 place);
    /// @notice Emitted when a juror leaves, or its stake fell; cases that open from now on do not draw it.
    event JurorLeft(address indexed juror, uint256 place);
    /// @notice Emitted when empty places at the end of the bench are given up; it has this many from now on.
    event BenchShortened(uint256 places);
}

/// @title The network's bench: who offered itself to judge for any run
/// @notice Jurors stake for run 0. A jury is drawn by account, whatever the stake above the requirement, out of those who
///         were there when its case opened: nobody changes a draw by coming or going later.
interface IJuryPool is IJuryPoolErrors, IJuryPoolEvents {
    /// @notice One place of the bench. One slot.
    struct Place {
        address juror;
        /// @dev Unix seconds; drawn in cases that open later than this.
        uint40 joinedAt;
        /// @dev Unix seconds; drawn in cases that opened no later. Zero while it stays.
        uint40 leftAt;
    }

    /// @notice Offers the caller as a juror, and adds `stake` of its tokens, which StakeVault must be allowed to take.
    function join(uint256 stake) external;

    /// @notice Ends the caller's offer and unbonds all its stake. Cases that are open may still draw it, and it must vote.
    function leave() external;

    /// @notice Ends the offer of a juror whose active stake is below the requirement; does nothing for anybody else.
    function retireForLowStake(address juror) external;

    /// @notice Makes the bench shorter: gives up the places at its end that nobody holds and no open case draws, then moves
    ///         jurors from its end into places that were left. Looks at `most` places for each, from the end. Anyone.
    /// @dev A moved juror leaves one place and joins the other in the same second, so that no draw changes. Its old place can
    ///      be given up `drawTime` later, by another call.
    function shorten(uint256 most) external;

    /// @notice Returns up to `size` different jurors, drawn by `seed` among the first `places` places, of those who were
    ///         there at `openedAt` and are none of `excluded`. Places that were given up since are skipped.
    /// @dev Place `keccak256(abi.encode(seed, i)) % places` for i = 0, 1, …; at most 512 tries.
    ///      `muster.protocol.jury` is the Python twin.
    function draw(bytes32 seed, uint256 places, uint256 openedAt, uint256 size, address[] calldata excluded)
        external
        view
        returns (address[] memory drawn);

    /// @notice Returns whether an account may be drawn for a case that opens now or later.
    function isJuror(address account) external view returns (bool);

    /// @notice Returns whether an account is a juror, or left since `openedAt`: a case that opened then may draw it.
    function mayBeDrawn(address account, uint256 openedAt) external view returns (bool);

    /// @notice Returns a place; its juror is the last that held it.
    function placeAt(uint256 place) external view returns (Place memory);

    /// @notice Returns the number of places, those that were left among them.
    function placeCount() external view returns (uint256);

    /// @notice Returns the active stake a juror must hold, in token wei.
    function requiredStake() external view returns (uint256);
}
