"""What any account can send when the orchestrator does not: each step, and why there is none."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from worlds.cases import (
    ME,
    OPENED_AT,
    RECORD,
    STRANGER,
    SUBMISSION,
    TERMS,
    make_case,
    make_view_batch,
)
from worlds.client_world import RUN, make_entry, make_ticket

from muster.api import BatchEntry
from muster.chain import (
    BatchStatus,
    CaseStatus,
    ChainView,
    ClaimView,
    LeasedWork,
    Offence,
    PauseCause,
    PauseView,
    RunConfig,
    RunTerms,
    RunView,
    SlashState,
    SlashView,
    SubmissionPlace,
    WorkerView,
)
from muster.chain.doubles import tag_of
from muster.client.chain_facts import Times
from muster.client.disputes.cases import describe_case
from muster.client.disputes.unsettled import (
    OpenStep,
    Unsettled,
    find_work,
    send,
    told,
    unsettled,
)
from muster.client.sources import Sources
from muster.protocol.encoding import hex0x
from muster.protocol.errors import ApiError, ConfigError, ContractRevert
from muster.protocol.jury import Ruling, summons_of
from muster.protocol.merkle import batch_proof
from muster.protocol.messages import OutcomeRecord, Reason, Verdict

TIMES = Times(outcome_deadline_s=800, appeal_s=400, challenge_window_s=300, court=TERMS)
CONVICT = Ruling(Verdict.FRAUD, Reason.WRONG_SEED)
STATISTICAL = Ruling(Verdict.FRAUD, Reason.TOPLOC_MISMATCH)
FRAUD = replace(RECORD, verdict=CONVICT.verdict, reason=CONVICT.reason)
POSTED_AT = 4_900
CLOSES_AT = POSTED_AT + TIMES.challenge_window_s
HALF_AT = OPENED_AT + TERMS.commit_time // 2
CONVICTED: dict[str, Any] = {"status": CaseStatus.OVERTURNED, "ruling": CONVICT.number}


def judged(record: OutcomeRecord = FRAUD) -> ChainView:
    """A view of one judged submission, whose worker is number 5."""
    view = ChainView()
    batch = make_view_batch([SUBMISSION.leaf()], [record])
    batch.posted_at, batch.status = POSTED_AT, BatchStatus.JUDGED
    view.batches[1] = batch
    view.worker_by_id[5] = WorkerView(SUBMISSION.worker, 5)
    terms, nothing = RunTerms(1, 100_000, 250_000, 2), b""
    config = RunConfig(ME, ME, *[nothing] * 4, terms, ())  # type: ignore[arg-type]
    view.runs[RUN] = RunView(RUN, ME, config, [terms], set(), {}, [], "0x")
    return view


def unjudged(committed_at: int = 1) -> ChainView:
    view = judged()
    batch = view.batches[1]
    batch.records, batch.posted_at, batch.status = None, None, BatchStatus.COMMITTED
    batch.committed_at = committed_at
    return view


def place_in(view: ChainView) -> SubmissionPlace:
    return SubmissionPlace(view.batches[1], 0)


def found(view: ChainView, now: int = CLOSES_AT) -> Unsettled | None:
    return unsettled(view, place_in(view), now, TIMES)


def step(view: ChainView, now: int = CLOSES_AT) -> OpenStep | None:
    left = found(view, now)
    return None if left is None else left.step


def words(view: ChainView, now: int = CLOSES_AT) -> str:
    left = found(view, now)
    assert left is not None
    assert left.step is None
    return left.words


def slash(view: ChainView, **changes: Any) -> None:
    """Take the stake of the one submission."""
    values: dict[str, Any] = {
        "run_id": RUN,
        "owner": SUBMISSION.worker,
        "escrow_id": b"",
        "offence": Offence.EXACT_FRAUD,
        "tag": tag_of(SUBMISSION),
        "amount_wei": 5,
        "tx_hash": "0xslash",
        "block_number": 60,
        "stake_before": (20, 0),
        "taken": (5, 0),
        "batch_id": 1,
        "position": 0,
    }
    view.slashes.append(SlashView(**values | changes))


def dispute(view: ChainView, record: OutcomeRecord, **changes: Any) -> None:
    leaf = record.leaf(1, 0)
    recorded = Ruling(record.verdict, record.reason).number
    view.cases[leaf] = make_case(case_id=leaf, recorded=recorded, **changes)


def pause(view: ChainView, began_at: int, until: int) -> None:
    cause = PauseCause.CORRELATED_FAILURES
    view.runs[RUN].pauses.append(PauseView(ME, cause, 0, b"", began_at, until, "0x"))  # type: ignore[arg-type]


# A fraud is executed


def test_recorded_fraud_is_executed_at_once_and_without_a_case() -> None:
    assert step(judged(), POSTED_AT) is OpenStep.EXECUTE


@pytest.mark.parametrize(
    "ruling",
    [Ruling(Verdict.ACCEPTED, Reason.NONE), Ruling(Verdict.REJECTED, Reason.SCHEMA)],
)
def test_what_is_no_fraud_needs_nothing(ruling: Ruling) -> None:
    assert found(judged(replace(RECORD, verdict=ruling.verdict, reason=ruling.reason))) is None


def test_fraud_that_a_jury_found_is_executed() -> None:
    view = judged(RECORD)
    dispute(view, RECORD, **CONVICTED)
    assert step(view) is OpenStep.EXECUTE


def test_fraud_that_only_a_claim_says_is_not_executed() -> None:
    view = judged(RECORD)
    dispute(view, RECORD)
    assert found(view) is None


def test_fraud_that_a_jury_overturned_is_not_executed() -> None:
    view = judged()
    accepted = Ruling(Verdict.ACCEPTED, Reason.NONE).number
    dispute(view, FRAUD, status=CaseStatus.OVERTURNED, ruling=accepted)
    assert found(view) is None


def test_recorded_fraud_is_executed_while_a_case_about_it_is_open() -> None:
    view = judged()
    dispute(view, FRAUD)
    assert step(view) is OpenStep.EXECUTE


@pytest.mark.parametrize(
    ("claimed_at", "units", "is_proven"),
    [(HALF_AT - 1, 0, True), (HALF_AT, 0, False), (0, 1, False)],
)
def test_fraud_that_a_jury_found_is_executed_only_if_the_work_was_proven_in_time(
    claimed_at: int, units: int, is_proven: bool
) -> None:
    view = judged(RECORD)
    shown = replace(SUBMISSION, units=SUBMISSION.units + units)
    claim = ClaimView(STRANGER, CONVICT.number, shown, b"", (), "0x", (), claimed_at)
    dispute(view, RECORD, claims=[claim], **CONVICTED)
    assert step(view) is (OpenStep.EXECUTE if is_proven else OpenStep.PROVE)
    for case in view.cases.values():
        case.is_proven = True
    assert step(view) is OpenStep.EXECUTE


@pytest.mark.parametrize(
    ("recorded", "is_due"), [(Reason.SCHEMA, True), (Reason.FILE_UNAVAILABLE, False)]
)
def test_a_proof_is_due_where_signers_can_be_fined(recorded: Reason, is_due: bool) -> None:
    record = replace(RECORD, verdict=Verdict.REJECTED, reason=recorded)
    view = judged(record)
    late = ClaimView(STRANGER, 1 << 8, SUBMISSION, b"", (), "0x", (), HALF_AT)
    changes = {"status": CaseStatus.OVERTURNED, "ruling": 1 << 8, "claims": [late]}
    dispute(view, record, **changes)
    assert found(view) == (Unsettled(OpenStep.PROVE) if is_due else None)
    [case] = view.cases.values()
    next_ = describe_case(view, case, TERMS, CLOSES_AT)["next"]
    assert ("until it is proven what the batch holds" in next_) is is_due


def test_fraud_is_executed_only_after_a_pause() -> None:
    view = judged()
    pause(view, POSTED_AT, POSTED_AT + 50)
    assert f"slashing in run {RUN} is paused until 1970-01-01 01:22:30" in words(view, 4_949)
    assert step(view, 4_950) is OpenStep.EXECUTE


def test_fraud_is_executed_once() -> None:
    view = judged()
    slash(view, run_id=8)
    slash(view, offence=Offence.DOUBLE_SUBMISSION)
    assert step(view, POSTED_AT) is OpenStep.EXECUTE
    slash(view)
    assert step(view, POSTED_AT) is None


def test_statistical_fraud_is_executed_after_an_exact_one_was_given_back() -> None:
    view = judged()
    slash(view, state=SlashState.RESTORED)
    dispute(view, FRAUD, status=CaseStatus.OVERTURNED, ruling=STATISTICAL.number)
    assert step(view) is OpenStep.EXECUTE


def test_slot_that_cost_stake_in_another_batch_costs_none_again() -> None:
    view = judged()
    slash(view, batch_id=2)
    assert words(view) == "this slot cost its worker stake already, in 0xslash"


def test_case_names_the_command_while_its_fraud_is_not_executed() -> None:
    view = judged(RECORD)
    dispute(view, RECORD, **CONVICTED)
    [case] = view.cases.values()
    next_ = describe_case(view, case, TERMS, CLOSES_AT)["next"]
    assert next_ == (
        "the stake that the fraud costs can be taken; any account may do that: "
        "muster dispute settle 1:0 --keystore FILE"
    )
    slash(view)
    assert describe_case(view, case, TERMS, CLOSES_AT)["next"] == "nothing: the case is over"


# It is finalised


def test_stake_is_held_until_the_window_closes() -> None:
    view = judged()
    slash(view)
    assert words(view, CLOSES_AT - 1).startswith("the stake is held until 1970-01-01 01:26:40 UTC")
    assert step(view, CLOSES_AT) is OpenStep.FINALISE


def test_pause_prolongs_the_window() -> None:
    view = judged()
    slash(view)
    pause(view, POSTED_AT, POSTED_AT + 50)
    assert step(view, CLOSES_AT + 49) is None
    assert step(view, CLOSES_AT + 50) is OpenStep.FINALISE


def test_stake_is_held_while_a_case_is_open() -> None:
    view = judged()
    slash(view)
    dispute(view, FRAUD)
    assert words(view) == "the stake is held until the case about it is closed"
    dispute(view, FRAUD, status=CaseStatus.UPHELD)
    assert step(view) is OpenStep.FINALISE


@pytest.mark.parametrize("state", [SlashState.RELEASED, SlashState.RESTORED])
def test_stake_that_is_no_longer_held_needs_nothing(state: SlashState) -> None:
    view = judged()
    slash(view, state=state)
    assert found(view) == Unsettled()


# A batch that nobody judged


def test_batch_is_void_once_nobody_can_call_judges_any_more() -> None:
    view = unjudged()
    assert words(view, 1_200) == (
        "batch 1 has no outcomes: it can be declared void from 1970-01-01 00:20:01 UTC"
    )
    assert step(view, 1_201) is OpenStep.VOID


def test_batch_in_court_is_void_only_once_the_jury_saw_nothing() -> None:
    view = unjudged()
    view.cases[summons_of(1)] = make_case(case_id=summons_of(1), recorded=0)
    assert words(view) == "jurors of the network judge the batch"
    view.cases[summons_of(1)].status = CaseStatus.UPHELD
    assert step(view) is OpenStep.VOID


def test_void_batch_needs_nothing() -> None:
    view = unjudged()
    view.batches[1].voided_tx = "0x"
    assert found(view) == Unsettled()


# The work

ENTRY = make_entry(make_ticket(), SUBMISSION)
OTHER = make_entry(make_ticket(), replace(SUBMISSION, index=SUBMISSION.index + 1))


def nobody() -> Sources:
    return Sources(transport=httpx.MockTransport(lambda _: httpx.Response(404)))


async def test_work_that_the_chain_shows_needs_no_source() -> None:
    view = judged()
    made = ClaimView(STRANGER, CONVICT.number, SUBMISSION, b"signed", (), "0x")
    async with nobody() as sources:
        shown = await find_work(place_in(view), make_case(claims=[made]), sources)
        assert (shown.submission, shown.node_signature, shown.proof) == (SUBMISSION, b"signed", ())
        assert ENTRY.ticket
        assert ENTRY.ticket_signature
        view.batches[1].work = LeasedWork(
            SUBMISSION, ENTRY.signature, ENTRY.ticket, ENTRY.ticket_signature
        )
        shown = await find_work(place_in(view), None, sources)
        assert (shown.node_signature, shown.proof) == (ENTRY.signature, ())


async def test_a_signature_for_which_nobody_answers_takes_no_stake() -> None:
    view = judged()
    old = ClaimView(STRANGER, CONVICT.number, SUBMISSION, b"old key", (), "0x")
    made = replace(old, node_signature=b"signed")
    batch = view.batches[1]
    batch.root, batch.count = SUBMISSION.leaf(), 1
    async with nobody() as sources:
        find = partial(find_work, place_in(view), sources=sources, is_answered=made.__eq__)
        assert (await find(make_case(claims=[old, made]))).node_signature == b"signed"
        with pytest.raises(ApiError, match="no source shows"):
            await find(make_case(claims=[old]))


def in_a_batch_of_two() -> tuple[SubmissionPlace, list[BatchEntry]]:
    entries = [OTHER, ENTRY]
    leaves = [entry.submission.leaf() for entry in entries]
    return SubmissionPlace(make_view_batch(leaves, [RECORD, FRAUD]), 1), entries


@pytest.mark.parametrize("is_copied", [True, False])
async def test_work_is_proven_from_a_copy_of_its_batch_or_a_source(is_copied: bool) -> None:
    place, entries = in_a_batch_of_two()
    leaves = [entry.submission.leaf() for entry in entries]
    contents = {
        "batch_id": 1,
        "root": hex0x(place.batch.root),
        "count": 2,
        "submissions": [json.loads(entry.model_dump_json()) for entry in entries],
    }
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=contents))
    async with Sources(["http://room.example"], transport=transport) as sources:
        source = nobody() if is_copied else sources
        shown = await find_work(place, None, source, entries if is_copied else None)
    assert shown.submission == SUBMISSION
    assert shown.proof == tuple(batch_proof(leaves, 1))


async def test_copy_of_another_batch_is_refused() -> None:
    place, entries = in_a_batch_of_two()
    async with nobody() as sources:
        for copy in (entries[::-1], entries[:1]):
            with pytest.raises(ConfigError, match="the copy of batch 1 is of another one"):
                await find_work(place, None, sources, copy)


async def test_work_that_nobody_shows_is_missed_with_all_ways_to_name_it() -> None:
    place, _ = in_a_batch_of_two()
    async with nobody() as sources:
        with pytest.raises(ApiError) as caught:
            await find_work(place, make_case(), sources)
    assert all(flag in str(caught.value.hint) for flag in ("--source", "--evidence"))


# Sending


@pytest.mark.parametrize(
    ("error", "is_late"), [("VaultOffenceSettled", True), ("LedgerInvalidSubmission", False)]
)
async def test_who_comes_second_sends_nothing_and_others_are_told_why(
    error: str, is_late: bool
) -> None:
    async def refuse(*_: Any) -> Any:
        raise ContractRevert(error)

    async def find() -> Any:
        return None

    chain: Any = SimpleNamespace(ledger=SimpleNamespace(execute_fraud=refuse))
    if is_late:
        assert await send(chain, OpenStep.EXECUTE, place_in(judged()), find) is None
        return
    with pytest.raises(ContractRevert) as caught:
        await send(chain, OpenStep.EXECUTE, place_in(judged()), find)
    assert "name another one" in str(caught.value.hint)


def test_release_names_the_reporter_only_where_there_is_one() -> None:
    zero = "0x" + 40 * "0"
    args = {"burned": 10**18, "insured": 2 * 10**18, "rewarded": 3 * 10**18, "reporter": ME}
    receipt: Any = SimpleNamespace(
        tx_hash="0x1", event=lambda name: SimpleNamespace(args=args, name=name)
    )
    line = told(OpenStep.FINALISE, place_in(judged()), receipt)
    assert line == (
        f"released the stake: 1 tokens burned, 2 to the insurance, 3 to the reporter {ME}, 0x1"
    )
    args |= {"reporter": zero, "rewarded": 0}
    assert "reporter" not in told(OpenStep.FINALISE, place_in(judged()), receipt)
