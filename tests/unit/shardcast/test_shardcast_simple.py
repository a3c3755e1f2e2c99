"""The files that a path to publish means, and refused paths."""

import json
from pathlib import Path

import pytest
from shardcast_policies import write_files

from muster.protocol.errors import ConfigError
from muster.shardcast.simple import files_of

INDEX = "model.safetensors.index.json"


def index_of(*names: object) -> bytes:
    return json.dumps({"weight_map": dict(enumerate(names))}).encode()


def test_file_stands_for_itself(tmp_path: Path) -> None:
    path = write_files(tmp_path, {"a.bin": b"1"})["a.bin"]
    assert files_of([path, path]) == {"a.bin": path}


def test_folder_stands_for_its_files_without_the_hidden(tmp_path: Path) -> None:
    write_files(tmp_path, {"a": b"1", "b": b"2", ".git": b""})
    assert set(files_of([tmp_path])) == {"a", "b"}


def test_index_stands_for_itself_and_what_it_names(tmp_path: Path) -> None:
    parts = {"m-1.safetensors": b"1", "m-2.safetensors": b"2", "other": b"3"}
    write_files(tmp_path, {**parts, INDEX: index_of("m-1.safetensors", "m-2.safetensors")})
    found = files_of([tmp_path / INDEX])
    assert set(found) == {INDEX, "m-1.safetensors", "m-2.safetensors"}


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        (index_of("gone.safetensors"), "names gone.safetensors, which is not beside it"),
        (index_of("../secret"), "not a plain file name"),
        (index_of("/etc/passwd"), "not a plain file name"),
        (index_of(1), "not a plain file name"),
        (b"{}", "is not an index of safetensors files"),
        (b"[]", "is not an index of safetensors files"),
        (b'{"weight_map": []}', "is not an index of safetensors files"),
        (b"nonsense", "is not an index of safetensors files"),
        (b"[" * 100_000, "is not an index of safetensors files"),
    ],
)
def test_index_is_refused_when_it_names_what_it_must_not(
    tmp_path: Path, index: bytes, reason: str
) -> None:
    write_files(tmp_path, {INDEX: index})
    with pytest.raises(ConfigError, match=reason):
        files_of([tmp_path / INDEX])


def test_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to publish"):
        files_of([tmp_path])


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file"):
        files_of([tmp_path / "none"])


def test_folder_within_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    with pytest.raises(ConfigError, match="holds sub, which is not a file"):
        files_of([tmp_path])


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    first = write_files(tmp_path / "x", {"a": b"1"})["a"]
    second = write_files(tmp_path / "y", {"a": b"2"})["a"]
    with pytest.raises(ConfigError, match="two files have the name a"):
        files_of([first, second])


def test_name_that_no_manifest_may_hold_is_refused(tmp_path: Path) -> None:
    path = write_files(tmp_path, {"a b": b"1"})["a b"]
    with pytest.raises(ConfigError, match="not a plain file name"):
        files_of([path])
