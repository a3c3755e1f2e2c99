// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IContributionLedger, IContributionLedgerErrors} from "../../src/interfaces/IContributionLedger.sol";
import {OutcomeRecordLib} from "../../src/libraries/OutcomeRecordLib.sol";
import {SeedLib} from "../../src/libraries/SeedLib.sol";
import {BaseTest} from "../BaseTest.sol";

/// @dev Puts library arguments into calldata.
contract Libraries {
    function rootOf(uint64 batchId, bytes calldata records) external pure returns (bytes32) {
        return OutcomeRecordLib.rootOf(batchId, records);
    }

    function leafOf(uint64 batchId, uint32 position, bytes calldata record) external pure returns (bytes32) {
        return OutcomeRecordLib.leafOf(batchId, position, record);
    }

    function decode(bytes calldata record) external pure returns (IContributionLedger.Outcome memory) {
        return OutcomeRecordLib.decode(record);
    }

    /// @dev Returns memory allocated before and after the assembly, to see that it leaves both alone.
    function rootBetweenAllocations(uint64 batchId, bytes calldata records, bytes calldata marker)
        external
        pure
        returns (bytes memory before, bytes memory later, bytes32 root)
    {
        before = bytes.concat(marker);
        root = OutcomeRecordLib.rootOf(batchId, records);
        later = bytes.concat(marker);
    }

    function problemIndices(bytes32 seed, uint256 count, uint256 size) external pure returns (uint256[] memory) {
        return SeedLib.problemIndices(seed, count, size);
    }
}

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

    function testFuzz_rootOf_isTheReferenceRoot(uint64 batchId, bytes32 seed, uint256 count) public view {
        bytes[] memory records = _records(seed, bound(count, 1, 130));
        bytes32 expected = _root(_leaves(batchId, records));
        assertEq(_libraries.rootOf(batchId, _join(records)), expected, "computed a second way");
    }

    function testFuzz_rootOf_leavesMemoryAlone(bytes32 seed, uint256 count, bytes calldata marker) public view {
        bytes memory joined = _join(_records(seed, bound(count, 1, 40)));
        (bytes memory before, bytes memory later, bytes32 root) = _libraries.rootBetweenAllocations(1, joined, marker);
        assertEq(before, marker, "before");
        assertEq(later, marker, "after");
        assertEq(root, _libraries.rootOf(1, joined), "root");
    }

    function testFuzz_rootOf_reverts_atTheFirstInvalidVerdict(uint256 count, uint256 at, uint8 verdict) public {
        vm.assume(verdict == 0 || verdict > FRAUD);
        count = bound(count, 1, 40);
        at = bound(at, 0, count - 1);
        bytes[] memory records = _records("seed", count);
        records[at][54] = bytes1(verdict);
        records[count - 1][54] = bytes1(verdict);
        vm.expectRevert(abi.encodeWithSelector(IContributionLedgerErrors.LedgerInvalidVerdict.selector, at, verdict));
        _libraries.rootOf(1, _join(records));
    }

    function testFuzz_leafOf_dependsOnPlace(uint64 batchId, uint32 position, bytes32 seed) public view {
        bytes memory record = _records(seed, 1)[0];
        bytes32 leaf = _libraries.leafOf(batchId, position, record);
        assertEq(leaf, _leaf(batchId, position, record), "leaf");
        assertNotEq(leaf, _libraries.leafOf(batchId ^ 1, position, record), "batch");
        assertNotEq(leaf, _libraries.leafOf(batchId, position ^ 1, record), "position");
    }

    function testFuzz_decode_undoesPack(IContributionLedger.Outcome calldata outcome) public view {
        bytes memory record = _pack(outcome);
        assertEq(record.length, OutcomeRecordLib.SIZE, "size");
        assertEq(keccak256(abi.encode(_libraries.decode(record))), keccak256(abi.encode(outcome)), "fields");
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
