"""Simultaneous requests are served together, and each is answered."""

import asyncio
from collections.abc import Sequence

from muster.orchestrator.db.group import GroupedCalls
from muster.protocol.errors import StorageError


class Service:
    """Serves numbers; records the groups in which they came."""

    def __init__(self) -> None:
        self.groups: list[list[int]] = []
        self.failure: BaseException | None = None

    async def serve(self, items: Sequence[int]) -> list[int | Exception]:
        self.groups.append(list(items))
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        return [ValueError(f"{item} is odd") if item % 2 else 10 * item for item in items]


async def test_those_who_ask_at_the_same_moment_are_served_together() -> None:
    service = Service()
    grouped = GroupedCalls(service.serve)
    answers = await asyncio.gather(*map(grouped.join, range(4)), return_exceptions=True)
    assert [answers[0], answers[2]] == [0, 20]
    assert [str(answers[1]), str(answers[3])] == ["1 is odd", "3 is odd"]
    assert service.groups == [[0, 1, 2, 3]]
    assert await grouped.join(6) == 60
    assert service.groups[1:] == [[6]]


async def test_failure_is_everybodys_and_the_next_group_is_served() -> None:
    service = Service()
    grouped = GroupedCalls(service.serve)
    service.failure = StorageError("away")
    answers = await asyncio.gather(*map(grouped.join, range(3)), return_exceptions=True)
    assert [str(each) for each in answers] == ["away"] * 3
    service.failure = None
    assert await grouped.join(2) == 20


async def test_those_who_wait_are_told_when_their_group_is_cancelled() -> None:
    service = Service()
    grouped = GroupedCalls(service.serve)
    service.failure = asyncio.CancelledError()
    tasks = [asyncio.create_task(grouped.join(number)) for number in range(3)]
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(answers[0], asyncio.CancelledError)
    assert [str(each) for each in answers[1:]] == ["the orchestrator is stopping"] * 2
