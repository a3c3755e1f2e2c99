"""A worker against silence: its steps and their times, its bonds, and what it never does."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
from worlds.cases import TERMS
from worlds.client_chain import UNREACHABLE, WORKER_ID, FakeOrchestrator, make_account, make_batch
from worlds.client_desk import Desk, run_until
from worlds.client_world import (
    NODE_KEY,
    NOW,
    OTHER_KEY,
    ROOT,
    RUN,
    WORKER,
    as_claimed,
    make_entry,
    make_rollouts,
    make_submission,
    make_ticket,
    sign_submission,
    sign_ticket,
)

from muster.api import BatchContents, BatchEntry, SignedClaim, SlotTaken, SubmissionState
from muster.chain import (
    ZERO_ADDRESS,
    BatchStatus,
    CaseStatus,
    Chain,
    LeasedWork,
    StreamItem,
    WorkerStatus,
)
from muster.client.chain_facts import Times
from muster.client.outage import Outage
from muster.client.sources import named_sources
from muster.client.worker import defence
from muster.client.worker.defence import HONEST
from muster.client.worker.journal import SignedSubmission
from muster.client.worker.loop import WorkerLoop
from muster.client.worker.process import recall_accusations, require_needed
from muster.client.worker.silence import (
    KEEP_S,
    KEPT_S,
    LONGEST_ASK_S,
    PATIENCE_S,
    RETRY_S,
    Judged,
    SilenceDuty,
    SilenceStep,
    find_batch,
    next_step,
)
from muster.protocol.eip712 import address_of
from muster.protocol.encoding import file_hash, keccak
from muster.protocol.errors import (
    ApiError,
    ChainUnreachable,
    ConfigError,
    ContractRevert,
    EngineError,
    MusterError,
    PolicyUnavailable,
    StorageError,
)
from muster.protocol.ids import Address, Hash32, PolicyVersion, RunId, to_address
from muster.protocol.jury import summons_of
from muster.protocol.messages import (
    COMMIT_GRACE_S,
    OutcomeRecord,
    Reason,
    Submission,
    Ticket,
    Verdict,
)
from muster.protocol.rollouts import Rollout

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


# What is next


@pytest.mark.parametrize(
    ("batch", "case", "at", "is_refused", "expected"),
    [
        (None, None, TICKET.deadline + PATIENCE_S - 1, False, None),
        (None, None, TICKET.deadline + PATIENCE_S, False, SilenceStep.SUBMIT),
        (None, None, TICKET.deadline + COMMIT_GRACE_S - 1, False, SilenceStep.SUBMIT),
        (None, None, TICKET.deadline + COMMIT_GRACE_S, False, None),
        (None, None, NOW, True, SilenceStep.SUBMIT),
        (None, None, TICKET.deadline + COMMIT_GRACE_S, True, None),
        (committed(), None, DUE_AT - 1, True, None),
        (committed(), None, DUE_AT, False, SilenceStep.SPLIT),
        (committed(status=BatchStatus.JUDGED), None, DUE_AT, False, None),
        (
            committed(status=BatchStatus.WITHHELD, posted_at=NOW),
            None,
            NOW,
            False,
            SilenceStep.SPLIT,
        ),
        (committed(), None, VOID_AT - 1, False, SilenceStep.SPLIT),
        (committed(), None, VOID_AT, False, None),
        (committed(voided_tx="0x"), None, DUE_AT, False, None),
        (own(), None, DUE_AT - 1, False, None),
        (own(), None, DUE_AT, False, SilenceStep.SUMMON),
        (own(), summons(), DUE_AT + 6, False, None),
        (own(), summons(closed=True), VOID_AT - 1, False, None),
        (own(), summons(closed=True), VOID_AT, False, SilenceStep.VOID),
        (own(), None, VOID_AT, False, SilenceStep.VOID),
        (own(status=BatchStatus.JUDGED), None, VOID_AT, False, None),
    ],
)
def test_next_step_follows_from_the_chain_and_its_clock(
    batch: Any, case: Any, at: int, is_refused: bool, expected: SilenceStep | None
) -> None:
    assert next_step(SIGNED, batch, case, at, TIMES, is_refused=is_refused) is expected


def test_batch_of_another_root_does_not_hold_the_work() -> None:
    batch = committed()
    view: Any = SimpleNamespace(batches={3: batch})
    proven: Any = SimpleNamespace(name=batch.name)
    assert find_batch(view, None, proven) is batch
    assert find_batch(view, own(), proven).batch_id == 4  # type: ignore[union-attr]
    view.batches[3] = replace(batch, root=keccak(b"after a reorganisation"))
    assert find_batch(view, None, proven) is None


def test_chain_is_told_of_as_many_sources_as_it_takes_and_of_none_that_nobody_asks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    urls = [f"http://relay{i}.example" for i in range(20)]
    unasked = ["http://long.example" + "a" * 120, "http://room.example/path"]
    assert named_sources([*unasked, *urls, *urls]) == urls[:16]
    assert [record.__dict__["url"] for record in caplog.records] == [u[:128] for u in unasked]


# The duty


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

    async def _send(self, what: str, args: Any) -> Any:
        if self.refusal:
            raise self.refusal
        self.sent.append((what, args))
        return SimpleNamespace(tx_hash="0xab")

    async def submit_direct(self, *args: Any) -> Any:
        return await self._send("submit", args)

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
        self.duty = self.loop.silence = SilenceDuty(
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


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Silenced]:
    opened = Silenced(tmp_path)
    yield opened
    opened.close()


LATE = TICKET.deadline + PATIENCE_S


async def test_swallowed_work_is_submitted_with_ticket_signatures_bond_and_sources(
    desk: Silenced,
) -> None:
    desk.sign()
    assert await desk.at(LATE - 1) == []
    assert await desk.at(LATE) == ["submit"]
    [(_, (work, sources))] = desk.chain.sent
    assert (work.submission, work.ticket) == (SIGNED.submission, TICKET)
    assert work.node_signature == sign_submission(SIGNED.submission)
    assert work.ticket_signature == SIGNED.ticket_signature
    assert sources == ["http://relay.example"]
    assert desk.chain.allowed == BOND


async def test_work_that_is_committed_is_not_submitted_again_and_its_proof_is_kept(
    desk: Silenced, caplog: pytest.LogCaptureFixture
) -> None:
    signed = desk.sign()
    batch = desk.commit()
    assert await desk.at(NOW) == []
    assert not caplog.records
    proven = desk.journal.proven(signed)
    assert proven is not None
    assert (proven.name, proven.proof) == (batch.name, (OTHER.leaf(),))
    desk.asked.batches.clear()
    assert await desk.at(LATE) == []


@pytest.mark.parametrize(
    "shown",
    [(OTHER, OTHER), (SIGNED.submission, OTHER, OTHER), (OTHER, SIGNED.submission)],
    ids=["without it", "longer", "in another order"],
)
async def test_batch_that_is_not_the_one_on_chain_proves_nothing(
    desk: Silenced, shown: Any, caplog: pytest.LogCaptureFixture
) -> None:
    signed = desk.sign()
    desk.commit(*shown)
    await desk.at(NOW)
    assert desk.journal.proven(signed) is None
    assert [r for r in caplog.records if "not on chain" in r.getMessage()]
    assert await desk.at(LATE) == ["submit"]


async def test_work_in_a_batch_of_fewer_units_than_it_holds_is_submitted_at_once(
    desk: Silenced, caplog: pytest.LogCaptureFixture
) -> None:
    desk.sign()
    desk.commit(units=49)
    assert await desk.at(NOW) == ["submit"]
    [said] = [r for r in caplog.records if "fewer units" in r.getMessage()]
    assert (vars(said)["declared"], vars(said)["holds"]) == (49, 50)


async def test_orchestrator_is_asked_after_each_batch_and_ever_less_often(desk: Silenced) -> None:
    desk.sign()
    desk.asked.fail("state", UNREACHABLE)
    asked = []
    for second in range(120):
        desk.chain.time_s, desk.seconds = NOW, float(second)
        if second == 100:
            desk.view.batches[2] = make_batch(2, [OTHER])
        before = desk.asked.calls["state"]
        await desk.duty.serve()
        if desk.asked.calls["state"] > before:
            asked.append(second)
    assert asked == [0, 2, 6, 14, 30, 62, 100, 102, 106, 114]


async def test_orchestrator_that_hangs_does_not_make_own_work_late(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(_name: Any) -> SubmissionState:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr("muster.client.worker.silence.LOOK_UP_S", 0.01)
    desk.asked.submission_state = hang  # type: ignore[method-assign]
    desk.sign()
    assert await desk.at(LATE) == ["submit"]


async def test_batches_of_other_runs_are_no_cause_to_ask(desk: Silenced) -> None:
    desk.sign()
    await desk.duty.serve()
    desk.view.batches[2] = replace(make_batch(2, [OTHER]), run_id=RUN + 1)
    await desk.duty.serve()
    assert desk.asked.calls["state"] == 1


class Unsearched(dict[int, Any]):
    """The many batches of a busy chain: iterating over all of them fails."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("all batches were looked at")

    values = items = keys = __reversed__ = __iter__  # type: ignore[assignment]


async def test_a_look_does_not_search_all_batches_of_the_chain(desk: Silenced) -> None:
    batch = own()
    desk.sign()
    indexed: Any = SimpleNamespace(**vars(desk.view))
    indexed.batches = Unsearched({4: batch})
    indexed.own_work = {(RUN, WORKER): {batch.root: batch}}
    indexed.newest_batch = {RUN: 4}
    desk.duty.context = replace(desk.duty.context, view=indexed)
    assert await desk.at(DUE_AT) == ["summon"]
    await desk.duty.fill_rooms()
    assert not desk.duty.is_done()
    assert desk.duty.bonds() == []
    with pytest.raises(AssertionError, match="all batches"):
        list(indexed.batches.values())


async def test_without_a_bond_nothing_is_sent_and_it_is_said_once(
    desk: Silenced, caplog: pytest.LogCaptureFixture
) -> None:
    desk.sign()
    desk.chain.tokens = BOND - 1
    for second in range(3):
        assert await desk.at(LATE + second) == []
    [said] = [r for r in caplog.records if r.levelname == "WARNING"]
    assert "the bond is 10 tokens" in vars(said)["error"]
    assert "muster worker submit-direct" in vars(said)["hint"]
    assert desk.chain.allowed == 0


@pytest.mark.parametrize("change", [{"paused": True}, {"closed_at": NOW}])
async def test_run_that_takes_nothing_is_not_asked(desk: Silenced, change: Any) -> None:
    desk.sign()
    vars(desk.view.runs[RUN]).update(change)
    assert await desk.at(LATE) == []


async def test_unjudged_work_is_taken_out_and_judges_are_called(desk: Silenced) -> None:
    desk.sign()
    batch = desk.commit()
    assert await desk.at(DUE_AT - 1) == []
    assert await desk.at(DUE_AT) == ["split"]
    header, work, position, proof, _ = desk.chain.sent[-1][1]
    assert (header, position, list(proof)) == (batch.header(), 0, [OTHER.leaf()])
    assert work.submission == SIGNED.submission
    desk.view.batches[4] = own(split_from=3)
    assert await desk.at(DUE_AT + 1) == ["summon"]
    desk.view.cases[summons_of(4)] = summons()
    assert await desk.at(DUE_AT + 10) == []


async def test_bond_is_not_put_up_where_nobody_could_judge(desk: Silenced) -> None:
    desk.sign()
    desk.commit()
    await desk.at(NOW)
    desk.view.jurors = lambda: []
    assert await desk.at(DUE_AT) == []
    assert desk.chain.allowed == 0
    desk.view.jurors = lambda: [JUROR]
    assert await desk.at(DUE_AT + 6) == ["split"]


async def test_case_that_nobody_closes_is_settled_and_the_bond_comes_back_once(
    desk: Silenced,
) -> None:
    desk.sign()
    desk.view.batches[4] = own()
    desk.view.cases[summons_of(4)] = summons()
    assert await desk.at(DUE_AT + 5 + SETTLED_S - 1) == []
    assert await desk.at(DUE_AT + 5 + SETTLED_S) == ["settle"]
    desk.view.cases[summons_of(4)] = summons(closed=True)
    assert not desk.duty.is_done()
    assert await desk.at(VOID_AT) == ["void"]
    desk.view.batches[4] = own(voided_tx="0x")
    desk.chain.bonds[4] = NODE
    assert await desk.at(VOID_AT + 1) == ["return"]
    assert await desk.at(VOID_AT + 20) == []
    assert desk.duty.is_done()
    assert not desk.journal.unfinished()


async def test_bond_of_judged_work_comes_back(desk: Silenced) -> None:
    record = as_claimed(SIGNED.submission, WORKER_ID)
    desk.view.batches[4] = own(status=BatchStatus.JUDGED, records=[record])
    desk.chain.bonds[4] = NODE
    assert not desk.duty.is_done()
    assert await desk.at(NOW) == ["return"]
    assert desk.duty.is_done()


async def test_refusal_that_says_it_is_done_is_no_warning(
    desk: Silenced, caplog: pytest.LogCaptureFixture
) -> None:
    desk.sign()
    desk.chain.refusal = ContractRevert("LedgerSlotUsed", ())
    await desk.at(LATE)
    assert not caplog.records
    desk.chain.refusal = ContractRevert("LedgerInvalidTicket", ())
    await desk.at(LATE + 6)
    assert [r.getMessage() for r in caplog.records] == ["submit directly was refused"]


# Rooms


async def test_rooms_are_offered_the_work_until_they_take_it(desk: Silenced) -> None:
    desk.sign()
    await desk.duty.fill_rooms()
    assert not desk.rooms.given
    desk.view.batches[4] = own()
    desk.rooms.refusals = 2
    for _ in range(6):
        await desk.duty.fill_rooms()
        desk.seconds += 60
    data, entry = desk.rooms.given[0]
    assert len(desk.rooms.given) == 3
    assert data == DATA
    assert entry.signature == sign_submission(SIGNED.submission)
    assert (entry.ticket, entry.ticket_signature) == (TICKET, SIGNED.ticket_signature)


async def test_a_room_that_refuses_for_long_is_offered_the_work_once_a_minute(
    desk: Silenced,
) -> None:
    desk.sign()
    desk.view.batches[4] = own()
    desk.rooms.refusals = 1000
    started = desk.seconds
    while desk.seconds < started + 600:
        await desk.duty.fill_rooms()
        desk.seconds += 1
    assert len(desk.rooms.given) == 4 + 9  # at 0, 5, 15, 35, 75 s, then each minute
    desk.rooms.refusals = 0
    for _ in range(120):
        desk.seconds += 1
        await desk.duty.fill_rooms()
    assert len(desk.rooms.given) == 14
    desk.rooms.refusals = 1000
    desk.view.batches[4] = own(status=BatchStatus.JUDGED)
    desk.duty._offers.clear()
    await desk.duty.fill_rooms()
    assert len(desk.rooms.given) == 14


async def test_a_room_that_may_have_lost_the_work_is_offered_it_again(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch
) -> None:
    signed = desk.sign()
    desk.view.batches[4] = own()
    await desk.duty.fill_rooms()
    desk.seconds += KEPT_S - 1
    await desk.duty.fill_rooms()
    assert len(desk.rooms.given) == 1
    desk.seconds += 1
    await desk.duty.fill_rooms()
    assert len(desk.rooms.given) == 2
    # The work is called fraud: what the chain did not name for a while may be gone at once.
    note_claims(monkeypatch)
    fraud = make_batch(4, [SIGNED.submission], [make_record(Verdict.FRAUD, Reason.NONE)])
    await desk.duty.claim(Judged(signed, fraud, 0), HONEST)
    desk.view.batches[4] = fraud
    await desk.duty.fill_rooms()
    assert len(desk.rooms.given) == 3


async def test_a_room_that_has_the_work_is_not_offered_it_again(desk: Silenced) -> None:
    taken = {desk.rooms.urls[0]}
    assert await desk.duty.deposit(desk.sign(), taken)
    assert not desk.rooms.given
    taken.clear()
    assert await desk.duty.deposit(desk.sign(), taken)
    assert len(desk.rooms.given) == 1
    assert taken == {desk.rooms.urls[0]}


async def test_work_waits_for_a_room_and_says_once_that_there_is_none(
    desk: Silenced, caplog: pytest.LogCaptureFixture
) -> None:
    desk.sign()
    desk.view.batches[4] = own()
    urls, desk.rooms.urls, desk.rooms.unasked = desk.rooms.urls, (), ("http://10.0.0.3:8700",)
    for _ in range(3):
        await desk.duty.fill_rooms()
        desk.seconds += 60
    said = [r for r in caplog.records if "no relay can be given" in r.getMessage()]
    assert [r.levelname for r in said if r.levelno >= logging.WARNING] == ["WARNING"]
    assert vars(said[0])["relays"] == desk.rooms.unasked
    assert not desk.rooms.given
    desk.rooms.urls, desk.rooms.unasked = urls, ()
    await desk.duty.fill_rooms()
    assert len(desk.rooms.given) == 1


async def test_work_of_a_run_without_relays_waits_for_no_room(
    desk: Silenced, caplog: pytest.LogCaptureFixture
) -> None:
    desk.rooms.urls = ()
    assert await desk.duty.deposit(desk.sign(), set())
    assert not [r for r in caplog.records if "no relay can be given" in r.getMessage()]


# A slot that has another submission of the same node

ANOTHER = replace(SIGNED.submission, units=19)


def taken(held: Submission = ANOTHER, key: bytes = NODE_KEY) -> SlotTaken:
    """Return the refusal that shows another submission for the slot."""
    signature = sign_submission(held, key)
    return SlotTaken("it is taken", SignedClaim(submission=held, signature=signature))


def honest_work() -> Submission:
    return make_submission(TICKET, make_rollouts(TICKET))


TAKEN = taken()


@pytest.mark.parametrize(
    ("refusal", "is_dropped"),
    [
        (TAKEN, True),
        (ApiError("it is taken", status=409, code="slot_taken"), False),
        (taken(replace(ANOTHER, index=1)), False),
        (taken(replace(ANOTHER, run_id=RunId(RUN + 1))), False),
        (taken(key=OTHER_KEY), False),
        (taken(honest_work()), False),
        (ApiError("no", status=409, code="late"), False),
    ],
    ids=[
        "slot_taken", "slot_taken without proof", "another slot", "another run",
        "another node's", "the same", "late",
    ],
)  # fmt: skip
async def test_only_work_whose_slot_has_no_other_submission_is_submitted_directly(
    desk: Silenced, refusal: ApiError, is_dropped: bool
) -> None:
    desk.orchestrator.tickets.append(TICKET)
    desk.orchestrator.fail("submit", refusal)
    await desk.loop.work_once()
    assert await desk.at(NOW) == ([] if is_dropped else ["submit"])
    assert await desk.at(LATE) == ([] if is_dropped else ["submit"])
    assert bool(desk.journal.unfinished()) is not is_dropped
    assert bool(list(desk.journal._files.iterdir())) is not is_dropped
    assert (desk.loop.context.held.fault is not None) is is_dropped


async def test_node_that_signed_outside_its_journal_takes_no_tickets_and_ends(
    desk: Silenced,
) -> None:
    desk.orchestrator.tickets.append(TICKET)
    desk.orchestrator.fail("submit", TAKEN)
    await desk.loop.work_once()
    other = make_ticket(index=1)
    await desk.loop.submit(other, [])
    assert desk.journal.signed(other) is None
    await desk.loop.work_once()
    assert desk.orchestrator.calls["lease"] == 1
    with pytest.raises(ConfigError, match="signed two submissions for step 4, index 0") as caught:
        await desk.loop._round()
    assert "stop any other process" in (caught.value.hint or "")


ELSEWHERE = as_claimed(OTHER, WORKER_ID)
"""An accepted outcome of the node in a slot that it signed without this journal."""


ITS_ENTRY = make_entry(TICKET, OTHER)


class Counted(list[Any]):
    """Counts the items that are read."""

    count = 0

    def __iter__(self) -> Iterator[Any]:
        Counted.count += len(self)
        return super().__iter__()

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        Counted.count += len(found)
        return found


def post(
    desk: Silenced, number: int, *records: OutcomeRecord, entry: BatchEntry = ITS_ENTRY
) -> None:
    """Post the outcomes of a batch that the orchestrator shows."""
    desk.asked.batches[number] = [entry]
    desk.view.batches[number] = make_batch(number, [OTHER] * len(records), Counted(records))
    accepted = [each for each in records if each.verdict is Verdict.ACCEPTED]
    stream = desk.view.runs[RUN].stream
    stream.extend(StreamItem(len(stream), number, 0, record) for record in accepted)


async def test_outcomes_are_compared_with_the_journal_once(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Counted, "count", 0)
    desk.view.runs[RUN].stream = Counted()
    desk.sign()
    post(desk, 8, *[replace(ELSEWHERE, worker_id=WORKER_ID + 1)] * 9)
    for later in range(3):
        assert await desk.at(LATE + later) == ["submit"]
    assert Counted.count == 9
    post(desk, 9, ELSEWHERE)
    assert await desk.at(LATE + 3) == []
    assert await desk.at(LATE + 4) == []
    assert Counted.count == 10


async def test_outcomes_of_a_view_that_was_rewound_are_compared_again(desk: Silenced) -> None:
    desk.sign()
    run = desk.view.runs[RUN]
    post(desk, 9, ELSEWHERE)
    assert await desk.at(LATE) == []
    run.stream = []
    post(desk, 9, replace(ELSEWHERE, worker_id=WORKER_ID + 1))
    assert await desk.at(LATE) == ["submit"]
    run.stream = []
    post(desk, 9, ELSEWHERE)
    assert await desk.at(LATE) == []


@pytest.mark.parametrize(
    ("changes", "is_held_back"),
    [
        ({}, True),
        ({"verdict": Verdict.REJECTED, "reason": Reason.WRONG_REWARD}, False),
        ({"worker_id": WORKER_ID + 1}, False),
        ({"index": TICKET.index}, False),
    ],
    ids=["lacking", "not accepted", "another worker's", "known"],
)
async def test_nothing_is_submitted_directly_when_the_journal_lacks_accepted_work(
    desk: Silenced, changes: dict[str, Any], is_held_back: bool, caplog: pytest.LogCaptureFixture
) -> None:
    desk.sign()
    post(desk, 9, replace(ELSEWHERE, **changes))
    assert await desk.at(LATE) == ([] if is_held_back else ["submit"])
    assert await desk.at(LATE + 10) == ([] if is_held_back else ["submit"])
    said = [r for r in caplog.records if "lacks accepted work" in r.getMessage()]
    assert len([r for r in said if r.levelno == logging.WARNING]) == is_held_back


@pytest.mark.parametrize(
    ("entry", "is_held_back"),
    [
        (ITS_ENTRY, True),
        (make_entry(TICKET, OTHER, OTHER_KEY), False),
        (make_entry(TICKET, SIGNED.submission), False),
        (None, False),
    ],
    ids=["signed", "signed by another", "another slot", "shown by nobody"],
)
@pytest.mark.parametrize("shown_by", ["orchestrator", "relay"])
async def test_accepted_work_holds_back_only_where_the_nodes_signature_is_shown(
    desk: Silenced,
    entry: BatchEntry | None,
    is_held_back: bool,
    shown_by: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    desk.sign()
    post(desk, 9, ELSEWHERE)
    del desk.asked.batches[9]
    if entry is not None and shown_by == "orchestrator":
        desk.asked.batches[9] = [entry]
    elif entry is not None:
        desk.rooms.shown = [entry]
    assert await desk.at(LATE) == ([] if is_held_back else ["submit"])
    unshown = [r for r in caplog.messages if "nobody shows this node's signature" in r]
    assert bool(unshown) is not is_held_back


async def test_signature_that_is_shown_later_holds_back_then(desk: Silenced) -> None:
    desk.sign()
    post(desk, 9, ELSEWHERE)
    del desk.asked.batches[9]
    assert await desk.at(LATE) == ["submit"]
    desk.asked.batches[9] = [ITS_ENTRY]
    desk.seconds += LONGEST_ASK_S
    assert await desk.at(LATE) == []


@pytest.mark.parametrize(
    ("submission", "key", "is_held_back"),
    [
        (OTHER, NODE_KEY, True),
        (OTHER, OTHER_KEY, False),
        (replace(OTHER, index=8), NODE_KEY, False),
        (replace(OTHER, worker=address_of(OTHER_KEY)), OTHER_KEY, False),
    ],
    ids=["the node's", "signed by another", "another slot", "a stranger's"],
)
async def test_work_on_chain_holds_back_only_where_it_is_the_nodes_work_of_that_slot(
    desk: Silenced, submission: Submission, key: bytes, is_held_back: bool
) -> None:
    desk.sign()
    post(desk, 9, ELSEWHERE)
    del desk.asked.batches[9]
    work = LeasedWork(submission, sign_submission(submission, key), TICKET, b"")
    desk.view.batches[9] = replace(desk.view.batches[9], work=work)
    assert await desk.at(LATE) == ([] if is_held_back else ["submit"])


async def test_stranger_s_work_on_chain_hides_no_signature_that_the_orchestrator_shows(
    desk: Silenced,
) -> None:
    desk.sign()
    post(desk, 9, ELSEWHERE)
    work = LeasedWork(OTHER, sign_submission(OTHER, OTHER_KEY), TICKET, b"")
    desk.view.batches[9] = replace(desk.view.batches[9], work=work)
    assert await desk.at(LATE) == []


async def test_sources_that_hang_do_not_make_own_work_late(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(_batch_id: int) -> BatchContents:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr("muster.client.worker.silence.LOOK_UP_S", 0.01)
    desk.asked.batch = hang  # type: ignore[method-assign]
    desk.sign()
    post(desk, 9, ELSEWHERE)
    assert await desk.at(LATE) == ["submit"]


async def test_work_that_another_node_signed_before_is_not_lacking(desk: Silenced) -> None:
    desk.sign()
    post(desk, 9, ELSEWHERE, entry=make_entry(TICKET, OTHER, OTHER_KEY))
    member, other = desk.view.member(RUN, WORKER), address_of(OTHER_KEY)
    member.node_at = lambda _block: other
    assert await desk.at(LATE) == ["submit"]
    member.node = other
    assert await desk.at(LATE + 1) == []


async def test_work_whose_slot_has_other_work_on_chain_is_not_submitted(desk: Silenced) -> None:
    desk.sign()
    first = replace(SIGNED.submission, file_hash=file_hash(b"another file"))
    batch = replace(own(), work=LeasedWork(first, b"", TICKET, b""))
    desk.view.batches[4] = replace(batch, root=first.leaf())
    assert await desk.at(LATE) == []


async def test_dropped_work_stays_dropped_after_a_restart(tmp_path: Path) -> None:
    first = Silenced(tmp_path)
    first.sign()
    first.orchestrator.fail("submit", TAKEN)
    with pytest.raises(ConfigError, match="signed two submissions"):
        await first.loop._round()
    first.close()
    second = Silenced(tmp_path)
    second.orchestrator.tickets.append(TICKET)
    await second.loop._round()
    assert second.orchestrator.calls["submit"] == 0
    assert await second.at(LATE) == []
    second.close()


async def test_work_that_is_dropped_while_its_bond_is_approved_is_not_submitted(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch
) -> None:
    signed = desk.sign()

    async def approve(_spender: Address, _wei: int) -> None:
        desk.journal.finish(signed, TAKEN.code)

    monkeypatch.setattr(desk.chain, "approve", approve)
    assert await desk.at(LATE) == []


async def test_work_that_is_dropped_while_others_are_submitted_is_not_begun(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    desk.sign()
    ticket, data = make_ticket(index=1), b"another file"
    submission = make_submission(ticket, [], file_hash=file_hash(data), rollouts=1, units=20)
    second = desk.journal.record(ticket, sign_ticket(ticket), submission, data)
    submit = desk.chain.submit_direct

    async def drop(*args: Any) -> Any:
        desk.journal.finish(second, TAKEN.code)
        return await submit(*args)

    monkeypatch.setattr(desk.chain, "submit_direct", drop)
    assert await desk.at(LATE) == ["submit"]
    assert not [r for r in caplog.records if "has to wait" in r.getMessage()]


# Files of accepted work

FINAL_AT = NOW + 60 + TIMES.challenge_window_s + KEEP_S
"""Time from which the outcome of a batch of `make_batch` is final for certain."""


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


async def test_file_of_accepted_work_is_kept_until_nothing_can_challenge_it(desk: Silenced) -> None:
    signed = await accept(desk)
    await desk.at(FINAL_AT - 1)
    assert desk.journal.data(signed) == DATA
    assert desk.duty.is_done()
    await desk.at(FINAL_AT)
    assert desk.journal.data(signed) is None
    assert not desk.duty.accepted


async def test_file_of_accepted_work_is_kept_while_a_case_about_it_is_open(desk: Silenced) -> None:
    signed = await accept(desk)
    name = as_claimed(SIGNED.submission, WORKER_ID).leaf(3, 0)
    desk.view.cases[name] = summons(case_id=name, is_summons=False, claims=[])
    await desk.at(FINAL_AT)
    assert desk.journal.data(signed) == DATA
    desk.view.cases[name].closed = True
    await desk.at(FINAL_AT)
    assert desk.journal.data(signed) is None


async def test_file_of_accepted_work_is_kept_after_a_reorganisation_took_the_outcome_back(
    desk: Silenced,
) -> None:
    signed = await accept(desk)
    desk.view.batches[3] = committed()
    await desk.at(FINAL_AT)
    del desk.view.batches[3]
    await desk.at(FINAL_AT)
    assert desk.journal.data(signed) == DATA


async def test_files_of_accepted_work_are_deleted_by_a_restarted_worker(tmp_path: Path) -> None:
    first = Silenced(tmp_path)
    signed = await accept(first)
    first.close()
    second = Silenced(tmp_path)
    second.view.batches[3] = first.view.batches[3]
    second.loop._posted.append(3)
    await second.loop.settle()
    assert second.journal.data(signed) == DATA
    await second.at(FINAL_AT)
    assert second.journal.data(signed) is None
    second.close()


@pytest.mark.parametrize(("is_own_file", "accused"), [(True, 1), (False, 0)])
async def test_accepted_work_that_is_called_fraud_after_a_reorganisation_is_disputed(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch, is_own_file: bool, accused: int
) -> None:
    contested: list[Any] = []

    async def contest(_silence: SilenceDuty, judged: Any) -> None:
        contested.append(judged.signed.submission)

    monkeypatch.setattr(desk.loop.defence, "_contest", contest)
    await accept(desk)
    record = replace(as_claimed(SIGNED.submission, WORKER_ID), verdict=Verdict.FRAUD)
    if not is_own_file:
        record = replace(record, file_hash=keccak(b"another"))
    await desk.loop.on_change([desk.post(5, record)])
    await desk.loop.settle()
    assert contested == [SIGNED.submission] * accused
    assert len(desk.journal.accepted()) == 1 - accused


# The loop's part


async def test_refused_upload_is_submitted_at_once_or_given_up_when_it_is_too_late(
    desk: Silenced,
) -> None:
    desk.orchestrator.tickets.extend([TICKET, make_ticket(index=1)])
    refusal = ApiError("we do not like you", status=403, code="go_away")
    desk.orchestrator.fail("submit", refusal, refusal)
    await desk.loop.work_once()
    assert await desk.at(NOW) == ["submit"]
    assert len(desk.journal.unfinished()) == 1
    await desk.at(TICKET.deadline + COMMIT_GRACE_S)
    assert not desk.journal.unfinished()


@pytest.mark.parametrize(
    ("place", "tries"),
    [("nowhere", 3), ("committed directly", 1), ("proven", 1), ("finished", 1), ("reorganised", 3)],
)
async def test_upload_that_nobody_answers_ends_once_the_work_is_on_chain(
    desk: Silenced, place: str, tries: int
) -> None:
    signed = desk.sign()
    desk.orchestrator.fail("submit", *[UNREACHABLE] * 2)
    match place:
        case "committed directly":
            desk.view.batches[4] = own()
        case "proven" | "reorganised":
            desk.commit()
            await desk.duty.look_up(signed)
            if place == "reorganised":
                desk.view.batches[3] = committed(root=keccak(b"another"))
        case "finished":
            desk.journal.finish(signed, "VOID")
    await desk.loop._upload(signed, DATA)
    assert desk.orchestrator.calls["submit"] == tries


async def test_upload_that_is_refused_for_ever_ends_once_the_orchestrators_batch_holds_the_work(
    desk: Silenced,
) -> None:
    signed = desk.sign()

    async def refuse(*_: Any) -> Any:
        # The orchestrator shows state and batch truthfully.
        desk.commit()
        await desk.duty.look_up(signed)
        raise UNREACHABLE

    desk.orchestrator.submit = refuse  # type: ignore[method-assign]
    await run_until(desk.loop, lambda: desk.orchestrator.calls["lease"] > 0)
    assert desk.journal.unfinished()


@pytest.mark.parametrize("stuck", ["the upload", "the fetch"])
async def test_fraud_is_disputed_while_the_work_is_stuck(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch, stuck: str
) -> None:
    made = note_claims(monkeypatch)
    submission, fetch = await fill(desk, TICKET), desk.fetcher.fetch

    async def hang(*_: Any) -> Any:
        await desk.accuse(submission)
        await asyncio.Event().wait()

    async def deliver(run_id: RunId, version: PolicyVersion, root: Hash32) -> Path:
        return await (hang() if version == newer.policy_version else fetch(run_id, version, root))

    if stuck == "the upload":
        desk.orchestrator.tickets.append(make_ticket(index=1))
        desk.orchestrator.submit = hang  # type: ignore[method-assign]
    else:
        newer = newer_policy(desk, index=1)
        desk.orchestrator.tickets.append(newer)
        desk.fetcher.fetch = deliver  # type: ignore[method-assign]
    await run_until(desk.loop, lambda: not desk.duty.accused and bool(made))
    assert [each.position for each in made] == [0]
    assert desk.loop.refused == 1


async def test_outcomes_that_are_noted_by_two_tasks_at_once_count_once(desk: Silenced) -> None:
    desk.sign()
    await desk.loop.on_change([desk.post(5, make_record())])
    await asyncio.gather(desk.loop.settle(), desk.loop.settle())
    assert (desk.loop.accepted, desk.loop.units) == (1, 20)


async def test_slot_reused_in_the_orchestrators_batch_is_not_the_outcome_of_own_work(
    desk: Silenced,
) -> None:
    desk.sign()
    desk.view.batches[4] = own()
    reused = make_record(Verdict.REJECTED, Reason.SLOT_REUSED)
    await desk.loop.on_change([desk.post(5, reused)])
    await desk.loop.settle()
    assert len(desk.journal.unfinished()) == 1
    desk.view.batches.pop(4)
    await desk.loop.on_change([desk.post(6, reused)])
    await desk.loop.settle()
    assert not desk.journal.unfinished()


@pytest.mark.parametrize("reason", [Reason.LATE, Reason.SLOT_REUSED])
async def test_later_copy_that_is_not_accepted_leaves_the_batch_that_holds_the_work_to_judges(
    desk: Silenced, reason: Reason
) -> None:
    desk.sign()
    desk.commit()
    assert await desk.at(NOW) == []
    await desk.loop.on_change([desk.post(4, make_record(Verdict.REJECTED, reason))])
    await desk.loop.settle()
    assert await desk.at(DUE_AT) == ["split"]


async def test_work_whose_batch_is_void_ends_with_the_outcome_of_a_copy(desk: Silenced) -> None:
    desk.sign()
    batch = desk.commit()
    assert await desk.at(NOW) == []
    desk.view.batches[3] = replace(batch, voided_tx="0x")
    await desk.loop.on_change([desk.post(4, make_record(Verdict.REJECTED, Reason.LATE))])
    await desk.loop.settle()
    assert not desk.journal.unfinished()


async def test_work_of_a_misdeclared_batch_ends_with_the_outcome_of_a_copy(desk: Silenced) -> None:
    desk.sign()
    desk.commit()
    assert await desk.at(NOW) == []
    await desk.loop.on_change([desk.post(3, make_record(Verdict.REJECTED, MISDECLARED))])
    await desk.loop.settle()
    assert len(desk.journal.unfinished()) == 1
    await desk.loop.on_change([desk.post(4, make_record(Verdict.REJECTED, Reason.LATE))])
    await desk.loop.settle()
    assert not desk.journal.unfinished()


async def test_work_of_a_misdeclared_batch_is_submitted_directly_and_its_own_outcome_counts(
    desk: Silenced,
) -> None:
    desk.sign()
    await desk.loop.on_change([desk.post(3, make_record(Verdict.REJECTED, MISDECLARED))])
    await desk.loop.settle()
    assert len(desk.journal.unfinished()) == 1
    assert await desk.at(NOW) == ["submit"]
    desk.view.batches[4] = own()
    await desk.loop.on_change([desk.post(4, make_record(Verdict.ACCEPTED, Reason.NONE))])
    await desk.loop.settle()
    assert not desk.journal.unfinished()


async def test_work_of_a_misdeclared_batch_is_given_up_when_it_is_too_late(desk: Silenced) -> None:
    desk.sign()
    await desk.loop.on_change([desk.post(3, make_record(Verdict.REJECTED, MISDECLARED))])
    await desk.loop.settle()
    assert await desk.at(TICKET.deadline + COMMIT_GRACE_S) == []
    assert not desk.journal.unfinished()


class Forger(WorkerLoop):
    """Claims rewards that it did not earn."""

    async def generate(self, ticket: Any) -> list[Rollout]:
        return [replace(row, task_reward=1.0) for row in await super().generate(ticket)]


@pytest.mark.parametrize(("loop_class", "claims"), [(WorkerLoop, 1), (Forger, 0)])
async def test_honest_work_that_is_called_fraud_is_claimed_and_fraud_is_not(
    tmp_path: Path, loop_class: type[WorkerLoop], claims: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    async def claim(_chain: Any, proof: Any, entry: BatchEntry, ruling: Any, *rest: Any, **_: Any):  # type: ignore[no-untyped-def]
        made.append((proof, entry, ruling, rest))

    monkeypatch.setattr("muster.client.worker.silence.claim", claim)
    desk = Silenced(tmp_path, loop_class)
    submission, data = await desk.call_fraud(Reason.WRONG_REWARD)
    await desk.loop.settle()
    await desk.duty.fill_rooms()
    assert len(made) == len(desk.rooms.given) == claims
    for proof, entry, ruling, _ in made:
        assert (proof.position, entry.submission) == (0, submission)
        assert str(ruling) == "accepted"
        assert desk.rooms.given[0][0] == data
        assert desk.chain.allowed == BOND
    assert not desk.journal.unfinished()
    desk.close()


def note_claims(monkeypatch: pytest.MonkeyPatch, *failures: Exception) -> list[Any]:
    """Return the proofs of claims to come; the first claims fail."""
    made: list[Any] = []
    left = list(failures)

    async def claim(_chain: Any, proof: Any, *_rest: Any, **_: Any) -> None:
        if left:
            raise left.pop()
        made.append(proof)

    monkeypatch.setattr("muster.client.worker.silence.claim", claim)
    return made


def retry_at_once(desk: Silenced) -> None:
    desk.loop.defence.outage = Outage("a claim", first_s=0.0, longest_s=0.0)


FOREIGN = keccak(b"the file of nobody")
"""The hash of a file that the worker never made."""


async def judge(desk: Silenced, *outcomes: tuple[Submission, OutcomeRecord]) -> None:
    """Post the outcomes of batch 3: each of a submission, with the record that is shown for it."""
    submissions, records = zip(*outcomes, strict=True)
    desk.view.batches[3] = make_batch(3, list(submissions), list(records))
    await desk.loop.on_change([SimpleNamespace(name="OutcomesPosted", args={"batch_id": 3})])  # type: ignore[list-item]
    await desk.loop.settle()


@pytest.mark.parametrize(
    ("junk", "claimed"),
    [
        ({"verdict": Verdict.REJECTED, "file_hash": FOREIGN}, [1]),
        ({"verdict": Verdict.REJECTED}, [1]),
        ({"verdict": Verdict.ACCEPTED}, [1]),
        ({"verdict": Verdict.FRAUD, "file_hash": FOREIGN}, [1]),
        ({"verdict": Verdict.FRAUD}, [0, 1]),
    ],
    ids=["another file", "rejected", "accepted", "fraud of another file", "fraud twice"],
)
async def test_fraud_is_disputed_whatever_else_is_recorded_for_its_slot(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch, junk: dict[str, Any], claimed: list[int]
) -> None:
    made = note_claims(monkeypatch)
    submission = await fill(desk, TICKET)
    honest = as_claimed(submission, WORKER_ID)
    fraud = replace(honest, verdict=Verdict.FRAUD, reason=Reason.WRONG_REWARD)
    await judge(desk, (OTHER, replace(honest, **junk)), (submission, fraud))
    assert [proof.position for proof in made] == claimed
    assert desk.journal.open_versions(RUN) == {TICKET.policy_version}
    await desk.duty.fill_rooms()
    assert desk.rooms.given
    assert not desk.journal.unfinished()
    assert not desk.journal.open_versions(RUN)


@pytest.mark.parametrize(("changes", "steps"), [({"file_hash": FOREIGN}, ["submit"]), ({}, [])])
async def test_record_of_another_file_is_no_outcome_of_the_work(
    desk: Silenced, changes: dict[str, Any], steps: list[str]
) -> None:
    desk.sign()
    await desk.loop.on_change([desk.post(5, make_record(Verdict.REJECTED, **changes))])
    await desk.loop.settle()
    assert await desk.at(LATE) == steps


@pytest.mark.parametrize("is_answered", [True, False])
async def test_restarted_worker_disputes_what_it_has_not_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_answered: bool
) -> None:
    made = note_claims(monkeypatch, *[] if is_answered else [ChainUnreachable("no answer")])
    first = Silenced(tmp_path)
    submission = await fill(first, TICKET)
    honest = as_claimed(submission, WORKER_ID)
    rejected = replace(honest, verdict=Verdict.REJECTED)
    await judge(first, (OTHER, rejected), (submission, replace(honest, verdict=Verdict.FRAUD)))
    await first.duty.fill_rooms()
    first.close()
    second = Silenced(tmp_path)
    second.view.batches = first.view.batches
    second.loop._posted.append(3)
    await second.loop.settle()
    assert [proof.position for proof in made] == [1]
    assert not second.duty.accused
    second.close()


@pytest.mark.parametrize("fault", ["committed late", "slot used before"])
async def test_fault_of_the_committer_is_claimed_in_the_place_of_fraud(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    demanded: list[str] = []

    async def claim(_chain: Any, _proof: Any, _work: Any, ruling: Any, *_: Any, **__: Any) -> None:
        demanded.append(str(ruling))

    monkeypatch.setattr("muster.client.worker.silence.claim", claim)
    submission = await fill(desk, TICKET)
    await desk.accuse(submission, reason=Reason.WRONG_REWARD)
    if fault == "committed late":
        late = TICKET.deadline + COMMIT_GRACE_S + 1
        desk.view.batches[3] = replace(desk.view.batches[3], committed_at=late)
    else:
        junk = replace(as_claimed(submission, WORKER_ID), file_hash=FOREIGN)
        desk.view.batches[2] = make_batch(2, [OTHER], [replace(junk, verdict=Verdict.REJECTED)])
    await desk.loop.settle()
    reason = "late" if fault == "committed late" else "slot_reused"
    assert demanded == [f"rejected for {reason}"]


async def test_honest_work_that_cannot_be_claimed_says_how_to_do_it_by_hand(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = note_claims(monkeypatch)
    retry_at_once(desk)
    desk.chain.tokens = BOND - 1
    await desk.call_fraud()
    for _ in range(2):
        await desk.loop.settle()
    [said] = [r for r in caplog.records if "could not be claimed" in r.getMessage()]
    assert "the bond is 10 tokens" in vars(said)["error"]
    assert "muster dispute open 3:0" in vars(said)["hint"]
    assert not desk.rooms.given
    assert not desk.duty.is_done()
    desk.chain.tokens = BOND
    monkeypatch.setattr(desk.loop, "_recheck", None)  # what was found once is not computed again
    for _ in range(2):
        await desk.loop.settle()
    assert len(made) == 1


async def test_refused_claim_is_tried_again_until_the_window_closes(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = note_claims(monkeypatch, ContractRevert("CourtMayNotClaim", ()))
    retry_at_once(desk)
    await desk.call_fraud()
    await desk.loop.settle()
    assert desk.duty.accused
    [judged] = desk.duty.accused.values()
    desk.now_s = desk.duty.closes_at(judged.batch)
    await desk.loop.settle()
    assert not made
    assert not desk.duty.accused
    assert "a verdict of fraud can be disputed no more" in caplog.messages


async def test_claim_joins_an_open_case_after_the_window_and_no_closed_one(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = note_claims(monkeypatch)
    first, second = await fill(desk, TICKET), await fill(desk, make_ticket(index=1))
    await desk.accuse(first, second)
    batch = desk.view.batches[3]
    for position, record in enumerate(batch.records):
        case = SimpleNamespace(closed=bool(position), claims=[])
        desk.view.cases[record.leaf(3, position)] = case
    desk.now_s = desk.duty.closes_at(batch)
    await desk.loop.settle()
    assert [proof.position for proof in made] == [0]


def break_reads(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Make the next reads of files fail."""
    read, left = Path.read_bytes, iter(range(times))

    def fail(path: Path) -> bytes:
        if next(left, None) is not None:
            raise OSError(errno.EIO, "Input/output error")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", fail)


async def test_disk_that_cannot_read_only_delays_the_claim_for_honest_work(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = note_claims(monkeypatch)
    retry_at_once(desk)
    await desk.call_fraud()
    break_reads(monkeypatch, 1)
    await desk.loop.settle()
    assert not made
    assert desk.duty.accused
    await desk.loop.settle()
    assert len(made) == 1


async def test_accused_work_without_a_file_is_not_claimed_and_said_to_be_lost(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = note_claims(monkeypatch)
    await desk.call_fraud()
    for path in desk.journal._files.iterdir():
        path.unlink()
    await desk.loop.settle()
    assert not made
    assert not desk.duty.accused
    assert "the file of work that was called fraud is lost" in caplog.messages


async def test_rooms_never_count_as_having_a_file_that_cannot_be_read(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    signed = desk.sign()
    with monkeypatch.context() as patch:
        break_reads(patch, 1)
        with pytest.raises(StorageError, match="cannot read"):
            await desk.duty.deposit(signed, set())
    assert await desk.duty.deposit(signed, set())
    next(desk.journal._files.iterdir()).unlink()
    assert not await desk.duty.deposit(signed, set())
    assert [r for r in caplog.messages if "the file is lost" in r]


async def fill(desk: Silenced, ticket: Ticket) -> Submission:
    """Let the worker fill a ticket; return its submission."""
    desk.orchestrator.tickets.append(ticket)
    await desk.loop.work_once()
    return desk.orchestrator.uploads[-1][0]


def newer_policy(desk: Silenced, **changes: Any) -> Ticket:
    """Publish another policy; return a ticket for it."""
    version, beacon = PolicyVersion(4), keccak(b"block 50")
    desk.view.runs[RUN].checkpoints[version] = SimpleNamespace(
        manifest_root=ROOT, beacon=beacon, block_number=50
    )
    return make_ticket(policy_version=version, beacon=beacon, **changes)


def banned() -> None:
    raise MusterError("the worker is banned")


@pytest.mark.parametrize("failure", [ChainUnreachable("no answer"), EngineError("no memory")])
async def test_an_outage_only_delays_the_claim_for_honest_work(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    made = note_claims(monkeypatch, failure, failure)
    retry_at_once(desk)
    await desk.call_fraud()
    await desk.loop.settle()
    assert not made
    assert desk.journal.unfinished()
    assert not desk.duty.is_done()
    # Work that was judged is never submitted again.
    assert await desk.at(LATE) == []
    # The verdict may also have banned the worker: it stays until the claim is made.
    monkeypatch.setattr(desk.loop, "require_good_standing", banned)
    leaving = asyncio.ensure_future(desk.loop._round())
    for _ in range(2):
        await desk.loop.settle()
    assert len(made) == 1
    # Nor does it end before the rooms have the file, whether or not it sees its case.
    await asyncio.sleep(3 * desk.loop.context.poll_s)
    assert not leaving.done()
    await desk.duty.fill_rooms()
    with pytest.raises(MusterError, match="banned"):
        await leaving
    assert not desk.journal.unfinished()
    assert desk.duty.is_done()
    assert desk.loop.refused == 1


async def test_a_claims_file_is_offered_to_a_room_that_refuses_it_for_long(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_claims(monkeypatch)
    desk.rooms.refusals = 1000
    _, data = await desk.call_fraud()
    await desk.loop.settle()
    assert not desk.duty.accused
    for _ in range(600):
        await desk.duty.fill_rooms()
        desk.seconds += 1
    assert desk.journal.unfinished()  # a restart would claim it, and offer it, again
    assert await desk.at(LATE) == []
    desk.rooms.refusals = 0
    desk.seconds += 60
    await desk.duty.fill_rooms()
    assert desk.rooms.given[-1][0] == data
    assert not desk.journal.unfinished()
    assert not desk.duty.claimed


async def test_a_claims_file_is_offered_until_its_case_is_closed(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_claims(monkeypatch)
    desk.rooms.refusals = 1000
    await desk.call_fraud()
    await desk.loop.settle()
    await desk.duty.fill_rooms()
    [judged] = desk.duty.claimed.values()
    case: Any = SimpleNamespace(closed=True)
    desk.view.cases[judged.batch.records[0].leaf(3, 0)] = case  # type: ignore[index]
    await desk.duty.fill_rooms()
    assert len(desk.rooms.given) == 1
    assert not desk.journal.unfinished()


@pytest.mark.parametrize("others", ["show no policy", "are silent"])
async def test_accusation_that_cannot_be_checked_does_not_delay_the_claim_about_another(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch, others: str
) -> None:
    made = note_claims(monkeypatch)
    first = await fill(desk, TICKET)
    second = await fill(desk, newer_policy(desk, index=1))
    monkeypatch.setattr(defence, "CONTEST_S", 0.0)

    async def fetch(*_: Any) -> Any:
        monkeypatch.setattr(defence, "CONTEST_S", 300.0)
        if others == "are silent":
            await asyncio.Event().wait()
        raise PolicyUnavailable("no relay shows it")

    desk.fetcher.fetch = fetch  # type: ignore[method-assign]
    await desk.accuse(first, second)
    async with asyncio.timeout(60):
        await desk.loop.settle()
    assert [each.position for each in made] == [1]
    [(case_id, judged)] = desk.duty.accused.items()
    assert desk.journal.unfinished()[judged.signed.slot].submission == first
    assert set(desk.loop.defence.waits_until) == {case_id}
    desk.duty.accused.clear()
    await desk.loop.settle()
    assert not desk.loop.defence.waits_until


class Slow:
    """Fetches policies, in longer than one try of a dispute waits for them."""

    def __init__(self) -> None:
        self.begun = self.ended = 0
        self.arrives = asyncio.Event()
        self.failure: Exception | None = None

    async def fetch(self, _run_id: RunId, version: PolicyVersion, _root: Hash32) -> Path:
        self.begun += 1
        try:
            await self.arrives.wait()
        finally:
            self.ended += 1
        if self.failure:
            raise self.failure
        return Path(f"v{version}")


async def wait_for_a_slow_policy(desk: Silenced, monkeypatch: pytest.MonkeyPatch) -> Slow:
    """Have work called fraud whose policy has to be fetched again, and disputed three times."""
    retry_at_once(desk)
    monkeypatch.setattr(defence, "CONTEST_S", 0.0)
    await desk.call_fraud()
    desk.loop.station.loaded = None
    slow = Slow()
    desk.fetcher.fetch = slow.fetch  # type: ignore[method-assign]
    for _ in range(3):
        await desk.loop.settle()
    assert (slow.begun, slow.ended) == (1, 0)
    monkeypatch.setattr(defence, "CONTEST_S", 300.0)
    return slow


@pytest.mark.parametrize("failure", [None, PolicyUnavailable("no relay shows it")])
async def test_fetch_for_a_dispute_goes_on_between_its_tries(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch, failure: Exception | None
) -> None:
    made = note_claims(monkeypatch)
    slow = await wait_for_a_slow_policy(desk, monkeypatch)
    slow.failure = failure
    slow.arrives.set()
    await desk.loop.settle()
    assert len(made) == (0 if failure else 1)
    slow.failure = None
    await desk.loop.settle()
    assert len(made) == 1


async def test_fetch_for_a_dispute_ends_with_it(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = await wait_for_a_slow_policy(desk, monkeypatch)
    [judged] = desk.duty.accused.values()
    desk.now_s = desk.duty.closes_at(judged.batch)
    for _ in range(2):
        await desk.loop.settle()
    assert not desk.duty.accused
    assert slow.ended == 1


async def test_fetch_for_a_dispute_ends_with_the_worker(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = await wait_for_a_slow_policy(desk, monkeypatch)
    await run_until(desk.loop, lambda: desk.orchestrator.calls["lease"] > 1)
    assert slow.ended == slow.begun


async def test_banned_worker_stays_until_its_bonds_are_back(desk: Silenced) -> None:
    record = replace(as_claimed(SIGNED.submission, WORKER_ID), verdict=Verdict.FRAUD)
    desk.view.batches[4] = own(status=BatchStatus.JUDGED, records=[record])
    desk.chain.bonds[4] = NODE
    desk.view.workers[WORKER] = make_account(status=WorkerStatus.BANNED)
    leaving = asyncio.ensure_future(desk.loop._round())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not leaving.done()
    await desk.at(NOW)
    with pytest.raises(MusterError, match="banned"):
        await leaving
    assert desk.chain.names == ["return"]


INACTIVE = [WorkerStatus.JAILED, WorkerStatus.EXITING, WorkerStatus.BANNED]


@pytest.mark.parametrize("status", INACTIVE)
async def test_worker_that_may_not_work_stays_until_its_work_is_judged(
    desk: Silenced, status: WorkerStatus
) -> None:
    desk.sign()
    desk.view.workers[WORKER] = make_account(status=status)
    leaving = asyncio.ensure_future(desk.loop._round())
    await asyncio.sleep(5 * desk.loop.context.poll_s)
    assert not leaving.done()
    await desk.loop.on_change([desk.post(5, make_record())])
    await desk.loop.settle()
    with pytest.raises(MusterError, match=str(status.value).lower()):
        await leaving


async def test_worker_that_may_not_work_does_not_wait_for_work_that_nobody_can_judge(
    desk: Silenced,
) -> None:
    desk.sign()
    desk.view.workers[WORKER] = make_account(status=WorkerStatus.EXITING)
    desk.chain.time_s = TICKET.deadline + COMMIT_GRACE_S + TIMES.longest_s
    with pytest.raises(MusterError, match="exiting"):
        await desk.loop._round()


async def test_node_that_signed_twice_stays_until_its_other_work_is_judged(desk: Silenced) -> None:
    desk.sign()
    desk.loop.context.held.fault = ConfigError("it signed two submissions")
    leaving = asyncio.ensure_future(desk.loop._round())
    await asyncio.sleep(5 * desk.loop.context.poll_s)
    assert not leaving.done()
    assert await desk.at(LATE) == []
    await desk.loop.on_change([desk.post(5, make_record())])
    await desk.loop.settle()
    with pytest.raises(ConfigError, match="signed two"):
        await leaving
    assert "submit" not in desk.chain.names


async def test_node_that_signed_twice_still_splits_off_and_summons(desk: Silenced) -> None:
    desk.sign()
    desk.loop.context.held.fault = ConfigError("it signed two submissions")
    desk.commit()
    assert await desk.at(DUE_AT) == ["split"]
    desk.view.batches[4] = own()
    desk.view.own_work[(RUN, WORKER)] = {SIGNED.submission.leaf(): own()}
    assert await desk.at(DUE_AT) == ["summon"]


async def test_work_is_not_submitted_when_another_is_dropped_while_its_bond_is_approved(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.sign()

    async def approve(_spender: Address, _wei: int) -> None:
        desk.loop.context.held.fault = ConfigError("it signed two submissions")

    monkeypatch.setattr(desk.chain, "approve", approve)
    assert await desk.at(LATE) == []
    assert await desk.at(LATE + 10) == []


async def test_worker_that_may_work_again_meanwhile_goes_on(desk: Silenced) -> None:
    desk.sign()
    desk.view.workers[WORKER] = make_account(status=WorkerStatus.BANNED)
    going_on = asyncio.ensure_future(desk.loop._round())
    async with asyncio.timeout(20):
        while desk.loop.state != "idle":
            await asyncio.sleep(0)
        assert not desk.orchestrator.calls["lease"]
        desk.view.workers[WORKER] = make_account()
        await going_on
    assert desk.orchestrator.calls["lease"] == 1
    assert desk.journal.unfinished()


@pytest.mark.parametrize("status", INACTIVE)
def test_inactive_worker_starts_only_for_work_without_an_outcome(
    desk: Silenced, status: WorkerStatus
) -> None:
    desk.view.workers[WORKER] = make_account(status=status)
    starts = partial(require_needed, desk.journal, desk.view, RUN, WORKER, NODE)
    with pytest.raises(MusterError, match="may not work"):
        starts()
    signed = desk.sign()
    starts()
    desk.view.workers[WORKER] = make_account(status=status, node=JUROR)
    desk.view.workers[WORKER].status = WorkerStatus.ACTIVE
    with pytest.raises(ConfigError, match="is served by node"):
        starts()
    desk.view.workers[WORKER] = make_account(status=status)
    desk.journal.finish(signed, "REJECTED")
    with pytest.raises(MusterError, match="may not work"):
        starts()


@pytest.mark.parametrize(
    ("record", "of_batch", "is_answered", "is_accused"),
    [
        (make_record(Verdict.FRAUD), {}, False, True),
        (make_record(Verdict.FRAUD), {}, True, False),
        (make_record(Verdict.REJECTED), {}, False, False),
        (make_record(Verdict.FRAUD, file_hash=FOREIGN), {}, False, False),
        (make_record(Verdict.FRAUD, worker_id=WORKER_ID + 1), {}, False, False),
        (make_record(Verdict.FRAUD), {"run_id": RUN + 1}, False, False),
        (make_record(Verdict.FRAUD), {"records": None}, False, False),
    ],
    ids=[
        "accused", "answered", "rejected", "another file", "another worker", "another run",
        "not judged",
    ],
)  # fmt: skip
async def test_inactive_worker_starts_for_accepted_work_that_was_called_fraud_later(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record: OutcomeRecord,
    of_batch: dict[str, Any],
    is_answered: bool,
    is_accused: bool,
) -> None:
    monkeypatch.setattr("muster.client.worker.journal.KEPT_REFUSED", 0)
    first = Silenced(tmp_path)
    signed = await accept(first)
    batch = replace(make_batch(5, [SIGNED.submission], [record]), **of_batch)
    if is_answered:
        first.journal.answer(signed, Judged(signed, batch, 0).case_id)
    first.close()
    desk = Silenced(tmp_path)
    desk.view.batches |= {5: batch, 3: first.view.batches[3]}
    desk.view.workers[WORKER] = make_account(status=WorkerStatus.EXITING)
    recall_accusations(desk.journal, desk.view, RUN, WORKER)
    refuses = contextlib.nullcontext() if is_accused else pytest.raises(MusterError, match="exit")
    with refuses:
        require_needed(desk.journal, desk.view, RUN, WORKER, NODE)
    # Files and policies that a dispute needs are not deleted before the loop sees the record.
    assert desk.journal.open_versions(RUN) == ({TICKET.policy_version} if is_accused else set())
    if is_accused:
        other = make_ticket(index=1)
        work = make_submission(other, [], file_hash=file_hash(b"b"), rollouts=1, units=20)
        refused = desk.journal.record(other, sign_ticket(other), work, b"b")
        desk.journal.finish(refused, "REJECTED")
        assert desk.journal.data(signed) == DATA
    desk.close()


@pytest.mark.parametrize(
    ("claimant", "claims"), [(NODE, 0), (WORKER, 0), (JUROR, 1)], ids=["node", "worker", "stranger"]
)
async def test_claim_that_it_made_is_not_made_again_and_a_strangers_claim_changes_nothing(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch, claimant: Address, claims: int
) -> None:
    sent = note_claims(monkeypatch)
    signed = desk.sign()
    batch = make_batch(3, [SIGNED.submission], [make_record(Verdict.FRAUD)])
    judged = Judged(signed, batch, 0)
    made = SimpleNamespace(
        claimant=claimant, ruling=HONEST.number, submission=SIGNED.submission, proof=()
    )
    desk.view.cases[judged.case_id] = SimpleNamespace(claims=[made], closed=False)
    await desk.duty.claim(judged, HONEST)
    assert len(sent) == claims
    assert desk.chain.allowed == claims * BOND
    await desk.duty.fill_rooms()
    assert len(desk.rooms.given) == 1


SHOWN = SimpleNamespace(
    claimant=JUROR, ruling=HONEST.number, submission=SIGNED.submission, proof=(OTHER.leaf(),)
)


@pytest.mark.parametrize(
    ("changes", "proof"),
    [
        ({}, (OTHER.leaf(),)),
        ({"proof": ()}, ()),
        ({"proof": (SIGNED.submission.leaf(),)}, ()),
        ({"submission": replace(SIGNED.submission, units=21)}, ()),
    ],
    ids=["proven", "without a proof", "with a false proof", "other work"],
)
async def test_proof_of_hidden_work_is_taken_from_a_strangers_claim(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], proof: Any
) -> None:
    sent: list[Any] = []

    async def claim(_chain: Any, _proof: Any, work: Any, *_: Any, **__: Any) -> None:
        sent.append(work)

    monkeypatch.setattr("muster.client.worker.silence.claim", claim)
    signed = desk.sign()
    records = [make_record(Verdict.FRAUD), as_claimed(OTHER, WORKER_ID)]
    judged = Judged(signed, committed(records=records), 0)
    made = SimpleNamespace(**vars(SHOWN) | changes)
    desk.view.cases[judged.case_id] = SimpleNamespace(claims=[made])
    await desk.duty.claim(judged, HONEST)
    [work] = sent
    assert (work.submission, tuple(work.proof)) == (SIGNED.submission, proof)
