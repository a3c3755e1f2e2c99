"""Scarce tickets are shared by free collateral, and no request is queued."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from orchestrator_bench import open_bench
from orchestrator_fakes import RUN, STAKE_PER_UNIT, Network

from muster.api import Lease, NoWork
from muster.orchestrator.leases.shares import Turns
from muster.protocol.encoding import keccak
from muster.protocol.ids import Address, to_address
from muster.protocol.recipe import TrainingRecipe

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
