"""An accepted file that nobody has: every source is asked, then training goes on without it."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from trainer_fakes import (
    KEY,
    FakeFiles,
    FakeLedger,
    Feed,
    Item,
    make_recipe,
    make_rollouts,
    no_sleep,
)
from worlds.internet import Answer, Internet, says

from muster.api import OrchestratorApi
from muster.protocol.eip712 import Domain
from muster.protocol.encoding import file_hash
from muster.protocol.errors import ApiError
from muster.protocol.ids import Hash32, PolicyVersion, RunId, to_address
from muster.trainer.ports import Files, RelaysSilent
from muster.trainer.stream.filters import Drop
from muster.trainer.stream.reader import Cursor, FileBuffer, StepInput, StreamReader

DATA = b"rows"
PATIENCE_S = 60.0
RELAYS = ["http://dead.example", "http://liar.example", "http://relay.example"]
DOCUMENTS = ("task_set", "recipe", "calibration")
INFO = {
    "run_id": 1,
    "chain_id": 1,
    "ledger": "0x" + "aa" * 20,
    "orchestrator": "0x" + "bb" * 20,
    "documents": dict.fromkeys(DOCUMENTS, "0x" + "11" * 32),
    "relays": RELAYS,
    "origin": "",
    "step": 1,
    "policy_version": 0,
}


def _orchestrator(status: int, data: bytes = DATA) -> Callable[[httpx.Request], httpx.Response]:
    """Return an orchestrator that answers so about files, and names relays."""

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/runs/1":
            return httpx.Response(200, content=json.dumps(INFO))
        return httpx.Response(status, content=data if status == 200 else b"")

    return answer


def _api(internet: Internet) -> OrchestratorApi:
    domain = Domain(1, to_address("0x" + "aa" * 20))
    return OrchestratorApi(
        "http://orchestrator.example",
        key=KEY,
        domain=domain,
        audience=to_address("0x" + "bb" * 20),
        transport=internet,
        backoff_s=0.0,
    )


async def _file(internet: Internet) -> bytes:
    async with _api(internet) as api:
        return await Files(api, RunId(1), transport=internet).file(file_hash(DATA))


async def test_file_that_the_orchestrator_lost_is_had_from_a_relay() -> None:
    internet = Internet(orchestrator=_orchestrator(404), liar=says(b"other"), relay=says(DATA))
    assert await _file(internet) == DATA
    assert "x-muster-signature" not in internet.requests[-1].headers


async def test_relays_are_not_asked_for_what_the_orchestrator_shows() -> None:
    internet = Internet(orchestrator=_orchestrator(200), relay=says(DATA))
    assert await _file(internet) == DATA
    assert "relay.example" not in internet.asked


async def test_file_that_the_orchestrator_damaged_is_had_from_a_relay() -> None:
    internet = Internet(orchestrator=_orchestrator(200, b"other"), relay=says(DATA))
    assert await _file(internet) == DATA


@pytest.mark.parametrize("relay", [says(b"", 404), says(b"", 500), says(b"other")])
async def test_damaged_file_that_no_relay_has_is_awaited_with_a_way_out(
    tmp_path: Path, relay: Answer
) -> None:
    internet, clock = Internet(orchestrator=_orchestrator(200, b"other"), relay=relay), Clock()
    async with _api(internet) as api:
        files = Files(api, RunId(1), transport=internet)
        buffer = FileBuffer(tmp_path, files, FakeLedger(), patience_s=1.0, clock=clock)
        for _ in range(3):
            with pytest.raises(ApiError) as caught:
                await buffer.file(file_hash(DATA))
            clock.now += 10 * PATIENCE_S
    assert caught.value.code == "bad_answer"
    assert str(tmp_path / file_hash(DATA).hex()) in (caught.value.hint or "")
    assert "training waits for it" in (caught.value.hint or "")


@pytest.mark.parametrize(("status", "said"), [(404, 404), (410, 410), (503, 503), (403, 403)])
async def test_whether_a_file_is_gone_is_the_orchestrators_word(status: int, said: int) -> None:
    """A relay that is down, lies or lacks the file does not show that nobody has it."""
    internet = Internet(
        orchestrator=_orchestrator(status), liar=says(b"other"), relay=says(b"", 404)
    )
    with pytest.raises(ApiError) as caught:
        await _file(internet)
    assert caught.value.status == said


@pytest.mark.parametrize(
    ("relay", "is_silent"),
    [
        (says(b"", 500), True),
        (says(b"", 403), True),
        (says(b"other"), True),
        (says(b"", 404), False),
        (says(b"", 410), False),
    ],
    ids=["failed", "refused", "sent another file", "never had it", "deleted it"],
)
async def test_relay_that_does_not_say_whether_it_has_a_file_is_named(
    relay: Answer, is_silent: bool
) -> None:
    internet = Internet(
        orchestrator=_orchestrator(404), dead=says(b"", 404), liar=says(b"", 410), relay=relay
    )
    with pytest.raises(ApiError) as caught:
        await _file(internet)
    assert isinstance(caught.value, RelaysSilent) is is_silent
    assert ("1 of its relays" in str(caught.value)) is is_silent
    assert ("relay.example" in str(caught.value)) is is_silent


async def test_silence_is_that_of_the_relay_that_fell_silent_last() -> None:
    internet, clock = Internet(orchestrator=_orchestrator(404)), Clock()

    async def silence(**statuses: int) -> float | None:
        """Return how long relays are silent when they answer so, ten seconds later."""
        clock.now += 10
        internet.hosts.update({name: says(b"", status) for name, status in statuses.items()})
        with pytest.raises(ApiError) as caught:
            await files.file(file_hash(DATA))
        return caught.value.silent_s if isinstance(caught.value, RelaysSilent) else None

    async with _api(internet) as api:
        files = Files(api, RunId(1), transport=internet, clock=clock)
        assert await silence(dead=500, liar=404, relay=404) == 0
        assert await silence() == 10
        assert await silence(liar=500) == 0
        assert await silence() == 10
        assert await silence(liar=404) == 40
        assert await silence(dead=404) is None
        assert await silence(dead=500) == 0


class Clock:
    """Time that passes with every pause."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await no_sleep(seconds)


class Away(FakeFiles):
    """A source that refuses what it does not store with a status; its relays may be silent."""

    status = 404
    silent_s: float | None = None

    async def file(self, submission_file_hash: Hash32) -> bytes:
        if submission_file_hash not in self.stored:
            said, silent_s = ("no such file", "file_unknown"), self.silent_s
            if silent_s is not None:
                raise RelaysSilent(said[0], status=self.status, code=said[1], silent_s=silent_s)
            raise ApiError(said[0], status=self.status, code=said[1])
        return await super().file(submission_file_hash)


async def _step(
    feed: Feed, folder: Path, clock: Clock, patience_s: float = PATIENCE_S
) -> StepInput:
    buffer = FileBuffer(folder, feed.files, feed.ledger, patience_s=patience_s, clock=clock)
    reader = StreamReader(feed.ledger, buffer, make_recipe(), vocab_size=16, sleep=clock.sleep)
    return await reader.next_step(Cursor(), PolicyVersion(0))


def _lacking(number: int = 0) -> tuple[Feed, Hash32, bytes]:
    """Return a feed of three submissions, the first of which nobody has."""
    feed = Feed(files=Away())
    digests = [feed.submit(make_rollouts(seed)) for seed in range(3)]
    return feed, digests[number], feed.files.stored.pop(digests[number])


async def test_training_goes_on_without_a_file_that_nobody_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    feed, lost, _ = _lacking()
    clock = Clock()
    taken = await _step(feed, tmp_path, clock)
    assert clock.now >= PATIENCE_S
    assert taken.end == Cursor(3, feed.ledger.items[2].record.file_hash)
    assert taken.dropped == {Drop.MISSING: 8}
    assert [(use.position, use.kept) for use in taken.uses] == [(0, 0), (1, 8), (2, 8)]
    said = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert [each.message for each in said] == [
        "nobody has an accepted file",
        "training goes on without an accepted file",
    ]
    assert {each.__dict__["file_hash"] for each in said} == {f"0x{lost.hex()}"}
    assert {each.__dict__["worker_id"] for each in said} == {1}
    assert str(tmp_path / lost.hex()) in said[0].__dict__["hint"]


async def test_file_that_comes_in_time_is_trained_on(tmp_path: Path) -> None:
    feed, lost, data = _lacking()
    clock = Clock()

    async def sleep(seconds: float) -> None:
        clock.now += seconds
        if clock.now > PATIENCE_S / 2:
            # As a person puts it there, who had it from its worker.
            (tmp_path / lost.hex()).write_bytes(data)
        await no_sleep(seconds)

    clock.sleep = sleep  # type: ignore[method-assign]
    taken = await _step(feed, tmp_path, clock)
    assert (taken.end.position, taken.dropped) == (2, {})


@pytest.mark.parametrize("status", [503, 403, 500])
async def test_file_of_a_source_that_is_away_is_awaited(tmp_path: Path, status: int) -> None:
    feed, lost, data = _lacking()
    assert isinstance(feed.files, Away)
    feed.files.status = status
    clock = Clock()

    async def sleep(seconds: float) -> None:
        clock.now += seconds
        if clock.now > 100 * PATIENCE_S:
            feed.files.stored[lost] = data
        await no_sleep(seconds)

    clock.sleep = sleep  # type: ignore[method-assign]
    taken = await _step(feed, tmp_path, clock)
    assert (taken.end.position, taken.dropped) == (2, {})


async def test_step_that_is_taken_again_lacks_the_same_files(tmp_path: Path) -> None:
    """Else it would make another version than the one on chain."""
    feed, lost, data = _lacking()
    first = await _step(feed, tmp_path, Clock())
    feed.files.stored[lost] = data
    again = await _step(feed, tmp_path, Clock())
    assert (again.end, again.uses) == (first.end, first.uses)
    buffer = FileBuffer(tmp_path, feed.files, feed.ledger)
    buffer.forget_before(0)
    assert await buffer.file(lost) is None
    buffer.forget_before(1)
    assert await buffer.file(lost) == data


# A worker that shows its file to validators only, again and again

LONG_S = 600.0
AGAIN_S = 30.0


def _feed_of(direct: Sequence[bool], workers: Sequence[int]) -> tuple[Feed, list[Hash32]]:
    """Return a feed of submissions of these workers, none of which the source has."""
    feed = Feed(files=Away())
    digests = [feed.submit(make_rollouts(seed)) for seed in range(len(workers))]
    feed.ledger.items = [
        replace(item, is_direct=is_direct, record=replace(item.record, worker_id=worker))
        for item, is_direct, worker in zip(feed.ledger.items, direct, workers, strict=True)
    ]
    feed.files.stored.clear()
    return feed, digests


async def _given_up_after(
    feed: Feed,
    folder: Path,
    digest: Hash32,
    patience_s: float = LONG_S,
    silent_s: Callable[[float], float | None] = lambda _: None,
) -> float:
    """Return the seconds after which a buffer gives a file up, when relays are silent for
    `silent_s` of the time.
    """
    clock = Clock()
    buffer = FileBuffer(folder, feed.files, feed.ledger, patience_s=patience_s, clock=clock)
    while clock.now <= 11 * LONG_S:
        assert isinstance(feed.files, Away)
        feed.files.silent_s = silent_s(clock.now)
        try:
            assert await buffer.file(digest) is None
        except ApiError:
            clock.now += 5
        else:
            return clock.now
    return math.inf


async def _waits(
    folder: Path, *, direct: Sequence[bool], workers: Sequence[int], patience_s: float = LONG_S
) -> float:
    """Return how long the second file is awaited after the first was given up and its step saved,
    by a trainer that starts anew."""
    feed, (first, second) = _feed_of(direct, workers)
    assert await _given_up_after(feed, folder, first, LONG_S) == LONG_S
    FileBuffer(folder, feed.files, feed.ledger).forget_before(1)
    return await _given_up_after(feed, folder, second, patience_s)


async def test_worker_that_hides_its_direct_work_again_delays_little(tmp_path: Path) -> None:
    assert await _waits(tmp_path, direct=[True, True], workers=[1, 1]) == AGAIN_S


@pytest.mark.parametrize(
    ("direct", "workers"),
    [([True, True], [1, 2]), ([True, False], [1, 1]), ([False, True], [1, 1])],
    ids=["another worker", "the orchestrator's batch", "lost by the orchestrator before"],
)
async def test_file_of_nobody_who_hid_one_is_awaited_as_usual(
    tmp_path: Path, direct: list[bool], workers: list[int]
) -> None:
    assert await _waits(tmp_path, direct=direct, workers=workers) == LONG_S


async def test_patience_below_that_of_repeated_work_stays(tmp_path: Path) -> None:
    waited_s = await _waits(tmp_path, direct=[True, True], workers=[1, 1], patience_s=5.0)
    assert waited_s == 5.0


async def test_sites_never_give_up_whoever_hid_files_before(tmp_path: Path) -> None:
    """The marks may come from a time when this site trained alone."""
    waited_s = await _waits(tmp_path, direct=[True, True], workers=[1, 1], patience_s=math.inf)
    assert waited_s == math.inf


async def test_only_marks_of_workers_with_direct_work_stay_on_the_disk(tmp_path: Path) -> None:
    feed, digests = _feed_of([True, False, True], [1, 2, 1])
    for digest in digests:
        assert await _given_up_after(feed, tmp_path, digest, 0.0) == 0
    FileBuffer(tmp_path, feed.files, feed.ledger).forget_before(3)
    assert [path.name for path in tmp_path.iterdir()] == ["worker-1.missing"]


class _CountingLedger(FakeLedger):
    """A ledger that counts the questions about its records."""

    asked = 0

    def is_direct(self, item: Item) -> bool:
        self.asked += 1
        return super().is_direct(item)


async def test_stream_is_searched_once_for_a_lost_file_however_often_it_is_asked_for(
    tmp_path: Path,
) -> None:
    """To ask about every record of a million takes a second."""
    feed, (first, second, *_) = _feed_of([True] * 10, [1] * 10)
    feed.ledger = ledger = _CountingLedger(feed.ledger.items)
    assert await _given_up_after(feed, tmp_path, first) == LONG_S
    assert await _given_up_after(feed, tmp_path, second) == AGAIN_S
    FileBuffer(tmp_path, feed.files, ledger).forget_before(2)
    assert ledger.asked == 2


# Relays that do not answer


@pytest.mark.parametrize(
    ("silent_s", "expected_s"),
    [
        (lambda now: now, 10 * LONG_S),
        (lambda now: 0 * now, 10 * LONG_S),
        (lambda now: now + 9 * LONG_S, LONG_S),
        (lambda now: now + 20 * LONG_S, LONG_S),
        (lambda now: now if now < LONG_S / 2 else None, LONG_S),
        (lambda now: now if now < 2 * LONG_S else None, 2 * LONG_S),
    ],
    ids=["always", "in turns", "before, too", "long before", "for a while", "for long"],
)
async def test_file_that_a_silent_relay_may_have_is_awaited_for_longer(
    tmp_path: Path, silent_s: Callable[[float], float | None], expected_s: float
) -> None:
    feed, (lost,) = _feed_of([True], [1])
    waited_s = await _given_up_after(feed, tmp_path, lost, silent_s=silent_s)
    assert waited_s == expected_s


async def test_no_worker_is_blamed_for_the_silence_of_relays(tmp_path: Path) -> None:
    feed, (first, second, third) = _feed_of([True] * 3, [1] * 3)
    assert await _given_up_after(feed, tmp_path, first, silent_s=lambda now: now) == 10 * LONG_S
    assert [path.name for path in tmp_path.iterdir()] == [f"{first.hex()}.missing"]
    assert await _given_up_after(feed, tmp_path, second) == LONG_S
    # Nobody was silent about the second one.
    assert await _given_up_after(feed, tmp_path, third) == AGAIN_S


async def test_worker_that_hides_its_work_again_gains_little_from_silent_relays(
    tmp_path: Path,
) -> None:
    feed, (first, second) = _feed_of([True, True], [1, 1])
    assert await _given_up_after(feed, tmp_path, first) == LONG_S
    waited_s = await _given_up_after(feed, tmp_path, second, silent_s=lambda now: now)
    assert waited_s == 10 * AGAIN_S


async def test_sites_never_give_up_what_a_silent_relay_may_have(tmp_path: Path) -> None:
    feed, (lost,) = _feed_of([True], [1])
    waited_s = await _given_up_after(feed, tmp_path, lost, math.inf, silent_s=lambda now: now)
    assert waited_s == math.inf
