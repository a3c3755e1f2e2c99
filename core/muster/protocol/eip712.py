"""EIP-712 typed data over flat structs of static fields, and the signatures on it.

Every signature in Muster is EIP-712 with the chain id and a verifying contract in its domain, so
none can be replayed on another chain, deployment or message type.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from coincurve import PrivateKey, PublicKey

from muster.protocol.encoding import abi_words, address_bytes, keccak
from muster.protocol.errors import SignatureError
from muster.protocol.ids import Address, Hash32, to_address

DOMAIN_NAME = "Muster"
DOMAIN_VERSION = "1"

_DOMAIN_TYPE = keccak(
    b"EIP712Domain(string name,string version,uint256 chainId,address verifyingContract)"
)
_ORDER = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141
_HALF_ORDER = 0x7FFFFFFFFFFFFFFFFFFFFFFFFFFFFFFF5D576E7357A4501DDFE92F46681B20A0


@dataclass(frozen=True, slots=True)
class Domain:
    """The chain and contract for which a signature is valid."""

    chain_id: int
    """EIP-155 chain id."""
    verifying_contract: Address
    """The contract that checks the signature, or whose deployment it belongs to."""

    def separator(self) -> Hash32:
        """Return the EIP-712 domain separator."""
        return _separator(self.chain_id, self.verifying_contract)


@lru_cache(maxsize=64)
def _separator(chain_id: int, contract: Address) -> Hash32:
    return keccak(
        abi_words(
            _DOMAIN_TYPE,
            keccak(DOMAIN_NAME.encode()),
            keccak(DOMAIN_VERSION.encode()),
            chain_id,
            address_bytes(contract),
        )
    )


Field = int | bytes | str
"""A field's value: unsigned integer, bytes32 or 20 address bytes, or text (hashed)."""


def struct_hash(type_string: str, *fields: Field) -> Hash32:
    """Return `hashStruct`: the type hash and the fields as words; text fields are hashed."""
    words = [_text_hash(f) if isinstance(f, str) else f for f in fields]
    return keccak(abi_words(_type_hash(type_string), *words))


@lru_cache(maxsize=1024)
def _text_hash(text: str) -> Hash32:
    return keccak(text.encode())


@lru_cache(maxsize=64)
def _type_hash(type_string: str) -> Hash32:
    return keccak(type_string.encode())


def digest(domain: Domain, struct: Hash32) -> Hash32:
    """Return the 32 bytes that are signed: `keccak(0x1901 ‖ separator ‖ structHash)`."""
    return keccak(b"\x19\x01" + domain.separator() + struct)


def sign(digest_: Hash32, private_key: bytes) -> bytes:
    """Return the 65-byte signature r ‖ s ‖ v: v in {27, 28}, s in the lower half (RFC 6979)."""
    signature = _private(private_key).sign_recoverable(_checked(digest_), hasher=None)
    return signature[:64] + bytes([signature[64] + 27])


def recover(digest_: Hash32, signature: bytes) -> Address:
    """Return the address that signed; raises SignatureError on anything but a canonical signature.

    High-s and v outside {27, 28} are refused, as OpenZeppelin's ECDSA does (EIP-2), so a signature
    has one encoding.
    """
    if len(signature) != 65:
        raise SignatureError(f"a signature has 65 bytes, got {len(signature)}")
    if signature[64] not in (27, 28):
        raise SignatureError(f"signature v must be 27 or 28, got {signature[64]}")
    if int.from_bytes(signature[32:64], "big") > _HALF_ORDER:
        raise SignatureError("signature s is in the upper half")
    message, compact = _checked(digest_), signature[:64] + bytes([signature[64] - 27])
    try:
        key = PublicKey.from_signature_and_message(compact, message, hasher=None)
    except ValueError as error:
        raise SignatureError("the signature recovers to no key") from error
    return _account(key)


class Signable(Protocol):
    """A message that can be signed."""

    def struct_hash(self) -> Hash32:
        """Return its EIP-712 `hashStruct`."""


def signer_of(domain: Domain, message: Signable, signature: bytes) -> Address | None:
    """Return the signer of a message; None for an invalid signature."""
    try:
        return recover(digest(domain, message.struct_hash()), signature)
    except SignatureError:
        return None


def address_of(private_key: bytes) -> Address:
    """Return the account address of a private key; raises SignatureError when it is not one."""
    return _account(_private(private_key).public_key)


def _account(key: PublicKey) -> Address:
    return to_address(keccak(key.format(compressed=False)[1:])[12:])


def _private(key: bytes) -> PrivateKey:
    # The library would pad a short key, and print a bad one in its error message.
    if len(key) != 32 or not 0 < int.from_bytes(key, "big") < _ORDER:
        raise SignatureError("the private key is not 32 valid bytes")
    return PrivateKey(key)


def _checked(digest_: Hash32) -> Hash32:
    if len(digest_) != 32:
        raise SignatureError(f"a digest has 32 bytes, got {len(digest_)}")
    return digest_
