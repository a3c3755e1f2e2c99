"""Machines: reports are signed, requirements hold leases back, claims of speed are timed."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from orchestrator_bench import Bench, open_bench, refused
from orchestrator_fakes import RUN, Network, submission_for

from muster.api import HeartbeatAnswer, Lease, NoWork
from muster.orchestrator.db.query import plain
from muster.orchestrator.leases.fitness import CHALLENGES, RETEST_S, Timed, is_slow
from muster.protocol.eip712 import address_of, digest, sign
from muster.protocol.ids import RunId
from muster.protocol.messages import HardwareReport
from muster.protocol.recipe import HardwareRecipe, TrainingRecipe

ASKED = HardwareRecipe(min_memory_mb=1000, min_gpu_memory_mb=500, min_units_per_s=10.0)
PLENTY = TrainingRecipe(steps=100, submissions_per_step=50, max_async_level=1)


@pytest.fixture
async def asking(tmp_path: Path) -> AsyncIterator[Bench]:
    """An orchestrator of a run with requirements for machines."""
    async with open_bench(tmp_path, Network(training=PLENTY, hardware=ASKED)) as opened:
        yield opened


def report_of(bench: Bench, number: int = 0, **changes: Any) -> HardwareReport:
    said = HardwareReport(
        run_id=RUN,
        node=address_of(bench.network.keys.nodes[number]),
        cpu_cores=4,
        memory_mb=1000,
        gpus=1,
        gpu_memory_mb=500,
        issued_at=1,
    )
    return replace(said, **changes)


async def beat(
    bench: Bench, said: HardwareReport | None, *, key: bytes | None = None
) -> HeartbeatAnswer:
    """Send a heartbeat of node 0 with a report, signed by it or by another key."""
    hardware = None
    if said is not None:
        signed = digest(bench.network.domain, said.struct_hash())
        hardware = (said, sign(signed, key or bench.network.keys.nodes[0]))
    async with bench.node() as api:
        return await api.heartbeat(
            RUN, policy_version=None, state="idle", software="test", hardware=hardware
        )


async def reason(bench: Bench) -> str | None:
    answer = await bench.ask()
    return answer.reason if isinstance(answer, NoWork) else None


async def fill(bench: Bench, seconds: int, number: int) -> None:
    """Lease as node 0, and upload `seconds` later."""
    lease = await bench.lease()
    bench.set_chain_time(bench.network.chain.time + seconds)
    body = b"file %d" % number
    submission = submission_for(lease.ticket, body)
    async with bench.node() as api:
        await api.submit(submission, bench.network.sign_submission(submission, 0), body)


# Reports


async def test_a_run_that_asks_for_nothing_wants_no_report(bench: Bench) -> None:
    assert not (await beat(bench, None)).wants_hardware
    assert isinstance(await bench.ask(), Lease)


async def test_there_is_no_ticket_until_a_machine_says_what_it_has(asking: Bench) -> None:
    assert (await beat(asking, None)).wants_hardware
    assert await reason(asking) == "hardware_unknown"
    assert not (await beat(asking, report_of(asking))).wants_hardware
    assert isinstance(await asking.ask(), Lease)


@pytest.mark.parametrize("changes", [{"memory_mb": 999}, {"gpu_memory_mb": 499}])
async def test_a_machine_with_less_than_is_asked_for_gets_no_ticket(
    asking: Bench, changes: dict[str, int]
) -> None:
    await beat(asking, report_of(asking, **changes))
    assert await reason(asking) == "hardware_short"
    await beat(asking, report_of(asking))
    assert isinstance(await asking.ask(), Lease)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({}, b"\x77" * 32),
        ({"node": address_of(b"\x77" * 32)}, None),
        ({"node": address_of(b"\x77" * 32)}, b"\x77" * 32),
        ({"run_id": RunId(RUN + 1)}, None),
    ],
)
async def test_a_report_that_is_not_the_nodes_own_is_refused(
    asking: Bench, changes: dict[str, Any], key: bytes | None
) -> None:
    _, code = await refused(beat(asking, report_of(asking, **changes), key=key))
    assert code == "bad_hardware_report"
    assert await reason(asking) == "hardware_unknown"


async def test_a_report_outlives_a_restart_with_its_hash(tmp_path: Path) -> None:
    network = Network(training=PLENTY, hardware=ASKED)
    async with open_bench(tmp_path, network) as first:
        said = report_of(first)
        await beat(first, said)
    async with open_bench(tmp_path, network, start_s=1) as second:
        assert second.services.hardware.reports == {said.node: said}
        assert isinstance(await second.ask(), Lease)
        [rows] = await second.services.database.ask(plain("SELECT report_hash FROM hardware"))
    assert rows == [(said.struct_hash(),)]


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1))
def test_a_report_survives_a_round_trip(cores: int, memory: int) -> None:
    said = HardwareReport(RUN, address_of(b"\x01" * 32), cores, memory, 2, 80_000, 7)
    assert HardwareReport.from_json(said.to_json()) == said


# The timed challenge


async def test_a_machine_too_slow_for_its_claim_is_held_back_and_may_try_again(
    asking: Bench,
) -> None:
    await beat(asking, report_of(asking))
    for number in range(CHALLENGES):
        assert isinstance(await asking.ask(), Lease)
        await fill(asking, 50, number)
    assert await reason(asking) == "too_slow"
    asking.set_chain_time(asking.network.chain.time + RETEST_S)
    assert isinstance(await asking.ask(), Lease)


async def test_one_good_ticket_of_the_last_makes_up_for_bad_ones(asking: Bench) -> None:
    await beat(asking, report_of(asking))
    for number, seconds in enumerate([50, 1, 50]):
        await fill(asking, seconds, number)
    assert isinstance(await asking.ask(), Lease)


async def test_tickets_that_lapse_are_worth_nothing(asking: Bench) -> None:
    await beat(asking, report_of(asking))
    for _ in range(CHALLENGES):
        assert isinstance(await asking.ask(), Lease)
        asking.set_chain_time(asking.network.chain.time + 61)
    assert await reason(asking) == "too_slow"


def test_speed_is_units_over_whole_seconds() -> None:
    assert Timed(units=100, seconds=10, ended_at=0).units_per_s == 10
    assert Timed(units=100, seconds=0, ended_at=0).units_per_s == 100


@given(st.lists(st.integers(0, 100), max_size=6), st.integers(0, 2 * RETEST_S))
def test_nobody_is_slow_before_the_challenge_is_over_or_long_after(
    units: list[int], waited_s: int
) -> None:
    timed = [Timed(each, 1, 1000) for each in units]
    expected = len(timed) >= CHALLENGES and max(units) < 10 and waited_s < RETEST_S
    assert is_slow(timed, ASKED, 1000 + waited_s) == expected
    assert not is_slow(timed, HardwareRecipe(), 1000)
