"""Cheats in the whole pipeline: chain, orchestrator, storage, origin and validators, all real.

In a separate network every adversary of `muster.app.demo.adversary` is a registered worker with a
stake and works beside the others and an honest one. It is caught when the chain shows a verdict
other than Accepted for the expected reason and, for fraud, a slash. The measured time is from the
commitment to the posted outcome. There is no time limit: deadlines on this chain are hours, and a
session continues as long as its members make progress.

On a busy machine a session may get a tenth of a CPU and be ten times slower, so no fixed timeout is
right. Instead the session's own CPU time since the last progress is limited.
"""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from muster.app.anvil import Anvil
from muster.app.demo.adversary import KINDS
from muster.app.demo.local_network import FRAUD_PPM, PARAMETERS, PRICE_PER_UNIT
from muster.chain import (
    BatchView,
    Chain,
    ChainView,
    RunConfig,
    RunTerms,
    WorkerStatus,
    follow,
)
from muster.client.settings import ValidatorSettings, WorkerSettings
from muster.client.stake import join_run, take_from_faucet, take_seat
from muster.client.validator.process import run_validator
from muster.client.worker.loop import WorkerLoop
from muster.client.worker.process import run_worker
from muster.deploy import deploy_contracts
from muster.inference.transformers_engine import TransformersEngine
from muster.lab.redteam.stage import Stage
from muster.lab.redteam.trials import Outcome, PlayMany, Variant
from muster.lifecycle import free_port
from muster.orchestrator.process import serve
from muster.orchestrator.settings import OrchestratorSettings
from muster.protocol.eip712 import address_of, digest, sign
from muster.protocol.encoding import keccak
from muster.protocol.errors import MusterError
from muster.protocol.ids import Hash32, PolicyVersion, RunId
from muster.protocol.messages import Checkpoint, OutcomeRecord, Reason, Verdict
from muster.shardcast import ChunkStore, ShardServer
from muster.wallet import Wallet

TOKEN = 10**18
HOURS = 3600
TERMS = PARAMETERS.model_copy(
    update={
        "activation_delay_blocks": 0, "challenge_window_s": 1, "outcome_deadline_s": 4 * HOURS,
        "unbonding_s": 24 * HOURS, "change_delay_s": 24 * HOURS,
        "required_worker_stake": 100 * TOKEN, "required_validator_stake": 500 * TOKEN,
    }
)  # fmt: skip
V0 = PolicyVersion(0)
POLL_S = 0.2
VALIDATORS = ("validator 0", "validator 1")
HONEST = "honest"
"""The worker beside the adversaries that does not cheat."""


def _wallet(name: str) -> Wallet:
    key = keccak(name.encode())
    return Wallet(address_of(key), key)


@dataclass(slots=True)
class Member:
    """A worker of a session."""

    kind: str
    """Kind of cheating, or honest."""
    wallet: Wallet
    """Its staking wallet."""
    node: Wallet
    """Its node's key, which signs for it."""
    loop: WorkerLoop | None = field(default=None, repr=False)
    """Its running loop; None before the start."""


class Session:
    """One network, and the adversaries in it."""

    def __init__(self, stage: Stage, folder: Path) -> None:
        self._stage = stage
        self._folder = folder
        self._run_id = RunId(1)
        self._orchestrator = ""
        self._view = ChainView()
        self._starts = Starts()

    async def play(self, kinds: Sequence[str]) -> list[Outcome]:
        """Return the outcome of a member of each kind, in the given order."""
        cast = [
            Member(kind, _wallet(f"wallet {i} {kind}"), _wallet(f"node {i} {kind}"))
            for i, kind in enumerate(kinds)
        ]
        async with self._open(cast) as owner:
            tasks = [asyncio.ensure_future(follow(owner, self._view, poll_s=POLL_S))]
            tasks += [asyncio.ensure_future(self._validate(name)) for name in VALIDATORS]
            tasks += [asyncio.ensure_future(self._work(member)) for member in cast]
            try:
                return await self._judged(cast, tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _judged(
        self, cast: Sequence[Member], tasks: Sequence[asyncio.Future[None]]
    ) -> list[Outcome]:
        patience = Patience()
        while True:
            for task in tasks:
                if task.done():
                    task.result()  # raises an unexpected error
            found = [self._outcome(member) for member in cast]
            if all(found) or patience.is_over(self._progress(cast)):
                break
            await asyncio.sleep(POLL_S)
        pairs = zip(found, cast, strict=True)
        return [o or Outcome(False, "NO OUTCOME", self._why(member)) for o, member in pairs]

    def _progress(self, cast: Sequence[Member]) -> tuple[object, ...]:
        """Return values that change only if the session makes progress towards outcomes."""
        posted = sum(batch.posted_at is not None for batch in self._view.batches.values())
        begun = tuple(member.loop is not None and member.loop.uploads.count > 0 for member in cast)
        done = tuple(self._outcome(member) is not None for member in cast)
        return posted, begun, done

    def _outcome(self, member: Member) -> Outcome | None:
        return outcome_on_chain(self._view, member)

    def _why(self, member: Member) -> str:
        """Return an explanation for a member without an outcome."""
        batches = self._view.batches.values()
        waiting = [batch.batch_id for batch in batches if batch.posted_at is None]
        loop = member.loop
        did = f"{loop.state}, {loop.uploads.count} uploads" if loop else "not started"
        lasting = loop.held.outages.lasting if loop else []
        lacking = f", lacks {', '.join(lasting)}" if lasting else ""
        return (
            f"{member.kind} {did}{lacking}; {len(batches)} batches, without outcomes: {waiting}; "
            f"ended and started again: {self._starts.ended or 'nobody'}"
        )

    # The network

    @asynccontextmanager
    async def _open(self, cast: Sequence[Member]) -> AsyncIterator[Chain]:
        async with AsyncExitStack() as stack:
            anvil = await stack.enter_async_context(Anvil())
            self._rpc = anvil.rpc_url
            boss = Wallet(address_of(anvil.key(0)), anvil.key(0))
            await deploy_contracts(self._rpc, boss.key, TERMS, deployments=self._deployments)
            owner = await self._connect(stack, boss)
            for name in ("trainer", "orchestrator"):
                await anvil.set_balance(_wallet(name).address, TOKEN)
            self._run_id, _ = await owner.runs.create_run(self._config())
            for wallet in map(_wallet, VALIDATORS):
                await anvil.set_balance(wallet.address, TOKEN)
                chain = await self._connect(stack, wallet)
                await take_from_faucet(chain, wallet.address, 500 * TOKEN)
                await take_seat(chain, self._run_id, 1, 500 * TOKEN)
            for each in cast:
                await anvil.set_balance(each.wallet.address, TOKEN)
                chain = await self._connect(stack, each.wallet)
                await take_from_faucet(chain, each.wallet.address, 100 * TOKEN)
                await join_run(chain, each.wallet, each.node, self._run_id, 100 * TOKEN)
            await owner.token.approve(owner.deployment.contracts["RewardEscrow"], 1000 * TOKEN)
            await owner.escrow.fund(self._run_id, 1000 * TOKEN)
            self._write_documents()
            store = await self._publish(owner, await self._connect(stack, _wallet("trainer")))
            origin = await stack.enter_async_context(ShardServer(store))
            await stack.enter_async_context(self._serve(origin.url))
            yield owner

    @property
    def _deployments(self) -> Path:
        return self._folder / "deployments"

    async def _connect(self, stack: AsyncExitStack, wallet: Wallet) -> Chain:
        return await stack.enter_async_context(
            await Chain.connect(self._rpc, self._deployments, key=wallet.key)
        )

    def _config(self) -> RunConfig:
        stage = self._stage
        return RunConfig(
            trainer=_wallet("trainer").address,
            orchestrator=_wallet("orchestrator").address,
            base_model_hash=keccak(b"base model"),
            task_set_hash=stage.task_set.hash(),
            recipe_hash=stage.recipe.hash(),
            calibration_hash=stage.calibration.hash(),
            terms=RunTerms(PRICE_PER_UNIT, FRAUD_PPM, FRAUD_PPM, 2),
            validators=tuple(_wallet(name).address for name in VALIDATORS),
        )

    def _write_documents(self) -> None:
        stage, folder = self._stage, self._folder / "documents"
        folder.mkdir()
        stage.task_set.write(folder / stage.task_set.hash().hex())
        for data in (stage.recipe.to_bytes(), stage.calibration.to_bytes()):
            (folder / keccak(data).hex()).write_bytes(data)

    async def _publish(self, owner: Chain, trainer: Chain) -> ChunkStore:
        store = ChunkStore(self._folder / "origin")

        def sign_root(root: Hash32) -> bytes:
            struct = Checkpoint(self._run_id, V0, root).struct_hash()
            return sign(digest(owner.domain("RunRegistry"), struct), _wallet("trainer").key)

        files = {path.name: path for path in self._stage.model.iterdir()}
        manifest = await asyncio.to_thread(
            store.publish, files, run_id=self._run_id, version=V0, stream_from=0, stream_to=0,
            sign=sign_root,
        )  # fmt: skip
        await trainer.runs.publish_checkpoint(self._run_id, V0, manifest.root())
        return store

    @asynccontextmanager
    async def _serve(self, origin: str) -> AsyncIterator[None]:
        ready = self._folder / "ready"
        settings = OrchestratorSettings(
            run=self._run_id, keystore=self._folder / "unused", rpc=self._rpc,
            deployments=self._deployments, documents=self._folder / "documents",
            files=self._folder / "files", database=self._folder / "orchestrator.sqlite3",
            port=free_port(), ready_file=ready, origin=origin, poll_s=POLL_S,
            commit_interval_s=0.1, retry_after_s=POLL_S, lease_s=4 * HOURS,
        )  # fmt: skip

        async def orchestrate() -> None:
            await serve(settings, _wallet("orchestrator").key)
            # The server caught a signal (Ctrl-C, SIGTERM) that was meant for the whole process.
            raise KeyboardInterrupt

        serving = asyncio.ensure_future(self._starts.keep("orchestrator", orchestrate))
        try:
            while not ready.exists():
                if serving.done():
                    await serving
                await asyncio.sleep(0.05)
            self._orchestrator = ready.read_text().strip()
            yield
        finally:
            serving.cancel()
            await asyncio.wait([serving])

    # The members

    def _common(self, name: str) -> dict[str, Any]:
        return {
            "run": self._run_id, "orchestrator": self._orchestrator, "rpc": self._rpc,
            "deployments": self._deployments, "state_dir": self._folder / name, "poll_s": POLL_S,
        }  # fmt: skip

    def _engine(self, _settings: object) -> TransformersEngine:
        return TransformersEngine("float32")

    async def _validate(self, name: str) -> None:
        settings = ValidatorSettings(**self._common(name))
        await self._starts.keep(
            name, lambda: run_validator(settings, _wallet(name), engine_factory=self._engine)
        )

    async def _work(self, member: Member) -> None:
        name = f"worker {member.node.address}"
        settings = WorkerSettings(
            **self._common(name),
            worker=member.wallet.address,
            # An adversary handles one ticket at a time.
            tickets_per_engine=1 if member.kind in KINDS else 2,
        )

        async def watch(loop: WorkerLoop, _chain: Chain) -> None:
            member.loop = loop
            await asyncio.Event().wait()

        def is_over() -> bool:
            seat = self._view.member(self._run_id, member.wallet.address)
            return seat is not None and seat.status is not WorkerStatus.ACTIVE

        await self._starts.keep(
            member.kind,
            lambda: run_worker(
                settings, member.node, engine_factory=self._engine,
                loop_class=KINDS.get(member.kind, WorkerLoop), watch=watch,
            ),
            is_over,
        )  # fmt: skip


def outcome_on_chain(view: ChainView, member: Member) -> Outcome | None:
    """Return the outcome on chain of a member's first submission; None while it may change."""
    account = view.workers.get(member.wallet.address)
    if account is None:
        return None
    found: list[tuple[OutcomeRecord, BatchView]] = [
        (record, batch)
        for batch in view.batches.values()
        for record in batch.records or ()
        if record.worker_id == account.worker_id
    ]
    if not found:
        return None
    record, batch = found[0]
    stake = view.stake(batch.run_id, member.wallet.address)
    if record.verdict is Verdict.FRAUD and not stake.slashed_wei:
        return None
    after_s = float((batch.posted_at or 0) - batch.committed_at)
    caught = record.verdict is not Verdict.ACCEPTED and record.reason in EXPECTED[member.kind]
    return Outcome(caught, record.verdict.name, record.reason.name, knobs={"seconds": after_s})


EXPECTED: dict[str, tuple[Reason, ...]] = {
    "other-model": (Reason.TOPLOC_MISMATCH, Reason.SAMPLER_MISMATCH),
    "greedy-decoder": (Reason.SAMPLER_MISMATCH,),
    "constant-proof": (Reason.TOPLOC_MISMATCH,),
    "own-problem": (Reason.WRONG_PROBLEM,),
    "best-of-many": (Reason.SAMPLER_MISMATCH,),
    "forged-reward": (Reason.WRONG_REWARD,),
    HONEST: (),
}
"""Members of a session, and the reasons for which each is caught."""
PLAYED = {
    "A1": "other-model",
    "A4": "greedy-decoder",
    "A6": "constant-proof",
    "A12": "own-problem",
    "A14": "best-of-many",
    "A16": "forged-reward",
}
"""Attacks that are played in a network, and by which adversary."""
MOST = 5
"""Sessions in the full run."""


def in_network(attack: str) -> tuple[Variant, ...]:
    """Return the variants that play an attack in the whole pipeline; the first attack's have the
    honest worker beside them.
    """
    kind = PLAYED[attack]
    found = Variant(f"network: {kind}", many=_fates(kind), most=MOST)
    if attack != next(iter(PLAYED)):
        return (found,)
    twin = Variant("network: honest beside them", many=_fates(HONEST), most=MOST, must_pass=True)
    return found, twin


def _fates(kind: str) -> PlayMany:
    def many(stage: Stage, _random: Random, trials: int) -> list[Outcome]:
        return [_session(stage, number)[kind] for number in range(trials)]

    return many


@cache
def _session(stage: Stage, number: int) -> dict[str, Outcome]:
    """Return the outcomes of one member of each kind in one network, which attacks share."""
    kinds = sorted(EXPECTED, key=lambda kind: keccak(f"{number} {kind}".encode()))
    return dict(zip(kinds, play_network(stage, kinds), strict=True))


def play_network(stage: Stage, kinds: Sequence[str]) -> list[Outcome]:
    """Return the outcomes of members of these kinds in a separate network."""
    with tempfile.TemporaryDirectory(dir=stage.folder) as folder:
        return stage.run(Session(stage, Path(folder).resolve()).play(kinds))


# ----------------------------------------------------- progress decides, not the clock

STALLED_CPU_S = 30.0
"""CPU seconds without progress after which a session has failed; a whole session takes 10."""
STALLED_S = 900.0
"""The same in seconds, for members that wait without computing."""
RESTART_S = 1.0
"""Seconds before an ended process is restarted."""


class Patience:
    """Decides when to stop waiting."""

    def __init__(
        self,
        *,
        cpu: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cpu = cpu
        self._clock = clock
        self._seen: object = None
        self._since = cpu(), clock()

    def is_over(self, progress: object) -> bool:
        """Return whether the progress has not changed for too long."""
        now = self._cpu(), self._clock()
        if progress != self._seen:
            self._seen, self._since = progress, now
        cpu_s, wall_s = (b - a for a, b in zip(self._since, now, strict=True))
        return cpu_s > STALLED_CPU_S or wall_s > STALLED_S


class Starts:
    """Restarts ended processes, as a service manager does."""

    def __init__(self, *, pause_s: float = RESTART_S) -> None:
        self._pause_s = pause_s
        self.ended: dict[str, str] = {}
        """Last error by process."""

    async def keep(
        self,
        name: str,
        start: Callable[[], Coroutine[Any, Any, None]],
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Run a process until it is over, restarting it after a MusterError; other errors raise."""
        while True:
            try:
                await start()
            except MusterError as error:
                if is_over():
                    return
                self.ended[name] = str(error)
            await asyncio.sleep(self._pause_s)
