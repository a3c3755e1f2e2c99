"""Relays, upstreams and trainers that lie: nothing wrong is ever kept, served or believed."""

import asyncio
import json
from pathlib import Path

import pytest
from shardcast_network import (
    KEY,
    OTHER_KEY,
    RUN,
    Network,
    Twist,
    TwistedRelay,
    answers,
    honest,
    is_whole,
    policy,
    until,
)

from muster.protocol.eip712 import address_of
from muster.protocol.encoding import canonical_json, keccak
from muster.protocol.errors import PolicyUnavailable
from muster.protocol.ids import Hash32, PolicyVersion
from muster.shardcast import ChunkStore, Relay, ShardServer


def is_chunk(path: str) -> bool:
    return path.startswith("/v1/chunks/")


async def flip_bit(path: str, answer: bytes | None) -> bytes | None:
    if not is_chunk(path) or answer is None:
        return answer
    return bytes([answer[0] ^ 1]) + answer[1:]


async def truncate(path: str, answer: bytes | None) -> bytes | None:
    return answer[:-1] if is_chunk(path) and answer else answer


async def lengthen(path: str, answer: bytes | None) -> bytes | None:
    return answer + b"!" if is_chunk(path) and answer else answer


async def zero(path: str, answer: bytes | None) -> bytes | None:
    return bytes(len(answer)) if is_chunk(path) and answer else answer


LIES = [
    flip_bit,
    truncate,
    lengthen,
    zero,
    pytest.param(answers("/manifest", b" " * (2 << 20)), id="oversized_manifest"),
    pytest.param(answers("/manifest", b'{"files": []}'), id="garbage_manifest"),
]


@pytest.mark.parametrize("lie", LIES)
async def test_fetch_takes_the_truth_from_the_other_relay(
    network: Network, origin: str, lie: Twist, caplog: pytest.LogCaptureFixture
) -> None:
    network.publish(0, policy(0, chunks=20))
    liar = TwistedRelay(network.origin, lie)
    async with liar.listening() as lying, network.fetcher(lying, origin) as client:
        assert await network.fetch(client, 0) == policy(0, chunks=20)
    assert {vars(r)["relay"] for r in caplog.records if "wrong bytes" in r.message} <= {lying}


@pytest.mark.parametrize("lie", [flip_bit, truncate, lengthen, zero])
async def test_relay_that_sent_a_wrong_chunk_is_not_asked_again(
    network: Network, origin: str, lie: Twist
) -> None:
    network.publish(0, policy(0, chunks=40))
    liar = TwistedRelay(network.origin, lie)
    async with liar.listening() as lying, network.fetcher(lying, origin, parallel=3) as client:
        await network.fetch(client, 0)
    assert 1 <= liar.chunks_asked <= 3


@pytest.mark.parametrize("lie", LIES)
async def test_fetch_fails_when_the_only_relay_lies(network: Network, lie: Twist) -> None:
    network.publish(0, policy(0))
    liar = TwistedRelay(network.origin, lie)
    async with liar.listening() as lying, network.fetcher(lying) as client:
        with pytest.raises(PolicyUnavailable, match="no relay delivers"):
            await network.fetch(client, 0)
    assert not (network.folder / "client" / str(RUN) / "v0").exists()


@pytest.mark.parametrize("lie", LIES)
async def test_relay_mirrors_the_truth_from_the_other_upstream(
    network: Network, origin: str, lie: Twist
) -> None:
    network.publish(0, policy(0, chunks=20))
    liar = TwistedRelay(network.origin, lie)
    async with liar.listening() as lying, network.relay(lying, origin) as (_, store):
        await until(is_whole(store, 0))
    assert store.manifest_bytes(RUN, PolicyVersion(0)) == network.origin.manifest_bytes(
        RUN, PolicyVersion(0)
    )


async def test_stale_manifest_is_not_believed(network: Network, origin: str) -> None:
    network.publish(1, policy(1))
    network.publish(2, policy(2))

    stale = answers(f"/v1/{RUN}/2/manifest", manifest_bytes(network, 1))
    async with (
        TwistedRelay(network.origin, stale).listening() as lying,
        network.fetcher(lying, origin) as client,
        network.fetcher(lying, name="other") as lost,
    ):
        assert await network.fetch(client, 2) == policy(2)
        with pytest.raises(PolicyUnavailable):
            await network.fetch(lost, 2)


async def test_manifest_of_another_version_is_refused_even_with_the_chains_root(
    network: Network, origin: str
) -> None:
    network.publish(1, policy(1))
    network.roots[2] = network.roots[1]

    swap = answers("manifest", manifest_bytes(network, 1))
    async with (
        TwistedRelay(network.origin, swap).listening() as relay,
        network.fetcher(relay) as client,
    ):
        with pytest.raises(PolicyUnavailable, match="published as run 1 version 2 says"):
            await network.fetch(client, 2)


def manifest_bytes(network: Network, version: int) -> bytes:
    """The origin's manifest of a version."""
    data = network.origin.manifest_bytes(RUN, PolicyVersion(version))
    assert data is not None
    return data


def publish_forged(network: Network, **changes: object) -> Twist:
    """Publish version 0 with a manifest that no publisher would write; returns its server."""
    network.publish(0, policy(0))
    data = canonical_json({**json.loads(manifest_bytes(network, 0)), **changes})
    network.roots[0] = keccak(data)
    return answers("manifest", data)


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "..", ".evil", "a/b", "a\0b"])
async def test_name_that_leaves_the_folder_is_refused_even_when_the_trainer_signed_it(
    network: Network, name: str
) -> None:
    network.publish(0, policy(0))
    files = json.loads(manifest_bytes(network, 0))["files"]
    forge = publish_forged(network, files=[{**files[0], "name": name}, *files[1:]])
    before = set(network.folder.rglob("*evil*"))
    async with (
        TwistedRelay(network.origin, forge).listening() as relay,
        network.fetcher(relay) as client,
    ):
        with pytest.raises(PolicyUnavailable, match="malformed"):
            await network.fetch(client, 0)
    assert set(network.folder.rglob("*evil*")) == before


async def test_state_hash_that_the_files_do_not_have_is_refused(network: Network) -> None:
    forge = publish_forged(network, state_hash="00" * 32)
    async with (
        TwistedRelay(network.origin, forge).listening() as relay,
        network.fetcher(relay) as client,
    ):
        with pytest.raises(PolicyUnavailable, match="state hash"):
            await network.fetch(client, 0)
    assert list((network.folder / "client" / str(RUN)).glob("*v0")) == []


async def test_relay_refuses_a_signature_by_another_key(network: Network, origin: str) -> None:
    network.trainer = address_of(KEY)
    network.publish(0, policy(0), key=OTHER_KEY)
    network.publish(1, policy(1))
    async with network.relay(origin) as (_, store):
        await until(is_whole(store, 1))
        await asyncio.sleep(0.2)
        assert store.versions(RUN) == [1]


@pytest.mark.parametrize("signature", [b"", b"x", bytes(65), bytes(66)])
async def test_relay_refuses_a_malformed_signature(network: Network, signature: bytes) -> None:
    network.publish(0, policy(0))
    liar = TwistedRelay(network.origin, answers("signature", signature))
    async with liar.listening() as upstream, network.relay(upstream) as (_, store):
        await until(lambda: any("signature" in path for path in liar.asked))
        await asyncio.sleep(0.1)
        assert store.versions(RUN) == []
        assert liar.chunks_asked == 0


async def test_relay_refuses_a_root_that_is_not_the_chains(network: Network, origin: str) -> None:
    network.publish(0, policy(0))
    network.roots[0] = Hash32(bytes(32))
    async with network.relay(origin) as (_, store):
        await asyncio.sleep(0.3)
        assert store.stored_versions(RUN) == []
        assert list((store.folder / "chunks").iterdir()) == []


async def test_relay_drops_a_version_of_which_the_chain_has_another_root(
    network: Network, origin: str
) -> None:
    network.publish(0, policy(0))
    network.publish(1, policy(1))
    async with network.relay(origin) as (_, store):
        await until(is_whole(store, 0))
        await until(is_whole(store, 1))
    network.roots[1] = network.roots[0]
    await Relay([origin], store, run_id=RUN, trust=network.trust).recheck()
    assert store.versions(RUN) == [0]


@pytest.mark.parametrize(
    "listing",
    [
        b"",
        b"null",
        b'{"versions": 5}',
        b'{"versions": [null, "1", -1, 1.5, true]}',
        b"[" * 50_000,
        json.dumps({"versions": list(range(4_000_000_000, 4_000_000_060))}).encode(),
        b" " * 100_000,
    ],
)
async def test_relay_survives_a_listing_that_makes_no_sense(
    network: Network, origin: str, listing: bytes
) -> None:
    network.publish(0, policy(0))
    liar = TwistedRelay(network.origin, answers("versions", listing))
    async with liar.listening() as lying, network.relay(lying, origin) as (_, store):
        await until(is_whole(store, 0))
        assert len(liar.asked) < 100


async def test_relay_asks_a_waitless_upstream_no_more_often_than_it_may(network: Network) -> None:
    network.publish(0, policy(0, chunks=1))
    counting = TwistedRelay(network.origin, honest)
    async with counting.listening() as upstream, network.relay(upstream) as (_, store):
        await until(is_whole(store, 0))
        counting.asked.clear()
        await asyncio.sleep(0.5)
    assert len(counting.asked) <= 0.5 / 0.05 + 2


async def test_client_with_another_chains_cache_fetches_the_right_files(
    network: Network, tmp_path: Path
) -> None:
    network.publish(0, policy(0))
    async with ShardServer(network.origin) as server, network.fetcher(server.url) as client:
        assert await network.fetch(client, 0) == policy(0)
    elsewhere = ChunkStore(tmp_path / "elsewhere")
    network.publish(0, policy(99), store=elsewhere)
    async with ShardServer(elsewhere) as server, network.fetcher(server.url) as client:
        assert await network.fetch(client, 0) == policy(99)
