"""Proof of checking: a validator's commitment shows that it recomputed the work that it judged.

Only a validator that prefills a submission has its hidden states. With its outcomes it commits to
*fingerprints*: a few random projections of the hidden states of every block of rows, in directions
derived from the validator's address, the policy's beacon and the submission. Each validator has
other directions, so fingerprints cannot be copied. Once the outcomes are on chain the validator
publishes its fingerprints, and others that recomputed the same submission compare them.

The arithmetic is in `muster.toploc.projections`, the rules in docs/protocol.md section 9.7.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from muster.protocol.encoding import abi_words, address_bytes, keccak
from muster.protocol.errors import EncodingError
from muster.protocol.ids import Address, Hash32
from muster.protocol.messages import SignedMessage

BLOCK_TOKENS = 64
"""Least completion tokens of a block of rows."""
_PURPOSE = keccak(b"muster.checking.v1")


@dataclass(frozen=True, slots=True)
class Checking(SignedMessage):
    """A validator's signed commitment, with its outcomes, to its fingerprints."""

    TYPE = "Checking(uint64 batchId,bytes32 batchRoot,bytes32 recordsHash,bytes32 fingerprintsHash)"

    batch_id: int
    batch_root: Hash32
    """The batch's root at its commitment."""
    records_hash: Hash32
    """Keccak-256 of the outcome records that it signed."""
    fingerprints_hash: Hash32
    """Hash of the fingerprints of all submissions of the batch, see `fingerprints_hash`."""


@dataclass(frozen=True, slots=True)
class CheckReport(SignedMessage):
    """A validator's signed report on another's fingerprints of a batch that it recomputed."""

    TYPE = (
        "CheckReport(uint64 batchId,bytes32 batchRoot,address validator,bytes32 fingerprintsHash,"
        "uint32 compared,uint32 failed)"
    )

    batch_id: int
    batch_root: Hash32
    """The batch's root at its commitment."""
    validator: Address
    """The validator whose fingerprints were compared."""
    fingerprints_hash: Hash32
    """The hash of the fingerprints that were compared."""
    compared: int
    """Submissions that both validators had to recompute. uint32."""
    failed: int
    """Compared submissions whose fingerprints do not match the hidden states. uint32."""


def block_seed(validator: Address, beacon: Hash32, leaf: Hash32, block: int) -> Hash32:
    """Return the seed of a validator's directions in one block of a submission.

    `beacon` is that of the submission's policy, `leaf` the submission's. The file is committed
    before, so neither a validator nor a worker can choose the directions.
    """
    return keccak(abi_words(_PURPOSE, address_bytes(validator), beacon, leaf, block))


def split_blocks(lengths: Sequence[int]) -> list[range]:
    """Return the rows of every block: in order, each of at least `BLOCK_TOKENS` completion tokens.

    Rows that are left over belong to the last block.
    """
    ends, tokens = [], 0
    for row, length in enumerate(lengths):
        tokens += length
        if tokens >= BLOCK_TOKENS:
            ends.append(row + 1)
            tokens = 0
    if lengths and (not ends or ends[-1] != len(lengths)):
        ends[-1:] = [len(lengths)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def fingerprints_hash(fingerprints: Sequence[bytes]) -> Hash32:
    """Return the hash of a batch's fingerprints: the hash of each submission's hash, in order.

    A submission that was judged without a prefill has none, and counts as empty bytes.
    """
    return keccak(b"".join(keccak(each) for each in fingerprints))


def pack_fingerprints(fingerprints: Sequence[bytes]) -> bytes:
    """Return a batch's fingerprints as one string: each after its length as 4 bytes, big-endian."""
    return b"".join(len(each).to_bytes(4, "big") + each for each in fingerprints)


def unpack_fingerprints(data: bytes, count: int) -> list[bytes]:
    """Return a batch's fingerprints; raises EncodingError unless there are exactly `count`."""
    found, at = [], 0
    for number in range(count):
        size = int.from_bytes(data[at : at + 4], "big")
        if at + 4 > len(data) or at + 4 + size > len(data):
            raise EncodingError(f"fingerprints {number} of {count} end early")
        found.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    if at != len(data):
        raise EncodingError(f"{len(data) - at} bytes follow the fingerprints of {count}")
    return found
