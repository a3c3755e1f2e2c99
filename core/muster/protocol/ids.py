"""Identifier types. One word per thing, as in docs/glossary.md."""

import re
from functools import lru_cache
from typing import NamedTuple, NewType

from muster.protocol.compiled import keccak256
from muster.protocol.errors import EncodingError

RunId = NewType("RunId", int)
"""One training effort; assigned by RunRegistry from 1 upwards. uint64."""

Step = NewType("Step", int)
"""Rollout step: training step s consumes submissions and makes policy version s. uint32, from 1."""

PolicyVersion = NewType("PolicyVersion", int)
"""Checkpoint number; 0 is the base model. uint32."""

Address = NewType("Address", str)
"""EIP-55 checksummed account address, `0x` and 40 hexadecimal digits."""

Hash32 = NewType("Hash32", bytes)
"""Exactly 32 bytes."""


class BatchName(NamedTuple):
    """A batch's unique name: after a reorganisation another batch may get its number."""

    batch_id: int
    """Its number."""
    root: Hash32
    """Root over its submissions."""


_ADDRESS = re.compile("(?:0[xX])?([0-9a-fA-F]{40})")
_KNOWN_ADDRESSES = 1 << 17
"""Cached checksums, 30 MB at most: the same nodes sign repeatedly."""


def to_address(value: str | bytes) -> Address:
    """Return the checksummed form of an account address; raises EncodingError on anything else."""
    text = value.hex() if isinstance(value, bytes) else value
    found = _ADDRESS.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise EncodingError(f"not an account address: {value!r}")
    digits = found[1]
    lower = digits.lower()
    checksummed = _checksummed(lower)
    if digits not in (lower, digits.upper(), checksummed[2:]):
        raise EncodingError(f"address {value!r} has a wrong checksum (EIP-55), is it mistyped?")
    return checksummed


@lru_cache(maxsize=_KNOWN_ADDRESSES)
def _checksummed(digits: str) -> Address:
    """Return the checksummed address of 40 lower-case digits; the hash decides the capitals."""
    hashed = keccak256(digits.encode()).hex()
    cased = (d.upper() if h > "7" else d for d, h in zip(digits, hashed, strict=False))
    return Address("0x" + "".join(cased))


def to_hash32(value: str | bytes) -> Hash32:
    """Return 32 bytes from bytes or `0x` hexadecimal; raises EncodingError on anything else."""
    if isinstance(value, str):
        try:
            value = bytes.fromhex(value.removeprefix("0x"))
        except ValueError as error:
            raise EncodingError(f"not hexadecimal: {value!r}") from error
    if len(value) != 32:
        raise EncodingError(f"expected 32 bytes, got {len(value)}")
    return Hash32(bytes(value))
