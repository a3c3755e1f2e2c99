"""Processes that read files of strangers get no password: a file may make the reader a program."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from muster.client.validator.decoding import FileDecoder
from muster.orchestrator.dashboard.samples import _run as read_samples
from muster.protocol.rollouts import Rollout, encode_rollouts
from muster.tasks.row_files import read_rows

SECRETS = ("MUSTER_PASSWORD", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY")
WRITES_DOWN = "import json, os; json.dump(dict(os.environ), open({path!r}, 'w'))"
FILE = encode_rollouts([Rollout("p", 0, 0, 0, -1, 0, (1,), (2,), b"proof", 1.0)])


async def decode(_: Path) -> None:
    async with FileDecoder() as decoder:
        assert len(await decoder.decode(FILE)) == 1


async def import_rows(folder: Path) -> None:
    pq.write_table(pa.table({"prompt": ["1+1"]}), folder / "rows.parquet")
    assert list(read_rows(folder / "rows.parquet")) == [{"prompt": "1+1"}]


async def show_samples(folder: Path) -> None:
    (folder / "file").write_bytes(FILE)
    assert len(json.loads(await read_samples([str(folder / "file")]))) == 1


@pytest.mark.parametrize("read", [decode, import_rows, show_samples])
async def test_process_that_reads_a_strangers_file_gets_no_secret(
    read: Callable[[Path], Awaitable[None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*SECRETS, "LC_NUMERIC"):
        monkeypatch.setenv(name, "1")
    given = tmp_path / "environ.json"
    (tmp_path / "sitecustomize.py").write_text(WRITES_DOWN.format(path=str(given)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    await read(tmp_path)
    environ = json.loads(given.read_text())
    assert not environ.keys() & set(SECRETS)
    assert environ.keys() >= {"PATH", "LC_NUMERIC", "PYTHONPATH"}
