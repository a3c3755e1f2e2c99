"""The influence on training of a worker that picks its tickets: the real services on a fake chain.

    python -m benchmarks.orchestrator.shopping

Ten workers of equal stake generate for an hour, 60 s a ticket, leases of 600 s, 16 submissions a
step, 48 tickets out at once. Every result is good or bad with one half. Nine workers are honest;
the tenth has ten machines and hands in good results only, as one worker or as ten or a hundred that
share its stake:

    honest      hands in all of them
    lapses      lets tickets with bad results lapse, and changes its node
    rotates     the same, and an identity with a bad result is replaced by a fresh one
    fills       uploads empty files for tickets with bad results
    foresees    generates its possible next tickets, and asks only when most results are good

`held` is the most tickets of the 48 that it held at once; `data` its share of accepted submissions;
`shift` the change that it makes to the mean reward of the others.
"""

import asyncio
import os
import random
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "unit" / "orchestrator"))

from benchmarks.report import print_table
from orchestrator_bench import Bench, open_bench
from orchestrator_fakes import Network, submission_for

from muster.api.answers import BatchEntry
from muster.orchestrator.db import statements
from muster.orchestrator.leases.leases import INDEX_BLOCK, SignedTicket, next_step
from muster.protocol.eip712 import address_of
from muster.protocol.encoding import keccak
from muster.protocol.ids import Address, PolicyVersion
from muster.protocol.messages import Reason, Submission, Ticket, Verdict
from muster.protocol.recipe import TrainingRecipe

TRAINING = TrainingRecipe(steps=0, submissions_per_step=16, max_async_level=2)
STRATEGIES = ("honest", "lapses", "rotates", "fills", "foresees")
IDENTITIES = (1, 10, 100)
HONEST, LEASE_S, GENERATE_S, JUDGE_S = 9, 600, 60, 20
MACHINES = 10
STAKE = 10**20


def is_good(worker: str, step: int, index: int) -> bool:
    """Return whether a ticket's result is rewarded."""
    return keccak(f"{worker} {step} {index}".encode())[0] & 1 == 0


@dataclass
class World:
    """A run, second by second."""

    bench: Bench
    strategy: str
    identities: list[int]
    ends_s: int
    second: int = 0
    busy: list[tuple[int, int, Ticket]] = field(default_factory=list)
    """End time, worker and ticket of each busy machine."""
    uploads: deque[tuple[Submission, bool]] = field(default_factory=deque)
    data: Counter[tuple[bool, bool]] = field(default_factory=Counter)
    """Accepted submissions by (is the attacker's, is good)."""
    most: int = 0
    """Tickets that the attacker held at once."""
    ready_at: dict[int, int] = field(default_factory=dict)
    """Time at which an identity's possible next tickets are generated."""
    foreseen: dict[int, set[tuple[int, int]]] = field(default_factory=dict)
    """Possible next tickets, by step and index."""
    retired: set[int] = field(default_factory=set)
    """Identities that ask no more."""
    mine: dict[tuple[str, int, int], Ticket] = field(default_factory=dict)
    """The attacker's tickets that are not judged and whose time is not over."""

    @property
    def now(self) -> int:
        """The chain's time."""
        return self.bench.network.chain.time

    async def run(self) -> None:
        """Let time pass."""
        random.seed(1)
        self._beat()
        while self.second < self.ends_s:
            self.bench.set_chain_time(self.now + 5)
            self.bench.wall.time += 5
            self.second += 5
            self.bench.services.leases.monotonic = lambda: float(self.second)
            await self._step()

    async def _step(self) -> None:
        done = [each for each in self.busy if each[0] <= self.second]
        self.busy = [each for each in self.busy if each[0] > self.second]
        for _, number, ticket in done:
            await self._finish(number, ticket)
        if self.second % JUDGE_S == 0:
            await self._judge()
        if self.second % 30 == 0:
            self._beat()
        numbers = [*range(HONEST), *self.identities]
        random.shuffle(numbers)
        for number in numbers:
            if number < HONEST:
                await self._work_honestly(number)
            elif number not in self.retired:
                await self._attack(number)
        self.mine = {k: t for k, t in self.mine.items() if t.deadline >= self.now}
        oldest = (self.bench.network.run.latest_version or 0) - TRAINING.max_async_level
        held = sum(ticket.policy_version >= oldest for ticket in self.mine.values())
        self.most = max(self.most, held)

    def _beat(self) -> None:
        for number in [*range(HONEST), *self.identities]:
            node = self.bench.network.worker(number).node
            self.bench.services.heartbeats.beat(node, PolicyVersion(0), "generating", "test")

    async def _ask(self, number: int) -> Ticket | None:
        worker = self.bench.network.worker(number)
        # Tickets that it does not name would be given to it again.
        mine = (each for each in self.mine.values() if each.worker == worker.address)
        holding = frozenset((each.step, each.index) for each in mine)
        answer = await self.bench.services.leases.lease(worker, holding)
        return answer.ticket if isinstance(answer, SignedTicket) else None

    async def _work_honestly(self, number: int) -> None:
        if any(who == number for _, who, _ in self.busy):
            return
        ticket = await self._ask(number)
        if ticket is not None:
            self.busy.append((self.second + GENERATE_S, number, ticket))

    def _free_machines(self) -> int:
        return MACHINES - sum(who >= HONEST for _, who, _ in self.busy) - len(self.ready_at)

    async def _attack(self, number: int) -> None:
        while self._free_machines() > 0 or number in self.ready_at:
            if self.strategy == "foresees" and not await self._foresees(number):
                return
            ticket = await self._ask(number)
            if ticket is None or (ticket.worker, ticket.step, ticket.index) in self.mine:
                return
            self.mine[ticket.worker, ticket.step, ticket.index] = ticket
            is_known = (ticket.step, ticket.index) in self.foreseen.pop(number, ())
            done_at = self.second + (0 if is_known else GENERATE_S)
            self.busy.append((done_at, number, ticket))
            if self.strategy != "lapses":
                return
            self._rotate(number)

    def _rotate(self, number: int) -> None:
        network, key = self.bench.network, os.urandom(32)
        worker = network.worker(number)
        bound = {"worker": worker.address}
        network.apply("WorkerRegistry", "NodeUnbound", node=worker.node, **bound)
        network.apply("WorkerRegistry", "NodeBound", node=address_of(key), **bound)
        self.bench.services.heartbeats.beat(worker.node, PolicyVersion(0), "generating", "test")

    async def _foresees(self, number: int) -> bool:
        """Generate what the next ticket may be, and return whether most of it is good."""
        serving, worker = self.bench.services.leases, self.bench.network.worker(number)
        known = await serving.read_snapshot(self.bench.services.database, [worker])
        step = next_step(known.used, known.outstanding, TRAINING.submissions_per_step)
        slots = known.accounts[worker.address].slots.get(step, set())
        indices = set(range(INDEX_BLOCK)) - slots
        if self.foreseen.get(number) != {(step, index) for index in indices}:
            share = max(1, MACHINES // len(self.identities))
            takes_s = GENERATE_S * -(-len(indices) // share)
            if self.second < self.ready_at.setdefault(number, self.second + takes_s):
                return False
            del self.ready_at[number]
            self.foreseen[number] = {(step, index) for index in indices}
        good = sum(is_good(worker.address, step, index) for index in indices)
        return good >= 0.6 * len(indices)

    async def _finish(self, number: int, ticket: Ticket) -> None:
        is_bad = not is_good(ticket.worker, ticket.step, ticket.index)
        is_refused = number >= HONEST and is_bad and self.strategy != "honest"
        if is_refused and self.strategy == "rotates":
            self.retired.add(number)
        if is_refused and self.strategy != "fills":
            return  # until its deadline
        await self._upload(ticket, is_garbage=is_refused)

    async def _upload(self, ticket: Ticket, *, is_garbage: bool) -> None:
        body = repr(ticket).encode()
        claim = submission_for(ticket, body)
        entry = BatchEntry(
            submission=claim, signature=bytes(65), ticket=ticket, ticket_signature=bytes(65),
            received_at=self.now,
        )  # fmt: skip
        async with self.bench.services.database.transaction() as asked:
            await asked.ask(statements.new_submission(entry, len(body)), statements.fill(claim))
        self.uploads.append((claim, is_garbage))

    async def _judge(self) -> None:
        """Commit and judge what was uploaded; publish the policies that it makes."""
        network = self.bench.network
        if self.uploads:
            await self.bench.commit()
            batch = network.view.batches[max(network.view.batches)]
            assert batch.count == len(self.uploads)
            records = b"".join(self._record(*each) for each in self.uploads)
            await network.chain.ledger.post_outcomes(batch.header(), records, b"")
            self.uploads.clear()
            await self.bench.follow()
        while True:
            version = (network.run.latest_version or 0) + 1
            used = self.bench.services.projection.trained_submissions
            if used < version * TRAINING.submissions_per_step:
                return
            network.publish(version)

    def _record(self, claim: Submission, is_garbage: bool) -> bytes:
        is_attackers = self._number_of(claim.worker) >= HONEST
        if is_attackers:
            self.mine.pop((claim.worker, claim.step, claim.index), None)
        if is_garbage:
            return self.bench.network.judge([claim], Verdict.REJECTED, Reason.SCHEMA)
        self.data[is_attackers, is_good(claim.worker, claim.step, claim.index)] += 1
        return self.bench.network.judge([claim])

    def _number_of(self, worker: Address) -> int:
        return self.bench.network.view.workers[worker].worker_id - 1


async def simulate(strategy: str, identities: int, ends_s: int = 3600) -> World:
    """Return the world at the end."""
    network = Network(training=TRAINING)
    members = network.run.members
    for number in range(4, HONEST + identities + 1):
        network.keys.nodes.append(os.urandom(32))
        network.join(address_of(os.urandom(32)), address_of(network.keys.nodes[-1]), number)
    for member in members.values():
        member.stake.active_wei = STAKE if member.worker_id <= HONEST else STAKE // identities
    with tempfile.TemporaryDirectory() as folder:
        async with open_bench(Path(folder), network, lease_s=LEASE_S) as bench:
            numbers = list(range(HONEST, HONEST + identities))
            world = World(bench, strategy, numbers, ends_s)
            await world.run()
            return world


def measure(strategy: str, identities: int) -> dict[str, float]:
    """Return the figures of an hour of an attack."""
    world = asyncio.run(simulate(strategy, identities))
    data, whole = world.data, world.data.total()
    theirs = data[True, True] + data[True, False]
    mean = data[False, True] / max(1, whole - theirs)
    shift = (data[True, True] + data[False, True]) / whole - mean
    return {"held": world.most, "data": theirs / whole, "shift": shift, "accepted": whole}


def rows() -> Iterator[list[str]]:
    """Yield a line for each attack."""
    for strategy in sys.argv[1:] or STRATEGIES:
        for identities in IDENTITIES:
            found = measure(strategy, identities)
            yield [
                strategy, str(identities), str(found["held"]), f"{found['data']:.1%}",
                f"{found['shift']:+.3f}", str(found["accepted"]),
            ]  # fmt: skip


if __name__ == "__main__":
    header = ["attack", "identities", "held", "data", "shift", "accepted"]
    print_table("A worker that picks its tickets", header, list(rows()))
