"""Policies, files and relays of strangers in an audit: one that hangs costs it no other version."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from worlds.client_chain import make_batch, make_view
from worlds.client_world import (
    CALIBRATION,
    DOMAIN,
    RECIPE,
    RUN,
    TASK_SET,
    VERSION,
    HashEngine,
    as_claimed,
    make_entry,
    make_rollouts,
    make_submission,
    make_ticket,
)
from worlds.validator_bench import PlainDecoder

from muster.client.audit.contradictions import NotRerun
from muster.client.audit.evidence import EvidenceFolders
from muster.client.audit.lineage import fetch_manifests
from muster.client.audit.reexecution import (
    HOW_ENGINE,
    HOW_MACHINE,
    HOW_POLICIES,
    Copies,
    Rejudge,
)
from muster.client.disputes.rerun import SILENCE_S
from muster.inference.loading import engine_of
from muster.inference.transformers_engine import TransformersEngine
from muster.inference.vllm.engine import ProcessEngine
from muster.lab.redteam.hostile.dripping import DrippingRelay, Manner
from muster.protocol.errors import EngineError, EngineSilent
from muster.protocol.ids import PolicyVersion
from muster.protocol.prompts import Prompt
from muster.protocol.rollouts import encode_rollouts
from muster.shardcast import ChunkStore, fetcher

NEXT = PolicyVersion(VERSION + 1)
HOW = HOW_ENGINE.format(version=VERSION)
FAILED = EngineError("the engine's process failed 4 times in a row, last: it ended with code 1")
SILENT = EngineSilent("the engine's process failed 4 times in a row, last: it said nothing")


class Hanging(HashEngine):
    """Fails with the texts of one version, or with the first of them, or to load that version."""

    def __init__(self, error: EngineError, *, loads: bool = True, most: int = 99) -> None:
        super().__init__()
        self.error, self.loads, self.most = error, loads, most
        self.tries = 0

    def load_policy(self, folder: Path, version: PolicyVersion) -> None:
        if version == VERSION and not self.loads:
            self._hang()
        super().load_policy(folder, version)

    def encode(self, text: Prompt, *, is_start: bool = True) -> tuple[int, ...]:
        if self.policy_version == VERSION and self.tries < self.most:
            self._hang()
        return super().encode(text, is_start=is_start)

    def _hang(self) -> None:
        self.tries += 1
        raise self.error


class Audit:
    """An audit of six outcomes, three of each version, whose evidence is whole."""

    def __init__(
        self,
        folder: Path,
        engine: HashEngine,
        *,
        relays: tuple[str, ...] = (),
    ) -> None:
        view = make_view()
        run = view.runs[RUN]
        config = run.config
        config.recipe_hash, config.calibration_hash = RECIPE.hash(), CALIBRATION.hash()
        config.task_set_hash = TASK_SET.hash()
        for document in (RECIPE, CALIBRATION):
            (folder / document.hash().hex()).write_bytes(document.to_bytes())
        (folder / TASK_SET.hash().hex()).write_bytes(TASK_SET.to_bytes())
        for version in (VERSION, NEXT):
            root = publish(folder, version)
            run.checkpoints[version] = replace_in(run.checkpoints[VERSION], version, root)
            for index in (0, 1, 2):
                number = 3 * (version - VERSION) + index + 1
                ticket = make_ticket(index=number, policy_version=version, policy_root=root)
                rows = make_rollouts(ticket, version)
                submission = make_submission(ticket, rows)
                name = submission.file_hash.hex()
                (folder / f"{name}.parquet").write_bytes(encode_rollouts(rows))
                (folder / f"{name}.json").write_text(
                    make_entry(ticket, submission).model_dump_json()
                )
                record = as_claimed(submission, 5)
                view.batches[number] = make_batch(number, [submission], [record])
        history: Any = SimpleNamespace(ledger=view, domain=DOMAIN)
        decoder: Any = PlainDecoder()
        copies = Copies(EvidenceFolders([folder]), relays, folder / "fetched")
        self.judge = Rejudge(history, run, copies, engine, decoder, folder)

    def results(self) -> list[str]:
        """Why each outcome cannot be run again; empty for one that agrees."""
        return asyncio.run(self.all_of())

    async def all_of(self) -> list[str]:
        found = [await self.judge.outcome(row) for row in range(6)]
        assert all(each is None or isinstance(each, NotRerun) for each in found), found
        return ["" if each is None else each.how for each in found]


def publish(folder: Path, version: PolicyVersion) -> Any:
    weights = folder / f"v{version}"
    weights.mkdir()
    (weights / "model.safetensors").write_text(f"policy {version}")
    manifest = ChunkStore(folder / f"store-{version}").publish(
        {"model.safetensors": weights / "model.safetensors"},
        run_id=RUN,
        version=version,
        stream_from=0,
        stream_to=0,
        sign=lambda _root: bytes(65),
    )
    (folder / f"manifest-{version}").write_bytes(manifest.to_bytes())
    return manifest.root()


def replace_in(checkpoint: Any, version: PolicyVersion, root: Any) -> Any:
    return SimpleNamespace(**vars(checkpoint) | {"version": version, "manifest_root": root})


def test_a_policy_that_hangs_is_tried_with_two_files_and_the_next_version_is_judged(
    tmp_path: Path,
) -> None:
    engine = Hanging(SILENT)
    assert Audit(tmp_path, engine).results() == [HOW, HOW, HOW, "", "", ""]
    assert engine.tries == 2


def test_a_file_that_hangs_hides_no_other_of_its_version(tmp_path: Path) -> None:
    engine = Hanging(SILENT, most=1)
    assert Audit(tmp_path, engine).results() == [HOW, "", "", "", "", ""]


def test_a_policy_that_does_not_load_is_loaded_once(tmp_path: Path) -> None:
    engine = Hanging(FAILED, loads=False)
    assert Audit(tmp_path, engine).results() == [HOW, HOW, HOW, "", "", ""]
    assert engine.tries == 1


def test_an_engine_that_fails_is_tried_for_every_outcome(tmp_path: Path) -> None:
    """A worker's submission that ends the process hides no other of its version, however long the
    policy takes to load again."""
    engine = Hanging(FAILED)
    assert Audit(tmp_path, engine).results() == [HOW_MACHINE] * 3 + [""] * 3
    assert engine.tries == 3


async def never(_seconds: float) -> None:
    """A pause between two drops that never ends."""
    await asyncio.Event().wait()


@pytest.mark.parametrize("manner", [Manner.SILENT, Manner.HEAD])
async def test_a_policy_that_a_relay_never_delivers_is_asked_for_once(
    tmp_path: Path, manner: Manner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher, "BASE_S", 1.0)
    results, asked = await with_a_relay(tmp_path, manner)
    assert results == [HOW_POLICIES, HOW_POLICIES, HOW_POLICIES, "", "", ""]
    assert asked == 1


async def test_a_policy_that_a_relay_delivers_is_judged(tmp_path: Path) -> None:
    results, _ = await with_a_relay(tmp_path, Manner.HONEST)
    assert results == [""] * 6


@pytest.mark.parametrize("manner", [Manner.SILENT, Manner.HEAD])
async def test_a_silent_relay_keeps_nobody_from_the_manifests_of_others(
    tmp_path: Path, manner: Manner
) -> None:
    root = publish(tmp_path, VERSION)
    wanted = {root: VERSION, bytes(32): NEXT}
    store = ChunkStore(tmp_path / f"store-{VERSION}")
    silent, honest = Asked(store, manner, pause=never), Asked(store, Manner.HONEST)
    async with silent.listening() as first, honest.listening() as second:
        assert set(await fetch_manifests([first, second], RUN, wanted, within_s=2.0)) == {root}
        assert await fetch_manifests([first], RUN, wanted, within_s=0.2) == {}
    assert honest.manifests_asked == 2


async def with_a_relay(folder: Path, manner: Manner) -> tuple[list[str], int]:
    """The audit's results where only a relay has the first version, and how often it was asked for
    the manifest."""
    relay = Asked(ChunkStore(folder / f"store-{VERSION}"), manner, pause=never)
    async with relay.listening() as url:
        audit = Audit(folder, HashEngine(), relays=(url,))
        shutil.rmtree(folder / f"v{VERSION}")
        return await audit.all_of(), relay.manifests_asked


class Asked(DrippingRelay):
    """Counts the requests for manifests."""

    manifests_asked = 0

    async def _answer(self, path: str, start: int, writer: asyncio.StreamWriter) -> None:
        self.manifests_asked += path.endswith("/manifest")
        await super()._answer(path, start, writer)


def test_policies_of_strangers_are_loaded_in_a_process_of_their_own() -> None:
    flags = {"engine": None, "threads": None, "dtype": None, "device": None}
    apart = engine_of(flags, silence_s=SILENCE_S)
    assert isinstance(apart, ProcessEngine)
    assert apart.pid is None
    assert isinstance(engine_of(flags), TransformersEngine)
