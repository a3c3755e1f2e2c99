"""The search for secrets finds each kind where it is planted, and nothing where there is none."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from secret_scan import SecretScan

TESTS = Path(__file__).parents[2]

PREAMBLE = """
import logging, os, subprocess, sys
from muster.api.signing import SIGNATURE_HEADER, sign_request
from muster.protocol.eip712 import Domain, address_of
from muster.protocol.ids import Hash32
from muster.wallet import create_wallet, load_wallet

KEY = os.urandom(32)
ADDRESS = address_of(KEY)
logger = logging.getLogger("muster.planted")

def signature():
    headers = sign_request(KEY, Domain(1, ADDRESS), ADDRESS, "GET", "/", nonce=Hash32(bytes(32)),
                           issued_at=1)
    return headers[SIGNATURE_HEADER]
"""

PLANTED = {
    "key in a record": ('logger.warning("key %s", KEY.hex())', "a private key"),
    "key in an extra field's text": ('logger.error("0x" + KEY.hex().upper())', "a private key"),
    "key inside a longer word": ('print("ab" + KEY.hex() + "cd")', "a private key"),
    "key printed by a process": (
        'subprocess.run([sys.executable, "-c", f"print({KEY.hex()!r})"], check=True)',
        "a private key",
    ),
    "key in a log file": ('(tmp_path / "node.log").write_text(KEY.hex())', "a private key"),
    "signature": ('print(signature(), file=sys.stderr)', "an API signature"),
    "password": (
        'create_wallet(tmp_path / "k", "correct horse 9", light=True); print("correct horse 9")',
        "a keystore's password",
    ),
    "bearer token": ('logger.warning("authorization: Bearer abcdef0123456789")', "a bearer token"),
    "password in a URL": (
        'logger.warning("postgresql://muster:hunter2@db/run")', "a password in a URL"
    ),
}  # fmt: skip
HARMLESS = """
    logger.warning("address %s", ADDRESS)
    logger.warning("hash %s", os.urandom(32).hex())
    logger.warning("at https://orchestrator.example.org:8643/v1/runs/1?x=a@b")
    logger.warning("bearer tokens are checked")
    create_wallet(tmp_path / "k", "correct horse 9", light=True)
    signature()
"""


def test_session_fails_where_a_secret_is_planted_and_nowhere_else(tmp_path: Path) -> None:
    bodies = {name: body for name, (body, _) in PLANTED.items()} | {"harmless": HARMLESS}
    tests = [
        f"def test_{number}(tmp_path):\n    {body.strip()}\n"
        for number, body in enumerate(bodies.values())
    ]
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (tmp_path / "test_planted.py").write_text("\n".join([PREAMBLE, *tests]))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly",
         "-rA", "--basetemp", str(tmp_path / "base"), str(tmp_path)],
        env={"PYTHONPATH": str(TESTS), "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    for number, (name, (_, kind)) in enumerate(PLANTED.items()):
        if name == "key in a log file":
            assert f"node.log contains {kind}" in done.stdout
            continue
        found = re.search(rf"_ test_{number} _+\n(.*)\n", done.stdout)
        assert found is not None, name
        assert f"contains {kind}" in found[1], name
    assert f"{len(PLANTED) - 1} failed, 2 passed" in done.stdout


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("x" + bytes(range(32)).hex(), "a private key"),
        (bytes(range(1, 33)).hex(), None),
        ("00" * 40 + bytes(range(32)).hex() + "ff" * 40, "a private key"),
        (bytes(range(100, 132)).hex() + "ab" * 33, "an API signature"),
        ("opened with correct horse 9", "a keystore's password"),
        ("opened with correct horse 8", None),
        ("Authorization: Bearer 0123456789", "a bearer token"),
        ("WWW-Authenticate: Bearer", None),
        ("https://user:secret1@host/", "a password in a URL"),
        ("https://host:8080/user@place", None),
    ],
)
def test_secrets_are_found_by_value_or_form(text: str, kind: str | None) -> None:
    scan = SecretScan()
    scan.note_key(bytes(range(32)))
    scan.note_signature(bytes(range(100, 132)) + bytes(33))
    scan.note_password(b"correct horse 9")
    assert scan.found_in(text) == kind


def test_placeholders_are_no_secrets() -> None:
    scan = SecretScan()
    scan.note_key(b"\x11" * 32)
    scan.note_password(b"password")
    assert scan.found_in("11" * 32 + " password") is None
