"""Workers and validators on a real chain, orchestrator and origin; only the model is a hash, unless
a network is opened on another run.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from worlds import client_world as world

from muster.app.anvil import Anvil
from muster.chain import Chain, ChainView, RunConfig, RunTerms, read_view
from muster.client.connections import EngineFactory
from muster.client.juror.duty import run_juror
from muster.client.relay import RelaySettings, serve_relay
from muster.client.settings import JurorSettings, NodeSettings, ValidatorSettings, WorkerSettings
from muster.client.stake import join_bench, join_run, take_from_faucet, take_seat
from muster.client.validator.loop import ValidatorLoop
from muster.client.validator.process import run_validator
from muster.client.worker.loop import WorkerLoop
from muster.client.worker.process import run_worker
from muster.deploy import DeployParameters, deploy_contracts
from muster.orchestrator.process import serve
from muster.orchestrator.settings import OrchestratorSettings
from muster.protocol.eip712 import address_of, digest, sign
from muster.protocol.encoding import keccak
from muster.protocol.ids import Hash32, PolicyVersion, RunId
from muster.protocol.messages import Checkpoint
from muster.protocol.recipe import Recipe
from muster.shardcast import ChunkStore, ShardServer
from muster.tasks import TaskSet
from muster.toploc import Calibration
from muster.trainer.ports import ChainLedger
from muster.trainer.stream.reader import Cursor, StepInput, StreamReader
from muster.wallet import Wallet

CALIBRATION, TASK_SET = world.CALIBRATION, world.TASK_SET


def recipe_of(submissions_per_step: int) -> Recipe:
    """A recipe by which workers make three steps' submissions before there is a policy to go on."""
    training = world.RECIPE.training.model_copy(
        update={"submissions_per_step": submissions_per_step}
    )
    return cast("Recipe", world.RECIPE.model_copy(update={"training": training}))


RECIPE = recipe_of(8)

TOKEN = 10**18
PRICE = TOKEN // 1000
OWNER, ORCHESTRATOR, TRAINER, *REST = (
    Wallet(address_of(Anvil.key(i)), Anvil.key(i)) for i in range(9)
)
VALIDATORS, WORKERS, THIRD = REST[:2], REST[2:4], REST[4]
NODES, JURORS = (
    [Wallet(address_of(key), key) for key in (keccak(name % i) for i in range(count))]
    for name, count in ((b"node %d", 2), (b"juror %d", 3))
)
VALIDATOR_STAKE, WORKER_STAKE, JUROR_STAKE = 500 * TOKEN, 100 * TOKEN, 500 * TOKEN
V0 = PolicyVersion(0)
POLL_S = 0.1
"""Tests wait for seconds; shorter intervals would keep the processor busy."""
PARAMETERS = DeployParameters(
    activation_delay_blocks=0,
    challenge_window_s=2,
    outcome_deadline_s=60,
    vote_commit_s=6,
    vote_reveal_s=4,
    unbonding_s=3600,
)


def hash_engine(_settings: NodeSettings) -> Any:
    return world.HashEngine()


def hashed_policy(folder: Path, version: PolicyVersion) -> dict[str, Path]:
    """A policy version of the hash: a file that says which."""
    weights = folder / f"model-{version}"
    weights.write_text(f"policy {version}")
    return {"model.safetensors": weights}


@dataclass(frozen=True)
class Run:
    """The documents of a run, and the maker of its policies' files."""

    recipe: Recipe = RECIPE
    calibration: Calibration = CALIBRATION
    task_set: TaskSet = TASK_SET
    policy: Callable[[Path, PolicyVersion], dict[str, Path]] = hashed_policy


HASHED = Run()


@dataclass
class Network:
    """A chain with one run, its origin and its orchestrator."""

    folder: Path
    anvil: Anvil
    owner: Chain
    trainer: Chain
    store: ChunkStore
    run_id: RunId
    run: Run
    orchestrator: str = ""
    origin: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the orchestrator that differ from the usual ones."""
    serving: AsyncExitStack = field(default_factory=AsyncExitStack)

    def _common(self, name: str) -> dict[str, Any]:
        return {
            "run": self.run_id,
            "orchestrator": self.orchestrator,
            "rpc": self.anvil.rpc_url,
            "deployments": self.folder / "deployments",
            "state_dir": self.folder / name,
            "poll_s": POLL_S,
        }

    def worker(
        self,
        number: int,
        loop_class: type[WorkerLoop] = WorkerLoop,
        make_engine: EngineFactory = hash_engine,
        **settings: Any,
    ) -> Any:
        common = self._common(f"worker-{number}")
        return run_worker(
            WorkerSettings(
                **common,
                worker=WORKERS[number].address,
                heartbeat_s=0.5,
                # Replacements of a part of the loop handle one ticket at a time.
                **{"tickets_per_engine": 2 if loop_class is WorkerLoop else 1, **settings},
            ),
            NODES[number],
            engine_factory=make_engine,
            loop_class=loop_class,
        )

    def validator(
        self,
        number: int,
        loop_class: type[ValidatorLoop] = ValidatorLoop,
        make_engine: EngineFactory = hash_engine,
        wallet: Wallet | None = None,
        **settings: Any,
    ) -> Any:
        return run_validator(
            ValidatorSettings(**{**self._common(f"validator-{number}"), **settings}),
            wallet or [*VALIDATORS, THIRD][number],
            engine_factory=make_engine,
            loop_class=loop_class,
        )

    def juror(self, number: int, make_engine: EngineFactory = hash_engine, **settings: Any) -> Any:
        return run_juror(
            JurorSettings(
                rpc=self.anvil.rpc_url,
                deployments=self.folder / "deployments",
                state_dir=self.folder / f"juror-{number}",
                poll_s=POLL_S,
                **settings,
            ),
            JURORS[number],
            engine_factory=make_engine,
        )

    async def connect(self, wallet: Wallet) -> Chain:
        """Return a connection that signs for an account."""
        return await Chain.connect(self.anvil.rpc_url, self.folder / "deployments", key=wallet.key)

    async def take_seat(self, wallet: Wallet) -> None:
        """Let an invited account stake and take its seat."""
        async with await self.connect(wallet) as chain:
            await take_from_faucet(chain, wallet.address, VALIDATOR_STAKE)
            await take_seat(chain, self.run_id, 1, VALIDATOR_STAKE)

    async def seat_third(self) -> None:
        """Give the run a third validator."""
        await self.owner.runs.invite(self.run_id, THIRD.address, True)
        await self.take_seat(THIRD)

    async def seat_jurors(self) -> None:
        """Put three accounts on the network's bench; cases that open later may draw them."""
        for wallet in JURORS:
            await self.anvil.set_balance(wallet.address, 100 * TOKEN)
            async with await self.connect(wallet) as chain:
                await take_from_faucet(chain, wallet.address, JUROR_STAKE)
                await join_bench(chain, JUROR_STAKE)
        # A case of the same second would not draw them.
        await self.owner.rpc.call("evm_increaseTime", 1)

    async def start_orchestrator(self, wallet: Wallet = ORCHESTRATOR, **changes: Any) -> None:
        """Start the orchestrator, with an account and changed settings."""
        serving = _orchestrator(self, wallet, self.settings | changes)
        self.orchestrator = await self.serving.enter_async_context(serving)

    async def stop_orchestrator(self) -> None:
        """Stop the orchestrator."""
        await self.serving.aclose()

    async def view(self) -> ChainView:
        return await read_view(self.owner, ChainView())

    async def publish(self, version: PolicyVersion) -> None:
        """Publish a policy version that consumed nothing."""
        await self.publish_step(version, 0, 0)

    async def publish_step(self, version: PolicyVersion, start: int, end: int) -> None:
        """Publish a policy version that says which part of the training stream it consumed."""
        manifest = await asyncio.to_thread(
            self.store.publish,
            self.run.policy(self.folder, version),
            run_id=self.run_id,
            version=version,
            stream_from=start,
            stream_to=end,
            sign=lambda root: self._sign_root(version, root),
        )
        await self.trainer.runs.publish_checkpoint(self.run_id, version, manifest.root())

    def _sign_root(self, version: PolicyVersion, root: Hash32) -> bytes:
        struct = Checkpoint(self.run_id, version, root).struct_hash()
        return sign(digest(self.owner.domain("RunRegistry"), struct), TRAINER.key)


@asynccontextmanager
async def running(*mains: Coroutine[Any, Any, None]) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Run clients until the block ends."""
    tasks = [asyncio.ensure_future(main) for main in mains]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def eventually(condition: Callable[[], Awaitable[bool]], timeout_s: float = 180) -> None:
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(POLL_S)


@asynccontextmanager
async def open_network(
    folder: Path, parameters: DeployParameters = PARAMETERS, run: Run = HASHED, **orchestrator: Any
) -> AsyncIterator[Network]:
    """Start everything but workers and validators; `orchestrator` are settings of that."""
    async with AsyncExitStack() as stack:
        anvil = await stack.enter_async_context(Anvil())
        deployments = folder / "deployments"
        await deploy_contracts(anvil.rpc_url, OWNER.key, parameters, deployments=deployments)

        async def connect(wallet: Wallet) -> Chain:
            return await stack.enter_async_context(
                await Chain.connect(anvil.rpc_url, deployments, key=wallet.key)
            )

        owner = await connect(OWNER)
        run_id, _ = await owner.runs.create_run(_config(run))
        await take_from_faucet(owner, OWNER.address, 1000 * TOKEN)
        await owner.token.approve(owner.deployment.contracts["RewardEscrow"], 1000 * TOKEN)
        await owner.escrow.fund(run_id, 1000 * TOKEN)
        (folder / "documents").mkdir()
        run.task_set.write(folder / "documents" / run.task_set.hash().hex())
        for data in (run.recipe.to_bytes(), run.calibration.to_bytes()):
            (folder / "documents" / keccak(data).hex()).write_bytes(data)
        store = ChunkStore(folder / "origin")
        network = Network(folder, anvil, owner, await connect(TRAINER), store, run_id, run)
        for wallet in VALIDATORS:
            await network.take_seat(wallet)
        for wallet, node in zip(WORKERS, NODES, strict=True):
            chain = await connect(wallet)
            await take_from_faucet(chain, wallet.address, WORKER_STAKE)
            await join_run(chain, wallet, node, run_id, WORKER_STAKE)
        await network.publish(V0)
        origin = await stack.enter_async_context(ShardServer(store))
        network.origin = origin.url
        network.settings = orchestrator
        stack.push_async_callback(network.stop_orchestrator)
        await network.start_orchestrator()
        yield network


def _config(run: Run) -> RunConfig:
    return RunConfig(
        trainer=TRAINER.address,
        orchestrator=ORCHESTRATOR.address,
        base_model_hash=keccak(b"base model"),
        task_set_hash=run.task_set.hash(),
        recipe_hash=run.recipe.hash(),
        calibration_hash=run.calibration.hash(),
        terms=RunTerms(PRICE, 100_000, 500_000, 2),
        validators=tuple(wallet.address for wallet in VALIDATORS),
    )


@asynccontextmanager
async def _orchestrator(
    network: Network, wallet: Wallet, changes: dict[str, Any]
) -> AsyncIterator[str]:
    ready = network.folder / "ready"
    ready.unlink(missing_ok=True)
    given: dict[str, Any] = {
        "run": network.run_id,
        "keystore": network.folder / "unused",
        "rpc": network.anvil.rpc_url,
        "deployments": network.folder / "deployments",
        "documents": network.folder / "documents",
        "files": network.folder / "files",
        "database": network.folder / "orchestrator.sqlite3",
        "port": 0,
        "ready_file": ready,
        "origin": network.origin,
        "poll_s": POLL_S,
        "commit_interval_s": 0.1,
        "retry_after_s": 0.1,
    }
    settings = OrchestratorSettings(**given | changes)
    process = asyncio.create_task(serve(settings, wallet.key))
    async with asyncio.timeout(180):
        while not ready.exists():
            if process.done():
                await process
            await asyncio.sleep(0.02)
    try:
        yield ready.read_text().strip()
    finally:
        process.cancel()
        await asyncio.wait([process])


@asynccontextmanager
async def relay_of(network: Network) -> AsyncIterator[str]:
    ready = network.folder / "relay-ready"
    settings = RelaySettings(
        run=network.run_id,
        upstream=(network.origin,),
        rpc=network.anvil.rpc_url,
        deployments=network.folder / "deployments",
        store=network.folder / "relay",
        port=0,
        ready_file=ready,
        poll_s=POLL_S,
        keep_going=True,
    )
    async with running(serve_relay(settings)) as [task]:
        async with asyncio.timeout(180):
            while not ready.exists():
                if task.done():
                    task.result()
                await asyncio.sleep(0.02)
        yield ready.read_text().strip()


class Files:
    """The orchestrator's folder of files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def file(self, submission_file_hash: Hash32) -> bytes:
        return (self._folder / f"{submission_file_hash.hex()}.parquet").read_bytes()


async def first_step(network: Network, recipe: Recipe) -> StepInput:
    """Return the records of the run that a trainer's first step takes."""
    ledger = ChainLedger(await network.view(), network.run_id)
    files = Files(network.folder / "files")
    reader = StreamReader(ledger, files, recipe, vocab_size=16, seed_of=ledger.seed_of)
    async with asyncio.timeout(180):
        return await reader.next_step(Cursor(), V0)
