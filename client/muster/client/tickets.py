"""Whether a ticket holds: everything an orchestrator says is checked against the chain.

Pure. Workers refuse false tickets before they generate, because they would sign work that must be
rejected; validators reject submissions that rest on one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from muster.protocol.eip712 import Domain, digest, recover
from muster.protocol.errors import SignatureError
from muster.protocol.ids import Address, Hash32, PolicyVersion, RunId
from muster.protocol.messages import Submission, Ticket

MAX_TICKET_LIFE_S = 24 * 3600
"""A deadline further ahead than this is absurd: a node would be bound to one ticket for days."""


class TicketFault(StrEnum):
    """Why a ticket does not hold."""

    SIGNATURE = "it is not signed by the run's orchestrator"
    RUN = "it is for another run"
    WORKER = "it is for another worker"
    STEP = "there is no step 0"
    POLICY_UNKNOWN = "its policy version is not on chain"
    POLICY_ROOT = "its policy root is not the chain's"
    BEACON = "its beacon is not the chain's"
    DEADLINE = "its deadline is over or absurdly far"
    SLOT_SIGNED = "its slot was signed on other terms"


@dataclass(frozen=True, slots=True)
class KnownPolicy:
    """What the chain says about a policy version."""

    root: Hash32
    """Root of its manifest."""
    beacon: Hash32
    """What the worker's seeds under it are drawn from, see `MemberView.beacon_under`."""


@dataclass(frozen=True, slots=True)
class TicketTerms:
    """What the chain, and not the orchestrator, says a ticket must be."""

    domain: Domain
    """Of the ContributionLedger."""
    orchestrator: Address
    """Whose signature counts."""
    run_id: RunId
    """The run."""
    worker: Address
    """The staking wallet that holds the ticket."""
    policies: Mapping[PolicyVersion, KnownPolicy]
    """The published versions."""


def ticket_fault(ticket: Ticket, signature: bytes, terms: TicketTerms) -> TicketFault | None:
    """Return why a ticket does not hold, or None."""
    if not _is_signed_by_orchestrator(ticket, signature, terms):
        return TicketFault.SIGNATURE
    if ticket.run_id != terms.run_id:
        return TicketFault.RUN
    if ticket.worker != terms.worker:
        return TicketFault.WORKER
    if ticket.step < 1:
        return TicketFault.STEP
    policy = terms.policies.get(ticket.policy_version)
    if policy is None:
        return TicketFault.POLICY_UNKNOWN
    if ticket.policy_root != policy.root:
        return TicketFault.POLICY_ROOT
    if ticket.beacon != policy.beacon:
        return TicketFault.BEACON
    return None


def lease_fault(
    ticket: Ticket, signature: bytes, terms: TicketTerms, *, now: int, signed: Ticket | None
) -> TicketFault | None:
    """Return why a worker must not work on a ticket at `now` (the chain's clock), or None.

    `signed` is the ticket under which this slot was signed before, if it was: the same terms may
    come again (an orchestrator that lost the upload), other terms may not.
    """
    if fault := ticket_fault(ticket, signature, terms):
        return fault
    if not now < ticket.deadline <= now + MAX_TICKET_LIFE_S:
        return TicketFault.DEADLINE
    if signed is not None and _work(signed) != _work(ticket):
        return TicketFault.SLOT_SIGNED
    return None


def ticket_signer(ticket: Ticket, signature: bytes, domain: Domain) -> Address | None:
    """Return who signed a ticket; None for a malformed signature."""
    try:
        return recover(digest(domain, ticket.struct_hash()), signature)
    except SignatureError:
        return None


def slot_and_policy(message: Ticket | Submission) -> tuple[int | str, ...]:
    """Return what a ticket and the submission that fills it must have in common."""
    return (
        message.run_id,
        message.worker,
        message.step,
        message.index,
        message.policy_version,
    )


def _is_signed_by_orchestrator(ticket: Ticket, signature: bytes, terms: TicketTerms) -> bool:
    try:
        return recover(digest(terms.domain, ticket.struct_hash()), signature) == terms.orchestrator
    except SignatureError:
        return False


def _work(ticket: Ticket) -> tuple[object, ...]:
    """Return what the rollouts of a ticket depend on: all but its deadline."""
    return (
        ticket.run_id,
        ticket.worker,
        ticket.step,
        ticket.index,
        ticket.policy_version,
        ticket.policy_root,
        ticket.beacon,
    )
