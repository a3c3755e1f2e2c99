// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IERC20Errors} from "@openzeppelin/contracts/interfaces/draft-IERC6093.sol";
import {ERC20Permit} from "@openzeppelin/contracts/token/ERC20/extensions/ERC20Permit.sol";

import {MusterToken} from "../../src/MusterToken.sol";
import {IMusterToken} from "../../src/interfaces/IMusterToken.sol";
import {BaseTest} from "../BaseTest.sol";

/// @title The token: a fixed supply, burns, permits, and a faucet for development
contract MusterTokenTest is BaseTest {
    // ------------------------------------------------------------------- faucet

    function testFuzz_faucet_reverts_onOtherChains(uint64 chainId, uint256 amount) public {
        vm.assume(chainId != 31337 && chainId != 0);
        vm.chainId(chainId);
        vm.expectRevert(abi.encodeWithSelector(IMusterToken.TokenNoFaucet.selector, chainId));
        token.faucet(alice, amount);
    }

    function testFuzz_faucet_reverts_aboveCap(uint256 amount) public {
        uint256 cap = token.FAUCET_CAP();
        amount = bound(amount, cap + 1, type(uint256).max);
        vm.expectRevert(abi.encodeWithSelector(IMusterToken.TokenFaucetCap.selector, amount, cap));
        token.faucet(alice, amount);
    }

    function testFuzz_faucet_mints(address to, uint256 amount) public {
        vm.assume(to != address(0));
        amount = bound(amount, 0, token.FAUCET_CAP());
        uint256 before = token.balanceOf(to);
        token.faucet(to, amount);
        assertEq(token.balanceOf(to), before + amount, "receiver");
        assertEq(token.totalSupply(), SUPPLY + amount, "supply");
    }

    // --------------------------------------------------------------------- burn

    function testFuzz_burn_reverts_aboveBalance(uint256 amount) public {
        amount = bound(amount, WALLET + 1, type(uint256).max);
        vm.expectRevert(abi.encodeWithSelector(IERC20Errors.ERC20InsufficientBalance.selector, alice, WALLET, amount));
        vm.prank(alice);
        token.burn(amount);
    }

    function testFuzz_burn_destroys(uint256 amount) public {
        amount = bound(amount, 0, WALLET);
        vm.prank(alice);
        token.burn(amount);
        assertEq(token.balanceOf(alice), WALLET - amount, "holder");
        assertEq(token.totalSupply(), SUPPLY - amount, "supply");
    }

    // ------------------------------------------------------------------- permit

    function testFuzz_permit_reverts_whenSignedByAnother(uint256 value) public {
        (uint8 v, bytes32 r, bytes32 s) = _signPermit(alice, bobKey, address(vault), value, block.timestamp);
        vm.expectPartialRevert(ERC20Permit.ERC2612InvalidSigner.selector);
        token.permit(alice, address(vault), value, block.timestamp, v, r, s);
    }

    function testFuzz_permit_reverts_whenLate(uint256 value, uint256 late) public {
        uint256 deadline = block.timestamp;
        (uint8 v, bytes32 r, bytes32 s) = _signPermit(alice, aliceKey, stranger, value, deadline);
        vm.warp(deadline + bound(late, 1, 365 days));
        vm.expectRevert(abi.encodeWithSelector(ERC20Permit.ERC2612ExpiredSignature.selector, deadline));
        token.permit(alice, stranger, value, deadline, v, r, s);
    }

    function testFuzz_permit_reverts_twice(uint256 value) public {
        (uint8 v, bytes32 r, bytes32 s) = _signPermit(alice, aliceKey, stranger, value, block.timestamp);
        token.permit(alice, stranger, value, block.timestamp, v, r, s);
        vm.expectPartialRevert(ERC20Permit.ERC2612InvalidSigner.selector);
        token.permit(alice, stranger, value, block.timestamp, v, r, s);
    }

    function testFuzz_permit_allows(uint256 value) public {
        (uint8 v, bytes32 r, bytes32 s) = _signPermit(alice, aliceKey, stranger, value, block.timestamp);
        token.permit(alice, stranger, value, block.timestamp, v, r, s);
        assertEq(token.allowance(alice, stranger), value, "allowance");
        assertEq(token.nonces(alice), 1, "nonce");
    }

    // -------------------------------------------------------------- construction

    function test_constructor_reverts_withoutOwner() public {
        vm.expectRevert(abi.encodeWithSelector(IERC20Errors.ERC20InvalidReceiver.selector, address(0)));
        new MusterToken(SUPPLY, address(0));
    }

    function testFuzz_constructor_reverts_whenAnAccountCouldOutgrowTheVault(uint256 supply) public {
        uint256 cap = type(uint88).max;
        supply = bound(supply, cap + 1, type(uint256).max);
        vm.expectRevert(abi.encodeWithSelector(IMusterToken.TokenSupplyTooLarge.selector, supply, cap));
        new MusterToken(supply, owner);
    }

    function test_constructor_mintsTheLargestSupply() public {
        MusterToken other = new MusterToken(type(uint88).max, owner);
        assertEq(other.totalSupply(), type(uint88).max, "to the last wei");
    }

    function testFuzz_constructor_mintsToOwner(uint256 supply) public {
        supply = bound(supply, 0, type(uint88).max);
        vm.prank(stranger);
        MusterToken other = new MusterToken(supply, owner);
        assertEq(other.balanceOf(owner), supply, "owner");
        assertEq(other.totalSupply(), supply, "supply");
    }

    function test_metadata() public view {
        assertEq(token.name(), "Muster", "name");
        assertEq(token.symbol(), "MUSTER", "symbol");
        assertEq(token.decimals(), 18, "decimals");
    }
}
