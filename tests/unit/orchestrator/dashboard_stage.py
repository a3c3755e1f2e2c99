"""A run with a history, for the dashboard's tests and measurements: any number of workers and
submissions, a few of them cheaters, on the fake chain and in the database.
"""

import asyncio
import json
import math
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import uvicorn
from orchestrator_bench import Bench
from orchestrator_fakes import ACCEPTED, RUN, Network, escrow_of, slash_of
from sqlalchemy import bindparam

from muster.chain.frauds import charge_of
from muster.chain.structs import SlashSubject
from muster.orchestrator.db import Database
from muster.orchestrator.db.query import Query, Statement
from muster.orchestrator.db.statements import continue_numbers
from muster.orchestrator.db.tables import metadata
from muster.protocol.encoding import file_hash, keccak
from muster.protocol.ids import Address, Hash32, PolicyVersion, Step, to_address
from muster.protocol.messages import OutcomeRecord, Reason, Submission, Ticket, Verdict
from muster.protocol.rollouts import Rollout, encode_rollouts

HOSTILE = "\u202egnp.tneconni\u202c<script>document.title='pwned'</script>\x1b[2J\u200b&amp;"
"""The text that a malicious worker writes into every text that it controls."""
ALPHABET = "".join(dict.fromkeys("0123456789,=>abcdefghijklmnopqrstuvwxyz .\n" + HOSTILE))
"""Characters of the tokenizer: one token each, in this order."""
_FRAUDS = (Reason.TOPLOC_MISMATCH, Reason.SAMPLER_MISMATCH, Reason.WRONG_REWARD)


def _node(number: int) -> Address:
    return to_address(keccak(b"node %d" % number)[:20])


@dataclass
class History:
    """Writes a history onto a fake chain, and the rows that go with it."""

    network: Network
    seed: int = 0
    per_batch: int = 64
    rows: list[dict[str, Any]] = field(default_factory=list)
    batches: list[dict[str, Any]] = field(default_factory=list)
    files: dict[Hash32, bytes] = field(default_factory=dict)
    workers: list[Address] = field(default_factory=list)
    slots: dict[tuple[Address, int], int] = field(default_factory=dict)
    stored: int = 0
    """Number of rows already returned by `take`."""
    last: Submission | None = None
    """The latest submission."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.workers = list(self.network.view.workers)

    def register(self, count: int, node_of: Callable[[int], Address] = _node) -> None:
        """Let workers join until there are `count`."""
        for number in range(len(self.workers) + 1, count + 1):
            worker = to_address(keccak(b"worker %d" % number)[:20])
            stake = self.random.randrange(1, 50) * 10**18
            self.network.join(worker, node_of(number), number, stake)
            self.workers.append(worker)

    def work(
        self, submissions: int, *, steps: int, cheaters: int = 2, judged: int = -1, after: int = 0
    ) -> None:
        """Commit this many submissions over the steps that follow `after`, and judge the first
        `judged` of them.
        """
        judged = submissions if judged < 0 else judged
        done, per_step = 0, math.ceil(submissions / steps)
        while done < submissions:
            step = after + done // per_step + 1
            if step - 1 > (self.network.run.latest_version or 0):
                self.network.publish(step - 1)
            left = (step - after) * per_step - done
            count = min(self.per_batch, submissions - done, left)
            first = self.stored + len(self.rows)
            batch = [self._submission(step, first + i, cheaters) for i in range(count)]
            done += count
            self._commit([s for s, _, _ in batch])
            if done <= judged:
                self._post(batch)

    def _submission(
        self, step: int, number: int, cheaters: int
    ) -> tuple[Submission, Verdict, Reason]:
        # Uneven: a leaderboard of equals shows nothing.
        index = min(int(self.random.expovariate(2.5) * len(self.workers)), len(self.workers) - 1)
        worker = self.workers[index]
        if self.network.run.members[worker].status == "Banned":
            index = len(self.workers) // 2 + number % (len(self.workers) - len(self.workers) // 2)
            worker = self.workers[index]
        slot = self.slots[worker, step] = self.slots.get((worker, step), -1) + 1
        verdict, reason = Verdict.ACCEPTED, Reason.NONE
        draw = self.random.random()
        if index < cheaters and number > 200 and draw < 0.3:
            verdict, reason = Verdict.FRAUD, _FRAUDS[index % len(_FRAUDS)]
        elif draw > 0.985:
            verdict, reason = Verdict.REJECTED, Reason.LATE
        elif draw > 0.97:
            verdict, reason = Verdict.INCOMPLETE, Reason.FILE_INCOMPLETE
        submission = Submission(
            run_id=RUN,
            worker=worker,
            step=Step(step),
            index=slot,
            policy_version=PolicyVersion(max(0, step - 1 - self.random.randrange(2))),
            file_hash=file_hash(b"file %d of %d" % (number, self.seed)),
            rollouts=16,
            units=self.random.randrange(1_500, 4_000),
        )
        return submission, verdict, reason

    def write_file(self, rollouts: list[Rollout], verdict: Verdict, reason: Reason) -> Submission:
        """Submit a file that really exists; it is judged at once."""
        body = encode_rollouts(rollouts)
        step = max(1, self.network.run.latest_version or 0)
        worker = self.workers[-1]
        slot = self.slots[worker, step] = self.slots.get((worker, step), -1) + 1
        submission = Submission(
            run_id=RUN, worker=worker, step=Step(step), index=slot,
            policy_version=PolicyVersion(rollouts[0].policy_version), file_hash=file_hash(body),
            rollouts=len(rollouts), units=sum(len(r.completion_tokens) for r in rollouts),
        )  # fmt: skip
        self.files[submission.file_hash] = body
        self._commit([submission])
        self._post([(submission, verdict, reason)])
        return submission

    def _commit(self, batch: list[Submission]) -> None:
        chain, ledger = self.network.chain, self.network.chain.ledger
        self.last = batch[-1]
        root = keccak(batch[0].file_hash + batch[-1].file_hash)
        ledger.batches += 1
        units = sum(s.units for s in batch)
        for position, submission in enumerate(batch):
            chain.time += 1
            self.rows.append(self._row(submission, root, position, chain.time))
        self.batches.append({"root": root, "count": len(batch), "units": units})
        self.network.apply(
            "ContributionLedger", "BatchCommitted",
            batch_id=ledger.batches, run_id=RUN, root=root, count=len(batch), units=units,
            price_per_unit=10**12, terms=1, committed_at=chain.time,
        )  # fmt: skip

    def _row(
        self, submission: Submission, root: Hash32, position: int, received_at: int
    ) -> dict[str, Any]:
        ticket = self.ticket(submission, received_at + 60)
        return {
            "sequence": self.stored + len(self.rows) + 1,
            "file_hash": submission.file_hash,
            "worker": submission.worker,
            "step": submission.step,
            "index": submission.index,
            "units": submission.units,
            "leaf": submission.leaf(),
            "submission": submission.to_json(),
            "signature": bytes(65),
            "ticket": ticket.to_json(),
            "ticket_signature": bytes(65),
            "received_at": received_at,
            "size_bytes": 120_000,
            "batch_root": root,
            "position": position,
        }

    def ticket(self, submission: Submission, deadline: int) -> Ticket:
        """Return the ticket that a submission fills."""
        checkpoint = self.network.run.checkpoints[submission.policy_version]
        return Ticket(
            run_id=RUN, worker=submission.worker, step=submission.step, index=submission.index,
            policy_version=submission.policy_version, policy_root=checkpoint.manifest_root,
            beacon=checkpoint.beacon, deadline=deadline,
        )  # fmt: skip

    def _post(self, batch: list[tuple[Submission, Verdict, Reason]]) -> None:
        batch_id, workers = self.network.chain.ledger.batches, self.network.view.workers
        records = [
            OutcomeRecord(
                workers[s.worker].worker_id, s.step, s.index, s.policy_version, s.file_hash,
                s.rollouts, s.units if verdict is Verdict.ACCEPTED else 0, verdict, reason,
            )
            for s, verdict, reason in batch
        ]  # fmt: skip
        packed = b"".join(record.to_bytes() for record in records)
        signers = (3, 5, 6)[batch_id % 3]
        self.network.apply(
            "ContributionLedger", "OutcomesPosted",
            batch_id=batch_id, run_id=RUN, outcomes_root=keccak(packed), records=packed,
            posted_at=self.network.chain.time, signers=signers, signatures=bytes(130),
        )  # fmt: skip
        for position, record in enumerate(records):
            if record.verdict is Verdict.FRAUD:
                self._slash(batch_id, position, record)

    def _slash(self, batch_id: int, position: int, record: OutcomeRecord) -> None:
        charge = charge_of(self.network.view, batch_id, position)
        assert charge is not None
        address = charge.owner
        worker = self.network.run.members[address]
        if worker.status == "Banned":
            return
        amount, subject = worker.active_wei, SlashSubject(RUN, *charge, batch_id, position)
        escrow_id = escrow_of(subject)
        self.network.chain.ledger.escrows[batch_id, position] = escrow_id
        self.network.apply(
            "WorkerRegistry", "WorkerBanned", run_id=RUN, worker=address, escrow_id=escrow_id
        )
        self.network.apply("StakeVault", "Slashed", **slash_of(subject, amount))
        self.network.apply(
            "ContributionLedger", "FraudExecuted",
            batch_id=batch_id, worker=address, escrow_id=escrow_id, position=position,
            leaf=record.leaf(batch_id, position), amount=amount,
        )  # fmt: skip

    def fund_and_pay(self) -> None:
        """Fund the run, and let every third worker claim."""
        self.network.apply("RewardEscrow", "RunFunded", run_id=RUN, amount=500 * 10**18)
        for worker in self.workers[::3]:
            amount = self.random.randrange(10**15, 10**18)
            self.network.apply(
                "RewardEscrow", "RewardClaimed",
                run_id=RUN, worker=worker, slots=2, units=40, amount=amount,
            )  # fmt: skip

    def dispute(self) -> None:
        """Let somebody challenge the first rejection, and win."""
        batch, position = next(
            (batch, position)
            for batch in self.network.view.batches.values()
            for position, record in enumerate(batch.records or ())
            if record.verdict is Verdict.REJECTED
        )
        case = self.network.open_case(batch.batch_id, position, ACCEPTED)
        self.network.close_case(case, ACCEPTED)

    def take(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the batches and rows written since the last call, and forget them."""
        batches, rows, self.batches, self.rows = self.batches, self.rows, [], []
        self.stored += len(rows)
        return batches, rows

    def claims(self) -> Iterator[Submission]:
        """Yield the submissions, in order."""
        for row in self.rows:
            yield Submission.from_json(row["submission"])


async def store(history: History, bench: Bench, *, beats: bool = True, lease: bool = True) -> None:
    """Put a history's rows, files, heartbeats and a lease where the orchestrator keeps them."""
    await store_rows(history, bench.services.database)
    async with bench.services.database.transaction() as asked:
        if beats:
            await asked.ask(*(insert("heartbeats", beat) for beat in _beats(history, bench)))
        if lease:
            await asked.ask(insert("leases", _lease(history, bench)))
    await bench.services.heartbeats.load()
    for digest, body in history.files.items():
        (bench.services.settings.files / f"{digest.hex()}.parquet").write_bytes(body)


async def store_rows(history: History, database: Database) -> None:
    """Write a history's batches and submissions."""
    async with database.transaction() as asked:
        await asked.ask(*(insert("batches", batch) for batch in history.batches))
        for start in range(0, len(history.rows), 10_000):
            rows = history.rows[start : start + 10_000]
            await asked.ask(*(insert("submissions", row) for row in rows))
        if database.is_shared:
            await asked.ask(continue_numbers())


def insert(table: str, row: dict[str, Any]) -> Statement:
    """Write a row; documents are JSON."""
    values = {k: json.dumps(v) if isinstance(v, dict) else v for k, v in row.items()}
    return _insertion(table, tuple(row))(**values)


@cache
def _insertion(table: str, names: tuple[str, ...]) -> Query:
    return Query(
        metadata.tables[table].insert().values({name: bindparam(name) for name in names}).inline()
    )


def _beats(history: History, bench: Bench) -> Iterator[dict[str, Any]]:
    newest = history.network.run.latest_version or 0
    for number, address in enumerate(history.workers):
        worker = history.network.view.workers[address]
        yield {
            "node": worker.node,
            "policy_version": max(0, newest - (number % 7 == 0)),
            "state": HOSTILE[:32]
            if number == 1
            else ("generating", "idle", "fetching")[number % 3],
            "software": HOSTILE[:64] if number == 1 else "muster 0.1.0",
            "seen_at": int(bench.wall()) - number % 50,
            "count": 1,
        }


def _lease(history: History, bench: Bench) -> dict[str, Any]:
    claim = history.last
    assert claim is not None
    deadline = bench.services.chain_clock.now() + 60
    ticket = history.ticket(claim, deadline)
    return {
        "node": history.network.view.workers[claim.worker].node, "worker": claim.worker,
        "step": 1 << 20, "index": 0, "deadline": deadline, "ticket": ticket.to_json(),
        "signature": bytes(65), "is_filled": False,
        "policy_version": ticket.policy_version,
    }  # fmt: skip


def sorting_rollouts(policy_version: int, *, hostile: bool = False) -> list[Rollout]:
    """Two groups of four samples that sort digits, one of them with a hostile completion."""
    rollouts = []
    for group, digits in enumerate(("4,1,3,2", "9,0,7,5")):
        right = ",".join(sorted(digits.split(",")))
        for sample in range(4):
            answer = right if sample % 2 == 0 else digits
            if hostile and sample == 3:
                answer = HOSTILE
            rollouts.append(
                Rollout(
                    problem_id=f"sort-{group}", group=group, sample=sample,
                    sampling_seed=10 * group + sample, target_length=-1,
                    policy_version=policy_version, prompt_tokens=ids(f"sort {digits} => "),
                    completion_tokens=ids(answer + "\n"), proofs=b"",
                    task_reward=1.0 if answer == right else 0.0,
                )
            )  # fmt: skip
    return rollouts


def ids(text: str) -> tuple[int, ...]:
    """Return the token ids of a text."""
    return tuple(ALPHABET.index(character) for character in text)


def save_tokenizer(path: Path) -> Path:
    """Write the tokenizer of ALPHABET."""
    from tokenizers import Tokenizer, decoders, models

    vocabulary = {character: number for number, character in enumerate(ALPHABET)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="0"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(path))
    return path


def training_figures(step: int, steps: int) -> dict[str, float]:
    """Return a trainer's report of a normal step."""
    noise = random.Random(step)
    share = step / steps
    return {
        "reward": 0.34 + 0.58 * (1 - math.exp(-3 * share)) + noise.gauss(0, 0.018),
        "entropy": 1.15 * math.exp(-2.2 * share) + 0.12 + noise.gauss(0, 0.012),
        "grad_norm": 0.42 + 0.25 * share + abs(noise.gauss(0, 0.09)),
        "tokens": 41_000 + noise.randrange(9_000),
        "wall_s": 12 + noise.random() * 3,
        "wait_s": 3 + noise.random(),
        "mfu": 0.35 + 0.02 * noise.random(),
        "age_mean": 0.35 + 0.5 * noise.random(),
        "age_max": float(1 + (noise.random() < 0.3)),
        "mismatch_kl": 0.0004 + 0.0003 * noise.random(),
        "alarm_steps": 0.0,
    }


def evaluation_figures(step: int, steps: int) -> dict[str, float]:
    """Return a trainer's report of an evaluation."""
    value = 0.31 + 0.58 * (1 - math.exp(-3 * step / steps))
    return {
        "eval_reward": value,
        "eval_reward_low": value - 0.045,
        "eval_reward_high": value + 0.04,
        "eval_within_budget": 0.3 + 0.6 * (1 - math.exp(-4 * step / steps)),
    }


async def train(bench: Bench, steps: int) -> None:
    """Report a training run."""
    for step in range(1, steps + 1):
        await bench.services.training.report(step, training_figures(step, steps))
    for step in range(0, steps + 1, 10):
        await bench.services.training.report(step, evaluation_figures(step, steps))


@asynccontextmanager
async def served(bench: Bench) -> AsyncIterator[str]:
    """Serve the bench's application on a free port of the loopback; yields its URL."""
    config = uvicorn.Config(bench.app, port=0, log_config=None, access_log=False, lifespan="off")
    server = uvicorn.Server(config)
    server.capture_signals = _no_signals  # type: ignore[method-assign]
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            bench.services.feed.close()
            server.should_exit = server.force_exit = True
            await task


def _no_signals() -> Any:
    import contextlib

    return contextlib.nullcontext()
