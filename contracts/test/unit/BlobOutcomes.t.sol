// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {Test} from "forge-std/Test.sol";

import {BlobOutcomes} from "../BlobOutcomes.sol";

/// @dev The contract of benchmarks/chain/blobs.py. Proofs are about the blob of zeros: its commitment and every proof are
///      the point at infinity.
contract BlobOutcomesTest is Test {
    BlobOutcomes private immutable _ledger = new BlobOutcomes();
    bytes private _infinity = abi.encodePacked(bytes1(0xc0), new bytes(47));

    function test_post_revertsWithoutABlob() public {
        vm.expectRevert(abi.encodeWithSelector(BlobOutcomes.BlobMissing.selector, 1));
        _ledger.post(1, "root");
    }

    function test_contradict_revertsForAnotherBatchesBlob() public {
        bytes32 posted = _post();
        bytes memory shown = _input(posted, 0);
        vm.expectRevert(abi.encodeWithSelector(BlobOutcomes.BlobUnknown.selector, 2, posted));
        _ledger.contradict(2, shown, shown);
    }

    function test_contradict_revertsForAValueThatIsNotTheBlobs() public {
        bytes32 posted = _post();
        bytes memory right = _input(posted, 0);
        bytes memory wrong = _input(posted, 1);
        vm.expectRevert(abi.encodeWithSelector(BlobOutcomes.BlobProofInvalid.selector, 1));
        _ledger.contradict(1, right, wrong);
    }

    function test_contradict_showsBothElements() public {
        bytes memory right = _input(_post(), 0);
        vm.expectEmit(address(_ledger));
        emit BlobOutcomes.Contradicted(1, 0, 0);
        _ledger.contradict(1, right, right);
    }

    function _post() private returns (bytes32 versionedHash) {
        versionedHash = sha256(_infinity);
        versionedHash = bytes32(uint256(1) << 248 | (uint256(versionedHash) << 8 >> 8));
        bytes32[] memory hashes = new bytes32[](1);
        hashes[0] = versionedHash;
        vm.blobhashes(hashes);
        vm.expectEmit(address(_ledger));
        emit BlobOutcomes.OutcomesPosted(1, "root", versionedHash);
        _ledger.post(1, "root");
        assertEq(_ledger.blobOf(1), versionedHash, "the blob that was posted");
    }

    function _input(bytes32 versionedHash, uint256 value) private view returns (bytes memory) {
        return abi.encodePacked(versionedHash, uint256(7), value, _infinity, _infinity);
    }
}
