"""Deltas between origin, relays and clients: the cheapest way is taken, a bad delta is survived."""

import asyncio
import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any, BinaryIO

import pytest
from shardcast_network import RUN, Network, TwistedRelay, answers, honest, is_whole, until

from muster.protocol.errors import PolicyUnavailable
from muster.protocol.ids import Hash32, PolicyVersion
from muster.shardcast import Fetcher, Manifest, ShardServer, delta
from muster.shardcast.delta import States, write_delta
from muster.shardcast.manifest import ManifestFile

Files = Mapping[str, Path]

ANCHOR_EVERY = 4
FLOATS = 100_000


def model(weights: bytes | bytearray) -> dict[str, bytes]:
    """A model of one tensor of bfloat16."""
    entry = {"dtype": "BF16", "shape": [len(weights) // 2], "data_offsets": [0, len(weights)]}
    header = json.dumps({"w": entry}).encode()
    head = len(header).to_bytes(8, "little") + header
    return {"config.json": b"{}", "model.safetensors": head + weights}


def trained(versions: int) -> list[dict[str, bytes]]:
    """A model's versions, each with one bfloat16 weight in fifty moved by one step."""
    rng = Random(1)
    weights = bytearray(0x3C10.to_bytes(2, "little") * FLOATS)
    made = []
    for _ in range(versions):
        made.append(model(weights))
        for i in rng.sample(range(FLOATS), FLOATS // 50):
            weights[2 * i] = (weights[2 * i] + 1) % 256
    return made


VERSIONS = trained(8)


def publish(network: Network, *versions: int) -> list[Manifest]:
    return [network.publish(v, VERSIONS[v], anchor_every=ANCHOR_EVERY) for v in versions]


async def bytes_fetched(network: Network, fetcher: Fetcher, version: int) -> int:
    """Fetch a version; returns how many bytes its own fetch announced, its parents' left out."""
    announced = 0

    def progress(_held: int, total: int) -> None:
        nonlocal announced
        announced = total

    async with asyncio.timeout(180):
        await fetcher.fetch(RUN, PolicyVersion(version), network.roots[version], progress=progress)
    assert await network.fetch(fetcher, version) == VERSIONS[version]
    return announced


async def test_next_version_arrives_as_a_delta_through_relays(
    network: Network, origin: str
) -> None:
    publish(network, 0)
    async with (
        network.relay(origin, name="near") as (near, _),
        network.relay(near, name="far") as (far, store),
        network.fetcher(far) as client,
    ):
        assert await network.fetch(client, 0) == VERSIONS[0]
        (manifest,) = publish(network, 1)
        assert await network.fetch(client, 1) == VERSIONS[1]
        await until(is_whole(store, 1))
        held = {span.digest for span in manifest.spans() if store.find(span.digest)}
        weights = {span.digest for span in manifest.spans() if span.size > 2}
        assert not held & weights


async def test_late_joiner_starts_at_the_anchor(network: Network, origin: str) -> None:
    publish(network, 0, 1, 2, 3, 4, 5, 6)
    async with network.relay(origin) as (relay, store), network.fetcher(relay) as client:
        await until(lambda: all(is_whole(store, v)() for v in (2, 3, 4, 5, 6)))
        assert await network.fetch(client, 6) == VERSIONS[6]
        assert not (network.folder / "client/1/v3").exists()


async def test_relay_that_joins_late_mirrors_back_to_the_anchor(
    network: Network, origin: str
) -> None:
    publish(network, 0, 1, 2, 3)
    async with network.relay(origin) as (_, store):
        store.keep = 1
        await until(lambda: all(is_whole(store, v)() for v in (0, 1, 2, 3)))
        assert store.wanted_parents(RUN) == []


async def test_client_several_versions_behind_takes_the_chain(
    network: Network, origin: str
) -> None:
    manifests = publish(network, 0, 1, 2, 3, 4, 5)
    async with network.fetcher(origin) as client:
        assert await network.fetch(client, 1) == VERSIONS[1]
        fetched = await bytes_fetched(network, client, 5)
        assert manifests[5].delta is not None
        assert fetched == manifests[5].delta.size
        assert (network.folder / "client/1/v3").exists()


async def test_anchor_is_fetched_as_a_delta_by_who_has_its_parent(
    network: Network, origin: str
) -> None:
    manifests = publish(network, 0, 1, 2, 3, 4)
    async with network.fetcher(origin) as old, network.fetcher(origin, name="new") as new:
        assert await network.fetch(old, 3) == VERSIONS[3]
        assert manifests[4].delta is not None
        assert await bytes_fetched(network, old, 4) == manifests[4].delta.size
        assert await bytes_fetched(network, new, 4) == manifests[4].total_bytes


async def test_anchor_is_fetched_at_once_when_its_parents_are_gone(network: Network) -> None:
    manifests = publish(network, 0, 1, 2, 3, 4)
    for version in (0, 1, 2, 3):
        network.origin.remove(RUN, PolicyVersion(version))
    async with (
        ShardServer(network.origin) as server,
        network.fetcher(server.url, wait_s=600) as client,
        asyncio.timeout(180),
    ):
        assert await bytes_fetched(network, client, 4) == manifests[4].total_bytes


async def test_files_are_fetched_when_the_delta_cannot_be_had(network: Network) -> None:
    manifests = publish(network, 0, 1)
    lost = manifests[1].delta_spans()[0].digest.hex()
    relay = TwistedRelay(network.origin, answers(lost, None))
    async with relay.listening() as url, network.fetcher(url, attempts=2) as client:
        assert await network.fetch(client, 0) == VERSIONS[0]
        assert await network.fetch(client, 1) == VERSIONS[1]


async def test_damaged_base_does_not_spoil_the_next_version(network: Network, origin: str) -> None:
    publish(network, 0, 1)
    async with network.fetcher(origin) as client:
        assert await network.fetch(client, 0) == VERSIONS[0]
        weights = network.folder / "client/1/v0/model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"!")
        assert await network.fetch(client, 1) == VERSIONS[1]


async def test_damaged_base_is_mended_where_only_deltas_are_carried(
    network: Network, origin: str
) -> None:
    publish(network, 0, 1)
    async with network.relay(origin) as (relay, store):
        await until(lambda: is_whole(store, 0)() and is_whole(store, 1)())
        async with network.fetcher(relay, attempts=1) as client:
            assert await network.fetch(client, 0) == VERSIONS[0]
            weights = network.folder / "client/1/v0/model.safetensors"
            weights.write_bytes(weights.read_bytes()[:-1] + b"!")
            with pytest.raises(PolicyUnavailable):
                await network.fetch(client, 1)
            assert await network.fetch(client, 1) == VERSIONS[1]


@pytest.mark.parametrize("forged", ["base", "content"])
async def test_wrong_delta_of_the_trainer_is_refused_and_the_files_are_fetched(
    network: Network,
    origin: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    forged: str,
) -> None:
    def write(
        target: BinaryIO, files: Files, parent: Files, *, states: States, max_bytes: int
    ) -> bool:
        if forged == "base":
            states = states._replace(parent=states.made)
        else:
            files = {**parent}
        return write_delta(target, files, parent, states=states, max_bytes=max_bytes)

    publish(network, 0)
    monkeypatch.setattr(delta, "write_delta", write)
    publish(network, 1)
    async with network.fetcher(origin) as client:
        assert await network.fetch(client, 0) == VERSIONS[0]
        assert await network.fetch(client, 1) == VERSIONS[1]
    causes = [str(getattr(record, "cause", "")) for record in caplog.records]
    expected = {"base": "against another version", "content": "other files than promised"}
    assert any(expected[forged] in cause for cause in causes)


async def test_interrupted_delta_goes_on_from_what_is_held(network: Network) -> None:
    publish(network, 0, 1)
    relay = TwistedRelay(network.origin, honest)
    async with relay.listening() as url, network.fetcher(url) as client:
        assert await network.fetch(client, 0) == VERSIONS[0]
        delta = network.origin.manifest(RUN, PolicyVersion(1))
        assert delta is not None
        held = network.folder / "client/1/.v1.delta"
        held.mkdir()
        chunks = [network.origin.find(span.digest) for span in delta.delta_spans()]
        (held / "delta").write_bytes(b"".join(chunk.read() for chunk in chunks if chunk))
        before = relay.chunks_asked
        assert await network.fetch(client, 1) == VERSIONS[1]
        assert relay.chunks_asked == before
        assert not held.exists()


async def test_cancelled_delta_goes_on_from_what_had_arrived(network: Network) -> None:
    before, made = (
        model(b"".join(bytes((0x10 + (b & 1), 0x3C)) for b in Random(seed).randbytes(4 * FLOATS)))
        for seed in (1, 2)
    )
    network.publish(0, before, anchor_every=ANCHOR_EVERY)
    manifest = network.publish(1, made, anchor_every=ANCHOR_EVERY)
    chunks = {f"/v1/chunks/{span.digest.hex()}" for span in manifest.delta_spans()}
    assert len(chunks) > 1
    is_asked = asyncio.Event()

    async def hangs(path: str, answer: bytes | None) -> bytes | None:
        if chunks <= set(relay.asked):
            is_asked.set()
            await asyncio.Event().wait()
        return answer

    relay = TwistedRelay(network.origin, hangs)
    async with relay.listening() as url, network.fetcher(url, parallel=1) as client:
        assert await network.fetch(client, 0) == before
        fetching = asyncio.create_task(network.fetch(client, 1))
        async with asyncio.timeout(180):
            await is_asked.wait()
        fetching.cancel()
        await asyncio.gather(fetching, return_exceptions=True)
        relay.twist, relay.asked = honest, []
        assert await network.fetch(client, 1) == made
        assert relay.chunks_asked == 1
    assert not (network.folder / "client/1/.v1.delta").exists()


def only_its_delta(manifest: Manifest, **changes: Any) -> Manifest:
    """The manifest that a trainer signs without carrying files."""
    return dataclasses.replace(manifest, kind="delta", **changes)


async def fetch_forged(network: Network, forge: Callable[[Manifest], Manifest]) -> list[str]:
    """Fetch version 0, and version 1 as the trainer forged it; returns what lies beside it."""
    publish(network, 0, 1)
    manifest = network.origin.manifest(RUN, PolicyVersion(1))
    assert manifest is not None
    forged = forge(manifest)
    network.roots[1] = forged.root()
    swap = answers(f"/v1/{RUN}/1/manifest", forged.to_bytes())
    relay = TwistedRelay(network.origin, swap)
    async with relay.listening() as url, network.fetcher(url, attempts=1) as client:
        assert await network.fetch(client, 0) == VERSIONS[0]
        with pytest.raises(PolicyUnavailable):
            await network.fetch(client, 1)
        assert await network.fetch(client, 0) == VERSIONS[0]
    return sorted(p.name for p in (network.folder / "client/1").iterdir() if ".lock" not in p.name)


async def test_delta_of_a_version_that_outgrows_its_parent_writes_nothing(network: Network) -> None:
    def bomb(manifest: Manifest) -> Manifest:
        size = 1 << 33
        chunks = (manifest.files[-1].chunks[0],) * (size // (32 << 20))
        vast = ManifestFile("z.bin", size, chunks)
        small = [ManifestFile(f.name, f.size, f.chunks[:1]) for f in manifest.files]
        delta = manifest.delta
        assert delta is not None
        return only_its_delta(
            manifest,
            files=(*small, vast),
            chunk_bytes=32 << 20,
            delta=dataclasses.replace(delta, chunks=delta.chunks[:1]),
        )

    assert await fetch_forged(network, bomb) == ["v0", "v0.manifest"]


async def test_delta_with_a_wrong_state_hash_leaves_nothing(network: Network) -> None:
    def lie(manifest: Manifest) -> Manifest:
        return only_its_delta(manifest, state_hash=Hash32(bytes(32)))

    assert await fetch_forged(network, lie) == ["v0", "v0.manifest"]


async def test_leftovers_of_a_crash_go_when_their_version_is_too_old(network: Network) -> None:
    publish(network, *range(2, 8))
    folder = network.folder / "client/1"
    for name in (".v0.part", ".v1.delta", ".v99.part"):
        (folder / name).mkdir(parents=True)
    relay = TwistedRelay(network.origin, honest)
    async with relay.listening() as url, network.fetcher(url) as client:
        for version in range(3, 8):
            await network.fetch(client, version)
    assert sorted(p.name for p in folder.iterdir() if p.suffix in (".part", ".delta")) == [
        ".v99.part"
    ]
