"""The validator's loop: honest batches, lying orchestrators, outages, no equivocation."""

import asyncio
import errno
import json
import os
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from worlds.client_chain import UNREACHABLE, WORKER_ID, FakeFetcher, make_account, make_batch
from worlds.client_world import (
    DOMAIN,
    OTHER_KEY,
    ROOT,
    RUN,
    VALIDATOR_KEY,
    VERSION,
    WORKER,
    make_entry,
    make_rollouts,
    make_submission,
    make_ticket,
    sign_submission,
)
from worlds.validator_bench import ACCEPTED, Bench, honest, run_until

from muster.chain import BatchStatus, WorkerStatus
from muster.client.validator import examiner as examiners, loop as loops
from muster.client.validator.batches import BATCH_PATIENCE_S
from muster.client.validator.decoding import FileDecoder
from muster.protocol.eip712 import address_of, digest, recover
from muster.protocol.encoding import file_hash, keccak
from muster.protocol.errors import (
    ApiError,
    ConfigError,
    EncodingError,
    EngineError,
    PolicyUnavailable,
)
from muster.protocol.ids import Hash32, PolicyVersion, RunId
from muster.protocol.messages import Outcomes, Reason, Verdict, unpack_records
from muster.protocol.rollouts import Bounds, decode_rollouts, encode_rollouts
from muster.shardcast.cache import drop_old
from muster.telemetry import KeyValueFormatter


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    opened = Bench(tmp_path)
    yield opened
    opened.close()


# Honest batches


async def test_honest_batch_is_accepted_and_its_outcomes_signed(bench: Bench) -> None:
    batch = bench.commit_honest(1, 0, 1)
    await run_until(bench, lambda: bool(bench.orchestrator.outcomes))
    [(batch_id, records, signature)] = bench.orchestrator.outcomes[:1]
    message = Outcomes(batch_id, batch.root, keccak(records))
    assert recover(digest(DOMAIN, message.struct_hash()), signature) == address_of(VALIDATOR_KEY)
    assert [(r.verdict, r.reason) for r in unpack_records(records)] == [ACCEPTED, ACCEPTED]
    assert [(r.worker_id, r.index) for r in unpack_records(records)] == [
        (WORKER_ID, 0),
        (WORKER_ID, 1),
    ]


async def test_policy_is_the_one_whose_root_is_on_chain(bench: Bench) -> None:
    await bench.judge(bench.commit_honest(1, 0, 1))
    assert bench.fetcher.fetched == [(VERSION, ROOT)]
    assert len(bench.engine.loaded) == 1


async def test_batches_with_outcomes_and_of_other_runs_are_left_alone(bench: Bench) -> None:
    for batch_id, change in ((1, {"status": BatchStatus.JUDGED}), (2, {"run_id": RUN + 1})):
        bench.commit_honest(batch_id, 0)
        bench.view.batches[batch_id] = replace(bench.view.batches[batch_id], **change)
    assert await bench.loop.duty.due() == ([], False)


async def test_batches_are_judged_in_the_order_of_the_chain(bench: Bench) -> None:
    for batch_id in (3, 1, 2):
        bench.commit_honest(batch_id, batch_id)
    await run_until(bench, lambda: len(bench.orchestrator.outcomes) == 3)
    assert [batch_id for batch_id, *_ in bench.orchestrator.outcomes] == [1, 2, 3]


# Dishonest workers: one mixed batch keeps everybody's outcome apart


async def test_mixed_batch_gets_every_submission_its_own_outcome(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    good, good_data = honest(make_ticket(index=0))
    ticket = make_ticket(index=1)
    forged_rows = [replace(row, task_reward=1.0) for row in make_rollouts(ticket)]
    forged = make_entry(ticket, make_submission(ticket, forged_rows))
    junk_ticket = make_ticket(index=2)
    junk = make_entry(
        junk_ticket, make_submission(junk_ticket, [], file_hash=file_hash(b"junk"), units=7)
    )
    stolen = make_entry(
        make_ticket(index=3),
        make_submission(make_ticket(index=3), make_rollouts(ticket)),
        OTHER_KEY,
    )
    batch = bench.commit(
        1, [good, forged, junk, stolen], good_data, encode_rollouts(forged_rows), b"junk"
    )
    assert await bench.judge(batch) == [
        ACCEPTED,
        (Verdict.FRAUD, Reason.WRONG_REWARD),
        (Verdict.REJECTED, Reason.SCHEMA),
        (Verdict.REJECTED, Reason.BAD_SIGNATURE),
    ]
    shown = KeyValueFormatter("validator")
    lines = "\n".join(shown.format(record) for record in caplog.records)
    assert "verdict=REJECTED reason=BAD_SIGNATURE" in lines
    assert not re.search(r"<\w+\.|\w+\(\w+=", lines)


async def test_slot_used_in_the_same_or_an_earlier_batch_is_rejected(bench: Bench) -> None:
    entry, data = honest(make_ticket())
    first = bench.commit(1, [entry, entry], data)
    reused = (Verdict.REJECTED, Reason.SLOT_REUSED)
    assert await bench.judge(first) == [ACCEPTED, reused]
    await bench.loop.validate(first)
    assert await bench.judge(bench.commit(2, [entry], data)) == [reused]


@pytest.mark.parametrize("is_judged", [False, True])
@pytest.mark.parametrize("rollouts", [2, 65_536])
async def test_forged_submission_uses_no_slot_of_a_worker(
    bench: Bench, is_judged: bool, rollouts: int
) -> None:
    """An orchestrator could else take work from its sender, and pay nobody."""
    entry, data = honest(make_ticket())
    claim = replace(entry.submission, file_hash=file_hash(b"forged"), rollouts=rollouts)
    forged = entry.model_copy(
        update={"submission": claim, "signature": sign_submission(claim, OTHER_KEY)}
    )
    unsigned = (Verdict.REJECTED, Reason.BAD_SIGNATURE)
    first = bench.commit(1, [forged], b"forged")
    if is_judged:
        await bench.loop.validate(first)
        first.records = bench.posted()
    assert await bench.judge(bench.commit(2, [forged, entry], data)) == [unsigned, ACCEPTED]


@pytest.mark.parametrize("is_shown_signed", [False, True])
async def test_outcomes_on_chain_tell_which_slots_are_used_whatever_this_validator_saw(
    bench: Bench, is_shown_signed: bool
) -> None:
    """An orchestrator may show validators different signatures."""
    entry, data = honest(make_ticket())
    signed = entry.submission
    unsigned = entry.model_copy(update={"signature": sign_submission(signed, OTHER_KEY)})
    first = bench.commit(1, [entry if is_shown_signed else unsigned], data)
    await bench.loop.validate(first)
    [own] = bench.posted()
    # The judgement of another batch, meanwhile, takes in what this validator found.
    await bench.judge(bench.commit_honest(2, 1))
    said = (Verdict.REJECTED, Reason.BAD_SIGNATURE) if is_shown_signed else ACCEPTED
    first.records = [replace(own, verdict=said[0], reason=said[1])]
    reused = (Verdict.REJECTED, Reason.SLOT_REUSED)
    expected = ACCEPTED if is_shown_signed else reused
    assert await bench.judge(bench.commit(3, [entry], data)) == [expected]


async def test_batch_that_was_called_withheld_counts_once_a_jury_has_judged_it(
    bench: Bench,
) -> None:
    entry, data = honest(make_ticket())
    first = bench.commit(1, [entry], data)
    await bench.loop.validate(first)
    first.status = BatchStatus.WITHHELD
    assert await bench.judge(bench.commit(2, [entry], data)) == [ACCEPTED]
    first.status, first.records = BatchStatus.JUDGED, bench.posted()
    reused = (Verdict.REJECTED, Reason.SLOT_REUSED)
    assert await bench.judge(bench.commit(3, [entry], data)) == [reused]


@pytest.mark.parametrize("is_judged", [False, True])
async def test_misdeclared_batch_uses_no_slots(bench: Bench, is_judged: bool) -> None:
    entry, data = honest(make_ticket())
    misdeclared = bench.commit(1, [entry], data)
    misdeclared.units -= 1
    if is_judged:
        await bench.loop.validate(misdeclared)
        [record] = misdeclared.records = bench.posted()
        assert record.units == 0
    # The same work, committed by the worker itself or by the orchestrator again.
    assert await bench.judge(bench.commit(2, [entry], data)) == [ACCEPTED]
    assert await bench.judge(misdeclared) == [(Verdict.REJECTED, Reason.BATCH_MISDECLARED)]
    # And no third time.
    reused = (Verdict.REJECTED, Reason.SLOT_REUSED)
    assert await bench.judge(bench.commit(3, [entry], data)) == [reused]


async def test_worker_that_claims_too_few_units_is_slashed_and_spoils_nobodys_work(
    bench: Bench,
) -> None:
    entry, data = honest(make_ticket())
    other, other_data = honest(make_ticket(index=1))
    claim = replace(other.submission, units=1)
    few = other.model_copy(update={"submission": claim, "signature": sign_submission(claim)})
    batch = bench.commit(1, [entry, few], data, other_data)
    await bench.loop.validate(batch)
    found = [(record.verdict, record.reason, record.units) for record in bench.posted()]
    assert found == [(*ACCEPTED, entry.submission.units), (Verdict.FRAUD, Reason.WRONG_UNITS, 1)]


async def test_slot_of_a_later_batch_is_no_reuse(bench: Bench) -> None:
    entry, data = honest(make_ticket())
    later = bench.commit(2, [entry], data)
    await bench.loop.validate(later)
    later.records = bench.posted()
    assert await bench.judge(bench.commit(1, [entry], data)) == [ACCEPTED]


async def test_worker_that_was_inactive_at_the_commitment_is_rejected(bench: Bench) -> None:
    bench.view.workers[WORKER] = make_account(status=WorkerStatus.BANNED)
    batch = bench.commit_honest(1, 0)
    assert await bench.judge(batch) == [(Verdict.REJECTED, Reason.BAD_SIGNATURE)]


async def test_unknown_worker_is_rejected_under_number_zero(bench: Bench) -> None:
    bench.view.workers.clear()
    batch = bench.commit_honest(1, 0)
    [record] = await bench.loop.judge(batch)
    assert (record.worker_id, record.reason) == (0, Reason.BAD_SIGNATURE)


async def test_tickets_are_of_the_orchestrator_that_committed_the_batch(bench: Bench) -> None:
    batch = bench.commit_honest(1, 0)
    # The key was rotated since: earlier work is judged as always.
    bench.view.runs[RUN].config.orchestrator = WORKER
    assert await bench.judge(batch) == [ACCEPTED]
    batch.orchestrator = WORKER
    assert await bench.judge(batch) == [(Verdict.REJECTED, Reason.UNKNOWN_TICKET)]


async def test_ticket_for_a_policy_that_is_not_on_chain_is_rejected(bench: Bench) -> None:
    entry, data = honest(make_ticket(policy_version=PolicyVersion(9)))
    batch = bench.commit(1, [entry], data)
    assert await bench.judge(batch) == [(Verdict.REJECTED, Reason.UNKNOWN_TICKET)]


@settings(max_examples=40)
@given(data=st.binary(max_size=300))
async def test_no_file_raises_out_of_the_loop(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    bench = Bench(tmp_path_factory.mktemp("fuzz"))
    ticket = make_ticket()
    entry = make_entry(ticket, make_submission(ticket, [], file_hash=file_hash(data), rollouts=4))
    batch = bench.commit(1, [entry], data)
    assert await bench.judge(batch) == [(Verdict.REJECTED, Reason.SCHEMA)]
    bench.close()


async def test_file_that_kills_its_decoder_is_rejected(bench: Bench) -> None:
    aborts = (Path(__file__).parent / "data" / "aborts-parquet.bin").read_bytes()
    ticket = make_ticket()
    entry = make_entry(ticket, make_submission(ticket, [], file_hash=file_hash(aborts)))
    batch = bench.commit(1, [entry], aborts)
    async with FileDecoder() as decoder:
        bench.change(decoder=decoder)
        assert await bench.judge(batch) == [(Verdict.REJECTED, Reason.SCHEMA)]


# Missing files are waited for


async def test_missing_file_counts_as_missing_only_after_the_patience(bench: Bench) -> None:
    entry, _ = honest(make_ticket())
    batch = bench.commit(1, [entry])
    with pytest.raises(ApiError):
        await bench.loop.judge(batch)
    bench.seconds = 59
    with pytest.raises(ApiError):
        await bench.loop.judge(batch)
    bench.seconds = 60
    assert await bench.judge(batch) == [(Verdict.REJECTED, Reason.FILE_UNAVAILABLE)]


async def test_patience_begins_when_the_orchestrator_says_that_it_lacks_a_file(
    bench: Bench,
) -> None:
    entry, _ = honest(make_ticket())
    batch = bench.commit(1, [entry])
    bench.orchestrator.fail("file", ApiError("busy", status=503, code="overloaded"))
    for bench.seconds in (0, 61, 120):
        with pytest.raises(ApiError):
            await bench.loop.judge(batch)
    bench.seconds = 121
    assert await bench.judge(batch) == [(Verdict.REJECTED, Reason.FILE_UNAVAILABLE)]


async def test_outage_never_makes_a_file_missing(bench: Bench) -> None:
    batch = bench.commit_honest(1, 0)
    bench.orchestrator.fail("file", *[UNREACHABLE] * 2)
    for bench.seconds in (0, 10_000):
        with pytest.raises(ApiError, match="no answer"):
            await bench.loop.judge(batch)
    assert await bench.judge(batch) == [ACCEPTED]


async def test_outages_are_survived(bench: Bench) -> None:
    bench.commit_honest(1, 0)
    for call in ("batch", "file", "post_outcomes"):
        bench.orchestrator.fail(call, UNREACHABLE, UNREACHABLE)
    bench.fetcher.failures = 2

    def is_judged() -> bool:
        bench.seconds += 1
        return bool(bench.orchestrator.outcomes)

    await run_until(bench, is_judged)
    assert [(r.verdict, r.reason) for r in bench.posted()] == [ACCEPTED]


async def test_interrupted_batch_goes_on_where_it_stopped(bench: Bench) -> None:
    batch = bench.commit_honest(1, 0, 1)
    file = bench.orchestrator.file

    async def failing_later(name: Any) -> bytes:
        if bench.orchestrator.calls["file"] == 1:
            bench.orchestrator.fail("file", UNREACHABLE)
        return await file(name)

    bench.orchestrator.file = failing_later  # type: ignore[method-assign]
    with pytest.raises(ApiError):
        await bench.loop.judge(batch)
    assert await bench.judge(batch) == [ACCEPTED, ACCEPTED]
    assert bench.orchestrator.calls["file"] == 3


async def test_contents_that_do_not_make_up_the_root_are_not_judged(bench: Bench) -> None:
    bench.commit_honest(1, 0)
    bench.view.batches[1] = make_batch(1, [make_submission(make_ticket(index=8), [])])
    with pytest.raises(ApiError, match="do not make up its root"):
        await bench.loop.judge(bench.view.batches[1])
    assert not bench.orchestrator.outcomes


async def test_orchestrator_that_reads_the_chain_later_is_waited_for_without_a_word(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    batch = bench.commit_honest(1, 0)
    unknown = ApiError(
        "batch 1 is not one of this orchestrator's", status=404, code="batch_unknown"
    )
    bench.orchestrator.fail("batch", unknown, unknown)
    await run_until(bench, lambda: bool(bench.orchestrator.outcomes))
    assert bench.journal.judged(batch.name) is not None
    assert "not available" not in caplog.text


async def test_batch_that_fails_for_long_stops_holding_up_the_others(bench: Bench) -> None:
    bench.commit_honest(1, 0)
    bench.commit_honest(2, 1)
    bench.orchestrator.batches.pop(1)
    bench.orchestrator.batches[1] = [honest(make_ticket(index=5))[0]]
    running = asyncio.ensure_future(run_until(bench, lambda: bool(bench.orchestrator.outcomes)))
    await asyncio.sleep(0.02)
    assert not bench.orchestrator.outcomes
    bench.seconds = BATCH_PATIENCE_S
    await running
    assert bench.orchestrator.outcomes[0][0] == 2


def hide(bench: Bench, *batch_ids: int) -> None:
    """Show something else in place of these batches, each of which is committed."""
    for batch_id in batch_ids:
        bench.commit_honest(batch_id, batch_id)
        bench.orchestrator.batches[batch_id] = [honest(make_ticket(index=20))[0]]


async def test_hidden_batches_hold_up_the_others_together_and_not_one_after_the_other(
    bench: Bench,
) -> None:
    hide(bench, 1, 2, 3, 4, 5)
    last = bench.commit_honest(6, 6)
    with pytest.raises(ApiError, match="batch 1 do not make up its root"):
        await bench.judge(last)
    bench.seconds = BATCH_PATIENCE_S - 1
    with pytest.raises(ApiError, match="do not make up its root"):
        await bench.judge(last)
    bench.seconds = BATCH_PATIENCE_S
    assert await bench.judge(last) == [ACCEPTED]
    asked = bench.orchestrator.calls["batch"]
    assert await bench.judge(last) == [ACCEPTED]
    assert bench.orchestrator.calls["batch"] == asked + 1  # nobody asks for hidden ones again


async def test_hidden_batch_fills_its_slots_once_its_outcomes_are_on_chain(bench: Bench) -> None:
    entry, data = honest(make_ticket())
    hidden = bench.commit(1, [entry], data)
    shown = bench.orchestrator.batches.pop(1)
    bench.orchestrator.batches[1] = [honest(make_ticket(index=20))[0]]
    last = bench.commit(2, [entry], data)
    with pytest.raises(ApiError):
        await bench.judge(last)
    bench.seconds = BATCH_PATIENCE_S
    assert await bench.judge(last) == [ACCEPTED]
    bench.orchestrator.batches[1] = shown
    await bench.loop.validate(hidden)
    hidden.records, hidden.status = bench.posted(), BatchStatus.JUDGED
    assert await bench.judge(last) == [(Verdict.REJECTED, Reason.SLOT_REUSED)]


@pytest.mark.parametrize("end", ["withheld", "void", "past due"])
async def test_hidden_batch_that_can_no_longer_be_judged_holds_up_nothing(
    bench: Bench, end: str
) -> None:
    hide(bench, 1, 2)
    last = bench.commit_honest(6, 6)
    for batch_id in (1, 2):
        batch = bench.view.batches[batch_id]
        if end == "withheld":
            batch.status = BatchStatus.WITHHELD
        elif end == "void":
            batch.voided_tx = "0x" + "33" * 32
        else:
            batch.committed_at = bench.chain_time - bench.loop.context.windows.outcome_deadline_s
    assert await bench.judge(last) == [ACCEPTED]
    assert bench.orchestrator.calls["batch"] == 1


async def test_hidden_batch_that_is_due_in_a_second_holds_up_the_others(bench: Bench) -> None:
    hide(bench, 1)
    last = bench.commit_honest(6, 6)
    first = bench.view.batches[1]
    first.committed_at = bench.chain_time - bench.loop.context.windows.outcome_deadline_s + 1
    with pytest.raises(ApiError, match="do not make up its root"):
        await bench.judge(last)


async def test_outcomes_that_get_lost_are_handed_over_again(bench: Bench) -> None:
    batch = bench.commit_honest(1, 0)
    await bench.loop.validate(batch)
    await bench.loop.validate(batch)
    assert len(bench.orchestrator.outcomes) == 1
    bench.seconds = loops.REPOST_S
    await bench.loop.validate(batch)
    first, second = bench.orchestrator.outcomes
    assert first == second


async def test_refused_outcomes_hold_up_nothing_and_are_offered_again(bench: Bench) -> None:
    bench.commit_honest(1, 0)
    bench.commit_honest(2, 1)
    bench.orchestrator.fail("post_outcomes", ApiError("no", status=422, code="bad_records"))
    await run_until(bench, lambda: bool(bench.orchestrator.outcomes))
    assert bench.orchestrator.outcomes[0][0] == 2
    bench.seconds = loops.REPOST_S
    await bench.loop.validate(bench.view.batches[1])
    assert bench.orchestrator.outcomes[-1][0] == 1


async def test_policy_is_loaded_again_after_another_failed_to_load(bench: Bench) -> None:
    batch = bench.commit_honest(1, 0)
    await bench.loop.judge(batch)
    load = bench.engine.load_policy

    def failing(_folder: Path, _version: PolicyVersion) -> None:
        bench.engine.policy_version = None
        raise EngineError("no weights")

    bench.engine.load_policy = failing  # type: ignore[method-assign]
    with pytest.raises(EngineError):
        async with bench.loop.examiner.holding((PolicyVersion(4), keccak(b"broken"))):
            pass
    bench.engine.load_policy = load  # type: ignore[method-assign]
    assert await bench.judge(batch) == [ACCEPTED]


# A policy that arrives slowly


class Dripping(FakeFetcher):
    """Delivers the first policy at once, and others when a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = asyncio.Event()
        self.asked: list[int] = []

    async def fetch(self, run_id: RunId, version: PolicyVersion, root: Hash32) -> Path:
        if version not in self.asked:
            self.asked.append(version)
        if version != VERSION:
            await self.ends.wait()
        return await super().fetch(run_id, version, root)


@pytest.fixture
def dripping(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Dripping:
    monkeypatch.setattr(examiners, "FETCH_WAIT_S", 0.01)
    fetcher = Dripping()
    bench.change(fetcher=fetcher)
    return fetcher


def commit_under(bench: Bench, batch_id: int, version: int) -> Any:
    """Commit a batch of work made under another version, which is on chain."""
    checkpoint = bench.view.runs[RUN].checkpoints[VERSION]
    published = SimpleNamespace(**{**vars(checkpoint), "version": version})
    bench.view.runs[RUN].checkpoints[version] = published
    entry, data = honest(make_ticket(policy_version=PolicyVersion(version), index=batch_id))
    return bench.commit(batch_id, [entry], data)


async def test_slow_policy_delays_no_batch_of_another_version(
    bench: Bench, dripping: Dripping
) -> None:
    slow = commit_under(bench, 1, VERSION + 1)
    bench.commit_honest(2, 2)
    judged = bench.orchestrator.outcomes

    def is_over() -> bool:
        if judged:
            dripping.ends.set()
        return bench.journal.judged(slow.name) is not None

    async with asyncio.timeout(20):
        await run_until(bench, is_over)
    assert judged[0][0] == 2


async def test_fetch_that_takes_long_makes_way_for_other_versions(
    bench: Bench, dripping: Dripping
) -> None:
    slow = [VERSION + 1 + i for i in range(examiners.MOST_FETCHES)]
    batches = [commit_under(bench, i, version) for i, version in enumerate(slow, 1)]
    good = bench.commit_honest(9, 9)
    for batch in batches:
        with pytest.raises(PolicyUnavailable, match="still being fetched"):
            await bench.judge(batch)
    bench.seconds = examiners.FETCH_TURN_S - 1
    with pytest.raises(PolicyUnavailable, match=f"version {VERSION} waits for other fetches"):
        await bench.judge(good)
    bench.seconds = examiners.FETCH_TURN_S
    assert await bench.judge(good) == [ACCEPTED]
    assert dripping.asked == [*slow, VERSION]


async def test_version_that_nobody_delivers_is_requested_once_for_all_its_batches(
    bench: Bench,
) -> None:
    batches = [bench.commit_honest(number, number) for number in (1, 2)]
    bench.fetcher.failures = 1
    for batch in batches:
        with pytest.raises(PolicyUnavailable, match="no relay delivers it"):
            await bench.judge(batch)
    bench.seconds = examiners.FETCH_REST_S
    assert await bench.judge(batches[0]) == [ACCEPTED]


async def test_policy_that_drips_is_given_up_with_the_deadline_of_outcomes(
    bench: Bench, dripping: Dripping
) -> None:
    bench.change(windows=replace(bench.loop.context.windows, outcome_deadline_s=0))
    batch = commit_under(bench, 1, VERSION + 1)
    with pytest.raises(PolicyUnavailable, match="did not arrive in 0 s"):
        await bench.judge(batch)
    assert dripping.asked == [VERSION + 1]


class Disk(Dripping):
    """Keeps versions as the fetcher does, on a disk with five newer ones."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        for version in range(100, 105):
            self.path(version).mkdir(parents=True)

    def path(self, version: int) -> Path:
        return self.folder / f"v{version}"

    async def fetch(self, run_id: RunId, version: PolicyVersion, root: Hash32) -> Path:
        await super().fetch(run_id, version, root)
        self.path(version).mkdir(exist_ok=True)
        drop_old(self.path(version), 5, self.named(run_id))
        return self.path(version)

    async def deliver(self, bench: Bench, *versions: int) -> None:
        """Let the validator begin to fetch versions, and deliver them all together."""
        self.ends.clear()
        for version in versions:
            with pytest.raises(PolicyUnavailable, match="still being fetched"):
                async with bench.loop.examiner.holding(policy(version)):
                    pass
        self.ends.set()
        while not all(policy(version) in self.fetched for version in versions):
            await asyncio.sleep(0)


def policy(version: int) -> tuple[PolicyVersion, Hash32]:
    return PolicyVersion(version), keccak(b"%d" % version)


@pytest.fixture
def disk(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    monkeypatch.setattr(examiners, "FETCH_WAIT_S", 0.01)
    disk = Disk(tmp_path / "policies")
    bench.change(fetcher=disk)
    return disk


async def test_old_versions_that_arrive_together_stay_until_each_is_used(
    bench: Bench, disk: Disk
) -> None:
    versions = (11, 12, 13)
    await disk.deliver(bench, *versions)
    assert all(disk.path(version).is_dir() for version in versions)
    for version in versions:
        async with bench.loop.examiner.holding(policy(version)):
            assert disk.path(version).is_dir()


async def test_version_in_use_stays_while_others_arrive_and_no_longer(
    bench: Bench, disk: Disk
) -> None:
    await disk.deliver(bench, 11)
    async with bench.loop.examiner.holding(policy(11)):
        await disk.deliver(bench, 12)
        assert disk.path(11).is_dir()
    async with bench.loop.examiner.holding(policy(12)):
        await disk.deliver(bench, 13)
    assert not disk.path(11).exists()
    assert disk.path(12).is_dir()


async def test_fetched_version_that_is_gone_is_fetched_again(bench: Bench, disk: Disk) -> None:
    await disk.deliver(bench, 11)
    disk.path(11).rmdir()
    async with bench.loop.examiner.holding(policy(11)):
        assert disk.path(11).is_dir()


# Never two outcomes for one batch


async def test_restarted_validator_repeats_what_it_signed_even_if_it_would_judge_otherwise(
    tmp_path: Path,
) -> None:
    first = Bench(tmp_path)
    batch = first.commit_honest(1, 0)
    await first.loop.validate(batch)
    first.close()
    second = Bench(tmp_path, first.orchestrator)
    second.view.workers[WORKER] = make_account(status=WorkerStatus.BANNED)
    second.view.batches[1] = batch
    await second.loop.validate(batch)
    one, two = first.orchestrator.outcomes
    assert one == two
    second.close()


async def test_batch_that_takes_anothers_number_is_judged_and_the_other_keeps_its_outcomes(
    bench: Bench,
) -> None:
    first = bench.commit_honest(1, 0)
    await bench.loop.validate(first)
    second = bench.commit_honest(1, 1)
    await bench.loop.validate(second)
    one, two = (bench.journal.judged(batch.name) for batch in (first, second))
    assert one is not None
    assert two is not None
    assert [each.records[0].index for each in (one, two)] == [0, 1]
    # The chain goes back to the first batch: only its signed outcome is handed over again.
    bench.view.batches[1] = first
    bench.view.workers[WORKER] = make_account(status=WorkerStatus.BANNED)
    bench.seconds = 1000
    await bench.loop.validate(first)
    assert bench.journal.judged(first.name) == one
    assert bench.orchestrator.outcomes[-1] == bench.orchestrator.outcomes[0]
    assert len(bench.orchestrator.outcomes) == 3


async def test_outcomes_and_evidence_are_on_disk_before_the_signature_leaves(bench: Bench) -> None:
    batch = bench.commit_honest(1, 0)
    bench.orchestrator.fail("post_outcomes", UNREACHABLE)
    with pytest.raises(ApiError):
        await bench.loop.validate(batch)
    assert bench.journal.judged(batch.name) is not None
    [document] = bench.evidence.glob("*/*.json")
    assert json.loads(document.read_text())["outcome"]["verdict"] == "ACCEPTED"


async def test_a_full_disk_signs_nothing_and_the_validator_goes_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.commit_honest(1, 0)
    fsync, refusals = os.fsync, 3

    def full(descriptor: int) -> None:
        nonlocal refusals
        if refusals:
            refusals -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)

    def is_done() -> bool:
        assert not (refusals and bench.orchestrator.outcomes)
        return bool(bench.orchestrator.outcomes)

    await run_until(bench, is_done)
    assert refusals == 0
    assert [(r.verdict, r.reason) for r in bench.posted()] == [ACCEPTED]


async def test_validator_without_a_seat_stops(bench: Bench) -> None:
    bench.view.runs[RUN].validators = []
    with pytest.raises(ConfigError, match="not a validator"):
        await run_until(bench, lambda: False)


async def test_file_with_more_rows_than_the_recipe_allows_is_not_decoded(bench: Bench) -> None:
    ticket = make_ticket()
    rows = [*make_rollouts(ticket), *make_rollouts(ticket)]
    entry = make_entry(ticket, make_submission(ticket, rows))
    batch = bench.commit(1, [entry], encode_rollouts(rows))
    assert await bench.judge(batch) == [(Verdict.REJECTED, Reason.SCHEMA)]
    with pytest.raises(EncodingError):
        decode_rollouts(encode_rollouts(rows), Bounds(rows=4))


def test_context_never_shows_its_key(bench: Bench) -> None:
    assert repr(VALIDATOR_KEY) not in repr(bench.loop.context)
