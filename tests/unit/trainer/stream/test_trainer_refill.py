"""Refill: a step that left groups out consumes more, within its bound, and loses nothing."""

import asyncio

import pytest
from hypothesis import given, strategies as st
from trainer_fakes import Feed, make_recipe, make_rollouts, no_sleep, with_filters, with_reward

from muster.protocol.ids import PolicyVersion
from muster.trainer.stream import reader as reader_module
from muster.trainer.stream.filters import DifficultyPools, Drop, PassRate
from muster.trainer.stream.reader import Cursor, Shortage, StepInput, StreamReader

START = Cursor()
GROUPS_EACH = 2


def _reader(feed: Feed, shortages: list[Shortage] | None = None, **filters: object) -> StreamReader:
    recipe = with_filters(make_recipe(submissions_per_step=2), **filters)
    told = shortages.append if shortages is not None else lambda _: None
    return StreamReader(
        feed.ledger, feed.files, recipe, vocab_size=16, on_short=told, sleep=no_sleep
    )


async def _next(
    feed: Feed, cursor: Cursor = START, pools: DifficultyPools | None = None, **filters: object
) -> StepInput:
    async with asyncio.timeout(5):
        return await _reader(feed, **filters).next_step(cursor, PolicyVersion(0), pools)


def _submit(feed: Feed, seed: int, good: int) -> None:
    """Accept a submission in which `good` of two groups have unequal rewards."""
    rows = make_rollouts(seed)
    feed.submit(rows[: 4 * good] + with_reward(rows[4 * good :], 1.0))


async def test_step_goes_on_until_it_has_the_groups_it_needs() -> None:
    feed = Feed()
    for seed, good in enumerate([1, 0, 2, 2, 2]):
        _submit(feed, seed, good)
    taken = await _next(feed, refill_submissions=10)
    # 1 + 0 + 2 groups are one too few; the next submission brings two.
    assert (len(taken.groups), taken.end.position, taken.refill) == (5, 4, 2)
    assert taken.dropped == {Drop.ZERO_ADVANTAGE: 12}


async def test_full_step_takes_no_refill() -> None:
    feed = Feed()
    for seed in range(4):
        _submit(feed, seed, 2)
    taken = await _next(feed, refill_submissions=10)
    assert (taken.end.position, taken.refill) == (2, 0)
    assert len(feed.files.asked) == 2


async def test_unreadable_record_is_replaced_whatever_the_bound() -> None:
    feed = Feed()
    feed.ledger.accept(feed.files.put(b"broken"))
    _submit(feed, 0, 2)
    _submit(feed, 1, 2)
    taken = await _next(feed)
    assert (taken.end.position, taken.refill, len(taken.groups)) == (3, 1, 4)


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_file_that_was_accepted_twice_is_trained_on_once(is_restarted: bool) -> None:
    feed = Feed()
    for seed in (0, 1, 0, 2, 1, 3, 4):
        _submit(feed, seed, 2)
    reader = _reader(feed)
    first = await reader.next_step(START, PolicyVersion(0))
    assert len(first.groups) == 4
    second = await (_reader(feed) if is_restarted else reader).next_step(
        first.end, PolicyVersion(0)
    )
    assert second.dropped == {Drop.DUPLICATE: 16}
    assert (second.end.position, len(second.groups)) == (6, 4)


async def test_record_that_comes_as_the_step_begins_to_wait_is_not_missed() -> None:
    feed, loop = Feed(), asyncio.get_running_loop()
    for seed, good in enumerate([1, 1]):
        _submit(feed, seed, good)
    reader = _reader(feed, refill_submissions=8)
    # Runs in the loop's next turn.
    reader._on_short = lambda _: loop.call_soon(_submit, feed, 2, 2)  # type: ignore[assignment]
    async with asyncio.timeout(5):
        taken = await reader.next_step(START, PolicyVersion(0))
    assert taken.end.position == 3


async def test_empty_step_is_an_input_without_groups() -> None:
    feed = Feed()
    for seed in range(2):
        _submit(feed, seed, 0)
    taken = await _next(feed)
    assert (taken.groups, taken.end.position, taken.reward) == ([], 2, 1.0)


async def test_shortage_is_told_and_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "REPEAT_S", 0.005)
    feed, shortages = Feed(), list[Shortage]()
    for seed, good in enumerate([1, 1]):
        _submit(feed, seed, good)
    reader = _reader(feed, shortages, refill_submissions=8)
    waiting = asyncio.create_task(reader.next_step(START, PolicyVersion(0)))
    async with asyncio.timeout(5):
        while len(shortages) < 3:
            await asyncio.sleep(0.005)
    # Two groups of four are missing, and half of all are kept: two submissions more.
    assert set(shortages) == {Shortage(step=1, stream_from=0, refill=2)}  # type: ignore[arg-type]
    _submit(feed, 2, 2)
    assert (await waiting).refill == 1


async def test_nobody_is_told_of_an_ordinary_wait() -> None:
    feed, shortages = Feed(), list[Shortage]()
    _submit(feed, 0, 0)
    reader = _reader(feed, shortages, refill_submissions=8)
    waiting = asyncio.create_task(reader.next_step(START, PolicyVersion(0)))
    await asyncio.sleep(0.01)
    assert shortages == []
    waiting.cancel()


async def test_pools_are_carried_from_step_to_step() -> None:
    feed = Feed()
    for seed in range(4):
        _submit(feed, seed, 2)
    first = await _next(feed, pool_window=8)
    second = await _next(feed, first.end, first.pools, pool_window=8)
    assert second.pools.rates == {"p0": PassRate(4, 0.5), "p1": PassRate(4, 0.5)}


@given(
    st.lists(st.integers(0, GROUPS_EACH), min_size=2, max_size=24),
    st.integers(0, 6),
    st.integers(1, 3),
)
def test_nothing_is_trained_twice_or_lost(good: list[int], bound: int, attempts: int) -> None:
    """The trainer dies before its cursor is saved, any number of times, and reads again."""
    asyncio.run(_run_to_the_end(good, bound, attempts))


async def _run_to_the_end(good: list[int], bound: int, attempts: int) -> None:
    feed = Feed()
    for seed, number in enumerate(good):
        _submit(feed, seed, number)
    cursor, trained, dropped = START, 0, 0
    while (taken := await _try(feed, cursor, bound, attempts)) is not None:
        share = 2 + taken.refill
        assert taken.end.position - cursor.position == share <= 2 + bound
        is_full = len(taken.groups) >= 2 * GROUPS_EACH
        assert is_full or taken.refill == bound
        trained += len(taken.groups)
        dropped += taken.dropped.total() // 4
        cursor = taken.end
    assert trained == sum(good[: cursor.position])
    assert trained + dropped == GROUPS_EACH * cursor.position


async def _try(feed: Feed, cursor: Cursor, bound: int, attempts: int) -> StepInput | None:
    """Return the next step's input, None when the stream does not hold a whole one."""
    reader = _reader(feed, refill_submissions=bound)
    taken = None
    for _ in range(attempts):
        reading = asyncio.create_task(reader.next_step(cursor, PolicyVersion(0)))
        done, _ = await asyncio.wait([reading], timeout=0.05)
        if not done:
            reading.cancel()
            return None
        assert taken is None or taken == reading.result()
        taken = reading.result()
    return taken
