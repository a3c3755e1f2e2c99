"""The cursor: every usable record exactly once, in order, at any time of arrival."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st
from trainer_fakes import FakeLedger, Feed, Item, make_recipe, make_rollouts, no_sleep

from muster.protocol.encoding import file_hash, keccak
from muster.protocol.errors import ChainError, EncodingError
from muster.protocol.ids import Hash32, PolicyVersion, Step
from muster.protocol.messages import OutcomeRecord
from muster.protocol.recipe import Recipe, TrainingRecipe
from muster.protocol.rollouts import Rollout, encode_rollouts
from muster.protocol.seeds import target_length
from muster.trainer.stream.filters import Drop
from muster.trainer.stream.reader import Cursor, StepInput, StreamReader, read_submission

BASE = PolicyVersion(0)
START = Cursor()
KNOWN = {make_rollouts(seed)[0].sampling_seed: seed for seed in range(50)}


def _reader(feed: Feed, **training: object) -> StreamReader:
    recipe = make_recipe(**training)
    return StreamReader(feed.ledger, feed.files, recipe, vocab_size=16, sleep=no_sleep)


async def _next(feed: Feed, cursor: Cursor = START, newest: int = 0, **training: int) -> StepInput:
    reader = _reader(feed, **training)
    async with asyncio.timeout(5):
        return await reader.next_step(cursor, PolicyVersion(newest))


def _seeds(taken: StepInput) -> list[int]:
    """Return the seeds of the feed's submissions that were taken."""
    return [KNOWN[group[0].sampling_seed] for group in taken.groups[::2]]


async def test_step_takes_the_next_submissions_in_order() -> None:
    feed = Feed()
    feed.submit_many(range(5))
    first = await _next(feed)
    second = await _next(feed, first.end)
    assert (_seeds(first), _seeds(second)) == ([0, 1], [2, 3])
    assert (first.end.position, second.start, second.end.position) == (2, first.end, 4)
    assert [len(group) for group in first.groups] == [4, 4, 4, 4]


async def test_step_waits_for_records_that_are_still_to_come() -> None:
    feed = Feed()
    feed.submit_many([0])
    waiting = asyncio.create_task(_next(feed))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    feed.submit_many([1])
    assert _seeds(await waiting) == [0, 1]


async def test_stale_record_is_dropped_and_the_next_takes_its_place() -> None:
    feed = Feed()
    feed.submit(make_rollouts(0, version=1))
    feed.submit(make_rollouts(1, version=2))
    feed.submit(make_rollouts(2, version=0))
    feed.submit(make_rollouts(3, version=4))
    taken = await _next(feed, newest=4, max_async_level=2)
    assert [group[0].policy_version for group in taken.groups] == [2, 2, 4, 4]
    assert taken.dropped == {Drop.STALE: 16}
    assert taken.end.position == 4
    assert [(use.position, use.kept, use.dropped) for use in taken.uses] == [
        (0, 0, {Drop.STALE: 8}),
        (1, 8, {}),
        (2, 0, {Drop.STALE: 8}),
        (3, 8, {}),
    ]


async def test_stale_file_is_not_even_fetched() -> None:
    feed = Feed()
    stale = feed.submit(make_rollouts(0, version=0))
    feed.submit_many([1, 2], version=3)
    await _next(feed, newest=3, max_async_level=2)
    assert stale not in feed.files.asked


@pytest.mark.parametrize(("age", "expected"), [(0, True), (2, True), (3, False), (-1, True)])
def test_staleness_is_counted_in_versions(age: int, expected: bool) -> None:
    training = TrainingRecipe(submissions_per_step=1, max_async_level=2)
    # Step 8 + age starts from version 7 + age.
    assert training.may_train_on(PolicyVersion(7), Step(8 + age)) is expected


def _mutated(row: int, **changes: object) -> list[Rollout]:
    rollouts = make_rollouts(99)
    rollouts[row] = replace(rollouts[row], **changes)  # type: ignore[arg-type]
    return rollouts


POISONED = {
    "not Parquet": (b"PAR1 nothing PAR1", "not a readable Parquet"),
    "too few rows": (encode_rollouts(make_rollouts(99)[:4]), "4 rows"),
    "too many rows": (encode_rollouts(make_rollouts(99) * 2), "16 rows"),
    "wrong policy": (encode_rollouts(_mutated(3, policy_version=1)), "row 3 claims policy 1"),
    "wrong group": (
        encode_rollouts(_mutated(5, group=0)),
        "row 5 is out of order: it claims sample 1 of group 0",
    ),
    "wrong sample": (
        encode_rollouts(_mutated(2, sample=1)),
        "row 2 is out of order: it claims sample 1",
    ),
    "too long": (encode_rollouts(_mutated(0, completion_tokens=(3,) * 7)), "7 completion tokens"),
    "unknown token": (encode_rollouts(_mutated(1, completion_tokens=(3, 16))), "vocabulary of 16"),
    "unknown prompt": (encode_rollouts(_mutated(1, prompt_tokens=(99,))), "vocabulary of 16"),
}


@pytest.mark.parametrize("kind", POISONED)
async def test_poisoned_file_is_dropped_and_nothing_else_is_lost(kind: str) -> None:
    feed = Feed()
    feed.submit_many([0])
    feed.ledger.accept(feed.files.put(POISONED[kind][0]))
    feed.submit_many([1, 2])
    taken = await _next(feed)
    assert _seeds(taken) == [0, 1]
    assert taken.dropped == {Drop.UNREADABLE: 8}
    assert [(use.kept, dict(use.dropped)) for use in taken.uses] == [
        (8, {}),
        (0, {Drop.UNREADABLE: 8}),
        (8, {}),
    ]
    assert _seeds(await _next(feed, taken.end, submissions_per_step=1)) == [2]


@pytest.mark.parametrize("kind", POISONED)
def test_poisoned_file_is_refused_for_the_named_reason(kind: str) -> None:
    data, reason = POISONED[kind]
    record = Feed().ledger.accept(keccak(data))
    with pytest.raises(EncodingError, match=reason):
        read_submission(data, record, make_recipe(), 16)


def test_file_with_other_rows_than_its_record_is_refused() -> None:
    data = encode_rollouts(make_rollouts(0))
    record = Feed().ledger.accept(keccak(data), rollouts=7)
    with pytest.raises(EncodingError, match="its record says 7"):
        read_submission(data, record, make_recipe(), 16)


# ------------------------------------------------------------------------------ length budgets

SEED = keccak(b"a ticket")
BUDGETS = (4, 8, 16)


def _with_budgets(targets: Sequence[int]) -> tuple[bytes, Recipe]:
    """Return a submission whose groups have these targets, and a recipe with budgets."""
    recipe = make_recipe()
    sampling = recipe.sampling.model_copy(update={"target_lengths": BUDGETS})
    rows = [replace(row, target_length=targets[row.group]) for row in make_rollouts(1)]
    return encode_rollouts(rows), recipe.model_copy(update={"sampling": sampling})


def test_derived_target_lengths_are_accepted() -> None:
    data, recipe = _with_budgets([target_length(SEED, group, BUDGETS) for group in (0, 1)])
    record = FakeLedger().accept(file_hash(data))
    assert len(read_submission(data, record, recipe, 16, seed=SEED)) == 2


@pytest.mark.parametrize("group", [0, 1])
def test_target_length_that_the_ticket_does_not_derive_is_refused(group: int) -> None:
    targets = [target_length(SEED, number, BUDGETS) for number in (0, 1)]
    targets[group] = next(length for length in BUDGETS if length != targets[group])
    data, recipe = _with_budgets(targets)
    record = FakeLedger().accept(file_hash(data))
    with pytest.raises(EncodingError, match=f"row {4 * group} has a target length of .* derives"):
        read_submission(data, record, recipe, 16, seed=SEED)


@pytest.mark.parametrize("target", [-1, 5])
def test_target_length_that_the_recipe_does_not_have_is_refused(target: int) -> None:
    data, recipe = _with_budgets([target, target])
    record = FakeLedger().accept(file_hash(data))
    with pytest.raises(EncodingError, match="row 0 has a target length"):
        read_submission(data, record, recipe, 16)


def test_target_length_without_budgets_is_refused() -> None:
    data, _ = _with_budgets([4, 4])
    record = FakeLedger().accept(file_hash(data))
    with pytest.raises(EncodingError, match="row 0 has a target length"):
        read_submission(data, record, make_recipe(), 16, seed=SEED)


async def test_chosen_target_lengths_are_not_trained_on() -> None:
    data, recipe = _with_budgets([4, 4])
    feed = Feed()
    wrong = feed.files.put(data)
    feed.ledger.accept(wrong)
    right, _ = _with_budgets([target_length(SEED, group, BUDGETS) for group in (0, 1)])
    assert right != data
    feed.ledger.accept(feed.files.put(right))
    one = recipe.training.model_copy(update={"submissions_per_step": 1})
    recipe = recipe.model_copy(update={"training": one})
    reader = StreamReader(feed.ledger, feed.files, recipe, vocab_size=16, seed_of=lambda _: SEED)
    taken = await reader.next_step(Cursor(), PolicyVersion(0))
    assert taken.dropped[Drop.UNREADABLE] == 8
    assert taken.end.position == 2


async def test_file_that_is_not_there_is_asked_for_again() -> None:
    feed = Feed()
    missing = feed.submit(make_rollouts(0))
    feed.submit_many([1])
    feed.files.failures[missing] = 3
    assert _seeds(await _next(feed)) == [0, 1]


async def test_other_file_than_asked_for_is_asked_for_again() -> None:
    feed = Feed()
    swapped = feed.submit(make_rollouts(0))
    feed.submit_many([1])
    feed.files.lies[swapped] = encode_rollouts(make_rollouts(7))
    assert _seeds(await _next(feed)) == [0, 1]


async def test_rewritten_past_is_refused() -> None:
    feed = Feed()
    feed.submit_many(range(4))
    taken = await _next(feed)
    feed.ledger.items[1] = Item(1, feed.ledger.items[3].record)
    with pytest.raises(ChainError, match="before position 2 is not what was trained on"):
        await _next(feed, taken.end)


async def test_cursor_ahead_of_the_chain_waits_for_it() -> None:
    feed = Feed()
    feed.submit_many(range(4))
    taken = await _next(feed)
    behind, feed.ledger.items = feed.ledger.items, []
    waiting = asyncio.create_task(_next(feed, taken.end))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    feed.ledger.items = behind
    feed.ledger.wake()
    assert _seeds(await waiting) == [2, 3]


async def test_records_that_a_reorganisation_removed_are_not_trained_on() -> None:
    feed = Feed()
    feed.submit_many([0, 1])
    waiting = asyncio.create_task(_next(feed, submissions_per_step=3))
    await asyncio.sleep(0.02)
    feed.ledger.items = feed.ledger.items[:1]
    feed.submit_many([2, 3])
    taken = await waiting
    assert _seeds(taken) == [0, 2, 3]
    assert taken.end.position == 3


async def test_unknown_last_record_is_taken_on_trust() -> None:
    feed = Feed()
    feed.submit_many(range(4))
    assert _seeds(await _next(feed, Cursor(2, None))) == [2, 3]


PLANS = st.lists(
    st.tuples(st.sampled_from(["good", "stale", "broken", "late"]), st.integers(0, 3)), max_size=14
)


@given(PLANS, st.integers(1, 4), st.data())
def test_every_usable_record_is_consumed_once_whatever_happens(
    plan: list[tuple[str, int]], per_step: int, data: st.DataObject
) -> None:
    """Records arrive in bursts, the trainer dies between any two steps, files fail for a while."""
    asyncio.run(_run_plan(plan, per_step, data))


async def _run_plan(plan: list[tuple[str, int]], per_step: int, data: st.DataObject) -> None:
    feed, expected = Feed(), []
    for seed, (kind, burst) in enumerate(plan):
        if kind == "stale":
            feed.submit(make_rollouts(seed, version=0))
        elif kind == "broken":
            feed.ledger.accept(feed.files.put(f"broken {seed}".encode()), version=10)
        else:
            digest = feed.submit(make_rollouts(seed, version=10))
            feed.files.failures[digest] = burst if kind == "late" else 0
            expected.append(seed)
    cursor, consumed = START, list[int]()
    for _ in range(len(expected) // per_step):
        reader_cursor = cursor
        for _attempt in range(data.draw(st.integers(1, 3))):
            # All but the last attempt die before the cursor is saved.
            taken = await _next(
                feed, reader_cursor, newest=10, submissions_per_step=per_step, max_async_level=2
            )
        consumed += _seeds(taken)
        cursor = taken.end
    assert consumed == expected[: len(expected) // per_step * per_step]


@given(st.lists(st.integers(1, 3), min_size=1, max_size=6))
def test_consumption_does_not_depend_on_when_records_arrive(bursts: list[int]) -> None:
    asyncio.run(_run_bursts(bursts))


async def _run_bursts(bursts: list[int]) -> None:
    feed, seeds = Feed(), iter(range(100))
    waiting = asyncio.create_task(_next(feed, submissions_per_step=sum(bursts)))
    for burst in bursts:
        feed.submit_many(next(seeds) for _ in range(burst))
        for _ in range(burst):
            await asyncio.sleep(0)
    taken = await waiting
    assert _seeds(taken) == list(range(sum(bursts)))
    assert taken.end == Cursor(sum(bursts), _last(feed))


def _last(feed: Feed) -> Hash32:
    record: OutcomeRecord = feed.ledger.items[-1].record
    return record.file_hash
