"""Publishing deltas: which versions get one, the broadcast, and how long files are kept."""

import os
import random
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from delta_tensors import applied, sizes_of, trained
from shardcast_policies import (
    CHUNK_BYTES,
    RUN,
    SIGNATURE,
    delta_of,
    fill,
    publish,
    publish_paths,
    read_back,
)

from muster.protocol.errors import StorageError
from muster.protocol.ids import PolicyVersion, RunId
from muster.shardcast import ChunkStore, Manifest
from muster.shardcast.manifest import MAX_MANIFEST_BYTES

VERSIONS = trained(14)


def make_store(path: Path, *, keep: int = 5) -> ChunkStore:
    return ChunkStore(path / "store", keep=keep)


def publish_all(store: ChunkStore, upto: int, *, anchor_every: int = 4) -> list[Manifest]:
    """Publish versions 0 to `upto`."""
    return [publish(store, VERSIONS[v], v, anchor_every=anchor_every) for v in range(upto + 1)]


def stored_names(store: ChunkStore, version: int) -> set[str]:
    return {path.name for path in (store.folder / f"runs/{RUN}/{version}/files").iterdir()}


def test_versions_between_anchors_are_broadcast_as_deltas(tmp_path: Path) -> None:
    manifests = publish_all(make_store(tmp_path), 5)
    assert [m.kind for m in manifests] == ["full", "delta", "delta", "delta", "full", "delta"]
    assert [m.parent for m in manifests] == [None, 0, 1, 2, 3, 4]
    roots = [m.delta and m.delta.parent_root for m in manifests[1:]]
    assert roots == [m.root() for m in manifests[:-1]]
    assert manifests[1].broadcast_bytes < manifests[1].total_bytes / 10
    assert manifests[4].broadcast_bytes > manifests[4].total_bytes


def test_delta_in_the_store_makes_the_published_files(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    manifests = publish_all(store, 4)
    for version in (1, 4):
        fresh, delta = VERSIONS[version], delta_of(store, manifests[version])
        before, after = manifests[version - 1 : version + 1]
        assert delta[8:72] == before.state_hash + after.state_hash
        assert applied(tmp_path, VERSIONS[version - 1], delta, sizes_of(fresh)) == fresh


def test_no_delta_is_made_unless_asked(tmp_path: Path) -> None:
    assert [m.delta for m in publish_all(make_store(tmp_path), 2, anchor_every=0)] == [None] * 3


def test_version_that_changed_too_much_is_an_anchor(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    publish_all(store, 1)
    manifest = publish(store, trained(1, floats=6000)[0], 2, anchor_every=4)
    assert (manifest.kind, manifest.delta) == ("full", None)
    assert stored_names(store, 2) == set(VERSIONS[2])


def test_version_without_its_parent_is_an_anchor(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    publish_all(store, 1)
    assert publish(store, VERSIONS[3], 3, anchor_every=4).delta is None


@pytest.mark.parametrize(("changed", "parent"), [(0.45, None), (0.2, 1)])
def test_delta_that_would_not_fit_into_the_manifest_is_dropped(
    tmp_path: Path, changed: float, parent: int | None
) -> None:
    store, most = make_store(tmp_path), MAX_MANIFEST_BYTES // 67  # a chunk takes 67 bytes
    old = random.Random(1).randbytes(most * 3 // 4 * CHUNK_BYTES)
    same = old[int(changed * len(old)) :]
    publish(store, {"w": old}, 1)
    fresh = random.Random(2).randbytes(len(old) - len(same)) + same
    manifest = publish(store, {"w": fresh}, 2, anchor_every=8)
    assert manifest.parent == parent
    assert (".delta" in stored_names(store, 2)) == (parent is not None)


def test_parent_that_is_not_as_published_is_not_built_upon(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    publish_all(store, 1)
    damaged = store.folder / f"runs/{RUN}/1/files/config.json"
    damaged.write_bytes(b"[]")
    assert publish(store, VERSIONS[2], 2, anchor_every=4).delta is None


def test_publishing_again_returns_the_same_manifest(tmp_path: Path) -> None:
    store = make_store(tmp_path, keep=1)
    manifests = publish_all(store, 6)
    assert publish(store, VERSIONS[6], 6, anchor_every=4) == manifests[6]
    with pytest.raises(StorageError, match="other content"):
        publish(store, VERSIONS[5], 6, anchor_every=4)


def test_publishing_again_repairs_a_version_that_lost_its_delta(tmp_path: Path) -> None:
    manifest = publish_all(make_store(tmp_path), 2)[2]
    (tmp_path / f"store/runs/{RUN}/2/files/.delta").unlink()
    store = make_store(tmp_path)
    assert not store.is_complete(RUN, PolicyVersion(2))
    assert publish(store, VERSIONS[2], 2, anchor_every=4) == manifest
    assert store.is_complete(RUN, PolicyVersion(2))


def test_store_keeps_what_kept_deltas_start_from(tmp_path: Path) -> None:
    store = make_store(tmp_path, keep=2)
    manifests = publish_all(store, 7)
    assert store.versions(RUN) == [7, 6, 5, 4]
    assert stored_names(store, 7) == {*VERSIONS[7], ".delta"}
    assert stored_names(store, 5) == {".delta"}
    assert stored_names(store, 4) == {*VERSIONS[4], ".delta"}
    assert read_back(store, manifests[4]) == VERSIONS[4]
    publish(store, VERSIONS[8], 8, anchor_every=4)
    assert store.versions(RUN) == [8, 7, 6, 5, 4]
    publish(store, VERSIONS[9], 9, anchor_every=4)
    assert store.versions(RUN) == [9, 8]


def test_chunk_that_a_thinned_version_shared_is_still_found(tmp_path: Path) -> None:
    """config.json is the same in every version."""
    store = make_store(tmp_path, keep=2)
    manifests = publish_all(store, 7)
    assert read_back(store, manifests[7]) == VERSIONS[7]
    reopened = make_store(tmp_path, keep=2)
    assert read_back(reopened, manifests[7]) == VERSIONS[7]


def test_mirror_needs_the_delta_alone(tmp_path: Path) -> None:
    origin = make_store(tmp_path / "origin")
    manifests = publish_all(origin, 5)
    mirror = make_store(tmp_path / "mirror")
    missing = mirror.begin(manifests[5], SIGNATURE)
    assert missing == manifests[5].delta_spans()
    fill(mirror, origin, manifests[5])
    assert mirror.is_complete(RUN, PolicyVersion(5))
    assert mirror.wanted_parents(RUN) == [PolicyVersion(4)]
    mirror.begin(manifests[4], SIGNATURE)
    fill(mirror, origin, manifests[4])
    assert mirror.wanted_parents(RUN) == []
    assert read_back(mirror, manifests[4]) == VERSIONS[4]
    assert sizes_of(VERSIONS[4])["config.json"] == 2


def test_size_limit_of_a_mirror_counts_what_is_broadcast(tmp_path: Path) -> None:
    origin = make_store(tmp_path / "origin")
    manifests = publish_all(origin, 5)
    mirror = ChunkStore(tmp_path / "mirror", max_bytes=manifests[5].broadcast_bytes)
    mirror.begin(manifests[5], SIGNATURE)
    with pytest.raises(StorageError, match=f"version 4 has {manifests[4].broadcast_bytes} bytes"):
        mirror.begin(manifests[4], SIGNATURE)


def test_parent_does_not_make_room_for_its_delta(tmp_path: Path) -> None:
    origin = make_store(tmp_path / "origin")
    manifests = publish_all(origin, 5)
    mirror = ChunkStore(tmp_path / "mirror", max_bytes=1 << 30)
    for version in (0, 1):
        mirror.begin(manifests[version], SIGNATURE)
        fill(mirror, origin, manifests[version])
    missing = mirror.missing(manifests[2])
    mirror.max_bytes = mirror.chunks.used_bytes() + sum(span.size for span in missing) - 1
    with pytest.raises(StorageError, match=r"version 2 has .* together with newer"):
        mirror.begin(manifests[2], SIGNATURE)
    assert mirror.versions(RUN) == [1, 0]
    mirror.max_bytes += 1
    mirror.begin(manifests[2], SIGNATURE)
    assert mirror.versions(RUN) == [2, 1, 0]


def test_delta_makes_room_before_what_it_starts_from(tmp_path: Path) -> None:
    origin = make_store(tmp_path / "origin")
    manifests = publish_all(origin, 5)
    mirror = ChunkStore(tmp_path / "mirror", max_bytes=1 << 30)
    for version in (0, 1, 2):
        mirror.begin(manifests[version], SIGNATURE)
        fill(mirror, origin, manifests[version])
    other = publish(origin, {"model.safetensors": os.urandom(500)}, 9)
    mirror.max_bytes = mirror.chunks.used_bytes() + other.broadcast_bytes - 1
    mirror.begin(other, SIGNATURE)
    assert mirror.versions(RUN) == [9, 1, 0]


# Versions whose work can still be disputed


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A disk that a test fills: `taken` returns its used bytes."""
    found = SimpleNamespace(total=1 << 30, taken=lambda: 0)
    usage = lambda _: SimpleNamespace(total=found.total, free=found.total - found.taken())  # noqa: E731
    monkeypatch.setattr(shutil, "disk_usage", usage)
    return found


def arrived(store: ChunkStore, version: int, *, seconds_ago: float) -> None:
    """Have a version arrive in the store so long ago."""
    at_s = time.time() - seconds_ago
    os.utime(store.folder / f"runs/{RUN}/{version}/manifest.json", (at_s, at_s))


@pytest.mark.usefixtures("disk")
def test_versions_stay_while_outcomes_of_their_work_can_be_disputed(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path / "store", keep=2, hold_s=100)
    publish_all(store, 8)
    assert store.versions(RUN) == [8, 7, 6, 5, 4, 3, 2, 1, 0]
    # Of a version that only old work names, the delta is enough.
    assert stored_names(store, 6) == {".delta"}
    # Versions 5 and older left the newest two when version 7 arrived, or before.
    for version in range(8):
        arrived(store, version, seconds_ago=101)
    publish(store, VERSIONS[9], 9, anchor_every=4)
    assert store.versions(RUN) == [9, 8, 7, 6, 5, 4]


def test_held_versions_give_way_where_the_disk_is_three_quarters_full(
    tmp_path: Path, disk: SimpleNamespace
) -> None:
    store = ChunkStore(tmp_path / "store", keep=2, hold_s=100)
    disk.taken = lambda: len(store.stored())
    disk.total = 10
    publish_all(store, 6, anchor_every=0)
    assert store.versions(RUN) == [6, 5, 4, 3, 2, 1, 0]
    disk.total = 8
    publish(store, VERSIONS[7], 7)
    assert store.versions(RUN) == [7, 6, 5, 4, 3, 2]
    disk.total = 2
    publish(store, VERSIONS[8], 8)
    assert store.versions(RUN) == [8, 7]


def test_parents_give_way_with_the_last_held_delta_that_needs_them(
    tmp_path: Path, disk: SimpleNamespace
) -> None:
    store = ChunkStore(tmp_path / "store", keep=2, hold_s=100)
    disk.taken = lambda: len(store.stored())
    disk.total = 20
    publish_all(store, 8)
    disk.total = 12
    publish(store, VERSIONS[9], 9, anchor_every=4)
    assert store.versions(RUN) == [9, 8, 7, 6, 5, 4]


def test_mirror_drops_no_more_held_versions_than_the_disk_needs(
    tmp_path: Path, disk: SimpleNamespace
) -> None:
    origin = make_store(tmp_path / "origin", keep=8)
    manifests = publish_all(origin, 7, anchor_every=0)
    mirror = ChunkStore(tmp_path / "mirror", keep=2, hold_s=100)
    disk.taken = mirror.chunks.used_bytes
    for manifest in manifests[:7]:
        mirror.begin(manifest, SIGNATURE)
        fill(mirror, origin, manifest)
    # One version, and a little, has to go.
    disk.total = (disk.taken() - manifests[0].total_bytes) * 4 // 3
    mirror.begin(manifests[7], SIGNATURE)
    assert mirror.stored_versions(RUN) == [7, 6, 5, 4, 3, 2]
    assert mirror.complete() == [(RUN, PolicyVersion(v)) for v in (6, 5, 4, 3, 2)]
    # Version 1 held a chunk that the others need, too.
    assert read_back(mirror, manifests[2]) == VERSIONS[2]
    needed = {span.digest.hex() for each in manifests[2:7] for span in each.spans()}
    assert {path.name for path in mirror.chunks.path.iterdir()} == needed


def test_work_of_giving_way_grows_with_the_number_of_versions_only(
    tmp_path: Path, disk: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ChunkStore(tmp_path / "store", keep=2, hold_s=100)
    publish_all(store, 12, anchor_every=0)
    read: list[PolicyVersion] = []
    monkeypatch.setattr(
        ChunkStore,
        "manifest",
        lambda self, *key, real=ChunkStore.manifest: read.append(key[1]) or real(self, *key),
    )
    disk.taken = lambda: disk.total
    publish(store, VERSIONS[13], 13)
    assert store.versions(RUN) == [13, 12]
    assert len(read) <= 8 * 14


@pytest.mark.usefixtures("disk")
def test_mirror_does_not_hold_what_never_arrived_whole(tmp_path: Path) -> None:
    origin = make_store(tmp_path / "origin", keep=8)
    manifests = publish_all(origin, 4, anchor_every=0)
    mirror = ChunkStore(tmp_path / "mirror", keep=2, hold_s=100)
    for manifest in manifests:
        mirror.begin(manifest, SIGNATURE)
        if manifest.version != 1:
            fill(mirror, origin, manifest)
        mirror.abandon(RUN, manifest.version)
    assert mirror.stored_versions(RUN) == [4, 3, 2, 0]


def test_mirror_keeps_what_it_receives_while_newer_versions_are_incomplete(tmp_path: Path) -> None:
    origin = make_store(tmp_path / "origin", keep=8)
    manifests = publish_all(origin, 4, anchor_every=0)
    mirror = ChunkStore(tmp_path / "mirror", keep=2)
    for manifest in (manifests[4], manifests[3]):
        mirror.begin(manifest, SIGNATURE)
        mirror.abandon(RUN, manifest.version)
    mirror.begin(manifests[2], SIGNATURE)
    fill(mirror, origin, manifests[2])
    assert mirror.versions(RUN) == [2]


@pytest.mark.usefixtures("disk")
def test_publishing_another_run_drops_no_held_version(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path / "store", keep=2, hold_s=100)
    publish_all(store, 4)
    file = tmp_path / "file"
    file.write_bytes(b"of another run")
    publish_paths(ChunkStore(store.folder), {"file": file}, 0, run_id=RunId(RUN + 1))
    assert store.versions(RUN) == [4, 3, 2, 1, 0]
