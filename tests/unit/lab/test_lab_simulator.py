"""The simulated network: virtual time, invariants under faults, one seed one history."""

import asyncio
import logging
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, seed, settings, strategies as st

from muster.lab.economics.judges import dishonest_majority
from muster.lab.simulator import invariants
from muster.lab.simulator.clock import Metered, VirtualLoop, charged, run_virtual
from muster.lab.simulator.coalitions import (
    PROMISES,
    Found,
    Stage,
    play_all,
    require_other_run_untouched,
)
from muster.lab.simulator.figures import figures_of, spread
from muster.lab.simulator.money import require_sound
from muster.lab.simulator.network import simulate
from muster.lab.simulator.scenario import Scenario, fixed
from muster.lab.simulator.world import World

SMALL = Scenario(workers=4, validators=4, duration_s=80.0, conduct=(("forger", 1), ("liar", 1)))
CHAOS = replace(
    SMALL,
    validators=5,
    duration_s=120.0,
    judging=(("colluding", 1),),
    loss=0.03,
    churn_s=60.0,
    disk_full_s=15.0,
    outage_s=40.0,
    reorganise_s=30.0,
    skew_s=3,
    relay_failures=0.1,
    has_disputes=True,
)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


async def nothing(_world: World) -> None:
    """Look at nothing."""


@pytest.fixture(scope="module")
def chaos() -> World:
    logging.disable(logging.CRITICAL)
    world = simulate(CHAOS, invariants.hold)
    logging.disable(logging.NOTSET)
    return world


# ------------------------------------------------------------------- virtual time


def test_hours_pass_at_once() -> None:
    async def main() -> float:
        await asyncio.sleep(7200)
        return asyncio.get_running_loop().time()

    began = time.perf_counter()
    now, _meter = run_virtual(main)
    assert now == pytest.approx(7200)
    assert time.perf_counter() - began < 60


def test_timers_fire_in_their_order_and_timeouts_hold() -> None:
    async def main() -> list[str]:
        order: list[str] = []

        async def after(seconds: float, name: str) -> None:
            await asyncio.sleep(seconds)
            order.append(name)

        async with asyncio.TaskGroup() as tasks:
            for seconds, name in ((3, "c"), (1, "a"), (2, "b")):
                tasks.create_task(after(seconds, name))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.sleep(6)
        return order

    assert run_virtual(main)[0] == ["a", "b", "c"]


def test_what_goes_to_a_thread_runs_at_once_and_keeps_its_error() -> None:
    async def main() -> int:
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        return await asyncio.to_thread(lambda: 7)

    assert run_virtual(main)[0] == 7


def test_a_network_in_which_nothing_can_happen_is_an_error() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="every task waits"):
        run_virtual(main)


def test_costs_are_charged_to_the_innermost_kind() -> None:
    async def spend() -> int:
        end = time.process_time() + 0.02
        while time.process_time() < end:
            pass
        await asyncio.sleep(1)
        return 3

    async def main() -> int:
        return await charged("inner", spend())

    result, meter = run_virtual(main)
    assert result == 3
    assert meter.seconds["inner"] > 0
    assert meter.seconds["harness"] < meter.seconds["inner"]


def test_a_metered_coroutine_passes_errors_both_ways() -> None:
    async def inner() -> str:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            return "cancelled"
        return "slept"

    async def main() -> str:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)

        async def outer() -> str:
            return await Metered(inner(), loop.meter, "inner")

        task = asyncio.create_task(outer())
        await asyncio.sleep(1)
        task.cancel()
        return await task

    assert run_virtual(main)[0] == "cancelled"


# --------------------------------------------------------------------- a network


def test_cheats_are_slashed_and_the_honest_are_paid() -> None:
    world = simulate(SMALL, invariants.hold)
    state = world.chain.state
    forger, liar, *honest = world.workers
    taken = [state.stakes[1, str(cheat.address)].active for cheat in (forger, liar)]
    assert taken[1] < taken[0] < 200 * 10**18
    assert "jailed" in forger.end
    assert "banned" in liar.end
    assert all(state.balances[str(person.address)] > 0 for person in honest)
    figures = figures_of(world)
    assert figures["verdicts"]["fraud"] >= 2
    assert figures["submissions"] == sum(figures["verdicts"].values())
    assert 0 < figures["to_verdict_s"]["median"] < figures["to_payable_s"]["median"]


def test_slow_and_killed_workers_lose_nothing() -> None:
    swarm = Scenario(
        workers=6, duration_s=150.0, slow_share=0.5, slow_factor=5.0, churn_s=100.0, loops=2
    )
    world = simulate(swarm, invariants.hold)
    records = [r for batch in world.chain.state.batches.values() for r in batch.records]
    assert len(records) == len(world.received_at)
    assert all(record.verdict == 1 for record in records)
    numbers = [world.chain.state.workers[str(p.address)].number for p in world.workers]
    made = [sum(record.number == number for record in records) for number in numbers]
    assert sum(made[3:]) < sum(made[:3]) / 2
    assert any(person.starts > 1 for person in world.workers)
    assert world.doing["dead"] > 0


@pytest.mark.parametrize(("level", "least", "most"), [(0, 0.0, 0.5), (2, 0.6, 1.0)])
def test_workers_generate_while_weights_arrive_only_if_rollouts_may_be_old(
    level: int, least: float, most: float
) -> None:
    broadcast = replace(
        SMALL, conduct=(), duration_s=300.0, fetch_s=10.0, train_s=15.0, loops=2,
        submissions_per_step=4, max_async_level=level,
    )  # fmt: skip
    doing = figures_of(simulate(broadcast, invariants.hold))["workers_doing"]
    assert least <= doing["generating"] <= most
    assert sum(doing.values()) == pytest.approx(1, abs=0.001)


def test_invariants_hold_through_every_misfortune(chaos: World) -> None:
    assert chaos.chain.reorganisations > 0
    assert any(person.starts > 1 for person in chaos.workers)
    words = " ".join(chaos.history)
    assert "disk full" in words
    assert "cut off" in words


@seed(20261122)
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.integers(0, 2**32),
    st.integers(3, 6),
    st.sampled_from([0.0, 0.05]),
    st.sampled_from([0.0, 25.0]),
    st.sampled_from([0.0, 40.0]),
    st.integers(1, 6),
)
def test_invariants_hold_in_any_network(
    number: int, workers: int, loss: float, reorganise_s: float, churn_s: float, depth: int
) -> None:
    scenario = replace(
        CHAOS,
        seed=number,
        workers=workers,
        duration_s=60.0,
        loss=loss,
        reorganise_s=reorganise_s,
        reorganise_depth=depth,
        churn_s=churn_s,
    )
    simulate(scenario, invariants.hold)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_invariants_hold_for_long(number: int) -> None:
    simulate(replace(CHAOS, seed=1000 + number, duration_s=600.0), invariants.hold)


def test_a_lazy_validator_alone_lets_no_fraud_through() -> None:
    lazy = replace(SMALL, judging=(("lazy", 1),), validators=4)
    world = simulate(lazy, invariants.hold)
    frauds = [r for b in world.chain.state.batches.values() for r in b.records if r.verdict == 4]
    cheats = {1, 2}
    accepted = [
        r
        for b in world.chain.state.batches.values()
        for r in b.records
        if r.number in cheats and r.verdict == 1
    ]
    assert frauds
    assert not accepted


# ------------------------------------------------------------------------ disputes

ACCUSED = Scenario(
    seed=1,  # one of the seeds under which three accusers judge a batch of only the victim's work
    workers=2,
    validators=7,
    quorum=3,
    duration_s=650.0,
    generate_s=200.0,
    judging=(("accusing", 3),),
    is_silenced=True,
    has_disputes=True,
    poll_s=4.0,
    lease_s=900,
)


@pytest.fixture(scope="module")
def accused() -> World:
    logging.disable(logging.CRITICAL)
    world = simulate(ACCUSED, invariants.hold)
    logging.disable(logging.NOTSET)
    return world


def test_a_worker_accused_by_a_colluding_quorum_is_made_whole(accused: World) -> None:
    state, fixed = accused.chain.state, accused.chain.fixed
    victim = str(accused.workers[-1].address)
    assert any(" StakeVault Slashed " in line and victim in line for line in accused.history)
    case = next(case for case in state.cases.values() if case.worker == victim)
    assert case.status == 3
    assert case.reporter == victim
    assert state.stakes[1, victim].active == 2 * fixed.required_stake
    assert state.balances[victim] > fixed.bond
    for person in accused.validators:
        whole = state.stakes[1, str(person.address)].active == fixed.required_validator_stake
        assert whole is (person.conduct == "honest")


def test_a_bought_bench_lets_a_false_accusation_stand() -> None:
    with pytest.raises(AssertionError):
        simulate(replace(ACCUSED, purchased=ACCUSED.jurors), invariants.hold)


def test_a_wrong_that_stays_is_noticed(accused: World) -> None:
    escrow = next(e for e in accused.chain.state.escrows.values() if e.status == 3)
    escrow.status = 1
    with pytest.raises(AssertionError, match="outlived"):
        invariants.the_wronged_are_made_whole(accused)
    escrow.status = 3


def test_a_cheat_that_claims_loses_its_bond_too() -> None:
    world = simulate(replace(SMALL, has_disputes=True), invariants.hold)
    state = world.chain.state
    forger = str(world.workers[0].address)
    case = next(case for case in state.cases.values() if case.worker == forger)
    assert case.status == 2
    assert state.balances[forger] == 0
    assert state.stakes[1, forger].active < 200 * 10**18


# ------------------------------------------------------------- checks that can fail


def test_a_slashed_worker_would_not_pass_for_honest(chaos: World) -> None:
    with pytest.raises(AssertionError):
        invariants.honest_workers_keep_their_stake(invariants.broken(chaos, ["worker-1"]))


def test_a_token_that_came_from_nowhere_is_noticed(chaos: World) -> None:
    balances = chaos.chain.state.balances
    balances["0x" + "11" * 20] += 1
    with pytest.raises(AssertionError, match="came or went"):
        invariants.stake_is_conserved(chaos)
    balances["StakeVault"] += 1
    with pytest.raises(AssertionError, match="does not add up"):
        require_sound(chaos.chain.state)
    balances["StakeVault"] -= 1
    del balances["0x" + "11" * 20]
    invariants.stake_is_conserved(chaos)


def test_a_payment_too_much_is_noticed(chaos: World) -> None:
    name = str(chaos.workers[-1].address)
    chaos.chain.state.balances[name] += 1
    with pytest.raises(AssertionError, match="was paid something else"):
        invariants.nobody_is_paid_twice(chaos)
    chaos.chain.state.balances[name] -= 1


def test_a_state_that_no_block_explains_is_noticed(chaos: World) -> None:
    stake = chaos.chain.state.stakes[1, str(chaos.workers[-1].address)]
    stake.withdrawable_at += 1
    with pytest.raises(AssertionError, match="stakes differs"):
        invariants.history_replays_to_the_state(chaos)
    stake.withdrawable_at -= 1


def test_a_validator_that_lost_stake_for_silence_would_be_noticed(accused: World) -> None:
    liar = next(p for p in accused.validators if p.conduct == "accusing")
    liar.conduct = "honest"
    with pytest.raises(AssertionError, match="lost stake"):
        invariants.honest_judges_keep_their_stake(accused)
    liar.conduct = "accusing"


def test_a_bond_that_stays_in_the_court_is_noticed(accused: World) -> None:
    balances = accused.chain.state.balances
    balances["DisputeCourt"] += 1
    with pytest.raises(AssertionError, match="bonds and fees"):
        require_sound(accused.chain.state)
    balances["DisputeCourt"] -= 1
    require_sound(accused.chain.state)


# ---------------------------------------------------------------------- coalitions


@pytest.fixture(scope="module")
def coalitions() -> tuple[list[Found], float]:
    terms = fixed(Scenario())
    return play_all(workers=60, validators=5, quorum=3, cases=40, seed=3, fixed=terms)


def test_promises_hold_without_bribes_and_none_against_the_whole_bench(
    coalitions: tuple[list[Found], float],
) -> None:
    found, _ = coalitions
    assert len(found) == len(PROMISES)
    assert all(each.rates[0.0] == 0 for each in found)
    assert all(each.rates[1.0] == 1 for each in found)


def test_a_promise_breaks_as_often_as_most_of_a_jury_is_bought(
    coalitions: tuple[list[Found], float],
) -> None:
    cases = [each.rates[0.3] for each in coalitions[0]]
    # 0.216 by the binomial; five standard deviations of 200 cases.
    assert abs(sum(cases) / len(cases) - dishonest_majority(0.3, 3)) < 0.15


def test_outcomes_take_a_quorum(coalitions: tuple[list[Found], float]) -> None:
    assert coalitions[1] == 3 / 5


def test_the_share_from_which_a_promise_breaks_is_the_least_above_a_rate() -> None:
    found = Found(PROMISES[0], {0.0: 0.0, 0.1: 0.02, 0.2: 0.6})
    assert [found.breaks_from(rate) for rate in (0.01, 0.5, 0.7)] == [0.1, 0.2, None]


def test_stake_that_falls_in_another_run_is_noticed() -> None:
    stage = Stage(fixed(Scenario()), 2, 2, 1, 0.0, random.Random(1))
    require_other_run_untouched(stage)
    stage.state.stakes[2, stage.people[0]].active -= 1
    with pytest.raises(AssertionError, match=stage.people[0]):
        require_other_run_untouched(stage)


# --------------------------------------------------------------------- determinism

TROUBLED = replace(
    SMALL,
    duration_s=60.0,
    loss=0.05,
    churn_s=40.0,
    outage_s=30.0,
    reorganise_s=20.0,
    relay_failures=0.1,
)


def test_one_seed_gives_one_history_byte_for_byte_in_any_process() -> None:
    here = "\n".join(simulate(TROUBLED, nothing).history).encode()
    code = (
        "import logging, sys; logging.disable(logging.CRITICAL);"
        "from test_lab_simulator import TROUBLED, nothing, simulate;"
        "sys.stdout.write('\\n'.join(simulate(TROUBLED, nothing).history))"
    )
    there = subprocess.run(
        [sys.executable, "-c", code],
        # Sets and dictionaries of strings are in another order there.
        env={**os.environ, "PYTHONHASHSEED": "4711", "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        check=True,
        timeout=120,
    ).stdout
    assert here == there
    assert b"reorganised" in here


def test_another_seed_gives_another_history() -> None:
    short = replace(SMALL, duration_s=20.0)
    digests = {simulate(replace(short, seed=n), nothing).digest() for n in range(2)}
    assert len(digests) == 2


def test_spread_is_of_ordered_values() -> None:
    assert spread([]) == {}
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "p95": 3.0, "max": 3.0}
