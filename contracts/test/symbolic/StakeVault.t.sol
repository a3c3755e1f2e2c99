// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {Test} from "forge-std/Test.sol";

import {MusterToken} from "../../src/MusterToken.sol";
import {StakeVault} from "../../src/StakeVault.sol";
import {IContributionLedger} from "../../src/interfaces/IContributionLedger.sol";
import {IJuryPool} from "../../src/interfaces/IJuryPool.sol";
import {IRunRegistry} from "../../src/interfaces/IRunRegistry.sol";
import {IStakeVault} from "../../src/interfaces/IStakeVault.sol";
import {IWorkerRegistry} from "../../src/interfaces/IWorkerRegistry.sol";

/// @dev All that the vault asks its neighbours; whoever they are, its arithmetic must hold.
contract Neighbours {
    uint256 public constant judgementTime = 1;

    function jailForLowStake(uint64, address) external {}

    function unseatForLowStake(uint64, address) external {}

    function retireForLowStake(address) external {}
}

/// @dev Proven for every amount by halmos, see `make audit`. Amounts are 32 bits wide and shares are those
///      that contracts use: that much a solver decides in minutes. Splits, and how much a later offence takes of what
///      comes back, divide what was divided already, which it does not decide: testFuzz_release_splitsEverything,
///      testFuzz_restore_isAsIfTheConvictionHadNeverBeen and the invariants cover them.
contract StakeVaultSymbolic is Test {
    uint64 private constant RUN = 1;
    address private constant WORKER = address(0xA11CE);
    address private constant OTHER = address(0xB0B);
    address private constant INSURANCE = address(0x1275);
    uint256 private constant SUPPLY = type(uint88).max;
    uint256 private constant PPM = 1_000_000;

    MusterToken private _token;
    StakeVault private _vault;
    address private _judge;

    function setUp() public {
        Neighbours neighbours = new Neighbours();
        _judge = address(neighbours);
        _token = new MusterToken(SUPPLY, address(this));
        StakeVault.Network memory network = StakeVault.Network({
            runs: IRunRegistry(_judge),
            workers: IWorkerRegistry(_judge),
            jurors: IJuryPool(_judge),
            ledger: IContributionLedger(_judge),
            court: _judge,
            faults: _judge
        });
        _vault = new StakeVault(_token, network, INSURANCE, 7 days, 300_000, 200_000, 100 ether);
        _token.approve(address(_vault), type(uint256).max);
    }

    /// @dev Gives the worker active and unbonding stake, itself stake in another run, and somebody else in this one.
    function _give(uint32 active, uint64 unbonding, uint32 other) private {
        vm.assume(active != 0 && unbonding != 0 && other != 0);
        _vault.deposit(RUN, WORKER, uint256(active) + unbonding);
        _vault.deposit(RUN, OTHER, other);
        _vault.deposit(RUN + 1, WORKER, other);
        vm.prank(WORKER);
        _vault.requestUnbond(RUN, unbonding);
    }

    function _fraud(uint64 tag) private pure returns (IStakeVault.Verdict memory) {
        return IStakeVault.Verdict(RUN, WORKER, IStakeVault.Offence.Fraud, tag, 7, 3);
    }

    function _amountOf(uint64 tag) private view returns (uint256) {
        return _vault.escrowOf(_vault.escrowIdOf(RUN, WORKER, IStakeVault.Offence.Fraud, tag)).amount;
    }

    function _hold(uint64 tag, uint256 ppm) private returns (uint256) {
        vm.prank(_judge);
        return _vault.hold(_fraud(tag), ppm);
    }

    function _restore(uint64 tag) private {
        vm.prank(_judge);
        _vault.restore(_fraud(tag));
    }

    function _total() private view returns (uint256) {
        IStakeVault.Account memory left = _vault.accountOf(RUN, WORKER);
        return left.active + left.unbonding;
    }

    /// @dev What is held is no more than there is, leaves the rest, and nothing of anybody else's or of other runs.
    function _checkHold(uint32 active, uint32 unbonding, uint32 other, uint256 ppm) private {
        _give(active, unbonding, other);
        uint256 amount = _hold(1, ppm);
        IStakeVault.Account memory left = _vault.accountOf(RUN, WORKER);
        assert(left.active <= active && left.unbonding <= unbonding);
        assert(left.active + left.unbonding + amount == uint256(active) + unbonding);
        assert(_amountOf(1) == amount);
        assert(_vault.activeStake(RUN, OTHER) == other);
        assert(_vault.activeStake(RUN + 1, WORKER) == other);
        assert(_token.balanceOf(address(_vault)) == uint256(active) + unbonding + 2 * uint256(other));
    }

    function check_hold_ofAll(uint32 active, uint32 unbonding, uint32 other) public {
        _checkHold(active, unbonding, other, PPM);
    }

    function check_hold_ofHalf(uint32 active, uint32 unbonding, uint32 other) public {
        _checkHold(active, unbonding, other, 500_000);
    }

    function check_hold_ofATenth(uint32 active, uint32 unbonding, uint32 other) public {
        _checkHold(active, unbonding, other, 100_000);
    }

    function check_hold_ofNothing(uint32 active, uint32 unbonding, uint32 other) public {
        _checkHold(active, unbonding, other, 0);
        assert(_amountOf(1) == 0);
    }

    /// @dev A restored escrow leaves its owner with what it had.
    function check_restore_givesAllBack(uint32 active, uint32 unbonding) public {
        _give(active, unbonding, 1);
        _hold(1, 500_000);
        _restore(1);
        assert(_total() == uint256(active) + unbonding);
    }

    /// @dev No outcome but its own gives an escrow back, and that one all of it.
    function check_restore_onlyForItsOutcome(uint32 active, uint32 unbonding, uint64 batchId, uint32 position) public {
        _give(active, unbonding, 1);
        uint256 amount = _hold(1, 500_000);
        IStakeVault.Verdict memory verdict = _fraud(1);
        (verdict.batchId, verdict.position) = (batchId, position);
        vm.prank(_judge);
        bool restored = _vault.restore(verdict);
        assert(restored == (batchId == 7 && position == 3));
        assert(_total() == uint256(active) + unbonding - (restored ? 0 : amount));
    }

    /// @dev Nothing is withdrawn before its time, and nothing else keeps it: not even an escrow that is held.
    function check_withdraw_followsTheClock(uint64 amount, uint64 at, bool held) public {
        _give(1, amount, 1);
        uint256 withdrawableAt = _vault.accountOf(RUN, WORKER).withdrawableAt;
        if (held) _hold(1, 0);
        vm.warp(at);
        vm.prank(WORKER);
        (bool success,) = address(_vault).call(abi.encodeCall(_vault.withdraw, (RUN)));
        assert(success == (at >= withdrawableAt));
        assert(_token.balanceOf(WORKER) == (success ? amount : 0));
    }
}
