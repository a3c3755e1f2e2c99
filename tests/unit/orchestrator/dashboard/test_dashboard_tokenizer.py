"""Samples become text without settings: with the verified tokenizer of origin and relays."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import orchestrator_bench
import pytest
import uvloop
from dashboard_stage import History, save_tokenizer, sorting_rollouts, store
from orchestrator_fakes import RUN, Network

from muster.orchestrator.dashboard.samples import ASKED_VERSIONS, RETRY_S, RunTokenizer
from muster.protocol.ids import Hash32, PolicyVersion
from muster.protocol.messages import Reason, Verdict
from muster.shardcast import ChunkStore, Manifest, ShardServer, publish

pytestmark = pytest.mark.sqlite_only
KEY = bytes(31) + b"\x07"
VERSION = PolicyVersion(9)
NOBODY = "http://127.0.0.1:9"


@dataclass
class Origin:
    """A served version, and its root on chain."""

    folder: Path
    url: str
    manifest: Manifest
    roots: dict[PolicyVersion, Hash32] = field(default_factory=dict)
    now: float = 0.0

    def tokenizer(self, *servers: str, given: Path | None = None) -> RunTokenizer:
        return RunTokenizer(
            RUN, lambda: self.roots, servers, given=given, monotonic=lambda: self.now
        )


@pytest.fixture
async def origin(tmp_path: Path) -> AsyncIterator[Origin]:
    model = tmp_path / "model"
    model.mkdir()
    save_tokenizer(model / "tokenizer.json")
    # More than one chunk.
    text = (model / "tokenizer.json").read_text()
    (model / "tokenizer.json").write_text(text + " " * (3 << 20))
    (model / "config.json").write_text("{}")
    manifest = publish([model], tmp_path / "store", key=KEY, run_id=RUN, version=VERSION)
    async with ShardServer(ChunkStore(tmp_path / "store")) as server:
        yield Origin(model, server.url, manifest, {VERSION: manifest.root()})


async def test_tokenizer_is_fetched_from_whoever_has_it(origin: Origin) -> None:
    tokenizer = origin.tokenizer(NOBODY, f"{origin.url}/")
    path = await tokenizer.find()
    assert path is not None
    assert path.read_bytes() == (origin.folder / "tokenizer.json").read_bytes()
    folder = path.parent
    del tokenizer
    assert not folder.exists()


async def test_tokenizer_is_fetched_in_the_event_loop_of_the_server(origin: Origin) -> None:
    tokenizer = origin.tokenizer(origin.url)
    assert await asyncio.to_thread(uvloop.run, tokenizer.find()) is not None


async def test_the_first_version_has_the_tokenizer_of_later_ones(origin: Origin) -> None:
    later = range(VERSION + 1, VERSION + 2 * ASKED_VERSIONS)
    origin.roots |= {PolicyVersion(version): Hash32(bytes(32)) for version in later}
    assert await origin.tokenizer(origin.url).find() is not None
    origin.roots[PolicyVersion(1)] = Hash32(bytes(32))
    assert await origin.tokenizer(origin.url).find() is None


async def test_version_with_another_root_on_chain_is_not_believed(origin: Origin) -> None:
    origin.roots[VERSION] = Hash32(bytes(32))
    assert await origin.tokenizer(origin.url).find() is None


async def test_damaged_chunk_is_not_believed(origin: Origin, tmp_path: Path) -> None:
    true = (origin.folder / "tokenizer.json").read_bytes()
    (kept,) = [p for p in (tmp_path / "store").rglob("tokenizer.json") if p.read_bytes() == true]
    kept.chmod(0o644)
    kept.write_bytes(true[:-1] + b"x")
    assert await origin.tokenizer(origin.url).find() is None


async def test_failed_attempt_is_made_again_after_a_while(origin: Origin) -> None:
    known, origin.roots = origin.roots, {}
    tokenizer = origin.tokenizer(origin.url)
    assert await tokenizer.find() is None
    origin.roots = known
    origin.now = RETRY_S
    assert await tokenizer.find() is None
    origin.now = RETRY_S + 1
    assert await tokenizer.find() is not None


async def test_given_file_is_used_and_nobody_asked(origin: Origin, tmp_path: Path) -> None:
    given = tmp_path / "given.json"
    assert await origin.tokenizer(origin.url, given=given).find() == given


async def test_page_shows_text_when_the_origin_delivers(origin: Origin, tmp_path: Path) -> None:
    history = History(Network())
    history.register(2)
    history.work(20, steps=10, judged=20)
    shown = history.write_file(sorting_rollouts(9), Verdict.ACCEPTED, Reason.NONE)
    checkpoints = history.network.run.checkpoints
    true = dataclasses.replace(checkpoints[VERSION], manifest_root=origin.manifest.root())
    pages = []
    for number, checkpoint in enumerate((checkpoints[VERSION], true)):
        checkpoints[VERSION] = checkpoint
        folder = tmp_path / str(number)
        folder.mkdir()
        async with orchestrator_bench.open_bench(
            folder, history.network, origin=origin.url
        ) as bench:
            await store(history, bench)
            async with bench.http() as http:
                page = await http.get(f"/submissions/0x{shown.file_hash.hex()}")
                pages.append(page.text)
    assert "Prompt (token ids)" in pages[0]
    assert "sort " not in pages[0]
    assert "Prompt (token ids)" not in pages[1]
    assert "sort " in pages[1]
