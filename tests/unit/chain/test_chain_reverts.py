import pytest
from chain_fakes import abi_entries, address
from eth_abi.abi import encode
from eth_utils.abi import collapse_if_tuple

from muster.chain.abi import CONTRACTS, HINTS, decode_revert, error_table
from muster.protocol.encoding import keccak


def revert(signature: str, types: list[str], args: list[object]) -> bytes:
    return keccak(signature.encode())[:4] + encode(types, args)


def test_custom_error_is_named_with_its_arguments() -> None:
    data = revert(
        "RegistryStakeTooLow(uint64,address,uint256,uint256)",
        ["uint64", "address", "uint256", "uint256"],
        [1, address(2), 5, 100],
    )
    error = decode_revert(data, tx="0x12")
    assert (error.name, error.args_, error.tx) == (
        "RegistryStakeTooLow",
        (1, address(2), 5, 100),
        "0x12",
    )
    assert error.hint == HINTS["RegistryStakeTooLow"]
    assert str(error) == f"the contract refused: RegistryStakeTooLow(1, {address(2)}, 5, 100)"


def test_bytes_are_shown_in_hexadecimal() -> None:
    error = decode_revert(revert("VaultOffenceSettled(bytes32)", ["bytes32"], [b"\1" * 32]))
    assert error.args_ == ("0x" + "01" * 32,)


def test_solidity_text_is_shown() -> None:
    error = decode_revert(revert("Error(string)", ["string"], ["no luck"]))
    assert (error.name, error.args_) == ("Error", ("no luck",))


def test_panic_code_is_shown() -> None:
    error = decode_revert(revert("Panic(uint256)", ["uint256"], [0x11]))
    assert (error.name, error.args_) == ("Panic", (0x11,))


def test_unknown_selector_is_shown_as_such() -> None:
    error = decode_revert(bytes.fromhex("deadbeef") + bytes(32))
    assert error.name == "0xdeadbeef"
    assert error.args_ == ("0x" + "00" * 32,)
    assert error.hint is not None


@pytest.mark.parametrize("data", [b"", b"\1", b"\1\2\3"])
def test_revert_without_reason_says_so(data: bytes) -> None:
    error = decode_revert(data)
    assert error.name == "without a reason"
    assert "gas" in str(error.hint)


def test_known_error_with_damaged_arguments_keeps_its_name() -> None:
    data = revert("LedgerPaused(uint64)", ["uint64"], [1])[:20]
    error = decode_revert(data)
    assert error.name == "LedgerPaused"
    assert error.args_ == ("0x" + "00" * 16,)


def test_table_holds_every_error_of_every_contract() -> None:
    for contract in CONTRACTS:
        for entry in abi_entries(contract, "error"):
            types = ",".join(collapse_if_tuple(p) for p in entry["inputs"])
            selector = keccak(f"{entry['name']}({types})".encode())[:4]
            assert error_table()[selector].name == entry["name"]


def test_hints_are_about_errors_that_exist() -> None:
    names = {error.name for error in error_table().values()}
    assert set(HINTS) <= names
