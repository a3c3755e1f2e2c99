"""Publishing is atomic and idempotent; files that a kept version needs are never dropped."""

import errno
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from shardcast_policies import (
    CHUNK_BYTES,
    RUN,
    SIGNATURE,
    chunk,
    fake_signature,
    fill,
    publish,
    publish_paths,
    read_back,
    write_files,
)

from muster.protocol.errors import EncodingError, StorageError
from muster.protocol.ids import Hash32, PolicyVersion, RunId
from muster.shardcast import ChunkStore, Manifest, state_hash
from muster.shardcast.chunks import STALE_AFTER_S, TEMPORARY_PREFIX, VerifyingSink, temporary_name
from muster.shardcast.manifest import ChunkSpan
from muster.shardcast.originals import hash_file

POLICY = {"config.json": b"{}", "model.safetensors": os.urandom(3 * CHUNK_BYTES + 5), "empty": b""}
V1, V2 = PolicyVersion(1), PolicyVersion(2)


def chunk_names(store: ChunkStore) -> set[str]:
    return set(os.listdir(store.chunks.path))


def stored_files(store: ChunkStore) -> set[tuple[str, str]]:
    """Version and name of every published file on disk."""
    return {(p.parts[-3], p.name) for p in store.folder.glob(f"runs/{RUN}/*/files/*")}


def write_whole(sink: VerifyingSink, pieces: list[bytes]) -> None:
    try:
        sink.write(pieces)
        sink.commit()
    finally:
        sink.close()


def publish_linked(store: ChunkStore, files: Mapping[str, Path]) -> Manifest:
    return publish_paths(store, files, link=True)


def policy(seed: int, size: int = 2 * CHUNK_BYTES) -> dict[str, bytes]:
    return {"config.json": b"{}", "model": bytes([seed]) * size}


def test_publish_returns_a_manifest_of_exactly_these_files(store: ChunkStore) -> None:
    manifest = publish(store, POLICY)
    assert {file.name: file.size for file in manifest.files} == {
        name: len(data) for name, data in POLICY.items()
    }
    assert read_back(store, manifest) == POLICY
    assert manifest.state_hash == state_hash(write_files(store.folder / "again", POLICY))


@settings(max_examples=25)
@given(st.integers(0, 5 * 1024), st.integers(1024, 4096))
def test_publish_loses_no_byte_whatever_the_sizes(
    tmp_path_factory: pytest.TempPathFactory, size: int, chunk_bytes: int
) -> None:
    store = ChunkStore(tmp_path_factory.mktemp("any") / "store")
    data = os.urandom(size)
    paths = write_files(store.folder.parent / "source", {"model": data})
    manifest = publish_paths(store, paths, stream_from=3, stream_to=4, chunk_bytes=chunk_bytes)
    assert read_back(store, manifest) == {"model": data}
    assert (manifest.stream_from, manifest.stream_to) == (3, 4)


def test_published_version_is_listed_with_manifest_and_signature(store: ChunkStore) -> None:
    manifest = publish(store, POLICY)
    assert store.versions(RUN) == [1]
    assert store.manifest_bytes(RUN, V1) == manifest.to_bytes()
    assert store.signature(RUN, V1) == fake_signature(manifest.root())


def test_other_store_on_the_same_folder_sees_the_version(store: ChunkStore) -> None:
    manifest = publish(store, POLICY)
    other = ChunkStore(store.folder)
    assert other.versions(RUN) == [1]
    assert read_back(other, manifest) == POLICY


def test_store_without_the_version_answers_none(store: ChunkStore) -> None:
    assert store.manifest_bytes(RUN, V1) is None
    assert store.signature(RUN, V1) is None
    assert store.versions(RunId(99)) == []
    assert store.find(Hash32(bytes(32))) is None


def test_publish_changes_nothing_when_repeated(store: ChunkStore) -> None:
    first = publish(store, POLICY)
    before = chunk_names(store)
    assert publish(store, POLICY) == first
    assert chunk_names(store) == before


def test_publish_is_refused_when_the_version_has_other_content(store: ChunkStore) -> None:
    first = publish(store, policy(1))
    with pytest.raises(StorageError, match="published with other content"):
        publish(store, policy(2))
    assert store.manifest(RUN, V1) == first
    assert read_back(store, first) == policy(1)


def test_published_files_may_change_afterwards(store: ChunkStore) -> None:
    manifest = publish(store, POLICY)
    (store.folder.parent / "source-1" / "model.safetensors").write_bytes(b"other")
    assert read_back(store, manifest) == POLICY


@pytest.mark.parametrize("name", ["../evil", ".hidden", "a/b", "", "a\0"])
def test_publish_refuses_a_name_that_could_leave_the_folder(store: ChunkStore, name: str) -> None:
    path = write_files(store.folder / "s", {"f": b"1"})["f"]
    with pytest.raises(EncodingError, match="not a plain file name"):
        publish_paths(store, {name: path})


def test_publish_leaves_nothing_when_a_file_is_missing(store: ChunkStore, tmp_path: Path) -> None:
    files = write_files(tmp_path / "s", {"a": os.urandom(5000)})
    with pytest.raises(StorageError, match="cannot copy b"):
        publish_paths(store, {**files, "b": tmp_path / "none"})
    assert store.versions(RUN) == []
    assert chunk_names(store) == set()


def test_publish_leaves_nothing_when_signing_fails(store: ChunkStore, tmp_path: Path) -> None:
    def refuse(root: Hash32) -> bytes:
        raise EncodingError("no key")

    with pytest.raises(EncodingError, match="no key"):
        publish_paths(store, write_files(tmp_path / "s", POLICY), sign=refuse)
    assert store.versions(RUN) == []
    assert chunk_names(store) == set()


def test_publish_refuses_a_signature_of_another_length(store: ChunkStore, tmp_path: Path) -> None:
    with pytest.raises(EncodingError, match="65 bytes"):
        publish_paths(store, write_files(tmp_path / "s", POLICY), sign=lambda _root: b"short")


def test_store_keeps_the_newest_published_versions_only(store: ChunkStore) -> None:
    manifests = [publish(store, policy(seed), seed) for seed in range(1, 9)]
    assert store.versions(RUN) == [8, 7, 6, 5, 4]
    kept = manifests[3:]
    assert stored_files(store) == {(str(m.version), name) for m in kept for name in policy(1)}
    assert all(read_back(store, m) == policy(m.version) for m in kept)


def test_store_keeps_the_newest_versions_and_their_chunks_only(
    store: ChunkStore, origin: ChunkStore
) -> None:
    manifests = [publish(origin, policy(seed), seed) for seed in range(1, 9)]
    for manifest in manifests[3:5] + manifests[3:]:
        store.begin(manifest, SIGNATURE)
        fill(store, origin, manifest)
    assert store.versions(RUN) == [8, 7, 6, 5, 4]
    kept = manifests[3:]
    assert chunk_names(store) == {s.digest.hex() for m in kept for s in m.spans()}
    assert all(read_back(store, m) == policy(m.version) for m in kept)


def test_store_keeps_each_run_apart(store: ChunkStore, tmp_path: Path) -> None:
    for run in (1, 2):
        publish_paths(store, write_files(tmp_path / "s", POLICY), run_id=RunId(run))
    store.remove(RunId(1), V1)
    manifest = store.manifest(RunId(2), V1)
    assert manifest is not None
    assert read_back(store, manifest) == POLICY
    assert store.versions(RunId(1)) == []


def test_remove_keeps_a_chunk_that_another_version_shares(store: ChunkStore) -> None:
    publish(store, policy(1), 1)
    second = publish(store, {**policy(2), "config.json": b"{}"}, 2)
    store.remove(RUN, V1)
    assert store.versions(RUN) == [2]
    assert read_back(store, second) == policy(2)


@pytest.mark.parametrize("damage", [b"", b"\0" * 5, b"\0" * CHUNK_BYTES])
def test_corrupt_chunk_is_dropped_before_it_is_served(
    store: ChunkStore, origin: ChunkStore, damage: bytes
) -> None:
    manifest = publish(origin, POLICY)
    store.begin(manifest, SIGNATURE)
    fill(store, origin, manifest)
    digest = next(s.digest for s in manifest.spans() if s.size == CHUNK_BYTES)
    restarted = ChunkStore(store.folder)
    assert restarted.versions(RUN) == [1]
    restarted.chunks.path_of(digest).write_bytes(damage)
    assert restarted.find(digest) is None
    assert not restarted.chunks.path_of(digest).exists()
    assert restarted.versions(RUN) == []
    assert [s.digest for s in restarted.missing(manifest)] == [digest]


def test_corrupt_chunk_makes_no_other_version_be_looked_at_again(
    store: ChunkStore, origin: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in (V1, V2):
        manifest = publish(origin, policy(version), version)
        store.begin(manifest, SIGNATURE)
        fill(store, origin, manifest)
    restarted, looked_at = ChunkStore(store.folder), list[PolicyVersion]()
    assert restarted.versions(RUN) == [V2, V1]
    missing = restarted.missing

    def look(manifest: Manifest) -> list[ChunkSpan]:
        looked_at.append(manifest.version)
        return missing(manifest)

    monkeypatch.setattr(restarted, "missing", look)
    digest = next(s.digest for s in manifest.spans() if s.size == CHUNK_BYTES)
    restarted.chunks.path_of(digest).write_bytes(b"damage")
    assert restarted.find(digest) is None
    assert restarted.versions(RUN) == [V1]
    assert looked_at == [V2]


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO])
@pytest.mark.parametrize("is_origin", [True, False])
def test_chunk_that_cannot_be_read_now_is_neither_absent_nor_forgotten(
    store: ChunkStore,
    origin: ChunkStore,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    is_origin: bool,
) -> None:
    manifest = publish(origin, POLICY)
    store.begin(manifest, SIGNATURE)
    fill(store, origin, manifest)
    restarted = ChunkStore(origin.folder if is_origin else store.folder)
    assert restarted.versions(RUN) == [V1]
    digest = next(manifest.spans()).digest

    def refuse(*_: object, **_options: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", refuse)
        with pytest.raises(OSError, match=os.strerror(code)):
            restarted.find(digest)
        patched.setattr(restarted, "manifest", refuse)
        assert restarted.versions(RUN) == [V1]
    assert read_back(restarted, manifest) == POLICY


@pytest.mark.parametrize("damage", [b"", b"\0" * 5, b"\0" * 4 * CHUNK_BYTES])
@pytest.mark.parametrize("restart", [False, True])
def test_published_file_that_was_changed_is_not_served(
    store: ChunkStore, damage: bytes, restart: bool
) -> None:
    manifest = publish(store, POLICY)
    store.folder.joinpath(f"runs/{RUN}/1/files/model.safetensors").write_bytes(damage)
    reader = ChunkStore(store.folder) if restart else store
    digest = next(s.digest for s in manifest.spans() if s.size == CHUNK_BYTES)
    assert reader.find(digest) is None
    assert digest in {span.digest for span in reader.missing(manifest)}
    assert reader.versions(RUN) == []
    assert publish(reader, POLICY) == manifest
    assert read_back(reader, manifest) == POLICY


def test_linked_file_shares_its_disk_space(store: ChunkStore, tmp_path: Path) -> None:
    files = write_files(tmp_path / "s", POLICY)
    manifest = publish_linked(store, files)
    stored = store.folder / f"runs/{RUN}/1/files/model.safetensors"
    assert stored.samefile(files["model.safetensors"])
    files["model.safetensors"].unlink()
    assert read_back(store, manifest) == POLICY


def test_linked_file_rewritten_in_place_is_not_served(store: ChunkStore, tmp_path: Path) -> None:
    files = write_files(tmp_path / "s", POLICY)
    manifest = publish_linked(store, files)
    files["model.safetensors"].write_bytes(b"\0" * len(POLICY["model.safetensors"]))
    assert [store.find(s.digest) for s in manifest.spans() if s.name != "config.json"] == [None] * 4
    assert store.versions(RUN) == []


def test_linked_symbolic_link_keeps_its_targets_bytes(store: ChunkStore, tmp_path: Path) -> None:
    target = write_files(tmp_path / "s", {"blob": b"weights"})["blob"]
    (tmp_path / "model").symlink_to(target)
    manifest = publish_linked(store, {"model": tmp_path / "model"})
    (tmp_path / "model").unlink()
    target.unlink()
    assert read_back(store, manifest) == {"model": b"weights"}


def test_link_across_file_systems_becomes_a_copy(
    store: ChunkStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "another file system")

    monkeypatch.setattr(os, "link", refuse)
    files = write_files(tmp_path / "s", POLICY)
    assert read_back(store, publish_linked(store, files)) == POLICY


def test_copy_falls_back_where_the_kernel_cannot(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    assert read_back(store, publish(store, POLICY)) == POLICY


class _Meddler(ThreadPoolExecutor):
    """Rewrites a file while it is being hashed."""

    def __init__(self, path: Path, data: bytes) -> None:
        super().__init__(1)
        self._write = lambda: path.write_bytes(data)

    def map(self, *args: Any, **kwargs: Any) -> Any:
        found = list(super().map(*args, **kwargs))
        self._write()
        return found


@pytest.mark.parametrize(("data", "accepted"), [(None, True), (b"other", False)])
def test_file_that_changes_while_it_is_hashed_is_refused(
    tmp_path: Path, data: bytes | None, accepted: bool
) -> None:
    path = write_files(tmp_path, {"model": bytes(5000), "elsewhere": b""})["model"]
    target = path if data is not None else tmp_path / "elsewhere"
    expected = nullcontext() if accepted else pytest.raises(StorageError, match="changed while")
    with _Meddler(target, data or b"1") as hashers, expected:
        entry, _, _ = hash_file(path, CHUNK_BYTES, hashers)
        assert entry.size == 5000


def test_corrupt_manifest_is_not_offered(store: ChunkStore) -> None:
    publish(store, POLICY)
    (store.folder / "runs" / str(RUN) / "1" / "manifest.json").write_bytes(b"{}")
    assert ChunkStore(store.folder).versions(RUN) == []


def test_begun_version_is_offered_while_chunks_arrive(
    store: ChunkStore, origin: ChunkStore
) -> None:
    manifest = publish(origin, POLICY)
    missing = store.begin(manifest, SIGNATURE)
    assert {s.digest for s in missing} == {s.digest for s in manifest.spans()}
    assert store.versions(RUN) == [1]
    assert store.expects(missing[0].digest)
    assert not store.is_complete(RUN, V1)
    fill(store, origin, manifest)
    assert store.is_complete(RUN, V1)
    assert not store.expects(missing[0].digest)
    assert read_back(store, manifest) == POLICY


def test_abandoned_version_keeps_its_chunks_for_the_next_attempt(
    store: ChunkStore, origin: ChunkStore
) -> None:
    manifest = publish(origin, POLICY)
    first = store.begin(manifest, SIGNATURE)[0]
    sink = store.sink(first)
    sink.write([chunk(origin, first.digest)])
    sink.commit()
    sink.close()
    store.abandon(RUN, V1)
    assert store.versions(RUN) == []
    again = ChunkStore(store.folder).begin(manifest, SIGNATURE)
    assert first.digest not in {s.digest for s in again}
    assert len(again) == len(store.missing(manifest))


def publish_again(store: ChunkStore, _origin: ChunkStore, _manifest: Manifest) -> None:
    publish(store, POLICY)


@pytest.mark.parametrize("complete", [fill, publish_again])
@pytest.mark.parametrize("is_other_process", [False, True])
def test_incomplete_version_is_complete_once_its_chunks_are_there(
    store: ChunkStore, origin: ChunkStore, complete: Any, is_other_process: bool
) -> None:
    manifest = publish(origin, POLICY)
    first = store.begin(manifest, SIGNATURE)[0]
    store.abandon(RUN, V1)
    write_whole(store.sink(first), [chunk(origin, first.digest)])
    assert [store.is_complete(RUN, V1) for _ in range(2)] == [False, False]
    complete(ChunkStore(store.folder) if is_other_process else store, origin, manifest)
    assert store.is_complete(RUN, V1)
    assert read_back(store, manifest) == POLICY


def test_begin_returns_only_chunks_that_no_other_version_holds(
    store: ChunkStore, origin: ChunkStore
) -> None:
    one = publish(origin, policy(1), 1)
    two = publish(origin, policy(2), 2)
    store.begin(one, SIGNATURE)
    fill(store, origin, one)
    assert [s.name for s in store.begin(two, SIGNATURE)] == ["model"]


@pytest.mark.parametrize("pieces", [[b"x" * 1024], [b"x"], [], [b"x" * 1025]])
def test_sink_keeps_nothing_when_the_bytes_are_others(
    store: ChunkStore, origin: ChunkStore, pieces: list[bytes]
) -> None:
    manifest = publish(origin, {"model": os.urandom(1024)})
    sink = store.sink(store.begin(manifest, SIGNATURE)[0])
    with pytest.raises(EncodingError, match="chunk"):
        write_whole(sink, pieces)
    assert chunk_names(store) == set()
    assert not store.is_complete(RUN, V1)


def test_sink_accepts_bytes_in_any_pieces(store: ChunkStore, origin: ChunkStore) -> None:
    data = os.urandom(1024)
    manifest = publish(origin, {"model": data})
    sink = store.sink(store.begin(manifest, SIGNATURE)[0])
    sink.write([data[:1], data[1:1]])
    sink.write([memoryview(data)[1:]])
    sink.commit()
    sink.close()
    assert read_back(store, manifest) == {"model": data}


def test_old_versions_make_room_when_the_bytes_are_bounded(
    tmp_path: Path, origin: ChunkStore
) -> None:
    small = ChunkStore(tmp_path / "small", max_bytes=5 * CHUNK_BYTES)
    for seed in (1, 2, 3):
        manifest = publish(origin, {"model": os.urandom(2 * CHUNK_BYTES)}, seed)
        small.begin(manifest, SIGNATURE)
        fill(small, origin, manifest)
    assert small.versions(RUN) == [3, 2]
    assert small.chunks.used_bytes() <= 5 * CHUNK_BYTES


def test_version_is_refused_when_it_does_not_fit_beside_newer_ones(
    tmp_path: Path, origin: ChunkStore
) -> None:
    small = ChunkStore(tmp_path / "small", max_bytes=5 * CHUNK_BYTES)
    sizes = {1: 1, 2: 2, 3: 3, 4: 2}
    manifests = {
        version: publish(origin, {"model": os.urandom(size * CHUNK_BYTES)}, version)
        for version, size in sizes.items()
    }
    for version in (4, 1):
        small.begin(manifests[version], SIGNATURE)
        fill(small, origin, manifests[version])
    small.max_bytes = 4 * CHUNK_BYTES
    # Version 3 would not fit even if version 1 gave way, so that one stays.
    with pytest.raises(StorageError, match="the limit is 4096 together with newer"):
        small.begin(manifests[3], SIGNATURE)
    assert small.versions(RUN) == [4, 1]
    small.begin(manifests[2], SIGNATURE)
    assert small.versions(RUN) == [4, 2]


def test_version_is_refused_when_it_alone_exceeds_the_bytes(
    tmp_path: Path, origin: ChunkStore
) -> None:
    small = ChunkStore(tmp_path / "small", max_bytes=2 * CHUNK_BYTES)
    kept = publish(origin, {"model": b"k" * CHUNK_BYTES}, 1)
    small.begin(kept, SIGNATURE)
    fill(small, origin, kept)
    with pytest.raises(StorageError, match="the limit is 2048"):
        small.begin(publish(origin, {"model": os.urandom(3 * CHUNK_BYTES)}, 2), SIGNATURE)
    assert small.versions(RUN) == [1]


def test_sweep_spares_fresh_temporary_files_and_takes_stale_ones(store: ChunkStore) -> None:
    fresh = store.chunks.path / f"{TEMPORARY_PREFIX}1"
    stale = store.chunks.path / f"{TEMPORARY_PREFIX}2"
    fresh.write_bytes(b"1")
    stale.write_bytes(b"2")
    long_ago = time.time() - STALE_AFTER_S - 60
    os.utime(stale, (long_ago, long_ago))
    publish(store, POLICY)  # sweeps
    assert chunk_names(store) == {fresh.name}


def test_sweep_spares_our_own_unfinished_files_however_wrong_the_clock(store: ChunkStore) -> None:
    ours = store.chunks.path / temporary_name()
    ours.write_bytes(b"1")
    os.utime(ours, (1, 1))
    publish(store, POLICY)  # sweeps
    assert chunk_names(store) == {ours.name}


def test_leftovers_of_a_killed_publisher_are_not_listed(store: ChunkStore) -> None:
    leftover = store.folder / "runs" / str(RUN) / f"{TEMPORARY_PREFIX}9"
    leftover.mkdir(parents=True)
    (leftover / "manifest.json").write_bytes(b"{}")
    assert store.versions(RUN) == []
    publish(store, POLICY)
    assert store.versions(RUN) == [1]
    assert not leftover.exists()


def test_readers_see_whole_versions_while_others_publish(store: ChunkStore) -> None:
    seen: list[tuple[int, dict[str, bytes]]] = []
    finished = threading.Event()

    def read() -> None:
        reader = ChunkStore(store.folder)
        while not finished.is_set():
            for version in reader.versions(RUN)[:1]:
                manifest = reader.manifest(RUN, version)
                assert isinstance(manifest, Manifest)
                seen.append((version, read_back(reader, manifest)))

    thread = threading.Thread(target=read)
    thread.start()
    for seed in range(1, 5):
        publish(store, policy(seed), seed)
    finished.set()
    thread.join()
    assert seen
    assert all(files == policy(version) for version, files in seen)


def test_listeners_hear_of_changes_until_they_unsubscribe(store: ChunkStore) -> None:
    heard: list[int] = []
    unsubscribe = store.on_change(lambda: heard.append(1))
    publish(store, policy(1), 1)
    assert heard
    unsubscribe()
    heard.clear()
    publish(store, policy(2), 2)
    assert not heard


def test_store_fails_with_storage_error_when_its_folder_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="cannot create"):
        ChunkStore(tmp_path / "file")
