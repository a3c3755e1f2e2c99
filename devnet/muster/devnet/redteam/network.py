"""Cheats in the whole pipeline: chain, orchestrator, storage, origin and validators, all real.

A network of its own: every adversary of `muster.devnet.adversary` is a registered worker with a
stake, works beside the others, and is caught when the chain says so: a verdict that is not
Accepted, and for fraud a slash. The time is from the commitment to the posted outcome.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from muster.chain import Anvil, Chain, ChainView, RunConfig, RunTerms, deploy_contracts
from muster.client.rewards import read_view
from muster.client.settings import ValidatorSettings, WorkerSettings
from muster.client.stake import add_stake, register_worker, take_from_faucet
from muster.client.validator.process import run_validator
from muster.client.worker.process import run_worker
from muster.devnet.adversary import KINDS
from muster.devnet.network import FRAUD_PPM, PARAMETERS, PRICE_PER_UNIT
from muster.devnet.redteam.stage import Stage
from muster.devnet.redteam.trials import Outcome, Variant
from muster.inference.transformers_engine import TransformersEngine
from muster.orchestrator.process import serve
from muster.orchestrator.settings import OrchestratorSettings
from muster.protocol.eip712 import address_of, digest, sign
from muster.protocol.encoding import keccak
from muster.protocol.errors import ConfigError, MusterError
from muster.protocol.ids import Hash32, PolicyVersion, RunId
from muster.protocol.messages import Checkpoint, OutcomeRecord, Verdict
from muster.shardcast import ChunkStore, ShardServer
from muster.wallet import Wallet

TOKEN = 10**18
TERMS = PARAMETERS.model_copy(
    update={
        "activation_delay_blocks": 0, "challenge_window_s": 2, "vote_commit_s": 6,
        "vote_reveal_s": 4, "required_worker_stake": 100 * TOKEN,
        "required_validator_stake": 500 * TOKEN,
    }
)  # fmt: skip
V0 = PolicyVersion(0)
PATIENCE_S = 180.0
"""Until every adversary of a session must have an outcome."""


def _wallet(name: str) -> Wallet:
    key = keccak(name.encode())
    return Wallet(address_of(key), key)


@dataclass(frozen=True, slots=True)
class Adversary:
    """A dishonest worker of a session."""

    kind: str
    """How it cheats."""
    wallet: Wallet
    """Its stake's."""
    node: Wallet
    """What signs for it."""


class Session:
    """One network, and the adversaries in it."""

    def __init__(self, stage: Stage, folder: Path) -> None:
        self._stage = stage
        self._folder = folder
        self._run_id = RunId(1)
        self._orchestrator = ""

    async def play(self, kinds: Sequence[str]) -> list[Outcome]:
        """Return how an adversary of each kind fared, in the order given."""
        cast = [
            Adversary(kind, _wallet(f"wallet {i} {kind}"), _wallet(f"node {i} {kind}"))
            for i, kind in enumerate(kinds)
        ]
        async with self._open(cast) as owner:
            tasks = [asyncio.ensure_future(self._validate(number)) for number in range(2)]
            tasks += [asyncio.ensure_future(self._work(adversary)) for adversary in cast]
            try:
                return await self._judged(owner, cast)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _judged(self, owner: Chain, cast: Sequence[Adversary]) -> list[Outcome]:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    view = await read_view(owner, ChainView())
                    found = [_outcome(view, adversary) for adversary in cast]
                    if all(found):
                        return [outcome for outcome in found if outcome]
                    await asyncio.sleep(0.2)
        return [outcome or Outcome(False, "NO OUTCOME") for outcome in found]

    # The network

    @asynccontextmanager
    async def _open(self, cast: Sequence[Adversary]) -> AsyncIterator[Chain]:
        async with AsyncExitStack() as stack:
            anvil = await stack.enter_async_context(Anvil())
            self._rpc = anvil.rpc_url
            boss = Wallet(address_of(anvil.key(0)), anvil.key(0))
            await deploy_contracts(self._rpc, boss.key, TERMS, deployments=self._deployments)
            owner = await self._connect(stack, boss)
            for wallet in (_wallet("validator 0"), _wallet("validator 1")):
                await anvil.set_balance(wallet.address, TOKEN)
                chain = await self._connect(stack, wallet)
                await take_from_faucet(chain, wallet.address, 500 * TOKEN)
                await add_stake(chain, wallet, 500 * TOKEN)
            for each in cast:
                await anvil.set_balance(each.wallet.address, TOKEN)
                chain = await self._connect(stack, each.wallet)
                await take_from_faucet(chain, each.wallet.address, 100 * TOKEN)
                await register_worker(chain, each.wallet, each.node, 100 * TOKEN)
            for name in ("trainer", "orchestrator"):
                await anvil.set_balance(_wallet(name).address, TOKEN)
            self._run_id, _ = await owner.runs.create_run(self._config())
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
            validators=(_wallet("validator 0").address, _wallet("validator 1").address),
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
            files=self._folder / "files", database=self._folder / "orchestrator.sqlite3", port=0,
            ready_file=ready, origin=origin, poll_s=0.1, commit_interval_s=0.1, retry_after_s=0.2,
        )  # fmt: skip
        process = asyncio.create_task(serve(settings, _wallet("orchestrator").key))
        try:
            async with asyncio.timeout(60):
                while not ready.exists():
                    if process.done():
                        await process
                    await asyncio.sleep(0.05)
            self._orchestrator = ready.read_text().strip()
            yield
        finally:
            process.cancel()
            await asyncio.wait([process])

    # Who takes part

    def _common(self, name: str) -> dict[str, Any]:
        return {
            "run": self._run_id, "orchestrator": self._orchestrator, "rpc": self._rpc,
            "deployments": self._deployments, "state_dir": self._folder / name, "poll_s": 0.1,
        }  # fmt: skip

    def _engine(self, _settings: object) -> TransformersEngine:
        return TransformersEngine("float32")

    async def _validate(self, number: int) -> None:
        name = f"validator {number}"
        await run_validator(
            ValidatorSettings(**self._common(name)), _wallet(name), engine_factory=self._engine
        )

    async def _work(self, adversary: Adversary) -> None:
        settings = WorkerSettings(
            **self._common(f"worker {adversary.node.address}"), worker=adversary.wallet.address
        )
        # It ends by itself once the chain has banned it.
        with contextlib.suppress(MusterError):
            await run_worker(
                settings, adversary.node, engine_factory=self._engine,
                loop_class=KINDS[adversary.kind],
            )  # fmt: skip


def _outcome(view: ChainView, adversary: Adversary) -> Outcome | None:
    """Return what the chain says about an adversary so far; None while that may change."""
    account = view.workers.get(adversary.wallet.address)
    if account is None:
        return None
    found: list[tuple[OutcomeRecord, int]] = [
        (record, (batch.posted_at or 0) - batch.committed_at)
        for batch in view.batches.values()
        for record in batch.records or ()
        if record.worker_id == account.worker_id
    ]
    if not found:
        return None
    record, after_s = found[0]
    if record.verdict is Verdict.FRAUD and not account.slashed_wei:
        return None
    caught = record.verdict in (Verdict.FRAUD, Verdict.REJECTED)
    return Outcome(
        caught, record.verdict.name, record.reason.name, knobs={"seconds": float(after_s)}
    )


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


def in_network(attack: str) -> Variant:
    """Return the variant that plays an attack in the whole pipeline."""
    kind = PLAYED[attack]

    def many(stage: Stage, _random: Random, trials: int) -> list[Outcome]:
        return [_session(stage, number)[kind] for number in range(trials)]

    return Variant(f"network: {kind}", many=many, most=MOST)


@cache
def _session(stage: Stage, number: int) -> dict[str, Outcome]:
    """Return how one adversary of each kind fares, all in one network: attacks share it."""
    kinds = sorted(PLAYED.values(), key=lambda kind: keccak(f"{number} {kind}".encode()))
    return dict(zip(kinds, play_network(stage, kinds), strict=True))


def play_network(stage: Stage, kinds: Sequence[str]) -> list[Outcome]:
    """Return how an adversary of each kind fares in a network of its own."""
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ConfigError(f"no adversary {unknown[0]!r}", hint=f"there are: {', '.join(KINDS)}")
    with tempfile.TemporaryDirectory(dir=stage.folder) as folder:
        return stage.run(Session(stage, Path(folder).resolve()).play(kinds))
