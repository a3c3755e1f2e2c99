// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {Vm} from "forge-std/Vm.sol";

import {IRunRegistry, IRunRegistryErrors, IRunRegistryEvents} from "../../src/interfaces/IRunRegistry.sol";
import {BaseTest} from "../BaseTest.sol";

/// @title Creating, pausing and closing runs, and publishing policies
contract RunRegistryTest is BaseTest {
    function setUp() public override {
        super.setUp();
        runId = _createRun();
    }

    function _create(IRunRegistry.RunConfig memory config) private returns (uint64) {
        vm.prank(owner);
        return runs.createRun(config);
    }

    function _expectInvalid(bytes32 name) private {
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunInvalidParameter.selector, name));
    }

    function _expectUnauthorized(address caller) private {
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunUnauthorized.selector, runId, caller));
    }

    function _expectUnknown(uint64 unknown) private {
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunUnknown.selector, unknown));
    }

    function _isOpen() private view returns (bool open) {
        (, open,,) = runs.admissionOf(runId);
    }

    // --------------------------------------------------------------- create run

    function testFuzz_createRun_reverts_whenAParameterIsMissing(uint256 which) public {
        bytes32[7] memory names = [
            bytes32("trainer"),
            "orchestrator",
            "baseModelHash",
            "taskSetHash",
            "recipeHash",
            "calibrationHash",
            "pricePerUnit"
        ];
        which = bound(which, 0, 6);
        IRunRegistry.RunConfig memory config = _config();
        if (which == 0) config.trainer = address(0);
        if (which == 1) config.orchestrator = address(0);
        if (which == 2) config.baseModelHash = 0;
        if (which == 3) config.taskSetHash = 0;
        if (which == 4) config.recipeHash = 0;
        if (which == 5) config.calibrationHash = 0;
        if (which == 6) config.terms.pricePerUnit = 0;
        _expectInvalid(names[which]);
        _create(config);
    }

    function testFuzz_createRun_reverts_whenSlashExceedsTheWhole(uint32 ppm) public {
        IRunRegistry.RunConfig memory config = _config();
        // Often one millionth too many.
        config.terms.exactFraudPpm = uint32(ppm % 2 == 0 ? PPM + 1 : bound(ppm, PPM + 1, type(uint32).max));
        _expectInvalid("exactFraudPpm");
        _create(config);
    }

    function testFuzz_createRun_reverts_whenAStatisticalFraudCostsMore(uint32 statistical, uint32 exact) public {
        IRunRegistry.RunConfig memory config = _config();
        config.terms.exactFraudPpm = uint32(bound(exact, 0, PPM - 1));
        config.terms.fraudPpm = uint32(bound(statistical, config.terms.exactFraudPpm + 1, type(uint32).max));
        _expectInvalid("fraudPpm");
        _create(config);
    }

    /// @dev More signers than a run can ever seat: one bit stands for each.
    function testFuzz_createRun_reverts_whenQuorumCannotBeMet(uint8 quorum) public {
        uint256 seats = runs.MAX_SEATS();
        IRunRegistry.RunConfig memory config = _config();
        if (quorum % 3 == 0) config.terms.quorum = 0;
        else config.terms.quorum = uint8(quorum % 3 == 1 ? seats + 1 : bound(quorum, seats + 1, 255));
        vm.expectRevert(
            abi.encodeWithSelector(IRunRegistryErrors.RunInvalidQuorum.selector, config.terms.quorum, seats)
        );
        _create(config);
    }

    function testFuzz_createRun_reverts_whenAnInvitedOneIsZero(uint256 i) public {
        IRunRegistry.RunConfig memory config = _config();
        config.validators[i % 5] = address(0);
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunInvalidValidator.selector, 2, address(0)));
        _create(config);
    }

    function _boundConfig(IRunRegistry.RunConfig memory config) private view {
        vm.assume(config.trainer != address(0) && config.orchestrator != address(0));
        vm.assume(config.baseModelHash != 0 && config.taskSetHash != 0);
        vm.assume(config.recipeHash != 0 && config.calibrationHash != 0);
        config.terms.pricePerUnit = uint88(bound(config.terms.pricePerUnit, 1, type(uint88).max));
        config.terms.exactFraudPpm = uint32(bound(config.terms.exactFraudPpm, 0, PPM));
        config.terms.fraudPpm = uint32(bound(config.terms.fraudPpm, 0, config.terms.exactFraudPpm));
        config.terms.quorum = uint8(bound(config.terms.quorum, 1, runs.MAX_SEATS()));
        config.validators = _config().validators;
    }

    function testFuzz_createRun_recordsEverything(IRunRegistry.RunConfig memory config) public {
        _boundConfig(config);
        vm.expectEmit(address(runs));
        emit IRunRegistryEvents.RunCreated(2, owner, config);
        uint64 created = _create(config);

        assertEq(created, 2, "ids count up");
        assertEq(runs.runCount(), 2, "count");
        assertEq(runs.ownerOf(created), owner, "owner");
        config.validators = new address[](0); // nobody sits yet
        assertEq(keccak256(abi.encode(runs.configOf(created))), keccak256(abi.encode(config)), "config");
    }

    function testFuzz_createRun_numbersItsTermsFromOne(IRunRegistry.RunConfig memory config) public {
        _boundConfig(config);
        uint64 created = _create(config);
        (IRunRegistry.Terms memory terms, uint32 number) = runs.termsOf(created);
        assertEq(number, 1, "number");
        assertEq(keccak256(abi.encode(terms)), keccak256(abi.encode(config.terms)), "terms");
        assertEq(keccak256(abi.encode(runs.termsAt(created, 1))), keccak256(abi.encode(terms)), "by number");
        runs.requireTerms(created, 1);
    }

    function testFuzz_createRun_opensARun(IRunRegistry.RunConfig memory config) public {
        _boundConfig(config);
        uint64 created = _create(config);
        (address orchestrator_, bool open, uint32 terms, uint88 price) = runs.admissionOf(created);
        assertEq(orchestrator_, config.orchestrator, "orchestrator");
        assertEq(price, config.terms.pricePerUnit, "price");
        assertEq(terms, 1, "terms");
        assertTrue(open, "open");
        assertEq(runs.slashPausedUntil(created), 0, "slashing was never paused");
        assertEq(runs.closedAt(created), 0, "not closed");
        assertFalse(runs.isPaused(created), "not paused");
    }

    function testFuzz_createRun_isOwnedByItsCaller(address caller) public {
        IRunRegistry.RunConfig memory config = _config();
        vm.prank(caller);
        assertEq(runs.ownerOf(runs.createRun(config)), caller, "owner");
    }

    /// @dev Nobody validates who did not agree to.
    function test_createRun_invites_andSeatsNobody() public {
        IRunRegistry.RunConfig memory config = _config();
        vm.recordLogs();
        uint64 created = _create(config);
        Vm.Log[] memory logs = vm.getRecordedLogs();
        assertEq(logs.length, 6, "the run and its five invitations");
        for (uint256 i = 0; i < 5; ++i) {
            assertEq(logs[i + 1].topics[0], IRunRegistryEvents.ValidatorInvited.selector, "event");
            assertEq(logs[i + 1].topics[2], bytes32(uint256(uint160(validators[i]))), "who");
            assertEq(logs[i + 1].data, abi.encode(true), "invited");
            assertTrue(runs.isInvited(created, validators[i]), "is invited");
            assertFalse(runs.isValidator(created, validators[i]), "is no validator");
        }
        assertEq(runs.everSeated(created, type(uint256).max).length, 0, "no seat is taken");
    }

    function test_createRun_touchesNoStake() public {
        uint64 created = _create(_config());
        for (uint256 i = 0; i < 5; ++i) {
            assertEq(vault.activeStake(created, validators[i]), 0, "stake in the new run");
            assertEq(vault.activeStake(runId, validators[i]), REQUIRED_VALIDATOR_STAKE, "stake in the first run");
        }
    }

    function testFuzz_views_revert_whenRunIsUnknown(uint64 unknown) public view {
        vm.assume(unknown != runId);
        bytes[11] memory calls = [
            abi.encodeCall(runs.configOf, (unknown)),
            abi.encodeCall(runs.termsOf, (unknown)),
            abi.encodeCall(runs.requireTerms, (unknown, 1)),
            abi.encodeCall(runs.admissionOf, (unknown)),
            abi.encodeCall(runs.proposedChange, (unknown)),
            abi.encodeCall(runs.ownerOf, (unknown)),
            abi.encodeCall(runs.isPaused, (unknown)),
            abi.encodeCall(runs.closedAt, (unknown)),
            abi.encodeCall(runs.validatorsOf, (unknown)),
            abi.encodeCall(runs.quorumAmong, (unknown, 1, new address[](0))),
            abi.encodeCall(runs.latestVersion, (unknown))
        ];
        for (uint256 i = 0; i < calls.length; ++i) {
            (bool success, bytes memory returned) = address(runs).staticcall(calls[i]);
            assertFalse(success, "reverts");
            assertEq(returned, abi.encodeWithSelector(IRunRegistryErrors.RunUnknown.selector, unknown), "why");
        }
    }

    /// @dev Run 0 is the jurors' bench, and no run.
    function test_createRun_neverMakesTheBench() public {
        assertEq(runId, 1, "runs count from 1");
        _expectUnknown(0);
        runs.ownerOf(0);
    }

    function test_constructor_keepsItsParameters() public view {
        assertEq(address(runs.vault()), address(vault), "vault");
        assertEq(address(runs.workers()), address(workers), "workers");
        assertEq(runs.faults(), address(faults), "fault court");
        assertEq(runs.requiredValidatorStake(), REQUIRED_VALIDATOR_STAKE, "required stake");
        assertEq(runs.changeDelay(), CHANGE_DELAY, "delay");
        assertEq(runs.slashPause(), SLASH_PAUSE, "pause of slashing");
        assertEq(runs.slashCooldown(), SLASH_COOLDOWN, "time between pauses");
    }

    // --------------------------------------------------------------- checkpoints

    function _manifest(uint32 version) private pure returns (bytes32) {
        return keccak256(abi.encode("manifest", version));
    }

    function _publish(uint32 version) private {
        vm.prank(trainer);
        runs.publishCheckpoint(runId, version, _manifest(version));
    }

    function testFuzz_publishCheckpoint_reverts_whenNotTheTrainer(address caller) public {
        vm.assume(caller != trainer);
        _expectUnauthorized(caller);
        vm.prank(caller);
        runs.publishCheckpoint(runId, 0, _manifest(0));
    }

    function testFuzz_publishCheckpoint_reverts_whenRunIsUnknown(uint64 unknown) public {
        vm.assume(unknown != runId);
        _expectUnknown(unknown);
        vm.prank(trainer);
        runs.publishCheckpoint(unknown, 0, _manifest(0));
    }

    function test_publishCheckpoint_reverts_whenRootIsZero() public {
        _expectInvalid("manifestRoot");
        vm.prank(trainer);
        runs.publishCheckpoint(runId, 0, 0);
    }

    function testFuzz_publishCheckpoint_reverts_whenVersionDoesNotGrow(uint32 latest, uint32 version) public {
        latest = uint32(bound(latest, 0, runs.MAX_VERSION_STEP()));
        version = version % 2 == 0 ? latest : uint32(bound(version, 0, latest));
        _publish(latest);
        vm.expectRevert(
            abi.encodeWithSelector(IRunRegistryErrors.RunVersionNotIncreasing.selector, runId, version, latest)
        );
        _publish(version);
    }

    function test_publishCheckpoint_reverts_whenTheRunIsClosed() public {
        _close();
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunEnded.selector, runId));
        _publish(0);
    }

    /// @dev Who stole a trainer key could else use up all numbers at once; after a rotation nobody could publish any more.
    function testFuzz_publishCheckpoint_reverts_whenVersionIsTooFar(uint256 latest, uint256 version, bool first)
        public
    {
        uint256 most = runs.MAX_VERSION_STEP();
        latest = first ? 0 : bound(latest, 0, most);
        if (!first) _publish(uint32(latest));
        most += latest;
        version = version % 2 == 0 ? type(uint32).max : bound(version, most + 1, type(uint32).max);
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunVersionTooFar.selector, runId, version, latest));
        _publish(uint32(version));
        _publish(uint32(most));
    }

    function testFuzz_publishCheckpoint_works_whileSubmissionsArePaused(uint32 version) public {
        version = uint32(bound(version, 0, runs.MAX_VERSION_STEP()));
        vm.prank(owner);
        runs.setSubmissionsPaused(runId, true);
        _publish(version);
        assertEq(runs.checkpointOf(runId, version).manifestRoot, _manifest(version), "root");
    }

    function test_latestVersion_doesNotExist_beforeTheFirst() public view {
        (uint32 latest, bool exists) = runs.latestVersion(runId);
        assertEq(latest, 0, "no version");
        assertFalse(exists, "none yet");
    }

    function testFuzz_publishCheckpoint_records(uint32 version, uint32 later) public {
        version = uint32(bound(version, 0, runs.MAX_VERSION_STEP()));
        later = uint32(bound(later, version + 1, version + runs.MAX_VERSION_STEP()));
        _publish(version);
        uint256 firstBlock = block.number;
        vm.roll(firstBlock + 7);
        vm.expectEmit(address(runs));
        emit IRunRegistryEvents.CheckpointPublished(runId, later, _manifest(later));
        _publish(later);
        (uint32 latest, bool exists) = runs.latestVersion(runId);
        assertEq(latest, later, "latest");
        assertTrue(exists, "exists");
        assertEq(runs.checkpointOf(runId, version).manifestRoot, _manifest(version), "root");
        assertEq(runs.checkpointOf(runId, version).blockNumber, firstBlock, "block");
        assertEq(runs.checkpointOf(runId, later).manifestRoot, _manifest(later), "later root");
        assertEq(runs.checkpointOf(runId, later).blockNumber, firstBlock + 7, "later block");
    }

    function testFuzz_checkpointOf_isZero_whenNotPublished(uint32 version) public {
        version = uint32(bound(version, 0, runs.MAX_VERSION_STEP() - 1));
        _publish(version + 1);
        assertEq(runs.checkpointOf(runId, version).manifestRoot, 0, "root");
        assertEq(runs.checkpointOf(runId, version).blockNumber, 0, "block");
    }

    // --------------------------------------------------------------------- pause

    function testFuzz_setSubmissionsPaused_reverts_whenNotTheOwner(address caller, bool paused) public {
        vm.assume(caller != owner);
        _expectUnauthorized(caller);
        vm.prank(caller);
        runs.setSubmissionsPaused(runId, paused);
    }

    function testFuzz_setSubmissionsPaused_reverts_whenRunIsUnknown(uint64 unknown, bool paused) public {
        vm.assume(unknown != runId);
        _expectUnknown(unknown);
        vm.prank(owner);
        runs.setSubmissionsPaused(unknown, paused);
    }

    function testFuzz_setSubmissionsPaused_sets(bool paused) public {
        vm.expectEmit(address(runs));
        emit IRunRegistryEvents.SubmissionsPaused(runId, paused);
        vm.prank(owner);
        runs.setSubmissionsPaused(runId, paused);
        assertEq(runs.isPaused(runId), paused, "paused");
        assertEq(_isOpen(), !paused, "open");
    }

    function test_setSubmissionsPaused_resumes() public {
        vm.startPrank(owner);
        runs.setSubmissionsPaused(runId, true);
        runs.setSubmissionsPaused(runId, false);
        assertTrue(_isOpen(), "open");
    }

    // --------------------------------------------------------------------- close

    function _close() private {
        vm.prank(owner);
        runs.closeRun(runId);
    }

    function testFuzz_closeRun_reverts_whenNotTheOwner(address caller) public {
        vm.assume(caller != owner);
        _expectUnauthorized(caller);
        vm.prank(caller);
        runs.closeRun(runId);
    }

    function testFuzz_closeRun_endsARun(uint256 at, bool paused) public {
        vm.warp(bound(at, 1, type(uint40).max));
        vm.prank(owner);
        runs.setSubmissionsPaused(runId, paused);
        vm.expectEmit(address(runs));
        emit IRunRegistryEvents.RunClosed(runId);
        _close();
        assertEq(runs.closedAt(runId), block.timestamp, "closed at");
        assertFalse(_isOpen(), "takes nothing more");
    }

    function testFuzz_closeRun_acceptsNobodysTerms(uint32 number) public {
        _close();
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunEnded.selector, runId));
        runs.requireTerms(runId, number);
    }

    /// @dev Nothing that an owner can do is left, reopening above all.
    function test_closeRun_isForGood() public {
        _close();
        IRunRegistry.Terms memory terms = _config().terms;
        bytes[10] memory calls = [
            abi.encodeCall(runs.closeRun, (runId)),
            abi.encodeCall(runs.setSubmissionsPaused, (runId, false)),
            abi.encodeCall(runs.setSubmissionsPaused, (runId, true)),
            abi.encodeCall(runs.invite, (runId, stranger, true)),
            abi.encodeCall(runs.invite, (runId, validators[0], false)),
            abi.encodeCall(runs.dismiss, (runId, validators[0])),
            abi.encodeCall(runs.rotateTrainer, (runId, trainer, stranger)),
            abi.encodeCall(runs.rotateOrchestrator, (runId, orchestrator, stranger)),
            abi.encodeCall(runs.proposeChange, (runId, terms)),
            abi.encodeCall(runs.cancelChange, (runId))
        ];
        for (uint256 i = 0; i < calls.length; ++i) {
            vm.prank(owner);
            (bool success, bytes memory returned) = address(runs).call(calls[i]);
            assertFalse(success, "reverts");
            assertEq(returned, abi.encodeWithSelector(IRunRegistryErrors.RunEnded.selector, runId), "why");
        }
    }

    function test_closeRun_concernsOneRun() public {
        uint64 other = _create(_config());
        _close();
        (, bool open,,) = runs.admissionOf(other);
        assertTrue(open, "the other run");
    }
}
