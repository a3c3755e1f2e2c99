import contextlib
import os

import pytest
from hypothesis import given, strategies as st

from muster.api.signing import (
    ADDRESS_HEADER,
    BODY_HASH_HEADER,
    EMPTY_BODY_HASH,
    ISSUED_AT_HEADER,
    NONCE_HEADER,
    REQUEST_FUTURE_S,
    REQUEST_VALIDITY_S,
    SIGNATURE_HEADER,
    parse_headers,
    sign_request,
    signature_bytes,
    verify_request,
)
from muster.protocol.eip712 import Domain, address_of
from muster.protocol.encoding import file_hash, hex0x
from muster.protocol.errors import ApiError, SignatureError
from muster.protocol.ids import Hash32

KEY = b"\x11" * 32
LEDGER = address_of(b"\x22" * 32)
DOMAIN = Domain(31337, LEDGER)
AUDIENCE = address_of(b"\x33" * 32)
NOW = 1_700_000_000
NONCE = Hash32(b"\x44" * 32)


def signed(**changes: object) -> dict[str, str]:
    arguments: dict[str, object] = {
        "key": KEY,
        "domain": DOMAIN,
        "audience": AUDIENCE,
        "method": "POST",
        "path": "/v1/leases?x=1",
        "body": b"body",
        "nonce": NONCE,
        "issued_at": NOW,
    }
    return sign_request(**(arguments | changes))  # type: ignore[arg-type]


def verify(headers: dict[str, str], **changes: object) -> object:
    arguments: dict[str, object] = {
        "domain": DOMAIN,
        "audience": AUDIENCE,
        "method": "POST",
        "path": "/v1/leases?x=1",
        "now": NOW,
    }
    return verify_request(headers, **(arguments | changes))  # type: ignore[arg-type]


def refusal(headers: dict[str, str], **changes: object) -> str:
    with pytest.raises(ApiError) as caught:
        verify(headers, **changes)
    assert caught.value.status == 401
    return caught.value.code


def test_request_yields_its_signer_when_untouched() -> None:
    verified = verify(signed())
    assert verified.address == address_of(KEY)  # type: ignore[attr-defined]
    assert verified.nonce == NONCE  # type: ignore[attr-defined]


@given(path=st.text(min_size=1), method=st.sampled_from(["GET", "PUT", "POST"]), body=st.binary())
def test_request_round_trips_whatever_it_carries(path: str, method: str, body: bytes) -> None:
    headers = signed(path=path, method=method, body=body)
    verified = verify(headers, path=path, method=method)
    assert verified.body_hash == file_hash(body)  # type: ignore[attr-defined]


def test_body_hash_stands_for_the_body_when_given() -> None:
    assert signed(body=b"x") == signed(body=b"", body_hash=file_hash(b"x"))


@pytest.mark.parametrize(
    "change",
    [
        {"domain": Domain(1, LEDGER)},
        {"domain": Domain(31337, AUDIENCE)},
        {"audience": LEDGER},
        {"method": "PUT"},
        {"path": "/v1/leases?x=2"},
        {"path": "/v1/leases"},
    ],
)
def test_request_is_refused_when_the_server_sees_something_else(change: dict[str, object]) -> None:
    assert refusal(signed(), **change) == "bad_signature"


@pytest.mark.parametrize(
    ("header", "value"),
    [
        (ADDRESS_HEADER, AUDIENCE),
        (NONCE_HEADER, "0x" + "45" * 32),
        (ISSUED_AT_HEADER, str(NOW - 1)),
        (BODY_HASH_HEADER, hex0x(file_hash(b"other"))),
        (BODY_HASH_HEADER, hex0x(EMPTY_BODY_HASH)),
        (SIGNATURE_HEADER, "0x" + "55" * 64 + "1b"),
        (SIGNATURE_HEADER, "0x" + "00" * 65),
    ],
)
def test_request_is_refused_when_a_header_is_swapped(header: str, value: str) -> None:
    assert refusal(signed() | {header: value}) == "bad_signature"


@pytest.mark.parametrize(
    ("header", "value"),
    [
        (ADDRESS_HEADER, "0x12"),
        (NONCE_HEADER, "0x12"),
        (NONCE_HEADER, "nonce"),
        (BODY_HASH_HEADER, "0x12"),
        (ISSUED_AT_HEADER, "soon"),
        (ISSUED_AT_HEADER, "-1"),
        (ISSUED_AT_HEADER, "1e9"),
        (ISSUED_AT_HEADER, "٣"),
        (ISSUED_AT_HEADER, "9" * 13),
        (SIGNATURE_HEADER, "0x12"),
        (SIGNATURE_HEADER, "xyz"),
    ],
)
def test_request_is_refused_when_a_header_does_not_parse(header: str, value: str) -> None:
    assert refusal(signed() | {header: value}) == "malformed_header"


@pytest.mark.parametrize(
    "header", [ADDRESS_HEADER, NONCE_HEADER, ISSUED_AT_HEADER, BODY_HASH_HEADER, SIGNATURE_HEADER]
)
def test_request_is_refused_when_a_header_is_missing(header: str) -> None:
    headers = signed()
    del headers[header]
    assert refusal(headers) == "unsigned_request"


@pytest.mark.parametrize(
    "age_s", [-REQUEST_FUTURE_S, 0, REQUEST_VALIDITY_S - 1, REQUEST_VALIDITY_S]
)
def test_request_passes_when_inside_the_window(age_s: int) -> None:
    assert verify(signed(), now=NOW + age_s)


@pytest.mark.parametrize(
    ("age_s", "code"),
    [
        (REQUEST_VALIDITY_S + 1, "request_expired"),
        (10**6, "request_expired"),
        (-REQUEST_FUTURE_S - 1, "request_from_future"),
        (-(10**6), "request_from_future"),
    ],
)
def test_request_is_refused_when_outside_the_window(age_s: int, code: str) -> None:
    assert refusal(signed(), now=NOW + age_s) == code


@given(
    st.dictionaries(
        st.sampled_from(
            [ADDRESS_HEADER, NONCE_HEADER, ISSUED_AT_HEADER, BODY_HASH_HEADER, SIGNATURE_HEADER]
        ),
        st.text(),
    )
)
def test_parsing_never_raises_anything_but_a_refusal(changes: dict[str, str]) -> None:
    with contextlib.suppress(ApiError):
        parse_headers(signed() | changes)


@given(st.text())
def test_signature_text_parses_or_is_refused(text: str) -> None:
    with contextlib.suppress(SignatureError):
        assert len(signature_bytes(text)) == 65


def test_two_requests_differ_when_only_the_nonce_does() -> None:
    other = signed(nonce=Hash32(os.urandom(32)))
    assert other[SIGNATURE_HEADER] != signed()[SIGNATURE_HEADER]
