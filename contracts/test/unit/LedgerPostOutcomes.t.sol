// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {
    IContributionLedger,
    IContributionLedgerErrors,
    IContributionLedgerEvents
} from "../../src/interfaces/IContributionLedger.sol";
import {LedgerTest} from "../LedgerTest.sol";

contract LedgerPostOutcomesTest is LedgerTest {
    function setUp() public override {
        super.setUp();
        _startRun(WALLET / 2);
    }

    function _expect(bytes memory why, uint64 batchId, bytes memory joined, bytes memory signatures) private {
        vm.expectRevert(why);
        ledger.postOutcomes(batches[batchId], joined, signatures);
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

    // -------------------------------------------------------------------- header

    function testFuzz_postOutcomes_reverts_whenTheHeaderIsNot(uint256 field) public {
        bytes memory joined = _record(alice, 1, 0, ACCEPTED);
        uint64 batchId = _commit(1);
        bytes memory signatures = _signOutcomes(batchId, joined, QUORUM);
        IContributionLedger.Batch memory header = batches[batchId];
        _mutateHeader(header, field);
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerBatchMismatch.selector, header.batchId));
        ledger.postOutcomes(header, joined, signatures);
    }

    function testFuzz_postOutcomes_reverts_whenBatchIsUnknown(IContributionLedger.Batch memory header) public {
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerBatchMismatch.selector, header.batchId));
        ledger.postOutcomes(header, "", "");
    }

    function testFuzz_postOutcomes_reverts_twice(uint256 count) public {
        bytes[] memory records = _accepted(bound(count, 1, 20));
        uint64 batchId = _commit(records.length);
        bytes memory joined = _join(records);
        bytes memory signatures = _signOutcomes(batchId, joined, QUORUM);
        IContributionLedger.Batch memory before = batches[batchId];
        _post(batchId, records, QUORUM);
        _expect(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerOutcomesPosted.selector, batchId),
            batchId,
            joined,
            signatures
        );
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerBatchMismatch.selector, batchId));
        ledger.postOutcomes(before, joined, signatures);
    }

    // ------------------------------------------------------------------ deadline

    function testFuzz_postOutcomes_reverts_onceOverdue(uint256 late) public {
        bytes memory joined = _record(alice, 1, 0, ACCEPTED);
        uint64 batchId = _commit(1);
        bytes memory signatures = _signOutcomes(batchId, joined, QUORUM);
        uint256 dueAt = block.timestamp + OUTCOME_DEADLINE;
        vm.warp(dueAt + bound(late, 0, 365 days));
        _expect(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerOutcomesOverdue.selector, batchId, dueAt),
            batchId,
            joined,
            signatures
        );
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
        given = bound(given, 0, 60 * 56);
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
        uint64 batchId = _commit(1);
        _expect(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerSignatureLength.selector, length),
            batchId,
            _record(alice, 1, 0, ACCEPTED),
            new bytes(length)
        );
    }

    function testFuzz_postOutcomes_reverts_belowQuorum(uint256 signers) public {
        signers = bound(signers, 0, QUORUM - 1);
        bytes memory joined = _record(alice, 1, 0, ACCEPTED);
        uint64 batchId = _commit(1);
        bytes memory signatures = _signOutcomes(batchId, joined, signers);
        _expect(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerQuorumNotMet.selector, signers, QUORUM),
            batchId,
            joined,
            signatures
        );
    }

    function testFuzz_postOutcomes_reverts_whenSignersAreNotAscending(uint256 i, uint256 j) public {
        i = bound(i, 0, 4);
        j = bound(j, 0, i);
        bytes memory joined = _record(alice, 1, 0, ACCEPTED);
        uint64 batchId = _commit(1);
        _expect(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidSigner.selector, validators[j]),
            batchId,
            joined,
            _signedBy(batchId, joined, _pair(i, j))
        );
    }

    function testFuzz_postOutcomes_reverts_whenASignerIsNoValidator(uint256 key) public {
        key = bound(key, 1, 1 << 200);
        address signer = vm.addr(key);
        vm.assume(!runs.isValidator(runId, signer));
        bytes memory joined = _record(alice, 1, 0, ACCEPTED);
        uint64 batchId = _commit(1);
        bytes memory own = _sign(key, ledger.DOMAIN_SEPARATOR(), _outcomesHash(batchId, joined));
        bytes memory others = _signOutcomes(batchId, joined, 1);
        _expect(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidSigner.selector, signer),
            batchId,
            joined,
            signer < validators[0] ? bytes.concat(own, others) : bytes.concat(others, own)
        );
    }

    function testFuzz_postOutcomes_reverts_whenAValidatorWasRotatedOut(uint256 place) public {
        place = bound(place, 0, 1);
        bytes memory joined = _record(alice, 1, 0, ACCEPTED);
        uint64 batchId = _commit(1);
        bytes memory signatures = _signOutcomes(batchId, joined, 2);
        _deposit(stranger, REQUIRED_VALIDATOR_STAKE);
        vm.prank(owner);
        runs.rotateValidator(runId, validators[place], stranger);
        _expect(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidSigner.selector, validators[place]),
            batchId,
            joined,
            signatures
        );
    }

    function testFuzz_postOutcomes_reverts_whenASignatureIsMalformed(uint8 v, bool highS) public {
        bytes memory joined = _record(alice, 1, 0, ACCEPTED);
        uint64 batchId = _commit(1);
        bytes memory signatures = _signOutcomes(batchId, joined, 2);
        vm.assume(highS || (v != 27 && v != 28));
        if (highS) _raiseS(signatures);
        else signatures[64] = bytes1(v);
        _expect(
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidSigner.selector, address(0)),
            batchId,
            joined,
            signatures
        );
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

    // ------------------------------------------------------------------- success

    function testFuzz_postOutcomes_records(address caller, uint256 count, uint256 signers, uint256 waited) public {
        signers = bound(signers, QUORUM, 5);
        bytes[] memory records = _accepted(bound(count, 1, 40));
        uint64 batchId = _commit(records.length);
        vm.warp(block.timestamp + bound(waited, 0, OUTCOME_DEADLINE - 1));
        bytes memory joined = _join(records);
        bytes memory signatures = _signOutcomes(batchId, joined, signers);
        IContributionLedger.Batch memory before = batches[batchId];

        vm.expectEmit(address(ledger));
        emit IContributionLedgerEvents.OutcomesPosted(
            batchId,
            runId,
            _root(_leaves(batchId, records)),
            uint40(block.timestamp),
            uint88((1 << signers) - 1),
            joined,
            signatures
        );
        vm.prank(caller);
        ledger.postOutcomes(before, joined, signatures);

        _rememberPosted(batchId, records, signers);
        assertFalse(ledger.isDisputed(batches[batchId]), "the new header stands");
        bytes32 hash = keccak256(abi.encode(batches[batchId]));
        assertEq(ledger.commitmentOf(batchId), hash & ~bytes32(uint256(1)), "one slot");
    }

    function testFuzz_postOutcomes_takesAnyQuorum(uint256 i, uint256 j) public {
        i = bound(i, 0, 3);
        j = bound(j, i + 1, 4);
        bytes memory joined = _record(alice, 1, 0, ACCEPTED);
        uint64 batchId = _commit(1);
        ledger.postOutcomes(batches[batchId], joined, _signedBy(batchId, joined, _pair(i, j)));
        IContributionLedger.Batch memory posted = batches[batchId];
        posted.root = _leaf(batchId, 0, joined);
        posted.postedAt = uint40(block.timestamp);
        posted.signers = runs.seatBitOf(runId, validators[i]) | runs.seatBitOf(runId, validators[j]);
        assertFalse(ledger.isDisputed(posted), "the two who signed are in the header");
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
}
