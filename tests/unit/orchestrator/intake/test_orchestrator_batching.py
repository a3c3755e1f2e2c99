from pathlib import Path

import pytest
from orchestrator_bench import Bench, delete_database, open_bench
from orchestrator_fakes import RUN, Network, submission_for

from muster.chain import ZERO_ADDRESS, LeasedWork
from muster.orchestrator.db.query import Rows, Statement, plain
from muster.orchestrator.db.statements import SubmissionRow, latest_submissions
from muster.orchestrator.intake.intake import Intake
from muster.orchestrator.loop import commit_once
from muster.protocol.encoding import keccak
from muster.protocol.errors import ApiError, ChainUnreachable, ContractRevert, TransactionLost
from muster.protocol.merkle import batch_root
from muster.protocol.messages import Verdict
from muster.protocol.recipe import TrainingRecipe

WIDE = TrainingRecipe(submissions_per_step=100)


async def test_batch_root_is_over_the_submissions_in_upload_order(tmp_path: Path) -> None:
    async with open_bench(tmp_path, Network(training=WIDE)) as bench:
        submissions = [await bench.upload(n % 3, b"file %d" % n) for n in range(5)]
        await bench.commit()
        root = batch_root([s.leaf() for s in submissions])
        assert bench.network.chain.ledger.committed == [(root, 5, 100)]
        async with bench.api() as api:
            batch = await api.batch(1)
    assert [e.submission for e in batch.submissions] == submissions
    assert batch.root == root


async def test_batches_hold_at_most_the_limit(tmp_path: Path) -> None:
    async with open_bench(tmp_path, Network(training=WIDE), batch_limit=2) as bench:
        for number in range(5):
            await bench.upload(number % 3, b"file %d" % number)
        while await bench.commit():
            pass
        assert [count for _, count, _ in bench.network.chain.ledger.committed] == [2, 2, 1]


@pytest.mark.parametrize(("verdict", "counts"), [("ACCEPTED", [3, 2]), ("REJECTED", [5])])
async def test_a_batch_is_what_validators_check_in_half_the_deadline_at_the_speed_seen(
    tmp_path: Path, verdict: str, counts: list[int]
) -> None:
    async with open_bench(tmp_path, Network(training=WIDE)) as bench:
        first = await bench.upload(0, b"first")
        await bench.commit()
        bench.set_chain_time(bench.network.chain.time + 10)
        # 20 units in 10 s; refused work says nothing about the time of a check.
        await bench.judge(1, [first], Verdict[verdict])
        await bench.record()
        bench.services.batching.outcome_deadline_s = 70
        for number in range(5):
            await bench.upload(1 + number % 2, b"file %d" % number)
        while await bench.commit():
            pass
        assert [count for _, count, _ in bench.network.chain.ledger.committed[1:]] == counts


@pytest.mark.parametrize(
    "error", [ContractRevert("LedgerPaused", (1,)), ChainUnreachable("no answer")]
)
async def test_commitment_is_repeated_unchanged_when_it_fails(
    bench: Bench, error: Exception
) -> None:
    first = await bench.upload(0, b"one")
    bench.network.chain.ledger.fail_next = error
    assert await bench.commit() is False
    second = await bench.upload(1, b"two")
    assert await bench.commit() is True
    assert await bench.commit() is True
    roots = [root for root, _, _ in bench.network.chain.ledger.committed]
    assert roots == [batch_root([first.leaf()]), batch_root([second.leaf()])]


@pytest.mark.parametrize(("units", "companions"), [(0, 0), (1 << 30, 0), (1 << 30, 1)])
async def test_claim_that_the_contract_refuses_for_ever_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, units: int, companions: int
) -> None:
    network = Network(training=WIDE)
    network.chain.ledger.funded_units = 100
    async with open_bench(tmp_path, network) as bench:
        with monkeypatch.context() as earlier_release:
            earlier_release.setattr(Intake, "_check_claim", lambda *_: None)
            bad = await bench.upload(0, b"bad", units=units)
        honest = [await bench.upload(1, b"one") for _ in range(companions)]
        assert await bench.services.batching.next() is not None
    async with open_bench(tmp_path, network) as bench:
        honest.append(await bench.upload(2, b"two"))
        assert await bench.commit() is False
        assert await bench.commit() is True
        assert bench.services.batching.uncommitted_roots == []
        root = batch_root([each.leaf() for each in honest])
        assert network.chain.ledger.committed == [(root, len(honest), 20 * len(honest))]
        assert await bench.services.files.find(bad.file_hash) is None
        assert isinstance(await bench.services.files.find(honest[0].file_hash), Path)
    delete_database(tmp_path)
    async with open_bench(tmp_path, network) as bench:
        assert await bench.commit() is False
        assert await bench.services.batching.next() is None


@pytest.mark.parametrize("change", ["node", "status", "nothing"])
async def test_work_whose_worker_changed_since_the_upload_is_left_out(
    bench: Bench, change: str
) -> None:
    gone, kept = await bench.upload(0, b"gone"), await bench.upload(1, b"kept")
    worker = bench.network.worker(0).address
    if change == "node":
        bench.network.apply("WorkerRegistry", "NodeBound", worker=worker, node=ZERO_ADDRESS)
    elif change == "status":
        bench.network.apply("WorkerRegistry", "WorkerExiting", run_id=RUN, worker=worker)
    expected = [gone, kept] if change == "nothing" else [kept]
    assert await bench.commit() is True
    root = batch_root([each.leaf() for each in expected])
    assert bench.network.chain.ledger.committed == [(root, len(expected), 20 * len(expected))]
    found = await bench.services.files.find(gone.file_hash)
    assert isinstance(found, Path) is (change == "nothing")
    assert await bench.commit() is False


@pytest.mark.parametrize(
    "error", [ChainUnreachable("gone"), TransactionLost("slow", tx="0x00", is_remembered=True)]
)
async def test_commitment_of_unknown_fate_is_never_made_twice(
    bench: Bench, error: Exception
) -> None:
    await bench.upload()
    bench.network.chain.ledger.lose_next = error
    assert await commit_once(bench.services, bench.backoff) is False
    # The event is not read back yet.
    assert await commit_once(bench.services, bench.backoff) is True
    assert len(bench.network.chain.ledger.committed) == 1
    assert await commit_once(bench.services, bench.backoff) is False


async def test_commitment_of_unknown_fate_is_never_made_twice_by_the_next_process(
    tmp_path: Path,
) -> None:
    network = Network()
    async with open_bench(tmp_path, network) as bench:
        await bench.upload()
        network.chain.ledger.lose_next = ChainUnreachable("gone")
        assert await commit_once(bench.services, bench.backoff) is False
    async with open_bench(tmp_path, network) as bench:
        assert await commit_once(bench.services, bench.backoff) is True
        assert len(network.chain.ledger.committed) == 1


async def test_mined_commitment_does_not_hold_up_the_next_batch(bench: Bench) -> None:
    for number in range(2):
        await bench.upload(number, b"%d" % number)
        composition = await bench.services.batching.next()
        assert composition is not None
        # Not read back: the projection does not know of it.
        await bench.services.batching.commit(composition)
    assert len(bench.network.chain.ledger.committed) == 2
    assert await bench.services.batching.next() is None


async def test_commitment_is_adopted_when_the_process_died_before_reading_it_back(
    tmp_path: Path,
) -> None:
    network = Network()
    async with open_bench(tmp_path, network) as bench:
        await bench.upload()
        composition = await bench.services.batching.next()
        assert composition is not None
        await bench.services.batching.commit(composition)
    for event in (await network.chain.poll()).events:
        network.view.apply(event)
    async with open_bench(tmp_path, network) as bench:
        assert await bench.commit() is False
        assert len(network.chain.ledger.committed) == 1
        async with bench.api() as api:
            assert (await api.batch(1)).count == 1


async def test_composition_is_committed_when_the_process_died_before_sending_it(
    tmp_path: Path,
) -> None:
    network = Network()
    async with open_bench(tmp_path, network) as bench:
        first = await bench.upload(0, b"one")
        assert await bench.services.batching.next() is not None
    async with open_bench(tmp_path, network) as bench:
        await bench.upload(1, b"two")
        assert await bench.commit() is True
        assert network.chain.ledger.committed[0][0] == batch_root([first.leaf()])


async def test_submissions_wait_again_when_the_process_died_while_composing(tmp_path: Path) -> None:
    network = Network()
    async with open_bench(tmp_path, network) as bench:
        await bench.upload(0, b"one")
        assert await bench.services.batching.next() is not None
        # As if only the composition's file had been written.
        async with bench.services.database.transaction() as asked:
            await asked.ask(
                plain("UPDATE submissions SET batch_root = NULL, position = NULL"),
                plain("DELETE FROM batches"),
            )
    async with open_bench(tmp_path, network) as bench:
        await bench.upload(1, b"two")
        assert await bench.commit() is True
        assert await bench.commit() is False
        assert [count for _, count, _ in network.chain.ledger.committed] == [2]


async def test_batch_is_committed_again_when_a_reorg_removed_it(bench: Bench) -> None:
    await bench.upload()
    await bench.commit()
    bench.network.chain.rewind_next = bench.network.chain.emit.block - 1
    await bench.follow()
    assert bench.network.view.batches == {}
    assert await bench.commit() is True
    roots = [root for root, _, _ in bench.network.chain.ledger.committed]
    assert roots[0] == roots[1]


async def test_batch_is_committed_again_when_a_reorg_removed_it_before_it_was_read(
    bench: Bench,
) -> None:
    await bench.upload()
    assert await commit_once(bench.services, bench.backoff) is True
    bench.network.chain.take_back_unread()
    await bench.follow()
    assert await bench.commit() is True
    roots = [root for root, _, _ in bench.network.chain.ledger.committed]
    assert roots[0] == roots[1]
    assert [b.root for b in bench.network.view.batches.values()] == [roots[0]]


async def test_batch_that_is_mined_and_not_read_is_not_committed_again(bench: Bench) -> None:
    await bench.upload()
    before = bench.network.chain.emit.block
    assert await commit_once(bench.services, bench.backoff) is True
    bench.services.batching.sync(before)
    assert await bench.services.batching.next() is None


async def test_composition_outlives_a_look_into_the_database_that_began_before_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.upload()
    database = bench.services.database
    search = database.search

    async def slow(*statements: Statement) -> list[Rows]:
        found = await search(*statements)
        assert await bench.services.batching.next() is not None
        return found

    monkeypatch.setattr(database, "search", slow)
    await bench.services.batching.load()
    assert await bench.services.batching.next() is not None


async def test_batch_is_unknown_when_it_never_came_through_here(bench: Bench) -> None:
    batch_id = bench.network.chain.ledger.commit(RUN, keccak(b"root"), 1, 1)
    await bench.follow()
    async with bench.api() as api:
        for unknown in (batch_id, 10):
            with pytest.raises(ApiError) as caught:
                await api.batch(unknown)
            assert (caught.value.status, caught.value.code) == (404, "batch_unknown")
            assert f"to block {bench.services.projection.view.block_number}:" in caught.value.hint


async def test_composition_is_on_disk_before_the_commitment_is_sent(bench: Bench) -> None:
    await bench.upload()
    bench.network.chain.ledger.fail_next = ChainUnreachable("no answer")
    await bench.commit()
    (stored,) = bench.services.files.batches()
    [[only]] = await bench.services.database.ask(latest_submissions(2))
    row = SubmissionRow(*only)
    assert row.batch_root == stored.root
    assert stored.file_hashes == [row.file_hash]


async def test_submission_is_not_committed_again_when_its_worker_did_so_itself(
    bench: Bench,
) -> None:
    direct = await bench.upload(0, b"one")
    other = await bench.upload(1, b"two")
    bench.network.chain.ledger.submit_direct(bench.network.work(direct))
    await bench.follow()
    composition = await bench.services.batching.next()
    assert composition is not None
    assert composition.root == batch_root([other.leaf()])
    async with bench.api() as api:
        assert [e.submission for e in (await api.batch(1)).submissions] == [direct]


async def test_direct_batch_is_served_as_the_chain_has_it_and_takes_its_file_late(
    bench: Bench,
) -> None:
    lease = await bench.lease()
    submission = submission_for(lease.ticket, b"rows")
    signature = bench.network.sign_submission(submission)
    work = LeasedWork(submission, signature, lease.ticket, lease.signature)
    bench.network.chain.ledger.submit_direct(work)
    await bench.follow()
    async with bench.node() as api:
        (entry,) = (await api.batch(1)).submissions
        assert (entry.submission, entry.signature) == (submission, signature)
        assert (entry.ticket, entry.ticket_signature) == (lease.ticket, lease.signature)
        bench.set_chain_time(lease.ticket.deadline + 1)
        await api.submit(submission, signature, b"rows")
    async with bench.validator() as api:
        assert await api.file(submission.file_hash) == b"rows"
    assert await bench.commit() is False
