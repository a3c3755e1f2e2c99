// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IContributionLedger, IContributionLedgerErrors} from "../../src/interfaces/IContributionLedger.sol";
import {IRunRegistry, IRunRegistryErrors, IRunRegistryEvents} from "../../src/interfaces/IRunRegistry.sol";
import {IWorkerRegistry} from "../../src/interfaces/IWorkerRegistry.sol";
import {BaseTest} from "../BaseTest.sol";

/// @title Terms change within bounds and after a delay; each has a number, and batches keep those of their commitment
contract RunChangeTest is BaseTest {
    uint32 private constant FIRST_TERMS = 1;
    uint32 private constant SECOND_TERMS = 2;

    IWorkerRegistry.NodeConsent private _aliceConsent;

    function setUp() public override {
        super.setUp();
        runId = _createRun();
    }

    /// @dev Valid terms, whatever the seed.
    function _terms(uint256 seed) private view returns (IRunRegistry.Terms memory terms) {
        terms.pricePerUnit = uint88(bound(uint64(seed), PRICE / 2, 2 * PRICE));
        terms.exactFraudPpm = uint32(bound(uint32(seed >> 64), 0, PPM));
        terms.fraudPpm = uint32(bound(uint32(seed >> 96), 0, terms.exactFraudPpm));
        terms.quorum = uint8(bound(uint8(seed >> 128), 1, runs.MAX_SEATS()));
    }

    function _propose(IRunRegistry.Terms memory terms) private {
        vm.prank(owner);
        runs.proposeChange(runId, terms);
    }

    function _cancel() private {
        vm.prank(owner);
        runs.cancelChange(runId);
    }

    /// @dev Puts terms into effect at the earliest time.
    function _change(IRunRegistry.Terms memory terms) private {
        _propose(terms);
        vm.warp(block.timestamp + CHANGE_DELAY);
        runs.applyChange(runId);
    }

    function _expectUnauthorized(address caller) private {
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunUnauthorized.selector, runId, caller));
    }

    function _expectUnknown(uint64 unknown) private {
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunUnknown.selector, unknown));
    }

    function _expectInvalid(bytes32 name) private {
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunInvalidParameter.selector, name));
    }

    function _expectNotDue(uint256 effectiveAt) private {
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunChangeNotDue.selector, runId, effectiveAt));
    }

    function _expectTermsChanged(uint32 accepted, uint32 current, uint256 changesAt) private {
        vm.expectRevert(
            abi.encodeWithSelector(IRunRegistryErrors.RunTermsChanged.selector, runId, accepted, current, changesAt)
        );
    }

    function _assertSame(IRunRegistry.Terms memory a, IRunRegistry.Terms memory b, string memory why) private pure {
        assertEq(keccak256(abi.encode(a)), keccak256(abi.encode(b)), why);
    }

    function _assertTerms(IRunRegistry.Terms memory expected, uint32 expectedNumber, string memory why) private view {
        (IRunRegistry.Terms memory terms, uint32 number) = runs.termsOf(runId);
        _assertSame(terms, expected, why);
        assertEq(number, expectedNumber, "number");
    }

    function _assertNothingAnnounced() private view {
        (IRunRegistry.Terms memory proposed, uint256 at) = runs.proposedChange(runId);
        IRunRegistry.Terms memory none;
        _assertSame(proposed, none, "nothing announced");
        assertEq(at, 0, "no time");
    }

    // ------------------------------------------------------------------- propose

    function testFuzz_proposeChange_reverts_whenNotTheOwner(address caller, uint256 seed) public {
        vm.assume(caller != owner);
        IRunRegistry.Terms memory terms = _terms(seed);
        _expectUnauthorized(caller);
        vm.prank(caller);
        runs.proposeChange(runId, terms);
    }

    function testFuzz_proposeChange_reverts_whenRunIsUnknown(uint64 unknown, uint256 seed) public {
        vm.assume(unknown != runId);
        IRunRegistry.Terms memory terms = _terms(seed);
        _expectUnknown(unknown);
        vm.prank(owner);
        runs.proposeChange(unknown, terms);
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

    function _createAtPrice(uint88 price) private returns (IRunRegistry.RunConfig memory config) {
        config = _config();
        config.terms.pricePerUnit = price;
        vm.prank(owner);
        runId = runs.createRun(config);
    }

    /// @dev Half of a price of one is zero, which is no price.
    function test_proposeChange_reverts_whenThePriceIsZero() public {
        IRunRegistry.RunConfig memory config = _createAtPrice(1);
        config.terms.pricePerUnit = 0;
        _expectInvalid("pricePerUnit");
        _propose(config.terms);
    }

    /// @dev Twice the highest price is more than a price can be, and no obstacle.
    function testFuzz_proposeChange_works_atTheHighestPrices(uint88 before, uint88 next) public {
        before = uint88(bound(before, type(uint88).max / 2 + 1, type(uint88).max));
        IRunRegistry.RunConfig memory config = _createAtPrice(before);
        config.terms.pricePerUnit = uint88(bound(next, before / 2, type(uint88).max));
        _change(config.terms);
        _assertTerms(config.terms, SECOND_TERMS, "in effect");
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
        uint256 seats = runs.MAX_SEATS();
        IRunRegistry.Terms memory terms = _terms(seed);
        terms.quorum = seed % 2 == 0 ? 0 : uint8(bound(quorum, seats + 1, 255));
        vm.expectRevert(abi.encodeWithSelector(IRunRegistryErrors.RunInvalidQuorum.selector, terms.quorum, seats));
        _propose(terms);
    }

    function testFuzz_proposeChange_announces_andChangesNothingYet(uint256 seed) public {
        IRunRegistry.Terms memory terms = _terms(seed);
        uint256 effectiveAt = block.timestamp + CHANGE_DELAY;
        vm.expectEmit(address(runs));
        emit IRunRegistryEvents.ChangeProposed(runId, terms, effectiveAt);
        _propose(terms);
        (IRunRegistry.Terms memory proposed, uint256 at) = runs.proposedChange(runId);
        _assertSame(proposed, terms, "announced");
        assertEq(at, effectiveAt, "effective at");
        _assertTerms(_config().terms, FIRST_TERMS, "as before");
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
        _assertTerms(_terms(second), SECOND_TERMS, "the later announcement");
    }

    // -------------------------------------------------------------------- cancel

    function testFuzz_cancelChange_reverts_whenNotTheOwner(address caller, uint256 seed) public {
        vm.assume(caller != owner);
        _propose(_terms(seed));
        _expectUnauthorized(caller);
        vm.prank(caller);
        runs.cancelChange(runId);
    }

    function test_cancelChange_reverts_whenNothingIsAnnounced() public {
        _expectNotDue(0);
        _cancel();
    }

    function testFuzz_cancelChange_withdrawsTheAnnouncement(uint256 seed, uint256 waited) public {
        _propose(_terms(seed));
        vm.warp(block.timestamp + bound(waited, 0, 10 * CHANGE_DELAY));
        vm.expectEmit(address(runs));
        emit IRunRegistryEvents.ChangeCancelled(runId);
        _cancel();
        _assertNothingAnnounced();
        vm.warp(block.timestamp + CHANGE_DELAY);
        _expectNotDue(0);
        runs.applyChange(runId);
    }

    // --------------------------------------------------------------------- apply

    function testFuzz_applyChange_reverts_whenRunIsUnknown(uint64 unknown) public {
        vm.assume(unknown != runId);
        _expectUnknown(unknown);
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

    function testFuzz_applyChange_lets_anyone_once(address caller, uint256 seed, uint256 waited) public {
        IRunRegistry.Terms memory terms = _terms(seed);
        _propose(terms);
        vm.warp(block.timestamp + bound(waited, CHANGE_DELAY, 100 * CHANGE_DELAY));
        vm.expectEmit(address(runs));
        emit IRunRegistryEvents.ChangeApplied(runId, SECOND_TERMS, terms);
        vm.prank(caller);
        runs.applyChange(runId);
        _assertTerms(terms, SECOND_TERMS, "in effect");
        _assertNothingAnnounced();
        _expectNotDue(0);
        runs.applyChange(runId);
    }

    function testFuzz_applyChange_reachesCommitments(uint256 seed) public {
        IRunRegistry.Terms memory terms = _terms(seed);
        _change(terms);
        (,, uint32 number, uint88 price) = runs.admissionOf(runId);
        assertEq(number, SECOND_TERMS, "terms of commitments");
        assertEq(price, terms.pricePerUnit, "what commitments pay");
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
        _change(terms);
        _assertTerms(terms, 3, "twice doubled");
    }

    function testFuzz_applyChange_concernsOneRun(uint256 seed) public {
        IRunRegistry.RunConfig memory config = _config();
        vm.prank(owner);
        uint64 other = runs.createRun(config);
        _change(_terms(seed));
        (IRunRegistry.Terms memory terms, uint32 number) = runs.termsOf(other);
        _assertSame(terms, config.terms, "terms of the other run");
        assertEq(number, FIRST_TERMS, "their number");
        runs.requireTerms(other, FIRST_TERMS);
    }

    // -------------------------------------------------------------------- numbers

    /// @dev Whatever is announced, cancelled and applied: terms with a number stay what they were.
    function testFuzz_terms_neverChange(uint256 seed, uint256 steps) public {
        IRunRegistry.Terms[] memory known = new IRunRegistry.Terms[](9);
        known[1] = _config().terms;
        uint32 count = 1;
        steps = bound(steps, 1, 7);
        for (uint256 i = 0; i < steps; ++i) {
            uint256 random = uint256(keccak256(abi.encode(seed, i)));
            IRunRegistry.Terms memory next = _terms(random);
            next.pricePerUnit = known[count].pricePerUnit;
            _propose(next);
            if (random % 3 == 0) {
                _cancel();
            } else {
                vm.warp(block.timestamp + CHANGE_DELAY);
                runs.applyChange(runId);
                known[++count] = next;
            }
            for (uint32 j = 0; j < 9; ++j) {
                _assertSame(runs.termsAt(runId, j), known[j], "terms by number");
            }
        }
        _assertTerms(known[count], count, "the newest");
    }

    function testFuzz_termsAt_isZero_whenThereAreNone(uint64 run, uint32 number) public view {
        vm.assume(run != runId || number != FIRST_TERMS);
        IRunRegistry.Terms memory none;
        _assertSame(runs.termsAt(run, number), none, "none");
    }

    function testFuzz_requireTerms_reverts_forTermsOfThePast_andTheFuture(uint256 seed, uint32 number) public {
        vm.assume(number != SECOND_TERMS);
        if (seed % 2 == 0) number = FIRST_TERMS;
        _change(_terms(seed));
        runs.requireTerms(runId, SECOND_TERMS);
        _expectTermsChanged(number, SECOND_TERMS, 0);
        runs.requireTerms(runId, number);
    }

    /// @dev Neither the terms of now nor those that come are agreed to while a change is announced, due or not.
    function testFuzz_requireTerms_reverts_whileAChangeIsAnnounced(uint256 seed, uint256 waited, bool next) public {
        _propose(_terms(seed));
        uint256 effectiveAt = block.timestamp + CHANGE_DELAY;
        vm.warp(block.timestamp + bound(waited, 0, 2 * CHANGE_DELAY));
        uint32 number = next ? SECOND_TERMS : FIRST_TERMS;
        _expectTermsChanged(number, FIRST_TERMS, effectiveAt);
        runs.requireTerms(runId, number);
    }

    function testFuzz_requireTerms_accepts_onceTheAnnouncementIsWithdrawn(uint256 seed, uint256 waited) public {
        _propose(_terms(seed));
        vm.warp(block.timestamp + bound(waited, 0, 2 * CHANGE_DELAY));
        _cancel();
        runs.requireTerms(runId, FIRST_TERMS);
        _expectTermsChanged(SECOND_TERMS, FIRST_TERMS, 0);
        runs.requireTerms(runId, SECOND_TERMS);
    }

    // -------------------------------------------------------------------- joining

    function _tryJoin(uint32 terms) private {
        vm.prank(alice);
        workers.join(runId, terms, REQUIRED_STAKE, _aliceConsent, _noPermit());
    }

    function _prepareConsent() private {
        _aliceConsent = _nodeConsent(alice, aliceNode, aliceNodeKey, type(uint256).max);
    }

    function testFuzz_join_reverts_whileAChangeIsAnnounced(uint256 seed, uint256 waited) public {
        _prepareConsent();
        _propose(_terms(seed));
        uint256 effectiveAt = block.timestamp + CHANGE_DELAY;
        vm.warp(block.timestamp + bound(waited, 0, 2 * CHANGE_DELAY));
        _expectTermsChanged(FIRST_TERMS, FIRST_TERMS, effectiveAt);
        _tryJoin(FIRST_TERMS);
    }

    /// @dev Who agreed to the first terms is not bound to the second ones.
    function testFuzz_join_reverts_underTermsThatAreOver(uint256 seed) public {
        _prepareConsent();
        _change(_terms(seed));
        _expectTermsChanged(FIRST_TERMS, SECOND_TERMS, 0);
        _tryJoin(FIRST_TERMS);
    }

    function testFuzz_join_works_underTheNewTerms(uint256 seed) public {
        _prepareConsent();
        _change(_terms(seed));
        _tryJoin(SECOND_TERMS);
        _assertStatus(alice, IWorkerRegistry.Status.Active, "a worker");
    }

    function testFuzz_join_works_onceTheAnnouncementIsWithdrawn(uint256 seed) public {
        _prepareConsent();
        _propose(_terms(seed));
        _cancel();
        _tryJoin(FIRST_TERMS);
        _assertStatus(alice, IWorkerRegistry.Status.Active, "a worker");
    }

    function _leaveAndDeposit() private {
        _join(runId, alice, aliceNode, aliceNodeKey, REQUIRED_STAKE);
        vm.prank(alice);
        workers.exit(runId);
        _deposit(runId, alice, REQUIRED_STAKE);
    }

    function testFuzz_comeBack_reverts_whileAChangeIsAnnounced(uint256 seed) public {
        _leaveAndDeposit();
        _propose(_terms(seed));
        _expectTermsChanged(FIRST_TERMS, FIRST_TERMS, block.timestamp + CHANGE_DELAY);
        vm.prank(alice);
        workers.comeBack(runId, FIRST_TERMS);
    }

    function testFuzz_comeBack_agreesToTheNewTermsOnly(uint256 seed) public {
        _leaveAndDeposit();
        _change(_terms(seed));
        _expectTermsChanged(FIRST_TERMS, SECOND_TERMS, 0);
        vm.prank(alice);
        workers.comeBack(runId, FIRST_TERMS);
        vm.prank(alice);
        workers.comeBack(runId, SECOND_TERMS);
        _assertStatus(alice, IWorkerRegistry.Status.Active, "back");
    }

    function _inviteStranger() private {
        vm.prank(owner);
        runs.invite(runId, stranger, true);
    }

    function testFuzz_takeSeat_reverts_whileAChangeIsAnnounced(uint256 seed, uint256 waited) public {
        _inviteStranger();
        _propose(_terms(seed));
        uint256 effectiveAt = block.timestamp + CHANGE_DELAY;
        vm.warp(block.timestamp + bound(waited, 0, 2 * CHANGE_DELAY));
        _expectTermsChanged(FIRST_TERMS, FIRST_TERMS, effectiveAt);
        vm.prank(stranger);
        runs.takeSeat(runId, FIRST_TERMS, REQUIRED_VALIDATOR_STAKE);
    }

    function testFuzz_takeSeat_agreesToTheNewTermsOnly(uint256 seed) public {
        _inviteStranger();
        _change(_terms(seed));
        _expectTermsChanged(FIRST_TERMS, SECOND_TERMS, 0);
        vm.prank(stranger);
        runs.takeSeat(runId, FIRST_TERMS, REQUIRED_VALIDATOR_STAKE);
        vm.expectEmit(address(runs));
        emit IRunRegistryEvents.ValidatorSeated(runId, stranger, 32, SECOND_TERMS);
        vm.prank(stranger);
        runs.takeSeat(runId, SECOND_TERMS, REQUIRED_VALIDATOR_STAKE);
    }

    /// @dev Whoever dislikes what is announced has the delay to leave in, with all its stake on its way out.
    function testFuzz_exit_works_whileAChangeIsAnnounced(uint256 seed) public {
        _join(runId, alice, aliceNode, aliceNodeKey, REQUIRED_STAKE);
        _propose(_terms(seed));
        vm.prank(alice);
        workers.exit(runId);
        (uint256 active, uint256 unbonding) = _stake(alice);
        assertEq(active, 0, "active");
        assertEq(unbonding, REQUIRED_STAKE, "unbonding");
    }

    // -------------------------------------------------------------------- batches

    /// @dev A batch of `count` submissions that is committed before other terms take effect, and judged after that.
    function _commitBeforeChange(IRunRegistry.Terms memory terms, uint256 count) private returns (uint64 batchId) {
        vm.prank(owner);
        escrow.fund(runId, WALLET / 2);
        _propose(terms);
        vm.warp(block.timestamp + CHANGE_DELAY);
        batchId = _commitRecords(_accepted(count));
        runs.applyChange(runId);
    }

    /// @dev Work committed before a change is paid as it was promised.
    function testFuzz_applyChange_leavesCommittedWorkAtItsPrice(uint256 seed) public {
        _joinAliceAndBob();
        uint64 batchId = _commitBeforeChange(_terms(seed), 1);
        bytes[] memory records = _accepted(1);
        _post(batchId, records, 5);
        _passChallengeWindow();
        assertEq(_claim(batchId, records, 0, 1), 1000 * uint256(PRICE), "the price of its commitment");
    }

    function testFuzz_commitBatch_isPaidByTheTermsInEffect(uint256 seed) public {
        _joinAliceAndBob();
        vm.prank(owner);
        escrow.fund(runId, WALLET / 2);
        IRunRegistry.Terms memory terms = _terms(seed);
        terms.quorum = QUORUM;
        _change(terms);
        bytes[] memory records = _accepted(1);
        uint64 batchId = _commitAndPost(records);
        _passChallengeWindow();
        assertEq(_claim(batchId, records, 0, 1), 1000 * uint256(terms.pricePerUnit), "the new price");
    }

    /// @dev An owner that asks for fewer signers later does not lower the quorum of what is committed.
    function test_postOutcomes_reverts_belowTheQuorumOfItsTerms() public {
        _joinAliceAndBob();
        IRunRegistry.Terms memory terms = _config().terms;
        terms.quorum = 1;
        uint64 batchId = _commitBeforeChange(terms, 1);
        bytes memory records = _accepted(1)[0];
        bytes memory signatures = _signOutcomes(batchId, records, 1);
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerQuorumNotMet.selector, 1, QUORUM));
        ledger.postOutcomes(batches[batchId], records, signatures);
    }

    /// @dev Nor does one that asks for more signers keep what is committed from being judged.
    function test_postOutcomes_works_withTheQuorumOfItsTerms() public {
        _joinAliceAndBob();
        IRunRegistry.Terms memory terms = _config().terms;
        terms.quorum = QUORUM + 1;
        uint64 batchId = _commitBeforeChange(terms, 1);
        bytes[] memory records = _accepted(1);
        _post(batchId, records, QUORUM);
        IContributionLedger.Standing memory standing = ledger.standingOf(_prove(batchId, records, 0));
        assertEq(standing.verdict, ACCEPTED, "judged");
    }

    function test_postOutcomes_reverts_belowTheQuorumOfTheNewTerms() public {
        _joinAliceAndBob();
        vm.prank(owner);
        escrow.fund(runId, WALLET / 2);
        IRunRegistry.Terms memory terms = _config().terms;
        terms.quorum = QUORUM + 1;
        _change(terms);
        uint64 batchId = _commit(1);
        bytes memory records = _accepted(1)[0];
        bytes memory signatures = _signOutcomes(batchId, records, QUORUM);
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerQuorumNotMet.selector, QUORUM, QUORUM + 1)
        );
        ledger.postOutcomes(batches[batchId], records, signatures);
    }

    function _executeFraud(uint64 batchId, bytes[] memory records) private returns (uint256) {
        IContributionLedger.Submission memory submission = _submission(alice, 1, 0);
        IContributionLedger.OutcomeProof memory outcome = _prove(batchId, records, 0);
        return ledger.executeFraud(outcome, _held(outcome, submission, _signSubmission(submission, aliceNodeKey)));
    }

    function _fraud(bool exact) private view returns (bytes[] memory) {
        IContributionLedger.Outcome memory outcome = _outcome(alice, 1, 0, FRAUD);
        if (exact) outcome.reason = uint8(EXACT);
        return _one(_pack(outcome));
    }

    function _rounded(uint256 ppm) private pure returns (uint256) {
        return (REQUIRED_STAKE * ppm + PPM - 1) / PPM;
    }

    /// @dev Work committed before a change is punished as it was agreed.
    function testFuzz_executeFraud_costsWhatTheTermsOfItsBatchSay(uint256 seed, bool exact) public {
        _joinAliceAndBob();
        uint64 batchId = _commitBeforeChange(_terms(seed), 1);
        bytes[] memory records = _fraud(exact);
        _post(batchId, records, QUORUM);
        assertEq(_executeFraud(batchId, records), _rounded(exact ? EXACT_FRAUD_PPM : FRAUD_PPM), "by the first terms");
    }

    function testFuzz_executeFraud_costsWhatTheNewTermsSay(uint256 seed, bool exact) public {
        _joinAliceAndBob();
        vm.prank(owner);
        escrow.fund(runId, WALLET / 2);
        IRunRegistry.Terms memory terms = _terms(seed);
        terms.quorum = QUORUM;
        _change(terms);
        bytes[] memory records = _fraud(exact);
        uint64 batchId = _commitAndPost(records);
        assertEq(
            _executeFraud(batchId, records), _rounded(exact ? terms.exactFraudPpm : terms.fraudPpm), "by the second"
        );
    }
}
