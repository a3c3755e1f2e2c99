// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IRunRegistry, IRunRegistryErrors, IRunRegistryEvents} from "../../src/interfaces/IRunRegistry.sol";
import {IWorkerRegistry} from "../../src/interfaces/IWorkerRegistry.sol";
import {BaseTest} from "../BaseTest.sol";

/// @title Seats of validators: invited by the owner, taken and given up by themselves, lost for fault or low stake
contract RunRegistrySeatsTest is BaseTest {
    uint32 private constant FIRST_TERMS = 1;

    function setUp() public override {
        super.setUp();
        vm.warp(30 days);
        runId = _createRun();
    }

    function _expectInvalidValidator(address validator) private {
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunInvalidValidator.selector, runId, validator));
    }

    function _expectUnauthorized(address caller) private {
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunUnauthorized.selector, runId, caller));
    }

    function _expectUnknown(uint64 unknown) private {
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunUnknown.selector, unknown));
    }

    function _expectStakeTooLow(uint64 run, address validator, uint256 active) private {
        vm.expectRevert(
            abi.encodeWithSelector(
                IRunRegistryErrors.RunStakeTooLow.selector, run, validator, active, REQUIRED_VALIDATOR_STAKE
            )
        );
    }

    function _invite(address validator, bool invited) private {
        vm.prank(owner);
        runs.invite(runId, validator, invited);
    }

    function _takeSeat(address validator, uint256 stake) private {
        vm.prank(validator);
        runs.takeSeat(runId, FIRST_TERMS, stake);
    }

    function _seat(address validator) private {
        _invite(validator, true);
        _takeSeat(validator, REQUIRED_VALIDATOR_STAKE);
    }

    function _leaveSeat(address validator) private {
        vm.prank(validator);
        runs.leaveSeat(runId);
    }

    function _dismiss(address validator) private {
        vm.prank(owner);
        runs.dismiss(runId, validator);
    }

    function _unseatForFault(address validator) private {
        vm.prank(address(faults));
        runs.unseatForFault(runId, validator);
    }

    function _unbond(address validator, uint256 amount) private {
        vm.prank(validator);
        vault.requestUnbond(runId, amount);
    }

    function _aValidator(uint256 i) private view returns (address) {
        return validators[i % 5];
    }

    /// @dev A second run that the same five are invited to.
    function _createOther() private returns (uint64) {
        IRunRegistry.RunConfig memory config = _config();
        vm.prank(owner);
        return runs.createRun(config);
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

    // -------------------------------------------------------------------- invite

    function testFuzz_invite_reverts_whenNotTheOwner(address caller, bool invited) public {
        vm.assume(caller != owner);
        _expectUnauthorized(caller);
        vm.prank(caller);
        runs.invite(runId, stranger, invited);
    }

    function testFuzz_invite_reverts_whenRunIsUnknown(uint64 unknown, bool invited) public {
        vm.assume(unknown != runId);
        _expectUnknown(unknown);
        vm.prank(owner);
        runs.invite(unknown, stranger, invited);
    }

    function test_invite_reverts_whenZero() public {
        _expectInvalidValidator(address(0));
        _invite(address(0), true);
    }

    function testFuzz_invite_seatsNobody(address account, bool invited) public {
        vm.assume(account != address(0) && !runs.isValidator(runId, account));
        vm.expectEmit(address(runs));
        emit IRunRegistryEvents.ValidatorInvited(runId, account, invited);
        _invite(account, invited);
        assertEq(runs.isInvited(runId, account), invited, "invited");
        assertFalse(runs.isValidator(runId, account), "no validator");
        assertEq(runs.seatBitOf(runId, account), 0, "no bit");
    }

    function test_invite_concernsOneRun() public {
        uint64 other = _createOther();
        _invite(stranger, true);
        assertFalse(runs.isInvited(other, stranger), "the other run");
    }

    /// @dev Who sits goes on sitting when its invitation is taken back: `dismiss` takes the seat.
    function testFuzz_invite_back_takesNoSeat(uint256 i) public {
        _invite(_aValidator(i), false);
        assertFalse(runs.isInvited(runId, _aValidator(i)), "not invited");
        _assertListed(_aValidator(i), true);
    }

    // ----------------------------------------------------------------- take seat

    function testFuzz_takeSeat_reverts_whenNotInvited(address caller) public {
        vm.assume(!runs.isInvited(runId, caller));
        _expectInvalidValidator(caller);
        _takeSeat(caller, 0);
    }

    function test_takeSeat_reverts_whenTheInvitationWasTakenBack() public {
        _invite(stranger, true);
        _invite(stranger, false);
        _expectInvalidValidator(stranger);
        _takeSeat(stranger, REQUIRED_VALIDATOR_STAKE);
    }

    function test_takeSeat_reverts_whenInvitedToAnotherRun() public {
        uint64 other = _createOther();
        _invite(stranger, true);
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunInvalidValidator.selector, other, stranger));
        vm.prank(stranger);
        runs.takeSeat(other, FIRST_TERMS, REQUIRED_VALIDATOR_STAKE);
    }

    function testFuzz_takeSeat_reverts_whenSeated(uint256 i) public {
        _expectInvalidValidator(_aValidator(i));
        _takeSeat(_aValidator(i), REQUIRED_VALIDATOR_STAKE);
    }

    /// @dev Nobody judges the run that it works for, not even once it left: what it did may still be judged.
    function testFuzz_takeSeat_reverts_whenItWorksForTheRun(uint256 which) public {
        _join(runId, alice, aliceNode, aliceNodeKey, REQUIRED_STAKE);
        _invite(alice, true);
        if (which % 3 == 1) {
            vm.prank(alice);
            workers.exit(runId);
        }
        if (which % 3 == 2) {
            vm.prank(address(ledger));
            workers.convict(runId, alice, "offence", true);
        }
        _expectInvalidValidator(alice);
        _takeSeat(alice, REQUIRED_VALIDATOR_STAKE);
    }

    function test_takeSeat_works_whenItWorksForAnotherRun() public {
        uint64 other = _createOther();
        _join(other, alice, aliceNode, aliceNodeKey, REQUIRED_STAKE);
        _seat(alice);
        _assertListed(alice, true);
        assertEq(uint8(workers.statusOf(other, alice)), uint8(IWorkerRegistry.Status.Active), "works there");
    }

    function testFuzz_takeSeat_reverts_whenStakeIsTooLow(uint256 stake) public {
        stake = stake % 2 == 0 ? REQUIRED_VALIDATOR_STAKE - 1 : bound(stake, 0, REQUIRED_VALIDATOR_STAKE - 1);
        _invite(stranger, true);
        _expectStakeTooLow(runId, stranger, stake);
        _takeSeat(stranger, stake);
    }

    /// @dev Stake belongs to a run: what lies in another one, or on the jurors' bench, does not count.
    function testFuzz_takeSeat_reverts_whenStakeLiesElsewhere(uint256 stake, bool onTheBench) public {
        _deposit(onTheBench ? 0 : _createOther(), stranger, bound(stake, REQUIRED_VALIDATOR_STAKE, WALLET));
        _invite(stranger, true);
        _expectStakeTooLow(runId, stranger, 0);
        _takeSeat(stranger, 0);
    }

    function testFuzz_takeSeat_reverts_whenItAcceptsOtherTerms(uint32 terms) public {
        vm.assume(terms != FIRST_TERMS);
        _invite(stranger, true);
        vm.expectRevert(
            abi.encodeWithSelector(IRunRegistryErrors.RunTermsChanged.selector, runId, terms, FIRST_TERMS, 0)
        );
        vm.prank(stranger);
        runs.takeSeat(runId, terms, REQUIRED_VALIDATOR_STAKE);
    }

    function test_takeSeat_reverts_whenRunIsClosed() public {
        _invite(stranger, true);
        vm.prank(owner);
        runs.closeRun(runId);
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunEnded.selector, runId));
        _takeSeat(stranger, REQUIRED_VALIDATOR_STAKE);
    }

    /// @dev Nor does the bench, run 0, have seats.
    function testFuzz_takeSeat_reverts_whenRunIsUnknown(uint64 unknown) public {
        if (unknown % 2 == 0) unknown = 0;
        vm.assume(unknown != runId);
        _expectUnknown(unknown);
        vm.prank(validators[0]);
        runs.takeSeat(unknown, FIRST_TERMS, REQUIRED_VALIDATOR_STAKE);
    }

    function testFuzz_takeSeat_givesTheNextBit(uint256 stake) public {
        stake = bound(stake, REQUIRED_VALIDATOR_STAKE, WALLET);
        _invite(stranger, true);
        vm.expectEmit(address(runs));
        emit IRunRegistryEvents.ValidatorSeated(runId, stranger, 32, FIRST_TERMS);
        _takeSeat(stranger, stake);
        _assertListed(stranger, true);
        assertEq(runs.seatBitOf(runId, stranger), 32, "the sixth bit");
        assertEq(vault.activeStake(runId, stranger), stake, "stake");
        assertEq(token.balanceOf(stranger), WALLET - stake, "what it keeps");
    }

    function testFuzz_takeSeat_countsEarlierStake(uint256 earlier) public {
        earlier = bound(earlier, 0, REQUIRED_VALIDATOR_STAKE);
        if (earlier != 0) _deposit(runId, stranger, earlier);
        _invite(stranger, true);
        _takeSeat(stranger, REQUIRED_VALIDATOR_STAKE - earlier);
        _assertListed(stranger, true);
        assertEq(vault.activeStake(runId, stranger), REQUIRED_VALIDATOR_STAKE, "both count");
    }

    /// @dev Seats, bits and stake of two runs have nothing to do with each other.
    function test_takeSeat_concernsOneRun() public {
        uint64 other = _createOther();
        vm.prank(validators[3]);
        runs.takeSeat(other, FIRST_TERMS, REQUIRED_VALIDATOR_STAKE);
        assertEq(runs.seatBitOf(other, validators[3]), 1, "the first bit of the other run");
        assertEq(runs.seatBitOf(runId, validators[3]), 8, "the fourth bit of this one");
        assertEq(vault.activeStake(runId, validators[3]), REQUIRED_VALIDATOR_STAKE, "stake here");
        assertEq(vault.activeStake(other, validators[3]), REQUIRED_VALIDATOR_STAKE, "stake there");
    }

    function testFuzz_takeSeat_givesTheOldBitBack(uint256 i) public {
        address validator = _aValidator(i);
        uint88 bit = runs.seatBitOf(runId, validator);
        _leaveSeat(validator);
        _seat(stranger);
        vm.expectEmit(address(runs));
        emit IRunRegistryEvents.ValidatorSeated(runId, validator, bit, FIRST_TERMS);
        _takeSeat(validator, REQUIRED_VALIDATOR_STAKE);
        _assertListed(validator, true);
        assertEq(runs.seatBitOf(runId, stranger), 32, "a bit of its own");
    }

    // ---------------------------------------------------------------- leave seat

    function testFuzz_leaveSeat_reverts_whenNotSeated(address caller) public {
        vm.assume(!runs.isValidator(runId, caller));
        _expectInvalidValidator(caller);
        _leaveSeat(caller);
    }

    function testFuzz_leaveSeat_reverts_whenRunIsUnknown(uint64 unknown) public {
        vm.assume(unknown != runId);
        _expectUnknown(unknown);
        vm.prank(validators[0]);
        runs.leaveSeat(unknown);
    }

    function test_leaveSeat_reverts_twice() public {
        _leaveSeat(validators[0]);
        _expectInvalidValidator(validators[0]);
        _leaveSeat(validators[0]);
    }

    function testFuzz_leaveSeat_unbondsAllStake(uint256 i, uint256 extra) public {
        address validator = _aValidator(i);
        extra = bound(extra, 1, WALLET - REQUIRED_VALIDATOR_STAKE);
        _deposit(runId, validator, extra);
        vm.expectEmit(address(runs));
        emit IRunRegistryEvents.ValidatorUnseated(runId, validator);
        _leaveSeat(validator);
        _assertListed(validator, false);
        (uint256 active, uint256 unbonding) = _stake(validator);
        assertEq(active, 0, "active");
        assertEq(unbonding, REQUIRED_VALIDATOR_STAKE + extra, "unbonding");
    }

    function testFuzz_leaveSeat_endsInAFullRefund(uint256 i) public {
        address validator = _aValidator(i);
        _leaveSeat(validator);
        vm.warp(block.timestamp + UNBONDING_PERIOD);
        vm.prank(validator);
        vault.withdraw(runId);
        assertEq(token.balanceOf(validator), WALLET, "every wei is back");
    }

    function test_leaveSeat_works_whenRunIsClosed() public {
        vm.prank(owner);
        runs.closeRun(runId);
        _leaveSeat(validators[0]);
        _assertListed(validators[0], false);
    }

    function test_leaveSeat_concernsOneRun() public {
        uint64 other = _createRun();
        _leaveSeat(validators[0]);
        assertTrue(runs.isValidator(other, validators[0]), "validates the other run");
        assertEq(vault.activeStake(other, validators[0]), REQUIRED_VALIDATOR_STAKE, "stake there");
    }

    function test_leaveSeat_emptiesTheList() public {
        for (uint256 i = 0; i < 5; ++i) {
            _leaveSeat(validators[i]);
        }
        (address[] memory accounts,) = runs.validatorsOf(runId);
        assertEq(accounts.length, 0, "nobody is left");
    }

    // ------------------------------------------------------------------- dismiss

    function testFuzz_dismiss_reverts_whenNotTheOwner(address caller) public {
        vm.assume(caller != owner);
        _expectUnauthorized(caller);
        vm.prank(caller);
        runs.dismiss(runId, validators[0]);
    }

    function testFuzz_dismiss_reverts_whenNeitherInvitedNorSeated(address account) public {
        vm.assume(account != address(0) && !runs.isValidator(runId, account));
        _expectInvalidValidator(account);
        _dismiss(account);
    }

    function testFuzz_dismiss_takesTheSeat(uint256 i) public {
        address validator = _aValidator(i);
        vm.expectEmit(address(runs));
        emit IRunRegistryEvents.ValidatorInvited(runId, validator, false);
        vm.expectEmit(address(runs));
        emit IRunRegistryEvents.ValidatorUnseated(runId, validator);
        _dismiss(validator);
        _assertListed(validator, false);
    }

    /// @dev The stake stays the validator's own, and so does the time at which it has it back.
    function testFuzz_dismiss_leavesStakeAlone(uint256 i, uint256 leaving, uint256 waited) public {
        address validator = _aValidator(i);
        leaving = bound(leaving, 1, WALLET - REQUIRED_VALIDATOR_STAKE);
        _deposit(runId, validator, leaving);
        _unbond(validator, leaving);
        bytes32 before = keccak256(abi.encode(vault.accountOf(runId, validator)));
        vm.warp(block.timestamp + bound(waited, 0, UNBONDING_PERIOD));
        _dismiss(validator);
        assertEq(keccak256(abi.encode(vault.accountOf(runId, validator))), before, "as it was");
    }

    function testFuzz_dismiss_endsInAFullRefund(uint256 i) public {
        address validator = _aValidator(i);
        _dismiss(validator);
        _unbond(validator, REQUIRED_VALIDATOR_STAKE);
        vm.warp(block.timestamp + UNBONDING_PERIOD);
        vm.prank(validator);
        vault.withdraw(runId);
        assertEq(token.balanceOf(validator), WALLET, "every wei is back");
    }

    function testFuzz_dismiss_takesTheInvitation(uint256 i) public {
        address validator = _aValidator(i);
        _dismiss(validator);
        assertFalse(runs.isInvited(runId, validator), "not invited");
        _expectInvalidValidator(validator);
        _takeSeat(validator, REQUIRED_VALIDATOR_STAKE);
    }

    /// @dev Who leaves before the owner's transaction does not take its seat again.
    function testFuzz_dismiss_takesTheInvitation_ofWhoLeftBefore(uint256 i) public {
        address validator = _aValidator(i);
        _leaveSeat(validator);
        vm.expectEmit(address(runs));
        emit IRunRegistryEvents.ValidatorInvited(runId, validator, false);
        _dismiss(validator);
        assertFalse(runs.isInvited(runId, validator), "not invited");
        _expectInvalidValidator(validator);
        _takeSeat(validator, REQUIRED_VALIDATOR_STAKE);
        _expectInvalidValidator(validator);
        _dismiss(validator);
    }

    function testFuzz_dismiss_keepsBits_whenAValidatorReturns(uint256 i) public {
        address validator = _aValidator(i);
        uint88 bit = runs.seatBitOf(runId, validator);
        _dismiss(validator);
        assertEq(runs.seatBitOf(runId, validator), bit, "its bit stays its own");
        _seat(validator);
        assertEq(runs.seatBitOf(runId, validator), bit, "and it sits with it again");
    }

    function test_dismiss_concernsOneRun() public {
        uint64 other = _createRun();
        _dismiss(validators[0]);
        assertTrue(runs.isValidator(other, validators[0]), "validates the other run");
        assertEq(vault.activeStake(other, validators[0]), REQUIRED_VALIDATOR_STAKE, "stake there");
    }

    // ---------------------------------------------------------- unseat for fault

    function testFuzz_unseatForFault_reverts_whenNotTheFaultCourt(address caller, uint256 i) public {
        vm.assume(caller != address(faults));
        _expectUnauthorized(caller);
        vm.prank(caller);
        runs.unseatForFault(runId, _aValidator(i));
    }

    function test_unseatForFault_reverts_whenTheOwnerCalls() public {
        _expectUnauthorized(owner);
        vm.prank(owner);
        runs.unseatForFault(runId, validators[0]);
    }

    function testFuzz_unseatForFault_takesSeatAndInvitation(uint256 i) public {
        address validator = _aValidator(i);
        vm.expectEmit(address(runs));
        emit IRunRegistryEvents.ValidatorUnseated(runId, validator);
        _unseatForFault(validator);
        _assertListed(validator, false);
        assertFalse(runs.isInvited(runId, validator), "not invited");
        _expectInvalidValidator(validator);
        _takeSeat(validator, REQUIRED_VALIDATOR_STAKE);
    }

    /// @dev A fault that is proven after its validator left still ends the invitation, so that it does not return.
    function testFuzz_unseatForFault_takesTheInvitation_ofWhoLeft(uint256 i) public {
        address validator = _aValidator(i);
        _leaveSeat(validator);
        assertTrue(runs.isInvited(runId, validator), "invited still");
        _unseatForFault(validator);
        assertFalse(runs.isInvited(runId, validator), "not invited");
    }

    function test_unseatForFault_concernsOneRun() public {
        uint64 other = _createRun();
        _unseatForFault(validators[0]);
        assertTrue(runs.isValidator(other, validators[0]), "validates the other run");
        assertTrue(runs.isInvited(other, validators[0]), "invited there");
    }

    function test_unseatForFault_works_whenRunIsClosed() public {
        vm.prank(owner);
        runs.closeRun(runId);
        _unseatForFault(validators[0]);
        _assertListed(validators[0], false);
    }

    // ------------------------------------------------------ unseat for low stake

    function testFuzz_unseatForLowStake_takesTheSeat_whenStakeFalls(uint256 i, uint256 missing) public {
        address validator = _aValidator(i);
        missing = missing % 2 == 0 ? 1 : bound(missing, 1, REQUIRED_VALIDATOR_STAKE);
        vm.expectEmit(address(runs));
        emit IRunRegistryEvents.ValidatorUnseated(runId, validator);
        _unbond(validator, missing);
        _assertListed(validator, false);
        assertTrue(runs.isInvited(runId, validator), "invited still: it may fill up and return");
    }

    function testFuzz_unseatForLowStake_doesNothing_whileStakeSuffices(address caller, uint256 i, uint256 extra)
        public
    {
        address validator = _aValidator(i);
        extra = bound(extra, 1, WALLET - REQUIRED_VALIDATOR_STAKE);
        _deposit(runId, validator, extra);
        _unbond(validator, extra);
        vm.prank(caller);
        runs.unseatForLowStake(runId, validator);
        _assertListed(validator, true);
    }

    function testFuzz_unseatForLowStake_doesNothing_forAnybodyElse(uint64 run, address account) public {
        vm.assume(run != runId || !runs.isValidator(runId, account));
        vm.recordLogs();
        runs.unseatForLowStake(run, account);
        assertEq(vm.getRecordedLogs().length, 0, "nothing happens");
    }

    /// @dev Stake that falls in one run costs no seat in another.
    function testFuzz_unseatForLowStake_concernsOneRun(uint256 missing) public {
        uint64 other = _createRun();
        _unbond(validators[0], bound(missing, 1, REQUIRED_VALIDATOR_STAKE));
        runs.unseatForLowStake(other, validators[0]);
        _assertListed(validators[0], false);
        assertTrue(runs.isValidator(other, validators[0]), "validates the other run");
    }

    function testFuzz_unseatForLowStake_letsItReturn_onceItFilledUp(uint256 missing) public {
        missing = bound(missing, 1, REQUIRED_VALIDATOR_STAKE);
        _unbond(validators[0], missing);
        _takeSeat(validators[0], missing);
        _assertListed(validators[0], true);
        assertEq(runs.seatBitOf(runId, validators[0]), 1, "with its bit");
    }

    // --------------------------------------------------------------------- seats

    /// @dev Any order of comings and goings leaves the list, the seats and the bits in agreement.
    function testFuzz_seats_listAndBitsAgree(uint256 seed) public {
        address[7] memory crowd = _crowd();
        for (uint256 step = 0; step < 16; ++step) {
            address who = crowd[(seed >> (8 * step)) % 7];
            bool seated = runs.isValidator(runId, who);
            if (seated) _unseatSomehow(who, (seed >> (8 * step + 4)) % 4);
            else _seat(who);
            _assertListed(who, !seated);
        }
        uint256 bits;
        for (uint256 i = 0; i < 7; ++i) {
            uint256 bit = runs.seatBitOf(runId, crowd[i]);
            assertEq(bits & bit, 0, "no bit stands for two");
            bits |= bit;
        }
    }

    function _crowd() private view returns (address[7] memory crowd) {
        for (uint256 i = 0; i < 5; ++i) {
            crowd[i] = validators[i];
        }
        (crowd[5], crowd[6]) = (stranger, challenger);
    }

    function _unseatSomehow(address who, uint256 how) private {
        if (how == 0) _leaveSeat(who);
        if (how == 1) _dismiss(who);
        if (how == 2) _unseatForFault(who);
        if (how == 3) _unbond(who, vault.activeStake(runId, who));
    }

    function _newcomer(uint256 i) private returns (address account) {
        account = makeAddr(string.concat("newcomer ", vm.toString(i)));
        vm.prank(deployer);
        vault.deposit(runId, account, REQUIRED_VALIDATOR_STAKE);
        _invite(account, true);
    }

    /// @dev Seats newcomers until every bit stands for somebody; each gives up its seat if `oneByOne`.
    function _useAllSeats(bool oneByOne) private {
        uint256 seats = runs.MAX_SEATS();
        vm.prank(deployer);
        token.approve(address(vault), type(uint256).max);
        for (uint256 i = 5; i < seats; ++i) {
            address account = _newcomer(i);
            _takeSeat(account, 0);
            if (oneByOne) _leaveSeat(account);
        }
    }

    function test_takeSeat_seatsAsManyAsThereAreBits() public {
        _useAllSeats(false);
        (, uint88[] memory bits) = runs.validatorsOf(runId);
        uint88 all;
        for (uint256 i = 0; i < bits.length; ++i) {
            all |= bits[i];
        }
        assertEq(all, type(uint88).max, "every bit");
    }

    /// @dev Seats are scarce in a run's whole life, since bits are never given twice.
    function test_takeSeat_reverts_whenEveryBitWasGiven() public {
        _useAllSeats(true);
        address late = _newcomer(1000);
        _expectInvalidValidator(late);
        _takeSeat(late, 0);
    }

    function test_takeSeat_works_forWhoHasABit_whenEveryBitWasGiven() public {
        _useAllSeats(true);
        _leaveSeat(validators[2]);
        _takeSeat(validators[2], REQUIRED_VALIDATOR_STAKE);
        _assertListed(validators[2], true);
    }

    // --------------------------------------------------------------- ever seated

    function test_everSeated_tellsThemInTheOrderInWhichTheyCame() public {
        vm.warp(block.timestamp + 1);
        _seat(stranger);
        address[] memory accounts = runs.everSeated(runId, block.timestamp + 1);
        assertEq(accounts.length, 6, "all six");
        for (uint256 i = 0; i < 5; ++i) {
            assertEq(accounts[i], validators[i], "the first five");
        }
        assertEq(accounts[5], stranger, "and the sixth");
    }

    /// @dev Who took a seat in a second is told of it and of all later ones, and of none before.
    function testFuzz_everSeated_tellsWhoCameByThen(uint256 came, uint256 time) public {
        uint256 start = block.timestamp;
        came = start + bound(came, 1, 1000);
        time = time % 3 == 0 ? came + time / 3 % 2 : bound(time, start - 500, came + 1000);
        vm.warp(came);
        _seat(stranger);
        uint256 expected = time >= came ? 6 : time >= start ? 5 : 0;
        assertEq(runs.everSeated(runId, time).length, expected, "those who came by then");
    }

    function testFuzz_everSeated_tellsAlsoWhoLeft(uint256 i, uint256 how) public {
        _unseatSomehow(_aValidator(i), how % 4);
        address[] memory accounts = runs.everSeated(runId, block.timestamp + 1);
        assertEq(accounts.length, 5, "all five");
        assertEq(accounts[i % 5], _aValidator(i), "also the one that left");
    }

    /// @dev What counts is the first time; who returns is told once.
    function testFuzz_everSeated_tellsWhoReturned_once(uint256 away) public {
        uint256 start = block.timestamp;
        _leaveSeat(validators[4]);
        vm.warp(start + bound(away, 1, 1000 days));
        _takeSeat(validators[4], REQUIRED_VALIDATOR_STAKE);
        assertEq(runs.everSeated(runId, start).length, 5, "before it returned");
        assertEq(runs.everSeated(runId, type(uint256).max).length, 5, "and after");
    }

    function testFuzz_everSeated_tellsNobody_ofUnknownRuns(uint64 unknown, uint256 time) public view {
        vm.assume(unknown != runId);
        assertEq(runs.everSeated(unknown, time).length, 0, "nobody");
    }

    function test_everSeated_tellsNoInvited() public {
        _invite(stranger, true);
        assertEq(runs.everSeated(runId, type(uint256).max).length, 5, "an invitation is no seat");
    }

    // -------------------------------------------------------------- quorum among

    function testFuzz_quorumAmong_tellsSeatsAndTheFirstStranger(uint256 which, uint256 at) public view {
        at = bound(at, 0, 4);
        address[] memory accounts = new address[](5);
        uint256 expected;
        for (uint256 i = 0; i < 5; ++i) {
            accounts[i] = validators[i];
            if (i < at || which % 2 == 0) expected |= 1 << i;
        }
        if (which % 2 != 0) accounts[at] = stranger;
        (uint8 quorum, uint88 seats, address found) = runs.quorumAmong(runId, FIRST_TERMS, accounts);
        assertEq(quorum, QUORUM, "quorum");
        assertEq(seats, expected, "seats");
        assertEq(found, which % 2 == 0 ? address(0) : stranger, "stranger");
    }

    function testFuzz_quorumAmong_callsWhoLeftAStranger(uint256 i, uint256 how) public {
        address[] memory accounts = new address[](1);
        accounts[0] = _aValidator(i);
        _unseatSomehow(accounts[0], how % 4);
        (, uint88 seats, address found) = runs.quorumAmong(runId, FIRST_TERMS, accounts);
        assertEq(seats, 0, "no seat");
        assertEq(found, accounts[0], "a stranger");
    }

    /// @dev A batch is judged by as many as its terms say, whatever the terms of now are.
    function testFuzz_quorumAmong_isThatOfTheTerms(uint8 quorum) public {
        IRunRegistry.Terms memory terms = _config().terms;
        terms.quorum = uint8(bound(quorum, 1, runs.MAX_SEATS()));
        vm.prank(owner);
        runs.proposeChange(runId, terms);
        vm.warp(block.timestamp + CHANGE_DELAY);
        runs.applyChange(runId);
        (uint8 first,,) = runs.quorumAmong(runId, FIRST_TERMS, new address[](0));
        (uint8 second,,) = runs.quorumAmong(runId, FIRST_TERMS + 1, new address[](0));
        assertEq(first, QUORUM, "by the first terms");
        assertEq(second, terms.quorum, "by the second");
    }

    function testFuzz_quorumAmong_reverts_whenTermsAreUnknown(uint32 terms) public {
        vm.assume(terms != FIRST_TERMS);
        _expectUnknown(runId);
        runs.quorumAmong(runId, terms, new address[](0));
    }

    // ---------------------------------------------------------------------- keys

    function testFuzz_rotateTrainer_reverts_whenNotTheOwner(address caller, address next) public {
        vm.assume(caller != owner);
        _expectUnauthorized(caller);
        vm.prank(caller);
        runs.rotateTrainer(runId, trainer, next);
    }

    function testFuzz_rotateOrchestrator_reverts_whenNotTheOwner(address caller, address next) public {
        vm.assume(caller != owner);
        _expectUnauthorized(caller);
        vm.prank(caller);
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

    function test_rotateTrainer_reverts_whenTheNextIsZero() public {
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunInvalidParameter.selector, bytes32("trainer")));
        vm.prank(owner);
        runs.rotateTrainer(runId, trainer, address(0));
    }

    function test_rotateOrchestrator_reverts_whenTheNextIsZero() public {
        vm.expectRevert(
            abi.encodeWithSelector(IRunRegistryErrors.RunInvalidParameter.selector, bytes32("orchestrator"))
        );
        vm.prank(owner);
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
        (address held,,,) = runs.admissionOf(runId);
        assertEq(held, next, "orchestrator");
    }
}
