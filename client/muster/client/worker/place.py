"""What a worker works with. Its loops and its duties share it; all of it can be faked."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from muster.inference.engine import Progress
from muster.protocol.eip712 import digest, sign
from muster.protocol.errors import TaskError
from muster.protocol.ids import Address, Hash32, PolicyVersion, RunId
from muster.protocol.messages import Ticket

if TYPE_CHECKING:
    from muster.api import OrchestratorApi
    from muster.chain import ChainView, RunView
    from muster.client.chain_facts import HistoryView
    from muster.client.validator.judging import Rules
    from muster.client.worker.journal import SubmissionJournal
    from muster.inference import InferenceEngine
    from muster.protocol.eip712 import Domain
    from muster.protocol.messages import Submission
    from muster.shardcast import Fetcher

# Whether a ticket can still be done in time: asked while it is generated. Pure but for a clock.

LEAST_SHARE = 0.1
"""Part of a ticket's time after which its pace is believed."""
DOUBT = 1.5
"""It is given up when it seems to take so many times what is left."""


class Hopeless(TaskError):
    """A ticket would not be done in time."""

    def __init__(self, message: str, takes_s: float) -> None:
        hint = "nothing was signed; it lapses, and this machine asks less often"
        super().__init__(message, hint=hint)
        self.takes_s = takes_s
        """Seconds that it would have taken, about."""


class Hope:
    """Watches over one ticket, from the moment that its generation begins."""

    def __init__(
        self,
        samples: int,
        due_at: float,
        is_first: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """There are so many `samples` to generate until `due_at`, of the clock; `is_first` tells
        whether the engine begins no other ticket's samples before them.
        """
        self._samples, self._due_at, self._clock = samples, due_at, clock
        self._is_first = is_first
        self._began_at, self._began_with = clock(), 0

    def __call__(self, made: Progress) -> None:
        """Raise Hopeless when the rest of the ticket takes far longer than it may.

        Short completions end first, so that the rest is rather thought too short than too long.
        """
        now = self._clock()
        if not self._is_first():
            # What it gets of the engine meanwhile says nothing of its pace.
            self._began_at, self._began_with = now, made.tokens
        spent_s, left_s = now - self._began_at, self._due_at - now
        per_s = (made.tokens - self._began_with) / max(spent_s, 1e-9)
        rest_s = 0.0
        if made.ended and spent_s >= LEAST_SHARE * (self._due_at - self._began_at):
            expected = made.ended_tokens / made.ended * self._samples
            rest_s = max(0.0, expected - made.tokens) / max(per_s, 1e-9)
        if left_s > 0 and rest_s <= DOUBT * left_s:
            return
        raise Hopeless(
            f"{made.ended} of {self._samples} samples are done after {spent_s:,.0f} s at "
            f"{per_s:,.0f} tokens/s, the rest takes about {rest_s:,.0f} s and has {left_s:,.0f} s",
            takes_s=max(spent_s + rest_s, spent_s * DOUBT),
        )


# What the loops of a node share: the engine that some of them work on, and all tickets at hand.
#
# Pure but for locks and a clock. Knows no network, chain or key.

Policy = tuple[PolicyVersion, Hash32]
"""A version, and the root of its manifest."""

REACH = 0.8
"""Part of a lease in which a ticket must be done, with all that wait for the same engine, to be
asked for: the rest is for grading, uploads and longer completions."""
_MEASURED = 4
"""Tickets by the slowest of which an engine's speed is known."""


class Station:
    """An engine, the policy that it holds, and the speed at which it does tickets."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.loaded: Policy | None = None
        """The policy that the engine holds."""
        self.waiting = 0
        """Tickets that are leased and not generated yet."""
        self.tokens_per_s = 0.0
        """Speed at the last ticket."""
        self._took_s: deque[float] = deque(maxlen=_MEASURED)
        self._entering = asyncio.Lock()
        self._holders = 0
        self._at_work: list[Ticket] = []
        self._ended_at = float("-inf")
        self._left = asyncio.Event()

    @asynccontextmanager
    async def holding(
        self, policy: Policy, load: Callable[[], Awaitable[None]]
    ) -> AsyncIterator[None]:
        """Keep a policy loaded. Another one is loaded when nobody holds the present one any more,
        and until then nobody takes up the present one.
        """
        async with self._entering:
            if self.loaded != policy:
                while self._holders:
                    self._left.clear()
                    await self._left.wait()
                # A load that fails leaves the engine without any policy.
                self.loaded = None
                await load()
                self.loaded = policy
            self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1
            self._left.set()

    @contextmanager
    def at_work(self, ticket: Ticket) -> Iterator[Callable[[], float]]:
        """Let a ticket be generated and checked, beside others; yields what tells the seconds that
        the engine has spent on it: those since another one ended.
        """
        began = self._clock()
        self._at_work.append(ticket)
        try:
            yield lambda: self._clock() - max(began, self._ended_at)
        finally:
            self._at_work.remove(ticket)
            self._ended_at = self._clock()

    def is_first(self, ticket: Ticket) -> bool:
        """Return whether no other ticket at work is due before this one."""
        return min(self._at_work, key=lambda each: each.deadline) is ticket

    @property
    def is_held(self) -> bool:
        """Whether somebody works with the policy."""
        return self._holders > 0

    @property
    def takes_s(self) -> float | None:
        """Seconds that the slowest of the last tickets took; None while nothing is known."""
        return max(self._took_s, default=None)

    def took(self, seconds: float) -> None:
        """Note how long a ticket took, or would have taken."""
        self._took_s.append(seconds)

    def forget_speed(self) -> None:
        """Let the next ticket tell the speed."""
        self._took_s.clear()

    def reaches(self, lease_s: float | None) -> bool:
        """Return whether another ticket would be done in time; the first one is tried."""
        if self.takes_s is None or lease_s is None:
            return not self.waiting
        return (self.waiting + 1) * self.takes_s <= REACH * lease_s


class Held:
    """What a node has at hand, for all its loops."""

    def __init__(self) -> None:
        self.fetched: Policy | None = None
        """The newest policy that is on its disk."""
        self.tickets: list[Ticket] = []
        """The tickets that they work on."""
        self.asking = asyncio.Lock()
        """Held while a ticket is asked for: two who ask at a time would get the same."""
        self.lease_s: float | None = None
        """Seconds from the last lease to its deadline; None before the first."""


@dataclass(frozen=True, slots=True)
class NodePlace:
    """One node of a worker in a run: enough to see to work that was signed before."""

    run_id: RunId
    worker: Address
    """The staking wallet it works for."""
    key: bytes
    """The node's private key."""
    domain: Domain
    """Of the ContributionLedger."""
    view: ChainView
    """The chain, kept current by someone else."""
    api: OrchestratorApi | None
    """The run's orchestrator, if it is asked."""
    journal: SubmissionJournal
    """What was signed before."""
    poll_s: float
    """Shortest pause between two looks for work."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(run_id={self.run_id}, worker={self.worker!r})"

    @property
    def run(self) -> RunView:
        """The run as the chain has it."""
        return self.view.runs[self.run_id]

    def sign(self, submission: Submission) -> bytes:
        """Return the node's signature of a submission."""
        return sign(digest(self.domain, submission.struct_hash()), self.key)


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class WorkerPlace(NodePlace):
    """A node that generates."""

    view: HistoryView
    """The chain, with how workers stood in earlier blocks."""
    api: OrchestratorApi
    """The run's orchestrator."""
    now: Callable[[], Awaitable[int]]
    """Unix seconds of the chain's clock."""
    fetcher: Fetcher
    """Where policies come from."""
    engine: InferenceEngine
    """What generates."""
    rules: Rules
    """What the run's documents say."""
    heartbeat_s: float
    """Seconds between signs of life."""
    keep_going: bool = False
    """Whether it stays when the run is over."""
    tickets_per_engine: int = 1
    """Loops that share an engine."""
    station: Station = field(default_factory=Station)
    """Who shares the engine."""
    held: Held = field(default_factory=Held)
    """The tickets that the node's loops work on."""
