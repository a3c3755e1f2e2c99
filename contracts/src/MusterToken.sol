// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {ERC20} from "@openzeppelin/contracts/token/ERC20/ERC20.sol";
import {ERC20Permit} from "@openzeppelin/contracts/token/ERC20/extensions/ERC20Permit.sol";
import {IERC20Permit} from "@openzeppelin/contracts/token/ERC20/extensions/IERC20Permit.sol";

import {IMusterToken} from "./interfaces/IMusterToken.sol";

/// @title The token that is staked, paid and slashed
contract MusterToken is ERC20Permit, IMusterToken {
    /// @notice The chain on which the faucet works: a local development chain.
    uint256 public constant FAUCET_CHAIN_ID = 31337;

    /// @notice Token wei that one faucet call may mint.
    uint256 public constant FAUCET_CAP = 1_000_000 ether;

    /// @param initialSupply Token wei minted to `owner`: below 2^88, which StakeVault's accounts hold. Nothing else is ever
    ///        minted but by the faucet.
    constructor(uint256 initialSupply, address owner) ERC20("Muster", "MUSTER") ERC20Permit("Muster") {
        require(initialSupply <= type(uint88).max, TokenSupplyTooLarge(initialSupply, type(uint88).max));
        _mint(owner, initialSupply);
    }

    /// @inheritdoc IMusterToken
    function faucet(address to, uint256 amount) external {
        require(block.chainid == FAUCET_CHAIN_ID, TokenNoFaucet(block.chainid));
        require(amount <= FAUCET_CAP, TokenFaucetCap(amount, FAUCET_CAP));
        _mint(to, amount);
    }

    /// @inheritdoc IMusterToken
    function burn(uint256 amount) external {
        _burn(msg.sender, amount);
    }

    /// @inheritdoc IERC20Permit
    function nonces(address owner) public view override(ERC20Permit, IERC20Permit) returns (uint256) {
        return super.nonces(owner);
    }
}
