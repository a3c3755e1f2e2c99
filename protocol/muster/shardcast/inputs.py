"""Which files a path to publish stands for: a file, a folder, or an index of safetensors files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from muster.protocol.errors import ConfigError, EncodingError
from muster.shardcast.manifest import DEFAULT_CHUNK_BYTES, MAX_CHUNK_BYTES, require_file_name

INDEX_SUFFIX = ".safetensors.index.json"
"""How the index of a model in many files ends."""
MAX_INDEX_BYTES = 64 << 20
"""An index above this is refused unread."""
MOST_CHUNKS = 12_000
"""Chunks whose digests surely fit a manifest."""


def files_of(paths: Sequence[Path]) -> dict[str, Path]:
    """Return the files to publish by name.

    An index stands for itself and the files it names beside it; a folder for the files in it.
    Raises ConfigError when there is none, a name comes twice, or a folder holds folders.
    """
    found: dict[str, Path] = {}
    for path in (file for given in paths for file in _expand(given)):
        try:
            name = require_file_name(path.name)
        except EncodingError as error:
            raise ConfigError(f"cannot publish {path}: {error}") from error
        if name in found and not found[name].samefile(path):
            raise ConfigError(f"two files have the name {name}", hint="publish them as two runs")
        found[name] = path
    if not found:
        raise ConfigError("there is nothing to publish", hint="give files, or a folder with files")
    return found


def chunk_bytes_for(files: Sequence[Path]) -> int:
    """Return the chunk size that keeps a manifest within its limit: 8 MiB up to 94 GiB."""
    total = sum(path.stat().st_size for path in files)
    size = DEFAULT_CHUNK_BYTES
    while size < MAX_CHUNK_BYTES and total > size * MOST_CHUNKS:
        size *= 2
    return size


def _expand(path: Path) -> list[Path]:
    if path.is_dir():
        entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
        folders = [entry.name for entry in entries if not entry.is_file()]
        if folders:
            raise ConfigError(f"{path} holds {folders[0]}, which is not a file")
        return entries
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    return [path, *_indexed(path)] if path.name.endswith(INDEX_SUFFIX) else [path]


def _indexed(index: Path) -> list[Path]:
    """Return the files that an index names; none of them may lie elsewhere."""
    try:
        if index.stat().st_size > MAX_INDEX_BYTES:
            raise ConfigError(f"the index {index} is larger than {MAX_INDEX_BYTES} bytes")
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        files = [index.with_name(require_file_name(name)) for name in names]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{index} is not an index of safetensors files: {error}") from error
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ConfigError(f"{index.name} names {missing[0]}, which is not beside it")
    return files
