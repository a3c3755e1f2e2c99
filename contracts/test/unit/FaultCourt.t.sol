// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IContributionLedger, IContributionLedgerErrors} from "../../src/interfaces/IContributionLedger.sol";
import {IFaultCourtErrors, IFaultCourtEvents} from "../../src/interfaces/IFaultCourt.sol";
import {IRunRegistry} from "../../src/interfaces/IRunRegistry.sol";
import {IStakeVault, IStakeVaultErrors, IStakeVaultEvents} from "../../src/interfaces/IStakeVault.sol";
import {IWorkerRegistry} from "../../src/interfaces/IWorkerRegistry.sol";
import {CourtTest} from "../CourtTest.sol";

/// @dev Faults that two signatures prove. Each is punished once, in one run, and nobody earns by it.
contract FaultCourtTest is CourtTest {
    uint256 private constant STAKE = REQUIRED_VALIDATOR_STAKE;

    function test_constructor_keepsItsParameters() public view {
        assertEq(address(faults.runs()), address(runs), "runs");
        assertEq(address(faults.workers()), address(workers), "workers");
        assertEq(address(faults.vault()), address(vault), "vault");
        assertEq(address(faults.ledger()), address(ledger), "ledger");
    }

    function _expectNoEquivocation(address first, address second) private {
        vm.expectRevert(abi.encodeWithSelector(IFaultCourtErrors.FaultNoEquivocation.selector, first, second));
    }

    function _expectSettled(bytes32 offence) private {
        vm.expectRevert(abi.encodeWithSelector(IStakeVaultErrors.VaultOffenceSettled.selector, offence));
    }

    /// @dev Expects how stake is split for good when there is no reporter.
    function _expectReleased(bytes32 offence, uint256 amount) private {
        uint256 insured = amount * INSURANCE_PPM / PPM;
        vm.expectEmit(address(vault));
        emit IStakeVaultEvents.SlashReleased(offence, address(0), amount - insured, insured, 0);
    }

    function _assertReleased(bytes32 offence, uint256 amount) private view {
        IStakeVault.Escrow memory taken = vault.escrowOf(offence);
        assertEq(taken.amount, amount, "how much");
        assertEq(uint8(taken.status), uint8(IStakeVault.EscrowStatus.Released), "final at once");
    }

    // ------------------------------------------------------------ double outcome

    /// @dev Two statements about outcomes of one batch, and their signatures.
    struct Statements {
        IContributionLedger.Batch batch;
        IContributionLedger.Outcomes first;
        bytes firstSignature;
        IContributionLedger.Outcomes second;
        bytes secondSignature;
    }

    function _outcomes(bytes32 recordsHash) private view returns (IContributionLedger.Outcomes memory) {
        return IContributionLedger.Outcomes(_batchId, keccak256("submissions"), recordsHash);
    }

    function _signedBy(uint256 key, IContributionLedger.Outcomes memory outcomes) private view returns (bytes memory) {
        bytes32 typeHash = keccak256("Outcomes(uint64 batchId,bytes32 batchRoot,bytes32 recordsHash)");
        return _sign(key, ledger.DOMAIN_SEPARATOR(), keccak256(abi.encode(typeHash, outcomes)));
    }

    /// @dev Two different outcomes of the batch, neither of which is signed yet.
    function _contradiction() private view returns (Statements memory s) {
        s.batch = batches[_batchId];
        (s.first, s.second) = (_outcomes("first"), _outcomes("second"));
    }

    function _signBoth(Statements memory s, uint256 firstKey, uint256 secondKey) private view {
        (s.firstSignature, s.secondSignature) = (_signedBy(firstKey, s.first), _signedBy(secondKey, s.second));
    }

    function _prove(Statements memory s) private {
        faults.proveDoubleOutcome(s.batch, s.first, s.firstSignature, s.second, s.secondSignature);
    }

    /// @dev The contradiction of one validator, signed.
    function _contradictionOf(uint256 which) private view returns (Statements memory s) {
        s = _contradiction();
        _signBoth(s, validatorKeys[which], validatorKeys[which]);
    }

    function _doubleOutcome(address validator) private view returns (bytes32) {
        return vault.escrowIdOf(runId, validator, IStakeVault.Offence.DoubleOutcome, _batchId);
    }

    function testFuzz_proveDoubleOutcome_reverts_whenTheHeaderIsAnother(bytes32 root) public {
        Statements memory s = _contradictionOf(3);
        vm.assume(root != s.batch.root);
        s.batch.root = root;
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerBatchMismatch.selector, _batchId));
        _prove(s);
    }

    /// @dev The mutated twins of a proof: the same records, another root, other batches.
    function testFuzz_proveDoubleOutcome_reverts_whenStatementsAgree(uint256 which, bytes32 other, uint64 batchId)
        public
    {
        which = bound(which, 0, 4);
        vm.assume(other != keccak256("submissions") && batchId != _batchId);
        Statements memory s = _contradiction();
        if (which == 0) s.second.recordsHash = "first";
        if (which == 1) s.second.batchRoot = other;
        if (which == 2) s.second.batchId = batchId;
        if (which == 3) s.first.batchId = batchId;
        if (which == 4) s.first.batchId = s.second.batchId = batchId;
        _signBoth(s, validatorKeys[3], validatorKeys[3]);
        _expectNoEquivocation(validators[3], validators[3]);
        _prove(s);
    }

    /// @dev Who could have nothing of a batch yesterday may judge it today.
    function testFuzz_proveDoubleOutcome_reverts_whenOneSaysThatItIsWithheld(bool second, bool both) public {
        Statements memory s = _contradiction();
        if (!second || both) s.first.recordsHash = keccak256("");
        if (second || both) s.second.recordsHash = keccak256("");
        _signBoth(s, validatorKeys[3], validatorKeys[3]);
        _expectNoEquivocation(validators[3], validators[3]);
        _prove(s);
    }

    function testFuzz_proveDoubleOutcome_reverts_whenSignersDiffer(uint256 i, uint256 j) public {
        i = bound(i, 0, 4);
        j = bound(j, 0, 4);
        vm.assume(i != j);
        Statements memory s = _contradiction();
        _signBoth(s, validatorKeys[i], validatorKeys[j]);
        _expectNoEquivocation(validators[i], validators[j]);
        _prove(s);
    }

    function testFuzz_proveDoubleOutcome_reverts_whenSignaturesAreMalformed(bytes memory junk, bool both) public {
        vm.assume(junk.length != 65);
        Statements memory s = _contradictionOf(3);
        s.firstSignature = junk;
        if (both) s.secondSignature = junk;
        _expectNoEquivocation(address(0), both ? address(0) : validators[3]);
        _prove(s);
    }

    function testFuzz_proveDoubleOutcome_reverts_forWhoNeverValidated(uint256 key) public {
        key = bound(key, 1, 1 << 200);
        vm.assume(runs.seatBitOf(runId, vm.addr(key)) == 0);
        Statements memory s = _contradiction();
        _signBoth(s, key, key);
        _expectNoEquivocation(vm.addr(key), vm.addr(key));
        _prove(s);
    }

    /// @dev A validator of another run says nothing about this one.
    function test_proveDoubleOutcome_reverts_forTheValidatorOfAnotherRun() public {
        (address validator, uint256 key) = makeAddrAndKey("another validator");
        _enrich(validator);
        vm.startPrank(owner);
        uint64 other = runs.createRun(_config());
        runs.invite(other, validator, true);
        vm.stopPrank();
        vm.prank(validator);
        runs.takeSeat(other, 1, STAKE);
        Statements memory s = _contradiction();
        _signBoth(s, key, key);
        _expectNoEquivocation(validator, validator);
        _prove(s);
    }

    /// @dev Whether the batch has its outcomes or waits for them.
    function testFuzz_proveDoubleOutcome_takesAllAndTheSeat(uint256 which, address caller, bool posted, uint256 extra)
        public
    {
        if (!posted) _batchId = _commit(1);
        which = bound(which, 0, 4);
        extra = bound(extra, 0, WALLET - STAKE);
        address validator = validators[which];
        if (extra != 0) _deposit(runId, validator, extra);
        Statements memory s = _contradictionOf(which);
        bytes32 offence = _doubleOutcome(validator);
        uint256 before = token.balanceOf(caller);

        _expectReleased(offence, STAKE + extra);
        vm.expectEmit(address(faults));
        emit IFaultCourtEvents.DoubleOutcomeProven(runId, validator, offence, _batchId, STAKE + extra);
        vm.prank(caller);
        _prove(s);
        assertEq(vault.activeStake(runId, validator), 0, "nothing left");
        assertFalse(runs.isValidator(runId, validator), "unseated");
        assertFalse(runs.isInvited(runId, validator), "and not invited any more");
        if (caller != insurance && caller != validator) assertLe(token.balanceOf(caller), before, "nobody earns");
        _assertReleased(offence, STAKE + extra);
    }

    function test_proveDoubleOutcome_reverts_twice() public {
        _prove(_contradictionOf(3));
        Statements memory s = _contradiction();
        (s.first, s.second) = (_outcomes("third"), _outcomes("fourth"));
        _signBoth(s, validatorKeys[3], validatorKeys[3]);
        _expectSettled(_doubleOutcome(validators[3]));
        _prove(s);
    }

    function test_proveDoubleOutcome_reachesUnbondingStake_ofWhoLeftItsSeat() public {
        vm.prank(validators[3]);
        runs.leaveSeat(runId);
        _prove(_contradictionOf(3));
        (, uint256 unbonding) = _stake(validators[3]);
        assertEq(unbonding, 0, "all of it");
        assertFalse(runs.isInvited(runId, validators[3]), "and it does not come back");
    }

    /// @dev Neither what it staked for another run, nor its seat there.
    function test_proveDoubleOutcome_touchesNoOtherRun() public {
        uint64 other = _createRun();
        _prove(_contradictionOf(3));
        assertEq(vault.activeStake(other, validators[3]), STAKE, "stake");
        assertTrue(runs.isValidator(other, validators[3]), "seat");
    }

    // --------------------------------------------------------- double submission

    /// @dev A submission that was judged, another for the same slot, and their signatures.
    struct Pair {
        IContributionLedger.OutcomeProof outcome;
        IContributionLedger.Submission first;
        bytes firstSignature;
        IContributionLedger.Submission second;
        bytes secondSignature;
    }

    /// @dev Alice's submission that was judged, and one of another file, both signed by her node.
    function _pair() private view returns (Pair memory p) {
        p.outcome = _outcomeAt(ALICE_FRAUD);
        (p.first, p.firstSignature) = _evidence(ALICE_FRAUD);
        p.second = _submission(alice, 1, 0);
        p.second.fileHash = keccak256("another file");
        _signSecond(p, aliceNodeKey);
    }

    function _signSecond(Pair memory p, uint256 key) private view {
        p.secondSignature = _signSubmission(p.second, key);
    }

    function _prove(Pair memory p) private {
        faults.proveDoubleSubmission(
            p.outcome, _held(p.outcome, p.first, p.firstSignature), p.second, p.secondSignature
        );
    }

    function _doubleSubmission() private view returns (bytes32) {
        return _escrowId(alice, IStakeVault.Offence.DoubleSubmission, 1, 0);
    }

    /// @dev Gives Alice another node key.
    function _rotateAlice(string memory name) private returns (address node, uint256 nodeKey) {
        (node, nodeKey) = makeAddrAndKey(name);
        IWorkerRegistry.NodeConsent memory consent = _nodeConsent(alice, node, nodeKey, block.timestamp);
        vm.prank(alice);
        workers.rotateNode(consent);
    }

    function _expectInvalidSubmission(address signer) private {
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidSubmission.selector, alice, signer)
        );
    }

    function test_proveDoubleSubmission_reverts_whenTheyAreOne() public {
        Pair memory p = _pair();
        (p.second, p.secondSignature) = (p.first, p.firstSignature);
        _expectNoEquivocation(alice, aliceNode);
        _prove(p);
    }

    function testFuzz_proveDoubleSubmission_reverts_whenSlotsDiffer(uint256 which, uint32 other) public {
        Pair memory p = _pair();
        vm.assume(other != 0 && other != 1);
        which = bound(which, 0, 2);
        if (which == 0) p.second.runId = other;
        if (which == 1) p.second.step = other;
        if (which == 2) p.second.index = other;
        _signSecond(p, aliceNodeKey);
        _expectNoEquivocation(alice, aliceNode);
        _prove(p);
    }

    function testFuzz_proveDoubleSubmission_reverts_whenWorkersDiffer(bool signedByBob) public {
        Pair memory p = _pair();
        p.second.worker = bob;
        _signSecond(p, signedByBob ? bobNodeKey : aliceNodeKey);
        _expectNoEquivocation(alice, signedByBob ? bobNode : aliceNode);
        _prove(p);
    }

    function testFuzz_proveDoubleSubmission_reverts_whenAnotherKeySignedTheSecond(uint256 key, bool bobs) public {
        key = bobs ? bobNodeKey : bound(key, 1, 1 << 200);
        vm.assume(key != aliceNodeKey);
        Pair memory p = _pair();
        _signSecond(p, key);
        _expectNoEquivocation(alice, vm.addr(key));
        _prove(p);
    }

    function testFuzz_proveDoubleSubmission_reverts_whenAnotherKeySignedTheFirst(uint256 key) public {
        key = bound(key, 1, 1 << 200);
        vm.assume(key != aliceNodeKey);
        Pair memory p = _pair();
        p.firstSignature = _signSubmission(p.first, key);
        _expectInvalidSubmission(vm.addr(key));
        _prove(p);
    }

    function testFuzz_proveDoubleSubmission_reverts_whenASignatureIsMalformed(bytes memory junk) public {
        vm.assume(junk.length != 65);
        Pair memory p = _pair();
        p.secondSignature = junk;
        _expectNoEquivocation(alice, address(0));
        _prove(p);
    }

    /// @dev Two submissions for one slot, neither of which was committed and judged.
    function test_proveDoubleSubmission_reverts_whenTheFirstWasNotJudged() public {
        Pair memory p = _pair();
        p.first.fileHash = keccak256("a third file");
        p.firstSignature = _signSubmission(p.first, aliceNodeKey);
        _expectInvalidSubmission(aliceNode);
        _prove(p);
    }

    function testFuzz_proveDoubleSubmission_reverts_whenTheProofIsBroken(bytes32 sibling) public {
        Pair memory p = _pair();
        vm.assume(sibling != p.outcome.proof[0]);
        p.outcome.proof[0] = sibling;
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidProof.selector, _batchId, 0));
        _prove(p);
    }

    /// @dev Whatever of the content differs, and whatever verdict the judged one has.
    function testFuzz_proveDoubleSubmission_bansAndSlashes(uint256 which, uint256 verdict, address caller) public {
        _judge(_one(_record(alice, 1, 0, uint8(bound(verdict, ACCEPTED, FRAUD)))), QUORUM);
        Pair memory p = _pair();
        which = bound(which, 0, 3);
        if (which != 0) p.second = _submission(alice, 1, 0);
        if (which == 1) p.second.policyVersion += 1;
        if (which == 2) p.second.rollouts += 1;
        if (which == 3) p.second.units += 1;
        _signSecond(p, aliceNodeKey);
        uint256 amount = REQUIRED_STAKE * EXACT_FRAUD_PPM / PPM;
        uint256 before = token.balanceOf(caller);

        _expectReleased(_doubleSubmission(), amount);
        vm.expectEmit(address(faults));
        emit IFaultCourtEvents.DoubleSubmissionProven(runId, alice, _doubleSubmission(), 1, 0, amount);
        vm.prank(caller);
        _prove(p);
        assertEq(vault.activeStake(runId, alice), REQUIRED_STAKE - amount, "slashed");
        _assertStatus(alice, IWorkerRegistry.Status.Banned, "banned");
        if (caller != insurance) assertLe(token.balanceOf(caller), before, "nobody earns");
        _assertReleased(_doubleSubmission(), amount);
    }

    /// @dev It costs what the terms say under which the batch was committed, not those that came later.
    function test_proveDoubleSubmission_costsByTheTermsOfTheBatch() public {
        vm.prank(owner);
        runs.proposeChange(runId, IRunRegistry.Terms(PRICE, FRAUD_PPM, uint32(PPM), QUORUM));
        vm.warp(block.timestamp + CHANGE_DELAY);
        runs.applyChange(runId);
        _prove(_pair());
        assertEq(
            vault.activeStake(runId, alice), REQUIRED_STAKE - REQUIRED_STAKE * EXACT_FRAUD_PPM / PPM, "as she agreed"
        );
    }

    /// @dev Else a stolen key could be used for one slot after the other, until nothing is left.
    function testFuzz_proveDoubleSubmission_punishesAWorkerOnce(bool sameSlot) public {
        _prove(_pair());
        uint32 index = sameSlot ? 0 : 1;
        if (!sameSlot) _judge(_one(_record(alice, 1, index, ACCEPTED)), QUORUM);
        Pair memory p = _pair();
        (p.first.index, p.second.index) = (index, index);
        p.first = sameSlot ? p.first : _submission(alice, 1, index);
        p.firstSignature = _signSubmission(p.first, aliceNodeKey);
        p.second.fileHash = keccak256("a third file");
        _signSecond(p, aliceNodeKey);
        vm.expectRevert(abi.encodeWithSelector(IFaultCourtErrors.FaultAlreadyBanned.selector, runId, alice));
        _prove(p);
    }

    function test_proveDoubleSubmission_touchesNoOtherRun() public {
        uint64 other = _createRun();
        _join(other, alice, address(0), 0, REQUIRED_STAKE);
        _prove(_pair());
        assertEq(vault.activeStake(other, alice), REQUIRED_STAKE, "stake");
        assertEq(uint8(workers.statusOf(other, alice)), uint8(IWorkerRegistry.Status.Active), "status");
    }

    // -------------------------------------------------------------- rotated keys

    /// @dev A new key is no way to sign again.
    function test_proveDoubleSubmission_reachesWhatANewKeySigned() public {
        (, uint256 nodeKey) = _rotateAlice("alice's next node");
        Pair memory p = _pair();
        _signSecond(p, nodeKey);
        _prove(p);
        _assertStatus(alice, IWorkerRegistry.Status.Banned, "banned");
    }

    /// @dev Nor is what an old key signed forgotten, if it was hers when the batch was committed.
    function testFuzz_proveDoubleSubmission_reachesWhatAnOldKeySigned(uint256 waited) public {
        vm.warp(block.timestamp + bound(waited, 0, 100 days));
        _rotateAlice("alice's next node");
        _prove(_pair());
        _assertStatus(alice, IWorkerRegistry.Status.Banned, "banned");
    }

    /// @dev Whoever found a key that she gave up before cannot have her punished.
    function test_proveDoubleSubmission_reverts_whenTheKeyWasGivenUpBefore() public {
        (, uint256 nodeKey) = _rotateAlice("alice's next node");
        vm.warp(block.timestamp + 1);
        _judge(_one(_record(alice, 1, 0, ACCEPTED)), QUORUM);
        Pair memory p = _pair();
        p.firstSignature = _signSubmission(p.first, nodeKey);
        _expectNoEquivocation(alice, aliceNode);
        _prove(p);
    }

    /// @dev Nor with what she signed with it before, though the batch holds it.
    function test_proveDoubleSubmission_reverts_whenTheKeyOfTheFirstWasGivenUpBefore() public {
        (address node, uint256 nodeKey) = _rotateAlice("alice's next node");
        vm.warp(block.timestamp + 1);
        _judge(_one(_record(alice, 1, 0, ACCEPTED)), QUORUM);
        Pair memory p = _pair();
        _signSecond(p, nodeKey);
        _expectNoEquivocation(alice, node);
        _prove(p);
    }

    function test_proveDoubleSubmission_works_whenTheKeyWasGivenUpInTheSecondOfTheCommitment() public {
        (, uint256 nodeKey) = _rotateAlice("alice's next node");
        _judge(_one(_record(alice, 1, 0, ACCEPTED)), QUORUM);
        Pair memory p = _pair();
        p.firstSignature = _signSubmission(p.first, nodeKey);
        _prove(p);
        _assertStatus(alice, IWorkerRegistry.Status.Banned, "banned");
    }

    // ------------------------------------------------------------------- leaving

    function test_proveDoubleSubmission_reachesWhoLeavesAfterTheCommitment() public {
        vm.warp(block.timestamp + 1);
        vm.prank(alice);
        workers.exit(runId);
        _prove(_pair());
        (, uint256 unbonding) = _stake(alice);
        assertEq(unbonding, REQUIRED_STAKE - REQUIRED_STAKE * EXACT_FRAUD_PPM / PPM, "slashed");
    }

    /// @dev Nobody commits for her what she signed before she left.
    function test_proveDoubleSubmission_reverts_forWhoLeftBeforeTheCommitment() public {
        vm.prank(alice);
        workers.exit(runId);
        vm.warp(block.timestamp + 1);
        _judge(_one(_record(alice, 1, 0, ACCEPTED)), QUORUM);
        Pair memory p = _pair();
        _expectNoEquivocation(alice, aliceNode);
        _prove(p);
    }
}
