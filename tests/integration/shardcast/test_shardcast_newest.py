"""Which version is the newest: no relay holds the answer up, and none invents one."""

import asyncio
import json
from contextlib import AsyncExitStack

import pytest
from shardcast_network import RUN, Network, Twist, TwistedRelay, answers, honest, policy

from muster.lab.redteam.hostile.dripping import DrippingRelay, Manner
from muster.protocol.ids import Hash32, PolicyVersion

PATIENCE_S = 10
"""Half of what a relay that says nothing may take to be given up."""


async def never(_seconds: float) -> None:
    """A pause that does not end."""
    await asyncio.Event().wait()


def listing(*versions: int) -> Twist:
    return answers("versions", json.dumps({"versions": versions}).encode())


async def newest(
    network: Network, *twists: Twist, silent: int = 0, after: int = -1
) -> tuple[PolicyVersion, Hash32] | None:
    """Return what a client finds that asks relays of one store, and some that say nothing."""
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


async def test_one_that_hides_versions_does_not_decide(network: Network) -> None:
    assert await newest(network, listing(1), listing(1), honest) == (3, network.roots[3])
    assert await newest(network, listing(), honest) == (3, network.roots[3])


async def test_nothing_newer_is_told_by_most_beside_one_that_says_nothing(
    network: Network,
) -> None:
    assert await newest(network, honest, honest, silent=1, after=3) is None
