import pytest
from hypothesis import given, strategies as st
from pydantic import TypeAdapter, ValidationError

from muster.api.answers import BatchContents, BatchEntry, HexBytes, Lease, RunInfo, SubmissionState
from muster.protocol.eip712 import address_of
from muster.protocol.ids import Hash32, PolicyVersion, RunId, Step
from muster.protocol.messages import Reason, Submission, Ticket, Verdict

WORKER = address_of(b"\x01" * 32)
HASH = Hash32(b"\x02" * 32)
SIGNATURE = b"\x03" * 65

TICKET = Ticket(RunId(1), WORKER, Step(2), 3, PolicyVersion(1), HASH, HASH, 1_700_000_000)
SUBMISSION = Submission(RunId(1), WORKER, Step(2), 3, PolicyVersion(1), HASH, 4, 50)


def entry(ticket: Ticket | None = TICKET) -> BatchEntry:
    return BatchEntry(
        submission=SUBMISSION,
        signature=SIGNATURE,
        ticket=ticket,
        ticket_signature=SIGNATURE if ticket else None,
        received_at=1_700_000_000,
    )


def test_lease_round_trips() -> None:
    lease = Lease(ticket=TICKET, signature=SIGNATURE)
    assert Lease.model_validate_json(lease.model_dump_json()) == lease


@pytest.mark.parametrize("ticket", [TICKET, None])
def test_batch_round_trips(ticket: Ticket | None) -> None:
    batch = BatchContents(batch_id=1, root=HASH, count=1, submissions=[entry(ticket)])
    assert BatchContents.model_validate_json(batch.model_dump_json()) == batch


def test_batch_json_is_the_documented_form() -> None:
    batch = BatchContents(batch_id=1, root=HASH, count=1, submissions=[entry()])
    document = batch.model_dump(mode="json")
    assert document["root"] == "0x" + "02" * 32
    assert document["submissions"][0]["submission"] == SUBMISSION.to_json()
    assert document["submissions"][0]["ticket"] == TICKET.to_json()
    assert document["submissions"][0]["ticket_signature"] == "0x" + "03" * 65


def test_submission_state_carries_verdict_and_reason_as_numbers() -> None:
    state = SubmissionState(
        state="judged", batch_id=1, position=0, verdict=Verdict.FRAUD, reason=Reason.WRONG_SEED
    )
    assert state.model_dump(mode="json") == {
        "state": "judged",
        "batch_id": 1,
        "position": 0,
        "verdict": 4,
        "reason": 31,
    }


@pytest.mark.parametrize("value", [5, None, [], "0x12", {"a": 1}])
def test_hashes_are_refused_when_malformed(value: object) -> None:
    with pytest.raises(ValidationError):
        BatchContents.model_validate({"batch_id": 1, "root": value, "count": 0, "submissions": []})


@pytest.mark.parametrize("field", ["ticket", "submission", "signature"])
@pytest.mark.parametrize("value", [5, "", [], {"run_id": "1"}])
def test_batch_entries_are_refused_when_malformed(field: str, value: object) -> None:
    document = entry().model_dump(mode="json") | {field: value}
    with pytest.raises(ValidationError):
        BatchEntry.model_validate(document)


@given(st.binary())
def test_bytes_round_trip(data: bytes) -> None:
    adapter = TypeAdapter[bytes](HexBytes)
    assert adapter.validate_json(adapter.dump_json(data)) == data


@given(st.recursive(st.none() | st.integers() | st.text(), lambda s: st.dictionaries(st.text(), s)))
def test_answers_never_raise_anything_but_a_validation_error(document: object) -> None:
    for kind in (RunInfo, Lease, BatchContents, SubmissionState):
        with pytest.raises(ValidationError):
            kind.model_validate(document)
