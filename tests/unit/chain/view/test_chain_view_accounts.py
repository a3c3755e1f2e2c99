from dataclasses import replace

import pytest
from chain_fakes import History, address
from chain_histories import (
    CHEATER,
    ESCROW,
    LEAF,
    NODE,
    OTHER_NODE,
    RECORDS,
    RELEASED,
    RUN,
    SLASHED,
    VALIDATORS,
    WORKER,
    begun,
    full,
    post,
    seat_jurors,
    slash,
    viewed,
)

from muster.chain import SlashState, WorkerStatus
from muster.protocol.encoding import keccak
from muster.protocol.ids import PolicyVersion, RunId
from muster.protocol.jury import BENCH, BenchPlace

OF_WORKER = {"run_id": RUN, "worker": WORKER}


def test_worker_is_found_by_address_number_and_node() -> None:
    view = viewed(begun())
    worker = view.workers[WORKER]
    assert view.worker_by_id[1] is worker
    assert view.worker_by_node[NODE] is worker
    member = view.member(RUN, WORKER)
    assert member is not None
    assert member is worker.memberships[RUN]
    assert (member.address, member.worker_id, member.node) == (WORKER, 1, NODE)
    assert (member.status, member.active_from, member.terms) == ("Active", 4, 1)
    assert member.joined_block == 2
    assert (member.active_wei, member.unbonding_wei, member.slashed_wei) == (1000, 0, 0)


def test_nobody_is_a_member_of_a_run_that_it_did_not_join() -> None:
    view = viewed(begun())
    assert view.member(RunId(2), WORKER) is None
    assert view.member(RUN, VALIDATORS[0]) is None


def test_member_is_active_from_its_block_on() -> None:
    member = viewed(begun()).runs[RUN].members[WORKER]
    assert [member.is_active(block) for block in (3, 4, 5)] == [False, True, True]


def test_another_node_replaces_the_one_that_served(history: History) -> None:
    fresh = address(22)
    history.add("NodeUnbound", worker=WORKER, node=NODE)
    history.add("NodeBound", same_block=True, worker=WORKER, node=fresh)
    view = viewed(history)
    assert NODE not in view.worker_by_node
    assert view.worker_by_node[fresh].address == WORKER
    member, rotated = view.runs[RUN].members[WORKER], history.block
    assert [member.node_at(b) for b in (1, 2, rotated - 1, rotated)] == [None, NODE, NODE, fresh]


def test_key_answers_for_what_was_committed_while_it_served(history: History) -> None:
    history.add("NodeUnbound", worker=WORKER, node=NODE)
    rotated_at = history.events[-1].block_timestamp
    history.add("NodeBound", same_block=True, worker=WORKER, node=address(22))
    member = viewed(history).runs[RUN].members[WORKER]
    assert [member.answers_for(NODE, rotated_at + s) for s in (-1, 0, 1)] == [True, True, False]
    assert member.answers_for(address(22), rotated_at + 1)
    assert not member.answers_for(OTHER_NODE, rotated_at)


def test_who_left_answers_for_what_was_committed_before(history: History) -> None:
    history.add("WorkerExiting", **OF_WORKER)
    left_at = history.events[-1].block_timestamp
    member = viewed(history).runs[RUN].members[WORKER]
    assert [member.answers_for(NODE, left_at + s) for s in (0, 1)] == [True, False]
    returned = {"terms": 1, "active_from": 40}
    history.add("WorkerReturned", **OF_WORKER, **returned)
    assert viewed(history).runs[RUN].members[WORKER].answers_for(NODE, left_at + 1)


def test_statuses_are_remembered_with_their_blocks(history: History) -> None:
    jailing = {"escrow_id": bytes(32), "until": 99}
    history.add("WorkerJailed", **OF_WORKER, **jailing)
    jailed = history.block
    returned = {"terms": 2, "active_from": 50}
    history.add("WorkerReturned", **OF_WORKER, **returned)
    history.add("WorkerExiting", **OF_WORKER)
    member = viewed(history).runs[RUN].members[WORKER]
    assert (member.status, member.jailed_until, member.active_from) == ("Exiting", 99, 50)
    assert member.terms == 2
    expected = ["None", "Active", "Jailed", "Active", "Exiting"]
    assert [member.status_at(b) for b in (1, 2, jailed, jailed + 1, jailed + 2)] == expected


def test_convictions_are_counted_and_acquittals_tell_the_status(history: History) -> None:
    of_cheater = {"run_id": RUN, "worker": CHEATER}
    history.add("WorkerJailed", **of_cheater, escrow_id=ESCROW, until=9)
    history.add("WorkerBanned", **of_cheater, escrow_id=keccak(b"second"))
    member = viewed(history).runs[RUN].members[CHEATER]
    assert (member.status, member.convictions) == (WorkerStatus.BANNED, 2)
    history.add("WorkerAcquitted", **of_cheater, escrow_id=ESCROW, status=2)
    member = viewed(history).runs[RUN].members[CHEATER]
    assert (member.status, member.convictions) == (WorkerStatus.JAILED, 1)


def test_jail_for_low_stake_is_no_conviction_and_spares_who_leaves(history: History) -> None:
    history.add("WorkerExiting", **OF_WORKER)
    jailing = {"escrow_id": bytes(32), "until": 9}
    history.add("WorkerJailed", **OF_WORKER, **jailing)
    member = viewed(history).runs[RUN].members[WORKER]
    assert (member.status, member.convictions, member.jailed_until) == ("Exiting", 0, 9)


@pytest.mark.parametrize("run_id", [BENCH, RUN, 2])
def test_stake_is_of_one_account_and_run(history: History, run_id: int) -> None:
    deposit = {"run_id": run_id, "owner": VALIDATORS[0], "amount": 7, "active": 7}
    history.add("Deposited", **deposit)
    view = viewed(history)
    staked = {n: view.stake(RunId(n), VALIDATORS[0]).active_wei for n in (BENCH, RUN, 2)}
    assert staked == {BENCH: 0, RUN: 0, 2: 0, run_id: 7}
    assert view.contradictions == []


def test_unbonding_stake_moves_and_leaves(history: History) -> None:
    stake = {"run_id": RUN, "owner": WORKER, "amount": 300}
    history.add("UnbondRequested", **stake, unbonding=300, withdrawable_at=5000)
    found = viewed(history).stake(RUN, WORKER)
    assert (found.active_wei, found.unbonding_wei, found.withdrawable_at) == (700, 300, 5000)
    history.add("Withdrawn", **stake)
    view = viewed(history)
    found = view.stake(RUN, WORKER)
    assert (found.active_wei, found.unbonding_wei, found.withdrawable_at) == (700, 0, 0)
    assert view.contradictions == []


def test_slash_is_linked_to_its_outcome(history: History) -> None:
    post(history, 1, RECORDS)
    slash(history)
    view = viewed(history)
    (found,) = view.slashes
    assert (found.run_id, found.owner, found.batch_id, found.position) == (RUN, CHEATER, 1, 1)
    assert (found.leaf, found.priors, found.tag) == (LEAF, 0, 1 << 32)
    assert (found.amount_wei, found.stake_before, found.taken) == (401, (801, 0), (401, 0))
    assert found.state is SlashState.ESCROWED
    member = view.runs[RUN].members[CHEATER]
    assert (member.active_wei, member.slashed_wei) == (400, 401)


def test_released_slash_keeps_its_split() -> None:
    (found,) = viewed(full()).slashes
    assert (found.state, found.split) == (SlashState.RELEASED, (301, 100, 0))
    assert found.settled_tx is not None


def test_restored_slash_gives_the_stake_back(history: History) -> None:
    post(history, 1, RECORDS)
    slash(history)
    given = {"run_id": RUN, "owner": CHEATER, "escrow_id": ESCROW, "returned": 401, "followed": 0}
    history.add("SlashRestored", **given)
    view = viewed(history)
    assert view.slashes[0].state is SlashState.RESTORED
    member = view.runs[RUN].members[CHEATER]
    assert (member.active_wei, member.slashed_wei) == (801, 0)
    assert view.contradictions == []


def test_what_a_later_offence_takes_of_stake_given_back_is_its_own(history: History) -> None:
    post(history, 1, RECORDS)
    slash(history)
    later = {"escrow_id": keccak(b"later"), "from_active": 40}
    history.add("Slashed", **{**SLASHED, **later})
    followed = {"escrow_id": keccak(b"later"), "from_escrow_id": ESCROW, "amount": 50}
    history.add("SlashFollowed", **followed)
    given = {"run_id": RUN, "owner": CHEATER, "escrow_id": ESCROW, "returned": 351, "followed": 50}
    history.add("SlashRestored", same_block=True, **given)
    view = viewed(history)
    _, last = view.slashes
    assert (last.amount_wei, last.taken) == (90, (40, 0))
    assert view.stake(RUN, CHEATER).active_wei == 801 - 40 - 50
    assert view.contradictions == []


def test_what_follows_a_final_slash_is_split_without_a_reporter() -> None:
    history = full()
    followed = {"escrow_id": ESCROW, "from_escrow_id": keccak(b"before"), "amount": 30}
    history.add("SlashFollowed", **followed)
    more = {"burned": 20, "insured": 10}
    history.add("SlashReleased", same_block=True, **{**RELEASED, **more})
    view = viewed(history)
    (found,) = view.slashes
    assert (found.amount_wei, found.split) == (431, (321, 110, 0))
    assert view.contradictions == []


def test_bench_keeps_its_places_in_order(history: History) -> None:
    first, second = seat_jurors(history, 2)
    joined = history.events[-1].block_timestamp
    history.add("JurorLeft", juror=first, place=0)
    view = viewed(history)
    assert view.bench == [BenchPlace(first, joined - 1, joined + 1), BenchPlace(second, joined)]
    assert view.jurors() == [second]
    history.add("JurorJoined", juror=address(80), place=0)
    view = viewed(history)
    assert view.bench == [BenchPlace(address(80), joined + 2), BenchPlace(second, joined)]
    assert view.contradictions == []
    history.add("JurorLeft", juror=second, place=1)
    history.add("BenchShortened", places=1)
    view = viewed(history)
    assert view.bench == [BenchPlace(address(80), joined + 2)]
    assert view.contradictions == []
    history.add("BenchShortened", places=0)
    assert viewed(history).contradictions


def test_seeds_of_a_member_are_of_the_block_that_came_later() -> None:
    view = viewed(full())
    member, checkpoint = (
        view.runs[RUN].members[WORKER],
        view.runs[RUN].checkpoints[PolicyVersion(0)],
    )
    joined = member.joined_block
    assert member.joined_beacon != checkpoint.beacon
    for published in (joined, joined + 1):
        policy = replace(checkpoint, block_number=published)
        assert member.beacon_under(policy) == checkpoint.beacon
    before = replace(checkpoint, block_number=joined - 1)
    assert member.beacon_under(before) == member.joined_beacon
