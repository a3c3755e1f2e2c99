// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {Vm} from "forge-std/Vm.sol";

import {IRunRegistry, IRunRegistryErrors, IRunRegistryEvents} from "../../src/interfaces/IRunRegistry.sol";
import {BaseTest} from "../BaseTest.sol";

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

    function _expectInvalidValidator(address validator) private {
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunInvalidValidator.selector, validator));
    }

    function _expectInvalidQuorum(uint256 quorum, uint256 count) private {
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunInvalidQuorum.selector, quorum, count));
    }

    function _expectUnauthorized(address caller) private {
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunUnauthorized.selector, runId, caller));
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
        config.terms.exactFraudPpm = uint32(bound(ppm, PPM + 1, type(uint32).max));
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

    function testFuzz_createRun_reverts_whenQuorumCannotBeMet(uint8 quorum) public {
        // Often one more than there are validators.
        quorum = quorum % 2 == 0 ? 6 : uint8(bound(quorum, 6, 255));
        IRunRegistry.RunConfig memory config = _config();
        config.terms.quorum = quorum;
        _expectInvalidQuorum(quorum, 5);
        _create(config);
    }

    function test_createRun_reverts_whenQuorumIsZero() public {
        IRunRegistry.RunConfig memory config = _config();
        config.terms.quorum = 0;
        _expectInvalidQuorum(0, 5);
        _create(config);
    }

    function testFuzz_createRun_reverts_whenAValidatorIsListedTwice(uint256 i, uint256 j) public {
        i = bound(i, 0, 4);
        j = bound(j, 0, 4);
        vm.assume(i != j);
        IRunRegistry.RunConfig memory config = _config();
        config.validators[i] = config.validators[j];
        _expectInvalidValidator(config.validators[j]);
        _create(config);
    }

    function testFuzz_createRun_reverts_whenAValidatorIsNotStaked(uint256 i, uint256 stake) public {
        i = bound(i, 0, 4);
        stake = bound(stake, 0, REQUIRED_VALIDATOR_STAKE - 1);
        if (stake != 0) _deposit(stranger, stake);
        IRunRegistry.RunConfig memory config = _config();
        config.validators[i] = stranger;
        _expectInvalidValidator(stranger);
        _create(config);
    }

    function test_createRun_reverts_whenAValidatorIsZero() public {
        IRunRegistry.RunConfig memory config = _config();
        config.validators[2] = address(0);
        _expectInvalidValidator(address(0));
        _create(config);
    }

    function testFuzz_createRun_reverts_whenNoSeatIsLeft(uint256 count) public {
        uint256 seats = runs.MAX_SEATS();
        IRunRegistry.RunConfig memory config = _crowdedConfig(bound(count, seats + 1, seats + 5));
        _expectInvalidValidator(config.validators[seats]);
        _create(config);
    }

    function test_createRun_seatsAsManyAsThereAreBits() public {
        uint64 crowded = _create(_crowdedConfig(runs.MAX_SEATS()));
        (, uint88[] memory bits) = runs.validatorsOf(crowded);
        uint88 all;
        for (uint256 i = 0; i < bits.length; ++i) {
            all |= bits[i];
        }
        assertEq(all, type(uint88).max, "every bit");
    }

    function _stakedAccount(uint256 i) private returns (address account) {
        account = makeAddr(string.concat("crowd ", vm.toString(i)));
        if (vault.activeStake(account) == 0) {
            vm.prank(deployer);
            token.approve(address(vault), REQUIRED_VALIDATOR_STAKE);
            vm.prank(deployer);
            vault.deposit(account, REQUIRED_VALIDATOR_STAKE);
        }
    }

    function _crowdedConfig(uint256 count) private returns (IRunRegistry.RunConfig memory config) {
        config = _config();
        config.validators = new address[](count);
        for (uint256 i = 0; i < count; ++i) {
            config.validators[i] = _stakedAccount(i);
        }
    }

    function testFuzz_createRun_recordsEverything(IRunRegistry.RunConfig memory config) public {
        vm.assume(config.trainer != address(0) && config.orchestrator != address(0));
        vm.assume(config.baseModelHash != 0 && config.taskSetHash != 0);
        vm.assume(config.recipeHash != 0 && config.calibrationHash != 0);
        config.terms.pricePerUnit = uint88(bound(config.terms.pricePerUnit, 1, type(uint88).max));
        config.terms.exactFraudPpm = uint32(bound(config.terms.exactFraudPpm, 0, PPM));
        config.terms.fraudPpm = uint32(bound(config.terms.fraudPpm, 0, config.terms.exactFraudPpm));
        config.terms.quorum = uint8(bound(config.terms.quorum, 1, 5));
        config.validators = _config().validators;

        vm.expectEmit(address(runs));
        emit IRunRegistryEvents.RunCreated(2, owner, config);
        uint64 created = _create(config);

        assertEq(created, 2, "ids count up");
        assertEq(runs.runCount(), 2, "count");
        assertEq(keccak256(abi.encode(runs.configOf(created))), keccak256(abi.encode(config)), "config");
        assertEq(keccak256(abi.encode(runs.termsOf(created))), keccak256(abi.encode(config.terms)), "terms");
        assertEq(runs.ownerOf(created), owner, "owner");
        _assertOpenFor(created, config);
    }

    function _assertOpenFor(uint64 created, IRunRegistry.RunConfig memory config) private view {
        (address orchestrator_, uint88 price, bool open) = runs.admissionOf(created);
        assertEq(orchestrator_, config.orchestrator, "orchestrator");
        assertEq(price, config.terms.pricePerUnit, "price");
        assertTrue(open, "open");
        (uint256 fraudPpm, uint256 exactFraudPpm, uint256 pausedUntil) = runs.slashesOf(created);
        assertEq(fraudPpm, config.terms.fraudPpm, "statistical fraud");
        assertEq(exactFraudPpm, config.terms.exactFraudPpm, "exact fraud");
        assertEq(pausedUntil, 0, "slashing was never paused");
        assertEq(runs.closedAt(created), 0, "not closed");
        assertFalse(runs.isPaused(created), "not paused");
    }

    function test_createRun_seatsValidatorsInOrder() public {
        vm.recordLogs();
        uint64 created = _create(_config());
        Vm.Log[] memory logs = vm.getRecordedLogs();
        assertEq(logs.length, 6, "the run and its five seats");
        for (uint256 i = 0; i < 5; ++i) {
            assertEq(logs[i + 1].topics[0], IRunRegistryEvents.ValidatorSeated.selector, "event");
            assertEq(logs[i + 1].topics[2], bytes32(uint256(uint160(validators[i]))), "who");
            assertEq(logs[i + 1].data, abi.encode(1 << i), "bit");
            assertEq(runs.seatBitOf(created, validators[i]), 1 << i, "seat");
            assertTrue(runs.isValidator(created, validators[i]), "validator");
        }
    }

    function testFuzz_views_revert_whenRunIsUnknown(uint64 unknown) public view {
        vm.assume(unknown != runId);
        bytes[11] memory calls = [
            abi.encodeCall(runs.configOf, (unknown)),
            abi.encodeCall(runs.termsOf, (unknown)),
            abi.encodeCall(runs.slashesOf, (unknown)),
            abi.encodeCall(runs.admissionOf, (unknown)),
            abi.encodeCall(runs.proposedChange, (unknown)),
            abi.encodeCall(runs.ownerOf, (unknown)),
            abi.encodeCall(runs.isPaused, (unknown)),
            abi.encodeCall(runs.closedAt, (unknown)),
            abi.encodeCall(runs.validatorsOf, (unknown)),
            abi.encodeCall(runs.quorumAmong, (unknown, new address[](0))),
            abi.encodeCall(runs.latestVersion, (unknown))
        ];
        for (uint256 i = 0; i < calls.length; ++i) {
            (bool success, bytes memory returned) = address(runs).staticcall(calls[i]);
            assertFalse(success, "reverts");
            assertEq(returned, abi.encodeWithSelector(IRunRegistryErrors.RunUnknown.selector, unknown), "why");
        }
    }

    function test_constructor_keepsItsParameters() public view {
        assertEq(address(runs.vault()), address(vault), "vault");
        assertEq(runs.faults(), address(faults), "fault court");
        assertEq(runs.requiredValidatorStake(), REQUIRED_VALIDATOR_STAKE, "required stake");
        assertEq(runs.changeDelay(), CHANGE_DELAY, "delay");
        assertEq(runs.slashPause(), SLASH_PAUSE, "pause of slashing");
        assertEq(runs.slashCooldown(), SLASH_COOLDOWN, "time between pauses");
    }

    // --------------------------------------------------------------- checkpoints

    function _publish(uint32 version) private {
        vm.prank(trainer);
        runs.publishCheckpoint(runId, version, keccak256(abi.encode("manifest", version)));
    }

    function testFuzz_publishCheckpoint_reverts_whenNotTheTrainer(address caller) public {
        vm.assume(caller != trainer);
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunUnauthorized.selector, runId, caller));
        vm.prank(caller);
        runs.publishCheckpoint(runId, 0, keccak256("manifest"));
    }

    function testFuzz_publishCheckpoint_reverts_whenRunIsUnknown(uint64 unknown) public {
        vm.assume(unknown != runId);
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunUnknown.selector, unknown));
        vm.prank(trainer);
        runs.publishCheckpoint(unknown, 0, keccak256("manifest"));
    }

    function test_publishCheckpoint_reverts_whenRootIsZero() public {
        _expectInvalid("manifestRoot");
        vm.prank(trainer);
        runs.publishCheckpoint(runId, 0, 0);
    }

    function testFuzz_publishCheckpoint_reverts_whenVersionDoesNotGrow(uint32 latest, uint32 version) public {
        version = uint32(bound(version, 0, latest));
        _publish(latest);
        vm.expectRevert(
            abi.encodeWithSelector(IRunRegistryErrors.RunVersionNotIncreasing.selector, runId, version, latest)
        );
        _publish(version);
    }

    function testFuzz_publishCheckpoint_records(uint32 version, uint32 later) public {
        version = uint32(bound(version, 0, type(uint32).max - 1));
        later = uint32(bound(later, uint256(version) + 1, type(uint32).max));
        (, bool exists) = runs.latestVersion(runId);
        assertFalse(exists, "none yet");
        _publish(version);
        vm.expectEmit(address(runs));
        emit IRunRegistryEvents.CheckpointPublished(runId, later, keccak256(abi.encode("manifest", later)));
        _publish(later);
        uint32 latest;
        (latest, exists) = runs.latestVersion(runId);
        assertEq(latest, later, "latest");
        assertTrue(exists, "exists");
        assertEq(runs.checkpointOf(runId, version).manifestRoot, keccak256(abi.encode("manifest", version)), "root");
        assertEq(runs.checkpointOf(runId, later).blockNumber, block.number, "block");
        assertEq(runs.checkpointOf(runId, later).beacon, 0, "no beacon yet");
    }

    function test_publishCheckpoint_reverts_whenTheRunIsClosed() public {
        _close();
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunEnded.selector, runId));
        _publish(0);
    }

    // -------------------------------------------------------------------- beacon

    function testFuzz_recordBeacon_reverts_whenVersionIsUnknown(uint64 run, uint32 version) public {
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunVersionUnknown.selector, run, version));
        runs.recordBeacon(run, version);
    }

    function testFuzz_recordBeacon_reverts_inTheSameBlockAndTooLate(uint256 blocks) public {
        _publish(3);
        uint256 published = block.number;
        blocks = bound(blocks, 257, 100_000);
        if (blocks % 2 == 0) blocks = 0;
        vm.roll(published + blocks);
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunBeaconUnavailable.selector, runId, 3, published));
        runs.recordBeacon(runId, 3);
    }

    function testFuzz_recordBeacon_storesTheBlockHash(uint256 blocks, bytes32 hash_) public {
        vm.assume(hash_ != 0);
        _publish(3);
        uint256 published = block.number;
        vm.roll(published + bound(blocks, 1, 256));
        vm.setBlockhash(published, hash_);
        vm.expectEmit(address(runs));
        emit IRunRegistryEvents.BeaconRecorded(runId, 3, hash_);
        runs.recordBeacon(runId, 3);
        assertEq(runs.checkpointOf(runId, 3).beacon, hash_, "beacon");
    }

    function test_recordBeacon_doesNothing_theSecondTime() public {
        _publish(3);
        vm.roll(block.number + 1);
        runs.recordBeacon(runId, 3);
        bytes32 beacon = runs.checkpointOf(runId, 3).beacon;
        vm.roll(block.number + 1000);
        runs.recordBeacon(runId, 3);
        assertEq(runs.checkpointOf(runId, 3).beacon, beacon, "unchanged");
    }

    // --------------------------------------------------------------------- pause

    function testFuzz_setSubmissionsPaused_reverts_whenNotTheOwner(address caller, bool paused) public {
        vm.assume(caller != owner);
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunUnauthorized.selector, runId, caller));
        vm.prank(caller);
        runs.setSubmissionsPaused(runId, paused);
    }

    function testFuzz_setSubmissionsPaused_sets(bool paused) public {
        vm.expectEmit(address(runs));
        emit IRunRegistryEvents.SubmissionsPaused(runId, paused);
        vm.prank(owner);
        runs.setSubmissionsPaused(runId, paused);
        assertEq(runs.isPaused(runId), paused, "paused");
        (,, bool open) = runs.admissionOf(runId);
        assertEq(open, !paused, "open");
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
        (,, bool open) = runs.admissionOf(runId);
        assertFalse(open, "takes nothing more");
    }

    /// @dev Nothing that an owner can do is left, reopening above all.
    function test_closeRun_isForGood() public {
        _close();
        IRunRegistry.Terms memory terms = _config().terms;
        bytes[9] memory calls = [
            abi.encodeCall(runs.closeRun, (runId)),
            abi.encodeCall(runs.setSubmissionsPaused, (runId, false)),
            abi.encodeCall(runs.seatValidator, (runId, stranger)),
            abi.encodeCall(runs.rotateValidator, (runId, validators[0], stranger)),
            abi.encodeCall(runs.rotateTrainer, (runId, trainer, stranger)),
            abi.encodeCall(runs.rotateOrchestrator, (runId, orchestrator, stranger)),
            abi.encodeCall(runs.proposeChange, (runId, terms)),
            abi.encodeCall(runs.cancelChange, (runId)),
            abi.encodeCall(runs.setSubmissionsPaused, (runId, true))
        ];
        for (uint256 i = 0; i < calls.length; ++i) {
            vm.prank(owner);
            (bool success, bytes memory returned) = address(runs).call(calls[i]);
            assertFalse(success, "reverts");
            assertEq(returned, abi.encodeWithSelector(IRunRegistryErrors.RunEnded.selector, runId), "why");
        }
    }
}
