"""Messages: round trips, and every malformed twin refused."""

from typing import Any

import pytest
from hypothesis import given, strategies as st

from muster.protocol.encoding import keccak
from muster.protocol.errors import EncodingError
from muster.protocol.ids import Hash32, PolicyVersion, RunId, Step, to_address
from muster.protocol.messages import (
    OutcomeRecord,
    Reason,
    Submission,
    Ticket,
    Verdict,
    file_hashes_in,
    pack_records,
    slots_in,
    unpack_records,
    verdicts_in,
)

uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
hashes = st.binary(min_size=32, max_size=32).map(Hash32)
addresses = st.binary(min_size=20, max_size=20).map(to_address)
records = st.builds(
    OutcomeRecord,
    worker_id=uint32,
    step=uint32.map(Step),
    index=uint32,
    policy_version=uint32.map(PolicyVersion),
    file_hash=hashes,
    rollouts=st.integers(0, 2**16 - 1),
    units=uint32,
    verdict=st.sampled_from(Verdict),
    reason=st.sampled_from(Reason),
)
tickets = st.builds(
    Ticket,
    run_id=uint64.map(RunId),
    worker=addresses,
    step=uint32.map(Step),
    index=uint32,
    policy_version=uint32.map(PolicyVersion),
    policy_root=hashes,
    beacon=hashes,
    deadline=uint64,
)
submissions = st.builds(
    Submission,
    run_id=uint64.map(RunId),
    worker=addresses,
    step=uint32.map(Step),
    index=uint32,
    policy_version=uint32.map(PolicyVersion),
    file_hash=hashes,
    rollouts=uint32,
    units=uint64,
)
RECORD = OutcomeRecord(
    worker_id=1,
    step=Step(2),
    index=3,
    policy_version=PolicyVersion(1),
    file_hash=keccak(b"f"),
    rollouts=16,
    units=80,
    verdict=Verdict.ACCEPTED,
    reason=Reason.NONE,
)


@given(records)
def test_record_survives_a_round_trip(record: OutcomeRecord) -> None:
    assert OutcomeRecord.from_bytes(record.to_bytes()) == record


def test_record_has_the_documented_layout() -> None:
    expected = "00000001000000020000000300000001" + keccak(b"f").hex() + "0010000000500100"
    assert RECORD.to_bytes().hex() == expected


@given(st.binary(max_size=60))
def test_record_parsing_is_total(data: bytes) -> None:
    try:
        record = OutcomeRecord.from_bytes(data)
    except EncodingError:
        return
    assert record.to_bytes() == data


@pytest.mark.parametrize(("offset", "value"), [(54, 0), (54, 5), (55, 9), (55, 255)])
def test_record_refuses_unknown_verdict_and_reason(offset: int, value: int) -> None:
    data = bytearray(RECORD.to_bytes())
    data[offset] = value
    with pytest.raises(EncodingError, match="outcome record"):
        OutcomeRecord.from_bytes(bytes(data))


def test_record_refuses_a_value_that_does_not_fit() -> None:
    with pytest.raises(EncodingError, match="outcome record"):
        OutcomeRecord(**{**_fields(RECORD), "rollouts": 1 << 16}).to_bytes()


@given(st.lists(records, min_size=1, max_size=5))
def test_packed_records_survive_a_round_trip(batch: list[OutcomeRecord]) -> None:
    assert unpack_records(pack_records(batch)) == batch


@pytest.mark.parametrize("size", [0, 1, 55, 57])
def test_unpack_refuses_partial_records(size: int) -> None:
    with pytest.raises(EncodingError, match="whole number"):
        unpack_records(bytes(size))


@pytest.mark.parametrize(("place", "known"), [(-1, 0), (-2, 1)])
def test_unpack_refuses_an_unknown_reason_or_verdict(place: int, known: int) -> None:
    packed = bytearray(pack_records([RECORD, RECORD]))
    packed[place] = 99
    with pytest.raises(EncodingError, match="malformed outcome record"):
        unpack_records(bytes(packed))
    packed[place] = known
    assert len(unpack_records(bytes(packed))) == 2


@given(st.lists(records, min_size=1, max_size=5))
def test_single_fields_of_packed_records_are_those_of_the_records(
    batch: list[OutcomeRecord],
) -> None:
    packed = pack_records(batch)
    assert list(slots_in(packed)) == [(r.worker_id, r.step, r.index) for r in batch]
    assert list(file_hashes_in(packed)) == [r.file_hash for r in batch]
    assert list(verdicts_in(packed)) == [r.verdict for r in batch]


@given(records, st.integers(0, 2**64 - 1), uint32)
def test_leaf_binds_batch_and_position(record: OutcomeRecord, batch: int, position: int) -> None:
    leaf = record.leaf(batch, position)
    assert leaf != record.leaf(batch ^ 1, position)
    assert leaf != record.leaf(batch, position ^ 1)


@given(tickets)
def test_ticket_survives_json(ticket: Ticket) -> None:
    assert Ticket.from_json(ticket.to_json()) == ticket


@given(submissions)
def test_submission_survives_json(submission: Submission) -> None:
    assert Submission.from_json(submission.to_json()) == submission


@given(submissions, submissions)
def test_submission_leaves_differ_when_submissions_do(a: Submission, b: Submission) -> None:
    assert (a.leaf() == b.leaf()) == (a == b)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(json_values)
def test_ticket_parsing_is_total(value: Any) -> None:
    with pytest.raises(EncodingError):
        Ticket.from_json(value)


@given(tickets, st.sampled_from(["step", "worker", "beacon", "deadline"]), json_values)
def test_ticket_refuses_a_field_of_another_type(ticket: Ticket, name: str, value: Any) -> None:
    mutated = {**ticket.to_json(), name: value}
    try:
        parsed = Ticket.from_json(mutated)
    except EncodingError:
        return
    assert type(value) is int
    assert getattr(parsed, name) == value


@pytest.mark.parametrize("value", [True, 1.0, "1", -1, 1 << 32, None])
def test_submission_refuses_a_step_that_is_no_uint32(value: object) -> None:
    good = Submission(
        RunId(1), to_address("0x" + "22" * 20), Step(1), 0, PolicyVersion(0), keccak(b""), 1, 1
    )
    with pytest.raises(EncodingError, match="step"):
        Submission.from_json({**good.to_json(), "step": value})


def _fields(record: OutcomeRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in OutcomeRecord.__slots__}
