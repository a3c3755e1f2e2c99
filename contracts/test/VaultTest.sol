// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IStakeVault} from "../src/interfaces/IStakeVault.sol";
import {BaseTest} from "./BaseTest.sol";

/// @title Offences as the vault is told of them: frauds that the ledger holds, and faults that a court slashes
/// @dev Nobody but these contracts may call; tests speak in their names. An offence is named by its tag.
abstract contract VaultTest is BaseTest {
    uint64 internal constant BATCH = 7;
    uint32 internal constant POSITION = 3;

    function setUp() public virtual override {
        super.setUp();
        runId = _createRun();
    }

    /// @dev Gives an account `active` and `unbonding` stake in the run. Both at least 1.
    function _give(address account, uint256 active, uint256 unbonding) internal {
        _deposit(runId, account, active + unbonding);
        vm.prank(account);
        vault.requestUnbond(runId, unbonding);
    }

    function _boundStake(uint256 active, uint256 unbonding) internal pure returns (uint256, uint256) {
        active = bound(active, 1, WALLET - 1);
        return (active, bound(unbonding, 1, WALLET - active));
    }

    /// @dev The fraud of an account that the outcome at `POSITION` of `BATCH` records.
    function _fraudOf(address account, uint64 tag) internal view returns (IStakeVault.Verdict memory) {
        return IStakeVault.Verdict(runId, account, IStakeVault.Offence.Fraud, tag, BATCH, POSITION);
    }

    function _hold(address account, uint64 tag, uint256 ppm) internal returns (uint256) {
        vm.prank(address(ledger));
        return vault.hold(_fraudOf(account, tag), ppm);
    }

    function _release(address account, uint64 tag, address reporter) internal {
        vm.prank(address(ledger));
        vault.release(_fraudOf(account, tag), reporter);
    }

    function _restore(address account, uint64 tag) internal returns (bool) {
        vm.prank(address(court));
        return vault.restore(_fraudOf(account, tag));
    }

    function _slash(address account, uint64 tag, uint256 ppm, address reporter) internal returns (uint256) {
        vm.prank(address(faults));
        return vault.slash(runId, account, IStakeVault.Offence.DoubleSubmission, tag, ppm, reporter);
    }

    function _fraudId(address account, uint64 tag) internal view returns (bytes32) {
        return vault.escrowIdOf(runId, account, IStakeVault.Offence.Fraud, tag);
    }

    function _faultId(address account, uint64 tag) internal view returns (bytes32) {
        return vault.escrowIdOf(runId, account, IStakeVault.Offence.DoubleSubmission, tag);
    }

    /// @dev What an account has in the run, active or leaving.
    function _total(address account) internal view returns (uint256) {
        (uint256 active, uint256 unbonding) = _stake(account);
        return active + unbonding;
    }

    function _heldOf(address account) internal view returns (uint256) {
        return vault.accountOf(runId, account).held;
    }

    function _share(uint256 amount, uint256 ppm) internal pure returns (uint256) {
        return (amount * ppm + PPM - 1) / PPM;
    }

    function _assertEscrow(bytes32 escrowId, uint256 amount, IStakeVault.EscrowStatus status) internal view {
        IStakeVault.Escrow memory escrow = vault.escrowOf(escrowId);
        assertEq(escrow.amount, amount, "escrow's amount");
        assertEq(uint8(escrow.status), uint8(status), "escrow's status");
    }
}
