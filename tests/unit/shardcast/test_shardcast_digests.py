"""The state hash, against a reference written a second way."""

from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given, strategies as st

from muster.shardcast import file_digest, state_hash
from muster.shardcast.digests import BUFFER_BYTES, STATE_BLOCK_BYTES, region_digest

contents = st.dictionaries(st.sampled_from(["a", "b", "B", "a.b", "10", "9"]), st.binary())


def reference(data: bytes) -> bytes:
    blocks = [data[at : at + STATE_BLOCK_BYTES] for at in range(0, len(data), STATE_BLOCK_BYTES)]
    return blake3(b"".join(blake3(block).digest() for block in blocks)).digest()


@given(contents)
def test_state_hash_is_the_digest_of_digests_in_name_order(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes]
) -> None:
    folder = tmp_path_factory.mktemp("state")
    for name, data in files.items():
        (folder / name).write_bytes(data)
    joined = b"".join(reference(data) for _, data in sorted(files.items()))
    backwards = {name: folder / name for name in sorted(files, reverse=True)}
    assert state_hash(backwards) == blake3(joined).digest()


@pytest.mark.parametrize("size", [0, 1, STATE_BLOCK_BYTES, 5 * STATE_BLOCK_BYTES + 1])
def test_file_digest_is_that_of_its_blocks_digests(tmp_path: Path, size: int) -> None:
    data = (bytes(range(256)) * (size // 256 + 1))[:size]
    (tmp_path / "f").write_bytes(data)
    assert file_digest(tmp_path / "f") == reference(data)


def test_file_digest_tells_blocks_in_another_order(tmp_path: Path) -> None:
    first, second = bytes(STATE_BLOCK_BYTES), b"\1" * STATE_BLOCK_BYTES
    (tmp_path / "f").write_bytes(first + second)
    (tmp_path / "g").write_bytes(second + first)
    assert file_digest(tmp_path / "f") != file_digest(tmp_path / "g")


@pytest.mark.parametrize(
    ("offset", "size"),
    [(0, 0), (0, BUFFER_BYTES), (1, BUFFER_BYTES + 1), (2 * BUFFER_BYTES, 9), (7, 9 << 20)],
)
def test_region_digest_is_that_of_its_bytes(tmp_path: Path, offset: int, size: int) -> None:
    data = bytes(range(251)) * (2 * BUFFER_BYTES // 251 + 2)
    (tmp_path / "f").write_bytes(data)
    with (tmp_path / "f").open("rb", buffering=0) as file:
        found = region_digest(file.fileno(), offset, size)
    assert found == blake3(data[offset : offset + size]).digest()


def test_state_hash_changes_when_two_files_swap_names(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"1")
    (tmp_path / "y").write_bytes(b"2")
    straight = state_hash({"a": tmp_path / "x", "b": tmp_path / "y"})
    assert state_hash({"a": tmp_path / "y", "b": tmp_path / "x"}) != straight
