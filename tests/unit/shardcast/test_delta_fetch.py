"""Which way to a version takes fewer bytes, by hand-computed sums."""

import pytest

from muster.protocol.errors import PolicyUnavailable
from muster.protocol.ids import Hash32, PolicyVersion, RunId
from muster.shardcast.fetcher import MAX_CHAIN, delta_as_file, is_shorter_by_delta, parent_of
from muster.shardcast.manifest import DELTA, FULL, Manifest, ManifestDelta, ManifestFile

DIGEST = Hash32(bytes(32))
FULL_BYTES = 1000


def version(number: int, kind: str = DELTA, delta_bytes: int = 300) -> Manifest:
    """A version of 1000 bytes; 0 delta bytes mean that it has no delta."""
    delta = ManifestDelta(Hash32(bytes([number]) * 32), delta_bytes, (DIGEST,))
    return Manifest(
        run_id=RunId(1),
        version=PolicyVersion(number),
        files=(ManifestFile("f", FULL_BYTES, (DIGEST,)),),
        state_hash=DIGEST,
        stream_from=0,
        stream_to=0,
        chunk_bytes=1024,
        kind=kind,
        parent=PolicyVersion(number - 1) if delta_bytes else None,
        delta=delta if delta_bytes else None,
    )


async def shorter(newest: Manifest, *before: Manifest, held: int | None = None) -> bool:
    """Tell whether deltas are the shorter way; relays have `before`, and `held` is on disk."""
    known = {manifest.version: manifest for manifest in before}

    async def parent_manifest(manifest: Manifest) -> Manifest:
        number, _ = parent_of(manifest)
        if number not in known:
            raise PolicyUnavailable("gone")
        return known[number]

    return await is_shorter_by_delta(newest, parent_manifest, lambda m: m.parent == held)


ANCHOR = version(4, FULL)


@pytest.mark.parametrize("held", [3, 2, 1])
async def test_chain_up_to_a_held_version_is_shorter_than_an_anchor(held: int) -> None:
    # 300, 600 and 900 bytes against 1000.
    assert await shorter(ANCHOR, version(3), version(2), held=held)


async def test_anchor_is_shorter_than_a_long_chain() -> None:
    assert not await shorter(ANCHOR, version(3), version(2), version(1), held=0)


async def test_anchor_is_taken_by_who_holds_nothing() -> None:
    assert not await shorter(ANCHOR, version(3), version(2, FULL))


async def test_delta_version_is_built_on_what_is_held() -> None:
    assert await shorter(version(6), version(5), held=4)


async def test_delta_version_is_built_on_the_nearest_anchor() -> None:
    assert await shorter(version(6), version(5), ANCHOR)


async def test_delta_version_whose_parents_are_gone_is_fetched_in_full() -> None:
    assert not await shorter(version(6), version(5))


async def test_version_without_a_delta_is_fetched_in_full() -> None:
    assert not await shorter(version(1, FULL, delta_bytes=0), held=0)


async def test_endless_chain_is_given_up() -> None:
    first = MAX_CHAIN + 9
    chain = [version(number) for number in range(1, first)]
    assert not await shorter(version(first), *chain, held=0)
    assert await shorter(version(first), *chain, held=first - MAX_CHAIN)


def test_delta_as_file_has_the_deltas_chunks() -> None:
    (span,) = delta_as_file(version(2)).spans()
    assert (span.digest, span.name, span.size) == (DIGEST, "delta", 300)


def test_version_without_a_delta_has_no_parent() -> None:
    for ask in (parent_of, delta_as_file):
        with pytest.raises(PolicyUnavailable, match="has no delta"):
            ask(version(1, FULL, delta_bytes=0))
