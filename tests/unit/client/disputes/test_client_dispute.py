"""Disputes on the command line: the text before a claim, refusals, and the end."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
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
from worlds.client_world import RUN, make_entry, make_ticket

from muster.api import BatchEntry
from muster.chain import (
    CaseStatus,
    ClaimView,
    LeasedWork,
    Offence,
    StandingOutcome,
    SubmissionPlace,
)
from muster.client.cli import dispute
from muster.client.disputes.cases import (
    Penalty,
    describe_cases,
    ending_of,
    fees_due,
    make_row,
    next_of,
    penalties_of,
    phase_of,
    ruling_words,
)
from muster.client.disputes.claims import (
    ClaimOffer,
    Settled,
    _in_a_later_block,
    _salt,
    case_id_of,
    describe_settled,
    earlier_claim,
    find_entry,
    parse_ruling,
    proof_of,
    settle,
)
from muster.client.disputes.explanation import advice_on
from muster.client.sources import Sources
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.errors import ApiError, ChainUnreachable, ConfigError, ContractRevert
from muster.protocol.ids import Address, Hash32
from muster.protocol.jury import Ruling, spares_signers, summons_of
from muster.protocol.messages import Reason, Verdict

TOKEN = 10**18
OFFER = ClaimOffer(
    standing=StandingOutcome(RECORD, LEAF, RECORD.verdict, RECORD.reason, 1_000_000, False),
    ruling=ACCEPTED,
    terms=TERMS,
    bench=5,
    balance_wei=10 * TOKEN,
    gas_wei=10**15,
    has_case=False,
)
OVERTURNED: dict[str, Any] = {"status": CaseStatus.OVERTURNED, "ruling": ACCEPTED.number}
UPHELD: dict[str, Any] = {"status": CaseStatus.UPHELD, "ruling": REJECTED.number}


# Before a claim

OPEN, CLOSED = {"ending": None}, {"ending": "overturned (3 accepted)"}
AGREES = "this machine agrees with the verdict"
FINDS = "this machine finds accepted, validators signed rejected"
DISPUTE = "honest jurors will find what this machine finds, so dispute it (see dispute)"


@pytest.mark.parametrize(
    ("mine", "stands", "dispute", "case", "words"),
    [
        ("REJECTED", "rejected", {"until": 1}, None, f"{AGREES}: a claim would lose its bond"),
        ("REJECTED", "rejected", None, OPEN, f"{AGREES}: a claim would lose its bond"),
        ("REJECTED", "rejected", None, CLOSED, AGREES),
        ("REJECTED", "rejected", None, None, AGREES),
        ("ACCEPTED", "rejected", {"until": 1}, None, f"{FINDS}: {DISPUTE}"),
        ("ACCEPTED", "rejected", None, CLOSED, f"{FINDS}: see dispute"),
        ("ACCEPTED", "accepted", None, CLOSED, AGREES),
        (
            "REJECTED",
            "accepted",
            None,
            CLOSED,
            "this machine finds rejected, a jury ruled accepted: see dispute",
        ),
    ],
)
def test_advice_compares_with_the_verdict_that_stands(
    mine: str, stands: str, dispute: Any, case: Any, words: str
) -> None:
    again: Any = SimpleNamespace(record=replace(RECORD, verdict=Verdict[mine]))
    found = {"recorded_verdict": "rejected", "verdict": stands, "dispute": dispute, "case": case}
    assert advice_on(again, found) == words


def test_offer_says_what_it_costs_who_sits_and_until_when() -> None:
    text = OFFER.describe()
    assert "10 of 10 tokens; lost unless the jury finds the same" in text
    assert "jury    3 of the 5 that may sit" in text
    assert "until 1970-01-12 13:46:40 UTC" in text
    assert "rejected for schema" in text
    assert "2 min at most" in text
    OFFER.require(now=999_999)


@pytest.mark.parametrize(
    ("changes", "now", "message"),
    [
        ({"ruling": REJECTED}, 0, "recorded as rejected for schema already"),
        (
            {"ruling": Ruling(Verdict.REJECTED, Reason.TOPLOC_MISMATCH)},
            0,
            "recorded as rejected for schema already",
        ),
        ({}, 1_000_000, "window closed at 1970-01-12"),
        ({"bench": 0}, 0, "nobody of the network's bench may judge"),
        ({"balance_wei": 10 * TOKEN - 1}, 0, "the bond is 10 tokens, the wallet holds 9.99"),
    ],
)
def test_offer_that_cannot_be_made_says_why_and_what_to_do(
    changes: dict[str, Any], now: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        replace(OFFER, **changes).require(now)
    assert caught.value.hint


def test_open_case_is_joined_after_the_window() -> None:
    replace(OFFER, has_case=True).require(now=1_000_000)


@pytest.mark.parametrize(
    ("text", "recorded", "expected"),
    [
        (None, ACCEPTED, Ruling(Verdict.REJECTED, Reason.TOPLOC_MISMATCH)),
        (None, FRAUD, ACCEPTED),
        ("fraud:wrong-reward", ACCEPTED, FRAUD),
        ("Fraud:WRONG_REWARD", ACCEPTED, FRAUD),
        ("rejected", ACCEPTED, Ruling(Verdict.REJECTED, Reason.TOPLOC_MISMATCH)),
        ("accepted", FRAUD, ACCEPTED),
    ],
)
def test_ruling_is_the_opposite_unless_told(
    text: str | None, recorded: Ruling, expected: Ruling
) -> None:
    assert parse_ruling(text, recorded) == expected


@pytest.mark.parametrize("text", ["", "guilty", "fraud:bad_luck", ":late"])
def test_what_is_no_ruling_is_refused_with_those_there_are(text: str) -> None:
    with pytest.raises(ConfigError, match="is no ruling") as caught:
        parse_ruling(text, ACCEPTED)
    assert "accepted, incomplete, rejected or fraud" in str(caught.value.hint)


def test_case_is_named_by_the_outcome_or_by_the_batch_that_nobody_judged() -> None:
    judged = SubmissionPlace(make_view_batch([SUBMISSION.leaf()], [RECORD]), 0)
    assert case_id_of(judged) == LEAF
    assert proof_of(judged).record == RECORD.to_bytes()
    unjudged = SubmissionPlace(make_view_batch([SUBMISSION.leaf()]), 0)
    assert case_id_of(unjudged) == summons_of(1)
    with pytest.raises(ConfigError, match="nobody has judged batch 1") as caught:
        proof_of(unjudged)
    assert "muster worker submit-direct" in str(caught.value.hint)


def test_salt_of_a_claim_is_the_keys_and_no_other_claims() -> None:
    salts = {
        _salt(key, leaf, ruling)
        for key in (b"one" * 11, b"two" * 11)
        for leaf in (LEAF, keccak(LEAF))
        for ruling in (ACCEPTED, FRAUD)
    }
    assert len(salts) == 8
    assert _salt(b"one" * 11, LEAF, FRAUD) in salts


@pytest.mark.parametrize(
    ("text", "claimant", "is_found"),
    [
        (None, STRANGER, True),
        ("accepted", STRANGER, True),
        ("fraud", STRANGER, False),
        (None, ME, False),
    ],
)
def test_claim_that_an_account_has_made_is_found(
    text: str | None, claimant: Address, is_found: bool
) -> None:
    case = make_case()
    assert earlier_claim(case, claimant, text) == (case.claims[0] if is_found else None)
    assert earlier_claim(None, claimant, text) is None


async def test_chain_that_makes_no_block_is_named_and_the_command_can_be_repeated() -> None:
    async def refuse() -> None:
        raise ContractRevert("CourtNotAnnounced")

    with pytest.raises(ChainUnreachable, match="the chain made no block in 0 s") as caught:
        await _in_a_later_block(refuse, 0.0)
    assert "run the same command again" in str(caught.value.hint)


# The submission and its proofs

ENTRY = make_entry(make_ticket(), SUBMISSION)


def shows(entry: BatchEntry) -> httpx.MockTransport:
    """An orchestrator with one batch of one submission."""
    contents = {
        "batch_id": 1,
        "root": hex0x(SUBMISSION.leaf()),
        "count": 1,
        "submissions": [json.loads(entry.model_dump_json())],
    }
    answers: dict[str, Any] = {
        "/v1/batches/1": contents,
        f"/v1/work/{hex0x(SUBMISSION.leaf())}": contents["submissions"][0],
    }

    def answer(request: httpx.Request) -> httpx.Response:
        found = answers.get(request.url.path)
        if found is None:
            return httpx.Response(404)
        return httpx.Response(200, stream=httpx.ByteStream(json.dumps(found).encode()))

    return httpx.MockTransport(answer)


async def test_submission_is_had_with_its_batch() -> None:
    place = SubmissionPlace(make_view_batch([SUBMISSION.leaf()], [RECORD]), 0)
    async with Sources(["http://room.example"], transport=shows(ENTRY)) as sources:
        assert await find_entry(place, None, sources) == (ENTRY, [])


async def test_claimed_submission_keeps_the_signature_that_the_chain_saw() -> None:
    place = SubmissionPlace(make_view_batch([SUBMISSION.leaf()], [RECORD]), 0)
    made = ClaimView(STRANGER, ACCEPTED.number, SUBMISSION, ENTRY.signature, (), "0x")
    spoilt = ENTRY.model_copy(update={"signature": bytes(65)})
    async with Sources(["http://room.example"], transport=shows(spoilt)) as sources:
        assert await find_entry(place, make_case(claims=[made]), sources) == (ENTRY, ())


@pytest.mark.parametrize("has_case", [True, False])
async def test_submission_that_is_not_the_one_on_chain_is_refused(has_case: bool) -> None:
    place = SubmissionPlace(make_view_batch([SUBMISSION.leaf()], [RECORD]), 0)
    other = ENTRY.model_copy(update={"submission": replace(SUBMISSION, units=SUBMISSION.units + 1)})
    async with Sources(["http://room.example"], transport=shows(other)) as sources:
        with pytest.raises(ApiError, match=r"shows (an)?other submission"):
            await find_entry(place, make_case() if has_case else None, sources)


async def test_submission_that_its_worker_committed_needs_no_source() -> None:
    batch = make_view_batch([SUBMISSION.leaf()], [RECORD])
    assert ENTRY.ticket
    assert ENTRY.ticket_signature
    batch.work = LeasedWork(SUBMISSION, ENTRY.signature, ENTRY.ticket, ENTRY.ticket_signature)
    async with Sources() as nobody:
        found, siblings = await find_entry(SubmissionPlace(batch, 0), None, nobody)
    assert siblings == ()
    assert found == ENTRY.model_copy(update={"received_at": batch.committed_at})


# Where a case stands


COMMITTED: dict[str, Any] = {"jurors": (ME, PEER), "commitments": {ME: LEAF, PEER: LEAF}}
VOTED = COMMITTED | {"votes": {ME: ACCEPTED.number, PEER: ACCEPTED.number}}


@pytest.mark.parametrize(
    ("changes", "seconds", "expected"),
    [
        ({}, 39, ("drawing", OPENED_AT + 40)),
        ({}, 40, ("no jury", OPENED_AT + 120)),
        ({"jurors": (ME,)}, 79, ("committing", OPENED_AT + 80)),
        ({"jurors": (ME,)}, 80, ("revealing", OPENED_AT + 120)),
        (COMMITTED, 1, ("revealing", OPENED_AT + 120)),
        (VOTED, 1, ("to settle", None)),
        ({}, 120, ("to settle", None)),
        (OVERTURNED, 1, ("overturned", None)),
        (UPHELD, 1, ("upheld", None)),
    ],
)
def test_phase_ends_when_the_court_says(
    changes: dict[str, Any], seconds: int, expected: tuple[str, int | None]
) -> None:
    assert phase_of(make_case(**changes), TERMS, OPENED_AT + seconds) == expected


def make_world(case: Any) -> Any:
    """A view of a case whose outcome was signed by STRANGER."""
    batch = make_view_batch([SUBMISSION.leaf()], [RECORD])
    batch.signers = 0b100
    run = SimpleNamespace(seats={ME: 1, PEER: 2, STRANGER: 4})
    return SimpleNamespace(cases={LEAF: case}, batches={1: batch}, runs={RUN: run}, slashes=[])


def test_cases_are_listed_by_run_for_programs_and_people() -> None:
    view = make_world(make_case(**COMMITTED | {"votes": {ME: ACCEPTED.number}}))
    assert describe_cases(view, 8, TERMS, OPENED_AT) == []  # type: ignore[arg-type]
    [case] = describe_cases(view, RUN, TERMS, OPENED_AT)
    assert case == {
        "case": f"0x{LEAF.hex()}",
        "run": RUN,
        "batch": 1,
        "position": 0,
        "summons": False,
        "recorded": "rejected for schema",
        "claims": [{"claimant": STRANGER, "ruling": "accepted"}],
        "phase": "revealing",
        "bench": 5,
        "jurors": [ME, PEER],
        "committed": 2,
        "votes": {ME: "accepted"},
        "deadline": OPENED_AT + 120,
        "ending": None,
        "next": "waiting for 1 juror to reveal what they voted, "
        "until 1970-01-01 01:25:20 UTC at the latest",
        "to_fine": [],
        "fees_due": [],
    }
    row = make_row(case)
    assert (row[0], row[2:6]) == (
        "1:0",
        ["rejected for schema", "accepted", "revealing", "2/2 of 5"],
    )


def test_summons_has_nothing_recorded_and_nobody_claims() -> None:
    silent = ClaimView(STRANGER, 0, SUBMISSION, b"", (), "0x")
    view = make_world(make_case(recorded=0, claims=[silent]))
    [case] = describe_cases(view, None, TERMS, OPENED_AT)
    assert (case["recorded"], case["claims"]) == (None, [])
    assert make_row(case)[2:4] == ["unjudged", "summons"]


def test_ruling_that_nobody_knows_is_shown_by_its_number() -> None:
    assert ruling_words(0xFF00) == "ruling 65280"
    assert ruling_words(0) == "not seen"


# What is left to do

REUSED = Ruling(Verdict.REJECTED, Reason.SLOT_REUSED).number
SCHEMA = Ruling(Verdict.REJECTED, Reason.SCHEMA).number


def closed(**changes: Any) -> Any:
    return make_case(**{"jurors": (ME, PEER), "votes": {ME: ACCEPTED.number}} | changes)


def test_overturned_case_lets_anybody_fine_signers_and_absent_jurors_once() -> None:
    case = closed(**OVERTURNED)
    view = make_world(case)
    signer, absent = penalties_of(view, case, TERMS)
    assert signer == Penalty(Offence.WRONG_VERDICT, STRANGER)
    assert absent == Penalty(Offence.ABSENT_JUROR, PEER)
    fined = SimpleNamespace(offence=signer.offence, owner=STRANGER, tag=1)
    view.slashes = [fined]
    assert penalties_of(view, case, TERMS) == [absent]
    fined.tag = 2
    assert penalties_of(view, case, TERMS) == [signer, absent]


@pytest.mark.parametrize(
    "changes",
    [
        UPHELD,
        OVERTURNED | {"recorded": Ruling(Verdict.REJECTED, Reason.FILE_UNAVAILABLE).number},
        OVERTURNED | {"recorded": Ruling(Verdict.REJECTED, Reason.UNKNOWN_TICKET).number},
        OVERTURNED | {"ruling": REUSED, "votes": {ME: REUSED}},
        OVERTURNED | {"recorded": 0},
    ],
    ids=["upheld", "unavailable", "no ticket shown", "other batch shown", "unjudged"],
)
def test_signers_are_spared(changes: dict[str, Any]) -> None:
    case = closed(**changes)
    assert penalties_of(make_world(case), case, TERMS) == [Penalty(Offence.ABSENT_JUROR, PEER)]


@pytest.mark.parametrize(
    ("votes", "is_spared"),
    [
        ([ACCEPTED.number] * 3 + [REUSED] * 2, False),
        ([REUSED] * 2 + [ACCEPTED.number] * 2 + [SCHEMA] * 2, False),
        ([ACCEPTED.number] * 2 + [REUSED] * 2 + [SCHEMA], True),
    ],
    ids=["others", "half", "most"],
)
def test_only_votes_for_what_stands_spare_signers(votes: list[int], is_spared: bool) -> None:
    ruling = ACCEPTED.number if votes.count(ACCEPTED.number) == 3 else REUSED
    assert spares_signers(FRAUD.number, ruling, votes) is is_spared


@pytest.mark.parametrize(
    ("late_s", "proof", "is_fined"), [(-1, (), True), (0, (), False), (-1, (LEAF,), False)]
)
def test_signers_are_fined_only_where_a_claim_proved_the_work_before_votes(
    late_s: int, proof: tuple[Hash32, ...], is_fined: bool
) -> None:
    case = closed(**OVERTURNED)
    half_at = case.opened_at + TERMS.commit_time // 2
    case.claims = [replace(case.claims[0], claimed_at=half_at + late_s, proof=proof)]
    fined = [each.offence for each in penalties_of(make_world(case), case, TERMS)]
    assert fined == [Offence.WRONG_VERDICT] * is_fined + [Offence.ABSENT_JUROR]


def test_open_case_lets_nobody_be_fined_or_paid() -> None:
    case = closed(fee_wei=5)
    assert penalties_of(make_world(case), case, TERMS) == []
    assert fees_due(case) == []


def test_jurors_of_the_ruling_that_prevailed_are_paid_once() -> None:
    votes = {ME: ACCEPTED.number, PEER: ACCEPTED.number, STRANGER: FRAUD.number}
    case = closed(**OVERTURNED | {"votes": votes, "fee_wei": 5})
    assert fees_due(case) == [ME, PEER]
    case.collected.add(ME)
    assert fees_due(case) == [PEER]
    assert fees_due(closed(**OVERTURNED | {"votes": votes})) == []


@pytest.mark.parametrize(
    ("changes", "seconds", "remaining", "says"),
    [
        ({}, 0, 0, "a block of the chain draws the jurors from the network's bench, until"),
        ({}, 41, 0, "nobody was drawn: what is recorded stands, and bonds go back"),
        ({"jurors": (ME,)}, 1, 0, "waiting for 1 juror to check the work and commit, until"),
        ({}, 121, 0, "muster dispute settle 1:0 --keystore FILE"),
        (UPHELD, 1, 0, "nothing: the case is over"),
        (UPHELD, 1, 2, "2 accounts can be fined for it"),
        (UPHELD, 1, 2, "muster dispute settle 1:0"),
    ],
)
def test_next_step_names_who_acts_or_the_command(
    changes: dict[str, Any], seconds: int, remaining: int, says: str
) -> None:
    case = make_case(**changes)
    assert says in next_of(case, TERMS, OPENED_AT + seconds, remaining=remaining)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (OVERTURNED | {"returned_wei": {0: 10 * TOKEN}}, "claimed accepted, 10 tokens back"),
        (UPHELD, "claimed accepted, its bond lost"),
        (OVERTURNED | {"recorded": 0}, "the work is accepted"),
        (UPHELD | {"recorded": 0}, "the work is unjudged, and void"),
    ],
)
def test_ending_says_what_became_of_the_bond(changes: dict[str, Any], says: str) -> None:
    assert says in ending_of(make_case(**changes))


# Settling, on a court in memory


class Court:
    """Closes a case, fines and pays; refuses the calls that a test names."""

    def __init__(self, view: Any, refuses: dict[str, str] | None = None) -> None:
        self.view, self.refuses, self.sent = view, refuses or {}, 0

    @property
    def court(self) -> Court:
        return self

    async def terms(self) -> Any:
        return TERMS

    async def read(self) -> Any:
        return self.view

    def _send(self, call: str) -> Any:
        if call in self.refuses:
            raise ContractRevert(self.refuses[call])
        self.sent += 1
        return SimpleNamespace(tx_hash=f"0x{self.sent}")

    async def settle(self, _proof: Any) -> Any:
        receipt = self._send("settle")
        self.view.cases[LEAF].status = CaseStatus.OVERTURNED
        self.view.cases[LEAF].fee_wei = 5
        return receipt

    async def fine_signer(self, _proof: Any, _signer: str) -> Any:
        return self._send("fine_signer")

    async def fine_absent_juror(self, case_id: Any, _juror: str) -> Any:
        assert case_id == LEAF
        return self._send("fine_absent_juror")

    async def collect_fee(self, _case_id: Any, _juror: str) -> Any:
        return self._send("collect_fee")


async def settled_by(court: Any) -> Settled:
    return await settle(court, court.read, LEAF)


async def test_settling_closes_fines_and_pays() -> None:
    settled = await settled_by(Court(make_world(closed())))
    assert settled == Settled("0x1", {STRANGER: "0x2", PEER: "0x3"}, {ME: "0x4"})
    assert describe_settled(settled) == [
        "settled the case, 0x1",
        f"fined {STRANGER}, 0x2",
        f"fined {PEER}, 0x3",
        f"paid juror {ME}, 0x4",
    ]


async def test_who_settles_second_has_nothing_left_to_do() -> None:
    calls = ("fine_signer", "fine_absent_juror", "collect_fee")
    court = Court(
        make_world(closed(**OVERTURNED, fee_wei=5)), dict.fromkeys(calls, "CourtNothingDue")
    )
    settled = await settled_by(court)
    assert settled == Settled()
    assert describe_settled(settled)[0].startswith("nothing was left to do")


async def test_fine_that_is_refused_is_said_and_the_rest_is_done() -> None:
    court = Court(make_world(closed()), {"fine_signer": "VaultNothingToSlash"})
    settled = await settled_by(court)
    assert "VaultNothingToSlash" in settled.refused[STRANGER]
    assert settled.fined == {PEER: "0x2"}
    assert any(line.startswith(f"could not fine {STRANGER}") for line in describe_settled(settled))


async def test_case_whose_jury_has_time_is_not_settled() -> None:
    court = Court(make_world(closed()), {"settle": "CourtPhaseOpen"})
    with pytest.raises(ContractRevert) as caught:
        await settled_by(court)
    assert caught.value.hint == "the jury has time left: muster dispute list shows until when"
    assert court.sent == 0


@pytest.mark.parametrize("tail", ["/path", "/?a=b", "#a"])
async def test_source_that_no_juror_asks_is_refused_before_a_bond_is_paid(tail: str) -> None:
    nothing: Any = None
    options = {"source": (f"http://room.example{tail}",)}
    with pytest.raises(ConfigError, match="it is more than a scheme, a host and a port"):
        await dispute._claim(b"", nothing, nothing, nothing, options)


@pytest.mark.parametrize("are_ours", [False, True])
async def test_no_file_is_given_to_a_relay_in_our_network_that_a_stranger_names(
    are_ours: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dispute, "ROOM_PAUSE_S", 0.0)
    reached: list[bytes] = []

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.append(method := (await reader.readuntil(b"\r\n\r\n")).split()[0])
        if method == b"PUT":
            await reader.read(1 << 16)
        status = b"201 Created" if method == b"PUT" else b"404 Not Found"
        writer.write(b"HTTP/1.1 %s\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % status)
        writer.close()

    async with await asyncio.start_server(take, "127.0.0.1", 0) as server:
        relay = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        entry = make_entry(make_ticket(), SUBMISSION)
        assert await dispute._deposit([relay], b"data", entry, are_ours=are_ours) is are_ours
    assert reached == ([b"GET", b"PUT"] * 2 if are_ours else [])
    assert ("name it with --relay" in capsys.readouterr().err) is not are_ours
