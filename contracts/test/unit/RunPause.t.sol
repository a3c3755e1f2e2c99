// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {ContributionLedger} from "../../src/ContributionLedger.sol";
import {IContributionLedger, IContributionLedgerErrors} from "../../src/interfaces/IContributionLedger.sol";
import {IRunRegistry, IRunRegistryErrors, IRunRegistryEvents} from "../../src/interfaces/IRunRegistry.sol";
import {BaseTest} from "../BaseTest.sol";

/// @title Pausing the slashing of a run: who may, for how long, how often, and what it does to windows
contract RunPauseTest is BaseTest {
    IRunRegistry.PauseCause private constant CAUSE = IRunRegistry.PauseCause.KnownGoodItem;
    bytes32 private constant EVIDENCE = keccak256("what the validator found");

    function setUp() public override {
        super.setUp();
        _startRun(WALLET / 2);
        vm.warp(30 days);
    }

    function _pausedUntil() private view returns (uint256) {
        return runs.slashPausedUntil(runId);
    }

    /// @dev One of those who may: five validators, the owner, the orchestrator.
    function _entitled(uint256 who) private view returns (address) {
        who %= 7;
        return who == 5 ? owner : who == 6 ? orchestrator : validators[who];
    }

    function _pauseBy(address who) private {
        vm.prank(who);
        runs.pauseSlashing(runId, CAUSE, 60, EVIDENCE);
    }

    function _expectUnauthorized(address caller) private {
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunUnauthorized.selector, runId, caller));
    }

    function testFuzz_constructor_reverts_whenPausesFollowTooFast(uint256 cooldown) public {
        cooldown = cooldown % 2 == 0 ? CHALLENGE_WINDOW - 1 : bound(cooldown, 0, CHALLENGE_WINDOW - 1);
        vm.mockCall(address(runs), abi.encodeCall(runs.slashCooldown, ()), abi.encode(cooldown));
        vm.expectRevert(
            abi.encodeWithSelector(
                IContributionLedgerErrors.LedgerCooldownTooShort.selector, cooldown, CHALLENGE_WINDOW
            )
        );
        new ContributionLedger(
            ContributionLedger.Network(runs, workers, vault, court, escrow),
            CHALLENGE_WINDOW,
            OUTCOME_DEADLINE,
            STAKE_PER_UNIT
        );
    }

    // -------------------------------------------------------------------- who may

    function testFuzz_pauseSlashing_reverts_forAnybodyElse(address caller) public {
        vm.assume(caller != owner && caller != orchestrator && !runs.isValidator(runId, caller));
        _expectUnauthorized(caller);
        _pauseBy(caller);
    }

    function test_pauseSlashing_reverts_forTheTrainer_workersAndJurors() public {
        address[4] memory others = [trainer, alice, aliceNode, jurors[0]];
        for (uint256 i = 0; i < 4; ++i) {
            _expectUnauthorized(others[i]);
            _pauseBy(others[i]);
        }
    }

    function testFuzz_pauseSlashing_reverts_onceUnseated(uint256 who, uint256 how) public {
        address validator = validators[who % 5];
        if (how % 3 == 0) {
            vm.prank(validator);
            vault.requestUnbond(runId, 1);
        } else if (how % 3 == 1) {
            vm.prank(validator);
            runs.leaveSeat(runId);
        } else {
            vm.prank(owner);
            runs.dismiss(runId, validator);
        }
        _expectUnauthorized(validator);
        _pauseBy(validator);
    }

    /// @dev An invitation is no seat.
    function test_pauseSlashing_reverts_forTheInvited() public {
        vm.prank(owner);
        runs.invite(runId, stranger, true);
        _expectUnauthorized(stranger);
        _pauseBy(stranger);
    }

    function testFuzz_pauseSlashing_reverts_forValidatorsOfAnotherRun(uint256 who) public {
        IRunRegistry.RunConfig memory config = _config();
        vm.prank(owner);
        uint64 other = runs.createRun(config);
        address validator = validators[who % 5];
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunUnauthorized.selector, other, validator));
        vm.prank(validator);
        runs.pauseSlashing(other, CAUSE, 60, EVIDENCE);
    }

    function testFuzz_pauseSlashing_reverts_whenRunIsUnknown(uint64 unknown) public {
        vm.assume(unknown != runId);
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunUnknown.selector, unknown));
        vm.prank(validators[0]);
        runs.pauseSlashing(unknown, CAUSE, 60, EVIDENCE);
    }

    function testFuzz_pauseSlashing_reverts_withoutEvidence(uint256 who, uint8 reason) public {
        vm.expectRevert(
            abi.encodeWithSelector(IRunRegistryErrors.RunInvalidParameter.selector, bytes32("evidenceHash"))
        );
        vm.prank(_entitled(who));
        runs.pauseSlashing(runId, CAUSE, reason, 0);
    }

    // ------------------------------------------------------------------- how long

    function testFuzz_pauseSlashing_saysWhoAndWhy(uint256 who, uint8 cause, uint8 reason, bytes32 evidence) public {
        vm.assume(evidence != 0);
        IRunRegistry.PauseCause why = IRunRegistry.PauseCause(cause % 3);
        uint256 until = block.timestamp + SLASH_PAUSE;
        vm.expectEmit(address(runs));
        emit IRunRegistryEvents.SlashingPaused(runId, _entitled(who), why, reason, evidence, until);
        vm.prank(_entitled(who));
        runs.pauseSlashing(runId, why, reason, evidence);
        assertEq(_pausedUntil(), until, "until");
    }

    /// @dev Whoever tries, nobody prolongs a pause or starts the next before slashing has run for the cooldown.
    function testFuzz_pauseSlashing_reverts_tooSoonAgain(uint256 first, uint256 second, uint256 waited) public {
        _pauseBy(_entitled(first));
        uint256 until = _pausedUntil();
        uint256 notBefore = until + SLASH_COOLDOWN;
        // Often in the last second.
        vm.warp(waited % 2 == 0 ? notBefore - 1 : bound(waited, block.timestamp, notBefore - 1));
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunPauseTooSoon.selector, runId, notBefore));
        _pauseBy(_entitled(second));
        assertEq(_pausedUntil(), until, "not prolonged");
    }

    function testFuzz_pauseSlashing_isPossibleAgain_afterTheCooldown(uint256 waited) public {
        uint256 notBefore = _pauseSlashing() + SLASH_COOLDOWN;
        vm.warp(waited % 2 == 0 ? notBefore : bound(waited, notBefore, notBefore + 365 days));
        assertEq(_pauseSlashing(), _pausedUntil(), "paused");
    }

    /// @dev However pauses are placed, slashing runs for at least cooldown / (cooldown + pause) of the time.
    function testFuzz_pauseSlashing_neverStopsSlashingForGood(uint256 seed) public {
        uint256 start = block.timestamp;
        uint256 paused;
        for (uint256 i = 0; i < 20; ++i) {
            vm.warp(block.timestamp + uint256(keccak256(abi.encode(seed, i))) % (2 * SLASH_PAUSE));
            vm.prank(_entitled(seed >> i));
            try runs.pauseSlashing(runId, CAUSE, 60, EVIDENCE) {
                paused += SLASH_PAUSE;
            } catch {}
        }
        uint256 passed = _pausedUntil() + SLASH_COOLDOWN - start;
        assertGt(paused, 0, "paused at times");
        assertLe(paused * (SLASH_PAUSE + SLASH_COOLDOWN), passed * SLASH_PAUSE, "share of the time");
    }

    function test_pauseSlashing_concernsOneRun() public {
        IRunRegistry.RunConfig memory config = _config();
        vm.prank(owner);
        uint64 other = runs.createRun(config);
        _pauseSlashing();
        assertEq(runs.slashPausedUntil(other), 0, "the other run");
    }

    /// @dev One run's cooldown is not another's.
    function test_pauseSlashing_isPossible_whileAnotherRunIsPaused() public {
        IRunRegistry.RunConfig memory config = _config();
        vm.prank(owner);
        uint64 other = runs.createRun(config);
        _pauseSlashing();
        vm.prank(owner);
        runs.pauseSlashing(other, CAUSE, 60, EVIDENCE);
        assertEq(runs.slashPausedUntil(other), block.timestamp + SLASH_PAUSE, "paused, too");
    }

    function test_pauseSlashing_isPossible_inAClosedRun() public {
        vm.prank(owner);
        runs.closeRun(runId);
        assertEq(_pauseSlashing(), _pausedUntil(), "its frauds are still executed, too");
    }

    function testFuzz_slashPausedUntil_isZero_ofUnknownRuns(uint64 unknown) public {
        vm.assume(unknown != runId);
        _pauseSlashing();
        assertEq(runs.slashPausedUntil(unknown), 0, "never paused");
    }

    // ----------------------------------------------------------- what a pause stops

    function _postFraud() private returns (IContributionLedger.OutcomeProof memory) {
        bytes[] memory records = _one(_record(alice, 1, 0, FRAUD));
        return _prove(_commitAndPost(records), records, 0);
    }

    function _executeFraud(IContributionLedger.OutcomeProof memory outcome, bytes memory signature) private {
        ledger.executeFraud(outcome, _held(outcome, _submission(alice, 1, 0), signature));
    }

    function testFuzz_executeFraud_reverts_whileSlashingIsPaused(uint256 waited) public {
        IContributionLedger.OutcomeProof memory outcome = _postFraud();
        bytes memory signature = _signSubmission(_submission(alice, 1, 0), aliceNodeKey);
        uint256 until = _pauseSlashing();
        vm.warp(waited % 2 == 0 ? until - 1 : bound(waited, block.timestamp, until - 1));
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerSlashingPaused.selector, runId, until));
        _executeFraud(outcome, signature);
    }

    function testFuzz_executeFraud_works_onceThePauseIsOver(uint256 waited) public {
        IContributionLedger.OutcomeProof memory outcome = _postFraud();
        bytes memory signature = _signSubmission(_submission(alice, 1, 0), aliceNodeKey);
        vm.warp(_pauseSlashing() + (waited % 2 == 0 ? 0 : bound(waited, 0, 30 days)));
        _executeFraud(outcome, signature);
        assertEq(workers.memberOf(runId, alice).convictions, 1, "convicted");
    }

    function test_executeFraud_works_whileAnotherRunIsPaused() public {
        IRunRegistry.RunConfig memory config = _config();
        vm.prank(owner);
        uint64 other = runs.createRun(config);
        vm.prank(owner);
        runs.pauseSlashing(other, CAUSE, 60, EVIDENCE);
        _executeFraud(_postFraud(), _signSubmission(_submission(alice, 1, 0), aliceNodeKey));
        assertEq(workers.memberOf(runId, alice).convictions, 1, "convicted");
    }

    // -------------------------------------------------------------------- windows

    function testFuzz_fraudClosesAt_isUnmoved_withoutAPause(uint64 run, uint128 closesAt, uint128 window) public view {
        window = uint128(bound(window, 0, closesAt));
        assertEq(runs.fraudClosesAt(run, closesAt, window), closesAt, "as without");
    }

    /// @dev By seconds: a window [opened, closed) that shares one with the pause [from, until) is prolonged.
    function testFuzz_fraudClosesAt_countsFromThePauseThatMetTheWindow(uint256 opened, uint256 window) public {
        uint256 from = block.timestamp;
        uint256 until = _pauseSlashing();
        window = bound(window, 1, CHALLENGE_WINDOW);
        // Often a window that ends as the pause begins, or begins as it ends; or one that meets it for a second.
        if (opened % 3 == 0) opened = from - window + opened / 3 % 2;
        else if (opened % 3 == 1) opened = until - 1 + opened / 3 % 2;
        else opened = bound(opened, from - 2 * window, until + window);
        bool met = opened < until && from < opened + window;
        assertEq(
            runs.fraudClosesAt(runId, opened + window, window), met ? until + window : opened + window, "closes at"
        );
    }

    /// @dev What was final when a pause began is so for ever, whatever pauses come.
    function testFuzz_fraudClosesAt_neverReopens(uint256 opened, uint256 gap, uint256 asked) public {
        uint256 from = block.timestamp;
        opened = bound(opened, from - 2 * CHALLENGE_WINDOW, from + SLASH_PAUSE);
        uint256 until = _pauseSlashing();
        uint256 first = runs.fraudClosesAt(runId, opened + CHALLENGE_WINDOW, CHALLENGE_WINDOW);
        vm.warp(until + SLASH_COOLDOWN + (gap % 2 == 0 ? 0 : gap % 30 days));
        assertLe(first, block.timestamp, "final when the next one can begin");
        _pauseSlashing();
        vm.warp(block.timestamp + asked % 30 days);
        uint256 second = runs.fraudClosesAt(runId, opened + CHALLENGE_WINDOW, CHALLENGE_WINDOW);
        assertLe(second, block.timestamp, "final still");
    }
}
