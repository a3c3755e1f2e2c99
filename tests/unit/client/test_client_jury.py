"""The juror: what it does when, what it votes, and that being killed changes neither."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from client_chain import UNREACHABLE, make_batch
from client_world import (
    CALIBRATION,
    ORCHESTRATOR_KEY,
    RUN,
    VERSION,
    make_rollouts,
    make_submission,
    make_ticket,
)
from hypothesis import given
from hypothesis import strategies as st
from muster.client.case_proofs import as_claimed, position_in_batch, prove_outcome
from muster.client.validator.jury import (
    PATIENCE,
    JuryDuty,
    JuryPlace,
    Moment,
    Step,
    next_step,
)
from muster.client.validator.votes import Vote, VoteJournal
from test_client_validator_loop import Bench, honest, make_entry

from muster.chain import BatchView, CaseView, CourtTerms
from muster.protocol.eip712 import address_of
from muster.protocol.encoding import keccak, parse_canonical_json
from muster.protocol.errors import ChainError, ChainUnreachable, ContractRevert
from muster.protocol.ids import Address, Hash32, to_address
from muster.protocol.jury import vote_commitment
from muster.protocol.merkle import merkle_root, verify_merkle_proof
from muster.protocol.messages import OutcomeRecord, Reason, Verdict, overdue_leaf
from muster.protocol.rollouts import encode_rollouts

ME, PEER, STRANGER = (to_address(keccak(name)[:20]) for name in (b"me", b"peer", b"stranger"))
TERMS = CourtTerms(challenge_bond=10, draw_delay=1, jury_size=3, commit_time=80, reveal_time=40)
OPENED_AT = 5000
LEAF = keccak(b"leaf")


def make_case(**changes: Any) -> CaseView:
    values: dict[str, Any] = {
        "leaf": LEAF,
        "batch_id": 1,
        "position": 0,
        "challenger": STRANGER,
        "recorded_verdict": Verdict.REJECTED,
        "claimed_verdict": Verdict.ACCEPTED,
        "draw_block": 100,
        "opened_at": OPENED_AT,
        "opened_tx": "0x",
    }
    return CaseView(**values | changes)


def make_vote(**changes: Any) -> Vote:
    return replace(
        Vote(LEAF, ME, Verdict.ACCEPTED, True, keccak(b"result"), keccak(b"salt")), **changes
    )


# What is next

DRAWN = {"jurors": (ME, PEER)}
COMMITTED = DRAWN | {"commitments": {ME: keccak(b"c")}}
ALL_COMMITTED = DRAWN | {"commitments": {ME: keccak(b"c"), PEER: keccak(b"d")}}


@pytest.mark.parametrize(
    ("case", "has_vote", "block", "seconds", "expected"),
    [
        ({}, False, 99, 0, None),
        ({}, False, 100, 79, Step.DRAW),
        ({}, False, 100, 80, None),
        ({}, False, 100, 120, Step.CLOSE),
        (DRAWN, False, 101, 10, Step.JUDGE),
        (DRAWN, True, 101, 79, Step.COMMIT),
        (DRAWN, True, 101, 80, None),
        ({"jurors": (PEER,)}, False, 101, 10, None),
        (COMMITTED, True, 101, 79, None),
        (COMMITTED, True, 101, 80, Step.REVEAL),
        (COMMITTED, True, 101, 120, Step.CLOSE),
        (ALL_COMMITTED, True, 101, 10, Step.REVEAL),
        (ALL_COMMITTED | {"votes": {ME: True}}, True, 101, 10, None),
        (ALL_COMMITTED | {"votes": {ME: True, PEER: False}}, True, 101, 10, Step.CLOSE),
        (ALL_COMMITTED | {"closed": True}, True, 101, 500, None),
    ],
)
def test_next_step_follows_from_the_case_and_the_time(
    case: dict[str, Any], has_vote: bool, block: int, seconds: int, expected: Step | None
) -> None:
    vote = make_vote() if has_vote else None
    at = Moment(block, OPENED_AT + seconds)
    assert next_step(make_case(**case), ME, vote, at, TERMS) is expected


# The journal


def test_vote_keeps_what_was_recorded_first_across_restarts(tmp_path: Path) -> None:
    first = make_vote()
    other = make_vote(overturn=False, salt=keccak(b"another"))
    with VoteJournal(tmp_path) as journal:
        assert journal.find(LEAF, ME, Verdict.ACCEPTED) is None
        assert journal.record(first) == first
        assert journal.record(other) == first
    with VoteJournal(tmp_path) as journal:
        assert journal.record(other) == first
        assert journal.find(LEAF, PEER, Verdict.ACCEPTED) is None
        assert journal.find(LEAF, ME, Verdict.FRAUD) is None


def test_votes_are_for_their_owner_only_and_show_nothing(tmp_path: Path) -> None:
    vote = make_vote()
    with VoteJournal(tmp_path) as journal:
        journal.record(vote)
    assert (tmp_path / "votes.jsonl").stat().st_mode & 0o077 == 0
    assert vote.salt.hex() not in repr(vote)


@given(st.booleans(), st.binary(min_size=32, max_size=32))
def test_commitment_is_that_of_the_court(overturn: bool, salt: bytes) -> None:
    vote = make_vote(overturn=overturn, salt=Hash32(salt))
    expected = vote_commitment(LEAF, ME, overturn, vote.result_hash, Hash32(salt))
    assert vote.commitment() == expected
    assert replace(vote, overturn=not overturn).commitment() != expected


# Proofs of overdue submissions


@given(st.integers(1, 9), st.data())
def test_overdue_submission_is_found_and_proven_by_its_own_leaf(
    count: int, data: st.DataObject
) -> None:
    submissions = [make_submission(make_ticket(index=i), []) for i in range(count)]
    position = data.draw(st.integers(0, count - 1))
    view: Any = SimpleNamespace(workers={submissions[0].worker: SimpleNamespace(worker_id=5)})
    batch = make_view_batch([s.leaf() for s in submissions])
    leaf = overdue_leaf(1, submissions[position].leaf())
    assert position_in_batch(batch, leaf, submissions) == position
    proof = prove_outcome(view, batch, position, submissions)
    assert proof.record == as_claimed(submissions[position], 5).to_bytes()
    assert verify_merkle_proof(submissions[position].leaf(), list(proof.proof), batch.root)
    with pytest.raises(ChainError, match="no outcome"):
        position_in_batch(batch, keccak(leaf), submissions)


def make_view_batch(leaves: list[Hash32], records: list[OutcomeRecord] | None = None) -> BatchView:
    return BatchView(
        batch_id=1,
        run_id=RUN,
        root=merkle_root(leaves),
        count=len(leaves),
        units=1,
        price_per_unit=1,
        committed_at=1,
        block_number=51,
        tx_hash="0x",
        orchestrator=address_of(ORCHESTRATOR_KEY),
        records=records,
    )


# Duty, with a court in memory


class Killed(BaseException):
    """The process ends here."""


@dataclass
class Court:
    """The court's rules about votes, as far as a juror meets them, and a clock."""

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
        if self.error:
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

    async def draw_jury(self, _proof: Any) -> None:
        if self.case.jurors:
            raise ContractRevert("CourtJuryDrawn")
        if self._send("draw"):
            self.case.jurors = self.drawn
        self.point()

    async def commit_vote(self, leaf: Hash32, commitment: Hash32) -> None:
        if self._send("commit"):
            assert (leaf, ME in self.case.commitments) == (self.case.leaf, False)
            self.case.commitments[ME] = commitment
        self.point()

    async def reveal_vote(
        self, leaf: Hash32, overturn: bool, result_hash: Hash32, salt: Hash32
    ) -> None:
        if self._send("reveal"):
            expected = vote_commitment(leaf, ME, overturn, result_hash, salt)
            assert self.case.commitments[ME] == expected
            self.case.votes[ME], self.case.results[ME] = overturn, result_hash
        self.point()

    async def close(self, _proof: Any) -> None:
        if self._send("close"):
            self.case.closed = True
        self.point()


class JuryBench:
    """A juror's duty about one submission, recorded as rejected and claimed to be acceptable."""

    def __init__(
        self,
        folder: Path,
        *,
        forged: bool = False,
        has_file: bool = True,
        reason: Reason = Reason.LATE,
    ) -> None:
        self.bench = Bench(folder)
        self.folder = folder
        ticket = make_ticket()
        rows = make_rollouts(ticket)
        if forged:
            rows = [replace(row, task_reward=1.0 - row.task_reward) for row in rows]
        self.submission = make_submission(ticket, rows)
        record = replace(as_claimed(self.submission, 5), verdict=Verdict.REJECTED, reason=reason)
        files = [encode_rollouts(rows)] if has_file else []
        fake = self.bench.commit(1, [make_entry(ticket, self.submission)], *files)
        batch = make_view_batch([self.submission.leaf()], [record])
        batch.committed_at, batch.block_number = fake.committed_at, fake.block_number
        self.bench.view.batches[1] = batch
        self.case = make_case(leaf=record.leaf(1, 0))
        self.bench.view.cases = {self.case.leaf: self.case}
        self.court = Court(self.case)
        self.journal = VoteJournal(folder)
        self.duty = self.start()

    def start(self) -> JuryDuty:
        salts = iter(range(1000))
        return JuryDuty(
            JuryPlace(
                run_id=RUN,
                juror=ME,
                chain=self.court,  # type: ignore[arg-type]
                view=self.bench.view,
                judge=self.bench.loop,
                journal=self.journal,
                evidence=self.bench.loop.place.evidence,
                calibration=CALIBRATION,
                terms=TERMS,
                poll_s=0.001,
                clock=lambda: self.bench.seconds,
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
            self.bench.seconds += 3

    def result(self) -> Any:
        [document] = self.bench.evidence.glob("*/case-*.json")
        data = document.read_bytes()
        assert keccak(data) == self.case.results[ME]
        return parse_canonical_json(data, max_bytes=1 << 20)

    def close(self) -> None:
        self.journal.close()
        self.bench.close()


@pytest.fixture
async def jury(tmp_path: Path) -> AsyncIterator[JuryBench]:
    opened = JuryBench(tmp_path)
    yield opened
    opened.close()


async def test_juror_overturns_a_wrong_rejection_by_itself(jury: JuryBench) -> None:
    await jury.serve(6)
    assert jury.court.sent == ["draw", "commit", "reveal", "close"]
    assert jury.case.votes == {ME: True}
    result = jury.result()
    assert (result["verdict"], result["reason"], result["overturn"]) == ("ACCEPTED", "NONE", True)
    assert result["units"] == jury.submission.units
    assert [sample["proofs_pass"] for sample in result["samples"]] == [True] * 4


async def test_juror_upholds_when_the_challenger_is_wrong(tmp_path: Path) -> None:
    jury = JuryBench(tmp_path, forged=True)
    await jury.serve(6)
    assert jury.case.votes == {ME: False}
    assert jury.result()["verdict"] == "FRAUD"
    jury.close()


async def test_juror_that_finds_the_claimed_fraud_overturns(tmp_path: Path) -> None:
    jury = JuryBench(tmp_path, forged=True)
    jury.case.claimed_verdict = Verdict.FRAUD
    await jury.serve(6)
    assert jury.case.votes == {ME: True}
    jury.close()


@pytest.mark.parametrize(("missing_units", "overturns"), [(0, True), (1, False)])
async def test_batch_that_was_refused_as_a_whole_is_judged_as_a_whole(
    tmp_path: Path, missing_units: int, overturns: bool
) -> None:
    jury = JuryBench(tmp_path, reason=Reason.BATCH_MISDECLARED)
    jury.bench.view.batches[1].units = jury.submission.units - missing_units
    await jury.serve(6)
    assert jury.case.votes == {ME: overturns}
    jury.close()


async def test_missing_file_is_waited_for_then_counts_for_the_record(tmp_path: Path) -> None:
    jury = JuryBench(tmp_path, has_file=False)
    await jury.serve(8)
    assert jury.court.sent == ["draw"]
    jury.bench.seconds += PATIENCE * TERMS.commit_time
    jury.court.timestamp = int(OPENED_AT + PATIENCE * TERMS.commit_time)
    await jury.serve(4)
    assert jury.case.votes == {ME: False}
    jury.close()


async def test_lasting_loss_of_the_batch_counts_for_the_record(jury: JuryBench) -> None:
    jury.bench.orchestrator.fail("batch", *[UNREACHABLE] * 3)
    await jury.serve(3)
    assert jury.court.sent == ["draw"]
    jury.court.timestamp = int(OPENED_AT + PATIENCE * TERMS.commit_time)
    jury.bench.orchestrator.fail("batch", UNREACHABLE)
    await jury.serve(4)
    assert jury.case.votes == {ME: False}
    assert "unavailable" in jury.result()


@pytest.mark.parametrize("point", range(8))
async def test_juror_killed_at_any_point_votes_once_and_the_same(
    tmp_path: Path, point: int
) -> None:
    jury = JuryBench(tmp_path)
    jury.court.kill_at = point
    with pytest.raises(Killed):
        await jury.serve(8)
    jury.restart()
    await jury.serve(8)
    assert jury.court.sent == ["draw", "commit", "reveal", "close"]
    assert jury.case.votes == {ME: True}
    jury.close()


@pytest.mark.parametrize("is_before", [True, False])
async def test_juror_killed_around_its_journal_commits_to_what_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_before: bool
) -> None:
    jury = JuryBench(tmp_path)
    record = VoteJournal.record

    def killed(self: VoteJournal, vote: Vote) -> Vote:
        if not is_before:
            record(self, vote)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(VoteJournal, "record", killed)
        with pytest.raises(Killed):
            await jury.serve(3)
    assert jury.court.sent == ["draw"]
    jury.restart()
    await jury.serve(6)
    vote = jury.journal.find(jury.case.leaf, ME, jury.case.claimed_verdict)
    assert vote is not None
    assert jury.case.commitments[ME] == vote.commitment()
    assert jury.case.votes == {ME: True}
    jury.close()


async def test_signer_of_the_batch_only_draws_and_closes(jury: JuryBench) -> None:
    jury.court.drawn = (PEER,)
    await jury.serve(3)
    jury.case.commitments[PEER], jury.case.votes[PEER] = keccak(b"c"), True
    await jury.serve(2)
    assert jury.court.sent == ["draw", "close"]
    assert not list(jury.bench.evidence.glob("*/case-*.json"))


async def test_draw_that_another_was_first_with_is_no_failure(
    jury: JuryBench, caplog: pytest.LogCaptureFixture
) -> None:
    jury.court.error = ContractRevert("CourtJuryDrawn")
    await jury.duty._try(jury.case, Step.DRAW, Moment(101, OPENED_AT + 1))
    assert not [r for r in caplog.records if r.levelname == "WARNING"]
    jury.court.error = ContractRevert("CourtNoJurors")
    for _ in range(2):
        await jury.duty._try(jury.case, Step.DRAW, Moment(101, OPENED_AT + 1))
    assert len([r for r in caplog.records if r.levelname == "WARNING"]) == 1


async def test_postponed_draw_is_drawn_again(jury: JuryBench) -> None:
    jury.court.drawn = ()
    await jury.serve()
    jury.case.draw_block, jury.court.drawn = 101, (ME,)
    await jury.serve(2)
    assert jury.court.sent[:2] == ["draw", "draw"]


async def test_vote_that_is_not_in_the_journal_is_not_revealed(jury: JuryBench) -> None:
    await jury.serve(2)
    jury.case.jurors, jury.case.commitments = (ME,), {ME: keccak(b"of another process")}
    with pytest.raises(ChainError, match="not in the journal"):
        await jury.duty.reveal(jury.case)
    assert "reveal" not in jury.court.sent


async def test_chain_that_does_not_answer_is_lived_through(jury: JuryBench) -> None:
    jury.court.error = ChainUnreachable("no answer")
    await jury.serve(2)
    assert jury.court.sent == []
    jury.court.error = None
    await jury.serve(6)
    assert jury.case.closed


async def test_cases_of_other_runs_are_left_alone(jury: JuryBench) -> None:
    jury.bench.view.batches[1].run_id = RUN + 1
    await jury.serve(3)
    assert jury.court.sent == []


async def test_reconsidering_loads_the_policy_of_the_ticket(jury: JuryBench) -> None:
    assert (
        await jury.bench.loop.reconsider(
            jury.bench.view.batches[1], jury.bench.orchestrator.batches[1], 0
        )
    )[1].finding is None
    assert jury.bench.engine.policy_version == VERSION


async def test_reconsidered_slot_of_the_same_batch_counts_as_used(jury: JuryBench) -> None:
    entry, _data = honest(make_ticket())
    batch = make_batch(2, [entry.submission, entry.submission])
    _, judgement, _ = await jury.bench.loop.reconsider(batch, [entry, entry], 1)
    assert judgement.finding is not None
    assert judgement.finding.reason is Reason.SLOT_REUSED
