// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IRunRegistryErrors, IRunRegistryEvents} from "../../src/interfaces/IRunRegistry.sol";
import {BaseTest} from "../BaseTest.sol";

contract RunRegistrySeatsTest is BaseTest {
    function setUp() public override {
        super.setUp();
        runId = _createRun();
        vm.warp(1_000_000);
    }

    function _expectInvalidValidator(address validator) private {
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunInvalidValidator.selector, validator));
    }

    function _expectUnauthorized(address caller) private {
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunUnauthorized.selector, runId, caller));
    }

    function _seat(address validator) private {
        vm.prank(owner);
        runs.seatValidator(runId, validator);
    }

    function _rotate(address old, address next) private {
        vm.prank(owner);
        runs.rotateValidator(runId, old, next);
    }

    function _unstake(address validator, uint256 amount) private {
        vm.prank(validator);
        vault.requestUnbond(amount);
    }

    /// @dev Asserts that the list of validators holds `account` as often as it should.
    function _assertListed(address account, bool listed) private view {
        (address[] memory accounts, uint88[] memory bits) = runs.validatorsOf(runId);
        uint256 found;
        for (uint256 i = 0; i < accounts.length; ++i) {
            if (accounts[i] != account) continue;
            ++found;
            assertEq(bits[i], runs.seatBitOf(runId, account), "listed with its bit");
        }
        assertEq(found, listed ? 1 : 0, "listed");
        assertEq(runs.isValidator(runId, account), listed, "validates");
    }

    // ------------------------------------------------------------ seat validator

    function testFuzz_seatValidator_reverts_whenNotTheOwner(address caller) public {
        vm.assume(caller != owner);
        _deposit(stranger, REQUIRED_VALIDATOR_STAKE);
        _expectUnauthorized(caller);
        vm.prank(caller);
        runs.seatValidator(runId, stranger);
    }

    function testFuzz_seatValidator_reverts_whenSeated(uint256 i) public {
        i = bound(i, 0, 4);
        _expectInvalidValidator(validators[i]);
        _seat(validators[i]);
    }

    function testFuzz_seatValidator_reverts_whenNotStaked(uint256 stake) public {
        stake = stake % 2 == 0 ? REQUIRED_VALIDATOR_STAKE - 1 : bound(stake, 1, REQUIRED_VALIDATOR_STAKE - 1);
        _deposit(stranger, stake);
        _expectInvalidValidator(stranger);
        _seat(stranger);
    }

    function test_seatValidator_reverts_whenZero() public {
        vm.prank(alice);
        vault.deposit(address(0), REQUIRED_VALIDATOR_STAKE);
        _expectInvalidValidator(address(0));
        _seat(address(0));
    }

    function testFuzz_seatValidator_givesTheNextBit(uint256 stake) public {
        stake = bound(stake, REQUIRED_VALIDATOR_STAKE, WALLET);
        _deposit(stranger, stake);
        vm.expectEmit(address(runs));
        emit IRunRegistryEvents.ValidatorSeated(runId, stranger, 32);
        _seat(stranger);
        _assertListed(stranger, true);
        assertEq(runs.seatBitOf(runId, stranger), 32, "the sixth bit");
    }

    // ---------------------------------------------------------- rotate validator

    function testFuzz_rotateValidator_reverts_whenNotTheOwner(address caller) public {
        vm.assume(caller != owner);
        _expectUnauthorized(caller);
        vm.prank(caller);
        runs.rotateValidator(runId, validators[0], stranger);
    }

    function testFuzz_rotateValidator_reverts_whenOldIsNotSeated(address old) public {
        vm.assume(!runs.isValidator(runId, old));
        _deposit(stranger, REQUIRED_VALIDATOR_STAKE);
        _expectInvalidValidator(old);
        _rotate(old, stranger);
    }

    function testFuzz_rotateValidator_reverts_whenNewIsSeated(uint256 i, uint256 j) public {
        i = bound(i, 0, 4);
        j = bound(j, 0, 4);
        vm.assume(i != j);
        _expectInvalidValidator(validators[j]);
        _rotate(validators[i], validators[j]);
    }

    function testFuzz_rotateValidator_reverts_whenNewIsNotStaked(uint256 stake) public {
        stake = bound(stake, 1, REQUIRED_VALIDATOR_STAKE - 1);
        _deposit(stranger, stake);
        _expectInvalidValidator(stranger);
        _rotate(validators[0], stranger);
    }

    function testFuzz_rotateValidator_takesTheOldKeysPowerAway(uint256 i) public {
        i = bound(i, 0, 4);
        _deposit(stranger, REQUIRED_VALIDATOR_STAKE);
        vm.expectEmit(address(runs));
        emit IRunRegistryEvents.ValidatorUnseated(runId, validators[i]);
        vm.expectEmit(address(runs));
        emit IRunRegistryEvents.ValidatorSeated(runId, stranger, 32);
        _rotate(validators[i], stranger);
        _assertListed(validators[i], false);
        _assertListed(stranger, true);
        assertEq(runs.seatBitOf(runId, validators[i]), 1 << i, "its bit stays its own");
        assertEq(runs.configOf(runId).validators.length, 5, "as many as before");
    }

    function testFuzz_rotateValidator_keepsBits_whenAValidatorReturns(uint256 i) public {
        i = bound(i, 0, 4);
        _deposit(stranger, REQUIRED_VALIDATOR_STAKE);
        _rotate(validators[i], stranger);
        vm.expectEmit(address(runs));
        emit IRunRegistryEvents.ValidatorSeated(runId, validators[i], uint88(1 << i));
        _rotate(stranger, validators[i]);
        _assertListed(validators[i], true);
        _assertListed(stranger, false);
    }

    /// @dev Any order of rotations leaves the list, the seats and the bits in agreement.
    function testFuzz_rotations_keepListAndSeatsInAgreement(uint256 seed) public {
        address[7] memory crowd;
        for (uint256 i = 0; i < 5; ++i) {
            crowd[i] = validators[i];
        }
        (crowd[5], crowd[6]) = (stranger, challenger);
        _deposit(stranger, REQUIRED_VALIDATOR_STAKE);
        _deposit(challenger, REQUIRED_VALIDATOR_STAKE);
        for (uint256 step = 0; step < 12; ++step) {
            address old = crowd[(seed >> (8 * step)) % 7];
            address next = crowd[(seed >> (8 * step + 4)) % 7];
            if (!runs.isValidator(runId, old) || runs.isValidator(runId, next)) continue;
            _rotate(old, next);
            _assertListed(old, false);
            _assertListed(next, true);
        }
        uint256 bits;
        for (uint256 i = 0; i < 7; ++i) {
            uint256 bit = runs.seatBitOf(runId, crowd[i]);
            assertEq(bits & bit, 0, "no bit stands for two");
            bits |= bit;
        }
    }

    // ---------------------------------------------------------- unseat validator

    function testFuzz_unseatValidator_reverts_whileStakeSuffices(address caller, uint256 i) public {
        vm.assume(caller != address(faults));
        i = bound(i, 0, 4);
        _expectInvalidValidator(validators[i]);
        vm.prank(caller);
        runs.unseatValidator(runId, validators[i]);
    }

    function testFuzz_unseatValidator_reverts_whenNotSeated(address account) public {
        vm.assume(!runs.isValidator(runId, account));
        _expectInvalidValidator(account);
        vm.prank(address(faults));
        runs.unseatValidator(runId, account);
    }

    function testFuzz_unseatValidator_reverts_whenRunIsUnknown(uint64 unknown) public {
        vm.assume(unknown != runId);
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunUnknown.selector, unknown));
        vm.prank(address(faults));
        runs.unseatValidator(unknown, validators[0]);
    }

    function testFuzz_unseatValidator_lets_anyone_onceStakeFell(address caller, uint256 i, uint256 missing) public {
        vm.assume(caller != address(0));
        i = bound(i, 0, 4);
        _unstake(validators[i], bound(missing, 1, REQUIRED_VALIDATOR_STAKE));
        vm.expectEmit(address(runs));
        emit IRunRegistryEvents.ValidatorUnseated(runId, validators[i]);
        vm.prank(caller);
        runs.unseatValidator(runId, validators[i]);
        _assertListed(validators[i], false);
    }

    function testFuzz_unseatValidator_letsTheFaultCourt_always(uint256 i) public {
        i = bound(i, 0, 4);
        vm.prank(address(faults));
        runs.unseatValidator(runId, validators[i]);
        _assertListed(validators[i], false);
    }

    function test_unseatValidator_emptiesTheList() public {
        for (uint256 i = 0; i < 5; ++i) {
            vm.prank(address(faults));
            runs.unseatValidator(runId, validators[i]);
        }
        (address[] memory accounts,) = runs.validatorsOf(runId);
        assertEq(accounts.length, 0, "nobody is left");
    }

    // --------------------------------------------------------------------- seats

    /// forge-config: default.fuzz.runs = 4
    function testFuzz_seats_areScarce_alsoOneByOne(uint256 seed) public {
        uint256 seats = runs.MAX_SEATS();
        vm.prank(deployer);
        token.approve(address(vault), type(uint256).max);
        for (uint256 i = 5; i <= seats; ++i) {
            address next = address(uint160(uint256(keccak256(abi.encode(seed, i)))));
            vm.prank(deployer);
            vault.deposit(next, REQUIRED_VALIDATOR_STAKE);
            address last = i == 5 ? validators[0] : _lastSeated();
            if (i == seats) _expectInvalidValidator(next);
            _rotate(last, next);
        }
    }

    function _lastSeated() private view returns (address) {
        (address[] memory accounts,) = runs.validatorsOf(runId);
        return accounts[accounts.length - 1];
    }

    function testFuzz_wasSeatedThroughout(uint256 from, uint256 to, uint256 out) public {
        uint256 seatedAt = block.timestamp;
        _deposit(stranger, REQUIRED_VALIDATOR_STAKE);
        _seat(stranger);
        out = bound(out, seatedAt, seatedAt + 1000);
        from = bound(from, seatedAt - 500, seatedAt + 1500);
        to = bound(to, from, seatedAt + 2000);
        assertEq(runs.wasSeatedThroughout(runId, stranger, from, to), from >= seatedAt, "seated to this day");
        vm.warp(out);
        _rotate(stranger, _stakedChallenger());
        bool expected = from >= seatedAt && to <= out;
        assertEq(runs.wasSeatedThroughout(runId, stranger, from, to), expected, "seated until then");
    }

    function _stakedChallenger() private returns (address) {
        _deposit(challenger, REQUIRED_VALIDATOR_STAKE);
        return challenger;
    }

    /// @dev Who was away in between was not there throughout.
    function testFuzz_wasSeatedThroughout_isFalse_afterABreak(uint256 away) public {
        away = bound(away, 1, 1000);
        uint256 from = block.timestamp;
        _deposit(stranger, REQUIRED_VALIDATOR_STAKE);
        _rotate(validators[0], stranger);
        vm.warp(from + away);
        _rotate(stranger, validators[0]);
        vm.warp(from + 2000);
        assertFalse(runs.wasSeatedThroughout(runId, validators[0], from, from + 2000), "away");
        assertTrue(runs.wasSeatedThroughout(runId, validators[0], from + away, from + 2000), "since it is back");
    }

    function testFuzz_wasSeatedThroughout_isFalse_forStrangers(address account, uint256 from, uint256 to) public view {
        vm.assume(runs.seatBitOf(runId, account) == 0);
        assertFalse(runs.wasSeatedThroughout(runId, account, from, to), "never");
    }

    function testFuzz_quorumAmong_tellsSeatsAndTheFirstStranger(uint256 which, uint256 at) public view {
        at = bound(at, 0, 4);
        address[] memory accounts = new address[](5);
        uint256 expected;
        for (uint256 i = 0; i < 5; ++i) {
            accounts[i] = validators[i];
            if (i < at || which % 2 == 0) expected |= 1 << i;
        }
        if (which % 2 != 0) accounts[at] = stranger;
        (uint8 quorum, uint88 seats, address found) = runs.quorumAmong(runId, accounts);
        assertEq(quorum, QUORUM, "quorum");
        assertEq(seats, expected, "seats");
        assertEq(found, which % 2 == 0 ? address(0) : stranger, "stranger");
    }

    // ---------------------------------------------------------------------- keys

    function testFuzz_rotateKeys_revert_whenNotTheOwner(address caller, address next) public {
        vm.assume(caller != owner);
        vm.startPrank(caller);
        _expectUnauthorized(caller);
        runs.rotateTrainer(runId, trainer, next);
        _expectUnauthorized(caller);
        runs.rotateOrchestrator(runId, orchestrator, next);
    }

    function testFuzz_rotateTrainer_reverts_whenAnotherKeyIsNamed(address named, address next) public {
        vm.assume(named != trainer);
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunWrongKey.selector, runId, named, trainer));
        vm.prank(owner);
        runs.rotateTrainer(runId, named, next);
    }

    function testFuzz_rotateOrchestrator_reverts_whenAnotherKeyIsNamed(address named, address next) public {
        vm.assume(named != orchestrator);
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunWrongKey.selector, runId, named, orchestrator));
        vm.prank(owner);
        runs.rotateOrchestrator(runId, named, next);
    }

    function test_rotateKeys_revert_whenTheNextIsZero() public {
        vm.startPrank(owner);
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunInvalidParameter.selector, bytes32("trainer")));
        runs.rotateTrainer(runId, trainer, address(0));
        vm.expectRevert(
            abi.encodeWithSelector(IRunRegistryErrors.RunInvalidParameter.selector, bytes32("orchestrator"))
        );
        runs.rotateOrchestrator(runId, orchestrator, address(0));
    }

    function testFuzz_rotateTrainer_failsTheOldKeyAtOnce(address next) public {
        vm.assume(next != address(0) && next != trainer);
        vm.expectEmit(address(runs));
        emit IRunRegistryEvents.TrainerRotated(runId, trainer, next);
        vm.prank(owner);
        runs.rotateTrainer(runId, trainer, next);
        _expectUnauthorized(trainer);
        vm.prank(trainer);
        runs.publishCheckpoint(runId, 1, "root");
        vm.prank(next);
        runs.publishCheckpoint(runId, 1, "root");
        assertEq(runs.configOf(runId).trainer, next, "trainer");
    }

    function testFuzz_rotateOrchestrator_replacesTheKey(address next) public {
        vm.assume(next != address(0));
        vm.expectEmit(address(runs));
        emit IRunRegistryEvents.OrchestratorRotated(runId, orchestrator, next);
        vm.prank(owner);
        runs.rotateOrchestrator(runId, orchestrator, next);
        (address held,,) = runs.admissionOf(runId);
        assertEq(held, next, "orchestrator");
    }
}
