"""Relays that drip for ever do not delay a client that knows one honest relay."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from shardcast_network import CHUNK_BYTES, Network, TwistedRelay, honest, policy

from muster.lab.redteam.hostile.dripping import DrippingRelay, Manner
from muster.shardcast import ShardServer

DRIPPERS = 8
FILES = policy(0, chunks=24)


async def never(_seconds: float) -> None:
    """A pause between two drops that never ends."""
    await asyncio.Event().wait()


@pytest.fixture(autouse=True)
def published(network: Network) -> None:
    network.publish(0, FILES)


@pytest.mark.parametrize("manner", [manner for manner in Manner if manner is not Manner.RIDE])
async def test_fetch_beside_drippers_takes_everything_from_the_honest_relay(
    network: Network, manner: Manner
) -> None:
    hostile = [DrippingRelay(network.origin, manner, pause=never) for _ in range(DRIPPERS)]
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(ShardServer(network.origin))
        urls = [await stack.enter_async_context(relay.listening()) for relay in hostile]
        client = await stack.enter_async_context(network.fetcher(*urls, server.url))
        assert await network.fetch(client, 0) == FILES


@pytest.mark.parametrize("chunks", [1, 24])
async def test_fetch_from_one_honest_relay_alone_asks_for_every_chunk_once(
    network: Network, chunks: int
) -> None:
    network.publish(1, policy(1, chunks=chunks))

    relay = TwistedRelay(network.origin, honest)
    async with relay.listening() as url, network.fetcher(url) as client:
        assert await network.fetch(client, 1) == policy(1, chunks=chunks)
    assert relay.chunks_asked == chunks + 2


async def test_relay_mirrors_beside_upstreams_that_say_nothing(network: Network) -> None:
    silent = [DrippingRelay(network.origin, Manner.SILENT, pause=never) for _ in range(DRIPPERS)]
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(ShardServer(network.origin))
        urls = [await stack.enter_async_context(relay.listening()) for relay in silent]
        relay, _ = await stack.enter_async_context(network.relay(*urls, server.url))
        client = await stack.enter_async_context(network.fetcher(relay))
        assert await network.fetch(client, 0) == FILES


async def test_slow_line_is_no_fault_where_there_is_no_other(network: Network) -> None:
    async def drop(_seconds: float) -> None:
        await asyncio.sleep(0)

    only = DrippingRelay(network.origin, Manner.DRIP, pause=drop)
    async with only.listening() as url, network.fetcher(url) as client:
        assert await network.fetch(client, 0) == FILES


async def test_what_a_dripper_brought_is_not_fetched_again(network: Network) -> None:
    hostile = DrippingRelay(network.origin, Manner.TAIL, pause=never, tail_bytes=CHUNK_BYTES // 8)
    honest = DrippingRelay(network.origin, Manner.HONEST)
    async with (
        hostile.listening() as first,
        honest.listening() as second,
        network.fetcher(first, second) as client,
    ):
        assert await network.fetch(client, 0) == FILES
    total = sum(map(len, FILES.values()))
    assert hostile.sent_bytes + honest.sent_bytes < 1.5 * total
