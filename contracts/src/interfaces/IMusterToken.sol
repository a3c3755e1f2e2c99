// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

import {IERC20} from "@openzeppelin/contracts/token/ERC20/IERC20.sol";
import {IERC20Permit} from "@openzeppelin/contracts/token/ERC20/extensions/IERC20Permit.sol";

/// @title The token that is staked, paid and slashed
interface IMusterToken is IERC20, IERC20Permit {
    /// @notice Thrown when the faucet is used on a chain that is not for development.
    error TokenNoFaucet(uint256 chainId);
    /// @notice Thrown at construction when an account could come to hold more than StakeVault counts.
    error TokenSupplyTooLarge(uint256 supply, uint256 cap);
    /// @notice Thrown when one faucet call asks for more than its cap.
    error TokenFaucetCap(uint256 asked, uint256 cap);

    /// @notice Mints test tokens to `to`. Only on chain id 31337.
    function faucet(address to, uint256 amount) external;

    /// @notice Destroys `amount` of the caller's tokens.
    function burn(uint256 amount) external;
}
