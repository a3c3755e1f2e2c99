// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IContributionLedger, IContributionLedgerErrors} from "../../src/interfaces/IContributionLedger.sol";
import {IFaultCourt} from "../../src/interfaces/IFaultCourt.sol";
import {IRewardEscrow, IRewardEscrowErrors} from "../../src/interfaces/IRewardEscrow.sol";
import {IRunRegistry, IRunRegistryErrors} from "../../src/interfaces/IRunRegistry.sol";
import {IStakeVaultErrors} from "../../src/interfaces/IStakeVault.sol";
import {IWorkerRegistry, IWorkerRegistryErrors} from "../../src/interfaces/IWorkerRegistry.sol";
import {LedgerTest} from "../LedgerTest.sol";

/// @title Attacks that must fail
/// @dev D1 to D10 are defects found in a network of this kind, A8 to A28 attacks on any such network: see
///      docs/security.md for both lists.
/// forge-config: default.fuzz.runs = 64
contract AttacksTest is LedgerTest {
    uint256 private constant ORDER = 0xfffffffffffffffffffffffffffffffebaaedce6af48a03bbfd25e8cd0364141;

    function setUp() public override {
        super.setUp();
        _startRun(WALLET / 2);
    }

    // ------------------------------------------------------------------ shorthand

    function _fraudOf(uint32 step, uint32 index) private returns (IContributionLedger.OutcomeProof memory) {
        bytes[] memory records = _one(_record(alice, step, index, FRAUD));
        return _prove(_commitAndPost(records), records, 0);
    }

    function _execute(IContributionLedger.OutcomeProof memory outcome, uint32 step, uint32 index)
        private
        returns (uint256)
    {
        IContributionLedger.Submission memory submission = _submission(alice, step, index);
        return ledger.executeFraud(outcome, submission, _signSubmission(submission, aliceNodeKey));
    }

    function _claimsOf(uint64 batchId, bytes[] memory records) private view returns (IRewardEscrow.Claim[] memory) {
        return _justOne(_claimOf(batchId, records, _range(0, records.length)));
    }

    function _expectInvalidSubmission(
        IContributionLedger.Submission memory submission,
        bytes memory signature,
        address signer
    ) private {
        vm.expectRevert(
            abi.encodeWithSelector(
                IContributionLedgerErrors.LedgerInvalidSubmission.selector, submission.worker, signer
            )
        );
        vm.prank(submission.worker);
        ledger.submitDirect(submission, signature);
    }

    /// @dev The other signature that the curve allows for the same message.
    function _raiseS(bytes memory signature) private pure returns (bytes memory) {
        (bytes32 r, bytes32 s) = abi.decode(signature, (bytes32, bytes32));
        return bytes.concat(r, bytes32(ORDER - uint256(s)), signature[64] == 0x1b ? bytes1(0x1c) : bytes1(0x1b));
    }

    // ------------------------------------------------------------------------- D1

    /// @dev D1: a worker whose stake was slashed away stays admitted and keeps submitting, for any number of units.
    function testFuzz_attack_D1_workWithoutStake(uint256 frauds, uint64 units) public {
        frauds = bound(frauds, 1, 6);
        for (uint32 i = 0; i < frauds; ++i) {
            uint256 before = vault.activeStake(alice);
            assertLe(_execute(_fraudOf(2, i), 2, i), before, "a slash takes no more than there is");
        }
        IContributionLedger.Submission memory submission = _submission(alice, 3, 0);
        submission.units = units;
        _expectInvalidSubmission(submission, _signSubmission(submission, aliceNodeKey), aliceNode);
        uint256 active = vault.activeStake(alice);
        assertLt(active, REQUIRED_STAKE, "not enough is left");
        vm.warp(block.timestamp + JAIL_TIME);
        bytes memory poor =
            abi.encodeWithSelector(IWorkerRegistryErrors.RegistryStakeTooLow.selector, alice, active, REQUIRED_STAKE);
        bytes memory banned = abi.encodeWithSelector(
            IWorkerRegistryErrors.RegistryWrongStatus.selector, alice, IWorkerRegistry.Status.Banned
        );
        vm.expectRevert(frauds == 1 ? poor : banned);
        vm.prank(alice);
        workers.unjail();
    }

    // ------------------------------------------------------------------------- D2

    /// @dev D2: reward for work that was submitted late in a bucket unlocks before it can no longer be invalidated.
    function testFuzz_attack_D2_rewardBeforeTheWindow(uint256 posted, uint256 waited) public {
        bytes[] memory records = _accepted(1);
        uint64 batchId = _commit(1);
        vm.warp(block.timestamp + bound(posted, 0, OUTCOME_DEADLINE - 1));
        _post(batchId, records, QUORUM);
        uint256 finalAt = block.timestamp + CHALLENGE_WINDOW;
        vm.warp(block.timestamp + bound(waited, 0, CHALLENGE_WINDOW - 1));
        IRewardEscrow.Claim[] memory claims = _claimsOf(batchId, records);
        vm.expectRevert(abi.encodeWithSelector(IRewardEscrowErrors.EscrowNotFinal.selector, batchId, finalAt));
        escrow.claim(claims);
        // For as long as that, anybody may still challenge; and then nothing is paid until the jury has spoken.
        _challenge(_prove(batchId, records, 0), REJECTED);
        vm.warp(finalAt);
        vm.expectRevert(abi.encodeWithSelector(IRewardEscrowErrors.EscrowDisputed.selector, batchId, 0));
        escrow.claim(claims);
    }

    // ------------------------------------------------------------------------- D3

    /// @dev D3: a quorum that can never be reached, because opening a vote always fails.
    function testFuzz_attack_D3_quorumThatNobodyReaches(uint8 quorum) public {
        IRunRegistry.RunConfig memory config = _config();
        config.terms.quorum = uint8(bound(quorum, 1, 5));
        vm.startPrank(owner);
        runId = runs.createRun(config);
        escrow.fund(runId, 1000 * uint256(PRICE));
        vm.stopPrank();
        uint64 batchId = _commit(1);
        _post(batchId, _accepted(1), config.terms.quorum);
        assertGt(batches[batchId].signers, 0, "exactly the quorum suffices");
    }

    // ------------------------------------------------------------------------- D4

    /// @dev D4: a replaced validator's key keeps all its power.
    function testFuzz_attack_D4_replacedKeysKeepTheirPower(uint256 place) public {
        place = bound(place, 0, 1);
        bytes memory joined = _record(alice, 1, 0, FRAUD);
        uint64 batchId = _commit(1);
        bytes memory signatures = _signOutcomes(batchId, joined, 2);
        _deposit(stranger, REQUIRED_VALIDATOR_STAKE);
        vm.prank(owner);
        runs.rotateValidator(runId, validators[place], stranger);
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidSigner.selector, validators[place])
        );
        ledger.postOutcomes(batches[batchId], joined, signatures);
        assertFalse(runs.isValidator(runId, validators[place]), "the named one lost its seat, not the caller");
    }

    // ------------------------------------------------------------------------- D5

    /// @dev D5: a provider removes an idle node, and punishing it fails from then on.
    function testFuzz_attack_D5_punishmentBlockedByTheWorker(uint256 key, bool leaves) public {
        IContributionLedger.OutcomeProof memory outcome = _fraudOf(1, 0);
        key = bound(key, 1, 1 << 200);
        bytes memory consent = _consent(alice, vm.addr(key), key, block.timestamp);
        vm.startPrank(alice);
        workers.rotateNode(vm.addr(key), block.timestamp, consent);
        if (leaves) workers.exit();
        vm.stopPrank();
        assertEq(_execute(outcome, 1, 0), REQUIRED_STAKE * FRAUD_PPM / PPM, "slashed by the old node's signature");
    }

    // ------------------------------------------------------------------------- D6

    /// @dev D6: a slash that reaches into stake on its way out makes the matured rest impossible to withdraw.
    function testFuzz_attack_D6_maturedStakeStuckAfterASlash(uint256 extra, uint256 late) public {
        extra = bound(extra, 2, WALLET - REQUIRED_STAKE);
        _deposit(alice, extra);
        vm.prank(alice);
        vault.requestUnbond(extra);
        IContributionLedger.OutcomeProof memory outcome = _fraudOf(1, 0);
        vm.warp(block.timestamp + UNBONDING_PERIOD + bound(late, 0, 365 days));
        _execute(outcome, 1, 0);
        (, uint256 unbonding) = _stake(alice);
        assertEq(unbonding, extra - (extra * FRAUD_PPM + PPM - 1) / PPM, "matured stake pays its part");
        vm.prank(alice);
        assertEq(vault.withdraw(), unbonding, "and the rest leaves at once");
    }

    // ------------------------------------------------------------------------- D7

    /// @dev D7: what is slashed goes to the validator that rejected the work.
    function testFuzz_attack_D7_judgesThatEarnBySlashing(uint256 caller) public {
        caller = bound(caller, 0, 4);
        IContributionLedger.OutcomeProof memory outcome = _fraudOf(1, 0);
        IContributionLedger.Submission memory submission = _submission(alice, 1, 0);
        bytes memory signature = _signSubmission(submission, aliceNodeKey);
        uint256[5] memory before;
        for (uint256 i = 0; i < 5; ++i) {
            before[i] = token.balanceOf(validators[i]) + vault.activeStake(validators[i]);
        }
        vm.prank(validators[caller]);
        uint256 amount = ledger.executeFraud(outcome, submission, signature);
        _passChallengeWindow();
        vm.prank(validators[caller]);
        ledger.finaliseFraud(outcome);
        for (uint256 i = 0; i < 5; ++i) {
            assertEq(token.balanceOf(validators[i]) + vault.activeStake(validators[i]), before[i], "no judge gains");
        }
        assertEq(SUPPLY - token.totalSupply() + token.balanceOf(insurance), amount, "burned or insured, all of it");
    }

    // ------------------------------------------------------------------------ D10

    /// @dev D10: signatures without chain and contract are good elsewhere.
    function testFuzz_attack_D10_signaturesFromElsewhere(uint64 chainId, address elsewhere) public {
        vm.assume(chainId != block.chainid && elsewhere != address(ledger));
        chainId = uint64(bound(chainId, 1, type(uint64).max));
        IContributionLedger.Submission memory submission = _submission(alice, 1, 0);
        bytes32 hash = _submissionHash(submission);
        bytes memory signature = _sign(aliceNodeKey, _separator(chainId, address(ledger)), hash);
        if (chainId != block.chainid) _expectAnySubmissionRefused(submission, signature);
        signature = _sign(aliceNodeKey, _separator(block.chainid, elsewhere), hash);
        _expectAnySubmissionRefused(submission, signature);
        signature = _sign(aliceNodeKey, _separator(block.chainid, address(ledger)), hash);
        vm.prank(alice);
        ledger.submitDirect(submission, signature);
    }

    function _separator(uint256 chainId, address contract_) private pure returns (bytes32) {
        bytes32 typeHash =
            keccak256("EIP712Domain(string name,string version,uint256 chainId,address verifyingContract)");
        return keccak256(abi.encode(typeHash, keccak256("Muster"), keccak256("1"), chainId, contract_));
    }

    function _expectAnySubmissionRefused(IContributionLedger.Submission memory submission, bytes memory signature)
        private
    {
        vm.expectPartialRevert(IContributionLedgerErrors.LedgerInvalidSubmission.selector);
        vm.prank(alice);
        ledger.submitDirect(submission, signature);
    }

    /// @dev D10: whoever leaves and comes back needs more stake than a newcomer.
    function test_attack_D10_comingBackCostsMore() public {
        vm.startPrank(alice);
        workers.exit();
        vm.warp(block.timestamp + UNBONDING_PERIOD);
        assertEq(vault.withdraw(), REQUIRED_STAKE, "a full refund");
        vault.deposit(alice, REQUIRED_STAKE);
        workers.rejoin();
        vm.stopPrank();
        vm.roll(block.number + ACTIVATION_DELAY);
        assertTrue(workers.isActive(alice), "the same stake as before");
    }

    // ------------------------------------------------------------------------- A8

    /// @dev A8: the same statement in another encoding counts as another one.
    function testFuzz_attack_A8_malleableSubmissions(uint32 index, uint8 v, bytes calldata tail) public {
        vm.assume(v != 27 && v != 28);
        IContributionLedger.Submission memory submission = _submission(alice, 1, index);
        bytes memory signature = _signSubmission(submission, aliceNodeKey);
        _expectInvalidSubmission(submission, _raiseS(signature), address(0));
        bytes memory shifted = bytes.concat(signature);
        shifted[64] = bytes1(v);
        _expectInvalidSubmission(submission, shifted, address(0));
        if (tail.length != 0) _expectInvalidSubmission(submission, bytes.concat(signature, tail), address(0));
        vm.startPrank(alice);
        ledger.submitDirect(submission, signature);
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerSlotUsed.selector, runId, alice, 1, index)
        );
        ledger.submitDirect(submission, signature);
    }

    /// @dev A8: one validator's signature and its malleated twin make a quorum of two.
    function testFuzz_attack_A8_oneValidatorTwice(uint256 place) public {
        place = bound(place, 0, 4);
        bytes memory joined = _record(alice, 1, 0, ACCEPTED);
        uint64 batchId = _commit(1);
        bytes memory signature = _sign(validatorKeys[place], ledger.DOMAIN_SEPARATOR(), _outcomesHash(batchId, joined));
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidSigner.selector, address(0)));
        ledger.postOutcomes(batches[batchId], joined, bytes.concat(signature, _raiseS(signature)));
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidSigner.selector, validators[place])
        );
        ledger.postOutcomes(batches[batchId], joined, bytes.concat(signature, signature));
    }

    // ------------------------------------------------------------------------- A9

    /// @dev A9: the same work is paid again: in the same batch, in another one, or after a direct submission.
    function testFuzz_attack_A9_workReplayed(uint32 index) public {
        bytes[] memory records = _two(_record(alice, 1, index, ACCEPTED), _record(alice, 1, index, ACCEPTED));
        uint64 batchId = _commitAndPost(records);
        _passChallengeWindow();
        IRewardEscrow.Claim[] memory claims = _claimsOf(batchId, records);
        bytes memory why = abi.encodeWithSelector(IRewardEscrowErrors.EscrowSlotPaid.selector, runId, alice, 1, index);
        vm.expectRevert(why);
        escrow.claim(claims);
        _claim(batchId, records, 0, 1);
        claims = _justOne(_claimOf(batchId, records, _range(1, 2)));
        vm.expectRevert(why);
        escrow.claim(claims);

        IContributionLedger.Submission[] memory direct = new IContributionLedger.Submission[](1);
        direct[0] = _submission(alice, 1, index);
        bytes memory signature = _signSubmission(direct[0], aliceNodeKey);
        vm.prank(alice);
        uint64 directId = ledger.submitDirect(direct[0], signature);
        _remember(directId, _submissionLeaf(direct[0]), 1, 1000);
        vm.warp(block.timestamp + OUTCOME_DEADLINE + CHALLENGE_WINDOW);
        claims = _justOne(_overdueClaimOf(directId, direct, _range(0, 1)));
        vm.expectRevert(why);
        escrow.claim(claims);
    }

    /// @dev A9: a signed verdict is posted for another batch of the same submissions.
    function testFuzz_attack_A9_verdictsReplayed(uint256 count) public {
        IContributionLedger.Submission[] memory submissions = _submissions(alice, bound(count, 1, 8));
        bytes memory joined = _join(_accepted(submissions.length));
        uint64 first = _commitSubmissions(submissions);
        bytes memory signatures = _signOutcomes(first, joined, QUORUM);
        uint64 second = _commitSubmissions(submissions);
        vm.expectPartialRevert(IContributionLedgerErrors.LedgerInvalidSigner.selector);
        ledger.postOutcomes(batches[second], joined, signatures);
    }

    /// @dev A9: a node's consent is used a second time, to take a rotated key back.
    function test_attack_A9_consentReplayed() public {
        (address carol, uint256 carolKey) = makeAddrAndKey("carol's node");
        bytes memory consent = _consent(alice, carol, carolKey, block.timestamp);
        vm.startPrank(alice);
        workers.rotateNode(carol, block.timestamp, consent);
        vm.expectRevert(abi.encodeWithSelector(IWorkerRegistryErrors.RegistryNodeTaken.selector, carol, alice));
        workers.rotateNode(carol, block.timestamp, consent);
    }

    // ------------------------------------------------------------------------ A10

    /// @dev A10: a thief that sees a submission before it is final hands it in as its own, and is paid instead.
    function testFuzz_attack_A10_copiedWork(uint32 index) public {
        IContributionLedger.Submission memory stolen = _submission(alice, 1, index);
        // Bob cannot speak for Alice, and what he signs himself is a slot of his own with Bob's own seed.
        _expectInvalidSubmission(stolen, _signSubmission(stolen, bobNodeKey), bobNode);
        stolen.worker = bob;
        bytes memory signature = _signSubmission(stolen, bobNodeKey);
        vm.prank(bob);
        uint64 copyId = ledger.submitDirect(stolen, signature);
        _remember(copyId, _submissionLeaf(stolen), 1, 1000);
        // Validators find prompts and noise of Alice's seed in Bob's file.
        IContributionLedger.Outcome memory copy = _outcome(bob, 1, index, FRAUD);
        (copy.fileHash, copy.reason) = (stolen.fileHash, 41);
        bytes[] memory records = _one(_pack(copy));
        _post(copyId, records, QUORUM);
        ledger.executeFraud(_prove(copyId, records, 0), stolen, signature);
        _assertStatus(bob, IWorkerRegistry.Status.Banned, "the thief");

        bytes[] memory own = _one(_record(alice, 1, index, ACCEPTED));
        uint64 ownId = _commitAndPost(own);
        _passChallengeWindow();
        assertEq(_claim(ownId, own, 0, 1), 1000 * uint256(PRICE), "the victim is paid");
        assertEq(vault.activeStake(alice), REQUIRED_STAKE, "and never punished");
    }

    // ------------------------------------------------------------------------ A11

    /// @dev A11: whoever sees a worker's transaction sends it first, to burn the slot, the cap or the stake.
    function testFuzz_attack_A11_submissionSentBySomebodyElse(address thief, uint32 index) public {
        vm.assume(thief != alice && thief != aliceNode);
        IContributionLedger.Submission memory submission = _submission(alice, 1, index);
        bytes memory signature = _signSubmission(submission, aliceNodeKey);
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerUnauthorized.selector, thief));
        vm.prank(thief);
        ledger.submitDirect(submission, signature);
        vm.prank(alice);
        assertEq(ledger.submitDirect(submission, signature), 1, "her own still goes through");
    }

    /// @dev A11: claims, verdicts and slashes may be sent by anybody, and pay nobody for being first.
    function testFuzz_attack_A11_frontRunning(address thief) public {
        vm.assume(thief != alice && thief.code.length == 0 && thief != address(0) && thief != insurance);
        uint256 before = token.balanceOf(thief);
        bytes[] memory records = _two(_record(alice, 1, 0, ACCEPTED), _record(alice, 1, 1, FRAUD));
        uint64 batchId = _commit(2);
        bytes memory signatures = _signOutcomes(batchId, _join(records), QUORUM);
        IContributionLedger.Batch memory header = batches[batchId];
        vm.prank(thief);
        ledger.postOutcomes(header, _join(records), signatures);
        _rememberPosted(batchId, records, QUORUM);

        IContributionLedger.OutcomeProof memory fraud = _prove(batchId, records, 1);
        IContributionLedger.Submission memory submission = _submission(alice, 1, 1);
        bytes memory signature = _signSubmission(submission, aliceNodeKey);
        _passChallengeWindow();
        IRewardEscrow.Claim[] memory claims = _justOne(_claimOf(batchId, records, _range(0, 1)));
        uint256 alices = token.balanceOf(alice);
        vm.startPrank(thief);
        ledger.executeFraud(fraud, submission, signature);
        ledger.finaliseFraud(fraud);
        escrow.claim(claims);
        vm.stopPrank();
        assertEq(token.balanceOf(alice), alices + 1000 * uint256(PRICE), "the worker is paid");
        assertEq(token.balanceOf(thief), before, "whoever was first is not");
    }

    // ------------------------------------------------------------------------ A13

    /// @dev A13: whoever knows a beacon mints identities until one draws easy problems.
    function testFuzz_attack_A13_identitiesMintedForABeacon(uint256 salt, uint256 waited) public {
        vm.prank(trainer);
        runs.publishCheckpoint(runId, 1, keccak256("manifest"));
        vm.expectPartialRevert(IRunRegistryErrors.RunBeaconUnavailable.selector);
        runs.recordBeacon(runId, 1); // not even the publishing block knows it
        vm.roll(block.number + 1);
        runs.recordBeacon(runId, 1);

        (address minted, uint256 key) = _mint(salt);
        uint256 activeFrom = workers.workerOf(minted).activeFrom;
        assertEq(activeFrom, block.number + ACTIVATION_DELAY, "counted from its registration");
        vm.roll(bound(waited, block.number, activeFrom - 1));
        IContributionLedger.Submission memory submission = _submission(minted, 2, 0);
        bytes memory signature = _signSubmission(submission, key);
        _expectInvalidSubmission(submission, signature, vm.addr(key));
        // By the time it may work, the next version's beacon is another one, of a block not mined when it registered.
        vm.roll(activeFrom);
        vm.prank(minted);
        ledger.submitDirect(submission, signature);
        assertEq(vault.activeStake(minted), REQUIRED_STAKE, "and each identity costs a whole stake");
    }

    function _mint(uint256 salt) private returns (address minted, uint256 key) {
        minted = vm.addr(bound(salt, 1, 1 << 200));
        key = uint256(keccak256(abi.encode("node", salt)));
        vm.assume(minted.code.length == 0 && workers.workerOf(minted).workerId == 0);
        vm.prank(stranger);
        token.transfer(minted, REQUIRED_STAKE);
        bytes memory consent = _consent(minted, vm.addr(key), key, block.timestamp);
        vm.startPrank(minted);
        token.approve(address(vault), REQUIRED_STAKE);
        workers.register(REQUIRED_STAKE, vm.addr(key), block.timestamp, consent);
        vm.stopPrank();
    }

    // ------------------------------------------------------------------------ A28

    /// @dev A28: one stake covers ten times the work. Sent by the worker itself, nine of ten are refused.
    function testFuzz_attack_A28_overcommitDirectly(uint256 waited) public {
        uint256 cap = ledger.unitCapOf(alice);
        _deposit(alice, 1 ether);
        vm.prank(alice);
        vault.requestUnbond(1 ether);
        vm.warp(block.timestamp + UNBONDING_PERIOD);
        _submitWhole(0, cap);
        for (uint32 i = 1; i < 10; ++i) {
            (IContributionLedger.Submission memory submission, bytes memory signature) = _whole(i, cap);
            vm.expectRevert(
                abi.encodeWithSelector(IContributionLedgerErrors.LedgerUnitCap.selector, alice, 2 * cap, cap)
            );
            vm.prank(alice);
            ledger.submitDirect(submission, signature);
        }
        uint256 until = block.timestamp + JUDGED;
        vm.warp(bound(waited, block.timestamp, until - 1));
        vm.expectRevert(abi.encodeWithSelector(IStakeVaultErrors.VaultStakeHeld.selector, alice, 0, until));
        vm.prank(alice);
        vault.withdraw(); // not even stake that is due leaves before the work is judged
    }

    function _whole(uint32 index, uint256 units)
        private
        view
        returns (IContributionLedger.Submission memory submission, bytes memory signature)
    {
        submission = _submission(alice, 1, index);
        submission.units = uint64(units);
        signature = _signSubmission(submission, aliceNodeKey);
    }

    function _submitWhole(uint32 index, uint256 units) private {
        (IContributionLedger.Submission memory submission, bytes memory signature) = _whole(index, units);
        vm.prank(alice);
        ledger.submitDirect(submission, signature);
    }

    /// @dev A28: leased by a careless orchestrator, anybody proves it and the worker is jailed.
    function test_attack_A28_overcommitThroughTheOrchestrator() public {
        uint256 cap = ledger.unitCapOf(alice);
        vm.startPrank(owner);
        escrow.fund(runId, WALLET / 2);
        vm.stopPrank();
        IContributionLedger.Submission[] memory submissions = _submissions(alice, 10);
        for (uint256 i = 0; i < 10; ++i) {
            submissions[i].units = uint64(cap);
        }
        uint64 batchId = _commitSubmissions(submissions);
        IFaultCourt.Work[] memory works = new IFaultCourt.Work[](2);
        for (uint256 i = 0; i < 2; ++i) {
            works[i].outcome = _proveClaimed(batchId, submissions, i);
            works[i].submission = submissions[i];
            works[i].nodeSignature = _signSubmission(submissions[i], aliceNodeKey);
        }
        faults.proveOvercommit(works);
        _assertStatus(alice, IWorkerRegistry.Status.Jailed, "jailed");
    }
}
