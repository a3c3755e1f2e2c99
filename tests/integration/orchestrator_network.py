"""A run on a real local chain with an orchestrator process, for the integration tests."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eth_account import Account

from muster.api import Lease, OrchestratorApi
from muster.api.answers import SubmissionState
from muster.app.anvil import Anvil
from muster.app.demo.processes import WarmProcess
from muster.chain import Chain, Deployment, LeasedWork, RunConfig, RunTerms
from muster.client.stake import join_run, take_seat
from muster.deploy import DeployParameters, deploy_contracts
from muster.orchestrator.process import serve
from muster.orchestrator.settings import OrchestratorSettings
from muster.protocol.eip712 import address_of, digest, sign
from muster.protocol.encoding import file_hash, keccak
from muster.protocol.ids import Hash32, PolicyVersion, RunId
from muster.protocol.messages import OutcomeRecord, Outcomes, Reason, Submission, Ticket, Verdict
from muster.protocol.recipe import Recipe, SamplingRecipe, TrainingRecipe
from muster.tasks.toys import make_sort
from muster.wallet import Wallet

TOKEN = 10**18
OWNER, ORCHESTRATOR, TRAINER = (Anvil.key(i) for i in range(3))
VALIDATORS = [Anvil.key(i) for i in (3, 4, 7, 8, 9)]
"""The first two have a seat, more where a test says so."""
WORKERS = [Anvil.key(5), Anvil.key(6)]
NODES = [keccak(b"node 0"), keccak(b"node 1")]

RECIPE = Recipe(
    name="integration",
    sampling=SamplingRecipe(
        problems_per_submission=2, samples_per_problem=2, temperature=1.0, max_new_tokens=8
    ),
    training=TrainingRecipe(submissions_per_step=4),
)
TASKS = make_sort(4, seed=0)
DOCUMENTS = {keccak(d): d for d in (RECIPE.to_bytes(), b"calibration")}
DOCUMENTS[TASKS.hash()] = TASKS.to_bytes()


@dataclass
class Network:
    """A chain with one run, its validators and two active workers."""

    folder: Path
    anvil: Anvil
    deployment: Deployment
    chain: Chain
    trainer: Chain
    run_id: RunId
    config: RunConfig
    neighbour: RunId | None = None
    """Another run on the same contracts, where a test opens one."""

    async def open_run(self, config: RunConfig) -> RunId:
        """Create a run that can pay, as its owner."""
        run_id, _ = await self.chain.runs.create_run(config)
        await self.chain.token.approve(self.deployment.contracts["RewardEscrow"], 1000 * TOKEN)
        await self.chain.escrow.fund(run_id, 1000 * TOKEN)
        return run_id

    async def seat(self, key: bytes, run_id: RunId | None = None) -> None:
        """Let a validator take its seat."""
        await self.chain.token.faucet(address_of(key), 500 * TOKEN)
        async with await _connect(self.anvil, self.deployment, key) as validator:
            await take_seat(validator, run_id or self.run_id, 1, 500 * TOKEN)

    async def join(self, key: bytes, node: bytes, run_id: RunId | None = None) -> None:
        """Let a worker join; in its second run it keeps its node."""
        await self.chain.token.faucet(address_of(key), 100 * TOKEN)
        hot = None if run_id else Wallet(address_of(node), node)
        async with await _connect(self.anvil, self.deployment, key) as worker:
            wallet = Wallet(address_of(key), key)
            await join_run(worker, wallet, hot, run_id or self.run_id, 100 * TOKEN)

    def settings(self, **changes: Any) -> OrchestratorSettings:
        values = {
            "run": self.run_id,
            "rpc": self.anvil.rpc_url,
            "deployments": self.folder / "deployments",
            "keystore": self.folder / "unused",
            "documents": self.folder / "documents",
            "files": self.folder / "files",
            "database": self.folder / "orchestrator.sqlite3",
            "port": 0,
            "ready_file": self.folder / "ready",
            "poll_s": 0.1,
            "commit_interval_s": 0.1,
            "lease_s": 60,
        }
        return OrchestratorSettings(**(values | changes))

    def api(self, url: str, key: bytes) -> OrchestratorApi:
        return OrchestratorApi(
            url,
            key=key,
            domain=self.chain.domain("ContributionLedger"),
            audience=address_of(ORCHESTRATOR),
        )

    def sign(self, struct: Hash32, key: bytes, contract: str = "ContributionLedger") -> bytes:
        return sign(digest(self.chain.domain(contract), struct), key)

    async def upload(self, url: str, number: int, body: bytes) -> Submission:
        async with self.api(url, NODES[number]) as api:
            lease = await api.lease(self.run_id)
            assert isinstance(lease, Lease)
            submission, signature = self.claim(lease.ticket, NODES[number], body)
            await api.submit(submission, signature, body)
        return submission

    async def submit_direct(self, url: str, lease: Lease, number: int, body: bytes) -> Submission:
        """Commit a submission as its worker, without the orchestrator, and upload its file."""
        submission, signature = self.claim(lease.ticket, NODES[number], body)
        work = LeasedWork(submission, signature, lease.ticket, lease.signature)
        bond = (await self.chain.court.terms()).bond
        await self.chain.token.faucet(address_of(WORKERS[number]), bond)
        async with await _connect(self.anvil, self.deployment, WORKERS[number]) as worker:
            await worker.token.approve(self.deployment.contracts["DisputeCourt"], bond)
            await worker.ledger.submit_direct(work, [])
        async with self.api(url, NODES[number]) as api:
            await api.submit(submission, signature, body)
        return submission

    def claim(self, ticket: Ticket, key: bytes, body: bytes) -> tuple[Submission, bytes]:
        """Return a ticket's submission and its node's signature."""
        submission = Submission(
            ticket.run_id, ticket.worker, ticket.step, ticket.index, ticket.policy_version,
            file_hash(body), 4, 20,
        )  # fmt: skip
        return submission, self.sign(submission.struct_hash(), key)

    async def publish(self, *versions: int) -> None:
        """Publish policy versions: the newest determines how much work there is."""
        for version in versions:
            root = keccak(b"manifest %d" % version)
            await self.trainer.runs.publish_checkpoint(self.run_id, PolicyVersion(version), root)

    async def judge(
        self,
        url: str,
        submission: Submission,
        verdict: Verdict = Verdict.ACCEPTED,
        reason: Reason = Reason.NONE,
        validators: tuple[int, ...] = (0, 1),
    ) -> None:
        """Judge the batch that holds a submission; every other one in it is accepted."""
        state = await self.until(url, submission, "committed")
        assert state.batch_id is not None
        for number in validators:
            async with self.api(url, VALIDATORS[number]) as api:
                batch = await api.batch(state.batch_id)
                records = b""
                for entry in batch.submissions:
                    s, is_it = entry.submission, entry.submission == submission
                    number_of, _ = await self.chain.workers.worker_of(s.worker)
                    records += OutcomeRecord(
                        number_of, s.step, s.index, s.policy_version, s.file_hash,
                        s.rollouts, s.units, verdict if is_it else Verdict.ACCEPTED,
                        reason if is_it else Reason.NONE,
                    ).to_bytes()  # fmt: skip
                outcomes = Outcomes(batch.batch_id, batch.root, keccak(records))
                signature = self.sign(outcomes.struct_hash(), VALIDATORS[number])
                await api.post_outcomes(batch.batch_id, records, signature)

    async def until(self, url: str, submission: Submission, state: str) -> SubmissionState:
        """How far the submission has come, once it is so far."""
        seen: list[SubmissionState] = []

        async def reached() -> bool:
            async with self.api(url, OWNER) as api:
                seen.append(await api.submission_state(submission.file_hash))
            return seen[-1].state == state

        await eventually(reached)
        return seen[-1]


async def eventually(condition: Callable[[], Awaitable[bool]], timeout_s: float = 180) -> None:
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.05)


@asynccontextmanager
async def open_network(
    folder: Path, *, outcome_deadline_s: int = 60, validators: int = 2, block_time_s: float = 1
) -> AsyncIterator[Network]:
    parameters = DeployParameters(
        activation_delay_blocks=0,
        challenge_window_s=2,
        outcome_deadline_s=outcome_deadline_s,
        vote_commit_s=6,
        vote_reveal_s=4,
        unbonding_s=3600,
    )
    async with AsyncExitStack() as stack:
        anvil = await stack.enter_async_context(Anvil(block_time_s=block_time_s))
        deployment = await deploy_contracts(
            anvil.rpc_url, OWNER, parameters, deployments=folder / "deployments"
        )
        owner = await stack.enter_async_context(await _connect(anvil, deployment, OWNER))
        (folder / "documents").mkdir()
        for pinned, data in DOCUMENTS.items():
            (folder / "documents" / pinned.hex()).write_bytes(data)
        # Open to the end: a closed sender does not repeat transactions that a reorganisation undid.
        trainer = await stack.enter_async_context(await _connect(anvil, deployment, TRAINER))
        config = _config(validators)
        network = Network(folder, anvil, deployment, owner, trainer, RunId(0), config)
        network.run_id = await network.open_run(config)
        for key in VALIDATORS[:validators]:
            await network.seat(key)
        for worker, node in zip(WORKERS, NODES, strict=True):
            await network.join(worker, node)
        await network.publish(0)
        yield network


@asynccontextmanager
async def running(network: Network, **settings: Any) -> AsyncIterator[str]:
    """Run the orchestrator in this process; yields its URL, stops it with SIGTERM."""
    chosen = network.settings(**settings)
    assert chosen.ready_file is not None
    chosen.ready_file.unlink(missing_ok=True)
    process = asyncio.create_task(serve(chosen, ORCHESTRATOR))
    async with asyncio.timeout(180):
        while not chosen.ready_file.exists():
            if process.done():
                await process
            await asyncio.sleep(0.02)
    try:
        yield chosen.ready_file.read_text().strip()
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        started = time.monotonic()
        await process
        assert time.monotonic() - started < 15


async def _connect(anvil: Anvil, deployment: Deployment, key: bytes) -> Chain:
    return await Chain.connect(anvil.rpc_url, deployment, key=key)


def _config(validators: int) -> RunConfig:
    return RunConfig(
        trainer=address_of(TRAINER),
        orchestrator=address_of(ORCHESTRATOR),
        base_model_hash=keccak(b"base model"),
        task_set_hash=TASKS.hash(),
        recipe_hash=RECIPE.hash(),
        calibration_hash=keccak(b"calibration"),
        terms=RunTerms(TOKEN // 1000, 100_000, 500_000, 2),
        validators=tuple(address_of(key) for key in VALIDATORS[:validators]),
    )


class Process:
    """The orchestrator as its own process, through the command line."""

    def __init__(self, network: Network, **changes: Any) -> None:
        self._settings = network.settings(**changes)
        self._keystore = network.folder / "keystore.json"
        keystore = Account.encrypt(ORCHESTRATOR, "secret", kdf="scrypt", iterations=2)
        self._keystore.write_text(json.dumps(keystore))
        self._process: WarmProcess | None = None

    async def start(self) -> str:
        """Start it; returns its URL."""
        settings = self._settings
        assert settings.ready_file is not None
        settings.ready_file.unlink(missing_ok=True)
        flags = {
            "run": settings.run,
            "rpc": settings.rpc,
            "deployments": settings.deployments,
            "keystore": self._keystore,
            "documents": settings.documents,
            "files": settings.files,
            "database": settings.database,
            "port": 0,
            "ready-file": settings.ready_file,
            "poll-s": settings.poll_s,
            "commit-interval-s": 0.05,
        }
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        self._process = await WarmProcess.start(
            ["muster.app", "orchestrator", "run", *words],
            settings.ready_file.with_suffix(".log"),
            {"MUSTER_PASSWORD": "secret"},
        )
        async with asyncio.timeout(180):
            while not settings.ready_file.exists():
                assert self._process.returncode is None
                await asyncio.sleep(0.05)
        return settings.ready_file.read_text().strip()

    async def kill(self) -> None:
        """End it without warning."""
        assert self._process is not None
        self._process.kill()
        await self._process.wait()

    async def stop(self) -> None:
        """End it with SIGTERM; it must be quick and clean."""
        assert self._process is not None
        self._process.terminate()
        assert await asyncio.wait_for(self._process.wait(), 180) == 0
