"""A worker's loop with its duty against silence, among fakes, and work that it signed."""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from muster.api import BatchContents, BatchEntry, SubmissionState
from muster.chain import ZERO_ADDRESS, CaseStatus, Chain, LeasedWork
from muster.client.chain_facts import Times
from muster.client.worker.journal import SignedSubmission
from muster.client.worker.loop import WorkerLoop
from muster.client.worker.silence import PATIENCE_S, RETRY_S, SilenceDuty
from muster.protocol.eip712 import address_of
from muster.protocol.encoding import file_hash, keccak
from muster.protocol.errors import ApiError, ContractRevert, MusterError
from muster.protocol.ids import Address, Hash32, to_address
from muster.protocol.jury import summons_of
from muster.protocol.messages import OutcomeRecord, Reason, Submission, Ticket, Verdict
from worlds.cases import TERMS
from worlds.client_chain import WORKER_ID, FakeOrchestrator, make_batch
from worlds.client_desk import Desk
from worlds.client_world import (
    NODE_KEY,
    NOW,
    RUN,
    as_claimed,
    make_entry,
    make_submission,
    make_ticket,
    sign_ticket,
)

MISDECLARED = Reason.BATCH_MISDECLARED
BOND = TERMS.bond
TIMES = Times(outcome_deadline_s=800, appeal_s=400, challenge_window_s=300, court=TERMS)
NODE = address_of(NODE_KEY)
JUROR = to_address(keccak(b"juror")[:20])
TICKET = make_ticket()
DATA = b"a file"
SIGNED = SignedSubmission(
    TICKET,
    make_submission(TICKET, [], file_hash=file_hash(DATA), rollouts=1, units=20),
    sign_ticket(TICKET),
)
OTHER = replace(SIGNED.submission, index=7, units=30)
"""Other work, of another slot."""


def make_record(
    verdict: Verdict = Verdict.ACCEPTED, reason: Reason = Reason.NONE, **changes: Any
) -> OutcomeRecord:
    """Return an outcome of the signed work."""
    honest = as_claimed(SIGNED.submission, WORKER_ID)
    return replace(honest, verdict=verdict, reason=reason, **changes)


DUE_AT = NOW + 30 + TIMES.outcome_deadline_s
VOID_AT = DUE_AT + TIMES.appeal_s
SETTLED_S = TIMES.court.jury_time


def committed(**changes: Any) -> Any:
    """The orchestrator's batch of two submissions; the first is the worker's."""
    return replace(make_batch(3, [SIGNED.submission, OTHER]), **changes)


def own(**changes: Any) -> Any:
    """A batch of one that the worker committed."""
    work = LeasedWork(SIGNED.submission, b"", TICKET, b"")
    return replace(make_batch(4, [SIGNED.submission]), work=work, **changes)


def summons(**changes: Any) -> Any:
    claim = SimpleNamespace(claimant=NODE, ruling=0, submission=SIGNED.submission)
    values = {
        "case_id": summons_of(4), "number": 1, "run_id": RUN, "opened_at": DUE_AT + 5,
        "closed": False, "claims": [claim],
        "batch_id": 4, "position": 0, "is_summons": True, "status": CaseStatus.OPEN,
    }  # fmt: skip
    return SimpleNamespace(**values | changes)


@dataclass
class Contracts:
    """Records a worker's calls; and a clock."""

    sent: list[tuple[str, Any]] = field(default_factory=list)
    tokens: int = BOND
    allowed: int = 0
    bonds: dict[int, Address] = field(default_factory=dict)
    time_s: int = NOW
    refusal: ContractRevert | None = None
    account: Address = NODE
    me: Address = NODE
    labels: set[str] = field(default_factory=set)
    splits: dict[int, int] = field(default_factory=dict)
    """Units that others took out of the orchestrator's batch, by block; the view has read 50."""
    once_approved: Callable[[], None] = lambda: None
    """What happens until an approval is mined."""

    def __post_init__(self) -> None:
        self.deployment = SimpleNamespace(contracts={"DisputeCourt": JUROR})
        self.ledger = self.court = self.token = self

    def once(self, label: str) -> Contracts:
        self.labels.add(label)
        return self

    async def latest_block(self) -> Any:
        return SimpleNamespace(number=self.time_s, timestamp=self.time_s)

    async def read(self, _contract: str, _function: str, args: list[int]) -> list[Address]:
        return [self.bonds.get(args[0], ZERO_ADDRESS)]

    allow = Chain.allow

    async def balance_of(self, _account: Address) -> int:
        return self.tokens

    async def allowance(self, _owner: Address, _spender: Address) -> int:
        return self.allowed

    async def approve(self, _spender: Address, wei: int) -> None:
        self.allowed = wei
        self.once_approved()

    async def _send(self, what: str, args: Any) -> Any:
        if self.refusal:
            raise self.refusal
        self.sent.append((what, args))
        return SimpleNamespace(tx_hash="0xab")

    async def submit_direct(self, *args: Any) -> Any:
        return await self._send("submit", args)

    async def units_split_off(self, batch_id: int, *, after: int) -> int:
        assert batch_id == 3
        return sum(units for block, units in self.splits.items() if block > after)

    async def split_off(self, *args: Any) -> Any:
        return await self._send("split", args)

    async def summon(self, *args: Any) -> Any:
        return await self._send("summon", args)

    async def void_batch(self, *args: Any) -> Any:
        return await self._send("void", args)

    async def return_bond(self, *args: Any) -> Any:
        self.bonds.clear()
        return await self._send("return", args)

    async def settle_summoned(self, *args: Any) -> Any:
        return await self._send("settle", args)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.sent]


@dataclass
class Rooms:
    """A relay's room that refuses the first `refusals` deposits."""

    refusals: int = 0
    given: list[tuple[bytes, BatchEntry]] = field(default_factory=list)
    urls: tuple[str, ...] = ("http://relay.example",)
    unasked: tuple[str, ...] = ()
    shown: list[BatchEntry] = field(default_factory=list)

    async def work(self, leaf: Hash32, accepts: Callable[[BatchEntry], bool]) -> BatchEntry:
        for entry in self.shown:
            if entry.submission.leaf() == leaf and accepts(entry):
                return entry
        raise ApiError("no source has it", status=404, code="not_found")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def deposit(
        self, data: bytes, entry: BatchEntry, *, without: Collection[str]
    ) -> dict[str, str]:
        if not set(self.urls) - set(without):
            return {}
        self.given.append((data, entry))
        self.refusals -= 1
        return {self.urls[0]: "answered 404 (not_named)"} if self.refusals >= 0 else {}


class Asked(FakeOrchestrator):
    """Returns the states of submissions."""

    state = SubmissionState(state="received")

    async def submission_state(self, _name: Any) -> SubmissionState:
        self._called("state")
        return self.state

    async def batch(self, batch_id: int) -> BatchContents:
        if batch_id not in self.batches:
            raise ApiError("no such batch", status=404, code="batch_unknown")
        return await super().batch(batch_id)


class Silenced(Desk):
    """A worker whose loop has a duty against silence."""

    def __init__(self, folder: Path, loop_class: type[WorkerLoop] = WorkerLoop) -> None:
        super().__init__(folder, loop_class)
        self.seconds = 0.0
        self.chain = Contracts()
        self.rooms = Rooms()
        self.asked = Asked()
        self.view.jurors = lambda: [JUROR]
        self.view.runs[RUN].owner = ZERO_ADDRESS
        self.duty = self.loop.held.silence = SilenceDuty(
            replace(self.loop.context, api=self.asked),  # type: ignore[arg-type]
            self.chain,  # type: ignore[arg-type]
            self.open_rooms,  # type: ignore[arg-type]
            TIMES,
            lambda: ["http://relay.example"],
            clock=lambda: self.seconds,
        )

    async def open_rooms(self) -> Rooms:
        return self.rooms

    def sign(self) -> SignedSubmission:
        return self.journal.record(TICKET, SIGNED.ticket_signature, SIGNED.submission, DATA)

    async def at(self, time_s: int) -> list[str]:
        """Serve at a time of the chain; return the calls made."""
        before = len(self.chain.sent)
        self.chain.time_s = time_s
        self.seconds += RETRY_S
        await self.duty.serve()
        return self.chain.names[before:]

    async def call_fraud(self, reason: Reason = Reason.NONE) -> tuple[Submission, bytes]:
        """Let the worker fill a ticket, and post a verdict of fraud; return what it uploaded."""
        self.orchestrator.tickets.append(TICKET)
        await self.loop.work_once()
        [(submission, _, data)] = self.orchestrator.uploads
        await self.accuse(submission, reason=reason)
        return submission, data

    async def accuse(self, *submissions: Submission, reason: Reason = Reason.NONE) -> None:
        """Post verdicts of fraud on a batch of submissions."""
        honest = [as_claimed(each, WORKER_ID) for each in submissions]
        records = [replace(each, verdict=Verdict.FRAUD, reason=reason) for each in honest]
        self.view.batches[3] = make_batch(3, list(submissions), records)
        event: Any = SimpleNamespace(name="OutcomesPosted", args={"batch_id": 3})
        await self.loop.on_change([event])

    def commit(self, *entries: Any, **changes: Any) -> Any:
        """Let the orchestrator commit and show a batch."""
        batch = committed(**changes)
        self.view.batches[3] = batch
        self.asked.state = SubmissionState(state="committed", batch_id=3, position=0)
        shown = entries or (SIGNED.submission, OTHER)
        self.asked.batches[3] = [make_entry(TICKET, submission) for submission in shown]
        return batch


LATE = TICKET.deadline + PATIENCE_S


async def accept(desk: Silenced) -> SignedSubmission:
    """Have the worker's submission accepted in batch 3."""
    signed = desk.sign()
    desk.view.batches[3] = make_batch(
        3, [SIGNED.submission], [as_claimed(SIGNED.submission, WORKER_ID)]
    )
    event: Any = SimpleNamespace(name="OutcomesPosted", args={"batch_id": 3})
    await desk.loop.on_change([event])
    await desk.loop.settle()
    return signed


def note_claims(monkeypatch: pytest.MonkeyPatch, *failures: Exception) -> list[Any]:
    """Return the proofs of claims to come; the first claims fail."""
    made: list[Any] = []
    left = list(failures)

    async def claim(_chain: Any, proof: Any, *_rest: Any, **_: Any) -> None:
        if left:
            raise left.pop()
        made.append(proof)

    monkeypatch.setattr("muster.client.worker.defence.claim", claim)
    return made


FOREIGN = keccak(b"the file of nobody")
"""The hash of a file that the worker never made."""


async def judge(desk: Silenced, *outcomes: tuple[Submission, OutcomeRecord]) -> None:
    """Post the outcomes of batch 3: each of a submission, with the record that is shown for it."""
    submissions, records = zip(*outcomes, strict=True)
    desk.view.batches[3] = make_batch(3, list(submissions), list(records))
    await desk.loop.on_change([SimpleNamespace(name="OutcomesPosted", args={"batch_id": 3})])  # type: ignore[list-item]
    await desk.loop.settle()


def break_reads(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Make the next reads of files fail."""
    read, left = Path.read_bytes, iter(range(times))

    def fail(path: Path) -> bytes:
        if next(left, None) is not None:
            raise OSError(errno.EIO, "Input/output error")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", fail)


async def fill(desk: Silenced, ticket: Ticket) -> Submission:
    """Let the worker fill a ticket; return its submission."""
    desk.orchestrator.tickets.append(ticket)
    await desk.loop.work_once()
    return desk.orchestrator.uploads[-1][0]


def banned() -> None:
    raise MusterError("the worker is banned")
