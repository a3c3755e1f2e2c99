"""Two task sets in one run, from lease to training and export; a cheat of one part is slashed."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from client_network import WORKERS, Network, Run, eventually, first_step, open_network, running
from safetensors.numpy import save_file
from worlds.mixture_world import TASKS, Engine, mixed, preferring
from worlds.traces import save_tokenizer

from muster.chain import WorkerStatus
from muster.client.cli.data import export_command, verify_command
from muster.client.cli.model import fetch
from muster.client.worker.loop import WorkerLoop
from muster.client.worker.process import WorkerContext
from muster.protocol.errors import MusterError
from muster.protocol.ids import PolicyVersion
from muster.protocol.messages import Reason, Ticket
from muster.protocol.mixture import PartRecipe
from muster.protocol.recipe import Recipe
from muster.protocol.rollouts import Rollout
from muster.trainer.ports import ChainLedger
from muster.trainer.stream.reader import parts_of

STEP, PROBLEMS = 3, 8
"""Submissions of a training step, problems of each."""


def _recipe() -> Recipe:
    """Parts of equal weight, and enough problems per ticket that a part is hardly ever missing."""
    made = mixed(PartRecipe(name="sorts"), PartRecipe(name="turns", target_lengths=(5,))).recipe
    sampling = made.sampling.model_copy(update={"problems_per_submission": PROBLEMS})
    training = made.training.model_copy(update={"submissions_per_step": STEP})
    return made.model_copy(update={"sampling": sampling, "training": training})


RECIPE = _recipe()


def policy(folder: Path, version: PolicyVersion) -> dict[str, Path]:
    """A policy version of the hash, with a tokenizer for the rows of a data set."""
    files = save_tokenizer(folder / f"model-{version}")
    # At least one tensor for each layer of the configuration.
    tensors = {f"layer {n}": np.array([version]) for n in range(32)}
    save_file(tensors, files / "model.safetensors")
    return {path.name: path for path in files.iterdir()}


class EasyPart(WorkerLoop):
    """Draws every problem from the part that it prefers, and is honest otherwise."""

    async def generate(self, ticket: Ticket) -> list[Rollout]:
        self.context = _with_rules(self.context, preferring("sorts", self.context.rules))
        return await super().generate(ticket)


def _with_rules(context: WorkerContext, rules: Any) -> WorkerContext:
    object.__setattr__(context, "rules", rules)
    return context


def engine(_settings: object) -> Any:
    return Engine()


async def parts_of_stream(network: Network) -> list[str]:
    """Return the part of every group that is accepted."""
    ledger = ChainLedger(await network.view(), network.run_id)
    records = [item.record for item in ledger.stream()]
    found = (parts_of(record, RECIPE, ledger.seed_of(record)) for record in records)
    return [part.name for parts in found for part in parts]


async def muster(command: Any, *words: object) -> Any:
    invoke: Callable[..., Any] = CliRunner().invoke
    result = await asyncio.to_thread(invoke, command, [str(word) for word in words])
    assert result.exception is None, result.output
    return json.loads(result.stdout)


async def test_parts_are_generated_judged_trained_on_and_exported(tmp_path: Path) -> None:
    run = Run(recipe=RECIPE, task_set=TASKS, policy=policy)
    async with open_network(tmp_path, run=run) as network:
        judges = [network.validator(n, make_engine=engine) for n in (0, 1)]
        async with running(network.worker(1, EasyPart, engine), *judges) as tasks:
            with pytest.raises(MusterError, match="banned"):
                async with asyncio.timeout(180):
                    await tasks[0]
            async with running(network.worker(0, make_engine=engine)):

                async def is_step_full() -> bool:
                    found = await parts_of_stream(network)
                    return len(found) >= PROBLEMS * STEP

                await eventually(is_step_full)
        view = await network.view()
        cheater = view.member(network.run_id, WORKERS[1].address)
        assert cheater is not None
        assert cheater.status is WorkerStatus.BANNED
        records = [r for b in view.batches.values() for r in b.records or ()]
        verdicts = {r.reason for r in records if r.worker_id == cheater.worker_id}
        assert Reason.WRONG_PROBLEM in verdicts

        taken = await first_step(network, RECIPE)
        assert {*taken.parts} == {"sorts", "turns"}
        assert sum(tally.groups for tally in taken.parts.values()) == len(taken.uses) * PROBLEMS

        chain = ("--rpc", network.anvil.rpc_url, "--deployments", tmp_path / "deployments")
        model, out = tmp_path / "fetched", tmp_path / "traces"
        relay = ("--relay", network.origin, "--orchestrator", network.orchestrator)
        await muster(fetch, "--run", 1, "--out", model, *relay, "--json", *chain)
        evidence = ("--evidence", tmp_path / "files", "--evidence", tmp_path / "documents")
        where = (*evidence, "--model", model, "--json", *chain)
        await muster(export_command, "--run", 1, "--out", out, "--part", "turns", *where)
        rows = pq.read_table(out / "data").to_pylist()
        assert {(row["part"], row["target_length"]) for row in rows} == {("turns", 5)}
        assert {row["problem_id"] for row in rows} <= {TASKS[i].problem_id for i in range(20, 32)}
        assert all(
            check["passed"] for check in (await muster(verify_command, out, *where))["checks"]
        )
