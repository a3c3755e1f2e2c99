from collections.abc import Callable
from dataclasses import replace

from hypothesis import given, strategies as st
from orchestrator_fakes import RUN, Emitter, Network

from muster.chain import Event
from muster.orchestrator.projection import Judged, Projection, StreamProgress
from muster.protocol.encoding import keccak
from muster.protocol.ids import Hash32, PolicyVersion, RunId, Step
from muster.protocol.jury import Ruling
from muster.protocol.messages import OutcomeRecord, Reason, Verdict
from muster.protocol.recipe import TrainingRecipe

TRAINING = TrainingRecipe(submissions_per_step=2, max_async_level=1)

verdicts = st.sampled_from(list(Verdict))
batches = st.lists(st.lists(st.tuples(verdicts, st.integers(0, 3)), min_size=1, max_size=4))


def record(number: int, verdict: Verdict, version: int = 0, worker: int = 1) -> OutcomeRecord:
    reason = Reason.NONE if verdict is Verdict.ACCEPTED else Reason.SCHEMA
    file_hash = keccak(number.to_bytes(4, "big"))
    return OutcomeRecord(
        worker, Step(1), number, PolicyVersion(version), file_hash, 4, 10, verdict, reason
    )


def events_of(contents: list[list[tuple[Verdict, int]]], emit: Emitter) -> list[Event]:
    """Each batch is committed and, right after, judged."""
    events, number = [], 0
    for batch_id, members in enumerate(contents, start=1):
        root = keccak(batch_id.to_bytes(4, "big"))
        events.append(committed(emit, batch_id, root, len(members)))
        records = []
        for verdict, version in members:
            records.append(record(number, verdict, version, worker=1 + number % 3))
            number += 1
        events.append(posted(emit, batch_id, records))
    return events


def committed(emit: Emitter, batch_id: int, root: Hash32, count: int, run: RunId = RUN) -> Event:
    return emit(
        "ContributionLedger", "BatchCommitted",
        batch_id=batch_id, run_id=run, root=root, count=count, units=1,
        price_per_unit=1, terms=1, committed_at=1,
    )  # fmt: skip


def posted(
    emit: Callable[..., Event], batch_id: int, records: list[OutcomeRecord], signers: int = 3
) -> Event:
    return emit(
        "ContributionLedger", "OutcomesPosted",
        batch_id=batch_id, run_id=RUN, outcomes_root=keccak(b""),
        records=b"".join(r.to_bytes() for r in records), signatures=b"", posted_at=1,
        signers=signers,
    )  # fmt: skip


def projection() -> tuple[Projection, Emitter]:
    network = Network()
    return Projection(network.view, RUN, TRAINING), network.chain.emit


def judged(projection: Projection, record: OutcomeRecord) -> Judged | None:
    worker = projection.view.worker_by_id[record.worker_id].address
    return projection.judged((worker, record.step, record.index), record.file_hash)


def snapshot(projection: Projection) -> object:
    progress = projection.progress
    return (
        (progress.step, progress.filled, progress.dropped),
        [projection.tally(w) for w in (1, 2, 3)],
        projection.frauds,
        projection.batch_counts,
        projection.trained_submissions,
        [projection.naming(keccak(n.to_bytes(4, "big"))) for n in range(20)],
    )


@given(batches, st.data())
def test_projection_is_the_same_whether_fed_in_pieces_or_rebuilt(
    contents: list[list[tuple[Verdict, int]]], data: st.DataObject
) -> None:
    fed, emit = projection()
    events = events_of(contents, emit)
    while events:
        cut = data.draw(st.integers(1, len(events)))
        piece, events = events[:cut], events[cut:]
        for event in piece:
            fed.view.apply(event)
        fed.apply(piece)
    assert snapshot(fed) == snapshot(Projection(fed.view, RUN, TRAINING))


@given(st.lists(st.integers(0, 12)))
def test_progress_agrees_with_the_trainer_reading_the_stream(versions: list[int]) -> None:
    progress = StreamProgress()
    for version in versions:
        progress.add(PolicyVersion(version), TRAINING)
    # The trainer's side, written as docs/protocol.md section 9.8 says it.
    stream, step, dropped = list(versions), 1, 0
    while True:
        taken: list[int] = []
        while stream and len(taken) < TRAINING.submissions_per_step:
            version = stream.pop(0)
            if version < step - 1 - TRAINING.max_async_level:
                dropped += 1
            else:
                taken.append(version)
        if len(taken) < TRAINING.submissions_per_step:
            break
        step += 1
    assert (progress.step, progress.filled, progress.dropped) == (step, len(taken), dropped)


def feed(fed: Projection, events: list[Event]) -> None:
    for event in events:
        fed.view.apply(event)
    fed.apply(events)


def test_outcomes_are_tallied_by_verdict_and_only_accepted_units_count() -> None:
    fed, emit = projection()
    verdicts = (Verdict.ACCEPTED, Verdict.INCOMPLETE, Verdict.REJECTED)
    feed(fed, events_of([[(v, 0) for v in verdicts]], emit))
    assert [fed.tally(w).units for w in (1, 2, 3)] == [10, 0, 0]
    assert [fed.tally(2).incomplete, fed.tally(3).rejected] == [1, 1]
    assert list(fed.verdict_counts.values()) == [1, 1, 1, 0]


def test_batches_of_other_runs_do_not_count() -> None:
    fed, emit = projection()
    feed(fed, [committed(emit, 1, keccak(b""), 1, run=RunId(2))])
    assert fed.batch_counts == (0, 0)
    assert fed.batch(1) is None


def test_slot_is_used_by_any_outcome_of_the_run_until_it_is_taken_back() -> None:
    fed, emit = projection()
    feed(fed, events_of([[(verdict, 0)] for verdict in Verdict], emit))
    # A worker's number, the step and the index: see `events_of`.
    slots = [(1, 1, 0), (2, 1, 1), (3, 1, 2), (1, 1, 3)]
    assert all(fed.slot_used(*slot) for slot in slots)
    assert not any(fed.slot_used(*slot) for slot in [(1, 1, 1), (1, 2, 0), (2, 1, 0)])
    other = [committed(emit, 5, keccak(b"other"), 1, run=RunId(2))]
    feed(fed, [*other, posted(emit, 5, [record(9, Verdict.ACCEPTED)])])
    assert not fed.slot_used(1, 1, 9)
    fed.view.rewind(fed.view.events[-3].block_number - 1)
    fed.rebuild()
    assert [fed.slot_used(*slot) for slot in slots] == [True, True, True, False]


def test_first_outcome_of_a_file_stands_when_it_was_judged_twice() -> None:
    fed, emit = projection()
    feed(
        fed,
        [
            committed(emit, 1, keccak(b"1"), 1),
            committed(emit, 2, keccak(b"2"), 1),
            posted(emit, 1, [record(0, Verdict.ACCEPTED)]),
            posted(emit, 2, [record(0, Verdict.REJECTED)]),
        ],
    )
    found = judged(fed, record(0, Verdict.ACCEPTED))
    assert found is not None
    assert (found.batch_id, found.verdict) == (1, Verdict.ACCEPTED)


def test_outcome_of_a_submission_is_its_own_whoever_else_names_its_file() -> None:
    fed, emit = projection()
    own, others = record(0, Verdict.ACCEPTED, worker=1), record(0, Verdict.REJECTED, worker=2)
    feed(
        fed,
        [
            committed(emit, 1, keccak(b"1"), 1),
            committed(emit, 2, keccak(b"2"), 1),
            posted(emit, 1, [others]),
            posted(emit, 2, [own]),
        ],
    )
    assert judged(fed, own) == Judged(2, 0, own)
    assert judged(fed, others) == Judged(1, 0, others)
    assert judged(fed, replace(own, index=1)) is None


def test_outcome_of_a_misdeclared_batch_gives_way_to_the_next() -> None:
    derived, emit = projection()
    refused = replace(record(1, Verdict.REJECTED), reason=Reason.BATCH_MISDECLARED, units=0)
    accepted, again = record(1, Verdict.ACCEPTED), record(1, Verdict.REJECTED)
    for batch_id, each in enumerate([refused, accepted, again], start=1):
        events = [committed(emit, batch_id, keccak(bytes([batch_id])), 1)]
        events.append(posted(emit, batch_id, [each]))
        for event in events:
            derived.view.apply(event)
        derived.apply(events)
    assert judged(derived, accepted) == Judged(2, 0, accepted)


@given(refills=st.lists(st.integers(0, 3), min_size=1, max_size=6), lost=st.sets(st.integers(0, 4)))
def test_progress_follows_refills_although_figures_are_lost(
    refills: list[int], lost: set[int]
) -> None:
    fed, emit = projection()
    needed = sum(TRAINING.submissions_per_step + refill for refill in refills)
    fresh = [[(Verdict.ACCEPTED, 100)]] * needed
    feed(fed, events_of(fresh, emit))
    position = 0
    for number, refill in enumerate(refills):
        begun, position = position, position + TRAINING.submissions_per_step + refill
        if number not in lost or number == len(refills) - 1:
            fed.note_figures(
                number + 1, {"stream_from": begun, "stream_to": position, "refill": refill}
            )
    assert (fed.progress.step, fed.progress.filled) == (len(refills) + 1, 0)
    assert fed.trained_submissions == len(refills) * TRAINING.submissions_per_step


def test_announced_refill_takes_submissions_out_of_what_is_used() -> None:
    fed, emit = projection()
    feed(fed, events_of([[(Verdict.ACCEPTED, 100)]] * TRAINING.submissions_per_step, emit))
    assert fed.trained_submissions == TRAINING.submissions_per_step
    fed.note_figures(1, {"stream_from": 0.0, "refill": 1.0})
    assert (fed.progress.step, fed.trained_submissions) == (1, TRAINING.submissions_per_step - 1)


def test_speed_of_judging_outlasts_batches_of_other_runs_and_own_ones_that_wait() -> None:
    made, emit = projection()
    judged_batches = events_of([[(Verdict.ACCEPTED, 0)]], emit)
    waiting = [committed(emit, n, keccak(b"%d" % n), 1) for n in range(2, 42)]
    others = [committed(emit, n, keccak(b"%d" % n), 1, RunId(2)) for n in range(42, 82)]
    feed(made, [*judged_batches, *waiting, *others])
    assert made.judged_units_per_s() == 10
    made.rebuild()
    assert made.judged_units_per_s() == 10


def test_work_that_jurors_judge_is_counted_once() -> None:
    network = Network()
    fed = Projection(network.view, RUN, TRAINING)
    feed(fed, [committed(network.chain.emit, 1, keccak(b"work"), 1)])
    # In one transaction the court closes the case before the ledger posts the outcome.
    closed = network.close_case(network.summon(1), Ruling(Verdict.ACCEPTED, Reason.NONE))
    fed.apply([closed, posted(network.apply, 1, [record(0, Verdict.ACCEPTED)], signers=0)])
    assert (fed.total.accepted, len(fed.judged_with(Verdict.ACCEPTED))) == (1, 1)
    assert snapshot(fed) == snapshot(Projection(fed.view, RUN, TRAINING))
