"""The folder of a data set, as libraries read it, with an index of its content.

    DIR/README.md                   the data card
    DIR/export.json                 where the rows come from, the settings, every part
    DIR/data/train-00000.parquet    rows of a range of the run's training stream, split `train`
    DIR/data/test-00000.parquet     and `test`, when a problem of it is in that split

A part ends after the submission with which it reaches `PART_ROWS` rows or `PART_BYTES`, so parts do
not depend on interruptions of the export. The last part grows: it is rewritten from its own rows
and the new ones. The new files wait under other names until `export.json` names their bytes: it
decides which files are the data set's, also after a kill between two renames.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from heapq import merge
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field, TypeAdapter

from muster.client.dataset.rows import SCHEMA
from muster.client.dataset.selection import SelectionSettings, is_test
from muster.lifecycle import sync_path
from muster.lifecycle.files import write_durably
from muster.protocol.encoding import canonical_json, keccak, parse_canonical_json
from muster.protocol.errors import ConfigError, EncodingError, StorageError
from muster.protocol.ids import Hash32

FORMAT, VERSION = "muster-data", 1
EXPORT, CARD = "export.json", "README.md"
MAX_EXPORT_BYTES = 256 << 20
"""A larger `export.json` is refused."""
PART_ROWS = 65_536
"""Rows after which a part ends."""
PART_BYTES = 128 << 20
"""Bytes of rows in memory after which a part ends."""
GROUP_ROWS, GROUP_BYTES = 4096, 64 << 20
"""Rows, or their bytes, that are written as one row group."""
SPLITS = ("train", "test")

Count = Annotated[int, Field(ge=0)]
"""A number of rows, or a place in the training stream."""


@dataclass(frozen=True, slots=True)
class DataOrigin:
    """Origin of the rows; the same for a whole folder."""

    chain_id: int
    ledger: str
    """Address of the ContributionLedger."""
    run_id: int
    recipe: str
    """Hash of the run's recipe."""
    task_set: str
    """Root of the run's task set."""
    tokenizer: str
    """Root of the policy whose tokenizer made the texts."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """One Parquet file."""

    name: str
    """Path below the folder."""
    rows: Count
    sha256: str
    """SHA-256 of the file, hexadecimal."""


@dataclass(frozen=True, slots=True)
class DataPart:
    """Rows of a range of the training stream."""

    start: Count
    """First place in the stream."""
    end: Count
    """Place after the last one."""
    is_whole: bool
    """Whether the part is complete."""
    files: tuple[DataFile, ...] = ()
    """One file for each split that has rows."""
    left_out: dict[str, Count] = field(default_factory=dict)
    """Rows of the range that are not in the files, by reason."""


@dataclass(frozen=True, slots=True)
class Export:
    """Content of `export.json`."""

    origin: DataOrigin
    settings: SelectionSettings
    parts: tuple[DataPart, ...] = ()
    """In the order of the stream, without a gap."""
    format: str = FORMAT
    version: int = VERSION

    @property
    def end(self) -> int:
        """Place in the training stream after the last row."""
        return self.parts[-1].end if self.parts else 0

    def files(self) -> Iterator[DataFile]:
        """Yield all files."""
        for part in self.parts:
            yield from part.files

    def to_bytes(self) -> bytes:
        """Return the canonical JSON."""
        return canonical_json({**asdict(self), "settings": self.settings.to_json()})

    def root(self) -> Hash32:
        """Return the Keccak-256 that names the data set: it fixes every byte of every file."""
        return keccak(self.to_bytes())

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Parse it; raises EncodingError on anything that `to_bytes` does not write."""
        values = parse_canonical_json(data, max_bytes=MAX_EXPORT_BYTES)
        try:
            if (values["format"], values["version"]) != (FORMAT, VERSION):
                raise EncodingError(
                    f"{values['format']} {values['version']}, not {FORMAT} {VERSION}"
                )
            found: Self = TypeAdapter(cls).validate_python(values)
        except (KeyError, TypeError, ValueError) as error:
            raise EncodingError(f"malformed {EXPORT}: {error}") from error
        for number, part in enumerate(found.parts):
            names = [each.name for each in part.files]
            if names != [name for name in _file_names(number).values() if name in names]:
                raise EncodingError(f"part {number} cannot have the files {', '.join(names)}")
        if found.to_bytes() != data:
            raise EncodingError(f"{EXPORT} does not re-encode to the same bytes")
        return found


def _file_names(number: int) -> dict[str, str]:
    """Return the name of a part's file of each split, in their order."""
    return {split: f"data/{split}-{number:05d}.parquet" for split in SPLITS}


class DataFolder:
    """A data set on disk."""

    def __init__(self, path: Path, export: Export) -> None:
        self.path = path
        self.export = export

    @classmethod
    def open(cls, path: Path) -> Self:
        """Return the data set in a folder; raises ConfigError when there is none."""
        try:
            return cls(path, Export.from_bytes((path / EXPORT).read_bytes()))
        except OSError as error:
            raise ConfigError(
                f"there is no data set in {path}", hint="`muster data export` writes one"
            ) from error
        except EncodingError as error:
            raise ConfigError(f"{path / EXPORT} is damaged: {error}") from error

    @classmethod
    def continue_or_begin(cls, path: Path, origin: DataOrigin, settings: SelectionSettings) -> Self:
        """Return the data set in a folder, or a new one.

        Raises ConfigError when the folder holds another data set, or anything else.
        """
        if (path / EXPORT).exists():
            found = cls.open(path)
            for what, ours, theirs in (
                ("origin", origin, found.export.origin),
                ("settings", settings, found.export.settings),
            ):
                if ours != theirs:
                    raise ConfigError(
                        f"{path} holds a data set of another {what}: {_difference(ours, theirs)}",
                        hint="give the same flags to continue it, or another --out",
                    )
            return found
        if path.exists() and any(path.iterdir()):
            raise ConfigError(f"{path} is not empty", hint="choose another --out")
        return cls(path, Export(origin, settings))

    def tables(
        self, part: DataPart, columns: Sequence[str] = SCHEMA.names
    ) -> Iterator[tuple[str, pa.Table]]:
        """Yield a part's rows with their file's name, a row group at a time.

        Raises StorageError for a file that has other columns or another number of rows than a data
        set has, or a value that is null or not of its column's type.
        """
        for each in part.files:
            count = 0
            try:
                with pq.ParquetFile(self.path / each.name) as file:
                    _require_columns(file.schema_arrow)
                    for group in range(file.num_row_groups):
                        rows = file.read_row_group(group, columns=list(columns)).select(columns)
                        _require_values(rows)
                        count += len(rows)
                        yield each.name, rows
                if count != each.rows:
                    raise ValueError(f"it has {count} rows, {EXPORT} says {each.rows}")
            except (OSError, ValueError, KeyError, pa.ArrowException) as error:
                raise StorageError(f"{self.path / each.name} is damaged: {error}") from error

    def is_intact(self, part: DataPart) -> bool:
        """Tell whether a part's files have the bytes that `export.json` names."""
        return all(_sha256(self.path / each.name) == each.sha256 for each in part.files)

    def submissions(self, part: DataPart) -> Iterator[tuple[int, pa.Table]]:
        """Yield the rows of each submission in a part with its place in the stream, in order."""
        files = [self._by_submission(replace(part, files=(each,))) for each in part.files]
        for place, found in groupby(merge(*files, key=itemgetter(0)), key=itemgetter(0)):
            rows = pa.concat_tables([rows for _, rows in found])
            yield place, rows.sort_by("row")

    def _by_submission(self, part: DataPart) -> Iterator[tuple[int, pa.Table]]:
        """Yield each submission's rows of a file; they are in one row group."""
        for _, rows in self.tables(part):
            places = np.asarray(rows["stream_position"].to_pylist(), np.int64)
            starts = np.flatnonzero(np.diff(places, prepend=-1)).tolist()
            for start, end in pairwise([*starts, len(places)]):
                yield int(places[start]), rows.slice(start, end - start)

    def put(self, part: DataPart) -> None:
        """Add or replace a part in the index."""
        parts = tuple(each for each in self.export.parts if each.start != part.start)
        parts = tuple(sorted((*parts, part), key=lambda each: each.start))
        self.export = replace(self.export, parts=parts)
        write_durably(self.path / EXPORT, self.export.to_bytes())

    def leave_out(self, part: DataPart, overturned: Collection[int]) -> None:
        """Rewrite a part without the rows of some submissions, given by their places in the
        stream."""
        with PartWriter(self, part) as writer:
            for place, rows in self.submissions(part):
                if place in overturned:
                    writer.left_out["overturned"] += len(rows)
                else:
                    writer.add(rows)
            writer.finish(part.end, is_whole=part.is_whole)

    def settle(self, part: DataPart) -> None:
        """Give a part's files the names that `export.json` says, unless they have them; remove
        others of the part."""
        named = {each.name: each.sha256 for each in part.files}
        for name in _file_names(self.number(part)).values():
            path, partial = self.path / name, self.partial(name)
            if name not in named:
                path.unlink(missing_ok=True)
            elif _sha256(partial) == named[name]:
                partial.replace(path)
            partial.unlink(missing_ok=True)

    def number(self, part: DataPart) -> int:
        """Return a part's number, from 0, also of one that is not in the index yet."""
        return sum(each.start < part.start for each in self.export.parts)

    def partial(self, name: str) -> Path:
        """Return where a file waits until `export.json` names it."""
        path = self.path / name
        return path.with_name(f".{path.stem}.partial")


class PartWriter:
    """Writes the files of one part; they appear at the end."""

    def __init__(self, folder: DataFolder, part: DataPart) -> None:
        """Takes over the part's counts of omitted rows, but not its rows."""
        self._folder = folder
        self._start = part.start
        self._names = _file_names(folder.number(part))
        self.left_out = Counter(part.left_out)
        """Rows that are not in the part, by reason."""
        self._rows = self._bytes = 0
        self._waiting: dict[str, list[pa.Table]] = {split: [] for split in SPLITS}
        self._writers: dict[str, pq.ParquetWriter] = {}
        self._counts: Counter[str] = Counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None
    ) -> None:
        for split, writer in self._writers.items():
            with suppress(OSError):
                writer.close()
            self._partial(split).unlink(missing_ok=True)

    @property
    def is_full(self) -> bool:
        """Whether the part ends here."""
        return self._rows >= PART_ROWS or self._bytes >= PART_BYTES

    def add(self, rows: pa.Table) -> None:
        """Add the kept rows of a submission."""
        share = self._folder.export.settings.test_share
        names = rows["problem_id"].to_pylist()
        tests = pa.array([is_test(name, share) for name in names], pa.bool_())
        self._rows += len(rows)
        self._bytes += rows.nbytes
        for split, chosen in (("train", pc.invert(tests)), ("test", tests)):
            found = rows.filter(chosen)
            if len(found):
                self._waiting[split].append(found)
                self._flush(split, at_least=(GROUP_ROWS, GROUP_BYTES))

    def finish(self, end: int, *, is_whole: bool) -> DataPart:
        """Write the buffered rows, put the part into the index, give the files their names, and
        return the part."""
        for split in SPLITS:
            self._flush(split, at_least=(1, 0))
        with self._room():
            for split, writer in self._writers.items():
                writer.close()
                sync_path(self._partial(split))
        files = tuple(
            DataFile(name, self._counts[split], _sha256(self._partial(split)))
            for split, name in self._names.items()
            if split in self._writers
        )
        left_out = dict(sorted(self.left_out.items()))
        part = DataPart(self._start, end, is_whole, files, left_out)
        self._folder.put(part)
        self._writers.clear()
        self._folder.settle(part)
        return part

    def _flush(self, split: str, *, at_least: tuple[int, int]) -> None:
        waiting = self._waiting[split]
        rows, size = sum(map(len, waiting)), sum(table.nbytes for table in waiting)
        if not rows or (rows < at_least[0] and size < at_least[1]):
            return
        with self._room():
            if split not in self._writers:
                self._partial(split).parent.mkdir(parents=True, exist_ok=True)
                self._writers[split] = pq.ParquetWriter(
                    self._partial(split), SCHEMA, compression="zstd"
                )
            self._writers[split].write_table(pa.concat_tables(waiting), row_group_size=rows)
        self._counts[split] += rows
        waiting.clear()

    @contextmanager
    def _room(self) -> Iterator[None]:
        """Raise StorageError with a hint when writing fails."""
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"cannot write {self._folder.path}: {error}",
                hint="free some space, then run the same command again: it continues",
            ) from error

    def _partial(self, split: str) -> Path:
        return self._folder.partial(self._names[split])


def _require_columns(found: pa.Schema) -> None:
    """Raise ValueError unless a file has the columns of a data set, and no other."""
    if found != SCHEMA:
        # Equal fields may have different hashes, so no sets.
        others = [each.name for each in found if each not in list(SCHEMA)]
        others += [each for each in SCHEMA.names if each not in found.names]
        raise ValueError(f"its columns differ from a data set's: {', '.join(others) or 'order'}")


def _require_values(rows: pa.Table) -> None:
    """Raise ValueError for a null, for text that is not UTF-8, or for damaged lists."""
    rows.validate(full=True)
    for name, column in zip(rows.column_names, rows.columns, strict=True):
        inner = [each.flatten() for each in column.chunks if pa.types.is_list(each.type)]
        if any(each.null_count for each in (column, *inner)):
            raise ValueError(f"the column {name} has nulls")


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def _difference(ours: Any, theirs: Any) -> str:
    return ", ".join(
        f"{name} {value}, not {getattr(ours, name)}"
        for name, value in asdict(theirs).items()
        if value != getattr(ours, name)
    )
