"""Invariants of every simulated network. Each function raises AssertionError."""

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from muster.chain import ChainView
from muster.client.disputes.rerun import claim_of
from muster.client.validator.judging import examine
from muster.lab.simulator.connection import domain_of
from muster.lab.simulator.machines import SimulatedEngine
from muster.lab.simulator.model.words import (
    ABSENT_JUROR,
    ACTIVE,
    RESTORED,
    WRONG_VERDICT,
)
from muster.lab.simulator.model.work import ACCEPTED, OPEN, OVERTURNED
from muster.lab.simulator.money import standing_verdict
from muster.lab.simulator.scenario import FUNDS, RUN
from muster.lab.simulator.world import World
from muster.orchestrator.projection import Projection
from muster.protocol.messages import Verdict
from muster.protocol.rollouts import decode_rollouts


async def hold(world: World) -> None:
    """Raise AssertionError unless every invariant holds."""
    stake_is_conserved(world)
    nobody_is_paid_twice(world)
    honest_workers_keep_their_stake(world)
    honest_judges_keep_their_stake(world)
    history_replays_to_the_state(world)
    await slashes_have_evidence(world)
    the_wronged_are_made_whole(world)


def stake_is_conserved(world: World) -> None:
    """Every token that was issued is on some account or was burned with a slash."""
    state, fixed = world.chain.state, world.chain.fixed
    minted = FUNDS + (2 * fixed.required_stake + fixed.bond) * len(world.workers)
    minted += fixed.required_validator_stake * len(world.validators)
    minted += fixed.required_juror_stake * len(world.jurors)
    assert sum(state.balances.values()) + state.burned == minted, "tokens came or went"
    lost = sum(escrow.amount for escrow in state.escrows.values())
    lost += fixed.bond * sum(len(case.claims) for case in state.cases.values())
    assert state.burned <= lost, "more was burned than slashed or forfeited"


def nobody_is_paid_twice(world: World) -> None:
    """Each worker was paid exactly for its accepted slots, each slot once."""
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
    beside = _earned_beside(world)
    for person in world.workers:
        name = str(person.address)
        due = owed[name] + beside[name] + world.chain.fixed.bond
        assert state.balances[name] == due, f"{person.name} was paid something else"


def _earned_beside(world: World) -> Counter[str]:
    """Return each account's gains and losses by claims: bonds, and shares of reporters."""
    beside: Counter[str] = Counter()
    for event in world.chain.events():
        if event.name == "Claimed":
            beside[str(event.args["claimant"])] -= world.chain.fixed.bond
        elif event.name == "ClaimSettled":
            beside[str(event.args["claimant"])] += event.args["returned"]
        elif event.name == "SlashReleased":
            beside[str(event.args["reporter"])] += event.args["rewarded"]
    return beside


def honest_judges_keep_their_stake(world: World) -> None:
    """Silence costs a validator nothing, and a juror only the fines for votes that it did not
    cast."""
    state = world.chain.state
    fined = {(name[2], name[3]) for name in state.escrows}
    for person in world.validators:
        named = {offence for owner, offence in fined if owner == str(person.address)}
        assert person.conduct != "honest" or not named, f"{person.name} lost stake"
    for person in world.jurors:
        named = {offence for owner, offence in fined if owner == str(person.address)}
        assert named <= {ABSENT_JUROR}, f"{person.name} lost stake for more than absence"


def honest_workers_keep_their_stake(world: World) -> None:
    """No honest worker lost stake or its status, not even on an abandoned branch; stake taken by an
    overturned verdict was returned.
    """
    honest = {str(p.address) for p in world.workers if p.conduct == "honest"}
    state = world.chain.state
    for name in honest:
        active = state.stakes[int(RUN), name].active
        assert active == 2 * world.chain.fixed.required_stake, name
        assert state.members[int(RUN), name].status == ACTIVE, name
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
    """The chain's state, and every view of it, follow from its blocks alone."""
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
    for name in ("runs", "workers", "stakes", "batches", "slashes", "payments", "bench", "cases"):
        assert getattr(fresh, name) == getattr(view, name), f"a view's {name} differ"


async def slashes_have_evidence(world: World) -> None:
    """Every worker's slash has a fraud record, and judging its file again gives the same fraud."""
    state = world.chain.state
    workers = {str(p.address) for p in world.workers}
    for name, escrow in state.escrows.items():
        if name[2] in workers and escrow.status != RESTORED:
            batch = state.batches[escrow.batch]
            fraud = batch.records[escrow.position].verdict == Verdict.FRAUD
            assert fraud, f"{name[2]} was slashed for nothing on record"
            await _judge_again(world, batch, escrow.position)


def the_wronged_are_made_whole(world: World) -> None:
    """An overturned verdict costs its worker nothing, and everyone who signed it."""
    state = world.chain.state
    for leaf, case in state.cases.items():
        assert case.status != OPEN, "a case was never closed"
        if case.status != OVERTURNED:
            continue
        _, number, place, record = tuple(leaf)
        batch = state.batches[number]
        for escrow in state.escrows.values():
            own = (escrow.batch, escrow.position) == (number, place)
            assert not own or escrow.status == RESTORED, "a slash outlived its verdict"
        slot = (int(RUN), state.by_number(record.number), record.step, record.index)
        accepted = case.leading()[0] >> 8 == ACCEPTED
        assert not accepted or slot in state.paid, "the work was never paid"
        for validator, seat in state.runs[int(RUN)].seats.items():
            if seat.bit & batch.header.signers:
                fine = ("escrow", int(RUN), validator, WRONG_VERDICT, number)
                assert fine in state.escrows, "who signed it was not punished"


async def _judge_again(world: World, batch: Any, place: int) -> None:
    """Judge a file with nothing but the chain, the file and the run's documents."""
    contents = await world.desk.batch(batch.header.batch)
    entry, record = contents.submissions[place], batch.records[place]
    view = world.views[0]
    claim = claim_of(
        view, view.batches[batch.header.batch], entry, place, domain_of("ContributionLedger")
    )
    place_of_file = await world.services.files.find(entry.submission.file_hash)
    assert place_of_file is not None, "the file behind a slash is gone"
    rows = decode_rollouts(await asyncio.to_thread(_bytes, place_of_file))
    engine = SimulatedEngine()
    engine.policy_version = entry.submission.policy_version
    judgement = examine(claim, rows, world.rules, engine)
    assert judgement.finding is not None, "the file behind a slash is in order"
    assert int(judgement.finding.reason) == record.reason, "it was slashed for another reason"


def _bytes(path: Any) -> bytes:
    data: bytes = path.read_bytes()
    return data


def broken(world: World, names: Iterable[str]) -> World:
    """Return a world in which the given workers count as honest, which must violate the
    invariants."""
    chosen = set(names)
    people = [replace(p, conduct="honest") if p.name in chosen else p for p in world.workers]
    return replace(world, workers=people)
