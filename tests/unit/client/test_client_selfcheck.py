"""What a worker finds out about its own work before it signs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from client_desk import Desk, run_until
from client_world import (
    CALIBRATION,
    RECIPE,
    VERSION,
    HashEngine,
    make_rollouts,
    make_ticket,
)

from muster.client.worker import selfcheck
from muster.client.worker.selfcheck import FIRST_ROWS, require_sound
from muster.protocol.errors import EngineError
from muster.protocol.ids import PolicyVersion
from muster.protocol.rollouts import Rollout

ROWS = make_rollouts(make_ticket())


def check(rows: list[Rollout], engine: HashEngine | None = None) -> int:
    return require_sound(rows, RECIPE, CALIBRATION, engine or HashEngine(VERSION), 0.1)


def test_honest_work_is_checked_whole_where_that_takes_no_time() -> None:
    assert check(ROWS * 3) == 3 * len(ROWS)


@pytest.mark.parametrize("number", range(4))
def test_one_row_that_is_not_what_the_engine_makes_is_found(number: int) -> None:
    rows = list(ROWS)
    proofs = rows[number].proofs
    rows[number] = replace(rows[number], proofs=proofs[:-1] + bytes([proofs[-1] ^ 1]))
    with pytest.raises(EngineError, match=rf"1 strikes in {len(rows)} rows") as raised:
        check(rows)
    assert "muster doctor" in raised.value.hint


def test_proofs_that_are_none_are_found() -> None:
    rows = [replace(ROWS[0], proofs=ROWS[0].proofs[:-1]), *ROWS[1:]]
    with pytest.raises(EngineError, match="bytes of proofs"):
        check(rows)


def test_weights_of_another_version_are_found() -> None:
    with pytest.raises(EngineError, match="exponent"):
        check(ROWS, HashEngine(PolicyVersion(VERSION + 1)))


def test_what_takes_long_is_checked_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, selfcheck.LEAST_S / 2])
    monkeypatch.setattr(selfcheck.time, "perf_counter", lambda: next(ticks))
    assert check(ROWS * 8) == 2 * FIRST_ROWS


def test_at_least_some_rows_are_checked_however_long_that_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks = iter([0.0, 100 * selfcheck.LEAST_S])
    monkeypatch.setattr(selfcheck.time, "perf_counter", lambda: next(ticks))
    assert check(ROWS * 8) == FIRST_ROWS


# In the loop


class Disturbed(HashEngine):
    """What it generates under its first load is another version's."""

    def generate(self, *args: Any, **options: Any) -> Any:
        if len(self.loaded) > 1:
            return super().generate(*args, **options)
        return HashEngine(PolicyVersion(VERSION + 1)).generate(*args, **options)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path, engine=Disturbed())
    yield desk
    desk.close()


async def test_disturbed_work_is_never_signed(desk: Desk) -> None:
    desk.orchestrator.tickets.append(make_ticket())
    with pytest.raises(EngineError, match="strikes"):
        await desk.loop.work_once()
    assert not desk.orchestrator.uploads
    assert desk.journal.signed(make_ticket()) is None


async def test_weights_are_read_again_and_the_ticket_is_worked_on(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    desk.orchestrator.tickets += [make_ticket(), make_ticket()]
    with caplog.at_level(logging.WARNING):
        await run_until(desk.loop, lambda: bool(desk.orchestrator.uploads))
    assert len(desk.engine.loaded) == 2
    [said] = [r for r in caplog.records if "the engine is not available" in r.getMessage()]
    assert "own work fails its check: 4 strikes in 4 rows" in vars(said)["error"]
