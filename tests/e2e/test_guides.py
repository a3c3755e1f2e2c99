"""The guides are true: their shell blocks are run, line by line, as one script."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guides" / "devnet.md"
PORTS = (8545, 8600, 8700, 8800)
TIMEOUT_S = 400


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout as `make setup` leaves it, in which the guide may write."""
    (tmp_path / "configs").mkdir()
    shutil.copy(ROOT / "configs" / "demo.toml", tmp_path / "configs")
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    (tmp_path / "node_modules").symlink_to(ROOT / "node_modules")
    return tmp_path


def test_the_network_by_hand_pays_the_worker_and_passes_the_audit(checkout: Path) -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```", GUIDE.read_text(), re.M | re.S)
    script = "set -euo pipefail\n" + "".join(blocks)
    if taken := [port for port in PORTS if _is_taken(port)]:
        pytest.skip(f"the guide's ports are in use: {taken}")
    shell = subprocess.Popen(
        ["bash", "-c", script],
        cwd=checkout,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={k: v for k, v in os.environ.items() if not k.startswith("MUSTER_")},
    )
    try:
        output, _ = shell.communicate(timeout=TIMEOUT_S)
    finally:
        os.killpg(shell.pid, signal.SIGTERM)
    assert shell.returncode == 0, output[-3000:]
    assert '"step": 2' in output
    assert "claimable_tokens" in output


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
