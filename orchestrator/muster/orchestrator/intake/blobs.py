"""Storage of kept files: a local folder, or a bucket of S3-compatible storage.

A name always has complete content, which is durable once the write has returned. Names never come
from a peer as text; they are made of parsed hashes and addresses.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from muster.lifecycle import sync_path
from muster.protocol.errors import ConfigError, StorageFailed, install_hint

if TYPE_CHECKING:
    from obstore.store import S3Store

TEMPORARY = ".part"
"""Suffix of files that are being written."""
LEFTOVER_S = 600
"""Age in seconds from which such a file is the leftover of an interrupted process."""
URL_LIFE_S = 300
"""Seconds for which a presigned URL works."""


class LocalBlobs:
    """A folder: written to a temporary file in the same folder, synced, then renamed.

    Failed writes raise OSError.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def take(self, name: str, path: Path, sidecar: str, data: bytes) -> None:
        """Keep a complete local file, which may be moved, then write its sidecar, so that a sidecar
        never exists without its file.
        """

        def move() -> None:
            path.replace(self._folder / name)
            sync_path(self._folder)
            self._write(self._folder / sidecar, data)
            sync_path(self._folder)

        await asyncio.to_thread(move)

    async def put(self, contents: Mapping[str, bytes]) -> None:
        """Keep bytes by name, and replace earlier ones.

        All files are synced together, and each folder once.
        """
        places = {self._folder / name: data for name, data in contents.items()}
        writes = (asyncio.to_thread(self._write, path, data) for path, data in places.items())
        await asyncio.gather(*writes)
        for folder in {path.parent for path in places}:
            await asyncio.to_thread(sync_path, folder)

    async def append(self, name: str, line: str) -> None:
        """Add a line to a name's lines."""

        def write() -> None:
            with (self._folder / name).open("a+b") as file:
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                    # A full disk, or a kill, may have left a part of a line.
                    if file.read() != b"\n":
                        file.write(b"\n")
                file.write(line.encode() + b"\n")

        await asyncio.to_thread(write)

    async def find(self, name: str) -> Path | str | None:
        """Return a local path or a temporary URL for readers; None if the name does not exist."""
        path = self._folder / name
        return path if path.is_file() else None

    async def fetch(self, name: str, path: Path) -> None:
        """Write the content of a name to a file. Raises StorageError."""
        await asyncio.to_thread(shutil.copyfile, self._folder / name, path)

    async def delete(self, name: str) -> None:
        """Delete a name; a missing name is no error."""
        await asyncio.to_thread((self._folder / name).unlink, missing_ok=True)

    def read_folder(self, folder: str) -> Iterator[tuple[str, bytes]]:
        """Yield name and content of the JSON files of a folder ("" for the top), by name. Blocks.

        Raises StorageError.
        """
        for path in sorted((self._folder / folder).glob("*.json")):
            yield path.relative_to(self._folder).as_posix(), path.read_bytes()

    def lines(self, name: str) -> list[str]:
        """Return a name's lines, oldest first. Blocks. Raises StorageError."""
        path = self._folder / name
        return path.read_text().splitlines() if path.exists() else []

    def _write(self, path: Path, data: bytes) -> None:
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_suffix(TEMPORARY)
        with temporary.open("wb") as file:
            file.write(data)
            sync(file)
        temporary.replace(path)


class S3Blobs:
    """A bucket, or a prefix in one, with the interface of LocalBlobs; readers get presigned URLs.

    Keys, region and endpoint come from the environment (`AWS_ACCESS_KEY_ID`,
    `AWS_SECRET_ACCESS_KEY`, `AWS_REGION`, `AWS_ENDPOINT_URL`).
    """

    def __init__(self, url: str) -> None:
        """Raises ConfigError when the URL is malformed, or the driver is not installed."""
        self._url = url
        self._store = _connect(url)

    async def take(self, name: str, path: Path, sidecar: str, data: bytes) -> None:
        """Upload a file, in parts if it is large, then its sidecar."""
        await self._put(name, path)
        await self._put(sidecar, data)

    async def put(self, contents: Mapping[str, bytes]) -> None:
        """Upload bytes."""
        await asyncio.gather(*(self._put(name, data) for name, data in contents.items()))

    async def append(self, name: str, line: str) -> None:
        """Upload a separate object, because objects cannot be appended to."""
        await self._put(f"{name}/{time.time_ns():020d}-{os.getpid()}", line.encode())

    async def find(self, name: str) -> Path | str | None:
        """Return a presigned URL."""
        import obstore

        try:
            await obstore.head_async(self._store, name)
        except FileNotFoundError:
            return None
        except obstore.exceptions.BaseError as error:
            raise self._unusable(error) from error
        return await obstore.sign_async(self._store, "GET", name, timedelta(seconds=URL_LIFE_S))

    async def fetch(self, name: str, path: Path) -> None:
        """Download an object."""
        import obstore

        try:
            answer = await obstore.get_async(self._store, name)
            with path.open("wb") as file:
                async for part in answer.stream(min_chunk_size=1 << 20):
                    await asyncio.to_thread(file.write, part)
        except (obstore.exceptions.BaseError, FileNotFoundError) as error:
            raise self._unusable(error) from error

    async def delete(self, name: str) -> None:
        """Delete an object."""
        import obstore

        try:
            await obstore.delete_async(self._store, name)
        except FileNotFoundError:
            pass
        except obstore.exceptions.BaseError as error:
            raise self._unusable(error) from error

    def read_folder(self, folder: str) -> Iterator[tuple[str, bytes]]:
        """Yield the JSON objects of a folder."""
        for name in self._names(folder):
            if name.endswith(".json"):
                yield name, self._read(name)

    def lines(self, name: str) -> list[str]:
        """Return the appended lines."""
        return [self._read(each).decode() for each in self._names(name)]

    async def _put(self, name: str, data: bytes | Path) -> None:
        import obstore

        try:
            await obstore.put_async(self._store, name, data)
        except obstore.exceptions.BaseError as error:
            raise OSError(_line(error)) from error

    def _names(self, folder: str) -> list[str]:
        import obstore

        try:
            listed = obstore.list_with_delimiter(self._store, folder or None)
        except (obstore.exceptions.BaseError, OSError) as error:
            raise self._unusable(error) from error
        return sorted(entry["path"] for entry in listed["objects"])

    def _read(self, name: str) -> bytes:
        import obstore

        try:
            return bytes(obstore.get(self._store, name).bytes())
        except (obstore.exceptions.BaseError, OSError) as error:
            raise self._unusable(error) from error

    def _unusable(self, error: Exception) -> StorageFailed:
        return StorageFailed(
            f"the storage {self._url} is unusable: {_line(error)}",
            hint="check the bucket, and AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and "
            "AWS_ENDPOINT_URL in the environment",
        )


Blobs: TypeAlias = LocalBlobs | S3Blobs
"""Named bytes."""


def _connect(url: str) -> S3Store:
    try:
        from obstore.store import S3Store
    except ModuleNotFoundError as error:
        raise ConfigError("S3 needs its driver", hint=install_hint("s3")) from error
    if not url.startswith("s3://"):
        raise ConfigError(f"{url!r} is not a bucket", hint="write s3://bucket/prefix")
    endpoint = os.environ.get("AWS_ENDPOINT_URL", "")
    return S3Store.from_url(
        url,
        client_options={"allow_http": endpoint.startswith("http:"), "timeout": "30s"},
        retry_config={"max_retries": 3, "retry_timeout": timedelta(seconds=20)},
    )


def sync(file: Any) -> None:
    """Flush a file to disk."""
    file.flush()
    os.fsync(file.fileno())


def _line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
