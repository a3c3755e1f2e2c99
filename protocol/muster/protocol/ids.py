"""Identifier types. One word per thing, as in docs/glossary.md."""

from __future__ import annotations

from typing import NewType

from eth_utils.address import is_address, to_checksum_address

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


def to_address(value: str | bytes) -> Address:
    """Return the checksummed form of an account address; raises EncodingError on anything else."""
    if isinstance(value, bytes):
        value = "0x" + value.hex()
    if not is_address(value):
        raise EncodingError(f"not an account address: {value!r}")
    checksummed = Address(to_checksum_address(value))
    is_mixed_case = value[2:] not in (value[2:].lower(), value[2:].upper())
    if is_mixed_case and value[2:] != checksummed[2:]:
        raise EncodingError(f"address {value!r} has a wrong checksum (EIP-55), is it mistyped?")
    return checksummed


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
