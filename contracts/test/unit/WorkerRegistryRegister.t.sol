// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IERC20Errors} from "@openzeppelin/contracts/interfaces/draft-IERC6093.sol";

import {IWorkerRegistry, IWorkerRegistryErrors, IWorkerRegistryEvents} from "../../src/interfaces/IWorkerRegistry.sol";
import {BaseTest} from "../BaseTest.sol";

contract WorkerRegistryRegisterTest is BaseTest {
    function _tryRegister(uint256 stake, address node, uint256 deadline, bytes memory consent) private {
        vm.prank(alice);
        workers.register(stake, node, deadline, consent);
    }

    // ----------------------------------------------------------------- register

    function testFuzz_register_reverts_whenConsentExpired(uint256 deadline) public {
        vm.warp(1 days);
        deadline = bound(deadline, 0, block.timestamp - 1);
        bytes memory consent = _consent(alice, aliceNode, aliceNodeKey, deadline);
        vm.expectRevert(
            abi.encodeWithSelector(IWorkerRegistryErrors.RegistryExpired.selector, deadline, block.timestamp)
        );
        _tryRegister(REQUIRED_STAKE, aliceNode, deadline, consent);
    }

    function testFuzz_register_reverts_whenAnotherKeyConsents(uint256 key) public {
        key = bound(key, 1, 1 << 200);
        vm.assume(key != aliceNodeKey);
        bytes memory consent = _consent(alice, aliceNode, key, block.timestamp);
        vm.expectRevert(
            abi.encodeWithSelector(IWorkerRegistryErrors.RegistryInvalidNodeSignature.selector, aliceNode, vm.addr(key))
        );
        _tryRegister(REQUIRED_STAKE, aliceNode, block.timestamp, consent);
    }

    function testFuzz_register_reverts_whenConsentIsForAnotherWorker(address other) public {
        vm.assume(other != alice);
        bytes memory consent = _consent(other, aliceNode, aliceNodeKey, block.timestamp);
        vm.expectPartialRevert(IWorkerRegistryErrors.RegistryInvalidNodeSignature.selector);
        _tryRegister(REQUIRED_STAKE, aliceNode, block.timestamp, consent);
    }

    function testFuzz_register_reverts_whenSignatureIsMalformed(bytes memory consent) public {
        vm.assume(consent.length != 65);
        vm.expectRevert(
            abi.encodeWithSelector(IWorkerRegistryErrors.RegistryInvalidNodeSignature.selector, aliceNode, address(0))
        );
        _tryRegister(REQUIRED_STAKE, aliceNode, block.timestamp, consent);
    }

    function test_register_reverts_whenNodeIsZero() public {
        vm.expectRevert(
            abi.encodeWithSelector(IWorkerRegistryErrors.RegistryInvalidNodeSignature.selector, address(0), address(0))
        );
        _tryRegister(REQUIRED_STAKE, address(0), block.timestamp, new bytes(65));
    }

    function testFuzz_register_reverts_belowRequirement(uint256 stake) public {
        stake = bound(stake, 0, REQUIRED_STAKE - 1);
        bytes memory consent = _consent(alice, aliceNode, aliceNodeKey, block.timestamp);
        vm.expectRevert(
            abi.encodeWithSelector(IWorkerRegistryErrors.RegistryStakeTooLow.selector, alice, stake, REQUIRED_STAKE)
        );
        _tryRegister(stake, aliceNode, block.timestamp, consent);
    }

    function test_register_reverts_twice() public {
        _register(alice, aliceNode, aliceNodeKey, REQUIRED_STAKE);
        bytes memory consent = _consent(alice, bobNode, bobNodeKey, block.timestamp);
        vm.expectRevert(abi.encodeWithSelector(IWorkerRegistryErrors.RegistryWorkerExists.selector, alice));
        _tryRegister(REQUIRED_STAKE, bobNode, block.timestamp, consent);
    }

    function test_register_reverts_whenNodeServesAnother() public {
        _register(bob, aliceNode, aliceNodeKey, REQUIRED_STAKE);
        bytes memory consent = _consent(alice, aliceNode, aliceNodeKey, block.timestamp);
        vm.expectRevert(abi.encodeWithSelector(IWorkerRegistryErrors.RegistryNodeTaken.selector, aliceNode, bob));
        _tryRegister(REQUIRED_STAKE, aliceNode, block.timestamp, consent);
    }

    function testFuzz_register_makesAWorker(uint256 stake, uint256 nodeKey) public {
        stake = bound(stake, REQUIRED_STAKE, WALLET);
        nodeKey = bound(nodeKey, 1, 1 << 200);
        address node = vm.addr(nodeKey);
        bytes memory consent = _consent(alice, node, nodeKey, block.timestamp);
        vm.expectEmit(address(workers));
        emit IWorkerRegistryEvents.WorkerRegistered(alice, node, 1, block.number + ACTIVATION_DELAY);
        _tryRegister(stake, node, block.timestamp, consent);

        IWorkerRegistry.Worker memory worker = workers.workerOf(alice);
        assertEq(worker.node, node, "node");
        assertEq(worker.workerId, 1, "number");
        assertEq(worker.activeFrom, block.number + ACTIVATION_DELAY, "active from");
        assertEq(workers.workerOfNode(node), alice, "by node");
        assertEq(workers.workerById(1), alice, "by number");
        assertEq(workers.nonces(alice), 1, "nonce");
        assertEq(vault.activeStake(alice), stake, "stake");
    }

    function testFuzz_register_countsEarlierStake(uint256 earlier) public {
        earlier = bound(earlier, 1, REQUIRED_STAKE);
        _deposit(alice, earlier);
        _register(alice, aliceNode, aliceNodeKey, REQUIRED_STAKE - earlier);
        assertEq(vault.activeStake(alice), REQUIRED_STAKE, "both count");
    }

    function testFuzz_register_activatesAfterTheDelay(uint256 blocks) public {
        blocks = bound(blocks, 0, 10 * ACTIVATION_DELAY);
        bytes memory consent = _consent(alice, aliceNode, aliceNodeKey, block.timestamp);
        _tryRegister(REQUIRED_STAKE, aliceNode, block.timestamp, consent);
        vm.roll(block.number + blocks);
        assertEq(workers.isActive(alice), blocks >= ACTIVATION_DELAY, "active");
    }

    function test_register_numbersWorkersFromOne() public {
        _registerAliceAndBob();
        assertEq(workers.workerOf(alice).workerId, 1, "first");
        assertEq(workers.workerOf(bob).workerId, 2, "second");
        assertEq(workers.workerById(3), address(0), "no third");
    }

    // ----------------------------------------------------- register with permit

    function _tryRegisterWithPermit(uint256 stake, uint256 permitKey, bool frontRun) private {
        bytes memory consent = _consent(alice, aliceNode, aliceNodeKey, block.timestamp);
        (uint8 v, bytes32 r, bytes32 s) = _signPermit(alice, permitKey, address(vault), stake, block.timestamp);
        if (frontRun) token.permit(alice, address(vault), stake, block.timestamp, v, r, s);
        vm.prank(alice);
        workers.registerWithPermit(stake, aliceNode, block.timestamp, consent, block.timestamp, v, r, s);
    }

    function testFuzz_registerWithPermit_reverts_whenPermitIsForged(uint256 stake) public {
        stake = bound(stake, REQUIRED_STAKE, WALLET);
        vm.prank(alice);
        token.approve(address(vault), 0);
        bytes memory consent = _consent(alice, aliceNode, aliceNodeKey, block.timestamp);
        (uint8 v, bytes32 r, bytes32 s) = _signPermit(alice, bobKey, address(vault), stake, block.timestamp);
        vm.expectRevert(
            abi.encodeWithSelector(IERC20Errors.ERC20InsufficientAllowance.selector, address(vault), 0, stake)
        );
        vm.prank(alice);
        workers.registerWithPermit(stake, aliceNode, block.timestamp, consent, block.timestamp, v, r, s);
    }

    function testFuzz_registerWithPermit_onboardsInOneTransaction(uint256 stake, bool frontRun) public {
        stake = bound(stake, REQUIRED_STAKE, WALLET);
        vm.prank(alice);
        token.approve(address(vault), 0);
        _tryRegisterWithPermit(stake, aliceKey, frontRun);
        _assertStatus(alice, IWorkerRegistry.Status.Active, "a front-run permit does no harm");
        assertEq(vault.activeStake(alice), stake, "stake");
        assertEq(token.allowance(alice, address(vault)), 0, "no allowance left");
    }
}
