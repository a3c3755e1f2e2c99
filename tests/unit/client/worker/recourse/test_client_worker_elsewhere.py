"""A worker whose node signed what its journal lacks: it submits nothing directly."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from worlds.client_chain import WORKER_ID, make_batch
from worlds.client_silence import LATE, OTHER, SIGNED, TICKET, Silenced, own
from worlds.client_world import (
    NODE_KEY,
    NOW,
    OTHER_KEY,
    RUN,
    WORKER,
    as_claimed,
    make_entry,
    make_rollouts,
    make_submission,
    make_ticket,
    sign_submission,
    sign_ticket,
)

from muster.api import BatchContents, BatchEntry, SignedClaim, SlotTaken
from muster.chain import LeasedWork, StreamItem
from muster.client.worker.elsewhere import LONGEST_ASK_S
from muster.protocol.eip712 import address_of
from muster.protocol.encoding import file_hash
from muster.protocol.errors import ApiError, ConfigError
from muster.protocol.ids import Address, RunId
from muster.protocol.messages import OutcomeRecord, Reason, Submission, Verdict

ANOTHER = replace(SIGNED.submission, units=19)


def taken(held: Submission = ANOTHER, key: bytes = NODE_KEY) -> SlotTaken:
    """Return the refusal that shows another submission for the slot."""
    signature = sign_submission(held, key)
    return SlotTaken("it is taken", SignedClaim(submission=held, signature=signature))


def honest_work() -> Submission:
    return make_submission(TICKET, make_rollouts(TICKET))


TAKEN = taken()


@pytest.mark.parametrize(
    ("refusal", "is_dropped"),
    [
        (TAKEN, True),
        (ApiError("it is taken", status=409, code="slot_taken"), False),
        (taken(replace(ANOTHER, index=1)), False),
        (taken(replace(ANOTHER, run_id=RunId(RUN + 1))), False),
        (taken(key=OTHER_KEY), False),
        (taken(honest_work()), False),
        (ApiError("no", status=409, code="late"), False),
    ],
    ids=[
        "slot_taken", "slot_taken without proof", "another slot", "another run",
        "another node's", "the same", "late",
    ],
)  # fmt: skip
async def test_only_work_whose_slot_has_no_other_submission_is_submitted_directly(
    desk: Silenced, refusal: ApiError, is_dropped: bool
) -> None:
    desk.orchestrator.tickets.append(TICKET)
    desk.orchestrator.fail("submit", refusal)
    await desk.loop.work_once()
    assert await desk.at(NOW) == ([] if is_dropped else ["submit"])
    assert await desk.at(LATE) == ([] if is_dropped else ["submit"])
    assert bool(desk.journal.unfinished()) is not is_dropped
    assert bool(list(desk.journal._files.iterdir())) is not is_dropped
    assert (desk.loop.context.held.fault is not None) is is_dropped


async def test_node_that_signed_outside_its_journal_takes_no_tickets_and_ends(
    desk: Silenced,
) -> None:
    desk.orchestrator.tickets.append(TICKET)
    desk.orchestrator.fail("submit", TAKEN)
    await desk.loop.work_once()
    other = make_ticket(index=1)
    await desk.loop.submit(other, [])
    assert desk.journal.signed(other) is None
    await desk.loop.work_once()
    assert desk.orchestrator.calls["lease"] == 1
    with pytest.raises(ConfigError, match="signed two submissions for step 4, index 0") as caught:
        await desk.loop._round()
    assert "stop any other process" in (caught.value.hint or "")


ELSEWHERE = as_claimed(OTHER, WORKER_ID)
"""An accepted outcome of the node in a slot that it signed without this journal."""
ITS_ENTRY = make_entry(TICKET, OTHER)


class Counted(list[Any]):
    """Counts the items that are read."""

    count = 0

    def __iter__(self) -> Iterator[Any]:
        Counted.count += len(self)
        return super().__iter__()

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        Counted.count += len(found)
        return found


def post(
    desk: Silenced, number: int, *records: OutcomeRecord, entry: BatchEntry = ITS_ENTRY
) -> None:
    """Post the outcomes of a batch that the orchestrator shows."""
    desk.asked.batches[number] = [entry]
    desk.view.batches[number] = make_batch(number, [OTHER] * len(records), [*records])
    desk.view.batches[number].records = Counted(records)  # type: ignore[assignment]
    accepted = [each for each in records if each.verdict is Verdict.ACCEPTED]
    stream = desk.view.runs[RUN].stream
    stream.extend(StreamItem(len(stream), number, 0, record) for record in accepted)


async def test_outcomes_are_compared_with_the_journal_once(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Counted, "count", 0)
    desk.view.runs[RUN].stream = Counted()
    desk.sign()
    post(desk, 8, *[replace(ELSEWHERE, worker_id=WORKER_ID + 1)] * 9)
    for later in range(3):
        assert await desk.at(LATE + later) == ["submit"]
    assert Counted.count == 9
    post(desk, 9, ELSEWHERE)
    assert await desk.at(LATE + 3) == []
    assert await desk.at(LATE + 4) == []
    assert Counted.count == 10


async def test_outcomes_of_a_view_that_was_rewound_are_compared_again(desk: Silenced) -> None:
    desk.sign()
    run = desk.view.runs[RUN]
    post(desk, 9, ELSEWHERE)
    assert await desk.at(LATE) == []
    run.stream = []
    post(desk, 9, replace(ELSEWHERE, worker_id=WORKER_ID + 1))
    assert await desk.at(LATE) == ["submit"]
    run.stream = []
    post(desk, 9, ELSEWHERE)
    assert await desk.at(LATE) == []


@pytest.mark.parametrize(
    ("changes", "is_held_back"),
    [
        ({}, True),
        ({"verdict": Verdict.REJECTED, "reason": Reason.WRONG_REWARD}, False),
        ({"worker_id": WORKER_ID + 1}, False),
        ({"index": TICKET.index}, False),
    ],
    ids=["lacking", "not accepted", "another worker's", "known"],
)
async def test_nothing_is_submitted_directly_when_the_journal_lacks_accepted_work(
    desk: Silenced, changes: dict[str, Any], is_held_back: bool, caplog: pytest.LogCaptureFixture
) -> None:
    desk.sign()
    post(desk, 9, replace(ELSEWHERE, **changes))
    assert await desk.at(LATE) == ([] if is_held_back else ["submit"])
    assert await desk.at(LATE + 10) == ([] if is_held_back else ["submit"])
    said = [r for r in caplog.records if "lacks accepted work" in r.getMessage()]
    assert len([r for r in said if r.levelno == logging.WARNING]) == is_held_back


@pytest.mark.parametrize(
    ("entry", "is_held_back"),
    [
        (ITS_ENTRY, True),
        (make_entry(TICKET, OTHER, OTHER_KEY), False),
        (make_entry(TICKET, SIGNED.submission), False),
        (None, False),
    ],
    ids=["signed", "signed by another", "another slot", "shown by nobody"],
)
@pytest.mark.parametrize("shown_by", ["orchestrator", "relay"])
async def test_accepted_work_holds_back_only_where_the_nodes_signature_is_shown(
    desk: Silenced,
    entry: BatchEntry | None,
    is_held_back: bool,
    shown_by: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    desk.sign()
    post(desk, 9, ELSEWHERE)
    del desk.asked.batches[9]
    if entry is not None and shown_by == "orchestrator":
        desk.asked.batches[9] = [entry]
    elif entry is not None:
        desk.rooms.shown = [entry]
    assert await desk.at(LATE) == ([] if is_held_back else ["submit"])
    unshown = [r for r in caplog.messages if "nobody shows this node's signature" in r]
    assert bool(unshown) is not is_held_back


async def test_signature_that_is_shown_later_holds_back_then(desk: Silenced) -> None:
    desk.sign()
    post(desk, 9, ELSEWHERE)
    del desk.asked.batches[9]
    assert await desk.at(LATE) == ["submit"]
    desk.asked.batches[9] = [ITS_ENTRY]
    desk.seconds += LONGEST_ASK_S
    assert await desk.at(LATE) == []


@pytest.mark.parametrize(
    ("submission", "key", "is_held_back"),
    [
        (OTHER, NODE_KEY, True),
        (OTHER, OTHER_KEY, False),
        (replace(OTHER, index=8), NODE_KEY, False),
        (replace(OTHER, worker=address_of(OTHER_KEY)), OTHER_KEY, False),
    ],
    ids=["the node's", "signed by another", "another slot", "a stranger's"],
)
async def test_work_on_chain_holds_back_only_where_it_is_the_nodes_work_of_that_slot(
    desk: Silenced, submission: Submission, key: bytes, is_held_back: bool
) -> None:
    desk.sign()
    post(desk, 9, ELSEWHERE)
    del desk.asked.batches[9]
    work = LeasedWork(submission, sign_submission(submission, key), TICKET, b"")
    desk.view.batches[9] = replace(desk.view.batches[9], work=work)
    assert await desk.at(LATE) == ([] if is_held_back else ["submit"])


async def test_stranger_s_work_on_chain_hides_no_signature_that_the_orchestrator_shows(
    desk: Silenced,
) -> None:
    desk.sign()
    post(desk, 9, ELSEWHERE)
    work = LeasedWork(OTHER, sign_submission(OTHER, OTHER_KEY), TICKET, b"")
    desk.view.batches[9] = replace(desk.view.batches[9], work=work)
    assert await desk.at(LATE) == []


async def test_sources_that_hang_do_not_make_own_work_late(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(_batch_id: int) -> BatchContents:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr("muster.client.worker.elsewhere.LOOK_UP_S", 0.01)
    desk.asked.batch = hang  # type: ignore[method-assign]
    desk.sign()
    post(desk, 9, ELSEWHERE)
    assert await desk.at(LATE) == ["submit"]


async def test_work_that_another_node_signed_before_is_not_lacking(desk: Silenced) -> None:
    desk.sign()
    post(desk, 9, ELSEWHERE, entry=make_entry(TICKET, OTHER, OTHER_KEY))
    member, other = desk.view.member(RUN, WORKER), address_of(OTHER_KEY)
    member.node_at = lambda _block: other
    assert await desk.at(LATE) == ["submit"]
    member.node = other
    assert await desk.at(LATE + 1) == []


async def test_work_whose_slot_has_other_work_on_chain_is_not_submitted(desk: Silenced) -> None:
    desk.sign()
    first = replace(SIGNED.submission, file_hash=file_hash(b"another file"))
    batch = replace(own(), work=LeasedWork(first, b"", TICKET, b""))
    desk.view.batches[4] = replace(batch, root=first.leaf())
    assert await desk.at(LATE) == []


async def test_dropped_work_stays_dropped_after_a_restart(tmp_path: Path) -> None:
    first = Silenced(tmp_path)
    first.sign()
    first.orchestrator.fail("submit", TAKEN)
    with pytest.raises(ConfigError, match="signed two submissions"):
        await first.loop._round()
    first.close()
    second = Silenced(tmp_path)
    second.orchestrator.tickets.append(TICKET)
    await second.loop._round()
    assert second.orchestrator.calls["submit"] == 0
    assert await second.at(LATE) == []
    second.close()


async def test_work_that_is_dropped_while_its_bond_is_approved_is_not_submitted(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch
) -> None:
    signed = desk.sign()

    async def approve(_spender: Address, _wei: int) -> None:
        desk.journal.finish(signed, TAKEN.code)

    monkeypatch.setattr(desk.chain, "approve", approve)
    assert await desk.at(LATE) == []


async def test_work_that_is_dropped_while_others_are_submitted_is_not_begun(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    desk.sign()
    ticket, data = make_ticket(index=1), b"another file"
    submission = make_submission(ticket, [], file_hash=file_hash(data), rollouts=1, units=20)
    second = desk.journal.record(ticket, sign_ticket(ticket), submission, data)
    submit = desk.chain.submit_direct

    async def drop(*args: Any) -> Any:
        desk.journal.finish(second, TAKEN.code)
        return await submit(*args)

    monkeypatch.setattr(desk.chain, "submit_direct", drop)
    assert await desk.at(LATE) == ["submit"]
    assert not [r for r in caplog.records if "has to wait" in r.getMessage()]
