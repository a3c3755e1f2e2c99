// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {Math} from "@openzeppelin/contracts/utils/math/Math.sol";

import {FaultCourt} from "../../src/FaultCourt.sol";
import {IContributionLedger, IContributionLedgerErrors} from "../../src/interfaces/IContributionLedger.sol";
import {IDisputeCourt} from "../../src/interfaces/IDisputeCourt.sol";
import {IFaultCourt, IFaultCourtErrors, IFaultCourtEvents} from "../../src/interfaces/IFaultCourt.sol";
import {IStakeVault, IStakeVaultErrors, IStakeVaultEvents} from "../../src/interfaces/IStakeVault.sol";
import {CourtTest} from "../CourtTest.sol";

/// @dev Faults of validators. Each is punished once, and never to the profit of a validator.
contract FaultCourtValidatorsTest is CourtTest {
    uint256 private constant STAKE = REQUIRED_VALIDATOR_STAKE;

    function _offenceOf(IFaultCourt.Fault fault, bytes32 subject, address validator) private pure returns (bytes32) {
        return keccak256(abi.encode(fault, subject, validator));
    }

    function _expectUndecided(bytes32 leaf, IDisputeCourt.CaseStatus status) private {
        vm.expectRevert(abi.encodeWithSelector(IFaultCourtErrors.FaultCaseUndecided.selector, leaf, uint8(status)));
    }

    function _expectNotCommitted(address account) private {
        vm.expectRevert(abi.encodeWithSelector(IFaultCourtErrors.FaultNotCommitted.selector, account));
    }

    function _expectSettled(bytes32 offence) private {
        vm.expectRevert(abi.encodeWithSelector(IStakeVaultErrors.VaultOffenceSettled.selector, offence));
    }

    /// @dev Expects that a validator loses `ppm` of its stake for a fault, and how that is split.
    function _expectPunished(address validator, IFaultCourt.Fault fault, bytes32 subject, uint256 ppm, bool rewarded)
        private
        returns (bytes32 offence, uint256 amount)
    {
        offence = _offenceOf(fault, subject, validator);
        amount = Math.ceilDiv(vault.activeStake(validator) * ppm, PPM);
        uint256 insured = amount * INSURANCE_PPM / PPM;
        uint256 reward = rewarded ? Math.min(amount * REPORTER_PPM / PPM, REPORTER_CAP) : 0;
        vm.expectEmit(address(faults));
        emit IFaultCourtEvents.ValidatorPunished(validator, offence, fault, subject, amount);
        vm.expectEmit(address(vault));
        emit IStakeVaultEvents.SlashReleased(offence, amount - insured - reward, insured, reward);
    }

    function _assertReleased(bytes32 offence, address validator, uint256 amount, address reporter) private view {
        IStakeVault.Escrow memory taken = vault.escrowOf(offence);
        assertEq(taken.owner, validator, "whose");
        assertEq(taken.amount, amount, "how much");
        assertEq(taken.reporter, reporter, "reported by");
        assertEq(uint8(taken.status), uint8(IStakeVault.EscrowStatus.Released), "final at once");
    }

    // -------------------------------------------------------------- construction

    function testFuzz_constructor_reverts_whenAShareExceedsTheWhole(uint256 ppm, bool absence) public {
        ppm = ppm % 2 == 0 ? PPM + 1 : bound(ppm, PPM + 1, type(uint256).max);
        vm.expectRevert(abi.encodeWithSelector(IFaultCourtErrors.FaultInvalidShare.selector, ppm));
        new FaultCourt(runs, workers, vault, ledger, court, absence ? 0 : ppm, absence ? ppm : 0);
    }

    function testFuzz_constructor_keepsItsParameters(uint256 wrong, uint256 absent) public {
        wrong = bound(wrong, 0, PPM);
        absent = bound(absent, 0, PPM);
        FaultCourt other = new FaultCourt(runs, workers, vault, ledger, court, wrong, absent);
        assertEq(other.wrongVerdictPpm(), wrong, "wrong verdict");
        assertEq(other.absencePpm(), absent, "absence");
        assertEq(address(other.runs()), address(runs), "runs");
        assertEq(address(other.workers()), address(workers), "workers");
        assertEq(address(other.vault()), address(vault), "vault");
        assertEq(address(other.ledger()), address(ledger), "ledger");
        assertEq(address(other.court()), address(court), "court");
    }

    // -------------------------------------------------------------- slash signer

    function test_slashSigner_reverts_untilTheVerdictIsOverturned() public {
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        _expectUndecided(_fraudLeaf, IDisputeCourt.CaseStatus.None);
        faults.slashSigner(outcome, validators[0]);
        _challengeAndDraw(ALICE_FRAUD, ACCEPTED);
        _expectUndecided(_fraudLeaf, IDisputeCourt.CaseStatus.Open);
        faults.slashSigner(outcome, validators[0]);
        _voteAll(_fraudLeaf, false, false, false);
        court.close(outcome);
        _expectUndecided(_fraudLeaf, IDisputeCourt.CaseStatus.Upheld);
        faults.slashSigner(outcome, validators[0]);
    }

    function testFuzz_slashSigner_reverts_whenItDidNotSign(address account) public {
        vm.assume(account != validators[0] && account != validators[1]);
        _decide(ALICE_FRAUD, ACCEPTED, true);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        _expectNotCommitted(account);
        faults.slashSigner(outcome, account);
    }

    function test_slashSigner_reverts_forJurors() public {
        _decide(ALICE_FRAUD, ACCEPTED, true);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        for (uint256 i = 2; i < 5; ++i) {
            _expectNotCommitted(validators[i]);
            faults.slashSigner(outcome, validators[i]);
        }
    }

    function testFuzz_slashSigner_punishesOnce(address caller, uint256 which) public {
        address signer = validators[which % 2];
        _decide(ALICE_FRAUD, ACCEPTED, true);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(ALICE_FRAUD);
        (bytes32 offence, uint256 amount) =
            _expectPunished(signer, IFaultCourt.Fault.WrongVerdict, _fraudLeaf, WRONG_VERDICT_PPM, true);
        vm.prank(caller);
        faults.slashSigner(outcome, signer);
        assertEq(vault.activeStake(signer), STAKE - amount, "slashed");
        _assertReleased(offence, signer, amount, challenger);
        _expectSettled(offence);
        faults.slashSigner(outcome, signer);
    }

    /// @dev Rotation is no way out.
    function test_slashSigner_reachesWhoLostItsSeat() public {
        _decide(ALICE_FRAUD, ACCEPTED, true);
        _deposit(stranger, STAKE);
        vm.prank(owner);
        runs.rotateValidator(runId, validators[0], stranger);
        faults.slashSigner(_outcomeAt(ALICE_FRAUD), validators[0]);
        assertLt(vault.activeStake(validators[0]), STAKE, "slashed");
    }

    // ------------------------------------------------------------- absent jurors

    function testFuzz_slashAbsentJuror_reverts_untilTheCaseIsClosed(bool opened) public {
        if (opened) _challengeAndDraw(ALICE_FRAUD, ACCEPTED);
        _expectUndecided(_fraudLeaf, opened ? IDisputeCourt.CaseStatus.Open : IDisputeCourt.CaseStatus.None);
        faults.slashAbsentJuror(_fraudLeaf, validators[2]);
    }

    function testFuzz_slashAbsentJuror_reverts_whenItRevealed(bool overturned, uint256 which) public {
        _decide(ALICE_FRAUD, ACCEPTED, overturned);
        which = bound(which, 2, 4);
        _expectNotCommitted(validators[which]);
        faults.slashAbsentJuror(_fraudLeaf, validators[which]);
    }

    function testFuzz_slashAbsentJuror_reverts_whenNotOnTheJury(address account, bool signer) public {
        if (signer) account = validators[0];
        vm.assume(account != validators[2] && account != validators[3] && account != validators[4]);
        _challengeAndDraw(ALICE_FRAUD, ACCEPTED);
        vm.warp(block.timestamp + JURY_TIME);
        court.close(_outcomeAt(ALICE_FRAUD));
        _expectNotCommitted(account);
        faults.slashAbsentJuror(_fraudLeaf, account);
    }

    function testFuzz_slashAbsentJuror_reverts_whenNobodyWasDrawn(uint256 which) public {
        _challenge(ALICE_FRAUD, ACCEPTED);
        vm.warp(block.timestamp + JURY_TIME);
        court.close(_outcomeAt(ALICE_FRAUD));
        address validator = validators[which % 5];
        _expectNotCommitted(validator);
        faults.slashAbsentJuror(_fraudLeaf, validator);
    }

    /// @dev Who commits and does not reveal is as absent as who does neither.
    function testFuzz_slashAbsentJuror_punishesOnce(bool committed, uint256 which, bool byValidator) public {
        address juror = validators[bound(which, 2, 4)];
        address caller = byValidator ? validators[which % 5] : stranger;
        _challengeAndDraw(ALICE_FRAUD, ACCEPTED);
        if (committed) _commitVote(_fraudLeaf, juror, true);
        vm.warp(block.timestamp + JURY_TIME);
        court.close(_outcomeAt(ALICE_FRAUD));
        (bytes32 offence, uint256 amount) =
            _expectPunished(juror, IFaultCourt.Fault.AbsentJuror, _fraudLeaf, ABSENCE_PPM, !byValidator);
        vm.prank(caller);
        faults.slashAbsentJuror(_fraudLeaf, juror);
        _assertReleased(offence, juror, amount, byValidator ? address(0) : caller);
        _expectSettled(offence);
        faults.slashAbsentJuror(_fraudLeaf, juror);
    }

    // ----------------------------------------------------------------- deadlines

    function testFuzz_slashOverdue_reverts_untilOutcomesAreOverdue(uint256 waited) public {
        uint64 batchId = _commit(1);
        uint256 dueAt = block.timestamp + OUTCOME_DEADLINE;
        waited = waited % 2 == 0 ? OUTCOME_DEADLINE - 1 : bound(waited, 0, OUTCOME_DEADLINE - 1);
        vm.warp(block.timestamp + waited);
        vm.expectRevert(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerOutcomesPending.selector, batchId, dueAt)
        );
        faults.slashOverdue(batches[batchId], validators[0]);
    }

    function testFuzz_slashOverdue_reverts_whenOutcomesCame(uint256 waited) public {
        vm.warp(block.timestamp + bound(waited, OUTCOME_DEADLINE, 100 days));
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerOutcomesPosted.selector, _batchId));
        faults.slashOverdue(batches[_batchId], validators[0]);
    }

    function testFuzz_slashOverdue_reverts_whenTheHeaderIsAnother(uint40 committedAt) public {
        uint64 batchId = _commit(1);
        vm.assume(committedAt != block.timestamp);
        vm.warp(block.timestamp + OUTCOME_DEADLINE);
        IContributionLedger.Batch memory batch = batches[batchId];
        batch.committedAt = committedAt;
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerBatchMismatch.selector, batchId));
        faults.slashOverdue(batch, validators[0]);
    }

    function testFuzz_slashOverdue_reverts_whenItWasNotSeatedThroughout(uint256 at, bool came) public {
        uint64 batchId = _commit(1);
        uint256 committedAt = block.timestamp;
        _deposit(stranger, STAKE);
        at = came ? bound(at, 1, OUTCOME_DEADLINE) : bound(at, 0, OUTCOME_DEADLINE - 1);
        vm.warp(committedAt + at);
        vm.prank(owner);
        runs.rotateValidator(runId, validators[0], stranger);
        vm.warp(committedAt + OUTCOME_DEADLINE);
        address innocent = came ? stranger : validators[0];
        _expectNotCommitted(innocent);
        faults.slashOverdue(batches[batchId], innocent);
    }

    function testFuzz_slashOverdue_punishesEachValidatorOnce(uint256 which, bool byValidator, uint256 waited) public {
        address validator = validators[which % 5];
        address caller = byValidator ? validators[(which >> 8) % 5] : stranger;
        uint64 batchId = _commit(1);
        vm.warp(block.timestamp + bound(waited, OUTCOME_DEADLINE, 100 days));
        bytes32 subject = bytes32(uint256(batchId));
        (bytes32 offence, uint256 amount) =
            _expectPunished(validator, IFaultCourt.Fault.MissedDeadline, subject, ABSENCE_PPM, !byValidator);
        vm.prank(caller);
        faults.slashOverdue(batches[batchId], validator);
        _assertReleased(offence, validator, amount, byValidator ? address(0) : caller);
        _expectSettled(offence);
        faults.slashOverdue(batches[batchId], validator);
    }

    // ------------------------------------------------------------ double outcome

    function _outcomes(bytes32 recordsHash) private view returns (IContributionLedger.Outcomes memory) {
        return IContributionLedger.Outcomes(_batchId, keccak256("submissions"), recordsHash);
    }

    function _signedBy(uint256 key, IContributionLedger.Outcomes memory outcomes) private view returns (bytes memory) {
        bytes32 typeHash = keccak256("Outcomes(uint64 batchId,bytes32 batchRoot,bytes32 recordsHash)");
        return _sign(key, ledger.DOMAIN_SEPARATOR(), keccak256(abi.encode(typeHash, outcomes)));
    }

    function _expectNoEquivocation(address first, address second) private {
        vm.expectRevert(abi.encodeWithSelector(IFaultCourtErrors.FaultNoEquivocation.selector, first, second));
    }

    /// @dev Has `reporter` prove that the keys signed these.
    function _proveBy(
        address reporter,
        uint256 firstKey,
        IContributionLedger.Outcomes memory first,
        uint256 secondKey,
        IContributionLedger.Outcomes memory second
    ) private {
        (bytes memory a, bytes memory b) = (_signedBy(firstKey, first), _signedBy(secondKey, second));
        IContributionLedger.Batch memory batch = batches[_batchId];
        vm.prank(reporter);
        faults.proveDoubleOutcome(batch, first, a, second, b);
    }

    function testFuzz_proveDoubleOutcome_reverts_whenTheHeaderIsAnother(bytes32 root) public {
        IContributionLedger.Batch memory batch = batches[_batchId];
        vm.assume(root != batch.root);
        batch.root = root;
        IContributionLedger.Outcomes memory first = _outcomes("first");
        IContributionLedger.Outcomes memory second = _outcomes("second");
        (bytes memory a, bytes memory b) = (_signedBy(validatorKeys[3], first), _signedBy(validatorKeys[3], second));
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerBatchMismatch.selector, _batchId));
        faults.proveDoubleOutcome(batch, first, a, second, b);
    }

    /// @dev The mutated twins of a proof: the same records, another root, other batches.
    function testFuzz_proveDoubleOutcome_reverts_whenStatementsAgree(uint256 which, bytes32 other, uint64 batchId)
        public
    {
        which = bound(which, 0, 3);
        vm.assume(other != keccak256("submissions") && batchId != _batchId);
        IContributionLedger.Outcomes memory first = _outcomes("first");
        IContributionLedger.Outcomes memory second = _outcomes(which == 0 ? bytes32("first") : bytes32("second"));
        if (which == 1) second.batchRoot = other;
        if (which == 2) second.batchId = batchId;
        if (which == 3) first.batchId = second.batchId = batchId;
        (bytes memory a, bytes memory b) = (_signedBy(validatorKeys[3], first), _signedBy(validatorKeys[3], second));
        _expectNoEquivocation(validators[3], validators[3]);
        faults.proveDoubleOutcome(batches[_batchId], first, a, second, b);
    }

    function testFuzz_proveDoubleOutcome_reverts_whenSignersDiffer(uint256 i, uint256 j) public {
        i = bound(i, 0, 4);
        j = bound(j, 0, 4);
        vm.assume(i != j);
        IContributionLedger.Outcomes memory first = _outcomes("first");
        IContributionLedger.Outcomes memory second = _outcomes("second");
        (bytes memory a, bytes memory b) = (_signedBy(validatorKeys[i], first), _signedBy(validatorKeys[j], second));
        _expectNoEquivocation(validators[i], validators[j]);
        faults.proveDoubleOutcome(batches[_batchId], first, a, second, b);
    }

    function testFuzz_proveDoubleOutcome_reverts_whenSignaturesAreMalformed(bytes memory junk) public {
        vm.assume(junk.length != 65);
        _expectNoEquivocation(address(0), address(0));
        faults.proveDoubleOutcome(batches[_batchId], _outcomes("first"), junk, _outcomes("second"), junk);
    }

    function testFuzz_proveDoubleOutcome_reverts_forWhoNeverValidated(uint256 key) public {
        key = bound(key, 1, 1 << 200);
        vm.assume(runs.seatBitOf(runId, vm.addr(key)) == 0);
        IContributionLedger.Outcomes memory first = _outcomes("first");
        IContributionLedger.Outcomes memory second = _outcomes("second");
        (bytes memory a, bytes memory b) = (_signedBy(key, first), _signedBy(key, second));
        _expectNotCommitted(vm.addr(key));
        faults.proveDoubleOutcome(batches[_batchId], first, a, second, b);
    }

    function testFuzz_proveDoubleOutcome_takesAllAndTheSeat(uint256 which, bool byValidator, bool posted) public {
        if (!posted) _batchId = _commit(1);
        which = bound(which, 0, 4);
        address validator = validators[which];
        address caller = byValidator ? validators[(which + 1) % 5] : stranger;
        bytes32 subject = bytes32(uint256(_batchId));
        (bytes32 offence, uint256 amount) =
            _expectPunished(validator, IFaultCourt.Fault.DoubleOutcome, subject, PPM, !byValidator);
        uint256 key = validatorKeys[which];
        _proveBy(caller, key, _outcomes("first"), key, _outcomes("second"));
        assertEq(amount, STAKE, "all of it");
        assertEq(vault.activeStake(validator), 0, "nothing left");
        assertFalse(runs.isValidator(runId, validator), "unseated");
        _assertReleased(offence, validator, STAKE, byValidator ? address(0) : caller);
    }

    function test_proveDoubleOutcome_punishesOnce_alsoWithOtherRecords() public {
        uint256 key = validatorKeys[3];
        _proveBy(stranger, key, _outcomes("first"), key, _outcomes("second"));
        _expectSettled(_offenceOf(IFaultCourt.Fault.DoubleOutcome, bytes32(uint256(_batchId)), validators[3]));
        this.proveExternally(key);
    }

    /// @dev Lets a revert of a helper be expected.
    function proveExternally(uint256 key) external {
        _proveBy(stranger, key, _outcomes("third"), key, _outcomes("fourth"));
    }

    function test_proveDoubleOutcome_reachesUnbondingStake_ofWhoLostItsSeat() public {
        vm.prank(validators[3]);
        vault.requestUnbond(STAKE);
        vm.prank(stranger);
        runs.unseatValidator(runId, validators[3]);
        uint256 key = validatorKeys[3];
        _proveBy(stranger, key, _outcomes("first"), key, _outcomes("second"));
        assertEq(vault.accountOf(validators[3]).unbonding, 0, "all of it");
    }

    /// @dev No validator is paid for the fall of another, whichever function it calls.
    function testFuzz_validators_areNeverReporters(uint256 which) public {
        address caller = validators[bound(which, 0, 2)];
        uint256 before = token.balanceOf(caller);
        uint256 key = validatorKeys[3];
        _proveBy(caller, key, _outcomes("first"), key, _outcomes("second"));
        assertEq(token.balanceOf(caller), before, "not paid");
    }
}
