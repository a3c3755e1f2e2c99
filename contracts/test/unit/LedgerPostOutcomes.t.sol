// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {
    IContributionLedger,
    IContributionLedgerErrors,
    IContributionLedgerEvents
} from "../../src/interfaces/IContributionLedger.sol";
import {BaseTest} from "../BaseTest.sol";

contract LedgerPostOutcomesTest is BaseTest {
    function setUp() public override {
        super.setUp();
        _startRun(0);
    }

    function testFuzz_postOutcomes_reverts_whenBatchIsUnknown(uint64 batchId) public {
        bytes[] memory none = new bytes[](0);
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerBatchUnknown.selector, batchId));
        ledger.postOutcomes(batchId, "", none);
    }

    function testFuzz_postOutcomes_reverts_twice(uint256 count) public {
        bytes[] memory records = _accepted(bound(count, 1, 20));
        uint64 batchId = _commitAndPost(records);
        bytes memory joined = _join(records);
        bytes[] memory signatures = _signOutcomes(batchId, joined, QUORUM);
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerOutcomesPosted.selector, batchId));
        ledger.postOutcomes(batchId, joined, signatures);
    }

    function testFuzz_postOutcomes_reverts_whenRecordsAreNotOnePerSubmission(uint256 count, uint256 given) public {
        count = bound(count, 1, 30);
        given = bound(given, 0, 60 * 56);
        vm.assume(given != count * 56);
        uint64 batchId = _commit(count);
        bytes memory joined = new bytes(given);
        bytes[] memory signatures = _signOutcomes(batchId, joined, QUORUM);
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerRecordCount.selector, given, count * 56));
        ledger.postOutcomes(batchId, joined, signatures);
    }

    function testFuzz_postOutcomes_reverts_belowQuorum(uint256 signers) public {
        signers = bound(signers, 0, QUORUM - 1);
        bytes memory joined = _record(alice, 1, 0, ACCEPTED);
        uint64 batchId = _commit(1);
        bytes[] memory signatures = _signOutcomes(batchId, joined, signers);
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerQuorumNotMet.selector, signers, QUORUM));
        ledger.postOutcomes(batchId, joined, signatures);
    }

    function testFuzz_postOutcomes_reverts_whenSignersAreNotAscending(uint256 i, uint256 j) public {
        i = bound(i, 0, 3);
        j = bound(j, 0, i);
        bytes memory joined = _record(alice, 1, 0, ACCEPTED);
        uint64 batchId = _commit(1);
        bytes[] memory all = _signOutcomes(batchId, joined, 4);
        bytes[] memory signatures = new bytes[](2);
        (signatures[0], signatures[1]) = (all[i], all[j]);
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidSigner.selector, validators[j]));
        ledger.postOutcomes(batchId, joined, signatures);
    }

    function testFuzz_postOutcomes_reverts_whenASignerIsNoValidator(uint256 key) public {
        key = bound(key, 1, 1 << 200);
        address signer = vm.addr(key);
        vm.assume(signer > validators[0] && !runs.isValidator(runId, signer));
        bytes memory joined = _record(alice, 1, 0, ACCEPTED);
        uint64 batchId = _commit(1);
        bytes[] memory signatures = _signOutcomes(batchId, joined, 2);
        signatures[1] = _sign(key, ledger.DOMAIN_SEPARATOR(), _outcomesHash(batchId, joined));
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidSigner.selector, signer));
        ledger.postOutcomes(batchId, joined, signatures);
    }

    function test_postOutcomes_reverts_whenAValidatorWasRotatedOut() public {
        bytes memory joined = _record(alice, 1, 0, ACCEPTED);
        uint64 batchId = _commit(1);
        bytes[] memory signatures = _signOutcomes(batchId, joined, 2);
        _deposit(stranger, REQUIRED_VALIDATOR_STAKE);
        vm.prank(owner);
        runs.rotateValidator(runId, validators[1], stranger);
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidSigner.selector, validators[1]));
        ledger.postOutcomes(batchId, joined, signatures);
    }

    function testFuzz_postOutcomes_reverts_whenASignatureIsMalformed(bytes memory signature) public {
        vm.assume(signature.length != 65);
        bytes memory joined = _record(alice, 1, 0, ACCEPTED);
        uint64 batchId = _commit(1);
        bytes[] memory signatures = _signOutcomes(batchId, joined, 2);
        signatures[0] = signature;
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidSigner.selector, address(0)));
        ledger.postOutcomes(batchId, joined, signatures);
    }

    function testFuzz_postOutcomes_reverts_whenRecordsWereChanged(uint256 count, uint256 at, uint8 change) public {
        bytes[] memory records = _accepted(bound(count, 1, 20));
        vm.assume(change != 0);
        uint64 batchId = _commit(records.length);
        bytes memory joined = _join(records);
        bytes[] memory signatures = _signOutcomes(batchId, joined, QUORUM);
        at = bound(at, 0, joined.length - 1);
        joined[at] = bytes1(uint8(joined[at]) ^ change);
        vm.expectPartialRevert(IContributionLedgerErrors.LedgerInvalidSigner.selector);
        ledger.postOutcomes(batchId, joined, signatures);
    }

    function testFuzz_postOutcomes_reverts_whenSignedForAnotherBatch(uint256 count) public {
        bytes[] memory records = _accepted(bound(count, 1, 5));
        bytes memory joined = _join(records);
        uint64 first = _commit(records.length);
        uint64 second = _commit(records.length);
        bytes[] memory signatures = _signOutcomes(first, joined, QUORUM);
        vm.expectPartialRevert(IContributionLedgerErrors.LedgerInvalidSigner.selector);
        ledger.postOutcomes(second, joined, signatures);
    }

    function testFuzz_postOutcomes_reverts_whenAVerdictIsNone(uint256 count, uint256 at, uint8 verdict) public {
        count = bound(count, 1, 20);
        at = bound(at, 0, count - 1);
        vm.assume(verdict == 0 || verdict > FRAUD);
        bytes[] memory records = _accepted(count);
        records[at][54] = bytes1(verdict);
        uint64 batchId = _commit(count);
        bytes memory joined = _join(records);
        bytes[] memory signatures = _signOutcomes(batchId, joined, QUORUM);
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidVerdict.selector, at, verdict));
        ledger.postOutcomes(batchId, joined, signatures);
    }

    function testFuzz_postOutcomes_records(address caller, uint256 count, uint256 signers, uint256 waited) public {
        signers = bound(signers, QUORUM, 4);
        bytes[] memory records = _accepted(bound(count, 1, 40));
        uint64 batchId = _commit(records.length);
        // Late outcomes count too: nobody goes unpaid for the validators' delay.
        vm.warp(block.timestamp + bound(waited, 0, 10 * OUTCOME_DEADLINE));
        bytes memory joined = _join(records);
        bytes[] memory signatures = _signOutcomes(batchId, joined, signers);
        bytes32 root = _root(_leaves(batchId, records));

        vm.expectEmit(address(ledger));
        emit IContributionLedgerEvents.OutcomesPosted(batchId, runId, root, joined, signatures);
        vm.prank(caller);
        ledger.postOutcomes(batchId, joined, signatures);

        IContributionLedger.Batch memory batch = ledger.batchOf(batchId);
        assertEq(batch.outcomesRoot, root, "root, computed a second way");
        assertEq(batch.root, 0, "the submissions' root is in the event");
        assertEq(batch.postedAt, block.timestamp, "time");
        assertEq(batch.count, records.length, "count");
        assertEq(ledger.signersOf(batchId), (1 << signers) - 1, "signers");
    }

    function testFuzz_postOutcomes_recordsEveryVerdict(uint8[12] memory verdicts) public {
        bytes[] memory records = new bytes[](12);
        for (uint256 i = 0; i < 12; ++i) {
            records[i] = _record(alice, 1, uint32(i), uint8(bound(verdicts[i], ACCEPTED, FRAUD)));
        }
        uint64 batchId = _commitAndPost(records);
        for (uint256 i = 0; i < 12; ++i) {
            (IContributionLedger.Outcome memory outcome,) = ledger.outcomeOf(_prove(batchId, records, i));
            assertEq(outcome.verdict, bound(verdicts[i], ACCEPTED, FRAUD), "verdict");
        }
    }

    // ---------------------------------------------------------------- outcome of

    function testFuzz_outcomeOf_reverts_beforeOutcomes(uint256 count) public {
        bytes[] memory records = _accepted(bound(count, 1, 5));
        uint64 batchId = _commit(records.length);
        IContributionLedger.OutcomeProof memory outcome = _prove(batchId, records, 0);
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidProof.selector, batchId, 0));
        ledger.outcomeOf(outcome);
    }

    function testFuzz_outcomeOf_reverts_whenAnythingWasChanged(uint256 count, uint256 at, uint256 what) public {
        count = bound(count, 2, 40);
        at = bound(at, 0, count - 1);
        bytes[] memory records = _accepted(count);
        uint64 batchId = _commitAndPost(records);
        IContributionLedger.OutcomeProof memory outcome = _prove(batchId, records, at);
        what = bound(what, 0, 5);
        if (what == 0) outcome.batchId += 1;
        if (what == 1) outcome.position += 1;
        if (what == 2) outcome.record[54] = bytes1(FRAUD);
        if (what == 3) outcome.proof[0] = keccak256("other sibling");
        if (what == 4) outcome.record = bytes.concat(outcome.record, hex"00");
        if (what == 5) outcome.proof = new bytes32[](0);
        vm.expectRevert(
            abi.encodeWithSelector(
                IContributionLedgerErrors.LedgerInvalidProof.selector, outcome.batchId, outcome.position
            )
        );
        ledger.outcomeOf(outcome);
    }

    function testFuzz_outcomeOf_reverts_whenTheSubmissionsRootIsProven(bytes memory record) public {
        // Before outcomes are posted the same slot holds the submissions' root: it must never serve as outcomes' root.
        vm.prank(orchestrator);
        uint64 batchId = ledger.commitBatch(runId, _leaf(1, 0, record), 1, 1);
        vm.expectPartialRevert(IContributionLedgerErrors.LedgerInvalidProof.selector);
        ledger.outcomeOf(
            IContributionLedger.OutcomeProof({batchId: batchId, position: 0, record: record, proof: new bytes32[](0)})
        );
    }

    function testFuzz_outcomeOf_decodes(IContributionLedger.Outcome memory given, uint256 count, uint256 at) public {
        given.verdict = uint8(bound(given.verdict, ACCEPTED, FRAUD));
        count = bound(count, 1, 40);
        at = bound(at, 0, count - 1);
        bytes[] memory records = _accepted(count);
        records[at] = _pack(given);
        uint64 batchId = _commitAndPost(records);
        (IContributionLedger.Outcome memory outcome, bytes32 leaf) = ledger.outcomeOf(_prove(batchId, records, at));
        assertEq(keccak256(abi.encode(outcome)), keccak256(abi.encode(given)), "decoded");
        assertEq(leaf, _leaf(batchId, at, records[at]), "leaf");
    }

    // ------------------------------------------------------------------ finality

    function testFuzz_isFinal_afterTheWindow(uint256 waited) public {
        waited = bound(waited, 0, 3 * CHALLENGE_WINDOW);
        bytes[] memory records = _accepted(3);
        uint64 batchId = _commitAndPost(records);
        vm.warp(block.timestamp + waited);
        bool expected = waited >= CHALLENGE_WINDOW;
        assertEq(ledger.isFinal(batchId, _leaf(batchId, 1, records[1])), expected, "by leaf");
        (uint64 run, IContributionLedger.Outcome memory settled, bool isFinal) =
            ledger.settledOutcome(_prove(batchId, records, 1));
        assertEq(isFinal, expected, "by proof");
        assertEq(run, runId, "run");
        assertEq(settled.verdict, ACCEPTED, "verdict");
    }

    function testFuzz_isFinal_isFalse_withoutOutcomes(uint64 batchId, bytes32 leaf) public {
        _commit(1);
        vm.warp(block.timestamp + 10 * CHALLENGE_WINDOW);
        assertFalse(ledger.isFinal(batchId, leaf), "nothing was posted");
    }

    // ------------------------------------------------------------- mark disputed

    function testFuzz_markDisputed_reverts_whenNotTheCourt(address caller) public {
        vm.assume(caller != address(court));
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerUnauthorized.selector, caller));
        vm.prank(caller);
        ledger.markDisputed(1);
    }
}
