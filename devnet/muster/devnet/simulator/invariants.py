"""What must hold in every network, whatever befalls it. Each function raises AssertionError."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from muster.chain import ChainView
from muster.client.tickets import KnownPolicy, TicketTerms
from muster.client.validator.checks import Claim
from muster.client.validator.judging import examine
from muster.devnet.simulator.connection import domain_of
from muster.devnet.simulator.machines import SimulatedEngine
from muster.devnet.simulator.model.network import WRONG_VERDICT
from muster.devnet.simulator.model.words import ACTIVE, PPM, RELEASED, RESTORED
from muster.devnet.simulator.model.work import OPEN, OVERTURNED, UPHELD
from muster.devnet.simulator.money import standing_verdict
from muster.devnet.simulator.scenario import FUNDS, RUN
from muster.devnet.simulator.world import World
from muster.orchestrator.services.projection import Projection
from muster.protocol.eip712 import address_of
from muster.protocol.messages import Verdict
from muster.protocol.rollouts import decode_rollouts


async def hold(world: World) -> None:
    """Raise AssertionError unless every invariant holds."""
    stake_is_conserved(world)
    nobody_is_paid_twice(world)
    honest_workers_keep_their_stake(world)
    history_replays_to_the_state(world)
    await slashes_have_evidence(world)
    the_wronged_are_made_whole(world)


def stake_is_conserved(world: World) -> None:
    """Every token that was handed out is somewhere or was burned with a slash."""
    state, fixed = world.chain.state, world.chain.fixed
    minted = FUNDS + (2 * fixed.required_stake + fixed.challenge_bond) * len(world.workers)
    minted += fixed.required_validator_stake * len(world.validators)
    assert sum(state.balances.values()) + state.burned == minted, "tokens came or went"
    lost = sum(escrow.amount for escrow in state.escrows.values())
    lost += fixed.challenge_bond * sum(case.status == UPHELD for case in state.cases.values())
    assert state.burned <= lost, "more was burned than slashed or forfeited"


def nobody_is_paid_twice(world: World) -> None:
    """What each worker was paid is what its accepted slots are worth, each slot once."""
    state = world.chain.state
    owed: Counter[str] = Counter()
    slots: set[tuple[Any, ...]] = set()
    names = {worker.number: name for name, worker in state.workers.items()}
    for batch in state.batches.values():
        for place, record in enumerate(batch.records):
            if standing_verdict(state, batch, place) == Verdict.ACCEPTED:
                slot = (record.number, record.step, record.index)
                assert slot not in slots, f"slot {slot} was accepted twice"
                slots.add(slot)
                owed[names[record.number]] += record.units * batch.header.price
    for person in world.workers:
        name = str(person.address)
        due = owed[name] + _bond_left(world, name) + _reported(world, name)
        assert state.balances[name] == due, f"{person.name} was paid something else"


def _bond_left(world: World, name: str) -> int:
    """Return what is left of the bond that an owner brought: nothing once a challenge failed."""
    cases = [case for case in world.chain.state.cases.values() if case.challenger == name]
    failed = any(c.status == OPEN or (c.status == UPHELD and c.uphold > c.overturn) for c in cases)
    return 0 if failed else world.chain.fixed.challenge_bond


def _reported(world: World, name: str) -> int:
    """Return the reporter's shares of the slashes that an account brought about."""
    fixed = world.chain.fixed
    return sum(
        min(escrow.amount * fixed.reporter_ppm // PPM, fixed.reporter_cap)
        for escrow in world.chain.state.escrows.values()
        if escrow.reporter == name and escrow.status == RELEASED
    )


def honest_workers_keep_their_stake(world: World) -> None:
    """No honest worker lost stake or its standing, not even on a branch that was given up; what
    was taken by a verdict that a jury overturned was given back.
    """
    honest = {str(p.address) for p in world.workers if p.conduct == "honest"}
    state = world.chain.state
    for name in honest:
        assert state.stakes[name].active == 2 * world.chain.fixed.required_stake, name
        assert state.workers[name].status == ACTIVE, name
    restored = [
        world.chain.words.said(offence).hex()
        for offence, escrow in state.escrows.items()
        if escrow.status == RESTORED
    ]
    slashes = [line for line in world.history if " StakeVault Slashed " in line]
    lasting = [line for line in slashes if not any(offence in line for offence in restored)]
    owners = [f"owner={name}" for name in honest]
    assert not any(owner in line for line in lasting for owner in owners), "slashed on a branch"


def history_replays_to_the_state(world: World) -> None:
    """The chain's state, and what everyone knows of it, follow from its blocks alone."""
    live, again = world.chain.state, world.chain.replayed()
    for name, value in vars(live).items():
        assert vars(again)[name] == value, f"the contracts' {name} differs"
    fresh = ChainView()
    for event in world.chain.events():
        fresh.apply(event)
    assert not fresh.contradictions, fresh.contradictions
    for view in (world.services.projection.view, *world.views):
        same_view(fresh, view)
    rebuilt = Projection(fresh, RUN, world.rules.recipe.training)
    kept = world.services.projection
    assert rebuilt.trained_submissions == kept.trained_submissions
    ids = [[batch.batch_id for batch in p.unjudged] for p in (rebuilt, kept)]
    assert ids[0] == ids[1], "the orchestrator's projection differs"


def same_view(fresh: ChainView, view: ChainView) -> None:
    """Raise AssertionError unless two views know the same."""
    for name in ("runs", "workers", "stakes", "batches", "slashes", "payments"):
        assert getattr(fresh, name) == getattr(view, name), f"a view's {name} differ"


async def slashes_have_evidence(world: World) -> None:
    """Every worker's slash stands on a fraud record, whose file anybody judges to be that fraud."""
    state = world.chain.state
    frauds = {
        state.offence(int(RUN), record): (batch, place)
        for batch in state.batches.values()
        for place, record in enumerate(batch.records)
        if record.verdict == Verdict.FRAUD
    }
    workers = {str(p.address) for p in world.workers}
    for offence, escrow in state.escrows.items():
        if escrow.owner in workers and escrow.status != RESTORED:
            assert offence in frauds, f"{escrow.owner} was slashed for nothing on record"
            await _judge_again(world, *frauds[offence])


def the_wronged_are_made_whole(world: World) -> None:
    """An overturned verdict costs its worker nothing, and everyone who signed it."""
    state = world.chain.state
    for leaf, case in state.cases.items():
        assert case.status != OPEN, "a case was never closed"
        if case.status != OVERTURNED:
            continue
        assert isinstance(leaf, tuple)
        _, number, _, record = leaf
        batch = state.batches[number]
        escrow = state.escrows.get(state.offence(int(RUN), record))
        assert escrow is None or escrow.status == RESTORED, "a slash outlived its verdict"
        slot = (int(RUN), state.by_number(record.number), record.step, record.index)
        assert slot in state.paid, "the work was never paid"
        for validator, seat in state.runs[int(RUN)].seats.items():
            if seat.bit & batch.header.signers:
                fault = ("fault", WRONG_VERDICT, leaf, validator)
                assert fault in state.escrows, "who signed it was not punished"


async def _judge_again(world: World, batch: Any, place: int) -> None:
    """Judge a file with nothing but the chain, the file and the run's documents."""
    contents = await world.desk.batch(batch.header.batch)
    entry, record = contents.submissions[place], batch.records[place]
    ticket = entry.ticket
    assert ticket is not None
    checkpoint = world.services.projection.run.checkpoints[ticket.policy_version]
    policy = KnownPolicy(
        root=checkpoint.manifest_root,
        beacon=checkpoint.beacon,
        block_number=checkpoint.block_number,
    )
    claim = Claim(
        submission=entry.submission,
        signature=entry.signature,
        ticket=ticket,
        ticket_signature=entry.ticket_signature,
        committed_at=batch.header.committed_at,
        terms=TicketTerms(
            domain=domain_of("ContributionLedger"),
            orchestrator=world.services.audience,
            run_id=RUN,
            worker=entry.submission.worker,
            active_from=1,
            policies={ticket.policy_version: policy},
        ),
        worker_id=record.number,
        node=address_of(_key_of(world, str(entry.submission.worker))),
        is_slot_used=False,
    )
    place_of_file = await world.services.files.find(entry.submission.file_hash)
    assert place_of_file is not None, "the file behind a slash is gone"
    rows = decode_rollouts(await asyncio.to_thread(_bytes, place_of_file))
    engine = SimulatedEngine()
    engine.policy_version = ticket.policy_version
    judgement = examine(claim, rows, world.rules, engine)
    assert judgement.finding is not None, "the file behind a slash is in order"
    assert int(judgement.finding.reason) == record.reason, "it was slashed for another reason"


def _bytes(path: Any) -> bytes:
    data: bytes = path.read_bytes()
    return data


def _key_of(world: World, worker: str) -> bytes:
    return next(person.key for person in world.workers if str(person.address) == worker)


def broken(world: World, names: Iterable[str]) -> World:
    """Return a world in which the given workers count as honest: what must not pass for one."""
    chosen = set(names)
    people = [replace(p, conduct="honest") if p.name in chosen else p for p in world.workers]
    return replace(world, workers=people)
