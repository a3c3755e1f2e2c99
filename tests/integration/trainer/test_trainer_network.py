"""The trainer as a process on a real chain: creating a run, training it, dying and coming back."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from chain_scenario import HONEST, OWNER, TRAINER, network
from trainer_kills import timeless
from trainer_network import PASSWORD, RECIPE, Files, TrainerNetwork

from muster.protocol.errors import ConfigError, ContractRevert
from muster.protocol.ids import PolicyVersion, Step
from muster.protocol.seeds import ticket_seed
from muster.shardcast import ChunkStore
from muster.trainer.measure.pass_rates import count_passes, read_run
from muster.trainer.ports import ChainLedger
from muster.wallet import save_wallet

LAST = RECIPE.training.steps


@pytest.fixture
async def trainers(tmp_path: Path) -> AsyncIterator[TrainerNetwork]:
    """A chain with a worker, validators and documents."""
    files = Files()
    async with network(with_run=False) as scenario, files.serve() as url:
        made = TrainerNetwork(scenario, tmp_path, files, url)
        await made.prepare()
        yield made


async def _finish(process: asyncio.subprocess.Process) -> int:
    async with asyncio.timeout(180):
        return await process.wait()


async def test_created_run_pins_what_was_given_and_has_version_zero(
    trainers: TrainerNetwork,
) -> None:
    created = await trainers.create("run")
    runs = trainers.scenario.of(TRAINER).runs
    config = await runs.config_of(trainers.scenario.run_id)
    assert "0x" + config.recipe_hash.hex() == created["recipe_hash"]
    assert "0x" + config.base_model_hash.hex() == created["base_model_hash"]
    documents = {path.name for path in (trainers.folder / "documents").iterdir()}
    pinned = (config.recipe_hash, config.task_set_hash, config.calibration_hash)
    assert documents == {value.hex() for value in pinned}
    checkpoint = await runs.checkpoint_of(trainers.scenario.run_id, PolicyVersion(0))
    manifest = ChunkStore(trainers.folder / "run" / "store").manifest(
        trainers.scenario.run_id, PolicyVersion(0)
    )
    assert manifest is not None
    assert manifest.root() == checkpoint.manifest_root
    assert manifest.state_hash == config.base_model_hash


async def test_seed_of_a_record_is_its_ticket_s(trainers: TrainerNetwork) -> None:
    await trainers.create("run")
    await trainers.accept([3])
    run, view = trainers.scenario.run_id, await trainers.scenario.view()
    ledger = ChainLedger(view, run)
    (item,) = ledger.stream()
    # It joined after the policy was published.
    beacon = view.runs[run].members[HONEST.address].joined_beacon
    assert beacon != view.runs[run].checkpoints[PolicyVersion(0)].beacon
    assert ledger.seed_of(item.record) == ticket_seed(run, beacon, HONEST.address, Step(1), 3)


async def test_pass_rates_are_counted_from_what_the_chain_accepted(
    trainers: TrainerNetwork,
) -> None:
    await trainers.create("run")
    await trainers.accept(range(4))
    files = trainers.folder / "files"
    files.mkdir()
    for name, data in trainers.files.stored.items():
        (files / f"{name.removeprefix('0x')}.parquet").write_bytes(data)
    (files / "unjudged.parquet").write_bytes(b"never submitted")
    rpc, deployments = trainers.scenario.anvil.rpc_url, trainers.folder / "deployments"
    run, accepted = await read_run(rpc, deployments, trainers.scenario.run_id)
    passes = count_passes(accepted, PolicyVersion(0), files)
    assert (run.run_id, passes.files, passes.missing) == (trainers.scenario.run_id, 4, 0)
    assert dict(passes.samples) == {"p0": 16, "p1": 16}
    assert dict(passes.successes) == {"p0": 8, "p1": 8}
    with pytest.raises(ConfigError, match="no run 99"):
        await read_run(rpc, deployments, 99)


async def _assert_all_anchored(trainers: TrainerNetwork, name: str) -> None:
    """Every version is on chain, with the root of what the store holds and contiguous ranges."""
    store, run = ChunkStore(trainers.folder / name / "store"), trainers.scenario.run_id
    runs = trainers.scenario.of(TRAINER).runs
    for version in map(PolicyVersion, range(LAST + 1)):
        checkpoint = await runs.checkpoint_of(run, version)
        manifest = store.manifest(run, version)
        if manifest is None:  # the store keeps five, and others for the time of disputes
            assert version == 0
            continue
        assert manifest.root() == checkpoint.manifest_root
        taken = (manifest.stream_from, manifest.stream_to)
        assert taken == (max(2 * version - 2, 0), 2 * version)


@pytest.mark.parametrize(
    "flags", [(), pytest.param(("--context-ranks", "2"), marks=pytest.mark.slow)]
)
async def test_trainer_of_two_ranks_makes_the_policy_of_one(
    trainers: TrainerNetwork, flags: tuple[str, ...]
) -> None:
    await trainers.create("one")
    await trainers.accept(range(10))
    assert await _finish(await trainers.start("one")) == 0, trainers.log("one")
    assert [step for step, f in trainers.files.figures if "reward" in f] == [1, 2, 3, 4, 5]
    one, losses = safetensors.torch.load(trainers.weights("one", LAST)), _losses(trainers, "one")
    await trainers.create("two")
    await trainers.accept(range(10))
    process = await trainers.start("two", ranks=2, flags=flags)
    async with asyncio.timeout(300):
        assert await process.wait() == 0, trainers.log("two")
    await _assert_all_anchored(trainers, "two")
    two = safetensors.torch.load(trainers.weights("two", LAST))
    for weight in one:
        torch.testing.assert_close(two[weight], one[weight], rtol=0, atol=2e-5)
    assert _losses(trainers, "two") == pytest.approx(losses, rel=1e-3, abs=1e-5)


def _losses(trainers: TrainerNetwork, name: str) -> list[float]:
    return [line["loss"] for line in timeless(trainers, name) if "step" in line]


async def test_ranks_that_cannot_share_rows_are_told(trainers: TrainerNetwork) -> None:
    await trainers.create("apart")
    process = await trainers.start("apart", flags=["--context-ranks", "2"])
    assert await _finish(process) == 1
    said = trainers.log("apart")
    assert "error: 1 rank cannot be divided into groups of 2 that share rows" in said
    assert "hint: start 2, 4 or more processes with torchrun, or use --context-ranks 1" in said
    assert "Traceback" not in said


async def test_trainer_stops_cleanly_and_soon(trainers: TrainerNetwork) -> None:
    await trainers.create("stopped")
    await trainers.accept(range(2))
    process = await trainers.start("stopped")
    async with asyncio.timeout(180):
        while not any("step" in line for line in trainers.lines("stopped")):
            await asyncio.sleep(0.05)
    process.terminate()
    async with asyncio.timeout(60):
        assert await process.wait() == 0, trainers.log("stopped")
    assert "Traceback" not in trainers.log("stopped")


async def test_trainer_with_the_wrong_key_is_told(trainers: TrainerNetwork) -> None:
    await trainers.create("wrong")
    (trainers.folder / "trainer.json").unlink()
    save_wallet(trainers.folder / "trainer.json", OWNER.key, PASSWORD, light=True)
    assert await _finish(await trainers.start("wrong")) == 1
    assert "error: the key is of" in trainers.log("wrong")
    assert "Traceback" not in trainers.log("wrong")


async def test_lost_state_goes_on_from_the_published_policy(trainers: TrainerNetwork) -> None:
    await trainers.create("lost")
    await trainers.accept(range(6))
    process = await trainers.start("lost")
    async with asyncio.timeout(180):
        while await _newest(trainers) != 3:
            await asyncio.sleep(0.05)
    process.kill()
    await _finish(process)
    shutil.rmtree(trainers.folder / "lost" / "state")
    await trainers.accept(range(6, 10))
    assert await _finish(await trainers.start("lost")) == 0, trainers.log("lost")
    steps = [line for line in trainers.lines("lost") if "step" in line]
    assert [(s["step"], s["stream_from"], s["stream_to"]) for s in steps] == [(4, 6, 8), (5, 8, 10)]
    assert await _newest(trainers) == LAST


async def _newest(trainers: TrainerNetwork) -> int | None:
    try:
        return await trainers.scenario.of(TRAINER).runs.latest_version(trainers.scenario.run_id)
    except ContractRevert:
        return None
