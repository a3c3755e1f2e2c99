// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {INetworkFactory} from "./interfaces/INetworkFactory.sol";

/// @title Makes the contracts of one network, in order, for one account
contract NetworkFactory is INetworkFactory {
    /// @notice The account that creates.
    address public immutable account;

    /// @notice The block in which the factory was made: no contract of its network is older.
    uint256 public immutable startBlock;

    constructor(address account_) {
        account = account_;
        startBlock = block.number;
    }

    // ------------------------------------------------------------------- create

    /// @inheritdoc INetworkFactory
    function create(address expected, bytes calldata initCode) external {
        require(msg.sender == account, FactoryUnauthorized(msg.sender));
        // Cheaper than to find out after the constructor has run.
        require(expected.code.length == 0, FactoryTaken(expected));
        bytes memory code = initCode;
        address created;
        // Reads the copy only; of a failed constructor, what it reverted with is all that is returned.
        assembly ("memory-safe") {
            created := create(0, add(code, 0x20), mload(code))
            if iszero(created) {
                let free := mload(0x40)
                returndatacopy(free, 0, returndatasize())
                revert(free, returndatasize())
            }
        }
        require(created == expected, FactoryOutOfOrder(created, expected));
        emit ContractCreated(created);
    }
}
