import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from orchestrator_bench import Bench, open_bench
from orchestrator_fakes import RUN, Network

from muster.api import Lease, NoWork
from muster.chain import WorkerStatus
from muster.orchestrator.clock import AWAY_S
from muster.orchestrator.db import statements
from muster.orchestrator.db.query import plain
from muster.orchestrator.leases.leases import INDEX_BLOCK, WorkerRows, capacity, next_step
from muster.protocol.eip712 import address_of, digest, recover
from muster.protocol.encoding import keccak
from muster.protocol.errors import ApiError, ChainUnreachable
from muster.protocol.ids import Address, PolicyVersion, Step
from muster.protocol.messages import Reason, Ticket, Verdict
from muster.protocol.recipe import TrainingRecipe

NOTHING = WorkerRows(unfilled=[], waiting_units=0, slots={}, past=[], reports=[])


async def ticket(bench: Bench, node: int = 0) -> Ticket | None:
    answer = await bench.ask(node)
    return answer.ticket if isinstance(answer, Lease) else None


async def signers(bench: Bench) -> set[Address]:
    """Return who signed the tickets of work that is not on chain."""
    found = await bench.services.database.search(
        statements.waiting_tickets(),
        statements.unfilled_tickets(now=bench.network.chain.time),
        *(
            statements.tickets_in_batch(root=root)
            for root in bench.services.batching.uncommitted_roots
        ),
    )
    assert len(found) == 3
    return {
        recover(digest(bench.network.domain, Ticket.from_json(json.loads(text)).struct_hash()), own)
        for rows in found
        for _, text, own in rows
    }


async def test_the_runs_next_account_signs_tickets_of_work_in_progress(tmp_path: Path) -> None:
    """A batch counts with tickets of the account that commits it."""
    network = Network()
    former, key = network.run.config.orchestrator, keccak(b"the next orchestrator")
    async with open_bench(tmp_path, network) as bench:
        await bench.upload(0, b"in a batch that is not on chain")
        network.chain.ledger.fail_next = ChainUnreachable("no answer")
        await bench.commit()
        await bench.upload(1, b"in no batch")
        assert await ticket(bench, 2)
        assert await signers(bench) == {former}
    network.keys = replace(network.keys, orchestrator=key)
    network.chain.account = address_of(key)
    network.run.config = replace(network.run.config, orchestrator=address_of(key))
    async with open_bench(tmp_path, network, start_s=1) as bench:
        assert await signers(bench) == {address_of(key)}


async def rotate(bench: Bench, old: Address, new: Address) -> None:
    """Let the run's owner name another orchestrator."""
    ledger, named = bench.network.chain.ledger, {"old_orchestrator": old, "new_orchestrator": new}
    ledger.events.append(ledger.emit("RunRegistry", "OrchestratorRotated", run_id=RUN, **named))
    await bench.follow()


async def test_no_ticket_is_given_while_the_run_names_another_orchestrator(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    assert await ticket(bench, 0)
    named, other = bench.network.run.config.orchestrator, address_of(keccak(b"the next one"))
    await rotate(bench, named, other)
    # Node 0 does not get its open ticket again either.
    for node in (0, 1):
        assert await bench.ask(node) == NoWork(retry_after_s=1.0, reason="paused")
    await rotate(bench, other, named)
    assert await ticket(bench, 1)
    warned = [each for each in caplog.records if "another orchestrator" in each.message]
    assert len(warned) == 1


@given(used=st.integers(0, 10**6), outstanding=st.integers(0, 10**6), per_step=st.integers(1, 1000))
def test_next_step_holds_exactly_its_share_of_submissions(
    used: int, outstanding: int, per_step: int
) -> None:
    step = next_step(used, outstanding, per_step)
    assert (step - 1) * per_step <= used + outstanding < step * per_step


@given(
    version=st.integers(0, 50),
    per_step=st.integers(1, 9),
    level=st.integers(0, 5),
    steps=st.integers(0, 60),
    used_steps=st.integers(-3, 3),
)
def test_capacity_is_what_the_async_level_leaves(
    version: int, per_step: int, level: int, steps: int, used_steps: int
) -> None:
    training = TrainingRecipe(submissions_per_step=per_step, max_async_level=level, steps=steps)
    used = max(0, version + used_steps) * per_step
    outstanding = 0
    while capacity(used, outstanding, version, training):
        step = next_step(used, outstanding, per_step)
        # The version is not too old for training in the ticket's step, and the step exists.
        assert step - 1 - version <= level
        assert not steps or step <= steps
        outstanding += 1
    ended = next_step(used, outstanding, per_step)
    assert ended - 1 - version > level or (steps and ended > steps)


async def test_capacity_is_the_same_rule_on_a_hand_counted_case() -> None:
    training = TrainingRecipe(submissions_per_step=4, max_async_level=2)
    # Version 5 is published: steps 6, 7 and 8 may be collected, 32 submissions since the start.
    assert capacity(20, 0, 5, training) == 12
    assert capacity(25, 6, 5, training) == 1
    assert capacity(25, 7, 5, training) == 0


async def test_ticket_is_signed_and_anchored_in_the_newest_policy(bench: Bench) -> None:
    lease = await bench.lease()
    checkpoint = bench.network.run.checkpoints[bench.network.run.latest_version]
    assert lease.ticket == Ticket(
        run_id=RUN,
        worker=bench.network.worker(0).address,
        step=Step(1),
        index=lease.ticket.index,
        policy_version=checkpoint.version,
        policy_root=checkpoint.manifest_root,
        beacon=checkpoint.beacon,
        deadline=bench.network.chain.time + 60,
    )
    signed = digest(bench.network.domain, lease.ticket.struct_hash())
    assert recover(signed, lease.signature) == address_of(bench.network.keys.orchestrator)


async def test_a_ticket_names_the_version_that_a_node_holds_if_its_step_may_train_on_it(
    tmp_path: Path,
) -> None:
    training = TrainingRecipe(submissions_per_step=1, max_async_level=1)
    async with open_bench(tmp_path, Network(training=training)) as bench:
        for version in range(1, 4):
            await bench.run_through(body=b"%d" % version)
            bench.network.publish(version)
        async with bench.node() as api:
            lease = await api.lease(RUN, version=PolicyVersion(2))
        assert isinstance(lease, Lease)
        checkpoint = bench.network.run.checkpoints[PolicyVersion(2)]
        assert (lease.ticket.step, lease.ticket.policy_version) == (4, 2)
        assert lease.ticket.policy_root == checkpoint.manifest_root
        assert lease.ticket.beacon == checkpoint.beacon
        # Step 4 starts from version 3; nobody published version 4.
        for held in (None, 0, 1, 3, 4, 1 << 40):
            version = None if held is None else PolicyVersion(held)
            assert bench.services.leases._checkpoint(version, Step(4)).version == 3


async def test_open_ticket_is_given_again_when_a_new_policy_is_out(bench: Bench) -> None:
    first = await ticket(bench)
    bench.network.publish(1)
    assert await ticket(bench) == first


async def test_another_ticket_is_given_when_the_first_is_too_old_to_train_on(bench: Bench) -> None:
    first = await ticket(bench)
    for version in (1, 2):
        bench.network.publish(version)
    second = await ticket(bench)
    assert first is not None
    assert second is not None
    # One version ahead is allowed; two versions old is not trained on.
    assert (first.policy_version, second.policy_version) == (0, 2)
    assert (first.step, first.index) != (second.step, second.index)


async def test_indices_of_a_step_are_drawn_within_a_block_and_never_twice(tmp_path: Path) -> None:
    training = TrainingRecipe(submissions_per_step=100, max_async_level=0, steps=0)
    async with open_bench(tmp_path, Network(training=training)) as bench:
        for number in range(INDEX_BLOCK + 2):
            await bench.run_through(0, b"%d" % number)
        [rows] = await bench.services.database.ask(plain('SELECT "index" FROM leases ORDER BY id'))
    drawn = [index for (index,) in rows]
    assert sorted(drawn[:INDEX_BLOCK]) == list(range(INDEX_BLOCK))
    assert drawn[:INDEX_BLOCK] != sorted(drawn[:INDEX_BLOCK])
    assert set(drawn[INDEX_BLOCK:]) < set(range(INDEX_BLOCK, 2 * INDEX_BLOCK))


async def test_indices_are_the_same_after_a_restart_and_others_for_another_key(
    tmp_path: Path,
) -> None:
    network, other = Network(), Network()
    drawn = []
    for folder, each in (("a", network), ("b", network), ("c", other)):
        place = tmp_path / folder
        place.mkdir()
        async with open_bench(place, each) as bench:
            found = [bench.services.leases._next_index(NOTHING, each.worker(0), Step(s))
                     for s in range(1, 30)]  # fmt: skip
            drawn.append(found)
    assert drawn[0] == drawn[1] != drawn[2]


async def test_expired_ticket_frees_its_capacity_but_not_its_slot(bench: Bench) -> None:
    first = await ticket(bench)
    assert first is not None
    bench.set_chain_time(first.deadline)
    assert await ticket(bench) == first
    bench.set_chain_time(first.deadline + 1)
    second = await ticket(bench)
    assert second is not None
    assert second.step == 1
    assert second.index != first.index


async def test_slot_that_reached_the_chain_without_us_is_skipped(bench: Bench) -> None:
    submission = await bench.run_through(0)
    async with bench.services.database.transaction() as asked:
        await asked.ask(plain("DELETE FROM submissions"), plain("DELETE FROM leases"))
    again = await ticket(bench)
    assert again is not None
    assert again.step == submission.step
    assert again.index != submission.index


async def test_no_ticket_is_given_when_the_async_level_is_reached(bench: Bench) -> None:
    # Two per step, one version ahead: four in all for version 0.
    for number in range(4):
        await bench.upload(number % 3, b"%d" % number)
    async with bench.node(2) as api:
        assert await api.lease(RUN) == NoWork(retry_after_s=1.0)
    bench.network.publish(1)
    assert await ticket(bench, 2) is not None


async def test_tickets_end_with_the_last_step(tmp_path: Path) -> None:
    training = TrainingRecipe(steps=1, submissions_per_step=1, max_async_level=5)
    async with open_bench(tmp_path, Network(training=training)) as bench:
        await bench.run_through()
        assert await ticket(bench) is None


async def test_rejected_submission_frees_its_capacity(tmp_path: Path) -> None:
    training = TrainingRecipe(steps=1, submissions_per_step=1)
    async with open_bench(tmp_path, Network(training=training)) as bench:
        submission = await bench.upload()
        await bench.commit()
        assert await ticket(bench) is None
        await bench.judge(1, [submission], Verdict.REJECTED, Reason.SCHEMA)
        await bench.record()
        assert await ticket(bench) is not None


async def test_silent_validators_do_not_stop_the_run(tmp_path: Path) -> None:
    training = TrainingRecipe(steps=1, submissions_per_step=1)
    async with open_bench(tmp_path, Network(training=training)) as bench:
        await bench.upload()
        await bench.commit()
        bench.set_chain_time(bench.network.chain.time + 1000)
        assert await ticket(bench) is None
        bench.set_chain_time(bench.network.chain.time + 1)
        assert await ticket(bench) is not None


async def test_no_ticket_is_given_when_the_worker_is_younger_than_the_beacon(bench: Bench) -> None:
    published = bench.network.run.checkpoints[PolicyVersion(0)].block_number
    bench.network.worker(0).active_from = published + 1
    assert await ticket(bench) is None
    bench.network.worker(0).active_from = published
    assert await ticket(bench) is not None


async def test_no_ticket_is_given_when_the_run_is_paused(bench: Bench) -> None:
    bench.network.run.paused = True
    assert await ticket(bench) is None


async def test_no_ticket_is_given_when_no_policy_is_out(bench: Bench) -> None:
    bench.network.unpublish()
    assert await ticket(bench) is None


@pytest.mark.parametrize("status", ["Jailed", "Banned", "Exiting"])
async def test_lease_is_refused_when_the_worker_is_not_active(bench: Bench, status: str) -> None:
    bench.network.worker(0).status = WorkerStatus(status)
    async with bench.node() as api:
        with pytest.raises(ApiError, match=status.lower()) as caught:
            await api.lease(RUN)
    assert (caught.value.status, caught.value.code) == (403, "worker_not_active")


async def test_lease_is_refused_when_nobody_knows_the_node(bench: Bench) -> None:
    async with bench.api(b"\x09" * 32) as api:
        with pytest.raises(ApiError, match="not the node of a worker of run 1") as caught:
            await api.lease(RUN)
    assert (caught.value.status, caught.value.code) == (403, "worker_not_active")
    assert caught.value.hint


async def test_lease_is_refused_when_the_staking_wallet_asks_itself(bench: Bench) -> None:
    bench.network.worker(0).worker.address = address_of(b"\x08" * 32)
    async with bench.api(b"\x08" * 32) as api:
        with pytest.raises(ApiError, match="not the node of a worker of run 1"):
            await api.lease(RUN)


async def test_refill_of_a_step_is_leased_beyond_the_async_level(tmp_path: Path) -> None:
    training = TrainingRecipe(submissions_per_step=1, max_async_level=0)
    async with open_bench(tmp_path, Network(training=training)) as bench:
        first = await bench.run_through()
        assert await ticket(bench) is None
        async with bench.api(bench.network.keys.trainer) as api:
            await api.post_metrics(1, {"stream_from": 0.0, "refill": 1.0})
        again = await ticket(bench)
        assert again is not None
        assert again.step == 1
        assert again.index != first.index


async def test_refill_that_was_not_needed_is_taken_back(tmp_path: Path) -> None:
    training = TrainingRecipe(submissions_per_step=1, max_async_level=0)
    async with open_bench(tmp_path, Network(training=training)) as bench:
        await bench.run_through()
        async with bench.api(bench.network.keys.trainer) as api:
            await api.post_metrics(1, {"stream_from": 0.0, "refill": 1.0})
            await api.post_metrics(1, {"stream_from": 0.0, "stream_to": 1.0, "refill": 0.0})
        assert await ticket(bench) is None


async def test_no_lease_is_given_while_the_chain_is_away_and_open_ones_are_given_again(
    bench: Bench,
) -> None:
    """Work that comes back later than its deadline cannot be committed in time."""
    lease = await bench.lease(0)
    health = bench.services.chain_health
    health.read_at = bench.wall()
    health.failed("the endpoint does not answer")
    bench.wall.time += AWAY_S - 1
    assert isinstance(await bench.ask(1), Lease)
    bench.wall.time += 1
    assert await bench.ask(2) == NoWork(retry_after_s=1.0, reason="chain_away")
    assert (await bench.lease(0)).ticket == lease.ticket
    health.succeeded(9, bench.wall())
    assert isinstance(await bench.ask(2), Lease)
