from pathlib import Path

import pytest
from chain_fakes import abi_entries

from muster.chain import abi as abi_module
from muster.chain.abi import CONTRACTS, contract_abi, encode_arguments, snake_case
from muster.protocol.encoding import keccak
from muster.protocol.errors import ConfigError, EncodingError


@pytest.mark.parametrize("contract", CONTRACTS)
def test_no_function_is_overloaded(contract: str) -> None:
    names = [entry["name"] for entry in abi_entries(contract, "function")]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("contract", CONTRACTS)
def test_bytecode_is_committed(contract: str) -> None:
    assert len(contract_abi(contract).bytecode) > 1000


def test_selectors_are_those_of_the_standard() -> None:
    functions = contract_abi("MusterToken").functions
    assert functions["transfer"].selector.hex() == "a9059cbb"
    assert functions["balanceOf"].selector.hex() == "70a08231"
    assert functions["permit"].selector.hex() == "d505accf"


def test_topics_are_those_of_the_standard() -> None:
    (transfer,) = (e for e in contract_abi("MusterToken").events if e.name == "Transfer")
    assert transfer.topic == "0x" + keccak(b"Transfer(address,address,uint256)").hex()
    assert [name for name, _ in transfer.indexed] == ["from", "to"]
    assert transfer.data_names == ("value",)


@pytest.mark.parametrize(
    ("solidity", "python"),
    [
        ("activeFrom", "active_from"),
        ("runId", "run_id"),
        ("DOMAIN_SEPARATOR", "domain_separator"),
        ("fraudPpm", "fraud_ppm"),
        ("r", "r"),
    ],
)
def test_names_become_snake_case(solidity: str, python: str) -> None:
    assert snake_case(solidity) == python


@pytest.mark.parametrize("args", [(-1,), (1 << 256,), ("text",), (1, 2), ()])
def test_arguments_that_do_not_fit_name_the_function(args: tuple[object, ...]) -> None:
    with pytest.raises(EncodingError, match="arguments of faucet"):
        encode_arguments("faucet", ("uint256",), args)


def test_missing_artifact_is_a_config_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(abi_module, "ARTIFACTS", tmp_path)
    with pytest.raises(ConfigError, match="artifact of Nothing is missing"):
        contract_abi("Nothing")


@pytest.mark.parametrize("text", ["{", "[]", '{"abi": []}', '{"abi": [{}], "bytecode": "0x"}'])
def test_malformed_artifact_is_a_config_error(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Broken.json").write_text(text)
    monkeypatch.setattr(abi_module, "ARTIFACTS", tmp_path)
    with pytest.raises(ConfigError, match="artifact of Broken"):
        contract_abi("Broken")
