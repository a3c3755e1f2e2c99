"""The profile of signed requests, every edge in one table, against the application.

A row says what is signed, what is sent instead, when it arrives, and what comes of it. Signing by
itself
is tested in tests/unit/api/test_api_signing.py; here nonces, clock and roles take part.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from orchestrator_bench import Bench
from orchestrator_fakes import RUN

from muster.api import signing
from muster.orchestrator.db.query import plain
from muster.protocol.eip712 import Domain, address_of
from muster.protocol.ids import Hash32

V, F = signing.REQUEST_VALIDITY_S, signing.REQUEST_FUTURE_S
N = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141
"""The order of secp256k1."""
OK = (200, "")
BODY = b'{"run_id":1}'
PATH = "/v1/leases"

Headers = dict[str, str]
Change = Callable[[Headers], Headers]


@dataclass(frozen=True)
class Row:
    """One edge case."""

    expected: tuple[int, str]
    signed: dict[str, Any] = field(default_factory=dict)
    """Parts that are signed differently from what is sent."""
    change: Change = lambda headers: headers
    """The change of the headers on their way."""
    age_s: float = 0
    """Seconds between issue and arrival."""
    replayed_s: float | None = None
    """Seconds between issue and second arrival; `expected` is its result."""


def without(name: str) -> Change:
    return lambda headers: {n: v for n, v in headers.items() if n != name}


def with_(name: str, value: str) -> Change:
    return lambda headers: headers | {name: value}


def resigned(change: Callable[[int, int, int], tuple[int, int, int]]) -> Change:
    """Change r, s and v of the signature."""

    def changed(headers: Headers) -> Headers:
        raw = bytes.fromhex(headers[signing.SIGNATURE_HEADER][2:])
        r, s, v = change(int.from_bytes(raw[:32]), int.from_bytes(raw[32:64]), raw[64])
        text = "0x" + (r.to_bytes(32) + s.to_bytes(32) + bytes([v])).hex()
        return headers | {signing.SIGNATURE_HEADER: text}

    return changed


UNSIGNED, MALFORMED = (401, "unsigned_request"), (401, "malformed_header")
OTHER_BODY = (401, "body_hash_mismatch")
BAD, EXPIRED, REUSED = (401, "bad_signature"), (401, "request_expired"), (401, "nonce_reused")
FUTURE = (401, "request_from_future")

TABLE: dict[str, Row] = {
    # How long it is valid.
    "at once": Row(OK),
    "a second before its end": Row(OK, age_s=V - 1),
    "at its end": Row(OK, age_s=V),
    "a second after its end": Row(EXPIRED, age_s=V + 1),
    "long after its end": Row(EXPIRED, age_s=1e9),
    "as far ahead as may be": Row(OK, age_s=-F),
    "a second further ahead": Row(FUTURE, age_s=-F - 1),
    # The same again.
    "replayed at once": Row(REUSED, replayed_s=0),
    "replayed a second before its end": Row(REUSED, replayed_s=V - 1),
    "replayed at its end": Row(REUSED, replayed_s=V),
    "replayed a second after its end": Row(EXPIRED, replayed_s=V + 1),
    "replayed once its nonce is forgotten": Row(EXPIRED, replayed_s=signing.NONCE_LIFE_S + 1),
    "from ahead, replayed at the end of its life": Row(REUSED, age_s=-F, replayed_s=V),
    "from ahead, replayed a second later": Row(EXPIRED, age_s=-F, replayed_s=V + 1),
    # Signed for something else.
    "for another endpoint": Row(BAD, {"path": "/v1/heartbeat"}),
    "for another query": Row(BAD, {"path": PATH + "?x=1"}),
    "for another method": Row(BAD, {"method": "PUT"}),
    "for another body": Row(OTHER_BODY, {"body": b'{"run_id":2}'}),
    "for no body": Row(OTHER_BODY, {"body": b""}),
    "for another network": Row(BAD, {"chain_id": 1}),
    "for another ledger": Row(BAD, {"ledger": address_of(b"\x02" * 32)}),
    "for another orchestrator": Row(BAD, {"audience": address_of(b"\x03" * 32)}),
    "by somebody else": Row(BAD, {"key": os.urandom(32)}, with_(signing.ADDRESS_HEADER, "node")),
    "by a stranger": Row((403, "worker_not_active"), {"key": os.urandom(32)}),
    # Headers.
    "without an address": Row(UNSIGNED, change=without(signing.ADDRESS_HEADER)),
    "without a nonce": Row(UNSIGNED, change=without(signing.NONCE_HEADER)),
    "without a time": Row(UNSIGNED, change=without(signing.ISSUED_AT_HEADER)),
    "without a body hash": Row(UNSIGNED, change=without(signing.BODY_HASH_HEADER)),
    "without a signature": Row(UNSIGNED, change=without(signing.SIGNATURE_HEADER)),
    "with a short address": Row(MALFORMED, change=with_(signing.ADDRESS_HEADER, "0x12")),
    "with a short nonce": Row(MALFORMED, change=with_(signing.NONCE_HEADER, "0x12")),
    "with a short body hash": Row(MALFORMED, change=with_(signing.BODY_HASH_HEADER, "0x12")),
    "with another body hash": Row(BAD, change=with_(signing.BODY_HASH_HEADER, "0x" + "45" * 32)),
    "with another nonce": Row(BAD, change=with_(signing.NONCE_HEADER, "0x" + "45" * 32)),
    "with a time in words": Row(MALFORMED, change=with_(signing.ISSUED_AT_HEADER, "now")),
    "with a negative time": Row(MALFORMED, change=with_(signing.ISSUED_AT_HEADER, "-1")),
    "with a fraction of a time": Row(MALFORMED, change=with_(signing.ISSUED_AT_HEADER, "1.5")),
    "with an endless time": Row(MALFORMED, change=with_(signing.ISSUED_AT_HEADER, "9" * 400)),
    "with an empty time": Row(MALFORMED, change=with_(signing.ISSUED_AT_HEADER, "")),
    "with a later time": Row(BAD, change=with_(signing.ISSUED_AT_HEADER, "1700000001")),
    "with a short signature": Row(MALFORMED, change=with_(signing.SIGNATURE_HEADER, "0x12")),
    "with a signature in words": Row(MALFORMED, change=with_(signing.SIGNATURE_HEADER, "yes")),
    # Malleability: the same key, another signature.
    "with the other s": Row(BAD, change=resigned(lambda r, s, v: (r, N - s, 55 - v))),
    "with the other s and the same v": Row(BAD, change=resigned(lambda r, s, v: (r, N - s, v))),
    "with the other v": Row(BAD, change=resigned(lambda r, s, v: (r, s, 55 - v))),
    "with v as parity": Row(BAD, change=resigned(lambda r, s, v: (r, s, v - 27))),
    "with v of a transaction": Row(BAD, change=resigned(lambda r, s, v: (r, s, v + 8))),
    "with no r": Row(BAD, change=resigned(lambda _r, s, v: (0, s, v))),
    "with no s": Row(BAD, change=resigned(lambda r, _s, v: (r, 0, v))),
    "with r beyond the order": Row(BAD, change=resigned(lambda _r, s, v: (N, s, v))),
    "with s beyond the order": Row(BAD, change=resigned(lambda r, _s, v: (r, N, v))),
}


def signed_by(bench: Bench, nonce: bytes, **changes: Any) -> Headers:
    domain = bench.network.domain
    values = {
        "key": bench.network.keys.nodes[0],
        "method": "POST",
        "path": PATH,
        "body": BODY,
        "nonce": Hash32(nonce),
        "domain": Domain(
            changes.pop("chain_id", domain.chain_id),
            changes.pop("ledger", domain.verifying_contract),
        ),
    }
    return bench.signed(**(values | changes))


async def send(bench: Bench, headers: Headers, body: bytes = BODY) -> tuple[int, str]:
    async with bench.http() as http:
        answer = await http.post(PATH, content=body, headers=headers)
    return answer.status_code, "" if answer.is_success else answer.json()["error"]["code"]


@pytest.mark.sqlite_only
@pytest.mark.parametrize("edge", TABLE)
async def test_edge_of_a_signed_request(bench: Bench, edge: str) -> None:
    row, issued_at = TABLE[edge], bench.wall.time
    headers = row.change(signed_by(bench, os.urandom(32), **row.signed))
    if headers.get(signing.ADDRESS_HEADER) == "node":
        headers[signing.ADDRESS_HEADER] = address_of(bench.network.keys.nodes[0])
    bench.wall.time = issued_at + row.age_s
    first = await send(bench, headers)
    if row.replayed_s is None:
        assert first == row.expected
        return
    assert first == OK
    bench.wall.time = issued_at + row.replayed_s
    assert await send(bench, headers) == row.expected


async def test_nonce_is_its_signers_own(bench: Bench) -> None:
    nonce, keys = os.urandom(32), bench.network.keys.nodes
    assert await send(bench, signed_by(bench, nonce, key=keys[0])) == OK
    assert await send(bench, signed_by(bench, nonce, key=keys[1])) == OK
    # Signed anew, even with another body, it is still used.
    assert await send(bench, signed_by(bench, nonce, key=keys[0])) == REUSED
    other = b'{ "run_id" : 1 }'
    assert await send(bench, signed_by(bench, nonce, key=keys[0], body=other), other) == REUSED


async def test_nonce_of_a_stranger_is_not_remembered(bench: Bench) -> None:
    stranger, nonce = os.urandom(32), os.urandom(32)
    for _ in range(2):
        refused = await send(bench, signed_by(bench, nonce, key=stranger))
        assert refused == (403, "worker_not_active")
    assert await bench.services.database.ask(plain("SELECT count(*) FROM nonces")) == [[(0,)]]


async def test_nonce_is_used_before_a_body_is_read(bench: Bench) -> None:
    nonce = os.urandom(32)
    assert await send(bench, signed_by(bench, nonce, body=b"other")) == OTHER_BODY
    assert await send(bench, signed_by(bench, nonce)) == REUSED


async def test_nonce_of_a_refused_request_may_be_used(bench: Bench) -> None:
    nonce = os.urandom(32)
    assert await send(bench, signed_by(bench, nonce, method="PUT")) == BAD
    assert await send(bench, signed_by(bench, nonce)) == OK
    assert bench.services.run_id == RUN
