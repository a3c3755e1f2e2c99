// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

/// @title Makes the contracts of one network, in order, for one account
/// @notice They refer to one another, so their addresses must be known before their code is: a contract's address
/// follows from this factory's and its place in the order. The factory itself is made by the deterministic deployment
/// proxy, from its account and a salt, and is therefore at the same address on every chain.
/// @dev Trusted by nobody: no contract asks it for anything, and it holds nothing.
interface INetworkFactory {
    /// @notice Thrown when somebody else than the factory's account creates.
    error FactoryUnauthorized(address caller);
    /// @notice Thrown when a contract was created there already.
    error FactoryTaken(address place);
    /// @notice Thrown when `created` would be the next contract's address, not `expected`.
    error FactoryOutOfOrder(address created, address expected);

    /// @notice Emitted when a contract was created.
    event ContractCreated(address indexed created);

    /// @notice Creates the next contract. Only the factory's account may, and only at the address that it names: a
    /// call that is sent twice, or overtakes another, reverts.
    /// @param initCode Creation code with the constructor's arguments. What its constructor reverts with is passed on.
    function create(address expected, bytes calldata initCode) external;
}
