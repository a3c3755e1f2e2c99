"""NETWORK.toml: known keys are read, everything else is refused by name and reason."""

from pathlib import Path

import pytest

from muster.client.network_file import AMOUNTS, NUMBERS, read_network
from muster.deploy.parameters import DAY, HOUR, TOKEN
from muster.protocol.errors import ConfigError
from muster.protocol.ids import to_address

ROOT = Path(__file__).parents[4]
TESTNET = {"name": '"n"', "profile": '"testnet"', "chain_id": "11155111"}
SAFE = to_address(b"\x5a" * 20)


def written(folder: Path, top: dict[str, str], **parameters: str) -> Path:
    lines = [f"{key} = {value}" for key, value in top.items()]
    lines += ["[parameters]", *(f"{key} = {value}" for key, value in parameters.items())]
    path = folder / "network.toml"
    path.write_text("\n".join(lines))
    return path


def test_profile_fills_in_what_the_file_leaves_out(tmp_path: Path) -> None:
    network = read_network(written(tmp_path, TESTNET, jail_time_s="7"))
    assert (network.name, network.chain_id) == ("n", 11155111)
    assert network.parameters.jail_time_s == 7
    assert network.parameters.unbonding_s == DAY


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("challenge_window_s", "7200", 2 * HOUR),
        ("challenge_window_s", '"150 min"', 9000),
        ("challenge_window_s", '"3 h"', 3 * HOUR),
        ("unbonding_s", '"2 d"', 2 * DAY),
        ("required_worker_stake", '"2.5 tokens"', 5 * TOKEN // 2),
        ("required_worker_stake", "17", 17),
        ("jury_size", "5", 5),
    ],
)
def test_parameters_have_units(tmp_path: Path, key: str, text: str, value: int) -> None:
    network = read_network(written(tmp_path, TESTNET, **{key: text}))
    assert getattr(network.parameters, key) == value


@pytest.mark.parametrize(
    ("key", "text", "problem"),
    [
        ("challenge_window_s", '"3 hours"', "'3 hours' is not understood"),
        ("challenge_window_s", '"3 tokens"', "'3 tokens' is not understood"),
        ("challenge_window_s", "1.5", "1.5 is not understood"),
        ("challenge_window_s", "true", "True is not understood"),
        ("challenge_window_s", '"-3 h"', "'-3 h' is not understood"),
        ("required_worker_stake", '"3 h"', "'3 h' is not understood"),
        ("required_worker_stake", '"x tokens"', "not an amount of tokens: 'x'"),
        ("jury_size", '"5"', "'5' is not understood"),
        ("jury_size", "65", "jury_size 65 is above 64: .* a draw ends"),
        ("challenge_window_s", "3", "challenge_window_s 3 is below 600: people must have time"),
        ("unbonding_s", '"7 h"', "unbonding_s 25200 is below 46801: it must outlast"),
        ("chalenge_window_s", "3", "unknown parameter 'chalenge_window_s'"),
        ("owner", f'"{SAFE}"', "unknown parameter 'owner'"),
    ],
)
def test_parameter_out_of_bounds_is_refused_with_the_reason(
    tmp_path: Path, key: str, text: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=f"network.toml: .*{problem}"):
        read_network(written(tmp_path, TESTNET, **{key: text}))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"profile": '"main"'}, "there is no profile 'main'"),
        ({"profile": "3"}, "profile 3 is no text"),
        ({"profile": '"dev"'}, "profile dev is for chain 31337 only, not for 11155111"),
        ({"chain_id": "31337"}, "on chain 31337 anybody mints tokens, which profile testnet"),
        ({"chain_id": "0"}, "chain_id 0 is below 1"),
        ({"chain_id": '"1"'}, "chain_id '1' is no number"),
        ({"name": '""'}, "name '' is not 1 to 64 characters"),
        ({"name": '"a\\nb"'}, "is not 1 to 64 characters of text"),
        ({"ownr": f'"{SAFE}"'}, "unknown key 'ownr'"),
        ({"owner": '"0x12"'}, "owner: .*account address"),
    ],
)
def test_file_that_is_wrong_is_refused(
    tmp_path: Path, changes: dict[str, str], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_network(written(tmp_path, {**TESTNET, **changes}))


@pytest.mark.parametrize("key", TESTNET)
def test_key_that_is_missing_is_named(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} is missing"):
        read_network(written(tmp_path, {k: v for k, v in TESTNET.items() if k != key}))


@pytest.mark.parametrize(
    ("text", "problem"), [("name =", "is not valid TOML"), ("parameters = 3", "missing")]
)
def test_file_that_does_not_parse_is_named(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "network.toml").write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_network(tmp_path / "network.toml")


def test_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*: No such file"):
        read_network(tmp_path / "network.toml")


def test_parameters_that_are_no_table_are_refused(tmp_path: Path) -> None:
    lines = [f"{key} = {value}" for key, value in {**TESTNET, "parameters": "3"}.items()]
    (tmp_path / "network.toml").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="parameters is no table"):
        read_network(tmp_path / "network.toml")


def test_close_match_of_a_misspelt_key_is_suggested(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        read_network(written(tmp_path, TESTNET, chalenge_window_s="3"))
    assert error.value.hint == "did you mean 'challenge_window_s'?"


def test_owner_and_insurance_are_the_files(tmp_path: Path) -> None:
    top = {**TESTNET, "owner": f'"{SAFE}"'}
    parameters = read_network(written(tmp_path, top)).parameters
    assert parameters.owner == SAFE
    assert parameters.insurance is None


def test_the_example_is_understood() -> None:
    network = read_network(ROOT / "examples" / "network.toml")
    assert network.parameters.challenge_window_s == 3 * HOUR


def test_every_parameter_has_one_unit() -> None:
    assert AMOUNTS <= NUMBERS
    assert not [name for name in AMOUNTS if name.endswith("_s")]
