"""The input for explorers compiles to the committed artifacts, for each contract alone."""

import json
import subprocess
from pathlib import Path

import pytest

from muster.chain.abi import CONTRACTS, FACTORY, contract_abi
from muster.client.deployed import COMPILER, standard_json, write_standard_json
from muster.protocol.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
LONG = [pytest.param(name, marks=pytest.mark.slow) for name in CONTRACTS]


@pytest.mark.parametrize("name", [FACTORY, *LONG])
def test_input_of_one_contract_compiles_to_its_artifact(tmp_path: Path, name: str) -> None:
    [path] = write_standard_json(tmp_path, [name])
    done = subprocess.run(
        [str(ROOT / "tools" / "solc"), "--standard-json"],
        input=path.read_text(),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    built = json.loads(done.stdout)["contracts"][f"contracts/src/{name}.sol"][name]
    abi = contract_abi(name)
    assert built["evm"]["bytecode"]["object"] == abi.bytecode.hex()
    assert built["evm"]["deployedBytecode"]["object"] == abi.runtime.hex()


def test_input_holds_a_contracts_own_sources_only() -> None:
    sources = standard_json([FACTORY])["sources"]
    assert sorted(sources) == [
        "contracts/src/NetworkFactory.sol",
        "contracts/src/interfaces/INetworkFactory.sol",
    ]
    assert any("@openzeppelin" in name for name in standard_json(["MusterToken"])["sources"])


def test_settings_are_those_of_the_build() -> None:
    settings = standard_json([FACTORY])["settings"]
    forge = json.loads(
        subprocess.run(
            [str(ROOT / "tools" / "forge"), "config", "--json"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
    )
    assert settings["evmVersion"] == forge["evm_version"]
    assert settings["viaIR"] == forge["via_ir"]
    assert settings["optimizer"] == {"enabled": forge["optimizer"], "runs": forge["optimizer_runs"]}


def test_compiler_is_the_one_that_is_installed() -> None:
    package = json.loads((ROOT / "node_modules" / "solc" / "package.json").read_text())
    assert COMPILER.startswith(f"v{package['version']}+commit.")


def test_where_there_are_no_sources_it_says_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the contracts' sources are not here") as error:
        standard_json([FACTORY], tmp_path)
    assert "run this in a checkout" in str(error.value.hint)
