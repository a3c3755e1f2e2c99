"""What a client may connect to for its run."""

from typing import Any

import pytest

from muster.api import OrchestratorApi
from muster.client.connections import Connected

RELAYS = ("http://relay.example",)


def orchestrator(*addresses: str) -> OrchestratorApi:
    """An orchestrator at an address for each lookup; its name is not found at an empty one."""
    found = iter(addresses)

    async def resolver(_host: str, _port: int) -> list[str]:
        return [address for address in [next(found)] if address]

    return OrchestratorApi("http://orchestrator.example", resolver=resolver)


def connected(
    api: OrchestratorApi, relays: tuple[str, ...], *, are_ours: bool = False
) -> Connected:
    unused: Any = None
    return Connected(unused, unused, unused, unused, api, unused, relays, are_ours)


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
        assert await connected(api, RELAYS, are_ours=are_ours).own_relays() == own


async def test_rooms_are_those_that_may_be_given_files_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """An orchestrator that is not found once keeps no relay out for ever."""
    monkeypatch.setattr("muster.api.public_hosts.KEPT_S", 0.0)
    relays = ("http://10.0.0.3:8700", "http://relay.example/path", "http://relay.example")
    async with orchestrator("", "10.0.0.7", "1.1.1.1") as api:
        given = []
        for _ in range(3):
            async with await connected(api, relays).open_rooms() as rooms:
                given.append((rooms.urls, rooms.unasked))
    assert given[0] == given[2] == (["http://relay.example"], list(relays[:2]))
    assert given[1] == (list(relays), [])
