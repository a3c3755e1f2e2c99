"""Deeply nested JSON is refused in every process, whatever its libraries did to the interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
from muster.protocol.encoding import parse_canonical_json
from muster.protocol.errors import EncodingError
import {library}
try:
    parse_canonical_json(b"[" * 100_000, max_bytes=1 << 20)
except EncodingError:
    print("refused")
"""


@pytest.mark.parametrize("library", ["eth_account", "muster.chain"])
def test_deep_json_is_refused_with_the_library_imported(library: str) -> None:
    command = [sys.executable, "-c", PROGRAM.format(library=library)]
    assert subprocess.run(command, capture_output=True, check=False).stdout == b"refused\n"
