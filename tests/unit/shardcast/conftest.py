"""Stores in temporary folders."""

from pathlib import Path

import pytest

from muster.shardcast import ChunkStore


@pytest.fixture
def store(tmp_path: Path) -> ChunkStore:
    return ChunkStore(tmp_path / "store")


@pytest.fixture
def origin(tmp_path: Path) -> ChunkStore:
    return ChunkStore(tmp_path / "origin")
