"""Which version is the newest: no relay holds the answer up, and none invents one."""

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

import pytest
from shardcast_network import RUN, Network, Twist, TwistedRelay, answers, honest, policy

from muster.lab.redteam.hostile.dripping import DrippingRelay, Manner
from muster.protocol.ids import Hash32, PolicyVersion

PATIENCE_S = 180
"""Half of the time after which a silent relay is given up."""


async def never(_seconds: float) -> None:
    """A pause that never ends."""
    await asyncio.Event().wait()


def listing(*versions: int) -> Twist:
    return answers("versions", json.dumps({"versions": versions}).encode())


async def newest(
    network: Network, *twists: Twist, silent: int = 0, after: int = -1
) -> tuple[PolicyVersion, Hash32] | None:
    """Return the version found by a client of relays of one store and some silent relays."""
    relays = [TwistedRelay(network.origin, twist) for twist in twists]
    quiet = [DrippingRelay(network.origin, Manner.SILENT, pause=never) for _ in range(silent)]
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(relay.listening()) for relay in [*quiet, *relays]]
        client = await stack.enter_async_context(network.fetcher(*urls))
        async with asyncio.timeout(PATIENCE_S):
            return await client.newest(RUN, network.trust, after=after)


@pytest.fixture(autouse=True)
def published(network: Network) -> None:
    for version in (1, 3):
        network.publish(version, policy(version, chunks=1))


async def test_newest_version_is_told_beside_relays_that_say_nothing(network: Network) -> None:
    assert await newest(network, honest, silent=3) == (3, network.roots[3])


async def test_invented_version_is_nobodys_newest(network: Network) -> None:
    assert await newest(network, listing(1000), honest) == (3, network.roots[3])
    assert await newest(network, listing(1000), listing(999)) is None


async def test_relay_that_shows_a_wrong_manifest_is_remembered_as_a_liar(
    network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    relays = [TwistedRelay(network.origin, t) for t in (answers("manifest", b"{}"), listing(1000))]
    async with AsyncExitStack() as stack:
        liar, early = [await stack.enter_async_context(relay.listening()) for relay in relays]
        client = await stack.enter_async_context(network.fetcher(liar, early))
        assert await client.newest(RUN, network.trust) is None
        # A version that this client cannot know yet is no lie.
        assert client._scores.weight(liar) < 0.2 * client._scores.weight(early)
    found: list[Any] = [r for r in caplog.records if r.message == "relay sent wrong bytes"]
    assert [record.relay for record in found] == [liar]


async def test_one_that_hides_versions_does_not_decide(network: Network) -> None:
    assert await newest(network, listing(1), listing(1), honest) == (3, network.roots[3])
    assert await newest(network, listing(), honest) == (3, network.roots[3])


async def test_nothing_newer_is_told_by_most_beside_one_that_says_nothing(network: Network) -> None:
    assert await newest(network, honest, honest, silent=1, after=3) is None
