"""What is known while a group of requests for work is decided: read at once, then kept by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from muster.chain import MemberView
from muster.orchestrator.db import statements
from muster.orchestrator.db.direct import Rows, Statement
from muster.orchestrator.services.hardware import Unfit
from muster.protocol.ids import Address, Step
from muster.protocol.messages import Ticket


@dataclass(frozen=True, slots=True)
class Unfilled:
    """A ticket that waits for its submission."""

    node: str
    """Who asked for it."""
    deadline: int
    """When it is due."""
    policy_version: int
    """The policy it is for."""
    ticket: str
    """The ticket, as JSON text."""
    signature: bytes
    """EIP-712 `Ticket`."""


@dataclass(slots=True)
class Account:
    """What the database knows of one worker."""

    unfilled: list[Unfilled]
    """Its tickets that are in flight, oldest first."""
    waiting_units: int
    """Units of its submissions that are in no batch."""
    slots: dict[Step, int]
    """The number of its last slot, of each step that tickets may be for."""
    unfit: Unfit | None
    """Why its machine gets no ticket."""

    @classmethod
    def read(cls, unfit: Unfit | None, answers: Sequence[Rows]) -> Account:
        """Return it from the answers to `questions_about`."""
        unfilled, [(units,)], last_slots = answers
        slots: dict[Step, int] = {}
        for step, number in last_slots:
            slots[Step(step)] = max(number, slots.get(Step(step), 0))
        return cls([Unfilled(*row) for row in unfilled], int(units or 0), slots, unfit)

    def open_ticket(self, node: Address, *, now: int, oldest: int) -> Unfilled | None:
        """Return the newest ticket of a node that is still worth working on."""
        for each in reversed(self.unfilled):
            if each.node == node and each.deadline >= now and each.policy_version >= oldest:
                return each
        return None


def questions_about(worker: MemberView, *, counts_from: int, since: Step) -> list[Statement]:
    """Return what to ask of the database about a worker: tickets due at `counts_from` or later,
    slots of steps from `since` on.
    """
    return [
        statements.unfilled_leases(worker.address, since=counts_from),
        statements.waiting_units(worker.address),
        statements.last_slots(worker.address, since=since),
    ]


@dataclass(slots=True)
class Book:
    """What one transaction knows, and the tickets it has given."""

    now: int
    """The chain's time."""
    used: int
    """Submissions that training uses."""
    outstanding: int
    """Submissions that are leased, received or committed and not judged."""
    first_step: Step
    """Slots of earlier steps are not known here."""
    accounts: Mapping[Address, Account]
    """Of each worker that asks."""
    given: list[Statement] = field(default_factory=list)
    """Rows of the tickets that were given."""

    def note(self, node: Address, ticket: Ticket, signature: bytes) -> None:
        """Take note of a ticket that is given."""
        text = json.dumps(ticket.to_json())
        account = self.accounts[ticket.worker]
        account.unfilled.append(
            Unfilled(node, ticket.deadline, ticket.policy_version, text, signature)
        )
        account.slots[ticket.step] = ticket.index
        self.outstanding += 1
        self.given.append(statements.new_lease(node, ticket, text, signature))
