"""The guides are true: their shell blocks are run, line by line, as one script.

Journeys begin in an empty folder, with an installed wheel and no file of the checkout. `make test`
has the deployment, `make test-all` the owner's, the one that plays everybody, the contributor's,
the validator's and the public run's.
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
RELAY_PORTS = (8700, 8701, 8702)
PORTS = (8545, 8600, *RELAY_PORTS, 8800)
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


def endless_network() -> list[str]:
    """The network by hand, with a run that does not end."""
    network = blocks_of("devnet.md")
    until = next(i for i, block in enumerate(network) if "wait $trainer" in block)
    return [block.replace("--steps 2", "--steps 100000") for block in network[:until]]


# A newcomer is in another folder and knows only the orchestrator's URL.
MOVED = """mkdir ../newcomer; cd ../newcomer; unset MUSTER_PASSWORD MUSTER_DEPLOYMENTS
until (: < /dev/tcp/127.0.0.1/8600) 2> /dev/null; do sleep 0.2; done
"""


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
    output = run_script(empty, [*endless_network(), MOVED, *blocks_of("worker.md")])
    assert re.search(r"^fit$", output, re.M), output[-3000:]
    assert "proof self-proof      accepted:" in output
    assert "passed  sampling" in output
    assert "exit code 3: not due yet" in output
    assert "active_from_block" in output
    paid = re.search(r"^claimed +([0-9.]+) tokens", output, re.M)
    assert paid, output[-3000:]
    assert float(paid[1]) > 0


@pytest.mark.slow
def test_an_invited_validator_takes_its_seat_judges_and_leaves(empty: Path) -> None:
    """The validator's guide, on the same network; the owner answers with the invitation."""
    blocks = blocks_of("validator.md")
    made = next(i for i, block in enumerate(blocks) if "muster wallet new" in block)
    invited = """(cd ../empty; MUSTER_PASSWORD=only-for-this-devnet muster run invite 1 \
  "$(muster wallet show ../newcomer/validator.json)" --keystore keys/owner.json --yes)
"""
    walked = [*blocks[: made + 1], invited, *blocks[made + 1 :]]
    output = run_script(empty, [*endless_network(), MOVED, *walked])
    assert re.search(r"^fit$", output, re.M), output[-3000:]
    assert "exit code 3: not due yet" in output
    log = (empty.parent / "newcomer" / "validator.log").read_text()
    assert "submission accepted" in log
    assert "Traceback" not in log


PLACES = {
    "https://rpc.example.org": "http://127.0.0.1:8545",
    "orchestrator.example.org": "127.0.0.1",
    **{f"relay-{n}.example.org:8700": f"127.0.0.1:{RELAY_PORTS[n - 1]}" for n in (1, 2, 3)},
    "10.0.0.2": "127.0.0.1",
    "--confirmations 20": "--confirmations 1",
    "--recipe recipe.toml": "--recipe demo --steps 2",
    **{str(n) * 40: f"$(muster wallet show ../validator-{n}.json | cut -c3-)" for n in (1, 2, 3)},
}
"""What a test on one machine has instead of the guide's names."""
CHAIN = """scp() {  # machines are folders side by side
  local found=()
  for word; do
    case $word in -r) ;; *:*) found+=("../${word%%:*}/${word#*:}") ;; *) found+=("$word") ;; esac
  done
  cp -r "${found[@]}"
}
muster devnet --port 8545 --deployments deployments > devnet.log 2>&1 &
until [ -f deployments/31337.json ]; do sleep 0.2; done
mkdir -p ../{trainer,orchestrator,owner,relay-{1,2,3},elsewhere}
"""
PREPARED = """muster devnet fund owner.json ../{trainer/trainer,orchestrator/orchestrator}.json
for n in 1 2 3; do muster wallet new ../validator-$n.json --light; done
muster run base-model --out model --task-set tasks.jsonl
muster calibrate --model model --task-set tasks.jsonl --recipe demo --profile quick > limits.txt
"""
BROADCAST = "".join(
    f"until curl -s http://127.0.0.1:{port}/v1/1/versions | grep -q '\\[0'; do sleep 0.5; done\n"
    for port in RELAY_PORTS
)
OTHERS = """for n in 1 2 3; do
  muster devnet fund ../validator-$n.json
  muster validator join --run 1 --keystore ../validator-$n.json --yes
  muster validator run --run 1 --keystore ../validator-$n.json --state-dir state-$n > log-$n 2>&1 &
done
for name in worker node; do muster wallet new $name.json --light; done
muster devnet fund worker.json node.json
muster stake --run 1 --keystore worker.json --node node.json --yes
muster worker run --run 1 --keystore node.json --worker "$(muster wallet show worker.json)" \\
  --state-dir worker > worker.log 2>&1 &
wait $trainer
"""


def on_one_machine(blocks: list[str]) -> list[str]:
    """The blocks of a guide whose machines are named in their first lines, each in a folder."""
    walked = []
    for block in blocks:
        for name, place in PLACES.items():
            block = block.replace(name, place)
        (machine,) = re.findall(r"^# on (?:the |each )?(.*)\n|^# (elsewhere)\n", block)
        name = next(filter(None, machine))
        if name == "every machine":
            walked.append(block)
        elif name == "relay":
            walked += [
                f"cd ../relay-{n}\n" + block.replace("8700", str(RELAY_PORTS[n - 1]))
                for n in (1, 2, 3)
            ]
        else:
            walked.append(f"cd ../{name}\n{block}")
    return walked


@pytest.mark.slow
def test_a_run_of_several_machines_is_joined_by_its_url_and_made(empty: Path) -> None:
    """The guide of a public run, with folders for machines; strangers follow their guides."""
    walked = on_one_machine(blocks_of("public-run.md"))
    created = next(i for i, block in enumerate(walked) if "muster run create" in block)
    cd, create = walked[created].split("\n", 1)
    walked[created] = f"{cd}\n{PREPARED}{create}"
    output = run_script(empty, [CHAIN, *walked[:-1], BROADCAST, walked[-1], OTHERS])
    assert re.search(r"^ok +network relay 2 ", output, re.M), output[-3000:]
    assert re.search(r"^fit, as far as it was examined", output, re.M), output[-3000:]
    figures = (empty.parent / "trainer" / "trainer" / "metrics.jsonl").read_text()
    assert '"step": 2' in figures


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
