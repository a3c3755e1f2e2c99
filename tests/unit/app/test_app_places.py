"""Every command that talks to a chain finds it by flags, variables and profile alike.

Each is run from an empty folder against an endpoint where nothing listens; its error names it.
"""

import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from command_tree import COMMANDS

from muster.app.cli import muster
from muster.client.dataset.folder import EXPORT, DataOrigin, Export
from muster.client.dataset.selection import SelectionSettings
from muster.protocol.errors import ConfigError, MusterError
from muster.settings.flags import chain_options
from muster.settings.profiles import NetworkProfile, Profiles, write_profiles
from muster.tasks.toys import make_sort
from muster.wallet import create_wallet

ON_CHAIN = sorted(
    name
    for name, command in COMMANDS.items()
    if {"rpc", "deployments"} <= {parameter.name for parameter in command.params}
)
NEEDS_MORE = {
    "audit verify": "an evidence bundle",
    "model verify": "a fetched model",
    "run create": "model, problems and calibration",
    "validator trap report": "a revealed plan",
    "validator trap run": "a secret plan",
}
"""The file that each of these commands needs before it looks for a chain."""
NETWORK = Path(__file__).parents[3] / "examples" / "network.toml"
ADDRESS = "0x90F79bf6EB2c4f870365E785982E1f101E93b906"


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, and a user without variables and profiles."""
    for name in ("MUSTER_RPC", "MUSTER_DEPLOYMENTS", "MUSTER_NETWORK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MUSTER_PASSWORD", "pw")
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that commands need before they look for a chain."""
    folder = tmp_path_factory.mktemp("things")
    for name in ("one", "two"):
        create_wallet(folder / f"{name}.json", "pw", light=True)
    make_sort(16, seed=1).write(folder / "tasks.jsonl")
    (folder / "files").mkdir()
    (folder / "traces").mkdir()
    origin = DataOrigin(1, ADDRESS, 1, recipe="0x", task_set="0x", tokenizer="0x")
    (folder / "traces" / EXPORT).write_bytes(Export(origin, SelectionSettings()).to_bytes())
    return folder


def words_of(name: str, things: Path) -> list[str]:
    """Return a command with all required options except those of the chain."""
    key = ["--keystore", str(things / "one.json")]
    node = ["--run", "1", *key, "--orchestrator", "http://127.0.0.1:9", "--state-dir", "state"]
    words: dict[str, list[str]] = {
        "audit run": ["1"],
        "audit dump": ["dump.json"],
        "audit lineage": ["--run", "1", "--version", "1"],
        "audit submission": ["1:0"],
        "audit verify": ["1:0"],
        "audit worker": [ADDRESS],
        "data export": ["--run", "1", "--out", "traces"],
        "data verify": [str(things / "traces")],
        "dispute open": ["1:0", *key],
        "dispute settle": ["1:0", *key],
        "devnet fund": [str(things / "one.json")],
        "devnet join": ["--run", "1", "--orchestrator", "http://127.0.0.1:9"],
        "doctor": ["--run", "1", "--json"],
        "economics": ["--run", "1", "--documents", str(things)],
        "evaluate": [
            *("--run", "1", "--orchestrator", "http://127.0.0.1:9"),
            *("--eval-set", str(things / "tasks.jsonl"), "--state-dir", "state"),
        ],
        "explain": ["1:0"],
        "model chat": ["--run", "1", "--relay", "http://127.0.0.1:9", "hello"],
        "model fetch": ["--run", "1", "--out", "out", "--relay", "http://127.0.0.1:9"],
        "network add": ["new"],
        "node rotate": [*key, "--node", str(things / "two.json")],
        "orchestrator run": ["--run", "1", *key],
        "relay run": ["--run", "1", "--upstream", "http://127.0.0.1:9", "--store", "store"],
        "rewards": ["--run", "1", "--worker", ADDRESS],
        "run change": ["1", "--price", "1", *key],
        "run fund": ["1", "1", *key],
        "run rotate": ["1", "--trainer", ADDRESS, *key],
        "run dismiss": ["1", ADDRESS, *key],
        "run invite": ["1", ADDRESS, *key],
        "run show": ["1"],
        "run list": [],
        "juror join": [*key, "--yes"],
        "juror leave": [*key, "--yes"],
        "juror run": [*key, "--state-dir", "state"],
        "juror shorten": [*key, "--yes"],
        "juror status": ["--juror", ADDRESS],
        "stake": [*key, "--run", "1", "--amount", "1"],
        "unstake": [*key, "--run", "1", "--amount", "1"],
        "trainer run": ["--run", "1", *key, "--orchestrator", "http://127.0.0.1:9"],
        "validator join": [*key, "--run", "1", "--yes"],
        "validator leave": [*key, "--run", "1", "--yes"],
        "validator run": node,
        "validator status": ["--run", "1", "--validator", ADDRESS],
        "worker run": [*node, "--worker", ADDRESS, "--plain"],
        "worker rejoin": [*key, "--run", "1", "--yes"],
        "worker submit-direct": [*key, "--state-dir", "state"],
        "worker status": ["--run", "1", "--worker", ADDRESS],
        "validator trap plan": [
            "--run",
            "1",
            "--worker",
            ADDRESS,
            "--last-step",
            "2",
            "--out",
            "plan",
            *key,
        ],
        "contracts deploy": [str(NETWORK), *key, "--yes"],
        "tasks filter-run": [
            *("--run", "1", "--set", str(things / "tasks.jsonl"), "--out", "kept.jsonl"),
            *("--files", str(things / "files")),
        ],
    }
    if name.startswith("run ") and name not in words:
        words[name] = ["1", *key]
    return [*name.split(), *words.get(name, [])]


def place_of(words: list[str]) -> str:
    """Return the endpoint that a command's error names."""
    result = CliRunner().invoke(muster, words)
    error = result.exception
    assert error is None or isinstance(error, (MusterError, SystemExit)), result.output
    if isinstance(error, MusterError):
        assert error.hint
    text = f"{error}\n{result.output}"
    named = re.search(r"http://127\.0\.0\.1:\d+(?= does not answer)", text)
    assert named is not None, f"{words}: {text}"
    return named[0]


def profile(port: int) -> NetworkProfile:
    """Return a network where nothing listens."""
    return NetworkProfile(chain_id=1, rpc=(at(port),), deployments=Path(f"/nowhere-{port}"))


def at(port: int) -> str:
    return f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("name", [name for name in ON_CHAIN if name not in NEEDS_MORE])
def test_command_means_the_chain_it_was_told(
    name: str, desk: Path, things: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = words_of(name, things)
    write_profiles(Profiles(current="one", networks={"one": profile(1), "two": profile(2)}))
    assert place_of(words) == at(1)
    monkeypatch.setenv("MUSTER_NETWORK", "two")
    assert place_of(words) == at(2)
    monkeypatch.setenv("MUSTER_RPC", at(3))
    monkeypatch.setenv("MUSTER_DEPLOYMENTS", "/nowhere-3")
    assert place_of(words) == at(3)
    assert place_of([*words, "--network", "one"]) == at(1)
    flags = ["--rpc", at(4), "--deployments", "/nowhere-4"]
    assert place_of([*words, *flags]) == at(4)
    assert not list(desk.glob("*deployments*"))


@pytest.mark.parametrize("name", ON_CHAIN)
def test_flags_of_the_chain_are_the_shared_ones(name: str) -> None:
    @click.command()
    @chain_options
    def shared() -> None:
        pass

    for option in shared.params:
        (same,) = [p for p in COMMANDS[name].params if p.name == option.name]
        assert same.to_info_dict() == option.to_info_dict()
        assert same.callback is option.callback


def test_a_network_that_nobody_knows_is_one_error(desk: Path) -> None:
    result = CliRunner().invoke(muster, ["run", "list", "--network", "mian"])
    assert isinstance(result.exception, ConfigError)
    assert "no network is called 'mian'" in str(result.exception)
    assert result.exception.hint
