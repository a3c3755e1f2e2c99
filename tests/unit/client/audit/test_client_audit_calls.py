"""An auditor's check of calls: grounds from the chain, contradictions from statements.

Seven validators, a quorum of two, outcomes due after 80 s: a timeout is 10 s at most.
"""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from muster.chain import BatchView
from muster.client.audit import calls
from muster.client.audit.calls import RunCalls, SigningGround, check_statements
from muster.client.audit.contradictions import Kind
from muster.client.audit.evidence import EvidenceFolders
from muster.client.audit.ledger import Ledger, PackedRecords
from muster.client.audit.outcome_table import tabulate
from muster.protocol import schedule
from muster.protocol.eip712 import Domain, address_of, digest, sign
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.ids import Address, Hash32, PolicyVersion, RunId, Step, to_address
from muster.protocol.messages import OutcomeRecord, Outcomes, Reason, Verdict, pack_records

RUN, QUORUM, DEADLINE_S, BEGIN = RunId(1), 2, 80, 1000
BENCH = tuple(to_address(keccak(b"validator %d" % i)[:20]) for i in range(7))
SEATS = {who: 1 << place for place, who in enumerate(BENCH)}
OTHER = keccak(b"other outcomes")


def order_of(batch_id: int) -> tuple[Address, ...]:
    seed = schedule.batch_seed(keccak(b"block %d" % batch_id), RUN, batch_id, keccak(b"root"))
    return schedule.draw_order(seed, BENCH)


def a_batch(
    batch_id: int, places: tuple[int, ...], *, after_s: int = 3, at: int = BEGIN, **changes: Any
) -> BatchView:
    """A batch whose outcomes were signed by the validators at these places of its order."""
    verdict = changes.pop("verdict", Verdict.ACCEPTED)
    reason = Reason.NONE if verdict is Verdict.ACCEPTED else Reason.WRONG_REWARD
    record = OutcomeRecord(
        1, Step(1), batch_id, PolicyVersion(0), keccak(b"file"), 8, 100, verdict, reason
    )
    order, packed = order_of(batch_id), pack_records([record])
    values: dict[str, Any] = {
        **{"batch_id": batch_id, "run_id": RUN, "root": keccak(b"root"), "count": 1, "units": 100},
        **{
            "price_per_unit": 1,
            "terms": 1,
            "committed_at": at,
            "block_number": batch_id,
            "tx_hash": "0xc",
        },
        **{"beacon": keccak(b"block %d" % batch_id), "seated": BENCH, "validators": BENCH},
        **{"records": PackedRecords(packed), "records_hash": keccak(packed)},
        **{"signers": sum(SEATS[order[place]] for place in places), "posted_at": at + after_s},
        **{"posted_block": batch_id + 1, "posted_tx": "0xp"},
    }
    return BatchView(**{**values, **changes})


def a_view(*batches: BatchView) -> Ledger:
    view = Ledger()
    terms = SimpleNamespace(quorum=QUORUM)
    run: Any = SimpleNamespace(run_id=RUN, seats=SEATS, validators=BENCH, terms=[terms])
    view.runs = {RUN: run}
    view.batches = {batch.batch_id: batch for batch in batches}
    return view


def ground(batch: BatchView, *earlier: BatchView) -> SigningGround:
    book = RunCalls(a_view(*earlier, batch), RUN, DEADLINE_S)
    is_alarm = any(record.verdict is not Verdict.ACCEPTED for record in batch.records or ())
    return book.ground(book.posting(batch, is_alarm=is_alarm))


# Grounds


@pytest.mark.parametrize(
    ("places", "after_s", "verdict", "expected"),
    [
        ((0, 1), 3, Verdict.ACCEPTED, SigningGround.FIRST),
        ((0, 2), 10, Verdict.ACCEPTED, SigningGround.CALLED),
        ((0, 2), 9, Verdict.ACCEPTED, SigningGround.IMPATIENT),
        ((2, 3), 1, Verdict.ACCEPTED, SigningGround.IMPATIENT),
        ((4, 5), 1, Verdict.ACCEPTED, SigningGround.OBJECTED),
        ((5, 6), 69, Verdict.ACCEPTED, SigningGround.CALLED),
        ((5, 6), 70, Verdict.ACCEPTED, SigningGround.LATE),
        ((3, 4), 0, Verdict.FRAUD, SigningGround.CALLED),
        ((3, 5), 0, Verdict.FRAUD, SigningGround.OBJECTED),
        ((3, 5), 1, Verdict.FRAUD, SigningGround.IMPATIENT),
    ],
)
def test_grounds_are_what_time_and_verdict_permit(
    places: tuple[int, ...], after_s: int, verdict: Verdict, expected: SigningGround
) -> None:
    assert ground(a_batch(5, places, after_s=after_s, verdict=verdict)) is expected


def test_what_jurors_of_the_network_judged_was_called_for_by_nobody() -> None:
    view = a_view(a_batch(5, (5, 6)), a_batch(6, (), after_s=500))
    check = calls.signed_by_the_called(view, tabulate(view), DEADLINE_S)
    assert [note.split(":")[0] for note in check.notes] == ["batch 5"]


def test_who_let_an_earlier_call_pass_may_be_absent() -> None:
    order = order_of(5)
    of_four = order_of(4)
    late = a_batch(5, (0, 2), at=BEGIN + 30)
    signs = tuple(of_four.index(who) for who in (order[0], order[2]))
    slow = a_batch(4, signs, at=BEGIN, after_s=12)
    assert ground(late, slow) is SigningGround.CALLED
    # A batch that was judged at once does not show that anybody is absent. A validator that was
    # heard since is not absent.
    quick = a_batch(4, signs, at=BEGIN, after_s=9)
    assert ground(late, quick) is SigningGround.IMPATIENT
    heard = a_batch(3, (order_of(3).index(order[1]),), at=BEGIN + 15, after_s=3)
    assert ground(late, slow, heard) is SigningGround.IMPATIENT


def test_who_was_seated_since_comes_last() -> None:
    seated, now = BENCH[1:], BENCH[1:] + BENCH[:1]
    batch = a_batch(5, (0, 1), seated=seated, validators=now, signers=SEATS[BENCH[0]] | 2)
    assert ground(batch) is not SigningGround.FIRST


def test_the_check_counts_grounds_and_notes_what_the_chain_does_not_show() -> None:
    batches = [
        a_batch(i, places, after_s=0) for i, places in ((1, (0, 1)), (2, (4, 5)), (3, (0, 1)))
    ]
    view = a_view(*batches)
    check = calls.signed_by_the_called(view, tabulate(view), DEADLINE_S)
    assert check.passed
    assert check.detail == (
        "2 signed by those drawn first, 1 by others, if somebody objected off chain"
    )
    (note,) = check.notes
    first = order_of(2)
    assert note.startswith("batch 2: signed by ")
    assert note.endswith(
        f"0 s after its commitment, drawn was {first[0]}, {first[1]}: "
        "by others, if somebody objected off chain"
    )


@settings(max_examples=150)
@given(st.data())
def test_what_the_schedule_decides_is_never_held_against_anybody(data: st.DataObject) -> None:
    """For any outcomes at any times: if the production rule posts, the audit finds a ground."""
    timeout_s = data.draw(st.integers(1, schedule.timeout_of(DEADLINE_S)))
    batch = a_batch(5, ())
    order, posted = order_of(5), batch.records_hash
    assert posted is not None
    is_alarm = data.draw(st.booleans())
    said = {
        who: (data.draw(st.sampled_from([posted, OTHER])), BEGIN + data.draw(st.integers(0, 79)))
        for who in order
        if data.draw(st.booleans())
    }
    statements = [
        schedule.SignedOutcomes(
            who, of, not is_alarm if of == posted else data.draw(st.booleans()), at
        )
        for who, (of, at) in said.items()
    ]
    now = BEGIN + data.draw(st.integers(0, 79))
    timing = schedule.Timing(BEGIN, DEADLINE_S, timeout_s)
    plan = schedule.plan_calls(order, QUORUM, timing, now, statements)
    if plan.decision != posted:
        return
    agreeing = [who for who, (of, at) in said.items() if of == posted and at <= now]
    agreeing.sort(key=lambda who: who not in plan.called)
    verdict = Verdict.FRAUD if is_alarm else Verdict.ACCEPTED
    places = tuple(order.index(who) for who in agreeing[:QUORUM])
    batch = a_batch(5, places, after_s=now - BEGIN, verdict=verdict)
    known = {who: _named(of, posted, batch) for who, (of, at) in said.items() if at <= now}
    view = a_view(batch)
    check = calls.borne_out_by_statements(
        view, tabulate(view), DEADLINE_S, {5: known}, timeout_s=timeout_s
    )
    assert check.passed, check.detail


def _named(of: Hash32, posted: Hash32, batch: BatchView) -> Hash32:
    """The batch's records hash for the posted one, and OTHER for any other hash."""
    assert batch.records_hash is not None
    return batch.records_hash if of == posted else OTHER


# Statements


def against(batch: BatchView, *objecting: int, timeout_s: int = 10, agreeing: Any = ()) -> Any:
    """The check's result, given statements of the signers, of others who agree, and objections."""
    order, view = order_of(batch.batch_id), a_view(batch)
    signers = [who for who in order if SEATS[who] & batch.signers]
    known: Any = dict.fromkeys([*signers, *(order[i] for i in agreeing)], batch.records_hash)
    known |= {order[place]: OTHER for place in objecting}
    statements = {batch.batch_id: known}
    return calls.borne_out_by_statements(
        view, tabulate(view), DEADLINE_S, statements, timeout_s=timeout_s
    )


def kinds(check: Any) -> list[Kind]:
    return [found.kind for found in check.contradictions]


def test_signers_that_nothing_called_contradict() -> None:
    check = against(a_batch(5, (2, 3)))
    assert kinds(check) == [Kind.OUTCOME_UNCALLED]
    assert "not called in 3 s; nobody objected" in check.detail
    assert against(a_batch(5, (0, 1))).passed


def test_silence_and_objections_call_more() -> None:
    assert against(a_batch(5, (2, 3)), 0).passed
    assert against(a_batch(5, (2, 3), after_s=10)).passed
    assert against(a_batch(5, (2, 3)), timeout_s=3).passed
    # An objection calls five, not all.
    beyond = against(a_batch(5, (0, 6)), 1)
    assert kinds(beyond) == [Kind.OUTCOME_UNCALLED]
    assert f"{order_of(5)[1]} objected" in beyond.detail


def test_what_does_not_accept_needs_most_of_those_it_calls() -> None:
    fraud = a_batch(5, (0, 1), verdict=Verdict.FRAUD)
    check = against(fraud)
    assert kinds(check) == [Kind.OUTCOME_MINORITY]
    assert "only 2 called validators signed these outcomes, 3 are needed" in check.detail
    assert against(fraud, agreeing=(4,)).passed
    # Uncalled validators do not count; in the end the largest group decides.
    assert kinds(against(fraud, agreeing=(6,))) == [Kind.OUTCOME_MINORITY]
    assert against(a_batch(5, (0, 1), verdict=Verdict.FRAUD, after_s=40)).passed


def test_batches_without_the_statements_of_all_signers_do_not_count() -> None:
    view = a_view(batch := a_batch(5, (2, 3)))
    one = next(who for who in BENCH if SEATS[who] & batch.signers)
    known: Any = {5: {one: batch.records_hash}}
    check = calls.borne_out_by_statements(view, tabulate(view), DEADLINE_S, known)
    assert check.passed
    assert check.detail == "0 of 1 batches have their statements"


# Statements kept as files

KEYS = {address_of(key): key for key in (keccak(b"key %d" % i) for i in range(7))}
DOMAIN = Domain(31337, BENCH[0])


def keep(folder: Path, batch: BatchView, key: bytes, packed: bytes, **changes: Any) -> Path:
    """Write outcomes as an orchestrator keeps them, signed with a key."""
    message = Outcomes(batch.batch_id, batch.root, keccak(packed))
    who = address_of(key)
    document = {
        **{"batch_id": batch.batch_id, "root": hex0x(batch.root), "validator": who},
        **{"records": hex0x(packed)},
        "signature": hex0x(sign(digest(DOMAIN, message.struct_hash()), key)),
    }
    path = folder / f"{batch.batch_id}-{who}.json"
    path.write_text(json.dumps({**document, **changes}))
    return path


@pytest.fixture
def kept(tmp_path: Path) -> Any:
    """A batch that the first two of its order signed, with their statements on disk."""
    bench = tuple(KEYS)
    batch = a_batch(5, (), seated=bench, validators=bench)
    order = schedule.draw_order(schedule.batch_seed(batch.beacon, RUN, 5, batch.root), bench)
    view = a_view(batch)
    view.runs[RUN].seats = {who: 1 << place for place, who in enumerate(bench)}
    history: Any = SimpleNamespace(
        ledger=view,
        domain=DOMAIN,
        observed=SimpleNamespace(parameters=SimpleNamespace(outcome_deadline_s=DEADLINE_S)),
    )

    def sign_by(*places: int) -> None:
        batch.signers = sum(view.runs[RUN].seats[order[place]] for place in places)
        for place in places:
            keep(tmp_path, batch, KEYS[order[place]], pack_records(list(batch.records or ())))

    def look() -> list[Any]:
        return list(check_statements(history, RUN, EvidenceFolders([tmp_path]), 10))

    sign_by(0, 1)
    return SimpleNamespace(batch=batch, order=order, folder=tmp_path, sign_by=sign_by, look=look)


def test_kept_outcomes_of_the_called_are_in_order(kept: Any) -> None:
    signed, called = kept.look()
    assert signed.detail == "2 signatures recovered"
    assert called.detail == "1 of 1 batches have their statements"
    assert signed.passed
    assert called.passed


def test_tampered_outcomes_on_chain_are_not_those_of_the_called(kept: Any) -> None:
    kept.sign_by(0, 4)
    _, called = kept.look()
    assert kinds(called) == [Kind.OUTCOME_UNCALLED]
    assert f"signed by {kept.order[4]}, not called in 3 s" in called.detail


def test_an_objection_that_somebody_kept_explains_who_was_called(kept: Any) -> None:
    kept.sign_by(0, 4)
    (record,) = kept.batch.records
    other = pack_records([replace(record, units=record.units - 1)])
    keep(kept.folder, kept.batch, KEYS[kept.order[1]], other)
    assert all(check.passed for check in kept.look())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"records": "0x" + "11" * 56}, "did not sign the outcomes kept as its own"),
        ({"signature": "0x" + "11" * 64 + "1b"}, "did not sign the outcomes kept as its own"),
        ({"signature": "0x11"}, "is malformed"),
        ({"records": 5}, "is malformed"),
    ],
)
def test_altered_outcomes_are_caught_with_what_is_wrong(
    kept: Any, changes: dict[str, Any], words: str
) -> None:
    records = pack_records(list(kept.batch.records))
    keep(kept.folder, kept.batch, KEYS[kept.order[0]], records, **changes)
    signed, _ = kept.look()
    assert kinds(signed) == [Kind.EVIDENCE_ALTERED]
    assert words in signed.detail


def test_outcomes_of_another_chains_batch_are_passed_over(kept: Any) -> None:
    for place in (0, 1):
        keep(kept.folder, kept.batch, KEYS[kept.order[place]], b"", root="0x" + "00" * 32)
    assert kept.look() == []
