"""Signing and verifying one HTTP request (`ApiRequest`). Pure: no clock, no network, no memory.

A request states its body's hash, so that it can be verified before the body is read. The verifier
must also remember nonces for `NONCE_LIFE_S`; this module checks only a single request. Every
refusal is an ApiError with status 401 and its own code.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from muster.protocol.eip712 import Domain, address_of, digest, recover, sign
from muster.protocol.encoding import file_hash, hex0x
from muster.protocol.errors import ApiError, ProtocolError, SignatureError
from muster.protocol.ids import Address, Hash32, to_address, to_hash32
from muster.protocol.messages import ApiRequest

ADDRESS_HEADER = "x-muster-address"
NONCE_HEADER = "x-muster-nonce"
ISSUED_AT_HEADER = "x-muster-issued-at"
BODY_HASH_HEADER = "x-muster-body-hash"
SIGNATURE_HEADER = "x-muster-signature"
SUBMISSION_HEADER = "x-muster-submission"
SUBMISSION_SIGNATURE_HEADER = "x-muster-submission-signature"

REQUEST_VALIDITY_S = 60
"""Largest age of a signed request, in seconds."""
REQUEST_FUTURE_S = 30
"""Most seconds that a signed request may be dated in the future."""
NONCE_LIFE_S = 300
"""Seconds that a signer's nonces must be remembered: longer than any request is valid."""
EMPTY_BODY_HASH = file_hash(b"")
"""SHA-256 of an empty body."""


@dataclass(frozen=True, slots=True)
class SignedHeaders:
    """The five headers of a signed request, parsed but not yet verified."""

    address: Address
    """The claimed signer."""
    nonce: Hash32
    """Random; used once per signer."""
    issued_at: int
    """Unix seconds of the signer's clock."""
    body_hash: Hash32
    """Stated SHA-256 of the body, which is signed; the body is not read yet."""
    signature: bytes
    """EIP-712 signature over ApiRequest."""


def sign_request(
    key: bytes,
    domain: Domain,
    audience: Address,
    method: str,
    path: str,
    body: bytes = b"",
    *,
    nonce: Hash32,
    issued_at: int,
    body_hash: Hash32 | None = None,
) -> dict[str, str]:
    """Return the five headers of a signed request.

    `path` includes the query string, as sent. Give `body_hash` instead of `body` when the SHA-256
    is already known.
    """
    stated = body_hash or file_hash(body)
    request = ApiRequest(audience, method, path, stated, nonce, issued_at)
    return {
        ADDRESS_HEADER: address_of(key),
        NONCE_HEADER: hex0x(nonce),
        ISSUED_AT_HEADER: str(issued_at),
        BODY_HASH_HEADER: hex0x(stated),
        SIGNATURE_HEADER: hex0x(sign(digest(domain, request.struct_hash()), key)),
    }


def parse_headers(headers: Mapping[str, str]) -> SignedHeaders:
    """Return the five headers, parsed; refuses missing and malformed ones."""
    try:
        issued_at = headers[ISSUED_AT_HEADER]
        if not (issued_at.isascii() and issued_at.isdigit() and len(issued_at) <= 12):
            raise SignatureError(f"{ISSUED_AT_HEADER} is not Unix seconds: {issued_at[:32]!r}")
        return SignedHeaders(
            address=to_address(headers[ADDRESS_HEADER]),
            nonce=to_hash32(headers[NONCE_HEADER]),
            issued_at=int(issued_at),
            body_hash=to_hash32(headers[BODY_HASH_HEADER]),
            signature=signature_bytes(headers[SIGNATURE_HEADER]),
        )
    except KeyError as error:
        raise _refuse(
            "unsigned_request", f"the request has no {error.args[0]} header", "sign the request"
        ) from None
    except ProtocolError as error:
        raise _refuse("malformed_header", str(error)) from error


def signature_bytes(text: str) -> bytes:
    """Return the 65 bytes of a signature in `0x` hexadecimal; else raises SignatureError."""
    try:
        data = bytes.fromhex(text.removeprefix("0x"))
    except ValueError:
        raise SignatureError("a signature is not hexadecimal") from None
    if len(data) != 65:
        raise SignatureError(f"a signature has 65 bytes, got {len(data)}")
    return data


def _check_freshness(headers: SignedHeaders, *, now: float) -> None:
    """Refuse a request that is older than 60 s or issued more than 30 s ahead of `now`."""
    age = now - headers.issued_at
    if age > REQUEST_VALIDITY_S:
        raise _refuse(
            "request_expired",
            f"the request was issued {int(age)} s ago, allowed are {REQUEST_VALIDITY_S} s",
            "check this machine's clock, then sign a new request",
        )
    if age < -REQUEST_FUTURE_S:
        raise _refuse(
            "request_from_future",
            f"the request is dated {int(-age)} s ahead, allowed are {REQUEST_FUTURE_S} s",
            "check this machine's clock, then sign a new request",
        )


def verify_request(
    headers: Mapping[str, str],
    *,
    domain: Domain,
    audience: Address,
    method: str,
    path: str,
    now: float,
) -> SignedHeaders:
    """Return the verified headers: their `address` is the identity of the caller.

    Missing or malformed headers, requests outside the validity window, and wrong signatures are
    refused. The caller must still refuse a nonce that it has seen, and a body whose hash differs
    from the headers.
    """
    parsed = parse_headers(headers)
    _check_freshness(parsed, now=now)
    request = ApiRequest(audience, method, path, parsed.body_hash, parsed.nonce, parsed.issued_at)
    try:
        signer = recover(digest(domain, request.struct_hash()), parsed.signature)
    except ProtocolError as error:
        raise _refuse("bad_signature", str(error)) from error
    if signer != parsed.address:
        raise _refuse(
            "bad_signature",
            "the signature does not recover to the stated address",
            "sign method, path, body hash and audience exactly as sent, in the ledger's domain",
        )
    return parsed


def _refuse(code: str, message: str, hint: str | None = None) -> ApiError:
    return ApiError(message, status=401, code=code, hint=hint)
