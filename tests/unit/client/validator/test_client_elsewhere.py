"""Files that the orchestrator does not show come from relays and workers' sources."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from worlds.client_chain import make_batch
from worlds.client_world import RUN, make_submission, make_ticket
from worlds.internet import Internet, says
from worlds.validator_bench import ACCEPTED, Bench, honest, run_until

from muster.api import BatchContents
from muster.chain import LeasedWork
from muster.client.validator import batches as module
from muster.client.validator.batches import LEAST_REST_S, MOST_ASKED, REST, TURN_S, WAIT_S
from muster.protocol.encoding import file_hash, keccak
from muster.protocol.errors import ApiError
from muster.protocol.ids import Hash32, to_address
from muster.protocol.merkle import batch_root
from muster.protocol.messages import Reason, Verdict

DATA = b"a file"
SUBMISSION = make_submission(make_ticket(), [], file_hash=file_hash(DATA))
ROOM, RELAY = "http://room.example", "http://relay.example"


async def public(_host: str, _port: int) -> list[str]:
    return ["1.1.1.1"]


OtherSources = partial(module.OtherSources, resolver=public)


def listed(*relays: str) -> Callable[[], Sequence[str]]:
    return lambda: relays


def world(*sources: str, run_id: int = RUN) -> Any:
    work = LeasedWork(SUBMISSION, b"", make_ticket(), b"")
    batch = replace(make_batch(1, [SUBMISSION]), work=work, sources=sources, run_id=run_id)
    return SimpleNamespace(batches={1: batch})


async def test_file_is_had_from_where_its_worker_says_that_it_is() -> None:
    internet = Internet(room=says(DATA))
    found = OtherSources(RUN, world(ROOM), listed(RELAY), transport=internet)
    assert await found.file(file_hash(DATA)) == DATA
    with pytest.raises(ApiError, match="no source shows"):
        await OtherSources(RUN, world(), listed(RELAY), transport=internet).file(file_hash(DATA))


async def test_sources_of_another_runs_work_are_not_asked() -> None:
    internet = Internet(room=says(DATA))
    others = OtherSources(RUN, world(ROOM, run_id=RUN + 1), listed(RELAY), transport=internet)
    with pytest.raises(ApiError, match="no source shows"):
        await others.file(file_hash(DATA))
    assert "room.example" not in internet.asked


async def test_strangers_do_not_lead_into_our_network_unless_it_is_a_devnet() -> None:
    internet = Internet(**{"127": says(DATA)})
    named = world("http://127.0.0.1:8545")
    with pytest.raises(ApiError, match="no source shows"):
        await OtherSources(RUN, named, listed(), transport=internet).file(file_hash(DATA))
    at_home = OtherSources(RUN, named, listed(), allows_private=True, transport=internet)
    assert await at_home.file(file_hash(DATA)) == DATA


async def test_strangers_names_do_not_lead_into_our_network() -> None:
    async def private(_host: str, _port: int) -> list[str]:
        return ["127.0.0.1"]

    internet = Internet(localtest=says(DATA))
    found = OtherSources(
        RUN, world("http://localtest.me:8545"), listed(), transport=internet, resolver=private
    )
    with pytest.raises(ApiError, match="leads into a private network"):
        await found.file(file_hash(DATA))
    assert not internet.asked


async def test_relays_are_those_of_the_moment() -> None:
    internet, relays = Internet(relay=says(DATA)), [ROOM]
    found = OtherSources(RUN, world(), lambda: relays, transport=internet)
    with pytest.raises(ApiError, match="no source shows"):
        await found.file(file_hash(b"another"))
    relays[:] = [RELAY]
    assert await found.file(file_hash(DATA)) == DATA
    assert "relay.example" in internet.asked


@pytest.mark.parametrize("is_inside", [False, True])
async def test_relays_of_an_orchestrator_are_in_our_network_only_if_it_is(is_inside: bool) -> None:
    async def lookup(host: str, _port: int) -> list[str]:
        return ["127.0.0.1" if host == "relay.example" else "1.1.1.1"]

    async def own_relays() -> tuple[str, ...]:
        return (RELAY,) if is_inside else ()

    internet = Internet(relay=says(DATA))
    found = OtherSources(
        RUN, world(), listed(RELAY), own_relays=own_relays, transport=internet, resolver=lookup
    )
    if is_inside:
        assert await found.file(file_hash(DATA)) == DATA
        return
    with pytest.raises(ApiError, match="leads into a private network"):
        await found.file(file_hash(DATA))
    assert not internet.asked


async def test_relays_of_a_public_orchestrator_take_turns_with_workers_sources(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def own_relays() -> tuple[str, ...]:
        return ()

    monkeypatch.setattr("muster.client.sources.LANES", 1)
    internet, relays = Internet(room=says(DATA)), [f"http://relay{n}.example" for n in range(40)]
    found = OtherSources(
        RUN, world(ROOM), listed(*relays), own_relays=own_relays, transport=internet
    )
    assert await found.file(file_hash(DATA)) == DATA
    assert internet.asked == ["room.example"]
    with pytest.raises(ApiError, match="no source shows"):
        await found.file(file_hash(b"another"))
    assert set(internet.asked[1:]) == {f"relay{n}.example" for n in range(40)}


async def test_sources_that_hang_do_not_hold_up_a_validator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("muster.client.validator.batches.WAIT_S", 0.01)
    shows = asyncio.Event()

    class Slow(Internet):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            await shows.wait()
            return await super().handle_async_request(request)

    found = OtherSources(RUN, world(ROOM), listed(), transport=Slow(room=says(DATA)))
    for _ in range(2):
        with pytest.raises(ApiError, match="no source has shown the batch yet"):
            await found.file(file_hash(DATA))
    shows.set()
    async with asyncio.timeout(5):
        while not all(search.task.done() for search in found._asking.values()):
            await asyncio.sleep(0.001)
    assert await found.file(file_hash(DATA)) == DATA
    assert not found._asking


async def test_what_hangs_for_long_is_given_up_and_left_alone_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("muster.client.validator.batches.LONGEST_S", 0.2)
    seconds = [0.0]

    def hang(_: httpx.Request) -> httpx.Response:
        seconds[0] += 4
        return httpx.Response(200, headers={"x-hangs": "yes"})

    internet = Internet(room=hang)
    found = OtherSources(RUN, world(ROOM), listed(), transport=internet, clock=lambda: seconds[0])
    for at, asked in ((0.0, 1), (4 + REST * 4 - 1, 1), (4 + REST * 4, 2)):
        seconds[0] = at
        with pytest.raises(ApiError, match="no source has shown the batch yet"):
            await found.contents(world(ROOM).batches[1])
        assert len(internet.asked) == asked


async def test_what_is_not_there_yet_is_asked_for_again_soon() -> None:
    seconds = [0.0]
    internet = Internet(room=says(b"", 404))
    found = OtherSources(RUN, world(ROOM), listed(), transport=internet, clock=lambda: seconds[0])
    with pytest.raises(ApiError, match="answered 404"):
        await found.file(file_hash(DATA))
    internet.hosts["room"] = says(DATA)
    with pytest.raises(ApiError, match="no source has shown the batch yet"):
        await found.file(file_hash(DATA))
    seconds[0] = LEAST_REST_S
    assert await found.file(file_hash(DATA)) == DATA


async def test_few_things_are_asked_for_at_a_time_and_what_is_over_makes_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("muster.client.validator.batches.WAIT_S", 0.0)
    monkeypatch.setattr("muster.client.validator.batches.MOST_ASKED", 1)
    internet = Internet(relay=says(DATA))
    found = OtherSources(RUN, world(), listed(RELAY), transport=internet)
    for name in (file_hash(b"other"), file_hash(DATA)):
        with pytest.raises(ApiError, match="no source has shown the batch yet"):
            await found.file(name)
    async with asyncio.timeout(5):
        while not all(search.task.done() for search in found._asking.values()):
            await asyncio.sleep(0.001)
    monkeypatch.setattr("muster.client.validator.batches.WAIT_S", 5.0)
    assert await found.file(file_hash(DATA)) == DATA
    found.close()


# Sources of strangers that hang


def hang(_: httpx.Request) -> httpx.Response:
    return httpx.Response(200, headers={"x-hangs": "yes"})


class Crowd:
    """Work of strangers whose sources hang, and the work of an honest worker with a source."""

    def __init__(self, workers: int, works: int) -> None:
        self.seconds = 0.0
        self.view = world(ROOM)
        self.names = [file_hash(b"junk %d" % i) for i in range(works)]
        for number, name in enumerate(self.names, 2):
            worker = to_address(keccak(b"stranger %d" % (number % workers))[:20])
            junk = replace(SUBMISSION, file_hash=name, worker=worker)
            work = LeasedWork(junk, b"", make_ticket(), b"")
            batch = replace(make_batch(number, [junk]), work=work, sources=("http://evil.example",))
            self.view.batches[number] = batch
        self.internet = Internet(evil=hang, room=says(DATA))
        self.found = OtherSources(
            RUN, self.view, listed(), transport=self.internet, clock=lambda: self.seconds
        )

    async def ask(self, name: Hash32) -> bytes | None:
        """Ask as a validator does, which takes a second."""
        self.seconds += 1
        try:
            return await self.found.file(name)
        except ApiError:
            return None


@pytest.mark.parametrize("workers", [1, 19], ids=["one worker", "many workers"])
async def test_hanging_sources_of_many_works_deny_no_honest_one(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muster.client.validator.batches.WAIT_S", 0.01)
    monkeypatch.setattr("muster.client.validator.batches.SHORT_WAIT_S", 0.01)
    crowd = Crowd(workers, works=19)
    async with asyncio.timeout(20):
        for _ in range(2):
            for name in crowd.names:
                assert await crowd.ask(name) is None
            if await crowd.ask(file_hash(DATA)) == DATA:
                break
        else:
            pytest.fail("the honest worker's file was not had")
    crowd.found.close()


async def test_searches_of_different_workers_have_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("muster.client.validator.batches.WAIT_S", 0.01)
    monkeypatch.setattr("muster.client.validator.batches.SHORT_WAIT_S", 0.01)
    crowd = Crowd(MOST_ASKED, works=MOST_ASKED)
    for name in crowd.names:
        await crowd.ask(name)
    assert await crowd.ask(file_hash(DATA)) is None
    assert "room.example" not in crowd.internet.asked
    crowd.seconds = TURN_S
    assert await crowd.ask(file_hash(DATA)) == DATA
    crowd.found.close()


async def test_answer_that_came_late_waits_for_its_request_while_strangers_crowd(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("muster.client.validator.batches.WAIT_S", 0.0)
    monkeypatch.setattr("muster.client.validator.batches.SHORT_WAIT_S", 0.0)
    crowd = Crowd(19, works=19)
    await crowd.ask(file_hash(DATA))
    async with asyncio.timeout(5):
        while not crowd.found._asking[file_hash(DATA)].task.done():
            await asyncio.sleep(0.001)
    crowd.seconds = TURN_S
    for name in crowd.names:
        await crowd.ask(name)
    assert await crowd.ask(file_hash(DATA)) == DATA
    assert crowd.internet.asked.count("room.example") == 1
    crowd.found.close()


async def test_validator_waits_once_for_what_hangs() -> None:
    crowd = Crowd(1, works=3)
    waited = asyncio.get_running_loop().time()
    async with asyncio.timeout(WAIT_S + 20):
        assert await crowd.ask(crowd.names[0]) is None
        crowd.seconds = WAIT_S + 1
        for name in crowd.names * 3:
            assert await crowd.ask(name) is None
    assert asyncio.get_running_loop().time() - waited < 2 * WAIT_S
    crowd.found.close()


async def test_work_of_one_worker_that_cannot_be_had_holds_up_nobody_else(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    stuck, _ = honest(make_ticket(index=1))
    assert stuck.ticket is not None
    assert stuck.ticket_signature is not None
    work = LeasedWork(stuck.submission, stuck.signature, stuck.ticket, stuck.ticket_signature)
    direct = replace(bench.commit(1, [stuck]), work=work)
    bench.view.batches[1] = direct
    bench.commit_honest(2, 2)
    await run_until(bench, lambda: bool(bench.orchestrator.outcomes))
    assert [batch_id for batch_id, *_ in bench.orchestrator.outcomes] == [2]
    bench.close()


async def test_validator_judges_what_only_others_show(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    entry, data = honest(make_ticket())
    batch = bench.commit(1, [entry], data)
    contents = BatchContents(
        batch_id=1, root=batch_root([entry.submission.leaf()]), count=1, submissions=[entry]
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
    elsewhere = OtherSources(RUN, bench.view, listed(RELAY), transport=internet)
    bench.change(other_sources=elsewhere)
    assert await bench.judge(batch) == [ACCEPTED]
    bench.close()


# A relay that is silent may have a file


class Lost:
    """A validator whose orchestrator lacks the file of its batch, and one relay."""

    def __init__(self, folder: Path) -> None:
        self.bench, self.internet = Bench(folder), Internet()
        entry, _ = honest(make_ticket())
        self.batch = self.bench.commit(1, [entry])
        found = OtherSources(
            RUN,
            self.bench.view,
            listed(RELAY),
            transport=self.internet,
            clock=lambda: self.bench.seconds,
        )
        self.bench.change(other_sources=found)

    async def is_missing_at(self, seconds: float, relay: int) -> bool:
        """Whether the file counts as missing when the relay answers so."""
        self.bench.seconds = seconds
        self.internet.hosts["relay"] = says(b"", relay)
        try:
            judged = await self.bench.judge(self.batch)
        except ApiError:
            return False
        assert judged == [(Verdict.REJECTED, Reason.FILE_UNAVAILABLE)]
        return True


async def test_a_file_is_missing_when_all_lack_it_for_the_patience(tmp_path: Path) -> None:
    lost = Lost(tmp_path)
    assert not await lost.is_missing_at(0, 404)
    assert not await lost.is_missing_at(59, 410)
    assert await lost.is_missing_at(60, 404)
    lost.bench.close()


async def test_a_file_is_awaited_while_a_relay_is_silent(tmp_path: Path) -> None:
    lost = Lost(tmp_path)
    assert not await lost.is_missing_at(0, 503)
    assert not await lost.is_missing_at(61, 404)
    assert not await lost.is_missing_at(120, 404)
    assert await lost.is_missing_at(121, 404)
    lost.bench.close()


async def test_a_relay_that_stays_silent_is_awaited_for_half_of_the_deadline(
    tmp_path: Path,
) -> None:
    lost = Lost(tmp_path)
    for seconds in (0, 61, 399):
        assert not await lost.is_missing_at(seconds, 503)
    assert await lost.is_missing_at(400, 503)
    lost.bench.close()


async def test_a_relay_that_was_silent_long_ago_was_not_silent_since() -> None:
    seconds, silent = [0.0], Internet(relay=says(b"", 503))
    found = OtherSources(RUN, world(), listed(RELAY), transport=silent, clock=lambda: seconds[0])
    told = []
    for seconds[0], name in (
        (0.0, b"one"),
        (300.0, b"two"),
        (90_000.0, b"three"),
        (90_300.0, b"four"),
    ):
        with pytest.raises(ApiError):
            await found.file(file_hash(name))
        told.append(found.silent_s(file_hash(name)))
    assert told == [0.0, 300.0, 0.0, 300.0]
    found.close()


async def test_a_slow_relay_gets_more_time_with_each_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PATIENCE", replace(module.PATIENCE, source_s=0.1))

    class Slow(Internet):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            await asyncio.sleep(0.3)
            return await super().handle_async_request(request)

    seconds = [0.0]
    found = OtherSources(
        RUN, world(), listed(RELAY), transport=Slow(relay=says(DATA)), clock=lambda: seconds[0]
    )
    for seconds[0] in (0.0, 100.0):
        with pytest.raises(ApiError, match="timed out"):
            await found.file(file_hash(DATA))
    seconds[0] = 200.0
    assert await found.file(file_hash(DATA)) == DATA
