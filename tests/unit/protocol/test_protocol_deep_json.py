"""Deeply nested JSON is refused in every process, with any recursion limit."""

import subprocess
import sys

import pytest

PROGRAM = """
import {first}
from muster.protocol.encoding import parse_canonical_json
from muster.protocol.errors import EncodingError
import {then}
try:
    parse_canonical_json(b"[" * 100_000, max_bytes=1 << 20)
except EncodingError:
    print("refused")
"""


@pytest.mark.parametrize(
    ("first", "then"), [("json", "eth_account"), ("json", "muster.chain"), ("eth_account", "json")]
)
def test_deep_json_is_refused_whatever_is_imported_when(first: str, then: str) -> None:
    command = [sys.executable, "-c", PROGRAM.format(first=first, then=then)]
    assert subprocess.run(command, capture_output=True, check=False).stdout == b"refused\n"
