"""Relays that drip for ever do not delay a client that knows one honest relay."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from shardcast_network import CHUNK_BYTES, RUN, Network, TwistedRelay, honest, policy

from muster.lab.redteam.hostile.dripping import DrippingRelay, Manner
from muster.protocol.errors import PolicyUnavailable
from muster.protocol.ids import PolicyVersion
from muster.shardcast import ShardServer, fetcher
from muster.shardcast.http_client import SILENCE_S

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


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a version of any size have half a second."""
    monkeypatch.setattr(fetcher, "BASE_S", 0.5)
    monkeypatch.setattr(fetcher, "LEAST_BYTES_PER_S", 1 << 60)


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("manner", [Manner.SILENT, Manner.HEAD, Manner.DRIP])
async def test_fetch_from_drippers_alone_ends_in_time(network: Network, manner: Manner) -> None:
    hostile = DrippingRelay(network.origin, manner, pause=never)
    async with hostile.listening() as url, network.fetcher(url) as client:
        async with asyncio.timeout(SILENCE_S / 2):
            with pytest.raises(PolicyUnavailable, match=r"did not come in 0\.5 s") as caught:
                await client.fetch(RUN, PolicyVersion(0), network.roots[0])
    assert "goes on where this one ended" in (caught.value.hint or "")


@pytest.mark.usefixtures("_impatient")
async def test_fetch_that_ended_in_time_is_gone_on_with(network: Network) -> None:
    hostile = DrippingRelay(network.origin, Manner.ALTERNATE, pause=never)
    async with hostile.listening() as url, network.fetcher(url) as client:
        with pytest.raises(PolicyUnavailable, match="did not come in"):
            await network.fetch(client, 0)
    fair = TwistedRelay(network.origin, honest)
    async with fair.listening() as url, network.fetcher(url) as client:
        assert await network.fetch(client, 0) == FILES
    assert fair.chunks_asked < 24


def test_time_for_a_version_grows_with_its_size() -> None:
    assert fetcher.limit_s(0) == 600
    assert fetcher.limit_s(1 << 30) == 600 + 4096


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
