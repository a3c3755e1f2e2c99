"""What is asked of the database directly, and of a service together, in both databases."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from orchestrator_bench import Bench
from sqlalchemy import select

from muster.orchestrator.db.direct import Rows, Statement
from muster.orchestrator.db.models import MetricsRow
from muster.orchestrator.together import Together
from muster.protocol.errors import StorageError

STEPS: Statement = ("SELECT step FROM metrics ORDER BY step", ())


def write(step: int) -> Statement:
    return "INSERT INTO metrics (step, figures, revision) VALUES (?, '{}', 0)", (step,)


def write_new(step: int) -> Statement:
    sql, values = write(step)
    return f"{sql} ON CONFLICT DO NOTHING RETURNING step", values


async def steps(bench: Bench) -> list[int]:
    [rows] = await bench.services.database.direct.ask(STEPS)
    return [step for (step,) in rows]


async def test_statements_are_answered_in_order(bench: Bench) -> None:
    async with bench.services.database.direct.transaction() as asked:
        answers: list[Rows] = await asked.ask(write_new(3), write_new(3), write(1), STEPS)
    assert [list(rows) for rows in answers] == [[(3,)], [], [], [(1,), (3,)]]
    assert await steps(bench) == [1, 3]


async def test_nobody_sees_what_is_not_committed(bench: Bench) -> None:
    async with bench.services.database.direct.transaction() as asked:
        await asked.ask(write_new(1))
        assert await steps(bench) == []
        async with bench.services.database.read() as session:
            assert (await session.scalars(select(MetricsRow.step))).all() == []
    assert await steps(bench) == [1]


@pytest.mark.parametrize("is_exclusive", [True, False])
async def test_transaction_that_fails_leaves_nothing(bench: Bench, is_exclusive: bool) -> None:
    direct = bench.services.database.direct

    async def start() -> None:
        async with direct.transaction(is_exclusive=is_exclusive) as asked:
            await asked.ask(write_new(1))
            raise ValueError("changed my mind")

    with pytest.raises(ValueError, match="changed my mind"):
        await start()
    async with direct.transaction(is_exclusive=is_exclusive) as asked:
        await asked.ask(write(2))
    assert await steps(bench) == [2]


async def test_statement_that_fails_is_a_storage_error_and_the_next_goes_on(bench: Bench) -> None:
    direct = bench.services.database.direct
    with pytest.raises(StorageError, match="unusable"):
        async with direct.transaction() as asked:
            await asked.ask(write(1), write(1))
    with pytest.raises(StorageError, match="nowhere"):
        await direct.ask(("SELECT 1 FROM nowhere", ()))
    async with direct.transaction() as asked:
        await asked.ask(write(2))
    assert await steps(bench) == [2]


async def test_exclusive_transactions_take_turns_with_sessions(bench: Bench) -> None:
    database = bench.services.database
    order: list[str] = []

    async def in_session() -> None:
        async with database.write():
            order.append("session")

    async with database.direct.transaction() as asked:
        await asked.ask(write_new(1))
        other = asyncio.create_task(in_session())
        await asyncio.sleep(0.05)
        order.append("direct")
    await other
    assert order == ["direct", "session"]


class Service:
    """Serves numbers; notes in which groups they came."""

    def __init__(self) -> None:
        self.groups: list[list[int]] = []
        self.failure: BaseException | None = None

    async def serve(self, items: Sequence[int]) -> list[int | Exception]:
        self.groups.append(list(items))
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        return [ValueError(f"{item} is odd") if item % 2 else 10 * item for item in items]


@pytest.mark.sqlite_only
async def test_those_who_ask_at_the_same_moment_are_served_together() -> None:
    service = Service()
    together = Together(service.serve)
    answers = await asyncio.gather(*map(together.join, range(4)), return_exceptions=True)
    assert [answers[0], answers[2]] == [0, 20]
    assert [str(answers[1]), str(answers[3])] == ["1 is odd", "3 is odd"]
    assert service.groups == [[0, 1, 2, 3]]
    assert await together.join(6) == 60
    assert service.groups[1:] == [[6]]


@pytest.mark.sqlite_only
async def test_failure_is_everybodys_and_the_next_group_is_served() -> None:
    service = Service()
    together = Together(service.serve)
    service.failure = StorageError("away")
    answers = await asyncio.gather(*map(together.join, range(3)), return_exceptions=True)
    assert [str(each) for each in answers] == ["away"] * 3
    service.failure = None
    assert await together.join(2) == 20


@pytest.mark.sqlite_only
async def test_those_who_wait_are_told_when_their_group_is_cancelled() -> None:
    service = Service()
    together = Together(service.serve)
    service.failure = asyncio.CancelledError()
    tasks = [asyncio.create_task(together.join(number)) for number in range(3)]
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(answers[0], asyncio.CancelledError)
    assert [str(each) for each in answers[1:]] == ["the orchestrator is stopping"] * 2
