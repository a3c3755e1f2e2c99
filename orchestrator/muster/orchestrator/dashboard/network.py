"""What the dashboard knows of the network's health: chain, queues, validators, broadcast."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from muster.api.status import Watched
from muster.orchestrator.services.context import Services
from muster.orchestrator.services.gauges import ALIVE_S, count_pending, count_queues
from muster.orchestrator.services.relays import RelayStatus
from muster.protocol.ids import Address


@dataclass(frozen=True, slots=True)
class ValidatorLine:
    """One seat."""

    address: Address
    """The validator."""
    is_seated: bool
    """Whether it holds the seat now."""
    is_absent: bool
    """Whether it let the time of a call pass and was not heard of since."""
    batches: int
    """Posted outcomes that carry its signature."""
    latest_at: int | None
    """Chain time of the latest of them."""
    heard_at: float | None
    """Wall clock of the latest outcomes it handed in here, since the process started."""
    stake_wei: int
    """Its active stake."""
    watched: Watched | None
    """How its proofs of checking came out lately; None when it has no seat."""


@dataclass(frozen=True, slots=True)
class VersionLine:
    """How many nodes say they have a policy version loaded."""

    version: int | None
    """The version; None for nodes that have none."""
    nodes: int
    """Nodes alive."""


@dataclass(frozen=True, slots=True)
class Health:
    """The network at a glance."""

    head: int | None
    """Block up to which the chain is read."""
    chain_time: int
    """The chain's time."""
    read_ago_s: float | None
    """Seconds since the chain's endpoint answered."""
    chain_error: str | None
    """What it failed with since."""
    events_block: int | None
    """Block of the newest event."""
    contradictions: int
    """Events that do not follow from those before them."""
    pending_transactions: int | None
    """Sent and not mined; None when the sender cannot say."""
    open_leases: int
    """Tickets that wait for their submission."""
    waiting: int
    """Submissions received and in no batch."""
    uncommitted: int
    """Batches composed and not on chain."""
    unjudged: int
    """Batches on chain without outcomes."""
    oldest_unjudged_at: int | None
    """When the oldest of them was committed."""
    alive: int
    """Nodes heard of lately."""
    nodes: int
    """Nodes ever heard of."""
    listeners: int
    """Open streams."""
    validators: list[ValidatorLine]
    """By seat."""
    versions: list[VersionLine]
    """Newest first."""
    relays: list[RelayStatus]
    """The origin and the relays."""
    latest_version: int | None
    """Newest policy version on chain."""


async def read_health(services: Services, relays: list[RelayStatus]) -> Health:
    """Return how the network does."""
    projection, health = services.projection, services.chain_health
    open_leases, waiting = await count_queues(services.database, services.chain_clock.now())
    unjudged = projection.unjudged
    now = services.clock()
    beats = services.heartbeats.latest
    alive = [beat for beat in beats.values() if now - beat.seen_at <= ALIVE_S]
    return Health(
        head=health.head,
        chain_time=services.chain_clock.now(),
        read_ago_s=None if health.read_at is None else now - health.read_at,
        chain_error=health.error,
        events_block=projection.view.block_number,
        contradictions=len(projection.view.contradictions),
        pending_transactions=await count_pending(services.chain),
        open_leases=open_leases,
        waiting=waiting,
        uncommitted=len(services.batching.uncommitted_roots),
        unjudged=len(unjudged),
        oldest_unjudged_at=min((b.committed_at for b in unjudged), default=None),
        alive=len(alive),
        nodes=len(beats),
        listeners=services.feed.listeners,
        validators=_validators(services, await services.checking.summary()),
        versions=_versions(Counter(beat.policy_version for beat in alive)),
        relays=relays,
        latest_version=projection.run.latest_version,
    )


def _validators(services: Services, watched: Sequence[Watched]) -> list[ValidatorLine]:
    proofs = {each.validator: each for each in watched}
    run, signed = services.projection.run, services.projection.signed
    view, run_id = services.projection.view, services.run_id
    return [
        ValidatorLine(
            address=validator,
            is_seated=validator in run.validators,
            is_absent=validator in services.outcomes.caller.absent,
            batches=signed[validator].batches if validator in signed else 0,
            latest_at=signed[validator].latest_at if validator in signed else None,
            heard_at=services.outcomes.heard_at.get(validator),
            stake_wei=view.stake(run_id, validator).active_wei,
            watched=proofs.get(validator),
        )
        for validator in run.seats
    ]


def _versions(counts: Counter[int | None]) -> list[VersionLine]:
    ordered = sorted(counts, key=lambda v: -1 if v is None else v, reverse=True)
    return [VersionLine(version, counts[version]) for version in ordered]
