"""No worker can hold more tickets than its share; honest workers are served meanwhile.

The run has 48 tickets out at once, as many as three steps of 16 submissions take.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from orchestrator_bench import Bench, open_bench
from orchestrator_fakes import RUN, Network, submission_for

from muster.api import Lease, NoWork
from muster.lab.redteam.hostile.hoarding import Hoarder, hoard
from muster.orchestrator.leases.fitness import (
    FIRST,
    LONGEST_WAIT_S,
    MOST,
    Past,
    TicketEnd,
    allowance_of,
)
from muster.orchestrator.leases.leases import SignedTicket
from muster.orchestrator.leases.shares import CONTENDS_S, Shares
from muster.protocol.eip712 import address_of
from muster.protocol.encoding import keccak
from muster.protocol.ids import Address, PolicyVersion, to_address
from muster.protocol.messages import HardwareReport, Reason, Submission, Verdict
from muster.protocol.recipe import HardwareRecipe, TrainingRecipe

TRAINING = TrainingRecipe(steps=0, submissions_per_step=16, max_async_level=2)
TICKETS = 48
LEASE_S = 60
HONEST = (1, 2, 3, 4, 5)
ATTACKER = 0


@asynccontextmanager
async def crowd(folder: Path, *, small: int = 0, mute: bool = False) -> AsyncIterator[Bench]:
    """Six workers of equal stake, the attacker and five honest ones, and `small` workers with a
    thousandth of the stake of these six; each has sent a heartbeat, without the small ones if
    these are `mute`.
    """
    network = Network(training=TRAINING)
    for number in range(4, 7 + small):
        network.keys.nodes.append(os.urandom(32))
        stake = 10**18 if number < 7 else 6 * 10**18 // 1000
        network.join(
            address_of(os.urandom(32)), address_of(network.keys.nodes[-1]), number, stake=stake
        )
    async with open_bench(folder, network, lease_s=LEASE_S) as bench:
        for number in range(6 + small * (not mute)):
            await beat(bench, number)
        yield bench


async def beat(bench: Bench, number: int) -> None:
    async with bench.node(number) as api:
        await api.heartbeat(RUN, policy_version=0, state="idle", software="test")


def hoarder(bench: Bench, number: int = ATTACKER) -> Hoarder:
    return Hoarder(RUN, bench.network.keys.nodes[number], bench.api, bench.network.domain)


def rotation(bench: Bench, number: int = ATTACKER):  # type: ignore[no-untyped-def]
    """Rotate a worker's node on chain."""
    network = bench.network

    async def rotate() -> bytes:
        worker, key = network.worker(number), os.urandom(32)
        bound = {"worker": worker.address}
        network.apply("WorkerRegistry", "NodeUnbound", node=worker.node, **bound)
        network.apply("WorkerRegistry", "NodeBound", node=address_of(key), **bound)
        network.keys.nodes[number] = key
        return key

    return rotate


async def lease(bench: Bench, number: int, *holding: Lease | NoWork) -> Lease | NoWork:
    # Turns' timeouts and the cache of holders use the process's clock.
    bench.services.leases._holders_known_at = float("-inf")
    async with bench.node(number) as api:
        return await api.lease(RUN, [each.ticket for each in holding if isinstance(each, Lease)])


async def holders(bench: Bench, asking: Iterable[int]) -> set[int]:
    """Let workers ask one after the other; return those that got a ticket."""
    return {number for number in asking if isinstance(await lease(bench, number), Lease)}


async def serve(bench: Bench, number: int, rounds: int = 1) -> list[Submission]:
    """Lease and upload as an honest worker; fail unless it gets each ticket that it asks for."""
    found = []
    for _ in range(rounds):
        answer = await lease(bench, number)
        assert isinstance(answer, Lease)
        body = repr(answer.ticket).encode()
        found.append(submission_for(answer.ticket, body))
        async with bench.node(number) as api:
            signature = bench.network.sign_submission(found[-1], number)
            await api.submit(found[-1], signature, body)
    return found


async def judge(
    bench: Bench, submissions: list[Submission], verdict: Verdict, reason: Reason
) -> None:
    await bench.commit()
    await bench.judge(max(bench.network.view.batches), submissions, verdict, reason)
    await bench.record()


async def test_a_worker_holds_one_open_ticket_however_often_it_rotates(tmp_path: Path) -> None:
    async with crowd(tmp_path) as bench:
        got = await hoard(hoarder(bench), TICKETS, rotate=rotation(bench))
        assert got.asked == TICKETS
        assert got.held(bench.network.chain.time) == 1
        for number in HONEST:
            await serve(bench, number, rounds=4)


async def test_tickets_side_by_side_are_earned_by_accepted_work(tmp_path: Path) -> None:
    async with crowd(tmp_path) as bench:
        first = await lease(bench, 1)
        assert await lease(bench, 1, first) == NoWork(retry_after_s=1.0, reason="share")
        [done] = await serve(bench, 1)
        await judge(bench, [done], Verdict.ACCEPTED, Reason.NONE)
        held = [await lease(bench, 1)]
        held.append(await lease(bench, 1, *held))
        assert await lease(bench, 1, *held) == NoWork(retry_after_s=1.0, reason="share")
        # After a crash it names no ticket, and gets the open one.
        assert await lease(bench, 1) == held[1]
        assert await lease(bench, 1, held[1]) == held[0]


async def test_work_that_only_just_came_in_time_earns_no_ticket_beside_it(tmp_path: Path) -> None:
    async with crowd(tmp_path) as bench:
        assert isinstance(await lease(bench, 1), Lease)
        bench.set_chain_time(bench.network.chain.time + LEASE_S - 5)
        [done] = await serve(bench, 1)
        await judge(bench, [done], Verdict.ACCEPTED, Reason.NONE)
        assert isinstance(await lease(bench, 1, await lease(bench, 1)), NoWork)


async def test_naming_slots_that_one_does_not_hold_gets_no_more_than_is_earned(
    tmp_path: Path,
) -> None:
    async with crowd(tmp_path) as bench:
        leases, worker = bench.services.leases, bench.network.worker(ATTACKER)
        guesses = frozenset((step, index) for step in range(1, 4) for index in range(16))
        asked = (leases.lease(worker, guesses) for _ in range(20))
        given = [each for each in await asyncio.gather(*asked) if isinstance(each, SignedTicket)]
        assert len(given) == 1


async def test_a_ticket_goes_to_the_workers_new_node(tmp_path: Path) -> None:
    async with crowd(tmp_path) as bench:
        before = await lease(bench, ATTACKER)
        await rotation(bench)()
        assert await lease(bench, ATTACKER) == before
        await serve(bench, ATTACKER)


async def test_lapsing_and_rotating_gets_ever_fewer_tickets(tmp_path: Path) -> None:
    async with crowd(tmp_path) as bench:
        given = set()
        # Four hours: 240 leases if a lapse cost nothing.
        for _ in range(240):
            got = await hoard(hoarder(bench), 2, rotate=rotation(bench))
            given |= got.tickets.keys()
            bench.set_chain_time(bench.network.chain.time + LEASE_S + 1)
        assert len(given) <= 12


async def test_an_honest_worker_that_crashed_comes_back_at_once(tmp_path: Path) -> None:
    async with crowd(tmp_path) as bench:
        assert isinstance(await lease(bench, 1), Lease)
        bench.set_chain_time(bench.network.chain.time + LEASE_S + 1)
        await serve(bench, 1)


async def test_one_that_crashed_all_day_comes_back_within_an_hour(tmp_path: Path) -> None:
    async with crowd(tmp_path) as bench:
        for _ in range(24):
            await lease(bench, 1)
            bench.set_chain_time(bench.network.chain.time + LONGEST_WAIT_S)
        bench.set_chain_time(bench.network.chain.time + LONGEST_WAIT_S + LEASE_S)
        assert bench.services.projection.checkpoint is not None
        # From then on it works without a pause.
        for number in range(3):
            [submission] = await serve(bench, 1)
            await judge(bench, [submission], Verdict.ACCEPTED, Reason.NONE)
            assert number + 1 == bench.services.projection.total.accepted


async def test_allowance_is_the_same_after_a_restart(tmp_path: Path) -> None:
    network = Network(training=TRAINING)
    async with open_bench(tmp_path, network, lease_s=LEASE_S) as bench:
        for _ in range(4):
            assert isinstance(await lease(bench, 0), Lease)
            bench.set_chain_time(network.chain.time + 10 * LEASE_S)
        for _ in range(2):
            await lease(bench, 0)
            bench.set_chain_time(network.chain.time + LEASE_S + 1)
        assert await lease(bench, 0) == NoWork(retry_after_s=1.0, reason="share")
    async with open_bench(tmp_path, network, lease_s=LEASE_S, start_s=1) as bench:
        await rotation(bench)()
        assert await lease(bench, 0) == NoWork(retry_after_s=1.0, reason="share")
        assert isinstance(await lease(bench, 1), Lease)


async def hold_eight(bench: Bench, number: int) -> list[Lease | NoWork]:
    """Let a worker of a sixth of the stake hold its share open."""
    held: list[Lease | NoWork] = []
    for _ in range(TICKETS // 6):
        held.append(await lease(bench, number, *held))
    return held


async def deliver(bench: Bench, number: int) -> None:
    """Earn the largest window, and eight tickets side by side."""
    for _ in range(6):
        await judge(bench, await serve(bench, number, rounds=2), Verdict.ACCEPTED, Reason.NONE)


def are_tickets(held: list[Lease | NoWork]) -> bool:
    return all(isinstance(each, Lease) for each in held)


async def test_leases_that_a_reorganisation_made_void_are_replaced_at_once(tmp_path: Path) -> None:
    async with crowd(tmp_path) as bench:
        await deliver(bench, 1)
        void, network = await hold_eight(bench, 1), bench.network
        published = network.run.checkpoints[PolicyVersion(0)]
        network.run.checkpoints[PolicyVersion(0)] = replace(published, beacon=keccak(b"another"))
        network.chain.rewind_next = network.chain.emit.block
        await bench.follow()
        assert are_tickets(void)
        assert are_tickets(await hold_eight(bench, 1))
        # Nor do they count as lapses when they are due: half of the window is left.
        bench.set_chain_time(network.chain.time + LEASE_S + 1)
        assert isinstance(await lease(bench, 1), Lease)


@pytest.mark.parametrize("silence_s", [LEASE_S + 1, 0])
async def test_leases_that_fell_due_during_an_outage_are_no_lapses(
    tmp_path: Path, silence_s: int
) -> None:
    async with crowd(tmp_path) as bench:
        await deliver(bench, 1)
        missed, network = await hold_eight(bench, 1), bench.network
        assert are_tickets(missed)
    network.chain.time += LEASE_S + 1
    async with open_bench(tmp_path, network, lease_s=LEASE_S, start_s=silence_s) as bench:
        again = await hold_eight(bench, 1)
        # Without a silence they are: it is back to one open ticket, and gets that at once.
        assert isinstance(again[0], Lease)
        assert are_tickets(again) == (silence_s > 0)


async def test_rejected_work_that_names_a_file_costs_only_its_signer(tmp_path: Path) -> None:
    async with crowd(tmp_path) as bench:
        network = bench.network
        attacker = network.worker(ATTACKER).address
        for number in range(8):
            [honest] = await serve(bench, 1)
            named = replace(honest, worker=attacker, index=1000 + number)
            batch_id = network.chain.ledger.submit_direct(network.work(named, ATTACKER))
            await bench.follow()
            await bench.judge(batch_id, [named], Verdict.REJECTED, Reason.SCHEMA)
            await bench.record()
            await judge(bench, [honest], Verdict.ACCEPTED, Reason.NONE)
            async with bench.node(1) as api:
                shown = await api.submission_state(honest.file_hash)
            assert (shown.verdict, shown.batch_id) == (Verdict.ACCEPTED, batch_id + 1)


async def test_files_of_nothing_hold_what_a_newcomer_may(tmp_path: Path) -> None:
    async with crowd(tmp_path) as bench:
        got = await hoard(hoarder(bench), TICKETS, rotate=rotation(bench), fills=True)
        assert len(got.tickets) == FIRST
        for number in HONEST:
            await serve(bench, number, rounds=4)


async def test_refused_work_frees_a_ticket_no_sooner_than_a_lapse(tmp_path: Path) -> None:
    async with crowd(tmp_path) as bench:
        given: set[tuple[int, int]] = set()
        # Ten minutes: ten leases for a worker that lets them lapse.
        for _ in range(60):
            submissions = []
            if isinstance(await lease(bench, ATTACKER), Lease):
                submissions = await serve(bench, ATTACKER)
                given |= {(s.step, s.index) for s in submissions}
                await judge(bench, submissions, Verdict.REJECTED, Reason.SCHEMA)
            bench.set_chain_time(bench.network.chain.time + 10)
        assert len(given) <= 10


@pytest.mark.parametrize("reason", [Reason.BATCH_MISDECLARED, Reason.LATE])
async def test_what_the_committer_caused_costs_the_worker_nothing(
    tmp_path: Path, reason: Reason
) -> None:
    async with crowd(tmp_path) as bench:
        for _ in range(8):
            submissions = await serve(bench, 1, rounds=2)
            await judge(bench, submissions, Verdict.REJECTED, reason)


async def test_a_worker_that_delivers_holds_more_and_no_more_than_its_share(tmp_path: Path) -> None:
    async with crowd(tmp_path) as bench:
        for _ in range(6):
            await judge(bench, await serve(bench, 1, rounds=2), Verdict.ACCEPTED, Reason.NONE)
        # A sixth of 48, and the stake of all is equal.
        await serve(bench, 1, rounds=TICKETS // 6)
        assert await lease(bench, 1) == NoWork(retry_after_s=1.0, reason="share")
        for number in HONEST[1:]:
            await serve(bench, number, rounds=4)


@pytest.mark.parametrize("mute", [False, True])
async def test_many_identities_hold_no_more_than_their_stake(tmp_path: Path, mute: bool) -> None:
    gang = 60
    async with crowd(tmp_path, small=gang, mute=mute) as bench:
        held = await holders(bench, 3 * [*range(6, 6 + gang)])
        # 60 thousandths of 48 tickets are three; each identity may hold one of them.
        assert len(held) == 3
        for number in range(6):
            await serve(bench, number, rounds=4)


@pytest.mark.parametrize(("late_s", "served"), [(0, set()), (1, {9, 10})])
async def test_small_stakes_wait_for_no_work_that_can_be_judged_no_more(
    tmp_path: Path, late_s: int, served: set[int]
) -> None:
    async with crowd(tmp_path, small=45) as bench:
        for number in (6, 7, 8):  # what the small stakes come to
            await serve(bench, number)
        await bench.commit()
        assert await holders(bench, (9, 10)) == set()
        due_s = await bench.network.chain.ledger.outcome_deadline()
        bench.set_chain_time(bench.network.chain.time + due_s + late_s)
        assert await holders(bench, (9, 10)) == served


@asynccontextmanager
async def beside_a_whale(folder: Path, **network: Any) -> AsyncIterator[Bench]:
    """Five workers of equal stake, and one, the first, with nine times what these have together;
    each has sent a heartbeat.
    """
    run = Network(training=TRAINING, **network)
    run.deposit(run.worker(ATTACKER).address, 44 * 10**18)
    for number in (3, 4, 5):
        run.keys.nodes.append(os.urandom(32))
        node = address_of(run.keys.nodes[-1])
        run.join(address_of(os.urandom(32)), node, number + 1, stake=10**18)
    async with open_bench(folder, run, lease_s=LEASE_S) as bench:
        for number in range(6):
            await beat(bench, number)
        # The heartbeats are noted when somebody asks.
        assert isinstance(await lease(bench, HONEST[0]), Lease)
        yield bench


def pass_time(bench: Bench, seconds: float) -> None:
    """Move the clock by which a worker no longer wants tickets."""
    bench.services.leases._contenders._clock = lambda: time.monotonic() + seconds


async def held_by_honest(bench: Bench) -> int:
    """Let each honest worker fill tickets as long as it gets them; return how many it was."""
    count = 0
    for number in 2 * HONEST:
        while isinstance(await lease(bench, number), Lease):
            await serve(bench, number)
            count += 1
    return count


async def test_a_stake_that_only_sends_heartbeats_takes_no_share(tmp_path: Path) -> None:
    async with beside_a_whale(tmp_path) as bench:
        pass_time(bench, CONTENDS_S)
        assert await held_by_honest(bench) == len(HONEST) * FIRST


async def test_a_stake_that_was_just_heard_keeps_its_share(tmp_path: Path) -> None:
    async with beside_a_whale(tmp_path) as bench:
        assert await held_by_honest(bench) == len(HONEST)


async def test_a_stake_that_holds_a_ticket_keeps_its_share(tmp_path: Path) -> None:
    async with beside_a_whale(tmp_path) as bench:
        pass_time(bench, CONTENDS_S)
        assert isinstance(await lease(bench, ATTACKER), Lease)
        pass_time(bench, 3 * CONTENDS_S)
        assert await held_by_honest(bench) == len(HONEST)


async def test_a_stake_whose_machine_is_unfit_takes_no_share(tmp_path: Path) -> None:
    async with beside_a_whale(tmp_path) as bench:
        hardware = bench.services.hardware
        hardware._asks, hardware._asked = True, HardwareRecipe(min_memory_mb=1)
        for number, megabytes in [(ATTACKER, 0), *((n, 1) for n in HONEST)]:
            node = bench.network.worker(number).node
            hardware._reports[node] = HardwareReport(RUN, node, 1, megabytes, 0, 0, 1)
        answer = await lease(bench, ATTACKER)
        assert answer == NoWork(retry_after_s=1.0, reason="hardware_short")
        assert await held_by_honest(bench) == len(HONEST) * FIRST


async def test_many_identities_hold_no_more_after_a_silence(tmp_path: Path) -> None:
    gang = 60
    async with crowd(tmp_path, small=gang) as bench:
        held = await holders(bench, range(6, 6 + gang // 2))
        bench.wall.time += bench.services.settings.dead_after_s
        for number in range(6):
            await beat(bench, number)
        held |= await holders(bench, 3 * [*range(6, 6 + gang)])
        assert len(held) == 3


async def test_many_identities_get_rid_of_no_ticket_by_filling_it_with_nothing(
    tmp_path: Path,
) -> None:
    gang = 40
    async with crowd(tmp_path, small=gang) as bench:
        filled = 0
        # Within the time of one lease: forty thousandths of 48 tickets are two.
        for number in range(gang):
            if isinstance(await lease(bench, 6 + number), Lease):
                submissions = await serve(bench, 6 + number)
                await judge(bench, submissions, Verdict.REJECTED, Reason.SCHEMA)
                filled += 1
            bench.set_chain_time(bench.network.chain.time + LEASE_S // gang)
        assert filled == 2
        bench.set_chain_time(bench.network.chain.time + LEASE_S)
        again = [isinstance(await lease(bench, 6 + number), Lease) for number in range(gang)]
        assert sum(again) == 2


async def test_too_slow_stays_with_the_worker_when_it_rotates(tmp_path: Path) -> None:
    asked = HardwareRecipe(min_units_per_s=10.0)
    network = Network(training=TRAINING, hardware=asked)
    async with open_bench(tmp_path, network, lease_s=LEASE_S) as bench:
        worker = bench.services.hardware
        said = HardwareReport(RUN, network.worker(0).node, 1, 1000, 0, 0, 1)
        history = [Past(1, n, 1000 + n, None, None, None) for n in range(3)]
        for node in (network.worker(0).node, address_of(os.urandom(32))):
            worker._reports[node] = said
            assert worker.fault(node, [], history, 1100) == "too_slow"
            assert worker.fault(node, [], history[:2], 1100) is None


# The rules without HTTP

WHO = [to_address(keccak(b"%d" % n)[12:]) for n in range(100)]


class Staked:
    """The fields of a member that shares use."""

    def __init__(self, address: Address, active_wei: int) -> None:
        self.address = address
        self.active_wei = active_wei


def tickets(*fates: TicketEnd) -> list[tuple[Past, TicketEnd]]:
    return [(Past(1, n, 100 * (n + 1), None, None, None), fate) for n, fate in enumerate(fates)]


def window(*fates: TicketEnd) -> float:
    return allowance_of(tickets(*fates), 10**6, lease_s=100, outcome_deadline_s=10).window


def test_newcomer_may_hold_a_few_and_accepted_work_opens_the_window() -> None:
    assert window() == FIRST
    assert window(TicketEnd.ACCEPTED, TicketEnd.ACCEPTED) == FIRST + 2
    assert window(*[TicketEnd.ACCEPTED] * 40) == MOST


def test_a_fault_halves_and_a_success_doubles_what_is_below_one() -> None:
    assert window(*[TicketEnd.ACCEPTED] * 40, TicketEnd.LOST) == MOST / 2
    assert window(*[TicketEnd.LOST] * 4) == FIRST / 16
    assert window(*[TicketEnd.LOST] * 4, TicketEnd.ACCEPTED) == FIRST / 8
    assert window(TicketEnd.EXCUSED, TicketEnd.WAITING, TicketEnd.OPEN) == FIRST


def test_lapses_of_tickets_that_were_open_together_halve_it_once() -> None:
    earned = [TicketEnd.ACCEPTED] * 12
    ends = [*earned, *[TicketEnd.LOST] * 8]

    def after(*deadlines: int, received_at: int | None = None) -> float:
        lost = [Past(1, n, due, received_at, None, None) for n, due in enumerate(deadlines)]
        past = [each for each, _ in tickets(*earned)] + lost
        rows = list(zip(past, ends, strict=False))
        return allowance_of(rows, 10**6, lease_s=100, outcome_deadline_s=10).window

    assert after(*range(2000, 2008)) == MOST / 2
    assert after(2000, 2099) == MOST / 2
    assert after(2000, 2100) == MOST / 4
    # One that leases anew before each is due gains no more than one lease's time.
    assert after(2000, 2060, 2120, 2180, 2240) == MOST / 8
    # Refused work halves it each time.
    assert after(2000, 2001, received_at=1990) == MOST / 4


def test_below_one_it_is_a_share_of_time() -> None:
    found = allowance_of(tickets(*[TicketEnd.LOST] * 4), 401, lease_s=100, outcome_deadline_s=10)
    # The allowance is a quarter: a ticket is free three leases' time after the last fault, at 400.
    assert found.free_at == 700
    assert not found.covers_another(8, 699)
    assert found.covers_another(8, 700)


@given(st.lists(st.sampled_from(TicketEnd), max_size=32), st.integers(1, 86_400))
def test_nobody_waits_longer_than_an_hour(fates: list[TicketEnd], lease_s: int) -> None:
    found = allowance_of(tickets(*fates), 4000, lease_s=lease_s, outcome_deadline_s=10)
    assert found.free_at <= 100 * len(fates) + LONGEST_WAIT_S


@given(
    st.lists(st.integers(1, 10**21), min_size=1, max_size=100), st.binary(min_size=32, max_size=32)
)
def test_shares_are_those_of_stakes_rounded_by_lot(stakes: list[int], beacon: bytes) -> None:
    shares = Shares(TICKETS)
    members = [Staked(who, stake) for who, stake in zip(WHO, stakes, strict=False)]
    shares.note(members, {}, ())  # type: ignore[arg-type]
    for each in members:
        exact = each.active_wei * TICKETS / sum(stakes)
        assert abs(shares.of(each, beacon) - max(1, exact)) <= 1 + 1e-9  # type: ignore[arg-type]
        assert shares.is_small(each) == (each.active_wei * TICKETS < sum(stakes))  # type: ignore[arg-type]


@given(st.integers(1, 50))
def test_small_stakes_hold_together_what_they_come_to(gang: int) -> None:
    shares = Shares(TICKETS)
    rest = Staked(WHO[99], 1000 - gang)
    small = [Staked(who, 1) for who in WHO[:gang]]
    shares.note([rest, *small], {small[0].address: 1}, {small[-1].address})  # type: ignore[list-item]
    most = max(1, -(-gang * TICKETS // 1000))
    assert shares.free_for_small(TICKETS) == max(0, most - 2)
    shares.served(small[0])  # type: ignore[arg-type]
    assert shares.free_for_small(TICKETS) == max(0, most - 3)


def test_tickets_of_small_stakes_that_fell_silent_count_only_beside_larger_ones() -> None:
    shares = Shares(TICKETS)
    small = [Staked(who, 1) for who in WHO[:60]]
    silent, held = small[:2], {each.address: 1 for each in small[:2]}
    whale = Staked(WHO[99], 940)
    shares.note([whale, *small[2:]], held, (), silent)  # type: ignore[list-item]
    assert shares.free_for_small(TICKETS) == 1
    # Where all are small, others get as many tickets as the silent ones hold.
    shares.note(small[2:], held, (), silent)  # type: ignore[arg-type]
    assert shares.free_for_small(TICKETS) == TICKETS
