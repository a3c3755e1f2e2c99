// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IContributionLedger, IContributionLedgerErrors} from "../../src/interfaces/IContributionLedger.sol";
import {BatchLib} from "../../src/libraries/BatchLib.sol";
import {BatchTreeLib} from "../../src/libraries/BatchTreeLib.sol";
import {OutcomeRecordLib} from "../../src/libraries/OutcomeRecordLib.sol";
import {SeedLib} from "../../src/libraries/SeedLib.sol";
import {BaseTest} from "../BaseTest.sol";

/// @dev Puts library arguments into calldata.
contract Libraries {
    function digest(uint64 batchId, bytes calldata records) external pure returns (bytes32 root, uint256 units) {
        return OutcomeRecordLib.digest(batchId, records);
    }

    function leafOf(uint64 batchId, uint32 position, bytes calldata record) external pure returns (bytes32) {
        return OutcomeRecordLib.leafOf(batchId, position, record);
    }

    function at(bytes calldata records, uint256 place) external pure returns (bytes memory) {
        return OutcomeRecordLib.at(records, place);
    }

    function decode(bytes calldata record) external pure returns (IContributionLedger.Outcome memory) {
        return OutcomeRecordLib.decode(record);
    }

    function paymentOf(bytes calldata record)
        external
        pure
        returns (uint32 workerId, uint32 step, uint32 index, uint32 units, uint8 verdict)
    {
        return OutcomeRecordLib.paymentOf(record);
    }

    /// @dev Returns memory allocated before and after the assembly, to see that it leaves both alone.
    function digestBetweenAllocations(uint64 batchId, bytes calldata records, bytes calldata marker)
        external
        pure
        returns (bytes memory before, bytes memory later, bytes32 root)
    {
        before = bytes.concat(marker);
        (root,) = OutcomeRecordLib.digest(batchId, records);
        later = bytes.concat(marker);
    }

    function check(IContributionLedger.Batch calldata batch, bytes32 stored) external pure returns (bool) {
        return BatchLib.check(batch, stored);
    }

    function holds(bytes32 root, uint256 count, uint256 position, bytes32 leaf, bytes32[] calldata proof)
        external
        pure
        returns (bool)
    {
        return BatchTreeLib.holds(root, count, position, leaf, proof);
    }

    function problemIndices(bytes32 seed, uint256 count, uint256 size) external pure returns (uint256[] memory) {
        return SeedLib.problemIndices(seed, count, size);
    }
}

/// @title Records, headers and seeds, each computed a second way
contract LibrariesTest is BaseTest {
    Libraries private _libraries = new Libraries();

    function _records(bytes32 seed, uint256 count) private pure returns (bytes[] memory records) {
        records = new bytes[](count);
        for (uint256 i = 0; i < count; ++i) {
            bytes32 random = keccak256(abi.encode(seed, i));
            uint8 verdict = uint8(ACCEPTED + uint256(random) % 4);
            records[i] = abi.encodePacked(random, bytes22(keccak256(abi.encode(random))), verdict, bytes1(random));
        }
    }

    // ------------------------------------------------------------ outcome records

    function testFuzz_digest_isTheReferenceRoot(uint64 batchId, bytes32 seed, uint256 count) public view {
        bytes[] memory records = _records(seed, bound(count, 1, 130));
        (bytes32 root, uint256 units) = _libraries.digest(batchId, _join(records));
        assertEq(root, _root(_leaves(batchId, records)), "computed a second way");
        uint256 sum;
        for (uint256 i = 0; i < records.length; ++i) {
            sum += _libraries.decode(records[i]).units;
        }
        assertEq(units, sum, "units");
    }

    function testFuzz_digest_leavesMemoryAlone(bytes32 seed, uint256 count, bytes calldata marker) public view {
        bytes memory joined = _join(_records(seed, bound(count, 1, 40)));
        (bytes memory before, bytes memory later, bytes32 root) = _libraries.digestBetweenAllocations(1, joined, marker);
        assertEq(before, marker, "before");
        assertEq(later, marker, "after");
        (bytes32 alone,) = _libraries.digest(1, joined);
        assertEq(root, alone, "root");
    }

    function testFuzz_digest_reverts_atTheFirstInvalidVerdict(uint256 count, uint256 at, uint8 verdict) public {
        vm.assume(verdict == 0 || verdict > FRAUD);
        count = bound(count, 1, 40);
        at = bound(at, 0, count - 1);
        bytes[] memory records = _records("seed", count);
        records[at][54] = bytes1(verdict);
        records[count - 1][54] = bytes1(verdict);
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidVerdict.selector, at, verdict));
        _libraries.digest(1, _join(records));
    }

    function testFuzz_leafOf_dependsOnPlace(uint64 batchId, uint32 position, bytes32 seed) public view {
        bytes memory record = _records(seed, 1)[0];
        bytes32 leaf = _libraries.leafOf(batchId, position, record);
        assertEq(leaf, _leaf(batchId, position, record), "leaf");
        assertNotEq(leaf, _libraries.leafOf(batchId ^ 1, position, record), "batch");
        assertNotEq(leaf, _libraries.leafOf(batchId, position ^ 1, record), "position");
    }

    function testFuzz_at_cutsOutOneRecord(bytes32 seed, uint256 count, uint256 place) public view {
        bytes[] memory records = _records(seed, bound(count, 1, 40));
        place = bound(place, 0, records.length - 1);
        assertEq(_libraries.at(_join(records), place), records[place], "that record");
    }

    function testFuzz_decode_undoesPack(IContributionLedger.Outcome calldata outcome) public view {
        bytes memory record = _pack(outcome);
        assertEq(record.length, OutcomeRecordLib.SIZE, "size");
        IContributionLedger.Outcome memory decoded = _libraries.decode(record);
        assertEq(keccak256(abi.encode(decoded)), keccak256(abi.encode(outcome)), "decoded");
    }

    function testFuzz_paymentOf_agreesWithDecode(IContributionLedger.Outcome calldata outcome) public view {
        (uint32 workerId, uint32 step, uint32 index, uint32 units, uint8 verdict) = _libraries.paymentOf(_pack(outcome));
        assertEq(workerId, outcome.workerId, "worker");
        assertEq(step, outcome.step, "step");
        assertEq(index, outcome.index, "index");
        assertEq(units, outcome.units, "units");
        assertEq(verdict, outcome.verdict, "verdict");
    }

    function testFuzz_tagOf_namesTheSlotAlone(IContributionLedger.Outcome memory o, uint32 step, uint32 index)
        public
        pure
    {
        uint64 tag = OutcomeRecordLib.tagOf(o);
        assertEq(tag, uint64(o.step) * 2 ** 32 + o.index, "step and index");
        bool same = step == o.step && index == o.index;
        (o.workerId, o.policyVersion, o.fileHash) = (o.workerId ^ 1, o.policyVersion ^ 1, ~o.fileHash);
        (o.rollouts, o.units, o.verdict, o.reason) = (o.rollouts ^ 1, o.units ^ 1, o.verdict ^ 1, o.reason ^ 1);
        assertEq(OutcomeRecordLib.tagOf(o), tag, "whatever was decided about it");
        (o.step, o.index) = (step, index);
        assertEq(OutcomeRecordLib.tagOf(o) == tag, same, "another slot");
    }

    function testFuzz_isExact_followsTheReasonOfFrauds(uint8 verdict, uint8 reason) public pure {
        bool exact = OutcomeRecordLib.isExact(verdict, reason);
        assertEq(exact, verdict == FRAUD && reason >= 30 && reason <= 59, "exact");
    }

    function test_isExact_endsAtItsBounds() public pure {
        assertFalse(OutcomeRecordLib.isExact(FRAUD, 29), "before the first");
        assertTrue(OutcomeRecordLib.isExact(FRAUD, 30), "the first");
        assertTrue(OutcomeRecordLib.isExact(FRAUD, 59), "the last");
        assertFalse(OutcomeRecordLib.isExact(FRAUD, 60), "behind the last");
        assertFalse(OutcomeRecordLib.isExact(REJECTED, 30), "no fraud");
    }

    function testFuzz_submissionTypeHash_isOfTheTypeThatNodesSign(uint32 step, uint32 index, uint64 units) public view {
        IContributionLedger.Submission memory s = _submission(alice, 1, index);
        (s.step, s.units) = (step, units);
        bytes32 structHash = keccak256(abi.encode(OutcomeRecordLib.SUBMISSION_TYPEHASH, s));
        assertEq(structHash, _submissionHash(s), "struct hash");
    }

    // ------------------------------------------------------ the tree of a batch

    /// @dev A tree of different leaves, a position in it, and the proof for it.
    struct Place {
        bytes32[] leaves;
        uint256 at;
        bytes32[] proof;
    }

    function _place(bytes32 seed, uint256 count, uint256 at) private pure returns (Place memory p) {
        p.leaves = new bytes32[](bound(count, 1, 70));
        for (uint256 i = 0; i < p.leaves.length; ++i) {
            p.leaves[i] = keccak256(abi.encode(seed, i));
        }
        p.at = bound(at, 0, p.leaves.length - 1);
        p.proof = _batchSiblings(p.leaves, p.at);
    }

    function _holds(Place memory p, uint256 at, bytes32 leaf) private view returns (bool) {
        return _libraries.holds(_batchRoot(p.leaves), p.leaves.length, at, leaf, p.proof);
    }

    function testFuzz_holds_whatIsAtItsPosition(bytes32 seed, uint256 count, uint256 at) public view {
        Place memory p = _place(seed, count, at);
        assertTrue(_holds(p, p.at, p.leaves[p.at]), "there");
    }

    /// @dev One leaf is at one position, and one position has one leaf, whatever proof is given.
    function testFuzz_holds_nothingElse(bytes32 seed, uint256 count, uint256 at, uint256 other, bytes32 leaf)
        public
        view
    {
        Place memory p = _place(seed, count, at);
        vm.assume(other != p.at && leaf != p.leaves[p.at]);
        assertFalse(_holds(p, other, p.leaves[p.at]), "at another position");
        assertFalse(_holds(p, bound(other, 0, 100), leaf), "another leaf");
        if (other < p.leaves.length) {
            p.proof = _batchSiblings(p.leaves, other);
            assertFalse(_holds(p, p.at, p.leaves[p.at]), "with the proof of another position");
        }
    }

    /// @dev The order of siblings counts: exchanging two of them makes another root.
    function testFuzz_holds_theOrder(bytes32 seed, uint256 count, uint256 at) public pure {
        Place memory p = _place(seed, bound(count, 2, 70), at);
        bytes32 root = _batchRoot(p.leaves);
        uint256 sibling = p.at ^ 1;
        vm.assume(sibling < p.leaves.length);
        (p.leaves[p.at], p.leaves[sibling]) = (p.leaves[sibling], p.leaves[p.at]);
        assertNotEq(_batchRoot(p.leaves), root, "another root");
    }

    function testFuzz_holds_nothing_byABrokenProof(bytes32 seed, uint256 count, uint256 at, uint256 which, bytes32 node)
        public
        view
    {
        Place memory p = _place(seed, bound(count, 2, 70), at);
        bytes32 leaf = p.leaves[p.at];
        uint256 length = p.proof.length;
        which = bound(which, 0, length + 1);
        bytes32[] memory proof = new bytes32[](which < length ? length : which == length ? length - 1 : length + 1);
        for (uint256 i = 0; i < proof.length && i < length; ++i) {
            proof[i] = p.proof[i];
        }
        if (which < length) {
            vm.assume(proof[which] != node);
            proof[which] = node;
        }
        p.proof = proof;
        assertFalse(_holds(p, p.at, leaf), "changed, too short or too long");
    }

    // ------------------------------------------------------------------- batches

    /// @dev Any header: the fuzzer by itself gives statuses that there are not.
    function _header(bytes32 seed) private pure returns (IContributionLedger.Batch memory) {
        uint256 random = uint256(keccak256(abi.encode(seed)));
        return IContributionLedger.Batch({
            batchId: uint64(random),
            runId: uint64(random >> 64),
            root: seed,
            outcomesRoot: bytes32(random),
            count: uint32(random >> 128),
            units: uint64(random >> 160),
            pricePerUnit: uint88(random >> 168),
            terms: uint32(random >> 32),
            committedAt: uint40(random >> 216),
            postedAt: uint40(random >> 8),
            signers: uint88(random >> 80),
            status: IContributionLedger.BatchStatus(random % 3)
        });
    }

    function testFuzz_check_agreesWithHashOf(bytes32 seed) public view {
        IContributionLedger.Batch memory batch = _header(seed);
        bytes32 stored = BatchLib.hashOf(batch);
        assertEq(stored, keccak256(abi.encode(batch)) & ~bytes32(uint256(1)), "hash");
        assertFalse(_libraries.check(batch, stored), "nobody challenged");
        assertTrue(_libraries.check(batch, stored | bytes32(uint256(1))), "somebody did");
    }

    function testFuzz_check_reverts_whenAnotherHashIsStored(bytes32 seed, uint256 bit) public {
        IContributionLedger.Batch memory batch = _header(seed);
        bytes32 stored = BatchLib.hashOf(batch) ^ bytes32(uint256(1) << bound(bit, 1, 255));
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerBatchMismatch.selector, batch.batchId));
        _libraries.check(batch, stored);
    }

    function testFuzz_hashOf_dependsOnEveryField(bytes32 seed, uint256 word, uint8 bit) public pure {
        IContributionLedger.Batch memory batch = _header(seed);
        bytes32 stored = BatchLib.hashOf(batch);
        bytes memory header = abi.encode(batch);
        assertEq(header.length, 12 * 32, "twelve words");
        word = bound(word, 0, 11);
        bytes32 changed;
        assembly ("memory-safe") {
            let at := add(add(header, 32), mul(word, 32))
            mstore(at, xor(mload(at), shl(bit, 1)))
            changed := keccak256(add(header, 32), mload(header))
        }
        assertNotEq(changed & ~bytes32(uint256(1)), stored, "another header");
    }

    /// @dev A field with more bits than its type is no header, though every cast would cut them off.
    function testFuzz_check_reverts_whenAFieldHasSurplusBits(bytes32 seed, uint256 surplus) public view {
        IContributionLedger.Batch memory batch = _header(seed);
        bytes32 stored = BatchLib.hashOf(batch);
        surplus = bound(surplus, 64, 255);
        bytes memory input = abi.encodeCall(Libraries.check, (batch, stored));
        assembly ("memory-safe") {
            let at := add(add(input, 36), 128)
            mstore(at, or(mload(at), shl(surplus, 1)))
        }
        (bool success, bytes memory answer) = address(_libraries).staticcall(input);
        assertFalse(success, "refused");
        bytes memory mismatch =
            abi.encodeWithSelector(IContributionLedgerErrors.LedgerBatchMismatch.selector, batch.batchId);
        assertEq(answer, mismatch, "as another header");
    }

    // --------------------------------------------------------------------- seeds

    function testFuzz_problemIndices_reverts_whenTheSetIsTooSmall(bytes32 seed, uint256 count, uint256 size) public {
        size = bound(size, 0, type(uint64).max);
        count = bound(count, size + 1, type(uint256).max);
        vm.expectRevert(abi.encodeWithSelector(SeedLib.SeedTooFewProblems.selector, count, size));
        _libraries.problemIndices(seed, count, size);
    }

    function testFuzz_problemIndices_areDistinct_andInTheSet(bytes32 seed, uint256 count, uint256 size) public view {
        size = bound(size, 1, 200);
        count = bound(count, 1, size < 20 ? size : 20);
        uint256[] memory indices = _libraries.problemIndices(seed, count, size);
        assertEq(indices.length, count, "count");
        for (uint256 i = 0; i < count; ++i) {
            assertLt(indices[i], size, "in the set");
            for (uint256 j = 0; j < i; ++j) {
                assertNotEq(indices[i], indices[j], "distinct");
            }
        }
    }

    function testFuzz_problemIndices_extendShorterOnes(bytes32 seed, uint256 size) public view {
        size = bound(size, 8, 1_000_000);
        uint256[] memory four = _libraries.problemIndices(seed, 4, size);
        uint256[] memory eight = _libraries.problemIndices(seed, 8, size);
        for (uint256 i = 0; i < 4; ++i) {
            assertEq(four[i], eight[i], "the same order");
        }
    }

    function testFuzz_mixedIndices_ofOnePart_areTheSetsOwn(bytes32 seed, uint256 size) public pure {
        size = bound(size, 8, 1000);
        uint256[] memory starts = new uint256[](8);
        uint256[] memory sizes = new uint256[](8);
        for (uint256 i = 0; i < 8; ++i) {
            sizes[i] = size;
        }
        assertEq(SeedLib.mixedIndices(seed, starts, sizes), SeedLib.problemIndices(seed, 8, size), "one part");
    }

    function testFuzz_indicesPast_areNotSetAside(bytes32 seed, uint256 size, bytes memory chosen) public pure {
        size = bound(size, 16, 1000);
        bytes memory setAside = new bytes(chosen.length);
        for (uint256 i = 0; i < chosen.length; ++i) {
            setAside[i] = chosen[i] & 0x7f;
        }
        (uint256[] memory starts, uint256[] memory sizes, uint256[] memory every) =
            (new uint256[](2), new uint256[](2), new uint256[](2));
        for (uint256 i = 0; i < 2; ++i) {
            (sizes[i], every[i]) = (size, 1 << 60);
        }
        uint256[] memory indices = SeedLib.indicesPast(seed, starts, sizes, setAside, every);
        for (uint256 i = 0; i < 2; ++i) {
            bool isListed =
                indices[i] / 8 < setAside.length && (uint8(setAside[indices[i] / 8]) >> (indices[i] % 8)) & 1 == 1;
            assertFalse(isListed, "not set aside");
        }
        assertNotEq(indices[0], indices[1], "distinct");
    }

    function testFuzz_indicesPast_isTheSetsOwn_whereAllAreRevisited(bytes32 seed, uint256 size, bytes memory chosen)
        public
        pure
    {
        size = bound(size, 8, 1000);
        uint256[] memory sizes = new uint256[](8);
        for (uint256 i = 0; i < 8; ++i) {
            sizes[i] = size;
        }
        uint256[] memory none = new uint256[](8);
        uint256[] memory indices = SeedLib.indicesPast(seed, none, sizes, chosen, none);
        assertEq(indices, SeedLib.problemIndices(seed, 8, size), "as without a list");
    }

    function testFuzz_partOf_hasAWeight(bytes32 seed, uint256 problem, uint24[4] memory chosen) public pure {
        uint256[] memory weights = new uint256[](4);
        for (uint256 i = 0; i < 4; ++i) {
            weights[i] = chosen[i];
        }
        weights[2] += 1;
        assertGt(weights[SeedLib.partOf(seed, problem, weights)], 0, "never a part without weight");
    }

    function testFuzz_targetLength_isOneOfTheBudgets(bytes32 seed, uint256 problem, uint32[3] memory budgets)
        public
        pure
    {
        uint256[] memory lengths = new uint256[](3);
        for (uint256 i = 0; i < 3; ++i) {
            lengths[i] = budgets[i];
        }
        uint256 target = uint256(SeedLib.targetLength(seed, problem, lengths));
        assertTrue(target == lengths[0] || target == lengths[1] || target == lengths[2], "one of them");
        assertEq(SeedLib.targetLength(seed, problem, new uint256[](0)), -1, "none without budgets");
    }
}
