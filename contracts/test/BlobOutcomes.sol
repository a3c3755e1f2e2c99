// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

/// @title What a ledger would need that takes outcome records as blobs (EIP-4844)
/// @dev For benchmarks/chain/blobs.py alone: it is deployed nowhere. `post` is what comes on top of a posting without
///      records; `contradict` is what proves that a signed root is not that of the blob's records.
contract BlobOutcomes {
    /// @dev Where EIP-4844 has point evaluation.
    address private constant POINT_EVALUATION = address(0x0A);

    mapping(uint64 batchId => bytes32 versionedHash) public blobOf;

    event OutcomesPosted(uint64 indexed batchId, bytes32 root, bytes32 versionedHash);
    event Contradicted(uint64 indexed batchId, bytes32 first, bytes32 second);

    error BlobMissing(uint64 batchId);
    error BlobUnknown(uint64 batchId, bytes32 versionedHash);
    error BlobProofInvalid(uint64 batchId);

    /// @notice Posts a batch's outcomes, whose records are the transaction's first blob.
    function post(uint64 batchId, bytes32 root) external {
        bytes32 versionedHash = blobhash(0);
        require(versionedHash != 0, BlobMissing(batchId));
        blobOf[batchId] = versionedHash;
        emit OutcomesPosted(batchId, root, versionedHash);
    }

    /// @notice Shows one record of a posted blob: its two field elements of 28 bytes.
    /// @param first Input of point evaluation: versioned hash, point, value, commitment, proof.
    /// @param second The same for the element behind it.
    function contradict(uint64 batchId, bytes calldata first, bytes calldata second) external {
        emit Contradicted(batchId, _evaluate(batchId, first), _evaluate(batchId, second));
    }

    function _evaluate(uint64 batchId, bytes calldata input) private view returns (bytes32) {
        bytes32 versionedHash = bytes32(input[:32]);
        require(blobOf[batchId] == versionedHash, BlobUnknown(batchId, versionedHash));
        (bool proven,) = POINT_EVALUATION.staticcall(input);
        require(proven, BlobProofInvalid(batchId));
        return bytes32(input[64:96]);
    }
}
