"""A worker's claims: made once, with what proof there is, and their files for jurors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from worlds.client_chain import WORKER_ID, make_batch
from worlds.client_silence import (
    BOND,
    JUROR,
    LATE,
    NODE,
    OTHER,
    SIGNED,
    Silenced,
    committed,
    make_record,
    note_claims,
)
from worlds.client_world import RUN, WORKER, as_claimed

from muster.client.worker.defence import HONEST
from muster.client.worker.deposits import KEPT_S
from muster.client.worker.outcomes import Judged
from muster.protocol.encoding import keccak
from muster.protocol.ids import Address
from muster.protocol.messages import Verdict


async def test_a_claims_file_is_offered_to_a_room_that_refuses_it_for_long(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_claims(monkeypatch)
    desk.rooms.refusals = 1000
    _, data = await desk.call_fraud()
    await desk.loop.settle()
    assert not desk.duty.accused
    for _ in range(600):
        await desk.duty.fill_rooms()
        desk.seconds += 1
    assert desk.journal.unfinished()  # a restart would claim it, and offer it, again
    assert await desk.at(LATE) == []
    desk.rooms.refusals = 0
    desk.seconds += 60
    await desk.duty.fill_rooms()
    assert desk.rooms.given[-1][0] == data
    assert not desk.journal.unfinished()
    assert not desk.duty.claimed


async def test_a_claims_file_is_offered_until_its_case_is_closed(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_claims(monkeypatch)
    desk.rooms.refusals = 1000
    await desk.call_fraud()
    await desk.loop.settle()
    await desk.duty.fill_rooms()
    [judged] = desk.duty.claimed.values()
    case: Any = SimpleNamespace(closed=True)
    desk.view.cases[judged.batch.records[0].leaf(3, 0)] = case  # type: ignore[index]
    await desk.duty.fill_rooms()
    assert len(desk.rooms.given) == 1
    assert not desk.journal.unfinished()


@pytest.mark.parametrize(
    ("changes", "is_offered"),
    [({}, True), ({"closed": True}, False), ({"claims": []}, False), ({"run_id": 99}, False)],
    ids=["open", "closed", "of others only", "of another run"],
)
@pytest.mark.parametrize("is_restarted", [False, True])
async def test_file_that_a_room_lost_is_offered_again_while_a_claim_about_it_is_open(
    desk: Silenced,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    is_offered: bool,
    is_restarted: bool,
) -> None:
    note_claims(monkeypatch)
    submission, _ = await desk.call_fraud()
    await desk.loop.settle()
    await desk.duty.fill_rooms()
    assert not desk.duty.claimed
    if is_restarted:
        desk.close()
        rooms, desk = desk.rooms, Silenced(tmp_path)
        desk.rooms = rooms
    claim = SimpleNamespace(claimant=NODE, submission=submission)
    case = SimpleNamespace(**{"run_id": RUN, "closed": False, "claims": [claim]} | changes)
    desk.view.cases[keccak(b"its case")] = case
    for _ in range(3):
        desk.seconds += KEPT_S / 2
        await desk.duty.fill_rooms()
    assert (len(desk.rooms.given) > 1) is is_offered
    desk.close()


@pytest.mark.parametrize(
    ("claimant", "claims"), [(NODE, 0), (WORKER, 0), (JUROR, 1)], ids=["node", "worker", "stranger"]
)
async def test_claim_that_it_made_is_not_made_again_and_a_strangers_claim_changes_nothing(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch, claimant: Address, claims: int
) -> None:
    sent = note_claims(monkeypatch)
    signed = desk.sign()
    batch = make_batch(3, [SIGNED.submission], [make_record(Verdict.FRAUD)])
    judged = Judged(signed, batch, 0)
    made = SimpleNamespace(
        claimant=claimant, ruling=HONEST.number, submission=SIGNED.submission, proof=()
    )
    desk.view.cases[judged.case_id] = SimpleNamespace(claims=[made], closed=False, run_id=RUN)
    await desk.loop.defence.claim(desk.duty, judged, HONEST)
    assert len(sent) == claims
    assert desk.chain.allowed == claims * BOND
    await desk.duty.fill_rooms()
    assert len(desk.rooms.given) == 1


SHOWN = SimpleNamespace(
    claimant=JUROR, ruling=HONEST.number, submission=SIGNED.submission, proof=(OTHER.leaf(),)
)


@pytest.mark.parametrize(
    ("changes", "proof"),
    [
        ({}, (OTHER.leaf(),)),
        ({"proof": ()}, ()),
        ({"proof": (SIGNED.submission.leaf(),)}, ()),
        ({"submission": replace(SIGNED.submission, units=21)}, ()),
    ],
    ids=["proven", "without a proof", "with a false proof", "other work"],
)
async def test_proof_of_hidden_work_is_taken_from_a_strangers_claim(
    desk: Silenced, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], proof: Any
) -> None:
    sent: list[Any] = []

    async def claim(_chain: Any, _proof: Any, work: Any, *_: Any, **__: Any) -> None:
        sent.append(work)

    monkeypatch.setattr("muster.client.worker.defence.claim", claim)
    signed = desk.sign()
    records = [make_record(Verdict.FRAUD), as_claimed(OTHER, WORKER_ID)]
    judged = Judged(signed, committed(records=records), 0)
    made = SimpleNamespace(**vars(SHOWN) | changes)
    desk.view.cases[judged.case_id] = SimpleNamespace(claims=[made])
    await desk.loop.defence.claim(desk.duty, judged, HONEST)
    [work] = sent
    assert (work.submission, tuple(work.proof)) == (SIGNED.submission, proof)
