"""Origin, relays and clients on loopback: versions arrive although some are late, slow or dead."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from shardcast_network import (
    CHUNK_BYTES,
    RUN,
    Network,
    TwistedRelay,
    honest,
    is_whole,
    policy,
    until,
)

from muster.protocol.errors import PolicyUnavailable
from muster.protocol.ids import PolicyVersion
from muster.shardcast import ChunkStore, ShardServer
from muster.shardcast.cache import RESERVE_BYTES

DEAD = "http://127.0.0.1:9"
"""Nobody listens on the discard port."""


async def test_version_passes_through_a_chain_of_relays(network: Network, origin: str) -> None:
    async with (
        network.relay(origin, name="near") as (near, _),
        network.relay(near, name="far") as (far, _),
        network.fetcher(far) as client,
    ):
        network.publish(0, policy(0))
        assert await network.fetch(client, 0) == policy(0)


async def test_every_new_version_arrives_and_five_are_kept(network: Network, origin: str) -> None:
    async with network.relay(origin) as (relay, store), network.fetcher(relay) as client:
        for version in range(8):
            network.publish(version, policy(version, chunks=1))
            assert await network.fetch(client, version) == policy(version, chunks=1)
    assert store.versions(RUN) == [7, 6, 5, 4, 3]
    assert cached(network) == {"v3", "v4", "v5", "v6", "v7"}


def cached(network: Network) -> set[str]:
    found = (network.folder / "client" / str(RUN)).glob("v*")
    return {path.name for path in found if path.is_dir()}


async def test_versions_that_open_work_names_stay_in_a_cache(network: Network, origin: str) -> None:
    named = {PolicyVersion(0), PolicyVersion(2)}
    async with network.fetcher(origin, named=lambda _: named) as client:
        for version in range(8):
            network.publish(version, policy(version, chunks=1))
            await network.fetch(client, version)
        assert cached(network) == {"v0", "v2", "v3", "v4", "v5", "v6", "v7"}
        named.remove(PolicyVersion(0))
        network.publish(8, policy(8, chunks=1))
        await network.fetch(client, 8)
    assert cached(network) == {"v2", "v4", "v5", "v6", "v7", "v8"}


async def test_named_versions_give_way_to_a_version_for_which_the_disk_lacks_room(
    network: Network, origin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(map(len, policy(0, chunks=1).values()))

    def disk(_folder: Path) -> SimpleNamespace:
        left = 7 - len(cached(network))
        return SimpleNamespace(total=1 << 40, free=RESERVE_BYTES + left * size)

    monkeypatch.setattr("shutil.disk_usage", disk)
    async with network.fetcher(origin, named=lambda _: range(3)) as client:
        for version in range(7):
            network.publish(version, policy(version, chunks=1))
            await network.fetch(client, version)
        assert len(cached(network)) == 7
        network.publish(7, policy(7, chunks=1))
        await network.fetch(client, 7)
        assert cached(network) == {"v2", "v3", "v4", "v5", "v6", "v7"}


async def test_fetch_waits_for_a_version_that_is_not_published_yet(
    network: Network, origin: str
) -> None:
    draft = network.publish(1, policy(1), store=ChunkStore(network.folder / "draft"))
    async with network.relay(origin) as (relay, _), network.fetcher(relay) as client:
        fetching = asyncio.create_task(network.fetch(client, 1))
        await asyncio.sleep(0.1)
        assert not fetching.done()
        assert network.publish(1, policy(1)) == draft
        assert await fetching == policy(1)


async def test_relay_waits_until_the_chain_has_the_root(network: Network, origin: str) -> None:
    manifest = network.publish(1, policy(1), anchor=False)
    async with network.relay(origin) as (_, store):
        await asyncio.sleep(0.3)
        assert store.versions(RUN) == []
        network.roots[1] = manifest.root()
        await until(is_whole(store, 1))


async def test_relay_asks_the_chain_soon_again_when_a_client_waits(
    network: Network, origin: str
) -> None:
    manifest = network.publish(1, policy(1), anchor=False)
    async with network.relay(origin) as (relay, _), network.fetcher(relay) as client:
        await asyncio.sleep(2)  # by now the relay polls the chain only every few seconds
        started_s = asyncio.get_running_loop().time()
        network.roots[1] = manifest.root()
        assert await network.fetch(client, 1) == policy(1)
        assert asyncio.get_running_loop().time() - started_s < 1


async def test_late_relay_catches_up_with_all_kept_versions(network: Network, origin: str) -> None:
    for version in range(7):
        network.publish(version, policy(version, chunks=1))
    async with network.relay(origin) as (_, store):
        await until(lambda: store.versions(RUN) == [6, 5, 4, 3, 2])
        await until(is_whole(store, 2))


async def test_chunk_is_passed_on_while_later_ones_still_arrive(network: Network) -> None:
    manifest = network.publish(0, policy(0))
    first = next(span.digest.hex() for span in manifest.spans() if span.size == CHUNK_BYTES)
    last = list(manifest.spans())[-1].digest.hex()
    release = asyncio.Event()

    async def hold_last(path: str, answer: bytes | None) -> bytes | None:
        if path.endswith(last):
            await release.wait()
        return answer

    async with (
        TwistedRelay(network.origin, hold_last).listening() as slow,
        network.relay(slow) as (relay, store),
        network.fetcher(relay) as client,
        httpx.AsyncClient() as http,
    ):
        fetching = asyncio.create_task(network.fetch(client, 0))
        await until(lambda: (network.folder / "relay" / "chunks" / first).exists())
        assert (await http.get(f"{relay}/v1/chunks/{first}")).status_code == 200
        assert (await http.get(f"{relay}/v1/{RUN}/versions")).json() == {"versions": [0]}
        assert not store.is_complete(RUN, PolicyVersion(0))
        release.set()
        assert await fetching == policy(0)


async def test_fetch_succeeds_when_one_of_two_relays_is_dead(network: Network, origin: str) -> None:
    network.publish(0, policy(0))
    async with network.relay(origin) as (relay, _), network.fetcher(DEAD, relay) as client:
        assert await network.fetch(client, 0) == policy(0)


async def test_relay_mirrors_when_one_of_two_upstreams_is_dead(
    network: Network, origin: str
) -> None:
    network.publish(0, policy(0))
    async with network.relay(DEAD, origin) as (_, store):
        await until(is_whole(store, 0))


async def test_fetch_succeeds_when_a_relay_breaks_off_in_every_chunk(
    network: Network, origin: str
) -> None:
    network.publish(0, policy(0))
    breaking = TwistedRelay(network.origin, honest)
    breaking.cut_after = 1000
    async with breaking.listening() as broken, network.fetcher(broken, origin) as client:
        assert await network.fetch(client, 0) == policy(0)
        assert breaking.chunks_asked > 0


async def test_relay_survives_an_outage_of_its_upstream(network: Network, tmp_path: Path) -> None:
    upstream = ShardServer(network.origin)
    await upstream.start()
    port = int(upstream.url.rsplit(":", 1)[1])
    network.publish(0, policy(0))
    async with network.relay(upstream.url) as (_, store):
        await until(is_whole(store, 0))
        await upstream.stop()
        await asyncio.to_thread(network.publish, 1, policy(1))
        await asyncio.sleep(0.2)
        async with ShardServer(network.origin, port=port):
            await until(is_whole(store, 1))


async def test_relay_survives_a_chain_that_fails(network: Network, origin: str) -> None:
    network.publish(0, policy(0))
    failures = 3
    answering = network.trust

    async def failing(*key: object) -> object:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise PolicyUnavailable("the chain is away")
        return await answering(*key)  # type: ignore[arg-type]

    network.trust = failing  # type: ignore[method-assign, assignment]
    async with network.relay(origin) as (_, store):
        await until(is_whole(store, 0))


async def test_restarted_relay_asks_only_for_what_it_lacks(network: Network) -> None:
    manifest = network.publish(0, policy(0))
    counting = TwistedRelay(network.origin, honest)
    async with counting.listening() as upstream:
        async with network.relay(upstream) as (_, store):
            await until(is_whole(store, 0))
        lost = list(manifest.spans())[3].digest
        store.chunks.path_of(lost).unlink()
        counting.asked.clear()
        async with network.relay(upstream) as (_, restarted):
            await until(is_whole(restarted, 0))
    assert [p for p in counting.asked if "chunks" in p] == [f"/v1/chunks/{lost.hex()}"]


async def test_relay_replaces_a_chunk_that_rotted_on_its_disk(
    network: Network, origin: str
) -> None:
    manifest = network.publish(0, policy(0))
    async with network.relay(origin) as (_, store):
        await until(is_whole(store, 0))
    rotten = store.chunks.path_of(list(manifest.spans())[3].digest)
    data = bytearray(rotten.read_bytes())
    data[100] ^= 1
    rotten.write_bytes(data)
    async with network.relay(origin) as (relay, _), network.fetcher(relay) as client:
        assert await network.fetch(client, 0) == policy(0)


async def test_relay_with_bounded_disk_refuses_what_is_too_large_and_goes_on(
    network: Network, origin: str
) -> None:
    network.publish(0, policy(0, chunks=40))
    async with network.relay(origin, max_bytes=20 * CHUNK_BYTES) as (_, store):
        await asyncio.sleep(0.2)
        network.publish(1, policy(1, chunks=2))
        await until(is_whole(store, 1))
        assert store.versions(RUN) == [1]


async def test_fetch_fails_when_no_relay_ever_gets_the_version(
    network: Network, origin: str
) -> None:
    network.publish(0, policy(0))
    network.roots[5] = network.roots[0]
    async with network.fetcher(origin, wait_s=1) as client:
        with pytest.raises(PolicyUnavailable):
            await network.fetch(client, 5)


async def test_second_version_costs_only_the_chunks_that_changed(network: Network) -> None:
    network.publish(0, policy(0))
    changed = policy(0)
    weights = bytearray(changed["model.safetensors"])
    weights[5] ^= 1
    changed["model.safetensors"] = bytes(weights)
    network.publish(1, changed)
    counting = TwistedRelay(network.origin, honest)
    async with counting.listening() as relay, network.fetcher(relay) as client:
        assert await network.fetch(client, 0) == policy(0)
        counting.asked.clear()
        assert await network.fetch(client, 1) == changed
    assert counting.chunks_asked == 1


async def test_repeated_content_is_fetched_once(network: Network) -> None:
    files = {"a": bytes(3 * CHUNK_BYTES), "b": bytes(CHUNK_BYTES), "c": b""}
    network.publish(0, files)
    counting = TwistedRelay(network.origin, honest)
    async with counting.listening() as relay, network.fetcher(relay) as client:
        assert await network.fetch(client, 0) == files
    assert counting.chunks_asked == 1


async def test_fetch_again_asks_nobody(network: Network) -> None:
    network.publish(0, policy(0))
    counting = TwistedRelay(network.origin, honest)
    async with counting.listening() as relay, network.fetcher(relay) as client:
        await network.fetch(client, 0)
        counting.asked.clear()
        await network.fetch(client, 0)
        async with network.fetcher(relay) as restarted:
            assert await network.fetch(restarted, 0) == policy(0)
    assert counting.asked == []


async def test_two_clients_sharing_a_cache_fetch_once(network: Network) -> None:
    network.publish(0, policy(0))
    counting = TwistedRelay(network.origin, honest)
    async with (
        counting.listening() as relay,
        network.fetcher(relay) as one,
        network.fetcher(relay) as two,
    ):
        await asyncio.gather(*(network.fetch(client, 0) for client in (one, two, one)))
    assert counting.chunks_asked == len(list(network_spans(network, 0)))


def network_spans(network: Network, version: int) -> set[bytes]:
    manifest = network.origin.manifest(RUN, PolicyVersion(version))
    assert manifest is not None
    return {span.digest for span in manifest.spans()}
