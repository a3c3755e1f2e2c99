// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {stdError} from "forge-std/StdError.sol";

import {IWorkerRegistry, IWorkerRegistryErrors, IWorkerRegistryEvents} from "../../src/interfaces/IWorkerRegistry.sol";
import {BaseTest} from "../BaseTest.sol";

contract WorkerRegistryConvictTest is BaseTest {
    bytes32 private constant OFFENCE = keccak256("offence");

    function setUp() public override {
        super.setUp();
        _register(alice, aliceNode, aliceNodeKey, REQUIRED_STAKE);
    }

    function _convict(bool exact) private returns (uint256) {
        vm.prank(address(ledger));
        return workers.convict(alice, OFFENCE, exact);
    }

    function _acquit(bool exact) private {
        vm.prank(address(court));
        workers.acquit(alice, OFFENCE, exact);
    }

    function _exit() private {
        vm.prank(alice);
        workers.exit();
    }

    function _serve() private {
        vm.warp(block.timestamp + JAIL_TIME);
        vm.prank(alice);
        workers.unjail();
        vm.roll(block.number + ACTIVATION_DELAY);
    }

    function _expectUnauthorized(address caller) private {
        vm.expectRevert(abi.encodeWithSelector(IWorkerRegistryErrors.RegistryUnauthorized.selector, caller));
    }

    // ------------------------------------------------------------------- convict

    function testFuzz_convict_reverts_whenNotAJudge(address caller, bool exact) public {
        vm.assume(caller != address(ledger) && caller != address(faults));
        _expectUnauthorized(caller);
        vm.prank(caller);
        workers.convict(alice, OFFENCE, exact);
    }

    function testFuzz_convict_reverts_whenNotAWorker(address account, bool exact) public {
        vm.assume(account != alice);
        vm.expectRevert(
            abi.encodeWithSelector(
                IWorkerRegistryErrors.RegistryWrongStatus.selector, account, uint8(IWorkerRegistry.Status.None)
            )
        );
        vm.prank(address(ledger));
        workers.convict(account, OFFENCE, exact);
    }

    function testFuzz_convict_bans_whenExact(bool byFaultCourt) public {
        vm.expectEmit(address(workers));
        emit IWorkerRegistryEvents.WorkerBanned(alice, OFFENCE);
        vm.prank(byFaultCourt ? address(faults) : address(ledger));
        assertEq(workers.convict(alice, OFFENCE, true), 0, "priors");
        _assertStatus(alice, IWorkerRegistry.Status.Banned, "banned");
        assertEq(workers.workerOf(alice).convictions, 1, "convictions");
    }

    function test_convict_jails_whenStatisticalAndFirst() public {
        vm.expectEmit(address(workers));
        emit IWorkerRegistryEvents.WorkerJailed(alice, OFFENCE, block.timestamp + JAIL_TIME);
        assertEq(_convict(false), 0, "priors");
        _assertStatus(alice, IWorkerRegistry.Status.Jailed, "jailed");
        assertEq(workers.workerOf(alice).jailedUntil, block.timestamp + JAIL_TIME, "until");
        assertEq(workers.workerOf(alice).convictions, 1, "convictions");
    }

    function testFuzz_convict_bans_theSecondTime(bool served, bool exact) public {
        _convict(false);
        if (served) _serve();
        vm.expectEmit(address(workers));
        emit IWorkerRegistryEvents.WorkerBanned(alice, OFFENCE);
        assertEq(_convict(exact), 1, "priors");
        _assertStatus(alice, IWorkerRegistry.Status.Banned, "banned");
    }

    function testFuzz_convict_countsPriors(uint256 times) public {
        times = bound(times, 1, 30);
        for (uint256 i = 0; i < times; ++i) {
            assertEq(_convict(i % 2 == 0), i, "priors");
        }
        assertEq(workers.workerOf(alice).convictions, times, "convictions");
    }

    function testFuzz_convict_excludesForGood(uint256 waited) public {
        _convict(true);
        vm.warp(block.timestamp + bound(waited, 0, 1000 days));
        vm.expectRevert(
            abi.encodeWithSelector(
                IWorkerRegistryErrors.RegistryWrongStatus.selector, alice, uint8(IWorkerRegistry.Status.Banned)
            )
        );
        vm.prank(alice);
        workers.unjail();
    }

    /// @dev Who is leaving goes on leaving, but cannot come back earlier than from jail.
    function test_convict_letsAnExitingWorkerLeave_butNotRejoinAtOnce() public {
        _exit();
        _convict(false);
        _assertStatus(alice, IWorkerRegistry.Status.Exiting, "exiting");
        _deposit(alice, REQUIRED_STAKE);
        uint256 until = block.timestamp + JAIL_TIME;
        vm.expectRevert(abi.encodeWithSelector(IWorkerRegistryErrors.RegistryStillJailed.selector, alice, until));
        vm.prank(alice);
        workers.rejoin();
        vm.warp(until);
        vm.prank(alice);
        workers.rejoin();
        _assertStatus(alice, IWorkerRegistry.Status.Active, "back");
    }

    function test_convict_bansAnExitingWorker_theSecondTime() public {
        _exit();
        _convict(false);
        _convict(false);
        _assertStatus(alice, IWorkerRegistry.Status.Banned, "banned");
    }

    // -------------------------------------------------------------------- acquit

    function testFuzz_acquit_reverts_whenNotTheCourt(address caller, bool exact) public {
        vm.assume(caller != address(court));
        _convict(exact);
        _expectUnauthorized(caller);
        vm.prank(caller);
        workers.acquit(alice, OFFENCE, exact);
    }

    function testFuzz_acquit_reverts_withoutAConviction(bool exact) public {
        vm.expectRevert(stdError.arithmeticError);
        _acquit(exact);
    }

    function testFuzz_acquit_givesTheFormerStatusBack(bool exact) public {
        _convict(exact);
        vm.expectEmit(address(workers));
        emit IWorkerRegistryEvents.WorkerAcquitted(alice, OFFENCE, IWorkerRegistry.Status.Active);
        _acquit(exact);
        assertTrue(workers.isActive(alice), "active, without a new delay");
        assertEq(workers.workerOf(alice).convictions, 0, "convictions");
    }

    function testFuzz_acquit_keepsAJailedWorkerInJail(bool exact) public {
        vm.prank(address(faults));
        workers.jail(alice, OFFENCE);
        _convict(exact);
        _acquit(exact);
        _assertStatus(alice, IWorkerRegistry.Status.Jailed, "jailed for something else");
    }

    function testFuzz_acquit_keepsAnExitingWorkerExiting(bool exact) public {
        _exit();
        _convict(exact);
        _acquit(exact);
        _assertStatus(alice, IWorkerRegistry.Status.Exiting, "exiting");
    }

    function test_acquit_keepsExiting_whoLeftAfterTheConviction() public {
        _convict(false);
        _exit();
        _acquit(false);
        _assertStatus(alice, IWorkerRegistry.Status.Exiting, "exiting");
    }

    function testFuzz_acquit_jails_whenStakeNoLongerSuffices(bool exact, uint256 amount) public {
        amount = bound(amount, 1, REQUIRED_STAKE);
        _convict(exact);
        vm.prank(alice);
        vault.requestUnbond(amount);
        vm.expectEmit(address(workers));
        emit IWorkerRegistryEvents.WorkerAcquitted(alice, OFFENCE, IWorkerRegistry.Status.Jailed);
        _acquit(exact);
        _assertStatus(alice, IWorkerRegistry.Status.Jailed, "jailed");
    }

    function test_acquit_jailsInPlaceOfABan_whileOneStatisticalConvictionStands() public {
        _convict(false);
        _convict(false);
        _acquit(false);
        _assertStatus(alice, IWorkerRegistry.Status.Jailed, "one stands");
        _serve();
        assertTrue(workers.isActive(alice), "and can be served");
    }

    function test_acquit_letsAnExitingWorkerLeave_whileOneStatisticalConvictionStands() public {
        _exit();
        _convict(false);
        _convict(false);
        _acquit(false);
        _assertStatus(alice, IWorkerRegistry.Status.Exiting, "as before the first");
    }

    function test_acquit_keepsTheBan_whileAnExactConvictionStands() public {
        _convict(true);
        _convict(false);
        _acquit(false);
        _assertStatus(alice, IWorkerRegistry.Status.Banned, "the exact one stands");
    }

    function test_acquit_ofTheExactOne_leavesTheStatisticalOneInJail() public {
        _convict(true);
        _convict(false);
        _acquit(true);
        _assertStatus(alice, IWorkerRegistry.Status.Jailed, "the statistical one stands");
    }

    function test_acquit_leavesAWorkerActive_whoServedItsTime() public {
        _convict(false);
        _serve();
        _acquit(false);
        assertTrue(workers.isActive(alice), "active");
    }

    /// @dev One file can be an exact fraud in one batch and a statistical one in another. Acquitting as the other
    ///      kind than was convicted must work, and leave nothing behind.
    function testFuzz_acquit_worksWhateverKindWasConvicted(bool convicted, bool acquitted) public {
        _convict(convicted);
        _acquit(acquitted);
        _assertStatus(alice, IWorkerRegistry.Status.Active, "clean");
        _convict(false);
        _assertStatus(alice, IWorkerRegistry.Status.Jailed, "a first statistical conviction again");
        _acquit(false);
        _assertStatus(alice, IWorkerRegistry.Status.Active, "clean");
    }

    /// @dev All orders of convictions and acquittals of both kinds against a model that remembers every conviction.
    function testFuzz_convictions_followTheModel(uint256 seed, uint256 steps) public {
        uint256 statistical;
        uint256 exact;
        steps = bound(steps, 1, 40);
        for (uint256 i = 0; i < steps; ++i) {
            bool isExact = (seed >> (2 * i)) & 1 == 1;
            bool undo = (seed >> (2 * i + 1)) & 1 == 1 && (isExact ? exact : statistical) != 0;
            if (undo) _acquit(isExact);
            else assertEq(_convict(isExact), statistical + exact, "priors");
            if (isExact) undo ? --exact : ++exact;
            else undo ? --statistical : ++statistical;
            _assertFollows(statistical, exact);
        }
    }

    function _assertFollows(uint256 statistical, uint256 exact) private view {
        IWorkerRegistry.Worker memory worker = workers.workerOf(alice);
        assertEq(worker.convictions, statistical + exact, "convictions are those executed minus those acquitted");
        IWorkerRegistry.Status expected = IWorkerRegistry.Status.Active;
        if (exact != 0 || statistical > 1) expected = IWorkerRegistry.Status.Banned;
        else if (statistical == 1) expected = IWorkerRegistry.Status.Jailed;
        assertEq(uint8(worker.status), uint8(expected), "status");
    }
}
