"""Proofs of checking at the orchestrator: commitments first, fingerprints after, reports signed."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from orchestrator_bench import Bench, refused
from orchestrator_fakes import RUN

from muster.api.answers import Watched
from muster.orchestrator.http.quotas import Readings
from muster.orchestrator.outcomes import checking
from muster.orchestrator.outcomes.checking import KEPT_BATCHES, PROOF_DUE_S, SUMMARY_AGE_S
from muster.protocol.checking import Checking, CheckReport, fingerprints_hash, pack_fingerprints
from muster.protocol.eip712 import address_of, digest, sign
from muster.protocol.encoding import keccak
from muster.protocol.errors import ApiError
from muster.protocol.ids import Hash32

FINGERPRINTS = [b"\1" * 32]
OTHERS = [b"\2" * 32]


def signed(bench: Bench, number: int, message: Any) -> bytes:
    key = bench.network.keys.validators[number]
    return sign(digest(bench.services.domain, message.struct_hash()), key)


async def commitment(bench: Bench, fingerprints: list[bytes]) -> tuple[Checking, bytes]:
    """A batch of one on chain, and a validator's commitment with honest records of it."""
    if 1 not in bench.network.view.batches:
        submission = await bench.upload()
        await bench.commit()
        bench.__dict__["records"] = bench.network.judge([submission])
        bench.__dict__["submission"] = submission
    records: bytes = bench.__dict__["records"]
    root = bench.network.view.batches[1].root
    return Checking(1, root, keccak(records), fingerprints_hash(fingerprints)), records


async def commit(
    bench: Bench, number: int = 0, fingerprints: list[bytes] = FINGERPRINTS, signer: int = -1
) -> None:
    message, _ = await commitment(bench, fingerprints)
    async with bench.validator(number) as api:
        await api.post_checking(message, signed(bench, number if signer < 0 else signer, message))


async def show(bench: Bench, packed: bytes, number: int = 0) -> None:
    async with bench.validator(number) as api:
        await api.post_fingerprints(1, packed)


async def judged(bench: Bench) -> None:
    await bench.judge(1, [bench.__dict__["submission"]], validators=(0, 1))
    await bench.record()


async def code_of(call: Any) -> str:
    return (await refused(call))[1]


async def test_fingerprints_come_to_light_after_the_outcomes(bench: Bench) -> None:
    await commit(bench)
    async with bench.validator(1) as api:
        assert (await api.checking(1)).commitments == []
        await judged(bench)
        [posted] = (await api.checking(1)).commitments
        await show(bench, pack_fingerprints(FINGERPRINTS))
        await show(bench, pack_fingerprints(FINGERPRINTS))
        [after] = (await api.checking(1)).commitments
    assert posted.fingerprints is None
    assert after.fingerprints == pack_fingerprints(FINGERPRINTS)
    assert after.validator == address_of(bench.network.keys.validators[0])


async def test_report_about_what_nobody_may_know_yet_is_refused(bench: Bench) -> None:
    await commit(bench)
    assert await code_of(report(bench)) == "checking_early"


async def test_commitment_after_the_outcomes_is_too_late(bench: Bench) -> None:
    await commitment(bench, FINGERPRINTS)
    await judged(bench)
    assert await code_of(commit(bench)) == "checking_late"


async def test_fingerprints_before_the_outcomes_are_too_early(bench: Bench) -> None:
    await commit(bench)
    assert await code_of(show(bench, pack_fingerprints(FINGERPRINTS))) == "checking_early"


async def test_other_fingerprints_than_committed_are_refused(bench: Bench) -> None:
    await commit(bench)
    await judged(bench)
    for packed in (pack_fingerprints(OTHERS), pack_fingerprints([]), b"\xff" * 9):
        assert await code_of(show(bench, packed)) == "bad_fingerprints"
    assert await code_of(show(bench, pack_fingerprints(OTHERS), 1)) == "bad_fingerprints"


async def test_one_batch_has_one_commitment_of_a_validator(bench: Bench) -> None:
    await commit(bench)
    await commit(bench)
    assert await code_of(commit(bench, fingerprints=OTHERS)) == "checking_conflict"


async def test_commitment_must_be_signed_by_its_sender(bench: Bench) -> None:
    assert await code_of(commit(bench, 0, signer=1)) == "bad_checking_signature"


async def report(bench: Bench, number: int = 1, **changes: Any) -> None:
    said = CheckReport(
        1,
        bench.network.view.batches[1].root,
        address_of(bench.network.keys.validators[0]),
        fingerprints_hash(FINGERPRINTS),
        compared=1,
        failed=1,
    )
    said = replace(said, **changes)
    async with bench.validator(number) as api:
        await api.post_check_report(said, signed(bench, number, said))


async def test_reports_are_summed_up_by_validator(bench: Bench) -> None:
    await commit(bench)
    await judged(bench)
    await show(bench, pack_fingerprints(FINGERPRINTS))
    await report(bench)
    await report(bench, failed=0)
    async with bench.validator(1) as api:
        summary = {each.validator: each for each in (await api.watched()).validators}
        [kept] = (await api.checking(1)).reports
    found = summary[address_of(bench.network.keys.validators[0])]
    assert (found.signed, found.proven) == (1, 1)
    assert (found.compared, found.failed, found.is_suspect) == (1, 1, True)
    assert kept.failed == 1


async def test_summary_is_made_once_a_second_however_many_ask(bench: Bench) -> None:
    await commit(bench)
    await judged(bench)
    now_s, checking = 0.0, bench.services.checking
    checking.monotonic = lambda: now_s
    assert [each.proven for each in await checking.summary()] == [0, 0, 0]
    await show(bench, pack_fingerprints(FINGERPRINTS))
    now_s = SUMMARY_AGE_S
    assert [each.proven for each in await checking.summary()] == [0, 0, 0]
    now_s += 0.01
    assert [each.proven for each in await checking.summary()] == [1, 0, 0]


@pytest.mark.parametrize("path", ["/v1/batches/1", "/v1/batches/1/checking"])
async def test_an_address_waits_for_few_batches_at_once(bench: Bench, path: str) -> None:
    await commit(bench)
    readings = Readings(2, most_per_host=1)
    bench.services.quotas = replace(bench.services.quotas, batch_reads=readings)
    async with bench.http() as http:
        async with readings.turn("192.0.2.1"):
            assert (await http.get(path)).status_code == 200
        async with readings.turn("127.0.0.1"):
            full = await http.get(path)
        assert (await http.get(path)).status_code == 200
    assert (full.status_code, full.headers["retry-after"]) == (503, "1")
    assert full.json()["error"]["code"] == "overloaded"


async def test_batches_are_read_a_few_at_once_and_in_order() -> None:
    readings, began = Readings(1, most_per_host=2), list[str]()

    async def read(host: str) -> None:
        async with readings.turn(host):
            began.append(host)

    async with asyncio.TaskGroup() as tasks, readings.turn("first"):
        for host in ("a", "b", "a"):
            tasks.create_task(read(host))
        await asyncio.sleep(0)
        assert began == []
        with pytest.raises(ApiError, match="too many batches"):
            await read("a")
    assert began == ["a", "b", "a"]


@pytest.mark.parametrize(("passed_s", "counted"), [(PROOF_DUE_S, 0), (PROOF_DUE_S + 1, 1)])
async def test_proof_is_not_missed_before_it_is_due(
    bench: Bench, passed_s: int, counted: int
) -> None:
    await commit(bench)
    await judged(bench)
    posted_at = bench.network.view.batches[1].posted_at
    assert posted_at is not None
    bench.set_chain_time(posted_at + passed_s)
    async with bench.validator(1) as api:
        found = (await api.watched()).validators[0]
    assert (found.signed, found.proven, found.is_suspect) == (counted, 0, counted > 0)


async def test_one_reporter_cannot_outvote_two(bench: Bench) -> None:
    await commit(bench)
    await judged(bench)
    await show(bench, pack_fingerprints(FINGERPRINTS))
    await report(bench, 1)
    await report(bench, 2, failed=0)
    async with bench.validator(1) as api:
        summary = {each.validator: each for each in (await api.watched()).validators}
    assert summary[address_of(bench.network.keys.validators[0])].failed == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"failed": 2},
        {"compared": 2},
        {"batch_root": Hash32(keccak(b"other root"))},
        {"fingerprints_hash": Hash32(keccak(b"other fingerprints"))},
    ],
)
async def test_report_that_does_not_fit_is_refused(bench: Bench, changes: dict[str, Any]) -> None:
    await commit(bench)
    await judged(bench)
    await show(bench, pack_fingerprints(FINGERPRINTS))
    assert await code_of(report(bench, **changes)) == "bad_report"


async def test_batches_of_others_are_unknown(bench: Bench) -> None:
    async with bench.validator() as api:
        assert await code_of(api.checking(99)) == "batch_unknown"
        assert await code_of(api.post_fingerprints(99, b"")) == "batch_unknown"


@pytest.mark.parametrize(
    ("changes", "is_suspect"),
    [({}, False), ({"failed": 1}, True), ({"proven": 4}, True), ({"proven": 5}, False)],
)
def test_suspect_is_who_failed_or_shows_little(
    changes: dict[str, int], *, is_suspect: bool
) -> None:
    who = address_of(keccak(b"validator"))
    found = Watched(validator=who, signed=10, proven=10, compared=10, failed=0)
    assert found.model_copy(update=changes).is_suspect is is_suspect


async def test_batch_that_takes_anothers_number_begins_without_proofs(bench: Bench) -> None:
    await commit(bench)
    await judged(bench)
    await show(bench, pack_fingerprints(FINGERPRINTS))
    await report(bench)
    chain = bench.network.chain
    chain.rewind_next = bench.network.view.batches[1].block_number - 1
    chain.ledger.batches = 0
    chain.ledger.commit(RUN, keccak(b"another batch"), 1, 32)
    await bench.follow()
    async with bench.validator(1) as api:
        assert (await api.checking(1)).commitments == (await api.checking(1)).reports == []
        assert {(v.proven, v.compared) for v in (await api.watched()).validators} == {(0, 0)}
    await commit(bench, fingerprints=OTHERS)
    chain.ledger.posted.clear()
    await chain.ledger.post_outcomes(
        bench.network.view.batches[1].header(), bench.__dict__["records"], b""
    )
    await bench.follow()
    async with bench.validator(1) as api:
        found = await api.checking(1)
    [held] = found.commitments
    assert held.fingerprints_hash == fingerprints_hash(OTHERS)
    assert await code_of(report(bench)) == "bad_report"
    assert (held.fingerprints, found.reports) == (None, [])


async def commit_next(bench: Bench) -> int:
    """One more batch of the run, for which a validator commits; returns its id."""
    await bench.upload(1, b"file %d" % len(bench.network.view.batches))
    await bench.commit()
    batch_id = max(bench.network.view.batches)
    root = bench.network.view.batches[batch_id].root
    message = Checking(batch_id, root, keccak(b"records"), fingerprints_hash(OTHERS))
    async with bench.validator() as api:
        await api.post_checking(message, signed(bench, 0, message))
    return batch_id


async def test_batches_of_other_runs_take_no_place_of_this_runs_proofs(bench: Bench) -> None:
    await commit(bench)
    await judged(bench)
    bench.network.chain.ledger.batches += KEPT_BATCHES + 100
    assert await commit_next(bench) > KEPT_BATCHES + 100
    await show(bench, pack_fingerprints(FINGERPRINTS))


async def test_proofs_of_old_batches_are_forgotten_once_they_have_outcomes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking, "KEPT_BATCHES", 1)
    await commit(bench)
    await commit_next(bench)
    await commit_next(bench)
    await judged(bench)
    await show(bench, pack_fingerprints(FINGERPRINTS))
    await commit_next(bench)
    assert await code_of(show(bench, pack_fingerprints(FINGERPRINTS))) == "bad_fingerprints"
