"""The services of one orchestrator, built and loaded together."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields

from muster.chain import ChainView
from muster.orchestrator.db.engine import Database
from muster.orchestrator.db.group import GroupCommit
from muster.orchestrator.db.models import IdentityRow
from muster.orchestrator.ports import ChainPort
from muster.orchestrator.services.batching import Batching
from muster.orchestrator.services.blobs import S3Blobs
from muster.orchestrator.services.breaker import Breaker
from muster.orchestrator.services.calls import Caller
from muster.orchestrator.services.checking import CheckingDesk
from muster.orchestrator.services.clock import ChainClock, ChainHealth, Wakes
from muster.orchestrator.services.documents import Documents
from muster.orchestrator.services.doubles import Doubles
from muster.orchestrator.services.feed import StatusFeed
from muster.orchestrator.services.files import FileStore
from muster.orchestrator.services.gauges import Gauges
from muster.orchestrator.services.hardware import Hardware
from muster.orchestrator.services.heartbeats import Heartbeats
from muster.orchestrator.services.identities import Identities
from muster.orchestrator.services.intake import Intake
from muster.orchestrator.services.leases import Leases
from muster.orchestrator.services.life import Lives
from muster.orchestrator.services.nonces import NonceStore
from muster.orchestrator.services.outcomes import OutcomeDesk
from muster.orchestrator.services.payments import Payments
from muster.orchestrator.services.projection import Projection
from muster.orchestrator.services.ratelimit import Quotas
from muster.orchestrator.services.rebuild import claim_database, rebuild
from muster.orchestrator.services.retention import Retention
from muster.orchestrator.services.settlement import Settlement, Windows
from muster.orchestrator.services.status import StatusDesk
from muster.orchestrator.services.training import TrainingMetrics
from muster.orchestrator.services.turns import Turns
from muster.orchestrator.services.unit_cap import CapTerms, UnitCap
from muster.orchestrator.settings import OrchestratorSettings
from muster.protocol.eip712 import Domain
from muster.protocol.errors import ConfigError
from muster.protocol.ids import Address, RunId
from muster.protocol.recipe import Recipe


@dataclass(slots=True)
class Switches:
    """What the run's owner may switch while the process runs; see `muster.orchestrator.admin`."""

    leases_are_paused: bool = False
    """No tickets are given, for as long as this process lives."""


@dataclass(frozen=True, slots=True)
class Ground:
    """What every service stands on."""

    settings: OrchestratorSettings
    """How the process was configured."""
    chain: ChainPort
    """The chain."""
    key: bytes
    """The orchestrator's private key."""
    domain: Domain
    """EIP-712 domain of the ledger."""
    audience: Address
    """The orchestrator's account: who requests must be addressed to."""
    clock: Callable[[], float]
    """Wall clock."""
    chain_clock: ChainClock
    """The chain's clock."""
    chain_health: ChainHealth
    """How reading the chain goes."""
    wakes: Wakes
    """How tasks wake each other."""
    documents: Documents
    """The pinned documents."""
    recipe: Recipe
    """The run's recipe."""
    database: Database
    """The database."""
    group: GroupCommit
    """Writes nonces and heartbeats."""
    files: FileStore
    """The files folder."""
    projection: Projection
    """What follows from the chain."""
    doubles: Doubles
    """What was signed twice."""

    switches: Switches = field(default_factory=Switches, kw_only=True)
    """What the owner has switched off."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(run_id={self.run_id})"

    @property
    def run_id(self) -> RunId:
        """The run that is served."""
        return self.projection.run_id


@dataclass(frozen=True, slots=True, repr=False)
class Services(Ground):
    """Everything a request or a background task may use."""

    identities: Identities
    """Who may do what."""
    quotas: Quotas
    """What one address and one signer may ask for."""
    nonces: NonceStore
    """Used nonces."""
    heartbeats: Heartbeats
    """Signs of life."""
    lives: Lives
    """The states of workers."""
    hardware: Hardware
    """What machines have, and which get work."""
    batching: Batching
    """Batches."""
    leases: Leases
    """Tickets."""
    intake: Intake
    """Uploads."""
    outcomes: OutcomeDesk
    """Validators' outcomes."""
    checking: CheckingDesk
    """Their proofs that they recomputed them."""
    retention: Retention | None
    """Files to drop; None when they are kept for ever."""
    breaker: Breaker
    """Whether slashing must pause."""
    settlement: Settlement
    """Fraud to execute and finalise."""
    payments: Payments
    """What was paid."""
    gauges: Gauges
    """Figures for Prometheus."""
    training: TrainingMetrics
    """The trainer's figures."""
    status: StatusDesk
    """The status."""
    feed: StatusFeed
    """Its listeners."""


async def build_services(
    settings: OrchestratorSettings,
    *,
    chain: ChainPort,
    view: ChainView,
    key: bytes,
    documents: Documents,
    database: Database,
    clock: Callable[[], float],
    chain_clock: ChainClock,
) -> Services:
    """Wire and load the services over an open database and a chain view that has caught up.

    Raises StorageError when the database belongs to another run, ConfigError when the run names
    another orchestrator.
    """
    run = view.runs[RunId(settings.run)]
    if chain.account != run.config.orchestrator:
        raise ConfigError(
            f"run {settings.run} names {run.config.orchestrator} as its orchestrator, "
            f"the keystore is {chain.account}",
            hint="give the keystore of that account",
        )
    pinned = documents[run.config.recipe_hash]
    assert isinstance(pinned, bytes)  # only a task set stays on disk
    recipe = Recipe.from_bytes(pinned)
    projection = Projection(view, RunId(settings.run), recipe.training)
    domain = chain.domain("ContributionLedger")
    ground = Ground(
        settings=settings,
        chain=chain,
        key=key,
        domain=domain,
        audience=run.config.orchestrator,
        clock=clock,
        chain_clock=chain_clock,
        chain_health=ChainHealth(head=view.block_number, read_at=clock()),
        wakes=Wakes(),
        documents=documents,
        recipe=recipe,
        database=database,
        group=GroupCommit(database),
        files=FileStore(settings.files, S3Blobs(settings.bucket) if settings.bucket else None),
        projection=projection,
        doubles=Doubles(database, projection, domain),
    )
    ground.files.open()
    valid_from = await _claim(ground)
    await rebuild(database, ground.files, ground.projection)
    return await _build(ground, valid_from=valid_from)


async def _claim(ground: Ground) -> int:
    """Make the database this run's; return when it was created."""
    identity = IdentityRow(
        run_id=ground.run_id,
        chain_id=ground.chain.chain_id,
        ledger=ground.domain.verifying_contract,
        created_at=int(ground.clock()),
    )
    return (await claim_database(ground.database, identity, ground.projection)).created_at


async def _build(ground: Ground, *, valid_from: int) -> Services:
    settings = ground.settings
    batching = await _batching(ground)
    hardware = Hardware(
        ground.database,
        ground.recipe.hardware,
        run_id=ground.run_id,
        domain=ground.domain,
        lease_s=settings.lease_s,
    )
    nonces = NonceStore(ground.database, ground.group, clock=ground.clock, valid_from=valid_from)
    heartbeats = Heartbeats(ground.database, clock=ground.clock)
    lives = Lives(
        lambda: ground.projection.run.members,
        heartbeats.latest,
        dead_after_s=settings.dead_after_s,
        clock=ground.clock,
    )
    leases = await _leases(ground, batching, hardware, lives)
    training = TrainingMetrics(
        ground.database,
        ground.files,
        on_figures=ground.projection.note_figures,
        on_received=ground.wakes.status.set,
    )
    outcomes = await _outcomes(ground, batching)
    for loading in (nonces, heartbeats, hardware, training):
        await loading.load()
    return Services(
        **{part.name: getattr(ground, part.name) for part in fields(ground)},
        identities=Identities(ground.projection),
        quotas=Quotas.of(settings),
        nonces=nonces,
        heartbeats=heartbeats,
        lives=lives,
        hardware=hardware,
        batching=batching,
        leases=leases,
        intake=_intake(ground),
        outcomes=outcomes,
        checking=CheckingDesk(
            database=ground.database,
            projection=ground.projection,
            domain=ground.domain,
            clock=ground.clock,
            now=ground.chain_clock.now,
        ),
        retention=await _retention(ground),
        breaker=await _breaker(ground),
        settlement=Settlement(
            ground.projection,
            Windows(
                challenge_s=await ground.chain.ledger.challenge_window(),
                outcome_deadline_s=await ground.chain.ledger.outcome_deadline(),
                appeal_s=await ground.chain.ledger.appeal_time(),
            ),
            now=ground.chain_clock.now,
        ),
        payments=Payments(ground.chain, ground.run_id),
        gauges=Gauges(),
        training=training,
        status=StatusDesk(
            database=ground.database,
            projection=ground.projection,
            batching=batching,
            leases=leases,
            heartbeats=heartbeats,
            lives=lives,
            caller=outcomes.caller,
            training=training,
            recipe=ground.recipe,
            now=ground.chain_clock.now,
        ),
        feed=StatusFeed(
            max_listeners=settings.max_listeners,
            max_per_host=settings.max_listeners_per_host,
        ),
    )


async def _breaker(ground: Ground) -> Breaker:
    return Breaker(
        database=ground.database,
        projection=ground.projection,
        limits=ground.recipe.breaker,
        folder=ground.settings.files,
        cooldown_s=await ground.chain.runs.slash_cooldown(),
        outcome_deadline_s=await ground.chain.ledger.outcome_deadline(),
        now=ground.chain_clock.now,
    )


async def _retention(ground: Ground) -> Retention | None:
    keep_s = ground.settings.retention_s
    if keep_s is None:
        return None
    return Retention(
        database=ground.database,
        files=ground.files,
        projection=ground.projection,
        challenge_window_s=await ground.chain.ledger.challenge_window(),
        max_async_level=ground.recipe.training.max_async_level,
        keep_s=keep_s,
        now=ground.chain_clock.now,
    )


async def _batching(ground: Ground) -> Batching:
    batching = Batching(
        database=ground.database,
        files=ground.files,
        chain=ground.chain,
        projection=ground.projection,
        batch_limit=ground.settings.batch_limit,
        outcome_deadline_s=await ground.chain.ledger.outcome_deadline(),
        now=ground.chain_clock.now,
    )
    await batching.load()
    return batching


async def _leases(ground: Ground, batching: Batching, hardware: Hardware, lives: Lives) -> Leases:
    ledger = ground.chain.ledger
    terms = CapTerms(
        stake_per_unit=await ledger.stake_per_unit(),
        outcome_deadline_s=await ledger.outcome_deadline(),
        challenge_window_s=await ledger.challenge_window(),
    )
    return Leases(
        database=ground.database,
        projection=ground.projection,
        batching=batching,
        unit_cap=UnitCap(ground.projection, batching, ground.recipe.sampling, terms),
        hardware=hardware,
        lives=lives,
        # Who waits asks again after `retry_after_s`; once it did not, nobody waits for it.
        turns=Turns(patience_s=2 * ground.settings.retry_after_s, clock=time.monotonic),
        training=ground.recipe.training,
        key=ground.key,
        domain=ground.domain,
        now=ground.chain_clock.now,
        lease_s=ground.settings.lease_s,
    )


def _intake(ground: Ground) -> Intake:
    return Intake(
        database=ground.database,
        files=ground.files,
        projection=ground.projection,
        domain=ground.domain,
        doubles=ground.doubles,
        now=ground.chain_clock.now,
        on_received=ground.wakes.submission_received,
    )


async def _outcomes(ground: Ground, batching: Batching) -> OutcomeDesk:
    caller = Caller(
        ground.projection,
        outcome_deadline_s=await ground.chain.ledger.outcome_deadline(),
        timeout_s=ground.settings.call_timeout_s,
        now=ground.chain_clock.now,
    )
    return OutcomeDesk(
        database=ground.database,
        files=ground.files,
        projection=ground.projection,
        batching=batching,
        caller=caller,
        domain=ground.domain,
        doubles=ground.doubles,
        on_received=ground.wakes.record.set,
        clock=ground.clock,
        now=ground.chain_clock.now,
    )
