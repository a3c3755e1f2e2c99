"""The document that says where a run's network is: its form, and who signed it."""

import pytest
from eth_account import Account

from muster.api.answers import SignedNetwork
from muster.api.network_document import (
    NetworkPage,
    is_private,
    read_network,
    sign_network,
    signer_of,
    url_fault,
)
from muster.protocol.eip712 import Domain, address_of
from muster.protocol.encoding import keccak
from muster.protocol.errors import ApiError
from muster.protocol.ids import to_address

KEY = keccak(b"an orchestrator")
DOMAIN = Domain(84532, to_address("0x" + "11" * 20))
PAGE = NetworkPage(
    run_id=7, chain_id=84532, deploy_block=3, contracts={"StakeVault": "0x" + "22" * 20}
)


def test_a_page_is_read_as_it_was_signed() -> None:
    signed = sign_network(PAGE, DOMAIN, KEY)
    assert read_network(signed) == PAGE
    assert signer_of(signed, PAGE, DOMAIN) == address_of(KEY)


def test_the_signature_is_eip_712_as_others_make_it() -> None:
    signed = sign_network(PAGE, DOMAIN, KEY)
    theirs = Account.sign_typed_data(
        KEY,
        domain_data={
            "name": "Muster",
            "version": "1",
            "chainId": 84532,
            "verifyingContract": DOMAIN.verifying_contract,
        },
        message_types={
            "NetworkDocument": [
                {"name": "runId", "type": "uint64"},
                {"name": "documentHash", "type": "bytes32"},
            ]
        },
        message_data={"runId": 7, "documentHash": keccak(signed.document.encode())},
    )
    assert theirs.signature == signed.signature


@pytest.mark.parametrize(
    "change",
    [
        {"document": sign_network(PAGE, DOMAIN, KEY).document.replace("84532", "84533")},
        {"signature": sign_network(PAGE, DOMAIN, keccak(b"another")).signature},
    ],
)
def test_whatever_was_changed_has_another_signer(change: dict[str, object]) -> None:
    changed = sign_network(PAGE, DOMAIN, KEY).model_copy(update=change)
    assert signer_of(changed, PAGE, DOMAIN) != address_of(KEY)


@pytest.mark.parametrize("document", ["", "[]", "{}", '{"run_id": 1e999}', "[" * 10_000])
def test_what_is_no_document_is_refused(document: str) -> None:
    signed = SignedNetwork(document=document, signature=bytes(65))
    with pytest.raises(ApiError, match="the network's document is malformed"):
        read_network(signed)


@pytest.mark.parametrize(
    ("url", "is_ours"),
    [
        ("http://127.0.0.1:8545", True),
        ("http://127.1", True),
        ("http://2130706433", True),
        ("http://0x7f.0.0.1", True),
        ("http://10.0.0.1", True),
        ("http://169.254.169.254/latest", True),
        ("http://[::1]:80", True),
        ("http://[::ffff:127.0.0.1]", True),
        ("http://localhost.", True),
        ("http://printer.local", True),
        ("http://intranet", True),
        ("https://rpc.example.org", False),
        ("https://8.8.8.8", False),
        ("https://[2606:4700::1111]", False),
    ],
)
def test_addresses_of_the_own_network_are_known(url: str, is_ours: bool) -> None:
    assert is_private(url) is is_ours


@pytest.mark.parametrize(
    "url", ["", "host:80", "ftp://host", "http://", "http://host:x", "http://[", "http://a@host"]
)
def test_what_is_no_place_to_connect_to_is_refused(url: str) -> None:
    assert url_fault(url) is not None
    assert url_fault("https://host:8600/path") is None
