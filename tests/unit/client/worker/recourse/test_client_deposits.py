"""A worker's files in the rooms of relays: offered until they are taken, and asked for again."""

from __future__ import annotations

import logging

import pytest
from worlds.client_chain import make_batch
from worlds.client_silence import (
    DATA,
    SIGNED,
    TICKET,
    Silenced,
    break_reads,
    make_record,
    note_claims,
    own,
)
from worlds.client_world import sign_submission

from muster.chain import BatchStatus
from muster.client.worker.defence import HONEST
from muster.client.worker.deposits import KEPT_S
from muster.client.worker.outcomes import Judged
from muster.protocol.errors import StorageError
from muster.protocol.messages import Reason, Verdict


async def test_rooms_are_offered_the_work_until_they_take_it(desk: Silenced) -> None:
    desk.sign()
    await desk.duty.fill_rooms()
    assert not desk.rooms.given
    desk.view.batches[4] = own()
    desk.rooms.refusals = 2
    for _ in range(6):
        await desk.duty.fill_rooms()
        desk.seconds += 60
    data, entry = desk.rooms.given[0]
    assert len(desk.rooms.given) == 3
    assert data == DATA
    assert entry.signature == sign_submission(SIGNED.submission)
    assert (entry.ticket, entry.ticket_signature) == (TICKET, SIGNED.ticket_signature)


async def test_a_room_that_refuses_for_long_is_offered_the_work_once_a_minute(
    desk: Silenced,
) -> None:
    desk.sign()
    desk.view.batches[4] = own()
    desk.rooms.refusals = 1000
    started = desk.seconds
    while desk.seconds < started + 600:
        await desk.duty.fill_rooms()
        desk.seconds += 1
    assert len(desk.rooms.given) == 4 + 9  # at 0, 5, 15, 35, 75 s, then each minute
    desk.rooms.refusals = 0
    for _ in range(120):
        desk.seconds += 1
        await desk.duty.fill_rooms()
    assert len(desk.rooms.given) == 14
    desk.rooms.refusals = 1000
    desk.view.batches[4] = own(status=BatchStatus.JUDGED)
    desk.duty.deposits._offers.clear()
    await desk.duty.fill_rooms()
    assert len(desk.rooms.given) == 14


async def test_a_room_that_may_have_lost_the_work_is_offered_it_again(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch
) -> None:
    signed = desk.sign()
    desk.view.batches[4] = own()
    await desk.duty.fill_rooms()
    desk.seconds += KEPT_S - 1
    await desk.duty.fill_rooms()
    assert len(desk.rooms.given) == 1
    desk.seconds += 1
    await desk.duty.fill_rooms()
    assert len(desk.rooms.given) == 2
    # The work is called fraud: what the chain did not name for a while may be gone at once.
    note_claims(monkeypatch)
    fraud = make_batch(4, [SIGNED.submission], [make_record(Verdict.FRAUD, Reason.NONE)])
    await desk.loop.defence.claim(desk.duty, Judged(signed, fraud, 0), HONEST)
    desk.view.batches[4] = fraud
    await desk.duty.fill_rooms()
    assert len(desk.rooms.given) == 3


async def test_a_room_that_has_the_work_is_not_offered_it_again(desk: Silenced) -> None:
    taken = {desk.rooms.urls[0]}
    assert await desk.duty.deposits.deposit(desk.sign(), taken)
    assert not desk.rooms.given
    taken.clear()
    assert await desk.duty.deposits.deposit(desk.sign(), taken)
    assert len(desk.rooms.given) == 1
    assert taken == {desk.rooms.urls[0]}


async def test_work_waits_for_a_room_and_says_once_that_there_is_none(
    desk: Silenced, caplog: pytest.LogCaptureFixture
) -> None:
    desk.sign()
    desk.view.batches[4] = own()
    urls, desk.rooms.urls, desk.rooms.unasked = desk.rooms.urls, (), ("http://10.0.0.3:8700",)
    for _ in range(3):
        await desk.duty.fill_rooms()
        desk.seconds += 60
    said = [r for r in caplog.records if "no relay can be given" in r.getMessage()]
    assert [r.levelname for r in said if r.levelno >= logging.WARNING] == ["WARNING"]
    assert vars(said[0])["relays"] == desk.rooms.unasked
    assert not desk.rooms.given
    desk.rooms.urls, desk.rooms.unasked = urls, ()
    await desk.duty.fill_rooms()
    assert len(desk.rooms.given) == 1


async def test_work_of_a_run_without_relays_waits_for_no_room(
    desk: Silenced, caplog: pytest.LogCaptureFixture
) -> None:
    desk.rooms.urls = ()
    assert await desk.duty.deposits.deposit(desk.sign(), set())
    assert not [r for r in caplog.records if "no relay can be given" in r.getMessage()]


async def test_rooms_never_count_as_having_a_file_that_cannot_be_read(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    signed = desk.sign()
    with monkeypatch.context() as patch:
        break_reads(patch, 1)
        with pytest.raises(StorageError, match="cannot read"):
            await desk.duty.deposits.deposit(signed, set())
    assert await desk.duty.deposits.deposit(signed, set())
    next(desk.journal._files.iterdir()).unlink()
    assert not await desk.duty.deposits.deposit(signed, set())
    assert [r for r in caplog.messages if "the file is lost" in r]
