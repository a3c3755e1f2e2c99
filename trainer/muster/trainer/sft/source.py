"""The files of a data set and the root that names their bytes in a model's lineage.

The root of a data set of `muster data export` is that of its `export.json`, which fixes every byte
of its files; the root of other files is that of their own list. Nothing in the files is trusted.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from muster.protocol.encoding import canonical_json, hex0x, keccak, parse_canonical_json
from muster.protocol.errors import ConfigError, EncodingError
from muster.tasks.row_files import is_parquet, read_rows

EXPORT = "export.json"
"""File in which a data set of `muster data export` lists its content."""
MAX_EXPORT_BYTES = 256 << 20
"""A larger one is refused."""
COLUMNS = (
    *("problem_id", "source", "part", "task_type", "problem", "prompt", "completion", "answer"),
    *("reward", "target_length", "is_finished", "prompt_tokens", "completion_tokens", "replies"),
    *("verifier", "worker", "batch_id", "position", "row", "stream_position"),
    *("policy_version", "policy_root", "file_sha256"),
)
"""Columns of its files. A further one is not checked by `muster data verify`, and might be trained
on."""
SUFFIXES = (".parquet", ".jsonl")
"""Suffixes of files of rows, in a folder without `export.json`."""
HELD_OUT = "test"
"""Files whose names begin with this are held out."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of rows."""

    path: Path
    """Where it is."""
    name: str
    """Its path below the data set's folder."""
    sha256: str
    """SHA-256 of its bytes, hexadecimal."""

    @property
    def is_held_out(self) -> bool:
        """Whether its rows are not trained on."""
        return PurePosixPath(self.name).name.startswith(HELD_OUT)


@dataclass(frozen=True, slots=True)
class SftSource:
    """A data set on disk."""

    root: str
    """Keccak-256 that names all of its bytes."""
    files: tuple[SourceFile, ...]
    """Its files of rows, in the order in which they are read."""
    origin: dict[str, Any] | None
    """Chain, ledger, run and documents in the `export.json` of an exported data set."""


def open_source(path: Path) -> SftSource:
    """Return the data set in a folder, or in one file, with its files' hashes.

    Raises ConfigError when there is none, or a file is not one that was exported.
    """
    if (path / EXPORT).is_file():
        return _exported(path)
    found = [path] if path.is_file() else sorted(_row_files(path))
    if not found:
        raise ConfigError(
            f"there is no data set in {path}",
            hint="use `muster data export`, or give a folder of .jsonl or .parquet files",
        )
    folder = path.parent if path.is_file() else path
    files = tuple(
        SourceFile(each, each.relative_to(folder).as_posix(), _sha256(each)) for each in found
    )
    listed = [{"name": each.name, "sha256": each.sha256} for each in files]
    return SftSource(hex0x(keccak(canonical_json(listed))), files, None)


def _row_files(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.suffix in SUFFIXES and path.is_file() and not is_hidden:
            yield path


def _exported(folder: Path) -> SftSource:
    data = _bounded(folder / EXPORT, MAX_EXPORT_BYTES)
    try:
        values = parse_canonical_json(data, max_bytes=MAX_EXPORT_BYTES)
        if (values["format"], values["version"]) != ("muster-data", 1):
            raise EncodingError(f"{values['format']} {values['version']}, not muster-data 1")
        listed = [(f["name"], f["sha256"]) for part in values["parts"] for f in part["files"]]
        origin = dict(values["origin"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{folder / EXPORT} is damaged: {error}") from error
    files = tuple(SourceFile(_below(folder, name), name, sha256) for name, sha256 in listed)
    for each in files:
        if not each.path.is_file() or _sha256(each.path) != each.sha256:
            raise ConfigError(
                f"{each.path} is not the file that was exported",
                hint="run `muster data verify` to learn more, or export again into a new folder",
            )
        if not _has_columns(each.path):
            raise ConfigError(
                f"{each.path} has other columns than `muster data export` writes",
                hint="`muster data verify` names them; to train on rows that nobody verified, "
                "remove export.json",
            )
    return SftSource(hex0x(keccak(data)), files, origin)


def _has_columns(path: Path) -> bool:
    """Tell whether a file is Parquet with the columns of an exported data set, and no other."""
    if not is_parquet(path):
        return False
    first = next((row for row in read_rows(path) if isinstance(row, Mapping)), None)
    return first is None or tuple(first) == COLUMNS


def _below(folder: Path, name: Any) -> Path:
    """Return a listed file's path; raises ConfigError when it would be outside the folder."""
    parts = PurePosixPath(name).parts if isinstance(name, str) else ()
    if not parts or PurePosixPath(name).is_absolute() or ".." in parts:
        raise ConfigError(f"{folder / EXPORT} names {name!r}, which is outside the folder")
    return folder.joinpath(*parts)


def _bounded(path: Path, most: int) -> bytes:
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ConfigError(f"{path} is larger than {most} bytes")
    return data


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
