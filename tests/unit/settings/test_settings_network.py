"""Which network a command means: flags, variables, profiles, the devnet, in this order."""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import click
import pytest
from click.testing import CliRunner
from hypothesis import given, strategies as st

from muster.protocol.errors import ConfigError
from muster.settings import Settings, load_settings
from muster.settings.flags import chain_options, endpoint, orchestrator_option, relay_option
from muster.settings.profiles import (
    DEFAULT_RPC,
    DEPLOYMENTS,
    DEVNET,
    NetworkProfile,
    Profiles,
    Served,
    announced,
    read_profiles,
    resolve,
    running_devnet,
    write_profiles,
)

MAIN = NetworkProfile(
    chain_id=1,
    rpc=("https://one", "https://two"),
    deployments=Path("/main"),
    runs={"7": Served(orchestrator="https://orchestrator", relays=("https://relay",))},
)
TEST = NetworkProfile(chain_id=5, rpc=("https://test",), deployments=Path("/test"))
HERE = NetworkProfile(chain_id=31337, rpc=("http://here",), deployments=Path("/here"))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The variables of a user without profiles."""
    for name in ("MUSTER_RPC", "MUSTER_DEPLOYMENTS", "MUSTER_NETWORK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return {"XDG_CONFIG_HOME": str(tmp_path)}


@pytest.fixture
def known(home: dict[str, str]) -> dict[str, str]:
    """The variables of a user with two profiles, `main` the current one."""
    write_profiles(Profiles(current="main", networks={"main": MAIN, "test": TEST}), home)
    return home


def where(environ: dict[str, str], rpc: str | None = None, folder: Path | None = None) -> object:
    return resolve(rpc, folder, environ)[1:]


def test_nothing_said_is_a_chain_on_this_machine(home: dict[str, str]) -> None:
    assert where(home) == (DEFAULT_RPC, DEPLOYMENTS)
    assert where({}) == (DEFAULT_RPC, DEPLOYMENTS)


def test_each_source_comes_before_the_next(known: dict[str, str]) -> None:
    assert where(known) == ("https://one,https://two", Path("/main"))
    asked = {**known, "MUSTER_NETWORK": "test"}
    assert where(asked) == ("https://test", Path("/test"))
    shared = {**asked, "MUSTER_RPC": "http://shared", "MUSTER_DEPLOYMENTS": "/shared"}
    assert where(shared) == ("http://shared", Path("/shared"))
    assert where(shared, "http://flag", Path("/flag")) == ("http://flag", Path("/flag"))


def test_one_of_two_may_be_said_by_another_source(known: dict[str, str]) -> None:
    assert where(known, "http://flag") == ("http://flag", Path("/main"))
    assert where({**known, "MUSTER_DEPLOYMENTS": "/shared"})[1] == Path("/shared")


def test_an_unknown_network_names_the_known(known: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="no network is called 'mian'; known are: main, test"):
        resolve(None, None, {**known, "MUSTER_NETWORK": "mian"})


def test_services_are_those_of_the_network_that_is_used(known: dict[str, str]) -> None:
    place, *_ = resolve(None, None, known)
    assert place.served(7).orchestrator == "https://orchestrator"
    assert place.served(8) == Served()
    elsewhere, *_ = resolve("http://flag", Path("/flag"), known)
    assert elsewhere.served(7) == Served()


# ----------------------------------------------------------------------- flags


@click.command()
@click.option("--run", type=int)
@orchestrator_option
@relay_option
@chain_options
def command(**options: object) -> None:
    rpc, folder = endpoint(options)
    click.echo(f"{rpc} {folder} {options['orchestrator']} {options['relay']}")


def say(*words: str) -> str:
    result = CliRunner().invoke(command, list(words), catch_exceptions=False)
    return result.stdout.strip()


def test_a_network_that_is_typed_is_a_flag_like_others(
    known: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_RPC", "http://shared")
    monkeypatch.setenv("MUSTER_DEPLOYMENTS", "/shared")
    assert say("--network", "test") == "https://test /test None ()"
    assert say("--network", "test", "--rpc", "http://flag") == "http://flag /test None ()"
    assert say() == "http://shared /shared None ()"


def test_a_run_is_served_by_whom_the_profile_says(known: dict[str, str]) -> None:
    chain = "https://one,https://two /main"
    assert say("--run", "7") == f"{chain} https://orchestrator ('https://relay',)"
    assert say("--run", "8") == f"{chain} None ()"
    said = say("--run", "7", "--orchestrator", "http://mine", "--relay", "http://my-relay")
    assert said == f"{chain} http://mine ('http://my-relay',)"


class Process(Settings):
    of_network: ClassVar[frozenset[str]] = Settings.of_network | {"orchestrator", "relay"}

    run: int = 7
    rpc: str = DEFAULT_RPC
    deployments: Path = DEPLOYMENTS
    orchestrator: str = ""
    relay: tuple[str, ...] = ()


def load(environ: dict[str, str], file: Path | None = None, **flags: object) -> Process:
    return load_settings(Process, env_prefix="X_", environ=environ, file=file, flags=flags)


def test_settings_of_a_process_come_from_the_network(known: dict[str, str]) -> None:
    found = load(known)
    assert (found.rpc, found.deployments) == ("https://one,https://two", Path("/main"))
    assert (found.orchestrator, found.relay) == ("https://orchestrator", ("https://relay",))


def test_what_a_process_is_told_comes_before_its_network(
    known: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "x.toml"
    file.write_text('rpc = "http://file"\norchestrator = "http://file"')
    assert load(known, file).rpc == "http://file"
    assert load(known, file).orchestrator == "http://file"
    own = {**known, "MUSTER_RPC": "http://shared", "X_RPC": "http://own"}
    assert load(own, file).rpc == "http://own"
    assert load({**known, "MUSTER_RPC": "http://shared"}, file).rpc == "http://shared"
    assert load(own, file, rpc="http://flag").rpc == "http://flag"


# -------------------------------------------------------------------- profiles

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
profiles = st.builds(
    NetworkProfile,
    chain_id=st.integers(1, 2**63 - 1),
    rpc=st.lists(texts, min_size=1, max_size=3).map(tuple),
    deployments=texts.filter(lambda t: "\0" not in t).map(Path),
    runs=st.dictionaries(
        st.integers(1, 10**6).map(str),
        st.builds(Served, orchestrator=texts, relays=st.lists(texts, max_size=2).map(tuple)),
        max_size=2,
    ),
)


@given(st.dictionaries(names.filter(lambda n: n != DEVNET), profiles, max_size=3))
def test_profiles_are_read_as_they_were_written(networks: dict[str, NetworkProfile]) -> None:
    written = Profiles(current=next(iter(networks), None), networks=networks)
    with TemporaryDirectory() as folder:
        write_profiles(written, {"XDG_CONFIG_HOME": folder})
        assert read_profiles({"XDG_CONFIG_HOME": folder}) == written


def test_others_cannot_read_the_profiles(known: dict[str, str]) -> None:
    file = Path(known["XDG_CONFIG_HOME"], "muster", "config.toml")
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("current = ", "is not valid TOML"),
        ("curent = 'a'", "curent: Extra inputs are not permitted"),
        ("[networks.a]\nchain_id = 1", "networks.a.rpc: Field required"),
        ("[networks.devnet]\nchain_id = 1\nrpc = ['x']\ndeployments = 'd'", "cannot be a network"),
        (
            "[networks.a]\nchain_id = 1\nrpc = ['x']\ndeployments = 'd'\n[networks.a.runs.x]",
            "a run is a number, got 'x'",
        ),
    ],
)
def test_a_file_that_is_wrong_is_named(home: dict[str, str], text: str, said: str) -> None:
    file = Path(home["XDG_CONFIG_HOME"], "muster", "config.toml")
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        read_profiles(home)
    assert str(file) in str(caught.value)
    assert caught.value.hint
    # With all flags given no profile is needed.
    assert where(home, "http://flag", Path("/flag")) == ("http://flag", Path("/flag"))


# ---------------------------------------------------------------------- devnet


def test_a_running_devnet_is_known_and_an_ended_one_is_not(home: dict[str, str]) -> None:
    assert running_devnet(home) is None
    with announced(home) as devnet:
        assert running_devnet(home) is None  # it has not written its addresses yet
        devnet.tell(HERE)
        assert running_devnet(home) == HERE
        assert where(home) == ("http://here", Path("/here"))
        devnet.tell(HERE.model_copy(update={"rpc": ("http://h",)}))
        assert where(home)[0] == "http://h"
    assert running_devnet(home) is None
    assert where(home) == (DEFAULT_RPC, DEPLOYMENTS)


def test_a_running_devnet_whose_file_is_damaged_is_named_and_not_overlooked(
    home: dict[str, str],
) -> None:
    file = Path(home["XDG_CONFIG_HOME"], "muster", "devnet.json")
    with announced(home) as devnet:
        devnet.tell(HERE)
        file.write_text("{")
        with pytest.raises(ConfigError, match=rf"{file} is damaged: ") as caught:
            resolve(None, None, home)
        assert "muster devnet" in str(caught.value.hint)
    file.write_text("{")  # nobody holds it: no devnet runs
    assert where(home) == (DEFAULT_RPC, DEPLOYMENTS)


def test_the_current_network_comes_before_the_devnet(known: dict[str, str]) -> None:
    with announced(known) as devnet:
        devnet.tell(HERE)
        assert where(known)[1] == Path("/main")
        assert where({**known, "MUSTER_NETWORK": DEVNET})[1] == Path("/here")
    with pytest.raises(ConfigError, match="no devnet runs on this machine") as caught:
        resolve(None, None, {**known, "MUSTER_NETWORK": DEVNET})
    assert "muster devnet" in str(caught.value.hint)


def test_a_second_devnet_leaves_the_place_to_the_first(home: dict[str, str]) -> None:
    with announced(home) as first:
        first.tell(HERE)
        with announced(home) as second:
            second.tell(TEST)
            assert running_devnet(home) == HERE
        assert running_devnet(home) == HERE


def test_a_devnet_that_was_killed_is_not_a_running_one(home: dict[str, str]) -> None:
    program = (
        "import os; from muster.settings.profiles import *\n"
        "with announced() as devnet:\n"
        "    devnet.tell(NetworkProfile(chain_id=1, rpc=('http://dead',), deployments=Path('d')))\n"
        "    assert running_devnet() is not None\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **home}, timeout=60, check=False
    )
    assert done.returncode == -9
    file = Path(home["XDG_CONFIG_HOME"], "muster", "devnet.json")
    assert "http://dead" in file.read_text()
    assert running_devnet(home) is None
