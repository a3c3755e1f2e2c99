from __future__ import annotations

from chain_fakes import address
from chain_histories import (
    CHEATER,
    LEAF,
    NODE,
    OFFENCE,
    RECORDS,
    VALIDATORS,
    WORKER,
    begun,
    full,
    post,
    slash,
    viewed,
)

from muster.chain import SlashState, WorkerStatus
from muster.protocol.encoding import keccak


def test_worker_is_found_by_address_number_and_node() -> None:
    view = viewed(begun())
    worker = view.workers[WORKER]
    assert view.worker_by_id[1] is worker
    assert view.worker_by_node[NODE] is worker
    assert (worker.status, worker.active_from, worker.registered_block) == ("Active", 3, 1)
    assert (worker.active_wei, worker.unbonding_wei, worker.slashed_wei) == (1000, 0, 0)


def test_worker_is_active_from_its_block_on() -> None:
    worker = viewed(begun()).workers[WORKER]
    assert [worker.is_active(block) for block in (2, 3, 4)] == [False, True, True]


def test_rotated_node_replaces_the_old_one() -> None:
    history = begun()
    fresh = address(22)
    history.add("WorkerRegistry", "NodeRotated", worker=WORKER, old_node=NODE, new_node=fresh)
    view = viewed(history)
    assert NODE not in view.worker_by_node
    assert view.worker_by_node[fresh].address == WORKER
    worker = view.workers[WORKER]
    rotated = history.block
    assert [worker.node_at(b) for b in (0, 1, rotated - 1, rotated)] == [None, NODE, NODE, fresh]


def test_statuses_are_remembered_with_their_blocks() -> None:
    history = begun()
    history.add("WorkerRegistry", "WorkerJailed", worker=WORKER, offence=bytes(32), until=99)
    jailed = history.block
    history.add("WorkerRegistry", "WorkerUnjailed", worker=WORKER, active_from=50)
    history.add("WorkerRegistry", "WorkerExiting", worker=WORKER)
    worker = viewed(history).workers[WORKER]
    assert (worker.status, worker.jailed_until, worker.active_from) == ("Exiting", 99, 50)
    assert worker.first_active_from == 3
    expected = ["None", "Active", "Jailed", "Active", "Exiting"]
    assert [worker.status_at(b) for b in (0, 1, jailed, jailed + 1, jailed + 2)] == expected


def test_convictions_are_counted_and_acquittals_tell_the_status() -> None:
    history = begun()
    history.add("WorkerRegistry", "WorkerJailed", worker=CHEATER, offence=OFFENCE, until=9)
    history.add("WorkerRegistry", "WorkerBanned", worker=CHEATER, offence=keccak(b"second"))
    cheater = viewed(history).workers[CHEATER]
    assert (cheater.status, cheater.convictions) == (WorkerStatus.BANNED, 2)
    acquitted = {"worker": CHEATER, "offence": OFFENCE, "status": 2}
    history.add("WorkerRegistry", "WorkerAcquitted", **acquitted)
    cheater = viewed(history).workers[CHEATER]
    assert (cheater.status, cheater.convictions) == (WorkerStatus.JAILED, 1)


def test_jail_for_low_stake_is_no_conviction_and_spares_who_leaves() -> None:
    history = begun()
    history.add("WorkerRegistry", "WorkerExiting", worker=WORKER)
    history.add("WorkerRegistry", "WorkerJailed", worker=WORKER, offence=bytes(32), until=9)
    worker = viewed(history).workers[WORKER]
    assert (worker.status, worker.convictions, worker.jailed_until) == ("Exiting", 0, 9)
    history.add("WorkerRegistry", "WorkerRejoined", worker=WORKER, active_from=40)
    worker = viewed(history).workers[WORKER]
    assert (worker.status, worker.active_from) == ("Active", 40)


def test_held_stake_is_known() -> None:
    history = begun()
    history.add("StakeVault", "StakeHeld", owner=WORKER, held_until=70, open_cases=2)
    stake = viewed(history).stakes[WORKER]
    assert (stake.held_until, stake.open_cases) == (70, 2)


def test_stake_of_accounts_that_are_no_workers_is_kept() -> None:
    history = begun()
    history.add("StakeVault", "Deposited", owner=VALIDATORS[0], amount=7, active=7)
    assert viewed(history).stakes[VALIDATORS[0]].active_wei == 7


def test_unbonding_stake_moves_and_leaves() -> None:
    history = begun()
    history.add(
        "StakeVault",
        "UnbondRequested",
        owner=WORKER,
        amount=300,
        unbonding=300,
        withdrawable_at=5000,
    )
    stake = viewed(history).stakes[WORKER]
    assert (stake.active_wei, stake.unbonding_wei, stake.withdrawable_at) == (700, 300, 5000)
    history.add("StakeVault", "Withdrawn", owner=WORKER, amount=300)
    view = viewed(history)
    assert (view.stakes[WORKER].unbonding_wei, view.stakes[WORKER].withdrawable_at) == (0, 0)
    assert view.contradictions == []


def test_slash_is_linked_to_its_outcome() -> None:
    history = begun()
    post(history, 1, RECORDS)
    slash(history)
    view = viewed(history)
    (found,) = view.slashes
    assert (found.owner, found.batch_id, found.position) == (CHEATER, 1, 1)
    assert (found.leaf, found.priors) == (LEAF, 0)
    assert (found.amount_wei, found.stake_before, found.taken) == (401, (801, 0), (401, 0))
    assert found.state is SlashState.ESCROWED
    assert view.workers[CHEATER].active_wei == 400
    assert view.workers[CHEATER].slashed_wei == 401


def test_released_slash_keeps_its_split() -> None:
    (found,) = viewed(full()).slashes
    assert (found.state, found.split) == (SlashState.RELEASED, (301, 100, 0))
    assert found.settled_tx is not None


def test_restored_slash_gives_the_stake_back() -> None:
    history = begun()
    post(history, 1, RECORDS)
    slash(history)
    history.add("StakeVault", "SlashRestored", owner=CHEATER, offence=OFFENCE, amount=401)
    view = viewed(history)
    assert view.slashes[0].state is SlashState.RESTORED
    assert view.workers[CHEATER].active_wei == 801
    assert view.workers[CHEATER].slashed_wei == 0
    assert view.contradictions == []
