"""The guides are true: their shell blocks are run, line by line, as one script.

Journeys begin in an empty folder, with an installed wheel and no file of the checkout. `make test`
has the deployment, `make test-all` the owner's, the one that plays everybody and the contributor's.
Elsewhere in `make test` are the contributor's five commands and the model's (test_network_story), a
demo from the wheel (test_wheel), a run's creation (test_run_create), every command of every guide
by name and options (test_docs_commands), and the auditor's (test_audit_guide, test_slash_guide).
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from installed import Installed

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "docs" / "guides"
PORTS = (8545, 8600, 8700, 8800)
TIMEOUT_S = 400
ENDING_S = 30


@pytest.fixture
def empty(
    complete: Installed, bringing_npm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A folder with nothing in it; the wheel's programs and the system's are on the PATH."""
    monkeypatch.setenv("PATH", f"{complete.program.parent}:{bringing_npm}")
    (tmp_path / "empty").mkdir()
    return tmp_path / "empty"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout as `make setup` leaves it, in which the guide may write."""
    (tmp_path / "configs").mkdir()
    shutil.copy(ROOT / "configs" / "demo.toml", tmp_path / "configs")
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    (tmp_path / "node_modules").symlink_to(ROOT / "node_modules")
    return tmp_path


def blocks_of(guide: str) -> list[str]:
    return re.findall(r"^```sh\n(.*?)^```", (GUIDES / guide).read_text(), re.M | re.S)


def run_script(folder: Path, blocks: list[str]) -> str:
    """Run shell blocks as one script, and return what it printed; it must succeed."""
    script = "set -euo pipefail\n" + "".join(blocks)
    if taken := [port for port in PORTS if _is_taken(port)]:
        pytest.skip(f"the guide's ports are in use: {taken}")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MUSTER_")}
    shell = subprocess.Popen(
        ["bash", "-c", script],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**environment, "HOME": str(folder / "home")},
    )
    try:
        output, _ = shell.communicate(timeout=TIMEOUT_S)
    finally:
        os.killpg(shell.pid, signal.SIGTERM)
        # The next guide needs the ports: wait until this one's processes have ended.
        ends_by = time.monotonic() + ENDING_S
        while any(map(_is_taken, PORTS)) and time.monotonic() < ends_by:
            time.sleep(0.1)
    assert shell.returncode == 0, output[-3000:]
    return output


@pytest.mark.slow
def test_the_network_by_hand_pays_the_worker_and_passes_the_audit(empty: Path) -> None:
    output = run_script(empty, blocks_of("devnet.md"))
    assert '"step": 2' in output
    assert re.search(r"^claimed +[0-9.]+ tokens for \d+ submissions of run 1$", output, re.M)
    assert (empty / "trained" / "README.md").read_text().startswith("---")


@pytest.mark.slow
def test_an_owner_leads_a_run_from_create_to_reclaim(empty: Path) -> None:
    output = run_script(empty, blocks_of("run.md"))
    assert re.search(r"^base model +\d+% right on 16 problems, 4 times each", output, re.M)
    assert re.search(r"^1 +open +0.001 ", output, re.M)
    assert "nothing was sent" in output
    assert "exit code 3: not due yet" in output
    assert re.search(r"^pays +1,500 tokens to its owner", output, re.M)
    assert re.search(r"^1 +closed ", output, re.M)


def test_a_network_is_deployed_and_verified(checkout: Path) -> None:
    (checkout / "examples").mkdir()
    shutil.copy(ROOT / "examples" / "network.toml", checkout / "examples")
    output = run_script(checkout, blocks_of("deploy.md"))
    assert "nothing was sent" in output
    assert len(re.findall(r"^StakeVault +0x\w+  \d+ gas$", output, re.M)) == 1
    assert len(re.findall(r"^StakeVault +0x\w+  there already$", output, re.M)) == 1
    assert len(re.findall(r"^\w+ +0x\w+  equal$", output, re.M)) == 10
    assert re.search(r"^challenge_window_s +3 h$", output, re.M)


@pytest.mark.slow
def test_a_newcomer_is_proven_staked_paid_and_leaves(empty: Path) -> None:
    """The worker's guide, on the network of the other guide with a run that does not end."""
    network = blocks_of("devnet.md")
    until = next(i for i, block in enumerate(network) if "wait $trainer" in block)
    started = [block.replace("--steps 2", "--steps 100000") for block in network[:until]]
    # The newcomer is in another folder and knows only the orchestrator's URL.
    moved = "mkdir ../newcomer; cd ../newcomer; unset MUSTER_PASSWORD MUSTER_DEPLOYMENTS\n"
    moved += "until (: < /dev/tcp/127.0.0.1/8600) 2> /dev/null; do sleep 0.2; done\n"
    output = run_script(empty, [*started, moved, *blocks_of("worker.md")])
    assert re.search(r"^fit$", output, re.M), output[-3000:]
    assert "proof self-proof      accepted:" in output
    assert "passed  sampling" in output
    assert "exit code 3: not due yet" in output
    assert "active_from_block" in output
    paid = re.search(r"^claimed +([0-9.]+) tokens", output, re.M)
    assert paid, output[-3000:]
    assert float(paid[1]) > 0


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
