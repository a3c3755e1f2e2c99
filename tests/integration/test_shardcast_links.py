"""Broadcast over emulated links with loss, in network namespaces: real TCP, needs root."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "shardcast_links.py"
CANNOT = 77
"""Exit code of the program where the machine cannot emulate links."""


@pytest.mark.slow
def test_broadcast_over_lossy_links_arrives_in_a_few_times_what_the_links_need() -> None:
    command = [sys.executable, str(PROGRAM), "--mib", "32", "--relays", "2", "--clients", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode == CANNOT:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["packets_lost"] >= 0.005
    assert 1 <= found["over_bound"] < 5
