// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {
    IContributionLedger,
    IContributionLedgerErrors,
    IContributionLedgerEvents
} from "../../src/interfaces/IContributionLedger.sol";
import {IRewardEscrowEvents} from "../../src/interfaces/IRewardEscrow.sol";
import {IRunRegistry} from "../../src/interfaces/IRunRegistry.sol";
import {LedgerTest} from "../LedgerTest.sol";

/// @title postOutcomes: what a quorum of a run decided about a batch, or that nothing of it can be had
contract LedgerPostOutcomesTest is LedgerTest {
    function _expect(bytes memory why, uint64 batchId, bytes memory joined, bytes memory signatures) private {
        vm.expectRevert(why);
        ledger.postOutcomes(batches[batchId], joined, signatures);
    }

    function _why(bytes4 selector, uint256 value) private pure returns (bytes memory) {
        return abi.encodeWithSelector(selector, value);
    }

    function _whyInvalidSigner(address signer) private pure returns (bytes memory) {
        return abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidSigner.selector, signer);
    }

    function _whyOutcomesPosted(uint64 batchId) private pure returns (bytes memory) {
        return _why(IContributionLedgerErrors.LedgerOutcomesPosted.selector, batchId);
    }

    function _whyQuorumNotMet(uint256 signers, uint256 quorum) private pure returns (bytes memory) {
        return abi.encodeWithSelector(IContributionLedgerErrors.LedgerQuorumNotMet.selector, signers, quorum);
    }

    /// @dev The joined signatures of some validators, by their places among the five.
    function _signedBy(uint64 batchId, bytes memory joined, uint256[] memory places)
        private
        view
        returns (bytes memory signatures)
    {
        for (uint256 i = 0; i < places.length; ++i) {
            uint256 key = validatorKeys[places[i]];
            bytes32 hash = _outcomesHash(batchId, joined);
            signatures = bytes.concat(signatures, _sign(key, ledger.DOMAIN_SEPARATOR(), hash));
        }
    }

    function _pair(uint256 first, uint256 second) private pure returns (uint256[] memory places) {
        places = new uint256[](2);
        (places[0], places[1]) = (first, second);
    }

    /// @dev A batch of one with Alice's accepted record, and the records.
    function _commitOne() private returns (uint64 batchId, bytes memory joined) {
        return (_commit(1), _record(alice, 1, 0, ACCEPTED));
    }

    // -------------------------------------------------------------------- header

    function testFuzz_postOutcomes_reverts_whenTheHeaderIsNot(uint256 field) public {
        (uint64 batchId, bytes memory joined) = _commitOne();
        bytes memory signatures = _signOutcomes(batchId, joined, QUORUM);
        IContributionLedger.Batch memory header = _mutatedHeader(batchId, field);
        _expectBatchMismatch(header.batchId);
        ledger.postOutcomes(header, joined, signatures);
    }

    function testFuzz_postOutcomes_reverts_whenBatchIsUnknown(uint64 batchId, bytes32 root) public {
        IContributionLedger.Batch memory header = batches[_commit(1)];
        vm.assume(batchId != header.batchId);
        (header.batchId, header.outcomesRoot) = (batchId, root);
        _expectBatchMismatch(batchId);
        ledger.postOutcomes(header, "", "");
    }

    function testFuzz_postOutcomes_reverts_twice(uint256 count) public {
        bytes[] memory records = _accepted(bound(count, 1, 20));
        uint64 batchId = _commit(records.length);
        bytes memory joined = _join(records);
        bytes memory signatures = _signOutcomes(batchId, joined, QUORUM);
        _post(batchId, records, QUORUM);
        _expect(_whyOutcomesPosted(batchId), batchId, joined, signatures);
    }

    function test_postOutcomes_reverts_whenTheHeaderIsFromBeforeTheFirst() public {
        (uint64 batchId, bytes memory joined) = _commitOne();
        bytes memory signatures = _signOutcomes(batchId, joined, QUORUM);
        IContributionLedger.Batch memory before = batches[batchId];
        _post(batchId, _one(joined), QUORUM);
        _expectBatchMismatch(batchId);
        ledger.postOutcomes(before, joined, signatures);
    }

    // ------------------------------------------------------------------ deadline

    function testFuzz_postOutcomes_reverts_onceDue(uint256 late, bool withheld) public {
        (uint64 batchId, bytes memory joined) = _commitOne();
        if (withheld) joined = "";
        bytes memory signatures = _signOutcomes(batchId, joined, QUORUM);
        uint256 committedAt = block.timestamp;
        uint256 dueAt = committedAt + OUTCOME_DEADLINE;
        vm.warp(dueAt + bound(late, 0, 365 days));
        _expectWrongTime(batchId, committedAt, dueAt);
        ledger.postOutcomes(batches[batchId], joined, signatures);
    }

    function test_postOutcomes_reverts_inTheSecondInWhichTheyAreDue() public {
        (uint64 batchId, bytes memory joined) = _commitOne();
        bytes memory signatures = _signOutcomes(batchId, joined, QUORUM);
        uint256 committedAt = block.timestamp;
        _passDeadline();
        _expectWrongTime(batchId, committedAt, committedAt + OUTCOME_DEADLINE);
        ledger.postOutcomes(batches[batchId], joined, signatures);
    }

    function test_postOutcomes_worksInTheLastSecond() public {
        bytes[] memory records = _accepted(1);
        uint64 batchId = _commit(1);
        vm.warp(block.timestamp + OUTCOME_DEADLINE - 1);
        _post(batchId, records, QUORUM);
        assertFalse(ledger.isDisputed(batches[batchId]), "posted");
    }

    // ------------------------------------------------------------------- records

    function testFuzz_postOutcomes_reverts_whenRecordsAreNotOnePerSubmission(uint256 count, uint256 given) public {
        count = bound(count, 1, 30);
        given = bound(given, 1, 60 * 56);
        vm.assume(given != count * 56);
        uint64 batchId = _commit(count);
        bytes memory joined = new bytes(given);
        bytes memory signatures = _signOutcomes(batchId, joined, QUORUM);
        _expect(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerRecordCount.selector, given, count * 56),
            batchId,
            joined,
            signatures
        );
    }

    function testFuzz_postOutcomes_reverts_whenAVerdictIsNone(uint256 count, uint256 at, uint8 verdict) public {
        count = bound(count, 1, 20);
        at = bound(at, 0, count - 1);
        vm.assume(verdict == 0 || verdict > FRAUD);
        bytes[] memory records = _accepted(count);
        records[at][54] = bytes1(verdict);
        uint64 batchId = _commit(count);
        bytes memory joined = _join(records);
        bytes memory signatures = _signOutcomes(batchId, joined, QUORUM);
        _expect(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidVerdict.selector, at, verdict),
            batchId,
            joined,
            signatures
        );
    }

    function testFuzz_postOutcomes_reverts_whenRecordsHoldMoreUnitsThanCommitted(uint256 count, uint32 extra) public {
        bytes[] memory records = _accepted(bound(count, 1, 20));
        extra = uint32(bound(extra, 1, type(uint32).max - 1000));
        IContributionLedger.Outcome memory outcome = _outcome(alice, 1, 0, REJECTED);
        outcome.units += extra;
        records[0] = _pack(outcome);
        uint256 committed = 1000 * records.length;
        uint64 batchId = _commit(records.length);
        bytes memory joined = _join(records);
        bytes memory signatures = _signOutcomes(batchId, joined, QUORUM);
        _expect(
            abi.encodeWithSelector(
                IContributionLedgerErrors.LedgerUnitsExceeded.selector, batchId, committed + extra, committed
            ),
            batchId,
            joined,
            signatures
        );
    }

    function testFuzz_postOutcomes_reverts_whenRecordsWereChanged(uint256 count, uint256 at, uint8 change) public {
        bytes[] memory records = _accepted(bound(count, 1, 20));
        vm.assume(change != 0);
        uint64 batchId = _commit(records.length);
        bytes memory joined = _join(records);
        bytes memory signatures = _signOutcomes(batchId, joined, QUORUM);
        at = bound(at, 0, joined.length - 1);
        joined[at] = bytes1(uint8(joined[at]) ^ change);
        vm.expectPartialRevert(IContributionLedgerErrors.LedgerInvalidSigner.selector);
        ledger.postOutcomes(batches[batchId], joined, signatures);
    }

    // ---------------------------------------------------------------- signatures

    function testFuzz_postOutcomes_reverts_whenSignaturesAreNotWhole(uint256 length) public {
        length = bound(length, 1, 5 * 65);
        vm.assume(length % 65 != 0);
        (uint64 batchId, bytes memory joined) = _commitOne();
        bytes memory why = _why(IContributionLedgerErrors.LedgerSignatureLength.selector, length);
        _expect(why, batchId, joined, new bytes(length));
    }

    function testFuzz_postOutcomes_reverts_belowQuorum(uint256 signers, bool withheld) public {
        signers = bound(signers, 0, QUORUM - 1);
        (uint64 batchId, bytes memory joined) = _commitOne();
        if (withheld) joined = "";
        bytes memory signatures = _signOutcomes(batchId, joined, signers);
        _expect(_whyQuorumNotMet(signers, QUORUM), batchId, joined, signatures);
    }

    function testFuzz_postOutcomes_reverts_whenSignersAreNotAscending(uint256 i, uint256 j) public {
        i = bound(i, 0, 4);
        j = bound(j, 0, i);
        (uint64 batchId, bytes memory joined) = _commitOne();
        _expect(_whyInvalidSigner(validators[j]), batchId, joined, _signedBy(batchId, joined, _pair(i, j)));
    }

    function testFuzz_postOutcomes_reverts_whenASignerIsNoValidator(uint256 key) public {
        key = bound(key, 1, 1 << 200);
        address signer = vm.addr(key);
        vm.assume(!runs.isValidator(runId, signer));
        (uint64 batchId, bytes memory joined) = _commitOne();
        bytes memory own = _sign(key, ledger.DOMAIN_SEPARATOR(), _outcomesHash(batchId, joined));
        bytes memory others = _signOutcomes(batchId, joined, 1);
        _expect(
            _whyInvalidSigner(signer),
            batchId,
            joined,
            signer < validators[0] ? bytes.concat(own, others) : bytes.concat(others, own)
        );
    }

    function testFuzz_postOutcomes_reverts_whenAValidatorWasDismissed(uint256 place) public {
        place = bound(place, 0, 1);
        (uint64 batchId, bytes memory joined) = _commitOne();
        bytes memory signatures = _signOutcomes(batchId, joined, 2);
        vm.prank(owner);
        runs.dismiss(runId, validators[place]);
        _expect(_whyInvalidSigner(validators[place]), batchId, joined, signatures);
    }

    function testFuzz_postOutcomes_reverts_whenAValidatorHoldsTooLittle(uint256 place, uint256 amount) public {
        place = bound(place, 0, 1);
        (uint64 batchId, bytes memory joined) = _commitOne();
        bytes memory signatures = _signOutcomes(batchId, joined, 2);
        vm.prank(validators[place]);
        vault.requestUnbond(runId, bound(amount, 1, REQUIRED_VALIDATOR_STAKE));
        _expect(_whyInvalidSigner(validators[place]), batchId, joined, signatures);
    }

    function test_postOutcomes_reverts_whenSignersValidateForAnotherRunOnly() public {
        runId = runs.createRun(_config());
        vm.prank(owner);
        escrow.fund(runId, 1000 ether);
        (uint64 batchId, bytes memory joined) = _commitOne();
        bytes memory signatures = _signOutcomes(batchId, joined, 2);
        _expect(_whyInvalidSigner(validators[0]), batchId, joined, signatures);
    }

    function testFuzz_postOutcomes_reverts_whenASignatureIsMalformed(uint8 v, bool highS) public {
        (uint64 batchId, bytes memory joined) = _commitOne();
        bytes memory signatures = _signOutcomes(batchId, joined, 2);
        vm.assume(highS || (v != 27 && v != 28));
        if (highS) _raiseS(signatures);
        else signatures[64] = bytes1(v);
        _expect(_whyInvalidSigner(address(0)), batchId, joined, signatures);
    }

    /// @dev Puts the first signature's twin in the upper half of the curve's order in its place.
    function _raiseS(bytes memory signatures) private pure {
        uint256 order = 0xfffffffffffffffffffffffffffffffebaaedce6af48a03bbfd25e8cd0364141;
        bytes32 s;
        assembly ("memory-safe") {
            s := mload(add(signatures, 64))
        }
        s = bytes32(order - uint256(s));
        assembly ("memory-safe") {
            mstore(add(signatures, 64), s)
        }
        signatures[64] = signatures[64] == bytes1(uint8(27)) ? bytes1(uint8(28)) : bytes1(uint8(27));
    }

    function testFuzz_postOutcomes_reverts_whenSignedForAnotherBatch(uint256 count) public {
        bytes[] memory records = _accepted(bound(count, 1, 5));
        bytes memory joined = _join(records);
        uint64 first = _commit(records.length);
        uint64 second = _commit(records.length);
        bytes memory signatures = _signOutcomes(first, joined, QUORUM);
        vm.expectPartialRevert(IContributionLedgerErrors.LedgerInvalidSigner.selector);
        ledger.postOutcomes(batches[second], joined, signatures);
    }

    // -------------------------------------------------------------------- quorum

    function testFuzz_postOutcomes_asksForTheQuorumOfTheCommitment(uint8 quorum) public {
        quorum = uint8(bound(quorum, QUORUM + 1, 5));
        _changeTerms(_termsWith(quorum));
        bytes[] memory records = _accepted(1);
        uint64 batchId = _commit(1);
        bytes memory signatures = _signOutcomes(batchId, records[0], quorum - 1);
        _expect(_whyQuorumNotMet(quorum - 1, quorum), batchId, records[0], signatures);
        _post(batchId, records, quorum);
        _assertHeader(batchId, "the new quorum, for a batch of the new terms");
    }

    function testFuzz_postOutcomes_asksForNoLaterQuorum(uint8 quorum) public {
        IRunRegistry.Terms memory terms = _termsWith(uint8(bound(quorum, QUORUM + 1, 88)));
        vm.prank(owner);
        runs.proposeChange(runId, terms);
        uint256 effectiveAt = block.timestamp + CHANGE_DELAY;
        vm.warp(effectiveAt - 1);
        uint64 batchId = _commit(1);
        vm.warp(effectiveAt);
        runs.applyChange(runId);
        _post(batchId, _accepted(1), QUORUM);
        _assertHeader(batchId, "the old quorum, for a batch of the old terms");
    }

    function _termsWith(uint8 quorum) private view returns (IRunRegistry.Terms memory terms) {
        (terms,) = runs.termsOf(runId);
        terms.quorum = quorum;
    }

    // ------------------------------------------------------------------- success

    function testFuzz_postOutcomes_records(address caller, uint256 count, uint256 signers, uint256 waited) public {
        signers = bound(signers, QUORUM, 5);
        bytes[] memory records = _accepted(bound(count, 1, 40));
        uint64 batchId = _commit(records.length);
        vm.warp(block.timestamp + bound(waited, 0, OUTCOME_DEADLINE - 1));
        bytes memory joined = _join(records);
        bytes memory signatures = _signOutcomes(batchId, joined, signers);
        IContributionLedger.Batch memory before = batches[batchId];
        _expectPosted(batchId, records, signers, signatures);
        vm.prank(caller);
        ledger.postOutcomes(before, joined, signatures);

        _rememberPosted(batchId, records, signers);
        assertFalse(ledger.isDisputed(batches[batchId]), "the new header stands");
        bytes32 hash = keccak256(abi.encode(batches[batchId]));
        assertEq(ledger.commitmentOf(batchId), hash & ~bytes32(uint256(1)), "one slot");
    }

    function _expectPosted(uint64 batchId, bytes[] memory records, uint256 signers, bytes memory signatures) private {
        vm.expectEmit(address(ledger));
        emit IContributionLedgerEvents.OutcomesPosted(
            batchId,
            runId,
            _root(_leaves(batchId, records)),
            uint40(block.timestamp),
            uint88((1 << signers) - 1),
            _join(records),
            signatures
        );
    }

    /// @dev Whatever the verdicts are.
    function testFuzz_postOutcomes_freesWhatTheRecordsDoNotHold(uint256 count, uint256 more, uint8 verdict) public {
        count = bound(count, 1, 20);
        more = bound(more, 1, 1_000_000);
        bytes[] memory records = _accepted(count);
        records[0] = _record(alice, 1, 0, uint8(bound(verdict, ACCEPTED, FRAUD)));
        uint256 all = escrow.fundsOf(runId).available;
        uint64 batchId = _commitRoot(keccak256("submissions"), count, 1000 * count + more);
        bytes memory joined = _join(records);
        bytes memory signatures = _signOutcomes(batchId, joined, QUORUM);
        _expectPosted(batchId, records, QUORUM, signatures);
        vm.expectEmit(address(escrow));
        emit IRewardEscrowEvents.RewardFreed(runId, more * PRICE);
        ledger.postOutcomes(batches[batchId], joined, signatures);
        assertEq(escrow.fundsOf(runId).reserved, 1000 * count * PRICE, "what the records hold stays");
        assertEq(escrow.fundsOf(runId).available, all - 1000 * count * PRICE, "the rest is the run's again");
    }

    function testFuzz_postOutcomes_freesNothing_whenTheRecordsHoldAll(uint256 count) public {
        bytes[] memory records = _accepted(bound(count, 1, 20));
        uint64 batchId = _commit(records.length);
        vm.expectCall(address(escrow), abi.encodeWithSelector(escrow.free.selector), 0);
        _post(batchId, records, QUORUM);
        assertEq(escrow.fundsOf(runId).reserved, 1000 * records.length * PRICE, "all of it stays");
    }

    function test_postOutcomes_freesNothing_whenTheBatchIsWithheld() public {
        uint64 batchId = _commit(3);
        _withhold(batchId);
        assertEq(escrow.fundsOf(runId).reserved, 3000 * uint256(PRICE), "judges of the network may still accept it");
    }

    function testFuzz_postOutcomes_takesAnyQuorum(uint256 i, uint256 j) public {
        i = bound(i, 0, 3);
        j = bound(j, i + 1, 4);
        (uint64 batchId, bytes memory joined) = _commitOne();
        ledger.postOutcomes(batches[batchId], joined, _signedBy(batchId, joined, _pair(i, j)));
        _rememberPosted(batchId, _one(joined), 0);
        batches[batchId].signers = runs.seatBitOf(runId, validators[i]) | runs.seatBitOf(runId, validators[j]);
        _assertHeader(batchId, "the two who signed are in the header");
    }

    function test_postOutcomes_takesAValidatorThatCameLater() public {
        vm.prank(owner);
        runs.dismiss(runId, validators[0]);
        (uint64 batchId, bytes memory joined) = _commitOne();
        bytes memory signatures = _signOutcomes(batchId, joined, 2);
        vm.prank(owner);
        runs.invite(runId, validators[0], true);
        vm.prank(validators[0]);
        runs.takeSeat(runId, 1, REQUIRED_VALIDATOR_STAKE);
        ledger.postOutcomes(batches[batchId], joined, signatures);
        _rememberPosted(batchId, _one(joined), 2);
        _assertHeader(batchId, "its old seat bit stands for it");
    }

    function testFuzz_postOutcomes_recordsEveryVerdict(uint8[12] memory verdicts, uint32[12] memory units) public {
        bytes[] memory records = new bytes[](12);
        for (uint256 i = 0; i < 12; ++i) {
            IContributionLedger.Outcome memory outcome = _outcome(alice, 1, uint32(i), ACCEPTED);
            outcome.verdict = verdicts[i] = uint8(bound(verdicts[i], ACCEPTED, FRAUD));
            outcome.units = uint32(bound(units[i], 0, 1000));
            records[i] = _pack(outcome);
        }
        uint64 batchId = _commitAndPost(records);
        for (uint256 i = 0; i < 12; ++i) {
            assertEq(ledger.standingOf(_prove(batchId, records, i)).verdict, verdicts[i], "verdict");
        }
    }

    // ------------------------------------------------------------------ withheld

    function testFuzz_postOutcomes_saysThatABatchIsWithheld(address caller, uint256 signers, uint256 waited) public {
        signers = bound(signers, QUORUM, 5);
        uint64 batchId = _commit(7);
        vm.warp(block.timestamp + bound(waited, 0, OUTCOME_DEADLINE - 1));
        bytes memory signatures = _signOutcomes(batchId, "", signers);
        IContributionLedger.Batch memory before = batches[batchId];
        vm.expectEmit(address(ledger));
        emit IContributionLedgerEvents.BatchWithheld(
            batchId, uint40(block.timestamp), uint88((1 << signers) - 1), signatures
        );
        vm.prank(caller);
        ledger.postOutcomes(before, "", signatures);
        _rememberWithheld(batchId, signers);
        _assertHeader(batchId, "the root stays that of the submissions");
    }

    function test_postOutcomes_reverts_whenWithheldBefore() public {
        (uint64 batchId, bytes memory joined) = _commitOne();
        bytes memory signatures = _signOutcomes(batchId, joined, QUORUM);
        _withhold(batchId);
        _expect(_whyOutcomesPosted(batchId), batchId, joined, signatures);
    }

    function test_postOutcomes_reverts_whenWithheldTwice() public {
        uint64 batchId = _commit(1);
        bytes memory signatures = _signOutcomes(batchId, "", QUORUM);
        _withhold(batchId);
        _expect(_whyOutcomesPosted(batchId), batchId, "", signatures);
    }

    function test_postOutcomes_reverts_whenToBeWithheldOnceJudged() public {
        (uint64 batchId, bytes memory joined) = _commitOne();
        bytes memory signatures = _signOutcomes(batchId, "", QUORUM);
        _post(batchId, _one(joined), QUORUM);
        _expect(_whyOutcomesPosted(batchId), batchId, "", signatures);
    }

    function testFuzz_postOutcomes_reverts_whenWithheldByNoValidator(uint256 key) public {
        key = bound(key, 1, 1 << 200);
        vm.assume(!runs.isValidator(runId, vm.addr(key)));
        uint64 batchId = _commit(1);
        bytes memory signature = _sign(key, ledger.DOMAIN_SEPARATOR(), _outcomesHash(batchId, ""));
        _expect(_whyInvalidSigner(vm.addr(key)), batchId, "", signature);
    }

    function test_postOutcomes_reverts_whenRecordsWereSignedButNoneAreGiven() public {
        (uint64 batchId, bytes memory joined) = _commitOne();
        bytes memory signatures = _signOutcomes(batchId, joined, QUORUM);
        vm.expectPartialRevert(IContributionLedgerErrors.LedgerInvalidSigner.selector);
        ledger.postOutcomes(batches[batchId], "", signatures);
    }

    function test_postOutcomes_withheld_keepsTheMoneySetAside() public {
        uint64 batchId = _commit(3);
        _withhold(batchId);
        assertEq(escrow.fundsOf(runId).reserved, 3000 * uint256(PRICE), "until its workers had their time");
    }
}
