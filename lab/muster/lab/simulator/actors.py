"""The participants: the production loops, and adversaries that differ from them by one method."""

import asyncio
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from muster.client.outage import Outages
from muster.client.validator.checks import ClaimedWork, FailedCheck
from muster.client.validator.context import ValidatorContext
from muster.client.validator.judging import Judgement
from muster.client.validator.loop import ValidatorLoop
from muster.client.validator.records import EvidenceStore
from muster.client.worker.context import TICKET_PAUSE_S, WorkerContext
from muster.client.worker.journal import SignedSubmission, SubmissionJournal
from muster.client.worker.loop import WorkerLoop
from muster.lab.simulator.machines import SimulatedEngine
from muster.lifecycle.outage import Outage
from muster.protocol.errors import StorageError
from muster.protocol.ids import Address
from muster.protocol.messages import Reason, Submission, Ticket, Verdict
from muster.protocol.rollouts import Rollout

Conduct = Literal["honest", "forger", "liar"]
"""Honest; samples from another model; claims rewards it did not earn."""
Judging = Literal["honest", "lazy", "colluding", "accusing"]
"""Checks; accepts everything unseen; accepts any work of its friends; accepts everything except its
victims' work, which it calls fraud."""

ACCUSATION = FailedCheck(Verdict.FRAUD, Reason.TOPLOC_MISMATCH, "says so")
"""The finding that an accusing validator claims for its victims' work."""
RETRY_S = 0.5
"""First pause of a loop whose dependency is unavailable, as in production."""


@dataclass(frozen=True, slots=True)
class Machine:
    """How fast a node works."""

    rng: random.Random
    """Decides how long each piece takes."""
    seconds: float
    """Mean seconds of generating, or of checking, a submission."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock for one piece of work at a time."""

    async def work(self) -> None:
        """Sleep for the time of one piece of work: lognormal, with a spread of a third."""
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
    """A validator's evidence store that keeps only work that it does not accept."""

    def write(
        self, place: tuple[int, int], claim: ClaimedWork, data: bytes | None, judgement: Judgement
    ) -> Path:
        """Store the evidence of a judgement other than Accepted."""
        if judgement.finding is None:
            return Path("accepted")
        return super().write(place, claim, data, judgement)


class SimulatedWorker(WorkerLoop):
    """The worker's loop with simulated durations, possibly cheating."""

    def close(self) -> None:
        """Close the journal."""
        self.context.journal.close()

    def __init__(self, context: WorkerContext, machine: Machine, conduct: Conduct) -> None:
        super().__init__(context)
        self._machine, self._conduct = machine, conduct
        self.held.outages = Outages(first_s=RETRY_S, rng=machine.rng)
        self.held.refusals = Outage(
            "a ticket that can be worked on", first_s=TICKET_PAUSE_S, rng=machine.rng
        )

    async def generate(self, ticket: Ticket) -> list[Rollout]:
        """Return the ticket's rollouts."""
        rollouts = await super().generate(ticket)
        if self._conduct == "liar":
            return [replace(row, task_reward=1.0 - row.task_reward) for row in rollouts]
        return rollouts

    async def check(self, _rollouts: list[Rollout], _generating_s: float) -> None:
        """Sleep for the time that generating takes; no simulated machine computes wrongly."""
        await self._machine.work()


def engine_for(conduct: Conduct) -> SimulatedEngine:
    """Return the model that a worker of this conduct runs."""
    return SimulatedEngine("another model" if conduct == "forger" else "policy")


class SimulatedValidator(ValidatorLoop):
    """The validator's loop with simulated durations, possibly dishonest."""

    def __init__(
        self,
        context: ValidatorContext,
        machine: Machine,
        judging: Judging,
        friends: frozenset[Address],
    ) -> None:
        super().__init__(context)
        self._machine, self._judging, self._friends = machine, judging, friends
        self.outages = Outages(first_s=RETRY_S, rng=machine.rng)
        self.judged = 0
        """Submissions it looked at."""
        self.busy_s = 0.0
        """Virtual seconds it spent on them."""

    def close(self) -> None:
        """Close the journal."""
        self.context.journal.close()

    async def judge_claim(self, claim: ClaimedWork) -> tuple[Judgement, bytes | None]:
        """Judge a claim in the time that the machine takes, or without looking if dishonest."""
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
