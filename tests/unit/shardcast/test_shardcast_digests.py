"""The state hash, against a reference written a second way."""

from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from muster.shardcast import file_digest, state_hash
from muster.shardcast.digests import BLOCK_BYTES

contents = st.dictionaries(st.sampled_from(["a", "b", "B", "a.b", "10", "9"]), st.binary())


@given(contents)
def test_state_hash_is_the_digest_of_digests_in_name_order(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes]
) -> None:
    folder = tmp_path_factory.mktemp("state")
    for name, data in files.items():
        (folder / name).write_bytes(data)
    joined = b"".join(blake3(data).digest() for _, data in sorted(files.items()))
    backwards = {name: folder / name for name in sorted(files, reverse=True)}
    assert state_hash(backwards) == blake3(joined).digest()


@pytest.mark.parametrize("size", [0, 1, BLOCK_BYTES, BLOCK_BYTES + 1])
def test_file_digest_is_that_of_its_bytes(tmp_path: Path, size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    (tmp_path / "f").write_bytes(data[:size])
    assert file_digest(tmp_path / "f") == blake3(data[:size]).digest()


def test_state_hash_changes_when_two_files_swap_names(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"1")
    (tmp_path / "y").write_bytes(b"2")
    straight = state_hash({"a": tmp_path / "x", "b": tmp_path / "y"})
    assert state_hash({"a": tmp_path / "y", "b": tmp_path / "x"}) != straight
