"""A validator's transactions when the orchestrator withholds its outcomes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from worlds.client_chain import UNREACHABLE, WORKER_ID, make_batch, make_context, make_view
from worlds.client_world import (
    DOMAIN,
    NOW,
    OTHER_KEY,
    RUN,
    VALIDATOR_KEY,
    as_claimed,
    make_submission,
    make_ticket,
    sign_submission,
)

from muster.chain import BatchStatus, LeasedWork, Offence, Receipt
from muster.client.validator.calls import (
    LAST_POST_AT,
    NEXT_POSTS,
    POST_AT,
    RETRY_S,
    SHOW_AT,
    WITHHELD,
    WITHHELD_AT,
    ShowingDuty,
    Windows,
    doubles_of,
    postable,
    posts_at,
    recent_batches,
    shown_by,
)
from muster.client.validator.records import JudgedBatch, OutcomeJournal
from muster.protocol.eip712 import address_of, digest, recover, sign
from muster.protocol.encoding import keccak
from muster.protocol.errors import ContractRevert
from muster.protocol.ids import Address, Hash32, to_address
from muster.protocol.messages import OutcomeRecord, Outcomes, Reason, Verdict, pack_records

KEYS = [VALIDATOR_KEY, OTHER_KEY, keccak(b"third"), keccak(b"fourth")]
ME, PEER, THIRD, STRANGER = map(address_of, KEYS)
KEY_OF = dict(zip((ME, PEER, THIRD, STRANGER), KEYS, strict=True))
WINDOWS = Windows(outcome_deadline_s=1000, challenge_window_s=400)
SUBMISSION = make_submission(make_ticket(), [], rollouts=1, units=20)
ACCEPTED = as_claimed(SUBMISSION, WORKER_ID)
REJECTED = replace(ACCEPTED, verdict=Verdict.REJECTED, reason=Reason.LATE)
COMMITTED_AT = NOW + 30


def packed(record: OutcomeRecord) -> bytes:
    return pack_records([record])


def signature_of(
    batch: Any, who: Address, records_hash: Hash32, root: Hash32 | None = None
) -> bytes:
    message = Outcomes(batch.batch_id, root or batch.root, records_hash)
    return sign(digest(DOMAIN, message.struct_hash()), KEY_OF[who])


def show(batch: Any, record: OutcomeRecord | None, *who: Address) -> None:
    """Put validators' outcomes on chain; None as record says that the batch is withheld."""
    records = b"" if record is None else packed(record)
    shown = batch.shown.setdefault(keccak(records), {})
    shown |= {each: signature_of(batch, each, keccak(records)) for each in who}
    if record is not None:
        batch.shown_records[keccak(records)] = records


@dataclass
class Contracts:
    """Records a validator's calls; and a clock."""

    time_s: float = COMMITTED_AT
    sent: list[tuple[str, Any]] = field(default_factory=list)
    refusal: ContractRevert | None = None
    coins: int = 1000
    """The validator's coin; a transaction takes 1 of it."""

    def __post_init__(self) -> None:
        self.ledger = self.faults = self.rpc = self

    async def call(self, method: str, *_: str) -> str:
        assert method == "eth_getBalance"
        return hex(self.coins)

    def once(self, _label: str) -> Contracts:
        return self

    async def latest_block(self) -> Any:
        return SimpleNamespace(number=self.time_s, timestamp=self.time_s)

    async def _send(self, what: str, args: Any) -> Receipt:
        if self.refusal:
            raise self.refusal
        self.coins -= 1
        self.sent.append((what, args))
        return Receipt("0x", 1, 1, [], cost_wei=1)

    async def show_outcomes(self, *args: Any) -> Receipt:
        return await self._send("show", args)

    async def post_outcomes(self, *args: Any) -> Receipt:
        return await self._send("post", args)

    async def prove_double_outcome(self, *args: Any) -> None:
        await self._send("prove", args)

    async def prove_misrecord(self, *args: Any) -> None:
        await self._send("misrecord", args)


class Bench:
    """A validator of three, quorum two, with one batch."""

    def __init__(self, folder: Path) -> None:
        self.view = make_view()
        run = self.run = self.view.runs[RUN]
        run.validators = [ME, PEER, THIRD]
        run.seats = {who: 1 << seat for seat, who in enumerate(run.validators)}
        run.terms = [SimpleNamespace(quorum=2)]
        self.view.slashes = []
        self.batch = make_batch(1, [SUBMISSION])
        self.batch.seated = (ME, PEER, THIRD)
        self.view.batches[1] = self.batch
        self.journal = OutcomeJournal(folder)
        self.chain = Contracts()
        self.seconds = 0.0
        self.is_withheld = self.hangs = False
        self.asked = 0
        signed = sign_submission(SUBMISSION)
        self.entries = [SimpleNamespace(submission=SUBMISSION, signature=signed)]
        self.view.worker_by_id = {
            WORKER_ID: SimpleNamespace(address=SUBMISSION.worker),
            WORKER_ID + 1: SimpleNamespace(address=STRANGER),
        }
        context = make_context(
            view=self.view, journal=self.journal, windows=WINDOWS, clock=lambda: self.seconds
        )
        self.duty = ShowingDuty(context, self.chain, self.contents)  # type: ignore[arg-type]

    async def contents(self, _batch: Any) -> list[Any]:
        self.asked += 1
        if self.is_withheld:
            raise UNREACHABLE
        if self.hangs:
            await asyncio.Event().wait()
        return self.entries

    def judge(self, record: OutcomeRecord = ACCEPTED) -> None:
        self.journal.record(JudgedBatch(self.batch.name, (record,)))

    async def at(self, share: float) -> list[str]:
        """Serve at a share of the deadline; return the calls made."""
        before = len(self.chain.sent)
        self.chain.time_s = COMMITTED_AT + share * WINDOWS.outcome_deadline_s
        self.seconds += RETRY_S
        await self.duty.serve()
        return [name for name, _ in self.chain.sent[before:]]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    opened = Bench(tmp_path)
    yield opened
    opened.journal.close()


# Showing


async def test_own_outcomes_are_shown_once_they_should_have_been_posted(bench: Bench) -> None:
    bench.judge()
    assert await bench.at(SHOW_AT - 0.01) == []
    assert await bench.at(SHOW_AT) == ["show"]
    [(_, (header, hashed, records, signature))] = bench.chain.sent
    assert (header, hashed, records) == (
        bench.batch.header(),
        keccak(packed(ACCEPTED)),
        packed(ACCEPTED),
    )
    message = Outcomes(1, bench.batch.root, hashed)
    assert recover(digest(DOMAIN, message.struct_hash()), signature) == ME
    show(bench.batch, ACCEPTED, ME)
    assert await bench.at(SHOW_AT + 0.02) == []


async def test_records_that_somebody_showed_are_not_paid_for_again(bench: Bench) -> None:
    bench.judge()
    show(bench.batch, ACCEPTED, PEER)
    await bench.at(SHOW_AT)
    assert bench.chain.sent[-1][1][2] == b""


@pytest.mark.parametrize(
    "change",
    [{"status": BatchStatus.JUDGED}, {"voided_tx": "0x"}, {"root": keccak(b"another batch")}],
)
async def test_what_is_over_or_another_batch_is_not_shown(bench: Bench, change: Any) -> None:
    bench.judge()
    bench.view.batches[1] = replace(bench.batch, **change)
    assert await bench.at(SHOW_AT) == []


async def test_nothing_is_shown_when_it_is_too_late_or_the_seat_is_gone(bench: Bench) -> None:
    bench.judge()
    assert await bench.at(1.0) == []
    bench.run.validators.remove(ME)
    assert await bench.at(SHOW_AT) == []


async def test_refusals_are_said_once_and_being_late_never(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.judge()
    bench.chain.refusal = ContractRevert("LedgerWrongTime", ())
    await bench.at(SHOW_AT)
    assert not caplog.records
    bench.batch.root = keccak(b"another")
    bench.judge()
    bench.chain.refusal = ContractRevert("LedgerInvalidSigner", ())
    await bench.at(SHOW_AT)
    await bench.at(SHOW_AT + 0.01)
    assert [r.getMessage() for r in caplog.records] == ["showing own outcomes was refused"]


# After a reorganisation


def renumber(bench: Bench) -> None:
    """The registrations came back in another order, the batch with its number and root."""
    first, second = bench.view.worker_by_id.values()
    bench.view.worker_by_id = {WORKER_ID: second, WORKER_ID + 1: first}


@pytest.mark.parametrize("is_renumbered", [False, True])
async def test_records_are_shown_and_posted_unless_their_workers_have_other_numbers(
    bench: Bench, caplog: pytest.LogCaptureFixture, is_renumbered: bool
) -> None:
    bench.judge()
    if is_renumbered:
        renumber(bench)
    assert await bench.at(SHOW_AT) == ([] if is_renumbered else ["show"])
    show(bench.batch, ACCEPTED, ME, PEER)
    assert await bench.at(LAST_POST_AT) == ([] if is_renumbered else ["post"])
    said = [r for r in caplog.records if "neither shown nor posted" in r.getMessage()]
    assert len(said) == is_renumbered


async def test_records_are_posted_only_when_there_is_one_for_each_submission(bench: Bench) -> None:
    bench.entries = bench.entries * 2
    show(bench.batch, ACCEPTED, PEER, THIRD)
    assert await bench.at(LAST_POST_AT) == []
    bench.entries = bench.entries[:1]
    assert await bench.at(LAST_POST_AT) == ["post"]


@pytest.mark.parametrize("hangs", [False, True])
async def test_batch_that_is_hidden_after_it_was_judged_is_shown_and_posted(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    monkeypatch.setattr("muster.client.validator.calls.COMPARE_S", 0.01)
    bench.judge()
    bench.hangs, bench.is_withheld = hangs, not hangs
    assert await bench.at(SHOW_AT) == ["show"]
    show(bench.batch, ACCEPTED, ME, PEER)
    assert await bench.at(LAST_POST_AT) == ["post"]
    # What hangs is not waited for again at once.
    assert bench.asked == (1 if hangs else 2)


async def test_statement_that_a_batch_is_withheld_is_posted_whatever_its_workers_numbers(
    bench: Bench,
) -> None:
    show(bench.batch, None, PEER, THIRD)
    renumber(bench)
    assert await bench.at(LAST_POST_AT) == ["post"]


# The gas budget


def junk(
    bench: Bench, number: int, record: OutcomeRecord = REJECTED, *, is_direct: bool = False
) -> None:
    """Commit a batch that the orchestrator never posts, and judge it."""
    ticket = make_ticket(index=number)
    work = make_submission(ticket, [], units=20)
    batch = make_batch(number, [work])
    if is_direct:
        batch = replace(batch, work=LeasedWork(work, b"", ticket, b""))
    batch.seated, bench.view.batches[number] = (ME, PEER, THIRD), batch
    bench.journal.record(JudgedBatch(batch.name, (record,)))


def shown_batches(bench: Bench) -> list[int]:
    """Return the numbers of the batches that were shown, and note on chain that they were."""
    found = [args[0].batch_id for what, args in bench.chain.sent if what == "show"]
    for number in found:
        batch = bench.view.batches[number]
        show(batch, bench.journal.judged(batch.name).records[0], ME)  # type: ignore[union-attr]
    return found


async def test_junk_takes_a_quarter_of_the_gas_budget_and_what_pays_comes_first(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.chain.coins = 200
    for number in range(2, 30):
        junk(bench, number)
    bench.judge()
    await bench.at(SHOW_AT)
    assert shown_batches(bench) == [1, 2, 3, 4, 5]
    [said] = [each for each in caplog.records if "gas budget" in each.getMessage()]
    assert said.getMessage() == "gas budget is spent: junk is not shown for now"
    assert (said.batch_id, said.renewed_in_s) == (6, 1000)  # type: ignore[attr-defined]
    for number in range(40, 60):
        junk(bench, number, ACCEPTED)
    await bench.at(SHOW_AT + 0.01)
    assert shown_batches(bench)[5:] == [40, 41, 42, 43, 44]
    assert bench.chain.coins == 190


async def test_half_of_the_gas_budget_is_for_direct_batches(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.chain.coins = 200
    for number in range(2, 40):
        junk(bench, number, ACCEPTED)
    await bench.at(SHOW_AT)
    assert shown_batches(bench) == list(range(2, 12))
    for number in range(50, 60):
        junk(bench, number, is_direct=True)
    for number in range(60, 90):
        junk(bench, number, ACCEPTED, is_direct=True)
    await bench.at(SHOW_AT + 0.01)
    assert shown_batches(bench)[10:] == list(range(60, 70))
    assert bench.chain.coins == 180
    found = [r.getMessage() for r in caplog.records if "gas budget" in r.getMessage()]
    assert found == [
        f"gas budget is spent: {what} for now"
        for what in ("only direct batches are shown", "no outcomes are shown", "junk is not shown")
    ]


async def test_gas_budget_is_renewed_with_time_and_raised_with_coin(bench: Bench) -> None:
    bench.chain.coins = 40
    for number in range(2, 30):
        junk(bench, number, ACCEPTED, is_direct=True)
    await bench.at(SHOW_AT)
    assert shown_batches(bench) == [2, 3, 4, 5]
    bench.chain.coins = 56
    await bench.at(SHOW_AT)
    assert len(shown_batches(bench)) == 4 + 2
    bench.seconds += WINDOWS.outcome_deadline_s
    await bench.at(SHOW_AT + 0.01)
    assert len(shown_batches(bench)) == 4 + 2 + 6


async def test_coin_that_is_withdrawn_is_not_spent(bench: Bench) -> None:
    bench.chain.coins = 100
    junk(bench, 2, ACCEPTED)
    await bench.at(SHOW_AT)
    assert shown_batches(bench) == [2]
    bench.chain.coins -= 50
    for number in range(3, 9):
        junk(bench, number, ACCEPTED)
    await bench.at(SHOW_AT + 0.01)
    assert shown_batches(bench) == [2, 3, 4]


async def test_what_was_shown_is_posted_without_budget_until_a_post_costs_gas_in_vain(
    bench: Bench,
) -> None:
    bench.chain.coins = 10
    bench.judge()
    junk(bench, 2, ACCEPTED)
    assert await bench.at(SHOW_AT) == ["show"]
    assert shown_batches(bench) == [1]
    for batch in bench.view.batches.values():
        show(batch, ACCEPTED, PEER, THIRD)
    bench.chain.refusal = ContractRevert("LedgerInvalidSigner", ())
    assert await bench.at(LAST_POST_AT) == []
    bench.chain.refusal = None
    assert await bench.at(LAST_POST_AT) == ["post"]
    assert bench.chain.sent[-1][1][0].batch_id == 1
    bench.chain.refusal = ContractRevert("LedgerInvalidSigner", (), tx="0x")
    assert await bench.at(LAST_POST_AT) == []
    bench.chain.refusal = None
    assert await bench.at(LAST_POST_AT) == []


async def test_validator_without_coin_says_that_it_shows_nothing(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.chain.coins = 0
    bench.judge()
    assert await bench.at(SHOW_AT) == []
    assert "muster validator leave --run" in caplog.records[0].hint  # type: ignore[attr-defined]


# Withheld


async def test_batch_of_which_nothing_can_be_had_is_called_withheld(bench: Bench) -> None:
    bench.is_withheld = True
    assert await bench.at(WITHHELD_AT - 0.01) == []
    assert await bench.at(WITHHELD_AT) == ["show"]
    assert bench.chain.sent[-1][1][1:3] == (WITHHELD, b"")
    show(bench.batch, None, ME)
    assert await bench.at(WITHHELD_AT + 0.02) == []


async def test_batch_that_somebody_shows_is_not_called_withheld(bench: Bench) -> None:
    assert await bench.at(WITHHELD_AT) == []


async def test_batch_that_a_colleague_had_is_not_called_withheld(bench: Bench) -> None:
    bench.is_withheld = True
    show(bench.batch, ACCEPTED, PEER)
    assert await bench.at(WITHHELD_AT) == []
    bench.batch.shown.clear()
    show(bench.batch, None, PEER)
    assert await bench.at(WITHHELD_AT + 0.01) == ["show"]


async def test_what_was_judged_or_is_on_chain_with_its_proofs_is_not_withheld(bench: Bench) -> None:
    bench.is_withheld = True
    bench.view.batches[1] = replace(
        bench.batch, work=LeasedWork(SUBMISSION, b"", make_ticket(), b"")
    )
    assert await bench.at(WITHHELD_AT) == []
    bench.view.batches[1] = bench.batch
    bench.judge()
    show(bench.batch, ACCEPTED, ME)
    assert await bench.at(WITHHELD_AT + 0.01) == []


# Posting


def turn(bench: Bench) -> float:
    return posts_at(bench.batch, bench.run, ME)


async def test_what_a_quorum_showed_is_posted_in_turn(bench: Bench) -> None:
    bench.judge()
    show(bench.batch, ACCEPTED, ME, PEER)
    assert await bench.at(turn(bench) - 0.01) == []
    assert await bench.at(turn(bench)) == ["post"]
    header, records, signatures = bench.chain.sent[-1][1]
    assert (header, records) == (bench.batch.header(), packed(ACCEPTED))
    ascending = sorted((ME, PEER), key=lambda who: bytes.fromhex(who[2:]))
    hashed = keccak(packed(ACCEPTED))
    assert signatures == b"".join(signature_of(bench.batch, who, hashed) for who in ascending)


def test_turns_differ_and_end_before_the_deadline(bench: Bench) -> None:
    turns = sorted(posts_at(bench.batch, bench.run, who) for who in bench.run.validators)
    assert turns == pytest.approx([POST_AT, POST_AT + NEXT_POSTS, POST_AT + 2 * NEXT_POSTS])
    many = [to_address(keccak(b"validator %d" % i)[:20]) for i in range(50)]
    run: Any = SimpleNamespace(validators=many)
    assert max(posts_at(bench.batch, run, who) for who in many) == LAST_POST_AT
    assert posts_at(bench.batch, bench.run, STRANGER) <= LAST_POST_AT


def test_less_than_a_quorum_cannot_be_posted(bench: Bench) -> None:
    show(bench.batch, ACCEPTED, ME)
    assert postable(bench.batch, bench.run, DOMAIN) is None
    show(bench.batch, ACCEPTED, STRANGER)
    assert postable(bench.batch, bench.run, DOMAIN) is None
    show(bench.batch, ACCEPTED, PEER)
    assert postable(bench.batch, bench.run, DOMAIN) is not None


def test_signature_under_another_root_does_not_count(bench: Bench) -> None:
    show(bench.batch, ACCEPTED, ME, PEER)
    hashed = keccak(packed(ACCEPTED))
    bench.batch.shown[hashed][PEER] = signature_of(bench.batch, PEER, hashed, keccak(b"root"))
    assert postable(bench.batch, bench.run, DOMAIN) is None
    assert set(shown_by(bench.batch, DOMAIN)[hashed]) == {ME}


def test_records_that_nobody_showed_cannot_be_posted(bench: Bench) -> None:
    show(bench.batch, ACCEPTED, ME, PEER)
    bench.batch.shown_records.clear()
    assert postable(bench.batch, bench.run, DOMAIN) is None


def test_largest_quorum_is_posted_and_withheld_needs_no_records(bench: Bench) -> None:
    bench.run.terms = [SimpleNamespace(quorum=1)]
    show(bench.batch, None, ME, PEER)
    show(bench.batch, REJECTED, THIRD)
    found = postable(bench.batch, bench.run, DOMAIN)
    assert found is not None
    assert found[0] == b""


# Two outcomes


async def test_validator_that_signed_two_outcomes_is_proven_once(bench: Bench) -> None:
    show(bench.batch, ACCEPTED, PEER, THIRD)
    show(bench.batch, REJECTED, PEER)
    assert await bench.at(0.1) == ["prove"]
    header, first, first_signature, second, second_signature = bench.chain.sent[-1][1]
    assert header == bench.batch.header()
    assert {first.records_hash, second.records_hash} == {
        keccak(packed(ACCEPTED)),
        keccak(packed(REJECTED)),
    }
    for said, signature in ((first, first_signature), (second, second_signature)):
        message = Outcomes(1, said.batch_root, said.records_hash)
        assert recover(digest(DOMAIN, message.struct_hash()), signature) == PEER
    slash = {"run_id": RUN, "offence": Offence.DOUBLE_OUTCOME, "tag": 1, "owner": PEER}
    bench.view.slashes.append(SimpleNamespace(**slash))
    assert await bench.at(0.2) == []


def test_posted_outcomes_contradict_what_was_shown(bench: Bench) -> None:
    show(bench.batch, REJECTED, PEER)
    hashed = keccak(packed(ACCEPTED))
    bench.batch.records_hash = hashed
    bench.batch.signatures = [signature_of(bench.batch, who, hashed) for who in (ME, PEER)]
    assert [double.owner for double in doubles_of(bench.batch, DOMAIN)] == [PEER]


@pytest.mark.parametrize("other_root", [False, True])
def test_changing_ones_mind_is_none_where_the_chain_does_not_say_so(
    bench: Bench, other_root: bool
) -> None:
    """A statement that a batch is withheld is no outcome; another root means another batch."""
    show(bench.batch, ACCEPTED, PEER)
    show(bench.batch, REJECTED if other_root else None, PEER)
    if other_root:
        hashed = keccak(packed(REJECTED))
        bench.batch.shown[hashed][PEER] = signature_of(bench.batch, PEER, hashed, keccak(b"root"))
    assert list(doubles_of(bench.batch, DOMAIN)) == []


# Which batches are looked at


def test_work_taken_out_of_an_old_batch_hides_no_open_one(bench: Bench) -> None:
    late = NOW + 10_000
    batches = {
        1: replace(bench.batch, committed_at=late - 2000),
        2: replace(bench.batch, batch_id=2, committed_at=late - 500),
        3: replace(bench.batch, batch_id=3, committed_at=late - 1500, split_from=1),
        4: replace(bench.batch, batch_id=4, committed_at=late),
    }
    view: Any = SimpleNamespace(batches=batches)
    found = recent_batches(view, RUN, WINDOWS.whole_s)
    assert [batch.batch_id for batch in found] == [2, 3, 4]


# Records that contradict what the batch holds


def post_of_others(bench: Bench, record: OutcomeRecord) -> None:
    """The two other validators' records are on chain; this one found ACCEPTED."""
    bench.judge()
    bench.run.members = {SUBMISSION.worker: SimpleNamespace(answers_for=lambda *_: True)}
    batch, seats = bench.batch, bench.run.seats
    batch.records, batch.records_hash = [record], keccak(packed(record))
    batch.signers, batch.status = seats[PEER] | seats[THIRD], BatchStatus.JUDGED


async def test_records_of_other_work_are_proven_once_for_each_signer(bench: Bench) -> None:
    post_of_others(bench, replace(ACCEPTED, file_hash=keccak(b"invented")))
    assert await bench.at(0.1) == ["misrecord", "misrecord"]
    proof, work, _ = bench.chain.sent[-1][1]
    assert (proof.position, work.submission) == (0, SUBMISSION)
    assert {args[2] for _, args in bench.chain.sent} == {PEER, THIRD}
    for owner in (PEER, THIRD):
        slash = {"run_id": RUN, "offence": Offence.MISRECORD, "tag": 1, "owner": owner}
        bench.view.slashes.append(SimpleNamespace(**slash))
    assert await bench.at(0.5) == []


@pytest.mark.parametrize(
    "record", [ACCEPTED, REJECTED, replace(REJECTED, units=0), replace(REJECTED, worker_id=0)]
)
async def test_other_verdicts_about_the_same_work_are_no_fault(
    bench: Bench, record: OutcomeRecord
) -> None:
    post_of_others(bench, record)
    assert await bench.at(0.1) == []
