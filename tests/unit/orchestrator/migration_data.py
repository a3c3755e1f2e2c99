"""Rows for every column that any revision of the schema has had.

A migration that brings a column or a table brings its values here, or the tests refuse it. Values
are unlike any default, so that what a migration loses or resets shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Value = Callable[[int], Any]
"""The value of a column in the n-th row of its table."""

FAR = 1 << 31
"""A number that needs more than 32 bits once added to."""


def _bytes(kind: int, length: int = 32) -> Value:
    return lambda n: bytes([kind, n]) + b"\xff" * (length - 2)


def _name(prefix: str) -> Value:
    return lambda n: f"{prefix} {n} ü\U0001f512"


def _number(start: int) -> Value:
    return lambda n: start + n


def _document(kind: str) -> Value:
    return lambda n: {"kind": kind, "policy_version": 3 + n, "nested": [None, True, 0.5, "ü"]}


_SLOT = {"worker": _name("0xworker"), "step": _number(40), "index": _number(7)}

VALUES: dict[str, dict[str, Value]] = {
    "identity": {
        "run_id": _number(1),
        "chain_id": _number(84532),
        "ledger": _name("0xledger"),
        "created_at": _number(1_700_000_000),
        "is_unfunded": lambda n: n % 2 == 0,
    },
    "leases": {
        "id": _number(1),
        "node": _name("0xnode"),
        **_SLOT,
        "deadline": _number(1_700_000_000),
        "ticket": _document("ticket"),
        "signature": _bytes(1, 65),
        "is_filled": lambda n: n % 2 == 0,
        "policy_version": _number(3),
    },
    "batches": {
        "root": _bytes(2),
        "count": _number(3),
        "units": _number(2_000_000_000),
        "is_judged": lambda n: n % 2 == 0,
    },
    "submissions": {
        "sequence": _number(1),
        "file_hash": _bytes(3),
        **_SLOT,
        "units": _number(2 * FAR),
        "leaf": _bytes(16),
        "submission": lambda n: _document("submission")(n) | {"units": 2 * FAR + n},
        "signature": _bytes(4, 65),
        "ticket": _document("ticket"),
        "ticket_signature": _bytes(5, 65),
        "received_at": _number(1_700_000_000),
        "size_bytes": _number(64 << 20),
        "batch_root": lambda n: None if n % 3 == 2 else _bytes(2)(n),
        "position": lambda n: None if n % 3 == 2 else n,
        "has_file": lambda n: n % 2 == 0,
    },
    "outcomes": {
        "batch_id": _number(1),
        "validator": _name("0xvalidator"),
        "records": _bytes(6, 112),
        "signature": _bytes(7, 65),
        "received_at": _number(1_700_000_000),
        "batch_root": _bytes(15),
    },
    "doubles": {
        "offence": _name("Double"),
        "owner": _name("0xowner"),
        "tag": _number(7 << 32),
        "signed": _document("double"),
    },
    "nonces": {
        "signer": _name("0xsigner"),
        "nonce": _bytes(8),
        "seen_at": _number(1_700_000_000),
    },
    "heartbeats": {
        "node": _name("0xnode"),
        "policy_version": lambda n: None if n == 1 else n,
        "state": _name("generating"),
        "software": _name("muster"),
        "seen_at": _number(1_700_000_000),
        "count": _number(9),
    },
    "metrics": {
        "step": _number(1),
        "figures": lambda n: {"reward": 0.25 + n, "grad_norm": 1e-300},
        "revision": _number(5),
    },
    "hardware": {
        "node": _name("0xnode"),
        "report": _name("{}"),
        "signature": _bytes(9, 65),
        "report_hash": _bytes(10),
    },
    "checkings": {
        "batch_id": _number(1),
        "validator": _name("0xvalidator"),
        "batch_root": _bytes(11),
        "records_hash": _bytes(12),
        "fingerprints_hash": _bytes(13),
        "signature": _bytes(14, 65),
        "committed_at": _number(1_700_000_000),
        "fingerprints": lambda n: None if n == 0 else b"\x01" * n,
        "revealed_at": lambda n: None if n == 0 else 1_700_000_000 + n,
    },
    "check_reports": {
        "batch_id": _number(1),
        "validator": _name("0xvalidator"),
        "reporter": _name("0xreporter"),
        "compared": _number(3),
        "failed": _number(1),
        "signature": _bytes(15, 65),
        "reported_at": _number(1_700_000_000),
    },
}
