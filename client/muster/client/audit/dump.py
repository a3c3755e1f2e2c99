"""A chain dump: one gzip file of JSON lines with all that an audit reads, for years to come.

    {"format": "muster-chain-dump", "version": 2, "chain_id", "deploy_block", "contracts",
     "parameters"}
    {"number", "hash", "timestamp", "logs": […], "header", "receipts"}      a block with events
    {"head": {"number", "hash"}, "observed": {…}, "blocks": n}

Logs, headers and receipts are as JSON-RPC gave them; header and receipts are null when the dump was
written with --prove none. Reading is streamed; anything malformed is an EncodingError.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from muster.chain import BlockId, Deployment
from muster.client.audit.observed import Observed
from muster.lifecycle.files import whole_file
from muster.protocol.encoding import hex0x
from muster.protocol.errors import ConfigError, EncodingError
from muster.protocol.ids import to_address, to_hash32

FORMAT, VERSION = "muster-chain-dump", 2
MAX_LINE_BYTES = 256 << 20
"""Longest line. The events of a block of 30 million gas take less than a tenth of it."""


@dataclass(frozen=True, slots=True)
class DumpedBlock:
    """A block with events of the contracts."""

    block: BlockId
    """Its number and hash."""
    timestamp: int
    """Its time, Unix seconds."""
    logs: Collection[Mapping[str, Any]]
    """The contracts' logs, in order."""
    header: Mapping[str, Any] | None = None
    """Its header, if the dump has it."""
    receipts: Sequence[Mapping[str, Any]] | None = None
    """Its receipts, if the dump has them."""


@dataclass(frozen=True, slots=True)
class DumpEnd:
    """The last line of a dump."""

    head: BlockId
    """The block up to which it was read."""
    observed: Observed
    """The contracts' state at that block."""


@contextmanager
def writing_dump(path: Path, deployment: Deployment) -> Iterator[DumpWriter]:
    """Yield the writer of a dump; the file appears whole or not at all."""
    with whole_file(path) as partial, gzip.open(partial, "wt", 6, "utf-8") as file:
        file.write(_line({"format": FORMAT, "version": VERSION, **asdict(deployment)}))
        yield DumpWriter(file)


@dataclass(slots=True)
class DumpWriter:
    """A dump being written: add the blocks in order, then the end."""

    file: IO[str]
    """The open file, after its first line."""
    blocks: int = 0
    """How many were added."""

    def add(self, block: DumpedBlock) -> None:
        """Write a block."""
        self.file.write(_line(_block(block)))
        self.blocks += 1

    def end(self, end: DumpEnd) -> None:
        """Write the last line."""
        head = {"number": end.head.number, "hash": hex0x(end.head.hash)}
        observed = end.observed.to_json()
        self.file.write(_line({"head": head, "observed": observed, "blocks": self.blocks}))


def _line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":")) + "\n"


def _block(block: DumpedBlock) -> dict[str, Any]:
    return {
        "number": block.block.number,
        "hash": hex0x(block.block.hash),
        "timestamp": block.timestamp,
        "logs": list(block.logs),
        "header": block.header,
        "receipts": None if block.receipts is None else list(block.receipts),
    }


@dataclass(slots=True)
class DumpReader:
    """A dump being read: iterate over `blocks`, then look at `end`."""

    path: Path
    """The file."""
    deployment: Deployment = field(init=False)
    """The contracts it is about."""
    end: DumpEnd | None = None
    """The last line; None until all blocks were read."""

    def __post_init__(self) -> None:
        with self._parsing():
            opening = json.loads(next(self._lines(), "null"))
            if not isinstance(opening, dict) or opening.get("format") != FORMAT:
                raise ConfigError(
                    f"{self.path} is no chain dump", hint="muster audit dump FILE writes one"
                )
            if opening["version"] != VERSION:
                raise ConfigError(
                    f"{self.path} is of version {opening['version']}, not {VERSION}",
                    hint="version 1 is of contracts before stake by run: muster 0.1.0 reads it",
                )
            self.deployment = Deployment(
                chain_id=int(opening["chain_id"]),
                deploy_block=int(opening["deploy_block"]),
                contracts={str(k): to_address(v) for k, v in opening["contracts"].items()},
                parameters=dict(opening["parameters"]),
            )

    def blocks(self) -> Iterator[DumpedBlock]:
        """Yield the blocks in order; raises EncodingError when the file is cut off or altered."""
        with self._parsing():
            for count, line in enumerate(self._lines(), -1):
                if count < 0:
                    continue
                value = json.loads(line)
                if "head" in value:
                    self._close(value, count)
                    return
                yield _dumped(value)
            raise EncodingError(f"{self.path} ends before its last line: it was cut off")

    def _close(self, value: Mapping[str, Any], count: int) -> None:
        if value["blocks"] != count:
            raise EncodingError(f"{self.path} has {count} blocks, {value['blocks']} were written")
        head = BlockId(int(value["head"]["number"]), to_hash32(value["head"]["hash"]))
        self.end = DumpEnd(head, Observed.from_json(value["observed"]))

    def _lines(self) -> Iterator[str]:
        try:
            with gzip.open(self.path, "rt", encoding="utf-8") as file:
                while line := file.readline(MAX_LINE_BYTES):
                    yield line
        except OSError as error:
            raise ConfigError(f"cannot read {self.path}: {error}") from error
        except (EOFError, zlib.error) as error:
            raise EncodingError(f"{self.path} is damaged: {error}") from error

    @contextmanager
    def _parsing(self) -> Iterator[None]:
        """Turn every exception that hostile JSON can cause into an EncodingError."""
        try:
            yield
        except (ConfigError, EncodingError):
            raise
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise EncodingError(f"{self.path} is malformed: {error}") from error


def _dumped(value: Mapping[str, Any]) -> DumpedBlock:
    number, hashed = int(value["number"]), to_hash32(value["hash"])
    for log in value["logs"]:
        if int(log["blockNumber"], 16) != number or to_hash32(log["blockHash"]) != hashed:
            raise EncodingError(f"a log of block {log['blockNumber']} is under block {number}")
    return DumpedBlock(
        block=BlockId(number, hashed),
        timestamp=int(value["timestamp"]),
        logs=value["logs"],
        header=value["header"],
        receipts=value["receipts"],
    )
