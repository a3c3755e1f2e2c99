// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IWorkerRegistry, IWorkerRegistryErrors, IWorkerRegistryEvents} from "../../src/interfaces/IWorkerRegistry.sol";
import {BaseTest} from "../BaseTest.sol";

contract WorkerRegistryNodeTest is BaseTest {
    function setUp() public override {
        super.setUp();
        _register(alice, aliceNode, aliceNodeKey, REQUIRED_STAKE);
    }

    function _rotate(address node, uint256 nodeKey) private {
        bytes memory consent = _consent(alice, node, nodeKey, block.timestamp);
        vm.prank(alice);
        workers.rotateNode(node, block.timestamp, consent);
    }

    function testFuzz_rotateNode_reverts_whenNotAWorker(address caller) public {
        vm.assume(caller != alice);
        bytes memory consent = _consent(caller, bobNode, bobNodeKey, block.timestamp);
        vm.expectRevert(
            abi.encodeWithSelector(
                IWorkerRegistryErrors.RegistryWrongStatus.selector, caller, uint8(IWorkerRegistry.Status.None)
            )
        );
        vm.prank(caller);
        workers.rotateNode(bobNode, block.timestamp, consent);
    }

    function test_rotateNode_reverts_whenBanned() public {
        vm.prank(address(ledger));
        workers.convict(alice, "offence", true);
        bytes memory consent = _consent(alice, bobNode, bobNodeKey, block.timestamp);
        vm.expectRevert(
            abi.encodeWithSelector(
                IWorkerRegistryErrors.RegistryWrongStatus.selector, alice, uint8(IWorkerRegistry.Status.Banned)
            )
        );
        vm.prank(alice);
        workers.rotateNode(bobNode, block.timestamp, consent);
    }

    function test_rotateNode_reverts_whenExiting() public {
        bytes memory consent = _consent(alice, bobNode, bobNodeKey, block.timestamp);
        vm.startPrank(alice);
        workers.exit();
        vm.expectRevert(
            abi.encodeWithSelector(
                IWorkerRegistryErrors.RegistryWrongStatus.selector, alice, uint8(IWorkerRegistry.Status.Exiting)
            )
        );
        workers.rotateNode(bobNode, block.timestamp, consent);
    }

    function testFuzz_rotateNode_reverts_whenConsentExpired(uint256 late) public {
        uint256 deadline = block.timestamp;
        bytes memory consent = _consent(alice, bobNode, bobNodeKey, deadline);
        vm.warp(deadline + bound(late, 1, 1000 days));
        vm.expectRevert(
            abi.encodeWithSelector(IWorkerRegistryErrors.RegistryExpired.selector, deadline, block.timestamp)
        );
        vm.prank(alice);
        workers.rotateNode(bobNode, deadline, consent);
    }

    function testFuzz_rotateNode_reverts_whenConsentIsReplayed(uint256 deadline) public {
        deadline = bound(deadline, block.timestamp, type(uint256).max);
        bytes memory consent = _consent(alice, bobNode, bobNodeKey, deadline);
        vm.startPrank(alice);
        workers.rotateNode(bobNode, deadline, consent);
        vm.expectRevert(abi.encodeWithSelector(IWorkerRegistryErrors.RegistryNodeTaken.selector, bobNode, alice));
        workers.rotateNode(bobNode, deadline, consent);
    }

    function test_rotateNode_reverts_whenConsentIsForAnEarlierNonce() public {
        (address thirdNode, uint256 thirdKey) = makeAddrAndKey("third node");
        bytes memory early = _consent(alice, thirdNode, thirdKey, block.timestamp);
        _rotate(bobNode, bobNodeKey);
        vm.expectPartialRevert(IWorkerRegistryErrors.RegistryInvalidNodeSignature.selector);
        vm.prank(alice);
        workers.rotateNode(thirdNode, block.timestamp, early);
    }

    function test_rotateNode_reverts_whenKeyServedBefore() public {
        _rotate(bobNode, bobNodeKey);
        bytes memory consent = _consent(alice, aliceNode, aliceNodeKey, block.timestamp);
        vm.expectRevert(abi.encodeWithSelector(IWorkerRegistryErrors.RegistryNodeTaken.selector, aliceNode, alice));
        vm.prank(alice);
        workers.rotateNode(aliceNode, block.timestamp, consent);
    }

    function testFuzz_rotateNode_failsTheOldKeyAtOnce(uint256 nodeKey) public {
        nodeKey = bound(nodeKey, 1, 1 << 200);
        address node = vm.addr(nodeKey);
        bytes memory consent = _consent(alice, node, nodeKey, block.timestamp);
        vm.expectEmit(address(workers));
        emit IWorkerRegistryEvents.NodeRotated(alice, aliceNode, node);
        vm.prank(alice);
        workers.rotateNode(node, block.timestamp, consent);
        assertEq(workers.workerOfNode(aliceNode), address(0), "old key");
        assertEq(workers.workerOfNode(node), alice, "new key");
        assertEq(workers.workerOf(alice).node, node, "record");
        assertTrue(workers.isActive(alice), "no new delay");
    }

    function test_rotateNode_works_whenJailed() public {
        vm.prank(address(faults));
        workers.jail(alice, "offence");
        _rotate(bobNode, bobNodeKey);
        assertEq(workers.workerOf(alice).node, bobNode, "record");
    }

    function testFuzz_wasNodeOf_remembersReplacedKeys(uint256 nodeKey, address other, uint32 otherId) public {
        nodeKey = bound(nodeKey, 1, 1 << 200);
        vm.assume(other != alice && otherId != 1);
        address node = vm.addr(nodeKey);
        _rotate(node, nodeKey);
        assertTrue(workers.wasNodeOf(aliceNode, alice, 1), "former node");
        assertTrue(workers.wasNodeOf(node, alice, 1), "present node");
        assertFalse(workers.wasNodeOf(aliceNode, alice, otherId), "another number");
        assertFalse(workers.wasNodeOf(aliceNode, other, 1), "another worker");
    }

    function testFuzz_wasNodeOf_isFalse_forUnknownKeys(address node) public view {
        vm.assume(node != aliceNode);
        assertFalse(workers.wasNodeOf(node, alice, 1), "not bound");
        assertFalse(workers.wasNodeOf(node, address(0), 0), "zero is nobody");
        assertEq(workers.workerOfNode(node), address(0), "serves nobody");
    }
}
