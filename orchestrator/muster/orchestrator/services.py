"""The services of one orchestrator, wired and loaded together."""

import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Self, TypeAlias

from muster.chain import ChainView
from muster.orchestrator.clock import BlockClock, ChainHealth, Wakes
from muster.orchestrator.dashboard.status import StatusBuilder
from muster.orchestrator.dashboard.training import TrainingMetrics
from muster.orchestrator.db import Database
from muster.orchestrator.db.group import GroupCommit
from muster.orchestrator.http.feed import StatusFeed
from muster.orchestrator.http.quotas import Quotas
from muster.orchestrator.http.signers import Identities, NonceStore
from muster.orchestrator.intake.batching import Batching
from muster.orchestrator.intake.blobs import S3Blobs
from muster.orchestrator.intake.files import FileStore
from muster.orchestrator.intake.intake import Intake
from muster.orchestrator.intake.rebuild import claim_database, fill_database
from muster.orchestrator.intake.retention import Retention
from muster.orchestrator.leases.fitness import Hardware
from muster.orchestrator.leases.leases import Leases
from muster.orchestrator.leases.life import Heartbeats, Lives
from muster.orchestrator.leases.shares import Turns, UnitCap
from muster.orchestrator.metrics import MetricsText
from muster.orchestrator.outcomes.breaker import Breaker
from muster.orchestrator.outcomes.checking import ProofsOfChecking
from muster.orchestrator.outcomes.doubles import Doubles
from muster.orchestrator.outcomes.outcomes import OutcomeCollector, ValidatorCalls
from muster.orchestrator.outcomes.settlement import Payments, Settlement
from muster.orchestrator.ports import ChainPort, Constants, read_constants
from muster.orchestrator.projection import Projection
from muster.orchestrator.settings import OrchestratorSettings
from muster.protocol.bounds import Bounds
from muster.protocol.errors import ConfigError
from muster.protocol.ids import Hash32, RunId
from muster.protocol.prompts import most_tokens, render_prompt
from muster.protocol.recipe import Recipe
from muster.tasks import TaskSet

Documents: TypeAlias = Mapping[Hash32, bytes | Path]
"""Documents by pinned hash: their bytes, or their file."""


@dataclass(eq=False, repr=False)
class Services:
    """Everything that requests and background tasks use, once it is loaded."""

    settings: OrchestratorSettings
    _: KW_ONLY
    chain: ChainPort
    view: ChainView
    """The chain view, which is up to date."""
    key: bytes
    """The orchestrator's private key."""
    documents: Documents
    database: Database
    """The open database."""
    clock: Callable[[], float]
    """The wall clock."""
    chain_clock: BlockClock

    def __post_init__(self) -> None:
        """Raises ConfigError when the run names another orchestrator."""
        settings, chain = self.settings, self.chain
        self.run_id = RunId(settings.run)
        config = self.view.runs[self.run_id].config
        self.audience = config.orchestrator
        if chain.account != self.audience:
            raise ConfigError(
                f"run {settings.run} names {self.audience} as its orchestrator, but "
                f"the keystore is {chain.account}",
                hint=f"give the keystore of {self.audience} with --keystore",
            )
        self.chain_health = ChainHealth(head=self.view.block_number, read_at=self.clock())
        self.wakes = Wakes()
        self.domain = chain.domain("ContributionLedger")
        pinned = self.documents[config.recipe_hash]
        assert isinstance(pinned, bytes)  # only a task set is kept on disk
        self.recipe = Recipe.from_bytes(pinned)
        self.group = GroupCommit(self.database)
        self.files = FileStore(
            settings.files, S3Blobs(settings.bucket) if settings.bucket else None
        )
        self.projection = Projection(self.view, self.run_id, self.recipe.training)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(run_id={self.run_id})"

    async def load(self) -> Self:
        """Mark the database as this run's, and load its content.

        Raises StorageError when the database belongs to another run.
        """
        constants = await read_constants(self.chain)
        self._wire_requests()
        self._wire_leases(constants)
        self._wire_submissions(constants)
        self._wire_settlement(constants)
        self._wire_status()
        self.files.open()
        self.nonces.valid_from = await claim_database(
            self.database,
            run_id=self.run_id,
            chain_id=self.chain.chain_id,
            ledger=self.domain.verifying_contract,
            deploy_hash=await self.chain.deploy_hash(),
            now=int(self.clock()),
        )
        await fill_database(self.database, self.files, self.projection)
        await self.leases.close_void()
        await self.leases.close_missed(int(self.clock()))
        for loading in (self.batching, self.nonces, self.heartbeats, self.hardware, self.training):
            await loading.load()
        await self.leases.vouch()
        return self

    def _wire_requests(self) -> None:
        settings, database = self.settings, self.database
        self.identities = Identities(self.projection, evaluators=settings.evaluators)
        self.quotas = Quotas.of(settings)
        self.nonces = NonceStore(database, self.group, clock=self.clock)
        self.heartbeats = Heartbeats(database, clock=self.clock)
        self.lives = Lives(
            lambda: self.projection.run.members,
            self.heartbeats.latest,
            dead_after_s=settings.dead_after_s,
            clock=self.clock,
        )
        self.hardware = Hardware(
            database,
            self.recipe.hardware,
            run_id=self.run_id,
            domain=self.domain,
            lease_s=settings.lease_s,
        )

    def _wire_leases(self, constants: Constants) -> None:
        settings, projection = self.settings, self.projection
        self.batching = Batching(
            database=self.database,
            files=self.files,
            chain=self.chain,
            projection=projection,
            domain=self.domain,
            max_units=self.recipe.sampling.max_units,
            batch_limit=settings.batch_limit,
            outcome_deadline_s=constants.outcome_deadline_s,
            now=self.chain_clock.now,
        )
        self.leases = Leases(
            database=self.database,
            projection=projection,
            batching=self.batching,
            unit_cap=UnitCap(projection, self.batching, self.recipe.sampling, constants),
            hardware=self.hardware,
            lives=self.lives,
            # A waiting worker asks again after `retry_after_s`; one that does not loses its turn.
            turns=lambda: Turns(patience_s=2 * settings.retry_after_s, clock=time.monotonic),
            training=self.recipe.training,
            key=self.key,
            domain=self.domain,
            now=self.chain_clock.now,
            is_chain_away=lambda: self.chain_health.is_away(self.clock()),
            lease_s=settings.lease_s,
            outcome_deadline_s=constants.outcome_deadline_s,
        )

    def _largest_file(self) -> int:
        """Return the most bytes of a submission, whichever problems its ticket has."""
        document = self.documents[self.view.runs[self.run_id].config.task_set_hash]
        if isinstance(document, bytes):
            tasks = TaskSet.from_bytes(document)
        else:
            tasks = TaskSet.open(document)
        recipe, longest = self.recipe, max((problem.prompt for problem in tasks), key=len)
        prompt = render_prompt(longest, recipe.longest_budget, recipe.prompt)
        return Bounds.of(recipe, prompt_tokens=most_tokens([prompt])).file_bytes

    def _wire_submissions(self, constants: Constants) -> None:
        now = self.chain_clock.now
        self.doubles = Doubles(self.database, self.files, self.projection, self.domain)
        self.intake = Intake(
            database=self.database,
            files=self.files,
            projection=self.projection,
            domain=self.domain,
            doubles=self.doubles,
            max_units=self.recipe.sampling.max_units,
            max_file_bytes=self._largest_file(),
            now=now,
            on_received=self.wakes.submission_received,
        )
        self.outcomes = OutcomeCollector(
            database=self.database,
            files=self.files,
            projection=self.projection,
            batching=self.batching,
            caller=ValidatorCalls(
                self.projection,
                outcome_deadline_s=constants.outcome_deadline_s,
                timeout_s=self.settings.call_timeout_s,
                now=now,
            ),
            domain=self.domain,
            doubles=self.doubles,
            on_received=self.wakes.record.set,
            clock=self.clock,
            now=now,
        )
        self.checking = ProofsOfChecking(
            database=self.database,
            projection=self.projection,
            domain=self.domain,
            clock=self.clock,
            now=now,
        )

    def _wire_settlement(self, constants: Constants) -> None:
        now, keep_s = self.chain_clock.now, self.settings.retention_s
        self.settlement = Settlement(self.projection, constants, now=now)
        self.breaker = Breaker(
            database=self.database,
            projection=self.projection,
            limits=self.recipe.breaker,
            folder=self.settings.files,
            constants=constants,
            now=now,
        )
        # None: files are kept forever.
        self.retention = (
            None
            if keep_s is None
            else Retention(
                database=self.database,
                files=self.files,
                projection=self.projection,
                constants=constants,
                max_async_level=self.recipe.training.max_async_level,
                keep_s=keep_s,
                now=now,
            )
        )

    def _wire_status(self) -> None:
        settings = self.settings
        self.payments = Payments(self.chain, self.run_id)
        self.metrics_text = MetricsText()
        self.training = TrainingMetrics(
            self.database,
            self.files,
            on_figures=self.projection.note_figures,
            on_received=self.wakes.status.set,
        )
        self.status = StatusBuilder(
            database=self.database,
            projection=self.projection,
            batching=self.batching,
            leases=self.leases,
            heartbeats=self.heartbeats,
            lives=self.lives,
            caller=self.outcomes.caller,
            training=self.training,
            recipe=self.recipe,
            now=self.chain_clock.now,
        )
        self.feed = StatusFeed(
            max_listeners=settings.max_listeners, max_per_host=settings.max_listeners_per_host
        )
