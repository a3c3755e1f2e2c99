"""`muster network` while the current network is not there."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from muster.client.cli.network import network
from muster.protocol.errors import ConfigError
from muster.settings.profiles import NetworkProfile, Profiles, write_profiles

MAIN = NetworkProfile(chain_id=1, rpc=("https://main",), deployments=Path("/main"))


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user with one network."""
    for name in ("MUSTER_RPC", "MUSTER_DEPLOYMENTS", "MUSTER_NETWORK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    write_profiles(Profiles(networks={"main": MAIN}))


def call(*words: str) -> Any:
    return CliRunner().invoke(network, [*words])


@pytest.mark.parametrize("asked", ["devnet", "unknown"])
def test_networks_are_shown_when_the_current_one_is_not_there(
    asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if asked == "devnet":
        assert call("use", "devnet").exit_code == 0
    else:
        monkeypatch.setenv("MUSTER_NETWORK", asked)
    [row] = json.loads(call("list", "--json").stdout)
    assert (row["network"], row["current"]) == ("main", False)
    assert json.loads(call("show", "main", "--json").stdout) == row
    assert isinstance(call("show").exception, ConfigError)
    assert isinstance(call("show", "devnet").exception, ConfigError)
