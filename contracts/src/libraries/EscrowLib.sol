// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.30;

import {IStakeVault} from "../interfaces/IStakeVault.sol";

/// @title The names of escrows
library EscrowLib {
    /// @dev Returns the name of what an account is punished for, once.
    function idOf(uint64 runId, address owner, IStakeVault.Offence offence, uint64 tag)
        internal
        pure
        returns (bytes32)
    {
        return keccak256(abi.encode(runId, owner, offence, tag));
    }

    /// @dev Returns the name of a fraud's escrow.
    function idOf(IStakeVault.Verdict memory verdict) internal pure returns (bytes32) {
        return idOf(verdict.runId, verdict.owner, verdict.offence, verdict.tag);
    }
}
