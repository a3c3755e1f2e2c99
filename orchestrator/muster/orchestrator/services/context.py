"""The services of one orchestrator, built and loaded together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from muster.chain import ChainView
from muster.orchestrator.db.engine import Database
from muster.orchestrator.db.group import GroupCommit
from muster.orchestrator.db.models import IdentityRow
from muster.orchestrator.ports import ChainPort
from muster.orchestrator.services.batching import Batching
from muster.orchestrator.services.clock import ChainClock, Wakes
from muster.orchestrator.services.feed import StatusFeed
from muster.orchestrator.services.files import FileStore
from muster.orchestrator.services.heartbeats import Heartbeats
from muster.orchestrator.services.identities import Identities
from muster.orchestrator.services.intake import Intake
from muster.orchestrator.services.leases import Leases
from muster.orchestrator.services.nonces import NonceStore
from muster.orchestrator.services.outcomes import OutcomeDesk
from muster.orchestrator.services.projection import Projection
from muster.orchestrator.services.ratelimit import RateLimit
from muster.orchestrator.services.rebuild import claim_database, rebuild
from muster.orchestrator.services.settlement import Settlement
from muster.orchestrator.services.status import StatusDesk
from muster.orchestrator.services.training import TrainingMetrics
from muster.orchestrator.settings import OrchestratorSettings
from muster.protocol.eip712 import Domain
from muster.protocol.errors import ConfigError
from muster.protocol.ids import Address, Hash32, RunId
from muster.protocol.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Services:
    """Everything a request or a background task may use."""

    settings: OrchestratorSettings
    """How the process was configured."""
    run_id: RunId
    """The run it serves."""
    chain: ChainPort
    """The chain."""
    domain: Domain
    """EIP-712 domain of the ledger."""
    audience: Address
    """The orchestrator's account: who requests must be addressed to."""
    clock: Callable[[], float]
    """Wall clock."""
    chain_clock: ChainClock
    """The chain's clock."""
    wakes: Wakes
    """How tasks wake each other."""
    documents: Mapping[Hash32, bytes]
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
    identities: Identities
    """Who may do what."""
    nonces: NonceStore
    """Used nonces."""
    heartbeats: Heartbeats
    """Signs of life."""
    signer_limit: RateLimit
    """Requests per signer."""
    batching: Batching
    """Batches."""
    leases: Leases
    """Tickets."""
    intake: Intake
    """Uploads."""
    outcomes: OutcomeDesk
    """Validators' outcomes."""
    settlement: Settlement
    """Fraud to execute and finalise."""
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
    documents: Mapping[Hash32, bytes],
    database: Database,
    clock: Callable[[], float],
    chain_clock: ChainClock,
    in_flight: bool = True,
) -> Services:
    """Wire and load the services over an open database and a chain view that has caught up.

    `in_flight` says whether commitments of an earlier process may still be mined.

    Raises StorageError when the database belongs to another run, ConfigError when the run names
    another orchestrator.
    """
    run_id, domain = RunId(settings.run), chain.domain("ContributionLedger")
    run = view.runs[run_id]
    audience = run.config.orchestrator
    if chain.account != audience:
        raise ConfigError(
            f"run {run_id} names {audience} as its orchestrator, the keystore is {chain.account}",
            hint="give the keystore of that account",
        )
    recipe = Recipe.from_bytes(documents[run.config.recipe_hash])
    projection = Projection(view, run_id, recipe.training)
    files = FileStore(settings.files)
    files.open()
    identity = await claim_database(
        database,
        IdentityRow(
            run_id=run_id,
            chain_id=chain.chain_id,
            ledger=domain.verifying_contract,
            created_at=int(clock()),
        ),
        projection,
    )
    await rebuild(database, files, projection)
    wakes, group = Wakes(), GroupCommit(database)
    batching = Batching(
        database=database,
        files=files,
        ledger=chain.ledger,
        projection=projection,
        batch_limit=settings.batch_limit,
        outcome_deadline_s=await chain.ledger.outcome_deadline(),
        now=chain_clock.now,
    )
    await batching.load(wait_s=settings.recommit_s if in_flight else 0.0)
    nonces = NonceStore(database, group, clock=clock, valid_from=identity.created_at)
    await nonces.load()
    heartbeats = Heartbeats(database, clock=clock)
    await heartbeats.load()
    training = TrainingMetrics(database, files, on_received=wakes.status.set)
    await training.load()
    leases = Leases(
        database=database,
        projection=projection,
        batching=batching,
        training=recipe.training,
        key=key,
        domain=domain,
        now=chain_clock.now,
        lease_s=settings.lease_s,
    )
    return Services(
        settings=settings,
        run_id=run_id,
        chain=chain,
        domain=domain,
        audience=audience,
        clock=clock,
        chain_clock=chain_clock,
        wakes=wakes,
        documents=documents,
        recipe=recipe,
        database=database,
        group=group,
        files=files,
        projection=projection,
        identities=Identities(projection),
        nonces=nonces,
        heartbeats=heartbeats,
        signer_limit=RateLimit(rate=settings.rate_per_signer, burst=2 * settings.rate_per_signer),
        batching=batching,
        leases=leases,
        intake=Intake(
            database=database,
            files=files,
            projection=projection,
            domain=domain,
            now=chain_clock.now,
            on_received=wakes.submission_received,
        ),
        outcomes=OutcomeDesk(
            database=database,
            files=files,
            projection=projection,
            batching=batching,
            domain=domain,
            on_received=wakes.record.set,
        ),
        settlement=Settlement(
            projection,
            challenge_window_s=await chain.ledger.challenge_window(),
            now=chain_clock.now,
        ),
        training=training,
        status=StatusDesk(
            database=database,
            projection=projection,
            leases=leases,
            heartbeats=heartbeats,
            training=training,
            recipe=recipe,
        ),
        feed=StatusFeed(max_listeners=settings.max_listeners),
    )
