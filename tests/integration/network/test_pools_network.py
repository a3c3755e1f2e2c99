"""A run whose tickets skip the problems that its trainer set aside, and the saved work."""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from client_network import (
    TASK_SET,
    V0,
    WORKERS,
    Files,
    Network,
    Run,
    eventually,
    first_step,
    open_network,
    running,
    world,
)

from muster.app.cli import muster
from muster.chain import WorkerStatus
from muster.client.worker.loop import WorkerLoop
from muster.protocol.errors import MusterError
from muster.protocol.ids import PolicyVersion
from muster.protocol.messages import OutcomeRecord, Reason, Ticket, Verdict
from muster.protocol.recipe import FilterRecipe, Recipe
from muster.protocol.rollouts import Rollout, decode_rollouts
from muster.protocol.seeds import problem_indices, revisits
from muster.protocol.set_aside import FILE_NAME, NOTHING, SetAside, most_listed
from muster.trainer.ports import ChainLedger
from muster.trainer.stream.listing import Lists

pytestmark = pytest.mark.usefixtures("hash_engine")

V1 = PolicyVersion(1)
STEP, PROBLEMS, REVISIT = 8, 4, 8
"""Submissions per training step, problems of each; one draw in REVISIT revisits the list."""
FEW = 12
"""Submissions of version 1 that are looked at."""


def _recipe() -> Recipe:
    """The hash policy solves nothing: after one group a problem is too hard for it."""
    sampling = world.RECIPE.sampling.model_copy(update={"problems_per_submission": PROBLEMS})
    training = world.RECIPE.training.model_copy(
        update={"submissions_per_step": STEP, "max_async_level": 8}
    )
    filters = FilterRecipe(pool_window=4, pool_min_groups=1, pool_revisit=REVISIT)
    given = {"sampling": sampling, "training": training, "filters": filters}
    made: Recipe = world.RECIPE.model_copy(update=given)
    return made


RECIPE = _recipe()
PLACES = {problem.problem_id: place for place, problem in enumerate(TASK_SET)}


class Policies:
    """Makes the files of versions of the hash, with the list that each was given."""

    def __init__(self) -> None:
        self.lists: dict[PolicyVersion, SetAside] = {}

    def __call__(self, folder: Path, version: PolicyVersion) -> dict[str, Path]:
        files = folder / f"model-{version}"
        files.mkdir()
        (files / "model.safetensors").write_text(f"policy {version}")
        if listed := self.lists.get(version):
            (files / FILE_NAME).write_bytes(listed.bits)
        return {path.name: path for path in files.iterdir()}


class Stubborn(WorkerLoop):
    """Generates as if there were no list, and is honest otherwise."""

    async def generate(self, ticket: Ticket) -> list[Rollout]:
        async with self.policy(ticket.policy_version, ticket.policy_root):
            self.context.engine.set_aside = NOTHING  # type: ignore[misc]
        return await super().generate(ticket)


async def accepted(network: Network, version: PolicyVersion) -> list[OutcomeRecord]:
    ledger = ChainLedger(await network.view(), network.run_id)
    records = [item.record for item in ledger.stream()]
    return [record for record in records if record.policy_version == version]


def has(network: Network, version: PolicyVersion, count: int) -> Callable[[], Any]:
    async def reached() -> bool:
        return len(await accepted(network, version)) >= count

    return reached


async def drawn(network: Network, record: OutcomeRecord) -> tuple[list[int], list[int], list[bool]]:
    """Return the problems that a submission was generated for, those that its ticket would have
    derived without a list, and where it may come back to listed ones.
    """
    ledger = ChainLedger(await network.view(), network.run_id)
    seed = ledger.seed_of(record)
    assert seed is not None
    rows = decode_rollouts(await Files(network.folder / "files").file(record.file_hash))
    size = RECIPE.sampling.samples_per_problem
    generated = [PLACES[row.problem_id] for row in rows[::size]]
    plain = problem_indices(seed, PROBLEMS, len(TASK_SET))
    return generated, plain, [revisits(seed, j, REVISIT) for j in range(PROBLEMS)]


async def audit(network: Network, folder: Path) -> tuple[int, dict[str, Any], str]:
    """Judge every outcome again from copies of the evidence."""
    words = ["audit", "run", "1", "--evidence", str(folder), "--all", "--json"]
    chain = ["--rpc", network.anvil.rpc_url, "--deployments", str(network.folder / "deployments")]
    result = await asyncio.to_thread(CliRunner().invoke, muster, [*words, *chain])
    return result.exit_code, json.loads(result.stdout), result.stderr


def copy_of(network: Network, to: Path) -> Path:
    for name in ("files", "documents", "validator-0"):
        shutil.copytree(network.folder / name, to / name, ignore=shutil.ignore_patterns(".*"))
    return to


async def test_set_aside_problems_are_not_generated(tmp_path: Path) -> None:
    policies = Policies()
    run = Run(recipe=RECIPE, policy=policies)
    async with open_network(tmp_path, run=run) as network:
        judges = [network.validator(n) for n in (0, 1)]
        async with running(*judges):
            async with running(network.worker(0)):
                await eventually(has(network, V0, STEP))
            taken = await first_step(network, RECIPE)
            listed = Lists.over(RECIPE, TASK_SET).of(taken.pools)
            assert 0 < len(listed) <= most_listed(len(TASK_SET), PROBLEMS)
            policies.lists[V1] = listed
            await network.publish_step(V1, 0, taken.end.position)
            async with running(network.worker(0)):
                await eventually(has(network, V1, FEW))
            with pytest.raises(MusterError, match="banned"):
                async with running(network.worker(1, Stubborn)) as tasks, asyncio.timeout(180):
                    await tasks[0]

        # The generated problems, and those of the same tickets without the list.
        before = after = 0
        for record in await accepted(network, V1):
            generated, plain, may_return = await drawn(network, record)
            for place, may in zip(generated, may_return, strict=True):
                assert place not in listed or may
            before += sum(place in listed for place in plain)
            after += sum(place in listed for place in generated)
        assert after < before / 2

        view = await network.view()
        cheater = view.member(network.run_id, WORKERS[1].address)
        assert cheater is not None
        assert cheater.status is WorkerStatus.BANNED
        records = [r for b in view.batches.values() for r in b.records or ()]
        verdicts = {(r.verdict, r.reason) for r in records if r.worker_id == cheater.worker_id}
        assert (Verdict.FRAUD, Reason.WRONG_PROBLEM) in verdicts
        honest = view.member(network.run_id, WORKERS[0].address)
        assert honest is not None
        assert {r.verdict for r in records if r.worker_id == honest.worker_id} == {Verdict.ACCEPTED}

        # Anybody gets the same verdicts with the list that the root covers, and with no other.
        copy = copy_of(network, tmp_path / "copy")
        code, found, said = await audit(network, copy)
        assert (code, found["contradictions"]) == (0, []), said
        assert "cannot be run again" not in said
        [policy] = copy.glob("validator-0/**/v1")
        (policy / FILE_NAME).write_bytes(SetAside.of([0], len(TASK_SET)).bits)
        _, found, said = await audit(network, copy)
        assert found["contradictions"] == []
        assert "policy 1, root 0x" in said
