"""Who takes part: the production loops, and adversaries that differ from them by one method."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from muster.client.outage import Outage, Outages
from muster.client.validator.checks import ClaimedWork, FailedCheck
from muster.client.validator.judging import Judgement
from muster.client.validator.loop import ValidatorLoop
from muster.client.validator.place import ValidatorPlace
from muster.client.validator.records import EvidenceStore
from muster.client.worker.journal import SignedSubmission, SubmissionJournal
from muster.client.worker.loop import TICKET_PAUSE_S, WorkerLoop
from muster.client.worker.place import WorkerPlace
from muster.lab.simulator.machines import SimulatedEngine
from muster.protocol.errors import StorageError
from muster.protocol.ids import Address
from muster.protocol.messages import Reason, Submission, Ticket, Verdict
from muster.protocol.rollouts import Rollout

Conduct = Literal["honest", "forger", "liar"]
"""Honest; samples from another model; claims rewards it did not earn."""
Judging = Literal["honest", "lazy", "colluding", "accusing"]
"""Checks; accepts everything unseen; accepts its friends' work, whatever it is; accepts everything
but its victims' work, which it calls a fraud."""

ACCUSATION = FailedCheck(Verdict.FRAUD, Reason.TOPLOC_MISMATCH, "says so")
"""What an accusing validator finds in its victim's work."""
RETRY_S = 0.5
"""First pause of a loop whose dependency is away, as in production."""


@dataclass(frozen=True, slots=True)
class Machine:
    """How fast a node works."""

    rng: random.Random
    """Decides how long each piece takes."""
    seconds: float
    """Mean seconds of generating, or of checking, a submission."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the piece that it works on: two at a time would take as long as one after another."""

    async def work(self) -> None:
        """Let the time pass that one piece takes: lognormal, with a spread of a third."""
        async with self.turn:
            await asyncio.sleep(self.seconds * self.rng.lognormvariate(0, 0.33))


class Disk(SubmissionJournal):
    """A worker's journal on a disk that may be full."""

    is_full = False

    def record(
        self, ticket: Ticket, ticket_signature: bytes, submission: Submission, data: bytes
    ) -> SignedSubmission:
        """Remember a submission; raises StorageError while the disk is full."""
        if self.is_full:
            raise StorageError("the simulated disk is full")
        return super().record(ticket, ticket_signature, submission, data)


class Shelf(EvidenceStore):
    """A validator's evidence, of what it does not accept: of the rest nobody here asks for any."""

    def write(
        self, place: tuple[int, int], claim: ClaimedWork, data: bytes | None, judgement: Judgement
    ) -> Path:
        """Store what led to a judgement that is no acceptance."""
        if judgement.finding is None:
            return Path("accepted")
        return super().write(place, claim, data, judgement)


class SimulatedWorker(WorkerLoop):
    """The worker's loop on a machine that takes its time, and perhaps one that cheats."""

    def close(self) -> None:
        """Let go of the journal."""
        self.place.journal.close()

    def __init__(self, place: WorkerPlace, machine: Machine, conduct: Conduct) -> None:
        super().__init__(place)
        self._machine, self._conduct = machine, conduct
        self.outages = Outages(first_s=RETRY_S, rng=machine.rng)
        self.refusals = Outage(
            "a ticket that can be worked on", first_s=TICKET_PAUSE_S, rng=machine.rng
        )

    async def generate(self, ticket: Ticket) -> list[Rollout]:
        """Return the ticket's rollouts."""
        rollouts = await super().generate(ticket)
        if self._conduct == "liar":
            return [replace(row, task_reward=1.0 - row.task_reward) for row in rollouts]
        return rollouts

    async def check(self, _rollouts: list[Rollout], _generating_s: float) -> None:
        """Let the time pass that generating takes; no simulated machine is disturbed."""
        await self._machine.work()


def engine_for(conduct: Conduct) -> SimulatedEngine:
    """Return the model that a worker of this conduct runs."""
    return SimulatedEngine("another model" if conduct == "forger" else "policy")


class SimulatedValidator(ValidatorLoop):
    """The validator's loop on a machine that takes its time, and perhaps a dishonest one."""

    def __init__(
        self,
        place: ValidatorPlace,
        machine: Machine,
        judging: Judging,
        friends: frozenset[Address],
    ) -> None:
        super().__init__(place)
        self._machine, self._judging, self._friends = machine, judging, friends
        self.outages = Outages(first_s=RETRY_S, rng=machine.rng)
        self.judged = 0
        """Submissions it looked at."""
        self.busy_s = 0.0
        """Virtual seconds it spent on them."""

    def close(self) -> None:
        """Let go of the journal."""
        self.place.journal.close()

    async def judge_claim(self, claim: ClaimedWork) -> tuple[Judgement, bytes | None]:
        """Judge it in the time that the machine takes, or not at all."""
        self.judged += 1
        is_friend = claim.submission.worker in self._friends
        units = claim.submission.units
        if self._judging == "accusing":
            return Judgement(None if is_friend else ACCUSATION, units), None
        if self._judging == "lazy" or (self._judging == "colluding" and is_friend):
            return Judgement(None, units), None
        began = asyncio.get_running_loop().time()
        await self._machine.work()
        judged = await super().judge_claim(claim)
        self.busy_s += asyncio.get_running_loop().time() - began
        return judged
