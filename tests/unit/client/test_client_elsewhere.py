"""What the orchestrator does not show is had from relays and from where workers say that it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from client_chain import make_batch
from client_world import RUN, make_submission, make_ticket
from test_client_sources import Internet, says
from test_client_validator_loop import ACCEPTED, Bench, honest

from muster.api import BatchContents
from muster.chain import LeasedWork
from muster.client.validator.elsewhere import Elsewhere
from muster.protocol.encoding import file_hash
from muster.protocol.errors import ApiError
from muster.protocol.merkle import merkle_root

DATA = b"a file"
SUBMISSION = make_submission(make_ticket(), [], file_hash=file_hash(DATA))
ROOM, RELAY = "http://room.example", "http://relay.example"


def world(*sources: str, run_id: int = RUN) -> Any:
    work = LeasedWork(SUBMISSION, b"", make_ticket(), b"")
    batch = replace(make_batch(1, [SUBMISSION]), work=work, sources=sources, run_id=run_id)
    return SimpleNamespace(batches={1: batch})


async def test_file_is_had_from_where_its_worker_says_that_it_is() -> None:
    internet = Internet(room=says(DATA))
    found = Elsewhere(RUN, world(ROOM), (RELAY,), transport=internet)
    assert await found.file(file_hash(DATA)) == DATA
    with pytest.raises(ApiError, match="no source shows"):
        await Elsewhere(RUN, world(), (RELAY,), transport=internet).file(file_hash(DATA))


async def test_sources_of_another_runs_work_are_not_asked() -> None:
    internet = Internet(room=says(DATA))
    others = Elsewhere(RUN, world(ROOM, run_id=RUN + 1), (RELAY,), transport=internet)
    with pytest.raises(ApiError, match="no source shows"):
        await others.file(file_hash(DATA))
    assert "room.example" not in internet.asked


async def test_strangers_do_not_lead_into_our_network_unless_it_is_a_devnet() -> None:
    internet = Internet(**{"127": says(DATA)})
    named = world("http://127.0.0.1:8545")
    with pytest.raises(ApiError, match="no source shows"):
        await Elsewhere(RUN, named, (), transport=internet).file(file_hash(DATA))
    at_home = Elsewhere(RUN, named, (), allows_private=True, transport=internet)
    assert await at_home.file(file_hash(DATA)) == DATA


async def test_sources_that_hang_take_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.client.validator.elsewhere.LONGEST_S", 0.05)
    internet = Internet(room=says(b"", **{"x-hangs": "yes"}))
    hanging = Elsewhere(RUN, world(ROOM), (), transport=internet)
    with pytest.raises(ApiError, match="no source answered in"):
        await hanging.file(file_hash(DATA))
    with pytest.raises(ApiError, match="no source answered in"):
        await hanging.contents(world(ROOM).batches[1])


async def test_validator_judges_what_only_others_show(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    entry, data = honest(make_ticket())
    batch = bench.commit(1, [entry], data)
    contents = BatchContents(
        batch_id=1, root=merkle_root([entry.submission.leaf()]), count=1, submissions=[entry]
    )
    bench.orchestrator.fail("batch", *[ApiError("no", status=404, code="not_found")] * 9)
    bench.orchestrator.files.clear()
    with pytest.raises(ApiError, match="no"):
        await bench.judge(batch)
    internet = Internet(
        relay=lambda request: says(
            data if "/files/" in request.url.path else contents.model_dump_json().encode()
        )(request)
    )
    elsewhere = Elsewhere(RUN, bench.view, (RELAY,), transport=internet)
    bench.loop.docket.elsewhere = bench.loop.examiner.elsewhere = elsewhere
    assert await bench.judge(batch) == [ACCEPTED]
    bench.close()
