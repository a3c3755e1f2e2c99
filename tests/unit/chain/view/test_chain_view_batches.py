import gc

import pytest
from chain_fakes import History
from chain_histories import (
    ACCEPTED,
    CLAIMANT,
    COMMITTED,
    CONFIG,
    FRAUD_FOUND,
    LEAF,
    OVERTURNED,
    OWNER,
    RECORDS,
    RUN,
    UPHELD,
    VALIDATORS,
    WORKER,
    begun,
    claim,
    commit,
    dispute,
    full,
    open_case,
    outcome,
    post,
    revealed,
    seat_jurors,
    state,
    viewed,
)
from hypothesis import given, strategies as st

from muster.chain import Batch, BatchStatus, LeasedWork, StreamItem
from muster.chain.conversion import lenient_reason
from muster.chain.structs import ZERO_ADDRESS
from muster.chain.view_parts import unpack_leniently
from muster.protocol.encoding import keccak
from muster.protocol.errors import EncodingError
from muster.protocol.ids import Hash32, PolicyVersion, RunId, Step
from muster.protocol.jury import Ruling, summons_of
from muster.protocol.merkle import merkle_root, verify_merkle_proof
from muster.protocol.messages import (
    OutcomeRecord,
    Reason,
    Submission,
    Ticket,
    Verdict,
    pack_records,
)


def test_batch_has_no_outcomes_until_posted() -> None:
    batch = viewed(begun()).batches[1]
    assert (batch.run_id, batch.count, batch.units) == (RUN, 3, 300)
    assert (batch.records, batch.posted_at, batch.posted_tx) == (None, None, None)


def test_posted_batch_holds_everything_an_auditor_needs(history: History) -> None:
    post(history, 1, RECORDS)
    batch = viewed(history).batches[1]
    assert list(batch.records or ()) == RECORDS
    assert batch.records_hash == keccak(pack_records(RECORDS))
    assert batch.signatures == [b"a" * 65, b"b" * 65]
    assert batch.outcomes_root == keccak(b"outcomes")
    event = history.events[-1]
    assert (batch.posted_at, batch.posted_tx) == (event.args["posted_at"], event.tx_hash)
    times = batch.committed_at, batch.posted_at
    judged = BatchStatus.JUDGED
    header = Batch(1, RUN, batch.root, keccak(b"outcomes"), 3, 300, 10, 1, *times, 3, judged)
    assert batch.header() == header


def test_outcomes_are_proven_one_by_one_and_together(history: History) -> None:
    post(history, 1, RECORDS)
    batch = viewed(history).batches[1]
    root = merkle_root(batch.leaves())
    for position, record in enumerate(RECORDS):
        proof = batch.prove(position)
        assert (proof.batch, proof.record) == (batch.header(), record.to_bytes())
        assert verify_merkle_proof(record.leaf(1, position), proof.proof, root)
    claim = batch.claim([0, 2])
    assert claim.records == RECORDS[0].to_bytes() + RECORDS[2].to_bytes()
    assert list(claim.siblings) == [batch.leaves()[1]]


def work_on(index: int, units: int = 100) -> LeasedWork:
    submission = Submission(RUN, WORKER, Step(1), index, PolicyVersion(0), keccak(b"f"), 8, units)
    root = keccak(b"policy")
    ticket = Ticket(RUN, WORKER, Step(1), index, PolicyVersion(0), root, keccak(b"beacon"), 9)
    return LeasedWork(submission, b"s", ticket, b"t")


def test_direct_submission_is_kept_with_all_that_proves_it(history: History) -> None:
    work = work_on(9)
    commit(history, 2, 1)
    said = {"batch_id": 2, "worker": WORKER, "work": work, "sources": ("http://file",)}
    history.add("DirectlySubmitted", same_block=True, **said)
    view = viewed(history)
    batch = view.batches[2]
    assert (batch.work, batch.direct, batch.sources) == (work, work.submission, ("http://file",))
    assert list(view.file_hashes(batch)) == [keccak(b"f")]
    assert list(view.file_hashes(view.batches[1])) == []


def withhold(history: History) -> None:
    history.add(
        "BatchWithheld",
        batch_id=1,
        posted_at=1001 + history.block,
        signers=0b101,
        signatures=b"a" * 65 + b"c" * 65,
    )


def test_batch_is_due_at_its_deadline_or_when_it_is_withheld(history: History) -> None:
    batch = viewed(history).batches[1]
    assert batch.due_at(60) == batch.committed_at + 60
    withhold(history)
    batch = viewed(history).batches[1]
    assert batch.due_at(60) == history.events[-1].block_timestamp == batch.posted_at
    header = batch.header()
    assert (header.status, header.signers) == (BatchStatus.WITHHELD, 0b101)
    assert header.root == batch.root


@pytest.mark.parametrize("withheld", [False, True])
def test_split_off_work_leaves_as_many_units_less(withheld: bool) -> None:
    history, work = begun(), work_on(0, units=120)
    if withheld:
        withhold(history)
    before = CONFIG.orchestrator
    new = {"old_orchestrator": before, "new_orchestrator": OWNER}
    history.add("OrchestratorRotated", run_id=RUN, **new)
    commit(history, 2, 1)
    said = {"batch_id": 2, "from_batch_id": 1, "worker": WORKER, "work": work, "sources": ()}
    history.add("BatchSplit", same_block=True, **said)
    batches = viewed(history).batches
    left, taken = batches[1], batches[2]
    assert (left.units, left.split_off) == (180, {2: work.submission})
    assert (taken.split_from, taken.work, taken.status) == (1, work, left.status)
    assert (taken.signers, taken.posted_at) == (left.signers, left.posted_at)
    assert (taken.orchestrator, taken.work_block) == (before, left.block_number)
    assert left.work_block == left.block_number < taken.block_number
    assert taken.tx_hash != left.tx_hash


def brought(history: History, batch_id: int, index: int, source: int | None = None) -> Hash32:
    """Add a worker's own batch, direct or split off from another; return its leaf."""
    work = work_on(index)
    commit(history, batch_id, 1, root=work.submission.leaf())
    said = {"batch_id": batch_id, "worker": WORKER, "work": work, "sources": ()}
    name = "DirectlySubmitted" if source is None else "BatchSplit"
    origin = {} if source is None else {"from_batch_id": source}
    history.add(name, same_block=True, **said, **origin)
    return work.submission.leaf()


@given(st.integers(0, 40))
def test_own_work_and_the_newest_batch_are_what_a_search_finds_also_after_a_rewind(
    block: int,
) -> None:
    history = begun()
    leaves = [brought(history, 2, 5), brought(history, 3, 6, source=1)]
    commit(history, 4, 1)
    view = viewed(history)
    own = view.own_work[RUN, WORKER]
    assert (list(own), [own[leaf].batch_id for leaf in leaves]) == (leaves, [2, 3])
    assert view.newest_batch == {RUN: 4}
    view.rewind(block)
    for each in [event for event in history.events if event.block_number > block][:2]:
        view.apply(each)
    batches = view.batches.values()
    assert view.newest_batch == {batch.run_id: batch.batch_id for batch in batches}
    found = {batch.root: batch for batch in batches if batch.direct is not None}
    assert view.own_work.get((RUN, WORKER), {}) == found
    for event in history.events:
        view.apply(event)
    assert state(view) == state(viewed(history))


def test_what_validators_show_is_kept_by_its_records() -> None:
    history, (first, second, third) = begun(), VALIDATORS
    packed = pack_records(RECORDS)
    agreed, other = keccak(packed), keccak(b"other records")
    for validator, shown, records in (
        (first, agreed, packed),
        (second, agreed, b""),
        (third, other, b""),
    ):
        history.add(
            "OutcomesShown",
            batch_id=1,
            validator=validator,
            batch_root=keccak(b"batch"),
            records_hash=shown,
            records=records,
            signature=validator.encode(),
        )
    batch = viewed(history).batches[1]
    assert batch.shown == {
        agreed: {first: first.encode(), second: second.encode()},
        other: {third: third.encode()},
    }
    assert batch.shown_records == {agreed: packed}


def test_void_batch_is_no_more_and_what_was_set_aside_is_free(history: History) -> None:
    assert not viewed(history).batches[1].is_void
    history.add("BatchVoided", batch_id=1, run_id=RUN)
    history.add("RewardFreed", same_block=True, run_id=RUN, amount=3000)
    view = viewed(history)
    assert view.batches[1].is_void
    assert (view.runs[RUN].reserved_wei, view.runs[RUN].available_wei) == (0, 5000)
    assert view.contradictions == []


def test_training_stream_is_in_order_of_posting(history: History) -> None:
    commit(history, 2, 2)
    post(history, 2, [outcome(1, 5), outcome(1, 6)])
    post(history, 1, RECORDS)
    stream = viewed(history).training_stream(RUN)
    assert [(i.batch_id, i.position) for i in stream] == [(2, 0), (2, 1), (1, 0)]
    assert [i.position_in_stream for i in stream] == [0, 1, 2]
    assert stream[2].record == RECORDS[0]


def test_training_stream_of_an_unknown_run_is_empty() -> None:
    assert viewed(begun()).training_stream(RunId(9)) == []


def test_training_stream_is_the_callers_own() -> None:
    view = viewed(full())
    view.training_stream(RUN).clear()
    assert len(view.training_stream(RUN)) == 1


def held_records() -> int:
    return sum(type(each) is OutcomeRecord for each in gc.get_objects())


def test_outcomes_are_bytes_until_somebody_reads_their_run(history: History) -> None:
    history.add("RunCreated", run_id=2, owner=CLAIMANT, config=CONFIG)
    history.add("BatchCommitted", batch_id=2, run_id=2, **{**COMMITTED, "count": 64})
    post(history, 2, [outcome(1, 9)] * 64)
    post(history, 1, RECORDS)
    before, view = held_records(), viewed(history)
    assert (held_records() - before, len(view.batches[2].records or ())) == (0, 64)
    assert view.batches[2].records[63] == outcome(1, 9)  # type: ignore[index]
    assert [item.record for item in view.training_stream(RUN)] == RECORDS[:1]
    assert list(view.batches[1].records or ()) == RECORDS
    assert held_records() - before == len(RECORDS)
    view.rewind(history.events[-2].block_number)
    assert (held_records() - before, view.training_stream(RUN)) == (0, [])


def test_training_stream_goes_on_where_it_was_read(history: History) -> None:
    post(history, 1, RECORDS)
    view = viewed(history)
    stream = view.runs[RUN].stream
    read = list(stream)
    commit(history, 2, 1)
    post(history, 2, [outcome(1, 5)])
    for event in history.events:
        view.apply(event)
    assert view.runs[RUN].stream is stream
    assert stream[:1] == read
    assert stream[1:] == [StreamItem(1, 2, 0, outcome(1, 5))]


@pytest.mark.parametrize("data", [b"", bytes(55), bytes(56), b"\xff" * 56])
def test_what_the_ledger_cannot_have_accepted_is_no_outcome(history: History, data: bytes) -> None:
    post(history, 1, RECORDS)
    history.events[-1].args["records"] = data
    view = viewed(history)
    assert (view.batches[1].records, view.training_stream(RUN)) == (None, [])
    assert len(view.contradictions) == 1


def test_reason_unknown_to_us_keeps_the_records_bytes() -> None:
    packed = bytearray(pack_records(RECORDS))
    packed[-1] = 99
    records = unpack_leniently(bytes(packed))
    assert b"".join(record.to_bytes() for record in records) == bytes(packed)
    assert (records[2].reason, records[2].reason.name) == (99, "UNKNOWN_99")
    assert records[:2] == RECORDS[:2]


@pytest.mark.parametrize("reason", list(Reason))
def test_known_reasons_stay_themselves(reason: Reason) -> None:
    assert lenient_reason(int(reason)) is reason


@pytest.mark.parametrize("data", [b"", bytes(55), bytes(57)])
def test_partial_records_are_refused(data: bytes) -> None:
    with pytest.raises(EncodingError):
        unpack_leniently(data)


def test_overturned_case_changes_the_verdict_that_stands(history: History) -> None:
    post(history, 1, RECORDS)
    dispute(history, [ACCEPTED, FRAUD_FOUND, ACCEPTED], status=OVERTURNED, ruling=ACCEPTED)
    view = viewed(history)
    case = view.cases[LEAF]
    assert (case.closed, case.overturned, case.ruling) == (True, True, ACCEPTED)
    assert list(case.votes.values()) == [ACCEPTED, FRAUD_FOUND, ACCEPTED]
    assert (case.reporter, case.fee_wei, case.returned_wei) == (CLAIMANT, 3, {0: 10})
    assert view.standing_verdict(1, 1) is Verdict.ACCEPTED
    assert view.standing_verdict(1, 0) is Verdict.ACCEPTED
    assert view.contradictions == []


UNAVAILABLE = Ruling(Verdict.INCOMPLETE, Reason.FILE_UNAVAILABLE).number
OTHER_EXACT = Ruling(Verdict.FRAUD, Reason.WRONG_PROBLEM).number


@pytest.mark.parametrize(
    "votes",
    [
        [],
        [0, 0, ACCEPTED],
        [ACCEPTED, FRAUD_FOUND],
        [FRAUD_FOUND, FRAUD_FOUND, ACCEPTED],
        [UNAVAILABLE, UNAVAILABLE, ACCEPTED],
        [OTHER_EXACT, OTHER_EXACT, ACCEPTED],
    ],
    ids=["silence", "nothing seen", "tie", "confirmed", "not to be had", "same consequences"],
)
def test_record_stands_unless_jurors_find_otherwise(history: History, votes: list[int]) -> None:
    post(history, 1, RECORDS)
    dispute(history, votes, status=UPHELD, ruling=FRAUD_FOUND)
    view = viewed(history)
    assert view.standing_verdict(1, 1) is Verdict.FRAUD
    assert view.contradictions == []


@pytest.mark.parametrize(
    "ruling",
    [ACCEPTED | Reason.FILE_UNAVAILABLE, Verdict.REJECTED << 8 | 99],
    ids=["accepted, so it was had", "for a reason that nobody knows"],
)
def test_rulings_stand_whatever_reason_jurors_name(history: History, ruling: int) -> None:
    post(history, 1, RECORDS)
    dispute(history, [ruling, ruling, FRAUD_FOUND], status=OVERTURNED, ruling=ruling)
    view = viewed(history)
    assert view.standing_verdict(1, 1) is Verdict(ruling >> 8)
    assert view.contradictions == []


def test_summons_is_a_case_without_a_recorded_ruling() -> None:
    history, case_id = begun(), summons_of(1)
    jurors = seat_jurors(history, 3)
    open_case(history, case_id, 0, 3)
    claim(history, WORKER, 0, case_id)
    postponed = {"case_id": case_id, "draw_block": 77}
    history.add("DrawPostponed", **postponed)
    case = viewed(history).cases[case_id]
    assert (case.is_summons, case.closed, case.draw_block) == (True, False, 77)
    (made,) = case.claims
    assert (made.claimant, made.ruling, made.sources) == (WORKER, 0, ("http://file",))
    history.add("JuryDrawn", case_id=case_id, jurors=tuple(jurors))
    for juror in jurors[:2]:
        secret = {"juror": juror, "commitment": keccak(b"vote")}
        history.add("VoteCommitted", case_id=case_id, **secret)
        history.add("VoteRevealed", **revealed(juror, ACCEPTED, case_id))
    settled = {"claimant": WORKER, "right": True, "returned": 10}
    history.add("ClaimSettled", case_id=case_id, **settled)
    closed = {"status": OVERTURNED, "ruling": ACCEPTED, "reporter": ZERO_ADDRESS, "fee": 3}
    history.add("CaseClosed", same_block=True, case_id=case_id, **closed)
    collected = {"juror": jurors[0], "amount": 3}
    history.add("FeeCollected", case_id=case_id, **collected)
    history.add("CourtPaid", run_id=RUN, amount=6)
    fined = {"account": jurors[2], "amount": 5}
    history.add("Fined", case_id=case_id, **fined)
    view = viewed(history)
    case = view.cases[case_id]
    assert (case.collected, case.fined) == ({jurors[0]}, {jurors[2]})
    assert (view.runs[RUN].court_wei, view.runs[RUN].available_wei) == (6, 1994)
    assert view.contradictions == []


@pytest.mark.parametrize(("batch_id", "position"), [(9, 0), (1, 3), (1, -1)])
def test_no_verdict_stands_where_there_is_no_outcome(batch_id: int, position: int) -> None:
    assert viewed(full()).standing_verdict(batch_id, position) is None
