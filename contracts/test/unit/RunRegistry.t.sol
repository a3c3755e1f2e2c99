// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

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
        if (which == 6) config.pricePerUnit = 0;
        _expectInvalid(names[which]);
        _create(config);
    }

    function testFuzz_createRun_reverts_whenSlashExceedsTheWhole(uint32 ppm) public {
        IRunRegistry.RunConfig memory config = _config();
        config.fraudPpm = uint32(bound(ppm, PPM + 1, type(uint32).max));
        _expectInvalid("fraudPpm");
        _create(config);
    }

    function testFuzz_createRun_reverts_whenQuorumCannotBeMet(uint8 quorum) public {
        vm.assume(quorum == 0 || quorum > 4);
        IRunRegistry.RunConfig memory config = _config();
        config.quorum = quorum;
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunInvalidQuorum.selector, quorum, 4));
        _create(config);
    }

    function testFuzz_createRun_reverts_whenAValidatorIsListedTwice(uint256 i, uint256 j) public {
        i = bound(i, 0, 3);
        j = bound(j, 0, 3);
        vm.assume(i != j);
        IRunRegistry.RunConfig memory config = _config();
        config.validators[i] = config.validators[j];
        _expectInvalidValidator(config.validators[j]);
        _create(config);
    }

    function testFuzz_createRun_reverts_whenAValidatorIsNotStaked(uint256 i, uint256 stake) public {
        i = bound(i, 0, 3);
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
        assertEq(runs.seatsOf(crowded), type(uint88).max, "every bit");
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
        vm.assume(config.trainer != address(0) && config.orchestrator != address(0) && config.pricePerUnit != 0);
        vm.assume(config.baseModelHash != 0 && config.taskSetHash != 0);
        vm.assume(config.recipeHash != 0 && config.calibrationHash != 0);
        config.fraudPpm = uint32(bound(config.fraudPpm, 0, PPM));
        config.quorum = uint8(bound(config.quorum, 1, 4));
        config.validators = _config().validators;

        vm.expectEmit(address(runs));
        emit IRunRegistryEvents.RunCreated(2, owner, config);
        uint64 created = _create(config);

        assertEq(created, 2, "ids count up");
        assertEq(runs.runCount(), 2, "count");
        assertEq(keccak256(abi.encode(runs.configOf(created))), keccak256(abi.encode(config)), "config");
        assertEq(runs.ownerOf(created), owner, "owner");
        assertEq(runs.priceOf(created), config.pricePerUnit, "price");
        (address orchestrator_, uint32 fraudPpm, uint8 quorum, bool paused) = runs.termsOf(created);
        assertEq(orchestrator_, config.orchestrator, "orchestrator");
        assertEq(fraudPpm, config.fraudPpm, "slash");
        assertEq(quorum, config.quorum, "quorum");
        assertFalse(paused, "open");
    }

    function test_createRun_seatsValidatorsInOrder() public view {
        for (uint256 i = 0; i < 4; ++i) {
            (uint8 seat, bool seated) = runs.seatOf(runId, validators[i]);
            assertEq(seat, i, "seat");
            assertTrue(seated, "seated");
            assertTrue(runs.isValidator(runId, validators[i]), "validator");
        }
        assertEq(runs.seatsOf(runId), 15, "four bits");
    }

    function testFuzz_views_revert_whenRunIsUnknown(uint64 unknown) public {
        vm.assume(unknown != runId);
        bytes memory expected = abi.encodeWithSelector(IRunRegistryErrors.RunUnknown.selector, unknown);
        vm.expectRevert(expected);
        runs.configOf(unknown);
        vm.expectRevert(expected);
        runs.termsOf(unknown);
        vm.expectRevert(expected);
        runs.priceOf(unknown);
        vm.expectRevert(expected);
        runs.ownerOf(unknown);
        vm.expectRevert(expected);
        runs.isPaused(unknown);
        vm.expectRevert(expected);
        runs.seatsOf(unknown);
        vm.expectRevert(expected);
        runs.latestVersion(unknown);
    }

    // ---------------------------------------------------------- rotate validator

    function testFuzz_rotateValidator_reverts_whenNotTheOwner(address caller) public {
        vm.assume(caller != owner);
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunUnauthorized.selector, runId, caller));
        vm.prank(caller);
        runs.rotateValidator(runId, validators[0], stranger);
    }

    function testFuzz_rotateValidator_reverts_whenOldIsNotSeated(address old) public {
        vm.assume(!runs.isValidator(runId, old));
        _deposit(stranger, REQUIRED_VALIDATOR_STAKE);
        _expectInvalidValidator(old);
        vm.prank(owner);
        runs.rotateValidator(runId, old, stranger);
    }

    function testFuzz_rotateValidator_reverts_whenNewIsSeated(uint256 i, uint256 j) public {
        i = bound(i, 0, 3);
        j = bound(j, 0, 3);
        vm.assume(i != j);
        _expectInvalidValidator(validators[j]);
        vm.prank(owner);
        runs.rotateValidator(runId, validators[i], validators[j]);
    }

    function testFuzz_rotateValidator_reverts_whenNewIsNotStaked(uint256 stake) public {
        stake = bound(stake, 0, REQUIRED_VALIDATOR_STAKE - 1);
        if (stake != 0) _deposit(stranger, stake);
        _expectInvalidValidator(stranger);
        vm.prank(owner);
        runs.rotateValidator(runId, validators[0], stranger);
    }

    function testFuzz_rotateValidator_takesTheOldKeysPowerAway(uint256 i) public {
        i = bound(i, 0, 3);
        _deposit(stranger, REQUIRED_VALIDATOR_STAKE);
        vm.expectEmit(address(runs));
        emit IRunRegistryEvents.ValidatorRotated(runId, validators[i], stranger);
        vm.prank(owner);
        runs.rotateValidator(runId, validators[i], stranger);
        assertFalse(runs.isValidator(runId, validators[i]), "old");
        assertTrue(runs.isValidator(runId, stranger), "new");
        assertEq(runs.configOf(runId).validators[i], stranger, "listed");
        (uint8 seat,) = runs.seatOf(runId, stranger);
        assertEq(seat, 4, "a seat of its own");
        assertEq(runs.seatsOf(runId), 31 ^ (1 << i), "seats");
    }

    function testFuzz_rotateValidator_keepsSeats_whenAValidatorReturns(uint256 i) public {
        i = bound(i, 0, 3);
        _deposit(stranger, REQUIRED_VALIDATOR_STAKE);
        vm.startPrank(owner);
        runs.rotateValidator(runId, validators[i], stranger);
        runs.rotateValidator(runId, stranger, validators[i]);
        (uint8 seat, bool seated) = runs.seatOf(runId, validators[i]);
        assertEq(seat, i, "the same seat");
        assertTrue(seated, "seated");
        assertEq(runs.seatsOf(runId), 15, "seats");
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
    }
}
