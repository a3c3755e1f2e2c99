"""No worker gets more work than its stake covers, or work that the run cannot pay for."""

import logging
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from orchestrator_bench import Bench, open_bench
from orchestrator_fakes import FRAUD, NOW, RUN, STAKE_PER_UNIT, Network

from muster.api import Lease, NoWork
from muster.orchestrator.intake.batching import Composition
from muster.orchestrator.leases.shares import Turns, free_leases
from muster.protocol.encoding import keccak
from muster.protocol.errors import ContractRevert
from muster.protocol.ids import Address, to_address
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
    assert sampling.max_units == 42


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


async def unfunded(bench: Bench) -> Composition:
    """A batch that the run could not pay for."""
    await bench.upload(0)
    bench.network.chain.ledger.funded_units = 0
    assert not await bench.commit()
    await bench.services.batching.share()
    assert await bench.ask() == NoWork(retry_after_s=1.0, reason="unfunded")
    return the_batch(bench)


async def test_batch_that_reached_the_chain_otherwise_pauses_no_leases(bench: Bench) -> None:
    composition = await unfunded(bench)
    bench.network.chain.ledger.commit(RUN, composition.root, composition.count, composition.units)
    await bench.follow()
    await bench.services.batching.share()
    assert isinstance(await bench.ask(), Lease)


async def test_paid_batch_pauses_no_leases_although_replicas_know_it_as_unfunded(
    bench: Bench,
) -> None:
    composition = await unfunded(bench)
    bench.network.chain.ledger.funded_units = UNITS
    composition.not_before = 0.0
    assert await bench.commit()
    await bench.ask()
    await bench.services.batching.share()
    assert isinstance(await bench.ask(), Lease)


def the_batch(bench: Bench) -> Composition:
    [composition] = bench.services.batching._uncommitted.values()
    return composition


async def test_other_refusals_of_a_commitment_pause_no_leases(bench: Bench) -> None:
    await bench.upload(0)
    bench.network.chain.ledger.fail_next = ContractRevert("LedgerPaused", (RUN,))
    assert not await bench.commit()
    assert isinstance(await bench.ask(), Lease)


# Scarce tickets are shared by free collateral, and no request is queued.

NODES = [to_address(keccak(b"node %d" % i)[12:]) for i in range(12)]


class Desk:
    """Everybody asks once a second, and again when served; one ticket at a time comes free."""

    def __init__(self, weights: dict[Address, int]) -> None:
        self.time = 0.0
        self.turns = Turns(patience_s=2, clock=lambda: self.time)
        self.weights = weights
        self.got: Counter[Address] = Counter()

    def second(self, tickets: int = 1, asking: list[Address] | None = None) -> None:
        self.time += 1
        for node in asking or list(self.weights):
            if not tickets:
                self.turns.ask(node)
            elif self.turns.may_go(node, self.weights[node], tickets):
                self.turns.served(node)
                self.got[node] += 1
                tickets -= 1
                self.turns.ask(node)


def everybody_waits(desk: Desk) -> None:
    for node, weight in desk.weights.items():
        desk.turns.may_go(node, weight, 0)


def test_nobody_waits_while_there_is_enough() -> None:
    desk = Desk(dict.fromkeys(NODES, 1))
    everybody_waits(desk)
    assert all(desk.turns.may_go(node, 1, len(NODES)) for node in NODES)


def test_tickets_are_shared_by_weight() -> None:
    weights = dict(zip(NODES, (1, 1, 2, 4), strict=False))
    desk = Desk(weights)
    everybody_waits(desk)
    for _ in range(800):
        desk.second()
    assert [desk.got[node] for node in weights] == pytest.approx([100, 100, 200, 400], abs=4)


def test_stake_split_among_many_nodes_gets_no_more() -> None:
    weights = {NODES[0]: 8} | dict.fromkeys(NODES[1:9], 1)
    desk = Desk(weights)
    everybody_waits(desk)
    for _ in range(800):
        desk.second()
    assert desk.got[NODES[0]] == pytest.approx(400, abs=10)


def test_first_to_ask_again_does_not_take_it_all() -> None:
    desk = Desk(dict.fromkeys(NODES[:3], 1))
    everybody_waits(desk)
    for _ in range(30):
        desk.second()
    assert set(desk.got.values()) == {10}


def test_who_went_away_is_not_waited_for() -> None:
    desk = Desk(dict.fromkeys(NODES[:3], 1))
    everybody_waits(desk)
    for _ in range(12):
        desk.second(asking=NODES[1:2])
    assert desk.got[NODES[1]] >= 9


def test_who_may_have_none_is_not_waited_for_until_it_may() -> None:
    desk = Desk(dict.fromkeys(NODES[:2], 1))
    unfit, other = NODES[:2]
    assert desk.turns.may_go(unfit, 5, 1)
    desk.turns.withdraw(unfit)
    desk.turns.ask(unfit)
    assert desk.turns.may_go(other, 1, 1)
    assert desk.turns.may_go(unfit, 5, 1)
    assert not desk.turns.may_go(other, 1, 1)


def test_turns_are_not_saved_up_while_away() -> None:
    desk = Desk(dict.fromkeys(NODES[:2], 1))
    for _ in range(50):
        desk.second(asking=NODES[:1])
    everybody_waits(desk)
    before = desk.got[NODES[0]]
    for _ in range(20):
        desk.second()
    assert desk.got[NODES[0]] - before >= 9


def test_nothing_is_remembered_of_who_has_no_turn_behind_it() -> None:
    desk = Desk(dict.fromkeys(NODES, 1))
    for _ in range(5):
        desk.second(tickets=12)
    desk.time += 10
    desk.turns.may_go(NODES[0], 1, 1)
    desk.turns.served(NODES[0])
    desk.time += 10
    desk.turns.may_go(NODES[0], 1, 1)
    assert len(desk.turns._waiting) == 1
    assert len(desk.turns._ended) <= len(NODES)


@given(st.lists(st.integers(1, 9), min_size=2, max_size=12), st.integers(1, 5))
def test_no_ticket_is_kept_back_while_all_ask(weights: list[int], tickets: int) -> None:
    desk = Desk(dict(zip(NODES, weights, strict=False)))
    everybody_waits(desk)
    served = [n for n, w in desk.weights.items() if desk.turns.may_go(n, w, tickets)]
    assert len(served) == min(tickets, len(weights))


async def test_second_ticket_goes_to_who_has_had_none(tmp_path: Path) -> None:
    training = TrainingRecipe(steps=0, submissions_per_step=1, max_async_level=0)
    network = Network(training=training)
    async with open_bench(tmp_path, network, retry_after_s=30) as bench:
        first, second = bench.node(0), bench.node(1)
        async with first, second:
            assert isinstance(await first.lease(RUN), Lease)
            assert await second.lease(RUN) == NoWork(retry_after_s=30.0)
            await bench.run_through(0)
            network.publish(1)
            # Both waited for the one ticket: the worker with more free collateral goes first,
            network.worker(1).stake.active_wei = 10**6 * STAKE_PER_UNIT
            assert isinstance(await second.lease(RUN), Lease)
            # and nothing is left for the other.
            assert await first.lease(RUN) == NoWork(retry_after_s=30.0)
