"""Keccak-256 and SHAKE-256: the compiled kernel and the libraries give the same bytes."""

import hashlib
import shutil
from pathlib import Path

import pytest
from eth_hash.auto import keccak as reference
from hypothesis import given, strategies as st

from muster.protocol import compiled
from muster.protocol.compiled import keccak256, shake256

needs_kernel = pytest.mark.skipif(not compiled.load_keccak(), reason="no compiled kernel")
EMPTY = "c5d2460186f7233c927e7db2dcc703c0e500b653ca82273b7bfad8045d85a470"


@pytest.mark.parametrize("kernel", [pytest.param("compiled", marks=needs_kernel), "portable"])
def test_digest_of_nothing_is_the_ethereum_constant(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel == "portable":
        monkeypatch.setattr(compiled, "load_keccak", lambda: None)
    assert keccak256(b"").hex() == EMPTY


@needs_kernel
@given(st.binary(max_size=500))
def test_kernel_hashes_as_the_library_does(data: bytes) -> None:
    assert keccak256(data) == reference(data)


@needs_kernel
@pytest.mark.parametrize("size", [135, 136, 137, 271, 272, 273, 100_000])
def test_kernel_pads_at_the_edges_of_a_block(size: int) -> None:
    assert keccak256(b"\x5a" * size) == reference(b"\x5a" * size)


@pytest.mark.parametrize("kernel", [pytest.param("compiled", marks=needs_kernel), "portable"])
@pytest.mark.parametrize("taken_in", [0, 38, 135, 136, 137])
@pytest.mark.parametrize("size", [1, 135, 136, 137, 272, 273, 10_000])
def test_streams_are_those_of_the_standard_library(
    kernel: str, taken_in: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel == "portable":
        monkeypatch.setattr(compiled, "load_keccak", lambda: None)
    data = bytes(range(taken_in))
    assert shake256(data, size) == hashlib.shake_256(data).digest(size)


@needs_kernel
def test_kernel_of_other_sources_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    shutil.copytree(compiled.FOLDER, tmp_path, dirs_exist_ok=True)
    assert compiled.load_keccak(tmp_path) is not None
    compiled.load_keccak.cache_clear()
    with (tmp_path / "keccak.c").open("a") as source:
        source.write("/* changed */\n")
    assert compiled.load_keccak(tmp_path) is None
    assert "is stale" in caplog.text
