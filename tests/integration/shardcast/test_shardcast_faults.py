"""Faults of relays and clients without a file of their own; docs/shardcast.md lists all."""

import asyncio
import logging
from random import Random

import httpx
import pytest
from shardcast_network import (
    KEY,
    OTHER_KEY,
    RUN,
    Network,
    TwistedRelay,
    answers,
    honest,
    is_whole,
    policy,
    until,
)

from muster.protocol.eip712 import address_of
from muster.protocol.encoding import keccak
from muster.protocol.errors import ConfigError, PolicyUnavailable
from muster.protocol.ids import Hash32, PolicyVersion
from muster.shardcast import ChunkStore, Fetcher, Relay, ServerLimits, ShardServer, fetch, publish
from muster.shardcast.http_client import Connection
from muster.shardcast.trust import trust_signer

BIG = Random(7).randbytes(3 << 20)
"""Received in a thread, through several buffers."""


def publish_big(network: Network, store: ChunkStore | None = None) -> Hash32:
    """Publish one chunk of 3 MiB as version 0 by signature alone; returns its root."""
    source = network.folder / "big.bin"
    source.write_bytes(BIG)
    manifest = publish([source], store or network.origin, key=KEY, run_id=RUN)
    network.roots[manifest.version] = manifest.root()
    return manifest.root()


# A shard that nobody has


async def test_chunk_missing_everywhere_ends_the_fetch_in_bounded_time(network: Network) -> None:
    manifest = network.publish(0, policy(0))
    lost = f"/v1/chunks/{list(manifest.spans())[3].digest.hex()}"
    relays = [TwistedRelay(network.origin, answers(lost, None)) for _ in range(2)]
    async with (
        relays[0].listening() as first,
        relays[1].listening() as second,
        network.fetcher(first, second, attempts=3) as client,
    ):
        with pytest.raises(PolicyUnavailable, match="no relay delivers run 1 version 0"):
            await network.fetch(client, 0)
    # A relay is given up after three failures in a row; other chunks may come in between.
    assert sum(r.asked.count(lost) for r in relays) <= 2 * 3 + 9
    assert not (network.folder / "client" / str(RUN) / "v0").exists()


# All relays dead; the reserve


async def test_origin_is_asked_only_when_every_relay_is_dead(network: Network) -> None:
    network.publish(0, policy(0))
    counting = TwistedRelay(network.origin, honest)
    async with counting.listening() as reserve, network.relay(reserve) as (relay, store):
        await until(is_whole(store, 0))
        counting.asked.clear()
        async with Fetcher([relay], network.folder / "a", reserve=[reserve]) as client:
            assert await network.fetch(client, 0) == policy(0)
        assert [path for path in counting.asked if "chunks" in path] == []
    async with (
        counting.listening() as reserve,
        Fetcher([relay], network.folder / "b", reserve=[reserve], attempts=2) as client,
    ):
        assert await network.fetch(client, 0) == policy(0)


async def test_dead_relays_without_reserve_are_named_as_the_cause(network: Network) -> None:
    network.publish(0, policy(0))
    async with network.fetcher("http://127.0.0.1:1", "http://127.0.0.1:2", attempts=2) as client:
        with pytest.raises(PolicyUnavailable, match="no relay delivers") as caught:
            await network.fetch(client, 0)
    assert (
        caught.value.hint
        == "relays keep the newest versions; check that the relays are running and reach the origin"
    )


@pytest.mark.parametrize("is_replaced", [True, False])
async def test_relays_are_asked_that_replaced_dead_ones(
    network: Network, origin: str, is_replaced: bool
) -> None:
    network.publish(0, policy(0))
    dead = "http://127.0.0.1:1"

    async def renewed() -> list[str]:
        return [origin] if is_replaced else [dead]

    async with Fetcher([dead], network.folder / "c", attempts=2, renewed=renewed) as client:
        if is_replaced:
            assert await network.fetch(client, 0) == policy(0)
        else:
            with pytest.raises(PolicyUnavailable, match="no relay delivers"):
                await network.fetch(client, 0)


async def test_running_fetch_goes_on_at_a_relay_that_came_later(
    network: Network, origin: str
) -> None:
    network.publish(0, policy(0, chunks=20))
    stalled = asyncio.Event()

    async def stall(path: str, answer: bytes | None) -> bytes | None:
        if path.startswith("/v1/chunks/") and slow.chunks_asked > 5:
            stalled.set()
            await asyncio.Event().wait()
        return answer

    slow = TwistedRelay(network.origin, stall)

    async def renewed() -> list[str]:
        return [origin]

    async with (
        slow.listening() as relay,
        Fetcher([relay], network.folder / "c", renewed=renewed) as client,
    ):
        fetching = asyncio.create_task(network.fetch(client, 0))
        await stalled.wait()
        assert await client.renew()
        assert await fetching == policy(0, chunks=20)
        assert not await client.renew()


async def test_relay_that_dies_while_chunks_arrive_leaves_the_rest_to_the_origin(
    network: Network, origin: str
) -> None:
    network.publish(0, policy(0, chunks=20))
    dying = TwistedRelay(network.origin, honest)

    async def die(path: str, answer: bytes | None) -> bytes | None:
        dying.cut_after = 100 if dying.chunks_asked > 5 else None
        return answer

    dying.twist = die
    async with (
        dying.listening() as relay,
        Fetcher([relay], network.folder / "c", reserve=[origin], attempts=3) as client,
    ):
        assert await network.fetch(client, 0) == policy(0, chunks=20)


# Many clients, one origin


async def test_each_chunk_leaves_the_origin_once_however_many_clients(network: Network) -> None:
    manifest = network.publish(0, policy(0, chunks=16))
    counting = TwistedRelay(network.origin, honest)
    async with counting.listening() as upstream, network.relay(upstream) as (relay, _):
        fetchers = [
            Fetcher([relay], network.folder / f"c{i}", rng=Random(i), reserve=[upstream])
            for i in range(8)
        ]
        folders = await asyncio.gather(
            *(f.fetch(RUN, PolicyVersion(0), manifest.root()) for f in fetchers)
        )
        await asyncio.gather(*(f.close() for f in fetchers))
    assert len(folders) == 8
    assert counting.chunks_asked == len({span.digest for span in manifest.spans()})


# Root mismatch


async def test_relay_goes_on_serving_the_last_good_version_when_the_next_is_not_the_chains(
    network: Network, origin: str
) -> None:
    network.publish(0, policy(0))
    async with network.relay(origin) as (relay, store), network.fetcher(relay) as client:
        await until(is_whole(store, 0))
        network.publish(1, policy(1), anchor=False)
        network.roots[1] = keccak(b"another manifest")
        async with httpx.AsyncClient(base_url=relay) as http:
            answer = await http.get(f"/v1/{RUN}/1/manifest?wait=1")
            listed = await http.get(f"/v1/{RUN}/versions")
        assert answer.status_code == 404
        assert listed.json() == {"versions": [0]}
        assert await network.fetch(client, 0) == policy(0)


# Signature alone


async def test_version_is_fetched_through_a_relay_by_signature_alone(network: Network) -> None:
    root = publish_big(network)
    store = ChunkStore(network.folder / "relay")
    async with ShardServer(network.origin) as origin:
        mirror = Relay([origin.url], store, run_id=RUN, trust=trust_signer(address_of(KEY)))
        async with ShardServer(store, wanted=mirror.wanted) as relay:
            task = asyncio.create_task(mirror.run())
            folder = await fetch([relay.url], network.folder / "c", signer=address_of(KEY))
            await mirror.recheck()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    assert (folder / "big.bin").read_bytes() == BIG
    assert store.manifest(RUN, PolicyVersion(0)).root() == root  # type: ignore[union-attr]


async def test_version_signed_by_another_is_refused(network: Network, origin: str) -> None:
    publish_big(network)
    stranger = address_of(OTHER_KEY)
    with pytest.raises(PolicyUnavailable, match="that the signer signed"):
        await fetch([origin], network.folder / "c", signer=stranger, wait_s=0)
    store = ChunkStore(network.folder / "relay")
    publish_big(network, store)
    await Relay([origin], store, run_id=RUN, trust=trust_signer(stranger)).recheck()
    assert store.stored_versions(RUN) == []


async def test_fetch_by_root_takes_that_version_and_no_other(network: Network, origin: str) -> None:
    root = publish_big(network)
    first = PolicyVersion(0)
    folder = await fetch([origin], network.folder / "c", root=root, version=first)
    assert (folder / "big.bin").read_bytes() == BIG
    with pytest.raises(PolicyUnavailable):
        await fetch([origin], network.folder / "d", root=keccak(b""), version=first, wait_s=0)


@pytest.mark.parametrize(
    "trust", [{}, {"root": keccak(b"")}, {"signer": address_of(KEY), "root": keccak(b"")}]
)
async def test_fetch_demands_to_know_whom_to_trust(
    network: Network, trust: dict[str, Hash32]
) -> None:
    with pytest.raises(ConfigError, match="a signer is missing"):
        await fetch(["http://a"], network.folder, **trust)  # type: ignore[arg-type]


async def test_fetch_says_when_there_is_no_version(network: Network, origin: str) -> None:
    with pytest.raises(PolicyUnavailable, match="no relay offers a version of run 1"):
        await fetch([origin], network.folder / "c", signer=address_of(KEY), wait_s=0)


# The thread that receives


async def test_cancelled_fetch_ends_its_receiving_thread_at_once(network: Network) -> None:
    publish_big(network)
    stalled = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while path := (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1].decode():
            answer = TwistedRelay(network.origin, honest).honest_answer(path) or b""
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer))
            if "chunks" in path:
                writer.write(answer[: len(answer) // 2])
                stalled.set()
                break
            writer.write(answer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with asyncio.timeout(10), network.fetcher(url) as client:
        fetching = asyncio.create_task(network.fetch(client, 0))
        await stalled.wait()
        fetching.cancel()
        await asyncio.gather(fetching, return_exceptions=True)
    server.close()


async def test_chunk_that_breaks_off_in_a_thread_is_fetched_elsewhere(
    network: Network, origin: str
) -> None:
    publish_big(network)
    cutting = TwistedRelay(network.origin, honest)
    cutting.cut_after = len(BIG) // 2
    async with cutting.listening() as relay, network.fetcher(relay, origin) as client:
        assert await network.fetch(client, 0) == {"big.bin": BIG}


async def test_bit_flipped_in_a_large_chunk_is_blamed(
    network: Network, origin: str, caplog: pytest.LogCaptureFixture
) -> None:
    publish_big(network)

    async def flip(path: str, answer: bytes | None) -> bytes | None:
        return answer[:-1] + bytes([answer[-1] ^ 1]) if "chunks" in path and answer else answer

    lying = TwistedRelay(network.origin, flip)
    async with (
        lying.listening() as relay,
        Fetcher([relay], network.folder / "c", reserve=[origin]) as client,
    ):
        with caplog.at_level(logging.WARNING):
            assert await network.fetch(client, 0) == {"big.bin": BIG}
        assert [vars(r)["relay"] for r in caplog.records] == [relay]


async def test_encrypted_connection_is_received_in_the_event_loop(
    network: Network, origin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_big(network)
    monkeypatch.setattr(Connection, "take_over", lambda _: None)
    async with network.fetcher(origin) as client:
        assert await network.fetch(client, 0) == {"big.bin": BIG}


# Progress


async def test_progress_counts_verified_bytes_up_to_all_of_them(
    network: Network, origin: str
) -> None:
    manifest = network.publish(0, {**policy(0), "copy": policy(0)["model.safetensors"]})
    seen: list[tuple[int, int]] = []
    async with network.fetcher(origin) as client:
        await client.fetch(
            RUN,
            PolicyVersion(0),
            manifest.root(),
            progress=lambda held, total: seen.append((held, total)),
        )
    held = [done for done, _ in seen]
    assert held[0] == 0
    assert held == sorted(held)
    assert seen[-1] == (manifest.total_bytes, manifest.total_bytes)


# Slow readers


async def test_slow_reader_is_served_by_the_event_loop_and_gets_every_byte(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muster.shardcast.connections.THREAD_S", 0.0)
    publish_big(network)
    digest = network.origin.manifest(RUN, PolicyVersion(0)).files[0].chunks[0]  # type: ignore[union-attr]
    async with ShardServer(network.origin, limits=ServerLimits(send_s=10)) as server:
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=4096)
        writer.write(b"GET /v1/chunks/%s HTTP/1.1\r\nHost: x\r\n\r\n" % digest.hex().encode())
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(len(BIG)) == BIG
        writer.close()
