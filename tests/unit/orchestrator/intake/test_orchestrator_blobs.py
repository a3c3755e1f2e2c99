"""Files in a folder and in S3-compatible storage: the same promises."""

import itertools
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from s3_server import S3Server

from muster.orchestrator.intake.blobs import Blobs, LocalBlobs, S3Blobs
from muster.protocol.errors import ConfigError, StorageError

BUCKETS = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as started:
        yield started


@pytest.fixture(params=["folder", "bucket"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Blobs:
    if request.param == "folder":
        return LocalBlobs(tmp_path)
    server: S3Server = request.getfixturevalue("server")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return S3Blobs(server.create(f"bucket{next(BUCKETS)}") + "/run/1")


async def content(blobs: Blobs, name: str) -> bytes | None:
    """Return the bytes that a reader gets."""
    place = await blobs.find(name)
    if isinstance(place, str):
        with urllib.request.urlopen(place, timeout=10) as answer:
            return bytes(answer.read())
    return None if place is None else place.read_bytes()


@pytest.mark.parametrize("size", [0, 5, 12_000_000])
async def test_file_is_kept_as_it_was(blobs: Blobs, tmp_path: Path, size: int) -> None:
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    (tmp_path / "upload").write_bytes(data)
    await blobs.take("a.parquet", tmp_path / "upload", "a.json", b"{}")
    assert await content(blobs, "a.parquet") == data
    assert await content(blobs, "a.json") == b"{}"
    await blobs.fetch("a.parquet", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == data


async def test_later_bytes_take_the_place_of_earlier_ones(blobs: Blobs) -> None:
    for data in (b"{}", b"{1}"):
        await blobs.put({"batches/a.json": data})
    assert list(blobs.read_folder("batches")) == [("batches/a.json", b"{1}")]


async def test_folders_are_apart(blobs: Blobs) -> None:
    await blobs.put({"b.json": b"top b"})
    await blobs.put({"a.json": b"top a"})
    await blobs.put({"batches/c.json": b"batch"})
    assert list(blobs.read_folder("")) == [("a.json", b"top a"), ("b.json", b"top b")]
    assert list(blobs.read_folder("batches")) == [("batches/c.json", b"batch")]
    assert list(blobs.read_folder("outcomes")) == []


async def test_lines_come_back_in_order(blobs: Blobs) -> None:
    assert blobs.lines("metrics.jsonl") == []
    for number in range(12):
        await blobs.append("metrics.jsonl", f"line {number}")
    assert blobs.lines("metrics.jsonl") == [f"line {number}" for number in range(12)]


async def test_what_is_deleted_is_nowhere(blobs: Blobs) -> None:
    await blobs.put({"a.parquet": b"data"})
    for _ in range(2):
        await blobs.delete("a.parquet")
        assert await blobs.find("a.parquet") is None


async def test_bucket_that_is_not_there_takes_nothing(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    blobs = S3Blobs("s3://nowhere/run")
    with pytest.raises(OSError, match="not found"):
        await blobs.put({"a.json": b"{}"})
    with pytest.raises(StorageError, match="unusable"):
        list(blobs.read_folder(""))


def test_url_of_something_else_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not a bucket"):
        S3Blobs("https://example.org/bucket")
