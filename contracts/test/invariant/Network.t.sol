// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {Test} from "forge-std/Test.sol";

import {DisputeCourt} from "../../src/DisputeCourt.sol";
import {MusterToken} from "../../src/MusterToken.sol";
import {RewardEscrow} from "../../src/RewardEscrow.sol";
import {StakeVault} from "../../src/StakeVault.sol";
import {Handler} from "./Handler.sol";

/// @title What holds after any sequence of actions
contract NetworkInvariants is Test {
    Handler private _handler;
    MusterToken private _token;
    StakeVault private _vault;
    RewardEscrow private _escrow;
    DisputeCourt private _court;
    uint64 private _runId;

    function setUp() public {
        _handler = new Handler();
        (address token, address vault, address escrow, address court, uint64 runId) = _handler.network();
        (_token, _vault, _escrow, _court) =
        (MusterToken(token), StakeVault(vault), RewardEscrow(escrow), DisputeCourt(court));
        _runId = runId;

        bytes4[] memory selectors = new bytes4[](10);
        selectors[0] = Handler.deposit.selector;
        selectors[1] = Handler.requestUnbond.selector;
        selectors[2] = Handler.withdraw.selector;
        selectors[3] = Handler.unjail.selector;
        selectors[4] = Handler.post.selector;
        selectors[5] = Handler.executeFraud.selector;
        selectors[6] = Handler.finaliseFraud.selector;
        selectors[7] = Handler.challenge.selector;
        selectors[8] = Handler.voteAndClose.selector;
        selectors[9] = Handler.claim.selector;
        targetSelector(FuzzSelector({addr: address(_handler), selectors: selectors}));
        selectors = new bytes4[](1);
        selectors[0] = Handler.pass.selector;
        targetSelector(FuzzSelector({addr: address(_handler), selectors: selectors}));
        targetContract(address(_handler));
    }

    /// @dev The vault holds exactly what it owes: active + unbonding + escrowed stake.
    function invariant_vaultIsSolvent() public view {
        (uint256 active, uint256 unbonding, uint256 escrowed) = _vault.totals();
        assertEq(_token.balanceOf(address(_vault)), active + unbonding + escrowed, "balance");
    }

    /// @dev The vault's totals are the sums over its accounts and escrows.
    function invariant_totalsAreSums() public view {
        (uint256 active, uint256 unbonding, uint256 escrowed) = _vault.totals();
        (uint256 activeSum, uint256 unbondingSum) = _handler.sumOfStakes();
        assertEq(active, activeSum, "active");
        assertEq(unbonding, unbondingSum, "unbonding");
        assertEq(escrowed, _handler.sumOfEscrows(), "escrowed");
    }

    /// @dev No run pays more than it received, and the escrow holds what is left.
    function invariant_escrowIsSolvent() public view {
        (uint256 funded, uint256 paid) = _escrow.fundsOf(_runId);
        assertLe(paid, funded, "paid");
        assertEq(_token.balanceOf(address(_escrow)), funded - paid, "balance");
        assertEq(paid, _handler.paidByHand(), "what workers got");
    }

    /// @dev A slot is paid at most once, whatever batches it is in.
    function invariant_slotIsPaidOnce() public view {
        assertEq(_handler.slotsPaidTwice(), 0, "paid twice");
    }

    /// @dev Only accepted outcomes are paid.
    function invariant_onlyAcceptedIsPaid() public view {
        assertEq(_handler.paidNotAccepted(), 0, "paid");
    }

    /// @dev Only final outcomes are paid.
    function invariant_onlyFinalIsPaid() public view {
        assertEq(_handler.paidNotFinal(), 0, "paid");
    }

    /// @dev No action on one worker changes the stake of anybody else.
    function invariant_slashSparesOthers() public view {
        assertEq(_handler.otherStakesChanged(), 0, "changed");
    }

    /// @dev A worker is banned exactly while a fraud verdict against it stands.
    function invariant_bansMatchVerdicts() public view {
        assertEq(_handler.wrongBans(), 0, "wrong bans");
    }

    /// @dev No active worker holds less than the requirement.
    function invariant_activeWorkersAreStaked() public view {
        assertEq(_handler.activeBelowRequirement(), 0, "below the requirement");
    }

    /// @dev Slashed stake is released or restored, never both.
    function invariant_escrowSettlesOnce() public view {
        assertEq(_handler.settledAndRestored(), 0, "both");
    }

    /// @dev The court holds the bonds of open cases and nothing else.
    function invariant_courtHoldsOpenBonds() public view {
        assertEq(_token.balanceOf(address(_court)), _handler.sumOfBonds(), "bonds");
    }

    /// @dev Tokens leave the supply only as burned stake and burned bonds.
    function invariant_burnsAreAccountedFor() public view {
        assertEq(_token.totalSupply(), 1_000_000_000 ether - _handler.burned(), "supply");
    }

    /// @dev An invariant over states that are never reached proves nothing.
    function test_handler_reachesEveryState() public {
        for (uint256 i = 0; i < 2000; ++i) {
            _act(uint256(keccak256(abi.encode("life", i))));
        }
        bytes32[8] memory actions =
            [bytes32("executeFraud"), "finaliseFraud", "overturn", "uphold", "restore", "claim", "withdraw", "unjail"];
        for (uint256 i = 0; i < actions.length; ++i) {
            assertGt(_handler.reached(actions[i]), 0, string(abi.encodePacked(actions[i])));
        }
    }

    function _act(uint256 seed) private {
        uint256 which = seed >> 16;
        uint256 action = seed % 20;
        if (action == 0) _handler.post(which);
        else if (action <= 3) _handler.executeFraud(which);
        else if (action <= 6) _handler.challenge(which, uint8(seed >> 8));
        else if (action <= 9) _handler.voteAndClose(which, seed >> 8);
        else if (action <= 11) _handler.claim(which);
        else if (action <= 13) _handler.finaliseFraud(which);
        else if (action == 14) _handler.pass(which);
        else if (action == 15) _handler.withdraw(which);
        else if (action == 16) _handler.requestUnbond(which, which);
        else if (action == 17) _handler.deposit(which, which);
        else _handler.unjail(which);
    }
}
