"""Broadcast over emulated links with loss, in network namespaces: real TCP, needs root."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = "benchmarks.shardcast.shardcast_links"
CANNOT = 77
"""Exit code of the program where the machine cannot emulate links."""
AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")


@pytest.mark.slow
@pytest.mark.parametrize("congestion", ["", "reno"], ids=["machine's", "reno"])
def test_broadcast_over_lossy_links_arrives_in_a_few_times_what_the_links_need(
    congestion: str,
) -> None:
    """Senders choose bbr themselves: where reno is the rule, 1 % loss would cost ten times it."""
    if congestion and b"bbr" not in AVAILABLE.read_bytes().split():
        pytest.skip("the kernel has no bbr")
    command = [sys.executable, "-m", PROGRAM, "--mib", "32", "--relays", "2", "--clients", "2"]
    command += ["--congestion", congestion] if congestion else []
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    if done.returncode == CANNOT:
        pytest.skip(f"links cannot be emulated: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["packets_lost"] >= 0.005
    assert 1 <= found["over_bound"] < 5
