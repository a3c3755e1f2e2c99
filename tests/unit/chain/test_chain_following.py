import asyncio
import logging

import pytest
from chain_fakes import FakeNode, address, deposit

from muster.chain import ChainView, Event, follow, read_until


class Stopped(Exception):
    """Ends a follower from inside its sleep."""


class Naps:
    """Counts pauses, runs callbacks in them, and stops after the last."""

    def __init__(self, *between: object) -> None:
        self.between = list(between)
        self.pauses: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.pauses.append(seconds)
        if not self.between:
            raise Stopped
        action = self.between.pop(0)
        if callable(action):
            action()


def stakers(view: ChainView) -> list[str]:
    return sorted(owner for _, owner in view.stakes)


async def followed(
    node: FakeNode, view: ChainView, naps: Naps, seen: list[list[Event]] | None = None
) -> None:
    async def on_change(events: list[Event]) -> None:
        assert seen is not None
        seen.append(events)

    with pytest.raises(Stopped):
        await follow(
            node, view, poll_s=1.0, on_change=None if seen is None else on_change, sleep=naps
        )


async def test_follower_fills_an_empty_view_and_keeps_it_current() -> None:
    node, view, seen = FakeNode(), ChainView(), list[list[Event]]()
    node.mine(deposit(1))
    await followed(node, view, Naps(lambda: node.mine(deposit(2)), None), seen)
    assert stakers(view) == [address(1), address(2)]
    assert [len(events) for events in seen] == [1, 1]


async def test_follower_stays_behind_until_blocks_are_confirmed() -> None:
    node, view = FakeNode(), ChainView()
    node.mine(deposit(1))
    naps = Naps(lambda: node.mine(deposit(2)), lambda: node.mine(deposit(3)), None)
    with pytest.raises(Stopped):
        await follow(node, view, poll_s=1.0, confirmations=2, sleep=naps)
    assert stakers(view) == [address(1)]


async def test_follower_says_nothing_when_nothing_changes() -> None:
    node, seen = FakeNode(), list[list[Event]]()
    await followed(node, ChainView(), Naps(None, None), seen)
    assert seen == []


async def test_follower_works_without_a_listener() -> None:
    node, view = FakeNode(), ChainView()
    node.mine(deposit(1))
    await followed(node, view, Naps())
    assert len(view.stakes) == 1


async def test_follower_continues_a_view_that_was_read_before() -> None:
    node, view, seen = FakeNode(), ChainView(), list[list[Event]]()
    node.mine(deposit(1))
    await followed(node, view, Naps())
    node.mine(deposit(2))
    await followed(node, view, Naps(), seen)
    assert [len(events) for events in seen] == [1]
    assert len(view.stakes) == 2


async def test_follower_tells_of_events_that_were_taken_back() -> None:
    node, view, seen = FakeNode(), ChainView(), list[list[Event]]()
    node.mine(deposit(1))
    node.mine(deposit(2))
    await followed(node, view, Naps(lambda: (node.reorganise(1), node.mine()), None), seen)
    assert [len(events) for events in seen] == [2, 0]
    assert stakers(view) == [address(1)]


async def test_follower_lives_through_an_outage(caplog: pytest.LogCaptureFixture) -> None:
    node, view = FakeNode(), ChainView()
    node.failures = [OSError(), OSError(), OSError()]
    node.mine(deposit(1))
    naps = Naps(None, None, None, None)
    with caplog.at_level(logging.INFO):
        await followed(node, view, naps)
    assert len(view.stakes) == 1
    messages = [record.message for record in caplog.records]
    assert messages == ["the chain is not available", "the chain is available again"]


async def test_pauses_grow_in_an_outage_up_to_a_bound() -> None:
    node, naps = FakeNode(), Naps(*[None] * 20)
    node.failures = [OSError()] * 30
    await followed(node, ChainView(), naps)
    assert naps.pauses[0] <= 2
    assert 7.5 <= naps.pauses[-1] <= 15


async def test_error_of_the_listener_ends_the_follower(node: FakeNode) -> None:
    node.mine(deposit(1))

    async def on_change(_events: list[Event]) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await follow(node, ChainView(), poll_s=1.0, on_change=on_change)


async def test_follower_can_be_cancelled() -> None:
    task = asyncio.create_task(follow(FakeNode(), ChainView(), poll_s=60))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def waited_for(node: FakeNode, view: ChainView, wanted: int, naps: Naps) -> None:
    """Read until somebody's stake is there, two blocks behind the head."""

    def is_there() -> bool:
        return address(wanted) in stakers(view)

    await read_until(node, view, is_there, poll_s=1.0, confirmations=2, sleep=naps)


async def test_what_is_not_confirmed_yet_is_waited_for() -> None:
    node, view = FakeNode(), ChainView()
    node.mine(deposit(1))
    await waited_for(node, view, 1, Naps(node.mine, node.mine))
    assert stakers(view) == [address(1)]
    # What is there needs no block and no pause.
    await waited_for(node, view, 1, Naps())


async def test_what_is_in_no_block_is_waited_for_until_the_newest_is_confirmed() -> None:
    node, view = FakeNode(), ChainView()
    node.mine(deposit(1))
    naps = Naps(node.mine, node.mine, node.mine)
    await waited_for(node, view, 2, naps)
    assert len(naps.pauses) == 2
    assert stakers(view) == [address(1)]


async def test_an_outage_ends_no_waiting() -> None:
    node, view = FakeNode(), ChainView()
    node.mine(deposit(1))

    def fail() -> None:
        node.failures = [OSError()]
        node.mine()
        node.mine()

    naps = Naps(fail, None)
    await waited_for(node, view, 1, naps)
    assert len(naps.pauses) == 2


async def test_a_chain_that_stands_still_is_not_waited_for_for_ever() -> None:
    node, view = FakeNode(), ChainView()
    node.mine(deposit(1))
    await read_until(node, view, lambda: False, poll_s=0.0, confirmations=2, within_s=0.01)
    assert stakers(view) == []
