from typing import Any

import pytest
from abi_values import values_of
from chain_fakes import DEPLOYMENT, TX, Block, abi_entries, address, encode_log, placed
from eth_utils.abi import collapse_if_tuple
from hypothesis import given, strategies as st

from muster.chain import LeasedWork, Offence, RunConfig, RunTerms
from muster.chain.abi import CONTRACTS, EventTable, snake_case
from muster.chain.conversion import from_abi
from muster.chain.structs import CommittedWork, SlashSubject
from muster.protocol.errors import EncodingError

TABLE = EventTable(DEPLOYMENT.contracts)
BLOCK = Block(7, b"\x07" * 32, 1234)
EVENTS = [
    (contract, entry)
    for contract in CONTRACTS
    for entry in abi_entries(contract, "event")
    if entry["name"] != "EIP712DomainChanged"
]


def subject(run_id: int, owner: str, offence: int, *rest: int) -> SlashSubject:
    return from_abi(SlashSubject, (run_id, owner, offence % len(Offence), *rest))


STRUCTS: dict[str, Any] = {
    "CommittedWork": lambda *values: from_abi(CommittedWork, values),
    "LeasedWork": lambda *values: from_abi(LeasedWork, values),
    "RunConfig": lambda *values: from_abi(RunConfig, values),
    "Terms": RunTerms,
    "Verdict": subject,
}
"""Makers of structs, by their names in Solidity."""


@st.composite
def emitted(draw: st.DrawFn) -> tuple[str, str, dict[str, Any]]:
    """Draw one of our events with arguments."""
    contract, entry = draw(st.sampled_from(EVENTS))
    args = {}
    for parameter in entry["inputs"]:
        name = snake_case(parameter["name"])
        value = draw(values_of(collapse_if_tuple(parameter)))
        is_struct = parameter["type"] == "tuple"
        args[name] = (
            STRUCTS[parameter["internalType"].rpartition(".")[2]](*value) if is_struct else value
        )
    return contract, entry["name"], args


@given(emitted())
def test_event_is_decoded_as_emitted(drawn: tuple[str, str, dict[str, Any]]) -> None:
    contract, name, args = drawn
    event = TABLE.decode(placed(encode_log(contract, name, args), BLOCK, 3))
    assert event is not None
    assert (event.contract, event.name, event.args) == (contract, name, args)
    assert (event.block_number, event.block_hash) == (7, BLOCK.hash)
    assert (event.block_timestamp, event.log_index, event.tx_hash) == (1234, 3, TX)


def deposited() -> dict[str, Any]:
    args = {"run_id": 1, "owner": address(1), "amount": 5, "active": 5}
    return placed(encode_log("StakeVault", "Deposited", args), BLOCK, 0)


def test_time_given_replaces_the_logs_own() -> None:
    event = TABLE.decode(deposited(), 99)
    assert event is not None
    assert event.block_timestamp == 99


def test_addresses_and_topics_may_be_in_any_case() -> None:
    log = deposited()
    log["address"] = DEPLOYMENT.contracts["StakeVault"]
    log["topics"] = [topic.upper().replace("0X", "0x") for topic in log["topics"]]
    assert TABLE.decode(log) is not None


@pytest.mark.parametrize(
    "change",
    [
        {"address": address(99).lower()},
        {"topics": ["0x" + "11" * 32]},
        {"topics": []},
        {"removed": True},
    ],
)
def test_log_is_ignored_when_it_is_none_of_ours(change: dict[str, Any]) -> None:
    assert TABLE.decode({**deposited(), **change}) is None


@pytest.mark.parametrize(
    "change",
    [
        {"data": "0x"},
        {"data": "0x" + "ff" * 31},
        {"data": "0xzz"},
        {"data": None},
        {"topics": None},
        {"topics": deposited()["topics"][:1]},
        {"topics": [*deposited()["topics"], "0x" + "00" * 32]},
        {"topics": [deposited()["topics"][0], "0x" + "ff" * 32]},
        {"topics": [deposited()["topics"][0], 5]},
        {"blockNumber": None},
        {"blockHash": 7},
        {"logIndex": "x"},
        {"blockTimestamp": None},
    ],
)
def test_malformed_log_is_an_encoding_error(change: dict[str, Any]) -> None:
    log = {**deposited(), **change}
    if change.get("topics", "") is None:
        assert TABLE.decode(log) is None
        return
    with pytest.raises(EncodingError):
        TABLE.decode(log)


def test_log_without_its_time_needs_one_given() -> None:
    log = deposited()
    del log["blockTimestamp"]
    with pytest.raises(EncodingError, match="blockTimestamp"):
        TABLE.decode(log)
    assert TABLE.decode(log, 5) is not None


def test_log_of_a_stranger_is_no_event() -> None:
    assert TABLE.decode({**deposited(), "address": address(1).lower()}) is None
