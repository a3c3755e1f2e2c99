// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {SafeCast} from "@openzeppelin/contracts/utils/math/SafeCast.sol";

import {IJuryPool} from "./interfaces/IJuryPool.sol";
import {IStakeVault} from "./interfaces/IStakeVault.sol";

/// @title The network's bench: who offered itself to judge for any run
contract JuryPool is IJuryPool {
    using SafeCast for uint256;

    /// @dev The run that jurors stake for.
    uint64 private constant BENCH = 0;

    /// @dev Places that a draw looks at. Where one juror in four may sit, all tries miss them with probability 0.75^512,
    ///      below 10^-63.
    uint256 private constant MAX_TRIES = 512;

    /// @dev Entries about places that were given up since, which one search for a free place passes.
    uint256 private constant MAX_PASSED = 16;

    /// @notice The vault that holds the jurors' stake.
    IStakeVault public immutable vault;

    uint256 private immutable _requiredJurorStake;

    /// @notice Seconds after which no open case draws a juror that left.
    uint256 public immutable drawTime;

    Place[] private _places;
    /// @dev A juror's place, counted from 1; zero when it holds none.
    mapping(address juror => uint256) private _placeOf;
    /// @dev Unix seconds at which a juror last left.
    mapping(address juror => uint256) private _lastLeft;
    /// @dev Places of jurors that left, oldest first, and how many of them were given away again, or given up.
    uint256[] private _left;
    uint256 private _reused;

    /// @param vault_ StakeVault, by its predicted address.
    /// @param requiredStake_ Active stake a juror must hold, in token wei.
    /// @param drawTime_ Seconds after the opening of a case in which its jury is drawn.
    constructor(IStakeVault vault_, uint256 requiredStake_, uint256 drawTime_) {
        vault = vault_;
        _requiredJurorStake = requiredStake_;
        drawTime = drawTime_;
    }

    // -------------------------------------------------------------- join, leave

    /// @inheritdoc IJuryPool
    function join(uint256 stake) external {
        require(_placeOf[msg.sender] == 0, PoolWrongStatus(msg.sender, true));
        // Else one stake could come and go until the bench is full of places that nobody holds.
        uint256 heldUntil = _lastLeft[msg.sender] + drawTime;
        require(_lastLeft[msg.sender] == 0 || block.timestamp > heldUntil, PoolPlaceHeld(msg.sender, heldUntil));
        (bool found, uint256 place) = _findFree();
        if (found) {
            delete _left[_reused++];
        } else {
            place = _places.length;
            _places.push();
        }
        _seat(msg.sender, place);
        if (stake != 0) vault.depositFrom(BENCH, msg.sender, stake);
        uint256 active = vault.activeStake(BENCH, msg.sender);
        require(active >= _requiredJurorStake, PoolStakeTooLow(msg.sender, active, _requiredJurorStake));
    }

    function _seat(address juror, uint256 place) private {
        _places[place] = Place({juror: juror, joinedAt: block.timestamp.toUint40(), leftAt: 0});
        _placeOf[juror] = place + 1;
        emit JurorJoined(juror, place);
    }

    /// @dev Returns the place that was left the longest ago, if no open case can still draw who held it. It is the first of
    ///      `_left` then.
    function _findFree() private returns (bool found, uint256 place) {
        for (uint256 i = 0; i < MAX_PASSED && _reused < _left.length; ++i) {
            place = _left[_reused];
            // A place that was given up may have come back, with somebody in it.
            if (place < _places.length && _places[place].leftAt != 0) return (_isFree(place), place);
            delete _left[_reused++];
        }
    }

    /// @dev Returns whether nobody holds a place, and no open case can still draw who did.
    function _isFree(uint256 place) private view returns (bool) {
        uint256 leftAt = _places[place].leftAt;
        return leftAt != 0 && block.timestamp > leftAt + drawTime;
    }

    /// @inheritdoc IJuryPool
    function leave() external {
        require(_placeOf[msg.sender] != 0, PoolWrongStatus(msg.sender, false));
        _retire(msg.sender);
        vault.requestUnbondFor(BENCH, msg.sender);
    }

    /// @inheritdoc IJuryPool
    function retireForLowStake(address juror) external {
        if (_placeOf[juror] == 0 || vault.activeStake(BENCH, juror) >= _requiredJurorStake) return;
        _retire(juror);
    }

    function _retire(address juror) private {
        _vacate(juror);
        _placeOf[juror] = 0;
        _lastLeft[juror] = block.timestamp;
    }

    function _vacate(address juror) private {
        uint256 place = _placeOf[juror] - 1;
        _places[place].leftAt = block.timestamp.toUint40();
        _left.push(place);
        emit JurorLeft(juror, place);
    }

    // ------------------------------------------------------------------ shorten

    /// @inheritdoc IJuryPool
    function shorten(uint256 most) external {
        uint256 length = _places.length;
        bool isShorter = false;
        for (uint256 i = 0; i < most && length != 0 && _isFree(length - 1); ++i) {
            _places.pop();
            --length;
            isShorter = true;
        }
        if (isShorter) emit BenchShortened(length);
        for (uint256 i = 0; i < most && i < length; ++i) {
            Place memory last = _places[length - 1 - i];
            if (last.leftAt != 0) continue;
            (bool found, uint256 free) = _findFree();
            if (!found || free >= length - 1 - i) return;
            delete _left[_reused++];
            _vacate(last.juror);
            _seat(last.juror, free);
        }
    }

    // --------------------------------------------------------------------- draw

    /// @inheritdoc IJuryPool
    function draw(bytes32 seed, uint256 places, uint256 openedAt, uint256 size, address[] calldata excluded)
        external
        view
        returns (address[] memory drawn)
    {
        drawn = new address[](size);
        uint256 found;
        uint256 tries = places == 0 ? 0 : MAX_TRIES;
        for (uint256 i = 0; i < tries && found < size; ++i) {
            uint256 number = uint256(keccak256(abi.encode(seed, i))) % places;
            if (number >= _places.length) continue;
            Place memory place = _places[number];
            if (place.joinedAt >= openedAt || (place.leftAt != 0 && place.leftAt < openedAt)) continue;
            if (_contains(drawn, found, place.juror) || _isExcluded(excluded, place.juror)) continue;
            drawn[found++] = place.juror;
        }
        assembly ("memory-safe") {
            mstore(drawn, found)
        }
    }

    function _contains(address[] memory accounts, uint256 length, address account) private pure returns (bool) {
        for (uint256 i = 0; i < length; ++i) {
            if (accounts[i] == account) return true;
        }
        return false;
    }

    function _isExcluded(address[] calldata accounts, address account) private pure returns (bool) {
        for (uint256 i = 0; i < accounts.length; ++i) {
            if (accounts[i] == account) return true;
        }
        return false;
    }

    // -------------------------------------------------------------------- views

    /// @inheritdoc IJuryPool
    function isJuror(address account) external view returns (bool) {
        return _placeOf[account] != 0;
    }

    /// @inheritdoc IJuryPool
    function mayBeDrawn(address account, uint256 openedAt) external view returns (bool) {
        return _placeOf[account] != 0 || _lastLeft[account] >= openedAt;
    }

    /// @inheritdoc IJuryPool
    function placeAt(uint256 place) external view returns (Place memory) {
        return _places[place];
    }

    /// @inheritdoc IJuryPool
    function requiredStake() external view returns (uint256) {
        return _requiredJurorStake;
    }

    /// @inheritdoc IJuryPool
    function placeCount() external view returns (uint256) {
        return _places.length;
    }
}
