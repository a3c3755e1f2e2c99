import json
from pathlib import Path
from typing import Any

import pytest
from chain_fakes import CHAIN_ID, DEPLOYMENT
from hypothesis import given, strategies as st

from muster.chain import Deployment, deployment, load_deployment, save_deployment
from muster.chain.deployment import parse_deployment
from muster.protocol.errors import ConfigError


def document() -> dict[str, Any]:
    return {
        "chain_id": CHAIN_ID,
        "deploy_block": 1,
        "contracts": dict(DEPLOYMENT.contracts),
        "parameters": {"challenge_window_s": 5, "challenge_bond": "10000000000000000000"},
    }


def test_deployment_is_read_back_as_saved(tmp_path: Path) -> None:
    deployment = Deployment(CHAIN_ID, 3, DEPLOYMENT.contracts, {"jury_time_s": 9, "bond": "1"})
    path = save_deployment(tmp_path / "new" / "folder", deployment)
    assert path.name == "31337.json"
    assert load_deployment(tmp_path / "new" / "folder", CHAIN_ID) == deployment
    assert [p.name for p in path.parent.iterdir()] == ["31337.json"]


def test_saving_replaces_an_earlier_deployment(tmp_path: Path) -> None:
    for block in (1, 2):
        save_deployment(tmp_path, Deployment(CHAIN_ID, block, DEPLOYMENT.contracts))
    assert load_deployment(tmp_path, CHAIN_ID).deploy_block == 2


def test_missing_deployment_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"chain 5: .*5\.json does not exist") as error:
        load_deployment(tmp_path, 5)
    assert "--deployments" in str(error.value.hint)


@pytest.fixture
def default_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Chain 31337 is a known network; the user's folder is empty."""
    monkeypatch.setattr(deployment, "_KNOWN", tmp_path / "networks")
    monkeypatch.setattr(deployment, "DEPLOYMENTS", tmp_path / "mine")
    save_deployment(tmp_path / "networks", DEPLOYMENT)
    return tmp_path / "mine"


def test_known_network_needs_no_file_in_the_default_folder(default_folder: Path) -> None:
    assert load_deployment(default_folder, CHAIN_ID) == DEPLOYMENT


def test_file_in_the_default_folder_comes_before_a_known_network(default_folder: Path) -> None:
    own = Deployment(CHAIN_ID, 77, DEPLOYMENT.contracts)
    save_deployment(default_folder, own)
    assert load_deployment(default_folder, CHAIN_ID) == own


def test_folder_that_is_named_has_no_known_networks(default_folder: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_deployment(default_folder / "another", CHAIN_ID)


def test_home_is_written_as_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert save_deployment(Path("~/a"), DEPLOYMENT) == tmp_path / "a" / "31337.json"
    assert load_deployment(Path("~/a"), CHAIN_ID) == DEPLOYMENT


def test_unreadable_deployment_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "5.json").mkdir()
    with pytest.raises(ConfigError, match="cannot read"):
        load_deployment(tmp_path, 5)


def test_deployment_of_another_chain_is_refused(tmp_path: Path) -> None:
    (tmp_path / "5.json").write_text(json.dumps(document()))
    with pytest.raises(ConfigError, match="is for chain 31337"):
        load_deployment(tmp_path, 5)


def test_malformed_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "5.json").write_text("{")
    with pytest.raises(ConfigError, match=r"5\.json is malformed: not JSON"):
        load_deployment(tmp_path, 5)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"chain_id": "31337"}, "chain_id"),
        ({"chain_id": 0}, "chain_id"),
        ({"deploy_block": -1}, "deploy_block"),
        ({"deploy_block": None}, "deploy_block"),
        ({"contracts": []}, "contracts"),
        ({"contracts": {}}, "lacks MusterToken"),
        ({"surprise": 1}, "surprise"),
        ({"parameters": {"x": [1]}}, "parameters"),
    ],
)
def test_malformed_deployment_names_the_field(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_deployment(json.dumps({**document(), **change}))


@pytest.mark.parametrize("bad", ["0x12", "", None, 5, "0x" + "zz" * 20, "not an address"])
def test_deployment_with_a_bad_address_is_refused(bad: object) -> None:
    contracts = {**DEPLOYMENT.contracts, "StakeVault": bad}
    with pytest.raises(ConfigError, match="StakeVault"):
        parse_deployment(json.dumps({**document(), "contracts": contracts}))


def test_mistyped_checksum_is_refused() -> None:
    mistyped = "0x5aAeb6053F3E94C9b9A09f33669435E7Ef1Beaed"
    contracts = {**DEPLOYMENT.contracts, "StakeVault": mistyped}
    with pytest.raises(ConfigError, match="checksum"):
        parse_deployment(json.dumps({**document(), "contracts": contracts}))


def test_deployment_with_an_unknown_contract_is_refused() -> None:
    contracts = {**DEPLOYMENT.contracts, "Faucet": DEPLOYMENT.contracts["StakeVault"]}
    with pytest.raises(ConfigError, match="unknown contracts: Faucet"):
        parse_deployment(json.dumps({**document(), "contracts": contracts}))


@given(st.text(max_size=60))
def test_garbage_is_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_deployment(text)


def test_deeply_nested_garbage_is_a_config_error() -> None:
    with pytest.raises(ConfigError):
        parse_deployment("[" * 200_000)
