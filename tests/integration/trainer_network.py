"""A real chain, a real trainer process, and an orchestrator that only hands over files."""

import asyncio
import json
import os
import random
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from chain_scenario import HONEST, ORCHESTRATOR, OWNER, TRAINER, VALIDATORS, Scenario, accepted

from muster.app.demo.processes import WarmProcess
from muster.chain import save_deployment
from muster.protocol.encoding import file_hash, hex0x
from muster.protocol.ids import PolicyVersion, RunId, Step
from muster.protocol.messages import Submission
from muster.protocol.recipe import Recipe, SamplingRecipe, TrainingRecipe
from muster.protocol.rollouts import Rollout, encode_rollouts
from muster.tasks.toys import split_sort
from muster.toploc import Calibration
from muster.toploc.calibration import CalibratedModel, ChunkLimits, SamplerLimits
from muster.trainer.base_model import WarmStart, build_base_model
from muster.trainer.create import RunPlan, create_run
from muster.wallet import save_wallet

PASSWORD = "test"
RECIPE = Recipe(
    name="integration",
    sampling=SamplingRecipe(
        problems_per_submission=2, samples_per_problem=4, temperature=1.0, max_new_tokens=6
    ),
    # The base model samples everything, so rollouts may be as old as the run is long.
    training=TrainingRecipe(
        steps=5, submissions_per_step=2, max_async_level=8, optimizer_steps=2, learning_rate=1e-3
    ),
)
CALIBRATION = Calibration(
    model=CalibratedModel(
        name="demo", architecture="Qwen3ForCausalLM", hidden_size=64, vocab_size=16, engine="test"
    ),
    submission_samples=128,
    max_new_tokens=100_000,
    chunk=ChunkLimits(
        max_exponent_mismatches=1,
        max_mantissa_error_mean=1.0,
        max_mantissa_error_median=1.0,
        max_sign_mismatches=1,
    ),
    sampler=SamplerLimits(margin=0.1, max_outside_per_sample=0),
    fraud_strikes=2,
)


def rollouts(seed: int) -> list[Rollout]:
    """Return a submission of random digits, half of it rewarded."""
    rng = random.Random(seed)
    rows = []
    for row in range(8):
        completion = (*(rng.randrange(3, 13) for _ in range(rng.randrange(1, 6))), 1)
        rows.append(
            Rollout(
                f"p{row // 4}",
                row // 4,
                row % 4,
                rng.getrandbits(64),
                -1,
                0,
                (3, 4, 5, 6, 13),
                completion,
                b"proof",
                float(row % 2),
            )
        )
    return rows


@dataclass
class Files:
    """Serves a trainer what an orchestrator would."""

    stored: dict[str, bytes] = field(default_factory=dict)
    figures: list[tuple[int, dict[str, float]]] = field(default_factory=list)

    def put(self, data: bytes) -> bytes:
        self.stored[hex0x(file_hash(data))] = data
        return file_hash(data)

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_get("/v1/files/{hash}", self._file)
        app.router.add_post("/v1/metrics", self._metrics)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            host, port = runner.addresses[0]
            yield f"http://{host}:{port}"
        finally:
            await runner.cleanup()

    async def _file(self, request: web.Request) -> web.Response:
        data = self.stored.get(request.match_info["hash"])
        return web.Response(body=data) if data is not None else web.Response(status=404)

    async def _metrics(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.figures.append((body["step"], body["metrics"]))
        return web.Response(status=204)


@dataclass
class TrainerNetwork:
    """One chain, any number of runs, each with trainers that come and go."""

    scenario: Scenario
    folder: Path
    files: Files
    orchestrator: str
    recipe: Recipe = RECIPE

    async def prepare(self) -> None:
        """Write model, documents and keystore."""
        save_deployment(self.folder / "deployments", self.scenario.deployment)
        save_wallet(self.folder / "trainer.json", TRAINER.key, PASSWORD, light=True)
        warm_start = WarmStart(steps=20, batch=32)
        await asyncio.to_thread(
            build_base_model, self.folder / "model", seed=0, warm_start=warm_start
        )
        tasks, held_out = split_sort(32, 16, 0)
        (self.folder / "tasks.jsonl").write_bytes(tasks.to_bytes())
        (self.folder / "held-out.jsonl").write_bytes(held_out.to_bytes())
        (self.folder / "calibration.json").write_bytes(CALIBRATION.to_bytes())
        await self.scenario.of(OWNER).token.faucet(OWNER.address, 10**18)

    async def create(self, name: str) -> dict[str, Any]:
        """Create a run whose store is called `name`; version 0 is published, all have joined."""
        plan = RunPlan(
            model=self.folder / "model",
            recipe=self.recipe,
            task_set=self.folder / "tasks.jsonl",
            calibration=self.folder / "calibration.json",
            trainer=TRAINER.address,
            orchestrator=ORCHESTRATOR.address,
            validators=[v.address for v in VALIDATORS],
            quorum=2,
            price_wei=10**12,
            fraud_ppm=250_000,
            exact_fraud_ppm=500_000,
            fund_wei=10**17,
            store=self.folder / name / "store",
            documents=self.folder / "documents",
        )
        created = await create_run(
            plan,
            rpc=self.scenario.anvil.rpc_url,
            deployments=self.folder / "deployments",
            owner=OWNER.key,
            trainer=TRAINER.key,
        )
        self.scenario.run_id = RunId(created["run_id"])
        for validator in VALIDATORS:
            await self.scenario.sit(validator)
        await self.scenario.join(HONEST)
        await self.scenario.rpc.call("evm_mine")
        return created

    async def accept(self, seeds: Sequence[int]) -> None:
        """Have a batch of submissions committed and accepted."""
        submissions = [
            Submission(
                run_id=self.scenario.run_id,
                worker=HONEST.address,
                step=Step(1),
                index=seed,
                policy_version=PolicyVersion(0),
                file_hash=file_hash(encode_rollouts(rollouts(seed))),
                rollouts=8,
                units=10,
            )
            for seed in seeds
        ]
        for seed in seeds:
            self.files.put(encode_rollouts(rollouts(seed)))
        batch_id = await self.scenario.commit(submissions)
        await self.scenario.post(batch_id, submissions, [accepted(1, s) for s in submissions])

    def command(self, name: str) -> tuple[list[str], dict[str, str]]:
        """Return the words after `muster`, and the environment, of a run's trainer."""
        run = self.scenario.run_id
        words = f"trainer run --run {run} --port 0 --poll-s 0.05 --orchestrator {self.orchestrator}"
        words += f" --rpc {self.scenario.anvil.rpc_url}"
        paths = {
            "--keystore": self.folder / "trainer.json",
            "--deployments": self.folder / "deployments",
            "--documents": self.folder / "documents",
            "--store": self.folder / name / "store",
            "--state-dir": self.folder / name / "state",
            "--eval-set": self.folder / "held-out.jsonl",
        }
        flags = [word for flag, path in paths.items() for word in (flag, str(path))]
        return [*words.split(), *flags], {"MUSTER_PASSWORD": PASSWORD, "OMP_NUM_THREADS": "1"}

    async def start(
        self, name: str, *, ranks: int = 1, flags: Sequence[str] = ()
    ) -> asyncio.subprocess.Process | WarmProcess:
        """Start a trainer, of some processes, on the run and state folder called `name`."""
        words, env = self.command(name)
        words += flags
        if ranks == 1:
            command, path = ["muster.app", *words], self.folder / f"{name}.log"
            return await WarmProcess.start(command, path, env)
        # torchrun would take --run for an abbreviation of a flag of its own.
        launcher = f"-m torch.distributed.run --standalone --nproc-per-node {ranks} --no-python --"
        with (self.folder / f"{name}.log").open("a") as log:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, *launcher.split(), sys.executable, "-m", "muster.app", *words),
                stdout=log,
                stderr=log,
                env={**os.environ, **env},
                start_new_session=True,
            )

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Return the trainer's lines about its steps and evaluations."""
        path = self.folder / name / "state" / "metrics.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]

    def weights(self, name: str, version: int) -> bytes:
        """Return a version's weights file."""
        folder = self.folder / name / "state" / "policies" / str(version)
        return (folder / "model.safetensors").read_bytes()

    def log(self, name: str) -> str:
        """Return the trainer's log."""
        return (self.folder / f"{name}.log").read_text()
