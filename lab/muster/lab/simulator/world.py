"""The participants of a simulated network, and its state after a simulation."""

import asyncio
import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from muster.client.chain_facts import HistoryView
from muster.client.validator.judging import Rules
from muster.lab.simulator.chain import SimulatedChain
from muster.lab.simulator.clock import Meter
from muster.lab.simulator.desk import Desk, Link
from muster.lab.simulator.scenario import Scenario
from muster.orchestrator.services import Services
from muster.protocol.ids import Address, Hash32


@dataclass
class Person:
    """A worker, validator or juror: its keys, its conduct, and its running program."""

    name: str
    """Name in the history."""
    key: bytes
    """Node key of a worker, signing key of a validator."""
    address: Address
    """The account that stakes."""
    conduct: str
    """How it behaves."""
    link: Link
    """Its network."""
    endpoint: int
    """Its RPC endpoint."""
    loop: Any = None
    """The program, while it runs."""
    task: asyncio.Task[None] | None = None
    """The task that runs it."""
    starts: int = 0
    """How often it was started."""
    end: str = ""
    """The error that ended it for good."""


@dataclass
class World:
    """A network after its simulation."""

    scenario: Scenario
    """Parameters of the simulation."""
    chain: SimulatedChain
    """The chain."""
    services: Services
    """The orchestrator's services."""
    desk: Desk
    """Requests that reached the orchestrator."""
    workers: list[Person]
    """Everyone who worked."""
    validators: list[Person]
    """Everyone who judged."""
    jurors: list[Person]
    """Everyone on the bench."""
    views: list[HistoryView]
    """The view of each endpoint's followers."""
    rules: Rules
    """The run's documents."""
    history: list[str] = field(default_factory=list)
    """One line for every block, event and mishap, in order."""
    judged: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Submissions checked and seconds spent, by validator."""
    doing: Counter[str] = field(default_factory=Counter)
    """Samples of workers' activities, one a second."""
    received_at: dict[Hash32, float] = field(default_factory=dict)
    """Virtual time of each upload, by file."""
    meter: Meter | None = None
    """Processor seconds by kind of process."""

    def digest(self) -> str:
        """Return the SHA-256 of the history."""
        return hashlib.sha256("\n".join(self.history).encode()).hexdigest()
