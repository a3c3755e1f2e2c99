from __future__ import annotations

import pytest
from chain_histories import (
    LEAF,
    OFFENCE,
    RECORDS,
    RUN,
    WORKER,
    begun,
    commit,
    dispute,
    full,
    outcome,
    post,
    viewed,
)

from muster.chain import Batch
from muster.chain.conversion import lenient_reason
from muster.chain.view_parts import parse_records
from muster.protocol.encoding import keccak
from muster.protocol.errors import EncodingError
from muster.protocol.ids import PolicyVersion, RunId, Step
from muster.protocol.merkle import merkle_root, verify_merkle_proof
from muster.protocol.messages import Reason, Submission, Verdict, pack_records


def test_batch_has_no_outcomes_until_posted() -> None:
    batch = viewed(begun()).batches[1]
    assert (batch.run_id, batch.count, batch.units) == (RUN, 3, 300)
    assert (batch.records, batch.posted_at, batch.posted_tx) == (None, None, None)


def test_posted_batch_holds_everything_an_auditor_needs() -> None:
    history = begun()
    post(history, 1, RECORDS)
    batch = viewed(history).batches[1]
    assert batch.records == RECORDS
    assert batch.records_hash == keccak(pack_records(RECORDS))
    assert batch.signatures == [b"a" * 65, b"b" * 65]
    assert batch.outcomes_root == keccak(b"outcomes")
    event = history.events[-1]
    assert (batch.posted_at, batch.posted_tx) == (event.args["posted_at"], event.tx_hash)
    header = Batch(1, RUN, keccak(b"outcomes"), 3, 300, 10, batch.committed_at, batch.posted_at, 3)
    assert batch.header() == header


def test_outcomes_are_proven_one_by_one_and_together() -> None:
    history = begun()
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


def test_direct_submission_is_kept_with_its_signature() -> None:
    history = begun()
    submission = Submission(RUN, WORKER, Step(1), 9, PolicyVersion(0), keccak(b"f"), 8, 10)
    commit(history, 2, 1)
    history.add(
        "ContributionLedger",
        "DirectlySubmitted",
        same_block=True,
        batch_id=2,
        worker=WORKER,
        submission=submission,
        node_signature=b"s",
    )
    batch = viewed(history).batches[2]
    assert (batch.direct, batch.direct_signature) == (submission, b"s")


def test_training_stream_is_in_order_of_posting() -> None:
    history = begun()
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


@pytest.mark.parametrize(
    ("slot", "used"),
    [
        ((1, 1, 0), True),
        ((2, 1, 0), True),
        ((1, 1, 1), True),
        ((1, 1, 2), False),
        ((1, 2, 0), False),
    ],
)
def test_slot_is_used_by_any_outcome(slot: tuple[int, int, int], used: bool) -> None:
    view = viewed(full())
    assert view.slot_used(RUN, *slot) is used
    assert not view.slot_used(RunId(2), *slot)


def test_reason_unknown_to_us_keeps_the_records_bytes() -> None:
    packed = bytearray(pack_records(RECORDS))
    packed[-1] = 99
    records = parse_records(bytes(packed))
    assert b"".join(record.to_bytes() for record in records) == bytes(packed)
    assert (records[2].reason, records[2].reason.name) == (99, "UNKNOWN_99")
    assert records[:2] == RECORDS[:2]


@pytest.mark.parametrize("reason", list(Reason))
def test_known_reasons_stay_themselves(reason: Reason) -> None:
    assert lenient_reason(int(reason)) is reason


@pytest.mark.parametrize("data", [b"", bytes(55), bytes(57)])
def test_partial_records_are_refused(data: bytes) -> None:
    with pytest.raises(EncodingError):
        parse_records(data)


def test_offence_names_the_file_whatever_batch_it_is_in() -> None:
    assert RECORDS[1].leaf(1, 1) != RECORDS[1].leaf(2, 1)
    assert RECORDS[1].offence(RUN) == OFFENCE != RECORDS[1].offence(RunId(2))


def test_overturned_case_changes_the_verdict_that_stands() -> None:
    history = begun()
    post(history, 1, RECORDS)
    dispute(history, [True, False, True], overturned=True, verdict=1)
    view = viewed(history)
    case = view.cases[LEAF]
    assert (case.closed, case.overturned, case.verdict) == (True, True, 1)
    assert list(case.votes.values()) == [True, False, True]
    assert view.standing_verdict(1, 1) is Verdict.ACCEPTED
    assert view.standing_verdict(1, 0) is Verdict.ACCEPTED
    assert view.contradictions == []


def test_upheld_case_leaves_the_verdict() -> None:
    history = begun()
    post(history, 1, RECORDS)
    dispute(history, [True, False], overturned=False, verdict=4)
    view = viewed(history)
    assert view.standing_verdict(1, 1) is Verdict.FRAUD
    assert view.contradictions == []


@pytest.mark.parametrize(("batch_id", "position"), [(9, 0), (1, 3), (1, -1)])
def test_no_verdict_stands_where_there_is_no_outcome(batch_id: int, position: int) -> None:
    assert viewed(full()).standing_verdict(batch_id, position) is None
