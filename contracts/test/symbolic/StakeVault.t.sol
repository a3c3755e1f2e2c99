// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {Test} from "forge-std/Test.sol";

import {MusterToken} from "../../src/MusterToken.sol";
import {StakeVault} from "../../src/StakeVault.sol";
import {IContributionLedger} from "../../src/interfaces/IContributionLedger.sol";
import {IDisputeCourt} from "../../src/interfaces/IDisputeCourt.sol";
import {IStakeVault} from "../../src/interfaces/IStakeVault.sol";
import {IWorkerRegistry} from "../../src/interfaces/IWorkerRegistry.sol";

/// @dev All that the vault asks its neighbours; whoever they are, its arithmetic must hold.
contract Neighbours {
    uint256 public constant judgementTime = 1;

    function jailForLowStake(address) external {}
}

/// @dev Proven for every amount by halmos, see `make audit`. Amounts are 32 bits wide and shares are those
///      that contracts use: that much a solver decides in minutes. Splits divide what was divided already, which it
///      does not: testFuzz_release_splitsEverything and the invariants cover them.
contract StakeVaultSymbolic is Test {
    address private constant WORKER = address(0xA11CE);
    address private constant OTHER = address(0xB0B);
    address private constant INSURANCE = address(0x1275);
    uint256 private constant SUPPLY = type(uint128).max;
    uint256 private constant PPM = 1_000_000;

    MusterToken private _token;
    StakeVault private _vault;
    address private _judge;

    function setUp() public {
        Neighbours neighbours = new Neighbours();
        _judge = address(neighbours);
        _token = new MusterToken(SUPPLY, address(this));
        _vault = new StakeVault(
            _token,
            IWorkerRegistry(_judge),
            IContributionLedger(_judge),
            IDisputeCourt(_judge),
            _judge,
            INSURANCE,
            7 days,
            300_000,
            200_000,
            100 ether
        );
        _token.approve(address(_vault), type(uint256).max);
    }

    /// @dev Gives the worker active and unbonding stake, and somebody else stake of its own.
    function _give(uint32 active, uint64 unbonding, uint32 other) private {
        vm.assume(active != 0 && unbonding != 0 && other != 0);
        _vault.deposit(WORKER, uint256(active) + unbonding);
        _vault.deposit(OTHER, other);
        vm.prank(WORKER);
        _vault.requestUnbond(unbonding);
    }

    function _slash(uint256 ppm) private returns (uint256) {
        vm.prank(_judge);
        return _vault.slash(WORKER, ppm, "offence", address(0));
    }

    /// @dev A slash takes no more than there is, leaves the rest, and nothing of anybody else's.
    function _checkSlash(uint32 active, uint32 unbonding, uint32 other, uint256 ppm) private {
        _give(active, unbonding, other);
        uint256 amount = _slash(ppm);
        IStakeVault.Account memory left = _vault.accountOf(WORKER);
        assert(left.active <= active && left.unbonding <= unbonding);
        assert(uint256(left.active) + left.unbonding + amount == uint256(active) + unbonding);
        assert(_vault.escrowOf("offence").amount == amount);
        assert(_vault.activeStake(OTHER) == other);
        assert(_token.balanceOf(address(_vault)) == uint256(active) + unbonding + other);
    }

    function check_slash_ofAll(uint32 active, uint32 unbonding, uint32 other) public {
        _checkSlash(active, unbonding, other, PPM);
    }

    function check_slash_ofHalf(uint32 active, uint32 unbonding, uint32 other) public {
        _checkSlash(active, unbonding, other, 500_000);
    }

    function check_slash_ofATenth(uint32 active, uint32 unbonding, uint32 other) public {
        _checkSlash(active, unbonding, other, 100_000);
    }

    function check_slash_ofNothing(uint32 active, uint32 unbonding, uint32 other) public {
        _checkSlash(active, unbonding, other, 0);
        assert(_vault.escrowOf("offence").amount == 0);
    }

    /// @dev A restored slash leaves its owner with what it had.
    function check_restore_givesAllBack(uint32 active, uint32 unbonding) public {
        _give(active, unbonding, 1);
        _slash(500_000);
        vm.prank(_judge);
        _vault.restore("offence");
        IStakeVault.Account memory left = _vault.accountOf(WORKER);
        assert(uint256(left.active) + left.unbonding == uint256(active) + unbonding);
    }

    /// @dev Nothing is withdrawn before its time, nor while something holds it, but for the bound on holds.
    function check_withdraw_followsClockAndHolds(uint64 amount, uint64 until, uint64 at, bool caseOpen) public {
        _give(1, amount, 1);
        uint256 withdrawableAt = _vault.accountOf(WORKER).withdrawableAt;
        vm.prank(_judge);
        _vault.hold(WORKER, until);
        if (caseOpen) {
            vm.prank(_judge);
            _vault.openCase(WORKER);
        }
        vm.warp(at);
        vm.prank(WORKER);
        (bool success,) = address(_vault).call(abi.encodeCall(_vault.withdraw, ()));
        bool free = !caseOpen && at >= until;
        assert(success == (at >= withdrawableAt && (free || at >= withdrawableAt + 7 days)));
        assert(_token.balanceOf(WORKER) == (success ? amount : 0));
    }
}
