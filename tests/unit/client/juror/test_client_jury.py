"""The juror: its next steps and votes, which a kill does not change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st
from worlds.cases import (
    ACCEPTED,
    FRAUD,
    LEAF,
    ME,
    OPENED_AT,
    PEER,
    RECORD,
    REJECTED,
    STRANGER,
    SUBMISSION,
    TERMS,
    make_case,
    make_view_batch,
)
from worlds.client_world import RUN

from muster.chain import CaseStatus, CaseView, Offence
from muster.client.juror.duty import (
    PATIENCE_SHARE,
    DutyStep,
    JurorContext,
    JurorDuty,
    Moment,
    Vote,
    VoteJournal,
    next_step,
)
from muster.client.sources import DOCUMENTS_HINT
from muster.protocol.encoding import keccak, parse_canonical_json
from muster.protocol.errors import (
    ApiError,
    ChainError,
    ChainUnreachable,
    ConfigError,
    ContractRevert,
    EncodingError,
    MusterError,
    TaskError,
)
from muster.protocol.ids import Address, Hash32
from muster.protocol.jury import BenchPlace, Ruling, vote_commitment


def make_vote(**changes: Any) -> Vote:
    vote = Vote(LEAF, 4, ME, ACCEPTED.number, keccak(b"result"), keccak(b"salt"))
    return replace(vote, **changes)


# What is next

DRAWN: dict[str, Any] = {"jurors": (ME, PEER)}
COMMITTED = DRAWN | {"commitments": {ME: keccak(b"c")}}
ALL_COMMITTED = DRAWN | {"commitments": {ME: keccak(b"c"), PEER: keccak(b"d")}}


@pytest.mark.parametrize(
    ("case", "has_vote", "block", "seconds", "expected"),
    [
        ({}, False, 99, 0, None),
        ({}, False, 100, 39, DutyStep.DRAW),
        ({}, False, 100, 40, None),
        ({}, False, 100, 120, DutyStep.SETTLE),
        (DRAWN, False, 101, 10, DutyStep.JUDGE),
        (DRAWN, False, 101, 80, None),
        (DRAWN, True, 101, 79, DutyStep.COMMIT),
        (DRAWN, True, 101, 80, None),
        ({"jurors": (PEER,)}, False, 101, 10, None),
        (COMMITTED, True, 101, 79, None),
        (COMMITTED, True, 101, 80, DutyStep.REVEAL),
        (COMMITTED, True, 101, 120, DutyStep.SETTLE),
        (ALL_COMMITTED, True, 101, 10, DutyStep.REVEAL),
        (ALL_COMMITTED | {"votes": {ME: 0}}, True, 101, 10, None),
        (ALL_COMMITTED | {"votes": {ME: 0, PEER: 0}}, True, 101, 10, DutyStep.SETTLE),
        (ALL_COMMITTED | {"status": CaseStatus.UPHELD}, True, 101, 500, None),
    ],
)
def test_next_step_follows_from_the_case_and_the_time(
    case: dict[str, Any], has_vote: bool, block: int, seconds: int, expected: DutyStep | None
) -> None:
    vote = make_vote() if has_vote else None
    at = Moment(block, OPENED_AT + seconds)
    assert next_step(make_case(**case), ME, vote, at, TERMS) is expected


@pytest.mark.parametrize(
    ("is_proven", "has_vote", "seconds", "expected"),
    [
        (False, False, 39, None),
        (False, True, 39, None),
        (False, False, 40, DutyStep.JUDGE),
        (False, True, 40, DutyStep.COMMIT),
        (True, False, 39, DutyStep.JUDGE),
        (True, True, 39, DutyStep.COMMIT),
    ],
)
def test_a_case_without_a_proof_is_judged_once_none_can_come(
    is_proven: bool, has_vote: bool, seconds: int, expected: DutyStep | None
) -> None:
    case, vote = make_case(**DRAWN), make_vote() if has_vote else None
    at = Moment(101, OPENED_AT + seconds)
    assert next_step(case, ME, vote, at, TERMS, is_proven=is_proven) is expected


# The journal


def test_vote_keeps_what_was_recorded_first_across_restarts(tmp_path: Path) -> None:
    first = make_vote()
    other = make_vote(ruling=FRAUD.number, salt=keccak(b"another"))
    with VoteJournal(tmp_path) as journal:
        assert journal.find(LEAF, ME, 4) is None
        assert journal.record(first) == first
        assert journal.record(other) == first
    with VoteJournal(tmp_path) as journal:
        assert journal.record(other) == first
        assert journal.find(LEAF, PEER, 4) is None


def test_case_of_the_same_name_on_a_reorganised_chain_is_voted_anew(tmp_path: Path) -> None:
    again = make_vote(number=5, ruling=FRAUD.number)
    with VoteJournal(tmp_path) as journal:
        journal.record(make_vote())
        assert journal.record(again) == again


def test_votes_are_for_their_owner_only_and_show_nothing(tmp_path: Path) -> None:
    vote = make_vote()
    with VoteJournal(tmp_path) as journal:
        journal.record(vote)
    assert (tmp_path / "votes.jsonl").stat().st_mode & 0o077 == 0
    assert vote.salt.hex() not in repr(vote)


@given(st.sampled_from([None, ACCEPTED, FRAUD]), st.binary(min_size=32, max_size=32))
def test_commitment_is_that_of_the_court(ruling: Ruling | None, salt: bytes) -> None:
    vote = make_vote(ruling=ruling.number if ruling else 0, salt=Hash32(salt))
    expected = vote_commitment(LEAF, ME, ruling, vote.result_hash, Hash32(salt))
    assert vote.commitment() == expected
    assert replace(vote, ruling=REJECTED.number).commitment() != expected


# Duty, with a court in memory


class Killed(BaseException):
    """The process ends here."""


@dataclass
class Court:
    """The court's rules about votes that concern a juror, and a clock."""

    case: CaseView
    sent: list[str] = field(default_factory=list)
    block_number: int = 101
    timestamp: int = OPENED_AT + 1
    kill_at: int = -1
    points: int = 0
    done: set[str] = field(default_factory=set)
    drawn: tuple[Address, ...] = (ME,)
    error: ChainError | None = None
    label: str = ""
    unmined: set[Hash32] = field(default_factory=set)
    """Cases whose commitments are sent and never mined."""
    has_waited: asyncio.Event = field(default_factory=asyncio.Event)

    def point(self) -> None:
        """A moment at which the process may be killed."""
        self.points += 1
        if self.points - 1 == self.kill_at:
            raise Killed

    @property
    def court(self) -> Court:
        return self

    def once(self, label: str) -> Court:
        self.label = label
        return self

    async def latest_block(self) -> Any:
        if isinstance(self.error, ChainUnreachable):
            raise self.error
        return SimpleNamespace(number=self.block_number, timestamp=self.timestamp)

    def _send(self, what: str) -> bool:
        self.point()
        if self.error:
            raise self.error
        if self.label in self.done:
            return False
        self.done.add(self.label)
        self.sent.append(what)
        return True

    async def draw(self, case_id: Hash32) -> None:
        assert case_id == self.case.case_id
        if self._send("draw"):
            self.case.jurors = self.drawn
        self.point()

    async def commit_vote(self, case_id: Hash32, commitment: Hash32) -> None:
        if case_id in self.unmined:
            self.has_waited.set()
            await asyncio.Event().wait()
        if self._send("commit"):
            assert (case_id, ME in self.case.commitments) == (self.case.case_id, False)
            self.case.commitments[ME] = commitment
        self.point()

    async def reveal_vote(
        self, case_id: Hash32, number: int, result_hash: Hash32, salt: Hash32
    ) -> None:
        if self._send("reveal"):
            expected = vote_commitment(case_id, ME, Ruling.of(number), result_hash, salt)
            assert self.case.commitments[ME] == expected
            self.case.votes[ME], self.case.results[ME] = number, result_hash
        self.point()

    async def settle(self, proof: Any) -> None:
        assert proof.record == RECORD.to_bytes()
        if self._send("settle"):
            self.case.status = CaseStatus.OVERTURNED
            self.case.fee_wei = 10**18
        self.point()

    async def collect_fee(self, _case_id: Hash32, juror: Address) -> None:
        if self._send("collect"):
            self.case.collected.add(juror)
        self.point()

    async def fine_signer(self, _proof: Any, signer: Address) -> None:
        self._send(f"fine {signer}")

    async def fine_absent_juror(self, _case_id: Hash32, juror: Address) -> None:
        self._send(f"fine {juror}")


@dataclass
class Finder:
    """Finds the ruling that a test sets. Without one it hangs, or a document is missing."""

    ruling: Ruling | None = ACCEPTED
    hangs: bool = False
    slow: Callable[[], None] | None = None
    """Called for case 4, whose file then turns out to be missing."""
    asked: int = 0
    missing: MusterError = field(
        default_factory=lambda: ApiError(
            "no source shows the file", status=503, code="no_source", hint=DOCUMENTS_HINT
        )
    )
    """The error raised while there is no ruling."""

    async def judge(self, case: CaseView) -> tuple[Ruling, dict[str, Any]]:
        self.asked += 1
        if self.slow and case.number == 4:
            self.slow()
            raise self.missing
        if self.hangs:
            await asyncio.Event().wait()
        if self.ruling is None:
            raise self.missing
        return self.ruling, {"verdict": self.ruling.verdict.name}


class Courtroom:
    """A juror's duty about one case, recorded as rejected and claimed to be acceptable."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seconds = 0.0
        self.case = make_case()
        batch = make_view_batch([SUBMISSION.leaf()], [RECORD])
        batch.signers = 0b10
        run = SimpleNamespace(seats={PEER: 1, STRANGER: 2})
        self.view: Any = SimpleNamespace(
            cases={LEAF: self.case},
            batches={1: batch},
            runs={RUN: run},
            slashes=[],
            bench=[BenchPlace(ME, 10)],
        )
        self.court = Court(self.case)
        self.finder = Finder()
        self.journal = VoteJournal(folder)
        self.duty = self.start()

    def start(self) -> JurorDuty:
        salts = iter(range(1000))
        return JurorDuty(
            JurorContext(
                juror=ME,
                chain=self.court,  # type: ignore[arg-type]
                view=self.view,
                judge=self.finder,
                journal=self.journal,
                results=self.folder / "cases",
                terms=TERMS,
                poll_s=0.001,
                clock=lambda: self.seconds,
                salt=lambda size: keccak(bytes([next(salts)]))[:size],
            )
        )

    def restart(self) -> None:
        self.journal.close()
        self.journal = VoteJournal(self.folder)
        self.duty = self.start()

    async def serve(self, rounds: int = 1) -> None:
        for _ in range(rounds):
            await self.duty.serve()
            await self.duty.acted()
            await self.duty.judged()
            self.seconds += 3

    def result(self) -> Any:
        [document] = (self.folder / "cases").glob("case-4-*.json")
        data = document.read_bytes()
        assert keccak(data) == self.case.results[ME]
        return parse_canonical_json(data, max_bytes=1 << 20)

    def find_slashed(self, offence: Offence, owner: Address, tag: int) -> None:
        self.view.slashes.append(SimpleNamespace(offence=offence, owner=owner, tag=tag))


@pytest.fixture
async def room(tmp_path: Path) -> AsyncIterator[Courtroom]:
    opened = Courtroom(tmp_path)
    yield opened
    opened.journal.close()


ALL_STEPS = ["draw", "commit", "reveal", "settle", "collect", f"fine {STRANGER}"]


@pytest.mark.parametrize("ruling", [ACCEPTED, FRAUD])
async def test_juror_votes_what_it_finds_whatever_is_claimed_and_clears_up(
    room: Courtroom, ruling: Ruling
) -> None:
    room.finder.ruling = ruling
    await room.serve(7)
    assert room.court.sent == ALL_STEPS
    assert room.case.votes == {ME: ruling.number}
    assert room.result()["ruling"] == ruling.number


async def test_who_was_fined_is_left_alone(room: Courtroom) -> None:
    room.find_slashed(Offence.WRONG_VERDICT, STRANGER, 1)
    await room.serve(8)
    assert room.court.sent == ALL_STEPS[:-1]


async def test_work_that_is_missing_is_waited_for_then_voted_as_not_seen(room: Courtroom) -> None:
    room.finder.ruling = None
    await room.serve(8)
    assert room.court.sent == ["draw"]
    assert room.finder.asked > 1
    room.court.timestamp = int(OPENED_AT + PATIENCE_SHARE * TERMS.commit_time)
    await room.serve(4)
    assert room.case.votes == {ME: 0}
    assert "no source shows the file" in room.result()["unavailable"]


@pytest.mark.parametrize("kind", [ConfigError, EncodingError, TaskError])
async def test_owner_whose_documents_cannot_be_used_cannot_have_a_juror_fined(
    room: Courtroom, kind: type[MusterError], caplog: pytest.LogCaptureFixture
) -> None:
    room.finder.ruling = None
    room.finder.missing = kind("the recipe is not the one that the run pins")
    await room.serve(8)
    assert "jury: judge has to wait" in caplog.messages
    room.court.timestamp = int(OPENED_AT + PATIENCE_SHARE * TERMS.commit_time)
    await room.serve(4)
    assert room.case.votes == {ME: 0}
    assert "not the one that the run pins" in room.result()["unavailable"]


async def test_work_that_comes_late_is_judged_yet(room: Courtroom) -> None:
    room.finder.ruling = None
    await room.serve(2)
    room.finder.ruling = ACCEPTED
    await room.serve(4)
    assert room.case.votes == {ME: ACCEPTED.number}


async def test_judging_without_end_counts_as_not_seen_in_time(room: Courtroom) -> None:
    room.finder.hangs = True
    room.case.jurors = (ME,)
    at = Moment(101, OPENED_AT + PATIENCE_SHARE * TERMS.commit_time - 0.01)
    vote = await room.duty.decide(room.case, at)
    assert vote.ruling == 0


async def test_slow_case_makes_no_other_late(room: Courtroom) -> None:
    room.finder.hangs = True
    room.case.jurors = (ME,)
    other = make_case(case_id=keccak(b"other"), number=5)
    room.view.cases[other.case_id] = room.court.case = other
    await room.duty.serve()
    await room.duty.acted()
    assert room.court.sent == ["draw"]
    running = asyncio.ensure_future(room.duty.run())
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])


async def test_case_whose_source_hangs_keeps_no_other_from_being_judged(room: Courtroom) -> None:
    other = make_case(case_id=keccak(b"other"), number=5, jurors=(ME,))
    room.view.cases[other.case_id], room.case.jurors = other, (ME,)
    room.finder.hangs = True
    await room.duty.serve()
    await asyncio.sleep(0)
    room.finder.hangs = False
    third = make_case(case_id=keccak(b"third"), number=6, jurors=(ME,))
    room.view.cases[third.case_id] = third
    running = asyncio.ensure_future(room.duty.run())
    while room.journal.find(third.case_id, ME, 6) is None:
        await asyncio.sleep(0.001)
    running.cancel()
    await asyncio.wait([running])
    assert room.journal.find(other.case_id, ME, 5) is None


async def test_case_that_takes_long_each_time_leaves_the_place_to_others(
    room: Courtroom, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt at the older case takes longer than the pause until the next attempt."""
    monkeypatch.setattr("muster.client.juror.duty.AT_ONCE", 1)
    other = make_case(case_id=keccak(b"other"), number=5, jurors=(ME,))
    room.view.cases[other.case_id], room.case.jurors = other, (ME,)

    def wait() -> None:
        room.seconds += 3

    room.finder.slow = wait
    await room.serve(2)
    assert room.journal.find(other.case_id, ME, 5) is not None
    assert room.journal.find(LEAF, ME, 4) is None


async def test_transaction_that_is_not_mined_makes_no_other_case_s_vote_late(
    room: Courtroom,
) -> None:
    """The other vote can be revealed only after the transaction began to hang."""
    room.journal.record(make_vote())
    name = keccak(b"other")
    vote = room.journal.record(make_vote(case_id=name, number=5))
    other = make_case(case_id=name, number=5, jurors=(ME, PEER))
    other.commitments[ME] = vote.commitment()
    room.case.jurors, room.view.cases[name], room.court.case = (ME,), other, other
    room.court.unmined.add(LEAF)
    running = asyncio.ensure_future(room.duty.run())
    async with asyncio.timeout(20):
        await room.court.has_waited.wait()
        other.commitments[PEER] = keccak(b"c")
        while ME not in other.votes:
            await asyncio.sleep(0.001)
    running.cancel()
    await asyncio.wait([running])
    assert room.court.sent == ["reveal"]


async def test_step_that_fails_for_no_known_reason_ends_the_juror(
    room: Courtroom, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_case_id: Hash32) -> None:
        raise RuntimeError("a fault of the program")

    monkeypatch.setattr(room.court, "draw", fail)
    with pytest.raises(RuntimeError, match="a fault of the program"):
        async with asyncio.timeout(20):
            await room.duty.run()


@pytest.mark.parametrize("point", range(10))
async def test_juror_killed_at_any_point_votes_once_and_the_same(
    room: Courtroom, point: int
) -> None:
    room.court.kill_at = point
    with pytest.raises(Killed):
        await room.serve(8)
    room.restart()
    await room.serve(8)
    assert room.court.sent == ALL_STEPS
    assert room.case.votes == {ME: ACCEPTED.number}


@pytest.mark.parametrize("is_before", [True, False])
async def test_juror_killed_around_its_journal_commits_to_what_is_in_it(
    room: Courtroom, monkeypatch: pytest.MonkeyPatch, is_before: bool
) -> None:
    record = VoteJournal.record

    def killed(self: VoteJournal, vote: Vote) -> Vote:
        if not is_before:
            record(self, vote)
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(VoteJournal, "record", killed)
        with pytest.raises(RuntimeError, match="killed"):
            await room.serve(3)
    assert room.court.sent == ["draw"]
    room.restart()
    room.finder.ruling = ACCEPTED if is_before else FRAUD
    await room.serve(6)
    vote = room.journal.find(LEAF, ME, 4)
    assert vote is not None
    assert room.case.commitments[ME] == vote.commitment()
    assert room.case.votes == {ME: ACCEPTED.number}


async def test_who_was_not_drawn_only_draws_and_settles(room: Courtroom) -> None:
    room.court.drawn = (PEER,)
    await room.serve(3)
    room.case.commitments[PEER], room.case.votes[PEER] = keccak(b"c"), ACCEPTED.number
    await room.serve(3)
    assert room.court.sent == ["draw", "settle"]
    assert not (room.folder / "cases").exists()
    assert room.finder.asked == 0


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelname == "WARNING"]


async def test_draw_that_another_was_first_with_is_no_failure(
    room: Courtroom, caplog: pytest.LogCaptureFixture
) -> None:
    room.court.error = ContractRevert("CourtJuryDrawn")
    await room.serve()
    assert warnings(caplog) == []
    room.court.error = ContractRevert("CourtNoJurors")
    await room.serve(2)
    assert warnings(caplog) == ["jury: draw was refused"]


async def test_refusal_without_a_reason_is_tried_again_before_it_is_told(
    room: Courtroom, caplog: pytest.LogCaptureFixture
) -> None:
    """Jurors draw at the same moment; a busy endpoint may not say that another was first."""
    room.court.error = ContractRevert(ContractRevert.NO_REASON)
    await room.serve()
    assert warnings(caplog) == []
    await room.serve(3)
    assert warnings(caplog) == ["jury: draw was refused"]
    room.court.error = None
    await room.serve()
    assert room.court.sent == ["draw"]


async def test_a_juror_is_told_how_to_get_what_it_misses(
    room: Courtroom, caplog: pytest.LogCaptureFixture
) -> None:
    room.finder.ruling = None
    await room.serve(3)
    [said] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert said.message == "jury: judge has to wait"
    assert vars(said)["hint"] == DOCUMENTS_HINT


async def test_postponed_draw_is_drawn_again(room: Courtroom) -> None:
    room.court.drawn = ()
    await room.serve()
    room.case.draw_block, room.court.drawn = 101, (ME,)
    await room.serve(2)
    assert room.court.sent[:2] == ["draw", "draw"]


async def test_vote_that_is_not_in_the_journal_is_not_revealed(room: Courtroom) -> None:
    await room.serve(2)
    room.case.jurors, room.case.commitments = (ME,), {ME: keccak(b"of another process")}
    with pytest.raises(ChainError, match="not in the journal"):
        await room.duty.reveal(room.case)
    assert "reveal" not in room.court.sent


async def test_chain_that_does_not_answer_is_lived_through(room: Courtroom) -> None:
    room.court.error = ChainUnreachable("no answer")
    await room.serve(2)
    assert room.court.sent == []
    room.court.error = None
    await room.serve(6)
    assert room.case.closed


async def test_absent_juror_is_fined_by_its_peer(room: Courtroom) -> None:
    room.court.drawn = (ME, PEER)
    await room.serve(3)
    room.court.timestamp = OPENED_AT + TERMS.commit_time
    await room.serve(2)
    room.court.timestamp = OPENED_AT + TERMS.jury_time
    await room.serve(4)
    assert room.court.sent == [*ALL_STEPS, f"fine {PEER}"]


async def test_clock_goes_on_between_blocks(room: Courtroom) -> None:
    room.court.block_number = 99
    assert (await room.duty.moment()).time == OPENED_AT + 1
    room.seconds += 7.5
    assert (await room.duty.moment()).time == OPENED_AT + 8.5
    room.court.block_number, room.court.timestamp = 100, OPENED_AT + 9
    assert (await room.duty.moment()).time == OPENED_AT + 9


# Its place


async def test_juror_says_once_that_its_place_is_gone(
    room: Courtroom, caplog: pytest.LogCaptureFixture
) -> None:
    """As after the first fine of a juror that staked no more than is required."""

    def said() -> int:
        return sum("not on the bench any more" in line.message for line in caplog.records)

    await room.serve(2)
    assert said() == 0
    room.view.bench = [BenchPlace(ME, 10, 5000), BenchPlace(PEER, 10)]
    await room.serve(3)
    assert said() == 1
    room.view.bench.append(BenchPlace(ME, 6000))
    await room.serve()
    room.view.bench.pop()
    await room.serve()
    assert said() == 2
