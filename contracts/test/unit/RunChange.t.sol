// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IRunRegistry, IRunRegistryErrors, IRunRegistryEvents} from "../../src/interfaces/IRunRegistry.sol";
import {BaseTest} from "../BaseTest.sol";

/// @dev Terms change only within bounds and after a delay.
contract RunChangeTest is BaseTest {
    function setUp() public override {
        super.setUp();
        runId = _createRun();
    }

    /// @dev Valid terms, whatever the seed.
    function _terms(uint256 seed) private pure returns (IRunRegistry.Terms memory terms) {
        terms.pricePerUnit = uint88(bound(uint64(seed), PRICE / 2, 2 * PRICE));
        terms.exactFraudPpm = uint32(bound(uint32(seed >> 64), 0, PPM));
        terms.fraudPpm = uint32(bound(uint32(seed >> 96), 0, terms.exactFraudPpm));
        terms.quorum = uint8(bound(uint8(seed >> 128), 1, 5));
    }

    function _propose(IRunRegistry.Terms memory terms) private {
        vm.prank(owner);
        runs.proposeChange(runId, terms);
    }

    function _expectInvalid(bytes32 name) private {
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunInvalidParameter.selector, name));
    }

    function _expectNotDue(uint256 effectiveAt) private {
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunChangeNotDue.selector, runId, effectiveAt));
    }

    function _expectInvalidQuorum(uint256 quorum, uint256 count) private {
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunInvalidQuorum.selector, quorum, count));
    }

    function _assertTerms(IRunRegistry.Terms memory expected, string memory why) private view {
        assertEq(keccak256(abi.encode(runs.termsOf(runId))), keccak256(abi.encode(expected)), why);
    }

    // ------------------------------------------------------------------- propose

    function testFuzz_proposeChange_reverts_whenNotTheOwner(address caller, uint256 seed) public {
        vm.assume(caller != owner);
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunUnauthorized.selector, runId, caller));
        vm.prank(caller);
        runs.proposeChange(runId, _terms(seed));
    }

    function testFuzz_proposeChange_reverts_whenRunIsUnknown(uint64 unknown, uint256 seed) public {
        vm.assume(unknown != runId);
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunUnknown.selector, unknown));
        vm.prank(owner);
        runs.proposeChange(unknown, _terms(seed));
    }

    function testFuzz_proposeChange_reverts_whenThePriceMovesTooFar(uint256 seed, uint88 price) public {
        IRunRegistry.Terms memory terms = _terms(seed);
        // Often the first price that is too low or too high.
        if (seed % 4 == 0) terms.pricePerUnit = PRICE / 2 - 1;
        else if (seed % 4 == 1) terms.pricePerUnit = 2 * PRICE + 1;
        else if (seed % 4 == 2) terms.pricePerUnit = uint88(bound(price, 1, PRICE / 2 - 1));
        else terms.pricePerUnit = uint88(bound(price, 2 * PRICE + 1, type(uint88).max));
        _expectInvalid("pricePerUnit");
        _propose(terms);
    }

    /// @dev Half of a price of one is zero, which is no price.
    function test_proposeChange_reverts_whenThePriceIsZero() public {
        IRunRegistry.RunConfig memory config = _config();
        config.terms.pricePerUnit = 1;
        vm.startPrank(owner);
        uint64 cheap = runs.createRun(config);
        config.terms.pricePerUnit = 0;
        _expectInvalid("pricePerUnit");
        runs.proposeChange(cheap, config.terms);
    }

    function testFuzz_proposeChange_reverts_whenSlashesAreOutOfBounds(uint256 seed, uint32 ppm) public {
        IRunRegistry.Terms memory terms = _terms(seed);
        bool exact = seed % 2 == 0;
        if (exact) terms.exactFraudPpm = uint32(bound(ppm, PPM + 1, type(uint32).max));
        else terms.fraudPpm = uint32(bound(ppm, uint256(terms.exactFraudPpm) + 1, type(uint32).max));
        _expectInvalid(exact ? bytes32("exactFraudPpm") : bytes32("fraudPpm"));
        _propose(terms);
    }

    function testFuzz_proposeChange_reverts_whenQuorumCannotBeMet(uint256 seed, uint8 quorum) public {
        IRunRegistry.Terms memory terms = _terms(seed);
        terms.quorum = seed % 2 == 0 ? 0 : uint8(bound(quorum, 6, 255));
        _expectInvalidQuorum(terms.quorum, 5);
        _propose(terms);
    }

    function testFuzz_proposeChange_announces_andChangesNothingYet(uint256 seed) public {
        IRunRegistry.Terms memory terms = _terms(seed);
        uint256 effectiveAt = block.timestamp + CHANGE_DELAY;
        vm.expectEmit(address(runs));
        emit IRunRegistryEvents.ChangeProposed(runId, terms, effectiveAt);
        _propose(terms);
        (IRunRegistry.Terms memory proposed, uint256 at) = runs.proposedChange(runId);
        assertEq(keccak256(abi.encode(proposed)), keccak256(abi.encode(terms)), "announced");
        assertEq(at, effectiveAt, "effective at");
        _assertTerms(_config().terms, "as before");
    }

    function testFuzz_proposeChange_again_restartsTheDelay(uint256 first, uint256 second, uint256 waited) public {
        _propose(_terms(first));
        vm.warp(block.timestamp + bound(waited, 1, 2 * CHANGE_DELAY));
        _propose(_terms(second));
        uint256 effectiveAt = block.timestamp + CHANGE_DELAY;
        vm.warp(effectiveAt - 1);
        _expectNotDue(effectiveAt);
        runs.applyChange(runId);
        vm.warp(effectiveAt);
        runs.applyChange(runId);
        _assertTerms(_terms(second), "the later announcement");
    }

    // -------------------------------------------------------------------- cancel

    function testFuzz_cancelChange_reverts_whenNotTheOwner(address caller, uint256 seed) public {
        vm.assume(caller != owner);
        _propose(_terms(seed));
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunUnauthorized.selector, runId, caller));
        vm.prank(caller);
        runs.cancelChange(runId);
    }

    function test_cancelChange_reverts_whenNothingIsAnnounced() public {
        _expectNotDue(0);
        vm.prank(owner);
        runs.cancelChange(runId);
    }

    function testFuzz_cancelChange_withdrawsTheAnnouncement(uint256 seed, uint256 waited) public {
        _propose(_terms(seed));
        vm.warp(block.timestamp + bound(waited, 0, 10 * CHANGE_DELAY));
        vm.expectEmit(address(runs));
        emit IRunRegistryEvents.ChangeCancelled(runId);
        vm.prank(owner);
        runs.cancelChange(runId);
        (IRunRegistry.Terms memory proposed, uint256 at) = runs.proposedChange(runId);
        IRunRegistry.Terms memory none;
        assertEq(keccak256(abi.encode(proposed)), keccak256(abi.encode(none)), "nothing announced");
        assertEq(at, 0, "no time");
        vm.warp(block.timestamp + CHANGE_DELAY);
        _expectNotDue(0);
        runs.applyChange(runId);
    }

    // --------------------------------------------------------------------- apply

    function testFuzz_applyChange_reverts_whenRunIsUnknown(uint64 unknown) public {
        vm.assume(unknown != runId);
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunUnknown.selector, unknown));
        runs.applyChange(unknown);
    }

    function testFuzz_applyChange_reverts_tooEarly(uint256 seed, uint256 waited) public {
        _propose(_terms(seed));
        uint256 effectiveAt = block.timestamp + CHANGE_DELAY;
        waited = waited % 2 == 0 ? CHANGE_DELAY - 1 : bound(waited, 0, CHANGE_DELAY - 1);
        vm.warp(block.timestamp + waited);
        _expectNotDue(effectiveAt);
        runs.applyChange(runId);
    }

    function testFuzz_applyChange_reverts_whenValidatorsHaveGone(uint256 gone, uint256 quorum) public {
        gone = bound(gone, 1, 5);
        IRunRegistry.Terms memory terms = _config().terms;
        terms.quorum = uint8(bound(quorum, 6 - gone, 5));
        _propose(terms);
        for (uint256 i = 0; i < gone; ++i) {
            vm.prank(address(faults));
            runs.unseatValidator(runId, validators[i]);
        }
        vm.warp(block.timestamp + CHANGE_DELAY);
        _expectInvalidQuorum(terms.quorum, 5 - gone);
        runs.applyChange(runId);
    }

    function testFuzz_applyChange_lets_anyone_once(address caller, uint256 seed, uint256 waited) public {
        IRunRegistry.Terms memory terms = _terms(seed);
        _propose(terms);
        vm.warp(block.timestamp + bound(waited, CHANGE_DELAY, 100 * CHANGE_DELAY));
        vm.expectEmit(address(runs));
        emit IRunRegistryEvents.ChangeApplied(runId, terms);
        vm.prank(caller);
        runs.applyChange(runId);
        _assertTerms(terms, "in effect");
        (, uint88 price,) = runs.admissionOf(runId);
        assertEq(price, terms.pricePerUnit, "what commitments pay");
        _expectNotDue(0);
        runs.applyChange(runId);
    }

    /// @dev The bounds hold against the price in effect, so that it can move on step by step, each one delayed.
    function test_proposeChange_boundsFollowThePriceInEffect() public {
        IRunRegistry.Terms memory terms = _config().terms;
        terms.pricePerUnit = 2 * PRICE;
        _propose(terms);
        terms.pricePerUnit = 4 * PRICE;
        _expectInvalid("pricePerUnit");
        _propose(terms);
        vm.warp(block.timestamp + CHANGE_DELAY);
        runs.applyChange(runId);
        _propose(terms);
        vm.warp(block.timestamp + CHANGE_DELAY);
        runs.applyChange(runId);
        _assertTerms(terms, "twice doubled");
    }

    /// @dev Work committed before a change is paid as it was promised.
    function testFuzz_applyChange_leavesCommittedWorkAtItsPrice(uint256 seed) public {
        _registerAliceAndBob();
        vm.prank(owner);
        escrow.fund(runId, WALLET / 2);
        _propose(_terms(seed));
        vm.warp(block.timestamp + CHANGE_DELAY);
        bytes[] memory records = _accepted(1);
        uint64 batchId = _commit(1);
        runs.applyChange(runId);
        _post(batchId, records, 5);
        _passChallengeWindow();
        assertEq(_claim(batchId, records, 0, 1), 1000 * uint256(PRICE), "the price of its commitment");
    }
}
