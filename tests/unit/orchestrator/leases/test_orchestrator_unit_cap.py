"""No worker gets more work than its stake covers, or work that the run cannot pay for."""

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from orchestrator_bench import Bench, open_bench
from orchestrator_fakes import FRAUD, NOW, RUN, STAKE_PER_UNIT, Network

from muster.api import Lease, NoWork
from muster.orchestrator.intake.batching import Composition
from muster.orchestrator.leases.shares import free_leases, max_units
from muster.protocol.errors import ContractRevert
from muster.protocol.recipe import SamplingRecipe, TrainingRecipe

MAX_UNITS, UNITS = 32, 20
"""Units of one submission: the maximum, and the tests' claim."""


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    training = TrainingRecipe(steps=0, submissions_per_step=50, max_async_level=1)
    async with open_bench(tmp_path, Network(training=training)) as opened:
        yield opened


def cover(bench: Bench, units: int) -> None:
    """Let node 0's stake cover exactly so many units."""
    bench.network.worker(0).stake.active_wei = units * STAKE_PER_UNIT + STAKE_PER_UNIT - 1


async def in_flight(bench: Bench, *, lapses: bool = False) -> int:
    leases, worker = bench.services.leases, bench.network.worker(0)
    snapshot = await leases.read_snapshot(bench.services.database, [worker])
    account = snapshot.accounts[worker.address]
    since = leases.unit_cap.counts_from(snapshot.now, lapses=lapses)
    leased = sum(each.deadline >= since for each in account.unfilled)
    return leases.unit_cap.in_flight(
        worker, leased=leased, waiting=account.waiting_units, now=snapshot.now
    )


UNCOVERED = NoWork(retry_after_s=1.0, reason="unit_cap")


@given(st.integers(0, 10**9), st.integers(1, 10**6), st.integers(1, 100), st.integers(1, 10**20))
def test_stake_covers_leases_up_to_the_boundary(
    in_flight: int, per_lease: int, leases: int, per_unit: int
) -> None:
    enough = (in_flight + leases * per_lease) * per_unit
    assert free_leases(in_flight, per_lease, enough, per_unit) == leases
    assert free_leases(in_flight, per_lease, enough - 1, per_unit) == leases - 1


def test_overdrawn_stake_covers_no_lease() -> None:
    assert free_leases(100, 10, 50, 1) == 0


def test_submission_is_worth_every_token_of_every_sample_at_most() -> None:
    sampling = SamplingRecipe(
        problems_per_submission=2, samples_per_problem=3, temperature=1.0, max_new_tokens=7
    )
    assert max_units(sampling) == 42


async def test_lease_is_given_at_the_boundary_and_withheld_below(bench: Bench) -> None:
    cover(bench, MAX_UNITS - 1)
    assert await bench.ask() == UNCOVERED
    cover(bench, MAX_UNITS)
    assert isinstance(await bench.ask(), Lease)
    assert await in_flight(bench) == MAX_UNITS


async def test_units_stay_in_flight_from_lease_to_final(bench: Bench) -> None:
    cover(bench, UNITS + MAX_UNITS - 1)
    submission = await bench.upload(0)
    assert await in_flight(bench) == UNITS
    assert await bench.ask() == UNCOVERED
    await bench.commit()
    assert await in_flight(bench) == UNITS
    await bench.judge(1, [submission])
    await bench.record()
    assert await in_flight(bench) == UNITS
    bench.set_chain_time(NOW + 99)
    assert await bench.ask() == UNCOVERED
    bench.set_chain_time(NOW + 100)
    assert await in_flight(bench) == 0
    assert isinstance(await bench.ask(), Lease)


async def test_unjudged_units_are_free_once_nobody_can_appeal(bench: Bench) -> None:
    await bench.upload(0)
    await bench.commit()
    bench.set_chain_time(NOW + 1099)
    assert await in_flight(bench) == UNITS
    bench.set_chain_time(NOW + 1100)
    assert await in_flight(bench) == 0


async def test_expired_lease_counts_until_its_upload_can_be_committed_no_more(bench: Bench) -> None:
    lease = await bench.lease()
    bench.set_chain_time(lease.ticket.deadline + 60)
    assert await in_flight(bench) == MAX_UNITS
    bench.set_chain_time(lease.ticket.deadline + 61)
    assert await in_flight(bench) == 0
    # A worker that lets each ticket lapse: it counts as if filled, for 100 s more.
    bench.set_chain_time(lease.ticket.deadline + 160)
    assert await in_flight(bench, lapses=True) == MAX_UNITS
    bench.set_chain_time(lease.ticket.deadline + 161)
    assert await in_flight(bench, lapses=True) == 0


async def test_disputed_units_are_in_flight_until_the_case_closes(bench: Bench) -> None:
    await bench.run_through(0)
    case = bench.network.open_case(1, 0, FRAUD)
    assert await in_flight(bench) == UNITS
    bench.set_chain_time(NOW + 10_000)
    assert await in_flight(bench) == UNITS
    bench.network.close_case(case)
    assert await in_flight(bench) == 0


async def test_units_taken_out_of_an_unjudged_batch_count_once(bench: Bench) -> None:
    submission = await bench.upload(0)
    await bench.commit()
    batch = bench.network.view.batches[1]
    bench.set_chain_time(batch.committed_at + 1000)
    bench.network.chain.ledger.split_off(batch, bench.network.work(submission))
    await bench.follow()
    assert await in_flight(bench) == UNITS
    await bench.network.chain.ledger.void_batch(batch.header())
    await bench.follow()
    assert await in_flight(bench) == UNITS
    await bench.network.chain.ledger.void_batch(bench.network.view.batches[2].header())
    await bench.follow()
    assert await in_flight(bench) == 0


async def test_others_units_do_not_count(bench: Bench) -> None:
    await bench.run_through(2, b"another")
    await bench.upload(1)
    assert await in_flight(bench) == 0


# Funds


async def test_unfunded_batch_pauses_leases_until_it_can_be_paid(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    await bench.upload(0)
    refusal = ContractRevert("EscrowUnderfunded", (RUN, 0, UNITS * 10**12))
    for _ in range(3):
        bench.network.chain.ledger.fail_next = refusal
        await bench.services.batching.next()
        the_batch(bench).not_before = 0.0
        assert not await bench.commit()
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "muster run fund" in warnings[0].hint  # type: ignore[attr-defined]
    assert bench.services.status.phase() == "waiting for funds"
    assert await bench.ask() == NoWork(retry_after_s=1.0, reason="unfunded")
    the_batch(bench).not_before = 0.0
    assert await bench.commit()
    assert bench.services.status.phase() == "collecting"
    assert isinstance(await bench.ask(), Lease)


def the_batch(bench: Bench) -> Composition:
    [composition] = bench.services.batching._uncommitted.values()
    return composition


async def test_other_refusals_of_a_commitment_pause_no_leases(bench: Bench) -> None:
    await bench.upload(0)
    bench.network.chain.ledger.fail_next = ContractRevert("LedgerPaused", (RUN,))
    assert not await bench.commit()
    assert isinstance(await bench.ask(), Lease)
