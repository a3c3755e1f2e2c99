"""Which batches a validator judges: those it is called for, and re-audits."""

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from worlds.client_chain import UNREACHABLE, WORKER_ID
from worlds.client_world import NOW, RUN, VALIDATOR_KEY, make_ticket
from worlds.validator_bench import ACCEPTED, Bench, honest, run_until

from muster.chain import BatchStatus, StreamItem
from muster.chain.doubles import WITHHELD
from muster.client.validator import calls as duties
from muster.protocol.eip712 import address_of
from muster.protocol.encoding import keccak
from muster.protocol.ids import Address, to_address
from muster.protocol.messages import OutcomeRecord, Reason, Verdict
from muster.protocol.schedule import batch_seed, draw_order, is_reaudited

ME = address_of(VALIDATOR_KEY)
OTHERS = [to_address(keccak(b"colleague %d" % i)[12:]) for i in range(8)]
COMMITTED_AT = NOW + 30
TIMEOUT_S = 100
"""An eighth of the bench's outcome deadline."""


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    opened = Bench(tmp_path)
    run = opened.view.runs[RUN]
    run.validators = [ME, *OTHERS]
    run.seats = {validator: 1 << seat for seat, validator in enumerate(run.validators)}
    run.terms = [SimpleNamespace(quorum=2)]
    yield opened
    opened.close()


def place_of(batch: Any) -> int:
    seed = batch_seed(batch.beacon, RUN, batch.batch_id, batch.root)
    return draw_order(seed, [ME, *OTHERS]).index(ME)


def put_at(bench: Bench, batch_id: int, place: int) -> Any:
    """Commit an honest batch for which the validator is drawn at a place."""
    batch = bench.commit_honest(batch_id, batch_id)
    batch.seated = (ME, *OTHERS)
    for number in range(10_000):
        batch.beacon = keccak(b"block %d" % number)
        if place_of(batch) == place:
            return batch
    raise AssertionError("no block draws it there")


async def due(bench: Bench) -> list[int]:
    return [batch.batch_id for batch in (await bench.loop.duty.due())[0]]


async def test_first_of_the_order_judge_and_the_others_do_not(bench: Bench) -> None:
    for place in range(9):
        put_at(bench, place + 1, place)
    assert await due(bench) == [1, 2]


async def test_batch_keeps_the_quorum_of_the_terms_that_it_was_committed_under(
    bench: Bench,
) -> None:
    run = bench.view.runs[RUN]
    run.terms.append(SimpleNamespace(quorum=1))
    run.config.terms.quorum = 1
    for batch_id, terms in ((1, 1), (2, 2)):
        put_at(bench, batch_id, 1).terms = terms
    assert await due(bench) == [1]


async def test_called_batches_are_judged_and_handed_over(bench: Bench) -> None:
    put_at(bench, 1, 5)
    put_at(bench, 2, 1)
    await run_until(bench, lambda: bool(bench.orchestrator.outcomes))
    assert [batch_id for batch_id, *_ in bench.orchestrator.outcomes] == [2]
    assert bench.orchestrator.calls["file"] == 1


async def test_age_alone_calls_whoever_the_orchestrator_leaves_out(bench: Bench) -> None:
    put_at(bench, 1, 4)
    put_at(bench, 2, 8)
    asked = []
    for timeouts in (0, 2, 4, 8):
        bench.chain_time = COMMITTED_AT + timeouts * TIMEOUT_S
        asked.append(await due(bench))
    assert asked == [[], [1], [1, 2], []]


async def test_orchestrator_calls_more_but_never_fewer(bench: Bench) -> None:
    put_at(bench, 1, 0)
    put_at(bench, 2, 3)
    bench.orchestrator.calls_told = {1: 0, 2: 3}
    assert await due(bench) == [1]
    bench.seconds += duties.ASK_S
    bench.orchestrator.calls_told = {1: 0, 2: 4}
    assert await due(bench) == [1, 2]
    bench.seconds += duties.ASK_S
    bench.orchestrator.calls_told = {}
    assert await due(bench) == [1, 2]


async def test_orchestrator_is_asked_now_and_then_and_may_be_away(bench: Bench) -> None:
    put_at(bench, 1, 3)
    bench.orchestrator.fail("called", UNREACHABLE)
    for _ in range(3):
        assert await due(bench) == []
    assert bench.orchestrator.calls["called"] == 1
    bench.seconds += duties.ASK_S
    bench.orchestrator.calls_told = {1: 9}
    assert await due(bench) == [1]


async def test_who_checks_everything_begins_with_its_calls_and_asks_nobody(bench: Bench) -> None:
    put_at(bench, 1, 7)
    put_at(bench, 2, 0)
    bench.change(checks_everything=True)
    assert await due(bench) == [2, 1]
    assert bench.orchestrator.calls["called"] == 0


async def test_reorganised_batch_is_drawn_anew(bench: Bench) -> None:
    put_at(bench, 1, 0)
    assert await due(bench) == [1]
    moved = put_at(bench, 1, 8)
    moved.root = keccak(b"another batch")
    assert await due(bench) == []


async def test_what_was_signed_is_handed_over_wherever_the_batch_is_drawn(bench: Bench) -> None:
    batch = put_at(bench, 1, 0)
    await bench.loop.validate(batch)
    for number in range(100):
        batch.beacon = keccak(b"other %d" % number)
    assert await due(bench) == [1]


async def test_slot_of_a_batch_that_others_judge_counts_as_used(bench: Bench) -> None:
    entry, data = honest(make_ticket())
    for batch_id in (1, 2):
        bench.commit(batch_id, [entry], data)
    assert await bench.judge(bench.view.batches[2]) == [(Verdict.REJECTED, Reason.SLOT_REUSED)]
    assert await bench.judge(bench.view.batches[1]) == [ACCEPTED]


async def test_batch_that_is_not_shown_holds_up_the_next_only_for_a_while(bench: Bench) -> None:
    put_at(bench, 1, 5)
    later = put_at(bench, 2, 0)
    contents = bench.orchestrator.batches.pop(1)
    bench.orchestrator.batches[1] = [honest(make_ticket(index=5))[0], *contents]
    with pytest.raises(Exception, match="do not make up its root"):
        await bench.loop.judge(later)
    bench.seconds += 60
    assert await bench.judge(later) == [ACCEPTED]


# Once more


def post(bench: Bench, batch: Any, *, is_drawn: bool = True, signers: tuple[Address, ...]) -> None:
    """Post a batch's outcomes as Accepted, in a block that draws it for a re-audit or not."""
    ticket = make_ticket(index=batch.batch_id)
    submission = bench.orchestrator.batches[batch.batch_id][0].submission
    batch.records = [
        OutcomeRecord(
            WORKER_ID, ticket.step, ticket.index, submission.policy_version,
            submission.file_hash, submission.rollouts, submission.units,
            Verdict.ACCEPTED, Reason.NONE,
        )
    ]  # fmt: skip
    batch.status = BatchStatus.JUDGED
    stream = bench.view.runs[RUN].stream
    stream.append(StreamItem(len(stream), batch.batch_id, 0, batch.records[0]))
    seats = bench.view.runs[RUN].seats
    batch.signers = sum(seats[signer] for signer in signers)
    fresh = [v for v in (ME, *OTHERS) if v not in signers]
    for number in range(100_000):
        batch.posted_beacon = keccak(b"posted %d" % number)
        seed = batch_seed(batch.posted_beacon, RUN, batch.batch_id, batch.root)
        if is_reaudited(seed) is is_drawn and draw_order(seed, fresh)[:1] == (ME,):
            return
    raise AssertionError("no block draws it")


def spoil(bench: Bench) -> None:
    """Make the file of batch 1 one that an honest validator rejects."""
    entry, _ = honest(make_ticket(index=1))
    bench.orchestrator.files[entry.submission.file_hash] = b"junk"


def differences(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """Return the verdicts, posted and found, of the differences in the log."""
    found: list[Any] = [r for r in caplog.records if "differs from this validator's" in r.message]
    return [(record.posted, record.found) for record in found]


async def again(bench: Bench) -> list[int]:
    return [batch.batch_id for batch in await bench.loop.duty.reaudits()]


async def test_accepted_batch_is_checked_once_more_when_drawn(bench: Bench) -> None:
    batch = put_at(bench, 1, 5)
    post(bench, batch, signers=(OTHERS[0], OTHERS[1]))
    bench.chain_time = batch.posted_at
    assert await again(bench) == [1]
    await run_until(bench, lambda: bool(bench.orchestrator.outcomes))
    assert await again(bench) == []


async def test_batch_is_not_checked_again_when_not_drawn_or_when_it_is_late(bench: Bench) -> None:
    batch = put_at(bench, 1, 5)
    post(bench, batch, signers=(OTHERS[0],), is_drawn=False)
    bench.chain_time = batch.posted_at
    assert await again(bench) == []
    post(bench, batch, signers=(OTHERS[0],))
    bench.chain_time = batch.posted_at + 400
    assert await again(bench) == []


async def test_outcomes_are_drawn_once_and_again_after_a_reorganisation(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []

    def counted(seed: Any) -> bool:
        drawn.append(seed)
        return is_reaudited(seed)

    monkeypatch.setattr(duties, "is_reaudited", counted)
    for batch_id in (1, 2, 3):
        post(bench, put_at(bench, batch_id, 5), signers=(OTHERS[0],), is_drawn=batch_id == 2)
    bench.chain_time = bench.view.batches[1].posted_at
    assert [await again(bench), await again(bench), len(drawn)] == [[2], [2], 3]
    post(bench, put_at(bench, 4, 5), signers=(OTHERS[0],))
    assert [await again(bench), len(drawn)] == [[2, 4], 4]
    run = bench.view.runs[RUN]
    run.stream = run.stream[:3]  # batch 4 is taken back
    assert [await again(bench), len(drawn)] == [[2], 7]


async def test_old_outcomes_are_not_drawn(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for batch_id in (1, 2, 3):
        post(bench, put_at(bench, batch_id, 5), signers=(OTHERS[0],))
    first, second, third = (bench.view.batches[i] for i in (1, 2, 3))
    bench.chain_time = third.posted_at = first.posted_at + 400
    second.posted_at = first.posted_at + 1
    drawn: list[Any] = []
    monkeypatch.setattr(duties, "is_reaudited", lambda seed: bool(drawn.append(seed)) or True)
    assert await again(bench) == [2, 3]
    assert len(drawn) == 2


async def test_who_signed_is_not_the_one_to_check_again(bench: Bench) -> None:
    batch = put_at(bench, 1, 5)
    post(bench, batch, signers=(OTHERS[0],))
    batch.signers |= bench.view.runs[RUN].seats[ME]
    bench.chain_time = batch.posted_at
    assert await again(bench) == []


async def test_wrong_acceptance_is_said_loudly(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    batch = put_at(bench, 1, 5)
    post(bench, batch, signers=(OTHERS[0],))
    bench.chain_time = batch.posted_at
    spoil(bench)
    await run_until(bench, lambda: bool(differences(caplog)))
    assert differences(caplog) == [("ACCEPTED", "REJECTED")]


async def test_outvoted_validator_says_so_when_the_outcomes_are_posted(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    batch = put_at(bench, 1, 0)
    spoil(bench)
    await run_until(bench, lambda: bool(bench.orchestrator.outcomes))
    assert differences(caplog) == []
    post(bench, batch, signers=(OTHERS[0], OTHERS[1]), is_drawn=False)
    for _ in range(2):
        await bench.loop._round()
    assert differences(caplog) == [("ACCEPTED", "REJECTED")]


async def test_validator_whose_outcome_is_posted_says_nothing(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    batch = put_at(bench, 1, 0)
    await run_until(bench, lambda: bool(bench.orchestrator.outcomes))
    post(bench, batch, signers=(OTHERS[0], OTHERS[1]), is_drawn=False)
    await bench.loop._round()
    assert differences(caplog) == []


# With a journal that was lost, or is from an old backup


def sign_on_chain(bench: Bench, batch: Any) -> None:
    """Post a batch's outcomes with this validator among those that signed."""
    post(bench, batch, signers=(OTHERS[0],), is_drawn=False)
    batch.signers |= bench.view.runs[RUN].seats[ME]


async def test_validator_that_forgot_leaves_what_it_may_have_signed_to_others(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    sign_on_chain(bench, put_at(bench, 1, 0))
    put_at(bench, 2, 0)
    post(bench, put_at(bench, 3, 5), signers=(OTHERS[0], OTHERS[1]))
    bench.chain_time = bench.view.batches[3].posted_at
    assert (await due(bench), await again(bench)) == ([], [])
    assert [r.batch_id for r in caplog.records if "journal lacks" in r.message] == [1]  # type: ignore[attr-defined]
    bench.chain_time += 1
    put_at(bench, 4, 0).committed_at = bench.chain_time
    assert await due(bench) == [4]


async def test_shown_outcome_is_a_signature_but_a_withheld_statement_is_none(bench: Bench) -> None:
    batch = put_at(bench, 1, 0)
    batch.shown = {WITHHELD: {ME: b"signature"}, keccak(b"others"): {OTHERS[0]: b"signature"}}
    assert await due(bench) == [1]
    batch.shown[keccak(b"records")] = {ME: b"signature"}
    assert await due(bench) == []


async def test_validator_that_remembers_judges_on(bench: Bench) -> None:
    signed, open_one = put_at(bench, 1, 0), put_at(bench, 2, 0)
    await bench.loop.validate(signed)
    await bench.loop.validate(open_one)
    sign_on_chain(bench, signed)
    put_at(bench, 3, 0)
    assert await due(bench) == [2, 3]
    bench.view.batches[1].root = keccak(b"another root")  # what the journal has is of another batch
    assert await due(bench) == [2]
