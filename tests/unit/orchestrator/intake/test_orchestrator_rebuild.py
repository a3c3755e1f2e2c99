from dataclasses import replace
from pathlib import Path

import pytest
from orchestrator_bench import Bench, delete_database, open_bench
from orchestrator_fakes import RUN, Network

from muster.api import NoWork
from muster.api.client import ATTEMPTS
from muster.orchestrator.db.query import plain
from muster.orchestrator.intake.files import StoredBatch
from muster.protocol.encoding import keccak
from muster.protocol.errors import StorageError
from muster.protocol.ids import PolicyVersion
from muster.protocol.merkle import batch_root
from muster.protocol.recipe import TrainingRecipe

WIDE = TrainingRecipe(submissions_per_step=100)


async def batch_json(bench: Bench, batch_id: int) -> str:
    async with bench.api() as api:
        return (await api.batch(batch_id)).model_dump_json()


async def test_everything_is_recovered_when_the_database_is_deleted(tmp_path: Path) -> None:
    network = Network(training=WIDE)
    async with open_bench(tmp_path, network) as bench:
        judged = await bench.run_through(0, b"one")
        committed = await bench.upload(1, b"two")
        await bench.commit()
        await bench.judge(2, [committed], validators=(0,))
        waiting = await bench.upload(2, b"three")
        async with bench.api(network.keys.trainer) as api:
            await api.post_metrics(1, {"reward": 0.25})
        before = [await batch_json(bench, 1), await batch_json(bench, 2)]
    delete_database(tmp_path)
    async with open_bench(tmp_path, network, start_s=1) as bench:
        assert [await batch_json(bench, 1), await batch_json(bench, 2)] == before
        async with bench.api() as api:
            states = [(await api.submission_state(s.file_hash)).state for s in (judged, committed)]
            assert states == ["judged", "committed"]
            assert (await api.submission_state(waiting.file_hash)).state == "received"
        assert bench.services.training.series("reward") == [(1, 0.25)]
        # The other validator's outcomes are enough, and waiting work is committed.
        await bench.judge(2, [committed], validators=(1,))
        await bench.record()
        assert await bench.commit() is True
        assert network.chain.ledger.committed[2][0] == batch_root([waiting.leaf()])
        assert await bench.commit() is False


async def test_slots_stay_taken_when_the_database_is_deleted(tmp_path: Path) -> None:
    network = Network(training=WIDE)
    async with open_bench(tmp_path, network) as bench:
        first = await bench.upload(0, b"one")
    delete_database(tmp_path)
    async with open_bench(tmp_path, network, start_s=1) as bench:
        second = await bench.upload(0, b"two")
        await bench.upload(1, b"three")
    assert first.index != second.index


async def test_uploads_are_numbered_on_when_the_database_is_deleted(tmp_path: Path) -> None:
    network = Network(training=WIDE)
    async with open_bench(tmp_path, network) as bench:
        # More than a client's attempts: each would use up one number that is taken.
        for number in range(2 * ATTEMPTS):
            await bench.upload(number % 3, b"%d" % number)
    delete_database(tmp_path)
    async with open_bench(tmp_path, network, start_s=1) as bench:
        await bench.upload(1, b"another")
        [rows] = await bench.services.database.ask(plain("SELECT sequence FROM submissions"))
    assert sorted(number for (number,) in rows) == list(range(1, 2 * ATTEMPTS + 2))


async def test_capacity_is_the_same_when_the_database_is_deleted(tmp_path: Path) -> None:
    network = Network(training=TrainingRecipe(steps=1, submissions_per_step=2))
    async with open_bench(tmp_path, network) as bench:
        await bench.run_through(0, b"one")
        await bench.upload(1, b"two")
    delete_database(tmp_path)
    async with open_bench(tmp_path, network, start_s=1) as bench, bench.node(2) as api:
        assert isinstance(await api.lease(RUN), NoWork)


async def test_composition_that_was_never_sent_is_sent_when_the_database_is_deleted(
    tmp_path: Path,
) -> None:
    network = Network(training=WIDE)
    async with open_bench(tmp_path, network) as bench:
        first = await bench.upload(0, b"one")
        assert await bench.services.batching.next() is not None
        await bench.upload(1, b"two")
    delete_database(tmp_path)
    async with open_bench(tmp_path, network, start_s=1) as bench:
        assert await bench.commit() is True
        assert network.chain.ledger.committed[0][0] == batch_root([first.leaf()])


async def test_committed_composition_wins_when_two_share_a_submission(tmp_path: Path) -> None:
    network = Network(training=WIDE)
    async with open_bench(tmp_path, network) as bench:
        submissions = [await bench.upload(n, b"%d" % n) for n in (0, 1)]
        # Left over from a crash while composing: never sent, though it looks newer.
        stale = StoredBatch(
            root=batch_root([submissions[0].leaf()]),
            file_hashes=[submissions[0].file_hash],
            composed_ns=1 << 62,
        )
        await bench.services.files.keep_batch(stale)
        await bench.commit()
    delete_database(tmp_path)
    async with open_bench(tmp_path, network, start_s=1) as bench:
        assert await bench.commit() is False
        async with bench.api() as api:
            assert (await api.batch(1)).count == 2


async def test_outcomes_of_too_few_are_kept_when_the_database_is_deleted(tmp_path: Path) -> None:
    network = Network()
    async with open_bench(tmp_path, network) as bench:
        submission = await bench.upload()
        await bench.commit()
        await bench.judge(1, [submission], validators=(0,))
    delete_database(tmp_path)
    async with open_bench(tmp_path, network, start_s=1) as bench:
        await bench.judge(1, [submission], validators=(1,))
        await bench.record()
    assert len(network.chain.ledger.posted) == 1


async def test_corrupt_sidecars_are_skipped_when_the_database_is_rebuilt(tmp_path: Path) -> None:
    network = Network(training=WIDE)
    async with open_bench(tmp_path, network) as bench:
        good = await bench.upload(0, b"one")
        bad = await bench.upload(1, b"two")
    delete_database(tmp_path)
    (tmp_path / "files" / f"{bad.file_hash.hex()}.json").write_text('{"submission": 1}')
    (tmp_path / "files" / "batches" / "ff.json").write_text("{")
    with (tmp_path / "files" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "fig')
    async with open_bench(tmp_path, network, start_s=1) as bench:
        assert await bench.commit() is True
        assert network.chain.ledger.committed[0][0] == batch_root([good.leaf()])


async def test_figures_after_an_incomplete_line_are_recovered(tmp_path: Path) -> None:
    network = Network(training=WIDE)
    async with open_bench(tmp_path, network) as bench, bench.api(network.keys.trainer) as api:
        await api.post_metrics(1, {"reward": 0.25})
        with (tmp_path / "files" / "metrics.jsonl").open("a") as file:
            file.write('{"step": 2, "fig')
        await api.post_metrics(3, {"reward": 0.5})
    delete_database(tmp_path)
    async with open_bench(tmp_path, network, start_s=1) as bench:
        assert bench.services.training.series("reward") == [(1, 0.25), (3, 0.5)]


async def test_composition_is_ignored_when_its_root_is_not_over_its_submissions(
    tmp_path: Path,
) -> None:
    network = Network(training=WIDE)
    async with open_bench(tmp_path, network) as bench:
        submission = await bench.upload(0, b"one")
        forged = StoredBatch(
            root=keccak(b"other"), file_hashes=[submission.file_hash], composed_ns=1
        )
        await bench.services.files.keep_batch(forged)
    delete_database(tmp_path)
    async with open_bench(tmp_path, network, start_s=1) as bench:
        assert await bench.commit() is True
        assert network.chain.ledger.committed[0][0] == batch_root([submission.leaf()])


async def test_files_of_another_chain_are_ignored(tmp_path: Path) -> None:
    async with open_bench(tmp_path, Network()) as bench:
        await bench.upload()
    delete_database(tmp_path)
    fresh = Network()
    fresh.unpublish()
    async with open_bench(tmp_path, fresh) as bench:
        assert await bench.commit() is False


async def test_database_of_another_run_is_refused(tmp_path: Path) -> None:
    network = Network()
    async with open_bench(tmp_path, network):
        pass
    network.chain.chain_id = 5
    with pytest.raises(StorageError, match="is of another run") as caught:
        async with open_bench(tmp_path, network):
            pass
    assert caught.value.hint


async def test_database_of_an_earlier_local_chain_is_refused(tmp_path: Path) -> None:
    network = Network()
    async with open_bench(tmp_path, network):
        pass
    network.chain.first_block = keccak(b"another chain")
    with pytest.raises(StorageError, match="has another block where") as caught:
        async with open_bench(tmp_path, network):
            pass
    assert "--files" not in str(caught.value.hint)


@pytest.mark.parametrize("restarts", [False, True])
async def test_lease_that_a_reorganisation_made_void_is_replaced(
    tmp_path: Path, restarts: bool
) -> None:
    network, version = Network(), PolicyVersion(0)

    async with open_bench(tmp_path, network) as bench:
        void = (await bench.lease()).ticket
        assert (await bench.lease()).ticket == void
        published = replace(network.run.checkpoints[version], beacon=keccak(b"another block"))
        network.run.checkpoints[version] = published
        if not restarts:
            network.chain.rewind_next = network.chain.emit.block
            await bench.follow()
            fresh = (await bench.lease()).ticket
    if restarts:
        async with open_bench(tmp_path, network) as bench:
            fresh = (await bench.lease()).ticket
    assert fresh.beacon == published.beacon != void.beacon
    assert (fresh.step, fresh.index) != (void.step, void.index)
