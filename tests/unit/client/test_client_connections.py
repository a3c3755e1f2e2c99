"""What a client may connect to for its run."""

from typing import Any

import pytest

from muster.api import OrchestratorApi
from muster.client.connections import Connected

RELAYS = ("http://relay.example",)


def orchestrator(address: str) -> OrchestratorApi:
    """An orchestrator at an address; without one its name is not found."""

    async def resolver(_host: str, _port: int) -> list[str]:
        return [address] if address else []

    return OrchestratorApi("http://orchestrator.example", resolver=resolver)


@pytest.mark.parametrize(
    ("address", "are_ours", "own"),
    [
        ("10.0.0.7", False, RELAYS),
        ("1.1.1.1", False, ()),
        ("", False, ()),
        ("1.1.1.1", True, RELAYS),
    ],
    ids=["private", "public", "not found", "chosen by us"],
)
async def test_relays_are_our_own_if_we_chose_them_or_a_private_orchestrator_did(
    address: str, are_ours: bool, own: tuple[str, ...]
) -> None:
    async with orchestrator(address) as api:
        unused: Any = None
        connected = Connected(unused, unused, unused, unused, api, unused, RELAYS, are_ours)
        assert await connected.own_relays() == own
